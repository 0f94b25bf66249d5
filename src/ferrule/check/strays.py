"""Values that are wrong only where a result depends on them: with others it is another.

A lane that reads from one that is not there gets anything; a sum by `simd_shuffle_down` in 16 lanes
adds that to the sums of lanes that nobody reads. A half becomes infinite, and a minimum follows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..dtypes import float16
from ..kernel import Kernel
from ..source import printing
from ..spec import Facts, Spec
from .launches import watched
from .launches.instrument import Instrumented
from .launches.shared import KINDS, Event
from .launches.watched import Call, Options, Result
from .stress import bytes_of, changes

# What is tried instead. Each byte of a lane's value: large in every type, large below zero, NaN.
_OTHERS = {"LANE": (0x7B, 0xFB, 0xFF), "HALF_OVERFLOW": (1,)}
_WORDS = re.compile(r"shuffle|broadcast|rotate|half|float16")
_MOST = 8  # events of a launch that are looked at: it runs again for each


def run(kernel: Instrumented, call: Call, options: Options) -> Result:
    """Run a launch, as `watched.run` does, without such events that no result depends on."""
    if not _can_happen(call.spec):
        return watched.run(kernel, call, options)
    before = bytes_of(call.outputs)
    result = watched.run(kernel, call, options)
    asked = [event for event in result.events if KINDS[event.kind] in _OTHERS][:_MOST]
    if not asked or result.status or result.stopped or _prints(call.spec.kernel):
        return result
    quick = options._replace(unwritten=False, races=False, uninitialised=False, floats=False)

    def matters(event: Event) -> bool:
        def again(others: Sequence[Facts], value: int) -> bool:
            changed = quick._replace(strays=(event.pc, value))
            ran = watched.run(kernel, call._replace(outputs=others), changed)
            return not (ran.status or ran.stopped)

        return changes(call.outputs, before, again, _OTHERS[KINDS[event.kind]])

    idle = [event for event in asked if not matters(event)]
    return result._replace(events=[event for event in result.events if event not in idle])


def _can_happen(spec: Spec) -> bool:
    """Whether a launch may have such events; else its outputs need not be kept."""
    types = [*(one.dtype for one in spec.inputs), *spec.outputs, *dict(spec.template).values()]
    text = f"{spec.kernel.header}\n{spec.kernel.source}"
    return spec.kernel.language == "cuda" or float16 in types or bool(_WORDS.search(text))


def _prints(kernel: Kernel) -> bool:
    """What prints would do so again."""
    words = printing.CUDA if kernel.language == "cuda" else printing.METAL
    return printing.prints(f"{kernel.header}\n{kernel.source}", words)
