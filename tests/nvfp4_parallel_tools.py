"""What cases of layers in NVFP4 in several processes share: layers, inputs, comparisons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ferrule import KernelError
from ferrule.ops import nvfp4
from nvfp4_arrays import experts_of, matrix

DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


_meshes: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    if not _meshes:
        _meshes.append(init_device_mesh(DEVICE, (dist.get_world_size(),)))
    return _meshes[0]


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def spread(whole: Any, placement: Any) -> Any:
    """A DTensor of what all processes have whole; nothing is sent."""
    part, (rank, world) = whole.detach(), here()
    if isinstance(placement, Shard):
        parts = part.chunk(world, placement.dim)
        part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(
        part.clone(), mesh(), [placement], run_check=False, shape=shape, stride=stride
    )


def numbers(seed: int, *shape: int, dtype: torch.dtype = DTYPE) -> Any:
    """The same in all processes."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(DEVICE, dtype)


def close(found: Any, expected: Any, parts: int = 2) -> None:
    """Up to roundings of sums in another order, and in bfloat16 of each part."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    step = 2.0**-7 if expected.dtype == torch.bfloat16 else 2.0**-19
    torch.testing.assert_close(found, expected, rtol=0, atol=parts * step * scale)


def linear(seed: int, n: int, k: int, by_row: bool = False) -> Any:
    w = matrix(np.random.default_rng(seed), n, k)
    factor = numbers(seed + 1, n, dtype=torch.float32) if by_row else torch.tensor(0.25)
    tensors = [part.to(DEVICE) for part in (w.packed, w.scale, factor)]
    bias = numbers(seed + 2, n).requires_grad_()
    return nvfp4.NVFP4Linear.from_tensors(*tensors, bias)


def experts(seed: int, e: int, h: int = 32, i: int = 64) -> Any:
    of = experts_of(np.random.default_rng(seed), "nvfp4", e, h, i)
    names = ["w13_packed", "w13_scale", "w13_scale_2", "w2_packed", "w2_scale", "w2_scale_2"]
    tensors = {name: part.to(DEVICE) for name, part in zip(names, of.given, strict=True)}
    return nvfp4.NVFP4Experts.from_tensors(**tensors)


def weights_of(layer: Any) -> list[Any]:
    return [layer.get_buffer(name) for name in layer.packed]


def raises(text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except KernelError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised; expected {text!r}")


def routed(seed: int, tokens: int, k: int, experts: int, h: int = 32) -> tuple[Any, Any, Any]:
    """Hidden states, weights and ids, of which some are none."""
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(-1, experts, (tokens, k))).to(DEVICE)
    return numbers(seed, tokens, h), numbers(seed + 1, tokens, k).abs(), ids


class Traffic(TorchDispatchMode):
    """How many exchanges there are of which kind, and the bytes that they bring."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional" and name.startswith("all_"):
            self.found.append((name, result.nbytes))
        return result


class Calls(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        return func(*args, **(kwargs or {}))
