"""Loops whose bodies synchronise: their heads, their steps, and how lanes leave them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Threads, line, solid


def _rounds(t: Threads) -> Any:
    """Loops over k = i & 3, counting down, until no lane has k > 0; odd lanes only count."""
    m = t.i & 3
    return np.where(t.i & 1, 0, t.sum(t.i & 1 == 0)), m, t.max(m)


def _while_with_a_vote(t: Threads) -> Any:
    even, m, rounds = _rounds(t)
    return even * rounds * 100 + m - rounds


def _do_with_a_vote(t: Threads) -> Any:
    even, m, rounds = _rounds(t)
    return even * np.maximum(rounds, 1) * 100 + m - np.maximum(rounds, 1)


def _staircase(t: Threads, m: Any, rounds: int, each: Any = 1) -> Any:
    """Rounds 0, 1, … that a lane takes part in while the round is below its `m`."""
    return sum(np.where(m > k, t.sum(each, m > k), 0) for k in range(rounds))


def _switch(t: Threads) -> Any:
    m, n = t.i & 3, t.sum(1)
    c = t.sum((m == 0) | (m == 3))
    return np.choose(m, [n + 3 + 3 * c, n, n + 100, n + 300 + 3 * c])


def _halved(t: Threads) -> Any:
    best = t.max(t.i % 90)
    return sum(np.where(best >> k > 10, best >> (k + 1), 0) for k in range(7))


CASES = [
    line(
        "two_counters",
        """
        int a = 1, b = 2;
        for (int k = 0, j = 5; k < j; ++k, --j) { a += simd_sum(k); b += j; }
        y[i] = a * 100 + b;
        """,
        want=lambda t: (1 + t.sum(3)) * 100 + 14,
    ),
    solid(
        "continue_before_a_vote_in_the_head",
        """
        int k = int(i) & 3, acc = 0;
        while (simd_any(k > 0)) {
          --k;
          if (i & 1) continue;
          acc += simd_sum(1);
        }
        y[i] = acc * 100 + k;
        """,
        want=_while_with_a_vote,
    ),
    solid(
        "continue_before_a_vote_at_the_end",
        """
        int k = int(i) & 3, acc = 0;
        do {
          --k;
          if (i & 1) continue;
          acc += simd_sum(1);
        } while (simd_any(k > 0));
        y[i] = acc * 100 + k;
        """,
        want=_do_with_a_vote,
    ),
    line(
        "assignment_in_the_head",
        """
        int k, acc = 0, n = int(i) & 3;
        while ((k = n - 1) >= 0) { n = k; acc += simd_sum(1); }
        y[i] = acc * 10 + n;
        """,
        want=lambda t: _staircase(t, t.i & 3, 3) * 10,
    ),
    line(
        "do_once",
        """
        int acc = 0;
        do { acc += simd_sum(1); if (i & 1) break; acc += simd_sum(10); } while (false);
        y[i] = acc;
        """,
        want=lambda t: t.sum(1) + np.where(t.i & 1, 0, t.sum(10, t.i & 1 == 0)),
    ),
    line(
        "uniform_do_with_a_break_of_some_lanes",
        """
        int acc = 0, k = 0;
        do { acc += simd_sum(1); if (int(i & 3) == k) break; k++; } while (k < 3);
        y[i] = acc * 10 + k;
        """,
        want=lambda t: _staircase(t, (t.i & 3) + 1, 3) * 10 + (t.i & 3),
    ),
    line(
        "for_without_a_condition",
        """
        int acc = 0;
        for (int k = 0;; ++k) { if (k > int(i & 3)) break; acc += simd_sum(k); }
        y[i] = acc;
        """,
        want=lambda t: sum(np.where((t.i & 3) >= k, t.sum(k, (t.i & 3) >= k), 0) for k in range(4)),
    ),
    line(
        "for_without_a_head",
        """
        int acc = 0, k = 0;
        for (;;) { acc += simd_sum(k); if (++k == 3) break; }
        y[i] = acc;
        """,
        want=lambda t: t.sum(3),
    ),
    line(
        "continue_of_the_outer_loop_by_a_flag",
        """
        int acc = 0;
        for (int a = 0; a < 3; ++a) {
          bool skip = false;
          for (int b = 0; b < 3; ++b) {
            if (int(i & 3) == b) { skip = true; break; }
            acc += simd_sum(1);
          }
          if (skip) continue;
          acc += simd_sum(100);
        }
        y[i] = acc;
        """,
        want=lambda t: (
            3 * _staircase(t, t.i & 3, 3) + np.where(t.i & 3 == 3, 3 * t.sum(100, t.i & 3 == 3), 0)
        ),
    ),
    line(
        "return_from_nested_loops",
        """
        int acc = 0;
        for (int a = 0; a < 3; ++a) for (int b = 0; b < 3; ++b) {
          acc += simd_sum(1);
          y[i] = acc;
          if (int(i & 7) == a * 3 + b) return;
        }
        y[i] = acc + 1000;
        """,
        want=lambda t: _staircase(t, (t.i & 7) + 1, 8),
    ),
    line(
        "switch_with_jumps_of_the_loop",
        """
        int acc = simd_sum(1);
        for (int k = 0; k < 3; ++k) {
          switch (i & 3) {
            case 0: acc += 1; break;
            case 1: continue;
            case 2: if (k == 1) return;
            default: acc += 100;
          }
          acc += simd_sum(k);
          y[i] = acc;
        }
        y[i] = acc;
        """,
        want=_switch,
    ),
    solid(
        "uniform_counter_after_returns",
        """
        int acc = 0;
        for (int k = 0; k < 4; ++k) {
          if (int(l % 4) == k) return;
          acc += 10;
          acc += simd_sum(1);
          y[i] = acc;
        }
        """,
        want=lambda t: t.l % 4 * 10 + _staircase(t, t.l % 4, 3),
    ),
    solid(
        "uniform_counter_after_breaks",
        """
        int acc = 0, k = 0, m = 0;
        while (k < 4) {
          ++k;
          m = k * 2;
          if (int(l % 6) == k) break;
          acc += simd_sum(1);
        }
        y[i] = acc * 100 + k * 10 + m;
        """,
        want=lambda t: (
            _staircase(t, (t.l % 6 + 5) % 6, 4) * 100 + 12 * np.choose(t.l % 6, [4, 1, 2, 3, 4, 4])
        ),
    ),
    solid(
        "uniform_counter_after_continues",
        """
        int acc = 0, n = 0;
        for (int k = 0; k < 4; ++k) {
          n++;
          if (int(l % 3) == k) continue;
          n++;
          acc += simd_sum(1);
        }
        y[i] = acc * 100 + n;
        """,
        want=lambda t: (
            7 + 100 * sum(np.where(t.l % 3 == k, 0, t.sum(t.l % 3 != k)) for k in range(4))
        ),
    ),
    solid(
        "uniform_loop_in_a_loop_of_some_lanes",
        """
        int acc = 0;
        for (int a = 0; a < int(l % 3); ++a) {
          int t = 0;
          for (int k = 0; k < 3; ++k) { t += k; acc += simd_sum(t); }
          acc += t;
        }
        y[i] = acc;
        """,
        want=lambda t: _staircase(t, t.l % 3, 2, 4) + 3 * (t.l % 3),
    ),
    solid(
        "loop_on_the_result_of_an_operation",
        """
        int best = simd_max(int(i % 90));
        int acc = 0;
        while (best > 10) { best /= 2; acc += best; if (simd_sum(1) > 100) acc += 1; }
        y[i] = acc;
        """,
        want=_halved,
    ),
]
