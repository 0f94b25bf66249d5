"""What the tests of ferrule.ops share: shapes, tolerances, ways to call in torch and MLX."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from hypothesis import strategies as st

import ferrule

# Of rows: none, one, a part of a simdgroup, more, a few rounds of several simdgroups.
LENGTHS = st.sampled_from([0, 1, 2, 31, 32, 33, 100, 1023, 1025, 3000])
# Of what is in front of them, or behind.
SIZES = st.sampled_from([0, 1, 1, 2, 2, 3, 5])

TOLERANCE = {
    torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
}  # fmt: skip


@st.composite
def shapes(draw: Any, behind: int) -> tuple[int, ...]:
    """Shapes with a row that has so many axes behind it, and up to three in front."""
    front = draw(st.lists(SIZES, max_size=3))
    return (*front, draw(LENGTHS), *[draw(SIZES) for _ in range(behind)])


def close(found: Any, expected: Any, dtype: torch.dtype, what: str = "") -> None:
    """Compare with what was computed in float64: errors are of the largest element's size."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, what
    if expected.numel():
        largest = max(expected.abs().max().item(), 1.0)
        assert (found - expected).abs().max().item() <= TOLERANCE[dtype] * largest, what


def with_gradients(function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a function and its gradients, along cotangents that are the same each time."""
    arrays = [array.detach().requires_grad_() for array in arrays]
    outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [
        torch.linspace(-1, 1.5, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
        for y in outputs
    ]
    return (*outputs, *torch.autograd.grad(outputs, arrays, cotangents))


def ways_in_torch(
    function: Callable[..., Any], arrays: Sequence[Any], dynamic: dict[int, Any]
) -> None:
    """A graph of dynamic sizes, compiled and exported, and a batch are what eager calls are.

    Args:
        function: of one output.
        arrays: its inputs, the first one with a first axis of any size.
        dynamic: of the first input: its dynamic axes.
    """
    x, *others = arrays

    def loss(*given: Any) -> Any:
        return function(*given).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 3):
        given = [torch.cat([x] * size).requires_grad_(), *others]
        (found,) = torch.autograd.grad(compiled(*given), given[:1])
        torch.testing.assert_close(found, torch.autograd.grad(loss(*given), given[:1])[0])

    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return function(*given)

    sizes = (dynamic, *[None] * len(others))
    program = torch.export.export(Model(), (torch.cat([x] * 4), *others), dynamic_shapes=(sizes,))
    longer = torch.cat([x] * 7)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(longer, *others), function(longer, *others))

    batch = torch.stack([x, x + 1, x * 2])
    found = torch.func.vmap(torch.func.grad(loss), (0, *[None] * len(others)))(batch, *others)
    torch.testing.assert_close(
        found, torch.stack([torch.func.grad(loss)(one, *others) for one in batch])
    )


def ways_in_mlx(function: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """One shapeless graph, compiled and in a file, serves all sizes of the first input's first
    axis, derivatives included; a batch is one call; and forward mode agrees with reverse mode.

    Args:
        function: of one output.
        arrays: its inputs, of NumPy.
    """
    x, *others = map(mx.array, arrays)

    def loss(*given: Any) -> Any:
        return mx.sin(function(*given)).sum()

    gradient = mx.value_and_grad(loss)
    compiled = mx.compile(gradient, shapeless=True)
    path = os.path.join(tempfile.mkdtemp(), "gradient.mlxfn")
    mx.export_function(path, lambda *given: list(gradient(*given)), x, *others, shapeless=True)
    imported = ferrule.import_function(path)
    for size in (1, 3):
        longer = mx.concatenate([x] * size)
        expected = gradient(longer, *others)
        for found in (compiled(longer, *others), imported(longer, *others)):
            for one, other in zip(found, expected, strict=True):
                assert np.allclose(np.array(one), np.array(other), atol=1e-5)
    way = mx.cos(x)
    _, (along,) = mx.jvp(lambda x: loss(x, *others), [x], [way])
    assert np.allclose(along.item(), (mx.grad(loss)(x, *others) * way).sum().item(), atol=1e-4)
    batch = mx.stack([x, x * 2])
    found = mx.vmap(mx.grad(loss), in_axes=(0, *[None] * len(others)))(batch, *others)
    expected = mx.stack([mx.grad(loss)(one, *others) for one in batch])
    assert np.allclose(np.array(found), np.array(expected), atol=1e-5)
