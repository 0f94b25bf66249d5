"""Functions of the header that synchronise: put in place of their calls, they mean the same."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import ferrule
from ferrule.devices.cpu import program as cpu
from ferrule.source import NotSplittable
from ferrule.source.syntax import Tree, function_definitions, struct_names
from fuzz import harness

Array = np.ndarray[Any, np.dtype[Any]]
I32 = np.dtype(np.int32)
X = (np.arange(4096) * 7919 % 201 - 100).astype(np.int32)
S = np.array(17, np.int32)


class Shape(NamedTuple):
    """The sizes of one launch: threads in all and per threadgroup."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


LINE = Shape((100, 1, 1), (64, 1, 1))  # the last threadgroup ends in a simdgroup of 4 threads
SHAPES = (
    LINE,
    Shape((72, 1, 1), (48, 1, 1)),  # threadgroups that are no multiple of 32
    Shape((20, 3, 2), (20, 3, 2)),  # several simdgroups of several rows
    Shape((10, 6, 3), (4, 4, 2)),  # one simdgroup of several rows, ragged along each axis
)

HEAD = """\
uint i = (thread_position_in_grid.z * threads_per_grid.y + thread_position_in_grid.y)
    * threads_per_grid.x + thread_position_in_grid.x;
uint lane = thread_index_in_simdgroup, l = thread_index_in_threadgroup;
uint m = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
"""
SHARED = "threadgroup int buf[1024], pair[2][1024];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_FLAGS", cpu._FLAGS)
    harness.optimise(1)


def kernel_of(header: str, body: str) -> ferrule.MetalKernel:
    return ferrule.metal_kernel("k", ["x", "s"], ["y"], body, header)


def described(shape: Shape, results: int = 1) -> dict[str, Any]:
    return {
        "inputs": ["int32[4096]", "int32[]"],
        "output_dtypes": [I32],
        "output_shapes": [(results * math.prod(shape.grid),)],
        "grid": shape.grid,
        "threadgroup": shape.threadgroup,
    }


def split_text(header: str, body: str, shape: Shape = LINE) -> str:
    """The text of a split kernel; raises NotSplittable where it is none."""
    with cpu.running("split"):
        return kernel_of(header, body).text("cpu", **described(shape))


def check(header: str, body: str, results: int, shapes: tuple[Shape, ...]) -> None:
    """Split and on fibers, a kernel gives the same bits: y[i * results + …] for each thread i."""
    kernel = kernel_of(header, body)
    for shape in shapes:
        how = described(shape, results)
        assert kernel.compile("cpu", **how).mode.startswith("split by "), shape
        got = {}
        for mode in ("auto", "fibers"):
            with cpu.running(mode):
                (got[mode],) = kernel(**how | {"inputs": [X, S]}, init_value=-7)
        wrong = np.flatnonzero(got["auto"] != got["fibers"])
        assert not len(wrong), (
            shape, {int(k): (got["auto"][k], got["fibers"][k]) for k in wrong[:5]}
        )  # fmt: skip


class Case(NamedTuple):
    """Functions, and statements that set ``r`` with their help."""

    name: str
    header: str
    body: str


F = "inline int f(int v) { return simd_sum(v) + v; }"

SIMD = (
    Case("assignment", F, "r = f(x[i]);"),
    Case("initialiser", F, "int t = f(x[i]); r = t * 2 + f(3);"),
    Case("statement", F, "f(x[i]); r = 5;"),
    Case("several", F, "r = f(x[i]) - 3 * f(x[i + 1]) + s - abs(f(int(lane)));"),
    Case("nested_arguments", F, "r = f(f(x[i]) % 7 + f(2));"),
    Case("second_declarator", F, "int a = x[i], b = f(a), c[2] = {b + a, f(b)}; r = c[lane % 2];"),
    Case("compound_assignments", F, "int a = 1, b; a += f(x[i]); r = b = f(a); r -= f(b);"),
    Case("in_a_condition", F, "if (f(x[i]) > 3) r = f(1); else if (f(lane) > x[i]) r = f(2);"),
    Case("in_branches", F, "if (lane % 3 == 1) { r = f(x[i]); } else if (x[i] > 0) r = f(2);"),
    Case("in_loops", F, "for (uint k = 0; k < lane % 4; ++k) r += f(k); while (r < 9) r += f(9);"),
    Case("ends_a_loop", F, "int k = 0; while (f(k + x[i]) % 5 != 0 && k < 4) ++k; r = k;"),
    Case(
        "head_of_a_for",
        "inline int f(int v) { return simd_max(v) - v; }",
        "for (int k = f(x[i]) % 5; f(k) < 3 && k < 9; ++k) { if (k == 2) continue; r += k; }",
    ),
    Case("on_several_lines", F, "r = 1\n + f(\n  x[i]\n  + 2)\n - 3;"),
    Case(
        "functions_that_call_functions",
        F + "inline int g(int v) { int a = f(v); return f(a + 1) - a; }"
        "static inline int h(int v) { if (v > 3) { v = g(v); } f(v); return g(f(v)); }",
        "r = h(x[i] / 8);",
    ),
    Case(
        "template_arguments",
        "template <typename T, int N, bool B = true>\n"
        "T f(T v) { for (int k = 0; k < N; ++k) v += simd_shuffle_xor(v, 1 << k);"
        " return B ? v : -v; }",
        "constexpr int M = 1; r = f<int, 3>(x[i]) + int(f<uint, M + 1>(x[i]))"
        " + f<unsigned int, 2, M == 2>(7);",
    ),
    Case(
        "template_arguments_that_are_told",
        "template <typename T> T f(T v) { T a = v / 2; return simd_sum(a); }\n"
        "template <typename T> T g(const device T* p, uint k) { return simd_max(p[k]); }\n"
        "template <typename T> void h(thread T& v) { T a = v; v = simd_min(a) + v; }\n"
        "template <typename T> T c(const thread T& v) { T a = v; return simd_max(a); }\n"
        "template <typename T> T q(T v) { return simd_sum(v); }",
        "h(r); r += f(x[i]) + int(f(float(x[i]))) + g(x, i) + q(3) + c(x[i]) + c(lane);"
        " float t = x[i]; h(t); r += t;",
    ),
    Case(
        "references",
        "struct P { int a, b[2]; };\n"
        "void f(thread int& a, int b) { a += simd_sum(b); }\n"
        "void g(thread int (&a)[3], thread P& p) { a[1] = simd_max(a[0]); p.b[1] += simd_sum(p.a);"
        " f(a[2], a[1]); f(p.a, p.a); }",
        "int a[3] = {x[i], 2, 3}; P p = {4, {5, 6}}; f(r, 3); f(r, r); f(a[l % 3], 2);"
        " f(p.b[0], a[l % 3]); g(a, p); r += a[0] + a[1] * 3 + a[2] * 5 + p.a + p.b[0] + p.b[1];",
    ),
    Case(
        "pointers",
        "void f(thread int* p) { p[0] += simd_sum(p[1]); *(p + 1) = 2; }\n"
        "int g(const device int* p, uint k) { p += k; return simd_max(*p) + p[1]; }\n"
        "int h(const thread int* p) { return simd_max(*p); }\n"
        "int e(int p[2]) { return simd_min(p[1]); }\n"
        "void w(device int* p, int v) { *p = simd_max(v); p++; p[0] = v; }",
        "int a[2] = {x[i], 3}; f(a); int v[2] = {1, 2}; f(&v[0]);"
        " r = a[0] + a[1] * v[0] + g(x, i) + g(x + l, 2) + h(a) + h(&r) + h(a + 1) + e(a);"
        " int o[3] = {1, 2, 3}; r = 2; w(o, x[i]); w(&o[1], r + 1); r += o[0] * 3 + o[1] + o[2];",
    ),
    Case(
        "constant_references",
        "int f(const thread int& v, constant int& n) { return simd_sum(v) * n + v; }",
        "r = 1; r = f(x[i] + 1, s) + f(x[i], s) + f(r, s) + f(7, 3);",
    ),
    Case(
        "an_output",
        "void f(device int* y, uint at, int v) { y[at] = simd_sum(v); }\n"
        "void g(device int& to, int v) { to = to + simd_max(v); }",
        "f(y, RESULT, x[i]); g(y[RESULT], 3); r = y[RESULT];",
    ),
    Case(
        "early_returns",
        "int f(int v) { if (v < 0) return -simd_sum(v);\n"
        "  if (v % 5 == 0) { int t = 3; return t; } else { v += 1; { if (v > 50) return v; } }\n"
        "  int t = simd_max(v); return t + v; }\n"
        "int g(int v, bool b) { if (b) { if (v > 9) { return simd_sum(1); } else return 3; }"
        " else return simd_sum(2); }",
        "r = f(x[i]) + g(x[i], lane > 9) - g(4, false);",
    ),
    Case(
        "early_returns_that_need_a_flag",
        "int f(int v) { if (v > 3) { if (v % 7 > 3) return simd_sum(v); v += 1; }\n"
        "  else { v += 2; } v = simd_max(v) + v;\n"
        "  if (v > 0) { if (v > 9) { return 1; } } else if (v < -50) return 2;\n"
        "  return simd_sum(v); }",
        "r = f(x[i]) * 3; r += f(2);",
    ),
    Case(
        "returns_out_of_loops",
        "int f(int v) { for (int k = 0; k < 5; ++k) { if (k > 3) return simd_sum(k);\n"
        "  for (int j = 0; j < 3; ++j) if (k * j == v % 5) return j; else if (j > v) break;\n"
        "  ++v; }\n"
        "  v = simd_sum(v); while (true) { ++v; if (simd_max(v) > 3) return v; } }\n"
        "void g(thread int& v) { do { v /= 2; if (simd_min(v) < 3) return; } while (v > 9);\n"
        "  v = 1; }",
        "r = f(x[i]); int t = x[i]; g(t); r += t * 100 + f(1);",
    ),
    Case(
        "early_returns_of_nothing",
        "void f(thread int& a, uint lane) { if (lane >= 20) return; a = simd_min(a);\n"
        "  if (a < 0) { a = 1; return; } a += simd_sum(a); }",
        "r = x[i] + 60; f(r, lane); f(r, 3);",
    ),
    Case(
        "defaults_and_overloads",
        "int f(int v, int n = 3) { return simd_sum(v) * n; }\n"
        "int f() { return simd_sum(1); }\n"
        "int f(int a, int b, int c, uint = 4) { return a + b * c; }",
        "r = f(x[i]) + f(x[i], 2) + f() + f(1, 2, 3);",
    ),
    Case(
        "names_that_clash",
        "int f(int i) { int r = i; int x = simd_sum(r); { int r = 3, lane = x; x += r + lane; }\n"
        "  for (int r = 0; r < 2; ++r) x += r; return x - i + r; }\n"
        "int g(int s, int v) { return f(s) - f(v); }",
        "int v = x[i]; r = f(v) + g(v, s);",
    ),
    Case(
        "parameters_that_change",
        "int f(int2 v, int w, thread int& t) { v[0] = simd_sum(w); t += 1; w += t; v.y += w;\n"
        "  return v.x * 3 + v.y; }\n"
        "struct P { int a[2]; };\nint g(P p, int k) { p.a[1] = simd_max(p.a[k]); return p.a[1]; }\n"
        "void bump(thread int& v) { v += 1; }\n"
        "int h(int v) { bump(v); return simd_sum(v); }\n"
        "template <typename F> int e(int v, F op) { op(v); op(3); return simd_sum(v); }",
        "int2 v = {3, x[i]}; int w = 4; r = f(v, w, w) + v.x + w; r += f(v, w, r) * 3 + w;"
        " P p = {{x[i], 2}}; r += g(p, w & 1) + p.a[1]; int z = x[i]; r += h(z) + z;"
        " auto op = [&](int a) { z += a; w = a; }; r += e(z, op); r += z * 5 + w;",
    ),
    Case(
        "what_the_header_has",
        "constant int TABLE[4] = {3, 1, 4, 1};\nconstexpr constant int FOUR = 4;\n"
        "struct P { int a; float b; };\ntypedef int number;\n"
        "inline int twice(int v) { return v * 2; }\n"
        "int f(P p) { number n = TABLE[p.a & 3]; return simd_sum(twice(p.a)) + n * FOUR; }",
        "P p = {x[i], 1.5f}; r = f(p);",
    ),
    Case(
        "macros",
        "#define RED(v) (simd_sum(v) + \\\n   ONE)\n#define ONE 1\n#define CALL(v) f(v)\n"
        "int f(int v) { return RED(v + ONE); }\n#undef ONE\n#define TWICE(a) ((a) + (a))\n",
        "r = CALL(TWICE(x[i]));",
    ),
    Case(
        "lambdas_types_and_comments",
        "int f(int v) { using number = int; typedef uint other; // a comment\n"
        "  auto add = [&](number a) { return a + v; }; /* and\n another */\n"
        "  #pragma unroll\n  for (other k = 0; k < 2; ++k) v = simd_sum(add(k)); return v; }",
        "r = f(x[i] & 7);",
    ),
    Case(
        "specifiers",
        "METAL_FUNC int f(int v) { return simd_sum(v); }\n"
        "template <typename T>\n[[maybe_unused]] METAL_FUNC auto g(const T v)\n"
        "{ return f(v) + v; }\n"
        "static constexpr constant int K = 2;\nauto h(int v) -> int { return simd_max(v * K); }",
        "r = f(x[i]) + g(x[i]) + h(x[i]);",
    ),
    Case(
        "namespaces",
        "namespace ops { namespace { inline int f(int v) { return simd_sum(v); } } }\n"
        "namespace { int g(int v) { return ops::f(v) + metal::simd_max(v); } }",
        "r = ops::f(x[i]) + g(3);",
    ),
    Case(
        "loops_that_are_left",
        "int f(int v) { int a = 0; for (int k = 0; k < 5; ++k) { if (k == v % 5) continue;\n"
        "  if (k > v) break; a += simd_sum(k); } do { a += 3; } while (simd_max(a) < 7);\n"
        "  return a; }",
        "r = f(x[i]); r += f(3);",
    ),
    Case(
        "vectors",
        "float3 f(float3 v) { v.xy = v.yx; v.z = simd_sum(v.x); return v * simd_max(v); }",
        "float3 v = f(float3(x[i], 2, lane)); v.zx = f(v / 9).xy; r = v.x + v.y + v.z;",
    ),
)

ROTATE = f"""
int f(int v, threadgroup int* to, uint at, uint n) {{
  to[at] = v;
  {BARRIER}
  int a = to[(at + 1) % n];
  {BARRIER}
  return a;
}}
"""
GROUP = (
    Case("rotate", ROTATE, "r = f(x[i], buf, l, m) + 2 * f(x[i] + 1, pair[1], l, m);"),
    Case("address", ROTATE, "r = f(x[i], &pair[1][0], l, m) - f(r, buf + 1, l, m);"),
    Case("in_a_uniform_loop", ROTATE, "for (int k = 0; k < 3; ++k) r += f(k + r, buf, l, m);"),
    Case(
        "templates",
        "template <int N, typename T> T f(T v, threadgroup T* to, uint at, uint n) {\n"
        f"  if (N > 1) {{ v = simd_sum(v); if (at == 0) *to = v; {BARRIER} v += *to; {BARRIER} }}\n"
        "  return simd_max(v); }",
        "r = f<1>(x[i], buf, l, m) + f<2>(x[i], pair[0], l, m) + f<2>(x[i], &pair[1][3], l, m);",
    ),
    Case(
        "references_to_memory",
        "void f(threadgroup int& a, int v, uint l) {\n"
        f"  if (l == 3) a = v; {BARRIER} v = a; {BARRIER} if (l == 0) a += v; }}",
        f"f(buf[7], x[i], l); {BARRIER} r = buf[7]; {BARRIER}",
    ),
    Case(
        "nested",
        ROTATE + "int g(int v, threadgroup int* a, threadgroup int* b, uint l, uint m) {\n"
        "  a += 2; v = f(v, a, l, m) * 3; return f(v, b, l, m) + f(simd_sum(v), a, l, m); }",
        "r = g(x[i], buf, pair[1], l, m);",
    ),
)

MATRICES = Case(
    "matrices",
    "void f(const threadgroup float* p, threadgroup float* to) {\n"
    "  simdgroup_matrix<float, 8, 8> a, c; simdgroup_load(a, p, 8);\n"
    "  simdgroup_multiply(c, a, a); simdgroup_store(c, to, 8); }",
    "threadgroup float tile[64], out[2][64]; for (uint k = l; k < 64; k += m) tile[k] = k % 5;"
    f" {BARRIER} f(tile, out[simdgroup_index_in_threadgroup]); {BARRIER}"
    " r = out[1][l % 64] + out[0][(l + 9) % 64];",
)


def merged(cases: tuple[Case, ...]) -> tuple[str, str]:
    """Header and body of a kernel that is all of these cases, each with names of its own."""
    headers, bodies = [], []
    for k, case in enumerate(cases):
        tree = Tree(case.header, body=False)
        names = {name for name, _ in function_definitions(tree)} | set(struct_names(tree))
        names |= set(
            re.findall(r"(?:#define|constant int|typedef int|namespace) (\w+)", case.header)
        )
        own = re.compile(rf"\b({'|'.join(sorted(names))})\b")
        header, body = (own.sub(rf"\1_{k}", part) for part in (case.header, case.body))
        result = f"i * {len(cases)} + {k}"
        headers.append(header)
        bodies.append(
            f"{{ int r = x[i] % 3;\n{body.replace('RESULT', result)}\n y[{result}] = r; }}\n"
        )
    return "\n".join(headers), "".join(bodies)


@pytest.mark.parametrize("case", (*SIMD, *GROUP), ids=lambda case: case.name)
def test_is_split(case: Case) -> None:
    header, body = merged((case,))
    assert split_text(header, HEAD + (SHARED if case in GROUP else "") + body)


@pytest.mark.parametrize("part", range(4))
def test_simdgroups(part: int) -> None:
    cases = SIMD[part::4]
    header, body = merged(cases)
    check(header, HEAD + body, len(cases), SHAPES)


def test_threadgroups() -> None:
    header, body = merged(GROUP)
    check(header, HEAD + SHARED + body, len(GROUP), SHAPES)


def test_matrices() -> None:
    header, body = merged((MATRICES,))
    check(header, HEAD + body, 1, (Shape((192, 1, 1), (64, 1, 1)),))


def test_nothing_is_lost_against_a_text_by_hand() -> None:
    """What is uniform stays uniform, and pointers that never change cost nothing."""
    header = (
        "template <int N> int f(int v, threadgroup int* to, uint at) { v = simd_sum(v) / N;\n"
        f"  if (N > 1) {{ if (at == 0) to[N] = v; {BARRIER} v = to[N]; }} return v; }}\n"
        "inline void g(thread int& a, int b, const device int* p) { b *= 2; a = p[b]; }\n"
        "inline int h(int v) { return simd_max(v); }\n"
    )
    called = "g(r, 4, x); r = f<2>(r, pair[1], lane) + 1; y[i] = h(7) + r;"
    by_hand = (
        "int fr_h1_v = r; fr_h1_v = simd_sum(fr_h1_v) / 2;"
        f" if (2 > 1) {{ if (lane == 0) (pair[1])[2] = fr_h1_v; {BARRIER}"
        " fr_h1_v = (pair[1])[2]; } int fr_h1 = fr_h1_v;"
    )
    by_hand = f"g(r, 4, x); {by_hand} r = fr_h1 + 1; int fr_h2_v = 7; int fr_h2 ="
    by_hand += " simd_max(fr_h2_v); y[i] = fr_h2 + r;"
    for shape in SHAPES:
        texts = [
            split_text(header, f"{HEAD}{SHARED}int r = 3; {body}", shape)
            for body in (called, by_hand)
        ]
        texts = [re.sub(r"[ \n]+", " ", text) for text in texts]
        assert texts[0] == texts[1]


ADD = "int f(int v) { return simd_sum(v); }\n"
REFUSED = (
    ("calls itself", "int f(int v) { return v > 3 ? v : f(simd_sum(v)); }", "r = f(1);"),
    ("calls itself", "int f(int);\nint g(int v) { return f(v); }\nint f(int v)"
     " { simd_sum(v); if (v > 3) v = g(v); return v; }", "r = f(1);"),
    ("behind &&", ADD, "r = x[i] > 3 && f(1) > 2;"),
    (r"behind \|\|", ADD, "if (x[i] > 3 || f(1) > 2) r = 1;"),
    (r"a branch of \?:", ADD, "r = x[i] > 3 ? f(1) : 2;"),
    ("beside a comma", ADD, "r = (r, f(r));"),
    ("a lambda calls f", ADD, "auto t = [&](int v) { return f(v); }; r = t(3);"),
    ("do-while", ADD, "do { ++r; } while (f(r) < 3);"),
    ("a switch calls f", ADD, "switch (f(3)) { default: r = 1; }"),
    ("step", ADD, "for (int k = 0; k < 3; k += f(1)) r += k;"),
    ("range-based", ADD, "int a[2] = {1, 2}; for (int k : a) for (int j : {f(k)}) r += j;"),
    ("a condition calls", ADD, "if (int t = f(3)) r = t;"),
    ("decltype", ADD, "decltype(f(1)) t = 3; r = t;"),
    ("2 versions for 1 arguments", ADD + "float f(float v) { return simd_sum(v); }", "r = f(1);"),
    ("0 versions for 2 arguments", ADD, "r = f(1, 2);"),
    ("specialisation", "template <int N> int f() { return simd_sum(N); }\n"
     "template <> int f<3>() { return 3; }", "r = f<3>();"),
    ("method", "struct P { int f(int v) { return simd_sum(v); } };", "P p; r = p.f(1);"),
    ("method", "struct P { static int f(int v) { return simd_sum(v); } };", "r = P::f(1);"),
    ("hides K", "constant int K = 3;\nint f(int v) { return simd_sum(v) + K; }",
     "int K = 2; r = f(K);"),
    ("hides K", "constant int K = 3;\nint f(int v) { return simd_sum(v) + K; }",
     "int K = 2, t = f(1); r = t + K;"),
    ("hides K", "constant int K = 3;\nint f(int v) { return simd_sum(v) + K; }",
     "for (int K = 0; f(1) < 3 && K < 3; ++K) r += K;"),
    ("hides lane", "constant uint lane = 3;\nint f(int v) { return simd_sum(v) + lane; }",
     "r = f(1);"),
    ("hides x", "constant int x = 3;\nint f(int v) { return simd_sum(v) + x; }", "r = f(1);"),
    ("a function and a variable", ADD, "{ int f = 3; r = f; } r += f(2);"),
    ("not just called", "template <typename F> int use(F g) { return g(1); }\n" + ADD,
     "r = use(f);"),
    ("a directive|an #if", "int f(int v) {\n#ifdef __A\n  v = 1;\n#endif\n  return simd_sum(v); }",
     "r = f(1);"),
    ("means something else", "constant int K = 3;\nint f(int v) { return simd_sum(v) + K; }\n"
     "#define K 4\n", "r = f(1);"),
    ("means something else", "namespace a { constant int K = 3;"
     " int f(int v) { return simd_sum(v) + K; } }", "r = a::f(1);"),
    ("jumps with goto", "int f(int v) { goto done; done: return simd_sum(v); }", "r = f(1);"),
    ("declares a struct", "int f(int v) { struct P { int a; } p = {v}; return simd_sum(p.a); }",
     "r = f(1);"),
    ("out of a switch", "int f(int v) { for (int k = 0; k < 3; ++k) { switch (v) { case 1:"
     " return simd_sum(k); default: ; } } return 3; }", "r = f(1);"),
    ("several places", "auto f(int v) { if (v > 3) return simd_sum(v); return v; }", "r = f(1);"),
    ("declares a variable", ADD, "if (int t = 3; f(t) > 2) r = t;"),
    ("what its N is", "template <int N> int f(vec<int, N> v) { return simd_sum(v.x); }",
     "r = f(int2(1));"),
    ("without its T", "template <typename T> int f(T v) { return simd_sum(v.x); }",
     "r = f({1, 2});"),
    ("no plain variable", "void f(thread int& a) { a = simd_sum(a); }", "f(*(&r + 0));"),
    ("which variable", "void f(thread int& a, thread int& b) { a = simd_sum(a); b = 3; }",
     "int a[9] = {}; f(r, a[r]);"),
    ("may change while", f"int f(const threadgroup int& a) {{ {BARRIER} return a; }}",
     "threadgroup int t[2]; t[0] = 3; r = f(t[0]);"),
    ("may change while", "int f(const thread int& a, thread int& b) { b = simd_sum(3); return a; }",
     "r = 1 + f(r, r);"),
    ("asks for the address", "int f(const thread int& a) { return simd_sum(*&a); }", "r = f(r);"),
    ("r is read beside", "int f(thread int& a) { a += simd_sum(a); return a; }", "r = r + f(r);"),
    ("memory is read", f"int f(threadgroup int* t) {{ t[0] = simd_sum(3); {BARRIER} return 1; }}",
     "threadgroup int t[2]; t[0] = 3; r = t[0] + f(t);"),
    ("changes a variable", ADD, "r = i++ + f(2);"),
    ("load is called beside", ADD + "int load(const device int* p) { return p[0]; }",
     "r = load(y) + f(2);"),
    ("array of arrays", "int f(int a[2][3]) { return simd_sum(a[1][1]); }",
     "int a[2][3] = {}; r = f(a);"),
    ("has template parameters", "template <typename... T> int f(T... v) { return simd_sum(1); }",
     "r = f(1);"),
    ("defines simd_max anew", "int simd_max(int v, int w) { return simd_sum(v) + w; }",
     "r = simd_max(2, 3);"),
    ("threadgroup memory", f"int f(int v) {{ threadgroup int t[2]; {BARRIER} return t[0] + v; }}",
     "r = f(1);"),
    ("continue is in no loop", ADD, "r = f(2); break;"),
    ("continue is in no loop", ADD, "r = f(2); if (r > i) continue;"),
    ("continue is in no loop", ADD, "r = f(2); if (r > i) { r = f(3); break; }"),
    ("#else without an #if", ADD, "r = f(2);\n#else\n"),
    ("#endif without an #if", ADD, "r = f(2);\n#if 0\n#endif\n#endif\n"),
    ("#elif without an #if", ADD, "r = f(2);\n#if 0\n#else\n#elif 1\nr = 3;\n#endif\n"),
    ("#if without an #endif", ADD, "r = f(2);\n#if 0\nr = 3;"),
    ("only the compiler decides", ADD, "r = f(2);\n#if 08\nr = 3;\n#endif\n"),
)  # fmt: skip


@pytest.mark.parametrize(("why", "header", "body"), REFUSED)
def test_what_is_not_moved(why: str, header: str, body: str) -> None:
    """What would mean something else in place of its call runs on fibers, which say why."""
    with pytest.raises(NotSplittable, match=why):
        split_text(header, f"{HEAD}int r = 1; {body} y[i] = r;")


@pytest.mark.parametrize(
    ("value", "first", "others"),
    [
        ("simd_sum(lane > 9 ? simd_sum(1) : 0)", 22 * 22, 22 * 22),
        ("simd_sum(g(1, lane > 9))", 166, 166),
        ("g(1, lane > 9) * 1000 + g(1, false)", 10_032, 3032),
        ("h(g(1, lane > 9), g(2, false))", 166 + 64, 166 + 64),
        ("h(h(g(1, lane > 9), 1), 2)", 166 * 32 + 32 + 2, 166 * 32 + 32 + 2),
        ("sizeof(decltype(g(1, lane > 9)))", 4, 4),
    ],
)
def test_fibers_wait_for_lanes_that_are_in_the_arguments(
    value: str, first: int, others: int
) -> None:
    """Lanes that are ahead of others in an expression wait for them at the next operation."""
    header = "METAL_FUNC int g(int v, bool b) { if (b) return 3; return simd_sum(v); }\n"
    header += "int h(int v, int w) { return simd_sum(v) + w; }\n"
    how = described(Shape((32, 1, 1), (32, 1, 1))) | {"inputs": [X, S]}
    with cpu.running("fibers"):
        (y,) = kernel_of(header, f"{HEAD}y[i] = {value};")(**how)
    np.testing.assert_array_equal(y, np.where(np.arange(32) < 10, first, others))


def test_lines_of_errors() -> None:
    header = "int f(int v, int w) {\n  return simd_sum(v) + w; }\n"
    wrong = header + "int g(int v) {\n  return simd_sum(v) + oops; }\n"
    with pytest.raises(ferrule.CompileError, match=r"header line 4: .*oops"):
        kernel_of(wrong, HEAD + "y[i] =\n g(2);").compile("cpu", **described(LINE))
    for body, line in (
        ("int r = 3 +\n f(2,\n oops); \n y[i] = r;", 3),
        ("int r = 3;\n r = f(r, 3) +\n oops; y[i] = r;", 3),
        ("int r =\n\n f(1, 2)\n; y[i] = oops;", 4),
        ("int r = 1; if (r == 2) \n r = 2; else if (\n f(1, oops) == 2) \n r = 3; y[i] = r;", 3),
        ("int r = 1; \n while (f(r, 2) < 3)\n ++r; y[i] = r; \n oops();", 4),
        ("int r = 1, \n t = f(r, 2), u = 3, \n v = f(r,\n oops); y[i] = r;", 4),
    ):
        kernel = kernel_of(header, HEAD + body)
        line += HEAD.count("\n")
        with pytest.raises(ferrule.CompileError, match=rf"source line {line}: .*oops"):
            kernel.compile("cpu", **described(LINE))


NAMES = ("a", "b", "i", "l", "lane", "m", "r", "s", "v", "x", "y", "K")  # the body's own, too
NARROW = ("uint", "ushort", "uchar", "uint")


class Made(NamedTuple):
    """A function that was made up.

    Attributes:
        name: with its template arguments.
        kinds: of its parameters: ``v`` for a value, ``c`` for a reference to a constant, ``&`` and
            ``*`` for what it changes; ``t`` for threadgroup memory, ``l`` and ``m`` beside it.
        waits: it has a barrier, so that all threads must call it.
    """

    name: str
    kinds: str
    returns: bool

    @property
    def waits(self) -> bool:
        return "t" in self.kinds

    @property
    def alters(self) -> bool:
        return "&" in self.kinds or "*" in self.kinds


class Maker:
    """Makes up functions that synchronise, and a body that calls them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.functions: list[Made] = []
        self.count = 0

    def chance(self, n: int) -> bool:
        return self.random.randrange(n) == 0

    # -- expressions, of unsigned numbers: all of them are defined ---------------------------------

    def value(self, names: list[str], depth: int = 2) -> str:
        kind = self.random.randrange(7 if depth else 2)
        if kind == 0 or not names:
            return f"{self.random.randrange(9)}u"
        if kind <= 2:
            return f"uint({self.random.choice(names)})"
        first, second = (self.value(names, depth - 1) for _ in range(2))
        if kind == 3:
            return f"({first} > {second} ? {second} : 3u)"
        return f"({first} {self.random.choice('+-*^|')} {second})"

    def together(self, names: list[str], memory: str) -> str:
        """A value that lanes work out together, where they have a number of threadgroup arrays."""
        pure = [f for f in self.functions if f.returns and not f.alters and (memory or not f.waits)]
        if pure and not self.chance(3):
            return f"uint({self.call(self.random.choice(pure), names, memory)})"
        operation = ("simd_sum", "simd_max", "simd_xor", "simd_prefix_exclusive_sum")
        return f"{self.random.choice(operation)}({self.value(names)})"

    def call(self, f: Made, names: list[str], memory: str, own: str = "") -> str:
        """A call; ``own`` is what it may change.

        At most one argument synchronises: C++ leaves the order of arguments open.
        """
        arguments: list[str] = []
        nested = f.alters
        for kind in f.kinds:
            if kind == "t":
                arguments.append(self.random.choice(memory.split()))
            elif kind in "lm":
                arguments.append(f"{kind}_")
            elif kind in "&*":
                place = own or self.random.choice(names)
                arguments.append(f"&{place}" if kind == "*" else place)
            elif self.chance(4) and not nested:
                nested = True
                arguments.append(self.together(names, memory))
            else:
                arguments.append(self.value(names))
        return f"{f.name}({', '.join(arguments)})"

    # -- statements ------------------------------------------------------------------------------

    def block(
        self, names: list[str], depth: int, memory: str, leave: str = "", here: tuple[str, ...] = ()
    ) -> str:
        """Statements that change ``names``; ``here`` are those that are declared in this block."""
        out: list[str] = []
        names, declared = list(names), set(here)
        for _ in range(self.random.randrange(1, 4)):
            kind, changed = self.random.randrange(9 if depth else 4), self.random.choice(names)
            if kind == 0:
                new = self.random.choice([n for n in NAMES if n not in declared])
                names = [n for n in names if n != new]
                out.append(f"uint {new} = {self.value(names)};")
                names.append(new)
                declared.add(new)
            elif kind == 1:
                out.append(f"{changed} = {self.value(names)};")
            elif kind <= 3:
                operator = self.random.choice(("=", "+=", "^="))
                out.append(f"{changed} {operator} {self.together(names, memory)};")
            elif kind == 4:
                branches = [self.block(names, depth - 1, "", leave) for _ in range(2)]
                test = f"{self.value(names)} > {self.value(names)}"
                out.append(f"if ({test}) {{ {branches[0]} }} else {{ {branches[1]} }}")
            elif kind == 5:
                self.count += 1
                k, end = f"k{self.count}", "2u" if memory else f"{self.value(names)} % 4u"
                body = self.block(names, depth - 1, memory)
                out.append(f"for (uint {k} = 0, e{k} = {end}; {k} < e{k}; ++{k}) {{ {body} }}")
            elif kind == 6:
                out.append(f"{{ {self.block(names, depth - 1, memory)} }}")
            elif kind == 7 and leave:
                value = leave.replace("@", self.together(names, memory)) if "@" in leave else leave
                out.append(f"if ({self.value(names)} % 3u == 0u) {{ {value} }}")
            else:
                found = [f for f in self.functions if memory or not f.waits]
                out += [self.call(self.random.choice(found), names, memory) + ";"] if found else []
        return " ".join(out)

    def function(self) -> str:
        """One more function."""
        random, name = self.random, f"f{len(self.functions)}"
        kinds = "".join(random.choice("vvc&*") for _ in range(random.randrange(1, 3)))
        template = random.choice(("", "", "T", "N", "TN"))
        of = "T" if "T" in template else random.choice(NARROW)
        names = random.sample(NAMES, len(kinds))
        given, lines = [], []
        forms = {"v": f"{of} @0", "c": f"const thread {of}& @0", "&": "thread uint& @"}
        forms["*"] = "thread uint* @0"
        for kind, own in zip(kinds, names, strict=True):
            if kind == "v" and of == "uint":
                forms["v"] = "uint @"
            given.append(forms[kind].replace("@", own))
            if kind == "*":
                lines.append(f"uint {own} = *{own}0; *{own}0 += simd_sum({own});")
            elif "0" in forms[kind]:
                lines.append(f"uint {own} = {own}0;")
        memory, known = "", ("l_", "m_", *names)
        if self.chance(3):
            kinds, memory = kinds + "tlm", "to"
            given += ["threadgroup uint* to", "uint l_", "const uint m_"]
            step = f"{BARRIER} uint w = to[(l_ + 1) % m_]; {BARRIER} {names[0]} ^= w;"
            lines.append(f"to[l_] = {names[0]}; {step}")
        if "N" in template:
            lines.append(f"if (N > 1) {names[0]} += N + CONSTANT;")
        returns = not self.chance(4)
        leave = "" if memory else "return @;" if returns else "return;"
        lines.append(self.block(names, 2, memory, leave, known))
        if returns:
            lines.append(f"return {random.choice(names)};")
        types = {"T": "typename T", "N": "int N"}
        head = f"template <{', '.join(types[k] for k in template)}>\n" if template else ""
        values = {"T": random.choice(NARROW), "N": str(random.randrange(1, 4))}
        arguments = f"<{', '.join(values[k] for k in template)}>" if template else ""
        self.functions.append(Made(name + arguments, kinds, returns))
        kind = random.choice(("uint", "uint", "ushort", of)) if returns else "void"
        return f"{head}{kind} {name}({', '.join(given)}) {{\n" + "\n".join(lines) + "\n}\n"

    def body(self) -> tuple[str, int]:
        """Statements that call each function in some place, and how many results there are."""
        names = ["a", "b", "v"]
        out = ["uint l_ = l, m_ = m, a = x[i], b = lane, v = s, c[2] = {a, b};"]
        for f in self.functions:
            own = self.random.choice((*names, "c[1]", "c[lane % 2u]"))
            set_ = self.random.choice([n for n in names if n != own])
            t, place = f"t{len(out)}", self.random.randrange(7 if f.returns and not f.waits else 4)
            memory = "one two[1] &two[0][3]" if place < 4 else ""  # lanes may differ there
            call = self.call(f, [n for n in names if n != own], memory, own)
            statements = (
                f"uint {t} = {call}; {set_} ^= {t};",
                f"{set_} += {call} * 3u;",
                f"if ({call} % 2u == 0u) {set_} += 5u; else {set_} = simd_max(lane);",
                f"uint {t}, {t}b = {call}, {t}c = {t}b + 1u; {t} = {t}c; {set_} -= {t};",
                f"if (lane % 3u > {self.random.randrange(3)}u) {set_} = {call};",
                f"for (uint {t} = 0; {t} < 3u && {set_} % 5u != {t}; ++{t}) {set_} ^= {call};",
                f"uint {t} = 0; while ({call} % 4u > {t} && {t} < 3u) ++{t}; {set_} += {t};",
            )
            out.append(statements[place] if f.returns else f"{call};")
        results = (*names, "c[0]", "c[1]")
        out += [f"y[i * {len(results)} + {k}] = {result};" for k, result in enumerate(results)]
        return "\n".join(out), len(results)


@given(st.randoms(use_true_random=False), st.sampled_from(SHAPES))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_functions(random: Random, shape: Shape) -> None:
    made = Maker(random)
    header = "constant uint CONSTANT = 3;\n" + "".join(made.function() for _ in range(4))
    body, results = made.body()
    body = f"{HEAD}threadgroup uint one[1024], two[2][1100];\n{body}"
    try:
        split_text(header, body, shape)
    except NotSplittable as why:
        # Rightly: what a pointer may change is read in the same expression.
        assert re.search(r"\w+ is read beside", str(why))
        reject()
    check(header, body, results, (shape,))
