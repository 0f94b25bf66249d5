"""Accesses outside of arrays on a GPU: the process's CUDA survives, loads give zero.

Arrays lie at the very start of an allocation of their own, so that what is before them, and far
behind, is no memory.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest

import ferrule
import on_cuda

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

FAR = 1 << 29  # elements: no allocation is as large

SHIFTED = ferrule.metal_kernel(
    "shifted", ["x", "by"], ["y"],
    "int i = thread_position_in_grid.x; y[i + by] = x[i - by] + 1;",
)  # fmt: skip

# Like the sampling kernels of others, it loads all four pixels and then discards some.
SAMPLE = ferrule.metal_kernel(
    "sample", ["x", "grid"], ["out"],
    """
    const uint place = thread_position_in_grid.x;
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    const uint spot = place / C;
    const int image = int(spot) / (grid_shape[1] * grid_shape[2]) * H * W * C + place % C;
    const float col = ((grid[2 * spot] + 1) * W - 1) / 2;
    const float row = ((grid[2 * spot + 1] + 1) * H - 1) / 2;
    const int left = int(floor(col)), top = int(floor(row));
    float pixel[4];
    for (int k = 0; k < 4; ++k) pixel[k] = x[image + ((top + k / 2) * W + left + k % 2) * C];
    float sum = 0;
    for (int k = 0; k < 4; ++k) {
        const int r = top + k / 2, c = left + k % 2;
        const bool inside = r >= 0 && r < H && c >= 0 && c < W;
        const float across = k % 2 ? col - left : 1 - (col - left);
        const float weight = across * (k / 2 ? row - top : 1 - (row - top));
        sum += inside ? weight * pixel[k] : 0;
    }
    out[place] = sum;
    """,
)  # fmt: skip


def at_the_start(values: np.ndarray[Any, Any]) -> Any:
    """A tensor at the very start of a segment of torch's allocator."""
    torch.cuda.empty_cache()
    made = torch.empty(max(values.nbytes, 32 << 20), dtype=torch.uint8, device="cuda")
    found = made[: values.nbytes].view(torch.from_numpy(values).dtype).view(values.shape)
    found.copy_(torch.from_numpy(values))
    starts = {one["address"] for one in torch.cuda.memory_snapshot()}
    assert found.data_ptr() in starts
    return found


def sampled(x: Any, grid: Any) -> Any:
    shape = (*grid.shape[:3], x.shape[3])
    return SAMPLE(
        inputs=[x, grid], output_shapes=[shape], output_dtypes=[x.dtype],
        grid=(math.prod(shape), 1, 1), threadgroup=(256, 1, 1),
    )[0]  # fmt: skip


def test_grid_sample_at_the_start_of_a_segment() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 64, 64, 64)).astype(np.float32)
    grid = rng.uniform(-3, 3, (2, 16, 16, 2)).astype(np.float32)
    grid[0, 0] = -1e5  # far from the image, where there is no memory
    a, g = at_the_start(x), at_the_start(grid)
    for _ in range(4):  # the long way, and as it is remembered
        out = sampled(a, g)
    torch.cuda.synchronize()
    expected = torch.nn.functional.grid_sample(
        torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(grid), align_corners=False
    ).permute(0, 2, 3, 1)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-4, rtol=1e-4)


def arrays(library: str, x: np.ndarray[Any, Any]) -> Any:
    if library == "torch":
        return at_the_start(x)
    if library == "cupy":
        return pytest.importorskip("cupy").asarray(x)
    if library == "mlx":
        if not on_cuda.mlx_has_cuda():
            pytest.skip("MLX has no GPU of CUDA's")
        import mlx.core as mx

        return mx.array(x)
    return x


@pytest.mark.parametrize("library", ["torch", "cupy", "mlx", "numpy"])
@pytest.mark.parametrize("by", [0, 3, -3, FAR, -FAR])
def test_loads_give_zero_and_stores_are_dropped(library: str, by: int) -> None:
    x = np.arange(1, 11, dtype=np.float32)
    expected = np.zeros(10, np.float32)
    for i in range(10):
        if 0 <= i + by < 10:
            expected[i + by] = 1 + (x[i - by] if 0 <= i - by < 10 else 0)
    with on_cuda.everything() if library == "numpy" else contextlib.nullcontext():
        given = arrays(library, x)
        for _ in range(3):
            (y,) = SHIFTED(
                inputs=[given, by], output_shapes=[(10,)], output_dtypes=[given.dtype],
                grid=(10, 1, 1), threadgroup=(10, 1, 1), init_value=0,
            )  # fmt: skip
            got = y.get() if library == "cupy" else y.cpu().numpy() if library == "torch" else y
            np.testing.assert_array_equal(np.array(got), expected)


OP = ferrule.op(
    "gathered", "x[N]:T, at[M]:int32, w[N]:T? -> y[M]:T", grid="M", threadgroup=64,
    metal="uint i = thread_position_in_grid.x;"
    " y[i] = x[at[i]] + (has_w ? w[at[i]] : T(0)); y[i + M] = 1; y[i - M] = 2;",
)  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_ops(compiled: bool) -> None:
    at = np.array([0, 5, -1, 99, FAR, -FAR], np.int32)
    x = np.arange(1, 7, dtype=np.float32)

    def call(x: Any, at: Any) -> Any:
        return OP(x, at, None)

    run = torch.compile(call, fullgraph=True) if compiled else call
    for _ in range(3):
        y = run(at_the_start(x), at_the_start(at))
        assert y.tolist() == [1, 6, 0, 0, 0, 0]
    empty = at_the_start(x)[:0]
    assert run(empty, at_the_start(at)).tolist() == [0] * 6


def test_atomics() -> None:
    kernel = ferrule.metal_kernel(
        "counted", ["x"], ["y"],
        "int i = thread_position_in_grid.x;"
        " atomic_fetch_add_explicit(&y[x[i]], 1, memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    x = at_the_start(np.array([0, 3, 3, 4, -1, FAR, -FAR], np.int32))
    (y,) = kernel(
        inputs=[x], output_shapes=[(4,)], output_dtypes=[torch.int32], grid=(7, 1, 1),
        threadgroup=(7, 1, 1), init_value=0,
    )  # fmt: skip
    assert y.tolist() == [1, 0, 0, 2]
