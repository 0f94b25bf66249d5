"""Threadgroup memory and barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Shape, Threads, X, solid


def _product(t: Threads) -> Any:
    a, b = X[:64].reshape(8, 8), X[64:128].reshape(8, 8)
    return (2 * a @ b).ravel()[t.l % 64]


def _row(t: Threads) -> Any:
    _, y, z = t.threadgroup
    return t.sum(X[t.i], by=t.of_group * 1000 + z * 30 + y)


def _in_step(t: Threads) -> Any:
    return t.max(X[t.i], by=t.of_group) * 1000 + t.count


CASES = [
    solid(
        "tile",
        """
        threadgroup int t[8][64];
        uint3 p = thread_position_in_threadgroup;
        uint row = p.z * threads_per_threadgroup.y + p.y;
        t[row][p.x] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int acc = 0;
        for (uint k = 0; k < threads_per_threadgroup.x; ++k) acc += t[row][k];
        y[i] = acc;
        """,
        way="threadgroups",
        want=_row,
    ),
    solid(
        "memory_declared_in_a_loop",
        """
        uint n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
        int acc = 0;
        for (int k = 0; k < 3; ++k) {
          threadgroup int t[512];
          t[l] = int(l) + k;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          acc += t[(l + 1) % n];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        y[i] = acc;
        """,
        way="threadgroups",
        want=lambda t: 3 * ((t.l + 1) % t.count) + 3,
    ),
    solid(
        "sum_over_simdgroups",
        """
        threadgroup int part[32];
        uint g = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
        int v = simd_sum(x[i]);
        if (lane == 0) part[g] = v;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (g == 0) {
          int w = lane < simdgroups_per_threadgroup ? part[lane] : 0;
          w = simd_sum(w);
          if (lane == 0) part[0] = w;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = part[0];
        """,
        way="threadgroups",
        want=lambda t: t.sum(X[t.i], by=t.of_group),
    ),
    # No barrier stands between the simdgroups' reads and the second writes: a race, which goes
    # well where simdgroups advance in step, as they nearly do on Apple's GPUs.
    solid(
        "simdgroups_advance_in_step",
        """
        threadgroup int part[32];
        uint g = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
        int most = simd_max(x[i]);
        if (lane == 0) part[g] = most;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        most = simd_max(lane < simdgroups_per_threadgroup ? part[lane] : most);
        int count = simd_sum(1);
        if (lane == 0) part[g] = count;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int all = 0;
        for (uint k = 0; k < simdgroups_per_threadgroup; ++k) all += part[k];
        y[i] = most * 1000 + all;
        """,
        way="threadgroups",
        want=_in_step,
    ),
    solid(
        "barriers_after_returns",
        """
        threadgroup int t[512];
        if (l % 5 == 3) return;
        int acc = 0;
        for (uint k = 1; k < 40; k *= 2) {
          t[l] = int(l) + acc;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          uint o = l >= k ? l - k : l;
          if (o % 5 == 3) o = l;
          acc += t[o];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        y[i] = acc;
        """,
        way="threadgroups",
    ),
    solid(
        "barrier_in_some_threadgroups",
        """
        threadgroup int t[512];
        t[l] = int(l);
        if (threadgroup_position_in_grid.x % 2 == 0) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          uint n = threads_per_threadgroup.x * threads_per_threadgroup.y
              * threads_per_threadgroup.z;
          y[i] = t[n - 1 - l];
        } else y[i] = -1;
        """,
        way="threadgroups",
        want=lambda t: np.where(t.group[0] % 2 == 0, t.count - 1 - t.l, -1),
    ),
    solid(
        "rounds_counted_in_threadgroup_memory",
        """
        threadgroup int n;
        if (l == 0) n = 2 + int(threadgroup_position_in_grid.x % 3);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup int t[512];
        int acc = 0;
        for (int k = 0; k < n; ++k) {
          t[l] = acc + 1;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          acc += t[0];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        y[i] = acc;
        """,
        way="threadgroups",
        want=lambda t: 2 ** (2 + t.group[0] % 3) - 1,
    ),
    solid(
        "atomics_in_threadgroup_memory",
        """
        threadgroup atomic_uint bins[4];
        if (l < 4) atomic_store_explicit(&bins[l], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&bins[l & 3], l, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = int(atomic_load_explicit(&bins[l % 4], memory_order_relaxed));
        """,
        way="threadgroups",
        want=lambda t: t.sum(t.l, by=t.of_group * 4 + t.l % 4),
    ),
    solid(
        "pointers_and_references_to_threadgroup_memory",
        """
        threadgroup int t[512];
        threadgroup int* p = t + l;
        threadgroup int& r = t[l];
        *p = int(l);
        r += 5;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
        threadgroup const int* q = &t[(l + 1) % n];
        int v = *q;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r = v;
        p[0] += 1;
        y[i] = t[l];
        """,
        way="threadgroups",
        want=lambda t: (t.l + 1) % t.count + 6,
    ),
    solid(
        "threadgroup_memory_through_lambdas",
        """
        threadgroup int t[512];
        auto put = [&](uint j, int v) { t[j] = v; };
        auto get = [&](uint j) { return t[j]; };
        put(l, int(l) * 2);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
        y[i] = get((l + 3) % n) + simd_sum(get(0));
        """,
        way="threadgroups",
        want=lambda t: 2 * ((t.l + 3) % t.count),
    ),
    solid(
        "product_of_matrices",
        """
        threadgroup float a[64], b[64], c[64];
        uint n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
        for (uint k = l; k < 64; k += n) { a[k] = x[k]; b[k] = x[k + 64]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 A, B, C = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_load(A, a, 8);
        simdgroup_load(B, b, 8);
        for (int k = 0; k < 2; ++k) simdgroup_multiply_accumulate(C, A, B, C);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(C, c, 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = int(c[l % 64]);
        """,
        way="threadgroups",
        shapes=(
            Shape((128, 1, 1), (64, 1, 1)),
            Shape((96, 4, 1), (32, 4, 1)),
            Shape((8, 4, 3), (8, 4, 1)),
        ),
        want=_product,
    ),
]
