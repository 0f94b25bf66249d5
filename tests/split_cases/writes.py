"""Writes that are hard to see: a variable that is written is not the same in all lanes."""

from __future__ import annotations

import numpy as np

from .model import X, flat, line, solid

_BUMP = "inline void bump(thread int& v) { v += 1; }\n"
_BUMP_MACRO = _BUMP + "#define BUMP(v) bump(v)\n"
_SPACE = "namespace util { inline void bump(thread int& v) { v += 1; } }\n"
_FUNCTOR = "struct Bump { void operator()(thread int& v) const { v += 1; } };\n"
_PAIR = "struct Pair { int n[2]; };\n"
_SWAP = """\
template <typename T>
inline void exchange(thread T& a, thread T& b) { T t = a; a = b; b = t; }
"""

_FLAT = [
    flat(
        "flat_macro_that_adds",
        """
        #define ADD(v, n) v += n
        int acc = 0;
        ADD(acc, 2);
        y[i] = acc;
        """,
        want=lambda t: 2,
    ),
    flat(
        "flat_macro_that_names_a_variable",
        """
        #define ACC acc
        int acc = 0;
        ACC += 2;
        y[i] = acc;
        """,
        want=lambda t: 2,
    ),
    flat(
        "flat_macro_that_takes_an_address",
        """
        #define P &acc
        int acc = 0;
        thread int* q = P;
        *q += 1;
        y[i] = acc;
        """,
        want=lambda t: 1,
    ),
    flat(
        "flat_macro_that_calls_a_function",
        "int acc = 0; BUMP(acc); y[i] = acc;",
        header=_BUMP_MACRO,
        want=lambda t: 1,
    ),
    flat(
        "flat_function_of_a_namespace",
        "int acc = 0; util::bump(acc); y[i] = acc;",
        header=_SPACE,
        want=lambda t: 1,
    ),
    flat(
        "flat_static_member",
        "int acc = 0; Util::bump(acc); y[i] = acc;",
        header="struct Util { static void bump(thread int& v) { v += 1; } };",
        want=lambda t: 1,
    ),
    flat(
        "flat_functor",
        "Bump bump; int acc = 0; bump(acc); y[i] = acc;",
        header=_FUNCTOR,
        want=lambda t: 1,
    ),
    flat(
        "flat_method_that_counts",
        "Count c = {0}; int a = c.next(); y[i] = a + c.n;",
        header="struct Count { int n; int next() { return ++n; } };",
        want=lambda t: 2,
    ),
    flat(
        "flat_method_that_adds",
        "Acc a; a.add(2); y[i] = a.n;",
        header="struct Acc { int n = 0; void add(int v) { n += v; } };",
        want=lambda t: 2,
    ),
    flat(
        "flat_operator_that_writes",
        "P p = {0}; p << 3; y[i] = p.a;",
        header="struct P { int a; }; inline void operator<<(thread P& p, int v) { p.a += v; }",
        want=lambda t: 3,
    ),
    flat(
        "flat_reference",
        "int acc = 0; thread int& q = acc; q += 1; y[i] = acc;",
        want=lambda t: 1,
    ),
    flat(
        "flat_reference_in_a_branch",
        "int acc = 0; if (true) { thread int& q = acc; q += 1; } y[i] = acc;",
        want=lambda t: 1,
    ),
    flat(
        "flat_element_of_a_member",
        "Pair a = {{0, 0}}; a.n[i & 1] += 1; y[i] = a.n[0] * 10 + a.n[1];",
        header=_PAIR,
        want=lambda t: np.where(t.i & 1, 1, 10),
    ),
    flat(
        "flat_component",
        "int2 a = int2(0); a[i & 1] += 1; a.x += 1; y[i] = a.x * 10 + a.y;",
        want=lambda t: np.where(t.i & 1, 11, 20),
    ),
    flat(
        "flat_array",
        """
        const int t[3] = {1, 2, 3};
        int u[3] = {1, 2, 3};
        u[i % 3] += 1;
        y[i] = t[i % 3] * 100 + u[0] * 10 + u[1];
        """,
        want=lambda t: (t.i % 3 + 1) * 100 + 12 + 10 * (t.i % 3 == 0) + (t.i % 3 == 1),
    ),
    flat(
        "flat_conditional_as_target",
        "int a = 1, b = 2; ((i & 1) ? a : b) += 5; y[i] = a * 10 + b;",
        want=lambda t: np.where(t.i & 1, 62, 17),
    ),
    flat(
        "flat_comma_as_target",
        "int a = 1, b = 2; (a, b) += 1; y[i] = a * 10 + b;",
        want=lambda t: 13,
    ),
    flat(
        "flat_call_as_target",
        "int a = 1, b = 2; pick(a, b) += 3; y[i] = a * 10 + b;",
        header="inline thread int& pick(thread int& a, thread int& b) { return b; }",
        want=lambda t: 15,
    ),
    flat(
        "flat_pointer_from_a_call_as_target",
        "int a = 1, b = 2; *choose(&a, &b) += 3; y[i] = a * 10 + b;",
        header="inline thread int* choose(thread int* a, thread int* b) { return b; }",
        want=lambda t: 15,
    ),
    flat(
        "flat_element_of_a_conditional_as_target",
        "int p[1] = {1}, q[1] = {2}; ((i & 1) ? p : q)[0] += 5; y[i] = p[0] * 10 + q[0];",
        want=lambda t: np.where(t.i & 1, 62, 17),
    ),
    flat(
        "flat_assignment_in_a_comma",
        "int a = 1, b; b = (a += 2, a * 3); y[i] = a * 10 + b;",
        splits=False,
        want=lambda t: 39,
    ),
    flat(
        "flat_increment_in_an_initialiser",
        "int a = 1; int b = a++ + 5; y[i] = a * 10 + b;",
        want=lambda t: 26,
    ),
    flat(
        "flat_assignment_in_an_initialiser",
        "int a = 0; int b = (a = a + 1) + 2; y[i] = a * 10 + b;",
        want=lambda t: 13,
    ),
    flat(
        "flat_increment_in_a_condition",
        "int a = 1; if (a++ == 1) y[i] = 7; y[i] += a;",
        want=lambda t: 9,
    ),
    flat(
        "flat_increment_in_an_index",
        "int a = 1; y[i] = x[a++]; y[i] += x[a++];",
        want=lambda t: X[1] + X[2],
    ),
    flat(
        "flat_template_that_exchanges",
        """
        int a = 1, b = 2;
        exchange(a, b);
        exchange<int>(a, b);
        exchange(a, b);
        y[i] = a * 10 + b;
        """,
        header=_SWAP,
        want=lambda t: 21,
    ),
    flat(
        "flat_modf_and_frexp",
        """
        float whole = 0;
        int e = 0;
        float part = modf(2.5f, whole);
        float m = frexp(8.0f, e);
        y[i] = int(part * 10) + int(whole) * 100 + e * 1000 + int(m * 10);
        """,
        want=lambda t: 4210,
    ),
    flat(
        "flat_input_pointer_moves",
        "x += 2; x++; y[i] = x[0] + x[i & 3];",
        want=lambda t: X[3] + X[3 + (t.i & 3)],
    ),
    flat(
        "flat_output_pointer_moves",
        "y += i; *y = int(i); y[0] += 3;",
        want=lambda t: t.i + 3,
    ),
    flat(
        "flat_pointer_walks",
        "const device int* p = x; int acc = *p++; acc += *p; y[i] = acc;",
        want=lambda t: X[0] + X[1],
    ),
    flat(
        "flat_load_that_a_return_guards",
        """
        if (s > 100) return;
        int n = s;
        if (int(i) >= n) return;
        int v = x[n - 17];
        y[i] = v + n;
        """,
        want=lambda t: np.where(t.i < 17, X[0] + 17, 0),
    ),
]

_SPLIT = [
    solid(
        "macro_that_names_a_variable",
        """
        #define ACC acc
        int acc = 0;
        if (i < 3) ACC += 2;
        y[i] = acc + simd_max(int(i));
        """,
        want=lambda t: 2 * (t.i < 3) + t.max(t.i),
    ),
    solid(
        "macro_that_shifts",
        """
        #define SHIFT(v) v <<= 1
        uint acc = 3;
        if (i < 3) { SHIFT(acc); }
        y[i] = int(acc) + simd_max(int(i));
        """,
        want=lambda t: 3 + 3 * (t.i < 3) + t.max(t.i),
    ),
    solid(
        "macro_that_calls_a_function",
        "int acc = 0; if (i < 3) BUMP(acc); y[i] = acc + simd_max(int(i));",
        header=_BUMP_MACRO,
        want=lambda t: (t.i < 3) + t.max(t.i),
    ),
    solid(
        "function_of_a_namespace",
        "int acc = 0; if (i < 3) util::bump(acc); y[i] = acc + simd_max(int(i));",
        header=_SPACE,
        want=lambda t: (t.i < 3) + t.max(t.i),
    ),
    solid(
        "functor",
        "Bump bump; int acc = 0; if (i < 3) bump(acc); y[i] = acc + simd_max(int(i));",
        header=_FUNCTOR,
        want=lambda t: (t.i < 3) + t.max(t.i),
    ),
    solid(
        "element_of_a_member",
        "Pair a = {{0, 0}}; a.n[i & 1] += 1; y[i] = a.n[0] * 10 + a.n[1] + simd_max(0);",
        header=_PAIR,
        want=lambda t: np.where(t.i & 1, 1, 10),
    ),
    solid(
        "template_that_exchanges",
        """
        int a = 1, b = 2;
        if (i & 1) exchange<int>(a, b);
        int q = simd_sum(a);
        y[i] = q * 100 + a * 10 + b;
        """,
        header=_SWAP,
        want=lambda t: t.sum(1 + (t.i & 1)) * 100 + np.where(t.i & 1, 21, 12),
    ),
    solid(
        "conditional_as_target",
        """
        int a = 1, b = 2;
        ((i & 1) ? a : b) += 5;
        int q = simd_sum(a);
        y[i] = q * 100 + a * 10 + b;
        """,
        want=lambda t: t.sum(1 + 5 * (t.i & 1)) * 100 + np.where(t.i & 1, 62, 17),
    ),
    solid(
        "sincos",
        """
        float c = 5;
        float v = sincos(0.0f, c);
        int q = simd_sum(1);
        y[i] = int(v * 10) + int(c * 100) + q;
        """,
        want=lambda t: 100 + t.sum(1),
    ),
    solid(
        "reference_whose_index_names_an_arguments_rank",
        "int a[5] = {1, 2, 3, 4, int(l)}; thread int& r = a[x_ndim + 3]; r += simd_sum(1);"
        " y[i] = r + x_ndim;",
        want=lambda t: t.l + t.sum(1) + 1,
    ),
    solid(
        "functions_whose_names_ferrule_uses_too",
        "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);"
        " y[i] = int(step(float(l), 3.0f)) + simd_sum(1);",
        want=lambda t: (t.l <= 3) + t.sum(1),
    ),
    solid(
        "reference_to_a_uniform_variable",
        """
        int best = int(threads_per_threadgroup.x);
        thread int &m = best;
        m -= simd_max(int(i));
        y[i] = best;
        """,
        want=lambda t: t.width - t.max(t.i),
    ),
    solid(
        "reference_to_a_variable_that_changes_by_name",
        """
        int best = int(threads_per_threadgroup.x);
        thread int &m = best;
        const int before = m;
        m += int(i);
        int q = simd_max(int(i));
        m -= simd_max(int(i));
        best = 3 - int(threads_per_threadgroup.x);
        y[i] = best + before + q + m;
        """,
        want=lambda t: 6 - t.width + t.max(t.i),
    ),
    solid(
        "reference_used_again_after_an_operation",
        """
        int best = int(i);
        thread int &m = best;
        m += 3;
        int q = simd_max(int(i));
        m -= q;
        y[i] = best;
        """,
        want=lambda t: 3 + t.i - t.max(t.i),
    ),
    solid(
        "pointer_used_again_after_an_operation",
        """
        int best = int(i);
        thread int* m = &best;
        *m += 3;
        int q = simd_max(int(i));
        *m -= q;
        y[i] = *m;
        """,
        want=lambda t: 3 + t.i - t.max(t.i),
    ),
    solid(
        "pointer_to_an_array_used_again_after_an_operation",
        """
        int a[2] = {int(i), 5};
        thread int* m = a;
        m[0] += 3;
        int q = simd_max(int(i));
        m[0] -= q;
        y[i] = m[0] + m[1];
        """,
        want=lambda t: 8 + t.i - t.max(t.i),
    ),
    line(
        "output_read_again",
        """
        y[i] = 5;
        int a = y[i] + 1;
        y[i] = a * 2;
        int b = y[i];
        int q = simd_sum(b);
        y[i] = q + b;
        """,
        want=lambda t: 12 * t.sum(1) + 12,
    ),
    line(
        "pointer_walks",
        """
        const device int* p = x;
        int acc = 0;
        for (int k = 0; k < 3; ++k) { acc += *p++; acc += simd_sum(*p); p += i & 1; }
        y[i] = acc;
        """,
        want=lambda t: sum(
            X[k * (1 + (t.i & 1))] + t.sum(X[k * (1 + (t.i & 1)) + 1]) for k in range(3)
        ),
    ),
]

CASES = [*_FLAT, *_SPLIT]
