"""Checked runs: kernels that are run inside of a block are watched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..devices import protocol as devices
from ..tools import fastcall
from . import baseline as known_findings
from .select import selection
from .stopping import Stops
from .watched import Options
from .watching import Findings, Watch


@contextmanager
def checking(
    *,
    kinds: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    kernels: Iterable[str] | None = None,
    sample: int | None = None,
    same_values: bool = False,
    reverse: bool = False,
    time_limit: float | None = None,
    baseline: str | os.PathLike[str] | None = None,
    stop_at: Iterable[str] = (),
) -> Iterator[Findings]:
    """Check the kernels that run on the CPU inside of a ``with`` block.

    Each launch runs on one thread, with every access watched; it gives the same numbers as else. It
    does not raise for what it finds, does not write outside its arrays, and goes on: reads outside
    give zero, writes there are dropped. A thread that cannot go on, since it would write to its
    own stack or to anywhere, is ended. All calls take the long way meanwhile, in all threads, and
    nodes of MLX's graphs are evaluated when they are made, unless MLX traces.

    Args:
        kinds: the kinds of findings that are wanted (`Finding`); None: all.
        ignore: kinds that are not wanted.
        kernels: patterns of kernels' names, as a shell's; None: all. Others run as ever.
        sample: at most so many threadgroups of a launch run, the first and the last among them;
            then nothing is said of elements that were not written. None: all.
        same_values: also report races of stores that store equal values.
        reverse: threads and simdgroups run in the opposite order.
        time_limit: seconds after which a launch is ended; None: never.
        baseline: a file of known findings, which are left out at the end.
        stop_at: lines at which a thread is shown to stderr, once in each kernel, with its variables
            and arrays, as ``"[KERNEL:][header:]LINE[:THREAD][@N]"``; at a terminal it waits there.

    Returns:
        A list of `Finding`, filled as kernels run; with ``notes``, remarks such as how many
        threadgroups were sampled, ``launches``, how many were checked, and ``stops``.

    Raises:
        KernelError: there is no such kind, the baseline cannot be read, or ``stop_at`` has what is
            no line.
    """
    wanted = selection(kinds, ignore, kernels)
    known = None if baseline is None else known_findings.read(baseline)
    options = Options(
        races="race" in wanted.kinds,
        uninitialised="uninitialised" in wanted.kinds,
        floats="nan" in wanted.kinds,
        same_values=same_values,
        reversed=reverse,
        sample=sample,
        seconds=time_limit,
    )
    asked = list(stop_at)
    stops = Stops(asked) if asked else None
    watch, before = Watch(options, wanted, stops), devices.watcher
    with fastcall.bypassed():
        devices.watcher = watch
        try:
            yield watch.findings
        finally:
            devices.watcher = before
            for remark in stops.unreached() if stops is not None else ():
                watch.findings.note(remark)
            if known is not None:
                watch.findings[:] = known_findings.split(watch.findings, known)[0]
