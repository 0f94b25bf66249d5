"""How much is asked of Z3: counted in its own steps, so that a verdict does not depend on how fast,
or how busy, a machine is."""

from __future__ import annotations

import time
from typing import Any

_STEPS = 2_000_000  # of Z3, in a second of a machine that is idle
_STATEMENT = 20  # what it takes to put one, in such steps
_SLOWEST = 20  # how many times slower a machine may be before it ends all the same


class Effort:
    """What is left of the steps that questions may take.

    Args:
        seconds: how long they take on a machine that is idle.
    """

    def __init__(self, seconds: float) -> None:
        self.steps = int(seconds * _STEPS)
        self.end = time.monotonic() + seconds * _SLOWEST

    @property
    def left(self) -> float:
        """Seconds of a machine that is idle."""
        return max(self.steps / _STEPS, 0.0) if time.monotonic() < self.end else 0.0

    def check(self, solver: Any, statements: int, seconds: float) -> Any:
        """What a solver says, in no more than so many seconds and what is left.

        Args:
            statements: how many it was given.
        """
        seconds = min(seconds, self.left)
        before = _steps_of(solver)
        solver.set("rlimit", max(int(seconds * _STEPS), 1))
        solver.set("timeout", max(int(seconds * _SLOWEST * 1000), 1))
        result = solver.check()
        self.steps -= max(_steps_of(solver) - before, 0) + _STATEMENT * statements
        return result


def _steps_of(solver: Any) -> int:
    """How many steps Z3 has taken in all."""
    statistics = solver.statistics()
    known = "rlimit count" in statistics.keys()  # noqa: SIM118
    return int(statistics.get_key_value("rlimit count")) if known else 0
