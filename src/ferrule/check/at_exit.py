"""``FERRULE_CHECK``: programs that one cannot edit, checked from ferrule's import to their end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from .checking import checking
from .reports.formats import to_json
from .reports.report import show
from .reports.results import Results, write_file

_checked: contextlib.ExitStack | None = None
_last: _Last | None = None


def start(setting: str) -> None:
    """Check what this process runs from now on, and report when it ends.

    Args:
        setting: of FERRULE_CHECK: ``"1"``, or the path of a JSON file, with ``%p`` for the
            process's number.
    """
    global _checked
    _checked = contextlib.ExitStack()
    findings = _checked.enter_context(checking())
    status = _watched_exit()
    process = os.getpid()

    def end() -> None:
        if _checked is None or os.getpid() != process:  # a fork's findings are not all its own
            return
        stop()
        _report(Results(list(findings), findings.launches, list(findings.notes)), setting)
        if findings:
            _end_with(status() or 1)

    atexit.register(end)


def stop() -> None:
    """Check no more, and report nothing: for those who check by themselves."""
    global _checked
    if _checked is not None:
        _checked.close()
        _checked = None


def _report(results: Results, setting: str) -> None:
    show(results, sys.stderr)
    if setting != "1":
        path = setting.replace("%p", str(os.getpid()))
        try:
            write_file(path, to_json(results), "FERRULE_CHECK: the file")
        except ValueError as error:
            print(f"Error: {error}", file=sys.stderr)


def _watched_exit() -> Callable[[], int]:
    """Have `sys.exit` remember the status that it was given; return what tells it."""
    given = 0
    real = sys.exit

    def watched(status: Any = None, /) -> Any:
        nonlocal given
        given = status if isinstance(status, int) else int(status is not None)
        real(status)

    sys.exit = watched
    return lambda: given & 0xFF


def _end_with(status: int) -> None:
    """Have this process, which ends, end with a status.

    A function of `atexit` cannot do that, and must not end the process itself: those that others
    registered before it, such as the one that writes down a test's coverage, are still to come.
    """
    global _last
    ctypes.CDLL(None).fflush(None)  # what C has printed is not in Python's buffers
    _last = _Last(status)


class _Last:
    """Ends the process when the interpreter takes this module apart."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __del__(self, leave: Callable[[int], object] = os._exit) -> None:
        leave(self.status)
