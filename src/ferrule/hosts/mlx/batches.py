"""Batches and derivatives of calls with MLX's arrays.

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

from ...errors import KernelError
from ...operators import derivatives
from ...operators.declaration import op
from ...operators.op import Op
from . import arrays as mlx
from .build import shapeless

if TYPE_CHECKING:
    Axes = Sequence[int | None]


class BatchArrays:
    """The operations of `operators.batching.batched` on MLX's arrays, with the sizes they have."""

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

    def expand(self, value: mx.array, axis: int) -> mx.array:
        return mx.expand_dims(value, axis)

    def merge(self, value: mx.array, axis: int) -> mx.array:
        return mx.flatten(value, axis, axis + 1)

    def part(self, value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        return mx.unflatten(value, axis, sizes)

    def stack(self, values: Sequence[mx.array], axis: int) -> mx.array:
        return mx.stack(list(values), axis)

    def select(self, value: mx.array, axis: int, at: int) -> mx.array:
        return mx.take(value, at, axis)


class ShapelessArrays(BatchArrays):
    """The same in a shapeless trace, for a batch of calls of an op with these inputs."""

    def __init__(self, of: Op, values: Sequence[Any], axes: Axes) -> None:
        self._op = of
        value, axis = next((v, a) for v, a in zip(values, axes, strict=True) if a is not None)
        self._batch = mx.stop_gradient(mx.moveaxis(value, axis, 0))
        self._unmerged: mx.array | None = None  # begins with two dims that were merged

    def repeat(self, value: mx.array, axis: int, size: int) -> mx.array:
        return mx.moveaxis(ops().repeated(value, self._batch), 0, axis)

    def merge(self, value: mx.array, axis: int) -> mx.array:
        unmerged = mx.moveaxis(mx.moveaxis(value, axis, 0), axis + 1, 1)
        self._unmerged = mx.stop_gradient(unmerged)
        return mx.moveaxis(ops().merged(unmerged), 0, axis)

    def part(self, value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        parts = ops().parted(mx.moveaxis(value, axis, 0), self._unmerged)
        return mx.moveaxis(mx.moveaxis(parts, 1, axis + 1), 0, axis)

    def select(self, value: mx.array, axis: int, at: int) -> mx.array:
        raise KernelError(
            f"[op] op {self._op.name!r} would be called once per element of a batch, by vmap in a "
            "function that is compiled or exported with shapeless=True, where the size of the "
            "batch is not known. Declare *S or batch=, or a rule with def_vmap."
        )


def arrays(of: Op, values: Sequence[Any], axes: Axes) -> BatchArrays:
    """The operations for a batch of calls of an op with these inputs."""
    return ShapelessArrays(of, values, axes) if shapeless() else BatchArrays()


def zeros_like(array: mx.array) -> mx.array:
    """Zeros like an array."""
    zeros: mx.array = ops().zeros(array) if shapeless() else mx.zeros_like(array)
    return zeros


# -- what rules give ----------------------------------------------------------------------------


def gradients(of: Op, primals: Sequence[Any], grads: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients that an op's vjp gave: arrays like the inputs, or None, in whose place MLX has
    zeros; these are made here in a shapeless trace, where MLX's would keep their sizes.

    Raises:
        KernelError: one is something else; says what.
    """
    checked = []
    for argument, value, grad in zip(of.rule.inputs, primals, grads, strict=True):
        if isinstance(value, mx.array) and grad is not None:
            grad = _checked(of, "vjp", grad, value, f"the gradient of input {argument.name!r}")
        elif isinstance(value, mx.array) and shapeless():
            grad = zeros_like(value)
        checked.append(grad)
    return tuple(checked)


def tangents(of: Op, outputs: Sequence[mx.array], results: Sequence[Any]) -> tuple[Any, ...]:
    """The tangents that an op's jvp gave: arrays like the outputs; raises as `gradients`."""
    checked = []
    for output, value, tangent in zip(of.rule.outputs, outputs, results, strict=True):
        if tangent is None and (output.constant or not mx.issubdtype(value.dtype, mx.inexact)):
            tangent = zeros_like(value)
        checked.append(
            _checked(of, "jvp", tangent, value, f"the tangent of output {output.name!r}")
        )
    return tuple(checked)


def _checked(of: Op, kind: str, derivative: Any, like: mx.array, label: str) -> mx.array:
    """A derivative, of the dtype of what it is the derivative of.

    Raises:
        KernelError: it is no array, or of another shape, or would lose its imaginary part.
    """
    if not isinstance(derivative, mx.array):
        raise derivatives.no_array(of, kind, derivative, label)
    if derivative.shape != like.shape:
        raise KernelError(
            f"[op] the {kind} of op {of.name!r} gave an array of shape {derivative.shape} as "
            f"{label}; expected the shape {like.shape}."
        )
    if derivative.dtype == like.dtype or not mx.issubdtype(like.dtype, mx.inexact):
        return derivative
    if derivative.dtype == mx.complex64:
        raise KernelError(
            f"[op] the {kind} of op {of.name!r} gave an array of complex64 as {label}, which is "
            f"of {mlx.KNOWN[like.dtype].name}; expected real numbers, such as x.real."
        )
    return derivative.astype(like.dtype)


def batch(
    of: Op, size: int, outputs: Any, axes: Any, repeat: Callable[[mx.array], mx.array]
) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
    """The results of a batch of calls: arrays, and the batch's axis in each, counted from 0.

    An output that is the same for all calls goes through ``repeat``, which makes it a batch along
    axis 0: MLX knows such outputs inside a batch, but gives them back without an axis.

    Raises:
        KernelError: it is something else; says what.
    """
    count = len(of.rule.outputs)
    if count == 1 and not isinstance(outputs, (tuple, list)):
        outputs, axes = (outputs,), (axes,)
    for label, container in (("outputs", outputs), ("axes", axes)):
        if not isinstance(container, (tuple, list)) or len(container) != count:
            sequence = isinstance(container, (tuple, list))
            got = len(container) if sequence else type(container).__name__
            raise KernelError(
                f"[op] the vmap rule of op {of.name!r} gave {got} for its {label}; expected a "
                f"tuple of {count}."
            )
    batches: list[mx.array] = []
    batch_axes: list[int] = []
    for output, value, axis in zip(of.rule.outputs, outputs, axes, strict=True):
        if not isinstance(value, mx.array):
            raise derivatives.no_array(of, "vmap", value, f"output {output.name!r}")
        in_range = isinstance(axis, int) and -value.ndim <= axis < value.ndim
        if axis is not None and not (in_range and value.shape[axis] == size):
            raise KernelError(
                f"[op] the vmap rule of op {of.name!r} gave the axis {axis!r} for output "
                f"{output.name!r}, which has the shape {value.shape}; expected an axis of size "
                f"{size}, or None."
            )
        batches.append(repeat(value) if axis is None else value)
        batch_axes.append(0 if axis is None else axis % value.ndim)
    return tuple(batches), tuple(batch_axes)


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
    """The ops, declared at the first call."""

    def each(name: str, rule: str, body: str, grid: Any = "x.size", **more: Any) -> Op:
        text = f"uint i = thread_position_in_grid.x; {body}"
        return op(f"ferrule_{name}", rule, grid=grid, threadgroup=256, metal=text, **more)

    repeated = each(
        "repeated",
        "x[*R]:T, like[B,*L]:U -> y[B,*R]:T",
        "y[size_t(thread_position_in_grid.y) * threads_per_grid.x + i] = x[i];",
        ("x.size", "B", 1),
    )
    summed = each(
        "summed",
        "x[B,*R]:T -> y[*R]:T",
        "typename ConditionalType<sizeof(T) == 2, float, T>::type sum = 0;"
        "for (int b = 0; b < B; b++) sum += x[size_t(b) * threads_per_grid.x + i]; y[i] = T(sum);",
        "y.size",
    )
    merged = each("merged", "x[A,B,*R]:T -> y[A*B,*R]:T", "y[i] = x[i];")
    parted = each("parted", "x[M,*R]:T, like[A,B,*L]:U -> y[A,B,*R]:T", "y[i] = x[i];")
    zeros = each("zeros", "x[*S]:T -> y[*S]:T", "y[i] = T(0);", ensure_row_contiguous=False)
    zeros.def_vjp(lambda primals, cotangents, outputs: [None], version="none")
    zeros.def_jvp(lambda primals, tangents, outputs: [outputs[0]], version="zeros")
    # The others are linear: forwards they do to a tangent what they do to a value.
    for back, forth in ((repeated, summed), (parted, merged)):
        _declare_rules(back, forth)
    return Ops(repeated, summed, merged, parted, zeros)


def _declare_rules(back: Op, forth: Op) -> None:
    """Declare the rules of two ops, each of which is the other's derivative; ``back`` has a second
    input, whose sizes it takes."""
    first = len(back.rule.outputs[0].dims or ()) - 1  # dims of a result before *R

    def back_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return forth(cotangents[0]), None

    def back_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        x = zeros_like(primals[0]) if tangents[0] is None else tangents[0]
        return back(x, primals[1])

    def back_vmap(size: int, axes: Axes, values: Any) -> Any:
        (x, like), (x_axis, like_axis) = values, axes
        if like_axis is not None:  # any of a batch, for the sizes
            like = mx.moveaxis(like, like_axis, -1)
        if x_axis is None:
            return back(x, like), None
        place = len(back.rule.inputs[0].dims or ()) - 1
        return back(mx.moveaxis(x, x_axis, place), like), first

    def forth_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return back(cotangents[0], mx.stop_gradient(primals[0]))

    def forth_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        return forth(tangents[0])

    back.def_vjp(back_vjp, version=back.name)
    back.def_jvp(back_jvp, version=back.name)
    back.def_vmap(back_vmap, version=back.name)
    forth.def_vjp(forth_vjp, version=forth.name)
    forth.def_jvp(forth_jvp, version=forth.name)
