"""Launching on NVIDIA GPUs: a kernel's cubins for one GPU, and the arguments of its launches."""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ...errors import DeviceError, ToolchainError
from ...source.cuda.launch import (
    ALIGNMENT,
    COUNTED,
    Form,
    blocks_of,
    dealt,
    groups_of,
    kernel_parameters,
    kernel_symbol,
    most_registers,
    possible_forms,
)
from ...spec import CUDA_RANK, Facts, Launch, Spec, extent
from ...tools.driver import LoadedFunction, Sizes, driver
from .. import protocol
from ..protocol import Binary, Native
from . import robust
from .watched import watched

_LAUNCH = struct.Struct("=9I")  # `fr::launch` of include/cuda_grid.h
_EXTENT = struct.Struct("=qQII")  # `fr::extent` of include/cuda_bounds.h
_MOST_PLANS = 256


class _CudaPlan:
    """The part of a launch that depends on its sizes, and on whether its arrays are aligned.

    Attributes:
        function: what is launched.
        blocks, block: blocks of the CUDA grid and threads of a block, along x, y and z.
        sizes: `fr::launch`.
    """

    def __init__(self, function: LoadedFunction, blocks: Sizes, block: Sizes, sizes: bytes) -> None:
        self.function, self.blocks, self.block, self.sizes = function, blocks, block, sizes


class ByPointer(NamedTuple):
    """A launch of a kernel whose arguments by value come by an address.

    Attributes:
        symbol, image, shared: its name, the cubin or PTX, and bytes of dynamic shared memory.
        blocks, block: blocks of the CUDA grid and threads of a block, along x, y and z.
        values: what the address points to.
        arrays: which of the kernel's inputs are pointers; the address follows them, and then the
            outputs.
    """

    symbol: str
    image: bytes
    shared: int
    blocks: Sizes
    block: Sizes
    values: bytes
    arrays: list[int]


class Forms(Protocol):
    """What compiles the forms of launches: `device.CudaDevice`."""

    def built(
        self, spec: Spec, launch: Launch | None, guards: str | None = None
    ) -> tuple[Form, Binary]:
        """The form of a launch, and its machine code."""
        ...

    def by_pointer(self, spec: Spec, launch: Launch) -> tuple[Form, Binary]:
        """The same with arguments behind a pointer."""
        ...


class CudaProgram:
    """A kernel on one GPU; its forms are compiled and loaded when they are first launched."""

    def __init__(self, device: Forms, spec: Spec, ordinal: int) -> None:
        self._device = device
        self._spec = spec
        self._ordinal = ordinal
        self._driver = driver()
        self._number = self._driver.number(spec.kernel.name)
        self._in_cuda = spec.kernel.language == "cuda"
        self._parameters = kernel_parameters(spec)
        self._arrays = [
            i for i, argument in enumerate(spec.inputs) if argument.ndim and not argument.value
        ]
        self._functions: dict[tuple[object, ...], tuple[Form, LoadedFunction]] = {}
        self._loads: dict[tuple[bytes, int], LoadedFunction] = {}
        self._plans: dict[tuple[object, ...], _CudaPlan] = {}
        self._lock = threading.Lock()

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        """Start the kernel on a stream, after what was started there before; waits for nothing.

        Raises:
            CompileError: NVRTC refused the kernel's text.
            DialectError: the text uses something that ferrule refuses.
            ToolchainError: there is no NVRTC.
            DeviceError: the GPU cannot run it, or an earlier kernel broke the process's CUDA.
        """
        self._driver.check_ordinal(self._ordinal)
        call = self._spec, inputs, outputs, launch
        if protocol.watcher is not None and watched(self._driver, self._ordinal, *call, stream):
            return
        plan = self._plan(inputs, outputs, launch)
        self._count(plan, inputs, outputs, launch)
        packed = packed_arguments(self._arguments(inputs, outputs, plan))
        at = ctypes.addressof(packed)
        status = self._driver.launch(
            plan.function, self._number, plan.blocks, plan.block, at, stream,
            pdl=self._spec.kernel.pdl,
        )  # fmt: skip
        if status:
            raise self.failure(status, launch, [*inputs, *outputs])
        if plan.function.printed:
            from ...tools import gpu_printing

            gpu_printing.show(self._driver, plan.function, self._spec.kernel.name, stream)

    def native(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> Native:
        """What runtime/op_calls.h needs to launch this over the same grid."""
        self._driver.check_ordinal(self._ordinal)
        if 0 in launch.grid:
            context = self._driver.context(self._ordinal)
            nothing = (0, context, 0, 0, 0, 0, 0, 0, 0, self._ordinal, self._number, 0)
            return Native(call=nothing, keep=self)
        plan = self._plan(inputs, outputs, launch)
        self._count(plan, inputs, outputs, launch)
        function = plan.function
        call = (
            function.handle,
            function.context,
            *plan.blocks,
            *plan.block,
            function.shared,
            self._ordinal,
            self._number,
            self._spec.kernel.pdl and self._driver.programmatic(self._ordinal),
            *[1] * (function.printed != 0),
        )
        return Native(
            call=call,
            sizes=_LAUNCH.unpack(plan.sizes),
            parameters=tuple(self._parameters),
            keep=(plan, self),
        )

    def _count(
        self, plan: _CudaPlan, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> None:
        """Have a check know of what it starts, or C does, or a CUDA graph will."""
        watcher, name = protocol.watcher, self._spec.kernel.name
        if watcher is None:
            return
        on = f"kernel {name!r} on cuda:{self._ordinal}"
        if plan.function.counted:
            watcher.counted(self._driver, plan.function, self._spec, [*inputs, *outputs], launch)
            watcher.note(f"{on} was checked there: unwritten, and, of x[i], bounds and nan.")
        else:
            watcher.note(f"not checked: {on}; give it arrays on the CPU.")

    def by_pointer(self, inputs: Sequence[Facts], launch: Launch) -> ByPointer:
        """What a launcher that passes arrays alone needs; arrays may begin anywhere.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `launch` does.
        """
        launch = launch._replace(aligned=False)
        form, built = self._device.by_pointer(self._spec, launch)
        blocks, block = self._blocks(form, launch)
        values = bytearray()
        for kind, i in self._parameters:
            if kind in ("input", "output"):
                continue
            if kind == "launch":
                value = self._sizes(form, launch)
            elif kind == "extent":
                value = self._extent_by_pointer(inputs, launch, i)
            else:
                value = self._by_value(kind, inputs[i])
            # As C lays them out: each at a multiple of its elements' size.
            width = {"shape": 4, "strides": 8, "extent": 8, "launch": 4}.get(kind) or len(value)
            values += bytes(-len(values) % width) + value
        return ByPointer(
            kernel_symbol(self._spec),
            built.payload,
            self._shared(built),
            blocks,
            block,
            bytes(values),
            [i for kind, i in self._parameters if kind == "input"],
        )

    def _by_value(self, kind: str, fact: Facts) -> bytes:
        """A number, or an array's shape or strides."""
        if kind == "value":
            return ctypes.string_at(fact.pointer, fact.dtype.itemsize)
        numbers = fact.shape if kind == "shape" else fact.strides
        if self._in_cuda:
            numbers += (0,) * (CUDA_RANK - len(numbers))
        return struct.pack(f"={len(numbers)}{'i' if kind == 'shape' else 'q'}", *numbers)

    def _extent_by_pointer(self, inputs: Sequence[Facts], launch: Launch, i: int) -> bytes:
        """Which elements an array has, before it is evaluated or copied."""
        shape = launch.output_shapes[i - len(inputs)] if i >= len(inputs) else inputs[i].shape
        if i < len(inputs) and not self._spec.kernel.ensure_row_contiguous:
            return _extent(*extent(shape, inputs[i].strides))
        return _extent(0, math.prod(shape))

    def _sizes(self, form: Form, launch: Launch) -> bytes:
        """`fr::launch`."""
        launch = dealt(form, launch)
        return _LAUNCH.pack(*launch.grid, *launch.threadgroup, *groups_of(launch))

    def _blocks(self, form: Form, launch: Launch) -> tuple[Sizes, Sizes]:
        """The blocks of the CUDA grid and the threads of a block, along x, y and z.

        Raises:
            DeviceError: CUDA cannot launch so many.
        """
        try:
            return blocks_of(form, launch)
        except OverflowError as error:
            raise DeviceError(
                f"kernel {self._spec.kernel.name!r}: grid {launch.grid} with threadgroup "
                f"{launch.threadgroup} has {error}, more than CUDA can launch."
            ) from None

    def failure(self, status: int, launch: Launch, arrays: list[Facts]) -> DeviceError:
        """The error for a launch that ended with ``status``, a CUresult."""
        return self._driver.failure(
            status,
            f"kernel {self._spec.kernel.name!r} (grid {launch.grid}, threadgroup "
            f"{launch.threadgroup}, cuda:{self._ordinal})",
        )

    def _plan(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> _CudaPlan:
        """The plan for the launch's sizes, and for whether its arrays are aligned."""
        pointers = [inputs[i].pointer for i in self._arrays] + [f.pointer for f in outputs]
        if any(pointer % ALIGNMENT for pointer in pointers):
            launch = launch._replace(aligned=False)
        guards = self._guards()
        key = (launch.grid, launch.threadgroup, launch.aligned, guards)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        try:
            return self._made(launch, guards, key)
        except ToolchainError:  # what is in the cache has no counters
            if guards != COUNTED:
                raise
            return self._made(launch, robust.guards(), key)

    def _guards(self) -> str:
        """What is done about accesses outside of arrays: in a check they are counted."""
        if self._in_cuda or protocol.watcher is None:
            return robust.guards()
        return COUNTED if protocol.watcher.counts(self._spec.kernel) else robust.guards()

    def _made(self, launch: Launch, guards: str, key: tuple[object, ...]) -> _CudaPlan:
        form, function = self._loaded(launch, guards)
        blocks, block = self._blocks(form, launch)
        plan = _CudaPlan(function, blocks, block, self._sizes(form, launch))
        threads = block[0] * block[1] * block[2]
        if threads > plan.function.most_threads:
            raise DeviceError(
                f"kernel {self._spec.kernel.name!r}: a threadgroup of {threads} threads needs more "
                f"registers than the GPU has; {plan.function.most_threads} threads fit."
            )
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        return self._plans.setdefault(key, plan)

    def _loaded(self, launch: Launch, guards: str) -> tuple[Form, LoadedFunction]:
        """The form of a launch, and what is loaded for it."""
        key = (guards, *possible_forms(launch), most_registers(launch))
        with self._lock:
            loaded = self._functions.get(key)
            if loaded is None:
                form, built = self._device.built(self._spec, launch, guards)
                registers = most_registers(dealt(form, launch))
                same = built.payload, registers  # of several forms
                function = self._loads.get(same)
                if function is None:
                    function = self._loads[same] = self._load(built, registers)
                loaded = self._functions[key] = form, function
        return loaded

    def _load(self, built: Binary, registers: int) -> LoadedFunction:
        function = self._driver.load(
            self._ordinal,
            built.payload,
            kernel_symbol(self._spec),
            self._shared(built),
            registers,
        )
        if function.printed:
            from ...tools import gpu_printing

            gpu_printing.know(self._driver, function, self._spec.kernel.name)
        return function

    def _shared(self, built: Binary) -> int:
        """The bytes of dynamic shared memory of a launch."""
        dynamic = self._spec.kernel.shared_memory
        if not dynamic:
            return built.shared
        most = self._driver.shared_memory(self._ordinal)
        if dynamic + built.memory > most:
            own = f" and {built.memory} of the body's own" if built.memory else ""
            raise DeviceError(
                f"kernel {self._spec.kernel.name!r}: shared_memory={dynamic} bytes{own}, but "
                f"a block of cuda:{self._ordinal} ({self._driver.name(self._ordinal)}) has {most} "
                "at most."
            )
        return dynamic

    def _arguments(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], plan: _CudaPlan
    ) -> Iterator[bytes]:
        """What the kernel takes: addresses, and what it takes by value."""
        arrays = [*inputs, *outputs]
        for kind, i in self._parameters:
            if kind in ("input", "output"):
                array = (inputs if kind == "input" else outputs)[i]
                yield array.pointer.to_bytes(8, "little")
            elif kind == "launch":
                yield plan.sizes
            elif kind == "extent":
                array = arrays[i]  # without an address it is absent or empty
                yield _extent(*extent(array.shape, array.strides) if array.pointer else (0, 0))
            else:
                yield self._by_value(kind, inputs[i])


def packed_arguments(arguments: Iterable[bytes]) -> ctypes.Array[ctypes.c_char]:
    """The arguments of a launch in one block of memory, whose start tells where each stands."""
    values = [value + bytes(-len(value) % 8) for value in arguments]
    *offsets, size = itertools.accumulate(map(len, values), initial=8 * len(values))
    block = ctypes.create_string_buffer(max(size, 1))
    at = ctypes.addressof(block)
    table = struct.pack(f"={len(offsets)}Q", *[at + offset for offset in offsets])
    ctypes.memmove(block, table + b"".join(values), size)
    return block


def _extent(first: int, count: int) -> bytes:
    """`fr::extent`."""
    return _EXTENT.pack(first, count, min(count, 1 << 31), 0)
