"""Bodies that are right and look wrong: launches, their arguments, and ops."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Case, ramp

LAUNCHES = [
    Case(
        "empty_grid",
        "y[thread_position_in_grid.x] = x[thread_position_in_grid.x + 99];\n",
        lambda: {"x": ramp(8)},
        "y:float32[0]",
        lambda x: x[:0],
        grid=0,
        threadgroup=32,
    ),
    Case(
        "scalars_by_reference",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * scale + shift;
""",
        lambda: {"x": ramp(64), "scale": np.float32(2), "shift": ramp(start=3)},
        want=lambda x, scale, shift: x * scale + shift,
    ),
    Case(
        "template_values",
        """\
uint i = thread_position_in_grid.x;
T w[N];
for (int k = 0; k < N; ++k) w[k] = T(x[N * i + k]);
if (FLIP) y[i] = float(w[N - 1]);
else y[i] = float(w[N]);
""",
        lambda: {"x": ramp(64, 4)},
        want=lambda x: x[:, 3],
        template=(("T", np.dtype("float16")), ("N", 4), ("FLIP", True)),
    ),
    Case(
        "some_outputs_filled_before",
        """\
uint i = thread_position_in_grid.x;
if (x[i] > 30.0f) y[i] = x[i];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: np.where(x > 30, x, -1),
        init_value=-1,
    ),
    Case(
        "output_read_after_own_write",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i];
y[i] += 1.0f;
y[i] *= y[i];
""",
        lambda: {"x": ramp(64)},
        want=lambda x: (x + 1) ** 2,
    ),
    Case(
        "helper_with_references",
        """\
uint i = thread_position_in_grid.x;
float a = x[i], b = 0;
exchange(a, b);
store(y[i], a + b);
""",
        lambda: {"x": ramp(64)},
        want=lambda x: x,
        header="""\
inline void exchange(thread float& a, thread float& b) {
    float c = a;
    a = b;
    b = c;
}
inline void store(device float& to, float v) { to = v; }
""",
    ),
    Case(
        "matrices_of_a_simdgroup",
        """\
simdgroup_matrix<float, 8, 8> a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_load(a, x, 8);
simdgroup_load(b, x, 8, ulong2(0, 0), true);
simdgroup_multiply_accumulate(c, a, b, c);
simdgroup_store(c, y, 8);
""",
        lambda: {"x": ramp(8, 8)},
        "y:float32[8,8]",
        lambda x: x @ x.T + 1,
        header="#include <metal_simdgroup_matrix>\n",
        grid=32,
        threadgroup=32,
    ),
]

OPS = [
    Case(
        "op_whose_surplus_threads_stop",
        """\
uint i = thread_position_in_grid.x;
if (i >= uint(N)) return;
y[i] = x[i] + 1.0f;
""",
        lambda: {"x": ramp(50)},
        want=lambda x: x + 1,
        rule="x[N]:float32 -> y[N]:float32",
        grid="ceildiv(N,32)*32",
        threadgroup=32,
    ),
    Case(
        "op_of_four_elements_per_thread",
        """\
uint i = thread_position_in_grid.x;
for (uint k = 4 * i; k < min(4 * i + 4, uint(N)); ++k) y[k] = -x[k];
""",
        lambda: {"x": ramp(50)},
        want=lambda x: -x,
        rule="x[N]:float32 -> y[N]:float32",
        grid="ceildiv(N,4)",
        threadgroup=32,
    ),
    Case(
        "op_with_a_threadgroup_per_row",
        f"""\
threadgroup float partial[2];
uint l = thread_position_in_threadgroup.x, r = threadgroup_position_in_grid.x;
float s = 0;
for (uint c = l; c < uint(D); c += 64) s += x[r * D + c];
s = simd_sum(s);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = s;
{BARRIER}if (l == 0) y[r] = partial[0] + partial[1];
""",
        lambda: {"x": ramp(3, 100)},
        want=lambda x: x.sum(1),
        rule="x[N,D]:float32 -> y[N]:float32",
        grid="N*64",
        threadgroup=64,
    ),
    Case(
        "op_that_scatters",
        """\
uint i = thread_position_in_grid.x;
y[index[i]] = x[i];
""",
        lambda: {"x": ramp(16), "index": ramp(16, dtype="uint32") * 3, "like": ramp(64)},
        want=lambda x, index, like: np.where(ramp(64) % 3 == 0, ramp(64) / 3, 0) * (ramp(64) < 48),
        rule="x[N]:float32, index[N]:uint32, like[M]:float32 -> y[M]:float32",
        grid="N",
        threadgroup=16,
        init_value=0,
    ),
]

CLEAN_LAUNCHES: list[Case] = LAUNCHES + OPS
