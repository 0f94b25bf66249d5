"""What is kept of the rounds of loops until they are reversed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .activity import statements
from .liveness import elements_in, expressions_of
from .nodes import (
    INT,
    LONG,
    UINT,
    Array,
    Binary,
    Block,
    Call,
    Declare,
    Element,
    Expression,
    Lanes,
    Literal,
    Name,
    Statement,
)
from .partials import add, mul
from .printing import expression

if TYPE_CHECKING:
    from .frames import Frames

TAPE = "fr_tape"
IN_REGISTERS = 128  # numbers


class Segment(NamedTuple):
    """The tape of one loop.

    Attributes:
        line: the loop's.
        counter: what it counts with, for messages.
        rounds: the most that it has.
        width: how many numbers it keeps of each.
        variables: which.
    """

    line: int
    counter: str
    rounds: Expression
    width: Expression
    variables: tuple[str, ...]


class Tape:
    """The device memory that keeps what loops need when they are reversed.

    Args:
        sizes: what integers are known before the call, in the rule's names.
        flat: whether all threads lie along x.

    Attributes:
        trips: by variable that counts a loop, the most rounds of it that its user has said.
        segments: of the loops, one behind the other.
    """

    def __init__(
        self,
        frames: Frames,
        trips: Mapping[str, Expression],
        sizes: Mapping[str, Expression],
        flat: bool,
    ) -> None:
        self._flat = flat
        self.trips, self._sizes = trips, sizes
        self._values = frames.values
        self.segments: list[Segment] = []
        self.array = Array(TAPE, "device", frames.real)
        at = Name("thread_position_in_grid", UINT._replace(lanes=3))
        self._named = Name(frames.fresh("fr_thread"), LONG)
        self._thread: Expression = Lanes(at, "x", UINT) if flat else self._named
        self._threads = Name(frames.fresh("fr_threads"), LONG)

    def reserve(self, segment: Segment) -> Expression:
        """Make room; where it begins."""
        begin: Expression = Literal("0", LONG)
        for other in self.segments:
            begin = add(begin, mul(_long(other.rounds), _long(other.width)))
        self.segments.append(segment)
        return begin

    def size(self, e: Expression) -> Expression | None:
        """A value as an expression of sizes that are known before the call; None of none."""
        if isinstance(e, Name):
            if e.name in self._sizes:
                return self._sizes[e.name]
            value = self._values.get(e.name)
            return None if value is None else self.size(value)
        if isinstance(e, Lanes) and isinstance(e.of, Name):
            return self._sizes.get(f"{e.of.name}.{e.letters}")
        if isinstance(e, Call) and e.cast and not e.type.floating:
            return self.size(e.arguments[0])
        if isinstance(e, Binary) and e.operator in "+-*/%":
            left, right = self.size(e.left), self.size(e.right)
            return (
                None if left is None or right is None else Binary(e.operator, left, right, e.type)
            )
        return e if isinstance(e, Literal) else None

    def least(self, e: Expression) -> Expression | None:
        """A size that a value is no less than."""
        found = self.size(e)
        if found is not None:
            return found
        while isinstance(e, Name) and e.name in self._values and e.type.name != "uint":
            e = self._values[e.name]
        return Literal("0", INT) if e.type.name in ("uint", "ulong", "ushort", "uchar") else None

    def place(self, row: Expression) -> Element:
        """The number of this thread in a row: neighbours lie side by side."""
        at = "" if row == Literal("0", INT) else f" + {expression(mul(_long(row), self._threads))}"
        array = replace(self.array, name=f"({TAPE}{at})") if at else self.array
        return Element(array, (self._thread,), self.array.element)

    def start(self, made: Block) -> tuple[Statement, ...]:
        """What numbers the threads, if the tape is used."""
        named = (e for s in statements(made) for x in expressions_of(s) for e in elements_in(x))
        if not any(TAPE in e.array.name for e in named):
            return ()
        vector = UINT._replace(lanes=3)
        at, size = Name("thread_position_in_grid", vector), Name("threads_per_grid", vector)

        def lane(of: Name, letter: str) -> Expression:
            return _long(Lanes(of, letter, UINT))

        if self._flat:
            return (Declare(1, self._threads, lane(size, "x"), True),)
        inner = add(lane(at, "y"), mul(lane(size, "y"), lane(at, "z")))
        thread = add(lane(at, "x"), mul(lane(size, "x"), inner))
        threads = mul(mul(lane(size, "x"), lane(size, "y")), lane(size, "z"))
        return Declare(1, self._named, thread, True), Declare(1, self._threads, threads, True)


def _long(e: Expression) -> Expression:
    return e if e.type == LONG else Call("long", (e,), LONG, cast=True)
