"""Derivatives and batches of functions out of shapeless files: those of the function itself, for
every size. MLX's files do not say which inputs of an operation are there for their sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import ferrule
from mlx_files import I, again
from mlx_versions import needs_mlx

pytestmark = needs_mlx(0, 32)

SQUARE = ferrule.op(
    "square", "x[*S]:T -> y[*S]:T", metal=I + "y[i] = x[i] * x[i];", grid="x.size", threadgroup=64
)
SQUARE.def_vjp(lambda primals, cotangents, outputs: (2 * primals[0] * cotangents[0],), version="2")
SQUARE.def_jvp(lambda primals, tangents, outputs: (2 * primals[0] * tangents[0],), version="2")
WEIGHT = mx.random.normal((3, 4), key=mx.random.key(1))
BIAS = mx.random.normal((4,), key=mx.random.key(2))
mx.eval(WEIGHT, BIAS)

# Each of an array of rank 2 with 3 columns.
FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "3x^2": lambda x: 3 * x**2,
    "x*x": lambda x: x * x,
    "exp(x)*2": lambda x: mx.exp(x) * 2,
    "x*sum": lambda x: x * x.sum(axis=-1, keepdims=True),
    "broadcast twice": lambda x: (x[:, None] - x[None]) * x.sum(),
    "linear": lambda x: mx.maximum(x @ WEIGHT + BIAS, 0.1 * x.mean()),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) * mx.rsqrt(x.var(-1, keepdims=True) + 1),
    "variance of all": lambda x: x.var() + x.mean(axis=0),
    "batched matmul": lambda x: (x[None] * 2) @ x.T,
    "where": lambda x: mx.where(x > 0, x * 2, mx.exp(x)),
    "logsumexp": lambda x: mx.logsumexp(x, axis=-1) * x.max(-1),
    "taken": lambda x: mx.take_along_axis(x, mx.argsort(x, axis=0), axis=0) * x,
    "transposed": lambda x: x.T * 2,
    "reshaped": lambda x: x.reshape(3, -1) * 2,
    "two outputs": lambda x: mx.divmod(x * 3, x * x + 1)[1],
    "kernels": lambda x: SQUARE(3 * x) + x * SQUARE(x + x.sum()),
}  # fmt: skip
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "value": lambda f: f,
    "grad": lambda f: mx.grad(lambda x: mx.sin(f(x)).sum()),
    "jvp": lambda f: lambda x: mx.jvp(f, [x], [mx.cos(x)])[1][0],
    "vmap": lambda f: lambda x: mx.vmap(f)(mx.stack([x, -x])),
    "vmap of grad": lambda f: (
        lambda x: mx.vmap(mx.grad(lambda x: mx.sin(f(x)).sum()), in_axes=1)(
            mx.stack([x, -x, 2 * x], 1)
        )
    ),
    "grad of grad": lambda f: mx.grad(lambda x: mx.grad(lambda x: mx.sin(f(x)).sum())(x).sum()),
    "compiled grad": lambda f: mx.compile(mx.grad(lambda x: mx.sin(f(x)).sum())),
}
NOT_OF_MLX = {("two outputs", "vmap"), ("two outputs", "vmap of grad")}  # wrong without files, too


def arrays(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32))


def outcome(f: Callable[..., Any], x: mx.array) -> Any:
    """A value, or what kind of error MLX raises."""
    try:
        found = f(x)
        mx.eval(found)
        return found
    except (ValueError, RuntimeError) as error:
        return str(error)[:40]


def same_as_the_function(
    name: str, transform: str, shapeless: bool, sizes: tuple[int, ...]
) -> None:
    function, transformed = FUNCTIONS[name], TRANSFORMS[transform]
    imported = again(function, arrays(2), shapeless=shapeless)

    def f(x: mx.array) -> mx.array:
        (y,) = imported(x)
        return y  # type: ignore[no-any-return]

    for rows in sizes:
        x = arrays(rows, rows)
        wanted = outcome(transformed(function), x)
        found = outcome(transformed(f), x)
        if isinstance(wanted, str):
            assert isinstance(found, str), (wanted, found)
            continue
        assert isinstance(found, mx.array), found
        assert found.shape == wanted.shape
        assert mx.allclose(found, wanted, rtol=1e-3, atol=1e-4), (rows, found, wanted)


@pytest.mark.parametrize(
    ("name", "transform"),
    [(a, b) for a in FUNCTIONS for b in TRANSFORMS if (a, b) not in NOT_OF_MLX],
)
def test_shapeless(name: str, transform: str) -> None:
    """One file for all sizes, and again for the first: nothing of a call is kept."""
    same_as_the_function(name, transform, True, (2, 5, 2))


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad"])
@pytest.mark.parametrize("name", ["linear", "batched matmul", "transposed", "reshaped"])
def test_with_the_sizes_of_the_file(name: str, transform: str) -> None:
    """Batches of one call do not change what the next computes."""
    same_as_the_function(name, transform, False, (2, 2))


@pytest.mark.parametrize("name", ["3x^2", "exp(x)*2", "linear", "kernels"])
def test_in_a_file_again(name: str) -> None:
    imported = again(FUNCTIONS[name], arrays(2), shapeless=True)
    gradient = again(mx.grad(lambda x: imported(x)[0].sum()), arrays(3), shapeless=True)
    for rows in (2, 5):
        x = arrays(rows, rows)
        wanted = mx.grad(lambda x: FUNCTIONS[name](x).sum())(x)
        assert mx.allclose(gradient(x)[0], wanted, rtol=1e-3, atol=1e-4)
