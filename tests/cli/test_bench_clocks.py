"""How calls on a GPU are timed, with a GPU that is a list of what was queued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest
import torch

import on_cuda
from ferrule_bench import clocks, command, report
from ferrule_bench.clocks import Graph, Turns
from ferrule_bench.timing import Bench, Peer
from test_bench import row, run, silent

LAUNCH, SLEEP, FLUSH = 1e-3, 0.0, 1.0  # seconds on the GPU


class Gpu:
    """What was queued, in order, and the time at which the GPU is done with it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now, self.tick = 0.0, 0.0  # of the GPU, and what recording an event takes it
        self.captured: list[list[str]] = []
        self._capturing: list[str] | None = None

    def launch(self, name: str, seconds: float = LAUNCH) -> None:
        if self._capturing is not None:
            self._capturing.append(name)
            return
        self.log.append(name)
        self.now += seconds

    def call(self, name: str) -> Callable[[], object]:
        def call() -> str:
            self.launch(name)
            return name

        return call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.launch("event", gpu.tick)
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            kernels: list[str]

            def replay(self) -> None:
                for name in self.kernels:
                    gpu.launch(name)

        @contextlib.contextmanager
        def graph(made: CUDAGraph) -> Iterator[None]:
            assert gpu._capturing is None, "graphs are not captured while one is"
            made.kernels = gpu._capturing = []
            gpu.captured.append(made.kernels)
            yield
            gpu._capturing = None

        class Buffer(torch.Tensor):
            """Calls on it are torch's, and are launches."""

            @classmethod
            def __torch_function__(
                cls, called: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = {"zero_": "written", "sum": "read"}.get(called.__name__)
                if name:
                    gpu.launch(name, FLUSH)
                return super().__torch_function__(called, types, args, kwargs)

        buffers = [torch.ones(2, 3).as_subclass(Buffer), torch.ones(1, 3)]
        monkeypatch.setattr(clocks, "_buffer", lambda: buffers)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch("sleep", SLEEP))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def timed(self) -> list[str]:
        """What was queued after the GPU was told to wait, with repetitions once."""
        return [name for name, _ in groupby(self.log[self.log.index("sleep") + 1 :])]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    gpu.install(monkeypatch)
    return gpu


def measured(bench: Bench, mode: str, call: Any) -> float:
    (timer,) = clocks.timers(bench, mode)
    assert timer.mode == mode
    return timer.ready(call)()


@pytest.mark.parametrize("mode", list(clocks.MODES))
@pytest.mark.parametrize("quick", [False, True])
def test_a_call_takes_as_long_in_each_mode(gpu: Gpu, mode: str, quick: bool) -> None:
    """However many are timed, captured, or take turns, and whatever is done between them."""
    bench = silent()
    bench.quick = quick
    given = (gpu.call("a"), Turns([gpu.call("a"), gpu.call("b"), gpu.call("c")]))
    for call in given:
        gpu.log.clear()
        assert measured(bench, mode, call) == pytest.approx(LAUNCH)


def test_warm(gpu: Gpu) -> None:
    measured(silent(), "warm", Turns([gpu.call("a"), gpu.call("b")]))
    assert gpu.timed() == ["event", "a", "event"] and not gpu.captured


def test_cold(gpu: Gpu) -> None:
    """The cache is emptied before each call, outside of its events: written, and then read."""
    bench = silent()
    bench.quick = False
    measured(bench, "cold", gpu.call("a"))
    queued = gpu.timed()
    assert len(queued) >= 15 and len(queued) % 5 == 0
    for start in range(0, len(queued), 5):
        assert queued[start : start + 5] == ["written", "read", "event", "a", "event"]
    assert not gpu.captured


def test_cold_in_turns(gpu: Gpu) -> None:
    """Copies are what empties the cache: nothing stands between the calls."""
    measured(silent(), "cold", Turns([gpu.call("a"), gpu.call("b")]))
    assert gpu.timed() == ["event", "a", "b", "event"] and "written" not in gpu.log


def test_graph(gpu: Gpu) -> None:
    """Warmed up before it is captured; the calls of a graph are of the same arrays."""
    bench = silent()
    bench.quick = False
    measured(bench, "graph", Turns([gpu.call("a"), gpu.call("b")]))
    assert gpu.captured == [["a"] * clocks.REPEATED] and gpu.log[0] == "a"
    assert gpu.timed() == ["event", "a", "event"]


def test_cold_graph(gpu: Gpu) -> None:
    measured(silent(), "cold-graph", gpu.call("a"))
    assert gpu.captured == [["a"]]
    assert gpu.timed() == ["written", "read", "event", "a", "event"]
    gpu.log.clear()
    measured(silent(), "cold-graph", Turns([gpu.call("a"), gpu.call("b")]))
    assert gpu.captured[1:] == [["a", "b"]]
    assert gpu.timed() == ["event", "a", "b", "event"]


def test_graphs_that_a_row_is_about_are_not_captured_again(gpu: Gpu) -> None:
    graph = Graph([gpu.call("a")], 5)
    assert graph() == "a"
    for mode in clocks.MODES:
        assert measured(silent(), mode, graph) == pytest.approx(5 * LAUNCH)
    assert len(gpu.captured) == 1


def test_modes_of_rows(gpu: Gpu) -> None:
    """A row for each mode that is asked for, or else for those that the rows declare."""
    rows = []
    bench = Bench(rows.append, print)
    bench.quick, bench.rounds = True, 1
    with bench.timed(*clocks.timers(bench, "cold", "warm")):
        bench.compare("work", gpu.call("a"), [Peer("b", gpu.call("b"), compared=False)])
    assert [(r.peer, r.mode) for r in rows] == [("b", "cold"), ("b", "warm")]
    bench.modes = ("graph", "cold-graph")
    assert [t.mode for t in clocks.timers(bench, "cold")] == ["graph", "cold-graph"]
    assert [t.mode for t in clocks.timers(bench, "cold", graphs=False)] == ["warm", "cold"]
    assert [t.mode for t in bench.timers] == ["wall"]


def test_modes_that_fail(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be captured is left out; what ferrule cannot is its fault."""

    def fails(graph: Any) -> Any:
        if gpu.captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return contextlib.nullcontext(gpu.captured.append([]))

    bench = silent()
    with bench.timed(*clocks.timers(bench, "graph")):
        monkeypatch.setattr(torch.cuda, "graph", fails)
        bench.compare("work", gpu.call("a"), [Peer("b", gpu.call("b"), compared=False)])
        assert "work: b failed and is left out: RuntimeError: operation not" in bench.left_out[0]
        with pytest.raises(RuntimeError, match="not permitted"):
            bench.compare("work", gpu.call("a"), [Peer("b", gpu.call("b"), compared=False)])


def test_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they outgrow the cache several times; what does so alone has none."""
    monkeypatch.setattr(clocks, "l2_size", lambda: 50 << 20)
    for moved in (1, 1000, 3 << 18, 64 << 20, 128 << 20, 200 << 20, 1 << 31):
        count = clocks.copies(moved)
        assert count * moved >= clocks.COLD * 50 << 20 > (count - 1) * moved
    assert clocks.copies(1 << 31) == 1


def test_modes_on_the_command_line(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bench] = []
    monkeypatch.setattr(command, "_measure", lambda bench, *_: made.append(bench))
    done = run("copy", "--device", "cpu", "--mode", "graph", "--mode", "cold", "--mode", "graph")
    assert done.exit_code == 0, done.output
    assert made[0].modes == ("graph", "cold") and not made[0].autotune
    done = run("copy", "--device", "cpu", "--mode", "hot")
    assert done.exit_code == 2 and "'hot' is not one of 'warm', 'cold', 'graph'" in done.output


def test_lines_say_the_mode() -> None:
    assert report.line(row(mode="cold-graph", target=1.5)).endswith(
        "1.500  cold-graph  wanted >= 1.5: reached"
    )
    assert report.line(row(mode="warm")) == report.line(row(mode="host")) == report.line(row())
    assert report.as_json(row(mode="cold"))["mode"] == "cold"


@pytest.mark.gpu
@pytest.mark.skipif(not on_cuda.available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    """Cold reads of what fits into the cache take longer; a graph launches what a call does."""
    size = clocks.l2_size() // 8
    x = torch.ones(size // 4, device="cuda:0")
    bench = silent()
    bench.quick = False
    sums = Turns([lambda a=a: a.amax() for a in (x, *(x.clone() for _ in range(31)))])
    seconds = {mode: measured(bench, mode, sums) for mode in clocks.MODES}
    assert all(0 < value < 1 for value in seconds.values()), seconds
    alone = {mode: measured(bench, mode, sums.calls[0]) for mode in clocks.MODES}
    assert all(0 < value < 1 for value in alone.values()), alone
    graph = Graph([lambda: x.add_(1)], 3)
    x.fill_(0)
    graph()
    assert float(x[0]) == 3
