"""Forward derivatives and batches of `nvfp4_linear` and `nvfp4_moe`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward
from torch.func import jacfwd, jvp, vjp, vmap

from ferrule import KernelError, ops
from nvfp4_arrays import experts_of, matrix, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # Of batches of biases, of matrices, and of some of a mixture's inputs alone.
    pytest.mark.filterwarnings("ignore:op .* times by vmap:ferrule.FerruleWarning"),
]


def linear_of(mode: str, by_row: bool = False) -> tuple[Any, Any, Any]:
    """A product with some matrix, x, and a bias."""
    random = np.random.default_rng(0)
    w = matrix(random, 6, 64, mode=mode)
    x, bias = normal(random, torch.float32, 3, 64), normal(random, torch.float32, 6)
    if mode == "mxfp4":
        return lambda x, bias=None: ops.mxfp4_linear(x, w.packed, w.scale, bias), x, bias
    scale_2 = normal(random, torch.float32, 6) if by_row else torch.tensor(0.3)
    return lambda x, bias=None: ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias), x, bias


@pytest.mark.parametrize(("mode", "by_row"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
@pytest.mark.parametrize("biased", [False, True])
def test_tangents_of_a_product(mode: str, by_row: bool, biased: bool) -> None:
    f, x, bias = linear_of(mode, by_row)
    given = (x, bias) if biased else (x,)
    tangents = tuple(torch.randn_like(a) for a in given)
    y, found = jvp(f, given, tangents)
    torch.testing.assert_close(y, f(*given))
    expected = f(*tangents)  # it is linear
    torch.testing.assert_close(found, expected)
    with forward.dual_level():
        dual = f(*[forward.make_dual(a, t) for a, t in zip(given, tangents, strict=True)])
        torch.testing.assert_close(forward.unpack_dual(dual).tangent, expected)
    of_x = torch.eye(64) @ (f(torch.eye(64)))  # [K, N], the transposed matrix
    torch.testing.assert_close(jacfwd(f)(x[0]), of_x.T, rtol=1e-4, atol=1e-4)
    if biased:
        of_bias = jvp(lambda bias: f(x, bias), (bias,), (tangents[1],))[1]
        torch.testing.assert_close(of_bias, tangents[1].expand(3, 6))


ROUTED = torch.tensor([[0, 1], [2, 2], [-1, 1], [5, 0], [1, 2]])


def moe_of(mode: str, activation: str = "silu", on_input: bool = False) -> tuple[Any, Any, Any]:
    """A mixture of 3 experts, tokens and weights; some ids name none."""
    random = np.random.default_rng(1)
    of = experts_of(random, mode, 3, 32, 64)
    x, weights = normal(random, torch.float32, 5, 32) / 8, normal(random, torch.float32, 5, 2)

    def layer(x: Any, weights: Any, ids: Any = ROUTED) -> Any:
        return getattr(ops, f"{mode}_moe")(x, weights, ids, *of.given, None, activation, on_input)

    return layer, x, weights


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_tangents_of_a_mixture(mode: str, activation: str, on_input: bool) -> None:
    """<c, J t> is <J' c, t>, of all inputs and of each alone; and that which differences give."""
    layer, x, weights = moe_of(mode, activation, on_input)
    c = torch.randn(5, 32)
    tangents = torch.randn(5, 32), torch.randn(5, 2)
    gradients = vjp(layer, x, weights)[1](c)
    for of_x, of_weights in ((True, True), (True, False), (False, True)):
        chosen = [i for i, there in enumerate((of_x, of_weights)) if there]

        def some(*moved: Any, chosen: Any = chosen) -> Any:
            given = [x, weights]
            for i, value in zip(chosen, moved, strict=True):
                given[i] = value
            return layer(*given)

        primals = tuple((x, weights)[i] for i in chosen)
        y, found = jvp(some, primals, tuple(tangents[i] for i in chosen))
        torch.testing.assert_close(y, layer(x, weights))
        expected = sum((gradients[i] * tangents[i]).sum() for i in chosen)
        torch.testing.assert_close((found * c).sum(), expected, rtol=1e-3, atol=1e-2)
        with forward.dual_level():
            duals = [
                forward.make_dual(p, tangents[i]) for p, i in zip(primals, chosen, strict=True)
            ]
            torch.testing.assert_close(forward.unpack_dual(some(*duals)).tangent, found)
    step = 2.0**-8
    moved = [layer(*(a + s * step * t for a, t in zip((x, weights), tangents, strict=True)))
             for s in (1, -1)]  # fmt: skip
    found = jvp(layer, (x, weights), tangents)[1]
    near = (moved[0] - moved[1]) / (2 * step)
    assert (near - found).norm() <= 2e-2 * found.norm()


def test_only_some_inputs_have_tangents() -> None:
    random = np.random.default_rng(2)
    w, of = matrix(random, 6, 64), experts_of(random, "nvfp4", 3, 32, 64)
    x, one = normal(random, torch.float32, 3, 64), torch.ones(())
    with pytest.raises(KernelError, match="no derivative with respect to 'w_scale_2'"):
        jvp(lambda s: ops.nvfp4_linear(x, w.packed, w.scale, s), (one,), (one,))
    given = normal(random, torch.float32, 5, 32), torch.rand(5, 2), ROUTED, *of.given
    with pytest.raises(KernelError, match="no derivative with respect to matrices"):
        jvp(lambda s: ops.nvfp4_moe(*given[:8], s), (given[8],), (given[8],))


def test_tangents_in_mlx() -> None:
    mx = pytest.importorskip("mlx.core")
    random = np.random.default_rng(3)
    w, of = matrix(random, 6, 64), experts_of(random, "nvfp4", 3, 32, 64)
    x, t = normal(random, torch.float32, 3, 64), normal(random, torch.float32, 3, 64)
    packed, scale = (mx.array(a.view(torch.uint8).numpy()) for a in (w.packed, w.scale))
    bias = mx.zeros(6)

    def product(x: Any, bias: Any) -> Any:
        return ops.nvfp4_linear(x, packed, scale, 0.5, bias)

    moved = [mx.array(a.numpy()) for a in (x, t)]
    _, (found,) = mx.jvp(product, [moved[0], bias], [moved[1], mx.ones(6)])
    expected = ops.nvfp4_linear(t, w.packed, w.scale, 0.5) + 1
    np.testing.assert_allclose(np.array(found), expected.numpy(), rtol=1e-4, atol=1e-4)

    given = [normal(random, torch.float32, 5, 32), torch.rand(5, 2)]
    tangents = [torch.randn(5, 32), torch.randn(5, 2)]
    matrices = [a.view(torch.uint8) if "float8" in str(a.dtype) else a for a in of.given]
    rest = [mx.array(a.numpy()) for a in (ROUTED, *matrices)]

    def mixture(x: Any, weights: Any) -> Any:
        return ops.nvfp4_moe(x, weights, *rest)

    arrays = [[mx.array(a.numpy()) for a in each] for each in (given, tangents)]
    _, (found,) = mx.jvp(mixture, *arrays)
    expected = jvp(lambda *a: ops.nvfp4_moe(*a, ROUTED, *of.given), tuple(given), tuple(tangents))
    np.testing.assert_allclose(np.array(found), expected[1].numpy(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("bias_axis", [None, 0, 1])
def test_batches_of_a_product(mode: str, axis: int, bias_axis: Any) -> None:
    f, _, _ = linear_of(mode)
    x, biases = torch.randn(4, 3, 64), torch.randn(4, 6)
    bias = biases[0] if bias_axis is None else biases.movedim(0, bias_axis)
    found = vmap(f, in_dims=(axis, bias_axis))(x.movedim(0, axis), bias)
    for i in range(4):
        expected = f(x[i], biases[0 if bias_axis is None else i])
        torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize(
    "axes", [a for a in itertools.product((0, 1, None), repeat=3) if a != (None,) * 3], ids=str
)
def test_batches_of_a_mixture(axes: tuple[Any, ...]) -> None:
    layer, _, _ = moe_of("nvfp4")
    each = torch.randn(2, 5, 32), torch.rand(2, 5, 2), torch.stack([ROUTED, ROUTED.flip(0)])
    given = [a[0] if d is None else a.movedim(0, d) for a, d in zip(each, axes, strict=True)]
    found = vmap(layer, in_dims=axes)(*given)
    for i in range(2):
        ones = [a[0 if d is None else i] for a, d in zip(each, axes, strict=True)]
        torch.testing.assert_close(found[i], layer(*ones))


def test_batches_of_matrices() -> None:
    random = np.random.default_rng(4)
    ws = [matrix(random, 6, 64) for _ in range(2)]
    packed, scale = (torch.stack([w[i].view(torch.uint8) for w in ws]) for i in range(2))
    x, scales_2 = normal(random, torch.float32, 2, 3, 64), torch.rand(2)
    found = vmap(ops.nvfp4_linear)(x, packed, scale, scales_2)
    for i, w in enumerate(ws):
        torch.testing.assert_close(found[i], ops.nvfp4_linear(x[i], w.packed, w.scale, scales_2[i]))
