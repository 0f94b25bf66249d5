"""Bounds: subscripts of device, constant, threadgroup and private arrays that miss them."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, after, before, planted, ramp

DEVICE = [
    planted(
        "bounds",
        "read_past_end",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i + 1] - x[i]; // BUG
""",
        ("x[i + 1]", "(i + 1 < 64 ? x[i + 1] : 0.0f)"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: after(x) - x,
    ),
    planted(
        "bounds",
        "write_past_end",
        """\
uint i = thread_position_in_grid.x;
y[i + 1] = x[i]; // BUG
""",
        ("y[i + 1]", "if (i + 1 < 64) y[i + 1]"),
        inputs=lambda: {"x": ramp(64, start=1)},
        init_value=0,
        want=lambda x: before(x),
    ),
    planted(
        "bounds",
        "ragged_last_threadgroup",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * 2.0f; // BUG
""",
        ("y[i] =", "if (i < 100) y[i] ="),
        inputs=lambda: {"x": ramp(100)},
        outputs="y:float32[100]",
        grid=128,
        threadgroup=32,
        want=lambda x: x * 2,
    ),
    planted(
        "bounds",
        "guard_off_by_one",
        """\
uint i = thread_position_in_grid.x;
if (i > uint(x_shape[0])) return;
y[i] = x[i] * 2.0f; // BUG
""",
        ("if (i >", "if (i >="),
        inputs=lambda: {"x": ramp(100)},
        outputs="y:float32[100]",
        grid=128,
        threadgroup=32,
        want=lambda x: x * 2,
    ),
    planted(
        "bounds",
        "negative_index",
        """\
int i = thread_position_in_grid.x;
y[i] = x[i] - x[i - 1]; // BUG
""",
        ("x[i - 1]", "(i > 0 ? x[i - 1] : 0.0f)"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x - before(x),
    ),
    planted(
        "bounds",
        "uint_underflow",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] - x[i - 1]; // BUG
""",
        ("x[i - 1]", "x[max(i, 1u) - 1]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x - before(x, x[0]),
    ),
    planted(
        "bounds",
        "int_product_overflow",
        """\
uint i = thread_position_in_grid.x;
int fixed = int(i) * (1 << 26);
y[i] = x[fixed >> 26]; // BUG
""",
        ("int fixed = int(i)", "long fixed = long(i)"),
        inputs=lambda: {"x": ramp(64)},
        also=["arithmetic"],
        want=lambda x: x,
    ),
    planted(
        "bounds",
        "uint_product_overflow",
        """\
uint i = thread_position_in_grid.x;
uint row = rows[i];
if (row * 4 >= 64) return;
y[i] = x[ulong(row) * 4]; // BUG
""",
        ("if (row * 4 >=", "if (ulong(row) * 4 >="),
        inputs=lambda: {"x": ramp(64), "rows": _rows()},
        init_value=0,
        want=lambda x, rows: [0 if r > 15 else x[r * 4] for r in rows.tolist()],
    ),
    planted(
        "bounds",
        "shape_beyond_rank",
        """\
uint i = thread_position_in_grid.x;
int width = x_shape[2]; // BUG
y[i] = i % 8 < uint(width) ? x[i] : 0.0f;
""",
        ("x_shape[2]", "x_shape[1]"),
        inputs=lambda: {"x": ramp(8, 8)},
        want=lambda x: x.ravel(),
    ),
    planted(
        "bounds",
        "strides_beyond_rank",
        """\
uint i = thread_position_in_grid.x;
bool dense = x_strides[2] == 1; // BUG
y[i] = dense ? x[i] : 0.0f;
""",
        ("x_strides[2]", "x_strides[1]"),
        inputs=lambda: {"x": ramp(8, 8)},
        ensure_row_contiguous=False,
        want=lambda x: x.ravel(),
    ),
    planted(
        "bounds",
        "stencil",
        """\
int c = thread_position_in_grid.x, r = thread_position_in_grid.y;
float up = x[(r - 1) * 8 + c]; // BUG
y[r * 8 + c] = x[r * 8 + c] - up;
""",
        ("x[(r - 1) * 8 + c]", "x[max(r - 1, 0) * 8 + c]"),
        inputs=lambda: {"x": ramp(8, 8)},
        outputs="y:float32[8,8]",
        grid=(8, 8, 1),
        threadgroup=(8, 4, 1),
        want=lambda x: x - x[[0, *range(7)]],
    ),
    planted(
        "bounds",
        "axes_in_wrong_order",
        """\
uint3 p = thread_position_in_grid;
uint from = (p.x * 4 + p.y) * 8 + p.z;
y[(p.z * 4 + p.y) * 8 + p.x] = x[from]; // BUG
""",
        ("(p.x * 4 + p.y) * 8 + p.z", "((p.z * 4) + p.y) * 8 + 7 - p.x"),
        inputs=lambda: {"x": ramp(2, 4, 8)},
        outputs="y:float32[2,4,8]",
        grid=(8, 4, 2),
        threadgroup=(8, 2, 1),
        want=lambda x: x[:, :, ::-1],
    ),
    planted(
        "bounds",
        "huge_index",
        """\
uint i = thread_position_in_grid.x;
ulong packed = ulong(i) << 40;
y[i] = x[packed]; // BUG
""",
        ("x[packed]", "x[packed >> 40]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x,
    ),
    planted(
        "bounds",
        "gather",
        """\
uint i = thread_position_in_grid.x;
int from = index[i];
y[i] = x[from]; // BUG
""",
        ("x[from]", "from < 0 ? 0.0f : x[from]"),
        inputs=lambda: {"x": ramp(64, start=1), "index": ramp(64, dtype="int32", start=-1)},
        want=lambda x, index: before(x),
    ),
    planted(
        "bounds",
        "scatter",
        """\
uint i = thread_position_in_grid.x;
uint to = index[i];
y[to] = x[i]; // BUG
""",
        ("y[to] =", "if (to < 64) y[to] ="),
        inputs=lambda: {"x": ramp(64), "index": ramp(64, dtype="uint32", start=3)},
        init_value=0,
        want=lambda x, index: [0, 0, 0, *x[:-3]],
    ),
    planted(
        "bounds",
        "atomic_bin",
        """\
uint i = thread_position_in_grid.x;
uint bin = x[i] / 8;
atomic_fetch_add_explicit(&counts[bin], 1u, memory_order_relaxed); // BUG
""",
        ("x[i] / 8", "min(x[i] / 8, 7u)"),
        inputs=lambda: {"x": ramp(64, dtype="uint32", start=4)},
        outputs="counts:uint32[8]",
        atomic_outputs=True,
        init_value=0,
        want=lambda x: [4, 8, 8, 8, 8, 8, 8, 12],
    ),
]

CONSTANT = [
    planted(
        "bounds",
        "constant_buffer",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * w[i % 6]; // BUG
""",
        ("i % 6", "i % 5"),
        inputs=lambda: {"x": ramp(64), "w": ramp(5)},
        want=lambda x, w: x * w[(x % 5).astype(int)],
    ),
    planted(
        "bounds",
        "constant_table",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * WEIGHTS[i % 5]; // BUG
""",
        ("i % 5", "i % 4"),
        header="constant float WEIGHTS[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x * (x % 4 + 1),
    ),
]

THREADGROUP = [
    planted(
        "bounds",
        "threadgroup_write",
        f"""\
threadgroup float t[32];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l]; // BUG
{BARRIER}y[l] = t[l ^ 1];
""",
        ("t[32]", "t[64]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x.reshape(32, 2)[:, ::-1].ravel(),
    ),
    planted(
        "bounds",
        "threadgroup_read",
        f"""\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}y[l] = t[l + 1]; // BUG
""",
        ("t[l + 1]", "t[min(l + 1, 63u)]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: after(x, 63),
    ),
    planted(
        "bounds",
        "threadgroup_negative",
        f"""\
threadgroup float t[64];
int l = thread_position_in_threadgroup.x;
t[l] = x[l];
{BARRIER}for (int k = 1; k < 4; ++k) {{
    float before = t[l - k]; // BUG
    if (k == 2) y[l] = before;
}}
""",
        ("t[l - k]", "l < k ? -1.0f : t[l - k]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: [-1, -1, *x[:-2]],
    ),
    planted(
        "bounds",
        "threadgroup_rows",
        f"""\
threadgroup float t[8][8];
uint l = thread_position_in_threadgroup.x, r = l / 8, c = l % 8;
t[r][c] = x[l];
{BARRIER}y[l] = t[r + 1][c]; // BUG
""",
        ("t[r + 1][c]", "t[(r + 1) % 8][c]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: [*x[8:], *x[:8]],
    ),
    planted(
        "bounds",
        "threadgroup_half_of_it",
        f"""\
threadgroup float t[N / 2];
uint l = thread_position_in_threadgroup.x;
if (l <= N / 2) t[l] = x[l]; // BUG
{BARRIER}y[l] = t[l / 2];
""",
        ("l <= N / 2", "l < N / 2"),
        template=(("N", 64),),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x // 2,
    ),
]

PRIVATE = [
    planted(
        "bounds",
        "private_write",
        """\
uint i = thread_position_in_grid.x;
float w[4] = {0.0f, 0.0f, 0.0f, 0.0f};
for (int k = 0; k <= taps; ++k) {
    w[k] = x[(i + k) % 64]; // BUG
}
y[i] = w[0] + w[1] + w[2] + w[3];
""",
        ("k <= taps", "k < taps"),
        inputs=lambda: {"x": ramp(64), "taps": ramp(dtype="int32", start=4)},
        want=lambda x, taps: sum([*x[k:], *x[:k]] + 0 * x for k in range(4)),
    ),
    planted(
        "bounds",
        "private_read",
        """\
uint i = thread_position_in_grid.x;
float w[4] = {x[i], x[i] * 2.0f, x[i] * 3.0f, x[i] * 4.0f};
y[i] = w[choice[i]]; // BUG
""",
        ("choice[i]", "max(choice[i], 0)"),
        inputs=lambda: {"x": ramp(64), "choice": _choices()},
        want=lambda x, choice: [v * (max(int(c), 0) + 1) for v, c in zip(x, choice, strict=True)],
    ),
    planted(
        "bounds",
        "private_rows",
        """\
uint i = thread_position_in_grid.x;
float m[2][3];
for (uint k = 0; k < 6; ++k) m[k / 3][k % 3] = x[i] + float(k);
y[i] = m[choice[i]][1]; // BUG
""",
        ("choice[i]", "min(choice[i], 1u)"),
        inputs=lambda: {"x": ramp(64), "choice": ramp(64, dtype="uint32") % 3},
        want=lambda x, choice: x + 1 + 3.0 * (choice > 0),
    ),
]


def _choices() -> np.ndarray:
    """Numbers from 0 to 3, and one of -1."""
    choices = ramp(64, dtype="int32") % 4
    choices[9] = -1
    return choices


def _rows() -> np.ndarray:
    """Rows of four; one so far away that the product wraps to a row that is there."""
    rows = ramp(64, dtype="uint32")
    rows[5] = 0x40000001
    return rows


BOUNDS: list[Planted] = DEVICE + CONSTANT + THREADGROUP + PRIVATE
