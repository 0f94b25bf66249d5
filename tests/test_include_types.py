"""The device-independent header (types, functions, atomics, MLX's utilities) against NumPy.

A table of small expressions is compiled into one library per compiler and instruction set, and
each expression is compared with its NumPy counterpart on every 16-bit value or on random bits.
The same table runs on a GPU where there is one; NVRTC compiles it everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ferrule
from ferrule import nvrtc

INCLUDE = Path(ferrule.__file__).parent / "include"
HEADERS = ("types.h", "math.h", "functions.h", "atomic.h", "mlx.h")
Array = np.ndarray[Any, Any]

NUMPY: dict[str, np.dtype[Any]] = {
    "half": np.dtype(np.float16), "bfloat": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32), "double": np.dtype(np.float64), "bool": np.dtype(np.bool_),
    "char": np.dtype(np.int8), "uchar": np.dtype(np.uint8), "short": np.dtype(np.int16),
    "ushort": np.dtype(np.uint16), "int": np.dtype(np.int32), "uint": np.dtype(np.uint32),
    "int64_t": np.dtype(np.int64), "uint64_t": np.dtype(np.uint64),
}  # fmt: skip
FLOATS = ("half", "bfloat", "float", "double")
INTS = ("char", "ushort", "int", "uint", "int64_t", "uint64_t")
f16, f32, f64, bf16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16


# ---- the table -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """An expression in a, b, c of the types named, and what NumPy makes of it."""

    name: str
    types: tuple[str, ...]
    result: str
    text: str
    want: Callable[..., Any]
    close: bool = False  # up to rounding: the compiler may contract
    zeros: bool = True  # the sign of a zero is compared


def rounded(x: Array, digits: int, lowest: int) -> Array:
    """float64 rounded half to even to a float of ``digits`` bits and exponents from ``lowest``."""
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1], lowest) - digits)
    return np.where(np.isfinite(x), np.rint(x / step) * step, x)


def to_bf16(x: Array) -> Array:
    return rounded(np.asarray(x, f64), 8, -125).astype(f32).astype(bf16)


def _cases() -> Iterator[Case]:
    # conversions
    yield Case("half_float", ("half",), "float", "a", lambda a: a.astype(f32))
    yield Case("bfloat_float", ("bfloat",), "float", "a", lambda a: a.astype(f32))
    yield Case("half_double", ("half",), "double", "a", lambda a: a.astype(f64))
    yield Case("float_half", ("float",), "half", "a", lambda a: a.astype(f16))
    yield Case("double_half", ("double",), "half", "a", lambda a: a.astype(f16))
    yield Case("float_bfloat", ("float",), "bfloat", "a", to_bf16)
    yield Case("double_bfloat", ("double",), "bfloat", "a", to_bf16)
    yield Case("half_bfloat", ("half",), "bfloat", "a", to_bf16)
    yield Case("bfloat_half", ("bfloat",), "half", "a", lambda a: a.astype(f32).astype(f16))
    yield Case("half_lit", ("double",), "half", "::fr::half_lit(a)", lambda a: a.astype(f16))
    yield Case("bfloat_lit", ("double",), "bfloat", "::fr::bfloat_lit(a)", to_bf16)
    for t in INTS:
        yield Case(f"{t}_half", (t,), "half", "a", lambda a: a.astype(f32).astype(f16))
        yield Case(f"{t}_bfloat", (t,), "bfloat", "a", lambda a: to_bf16(a.astype(f32)))
    for s in ("half", "bfloat"):
        yield Case(
            f"{s}_int", (s,), "int", "isfinite(a) && abs(a) < 1e9f ? int(a) : 0",
            lambda a: np.trunc(np.where(np.abs(a.astype(f32)) < 1e9, a.astype(f32), 0)),
        )  # fmt: skip
        yield Case(f"{s}_bool", (s,), "bool", "a ? true : false", lambda a: a.astype(f32) != 0)
        # arithmetic: rounded at each step
        to = NUMPY[s].type
        yield Case(f"{s}_chain", (s, s), s, "a * b + a", lambda a, b: a * b + a)
        yield Case(f"{s}_sub", (s, s), s, "a - b", lambda a, b: a - b)
        yield Case(f"{s}_div", (s, s), s, "a / b", lambda a, b: a / b)
        yield Case(f"{s}_neg", (s,), s, "-a", lambda a: -a)
        yield Case(f"{s}_int_mul", (s, "short"), s, "a * b", lambda a, b: a * b.astype(a.dtype))
        yield Case(f"int_{s}_sub", ("short", s), s, "a - b", lambda a, b: a.astype(b.dtype) - b)
        yield Case(
            f"{s}_minus_float", (s, "float"), "float", "a - b", lambda a, b: a.astype(f32) - b
        )
        yield Case(
            f"{s}_assign", (s, "float"), s, "[=] { T t = a; t += b; t *= a; t -= 1; return t; }()",
            lambda a, b: (a.astype(f32) + b).astype(a.dtype) * a - a.dtype.type(1),
        )  # fmt: skip
        yield Case(
            f"{s}_increment", (s,), s, "[=] { T t = a, o = t++; ++t; o += t--; return o - t; }()",
            lambda a: _stepped(a, a.dtype.type(1)),
        )  # fmt: skip
        yield Case(
            f"{s}_compare", (s, s), "uchar",
            "(a < b) + 2 * (a == b) + 4 * (a != b) + 8 * (a >= 1) + 16 * (2u > b) + 32 * !a",
            lambda a, b: (a < b) + 2 * (a == b) + 4 * (a != b) + 8 * (a >= to(1))
            + 16 * (to(2) > b) + 32 * (a == to(0)),
        )  # fmt: skip
    yield Case("half_vs_bfloat", ("half", "bfloat"), "float", "a > b ? a + b : a * b",
               lambda a, b: _pick(a.astype(f32), b.astype(f32)))  # fmt: skip
    yield Case("half_fma", ("half",) * 3, "half", "fma(a, b, c)",
               lambda a, b, c: (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(f16))  # fmt: skip

    # functions that are exact on every float
    for t in FLOATS:
        to = NUMPY[t].type
        yield Case(f"{t}_max", (t, t), t, "max(a, b)", np.fmax, zeros=False)
        yield Case(f"{t}_min", (t, t), t, "fast::min(a, b)", np.fmin, zeros=False)
        yield Case(f"{t}_fmax", (t, t), t, "metal::fmax(a, b)", np.fmax, zeros=False)
        yield Case(f"{t}_max3", (t,) * 3, t, "max3(a, b, c)",
                   lambda a, b, c: np.fmax(np.fmax(a, b), c), zeros=False)  # fmt: skip
        yield Case(f"{t}_median3", (t,) * 3, t, "isnan(a) || isnan(b) || isnan(c) ? a : median3(a, b, c)",
                   lambda a, b, c: np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), a, np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))), zeros=False)  # fmt: skip
        yield Case(f"{t}_clamp", (t,), t, "clamp(a, T(-2), T(3))",
                   lambda a, to=to: np.fmin(np.fmax(a, to(-2)), to(3)))  # fmt: skip
        yield Case(f"{t}_saturate", (t,), t, "saturate(a)",
                   lambda a, to=to: np.fmin(np.fmax(a, to(0)), to(1)), zeros=False)  # fmt: skip
        yield Case(f"{t}_abs", (t,), t, "abs(a)", np.abs)
        yield Case(f"{t}_copysign", (t, t), t, "copysign(a, b)", np.copysign)
        yield Case(f"{t}_sign", (t,), t, "sign(a)",
                   lambda a, to=to: np.where(np.isnan(a), to(0), np.sign(a)), zeros=False)  # fmt: skip
        yield Case(f"{t}_step", (t, t), t, "step(a, b)",
                   lambda a, b, to=to: np.where(b < a, to(0), to(1)))  # fmt: skip
        yield Case(f"{t}_nextafter", (t, t), t, "nextafter(a, b)", np.nextafter, zeros=False)
        yield Case(f"{t}_select", (t, t), t, "select(a, b, a < b)",
                   lambda a, b: np.where(a < b, b, a))  # fmt: skip
        info = ml_dtypes.finfo(NUMPY[t])
        yield Case(
            f"{t}_class", (t,), "uchar",
            "isnan(a) + 2 * isinf(a) + 4 * isfinite(a) + 8 * isnormal(a) + 16 * signbit(a)"
            " + 32 * isordered(a, T(1)) + 64 * isunordered(T(1), a)",
            lambda a, tiny=info.smallest_normal: np.isnan(a) + 2 * np.isinf(a) + 4 * np.isfinite(a)
            + 8 * (np.isfinite(a) & (np.abs(a) >= tiny)) + 16 * np.signbit(a) + 32 * ~np.isnan(a)
            + 64 * np.isnan(a),
        )  # fmt: skip
        if t != "double":
            w = f32
            yield Case(f"{t}_mix", (t,) * 3, t, "abs(a) < 100 && abs(b) < 100 && abs(c) < 2 ? mix(a, b, c) : T(0)",
                       lambda a, b, c, w=w: np.where((abs(a) < 100) & (abs(b) < 100) & (abs(c) < 2), (a.astype(w) + (b.astype(w) - a.astype(w)) * c.astype(w)).astype(a.dtype), a.dtype.type(0)), close=True)  # fmt: skip
            yield Case(f"{t}_smoothstep", (t,), t, "smoothstep(T(0.5f), T(4), a)",
                       lambda a: _smooth(np.fmin(np.fmax((a.astype(f32) - f32(0.5)) / f32(3.5), 0), 1)).astype(a.dtype), close=True)  # fmt: skip
            yield Case(f"{t}_modf", (t,), t, "[=] { T i; T r = modf(a, i); return r + i; }()",
                       lambda a: np.where(np.isnan(a), a, a), zeros=False)  # fmt: skip
            yield Case(f"{t}_frexp", (t,), t, "[=] { int e; T r = frexp(a, e); return ldexp(r, e); }()",
                       lambda a: a)  # fmt: skip
    for t in ("half", "float"):
        yield Case(f"mixed_max_{t}", (t, "float"), "float", "max(a, b)",
                   lambda a, b: np.fmax(a.astype(f32), b), zeros=False)  # fmt: skip

    for t in INTS:
        yield from _int_cases(t)
    yield from _real_cases()


# In float64; math.h has its own tests: these are about half, bfloat and vectors of them.
_REAL: dict[str, Callable[..., Any]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh,
    "cospi": lambda a: np.cos(np.pi * np.fmod(a, 2)), "exp": np.exp, "exp2": np.exp2,
    "exp10": lambda a: 10.0**a, "floor": np.floor, "fract": lambda a: a - np.floor(a),
    "log": np.log, "log2": np.log2, "log10": np.log10, "rint": np.rint,
    "round": lambda a: np.copysign(np.floor(np.abs(a) + 0.5), a), "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin, "sinh": np.sinh, "sinpi": lambda a: np.sin(np.pi * np.fmod(a, 2)),
    "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc, "fabs": np.abs,
    "sincos": lambda a: np.sin(a) + np.cos(a),
}  # fmt: skip
_REAL2: dict[str, Callable[..., Any]] = {
    "atan2": np.arctan2, "divide": np.divide, "fmod": np.fmod, "powr": np.power,
    "pow": np.power, "fdim": lambda a, b: np.fmax(a - b, 0), "ldexp": lambda a, b: a * 2.0**b,
    "distance": lambda a, b: np.abs(a - b),
}  # fmt: skip


def _real_cases() -> Iterator[Case]:
    def wide(f: Callable[..., Any], power: bool = False) -> Callable[..., Any]:
        def run(*arrays: Array) -> Array:
            cut = [np.fmin(np.fmax(a.astype(f64), -6), 6) for a in arrays]
            if power:
                cut[0] = np.abs(cut[0])
            return f(*cut)

        return run

    for t, space in (("half", "metal::"), ("bfloat", "fast::"), ("float:3", "precise::")):
        e = t.partition(":")[0]
        a, b = (f"clamp({x}, {e}(-6), {e}(6))" for x in "ab")
        label = t.replace(":", "")
        # One macro lifts them all: for vectors and bfloat a few suffice.
        some = ("acos", "exp", "log2", "rint", "sincos", "tanh", "atan2", "pow", "distance")
        real, real2 = (
            {k: f for k, f in table.items() if t == "half" or k in some} for table in (_REAL, _REAL2)
        )
        for name, f in real.items():
            text = f"{space}{name}({a})"
            if name == "sincos" and t != "float:3":
                continue
            if name == "sincos":
                text = f"[=] {{ V c; V s = precise::sincos({a}, c); return s + c; }}()"
            yield Case(f"{label}_{name}", (t,), t, text, wide(f), close=True, zeros=False)
        for name, f in real2.items():
            x, y = (f"abs({a})", b) if name.startswith("pow") else (a, b)
            if name == "ldexp":
                y = f"trunc({b})"
                f = lambda a, b: a * 2.0 ** np.trunc(b)  # noqa: E731
            if name == "distance" and t != "float:3":
                continue
            text = f"{space}{name}({x}, {y})"
            if name == "distance":
                text = f"V({space}distance({x}.x, {y}.x), {space}distance({x}.y, {y}.y), {space}distance({x}.z, {y}.z))"
            yield Case(
                f"{label}_{name}",
                (t, t),
                t,
                text,
                wide(f, name.startswith("pow")),
                close=True,
                zeros=False,
            )


def _stepped(a: Array, one: Any) -> Array:
    t = a + one
    t = t + one
    o = a + t
    return o - (t - one)


def _pick(a: Array, b: Array) -> Array:
    return np.where(a > b, a + b, a * b)


def _smooth(t: Array) -> Array:
    return t * t * (f32(3) - f32(2) * t)


def _int_cases(t: str) -> Iterator[Case]:
    """Against Python's own integers."""
    info = np.iinfo(NUMPY[t])
    n, low, high = info.bits, int(info.min), int(info.max)
    ones = (1 << n) - 1

    def wrap(x: int) -> int:
        return ((x - low) & ones) + low

    def unsigned(x: int) -> int:
        return x & ones

    def clip(x: int) -> int:
        return min(max(x, low), high)

    def each(f: Callable[..., int]) -> Callable[..., Array]:
        def run(*arrays: Array) -> Array:
            rows = zip(*(x.tolist() for x in arrays), strict=True)
            return np.array([wrap(f(*row)) for row in rows], NUMPY[t])

        return run

    def rotate(v: int, i: int) -> int:
        u, k = unsigned(v), i % n
        return u << k | u >> (n - k)

    def extract(x: int, off: int, bits: int) -> int:
        field = unsigned(x) >> off & ((1 << bits) - 1)
        return field - (1 << bits) if low < 0 and bits and field >> (bits - 1) else field

    one: dict[str, tuple[str, Callable[..., int]]] = {
        "popcount": ("popcount(a)", lambda a: unsigned(a).bit_count()),
        "clz": ("clz(a)", lambda a: n - unsigned(a).bit_length()),
        "ctz": ("ctz(a)", lambda a: (unsigned(a) & -unsigned(a)).bit_length() - 1 if a else n),
        "reverse": ("reverse_bits(a)", lambda a: int(f"{unsigned(a):0{n}b}"[::-1], 2)),
        "abs": ("abs(a)", abs),
        "extract": ("extract_bits(a, 3, 4)", lambda a: extract(a, 3, 4)),
        "extract_all": (f"extract_bits(a, 0, {n})", lambda a: a),
        "extract_none": ("extract_bits(a, 2, 0)", lambda a: 0),
        "flip": ("T(~a)", lambda a: ~a),
    }
    two: dict[str, tuple[str, Callable[..., int]]] = {
        "max": ("max(a, b)", max),
        "min": ("min(a, b)", min),
        "hadd": ("hadd(a, b)", lambda a, b: (a + b) >> 1),
        "rhadd": ("rhadd(a, b)", lambda a, b: (a + b + 1) >> 1),
        "absdiff": ("absdiff(a, b)", lambda a, b: abs(a - b)),
        "addsat": ("addsat(a, b)", lambda a, b: clip(a + b)),
        "subsat": ("subsat(a, b)", lambda a, b: clip(a - b)),
        "mulhi": ("mulhi(a, b)", lambda a, b: a * b >> n),
        "rotate": ("rotate(a, b)", rotate),
        "insert": (
            "insert_bits(a, b, 2, 5)",
            lambda a, b: unsigned(a) & ~(31 << 2) | (b & 31) << 2,
        ),
    }
    three: dict[str, tuple[str, Callable[..., int]]] = {
        "clamp": (
            "clamp(a, min(b, c), max(b, c))",
            lambda a, b, c: min(max(a, min(b, c)), max(b, c)),
        ),
        "madhi": ("madhi(a, b, c)", lambda a, b, c: (a * b >> n) + c),
        "madsat": ("madsat(a, b, c)", lambda a, b, c: clip(a * b + c)),
        "median3": ("median3(a, b, c)", lambda a, b, c: sorted((a, b, c))[1]),
        "select": ("select(a, b, c > 0)", lambda a, b, c: b if c > 0 else a),
    }
    if n == 32:
        bits = {"int": 1 << 23, "uint": 0}[t]
        cut = lambda x: ((x + bits) & 0xFFFFFF) - bits  # noqa: E731
        two["mul24"] = ("mul24(a, b)", lambda a, b: cut(a) * cut(b))
        three["mad24"] = ("mad24(a, b, c)", lambda a, b, c: cut(a) * cut(b) + c)
    for arity, table in ((1, one), (2, two), (3, three)):
        for name, (text, f) in table.items():
            yield Case(f"{t}_{name}", (t,) * arity, t, text, each(f))


def _vector_cases() -> Iterator[Case]:
    """On arrays of N neighbours: a, b are `vec<T, N>`; arrays have a last axis of N."""
    kinds = ("float", 3), ("half", 4), ("bfloat", 2), ("uint", 4), ("uchar", 3)
    for t, n in kinds:
        to = NUMPY[t].type
        real = t in FLOATS
        v, name = f"{t}:{n}", f"{t}{n}"
        back = ", ".join(str(i) for i in reversed(range(n)))
        rows = {
            "sum": ("a + b - T(3)", lambda a, b, to=to: a + b - to(3)),
            "product": ("a * b", lambda a, b: a * b),
            "scalar": ("a + T(1) - (T(2) - b)", lambda a, b, to=to: a + to(1) - (to(2) - b)),
            "int_scalar": ("2 * a", lambda a, b, to=to: to(2) * a),
            "assign": ("[=] { auto v = a; v += b; v *= T(2); v -= 1; v[1] = b[0]; return v; }()",
                       lambda a, b, to=to: _with(1, (a + b) * to(2) - to(1), b[..., 0])),
            "index": ("[=] { auto v = a; for (int k = 0; k < %d; ++k) v[k] = b[%d - k]; return v; }()"
                      % (n, n - 1), lambda a, b: b[..., ::-1]),
            "swizzle": ("a.swz(ix<%s>{}) + b" % back, lambda a, b: a[..., ::-1] + b),
            "write": ("[=] { auto v = a; v.swr(ix<1, 0>{}) = b.swz(ix<0, 1>{}); return v; }()",
                      lambda a, b: np.concatenate([b[..., 1::-1], a[..., 2:]], -1)),
            "update": ("[=] { auto v = a; v.swr(ix<1, 0>{}) += b.swz(ix<0, 1>{}); v.swr(ix<0>{}) *= T(2);"
                       " return v; }()", lambda a, b, to=to: _updated(a, b, to(2))),
            "select": ("select(a, b, a < b)", lambda a, b: np.where(a < b, b, a)),
            "max": ("max(a, b)", np.fmax if real else np.maximum),
            "max_scalar": ("max(a, T(1))", (lambda a, b, to=to: np.fmax(a, to(1))) if real
                           else (lambda a, b, to=to: np.maximum(a, to(1)))),
            "neg": ("-a", lambda a, b: -a),
            "any": ("V(T(any(a < b) + 2 * all(a != b)))",
                    lambda a, b, n=n, to=to: np.repeat((np.any(a < b, -1) + 2 * np.all(a != b, -1))[..., None], n, -1)),
            "bools": ("V((a < b && !(a == T(1))) || a >= T(3))",
                      lambda a, b, to=to: ((a < b) & (a != to(1))) | (a >= to(3))),
            "convert": ("V(vec<double, %d>(a))" % n, lambda a, b: a),
            "packed": ("[=] { packed_vec<T, %d> p = a, q = b; p += q; p[1] = q.x; return V(p * q); }()" % n,
                       lambda a, b: _with(1, a + b, b[..., 0]) * b),
        }  # fmt: skip
        if not real:
            rows |= {
                "bits": ("((a & b) | T(8)) ^ (~a << 1)", lambda a, b, to=to: ((a & b) | to(8)) ^ (~a << to(1))),
                "mod": ("a % (b | T(1))", lambda a, b, to=to: np.fmod(a, b | to(1))),
                "shift": ("[=] { auto v = a; v >>= 2; v |= b; v ^= 5; v &= T(77); return v; }()",
                          lambda a, b, to=to: (((a >> to(2)) | b) ^ to(5)) & to(77)),
            }  # fmt: skip
            rows.pop("max_scalar")
        for key, (text, want) in rows.items():
            yield Case(f"{name}_{key}", (v, v), v, text, want, zeros=False)


def _with(k: int, a: Array, b: Array) -> Array:
    a = a.copy()
    a[..., k] = b
    return a


def _updated(a: Array, b: Array, two: Any) -> Array:
    a = a.copy()
    a[..., 1] += b[..., 0]
    a[..., 0] = (a[..., 0] + b[..., 1]) * two
    return a


_ALL = list(itertools.chain(_cases(), _vector_cases()))
CASES = {c.name: c for c in _ALL}
assert len(CASES) == len(_ALL), "two cases of one name"


def _split(kind: str) -> tuple[str, int]:
    t, _, n = kind.partition(":")
    return t, int(n or 1)


def _function(case: Case, cuda: bool) -> str:
    """The exported loop of a case. Vectors lie packed: NumPy's rows of three have no padding."""

    def of(kind: str) -> str:
        t, n = _split(kind)
        return t if n == 1 else f"packed_vec<{t}, {n}>"

    def name(kind: str) -> str:
        t, n = _split(kind)
        return t if n == 1 else f"vec<{t}, {n}>"

    letters = "abc"[: len(case.types)]
    t = _split(case.types[0])[0]
    pointers = ", ".join(f"const {of(k)}* {x}_" for k, x in zip(case.types, letters, strict=True))
    loads = " ".join(
        f"const {name(k)} {x} = {x}_[i];" for k, x in zip(case.types, letters, strict=True)
    )
    body = f"using T = {t}; using V = {name(case.types[0])}; {loads}"
    if not cuda and (case.close or case.types[0] not in FLOATS):
        body += ' asm volatile("");'  # no time for vectorising them all
    body += f" y_[i] = {name(case.result)}({case.text});"
    head = f"void case_{case.name}({pointers}, {of(case.result)}* y_, int n)"
    if cuda:
        return (
            f'extern "C" __global__ {head} {{ int i = blockIdx.x * blockDim.x + threadIdx.x;'
            f" if (i >= n) return; {body} }}\n"
        )
    return f'extern "C" {head} {{ for (int i = 0; i < n; ++i) {{ {body} }} }}\n'


def program(
    cuda: bool = False, extra: str = "", keep: Callable[[Case], bool] = lambda case: True
) -> str:
    """The cases as functions, inside the namespaces where a kernel's text is compiled."""
    functions = "".join(_function(c, cuda) for c in CASES.values() if keep(c))
    return f"namespace fr {{ namespace user {{ using namespace metal;\n{functions}{extra}\n}} }}\n"


def _has_small(case: Case) -> bool:
    return any(kind.startswith(("half", "bfloat")) for kind in (*case.types, case.result))


# ---- compilers -----------------------------------------------------------------------------------
def _compilers() -> list[str]:
    found = [shutil.which(name) for name in ("g++", "clang++", "clang++-14", "clang++-16")]
    by_target = {Path(path).resolve(): path for path in found if path}
    return list(by_target.values())


COMPILERS = _compilers()
PLAIN = ("-O1", "-ffp-contract=off")
# As kernels are compiled; clang would contract across half's operations if told `fast`.
NATIVE = ("-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
COMMON = ("-std=c++20", "-fsigned-char", "-w", "-nostdinc", "-I", str(INCLUDE))
SOURCE = "".join(f'#include "{name}"\n' for name in HEADERS)

needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no g++ or clang++ on this machine")


def flags(compiler: str, native: bool) -> tuple[str, ...]:
    if not native:
        return PLAIN
    clang = "clang" in compiler
    return (*NATIVE, "-ffp-contract=on", "-O1") if clang else (*NATIVE, "-ffp-contract=fast")


def compile_text(compiler: str, text: str, folder: Path, options: tuple[str, ...]) -> str:
    """The compiler's messages; "" when it accepts the text."""
    source = folder / "text.cpp"
    source.write_text(SOURCE + text)
    done = subprocess.run(  # noqa: S603 - a compiler found on the path, arguments of our own
        [compiler, *COMMON, *options, str(source)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr


def build(compiler: str, text: str, folder: Path, native: bool) -> ctypes.CDLL:
    target = folder / "text.so"
    if target.exists():
        return ctypes.CDLL(str(target))
    options = (*flags(compiler, native), "-shared", "-fPIC", "-o", str(target))
    message = compile_text(compiler, text, folder, options)
    assert not message, message[:4000]
    return ctypes.CDLL(str(target))


# Without an instruction set of its own once: the integer conversions of half are the same text.
LIBRARIES = [(c, n) for k, c in enumerate(COMPILERS) for n in (False, True) if n or k == 0]


def _label(value: tuple[str, bool]) -> str:
    return Path(value[0]).name + ("-native" if value[1] else "")


@pytest.fixture(scope="module", params=LIBRARIES, ids=_label)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    compiler, native = request.param
    # Test processes that run side by side share what one of them has built.
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    folder = shared / _label(request.param) if shared else tmp_path_factory.mktemp("lib")
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        # Compilers differ in the 16-bit floats; the rest is seen once plain and once native.
        keep = _has_small if compiler != COMPILERS[0] else lambda case: True
        return build(compiler, program(extra=EXTRA, keep=keep), folder, native)


def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def run(library: ctypes.CDLL, case: Case, inputs: list[Array]) -> Array:
    dtype, width = _split(case.result)
    n = len(inputs[0])
    out = np.empty((n, width) if width > 1 else n, NUMPY[dtype])
    getattr(library, f"case_{case.name}")(*map(pointer, inputs), pointer(out), ctypes.c_int(n))
    return out


# ---- inputs and comparison -----------------------------------------------------------------------
def from_bits(kind: str, raw: bytes) -> Array:
    dtype, width = _split(kind)
    if dtype == "bool":
        return np.frombuffer(raw, np.uint8) > 127
    array = np.frombuffer(raw, NUMPY[dtype])
    if dtype in FLOATS:  # quiet NaNs: NumPy's fmax takes signalling ones for numbers or not
        with np.errstate(all="ignore"):
            array = np.where(np.isnan(array), NUMPY[dtype].type(np.nan), array)
    return array.reshape(-1, width) if width > 1 else array


@functools.cache
def samples(kind: str, seed: int, n: int) -> Array:
    """Every value of a 16-bit type or random bits, with the special values among them."""
    dtype, width = _split(kind)
    rng = np.random.default_rng(seed)
    info = NUMPY[dtype]
    count = n * width
    array = from_bits(dtype, rng.bytes(count * info.itemsize)).copy()
    if dtype in FLOATS:
        limits = ml_dtypes.finfo(info)
        special = [0.0, -0.0, 1, -1, 2, 0.5, 1.5, 3, np.inf, -np.inf, np.nan, limits.max, limits.min,
                   limits.smallest_normal, limits.smallest_subnormal]  # fmt: skip
        ordinary = rng.normal(size=count).astype(info)
        array = np.where(rng.random(count) < 0.5, ordinary, array)
    else:
        limits_i = np.iinfo(info)
        special = [0, 1, 2, 3, limits_i.max, limits_i.min, limits_i.max - 1, limits_i.min + 1]
    at = rng.random(count) < 0.2
    array[at] = rng.choice(np.array(special, object), count)[at].astype(info)
    return array.reshape(-1, width) if width > 1 else array


def inputs_of(case: Case) -> list[Array]:
    if len(case.types) == 1 and NUMPY[_split(case.types[0])[0]].itemsize <= 2:
        return [from_bits(case.types[0], np.arange(1 << 16, dtype=np.uint16).tobytes())]
    n = 700 if case.types[0] in INTS else 10_000
    return [samples(kind, k, n) for k, kind in enumerate(case.types)]


def expected(case: Case, inputs: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(case.want(*inputs)).astype(NUMPY[_split(case.result)[0]])


@functools.cache
def table_row(case: Case) -> tuple[list[Array], Array]:
    inputs = [np.ascontiguousarray(x) for x in inputs_of(case)]
    return inputs, expected(case, inputs)


@np.errstate(all="ignore")
def check(case: Case, got: Array, inputs: list[Array], want: Array) -> None:
    if _split(case.result)[0] in FLOATS:
        g, w = got.astype(f64), want.astype(f64)
        good = (g == w) | (np.isnan(g) & np.isnan(w))
        if case.zeros:
            good &= np.isnan(g) | (np.signbit(g) == np.signbit(w))
        if case.close:
            good |= np.abs(g - w) <= 32 * float(ml_dtypes.finfo(got.dtype).eps) * (np.abs(w) + 1)
            good |= np.abs(w) > float(ml_dtypes.finfo(got.dtype).max) / 2
    else:
        good = got == want
    if not good.all():
        at = np.argwhere(~good)[0]
        k = tuple(at)
        values = [x[at[0]] for x in inputs]
        raise AssertionError(
            f"{case.name}: `{case.text}` of {values} is {got[k]!r}, expected {want[k]!r};"
            f" {int((~good).sum())} of {good.size} differ"
        )


@needs_compiler
def test_every_expression_agrees_with_numpy(library: ctypes.CDLL) -> None:
    present = [case for case in CASES.values() if hasattr(library, f"case_{case.name}")]
    assert len(present) > 100
    for case in present:
        inputs, want = table_row(case)
        check(case, run(library, case, inputs), inputs, want)


@needs_compiler
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(list(CASES.values())), st.data())
def test_any_bits_agree_with_numpy(library: ctypes.CDLL, case: Case, data: st.DataObject) -> None:
    if not hasattr(library, f"case_{case.name}"):
        return
    sizes = [NUMPY[_split(k)[0]].itemsize * _split(k)[1] for k in case.types]
    inputs = [
        from_bits(k, data.draw(hnp.arrays(np.uint8, 4 * size)).tobytes())
        for k, size in zip(case.types, sizes, strict=True)
    ]
    check(case, run(library, case, inputs), inputs, expected(case, inputs))


# ---- types and names, at compile time ------------------------------------------------------------
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


def _type_checks() -> str:
    lines = ["template <class A, class B> constexpr bool same = metal::is_same_v<A, B>;"]
    pairs = {(a, b) for s in ("half", "bfloat") for o in _SCALARS for a, b in ((s, o), (o, s))}
    for a, b in sorted(pairs):
        want = _sum(a, b)
        both = f"metal::declval<{a}&>() %s metal::declval<{b}&>()"
        arithmetic = " && ".join(f"same<{want}, decltype({both % op})>" for op in "+-*/")
        compare = " && ".join(
            f"same<bool, decltype({both % op})>" for op in ("==", "!=", "<", ">", "<=", ">=")
        )
        assign = " && ".join(f"same<{a}&, decltype({both % (op + '=')})>" for op in "+-*/")
        picked = f"metal::declval<bool>() ? ::fr::pick<{a}&, {b}&>(metal::declval<{a}&>()) : "
        picked += f"::fr::pick<{a}&, {b}&>(metal::declval<{b}&>())"
        choice = f"same<{want}, remove_cvref_t<decltype({picked})>>"
        common = f"same<{want}, decltype(max(metal::declval<{a}>(), metal::declval<{b}>()))>"
        convert = f"is_convertible_v<{a}, {b}>"
        lines += [
            f'static_assert({x}, "{a}, {b}");'
            for x in (arithmetic, compare, assign, choice, common, convert)
        ]
    return "\n".join(lines)


STATIC = """
#define SAME(T, ...) static_assert(is_same_v<T, decltype(__VA_ARGS__)>, #T " = " #__VA_ARGS__)
#define IS(...) static_assert(__VA_ARGS__, #__VA_ARGS__)
// literals, tables and constants are constants
constexpr half one_half = ::fr::half_lit(1.5);
constexpr bfloat table[4] = {0.5f, 1, ::fr::bfloat_lit(0.25), 2.0};
template <class T> constexpr T scale = T(0.5);
IS(one_half + 1 == 2.5f); IS(table[1] * 3 == 3); IS(float(scale<half>) == 0.5f);
IS(half(2048.0f) + ::fr::half_lit(0.5) == 2048);
IS(bfloat(256.6f) == 256); IS(half(65520.0f) == INFINITY); IS(half(5.9e-8f) > 0);
IS(is_same_v<half, float16_t> && is_same_v<bfloat, bfloat16_t> && sizeof(half) == 2);
// vectors
IS(sizeof(float3) == 16 && sizeof(packed_float3) == 12 && sizeof(half3) == 8 && sizeof(char3) == 4);
IS(sizeof(long3) == 32 && sizeof(bool4) == 4 && sizeof(packed_half3) == 6 && sizeof(float2) == 8);
constexpr float4 v = float4(float3(1, 2, 3), 4);
IS(v[3] == 4 && v.z == 3 && all(v == float4(1, float2(2, 3), 4)) && any(v > 3) && !any(v > 4));
IS(all(float4(half4(1)) == 1) && all(int3(2.7f) == 2) && float3(packed_float3(1, 2, 3)).z == 3);
IS(all(v.swz(ix<3, 2>{}) == float2(4, 3)) && v.swz(ix<1>{}) == 2);
SAME(float4, float4() * 2); SAME(half4, half4() * 2.0f); SAME(half4, half() * half4());
SAME(bool3, float3() < 1); SAME(uint2, 1 << uint2()); SAME(float3, packed_float3() + float3());
SAME(float3, packed_float3() * 2); SAME(bool2, !float2()); SAME(bool2, int2() && bool2());
SAME(float2, fma(2.0f, float2(), float2(-3))); SAME(half2, max(half2(), 0.0f));
SAME(half, pow(half(), 2)); SAME(float, pow(2.0f, 2)); SAME(float, sqrt(2)); SAME(double, exp(1.0));
SAME(uchar, max(uchar(), uchar())); SAME(int, max(uchar(), 1)); SAME(uint, min(1u, 2));
SAME(float, dot(float3(), packed_float3())); SAME(half, length(half3())); SAME(half3, cross(half3(), half3()));
SAME(float, metal::fast::exp(1.0f)); SAME(half, precise::exp(half())); SAME(bfloat, fast::tanh(bfloat()));
SAME(float, metal::precise::rsqrt(1.0f)); SAME(float4, metal::exp(float4())); SAME(bool, isnan(half()));
SAME(float4, clamp(float4(), 0.0f, 1.0f)); SAME(float4, select(0.0f, float4(), bool4()));
SAME(float2, true ? ::fr::pick<float2, float>(float2()) : ::fr::pick<float2, float>(1.0f));
SAME(float*, true ? ::fr::pick<float*, int>((float*)nullptr) : ::fr::pick<float*, int>(0));
SAME(complex64_t, true ? ::fr::pick<complex64_t, int>(complex64_t()) : ::fr::pick<complex64_t, int>(0));
SAME(int&, ::fr::pick<int&, int&>(metal::declval<int&>()));
SAME(half&, ::fr::pick<half&, half&>(metal::declval<half&>()));
// bits
IS(as_type<uint>(1.0f) == 0x3f800000u && as_type<ushort>(bfloat(1.0f)) == 0x3f80);
IS(as_type<uint>(half2(1, 2)) == 0x40003c00u && as_type<half2>(0x40003c00u).y == 2);
IS(as_type<float4>(uint4(0x3f800000u)).w == 1 && as_type<uint3>(float3(1)).z == 0x3f800000u);
IS(as_type<uchar4>(0x04030201u).w == 4 && as_type<long>(ulong(1)) == 1);
// limits
IS(numeric_limits<half>::max() == 65504 && numeric_limits<half>::lowest() == -65504);
IS(numeric_limits<half>::epsilon() == 0x1p-10f && numeric_limits<half>::min() == 0x1p-14f);
IS(numeric_limits<half>::denorm_min() == 0x1p-24f && HALF_MAX == 65504 && M_PI_H == 3.140625f);
IS(numeric_limits<bfloat>::max() == 0x1.fep127f && numeric_limits<bfloat>::epsilon() == 0x1p-7f);
IS(numeric_limits<float>::max() == FLT_MAX && numeric_limits<float>::min() == FLT_MIN);
IS(numeric_limits<float>::epsilon() == FLT_EPSILON && numeric_limits<float>::digits == 24);
IS(numeric_limits<double>::max() == 0x1.fffffffffffffp1023 && numeric_limits<double>::digits10 == 15);
IS(numeric_limits<float>::digits10 == FLT_DIG && numeric_limits<half>::digits10 == HALF_DIG);
IS(numeric_limits<float>::max_exponent10 == 38 && numeric_limits<float>::min_exponent10 == -37);
IS(numeric_limits<int>::max() == INT_MAX && numeric_limits<int64_t>::min() == LONG_MIN);
IS(numeric_limits<uchar>::max() == 255 && numeric_limits<char>::min() == -128);
IS(numeric_limits<bool>::max() && !numeric_limits<bool>::min() && numeric_limits<uint>::digits == 32);
IS(numeric_limits<float>::infinity() == INFINITY && INFINITY > FLT_MAX && NAN != NAN);
IS(Limits<float>::max == INFINITY && Limits<half>::finite_min == -65504 && Limits<int>::min == INT_MIN);
IS(Limits<bfloat16_t>::min == -INFINITY && Limits<bool>::max && Limits<complex64_t>::max.imag == INFINITY);
// ints
IS(max(1, 2) == 2 && clamp(5u, 0u, 3u) == 3 && popcount(7) == 3 && clz(1u) == 31 && ctz(0) == 32);
IS(is_same_v<make_unsigned_t<long>, unsigned long> && is_unsigned_v<uchar> && is_signed_v<char>);
IS(is_integral_v<const int> && is_floating_point_v<half> && !is_convertible_v<float*, int>);
IS(is_same_v<conditional_t<true, int, float>, int> && is_same<int, int>::value && is_class_v<half>);
// matrices
IS(determinant(float2x2(1, 2, 3, 4)) == -2 && determinant(float3x3(2.0f)) == 8);
IS(determinant(float4x4(float4(1, 2, 0, 0), float4(0, 1, 3, 0), float4(4, 0, 1, 0), float4(0, 0, 0, 2))) == 50);
IS(all(float2x3(1, 2, 3, 4, 5, 6) * float2(1, 10) == float3(41, 52, 63)));
IS(all(float3(1, 10, 100) * float2x3(1, 2, 3, 4, 5, 6) == float2(321, 654)));
IS(transpose(float2x3(1, 2, 3, 4, 5, 6))[2].y == 6 && (float2x2(1, 2, 3, 4) * float2x2(2.0f))[1][0] == 6);
IS((float2x2(1, 2, 3, 4) + float2x2(1.0f))[1].y == 5 && float2x2(half2x2(2.0f)) == 0.5f * float2x2(4.0f));
// MLX
IS(complex64_t(1.0f, 2.0f) * complex64_t(3.0f, 4.0f) == complex64_t(-5.0f, 10.0f));
IS(complex32_t(half(1), half(2)) + 1 == complex32_t(half(2), half(2)) && sizeof(complex32_t) == 4);
IS(WorkPerThread<half>::n == 4 && ceildiv(7, 3) == 3 && REDUCE_N_READS == 4 && RMS_LOOPED_LIMIT == 4096);
IS(is_same_v<ConditionalType<false, int, half>::type, half> && is_complex_v<complex64_t>);
IS(bfloat16_to_uint16(1.0f) == 0x3f80 && uint16_to_bfloat16(0x4000) == 2);
instantiate_kernel("name_float", some_kernel, float, 4)
instantiate_float_limit(half)
"""

# An author's own names, beside ours: none may clash, hide or be preferred against C++'s rules.
AUTHOR = """
FR_GLOBAL float y0 = 1, j1 = 2, gamma = 3, index = 4, div = 5, norm = 6, half_of = 7, comp = 8, mask = 9;
METAL_FUNC float log1p(float x) { return -x; }
METAL_FUNC float exp10(float x) { return x; }
template <typename T> METAL_FUNC T mix(T a, T b, T c) { return a; }
template <typename T> METAL_FUNC T lift(T a) { return a; }
METAL_FUNC float4 cross(float4 a, float4 b) { return a; }
template <typename T, int N> struct array_of { T at[N]; };
struct Pair { float a; uint n; half h; float3 v; };
template <typename T> METAL_FUNC T squash(T x) { return metal::precise::exp(x) + fast::max(x, T(0)); }
METAL_FUNC half4 author(half h, bfloat b, float4 f, Pair p) {
  half t = lift(mix(h, h, h));
  bfloat s = lift(b) + squash(b);
  float u = log1p(2.0f) + exp10(t) + metal::log2(1.0f) + s;
  array_of<half, 4> many = {{1, 2.0f, h}};
  p.v.swr(ix<0, 1>{}) = float2(u);
  auto w = vec<half, 4>(many.at[1]) * squash(t);
  return cross(f, f).x > 0 ? ::fr::pick<half4, half>(w) : ::fr::pick<half4, half>(t);
}
"""


def _names(cuda: bool) -> str:
    text = _type_checks() + STATIC + AUTHOR.replace("FR_GLOBAL", "__device__" if cuda else "static")
    return f"namespace fr {{ namespace user {{ using namespace metal;\n{text}\n}} }}\n"


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: Path(c).name)
def test_types_and_names(compiler: str, tmp_path: Path) -> None:
    assert not compile_text(compiler, _names(cuda=False), tmp_path, ("-fsyntax-only",))


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "auto x = float4() * half4();",
        "auto x = int4() * 2.5f;",
        "auto x = float3() + float4();",
        "auto x = float2() % 2;",
        "float4 x = half4();",
        "auto x = as_type<uint>(half());",
        "auto x = popcount(1.0f);",
        "auto x = max(float2(), float3());",
    ],
)
def test_what_metal_refuses_is_refused(text: str, tmp_path: Path) -> None:
    text = f"namespace fr {{ namespace user {{ using namespace metal; void f() {{ {text} }} }} }}"
    assert "error" in compile_text(COMPILERS[0], text, tmp_path, ("-fsyntax-only",))


@pytest.mark.parametrize("name", ("types.h", "functions.h", "atomic.h", "mlx.h"))
def test_nothing_is_included(name: str) -> None:
    assert not re.findall(r"^\s*#\s*(?:include|import)", (INCLUDE / name).read_text(), re.M)


# ---- geometry ------------------------------------------------------------------------------------
GEOMETRY = """
extern "C" void geometry(const packed_float3* a, const packed_float3* b, float* y, int n) {
  for (int i = 0; i < n; ++i, y += 24) {
    float3 u = a[i], v = b[i], w = normalize(v);
    float3 results[6] = {cross(u, v), reflect(u, w), refract(normalize(u), w, 0.7f),
                         faceforward(u, v, w), normalize(u), float3(half3(cross(half3(u), half3(v))))};
    for (int k = 0; k < 6; ++k) {
      for (int j = 0; j < 3; ++j) y[3 * k + j] = results[k][j];
    }
    y[18] = dot(u, v); y[19] = length(u); y[20] = fast::distance(u, v); y[21] = length_squared(a[i]);
    y[22] = distance_squared(a[i], v); y[23] = dot(half3(u), half3(v));
  }
}
"""

# ---- atomics -------------------------------------------------------------------------------------
_ATOMIC_TYPES = ("int", "uint", "int64_t", "uint64_t", "float", "half", "bfloat", "double", "uchar")
_LOOPS = "".join(
    f"""
extern "C" void cells_{t}(void* p_, const {t}* v, int n) {{
  volatile atomic<{t}>* p = (volatile atomic<{t}>*)p_;
  for (int i = 0; i < n; ++i) {{
    atomic_fetch_add_explicit(p, v[i], memory_order_relaxed);
    atomic_fetch_sub_explicit(p + 1, v[i], memory_order_relaxed);
    atomic_fetch_max_explicit(p + 2, v[i], metal::memory_order_relaxed);
    atomic_fetch_min_explicit(p + 3, v[i], memory_order_seq_cst);
    {t} old = atomic_load_explicit(p + 4, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(p + 4, &old, {t}(old + {t}(1)), memory_order_relaxed,
                                                  memory_order_relaxed)) {{
    }}
    {t} there = atomic_exchange_explicit(p + 5, v[i], memory_order_acquire);
    if (there == v[i]) atomic_store_explicit(p + 5, there, memory_order_release);
  }}
}}
"""
    for t in _ATOMIC_TYPES
)
ATOMICS = (
    _LOOPS
    + """
extern "C" void atomic_bits(uint* p, const uint* v, int n) {
  for (int i = 0; i < n; ++i) {
    atomic_fetch_and_explicit((atomic_uint*)p, v[i], memory_order_relaxed);
    atomic_fetch_or_explicit((atomic_uint*)p + 1, ~v[i], memory_order_relaxed);
    atomic_fetch_xor_explicit((atomic_int*)p + 2, v[i], memory_order_relaxed);
  }
}
"""
)

# ---- MLX's utilities -----------------------------------------------------------------------------
MLX = """
extern "C" void places(const uint* e, const int* shape, const int64_t* s, const int64_t* r,
                       int64_t* y, int n, int ndim) {
  int inner = shape[ndim - 1], middle = shape[ndim - 2];
  for (int i = 0; i < n; ++i, y += 9) {
    uint3 p = uint3(e[i] % inner, e[i] / inner % middle, e[i] / inner / middle);
    y[0] = elem_to_loc(e[i], shape, s, ndim);
    y[1] = elem_to_loc<int64_t>(e[i], shape, s, ndim);
    y[2] = elem_to_loc(p, shape, s, ndim);
    long2 two = elem_to_loc_2_nd(p, shape, s, r, ndim);
    y[3] = two.x; y[4] = two.y;
    vec<uint, 3> three = elem_to_loc_3_nd<uint>(p, shape, s, r, s, ndim);
    y[5] = three.x; y[6] = three.y; y[7] = three.z;
    y[8] = elem_to_loc_1(e[i], s[ndim - 1]) + elem_to_loc_2(p.swz(ix<0, 1>{}), s + ndim - 2) +
           elem_to_loc_3(p, s + ndim - 3);
  }
}
template <class L> void walk(L looper, const int* shape, const int64_t* s, const int* steps, int n, int64_t* y) {
  for (int i = 0; i < n; ++i) {
    y[i] = int64_t(looper.location());
    if (steps[i] == 1) looper.next(shape, s);
    else looper.next(steps[i], shape, s);
  }
}
extern "C" void loopers(const int* shape, const int64_t* s, const int* steps, int64_t* y, int n, int ndim) {
  walk(LoopedElemToLoc<1>(ndim), shape, s, steps, n, y);
  walk(LoopedElemToLoc<2>(ndim), shape, s, steps, n, y + n);
  walk(LoopedElemToLoc<3, int64_t>(ndim), shape, s, steps, n, y + 2 * n);
  walk(LoopedElemToLoc<4, uint>(ndim), shape, s, steps, n, y + 3 * n);
  if (ndim == 2) walk(LoopedElemToLoc<2, int64_t, false>(ndim), shape, s, steps, n, y + 4 * n);
}
extern "C" void complexes(const complex64_t* a, const complex64_t* b, const float* f, complex64_t* y, int n) {
  for (int i = 0; i < n; ++i, y += 12) {
    y[0] = a[i] + b[i]; y[1] = a[i] - b[i]; y[2] = a[i] * b[i]; y[3] = a[i] / b[i];
    y[4] = f[i] + a[i]; y[5] = a[i] - f[i]; y[6] = f[i] * a[i]; y[7] = f[i] / a[i]; y[8] = -a[i];
    y[9] = a[i]; y[9] += b[i]; y[9] *= 2;
    y[10] = complex64_t((a[i] < b[i]) + 2 * (a[i] >= b[i]) + 4 * (a[i] == a[i]), cast_to<bool>(a[i]) + 2 * (a[i] != b[i]));
    y[11] = log1p(a[i]);
  }
}
extern "C" void rests(const complex64_t* a, const complex64_t* b, complex64_t* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = a[i] % b[i];
}
extern "C" void logs(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = log1p(x[i]);
}
extern "C" void truths(const float* x, const half* h, uchar* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = cast_to<bool>(x[i]) + 2 * cast_to<bool>(h[i]) + 4 * (cast_to<int>(2.5f) == 2);
}
extern "C" void packs(const packed_float4* x, uint* y, packed_float4* z, int n) {
  for (int i = 0; i < n; ++i, y += 4, z += 4) {
    float4 v = x[i];
    y[0] = pack_float_to_unorm4x8(v); y[1] = pack_float_to_snorm4x8(v);
    y[2] = pack_float_to_unorm2x16(v.swz(ix<0, 1>{})); y[3] = pack_half_to_snorm2x16(half2(v.swz(ix<2, 3>{})));
    z[0] = unpack_unorm4x8_to_float(y[0]); z[1] = unpack_snorm4x8_to_float(y[1]);
    z[2] = float4(unpack_unorm2x16_to_float(y[2]), 0, 0); z[3] = float4(float2(unpack_snorm2x16_to_half(y[3])), 0, 0);
  }
}
"""
EXTRA = GEOMETRY + ATOMICS + MLX


def call(library: ctypes.CDLL, name: str, *arguments: Array | int) -> None:
    getattr(library, name)(
        *(ctypes.c_int(a) if isinstance(a, int) else pointer(a) for a in arguments)
    )


@needs_compiler
def test_geometry(library: ctypes.CDLL) -> None:
    n = 200
    a, b = np.random.default_rng(1).normal(size=(2, n, 3)).astype(f32)
    got = np.empty((n, 24), f32)
    call(library, "geometry", a, b, got, n)
    u, v = a.astype(f64), b.astype(f64)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    dot = lambda x, y: np.sum(x * y, -1, keepdims=True)  # noqa: E731
    w, i, eta = unit(v), unit(u), 0.7
    k = 1 - eta**2 * (1 - dot(w, i) ** 2)
    refracted = np.where(k < 0, 0, eta * i - (eta * dot(w, i) + np.sqrt(np.maximum(k, 0))) * w)
    forward = np.where(dot(w, v) < 0, u, -u)
    h, g = a.astype(f16).astype(f64), b.astype(f16).astype(f64)
    want = np.concatenate(
        [np.cross(u, v), u - 2 * dot(w, u) * w, refracted, forward, i,
         np.cross(h, g).astype(f32).astype(f16), dot(u, v), np.linalg.norm(u, axis=1)[:, None],
         np.linalg.norm(u - v, axis=1)[:, None], dot(u, u), dot(u - v, u - v), dot(h, g).astype(f16)],
        axis=1,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got[:, :15], want[:, :15], rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("t", _ATOMIC_TYPES)
def test_atomics_lose_nothing(library: ctypes.CDLL, t: str) -> None:
    """Four threads on the same six cells; sums stay exact in the narrowest type."""
    threads, n = 4, {"uchar": 12, "bfloat": 12, "half": 100}.get(t, 5000)
    dtype = NUMPY[t]
    values = np.random.default_rng(2).integers(1, 6, (threads, n)).astype(dtype)
    start = np.zeros(6, dtype)
    start[1] = total = values.astype(f64).sum()
    start[3] = 99
    cells = start.copy()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda row: call(library, f"cells_{t}", cells, row, n), values))
    want = [total, 0, values.max(), values.min(), threads * n]
    assert cells[:5].astype(f64).tolist() == [float(np.array(w, dtype)) for w in want]
    assert cells[5] in values


@needs_compiler
def test_atomic_bits(library: ctypes.CDLL) -> None:
    values = np.random.default_rng(3).integers(0, 2**32, (4, 999), dtype=np.uint32)
    values |= 0x10
    cells = np.array([0xFFFFFFFF, 0, 0], np.uint32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: call(library, "atomic_bits", cells, row, 999), values))
    flat = values.ravel()
    assert cells.tolist() == [
        np.bitwise_and.reduce(flat), np.bitwise_or.reduce(~flat), np.bitwise_xor.reduce(flat)
    ]  # fmt: skip


_shapes = st.lists(st.integers(1, 5), min_size=3, max_size=5)
_strides = st.lists(st.integers(-7, 300), min_size=5, max_size=5)


@needs_compiler
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_shapes, _strides, _strides)
def test_elements_have_their_places(
    library: ctypes.CDLL, shape: list[int], a: list[int], b: list[int]
) -> None:
    ndim, n = len(shape), int(np.prod(shape))
    b = [abs(x) for x in b]
    s, r = np.array(a[:ndim], np.int64), np.array(b[:ndim], np.int64)
    elements = np.arange(n, dtype=np.uint32)
    got = np.empty((n, 9), np.int64)
    call(library, "places", elements, np.array(shape, np.int32), s, r, got, n, ndim)
    index = np.stack(np.unravel_index(elements, shape), 1)
    x, y = index @ s, index @ r
    last = elements.astype(np.int64) * s[-1] + 2 * (index[:, -2:] @ s[-2:])
    last += elements // (shape[-1] * shape[-2]) * s[-3]
    want = np.stack([x & 0xFFFFFFFF, x, x, x, y, x & 0xFFFFFFFF, y, x & 0xFFFFFFFF, last], 1)
    # The index type of the first form is uint, and so is its result.
    got[:, 0] &= 0xFFFFFFFF
    assert (got == want).all()


@needs_compiler
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_loopers_walk_as_division_does(
    library: ctypes.CDLL, shape: list[int], data: st.DataObject
) -> None:
    ndim, size = len(shape), int(np.prod(shape))
    steps, at = [], [0]
    while at[-1] < size:
        steps.append(data.draw(st.integers(1, 9)))
        at.append(at[-1] + steps[-1])
    at.pop()
    s = np.array(data.draw(_strides)[:ndim], np.int64)
    n = len(steps)
    got = np.zeros((5, n), np.int64)
    call(library, "loopers", np.array(shape, np.int32), s, np.array(steps, np.int32), got, n, ndim)
    want = np.stack(np.unravel_index(at, shape), 1) @ s
    assert (got[0] == want).all() and (got[1] == want).all() and (got[2] == want).all()
    assert (got[3] == want & 0xFFFFFFFF).all()
    if ndim == 2:
        assert (got[4] == want).all()


@needs_compiler
def test_complex_numbers(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(4)
    n = 500
    a, b = (rng.normal(size=(2, n)) + 1j * rng.normal(size=(2, n))).astype(np.complex64)
    a[::7] = b[::7]
    a[::11] = 0.5
    a[::13] = 1e-6j
    f = rng.normal(size=n).astype(f32)
    got = np.empty((n, 12), np.complex64)
    call(library, "complexes", a, b, f, got, n)
    less = (a.real < b.real) | ((a.real == b.real) & (a.imag < b.imag))
    want = np.stack(
        [a + b, a - b, a * b, a / b, f + a, a - f, f * a, f / a, -a, 2 * (a + b),
         less + 2 * ~less + 4 + 1j * (1 + 2 * (a != b)), np.log1p(a.astype(np.complex128))], axis=1,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)

    whole = rng.integers(-20, 20, (4, n)) + 0.5
    x, y = (
        (whole[0] + 1j * whole[1]).astype(np.complex64),
        (whole[2] + 1j * whole[3]).astype(np.complex64),
    )
    rest = np.empty(n, np.complex64)
    call(library, "rests", x, y, rest, n)
    np.testing.assert_array_equal(rest, np.mod(x.real, y.real) + 1j * np.mod(x.imag, y.imag))


@needs_compiler
def test_small_mlx_functions(library: ctypes.CDLL) -> None:
    x = np.concatenate(
        [np.geomspace(1e-30, 3e38, 999), [0, -0.5, -0.999, np.inf, -1, 1e-45]]
    ).astype(f32)
    got = np.empty_like(x)
    call(library, "logs", x, got, len(x))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got, np.log1p(x.astype(f64)), rtol=1e-6)
    h = np.array([0, -0.0, 1, np.nan, np.inf, 6e-8] * (len(x) // 6 + 1), f16)[: len(x)].copy()
    truth = np.empty(len(x), np.uint8)
    call(library, "truths", x, h, truth, len(x))
    assert (truth == (x != 0) + 2 * (h != 0) + 4).all()


@needs_compiler
def test_packing(library: ctypes.CDLL) -> None:
    x = np.random.default_rng(5).uniform(-1.3, 1.3, (300, 4)).astype(f32)
    x[0] = [1, 0, -1, 0.5]
    packed, back = np.empty((300, 4), np.uint32), np.empty((300, 4, 4), f32)
    call(library, "packs", x, packed, back, 300)
    unsigned, signed = np.clip(x, 0, 1), np.clip(x, -1, 1)
    want = np.zeros_like(back)
    want[:, 0] = np.rint(unsigned * f32(255)) / 255
    want[:, 1] = np.rint(signed * f32(127)) / 127
    want[:, 2, :2] = np.rint(unsigned[:, :2] * f32(65535)) / 65535
    half = np.clip(x.astype(f16), -1, 1).astype(f32)
    want[:, 3, :2] = (np.rint(half[:, 2:] * f32(32767)) / 32767).astype(f16)
    np.testing.assert_allclose(back, want, atol=1e-6)
    assert packed[0, 0] == 0x800000FF and packed[0, 1] == 0x4081007F


# ---- CUDA ----------------------------------------------------------------------------------------
def _joined() -> str:
    return "".join((INCLUDE / name).read_text() for name in HEADERS)


ATOMIC_KERNEL = (
    "".join(
        f"""
extern "C" __global__ void cells_{t}({t}* p_, const {t}* v, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  volatile atomic<{t}>* p = (volatile atomic<{t}>*)p_;
  __shared__ atomic<{t}> local[2];
  if (threadIdx.x < 2) atomic_store_explicit(&local[threadIdx.x], 0, memory_order_relaxed);
  __syncthreads();
  atomic_fetch_add_explicit(&local[1], v[i], memory_order_relaxed);
  atomic_fetch_sub_explicit(p + 1, v[i], memory_order_relaxed);
  atomic_fetch_max_explicit(p + 2, v[i], memory_order_relaxed);
  atomic_fetch_min_explicit(p + 3, v[i], memory_order_seq_cst);
  {t} old = atomic_load_explicit(p + 4, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(p + 4, &old, {t}(old + {t}(1)), memory_order_relaxed,
                                                memory_order_relaxed)) {{
  }}
  atomic_exchange_explicit(p + 5, v[i], memory_order_acquire);
  __syncthreads();
  if (threadIdx.x == 0) atomic_fetch_add_explicit(p, atomic_load_explicit(&local[1], memory_order_relaxed), memory_order_relaxed);
}}
"""
        for t in _ATOMIC_TYPES
    )
    + """
extern "C" __global__ void shared_types(float* y) {
  __shared__ half h[4]; __shared__ bfloat b[4]; __shared__ float3 v[4]; __shared__ complex64_t c[4];
  __shared__ float2x2 m[2]; __shared__ packed_half3 p[2]; __shared__ metal::array<half4, 2> a;
  int i = threadIdx.x & 1;
  h[i] = y[0]; b[i] = h[i]; v[i] = float3(b[i]); c[i] = complex64_t(v[i].x, 1.0f); m[i] = float2x2(c[i].real);
  p[i] = half3(m[i][0].x); a[i] = half4(p[i].x);
  y[1] = a[i].x + Limits<half>::max + Limits<complex64_t>::min.real + INFINITY + M_PI_H;
}
"""
)


@pytest.fixture(scope="module")
def compiler_of_nvidia() -> nvrtc.Nvrtc:
    found = nvrtc.find_nvrtc()
    if found is None:
        pytest.skip("NVRTC is not installed")
    return found


def _cubin(library: nvrtc.Nvrtc, text: str, arch: str, standard: str) -> bytes:
    options = [f"--gpu-architecture={arch}", f"--std={standard}", "--fmad=false", "-w"]
    return library.compile(text, "text.cu", options)[0]


@pytest.mark.parametrize(("arch", "standard"), [("sm_80", "c++17"), ("sm_90", "c++20")])
def test_nvrtc_takes_the_same_names(
    compiler_of_nvidia: nvrtc.Nvrtc, arch: str, standard: str
) -> None:
    cubin = _cubin(compiler_of_nvidia, _joined() + _names(cuda=True), arch, standard)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(("arch", "standard"), [("sm_80", "c++20"), ("sm_90", "c++17")])
def test_nvrtc_takes_the_same_expressions(
    compiler_of_nvidia: nvrtc.Nvrtc, arch: str, standard: str
) -> None:
    # The two differ in the 16-bit floats alone. A GPU, where there is one, sees every expression.
    def keep(case: Case) -> bool:
        wide = case.types[0] in ("float", "int", "uint64_t", "float:3", "uchar:3")
        return _has_small(case) if arch == "sm_90" else wide or "chain" in case.name

    text = program(True, ATOMIC_KERNEL, keep)
    assert b"cells_half" in _cubin(compiler_of_nvidia, _joined() + text, arch, standard)


class Gpu:
    """The least of the CUDA driver that runs a kernel on arrays."""

    def __init__(self, cubin: bytes) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self("cuCtxSetCurrent", self.context)
        self("cuModuleLoadData", ctypes.byref(self.module), cubin)

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: CUDA error {status}"

    def launch(self, name: str, arrays: list[Array], n: int) -> None:
        """Run on copies of the arrays, and copy them back."""
        held = []
        for a in arrays:
            p = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(max(a.nbytes, 1)))
            self("cuMemcpyHtoD_v2", p, pointer(a), ctypes.c_size_t(a.nbytes))
            held.append(p)
        function, count = ctypes.c_void_p(), ctypes.c_int(n)
        self("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        slots = (ctypes.c_void_p * (len(held) + 1))(*(ctypes.addressof(x) for x in (*held, count)))
        blocks = (n + 127) // 128
        self("cuLaunchKernel", function, blocks, 1, 1, 128, 1, 1, 0, None, slots, None)
        for a, p in zip(arrays, held, strict=True):
            self("cuMemcpyDtoH_v2", pointer(a), p, ctypes.c_size_t(a.nbytes))
            self("cuMemFree_v2", p)


def _driver_works() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


@pytest.mark.skipif(not _driver_works(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_gpu_agrees_with_numpy(compiler_of_nvidia: nvrtc.Nvrtc, arch: str) -> None:
    gpu = Gpu(_cubin(compiler_of_nvidia, _joined() + program(True, ATOMIC_KERNEL), arch, "c++17"))
    wrong = []
    for case in CASES.values():
        inputs, want = table_row(case)
        out = np.empty_like(want)
        gpu.launch(f"case_{case.name}", [*inputs, out], len(inputs[0]))
        try:
            check(case, out, inputs, want)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    for t in _ATOMIC_TYPES:
        n = {"uchar": 48, "bfloat": 48, "half": 400}.get(t, 5000)
        dtype = NUMPY[t]
        values = np.random.default_rng(2).integers(1, 6, n).astype(dtype)
        cells = np.array([0, values.astype(f64).sum(), 0, 99, 0, 0]).astype(dtype)
        gpu.launch(f"cells_{t}", [cells, values], n)
        total = values.astype(f64).sum()
        want = [total, 0, values.max(), values.min(), n]
        assert cells[:5].astype(f64).tolist() == [float(np.array(w, dtype)) for w in want], t
        assert cells[5] in values
