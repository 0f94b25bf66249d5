"""Random loops in which threads walk over an array: `for (k = lane; k < size; k += 32)`."""

from __future__ import annotations

from . import program as p
from .choices import Context, Scope, spanned
from .memory import Memory
from .program import FLOAT, INT, UINT, ULONG, Expr, Stmt, Type, Var

SUM = (-(1 << 20), 1 << 20)


class Walks(Memory):
    def walk(self, ctx: Context) -> list[Stmt]:
        """Such a loop, with a sum of what it finds."""
        arrays = [v for v in self.visible() if v.kind == "input" and v.size > 1
                  and isinstance(v.type, Type) and v.type is not p.BOOL]  # fmt: skip
        if ctx.function is not None or ctx.loops >= 2 or not self.contiguous or not arrays:
            return self.assign(ctx)
        array = self.rng.choice(arrays)
        total = self.declare(Var(self.fresh(), FLOAT if array.type is FLOAT else INT, span=SUM))
        start, test, step, k = self._head(array.size, ctx)
        self.scopes.append(Scope())
        self.declare(k)
        inner = ctx.deeper(uniform=False, barrier=False, loop="free", loops=ctx.loops + 1)
        body = self._visit(array, k, total, inner)
        self.scopes.pop()
        made: list[Stmt] = [p.Decl(total, p.Lit(0, total.type)), p.For(start, test, step, body)]
        if ctx.sync and self.odds(0.5):
            op = self.rng.choice(("simd_sum", "simd_max", "simd_prefix_inclusive_sum"))
            value = self.fit(spanned(p.Name(total), SUM), INT, -999, 999)
            whole = self.declare(Var(self.fresh(value), INT, span=(-32 * 999, 32 * 999)))
            made.append(p.Decl(whole, spanned(p.Sync(op, [value], INT), whole.span)))
        return made

    def _head(self, size: int, ctx: Context) -> tuple[p.Decl, Expr, Stmt, Var]:
        """A loop's head; its variable is not declared yet."""
        rng = self.rng
        first: Expr = rng.choice((
            p.Attr("thread_index_in_simdgroup"), p.Attr("thread_index_in_threadgroup"),
            p.Name(self.lid), p.Name(self.gid),
        ))  # fmt: skip
        by: Expr = p.Lit(rng.choice((32, 32, 32, 64, 33, 16, 8)), UINT)
        if self.kind == "group" and self.odds(0.4):
            by = p.Name(self.group_size)
        if self.odds(0.3):
            first = p.Bin("+", first, p.Lit(rng.randint(1, 40), UINT), UINT)
        kind = rng.choice((UINT, UINT, UINT, INT, ULONG))
        k = Var(self.fresh(), kind, span=(0, size - 1), locked=True)
        name = spanned(p.Name(k), k.span)
        if kind is INT and self.odds(0.5):  # from the end down
            last = p.Bin("-", p.Lit(size - 1, INT), p.Cast(first, INT), INT)
            down = p.Assign(name, "-=", p.Lit(32, INT))
            return p.Decl(k, last), self.compare(">=", name, p.Lit(0, INT)), down, k
        if kind is INT:
            first, by = p.Cast(first, INT), p.Cast(by, INT)
        bound: Expr = p.Lit(size - rng.choice((0, 0, 1, min(size - 1, 9))), kind)
        if self.odds(0.3):
            n = UINT if kind is ULONG else kind
            bound = self.fit(self.uniform(n, 1, ctx.deeper(sync=False)), n, 0, size)
        step: Stmt = p.Assign(name, "+=", by)
        if self.odds(0.2):
            step = p.Assign(name, "=", p.Bin("+", name, by, p.common(kind, by.type)))
        return p.Decl(k, first), self.compare("<", name, bound), step, k

    def _visit(self, array: Var, k: Var, total: Var, ctx: Context) -> list[Stmt]:
        """What is done with an element: loads behind guards, divisions, jumps, a sum."""
        rng, out = self.rng, list[Stmt]()
        kind = array.type
        element: Expr = spanned(p.Index(array, p.Name(k)), array.span)
        if self.odds(0.5):
            name = self.fresh(p.Bin("+", element, p.Name(total), total.type))
            v = Var(name, kind, span=array.span, const=True)
            self.declare(v)
            out.append(p.Decl(v, element))
            element = spanned(p.Name(v), v.span)
        if self.odds(0.25):
            leave = p.Jump(rng.choice(("continue", "break")))
            out.append(p.If(self.boolean(1, ctx.deeper(sync=False)), [leave], []))
        if self.odds(0.4):
            out += self.statements(ctx, 1)
            if not all(map(self.sees, (array, k, total))):
                return out
        target = spanned(p.Name(total), total.span)
        add: Stmt = p.Assign(target, "+=", self.fit(element, total.type, -99, 99))
        roll = rng.random()
        if roll < 0.25:
            out.append(p.If(self.boolean(1, ctx.deeper(sync=False)), [add], []))
        elif roll < 0.45:
            ahead = rng.randint(1, 9)
            there = spanned(p.Bin("+", p.Name(k), p.Lit(ahead, UINT), p.common(k.type, UINT)),
                            (0, array.size - 1))  # fmt: skip
            other = spanned(p.Index(array, there), array.span)
            guard = self.compare("<", p.Name(k), p.Lit(max(array.size - ahead, 0), k.type))
            more = p.Assign(target, "+=", self.fit(other, total.type, -99, 99))
            out += [add, p.If(guard, [more], [])]
        elif roll < 0.65 and kind is INT:
            divisor = p.Index(array, p.Lit(rng.randrange(array.size), UINT))
            guard = self.compare("!=", divisor, p.Lit(0, INT))
            value = p.Bin(rng.choice("/%"), self.fit(element, INT, -99, 99), divisor, INT)
            out.append(p.If(guard, [p.Assign(target, "+=", value)], []))
        else:
            out.append(add)
        return out
