"""Which hosts and devices there are. Each is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

from .devices import protocol as devices
from .hosts import protocol as hosts


def _numpy() -> hosts.Host:
    from .hosts import numpy

    return numpy


def _cupy() -> hosts.Host:
    from .hosts import cupy

    return cupy


def _torch() -> hosts.Host:
    from .hosts.torch import arrays

    return arrays


def _dlpack() -> hosts.Host:
    from .hosts.torch import dlpack

    return dlpack


def _torch_op(op: Any) -> Any:
    from .hosts.torch.op import TorchOp

    return TorchOp(op)


def _mlx() -> hosts.Host:
    from .hosts.mlx import arrays

    return arrays


@lru_cache(maxsize=1)  # each call asks
def _mlx_nodes() -> ModuleType:
    from .hosts.mlx import graph

    return graph


def _cpu(name: str) -> devices.Device | None:
    from .devices.cpu.program import device

    return device() if name == "cpu" else None


def _cuda(name: str) -> devices.Device | None:
    from .devices.cuda.device import gpu

    return gpu(name) if name.partition(":")[0] == "cuda" else None


def _architecture(name: str) -> devices.Device | None:
    from .devices.cuda.device import device

    return device(name) if name.startswith(("sm_", "compute_")) else None


def _checking() -> Any:
    from .check.checking import checking

    return checking


def register(load_ops: Callable[[], ModuleType]) -> None:
    """Offer them, and `ferrule.ops` to hosts; `ferrule` does so when it is imported."""
    hosts.offered.update(numpy=_numpy, torch=_torch, mlx=_mlx, cupy=_cupy, dlpack=_dlpack)
    hosts.arrays.update(
        {
            ("numpy", "ndarray"): "numpy",
            ("torch", "Tensor"): "torch",
            ("mlx.core", "array"): "mlx",
            ("cupy", "ndarray"): "cupy",
        }
    )
    hosts.dtype_types.update({("torch", "dtype"): "torch", ("mlx.core", "Dtype"): "mlx"})
    hosts.graphs["MLX"] = _mlx_nodes
    hosts.registrars["torch"] = _torch_op
    hosts.ops[:] = [load_ops]
    devices.checks[:] = [_checking]
    devices.offered.update(cpu=_cpu, cuda=_cuda, sm=_architecture, compute=_architecture)
