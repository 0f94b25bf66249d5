"""What robust mode costs on a GPU: rows of other groups, with guards of accesses and without.

Both sides are captured in CUDA graphs, whose replays are timed: the host has no part in it. Where
kernels have no guards, such as CUDA units, both sides are one and the same, and the row shows how
far apart their times are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ferrule
from ferrule.tools import fastcall

from . import clocks, cuda, ready
from .timing import Bench, Call, Peer, Timer

UNGUARDED = "unguarded"
_ROWS = ("copy", "exp", "grid_sample", "grid_sample VJP", "mlx-lm")


@contextmanager
def _unguarded() -> Iterator[None]:
    """Kernels are started without guards; C, which knows those with guards, is not asked."""
    ferrule.set_robust(False)
    try:
        with fastcall.bypassed():
            yield
    finally:
        ferrule.set_robust(None)


class _Costs:
    """A bench whose rows compare a call with itself, without guards."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._works: set[str] = set()
        self.timers = (Timer("graph", lambda call: clocks.MODES["graph"](bench, call)),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)

    def compare(
        self,
        work: str,
        ours: Call,
        peers: Iterable[Peer],
        tolerance: float = 1e-3,
        moved: int = 0,
    ) -> None:
        """A row of `Bench.compare`, whose peers are left alone; one for all its ways to time."""
        bench, (timer,) = self._bench, self.timers
        if work in self._works:
            return
        self._works.add(work)
        ours()
        mine = timer.ready(ours)
        with _unguarded():
            ours()
            theirs = timer.ready(ours)
        pairs = [(mine(), theirs()) for _ in range(bench.rounds)]
        bench.measured(work, UNGUARDED, pairs, moved=moved, mode=timer.mode)


def costs(bench: Bench) -> None:
    """The rows of groups whose kernels are Metal bodies, and of the ready ops."""
    rows: Any = _Costs(bench)
    for name in _ROWS:
        cuda.GROUPS[name](rows)
    for group in ready.groups("cuda").values():
        group(rows)


GROUPS: dict[str, Callable[[Bench], None]] = {"robust": costs}
