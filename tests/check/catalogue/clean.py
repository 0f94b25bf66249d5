"""Bodies that are right and look wrong: memory that threads share."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Case, ramp

SAME = [
    Case(
        "one_value_stored_by_all",
        """\
uint i = thread_position_in_grid.x;
flag[0] = 7;
if (x[i] > 3.0f) flag[1] = 1;
""",
        lambda: {"x": ramp(64)},
        "flag:uint32[2]",
        lambda x: [7, 1],
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "one_value_stored_by_all_in_threadgroup_memory",
        f"""\
threadgroup bool any_negative;
uint l = thread_position_in_threadgroup.x;
any_negative = false;
{BARRIER}if (x[l] < 0.0f) any_negative = true;
{BARRIER}y[l] = any_negative ? 0.0f : x[l];
""",
        lambda: {"x": ramp(64, start=-3)},
        want=lambda x: 0 * x,
    ),
    Case(
        "read_by_all",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}float s = 0;
for (uint k = 0; k < 64; ++k) s += t[k] * x[k];
y[l] = s;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: np.full(64, x @ x),
    ),
    Case(
        "overlapping_windows",
        """\
uint i = thread_position_in_grid.x;
float s = 0;
for (uint k = 0; k < 5; ++k) s += x[i + k];
y[i] = s;
""",
        lambda: {"x": ramp(68)},
        want=lambda x: np.lib.stride_tricks.sliding_window_view(x, 5).sum(1),
        threadgroup=32,
    ),
    Case(
        "leader_alone",
        f"""\
threadgroup float total;
uint l = thread_position_in_threadgroup.x;
if (l == 0) {{
    total = 0;
    for (uint k = 0; k < 64; ++k) total += x[k];
}}
{BARRIER}y[l] = x[l] + total;
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x + x.sum(),
    ),
    Case(
        "own_elements_without_barrier",
        """\
threadgroup float t[256];
uint l = thread_position_in_threadgroup.x;
for (uint k = 0; k < 4; ++k) t[4 * l + k] = x[4 * l + k];
for (uint k = 0; k < 4; ++k) t[4 * l + k] += t[4 * l + 3 - k];
for (uint k = 0; k < 4; ++k) y[4 * l + k] = t[4 * l + k];
""",
        lambda: {"x": ramp(64, 4)},
        "y:float32[64,4]",
        lambda x: np.c_[
            x[:, 0] + x[:, 3],
            x[:, 1] + x[:, 2],
            x.sum(1) - x[:, 0] - x[:, 3] + x[:, 2],
            x.sum(1) - x[:, 1] - x[:, 2] + x[:, 3],
        ],
    ),
]

ATOMICS = [
    Case(
        "atomics_against_atomics",
        """\
uint i = thread_position_in_grid.x;
atomic_fetch_add_explicit(&y[0], x[i], memory_order_relaxed);
atomic_fetch_max_explicit(&y[1], x[i], memory_order_relaxed);
atomic_store_explicit(&y[2], 5u, memory_order_relaxed);
""",
        lambda: {"x": ramp(64, dtype="uint32")},
        "y:uint32[3]",
        lambda x: [x.sum(), 63, 5],
        threadgroup=32,
        atomic_outputs=True,
        init_value=0,
    ),
    Case(
        "bins_of_threadgroups",
        f"""\
threadgroup atomic_uint bins[8];
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
if (l < 8) atomic_store_explicit(&bins[l], 0u, memory_order_relaxed);
{BARRIER}atomic_fetch_add_explicit(&bins[x[i]], 1u, memory_order_relaxed);
{BARRIER}if (l < 8) {{
    uint n = atomic_load_explicit(&bins[l], memory_order_relaxed);
    atomic_fetch_add_explicit(&counts[l], n, memory_order_relaxed);
}}
""",
        lambda: {"x": ramp(128, dtype="uint32") % 7},
        "counts:uint32[8]",
        lambda x: np.bincount(x, minlength=8),
        grid=128,
        atomic_outputs=True,
        init_value=0,
    ),
    Case(
        "sums_from_zero",
        """\
uint i = thread_position_in_grid.x;
device atomic_float* sum = (device atomic_float*)&y[i % 4];
atomic_fetch_add_explicit(sum, x[i], memory_order_relaxed);
""",
        lambda: {"x": ramp(64)},
        "y:float32[4]",
        lambda x: x.reshape(16, 4).sum(0),
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "largest_by_compare_and_swap",
        """\
uint i = thread_position_in_grid.x;
device atomic_uint* p = (device atomic_uint*)y;
uint old = atomic_load_explicit(p, memory_order_relaxed);
while (old < x[i] && !atomic_compare_exchange_weak_explicit(
    p, &old, x[i], memory_order_relaxed, memory_order_relaxed)) {}
""",
        lambda: {"x": ramp(64, dtype="uint32") * 7 % 61},
        "y:uint32[1]",
        lambda x: [x.max()],
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "places_drawn_by_atomics",
        """\
uint i = thread_position_in_grid.x;
if (x[i] % 2 == 0) return;
uint at = atomic_fetch_add_explicit((device atomic_uint*)n, 1u, memory_order_relaxed);
kept[at] = 9;
""",
        lambda: {"x": ramp(64, dtype="uint32")},
        "n:uint32[1]; kept:uint32[64]",
        lambda x: ([32], np.where(ramp(64) < 32, 9, 0)),
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "last_threadgroup_adds_up",
        """\
threadgroup bool last;
uint l = thread_position_in_threadgroup.x, g = threadgroup_position_in_grid.x;
float s = simd_sum(x[g * 32 + l]);
if (l == 0) {
    partial[g] = s;
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
    uint before = atomic_fetch_add_explicit((device atomic_uint*)n, 1u, memory_order_relaxed);
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
    last = before + 1 == threadgroups_per_grid.x;
}
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
if (last) y[l] = l < 4 ? partial[l] : 0.0f;
""",
        lambda: {"x": ramp(128)},
        "partial:float32[4]; n:uint32[1]; y:float32[32]",
        lambda x: (
            x.reshape(4, 32).sum(1),
            [4],
            [*x.reshape(4, 32).sum(1), *np.zeros(28)],
        ),
        grid=128,
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "flags_of_many_threadgroups",
        """\
uint g = threadgroup_position_in_grid.x;
device atomic_uint* flags = (device atomic_uint*)done;
part[g] = x[g];
atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
atomic_store_explicit(&flags[g], 1u, memory_order_relaxed);
if (g < 256) return;
while (atomic_load_explicit(&flags[g - 256], memory_order_relaxed) == 0u) {}
atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
y[g - 256] = part[g - 256];
""",
        lambda: {"x": ramp(300)},
        "part:float32[300]; done:uint32[300]; y:float32[44]",
        lambda x: (x, np.ones(300), x[:44]),
        grid=300,
        threadgroup=1,
        init_value=0,
    ),
]

BARRIERS = [
    Case(
        "barrier_in_a_uniform_branch",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
if (x_shape[0] > 10) {{
    {BARRIER}    y[l] = t[63 - l];
}} else {{
    y[l] = t[l];
}}
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x[::-1],
    ),
    Case(
        "barriers_that_differ_by_threadgroup",
        f"""\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
t[l] = x[i];
if (threadgroup_position_in_grid.x == 0) {{
    {BARRIER}    y[i] = t[31 - l];
}} else {{
    {BARRIER}    y[i] = t[l ^ 1];
}}
""",
        lambda: {"x": ramp(64)},
        want=lambda x: [*x[31::-1], *x[32:].reshape(16, 2)[:, ::-1].ravel()],
        threadgroup=32,
    ),
    Case(
        "barriers_in_a_loop_of_equal_trips",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}for (uint s = threads_per_threadgroup.x / 2; s > 0; s /= 2) {{
    if (l < s) t[l] += t[l + s];
    {BARRIER}}}
y[l] = t[0];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: np.full(64, x.sum()),
    ),
    Case(
        "loop_left_by_all_at_once",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = 0; k < 8; ++k) {{
    if (x[k * 64] < 0.0f) break;
    t[l] = x[k * 64 + l];
    {BARRIER}    s += t[63 - l];
    {BARRIER}}}
y[l] = s;
""",
        lambda: {"x": _first_rows()},
        want=lambda x: x[:5].sum(0)[::-1],
    ),
    Case(
        "return_of_a_whole_threadgroup",
        f"""\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
if (threadgroup_position_in_grid.x == 1) return;
t[l] = x[i];
{BARRIER}y[i] = t[31 - l];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: [*x[31::-1], *np.zeros(32)],
        threadgroup=32,
        init_value=0,
    ),
    Case(
        "return_after_the_last_barrier",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}if (l >= 20) return;
y[l] = t[l] + t[63 - l];
""",
        lambda: {"x": ramp(64)},
        "y:float32[20]",
        lambda x: np.full(20, 63),
    ),
    Case(
        "two_halves_of_a_buffer",
        f"""\
threadgroup float t[2][64];
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = 0; k < 6; ++k) {{
    t[k % 2][l] = x[k * 64 + l];
    {BARRIER}    s += t[k % 2][63 - l];
}}
y[l] = s;
""",
        lambda: {"x": ramp(6, 64)},
        want=lambda x: x.sum(0)[::-1],
    ),
    Case(
        "simdgroup_barrier_where_data_stays",
        """\
threadgroup float t[2][32];
uint l = thread_index_in_simdgroup, s = simdgroup_index_in_threadgroup;
t[s][l] = x[s * 32 + l];
simdgroup_barrier(mem_flags::mem_threadgroup);
y[s * 32 + l] = t[s][31 - l];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(2, 32)[:, ::-1].ravel(),
    ),
    Case(
        "barrier_in_a_ragged_threadgroup",
        f"""\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
t[l] = x[i];
{BARRIER}y[i] = t[threads_per_threadgroup.x - 1 - l];
""",
        lambda: {"x": ramp(52)},
        "y:float32[52]",
        lambda x: [*x[31::-1], *x[:31:-1]],
        grid=52,
        threadgroup=32,
    ),
    Case(
        "device_memory_fenced",
        """\
uint l = thread_position_in_threadgroup.x;
y[l] = x[l] + 1.0f;
threadgroup_barrier(mem_flags::mem_device);
z[l] = y[63 - l];
""",
        lambda: {"x": ramp(64)},
        "y:float32[64]; z:float32[64]",
        lambda x: (x + 1, x[::-1] + 1),
    ),
    Case(
        "mem_none_at_the_end",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}y[l] = t[l ^ 1];
threadgroup_barrier(mem_flags::mem_none);
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(32, 2)[:, ::-1].ravel(),
    ),
    Case(
        "bytes_beside_each_other",
        f"""\
threadgroup uchar t[64];
threadgroup half h[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
h[l] = half(x[l]);
{BARRIER}y[l] = t[63 - l];
z[l] = h[l ^ 1];
""",
        lambda: {"x": ramp(64, dtype="uint8")},
        "y:uint8[64]; z:float16[64]",
        lambda x: (x[::-1], x.reshape(32, 2)[:, ::-1].ravel()),
    ),
    Case(
        "arena_used_twice",
        f"""\
threadgroup uchar arena[64 * 4];
uint l = thread_position_in_threadgroup.x;
threadgroup float* floats = (threadgroup float*)arena;
floats[l] = x[l];
{BARRIER}float v = floats[63 - l];
{BARRIER}threadgroup ushort* shorts = (threadgroup ushort*)arena;
shorts[l] = ushort(v);
{BARRIER}y[l] = shorts[l ^ 1];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x[::-1].reshape(32, 2)[:, ::-1].ravel(),
    ),
]


def _first_rows() -> np.ndarray:
    """Eight rows, of which the sixth is negative."""
    x = ramp(8, 64)
    x[5] *= -1
    return x


CLEAN_MEMORY: list[Case] = SAME + ATOMICS + BARRIERS
