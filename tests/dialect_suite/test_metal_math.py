"""The math functions in their three namespaces and four types, against NumPy in float64.

The bounds are those of the Metal Shading Language's tables of relative errors: of precise math for
``metal::`` (math is safe by default) and ``precise::``, of fast math for ``fast::``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metal_harness import KINDS, Array, Slots, bfloat16

pytestmark = pytest.mark.optimised

f32 = np.float32
f64 = np.float64
PI = np.pi
Function = Callable[..., Any]


def spread(low: float, high: float, count: int, seed: int) -> Array:
    """Numbers of both signs with exponents from `low` to `high` (powers of two)."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(low, high, count))
    return (size * rng.choice([-1.0, 1.0], count)).astype(f32)


N = 2048
RNG = np.random.default_rng(21)
INPUTS: dict[str, Array] = {
    "wide": spread(-100, 100, N, 1),
    "other": spread(-100, 100, N, 2),
    "some": RNG.uniform(-80, 80, N).astype(f32),
    "few": RNG.uniform(-37, 37, N).astype(f32),
    "unit": np.concatenate([RNG.uniform(-1, 1, N // 2), spread(-20, -0.001, N // 2, 3)]).astype(
        f32
    ),
    "turn": RNG.uniform(-PI, PI, N).astype(f32),
    "expo": np.where(
        np.arange(N) % 2, RNG.uniform(-3, 3, N), np.round(RNG.uniform(-9, 9, N))
    ).astype(f32),
    "base": np.exp2(RNG.uniform(-9, 9, N)).astype(f32),
}
INPUTS["near"] = (INPUTS["wide"] * RNG.choice([0.5, 1, 1 + 2.0**-20, 3.7, -2], N)).astype(f32)
INPUTS["small"] = spread(-20, 12, N, 5)
W = {name: values.astype(f64) for name, values in INPUTS.items()}


def cosh(x: Array) -> Array:
    return np.asarray((np.exp(x) + np.exp(-x)) / 2)


def round_away(x: Array) -> Array:
    return np.asarray(np.trunc(x + np.copysign(0.5, x)))


def pi_sine(x: Array) -> Array:
    r = x - 2 * np.round(x / 2)
    r = np.where(np.abs(r) > 0.5, np.copysign(1, r) - r, r)
    return np.asarray(np.sin(PI * r))


def pi_cosine(x: Array) -> Array:
    r = np.abs(x - 2 * np.round(x / 2))
    return np.asarray(np.where(r < 0.25, np.cos(PI * r), np.sin(PI * (0.5 - r))))


def fract(x: Array) -> Array:
    return np.asarray(np.minimum(x - np.floor(x), 1 - 2.0**-24))


def median(x: Array, y: Array, z: Array) -> Array:
    return np.asarray(np.sort(np.stack([x, y, z]), axis=0)[1])


# Name, arguments, reference, bound in ulp of precise math, bounds in ulp and absolute of fast math.
# A fast bound is None where only "correctly rounded" or the precise bound is said.
FUNCTIONS: list[tuple[str, str, Function, float, tuple[float, float] | None]] = [
    ("acos", "unit", np.arccos, 4, (5, 0)),
    ("acosh", "1.0f + fabs(wide)",
     lambda: np.arccosh((f32(1) + np.abs(INPUTS["wide"])).astype(f64)), 4, (64, 2e-3)),
    ("asin", "unit", np.arcsin, 4, (5, 0)),
    ("asinh", "small", np.arcsinh, 4, (64, 2e-3)),
    ("atan", "wide", np.arctan, 5, (5, 0)),
    ("atan2", "wide, near", np.arctan2, 6, (64, 0)),
    ("atanh", "unit * 0.999f", lambda: np.arctanh((INPUTS["unit"] * f32(0.999)).astype(f64)), 5,
     (64, 2e-3)),
    ("ceil", "small", np.ceil, 0, None),
    ("copysign", "wide, other", np.copysign, 0, None),
    ("cos", "small", np.cos, 4, (1e9, 2e-1)),
    ("cos", "turn", np.cos, 4, (0, 2.0**-13)),
    ("cosh", "some", cosh, 4, (256, 0)),
    ("cospi", "small", pi_cosine, 4, (1e9, 2e-1)),
    ("divide", "few, other", np.divide, 0.5, (2.5, 0)),
    ("exp", "some", np.exp, 4, (163, 0)),
    ("exp2", "some", np.exp2, 4, (163, 0)),
    ("exp10", "few", lambda x: 10.0**x, 4, (300, 0)),
    ("fabs", "wide", np.abs, 0, None),
    ("abs", "wide", np.abs, 0, None),
    ("fdim", "wide, near", lambda x, y: np.maximum(x - y, 0), 0.5, None),
    ("floor", "small", np.floor, 0, None),
    ("fma", "few, unit, some", lambda x, y, z: x * y + z, 0.5, None),
    ("fmax", "wide, near", np.maximum, 0, None),
    ("fmin", "wide, near", np.minimum, 0, None),
    ("max", "wide, near", np.maximum, 0, None),
    ("min", "wide, near", np.minimum, 0, None),
    ("max3", "some, few, unit", lambda *v: np.max(v, 0), 0, None),
    ("min3", "some, few, unit", lambda *v: np.min(v, 0), 0, None),
    ("median3", "some, few, unit", median, 0, None),
    ("fmax3", "some, few, unit", lambda *v: np.max(v, 0), 0, None),
    ("fmin3", "some, few, unit", lambda *v: np.min(v, 0), 0, None),
    ("fmedian3", "some, few, unit", median, 0, None),
    ("fmod", "some, few", np.fmod, 0, (1e9, 1e-4)),
    ("fract", "small", fract, 0, None),
    ("log", "base", np.log, 4, (3, 2.0**-21)),
    ("log2", "base", np.log2, 4, (3, 2.0**-21)),
    ("log10", "base", np.log10, 4, (8, 2.0**-20)),
    ("log", "fabs(wide)", lambda: np.log(np.abs(W["wide"])), 4, (3, 2.0**-21)),
    ("pow", "base, expo", np.power, 16, (300, 0)),
    ("powr", "base, expo", np.power, 16, (300, 0)),
    ("pow", "-base, round(expo)", lambda: np.power(-W["base"], round_away(W["expo"])), 16, None),
    ("rint", "small", np.rint, 0, None),
    ("round", "small", round_away, 0, None),
    ("rsqrt", "fabs(wide)", lambda: 1 / np.sqrt(np.abs(W["wide"])), 0.51, (2, 0)),
    ("sin", "small", np.sin, 4, (1e9, 2e-1)),
    ("sin", "turn", np.sin, 4, (0, 2.0**-13)),
    ("sinh", "some", np.sinh, 4, (1e9, 1e-3 * np.exp(80))),
    ("sinpi", "small", pi_sine, 4, (1e9, 2e-1)),
    ("sqrt", "fabs(wide)", lambda: np.sqrt(np.abs(W["wide"])), 0.5, (4, 0)),
    ("tan", "turn", np.tan, 6, (1e5, 1e-2)),
    ("tanh", "few", np.tanh, 5, (256, 1e-5)),
    ("tanh", "unit", np.tanh, 5, (1e9, 1e-5)),
    ("tanpi", "unit * 0.49f", lambda: np.tan(PI * (INPUTS["unit"] * f32(0.49)).astype(f64)), 6,
     (1e5, 1e-2)),
    ("trunc", "small", np.trunc, 0, None),
]  # fmt: skip


@pytest.mark.parametrize(
    "space", ["", "metal::", "precise::", "metal::precise::", "fast::", "metal::fast::"]
)
def test_float_functions(space: str) -> None:
    s = Slots(
        n=N,
        inputs={f"v_{name}": values for name, values in INPUTS.items()},
        prologue="".join(f"float {name} = v_{name}[i];" for name in INPUTS),
    )
    for name, arguments, reference, precise, fast in FUNCTIONS:
        names = arguments.split(", ")
        plain = all(a in INPUTS for a in names)
        want = reference(*[W[a] for a in names]) if plain else reference()
        ulp, atol = fast if "fast" in space and fast is not None else (precise, 0)
        if "fast" in space and name == "pow" and fast is None:
            continue  # exp2(y * log2(x)) has no value for a negative x
        if ulp in (0, 0.5) and atol == 0:
            s.expr("float", f"{space}{name}({arguments})", np.asarray(want).astype(f32))
        else:
            s.expr("float", f"{space}{name}({arguments})", want, ulp=ulp, atol=atol)
    s.check()


def test_large_arguments_of_sine_and_cosine() -> None:
    x = np.concatenate([INPUTS["wide"], np.array([1e5, 1e10, 1e20, 1e30, 3e38], f32)])
    s = Slots(n=x.size, inputs={"x": x})
    for space in ("", "precise::"):
        s.expr("float", f"{space}sin(x[i])", np.sin(x.astype(f64)), ulp=4)
        s.expr("float", f"{space}cos(x[i])", np.cos(x.astype(f64)), ulp=4)
        s.expr("float", f"{space}tan(x[i])", np.tan(x.astype(f64)), ulp=6)
    s.check()


def test_functions_with_two_results() -> None:
    x = np.concatenate([INPUTS["small"], np.array([0.0, 1, -1, 0.5, 1024, 3e38, 1.2e-38], f32)])
    s = Slots(n=x.size, inputs={"x": x}, each="float v = x[i];")
    mantissa, exponent = np.frexp(x)
    whole = np.trunc(x)
    s.stmt("float", "int e; OUT = frexp(v, e);", mantissa)
    s.stmt("int", "int e; frexp(v, e); OUT = e;", exponent)
    s.stmt("float", "float w; OUT = modf(v, w);", np.copysign(x - whole, x))
    s.stmt("float", "float w; modf(v, w); OUT = w;", np.copysign(whole, x))
    moderate = np.abs(x) < 1e9
    s.stmt("float", "float c; OUT = fabs(v) < 1e9f ? sincos(v, c) : 0.0f;",
           np.where(moderate, np.sin(x.astype(f64)), 0), ulp=4)  # fmt: skip
    s.stmt("float", "float c; metal::precise::sincos(v, c); OUT = fabs(v) < 1e9f ? c : 0.0f;",
           np.where(moderate, np.cos(x.astype(f64)), 0), ulp=4)  # fmt: skip
    s.stmt("int", "OUT = v == 0 ? 0 : ilogb(v);", np.where(x == 0, 0, exponent - 1))
    s.stmt("float", "int e; float m = frexp(v, e); OUT = ldexp(m, e);", x)
    s.expr("float", "ldexp(1.5f, int(i % 40) - 20)", np.ldexp(1.5, np.arange(x.size) % 40 - 20))
    s.stmt("float", "int2 e; float2 m = frexp(float2(v, 8), e); OUT = m.y + float(e.y);", 4.5)
    s.stmt("float", "float2 w; float2 m = modf(float2(2.5f, -3.25f), w); OUT = m.x * 100 + m.y *"
                    " 10 + w.x + w.y;",
           46.5)  # fmt: skip
    s.stmt("float", "float3 w; float3 m = sincos(float3(0), w); OUT = m.x + w.y;", 1)
    s.expr("float", "nextafter(v, INFINITY)", np.nextafter(x, f32(np.inf)))
    s.expr("float", "nextafter(v, -1e30f)", np.nextafter(x, f32(-1e30)))
    # A subnormal neighbour may be flushed.
    for slot in s.slots[-2:]:
        slot.text = f"fabs(v) < 2e-38f ? 0.0f : {slot.text}"
        slot.want = np.where(np.abs(x) < 2e-38, 0, slot.want).astype(f32)
    s.check()


inf, nan = np.inf, np.nan
ONE_ARGUMENT: dict[str, list[tuple[float, float]]] = {
    "exp": [(inf, inf), (-inf, 0), (0, 1), (-0.0, 1), (200, inf), (-200, 0)],
    "exp2": [(inf, inf), (-inf, 0), (0, 1), (200, inf), (10, 1024)],
    "exp10": [(inf, inf), (-inf, 0), (0, 1)],
    "log": [(0, -inf), (-0.0, -inf), (-1, nan), (inf, inf), (1, 0), (-inf, nan)],
    "log2": [(0, -inf), (-1, nan), (inf, inf), (8, 3), (1, 0)],
    "log10": [(0, -inf), (-1, nan), (inf, inf), (1, 0)],
    "sqrt": [(0, 0), (-0.0, -0.0), (-1, nan), (inf, inf), (4, 2), (-inf, nan)],
    "rsqrt": [(0, inf), (-1, nan), (inf, 0), (4, 0.5)],
    "sin": [(0, 0), (-0.0, -0.0), (inf, nan), (-inf, nan)],
    "cos": [(0, 1), (inf, nan)],
    "tan": [(0, 0), (-0.0, -0.0), (inf, nan)],
    "asin": [(0, 0), (-0.0, -0.0), (1.5, nan), (1, float(f32(PI / 2)))],
    "acos": [(1, 0), (2, nan)],
    "atan": [(0, 0), (-0.0, -0.0), (inf, float(f32(PI / 2))), (-inf, -float(f32(PI / 2)))],
    "sinh": [(0, 0), (-0.0, -0.0), (inf, inf), (-inf, -inf)],
    "cosh": [(0, 1), (inf, inf), (-inf, inf)],
    "tanh": [(0, 0), (-0.0, -0.0), (inf, 1), (-inf, -1), (100, 1), (-100, -1)],
    "asinh": [(0, 0), (-0.0, -0.0), (inf, inf), (-inf, -inf)],
    "acosh": [(1, 0), (0.5, nan), (inf, inf)],
    "atanh": [(0, 0), (1, inf), (-1, -inf), (2, nan)],
    "sinpi": [(0, 0), (0.5, 1), (1.5, -1)],
    "cospi": [(0, 1), (1, -1), (0.5, 0)],
    "floor": [(-0.0, -0.0), (inf, inf), (-inf, -inf), (-0.5, -1), (8388607.5, 8388607),
     (1e30, 1e30)],
    "ceil": [(-0.0, -0.0), (-0.5, -0.0), (inf, inf), (0.2, 1), (8388607.5, 8388608)],
    "trunc": [(-0.7, -0.0), (0.7, 0), (-1.5, -1), (inf, inf), (8388607.5, 8388607)],
    "rint": [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, -0.0), (-1.5, -2), (8388607.5, 8388608),
     (inf, inf),
             (4194303.5, 4194304), (4194302.5, 4194302)],
    "round": [(0.5, 1), (1.5, 2), (2.5, 3), (-0.5, -1), (-2.5, -3), (0.49999997, 0),
     (8388607.5, 8388608),
              (inf, inf), (-0.0, -0.0), (8388609, 8388609), (-0.49999997, -0.0),
              (4194302.5, 4194303)],
    "fabs": [(-0.0, 0), (-inf, inf)],
    "abs": [(-0.0, 0), (-inf, inf), (-3, 3)],
    "fract": [(-0.25, 0.75), (2.5, 0.5), (-1e-10, 1 - 2.0**-24), (3, 0)],
    "sign": [(-3, -1), (5, 1), (0, 0), (-0.0, -0.0), (inf, 1), (-inf, -1)],
}  # fmt: skip
TWO_ARGUMENTS: dict[str, list[tuple[float, float, float]]] = {
    "pow": [(2, 3, 8), (0, 0, 1), (nan, 0, 1), (1, nan, 1), (-2, 3, -8), (-2, 2, 4),
     (-2, 0.5, nan), (0, -1, inf),
            (0, 2, 0), (inf, 2, inf), (inf, -1, 0), (0.5, inf, 0), (2, -inf, 0), (2, inf, inf),
            (-1, inf, 1),
            (-0.0, 3, -0.0), (-0.0, 2, 0), (-inf, 3, -inf), (9, 0.5, 3), (-0.0, -3, -inf)],
    "fmod": [(5, 3, 2), (-5, 3, -2), (5, -3, 2), (5, inf, 5), (inf, 2, nan), (5, 0, nan),
     (-0.0, 3, -0.0),
             (5.5, 0.25, 0)],
    "fmin": [(nan, 2, 2), (2, nan, 2), (nan, nan, nan), (-inf, 3, -inf), (inf, 3, 3)],
    "fmax": [(nan, 2, 2), (2, nan, 2), (nan, nan, nan), (-inf, 3, 3), (inf, 3, inf)],
    "min": [(nan, 2, 2), (2, nan, 2), (nan, nan, nan), (-inf, 3, -inf)],
    "max": [(nan, 2, 2), (2, nan, 2), (nan, nan, nan), (inf, 3, inf)],
    "fdim": [(3, 1, 2), (1, 3, 0), (inf, 1, inf), (-inf, 1, 0)],
    "copysign": [(3, -0.0, -3), (-3, 1, 3), (inf, -1, -inf), (0, -2, -0.0)],
    "divide": [(1, 0, inf), (-1, 0, -inf), (0, 0, nan), (1, inf, 0), (1, -inf, -0.0), (6, 3, 2)],
    "atan2": [(0, 1, 0), (-0.0, 1, -0.0), (0, -1, float(f32(PI))), (-0.0, -1, -float(f32(PI))),
              (1, 0, float(f32(PI / 2))), (-1, 0, -float(f32(PI / 2))), (1, inf, 0),
              (1, -inf, float(f32(PI))),
              (inf, 1, float(f32(PI / 2))), (inf, inf, float(f32(PI / 4))),
              (-inf, inf, -float(f32(PI / 4))),
              (0, 0, 0), (0, -0.0, float(f32(PI)))],
    "nextafter": [(1, 2, 1 + 2.0**-23), (1, 0, 1 - 2.0**-24), (3, 3, 3)],
    "powr": [(2, 3, 8), (4, 0.5, 2), (0, 2, 0), (inf, 1, inf)],
}  # fmt: skip
# Where the tables give a value that a bound of a few ulp may miss.
ROUGH = {"asin": 4, "atan": 5, "atan2": 6, "pow": 16, "powr": 16, "exp2": 4, "log2": 4}


@pytest.mark.parametrize("space", ["", "precise::"])
def test_special_values(space: str) -> None:
    # Numbers come from an array, so that no compiler knows them; the last of a table fills its row.
    n = 1 + max(map(len, [*ONE_ARGUMENT.values(), *TWO_ARGUMENTS.values()]))
    rows: list[Array] = []
    s = Slots(n=n)

    def add(name: str, table: list[Any]) -> None:
        *arguments, want = np.array(table + table[-1:] * (n - len(table)), f32).T.copy()
        given = ", ".join(f"v[{(len(rows) + k) * n} + i]" for k in range(len(arguments)))
        rows.extend(arguments)
        ulp = ROUGH.get(name, 0)
        s.expr("float", f"{space}{name}({given})", want, ulp=ulp, atol=1e-30 if ulp else 0)

    for name, table in ONE_ARGUMENT.items():
        if name != "sign" or not space:
            add(name, [*table, (nan, 0 if name == "sign" else nan)])
    for name, triples in TWO_ARGUMENTS.items():
        if not space or name not in ("copysign", "nextafter"):
            add(name, triples)
    s.inputs = {"v": np.concatenate(rows)}
    s.check()


def test_predicates() -> None:
    v = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 1e38, 1e-30, 1.5, -2.5, 7], f32)
    w = v[::-1].copy()
    for kind in ("float", "half", "bfloat"):
        a, b = v.astype(KINDS[kind]), w.astype(KINDS[kind])
        x, y = a.astype(f64), b.astype(f64)
        s = Slots(n=v.size, inputs={"a": a, "b": b}, prologue=f"{kind} x = a[i], y = b[i];")
        for space in ("", "metal::"):
            s.expr("bool", f"{space}isnan(x)", np.isnan(x))
            s.expr("bool", f"{space}isinf(x)", np.isinf(x))
            s.expr("bool", f"{space}isfinite(x)", np.isfinite(x))
        least = {"float": 2.0**-126, "half": 2.0**-14, "bfloat": 2.0**-126}[kind]
        s.expr("bool", "isnormal(x)", np.isfinite(x) & (np.abs(x) >= least))
        s.expr("bool", "isordered(x, y)", ~np.isnan(x) & ~np.isnan(y))
        s.expr("bool", "isunordered(x, y)", np.isnan(x) | np.isnan(y))
        s.expr("bool", "signbit(x)", np.where(np.isnan(x), False, np.signbit(x)))
        s.slots[-1].text = "isnan(x) ? false : signbit(x)"
        s.stmt(
            "bool", f"bool2 t = isnan({kind}2(x, y)); OUT = t.x && t.y;", np.isnan(x) & np.isnan(y)
        )
        s.stmt("bool", f"OUT = any(isinf({kind}2(x, y)));", np.isinf(x) | np.isinf(y))
        s.stmt("bool", f"OUT = all(isfinite({kind}3(x, y, 0)));", np.isfinite(x) & np.isfinite(y))
        s.stmt(
            "uint",
            f"OUT = uint(signbit({kind}2(x, y)).y);",
            np.where(np.isnan(y), 0, np.signbit(y)),
        )
        s.slots[-1].text = f"OUT = isnan(y) ? 0 : uint(signbit({kind}2(x, y)).y);"
        s.check()


HALF_BOUNDS: list[tuple[str, Function, float]] = [
    ("acos", np.arccos, 1), ("acosh", np.arccosh, 1), ("asin", np.arcsin, 1),
    ("asinh", np.arcsinh, 1),
    ("atan", np.arctan, 1), ("atanh", np.arctanh, 1), ("ceil", np.ceil, 0), ("cos", np.cos, 1),
    ("cosh", cosh, 1),
    ("cospi", pi_cosine, 1), ("exp", np.exp, 1), ("exp2", np.exp2, 1),
    ("exp10", lambda x: 10.0**x, 1),
    ("fabs", np.abs, 0), ("abs", np.abs, 0), ("floor", np.floor, 0), ("log", np.log, 1),
    ("log2", np.log2, 1),
    ("log10", np.log10, 1), ("rint", np.rint, 0), ("round", round_away, 0),
    ("rsqrt", lambda x: 1 / np.sqrt(x), 1), ("sin", np.sin, 1), ("sinh", np.sinh, 1),
    ("sinpi", pi_sine, 1),
    ("sqrt", np.sqrt, 0.5), ("tan", np.tan, 2), ("tanh", np.tanh, 1),
    ("tanpi", lambda x: pi_sine(x) / pi_cosine(x), 2),
    ("trunc", np.trunc, 0),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_every_16_bit_number_through_every_function(kind: str) -> None:
    v = np.arange(65536, dtype=np.uint16).view(KINDS[kind])
    x = v.astype(f64)
    usable = np.isfinite(x) & ((np.abs(x) >= 2.0**-126) | (x == 0))
    v, x = v[usable], x[usable]
    s = Slots(n=v.size, inputs={"v": v}, prologue=f"{kind} x = v[i];")
    for name, reference, bound in HALF_BOUNDS:
        domain = np.ones(x.size, bool)
        if kind == "bfloat" and name in ("sinpi", "cospi", "tanpi", "sin", "cos", "tan"):
            domain = np.abs(x) < 1e6
        if name == "tanpi":
            domain &= np.mod(x, 1) != 0.5  # a pole: the sign of the infinity is not said
        want = np.asarray(reference(x))
        # What the type cannot hold is infinite, and what is below its least number near zero.
        largest = float(np.finfo(f32).max) if kind == "bfloat" else 65504.0
        want = np.where(np.abs(want) > largest, want.astype(KINDS[kind]).astype(f64), want)
        condition = {True: "x", False: f"(fabs(float(x)) < 1e6f ? x : {kind}(0.0f))"}[
            bool(domain.all())
        ]
        if name == "tanpi":
            condition = (
                f"(fract(fabs(float(x))) != 0.5f && fabs(float(x)) < 1e6f ? x : {kind}(0.0f))"
            )
            domain &= np.abs(x) < 1e6
        want = np.where(domain, want, np.asarray(reference(np.zeros(1)))[0])
        atol = 2.0**-126 if kind == "bfloat" else 0.0
        if bound == 0:
            s.expr(kind, f"{name}({condition})", want.astype(KINDS[kind]))
        else:
            s.expr(
                kind, f"{name}({condition})", want, ulp=bound if kind == "half" else 0.51, atol=atol
            )
    s.check()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_16_bit_functions_of_several_arguments(kind: str) -> None:
    dtype = KINDS[kind]
    rng = np.random.default_rng(23)
    n = 3000
    a, b, c = (np.exp2(rng.uniform(-4, 4, n)).astype(f32).astype(dtype) for _ in range(3))
    d = np.clip(rng.normal(size=n) * 2, -3.9, 3.9).astype(f32).astype(dtype)
    x, y, z, w = (v.astype(f64) for v in (a, b, c, d))
    s = Slots(n=n, inputs={"va": a, "vb": b, "vc": c, "vd": d},
              prologue=f"{kind} a = va[i], b = vb[i], c = vc[i], d = vd[i];")  # fmt: skip
    near = 1.0 if kind == "half" else 0.51
    for space in ("", "metal::", "precise::", "fast::") if kind == "bfloat" else ("", "metal::"):
        loose = 2.0 if space == "fast::" else near
        s.expr(kind, f"{space}atan2(d, b)", np.arctan2(w, y), ulp=loose)
        s.expr(kind, f"{space}pow(a, d)", np.power(x, w), ulp=2 if kind == "half" else loose)
        s.expr(kind, f"{space}powr(a, d)", np.power(x, w), ulp=2 if kind == "half" else loose)
        s.expr(kind, f"{space}divide(a, b)", x / y, ulp=loose if space == "fast::" else 0.5)
        s.expr(kind, f"{space}fmod(d, b)", np.fmod(w, y), ulp=0.5 if space != "fast::" else 1e9,
               atol=0 if space != "fast::" else 0.01)  # fmt: skip
        s.expr(kind, f"{space}fdim(a, b)", np.maximum(x - y, 0), ulp=0.5)
        s.expr(kind, f"{space}fma(a, b, d)",
         (x * y + w).astype(dtype) if kind == "half" else x * y + w,
               ulp=0 if kind == "half" else 0.501)  # fmt: skip
        s.expr(kind, f"{space}max(a, b)", np.maximum(x, y))
        s.expr(kind, f"{space}min(a, d)", np.minimum(x, w))
        s.expr(kind, f"{space}fmax(d, b)", np.maximum(w, y))
        s.expr(kind, f"{space}fmin(d, b)", np.minimum(w, y))
        s.expr(kind, f"{space}max3(a, b, d)", np.max([x, y, w], 0))
        s.expr(kind, f"{space}min3(a, b, d)", np.min([x, y, w], 0))
        s.expr(kind, f"{space}median3(a, b, c)", median(x, y, z))
        s.expr(kind, f"{space}ldexp(a, 3)", x * 8)
        s.stmt(kind, f"int e; OUT = {space}frexp(a, e);", np.frexp(x)[0])
        s.stmt("int", f"int e; {space}frexp(a, e); OUT = e;", np.frexp(x)[1])
        if kind == "bfloat":
            s.expr(kind, f"{space}fract(d)", w - np.floor(w), ulp=0.51)
            s.expr(kind, f"{space}nextafter(a, b)", np.nextafter(a, b))
    s.expr(kind, "copysign(a, d)", np.copysign(x, w))
    s.expr(kind, f"clamp(d, {kind}(-1), {kind}(1))", np.clip(w, -1, 1))
    if kind == "half":
        s.expr(kind, "fract(d)", (w - np.floor(w)).astype(dtype), ulp=1)
        s.expr(kind, "saturate(d)", np.clip(w, 0, 1))
        s.expr(kind, "sign(d)", np.sign(w))
        s.expr(kind, "step(a, b)", (y >= x).astype(f64))
        s.expr(kind, "fma(a, 2.0h, b)", (x * 2 + y).astype(dtype))
        s.expr("half", "half(precise::exp(d))", np.exp(w), ulp=1)
        s.expr("half", "half(fast::tanh(d))", np.tanh(w), ulp=2)
        s.stmt("half", "half k; OUT = sincos(d, k); OUT = k;", np.cos(w), ulp=1)
        s.stmt("half", "half k; OUT = modf(d, k);", np.copysign(w - np.trunc(w), w))
        s.stmt("half", "half2 t = pow(half2(a, b), half2(2)); OUT = t.y;", y * y, ulp=2)
        s.stmt("half", "half4 t = exp(half4(d)); OUT = t.w;", np.exp(w), ulp=1)
    s.check()


def test_calls_that_mix_types() -> None:
    """The calls that kernels make: a half beside a float, an int beside a float, a scalar first."""
    s = Slots(
        prologue="half h = 1.5h; bfloat b = bfloat(2.5f); float f = 2; int n = 3; uint u = 4;"
        " uchar c = 5;"
    )
    for text, want in [
        ("max(float(h), f)", 2), ("min(f, float(b))", 2), ("fma(2.0f, f, 1)", 5), ("pow(f, 3)", 8),
        ("pow(2.0f, n)", 8), ("max(f, 0)", 2), ("max(0, f)", 2), ("fmax(f, 3)", 3),
        ("min(3, f)", 2), ("clamp(f, 0, 1)", 1),
        ("clamp(f, 0.0f, 1)", 1), ("exp2(float(n))", 8), ("sqrt(float(u))", 2), ("sqrt(4.0f)", 2),
        ("floor(f / 3)", 0),
        ("abs(-f)", 2), ("fabs(f - 5)", 3), ("ldexp(f, n)", 16), ("mix(f, 4, 0.5f)", 3),
        ("metal::max(f, 3.0)", 3),
        ("precise::sqrt(4.0)", 2), ("fast::max(f, 3.0f)", 3), ("fast::clamp(f, 0.0f, 1.0f)", 1),
        ("precise::divide(1.0f, f)", 0.5), ("fma(f, f, h)", 5.5), ("select(f, 1.0f, n > 2)", 1),
        ("sign(-f)", -1),
    ]:  # fmt: skip
        s.expr("float", text, want)
    s.expr("int", "max(n, 5)", 5)
    s.expr("uint", "min(u, 2u)", 2)
    s.expr("int", "abs(n - 7)", 4)
    s.expr("int", "clamp(n, 0, 2)", 2)
    s.expr("half", "max(h, 2.0h)", 2)
    s.expr("float", "max(h, 2.5f)", 2.5)
    s.expr("float", "min(f, h)", 1.5)
    s.expr("half", "clamp(h, 0.0h, 1.0h)", 1)
    s.expr("bfloat", "max(b, bfloat(3))", 3)
    s.expr("float", "max(b, 3.5f)", 3.5)
    s.expr("float", "sqrt(h * h + f)", np.sqrt(4.25), ulp=1)
    s.expr("float", "exp(h + 0.5f)", np.exp(2), ulp=4)
    s.check()


def test_functions_of_vectors() -> None:
    a = np.abs(INPUTS["some"][:64]).reshape(16, 4)
    x = a.astype(f64)
    s = Slots(
        n=16,
        inputs={"a": a},
        prologue="float4 v = ((const device float4*)a)[i]; float3 w = v.xyz; float2 u = v.xy;"
        " half4 h = half4(v);",
    )
    for space in ("", "metal::", "precise::"):
        s.expr("float", f"{space}exp(-v).w", np.exp(-x[:, 3]), ulp=4)
        s.expr("float", f"{space}sqrt(w).z", np.sqrt(x[:, 2]).astype(f32))
        s.expr("float", f"{space}log(v + 1).x", np.log((a[:, 0] + f32(1)).astype(f64)), ulp=4)
        s.expr("float", f"{space}sin(u).y", np.sin(x[:, 1]), ulp=4)
        s.expr("float", f"{space}pow(v, float4(2)).y", x[:, 1] ** 2, ulp=16)
        s.expr("float", f"{space}max(v, u.xyxy).z", np.maximum(x[:, 2], x[:, 0]))
        s.expr("float", f"{space}rsqrt(v).w", 1 / np.sqrt(x[:, 3]), ulp=1)
        s.expr("float", f"{space}fma(v, v, v).x", x[:, 0] * x[:, 0] + x[:, 0], ulp=0.51)
        s.expr("float", f"{space}tanh(w).y", np.tanh(x[:, 1]), ulp=5)
    s.expr("float", "fast::exp(-v).w", np.exp(-x[:, 3]), ulp=163)
    s.expr("float", "floor(v).z", np.floor(x[:, 2]))
    s.expr("float", "max(v, 3.0f).y", np.maximum(x[:, 1], 3))
    s.expr("float", "min(20.0f, v).x", np.minimum(x[:, 0], 20))
    s.expr("float", "clamp(v, 1.0f, 2.0f).w", np.clip(x[:, 3], 1, 2))
    s.expr("float", "fma(2.0f, v, 1.0f).w", 2 * x[:, 3] + 1, ulp=0.51)
    s.expr("float", "abs(-v).w", x[:, 3])
    s.expr("half", "max(h, half4(5)).x", np.maximum(a[:, 0].astype(np.float16), np.float16(5)))
    s.expr(
        "half",
        "exp(-h * 0.1h).y",
        np.exp(-(a[:, 1].astype(np.float16) * np.float16(0.1)).astype(f64)),
        ulp=1,
    )
    s.expr("half", "floor(h).z", np.floor(a[:, 2].astype(np.float16)))
    s.stmt("bfloat", "bfloat4 t = bfloat4(v); OUT = max(t, bfloat4(7.0f)).x;",
           np.maximum(a[:, 0].astype(bfloat16).astype(f32), 7))  # fmt: skip
    s.check()
