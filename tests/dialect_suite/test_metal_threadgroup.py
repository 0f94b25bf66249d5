"""The forms of threadgroup memory: arrays, structs, pointers, references, casts, parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ferrule
from metal_harness import KINDS, Array, run

f32 = np.float32


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    ferrule.set_threads(request.param)
    yield request.param
    ferrule.set_threads(None)


def numbers(n: int, seed: int = 61) -> Array:
    return np.random.default_rng(seed).integers(-50, 50, n).astype(f32)


def test_arrays_of_every_type_and_shape(mode: str) -> None:
    kinds = [k for k in KINDS if k != "bool"]
    lines = [
        "constexpr int N = 32;",
        "uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;",
    ]
    lines += [f"threadgroup {kind} t_{kind}[32];" for kind in kinds]
    lines += [
        "threadgroup bool t_bool[32], flags[4][8];",
        "threadgroup float4 t4[32]; threadgroup half3 h3[N];",
    ]
    lines += [
        "threadgroup float a[4][8], b[2][4][4], single; threadgroup float* p = a[1];",
        "threadgroup uchar4 bytes[N / 2 + 16];",
    ]
    lines += [f"t_{kind}[l] = {kind}(x[i]);" for kind in kinds]
    lines.append("""
    t_bool[l] = x[i] > 0; flags[l / 8][l % 8] = l & 1;
    t4[l] = float4(x[i], l, 2, 3); h3[l] = half3(1, 2, x[i]);
    a[l / 8][l % 8] = x[i]; b[l / 16][l / 4 % 4][l % 4] = x[i] + 1; bytes[l] = uchar4(l, 1, 2, 3);
    if (l == 9) single = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint m = 31 - l;
    float sum = 0;
    """)
    lines += [f"sum += float(t_{kind}[m]);" for kind in kinds]
    lines.append("""
    y[i * 6] = sum;
    y[i * 6 + 1] = float(t_bool[m]) + 10 * float(flags[m / 8][m % 8]);
    y[i * 6 + 2] = t4[m].x + t4[m].y * 100;
    y[i * 6 + 3] = float(h3[m].z) + a[m % 4][m / 4];
    y[i * 6 + 4] = b[m % 2][m / 8][m / 2 % 4] + float(bytes[m].x);
    y[i * 6 + 5] = p[l % 8] + p[-1] + single + sizeof(a) + sizeof(t4);
    """)
    x = np.abs(numbers(64))
    y = run("\n".join(lines), {"x": x}, {"y": ("float", (2, 32, 6))}, 64, 32, mode=mode)["y"]
    lane = np.arange(32)
    m = 31 - lane
    for g in range(2):
        v = x[g * 32 : g * 32 + 32]
        assert (y[g, :, 0] == v[m] * len(kinds)).all()
        assert (y[g, :, 1] == (v[m] > 0) + 10 * (m & 1)).all()
        assert (y[g, :, 2] == v[m] + m * 100).all()
        assert (y[g, :, 3] == v[m] + v.reshape(4, 8)[m % 4, m // 4]).all()
        assert (y[g, :, 4] == v.reshape(2, 4, 4)[m % 2, m // 8, m // 2 % 4] + 1 + m).all()
        assert (y[g, :, 5] == v[8 + lane % 8] + v[7] + v[9] + 128 + 512).all()


HEADER = """
struct Pair { float a; uint n; };
struct Block { float rows[4][8]; int count; Pair pairs[2];
float sum() const threadgroup { return rows[0][0] + rows[3][7]; } };
inline void put(threadgroup float* t, uint l, float v) { t[l] = v; }
inline float get(threadgroup const float* t, uint l) { return t[l]; }
inline void bump(threadgroup int& n, int k) { n += k; }
inline float row_sum(threadgroup float (&t)[4][8], int r) { float s = 0;
for (int c = 0; c < 8; ++c) s += t[r][c]; return s; }
inline float row_ptr(threadgroup float (*t)[8], int r, int c) { return t[r][c]; }
template <int N> inline float last(const threadgroup float (&t)[N]) { return t[N - 1]; }
template <typename T, typename P> inline T read(P p, uint k) { return T(p[k]); }
template <typename T> inline void fill(threadgroup T* t, uint l, T v) { t[l] = v; }
inline void set(threadgroup Pair* p, float a, uint n) { p->a = a; p->n = n; }
"""


def test_structs_pointers_references_and_parameters(mode: str) -> None:
    body = """
    threadgroup float t[32]; threadgroup float grid[4][8]; threadgroup Pair one;
    threadgroup Pair many[4];
    threadgroup Block block; threadgroup int counter; threadgroup half halves[32];
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    put(t, l, x[i]); grid[l / 8][l % 8] = x[i] * 2; fill(halves, l, half(x[i]));
    block.rows[l / 8][l % 8] = x[i] + 1;
    if (l == 0) { one.a = 5; one.n = 7; counter = 100; block.count = 3;
    set(&block.pairs[1], 2.5f, 4); }
    if (l < 4) many[l] = {float(l), l * 2};
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 31) { bump(counter, 11); threadgroup int* c = &counter; *c += 1; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* p = t + 4; threadgroup const float* q = &t[8]; threadgroup float& r = t[3];
    threadgroup float (*rows)[8] = grid; threadgroup float* row = grid[l / 8];
    threadgroup Block* b = &block;
    float o[12];
    o[0] = get(t, 31 - l) + p[l % 8] + q[-1] + *q;
    o[1] = r + *(t + l) + (t + 5)[0];
    o[2] = row_sum(grid, l % 4);
    o[3] = row_ptr(grid, l / 8, l % 8) + rows[1][2] + row[l % 8];
    o[4] = last(t) + read<float>(t, 2) + read<float>(halves, 3) + read<float>(&x[0], 1);
    o[5] = one.a + one.n + many[l % 4].a + many[3 - l % 4].n;
    o[6] = counter;
    o[7] = b->rows[l % 4][l / 4] + block.count + block.pairs[1].a + b->pairs[1].n;
    o[8] = block.sum();
    o[9] = float(&t[l] - t) + float(q - p) + (p == &t[4]) + (p != q);
    o[10] = (l & 1 ? t : &t[16])[l / 2];
    threadgroup float* walk = t; float s = 0; for (threadgroup float* e = t + 32; walk < e; ++walk)
        s += *walk;
    o[11] = s;
    for (int k = 0; k < 12; ++k) y[i * 12 + k] = o[k];
    """
    x = numbers(64)
    y = run(body, {"x": x}, {"y": ("float", (2, 32, 12))}, 64, 32, mode=mode, header=HEADER)["y"]
    l = np.arange(32)  # noqa: E741
    for g in range(2):
        v = x[g * 32 : g * 32 + 32]
        grid = (v * 2).reshape(4, 8)
        want = [
            v[31 - l] + v[4 + l % 8] + v[7] + v[8], v[3] + v + v[5], grid.sum(1)[l % 4],
            v * 2 + grid[1, 2] + v * 2, np.full(32, v[31] + v[2] + v[3] + x[1]),
            12 + l % 4 + (3 - l % 4) * 2,
            np.full(32, 112), v.reshape(4, 8)[l % 4, l // 4] + 1 + 3 + 2.5 + 4,
            np.full(32, v[0] + v[31] + 2),
            l + 4 + 2, np.where(l & 1, v[l // 2], v[16 + l // 2]), np.full(32, v.sum()),
        ]  # fmt: skip
        for k, expected in enumerate(want):
            assert (y[g, :, k] == expected).all(), (k, y[g, :, k], expected)


def test_casts_of_threadgroup_memory(mode: str) -> None:
    body = """
    threadgroup uchar arena[1024];
    threadgroup float4 quads[16]; threadgroup float plain[64]; threadgroup uint words[32];
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    threadgroup float* f = (threadgroup float*)arena;
    threadgroup half* h = reinterpret_cast<threadgroup half*>(arena + 32 * sizeof(float));
    threadgroup int4* v = (threadgroup int4*)(f + 64);
    threadgroup ushort* u = (threadgroup ushort*)(void threadgroup*)(v + 8);
    f[l] = x[i]; h[l] = half(x[i] * 2); u[l] = l * 3;
    if (l < 8) v[l] = int4(l, l + 1, l + 2, l + 3);
    ((threadgroup float*)quads)[l] = x[i];
    ((threadgroup float*)quads)[l + 32] = -x[i];
    plain[l] = l; plain[l + 32] = l + 100;
    words[l] = as_type<uint>(x[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float o[7];
    o[0] = f[31 - l] + float(h[31 - l]) + float(u[31 - l]);
    o[1] = v[l % 8].w + v[l / 4].x;
    o[2] = quads[l / 2][l % 4];
    o[3] = ((threadgroup const float2*)plain)[l].y;
    o[4] = ((const threadgroup float4*)(plain + 4))[l / 4].z;
    o[5] = as_type<float>(words[31 - l]) + float(((threadgroup uchar*)words)[4 * l + 3]);
    o[6] = ((threadgroup float*)words)[l] + *(threadgroup float*)&words[l];
    for (int k = 0; k < 7; ++k) y[i * 7 + k] = o[k];
    """
    x = numbers(64)
    y = run(body, {"x": x}, {"y": ("float", (2, 32, 7))}, 64, 32, mode=mode)["y"]
    l = np.arange(32)  # noqa: E741
    plain = np.r_[l, l + 100]
    for g in range(2):
        v = x[g * 32 : g * 32 + 32]
        want = [
            v[31 - l] * 3 + (31 - l) * 3, l % 8 + 3 + l // 4,
            np.r_[v, -v].reshape(16, 4)[l // 2, l % 4],
            plain[l * 2 + 1], plain[4 + l // 4 * 4 + 2], v[31 - l] + v.view(np.uint8)[4 * l + 3],
            v * 2,
        ]  # fmt: skip
        for k, expected in enumerate(want):
            assert (y[g, :, k] == expected).all(), (k, y[g, :, k], expected)


def test_sizes_and_types_from_templates_and_constants(mode: str) -> None:
    header = """
    constant int ROWS = 4;
    #define COLUMNS 8
    constexpr constant int PAD = 1;
    enum { EXTRA = 2 };
    """
    body = """
    constexpr int W = N / 4;
    constexpr size_t BYTES = sizeof(T) * N;
    threadgroup T tile[ROWS][COLUMNS + PAD], spare[W], line[N + EXTRA];
    threadgroup uchar raw[BYTES];
    using Row = T[W];
    typedef float Acc;
    threadgroup Acc sums[N > 16 ? 4 : 2];
    uint l = thread_position_in_threadgroup.x;
    tile[l / 8][l % 8] = T(x[l]);
    line[l] = x[l] + T(1);
    if (l < uint(W)) spare[l] = T(l);
    ((threadgroup T*)raw)[l] = T(x[l] + 2);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l < 4) { Acc s = 0; for (int c = 0; c < COLUMNS; ++c) s += Acc(tile[l][c]); sums[l] = s; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[l] = T(sums[l / 8]) + line[N - 1 - l] + spare[l % W] + ((threadgroup T*)raw)[l];
    if (FLIP) y[l] = -y[l];
    """
    for kind, flip in [("float", False), ("half", True), ("int", True)]:
        x = np.random.default_rng(62).integers(0, 5, 32).astype(KINDS[kind])
        y = run(body, {"x": x}, {"y": (kind, (32,))}, 32, 32, mode=mode, header=header,
                template=[("T", KINDS[kind]), ("N", 32), ("FLIP", flip)])["y"]  # fmt: skip
        want = np.repeat(x.reshape(4, 8).sum(1), 8) + x[::-1] + 1 + np.arange(32) % 8 + x + 2
        assert (y == (-want if flip else want)).all()


def test_declarations_in_nested_scopes(mode: str) -> None:
    body = """
    uint l = thread_position_in_threadgroup.x;
    float r = 0;
    {
        threadgroup float t[32];
        t[l] = x[l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r += t[31 - l];
    }
    {
        threadgroup int t[32];
        t[l] = int(l) * 2;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r += t[l ^ 1];
    }
    if (MORE) {
        threadgroup float u;
        if (l == 4) u = x[l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r += u;
    }
    for (int k = 0; k < 2; ++k) {
        threadgroup float w[2][16];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        w[l / 16][l % 16] = x[l] + k;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        r += w[1 - l / 16][l % 16];
    }
    y[l] = r;
    """
    x = numbers(32)
    y = run(body, {"x": x}, {"y": ("float", (32,))}, 32, 32, mode=mode, template=[("MORE", True)])[
        "y"
    ]
    l = np.arange(32)  # noqa: E741
    assert (y == x[::-1] + (l ^ 1) * 2 + x[4] + 2 * x[l ^ 16] + 1).all()


MACROS = """#define SHARED(type, name, size) threadgroup type name[size]
#define TG threadgroup
#define STORAGE threadgroup float w[32];
#define SYNC threadgroup_barrier(mem_flags::mem_threadgroup)
#define AT(t, k) (((threadgroup const float*)(t))[k])
"""


@pytest.mark.parametrize("place", ["header", "source"])
def test_declarations_by_macros(place: str, mode: str) -> None:
    body = """
    SHARED(float, t, 32); TG int u[32]; STORAGE
    uint l = thread_position_in_threadgroup.x;
    TG int* p = u + 1;
    t[l] = x[l]; u[l] = int(l) * 2; w[l] = x[l] + 1;
    SYNC;
    y[l] = AT(t, 31 - l) + u[(l + 1) % 32] * 100 + w[l ^ 1] + p[l % 31];
    """
    parts = {"header": (MACROS, body), "source": ("", MACROS + body)}[place]
    x = numbers(32)
    y = run(parts[1], {"x": x}, {"y": ("float", (32,))}, 32, 32, mode=mode, header=parts[0])["y"]
    l = np.arange(32)  # noqa: E741
    assert (y == x[::-1] + (l + 1) % 32 * 200 + x[l ^ 1] + 1 + (l % 31 + 1) * 2).all()


@pytest.mark.parametrize("condition", ["#ifdef __METAL__", "#ifndef TG", "#if 1"])
def test_declarations_by_a_macro_of_a_condition(condition: str, mode: str) -> None:
    header = f"{condition}\n#define TG threadgroup\n#endif\n"
    body = """
    TG float t[32];
    uint l = thread_position_in_threadgroup.x;
    TG float* p = t;
    t[l] = x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[l] = p[31 - l];
    """
    x = numbers(32)
    y = run(body, {"x": x}, {"y": ("float", (32,))}, 32, 32, mode=mode, header=header)["y"]
    assert (y == x[::-1]).all()


def test_a_pointer_declared_beside_an_array(mode: str) -> None:
    body = """
    threadgroup float a[4][8], *p = a[1], b;
    uint l = thread_position_in_threadgroup.x;
    a[l / 8][l % 8] = x[l];
    if (l == 3) b = x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[l] = p[l % 8] + b;
    """
    x = numbers(32)
    y = run(body, {"x": x}, {"y": ("float", (32,))}, 32, 32, mode=mode)["y"]
    assert (y == x[8 + np.arange(32) % 8] + x[3]).all()


def test_lambdas_that_use_threadgroup_memory(mode: str) -> None:
    body = """
    threadgroup float t[32], u[32];
    threadgroup float sum;
    uint l = thread_position_in_threadgroup.x;
    auto put = [&](uint k, float v) { t[k] = v; };
    auto swap = [&t, &u, l]() { u[l] = t[31 - l]; };
    auto get = [&](uint k) -> float { return u[k] + sum; };
    put(l, x[l]);
    if (l == 0) sum = 1000;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    swap();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[l] = get((l + 1) % 32);
    """
    x = numbers(32)
    y = run(body, {"x": x}, {"y": ("float", (32,))}, 32, 32, mode=mode)["y"]
    assert (y == np.roll(x[::-1], -1) + 1000).all()


def test_every_threadgroup_has_its_own(threads: int, mode: str) -> None:
    body = """
    threadgroup int t[64]; threadgroup int total; threadgroup atomic_int hits;
    uint l = thread_index_in_threadgroup, g = threads_per_threadgroup.x * threads_per_threadgroup.y;
    uint i = thread_position_in_grid.y * threads_per_grid.x + thread_position_in_grid.x;
    if (l == 0) { total = 0; atomic_store_explicit(&hits, 0, memory_order_relaxed); }
    t[l] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 0) for (uint k = 0; k < g; ++k) total += t[k];
    atomic_fetch_add_explicit(&hits, 1, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = total * 100 + atomic_load_explicit(&hits, memory_order_relaxed);
    """
    x = np.random.default_rng(63).integers(0, 100, (61, 45)).astype(np.int32)
    outs: dict[str, Any] = {"y": ("int", x.shape)}
    y = run(body, {"x": x}, outs, (45, 61, 1), (8, 8, 1), mode=mode)["y"]
    for r in range(0, 61, 8):
        for c in range(0, 45, 8):
            block = x[r : r + 8, c : c + 8]
            assert (y[r : r + 8, c : c + 8] == block.sum() * 100 + block.size).all()


def test_32_kilobytes_with_1024_threads(mode: str) -> None:
    body = """
    threadgroup float t[8192];
    uint l = thread_position_in_threadgroup.x;
    for (uint k = l; k < 8192; k += 1024) t[k] = x[l] + k;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s = 0;
    for (uint k = 0; k < 8; ++k) s += t[(l * 8 + k * 1024) % 8192];
    y[l] = s;
    """
    x = numbers(1024)
    y = run(body, {"x": x}, {"y": ("float", (1024,))}, 1024, 1024, mode=mode)["y"]
    t = np.tile(x, 8) + np.arange(8192)
    index = (np.arange(1024)[:, None] * 8 + np.arange(8) * 1024) % 8192
    assert (y == t[index].sum(1)).all()
