"""rms_norm and layer_norm, against torch's and MLX's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, ops
from ferrule.ops import norm_grads, norm_weights
from ready_ops import close, shapes, ways_in_mlx, ways_in_torch, with_gradients

pytestmark = [
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # float64
]


class Mode(NamedTuple):
    """What decides the kernels: not sizes."""

    name: str
    dtype: torch.dtype
    weights: torch.dtype
    behind: int
    others: tuple[bool, bool]  # weight and residual, or weight and bias

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}-{self.behind}"


MODES = [
    Mode("rms_norm", torch.float32, torch.float32, 0, (True, False)),
    Mode("rms_norm", torch.float16, torch.float32, 1, (True, True)),
    Mode("layer_norm", torch.float32, torch.float32, 0, (True, True)),
    Mode("layer_norm", torch.bfloat16, torch.float32, 1, (True, False)),
]


def theirs(mode: Mode, axis: int, x: Any, *others: Any) -> Any:
    """The same by torch, in float64."""
    given = iter(others)
    weight, other = (next(given) if there else None for there in mode.others)
    length = (x.shape[axis],)
    if mode.name == "rms_norm":
        x = x if other is None else x + other
        y = F.rms_norm(x.movedim(axis, -1), length, weight, 1e-5).movedim(-1, axis)
        return y if other is None else (y, x)
    return F.layer_norm(x.movedim(axis, -1), length, weight, other, 1e-5).movedim(-1, axis)


def ours(mode: Mode, axis: int, x: Any, *others: Any) -> Any:
    given = iter(others)
    weight, other = (next(given) if there else None for there in mode.others)
    if mode.name == "rms_norm":
        return ops.rms_norm(x, weight, 1e-5, axis, residual=other)
    return ops.layer_norm(x, weight, other, 1e-5, axis)


def check(mode: Mode, axis: int, shape: tuple[int, ...]) -> None:
    """Outputs and gradients of one call."""
    length = shape[axis]
    x = torch.randn(shape) + 0.5
    if length == 2:  # nearly equal, they would be what rounding makes of their difference
        first, second = x.movedim(axis, 0)
        second.copy_(first + torch.where(second > 0.5, 0.5, -0.5) + (second - 0.5))
    arrays = [x.to(mode.dtype)]
    if mode.others[0]:
        arrays.append((torch.randn(length) + 1).to(mode.weights))
    if mode.others[1]:
        like_x = mode.name == "rms_norm"
        arrays.append(
            torch.randn(shape).to(mode.dtype) if like_x else torch.randn(length).to(mode.weights)
        )
    found = with_gradients(lambda *given: ours(mode, axis, *given), arrays)
    expected = with_gradients(
        lambda *given: theirs(mode, axis, *given), [array.double() for array in arrays]
    )
    lengths_of_one = length == 1 and mode.name == "layer_norm"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        outputs = len(found) - len(arrays)
        assert one.dtype == (mode.dtype if i < outputs else arrays[i - outputs].dtype)
        if not lengths_of_one:  # whose difference from the mean is what rounding makes of it
            close(one, other, mode.dtype, f"{mode.id} {shape} {i}")


@pytest.mark.together
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.id)
def test_rows_of_2048(mode: Mode) -> None:
    check(mode, 1, (3, 2048, *[2] * mode.behind))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(MODES), st.booleans())
def test_any_shape(data: Any, mode: Mode, from_the_front: bool) -> None:
    shape = data.draw(shapes(mode.behind))
    check(mode, len(shape) - 1 - mode.behind if from_the_front else -1 - mode.behind, shape)


def test_numpy_and_mlx() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((3, 5, 40), 40, 40))
    x_, w_, b_ = map(mx.array, (x, w, b))
    rms, layer = mx.fast.rms_norm(x_, w_, 1e-3), mx.fast.layer_norm(x_, w_, b_, 1e-3)
    assert np.allclose(ops.rms_norm(x, w, 1e-3), rms, atol=1e-5)
    assert np.allclose(ops.rms_norm(x_, w_, 1e-3), rms, atol=1e-5)
    assert np.allclose(ops.layer_norm(x, w, b, 1e-3), layer, atol=1e-5)
    assert np.allclose(ops.layer_norm(x_, w_, b_, 1e-3), layer, atol=1e-5)
    turned = np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0)  # copied, not misread
    assert np.allclose(ops.rms_norm(turned, w, 1e-3), rms, atol=1e-5)
    y, total = ops.rms_norm(x_, w_, 1e-3, residual=x_)
    assert np.allclose(total, 2 * x)
    assert np.allclose(y, mx.fast.rms_norm(2 * x_, w_, 1e-3), atol=1e-5)


DOUBLE = [
    Mode("rms_norm", torch.float64, torch.float64, 0, (True, True)),
    Mode("layer_norm", torch.float64, torch.float64, 2, (False, True)),
]


@pytest.mark.together
@pytest.mark.parametrize("mode", DOUBLE, ids=lambda mode: mode.id)
def test_derivatives(mode: Mode) -> None:
    axis = -1 - mode.behind
    shape = (2, 3, *[2] * mode.behind)
    rms = mode.name == "rms_norm"
    sizes = [shape, *[3] * mode.others[0], *[shape if rms else 3] * mode.others[1]]
    arrays = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def of(*given: Any) -> Any:
        return ours(mode, axis, *given)

    def gradient(*given: Any) -> Any:
        outputs = of(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((y.sin() * (i + 1)).sum() for i, y in enumerate(outputs))
        return torch.autograd.grad(loss, given[0], create_graph=True)

    assert torch.autograd.gradcheck(of, arrays, check_forward_ad=True)
    assert torch.autograd.gradcheck(gradient, arrays)


@pytest.mark.filterwarnings("ignore:.*called .* by vmap:ferrule.FerruleWarning")  # over weights
@pytest.mark.parametrize("mode", DOUBLE, ids=lambda mode: mode.id)
def test_forward_mode_over_reverse_mode(mode: Mode) -> None:
    shape = (2, 3, *[2] * mode.behind)
    like_x = mode.name == "rms_norm"
    sizes = [shape, *[3] * mode.others[0], *[shape if like_x else 3] * mode.others[1]]
    arrays = [torch.randn(size, dtype=torch.float64) for size in sizes]

    def hessian(function: Any) -> Any:
        def of(*given: Any) -> Any:
            outputs = function(mode, -1 - mode.behind, *given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum((y.sin() * (i + 1)).sum() for i, y in enumerate(outputs))

        places = tuple(range(len(arrays)))
        # By one input alone, too: then others have no tangent.
        by_one = [torch.func.hessian(of, argnums=i)(*arrays) for i in places]
        return torch.func.hessian(of, argnums=places)(*arrays), by_one

    torch.testing.assert_close(hessian(ours), hessian(theirs))


def test_forward_mode_over_reverse_mode_in_mlx() -> None:
    x, w, b = torch.randn(4, 5), torch.randn(5), torch.randn(5)
    tangents = [torch.randn_like(a) for a in (x, w, b)]

    def loss(library: Any, norm: Any) -> Any:
        return lambda x, w, b: library.sin(norm(x, w, b)).sum()

    gradient = torch.func.grad(
        loss(torch, lambda x, w, b: F.layer_norm(x, (5,), w, b)), argnums=(0, 1, 2)
    )
    _, expected = torch.func.jvp(gradient, (x, w, b), tuple(tangents))
    ours = mx.grad(loss(mx, ops.layer_norm), argnums=(0, 1, 2))
    _, found = mx.jvp(
        ours, [mx.array(a.numpy()) for a in (x, w, b)], [mx.array(a.numpy()) for a in tangents]
    )
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other.numpy(), atol=1e-4)


def test_a_second_derivative_through_a_weights_gradient_is_refused() -> None:
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.rms_norm(x, w).sin().sum(), w, create_graph=True)
    with pytest.raises(KernelError, match=r"'norm_sum_parts' has no derivative"):
        grad.sum().backward()


def test_weight_gradients_are_the_same_each_time() -> None:
    x = torch.randn(3000, 40)
    w, b = torch.randn(40), torch.randn(40)
    first, again = (with_gradients(ops.layer_norm, [x, w, b]) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_ways_in_torch() -> None:
    x, w, b = torch.randn(1, 40), torch.randn(40), torch.randn(40)
    rows = {0: torch.export.Dim("rows")}

    def both(x: Any, w: Any, b: Any) -> Any:
        y, total = ops.rms_norm(x, w, residual=x.cos())
        return ops.layer_norm(y, w, b) + total

    ways_in_torch(both, [x, w, b], rows)


def test_ways_in_mlx() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((2, 40), 40, 40))
    ways_in_mlx(ops.layer_norm, [x, w, b])
    ways_in_mlx(lambda x, w: ops.rms_norm(x, w, residual=x)[0], [x, w])


def test_gradients_of_weights_in_a_batch() -> None:
    batch, w = torch.randn(3, 4, 40), torch.randn(40)

    def loss(w: Any, x: Any) -> Any:
        return ops.layer_norm(x, w).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, batch)
    expected = torch.stack([torch.func.grad(loss)(w, x) for x in batch])
    torch.testing.assert_close(found, expected)
    mlx_batch, mlx_w = mx.array(batch.numpy()), mx.array(w.numpy())

    def mlx_loss(w: Any, x: Any) -> Any:
        return mx.sin(ops.layer_norm(x, w)).sum()

    per_example = mx.vmap(mx.grad(mlx_loss), in_axes=(None, 0))(mlx_w, mlx_batch)
    assert np.allclose(per_example, expected.numpy(), atol=1e-5)


def test_opcheck_and_check_grad() -> None:
    x, w, b = torch.randn(3, 40), torch.randn(40), torch.randn(40)
    layer = ops.norms._layer_norm(0, True, True, False)
    torch.library.opcheck(
        layer.torch_op, (x.clone().requires_grad_(), w.clone().requires_grad_(), b, 1e-5)
    )
    assert ferrule.check_grad(layer, x, w, b, 1e-5).ok
    rms = ops.norms._rms_norm(0, True, True, False)
    torch.library.opcheck(rms.torch_op, (x.clone().requires_grad_(), x.sin(), w, 1e-5))
    assert ferrule.check_grad(rms, x, x.sin(), w, 1e-5).ok


def test_wrong_inputs() -> None:
    x = np.ones((3, 4), np.float32)
    with pytest.raises(KernelError, match=r"rms_norm: axis -3 of x of shape \(3, 4\); expected -2"):
        ops.rms_norm(x, axis=-3)
    with pytest.raises(KernelTypeError, match=r"layer_norm: got x of type list"):
        ops.layer_norm([1.0])
    with pytest.raises(
        KernelError, match=r"'weight' of op 'rms_norm': got the shape \(3,\).* N is 4"
    ):
        ops.rms_norm(x, np.ones(3, np.float32))
    with pytest.raises(
        KernelError, match=r"'bias' of op 'layer_norm': got float16, but W is float32"
    ):
        ops.layer_norm(x, np.ones(4, np.float32), np.ones(4, np.float16))
    with pytest.raises(KernelError, match=r"'residual' of op 'add_rms_norm' has the shape \(4,\)"):
        ops.rms_norm(x, residual=x[0])
    with pytest.raises(KernelError, match=r"'x' of op 'layer_norm': got int32, expected"):
        ops.layer_norm(np.ones((3, 4), np.int32))


@pytest.mark.parametrize("n", [4096, 8192, 1 << 17])
def test_sums_of_long_rows_are_not_coarse(n: int) -> None:
    """What a mean is off by is 300 times as much after the division by the root of eps."""
    assert ops.layer_norm(torch.full((2, n), 0.7)).abs().max().item() < 1e-3


def test_eps_has_the_digits_of_sums() -> None:
    x, w = torch.randn(3, 40, dtype=torch.float64) * 1e-3, torch.randn(40, dtype=torch.float64)
    for mine, other in ((ops.rms_norm, F.rms_norm), (ops.layer_norm, F.layer_norm)):
        found = with_gradients(lambda x, w, mine=mine: mine(x, w, eps=1e-5), [x, w])
        expected = with_gradients(lambda x, w, f=other: f(x, (40,), w, eps=1e-5), [x, w])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("centered", [False, True])
def test_third_derivatives(centered: bool) -> None:
    def formula(x: torch.Tensor) -> torch.Tensor:
        c = x - x.mean(-1, keepdim=True) if centered else x
        return c * ((c * c).mean(-1, keepdim=True) + 1e-5) ** -0.5

    def third(norm: Any) -> torch.Tensor:
        x = torch.tensor([[1.0, 2.0, -0.5]], dtype=torch.float64, requires_grad=True)
        found = norm(x)[0, 0]
        for _ in range(3):
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found

    own = ops.layer_norm if centered else ops.rms_norm
    torch.testing.assert_close(third(own), third(formula), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("centered", [False, True])
def test_gradients_fit_into_the_shared_memory_of_each_gpu(centered: bool) -> None:
    """Whatever a row's length, by the CUDA programming guide's table; 1 KB is the bodies' own."""
    room = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
    bodies = [
        body
        for body in norm_weights._gradients(centered, False, False).implementations
        if body.kind == "cuda"
    ]
    assert bodies[-1].when is None
    for capability, kilobytes in room.items():
        for length in (1, 512, 513, 2049, 4096, 4097, 8192, 8193, 16384, 16385):
            known = {"N": length, "capability": capability}
            taken = next(b for b in bodies if b.when is None or b.when.evaluate(known))
            assert taken.shared.evaluate({}) <= (kilobytes - 1) * 1024


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_a_row_of_no_elements_is_0(cuda: bool, behind: int, weighted: bool) -> None:
    x = np.zeros((3, 0, 2) if behind else (3, 0), np.float32)
    weight = [np.zeros(0, np.float32)] * weighted
    for centered, family in enumerate([norm_grads.rms_norm_x_grad, norm_grads.layer_norm_x_grad]):
        with ferrule.checking(cuda=cuda) as found:
            _, *means, scale = family(behind, weighted, False)(x, *weight, 0.25, x)
        assert not found and found.launches == 1
        assert len(means) == centered and not any(mean.any() for mean in means)
        assert (scale == 2).all() and scale.shape == x.sum(1).shape
