"""Macros, headers, casts and conditionals: what the text must become before it compiles."""

from __future__ import annotations

import numpy as np

from .model import HALVES, X, flat, line, solid, whole

CASES = [
    solid(
        "header_whose_functions_synchronise_and_are_not_called",
        "y[i] = simd_max(int(i));",
        header="""
        inline int total(int v) { return simd_sum(v); }
        inline int gather(threadgroup int* t, uint l) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          return t[l];
        }
        """,
        way="threadgroups",  # a barrier anywhere in the text counts
        want=lambda t: t.max(t.i),
    ),
    solid(
        "header_whose_functions_synchronise_and_are_called",
        "y[i] = total(int(l)) + 1; if (l & 1) y[i] += total(2);",
        header="inline int total(int v) { return simd_sum(v); }",
        want=lambda t: t.sum(t.l) + 1 + np.where(t.l & 1, t.sum(2, t.l & 1 == 1), 0),
    ),
    solid(
        "value_of_an_input_is_cast_in_a_branch",
        """
        if (i > 3) { y[i] = 1; y[i] += int(float(s)); }
        y[i] += simd_max(int(i));
        """,
        want=lambda t: np.where(t.i > 3, 18, 0) + t.max(t.i),
    ),
    whole(
        "macros_of_macros_of_an_attribute",
        """
        uint i = thread_position_in_grid.x; // thread_index_in_simdgroup
        uint t = TWICE;
        int q = simd_max(int(i));
        y[i] = int(t) + q;
        """,
        header="#define LANE thread_index_in_simdgroup\n#define TWICE (LANE + LANE)\n",
        want=lambda t: 2 * t.lane + t.max(t.i),
    ),
    whole(
        "flat_macros_of_macros_of_an_attribute",
        """
        uint i = thread_position_in_grid.x; // thread_index_in_simdgroup
        uint t = TWICE;
        y[i] = int(t);
        """,
        way="flat",
        header="#define LANE thread_index_in_simdgroup\n#define TWICE (LANE + LANE)\n",
        want=lambda t: 2 * t.lane,
    ),
    flat(
        "flat_conditional_as_argument_of_a_macro",
        "half h = 1.0h; y[i] = SAME(i > 3 ? 4 : 1) + int(i > 2 ? h : 2.0f);",
        header="#define SAME(P) (P)\n",
        want=lambda t: np.where(t.i > 3, 4, 1) + np.where(t.i > 2, 1, 2),
    ),
    solid(
        "conditional_as_argument_of_a_macro",
        "half h = 1.0h; y[i] = SAME(i > 3 ? 4 : 1) + simd_sum(int(i > 2 ? h : 2.0f));",
        header="#define SAME(P) (P)\n",
        want=lambda t: np.where(t.i > 3, 4, 1) + t.sum(np.where(t.i > 2, 1, 2)),
    ),
    flat(
        "flat_conditional_of_half_and_int",
        "y[i] = int(i < 2 ? halves[i + 5] : 0) + int(i > 4 ? -100.0f : halves[i]);",
        want=lambda t: np.where(t.i < 2, HALVES[t.i + 5], 0) + np.where(t.i > 4, -100, HALVES[t.i]),
    ),
    solid(
        "conditional_of_half_and_float",
        """
        half v = i & 1 ? halves[i] : -1.0f;
        y[i] = simd_sum(int(v)) + int(i & 2 ? v : 3);
        """,
        want=lambda t: (
            t.sum(np.where(t.i & 1, HALVES[t.i], -1))
            + np.where(t.i & 2, np.where(t.i & 1, HALVES[t.i], -1), 3)
        ),
    ),
    solid(
        "cast_behind_a_parenthesis_beside_a_half",
        """
        short b = 5, c = short(l);
        half h = 1.0h;
        y[i] = simd_all(i < 3u) ? b : (short)(short(short(0) >> 7) - c);
        y[i] += int(h);
        """,
        want=lambda t: np.where(t.max(t.i) < 3, 5, -t.l) + 1,
    ),
    solid(
        "cast_behind_a_parenthesis",
        "y[(long(i) * 1)] = simd_sum((short(l) + 1));",
        want=lambda t: t.sum(t.l + 1),
    ),
    solid(
        "operand_that_reads_like_a_type",
        "y[i] = simd_prefix_inclusive_sum(uint(simd_vote::vote_t(simd_active_threads_mask())));",
        want=lambda t: (t.lane + 1) * ((1 << t.sum(1)) - 1),
    ),
    solid(
        "auto_that_reads_like_a_type",
        "int n = int(l); auto v = int(n); int q = simd_sum(uint(v)); y[i] = q + v;",
        want=lambda t: t.sum(t.l) + t.l,
    ),
    solid(
        "operand_with_conditionals_of_a_template_value",
        """
        float a = simd_sum((FLAG ? true : true) ? 1.0f : 2.0f);
        float b = simd_sum((N > 3 ? i : i + 1) > 2 ? 1.0f : 2.0f);
        y[i] = int(a) * 100 + int(b);
        """,
        template=(("FLAG", False), ("N", 3)),
        want=lambda t: t.sum(1) * 100 + t.sum(np.where(t.i + 1 > 2, 1, 2)),
    ),
    line(
        "pragmas_beside_a_loop",
        """
        int acc = 0;
        #pragma clang loop unroll(full)
        for (int k = 0; k < 3; ++k) { acc += simd_sum(k + int(i)); }
        _Pragma("clang loop unroll(full)")
        for (int k = 0; k < 3; ++k) acc += x[k];
        y[i] = acc;
        """,
        want=lambda t: t.sum(3 + 3 * t.i) + X[:3].sum(),
    ),
    solid(
        "if_constexpr",
        """
        constexpr int K = 3;
        int a = 0;
        if constexpr (K == 3) { a = simd_sum(1); } else { a = simd_max(int(i)); }
        y[i] = a;
        """,
        want=lambda t: t.sum(1),
    ),
]
