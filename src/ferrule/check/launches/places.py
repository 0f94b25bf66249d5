"""Where events happened, in the author's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .instrument import Instrumented
from .lines import Place
from .shared import Event


class Places(NamedTuple):
    """Where an event happened.

    Attributes:
        body: in the author's body.
        header: in a function of the header, which the body calls.
    """

    body: Place | None
    header: Place | None = None

    @property
    def first(self) -> Place | None:
        """The place in the body, or what is known."""
        return self.body or self.header


def places_of(event: Event, kernel: Instrumented) -> Places:
    """Where an event happened."""
    lines = kernel.lines
    if (origin := origin_of(event, kernel)) is not None:
        return _places(lines.places(event.origin[origin]))
    chain = [place for pc in event.caller if pc for place in lines.places(pc)]
    if event.file:
        where = event.file.decode().rpartition(".")[2]
        chain.insert(0, Place(where, event.line, event.column))
    return _places(chain or lines.places(event.pc) or lines.places(event.other_pc))


def origin_of(event: Event, kernel: Instrumented) -> int | None:
    """Which of the operations that an event of a NaN names made it, as far as it is known."""
    called, *computed = range(len(event.origin))
    lines = kernel.lines
    # What functions compute on their way to a number is no origin.
    own = (k for k in computed if lines.direct(event.origin[k]))
    origins = (k for k in (called, *own, *computed) if event.origin[k])
    return next((k for k in origins if lines.places(event.origin[k])), None)


def other_places_of(event: Event, kernel: Instrumented) -> Places:
    """Where the other access of a race happened."""
    return _places(kernel.lines.places(event.other_pc))


def _places(chain: Sequence[Place]) -> Places:
    """Of places and the calls that led to them."""
    body = next((place for place in chain if place.where == "source"), None)
    header = chain[0] if chain and chain[0].where == "header" else None
    return Places(body, header)


def compared(event: Event, places: tuple[Place | None, Place | None], kernel: Instrumented) -> bool:
    """Whether a race is of an element that one thread reads and another changes by atomicCAS: what
    is read is compared there, as NVIDIA's guide has it."""
    writes = event.value[0]
    writer = places[0] if writes == 1 else places[1] if writes == 2 else None
    if writer is None:
        return False
    lines = kernel.texts[writer.where == "header"].split(b"\n")
    return writer.line <= len(lines) and b"atomicCAS" in lines[writer.line - 1]
