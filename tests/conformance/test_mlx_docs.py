"""The examples of MLX's page on custom kernels: exp, and grid_sample with its VJP.

The bodies are written afresh and use the same algorithms and the same API. They run on arrays of
every library and are compared with float64 NumPy, and with torch's own grid_sample and its
derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch

import ferrule as fe

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Library:
    """How a test makes arrays of a library and reads them."""

    name: str
    make: Callable[[Array, str], Any]
    read: Callable[[Any], Array]
    dtype: Callable[[str], Any]
    transpose: Callable[[Any], Any]


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


LIBRARIES = [
    Library(
        "numpy",
        lambda a, d: a.astype(numpy_dtype(d)),
        lambda a: a.astype(np.float64),
        numpy_dtype,
        lambda a: a.T,
    ),
    Library(
        "torch",
        lambda a, d: torch.tensor(a).to(getattr(torch, d)),
        lambda a: a.double().numpy(),
        lambda d: getattr(torch, d),
        lambda a: a.permute(*range(a.ndim)[::-1]),
    ),
    Library(
        "mlx",
        lambda a, d: mx.array(a.astype(np.float32)).astype(getattr(mx, d)),
        lambda a: np.array(a.astype(mx.float32)).astype(np.float64),
        lambda d: getattr(mx, d),
        lambda a: a.T,
    ),
]
DTYPES = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
on_each_library = pytest.mark.parametrize("lib", LIBRARIES, ids=lambda lib: lib.name)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Apple has no atomics on half and bfloat16; ferrule says so and adds all the same.
half_atomics = pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")


def close(actual: Array, expected: Array, dtype: str, steps: float) -> None:
    """Equal but for ``steps`` roundings of values as large as the largest."""
    limit = steps * DTYPES[dtype] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


# -- exp -------------------------------------------------------------------------------------------

exp_by_index = fe.metal_kernel(
    name="exp_by_index",
    input_names=["inp"],
    output_names=["out"],
    source="""
        const uint i = thread_position_in_grid.x;
        const T value = inp[i];
        out[i] = metal::exp(value);
    """,
)
exp_by_strides = fe.metal_kernel(
    name="exp_by_strides",
    input_names=["inp"],
    output_names=["out"],
    source="""
        const uint i = thread_position_in_grid.x;
        const uint from = elem_to_loc(i, inp_shape, inp_strides, inp_ndim);
        const T value = inp[from];
        out[i] = metal::exp(value);  // outputs are always row-contiguous
    """,
    ensure_row_contiguous=False,
)


def exp(kernel: Any, a: Any, compute: Any) -> Any:
    (out,) = kernel(
        inputs=[a],
        template=[("T", compute)],
        grid=(math.prod(a.shape), 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )
    return out


@on_each_dtype
@on_each_library
@pytest.mark.parametrize("kernel", [exp_by_index, exp_by_strides], ids=["copied", "strided"])
def test_exp(kernel: Any, lib: Library, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 16, 5))
    a = lib.make(values, dtype)
    views = [a, a[::2], a[:, 1::3], lib.transpose(a), lib.transpose(a[1::2]), a[3, :, 2], a[:0]]
    for view in views:
        out = exp(kernel, view, lib.dtype("float32"))
        assert type(out) is type(a)
        assert out.dtype == view.dtype
        close(lib.read(out), np.exp(lib.read(view)), dtype, 1)


# -- grid_sample -----------------------------------------------------------------------------------

# Where a pixel of the output is looked up, its four neighbours and their weights.
CORNERS = """
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    const int spots = grid_shape[1] * grid_shape[2];  // per image
    const float col = ((float(grid[2 * spot]) + 1) * W - 1) / 2;
    const float row = ((float(grid[2 * spot + 1]) + 1) * H - 1) / 2;
    const int left = int(floor(col)), top = int(floor(row));
    const float right_part = col - left, low_part = row - top;
    const int image = int(spot) / spots * H * W * C;
"""

grid_sample_kernel = fe.metal_kernel(
    name="grid_sample",
    input_names=["x", "grid"],
    output_names=["out"],
    header="""
        // A value of an image, 0 outside of it.
        template <typename T>
        T pixel(const device T* image, int row, int col, int H, int W, int C, int channel) {
            const bool inside = row >= 0 && row < H && col >= 0 && col < W;
            return inside ? image[(row * W + col) * C + channel] : T(0);
        }
    """,
    source="""
        const uint element = thread_position_in_grid.x;
        const uint spot = element / x_shape[3];
    """
    + CORNERS
    + """
        const int channel = element % C;
        const T nw = (1 - right_part) * (1 - low_part), ne = right_part * (1 - low_part);
        const T sw = (1 - right_part) * low_part, se = right_part * low_part;
        out[element] = nw * pixel(x + image, top, left, H, W, C, channel)
                     + ne * pixel(x + image, top, left + 1, H, W, C, channel)
                     + sw * pixel(x + image, top + 1, left, H, W, C, channel)
                     + se * pixel(x + image, top + 1, left + 1, H, W, C, channel);
    """,
)

grid_sample_vjp_kernel = fe.metal_kernel(
    name="grid_sample_vjp",
    input_names=["x", "grid", "cotangent"],
    output_names=["x_grad", "grid_grad"],
    atomic_outputs=True,
    source="""
        const uint place = thread_position_in_grid.x;
        // Whole simdgroups for each spot, so that simd_sum adds what belongs together.
        const int lanes = ceildiv(x_shape[3], threads_per_simdgroup) * threads_per_simdgroup;
        const uint spot = place / lanes;
    """
    + CORNERS
    + """
        const int channel = place % lanes;
        T along_col = T(0), along_row = T(0);
        if (channel < C) {
            const T cot = cotangent[spot * C + channel];
            for (int corner = 0; corner < 4; corner++) {
                const int down = corner / 2, aside = corner % 2;
                const int r = top + down, c = left + aside;
                if (r < 0 || r >= H || c < 0 || c >= W) {
                    continue;
                }
                const int at = image + (r * W + c) * C + channel;
                const float across = aside ? right_part : 1 - right_part;
                const float along = down ? low_part : 1 - low_part;
                const T weight = across * along;
                atomic_fetch_add_explicit(&x_grad[at], weight * cot, memory_order_relaxed);
                const float value = x[at];
                along_col += (aside ? along : -along) * value * cot;
                along_row += (down ? across : -across) * value * cot;
            }
        }
        along_col = simd_sum(along_col);
        along_row = simd_sum(along_row);
        if (thread_index_in_simdgroup == 0) {
            atomic_fetch_add_explicit(
                &grid_grad[2 * spot], T(along_col * (0.5f * W)), memory_order_relaxed);
            atomic_fetch_add_explicit(
                &grid_grad[2 * spot + 1], T(along_row * (0.5f * H)), memory_order_relaxed);
        }
    """,
)


def grid_sample(x: Any, grid: Any) -> Any:
    batch, rows, cols, _ = grid.shape
    shape = (batch, rows, cols, x.shape[3])
    (out,) = grid_sample_kernel(
        inputs=[x, grid],
        template=[("T", x.dtype)],
        output_shapes=[shape],
        output_dtypes=[x.dtype],
        grid=(math.prod(shape), 1, 1),
        threadgroup=(256, 1, 1),
    )
    return out


def grid_sample_vjp(x: Any, grid: Any, cotangent: Any) -> list[Any]:
    lanes = -(-x.shape[3] // 32) * 32
    gradients: list[Any] = grid_sample_vjp_kernel(
        inputs=[x, grid, cotangent],
        template=[("T", x.dtype)],
        output_shapes=[x.shape, grid.shape],
        output_dtypes=[x.dtype, x.dtype],
        grid=(math.prod(grid.shape[:3]) * lanes, 1, 1),
        threadgroup=(256, 1, 1),
        init_value=0,
    )
    return gradients


def reference(x: Array, grid: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """grid_sample and the gradients of x and grid, in float64."""
    batch, height, width, _ = x.shape
    size = np.array([width, height])
    place = ((grid + 1) * size - 1) / 2
    first = np.floor(place).astype(int)
    part = place - first
    image = np.arange(batch)[:, None, None]
    out = np.zeros((*grid.shape[:3], x.shape[3]))
    x_grad, grid_grad = np.zeros_like(x), np.zeros_like(grid)
    for step in np.ndindex(2, 2):  # along the columns, then the rows
        col, row = np.moveaxis(first + step, -1, 0)
        inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        col, row = np.where(inside, col, 0), np.where(inside, row, 0)
        weights = np.where(step, part, 1 - part)
        signs = np.where(step, 1, -1)
        value = np.where(inside[..., None], x[image, row, col], 0)
        weight = (weights[..., 0] * weights[..., 1])[..., None]
        out += weight * value
        np.add.at(x_grad, (image, row, col), weight * cotangent * inside[..., None])
        slope = (value * cotangent).sum(-1)
        grid_grad[..., 0] += signs[0] * weights[..., 1] * slope * width / 2
        grid_grad[..., 1] += signs[1] * weights[..., 0] * slope * height / 2
    return out, x_grad, grid_grad


def case(shape: tuple[int, int, int, int], spots: tuple[int, int]) -> tuple[Array, Array, Array]:
    """x, a grid that leaves the image here and there, and a cotangent."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape)
    grid = rng.uniform(-1.3, 1.3, (shape[0], *spots, 2))
    return x, grid, rng.standard_normal((shape[0], *spots, shape[3]))


CASES = [((2, 8, 6, 3), (5, 4)), ((1, 5, 7, 32), (3, 9)), ((2, 4, 9, 40), (3, 5))]


@on_each_dtype
@on_each_library
@pytest.mark.parametrize(("shape", "spots"), CASES)
@half_atomics
def test_grid_sample(lib: Library, dtype: str, shape: Any, spots: Any) -> None:
    arrays = [lib.make(a, dtype) for a in case(shape, spots)]
    rounded = [lib.read(a) for a in arrays]
    expected = reference(*rounded)
    out = grid_sample(*arrays[:2])
    gradients = grid_sample_vjp(*arrays)
    for actual, wanted in zip([out, *gradients], expected, strict=True):
        assert type(actual) is type(arrays[0])
        assert actual.dtype == arrays[0].dtype
        close(lib.read(actual), wanted, dtype, 8)


@pytest.mark.parametrize(("shape", "spots"), CASES)
def test_grid_sample_as_torch(shape: Any, spots: Any) -> None:
    """Corners are not aligned, and what is outside is zero."""
    x, grid, cotangent = (torch.tensor(a, dtype=torch.float32) for a in case(shape, spots))
    x.requires_grad_(True)
    grid.requires_grad_(True)
    expected = torch.nn.functional.grid_sample(
        x.permute(0, 3, 1, 2), grid, mode="bilinear", padding_mode="zeros", align_corners=False
    ).permute(0, 2, 3, 1)
    expected.backward(cotangent)
    x_grad, grid_grad = grid_sample_vjp(x.detach(), grid.detach(), cotangent)
    torch.testing.assert_close(grid_sample(x.detach(), grid.detach()), expected.detach())
    torch.testing.assert_close(x_grad, x.grad)
    torch.testing.assert_close(grid_grad, grid.grad)


def test_grid_sample_in_mlx_grad() -> None:
    """The page's use: an MLX function with a VJP of its own, both of them kernels."""
    sample = mx.custom_function(grid_sample)

    @sample.vjp
    def _(primals: Any, cotangent: Any, _: Any) -> tuple[Any, ...]:
        return tuple(grid_sample_vjp(*primals, cotangent))

    x, grid, cotangent = (mx.array(a.astype(np.float32)) for a in case(*CASES[0]))

    def loss(x: Any, grid: Any) -> Any:
        return (sample(x, grid) * cotangent).sum()

    value, gradients = mx.value_and_grad(loss, argnums=(0, 1))(x, grid)
    out, *expected = reference(*(np.array(a).astype(np.float64) for a in (x, grid, cotangent)))
    assert math.isclose(value.item(), (out * np.array(cotangent)).sum(), rel_tol=1e-4)
    for actual, wanted in zip(gradients, expected, strict=True):
        close(np.array(actual).astype(np.float64), wanted, "float32", 8)
