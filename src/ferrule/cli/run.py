"""``ferrule run``: a program for MLX, with ferrule in MLX."""

from __future__ import annotations

import click

import _ferrule_mlx

from .. import _env
from .faults import Program
from .program import AsPython, run_program


@click.command("run", cls=AsPython, context_settings={"allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(module: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run a Python program as python does, with ferrule.install_mlx() called for it.

    PROGRAM is a script or, after -m, a module; all that follows is given to it. Pythons that it
    starts install ferrule, too, where ferrule was installed by pip.
    """

    def run() -> None:
        install_in_mlx()
        run_program(module, program, arguments)

    raise Program(run)


def install_in_mlx() -> None:
    """Put ferrule into MLX once this process, or a Python that it starts, imports that."""
    _env.install_mlx_in_children()
    _ferrule_mlx.when_imported()
