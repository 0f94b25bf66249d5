"""How calls on the GPU are timed: caches warm or cold, launched one by one or from a CUDA graph.

All times are those of CUDA's events on the current stream. The GPU waits until the calls are
queued, as far as the queue can hold them: then what Python needs to launch a short kernel does not
count.

=============  ====================================================================================
``warm``       a block of calls between two events: what fits into the caches stays there
``cold``       before each call, the L2 cache is emptied, outside of its two events
``graph``      calls are captured once, and replays are timed: the host has no part in it
``cold-graph`` both
=============  ====================================================================================

Two events around a single short kernel measure themselves, too. Where a row has copies of its
arrays (`Turns`), a cold block is therefore one of calls on each copy in turn, which together are
larger than the cache; then nothing stands between the kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from .timing import Bench, Call, Timer

REPEATED = 10  # calls in a graph: the launch of the graph itself is then a tenth
COLD = (
    4  # times the L2 cache's size, which calls in turn read and write before the first comes again
)
_BLOCK = 0.02  # seconds that a block of calls lasts
_QUEUE = 300  # launches that may be queued: the driver's queue holds some more


class Turns:
    """A call, and the same on copies of its arrays, which a cold cache asks for.

    Attributes:
        calls: one per copy; called itself, it is the first of them.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls

    def __call__(self) -> object:
        return self.calls[0]()

    def all(self) -> None:
        """Each of them, in turn."""
        for call in self.calls:
            call()


def turns(bench: Bench, calls: Sequence[Call]) -> Call:
    """On a GPU calls by turns, on a CPU the first of them."""
    return Turns(calls) if bench.device == "cuda" else calls[0]


class Graph:
    """Calls that are captured in a CUDA graph; called itself, it replays them.

    Attributes:
        calls: how many a replay makes.
    """

    def __init__(self, calls: Sequence[Call], times: int = 1) -> None:
        """Capture each of ``calls`` in turn, that many times; their results stay where they are."""
        import torch

        self.calls = len(calls) * times
        for call in calls:  # what is compiled and chosen at the first call is not captured
            call()
        wait()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(times):
                self._results = [call() for call in calls]

    def __call__(self) -> object:
        self._graph.replay()
        return self._results[0]


def timers(bench: Bench, *modes: str, graphs: bool = True) -> tuple[Timer, ...]:
    """What times rows in modes: in those that the command line asks for, or else in ``modes``.

    Args:
        bench: the run.
        modes: those that are the rows' figure.
        graphs: whether the calls can be captured; the same modes without a graph where not.
    """
    asked = bench.modes or modes
    if not graphs:
        asked = tuple(dict.fromkeys("cold" if "cold" in mode else "warm" for mode in asked))
    return tuple(Timer(mode, partial(MODES[mode], bench)) for mode in asked)


def _warm(bench: Bench, call: Call) -> Callable[[], float]:
    return partial(events, bench, call)


def _cold(bench: Bench, call: Call) -> Callable[[], float]:
    if isinstance(call, Turns):
        return partial(events, bench, call.all, len(call.calls))
    return partial(apart, bench, call, flush)


def _graph(bench: Bench, call: Call) -> Callable[[], float]:
    if isinstance(call, Graph):  # the row is about a graph, and a replay is its call
        return partial(events, bench, call)
    graph = Graph([call], 1 if bench.quick else REPEATED)
    return partial(events, bench, graph, graph.calls)


def _cold_graph(bench: Bench, call: Call) -> Callable[[], float]:
    if isinstance(call, Turns):
        graph = Graph(call.calls)
        return partial(events, bench, graph, graph.calls)
    return partial(apart, bench, call if isinstance(call, Graph) else Graph([call]), flush)


MODES: dict[str, Callable[[Bench, Call], Callable[[], float]]] = {
    "warm": _warm,
    "cold": _cold,
    "graph": _graph,
    "cold-graph": _cold_graph,
}


# -- the clocks ------------------------------------------------------------------------------------


def wait() -> None:
    """Wait for all that was launched."""
    import torch

    torch.cuda.synchronize()


def events(bench: Bench, function: Call, made: int = 1) -> float:
    """Seconds per call, of blocks of 20 ms between two events; a function makes ``made`` calls."""
    import torch

    queued, took = _once(function)
    most = max(1, _QUEUE // (1 if isinstance(function, Graph) else made))
    calls = 1 if bench.quick else max(1, min(most, round(_BLOCK / took)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _delay(2 * calls * queued)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls / made


def apart(bench: Bench, function: Call, before: Call) -> float:
    """Seconds per call, each between two events of its own, after what is done before it."""
    import torch

    queued, took = _once(function)
    calls = 1 if bench.quick else max(3, min(50, round(_BLOCK / took)))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    before()
    _delay(2 * calls * queued)
    for begin, end in pairs:
        before()
        begin.record()
        function()
        end.record()
    wait()
    return statistics.fmean(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3


def _once(function: Call) -> tuple[float, float]:
    """Seconds to queue a call that was made before, and until it is done."""
    function()
    wait()
    start = time.perf_counter()
    function()
    queued = time.perf_counter() - start
    wait()
    return queued, max(time.perf_counter() - start, 1e-6)


def _delay(seconds: float) -> None:
    """Keep the GPU waiting, for a block's length at most."""
    import torch

    torch.cuda._sleep(int(2e9 * min(_BLOCK, seconds)))  # cycles of about 2 GHz


def flush() -> None:
    """Empty the L2 cache: twice its size is written, and then read.

    Had it only been written, the timed kernel would have to wait for what is written back.
    """
    import torch

    buffer, total = _buffer()
    buffer.zero_()
    torch.sum(buffer, dim=0, keepdim=True, out=total)


@cache
def _buffer() -> list[Any]:
    import torch

    return [torch.empty(n, 1024, device="cuda:0") for n in (2 * l2_size() // 4096, 1)]


def l2_size() -> int:
    """Bytes of the L2 cache of the first GPU."""
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def copies(moved: int) -> int:
    """On how many copies of its arrays calls take turns, if each reads and writes that much."""
    return max(1, -(-COLD * l2_size() // max(moved, 1)))
