"""Barriers that some threads of a group reach and others do not."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, planted, ramp

# Threads that run on past a barrier find what others have not yet written, or write over it.
AFTER = ("race", "uninitialised")

DIVERGENCE: list[Planted] = [
    planted(
        "divergence",
        "early_return",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
if (l >= 50) return;
t[l] = x[l];
threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
y[l] = t[49 - l];
""",
        ("if (l >= 50) return;\nt[l] =", "if (l < 50) t[l] ="),
        ("y[l] =", "if (l < 50) y[l] ="),
        inputs=lambda: {"x": ramp(50)},
        outputs="y:float32[50]",
        also=AFTER,
        want=lambda x: x[::-1],
    ),
    planted(
        "divergence",
        "early_return_of_a_simdgroup",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
if (simdgroup_index_in_threadgroup == 1) return;
threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
y[l] = t[l] + t[l + 32];
""",
        ("if (simdgroup_index_in_threadgroup == 1) return;\n", ""),
        ("y[l] =", "if (simdgroup_index_in_threadgroup == 1) return;\ny[l] ="),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[32]",
        also=AFTER,
        want=lambda x: x[:32] + x[32:],
    ),
    planted(
        "divergence",
        "in_a_branch",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
if (l < 48) {
    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
    y[l] = t[(l + 1) % 48];
}
""",
        ("if (l < 48) {\n    threadgroup_barrier", "threadgroup_barrier"),
        ("    y[l] =", "if (l < 48) {\n    y[l] ="),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[48]",
        also=AFTER,
        want=lambda x: [*x[1:48], 0],
    ),
    planted(
        "divergence",
        "in_the_branch_of_a_tree",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}for (uint s = 32; s > 0; s /= 2) {{
    if (l < s) {{
        t[l] += t[l + s];
        threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
    }}
}}
if (l == 0) y[0] = t[0];
""",
        (
            "        threadgroup_barrier(mem_flags::mem_threadgroup); // BUG\n    }\n",
            f"    }}\n    {BARRIER}",
        ),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[1]",
        also=AFTER,
        want=lambda x: x.sum(keepdims=True),
    ),
    planted(
        "divergence",
        "trip_counts_differ",
        """\
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = l; k < 96; k += 64) {
    s += x[k];
    threadgroup_barrier(mem_flags::mem_none); // BUG
}
y[l] = s;
""",
        (
            "for (uint k = l; k < 96; k += 64) {\n    s += x[k]",
            "for (uint k = l; k < 128; k += 64) {\n    if (k < 96) s += x[k]",
        ),
        inputs=lambda: {"x": ramp(96)},
        want=lambda x: [*(x[:32] + x[64:]), *x[32:64]],
    ),
    planted(
        "divergence",
        "trip_counts_from_data",
        """\
uint l = thread_position_in_threadgroup.x;
float s = 0;
uint n = count[l];
while (n > 0) {
    s += x[l];
    --n;
    threadgroup_barrier(mem_flags::mem_none); // BUG
}
y[l] = s;
""",
        ("uint n = count[l];", "uint n = 4;"),
        ("s += x[l]", "if (n <= count[l]) s += x[l]"),
        inputs=lambda: {"x": ramp(64), "count": ramp(64, dtype="uint32") % 5},
        want=lambda x, count: x * count,
    ),
    planted(
        "divergence",
        "left_by_break",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = 0; k < 4; ++k) {
    if (k * 64 + l >= 220) break;
    t[l] = x[k * 64 + l];
    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
    s += t[l];
}
y[l] = s;
""",
        ("if (k * 64 + l >= 220) break;\n    t[l] =", "t[l] = k * 64 + l >= 220 ? 0.0f :"),
        inputs=lambda: {"x": ramp(220)},
        also=AFTER,
        want=lambda x: np.append(x, np.zeros(36)).reshape(4, 64).sum(0),
    ),
    planted(
        "divergence",
        "passed_by_continue",
        """\
uint l = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = 0; k < 4; ++k) {
    if ((l + k) % 4 == 0) continue;
    s += x[k * 64 + l];
    threadgroup_barrier(mem_flags::mem_none); // BUG
}
y[l] = s;
""",
        ("if ((l + k) % 4 == 0) continue;\n    s +=", "if ((l + k) % 4 != 0) s +="),
        inputs=lambda: {"x": ramp(4, 64)},
        want=lambda x: np.where((ramp(64) + ramp(4, 1)) % 4, x, 0).sum(0),
    ),
    planted(
        "divergence",
        "one_in_each_branch",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
if (l < 32) {
    t[l] = x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
} else {
    t[l] = -x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
}
y[l] = t[63 - l];
""",
        (
            "t[l] = x[l];\n    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG\n",
            "t[l] = x[l];\n",
        ),
        (
            "t[l] = -x[l];\n    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG\n}\n",
            f"t[l] = -x[l];\n}}\n{BARRIER}",
        ),
        inputs=lambda: {"x": ramp(64)},
        also=AFTER,
        want=lambda x: np.where(x < 32, x, -x)[::-1],
    ),
    planted(
        "divergence",
        "in_a_helper",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
if (l < 40) share(t, l, x[l]);
y[l] = l < 40 ? t[39 - l] : 0.0f;
""",
        ("if (l < 40) share", "share"),
        header="""\
inline void share(threadgroup float* t, uint l, float v) {
    t[l] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
}
""",
        inputs=lambda: {"x": ramp(64)},
        also=AFTER,
        want=lambda x: [*x[39::-1], *np.zeros(24)],
    ),
    planted(
        "divergence",
        "in_a_switch",
        """\
uint l = thread_position_in_threadgroup.x;
y[l] = x[l];
switch (l / 32) {
    case 0:
        threadgroup_barrier(mem_flags::mem_none); // BUG
        break;
    default:
        y[l] = -x[l];
}
""",
        ("        threadgroup_barrier(mem_flags::mem_none); // BUG\n", ""),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.where(x < 32, x, -x),
    ),
    planted(
        "divergence",
        "of_a_simdgroup",
        """\
threadgroup float t[32];
uint l = thread_index_in_simdgroup;
t[l] = x[l];
if (l < 16) {
    simdgroup_barrier(mem_flags::mem_threadgroup); // BUG
    y[l] = t[31 - l];
}
""",
        ("if (l < 16) {\n    simdgroup_barrier", "simdgroup_barrier"),
        ("    y[l] =", "if (l < 16) {\n    y[l] ="),
        inputs=lambda: {"x": ramp(32)},
        outputs="y:float32[16]",
        grid=32,
        threadgroup=32,
        also=AFTER,
        want=lambda x: x[:15:-1],
    ),
    planted(
        "divergence",
        "in_the_ragged_last_threadgroup",
        """\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
t[l] = x[i];
if (i < 48) threadgroup_barrier(mem_flags::mem_threadgroup); // BUG
y[i] = t[l ^ 1];
""",
        ("if (i < 48) threadgroup", "threadgroup"),
        inputs=lambda: {"x": ramp(52)},
        outputs="y:float32[52]",
        grid=52,
        threadgroup=32,
        also=AFTER,
        want=lambda x: x.reshape(26, 2)[:, ::-1].ravel(),
    ),
]
