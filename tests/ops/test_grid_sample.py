"""`ferrule.ops.grid_sample` against torch's, on every host."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.ops import grid_sample, sampling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # float64, and atomics on half, are not Apple's.
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),
]

Case = tuple[str, str, bool, str]
PRODUCT: list[Case] = [
    case
    for case in itertools.product(
        sampling.TAPS, sampling.PADDING_MODES, (False, True), sampling.LAYOUTS
    )
    if not (case[0] == "bicubic" and "D" in case[3])
]
# Each value of each constant, with each of the padding modes.
SOME: list[Case] = [
    ("bilinear", "zeros", False, "NHWC"),
    ("bilinear", "border", True, "NCDHW"),
    ("bilinear", "reflection", False, "NDHWC"),
    ("nearest", "zeros", True, "NDHWC"),
    ("nearest", "reflection", True, "NCHW"),
    ("bicubic", "border", False, "NCHW"),
    ("bicubic", "reflection", True, "NHWC"),
]


def inputs(layout: str, channels: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Images or volumes in a layout, and points, of which a third is outside."""
    dims = len(layout) - 2
    x = torch.rand(2, channels, *(5, 4, 6)[-dims:], dtype=dtype)
    points = (3, 5, 4) if dims == 3 else (7, 6)
    grid = torch.rand(2, *points, dims, dtype=dtype) * 3 - 1.5
    if layout[-1] == "C":
        x = x.movedim(1, -1).contiguous()
    return x.requires_grad_(), grid.requires_grad_()


def by_torch(x: Any, grid: Any, mode: str, padding: str, corners: bool, layout: str) -> Any:
    """What torch computes, in a layout."""
    if layout[-1] != "C":
        return F.grid_sample(x, grid, mode, padding, corners)
    return F.grid_sample(x.movedim(-1, 1), grid, mode, padding, corners).movedim(1, -1)


def gradients(y: Any, x: Any, grid: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)  # the same by shape alone, whatever the strides are
    return torch.autograd.grad((y * torch.rand(y.shape).to(y.dtype)).sum(), (x, grid))


def is_torchs(case: Case, **more: Any) -> None:
    """Samples and gradients are those of torch; with few channels and with many."""
    for channels in (9, 3):
        x, grid = inputs(case[3], channels)
        y, expected = grid_sample(x, grid, *case, **more), by_torch(x, grid, *case)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        got = gradients(y, x, grid)
        torch.testing.assert_close(got, gradients(expected, x, grid), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_is_torchs(case: Case) -> None:
    is_torchs(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_all_is_torchs(case: Case) -> None:
    is_torchs(case)


@pytest.mark.parametrize("case", [SOME[0], SOME[5]], ids=str)
def test_the_derivatives_of_gpus(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are right on the CPU, too: by atomics, and sorted."""
    monkeypatch.setattr(sampling, "on_cpu", lambda x: False)
    is_torchs(case)
    is_torchs(case, deterministic=True)


@settings(deadline=None, max_examples=30)
@given(
    size=st.tuples(*[st.integers(1, 5)] * 2), points=st.tuples(*[st.integers(0, 40)] * 2),
    channels=st.integers(0, 20), batch=st.integers(0, 3), last=st.booleans(),
    seed=st.integers(0, 1000), wide=st.floats(0.1, 50),
)  # fmt: skip
def test_any_sizes(
    size: tuple[int, int], points: tuple[int, int], channels: int, batch: int, last: bool,
    seed: int, wide: float,
) -> None:  # fmt: skip
    """Empty ones, too; packs and threads that have less than others."""
    torch.manual_seed(seed)
    x = torch.rand(batch, channels, *size)
    grid = (torch.rand(batch, *points, 2) * 2 - 1) * wide
    layout = "NHWC" if last else "NCHW"
    if last:
        x = x.movedim(1, -1).contiguous()
    x.requires_grad_(), grid.requires_grad_()
    case: Case = ("bilinear", "reflection", False, layout)
    y, expected = grid_sample(x, grid, *case), by_torch(x, grid, *case)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gradients(y, x, grid), gradients(expected, x, grid), rtol=1e-3, atol=1e-3 * wide
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    """Sums are in float32; points may be in float32, too, as torch's may not."""
    x, grid = inputs("NHWC")
    x, exact = x.detach().to(dtype), by_torch(x.to(dtype).float(), grid, *SOME[0])
    torch.testing.assert_close(grid_sample(x, grid), exact.to(dtype), rtol=1e-2, atol=1e-3)
    short = grid.to(dtype)
    exact = by_torch(x.float(), short.float(), *SOME[0])
    x.requires_grad_()
    y = grid_sample(x, short)
    torch.testing.assert_close(y, exact.to(dtype), rtol=1e-2, atol=1e-3)
    assert [g.dtype for g in gradients(y, x, short)] == [dtype, dtype]


@pytest.mark.parametrize("case", [SOME[0], SOME[6]], ids=str)
def test_derivatives_are_differences(case: Case) -> None:
    """The first and second, and forward mode, in float64."""
    x, grid = inputs(case[3], 2, torch.float64)
    x, grid = x.detach()[:1].requires_grad_(), grid.detach()[:1, :3, :2].requires_grad_()

    def f(x: Any, grid: Any) -> Any:
        return grid_sample(x, grid, *case)

    assert torch.autograd.gradcheck(f, (x, grid), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (x, grid))


def test_the_second_derivative_is_torchs() -> None:
    x, grid = inputs("NHWC")
    seconds = []
    for f in (grid_sample, lambda x, grid: by_torch(x, grid, *SOME[0])):
        first = torch.autograd.grad(f(x, grid).square().sum(), (x, grid), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, grid)))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", sampling.TAPS)
@pytest.mark.parametrize("padding", sampling.PADDING_MODES)
def test_numbers_that_are_none(mode: str, padding: str) -> None:
    """As torch has them, but for bilinear samples of images without padding: there torch says 0 on
    GPUs and for volumes, and NaN on CPUs."""
    x = torch.arange(1.0, 13).reshape(1, 3, 4, 1)
    bad = [math.nan, math.inf, -math.inf, 1e30, -1e10]
    grid = torch.tensor([[[[v, 0.0], [0.0, v]] for v in bad]])
    case: Case = (mode, padding, False, "NHWC")
    expected = by_torch(x, grid, *case)
    if (mode, padding) == ("bilinear", "zeros"):
        expected = expected.nan_to_num(0)
    torch.testing.assert_close(grid_sample(x, grid, *case), expected, equal_nan=True)


def test_values_outside_do_not_count() -> None:
    """An infinity at a pixel that is not sampled stays there."""
    x = torch.full((1, 2, 2, 8), math.inf)
    x[0, 1, 1] = 2
    grid = torch.tensor([[[[1.5, 1.5]]]])
    assert grid_sample(x, grid).flatten().tolist() == [0.0] * 8
    grid = torch.tensor([[[[0.9, 0.9]]]])
    torch.testing.assert_close(
        grid_sample(x, grid), by_torch(x, grid, *SOME[0]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("mode", sampling.TAPS)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_derivatives_of_numbers_that_are_none(mode: str, layout: str) -> None:
    """Pixels and cotangents that are none count where torch lets them; none does for a grid by the
    nearest pixel."""
    case: Case = (mode, "zeros", False, layout)
    x = torch.rand(1, 4, 5, 8)
    x[0, 1, 1], x[0, 3, 4] = math.inf, math.nan
    cotangent = torch.rand(1, 1, 4, 8)
    cotangent[0, 0, 2] = math.nan
    if layout == "NCHW":
        x, cotangent = (a.movedim(-1, 1).contiguous() for a in (x, cotangent))
    grid = torch.tensor([[[[-0.5, -0.4], [0.9, 0.8], [-0.9, 0.9], [0.95, -0.8]]]])
    of = []
    for sample in (grid_sample, by_torch):
        leaves = x.clone().requires_grad_(), grid.clone().requires_grad_()
        of.append(torch.autograd.grad(sample(*leaves, *case), leaves, cotangent))
    for mine, theirs in zip(*of, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        torch.testing.assert_close(mine.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0))
    assert mode != "nearest" or not of[0][1].any()


def documented(x: Any, grid: Any) -> Any:
    """The formula of MLX's documentation of custom kernels, in NumPy."""
    b, height, width, _ = x.shape
    ix = ((grid[..., 0] + 1) * width - 1) / 2
    iy = ((grid[..., 1] + 1) * height - 1) / 2
    out = np.zeros((*grid.shape[:-1], x.shape[-1]), x.dtype)
    for dy, dx in itertools.product((0, 1), repeat=2):
        i, j = np.floor(iy).astype(int) + dy, np.floor(ix).astype(int) + dx
        weight = (1 - abs(ix - j)) * (1 - abs(iy - i))
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        images = np.arange(b)[:, None, None]
        values = x[images, i.clip(0, height - 1), j.clip(0, width - 1)]
        out += (weight * inside)[..., None] * values
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_and_mlx_by_the_documentation(dtype: Any) -> None:
    x, grid = (a.detach().numpy() for a in inputs("NHWC"))
    expected = documented(x.astype(dtype).astype(np.float32), grid)
    y = grid_sample(x.astype(dtype), grid)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=1e-2, atol=2e-3)
    kind = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[y.dtype.name]
    by_mlx = grid_sample(mx.array(x).astype(kind), mx.array(grid))
    assert by_mlx.dtype == kind
    np.testing.assert_array_equal(np.array(by_mlx.astype(mx.float32)), y.astype(np.float32))


@pytest.mark.parametrize("deterministic", [False, True])
def test_mlx_graphs(deterministic: bool, tmp_path: Path) -> None:
    """Gradients of a function that is compiled once for all sizes, in a file, and of a batch."""

    def loss(x: Any, grid: Any) -> Any:
        return grid_sample(x, grid, deterministic=deterministic).square().sum()

    def expected(x: Any, grid: Any) -> Any:
        x, grid = (torch.tensor(np.array(a), requires_grad=True) for a in (x, grid))
        return torch.autograd.grad(by_torch(x, grid, *SOME[0]).square().sum(), (x, grid))

    def agree(got: Any, x: Any, grid: Any) -> None:
        for mine, theirs in zip(got, expected(x, grid), strict=True):
            np.testing.assert_allclose(np.array(mine), theirs.numpy(), rtol=1e-4, atol=1e-4)

    x, grid = (mx.array(a.detach().numpy()) for a in inputs("NHWC"))
    gradient = mx.grad(loss, argnums=(0, 1))
    compiled = mx.compile(gradient, shapeless=True)
    for sizes in ((2, 7), (1, 3)):
        part = x[: sizes[0]], grid[: sizes[0], : sizes[1]]
        agree(compiled(*part), *part)
    path = str(tmp_path / "gradient.mlxfn")
    mx.export_function(path, gradient, x, grid, shapeless=True)
    agree(ferrule.import_function(path)(x[:1], grid[:1]), x[:1], grid[:1])
    batch = mx.vmap(gradient)(x[:, None], grid[:, None])
    agree([g[:, 0] for g in batch], x, grid)


def test_torch_graphs() -> None:
    """One graph for all sizes; opcheck; export with a dynamic batch."""

    class Model(torch.nn.Module):
        def forward(self, x: Any, grid: Any) -> Any:
            return grid_sample(x, grid)

    x, grid = inputs("NHWC")
    compiled = torch.compile(Model(), fullgraph=True, dynamic=True, backend="aot_eager")
    for part in ((x, grid), (x[:, :3, :, :5], grid[:, :2])):
        leaves = [a.detach().clone().requires_grad_() for a in part]
        y, eager = compiled(*leaves), grid_sample(*leaves)
        torch.testing.assert_close(y, eager)
        torch.testing.assert_close(gradients(y, *leaves), gradients(eager, *leaves))
    op = sampling.sampler("bilinear", "zeros", False, "NHWC", False)
    torch.library.opcheck(op.torch_op, (x, grid))
    batch = torch.export.Dim("batch", max=64)
    sizes = {"x": {0: batch}, "grid": {0: batch, 1: torch.export.Dim("rows", max=512)}}
    program = torch.export.export(Model(), (x, grid), dynamic_shapes=sizes)
    other = torch.rand(3, 5, 6, 9)[:, :4], torch.rand(3, 2, 6, 2)
    torch.testing.assert_close(program.module()(*other), grid_sample(*other))


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("NHWC", "bilinear"), ("NCHW", "nearest"), ("NDHWC", "nearest"), ("NCDHW", "bilinear")],
)
def test_more_elements_than_32_bits_count(layout: str, mode: str) -> None:
    """The first, middle and last pixel of the last of two images: pages that nobody touches take
    no memory."""
    size = {"D": 3, "H": 2**15 + 1, "W": 2**14 + 1, "C": 2 if "D" not in layout else 1, "N": 2}
    x = np.zeros([size[axis] for axis in layout], np.float16)
    assert x.size > 2**31
    middle = tuple(size[axis] // 2 if axis in "DHW" else -1 for axis in layout)
    last = tuple(-1 for _ in layout)
    first = tuple(0 if axis in "DHW" else -1 for axis in layout)
    x[first], x[middle], x[last] = 1, 2, 3
    dims = len(layout) - 2
    places = np.array([-1, 0, 1], np.float32)[:, None].repeat(dims, 1)
    grid = np.stack([places[::-1], places]).reshape(2, *[1] * (dims - 1), 3, dims)
    case = (mode, "zeros", True, layout)
    found = grid_sample(x, grid, *case)
    assert not found[0].any()
    one = found[1, ..., -1] if layout[-1] == "C" else found[1, -1]
    assert one.ravel().tolist() == [1, 2, 3]
    same = grid_sample(torch.from_numpy(x), torch.from_numpy(grid), *case)
    np.testing.assert_array_equal(same.numpy(), found)


def test_inductor() -> None:
    """Code for all sizes, among torch's own operators, forward and backward."""

    def loss(x: Any, grid: Any) -> Any:
        return grid_sample(x.sin(), grid).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    x, grid = inputs("NHWC")
    for part in ((x, grid), (x[:, :3, :, :5], grid[:, :2])):
        leaves = [a.detach().clone().requires_grad_() for a in part]
        y, eager = compiled(*leaves), loss(*leaves)
        torch.testing.assert_close(y, eager)
        torch.testing.assert_close(
            torch.autograd.grad(y, leaves), torch.autograd.grad(eager, leaves)
        )


def test_vmap() -> None:
    """Of images with points each, of many images at the same points, and of many points."""
    x, grid = (a.detach() for a in inputs("NCHW"))
    xs, grids = torch.stack([x, x + 1]), torch.stack([grid, -grid])
    for axes in ((0, 0), (0, None), (None, 0)):
        values = [a if axis == 0 else a[0] for a, axis in zip((xs, grids), axes, strict=True)]
        got = torch.vmap(lambda x, grid: grid_sample(x, grid, layout="NCHW"), axes)(*values)
        for i in (0, 1):
            one = [a[i if axis == 0 else 0] for a, axis in zip((xs, grids), axes, strict=True)]
            torch.testing.assert_close(got[i], grid_sample(*one, layout="NCHW"))


def test_deterministic_as_torch_is() -> None:
    """torch's own derivative has no such way."""
    x, grid = inputs("NHWC")
    assert grid_sample(x, grid).grad_fn is not None
    torch.use_deterministic_algorithms(True)
    try:
        y = grid_sample(x, grid)
        got = gradients(y, x, grid)
        compiled = torch.compile(grid_sample, fullgraph=True, backend="aot_eager")
        again = gradients(compiled(x, grid), x, grid)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    torch.testing.assert_close(
        got, gradients(by_torch(x, grid, *SOME[0]), x, grid), rtol=1e-4, atol=1e-4
    )
    first = torch.autograd.grad(
        grid_sample(x, grid, deterministic=True).square().sum(), x, create_graph=True
    )
    with pytest.raises(ferrule.KernelError, match="has no derivative"):
        first[0].sum().backward()


def test_the_picture_is_what_is_computed() -> None:
    script = Path(__file__).parents[2] / "docs/pictures/grid_sample.py"
    picture: str = runpy.run_path(str(script))["picture"]()
    assert script.with_suffix(".svg").read_text("utf-8") == picture
    assert "0.4 · 5 + 0.1 · 6 + 0.4 · 9 + 0.1 · 10 = 7.2" in picture


def test_what_is_refused() -> None:
    x, grid = (a.detach() for a in inputs("NHWC"))
    for words, call in (
        ("mode='cubic'; expected one of 'nearest', 'bilinear', 'bicubic'", {"mode": "cubic"}),
        ("padding_mode='wrap'; expected one of 'zeros'", {"padding_mode": "wrap"}),
        ("layout='NWHC'; expected one of 'NHWC', 'NCHW'", {"layout": "NWHC"}),
        ("align_corners=1; expected one of True, False.", {"align_corners": 1}),
        ("align_corners=None; expected one of True, False.", {"align_corners": None}),
        ("deterministic=3; expected one of True, False, None.", {"deterministic": 3}),
        ("mode='bicubic' is for images", {"mode": "bicubic", "layout": "NDHWC"}),
        (r"x has the shape \(2, 4, 6, 9\), of 4 axes; layout='NDHWC' has 5", {"layout": "NDHWC"}),
    ):
        with pytest.raises(ferrule.KernelError, match=words):
            grid_sample(x, grid, **call)
    with pytest.raises(ferrule.KernelError, match=r"input 'grid'.*2"):
        grid_sample(x, grid[..., :1])
    with pytest.raises(ferrule.KernelError, match="B is 2 by input 'x'"):
        grid_sample(x, grid[:1])
    with pytest.raises(ferrule.KernelError, match="H > 0"):
        grid_sample(x[:, :0], grid)
    with pytest.raises(ferrule.FerruleError, match=r"float32, float16, bfloat16, float64"):
        grid_sample(x.int(), grid)
