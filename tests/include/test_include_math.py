"""Scalar math of kernels (include/math.h): errors in ulp, edge cases, and that loops vectorise.

Every function is compiled as a plain loop over arrays, by each compiler found, with and without
contraction and fused operations, and compared with NumPy's float64 on evenly spaced bit patterns
of float32. NVRTC compiles the same header everywhere; a GPU, where there is one, runs it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ferrule
from ferrule.tools import nvrtc

HEADER = Path(ferrule.__file__).parent / "include" / "math.h"
Array = np.ndarray[Any, Any]
f32, f64 = np.float32, np.float64

# ---- the functions, their references and the largest errors allowed, in ulp ----------------------
EXACT = 0.5000001


def _sinpi(x: Array) -> Array:
    r = np.fmod(np.abs(x), 2.0)
    n = np.rint(2.0 * r)
    t = np.pi * (r - n / 2.0)
    k = np.where(np.isfinite(n), n, 0).astype(int) % 4
    y = np.choose(k, [np.sin(t), np.cos(t), -np.sin(t), -np.cos(t)]) + 0.0
    return np.where(np.isfinite(x), np.copysign(1.0, x) * y, np.nan)


def _cospi(x: Array) -> Array:
    r = np.fmod(np.abs(x), 2.0)
    n = np.rint(2.0 * r)
    t = np.pi * (r - n / 2.0)
    k = np.where(np.isfinite(n), n, 0).astype(int) % 4
    return np.where(
        np.isfinite(x), np.choose(k, [np.cos(t), -np.sin(t), -np.cos(t), np.sin(t)]) + 0.0, np.nan
    )


def _fract(x: Array) -> Array:
    # Below 1 by construction; the float32 just below 1 where rounding would reach it.
    return np.minimum(x - np.floor(x), 1 - 2.0**-24)


def _powr(x: Array, y: Array) -> Array:
    return np.where(x < 0, np.nan, np.power(np.abs(x), y))


Reference = Callable[..., Any]
UNARY: dict[str, tuple[Reference, float]] = {
    "fabs": (np.abs, 0), "floor": (np.floor, 0), "ceil": (np.ceil, 0), "trunc": (np.trunc, 0),
    "rint": (np.rint, 0), "fract": (_fract, EXACT), "sqrt": (np.sqrt, EXACT),
    "round": (lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), 0),
    "exp": (np.exp, 1.2), "exp2": (np.exp2, 1.2), "exp10": (lambda x: np.power(10.0, x), 1.3),
    "expm1": (np.expm1, 1.8), "log": (np.log, 1.2), "log2": (np.log2, 1.8),
    "log10": (np.log10, 1.8), "log1p": (np.log1p, 1.8), "sin": (np.sin, 1.8),
    "cos": (np.cos, 1.8), "tan": (np.tan, 3.8), "sinpi": (_sinpi, 1.8), "cospi": (_cospi, 1.8),
    "tanpi": (lambda x: _sinpi(x) / _cospi(x), 3.8), "asin": (np.arcsin, 2.0),
    "acos": (np.arccos, 1.8), "atan": (np.arctan, 1.8), "sinh": (np.sinh, 2.5),
    "cosh": (np.cosh, 1.8), "tanh": (np.tanh, 2.5), "asinh": (np.arcsinh, 2.2),
    "acosh": (np.arccosh, 2.8), "atanh": (np.arctanh, 2.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2.0),
}  # fmt: skip
BINARY: dict[str, tuple[Reference, float]] = {
    "pow": (np.power, 1.2), "powr": (_powr, 1.2), "atan2": (np.arctan2, 1.8),
    "fmod": (np.fmod, 0), "fmin": (np.fmin, 0), "fmax": (np.fmax, 0),
    "copysign": (np.copysign, 0), "divide": (np.divide, EXACT),
    "fdim": (lambda x, y: np.where(np.isnan(x - y) & (x != y), np.nan, np.fmax(x - y, 0)), EXACT),
}  # fmt: skip
PREDICATES: dict[str, Reference] = {
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "signbit": np.signbit,
    "isnormal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).smallest_normal),
}  # fmt: skip
# What CUDA's own functions promise, where that is more; fast ones are compared apart.
ON_CUDA = {"exp": 2.1, "exp2": 2.1, "exp10": 2.1, "log2": 1.8, "log10": 2.1, "tan": 4.1,
           "tanpi": 6.0, "asinh": 3.1, "acosh": 4.1, "atanh": 3.1, "sinh": 3.1, "tanh": 2.1,
           "asin": 2.1, "acos": 2.1, "atan": 2.1, "sin": 2.1, "cos": 2.1, "sinpi": 2.1,
           "cospi": 2.1, "cosh": 2.6, "atan2": 3.1, "pow": 4.1, "powr": 4.1,
           "log": 1.6, "rsqrt": 0.51}  # fmt: skip


def _loop(name: str, types: str, body: str, cuda: bool = False) -> str:
    """A loop over arrays of these types, one character each: i, b, f, d; the last is the output."""
    spelled = {"i": "int", "b": "unsigned char", "f": "float", "d": "double"}
    names = "xyzo" if len(types) == 4 else "xyo" if len(types) == 3 else "xo"
    parameters = ", ".join(
        f"{'' if n == 'o' else 'const '}{spelled[t]}* __restrict {n}"
        for n, t in zip(names, types, strict=True)
    )
    if cuda:
        return (
            f'extern "C" __global__ void {name}({parameters}, long long n) {{ '
            "long long i = blockIdx.x * 128ll + threadIdx.x; "
            f"if (i < n) {{ {body}; }} }}\n"
        )
    head = f'extern "C" void {name}({parameters}, long n)'
    return f"{head} {{ for (long i = 0; i < n; ++i) {{ {body}; }} }}\n"


SETS = ("precise", "fast")


def program(kinds: str = "fd", sets: tuple[str, ...] = SETS, cuda: bool = False) -> str:
    """Every function of these sets for these element types, one line each."""
    text = ""
    for ns in sets:
        for t in kinds:
            real = {"f": "float", "d": "double"}[t]
            for name in UNARY:
                text += _loop(f"{ns}_{name}_{t}", t + t, f"o[i] = {ns}::{name}(x[i])", cuda)
            for name in (*BINARY, "nextafter"):
                text += _loop(f"{ns}_{name}_{t}", 3 * t, f"o[i] = {ns}::{name}(x[i], y[i])", cuda)
            for name in ("fma", "fmin3", "fmax3", "fmedian3"):
                call = f"o[i] = {ns}::{name}(x[i], y[i], z[i])"
                text += _loop(f"{ns}_{name}_{t}", 4 * t, call, cuda)
            for name in PREDICATES:
                text += _loop(f"{ns}_{name}_{t}", t + "b", f"o[i] = {ns}::{name}(x[i])", cuda)
            text += _loop(f"{ns}_ilogb_{t}", t + "i", f"o[i] = {ns}::ilogb(x[i])", cuda)
            text += _loop(f"{ns}_ldexp_{t}", t + "i" + t, f"o[i] = {ns}::ldexp(x[i], y[i])", cuda)
            frexp = f"int e; o[i] = {ns}::frexp(x[i], e); o[n + i] = {real}(e)"
            text += _loop(f"{ns}_frexp_{t}", t + t, frexp, cuda)
            for name in ("modf", "sincos"):
                call = f"{real} b; o[i] = {ns}::{name}(x[i], b); o[n + i] = b"
                text += _loop(f"{ns}_{name}_{t}", t + t, call, cuda)
    return f'#include "math.h"\nusing namespace fr::scalar;\n{text}' if not cuda else text


# ---- compilers -----------------------------------------------------------------------------------
COMMON = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
          "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}")  # fmt: skip
NATIVE = () if platform.machine() == "arm64" else ("-march=native",)
GXX = shutil.which("g++")
CLANG = next(filter(None, map(shutil.which, ("clang++", "clang++-14", "clang++-16"))), None)
COMPILERS = [c for c in (GXX, CLANG) if c]
_BUILDS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "g++": (GXX, (*NATIVE, "-ffp-contract=off")),
    "g++-contracted": (GXX, (*NATIVE, "-ffp-contract=fast")),
    "g++-generic": (GXX, ("-ffp-contract=fast",)),  # on x86-64: neither FMA nor SSE4.1
    "clang++": (CLANG, (*NATIVE, "-ffp-contract=fast")),
}
BUILDS = [name for name, (compiler, _) in _BUILDS.items() if compiler]


def compile_text(compiler: str, text: str, target: Path, *options: str) -> str:
    """The compiler's messages."""
    source = target.with_suffix(".cpp")
    source.write_text(text)
    done = subprocess.run(
        [compiler, *COMMON, *options, "-o", str(target), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr


class Library:
    """The functions of one build, on arrays."""

    def __init__(self, path: Path, ns: str = "precise") -> None:
        self.loaded, self.ns = ctypes.CDLL(str(path)), ns

    def __call__(self, name: str, *inputs: Array, out: Any = None, rows: int = 1) -> Array:
        kind = "d" if inputs[0].dtype == f64 else "f"
        arrays = [np.ascontiguousarray(a) for a in inputs]
        shape = (rows, arrays[0].size) if rows > 1 else (arrays[0].size,)
        result = np.empty(shape, out or arrays[0].dtype)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, result)]
        function = getattr(self.loaded, f"{self.ns}_{name}_{kind}")
        function(*pointers, ctypes.c_long(arrays[0].size))
        return result


def build(name: str, text: str, factory: pytest.TempPathFactory) -> Path:
    """A shared library, built once for all test processes that run side by side."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"math-{name}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            compiler, options = _BUILDS[name.removesuffix("-all")]
            assert compiler
            if name.endswith("-all"):  # nothing of it depends on how loops are compiled
                options = (*options, "-O1")
            compile_text(compiler, text, folder / "math.so", *options, "-shared")
            (folder / "done").touch()
    return folder / "math.so"


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The precise functions on float, by each compiler."""
    return Library(build(request.param, program("f", ("precise",)), tmp_path_factory))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sets, float and double, by one compiler."""
    if not BUILDS:
        pytest.skip("neither g++ nor clang++ is installed")
    return build(f"{BUILDS[0]}-all", program(), tmp_path_factory)


# ---- samples and errors --------------------------------------------------------------------------
SPECIAL = np.array(
    [0.0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 10, 127, 128, 126.5, 149, 150, 38.53184,
     38.53185, 88.72283, 88.72284, 87.33655, 103.97208, 103.97209, 89.415985, 89.41599, 44.85347,
     0.49999997, 0.50000006, 0.99999994, 1.0000001, 2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1,
     2.0**24 - 1, 2.0**24, 1e10, 1e20, 1e30, np.inf, np.nan, 2.0**-149, 3 * 2.0**-149,
     2.0**-126, 2.0**-126 - 2.0**-149, 3.4028235e38, 2.0**-24, 2.0**-25, 1.8446744e19], f32
)  # fmt: skip
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])
# The floats nearest to multiples of pi / 2, from continued fractions: they need most digits of pi.
NEAREST = [float.fromhex(h) for h in (
    "0x1.f37c8ap+95", "0x1.47d0fep+34", "0x1.f37c8ap+96", "0x1.47d0fep+35", "0x1.f9cbe2p+7",
    "0x1.32ede2p+85", "0x1.628d4cp+40", "0x1.1309300p+76", "0x1.b08c4ap+111", "0x1.921fb6p+0",
    "0x1.921fb6p+1", "0x1.2d97c8p+2", "0x1.47d0fep+36", "0x1.f9cbe2p+8")]  # fmt: skip


def numbers() -> Array:
    """200,000 evenly spaced bit patterns, special values, and ordinary magnitudes."""
    rng = np.random.default_rng(0)
    spread = np.arange(0, 1 << 32, 21475, dtype=np.uint64).astype(np.uint32).view(f32)
    hot = [rng.uniform(-a, a, 30_000).astype(f32) for a in (1, 10, 100, 1e5)]
    return np.concatenate([spread, SPECIAL, np.array(NEAREST, f32), *hot])


def pairs() -> tuple[Array, Array]:
    """Random bits, all pairs of special values, and pairs whose power is an ordinary number."""
    rng = np.random.default_rng(1)
    n = 40_000
    bits = rng.integers(0, 1 << 32, (2, n), np.uint32).view(f32)
    special = np.stack(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1)
    x = np.exp(rng.uniform(-87, 88, n))
    powers = np.stack([x, rng.uniform(-150, 128, n) / np.log2(x)]).astype(f32)
    near_one = np.stack([1 + rng.uniform(-1e-3, 1e-3, n), rng.uniform(-8e4, 8e4, n)]).astype(f32)
    whole = rng.integers(-30, 30, (2, n)).astype(f32)
    hot = rng.uniform(-20, 20, (2, n)).astype(f32)
    x, y = np.concatenate([bits, special, powers, near_one, whole, hot], axis=1)
    return x, y


def ulps(got: Array, want: Array) -> Array:
    """|got - want| in units of got's last place; infinite where NaN, infinity or a sign differ.

    ``want`` has more digits than ``got``; what lies above got's range by rounding is infinite.
    """
    info = np.finfo(got.dtype)
    size = np.abs(want)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.where((size > 0) & np.isfinite(size), size, 1.0)))
        unit = np.exp2(np.clip(exponent, info.minexp, info.maxexp - 1) - info.nmant)
        top = float(info.max)
        # Within a unit of the largest float, an infinity is a rounding error.
        edge = (size > top * (1 - 2.0**-22)) & (size < top * (1 + 2.0**-22))
        error = np.abs(got.astype(want.dtype) - want) / unit
        beyond = (size > top) & ~edge
        error = np.where(beyond, np.where(got == np.sign(want) * np.inf, 0, np.inf), error)
        error = np.where(edge & (np.abs(got) > top * (1 - 2.0**-22)), np.minimum(error, 1), error)
        error = np.where(edge & np.isinf(got), 0, error)
    error = np.where(np.isnan(want), np.where(np.isnan(got), 0, np.inf), error)
    wrong_zero = (got == 0) & (want == 0) & (np.signbit(got) != np.signbit(want))
    return np.where(np.isnan(error) | wrong_zero, np.inf, error)


def check(name: str, got: Array, want: Array, limit: float, *inputs: Array) -> None:
    error = ulps(got, want)
    if name in ("fmin", "fmax", "tanpi"):  # the sign of a zero is free
        error = np.where((got == 0) & (want == 0), 0, error)
    k = int(np.argmax(error))
    at = ", ".join(repr(float(x[k])) for x in inputs)
    assert error[k] <= limit, f"{name}({at}) = {got[k]!r}, not {want[k]!r}: {error[k]:.4g} ulp"


def double(x: Array) -> Array:
    return x.astype(f64)


# ---- float on the CPU ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", UNARY)
def test_unary(library: Library, name: str) -> None:
    x = numbers()
    reference, limit = UNARY[name]
    with np.errstate(all="ignore"):
        want = reference(double(x))
    check(name, library(name, x), want, limit, x)


@pytest.mark.parametrize("name", BINARY)
def test_binary(library: Library, name: str) -> None:
    x, y = pairs()
    reference, limit = BINARY[name]
    with np.errstate(all="ignore"):
        want = reference(double(x), double(y))
    check(name, library(name, x, y), want, limit, x, y)


def test_two_results(library: Library) -> None:
    x = numbers()
    with np.errstate(all="ignore"):
        s, c = library("sincos", x, rows=2)
        check("sin", s, np.sin(double(x)), UNARY["sin"][1], x)
        check("cos", c, np.cos(double(x)), UNARY["cos"][1], x)
        for got, want in zip(library("modf", x, rows=2), np.modf(x), strict=True):
            check("modf", got, double(want), 0, x)
        significand, exponent = np.frexp(x)
        got = library("frexp", x, rows=2)
        check("frexp", got[0], double(significand), 0, x)
        # NumPy leaves the exponent of an infinity or a NaN to the C library.
        check("frexp", got[1], np.where(np.isfinite(x), double(exponent), 0), 0, x)


def test_sine_and_cosine_stay_within_one(library: Library) -> None:
    x = np.concatenate([np.linspace(1.5, 1.65, 100_000).astype(f32), numbers()])
    for name in ("sin", "cos", "sinpi", "cospi"):
        y = np.abs(library(name, x))
        assert y[np.isfinite(x)].max() <= 1, name


def test_nearest_to_multiples_of_pi(library: Library) -> None:
    # Where sine or cosine is as small as it gets, relative errors still hold.
    x = np.array(NEAREST, f32)
    small = np.minimum(np.abs(np.sin(double(x))), np.abs(np.cos(double(x))))
    assert small.max() < 1e-6 and small.min() < 3e-9
    for name in ("sin", "cos", "tan"):
        check(name, library(name, x), UNARY[name][0](double(x)), UNARY[name][1], x)


def nearest_float(value: Fraction) -> np.float32:
    """The float nearest to a rational, halves to even."""
    if abs(value) >= Fraction(2) ** 128:
        return f32(np.inf if value > 0 else -np.inf)
    guess = f32(float(value))
    with np.errstate(over="ignore"):
        around = [guess, np.nextafter(guess, f32(np.inf)), np.nextafter(guess, f32(-np.inf))]

    def distance(x: np.float32) -> tuple[Fraction, int]:
        exact = Fraction(float(x)) if np.isfinite(x) else Fraction(2) ** 128 * int(np.sign(x))
        return abs(exact - value), int(x.view(np.uint32)) & 1

    return min(around, key=distance)


def same(got: Array, want: Array) -> None:
    """Equal with the signs of zeros; any NaN is as good as another."""
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[got == 0], np.signbit(want)[got == 0])


# Quiet NaNs: NumPy's fmin and fmax take signalling ones for numbers or not.
_bits = st.integers(0, 2**32 - 1).map(lambda b: np.uint32(b).view(f32)).filter(lambda x: x == x)
_any = st.floats(width=32, allow_nan=False) | _bits | st.just(np.nan)
_floats = hnp.arrays(f32, 40, elements=_any, fill=st.nothing())
_whole = hnp.arrays(f32, 40, elements=st.integers(-(2**25), 2**25).map(float))
_shifts = hnp.arrays(np.int32, 40, elements=st.integers(-400, 400))
_TIE = np.array([1 + 2.0**-23, 1 + 2.0**-23, 2.0**-149, 1 + 2.0**-12, 3.0e-45, 2.0**100], f32)
_TOP = np.array([1 + 2.0**-23, 1 - 2.0**-23, 0.5, 1 + 2.0**-12, 0.5, 2.0**100], f32)
_ADD = np.array([-(2.0**-60), 2.0**-60, 0, 2.0**-80, 1e-45, -np.inf], f32)


@settings(max_examples=20, deadline=None)
@given(_floats, _floats | _whole, _floats, _shifts)
@example(_TIE, _TOP, _ADD, np.arange(-152, -146, dtype=np.int32))
def test_exact_functions(library: Library, x: Array, y: Array, z: Array, n: Array) -> None:
    with np.errstate(all="ignore"):
        same(library("nextafter", x, y), np.nextafter(x, y))
        same(library("ldexp", x, n), np.ldexp(double(x), n).astype(f32))
        same(library("fmod", x, y), np.fmod(x, y))
        for got, want in zip(library("modf", x, rows=2), np.modf(x), strict=True):
            same(got, want)
        significand, exponent = np.frexp(x)
        got = library("frexp", x, rows=2)
        same(got[0], significand)
        same(got[1], np.where(np.isfinite(x), exponent, 0).astype(f32))
        for name, reference in PREDICATES.items():
            same(library(name, x, out=np.uint8), reference(x))
        plain = np.isfinite(x) & (x != 0)
        same(library("ilogb", x, out=np.int32)[plain], exponent[plain] - 1)
        exact = [
            nearest_float(Fraction(a) * Fraction(b) + Fraction(c))
            if np.isfinite([a, b, c]).all() else a * b + c
            for a, b, c in zip(*(v.tolist() for v in (x, y, z)), strict=True)
        ]  # fmt: skip
        same(library("fma", x, y, z) + f32(0), np.array(exact, f32) + f32(0))
        ordered = np.sort(np.stack([x, y, z]), axis=0) + f32(0)
        usual = ~np.isnan(ordered).any(axis=0)
        for k, name in enumerate(("fmin3", "fmedian3", "fmax3")):
            same(library(name, x, y, z)[usual] + f32(0), ordered[k][usual])
        same(library("fmin3", x, y, z) + f32(0), np.fmin(np.fmin(x, y), z) + f32(0))
        same(library("fmax3", x, y, z) + f32(0), np.fmax(np.fmax(x, y), z) + f32(0))


def test_exponents_of_what_has_none(library: Library) -> None:
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], f32)
    low, high = -(2**31), 2**31 - 1
    assert library("ilogb", x, out=np.int32).tolist() == [low, low, low, high, high]


# ---- double, and the fast set --------------------------------------------------------------------
@pytest.mark.parametrize("ns", ["precise", "fast"])
def test_double(everything: Path, ns: str) -> None:
    lib = Library(everything, ns)
    rng = np.random.default_rng(2)
    x = rng.normal(size=20_000) * np.exp(rng.normal(size=20_000) * 5)
    x = np.concatenate([double(SPECIAL), x])
    y = np.roll(x, 7)
    wide = np.longdouble
    with np.errstate(all="ignore"):
        for name, (reference, limit) in UNARY.items():
            pi = name in ("sinpi", "cospi", "tanpi")  # their references are no better than double
            if np.finfo(wide).nmant == 52 or pi:
                check(name, lib(name, x), reference(x), 0 if limit == 0 else 16, x)
            elif name == "fract":
                assert (lib(name, x)[np.isfinite(x)] < 1).all()
            else:
                check(name, lib(name, x), reference(x.astype(wide)), 0 if limit == 0 else 3, x)
        for name, (reference, limit) in BINARY.items():
            want = reference(x.astype(wide), y.astype(wide))
            check(name, lib(name, x, y), want, 0 if limit == 0 else 3, x, y)
        s, c = lib("sincos", x, rows=2)
        check("sincos", s, np.sin(x.astype(wide)), 3, x)
        check("sincos", c, np.cos(x.astype(wide)), 3, x)
        for name in ("modf", "frexp"):
            for got, want in zip(lib(name, x, rows=2), getattr(np, name)(x), strict=True):
                assert (got == want)[np.isfinite(x)].all()
        for name, reference in PREDICATES.items():
            assert (lib(name, x, out=np.uint8).astype(bool) == reference(x)).all(), name
        k = rng.integers(-1100, 1100, x.size).astype(np.int32)
        assert np.array_equal(lib("ldexp", x, k), np.ldexp(x, k), equal_nan=True)
        assert np.array_equal(lib("nextafter", x, y), np.nextafter(x, y), equal_nan=True)
        plain = np.isfinite(x) & (x != 0)
        assert (lib("ilogb", x, out=np.int32)[plain] == np.frexp(x)[1][plain] - 1).all()


def test_fast_on_the_cpu(everything: Path) -> None:
    precise, fast = Library(everything), Library(everything, "fast")
    x, edges = numbers(), np.array([np.nan, np.inf, -np.inf], f32)
    for name in UNARY:
        if name not in ("sin", "cos", "tan"):
            assert np.array_equal(fast(name, x), precise(name, x), equal_nan=True), name
    turns = x[np.abs(x) < 1e5]
    for name, reference in (("sin", np.sin), ("cos", np.cos)):
        assert np.abs(fast(name, turns) - reference(double(turns))).max() < 2e-7
        assert np.abs(fast(name, x)[np.isfinite(x)]).max() <= 1.000001
        assert np.isnan(fast(name, edges)).all()
    s, c = fast("sincos", turns, rows=2)
    assert np.array_equal(s, fast("sin", turns)) and np.array_equal(c, fast("cos", turns))
    good = turns[np.abs(np.cos(double(turns))) > 1e-2]
    np.testing.assert_allclose(fast("tan", good), np.tan(double(good)), rtol=3e-5, atol=2e-7)
    a, b = (np.abs(v) for v in pairs())
    with np.errstate(all="ignore"):
        want = np.power(double(a), double(b))
        usual = (want > 1e-37) & (want < 1e38) & (a > 0) & np.isfinite(a * b)
    np.testing.assert_allclose(fast("powr", a, b)[usual], want[usual], rtol=2e-5)


# ---- what the compilers make of it ---------------------------------------------------------------
# Combinations as kernels have them, beside the functions alone.
COMBINED = {
    "gelu": "0.5f * x[i] * (1.0f + tanh(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])))",
    "silu": "x[i] / (1.0f + exp(-x[i]))",
    "sigmoid": "x[i] < 0.0f ? 1.0f - 1.0f / (1.0f + exp(x[i])) : 1.0f / (1.0f + exp(-x[i]))",
    "softplus": "fmax(x[i], 0.0f) + log1p(exp(-fabs(x[i])))",
    "gated": "exp(-exp(x[i]) * log(1.0f + exp(x[i])))",
    "guarded": "isnan(x[i]) ? 0.0f : isinf(x[i]) ? 1.0f : exp(x[i])",
    "elu": "x[i] > 0.0f ? x[i] : exp(x[i]) - 1.0f",
    "quantise": "fmin(fmax(rint(x[i] * 127.0f), -128.0f), 127.0f)",
    "normalise": "x[i] * rsqrt(x[i] * x[i] + 1e-5f)",
    "powers": "pow(fabs(x[i]), 1.7f) + pow(x[i], 2.0f)",
    "gamma": "pow(x[i], y[0])",
    "frequency": "pow(y[0], x[i])",
    "gauss": "sqrt(-2.0f * log(x[i])) * cos(6.2831853f * x[i])",
    "turn": "x[i] * fast::cos(x[i]) - fast::sin(x[i])",
}
VECTORS = {
    "avx2": ("-mavx2", "-mfma", "-ffp-contract=fast"),
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-ffp-contract=off"),
}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
@pytest.mark.parametrize("isa", VECTORS)
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: Path(c).name)
def test_loops_vectorise(tmp_path: Path, compiler: str, isa: str) -> None:
    lines = ['#include "math.h"', "using namespace fr::scalar;"]
    names = ["include", "using"]
    for name in UNARY:
        lines.append(_loop(f"loop_{name}", "ff", f"o[i] = precise::{name}(x[i])").strip())
        names.append(name)
    for name in (*BINARY, "nextafter"):
        lines.append(_loop(f"loop_{name}", "fff", f"o[i] = precise::{name}(x[i], y[i])").strip())
        names.append(name)
    for name, expression in COMBINED.items():
        lines.append(_loop(f"combined_{name}", "fff", f"o[i] = {expression}").strip())
        names.append(name)
    clang = "clang" in Path(compiler).name
    report = "-Rpass=loop-vectorize" if clang else "-fopt-info-vec-optimized"
    options = ("-c", report, *VECTORS[isa], "-Wno-unused-parameter")
    log = compile_text(compiler, "\n".join(lines) + "\n", tmp_path / "loops.o", *options)
    said = re.findall(r"loops\.cpp:(\d+):\d+: .*vectorized", log)
    vectorised = {names[int(line) - 1] for line in said}
    assert set(names[2:]) - vectorised == {"fmod"}  # whose loop tells that this test can fail


def test_reassociation_is_refused(tmp_path: Path) -> None:
    if GXX is None:
        pytest.skip("g++ is not installed")
    with pytest.raises(AssertionError, match="would cancel roundings"):
        compile_text(GXX, '#include "math.h"', tmp_path / "math.o", "-c", "-ffast-math")


def test_nothing_is_included() -> None:
    assert not re.search(r"^\s*#\s*include", HEADER.read_text(), re.MULTILINE)


AUTHOR = """
#include "math.h"
float y0 = 1, j1 = 2, gamma_ = 3;
float expf(int) { return 4; }
namespace author {
  float exp = 5, log = 6, sin = 7, index = 8, floor = 9, pow = 10, isnan = 11;
  float all() { return exp + log + sin + index + floor + pow + isnan + fr::scalar::exp(0.0f); }
}
int fr_macros =
#if defined(FR_LIBM) || defined(FR_HAS_FMA) || defined(FR_ROUNDER) || defined(FR_UNARY_FLOAT)
  leaked;
#else
  0;
#endif
"""


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: Path(c).name)
def test_authors_keep_their_names(tmp_path: Path, compiler: str, standard: str) -> None:
    compile_text(compiler, AUTHOR, tmp_path / "author.o", "-c", f"-std={standard}", "-w")


# ---- CUDA ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def nvidia() -> nvrtc.Nvrtc:
    found = nvrtc.find_nvrtc()
    if found is None:
        pytest.skip("NVRTC is not installed")
    return found


def cuda_text(kinds: str) -> str:
    return f"{HEADER.read_text()}\nusing namespace fr::scalar;\n{program(kinds, cuda=True)}"


def test_nvrtc_makes_a_binary(nvidia: nvrtc.Nvrtc) -> None:
    options = ["--gpu-architecture=sm_80", "--std=c++17"]
    cubin, log = nvidia.compile(cuda_text("f"), "math.cu", options)
    assert cubin.startswith(b"\x7fELF") and "warning" not in log


def test_fast_functions_are_instructions(nvidia: nvrtc.Nvrtc) -> None:
    options = ["--gpu-architecture=compute_90", "--std=c++20"]
    ptx = nvidia.compile(cuda_text("fd"), "math.cu", options)[0].decode()
    entries = dict(re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", ptx, re.DOTALL))
    for name, instruction in (
        ("exp", "ex2.approx"), ("log", "lg2.approx"), ("sin", "sin.approx"), ("cos", "cos.approx"),
        ("sqrt", "sqrt.approx"), ("divide", "div.approx"), ("powr", "ex2.approx"),
    ):  # fmt: skip
        assert instruction in entries[f"fast_{name}_f"], name
    for name, instruction in (("sqrt", "sqrt.rn.f32"), ("divide", "div.rn.f32")):
        assert instruction in entries[f"precise_{name}_f"], name


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


class Gpu:
    """A `Library` on the GPU, by the least of the CUDA driver that runs a kernel on arrays."""

    def __init__(self, cubin: bytes, ns: str) -> None:
        self.driver, self.ns = _driver(), ns
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.do("cuCtxSetCurrent", self.context)
        self.do("cuModuleLoadData", ctypes.byref(self.module), cubin)

    def do(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: CUDA error {status}"

    def __call__(self, name: str, *inputs: Array, rows: int = 1) -> Array:
        n = inputs[0].size
        out = np.empty((rows, n) if rows > 1 else n, f32)
        held = []
        for array in (*inputs, out):
            p, a = ctypes.c_uint64(), np.ascontiguousarray(array)
            self.do("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(a.nbytes))
            self.do("cuMemcpyHtoD_v2", p, ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.nbytes))
            held.append(p)
        function, count = ctypes.c_void_p(), ctypes.c_longlong(n)
        entry = f"{self.ns}_{name}_f".encode()
        self.do("cuModuleGetFunction", ctypes.byref(function), self.module, entry)
        slots = (ctypes.c_void_p * (len(held) + 1))(*(ctypes.addressof(x) for x in (*held, count)))
        grid = (-(-n // 128), 1, 1)
        self.do("cuLaunchKernel", function, *grid, 128, 1, 1, 0, None, slots, None)
        size = ctypes.c_size_t(out.nbytes)
        self.do("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), held[-1], size)
        for p in held:
            self.do("cuMemFree_v2", p)
        return out


@pytest.mark.gpu
@pytest.mark.skipif(_driver() is None, reason="no NVIDIA GPU")
def test_on_the_gpu(nvidia: nvrtc.Nvrtc) -> None:
    cubin = nvidia.compile(cuda_text("f"), "math.cu", ["--gpu-architecture=sm_90"])[0]
    precise, fast = Gpu(cubin, "precise"), Gpu(cubin, "fast")
    x, wrong = numbers(), []
    a, b = pairs()
    with np.errstate(all="ignore"):
        for name, inputs in [*((n, (x,)) for n in UNARY), *((n, (a, b)) for n in BINARY)]:
            reference, limit = UNARY.get(name) or BINARY[name]
            try:
                want = reference(*map(double, inputs))
                check(name, precise(name, *inputs), want, ON_CUDA.get(name, limit), *inputs)
            except AssertionError as error:
                wrong.append(str(error))
        for name, low, high, limit in (
            ("sin", -1e5, 1e5, 2e-6), ("cos", -1e5, 1e5, 2e-6), ("log", 0.5, 2, 5e-7),
            ("log2", 0.5, 2, 5e-7),
        ):  # fmt: skip
            y = np.random.default_rng(4).uniform(low, high, 100_000).astype(f32)
            worst = np.abs(fast(name, y) - UNARY[name][0](double(y))).max()
            if worst > limit:
                wrong.append(f"fast {name}: absolute error {worst:.3g}")
        y = np.random.default_rng(5).uniform(-80, 80, 100_000).astype(f32)
        relative = np.abs(fast("exp", y) / np.exp(double(y)) - 1).max()
        if relative > 1e-5:
            wrong.append(f"fast exp: relative error {relative:.3g}")
        edges = np.array([-np.inf, np.inf, np.nan, 0], f32)
        assert np.array_equal(fast("exp", edges), [0, np.inf, np.nan, 1], equal_nan=True)
        assert np.array_equal(fast("log", edges)[1:], [np.inf, np.nan, -np.inf], equal_nan=True)
    assert not wrong, "\n".join(wrong)
