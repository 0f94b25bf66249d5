"""Checked runs: kernels that are run inside of a block are watched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..devices import protocol as devices
from ..devices.protocol import Native
from ..errors import KernelError
from ..hosts import protocol as hosts
from ..kernel import Kernel
from ..tools import fastcall
from .launches.watched import Options
from .reports import baseline as known_findings
from .reports.findings import Findings
from .reports.select import selection
from .stops.stopping import Stops
from .units import CudaOnCpu
from .watching import Watch


@contextmanager
def checking(
    *,
    kinds: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    kernels: Iterable[str] | None = None,
    sample: int | None = None,
    same_values: bool = False,
    reverse: bool = False,
    stress: bool = False,
    time_limit: float | None = None,
    baseline: str | os.PathLike[str] | None = None,
    cuda: bool = False,
    gpu: bool = False,
    stop_at: Iterable[str] = (),
) -> Iterator[Findings]:
    """Check the kernels that run on the CPU inside of a ``with`` block.

    Every access of a launch is watched; it gives the same numbers as else. It does not raise for
    what it finds, does not write outside its arrays, and goes on: reads outside give zero, writes
    there are dropped. A thread that cannot go on, since it would write to its own stack or to
    anywhere, is ended. All calls take the long way meanwhile, in all threads, and
    nodes of MLX's graphs are evaluated when they are made, and functions that `mx.compile` made
    run as they were written.

    Args:
        kinds: the kinds of findings that are wanted (`Finding`); None: all.
        ignore: kinds that are not wanted.
        kernels: patterns of kernels' names, as a shell's; None: all. Others run as ever.
        sample: at most so many threadgroups of a launch run, the first and the last among them;
            then nothing is said of elements that were not written. None: all.
        same_values: also report races of stores that store equal values.
        reverse: threads and simdgroups run in the opposite order.
        stress: run each launch again with its threads in the opposite order, and with other
            threadgroups; where results differ, that is told as ``"lanes"``. Kernels that are
            written for one size of threadgroups fail it.
        time_limit: seconds after which a launch is ended, which a note says; None: never. One in
            which no thread comes to its end for 20 seconds, or half of that time, hangs: that is a
            finding, and it is ended.
        cuda: ops on NumPy's arrays take their implementations in CUDA, as a GPU of compute
            capability 8.0 would, where they have some; matrix products are NumPy's.
        gpu: Metal bodies with arrays on a GPU run there, not on the CPU over copies: accesses
            outside, and NaN and infinities that are stored, are counted by line, where the body
            has ``x[i]`` of an array. Ops of torch's tensors, and what is recorded in a CUDA graph,
            do so in any case.
        baseline: a file of known findings, which are left out at the end.
        stop_at: lines at which a thread is shown to stderr, once in each kernel, with its variables
            and arrays, as ``"[KERNEL:][header:]LINE[:THREAD][@N]"``; at a terminal it waits there.

    Returns:
        A list of `Finding`, filled as kernels run; with ``notes``, remarks such as how many
        threadgroups were sampled, ``launches``, how many were checked, and ``stops``.

    Raises:
        KernelError: there is no such kind, a number is out of range, the baseline cannot be read,
            or ``stop_at`` has what is no line.
    """
    wanted = selection(kinds, ignore, kernels)
    known = None if baseline is None else known_findings.read(baseline)
    for name, number in (("sample", sample), ("time_limit", time_limit)):
        if number is not None and not number > 0:
            raise KernelError(
                f"checking: {name} is {number!r}; expected a number above 0, or None."
            )
    options = Options(
        unwritten=not wanted.kinds.isdisjoint({"unwritten", "coverage"}),
        races="race" in wanted.kinds,
        uninitialised="uninitialised" in wanted.kinds,
        floats="nan" in wanted.kinds,
        same_values=same_values,
        reversed=reverse,
        stress=stress,
        sample=sample,
        seconds=time_limit,
        cuda=cuda,
        gpu=gpu,
    )
    asked = list(stop_at)
    stops = Stops(asked) if asked else None
    watch = Watch(options, wanted, stops)
    with fastcall.bypassed(), hosts.uncompiled(), _installed(watch):
        try:
            yield watch.findings
        finally:
            watch.read_counts()
    for remark in stops.unreached() if stops is not None else ():
        watch.findings.note(remark)
    if known is not None:
        watch.findings[:] = known_findings.split(watch.findings, known)[0]


class _Watches:
    """The blocks that check, of all threads.

    A launch is watched by the innermost one of its thread. One of a thread that has none, such as
    those of MLX's streams, is watched by the last that began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[tuple[int, Watch]] = []

    def change(self, watch: Watch, begins: bool) -> None:
        """Note that a block begins, or ends."""
        with self._lock:
            active = [entry for entry in self._active if entry[1] is not watch]
            self._active = [*active, (threading.get_ident(), watch)] if begins else active
            devices.watcher = self if self._active else None

    def _here(self) -> Watch | None:
        active, thread = self._active, threading.get_ident()
        mine = [watch for owner, watch in active if owner == thread]
        watches = mine or [watch for _, watch in active]
        return watches[-1] if watches else None

    def launch(self, *call: Any) -> bool:
        """Run a launch, watched: as `Watch.launch`."""
        watch = self._here()
        return watch is not None and watch.launch(*call)

    def units(self, name: str) -> bool:
        """Whether an op's implementations in CUDA are run on the CPU: as `Watch.units`."""
        watch = self._here()
        return watch is not None and watch.units(name)

    def unit(self, *call: Any) -> None:
        """Run a CUDA unit's steps, watched: as `Watch.unit`."""
        watch = self._here()
        if watch is not None:
            watch.unit(*call)

    def note(self, text: str) -> None:
        """Remark on what is not checked."""
        watch = self._here()
        if watch is not None:
            watch.findings.note(text)

    def copies(self, kernel: Kernel) -> bool:
        """Whether a launch on a GPU runs on the CPU, over copies: as `Watch.copies`."""
        watch = self._here()
        return watch is not None and watch.copies(kernel)

    def counts(self, kernel: Kernel) -> bool:
        """Whether a body counts its accesses on a GPU: as `Watch.counts`."""
        watch = self._here()
        return watch is not None and watch.counts(kernel)

    def counted(self, *loaded: Any) -> None:
        """Read what a kernel counts, later: as `Watch.counted`."""
        watch = self._here()
        if watch is not None:
            watch.counted(*loaded)

    def runs(self, kernel: Kernel) -> bool:
        """Whether a kernel in CUDA is run on the CPU: as `Watch.runs`."""
        watch = self._here()
        return watch is not None and watch.runs(kernel)

    def native(self, *call: Any) -> Native | None:
        """What lets C run it: as `Watch.native`."""
        watch = self._here()
        return None if watch is None else watch.native(*call)


_watches = _Watches()
devices.offered[devices.ON_CPU] = CudaOnCpu


@contextmanager
def _installed(watch: Watch) -> Iterator[None]:
    _watches.change(watch, True)
    try:
        yield
    finally:
        _watches.change(watch, False)
