"""Random statements."""

from __future__ import annotations

from . import program as p
from .choices import HELD, VECTOR, Context, Scope, p_kind, spanned
from .program import BOOL, FLOAT, HALF, INT, UINT, Expr, Stmt, Type, Var, Vector
from .walks import Walks

SLOTS, FLOATS = 8, 4  # elements of the outputs y and z per thread


class Statements(Walks):
    """A method for each kind of statement gives the list of statements that it takes."""

    # -- simple statements -------------------------------------------------------------------------

    def writable(self, ctx: Context) -> list[Var]:
        return [
            v for v in self.visible()
            if not v.const and not v.locked and v.kind in ("value", "array", "ref", "pointer")
            and (not v.uniform or (ctx.uniform and ctx.function is None))
        ]  # fmt: skip

    def place(self, v: Var, ctx: Context) -> Expr | None:
        """An element that may be written now."""
        shared = v.target is not None and v.target.kind == "shared"
        if shared and (ctx.function is not None or not v.own or not self.own(v.target)):
            return None
        if v.kind in ("value", "ref"):
            return p.Name(v)
        if v.kind == "pointer":
            if v.const:
                return None
            if v.own or self.odds(0.3):
                return p.Deref(v)
            return p.Index(v, self.index(v.size, ctx.deeper(sync=False)))
        return p.Index(v, self.index(v.size, ctx.deeper(sync=False)))

    def assign(self, ctx: Context) -> list[Stmt]:
        choices = self.writable(ctx)
        if self.odds(0.15) and ctx.function is None:
            return self.output(ctx)
        for _ in range(4):
            if not choices:
                break
            v = self.rng.choice(choices)
            target = self.place(v, ctx)
            if target is not None:
                return [self.assign_to(target, v, ctx)]
        return self.output(ctx) if ctx.function is None else []

    def assign_to(self, target: Expr, v: Var, ctx: Context) -> Stmt:
        rng = self.rng
        kind = target.type
        if isinstance(kind, Vector):
            return self.assign_vector(target, kind, ctx)
        assert isinstance(kind, Type)
        make = self.uniform if v.uniform else self.expr
        roll = rng.random()
        if roll < 0.45 or kind is BOOL:
            return p.Assign(target, "=", self.held(make(kind, 3, ctx), kind))
        if roll < 0.6 and kind is not HALF:
            return p.Step(target, rng.choice(("++", "--")), self.odds(0.5))
        unsigned = kind.kind == "uint"
        if roll < 0.85:
            other = rng.choice([t for t in self.types if t is not BOOL])
            if not kind.integer and other.bits == 64:
                other = INT
            small = self.fit(
                make(other, 2, ctx), other, *((0, 9) if other.kind == "uint" else (-9, 9))
            )
            if unsigned and other is kind:
                small = make(kind, 2, ctx)
            if unsigned and other.kind == "float":
                small = self.fit(small, INT, -9, 9)
            return p.Assign(target, rng.choice(("+=", "-=")), small)
        if not kind.integer:
            return p.Assign(target, "*=", self.fit(make(kind, 2, ctx), kind, -1, 1))
        op = rng.choice(("*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
        if op == "*=" or (op == "<<=" and not unsigned):
            low, high = HELD[kind] if unsigned and kind.bits >= 32 else (-1, 1)
            return p.Assign(
                target,
                "*=",
                self.fit(make(kind, 2, ctx), kind, max(low, 0 if unsigned else low), high),
            )
        if op in ("<<=", ">>="):
            return p.Assign(target, op, make(UINT, 2, ctx))
        if op in ("/=", "%="):
            return p.Assign(target, op, self.lit(p.common(kind, kind), 1, 17))
        value = make(kind, 2, ctx)
        if not unsigned:
            value = self.fit(value, kind, 0, 63)
        return p.Assign(target, op, value)

    def assign_vector(self, target: Expr, kind: Vector, ctx: Context) -> Stmt:
        rng = self.rng
        low, high = VECTOR[kind.base]
        roll = rng.random()
        plain = ctx.deeper(sync=False) if roll >= 0.4 else ctx
        if roll < 0.4:
            return p.Assign(target, "=", self.tame(self.vector(kind, 2, ctx), kind, ctx))
        if roll < 0.6:
            place: Expr = p.Swizzle(target, rng.choice("xyzw"[: kind.lanes]))
        elif roll < 0.75:
            place = p.Component(target, self.index(kind.lanes, plain))
        else:
            letters = rng.sample("xyzw"[: kind.lanes], rng.randint(2, kind.lanes))
            smaller = Vector(kind.base, len(letters))
            place = p.Swizzle(target, "".join(letters))
            return p.Assign(place, "=", self.small_vector(smaller, plain))
        value = self.fit(self.expr(kind.base, 2, ctx), kind.base, low, high)
        return p.Assign(place, "=", value)

    def tame(self, e: Expr, kind: Vector, ctx: Context) -> Expr:
        low, high = VECTOR[kind.base]
        if low <= e.span[0] and e.span[1] <= high:
            return e
        return self.small_vector(kind, ctx.deeper(sync=False))

    def output(self, ctx: Context) -> list[Stmt]:
        """A write to one of this thread's elements of the outputs."""
        floats = self.odds(0.3)
        slot = self.slot(floats, self.rng.randrange(FLOATS if floats else SLOTS))
        kind = FLOAT if floats else INT
        if self.odds(0.15) and not floats:
            return [p.Assign(slot, "+=", self.fit(self.expr(INT, 2, ctx), INT, -99, 99))]
        return [p.Assign(slot, "=", self.expr(kind, 3, ctx))]

    def read_back(self, ctx: Context) -> list[Stmt]:
        """A read of one of this thread's elements of the outputs."""
        if ctx.function is not None:
            return self.assign(ctx)
        slot = self.slot(False, self.rng.randrange(SLOTS))
        value = self.fit(spanned(slot, INT.limits), INT, *HELD[INT])
        var = self.declare(Var(self.fresh(slot), INT, span=HELD[INT]))
        return [p.Decl(var, value)]

    def slot(self, floats: bool, c: int) -> p.Index:
        out = self.outputs[1 if floats else 0]
        if self.moved:
            return p.Index(out, p.Lit(c, INT))
        per = p.Lit(FLOATS if floats else SLOTS, UINT)
        scaled = p.Bin("*", p.Name(self.gid), per, UINT)
        return p.Index(out, p.Bin("+", scaled, p.Lit(c, UINT), UINT))

    def effect(self, ctx: Context) -> list[Stmt]:
        """A call of a helper or lambda for its effects, or with references and pointers."""
        lambdas = [f for s in self.scopes for f in s.lambdas]
        fits = [
            f for f in (*self.functions, *lambdas)
            if (ctx.sync or not f.synchronises) and (ctx.barrier or not f.barriers)
        ]  # fmt: skip
        if not fits or ctx.function is not None:
            return self.assign(ctx)
        f = self.rng.choice(fits)
        args: list[Expr] = []
        plain = ctx if self.odds(0.3) else ctx.deeper(sync=False)
        for q, mode in zip(f.params, f.modes, strict=True):
            if mode == "value":
                args.append(self.held(self.expr(p_kind(q), 1, plain), p_kind(q)))
                continue
            place = self.argument(q, mode, ctx)
            if place is None or any(_same(place, a) for a in args):
                return self.assign(ctx)
            args.append(place)
        made = spanned(p.Call(f, args), HELD.get(f.type, (0, 0)))  # type: ignore[arg-type]
        if f.type is p.VOID or self.odds(0.2):
            return [p.Do(made)]
        assert isinstance(f.type, Type)
        used = {n.var for n in p.walk(made) if isinstance(n, p.Name)}
        used |= {n.base for n in p.walk(made) if isinstance(n, p.Address)}
        free = [v for v in self.writable(ctx) if v.type is f.type and v.kind == "value"
                and not v.uniform and v not in used]  # fmt: skip
        if free:
            return [p.Assign(p.Name(self.rng.choice(free)), "=", made)]
        var = self.declare(Var(self.fresh(made), f.type, span=HELD[f.type]))
        return [p.Decl(var, made)]

    def argument(self, q: Var, mode: str, ctx: Context) -> Expr | None:
        """A place for a reference or pointer parameter."""
        rng = self.rng
        if q.space == "thread":
            names = [v for v in self.writable(ctx) if v.type is q.type and not v.uniform
                     and v.kind == "value"]  # fmt: skip
            arrays = [v for v in self.writable(ctx) if v.type is q.type and v.kind == "array"
                      and v.size >= q.size]  # fmt: skip
            if mode == "ref":
                if names and self.odds(0.7):
                    return p.Name(rng.choice(names))
                if arrays:
                    v = rng.choice(arrays)
                    return p.Index(v, self.lit(INT, 0, v.size - 1))
                return None
            if arrays and (q.size > 1 or self.odds(0.5)):
                v = rng.choice(arrays)
                room = v.size - q.size
                return p.Address(
                    v, self.lit(INT, 0, room) if room else None, self.odds(0.3) and room > 0
                )
            return p.Address(rng.choice(names), None, True) if names and q.size == 1 else None
        kinds = {"device": "input", "constant": "table", "threadgroup": "shared"}
        found = [v for v in self.visible() if v.kind == kinds[q.space] and v.type is q.type
                 and v.size >= q.size and v.spelling[:6] != "atomic"]  # fmt: skip
        if q.space == "device" and not self.contiguous:
            return None
        return p.Address(rng.choice(found), None, False) if found else None

    def meet(self, ctx: Context) -> list[Stmt]:
        """A call of a helper that holds barriers."""
        helpers = [f for f in self.functions if f.barriers]
        if not ctx.barrier or not helpers or not self.shared:
            return self.exchange(ctx)
        f = self.rng.choice(helpers)
        fits = [v for v in self.shared if v.type is f.type and self.sees(v)]
        if not fits:
            return self.exchange(ctx)
        v = self.rng.choice(fits)
        kind = p_kind(v)
        value = self.fit(self.expr(kind, 1, ctx.deeper(sync=False)), kind, *v.span)
        out: list[Stmt] = []
        if not self.own(v):
            var = self.declare(Var(self.fresh(value), kind, span=v.span, const=True))
            out += [p.Decl(var, value, spec="const "), *self.barrier(ctx)]
            value = spanned(p.Name(var), v.span)
        args = [p.Address(v, None, False), p.Name(self.lid), p.Name(self.group_size), value]
        made = spanned(p.Call(f, args), v.span)
        self.state = dict.fromkeys(self.state, "any")
        self.state[v.id] = "cross"
        var = self.declare(Var(self.fresh(made), kind, span=v.span))
        return [*out, p.Decl(var, made)]

    def jump_out(self, ctx: Context) -> list[Stmt]:
        """An early return, ``break`` or ``continue``."""
        kinds = []
        if self.has("returns") and ctx.function is None and self.odds(0.5):
            kinds.append("return")
        if ctx.loop:
            kinds += ["break", "continue"]
        if not kinds:
            return self.assign(ctx)
        kind = self.rng.choice(kinds)
        together = ctx.loop == "uniform" and kind != "return"
        if together and not ctx.uniform:
            return self.assign(ctx)
        test = self.uniform_test(1, ctx) if together or self.odds(0.2) else self.boolean(2, ctx)
        body: list[Stmt] = (
            [] if self.odds(0.7) else self.assign(ctx.deeper(uniform=False, barrier=False))
        )
        body.append(p.Return() if kind == "return" else p.Jump(kind))
        return [p.If(test, body, [], braces=self.odds(0.6))]

    # -- control flow ------------------------------------------------------------------------------

    def inner(self, ctx: Context, count: int) -> list[Stmt]:
        self.scopes.append(Scope())
        body = self.statements(ctx, count)
        self.scopes.pop()
        return body

    def branch(self, ctx: Context) -> list[Stmt]:
        constexpr = self.has("constexpr_if") and self.odds(0.3) and bool(self.template_ints)
        if constexpr:
            v = self.rng.choice(self.template_ints)
            test: Expr = (
                p.Name(v) if v.type is BOOL else self.compare("<", p.Name(v), self.lit(INT))
            )
            inner = ctx.deeper()
        elif ctx.uniform and self.odds(0.35):
            test, inner = self.uniform_test(2, ctx), ctx.deeper()
        elif self.row_tests and ctx.in_kernel and self.odds(0.3):
            test = self.rng.choice(self.row_tests)
            inner = ctx.deeper(uniform=False, barrier=False)
        elif ctx.sync and self.odds(0.25):
            kind = self.rng.choice((INT, UINT))
            total = self.reduction("simd", 32, kind, self.expr(kind, 1, ctx))
            test = self.compare(self.rng.choice(("<", ">=", "!=")), total, self.lit(kind))
            inner = ctx.deeper(uniform=False, barrier=False)
        else:
            test, inner = self.boolean(3, ctx), ctx.deeper(uniform=False, barrier=False)
        before = dict(self.state)
        yes = self.inner(inner, self.rng.randint(1, 3))
        after = dict(self.state)
        no: list[Stmt] = []
        if inner.barrier:
            self.state = before
        if self.odds(0.5):
            no = self.inner(inner, self.rng.randint(1, 2))
        if inner.barrier:
            self.state = {k: _joined(v, self.state.get(k, "none")) for k, v in after.items()}
        return [p.If(test, yes, no, constexpr, braces=self.odds(0.8) or bool(no))]

    def loop(self, ctx: Context) -> list[Stmt]:
        """A loop that ends after a few rounds."""
        rng = self.rng
        if ctx.loops >= 2:
            return self.assign(ctx)
        together = ctx.uniform and (self.odds(0.6) if ctx.barrier else self.odds(0.4))
        barriers = together and ctx.barrier
        inner = ctx.deeper(
            uniform=together, barrier=barriers, loop="uniform" if barriers else "free",
            loops=ctx.loops + 1,
        )  # fmt: skip
        before = dict(self.state)
        if barriers:
            self.state = dict.fromkeys(self.state, "none")
        shape = rng.choice(("for", "for", "for", "while", "do", "vote"))
        if shape == "vote" and not ctx.sync:
            shape = "while"
        made = getattr(self, f"_{shape}")(ctx, inner, together)
        if barriers:
            self.state = dict.fromkeys(before, "none")
        return list(made)

    def _rounds(self, ctx: Context, together: bool, kind: Type) -> Expr:
        """How often a loop goes round."""
        if together:
            if self.odds(0.5):
                return self.lit(kind, 1, 4)
            return self.fit(self.uniform(kind, 1, ctx), kind, 0, 4)
        plain = ctx.deeper(sync=False)  # evaluated in each round
        return self.fit(self.expr(kind, 2, plain), kind, 0, 5)

    def _counter(self, kind: Type, span: tuple[int, int], together: bool) -> Var:
        k = Var(self.fresh(), kind, span=span, locked=True, uniform=together)
        return k

    def _for(self, ctx: Context, inner: Context, together: bool) -> list[Stmt]:
        kind = self.rng.choice((INT, UINT))
        bound = self._rounds(ctx, together, kind)
        pre: list[Stmt] = []
        if not isinstance(bound, p.Lit) and (not together or self.odds(0.5)):
            # The bound stays as it is while the loop runs.
            n = Var(self.fresh(bound), kind, span=(0, 5), const=True, uniform=together)
            self.declare(n)
            pre.append(p.Decl(n, bound, spec="const "))
            bound = spanned(p.Name(n), n.span)
        self.scopes.append(Scope())
        k = Var(self.fresh(bound), kind, span=(0, 5), locked=True, uniform=together)
        self.declare(k)
        name = p.Name(k)
        shape = self.rng.random()
        if shape < 0.6:
            start, test = p.Decl(k, p.Lit(0, kind)), self.compare("<", name, bound)
            step: Stmt = p.Step(name, "++", self.odds(0.6))
        elif shape < 0.8:
            start, test = p.Decl(k, bound), self.compare(">", name, p.Lit(0, kind))
            step = p.Step(name, "--", self.odds(0.6))
        else:
            start, test = p.Decl(k, p.Lit(1, kind)), self.compare("<=", name, bound)
            step = p.Assign(name, *self.rng.choice((("<<=", p.Lit(1, INT)), ("+=", p.Lit(2, INT)))))
        body = self.statements(inner, self.rng.randint(1, 3))
        self.scopes.pop()
        return [*pre, p.For(start, test, step, body)]

    def _while(self, ctx: Context, inner: Context, together: bool) -> list[Stmt]:
        kind = self.rng.choice((INT, UINT))
        bound = self._rounds(ctx, together, kind)
        k = self._counter(kind, (0, 5), together)
        k.name = self.fresh(bound)
        self.declare(k)
        name = p.Name(k)
        test: Expr = self.compare(">", name, p.Lit(0, kind))
        if self.odds(0.25):
            extra = (
                self.uniform_test(1, ctx)
                if together
                else self.boolean(2, inner.deeper(sync=self.odds(0.5) and inner.sync))
            )
            parts = (test, extra)
            if _synchronises(extra) and not self.has("sync_branches"):
                parts = (extra, test)
            test = spanned(p.Bin("&&", *parts, BOOL), (0, 1))
        body: list[Stmt] = [p.Step(name, "--", self.odds(0.5))]
        body += self.inner(inner, self.rng.randint(1, 3))
        return [p.Decl(k, bound), p.While(test, body)]

    def _do(self, ctx: Context, inner: Context, together: bool) -> list[Stmt]:
        kind = self.rng.choice((INT, UINT))
        bound = self._rounds(ctx, together, kind)
        k = self._counter(kind, (0, 5), together)
        k.name = self.fresh(bound)
        self.declare(k)
        name = p.Name(k)
        body: list[Stmt] = [p.Step(name, "++", self.odds(0.5))]
        body += self.inner(inner, self.rng.randint(1, 3))
        limit = bound if isinstance(bound, p.Lit) else self.lit(kind, 1, 4)
        test = self.compare("<", name, limit)
        if not together and not isinstance(bound, p.Lit):
            test = spanned(
                p.Bin("&&", test, self.boolean(1, inner.deeper(sync=False)), BOOL), (0, 1)
            )
        start = p.Lit(0, kind) if isinstance(bound, p.Lit) else bound
        if together and not isinstance(bound, p.Lit):
            start = bound
        return [p.Decl(k, start), p.While(test, body, do=True)]

    def _vote(self, ctx: Context, inner: Context, together: bool) -> list[Stmt]:
        """``while (simd_any(k > 0))``."""
        if together and ctx.barrier:
            return self._while(ctx, inner, together)
        inner = inner.deeper(uniform=False, barrier=False, loop="free")
        k = Var(self.fresh(), INT, span=(-20, 5), locked=True)
        start = self.fit(self.expr(INT, 2, ctx), INT, 0, 5)
        k.name = self.fresh(start)
        self.declare(k)
        name = p.Name(k)
        running = self.compare(">", name, p.Lit(0, INT))
        op = self.rng.choice(("simd_any", "simd_any", "simd_all", "quad_any"))
        test = spanned(p.Sync(op, [running], BOOL), (0, 1))
        if self.odds(0.2):
            total = spanned(p.Sync("simd_max", [name], INT), (-20, 5))
            test = self.compare(">", total, p.Lit(0, INT))
        if self.odds(0.5):
            active = self.inner(inner, self.rng.randint(1, 2))
            body: list[Stmt] = [p.If(running, [p.Step(name, "--", True), *active], [])]
            return [p.Decl(k, start), p.While(test, body)]
        body = [p.Step(name, "--", self.odds(0.5)), *self.inner(inner, self.rng.randint(1, 2))]
        return [p.Decl(k, start), p.While(test, body, do=self.odds(0.2))]

    def switch(self, ctx: Context) -> list[Stmt]:
        cases = self.rng.randint(2, 4)
        value = self.fit(self.expr(INT, 2, ctx), INT, 0, cases)
        sync = ctx.sync and self.has("sync_switch")
        inner = ctx.deeper(uniform=False, barrier=False, sync=sync, loop="")
        bodies = [self.inner(inner, 1) for _ in range(cases)]
        return [p.Switch(value, bodies)]

    def block(self, ctx: Context) -> list[Stmt]:
        return [p.Block(self.inner(ctx.deeper(), self.rng.randint(1, 3)))]

    # -- lists of statements -----------------------------------------------------------------------

    def statements(self, ctx: Context, count: int) -> list[Stmt]:
        table: list[tuple[float, object]] = [
            (14, self.decl), (18, self.assign), (8, self.output), (5, self.decl_array),
            (6, self.jump_out), (4, self.effect), (2, self.block),
        ]  # fmt: skip
        if ctx.depth < 4:
            table += [(10, self.branch), (10, self.loop), (10, self.walk)]
        if self.has("pointers"):
            table.append((4, self.decl_pointer))
        if self.has("refs"):
            table.append((4, self.decl_ref))
        if self.has("tables"):
            table.append((1.5, self.decl_table))
        if self.has("lambdas") and ctx.function is None:
            table.append((3, self.decl_lambda))
        if self.has("macros") and ctx.function is None:
            table.append((3, self.define))
        if self.has("macro_effects") and ctx.function is None:
            table += [(4, self.define), (6, self.assign_by_macro)]
        if self.has("switch"):
            table.append((3, self.switch))
        if self.has("atomics"):
            table.append((4, self.atomic))
        if self.kind == "group":
            table += [(12, self.exchange), (3, self.one), (4, self.barrier)]
            table += [(4, self.simd_exchange), (2 * self.has("sync_helpers"), self.meet)]
        if self.has("reads_output"):
            table.append((2, self.read_back))
        if ctx.function is not None:
            table = [(w, m) for w, m in table if m not in (self.output, self.jump_out)]
        out: list[Stmt] = []
        makers = [m for _, m in table]
        weights = [w for w, _ in table]
        for _ in range(count):
            (make,) = self.rng.choices(makers, weights)
            out += make(ctx)  # type: ignore[operator]
        return out

    outputs: list[Var]
    moved = False
    smallest_group = 1

    def __init__(self, seed: int, avoid: frozenset[str] = frozenset()) -> None:
        super().__init__(seed, avoid)
        self.shared: list[Var] = []
        self.single: list[Var] = []
        self.bins: list[Var] = []
        self.template_ints: list[Var] = []
        self.assigning: list[tuple[str, str]] = []


def _joined(a: str, b: str) -> str:
    """What may be done with memory after either of two pasts."""
    if a == b or b == "any":
        return a
    return b if a == "any" else "none"


def _same(a: Expr, b: Expr) -> bool:
    """Whether two arguments may lead to one variable."""
    return bool(_variables(a) & _variables(b))


def _variables(e: Expr) -> set[Var]:
    found = {getattr(n, f, None) for n in p.walk(e) for f in ("var", "base")}
    return {v for v in found if isinstance(v, Var)}


def _synchronises(e: Expr) -> bool:
    return any(isinstance(n, p.Sync) for n in p.walk(e))
