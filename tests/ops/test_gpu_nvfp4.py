"""`nvfp4_linear`, `nvfp4_moe` and those of MXFP4 on a real GPU: every kernel, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ferrule import ops

torch = pytest.importorskip("torch")

from nvfp4_arrays import (  # noqa: E402
    Packed,
    assert_within,
    exact,
    experts_of,
    layer_of,
    matrix,
    normal,
    values,
)
from torch_cuda import ON_GPU, captured  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]
DTYPES = [torch.bfloat16, torch.float16]
ROWS = (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 130, 300, 513, 700)


def linear(mode: str, x: Any, w: Packed, scale_2: Any, bias: Any = None, **more: Any) -> Any:
    given = [x.cuda(), w.packed.cuda(), w.scale.cuda()]
    given += [scale_2.cuda()] * (mode == "nvfp4")
    y = getattr(ops, f"{mode}_linear")(*given, None if bias is None else bias.cuda(), **more)
    return y.cpu()


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_all_bytes_with_all_scales(mode: str, dtype: Any) -> None:
    """Rows of the identity give the elements, exactly, by each kernel."""
    wide = 8 if mode == "nvfp4" else 16
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(-1, wide), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8), 256 // wide)[:, None]
    if mode == "mxfp4":  # of which products with zero stay numbers
        scale = np.where(scale < 250, scale, 250)
    dense = values(mode, packed, scale)
    w = Packed(torch.tensor(packed), torch.tensor(scale), dense)
    expected = torch.tensor(dense.astype(np.float32)).to(dtype)
    if dtype == torch.float16:
        finite = torch.isfinite(expected) | torch.isnan(torch.tensor(dense))
    else:
        finite = torch.isfinite(expected) | torch.isnan(expected)
    rows = finite.all(1)
    eye = torch.eye(2 * wide, dtype=dtype)
    for m in ROWS:
        x = eye[torch.arange(m) % (2 * wide)]
        y = linear(mode, x, w, torch.tensor(1.0))
        rows_of_y = expected.T[torch.arange(m) % (2 * wide)][:, rows]
        torch.testing.assert_close(y[:, rows], rows_of_y, rtol=0, atol=0, equal_nan=True)
        if m > 64:
            y = linear(mode, x, w, torch.tensor(1.0), backend="packed")
            torch.testing.assert_close(y[:, rows], rows_of_y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("sizes", [(3000, 4096, 1700), (300, 16384, 1600), (2050, 8208, 1590)])
def test_blocks_that_share_works(mode: str, sizes: tuple[int, int, int]) -> None:
    """Each leaves its sums to the one that has the end of K: the same in each call."""
    n, k, m = sizes
    k = k // 32 * 32
    w = torch.randn(n, k, device="cuda").bfloat16()
    how: dict[str, Any] = {"mode": mode}
    packed, scale = ops.quantize(w, **how)
    arrays = [packed.view(torch.uint8), scale, *[torch.tensor(0.5).cuda()] * (mode == "nvfp4")]
    bias = torch.randn(n, device="cuda").bfloat16()
    linear = getattr(ops, f"{mode}_linear")
    dense = ops.dequantize(packed, scale, **how, dtype="float32").double()
    dense = dense * 0.5 if mode == "nvfp4" else dense
    for _ in range(4):
        x = torch.randn(m, k, device="cuda").bfloat16()
        y = linear(x, *arrays, bias, backend="packed")
        expected = x.double() @ dense.mT + bias.double()
        bound = 2.0**-8 * expected.abs() + k * 2.0**-23 * (x.double().abs() @ dense.abs().mT)
        assert ((y.double() - expected).abs() <= bound).all()
        for _ in range(8):
            assert torch.equal(y, linear(x, *arrays, bias, backend="packed"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_products(mode: str, dtype: Any) -> None:
    """One factor, one for each row, and what is added; twice the same."""
    random = np.random.default_rng(0)
    for n, k in ((192, 384), (137, 1152), (4096, 512)):
        w, bias = matrix(random, n, k, mode=mode), normal(random, dtype, n)
        for m, by_row, added in itertools.product(ROWS, (False, True), (None, bias)):
            scale_2 = normal(random, torch.float32, n if by_row else 1)
            x = normal(random, dtype, m, k)
            y = linear(mode, x, w, scale_2, added)
            by = exact(scale_2) if mode == "nvfp4" else 1.0
            expected = exact(x) @ w.values.T * by + (0 if added is None else exact(added))
            terms = np.abs(exact(x)) @ np.abs(w.values).T * np.abs(by) + np.abs(expected)
            assert_within(y, expected, terms, 2 * k, dtype)
            assert torch.equal(y, linear(mode, x, w, scale_2, added))
            backend = "packed" if n == 137 else "dequantize"
            y = linear(mode, x, w, scale_2, added, backend=backend)
            assert_within(y, expected, terms, 2 * k, dtype)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_matrices_that_begin_anywhere(mode: str) -> None:
    random = np.random.default_rng(1)
    w = matrix(random, 70, 352, mode=mode)
    scale_2 = torch.tensor(0.5)
    memory = torch.zeros(w.packed.numel() + 3, dtype=torch.uint8, device="cuda")
    memory[3:] = w.packed.flatten().cuda()
    other = w._replace(packed=memory[3:].view(w.packed.shape))
    for m in ROWS:
        x = normal(random, torch.bfloat16, m, 352)
        assert torch.equal(linear(mode, x, other, scale_2), linear(mode, x, w, scale_2))


def test_high_matrices_and_gradients() -> None:
    random = np.random.default_rng(2)
    for n in (5000, 9000, 13000, 20000):
        w, scale_2 = matrix(random, n, 128), normal(random, torch.float32, n)
        for m in (1, 9, 16, 40):
            x = normal(random, torch.bfloat16, m, 128)
            expected = exact(x) @ w.values.T * exact(scale_2)
            terms = np.abs(exact(x)) @ np.abs(w.values).T * np.abs(exact(scale_2))
            assert_within(linear("nvfp4", x, w, scale_2), expected, terms, 256, torch.bfloat16)
    x = normal(random, torch.bfloat16, 9, 128).cuda().requires_grad_()
    y = ops.nvfp4_linear(x, w.packed.cuda(), w.scale.cuda(), 2.0)
    c = normal(random, torch.bfloat16, *y.shape)
    (found,) = torch.autograd.grad(y, x, c.cuda())
    expected = 2 * exact(c) @ w.values
    terms = 2 * np.abs(exact(c)) @ np.abs(w.values)
    assert_within(found.cpu(), expected, terms, 40000, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 8, 40, 100, 600])
def test_captured(m: int) -> None:
    """A graph is replayed with other inputs."""
    random = np.random.default_rng(3)
    w, bias = matrix(random, 256, 512), normal(random, torch.bfloat16, 256).cuda()
    given = [w.packed.cuda(), w.scale.cuda(), torch.rand(256, device="cuda"), bias]
    x = normal(random, torch.bfloat16, m, 512).cuda()
    graph, y = captured(lambda: ops.nvfp4_linear(x, *given))
    for _ in range(3):
        x.copy_(normal(random, torch.bfloat16, m, 512))
        graph.replay()
        assert torch.equal(y, ops.nvfp4_linear(x, *given))


# -- experts --------------------------------------------------------------------------------------


SIZES = [  # M, H, I, E, k
    (1, 128, 64, 8, 2), (1, 2048, 1056, 16, 8), (3, 512, 1040, 4, 4), (8, 1024, 96, 32, 8),
    (33, 256, 176, 8, 2), (40, 272, 80, 5, 3), (130, 192, 128, 8, 4), (500, 128, 64, 3, 2),
    (700, 64, 32, 130, 8),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(sizes: Any, dtype: Any) -> None:
    m, h, i, e, k = sizes
    random = np.random.default_rng(m)
    for mode in ("nvfp4", "mxfp4"):
        if mode == "mxfp4" and (h % 32 or i % 32):
            continue
        of = experts_of(random, mode, e, h, i)
        ids = torch.tensor(random.integers(-1, e + 1, (m, k)))
        ids[: m // 3] = 1  # one that is busy, and twice for a token
        x, weights = normal(random, dtype, m, h), torch.tensor(random.random((m, k))).float()
        for mapped, on_input, activation in (
            (False, False, "silu"), (True, False, "gelu_tanh"), (False, True, "silu"),
        ):  # fmt: skip
            place = torch.tensor(random.integers(-1, e, e + 2), dtype=torch.int32)
            places = place if mapped else None
            given = [x, weights, ids.to(torch.int32 if mapped else torch.int64), *of.given]
            on_gpu = [a.cuda() for a in given]
            more = [None if places is None else places.cuda(), activation, on_input]
            op = getattr(ops, f"{mode}_moe")
            y = op(*on_gpu, *more)
            expected, bound = layer_of(of, x, weights, ids, places, activation, on_input)
            error = np.abs(exact(y.cpu()) - expected)
            assert (error <= bound).all(), (mode, mapped, on_input, (error - bound).max())
            assert torch.equal(y, op(*on_gpu, *more))  # twice the same


def test_experts_in_a_graph() -> None:
    random = np.random.default_rng(4)
    of = experts_of(random, "nvfp4", 8, 256, 128)
    matrices = [a.cuda() for a in of.given]
    for m in (1, 7, 64):
        x = normal(random, torch.bfloat16, m, 256).cuda()
        weights, ids = torch.rand(m, 4, device="cuda"), torch.zeros(m, 4, device="cuda").long()
        graph, y = captured(lambda: ops.nvfp4_moe(x, weights, ids, *matrices))  # noqa: B023
        for _ in range(3):
            x.copy_(normal(random, torch.bfloat16, m, 256))
            ids.copy_(torch.tensor(random.integers(-1, 8, (m, 4))))
            graph.replay()
            assert torch.equal(y, ops.nvfp4_moe(x, weights, ids, *matrices))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_agrees(dtype: Any) -> None:
    random = np.random.default_rng(5)
    of = experts_of(random, "nvfp4", 6, 256, 96)
    x, weights = normal(random, dtype, 20, 256), torch.rand(20, 3)
    ids = torch.tensor(random.integers(0, 6, (20, 3)))
    given = [a.cuda() for a in (x, weights, ids, *of.given)]
    y, other = ops.nvfp4_moe(*given), ops.nvfp4_moe(*given, backend="reference")
    _, bound = layer_of(of, x, weights, ids, None, "silu", False)
    assert (np.abs(exact(y.cpu()) - exact(other.cpu())) <= 2 * bound).all()
    given[0].requires_grad_()
    given[1].requires_grad_()
    c = torch.randn_like(y)
    found = torch.autograd.grad(ops.nvfp4_moe(*given), given[:2], c)
    on_cpu = [a.detach().cpu().requires_grad_(a.requires_grad) for a in given]
    expected = torch.autograd.grad(ops.nvfp4_moe(*on_cpu), on_cpu[:2], c.cpu())
    for a, b in zip(found, expected, strict=True):
        near = 2.0**-6 * float(b.abs().max())
        torch.testing.assert_close(a.cpu(), b, rtol=2.0**-6, atol=near)
