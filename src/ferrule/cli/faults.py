"""Errors that end a command, and wording that commands share."""

from __future__ import annotations

from collections.abc import Callable

import click


class Fault(click.ClickException):
    """Something that the user can put right; ends the command with exit code 2."""

    exit_code = 2


class Program(BaseException):
    """Ends a command with a program of the user's to run, whose errors and warnings are its own.

    Attributes:
        run: runs it.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__()
        self.run = run


def readable(size: int) -> str:
    """A number of bytes for a reader: ``"512 B"``, ``"3.4 MiB"``."""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            break
    return f"{amount:.1f} {unit}"
