"""What the simdgroup and quadgroup operations give, lane by lane, written in plain NumPy.

A group of `width` lanes is two arrays: the values, and which lanes are active. A result is the
values and where Metal defines them: reading a lane that is not there is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np

from metal_harness import Array

Result = tuple[Array, Array]
Model = Callable[[Array, Array], Result]


def groups(n: int, threadgroup: int, width: int) -> Iterator[Array]:
    """The thread indices of each group of a one-dimensional launch; -1 where a lane is missing."""
    for start in range(0, n, threadgroup):
        end = min(start + threadgroup, n)
        for first in range(start, end, width):
            lanes = np.arange(first, first + width)
            yield np.where(lanes < end, lanes, -1)


def over(model: Model, x: Array, active: Array, threadgroup: int, width: int) -> Result:
    """`model` applied to every group of a launch of ``len(x)`` threads."""
    want: Array | None = None
    defined = np.zeros(len(x), bool)
    for lanes in groups(len(x), threadgroup, width):
        here = lanes >= 0
        result, good = model(x[np.maximum(lanes, 0)], here & active[np.maximum(lanes, 0)])
        want = np.zeros((len(x), *result.shape[1:]), result.dtype) if want is None else want
        want[lanes[here]] = result[here]
        defined[lanes[here]] = good[here]
    assert want is not None
    return want, defined


def reduction(function: Callable[[Any, Any], Any]) -> Model:
    def model(v: Array, active: Array) -> Result:
        if not active.any():
            return v, active
        total = reduce(lambda a, b: np.asarray(function(a, b), v.dtype), v[active])
        return np.broadcast_to(total, v.shape), active

    return model


def prefix(function: Callable[[Any, Any], Any], first: int | None) -> Model:
    """Inclusive without `first`; else exclusive, and `first` is what the first lane gets."""

    def model(v: Array, active: Array) -> Result:
        out = v.copy()
        total: Any = None
        for lane in np.flatnonzero(active):
            before = total
            total = v[lane] if total is None else np.asarray(function(total, v[lane]), v.dtype)
            exclusive = (
                np.asarray(first, v.dtype) if before is None and first is not None else before
            )
            out[lane] = total if first is None else exclusive
        return out, active

    return model


def moved(source: Callable[[Array], Array]) -> Model:
    """Each lane reads the lane that `source` makes of its number, if that lane is active."""

    def model(v: Array, active: Array) -> Result:
        lanes = source(np.arange(len(v)))
        inside = (lanes >= 0) & (lanes < len(v))
        read = np.where(inside, lanes, 0)
        return v[read], active & inside & active[read]

    return model


def filled(delta: int, modulo: int) -> Model:
    """A shuffle by `delta` (up if negative) inside vectors of `modulo` lanes.

    The values are pairs of data and filling: what would come from outside of a vector comes from
    the other end of the same vector, of the filling.
    """

    def model(v: Array, active: Array) -> Result:
        lane = np.arange(len(v))
        place = lane % modulo + delta
        read = lane // modulo * modulo + place % modulo
        outside = (place < 0) | (place >= modulo)
        chosen = np.where(outside.reshape(-1, *[1] * (v.ndim - 2)), v[read, 1], v[read, 0])
        return chosen, active & active[read]

    return model


def first_active(v: Array, active: Array) -> Result:
    return np.broadcast_to(v[np.argmax(active)], v.shape), active


def butterfly(v: Array, active: Array) -> Result:
    """A sum over partners at distance 1, 2, 4, …; a lane that is missing adds nothing."""
    nodes: list[Any] = [value if on else None for value, on in zip(v, active, strict=True)]
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [b if a is None else a if b is None else v.dtype.type(a + b) for a, b in pairs]
    return np.full_like(v, 0 if nodes[0] is None else nodes[0]), active
