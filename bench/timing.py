"""Medians of blocks of calls in turn: a drift of the machine hits both sides alike."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata


@dataclass
class Row:
    """One comparison: how much longer the peer takes than ferrule.

    Attributes:
        work: what is done.
        peer: who else does it.
        ours, theirs: medians in seconds.
        ratio: the median of the ratios, pair by pair.
    """

    work: str
    peer: str
    ours: float
    theirs: float
    ratio: float


def compare(
    work: str,
    ours: Callable[[], object],
    peers: dict[str, Callable[[], object]],
    rounds: int = 9,
) -> list[Row]:
    """Time a block of calls of ``ours`` and one of each peer, in turn, ``rounds`` times.

    The first calls of a block are not timed: both sides keep threads that wait for work, and for a
    while take the CPU from those of the other. The warm-up before is long enough for the C library
    to learn how large the arrays are: until then each new array is fresh memory, and costs a fault
    per page.
    """
    rows = []
    for peer, theirs in peers.items():
        for _ in range(max(1, rounds // 3)):
            ours(), theirs()
        pairs = [(_block(ours), _block(theirs)) for _ in range(rounds)]
        rows.append(
            Row(
                work,
                peer,
                statistics.median(a for a, _ in pairs),
                statistics.median(b for _, b in pairs),
                statistics.median(b / a for a, b in pairs),
            )
        )
        print(line(rows[-1]), flush=True)
    return rows


def _block(function: Callable[[], object]) -> float:
    """Seconds per call, of calls that last 20 ms together (or of one), after 5 ms of others."""
    done, start = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - start < 0.005:
        function()
        done += 1
    calls = max(1, round(0.02 * done / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def line(row: Row) -> str:
    """A row as text."""
    return (
        f"{row.work:44s} {row.peer:34s} {row.ours * 1e3:9.2f} ms {row.theirs * 1e3:9.2f} ms "
        f"{row.ratio:7.2f}x"
    )


def machine() -> str:
    """The machine and the versions that are measured with."""
    names = ("ferrule", "numpy", "torch", "mlx", "mlx-lm")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed: its rows are left out")
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(x.split(":", 1)[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return f"{cpu}, Python {platform.python_version()}\n{', '.join(versions)}\n"


def header() -> str:
    """The machine, the versions and the head of the table."""
    title = f"{'work':44s} {'peer':34s} {'ferrule':>12s} {'peer':>12s} {'peer/ferrule':>9s}"
    return f"{machine()}\n{title}"
