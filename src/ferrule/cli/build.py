"""``ferrule build``: machine code for NVIDIA GPUs, made on a machine that has none."""

from __future__ import annotations

from typing import Any

import click

from .. import CompileError, DeviceError
from .faults import Fault, readable
from .inspect import checked_architecture, not_compiled
from .target import described, options

# Launches in one row that between them need all that such launches can: whole threadgroups, whole
# simdgroups or neither, threadgroups of up to 256, 512 and 1024 threads, and so many that a block
# does well to carry out one, four or eight of them.
_ROWS = [
    ((threads + remainder, 1, 1), (size, 1, 1))
    for size in (256, 512, 1024)
    for threads in (1 << 14, 200 << 10, 1 << 20)
    for remainder in (0, 32, 1)
]


@click.command("build")
@options
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    required=True,
    metavar="SM",
    help="A GPU's architecture, such as sm_90. Once per architecture.",
)
@click.option("--to", "folder", required=True, type=click.Path(), help="The folder to fill.")
def command(architectures: tuple[str, ...], folder: str, **target_options: Any) -> None:
    """Compile a kernel for NVIDIA GPUs, to be carried to machines without NVRTC.

    There, "ferrule cache add FOLDER" puts it into the cache. It must be the same version of
    ferrule. FILE:NAME and the options that describe a call are those of "ferrule inspect"; without
    --grid, all launches in one row are provided for.

    FILE IS RUN: give only files that you trust.
    """
    kernel, call, title, notes = described(**target_options)
    click.echo(title)
    launches = [(call.pop("grid"), call.pop("threadgroup"))]
    if launches[0][0] is None:
        launches = _ROWS
        notes.append("threads: any number in one row; see --grid, --threadgroup")
    for note in notes:
        click.echo(f"note: {note}")
    for architecture in architectures:
        checked_architecture(architecture)
        payloads = set()
        for grid, threadgroup in launches:
            try:
                binary = kernel.compile(
                    architecture, **call, grid=grid, threadgroup=threadgroup, carry_to=folder
                )
            except CompileError as error:
                raise not_compiled(error, call) from error
            except DeviceError as error:
                raise Fault(str(error).replace("carry_to:", "--to:")) from error
            payloads.add(binary.payload)
        size = readable(sum(map(len, payloads)))
        files = "1 kernel" if len(payloads) == 1 else f"{len(payloads)} variants"
        click.echo(f"{architecture}: {files}, {size}, in {folder}")
