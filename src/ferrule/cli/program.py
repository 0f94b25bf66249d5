"""``ferrule run``: a program for MLX, with ferrule in MLX."""

from __future__ import annotations

import importlib.util
import runpy
import shlex
import sys
from pathlib import Path
from types import TracebackType

import click

import _ferrule_mlx

from .. import _env
from .faults import Program


class _AsPython(click.Command):
    """A command line as python's own: the name of a module may follow -m without a space, and all
    that comes after the program's name is the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-m"):
            name = [args[0][2:]] if len(args[0]) > 2 else []
            args = ["-m", "--", *name, *args[1:]]
        return super().parse_args(ctx, args)


@click.command("run", cls=_AsPython, context_settings={"allow_interspersed_args": False})
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
    sys.excepthook = _show_error
    # The first place on the path was ferrule's own; Python puts the program's there.
    if module:
        sys.path[0] = ""
        _check_module(program)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        path = Path(program)
        if not path.exists():
            _refuse(f"There is no file {program!r}.{_as_module(program, arguments)}")
        if path.is_dir() and not (path / "__main__.py").exists():
            _refuse(f"The folder {program!r} has no file __main__.py.")
        sys.path[0] = str(path.resolve().parent)
        runpy.run_path(program, run_name="__main__")


def _check_module(name: str) -> None:
    """Refuse a module that is not there, or is a package that cannot be run."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of an import in a package of the program
        spec = None
    if spec is None:
        _refuse(f"No module named {name!r}.")


def _as_module(name: str, arguments: tuple[str, ...]) -> str:
    """What to say where a name is that of a module: how that is run."""
    try:
        spec = all(map(str.isidentifier, name.split("."))) and importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return f" To run the module: ferrule run -m {shlex.join([name, *arguments])}" if spec else ""


def _refuse(message: str) -> None:
    click.echo(f"Error: {message}", err=True)
    sys.exit(2)


def _show_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an error as Python does, without the calls that led to the program."""
    start = traceback
    while start is not None and start.tb_frame.f_code is not _run.__code__:
        start = start.tb_next
    start = traceback if start is None else start.tb_next  # none of ours: a thread's
    while start is not None and start.tb_frame.f_globals.get("__name__") == "runpy":
        start = start.tb_next
    sys.__excepthook__(kind, error.with_traceback(start), start)
