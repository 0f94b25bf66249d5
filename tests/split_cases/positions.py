"""Positions: which parts of them are the same in all lanes of a simdgroup or threadgroup."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import WIDE, Threads, X, quotient, solid, whole


def _butterfly(t: Threads) -> Any:
    v = X[t.i].astype(float)
    for d in (16, 8, 4, 2, 1):
        v = v + t.shuffle(v, t.lane ^ d)
    return v


def _masks_on_y(t: Threads) -> Any:
    in_row, even = t.grid[1] == 1, t.threadgroup[1] % 2 == 0
    rest = np.where(even, t.sum(10, ~in_row & even), t.max(t.l, ~in_row & ~even))
    return np.where(in_row, t.sum(1, in_row), rest + t.sum(1000, ~in_row))


CASES = [
    whole(
        "flat_position_of_which_only_y_is_used",
        """
        uint i = thread_position_in_grid.x;
        int a = int(thread_position_in_threadgroup.y);
        y[i] = a + 1;
        """,
        way="flat",
        want=lambda t: 1,
    ),
    whole(
        "flat_positions_in_a_threadgroup",
        """
        uint3 g = thread_position_in_grid, p = thread_position_in_threadgroup;
        uint i = (g.z * threads_per_grid.y + g.y) * threads_per_grid.x + g.x;
        int a = int(p.y) + 10 * int(g.z), b = int(p.x) + 10 * int(threadgroup_position_in_grid.y);
        y[i] = a * 1000 + b;
        """,
        way="flat",
        shapes=WIDE,
        want=lambda t: (
            (t.threadgroup[1] + 10 * t.grid[2]) * 1000 + t.threadgroup[0] + 10 * t.group[1]
        ),
    ),
    solid(
        "y_and_z",
        """
        uint3 p = thread_position_in_grid;
        uint r = p.y * 10 + p.z;
        int a = x[r];
        int q = simd_sum(a);
        if (p.y > 0) q += simd_max(int(p.x));
        y[i] = q + int(r);
        """,
        want=lambda t: (
            t.sum(X[t.grid[1] * 10 + t.grid[2]])
            + np.where(t.grid[1] > 0, t.max(t.grid[0], t.grid[1] > 0), 0)
            + t.grid[1] * 10
            + t.grid[2]
        ),
    ),
    solid(
        "swizzles_of_positions",
        """
        uint2 p = thread_position_in_grid.xy;
        uint2 g = threadgroup_position_in_grid.xy;
        uint r = p.y + g.x * 3;
        int q = simd_sum(int(p.y));
        y[i] = q + int(r) + int(thread_position_in_threadgroup.yz.x);
        """,
        want=lambda t: t.sum(t.grid[1]) + t.grid[1] + t.group[0] * 3 + t.threadgroup[1],
    ),
    solid(
        "positions_by_index",
        """
        uint r = thread_position_in_grid[1] + thread_position_in_threadgroup[0];
        int q = simd_sum(int(r));
        y[i] = q + int(r);
        """,
        want=lambda t: t.sum(t.grid[1] + t.threadgroup[0]) + t.grid[1] + t.threadgroup[0],
    ),
    solid(
        "copies_of_positions_that_are_written",
        """
        uint3 p = thread_position_in_threadgroup;
        auto g = thread_position_in_grid;
        uint r = p.y, c = g.x;
        p.y += 1;
        int q = simd_sum(int(p.y) * int(c));
        if (p.y == 1) q += simd_sum(1);
        y[i] = q + int(r);
        """,
        want=lambda t: (
            t.sum((t.threadgroup[1] + 1) * t.grid[0])
            + np.where(t.threadgroup[1] == 0, t.sum(t.threadgroup[1] == 0), 0)
            + t.threadgroup[1]
        ),
    ),
    solid(
        "branches_on_y",
        """
        if (thread_position_in_grid.y == 1) { y[i] = simd_sum(1); return; }
        if (thread_position_in_threadgroup.y % 2 == 0) y[i] = simd_sum(10);
        else y[i] = simd_max(int(l));
        y[i] += simd_sum(1000);
        """,
        want=_masks_on_y,
    ),
    solid(
        "index_of_the_simdgroup",
        """
        uint g = simdgroup_index_in_threadgroup;
        int q = 0;
        if (g == 1) q = simd_sum(1);
        else if (g == 0) { q = simd_max(int(l)); if (l > 3) q += 5; }
        for (uint k = 0; k < g + 1; ++k) q += simd_sum(int(k));
        y[i] = q;
        """,
        want=lambda t: (
            np.select(
                [t.simdgroup == 1, t.simdgroup == 0], [t.sum(1), t.max(t.l) + 5 * (t.l > 3)], 0
            )
            + t.sum(t.simdgroup * (t.simdgroup + 1) // 2)
        ),
    ),
    # A position divided by 32 tells the simdgroup only where simdgroups lie in one row and start
    # at multiples of 32.
    solid(
        "x_divided_by_32",
        "uint g = thread_position_in_grid.x / 32; y[i] = int(g) * 100 + simd_sum(1);",
        shapes=WIDE,
        want=lambda t: t.grid[0] // 32 * 100 + t.sum(1),
    ),
    solid(
        "x_in_the_threadgroup_divided_by_32",
        "uint g = thread_position_in_threadgroup.x / 32u; y[i] = int(g) * 100 + simd_sum(1);",
        shapes=WIDE,
        want=lambda t: t.threadgroup[0] // 32 * 100 + t.sum(1),
    ),
    solid(
        "x_shifted_by_5",
        """
        uint x0 = thread_position_in_grid.x;
        int g = x0 >> 5;
        if (g == 2) y[i] = simd_sum(1); else y[i] = simd_max(g);
        """,
        shapes=WIDE,
        want=lambda t: np.where(
            t.grid[0] // 32 == 2,
            t.sum(t.grid[0] // 32 == 2),
            t.max(t.grid[0] // 32, t.grid[0] // 32 != 2),
        ),
    ),
    solid(
        "index_divided_by_64",
        "int g = thread_index_in_threadgroup / 64; y[i] = g * 100 + simd_sum(g);",
        shapes=WIDE,
        want=lambda t: t.l // 64 * 100 + t.sum(t.l // 64),
    ),
    solid(
        "index_as_float_divided_by_32",
        """
        float f = thread_index_in_threadgroup;
        float g = f / 32;
        y[i] = int(g * 320) + simd_sum(1);
        """,
        shapes=WIDE,
        want=lambda t: t.l * 10 + t.sum(1),
    ),
    solid(
        "index_as_half_divided_by_32",
        """
        half f = thread_index_in_threadgroup;
        half g = f / 32;
        y[i] = int(g * 320) + simd_sum(1);
        """,
        shapes=WIDE,
        want=lambda t: ((t.l / 32).astype(np.float16) * np.float16(320)).astype(int) + t.sum(1),
    ),
    solid(
        "index_as_char_divided_by_32",
        "char f = thread_index_in_threadgroup; int g = f / 32; y[i] = g + simd_sum(1);",
        shapes=WIDE,
        want=lambda t: quotient(t.l.astype(np.int8), 32) + t.sum(1),
    ),
    solid(
        "index_as_uchar_divided_by_32",
        "uchar f = thread_index_in_threadgroup; int g = f / 32; y[i] = g + simd_sum(1);",
        shapes=WIDE,
        want=lambda t: t.l % 256 // 32 + t.sum(1),
    ),
    solid(
        "index_as_bool_divided_by_32",
        "bool f = thread_index_in_threadgroup; int g = f / 32; y[i] = g + simd_sum(1) + (f >> 5);",
        shapes=WIDE,
        want=lambda t: t.sum(1),
    ),
    solid(
        "index_that_is_written_divided_by_32",
        """
        uint k = thread_index_in_threadgroup;
        k += l & 1;
        uint g = k / 32;
        y[i] = int(g) * 100 + simd_sum(1);
        """,
        shapes=WIDE,
        want=lambda t: (t.l + (t.l & 1)) // 32 * 100 + t.sum(1),
    ),
    solid(
        "index_that_a_reference_writes_divided_by_32",
        """
        uint k = thread_index_in_threadgroup;
        thread uint& r = k;
        r += (l & 1) * 31;
        uint g = k / 32;
        y[i] = int(g) * 100 + simd_sum(1);
        """,
        shapes=WIDE,
        want=lambda t: (t.l + (t.l & 1) * 31) // 32 * 100 + t.sum(1),
    ),
    solid(
        "shuffle_xor_of_every_distance",
        """
        int v = x[i];
        y[i] = simd_shuffle_xor(v, 1) + simd_shuffle_xor(v, 2) * 3 + simd_shuffle_xor(v, 4) * 5
            + simd_shuffle_xor(v, 8) * 7 + simd_shuffle_xor(v, 16) * 11 + simd_shuffle_xor(v, 31)
            + simd_shuffle_xor(v, ushort(l & 31));
        """,
        shapes=WIDE,
        want=lambda t: sum(
            weight * t.shuffle(X[t.i], t.lane ^ d)
            for d, weight in ((1, 1), (2, 3), (4, 5), (8, 7), (16, 11), (31, 1), (t.lane, 1))
        ),
    ),
    solid(
        "butterfly_of_shuffles",
        """
        float v = x[i];
        for (ushort d = 16; d > 0; d >>= 1) v += simd_shuffle_xor(v, d);
        y[i] = int(v);
        """,
        shapes=WIDE,
        want=_butterfly,
    ),
]
