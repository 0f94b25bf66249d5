"""Norms, softmaxes and rope on a real GPU, by both of their bodies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ferrule import ops

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

F = torch.nn.functional

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # float64
]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = (1, 3, 33, 1000, 1024, 4097, 5000, 16384, 20000, 40000)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows(length: int, dtype: Any) -> None:
    wide = dtype == torch.float64
    weights = torch.randn(2, length, device="cuda").to(dtype)
    w, b = weights
    memory = (torch.randn(9 * length + 1, device="cuda") * 3).to(dtype)
    for x in (memory[: 9 * length].view(9, length), memory[1:].view(9, length)):
        d, r, c = x.double(), x.flip(0), x.flip(1)
        total, y, logs = x + r, d.softmax(-1).to(dtype), d.log_softmax(-1).to(dtype)
        calls = [
            (ops.norms._rms_norm(0, True, False, wide), (x, w, 1e-5),
             F.rms_norm(d, (length,), w.double(), 1e-5)),
            (ops.norms._rms_norm(0, True, True, wide), (x, r, w, 1e-5),
             F.rms_norm(total.double(), (length,), w.double(), 1e-5)),
            (ops.norms._layer_norm(0, True, True, wide), (x, w, b, 1e-5),
             F.layer_norm(d, (length,), w.double(), b.double())),
            (ops.softmaxes._softmax(0, wide), (x,), d.softmax(-1)),
            (ops.softmaxes._log_softmax(0, wide), (x,), d.log_softmax(-1)),
            (ops.softmaxes._softmax_vjp(0, wide), (y, c),
             torch.ops.aten._softmax_backward_data(c.double(), y.double(), -1, torch.double)),
            (ops.softmaxes._log_softmax_vjp(0, wide), (logs, c), torch.ops.aten
             ._log_softmax_backward_data(c.double(), logs.double(), -1, torch.double)),
            (ops.norm_grads.rms_norm_x_grad(0, True, wide), (x, w, 1e-5, c),
             gradient(lambda d: F.rms_norm(d, (length,), w.double(), 1e-5), d, c)),
            (ops.norm_grads.layer_norm_x_grad(0, True, wide), (x, w, 1e-5, c),
             gradient(lambda d: F.layer_norm(d, (length,), w.double()), d, c)),
        ]  # fmt: skip
        for op, inputs, expected in calls:
            if op.name.startswith("layer_norm") and length <= 3:
                continue  # differences from the mean are what rounding makes of them
            for kind in ("metal",) if wide else ("cuda", "metal"):
                found = op.using(kind)(*inputs)
                found, *more = found if isinstance(found, tuple) else (found,)
                error = (found.double() - expected).abs().max()
                assert error <= TOLERANCE[dtype] * max(1, expected.abs().max()), (op.name, kind)
                if op.name == "add_rms_norm":
                    assert torch.equal(more[0], total), kind


def gradient(function: Any, x: Any, cotangent: Any) -> Any:
    """By `x`, in float64."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, cotangent.double())[0]


@pytest.mark.parametrize("rows", [1, 9, 1500])
@pytest.mark.parametrize("length", [3, 256, 1024, 2501, 16384, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weights(dtype: Any, length: int, rows: int) -> None:
    x, c = torch.randn(2, rows, length, device="cuda").to(dtype)
    w, b = torch.randn(2, length, device="cuda").to(dtype)
    doubles = [t.double().requires_grad_() for t in (x, w, b)]
    given = [t.requires_grad_() for t in (x, w, b)]
    for norm, torch_norm, count in (
        (ops.rms_norm, F.rms_norm, 2),
        (ops.layer_norm, F.layer_norm, 3),
    ):
        found = torch.autograd.grad(norm(*given[:count]), given[:count], c)
        more = {"eps": 1e-5} if count == 2 else {"bias": doubles[2]}
        y = torch_norm(doubles[0], (length,), doubles[1], **more)
        expected = torch.autograd.grad(y, doubles[:count], c.double())
        for one, other in zip(found, expected, strict=True):
            error = (one.double() - other).abs().max()
            assert error <= TOLERANCE[dtype] * max(1, other.abs().max())


@pytest.mark.parametrize("length", [3, 24, 5000])
def test_extremes(length: int) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 1, 2], [-inf] * 3, [inf, 1, 2], [nan, -inf, 2], [3e38] * 3, [-3e38] * 3]
    x = torch.tensor(rows, device="cuda").repeat_interleave(-(-length // 3), 1)[:, :length]
    for given in (x.contiguous(), x.double(), x.bfloat16()):
        torch.testing.assert_close(ops.softmax(given), given.softmax(-1), equal_nan=True)
        torch.testing.assert_close(ops.log_softmax(given), given.log_softmax(-1), equal_nan=True)


@pytest.mark.parametrize("first", [0.0, 3e3])
@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("length", [24, 1024, 3000, 16384, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layer_norm_far_from_zero(dtype: Any, length: int, mean: float, first: float) -> None:
    """Rows far from zero, whose first elements are far from all others: no worse than torch's."""
    x = torch.randn(9, length, device="cuda") + mean
    x[:, ::64] += first  # what some threads see first
    x, (w, c) = x.to(dtype), torch.randn(2, length, device="cuda").to(dtype)

    def results(norm: Any, *given: Any) -> Any:
        x, w = (array.detach().requires_grad_() for array in given)
        y = norm(x, w)
        return (y, *torch.autograd.grad(y, (x, w), c.to(y.dtype).expand_as(y)))

    def torch_norm(x: Any, w: Any) -> Any:
        return F.layer_norm(x, (length,), w)

    exact = results(torch_norm, x.double(), w.double())
    for found, other, y in zip(
        results(ops.layer_norm, x, w), results(torch_norm, x, w), exact, strict=True
    ):
        allowed = 4 * (other.double() - y).abs().max() + 1e-5 * y.abs().max()
        assert (found.double() - y).abs().max() <= allowed


@pytest.mark.parametrize("length", [1000, 2048, 4096, 16384, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_of_one_large_element(dtype: Any, length: int) -> None:
    """A sum of squares that is finite is found, and one that is not gives zeros as in torch."""
    w, c = torch.randn(2, length, device="cuda").to(dtype)
    for largest in (1e18, 6e18, 1.5e19, 1e25):
        x = torch.randn(3, length, device="cuda").to(dtype)
        x[:, 0] = x[:, length // 2] = largest
        x, w = x.requires_grad_(), w.detach().requires_grad_()
        y = ops.layer_norm(x, w)
        assert all(
            a.isfinite().all() for a in (y, *torch.autograd.grad(y, (x, w), c.expand(x.shape)))
        )
        if largest < 1e19:
            expected = F.layer_norm(x.double(), (length,), w.double())
            error = (y.double() - expected).abs().max()
            assert error <= TOLERANCE[dtype] * expected.abs().max()


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


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rope(dtype: Any, traditional: bool) -> None:
    # Angles of up to 132 are float32: powers of the two devices may differ in their last bits.
    close = {"atol": 132 * 2**-20, "rtol": 1e-5 if dtype == torch.float32 else 0.016}
    memory = torch.randn(2 * 5 * 130 * 80 + 1).to(dtype)
    for host in (memory[1:].view(2, 5, 130, 80), memory[1:].clone().view(2, 5, 130, 80)):
        for dims in (80, 64, 6):
            freqs = torch.rand(dims // 2) + 0.5
            offsets = 3, torch.tensor(3), torch.tensor([0, 7], dtype=torch.int32)
            for offset, freq in itertools.product(offsets, (None, freqs)):
                given, by = [t.cuda() if isinstance(t, torch.Tensor) else t for t in (offset, freq)]
                expected = ops.rope(host, dims, traditional, offset=offset, freqs=freq).cuda()
                x = host.cuda() if host.storage_offset() == 0 else memory.cuda()[1:].view_as(host)
                for rope in (ops.rope, ops.rope_):
                    found = rope(x, dims, traditional, offset=given, freqs=by)
                    torch.testing.assert_close(found, expected, **close)


def test_segments() -> None:
    ids = torch.randint(-1, 71, (3000,), device="cuda")
    for columns, dtype in itertools.product((1, 4, 64, 70), (torch.float32, torch.bfloat16)):
        x = torch.randint(-2, 3, (3001, columns), device="cuda").to(dtype)[1:]
        inside = torch.where((ids >= 0) & (ids < 70), ids, 70)
        expected = torch.zeros(71, columns, device="cuda").index_add_(0, inside, x.float())[:70]
        assert torch.equal(ops.segment_sum(x, ids, 70), expected.to(dtype))


def test_histogram() -> None:
    for size in (0, 1, 1000, 300_001):
        x = torch.randn(size + 1, device="cuda")[1:]
        expected = torch.histc(x, 50, -2, 2).int() if size else torch.zeros(50, device="cuda").int()
        assert torch.equal(ops.histogram(x, 50, -2, 2), expected)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_topk(dtype: Any, k: int) -> None:
    x = torch.randn(70, 1000).to(dtype)
    x[3] = x[3].round()  # equals
    x[4, 5:8] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    values, indices = (found.cpu() for found in ops.topk(x.cuda(), k))
    expected = x.sort(descending=True, stable=True)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(values, expected.values[:, :k], **exactly)
    assert torch.equal(indices, expected.indices[:, :k])


def test_gradients_of_topk_segments_and_matmul() -> None:
    x = torch.randn(70, 1000, device="cuda", requires_grad=True)
    c = torch.randn(70, 40, device="cuda")
    ids = torch.randint(0, 9, (70,), device="cuda")
    a, b = (torch.randn(shape, device="cuda", requires_grad=True) for shape in [(70, 50), (50, 40)])
    summed = torch.zeros(9, 1000, device="cuda")
    for found, expected, inputs, cotangent in (
        (ops.topk(x, 40)[0], x.topk(40).values, (x,), c),
        (ops.segment_sum(x, ids, 9), summed.index_add(0, ids, x), (x,), torch.ones(9, 1000).cuda()),
        (ops.matmul(a, b), a @ b, (a, b), c),
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for one, other in zip(
            torch.autograd.grad(found, inputs, cotangent),
            torch.autograd.grad(expected, inputs, cotangent),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
