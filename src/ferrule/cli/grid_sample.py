"""Bilinear sampling of images at given points, and its VJP: two kernels and plain NumPy twins.

The shapes, in the order that MLX's documentation uses (NHWC)::

    x          [B, H, W, C]     images
    grid       [B, gH, gW, 2]   where to sample: column, then row; -1 and 1 are the image's borders
    out        [B, gH, gW, C]   the samples; what lies outside of the image counts as 0
    cotangent  [B, gH, gW, C]   the derivative of a loss with respect to out

`sample` and `sample_vjp` take NumPy arrays, torch tensors or MLX arrays and return the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ferrule

SIMDGROUP = 32  # threads

# One thread makes one element of `out`. Fused multiply-adds are off in both bodies: a point that
# lies on a pixel's centre is then put on the same side of it as in NumPy.
FORWARD = """
    #pragma METAL fp contract(off)
    const uint elem = thread_position_in_grid.x;
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    const uint point = elem / C;
    const uint image = point / (grid_shape[1] * grid_shape[2]);
    const int first = image * H * W * C + elem % C;

    // From [-1, 1] to pixels, whose centres are at 0, 1, 2 ...
    const float column = ((float(grid[2 * point]) + 1) * W - 1) / 2;
    const float row = ((float(grid[2 * point + 1]) + 1) * H - 1) / 2;
    const int west = int(metal::floor(column)), north = int(metal::floor(row));
    const float dx = column - west, dy = row - north;

    float sum = 0;
    for (int corner = 0; corner < 4; ++corner) {
        const int i = north + corner / 2, j = west + corner % 2;
        if (i >= 0 && i < H && j >= 0 && j < W) {
            const float across = corner % 2 ? dx : 1 - dx;
            const float down = corner / 2 ? dy : 1 - dy;
            sum += across * down * float(x[first + (i * W + j) * C]);
        }
    }
    out[elem] = T(sum);
"""

# One thread takes one channel of one point. Several points share a pixel, so `x_grad` is added to
# atomically. The channels of a point are padded to whole simdgroups: one simd_sum adds up to 32
# channels, and one atomic addition per simdgroup is left for `grid_grad`.
VJP = """
    #pragma METAL fp contract(off)
    const uint elem = thread_position_in_grid.x;
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    const int C_padded = ceildiv(C, threads_per_simdgroup) * threads_per_simdgroup;
    const uint point = elem / C_padded;
    const int channel = elem % C_padded;

    float along_x = 0, along_y = 0;
    if (channel < C) {
        const uint image = point / (grid_shape[1] * grid_shape[2]);
        const int first = image * H * W * C + channel;
        const float column = ((float(grid[2 * point]) + 1) * W - 1) / 2;
        const float row = ((float(grid[2 * point + 1]) + 1) * H - 1) / 2;
        const int west = int(metal::floor(column)), north = int(metal::floor(row));
        const float dx = column - west, dy = row - north;

        const float cot = float(cotangent[point * C + channel]);
        for (int corner = 0; corner < 4; ++corner) {
            const int i = north + corner / 2, j = west + corner % 2;
            if (i >= 0 && i < H && j >= 0 && j < W) {
                const float across = corner % 2 ? dx : 1 - dx;
                const float down = corner / 2 ? dy : 1 - dy;
                const int at = first + (i * W + j) * C;
                const float slope = float(x[at]) * cot;
                along_x += corner % 2 ? slope * down : -slope * down;
                along_y += corner / 2 ? slope * across : -slope * across;
                atomic_fetch_add_explicit(&x_grad[at], T(across * down * cot),
                                          memory_order_relaxed);
            }
        }
    }
    along_x = simd_sum(along_x);
    along_y = simd_sum(along_y);
    if (thread_index_in_simdgroup == 0) {
        atomic_fetch_add_explicit(&grid_grad[2 * point], T(along_x * W / 2),
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&grid_grad[2 * point + 1], T(along_y * H / 2),
                                  memory_order_relaxed);
    }
"""

forward = ferrule.metal_kernel(
    name="grid_sample", input_names=["x", "grid"], output_names=["out"], source=FORWARD
)
vjp = ferrule.metal_kernel(
    name="grid_sample_vjp",
    input_names=["x", "grid", "cotangent"],
    output_names=["x_grad", "grid_grad"],
    source=VJP,
    atomic_outputs=True,
)


def sample(x: Any, grid: Any) -> Any:
    """Sample ``x`` at ``grid`` with the kernel.

    Args:
        x: images, [B, H, W, C], float32, float16 or bfloat16.
        grid: points, [B, gH, gW, 2], in [-1, 1].

    Returns:
        The samples, [B, gH, gW, C], of x's dtype.
    """
    batch, height, width, _ = grid.shape
    channels = x.shape[3]
    (out,) = forward(
        inputs=[x, grid],
        template=[("T", x.dtype)],
        output_shapes=[(batch, height, width, channels)],
        output_dtypes=[x.dtype],
        grid=(batch * height * width * channels, 1, 1),
        threadgroup=(256, 1, 1),
    )
    return out


def sample_vjp(x: Any, grid: Any, cotangent: Any) -> tuple[Any, Any]:
    """The derivatives of a loss with respect to ``x`` and ``grid``, with the kernel.

    Args:
        x, grid: as for `sample`.
        cotangent: the derivative of the loss with respect to the samples, [B, gH, gW, C].

    Returns:
        The derivatives, of the shapes of ``x`` and ``grid`` and of x's dtype.
    """
    batch, height, width, _ = grid.shape
    padded = -(-x.shape[3] // SIMDGROUP) * SIMDGROUP
    x_grad, grid_grad = vjp(
        inputs=[x, grid, cotangent],
        template=[("T", x.dtype)],
        output_shapes=[tuple(x.shape), tuple(grid.shape)],
        output_dtypes=[x.dtype, x.dtype],
        grid=(batch * height * width * padded, 1, 1),
        threadgroup=(256, 1, 1),
        init_value=0,
    )
    return x_grad, grid_grad


# The same in NumPy, one whole-array operation after another.

_Floats = NDArray[np.floating[Any]]
_Indices = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]


def _place(x: _Floats, grid: _Floats) -> tuple[_Floats, _Floats, _Floats, _Floats]:
    """North and west of each point, and its distances from there, each [B, gH, gW]."""
    _, height, width, _ = x.shape
    column = ((grid[..., 0] + 1) * width - 1) / 2
    row = ((grid[..., 1] + 1) * height - 1) / 2
    north, west = np.floor(row), np.floor(column)
    return north, west, row - north, column - west


def _corners(
    x: _Floats, north: _Floats, west: _Floats
) -> Iterator[tuple[int, int, NDArray[np.bool_], _Indices]]:
    """Each of the four pixels around each point: down, across, whether it exists, its place."""
    batch, height, width, _ = x.shape
    images = np.arange(batch)[:, None, None]
    for down in (0, 1):
        for across in (0, 1):
            i, j = north.astype(np.intp) + down, west.astype(np.intp) + across
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            place = (images, np.clip(i, 0, height - 1), np.clip(j, 0, width - 1))
            yield down, across, inside, place


def sample_numpy(x: _Floats, grid: _Floats) -> _Floats:
    """`sample` in plain NumPy."""
    north, west, dy, dx = _place(x, grid)
    out: _Floats = np.zeros((*grid.shape[:3], x.shape[3]), x.dtype)
    for down, across, inside, place in _corners(x, north, west):
        weight = (dx if across else 1 - dx) * (dy if down else 1 - dy) * inside
        out += weight[..., None] * x[place]
    return out


def sample_vjp_numpy(x: _Floats, grid: _Floats, cotangent: _Floats) -> tuple[_Floats, _Floats]:
    """`sample_vjp` in plain NumPy."""
    _, height, width, _ = x.shape
    north, west, dy, dx = _place(x, grid)
    x_grad, grid_grad = np.zeros_like(x), np.zeros_like(grid)
    for down, across, inside, place in _corners(x, north, west):
        weight_x = dx if across else 1 - dx
        weight_y = dy if down else 1 - dy
        np.add.at(x_grad, place, (weight_x * weight_y * inside)[..., None] * cotangent)
        slope = (x[place] * cotangent).sum(axis=-1) * inside
        grid_grad[..., 0] += (slope if across else -slope) * weight_y * (width / 2)
        grid_grad[..., 1] += (slope if down else -slope) * weight_x * (height / 2)
    return x_grad, grid_grad
