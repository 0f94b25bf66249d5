"""Random exchanges through threadgroup memory, with barriers, without races."""

from __future__ import annotations

from . import program as p
from .choices import HELD, Context, p_kind, spanned
from .declarations import Declarations
from .program import BOOL, FLOAT, INT, UINT, Stmt, Var

BINS = 16
_FLAGS = ("mem_flags::mem_threadgroup",) * 5 + (
    "metal::mem_flags::mem_threadgroup", "mem_flags::mem_device | mem_flags::mem_threadgroup",
)  # fmt: skip


class Memory(Declarations):
    """Threadgroup memory is in one of four states between two barriers (`Choices.state`)."""

    # -- threadgroup memory ------------------------------------------------------------------------

    def barrier(self, ctx: Context) -> list[Stmt]:
        if not ctx.barrier:
            return self.assign(ctx)
        self.state = dict.fromkeys(self.state, "any")
        return [p.Barrier(flags=self.rng.choice(_FLAGS))]

    def exchange(self, ctx: Context) -> list[Stmt]:
        """Each thread writes its element; after a barrier they read each other's."""
        if ctx.function is not None or not self.shared:
            return self.assign(ctx)
        out: list[Stmt] = []
        if ctx.barrier and ctx.depth and self.odds(0.25):
            out += self.new_shared(ctx)
        v = self.rng.choice([v for v in self.shared if self.sees(v)] or [None])
        if v is None:
            return self.assign(ctx)
        if self.state[v.id] not in ("any", "own"):
            if not ctx.barrier:
                return self.assign(ctx)
            out += self.barrier(ctx)
        kind = p_kind(v)
        value = self.fit(self.expr(kind, 2, ctx), kind, *v.span)
        if not self.own(v):  # the value read it
            if not ctx.barrier:
                return out
            var = self.declare(Var(self.fresh(value), kind, span=v.span, const=True))
            out += [p.Decl(var, value, spec="const "), *self.barrier(ctx)]
            value = spanned(p.Name(var), v.span)
            self.own(v)
        out.append(p.Assign(p.Index(v, p.Name(self.lid)), "=", value))
        if ctx.barrier and self.odds(0.9):
            out += self.barrier(ctx)
            read = self.fit(self.cross(v, ctx), kind, *HELD[kind])
            if self.odds(0.6):
                var = self.declare(Var(self.fresh(read), kind, span=v.span))
                out.append(p.Decl(var, read))
            else:
                out += self.assign(ctx)
        return out

    def new_shared(self, ctx: Context) -> list[Stmt]:
        """Threadgroup memory declared in an inner block."""
        kind = self.rng.choice((INT, FLOAT, UINT))
        span = (0, 200) if kind is UINT else (-100, 100)
        var = Var(self.fresh(), kind, "shared", self.group_threads, "threadgroup", span)
        self.declare(var)
        self.shared.append(var)
        self.state[var.id] = "none"
        return [p.Decl(var), *self.exchange_of(var, ctx)]

    def exchange_of(self, v: Var, ctx: Context) -> list[Stmt]:
        """Every element of new memory is written before any is read."""
        kind = p_kind(v)
        value = self.fit(self.expr(kind, 1, ctx), kind, *v.span)
        out = self.barrier(ctx)
        self.own(v)
        out.append(p.Assign(p.Index(v, p.Name(self.lid)), "=", value))
        return [*out, *self.barrier(ctx)]

    def one(self, ctx: Context) -> list[Stmt]:
        """A single threadgroup variable that one thread sets for all."""
        if not ctx.barrier or not self.single:
            return self.exchange(ctx)
        v = self.rng.choice(self.single)
        out = self.barrier(ctx) if self.odds(0.7) or self.state[v.id] != "any" else []
        first = p.Bin("==", p.Name(self.lid), p.Lit(0, UINT), BOOL)
        value = self.fit(self.expr(p_kind(v), 2, ctx.deeper(sync=False)), p_kind(v), *v.span)
        out += [p.If(first, [p.Assign(p.Name(v), "=", value)], [], braces=self.odds(0.5))]
        out += self.barrier(ctx)
        self.state[v.id] = "cross"
        var = self.declare(Var(self.fresh(), p_kind(v), span=v.span, uniform=ctx.uniform))
        return [*out, p.Decl(var, p.Name(v))]

    def atomic(self, ctx: Context) -> list[Stmt]:
        if ctx.function is not None or not self.has("atomics"):
            return self.assign(ctx)
        value = self.fit(self.expr(INT, 2, ctx), INT, -99, 99)
        index = self.index(BINS, ctx.deeper(sync=False))
        if not self.bins or not ctx.barrier or self.odds(0.5):
            return [p.AtomicAdd(self.outputs[2], index, value)]
        v = self.bins[0]
        out = self.barrier(ctx)
        plain = ctx.deeper(sync=False)
        rounds = p.Var("r", UINT, span=(0, BINS - 1), locked=True)
        zero = p.AtomicStore(v, p.Name(rounds), p.Lit(0, UINT))
        step = p.Assign(p.Name(rounds), "+=", p.Name(self.group_size))
        out.append(
            p.For(
                p.Decl(rounds, p.Name(self.lid)),
                p.Bin("<", p.Name(rounds), p.Lit(BINS, UINT), BOOL),
                step,
                [zero],
            )
        )
        out += self.barrier(ctx)
        add: Stmt = p.AtomicAdd(v, self.index(BINS, plain), self.expr(UINT, 1, plain))
        out.append(p.If(self.boolean(1, plain), [add], [], braces=False) if self.odds(0.4) else add)
        out += self.barrier(ctx)
        self.state[v.id] = "cross"
        load = spanned(p.AtomicLoad(v, self.index(BINS, plain)), UINT.limits)
        var = self.declare(Var(self.fresh(load), UINT, span=UINT.limits))
        return [*out, p.Decl(var, load)]

    def simd_exchange(self, ctx: Context) -> list[Stmt]:
        """Lanes of one simdgroup exchange through memory, with the simdgroup's barrier."""
        if not ctx.barrier or not self.shared or not self.has("simd_exchange"):
            return self.barrier(ctx)
        v = self.rng.choice([v for v in self.shared if self.sees(v)])
        kind = p_kind(v)
        value = self.fit(self.expr(kind, 1, ctx.deeper(sync=False)), kind, *v.span)
        var = self.declare(Var(self.fresh(value), kind, span=v.span, const=True))
        out: list[Stmt] = [p.Decl(var, value, spec="const "), *self.barrier(ctx)]
        own = p.Name(self.lid)
        out.append(p.Assign(p.Index(v, own), "=", p.Name(var)))
        out.append(p.Barrier("simdgroup_barrier"))
        partner = p.Bin("^", own, p.Lit(self.rng.choice((1, 2, 3)), UINT), UINT)
        there = p.Cond(p.Bin("<", partner, p.Name(self.group_size), BOOL), partner, own)
        got = Var(self.fresh(), kind, span=v.span)
        out.append(p.Decl(got, p.Index(v, there)))
        self.declare(got)
        if self.odds(0.5):
            out += [p.Barrier("simdgroup_barrier"), p.Assign(p.Index(v, own), "=", p.Name(got))]
        return [*out, *self.barrier(ctx)]
