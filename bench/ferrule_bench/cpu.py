"""Kernels on the CPU against who else does the same work, with the same number of threads.

NumPy and MLX on the CPU use one, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import ferrule
from ferrule.cli import grid_sample as gs

from . import adopted, checks, mlx_graph, mlx_lm, ops, startup
from .timing import Bench, Peer

ELEMENTWISE = {
    "copy": "inp[i]",
    "exp": "metal::exp(inp[i])",
    "tanh": "metal::tanh(inp[i])",
    "gelu": "0.5f * inp[i] * (1.0f + metal::tanh(0.7978845608f * "
    "(inp[i] + 0.044715f * inp[i] * inp[i] * inp[i])))",
}


def elementwise(name: str, bench: Bench) -> None:
    """One thread an element, float32."""
    size = 1 << (12 if bench.quick else 22)
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    numpy_way: dict[str, Callable[[], object]] = {
        "copy": lambda: x.copy(),
        "exp": lambda: np.exp(x),
        "tanh": lambda: np.tanh(x),
        "gelu": lambda: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    }
    kernel = ferrule.metal_kernel(
        f"bench_{name}", ["inp"], ["out"],
        f"uint i = thread_position_in_grid.x; out[i] = {ELEMENTWISE[name]};",
    )  # fmt: skip

    def run(array: Any) -> object:
        return kernel(
            inputs=[array],
            output_shapes=[array.shape],
            output_dtypes=[array.dtype],
            grid=(size, 1, 1),
            threadgroup=(256, 1, 1),
        )

    work = f"{name}, {size} float32"
    bench.compare(work, partial(run, x), [Peer("NumPy", numpy_way[name])])
    if not bench.installed("torch"):
        return
    import torch

    t = torch.from_numpy(x)
    torch_way: dict[str, Callable[[], object]] = {
        "copy": lambda: t.clone(),
        "exp": lambda: torch.exp(t),
        "tanh": lambda: torch.tanh(t),
        "gelu": lambda: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    bench.compare(work, partial(run, t), [Peer("torch", torch_way[name])])


def sampling(bench: Bench) -> None:
    """grid_sample and its VJP, on images that fit into a cache, and such that do not."""
    for shape in [(1, 64, 16, 32)] if bench.quick else [(4, 64, 64, 128), (4, 256, 64, 128)]:
        _sampling(bench, *shape)


def _sampling(bench: Bench, batch: int, size: int, channels: int, points: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, size, size, channels)).astype(np.float32)
    grid = rng.uniform(-1, 1, size=(batch, points, points, 2)).astype(np.float32)
    cot = rng.normal(size=(batch, points, points, channels)).astype(np.float32)
    forward, vjp = f"grid_sample, x {x.shape}", f"grid_sample VJP, x {x.shape}"
    by_numpy = "NumPy, op by op"
    if not bench.installed("torch"):
        numpy_forward = Peer(by_numpy, lambda: gs.sample_numpy(x, grid))
        bench.compare(forward, lambda: gs.sample(x, grid), [numpy_forward])
        numpy_vjp = Peer(by_numpy, lambda: gs.sample_vjp_numpy(x, grid, cot))
        bench.compare(vjp, lambda: gs.sample_vjp(x, grid, cot), [numpy_vjp])
        return
    import torch

    from . import by_ops

    tx, tg, tc = torch.from_numpy(x), torch.from_numpy(grid), torch.from_numpy(cot)
    seen = tx.permute(0, 3, 1, 2)  # the same memory, as torch wants it
    packed = seen.contiguous()
    cot_seen = tc.permute(0, 3, 1, 2)

    def f(a: Any, g: Any) -> Any:
        return torch.nn.functional.grid_sample(a, g, align_corners=False)

    def backward(a: Any, cotangent: Any) -> Callable[[], object]:
        a, g = a.detach().requires_grad_(), tg.detach().requires_grad_()
        out = f(a, g)

        def run() -> object:
            along, across = torch.autograd.grad(out, (a, g), cotangent, retain_graph=True)
            return along.permute(0, 2, 3, 1), across

        return run

    def with_autograd() -> object:
        # Autograd has no gradient without the forward pass that it records.
        a, g = tx.detach().requires_grad_(), tg.detach().requires_grad_()
        return torch.autograd.grad(by_ops.sample(a, g), (a, g), tc)

    bench.compare(
        forward,
        lambda: gs.sample(tx, tg),
        [
            Peer(by_numpy, lambda: gs.sample_numpy(x, grid)),
            Peer("torch, op by op", lambda: by_ops.sample(tx, tg)),
            Peer("F.grid_sample, NHWC memory", lambda: f(seen, tg).permute(0, 2, 3, 1)),
            Peer("F.grid_sample, NCHW memory", lambda: f(packed, tg).permute(0, 2, 3, 1)),
        ],
    )
    bench.compare(
        vjp,
        lambda: gs.sample_vjp(tx, tg, tc),
        [
            Peer(by_numpy, lambda: gs.sample_vjp_numpy(x, grid, cot)),
            Peer("torch, op by op, with autograd", with_autograd),
            Peer("F.grid_sample, NHWC memory", backward(seen, cot_seen)),
            Peer("F.grid_sample, NCHW memory", backward(packed, cot_seen.contiguous())),
        ],
    )


GROUPS: dict[str, Callable[[Bench], None]] = {
    **{name: partial(elementwise, name) for name in ELEMENTWISE},
    "adopted": adopted.calls,
    **checks.GROUPS,
    "grid_sample": sampling,
    "mlx-graph": mlx_graph.nodes,
    "mlx-lm": mlx_lm.models,
    "operators": ops.on_cpu,
    "startup": startup.on_cpu,
}
