"""Bounds: accesses through pointers, functions, macros, vectors, strides and other dtypes."""

from __future__ import annotations

import numpy as np

from .planted import Planted, after, before, planted, ramp

THROUGH = [
    planted(
        "bounds",
        "helper",
        """\
uint i = thread_position_in_grid.x;
y[i] = right(x, i) - x[i];
""",
        ("p[i + 1]", "p[min(i + 1, 63u)]"),
        header="""\
inline float right(const device float* p, uint i) {
    return p[i + 1]; // BUG
}
""",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x < 63,
    ),
    planted(
        "bounds",
        "pointer_from_helper",
        """\
uint i = thread_position_in_grid.x;
const device float* below = row(x, i / 8 + 1);
y[i] = below[i % 8]; // BUG
""",
        ("i / 8 + 1", "(i / 8 + 1) % 8"),
        header="""\
inline const device float* row(const device float* p, uint r) {
    return p + r * 8;
}
""",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: [*x[8:], *x[:8]],
    ),
    planted(
        "bounds",
        "write_in_helper",
        """\
uint i = thread_position_in_grid.x;
put(y + 2 * i, x[i]);
""",
        ("p[2] = -v", "p[1] = -v"),
        header="""\
inline void put(device float* p, float v) {
    p[0] = v;
    p[2] = -v; // BUG
}
""",
        inputs=lambda: {"x": ramp(32, start=1)},
        grid=32,
        also=["race", "unwritten"],
        want=lambda x: [s * v for v in x for s in (1, -1)],
    ),
    planted(
        "bounds",
        "macro",
        """\
#define LEFT(p, i) p[int(i) - 1]
uint i = thread_position_in_grid.x;
y[i] = LEFT(x, i); // BUG
""",
        ("int(i) - 1", "max(int(i) - 1, 0)"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: before(x),
    ),
    planted(
        "bounds",
        "macro_of_header",
        """\
uint i = thread_position_in_grid.x;
float a = LOAD(x, 2 * i);
float b = LOAD(x, 2 * i + 2); // BUG
y[i] = a + b;
""",
        ("2 * i + 2", "2 * i + 1"),
        header="#define LOAD(p, i) (*((const device float*)(p) + (i)))\n",
        inputs=lambda: {"x": ramp(128)},
        want=lambda x: x[::2] + x[1::2],
    ),
    planted(
        "bounds",
        "template_function",
        """\
uint i = thread_position_in_grid.x;
y[i] = total<float, 4>(x + 4 * i);
""",
        ("k <= N", "k < N"),
        header="""\
template <typename T, int N>
T total(const device T* p) {
    T s = 0;
    for (int k = 0; k <= N; ++k) {
        s += p[k]; // BUG
    }
    return s;
}
""",
        inputs=lambda: {"x": ramp(256)},
        want=lambda x: x.reshape(64, 4).sum(1),
    ),
    planted(
        "bounds",
        "lambda",
        """\
uint i = thread_position_in_grid.x;
auto at = [&](uint j) {
    return x[j]; // BUG
};
y[i] = at(i) + at(i + 1);
""",
        ("at(i + 1)", "at((i + 1) % 64)"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x + after(x),
    ),
    planted(
        "bounds",
        "walking_pointer",
        """\
uint i = thread_position_in_grid.x;
const device float* p = x + 4 * i;
float s = 0;
for (int k = 0; k <= 4; ++k) {
    s += *p++; // BUG
}
y[i] = s;
""",
        ("k <= 4", "k < 4"),
        inputs=lambda: {"x": ramp(256)},
        want=lambda x: x.reshape(64, 4).sum(1),
    ),
    planted(
        "bounds",
        "member_of_struct",
        """\
uint i = thread_position_in_grid.x;
View view = {x + 1};
y[i] = view.at(i);
""",
        ("{x + 1}", "{x}"),
        header="""\
struct View {
    const device float* data;
    float at(uint i) const {
        return data[i]; // BUG
    }
};
""",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x,
    ),
    planted(
        "bounds",
        "pointer_to_threadgroup",
        """\
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x;
t[l] = x[l];
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup const float* mine = t + l;
y[l] = mine[0] + mine[1]; // BUG
""",
        ("mine[1]", "mine[l < 63 ? 1 : 0]"),
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x + after(x, 63),
    ),
    planted(
        "bounds",
        "private_array_in_helper",
        """\
uint i = thread_position_in_grid.x;
float w[4];
for (uint k = 0; k < 4; ++k) w[k] = x[i] + float(k);
y[i] = last(w, 4);
""",
        ("w[n]", "w[n - 1]"),
        header="""\
inline float last(thread const float* w, int n) {
    return w[n]; // BUG
}
""",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: x + 3,
    ),
]

VECTORS = [
    planted(
        "bounds",
        "vector_read",
        """\
uint i = thread_position_in_grid.x;
const device float4* quads = (const device float4*)x;
float4 a = quads[i]; // BUG
y[i] = a.x + a.y + a.z + a.w;
""",
        ("quads[i]", "i < 15 ? quads[i] : float4(x[60], x[61], 0.0f, 0.0f)"),
        inputs=lambda: {"x": ramp(62)},
        outputs="y:float32[16]",
        grid=16,
        want=lambda x: [*x, 0, 0] @ (ramp(64)[:, None] // 4 == ramp(16)),
    ),
    planted(
        "bounds",
        "vector_write",
        """\
uint i = thread_position_in_grid.x;
device float4* quads = (device float4*)y;
quads[i] = float4(x[i]); // BUG
""",
        ("quads[i] =", "if (i == 15) y[60] = y[61] = x[i];\nelse quads[i] ="),
        inputs=lambda: {"x": ramp(16)},
        outputs="y:float32[62]",
        grid=16,
        want=lambda x: x.repeat(4)[:62],
    ),
    planted(
        "bounds",
        "packed_triples",
        """\
uint i = thread_position_in_grid.x;
const device packed_float3* points = (const device packed_float3*)x;
float3 p = float3(points[i]); // BUG
y[i] = p.x + p.y + p.z;
""",
        ("float3(points[i])", "i < 21 ? float3(points[i]) : float3(x[63], 0.0f, 0.0f)"),
        inputs=lambda: {"x": ramp(64)},
        outputs="y:float32[22]",
        grid=22,
        want=lambda x: [*x[:63].reshape(21, 3).sum(1), x[63]],
    ),
    planted(
        "bounds",
        "words_of_bytes",
        """\
uint i = thread_position_in_grid.x;
const device uint* words = (const device uint*)x;
y[i] = words[i] & 0xff; // BUG
""",
        ("words[i]", "(i < 15 ? words[i] : uint(x[60]))"),
        inputs=lambda: {"x": ramp(62, dtype="uint8")},
        outputs="y:uint32[16]",
        grid=16,
        want=lambda x: x[::4],
    ),
    planted(
        "bounds",
        "matrix_load",
        """\
simdgroup_matrix<float, 8, 8> m;
simdgroup_load(m, x, 8, ulong2(0, 1)); // BUG
simdgroup_store(m, y, 8);
""",
        ("ulong2(0, 1)", "ulong2(0, 0)"),
        header="#include <metal_simdgroup_matrix>\n",
        inputs=lambda: {"x": ramp(8, 8)},
        outputs="y:float32[8,8]",
        grid=32,
        threadgroup=32,
        want=lambda x: x,
    ),
]

STRIDED = [
    planted(
        "bounds",
        "strides_mixed_up",
        """\
uint i = thread_position_in_grid.x, r = i / 8, c = i % 8;
y[i] = x[r * x_strides[0] + c * x_strides[0]]; // BUG
""",
        ("c * x_strides[0]", "c * x_strides[1]"),
        inputs=lambda: {"x": ramp(8, 16)[:, ::2]},
        ensure_row_contiguous=False,
        want=lambda x: x.ravel(),
    ),
    planted(
        "bounds",
        "negative_stride",
        """\
uint i = thread_position_in_grid.x;
uint from = elem_to_loc(i, x_shape, x_strides, x_ndim);
y[i] = x[from]; // BUG
""",
        ("uint from = elem_to_loc(", "int64_t from = elem_to_loc<int64_t>("),
        inputs=lambda: {"x": ramp(8, 8)[::-1]},
        ensure_row_contiguous=False,
        want=lambda x: x.ravel(),
    ),
    planted(
        "bounds",
        "broadcast_read_as_dense",
        """\
uint i = thread_position_in_grid.x, r = i / 8, c = i % 8;
y[i] = x[r * x_shape[1] + c]; // BUG
""",
        ("r * x_shape[1] + c", "r * x_strides[0] + c * x_strides[1]"),
        inputs=lambda: {"x": _broadcast()},
        ensure_row_contiguous=False,
        want=lambda x: x.ravel(),
    ),
]


def reversed_by(dtype: str) -> Planted:
    """Reversal that is off by one, of elements of ``dtype``."""
    return planted(
        "bounds",
        f"elements_of_{dtype}",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[64 - i]; // BUG
""",
        ("64 - i", "63 - i"),
        inputs=lambda: {"x": ramp(64, dtype=dtype)},
        outputs=f"y:{dtype}[64]",
        want=lambda x: x[::-1],
    )


def _broadcast() -> np.ndarray:
    """A row of eight that stands for eight rows, with nothing behind it."""
    return np.broadcast_to(ramp(8), (8, 8))


DTYPES = [reversed_by(dtype) for dtype in ("float16", "bfloat16", "uint8", "int64")]

BOUNDS_THROUGH: list[Planted] = THROUGH + VECTORS + STRIDED + DTYPES
