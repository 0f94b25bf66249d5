"""matmul, against torch's and MLX's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, ops
from ferrule.ops.products import _product
from ready_ops import ways_in_mlx, ways_in_torch

pytestmark = pytest.mark.together("products")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Half a unit in the last place of the result, and what sums of float32 differ by.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Nothing, parts of an 8x8 matrix, parts of 32x32, several of these.
SIZES = st.sampled_from([0, 1, 3, 8, 9, 17, 31, 32, 33, 40, 70])
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])


def assert_product(found: Any, a: Any, b: Any) -> None:
    """A product is that of the same numbers in float64, but for the rounding."""
    exact = a.double() @ b.double()
    bound = ROUNDING[a.dtype] * exact.abs() + 1e-6 * (a.double().abs() @ b.double().abs()) + 1e-7
    assert found.dtype == a.dtype
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(BATCHES, SIZES, SIZES, SIZES, st.sampled_from(DTYPES), st.booleans())
def test_any_shape(
    batch: Any, rows: int, depth: int, columns: int, dtype: Any, shared: bool
) -> None:
    a = torch.randn(*batch, rows, depth).to(dtype)
    b = torch.randn(*(() if shared else batch), depth, columns).to(dtype)
    assert_product(ops.matmul(a, b), a, b)


@settings(max_examples=30, deadline=None)
@given(BATCHES, SIZES, SIZES, SIZES, st.booleans())
def test_gradients(batch: Any, rows: int, depth: int, columns: int, shared: bool) -> None:
    a = torch.randn(*batch, rows, depth, requires_grad=True)
    b = torch.randn(*(() if shared else batch), depth, columns, requires_grad=True)
    c = torch.randn(*batch, rows, columns)
    found = torch.autograd.grad(ops.matmul(a, b), (a, b), c)
    for mine, right in zip(found, torch.autograd.grad(a @ b, (a, b), c), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_check_grad_of_each_way_that_matrices_are_stored(shared: bool) -> None:
    """The derivatives of derivatives are products, too."""
    a, b, c = torch.randn(2, 3, 9), torch.randn(2, 9, 4), torch.randn(2, 3, 4)
    b = b[0] if shared else b
    assert ferrule.check_grad(_product("nn", shared), a, b).ok
    assert ferrule.check_grad(_product("nt", shared), c, b).ok
    if not shared:
        assert ferrule.check_grad(_product("tn", False), a, c).ok


def test_second_and_forward_derivatives() -> None:
    a, b = torch.randn(2, 5), torch.randn(5, 3)

    def loss(a: Any, b: Any, product: Any) -> Any:
        return (product(a, b) ** 2).sum()

    for of in (
        torch.func.hessian,
        torch.func.jacfwd,
        lambda f: torch.func.jacrev(torch.func.grad(f)),
    ):
        mine, right = (of(lambda a: loss(a, b, p))(a) for p in (ops.matmul, torch.matmul))  # noqa: B023
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_ways() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 9), (9, 5)))
    ways_in_torch(ops.matmul, [torch.tensor(a), torch.tensor(b)], {0: torch.export.Dim("rows")})
    ways_in_mlx(ops.matmul, [a, b])


def test_opcheck() -> None:
    a, b = torch.randn(2, 9, 5, requires_grad=True), torch.randn(5, 17, requires_grad=True)
    torch.library.opcheck(_product("nn", True).torch_op, (a, b))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")
def test_compiled_with_dynamic_sizes() -> None:
    def loss(a: Any, b: Any) -> Any:
        return ops.matmul(a, b).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 33):
        a, b = torch.randn(rows, 9, requires_grad=True), torch.randn(9, 12)
        (found,) = torch.autograd.grad(compiled(a, b), a)
        torch.testing.assert_close(found, torch.autograd.grad((a @ b).sin().sum(), a)[0])


def test_batches_of_calls() -> None:
    a, b = torch.randn(4, 3, 9), torch.randn(4, 9, 5)
    torch.testing.assert_close(torch.func.vmap(ops.matmul)(a, b), a @ b)
    torch.testing.assert_close(torch.func.vmap(ops.matmul, (0, None))(a, b[0]), a @ b[0])


def test_numpy_and_mlx() -> None:
    a, b = torch.randn(2, 9, 20), torch.randn(2, 20, 33)
    want = (a @ b).numpy()
    assert np.allclose(ops.matmul(a.numpy(), b.numpy()), want, atol=1e-4)
    turned = np.ascontiguousarray(b.numpy().swapaxes(1, 2)).swapaxes(1, 2)
    assert np.allclose(ops.matmul(a.numpy(), turned), want, atol=1e-4)
    assert np.allclose(
        np.array(ops.matmul(mx.array(a.numpy()), mx.array(b.numpy()))), want, atol=1e-4
    )


def test_one_shapeless_graph_of_mlx() -> None:
    b = mx.random.normal((9, 12))

    def loss(product: Any, a: Any, b: Any) -> Any:
        return mx.sin(product(a, b)).sum()

    gradient = mx.value_and_grad(lambda a, b: loss(ops.matmul, a, b), argnums=(0, 1))
    compiled = mx.compile(gradient, shapeless=True)
    for rows in (4, 40):
        a = mx.random.normal((2, rows, 9))
        value, grads = compiled(a, b)
        right, of = mx.value_and_grad(lambda a, b: loss(mx.matmul, a, b), argnums=(0, 1))(a, b)
        assert np.allclose(np.array(value), np.array(right), atol=1e-3)
        for mine, one in zip(grads, of, strict=True):
            assert np.allclose(np.array(mine), np.array(one), atol=1e-3)


def test_the_result_does_not_depend_on_threads() -> None:
    a, b = torch.randn(70, 40), torch.randn(40, 70)
    before = ferrule.get_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            ferrule.set_threads(threads)
            results.append(ops.matmul(a, b))
    finally:
        ferrule.set_threads(before)
    assert all(torch.equal(results[0], r) for r in results)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match=r"'b' of op 'matmul_nn'.*\(4, 2\).*K is 3 by input 'a'"):
        ops.matmul(torch.ones(2, 3), torch.ones(4, 2))
    with pytest.raises(KernelError, match="float64"):
        ops.matmul(torch.ones(2, 3).double(), torch.ones(3, 2).double())
    with pytest.raises(KernelError, match="'b'"):
        ops.matmul(torch.ones(2, 3), torch.ones(2, 3, 2))
    with pytest.raises(KernelError, match="'b'"):
        ops.matmul(torch.ones(2, 3), torch.ones(3, 2).half())
