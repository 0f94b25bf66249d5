"""Random expressions with defined values."""

from __future__ import annotations

from collections.abc import Callable

from . import program as p
from .choices import HELD, MOST, VECTOR, Choices, Context, Span, p_kind, p_type, spanned
from .program import BOOL, FLOAT, HALF, INT, UINT, Expr, Type, Var, Vector

MOVES = ("broadcast", "shuffle", "shuffle_up", "shuffle_down", "shuffle_xor", "shuffle_rotate_up",
         "shuffle_rotate_down")  # fmt: skip


class Expressions(Choices):
    """Random expressions of a wanted type."""

    lid: Var  # this thread's index in its threadgroup, and in the grid
    gid: Var

    # -- leaves ------------------------------------------------------------------------------------

    def attribute(self) -> Expr:
        group = max(self.group_threads, 1)
        choices: list[tuple[str, str, Span]] = [
            ("thread_index_in_threadgroup", "", (0, group - 1)),
            ("thread_index_in_simdgroup", "", (0, 31)),
            ("thread_index_in_quadgroup", "", (0, 3)),
            ("simdgroup_index_in_threadgroup", "", (0, 31)),
            ("quadgroup_index_in_threadgroup", "", (0, 255)),
            ("simdgroups_per_threadgroup", "", (1, 32)),
            ("thread_position_in_grid", "x", (0, 4095)),
            ("thread_position_in_threadgroup", "x", (0, 1023)),
            ("thread_position_in_threadgroup", "y", (0, 1023)),
            ("threadgroup_position_in_grid", "x", (0, 255)),
            ("threads_per_threadgroup", "x", (1, 1024)),
            ("thread_index_in_simdgroup", "", (0, 31)),
            ("thread_index_in_threadgroup", "", (0, group - 1)),
        ]
        if self.dims > 1:
            choices += [("thread_position_in_grid", "y", (0, 4095)),
                        ("thread_position_in_grid", "z", (0, 4095)),
                        ("thread_position_in_threadgroup", "z", (0, 1023)),
                        ("threadgroup_position_in_grid", "y", (0, 255))]  # fmt: skip
        name, axis, span = self.rng.choice(choices)
        return spanned(p.Attr(name, axis), span)

    group_threads = 1024
    dims = 1

    def may_read(self, v: Var) -> bool:
        """Whether threadgroup memory may be read anywhere now."""
        return self.state.get(v.id, "cross") in ("any", "cross")

    def leaves(self, kind: Type, ctx: Context) -> list[Callable[[], Expr]]:
        """Ways to name an existing value of this type."""
        found: list[Callable[[], Expr]] = []
        for v in self.visible():
            if v.type is not kind:
                continue
            if v.kind in ("value", "template", "scalar"):
                found.append(lambda v=v: spanned(p.Name(v), v.span))  # type: ignore[misc]
            elif ctx.function is not None and v.target is not None and v.target.kind == "shared":
                continue  # a lambda runs when it is called, not here
            elif v.kind == "ref":
                if v.target is None or v.own or v.target.kind != "shared":
                    if v.target is not None and v.own and not self.own(v.target):
                        continue
                    found.append(lambda v=v: spanned(p.Name(v), v.span))  # type: ignore[misc]
            elif v.kind in ("array", "table"):
                found.append(lambda v=v: self.element(v, ctx))  # type: ignore[misc]
            elif v.kind == "pointer":
                found.append(lambda v=v: self.through(v, ctx))  # type: ignore[misc]
            elif v.kind == "input":
                found.append(lambda v=v: self.input(v, ctx))  # type: ignore[misc]
            elif ctx.function is None and self.may_cross(v):
                found.append(lambda v=v: self.cross(v, ctx))  # type: ignore[misc]
        return found

    def open(self, v: Var) -> bool:
        """Whether plain loads and stores may touch this threadgroup array."""
        return v.size > 0 and not v.spelling.startswith("atomic")

    def may_cross(self, v: Var) -> bool:
        """Whether this is a threadgroup array whose every element may be read now."""
        return v.kind == "shared" and self.open(v) and self.may_read(v)

    def own(self, v: Var) -> bool:
        """Whether a thread may touch its own element now; if so, only that from now on."""
        if self.state.get(v.id) in ("any", "own"):
            self.state[v.id] = "own"
            return True
        return False

    def cross(self, v: Var, ctx: Context) -> Expr:
        self.state[v.id] = "cross"
        return spanned(p.Index(v, self.within_group(ctx)), v.span)

    def within_group(self, ctx: Context) -> Expr:
        """The index of some thread of this threadgroup."""
        e = self.fit(self.expr(UINT, 1, ctx), UINT, 0, (1 << 32) - 1)
        n = spanned(p.Name(self.group_size), (1, self.group_threads))
        return spanned(p.Bin("%", e, n, UINT), (0, self.group_threads - 1))

    group_size: Var

    def element(self, v: Var, ctx: Context) -> Expr:
        return spanned(p.Index(v, self.index(v.size, ctx)), v.span)

    def through(self, v: Var, ctx: Context) -> Expr:
        shared = v.target is not None and v.target.kind == "shared"
        if shared:
            assert v.target is not None
            allowed = self.own(v.target) if v.own else self.may_read(v.target)
            if not allowed:
                return self.lit(p_kind(v))
            if not v.own:
                self.state[v.target.id] = "cross"
        if v.own or self.odds(0.3) or v.size <= 1:
            return spanned(p.Deref(v), v.span)
        return spanned(p.Index(v, self.index(v.size, ctx)), v.span)

    def input(self, v: Var, ctx: Context) -> Expr:
        if v.size == 0:
            return self.lit(p_kind(v))
        index = self.index(v.size, ctx)
        if not self.contiguous:
            return spanned(p.Strided(v, index), v.span)
        return spanned(p.Index(v, index), v.span)

    def index(self, size: int, ctx: Context) -> Expr:
        """An expression with values ``0 … size - 1``."""
        if size == 1 or self.odds(0.2):
            return self.lit(self.rng.choice((INT, UINT)), 0, size - 1)
        if self.odds(0.4):
            fits = [
                v for v in self.visible()
                if v.kind == "value" and v.type in (INT, UINT) and v.locked
                and v.span[0] >= 0 and v.span[1] < size
            ]  # fmt: skip
            if fits:
                v = self.rng.choice(fits)
                return spanned(p.Name(v), v.span)
        e = self.expr(UINT, 1, ctx)
        if e.span[0] >= 0 and e.span[1] < size:
            return e
        if size & (size - 1) == 0 and self.odds(0.5):
            mask = spanned(p.Lit(size - 1, UINT), (size - 1, size - 1))
            return spanned(p.Bin("&", e, mask, UINT), (0, size - 1))
        n = spanned(p.Lit(size, UINT), (size, size))
        return spanned(p.Bin("%", e, n, UINT), (0, size - 1))

    # -- expressions -------------------------------------------------------------------------------

    def expr(self, kind: Type, depth: int, ctx: Context) -> Expr:
        """An expression of exactly this type."""
        rng = self.rng
        for _ in range(8):
            roll = rng.random()
            if depth <= 0 or roll < 0.25:
                made = self.leaf(kind, ctx)
            elif roll < 0.30 and depth > 0:
                made = self.uniform(kind, depth - 1, ctx)
            elif roll < 0.55:
                made = self.boolean(depth, ctx) if kind is BOOL else self.number(kind, depth, ctx)
            elif roll < 0.70 and ctx.sync:
                made = self.sync(kind, depth, ctx)
            elif roll < 0.76 and (self.functions or any(s.lambdas for s in self.scopes)):
                made = self.call(kind, depth, ctx)
            elif roll < 0.81:
                made = self.macro(kind, depth, ctx)
            elif roll < 0.86:
                made = self.ternary(kind, depth, ctx)
            elif roll < 0.91 and self.vector_types:
                made = self.of_vector(kind, depth, ctx)
            else:
                other = rng.choice([t for t in self.types if t is not kind])
                made = self.held(self.expr(other, depth - 1, ctx), kind)
            if made is not None:
                return made
        return self.lit(kind)

    def leaf(self, kind: Type, ctx: Context) -> Expr | None:
        if self.odds(0.2):
            return self.lit(kind)
        if kind is UINT and self.odds(0.35) and ctx.in_kernel:
            return self.attribute()
        found = self.leaves(kind, ctx)
        if found:
            return self.rng.choice(found)()
        if self.odds(0.5):
            return self.lit(kind)
        other = self.rng.choice(self.types)
        found = self.leaves(other, ctx)
        return self.held(self.rng.choice(found)(), kind) if found else self.lit(kind)

    def uniform(self, kind: Type, depth: int, ctx: Context) -> Expr:
        """An expression that every thread of a threadgroup finds equal."""
        if depth > 0 and self.odds(0.4):
            a = self.uniform(self.rng.choice((INT, UINT, kind)), depth - 1, ctx)
            b = self.uniform(kind if kind.integer else INT, depth - 1, ctx)
            if a.type is BOOL or b.type is BOOL:
                return self.held(a, kind)
            return self.held(self.arithmetic(self.rng.choice("+-*"), a, b), kind)
        options: list[Callable[[], Expr]] = [lambda: self.lit(kind)]
        for v in self.visible():
            if v.kind in ("scalar", "template") or (v.kind == "value" and v.uniform):
                if isinstance(v.type, Type):
                    options.append(lambda v=v: spanned(p.Name(v), v.span))  # type: ignore[misc]
            elif (
                v.kind == "input" and v.size and self.contiguous and not v.locked
            ) or v.kind == "table":
                options.append(
                    lambda v=v: spanned(p.Index(v, self.lit(INT, 0, v.size - 1)), v.span)  # type: ignore[misc]
                )
        if ctx.in_kernel:
            place = spanned(p.Attr("threadgroup_position_in_grid", "x"), (0, 255))
            options += [lambda: place] * 2
            options.append(lambda: spanned(p.Attr("threadgroups_per_grid", "x"), (1, 255)))
            options.append(lambda: spanned(p.Attr("threads_per_threadgroup", "x"), (1, 1024)))
        return self.held(self.rng.choice(options)(), kind)

    def uniform_test(self, depth: int, ctx: Context) -> Expr:
        a = self.uniform(self.rng.choice((INT, UINT)), depth, ctx)
        if self.odds(0.5):
            b = self.rng.choice((2, 3))
            a = self.fit(a, p_type(a), 0 if a.type is UINT else -b + 1, b - 1)
            return self.compare(self.rng.choice(("==", "!=")), a, self.lit(p_type(a), 0, 1))
        return self.compare(self.rng.choice(("<", ">", "<=", ">=")), a, self.lit(p_type(a), 0, 9))

    def boolean(self, depth: int, ctx: Context) -> Expr:
        rng = self.rng
        roll = rng.random()
        if roll < 0.55:
            kind = rng.choice([t for t in self.types if t is not BOOL])
            a = self.expr(kind, depth - 1, ctx)
            if kind.integer and self.odds(0.4):
                q = rng.randint(2, 5)
                a = self.fit(a, kind, 0 if kind.kind == "uint" else 1 - q, q - 1)
                return self.compare(rng.choice(("==", "!=")), a, self.lit(kind, 0, q - 1))
            b = self.lit(kind) if self.odds(0.5) else self.expr(kind, depth - 1, ctx)
            return self.compare(rng.choice(("<", ">", "<=", ">=", "==", "!=")), a, b)
        if roll < 0.75:
            right = ctx if self.has("sync_branches") else ctx.deeper(sync=False)
            return spanned(
                p.Bin(rng.choice(("&&", "||")), self.boolean(depth - 1, ctx)
                      if depth > 1 else self.expr(BOOL, 0, ctx),
                      self.expr(BOOL, depth - 1, right), BOOL), (0, 1),
            )  # fmt: skip
        if roll < 0.85:
            return spanned(p.Un("!", self.expr(BOOL, depth - 1, ctx), BOOL), (0, 1))
        if roll < 0.93 and ctx.sync:
            return self.sync(BOOL, depth, ctx) or self.lit(BOOL)
        lane = spanned(p.Attr("thread_index_in_simdgroup"), (0, 31))
        if not ctx.in_kernel:
            return self.compare("<", self.expr(UINT, 0, ctx), self.lit(UINT, 0, 9))
        bound = self.lit(UINT, 1, 31) if self.odds(0.6) else self.expr(UINT, depth - 1, ctx)
        return self.compare(rng.choice(("<", ">", "==", "!=", ">=")), lane, bound)

    def number(self, kind: Type, depth: int, ctx: Context) -> Expr:
        rng = self.rng
        roll = rng.random()
        if kind.integer and roll < 0.35:
            return self.integer(kind, depth, ctx)
        if roll < 0.5:
            return self.library(kind, depth, ctx)
        if roll < 0.58:
            inner = self.expr(kind, depth - 1, ctx)
            wide = p.common(kind, kind)
            if wide.kind == "uint":
                made: Expr = spanned(p.Un("-", inner, wide), wide.limits)
            else:
                made = spanned(p.Un("-", inner, wide), (-inner.span[1], -inner.span[0]))
            return self.held(made, kind)
        if roll < 0.63 and self.spare and ctx.post and ctx.function is None:
            v = self.spare.pop()
            return self.held(spanned(p.PostStep(v, rng.choice(("++", "--"))), (-99, 99)), kind)
        left, right = kind, kind
        if self.odds(0.25):
            smaller = [
                t for t in self.types if t.rank <= max(kind.rank, INT.rank) and t is not BOOL
            ]
            if kind.kind != "uint":
                smaller = [t for t in smaller if p.common(t, kind) is p.common(kind, kind)]
            right = rng.choice(smaller) if smaller else kind
        a, b = self.expr(left, depth - 1, ctx), self.expr(right, depth - 1, ctx)
        if kind is FLOAT and not self.exact and self.odds(0.5):
            # What is fused: a product beside one of the two, or beside another product.
            product = self.arithmetic("*", a, self.expr(kind, depth - 1, ctx))
            if self.odds(0.2):
                product = spanned(p.Un("-", product, kind), (-product.span[1], -product.span[0]))
            if self.odds(0.4):
                b = self.arithmetic("*", b, self.expr(kind, depth - 1, ctx))
            sides = (product, b) if self.odds(0.5) else (b, product)
            return self.held(self.arithmetic(rng.choice("+-"), *sides), kind)
        if kind is FLOAT and not self.exact and self.odds(0.15):
            divisor = spanned(p.Lit(rng.choice((3.0, 7.0, -1.5)), FLOAT), (1, 7))
            return spanned(p.Bin("/", a, divisor, FLOAT), a.span)
        return self.held(self.arithmetic(rng.choice("++-*"), a, b), kind)

    def integer(self, kind: Type, depth: int, ctx: Context) -> Expr:
        rng = self.rng
        op = rng.choice(("/", "%", "&", "|", "^", "<<", ">>", "~"))
        if kind is UINT and ctx.in_kernel and self.odds(0.2):
            return self.divided_position()
        a = self.expr(kind, depth - 1, ctx)
        wide = p.common(kind, kind)
        low, high = a.span
        if op in ("/", "%"):
            roll = rng.random()
            if roll < 0.4:
                b = self.lit(wide, 1, 17)
            elif roll < 0.7:  # one divisor for all threads: prepared outside their loop
                most = rng.choice((3, 15, 31, 100))
                b = self.arithmetic(
                    "+", self.fit(self.uniform(kind, 1, ctx), wide, 0, most),
                    spanned(p.Lit(1, wide), (1, 1)),
                )  # fmt: skip
            else:
                b = self.arithmetic(
                    "+", self.fit(self.expr(kind, depth - 1, ctx), wide, 0, 30),
                    spanned(p.Lit(1, wide), (1, 1)),
                )  # fmt: skip
            if b.span[0] < 1:
                b = self.lit(wide, 1, 17)
            if op == "/":
                span = (min(low, 0), max(high, 0))
            else:
                span = (1 - b.span[1] if low < 0 else 0, b.span[1] - 1)
            return self.held(spanned(p.Bin(op, a, b, wide), span), kind)
        if op == "~":
            span = wide.limits if wide.kind == "uint" else (-high - 1, -low - 1)
            return self.held(spanned(p.Un("~", a, wide), span), kind)
        if op in ("<<", ">>"):
            # The count is taken modulo the number of bits, whatever it is.
            count = self.expr(rng.choice((INT, UINT)), depth - 1, ctx)
            if self.odds(0.5):
                count = self.lit(INT, 0, 40)
            if op == "<<":
                return self.held(spanned(p.Bin("<<", a, count, wide), wide.limits), kind)
            return self.held(
                spanned(p.Bin(">>", a, count, wide), (min(low, 0), max(high, 0))), kind
            )
        b = self.expr(kind, depth - 1, ctx)
        least, most = min(low, b.span[0]), max(high, b.span[1], 1)
        bits = max(most.bit_length(), (-least - 1).bit_length() if least < 0 else 0)
        span = (0 if least >= 0 else -(1 << bits), (1 << bits) - 1)
        return self.held(spanned(p.Bin(op, a, b, wide), span), kind)

    def divided_position(self) -> Expr:
        """A position divided by the width of a simdgroup or so: the same for many threads."""
        v = self.rng.choice((self.lid, self.gid))
        e = spanned(p.Name(v), v.span) if self.odds(0.5) else self.attribute()
        by = self.rng.choice((32, 32, 64, 16, 31))
        if by == 32 and self.odds(0.3):
            return spanned(p.Bin(">>", e, p.Lit(5, INT), UINT), (0, e.span[1] // 32))
        divisor = p.Lit(by, self.rng.choice((INT, UINT)))
        return spanned(p.Bin("/", e, divisor, UINT), (0, e.span[1] // by))

    def library(self, kind: Type, depth: int, ctx: Context) -> Expr:
        rng = self.rng
        a = self.expr(kind, depth - 1, ctx)
        prefix = rng.choice(("", "", "metal::"))
        name = rng.choice(("min", "max", "clamp", "abs", "select", "fma", "popcount", "as_type"))
        if name == "abs" and kind.kind != "uint" and kind.bits >= 16:
            top = max(abs(a.span[0]), abs(a.span[1]))
            return spanned(p.Fn("abs", [a], kind, prefix), (0, top))
        if name == "clamp":
            low, high = self.lit(kind, -9, 0), self.lit(kind, 1, 60)
            return spanned(p.Fn("clamp", [a, low, high], kind, prefix), (low.span[0], high.span[1]))
        if name == "fma" and kind is FLOAT and self.exact:
            b, c = self.expr(kind, depth - 1, ctx), self.expr(kind, depth - 1, ctx)
            a, b = self.fit(a, FLOAT, -999, 999), self.fit(b, FLOAT, -999, 999)
            return self.held(
                spanned(p.Fn("fma", [a, b, c], FLOAT, prefix), (-(1 << 21), 1 << 21)), kind
            )
        if name == "popcount" and kind in (INT, UINT):
            return spanned(p.Fn("popcount", [a], kind, prefix), (0, 32))
        if name == "as_type" and kind in (INT, UINT):
            zero = p.Bin("+", self.expr(FLOAT, depth - 1, ctx), p.Lit(0.0, FLOAT), FLOAT)
            return self.held(
                spanned(p.Fn(f"as_type<{kind.name}>", [zero], kind), kind.limits), kind
            )
        b = self.expr(kind, depth - 1, ctx)
        span = (min(a.span[0], b.span[0]), max(a.span[1], b.span[1]))
        if name == "select":
            return spanned(
                p.Fn("select", [a, b, self.expr(BOOL, depth - 1, ctx)], kind, prefix), span
            )
        name = rng.choice(("min", "max"))
        return spanned(p.Fn(name, [a, b], kind, prefix), span)

    def ternary(self, kind: Type, depth: int, ctx: Context) -> Expr:
        test = self.expr(BOOL, depth - 1, ctx)
        branch = ctx if self.has("sync_branches") else ctx.deeper(sync=False)
        yes, no = self.expr(kind, depth - 1, branch), self.expr(kind, depth - 1, branch)
        span = (min(yes.span[0], no.span[0]), max(yes.span[1], no.span[1]))
        return spanned(p.Cond(test, yes, no), span)

    def macro(self, kind: Type, depth: int, ctx: Context) -> Expr | None:
        fits = [m for m in self.macros if m.body.type is kind and self.readable(m.body)]
        if ctx.function is not None and not ctx.function.capture:
            fits = [m for m in fits if m.name.startswith("H")]
        if not fits:
            return None
        m = self.rng.choice(fits)
        plain = ctx.deeper(sync=ctx.sync and self.odds(0.4), post=False)
        args = []
        for q in m.params:
            place = next(n for n in p.walk(m.body) if isinstance(n, p.Param) and n.name == q)
            args.append(self.held(self.expr(p_type(place), depth - 1, plain), p_type(place)))
        return spanned(p.MacroUse(m, args), m.body.span)

    def call(self, kind: Type, depth: int, ctx: Context) -> Expr | None:
        """A call of a helper or a lambda that returns this type and only takes values."""
        lambdas = [f for s in self.scopes for f in s.lambdas]
        fits = [
            f for f in (*self.functions, *lambdas)
            if f.type is kind and all(m == "value" for m in f.modes)
            and (ctx.sync or not f.synchronises) and not f.barriers and f.pure
            and f is not ctx.function
            and (f in self.functions or ctx.function is None)
        ]  # fmt: skip
        if not fits:
            return None
        f = self.rng.choice(fits)
        args = [self.held(self.expr(p_kind(q), depth - 1, ctx), p_kind(q)) for q in f.params]
        return spanned(p.Call(f, args), HELD[kind])

    def of_vector(self, kind: Type, depth: int, ctx: Context) -> Expr | None:
        fits = [v for v in self.vector_types if v.base is kind]
        if not fits:
            return None
        vector = self.rng.choice(fits)
        v = self.vector(vector, depth - 1, ctx)
        roll = self.rng.random()
        if roll < 0.5:
            return spanned(p.Swizzle(v, self.rng.choice("xyzw"[: vector.lanes])), v.span)
        if roll < 0.8 and isinstance(v, (p.Name, p.Index)):
            return spanned(p.Component(v, self.index(vector.lanes, ctx)), v.span)
        if kind is FLOAT:
            w = self.small_vector(vector, ctx)
            top = max(abs(v.span[0]), abs(v.span[1])) * 9 * vector.lanes
            if top <= MOST[kind] and self.exact:
                return self.held(spanned(p.Fn("dot", [v, w], kind, "metal::"), (-top, top)), kind)
        return spanned(p.Swizzle(v, self.rng.choice("xyzw"[: vector.lanes])), v.span)

    def small_vector(self, vector: Vector, ctx: Context) -> Expr:
        parts = [
            self.fit(self.expr(vector.base, 1, ctx), vector.base, -9, 9)
            for _ in range(vector.lanes)
        ]
        return spanned(p.Fn(vector.name, parts, vector), (-9, 9))

    def vector(self, kind: Vector, depth: int, ctx: Context) -> Expr:
        """A vector whose components are small."""
        rng = self.rng
        found = [v for v in self.visible() if v.type == kind and v.kind == "value"]
        roll = rng.random()
        low, high = VECTOR[kind.base]
        if found and (depth <= 0 or roll < 0.4):
            v = rng.choice(found)
            return spanned(p.Name(v), v.span)
        if depth > 0 and roll < 0.55:
            a, b = self.small_vector(kind, ctx), self.vector(kind, depth - 1, ctx)
            op = rng.choice("+-*" if kind.base is not HALF else "+-")
            top = max(abs(b.span[0]), abs(b.span[1]), 9)
            top = top * 9 if op == "*" else top + 9
            if kind.base.kind == "uint":
                return spanned(p.Bin(op, a, b, kind), kind.base.limits)
            if top < MOST[kind.base] // 64:
                return spanned(p.Bin(op, a, b, kind), (-top, top))
        if depth > 0 and roll < 0.65:
            wider = [w for w in self.vector_types if w.base is kind.base]
            source = self.vector(rng.choice(wider), depth - 1, ctx)
            assert isinstance(source.type, Vector)
            letters = "".join(rng.choice("xyzw"[: source.type.lanes]) for _ in range(kind.lanes))
            return spanned(p.Swizzle(source, letters), source.span)
        if depth > 0 and roll < 0.72 and ctx.sync and kind.base is not HALF:
            name = rng.choice(("simd_shuffle_xor", "simd_shuffle_down", "simd_broadcast_first"))
            args = [self.vector(kind, depth - 1, ctx)]
            if not name.endswith("first"):
                args.append(self.lit(UINT, 1, 16))
            return spanned(p.Sync(name, args, kind), args[0].span)
        if roll < 0.8:
            one = self.fit(self.expr(kind.base, depth - 1, ctx), kind.base, low, high)
            return spanned(p.Fn(kind.name, [one], kind), (low, high))
        parts = [
            self.fit(self.expr(kind.base, depth - 1, ctx), kind.base, low, high)
            for _ in range(kind.lanes)
        ]
        return spanned(p.Fn(kind.name, parts, kind), (low, high))

    # -- operations of the simdgroup ---------------------------------------------------------------

    def sync(self, kind: Type, depth: int, ctx: Context) -> Expr | None:
        rng = self.rng
        prefix = "quad" if self.has("quads") and self.odds(0.25) else "simd"
        width = 32 if prefix == "simd" else 4
        if kind is BOOL:
            op = rng.choice(("any", "all", "any", "all", "is_first"))
            args = [] if op == "is_first" else [self.expr(BOOL, depth - 1, ctx)]
            return spanned(p.Sync(f"{prefix}_{op}", args, BOOL), (0, 1))
        if kind is UINT and self.odds(0.15):
            op = rng.choice(("ballot", "active_threads_mask"))
            args = [self.expr(BOOL, depth - 1, ctx)] if op == "ballot" else []
            return spanned(p.Sync(f"{prefix}_{op}", args, UINT), UINT.limits)
        value = self.expr(kind, depth - 1, ctx)
        if self.odds(0.5):
            return self.reduction(prefix, width, kind, value)
        step_context = ctx if self.odds(0.5) else ctx.deeper(sync=False)
        op = rng.choice((*MOVES, "broadcast_first"))
        if op == "broadcast_first":
            return spanned(p.Sync(f"{prefix}_{op}", [value], kind), value.span)
        most = width - 1 + (3 if self.has("lost_lanes") and self.odds(0.2) else 0)
        if op == "broadcast" or self.odds(0.4):
            step = self.lit(rng.choice((INT, UINT)), 0, most)
        else:
            step = self.fit(self.expr(UINT, depth - 1, step_context), UINT, 0, most)
        if self.has("fills") and self.odds(0.25):
            op = rng.choice(("shuffle_and_fill_up", "shuffle_and_fill_down"))
            filling = self.expr(kind, depth - 1, ctx)
            modulo = rng.choice([m for m in (2, 4, 8, 16, 32) if m <= width])
            args = [value, filling, self.fit(step, UINT, 0, modulo - 1)]
            if modulo != width or self.odds(0.5):
                args.append(spanned(p.Lit(modulo, INT), (modulo, modulo)))
            span = (min(value.span[0], filling.span[0]), max(value.span[1], filling.span[1]))
            return spanned(p.Sync(f"{prefix}_{op}", args, kind), span)
        return spanned(p.Sync(f"{prefix}_{op}", [value, step], kind), value.span)

    def reduction(self, prefix: str, width: int, kind: Type, value: Expr) -> Expr:
        rng = self.rng
        ops = ["sum", "sum", "max", "min", "product"]
        if kind.integer:
            ops += ["and", "or", "xor"]
        if kind.kind != "float" or self.exact:
            ops += [f"prefix_{x}clusive_{o}" for x in ("in", "ex") for o in ("sum", "product")]
        op = rng.choice(ops)
        name = f"{prefix}_{op}"
        unsigned = kind.kind == "uint"
        if op.endswith("sum"):
            if unsigned:
                return spanned(p.Sync(name, [value], kind), kind.limits)
            most = min(MOST.get(kind, kind.limits[1]), kind.limits[1]) // width
            value = self.fit(value, kind, -most, most)
            low, high = value.span
            span = (min(low * width, low), max(high * width, high))
            return self.held(spanned(p.Sync(name, [value], kind), span), kind)
        if op.endswith("product"):
            if not unsigned:
                value = self.fit(value, kind, -1, 1)
            span = kind.limits if unsigned else (-1, 1)
            return spanned(p.Sync(name, [value], kind), span)
        if op in ("or", "xor", "and"):
            low, high = value.span
            bits = max(high.bit_length(), (-low - 1).bit_length() if low < 0 else 0)
            span = (0 if low >= 0 else -(1 << bits), (1 << bits) - 1)
            return self.held(spanned(p.Sync(name, [value], kind), span), kind)
        return spanned(p.Sync(name, [value], kind), value.span)
