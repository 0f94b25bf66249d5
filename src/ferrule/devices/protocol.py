"""Devices: who compiles, loads and launches. They never allocate arrays; hosts do."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike, fspath
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .. import cache
from ..dtypes import Dtype
from ..errors import DeviceError, KernelTypeError
from ..kernel import Kernel
from ..spec import Facts, Launch, Spec
from ..unit import Product, Run, Step, UnitSpec


class Binary(NamedTuple):
    """Compiled bytes for one `Spec` and one target.

    Attributes:
        payload: the bytes: a shared library for the CPU; for CUDA a cubin, or PTX for a
            ``compute_…`` architecture.
        mode: how the text runs threads, such as ``"flat"`` or ``"fibers"``; for CUDA the
            architecture, such as ``"sm_90"``.
        text: the text that was compiled.
        log: what the compiler said of it: for a cubin its registers, memory and spills.
        shared: for CUDA the bytes of dynamic shared memory that each launch must ask for.
        memory: for CUDA the bytes of threadgroup memory in all.
    """

    payload: bytes
    mode: str
    text: str
    log: str = ""
    shared: int = 0
    memory: int = 0

    def __repr__(self) -> str:
        return f"<ferrule.Binary {self.mode}: {len(self.payload)} bytes>"


class Native(NamedTuple):
    """What runtime/op_calls.h must know to launch a kernel for launches of one form.

    Attributes:
        run, entry: addresses of ``fr_run_some`` and of the kernel, on the CPU.
        limit: the number of CPU threads, 0 for all.
        over_grid: on the CPU, units of work are runs of ``block`` threads along x.
        block: see there.
        described: the inputs whose shape and strides the body reads, a bit each.
        call: the fields of ``cuda_call`` of runtime/cuda_launch.h, on a GPU.
        sizes: ``fr::launch`` of include/cuda_grid.h.
        parameters: what the kernel takes, of `source.cuda.launch.kernel_parameters`.
        keep: what must live as long as this is used.
    """

    run: int = 0
    entry: int = 0
    limit: int = 0
    over_grid: bool = False
    block: int = 0
    described: int = 0
    call: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    keep: object = None


class UnitBinary(NamedTuple):
    """Compiled bytes for one `UnitSpec` and one architecture.

    Attributes:
        payload: a cubin, or PTX for a ``compute_…`` architecture.
        mode: the architecture.
        text: the text that was compiled.
        log: what the compiler said of it: registers, memory and spills.
        names: what the functions that steps call are called in the payload.
    """

    payload: bytes
    mode: str
    text: str
    log: str
    names: dict[str, str]

    def __repr__(self) -> str:
        return f"<ferrule.UnitBinary {self.mode}: {len(self.payload)} bytes>"


class Code(NamedTuple):
    """Machine code for launches of some sizes.

    Attributes:
        payload: a shared library, or for CUDA a cubin or PTX.
        needs: what must hold of a launch: names of ops.h.
        blocks: for CUDA, how blocks hold threads: ``"lines"``, ``"boxes"`` or ``"any"``.
        far: for CUDA, whether threadgroups are counted through.
        architecture: such as ``"sm_90"``; empty for the CPU.
        shared: for CUDA, bytes of dynamic shared memory.
        symbols: for CUDA, the names of its functions: one, or in the order of a unit's
            `functions`.
        each: for CUDA, threadgroups that a block carries out.
        aligned: for CUDA, whether arrays begin at multiples of 16 bytes.
    """

    payload: bytes
    needs: tuple[str, ...] = ()
    blocks: str = "lines"
    far: bool = False
    architecture: str = ""
    shared: int = 0
    symbols: tuple[str, ...] = ()
    each: int = 1
    aligned: bool = False


class Program(Protocol):
    """A kernel that is loaded and can be launched."""

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        """Run the kernel over these arrays, which the caller keeps alive."""
        ...

    def native(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> Native:
        """How runtime/op_calls.h launches this; of a grid without threads, what only fills."""
        ...

    def failure(self, status: int, launch: Launch, arrays: list[Facts]) -> DeviceError:
        """The error for a launch by C that ended with ``status``."""
        ...


class Device(Protocol):
    """One place where kernels run."""

    name: str

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        """What the kernel becomes on this device."""
        ...

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        """The compiled kernel, from the disk cache where it is there; launches nothing."""
        ...

    def program(self, spec: Spec) -> Program:
        """The loaded kernel, remembered per `Spec`."""
        ...

    def packaged(self, spec: Spec, example: Launch | None, threads: int) -> tuple[Code, ...]:
        """The machine code for launches of every size, that for the example's sizes first.

        A program in a process compiles the form of a launch when it first meets one. A package
        meets launches that nobody has seen, so it has a form that serves them all, and before it
        the one for the sizes of the export, which most calls will have.

        Args:
            threads: how many a threadgroup may have.
        """
        ...


class UnitKernels(Protocol):
    """Steps of a unit's calls that differ in words alone: addresses, and numbers.

    Attributes:
        state, context, steps, count, begin: for C: what `cuda_start_unit` of runtime/cuda_units.h
            takes, and its address.
    """

    state: int
    context: int
    steps: int
    count: int
    begin: int

    def start(self, words: Sequence[int], stream: int) -> None:
        """Start them, one after the other; waits for nothing."""
        ...

    def failure(self, status: int, tried: int) -> DeviceError:
        """The error for a status, after so many steps had been tried."""
        ...


class UnitProgram(Protocol):
    """A CUDA unit on one GPU; compiled and loaded when it is first launched."""

    def launch(self, steps: Sequence[Step], stream: int) -> None:
        """Start the steps, one after the other; waits for nothing."""
        ...

    def kernels(
        self, steps: Sequence[Run | Product], words: Sequence[Sequence[int]]
    ) -> UnitKernels | None:
        """What starts these steps again and again; None where they take too much."""
        ...


@runtime_checkable
class NvidiaDevice(Device, Protocol):
    """A device that runs CUDA units, or compiles them, and whose kernels can be carried."""

    def unit_binary(self, spec: UnitSpec) -> UnitBinary:
        """The machine code of a unit."""
        ...

    def unit_program(self, spec: UnitSpec) -> UnitProgram:
        """A unit on this GPU."""
        ...

    def carry(self, spec: Spec, launch: Launch | None, to: cache.Cache) -> Binary:
        """Compile a kernel, and put it where another machine's cache can be filled from."""
        ...


class Watcher(Protocol):
    """What runs launches in place of their programs, while kernels are checked."""

    def launch(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> bool:
        """Run a launch, and wait for it; False where its program is to do so."""
        ...

    def native(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> Native | None:
        """What lets C run it, with arrays where C says then; None as `launch` gives False."""
        ...

    def note(self, text: str) -> None:
        """Remark on what is not watched."""
        ...

    def copies(self, kernel: Kernel) -> bool:
        """Whether a launch on a GPU is to run on the CPU, over copies of its arrays."""
        ...

    def counts(self, kernel: Kernel) -> bool:
        """Whether a Metal body that runs on a GPU is to count its accesses outside of arrays."""
        ...

    def counted(
        self, driver: Any, function: Any, spec: Spec, arrays: Sequence[Facts], launch: Launch
    ) -> None:
        """Read what a kernel that is loaded on a GPU counts, when the check ends."""
        ...

    def units(self, name: str) -> bool:
        """Whether an op's implementations in CUDA are run on the CPU."""
        ...

    def unit(
        self,
        spec: UnitSpec,
        steps: Sequence[Step],
        places: Mapping[str, tuple[int, Dtype, int]],
        inputs: Collection[str],
    ) -> None:
        """Run a unit's steps over these arrays, by name, and wait for them."""
        ...

    def runs(self, kernel: Kernel) -> bool:
        """Whether launches of a kernel in CUDA are run on the CPU."""
        ...


ON_CPU = "cudacpu"  # the device of implementations in CUDA that are run on the CPU

# Who watches; `ferrule.check` sets it.
watcher: Watcher | None = None


def runs_cuda(kernel: Kernel) -> bool:
    """Whether a kernel in CUDA is run on the CPU now: while it is checked."""
    return watcher is not None and watcher.runs(kernel)


# What gives `ferrule.checking`, once there is one.
checks: list[Callable[[], Callable[..., AbstractContextManager[list[Any]]]]] = []


def checking() -> AbstractContextManager[list[Any]]:
    """A block in which kernels are checked; a list of what is found."""
    return checks[0]()()


# What makes devices, by how their names begin: ``"cpu"``, ``"cuda"``, ``"sm"``. None for a name
# that is no device's.
offered: dict[str, Callable[[str], Device | None]] = {}


def get(name: str) -> Device:
    """The device called ``"cpu"``, ``"cuda"`` or ``"cuda:0"`` …; or one that only compiles, for an
    NVIDIA architecture such as ``"sm_90"`` or, to PTX, ``"compute_90"``.

    Raises:
        DeviceError: there is no such device here.
    """
    if not isinstance(name, str):
        raise KernelTypeError(f"device: got {name!r}, expected a name such as 'cpu' or 'cuda'.")
    if name == "metal":
        raise DeviceError(
            "Metal's text is compiled by MLX on Apple's GPUs; `text('metal', …)` shows it."
        )
    make = offered.get(re.split("[:_]", name, maxsplit=1)[0])
    device = None if make is None else make(name)
    if device is not None:
        return device
    if name.split(":")[0] == "mps":
        raise DeviceError(
            "kernels on Apple's GPUs are launched by torch, for ops alone: declare one with "
            "ferrule.op, or give tensors on the CPU."
        )
    raise DeviceError(
        f"there is no device {name!r}; expected 'cpu', 'cuda', or an architecture such as 'sm_90'."
    )


def described(name: str) -> Mapping[str, Any]:
    """What launches may depend on of a device: ``":device"``, its kind; and where that is known
    the numbers of `rules.expression.DEVICE_NUMBERS`.

    Args:
        name: ``"cpu"``, ``"cuda:0"``, ``"mps"`` …; ``""`` where nothing runs.

    Raises:
        DeviceError: there is no such GPU, or no driver.
    """
    kind = name.partition(":")[0]
    if kind == "cpu":
        from ..tools.binding import get_threads

        return {":device": "cpu", "sm_count": get_threads(), "capability": 0, "memory_bus": 0}
    if kind == ON_CPU:
        numbers = {"sm_count": 4, "capability": 80, "memory_bus": 5120}
        return {":device": "cuda", **numbers}
    if kind == "cuda":
        return _gpu_described(int(name.partition(":")[2] or 0))
    return (
        {":device": "metal", "capability": 0, "memory_bus": 0} if kind in ("metal", "mps") else {}
    )


@functools.cache
def _gpu_described(ordinal: int) -> Mapping[str, Any]:
    from ..tools.driver import driver

    major, minor = driver().capability(ordinal)
    numbers = {
        "sm_count": driver().multiprocessors(ordinal),
        "capability": 10 * major + minor,
        "memory_bus": driver().memory_bus(ordinal),
    }
    return {":device": "cuda", **numbers}


def compile_unit(name: str, spec: UnitSpec) -> UnitBinary:
    """The machine code of a CUDA unit; needs no GPU.

    Args:
        name: ``"cuda"``, ``"cuda:0"`` …, or an architecture such as ``"sm_90"``.
        spec: the unit.

    Raises:
        CompileError: NVRTC refused the text, or a step does not fit its function.
        ToolchainError: there is no NVRTC, or CUDA's headers are missing.
        DeviceError: there is no such device, or NVRTC does not know its architecture.
    """
    return _nvidia(name, spec).unit_binary(spec)


def unit_program(name: str, spec: UnitSpec) -> UnitProgram:
    """A CUDA unit on one GPU; compiled and loaded when it is first launched.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """
    return _nvidia(name, spec).unit_program(spec)


def packaged_unit(name: str, spec: UnitSpec) -> Code:
    """The cubin of a CUDA unit for an architecture; it is right for every launch.

    Raises:
        CompileError, ToolchainError, DeviceError: as `compile_unit` does.
    """
    built = compile_unit(name, spec)
    symbols = tuple(built.names[function] for function in spec.functions)
    return Code(built.payload, architecture=built.mode, symbols=symbols)


def _nvidia(name: str, spec: UnitSpec) -> NvidiaDevice:
    device = get(name)
    if not isinstance(device, NvidiaDevice):
        raise DeviceError(f"unit {spec.name!r} runs on NVIDIA GPUs alone, not on {name!r}.")
    return device


def carry(name: str, spec: Spec, launch: Launch | None, folder: str | PathLike[str]) -> Binary:
    """Compile for an NVIDIA GPU, into a folder from which another machine's cache can be filled.

    Raises:
        DeviceError: the device is no NVIDIA GPU, or the folder cannot be written.
    """
    device = get(name)
    if not isinstance(device, NvidiaDevice):
        raise DeviceError(
            f"carry_to: kernels are carried to NVIDIA GPUs alone, not to {name!r}; expected an "
            "architecture such as 'sm_90'."
        )
    to = cache.Cache(fspath(folder), quiet=True)
    if to.reason_disabled is not None:
        raise DeviceError(f"carry_to: {to.path} cannot be written: {to.reason_disabled}.")
    return device.carry(spec, launch, to)
