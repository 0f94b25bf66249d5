"""Medians of blocks of calls in turn: a drift of the machine hits both sides alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], object]


class Timer(NamedTuple):
    """How calls are timed.

    Attributes:
        mode: what a row says of that.
        ready: makes, of a call, what gives the seconds of one such call, on average, each time that
            it is called.
    """

    mode: str
    ready: Callable[[Call], Callable[[], float]]


@dataclass
class Row:
    """One comparison: how much longer the peer takes than ferrule.

    Attributes:
        group: the part of the benchmarks that it belongs to.
        device: ``"cpu"`` or ``"cuda"``.
        work: what is done.
        peer: who else does it, or what is allowed.
        ours, theirs: medians, in `unit`.
        ratio: the median of the ratios theirs / ours, pair by pair.
        target: the ratio that the project wants; None where it wants none.
        rounds: how many pairs.
        unit: ``"s"``, or ``"instructions"``.
        moved: bytes that one call reads and writes, where that is what counts; else 0.
        error: the sum of the differences of the results over the sum of the peer's magnitudes;
            None where the results were not compared.
        tolerance: what `error` may be.
        mode: how calls were timed: by ``"wall"`` time, as one of ``clocks.MODES``, or what a call
            costs the ``"host"``; empty where no calls were timed.
    """

    group: str
    device: str
    work: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    target: float | None = None
    rounds: int = 1
    unit: str = "s"
    moved: int = 0
    error: float | None = None
    tolerance: float = 0.0
    mode: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        return None if self.target is None else self.ratio >= self.target

    @property
    def right(self) -> bool:
        """Whether both sides gave the same results, as far as they were compared."""
        return self.error is None or self.error <= self.tolerance


class Peer(NamedTuple):
    """Someone else who does the same work.

    Attributes:
        name: who.
        call: does it once.
        target: the ratio that the project wants.
        compared: whether its results must be ferrule's.
        timer: how its calls are timed, where they cannot be timed as ferrule's are.
    """

    name: str
    call: Call
    target: float | None = None
    compared: bool = True
    timer: Timer | None = None


class Bench:
    """One run of the benchmarks: how to measure, and what was found.

    Attributes:
        quick: small sizes and single calls: a check, no measurement.
        rounds: how many pairs of blocks make a row.
        rows: what was measured.
        left_out: who was not measured, and why; each a line.
        failed: what went wrong with ferrule's own side; each a line.
        group, device: of the rows that come next.
        autotune: whether torch.compile tries out kernels, where a group lets it.
        say: called with a line for the reader.
        timers: how calls are timed: each row comes once for each of them.
        modes: how the command line asks that calls on a GPU be timed; empty where it does not.
    """

    def __init__(self, show: Callable[[Row], object], say: Callable[[str], object]) -> None:
        """Begins a run.

        Args:
            show: called with each row as it comes.
            say: called with a line for the reader.
        """
        self.quick = False
        self.rounds = 15
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.group = ""
        self.device = "cpu"
        self.timers: tuple[Timer, ...] = (self.by_wall,)
        self.modes: tuple[str, ...] = ()
        self.autotune = False
        self._show = show
        self.say = say

    @property
    def by_wall(self) -> Timer:
        """Calls that are over when they come back."""
        return Timer("wall", lambda call: partial(self.wall, call))

    @contextlib.contextmanager
    def timed(self, *timers: Timer) -> Iterator[None]:
        """Time the calls of the rows within so."""
        before, self.timers = self.timers, timers
        try:
            yield
        finally:
            self.timers = before

    def installed(self, package: str) -> bool:
        """Whether a package is there; where it is not, that is said once."""
        if find_spec(package) is not None:
            return True
        self.leave_out(f"{package} not installed: its rows are left out")
        return False

    def leave_out(self, why: str) -> None:
        """Note who is not measured, once."""
        if why not in self.left_out:
            self.left_out.append(why)
            self.say(why)

    def fail(self, what: str) -> None:
        """Note that ferrule's own side went wrong."""
        self.failed.append(what)
        self.say(f"FAILED: {what}")

    def guarded(self, rows: Callable[[], None]) -> None:
        """Measure some rows; what they raise is noted, and others go on."""
        try:
            rows()
        except Exception as error:
            self.fail(f"{self.group}: {said(error)}")

    def add(self, row: Row) -> None:
        """Note a row and show it."""
        self.rows.append(row)
        self._show(row)

    def compare(
        self,
        work: str,
        ours: Call,
        peers: Iterable[Peer],
        tolerance: float = 1e-3,
        moved: int = 0,
    ) -> None:
        """Time a block of calls of ``ours`` and one of each peer, in turn.

        That is a row for each peer and each way to time.

        The first calls are not timed: the C library learns how large the arrays are, and until
        then each new array is fresh memory, and costs a fault per page. A peer that fails is left
        out; what ``ours`` raises is raised.
        """
        peers = list(peers)
        for timer in self.timers:
            mine = timer.ready(ours)
            for peer in peers:
                result = ours()
                try:
                    other = peer.call()
                    error = difference(result, other) if peer.compared else None
                    del result, other  # on a GPU they may be gigabytes
                    theirs = (peer.timer or timer).ready(peer.call)
                    for _ in range(0 if self.quick else max(1, self.rounds // 3)):
                        ours(), peer.call()
                    pairs = [(mine(), theirs()) for _ in range(self.rounds)]
                    del theirs
                except Exception as fault:  # whatever a peer may raise
                    ours()  # raises what was ferrule's fault
                    self.leave_out(f"{work}: {peer.name} failed and is left out: {said(fault)}")
                    continue
                self.measured(
                    work, peer.name, pairs, peer.target, moved=moved, error=error,
                    tolerance=tolerance, mode=timer.mode,
                )  # fmt: skip

    def measured(
        self,
        work: str,
        peer: str,
        pairs: list[tuple[float, float]],
        target: float | None = None,
        **more: Any,
    ) -> None:
        """A row of pairs of ferrule's figure and the peer's; times of small sizes reach nothing."""
        if self.quick and more.get("unit", "s") == "s":
            target = None
        self.add(
            Row(
                self.group, self.device, work, peer,
                statistics.median(a for a, _ in pairs),
                statistics.median(b for _, b in pairs),
                statistics.median(b / a for a, b in pairs),
                target, len(pairs), **more,
            )
        )  # fmt: skip

    def wall(self, function: Call) -> float:
        """Seconds per call, of calls that last 20 ms together (or of one).

        Before those there is a pause, then 5 ms of calls that are not timed: both sides keep
        threads that wait for work, and for a while take the CPU from those of the other. Those of
        OpenMP do for 300,000 rounds of a loop, which may be 8 ms; the pause is longer.
        """
        if not self.quick:
            time.sleep(0.02)
        done, start = 0, time.perf_counter()
        while done == 0 or (time.perf_counter() - start < 0.005 and not self.quick):
            function()
            done += 1
        calls = max(1, round(0.02 * done / (time.perf_counter() - start)))
        calls = 1 if self.quick else calls
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls


def said(fault: Exception) -> str:
    """The first line of an exception, and of what kind it is."""
    lines = str(fault).strip().splitlines() or ["nothing was said"]
    return f"{type(fault).__name__}: {lines[0]}"


def difference(ours: Any, theirs: Any) -> float:
    """How far apart results are: the sum of the differences over the sum of the magnitudes.

    A single element may differ: where a point lies on a pixel's centre to the last bit, one side
    rounds it into the next pixel, and the derivative jumps there.

    Args:
        ours, theirs: an array or a sequence of them, of NumPy, torch or MLX.
    """
    errors = []
    for a, b in zip(_arrays(ours), _arrays(theirs), strict=True):
        if all(type(x).__module__.partition(".")[0] == "torch" for x in (a, b)):
            a, b = a.detach().float().reshape(-1), b.detach().float().reshape(-1)
            off, size = float((a - b).abs_().sum()), float(b.abs().sum())
        else:
            a, b = (_float64(x).reshape(-1) for x in (a, b))
            off, size = float(np.abs(a - b).sum()), float(np.abs(b).sum())
        errors.append(off / max(size, 1e-30))
    return float(np.max(errors))  # unlike Python's max, keeps a NaN


def _float64(array: Any) -> Any:
    if str(getattr(array, "dtype", "")) == "mlx.core.bfloat16":  # which NumPy has not
        import mlx.core as mx

        array = array.astype(mx.float32)
    return np.asarray(array, np.float64)


def _arrays(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
