"""`mx.vmap` of ops in functions that are compiled once for all sizes."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule as fe
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import sizes as mlx_sizes

pytestmark = pytest.mark.skipif(mlx_build.library() is None, reason="no nodes here")

I = "uint i = thread_position_in_grid.x;"  # noqa: E741

product = fe.op(
    "product", "a[*S]:T, b[*S]:T -> y[*S]:T", metal=f"{I} y[i] = a[i] * b[i];", grid="a.size",
    threadgroup=64,
)  # fmt: skip
product.def_vjp(lambda primals, cotangents, outputs: (
    product(cotangents[0], primals[1]), product(cotangents[0], primals[0]),
))  # fmt: skip
product.def_jvp(lambda primals, tangents, outputs: (
    sum(one * other for one, other in zip(tangents, primals[::-1]) if one is not None),  # noqa: B905
))  # fmt: skip


rows_of_one = fe.op(
    "rows_of_one", "x[N]:T -> y[N]:T", metal="for (uint j = 0; j < N; j++) y[j] = x[0];", grid="1",
    threadgroup=1,
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_batches_of_any_size_in_one_shapeless_trace(data: st.DataObject) -> None:
    if not mlx_sizes.COUNTS:
        pytest.skip("this MLX counts nothing in such a trace")
    rank = data.draw(st.integers(0, 2))
    axes = st.none() | st.integers(0, rank)
    inner = data.draw(st.tuples(axes, axes).filter(any_axis))
    outer = data.draw(
        st.tuples(*[st.none() | st.integers(0, rank + (one is not None)) for one in inner])
        .filter(any_axis)
    )  # fmt: skip
    what = data.draw(st.sampled_from(["values", "gradients", "tangents"]))

    def asked(multiply: Any) -> Any:
        batched = mx.vmap(mx.vmap(multiply, in_axes=inner), in_axes=outer)
        if what == "gradients":
            return mx.grad(lambda a, b: mx.sin(batched(a, b)).sum(), argnums=(0, 1))
        if what == "tangents":
            return lambda a, b: mx.jvp(batched, [a, b], [mx.cos(a), mx.sin(b)])[1]
        return lambda a, b: (batched(a, b),)

    compiled = mx.compile(asked(product), shapeless=True)
    sizes = st.integers(1, 4)
    for _ in range(3):
        shape = data.draw(st.lists(sizes, min_size=rank, max_size=rank))
        counts = data.draw(sizes), data.draw(sizes)
        arrays = []
        for first, second in zip(inner, outer, strict=True):
            one = [*shape]
            for axis, count in zip((first, second), counts, strict=True):
                if axis is not None:
                    one.insert(axis, count)
            arrays.append(mx.random.normal(one))
        found, expected = compiled(*arrays), asked(mx.multiply)(*arrays)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-5)


def any_axis(axes: Any) -> bool:
    return any(axis is not None for axis in axes)


@pytest.mark.filterwarnings("ignore:op 'rows_of_one' is called")
def test_batches_that_cannot_follow_are_refused_in_a_shapeless_trace() -> None:
    folded = fe.op(
        "folded", "a[B,N]:T -> y[B]:T", metal=f"{I} y[i] = a[i * N];", grid="B", threadgroup=32,
        batch="B",
    )  # fmt: skip
    follows = mx.compile(mx.vmap(folded), shapeless=True)
    for shape in ((3, 4, 5), (2, 6, 1), (5, 1, 3)):
        x = mx.arange(math.prod(shape), dtype=mx.float32).reshape(shape)
        np.testing.assert_array_equal(np.array(follows(x)), np.array(x[:, :, 0]))
    with pytest.raises(ValueError, match="op 'rows_of_one' would be called once per element"):
        mx.compile(mx.vmap(rows_of_one), shapeless=True)(x[0])
