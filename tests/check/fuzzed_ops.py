"""Ops with one fault each, their clean twins, and what they are to give."""

from __future__ import annotations

from typing import Any

import numpy as np

import ferrule


def by_fours(check: str) -> ferrule.Op:
    """Four elements for each thread; those of the last one must be counted."""
    return ferrule.op(
        "by_fours", "x[N]:float32 -> y[N]:float32",
        metal=f"""
            uint i = thread_position_in_grid.x * 4;
            for (uint k = i; k < {check}; ++k) y[k] = 2 * x[k];
        """,
        grid="ceildiv(N, 4)", threadgroup=64,
    )  # fmt: skip


ragged = by_fours("i + 4")
not_ragged = by_fours("min(i + 4, uint(N))")


def doubled(x: Any) -> Any:
    return 2 * x


def row_sums(first: str) -> ferrule.Op:
    """A sum of each row by a simdgroup, which begins somewhere."""
    return ferrule.op(
        "row_sums", "x[B,N]:T -> y[B]:T",
        metal=f"""
            uint lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.x;
            float sum = 0;
            for (int i = {first}; i < N; i += 32) sum += x[row * N + i];
            sum = simd_sum(sum);
            if (lane == 0) y[row] = T(sum);
        """,
        grid="B * 32", threadgroup=32,
    )  # fmt: skip


whole_rows = row_sums("lane")
# What is left over after the last 32 is forgotten.
multiples = ferrule.op(
    "multiples", "x[B,N]:T -> y[B]:T where N > 0",
    metal="""
        uint lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.x;
        float sum = 0;
        for (int i = 0; i < max(N / 32, 1); ++i)
            if (int(i * 32 + lane) < N) sum += x[row * N + i * 32 + lane];
        sum = simd_sum(sum);
        if (lane == 0) y[row] = T(sum);
    """,
    grid="B * 32", threadgroup=32,
)  # fmt: skip


def sums(x: Any) -> Any:
    return x.astype(np.float64).sum(1)


def group_sums(groups: str) -> ferrule.Op:
    """A sum of each row by a threadgroup of some simdgroups."""
    return ferrule.op(
        "group_sums", "x[B,N]:float32 -> y[B]:float32",
        metal=f"""
            threadgroup float partial[32];
            uint lid = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x;
            float sum = 0;
            for (int i = lid; i < N; i += threads_per_threadgroup.x) sum += x[row * N + i];
            sum = simd_sum(sum);
            if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (lid != 0) return;
            sum = 0;
            for (uint i = 0; i < {groups}; ++i) sum += partial[i];
            y[row] = sum;
        """,
        grid="B * 256", threadgroup=256,
    )  # fmt: skip


eight_groups = group_sums("8")
any_groups = group_sums("simdgroups_per_threadgroup")

strides_ignored = ferrule.op(
    "strides_ignored", "x[*S]:T -> y[*S]:T",
    metal="uint i = thread_position_in_grid.x; y[i] = x[i] + T(1);",
    grid="x.size", threadgroup=256, ensure_row_contiguous=False,
)  # fmt: skip
strides_obeyed = ferrule.op(
    "strides_obeyed", "x[*S]:T -> y[*S]:T",
    metal="""
        uint i = thread_position_in_grid.x;
        y[i] = x[elem_to_loc(int64_t(i), x_shape, x_strides, x_ndim)] + T(1);
    """,
    grid="x.size", threadgroup=256, ensure_row_contiguous=False,
)  # fmt: skip


def plus_one(x: Any) -> Any:
    return x + x.dtype.type(1)


def gather(clamped: str) -> ferrule.Op:
    return ferrule.op(
        "gather", "table[V,D]:T, index[N]:int32 -> y[N,D]:T where V > 0",
        metal=f"""
            uint i = thread_position_in_grid.x;
            y[i] = table[{clamped} * D + i % D];
        """,
        grid="N * D", threadgroup=128,
    )  # fmt: skip


rows = gather("index[i / D]")


def rows_of(table: Any, index: Any) -> Any:
    return table[index]


with_bias = ferrule.op(
    "with_bias", "x[*S,D]:T, bias[D]:T?, eps:float32 -> y[*S,D]:T",
    metal="""
        uint i = thread_position_in_grid.x;
        float v = x[i];
        if (has_bias) v += bias[i % D];
        y[i] = T(v + eps);
    """,
    grid="x.size", threadgroup=256,
)  # fmt: skip


def biased(x: Any, bias: Any, eps: float) -> Any:
    wide = x.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))
    return wide + np.float32(eps)


bias_taken_for_granted = ferrule.op(
    "bias_taken_for_granted", "x[*S,D]:T, bias[D]:T? -> y[*S,D]:T",
    metal="""
        uint i = thread_position_in_grid.x;
        y[i] = has_bias ? x[i] + bias[i % D] : x[i] * T(2);
    """,
    grid="x.size", threadgroup=256,
)  # fmt: skip

unpacked = ferrule.op(
    "unpacked", "x[S,K//16]:uint8, w[K]:float32 -> y[S,K]:float32 where K % 16 == 0, S <= 8",
    metal="""
        uint i = thread_position_in_grid.x;
        y[i] = float(x[i / 16]) * w[i % K];
    """,
    grid="S * K", threadgroup=256,
)  # fmt: skip


def unpack(x: Any, w: Any) -> Any:
    return np.repeat(x, 16, axis=1) * w


in_place = ferrule.op(
    "in_place", "x[N]:T!, by:int32 -> ", metal="x[thread_position_in_grid.x] *= T(by);",
    grid="N", threadgroup=32,
)  # fmt: skip


def multiply(x: Any, by: int) -> None:
    x *= x.dtype.type(by)


broadcast = ferrule.op(
    "broadcast", "x[*S]:float32, y[*R]:float32 -> z[*broadcast(S,R)]:float32",
    run=lambda x, y: np.add(x, y),
)  # fmt: skip
