"""Random expressions with defined values.

Every expression carries the range of values that it can have (`Expr.span`), so that the generator can
keep signed integers from overflowing and floats exact. The ranges of variables that loops change are
a guess: `reference` checks every step, and refuses a program that breaks a rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from . import program as p
from .program import (
    BOOL, CHAR, FLOAT, HALF, INT, LONG, SHORT, UCHAR, UINT, ULONG, USHORT, Expr, Type, Var, Vector,
)  # fmt: skip

Span = tuple[int, int]

# The values that variables hold.
HELD: dict[Type, Span] = {
    BOOL: (0, 1), CHAR: (-100, 100), UCHAR: (0, 255), SHORT: (-2000, 2000), USHORT: (0, 65535),
    INT: (-(1 << 20), 1 << 20), UINT: (0, (1 << 32) - 1), LONG: (-(1 << 40), 1 << 40),
    ULONG: (0, (1 << 64) - 1), HALF: (-100, 100), FLOAT: (-(1 << 16), 1 << 16),
}  # fmt: skip
# The values that intermediate results may have.
MOST: dict[Type, int] = {INT: 1 << 30, LONG: 1 << 60, HALF: 1 << 11, FLOAT: 1 << 24}

NAMES = ("a", "b", "c", "d", "v", "acc", "t", "index", "y0", "j1", "norm", "best", "sum", "m", "q")
ORDER = ("sum", "product", "max", "min", "and", "or", "xor")
MOVES = ("broadcast", "shuffle", "shuffle_up", "shuffle_down", "shuffle_xor", "shuffle_rotate_up",
         "shuffle_rotate_down")  # fmt: skip

# What a program may do beyond the plain: how often.
FEATURES: dict[str, float] = {
    "narrow": 0.35, "half": 0.3, "long": 0.25, "vectors": 0.3, "helpers": 0.45, "lambdas": 0.3,
    "macros": 0.4, "macro_names": 0.25, "tables": 0.4, "pointers": 0.4, "refs": 0.35,
    "strided": 0.2, "switch": 0.15, "post": 0.2, "atomics": 0.3, "moved": 0.3, "templates": 0.4,
    "dtype": 0.25, "returns": 0.45, "quads": 0.4, "fills": 0.2, "reads_output": 0.25,
    "several": 0.35, "shadows": 0.5, "copies": 0.05, "sync_helpers": 0.1, "sync_lambdas": 0.04,
    "sync_branches": 0.08, "macro_effects": 0.12, "sync_switch": 0.03, "lost_lanes": 0.5,
    "auto": 0.5, "constexpr_if": 0.2, "simd_exchange": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """Where a statement stands.

    Attributes:
        uniform: all threads of a threadgroup that have not returned are here together.
        sync: operations of the simdgroup may stand here.
        barrier: barriers may stand here.
        post: ``v++`` may stand inside an expression.
        loop: ``""`` outside loops, ``"free"``, or ``"uniform"``: all threads go round together.
        function: the helper or lambda around, if any.
    """

    uniform: bool = True
    sync: bool = True
    barrier: bool = False
    loop: str = ""
    function: p.Function | None = None
    depth: int = 0
    loops: int = 0
    post: bool = True

    @property
    def in_kernel(self) -> bool:
        """Whether the kernel's names and attributes are in scope."""
        return self.function is None or bool(self.function.capture)

    def deeper(self, **changes: object) -> Context:
        return replace(self, depth=self.depth + 1, **changes)  # type: ignore[arg-type]


@dataclass
class Scope:
    names: dict[str, Var] = field(default_factory=dict)
    lambdas: list[p.Function] = field(default_factory=list)


class Expressions:
    """The random choices, the names in scope, and expressions."""

    def __init__(self, seed: int, avoid: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.features = {f for f, odds in FEATURES.items() if self.rng.random() < odds} - avoid
        self.scopes: list[Scope] = [Scope()]
        self.macros: list[p.Macro] = []
        self.functions: list[p.Function] = []
        self.state: dict[int, str] = {}  # of threadgroup memory: any, own, cross, none
        self.types: list[Type] = [INT, INT, UINT, FLOAT]
        self.vector_types: list[Vector] = []
        self.contiguous = True
        self.exact = True
        self.kind = "flat"
        self.spelled: dict[Type, str] = {}
        self.count = 0
        self.taken: set[str] = set()
        self.spare: list[Var] = []  # variables that one expression may step

    # -- names -------------------------------------------------------------------------------------

    def has(self, feature: str) -> bool:
        return feature in self.features

    def odds(self, share: float) -> bool:
        return self.rng.random() < share

    def visible(self) -> list[Var]:
        seen: dict[str, Var] = {}
        for scope in reversed(self.scopes):
            for name, var in scope.names.items():
                seen.setdefault(name, var)
        return list(seen.values())

    def sees(self, var: Var) -> bool:
        for scope in reversed(self.scopes):
            if var.name in scope.names:
                return scope.names[var.name] is var
        return False

    def readable(self, node: p.Node) -> bool:
        """Whether every name in a macro's text still means what it meant."""
        for part in p.walk(node):
            for attr in ("var", "base"):
                var = getattr(part, attr, None)
                if isinstance(var, Var) and not self.sees(var):
                    return False
        return True

    def fresh(self, taken_by: p.Node | None = None) -> str:
        """A name for a variable in the current scope, sometimes one of an outer scope."""
        here = self.scopes[-1].names
        used: set[str] = set()
        if taken_by is not None:
            stack: list[p.Node] = [taken_by]
            while stack:
                for part in p.walk(stack.pop()):
                    for attr in ("var", "base"):
                        var = getattr(part, attr, None)
                        if isinstance(var, Var):
                            used.add(var.name)
                    if isinstance(part, p.MacroUse):
                        stack.append(part.macro.body)
        if len(self.scopes) > 2 and self.has("shadows") and self.odds(0.35):
            outer = sorted({v.name for v in self.visible() if v.kind in ("value", "array", "ref")})
            outer = [n for n in outer if n not in self.taken]
            choices = [n for n in outer if n not in here and n not in used]
            if choices:
                return self.rng.choice(choices)
        names = [n for n in NAMES if not any(n in s.names for s in self.scopes)]
        names = [n for n in names if n not in used and n not in self.taken]
        if names and self.odds(0.7):
            return self.rng.choice(names)
        self.count += 1
        return f"{self.rng.choice(NAMES)}_{self.count}"

    def declare(self, var: Var) -> Var:
        self.scopes[-1].names[var.name] = var
        return var

    # -- building blocks ---------------------------------------------------------------------------

    def lit(self, kind: Type, low: int = -9, high: int = 9) -> Expr:
        most = HELD[kind]
        low, high = max(low, most[0]), min(high, most[1])
        value: float = self.rng.randint(low, max(low, high))
        if kind.kind == "float" and not self.exact and kind is FLOAT and self.odds(0.5):
            value = min(max(value + self.rng.choice((0.1, 0.3, 0.7)), low), high)
        return spanned(p.Lit(value, kind), (math.floor(value), math.ceil(value)))

    def cast(self, e: Expr, kind: Type) -> Expr:
        """A conversion that loses nothing, or wraps an unsigned integer."""
        assert isinstance(e.type, Type)
        if e.type is kind and not self.odds(0.03):
            return e
        low, high = e.span
        least, most = kind.limits
        span = (low, high) if least <= low and high <= most else (least, most)
        if kind is BOOL:
            span = (0, 1)
        styles = ["call", "call", "static", "c"]
        spelling = self.spelled.get(kind, "") if self.odds(0.5) else ""
        return spanned(p.Cast(e, kind, self.rng.choice(styles), spelling), span)

    def fit(self, e: Expr, kind: Type, low: int, high: int) -> Expr:
        """`e` as `kind`, reduced where it could leave ``low … high``."""
        assert isinstance(e.type, Type)
        if kind is BOOL:
            return e if e.type is BOOL else self.compare("!=", e, spanned(p.Lit(0, INT), (0, 0)))
        l0, h0 = e.span
        least, most = kind.limits
        if low <= l0 and h0 <= high and least <= l0 and h0 <= most:
            return self.cast(e, kind)
        if e.type is BOOL or (low > 0 or high < 1):
            return self.lit(kind, low, high)
        if e.type.kind == "float":
            e = spanned(p.Cast(e, INT, self.rng.choice(("call", "c", "static"))), e.span)
        assert isinstance(e.type, Type)
        wide = p.common(e.type, INT)
        room = high if l0 >= 0 or low >= 0 else min(high, -low)
        if room < 1:
            return self.lit(kind, low, high)
        if low >= 0 and l0 < 0 or (l0 >= 0 and self.odds(0.4)):
            bits = (1 << (room + 1).bit_length() - 1) - 1
            bits = min(bits, (1 << 30) - 1)
            mask = spanned(p.Lit(bits, wide), (bits, bits))
            return self.cast(spanned(p.Bin("&", e, mask, wide), (0, bits)), kind)
        q = min(room + 1, self.rng.choice((7, 13, 97, 1000, 1 << 16, room + 1)), 1 << 30)
        divisor = spanned(p.Lit(q, wide), (q, q))
        span = (0, q - 1) if l0 >= 0 else (1 - q, q - 1)
        return self.cast(spanned(p.Bin("%", e, divisor, wide), span), kind)

    def held(self, e: Expr, kind: Type) -> Expr:
        return self.fit(e, kind, *HELD[kind])

    def compare(self, op: str, a: Expr, b: Expr) -> Expr:
        return spanned(p.Bin(op, a, b, BOOL), (0, 1))

    def arithmetic(self, op: str, a: Expr, b: Expr) -> Expr:
        """``a op b``, with the operands reduced so that nothing overflows."""
        assert isinstance(a.type, Type) and isinstance(b.type, Type)
        wide = p.common(a.type, b.type)
        if wide.kind == "float":
            most = MOST[wide]
            a, b = (
                e if -most <= e.span[0] and e.span[1] <= most else self.fit(e, p_type(e), -64, 64)
                for e in (a, b)
            )
        for attempt in range(2):
            if wide.kind == "uint":
                least, most = wide.limits
                spans = [s if s[0] >= 0 else (least, most) for s in (a.span, b.span)]
            else:
                least, most = -MOST[wide], MOST[wide]
                spans = [a.span, b.span]
            (al, ah), (bl, bh) = spans
            if op == "+":
                span = (al + bl, ah + bh)
            elif op == "-":
                span = (al - bh, ah - bl)
            else:
                products = [x * y for x in (al, ah) for y in (bl, bh)]
                span = (min(products), max(products))
            if least <= span[0] and span[1] <= most:
                return spanned(p.Bin(op, a, b, wide), span)
            if wide.kind == "uint":
                return spanned(p.Bin(op, a, b, wide), (least, most))
            if attempt:
                break
            room = most // 4 if op != "*" else math.isqrt(most) // 2
            a = self.fit(a, p_type(a), -room, room)
            b = self.fit(b, p_type(b), -room, room)
        return self.lit(wide)

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
            elif v.kind == "shared" and v.size and v.spelling[:6] != "atomic":
                if self.may_read(v) and ctx.function is None:
                    found.append(lambda v=v: self.cross(v, ctx))  # type: ignore[misc]
        return found

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
                and 0 <= v.span[0] and v.span[1] < size
            ]  # fmt: skip
            if fits:
                v = self.rng.choice(fits)
                return spanned(p.Name(v), v.span)
        e = self.expr(UINT, 1, ctx)
        if 0 <= e.span[0] and e.span[1] < size:
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
            elif v.kind == "input" and v.size and self.contiguous and not v.locked:
                options.append(
                    lambda v=v: spanned(p.Index(v, self.lit(INT, 0, v.size - 1)), v.span)  # type: ignore[misc]
                )
            elif v.kind == "table":
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
            smaller = [t for t in self.types if t.rank <= max(kind.rank, INT.rank) and t is not BOOL]
            if kind.kind != "uint":
                smaller = [t for t in smaller if p.common(t, kind) is p.common(kind, kind)]
            right = rng.choice(smaller) if smaller else kind
        a, b = self.expr(left, depth - 1, ctx), self.expr(right, depth - 1, ctx)
        if kind is FLOAT and not self.exact and self.odds(0.15):
            divisor = spanned(p.Lit(rng.choice((3.0, 7.0, -1.5)), FLOAT), (1, 7))
            return spanned(p.Bin("/", a, divisor, FLOAT), a.span)
        return self.held(self.arithmetic(rng.choice("++-*"), a, b), kind)

    def integer(self, kind: Type, depth: int, ctx: Context) -> Expr:
        rng = self.rng
        op = rng.choice(("/", "%", "&", "|", "^", "<<", ">>", "~"))
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
            count = self.fit(self.expr(UINT, depth - 1, ctx), UINT, 0, 7)
            if self.odds(0.5):
                count = self.lit(INT, 0, 9)
            if op == "<<":
                if wide.kind != "uint":
                    op = ">>"
                else:
                    return self.held(spanned(p.Bin("<<", a, count, wide), wide.limits), kind)
            return self.held(spanned(p.Bin(">>", a, count, wide), (min(low, 0), max(high, 0))), kind)
        b = self.expr(kind, depth - 1, ctx)
        least, most = min(low, b.span[0]), max(high, b.span[1], 1)
        bits = max(most.bit_length(), (-least - 1).bit_length() if least < 0 else 0)
        span = (0 if least >= 0 else -(1 << bits), (1 << bits) - 1)
        return self.held(spanned(p.Bin(op, a, b, wide), span), kind)

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
            return self.held(spanned(p.Fn("fma", [a, b, c], FLOAT, prefix), (-(1 << 21), 1 << 21)), kind)
        if name == "popcount" and kind in (INT, UINT):
            return spanned(p.Fn("popcount", [a], kind, prefix), (0, 32))
        if name == "as_type" and kind in (INT, UINT):
            zero = p.Bin("+", self.expr(FLOAT, depth - 1, ctx), p.Lit(0.0, FLOAT), FLOAT)
            return self.held(spanned(p.Fn(f"as_type<{kind.name}>", [zero], kind), kind.limits), kind)
        b = self.expr(kind, depth - 1, ctx)
        span = (min(a.span[0], b.span[0]), max(a.span[1], b.span[1]))
        if name == "select":
            return spanned(p.Fn("select", [a, b, self.expr(BOOL, depth - 1, ctx)], kind, prefix), span)
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
            and (ctx.sync or not f.synchronises) and not f.barriers and f.pure and f is not ctx.function
            and (f in self.functions or ctx.function is None)
        ]  # fmt: skip
        if not fits:
            return None
        f = self.rng.choice(fits)
        args = [
            self.held(self.expr(p_kind(q), depth - 1, ctx), p_kind(q)) for q in f.params
        ]
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
        parts = [self.fit(self.expr(vector.base, 1, ctx), vector.base, -9, 9) for _ in range(vector.lanes)]
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


VECTOR: dict[Type, Span] = {INT: (-999, 999), UINT: (0, 9999), FLOAT: (-999, 999), HALF: (-20, 20)}


def spanned(e: Expr, span: Span) -> Expr:
    """The expression, with its range noted."""
    e.span = span
    return e


def p_type(e: Expr) -> Type:
    """The type of a scalar expression."""
    assert isinstance(e.type, Type)
    return e.type


def p_kind(v: Var) -> Type:
    """The type of a scalar variable."""
    assert isinstance(v.type, Type)
    return v.type
