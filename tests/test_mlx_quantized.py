"""ferrule.mlx: MLX's gathering and quantized products, under every transformation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx_products as make
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_products import MODES, Product

import ferrule.mlx as fm

DATA = st.data()
FEW, SOME = settings(deadline=None, max_examples=15), settings(deadline=None, max_examples=60)


def close(a: mx.array, b: mx.array, tolerance: float = 2e-4) -> None:
    assert a.shape == b.shape
    scale = max(1.0, mx.abs(b).max().item()) if b.size else 1.0
    assert mx.allclose(a, b, rtol=0, atol=tolerance * scale)


class Traced:
    """A function in a shapeless compilation, which counts how often it was traced."""

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self.traces = 0

        def counting(*arrays: mx.array) -> mx.array:
            self.traces += 1
            return function(*arrays)

        self.compiled = mx.compile(counting, shapeless=True)

    def __call__(self, *arrays: mx.array) -> mx.array:
        made: mx.array = self.compiled(*arrays)
        assert self.traces == 1
        return made


def drawn(data: st.DataObject, floats: bool | None = None) -> tuple[Product, list[list[mx.array]]]:
    """A product, and arrays for several calls of it whose sizes differ."""
    product = data.draw(make.products(floats))
    ranks = data.draw(make.ranks(product))
    calls = [data.draw(make.arrays(product, ranks, seed)) for seed in (0, 10, 20)]
    kinds = [array.dtype for array in calls[0]]
    for call in calls:  # another dtype is another trace
        call[:] = [array.astype(kind) for array, kind in zip(call, kinds, strict=True)]
    return product, calls


@SOME
@given(DATA)
def test_forward_is_mlx(data: st.DataObject) -> None:
    product, calls = drawn(data)
    compiled, shapeless = mx.compile(product.call), Traced(product.call)
    for arrays in calls:
        found = product.call(*arrays)
        close(found, product.expected(*arrays))
        assert mx.array_equal(found, product.call(*arrays, of=mx))
        assert mx.array_equal(compiled(*arrays), found)
        assert mx.array_equal(shapeless(*arrays), found)


@pytest.mark.parametrize("kind", MODES, ids=str)
def test_all_modes(kind: tuple[str, int, int]) -> None:
    for transpose in (True, False):
        product = Product(*kind, transpose=transpose, omitted="lhs")
        shapeless = Traced(product.call)
        gradient = Traced(mx.grad(lambda *arrays: (product.call(*arrays) ** 2).sum()))  # noqa: B023
        for experts, count in ((2, 3), (5, 1), (1, 4)):
            x = make.normal((count, 1, 128), 1)
            arrays = [x, *product.matrices((experts,), 128, 128, 2), mx.arange(count) % experts]
            close(shapeless(*arrays), product.expected(*arrays))
            close(gradient(*arrays), mx.grad(squares(product.expected))(*arrays))


def squares(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    return lambda *arrays: (function(*arrays) ** 2).sum()


@SOME
@given(DATA)
def test_gradient(data: st.DataObject) -> None:
    product, calls = drawn(data)
    gradient = mx.grad(squares(product.call))
    shapeless = Traced(gradient)
    for arrays in calls:
        expected = mx.grad(squares(product.expected))(*arrays)
        close(gradient(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_gradients_of_gather_mm(data: st.DataObject) -> None:
    product, calls = drawn(data, floats=True)
    both = mx.grad(squares(product.call), argnums=(0, 1))
    compiled, shapeless = mx.compile(both), mx.compile(both, shapeless=True)
    for arrays in calls:
        expected = mx.grad(squares(product.expected), argnums=(0, 1))(*arrays)
        for function in (both, compiled, shapeless):
            for found, one in zip(function(*arrays), expected, strict=True):
                close(found, one)


@SOME
@given(DATA)
def test_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches(calls[0]))
    function = mx.vmap(product.call, tuple(axes))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        expected = make.stacked(product.expected, axes)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


def pulled(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The gradient with respect to x for a cotangent, which is given first."""

    def gradient(cotangent: mx.array, x: mx.array, *rest: mx.array) -> mx.array:
        return mx.vjp(lambda x: function(x, *rest), [x], [cotangent])[1][0]  # type: ignore[no-any-return]

    return gradient


@SOME
@given(DATA)
def test_vmap_of_gradient(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches([product.call(*calls[0]), *calls[0]]))
    function = mx.vmap(pulled(product.call), tuple(axes))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = [make.normal(product.call(*arrays).shape, 5), *arrays]
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        expected = make.stacked(pulled(product.expected), axes)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_gradient_of_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches(calls[0]))
    function = pulled(mx.vmap(product.call, tuple(axes)))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        shape = make.stacked(product.expected, axes)(*arrays).shape
        arrays = [make.normal(shape, 5), *arrays]
        expected = pulled(make.stacked(product.expected, axes))(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_vmap_of_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    inner = data.draw(make.batches(calls[0]))
    outer = data.draw(make.batches(make.batched(product, calls[0], inner, 2)))
    function = mx.vmap(mx.vmap(product.call, tuple(inner)), tuple(outer))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, inner, data.draw(make.SMALL))
        arrays = make.batched(product, arrays, outer, data.draw(make.SMALL))
        expected = make.stacked(make.stacked(product.expected, inner), outer)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_tangents(data: st.DataObject) -> None:
    product, calls = drawn(data)

    def pushed(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def tangent(one: mx.array, x: mx.array, *rest: mx.array) -> mx.array:
            return mx.jvp(lambda x: function(x, *rest), [x], [one])[1][0]  # type: ignore[no-any-return]

        return tangent

    shapeless = Traced(pushed(product.call))
    for arrays in calls:
        arrays = [make.normal(arrays[0].shape, 5), *arrays]
        expected = product.expected(arrays[0], *arrays[2:])  # it is linear in x
        close(pushed(product.call)(*arrays), expected)
        close(shapeless(*arrays), expected)
        # Twice: the gradient of a gradient with respect to its cotangent is the product again.
        again = mx.grad(lambda c, *rest: pulled(product.call)(c, *rest).square().sum())
        assert again(product.call(*arrays[1:]), *arrays[1:]).shape == expected.shape
