"""A batch of calls of an op, for mx.vmap: see `batching`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import batching, derivatives
from ..errors import KernelError
from . import mlx_sizes

if TYPE_CHECKING:
    from ..op_declaration import Op


def batched(
    op: Op, values: Sequence[Any], axes: Sequence[int | None]
) -> tuple[tuple[mx.array, ...], tuple[int | None, ...]]:
    """The outputs of a batch of calls, and the batch's axis of each, None where it has none.

    Raises:
        KernelError: the op's rule gave something else; or this is a shapeless trace, where the op
            says too little for a batch of any size.
    """
    like, axis = next((v, a) for v, a in zip(values, axes, strict=True) if a is not None)
    size = like.shape[axis]
    arrays = Following(op.name, like, axis) if mlx_sizes.shapeless() else Arrays()
    return _checked(op, size, *batching.batched(op, size, axes, values, op, arrays))


class Arrays:
    """What `batching.batched` does to MLX's arrays."""

    def is_array(self, value: Any) -> bool:
        return isinstance(value, mx.array)

    def move(self, value: mx.array, axis: int, to: int) -> mx.array:
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


class Following(Arrays):
    """The same in a shapeless trace, where the batch may have any size in a later call."""

    def __init__(self, op: str, like: mx.array, axis: int) -> None:
        self.op, self.like, self.axis = op, like, axis  # an array with the batch along an axis

    def repeat(self, value: mx.array, axis: int, size: int) -> mx.array:
        return mlx_sizes.repeated_along(value, axis, self.like, self.axis)

    def part(self, value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        raise self._stale()

    def select(self, value: mx.array, axis: int, at: int) -> mx.array:
        raise self._stale()

    def _stale(self) -> KernelError:
        return KernelError(
            f"[op] vmap of op {self.op!r} inside mx.compile(shapeless=True) or a shapeless export: "
            "the batch would keep the size of the first call. Declare the dims that are "
            "independent as *S, or a rule with def_vmap."
        )


def _checked(
    op: Op, size: int, outputs: Any, axes: Any
) -> tuple[tuple[mx.array, ...], tuple[int | None, ...]]:
    """What a vmap gave, and the batch's axis of each, checked.

    Raises:
        KernelError: there is not an array and an axis of the batch's size for each output.
    """
    found = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    where = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    label = f"[op] the vmap of op {op.name!r}"
    for what, some in (("outputs", found), ("axes", where)):
        if len(some) != len(op.rule.outputs):
            raise KernelError(
                f"{label} gave {len(some)} {what}; expected {len(op.rule.outputs)}, one per output."
            )
    for one, value, axis in zip(op.rule.outputs, found, where, strict=True):
        if not isinstance(value, mx.array):
            raise derivatives.no_array(op, "vmap", value, f"output {one.name!r}")
        if axis is None:
            continue
        if not isinstance(axis, int) or not 0 <= axis < value.ndim or value.shape[axis] != size:
            raise KernelError(
                f"{label} gave output {one.name!r} of shape {value.shape}, with the batch along "
                f"axis {axis!r}; expected an axis of size {size}, or None."
            )
    return found, where
