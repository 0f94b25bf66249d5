"""MLX's arrays, and who does what the ready ops do: its own operations, fused or one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..timing import Bench, Call, Timer
from .works import BASE, BINS, EPS, HIGH, LOW, SEGMENTS, TOP, Array, Other, Work

AT_ONCE = 4  # calls that are evaluated together on a GPU: the host waits for it once


class Mlx:
    """The host, on MLX's default device."""

    name = "MLX"
    dtypes = ("float32", "float16", "bfloat16")

    def array(self, array: Array, dtype: str, seed: int) -> Any:
        """An input."""
        key = mx.random.key(seed)
        if array.kind == "ids":
            made = mx.random.randint(0, array.high, array.shape, mx.int32, key)
        elif array.kind == "uniform":
            made = mx.random.uniform(-1, 1, array.shape, key=key).astype(getattr(mx, dtype))
        else:
            made = mx.random.normal(array.shape, key=key).astype(getattr(mx, dtype))
        mx.eval(made)
        return made

    def peers(self, work: Work) -> Sequence[Other]:
        """Who else does it here."""
        return PEERS.get(work.peers or work.op, ())

    def call(self, function: Callable[..., Any], arrays: Sequence[Any], work: Work) -> Call:
        """What makes the results of a row, which are not evaluated yet."""
        if not work.backward:
            return partial(function, *arrays)
        leaves, constants = list(arrays[: work.inputs]), arrays[work.inputs :]
        shape = function(*arrays).shape
        cot = mx.random.normal(shape, key=mx.random.key(99)).astype(arrays[0].dtype)
        mx.eval(cot)
        return lambda: mx.vjp(lambda *given: function(*given, *constants), leaves, [cot])[1]

    def compiled(self, function: Callable[..., Any], bench: Bench) -> Callable[..., Any]:
        """A function, compiled."""
        return mx.compile(function)

    def timers(self, bench: Bench, work: Work) -> tuple[Timer, ...]:
        """How rows are timed."""
        together = 1 if bench.device == "cpu" else AT_ONCE

        def ready(call: Call) -> Callable[[], float]:
            return lambda: bench.wall(lambda: mx.eval([call() for _ in range(together)])) / together

        return (Timer("wall", ready),)


def _topk(x: Any) -> Any:
    ids = mx.argpartition(-x, TOP, -1)[..., :TOP]
    values = mx.take_along_axis(x, ids, -1)
    order = mx.argsort(-values, -1)
    return mx.take_along_axis(values, order, -1), mx.take_along_axis(ids, order, -1)


def _histogram(x: Any) -> Any:
    bins = mx.floor((x - LOW) * (BINS / (HIGH - LOW))).astype(mx.int32)
    bins = mx.where(x == HIGH, BINS - 1, bins)
    inside = (x >= LOW) & (x <= HIGH)
    return mx.zeros(BINS, mx.int32).at[mx.where(inside, bins, 0)].add(inside.astype(mx.int32))


def _segment_sum(x: Any, ids: Any) -> Any:
    return mx.zeros((SEGMENTS, *x.shape[1:]), x.dtype).at[ids].add(x)


def _sample(x: Any, grid: Any) -> Any:
    """grid_sample of NHWC images, as `by_ops.sample`."""
    batch, height, width, _ = x.shape
    grid = grid.astype(mx.float32)
    column, row = ((grid[..., 0] + 1) * width - 1) / 2, ((grid[..., 1] + 1) * height - 1) / 2
    west, north = mx.stop_gradient(mx.floor(column)), mx.stop_gradient(mx.floor(row))
    dx, dy = column - west, row - north
    image = mx.arange(batch)[:, None, None]
    total: Any = 0
    for down in (0, 1):
        for across in (0, 1):
            i, j = north.astype(mx.int32) + down, west.astype(mx.int32) + across
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            weight = (dx if across else 1 - dx) * (dy if down else 1 - dy) * inside
            value = x[image, mx.clip(i, 0, height - 1), mx.clip(j, 0, width - 1)]
            total = total + weight.astype(x.dtype)[..., None] * value
    return total


def _sample_planes(x: Any, grid: Any) -> Any:
    return _sample(x.transpose(0, 2, 3, 1), grid).transpose(0, 3, 1, 2)


def _rope(x: Any) -> Any:
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=BASE, scale=1.0, offset=0)


def _of_sum(x: Any, w: Any, residual: Any) -> Any:
    total = x + residual
    return mx.fast.rms_norm(total, w, EPS), total


def _log_softmax(x: Any) -> Any:
    return x - mx.logsumexp(x, -1, keepdims=True)


PEERS: dict[str, Sequence[Other]] = {
    "rms_norm": [Other("mx.fast.rms_norm", lambda x, w: mx.fast.rms_norm(x, w, EPS))],
    "rms_norm of a sum": [Other("mx.fast.rms_norm of x + residual", _of_sum)],
    "layer_norm": [  # on NVIDIA's GPUs it adds up gradients of bfloat16 weights in bfloat16
        Other("mx.fast.layer_norm", lambda x, w, b: mx.fast.layer_norm(x, w, b, EPS), coarse=True)
    ],
    "softmax": [Other("mx.softmax", lambda x: mx.softmax(x, -1))],
    "log_softmax": [Other("mx.logsumexp, subtracted", _log_softmax)],
    "rope": [Other("mx.fast.rope", _rope)],
    "topk": [
        Other("mx.topk, values alone, unsorted", lambda x: mx.topk(x, TOP, -1), compared=False),
        Other("mx.argpartition, sorted", _topk),
    ],
    "histogram": [Other("MLX, op by op", _histogram)],
    "segment_sum": [Other("array.at[ids].add", _segment_sum)],
    "matmul": [Other("mx.matmul", mx.matmul)],
    "grid_sample": [
        Other("MLX, op by op", _sample), Other("mx.compile", _sample, compiled=True),
    ],
    "grid_sample NCHW": [
        Other("MLX, op by op", _sample_planes),
        Other("mx.compile", _sample_planes, compiled=True),
    ],
}  # fmt: skip
