"""Small expressions of the dialect with their NumPy counterparts, and what compares them.

The CPU's compilers and NVRTC compile the same table (`program`); tests call each expression on
every 16-bit value or on random bits (`row`) and compare (`check`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ferrule

INCLUDE = Path(ferrule.__file__).parent / "include"
HEADERS = ("types.h", "math.h", "functions.h", "atomic.h", "mlx.h")
_NATIVE = Path(__file__).parent / "native"
Array = np.ndarray[Any, Any]
Wanted = Callable[..., Any]

f16, f32, f64, bf16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16
NUMPY: dict[str, np.dtype[Any]] = {
    "half": np.dtype(f16), "bfloat": np.dtype(bf16), "float": np.dtype(f32),
    "double": np.dtype(f64), "bool": np.dtype(np.bool_), "char": np.dtype(np.int8),
    "uchar": np.dtype(np.uint8), "short": np.dtype(np.int16), "ushort": np.dtype(np.uint16),
    "int": np.dtype(np.int32), "uint": np.dtype(np.uint32), "int64_t": np.dtype(np.int64),
    "uint64_t": np.dtype(np.uint64),
}  # fmt: skip
FLOATS = ("half", "bfloat", "float", "double")
INTS = ("char", "ushort", "int", "uint", "int64_t", "uint64_t")


@dataclass(frozen=True)
class Case:
    """An expression in a, b, c of the types named, and what NumPy makes of it.

    In its text T is the first type, or the element of it, and V the first type. ``"float:3"``
    stands for a vector of three, whose arrays have a last axis of 3.
    """

    name: str
    types: tuple[str, ...]
    result: str
    text: str
    want: Wanted
    close: bool = False  # up to rounding: the compiler may contract
    zeros: bool = True  # the sign of a zero is compared


def split_kind(kind: str) -> tuple[str, int]:
    t, _, n = kind.partition(":")
    return t, int(n or 1)


def has_small(case: Case) -> bool:
    """Whether a 16-bit float takes part."""
    return any(kind.startswith(("half", "bfloat")) for kind in (*case.types, case.result))


# ---- conversions and arithmetic ------------------------------------------------------------------
def _to_bf16(x: Array) -> Array:
    """float64 rounded half to even to bfloat16, once."""
    x = np.asarray(x, f64)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1], -125) - 8)
    return np.where(np.isfinite(x), np.rint(x / step) * step, x).astype(f32).astype(bf16)


def _to_int(a: Array) -> Array:
    return np.trunc(np.where(np.abs(a.astype(f32)) < 1e9, a.astype(f32), 0))


def _conversions() -> Iterator[Case]:
    def to(dtype: Any) -> Wanted:
        return lambda a: a.astype(f32).astype(dtype)

    yield Case("half_float", ("half",), "float", "a", to(f32))
    yield Case("bfloat_float", ("bfloat",), "float", "a", to(f32))
    yield Case("half_double", ("half",), "double", "a", to(f64))
    yield Case("float_half", ("float",), "half", "a", to(f16))
    yield Case("bfloat_half", ("bfloat",), "half", "a", to(f16))
    yield Case("double_half", ("double",), "half", "a", lambda a: a.astype(f16))
    yield Case("half_lit", ("double",), "half", "::fr::half_lit(a)", lambda a: a.astype(f16))
    for t in ("float", "double", "half"):
        yield Case(f"{t}_bfloat", (t,), "bfloat", "a", _to_bf16)
    yield Case("bfloat_lit", ("double",), "bfloat", "::fr::bfloat_lit(a)", _to_bf16)
    for t in INTS:
        yield Case(f"{t}_half", (t,), "half", "a", to(f16))
        yield Case(f"{t}_bfloat", (t,), "bfloat", "a", lambda a: _to_bf16(a.astype(f32)))
    for t in ("half", "bfloat"):
        text = "isfinite(a) && abs(a) < 1e9f ? int(a) : 0"
        yield Case(f"{t}_int", (t,), "int", text, _to_int)
        yield Case(f"{t}_bool", (t,), "bool", "a ? true : false", lambda a: a.astype(f32) != 0)


def _incremented(a: Array) -> Array:
    one = a.dtype.type(1)
    t = a + one + one
    return a + t - (t - one)


def _compared(a: Array, b: Array) -> Array:
    one, two, zero = (a.dtype.type(k) for k in (1, 2, 0))
    bits = a < b, a == b, a != b, a >= one, two > b, a == zero
    return np.asarray(sum(bit.astype(int) << k for k, bit in enumerate(bits)))


def _assigned(a: Array, b: Array) -> Array:
    return (a.astype(f32) + b).astype(a.dtype) * a - a.dtype.type(1)


def _int_assigned(a: Array, kind: str) -> Array:
    """`int += half` is what `int + half` is, rounded to half, each time converted back."""
    small = NUMPY[kind]
    first = (a.astype(small) + small.type(63)).astype(np.int32)
    return (first.astype(small) - small.type(7)).astype(np.int32)


def _mixed(a: Array, b: Array) -> Array:
    a, b = a.astype(f32), b.astype(f32)
    return np.where(a > b, a + b, a * b)


def _fused(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(f16)


def _arithmetic() -> Iterator[Case]:
    for s in ("half", "bfloat"):
        yield Case(f"{s}_chain", (s, s), s, "a * b + a", lambda a, b: a * b + a)
        yield Case(f"{s}_sub", (s, s), s, "a - b", lambda a, b: a - b)
        yield Case(f"{s}_div", (s, s), s, "a / b", lambda a, b: a / b)
        yield Case(f"{s}_neg", (s,), s, "-a", lambda a: -a)
        yield Case(f"{s}_short", (s, "short"), s, "a * b", lambda a, b: a * b.astype(a.dtype))
        yield Case(f"short_{s}", ("short", s), s, "a - b", lambda a, b: a.astype(b.dtype) - b)
        text = "a - b"
        yield Case(f"{s}_less_float", (s, "float"), "float", text, lambda a, b: a.astype(f32) - b)
        text = "[=] { T t = a; t += b; t *= a; t -= 1; return t; }()"
        yield Case(f"{s}_assign", (s, "float"), s, text, _assigned)
        text = f"[=] {{ int t = a; t += {s}(63); t -= {s}(7); return t; }}()"
        yield Case(f"int_assign_{s}", ("short",), "int", text, lambda a, s=s: _int_assigned(a, s))
        text = "[=] { T t = a, o = t++; ++t; o += t--; return o - t; }()"
        yield Case(f"{s}_increment", (s,), s, text, _incremented)
        text = "(a < b) + 2 * (a == b) + 4 * (a != b) + 8 * (a >= 1) + 16 * (2u > b) + 32 * !a"
        yield Case(f"{s}_compare", (s, s), "uchar", text, _compared)
    yield Case("half_bfloat_mix", ("half", "bfloat"), "float", "a > b ? a + b : a * b", _mixed)
    yield Case("half_fma", ("half",) * 3, "half", "fma(a, b, c)", _fused)


# ---- functions that are exact on every float -----------------------------------------------------
def _median(a: Array, b: Array, c: Array) -> Array:
    middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), a, middle)


def _classified(a: Array) -> Array:
    normal = np.isfinite(a) & (np.abs(a) >= ml_dtypes.finfo(a.dtype).smallest_normal)
    nan = np.isnan(a)
    bits = nan, np.isinf(a), np.isfinite(a), normal, np.signbit(a), ~nan, nan
    return np.asarray(sum(bit.astype(int) << k for k, bit in enumerate(bits)))


def _blended(a: Array, b: Array, c: Array) -> Array:
    a, b, c = (np.fmin(np.fmax(x.astype(f32), -9), 9) for x in (a, b, c))
    return a + (b - a) * c


def _smoothed(a: Array) -> Array:
    t = np.fmin(np.fmax((a.astype(f32) - f32(0.5)) / f32(3.5), 0), 1)
    return t * t * (f32(3) - f32(2) * t)


def _exact() -> Iterator[Case]:
    for t in FLOATS:
        zero, one, two, three = (NUMPY[t].type(k) for k in (0, 1, 2, 3))

        def sign(a: Array, zero: Any = zero) -> Array:
            return np.where(np.isnan(a), zero, np.sign(a))

        def clamp(a: Array, low: Any = -two, high: Any = three) -> Array:
            return np.fmin(np.fmax(a, low), high)

        def saturate(a: Array, low: Any = zero, high: Any = one) -> Array:
            return np.fmin(np.fmax(a, low), high)

        def step(a: Array, b: Array, zero: Any = zero, one: Any = one) -> Array:
            return np.where(b < a, zero, one)

        rows: list[tuple[str, int, str, Wanted]] = [
            ("max", 2, "max(a, b)", np.fmax),
            ("min", 2, "fast::min(a, b)", np.fmin),
            ("fmax", 2, "metal::fmax(a, b)", np.fmax),
            ("max3", 3, "max3(a, b, c)", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
            ("median3", 3, "isnan(a + b + c) && (isnan(a) || isnan(b) || isnan(c)) ? a"
                           " : median3(a, b, c)", _median),
            ("clamp", 1, "clamp(a, T(-2), T(3))", clamp),
            ("saturate", 1, "saturate(a)", saturate),
            ("sign", 1, "sign(a)", sign),
            ("step", 2, "step(a, b)", step),
            ("nextafter", 2, "nextafter(a, b)", np.nextafter),
            ("select", 2, "select(a, b, a < b)", lambda a, b: np.where(a < b, b, a)),
            ("modf", 1, "[=] { T i; T r = modf(a, i); return r + i; }()", lambda a: a),
            ("frexp", 1, "[=] { int e; T r = frexp(a, e); return ldexp(r, e); }()", lambda a: a),
        ]  # fmt: skip
        for name, arity, text, want in rows:
            yield Case(f"{t}_{name}", (t,) * arity, t, text, want, zeros=False)
        yield Case(f"{t}_abs", (t,), t, "abs(a)", np.abs)
        yield Case(f"{t}_copysign", (t, t), t, "copysign(a, b)", np.copysign)
        text = (
            "isnan(a) + 2 * isinf(a) + 4 * isfinite(a) + 8 * isnormal(a) + 16 * signbit(a)"
            " + 32 * isordered(a, T(1)) + 64 * isunordered(T(1), a)"
        )
        yield Case(f"{t}_class", (t,), "uchar", text, _classified)
        if t != "double":
            text = "mix(clamp(a, T(-9), T(9)), clamp(b, T(-9), T(9)), clamp(c, T(-9), T(9)))"
            yield Case(f"{t}_mix", (t,) * 3, t, text, _blended, close=True, zeros=False)
            text = "smoothstep(T(0.5f), T(4), a)"
            yield Case(f"{t}_smoothstep", (t,), t, text, _smoothed, close=True, zeros=False)
    text, types = "max(a, b)", ("half", "float")
    yield Case("half_float_max", types, "float", text, lambda a, b: np.fmax(a.astype(f32), b),
               zeros=False)  # fmt: skip


# ---- math.h's functions --------------------------------------------------------------------------
# In float64; math.h has its own tests: these are about half, bfloat and vectors of them.
_REAL1: dict[str, Wanted] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh,
    "cospi": lambda a: np.cos(np.pi * np.fmod(a, 2)), "exp": np.exp, "exp2": np.exp2,
    "exp10": lambda a: 10.0**a, "floor": np.floor, "fract": lambda a: a - np.floor(a),
    "log": np.log, "log2": np.log2, "log10": np.log10, "rint": np.rint,
    "round": lambda a: np.copysign(np.floor(np.abs(a) + 0.5), a), "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin, "sinh": np.sinh, "sinpi": lambda a: np.sin(np.pi * np.fmod(a, 2)),
    "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc, "fabs": np.abs,
}  # fmt: skip
_REAL2: dict[str, Wanted] = {
    "atan2": np.arctan2, "divide": np.divide, "fmod": np.fmod,
    "fdim": lambda a, b: np.fmax(a - b, 0),
    "pow": lambda a, b: np.abs(a) ** b, "powr": lambda a, b: np.abs(a) ** b,
    "ldexp": lambda a, b: a * 2.0 ** np.trunc(b),
}  # fmt: skip
# One macro lifts them all: for vectors and bfloat a few suffice.
_SOME = ("acos", "exp", "log2", "rint", "tanh", "atan2", "pow")


def _real() -> Iterator[Case]:
    def on_cut(f: Wanted) -> Wanted:
        return lambda *xs: f(*(np.fmin(np.fmax(x.astype(f64), -6), 6) for x in xs))

    for kind, space in (("half", "metal::"), ("bfloat", "fast::"), ("float:3", "precise::")):
        label = kind.replace(":", "")
        a, b = (f"clamp({x}, T(-6), T(6))" for x in "ab")
        for name, f in (_REAL1 | _REAL2).items():
            if kind != "half" and name not in _SOME:
                continue
            first = f"abs({a})" if name.startswith("pow") else a
            second = "" if name in _REAL1 else f", trunc({b})" if name == "ldexp" else f", {b}"
            text = f"{space}{name}({first}{second})"
            types = (kind,) * (1 if name in _REAL1 else 2)
            yield Case(f"{label}_{name}", types, kind, text, on_cut(f), close=True, zeros=False)
    text = f"[=] {{ V c; V s = precise::sincos({a}, c); return s + c; }}()"
    want = on_cut(lambda a: np.sin(a) + np.cos(a))
    yield Case("float3_sincos", ("float:3",), "float:3", text, want, close=True, zeros=False)


# ---- ints, against Python's own ------------------------------------------------------------------
def _ints(t: str) -> Iterator[Case]:
    info = np.iinfo(NUMPY[t])
    n, low, high = info.bits, int(info.min), int(info.max)
    ones = (1 << n) - 1

    def wrap(x: int) -> int:
        return ((x - low) & ones) + low

    def clip(x: int) -> int:
        return min(max(x, low), high)

    def each(f: Callable[..., int]) -> Wanted:
        def run(*arrays: Array) -> Array:
            rows = zip(*(x.tolist() for x in arrays), strict=True)
            return np.array([wrap(f(*values)) for values in rows], NUMPY[t])

        return run

    def rotate(v: int, i: int) -> int:
        u, k = v & ones, i % n
        return u << k | u >> (n - k)

    def extract(x: int, offset: int, bits: int) -> int:
        field = (x & ones) >> offset & ((1 << bits) - 1)
        return field - (1 << bits) if low < 0 and bits and field >> (bits - 1) else field

    def cut(x: int) -> int:
        half = 1 << 23 if low < 0 else 0
        return ((x + half) & 0xFFFFFF) - half

    rows: list[tuple[str, int, str, Callable[..., int]]] = [
        ("popcount", 1, "popcount(a)", lambda a: bin(a & ones).count("1")),
        ("clz", 1, "clz(a)", lambda a: n - (a & ones).bit_length()),
        ("ctz", 1, "ctz(a)", lambda a: (a & -a).bit_length() - 1 if a else n),
        ("reverse", 1, "reverse_bits(a)", lambda a: int(f"{a & ones:0{n}b}"[::-1], 2)),
        ("abs", 1, "abs(a)", abs),
        ("extract", 1, "extract_bits(a, 3, 4)", lambda a: extract(a, 3, 4)),
        ("extract_all", 1, f"extract_bits(a, 0, {n})", lambda a: a),
        ("extract_none", 1, "extract_bits(a, 2, 0)", lambda a: 0),
        ("max", 2, "max(a, b)", max),
        ("min", 2, "min(a, b)", min),
        ("hadd", 2, "hadd(a, b)", lambda a, b: (a + b) >> 1),
        ("rhadd", 2, "rhadd(a, b)", lambda a, b: (a + b + 1) >> 1),
        ("absdiff", 2, "absdiff(a, b)", lambda a, b: abs(a - b)),
        ("addsat", 2, "addsat(a, b)", lambda a, b: clip(a + b)),
        ("subsat", 2, "subsat(a, b)", lambda a, b: clip(a - b)),
        ("mulhi", 2, "mulhi(a, b)", lambda a, b: a * b >> n),
        ("rotate", 2, "rotate(a, b)", rotate),
        ("insert", 2, "insert_bits(a, b, 2, 5)", lambda a, b: a & ~(31 << 2) | (b & 31) << 2),
        ("clamp", 3, "clamp(a, min(b, c), max(b, c))",
         lambda a, b, c: min(max(a, min(b, c)), max(b, c))),
        ("madhi", 3, "madhi(a, b, c)", lambda a, b, c: (a * b >> n) + c),
        ("madsat", 3, "madsat(a, b, c)", lambda a, b, c: clip(a * b + c)),
        ("median3", 3, "median3(a, b, c)", lambda a, b, c: sorted((a, b, c))[1]),
        ("select", 3, "select(a, b, c > 0)", lambda a, b, c: b if c > 0 else a),
    ]  # fmt: skip
    if n == 32:
        rows += [
            ("mul24", 2, "mul24(a, b)", lambda a, b: cut(a) * cut(b)),
            ("mad24", 3, "mad24(a, b, c)", lambda a, b, c: cut(a) * cut(b) + c),
        ]
    for name, arity, text, f in rows:
        yield Case(f"{t}_{name}", (t,) * arity, t, text, each(f))


# ---- vectors -------------------------------------------------------------------------------------
def _with(a: Array, k: int, b: Array) -> Array:
    a = a.copy()
    a[..., k] = b
    return a


def _vectors() -> Iterator[Case]:
    kinds = ("float", 3), ("half", 4), ("bfloat", 2), ("uint", 4), ("uchar", 3)
    for t, n in kinds:
        one, two, three, eight = (NUMPY[t].type(k) for k in (1, 2, 3, 8))
        larger = np.fmax if t in FLOATS else np.maximum

        def update(a: Array, b: Array, two: Any = two) -> Array:
            a = _with(a, 1, a[..., 1] + b[..., 0])
            return _with(a, 0, (a[..., 0] + b[..., 1]) * two)

        def votes(a: Array, b: Array, n: int = n) -> Array:
            vote = np.any(a < b, -1) + 2 * np.all(a != b, -1)
            return np.repeat(vote[..., None], n, -1)

        def truths(a: Array, b: Array, one: Any = one, three: Any = three) -> Array:
            return ((a < b) & (a != one)) | (a >= three)

        def assign(a: Array, b: Array, one: Any = one, two: Any = two) -> Array:
            return _with((a + b) * two - one, 1, b[..., 0])

        def scalars(a: Array, b: Array, one: Any = one, two: Any = two) -> Array:
            return a + one - (two - b)

        back = ", ".join(str(k) for k in reversed(range(n)))
        rows: dict[str, tuple[str, Wanted]] = {
            "sum": ("a + b", lambda a, b: a + b),
            "product": ("a * b", lambda a, b: a * b),
            "scalar": ("a + T(1) - (T(2) - b)", scalars),
            "int_scalar": ("2 * a", lambda a, b, two=two: two * a),
            "neg": ("-a", lambda a, b: -a),
            "assign": ("[=] { V v = a; v += b; v *= T(2); v -= 1; v[1] = b[0]; return v; }()",
                       assign),
            "index": (f"[=] {{ V v; for (int k = 0; k < {n}; ++k) v[k] = b[{n - 1} - k];"
                      " return v; }()", lambda a, b: b[..., ::-1]),
            "swizzle": (f"a.swz(ix<{back}>{{}}) + b", lambda a, b: a[..., ::-1] + b),
            "write": ("[=] { V v = a; v.swr(ix<1, 0>{}) = b.swz(ix<0, 1>{}); return v; }()",
                      lambda a, b: np.concatenate([b[..., 1::-1], a[..., 2:]], -1)),
            "update": ("[=] { V v = a; v.swr(ix<1, 0>{}) += b.swz(ix<0, 1>{});"
                       " v.swr(ix<0>{}) *= T(2); return v; }()", update),
            "select": ("select(a, b, a < b)", lambda a, b: np.where(a < b, b, a)),
            "max": ("max(a, b)", larger),
            "max_scalar": ("max(T(1), a)", lambda a, b, f=larger, one=one: f(a, one)),
            "votes": ("V(T(any(a < b) + 2 * all(a != b)))", votes),
            "truths": ("V((a < b && !(a == T(1))) || a >= T(3))", truths),
            "convert": (f"V(vec<double, {n}>(a))", lambda a, b: a),
            "packed": (f"[=] {{ packed_vec<T, {n}> p = a, q = b; p += q; p[1] = q.x;"
                       " return V(p * q); }()", lambda a, b: _with(a + b, 1, b[..., 0]) * b),
        }  # fmt: skip
        if t not in FLOATS:
            rows |= {
                "bits": ("((a & b) | T(8)) ^ (~a << 1)",
                         lambda a, b, one=one, eight=eight: ((a & b) | eight) ^ (~a << one)),
                "mod": ("a % (b | T(1))", lambda a, b, one=one: np.fmod(a, b | one)),
                "shift": ("[=] { V v = a; v >>= 2; v |= b; v ^= 8; v &= T(3); return v; }()",
                          lambda a, b, x=(two, eight, three): (((a >> x[0]) | b) ^ x[1]) & x[2]),
            }  # fmt: skip
        for key, (text, want) in rows.items():
            kind = f"{t}:{n}"
            yield Case(f"{t}{n}_{key}", (kind, kind), kind, text, want, zeros=False)


def _table() -> dict[str, Case]:
    cases = [*_conversions(), *_arithmetic(), *_exact(), *_real(), *_vectors()]
    for t in INTS:
        cases += _ints(t)
    table = {case.name: case for case in cases}
    assert len(table) == len(cases), "two cases of one name"
    return table


CASES = _table()


# ---- as programs ---------------------------------------------------------------------------------
def _function(case: Case, cuda: bool) -> str:
    """A case as a loop, or a kernel. Vectors lie packed: NumPy's rows of three have no padding."""

    def name(kind: str, vector: str) -> str:
        t, n = split_kind(kind)
        return t if n == 1 else f"{vector}<{t}, {n}>"

    named = list(zip(case.types, "abc", strict=False))
    pointers = ", ".join(f"const {name(kind, 'packed_vec')}* {x}_" for kind, x in named)
    loads = " ".join(f"const {name(kind, 'vec')} {x} = {x}_[i];" for kind, x in named)
    t, v = split_kind(case.types[0])[0], name(case.types[0], "vec")
    body = f"using T = {t}; using V = {v}; {loads}"
    if not cuda and (case.close or case.types[0] not in FLOATS):
        body += ' asm volatile("");'  # no time for vectorising them all
    body += f" y_[i] = {name(case.result, 'vec')}({case.text});"
    head = f"void case_{case.name}({pointers}, {name(case.result, 'packed_vec')}* y_, int n)"
    if not cuda:
        return f'extern "C" {head} {{ for (int i = 0; i < n; ++i) {{ {body} }} }}\n'
    return (
        f'extern "C" __global__ {head} {{ int i = blockIdx.x * blockDim.x + threadIdx.x;'
        f" if (i >= n) return; {body} }}\n"
    )


def _in_user_space(text: str) -> str:
    """Inside the namespaces where a kernel's text is compiled."""
    return f"namespace fr {{ namespace user {{ using namespace metal;\n{text}\n}} }}\n"


def program(keep: Callable[[Case], bool], *natives: str, cuda: bool = False) -> str:
    """The cases that ``keep`` wants, and the texts of tests/native that are named."""
    text = "".join(_function(case, cuda) for case in CASES.values() if keep(case))
    return _in_user_space(text + "".join((_NATIVE / name).read_text() for name in natives))


_SCALARS = (
    "bool", "char", "signed char", "uchar", "short", "ushort", "int", "uint", "long",
    "unsigned long", "long long", "unsigned long long", "size_t", "int64_t", "uint64_t",
    "half", "bfloat", "float", "double",
)  # fmt: skip


def _sum(a: str, b: str) -> str:
    """Metal's type of a + b where one is half or bfloat."""
    if "double" in (a, b):
        return "double"
    if "float" in (a, b) or {a, b} == {"half", "bfloat"}:
        return "float"
    return a if a in ("half", "bfloat") else b


def _pair_checks(a: str, b: str) -> Iterator[str]:
    want = _sum(a, b)
    x, y = f"declval<{a}&>()", f"declval<{b}&>()"
    for op in "+-*/":
        yield f"same<{want}, decltype({x} {op} {y})> && same<{a}&, decltype({x} {op}= {y})>"
    for op in ("==", "!=", "<", ">", "<=", ">="):
        yield f"same<bool, decltype({x} {op} {y})>"
    arms = " : ".join(f"::fr::pick<{a}&, {b}&>({arm})" for arm in (x, y))
    yield f"same<{want}, remove_cvref_t<decltype(declval<bool>() ? {arms})>>"
    yield f"same<{want}, decltype(max({x}, {y}))> && is_convertible_v<{a}, {b}>"


def names_program() -> str:
    """What holds at compile time: the types of all sums with half and bfloat, and names."""
    pairs = {(a, b) for s in ("half", "bfloat") for o in _SCALARS for a, b in ((s, o), (o, s))}
    checks = (c for pair in sorted(pairs) for c in _pair_checks(*pair))
    text = "template <class A, class B> constexpr bool same = is_same_v<A, B>;\n"
    text += "".join(f"static_assert({c});\n" for c in checks)
    return _in_user_space(text + (_NATIVE / "include_names.h").read_text())


# ---- inputs and comparison -----------------------------------------------------------------------
def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def from_bits(kind: str, raw: bytes) -> Array:
    """Bytes as an array of a case's type, NaNs quiet: NumPy's fmax may take signalling ones."""
    dtype, width = split_kind(kind)
    array = np.frombuffer(raw, NUMPY[dtype])
    if dtype in FLOATS:
        with np.errstate(all="ignore"):
            array = np.where(np.isnan(array), NUMPY[dtype].type(np.nan), array)
    return array.reshape(-1, width) if width > 1 else array


def _samples(kind: str, seed: int, n: int) -> Array:
    """Random bits, ordinary numbers and the type's special values."""
    dtype, width = split_kind(kind)
    rng = np.random.default_rng(seed)
    info, count = NUMPY[dtype], n * width
    array = from_bits(dtype, rng.bytes(count * info.itemsize)).copy()
    special: list[Any]
    if dtype == "double":
        # Close to the middle of two 16-bit floats: rounding to float first would lose the side.
        bits = rng.choice([9, 12], count)
        middle = np.ldexp(np.rint(np.ldexp(rng.uniform(0.5, 1, count), bits - 1)) * 2 + 1, -bits)
        middle += rng.integers(-1, 2, count) * 2.0**-50
        array = np.where(rng.random(count) < 0.3, middle, array)
    if dtype in FLOATS:
        f = ml_dtypes.finfo(info)
        special = [0.0, -0.0, 1, -1, 2, 0.5, 1.5, 3, np.inf, -np.inf, np.nan, f.max, f.min,
                   f.smallest_normal, f.smallest_subnormal]  # fmt: skip
        array = np.where(rng.random(count) < 0.5, rng.normal(size=count).astype(info), array)
    else:
        i = np.iinfo(info)
        special = [0, 1, 2, 3, i.max, i.min, i.max - 1, i.min + 1]
    at = rng.random(count) < 0.2
    array[at] = rng.choice(np.array(special, object), count)[at].astype(info)
    return array.reshape(-1, width) if width > 1 else array


def expected(case: Case, inputs: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        want = np.asarray(case.want(*inputs)).astype(NUMPY[split_kind(case.result)[0]])
    return np.ascontiguousarray(want)


@functools.cache
def row(case: Case) -> tuple[list[Array], Array]:
    """Inputs of a case, every value of a lone 16-bit type among them, and what is expected."""
    kind = case.types[0]
    if len(case.types) == 1 and NUMPY[split_kind(kind)[0]].itemsize <= 2:
        inputs = [from_bits(kind, np.arange(1 << 16, dtype=np.uint16).tobytes())]
    else:
        n = 700 if kind in INTS else 10_000
        inputs = [_samples(kind, k, n) for k, kind in enumerate(case.types)]
    if case.name == "half_fma":
        # 3 * 683 / 2048 lies in the middle of two halves; a sum in float would lose the rest.
        near = np.meshgrid(
            [3, -3, 6], [683 / 2048, 683 / 1024], [6e-8, -6e-8, 0, 2**-13, -(2**-13)]
        )
        inputs = [np.append(x, y.ravel().astype(f16)) for x, y in zip(inputs, near, strict=True)]
    return inputs, expected(case, inputs)


@np.errstate(all="ignore")
def check(case: Case, got: Array, inputs: list[Array], want: Array) -> None:
    """Fail with the first difference. NaNs are equal; so are zeros unless the case says."""
    if split_kind(case.result)[0] in FLOATS:
        g, w = got.astype(f64), want.astype(f64)
        good = (g == w) | (np.isnan(g) & np.isnan(w))
        if case.zeros:
            good &= np.isnan(g) | (np.signbit(g) == np.signbit(w))
        if case.close:
            limits = ml_dtypes.finfo(got.dtype)
            good |= np.abs(g - w) <= 32 * float(limits.eps) * (np.abs(w) + 1)
            good |= np.abs(w) > float(limits.max) / 2
    else:
        good = got == want
    if not good.all():
        at = tuple(np.argwhere(~good)[0])
        values = [x[at[0]] for x in inputs]
        raise AssertionError(
            f"{case.name}: `{case.text}` of {values} is {got[at]!r}, expected {want[at]!r};"
            f" {int((~good).sum())} of {good.size} differ"
        )
