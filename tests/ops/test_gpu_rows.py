"""Norms, softmaxes and rope on a real GPU, by both of their bodies."""

from __future__ import annotations

from typing import Any

import pytest

import on_cuda
from ferrule import ops

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (on_cuda.available() and torch.cuda.is_available()), reason="there is no GPU for torch"
    ),
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # float64
]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = (1, 3, 33, 1000, 1024, 4097, 16384, 40000)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows(length: int, dtype: Any) -> None:
    wide = dtype == torch.float64
    weights = torch.randn(2, length, device="cuda").to(dtype)
    w, b = weights
    memory = (torch.randn(9 * length + 1, device="cuda") * 3).to(dtype)
    for x in (memory[: 9 * length].view(9, length), memory[1:].view(9, length)):
        d = x.double()
        calls = [
            (ops.norms._rms_norm(0, True, False, wide), (x, w, 1e-5),
             F.rms_norm(d, (length,), w.double(), 1e-5)),
            (ops.norms._layer_norm(0, True, True, wide), (x, w, b, 1e-5),
             F.layer_norm(d, (length,), w.double(), b.double())),
            (ops.softmaxes._softmax(0, wide), (x,), d.softmax(-1)),
            (ops.softmaxes._log_softmax(0, wide), (x,), d.log_softmax(-1)),
        ]  # fmt: skip
        for op, inputs, expected in calls:
            if op.name == "layer_norm" and length == 1:
                continue  # differences from the mean are what rounding makes of them
            for kind in ("metal",) if wide else ("cuda", "metal"):
                error = (op.using(kind)(*inputs).double() - expected).abs().max()
                assert error <= TOLERANCE[dtype] * max(1, expected.abs().max()), (op.name, kind)


@pytest.mark.parametrize("length", [3, 24, 5000])
def test_extremes(length: int) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 1, 2], [-inf] * 3, [inf, 1, 2], [nan, -inf, 2], [3e38] * 3, [-3e38] * 3]
    x = torch.tensor(rows, device="cuda").repeat_interleave(-(-length // 3), 1)[:, :length]
    for given in (x.contiguous(), x.double()):
        torch.testing.assert_close(ops.softmax(given), given.softmax(-1), equal_nan=True)
        torch.testing.assert_close(ops.log_softmax(given), given.log_softmax(-1), equal_nan=True)


def test_gradients_other_axes_and_empty_rows() -> None:
    x = torch.randn(40, 70, 9, device="cuda", requires_grad=True)
    w = torch.randn(70, device="cuda", requires_grad=True)
    c = torch.randn_like(x)
    y = F.layer_norm(x.transpose(1, 2), (70,), w).transpose(1, 2)
    expected = torch.autograd.grad(y, (x, w), c)
    found = torch.autograd.grad(ops.layer_norm(x, w, axis=1), (x, w), c)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for axis in (0, 1, 2):
        torch.testing.assert_close(ops.softmax(x, axis), x.softmax(axis))
    assert ops.softmax(x[:0]).shape == (0, 70, 9)
    assert ops.rms_norm(x[..., :0]).shape == (40, 70, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope(dtype: Any) -> None:
    # Angles of up to 132 are float32: the two devices' powers may differ by a few of their last bits.
    close = {"atol": 132 * 2**-20, "rtol": 0.016 if dtype == torch.bfloat16 else 1e-5}
    x = torch.randn(2, 5, 130, 80, device="cuda").to(dtype)
    expected = ops.rope(x.cpu(), 64, offset=3).cuda()
    torch.testing.assert_close(ops.rope(x, 64, offset=3), expected, **close)
    torch.testing.assert_close(ops.rope_(x, 64, offset=3), expected, **close)
