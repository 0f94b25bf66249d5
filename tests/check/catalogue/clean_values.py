"""Bodies that are right and look wrong: lanes, numbers and subscripts."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Case, after, before, drawn, ramp

LANES = [
    Case(
        "guard_without_barrier",
        """\
uint i = thread_position_in_grid.x;
if (i >= uint(x_shape[0])) return;
y[i] = x[i] * 2.0f;
""",
        lambda: {"x": ramp(50)},
        "y:float32[50]",
        lambda x: 2 * x,
        threadgroup=32,
    ),
    Case(
        "simd_operations_in_branches",
        """\
uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
float r;
if (l < 10) r = simd_sum(x[i]);
else r = simd_max(x[i]);
y[i] = r + simd_min(x[i]);
""",
        lambda: {"x": ramp(32)},
        "y:float32[32]",
        lambda x: [*np.full(10, 45), *np.full(22, 31)],
        grid=32,
    ),
    Case(
        "simd_sum_after_early_return",
        """\
uint i = thread_position_in_grid.x;
if (i >= 45) return;
y[i] = simd_sum(x[i]);
""",
        lambda: {"x": ramp(64)},
        "y:float32[45]",
        lambda x: [*np.full(32, 496), *np.full(13, x[32:45].sum())],
    ),
    Case(
        "butterfly",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 16; d > 0; d /= 2) s += simd_shuffle_xor(s, d);
y[i] = s;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(2, 32).sum(1).repeat(32),
    ),
    Case(
        "shuffle_down_past_the_edge",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 16; d > 0; d /= 2) s += simd_shuffle_down(s, d);
if (thread_index_in_simdgroup == 0) y[i / 32] = s;
""",
        lambda: {"x": ramp(64)},
        "y:float32[2]",
        lambda x: x.reshape(2, 32).sum(1),
    ),
    Case(
        "shuffle_up_before_the_edge",
        """\
uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
float s = x[i];
for (ushort d = 1; d < 32; d *= 2) {
    float before = simd_shuffle_up(s, d);
    if (l >= d) s += before;
}
y[i] = s;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(2, 32).cumsum(1).ravel(),
    ),
    Case(
        "sixteen_lanes_among_themselves",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 8; d > 0; d /= 2) s += simd_shuffle_xor(s, d);
y[i] = s;
""",
        lambda: {"x": ramp(48)},
        "y:float32[48]",
        lambda x: x.reshape(3, 16).sum(1).repeat(16),
        grid=48,
    ),
    Case(
        "sum_by_shuffle_down_of_sixteen",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 8; d > 0; d /= 2) s += simd_shuffle_down(s, d);
if (i == 0) y[0] = s;
""",
        lambda: {"x": ramp(16)},
        "y:float32[1]",
        lambda x: x.sum(keepdims=True),
        grid=16,
    ),
    Case(
        "neighbour_where_there_is_one",
        """\
uint i = thread_position_in_grid.x, n = x_shape[0];
if (i >= n) return;
float right = simd_shuffle_down(x[i], 1);
y[i] = i % 32 != 31 && i + 1 < n ? right - x[i] : 0.0f;
""",
        lambda: {"x": ramp(45)},
        "y:float32[45]",
        lambda x: [float(i not in (31, 44)) for i in range(45)],
    ),
    Case(
        "shuffle_inside_one_side_of_a_branch",
        """\
uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
y[i] = x[i];
if (l < 16) y[i] = simd_shuffle_xor(x[i], 1);
""",
        lambda: {"x": ramp(32)},
        "y:float32[32]",
        lambda x: [*x[:16].reshape(8, 2)[:, ::-1].ravel(), *x[16:]],
        grid=32,
    ),
    Case(
        "partial_sums_by_the_first_simdgroup",
        f"""\
threadgroup float partial[32];
uint l = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
float s = simd_sum(x[l]);
if (lane == 0) partial[simdgroup_index_in_threadgroup] = s;
{BARRIER}if (simdgroup_index_in_threadgroup == 0) {{
    s = simd_sum(lane < simdgroups_per_threadgroup ? partial[lane] : 0.0f);
    if (lane == 0) y[0] = s;
}}
""",
        lambda: {"x": ramp(128)},
        "y:float32[1]",
        lambda x: x.sum(keepdims=True),
        grid=128,
        threadgroup=128,
    ),
    Case(
        "lanes_that_leave_a_loop",
        """\
uint l = thread_index_in_simdgroup;
uint n = 0;
for (uint k = 0; k <= l; ++k) n += simd_sum(1u);
y[l] = n;
""",
        lambda: {"x": ramp(32)},
        "y:uint32[32]",
        lambda x: [sum(32 - k for k in range(lane + 1)) for lane in range(32)],
        grid=32,
    ),
]

NUMBERS = [
    Case(
        "largest_from_minus_infinity",
        """\
uint r = thread_position_in_grid.x;
float most = -INFINITY, s = 0;
for (uint c = 0; c < 4; ++c) most = max(most, x[4 * r + c]);
for (uint c = 0; c < 4; ++c) s += exp(x[4 * r + c] - most);
y[r] = s;
""",
        lambda: {"x": drawn(64, 4)},
        want=lambda x: np.exp(x - x.max(1, keepdims=True)).sum(1),
    ),
    Case(
        "masked_by_minus_infinity",
        """\
uint r = thread_position_in_grid.x;
float s = 0;
for (uint c = 0; c < 4; ++c) s += exp((c <= r % 4 ? x[4 * r + c] : -INFINITY) - 2.0f);
y[r] = s;
""",
        lambda: {"x": drawn(64, 4)},
        want=lambda x: np.where(ramp(4) <= ramp(64, 1) % 4, np.exp(x - 2), 0).sum(1),
    ),
    Case(
        "nan_copied_from_the_input",
        """\
uint i = thread_position_in_grid.x;
y[i] = isnan(x[i]) ? NAN : x[i] * 2.0f;
z[i] = x[i] + 1.0f;
""",
        lambda: {"x": np.where(ramp(64) % 5 == 0, np.float32(np.nan), ramp(64))},
        "y:float32[64]; z:float32[64]",
        lambda x: (x * 2, x + 1),
    ),
    Case(
        "infinities_of_the_input",
        """\
uint i = thread_position_in_grid.x;
y[i] = isinf(x[i]) ? copysign(1e30f, x[i]) : x[i];
z[i] = x[i] * 2.0f;
""",
        lambda: {"x": np.where(ramp(64) % 5 == 0, np.float32(-np.inf), ramp(64))},
        "y:float32[64]; z:float32[64]",
        lambda x: (np.where(np.isinf(x), np.float32(-1e30), x), x * 2),
    ),
    Case(
        "hash_that_wraps",
        """\
uint i = thread_position_in_grid.x;
uint h = 2166136261u;
for (uint k = 0; k < 4; ++k) h = (h ^ ((x[i] >> (8 * k)) & 255u)) * 16777619u;
y[i] = h - 3000000000u;
""",
        lambda: {"x": ramp(64, dtype="uint32") * np.uint32(77777)},
        "y:uint32[64]",
        lambda x: [_hash(int(v)) for v in x],
    ),
    Case(
        "unsigned_that_counts_down",
        """\
uint i = thread_position_in_grid.x;
float s = 0;
for (uint k = 3; k != ~0u; --k) s = s * 0.5f + x[4 * i + k];
y[i] = s;
""",
        lambda: {"x": ramp(64, 4)},
        want=lambda x: x @ np.array([1, 0.5, 0.25, 0.125], np.float32),
    ),
    Case(
        "division_behind_a_check",
        """\
uint i = thread_position_in_grid.x;
y[i] = n[i] != 0 ? x[i] / n[i] : -1;
z[i] = n[i] != 0 && x[i] % n[i] == 0;
""",
        lambda: {"x": ramp(64, dtype="int32"), "n": ramp(64, dtype="int32") % 5},
        "y:int32[64]; z:bool[64]",
        lambda x, n: (
            [a // b if b else -1 for a, b in zip(x, n, strict=True)],
            [b != 0 and a % b == 0 for a, b in zip(x, n, strict=True)],
        ),
    ),
    Case(
        "half_near_its_end",
        """\
uint i = thread_position_in_grid.x;
y[i] = half(min(x[i] * 2000.0f, 65504.0f));
""",
        lambda: {"x": ramp(64)},
        "y:float16[64]",
        lambda x: np.minimum(x * 2000, 65504).astype(np.float16),
    ),
    Case(
        "half_beyond_its_end_that_nothing_keeps",
        """\
uint i = thread_position_in_grid.x;
half most = min(half(x[i] * 2000.0f), half(65504));
half masked = half(i % 4) + half(i % 2 ? 0.0f : -1e9f);
y[i] = most;
z[i] = exp(float(masked));
""",
        lambda: {"x": ramp(64)},
        "y:float16[64]; z:float32[64]",
        lambda x: (
            np.minimum(x * 2000, 65504).astype(np.float16),
            np.where(x % 2, np.exp(x % 4), 0),
        ),
    ),
    Case(
        "exp_too_small",
        """\
uint i = thread_position_in_grid.x;
y[i] = exp(-4.0f * x[i]) * 1e-30f;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: np.exp(-4.0 * x) * 1e-30,
    ),
]


def _hash(value: int) -> int:
    h = 2166136261
    for k in range(4):
        h = (h ^ (value >> 8 * k & 255)) * 16777619 % 2**32
    return (h - 3000000000) % 2**32


SUBSCRIPTS = [
    Case(
        "neighbours_behind_choices",
        """\
int i = thread_position_in_grid.x;
float left = i > 0 ? x[i - 1] : 0.0f;
float right = i < 63 ? x[i + 1] : 0.0f;
bool falls = i > 0 && x[i - 1] > x[i];
y[i] = left + right + (falls ? 1.0f : 0.0f);
""",
        lambda: {"x": ramp(64) * 7 % 10},
        want=lambda x: before(x) + after(x) + (before(x) > x),
    ),
    Case(
        "pointer_one_past_the_end",
        """\
uint i = thread_position_in_grid.x;
const device float* end = x + 256;
float s = 0;
for (const device float* p = x + 4 * i; p != end && p != x + 4 * i + 4; ++p) s += *p;
y[i] = s;
""",
        lambda: {"x": ramp(64, 4)},
        want=lambda x: x.sum(1),
    ),
    Case(
        "pointer_before_the_beginning",
        """\
int i = thread_position_in_grid.x;
const device float* before = x + i - 1;
y[i] = i > 0 ? before[0] + before[1] : before[1];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x + before(x),
    ),
    Case(
        "vectors_of_aligned_data",
        """\
uint i = thread_position_in_grid.x;
float4 v = ((const device float4*)x)[i];
((device float4*)y)[i] = v.wzyx;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(16, 4)[:, ::-1].ravel(),
        grid=16,
    ),
    Case(
        "packed_vectors_of_any_place",
        """\
uint i = thread_position_in_grid.x;
packed_float3 p = *(const device packed_float3*)(x + 3 * i);
y[i] = p.x + p.y + p.z;
""",
        lambda: {"x": ramp(64, 3)},
        want=lambda x: x.sum(1),
    ),
    Case(
        "strided_view",
        """\
uint i = thread_position_in_grid.x, r = i / 8, c = i % 8;
y[i] = x[r * x_strides[0] + c * x_strides[1]];
""",
        lambda: {"x": ramp(16, 16)[1:9, 3:11].T},
        want=lambda x: x.ravel(),
        ensure_row_contiguous=False,
    ),
    Case(
        "view_read_backwards",
        """\
int i = thread_position_in_grid.x;
y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
""",
        lambda: {"x": ramp(8, 8)[::-1, ::-1]},
        want=lambda x: x.ravel(),
        ensure_row_contiguous=False,
    ),
    Case(
        "broadcast_by_a_stride_of_zero",
        """\
uint i = thread_position_in_grid.x, r = i / 8, c = i % 8;
y[i] = x[r * x_strides[0] + c * x_strides[1]];
""",
        lambda: {"x": np.broadcast_to(ramp(8), (8, 8))},
        want=lambda x: x.ravel(),
        ensure_row_contiguous=False,
    ),
    Case(
        "private_arrays_written_in_part",
        """\
uint i = thread_position_in_grid.x;
float w[8];
uint n = i % 8 + 1;
for (uint k = 0; k < n; ++k) w[k] = x[i] + float(k);
float s = 0;
for (uint k = 0; k < n; ++k) s += w[n - 1 - k];
y[i] = s;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: [v * (v % 8 + 1) + sum(range(int(v) % 8 + 1)) for v in x],
    ),
    Case(
        "threadgroup_memory_written_in_part",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
if (l < 40) t[l] = x[l];
{BARRIER}y[l] = l < 40 ? t[39 - l] : 0.0f;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: [*x[39::-1], *np.zeros(24)],
    ),
]

CLEAN_VALUES: list[Case] = LANES + NUMBERS + SUBSCRIPTS
