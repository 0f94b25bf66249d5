"""A disk that fails on demand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEM_CALLS = frozenset(
    {"open", "read", "write", "close", "fsync", "fstat", "stat", "utime"}
    | {"replace", "unlink", "mkdir", "makedirs", "scandir"}
)


class FaultyOs:
    """Stands for the `os` module inside `ferrule.cache`.

    Before each system call, `fault(number, name, args)` may raise or end the process; `number`
    counts from 1.
    """

    def __init__(self, fault: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        self.fault = fault
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in SYSTEM_CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            try:
                self.fault(len(self.calls), name, args)
            except OSError:
                if name == "close":  # reports a failure, and closes all the same
                    real(*args)
                raise
            return real(*args, **kwargs)

        return call


def killer(step: int, torn: bool) -> Callable[[int, str, tuple[Any, ...]], None]:
    """Kills the process before its call number `step`; a torn write has written half by then."""

    def fault(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == step:
            if torn and name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return fault
