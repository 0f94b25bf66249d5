"""The machine code that a package needs: a kernel's, for launches of every size.

A program in a process compiles the form of a launch when it first meets one. A package meets
launches that nobody has seen, so it has a form that serves them all, and before it the one for the
sizes of the export, which most calls will have.
"""

from __future__ import annotations

from typing import NamedTuple

from ..source import cpp
from ..source import cuda as cuda_text
from ..source.cuda_launch import Form as CudaForm
from ..source.cuda_launch import form_for, kernel_symbol, plain_form
from ..spec import Launch, Spec
from ..unit import UnitSpec
from . import compile_unit, cpu, cuda

# Names of packaged/ops.h, for what `cpu.Form` says.
_CPU_NEEDS = {
    "small": "FR_SMALL", "simd_rows": "FR_SIMD_ROWS", "group_rows": "FR_GROUP_ROWS",
    "aligned": "FR_WIDE",
}  # fmt: skip
_ANY_CPU = cpu.Form(small=False, simd_rows=False, group_rows=False, aligned=False)
# Threads in one row, threadgroups counted through, and nothing known of either.
_ANY_CUDA = CudaForm("line", far=True, aligned_arrays=False)
_BLOCKS = {"row": "lines", "line": "lines", "box": "boxes", "any": "any"}


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


def for_cpu(spec: Spec, example: Launch | None) -> tuple[Code, ...]:
    """The shared libraries of a kernel, that for the example's sizes first.

    Raises:
        CompileError, DialectError, ToolchainError: as `CpuDevice.compile` does.
    """
    device = cpu.device()
    found = [Code(device.binary(spec, _ANY_CPU)[0])]
    if example is not None:
        form = cpu.form_of(example)
        payload = device.binary(spec, form)[0]
        if payload != found[0].payload:
            needs = tuple(need for name, need in _CPU_NEEDS.items() if getattr(form, name))
            found.insert(0, Code(payload, needs))
    return tuple(found)


def for_cuda(
    spec: Spec, example: Launch | None, architecture: str, threads: int
) -> tuple[Code, ...]:
    """The cubins of a kernel for an architecture, that for the example's sizes first.

    Args:
        threads: how many a threadgroup may have.

    Raises:
        CompileError, DialectError, ToolchainError, DeviceError: as `CudaDevice.compile` does.
    """
    device = cuda.device(architecture)
    # Registers are for the largest threadgroup, whatever the example's has.
    largest = Launch((threads, 1, 1), (threads, 1, 1), (), None, ())

    def code(form: CudaForm, needs: tuple[str, ...]) -> Code:
        built = device.shaped(spec, largest, form)
        return Code(
            built.payload, needs, _BLOCKS[form.threads], form.far, architecture, built.shared,
            (kernel_symbol(spec),), form.each, form.aligned_arrays,
        )  # fmt: skip

    if spec.kernel.language == "cuda":
        return (code(CudaForm("box", aligned_arrays=False), ()),)
    forms = [_ANY_CUDA]
    lanes = False
    if example is not None:
        needs = cuda_text.needs_of(cpp.prepare(spec))
        lanes, form = needs.lanes, form_for(needs, example)
        # What the example's arrays and size allow, what its grid allows, and what is always right.
        forms = list(dict.fromkeys((form, plain_form(form), _ANY_CUDA)))
    return tuple(code(form, () if form == _ANY_CUDA else _needs(form, lanes)) for form in forms)


def for_unit(spec: UnitSpec, architecture: str) -> Code:
    """The cubin of a CUDA unit for an architecture; it is right for every launch.

    Raises:
        CompileError, ToolchainError, DeviceError: as `compile_unit` does.
    """
    built = compile_unit(architecture, spec)
    symbols = tuple(built.names[function] for function in spec.functions)
    return Code(built.payload, architecture=built.mode, symbols=symbols)


def _needs(form: CudaForm, lanes: bool) -> tuple[str, ...]:
    """What `form_for` asked of a launch before it said this."""
    found = {
        "FR_ONE_ROW": form.threads in ("row", "any"),
        "FR_SHALLOW": form.threads == "box",
        "FR_EVEN": form.whole or (form.threads == "box" and lanes),
        "FR_NEAR": not form.far,
        "FR_FULL": form.full,
        "FR_LANES_IN_X": form.aligned,
    }
    return tuple(name for name, asked in found.items() if asked)
