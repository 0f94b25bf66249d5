"""NumPy's arrays, and how its users do what the ready ops do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ferrule.cli import grid_sample as gs

from ..timing import Bench, Call, Timer
from .works import BASE, BINS, EPS, HIGH, LOW, SEGMENTS, TOP, Array, Other, Work


class NumPy:
    """The host, on the CPU; without derivatives."""

    name = "NumPy"
    dtypes = ("float32",)

    def array(self, array: Array, dtype: str, seed: int) -> Any:
        """An input."""
        rng = np.random.default_rng(seed)
        if array.kind == "ids":
            return rng.integers(0, array.high, array.shape, np.int32)
        if array.kind == "uniform":
            return rng.uniform(-1, 1, array.shape).astype(dtype)
        return rng.standard_normal(array.shape, np.float32).astype(dtype)

    def peers(self, work: Work) -> Sequence[Other]:
        """Who else does it here."""
        return () if work.backward else PEERS.get(work.peers or work.op, ())

    def call(self, function: Callable[..., Any], arrays: Sequence[Any], work: Work) -> Call:
        """What a row times."""
        return partial(function, *arrays)

    def compiled(self, function: Callable[..., Any], bench: Bench) -> Callable[..., Any]:
        """Nothing compiles NumPy's functions."""
        return function

    def timers(self, bench: Bench, work: Work) -> tuple[Timer, ...]:
        """How rows are timed."""
        return (bench.by_wall,)


def _rms_norm(x: Any, w: Any) -> Any:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(EPS)) * w


def _of_sum(x: Any, w: Any, residual: Any) -> Any:
    return _rms_norm(x + residual, w), x + residual


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(EPS)) * w + b


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _log_softmax(x: Any) -> Any:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def rope_tables(x: Any) -> tuple[Any, Any]:
    """Cosines and sines of the positions' angles, [L, D / 2], float32."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = np.arange(length)[:, None] * BASE ** (-np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rope(x: Any, cos: Any, sin: Any) -> Any:
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _topk(x: Any) -> Any:
    ids = np.argpartition(-x, TOP, -1)[..., :TOP]
    values = np.take_along_axis(x, ids, -1)
    order = np.argsort(-values, -1)
    return np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)


def _segment_sum(x: Any, ids: Any) -> Any:
    out = np.zeros((SEGMENTS, *x.shape[1:]), x.dtype)
    np.add.at(out, ids, x)
    return out


PEERS = {
    "rms_norm": (Other("NumPy, op by op", _rms_norm),),
    "rms_norm of a sum": (Other("NumPy, op by op", _of_sum),),
    "layer_norm": (Other("NumPy, op by op", _layer_norm),),
    "softmax": (Other("NumPy, op by op", _softmax),),
    "log_softmax": (Other("NumPy, op by op", _log_softmax),),
    "rope": (
        Other("NumPy, op by op, with tables", _rope, given=lambda x: [x, *rope_tables(x)]),
    ),
    "topk": (Other("np.argpartition, sorted", _topk),),
    "histogram": (Other("np.histogram", lambda x: np.histogram(x, BINS, (LOW, HIGH))[0]),),
    "segment_sum": (Other("np.add.at", _segment_sum),),
    "matmul": (Other("np.matmul", np.matmul),),
    "grid_sample": (Other("NumPy, op by op", gs.sample_numpy),),
}  # fmt: skip
