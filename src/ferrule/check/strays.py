"""Lanes that read from one that is not there get anything: a bug where a result depends on it.

A sum by `simd_shuffle_down` in 16 lanes adds what nobody has, to the sums of lanes that nobody
reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..kernel import Kernel
from ..source import printing
from ..spec import Facts, Launch, Spec
from .launches import watched
from .launches.instrument import Instrumented
from .launches.watched import KINDS, Event, Options, Result
from .stress import bytes_of, matter

_MOVES = re.compile(r"shuffle|broadcast|shfl")


def run(
    kernel: Instrumented,
    spec: Spec,
    inputs: Sequence[Facts],
    outputs: Sequence[Facts],
    launch: Launch,
    options: Options,
) -> Result:
    """Run a launch, as `watched.run` does; without events of lanes that nothing depends on."""
    if not _may_move(spec.kernel):
        return watched.run(kernel, spec, inputs, outputs, launch, options)
    before = bytes_of(outputs)
    result = watched.run(kernel, spec, inputs, outputs, launch, options)
    if result.status or result.stopped:
        return result
    quick = options._replace(unwritten=False, races=False, uninitialised=False, floats=False)

    def depends(event: Event) -> bool:
        def again(others: Sequence[Facts], byte: int) -> bool:
            changed = quick._replace(strays=(event.pc, byte))
            ran = watched.run(kernel, spec, inputs, others, launch, changed)
            return not (ran.status or ran.stopped)

        return matter(outputs, before, again)

    events = [event for event in result.events if KINDS[event.kind] != "LANE" or depends(event)]
    return result._replace(events=events)


def _may_move(kernel: Kernel) -> bool:
    """Whether lanes read from others; what prints would do so again."""
    text = f"{kernel.header}\n{kernel.source}"
    words = printing.CUDA if kernel.language == "cuda" else printing.METAL
    return _MOVES.search(text) is not None and not printing.prints(text, words)
