"""topk against torch and against its meaning, with every host."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.ops import selection, topk
from ready_ops import ways_in_mlx

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

KINDS = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8]


def expected(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By a stable sort, for which torch's NaN is largest, too, and 0.0 equals -0.0."""
    found = torch.sort(x, dim=-1, descending=True, stable=True)
    return found.values[..., :k], found.indices[..., :k]


def check(x: torch.Tensor, k: int, found: Any) -> None:
    values, indices = expected(x, k)
    torch.testing.assert_close(found[0], values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1], indices)


@given(
    rows=st.integers(0, 3), n=st.integers(1, 90) | st.sampled_from([255, 257, 600]),
    kind=st.sampled_from(KINDS), few=st.booleans(), seed=st.integers(0, 99), data=st.data(),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_values_and_places(rows: int, n: int, kind: Any, few: bool, seed: int, data: Any) -> None:
    k = data.draw(st.integers(0, min(n, 32) if few else n))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-6, 7, (rows, n), generator=generator)
    if not kind.is_floating_point:
        x = x.abs().to(kind) if kind == torch.uint8 else x.to(kind)
    else:
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
        pick = torch.randint(0, 40, (rows, n), generator=generator)
        x = torch.where(pick < 5, special[pick.clamp(max=4)], x.float() / 4).to(kind)
    check(x, k, topk(x, k))


@pytest.mark.parametrize("make", [np.asarray, mx.array])
def test_other_hosts(make: Any) -> None:
    x = np.random.default_rng(1).integers(-9, 9, (2, 3, 70)).astype(np.float32)
    for k in (5, 40):
        values, indices = (np.asarray(one) for one in topk(make(x), k))
        check(torch.from_numpy(x), k, (torch.from_numpy(values), torch.from_numpy(indices)))


def test_graphs() -> None:
    compiled = torch.compile(topk, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape, k in (((3, 40), 4), ((2, 50), 33), ((5, 60), 7)):
        x = torch.rand(shape)
        check(x, k, compiled(x, k))
    shapeless = mx.compile(lambda x: topk(x, 3), shapeless=True)
    for size in (5, 9):
        x = torch.rand(2, size)
        found = (torch.from_numpy(np.array(one)) for one in shapeless(mx.array(x.numpy())))
        check(x, 3, tuple(found))
    x = torch.rand(4, 2, 9)
    check(x, 2, torch.vmap(lambda x: topk(x, 2))(x))


def test_an_export_with_a_dynamic_k() -> None:
    class Largest(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return topk(x, y.shape[0])[0]

    x, k = torch.rand(2, 40), torch.export.Dim("k", min=1, max=40)
    program = torch.export.export(Largest(), (x, torch.ones(5)), dynamic_shapes=({}, {0: k}))
    for size in (3, 34):
        found = program.module()(x, torch.ones(size))
        assert torch.equal(found, expected(x, size)[0])


def test_derivatives() -> None:
    x = torch.rand(3, 50)
    for k in (4, 40):
        own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        weights = torch.rand(3, k)
        (topk(own, k)[0] * weights).sum().backward()
        (torch.topk(other, k).values * weights).sum().backward()
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad)
    torch.library.opcheck(selection._topk.torch_op, (torch.rand(2, 6, requires_grad=True), 3))
    ferrule.check_grad(selection._topk, torch.linspace(0, 1, 9)[torch.randperm(9)], 3)
    grad = mx.grad(lambda x: topk(x, 1)[0].sum())(mx.array([1.0, 3.0, 2.0]))
    assert grad.tolist() == [0, 1, 0]
    x = torch.randn(2, 9, dtype=torch.float32)
    for of in (
        torch.func.jacfwd,
        torch.func.hessian,
        lambda f: torch.func.jacfwd(torch.func.grad(f)),
    ):
        mine, right = (
            of(lambda x: (f(x, 3)[0] ** 3).sum())(x)  # noqa: B023
            for f in (topk, torch.topk)
        )
        torch.testing.assert_close(mine, right)
    _, (tangent,) = mx.jvp(
        lambda x: topk(x, 2)[0], [mx.array([1.0, 3.0, 2.0])], [mx.array([4.0, 5, 6])]
    )
    assert tangent.tolist() == [5, 6]
    ways_in_mlx(lambda x: topk(x, 3)[0], [np.random.default_rng(0).random((2, 9), np.float32)])


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.ones(3), 1, "got float64, expected x"),
        (np.ones(3, np.float32), 4, r"wants .*k <= N.* N = 3.* k = 4"),
        (np.ones(3, np.float32), -1, r"wants 0 <= k"),
        (np.ones((), np.float32), 1, "with 1 dim or more"),
        (np.ones(3, np.float32), 1.5, "input 'k' of op 'topk': got 1.5"),
        ([1.0], 1, "input 'x' of op 'topk'"),
    ],
)
def test_what_is_refused(x: Any, k: Any, message: str) -> None:
    with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError), match=message):
        topk(x, k)
