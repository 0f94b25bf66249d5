"""``ferrule inspect``: what a kernel becomes, without launching it."""

from __future__ import annotations

import warnings
from typing import Any

import click

from .. import CompileError, CudaKernel, DeviceError, ToolchainError, nvdisasm
from . import Fault
from .target import AnyKernel, described, options

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
def command(wanted: str | None, arch: str, **given: Any) -> None:
    """Print what a kernel becomes: Metal, C++ and CUDA, and how it runs. Nothing is launched.

    FILE:NAME is a Python file or an importable module, and in it the name of what
    ferrule.metal_kernel or ferrule.cuda_kernel returned, or of a function without arguments that
    returns it. Without NAME, the only kernel in the file is taken. A kernel that is written in CUDA
    has no Metal and no C++.

    FILE IS RUN, as by "python FILE" but without its `if __name__ == "__main__"` part: give only
    files that you trust.
    """
    kernel, call, title, notes = described(**given)
    if call["grid"] is None and wanted != "metal" and not isinstance(kernel, CudaKernel):
        notes.append(
            "threads: taken as a long row of large threadgroups; see --grid, --threadgroup"
        )

    # A single text can be sent to a file: all else then goes to the standard error.
    alone = wanted is not None
    click.echo(title, err=alone)
    for note in notes:
        click.echo(f"note: {note}", err=alone)
    if wanted == "cuda":
        _print_cuda(kernel, arch, call)
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


def _print_cuda(kernel: AnyKernel, arch: str, call: dict[str, Any]) -> None:
    """The CUDA text, PTX and SASS, and what ptxas says of registers and memory.

    Raises:
        Fault: it does not compile, or there is no such architecture.
    """
    if not arch.startswith("sm_"):
        raise Fault(f"--arch: got {arch!r}, expected an architecture such as sm_90.")
    text = kernel.text(arch, **call)
    try:
        binary = kernel.compile(arch, **call)
        ptx = kernel.compile(f"compute_{arch.removeprefix('sm_')}", **call).payload
    except CompileError as error:
        raise not_compiled(error, call) from error
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
