"""segment_sum against torch's index_add, with every host."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.ops import segment_sum, segments
from ready_ops import ways_in_mlx, ways_in_torch

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def expected(x: torch.Tensor, ids: torch.Tensor, n: int) -> torch.Tensor:
    wide = x.float() if x.is_floating_point() else x
    inside = torch.where((ids >= 0) & (ids < n), ids, n).long()
    return torch.zeros(n + 1, *x.shape[1:], dtype=wide.dtype).index_add_(0, inside, wide)[:n]


@given(
    rows=st.integers(0, 40), rest=st.lists(st.integers(0, 5), max_size=2), n=st.integers(0, 7),
    kind=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int32]),
    wide=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_as_index_add(rows: int, rest: list[int], n: int, kind: Any, wide: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (rows, *rest), generator=generator).to(kind)  # sums are exact
    ids = torch.randint(-2, n + 2, (rows,), generator=generator)
    ids = ids if wide else ids.int()
    assert torch.equal(segment_sum(x, ids, n), expected(x, ids, n).to(kind))


@pytest.mark.parametrize("make", [np.asarray, mx.array])
def test_other_hosts(make: Any) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (50, 130)).astype(np.float32)
    ids = np.random.default_rng(1).integers(-1, 6, 50)
    found = np.asarray(segment_sum(make(x), make(ids), 5))
    assert np.array_equal(found, expected(torch.from_numpy(x), torch.from_numpy(ids), 5))


def test_both_bodies_add_the_same() -> None:
    _, by_elements = segments._segment_sum("T").using("metal").implementations
    body = by_elements.to_json()
    everywhere = ferrule.op(
        "by_elements", str(segments._segment_sum("T").rule), metal=body["source"],
        header=body["header"], grid=("x.size // max(M, 1)", "M"), threadgroup=(32, 8),
        init_value=0, atomic_outputs=True,
    )  # fmt: skip
    x, ids = torch.randint(-9, 9, (300, 40)).float(), torch.randint(-1, 20, (300,))
    assert torch.equal(everywhere(x, ids, 19), expected(x, ids, 19))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_derivatives(kind: Any) -> None:
    x = torch.randn(9, 3).to(kind).requires_grad_()
    ids, weights = torch.tensor([0, 4, 1, -1, 1, 9, 0, 2, 2]), torch.randn(4, 3).to(kind)
    (grad,) = torch.autograd.grad((segment_sum(x, ids, 4) * weights).sum(), x)
    (want,) = torch.autograd.grad((expected(x, ids, 4).to(kind) * weights).sum(), x)
    torch.testing.assert_close(grad, want)
    if kind == torch.float32:
        ferrule.check_grad(segments._segment_sum("T"), x.detach(), ids, 4)
        ferrule.check_grad(segments._rows_of, weights, ids, x.detach())
        torch.library.opcheck(segments._segment_sum("T").torch_op, (x, ids, 4))
    found = mx.grad(lambda x: segment_sum(x, mx.array([0, 1, 5]), 2).sum())(mx.ones((3,)))
    assert found.tolist() == [1, 1, 0]


def test_derivatives_of_derivatives() -> None:
    ids, x = torch.tensor([0, 1, 0]), torch.tensor([1.0, 2.0, 3.0])

    def energy(x: torch.Tensor) -> torch.Tensor:
        return (segment_sum(x, ids, 2) ** 2).sum()

    hessian = torch.func.hessian(energy)(x)
    assert hessian.tolist() == [[2, 0, 2], [0, 2, 0], [2, 0, 2]]
    half = x.half()
    _, tangent = torch.func.jvp(lambda x: segment_sum(x, ids, 2), (half,), (half,))
    assert tangent.tolist() == [4, 2]
    own = half.requires_grad_()
    (grad,) = torch.autograd.grad(energy(own), own, create_graph=True)
    (again,) = torch.autograd.grad(grad.sum(), own)
    assert again.tolist() == [4, 2, 4]


def test_ways() -> None:
    x, ids = np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32), np.arange(7) % 3

    def by_columns(x: Any, ids: Any) -> Any:
        return segment_sum(x.T, ids, 4)

    ways_in_torch(by_columns, [torch.tensor(x), torch.tensor(ids)], {0: torch.export.Dim("D")})
    ways_in_mlx(by_columns, [x, ids])


def test_graphs() -> None:
    compiled = torch.compile(segment_sum, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, n in ((4, 2), (7, 5), (9, 3)):
        x, ids = torch.randint(9, (rows, 3)).float(), torch.randint(n, (rows,))
        assert torch.equal(compiled(x, ids, n), expected(x, ids, n))
    shapeless = mx.compile(lambda x, ids: segment_sum(x, ids, 2), shapeless=True)
    for rows in (2, 5):
        assert shapeless(mx.ones((rows,)), mx.zeros((rows,), mx.int32)).tolist() == [rows, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.ones(3, np.float32), np.zeros(4, np.int32), 1), "dim 0 is 4, but M is 3"),
        ((np.ones(3, np.float32), np.zeros(3, np.int32), -1), "n is -1"),
        ((np.ones(3, np.float32), np.zeros(3, np.float32), 1), "got float32, expected ids"),
        ((np.ones(3), np.zeros(3, np.int32), 1), "got float64, expected x"),
        (([1.0], np.zeros(1, np.int32), 1), "input 'x' of op 'segment_sum'"),
    ],
)
def test_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError), match=message):
        segment_sum(*given)
