"""One table: the names of every dtype in NumPy, torch, MLX, Metal, C++ and CUDA.

A `Dtype` is what the rest of ferrule passes around; hosts translate to and from their own.
Importing this module imports neither torch nor MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import KernelTypeError

_CUDA = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "complex64": "mlx::core::cu::complex64_t",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
    "float8_e8m0fnu": "__nv_fp8_e8m0",
}


@dataclass(frozen=True)
class Dtype:
    """An element type.

    Attributes:
        name: the full name, such as ``"bfloat16"``; also the attribute's name in NumPy (or
            ml_dtypes), torch and MLX, but for ``bool`` (``mx.bool_``).
        metal: the spelling in MLX's Metal text, also used in the CPU and CUDA texts of Metal
            bodies. Of an 8-bit float, which Metal has not, a body sees the bytes.
        itemsize: bytes per element.
        kind: ``"b"`` bool, ``"u"`` unsigned, ``"i"`` signed, ``"f"`` float, ``"c"`` complex.
        level0: whether a `metal_kernel` or `cuda_kernel` call takes it (MLX refuses float64 on
            the GPU, and has no 8-bit floats).
    """

    name: str
    metal: str
    itemsize: int
    kind: str
    level0: bool = True

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (ml_dtypes' for bfloat16 and 8-bit floats)."""
        kind: str | type = self.name
        if kind in _IN_ML_DTYPES:
            import ml_dtypes  # takes longer to import than all of ferrule, and few need it

            kind = getattr(ml_dtypes, self.name)
        return np.dtype(kind)

    @property
    def cuda(self) -> str:
        """The spelling in MLX's CUDA text."""
        return _CUDA.get(self.name, self.metal)

    def __repr__(self) -> str:
        return f"ferrule.{self.name}"


bool_ = Dtype("bool", "bool", 1, "b")
uint8 = Dtype("uint8", "uint8_t", 1, "u")
uint16 = Dtype("uint16", "uint16_t", 2, "u")
uint32 = Dtype("uint32", "uint32_t", 4, "u")
uint64 = Dtype("uint64", "uint64_t", 8, "u")
int8 = Dtype("int8", "int8_t", 1, "i")
int16 = Dtype("int16", "int16_t", 2, "i")
int32 = Dtype("int32", "int32_t", 4, "i")
int64 = Dtype("int64", "int64_t", 8, "i")
float16 = Dtype("float16", "float16_t", 2, "f")
bfloat16 = Dtype("bfloat16", "bfloat16_t", 2, "f")
float32 = Dtype("float32", "float", 4, "f")
float64 = Dtype("float64", "double", 8, "f", level0=False)
complex64 = Dtype("complex64", "complex64_t", 8, "c")
float8_e4m3fn = Dtype("float8_e4m3fn", "uint8_t", 1, "f", level0=False)
float8_e5m2 = Dtype("float8_e5m2", "uint8_t", 1, "f", level0=False)
float8_e8m0fnu = Dtype("float8_e8m0fnu", "uint8_t", 1, "f", level0=False)

FLOAT8: tuple[Dtype, ...] = (float8_e4m3fn, float8_e5m2, float8_e8m0fnu)
ALL: tuple[Dtype, ...] = (
    bool_, uint8, uint16, uint32, uint64, int8, int16, int32, int64,
    float16, bfloat16, float32, float64, complex64, *FLOAT8,
)  # fmt: skip
LEVEL0_NAMES = ", ".join(d.name for d in ALL if d.level0)
BY_NAME: dict[str, Dtype] = {d.name: d for d in ALL}
_IN_ML_DTYPES = frozenset(d.name for d in (bfloat16, *FLOAT8))
_BY_NUMPY: dict[Any, Dtype] = {d.numpy: d for d in ALL if d.name not in _IN_ML_DTYPES}


def find(value: object) -> Dtype | None:
    """The `Dtype` that ``value`` stands for, or None where it stands for none.

    ``value`` may be a `Dtype`, a NumPy dtype or scalar type, a torch dtype or an MLX dtype.
    A string is no dtype: MLX refuses it too.
    """
    if isinstance(value, Dtype):
        return value
    if isinstance(value, np.dtype):
        return of_numpy(value)
    module = type(value).__module__
    if module == "torch" and type(value).__name__ == "dtype":
        return BY_NAME.get(str(value).removeprefix("torch."))
    if module == "mlx.core" and type(value).__name__ == "Dtype":
        return BY_NAME.get(str(value).removeprefix("mlx.core.").rstrip("_"))
    if isinstance(value, type):
        if value is bool:
            return bool_
        if issubclass(value, np.generic) or value.__module__ == "ml_dtypes":
            return of_numpy(np.dtype(value))
    return None


def of_numpy(value: np.dtype[Any]) -> Dtype | None:
    """The `Dtype` of a NumPy dtype, or None."""
    dtype = _BY_NUMPY.get(value)
    if dtype is None and value.type.__module__ == "ml_dtypes":
        named = BY_NAME.get(value.type.__name__)
        if named is not None and value == named.numpy:  # and not byte-swapped
            return named
    return dtype


def of(value: object) -> Dtype:
    """The `Dtype` that ``value`` stands for.

    Raises:
        KernelTypeError: ``value`` is no dtype, or one that ferrule does not know.
    """
    dtype = find(value)
    if dtype is None:
        raise KernelTypeError(
            f"{value!r} is not a dtype that ferrule knows; expected one of "
            f"{', '.join(d.name for d in ALL)}, given as a NumPy, torch or MLX dtype."
        )
    return dtype
