"""cuBLASLt, NVIDIA's library of matrix products: the one that the process has, else what is found.
runtime/cublas.h calls it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache

from ..errors import DeviceError, ToolchainError
from .binding import runtime
from .driver import Driver
from .nvrtc import candidates

WORKSPACE = 32 << 20  # FR_CUBLAS_WORKSPACE of runtime/cublas.h, in bytes
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType, by dtypes
FLOAT32, TF32 = 68, 77  # cublasComputeType_t
_NAME = "libcublasLt"
_SONAMES = (f"{_NAME}.so.13", f"{_NAME}.so.12")
_FUNCTIONS = 13  # of `fr_cublas`
_DESCRIBED = 16  # words of `fr_described`, at least


class Product(ctypes.Structure):
    """`fr_product` of runtime/cublas.h."""

    _fields_ = (
        *[(name, ctypes.c_uint64) for name in ("a", "b", "out", "workspace", "factors")],
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "batch", "step_a", "step_b")],
        *[(name, ctypes.c_int32) for name in ("transpose_a", "transpose_b")],
        *[(name, ctypes.c_int32) for name in ("type", "out_type", "compute")],
        *[(name, ctypes.c_float) for name in ("alpha", "beta")],
    )


class KnownProduct(ctypes.Structure):
    """`fr_known_product` of runtime/cublas.h."""

    library: Cublas

    _fields_ = (
        ("cublas", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("product", Product),
        ("word", ctypes.c_int32 * 5),
        ("described", ctypes.c_uint64 * _DESCRIBED),
    )

    def __del__(self) -> None:
        if not sys.is_finalizing():
            runtime().fr_forget_product(ctypes.addressof(self))


class Cublas:
    """The library, loaded, with a handle for each GPU that it was used on.

    Attributes:
        path: its file, or its bare name where the system's loader knows it.
    """

    def __init__(self, path: str, mode: int = 0) -> None:
        """Loads it.

        Raises:
            OSError: it cannot be loaded, or is none.
        """
        self.path = path
        self._library = ctypes.CDLL(path, mode or ctypes.DEFAULT_MODE)
        self._functions = (ctypes.c_void_p * _FUNCTIONS)()
        missing = runtime().fr_find_cublas(self._library._handle, self._functions)
        if missing is not None:
            raise OSError(f"{path} has no {missing.decode()}")
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def start(self, driver: Driver, ordinal: int, product: Product, stream: int) -> int:
        """Start a product on a stream, after what was started there before; waits for nothing.

        Args:
            driver, ordinal: the GPU.
            product: what is multiplied.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Returns:
            0, or a code for `refused`.
        """
        # It loads kernels when they are first used, which may be while a graph is recorded.
        with driver.current(driver.context(ordinal)), driver.uncaptured():
            status, handle = self._handle(ordinal)
            if status:
                return status
            at = ctypes.addressof(product)
            return int(runtime().fr_start_product(self._functions, handle, at, stream))

    def known(
        self, driver: Driver, ordinal: int, product: Product, words: Sequence[int]
    ) -> KnownProduct | None:
        """What starts a product again and again; None where cuBLAS refuses it.

        Args:
            driver, ordinal: the GPU.
            product: what is multiplied, but for addresses.
            words: which words of a call a, b, the product, the workspace and the factors are; -1
                where there are none.
        """
        with driver.current(driver.context(ordinal)), driver.uncaptured():
            status, handle = self._handle(ordinal)
            functions = ctypes.addressof(self._functions)
            made = KnownProduct(functions, handle, product, tuple(words))
            made.library = self  # whose functions it has
            if status or runtime().fr_know_product(ctypes.addressof(made)):
                return None
        return made

    def _handle(self, ordinal: int) -> tuple[int, ctypes.c_void_p]:
        """The handle for the current GPU, and 0; or a code for `refused`."""
        with self._lock:
            handle = self._handles.get(ordinal)
            if handle is None:
                handle = ctypes.c_void_p()
                status = int(self._library.cublasLtCreate(ctypes.byref(handle)))
                if status:
                    return status, handle
                self._handles[ordinal] = handle
        return 0, handle

    def refused(self, status: int, of: str) -> DeviceError:
        """The error for a product that `start` did not start.

        Args:
            status: what it returned.
            of: what it is, in words.
        """
        name = self._library.cublasLtGetStatusName
        name.restype = ctypes.c_char_p
        said = (name(status) or b"an unknown error").decode("utf-8", "replace")
        return DeviceError(f"{of} was not started: cuBLAS ({self.path}) says {said}.")


@lru_cache(maxsize=1)
def cublas() -> Cublas:
    """The library that the process has loaded already, as torch, CuPy and MLX do; else that of
    NVIDIA's wheels, of CUDA_HOME or CUDA_PATH, of /usr/local/cuda, or of the system's loader.

    Raises:
        ToolchainError: there is none; says what was looked for, and what installs it.
    """
    loaded = os.RTLD_NOLOAD | os.RTLD_NOW if hasattr(os, "RTLD_NOLOAD") else 0
    tries = [*((name, loaded) for name in _SONAMES if loaded)]
    tries += [(path, 0) for path in candidates(_NAME, _SONAMES)]
    for path, mode in tries:
        try:
            return Cublas(path, mode)
        except OSError:
            continue
    raise ToolchainError(
        f"a step of a CUDA unit is a matrix product by cuBLAS, and {' or '.join(_SONAMES)} was not "
        "found: not among what this process has loaded, in NVIDIA's wheels, CUDA_HOME, CUDA_PATH, "
        "/usr/local/cuda or where the system looks; `pip install nvidia-cublas` installs it "
        "(nvidia-cublas-cu12 for a driver of CUDA 12)."
    )
