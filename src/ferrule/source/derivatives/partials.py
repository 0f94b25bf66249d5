"""The partial derivatives of the dialect's functions: one table for both modes.

A partial is an expression of the arguments and the result, all of which are names or numbers; None
where it is zero everywhere. One that holds under a condition alone is a pair of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .nodes import BOOL, FLOAT, Binary, Call, Choice, Expression, Literal, Type, Unary, common

Factor = Expression | tuple[Expression, Expression]
Partial = Factor | None
Partials = Callable[[Sequence[Expression], Expression], Sequence[Partial]]


def number(value: float | int, kind: Type = FLOAT) -> Literal:
    """A number as a literal that fits beside any type."""
    text = f"{value}.0f" if isinstance(value, int) else f"{value!r}f"
    return Literal(text, FLOAT)


ONE, ZERO = number(1), number(0)


def zero_of(kind: Type) -> Expression:
    """Zero, or a vector of zeros."""
    return ZERO if kind.lanes == 1 else Call(str(kind), (ZERO,), kind)


def _binary(operator: str) -> Callable[[Expression, Expression], Expression]:
    def made(a: Expression, b: Expression) -> Expression:
        return Binary(operator, a, b, common(a.type, b.type))

    return made


sub, div = map(_binary, "-/")
_plus, _times = map(_binary, "+*")
_ZEROS, _ONES = ("0", "0u"), ("1", "1u")  # integers, which do not change what they are added to


def _is(e: Expression, texts: tuple[str, ...]) -> bool:
    return isinstance(e, Literal) and e.text in texts


def add(a: Expression, b: Expression) -> Expression:
    """A sum."""
    return b if _is(a, _ZEROS) else a if _is(b, _ZEROS) else _plus(a, b)


def mul(a: Expression, b: Expression) -> Expression:
    """A product."""
    return b if _is(a, _ONES) else a if _is(b, _ONES) else _times(a, b)


def neg(a: Expression) -> Expression:
    return Unary("-", a, a.type)


def call(name: str, *arguments: Expression) -> Call:
    """A function, of its first argument's type."""
    return Call(name, arguments, arguments[0].type)


def _compare(operator: str) -> Callable[[Expression, Expression], Expression]:
    def made(a: Expression, b: Expression) -> Expression:
        lanes = max(a.type.lanes, b.type.lanes)
        return Binary(operator, a, b, BOOL._replace(lanes=lanes))

    return made


less, at_most, equal = map(_compare, ("<", "<=", "=="))


def chosen(condition: Expression, yes: Expression, no: Expression, kind: Type) -> Expression:
    """One of two by a condition; of vectors lane by lane."""
    if condition.type.lanes == 1:
        return Choice(condition, yes, no, kind)
    both = (e if e.type.lanes > 1 else Call(str(kind), (e,), kind) for e in (no, yes))
    return Call("select", (*both, condition), kind)


def both(a: Expression, b: Expression, operator: str = "&&") -> Expression:
    """Two conditions, of vectors lane by lane."""
    return Binary(operator, a, b, BOOL._replace(lanes=max(a.type.lanes, b.type.lanes)))


def _not(a: Expression) -> Expression:
    return Unary("!", a, a.type)


def _extreme(x: Sequence[Expression], largest: bool) -> Sequence[Partial]:
    """Of a maximum: 1 where it is this one, half of it where both are equal; what is not a number
    is none."""
    out: list[Partial] = []
    for mine, other in (x, x[::-1]):
        loses = less(mine, other) if largest else less(other, mine)
        wins = both(_not(loses), equal(mine, mine))
        share = chosen(equal(mine, other), number(0.5), ONE, common(mine.type, other.type))
        out.append((wins, share))
    return out


def _clamped(args: Sequence[Expression], r: Expression) -> Sequence[Partial]:
    x, low, high = args
    return [
        (both(at_most(low, x), at_most(x, high)), ONE),
        (both(less(x, low), at_most(low, high)), ONE),
        (both(less(high, x), less(high, low), "||"), ONE),
    ]


def _pow(args: Sequence[Expression], r: Expression) -> Sequence[Partial]:
    a, b = args
    of_a = (_not(equal(b, ZERO)), mul(b, call("pow", a, sub(b, ONE))))
    return [of_a, (less(ZERO, a), mul(r, call("log", a)))]


def _squared(a: Expression, b: Expression) -> Expression:
    return add(mul(a, a), mul(b, b))


_LN2, _LN10, _PI = 0.6931471805599453, 2.302585092994046, 3.141592653589793
_TWO_OVER_ROOT_PI = 1.1283791670955126

PARTIALS: dict[str, Partials] = {
    "exp": lambda x, r: [r],
    "exp2": lambda x, r: [mul(r, number(_LN2))],
    "exp10": lambda x, r: [mul(r, number(_LN10))],
    "expm1": lambda x, r: [add(r, ONE)],
    "log": lambda x, r: [div(ONE, x[0])],
    "log2": lambda x, r: [div(number(1 / _LN2), x[0])],
    "log10": lambda x, r: [div(number(1 / _LN10), x[0])],
    "log1p": lambda x, r: [div(ONE, add(x[0], ONE))],
    "sqrt": lambda x, r: [div(number(0.5), r)],
    "rsqrt": lambda x, r: [div(mul(number(-0.5), r), x[0])],
    "sin": lambda x, r: [call("cos", x[0])],
    "cos": lambda x, r: [neg(call("sin", x[0]))],
    "tan": lambda x, r: [add(mul(r, r), ONE)],
    "sinpi": lambda x, r: [mul(number(_PI), call("cospi", x[0]))],
    "cospi": lambda x, r: [mul(number(-_PI), call("sinpi", x[0]))],
    "tanpi": lambda x, r: [mul(number(_PI), add(mul(r, r), ONE))],
    "asin": lambda x, r: [call("rsqrt", sub(ONE, mul(x[0], x[0])))],
    "acos": lambda x, r: [neg(call("rsqrt", sub(ONE, mul(x[0], x[0]))))],
    "atan": lambda x, r: [div(ONE, add(mul(x[0], x[0]), ONE))],
    "atan2": lambda x, r: [div(x[1], _squared(*x)), neg(div(x[0], _squared(*x)))],
    "sinh": lambda x, r: [call("cosh", x[0])],
    "cosh": lambda x, r: [call("sinh", x[0])],
    "tanh": lambda x, r: [sub(ONE, mul(r, r))],
    "asinh": lambda x, r: [call("rsqrt", add(mul(x[0], x[0]), ONE))],
    "acosh": lambda x, r: [call("rsqrt", sub(mul(x[0], x[0]), ONE))],
    "atanh": lambda x, r: [div(ONE, sub(ONE, mul(x[0], x[0])))],
    "erf": lambda x, r: [mul(number(_TWO_OVER_ROOT_PI), call("exp", neg(mul(x[0], x[0]))))],
    "erfc": lambda x, r: [mul(number(-_TWO_OVER_ROOT_PI), call("exp", neg(mul(x[0], x[0]))))],
    "pow": _pow,
    "powr": _pow,
    "abs": lambda x, r: [call("sign", x[0])],
    "fabs": lambda x, r: [call("sign", x[0])],
    "max": lambda x, r: _extreme(x, True),
    "min": lambda x, r: _extreme(x, False),
    "clamp": _clamped,
    "saturate": lambda x, r: [
        (both(at_most(ZERO, x[0]), at_most(x[0], ONE)), ONE)
    ],
    "mix": lambda x, r: [sub(ONE, x[2]), x[2], sub(x[1], x[0])],
    "fma": lambda x, r: [x[1], x[0], ONE],
    "fract": lambda x, r: [ONE],
    "fmod": lambda x, r: [ONE, neg(call("trunc", div(x[0], x[1])))],
    "copysign": lambda x, r: [mul(call("sign", x[0]), call("sign", r)), None],
    "fdim": lambda x, r: [(less(x[1], x[0]), ONE), (less(x[1], x[0]), number(-1))],
    "+": lambda x, r: [ONE, ONE],
    "-": lambda x, r: [ONE, number(-1)],
    "*": lambda x, r: [x[1], x[0]],
    "/": lambda x, r: [div(ONE, x[1]), neg(div(r, x[1]))],
}  # fmt: skip
PARTIALS |= {"fmax": PARTIALS["max"], "fmin": PARTIALS["min"], "mad": PARTIALS["fma"]}

# What changes in steps: its derivative is zero.
STEPS = frozenset({
    "floor", "ceil", "round", "rint", "trunc", "sign", "step", "isnan", "isinf", "isfinite",
    "isnormal", "signbit", "ilogb", "popcount", "clz", "ctz", "simd_ballot", "simd_all", "simd_any",
    "simd_is_first", "any", "all", "simd_active_threads_mask",
})  # fmt: skip

# What is linear in its first argument: of a tangent it is the same.
LINEAR = frozenset({
    f"{width}_{name}"
    for width in ("simd", "quad")
    for name in (
        "sum", "prefix_inclusive_sum", "prefix_exclusive_sum", "broadcast", "broadcast_first",
        "shuffle", "shuffle_up", "shuffle_down", "shuffle_xor", "shuffle_rotate_up",
        "shuffle_rotate_down",
    )
})  # fmt: skip
# Those that take two values that have tangents.
FILLING = frozenset({
    "simd_shuffle_and_fill_up", "simd_shuffle_and_fill_down", "quad_shuffle_and_fill_up",
    "quad_shuffle_and_fill_down",
})  # fmt: skip
EXTREMES = frozenset({"simd_max", "simd_min", "quad_max", "quad_min"})
