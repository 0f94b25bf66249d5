"""Nodes of MLX's graphs on an NVIDIA GPU: what is CUDA's alone.

The tests in test_mlx_*.py are for the GPU, too, where MLX has one.
"""

from __future__ import annotations

import warnings

import mlx.core as mx
import numpy as np
import pytest

import ferrule as fe
import on_cuda
from cuda_ops import reduction, rotation, sum_op
from test_mlx_node import numbers, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_cuda.mlx_has_cuda(), reason="MLX has no CUDA here"),
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


def test_shared_memory_that_follows_sizes() -> None:
    op = fe.op(
        "turned", "x[*S,D]:T -> y[*S,D]:T", grid="x.size", threadgroup="D", shared_memory="4 * D",
        cuda="""extern __shared__ float row[]; auto i = blockIdx.x * D + threadIdx.x;
        row[threadIdx.x] = x[i]; __syncthreads(); y[i] = row[D - 1 - threadIdx.x];""",
    )  # fmt: skip
    f = mx.compile(lambda x: op(x * 2), shapeless=True)
    for shape in ((3, 5), (7, 256), (1, 1)):
        x = numbers(*shape)
        same(op(x), x[:, ::-1])
        same(f(x), x[:, ::-1] * 2)


def test_what_c_has_no_room_for_on_a_gpu() -> None:
    filled = fe.op(
        "filled", "x[N]:float32 -> y[2*N]:float32", grid="N", threadgroup=32, init_value=7,
        metal="uint i = thread_position_in_grid.x; if (x[i] > 0) y[2 * i] = x[i];",
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = np.full(2000, 7, np.float32)
    expected[::2][x > 0] = x[x > 0]
    assert np.array_equal(np.array(mx.compile(lambda x: filled(x) * 1)(mx.array(x))), expected)


def test_installed_kernels_in_both_languages() -> None:
    before = mx.fast.metal_kernel, mx.fast.cuda_kernel, mx.metal.is_available, mx.default_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.FerruleWarning)  # of other tests' modules
        fe.install_mlx()
    try:
        assert mx.metal.is_available() and mx.default_device() == mx.gpu
        given = {
            "inputs": [np.arange(5, dtype=np.float32), 2], "grid": (5, 1, 1),
            "threadgroup": (5, 1, 1), "output_shapes": [(5,)], "output_dtypes": [mx.float32],
        }  # fmt: skip
        bodies = {
            "metal_kernel": "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + n;",
            "cuda_kernel": "y[threadIdx.x] = x[threadIdx.x] + n[0];",
        }
        for name, body in bodies.items():
            kernel = getattr(mx.fast, name)(
                name="plus", input_names=["x", "n"], output_names=["y"], source=body
            )
            (y,) = kernel(**given)
            assert isinstance(y, mx.array) and y.tolist() == [2, 3, 4, 5, 6]
            f = mx.compile(lambda x, k=kernel: k(**{**given, "inputs": [x, 2]})[0], shapeless=True)
            assert f(mx.ones(5)).tolist() == [3] * 5
    finally:
        fe.uninstall_mlx()
    now = mx.fast.metal_kernel, mx.fast.cuda_kernel, mx.metal.is_available, mx.default_device
    assert now == before
