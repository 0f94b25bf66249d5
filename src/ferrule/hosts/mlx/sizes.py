"""Sizes in shapeless traces of MLX, where none may be written down.

Sizes come from counting, by `cumsum`, in arrays that have them. Broadcasts are nodes with a rule of
their own for batches, since MLX batches a broadcast with the sizes of the trace. Outside of such
traces all this is plain MLX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...errors import KernelError
from . import build as mlx_build
from . import node as mlx_node
from .build import shapeless

# Whether MLX knows, in such a trace, the sizes of a cumsum; and of a product that gathers.
COUNTS, GATHERS = mlx_build.at_least(0, 32, 3), mlx_build.at_least(0, 32)

Arrays = Sequence[mx.array]
Numbers = Sequence[int]


def more_dims(array: mx.array, count: int) -> mx.array:
    """``array`` with ``count`` dims of size 1 in front."""
    for _ in range(count):  # one by one: MLX batches several of them wrongly
        array = array[None]
    return array


def too_old(feature: str) -> KernelError:
    """The error for what MLX has no sizes for."""
    return KernelError(
        f"[ferrule.mlx] {feature} inside functions compiled or exported with shapeless=True need "
        f"MLX 0.32.3 or newer; this is {mlx_build.VERSION}."
    )


def zeros(array: mx.array) -> mx.array:
    """Zeros of uint32 in the shape of ``array``: what a sum is before its first term.

    Raises:
        KernelError: this MLX is too old.
    """
    if not COUNTS:
        raise too_old("omitted indices, batches and gradients")
    terms = mx.stop_gradient(array).astype(mx.uint32)[..., None]
    return mx.squeeze(mx.cumsum(terms, axis=-1, inclusive=False), -1)


def first_along(array: mx.array, axes: Sequence[int]) -> mx.array:
    """``array`` at index 0 of these axes, which then are gone.

    `mx.take` would keep the other sizes, and MLX's reductions crash where all axes have size 1.
    """
    zero = mx.zeros([1] * array.ndim, mx.uint32)
    for axis in axes:
        array = mx.take_along_axis(array, zero, axis=axis)
    return mx.squeeze(array, axes)


def _ones_of_batch(array: mx.array) -> mx.array:
    """Ones of uint32 in the shape of ``array`` without its last two dims."""
    return mx.logical_not(zeros(first_along(mx.stop_gradient(array), (-1, -2)))).astype(mx.uint32)


def positions(array: mx.array) -> mx.array:
    """The number of each matrix of ``array``, (*B, M, K), in the shape B; of uint32."""
    batch = array.shape[:-2]
    if not shapeless():
        return mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
    ones = _ones_of_batch(array)
    if not batch:
        return zeros(ones)
    place = mx.cumsum(ones, axis=0, inclusive=False)
    for axis in range(1, len(batch)):
        # place times the axis' size: what is before an element, and it and what follows
        before = mx.cumsum(place, axis=axis, inclusive=False)
        place = before + mx.cumsum(place, axis=axis, reverse=True)
        place = place + mx.cumsum(ones, axis=axis, inclusive=False)
    return place


def starts(array: mx.array) -> mx.array:
    """Where the matrices of each of ``array``'s batches begin: (V, *B, M, K) gives (V,)."""
    size, *batch = array.shape[:-2]
    if not shapeless():
        return mx.arange(size, dtype=mx.uint32) * math.prod(batch)
    return first_along(positions(array), range(1, len(batch) + 1)) if batch else positions(array)


def alike(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """Both broadcast to one shape."""
    a, b = mx.broadcast_arrays(a, b)
    if shapeless():
        a, b = (mlx_node.ruled(array, array, _broadcast()) for array in (a, b))
    return a, b


def alike_but(axis: int, *arrays: mx.array) -> list[mx.array]:
    """Arrays of one rank, broadcast to shapes that differ along ``axis`` at most.

    MLX does so itself, but in a shapeless trace its rule for batches of it confuses the axes of two
    of them. Each array made here has all the batches that any has, which leaves that rule nothing.
    """
    if not shapeless():
        return list(arrays)
    common = functools.reduce(
        lambda a, b: alike(a, b)[0], [first_along(array, (axis,)) for array in arrays]
    )
    common = mx.expand_dims(common, axis)
    return [alike(array, common)[0] for array in arrays]


def repeated(array: mx.array, like: mx.array) -> mx.array:
    """(1, ...) as often as ``like`` is long."""
    if not shapeless():
        return mx.broadcast_to(array, (like.shape[0], *array.shape[1:]))
    return alike(array, spread(zeros(starts(like)), array.ndim))[0]


def spread(array: mx.array, rank: int) -> mx.array:
    """(V,) with dims of size 1 behind it."""
    for _ in range(rank - 1):
        array = array[..., None]
    return array


def added_at(values: mx.array, index: mx.array, like: mx.array, once: bool) -> mx.array:
    """Matrices (*I, M, K) added up where ``index``, (*I), says, in the shape of ``like``.

    Args:
        values: what to add.
        index: a number among the matrices of ``like``, for each.
        like: an array of the shape (*B, M, K).
        once: that ``index`` is `positions` of ``like``, broadcast.
    """
    fixed = not shapeless()
    batch = like.ndim - 2
    if once and fixed and values.shape == like.shape:
        return values
    values = mx.flatten(values, 0, -3) if index.ndim else values[None]
    index = spread(mx.flatten(index) if index.ndim else index[None], 3)
    if fixed:
        into = mx.zeros((math.prod(like.shape[:-2]), *like.shape[-2:]), values.dtype)
        return mlx_node.scatter_add(into, index, values).reshape(like.shape)
    if like.size == 0:  # MLX would leave the addition out, for all later calls
        raise KernelError(
            f"a gradient with respect to an array of shape {like.shape} was traced with "
            "shapeless=True. Call the compiled function first with arrays that have elements."
        )
    into = mx.flatten(like, 0, -3) if batch else like[None]
    into = zeros(into).astype(values.dtype)
    added = mlx_node.scatter_add(*alike_but(0, into, index, values))
    if batch == 0:
        return mx.squeeze(added, 0)
    if batch == 1:
        return added
    place = positions(like)[..., None][..., None]
    added, place = alike_but(batch - 1, more_dims(added, batch - 1), place)
    return mx.take_along_axis(added, place, axis=batch - 1)


# -- rules ---------------------------------------------------------------------------------------


def first(arrays: Arrays, axes: Numbers) -> list[mx.array]:
    """Arrays whose batches come first: of size 1 where they have none."""
    return [
        mx.moveaxis(array, axis, 0) if axis >= 0 else array[None]
        for array, axis in zip(arrays, axes, strict=True)
    ]


@functools.cache
def _broadcast() -> Any:
    """Rules of the first input's broadcast with the second, whose shape alone matters."""

    def vjp(primals: Arrays, cotangent: mx.array, argnums: Numbers) -> list[mx.array]:
        raise KernelError(
            "[ferrule.mlx] inside mx.compile(shapeless=True) gathered products have no gradient "
            "with respect to global_scale, and their gradients have no derivatives, since MLX "
            "keeps the sizes of the first call there. Compile without shapeless=True."
        )

    def vmap(inputs: Arrays, axes: Numbers) -> list[mx.array]:
        ranks = [array.ndim - (axis >= 0) for array, axis in zip(inputs, axes, strict=True)]
        aligned = []
        for array, rank in zip(first(inputs, axes), ranks, strict=True):
            for _ in range(max(ranks) - rank):
                array = array[:, None]
            aligned.append(array)
        return [alike(aligned[0], aligned[1])[0]]

    return mlx_node.answering({"vjp": vjp, "jvp": vjp, "vmap": vmap}, "broadcast_arrays")
