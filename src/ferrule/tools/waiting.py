"""Tells a person that something takes long: one line on stderr after two seconds, and on a
terminal a bar."""

from __future__ import annotations

import contextlib
import sys
import time

PATIENCE = 2.0  # seconds without a word
_WIDTH = 24  # characters of the bar
_told: set[str] = set()  # what this process has told of, where there is no terminal


class Waiting:
    """One thing that is waited for.

    Args:
        task: what it is, such as ``"compiling the nodes for MLX"``.
        usual: seconds that it takes on an ordinary machine.
    """

    def __init__(self, task: str, usual: float) -> None:
        self._task, self._usual = task, usual
        self._begun = time.monotonic()
        self._drawn = ""

    def tick(self) -> None:
        """Say what must be said by now. To be called some times a second."""
        passed = time.monotonic() - self._begun
        if passed < PATIENCE or sys.stderr is None:
            return
        line = f"ferrule: {self._task}, once; usually about {self._usual:.0f} s"
        with contextlib.suppress(OSError, ValueError):  # nobody listens
            if not sys.stderr.isatty():
                if self._task not in _told:
                    _told.add(self._task)
                    print(line, file=sys.stderr, flush=True)
                return
            # It is not known how much is left: the bar slows down, and is full at the end alone.
            full = int(_WIDTH * passed / (passed + self._usual / 2))
            drawn = f"{line} [{'#' * full}{'.' * (_WIDTH - full)}] {passed:.0f} s"
            if drawn != self._drawn:
                self._drawn = drawn
                print(f"\r{drawn}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._drawn:
            with contextlib.suppress(OSError, ValueError):
                print(f"\r{' ' * len(self._drawn)}\r", end="", file=sys.stderr, flush=True)
            self._drawn = ""
