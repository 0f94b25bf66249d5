"""Kernels on the CPU against who else does the same work, in one process.

    python bench/cpu.py [--threads N] [--quick]

Every row prints medians of both sides and how many times longer the peer takes. All sides get the
same number of threads (NumPy and MLX on the CPU use one, whatever is asked for).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from timing import Row, compare, header

import ferrule
from ferrule.cli import grid_sample as gs

ELEMENTWISE: dict[str, str] = {
    "copy": "inp[i]",
    "exp": "metal::exp(inp[i])",
    "tanh": "metal::tanh(inp[i])",
    "gelu": "0.5f * inp[i] * (1.0f + metal::tanh(0.7978845608f * "
    "(inp[i] + 0.044715f * inp[i] * inp[i] * inp[i])))",
}


def elementwise(rounds: int, size: int) -> list[Row]:
    """One thread an element, float32."""
    import torch

    rng = np.random.default_rng(0)
    x = rng.normal(size=size).astype(np.float32)
    t = torch.from_numpy(x)
    numpy_way: dict[str, Callable[[], object]] = {
        "copy": lambda: x.copy(),
        "exp": lambda: np.exp(x),
        "tanh": lambda: np.tanh(x),
        "gelu": lambda: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    }
    torch_way: dict[str, Callable[[], object]] = {
        "copy": lambda: t.clone(),
        "exp": lambda: torch.exp(t),
        "tanh": lambda: torch.tanh(t),
        "gelu": lambda: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    rows = []
    for name, expression in ELEMENTWISE.items():
        kernel = ferrule.metal_kernel(
            f"bench_{name}", ["inp"], ["out"],
            f"uint i = thread_position_in_grid.x; out[i] = {expression};",
        )  # fmt: skip

        def run(array: Any, kernel: Any = kernel) -> object:
            return kernel(
                inputs=[array],
                output_shapes=[array.shape],
                output_dtypes=[array.dtype],
                grid=(size, 1, 1),
                threadgroup=(256, 1, 1),
            )

        what = f"{name}, {size} float32"
        rows += compare(what, partial(run, x), {"NumPy": numpy_way[name]}, rounds)
        rows += compare(what, partial(run, t), {"torch": torch_way[name]}, rounds)
    return rows


def _sample_torch(x: Any, grid: Any) -> Any:
    """grid_sample of NHWC images in torch, op by op."""
    import torch

    batch, height, width, _ = x.shape
    column = ((grid[..., 0] + 1) * width - 1) / 2
    row = ((grid[..., 1] + 1) * height - 1) / 2
    west, north = column.floor().long(), row.floor().long()
    image = torch.arange(batch)[:, None, None]
    total = 0
    for down in (0, 1):
        for across in (0, 1):
            i, j = north + down, west + across
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            weight = (1 - (row - i).abs()) * (1 - (column - j).abs()) * inside
            value = x[image, i.clamp(0, height - 1), j.clamp(0, width - 1)]
            total = total + weight[..., None] * value
    return total


def sampling(rounds: int, batch: int, size: int, channels: int, points: int) -> list[Row]:
    """The documentation's example, forward and VJP, on the same NHWC data."""
    import torch

    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, size, size, channels)).astype(np.float32)
    grid = rng.uniform(-1, 1, size=(batch, points, points, 2)).astype(np.float32)
    cot = rng.normal(size=(batch, points, points, channels)).astype(np.float32)
    tx, tg, tc = torch.from_numpy(x), torch.from_numpy(grid), torch.from_numpy(cot)
    seen = tx.permute(0, 3, 1, 2)  # the same memory, as torch wants it
    packed = seen.contiguous()
    cot_seen = tc.permute(0, 3, 1, 2)
    function = torch.nn.functional.grid_sample

    def backward(f: Callable[[Any, Any], Any], a: Any, cotangent: Any) -> Callable[[], object]:
        a, g = a.detach().requires_grad_(), tg.detach().requires_grad_()
        out = f(a, g)
        return lambda: torch.autograd.grad(out, (a, g), cotangent, retain_graph=True)

    def f(a: Any, g: Any) -> Any:
        return function(a, g, align_corners=False)

    def by_ops() -> object:
        # Autograd has no gradient without the forward pass that it records.
        a, g = tx.detach().requires_grad_(), tg.detach().requires_grad_()
        return torch.autograd.grad(_sample_torch(a, g), (a, g), tc)

    what = f"x {x.shape}, grid {grid.shape}"
    print(f"-- grid_sample: {what}")
    rows = compare(
        "grid_sample forward",
        lambda: gs.sample(tx, tg),
        {
            "NumPy, op by op": lambda: gs.sample_numpy(x, grid),
            "torch, op by op": lambda: _sample_torch(tx, tg),
            "F.grid_sample, NHWC memory": lambda: f(seen, tg),
            "F.grid_sample, NCHW memory": lambda: f(packed, tg),
        },
        rounds,
    )
    rows += compare(
        "grid_sample VJP",
        lambda: gs.sample_vjp(tx, tg, tc),
        {
            "NumPy, op by op": lambda: gs.sample_vjp_numpy(x, grid, cot),
            "torch, op by op, with autograd": by_ops,
            "F.grid_sample, NHWC memory": backward(f, seen, cot_seen),
            "F.grid_sample, NCHW memory": backward(f, packed, cot_seen.contiguous()),
        },
        rounds,
    )
    return rows


def mlx_lm(rounds: int, quick: bool) -> list[Row]:
    """mlx-lm's kernels, unmodified, against its own op-by-op fallbacks on MLX's CPU."""
    import mlx.core as mx

    kept = mx.metal.is_available, mx.fast.metal_kernel
    mx.metal.is_available = lambda: True
    mx.fast.metal_kernel = ferrule.metal_kernel
    try:
        from mlx_lm.models import gated_delta, ssm
    finally:
        mx.metal.is_available, mx.fast.metal_kernel = kept
    rng = np.random.default_rng(0)

    def array(*shape: int, scale: float = 1.0) -> Any:
        return mx.array((rng.normal(size=shape) * scale).astype(np.float32))

    steps = 16 if quick else 128
    heads_k, heads_v, dim = 16, 32, 128
    q, k = array(1, steps, heads_k, dim, scale=0.1), array(1, steps, heads_k, dim, scale=0.1)
    v = array(1, steps, heads_v, dim)
    g = mx.array(rng.uniform(0.8, 1, size=(1, steps, heads_v)).astype(np.float32))
    beta = mx.array(rng.uniform(size=(1, steps, heads_v)).astype(np.float32))
    state = mx.zeros((1, heads_v, dim, dim))
    mx.eval(q, k, v, g, beta, state)
    rows = compare(
        f"gated delta, {steps} steps, {heads_v} heads of {dim}",
        lambda: mx.eval(gated_delta.gated_delta_kernel(q, k, v, g, beta, state)),
        {"mlx-lm, op by op": lambda: mx.eval(gated_delta.gated_delta_ops(q, k, v, g, beta, state))},
        rounds,
    )
    batch, heads, dim, width = 4, 64, 64, 128
    x, dt = array(batch, 1, heads, dim), array(batch, 1, heads)
    a_log, d, bias = array(heads), array(heads), array(heads)
    b, c = array(batch, 1, 1, width), array(batch, 1, 1, width)
    state = array(batch, heads, dim, width)
    limits = (0.001, 100.0)
    mx.eval(x, dt, a_log, d, bias, b, c, state)
    call = (x, a_log, b, c, d, dt, bias, state, limits)

    def by_ops() -> None:
        mx.eval(ssm.ssm_attn(x, a_log, b, c, d, dt, bias, state, limits))

    rows += compare(
        f"SSM update, batch {batch}, {heads} heads of {dim}x{width}",
        lambda: mx.eval(ssm.ssm_update_kernel(*call)),
        {"mlx-lm, op by op": by_ops},
        rounds,
    )
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="small sizes: a check, no measurement")
    given = parser.parse_args()
    rounds = 3 if given.quick else 15
    if given.threads:
        ferrule.set_threads(given.threads)
    have = {n: importlib.util.find_spec(n) is not None for n in ("torch", "mlx_lm")}
    print(f"threads: {ferrule.get_threads()}")
    print(header())
    if have["torch"]:
        import torch

        torch.set_num_threads(ferrule.get_threads())
        elementwise(rounds, 1 << (12 if given.quick else 22))
        # Images that fit into a cache, and such that do not.
        for shape in [(1, 64, 16, 32)] if given.quick else [(4, 64, 64, 128), (4, 256, 64, 128)]:
            sampling(rounds, *shape)
    if have["mlx_lm"]:
        mlx_lm(rounds, given.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
