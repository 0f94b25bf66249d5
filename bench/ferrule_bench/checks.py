"""What checking costs: kernels in `ferrule.checking`, and as they always run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import ferrule

from . import mlx_lm
from .timing import Bench, Peer

UNCHECKED = "unchecked"
# What the project allows of mlx-lm's kernels: 20 times for bounds, 60 times for everything.
_BOUNDS, _ALL = 1 / 20, 1 / 60

_SOFTMAX = """
threadgroup float part[32];
const uint row = threadgroup_position_in_grid.x, t = thread_position_in_threadgroup.x;
const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
float most = -INFINITY, sum = 0;
for (uint i = t; i < N; i += 256) most = max(most, x[row * N + i]);
most = simd_max(most);
if (lane == 0) part[group] = most;
threadgroup_barrier(mem_flags::mem_threadgroup);
most = simd_max(part[lane % 8]);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = t; i < N; i += 256) sum += exp(x[row * N + i] - most);
sum = simd_sum(sum);
if (lane == 0) part[group] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
sum = simd_sum(lane < 8 ? part[lane] : 0.0f);
for (uint i = t; i < N; i += 256) y[row * N + i] = exp(x[row * N + i] - most) / sum;
"""


def slowdown(bench: Bench) -> None:
    """Kernels checked against kernels unchecked: a ratio of 0.05 is 20 times as long."""
    rng = np.random.default_rng(0)
    rows, columns = (8, 512) if bench.quick else (256, 4096)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    exp = ferrule.metal_kernel(
        "exp", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = exp(x[i]);"
    )
    softmax = ferrule.metal_kernel("softmax", ["x"], ["y"], _SOFTMAX)
    like: dict[str, Any] = {"output_shapes": [x.shape], "output_dtypes": ["float32"], "inputs": [x]}
    compared(
        bench,
        f"exp, {x.size:,} threads",
        lambda: exp(grid=(x.size, 1, 1), threadgroup=(256, 1, 1), **like),
    )
    compared(
        bench,
        f"softmax, {rows} rows of {columns}",
        lambda: softmax(
            grid=(rows * 256, 1, 1), threadgroup=(256, 1, 1), template=[("N", columns)], **like
        ),
    )
    found = mlx_lm.find(bench)
    if found is not None:
        for work, call in _of_mlx_lm(bench, found[0]):
            compared(bench, work, call, (_BOUNDS, _ALL))


def _of_mlx_lm(bench: Bench, modules: dict[str, Any]) -> list[tuple[str, Callable[[], object]]]:
    """Calls of mlx-lm's own functions."""
    import mlx.core as mx

    array = functools.partial(mlx_lm._normal, np.random.default_rng(0))
    steps, heads, dim = (2, 2, 64) if bench.quick else (8, 16, 64)
    g, beta = abs(array(1, steps, heads)) * 0.1, abs(array(1, steps, heads)) * 0.1
    q, k, v = (0.1 * array(1, steps, heads, dim) for _ in range(3))
    delta = (q, k, v, g, beta, mx.zeros((1, heads, dim, dim)))
    width = 128
    x, dt = array(2, 1, heads, dim), array(2, 1, heads)
    b, c = array(2, 1, 1, width), array(2, 1, 1, width)
    state = array(2, heads, dim, width)
    ssm = (x, array(heads), b, c, array(heads), dt, array(heads), state, (0.001, 100.0))
    mx.eval(*delta, *ssm[:-1])
    return [
        (
            f"gated delta, {steps} steps, {heads} heads of {dim}",
            lambda: mlx_lm._evaluated(modules["gated_delta"].gated_delta_kernel(*delta)),
        ),
        (
            f"SSM update, batch 2, {heads} heads of {dim}x{width}",
            lambda: mlx_lm._evaluated(modules["ssm"].ssm_update_kernel(*ssm)),
        ),
    ]


def compared(
    bench: Bench,
    work: str,
    call: Callable[[], object],
    targets: tuple[float | None, float | None] = (None, None),
) -> None:
    """A row for bounds alone, and one for everything."""
    for what, kinds, target in zip(
        ("bounds", "everything"), (["bounds"], None), targets, strict=True
    ):

        def checked(kinds: list[str] | None = kinds) -> object:
            with ferrule.checking(kinds=kinds):
                return call()

        peer = Peer(UNCHECKED, call, target, compared=False)
        bench.compare(f"{work}: {what}", checked, [peer])


GROUPS: dict[str, Callable[[Bench], None]] = {"checks": slowdown}
