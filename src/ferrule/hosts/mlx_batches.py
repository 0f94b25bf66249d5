"""What batches and derivatives of calls do to MLX's arrays.

In a shapeless trace no size may be written down, and MLX's own `broadcast_to`, `flatten`,
`unflatten` and `zeros_like`, or their derivatives and batches, write them down. There ops of
ferrule do the same, which take sizes from an array that has them, and so follow in compiled
functions and in files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .. import derivatives
from ..errors import KernelError
from ..op_declaration import Op, op
from . import mlx
from .mlx_build import shapeless

if TYPE_CHECKING:
    Axes = Sequence[int | None]


class Arrays:
    """What `batching.batched` does to MLX's arrays, with the sizes that they have."""

    @staticmethod
    def is_array(value: Any) -> bool:
        return isinstance(value, mx.array)

    @staticmethod
    def move(value: mx.array, axis: int, to: int) -> mx.array:
        return mx.moveaxis(value, axis, to)

    def repeat(self, value: mx.array, axis: int, size: int) -> mx.array:
        shape = [*value.shape]
        shape.insert(axis, size)
        return mx.broadcast_to(mx.expand_dims(value, axis), shape)

    def merge(self, value: mx.array, axis: int) -> mx.array:
        return mx.flatten(value, axis, axis + 1)

    def part(self, value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        return mx.unflatten(value, axis, sizes)

    def stack(self, values: Sequence[mx.array], axis: int) -> mx.array:
        return mx.stack(list(values), axis)

    def select(self, value: mx.array, axis: int, at: int) -> mx.array:
        return mx.take(value, at, axis)


class ShapelessArrays(Arrays):
    """The same in a shapeless trace, for a batch of calls of an op with these inputs."""

    def __init__(self, of: Op, values: Sequence[Any], axes: Axes) -> None:
        self._op = of
        value, axis = next((v, a) for v, a in zip(values, axes, strict=True) if a is not None)
        self._batch = mx.stop_gradient(mx.moveaxis(value, axis, 0))
        self._both: mx.array | None = None  # begins with two dims that were merged

    def repeat(self, value: mx.array, axis: int, size: int) -> mx.array:
        return mx.moveaxis(ops().repeated(value, self._batch), 0, axis)

    def merge(self, value: mx.array, axis: int) -> mx.array:
        both = mx.moveaxis(mx.moveaxis(value, axis, 0), axis + 1, 1)
        self._both = mx.stop_gradient(both)
        return mx.moveaxis(ops().merged(both), 0, axis)

    def part(self, value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        found = ops().parted(mx.moveaxis(value, axis, 0), self._both)
        return mx.moveaxis(mx.moveaxis(found, 1, axis + 1), 0, axis)

    def select(self, value: mx.array, axis: int, at: int) -> mx.array:
        raise KernelError(
            f"[op] op {self._op.name!r} would be called once per element of a batch, by vmap in a "
            "function that is compiled or exported with shapeless=True, where the size of the "
            "batch is not known. Declare *S or batch=, or a rule with def_vmap."
        )


def arrays(of: Op, values: Sequence[Any], axes: Axes) -> Arrays:
    """For a batch of calls of an op with these inputs."""
    return ShapelessArrays(of, values, axes) if shapeless() else Arrays()


def zeros_like(array: mx.array) -> mx.array:
    """Zeros like an array."""
    zeros: mx.array = ops().zeros(array) if shapeless() else mx.zeros_like(array)
    return zeros


# -- what rules give ----------------------------------------------------------------------------


def gradients(of: Op, primals: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    """What the vjp of an op gave, if it is arrays like the inputs, or None, in whose place MLX has
    zeros; they are made here in a shapeless trace, where MLX's would keep their sizes.

    Raises:
        KernelError: it is not; says what.
    """
    made = []
    for one, value, grad in zip(of.rule.inputs, primals, found, strict=True):
        if isinstance(value, mx.array) and grad is not None:
            grad = _like(of, "vjp", grad, value, f"the gradient of input {one.name!r}")
        elif isinstance(value, mx.array) and shapeless():
            grad = zeros_like(value)
        made.append(grad)
    return tuple(made)


def tangents(of: Op, outputs: Sequence[mx.array], found: Sequence[Any]) -> tuple[Any, ...]:
    """What the jvp of an op gave, if it is arrays like the outputs; raises as `gradients`."""
    made = []
    for one, value, tangent in zip(of.rule.outputs, outputs, found, strict=True):
        if tangent is None and (one.constant or not mx.issubdtype(value.dtype, mx.inexact)):
            tangent = zeros_like(value)
        made.append(_like(of, "jvp", tangent, value, f"the tangent of output {one.name!r}"))
    return tuple(made)


def _like(of: Op, kind: str, found: Any, like: mx.array, what: str) -> mx.array:
    """A derivative, of the dtype of what it is the derivative of.

    Raises:
        KernelError: it is no array, or of another shape, or would lose its imaginary part.
    """
    if not isinstance(found, mx.array):
        raise derivatives.no_array(of, kind, found, what)
    if found.shape != like.shape:
        raise KernelError(
            f"[op] the {kind} of op {of.name!r} gave an array of shape {found.shape} as {what}; "
            f"expected the shape {like.shape}."
        )
    if found.dtype == like.dtype or not mx.issubdtype(like.dtype, mx.inexact):
        return found
    if found.dtype == mx.complex64:
        raise KernelError(
            f"[op] the {kind} of op {of.name!r} gave an array of complex64 as {what}, which is of "
            f"{mlx.KNOWN[like.dtype].name}; expected real numbers, such as x.real."
        )
    return found.astype(like.dtype)


def batch(
    of: Op, size: int, outputs: Any, where: Any, repeat: Callable[[mx.array], mx.array]
) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
    """What a batch of calls gave: arrays, and the batch's axis in each, counted from 0.

    An output that is the same for all calls goes through ``repeat``, which makes it a batch along
    axis 0: MLX knows such outputs inside a batch, but gives them back without an axis.

    Raises:
        KernelError: it is something else; says what.
    """
    count = len(of.rule.outputs)
    if count == 1 and not isinstance(outputs, (tuple, list)):
        outputs, where = (outputs,), (where,)
    for what, given in (("outputs", outputs), ("axes", where)):
        if not isinstance(given, (tuple, list)) or len(given) != count:
            number = len(given) if isinstance(given, (tuple, list)) else type(given).__name__
            raise KernelError(
                f"[op] the vmap rule of op {of.name!r} gave {number} for its {what}; expected a "
                f"tuple of {count}."
            )
    made: list[mx.array] = []
    axes: list[int] = []
    for one, value, axis in zip(of.rule.outputs, outputs, where, strict=True):
        if not isinstance(value, mx.array):
            raise derivatives.no_array(of, "vmap", value, f"output {one.name!r}")
        known = isinstance(axis, int) and -value.ndim <= axis < value.ndim
        if axis is not None and not (known and value.shape[axis] == size):
            raise KernelError(
                f"[op] the vmap rule of op {of.name!r} gave the axis {axis!r} for output "
                f"{one.name!r}, which has the shape {value.shape}; expected an axis of size "
                f"{size}, or None."
            )
        made.append(repeat(value) if axis is None else value)
        axes.append(0 if axis is None else axis % value.ndim)
    return tuple(made), tuple(axes)


# -- what shapeless traces have no operation of MLX for ------------------------------------------


class Ops(NamedTuple):
    """Ops that take sizes from arrays.

    Attributes:
        repeated: an array as often as the second is long, along a new axis 0.
        summed: the reverse for derivatives: the sum along axis 0.
        merged: the first two dims as one.
        parted: the first dim as two, the sizes of the first two of the second array.
        zeros: as many.
    """

    repeated: Op
    summed: Op
    merged: Op
    parted: Op
    zeros: Op


@functools.cache
def ops() -> Ops:
    """The ops."""
    i = "uint i = thread_position_in_grid.x; "
    repeated = op(
        "ferrule_repeated", "x[*R]:T, like[B,*L]:U -> y[B,*R]:T", grid=("x.size", "B", 1),
        threadgroup=(256, 1, 1),
        metal=i + "y[size_t(thread_position_in_grid.y) * threads_per_grid.x + i] = x[i];",
    )  # fmt: skip
    summed = op(
        "ferrule_summed", "x[B,*R]:T -> y[*R]:T", grid="y.size", threadgroup=256,
        metal=i + "typename ConditionalType<sizeof(T) == 2, float, T>::type sum = 0;"
        "for (int b = 0; b < B; b++) sum += x[size_t(b) * threads_per_grid.x + i]; y[i] = T(sum);",
    )  # fmt: skip
    merged = op(
        "ferrule_merged", "x[A,B,*R]:T -> y[A*B,*R]:T", grid="x.size", threadgroup=256,
        metal=i + "y[i] = x[i];",
    )  # fmt: skip
    parted = op(
        "ferrule_parted", "x[M,*R]:T, like[A,B,*L]:U -> y[A,B,*R]:T", grid="x.size",
        threadgroup=256, metal=i + "y[i] = x[i];",
    )  # fmt: skip
    zeros = op(
        "ferrule_zeros", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=256,
        metal=i + "y[i] = T(0);", ensure_row_contiguous=False,
    )  # fmt: skip
    zeros.def_vjp(lambda primals, cotangents, outputs: [None], version="none")
    zeros.def_jvp(lambda primals, tangents, outputs: [outputs[0]], version="zeros")
    # The others are linear: forwards they do to a tangent what they do to a value.
    for back, forth in ((repeated, summed), (parted, merged)):
        _derive(back, forth)
    return Ops(repeated, summed, merged, parted, zeros)


def _derive(back: Op, forth: Op) -> None:
    """Declare the rules of two ops, each of which is the other's derivative; ``back`` has a second
    input, whose sizes it takes."""
    first = len(back.rule.outputs[0].dims or ()) - 1  # dims of a result before *R

    def back_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return forth(cotangents[0]), None

    def back_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        x = zeros_like(primals[0]) if tangents[0] is None else tangents[0]
        return back(x, primals[1])

    def back_vmap(size: int, axes: Axes, values: Any) -> Any:
        (x, like), (at, at_like) = values, axes
        if at_like is not None:  # any of a batch, for the sizes
            like = mx.moveaxis(like, at_like, -1)
        if at is None:
            return back(x, like), None
        place = len(back.rule.inputs[0].dims or ()) - 1
        return back(mx.moveaxis(x, at, place), like), first

    def forth_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return back(cotangents[0], mx.stop_gradient(primals[0]))

    def forth_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        return forth(tangents[0])

    back.def_vjp(back_vjp, version=back.name)
    back.def_jvp(back_jvp, version=back.name)
    back.def_vmap(back_vmap, version=back.name)
    forth.def_vjp(forth_vjp, version=forth.name)
    forth.def_jvp(forth_jvp, version=forth.name)
