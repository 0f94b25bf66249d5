"""Nodes whose kernels MLX launches, as it would where its private functions have changed: the cases
of the CPU once more, on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

import ferrule as fe
import on_cuda
import test_mlx_node
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import probe as mlx_probe
from test_mlx_node import *  # noqa: F403
from test_mlx_node import numbers, same

pytestmark = [
    pytest.mark.gpu,
    test_mlx_node.pytestmark,
    pytest.mark.skipif(not on_cuda.mlx_has_cuda(), reason="MLX has no CUDA here"),
]


@pytest.fixture(autouse=True)
def _by_mlx() -> Iterator[None]:
    found = mlx_build.loaded()
    assert mlx_probe._wrong(found, mlx_build.number_of) == ""
    found.fr_mlx_route(2)
    yield
    found.fr_mlx_route(1)


@pytest.mark.parametrize("contiguous", [False, True])
def test_all_that_is_passed_by_value(contiguous: bool) -> None:
    op = fe.op(
        "by_value", "x[N, M]:T, n:float32, k:int64, b:bool, w[M]:float32? -> y[N, M]:float32",
        grid="N * M", threadgroup=64, ensure_row_contiguous=contiguous,
        metal="""uint i = thread_position_in_grid.x, row = i / uint(M), at = i % uint(M);
        float v = float(x[row * x_strides[0] + at * x_strides[1]]);
        y[i] = v * n + float(k) + (b ? 0.25f : 0.0f) + float(N) + (has_w ? w[at] : 0.0f);""",
    )  # fmt: skip
    for dtype in (mx.float32, mx.int64, mx.bfloat16):
        x = mx.arange(21 * 5).reshape(5, 21).astype(dtype).T
        w = numbers(5)
        found = op(x[2:], 0.5, 1 << 40, True, w), op(x[2:], 0.5, -7, False, None)
        plain = x[2:].astype(mx.float32) * 0.5 + 19
        same(found[0], plain + 0.25 + float(1 << 40) + w)
        same(found[1], plain - 7)
