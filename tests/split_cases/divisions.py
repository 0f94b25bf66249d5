"""Divisions by what is the same in all lanes, which are prepared outside the loops."""

from __future__ import annotations

import numpy as np

from .model import S, X, flat, line, quotient, remainder, solid, whole

_S = int(S)
_V = (0xFFFFFF00 + 3 * np.arange(4000)) % 2**32  # numbers near the end of uint

CASES = [
    # A divisor that the statement itself declares is not the one outside.
    line(
        "divisor_of_an_array_that_a_block_hides",
        """
        const int n[2] = {3, 5};
        int r = simd_max(3);
        { int a, n[2]; n[0] = int(i % 7) + 1; n[1] = 2; a = 100 / n[0]; r += a; }
        y[i] = r + n[0];
        """,
        want=lambda t: 6 + 100 // (t.i % 7 + 1),
    ),
    line(
        "divisor_that_a_loop_over_an_array_hides",
        """
        int n = s, some[2] = {int(i % 7) + 1, 4};
        int r = simd_max(3);
        for (int n : some) r += 100 / n;
        y[i] = r + n;
        """,
        want=lambda t: 45 + 100 // (t.i % 7 + 1),
    ),
    # What divides x is the length of a row: the loop over lanes becomes one per row.
    flat(
        "row_where_the_position_is_hidden",
        """
        uint n = uint(s);
        uint acc = i / n + i % n;
        for (uint i = 0; i < 60; i += 13) acc += i / n + 100 * (i % n);
        y[i] = int(acc);
        """,
        want=lambda t: (
            t.i // 17 + t.i % 17 + sum(k // 17 + 100 * (k % 17) for k in range(0, 60, 13))
        ),
    ),
    whole(
        "row_of_a_position_without_a_name",
        """
        uint n = uint(s);
        uint acc = thread_position_in_grid.x / n * 1000 + thread_position_in_grid.x % n;
        y[thread_position_in_grid.x] = int(acc);
        """,
        way="flat",
        want=lambda t: t.i // 17 * 1000 + t.i % 17,
    ),
    whole(
        "row_of_a_signed_position",
        """
        int i = thread_position_in_grid.x;
        int acc = i / s * 1000 + i % s;
        y[i] = acc;
        """,
        way="flat",
        want=lambda t: t.i // 17 * 1000 + t.i % 17,
    ),
    flat(
        "row_with_returns_inside",
        """
        uint n = s;
        uint r = i / n, c = i % n;
        if (c == 3) return;
        if (r == 2) { y[i] = 5; return; }
        y[i] = int(r * 100 + c);
        """,
        want=lambda t: np.where(
            t.i % 17 == 3, 0, np.where(t.i // 17 == 2, 5, t.i // 17 * 100 + t.i % 17)
        ),
    ),
    flat(
        "rows_of_two_lengths",
        """
        uint n = s, m = s + 3;
        y[i] = int(i / n * 10000 + i % m * 100 + i % n + (i / m));
        """,
        want=lambda t: t.i // 17 * 10000 + t.i % 20 * 100 + t.i % 17 + t.i // 20,
    ),
    flat(
        "row_and_a_lambda_that_hides_the_position",
        """
        uint n = s;
        auto f = [&](uint i) { return i / n; };
        y[i] = int(f(i + 30) * 1000 + i / n + i % n);
        """,
        want=lambda t: (t.i + 30) // 17 * 1000 + t.i // 17 + t.i % 17,
    ),
    # Signs and types.
    flat(
        "divisor_that_is_negative",
        """
        int n = -s, v = int(i) - 40;
        y[i] = v / n * 1000 + v % n + x[i] / n + x[i] % n;
        """,
        want=lambda t: (
            quotient(t.i - 40, -_S) * 1000
            + remainder(t.i - 40, -_S)
            + quotient(X[t.i], -_S)
            + remainder(X[t.i], -_S)
        ),
    ),
    flat(
        "divisor_that_is_negative_of_unsigned",
        """
        int n = -s;
        y[i] = int((i - 50) / n) * 1000 + int((i - 50) % n) % 1000;
        """,
        want=lambda t: (
            (t.i - 50) % 2**32 // (2**32 - _S) * 1000
            + remainder(((t.i - 50) % 2**32 % (2**32 - _S)).astype(np.int32), 1000)
        ),
    ),
    flat(
        "divisor_that_is_short",
        """
        short n = short(s), m = -n;
        short v = short(x[i]);
        y[i] = v / n * 1000 + v % n + v / m + v % m;
        """,
        want=lambda t: quotient(X[t.i], _S) * 999 + remainder(X[t.i], _S) * 2,
    ),
    flat(
        "divisor_that_is_uchar",
        """
        uchar n = uchar(s);
        char v = char(x[i] % 100);
        y[i] = v / n * 1000 + v % n;
        """,
        want=lambda t: (
            quotient(remainder(X[t.i], 100), _S) * 1000 + remainder(remainder(X[t.i], 100), _S)
        ),
    ),
    flat(
        "divisor_that_is_long",
        "long n = s; y[i] = int(x[i] / n * 1000 + x[i] % n);",
        want=lambda t: quotient(X[t.i], _S) * 1000 + remainder(X[t.i], _S),
    ),
    flat(
        "divisors_near_the_end_of_uint",
        """
        uint n = uint(-s), m = 0x80000000u + uint(s) - 17;
        uint v = 0xffffff00u + i * 3;
        y[i] = int(v / n * 1000 + v % n % 1000 + v / m + v % m % 77);
        """,
        want=lambda t: (
            _V[t.i] // (2**32 - _S) * 1000
            + _V[t.i] % (2**32 - _S) % 1000
            + _V[t.i] // 2**31
            + _V[t.i] % 2**31 % 77
        ),
    ),
    flat(
        "divisors_one_and_minus_one",
        """
        uint n = s - 16;
        int m = 16 - s;
        uint v = 0xffffff00u + i * 3;
        y[i] = int(v / n % 1000 + v % n % 1000) + x[i] / m + x[i] % m;
        """,
        want=lambda t: _V[t.i] % 1000 - X[t.i],
    ),
    flat(
        "divisor_of_a_vector",
        """
        int n = s - 10;
        int2 v = int2(x[i], int(i)) / n;
        y[i] = v.x * 100 + v.y + (int2(x[i]) % n).x;
        """,
        want=lambda t: quotient(X[t.i], 7) * 100 + t.i // 7 + remainder(X[t.i], 7),
    ),
    flat(
        "divisor_that_changes",
        """
        int n = s - 14, acc = 0;
        acc += x[i] / n;
        n = n + 1;
        acc += x[i] / n;
        y[i] = acc;
        """,
        want=lambda t: quotient(X[t.i], 3) + quotient(X[t.i], 4),
    ),
    flat(
        "divisor_of_an_assignment",
        """
        int n = s - 14, acc = x[i];
        acc /= n;
        acc += 100;
        acc %= (n + 1);
        y[i] = acc;
        """,
        want=lambda t: (quotient(X[t.i], 3) + 100) % 4,
    ),
    # Where a prepared divisor is declared.
    line(
        "divisor_that_a_loop_counts",
        """
        int acc = 0;
        for (int k = 1; k < 5; ++k) acc += simd_sum(x[i] / k) + x[i] % k;
        y[i] = acc;
        """,
        want=lambda t: sum(t.sum(quotient(X[t.i], k)) + remainder(X[t.i], k) for k in range(1, 5)),
    ),
    solid(
        "divisor_in_an_operand",
        "uint n = threads_per_threadgroup.x; y[i] = simd_sum(x[(i + 1) % n]);",
        want=lambda t: t.sum(X[(t.i + 1) % t.width]),
    ),
    solid(
        "divisor_of_a_uniform_declaration_in_a_loop",
        """
        for (uint k = 0u; k < 2u; ++k) {
          int a = simd_max(700) / x[k];
          y[i] += a;
        }
        y[i] += 1;
        """,
        want=lambda t: quotient(700, X[0]) + quotient(700, X[1]) + 1,
    ),
    solid(
        "divisor_of_a_uniform_declaration_that_nobody_reads",
        """
        for (uint k = 0u; k < 2u; ++k) { int b = simd_max(700) / x[k]; }
        y[i] = 1;
        """,
        want=lambda t: 1,
    ),
    solid(
        "divisor_before_a_return_of_some_lanes",
        """
        uint n = threads_per_threadgroup.x;
        threadgroup uint t0[512];
        t0[l] = l;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = simd_sum(1);
        if (l > 3) { y[i] = x[t0[1u % n]]; return; }
        y[i] += simd_sum(1);
        """,
        way="threadgroups",
        want=lambda t: np.where(t.l > 3, X[1 % t.width], t.sum(1) + t.sum(t.l <= 3)),
    ),
]
