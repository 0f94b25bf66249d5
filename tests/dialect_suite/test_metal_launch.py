"""Launches: the twenty attributes on every grid, inputs of every rank, strides, templates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ferrule
from metal_harness import KINDS, Array, run

f32 = np.float32
Size = tuple[int, int, int]
GRIDS: list[tuple[Size, Size]] = [
    ((64, 1, 1), (32, 1, 1)),
    ((100, 1, 1), (48, 1, 1)),
    ((5, 1, 1), (256, 1, 1)),
    ((10, 6, 1), (8, 4, 1)),
    ((33, 3, 1), (33, 2, 1)),
    ((1, 70, 1), (4, 40, 2)),
    ((5, 4, 3), (2, 3, 2)),
    ((9, 7, 5), (8, 8, 4)),
    ((3, 2, 40), (1, 1, 37)),
    ((1, 1, 1), (1, 1, 1)),
    ((40, 30, 2), (32, 32, 1)),
]


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    ferrule.set_threads(request.param)
    yield request.param
    ferrule.set_threads(None)


SCALARS = [
    "dispatch_quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup", "thread_index_in_simdgroup", "thread_index_in_threadgroup",
    "threads_per_simdgroup",
]  # fmt: skip
VECTORS = [
    "dispatch_threads_per_threadgroup", "grid_origin", "grid_size", "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid",
    "threads_per_threadgroup",
]  # fmt: skip


def attributes(grid: Size, threadgroup: Size) -> Iterator[tuple[int, list[int]]]:
    """Row of each thread in a row-major (z, y, x) array, and what its attributes are."""
    asked = tuple(min(g, t) for g, t in zip(grid, threadgroup, strict=True))
    groups = tuple(-(-g // t) for g, t in zip(grid, asked, strict=True))
    whole = int(np.prod(asked))
    for position in itertools.product(*(range(g) for g in groups)):
        size = [min(t, g - p * t) for g, t, p in zip(grid, asked, position, strict=True)]
        count = int(np.prod(size))
        for index in range(count):
            at = (index % size[0], index // size[0] % size[1], index // (size[0] * size[1]))
            place = [p * t + a for p, t, a in zip(position, asked, at, strict=True)]
            values = [
                -(-whole // 4), -(-whole // 32), index // 4, -(-count // 4), index // 32,
                -(-count // 32), 32, index % 4,
                index % 32, index, 32, *asked, 0, 0, 0, *grid, *place, *at, *position, *groups,
                *grid, *size,
            ]  # fmt: skip
            yield (place[2] * grid[1] + place[1]) * grid[0] + place[0], values


BODY = "\n".join(
    [
        "uint row = (thread_position_in_grid.z * threads_per_grid.y + thread_position_in_grid.y)"
        " * threads_per_grid.x"
        " + thread_position_in_grid.x;",
        "device uint* o = y + row * 38;",
        *(f"o[{k}] = {name};" for k, name in enumerate(SCALARS)),
        *(f"o[{len(SCALARS) + 3 * k + c}] = {name}.{letter};"
          for k, name in enumerate(VECTORS) for c, letter in enumerate("xyz")),
    ]
)  # fmt: skip
SYNCHRONISES = "\nthreadgroup_barrier(mem_flags::mem_none); if (simd_sum(1) > 32) o[0] = 0;"


@pytest.mark.parametrize(
    ("tail", "mode"), [("", "auto"), (SYNCHRONISES, "auto"), (SYNCHRONISES, "fibers")]
)
def test_all_attributes_on_all_grids(tail: str, mode: str, threads: int) -> None:
    for grid, threadgroup in GRIDS:
        n = int(np.prod(grid))
        y = run(BODY + tail, {}, {"y": ("uint", (n, 38))}, grid, threadgroup, mode=mode)["y"]
        seen = 0
        for row, want in attributes(grid, threadgroup):
            assert y[row].tolist() == want, (grid, threadgroup, row)
            seen += 1
        assert seen == n


def test_attributes_by_other_spellings() -> None:
    body = """
    uint3 p = thread_position_in_grid;
    uint2 q = thread_position_in_grid.xy;
    auto size = threads_per_grid;
    y[p.z * 6 + q.y * 3 + p[0]] = int(size.x * 100 + size.y * 10 + size.z)
        + int(thread_position_in_threadgroup.zyx.z) * 1000;
    """
    y = run(body, {}, {"y": ("int", (2, 2, 3))}, (3, 2, 2), (2, 1, 1))["y"]
    assert (y == 322 + np.arange(3) % 2 * 1000).all()


@pytest.mark.parametrize("names", [SCALARS[::2], SCALARS[1::2], VECTORS])
def test_a_kernel_has_the_attributes_that_it_names(names: list[str]) -> None:
    """Each in a kernel of its own, which has nothing else."""
    for name in names:
        letter = ".x" if name in VECTORS else ""
        y = run(f"y[0] = {name}{letter} * 0 + 5;", {}, {"y": ("uint", (1,))}, 1, 1)["y"]
        assert y[0] == 5


def test_every_thread_runs_once(threads: int) -> None:
    body = """
    uint3 p = thread_position_in_grid;
    uint i = (p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x;
    atomic_fetch_add_explicit((device atomic_int*)&y[i], 1, memory_order_relaxed);
    """
    for grid, threadgroup in [*GRIDS, ((1000, 3, 2), (1024, 1, 1)), ((7, 129, 3), (3, 5, 7))]:
        n = int(np.prod(grid))
        y = run(body, {}, {"y": ("int", (n,))}, grid, threadgroup, init_value=0)["y"]
        assert (y == 1).all(), (grid, threadgroup)


def test_scalars_and_small_and_large_inputs() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = s * 10 + small[i % small_shape[0]] + large[i] + t * (flag ? 1 : 100) + k;
    device float* p = y + i;
    const device float* q = large;
    z[i] = *p * 0 + q[i] + float(sizeof(s));
    """
    inputs = {"s": np.array(2.5, f32), "small": np.arange(3, dtype=np.int32),
     "large": np.arange(20, dtype=f32),
              "t": 7, "flag": True, "k": 0.5}  # fmt: skip
    outs: dict[str, Any] = {"y": ("float", (20,)), "z": ("float", (20,))}
    out = run(body, inputs, outs, 20, 8)
    i = np.arange(20)
    assert (out["y"] == 25 + i % 3 + i + 7.5).all()
    assert (out["z"] == i + 4).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_scalars_of_every_type(kind: str) -> None:
    value = np.array(1 if kind == "bool" else 5).astype(f32).astype(KINDS[kind])
    body = "y[thread_position_in_grid.x] = s; auto c = s; z[thread_position_in_grid.x] = c;"
    outs: dict[str, Any] = {"y": (kind, (3,)), "z": (kind, (3,))}
    out = run(body, {"s": value}, outs, 3, 3)
    assert (out["y"] == value).all() and (out["z"] == value).all()


def test_shapes_strides_and_ranks() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    long n = 1; for (int k = 0; k < a_ndim; ++k) n *= a_shape[k];
    if (i < uint(a_ndim)) { y[4 + i] = a_shape[i]; y[8 + i] = a_strides[i]; }
    if (i == 0) { y[0] = a_ndim; y[1] = n; y[2] = sizeof(a_shape[0]) * 10 + sizeof(a_strides[0]);
    y[3] = b_shape[0] + b_ndim; }
    """
    base = np.arange(240, dtype=f32).reshape(4, 6, 10)
    views: list[Array] = [base, base.transpose(2, 0, 1), base[::2, 1:5, ::3], base[1], base[:, 0],
     base[0, 0, 0:1],
                          np.broadcast_to(base[0, :1], (3, 1, 10)), base[::-1],
                          base[:, :, 2]]  # fmt: skip
    for view, flag in itertools.product(views, (False, True)):
        outs: dict[str, Any] = {"y": ("long", (12,))}
        y = run(
            body, {"a": view, "b": base[0]}, outs, 3, 3, ensure_row_contiguous=flag, init_value=-9
        )["y"]
        rank = view.ndim
        contiguous = np.ascontiguousarray(view)
        assert y[0] == rank and y[1] == view.size and y[2] == 48 and y[3] == 8
        assert y[4 : 4 + rank].tolist() == list(view.shape)
        strides = [k // 4 for k in (contiguous if flag else view).strides]
        for k in range(rank):
            if view.shape[k] > 1:
                assert y[8 + k] == strides[k], (view.shape, view.strides, flag)


@pytest.mark.parametrize("flag", [False, True])
def test_strided_inputs_both_ways(flag: bool) -> None:
    copy = "a[i]" if flag else "a[elem_to_loc<int64_t>(i, a_shape, a_strides, a_ndim)]"
    body = f"uint i = thread_position_in_grid.x; y[i] = {copy} + s * 1000;"
    base = np.arange(720, dtype=f32).reshape(6, 12, 10)
    for view in [base, base.transpose(2, 1, 0), base[::2, ::-1, 3:7], base[:, 3],
     np.broadcast_to(base[0, 0], (4, 10)),
                 base[5, ::-3, ::2].T, base[:0], base[2:3, 4:5, 5:6]]:  # fmt: skip
        if view.size == 0:
            continue
        y = run(body, {"a": view, "s": np.array(3, f32)}, {"y": ("float", view.shape)}, view.size,
         32,
                ensure_row_contiguous=flag)["y"]  # fmt: skip
        assert (y == view + 3000).all()


def test_outputs_with_and_without_an_initial_value() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    if (i % 3 == 0) { y[i] = 5; z[i] = 1.5h; b[i] = true; }
    """
    outs: dict[str, Any] = {"y": ("int", (10,)), "z": ("half", (10,)), "b": ("bool", (10,))}
    for value in (0, 1, 7):
        out = run(body, {}, outs, 10, 4, init_value=value)
        here = np.arange(10) % 3 == 0
        assert (out["y"] == np.where(here, 5, value)).all()
        assert (out["z"] == np.where(here, 1.5, value)).all()
        assert (out["b"] == np.where(here, True, value != 0)).all()
    out = run(body, {}, outs, 10, 4)
    assert (out["y"][::3] == 5).all()


def test_template_arguments_of_every_kind() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    T v = T(x[i]) * T(SCALE);
    U w = U(v);
    if (NEGATE) v = -v;
    y[i] = float(v) + float(w) * 1000;
    z[i] = sizeof(T) * 100 + sizeof(U) * 10 + NEGATE;
    """
    x = np.arange(10, dtype=f32)
    for first, second, scale, negate in [
        ("float", "int", 3, True),
        ("half", "uchar", -2, False),
        ("bfloat", "long", 1, True),
    ]:
        outs: dict[str, Any] = {"y": ("float", (10,)), "z": ("int", (10,))}
        out = run(body, {"x": x}, outs, 10, 10,
                  template=[("T", KINDS[first]), ("U", KINDS[second]), ("SCALE", scale),
                   ("NEGATE", negate)])  # fmt: skip
        v = x * scale
        if second == "uchar":
            assert (out["y"][0] == v[0]) and (out["z"] == 210).all()
            continue
        assert (out["y"] == (-v if negate else v) + v * 1000).all()
        assert (
            out["z"] == KINDS[first].itemsize * 100 + KINDS[second].itemsize * 10 + negate
        ).all()


def test_several_outputs_of_several_types() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    a[i] = x[i]; b[i] = half(x[i] / 2); c[i] = x[i] > 4; d[i] = -long(i) << 33;
    e[i] = bfloat16_t(x[i]); f[i] = uchar(x[i]);
    """
    x = np.arange(9, dtype=f32)
    outs: dict[str, Any] = {"a": ("float", (9,)), "b": ("half", (3, 3)), "c": ("bool", (9, 1)),
     "d": ("long", (9,)),
                            "e": ("bfloat", (1, 9)), "f": ("uchar", (9,))}  # fmt: skip
    out = run(body, {"x": x}, outs, 9, 4)
    assert (
        (out["a"] == x).all()
        and (out["b"] == (x / 2).reshape(3, 3)).all()
        and (out["c"].ravel() == (x > 4)).all()
    )
    assert (
        (out["d"] == -(np.arange(9) << 33)).all()
        and (out["e"].astype(f32).ravel() == x).all()
        and (out["f"] == x).all()
    )


def test_inputs_are_only_read() -> None:
    x = np.arange(12, dtype=f32).reshape(3, 4)
    x.flags.writeable = False
    keep = x.copy()
    y = run(
        "uint i = thread_position_in_grid.x; y[i] = x[i] + 1;",
        {"x": x},
        {"y": ("float", (3, 4))},
        12,
        12,
    )["y"]
    assert (y == keep + 1).all() and (x == keep).all()


@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, 255, 1000, 4097])
def test_plain_loops_of_every_length(n: int, threads: int) -> None:
    x = np.random.default_rng(n).normal(size=n).astype(f32)
    body = """
    uint i = thread_position_in_grid.x;
    float v = x[i];
    if (v < 0) { y[i] = -1; return; }
    y[i] = v > 1 ? 2 : v;
    """
    y = run(body, {"x": x}, {"y": ("float", (n,))}, n, 256)["y"]
    assert (y == np.where(x < 0, -1, np.where(x > 1, 2, x))).all()
