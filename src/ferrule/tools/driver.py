"""The CUDA driver: the GPUs, the cubins that are loaded on them, launches, and what went wrong.

The functions used have been the same since CUDA 12.0, and to import NVIDIA's Python bindings takes
70 ms, where a kernel from the cache should be launched in 10.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import DeviceError
from ..unit import TensorMap
from .libcuda import COUNTED, EARLIER, KEPT, PRINTED, REMEDY, Libcuda
from .libcuda import Attribute as _Attribute
from .libcuda import Config as _Config

_OLDEST = 12000

# CUdevice_attribute and CUfunction_attribute of cuda.h.
_MAJOR, _MINOR, _SHARED_OPTIN, _MULTIPROCESSORS, _BUS_WIDTH = 75, 76, 97, 16, 37
_KERNEL_THREADS, _KERNEL_STATIC, _KERNEL_DYNAMIC = 0, 1, 8
_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6  # CUlaunchAttributeID
_CAPTURE_RELAXED = 2  # CUstreamCaptureMode
_JIT_REGISTERS = 0  # CUjit_option

_ELF = b"\x7fELF"  # how a cubin begins
_REGISTERS = 65536  # of a multiprocessor
_SHARED = 48 << 10  # bytes of shared memory that a block may have without being allowed to

# By the length of a pattern: the bits in the name of the function that fills with it, and its type.
_PATTERNS: dict[int, tuple[int, Any]] = {
    1: (8, ctypes.c_ubyte),
    2: (16, ctypes.c_ushort),
    4: (32, ctypes.c_uint),
}

# CUtensorMapDataType of cuda.h; of other dtypes that of unsigned integers with as many bytes.
_MAPPED = {
    "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_MAPPED_BYTES = {1: 0, 2: 1, 4: 2, 8: 4}

Sizes = tuple[int, int, int]
FORKED = (
    "this process was forked from one that had used CUDA, which does not work in a child. Start "
    "children with multiprocessing.get_context('spawn'), or fork before the first use of CUDA."
)


@dataclass(eq=False)
class LoadedFunction:
    """A kernel that is loaded on one GPU.

    Attributes:
        handle: the CUfunction, in this context.
        ordinal: the GPU's number.
        context: its primary context.
        shared: bytes of dynamic shared memory that a launch asks for.
        most_threads: how many threads a block may have.
        kernel: the CUkernel.
        static: bytes of shared memory that its text declares.
        printed: the address of what its threads print (`tools.gpu_printing`), or 0.
        counted: the address of what its accesses count (include/cuda_counted.h), or 0.
        allowed: bytes of dynamic shared memory that a launch may ask for.
    """

    handle: int
    ordinal: int
    context: int
    shared: int
    most_threads: int
    kernel: int = 0
    static: int = 0
    printed: int = 0
    counted: int = 0

    def __post_init__(self) -> None:
        self.allowed = max(0, _SHARED - self.static)


_SIZE = (ctypes.c_size_t, ctypes.c_void_p)  # a count, and a stream
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuLaunchKernel": (ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3),
    "cuLaunchKernelEx": (ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3),
    "cuTensorMapEncodeTiled": (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    ),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, *_SIZE),
    **{
        f"cuMemsetD{bits}Async": (ctypes.c_uint64, kind, *_SIZE)
        for bits, kind in _PATTERNS.values()
    },
}


class Driver(Libcuda):
    """libcuda, loaded and initialised.

    Attributes:
        version: such as ``(13, 0)``: the newest CUDA that the driver runs.
        count: how many GPUs this process sees.
        state: what launches need and leave behind.
        launcher: called in place of cuLaunchKernel, where it is not None.
    """

    launcher: Callable[..., int] | None = None

    def __init__(self) -> None:
        """Loads and initialises libcuda.

        Raises:
            DeviceError: there is no driver, it is too old, or it does not start.
        """
        super().__init__()
        self._contexts: dict[int, int] = {}
        self._lock, self._lock_shared = threading.Lock(), threading.Lock()
        self._call("cuInit", 0)
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        self.version = (value.value // 1000, value.value % 1000 // 10)
        if value.value < _OLDEST:
            raise DeviceError(
                f"NVIDIA's driver runs CUDA {self.version[0]}.{self.version[1]}. {REMEDY}."
            )
        self._call("cuDeviceGetCount", ctypes.byref(value))
        self.count = value.value
        for field, symbol in (
            ("launch", "cuLaunchKernel"),
            ("launch_config", "cuLaunchKernelEx"),
            ("set_bytes", "cuMemsetD8Async"),
            ("get_current", "cuCtxGetCurrent"),
            ("push", "cuCtxPushCurrent_v2"),
            ("pop", "cuCtxPopCurrent_v2"),
            ("exchange_mode", "cuThreadExchangeStreamCaptureMode"),
        ):
            function = getattr(self._library, symbol)
            setattr(self.state, field, ctypes.cast(function, ctypes.c_void_p).value)
        for name, types in _ARGUMENTS.items():
            getattr(self._library, name).argtypes = types
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.state.forked = 1

    def check_ordinal(self, ordinal: int) -> None:
        """Raises DeviceError unless there is such a GPU and this process can use it."""
        if self.state.forked:
            raise DeviceError(FORKED)
        if not 0 <= ordinal < self.count:
            seen = f"cuda:0 to cuda:{self.count - 1}" if self.count else "none"
            raise DeviceError(f"there is no GPU cuda:{ordinal}; this process sees {seen}.")

    def name(self, ordinal: int) -> str:
        """What NVIDIA calls a GPU."""
        self.check_ordinal(ordinal)
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device(ordinal))
        return text.value.decode("utf-8", "replace")

    def capability(self, ordinal: int) -> tuple[int, int]:
        """A GPU's compute capability, such as ``(9, 0)``."""
        self.check_ordinal(ordinal)
        return self._attribute(ordinal, _MAJOR), self._attribute(ordinal, _MINOR)

    def programmatic(self, ordinal: int) -> bool:
        """Whether kernels of a GPU can begin before the one ahead has ended."""
        return self.capability(ordinal) >= (9, 0)

    def multiprocessors(self, ordinal: int) -> int:
        """How many streaming multiprocessors a GPU has."""
        self.check_ordinal(ordinal)
        return self._attribute(ordinal, _MULTIPROCESSORS)

    def memory_bus(self, ordinal: int) -> int:
        """The bits of a GPU's memory bus."""
        self.check_ordinal(ordinal)
        return self._attribute(ordinal, _BUS_WIDTH)

    def shared_memory(self, ordinal: int) -> int:
        """The bytes of threadgroup memory that one threadgroup may have on a GPU."""
        self.check_ordinal(ordinal)
        return self._attribute(ordinal, _SHARED_OPTIN)

    def load(
        self, ordinal: int, image: bytes, symbol: str, shared: int, registers: int = 0
    ) -> LoadedFunction:
        """Loads a kernel; it stays loaded.

        Args:
            ordinal: the GPU.
            image: a cubin, or PTX that ends with a NUL.
            symbol: the kernel's name in it.
            shared: bytes of dynamic shared memory that each launch is to have.
            registers: what a thread of PTX may have, where it must be limited; else 0.

        Raises:
            DeviceError: the driver refuses the image, or there is no such GPU.
        """
        self.check_ordinal(ordinal)
        context, device = self.context(ordinal), self._device(ordinal)
        with self.current(context), self.uncaptured():
            library = self._library_of(image)
            kernel = self._kernel(library, symbol)
            most = self._attribute_of(kernel, _KERNEL_THREADS, device)
            if not image.startswith(_ELF) and registers and most < _REGISTERS // registers:
                library = self._library_of(image, registers)
                kernel = self._kernel(library, symbol)
                most = self._attribute_of(kernel, _KERNEL_THREADS, device)
            if shared:
                self._call("cuKernelSetAttribute", _KERNEL_DYNAMIC, shared, kernel, device)
            names = {"printed": PRINTED, "counted": COUNTED}
            found = {key: self.variable(library, image, name) for key, name in names.items()}
            handle = self._handle(kernel)
            return LoadedFunction(handle, ordinal, context, shared, most, **found)

    def load_all(
        self, ordinal: int, image: bytes, symbols: Mapping[str, str]
    ) -> dict[str, LoadedFunction]:
        """Loads several kernels of one image; they stay loaded.

        Args:
            ordinal: the GPU.
            image: a cubin, or PTX that ends with a NUL.
            symbols: the kernels' names in it, under names of the caller's.

        Returns:
            The kernels, under the caller's names.

        Raises:
            DeviceError: the driver refuses the image, or there is no such GPU.
        """
        self.check_ordinal(ordinal)
        context, device = self.context(ordinal), self._device(ordinal)
        functions: dict[str, LoadedFunction] = {}
        with self.current(context), self.uncaptured():
            library = self._library_of(image)
            printed = self.variable(library, image, PRINTED)
            for name, symbol in symbols.items():
                kernel = self._kernel(library, symbol)
                most = self._attribute_of(kernel, _KERNEL_THREADS, device)
                static = self._attribute_of(kernel, _KERNEL_STATIC, device)
                handle, number = self._handle(kernel), int(kernel.value or 0)
                functions[name] = LoadedFunction(
                    handle, ordinal, context, 0, most, number, static, printed
                )
        return functions

    def allow_shared(self, function: LoadedFunction, size: int) -> None:
        """Lets launches of a kernel ask for so many bytes of dynamic shared memory, or fewer.

        Raises:
            DeviceError: the driver refuses.
        """
        device = self._device(function.ordinal)
        with self._lock_shared:  # another thread may allow more
            if size > function.allowed:
                with self.current(function.context), self.uncaptured():
                    kernel = ctypes.c_void_p(function.kernel)
                    self._call("cuKernelSetAttribute", _KERNEL_DYNAMIC, size, kernel, device)
                function.allowed = size

    def _library_of(self, image: bytes, registers: int = 0) -> ctypes.c_void_p:
        """An image loaded, whose threads have so many registers at most, where it is not 0."""
        library = ctypes.c_void_p()
        none: tuple[Any, ...] = (None, None, 0)
        options = none
        if registers:
            options = (
                ctypes.byref(ctypes.c_int(_JIT_REGISTERS)),
                ctypes.byref(ctypes.c_void_p(registers)),
                1,
            )
        self._call("cuLibraryLoadData", ctypes.byref(library), image, *options, *none)
        return library

    def _kernel(self, library: ctypes.c_void_p, symbol: str) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()
        self._call("cuLibraryGetKernel", ctypes.byref(kernel), library, symbol.encode())
        return kernel

    def _attribute_of(self, kernel: ctypes.c_void_p, attribute: int, device: int) -> int:
        value = ctypes.c_int()
        self._call("cuKernelGetAttribute", ctypes.byref(value), attribute, kernel, device)
        return value.value

    def _handle(self, kernel: ctypes.c_void_p) -> int:
        """A library's kernels are moved to the GPU when they are first asked for: now, not at the
        first launch, which may be recorded in a CUDA graph."""
        function = ctypes.c_void_p()
        self._call("cuKernelGetFunction", ctypes.byref(function), kernel)
        return int(function.value or 0)

    def number(self, name: str) -> int:
        """The number under which launches of a kernel are noted."""
        with self._lock:
            self._names.append(name)
            return len(self._names) - 1

    def launch(
        self,
        function: LoadedFunction,
        number: int,
        blocks: Sizes,
        block: Sizes,
        at: int,
        stream: int,
        shared: int | None = None,
        cluster: Sizes | None = None,
        pdl: bool = False,
    ) -> int:
        """Launches a kernel and returns at once.

        Args:
            function: what is launched.
            number: its `number`.
            blocks, block: blocks of the grid and threads of a block, along x, y and z.
            at: the address of a table with the address of each argument.
            stream: a CUstream as an integer; 0 is the GPU's default stream.
            shared: bytes of dynamic shared memory, which were allowed; the function's own if None.
            cluster: blocks of a cluster along x, y and z, or None for what the text says.
            pdl: it may begin before the kernel ahead has ended, where the GPU can do so.

        Returns:
            0, or a code for `failure`.
        """
        state, library = self.state, self._library
        shared = function.shared if shared is None else shared
        with self.current(function.context):
            state.last[state.count % KEPT] = number
            state.count += 1
            attributes = []
            if cluster is not None:
                value = (ctypes.c_uint * 16)(*cluster)
                attributes.append(_Attribute(_CLUSTER_DIMENSION, 0, value))
            if pdl and self.programmatic(function.ordinal):
                attributes.append(_Attribute(_PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1)))
            if not attributes:
                launch, handle = self.launcher or library.cuLaunchKernel, function.handle
                return int(launch(handle, *blocks, *block, shared, stream, at, None))
            sizes, count = (ctypes.c_uint * 7)(*blocks, *block, shared), len(attributes)
            config = _Config(sizes, stream, (_Attribute * count)(*attributes), count)
            return int(library.cuLaunchKernelEx(ctypes.byref(config), function.handle, at, None))

    def tensor_map(self, one: TensorMap) -> bytes:
        """The 128 bytes of a CUtensorMap.

        Raises:
            DeviceError: the driver refuses it.
        """
        rank = len(one.dims)
        room = ctypes.create_string_buffer(256)
        at = -(-ctypes.addressof(room) // 128) * 128  # where one must lie
        strides = [step * one.itemsize for step in one.strides]
        kind = _MAPPED.get(one.dtype, _MAPPED_BYTES[one.itemsize])
        swizzle, l2, fill = one.numbers
        self._call(
            "cuTensorMapEncodeTiled", at, kind, rank, one.address,
            (ctypes.c_uint64 * rank)(*one.dims[::-1]),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides[::-1]),
            (ctypes.c_uint32 * rank)(*one.box[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, swizzle, l2, fill,
        )  # fmt: skip
        return ctypes.string_at(at, 128)

    def fill(self, ordinal: int, address: int, count: int, pattern: bytes, stream: int) -> None:
        """Fills memory with a pattern; otherwise as `zero`.

        Args:
            ordinal: the GPU whose memory it is.
            address: where it begins, a multiple of the pattern's length.
            count: how often the pattern is to stand there.
            pattern: 1, 2 or 4 bytes.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Raises:
            DeviceError: as `zero`.
        """
        self.check_ordinal(ordinal)
        bits, _ = _PATTERNS[len(pattern)]
        if count:
            value = int.from_bytes(pattern, "little")
            with self.current(self.context(ordinal)):
                self._call(f"cuMemsetD{bits}Async", address, value, count, stream)

    def copy(self, ordinal: int, to: int, source: int, size: int, stream: int) -> None:
        """Copies memory of a GPU, after what was started on the stream before; waits for nothing.

        Args:
            ordinal: the GPU.
            to, source: where they begin.
            size: in bytes.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Raises:
            DeviceError: as `zero`.
        """
        self.check_ordinal(ordinal)
        if size:
            with self.current(self.context(ordinal)):
                self._call("cuMemcpyDtoDAsync_v2", to, source, size, stream)

    def zero(self, ordinal: int, address: int, size: int, stream: int) -> None:
        """Fills memory with zeros, after what was started on the stream before; waits for nothing.

        While the stream is recorded, this becomes a node of the CUDA graph.

        Args:
            ordinal: the GPU whose memory it is.
            address, size: the memory, in bytes.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Raises:
            DeviceError: there is no such GPU, or an earlier kernel broke the process's CUDA.
        """
        self.fill(ordinal, address, size, b"\0", stream)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Makes a context the current one inside a ``with`` block."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == context:
            yield
            return
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(current))

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Lets this thread load kernels inside a ``with`` block while a stream is recorded.

        torch.cuda.graph forbids all threads what might wait for the GPU while it records. Nothing
        that is called here is a part of what is recorded.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _attribute(self, ordinal: int, attribute: int) -> int:
        value = ctypes.c_int()
        device = self._device(ordinal)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def context(self, ordinal: int) -> int:
        """The primary context, which the array libraries use too; kept for ever."""
        with self._lock:
            if ordinal not in self._contexts:
                context = ctypes.c_void_p()
                device = self._device(ordinal)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = int(context.value or 0)
            return self._contexts[ordinal]


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The driver, loaded at the first call.

    Raises:
        DeviceError: there is none that can be used.
    """
    return Driver()


def after_a_fault(code: int, refused: str) -> DeviceError | None:
    """The error for what CUDA refused because of a kernel before it.

    Args:
        code: CUDA's, as an array library tells it.
        refused: what was refused, in words.

    Returns:
        None where the code says something else.
    """
    return driver().broken(code, refused) if code in EARLIER else None
