"""simdgroup_matrix: 8x8 tiles of float, half and bfloat over the 32 lanes of a simdgroup."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import KINDS, Array, run

f32 = np.float32
TYPES = {
    "float": "simdgroup_float8x8",
    "half": "simdgroup_half8x8",
    "bfloat": "simdgroup_bfloat8x8",
}


def tile(seed: int, shape: tuple[int, ...] = (8, 8)) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(f32)


def place(lane: Array) -> tuple[Array, Array]:
    """Row and first column of the two neighbours that a lane holds: part of the contract."""
    q = lane // 4
    return (q & 4) + lane // 2 % 4, (q & 2) * 2 + lane % 2 * 2


@pytest.mark.parametrize("kind", TYPES)
def test_load_store_and_products(kind: str, mode: str) -> None:
    name = TYPES[kind]
    body = f"""
    {name} A, B, C = make_filled_simdgroup_matrix<{kind}, 8, 8>({kind}(1)), D;
    simdgroup_matrix<{kind}, 8, 8> E(2), F;
    simdgroup_load(A, a, 8);
    simdgroup_load(B, b, 8, ulong2(0, 0), false);
    simdgroup_multiply_accumulate(C, A, B, C);
    simdgroup_store(C, y, 8);
    simdgroup_multiply(D, A, B);
    simdgroup_store(D, y + 64, 8);
    simdgroup_store(A, y + 128, 8, ulong2(0, 0), true);
    simdgroup_load(D, b, 8, ulong2(0, 0), true);
    simdgroup_store(D, y + 192, 8);
    simdgroup_multiply(D, A, E);
    simdgroup_store(D, y + 256, 8);
    F = A;
    simdgroup_multiply_accumulate(F, A, B, F);
    simdgroup_multiply_accumulate(F, F, E, A);
    simdgroup_store(F, y + 320, 8);
    """
    a, b = tile(1) / 2, tile(2)
    dtype = KINDS[kind]
    y = run(body, {"a": a.astype(dtype), "b": b.astype(dtype)}, {"y": (kind, (6, 8, 8))}, 32, 32,
     mode=mode,
            header="#include <metal_simdgroup_matrix>")["y"].astype(f32)  # fmt: skip
    rounded = (a + a @ b).astype(dtype).astype(f32)
    last = (rounded @ (2 * np.eye(8, dtype=f32)) + a).astype(dtype).astype(f32)
    for row, want in enumerate([a @ b + 1, a @ b, a.T, b.T, a * 2, last]):
        assert (y[row] == want.astype(dtype).astype(f32)).all(), row


def test_products_of_narrow_tiles_accumulate_in_float(mode: str) -> None:
    body = """
    uint s = simdgroup_index_in_threadgroup;
    simdgroup_half8x8 A, B; simdgroup_bfloat8x8 G, H;
    simdgroup_float8x8 C(0), D = make_filled_simdgroup_matrix<float, 8>(0.5f);
    simdgroup_load(A, a + s * 64, 8);
    simdgroup_load(B, b + s * 64, 8);
    simdgroup_load(G, g + s * 64, 8);
    simdgroup_load(H, h + s * 64, 8);
    for (int k = 0; k < 3; ++k) simdgroup_multiply_accumulate(C, A, B, C);
    simdgroup_multiply_accumulate(D, G, H, D);
    simdgroup_store(C, y + s * 128, 8);
    simdgroup_store(D, y + s * 128 + 64, 8);
    """
    a, b, g, h = (np.random.default_rng(k).normal(size=(2, 8, 8)).astype(f32) for k in range(4))
    a, b = a.astype(np.float16), b.astype(np.float16)
    g, h = g.astype(KINDS["bfloat"]), h.astype(KINDS["bfloat"])
    y = run(
        body, {"a": a, "b": b, "g": g, "h": h}, {"y": ("float", (2, 2, 8, 8))}, 64, 64, mode=mode
    )["y"]
    assert np.allclose(y[:, 0], 3 * (a.astype(f32) @ b.astype(f32)), rtol=1e-6, atol=1e-5)
    assert np.allclose(y[:, 1], g.astype(f32) @ h.astype(f32) + 0.5, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_elements_of_a_lane(kind: str, mode: str) -> None:
    body = f"""
    uint l = thread_index_in_simdgroup, q = l / 4;
    uint r = (q & 4) + (l / 2) % 4, c = (q & 2) * 2 + (l % 2) * 2;
    {TYPES[kind]} A, B;
    simdgroup_load(A, a, 8);
    thread auto& e = A.thread_elements();
    y[r * 8 + c] = e[0];
    y[r * 8 + c + 1] = A.thread_elements()[1];
    B.thread_elements()[0] = {kind}(float(r));
    B.thread_elements()[1] = {kind}(float(c));
    e[0] *= {kind}(2);
    A.thread_elements()[1] += {kind}(1);
    simdgroup_store(A, y + 64, 8);
    simdgroup_store(B, y + 128, 8);
    {kind} both = {kind}(0);
    for (int k = 0; k < 2; ++k) both += B.thread_elements()[k];
    z[l] = float(both);
    B.thread_elements() = vec<{kind}, 2>(float(l), -1.0f);
    z[l + 32] = float(B.thread_elements()[0]) + float(B.thread_elements()[1]);
    """
    a = tile(3)
    dtype = KINDS[kind]
    outs: dict[str, Any] = {"y": (kind, (3, 8, 8)), "z": ("float", (2, 32))}
    out = run(body, {"a": a.astype(dtype)}, outs, 32, 32, mode=mode)
    y = out["y"].astype(f32)
    lane = np.arange(32)
    row, column = place(lane)
    assert (y[0] == a).all()
    doubled = a.copy()
    doubled[row, column] *= 2
    doubled[row, column + 1] += 1
    assert (y[1] == doubled).all()
    whose = np.zeros((8, 8), f32)
    whose[row, column], whose[row, column + 1] = row, column
    assert (y[2] == whose).all()
    assert (out["z"] == [row + column, lane - 1]).all()


@pytest.mark.parametrize("hidden", [False, True])
def test_elements_of_a_diagonal_that_nobody_loads(hidden: bool, mode: str) -> None:
    """No operation of a simdgroup is in sight, and yet each lane has its own elements."""
    header = "float2 held(simdgroup_float8x8 m) { return m.thread_elements(); }" if hidden else ""
    body = f"""
    simdgroup_float8x8 m(3.0f);
    float2 v = {"held(m)" if hidden else "m.thread_elements()"};
    uint i = thread_position_in_grid.x;
    y[2 * i] = v.x; y[2 * i + 1] = v.y;
    """
    y = run(body, {}, {"y": ("float", (64,))}, 32, 32, mode=mode, header=header)["y"]
    row, column = place(np.arange(32))
    want = 3 * np.stack([row == column, row == column + 1], axis=1)
    assert (y.reshape(32, 2) == want).all()


def test_origins_strides_and_transposition(mode: str) -> None:
    body = """
    threadgroup float t[16 * 24];
    uint l = thread_index_in_threadgroup;
    simdgroup_float8x8 A, B, C, D;
    simdgroup_load(A, a, 20, ulong2(3, 2));
    simdgroup_store(A, y, 24, ulong2(8, 0));
    simdgroup_load(B, a, ulong(20), ulong2(5, 1), true);
    simdgroup_store(B, y, 24, ulong2(16, 0));
    for (uint k = l; k < 384; k += 32) t[k] = a[k % 320];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(C, t + 24, 24, ulong2(2, 3));
    simdgroup_store(C, y, 24, ulong2(0, 8));
    simdgroup_store(C, t, 24, ulong2(1, 0), true);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(D, (const threadgroup float*)t + 1, 24);
    simdgroup_store(D, y, 24, ulong2(8, 8));
    simdgroup_load(D, a + 20 * 4, 20, 0, true);
    simdgroup_store(D, y + 24 * 8 + 16, 24);
    """
    a = np.arange(320, dtype=f32).reshape(16, 20)
    y = run(body, {"a": a}, {"y": ("float", (16, 24))}, 32, 32, mode=mode, init_value=-1)["y"]
    t = np.arange(384, dtype=f32)
    t[320:] -= 320
    c = t.reshape(16, 24)[4:12, 2:10]
    want = np.full((16, 24), -1, f32)
    want[:8, 8:16] = a[2:10, 3:11]
    want[:8, 16:24] = a[1:9, 5:13].T
    want[8:, :8], want[8:, 8:16] = c, c.T
    want[8:, 16:] = a[4:12, :8].T
    assert (y == want).all(), np.argwhere(y != want)[:5]


def test_a_matrix_product_by_tiles(mode: str) -> None:
    """Four simdgroups, each with 2x2 accumulators in an array, threadgroup tiles, a K loop."""
    header = "#include <metal_simdgroup_matrix>\nusing namespace metal;"
    body = """
    threadgroup half ta[32][24], tb[16][40];
    uint s = simdgroup_index_in_threadgroup, l = thread_index_in_threadgroup;
    uint2 g = threadgroup_position_in_grid.xy;
    simdgroup_matrix<float, 8, 8> acc[2][2];
    for (int r = 0; r < 2; ++r) for (int c = 0; c < 2; ++c) acc[r][c] = simdgroup_matrix<float, 8,
        8>(0);
    for (int k = 0; k < K; k += 16) {
        for (uint e = l; e < 32 * 16; e += 128) ta[e / 16][e % 16] = a[(g.y * 32 + e / 16) * K +
            k + e % 16];
        for (uint e = l; e < 16 * 32; e += 128) tb[e / 32][e % 32] = b[(k + e / 32) * N +
            g.x * 32 + e % 32];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int j = 0; j < 16; j += 8) {
            simdgroup_half8x8 A[2], B[2];
            for (int r = 0; r < 2; ++r) simdgroup_load(A[r], &ta[(s / 2) * 16 + r * 8][j], 24);
            for (int c = 0; c < 2; ++c) simdgroup_load(B[c], &tb[j][(s % 2) * 16 + c * 8], 40);
            for (int r = 0; r < 2; ++r) for (int c = 0; c < 2; ++c)
                simdgroup_multiply_accumulate(acc[r][c], A[r], B[c], acc[r][c]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int r = 0; r < 2; ++r) for (int c = 0; c < 2; ++c)
        simdgroup_store(acc[r][c], y + (g.y * 32 + (s / 2) * 16 + r * 8) * N + g.x * 32 +
            (s % 2) * 16 + c * 8, N);
    """
    a, b = tile(4, (64, 48)).astype(np.float16), tile(5, (48, 96)).astype(np.float16)
    y = run(body, {"a": a, "b": b}, {"y": ("float", (64, 96))}, (3 * 128, 2, 1), (128, 1, 1),
     mode=mode, header=header,
            template=[("K", 48), ("N", 96)])["y"]  # fmt: skip
    assert (y == a.astype(f32) @ b.astype(f32)).all()


def test_helpers_that_take_matrices(mode: str) -> None:
    header = """
    template <typename T> using Tile = simdgroup_matrix<T, 8, 8>;
    template <typename T, typename U> inline void mma(thread Tile<U>& c, thread Tile<T>& a,
        thread Tile<T>& b) { simdgroup_multiply_accumulate(c, a, b, c); }
    struct Work { simdgroup_float8x8 c; void start() thread {
        c = make_filled_simdgroup_matrix<float, 8, 8>(3.0f); } };
    inline simdgroup_float8x8 loaded(const device float* p) { simdgroup_float8x8 m;
    simdgroup_load(m, p, 8); return m; }
    """
    body = """
    Work w; w.start();
    simdgroup_float8x8 A = loaded(a), B = loaded(b);
    mma(w.c, A, B);
    simdgroup_store(w.c, y, 8);
    """
    a, b = tile(6), tile(7)
    y = run(body, {"a": a, "b": b}, {"y": ("float", (8, 8))}, 32, 32, mode=mode, header=header)["y"]
    assert (y == a @ b + 3).all()
