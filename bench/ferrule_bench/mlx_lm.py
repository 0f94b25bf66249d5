"""The kernels of the installed mlx-lm, unmodified, made by ferrule."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import numpy as np

import ferrule

from .timing import Bench, Peer

BY_MLX = "mlx-lm, op by op"
Found = tuple[dict[str, ModuleType], dict[str, Any]]


def find(bench: Bench) -> Found | None:
    """What `imported` returns; None, which is said, where there is no mlx-lm."""
    if not (bench.installed("mlx") and bench.installed("mlx_lm")):
        return None
    try:
        return imported()
    except ImportError as error:
        bench.leave_out(f"mlx-lm cannot be imported, its rows are left out: {error}")
        return None


@functools.cache
def imported() -> Found:
    """mlx-lm's modules and, by their names, the kernels that they made.

    mlx-lm makes its kernels while it is imported and where Metal is there: for that long, MLX says
    that it is, and its function for kernels is ferrule's. An mlx-lm that was imported before is
    left as it is.
    """
    import mlx.core as mx

    made: dict[str, Any] = {}

    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        made[name] = ferrule.metal_kernel(name, *args, **kwargs)
        return made[name]

    def own() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]

    before = {name: sys.modules.pop(name) for name in own()}
    kept = mx.metal.is_available, mx.fast.metal_kernel
    mx.metal.is_available = lambda: True
    mx.fast.metal_kernel = make
    try:
        from mlx_lm.models import bitlinear_layers, gated_delta, rwkv7, ssm
    finally:
        mx.metal.is_available, mx.fast.metal_kernel = kept
        for name in own():
            del sys.modules[name]
        sys.modules.update(before)
    modules = (bitlinear_layers, gated_delta, rwkv7, ssm)
    return {module.__name__.rpartition(".")[2]: module for module in modules}, made


def prefill(bench: Bench) -> None:
    """The gated delta rule of mlx-lm over a prompt, on MLX's default device."""
    found = find(bench)
    if found is None:
        return
    import mlx.core as mx

    gated_delta = found[0]["gated_delta"]
    rng = np.random.default_rng(0)
    steps = 16 if bench.quick else 128
    heads_k, heads_v, dim = 16, 32, 128
    q, k = 0.1 * _normal(rng, 1, steps, heads_k, dim), 0.1 * _normal(rng, 1, steps, heads_k, dim)
    v = _normal(rng, 1, steps, heads_v, dim)
    g = mx.array(rng.uniform(0.8, 1, size=(1, steps, heads_v)).astype(np.float32))
    beta = mx.array(rng.uniform(size=(1, steps, heads_v)).astype(np.float32))
    given = (q, k, v, g, beta, mx.zeros((1, heads_v, dim, dim)))
    mx.eval(*given)
    bench.compare(
        f"gated delta, {steps} steps, {heads_v} heads of {dim}",
        lambda: _evaluated(gated_delta.gated_delta_kernel(*given)),
        [Peer(BY_MLX, lambda: _evaluated(gated_delta.gated_delta_ops(*given)))],
    )


def models(bench: Bench) -> None:
    """mlx-lm's kernels, unmodified, against its own op-by-op fallbacks on MLX's CPU."""
    found = find(bench)
    if found is None:
        return
    import mlx.core as mx

    prefill(bench)
    ssm = found[0]["ssm"]
    array = functools.partial(_normal, np.random.default_rng(0))
    batch, heads, dim, width = 4, 64, 64, 128
    x, dt = array(batch, 1, heads, dim), array(batch, 1, heads)
    a_log, d, bias = array(heads), array(heads), array(heads)
    b, c = array(batch, 1, 1, width), array(batch, 1, 1, width)
    step = (x, a_log, b, c, d, dt, bias, array(batch, heads, dim, width), (0.001, 100.0))
    mx.eval(*step[:-1])
    bench.compare(
        f"SSM update, batch {batch}, {heads} heads of {dim}x{width}",
        lambda: _evaluated(ssm.ssm_update_kernel(*step)),
        [Peer(BY_MLX, lambda: _evaluated(ssm.ssm_attn(*step)))],
    )


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    """An array of MLX."""
    import mlx.core as mx

    return mx.array(rng.normal(size=shape).astype(np.float32))


def _evaluated(outputs: Any) -> Any:
    import mlx.core as mx

    mx.eval(outputs)
    return outputs
