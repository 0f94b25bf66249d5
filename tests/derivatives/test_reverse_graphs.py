"""Derived gradients in graphs: torch's compile, vmap, checkpoints and opcheck; MLX's compile."""

from __future__ import annotations

from typing import Any

import pytest

import ferrule
from derived_bodies import BODIES, I

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
SCAN = "float h = 0;\nfor (int t = 0; t < L; ++t) { h = tanh(h + x[t * N + i]); }\ny[i] = h;"


@pytest.fixture(scope="module")
def rows() -> ferrule.Op:
    body = BODIES["rows"]
    op = ferrule.op("rows_in_graphs", body.rule, metal=body.source, **body.more)
    op.derive_vjp()
    return op


@pytest.fixture(scope="module")
def scan() -> ferrule.Op:
    op = ferrule.op(
        "scan_in_graphs", "x[L,N]:float32 -> y[N]:float32", metal=I + SCAN, grid="N", threadgroup=64
    )
    op.derive_vjp()
    return op


def test_torch(rows: ferrule.Op, scan: ferrule.Op) -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(x: Any, w: Any) -> Any:
        return torch.sin(rows(x, w, 1e-5)).sum() + scan(x).sum()

    def gradients(function: Any, n: int) -> Any:
        generator = torch.Generator().manual_seed(n)
        xs = [torch.randn(*s, generator=generator, requires_grad=True) for s in ((n, 100), (100,))]
        return torch.autograd.grad(function(*xs), xs)

    compiled = torch.compile(loss, dynamic=True)
    for n in (3, 5):
        wanted = gradients(loss, n)
        for other in (compiled, lambda *xs: checkpoint(loss, *xs, use_reentrant=False)):
            for one, exact in zip(gradients(other, n), wanted, strict=True):
                assert (one - exact).abs().max() < 1e-5
    x, w = torch.randn(3, 100, requires_grad=True), torch.randn(100, requires_grad=True)
    torch.library.opcheck(rows.torch_op, (x, w, 1e-5))
    torch.library.opcheck(scan.torch_op, (x,))


@pytest.mark.filterwarnings("ignore:.*is called 4 times by vmap")
def test_torch_vmap(rows: ferrule.Op) -> None:
    x, w = torch.randn(4, 3, 100), torch.randn(100)
    one = torch.func.grad(lambda x: torch.sin(rows(x, w, 1e-5)).sum())
    given = torch.func.vmap(one)(x)
    assert (given - torch.stack([one(each) for each in x])).abs().max() < 1e-5


@pytest.mark.parametrize("shapeless", [False, True])
def test_mlx(rows: ferrule.Op, scan: ferrule.Op, shapeless: bool) -> None:
    def loss(x: Any, w: Any) -> Any:
        return mx.sin(rows(x, w, 1e-5)).sum() + scan(x).sum()

    def twin(x: Any, w: Any) -> Any:
        h = mx.zeros_like(x[0])
        for row in range(x.shape[0]):
            h = mx.tanh(h + x[row])
        return mx.sin(mx.fast.rms_norm(x, w, 1e-5)).sum() + h.sum()

    compiled = mx.compile(mx.grad(loss, (0, 1)), shapeless=shapeless)
    for n in (3, 5):
        x, w = mx.random.normal((n, 100)), mx.random.normal((100,))
        for one, other in zip(compiled(x, w), mx.grad(twin, (0, 1))(x, w), strict=True):
            assert float(mx.abs(one - other).max()) < 1e-4
    x, w = x.astype(mx.float16), w.astype(mx.float16)
    half = mx.grad(lambda x: rows(x, w, 1e-5).sum())(x)
    assert half.dtype == mx.float16


@pytest.mark.filterwarnings("ignore:.*is called 4 times by vmap")
def test_mlx_vmap(rows: ferrule.Op) -> None:
    x, w = mx.random.normal((4, 3, 100)), mx.random.normal((100,))
    one = mx.grad(lambda x, w: mx.sin(rows(x, w, 1e-5)).sum())
    wanted = mx.stack([one(x[k], w) for k in range(4)])
    assert float(mx.abs(mx.vmap(one, (0, None))(x, w) - wanted).max()) < 1e-5
