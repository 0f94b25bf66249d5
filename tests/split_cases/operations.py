"""Operations of a simdgroup: their operands, their results, and where they stand."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Threads, X, remainder, solid


def _votes(t: Threads) -> Any:
    v = X[t.i] > 0
    n = t.sum(v)
    return n + t.sum(t.l % 3 == 0) + 100 * (n > 0) + np.where(v, 1000 * n, 0)


def _vectors(t: Threads) -> Any:
    v = X[t.i]
    sums = t.sum(v) + t.sum(t.l) + t.max(v) + t.max(t.l)
    return sums + 3 * t.shuffle(v, t.lane ^ 1) + t.shuffle(t.l, t.lane ^ 1)


def _narrow(t: Threads) -> Any:
    u = (t.l * 100) % 2**16
    found = t.sum(t.l % 8) + t.sum(t.l % 9).astype(np.int8) + t.sum(X[t.i]) + t.sum(u) % 2**16
    found = found + t.max(t.l % 8) + t.prefix(u) % 2**16
    return found + 1000 * t.shuffle(t.l % 3 == 0, t.lane + 1)


def _quads(t: Threads) -> Any:
    v, some = X[t.i], t.l % 3 != 1
    found = t.sum(v, by=t.of_quad) + t.max(v, by=t.of_quad) * 3 + t.shuffle(v, t.lane ^ 1)
    found = found + t.shuffle(v, t.lane // 4 * 4) + t.prefix(v, by=t.of_quad)
    return found + np.where(some, t.sum(10000, some, by=t.of_quad), 0)


def _conditions(t: Threads) -> Any:
    v = X[t.i]
    r = np.select([t.sum(v) > 0, t.max(v) > 90], [1, 2], t.min(v))
    return np.maximum(r + 6, 3) + np.where(t.sum(1) % 4 == 0, 100, 200)


def _compound(t: Threads) -> Any:
    n, weights = t.sum(1), np.array([1, 3, 5, 0])
    r = remainder(3 + n - t.max(t.l & 3), 3 * n)
    found = r + (10 ^ t.fold(np.bitwise_xor, t.l)) + 4 * n + 22
    return found + 2 * weights[n % 4] - n * weights[t.l % 4]


_CONDITIONS = """
int r = 0;
if (simd_sum(x[i]) > 0) r = 1;
else if (simd_max(x[i]) > 90) r = 2;
else r = simd_min(x[i]);
for (int k = simd_min(2); k < simd_max(4); ++k) r += k;
do r++; while (simd_any(r < 3) && r < 50);
"""

CASES = [
    solid(
        "ballots",
        """
        simd_vote v = simd_ballot(x[i] > 0);
        uint b = uint(simd_vote::vote_t(v));
        ulong w = (ulong)simd_vote::vote_t(simd_ballot(l % 3 == 0));
        int r = popcount(b) + int(popcount(uint(w)));
        if (v.any()) r += 100;
        if (x[i] > 0) {
          r += 1000 * popcount(uint(simd_vote::vote_t(simd_active_threads_mask())));
        }
        y[i] = r;
        """,
        want=_votes,
    ),
    solid(
        "vectors",
        """
        float2 v = float2(x[i], l);
        float2 sums = simd_sum(v);
        float4 m = simd_max(float4(v, v.yx));
        int2 z = simd_shuffle_xor(int2(v), 1);
        y[i] = int(sums.x + sums.y + m.x + m.z) + z.x * 3 + z.y;
        """,
        want=_vectors,
    ),
    solid(
        "halves_chars_and_longs",
        """
        half h = half(l % 8);
        char c = char(l % 9);
        long g = long(x[i]) * 100000;
        ushort u = ushort(l * 100);
        y[i] = int(simd_sum(h)) + simd_sum(c) + int(simd_sum(g) / 100000) + simd_sum(u)
            + int(simd_max(h)) + simd_prefix_inclusive_sum(u);
        bool b = simd_shuffle_down(l % 3 == 0, 1);
        y[i] += b ? 1000 : 0;
        """,
        want=_narrow,
    ),
    solid(
        "quadgroups",
        """
        int v = x[i];
        y[i] = quad_sum(v) + quad_max(v) * 3 + quad_shuffle_xor(v, 1) + quad_broadcast(v, 0)
            + quad_prefix_inclusive_sum(v);
        if (l % 3 != 1) y[i] += quad_sum(1) * 10000;
        """,
        want=_quads,
    ),
    solid(
        "operations_of_operations",
        """
        y[i] = simd_sum(simd_shuffle(x[i], ushort(simd_max(int(l)) & 7)))
            + simd_max(simd_min(x[i]) + int(l))
            - simd_prefix_exclusive_sum(simd_shuffle_xor(1, 3));
        """,
        want=lambda t: (
            t.sum(t.shuffle(X[t.i], t.max(t.l) & 7)) + t.min(X[t.i]) + t.max(t.l) - t.lane
        ),
    ),
    solid(
        "operations_in_conditions",
        _CONDITIONS
        + """
int c = simd_sum(1) & 3;
switch (c) { case 0: r += 100; break; default: r += 200; }
y[i] = r;
""",
        want=_conditions,
    ),
    solid(
        "operations_in_conditions_and_a_switch",
        _CONDITIONS
        + """
switch (simd_sum(1) & 3) { case 0: r += 100; break; default: r += 200; }
y[i] = r;
""",
        way="fibers (a switch holds a synchronising call)",
        want=_conditions,
    ),
    solid(
        "assignments_with_operations",
        """
        int r = 3;
        uint u = 5;
        float f = 2;
        r += simd_sum(1);
        r -= simd_max(int(l & 3));
        u <<= simd_min(1);
        u ^= simd_xor(l);
        f *= simd_sum(2.0f);
        r %= simd_sum(3);
        int a[4] = {1, 2, 3, 4};
        a[simd_sum(1) & 3] += simd_max(2);
        a[l & 3] -= simd_sum(1);
        y[i] = r + int(u) + int(f) + a[0] + a[1] * 3 + a[2] * 5;
        """,
        want=_compound,
    ),
]
