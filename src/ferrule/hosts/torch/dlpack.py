"""Arrays of further libraries on NVIDIA GPUs: what has DLPack or ``__cuda_array_interface__``.

torch reads them without a copy, makes the outputs, and names the stream; DLPack orders the streams
of both libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import KernelTypeError
from ...spec import Facts
from . import arrays as host

name = "DLPack"
allocation_errors = host.allocation_errors
empty, full, device, from_numpy = host.empty, host.full, host.device, host.from_numpy
outside = host.outside


def facts(array: Any) -> Facts | None:
    """The facts of ``array``."""
    return host.facts(tensor(array))


def tensor(array: Any) -> torch.Tensor:
    """``array`` as torch sees it, without a copy.

    Raises:
        KernelTypeError: it is not on an NVIDIA GPU, or torch cannot read it.
    """
    if isinstance(array, torch.Tensor):
        return array
    kind = f"a {type(array).__module__}.{type(array).__qualname__}"
    if not hasattr(array, "__dlpack__") and not torch.backends.cuda.is_built():
        raise KernelTypeError(
            f"is {kind}, which is read through torch, and this torch has no CUDA; install one that "
            "has, or give a NumPy, torch or MLX array."
        )
    try:
        if hasattr(array, "__dlpack__"):
            result = torch.from_dlpack(array)
        else:
            result = torch.as_tensor(array, device="cuda")
    except (RuntimeError, TypeError, ValueError, BufferError, AssertionError) as error:
        raise KernelTypeError(f"is {kind}, which torch cannot read: {error}") from error
    if not result.is_cuda:
        raise KernelTypeError(
            f"is {kind} on {result.device}; such arrays are taken on NVIDIA GPUs alone. Give a "
            "NumPy, torch or MLX array, such as numpy.asarray(x)."
        )
    return result


def contiguous(array: Any) -> torch.Tensor:
    """A row-contiguous tensor."""
    return host.contiguous(tensor(array))


def to_numpy(array: Any) -> Any:
    """The elements, in NumPy's memory; bfloat16 and 8-bit floats as float32."""
    return host.to_numpy(tensor(array))


def maker(*_: object) -> None:
    """Calls with such arrays are not remembered."""


def finish(what: str, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """``outputs`` as arrays of the first input's library, or torch's where it takes no DLPack."""
    for array in inputs:
        module = type(array).__module__.partition(".")[0]
        library = sys.modules.get(module.removesuffix("lib"))  # jaxlib has the arrays of jax
        numpy_like = getattr(library, "numpy", library)
        take = getattr(numpy_like, "from_dlpack", None)
        if take is not None:
            return [take(output) for output in outputs]
    return outputs


def stream(requested: object, device: str) -> int:
    """The address of torch's current stream of ``device``."""
    return host.stream(requested, device)
