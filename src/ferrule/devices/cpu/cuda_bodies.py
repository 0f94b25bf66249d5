"""CUDA texts on the CPU: compiled from `source.cuda.on_cpu`'s text, and run over NumPy's memory.

For checking and for tests. A `cuda_kernel` that is called with arrays on the CPU is refused, as
ever: threads that are fibers are slow.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ... import cache
from ...errors import CompilerFailed, DeviceError
from ...kernel import Kernel
from ...source.cuda import on_cpu, unit
from ...spec import Facts, Launch, Spec
from ...tools import loader, toolchain
from ...unit import Copy, Fill, Product, Run, Sizes, Step, TensorMap, UnitSpec
from ..diagnostics import compile_error, refused
from ..digests import INCLUDE, header_digest
from .program import CpuDevice, CpuProgram, run_units

_FLAGS = (
    "-O1", "-w", "-fwrapv", "-fno-strict-aliasing", "-fsigned-char", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-fno-stack-protector",
)  # fmt: skip


def compile_text(text: str, name: str, flags: Sequence[str] = _FLAGS) -> bytes:
    """The shared library of a text that `source.cuda.on_cpu` wrote, from the cache if it is there.

    Raises:
        CompilerFailed: the compiler refused the text.
        ToolchainError: there is no compiler, or it crashed or hung.
    """
    compiler = toolchain.find_compiler()
    key = cache.digest("cuda on cpu", header_digest(), compiler.identity, *flags, text)
    # Quoted includes alone: <math.h> is the C library's.
    command = [*flags, "-iquote", str(INCLUDE)]
    return cache.default().get_or_make(key, lambda: compiler.compile(text, flags=command))


class _Bodies(CpuDevice):
    """The CPU for kernels whose body is CUDA."""

    def binary(self, spec: Spec, form: object) -> tuple[bytes, str]:
        """The shared library for a spec, whatever the launch, and how it runs."""
        on_cpu.refuse(spec)
        try:
            return compile_text(on_cpu.text(spec), spec.kernel.name), "fibers"
        except CompilerFailed as failed:
            compiler = toolchain.find_compiler()
            name = f"{compiler.kind} {compiler.version}"
            raise compile_error(spec.kernel, failed.log, name, ()) from None

    def check_shared(self, kernel: Kernel, shared: dict[int, int]) -> None:
        """Say nothing of Apple's limits."""


class _Body(CpuProgram):
    """A kernel whose body is CUDA."""

    def _plan(self, launch: Launch) -> Any:
        plan = super()._plan(launch)
        return plan._replace(sizes=(*plan.sizes[:9], self._spec.kernel.shared_memory))


@functools.lru_cache(maxsize=256)
def _body(spec: Spec) -> _Body:
    return _Body(_Bodies(), spec)


def whole_blocks(launch: Launch) -> Launch:
    """A launch with the threads beyond the grid that CUDA's blocks have."""
    x, y, z = (
        -(-g // t) * t if t else 0 for g, t in zip(launch.grid, launch.threadgroup, strict=True)
    )
    return launch._replace(grid=(x, y, z))


def run_on_cpu(
    spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
) -> None:
    """Run a kernel whose body is CUDA on the CPU, and wait for it.

    Args:
        spec: the kernel.
        inputs, outputs: its arrays, in the memory of this process.
        launch: its sizes; blocks are whole, as on a GPU.

    Raises:
        DialectError: the text uses something that the CPU has not.
        CompileError: the compiler refused it.
        DeviceError: as `CpuProgram.launch`.
    """
    _body(spec).launch(inputs, outputs, whole_blocks(launch))


@functools.lru_cache(maxsize=64)
def _unit(spec: UnitSpec) -> ctypes.CDLL:
    on_cpu.refuse(spec)
    try:
        payload = compile_text(on_cpu.unit_text(spec), spec.name)
    except CompilerFailed as failed:
        compiler = toolchain.find_compiler()
        name = f"{compiler.kind} {compiler.version}"
        raise refused("unit", spec.name, unit.texts(spec), failed.log, name) from None
    return loader.load_library(payload, spec.name)


def run_unit_on_cpu(
    spec: UnitSpec, steps: Sequence[Step], multiply: Callable[[Product], None] | None = None
) -> None:
    """Run a unit's steps on the CPU, one after the other.

    Args:
        spec: the unit.
        steps: with addresses in the memory of this process.
        multiply: does a matrix product, which is cuBLAS's on a GPU.

    Raises:
        DialectError, CompileError: as `run_on_cpu`.
        DeviceError: a step is a product that nobody does, or one with clusters or tensor maps; or
            a kernel failed.
    """
    library = _unit(spec)
    for step in steps:
        if isinstance(step, Fill):
            ctypes.memmove(step.address, step.pattern * step.times, len(step.pattern) * step.times)
        elif isinstance(step, Copy):
            ctypes.memmove(step.to, step.source, step.size)
        elif isinstance(step, Run):
            _run_step(library, spec, step)
        elif multiply is not None:
            multiply(step)
        else:
            problem = f"unit {spec.name!r}: {step.label} is cuBLAS's, which the CPU has not."
            raise DeviceError(problem)


def _run_step(library: ctypes.CDLL, spec: UnitSpec, step: Run) -> None:
    """Run one function of a unit."""
    if step.cluster not in (None, (1, 1, 1)):
        raise DeviceError(
            f"unit {spec.name!r}: {step.function} is launched in clusters of "
            f"{step.cluster}; the CPU runs blocks one after the other."
        )
    call = next(call for call in spec.calls if call.function == step.function)
    kept: list[ctypes.Array[ctypes.c_char]] = []
    buffers = array("Q")
    for value, (_, kind) in zip(step.arguments, call.arguments, strict=True):
        if isinstance(value, TensorMap):
            raise DeviceError(f"unit {spec.name!r}: {step.function} takes a tensor map.")
        if kind == "pointer":
            buffers.append(int.from_bytes(value, "little"))
        else:
            kept.append(ctypes.create_string_buffer(value, 8))
            buffers.append(ctypes.addressof(kept[-1]))
    grid: Sizes = tuple(b * t for b, t in zip(step.blocks, step.block, strict=True))  # type: ignore[assignment]
    sizes = (*grid, *step.block, *step.blocks, step.shared)
    launch = ctypes.create_string_buffer(
        struct.pack("=4Q10I", buffers.buffer_info()[0], 0, 0, 0, *sizes)
    )
    entry = ctypes.cast(getattr(library, on_cpu.entry_of(spec, step.function)), ctypes.c_void_p)
    x, y, z = step.blocks
    where = f"unit {spec.name!r}, {step.function} (blocks {step.blocks}, block {step.block})"
    status = run_units(entry, ctypes.addressof(launch), x * y * z, 0, where)
    if status:
        raise DeviceError(f"{where}: the CPU runtime failed with code {status}.")
