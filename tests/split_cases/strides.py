"""Loops in which lanes walk an array together: how they start and end, and who takes part."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import SOLIDS, Shape, Threads, X, line, solid, whole

_FEW = (Shape((100, 1, 1), (64, 1, 1)), Shape((8, 1, 1), (8, 1, 1)))


def _walk(first: Any, bound: int, step: Any, value: Any, where: Any = True) -> Any:
    """The sum of ``value(k)`` over the rounds of each thread, k counting up from `first`."""
    k, total = np.asarray(first, np.int64).copy(), np.zeros(np.shape(first), np.int64)
    while (left := (k < bound) & where).any():
        total += np.where(left, value(np.where(left, k, 0)), 0)
        k = np.where(left, k + step, k)
    return total


def _x(k: Any) -> Any:
    return X[k]


def _ends(t: Threads) -> Any:
    total = _walk(t.lane, 500, 32, lambda k: X[k] * (k & 3))
    total += _walk(t.lane + 3, 117, 17, _x) + _walk(t.lane, 17, 32, lambda k: k + 1)
    return t.sum(total)


def _wraps(t: Threads) -> Any:
    total = _walk(t.lane - 5, 200, 32, lambda k: X[k + 5] + k)
    total += np.where(t.lane < 5, 0, _walk(t.lane - 5, 200, 32, _x))
    return t.sum(total + _walk(t.lane, 60, 32, lambda k: X[np.maximum(k - 40, 0)] * (k >= 40)))


def _masked(t: Threads) -> Any:
    left, odd = t.lane % 5 != 0, t.lane % 3 == 1
    total = _walk(t.lane, 300, 32, _x, left & odd)
    every = t.sum(_walk(t.lane, 70, 32, lambda k: k * 3, left), left)
    return np.where(left, every + np.where(odd, t.sum(total, left & odd), 0), 0)


def _group(t: Threads) -> Any:
    x = t.threadgroup[0]
    total = _walk(x, 333, t.width, _x) + 2 * _walk(x + 7, 300, t.width, _x)
    last = _walk(x, 150, t.width, lambda k: np.where(k + t.width >= 150, k, 0))
    return t.sum(total + last, by=t.of_group)


def _grouped(t: Threads) -> Any:
    return t.sum(3 * _walk(t.l, 200, t.count, _x) + _nested(t), by=t.of_group)


def _nested(t: Threads) -> Any:
    total = np.zeros(len(t.i), np.int64)
    for start in range(3):
        total += _walk(t.l, 40 * start, t.count, lambda k, s=start: X[k] + s)
    return total + _walk(t.l, 90, t.count, lambda k: _walk(t.l, 100, t.count, lambda j: X[j] * k))


def _at_once(t: Threads) -> Any:
    part = t.sum(t.i)  # of each simdgroup
    first = t.fold(np.add, np.where(t.l == 0, part, 0), by=t.of_group)
    total = t.fold(np.add, np.where(t.lane == 0, part, 0), by=t.of_group)
    extra = t.fold(np.add, np.where(t.lane == 3, part % 7, 0), by=t.of_group)
    return total * 3 + extra + first * 2 + np.where(first > 50, first, 1)


def _planes(t: Threads) -> Any:
    x, y, _ = t.grid
    width = t.grid[0].max() + 1
    base = y * width
    return _x(base + x) + np.where(x >= 2, _x(np.maximum(base + x - 2, 0)), 0) + _x(x + 5) * (y + 1)


CASES = [
    line(
        "shared_reads_at_once",
        """
        threadgroup int part[32], extra[32];
        uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
        int v = simd_sum(int(i));
        if (lane == 0) part[group] = v;
        if (thread_index_in_simdgroup == 3u) extra[group] = v % 7;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int total = 0, more = 1;
        for (uint k = 0; k < simdgroups_per_threadgroup; k++) {
          total += part[k] * 3;
          total += extra[k];
        }
        const int first = part[0];
        if (first > 50) more = part[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        part[group] = 2 * (first + int(group));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int again = part[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        part[group] = 0;
        y[i] = total + again + more;
        """,
        way="threadgroups",
        shapes=(*_FEW, Shape((300, 1, 1), (256, 1, 1))),
        want=_at_once,
    ),
    whole(
        "flat_planes",
        """
        uint c = thread_position_in_grid.x, r = thread_position_in_grid.y;
        uint width = threads_per_grid.x, base = r * width;
        uint at = base + c;
        int v = x[at];
        if (c >= 2) v += x[base + c - 2u];
        { uint c = thread_position_in_grid.x + 5; v += x[c] * int(r + 1); }
        y[thread_position_in_grid.z * threads_per_grid.y * width + at] = v;
        """,
        way="flat",
        shapes=(Shape((70, 2, 1), (32, 2, 1)), Shape((20, 3, 2), (20, 3, 2))),
        want=_planes,
    ),
    line(
        "stride_ends",
        """
        uint lane = thread_index_in_simdgroup;
        int acc = 0, none = s - 20;
        for (uint k = lane; k < 500; k += 32) { int v = x[k]; acc += v * int(k & 3); }
        for (int k = int(lane) + 3; 100 + s > k; k = k + s) acc += x[k];
        for (size_t k = lane; k < size_t(s); k += 32u) acc += int(k) + 1;
        for (int k = int(lane); k < none; k += 32) acc += 1000;
        y[i] = simd_sum(acc);
        """,
        shapes=_FEW,
        want=_ends,
    ),
    line(
        "stride_wraps",
        """
        uint lane = thread_index_in_simdgroup;
        int acc = 0;
        for (int k = int(lane) - 5; k < 200; k += 32) acc += x[k + 5] + k;
        for (uint k = lane - 5u; k < 200u; k += 32) acc += x[k];
        for (uint ways_stride_wraps = lane; ways_stride_wraps < 60; ways_stride_wraps += 32)
          if (ways_stride_wraps >= 40) acc += x[ways_stride_wraps - 40];  // named as the kernel is
        y[i] = simd_sum(acc);
        """,
        shapes=_FEW,
        want=_wraps,
    ),
    line(
        "stride_masked",
        """
        uint lane = thread_index_in_simdgroup;
        if (lane % 5 == 0) return;
        int acc = 0, every = 0;
        if (lane % 3 == 1) {
          for (uint k = lane; k < 300; k += 32) acc += x[k];
          acc = simd_sum(acc);
        }
        for (uint k = lane; k < 70; k += 32) every += int(k) * 3;
        y[i] = simd_sum(every) + acc;
        """,
        shapes=_FEW,
        want=_masked,
    ),
    line(
        "stride_of_threadgroups",
        """
        threadgroup int part[32];
        uint tid = thread_position_in_threadgroup.x, n = threads_per_threadgroup.x;
        int acc = 0, last = 0;
        for (uint k = tid; k < 333; k += n) {
          uint at = k;
          if (x[at] > 0) { acc += x[at]; continue; }
          acc += x[k];
        }
        for (uint k = tid; k < 293; k += n) { uint at = k + 7; int both[2] = {x[at], x[at]};
          acc += both[0] + both[1]; }
        for (uint k = tid; k < 150; k += n) last = int(k);
        if (tid >= 150) last = 0;
        acc = simd_sum(acc + last);
        if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = acc;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int total = 0;
        for (uint k = 0; k < simdgroups_per_threadgroup; ++k) total += part[k];
        y[i] = total;
        """,
        way="threadgroups",
        shapes=(*_FEW, Shape((300, 1, 1), (256, 1, 1))),
        want=_group,
    ),
    solid(
        "stride_in_loops",
        """
        threadgroup int part[512];
        uint n = 1;
        n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
        int acc = 0;
        for (int start = 0; start < 3; ++start)
          for (uint k = l; k < uint(40 * start); k += n) acc += x[k] + start;
        for (uint k = l; k < 90; k += n)
          for (uint j = l; j < 100; j += n) acc += x[j] * int(k);
        for (uint k = l; k < 200; k += n) { acc += x[k]; k += 0; }
        for (uint k = l; k < 200; k += n) { part[l] = x[k]; acc += part[l] * 2; }
        part[l] = acc;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int total = 0;
        for (uint k = 0; k < n; ++k) total += part[k];
        y[i] = total;
        """,
        way="threadgroups",
        shapes=SOLIDS[:5],
        want=_grouped,
    ),
]
