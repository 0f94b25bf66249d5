"""Accesses outside of arrays in Metal bodies on CUDA: loads give zero, stores are dropped.

What is written into a body, and what that gives: on the CPU, where the CUDA text is carried out
(`warps`), and on a GPU, where an access outside of memory would end the process's CUDA.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
import guarded
import warps
from ferrule.devices.cuda import build as cuda_build
from ferrule.source import cpp
from ferrule.source.cuda import bounds
from ferrule.source.cuda import text as cuda_text
from ferrule.source.cuda.launch import UNGUARDED, Form
from ferrule.spec import Input, Spec, extent
from ferrule.tools import nvrtc, toolchain

Array = np.ndarray[Any, Any]
F32 = ferrule.float32
RUNTIME = Path(ferrule.__file__).parent / "runtime"


def prepared(source: str, **kernel: Any) -> cpp.Prepared:
    """A body with the arrays x, w and y, and an integer n by value."""
    template = kernel.pop("template", ())
    made = ferrule.metal_kernel("k", ["x", "w", "n"], ["y"], source, **kernel)
    inputs = Input(F32, 2), Input(F32, 1), Input(ferrule.int32, 0, value=True)
    return cpp.prepare(Spec(made.kernel, inputs, (F32,), template))


def bounded(source: str, **kernel: Any) -> bounds.Bounded:
    """What becomes of a body."""
    p = prepared(source, **kernel)
    return bounds.bounded(p, p.text.source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y[0] = x[i];", "fr_b_y.fr_put(0) = fr_b_x.fr_load(i);"),
        ("y[x[i]] += x[w[i]];", "fr_b_y.fr_put(fr_b_x.fr_load(i)) += fr_b_x.fr_load(fr_b_w.fr_load(i));"),  # noqa: E501
        ("y[i]++; --y[i];", "fr_b_y.fr_put(i)++; --fr_b_y.fr_put(i);"),
        ("*y = *x + *(x + i);", "fr_b_y.fr_put(0) = fr_b_x.fr_load(0) + fr_b_x.fr_load(i);"),
        ("(y[i]) = (x[i]);", "(fr_b_y.fr_put(i)) = (fr_b_x.fr_load(i));"),
        ("float a = y[i] + x[i];", "float a = fr_b_y.fr_load(i) + fr_b_x.fr_load(i);"),
        ("if (i < n) y[i] = x[i];", "if (i < n) fr_b_y.fr_put(i) = fr_b_x.fr_read(i);"),
        ("y[i] = i < n ? x[i] : w[i];", "fr_b_y.fr_put(i) = i < n ? fr_b_x.fr_read(i) : fr_b_w.fr_read(i);"),  # noqa: E501
        ("y[i] = float(x[i] > 0 && w[i] > 0);", "fr_b_y.fr_put(i) = float(fr_b_x.fr_load(i) > 0 && fr_b_w.fr_read(i) > 0);"),  # noqa: E501
        # What keeps an address, moves the parameter or is not evaluated stays as it is.
        ("auto q = &x[i]; y[i] = q[1];", "auto q = &x[i]; fr_b_y.fr_put(i) = q[1];"),
        ("auto q = x + i; y[i] = q[1];", "auto q = x + i; fr_b_y.fr_put(i) = q[1];"),
        ("x += i; y[i] = x[1];", "x += i; fr_b_y.fr_put(i) = x[1];"),
        ("y[i] = *x++;", "fr_b_y.fr_put(i) = *x++;"),
        ("thread auto& q = x; y[i] = x[i];", " auto& q = x; fr_b_y.fr_put(i) = x[i];"),
        ("device float& r = y[i]; r = x[i];", " float& r = y[i]; r = fr_b_x.fr_load(i);"),
        ("y[i] = sizeof(x[i]) + x[i];", "fr_b_y.fr_put(i) = sizeof(x[i]) + fr_b_x.fr_load(i);"),
        ("decltype(x[i]) v = x[i];", "decltype(x[i]) v = fr_b_x.fr_load(i);"),
        ("y[i] = ((const device float4*)x)[i].x;", "fr_b_y.fr_put(i) = ((const  float4*)x)[i].x;"),
        ("auto f = [v = x[i], &w = y[i]] { return v; };", "auto f = [v = fr_b_x.fr_load(i), &w = y[i], fr_b_x] { return v; };"),  # noqa: E501
        # What would read as a function's declaration, and as a template's call.
        ("float v(x[i]);", "float v((fr_b_x.fr_load(i)));"),
        ("float2 v(x[i], w[x[i]]), u(n, n);", "float2 v((fr_b_x.fr_load(i)), (fr_b_w.fr_load(fr_b_x.fr_load(i)))), u(n, n);"),  # noqa: E501
        ("bool b = n < x[i] && i > (n);", "bool b = (n) < fr_b_x.fr_load(i) && i > (n);"),
        ("bool b = n < *(x + i) + x[i] || i > (n);", "bool b = (n) < fr_b_x.fr_load(i) + fr_b_x.fr_load(i) || i > (n);"),  # noqa: E501
        ("y[i] = metal::n < x[i] ? 1 : 2 >> (3);", "fr_b_y.fr_put(i) = (metal::n) < fr_b_x.fr_load(i) ? 1 : ::fr::fr_bits(2) >> (3);"),  # noqa: E501
        ("y[i] = metal::max(n < x[i], i > (n));", "fr_b_y.fr_put(i) = metal::max((n) < fr_b_x.fr_load(i), i > (n));"),  # noqa: E501
        ("y[i] = as_type<decltype(x[i])>(w[i]);", "fr_b_y.fr_put(i) = as_type<decltype(x[i])>(fr_b_w.fr_load(i));"),  # noqa: E501
        # Names that mean something else where they stand.
        ("{ float x[4]; y[i] = x[i]; } y[i] = x[i];", "{ float x[4]; fr_b_y.fr_put(i) = x[i]; } fr_b_y.fr_put(i) = fr_b_x.fr_load(i);"),  # noqa: E501
        ("for (const device float* x = w; n;) y[i] = x[i];", "for (const  float* x = w; n;) fr_b_y.fr_put(i) = x[i];"),  # noqa: E501
        ("auto f = [&](thread float* x) { return x[i]; }; y[i] = x[i];", "auto f = [&]( float* x) { return x[i]; }; fr_b_y.fr_put(i) = fr_b_x.fr_load(i);"),  # noqa: E501
        ("auto f = [=](int k) { return x[k]; }; y[i] = f(i);", "auto f = [=](int k) { return fr_b_x.fr_load(k); }; fr_b_y.fr_put(i) = f(i);"),  # noqa: E501
        ("auto f = [x, n](int k) { return x[k]; };", "auto f = [x, n, fr_b_x](int k) { return fr_b_x.fr_load(k); };"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_written(source: str, expected: str) -> None:
    found = bounded(f"int i = -n; {source}")
    assert re.sub(r" +", " ", found.source) == re.sub(r" +", " ", f"int i = -n; {expected}")


def test_lines_stay_where_they_are() -> None:
    p = prepared("y[\n  1 - n\n] = x\n[2 - n * n] +\n*(x +\nn - 3);")
    found = bounds.bounded(p, p.text.source)
    assert found.source.count("\n") == 5
    # (x + n) - 3 is another pointer.
    assert guarded.counts(p, found) == guarded.Counts(guarded=2, derived=1)


def test_atomics() -> None:
    call = "atomic_fetch_add_explicit({}, 1.0f, memory_order_relaxed);"
    for first, expected in (
        ("&y[-n]", "fr_b_y.fr_cell(-n)"), ("&(y[-n])", "fr_b_y.fr_cell(-n)"),
        ("y + n - 1", "y + n - 1"), ("y + (-n)", "fr_b_y.fr_cell((-n))"),
        ("y", "fr_u_y.fr_cell(0)"), ("(device atomic_float*)&y[-n]", "( atomic_float*)&y[-n]"),
    ):  # fmt: skip
        found = bounded(call.format(first), atomic_outputs=True)
        assert re.sub(r" +", " ", found.source) == call.format(expected), first


def test_macros_are_looked_into() -> None:
    found = bounded("#define AT(k) x[-(k)]\ny[-n] = AT(2);")
    assert "fr_b_x.fr_load" in found.source
    for condition, seen in (("1", True), ("__cplusplus", False)):
        found = bounded(f"#if {condition}\n#define AT(k) x[-(k)]\n#endif\ny[-n] = AT(2);")
        assert ("fr_b_x" in found.source) == seen
        assert "fr_b_y" in found.source


# -- what one comparison stands for ----------------------------------------------------------------

ROW = "uint i = thread_position_in_grid.x; "


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("y[i] = x[i];", ["i", "i"]),
        ("if (uint(i) < n) y[uint(i)] = x[x_shape[0] - 1];", ["uint(i)", "x_shape[0] - 1"]),
        ("y[i] = x[i + 1] + x[3];", ["i", "i + 1", "3"]),
        ("for (uint k = 0; k < 4; ++k) y[4 * i + k] = x[4 * i + k] * w[n - 1];",
         ["4 * i + k", "4 * i + k", "n - 1"]),
        ("for (int k = i; k < n; k += 256) y[k] = x[k];", ["k"] * 2),
        ("for (int k = 0; k <= n; k++) y[i * x_shape[1] + k] = 1;", ["i * x_shape[1] + k"]),
        ("const uint2 p = thread_position_in_grid.xy; y[p.y] = x[p.x];", ["p.y", "p.x"]),
        ("y[i % 8 + (i << 2)] = x[metal::min(i, 7u)];", ["i % 8 + (i << 2)", "metal::min(i, 7u)"]),
        ("y[N * i] = w[uint(i)];", ["N * i", "uint(i)"]),
        ("y[i / 2] = 1;", ["i / 2"]), ("y[i / n] = x[i % n];", []),
        ("for (int k = 0; k < 4; ++k) y[i / n * 4 + k] = x[i % n];", ["i / n * 4 + k", "i % n"]),
        ("for (int k = 0; k < 4; ++k) y[n - 1] = x[n / 2 - 1];", ["n - 1", "n / 2 - 1"]),
        ("float v(x[i]); for (int k = 0; k < n; ++k) y[k] = v;", ["i))", "k"]),
        # By the author's conditions.
        ("int k = x[i]; if (k >= 0 && k < n) y[k] = 1;", ["i", "k"]),
        ("int k = x[i]; y[0 <= k && k <= n - 1 ? k : 0] = 1;",
         ["i", "0 <= k && k <= n - 1 ? k : 0"]),
        ("int k = x[i]; if (n > k && k > -1) y[i] = x[k];", ["i", "i", "k"]),
        ("int k = x[i]; n > k && k > -1 ? y[k] = 1 : 0;", ["i", "k"]),
        ("int k = x[i]; bool b = k >= 0 && k < n && (y[k] = 1);", ["i", "k"]),
        ("int k = x[i]; if (k < 0 || k >= n) return; y[k] = 1;", ["i", "k"]),
        ("int k = x[i]; if (!(k >= 0) || !(k < n)) { return; } y[k] = 1;", ["i", "k"]),
        ("uint k = x[i]; if (k < n) { int m = 2 * k; y[m + 1] = 1; }", ["i", "m + 1"]),
        ("uint k = x[i]; if (k >= n) y[0] = 0; else y[k] = 1;", ["i", "0", "k"]),
        ("uint k = x[i]; while (k < n) { y[k] = 1; break; }", ["i", "k"]),
        ("int m = x[i]; int k = metal::clamp(m, 0, n - 1); y[k] = 1;", ["i", "k"]),
        ("int k = x[i]; y[metal::clamp(k - 1, 0, n)] = 1;", ["i", "metal::clamp(k - 1, 0, n)"]),
        ("int k = x[i]; { if (k < 0 || k >= n) return; } y[k] = 1;", ["i", "k"]),
        ("int k = x[i]; if (uint(k) < uint(n)) y[k] = 1;", ["i", "k"]),
        ("int k = i; if (k < x_shape[0]) y[x_shape[0] - 1 - k] = 1;", ["x_shape[0] - 1 - k"]),
        ("if (i > 0) y[i - 1] = 1;", ["i - 1"]),
        ("int k = x[i]; if (k < 0) k = 0; if (k >= n) k = n - 1; y[k] = 1;", ["i", "k"]),
        ("int k = i; k = k > n ? n : k; for (int q = 0; q < 4; ++q) y[k] = 1;", ["k"]),
        # It is written on the way, which is followed.
        ("i = n; y[i] = 1;", ["i"]), ("uint k = 0; while (k < n) y[k++] = 1;", ["k++"]),
        ("int k = x[i]; if (k >= 0 && k < n) { k = 99; y[k] = 1; }", ["i", "k"]),
        ("auto f = [&](thread uint& k) { k = n; }; f(i); y[i] = 1;", ["i"]),
        ("\n#define MOVE i = n\nMOVE; y[i] = 1;", ["i"]),
        ("uint2 p = thread_position_in_grid.yx; y[p.x] = 1;", ["p.x"]),
        ("thread uint& r = i; r = n; y[i] = 1;", ["i"]),
        ("auto f = [&]() { i = n; }; f(); y[i] = 1;", ["i"]),
        ("\n#if N\ni = 99;\n#endif\ny[i] = 1;", ["i"]),  # N is no macro
        # Not shown: it may be negative, or nothing limits it.
        ("int k = x[i]; if (k < n) y[k] = 1;", []),
        ("int k = x[i]; if (k >= 0) y[k] = 1;", []),
        ("int k = x[i]; if (k >= 0 || k < n) y[k] = 1;", []),
        ("int k = x[i]; if (k < 0 && k >= n) return; y[k] = 1;", []),
        ("int k = x[i]; if (k < 0 || k >= n) n = 1; y[k] = 1;", []),
        ("int k = x[i]; if (k >= 0 && k < n) { y[0] = 1; } else y[k] = 1;", []),
        ("int k = x[i]; { int k = 0; if (k < 0 || k >= n) return; } y[k] = 1;", []),
        ("float k = x[i]; if (k >= 0 && k < n) y[int(k)] = 1;", []),
        ("float k = x[i]; y[int(metal::clamp(k, 0, n))] = 1;", []),
        ("int k = x[i]; switch (n) { if (k < 0 || k >= n) break; case 1: y[k] = 1; }", []),
        ("int k = x[i]; switch (n) { case 0: if (k < 0 || k >= n) return; case 1: y[k] = 1; }", []),
        ("int k = x[i]; if (k >= 0 && k < n) switch (n) { case 1: y[k] = 1; }", []),
        ("int k = x[i]; switch (n) { case 0: if (k >= 0 && k < n) { case 1: y[k] = 1; } }", []),
        ("int k = x[i]; if (k < 0) goto a; if (k >= n) return; a: y[k] = 1;", []),
        ("int k = x[i]; if (k >= 0 && k < x[0]) y[k] = 1;", []),
        ("y[i] = x[i - 1];", []), ("y[M] = 1;", []), ("y[-1] = 1;", []),
        ("for (int k = -1; k < 4; ++k) y[k] = 1;", []),
        ("for (int k = 0; k < 4; ++k) { y[k] = 1; k -= 2; }", []),
        ("for (int k = 3; k >= 0; --k) y[k] = 1;", []),
        ("for (int k = 0; k < 4; k -= 1) y[k] = 1;", []),
        ("float k = i; y[int(k)] = 1;", []), ("short k = i; y[k] = 1;", []),
        ("uint2 p = thread_position_in_grid.xy; p.yx = p.xy * 5; y[p.x] = 1;", []),
        ("uint n = x_strides[0]; y[n] = 1;", []),
    ],
)  # fmt: skip
def test_what_is_shown_once_for_all(source: str, shown: list[str]) -> None:
    p = prepared(ROW + source, template=(("N", 3), ("M", -1)))
    found = bounds.bounded(p, p.text.source)
    places = re.findall(r"fr_u_\w+\.fr_\w+\((.*?)\)(?= [-+*=]|;)", found.source)
    assert places == shown
    assert bool(found.fits) == bool(shown) == bool(guarded.counts(p, found).shown)


LOOP_4 = "for (int q = 0; q < 4; ++q) "
ADD = f"float s = 0; {LOOP_4}s += x[k]; y[i] = s;"


# Each changes what the index is in a way of its own.
HIDING = [
    ("void f(thread uint& k) { k = 30; } void f(float v) {}", "uint k = i; f(k); " + ADD),
    ("struct S { void go(thread uint& k) { k = 9; } };", "S t; uint k = i; t.go(k); " + ADD),
    ("struct R { thread uint& r; };", "uint k = i; R r = {k}; r.r = 99; " + ADD),
    ("struct R { thread uint& r; };", "uint k = i; auto r = R{k}; r.r = 99; " + ADD),
    ("struct R { thread uint& r; };", "uint k = i; R r(k); r.r = 99; " + ADD),
    ("struct Add { void operator()(thread uint& k) const { k = 9; } };",
     "uint k = i; Add()(k); " + ADD),
    ("struct R {}; void operator<<(R, thread uint& k) { k = 9; }",
     "uint k = i; R() << k; " + ADD),
    ("", "uint k = i; thread uint& r(k); r = 99; " + ADD),
    ("", "uint k = i; thread uint& r{k}; r = 99; " + ADD),
    ("", "uint k = i, j = i; thread uint& r = n ? k : j; r = 99; " + ADD),
    ("", "uint k = i; decltype((k)) r = k; r = 99; " + ADD),
    ("", "uint k = i, j = i; (n ? k : j) = 99; " + ADD),
    ("", "uint k = i, j = i; ++(n ? k : j); " + ADD),
    ("", "uint k = i, j = i; (j, k) = 9; " + ADD),
    ("", "uint k = i; ((thread uint&)k) = 99; " + ADD),
    ("", "uint k = i; static_cast<thread uint&>(k) = 99; " + ADD),
    ("", "uint k = i; auto f = [&r = k]() { r = 99; }; f(); " + ADD),
    ("", "uint k = i; auto r = [&]() -> thread uint& { return k; }; r() = 99; " + ADD),
    ("void f(thread uint& k) { k = 30; }", "uint k = i; (f)(k); " + ADD),
    ("template <class T> void f(T k) { k = 9; }", "uint k = i; f<thread uint&>(k); " + ADD),
    ("using R = thread uint&; void f(R k) { k = 9; }", "uint k = i; f(k); " + ADD),
    ("", "int k = x[i]; if (k >= 0u && k < n) { " + ADD + " }"),
    ("", "int k = x[i]; switch (n) { case 0: { if (k < 0 || k >= n) return; { case 1: ; } "
     + ADD + " } }"),
    ("", "uint k = x[i]; switch (n) { case 0: if (k < n) { { case 1: ; } " + ADD + " } }"),
    ("", "enum { n = 99 }; int k = n; " + ADD),
    ("", "int k = 0; { int (n) = 99; k = n; } int l = n; " + ADD),
    ("", "using uint = int; uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("constant float K = 2.7f; int g() { int K = 1; return K; }", "int k = int(K * 2); " + ADD),
    ("", "uint k; if (k < n) { " + ADD + " }"),
    ("", "ulong k = 4294967296ul; " + ADD),
    ("", "uint k = i; uint(k) = 9; " + ADD),
    ("", "uint k = i; { uint (((k))) = 9; " + ADD + " }"),
    ("", "uint k = i; { metal::uint(k) = 9; " + ADD + " }"),
    ("", "uint k = i; { metal::uint32_t(k) = 9; " + ADD + " }"),
    ("", "uint k = i; { uint(k)(9); " + ADD + " }"),
    ("", "uint k = i; { uint(k){9}; " + ADD + " }"),
    ("", "uint k = i; { uint(k), m = 9; " + ADD + " }"),
    ("", "uint k = i; { \n#pragma unroll\nuint(k) = 9; " + ADD + " }"),
    ("", "uint k = i; switch (n) { default: uint(k) = 9; " + ADD + " }"),
    ("", "uint k = i; if (uint(k) = 9; true) { " + ADD + " }"),
    ("", "uint k = i; if (uint(k) = 9) { " + ADD + " }"),
    ("", "float s = 0; uint k = i; for (uint(k) = 9, q = 0; q < 3; ++q) s += x[k];"),
    ("", "x_shape += 1; int k = x_shape[0] - 1; " + ADD),
    ("", "auto& p = x_shape; p += 1; int k = x_shape[0] - 1; " + ADD),
    # What a header hides.
    ("struct V { V(thread uint& k) { k = 9; } }; void f(V v) {}", "uint k = i; f(k); " + ADD),
    ("struct V { V(thread uint& k) { k = 9; } };",
     "uint k = i; auto f = [](V v) {}; f(k); " + ADD),
    ("struct V { uint v; V() {} V(thread uint& k) { k = 9; } };",
     "uint k = i; V v; v = k; " + ADD),
    ("void f(uint a, decltype((a)) k) { k = 9; }", "uint k = i; f(0, k); " + ADD),
    ("void f(metal::add_lvalue_reference_t<thread uint> k) { k = 9; }",
     "uint k = i; f(k); " + ADD),
    ("int (min)(int a, int b) { return a + b; }", "int k = min(n, 3); " + ADD),
    ("void (f)(thread uint& k) { k = 9; }", "uint k = i; f(k); " + ADD),
    ("#define U uint\nusing U = int;", "uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("#define U uint\ntypedef int U;", "uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("typedef int uint __attribute__((unused));", "uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("using uint __attribute__((unused)) = int;", "uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("#if 1\n#define SUM(f) int f(int a, int b) { return a + b; }\n#endif\nSUM(min);",
     "int k = min(n, 3); " + ADD),
    ("#define DEF(p) void p##_go(thread uint& k) { k = 9; }\nDEF(my)",
     "uint k = i; my_go(k); " + ADD),
    ("namespace q { int min(int a, int b) { return a + b; } }",
     "using q::min; int k = min(n, 3); " + ADD),
    ("typedef int uint, sint;", "uint k = x[i]; if (k < n) { " + ADD + " }"),
    ("", "uint k = i; thread uint bitand r = k; r = 99; " + ADD),
    ("#define REF thread uint& \\\n __restrict\nvoid f(REF k) { k = 9; }",
     "uint k = i; f(k); " + ADD),
    ("", "for (int k = 0, c = 0; c < 6; ++c, k += 1073741823) if (k < n) s += x[k];"),
    ("", "for (int k = 0; k < n; k += 1073741824, k += 1073741824) y[k] = x[k];"),
    ("", "float v = x[0]; for (int k = 0; k < n; ++k, v = x[k]) y[k] = v;"),
    ("", "for (int k = 0; k < n; k -= 1) y[k] = x[k];"),
    ("", "uint2 v = uint2(i); thread uint& r = v.x; r = 99; uint k = v.x; " + ADD),
    ("struct S { thread float* p; void go() { *p = 9; } };",
     "uint k = i; S t{(thread float*)&k}; t.go(); " + ADD),
    ("template <class F> struct S { F f; void go() { f(); } };",
     "uint k = i; auto g = [&]() { k = 99; }; S<decltype(g)> t{g}; t.go(); " + ADD),
    ("", "uint k; for (int q = 0; q < 3; ++q) { if (k < n) y[i] += x[k]; k = q; }"),
    ("", "uint k; if (n) k = 1; if (k < n) { " + ADD + " }"),
    ("", "uint k = i; int e = 99; float f = frexp(x[0], e); k = e; " + ADD),
    ("", "uint k = i; for (int q = 0; q < 3; ++q) { int e = 0; k = 99; frexp(x[0], e); } " + ADD),
    ("void go(thread uint& k) { k = 99; }", "uint k = i; auto f = go; f(k); " + ADD),
    ("", "uint k = i; [=]() mutable { k = 0; }(); k += 20; " + ADD),
    ("", "uint k = 99; auto g = [=]() mutable { k = 0; }; g(); " + ADD),
    ("namespace q { int min(int a, int b) { return 0; } }", "int k = min(n, 99); " + ADD),
    ("inline int min(float a, float b) { return 0; }", "int k = min(n, 99); " + ADD),
    ("template <class F> void twice(F f) { f(); f(); }",
     "uint k = i; auto g = [&r = k]() { r = 99; }; twice(g); " + ADD),
]  # fmt: skip


@pytest.mark.parametrize(("header", "source"), HIDING)
def test_what_is_not_shown(header: str, source: str) -> None:
    kernel = ferrule.metal_kernel("k", ["x", "w", "n"], ["y"], ROW + source, header=header)
    inputs = Input(F32, 2), Input(F32, 1), Input(ferrule.int32, 0, value=True)
    p = cpp.prepare(Spec(kernel.kernel, inputs, (F32,), ()))
    found = bounds.bounded(p, p.text.source)
    assert "fr_u_x.fr_load(k)" not in found.source
    assert "fr_u_x.fr_read(k)" not in found.source


# The same, followed: what is shown is so.
FOLLOWED = [
    ("", "uint k = i; [](thread uint& a) { a = 99; }(k); " + ADD),
    ("constexpr auto f = [](thread uint& k) { k = 9; };", "uint k = i; f(k); " + ADD),
    ("#define INOUT thread uint&\nvoid f(INOUT k) { k = 9; }", "uint k = i; f(k); " + ADD),
    ("", "auto min = [](int a, int b) { return a + b; }; int k = min(n, 5); " + ADD),
    ("constexpr auto min = [](int a, int b) { return a + b; };",
     "int k = min(n, 5); " + ADD),
    ("", "{ int k = n, n = 0; " + ADD + " }"),
    ("", "auto ulong = [](int v) { return v + 9; }; int k = ulong(i); " + ADD),
    ("int ulong(int v) { return v + 9; }", "int k = ulong(i); " + ADD),
    ("void f(\n#ifdef NO\nuint k\n#else\nthread uint& k\n#endif\n) { k = 9; }",
     "uint k = i; f(k); " + ADD),
    ("", "for (auto k = n; k < 200; ++k) y[k] = x[k];"),
    ("template <class F> void twice(F f) { f(); f(); }",
     "uint k = i; auto g = [&]() { k += 20; }; twice(g); " + ADD),
    ("", "int k = 20; y[i] = 0; for (int q = 0; q < 3; ++q) y[i] += x[k] * float(k = 3 * q);"),
    ("", "uint k = i; thread uint* p = &k; *p = 99; " + ADD),
    ("void go(thread uint* p) { *p = 99; }", "uint k = i; go(&k); " + ADD),
    ("inline int go(int v) { if (v < 3) return 99; return v; }", "int k = go(i); " + ADD),
    ("", "int k = 0; for (int q = 0; q < 3; ++q, k = 20 * q) s0 += x[k]; ".replace("s0", "y[i]")),
]  # fmt: skip


@pytest.mark.parametrize(("header", "source"), FOLLOWED)
def test_what_is_followed(header: str, source: str) -> None:
    """Beside the array there is what would be seen in the sums."""
    kernel = ferrule.metal_kernel("k", ["x", "w", "n"], ["y"], ROW + source, header=header)
    inputs = Input(F32, 2), Input(F32, 1), Input(ferrule.int32, 0, value=True)
    p = cpp.prepare(Spec(kernel.kernel, inputs, (F32,), ()))
    assert "fr_u_x.fr_load(k)" in bounds.bounded(p, p.text.source).source
    around = np.full(512, 1e6, np.float32)
    for n, size in itertools.product((0, 3, 90), (4, 256)):
        around[32 : 32 + size] = 1
        x = around[32 : 32 + size].reshape(2, -1)
        out = carried_out(kernel, [x, around[:4], n], (256,), threads=3, init_value=0)
        assert (out < 1e6).all(), (n, size)


PLAIN = """
#define ROWS 4
#define ACCUMULATED float
#define AT(a, k) ((a)[k])
using Pair = float2;
typedef uint Place;
typedef unsigned int word;
struct State { float sum; uint count; float mean() const { return sum / float(count); } };
constant uint WIDTH = 8;
template <typename T, int N = 4> METAL_FUNC T first(T a, T b) { return a < b ? a : b; }
inline void add(thread float& s, float v) { s += v; };
namespace own { float twice(float v); }
#define LAST 3"""


def test_a_plain_header_hides_nothing() -> None:
    found = bounded(
        ROW + "uint k = first(i, 3u); add(y[i], 1); " + LOOP_4 + "y[i] += x[i + q];", header=PLAIN
    )
    assert "fr_u_x.fr_load(i + q)" in found.source


MOVES = [
    ("struct S { void go(const device float* thread& p) { p += 4; } };", "S t; t.go(x);"),
    ("", "[](const device float* thread& p) { p += 4; }(x);"),
    ("void f(const device float* thread& p) { p += 4; } void f(float v) {}", "f(x);"),
    ("", "(n == 0 ? x : w) += 4;"),
    ("", "x += 4;"),
    ("", "auto& r = n ? x : w; r += 4;"),
    # Macros that are not expanded.
    ("", "\n#if 1\n#define GO(p) p += 4\n#endif\nGO(x);"),
    ("", "\n#define GO(p, q) p##q += 4\nGO(x, );"),
]


@pytest.mark.parametrize(("header", "source"), MOVES)
def test_an_array_that_the_body_moves_is_left_as_it_is(header: str, source: str) -> None:
    kernel = ferrule.metal_kernel(
        "k", ["x", "w", "n"], ["y"], f"{ROW}{source} y[i] = x[0];", header=header
    )
    inputs = Input(F32, 2), Input(F32, 1), Input(ferrule.int32, 0, value=True)
    p = cpp.prepare(Spec(kernel.kernel, inputs, (F32,), ()))
    assert "= x[0];" in bounds.bounded(p, p.text.source).source


@pytest.mark.parametrize(
    "source",
    [
        "y[i * y_shape[0]] = 1;",
        "case 0: y[i] = 1;",
        f"y[i] = x[{' + '.join(['i'] * 1500)}];",
        "int a0 = i; " + " ".join(f"int a{k} = a{k - 1} + a{k - 1};" for k in range(1, 25))
        + " y[a24] = 1;",
        "uint a = x[0], b = x[1]; " + "if (a >= b) return; if (b >= a) return; " * 60
        + "y[i] = x[a];",
    ],
    ids=["shape", "case", "long", "doubled", "conditions"],
)  # fmt: skip
def test_any_body_is_understood_or_left(source: str) -> None:
    found = bounded("uint i = thread_position_in_grid.x; " + source)
    assert len(found.fits) < 100_000
    assert "fr_b_y" in found.source or "fr_u_y" in found.source


@pytest.mark.parametrize(
    ("source", "n", "m", "size"),
    [
        ("x[n - n % m]", 6, 4, 4),
        ("x[n / (n % m)]", 9, 8, 8),
        ("for (int k = n - 3; k < n; ++k) s += x[k];", 2, 0, 4),
        ("for (int k = n; k < 4; ++k) s += x[k];", -3, 0, 4),
        ("for (int k = metal::clamp(m, 0, n - 1); k < 4; ++k) s += x[k];", 0, 2, 4),
        ("for (int k = 2, c = 0; k < 4; k += n) { s += x[k]; if (++c == 4) break; }", -1, 0, 4),
        ("for (int k = 3, c = 0; k < 4; k += 4294967295u) { s += x[k]; if (++c == 5) break; }",
         0, 0, 4),
        ("for (int k = 9, c = 0; k < 10; k += n) { s += x[k]; if (++c == 2) break; }",
         2**31 - 9, 0, 10),
        ("for (int k = 0; k <= n; ++k) { s += x[k]; if (k == 4) break; }", 4, 0, 4),
        ("for (int k = 1 - 3; k < n; ++k) s += x[k];", 4, 0, 4),
        ("for (int k = N - 4; k < n; ++k) s += x[k];", 4, 0, 4),
    ],
)  # fmt: skip
def test_what_is_shown_is_so(source: str, n: int, m: int, size: int) -> None:
    """Beside the array there is what would be seen in the sum."""
    if not source.startswith("for"):
        source = f"{LOOP_4}s += {source};"
    kernel = ferrule.metal_kernel(
        "shown", ["x", "n", "m"], ["y"], f"{ROW} float s = 0; {source} y[i] = s;"
    )
    around = np.full(64, 1e6, np.float32)
    around[32 : 32 + size] = 1
    (out,) = carried_out(
        kernel, [around[32 : 32 + size], n, m], (1,), threads=1, template=[("N", 3)]
    )
    assert out < 1e6


# -- what that gives -------------------------------------------------------------------------------

KINDS = {
    "int": np.int32, "uint": np.uint32, "int64_t": np.int64, "uint64_t": np.uint64,
    "short": np.int16, "ushort": np.uint16,
}  # fmt: skip


def carried_out(
    kernel: Any, inputs: list[Any], shape: tuple[int, ...], dtype: Any = np.float32, **call: Any
) -> Array:
    threads = call.pop("threads", 40)
    outputs, _, _ = warps.launch(
        kernel, inputs, grid=(threads, 1, 1), threadgroup=(min(threads, 32), 1, 1),
        output_shapes=[shape], output_dtypes=[dtype], **call,
    )  # fmt: skip
    return outputs[0]


INDIRECT = {
    kind: ferrule.metal_kernel(
        f"indirect_{kind}", ["x", "at", "to"], ["y"],
        f"uint i = thread_position_in_grid.x; {kind} from = at[i]; {kind} into = to[i];"
        " y[into] = x[from] + (i % 2 ? x[from] : 0);",
    )
    for kind in KINDS
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_index_of_any_type(data: st.DataObject) -> None:
    """Indices from the whole range of their types, against the same in NumPy."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    limits = np.iinfo(KINDS[kind])
    near = st.integers(max(-9, limits.min), 15)
    ends = st.sampled_from([limits.min, limits.max, limits.max - 1, limits.max // 2 + 1])
    size = data.draw(st.integers(0, 9))
    at = data.draw(st.lists(near | ends, min_size=12, max_size=12))
    to = data.draw(st.permutations(range(12)))
    x = np.arange(1, size + 1, dtype=np.float32)
    out = carried_out(
        INDIRECT[kind], [x, np.array(at, KINDS[kind]), np.array(to, KINDS[kind])], (7,),
        threads=12, init_value=-1,
    )  # fmt: skip
    expected = np.full(7, -1, np.float32)
    for i, (source, target) in enumerate(zip(at, to, strict=True)):
        if target < 7:
            expected[target] = (1 + i % 2) * (x[source] if 0 <= source < size else 0)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50))
def test_with_one_comparison_or_with_many(have: int, room: int) -> None:
    """The same body, where all accesses are inside and where some are not."""
    x = np.arange(1, have + 1, dtype=np.float32)
    out = carried_out(LOOP, [x], (room,), init_value=-1, threads=10)
    expected = np.full(room, -1, np.float32)
    value = np.zeros(40, np.float32)
    value[: min(have, 40)] = x[:40]
    expected[:40] = value[: min(room, 40)]
    np.testing.assert_array_equal(out, expected)


SIZE = st.integers(1, 5)


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZE, SIZE, SIZE, st.integers(0, 40))
def test_what_sizes_and_conditions_promise(
    data: st.DataObject, height: int, width: int, channels: int, threads: int
) -> None:
    """By quotients of sizes, and by conditions: true of the arrays there are, or not."""
    points = -(-threads // channels)
    off = st.sampled_from([0, 0, 0, -1, -3])
    have = max(0, height * width * channels + data.draw(off))
    listed = max(0, 2 * points + data.draw(off))
    room = max(0, threads + data.draw(off))
    x = np.arange(1, have + 1, dtype=np.float32)
    at = np.array(data.draw(st.lists(st.integers(-2, 5), min_size=listed, max_size=listed)))
    image = np.zeros((height, width, channels), np.float32)
    out = carried_out(
        WINDOW, [image, at.astype(np.int32), x], (room,), init_value=-1, threads=max(threads, 1)
    )
    padded = np.zeros(height * width * channels, np.float32)
    padded[:have] = x
    of = padded.reshape(height, width, channels)
    expected = np.full(room, -1, np.float32)
    for elem in range(min(max(threads, 1), room)):
        point = elem // channels
        first, second = (int(at[n]) if n < listed else 0 for n in (2 * point, 2 * point + 1))
        corners = itertools.product((first, first + 1), (second, second + 1))
        inside = [(i, j) for i, j in corners if 0 <= i < height and 0 <= j < width]
        expected[elem] = sum(of[i, j, elem % channels] for i, j in inside)
    np.testing.assert_array_equal(out, expected)


WINDOW = ferrule.metal_kernel(
    "window", ["image", "at", "x"], ["y"],
    """uint elem = thread_position_in_grid.x;
    const int H = image_shape[0], W = image_shape[1], C = image_shape[2];
    const uint point = elem / C;
    const int north = at[2 * point], west = at[2 * point + 1];
    float sum = 0;
    for (int corner = 0; corner < 4; ++corner) {
        const int i = north + corner / 2, j = west + corner % 2;
        if (i < 0 || i >= H) continue;
        if (j >= 0 && j < W) sum += x[(i * W + j) * C + elem % C];
    }
    y[elem] = sum;""",
)  # fmt: skip


def test_the_window_is_shown() -> None:
    inputs = Input(F32, 3), Input(ferrule.int32, 1), Input(F32, 1)
    p = cpp.prepare(Spec(WINDOW.kernel, inputs, (F32,), ()))
    found = bounds.bounded(p, p.text.source)
    assert guarded.counts(p, found) == guarded.Counts(shown=4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_ferrule_writes_itself_hides_nothing(dtype: str) -> None:
    """`decltype` stands in the text where both operands of ``?:`` get one type."""
    from ferrule.cli import grid_sample

    image = points = Input(getattr(ferrule, dtype), 4)
    template = (("T", image.dtype),)
    p = cpp.prepare(Spec(grid_sample.forward.kernel, (image, points), (image.dtype,), template))
    found = bounds.bounded(p, p.text.source)
    assert guarded.counts(p, found) == guarded.Counts(shown=4)


LOOP = ferrule.metal_kernel(
    "loop", ["x"], ["y"],
    "uint i = thread_position_in_grid.x; for (uint k = 0; k < 4; ++k) y[4 * i + k] = x[4 * i + k];",
)  # fmt: skip

STRIDED = ferrule.metal_kernel(
    "strided", ["x", "at"], ["y"],
    "uint i = thread_position_in_grid.x; y[i] = x[at[i]];", ensure_row_contiguous=False,
)  # fmt: skip
VIEWS = st.sampled_from([
    np.s_[:, :], np.s_[::-1, :], np.s_[:, ::-1], np.s_[::-1, ::-2], np.s_[1::2, 2:], np.s_[2, ::3],
    np.s_[:0, :], np.s_[4:1:-1, 1],
])  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(VIEWS)
def test_what_strides_reach(view: Any) -> None:
    """All elements between the first and the last are inside, before the address, too."""
    whole = np.arange(1, 43, dtype=np.float32).reshape(6, 7)
    x = whole[view]
    at = np.arange(-50, 51, dtype=np.int32)
    out = carried_out(STRIDED, [x, at], (101,), threads=101)
    expected = np.zeros(101, np.float32)
    flat = whole.ravel()
    if x.size:
        places = (np.indices(x.shape).reshape(x.ndim, -1).T * x.strides).sum(1) // 4
        base = (x.__array_interface__["data"][0] - whole.ctypes.data) // 4
        for j, i in enumerate(at):
            if places.min() <= i <= places.max():
                expected[j] = flat[base + i]
        assert extent(x.shape, tuple(s // 4 for s in x.strides)) == (
            places.min(), places.max() - places.min() + 1,
        )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "complex64", "bool"])
def test_stores_of_every_kind(dtype: str) -> None:
    """Compound assignments, increments, and their values, at places of which half are outside."""
    change = {"bool": "", "complex64": "y[i] += y[i]; y[i].real += T(1).real;"}.get(
        dtype, "y[i] += T(2); T a = y[i]++; y[i] -= a; y[i] *= T(3); --y[i]; T b = (y[i] = y[i] + a);"  # noqa: E501
        " y[i - 2] = y[i - 2] + b - b;",
    )  # fmt: skip
    kernel = ferrule.metal_kernel(
        "stores",
        ["x"],
        ["y"],
        f"int i = int(thread_position_in_grid.x) * 2 - 10; y[i] = x[i]; {change}",
    )
    kind = np.dtype(dtype)
    x = np.array([0, 1, 0, 1, 1, 0, 1, 1, 0, 1]).astype(kind)
    out = carried_out(
        kernel,
        [x],
        (10,),
        kind,
        threads=20,
        template=[("T", ferrule.dtypes.BY_NAME[dtype])],
        init_value=0,
    )
    expected = np.zeros(10, kind)
    for i in range(0, 10, 2):
        a = x[i] + kind.type(2) if dtype not in ("bool", "complex64") else None
        expected[i] = x[i] if a is None else kind.type(1) * 3 - 1 + a
        if dtype == "complex64":
            expected[i] = 2 * x[i] + 1
    np.testing.assert_array_equal(out, expected)


def test_atomics_outside_do_nothing_and_loops_end() -> None:
    kernel = ferrule.metal_kernel(
        "atomics", ["x"], ["y"],
        """int i = int(thread_position_in_grid.x) - 8;
        atomic_fetch_add_explicit(&y[i], x[i], memory_order_relaxed);
        int was = 5;
        while (!atomic_compare_exchange_weak_explicit(&y[i], &was, was + 1, memory_order_relaxed,
                                                      memory_order_relaxed)) {}
        atomic_store_explicit(&y[i + 100], atomic_load_explicit(&y[i], memory_order_relaxed),
                              memory_order_relaxed);
        int old = atomic_exchange_explicit(&y[-i - 5], 7, memory_order_relaxed);
        atomic_fetch_max_explicit(y + i, old, memory_order_relaxed);""",
        atomic_outputs=True,
    )  # fmt: skip
    x = np.arange(1, 5, dtype=np.int32)
    out = carried_out(kernel, [x], (4,), np.int32, threads=8 + 12, init_value=0)
    # Each is 0, or the 7 of another thread, then its x and 1 more, or that 7 alone.
    assert set(out) <= {2, 3, 4, 5, 7, 9, 10, 11, 12}


KEEPS = "struct R { const device float& r; };"


@pytest.mark.parametrize(
    ("header", "source", "expected"),
    [
        # Stores by what is a reference without saying so.
        ("", "decltype(auto) r = y[i]; r = 3; y[i + 4] = 1;", [3] * 4 + [1] * 4),
        ("", "[](auto&& r) { r = 3; }(y[i]);", [3] * 4 + [0] * 4),
        ("struct S { template <class T> void go(T&& r) const { r = 3; } };",
         "S s; s.go(y[i]);", [3] * 4 + [0] * 4),
        ("struct S { template <class T> S(T&& r) { r = 3; } };", "S s{y[i]};", [3] * 4 + [0] * 4),
        ("struct S { template <class T> S(T&& r, int) { r = 3; } };", "S s(y[i], 1);",
         [3] * 4 + [0] * 4),
        # References that outlive their expression.
        ("", "auto f = [&](int k) -> const device float& { return x[k]; }; y[i] = f(i);",
         [10, 11, 12, 13] + [0] * 4),
        ("const device float* f(const device float& v) { return &v; }", "y[i] = f(x[i])[1];",
         [11, 12, 13, 14] + [0] * 4),
        (KEEPS, "R r{y[i]}; y[i] = 3; y[i + 4] = r.r;", [3] * 8),
        (KEEPS, "R r = {y[i]}; y[i] = 3; y[i + 4] = r.r;", [3] * 8),
        (KEEPS, "auto r = R{y[i]}; y[i] = 3; y[i + 4] = r.r;", [3] * 8),
        # What gives a reference, and takes one: these compile with their guards.
        ("", "device float& r{y[i]}; r = x[i + 7];", [17] + [0] * 7),
        ("struct S { void go(device float& r) const { r = 3; } };",
         "S s; s.go(y[i]); y[i] += x[i + 7];", [20] + [3] * 3 + [0] * 4),
        ("", "(y[i] = 3) += x[i + 7];", [20] + [3] * 3 + [0] * 4),
        ("", "++(++y[i]); y[i] += x[i + 7];", [19] + [2] * 3 + [0] * 4),
        ("", "auto& r = (y[i] = 3); r = x[i + 7];", [17] + [0] * 7),
        ("", "auto f = [&](int k) -> device float& { return y[k]; }; f(i) = x[i + 7];",
         [17] + [0] * 7),
    ],
)  # fmt: skip
def test_references_are_what_they_were(header: str, source: str, expected: list[float]) -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], ROW + source, header=header)
    x = np.arange(10, 18, dtype=np.float32)
    out = carried_out(kernel, [x], (8,), threads=4, init_value=0)
    np.testing.assert_array_equal(out, expected)


# -- the compiler takes it -------------------------------------------------------------------------

BODIES = {
    "half": "uint i = thread_position_in_grid.x; y[i] = half(x[i] * 2) + y[i]; y[i] /= half(3);",
    "lambda": "auto f = [x](int k) { return x[k]; }; y[0] = f(thread_position_in_grid.x);",
    "barrier": "threadgroup float s[32]; uint i = thread_position_in_threadgroup.x; s[i] = x[i];"
    " threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = half(s[31 - i]);",
    "simd": "uint i = thread_position_in_grid.x; if (i < 7) y[i] = half(simd_sum(x[i]));",
    "reference": "change(y[thread_position_in_grid.x], x[1]);",
    "choice": "int i = thread_position_in_grid.x; (i > 2 ? y[i] : y[0]) = half(x[i] > 0 ? x[1] : 0);",  # noqa: E501
    "method": "int i = thread_position_in_grid.x; y[i] = as_type<half>(as_type<ushort>(y[i]));",
}


@pytest.mark.parametrize("name", BODIES)
def test_compiled_as_checked(name: str, library: nvrtc.Nvrtc) -> None:
    """NVRTC takes these with their checks, not without."""
    header = "void change(device half& a, float v) { a = half(v); }"
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], BODIES[name], header=header)
    spec = Spec(kernel.kernel, (Input(F32, 1),), (ferrule.float16,))
    built = cuda_build.CudaBuild(spec, None)
    text = built.text()
    assert built.task(library, "compute_90").run().text == text
    assert "fr_view" in text
    assert "fr_view" not in cuda_text.text(cpp.prepare(spec), Form(), guards=UNGUARDED)


def test_what_the_compiler_refuses_is_compiled_without(library: nvrtc.Nvrtc) -> None:
    """An array of what has its own idea of `&`: the error of a wrong body is the author's."""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "auto& v = (x[0], y[0]); v = x[1.5f];")
    with pytest.raises(ferrule.CompileError) as caught:
        kernel.compile("cuda", inputs=["float32[8]"], output_dtypes=[F32])
    assert "fr_" not in str(caught.value)


# -- extents in C ----------------------------------------------------------------------------------

C = """
#include "arrays.h"
__attribute__((visibility("default")))
void run(const void* p, int n, const int64_t* sizes, const int64_t* strides, fr_extent* e) {
  *e = fr_extent_of(p, n, sizes, strides);
}
"""


class _Extent(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_int64), ("count", ctypes.c_uint64), ("narrow", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(-3000, 3000)), max_size=5),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_c_and_python_agree(
    dims: list[tuple[int, int]], there: bool, strided: bool, large: bool
) -> None:
    sizes = [size << (20 * (large and i == 0)) for i, (size, _) in enumerate(dims)]
    strides = [stride for _, stride in dims]
    numbers = ctypes.c_int64 * max(len(dims), 1)
    made = _Extent()
    _c()(
        ctypes.c_void_p(64 if there else None), len(dims), numbers(*sizes),
        numbers(*strides) if strided else None, ctypes.byref(made),
    )  # fmt: skip
    expected = (0, 0)
    if there:
        expected = (
            extent(tuple(sizes), tuple(strides))
            if strided
            else (0, int(np.prod(sizes, dtype=object)))
        )
    assert (made.first, made.count) == expected
    assert made.narrow == min(made.count, 1 << 31)


_made: list[Any] = []


def _c() -> Any:
    if not _made:
        from ferrule.tools import loader

        flags = ["-O1", "-x", "c++", "-std=c++17", f"-I{RUNTIME}"]
        text = f'extern "C" {{\n{C}\n}}'
        library = toolchain.find_compiler().compile(text, flags=flags)
        _made.append(loader.load_library(library, "extents").run)
    return _made[0]


def test_the_share_that_docs_publish() -> None:
    """Of the accesses in the kernels of tests/conformance and tests/dialect (`guarded.py`)."""
    text = (Path(__file__).parents[2] / "docs" / "dialect.md").read_text(encoding="utf-8")
    for name, found in guarded.shares().items():
        published = re.search(rf"{name}[^|]*\| (\d+) of (\d+) \|", text)
        assert published is not None, name
        assert [*map(int, published.groups())] == [found.guarded + found.shown, sum(found)], name
