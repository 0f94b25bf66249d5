"""What the analysis of a body finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .kinds import Kind
from .terms import Term, const

SPACES = ("device", "threadgroup", "private", "constant")


class Unsupported(NamedTuple):
    """Something that is not understood, so that accesses may be missing or wrong.

    Attributes:
        line: counts from 1, in the body or (``where``) the header.
        why: what it is.
        where: ``"source"`` or ``"header"``.
        hides: it may hide accesses and what variables become; else it is of barriers alone.
    """

    line: int
    why: str
    where: str = "source"
    hides: bool = True


class Times(NamedTuple):
    """How many barriers lie behind: by what they order, and among whom.

    Two threads of a threadgroup (or simdgroup) that pass the same barriers can meet at an element
    only where they have passed equally many.

    Attributes:
        group, group_device: of the threadgroup, that order threadgroup and device memory.
        simd, simd_device: of the simdgroup or the threadgroup.
    """

    group: Term = const(0)
    group_device: Term = const(0)
    simd: Term = const(0)
    simd_device: Term = const(0)


class Loop(NamedTuple):
    """A loop around an access.

    Attributes:
        counter: the rounds that are behind.
        holds: what holds in each round; where it does not, there are no more rounds.
    """

    counter: Term
    holds: Term


@dataclass(frozen=True)
class Array:
    """What is indexed.

    Attributes:
        name: as the author calls it.
        space: one of `SPACES`.
        size: in bytes, of one element; None where it is not known.
        length: its elements; None of device arrays, whose launch says it.
        key: where it is declared: tells arrays of one name apart.
        rows: it is an array of arrays, whose elements lie one behind the other.
    """

    name: str
    space: str
    size: int | None
    length: Term | None = None
    key: int = 0
    rows: bool = False


class Access(NamedTuple):
    """One read or write.

    Attributes:
        line, where: of the body, or of the header.
        array: what is accessed.
        mode: ``"read"``, ``"write"`` or ``"atomic"``.
        element: the first one that is accessed.
        width: how many neighbours there are, itself included.
        path: what holds where it happens.
        loops: those around it, the outermost first.
        times: the barriers behind.
        start: the byte of the text that it starts at, where that is asked for.
    """

    line: int
    array: Array
    mode: str
    element: Term
    width: int
    path: tuple[Term, ...]
    loops: tuple[Loop, ...]
    times: Times
    where: str = "source"
    start: int = 0

    @property
    def exact(self) -> bool:
        """Whether sizes, the thread and the inputs decide whether and where it happens."""
        return self.element.is_exact and all(c.is_exact for c in self.path)


class Obligation(NamedTuple):
    """What must hold for the terms to mean what the body computes.

    Attributes:
        line, where: of the body, or of the header.
        what: ``"overflow"`` of a signed type, ``"wrap"`` of a loop's counter, ``"division"`` by
            zero.
        term: what must fit into ``kind``; of a division, the divisor, which must not be 0.
        kind: the type.
        path, loops: as of an access.
    """

    line: int
    what: str
    term: Term
    kind: Kind
    path: tuple[Term, ...]
    loops: tuple[Loop, ...]
    where: str = "source"


@dataclass(frozen=True)
class Accesses:
    """What a body does to memory.

    Attributes:
        accesses, obligations, unsupported: in the order of the text.
        ends: of every loop it is known how many rounds it has at most.
        text: that of the body, with what lines and starts are of.
    """

    accesses: tuple[Access, ...]
    obligations: tuple[Obligation, ...]
    unsupported: tuple[Unsupported, ...]
    ends: bool = True
    text: bytes = b""
