"""MLX's names for `ferrule.ops`' products that gather or dequantize matrices.

In files, with an MLX for CUDA, and where there is no compiler to build nodes with, they are MLX's
own (`products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...errors import ToolchainError
from ...tools.toolchain import find_compiler
from .. import protocol
from . import build as mlx_build
from . import node as mlx_node
from . import products
from .build import shapeless
from .matrices import has_cuda, stream_context


def quantized_matmul(
    x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
    transpose: bool = True, group_size: int | None = None, bits: int | None = None,
    mode: str = "affine", *, stream: Any = None,
) -> mx.array:  # fmt: skip
    """`ferrule.ops.quantized_matmul`, with the arguments of `mx.quantized_matmul`.

    It is right when compiled (shapeless, too), exported, batched by `mx.vmap` over any of the
    arrays, and differentiated, and in all nestings of these. Files of `mx.export_function` hold
    MLX's own records, which stock MLX runs; in those for every shape, gradients have no
    derivatives, and scales and biases no gradients.

    Args:
        x, w, scales, biases, transpose, group_size, bits, mode: as there.
        stream: where it runs; by default MLX's default stream.

    Returns:
        What it gives: an array of the shape (..., M, N).

    Raises:
        KernelError, KernelTypeError: as there; MLX's ValueError in functions that are exported, and
            where there is no compiler to build MLX nodes with. Without one there are no
            transformations, and files for every shape need MLX 0.32.3.
    """
    if not _by_ferrule():
        return products.quantized_matmul(
            x, w, scales, biases, transpose, group_size, bits, mode, stream=stream
        )
    with stream_context(stream):
        result: mx.array = _ops().quantized_matmul(
            x, w, scales, biases, transpose, group_size, bits, mode
        )
    return result


def gather_qmm(
    x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
    lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None,
    transpose: bool = True, group_size: int | None = None, bits: int | None = None,
    mode: str = "affine", global_scale: mx.array | None = None, *, sorted_indices: bool = False,
    stream: Any = None,
) -> mx.array:  # fmt: skip
    """`ferrule.ops.gather_qmm`, with the arguments of `mx.gather_qmm`.

    It is right wherever `quantized_matmul` is: with either index omitted in a shapeless function,
    for instance, where MLX keeps the indices of its trace.

    Args:
        x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode,
            global_scale, sorted_indices: as there. In files, and without a compiler, indices are
            not checked, and global_scale is of the shape W.
        stream: where it runs; by default MLX's default stream.

    Returns:
        What it gives: an array of the shape (*I, M, N), where I is the shape of the indices.

    Raises:
        ValueError, KernelError, KernelTypeError: as `quantized_matmul` says.
    """
    indices = lhs_indices, rhs_indices
    if not _by_ferrule():
        return products.gather_qmm(
            x, w, scales, biases, *indices, transpose, group_size, bits, mode, global_scale,
            sorted_indices=sorted_indices, stream=stream,
        )  # fmt: skip
    with stream_context(stream):
        result: mx.array = _ops().gather_qmm(
            x, w, scales, biases, *indices, transpose, group_size, bits, mode, global_scale,
            sorted_indices=sorted_indices,
        )  # fmt: skip
    return result


def gather_mm(
    a: mx.array,
    b: mx.array,
    /,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    stream: Any = None,
) -> mx.array:
    """`ferrule.ops.gather_mm`, with the arguments of `mx.gather_mm`.

    It is right wherever `quantized_matmul` is, and differentiable with respect to both.

    Args:
        a, b, lhs_indices, rhs_indices, sorted_indices: as there. In files, and without a compiler,
            indices are not checked.
        stream: where it runs; by default MLX's default stream.

    Returns:
        What it gives: an array of the shape (*I, M, N), where I is the shape of the indices.

    Raises:
        ValueError, KernelError, KernelTypeError: as `quantized_matmul` says.
    """
    if not _by_ferrule():
        return products.gather_mm(
            a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, stream=stream
        )
    with stream_context(stream):
        result: mx.array = _ops().gather_mm(
            a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices
        )
    return result


@functools.cache
def _ops() -> ModuleType:
    """`ferrule.ops`, whose room is above this one."""
    return protocol.ops[0]()


def _by_ferrule() -> bool:
    """Whether `ferrule.ops` multiplies: where it has nodes and a compiler, on a CPU, and no file is
    written.

    On a CPU it is faster in all formats, and adds half floats up in float32, as MLX does not. An
    MLX for CUDA has its own kernels, with which ferrule's were not compared yet; files have MLX's
    own records, which MLX runs without ferrule.
    """
    nodes = mlx_build.library() is not None and not has_cuda() and not mlx_node.exporting()
    return nodes and _compiles()


@functools.cache
def _compiles() -> bool:
    """Whether there is a C++ compiler; a wheel may have brought nodes to where there is none."""
    try:
        find_compiler()
    except ToolchainError:
        return False
    return True


# -- in place of MLX's own ------------------------------------------------------------------------


def _instead(
    ours: Callable[..., Any], wrong: Callable[[mx.array, mx.array], bool], old: Callable[..., Any]
) -> Callable[..., Any]:
    """One of MLX's products, by ferrule for arrays with which MLX is ``wrong`` in some use."""

    @functools.wraps(old)
    def call(*args: Any, **kwargs: Any) -> Any:
        arrays = len(args) > 1 and all(isinstance(value, mx.array) for value in args[:2])
        by_us = arrays and mlx_build.library() is not None and wrong(args[0], args[1])
        return (ours if by_us else old)(*args, **kwargs)

    return call


def _wrong_quantized(x: mx.array, w: mx.array) -> bool:
    """Whether MLX is wrong: of a single matrix it is right, and sooner made, but for short rows.

    Also wrong: half floats on a CPU, whose sums its kernel rounds to their dtype at every term.
    """
    if w.ndim > 2 or not x.ndim or x.shape[-1] <= 128 or shapeless():
        return True
    return x.dtype in (mx.float16, mx.bfloat16) and _by_ferrule()


# By the names of MLX's products: what makes the functions that `install_mlx` has in their place.
REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "gather_mm": functools.partial(_instead, gather_mm, lambda a, b: True),
    "gather_qmm": functools.partial(_instead, gather_qmm, lambda x, w: True),
    "quantized_matmul": functools.partial(_instead, quantized_matmul, _wrong_quantized),
}
