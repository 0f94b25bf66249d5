"""Launches that are not watched, since their text shows that nothing lies outside: what is shown
is so, and what is so is shown where people would expect it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.check.launches import inside

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
T = "uint t = thread_position_in_threadgroup.x, g = threadgroup_position_in_grid.x;\n"
FUNCTION = "float value_at(const device float* p, int i) { return p[i]; }"
STRUCT = "struct Row { float v[4]; };"

# Bodies over x[n] and at[n] of int32, numbers a and b, and y[m]; with sizes for which nothing is
# outside and that is shown: n, m, a, b, threads, threads of a threadgroup. None where it is not.
BODIES: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "one each": (I + "y[i] = x[i];", (8, 8, 0, 0, 8, 4)),
    "guarded": (I + "if (i < uint(a)) y[i] = x[i];", (8, 9, 8, 0, 32, 4)),
    "guarded by both": (I + "if (i < uint(a) && i >= 1) y[i - 1] = x[i];", (8, 8, 8, 0, 16, 4)),
    "returned before": (I + "if (i >= uint(a)) return;\ny[i] = x[i];", (8, 8, 8, 0, 32, 8)),
    "before the first": (I + "y[i] = x[i - 1];", None),
    "int before the first": (I + "y[i] = x[int(i) - a];", (8, 8, 0, 0, 8, 8)),
    "strided": (I + "y[i * a + b] = x[i];", (4, 10, 3, 0, 4, 4)),
    "of the shape": (I + "if (i < uint(x_shape[0])) y[i] = x[i];", (5, 8, 0, 0, 16, 16)),
    "rows": (T + "for (uint k = t; k < 16; k += 4) y[g * 16 + k] = x[g * 16 + k];",
             (32, 32, 0, 0, 8, 4)),
    "rows of a": (T + "for (int k = t; k < a; k += 4) y[g * a + k] = x[g * a + k];",
                  (20, 20, 10, 0, 8, 4)),
    "quotient and rest": (I + "y[i] = x[(i / 4) * 4 + (3 - i % 4)];", (8, 8, 0, 0, 8, 4)),
    "clamped": (I + "y[i] = x[clamp(int(i) - a, 0, 7)];", (8, 8, 3, 0, 8, 4)),
    "the smaller": (I + "y[min(i, 7u)] = x[max(int(i) - 9, 0)];", (8, 8, 0, 0, 16, 4)),
    "gathered": (I + "y[i] = x[at[i]];", None),
    "gathered and guarded": (
        I + "int k = at[i];\ny[i] = k >= 0 && k < 8 ? x[k] : 0;", (8, 8, 0, 0, 8, 4)),
    "down": (I + "for (int k = 7; k >= 0; k--) y[i * 8 + k] = x[k];", (8, 16, 0, 0, 2, 2)),
    "down below": (I + "for (int k = 7; k >= a; k--) y[k] = x[k];", (8, 8, 0, 0, 1, 1)),
    "nested": (
        I + "for (int j = 0; j < a; ++j) for (int k = 0; k < b; ++k) y[j * b + k] = x[k];",
        (4, 12, 3, 4, 1, 1)),
    "pointer goes on": (
        "auto p = x; auto q = y;\nfor (int k = 0; k < a; ++k) { *q = p[1]; q += 2; p += b; }",
        (8, 16, 4, 1, 1, 1)),
    "argument goes on": (
        "y += 3;\nfor (int k = 0; k < a; ++k) { y[0] = x[k]; y += 2; }", (8, 16, 6, 0, 1, 1)),
    "goes on if": (
        "auto q = y;\nfor (int k = 0; k < a; ++k) { if (x[k] > 5) q += 2; q[0] = 1; }", None),
    "goes on and skips": (
        "auto q = y;\nfor (int k = 0; k < a; ++k) { if (k == 2) continue; q += 2; q[0] = 1; }",
        None),
    "goes on and stops": (
        "auto q = y;\nfor (int k = 0; k < a; ++k) { q[0] = 1; if (x[k] > 5) break; q += 2; }",
        (8, 16, 4, 0, 1, 1)),
    "another of its name": (
        "auto q = y;\nfor (int k = 0; k < a; ++k) { auto q = y + k; q[0] = 1; q += 9; }\nq[0] = 2;",
        None),
    "changed twice": (
        "auto q = y;\nfor (int k = 0; k < a; ++k) { q += 1; q[0] = 1; q += 1; }", None),
    "while": ("int k = 0;\nwhile (k < a) { y[k] = x[k]; k += 2; }", (8, 8, 8, 0, 1, 1)),
    "while it finds": ("int k = 0;\nwhile (k < 60 && x[k] < 5) { y[k] = 1; k += 1; }", None),
    "do": ("int k = 0;\ndo { y[k] = x[k]; k += 1; } while (k < a);", None),
    "shared": (
        T + "threadgroup float s[8];\ns[t] = x[t];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[g * 8 + t] = s[7 - t];",
        (8, 16, 0, 0, 16, 8)),
    "shared by a": (T + "threadgroup float s[8];\ns[t + a] = 1;\ny[t] = s[t + a];",
                    (4, 8, 2, 0, 4, 4)),
    "own": (I + "float s[4];\nfor (int k = 0; k < 4; ++k) s[k] = x[k];\ny[i] = s[(i + 1) % 4];",
            (4, 8, 0, 0, 8, 4)),
    "own by a": (I + "float s[4] = {0};\ns[a] = 1;\ny[i] = s[a];", (4, 8, 3, 0, 8, 4)),
    "own rows": (I + "float s[2][4] = {{0}};\ns[0][a] = 1;\ny[i] = s[0][a];", None),
    "four at once": (I + "*(device float4*)(y + 4 * i) = float4(1);", (4, 16, 0, 0, 4, 4)),
    "by a function": (I + "y[i] = value_at(x, int(i) + a);", (8, 4, 4, 0, 4, 4)),
    "by a lambda": (I + "auto f = [&](int k) { return x[k + a]; };\ny[i] = f(int(i));",
                    None),
    "in a struct": (I + "Row r = {{1, 2, 3, 4}};\ny[i] = r.v[a];", None),
    "wraps": (I + "y[i] = x[i * 2147483648u + 1];", (8, 4, 0, 0, 1, 1)),
    "too large a product": ("int k = a * b;\ny[0] = x[k * 65536 / 65536];", (8, 4, 2, 3, 1, 1)),
    "divided": (I + "y[i / uint(a)] = x[i];", (8, 4, 2, 0, 8, 4)),
    "of the threadgroup": (
        "uint n = threads_per_threadgroup.x;\ny[threadgroup_position_in_grid.x * n +"
        " thread_position_in_threadgroup.x] = x[thread_index_in_threadgroup];",
        (4, 8, 0, 0, 8, 4)),
    "of the simdgroup": (
        "y[simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup] = x[0];",
        (1, 64, 0, 0, 64, 64)),
}  # fmt: skip


def kernel(name: str) -> Any:
    body, _ = BODIES[name]
    header = FUNCTION if "value_at" in body else STRUCT if "Row" in body else ""
    return ferrule.metal_kernel("k", ["x", "at", "a", "b"], ["y"], body, header)


def call(made: Any, sizes: tuple[int, ...]) -> Any:
    n, m, a, b, threads, threadgroup = sizes
    rng = np.random.default_rng(n * 31 + a)
    inputs = [
        np.arange(n, dtype=np.float32), rng.integers(-2, 2 * n + 2, n).astype(np.int32),
        np.int32(a), np.int32(b),
    ]  # fmt: skip
    return made(
        inputs=inputs, output_shapes=[(m,)], output_dtypes=["float32"], init_value=0.0,
        grid=(threads, 1, 1), threadgroup=(threadgroup, 1, 1),
    )[0]  # fmt: skip


def shown(made: Any, sizes: tuple[int, ...]) -> tuple[bool, Any]:
    """Whether a launch is shown to stay inside, and what is found of it when it is watched."""
    answers: list[bool] = []
    ask = inside.is_shown_inside

    def asked(*given: Any) -> bool:
        answers.append(ask(*given))
        return False  # watch it in any case

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr("ferrule.check.watching.is_shown_inside", asked)
        with ferrule.checking(kinds=["bounds"]) as findings:
            call(made, sizes)
    (answer,) = answers
    return answer, findings


SIZES = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.integers(-3, 12), st.integers(-3, 12),
    st.integers(1, 40), st.sampled_from([1, 2, 4, 8, 32]),
)  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_is_shown_is_inside(name: str) -> None:
    made, (_, right) = kernel(name), BODIES[name]
    if right is not None:
        answer, findings = shown(made, right)
        assert answer and not findings

    @settings(max_examples=60, deadline=None, database=None)
    @given(SIZES)
    def holds(sizes: tuple[int, ...]) -> None:
        answer, findings = shown(made, sizes)
        assert not (answer and findings), str(findings[0])

    holds()


def test_a_launch_that_is_shown_runs_as_ever() -> None:
    made, (_, right) = kernel("rows of a"), BODIES["rows of a"]
    assert right is not None
    expected = call(made, right)
    with ferrule.checking(kinds=["bounds"]) as findings:
        given_ = call(made, right)
    assert findings.launches == 1 and not findings
    np.testing.assert_array_equal(given_, expected)
    with ferrule.checking(kinds=["bounds"]) as findings:
        call(made, (10, *right[1:]))
    assert [f.kind for f in findings] == ["bounds"]


# What hides an access outside from a reader: header, body, and the number a.
HIDING = [
    ("void set(thread int& p, int i) { if (i >= 0) { p = 100; return; } p = 1; }",
     "int p = 0; set(p, a); y[p] = 1;", 0),
    ("", "int p = 0; auto f = [&](int j) { if (j >= 0) { p = 100; return; } p = 1; }; f(a); "
     "y[p] = 1;", 0),
    ("", "int p = 0; for (int k = 0; k < 4; ++k) { if (k == 1) { p = 100; continue; } "
     "y[p] = 1; }", 0),
    ("", "do { if (a >= 0) break; } while (0); y[100] = 1;", 0),
    ("", "int p = 0; for (int k = 0; k < a; ++k) { y[p] = 1; thread int& r = p; r += 9; }", 3),
    ("", "int p = 0; for (int k = 0; k < a; ++k) { y[p] = 1; "
     "for (thread int& r = p; r < 100; r += 100) {} }", 3),
    ("template <typename F> void apply(F f) { f(); }",
     "int p = 0; auto f = [&]() { p += 9; }; for (int k = 0; k < a; ++k) { y[p] = 1; "
     "apply(f); }", 3),
    ("", "int p = 0; auto f = [=]() mutable { p += 9; return p - 9; };"
     "for (int k = 0; k < a; ++k) y[f()] = 1;", 3),
    ("", "int p = 0; auto f = [&]() { p += 9; }; { int p = 5; for (int k = 0; k < a; ++k) { f(); } "
     "y[0] = p; } y[p] = 1;", 3),
    ("", "using P4 = device float4*; *((P4)y + a) = float4(1);", 2),
    ("", "typedef device float4* P4; P4 p = (P4)y; p[a] = float4(1);", 2),
    ("template <typename P> void put(device float* q, uint i) { P p = (P)q; p[i] = float4(1); }",
     "put<device float4*>(y, a);", 2),
    ("", "uint2 v = uint2(0, 0); v[a] = 100; y[v.x] = 1;", 0),
    ("", "auto f = [](int k) -> uchar { return k; }; y[f(a - 1) + 1] = 1;", 0),
    ("auto f(int i) -> uchar { return i; }", "y[f(-1) + 1] = 1;", 0),
    ("struct Own { float v[4]; float get(int i) { return v[i]; } };",
     "Own r = {{1, 2, 3, 4}}; y[0] = r.get(a);", 9),
    ("struct S { static float get(int i) { float v[4] = {1, 2, 3, 4}; return v[i]; } };",
     "y[0] = S::get(a);", 9),
    ("struct S { static void inc(thread int& k) { k += 100; } };",
     "int k = 0; S::inc(k); y[k] = 1;", 0),
    ("struct S { static int min(int a, int b) { return b; } };", "y[S::min(0, 100)] = 1;", 0),
    ("int f(int) { return 0; } struct S { static int f(int) { return 100; } };",
     "y[S::f(0)] = 1;", 0),
    ("thread int& same(thread int& a) { return a; }", "int k = 0; same(k) = 100; y[k] = 1;", 0),
    ("struct R { thread int& k; };", "int k = 0; R r{k}; r.k = 100; y[k] = 1;", 0),
    ("", "int p = 0; auto f = [&](const thread int& c) { p = 100; y[c] = 1; }; f(p);", 0),
    ("", "int e = 0; float f = frexp(1024.0f, e); y[e] = f;", 0),
    ("int f(int i = 0) { return i; }", "y[f(100.0f)] = 1;", 0),
    ("constant int a = 100;", "y[a] = 1;", 0),
    ("namespace ns { constant int a = 100; }", "y[ns::a] = 1;", 0),
    ("struct S { static constexpr int a = 100; };", "y[S::a] = 1;", 0),
    ("enum class E : int { a = 100 };", "y[int(E::a)] = 1;", 0),
    ("", "int n = 100; { auto f = [&]() { return n; }; int n = 0; y[f()] = n + 1; }", 0),
    ("", "y[a bitor 8] = 1;", 8),
    ("", "float s[40000]; for (int k = 0; k < 40000; ++k) s[k] = 1; y[0] = s[a];", 0),
    ("", "int k = 8; k or_eq 8; y[k] = 1;", 0),
    ("", "int2 v = int2(-1, -1); if ((v < 5u).x) y[100] = 1;", 0),
    ("int f(int a, int b) { return a; }", "int p = 0; y[f(p, p = 100)] = 1;", 0),
    ("", "if (at[0] >= 0 && at[0] < 8) { ((device int*)at)[0] = 100; y[at[0]] = 1; }", 0),
    ("float g(int i) { float v[4] = {1, 2, 3, 4}; return v[i]; } float f(int i) { return g(i); } "
     "float f(float i) { return i; }", "y[0] = f(a);", 9),
]  # fmt: skip


@pytest.mark.parametrize(("header", "body", "a"), HIDING)
def test_what_hides_is_watched(
    header: str, body: str, a: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "_ODD", re.compile("(?!)"))  # what the room itself understands
    made = ferrule.metal_kernel("k", ["x", "at", "a", "b"], ["y"], body, header)
    answer, findings = shown(made, (8, 8, a, 0, 1, 1))
    assert not (answer and findings)
