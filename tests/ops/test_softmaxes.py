"""softmax and log_softmax, against torch's and MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, ops
from ready_ops import close, shapes, ways_in_mlx, ways_in_torch, with_gradients

pytestmark = [
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # float64
]

PAIRS = [(ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)]
MODES = [(torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 0)]  # and float64 below
each = pytest.mark.parametrize(("function", "theirs"), PAIRS, ids=["softmax", "log_softmax"])


@pytest.mark.together
@pytest.mark.parametrize(("dtype", "behind"), MODES)
@each
def test_rows_of_2048(function: Any, theirs: Any, dtype: torch.dtype, behind: int) -> None:
    x = (torch.randn(2, 2048, *[2] * behind) * 4).to(dtype)
    found = with_gradients(lambda x: function(x, axis=1), [x])
    expected = with_gradients(lambda x: theirs(x, 1), [x.double()])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        close(one, other, dtype)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MODES), st.sampled_from(PAIRS), st.booleans())
def test_any_shape(data: Any, mode: Any, pair: Any, from_the_front: bool) -> None:
    (dtype, behind), (function, theirs) = mode, pair
    shape = data.draw(shapes(behind))
    x = (torch.randn(shape) * 4).to(dtype)
    axis = len(shape) - 1 - behind if from_the_front else -1 - behind
    found = with_gradients(lambda x: function(x, axis), [x])
    expected = with_gradients(lambda x: theirs(x, axis), [x.double()])
    close(found[0], expected[0], dtype)
    close(found[1], expected[1], dtype)


@each
def test_extremes(function: Callable[..., Any], theirs: Any) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [1e30, -1e30, 0],
        [-inf, 1, 2],
        [-inf, -inf, -inf],
        [inf, 1, 2],
        [nan, 1, 2],
        [3e38] * 3,
    ]
    x = torch.tensor(rows)
    torch.testing.assert_close(function(x), theirs(x, -1), equal_nan=True)
    many = x.tile(1, 700)  # several simdgroups
    torch.testing.assert_close(function(many), theirs(many, -1), equal_nan=True)


@each
def test_numpy_and_mlx(function: Any, theirs: Any) -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    np.testing.assert_array_equal(function(x, np.int64(1)), function(x, 1))
    expected = theirs(torch.from_numpy(x), 1).numpy()
    assert np.allclose(function(x, 1), expected, atol=1e-6)
    turned = x.transpose(2, 1, 0)
    assert np.allclose(function(turned, -2), expected.transpose(2, 1, 0), atol=1e-6)
    assert np.allclose(np.array(function(mx.array(x), 1)), expected, atol=1e-6)


@each
def test_derivatives(function: Any, theirs: Any) -> None:
    for axis in (-1, 1):
        x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)

        def of(x: Any, axis: int = axis) -> Any:
            return function(x, axis)

        assert torch.autograd.gradcheck(of, (x,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(of, (x,))


@each
def test_forward_mode_over_reverse_mode(function: Any, theirs: Any) -> None:
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    for axis in (-1, 1):
        hessians = [
            torch.func.hessian(lambda x, f=f, axis=axis: (f(x, axis) ** 3).sum())(x)
            for f in (function, theirs)
        ]
        torch.testing.assert_close(*hessians)


@each
def test_ways_in_torch(function: Any, theirs: Any) -> None:
    x = torch.randn(1, 40)
    ways_in_torch(function, [x], {0: torch.export.Dim("rows"), 1: torch.export.Dim("length")})


@each
def test_ways_in_mlx(function: Any, theirs: Any) -> None:
    ways_in_mlx(function, [np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)])


def test_opcheck_and_check_grad() -> None:
    for member in (ops.softmaxes._softmax, ops.softmaxes._log_softmax):
        op = member(0, False)
        torch.library.opcheck(op.torch_op, (torch.randn(3, 40, requires_grad=True),))
        assert ferrule.check_grad(op, torch.randn(3, 40)).ok
        assert ferrule.check_grad(op.rules["vjp"].op, torch.rand(3, 40), torch.randn(3, 40)).ok


@each
def test_wrong_inputs(function: Any, theirs: Any) -> None:
    name = function.__name__
    with pytest.raises(
        KernelError, match=rf"{name}: axis 2 of x of shape \(3, 4\); expected -2 to 1"
    ):
        function(np.ones((3, 4), np.float32), 2)
    with pytest.raises(KernelError, match=r"shape \(\); it has no axis"):
        function(torch.tensor(1.0))
    with pytest.raises(KernelTypeError, match=rf"{name}: got axis 1.0; expected an int"):
        function(torch.ones(2, 2), 1.0)
    with pytest.raises(KernelTypeError, match=rf"{name}: got x of type list; expected an array"):
        function([1.0, 2.0])
    with pytest.raises(KernelError, match=rf"'x' of op '{name}': got int32, expected"):
        function(mx.array([1, 2]))
