"""The device-independent header (types, functions, atomics, MLX's utilities) on the CPU.

Every expression of `include_cases` is compiled by each compiler there is and compared with NumPy.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from include_cases import (
    CASES,
    HEADERS,
    INCLUDE,
    NUMPY,
    Array,
    Case,
    bf16,
    check,
    expected,
    f16,
    f32,
    f64,
    from_bits,
    has_small,
    names_program,
    pointer,
    program,
    row,
    split_kind,
)

_SOURCE = "".join(f'#include "{name}"\n' for name in HEADERS)
_COMMON = ("-std=c++20", "-fsigned-char", "-w", "-nostdinc", "-I", str(INCLUDE))
_PLAIN = ("-O1", "-ffp-contract=off")
# As kernels are compiled; clang would contract across half's operations if told `fast`.
_NATIVE = ("-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
_NATIVE_GCC = (*_NATIVE, "-O2", "-ftree-vectorize", "-ffp-contract=fast")
_NATIVE_CLANG = (*_NATIVE, "-O1", "-ffp-contract=on")


def _compilers() -> list[str]:
    found = [shutil.which(name) for name in ("g++", "clang++", "clang++-14", "clang++-16")]
    return list({Path(path).resolve(): path for path in found if path}.values())


COMPILERS = _compilers()
# Without an instruction set of its own once: the integer conversions of half are the same text.
LIBRARIES = [
    (c, native) for k, c in enumerate(COMPILERS) for native in (False, True) if native or not k
]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no g++ or clang++ on this machine")
# The library is the same for every example.
many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def messages(compiler: str, text: str, folder: Path, *options: str) -> str:
    """What the compiler says of a text; "" when it accepts it."""
    source = folder / "text.cpp"
    source.write_text(_SOURCE + text)
    command = [compiler, *_COMMON, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def _label(value: tuple[str, bool]) -> str:
    return Path(value[0]).name + ("-native" if value[1] else "")


@pytest.fixture(scope="module", params=LIBRARIES, ids=_label)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """The cases and the loops of tests/native, compiled."""
    compiler, native = request.param
    # Test processes that run side by side share what one of them has built.
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    folder = shared / _label(request.param) if shared else tmp_path_factory.mktemp("lib")
    folder.mkdir(exist_ok=True)
    target = folder / "text.so"
    with FileLock(folder / "lock"):
        if not target.exists():
            # Compilers differ in the 16-bit floats; the rest is seen once plain and once native.
            keep = (lambda case: True) if compiler == COMPILERS[0] else has_small
            text = program(keep, "include_functions.h", "include_atomics.h")
            clang = "clang" in Path(compiler).name
            options = (_NATIVE_CLANG if clang else _NATIVE_GCC) if native else _PLAIN
            said = messages(compiler, text, folder, *options, "-shared", "-fPIC", "-o", str(target))
            assert not said, said[:4000]
    return ctypes.CDLL(str(target))


def call(library: ctypes.CDLL, name: str, *arguments: Array | int) -> None:
    getattr(library, name)(
        *(ctypes.c_int(a) if isinstance(a, int) else pointer(a) for a in arguments)
    )


def result(library: ctypes.CDLL, case: Case, inputs: list[Array], want: Array) -> Array:
    out = np.empty_like(want)
    call(library, f"case_{case.name}", *inputs, out, len(inputs[0]))
    return out


# ---- expressions ---------------------------------------------------------------------------------
@needs_compiler
def test_every_expression_agrees_with_numpy(library: ctypes.CDLL) -> None:
    present = [case for case in CASES.values() if hasattr(library, f"case_{case.name}")]
    assert len(present) > 100
    for case in present:
        inputs, want = row(case)
        check(case, result(library, case, inputs, want), inputs, want)


@needs_compiler
@many
@given(st.sampled_from([c for c in CASES.values() if has_small(c)]), st.data())
def test_any_bits_agree_with_numpy(library: ctypes.CDLL, case: Case, data: st.DataObject) -> None:
    inputs = []
    for kind in case.types:
        dtype, width = split_kind(kind)
        raw = data.draw(hnp.arrays(np.uint8, 4 * width * NUMPY[dtype].itemsize))
        inputs.append(from_bits(kind, raw.tobytes()))
    want = expected(case, inputs)
    check(case, result(library, case, inputs, want), inputs, want)


# ---- types and names, at compile time ------------------------------------------------------------
@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda c: Path(c).name)
def test_types_and_names(compiler: str, tmp_path: Path) -> None:
    assert not messages(compiler, names_program(), tmp_path, "-fsyntax-only")


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
    assert "error" in messages(COMPILERS[0], text, tmp_path, "-fsyntax-only")


@pytest.mark.parametrize("name", HEADERS)
def test_nothing_is_included(name: str) -> None:
    assert not re.findall(r"^\s*#\s*(?:include|import)", (INCLUDE / name).read_text(), re.M)


# ---- geometry and packing ------------------------------------------------------------------------
def _dot(x: Array, y: Array) -> Array:
    return np.sum(x * y, -1, keepdims=True)


def _unit(x: Array) -> Array:
    return x / np.sqrt(_dot(x, x))


@needs_compiler
def test_geometry(library: ctypes.CDLL) -> None:
    n = 200
    a, b = np.random.default_rng(1).normal(size=(2, n, 3)).astype(f32)
    got = np.empty((n, 24), f32)
    call(library, "geometry", a, b, got, n)
    u, v = a.astype(f64), b.astype(f64)
    w, i, eta = _unit(v), _unit(u), 0.7
    k = 1 - eta**2 * (1 - _dot(w, i) ** 2)
    bent = eta * i - (eta * _dot(w, i) + np.sqrt(np.maximum(k, 0))) * w
    h, g = a.astype(f16).astype(f64), b.astype(f16).astype(f64)
    want = [
        np.cross(u, v), u - 2 * _dot(w, u) * w, np.where(k < 0, 0, bent),
        np.where(_dot(w, v) < 0, u, -u), i, np.cross(h, g),
        _dot(u, v), np.sqrt(_dot(u, u)), np.sqrt(_dot(u - v, u - v)),
        _dot(u, u), _dot(u - v, u - v), _dot(h, g),
    ]  # fmt: skip
    wanted = np.concatenate(want, axis=1)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)  # some are rounded to half
    exact = np.r_[0:15, 18:23]
    np.testing.assert_allclose(got[:, exact], wanted[:, exact], rtol=1e-5, atol=1e-5)


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


# ---- atomics -------------------------------------------------------------------------------------
@needs_compiler
@pytest.mark.parametrize(
    "t", ["int", "uint", "int64_t", "uint64_t", "float", "half", "bfloat", "double", "uchar"]
)
def test_atomics_lose_nothing(library: ctypes.CDLL, t: str) -> None:
    """Four threads on the same six cells; sums stay exact in the narrowest type."""
    threads, n = 4, {"uchar": 12, "bfloat": 12, "half": 100}.get(t, 5000)
    dtype = NUMPY[t]
    values = np.random.default_rng(2).integers(1, 6, (threads, n)).astype(dtype)
    total = values.astype(f64).sum()
    cells = np.array([0, total, 0, 99, 0, 0]).astype(dtype)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda some: call(library, f"cells_{t}", cells, some, n), values))
    want = [total, 0, values.max(), values.min(), threads * n]
    assert cells[:5].astype(f64).tolist() == [float(np.array(w, dtype)) for w in want]
    assert cells[5] in values


@needs_compiler
def test_atomic_bits(library: ctypes.CDLL) -> None:
    values = np.random.default_rng(3).integers(0, 2**32, (4, 999), dtype=np.uint32) | 0x10
    cells = np.array([0xFFFFFFFF, 0, 0], np.uint32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda some: call(library, "cells_of_bits", cells, some, 999), values))
    flat = values.ravel()
    want = np.bitwise_and.reduce(flat), np.bitwise_or.reduce(~flat), np.bitwise_xor.reduce(flat)
    assert tuple(cells) == want


# ---- MLX's utilities -----------------------------------------------------------------------------
_strides = st.lists(st.integers(-7, 300), min_size=5, max_size=5)


@needs_compiler
@many
@given(st.lists(st.integers(1, 5), min_size=3, max_size=5), _strides, _strides)
def test_elements_have_their_places(
    library: ctypes.CDLL, shape: list[int], a: list[int], b: list[int]
) -> None:
    ndim, n = len(shape), int(np.prod(shape))
    s, r = np.array(a[:ndim], np.int64), np.abs(np.array(b[:ndim], np.int64))
    elements = np.arange(n, dtype=np.uint32)
    got = np.empty((n, 9), np.int64)
    call(library, "places", elements, np.array(shape, np.int32), s, r, got, n, ndim)
    index = np.stack(np.unravel_index(elements, shape), 1)
    x, y = index @ s, index @ r
    last = elements.astype(np.int64) * s[-1] + 2 * (index[:, -2:] @ s[-2:])
    last += elements // (shape[-1] * shape[-2]) * s[-3]
    # Of a uint's place and of places asked for as uint, 32 bits are left.
    low = x & 0xFFFFFFFF
    assert (got == np.stack([low, x, x, x, y, low, y, low, last], 1)).all()


@needs_compiler
@many
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_loopers_walk_as_division_does(
    library: ctypes.CDLL, shape: list[int], data: st.DataObject
) -> None:
    ndim, size = len(shape), int(np.prod(shape))
    steps: list[int] = []
    at = [0]
    while at[-1] < size:
        steps.append(data.draw(st.integers(1, 9)))
        at.append(at[-1] + steps[-1])
    at.pop()
    s = np.array(data.draw(_strides)[:ndim], np.int64)
    n = len(steps)
    got = np.zeros((5, n), np.int64)
    call(library, "loopers", np.array(shape, np.int32), s, np.array(steps, np.int32), got, n, ndim)
    want = np.stack(np.unravel_index(at, shape), 1) @ s
    assert (got[:3] == want).all()
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
    truths = less + 2 * ~less + 4 + 1j * (1 + 2 * (a != b))
    log = np.log1p(a.astype(np.complex128))
    want = [a + b, a - b, a * b, a / b, f + a, a - f, f * a, f / a, -a, 2 * (a + b), truths, log]
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=2e-5, atol=1e-6)

    whole = (rng.integers(-20, 20, (2, n, 2)) + 0.5).astype(f32)
    rest = np.empty((n, 2), f32)
    call(library, "rests", whole[0], whole[1], rest, n)
    np.testing.assert_array_equal(rest, np.mod(whole[0], whole[1]))


@needs_compiler
def test_small_mlx_functions(library: ctypes.CDLL) -> None:
    special = [0, -0.5, -0.999, np.inf, -1, 1e-45]
    x = np.concatenate([np.geomspace(1e-30, 3e38, 999), special]).astype(f32)
    n = len(x)
    got = np.empty_like(x)
    call(library, "logs", x, got, n)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got, np.log1p(x.astype(f64)), rtol=1e-6)
    h = np.resize(np.array([0, -0.0, 1, np.nan, np.inf, 6e-8], f16), n)
    b = np.resize(np.array([0, -0.0, 1, np.nan, np.inf, 1e-39], bf16), n)
    truth = np.empty(n, np.uint8)
    call(library, "truths", x, h, b, truth, n)
    assert (truth == (x != 0) + 2 * (h != 0) + 4 * (b != 0) + 8).all()
