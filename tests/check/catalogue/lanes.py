"""Shuffles from lanes that are not there."""

from __future__ import annotations

import numpy as np

from .planted import Planted, planted, ramp

GONE = [
    planted(
        "lanes",
        "returned_early",
        """\
uint l = thread_index_in_simdgroup;
if (l >= 20) return;
y[l] = simd_shuffle(x[l], ushort(31 - l)); // BUG
""",
        ("31 - l", "19 - l"),
        inputs=lambda: {"x": ramp(32)},
        outputs="y:float32[20]",
        grid=32,
        want=lambda x: x[19::-1],
    ),
    planted(
        "lanes",
        "other_side_of_a_branch",
        """\
uint l = thread_index_in_simdgroup;
float v = x[l];
if (l < 16) v += simd_shuffle_down(v, 16); // BUG
y[l] = v;
""",
        (
            "if (l < 16) v += simd_shuffle_down(v, 16)",
            "float w = simd_shuffle_down(v, 16);\nif (l < 16) v += w",
        ),
        inputs=lambda: {"x": ramp(32)},
        outputs="y:float32[32]",
        grid=32,
        want=lambda x: [*(x[:16] + x[16:]), *x[16:]],
    ),
    planted(
        "lanes",
        "other_side_of_a_choice",
        """\
uint i = thread_position_in_grid.x;
float v = x[i];
y[i] = i % 2 == 0 ? simd_shuffle_xor(v, 1) : v; // BUG
""",
        (
            "y[i] = i % 2 == 0 ? simd_shuffle_xor(v, 1) : v",
            "float w = simd_shuffle_xor(v, 1);\ny[i] = i % 2 == 0 ? w : v",
        ),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(32, 2)[:, 1].repeat(2),
    ),
    planted(
        "lanes",
        "left_the_loop",
        """\
uint i = thread_position_in_grid.x;
float v = x[i];
for (uint k = 0; k < 1 + i % 2; ++k) {
    v += simd_shuffle_xor(v, 1); // BUG
}
y[i] = v;
""",
        ("1 + i % 2", "2"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: 2 * x.reshape(32, 2).sum(1).repeat(2),
    ),
    planted(
        "lanes",
        "broadcast_from_a_lane_that_returned",
        """\
uint i = thread_position_in_grid.x;
if (x[i] == 0.0f) return;
y[i] = simd_broadcast(x[i], 0); // BUG
""",
        ("simd_broadcast(x[i], 0)", "simd_broadcast_first(x[i])"),
        inputs=lambda: {"x": ramp(64) % 32},
        init_value=0,
        want=lambda x: x > 0,
    ),
    planted(
        "lanes",
        "behind_a_short_circuit",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] > 7.0f && simd_shuffle_xor(x[i], 8) > 20.0f ? 1.0f : 0.0f; // BUG
""",
        (
            "y[i] = x[i] > 7.0f && simd_shuffle_xor(x[i], 8) >",
            "float v = simd_shuffle_xor(x[i], 8);\ny[i] = x[i] > 7.0f && v >",
        ),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: (x > 7) & (np.arange(64) ^ 8 > 20),
    ),
]

RAGGED = [
    planted(
        "lanes",
        "broadcast_in_the_last_simdgroup",
        """\
uint i = thread_position_in_grid.x;
y[i] = simd_broadcast(x[i], 31); // BUG
""",
        ("31", "15"),
        inputs=lambda: {"x": ramp(48)},
        outputs="y:float32[48]",
        grid=48,
        want=lambda x: [*np.full(32, 15), *np.full(16, 47)],
    ),
    planted(
        "lanes",
        "sum_by_shuffle_down",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 16; d > 0; d /= 2) {
    s += simd_shuffle_down(s, d); // BUG
}
if (thread_index_in_simdgroup == 0) y[i / 32] = s;
""",
        (
            "for (ushort d = 16; d > 0; d /= 2) {\n    s += simd_shuffle_down(s, d)",
            "{\n    s = simd_sum(s)",
        ),
        inputs=lambda: {"x": ramp(48)},
        outputs="y:float32[2]",
        grid=48,
        want=lambda x: [x[:32].sum(), x[32:].sum()],
    ),
    planted(
        "lanes",
        "butterfly_of_twenty",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 1; d < 32; d *= 2) {
    s = max(s, simd_shuffle_xor(s, d)); // BUG
}
y[i] = s;
""",
        (
            "for (ushort d = 1; d < 32; d *= 2) {\n    s = max(s, simd_shuffle_xor(s, d))",
            "{\n    s = simd_max(s)",
        ),
        inputs=lambda: {"x": ramp(20)},
        outputs="y:float32[20]",
        grid=20,
        want=lambda x: np.full(20, 19),
    ),
    planted(
        "lanes",
        "sum_in_a_helper",
        """\
uint i = thread_position_in_grid.x;
float s = warp_sum(x[i]);
if (i == 0) y[0] = s;
""",
        (
            "for (ushort d = 16; d > 0; d /= 2) {\n        v += simd_shuffle_down(v, d)",
            "{\n        v = simd_sum(v)",
        ),
        header="""\
inline float warp_sum(float v) {
    for (ushort d = 16; d > 0; d /= 2) {
        v += simd_shuffle_down(v, d); // BUG
    }
    return v;
}
""",
        inputs=lambda: {"x": ramp(24)},
        outputs="y:float32[1]",
        grid=24,
        want=lambda x: x.sum(keepdims=True),
    ),
    planted(
        "lanes",
        "quad_of_two",
        """\
uint i = thread_position_in_grid.x;
y[i] = quad_broadcast(x[i], 3); // BUG
""",
        ("3", "1"),
        inputs=lambda: {"x": ramp(30)},
        outputs="y:float32[30]",
        grid=30,
        want=lambda x: x // 4 * 4 + 1,
    ),
    planted(
        "lanes",
        "last_threadgroup",
        """\
uint i = thread_position_in_grid.x;
y[i] = simd_shuffle_xor(x[i], 4); // BUG
""",
        ("y[i] = simd_shuffle_xor(x[i], 4)", "y[i] = x[(i ^ 4) < 68 ? i ^ 4 : i]"),
        inputs=lambda: {"x": ramp(68)},
        outputs="y:float32[68]",
        grid=68,
        want=lambda x: [*x[:64].reshape(8, 2, 4)[:, ::-1].ravel(), *x[64:]],
    ),
]

NUMBERS = [
    planted(
        "lanes",
        "number_of_thirty_two",
        """\
uint i = thread_position_in_grid.x;
y[i] = simd_shuffle(x[i], ushort(i % 32 + 1)); // BUG
""",
        ("i % 32 + 1", "(i + 1) % 32"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.roll(x.reshape(2, 32), -1, axis=1).ravel(),
    ),
    planted(
        "lanes",
        "number_before_zero",
        """\
uint i = thread_position_in_grid.x;
ushort before = ushort(thread_index_in_simdgroup - 1);
y[i] = simd_shuffle(x[i], before); // BUG
""",
        ("_simdgroup - 1", "_simdgroup ^ 1"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(32, 2)[:, ::-1].ravel(),
    ),
    planted(
        "lanes",
        "thread_for_lane",
        """\
uint l = thread_position_in_threadgroup.x;
y[l] = simd_shuffle(x[l], ushort(l ^ 1)); // BUG
""",
        ("l ^ 1", "(l ^ 1) % 32"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(32, 2)[:, ::-1].ravel(),
    ),
    planted(
        "lanes",
        "xor_of_thirty_two",
        """\
uint i = thread_position_in_grid.x;
float s = x[i];
for (ushort d = 1; d <= 32; d *= 2) {
    s += simd_shuffle_xor(s, d); // BUG
}
y[i] = s;
""",
        ("d <= 32", "d < 32"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(2, 32).sum(1).repeat(32),
    ),
]

LANES: list[Planted] = GONE + RAGGED + NUMBERS
