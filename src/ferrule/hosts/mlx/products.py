"""MLX's own products that gather or dequantize matrices, right under every transformation.

MLX's kernels run them. What MLX has no rule for (batches, tangents), or one that keeps the
sizes of the trace (omitted indices, gradients of gathered rows), stands here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...errors import KernelError
from . import node as mlx_node
from .build import shapeless
from .matrices import all_batched, batches_first, has_nodes, one_group, plus_starts, stream_context
from .sizes import (
    GATHERS,
    Arrays,
    Numbers,
    added_at,
    alike,
    positions,
    spread,
    too_old,
    zeros,
)

# As MLX has them, whoever puts ferrule's in their place.
_quantized_matmul, _gather_qmm, _gather_mm = mx.quantized_matmul, mx.gather_qmm, mx.gather_mm

NVFP4_UNIT = 448.0 * 6.0  # the largest scale by the largest element: what a global scale is over


def quantized_matmul(
    x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
    transpose: bool = True, group_size: int | None = None, bits: int | None = None,
    mode: str = "affine", *, stream: Any = None,
) -> mx.array:  # fmt: skip
    """`mx.quantized_matmul`."""
    kind = transpose, group_size, bits, mode
    broadcast = w.ndim > 2 and (x.ndim < w.ndim or shapeless())
    if broadcast or (mode == "affine" and transpose and one_group(x, w, group_size, stream)):
        # MLX multiplies a lower x with the first matrix alone, and its gradients of what was
        # broadcast have the sizes of the trace
        with stream_context(stream):
            rows = x if x.ndim > 1 else x[None]
            which = positions(w) if w.ndim > 2 else zeros(positions(rows))
            each = positions(rows)
            result = gather_qmm(rows, w, scales, biases, each, which, *kind, stream=stream)
            return result if x.ndim > 1 else mx.squeeze(result, -2)
    if x.ndim == 1:  # MLX's CUDA kernels want rows
        with stream_context(stream):
            result = quantized_matmul(x[None], w, scales, biases, *kind, stream=stream)
            return mx.squeeze(result, -2)
    stock = _quantized_matmul(x, w, scales, biases, *kind, stream=stream)
    if not has_nodes(x, w, scales, biases):
        return stock
    return mlx_node.ruled(stock, stock, _quantized(*kind))


def gather_qmm(
    x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
    lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None,
    transpose: bool = True, group_size: int | None = None, bits: int | None = None,
    mode: str = "affine", global_scale: mx.array | None = None, *, sorted_indices: bool = False,
    stream: Any = None,
) -> mx.array:  # fmt: skip
    """`mx.gather_qmm`, with a global scale on CPUs, too."""
    kind = transpose, group_size, bits, mode

    def call(lhs: mx.array | None, rhs: mx.array | None, ascending: bool) -> mx.array:
        return _gather_qmm(
            x, w, scales, biases, lhs, rhs, *kind, sorted_indices=ascending, stream=stream
        )

    if lhs_indices is None and rhs_indices is None:
        result = quantized_matmul(x, w, scales, biases, *kind, stream=stream)
    else:
        rules = functools.partial(_gathered_quantized, *kind)
        result = _gathered(call, x, w, lhs_indices, rhs_indices, sorted_indices, stream, rules)
    if global_scale is None:
        return result
    with stream_context(stream):
        return _scaled(result, w, global_scale, lhs_indices, rhs_indices, mode)


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
    """`mx.gather_mm`."""
    if lhs_indices is None and rhs_indices is None:
        return mx.matmul(a, b, stream=stream)
    single = a.ndim == 1, b.ndim == 1
    # One more dim in front: without it MLX's CUDA kernel (0.32.4) takes strides of a batch for
    # those of matrices one behind the other, and raises for a single one that is turned.
    a = mx.expand_dims(a, (0, 1) if single[0] else 0, stream=stream)
    b = mx.expand_dims(b, 1, stream=stream) if single[1] else b
    if b.ndim == 2 and rhs_indices is not None:
        b = mx.expand_dims(b, 0, stream=stream)

    def call(lhs: mx.array | None, rhs: mx.array | None, ascending: bool) -> mx.array:
        return _gather_mm(a, b, lhs, rhs, sorted_indices=ascending, stream=stream)

    result = _gathered(
        call, a, b, lhs_indices, rhs_indices, sorted_indices, stream, _gathered_floats
    )
    axes = [axis for axis, added in zip((-2, -1), single, strict=True) if added]
    if lhs_indices is None and rhs_indices is not None and a.ndim - 2 > rhs_indices.ndim:
        axes.append(0)
    return mx.squeeze(result, axes, stream=stream) if axes else result


def _gathered(
    call: Callable[[mx.array | None, mx.array | None, bool], mx.array],
    x: mx.array,
    w: mx.array,
    lhs: mx.array | None,
    rhs: mx.array | None,
    ascending: bool,
    stream: Any,
    rules: Callable[[str, bool], Any],
) -> mx.array:
    omitted = "lhs" if lhs is None else "rhs" if rhs is None else ""
    rhs_ascends = ascending and omitted == "lhs"
    if not has_nodes(x, w, lhs, rhs):
        return call(lhs, rhs, rhs_ascends)  # MLX's gradients are wrong where the left one ascends
    if not GATHERS and shapeless():
        raise too_old("products that gather")
    inputs_of = stock = call(lhs, rhs, ascending)
    if shapeless():
        with stream_context(stream):
            lhs, rhs = alike(
                positions(x) if lhs is None else lhs, positions(w) if rhs is None else rhs
            )
        inputs_of = call(lhs, rhs, False)
        stock = stock if ascending else inputs_of
    return mlx_node.ruled(stock, inputs_of, rules(omitted, rhs_ascends))


def _scaled(
    products: mx.array,
    w: mx.array,
    scale: mx.array,
    lhs: mx.array | None,
    rhs: mx.array | None,
    mode: str,
) -> mx.array:
    if mode != "nvfp4":
        raise ValueError(
            f"[gather_qmm] global_scale was given, which mode {mode!r} does not have; "
            'mode "nvfp4" has.'
        )
    if scale.shape != w.shape[:-2]:
        raise ValueError(
            f"[gather_qmm] global_scale has the shape {scale.shape}, expected one for each matrix "
            f"of w: {w.shape[:-2]}."
        )
    scale = scale.astype(mx.float32) / NVFP4_UNIT
    if rhs is not None or lhs is not None:
        # A matrix for each pair of indices: which of w's stands where lhs broadcasts, too.
        rhs = positions(w) if rhs is None else rhs
        rhs = rhs if lhs is None else alike(rhs.astype(mx.uint32), lhs.astype(mx.uint32))[0]
        scale = mx.take(mx.flatten(scale) if scale.ndim else scale[None], rhs)
    scale = scale[..., None][..., None]
    values = products.astype(mx.float32)
    if scale.ndim == values.ndim:
        scale = alike(scale, values)[0]
    return (values * scale).astype(products.dtype)


# -- rules --------------------------------------------------------------------------------------


def _gradient_of_part(
    call: Callable[..., mx.array], parts: Arrays, cotangent: mx.array, name: str, index: int
) -> mx.array:
    """The gradient with respect to scales (0) or biases (1), by MLX, which keeps sizes.

    Raises:
        KernelError: there is none, or this is a shapeless trace.
    """
    if len(parts) < 2 or index not in (0, 1):
        raise KernelError(
            f"[{name}] has no gradient with respect to packed weights, indices, or the scales of "
            "floating-point modes. Use mx.stop_gradient, or differentiate with respect to x."
        )
    if shapeless():
        raise KernelError(
            f"[{name}] has no gradient with respect to scales and biases inside "
            "mx.compile(shapeless=True), where MLX keeps the sizes of the first call. Compile "
            "without shapeless=True."
        )
    return mx.vjp(call, list(parts), [cotangent])[1][index]


def _check_tangents(name: str, tangents: Arrays, argnums: Numbers, most: int) -> None:
    if any(k > most for k in argnums):
        raise KernelError(
            f"[{name}] has no forward-mode derivative with respect to quantized weights or indices."
        )


@functools.cache
def _quantized(transpose: bool, group_size: int | None, bits: int | None, mode: str) -> Any:
    kind: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    product: Callable[..., mx.array] = functools.partial(quantized_matmul, **kind)
    gather: Callable[..., mx.array] = functools.partial(gather_qmm, **kind)

    def vjp(primals: Arrays, cotangent: mx.array, argnums: Numbers) -> list[mx.array]:
        x, w, *parts = primals
        of_parts = functools.partial(_quantized_matmul, x, w, transpose=transpose, **kind)
        return [
            product(cotangent, w, *parts, transpose=not transpose)
            if k == 0
            else _gradient_of_part(of_parts, parts, cotangent, "quantized_matmul", k - 2)
            for k in argnums
        ]

    def jvp(primals: Arrays, tangents: Arrays, argnums: Numbers) -> list[mx.array]:
        _check_tangents("quantized_matmul", tangents, argnums, 0)
        return [product(tangents[0], *primals[1:], transpose=transpose)]

    def vmap(inputs: Arrays, axes: Numbers) -> list[mx.array]:
        rank = inputs[0].ndim - (axes[0] >= 0), inputs[1].ndim - (axes[1] >= 0)
        x, *matrix = batches_first(inputs, axes)
        if max(axes[1:]) < 0:  # one matrix for all of the batch
            matrix = list(inputs[1:])
            return [product(x, *matrix, transpose=transpose)]
        matrix = all_batched(matrix, axes[1:])
        if rank[1] > 2:
            return [product(x, *matrix, transpose=transpose)]
        x = x[:, None] if rank[0] == 1 else x
        which = spread(positions(matrix[0]), x.ndim - 2)
        result = gather(x, *matrix, rhs_indices=which, transpose=transpose)
        return [mx.squeeze(result, -2) if rank[0] == 1 else result]

    return mlx_node.answering({"vjp": vjp, "jvp": jvp, "vmap": vmap}, "quantized_matmul")


def _rules_of_gather(
    product: Callable[..., mx.array], vjp: Callable[..., list[mx.array]], most: int, name: str
) -> Any:
    """Rules of a product of (x, matrices, lhs, rhs), with tangents of the first ``most`` + 1."""

    def jvp(primals: Arrays, tangents: Arrays, argnums: Numbers) -> list[mx.array]:
        _check_tangents(name, tangents, argnums, most)
        terms = [
            product(*[tangent if i == k else primal for i, primal in enumerate(primals)])
            for k, tangent in zip(argnums, tangents, strict=True)
        ]
        return [functools.reduce(mx.add, terms)]

    def vmap(inputs: Arrays, axes: Numbers) -> list[mx.array]:
        x, *matrices, lhs, rhs = batches_first(inputs, axes)
        if axes[0] >= 0:
            lhs = plus_starts(lhs, x)
        if max(axes[1:-2]) >= 0:
            matrices = all_batched(matrices, axes[1:-2])
            rhs = plus_starts(rhs, matrices[0])
        return [product(x, *matrices, lhs, rhs)]

    return mlx_node.answering({"vjp": vjp, "jvp": jvp, "vmap": vmap}, name)


@functools.cache
def _gathered_quantized(
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    omitted: str,
    ascending: bool,
) -> Any:
    kind: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}

    def gather(
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        *biases_and_indices: mx.array | None,
        transpose: bool = transpose,
        sorted_indices: bool = False,
    ) -> mx.array:
        *biases, lhs, rhs = biases_and_indices
        matrix = w, scales, biases[0] if biases else None
        return gather_qmm(x, *matrix, lhs, rhs, transpose, sorted_indices=sorted_indices, **kind)

    def vjp(primals: Arrays, cotangent: mx.array, argnums: Numbers) -> list[mx.array]:
        x, w, *parts, lhs, rhs = primals

        def of_parts(scales: mx.array, biases: mx.array) -> mx.array:
            return _gather_qmm(x, w, scales, biases, lhs, rhs, transpose, **kind)

        gradients = []
        for k in argnums:
            if k == 0:
                back: dict[str, Any] = {"transpose": not transpose, "sorted_indices": ascending}
                rows = gather(cotangent, w, *parts, None, rhs, **back)
                gradients.append(added_at(rows, lhs, x, omitted == "lhs"))
            else:
                gradients.append(_gradient_of_part(of_parts, parts, cotangent, "gather_qmm", k - 2))
        return gradients

    return _rules_of_gather(gather, vjp, 0, "gather_qmm")


@functools.cache
def _gathered_floats(omitted: str, ascending: bool) -> Any:
    def vjp(primals: Arrays, cotangent: mx.array, argnums: Numbers) -> list[mx.array]:
        a, b, lhs, rhs = primals
        gradients = []
        for k in argnums:
            if k == 0:
                rows = gather_mm(
                    cotangent, mx.swapaxes(b, -1, -2), None, rhs, sorted_indices=ascending
                )
                gradients.append(added_at(rows, lhs, a, omitted == "lhs"))
            elif k == 1:
                gradients.append(of_b(a, b, lhs, rhs, cotangent))
            else:
                raise KernelError(
                    "[gather_mm] has no gradient with respect to indices. Use mx.stop_gradient."
                )
        return gradients

    def of_b(
        a: mx.array, b: mx.array, lhs: mx.array, rhs: mx.array, cotangent: mx.array
    ) -> mx.array:
        if ascending and not shapeless() and a.shape[:-2] == rhs.shape:
            # MLX has a product by segments of one dim, which needs no matrix for each index
            rows, which = mx.flatten(a, 0, -3), mx.flatten(rhs)

            def call(b: mx.array) -> mx.array:
                return _gather_mm(rows, b, None, which, sorted_indices=True)

            return mx.vjp(call, [b], [mx.flatten(cotangent, 0, -3)])[1][0]
        each = gather_mm(mx.swapaxes(a, -1, -2), cotangent[None], lhs, None)
        return added_at(mx.squeeze(each, 0), rhs, b, omitted == "rhs")

    return _rules_of_gather(gather_mm, vjp, 1, "gather_mm")
