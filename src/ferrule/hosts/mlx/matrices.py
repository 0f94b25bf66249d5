"""What `matmul` asks of matrices and makes of them: whether they are values or stand for some,
whether MLX's kernels take them as they lie, batches of them in front and without gaps."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx

from ...errors import KernelError
from . import arrays as mlx
from . import build as mlx_build
from .build import shapeless
from .sizes import Arrays, Numbers, alike, first, repeated, spread, starts


def one_group(x: mx.array, w: mx.array, group_size: int | None, stream: Any) -> bool:
    """Whether rows can be one group of elements with a scale, on an NVIDIA GPU: MLX's kernel for
    sm_90 (0.32.4) gives garbage then, and none of those that gather."""
    if not x.ndim or not has_cuda() or not mlx_build.at_least(0, 32, 3):
        return False
    longer = x.shape[-1] > (64 if group_size is None else group_size)
    if longer and not (shapeless() and is_traced(w)):  # else rows stay as long as these
        return False
    with stream_context(stream):
        return bool(mx.default_device() == mx.gpu)


def has_cuda() -> bool:
    native = mlx_build.library()
    return native is not None and bool(native.fr_mlx_has_cuda())


def has_nodes(*arrays: mx.array | None) -> bool:
    """Whether nodes can be had; if not, the arrays must be values, for MLX's rules would be wrong.

    Raises:
        KernelError: they stand for values in a transformation.
    """
    if mlx_build.library() is not None:
        return True
    for array in arrays:
        if array is not None:
            try:
                mlx.facts(array)
            except KernelError as error:
                raise KernelError(f"[ferrule.mlx] an array of a product {error}") from error
    return False


def is_traced(array: mx.array) -> bool:
    try:
        mx.eval(array)
    except (RuntimeError, ValueError):
        return True
    return False


def stream_context(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else mx.stream(stream)


def without_gaps(array: mx.array) -> mx.array:
    """``array``; for MLX's CUDA kernels (0.32.4) a matrix begins where the one before it ends.

    Elsewhere strides are heeded, and what is made contiguous MLX does not export.
    """
    return mx.contiguous(array) if has_cuda() else array


def batches_first(inputs: Arrays, axes: Numbers) -> list[mx.array]:
    """`first`, without gaps."""
    return [
        without_gaps(array) if axis > 0 else array
        for array, axis in zip(first(inputs, axes), axes, strict=True)
    ]


def all_batched(arrays: list[mx.array], axes: Numbers) -> list[mx.array]:
    """The parts of quantized matrices, all of them batched as one of them is."""
    like = next(array for array, axis in zip(arrays, axes, strict=True) if axis >= 0)
    return [
        array if axis >= 0 else without_gaps(repeated(array, like))
        for array, axis in zip(arrays, axes, strict=True)
    ]


def plus_starts(index: mx.array, array: mx.array) -> mx.array:
    a, b = alike(index, spread(starts(array), index.ndim))
    return a + b
