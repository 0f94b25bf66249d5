"""Memory that is read before it is written, and outputs that are never written."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, after, before, planted, ramp

UNINITIALISED = [
    planted(
        "uninitialised",
        "output_added_to",
        """\
uint i = thread_position_in_grid.x;
y[i] += x[i]; // BUG
""",
        inputs=lambda: {"x": ramp(64)},
        twin={"init_value": 0},
        want=lambda x: x,
    ),
    planted(
        "uninitialised",
        "output_read_first",
        """\
uint i = thread_position_in_grid.x;
float old = y[i]; // BUG
y[i] = old > 1.0f ? old : x[i];
""",
        ("= y[i]; // BUG", "= x[i] * 0.5f;"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.where(x > 2, x / 2, x),
    ),
    planted(
        "uninitialised",
        "atomic_output",
        """\
uint i = thread_position_in_grid.x;
atomic_fetch_add_explicit(&y[i % 4], x[i], memory_order_relaxed); // BUG
""",
        inputs=lambda: {"x": ramp(64, dtype="uint32")},
        outputs="y:uint32[4]",
        atomic_outputs=True,
        twin={"init_value": 0},
        want=lambda x: x.reshape(16, 4).sum(0),
    ),
    planted(
        "uninitialised",
        "threadgroup_memory_partly_written",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
if (l < 60) t[l] = x[l];
{BARRIER}y[l] = t[63 - l]; // BUG
""",
        ("if (l < 60) t[l] = x[l]", "t[l] = l < 60 ? x[l] : 0.0f"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.where(x < 60, x, 0)[::-1],
    ),
    planted(
        "uninitialised",
        "left_by_an_earlier_threadgroup",
        f"""\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x;
if (threadgroup_position_in_grid.x == 0) t[l] = x[l];
{BARRIER}y[thread_position_in_grid.x] = t[31 - l]; // BUG
""",
        ("if (threadgroup_position_in_grid.x == 0) t[l]", "t[l]"),
        inputs=lambda: {"x": ramp(64)},
        threadgroup=32,
        want=lambda x: [*x[31::-1], *x[31::-1]],
    ),
    planted(
        "uninitialised",
        "halo_without_ends",
        f"""\
threadgroup float t[66];
uint l = thread_position_in_threadgroup.x;
t[l + 1] = x[l];
{BARRIER}y[l] = t[l] + t[l + 1] + t[l + 2]; // BUG
""",
        ("t[l + 1] = x[l]", "t[l + 1] = x[l];\nif (l < 2) t[l * 65] = 0.0f"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: before(x) + x + after(x),
    ),
    planted(
        "uninitialised",
        "counter_not_zeroed",
        f"""\
threadgroup atomic_uint n;
uint l = thread_position_in_threadgroup.x;
if (x[l] > 9.0f) atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed); // BUG
{BARRIER}y[l] = atomic_load_explicit(&n, memory_order_relaxed);
""",
        (
            "if (x[l]",
            f"if (l == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);\n{BARRIER}if (x[l]",
        ),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:uint32[64]",
        want=lambda x: np.full(64, 54),
    ),
    planted(
        "uninitialised",
        "more_partial_sums_than_simdgroups",
        f"""\
threadgroup float partial[32];
uint l = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
float s = simd_sum(x[l]);
if (lane == 0) partial[simdgroup_index_in_threadgroup] = s;
{BARRIER}float mine = partial[lane]; // BUG
y[l] = simd_sum(mine);
""",
        ("= partial[lane]", "= lane < 2 ? partial[lane] : 0.0f"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.full(64, x.sum()),
    ),
    planted(
        "uninitialised",
        "found_by_nobody",
        f"""\
threadgroup uint found;
uint l = thread_position_in_threadgroup.x;
if (x[l] == 99.0f) found = l;
{BARRIER}y[l] = found; // BUG
""",
        ("if (x[l]", f"if (l == 0) found = 64;\n{BARRIER}if (x[l]"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:uint32[64]",
        want=lambda x: np.full(64, 64),
    ),
    planted(
        "uninitialised",
        "local_sum",
        """\
uint i = thread_position_in_grid.x;
float s;
for (uint k = 0; k < 4; ++k) {
    s += x[4 * i + k]; // BUG
}
y[i] = s;
""",
        ("float s;", "float s = 0;"),
        inputs=lambda: {"x": ramp(64, 4)},
        want=lambda x: x.sum(1),
    ),
    planted(
        "uninitialised",
        "local_set_in_one_branch",
        """\
uint i = thread_position_in_grid.x;
float scale;
if (x[i] > 9.0f) scale = 2.0f;
y[i] = x[i] * scale; // BUG
""",
        ("float scale;", "float scale = 1.0f;"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.where(x > 9, 2 * x, x),
    ),
    planted(
        "uninitialised",
        "local_never_set",
        """\
uint i = thread_position_in_grid.x;
float bias;
y[i] = x[i] + bias; // BUG
""",
        ("float bias;", "float bias = 3.0f;"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x + 3,
    ),
]

UNWRITTEN = [
    planted(
        "unwritten",
        "guard_too_tight",
        """\
uint i = thread_position_in_grid.x;
if (i < 60) y[i] = x[i] * 2.0f;
""",
        ("i < 60", "i < 64"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x * 2,
    ),
    planted(
        "unwritten",
        "every_second_element",
        """\
uint i = thread_position_in_grid.x;
y[2 * i] = x[i];
""",
        ("y[2 * i] =", "y[2 * i + 1] = y[2 * i] ="),
        inputs=lambda: {"x": ramp(32)},
        grid=32,
        want=lambda x: x.repeat(2),
    ),
    planted(
        "unwritten",
        "second_output",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i];
""",
        ("y[i] = x[i]", "y[i] = x[i];\nz[i] = -x[i]"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[64]; z:float32[64]",
        want=lambda x: (x, -x),
    ),
    planted(
        "unwritten",
        "last_row",
        """\
uint c = thread_position_in_grid.x;
for (uint r = 0; r < 7; ++r) y[r * 8 + c] = x[r * 8 + c];
""",
        ("r < 7", "r < 8"),
        inputs=lambda: {"x": ramp(8, 8)},
        outputs="y:float32[8,8]",
        grid=8,
        want=lambda x: x,
    ),
    planted(
        "unwritten",
        "tail_of_vectors",
        """\
uint i = thread_position_in_grid.x;
if (4 * i + 3 < 62) ((device float4*)y)[i] = ((const device float4*)x)[i];
""",
        (
            "if (4",
            "if (4 * i + 3 >= 62) for (uint k = 4 * i; k < 62; ++k) y[k] = x[k];\nelse if (4",
        ),
        inputs=lambda: {"x": ramp(62)},
        outputs="y:float32[62]",
        grid=16,
        want=lambda x: x,
    ),
    planted(
        "unwritten",
        "only_where_found",
        """\
uint r = thread_position_in_grid.x;
for (uint c = 0; c < 4; ++c) {
    if (x[r * 4 + c] > 200.0f) { y[r] = c; break; }
}
""",
        ("for (uint", "y[r] = -1;\nfor (uint"),
        inputs=lambda: {"x": ramp(64, 4)},
        outputs="y:int32[64]",
        want=lambda x: np.where((x > 200).any(1), (x > 200).argmax(1), -1),
    ),
    planted(
        "unwritten",
        "step_of_loop_too_wide",
        """\
for (uint k = thread_position_in_grid.x; k < 256; k += 128) y[k] = x[k];
""",
        ("k += 128", "k += 64"),
        inputs=lambda: {"x": ramp(256)},
        outputs="y:float32[256]",
        want=lambda x: x,
    ),
    planted(
        "unwritten",
        "returned_early",
        """\
uint i = thread_position_in_grid.x;
if (x[i] == 0.0f) return;
y[i] = 1.0f / x[i];
""",
        ("return;", "{ y[i] = 0; return; }"),
        inputs=lambda: {"x": ramp(64) % 8},
        want=lambda x: [1 / v if v else 0 for v in x],
    ),
]

MEMORY: list[Planted] = UNINITIALISED + UNWRITTEN
