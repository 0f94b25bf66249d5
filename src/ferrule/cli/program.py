"""Programs of the user's that a command runs as python does: scripts and modules."""

from __future__ import annotations

import importlib.util
import runpy
import shlex
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import click


class NotRun(SystemExit):
    """There is no such program; a message has said so."""


class AsPython(click.Command):
    """A command line as python's own: the name of a module may follow -m without a space, and all
    that comes after the program's name is the program's."""

    last: tuple[str, ...] = ("-m",)  # options after which the program is named

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        i = self._end_of_options(ctx, args)
        option = next((o for o in self.last if i < len(args) and args[i].startswith(o)), None)
        if option is not None:
            rest = args[i].removeprefix(option)
            if option == "-m" or not rest:
                args = [*args[:i], option, "--", *([rest] if rest else []), *args[i + 1 :]]
        return super().parse_args(ctx, args)

    def _end_of_options(self, ctx: click.Context, args: list[str]) -> int:
        """Where the options end that are the command's own, but for one of `last`."""
        with_values = {
            name
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        i = 0
        while i < len(args) and args[i].startswith("-") and not args[i].startswith(self.last):
            i += 2 if args[i] in with_values else 1
        return i


def run_program(
    module: bool, program: str, arguments: tuple[str, ...], command: str = "run"
) -> None:
    """Run a program in this process, which shows its errors as Python does.

    Args:
        module: whether ``program`` is a module, as with python -m.
        program: a script, a folder with a ``__main__.py``, or a module.
        arguments: what it is given.
        command: the command of ferrule's that runs it.
    """
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
            _refuse(f"There is no file {program!r}.{_as_module(command, program, arguments)}")
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


def _as_module(command: str, name: str, arguments: tuple[str, ...]) -> str:
    """What to say where a name is that of a module: how that is run."""
    try:
        spec = all(map(str.isidentifier, name.split("."))) and importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (
        f" To run the module: ferrule {command} -m {shlex.join([name, *arguments])}" if spec else ""
    )


def _refuse(message: str) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    raise NotRun(2)


def _show_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an error as Python does, without the calls that led to the program."""
    start = traceback
    while start is not None and start.tb_frame.f_code is not run_program.__code__:
        start = start.tb_next
    start = traceback if start is None else start.tb_next  # none of ours: a thread's
    while start is not None and start.tb_frame.f_globals.get("__name__") == "runpy":
        start = start.tb_next
    sys.__excepthook__(kind, error.with_traceback(start), start)
