"""Kernels, ops and CUDA units as nodes of MLX's graphs on an NVIDIA GPU: the cases of the CPU, and
what is CUDA's alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import ferrule as fe
import test_mlx_node
from cuda_ops import reduction, rotation, sum_op
from test_mlx_node import *  # noqa: F403
from test_mlx_node import numbers, same

pytestmark = [
    pytest.mark.gpu,
    test_mlx_node.pytestmark,
    pytest.mark.skipif(
        not mx.is_available(mx.gpu) or mx.metal.is_available(), reason="MLX has no CUDA here"
    ),
]


def test_units() -> None:
    total, parts = reduction(), sum_op()
    f = mx.compile(lambda x: total(x * 2) + parts(x, 0.5), shapeless=True)
    for n in (5, 70_000, 1, 1_000_003):
        x = numbers(n)
        same(total(x), x.sum())
        same(f(x), x.sum() * 2 + x.sum() * 0.5)
    x = y = numbers(3, 4)
    for _ in range(200):
        y = y * 0.5 + total(y) * 0 + x * 0.5
    assert mx.allclose(y, x).item()
    strided = numbers(64, 65)[::2, 1:].T
    same(total(strided), strided.sum())


def test_clusters_of_several_sizes_by_turns() -> None:
    """MLX's update of graphs takes kernels that differ in the size of clusters for the same."""
    op = rotation()
    for i in range(120):
        x = mx.arange(4 * 32 * (size := (1, 2, 4, 8)[i % 4]), dtype=mx.float32)
        x = x.reshape(4, size, 32)
        same(op(x), mx.roll(x, -1, axis=1))


def test_cuda_kernels_of_mlx() -> None:
    source = """auto i = cooperative_groups::this_grid().thread_rank();
    if (i < x_shape[0]) y[i] = x[i] * N;"""
    given = {
        "inputs": [numbers(1000)], "grid": (1000, 1, 1), "threadgroup": (256, 1, 1),
        "template": [("N", 3)], "output_shapes": [(1000,)], "output_dtypes": [mx.float32],
    }  # fmt: skip
    names = ("thrice", ["x"], ["y"], source)
    (ours,) = fe.cuda_kernel(*names)(**given)
    (theirs,) = mx.fast.cuda_kernel(*names)(**given)
    same(ours, theirs)
    f = mx.compile(lambda x: fe.cuda_kernel(*names)(**{**given, "inputs": [x + 1]})[0] * 2)
    same(f(given["inputs"][0]), (given["inputs"][0] + 1) * 6)


def test_what_c_has_no_room_for_on_a_gpu() -> None:
    filled = fe.op(
        "filled", "x[N]:float32 -> y[2*N]:float32", grid="N", threadgroup=32, init_value=7,
        metal="uint i = thread_position_in_grid.x; if (x[i] > 0) y[2 * i] = x[i];",
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = np.full(2000, 7, np.float32)
    expected[::2][x > 0] = x[x > 0]
    assert np.array_equal(np.array(mx.compile(lambda x: filled(x) * 1)(mx.array(x))), expected)
