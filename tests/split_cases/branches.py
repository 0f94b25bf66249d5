"""Branches and loops that do not synchronise themselves but stand under a head that does."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Threads, solid


def _counted(t: Threads) -> Any:
    m, rounds, u = t.l & 3, t.max(t.l & 3), t.i & 7
    return rounds * 2 * u + m * rounds - rounds * (rounds + 1) // 2


def _plain_loop(t: Threads) -> Any:
    v = t.i & 7
    found = sum(np.where(k * v + 1 <= 12, k * v + 1, 0) for k in (1, 2, 3))
    return np.where(v == 3, 0, found)


def _jumps(t: Threads) -> Any:
    r = np.zeros_like(t.i)
    left = np.zeros_like(t.i, bool)
    for k in range(4):
        taken = ~left & (t.sum(k) > 60)
        step = np.where(taken, t.l, 0)
        again = taken & (k == 2)
        r = np.where(again, 2 * (r + step), r + np.where(left, 0, step))
        left |= taken & (k == 3)
        r += ~left & ~again
    return r


def _nested_loops(t: Threads) -> Any:
    m = t.l & 3
    most = t.max(m)
    return sum(np.where(k < m, (most - k) * t.l + m - most + 1, 0) for k in range(3))


CASES = [
    solid(
        "if_branch",
        "if (simd_sum(1) > 0) { int t = int(i); t += 1; y[i] = t; }",
        want=lambda t: t.i + 1,
    ),
    solid(
        "else_branch",
        """
        if (simd_sum(1) < 0) y[i] = 1;
        else { int t = int(i); int u = t * 2; t += u; y[i] = t; }
        """,
        want=lambda t: t.i * 3,
    ),
    solid(
        "else_branch_with_a_loop",
        """
        int acc = 1;
        if (simd_sum(1) < -6) { } else {
          int norm = 0;
          do { norm++; acc *= 2; } while (norm < 2 && i != 190u);
        }
        y[i] = acc;
        """,
        want=lambda t: np.where(t.i == 190, 2, 4),
    ),
    solid(
        "else_if_branch",
        """
        if (l > 500) { int t = l; y[i] = t; }
        else if (simd_sum(int(l & 1)) > 2) { int t = int(i); const int u = t; y[i] = t + u; }
        else { uint t = l; t++; y[i] = t; }
        """,
        want=lambda t: np.where(t.sum(t.l & 1) > 2, 2 * t.i, t.l + 1),
    ),
    solid(
        "nested_branch",
        """
        if (simd_sum(1) > 0) {
          if (l & 1) { int t = l; t++; y[i] = t; } else { int t = l * 2; y[i] = t; }
          int u = l;
          u--;
          y[i] += u;
        }
        """,
        want=lambda t: np.where(t.l & 1, t.l + 1, t.l * 2) + t.l - 1,
    ),
    solid(
        "blocks",
        "{ int t = l; t++; y[i] = t; { int t = simd_sum(2); int u = t + l; u++; y[i] += u; } }",
        want=lambda t: 2 * t.l + 2 + t.sum(2),
    ),
    solid(
        "branch_beside_an_operation",
        "if (l & 1) { int t = l; t++; y[i] = t; } y[i] += simd_sum(1);",
        want=lambda t: np.where(t.l & 1, t.l + 1, 0) + t.sum(1),
    ),
    solid(
        "array_in_a_branch",
        """
        if (simd_sum(1) > 0) {
          int t[3] = {1, int(i), 3};
          t[l % 3] += 5;
          y[i] = t[0] + t[1] * 3 + t[2] * 100;
        }
        """,
        want=lambda t: 301 + 3 * t.i + 5 * np.choose(t.l % 3, [1, 3, 100]),
    ),
    solid(
        "reference_in_a_branch",
        """
        int a = l;
        if (simd_sum(1) > 0) { thread int& t = a; t += 5; y[i] = t; }
        y[i] += a;
        """,
        want=lambda t: 2 * (t.l + 5),
    ),
    solid(
        "pointer_in_a_branch",
        """
        int a[2] = {int(l), 1};
        if (simd_sum(1) > 0) { thread int* p = a + (l & 1); *p += 5; p = a; y[i] = *p; }
        y[i] += a[1];
        """,
        want=lambda t: t.l + 6,
    ),
    solid(
        "lambda_in_a_branch",
        """
        int a = l;
        if (simd_sum(1) > 0) {
          auto f = [&](int v) { a += v; return a; };
          y[i] = f(3);
          y[i] += f(4);
        }
        y[i] += a;
        """,
        want=lambda t: 3 * t.l + 17,
    ),
    solid(
        "constants_in_branches",
        """
        constexpr int K = 2;
        if constexpr (K == 2) { int t = l; t++; y[i] = t; }
        if (simd_sum(1) > 0) { constexpr int M = 3; int t = l * M; t++; y[i] += t; }
        """,
        want=lambda t: 4 * t.l + 2,
    ),
    solid(
        "uniform_variables_in_a_branch",
        """
        if (simd_sum(1) > 0) {
          int q = 3;
          q += 2;
          int r = q;
          if (l & 1) r++;
          y[i] = q * 10 + r;
        }
        """,
        want=lambda t: 55 + (t.l & 1),
    ),
    solid(
        "switch_in_a_branch",
        """
        if (simd_sum(1) > 0) {
          int q = l & 3;
          switch (q) { case 1: { int t = l; t++; y[i] = t; break; } default: y[i] = q; }
        }
        """,
        want=lambda t: np.where(t.l & 3 == 1, t.l + 1, t.l & 3),
    ),
    solid(
        "loop_in_a_branch",
        """
        if (simd_sum(1) > 0) {
          for (int k = 0; k < int(l & 3); ++k) { int t = k; t += l; y[i] += t; }
        }
        """,
        want=lambda t: (t.l & 3) * t.l + (t.l & 3) * ((t.l & 3) - 1) // 2,
    ),
    solid(
        "threadgroup_memory_in_a_branch",
        """
        threadgroup int t[512];
        if (threadgroup_position_in_grid.x == 0) {
          t[l] = l;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          int u = t[0] + int(l);
          u++;
          y[i] = u;
        } else { int u = int(l); u++; y[i] = u; }
        """,
        way="threadgroups",
        want=lambda t: t.l + 1,
    ),
    solid(
        "returns_in_branches",
        """
        if (simd_sum(1) > 40) return;
        if (simd_sum(int(l & 1)) > 3) { int t = l; if (t & 1) return; t++; y[i] = t; }
        y[i] += simd_sum(1);
        """,
        want=lambda t: np.where(
            t.sum(t.l & 1) > 3,
            np.where(t.l & 1, 0, t.l + 1 + t.sum(t.l & 1 == 0)),
            t.sum(1),
        ),
    ),
    solid(
        "uniform_return_in_a_branch",
        """
        int r = simd_sum(1);
        if (threadgroup_position_in_grid.x == 1) { int t = l; t++; y[i] = t; return; }
        y[i] = r;
        """,
        want=lambda t: np.where(t.group[0] == 1, t.l + 1, t.sum(1)),
    ),
    solid(
        "uniform_jumps_in_branches",
        """
        int r = 0;
        for (int k = 0; k < 4; ++k) {
          if (simd_sum(k) > 60) {
            int t = l;
            r += t;
            if (k == 3) break;
            if (k == 2) { int u = r; r += u; continue; }
          }
          r++;
        }
        y[i] = r;
        """,
        want=_jumps,
    ),
    solid(
        "uniform_jumps_beside_an_operation",
        """
        int r = 0;
        for (int k = 0; k < 4; ++k) {
          if (k == 2) { int t = l; r += t; continue; }
          if (k == 3) { int t = r; t++; r = t; break; }
          r += simd_sum(k);
        }
        y[i] = r;
        """,
        want=lambda t: t.sum(1) + t.l + 1,
    ),
    # Loops whose heads synchronise: their steps run once per round, not once per lane.
    solid(
        "while_with_a_vote",
        """
        int k = l & 3;
        while (simd_any(k > 0)) {
          int t = int(i) & 7;
          k--;
          y[i] += t;
          uint u = t;
          u += k;
          y[i] += u;
        }
        """,
        want=_counted,
    ),
    solid(
        "for_with_a_vote",
        """
        int acc = 0;
        for (int k = 0; simd_any(k < int(l & 3)); ++k) {
          int t = int(i) & 7;
          acc += t;
          int u = acc;
          u++;
          y[i] += u;
        }
        """,
        want=lambda t: (t.i & 7) * (t.max(t.l & 3) * (t.max(t.l & 3) + 1) // 2) + t.max(t.l & 3),
    ),
    solid(
        "for_with_a_vote_and_a_plain_body",
        """
        int acc = 0;
        for (int k = 0; simd_any(k < int(l & 3)); ++k) acc += 1;
        y[i] = acc;
        """,
        want=lambda t: t.max(t.l & 3),
    ),
    solid(
        "for_with_a_reduction",
        """
        int acc = 0;
        for (int k = 0; k < simd_max(3); ++k) {
          int t = int(i) & 7;
          acc += t;
          if (t == 3) continue;
          int u = acc;
          u++;
          if (u > 12) break;
          y[i] += u;
        }
        """,
        want=_plain_loop,
    ),
    solid(
        "do_with_a_vote",
        """
        int k = l & 3;
        do {
          int t = int(i) & 7;
          k--;
          y[i] += t;
          int u = t;
          if (u == 2) continue;
          y[i]++;
        } while (simd_any(k > 0));
        """,
        want=lambda t: np.maximum(t.max(t.l & 3), 1) * ((t.i & 7) + (t.i & 7 != 2)),
    ),
    solid(
        "while_with_a_vote_in_a_while",
        """
        int a = l & 3;
        while (a > 0) {
          int b = a;
          while (simd_any(b > 0)) { int t = l; b--; y[i] += t; }
          a--;
          int c = b;
          c++;
          y[i] += c;
        }
        """,
        want=_nested_loops,
    ),
]
