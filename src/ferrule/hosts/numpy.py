"""The NumPy host: arrays in memory, with ml_dtypes' bfloat16 and 8-bit floats."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import Dtype, of_numpy
from ..errors import KernelTypeError
from ..spec import Facts, Shape
from ..tools import fastcall
from .protocol import UNKNOWN, Identity, Maker, all_bits_zero, unknown_dtype

name = "NumPy"
allocation_errors: tuple[type[Exception], ...] = (MemoryError, ValueError, OverflowError)


def facts(array: np.ndarray[Any, Any]) -> Facts | None:
    """The facts of ``array``; None where the elements cannot be addressed in place."""
    dtype = of_numpy(array.dtype)
    if type(array) is not np.ndarray and hasattr(array, "mask"):
        raise KernelTypeError(
            "is a masked array, whose mask a kernel would ignore; give x.filled(value)."
        )
    if dtype is None:
        if of_numpy(array.dtype.newbyteorder("=")) is not None:
            return None
        raise unknown_dtype(array.dtype)
    strides = array.strides
    pointer = array.ctypes.data
    size = dtype.itemsize
    if size > 1:
        if pointer % size:
            return None
        for stride in strides:
            if stride % size:
                return None
        strides = tuple([stride // size for stride in strides])
    return Facts(dtype, array.shape, strides, pointer, "cpu")


def contiguous(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A row-contiguous, aligned copy in native byte order."""
    return np.array(array, array.dtype.newbyteorder("="), copy=True, order="C")


def identity(array: np.ndarray[Any, Any]) -> Identity:
    """By what an array is known again; its version is unknown if it can be written to, or what it
    is a view of, as far as NumPy knows."""
    owner: Any = array
    writeable = owner.flags.writeable
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
        writeable |= owner.flags.writeable
    own = owner.base is None or isinstance(owner.base, (bytes, mmap.mmap))
    place = array.ctypes.data, array.dtype.str, array.shape, array.strides
    return Identity(id(owner), place, None if own and not writeable else UNKNOWN, owner)


def empty(shape: Shape, dtype: Dtype, device: str) -> np.ndarray[Any, Any]:
    """A new array of ``shape``."""
    array = _guarded(shape, dtype, zero=False)
    return np.empty(shape, dtype.numpy) if array is None else array


def full(shape: Shape, value: float, dtype: Dtype, device: str) -> np.ndarray[Any, Any]:
    """A new array of ``shape`` filled with ``value``."""
    if all_bits_zero(value):
        array = _guarded(shape, dtype, zero=True)  # fresh pages are zero already
        return np.zeros(shape, dtype.numpy) if array is None else array
    array = empty(shape, dtype, device)
    np.copyto(array, value, casting="unsafe")
    return array


def _guarded(shape: Shape, dtype: Dtype, *, zero: bool) -> np.ndarray[Any, Any] | None:
    """A new array between canaries; None where there are none, or no memory."""
    if _guards:
        try:
            size = dtype.itemsize * math.prod(shape)
            array: np.ndarray[Any, Any] = _fast.numpy_new(shape, np.dtype(dtype.numpy), size, zero)
            return array
        except (MemoryError, OverflowError, ValueError):
            pass  # NumPy says it in its own words
    return None


def outside(array: np.ndarray[Any, Any]) -> int:
    """How many bytes beside an array, which was made here, were written to."""
    count: int = _fast.numpy_outside(array, array.nbytes) if _guards else 0
    return count


def to_numpy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements; bfloat16 and 8-bit floats as float32."""
    return array if array.dtype.type.__module__ == "numpy" else array.astype(np.float32)


def from_numpy(values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> np.ndarray[Any, Any]:
    """A new array of these elements."""
    return np.array(values, dtype.numpy)


def maker(number: float | None, dtype: Dtype, device: str) -> Maker:
    """How an output is made again."""
    zeroed = number is not None and all_bits_zero(number)
    if _guards and (number is None or zeroed):
        return Maker(None, (np.dtype(dtype.numpy),), zeroed=zeroed)
    if number is None:
        return Maker(np.empty, (dtype.numpy,))
    return Maker(full, (number, dtype, device))


def finish(
    what: str, inputs: Sequence[Any], outputs: list[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """``outputs`` as they are."""
    return outputs


def device() -> str:
    """NumPy's arrays live on the CPU."""
    return "cpu"


def stream(requested: object, device: str) -> int:
    """NumPy has no streams: only None is allowed."""
    if requested is not None:
        raise KernelTypeError(f"is {requested!r}, expected None: NumPy arrays have no streams.")
    return 0


def _register() -> bool:
    """Let calls with NumPy's arrays be remembered; whether outputs get canaries."""
    if _fast is None:
        return False
    core: Any = np._core if hasattr(np, "_core") else np.core
    _fast.register_numpy(np.ndarray, core.multiarray._ARRAY_API, np.empty)
    return bool(_fast.numpy_guarded())


_fast: Any = fastcall.library()
_guards = _register()
