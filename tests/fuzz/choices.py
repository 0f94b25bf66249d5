"""The random choices that programs are made by, names in scope, and arithmetic within bounds.

Every expression carries the range of values that it can have (`Expr.span`), so that the
generator can keep signed integers from overflowing and floats exact. The ranges of variables that
loops change are a guess: `reference` checks every step, and refuses a program that breaks a rule.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from . import program as p
from .program import (
    BOOL,
    CHAR,
    FLOAT,
    HALF,
    INT,
    LONG,
    SHORT,
    UCHAR,
    UINT,
    ULONG,
    USHORT,
    Expr,
    Type,
    Var,
    Vector,
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

# What a program may do beyond the plain: how often.
FEATURES: dict[str, float] = {
    "narrow": 0.35, "half": 0.3, "long": 0.25, "vectors": 0.3, "helpers": 0.45, "lambdas": 0.3,
    "macros": 0.4, "macro_names": 0.25, "tables": 0.4, "pointers": 0.4, "refs": 0.35,
    "strided": 0.2, "switch": 0.15, "post": 0.2, "atomics": 0.3, "moved": 0.3, "templates": 0.4,
    "dtype": 0.25, "returns": 0.45, "quads": 0.4, "fills": 0.2, "reads_output": 0.25,
    "several": 0.35, "shadows": 0.5, "copies": 0.05, "sync_helpers": 0.1, "sync_lambdas": 0.04,
    "sync_branches": 0.08, "macro_effects": 0.12, "sync_switch": 0.03, "lost_lanes": 0.5,
    "rows": 0.35, "auto": 0.5, "constexpr_if": 0.2, "simd_exchange": 0.3,
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


class Choices:
    """The random choices, the names in scope, and expressions."""

    def __init__(self, seed: int, avoid: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.features = {f for f, odds in FEATURES.items() if self.rng.random() < odds} - avoid
        self.scopes: list[Scope] = [Scope()]
        self.macros: list[p.Macro] = []
        self.functions: list[p.Function] = []
        self.row_tests: list[Expr] = []  # the same for all threads of a row
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
        if (low >= 0 and l0 < 0) or (l0 >= 0 and self.odds(0.4)):
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
