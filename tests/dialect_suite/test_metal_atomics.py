"""Atomics on device and threadgroup memory, with many threads at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest

import ferrule
from metal_harness import KINDS, Array, bfloat16, run

f32 = np.float32
ORDER = "memory_order_relaxed"


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    ferrule.set_threads(request.param)
    yield request.param
    ferrule.set_threads(None)


@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("space", ["outputs", "cast", "threadgroup"])
def test_integer_operations_under_contention(kind: str, space: str, threads: int) -> None:
    n = 4000
    x = np.random.default_rng(71).integers(-(2**31), 2**31, n).astype(KINDS[kind])
    names = ["add", "sub", "and", "or", "xor", "max", "min"]
    start = (
        {"and": -1, "max": -(2**31), "min": 2**31 - 1}
        if kind == "int"
        else {"and": 2**32 - 1, "min": 2**32 - 1}
    )
    place = {
        "outputs": "&y[g * 8 + {k}]",
        "cast": f"(device atomic_{kind}*)&y[g * 8 + {{k}}]",
        "threadgroup": "&t[{k}]",
    }[space]
    body = [
        "uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;",
        "uint g = threadgroup_position_in_grid.x * IN_GROUP;",
        f"{kind} v = x[i];",
    ]
    if space == "threadgroup":
        body.append(f"threadgroup atomic_{kind} t[8];")
        for k, name in enumerate(names):
            first = f"{kind}({start.get(name, 0)})"
            body.append(f"if (l == {k}) atomic_store_explicit(&t[{k}], {first}, {ORDER});")
        body.append("threadgroup_barrier(mem_flags::mem_threadgroup);")
    for k, name in enumerate(names):
        body.append(f"atomic_fetch_{name}_explicit({place.format(k=k)}, v, {ORDER});")
    groups = 4 if space == "threadgroup" else 1
    if space == "threadgroup":
        body.append("threadgroup_barrier(mem_flags::mem_threadgroup);")
        body.append(f"if (l < 7) y[g * 8 + l] = atomic_load_explicit(&t[l], {ORDER});")
    flags: dict[str, Any] = {"atomic_outputs": True} if space == "outputs" else {}
    y = run("\n".join(body), {"x": x}, {"y": (kind, (groups, 8))}, n, n // 4, init_value=0,
            template=[("IN_GROUP", space == "threadgroup")], **flags)["y"]  # fmt: skip
    for g in range(groups):
        v = x.reshape(groups, -1)[g]
        functions = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or,
                     "xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum}  # fmt: skip
        for k, name in enumerate(names):
            begin = start.get(name, 0) if space == "threadgroup" else 0
            want = reduce(functions[name], v, np.array(begin).astype(KINDS[kind]))
            assert y[g, k] == want, (g, name, y[g, k], want)


def test_what_fetch_operations_return(threads: int) -> None:
    n = 3000
    body = f"""
    uint i = thread_position_in_grid.x;
    old[i] = atomic_fetch_add_explicit((device atomic_uint*)&c[0], 1u, {ORDER});
    down[i] = atomic_fetch_sub_explicit((device atomic_int*)&d[0], 2, {ORDER});
    swapped[i] = atomic_exchange_explicit((device atomic_uint*)&c[1], i + 1, {ORDER});
    uint was = atomic_fetch_or_explicit((device atomic_uint*)&c[2], 1u << (i % 32), {ORDER});
    first[i] = (was >> (i % 32) & 1u) == 0u;
    uint most = atomic_fetch_max_explicit((device atomic_uint*)&c[3], key[i], {ORDER});
    record[i] = key[i] > most;
    """
    key = np.random.default_rng(72).permutation(n).astype(np.uint32) + 1
    outs: dict[str, Any] = {
        "c": ("uint", (4,)), "d": ("int", (1,)), "old": ("uint", (n,)), "down": ("int", (n,)),
        "swapped": ("uint", (n,)), "first": ("bool", (n,)), "record": ("bool", (n,)),
    }  # fmt: skip
    out = run(body, {"key": key}, outs, n, 128, init_value=0)
    assert (np.sort(out["old"]) == np.arange(n)).all()
    assert (np.sort(out["down"])[::-1] == np.arange(n) * -2).all()
    assert sorted([*out["swapped"], out["c"][1]]) == list(range(n + 1))
    assert (np.bincount(np.arange(n) % 32, out["first"]) == 1).all()
    assert out["c"][3] == n and out["record"][key == n].all() and out["record"].sum() >= 1
    assert out["c"][0] == n and out["d"][0] == -2 * n and out["c"][2] == 2**32 - 1


def test_float_operations(threads: int) -> None:
    n = 4096
    x = np.random.default_rng(73).integers(-20, 20, n).astype(f32)
    body = f"""
    threadgroup atomic<float> t; threadgroup atomic_float u;
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    if (l == 0) {{ atomic_store_explicit(&t, 0.0f, {ORDER});
    atomic_store_explicit(&u, 0.0f, {ORDER}); }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&y[0], x[i], {ORDER});
    atomic_fetch_sub_explicit(&y[1], x[i], metal::memory_order_relaxed);
    atomic_fetch_add_explicit(&y[2 + i % 3], 0.5f, {ORDER});
    atomic_fetch_add_explicit(&t, x[i], {ORDER});
    atomic_fetch_add_explicit(&u, 1.0, {ORDER});
    float old = atomic_exchange_explicit(&y[5], float(i), {ORDER});
    if (old < 0) atomic_store_explicit(&y[6], old, {ORDER});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 0) {{
        atomic_fetch_add_explicit(&y[7], atomic_load_explicit(&t, {ORDER}), {ORDER});
        atomic_fetch_add_explicit(&y[8], atomic_load_explicit(&u, {ORDER}), {ORDER});
        atomic_store_explicit(&y[9 + threadgroup_position_in_grid.x],
            atomic_load_explicit(&t, {ORDER}), {ORDER});
    }}
    """
    y = run(body, {"x": x}, {"y": ("float", (25,))}, n, 256, atomic_outputs=True, init_value=0)["y"]
    thirds = np.bincount(np.arange(n) % 3) * 0.5
    assert (y[:5] == [x.sum(), -x.sum(), *thirds]).all()
    assert 0 <= y[5] < n and y[6] == 0 and y[7] == x.sum() and y[8] == n
    assert (y[9:] == x.reshape(16, 256).sum(1)).all()


@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")
@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_16_bit_float_additions(kind: str, threads: int) -> None:
    """Neighbours in one word do not disturb each other."""
    n = 2000
    x = np.random.default_rng(74).integers(-2, 3, n)
    body = f"""
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&y[i % 5], x[i], {ORDER});
    atomic_fetch_add_explicit(&y[5], {kind}(0.0625f), {ORDER});
    if (i < 7) atomic_store_explicit(&y[6 + i], {kind}(float(i)), {ORDER});
    """
    y = run(body, {"x": x.astype(f32).astype(KINDS[kind])}, {"y": (kind, (13,))}, n, 100,
            atomic_outputs=True, init_value=0)["y"].astype(f32)  # fmt: skip
    assert (y[:5] == np.bincount(np.arange(n) % 5, x)).all()
    # 125 needs more bits than a bfloat has below 1/16: it stops where an addition no longer counts.
    assert y[5] == (n / 16 if kind == "half" else 16)
    assert (y[6:] == np.arange(7)).all()
    assert y.dtype == f32 and bfloat16.itemsize == 2


def test_compare_and_exchange_loops(threads: int, mode: str) -> None:
    header = f"""
    inline void atomic_max_float(volatile device atomic_uint* p, float v) {{
        uint old = atomic_load_explicit(p, {ORDER});
        while (as_type<float>(old) < v
               && !atomic_compare_exchange_weak_explicit(p, &old, as_type<uint>(v), {ORDER},
                   {ORDER})) {{}}
    }}
    template <typename T> inline T atomic_update(device atomic<T>* p, T v) {{
        T old = atomic_load_explicit(p, {ORDER}), next;
        do {{ next = old * T(3) + v; }}
        while (!atomic_compare_exchange_weak_explicit(p, &old, next, {ORDER}, {ORDER}));
        return old;
    }}
    """
    body = f"""
    threadgroup atomic_int lock; threadgroup int guarded;
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    if (l == 0) {{ atomic_store_explicit(&lock, 0, {ORDER}); guarded = 0; }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_max_float((volatile device atomic_uint*)&y[0], x[i]);
    atomic_update((device atomic<uint>*)(y + 1), 1u);
    atomic_update<int>((device atomic_int*)(y + 2), 1);
    int zero = 0;
    bool won = atomic_compare_exchange_weak_explicit((device atomic_int*)(y + 3), &zero,
        int(i) + 1, {ORDER}, {ORDER});
    if (won) y[4] = i + 1;
    else if (zero == 0) y[5] = 1;
    atomic_fetch_add_explicit(&lock, 1, {ORDER});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    z[i] = atomic_load_explicit(&lock, {ORDER});
    """
    x = np.abs(np.random.default_rng(75).normal(size=640)).astype(f32)
    out = run(
        body,
        {"x": x},
        {"y": ("uint", (8,)), "z": ("int", (640,))},
        640,
        64,
        init_value=0,
        header=header,
        mode=mode,
    )
    y = out["y"]
    value = reduce(lambda old, _: (old * 3 + 1) % 2**32, range(640), 0)
    assert y.view(f32)[0] == x.max()
    assert y[1] == value and y[2] == value
    assert 1 <= y[3] <= 640 and y[3] == y[4]
    assert (out["z"] == 64).all()


def test_a_histogram_with_privatised_bins(threads: int, mode: str) -> None:
    body = f"""
    threadgroup atomic_uint bins[64];
    threadgroup atomic_int seen;
    uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
    for (uint k = l; k < 64; k += threads_per_threadgroup.x) atomic_store_explicit(&bins[k], 0u,
        {ORDER});
    if (l == 0) atomic_store_explicit(&seen, 0, {ORDER});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&bins[x[i]], 1u, {ORDER});
    int rank = atomic_fetch_add_explicit(&seen, 1, {ORDER});
    place[i] = rank;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = l; k < 64; k += threads_per_threadgroup.x) {{
        uint c = atomic_load_explicit(&bins[k], {ORDER});
        if (c) atomic_fetch_add_explicit((device atomic_uint*)hist + k, c, {ORDER});
    }}
    """
    x = np.random.default_rng(76).integers(0, 64, 3000).astype(np.uint8)
    outs: dict[str, Any] = {"hist": ("uint", (64,)), "place": ("int", (3000,))}
    out = run(body, {"x": x}, outs, 3000, 200, init_value=0, mode=mode)
    assert (out["hist"] == np.bincount(x, minlength=64)).all()
    assert (np.sort(out["place"].reshape(15, 200), 1) == np.arange(200)).all()


def test_atomics_in_structs_pointers_and_helpers(threads: int) -> None:
    header = f"""
    struct Counter {{ atomic_uint hits; uint limit; }};
    inline bool take(threadgroup Counter& c) {{ return atomic_fetch_add_explicit(&c.hits, 1u,
        {ORDER}) < c.limit; }}
    inline void add(device atomic<float>* p, float v) {{ atomic_fetch_add_explicit(p, v, {ORDER});
    }}
    template <typename A, typename T> inline void bump(A p, T v) {{
        atomic_fetch_add_explicit(p, v, {ORDER}); }}
    """
    body = f"""
    threadgroup Counter c;
    threadgroup atomic_int list[4]; threadgroup atomic_int* second = &list[1];
    uint l = thread_position_in_threadgroup.x;
    if (l == 0) {{ atomic_store_explicit(&c.hits, 0u, {ORDER}); c.limit = 10; }}
    if (l < 4) atomic_store_explicit(list + l, 0, {ORDER});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (take(c)) add((device atomic<float>*)&y[0], 1.5f);
    bump(second, 2); bump(&list[2], 1); bump((device atomic<float>*)(y + 2), 1.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 0) add((device metal::atomic<float>*)&y[1],
        atomic_load_explicit(second, {ORDER}) + atomic_load_explicit(&list[2], {ORDER}));
    """
    y = run(body, {}, {"y": ("float", (3,))}, 640, 64, init_value=0, header=header)["y"]
    assert (y == [150, 640 * 3, 640]).all()


def test_scattered_additions_into_a_gradient(threads: int) -> None:
    rng = np.random.default_rng(77)
    index = rng.integers(0, 50, 5000).astype(np.int32)
    value = rng.integers(-4, 5, 5000).astype(f32)
    body = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&grad[index[i]], value[i], memory_order_relaxed);
    atomic_fetch_add_explicit(&count[index[i]], 1, memory_order_relaxed);
    """
    outs: dict[str, Any] = {"grad": ("float", (50,)), "count": ("int", (50,))}
    out = run(
        body, {"index": index, "value": value}, outs, 5000, 256, atomic_outputs=True, init_value=0
    )
    want: Array = np.bincount(index, value, 50)
    assert (out["grad"] == want).all()
    assert (out["count"] == np.bincount(index, minlength=50)).all()
