"""Races: threads that touch one element with nothing between that orders them."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, planted, ramp

# Each is read by a thread before another one has written it, if threads run one after the other.
UNSET = ("uninitialised",)

WITHIN = [
    planted(
        "race",
        "missing_barrier",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
uint i = thread_position_in_grid.x;
t[l] = x[i]; // OTHER
y[i] = t[63 - l]; // BUG
""",
        ("y[i] =", f"{BARRIER}y[i] ="),
        inputs=lambda: {"x": ramp(128)},
        outputs="y:float32[128]",
        grid=128,
        also=UNSET,
        want=lambda x: x.reshape(2, 64)[:, ::-1].ravel(),
    ),
    planted(
        "race",
        "barrier_without_fence",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l]; // OTHER
threadgroup_barrier(mem_flags::mem_none);
y[l] = t[63 - l]; // BUG
""",
        ("mem_none", "mem_threadgroup"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x[::-1],
    ),
    planted(
        "race",
        "fence_of_the_other_memory",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l]; // OTHER
threadgroup_barrier(mem_flags::mem_device);
y[l] = t[l ^ 32]; // BUG
""",
        ("mem_device", "mem_threadgroup"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: [*x[32:], *x[:32]],
    ),
    planted(
        "race",
        "simdgroup_barrier_is_too_little",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l]; // OTHER
simdgroup_barrier(mem_flags::mem_threadgroup);
y[l] = t[63 - l]; // BUG
""",
        ("simdgroup_barrier", "threadgroup_barrier"),
        inputs=lambda: {"x": ramp(64)},
        also=UNSET,
        want=lambda x: x[::-1],
    ),
    planted(
        "race",
        "lanes_in_lockstep",
        """\
threadgroup float t[32];
uint l = thread_index_in_simdgroup;
t[l] = x[l]; // OTHER
y[l] = t[l ^ 1]; // BUG
""",
        ("y[l] =", "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[l] ="),
        inputs=lambda: {"x": ramp(32)},
        outputs="y:float32[32]",
        grid=32,
        threadgroup=32,
        also=UNSET,
        want=lambda x: x.reshape(16, 2)[:, ::-1].ravel(),
    ),
    planted(
        "race",
        "last_rounds_in_lockstep",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
for (uint s = 32; s > 16; s /= 2) {{
    {BARRIER}    if (l < s) t[l] += t[l + s];
}}
{BARRIER}for (uint s = 16; s > 0; s /= 2) {{
    float v = l < s ? t[l + s] : 0.0f; // BUG
    t[l] += v; // OTHER
}}
if (l == 0) y[0] = t[0];
""",
        (
            "    float v = l < s ? t[l + s] : 0.0f; // BUG\n    t[l] += v; // OTHER\n",
            f"    float v = l < s ? t[l + s] : 0.0f;\n    {BARRIER}    t[l] += v;\n    {BARRIER}",
        ),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[1]",
        either=True,
        want=lambda x: x.sum(keepdims=True),
    ),
    planted(
        "race",
        "tree_without_barrier_in_loop",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}for (uint s = 32; s > 0; s /= 2) {{
    if (l < s) t[l] += t[l + s]; // BUG
}}
if (l == 0) y[0] = t[0];
""",
        ("t[l + s]; // BUG\n", f"t[l + s];\n    {BARRIER}"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[1]",
        want=lambda x: x.sum(keepdims=True),
    ),
    planted(
        "race",
        "loop_without_barrier_at_its_end",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = 0; k < 4; ++k) {{
    t[l] = x[k * 64 + l]; // BUG
    {BARRIER}    s += t[63 - l]; // OTHER
}}
y[l] = s;
""",
        ("s += t[63 - l]; // OTHER\n", f"s += t[63 - l];\n    {BARRIER}"),
        inputs=lambda: {"x": ramp(4, 64)},
        either=True,
        want=lambda x: x.sum(0)[::-1],
    ),
    planted(
        "race",
        "write_after_read",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}float v = t[63 - l]; // OTHER
t[l] = v * 2.0f; // BUG
{BARRIER}y[l] = t[l ^ 1];
""",
        ("t[l] = v", f"{BARRIER}t[l] = v"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: 2 * x[::-1].reshape(32, 2)[:, ::-1].ravel(),
    ),
    planted(
        "race",
        "one_variable_for_two_sums",
        f"""\
threadgroup float shared;
uint l = thread_position_in_threadgroup.x;
if (l == 0) shared = x[63];
{BARRIER}float v = x[l] - shared; // OTHER
if (l == 0) shared = x[1]; // BUG
{BARRIER}y[l] = v * shared;
""",
        ("if (l == 0) shared = x[1]", f"{BARRIER}if (l == 0) shared = x[1]"),
        inputs=lambda: {"x": ramp(64, start=1)},
        want=lambda x: (x - x[63]) * x[1],
    ),
    planted(
        "race",
        "partial_sums_read_at_once",
        """\
threadgroup float partial[2];
uint l = thread_position_in_threadgroup.x;
float s = simd_sum(x[l]);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = s; // OTHER
y[l] = partial[0] + partial[1]; // BUG
""",
        ("y[l] =", f"{BARRIER}y[l] ="),
        inputs=lambda: {"x": ramp(64)},
        also=UNSET,
        want=lambda x: np.full(64, x.sum()),
    ),
    planted(
        "race",
        "bins_without_atomics",
        f"""\
threadgroup uint bins[8];
uint l = thread_position_in_threadgroup.x;
if (l < 8) bins[l] = 0;
{BARRIER}bins[x[l]] += 1; // BUG
{BARRIER}if (l < 8) y[l] = bins[l];
""",
        ("uint bins", "atomic_uint bins"),
        ("bins[l] = 0;", "atomic_store_explicit(&bins[l], 0u, memory_order_relaxed);"),
        ("bins[x[l]] += 1", "atomic_fetch_add_explicit(&bins[x[l]], 1u, memory_order_relaxed)"),
        ("y[l] = bins[l]", "y[l] = atomic_load_explicit(&bins[l], memory_order_relaxed)"),
        inputs=lambda: {"x": ramp(64, dtype="uint32") % 7},
        outputs="y:uint32[8]",
        want=lambda x: np.bincount(x, minlength=8),
    ),
    planted(
        "race",
        "two_halves_of_a_buffer_mixed_up",
        f"""\
threadgroup float t[2][64];
uint l = thread_position_in_threadgroup.x;
t[0][l] = x[l];
{BARRIER}for (uint k = 1; k < 4; ++k) {{
    float v = t[0][63 - l]; // OTHER
    t[0][l] = v + x[k * 64 + l]; // BUG
    {BARRIER}}}
y[l] = t[0][l];
""",
        ("t[0][63 - l]", "t[(k + 1) % 2][63 - l]"),
        ("t[0][l] = v", "t[k % 2][l] = v"),
        ("y[l] = t[0][l]", "y[l] = t[1][l]"),
        inputs=lambda: {"x": ramp(4, 64)},
        want=lambda x: x[0][::-1] + x[1] + x[2][::-1] + x[3],
    ),
]

DEVICE = [
    planted(
        "race",
        "device_memory_with_the_other_fence",
        """\
uint l = thread_position_in_threadgroup.x;
y[l] = x[l] * 2.0f; // OTHER
threadgroup_barrier(mem_flags::mem_threadgroup);
z[l] = y[63 - l]; // BUG
""",
        ("mem_threadgroup", "mem_device"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[64]; z:float32[64]",
        want=lambda x: (x * 2, x[::-1] * 2),
    ),
    planted(
        "race",
        "device_memory_without_barrier",
        """\
uint l = thread_position_in_threadgroup.x;
y[l] = x[l] * 2.0f; // OTHER
z[l] = y[(l + 1) % 64]; // BUG
""",
        ("z[l] =", "threadgroup_barrier(mem_flags::mem_device);\nz[l] ="),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[64]; z:float32[64]",
        also=UNSET,
        want=lambda x: (x * 2, [*x[1:] * 2, 0]),
    ),
    planted(
        "race",
        "atomic_then_plain_read",
        """\
uint l = thread_position_in_threadgroup.x;
atomic_fetch_add_explicit((device atomic_uint*)&n[0], 1u, memory_order_relaxed); // OTHER
y[l] = n[0]; // BUG
""",
        ("y[l] =", "threadgroup_barrier(mem_flags::mem_device);\ny[l] ="),
        outputs="n:uint32[1]; y:uint32[64]",
        inputs=lambda: {"x": ramp(64)},
        init_value=0,
        want=lambda x: ([64], np.full(64, 64)),
    ),
    planted(
        "race",
        "bits_of_one_word",
        """\
uint i = thread_position_in_grid.x;
if (x[i] > 0.0f) y[i / 32] |= 1u << (i % 32); // BUG
""",
        (
            "y[i / 32] |= 1u << (i % 32)",
            "atomic_fetch_or_explicit((device atomic_uint*)&y[i / 32], 1u << (i % 32), "
            "memory_order_relaxed)",
        ),
        inputs=lambda: {"x": ramp(64) % 3},
        outputs="y:uint32[2]",
        init_value=0,
        want=lambda x: np.packbits(x > 0, bitorder="little").view(np.uint32),
    ),
]

ACROSS = [
    planted(
        "race",
        "plain_sum",
        """\
uint i = thread_position_in_grid.x;
y[0] += x[i]; // BUG
""",
        (
            "y[0] += x[i]",
            "atomic_fetch_add_explicit((device atomic_float*)&y[0], x[i], memory_order_relaxed)",
        ),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[1]",
        threadgroup=1,
        init_value=0,
        want=lambda x: x.sum(keepdims=True),
    ),
    planted(
        "race",
        "histogram",
        """\
uint i = thread_position_in_grid.x;
counts[x[i]] += 1; // BUG
""",
        (
            "counts[x[i]] += 1",
            "atomic_fetch_add_explicit((device atomic_uint*)&counts[x[i]], 1u, "
            "memory_order_relaxed)",
        ),
        inputs=lambda: {"x": ramp(64, dtype="uint32") % 5},
        outputs="counts:uint32[5]",
        threadgroup=32,
        init_value=0,
        want=lambda x: np.bincount(x),
    ),
    planted(
        "race",
        "neighbours_overlap",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i]; // OTHER
y[i + 1] = -x[i]; // BUG
""",
        ("y[i] =", "y[2 * i] ="),
        ("y[i + 1] =", "y[2 * i + 1] ="),
        inputs=lambda: {"x": ramp(32, start=1)},
        grid=32,
        threadgroup=1,
        init_value=0,
        want=lambda x: [s * v for v in x for s in (1, -1)],
    ),
    planted(
        "race",
        "last_writer_wins",
        """\
uint i = thread_position_in_grid.x;
if (x[i] > 2.0f) y[0] = i; // BUG
""",
        (
            "y[0] = i",
            "atomic_fetch_max_explicit((device atomic_uint*)&y[0], i, memory_order_relaxed)",
        ),
        inputs=lambda: {"x": ramp(64) % 5},
        outputs="y:uint32[1]",
        threadgroup=32,
        init_value=0,
        want=lambda x: [np.flatnonzero(x > 2)[-1]],
    ),
    planted(
        "race",
        "barrier_between_threadgroups",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * 2.0f; // OTHER
threadgroup_barrier(mem_flags::mem_device);
z[i] = y[(i + 1) % 64]; // BUG
""",
        ("y[(i + 1) % 64]", "x[(i + 1) % 64] * 2.0f"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[64]; z:float32[64]",
        threadgroup=32,
        also=UNSET,
        want=lambda x: (x * 2, [*x[1:] * 2, 0]),
    ),
    planted(
        "race",
        "first_threadgroup_adds_up",
        """\
uint l = thread_position_in_threadgroup.x, g = threadgroup_position_in_grid.x;
float s = simd_sum(x[g * 32 + l]);
if (l == 0) partial[g] = s; // OTHER
threadgroup_barrier(mem_flags::mem_device);
if (l == 0 && g == 0) total[0] = partial[0] + partial[1]; // BUG
""",
        (
            "if (l == 0 && g == 0) total[0] = partial[0] + partial[1]",
            "if (l == 0) atomic_fetch_add_explicit((device atomic_float*)&total[0], s, "
            "memory_order_relaxed)",
        ),
        inputs=lambda: {"x": ramp(64)},
        outputs="partial:float32[2]; total:float32[1]",
        threadgroup=32,
        init_value=0,
        want=lambda x: (x.reshape(2, 32).sum(1), x.sum(keepdims=True)),
    ),
    planted(
        "race",
        "counter_read_while_others_count",
        """\
uint i = thread_position_in_grid.x;
atomic_fetch_add_explicit((device atomic_uint*)&n[0], 1u, memory_order_relaxed); // OTHER
threadgroup_barrier(mem_flags::mem_device);
y[i] = n[0]; // BUG
""",
        outputs="n:uint32[1]; y:uint32[64]",
        inputs=lambda: {"x": ramp(64)},
        threadgroup=32,
        init_value=0,
        twin={"threadgroup": 64},
        want=lambda x: ([64], np.full(64, 64)),
    ),
    planted(
        "race",
        "rows_one_too_long",
        """\
uint r = thread_position_in_grid.x;
for (uint c = 0; c <= 8; ++c) {
    if (r * 8 + c < 64) y[r * 8 + c] = float(100 * r + c); // BUG
}
""",
        ("c <= 8", "c < 8"),
        grid=8,
        threadgroup=1,
        inputs=lambda: {"x": ramp(8)},
        want=lambda x: [100 * r + c for r in range(8) for c in range(8)],
    ),
]

RACES: list[Planted] = WITHIN + DEVICE + ACROSS
