"""Calls of MLX's gathering and quantized products, drawn at random, and what they are in floats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

import ferrule.mlx as fm

Shape = tuple[int, ...]

# mode, group size, bits: all that MLX has; and floats, for gather_mm
AFFINE = [("affine", group, bits) for group in (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)]
FLOATING = [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
MODES = AFFINE + FLOATING


@dataclasses.dataclass(frozen=True)
class Product:
    """A function and what it is called with, besides arrays: those are x, matrices, lhs, rhs."""

    mode: str  # or "float"
    group: int = 32
    bits: int = 4
    transpose: bool = True
    gathers: bool = True
    omitted: str = ""  # "lhs", "rhs": given as None

    def call(self, *arrays: mx.array, of: Any = fm, **flags: Any) -> mx.array:
        """The product by ferrule, or ``of=mx`` by MLX; omitted indices are not among the arrays."""
        count = {"float": 1, "affine": 3}.get(self.mode, 2)
        x, matrices, indices = arrays[0], arrays[1 : 1 + count], list(arrays[1 + count :])
        names: dict[str, Any] = {}
        if self.gathers:
            names = {
                name: indices.pop(0)
                for name in ("lhs_indices", "rhs_indices")
                if not name.startswith(self.omitted or "-")
            }
        assert not indices
        if self.mode == "float":
            return of.gather_mm(x, *matrices, **names, **flags)  # type: ignore[no-any-return]
        function = of.gather_qmm if self.gathers else of.quantized_matmul
        return function(  # type: ignore[no-any-return]
            x, *matrices, **names, **flags,
            transpose=self.transpose, group_size=self.group, bits=self.bits, mode=self.mode,
        )  # fmt: skip

    def matrices(self, batch: Shape, rows: int, columns: int, seed: int) -> list[mx.array]:
        """Matrices of (rows, columns), or of their transposes."""
        shape = (*batch, columns, rows) if self.turned else (*batch, rows, columns)
        dense = normal(shape, seed)
        if self.mode == "float":
            return [dense]
        return list(mx.quantize(dense, group_size=self.group, bits=self.bits, mode=self.mode))

    @property
    def turned(self) -> bool:
        return self.transpose and self.mode != "float"

    def dense(self, matrices: Sequence[mx.array]) -> mx.array:
        """The matrices' values, (*batch, rows, columns)."""
        if self.mode == "float":
            return matrices[0]
        values = mx.dequantize(
            *matrices, group_size=self.group, bits=self.bits, mode=self.mode, dtype=mx.float32
        )
        return mx.swapaxes(values, -1, -2) if self.turned else values

    def expected(self, *arrays: mx.array) -> mx.array:
        """The product in floats, by indexing and `mx.matmul`, differentiable in x."""
        count = {"float": 1, "affine": 3}.get(self.mode, 2)
        x, dense, indices = arrays[0], self.dense(arrays[1 : 1 + count]), [*arrays[1 + count :]]
        if not self.gathers:
            return mx.matmul(x, dense)
        lhs = counted(x) if self.omitted == "lhs" else indices.pop(0)
        rhs = counted(dense) if self.omitted == "rhs" else indices.pop(0)
        lhs, rhs = mx.broadcast_arrays(lhs, rhs)
        # MLX before 0.32 gathers wrongly along a dim of size 1 that is transposed
        x, dense = mx.contiguous(x), mx.contiguous(dense)
        left = x.reshape(-1, *x.shape[-2:])[lhs]
        return mx.matmul(left, dense.reshape(-1, *dense.shape[-2:])[rhs])


def counted(array: mx.array) -> mx.array:
    return mx.arange(math.prod(array.shape[:-2])).reshape(array.shape[:-2])


def normal(shape: Shape, seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


@st.composite
def products(draw: st.DrawFn, floats: bool | None = None) -> Product:
    """Any product; those of floats alone, or of quantized matrices alone."""
    if floats is None:
        floats = draw(st.integers(0, 3)) == 0
    mode, group, bits = ("float", 1, 32) if floats else draw(st.sampled_from(MODES))
    gathers = mode == "float" or draw(st.booleans())
    return Product(
        mode, group, bits,
        transpose=mode == "float" or draw(st.booleans()),
        gathers=gathers,
        omitted=draw(st.sampled_from(["", "lhs", "rhs"])) if gathers else "",
    )  # fmt: skip


Ranks = tuple[int, int, int, int]
SMALL = st.integers(1, 3)


@st.composite
def ranks(draw: st.DrawFn, product: Product) -> Ranks:
    """How many dims batches of x and of the matrices have, and each index."""
    rank = st.integers(0, 2)
    x, w, lhs, rhs = draw(rank), draw(rank), draw(rank), draw(rank)
    if not product.gathers:
        return x, draw(st.sampled_from([0, 0, x])), 0, 0
    return x, w, x if product.omitted == "lhs" else lhs, w if product.omitted == "rhs" else rhs


@st.composite
def arrays(draw: st.DrawFn, product: Product, ranks: Ranks, seed: int = 0) -> list[mx.array]:
    """Arrays for a call, of drawn sizes, whose indices broadcast."""
    x_rank, w_rank, lhs_rank, rhs_rank = ranks
    common = draw(st.tuples(SMALL, SMALL))

    def part(rank: int) -> Shape:
        sizes = common[len(common) - rank :]
        ones = draw(st.tuples(*[st.booleans()] * rank))
        return tuple(1 if one else size for one, size in zip(ones, sizes, strict=True))

    unit = {"float": 1}.get(product.mode, max(product.group, 32))
    inner, outer = unit * draw(st.integers(1, 2)), unit * draw(st.integers(1, 2))
    free = st.tuples(SMALL, SMALL)
    given = not product.gathers
    x_batch = part(x_rank) if given or product.omitted == "lhs" else draw(free)[:x_rank]
    w_batch = part(w_rank) if given or product.omitted == "rhs" else draw(free)[:w_rank]
    made = [normal((*x_batch, draw(SMALL), inner), seed)]
    made += product.matrices(w_batch, inner, outer, seed + 1)
    if not product.gathers:
        return made
    for name, rank, batch in (("lhs", lhs_rank, x_batch), ("rhs", rhs_rank, w_batch)):
        if product.omitted != name:
            shape = part(rank)
            values = draw(
                st.lists(
                    st.integers(0, math.prod(batch) - 1),
                    min_size=math.prod(shape), max_size=math.prod(shape),
                )
            )  # fmt: skip
            kind = draw(st.sampled_from([mx.uint32, mx.int32, mx.int64, mx.uint8]))
            made.append(mx.array(np.array(values, np.int64).reshape(shape)).astype(kind))
    return made


def stacked(function: Callable[..., mx.array], axes: Sequence[int | None]) -> Any:
    """What `mx.vmap` with these axes means."""

    def each(*arrays: mx.array) -> mx.array:
        size = next(
            array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
        )
        return mx.stack([
            function(*[
                array if axis is None else mx.take(array, at, axis)
                for array, axis in zip(arrays, axes, strict=True)
            ])
            for at in range(size)
        ])  # fmt: skip

    return each


@st.composite
def batches(draw: st.DrawFn, arrays: Sequence[mx.array]) -> list[int | None]:
    """Along which axis each array is to be batched, one of them at least."""
    found = [draw(st.none() | st.integers(0, array.ndim)) for array in arrays]
    if all(axis is None for axis in found):
        found[draw(st.integers(0, len(arrays) - 1))] = 0
    return found


def batched(
    product: Product, arrays: Sequence[mx.array], axes: Sequence[int | None], size: int
) -> list[mx.array]:
    """Arrays with one more axis of ``size``, along which values differ; indices stay valid."""
    made = []
    for array, axis in zip(arrays, axes, strict=True):
        if axis is None:
            made.append(array)
        elif array.dtype == mx.float32:
            made.append(mx.stack([array * (i + 1) for i in range(size)], axis))
        else:  # quantized elements and indices: turned around, where that keeps what is valid
            turns = [array.reshape(-1)[:: 1 if i % 2 == 0 else -1] for i in range(size)]
            made.append(mx.stack([one.reshape(array.shape) for one in turns], axis))
    return made
