"""The command line: ``ferrule bench``, ``build``, ``cache``, ``check``, ``demo``, ``doctor``,
``fuzz``, ``gate``, ``inspect`` and ``run``.

Exit codes: 0, all went well; 1, a check that the command makes has failed; 2, the command line or
a kernel was wrong, and a message says what.
"""

from __future__ import annotations

import warnings
from typing import Any

import click

import ferrule

from .. import FerruleError
from .faults import Fault as Fault
from .faults import Program
from .faults import readable as readable


class _Commands(click.Group):
    """The commands, each loaded when asked for: drawing pictures takes a second to import."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except Program as program:
            run = program.run
        return run()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [
            "bench",
            "build",
            "cache",
            "check",
            "demo",
            "doctor",
            "fuzz",
            "gate",
            "inspect",
            "run",
        ]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "bench":
            from .bench import command
        elif cmd_name == "build":
            from .build import command
        elif cmd_name == "cache":
            from .cache import command
        elif cmd_name == "check":
            from .check import command
        elif cmd_name == "demo":
            from .demo import command
        elif cmd_name == "doctor":
            from .doctor import command
        elif cmd_name == "fuzz":
            from .fuzz import command
        elif cmd_name == "gate":
            from .gate import command
        elif cmd_name == "inspect":
            from .inspect import command
        elif cmd_name == "run":
            from .run import command
        else:
            return None
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
            except FerruleError as error:
                raise Fault(str(error)) from error


def _show_warning(message: Warning | str, *place: object) -> None:
    """A warning in one line, without the line of ferrule that it came from."""
    click.echo(f"warning: {message}", err=True)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ferrule.__version__, prog_name="ferrule")
def main() -> None:
    """Metal kernels written for MLX, on any machine: see them run, and see what they become."""
