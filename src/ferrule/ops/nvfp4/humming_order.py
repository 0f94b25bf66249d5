"""Weights in the order of humming's kernels, in the place of a checkpoint's bytes, and back.

The package has no way back. It puts each cell, 32 elements of 128 rows, in the same order, beside
others of the same k; which order that is shows when it is given cells of numbers. `ordered` makes
sure that what it gives can be put back, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import ferrule

from . import arguments, humming
from .linear import no_derivative, turned
from .moe import Parts
from .quantizing import GROUP

ROWS, DEPTH = 128, 32  # of a cell; matrices are padded to such
AT_ONCE = 1 << 22  # elements that are put back at a time


class Order(NamedTuple):
    """Where a cell's elements, and its scales, are in it: of each, counted by row and then k.

    Attributes:
        elements: ``[4096]`` of int64.
        scales: ``[256]``, alike.
    """

    elements: Any
    scales: Any

    @classmethod
    def of(cls, function: str, device: Any) -> Order:
        """That of the package's kernels: digits of all places are put in order.

        Raises:
            KernelError: the package is not there, has no kernels for the GPU, or another order.
        """
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
            in_order = _cells(weight, (1, 1)).view(torch.uint8).flatten()
            found = torch.stack([in_order & 15, in_order >> 4], -1).flatten().long()
            elements |= found << 4 * digit
            found = _cells(scale.view(torch.uint8), (1, 1)).flatten().long() & 15
            scales |= found << 4 * digit
        made = cls(elements.argsort(), scales.argsort())
        if not (bool((elements[made[0]] == places).all()) and (scales[made[1]] == of_scales).all()):
            raise _refused(function, ROWS, DEPTH)
        return made


_orders: dict[Any, Order] = {}  # of the package's kernels, by device


def _order(function: str, device: Any) -> Order:
    known = _orders.get(device)
    if known is None:
        others = next(iter(_orders.values()), None)
        known = (
            Order.of(function, device) if others is None else Order(*(o.to(device) for o in others))
        )
        _orders[device] = known
    return known


def _cells(x: Any, cells: tuple[int, int], rows: slice = slice(None)) -> Any:
    """``[rows, depth, *]``: of each cell what it has, in a matrix of so many cells in order: of
    some rows of them."""
    parts = x.unflatten(1, (cells[0], -1)).unflatten(0, (cells[1], -1))[:, :, rows]
    return parts.permute(2, 0, 1, 3).flatten(2)


def _parts(
    function: str, weight: Any, scale: Any, n: int, k: int
) -> Iterator[tuple[slice, Any, Any]]:
    """Rows of a matrix, and what checkpoints have of them; some at a time."""
    cells = -(-n // ROWS), -(-k // DEPTH)
    order = _order(function, weight.device)
    each = max(AT_ONCE // (ROWS * DEPTH * cells[1]), 1)
    for first in range(0, cells[0], each):
        rows, some = slice(first * ROWS, min((first + each) * ROWS, n)), slice(first, first + each)
        in_order = _cells(weight, cells, some).view(torch.uint8)
        codes = torch.stack([in_order & 15, in_order >> 4], -1).flatten(2)[..., order.elements]
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(2, (ROWS, -1))
        scales = _cells(scale.view(torch.uint8), cells, some)[..., order.scales]
        whole = (
            part.transpose(1, 2).flatten(2).flatten(0, 1)[: rows.stop - rows.start]
            for part in (packed, scales.unflatten(2, (ROWS, -1)))
        )
        yield rows, next(whole)[:, : k // 2], next(whole)[:, : k // GROUP]


def put_back(function: str, weight: Any, scale: Any, n: int, k: int) -> tuple[Any, Any]:
    """A matrix, or one for each expert, as checkpoints have it.

    Args:
        function: whose weights they are.
        weight, scale: as `ordered` returns them.
        n, k: the sizes of a matrix.

    Returns:
        ``[(E,) n, k / 2]`` of uint8 and ``[(E,) n, k / 16]`` of float8_e4m3fn, bit by bit what was
        given to `ordered`.
    """
    lead = weight.shape[:-2]
    packed = weight.new_empty(*lead, n, k // 2, dtype=torch.uint8)
    scales = weight.new_empty(*lead, n, k // GROUP, dtype=torch.uint8)
    for own, own_scale, one, its_scale in _each(packed, scales, weight, scale):
        for rows, part, part_of_scale in _parts(function, one, its_scale, n, k):
            own[rows].copy_(part)
            own_scale[rows].copy_(part_of_scale)
    return packed, scales.view(torch.float8_e4m3fn)


def ordered(function: str, packed: Any, scale: Any) -> tuple[Any, Any]:
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
    weight, scales = humming.repacked(function, packed, scale, ones)[:2]
    n, k = packed.shape[-2], 2 * packed.shape[-1]
    bytes_of = scale.view(torch.uint8)
    for own, own_scale, one, its_scale in _each(packed, bytes_of, weight, scales):
        for rows, part, part_of_scale in _parts(function, one, its_scale, n, k):
            if not (torch.equal(own[rows], part) and torch.equal(own_scale[rows], part_of_scale)):
                raise _refused(function, n, k)
    return weight, scales


def _each(*arrays: Any) -> Any:
    """The parts of each expert, or those of one matrix."""
    return zip(*(x if x.ndim == 3 else x[None] for x in arrays), strict=True)


def _refused(function: str, n: int, k: int) -> ferrule.KernelError:
    return ferrule.KernelError(
        f"[{function}] the package's order of a matrix of {n} rows of {k} elements could not be "
        "undone; expected that of humming-kernels 0.1.19. Leave prepare out: its kernels then have "
        "a copy beside the checkpoint's bytes."
    )


# -- ops of weights in order ----------------------------------------------------------------------

_MATRIX = "weight[A,B]:int32, scale[C,D]:float8_e4m3fn, w_scale_2[*E]:float32"
_MATRICES = (
    "w13[E,A,B]:int32, w13_scale[E,C,D]:float8_e4m3fn, w13_scale_2[E,U]:float32, "
    "w2[E,F,G]:int32, w2_scale[E,L,O]:float8_e4m3fn, w2_scale_2[E]:float32"
)
_FLOATS = "T in (float16, bfloat16)"
_ONE_SCALE = f"E_size == 1, {_FLOATS}"
_SLOTS = "weights[M,Q]:V, ids[M,Q]:J"
_OF_SLOTS = "V in (float32, float16, bfloat16, float64), J in (int32, int64)"


@ferrule.family
def linear_op(n: int, k: int, biased: bool, invariant: bool) -> ferrule.Op:
    """``x, weight, scale, w_scale_2, bias? -> y`` of a matrix of such sizes."""
    op = ferrule.adopt(
        "nvfp4_linear_in_order",
        f"x[*S,{k}]:T, {_MATRIX}{f', bias[{n}]:T' * biased} -> y[*S,{n}]:T where {_ONE_SCALE}",
        run=humming.product(invariant),
        state=humming.STATE,
        version=f"1, invariant: {invariant}",
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        if any(wanted[1:4]):
            raise no_derivative("nvfp4_linear")
        gradients: list[Any]
        (c,), gradients = cotangents, [None] * len(primals)
        if wanted[0]:
            gradients[0] = _turned_op(n, k)(c, *primals[1:4])
        if biased and wanted[4]:
            gradients[4] = c.reshape(-1, n).sum(0)
        return gradients

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        if any(tangent is not None for tangent in tangents[1:4]):
            raise no_derivative("nvfp4_linear")
        made = torch.zeros_like(outputs[0])
        if tangents[0] is not None:
            made = linear_op(n, k, False, invariant)(tangents[0], *primals[1:4])
        return (made if len(tangents) < 5 or tangents[4] is None else made + tangents[4],)

    def explain(
        error: Exception, x: Any, weight: Any, scale: Any, w_scale_2: Any, bias: Any = None
    ) -> None:
        w_packed, w_scale = _shown(weight, n, k)
        given = {"x": x, "w_packed": w_packed, "w_scale": w_scale}
        arguments.explain(error, "nvfp4_linear", given | {"w_scale_2": w_scale_2, "bias": bias})

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    op.explain = explain
    return op


@ferrule.family
def _turned_op(n: int, k: int) -> ferrule.Op:
    """``c, weight, scale, w_scale_2 -> c @ w``."""

    def run(c: Any, weight: Any, scale: Any, scale_2: Any) -> Any:
        matrix = put_back("nvfp4_linear", weight, scale, n, k)
        return turned("nvfp4", False, c, *matrix, scale_2)

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        if any(wanted[1:]):
            raise no_derivative("nvfp4_linear")
        return [linear_op(n, k, False, False)(*cotangents, *primals[1:]), None, None, None]

    rule = f"c[*S,{n}]:T, {_MATRIX} -> x[*S,{k}]:T where {_ONE_SCALE}"
    op = ferrule.adopt("nvfp4_linear_in_order_x", rule, run=run, version=1)
    op.def_vjp(vjp, version=1)
    return op


@ferrule.family
def moe_op(hidden: int, width: int, activation: str, invariant: bool) -> ferrule.Op:
    """``x, weights, ids, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 -> y``, of experts
    of such sizes, whose gate and up have one second scale."""
    layer = humming.mixture(activation, False, invariant)

    def run(x: Any, weights: Any, ids: Any, *matrices: Any, second: Any, locks: Any) -> Any:
        w13, w2 = (*matrices[:2], second), matrices[3:]
        return layer(x, weights, ids, None, width, w13, w2, locks)

    op = ferrule.adopt(
        "nvfp4_moe_in_order",
        f"x[M,{hidden}]:T, {_SLOTS}, {_MATRICES} -> y[M,{hidden}]:T where {_FLOATS}, {_OF_SLOTS}",
        run=run,
        prepared={"second": (_one_second, "w13_scale_2")},
        state=humming.STATE,
        version=f"1, {activation}, invariant: {invariant}",
    )

    def explain(
        error: Exception, x: Any, weights: Any, ids: Any, w13: Any, scale13: Any, second13: Any,
        w2: Any, scale2: Any, second2: Any,
    ) -> None:  # fmt: skip
        tokens = {"hidden_states": x, "topk_weights": weights, "topk_ids": ids}
        first, second = _shown(w13, 2 * width, hidden), _shown(w2, hidden, width)
        seconds = {"w13_scale_2": second13, "w2_scale_2": second2, "expert_map": None}
        given = {"w13_packed": first[0], "w13_scale": first[1]} | tokens
        given |= {"w2_packed": second[0], "w2_scale": second[1]} | seconds
        arguments.explain(error, "nvfp4_moe", given)

    op.explain = explain

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        if any(wanted[2:]):
            raise Parts("nvfp4", activation, False).no_derivative
        found = _moe_vjp_op(hidden, width, activation)(*cotangents, *primals)
        return [*found, *[None] * (len(primals) - 2)]

    op.def_vjp(vjp, version=1)
    return op


@ferrule.family
def _moe_vjp_op(hidden: int, width: int, activation: str) -> ferrule.Op:
    """The derivatives with respect to hidden states and weights."""

    def run(c: Any, x: Any, weights: Any, ids: Any, *matrices: Any) -> Any:
        w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 = matrices
        both = put_back("nvfp4_moe", w13, w13_scale, 2 * width, hidden)
        first = *(part.unflatten(1, (2, width)) for part in both), w13_scale_2
        second = *put_back("nvfp4_moe", w2, w2_scale, hidden, width), w2_scale_2
        primals = x, weights, ids, *first, *second
        wanted = [True, True, *[False] * 7]
        return tuple(Parts("nvfp4", activation, False).vjp(primals, (c,), (), wanted)[:2])

    rule = (
        f"c[M,{hidden}]:T, x[M,{hidden}]:T, {_SLOTS}, {_MATRICES} -> "
        f"of_x[M,{hidden}]:T, of_weights[M,Q]:V where {_FLOATS}, {_OF_SLOTS}"
    )
    return ferrule.adopt("nvfp4_moe_in_order_vjp", rule, run=run, version=f"1, {activation}")


def _one_second(w13_scale_2: Any) -> Any:
    """One second scale of gate and up, for each expert."""
    humming.one_scale(w13_scale_2)
    return w13_scale_2[:, 0].contiguous()


def _shown(weight: Any, n: int, k: int) -> tuple[Any, Any]:
    """Tensors as a checkpoint's are, without their bytes."""
    byte = weight.new_empty((), dtype=torch.uint8)
    sizes = [(*weight.shape[:-2], n, k // of) for of in (2, GROUP)]
    return byte.expand(sizes[0]), byte.view(torch.float8_e4m3fn).expand(sizes[1])
