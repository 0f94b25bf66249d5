"""The CuPy host: arrays on NVIDIA GPUs, with memory from CuPy's pool, on CuPy's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ..dtypes import Dtype, of_numpy
from ..errors import KernelTypeError
from ..spec import Facts, Shape
from . import numpy as numpy_host
from .protocol import unknown_dtype

name = "CuPy"
allocation_errors: tuple[type[Exception], ...] = (
    MemoryError,
    ValueError,
    TypeError,
    OverflowError,
    RuntimeError,
)


def facts(array: Any) -> Facts | None:
    """The facts of ``array``; None where the elements cannot be addressed in place."""
    dtype = of_numpy(array.dtype)
    if dtype is None:
        raise unknown_dtype(array.dtype)
    size = dtype.itemsize
    if any(stride % size for stride in array.strides) or array.data.ptr % size:
        return None
    strides = tuple(stride // size for stride in array.strides)
    return Facts(dtype, array.shape, strides, array.data.ptr, f"cuda:{array.device.id}")


def contiguous(array: Any) -> Any:
    """A row-contiguous copy."""
    with array.device:
        return cupy.array(array, copy=True, order="C")


def empty(shape: Shape, dtype: Dtype, device: str) -> Any:
    """A new array of ``shape`` on ``device``."""
    with _gpu(device):
        return cupy.empty(shape, dtype.numpy)


def full(shape: Shape, value: float, dtype: Dtype, device: str) -> Any:
    """A new array of ``shape`` on ``device`` filled with ``value``.

    CuPy fills with zeros by a memset, and so is no slower at the first of them.
    """
    with _gpu(device):
        return cupy.full(shape, value, dtype.numpy)


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """The elements, in NumPy's memory; bfloat16 and 8-bit floats as float32."""
    return numpy_host.to_numpy(cupy.asnumpy(array))


def from_numpy(values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> Any:
    """A new array of these elements on ``device``."""
    with _gpu(device):
        return cupy.asarray(values.astype(dtype.numpy))


def outside(array: Any) -> int:
    """0: nothing is on the CPU."""
    return 0


def maker(number: float | None, dtype: Dtype, device: str) -> None:
    """Calls with CuPy's arrays are not remembered."""


def finish(what: str, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """``outputs`` as they are."""
    return outputs


def device() -> str:
    """CuPy's current device."""
    return f"cuda:{cupy.cuda.Device().id}"


def stream(requested: object, device: str) -> int:
    """The address of CuPy's current stream of ``device``.

    ``requested`` is None or that stream: memory of the outputs is tied to it.
    """
    with _gpu(device):
        current = cupy.cuda.get_current_stream()
    if requested is not None and requested != current:
        raise KernelTypeError(
            f"is {requested!r}, expected None or the current stream of {device}; call the kernel "
            "inside `with stream:`."
        )
    return int(current.ptr)


def _gpu(device: str) -> Any:
    return cupy.cuda.Device(int(device.partition(":")[2]))
