"""Devices: who compiles, loads and launches. They never allocate arrays; hosts do."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import DeviceError, KernelTypeError
from ..spec import Facts, Launch, Spec
from ..unit import UnitSpec

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_unit import UnitProgram


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
    """What runtime/torch_calls.c must know to launch a kernel for launches of one form.

    Attributes:
        run, entry: addresses of ``fr_run_some`` and of the kernel, on the CPU.
        limit: the number of CPU threads, 0 for all.
        over_grid: on the CPU, units of work are runs of ``block`` threads along x.
        block: see there.
        described: the inputs whose shape and strides the body reads, a bit each.
        call: the fields of ``cuda_call`` of runtime/cuda_launch.h, on a GPU.
        sizes: ``fr::launch`` of include/cuda_grid.h.
        parameters: what the kernel takes, of `source.cuda_launch.kernel_parameters`.
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


class Program(Protocol):
    """A kernel that is loaded and can be launched."""

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        """Run the kernel over these arrays, which the caller keeps alive."""
        ...

    def repeat(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> tuple[object, ...] | None:
        """How runtime/fastcall.c launches this again; None where it cannot, or need not yet."""
        ...

    def native(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> Native:
        """How runtime/torch_calls.c launches this; of a grid without threads, what only fills."""
        ...

    def failure(self, status: int, launch: Launch, arrays: list[Facts]) -> DeviceError:
        """The error for a launch by runtime/fastcall.c that ended with ``status``."""
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
    if name == "cpu":
        from .cpu import device

        return device()
    if name.split(":")[0] == "cuda":
        from . import cuda

        return cuda.gpu(name)
    if name.startswith(("sm_", "compute_")):
        from . import cuda

        return cuda.device(name)
    if name.split(":")[0] == "mps":
        raise DeviceError(
            "kernels on Apple's GPUs are launched by torch, for ops alone: declare one with "
            "ferrule.op, or give tensors on the CPU."
        )
    raise DeviceError(
        f"there is no device {name!r}; expected 'cpu', 'cuda', or an architecture such as 'sm_90'."
    )


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
    from .cuda_unit import built

    return built(spec, _nvidia(name, spec).architecture)


def unit_program(name: str, spec: UnitSpec) -> UnitProgram:
    """A CUDA unit on one GPU; compiled and loaded when it is first launched.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """
    from .cuda_unit import UnitProgram

    device = _nvidia(name, spec)
    if device.ordinal is None:
        raise DeviceError(
            f"unit {spec.name!r}: {device.architecture!r} is an architecture, which units are "
            "compiled for; a GPU to run them is called 'cuda:0'."
        )
    return UnitProgram(spec, device.architecture, device.ordinal)


def _nvidia(name: str, spec: UnitSpec) -> CudaDevice:
    from .cuda import CudaDevice

    device = get(name)
    if not isinstance(device, CudaDevice):
        raise DeviceError(f"unit {spec.name!r} runs on NVIDIA GPUs alone, not on {name!r}.")
    return device


def after_a_fault(code: int, what: str) -> DeviceError | None:
    """The error for what CUDA refused because of a kernel before it.

    Args:
        code: CUDA's, as an array library tells it.
        what: what was refused, in words.

    Returns:
        None where the code says something else.
    """
    from .. import driver

    return driver.driver().broken(code, what) if code in driver.EARLIER else None


def carry(name: str, spec: Spec, launch: Launch | None, folder: str | PathLike[str]) -> Binary:
    """Compile for an NVIDIA GPU, into a folder from which another machine's cache can be filled.

    Raises:
        DeviceError: the device is no NVIDIA GPU, or the folder cannot be written.
    """
    from .. import cache
    from .cuda import CudaDevice

    device = get(name)
    if not isinstance(device, CudaDevice):
        raise DeviceError(
            f"carry_to: kernels are carried to NVIDIA GPUs alone, not to {name!r}; expected an "
            "architecture such as 'sm_90'."
        )
    to = cache.Cache(fspath(folder), quiet=True)
    if to.reason_disabled is not None:
        raise DeviceError(f"carry_to: {to.path} cannot be written: {to.reason_disabled}.")
    return device.carry(spec, launch, to)
