"""A cuBLAS for tests: native/fake_cublas.c in place of libcublasLt, with the products of NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import fake_cuda
from ferrule.tools import cublas

_SOURCE = Path(__file__).parent / "native" / "fake_cublas.c"
_MULTIPLIED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_float, ctypes.c_float
)
_known: list[weakref.ref[cublas.KnownProduct]] = []  # of all fakes, which have one library
_KNOWN = cublas.Cublas.known
_KINDS = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}


class Multiplied(NamedTuple):
    """One call of cublasLtMatmul, whose matrices are of columns.

    Attributes:
        stream: as an integer.
        compute: a cublasComputeType_t.
        transposed: the first and the second matrix.
        workspace: the address of its memory.
        layouts: of three matrices address, cudaDataType, batch, rows, columns, leading dim, step.
        alpha, beta: the factors.
        on_gpu: whether it is the GPU that reads these.
    """

    stream: int
    compute: int
    transposed: tuple[int, int]
    workspace: int
    layouts: tuple[tuple[int, ...], ...]
    alpha: float
    beta: float
    on_gpu: bool


def build(folder: Path) -> Path:
    """The library, compiled into ``folder``; skips where there is no C compiler."""
    return fake_cuda.build(folder, _SOURCE, "libcublasLt-fake.so")


class FakeCublas:
    """The library, in place of cuBLAS while `installed`; products of the host's memory.

    Attributes:
        products: what was multiplied.
        events: also appended to.
        status: what the next products return.
    """

    def __init__(self, path: Path, events: list[Any] | None = None) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.products: list[Multiplied] = []
        self.events: list[Any] = [] if events is None else events
        self.status = 0
        self._callback = _MULTIPLIED(self._multiplied)
        self.library.fake_on_product(self._callback)
        self.library.fake_found(1)

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeCublas]:
        """In place of cuBLAS inside a ``with`` block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cublas, "_SONAMES", ())
            patch.setattr(cublas, "candidates", lambda *_: iter([str(self.path)]))
            cublas.cublas.cache_clear()
            patch.setattr(cublas.Cublas, "known", self._known)
            yield self
        cublas.cublas.cache_clear()

    def _known(self, *given: Any) -> Any:
        """What `Cublas.known` gives."""
        made = _KNOWN(cublas.cublas(), *given)
        _known.extend([weakref.ref(made)] if made is not None else [])
        return made

    @property
    def leaked(self) -> int:
        """Descriptions that nothing needs any more; a product that is known has four."""
        gc.collect()
        return int(self.library.fake_alive()) - 4 * sum(ref() is not None for ref in _known)

    def _multiplied(self, words: Any, alpha: float, beta: float) -> int:
        layouts = [tuple(words[6 + 7 * i : 13 + 7 * i]) for i in range(3)]
        one = Multiplied(
            words[1], words[2], (words[3], words[4]), words[5], tuple(layouts), alpha, beta,
            bool(words[27]),
        )  # fmt: skip
        self.products.append(one)
        self.events.append(one)
        if self.status:
            return self.status
        first, second, out = (_matrices(layout) for layout in layouts)
        if words[3]:
            first = first.swapaxes(1, 2)
        if words[4]:
            second = second.swapaxes(1, 2)
        product = np.float32(alpha) * (first.astype(np.float32) @ second.astype(np.float32))
        out[:] = product if beta == 0 else product + np.float32(beta) * out.astype(np.float32)
        return 0


def _matrices(layout: tuple[int, ...]) -> Any:
    """The matrices of a layout, as a view of its memory."""
    address, kind, batch, rows, columns, leading, step = layout
    size = np.dtype(_KINDS[kind]).itemsize
    count = (batch - 1) * step + (columns - 1) * leading + rows
    memory = np.frombuffer((ctypes.c_char * (count * size)).from_address(address), _KINDS[kind])
    strides = (step * size, size, leading * size)
    return np.lib.stride_tricks.as_strided(memory, (batch, rows, columns), strides)
