"""The MLX host: arrays evaluated when the kernel is called, viewed and written without a copy."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...dtypes import ALL, BY_NAME, Dtype
from ...errors import KernelError, KernelTypeError
from ...spec import Facts, Shape, row_contiguous_strides
from ..protocol import unknown_dtype

name = "MLX"
allocation_errors: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    MemoryError,
    OverflowError,
    TypeError,
)
DTYPES: dict[str, Any] = {
    d.name: kind
    for d in ALL
    if (kind := getattr(mx, "bool_" if d.name == "bool" else d.name, None))  # no 8-bit floats
}
KNOWN: dict[Any, Dtype] = {kind: BY_NAME[name] for name, kind in DTYPES.items()}

_LARGE = 1 << 26  # bytes


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``, which the stable ABI fixes.

    NumPy cannot view MLX's bfloat16 arrays, and a memoryview does not tell its address.
    """

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_STRIDED = 0x18  # PyBUF_STRIDES
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_Buffer)]
_release.restype = None


def facts(array: mx.array) -> Facts | None:
    """The facts of ``array``, which is evaluated first."""
    dtype = KNOWN.get(array.dtype)
    if dtype is None:
        raise unknown_dtype(array.dtype)
    _evaluate(array)
    buffer = _Buffer()
    _get_buffer(array, buffer, _STRIDED)
    try:
        size = dtype.itemsize
        strides = tuple([stride // size for stride in buffer.strides[: buffer.ndim]])
        return Facts(dtype, array.shape, strides, buffer.buf or 0, "cpu")
    finally:
        _release(buffer)


def described(array: mx.array, device: str, pointer: int = 0) -> Facts:
    """The facts of a row-contiguous array such as ``array``, which need not be evaluated."""
    shape: Shape = array.shape
    return Facts(KNOWN[array.dtype], shape, row_contiguous_strides(shape), pointer, device)


def _evaluate(array: mx.array) -> None:
    try:
        mx.eval(array)
    except (RuntimeError, ValueError) as error:
        if "function transformations" not in str(error):
            raise
        raise KernelError(
            "stands for a value inside mx.compile, mx.vmap or mx.export_function, but this call "
            "runs eagerly: it is no node of MLX's graph, as where ferrule's nodes cannot be built "
            "(a warning says why). Call it outside of the transformed function."
        ) from error


def contiguous(array: mx.array) -> mx.array:
    """A row-contiguous array of the same values."""
    return mx.contiguous(array, stream=mx.cpu)


def empty(shape: Shape, dtype: Dtype, device: str) -> mx.array:
    """A new array of ``shape``; MLX has no way to leave it unwritten, so it is zeros.

    The kernel writes into its memory, which is cheaper than a copy of a NumPy array.
    """
    _probe(shape, dtype)
    return mx.zeros(shape, DTYPES[dtype.name], stream=mx.cpu)


def _probe(shape: Shape, dtype: Dtype) -> None:
    """Raise MemoryError where memory for an array is not to be had.

    MLX would allocate it on a thread of its own, where a failure ends the process.
    """
    size = dtype.itemsize * math.prod(shape)
    if size >= _LARGE:
        np.empty(size, np.uint8)


def full(shape: Shape, value: float, dtype: Dtype, device: str) -> mx.array:
    """A new array of ``shape`` filled with ``value``."""
    _probe(shape, dtype)
    if dtype.kind in "iu":  # MLX reads no Python int beyond int64
        return mx.full(shape, mx.array(np.array(value, dtype.numpy)), stream=mx.cpu)
    return mx.full(shape, value, DTYPES[dtype.name], stream=mx.cpu)


def outside(array: mx.array) -> int:
    """0: memory of arrays that MLX makes itself has nothing behind it that could be looked at."""
    return 0


def maker(number: float | None, dtype: Dtype, device: str) -> None:
    """None: MLX's arrays are evaluated, and tied to the outputs, by Python code each time."""


def finish(label: str, inputs: Sequence[Any], outputs: list[mx.array]) -> list[mx.array]:
    """``outputs``, tied to ``inputs`` so that a gradient through them is refused.

    Without the tie `mx.grad` would find constants, and give zeros without a word.
    """
    if not inputs:
        return outputs
    linked: list[mx.array] = _tie(label, len(outputs))(*outputs, *inputs)
    mx.eval(linked)  # outside of mx.grad this also forgets the inputs
    return linked


@functools.lru_cache(maxsize=256)
def _tie(label: str, count: int) -> Callable[..., Any]:
    tie = mx.custom_function(lambda *arrays: list(arrays[:count]))

    def refuse(*_: object) -> None:
        why = (
            "a metal_kernel call has none"
            if label.startswith("kernel ")
            else "this call ran eagerly, and is no node of MLX's graph, as where ferrule's nodes "
            "cannot be built (a warning says why)"
        )
        raise KernelError(
            f"{label} has no derivative: {why}. Give it mx.stop_gradient(x), or wrap the call in "
            "an mx.custom_function with a vjp."
        )

    tie.vjp(refuse)
    tie.jvp(refuse)
    return tie


def to_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    """The elements, in NumPy's memory; bfloat16 as float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def from_numpy(values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> mx.array:
    """A new array of these elements."""
    if values.dtype == np.float64:  # MLX casts it, but not without a word
        values = values.astype(np.float32)
    return mx.array(values).astype(DTYPES[dtype.name])


def device() -> str:
    """MLX arrays are in memory that the CPU reads."""
    return "cpu"


def stream(value: object, device: str) -> int:
    """Takes MLX's streams and devices, of the CPU and the GPU alike, and needs none of them.

    The kernel runs on the CPU, after its inputs were evaluated and before the call returns.
    """
    if value is not None and not any(kind.__module__ == "mlx.core" for kind in type(value).__mro__):
        raise KernelTypeError(
            f"is {value!r} of type {type(value).__name__}, expected None or an MLX stream or "
            "device."
        )
    return 0
