"""Control flow around simdgroup operations and barriers: who takes part, and what lives on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import Array, run

f32 = np.float32
L = np.arange(32)


def ints(
    source: str, inputs: dict[str, Any], shape: Any, n: int, group: int, mode: str, **more: Any
) -> Array:
    return run(source, inputs, {"y": ("int", shape)}, n, group, mode=mode, init_value=-1, **more)[
        "y"
    ]


def test_branches_see_their_own_lanes_and_meet_again(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    int v = x[i], a, b = 0, c = 0, d, e, f;
    if (l < 5) a = simd_sum(v);
    else if (l % 3 == 0) { a = simd_max(v); if (v > 50) b = simd_sum(1); else b = -simd_sum(1); }
    else { a = simd_min(v); }
    c = simd_sum(1);
    if (l & 1) if (l & 2) d = simd_sum(10); else d = simd_sum(20); else d = simd_sum(30);
    e = l < 7 ? simd_sum(1) : l < 9 ? simd_sum(100) : 0;
    f = (l % 4 == 0 && simd_sum(1) == 8) + 2 * (l >= 30 || simd_all(l < 30))
        + 4 * (l < 10 && l > 3 && simd_sum(1) == 6);
    int r[6] = {a, b, c, d, e, f};
    for (int k = 0; k < 6; ++k) y[i * 6 + k] = r[k];
    """
    x = np.random.default_rng(41).integers(0, 100, 64).astype(np.int32)
    y = ints(body, {"x": x}, (2, 32, 6), 64, 64, mode)
    for group in range(2):
        v = x.reshape(2, 32)[group]
        third = (L >= 5) & (L % 3 == 0)
        rest = (L >= 5) & ~third
        a = np.where(L < 5, v[L < 5].sum(), np.where(third, v[third].max(), v[rest].min()))
        big = third & (v > 50)
        b = np.where(big, big.sum(), np.where(third, -(third & ~big).sum(), 0))
        d = np.where(L & 1, np.where(L & 2, 80, 160), 480)
        e = np.where(L < 7, 7, np.where(L < 9, 200, 0))
        f = (L % 4 == 0) + 2 + 4 * ((L < 10) & (L > 3))
        for k, want in enumerate([a, b, 32, d, e, f]):
            assert (y[group, :, k] == want).all(), (group, k, y[group, :, k], want)


def test_loops_that_lanes_leave_one_by_one(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    int n = trips[i], a = 0, b = 0, c = 0, d = 0, e = 0;
    for (int k = 0; k < n; ++k) a += simd_sum(1);
    int k = 0;
    while (k < n) { ++k; if (k % 2) continue; b += simd_sum(k); }
    k = 0;
    do { c = c * 2 + simd_max(int(l)); } while (++k < n % 5);
    for (int j = 0;; ++j) { if (j == n) break; d += simd_sum(j == 3 ? 5 : 1);
    if (d > 150) { d = -d; break; } }
    for (int j = 0; j < 3; ++j) for (int m = 0; m < n % 4; ++m) e += simd_sum(1) * (j + 1);
    int r[6] = {a, b, c, d, e, simd_sum(1)};
    for (int q = 0; q < 6; ++q) y[i * 6 + q] = r[q];
    """
    trips = np.random.default_rng(42).integers(0, 9, 32).astype(np.int32)
    y = ints(body, {"trips": trips}, (32, 6), 32, 32, mode)
    a = [sum(int((trips > k).sum()) for k in range(n)) for n in trips]
    b = [sum(k * int((trips >= k).sum()) for k in range(2, n + 1, 2)) for n in trips]
    times = np.maximum(trips % 5, 1)
    c = []
    for n in times:
        value = 0
        for k in range(n):
            value = value * 2 + int(L[times > k].max())
        c.append(value)
    d = np.zeros(32, int)
    alive = np.ones(32, bool)
    for j in range(10):
        alive &= trips != j
        d[alive] += int(alive.sum()) * (5 if j == 3 else 1)
        out = alive & (d > 150)
        d[out] *= -1
        alive &= ~out
    e = [
        sum((j + 1) * int((trips % 4 > m).sum()) for j in range(3) for m in range(n % 4))
        for n in trips
    ]
    for k, want in enumerate([a, b, c, d, e, [32] * 32]):
        assert (y[:, k] == want).all(), (k, y[:, k], want)


def test_returns_at_any_place(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    int n = trips[i];
    y[i * 3] = simd_sum(1);
    for (int k = 0; k < 6; ++k) {
        if (n == k) { y[i * 3 + 1] = 100 * k + simd_sum(1); return; }
        if (k == 2 && l > 27) return;
    }
    if (l % 2) { y[i * 3 + 1] = simd_sum(1); return; }
    y[i * 3 + 2] = simd_sum(int(l));
    """
    trips = np.random.default_rng(43).integers(0, 9, 32).astype(np.int32)
    y = ints(body, {"trips": trips}, (32, 3), 32, 32, mode)
    alive, want = np.ones(32, bool), np.full((32, 3), -1)
    want[:, 0] = 32
    for k in range(6):
        leave = alive & (trips == k)
        want[leave, 1] = 100 * k + leave.sum()
        alive &= ~leave
        if k == 2:
            alive &= L <= 27
    odd = alive & (L % 2 == 1)
    want[odd, 1] = odd.sum()
    alive &= ~odd
    want[alive, 2] = L[alive].sum()
    assert (y == want).all()


def test_switches(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    int a = 0;
    switch (l % 5) {
        case 0: a = simd_sum(1); break;
        case 1: a = simd_sum(10);
        case 2: a += simd_sum(100); break;
        case 3: { int t = simd_max(int(l)); a = t; break; }
        default: a = -1;
    }
    y[i] = a * 100 + simd_sum(1);
    """
    y = ints(body, {}, (32,), 32, 32, mode)
    k = L % 5
    sizes = np.bincount(k)
    # Lanes of case 1 may meet those of case 2 at its operation, or not: Metal does not say.
    both = 100 * (sizes[1] + sizes[2])
    for lane in L:
        a, rest = divmod(int(y[lane]), 100)
        assert rest == 32
        if k[lane] in (1, 2):
            mine = 10 * sizes[1] if k[lane] == 1 else 0
            assert a - mine in (both, 100 * sizes[k[lane]])
        else:
            assert a == {0: sizes[0], 3: 28, 4: -1}[int(k[lane])]


def test_an_operation_as_a_condition(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    int v = x[i], rounds = 0, found = 0;
    while (simd_any(v > 0)) { v -= 3; rounds++; }
    for (int k = 0; simd_sum(int(v + k < 0)) > 16; ++k) found = k + 1;
    int same = 0, leader = -1;
    int key = x[i] % 4;
    while (true) {
        int chosen = simd_broadcast_first(key);
        if (key == chosen) { same = simd_sum(1); if (simd_is_first()) leader = l;
        leader = simd_max(leader); break; }
    }
    int r[5] = {rounds, v, found, same, leader};
    for (int k = 0; k < 5; ++k) y[i * 5 + k] = r[k];
    if (simd_all(x[i] >= 0) && simd_sum(x[i]) > 100) y[i * 5] += 1000;
    """
    x = np.random.default_rng(44).integers(0, 40, 64).astype(np.int32)
    y = ints(body, {"x": x}, (2, 32, 5), 64, 64, mode)
    for group in range(2):
        v = x.reshape(2, 32)[group]
        rounds = int(-(-v.max() // 3))
        left = v - 3 * rounds
        found = 0
        while (left + found < 0).sum() > 16:
            found += 1
        key = v % 4
        same = [int((key == k).sum()) for k in key]
        leader = [int(np.argmax(key == k)) for k in key]
        for k, want in enumerate(
            [np.full(32, rounds + 1000), left, np.full(32, found), same, leader]
        ):
            assert (y[group, :, k] == want).all(), (k, y[group, :, k], want)


HELPERS = """
inline int total(int v) { return simd_sum(v); }
inline int some(int v, int limit) { if (v > limit) return -simd_sum(1); return simd_max(v); }
template <typename T> inline T best(T v, T w) { T m = simd_max(v); if (m > w) { m = simd_min(v); }
return m; }
struct Scan { int carry; int step(int v) { int s = simd_prefix_inclusive_sum(v) + carry;
carry += simd_sum(v); return s; } };
#define EVERYONE(v) (simd_sum(v) * 2)
inline int exchange(threadgroup int* t, uint l, int v) {
    t[l] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int r = t[(l + 1) % 64];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return r;
}
inline int block_sum(int v, threadgroup int* part, uint lane, uint simd, uint count) {
    v = simd_sum(v);
    if (lane == 0) part[simd] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) {
        int w = lane < count ? part[lane] : 0;
        w = simd_sum(w);
        if (lane == 0) part[0] = w;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return part[0];
}
"""


def test_operations_in_helpers_lambdas_methods_and_macros(mode: str) -> None:
    body = """
    threadgroup int tile[64]; threadgroup int part[32];
    uint i = thread_position_in_threadgroup.x, l = thread_index_in_simdgroup;
    int v = x[i];
    auto twice = [&](int w) { return simd_sum(w) * 2 + v; };
    Scan scan = {100};
    int r[8];
    r[0] = total(v) + total(1);
    r[1] = some(v, 50);
    r[2] = best(float(v), 95.0f);
    r[3] = twice(v);
    r[4] = scan.step(v) * 3; r[4] += scan.step(1);
    r[5] = EVERYONE(v) + EVERYONE(1);
    r[6] = exchange(tile, i, v) + 1000 * exchange(tile, i, int(i));
    r[7] = block_sum(v, part, l, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
    for (int k = 0; k < 8; ++k) y[i * 8 + k] = r[k];
    """
    x = np.random.default_rng(45).integers(0, 100, 64).astype(np.int32)
    y = ints(body, {"x": x}, (2, 32, 8), 64, 64, mode, header=HELPERS)
    turned = np.roll(x, -1).reshape(2, 32)
    index = np.roll(np.arange(64), -1).reshape(2, 32)
    for group in range(2):
        v = x.reshape(2, 32)[group]
        small = v[v <= 50]
        want = [
            np.full(32, v.sum() + 32),
            np.where(v > 50, -(v > 50).sum(), small.max() if small.size else 0),
            np.full(32, v.max() if v.max() <= 95 else v.min()),
            v.sum() * 2 + v,
            (np.cumsum(v) + 100) * 3 + L + 1 + 100 + v.sum(),
            np.full(32, v.sum() * 2 + 64),
            turned[group] + 1000 * index[group],
            np.full(32, x.sum()),
        ]
        for k, expected in enumerate(want):
            assert (y[group, :, k] == expected).all(), (k, y[group, :, k], expected)


@pytest.mark.parametrize(("n", "group"), [(96, 96), (100, 40)])
def test_private_state_lives_across_barriers(n: int, group: int, mode: str) -> None:
    body = """
    threadgroup int t[96];
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x,
        g = threads_per_threadgroup.x;
    const int v = x[i];
    constexpr int two = 2;
    int acc[4] = {v, v + 1, v + 2, v + 3};
    float4 q = float4(acc[0], acc[1], acc[2], acc[3]);
    struct Local { int a; uchar b[3]; } s = {v, {1, 2, 3}};
    thread int* p = &acc[1];
    thread int& r = acc[two];
    auto add = [&](int w) { acc[0] += w; return acc[0]; };
    int h = v;
    bool odd = l & 1;
    t[l] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int left = t[(l + g - 1) % g];
    *p += left; r *= 2; s.b[1] += uchar(l);
    add(left);
    { int h = left * 2; acc[3] += h; }
    for (int k = 0; k < 3; ++k) {
        int w = t[(l + k) % g] + k;
        int h = w;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (odd) t[l] = w + int(q.x) % 3; else t[l] = h - 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        acc[0] += t[(l + 1) % g] * (k + 1);
        q.yz += float2(w, h);
    }
    h += s.a + s.b[1];
    int o[6] = {acc[0], acc[1], acc[2], acc[3], h, int(q.y + q.z)};
    for (int k = 0; k < 6; ++k) y[i * 6 + k] = o[k];
    """
    x = np.random.default_rng(46).integers(0, 100, n).astype(np.int32)
    y = ints(body, {"x": x}, (n, 6), n, group, mode)
    for start in range(0, n, group):
        v = x[start : start + group].astype(int)
        g = len(v)
        lane = np.arange(g)
        acc = np.stack([v, v + 1, v + 2, v + 3])
        q = acc.copy()
        t = v.copy()
        left = np.roll(t, 1)
        acc[1] += left
        acc[2] *= 2
        b = (2 + lane) % 256
        acc[0] += left
        acc[3] += left * 2
        for k in range(3):
            w = t[(lane + k) % g] + k
            t = np.where(lane % 2 == 1, w + q[0] % 3, w - 1)
            acc[0] += np.roll(t, -1) * (k + 1)
            q[1] += w
            q[2] += w
        want = np.stack([*acc, v + v + b, q[1] + q[2]], 1)
        assert (y[start : start + group] == want).all()


def test_barriers_in_every_kind_of_uniform_control_flow(mode: str) -> None:
    body = """
    threadgroup int t[64];
    uint l = thread_position_in_threadgroup.x, g = threadgroup_position_in_grid.x;
    const int n = count[g];
    int a = x[g * 64 + l];
    t[l] = a;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = 1; d < 64; d *= 2) {
        int b = int(l) >= d ? t[l - d] : 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t[l] += b;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[(g * 64 + l) * 5] = t[l];
    int k = 0;
    while (k < n) {
        if (k == 2) { k++; continue; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int b = t[63 - l];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t[l] = b + 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (k == 4) break;
        k++;
    }
    y[(g * 64 + l) * 5 + 1] = t[l];
    do { threadgroup_barrier(mem_flags::mem_none); if (l == uint(k % 64)) t[l] = -5;
    threadgroup_barrier(mem_flags::mem_none); } while (k++ < n);
    y[(g * 64 + l) * 5 + 2] = t[l];
    if (n > 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int b = t[l ^ 1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t[l] = b;
    } else {
        t[l] *= 2;
    }
    switch (n % 3) {
        case 0: threadgroup_barrier(mem_flags::mem_threadgroup);
        y[(g * 64 + l) * 5 + 3] = t[(l + 5) % 64]; break;
        case 1: y[(g * 64 + l) * 5 + 3] = 7; break;
        default: threadgroup_barrier(mem_flags::mem_threadgroup); y[(g * 64 + l) * 5 + 3] = t[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (;;) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (l == 0) t[0]++;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t[0] >= 20) break;
    }
    y[(g * 64 + l) * 5 + 4] = t[0];
    """
    count = np.array([0, 1, 3, 5, 8], np.int32)
    x = np.random.default_rng(47).integers(0, 9, (5, 64)).astype(np.int32)
    y = ints(body, {"x": x, "count": count}, (5, 64, 5), 320, 64, mode)
    for g in range(5):
        n = int(count[g])
        t = np.cumsum(x[g]).astype(int)
        want = [t.copy()]
        k = 0
        while k < n:
            if k == 2:
                k += 1
                continue
            t = t[::-1] + 1
            if k == 4:
                break
            k += 1
        want.append(t.copy())
        while True:
            t[k % 64] = -5
            k += 1
            if k - 1 >= n:
                break
        want.append(t.copy())
        t = t[np.arange(64) ^ 1] if n > 2 else t * 2
        want.append([np.roll(t, -5), np.full(64, 7), np.full(64, t[0])][n % 3])
        want.append(np.full(64, max(20, int(t[0]) + 1)))
        for row, expected in enumerate(want):
            assert (y[g, :, row] == expected).all(), (g, row, y[g, :, row], expected)


@pytest.mark.parametrize("left", [1, 31, 32, 40, 63])
def test_threads_that_returned_hold_up_no_barrier(left: int, mode: str) -> None:
    body = """
    threadgroup int t[64];
    uint l = thread_position_in_threadgroup.x;
    if (l >= left) return;
    t[l] = x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int v = t[left - 1 - l];
    for (int k = 0; k < 3; ++k) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        t[l] = v + k;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        v = t[(l + 1) % left];
    }
    y[l] = v + simd_sum(1) * 1000;
    """
    x = np.arange(64, dtype=np.int32) ** 2
    y = ints(body, {"x": x, "left": np.array(left, np.uint32)}, (64,), 64, 64, mode)
    v = x[:left][::-1]
    for k in range(3):
        v = np.roll(v + k, -1)
    lanes = np.where(np.arange(left) < 32, min(left, 32), left - 32)
    assert (y[:left] == v + lanes * 1000).all()
    assert (y[left:] == -1).all()


def test_returns_between_barriers(mode: str) -> None:
    """Each round some threads return; those that are left still meet."""
    body = """
    threadgroup int t[48];
    uint l = thread_position_in_threadgroup.x;
    t[l] = x[l];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < 6; ++k) {
        if (l / 8 == k) { y[l] = t[47 - l] + int(k) * 100; return; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (l == 47) { t[0] += 1; t[7] += 2; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    """
    x = np.random.default_rng(48).integers(0, 50, 48).astype(np.int32)
    y = ints(body, {"x": x}, (48,), 48, 48, mode)
    for lane in range(48):
        k = lane // 8
        value = int(x[47 - lane]) + 100 * k
        if lane == 47:
            value += k
        if lane == 40:
            value += 2 * k
        assert y[lane] == value, lane


def test_simdgroups_that_do_different_work(mode: str) -> None:
    body = """
    threadgroup int part[4];
    uint i = thread_position_in_grid.x, s = simdgroup_index_in_threadgroup,
        l = thread_index_in_simdgroup;
    int v = x[i], r = 0;
    if (s == 0) r = simd_sum(v);
    else if (s == 1) { for (uint k = 0; k < 3; ++k) r += simd_shuffle_xor(v, 1u << k); }
    else if (s == 2) { r = simd_prefix_inclusive_sum(v);
    simdgroup_barrier(mem_flags::mem_threadgroup); r += simd_max(v); }
    if (l == 0) part[s] = r;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = r * 1000 + part[0] + part[2];
    """
    x = np.random.default_rng(49).integers(0, 9, 128).astype(np.int32)
    y = ints(body, {"x": x}, (4, 32), 128, 128, mode)
    v = x.reshape(4, 32).astype(int)
    r = np.stack([np.full(32, v[0].sum()), v[1][L ^ 1] + v[1][L ^ 2] + v[1][L ^ 4],
                  np.cumsum(v[2]) + v[2].max(), np.zeros(32, int)])  # fmt: skip
    assert (y == r * 1000 + r[0, 0] + r[2, 0]).all()


def test_simdgroup_barriers_order_the_memory_of_a_simdgroup(mode: str) -> None:
    body = """
    threadgroup float t[96];
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;
    threadgroup float* mine = t + simdgroup_index_in_threadgroup * 32;
    mine[l] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float v = mine[31 - l];
    simdgroup_barrier(mem_flags::mem_none);
    mine[l] = v * 2;
    simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    y[i] = mine[l ^ 7];
    """
    x = np.random.default_rng(50).normal(size=192).astype(f32)
    y = run(body, {"x": x}, {"y": ("float", (6, 32))}, 192, 96, mode=mode)["y"]
    assert (y == (x.reshape(6, 32)[:, ::-1] * 2)[:, L ^ 7]).all()


def test_device_memory_is_seen_after_a_device_barrier(mode: str) -> None:
    body = """
    uint i = thread_position_in_grid.x, g = threadgroup_position_in_grid.x * 64,
        l = thread_position_in_threadgroup.x;
    y[i] = x[i] * 2;
    threadgroup_barrier(mem_flags::mem_device);
    int v = y[g + 63 - l];
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    y[i] = v + 1;
    metal::threadgroup_barrier(metal::mem_flags::mem_device);
    z[i] = y[g + (l + 1) % 64];
    """
    x = np.random.default_rng(51).integers(0, 1000, 192).astype(np.int32)
    out = run(body, {"x": x}, {"y": ("int", (3, 64)), "z": ("int", (3, 64))}, 192, 64, mode=mode)
    want = x.reshape(3, 64)[:, ::-1] * 2 + 1
    assert (out["y"] == want).all()
    assert (out["z"] == np.roll(want, -1, 1)).all()


def test_a_bitonic_sort(mode: str) -> None:
    body = """
    threadgroup float t[256];
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    t[l] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint size = 2; size <= 256; size <<= 1) {
        for (uint stride = size >> 1; stride > 0; stride >>= 1) {
            uint other = l ^ stride;
            if (other > l) {
                bool up = (l & size) == 0;
                float a = t[l], b = t[other];
                if ((a > b) == up) { t[l] = b; t[other] = a; }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    y[i] = t[l];
    """
    x = np.random.default_rng(52).normal(size=(3, 256)).astype(f32)
    y = run(body, {"x": x}, {"y": ("float", (3, 256))}, 768, 256, mode=mode)["y"]
    assert (y == np.sort(x, 1)).all()


def test_a_tiled_matrix_product(mode: str) -> None:
    body = """
    threadgroup float a[8][9], b[8][9];
    uint2 l = thread_position_in_threadgroup.xy, p = thread_position_in_grid.xy;
    float acc = 0;
    for (int k = 0; k < (K + 7) / 8; ++k) {
        uint c = k * 8 + l.x, r = k * 8 + l.y;
        a[l.y][l.x] = p.y < M && c < uint(K) ? A[p.y * K + c] : 0;
        b[l.y][l.x] = r < uint(K) && p.x < N ? B[r * N + p.x] : 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (int j = 0; j < 8; ++j) acc += a[l.y][j] * b[j][l.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (p.y < M && p.x < N) C[p.y * N + p.x] = acc;
    """
    rng = np.random.default_rng(53)
    a = rng.integers(-5, 5, (19, 21)).astype(f32)
    b = rng.integers(-5, 5, (21, 13)).astype(f32)
    c = run(body, {"A": a, "B": b}, {"C": ("float", (19, 13))}, (16, 24, 1), (8, 8, 1), mode=mode,
            template=[("M", 19), ("N", 13), ("K", 21)])["C"]  # fmt: skip
    assert (c == a @ b).all()


@pytest.mark.parametrize("group", [32, 100, 256])
def test_a_row_softmax_with_block_reductions(group: int, mode: str) -> None:
    body = """
    threadgroup float part[32];
    uint row = threadgroup_position_in_grid.y, l = thread_position_in_threadgroup.x,
        g = threads_per_threadgroup.x;
    uint lane = thread_index_in_simdgroup, s = simdgroup_index_in_threadgroup;
    const device float* in = x + row * W;
    float most = -INFINITY;
    for (uint k = l; k < W; k += g) most = max(most, in[k]);
    most = simd_max(most);
    if (lane == 0) part[s] = most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (s == 0) { most = simd_max(lane < simdgroups_per_threadgroup ? part[lane] : -INFINITY);
    if (lane == 0) part[0] = most; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    most = part[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0;
    for (uint k = l; k < W; k += g) sum += exp(in[k] - most);
    sum = simd_sum(sum);
    if (simd_is_first()) part[s] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0;
    for (uint k = 0; k < simdgroups_per_threadgroup; ++k) sum += part[k];
    for (uint k = l; k < W; k += g) y[row * W + k] = exp(in[k] - most) / sum;
    """
    x = np.random.default_rng(54).normal(size=(5, 333)).astype(f32) * 5
    y = run(body, {"x": x}, {"y": ("float", x.shape)}, (group, 5, 1), (group, 1, 1), mode=mode,
            template=[("W", 333)])["y"]  # fmt: skip
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.allclose(y, wide / wide.sum(1, keepdims=True), rtol=1e-5, atol=1e-9)
