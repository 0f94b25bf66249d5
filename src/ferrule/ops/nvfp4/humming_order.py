"""Weights in the order of humming's kernels, in the place of a checkpoint's bytes, and back.

The package has no way back. It puts each cell, 32 elements of 128 rows, in the same order, beside
others of the same k; which order that is shows when it is given cells of numbers. `ordered` makes
sure that what it gives can be put back, bit by bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ferrule

from . import humming
from .linear import turned
from .moe import Parts
from .quantizing import GROUP

ROWS, DEPTH = 128, 32  # of a cell; matrices are padded to such
AT_ONCE = 1 << 22  # elements that are put back at a time


class Order(NamedTuple):
    """Where a cell's elements, and its scales, are in it: of each, counted by row and then k.

    Attributes:
        elements: ``[4096]`` of int64, on the CPU.
        scales: ``[256]``, alike.
    """

    elements: Any
    scales: Any

    @classmethod
    def of(cls, function: str, device: Any) -> Order:
        """That of the package's kernels on a GPU: digits of all places are put in order."""
        places = torch.arange(ROWS * DEPTH, device=device)
        of_scales = places[: ROWS * DEPTH // GROUP]
        elements, scales = torch.zeros_like(places), torch.zeros_like(of_scales)
        for digit in range(3):
            codes = (places >> 4 * digit & 15).view(ROWS, DEPTH).to(torch.uint8)
            bytes_of = of_scales >> 4 * digit & 15 | 0x30  # usual numbers
            weight, scale = humming.repacked(
                function,
                codes[:, ::2] | codes[:, 1::2] << 4,
                bytes_of.view(ROWS, -1).to(torch.uint8).view(torch.float8_e4m3fn),
                torch.ones(1, device=device),
            )[:2]
            in_order = _cells(weight, 1, 1)[0, 0].view(torch.uint8)
            found = torch.stack([in_order & 15, in_order >> 4], -1).flatten().long()
            elements |= found << 4 * digit
            found = _cells(scale.view(torch.uint8), 1, 1).flatten().long() & 15
            scales |= found << 4 * digit
        return cls(elements.argsort().cpu(), scales.argsort().cpu())


def _cells(x: Any, rows: int, depth: int) -> Any:
    """``[rows, depth, *]``: of each cell what it has, in a matrix of so many cells in order."""
    parts = x.unflatten(1, (rows, -1)).unflatten(0, (depth, -1))
    return parts.permute(2, 0, 1, 3).flatten(2)


def put_back(weight: Any, scale: Any, n: int, k: int, order: Order) -> tuple[Any, Any]:
    """A matrix as checkpoints have it.

    Args:
        weight, scale: as `ordered` returns them, of one matrix.
        n, k: its sizes.

    Returns:
        ``[n, k / 2]`` of uint8 and ``[n, k / 16]`` of float8_e4m3fn, bit by bit what was given.
    """
    rows, depth = -(-n // ROWS), -(-k // DEPTH)
    elements, scales = (part.to(weight.device) for part in order)
    cells = _cells(weight, rows, depth).view(torch.uint8)
    packed = weight.new_empty(n, k // 2, dtype=torch.uint8)
    each = max(AT_ONCE // (ROWS * DEPTH * depth), 1)
    for first in range(0, rows, each):
        in_order = cells[first : first + each]
        codes = torch.stack([in_order & 15, in_order >> 4], -1).flatten(2)[..., elements]
        pairs = (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(2, (ROWS, -1))
        part = packed[first * ROWS : (first + each) * ROWS]
        part.copy_(pairs.transpose(1, 2).flatten(2).flatten(0, 1)[: len(part), : k // 2])
    of_scales = _cells(scale.view(torch.uint8), rows, depth)[..., scales].unflatten(2, (ROWS, -1))
    whole = of_scales.transpose(1, 2).flatten(2).flatten(0, 1)[:n, : k // GROUP]
    return packed, whole.contiguous().view(torch.float8_e4m3fn)


def put_back_all(weight: Any, scale: Any, n: int, k: int, order: Order) -> tuple[Any, Any]:
    """`put_back` of a matrix, or of one for each expert."""
    if weight.ndim == 2:
        return put_back(weight, scale, n, k, order)
    parts = [put_back(*one, n, k, order) for one in zip(weight, scale, strict=True)]
    bytes_of = [(packed, scales.view(torch.uint8)) for packed, scales in parts]
    packed, scales = (torch.stack(of) for of in zip(*bytes_of, strict=True))
    return packed, scales.view(torch.float8_e4m3fn)


def ordered(function: str, packed: Any, scale: Any, order: Order) -> tuple[Any, Any]:
    """A matrix, or one for each expert, as the kernels read it.

    Args:
        function: whose weights they are.
        packed: ``[(E,) N, K / 2]`` of uint8.
        scale: ``[(E,) N, K / 16]`` of float8_e4m3fn.

    Returns:
        The elements, of int32, and the scales, of float8_e4m3fn: as many bytes, of N as a multiple
        of 128 and K as one of 32.

    Raises:
        KernelError: it could not be put back.
    """
    ones = torch.ones(packed.shape[0] if packed.ndim == 3 else 1, device=packed.device)
    made = humming.repacked(function, packed, scale, ones)[:2]
    n, k = packed.shape[-2], 2 * packed.shape[-1]
    every = (x if x.ndim == 3 else x[None] for x in (*made, packed, scale.view(torch.uint8)))
    for weight, scales, *given in zip(*every, strict=True):
        back, scales_back = put_back(weight, scales, n, k, order)
        found = back, scales_back.view(torch.uint8)
        if not all(map(torch.equal, found, given)):
            raise ferrule.KernelError(
                f"[{function}] the package's order of a matrix of {n} rows of {k} elements could "
                "not be undone; expected that of humming-kernels 0.1.19. Leave prepare out: its "
                "kernels then have a copy beside the checkpoint's bytes."
            )
    return made


# -- ops of weights in order ----------------------------------------------------------------------

_MATRIX = "weight[A,B]:int32, scale[C,D]:float8_e4m3fn, w_scale_2[*E]:float32"
_MATRICES = (
    "w13[E,A,B]:int32, w13_scale[E,C,D]:float8_e4m3fn, w13_scale_2[E]:float32, "
    "w2[E,F,G]:int32, w2_scale[E,L,O]:float8_e4m3fn, w2_scale_2[E]:float32"
)
_FLOATS = "T in (float16, bfloat16)"
_SLOTS = "weights[M,Q]:V, ids[M,Q]:J"
_OF_SLOTS = "V in (float32, float16, bfloat16, float64), J in (int32, int64)"

known: list[Order] = []  # of the package's kernels, once they were asked


def order(function: str, device: Any) -> Order:
    """That of the package's kernels.

    Raises:
        KernelError: the package is not there, or has no kernels for the GPU.
    """
    if not known:
        known.append(Order.of(function, device))
    return known[0]


@ferrule.family
def linear_op(n: int, k: int, biased: bool, invariant: bool) -> ferrule.Op:
    """``x, weight, scale, w_scale_2, bias? -> y`` of a matrix of such sizes."""
    op = ferrule.adopt(
        "nvfp4_linear_in_order",
        f"x[*S,{k}]:T, {_MATRIX}{f', bias[{n}]:T' * biased} -> y[*S,{n}]:T where {_FLOATS}",
        run=humming.product(invariant),
        state=humming.STATE,
        version=f"1, invariant: {invariant}",
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        if any(wanted[1:4]):
            raise _no_derivative("nvfp4_linear", "x and bias")
        (c,), gradients = cotangents, [None] * len(primals)
        if wanted[0]:
            gradients[0] = _turned_op(n, k)(c, *primals[1:4])
        if biased and wanted[4]:
            gradients[4] = c.reshape(-1, n).sum(0)
        return gradients

    op.def_vjp(vjp, version=1)
    return op


@ferrule.family
def _turned_op(n: int, k: int) -> ferrule.Op:
    """``c, weight, scale, w_scale_2 -> c @ w``."""

    def run(c: Any, weight: Any, scale: Any, scale_2: Any) -> Any:
        matrix = put_back(weight, scale, n, k, order("nvfp4_linear", c.device))
        return turned("nvfp4", False, c, *matrix, scale_2)

    rule = f"c[*S,{n}]:T, {_MATRIX} -> x[*S,{k}]:T where {_FLOATS}"
    return ferrule.adopt("nvfp4_linear_in_order_x", rule, run=run, version=1)


@ferrule.family
def moe_op(hidden: int, width: int, activation: str, invariant: bool) -> ferrule.Op:
    """``x, weights, ids, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 -> y``, of experts
    of such sizes, whose gate and up have one second scale."""
    layer = humming.mixture(activation, False, invariant)

    def run(x: Any, weights: Any, ids: Any, *matrices: Any, locks: Any) -> Any:
        w13, w2 = matrices[:3], matrices[3:]
        return layer(x, weights, ids, None, width, w13, w2, locks)

    op = ferrule.adopt(
        "nvfp4_moe_in_order",
        f"x[M,{hidden}]:T, {_SLOTS}, {_MATRICES} -> y[M,{hidden}]:T where {_FLOATS}, {_OF_SLOTS}",
        run=run,
        state=humming.STATE,
        version=f"1, {activation}, invariant: {invariant}",
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        if any(wanted[2:]):
            raise _no_derivative("nvfp4_moe", "hidden_states and topk_weights")
        found = _moe_vjp_op(hidden, width, activation)(*cotangents, *primals)
        return [*found, *[None] * (len(primals) - 2)]

    op.def_vjp(vjp, version=1)
    return op


@ferrule.family
def _moe_vjp_op(hidden: int, width: int, activation: str) -> ferrule.Op:
    """The derivatives with respect to hidden states and weights."""

    def run(c: Any, x: Any, weights: Any, ids: Any, *matrices: Any) -> Any:
        of = order("nvfp4_moe", c.device)
        w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 = matrices
        both = put_back_all(w13, w13_scale, 2 * width, hidden, of)
        first = *(part.unflatten(1, (2, width)) for part in both), w13_scale_2[:, None]
        second = *put_back_all(w2, w2_scale, hidden, width, of), w2_scale_2
        primals = x, weights, ids, *first, *second
        wanted = [True, True, *[False] * 7]
        return tuple(Parts("nvfp4", activation, False).vjp(primals, (c,), (), wanted)[:2])

    rule = (
        f"c[M,{hidden}]:T, x[M,{hidden}]:T, {_SLOTS}, {_MATRICES} -> "
        f"of_x[M,{hidden}]:T, of_weights[M,Q]:V where {_FLOATS}, {_OF_SLOTS}"
    )
    return ferrule.adopt("nvfp4_moe_in_order_vjp", rule, run=run, version=f"1, {activation}")


def _no_derivative(function: str, others: str) -> ferrule.KernelError:
    return ferrule.KernelError(
        f"[{function}] there is no derivative with respect to matrices and their scales. "
        f"Differentiate with respect to {others}."
    )
