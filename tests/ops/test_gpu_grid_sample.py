"""`ferrule.ops.grid_sample` on a GPU: CUDA bodies and Metal ones, against torch on the CPU."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrule.ops import grid_sample, sampling

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),
]
CASES = [
    ("bilinear", "zeros", False, "NHWC"),
    ("bicubic", "reflection", True, "NHWC"),
    ("bilinear", "border", True, "NDHWC"),
    ("bilinear", "reflection", False, "NCHW"),
    ("nearest", "zeros", True, "NCDHW"),
]


def expected(x: Any, grid: Any, cotangent: Any, case: Any) -> list[Any]:
    """Samples and gradients of torch, on the CPU in float64."""
    x, grid, cotangent = (a.detach().cpu().double() for a in (x, grid, cotangent))
    mode, padding, corners, layout = case
    x.requires_grad_(), grid.requires_grad_()
    first = x.movedim(-1, 1) if layout[-1] == "C" else x
    y = torch.nn.functional.grid_sample(first, grid, mode, padding, corners)
    y = y.movedim(1, -1) if layout[-1] == "C" else y
    return [y, *torch.autograd.grad(y, (x, grid), cotangent)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [1, 3, 8, 24, 320])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_torchs(case: Any, channels: int, dtype: Any, deterministic: bool) -> None:
    dims = len(case[3]) - 2
    size = (2, channels, *(5, 4, 6)[-dims:])
    x = torch.rand(size, device="cuda").to(dtype)
    points = (3, 5, 4) if dims == 3 else (7, 6)
    wide = dtype if dtype == torch.float64 else torch.float32  # places of halves would differ
    grid = (torch.rand(2, *points, dims, device="cuda") * 3 - 1.5).to(wide)
    if case[3][-1] == "C":
        x = x.movedim(1, -1).contiguous()
    x.requires_grad_(), grid.requires_grad_()
    y = grid_sample(x, grid, *case, deterministic=deterministic)
    cotangent = torch.rand(y.shape, device="cuda").to(dtype)
    got = [y, *torch.autograd.grad(y, (x, grid), cotangent)]
    bound = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 3e-2)
    for mine, theirs in zip(got, expected(x, grid, cotangent, case), strict=True):
        largest = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=bound, atol=bound * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_is_what_the_bench_has_by_hand(dtype: Any) -> None:
    by_hand = pytest.importorskip("ferrule_bench.ready.by_hand")
    x = torch.rand(2, 9, 8, 64, device="cuda").to(dtype).requires_grad_()
    grid = (torch.rand(2, 8, 16, 2, device="cuda") * 3 - 1.5).to(dtype).requires_grad_()
    if not by_hand.fits([x, grid]):
        pytest.skip("this GPU adds no 16 bytes at once")
    cotangent = torch.rand(2, 8, 16, 64, device="cuda").to(dtype)
    found, expected = (
        [y, *torch.autograd.grad(y, (x, grid), cotangent)]
        for y in (by_hand.sample(x, grid), grid_sample(x, grid))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize(("channels", "height", "skipped"), [(1, 5, 0), (3, 5, 0), (6, 8, 3)])
def test_planes_that_no_words_divide(
    channels: int, height: int, skipped: int, mode: str, dtype: Any
) -> None:
    """Planes of an odd number of pixels, and such as begin at no multiple of 16 bytes."""
    case = mode, "border", False, "NCHW"
    x = torch.rand(2 * channels * height * 7 + skipped, device="cuda").to(dtype)
    x = x[skipped:].view(2, channels, height, 7).requires_grad_()
    grid = (torch.rand(2, 9, 8, 2, device="cuda") * 3 - 1.5).requires_grad_()
    y = grid_sample(x, grid, *case)
    cotangent = torch.rand(y.shape, device="cuda").to(dtype)
    got = [y, *torch.autograd.grad(y, (x, grid), cotangent)]
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, theirs in zip(got, expected(x, grid, cotangent, case), strict=True):
        largest = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=bound, atol=bound * largest)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_grids_have_no_gradient_by_the_nearest_pixel(layout: str, deterministic: bool) -> None:
    """Also where pixels and cotangents are infinite, and where memory was not zero before."""
    x = torch.full((1, 2, 2, 8), float("inf"), device="cuda").requires_grad_()
    grid = torch.zeros(1, 40, 50, 2, device="cuda").requires_grad_()
    y = grid_sample(x, grid, "nearest", layout=layout, deterministic=deterministic)
    dirty = torch.full((1 << 16,), 7.0, device="cuda")
    del dirty
    gradient = torch.autograd.grad(y, grid, torch.full_like(y, float("inf")))[0]
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [8, 320])  # a lane's share once, and several times
def test_derivative_of_vectors_that_begin_anywhere(channels: int, dtype: Any) -> None:
    case = "bilinear", "border", False, "NHWC"
    size = 2 * 5 * 4 * channels
    aligned = torch.rand(size, device="cuda").to(dtype).view(2, 5, 4, channels)
    moved = torch.empty(size + 1, dtype=dtype, device="cuda")[1:].view(aligned.shape)
    moved.copy_(aligned)
    grid = torch.rand(2, 7, 6, 2, device="cuda") * 3 - 1.5
    cotangent = torch.rand(2, 7, 6, channels, device="cuda").to(dtype)
    of = []
    for x in (aligned, moved):
        x, points = x.requires_grad_(), grid.clone().requires_grad_()
        y = grid_sample(x, points, *case)
        of.append(torch.autograd.grad(y, (x, points), cotangent))
    rounding = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(*of, strict=True):  # terms are added in any order
        atol = rounding * max(1.0, one.abs().max().item())
        torch.testing.assert_close(one, other, rtol=rounding, atol=atol)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_bodies_agree(case: Any) -> None:
    """Vectors that do not begin at a multiple of 16 bytes, and the Metal body."""
    x = torch.rand(2 * 5 * 4 * 8 + 1, device="cuda")[1:].view(2, 5, 4, 8)
    grid = torch.rand(2, 7, 6, 2, device="cuda") * 3 - 1.5
    op = sampling.sampler(*case, False)
    torch.testing.assert_close(op.using("cuda")(x, grid), op.using("metal")(x, grid))


@pytest.fixture
def memory() -> Iterator[None]:
    """Much of the GPU's: one test at a time, of all processes."""
    with (Path(tempfile.gettempdir()) / "ferrule_gpu_memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("channels", [1, 8])  # one by one, and in vectors
@pytest.mark.parametrize("body", ["cuda", "metal"])
def test_more_pixels_than_32_bits_count(body: str, channels: int) -> None:
    """The first, middle and last pixel of the last of two images, and their gradients."""
    width = 2**15 // channels
    x = torch.zeros(2, 2**15 + 1, width, channels, device="cuda", dtype=torch.float16)
    assert x.numel() > 2**31
    at = [(1, 0, 0, -1), (1, 2**14, width // 2, -1), (1, -1, -1, -1)]
    for value, place in enumerate(at, 1):
        x[place] = value
    # To the middles of pixels, of which an even number has none in its middle.
    column = torch.tensor([-1, 1 / (width - 1), 1], device="cuda")
    grid = torch.stack((column, torch.tensor([-1.0, 0, 1], device="cuda")), -1)[None, None]
    grid = torch.cat((grid.flip(2), grid))
    op = sampling.sampler("nearest", "zeros", True, "NHWC", False).using(body)
    x.requires_grad_()
    y = op(x, grid)
    assert y[1, 0, :, -1].tolist() == [1, 2, 3] and not y[0].any()
    (x_grad,) = torch.autograd.grad(y, x, torch.full_like(y, 5))
    assert [x_grad[place].item() for place in at] == [5, 5, 5]
    assert x_grad.sum(dtype=torch.float32) == 6 * channels * 5


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("body", ["cuda", "metal"])
def test_more_samples_than_32_bits_count(body: str) -> None:
    x = torch.arange(32.0, device="cuda", dtype=torch.float16).view(1, 2, 2, 8)
    grid = torch.full((1, 2**14 + 1, 2**14, 2), -1.0, device="cuda", dtype=torch.float16)
    grid[0, -1, -1] = 1
    op = sampling.sampler("bilinear", "border", True, "NHWC", False).using(body)
    y = op(x, grid)
    assert y.numel() > 2**31
    assert torch.equal(y[0, -1, -1], x[0, 1, 1]) and torch.equal(y[0, -1, -2], x[0, 0, 0])
    assert torch.equal(y[0, :-1].amax((0, 1)), x[0, 0, 0])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_bits(dtype: Any, layout: str) -> None:
    """Many samples of few pixels, whose terms arrive in another order each time."""
    shape = (2, 9, 11, 8) if layout == "NHWC" else (2, 8, 9, 11)
    x = torch.randn(shape, device="cuda").to(dtype)
    grid = torch.rand(2, 300, 200, 2, device="cuda") * 2.2 - 1.1

    def gradient(x: Any) -> Any:
        given = x.detach().requires_grad_()
        y = grid_sample(given, grid, layout=layout)
        c = torch.linspace(-1, 1, y.numel(), device="cuda").sin().view(y.shape).to(dtype)
        return torch.autograd.grad(y, given, c.to(x.dtype))[0]

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradient(x) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, other) for other in others)
    exact = gradient(x.double())
    error = (first.double() - exact).abs().max()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2) * exact.abs().max()
