"""``ferrule inspect``: what a kernel becomes, without launching it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from .. import CompileError, CudaKernel, DeviceError, Op, ToolchainError
from ..operators.text import DescribedUnit
from ..tools import nvdisasm
from .faults import Fault
from .inspect_op import print_op
from .target import AnyKernel, described, find_kernel, options

_TITLES = {"metal": "Metal", "cpu": "C++ for the CPU", "cuda": "CUDA"}


@click.command("inspect")
@options
@click.option("--metal", "wanted", flag_value="metal", help="Only the Metal text.")
@click.option("--cpp", "wanted", flag_value="cpu", help="Only the C++ text for the CPU.")
@click.option(
    "--cuda",
    "wanted",
    flag_value="cuda",
    help="Only what NVIDIA's GPUs get: the CUDA text, PTX, SASS, registers, memory and spills.",
)
@click.option("--arch", default="sm_90", show_default=True, help="The GPU for --cuda.")
def command(wanted: str | None, arch: str, **target_options: Any) -> None:
    """Print what a kernel becomes: Metal, C++ and CUDA, and how it runs. Nothing is launched.

    FILE:NAME is a Python file or an importable module, and in it the name of what
    ferrule.metal_kernel, ferrule.cuda_kernel, ferrule.op or ferrule.adopt returned, or of a
    function without arguments that returns it. Without NAME, the only kernel in the file is taken,
    or else the only op. A kernel that is written in CUDA has no Metal and no C++.

    Of an op, its rule, implementations and derivative rules are printed, and how often its calls
    took a slower way; the texts of its kernels where --with describes all inputs.

    FILE IS RUN, as by "python FILE" but without its `if __name__ == "__main__"` part: give only
    files that you trust.
    """
    name, target = find_kernel(target_options["target"], ops=True)
    if isinstance(target, Op):
        for option in ("outputs", "templates", "grid", "threadgroup"):
            if target_options[option]:
                raise Fault(
                    "an op declares its outputs, template, grid and threadgroup: of a call "
                    "it is told the inputs alone, with --with."
                )
        texts, unit = partial(_print_texts, wanted, arch), partial(_print_unit, wanted, arch)
        print_op(name, target, target_options["inputs"], wanted, texts, unit)
        return
    kernel, call, title, notes = described(**target_options, found_kernel=(name, target))
    if call["grid"] is None and wanted != "metal" and not isinstance(kernel, CudaKernel):
        notes.append(
            "threads: taken as a long row of large threadgroups; see --grid, --threadgroup"
        )

    # A single text can be sent to a file: all else then goes to the standard error.
    click.echo(title, err=wanted is not None)
    for note in notes:
        click.echo(f"note: {note}", err=wanted is not None)
    _print_texts(wanted, arch, kernel, call)


def _print_texts(wanted: str | None, arch: str, kernel: AnyKernel, call: dict[str, Any]) -> None:
    """All texts of a kernel, or the one that is asked for."""
    alone = wanted is not None
    if wanted == "cuda":
        text = kernel.text(checked_architecture(arch), **call)
        try:
            _print_cuda(text, arch, lambda target: kernel.compile(target, **call))
        except CompileError as error:
            raise not_compiled(error, call) from error
        return
    for device in (wanted,) if wanted is not None else _TITLES:
        try:
            text = kernel.text(device, **call)
        except DeviceError:
            if alone:
                raise
            continue
        if not alone:
            click.echo(f"\n==== {_TITLES[device]} ====")
        click.echo(text, nl=not text.endswith("\n"))
        for note in _notes(kernel, device, call):
            click.echo(note, err=alone)


def not_compiled(error: CompileError, call: dict[str, Any]) -> Fault:
    """What to say of a kernel that does not compile."""
    hint = "\nA template parameter is given with --template NAME=VALUE."
    return Fault(f"{error}{'' if call['template'] else hint}")


def _print_unit(wanted: str | None, arch: str, unit: DescribedUnit) -> None:
    """The text of a unit; with ``--cuda`` all that `_print_cuda` prints.

    Raises:
        Fault: it does not compile, or there is no such architecture.
    """
    try:
        if wanted == "cuda":
            _print_cuda(unit.text, checked_architecture(arch), unit.compile)
        else:
            click.echo(unit.text, nl=False)
            unit.compile(checked_architecture(arch))
            click.echo("note: compiles")
    except CompileError as error:
        raise Fault(str(error)) from error
    except ToolchainError as error:
        click.echo(f"note: not compiled: {error}")


def checked_architecture(arch: str) -> str:
    """An architecture that was asked for.

    Raises:
        Fault: it is none.
    """
    if not arch.startswith("sm_"):
        raise Fault(f"--arch: got {arch!r}, expected an architecture such as sm_90.")
    return arch


def _print_cuda(text: str, arch: str, compile_for: Callable[[str], Any]) -> None:
    """The CUDA text, PTX and SASS, and what ptxas says of registers and memory.

    Args:
        text: the text.
        arch: an architecture.
        compile_for: what compiles it for one.

    Raises:
        CompileError: it does not compile.
    """
    try:
        binary = compile_for(arch)
        ptx = compile_for(f"compute_{arch.removeprefix('sm_')}").payload
    except ToolchainError as error:
        click.echo(text)
        click.echo(f"note: not compiled: {error}", err=True)
        return
    click.echo(text)
    click.echo(f"==== PTX for {arch} ====\n{ptx.rstrip(bytes(1)).decode().strip()}\n")
    try:
        click.echo(f"==== SASS for {arch} ====\n{nvdisasm.disassemble(binary.payload).strip()}\n")
    except ToolchainError as error:
        click.echo(f"note: not disassembled: {error}", err=True)
    click.echo(f"==== registers, memory and spills for {arch} ====")
    for line in binary.log.splitlines():
        if "stack frame" in line or "registers" in line:
            click.echo(line.replace("ptxas", "").replace("info", "").strip(" :."))


def _notes(kernel: AnyKernel, device: str, call: dict[str, Any]) -> list[str]:
    """How the kernel runs on a device, and what ferrule warns of.

    Raises:
        Fault: it does not compile.
    """
    if device == "metal":
        return ["note: MLX compiles this text on Apple's GPUs, after headers of its own"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            binary = kernel.compile(device, **call)
        except CompileError as error:
            raise not_compiled(error, call) from error
        except (DeviceError, ToolchainError) as error:
            return [f"note: not compiled: {error}"]
    return [
        *(f"warning: {warning.message}" for warning in caught),
        f"note: compiles, and runs as: {binary.mode}" if device == "cpu" else "note: compiles",
    ]
