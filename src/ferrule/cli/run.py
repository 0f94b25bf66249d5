"""``ferrule run``: a program for MLX, with ferrule in MLX."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

import _ferrule_mlx

from .. import _env
from . import Program


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(module: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run a Python program as python does, with ferrule.install_mlx() called for it.

    PROGRAM is a script or, after -m, a module; all that follows is given to it. Pythons that it
    starts install ferrule, too, where ferrule was installed by pip.
    """

    def run() -> None:
        _env.install_mlx_in_children()
        _ferrule_mlx.when_imported()
        _run(module, program, arguments)

    raise Program(run)


def _run(module: bool, program: str, arguments: tuple[str, ...]) -> None:
    sys.argv[:] = [program, *arguments]
    # The first place on the path was ferrule's own; Python puts the program's there.
    if module:
        sys.path[0] = ""
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
