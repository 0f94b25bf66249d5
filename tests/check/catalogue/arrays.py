"""Writes to inputs, and ops whose grid does not fit what they write."""

from __future__ import annotations

import numpy as np

from .planted import Planted, planted, ramp


def writes(name: str, bad: str, good: str, header: str = "", also: tuple[str, ...] = ()) -> Planted:
    """A body that writes ``x[i] + 1`` to ``x`` instead of ``y``, through a cast."""
    return planted(
        "alias",
        name,
        f"""\
uint i = thread_position_in_grid.x;
{bad} // BUG
y[i] = x[i] + 1.0f;
""",
        (bad, good),
        header=header,
        also=also,
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x + 1,
    )


ALIAS: list[Planted] = [
    writes("c_style_cast", "((device float*)x)[i] = 2.0f;", "y[i] = 2.0f;"),
    writes("const_cast", "const_cast<device float*>(x)[i] = 2.0f;", "y[i] = 2.0f;"),
    writes(
        "vector_cast", "if (i < 16) *((device float4*)x + i) = float4(2.0f);", "", also=("race",)
    ),
    writes("bytes", "((device uchar*)x)[4 * i + 3] = 0;", ""),
    writes("added_to", "*(device float*)(x + i) += 1.0f;", "y[i] = x[i] + 1.0f;"),
    writes(
        "atomic",
        "atomic_fetch_add_explicit((device atomic_float*)(x + i), 1.0f, memory_order_relaxed);",
        "",
    ),
    writes(
        "in_a_helper_of_a_cast",
        "put((device float*)x, i);",
        "put(y, i);",
        "inline void put(device float* p, uint i) { p[i] = 2.0f; } // BUG\n",
    ),
    planted(
        "alias",
        "cast_in_a_helper",
        """\
uint i = thread_position_in_grid.x;
y[i] = take(x, i);
""",
        ("    const_cast<device float*>(p)[i] = 0.0f; // BUG\n", ""),
        header="""\
inline float take(const device float* p, uint i) {
    float v = p[i];
    const_cast<device float*>(p)[i] = 0.0f; // BUG
    return v;
}
""",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x,
    ),
    planted(
        "alias",
        "second_input",
        """\
uint i = thread_position_in_grid.x;
device float* state = (device float*)w;
if (i < 4) state[i] = float(i); // BUG
y[i] = x[i];
""",
        ("if (i < 4) state[i] = float(i)", "(void)state"),
        inputs=lambda: {"x": ramp(64), "w": ramp(8)},
        want=lambda x, w: x,
    ),
]

COVERAGE: list[Planted] = [
    planted(
        "coverage",
        "rows_for_elements",
        "uint i = thread_position_in_grid.x;\ny[i] = x[i] * 2.0f;\n",
        rule="x[N,D]:float32 -> y[N,D]:float32",
        inputs=lambda: {"x": ramp(8, 8)},
        grid="N",
        also=["unwritten"],
        twin={"grid": "N*D"},
        want=lambda x: 2 * x,
    ),
    planted(
        "coverage",
        "rounded_down",
        """\
uint i = thread_position_in_grid.x;
for (uint k = 4 * i; k < min(4 * i + 4, uint(N)); ++k) y[k] = x[k] + 1.0f;
""",
        rule="x[N]:float32 -> y[N]:float32",
        inputs=lambda: {"x": ramp(62)},
        grid="N//4",
        also=["unwritten"],
        twin={"grid": "ceildiv(N,4)"},
        want=lambda x: x + 1,
    ),
    planted(
        "coverage",
        "fixed_size",
        "uint i = thread_position_in_grid.x;\ny[i] = -x[i];\n",
        rule="x[N]:float32 -> y[N]:float32",
        inputs=lambda: {"x": ramp(80)},
        grid="64",
        also=["unwritten"],
        twin={"grid": "N"},
        want=lambda x: -x,
    ),
    planted(
        "coverage",
        "wrong_dim",
        "uint r = thread_position_in_grid.x;\ny[r] = x[r * D];\n",
        rule="x[N,D]:float32 -> y[N]:float32",
        inputs=lambda: {"x": ramp(16, 4)},
        grid="D",
        also=["unwritten"],
        twin={"grid": "N"},
        want=lambda x: x[:, 0],
    ),
    planted(
        "coverage",
        "batches_forgotten",
        "uint3 p = thread_position_in_grid;\nuint i = (p.y * N) + p.x;\ny[i] = x[i] + 1.0f;\n",
        rule="x[B,N]:float32 -> y[B,N]:float32",
        inputs=lambda: {"x": ramp(4, 16)},
        grid=("N", 1, 1),
        threadgroup=(16, 1, 1),
        also=["unwritten"],
        twin={"grid": ("N", "B", 1)},
        want=lambda x: x + 1,
    ),
    planted(
        "coverage",
        "surplus_threads",
        "uint i = thread_position_in_grid.x;\ny[i] = x[i] * 3.0f;\n",
        rule="x[N]:float32 -> y[N]:float32",
        inputs=lambda: {"x": ramp(50)},
        grid="ceildiv(N,32)*32",
        threadgroup=32,
        also=["bounds"],
        twin={"grid": "N"},
        want=lambda x: 3 * x,
    ),
    planted(
        "coverage",
        "elements_for_rows",
        """\
uint r = thread_position_in_grid.x;
float s = 0;
for (uint c = 0; c < uint(D); ++c) {
    s += x[r * D + c];
}
y[r] = s;
""",
        rule="x[N,D]:float32 -> y[N]:float32",
        inputs=lambda: {"x": ramp(16, 4)},
        grid="N*D",
        also=["bounds"],
        twin={"grid": "N"},
        want=lambda x: x.sum(1),
    ),
    planted(
        "coverage",
        "axes_swapped",
        "uint3 p = thread_position_in_grid;\ny[p.y * W + p.x] = x[p.y * W + p.x];\n",
        rule="x[H,W]:float32 -> y[H,W]:float32",
        inputs=lambda: {"x": ramp(4, 16)},
        grid=("H", "W", 1),
        threadgroup=(4, 4, 1),
        also=["bounds", "unwritten", "race"],
        twin={"grid": ("W", "H", 1)},
        want=lambda x: x,
    ),
]

# Kinds that ops have like kernels, on lines of their own.
OPS: list[Planted] = [
    planted(
        "race",
        "op_of_scattered_rows",
        """\
uint i = thread_position_in_grid.x;
y[index[i]] += x[i]; // BUG
""",
        (
            "y[index[i]] += x[i]",
            "atomic_fetch_add_explicit((device atomic_float*)&y[index[i]], x[i], "
            "memory_order_relaxed)",
        ),
        rule="x[N]:float32, index[N]:uint32, like[M]:float32 -> y[M]:float32",
        inputs=lambda: {"x": ramp(64), "index": ramp(64, dtype="uint32") % 7, "like": ramp(9)},
        grid="N",
        threadgroup=32,
        init_value=0,
        want=lambda x, index, like: np.bincount(index, x, 9),
    ),
    planted(
        "bounds",
        "op_of_differences",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i + 1] - x[i]; // BUG
""",
        rule="x[N]:T -> y[N-1]:T",
        inputs=lambda: {"x": ramp(64)},
        grid="N",
        also=["coverage"],
        twin={"grid": "N-1"},
        want=lambda x: np.diff(x),
    ),
]
