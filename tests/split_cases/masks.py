"""Lanes that go different ways, and which of them each operation sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Threads, X, solid


def _chain(t: Threads) -> Any:
    v = X[t.i]
    high, upper, low = v > 50, (v > 20) & (v <= 50), v < -50
    middle = ~high & ~upper & ~low
    odd = v + t.sum(3, middle)
    left = upper | (middle & (odd & 1 == 0))
    last = t.sum(1000, left)
    return np.select(
        [high, upper, left],
        [t.sum(1, high), t.sum(2, upper) + last + v, last + odd],
        0,
    )


def _branches(t: Threads) -> Any:
    a = np.where(t.l & 1, 2 + t.sum(t.l & 1), 1)
    return a + t.max(a)


CASES = [
    solid(
        "broadcast_from_a_lane_that_returned",
        """
        if (i == 2) return;
        int v = simd_broadcast(int(i), 2);
        int w = v + 1;
        y[i] = w + simd_min(0);
        """,
        want=lambda t: np.where(t.i == 2, 0, t.shuffle(t.i, 2, t.i != 2) + 1),
    ),
    # Seen without optimisation only: the bytes of lanes that take no part are never written.
    solid(
        "votes_of_some_lanes",
        """
        uint lane = thread_index_in_simdgroup;
        if (bool(lane)) y[i] = int(simd_any(FLAG));
        if (bool(lane)) y[i] += 2 * int(simd_all(lane > 0)) + 4 * int(simd_any(lane == 0));
        """,
        template=(("FLAG", False),),
        optimise=0,
        want=lambda t: np.where(t.lane > 0, 2, 0),
    ),
    solid(
        "chain_of_returns",
        """
        int v = x[i];
        if (v > 50) { y[i] = simd_sum(1); return; }
        else if (v > 20) { y[i] = simd_sum(2); }
        else if (v < -50) return;
        else { v += simd_sum(3); if (v & 1) return; }
        y[i] += simd_sum(1000) + v;
        """,
        want=_chain,
    ),
    solid(
        "votes_and_jumps_in_an_endless_loop",
        """
        int v = x[i] & 15, r = 0;
        while (true) {
          if (simd_all(v <= 0)) break;
          if (v == 7) { v = 3; continue; }
          if (v <= 0) continue;
          v -= 2;
          r += simd_sum(1);
          if (r > 150) break;
        }
        y[i] = r * 10 + v;
        """,
    ),
    solid(
        "nested_loops_of_some_lanes",
        """
        int r = 0;
        for (int a = 0; a < (x[i] & 3); ++a) {
          for (int b = a; b < (int(l) & 3); ++b) {
            if (b == 2 && a == 1) break;
            r += simd_sum(1);
            if ((r & 7) == 3) continue;
            r += simd_max(b);
          }
          if (r > 100) return;
          r += simd_min(a + 1);
          y[i] = r;
        }
        y[i] = r + 5000;
        """,
    ),
    solid(
        "uniform_variable_assigned_by_some_lanes",
        """
        int a = 1;
        if (l & 1) { int b = 2; b += simd_sum(1); a = b; }
        int c = a + simd_max(a);
        y[i] = c;
        """,
        want=_branches,
    ),
    solid(
        "variable_assigned_in_both_branches",
        """
        int a;
        if (l & 1) a = simd_sum(1); else a = simd_sum(2);
        y[i] = a;
        int b;
        if (s > 3) b = simd_sum(1); else b = 7;
        y[i] += b * 1000;
        """,
        want=lambda t: np.where(t.l & 1, t.sum(t.l & 1), t.sum(2, t.l & 1 == 0)) + t.sum(1000),
    ),
    solid(
        "operations_that_ask_lanes_that_are_not_there",
        """
        int v = x[i];
        if (l % 3 == 1) {
          y[i] = simd_shuffle(v, ushort((l + 1) % 32)) + simd_shuffle_up(v, 1) * 3
              + simd_broadcast(v, 0) * 5 + simd_shuffle_rotate_down(v, 7);
        } else {
          y[i] = simd_shuffle_xor(v, 2) + simd_shuffle_and_fill_up(v, 7, 3)
              + simd_broadcast_first(v) + (simd_is_first() ? 1000 : 0);
        }
        """,
    ),
]
