"""What is not split but runs on fibers, and why."""

from __future__ import annotations

import numpy as np

from .model import Shape, X, solid

CASES = [
    solid(
        "function_that_synchronises_behind_and",
        "bool b = l > 3 && total(1) > 20; y[i] = b;",
        header="inline int total(int v) { return simd_sum(v); }",
        way="fibers (total is called behind &&)",
        want=lambda t: (t.l > 3) & (t.sum(t.l > 3) > 20),
    ),
    solid(
        "function_that_synchronises_as_an_index",
        "int t[3] = {4, 5, 6}; y[i] = l & 1 ? t[total(1u) % 3u] : t[total(l) % 3u];",
        header="inline uint total(uint v) { return simd_sum(v); }",
        way="fibers (a branch of ?: calls total)",
        want=lambda t: 4 + np.where(t.l & 1, t.sum(t.l & 1), t.sum(t.l, t.l & 1 == 0)) % 3,
    ),
    solid(
        "conjunction_that_the_grammar_takes_for_a_conversion",
        "bool b = l != 9999; b = (simd_any(b) && (b && b)) && (l > 2); y[i] = b;",
        way="fibers (a call of simd_any is not understood)",
        want=lambda t: t.l > 2,
    ),
    solid(
        "lambda_that_synchronises",
        "auto f = [&](int v) { return simd_sum(v); }; if (l & 1) y[i] = f(int(l));",
        way="fibers (a lambda synchronises)",
        want=lambda t: np.where(t.l & 1, t.sum(t.l, t.l & 1 == 1), 0),
    ),
    solid(
        "struct_that_synchronises",
        "struct Q { int a; int total() const { return simd_sum(a); } }; Q q = {int(l)};"
        " y[i] = q.total();",
        way="fibers (a local struct synchronises)",
        want=lambda t: t.sum(t.l),
    ),
    solid(
        "lambda_that_copies_what_changes",
        """
        int a = int(l);
        auto f = [a]() { return a; };
        a += 5;
        int q = simd_sum(a);
        y[i] = f() + q;
        """,
        way="fibers (the lambda f copies a variable that changes)",
        want=lambda t: t.l + t.sum(t.l + 5),
    ),
    solid(
        "declaration_that_uses_a_name_before_it_hides_it",
        """
        int a[2] = {int(l), 3};
        {
          int b = simd_sum(a[0]), a = 7;
          y[i] = a + b;
        }
        """,
        way="fibers (a block uses a before it hides it)",
        want=lambda t: t.sum(t.l) + 7,
    ),
    solid(
        "block_that_uses_a_name_before_it_hides_it",
        """
        int a = int(l);
        {
          int b = simd_sum(a);
          int a = 7;
          y[i] = a + b;
        }
        """,
        way="fibers (a block uses a before it hides it)",
        want=lambda t: t.sum(t.l) + 7,
    ),
    solid(
        "operations_in_both_branches_of_a_conditional",
        "y[i] = l & 1 ? simd_sum(1) : simd_sum(int(l));",
        way="fibers (a branch of ?: holds a synchronising call)",
        want=lambda t: np.where(t.l & 1, t.sum(t.l & 1), t.sum(t.l, t.l & 1 == 0)),
    ),
    solid(
        "operation_behind_and",
        "bool b = l > 3 && simd_sum(1) > 20; y[i] = b;",
        way="fibers (a synchronising call stands behind &&)",
        want=lambda t: (t.l > 3) & (t.sum(t.l > 3) > 20),
    ),
    solid(
        "operand_that_changes_a_variable",
        "int a = int(l); int b = simd_sum(++a); y[i] = a + b;",
        way="fibers (an expression changes a variable beside a synchronising call)",
        want=lambda t: t.l + 1 + t.sum(t.l + 1),
    ),
    solid(
        "comma_beside_an_operation",
        """
        int a = 1, b = 2;
        for (int k = 0, j = 5; k < j; ++k, --j) { a += simd_sum(k), b += j; }
        y[i] = a * 100 + b;
        """,
        way="fibers (an expression changes a variable beside a synchronising call)",
        want=lambda t: (1 + t.sum(3)) * 100 + 14,
    ),
    solid(
        "if_that_declares_in_its_condition",
        "if (int v = simd_sum(int(l)) & 1) y[i] = v + 1; else y[i] = v - 1;",
        way="fibers (an if declares a variable in its condition)",
        want=lambda t: np.where(t.sum(t.l) & 1, 2, -1),
    ),
    solid(
        "step_that_synchronises",
        """
        int acc = 0;
        for (int k = 0; k < 3; k += simd_min(1)) {
          if (i & 1) continue;
          acc += simd_sum(1);
        }
        y[i] = acc;
        """,
        want=lambda t: np.where(t.i & 1, 0, 3 * t.sum(t.i & 1 == 0)),
    ),
    solid(
        "range_for_that_synchronises",
        "int a[3] = {1, 2, 3}; for (int v : a) y[i] += simd_sum(v);",
        way="fibers (a for range loop holds a synchronising call)",
        want=lambda t: t.sum(6),
    ),
    solid(
        "macro_that_pastes",
        """
        #define NAME(a, b) a##b
        int NAME(ac, c) = int(l);
        y[i] = simd_sum(acc);
        """,
        way="fibers (the macro NAME pastes tokens)",
        want=lambda t: t.sum(t.l),
    ),
    solid(
        "if_of_the_preprocessor",
        """
        #if __cplusplus
        int acc = int(l);
        #else
        int acc = 0;
        #endif
        y[i] = simd_sum(acc);
        """,
        way="fibers (the body has an #if that only the compiler decides)",
        want=lambda t: t.sum(t.l),
    ),
    solid(
        "if_of_a_macro_with_parameters",
        """
        #define BOTH(a, b) 1
        int acc = int(l);
        #if BOTH
        acc = 0;
        #endif
        y[i] = simd_sum(acc);
        """,
        way="fibers (the body has an #if that only the compiler decides)",
        want=lambda t: t.sum(t.l),
    ),
    solid(
        "if_of_what_is_read_here_alone",
        """
        int acc = int(l);
        #ifdef FERRULE
        ferrule::prefetch(x + l, l);
        if (l & 1) ferrule::prefetch(y + i, 1);
        acc += 1;
        #else
        error
        #endif
        #if !defined(FERRULE)
        error; texture2d asm(
        #else
        #if FERRULE  // and this
        y[i] = simd_sum(acc);
        #endif
        #endif
        """,
        want=lambda t: t.sum(t.l + 1),
    ),
    solid(
        "if_of_the_preprocessor_that_macros_decide",
        """
        #define TWO 2 // and no more
        #define EMPTY
        int acc = int(l);
        #ifdef ABSENT
        #define TWO 3
        acc = simd_sum(1); error;
        #elif !defined ( TWO )
        #else
        acc += 1;
        #endif
        #if defined(EMPTY)
          #if TWO
            acc *= TWO; int more = simd_max(acc);
          #elif FR_ANY
            error
          #else
            error
          #endif
        #endif
        #undef EMPTY
        #if 0
        #pragma error
        #ifdef __cplusplus
        #endif
        no C++ at all
        #elif ABSENT
        #else
        acc += 5;
        #endif
        #ifndef EMPTY
        y[i] = simd_sum(acc) + more;
        #endif
        """,
        want=lambda t: t.sum(2 * (t.l + 1) + 5) + 2 * (t.max(t.l) + 1),
    ),
    solid(
        "declarator_that_is_a_pointer_to_an_array",
        """
        int a[2][2] = {{1, int(l)}, {3, 4}};
        int (*p)[2] = a;
        int q = simd_sum(p[0][1]);
        y[i] = q + p[1][0];
        """,
        way="fibers (the statement 'int (*p)[2] = a;' is not understood)",
        want=lambda t: t.sum(t.l) + 3,
    ),
    *(
        solid(
            name,
            f"""
            threadgroup float a[64];
            for (uint k = l; k < 64; k += 32) a[k] = x[k];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            {declared}
            simdgroup_load(A, a, 8);
            simdgroup_multiply(C, A, B);
            simdgroup_store(C, a, 8);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = int(a[l]);
            """,
            header="""
            using Mat = simdgroup_float8x8;
            inline simdgroup_float8x8 twice() { return simdgroup_float8x8(2.0f); }
            """,
            way="fibers (a simdgroup_matrix is made from a value on its diagonal)",
            shapes=(Shape((32, 1, 1), (32, 1, 1)),),
            want=lambda t: 2 * X[t.l],
        )
        for name, declared in (
            ("matrix_of_one_value", "simdgroup_float8x8 A, C; simdgroup_float8x8 B(2.0f);"),
            ("matrix_of_one_value_among_others", "simdgroup_float8x8 A, C, B(2.0f);"),
            (
                "matrix_of_one_value_by_another_name",
                "using Named = simdgroup_float8x8; Named A, C; Named B(2.0f);",
            ),
            (
                "matrix_of_one_value_by_a_name_of_the_header",
                "simdgroup_float8x8 A, C, B = Mat(2.0f);",
            ),
            ("matrix_of_one_value_from_a_function", "simdgroup_float8x8 A, C, B = twice();"),
        )
    ),
]
