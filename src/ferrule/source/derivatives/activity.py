"""Which variables and arrays of a body depend on the inputs that are differentiated."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .nodes import (
    COMPARISONS,
    Assign,
    AtomicAdd,
    Binary,
    Block,
    Call,
    Choice,
    Declare,
    DeclareArray,
    Element,
    Expression,
    If,
    Lanes,
    Loop,
    Name,
    Statement,
    Unary,
    root,
)
from .partials import STEPS


class Activity:
    """What depends on some inputs.

    Attributes:
        names: the variables and arrays, by their names.
    """

    def __init__(self, body: Block, names: Collection[str]) -> None:
        self.names = set(names)
        before = -1
        while before != len(self.names):
            before = len(self.names)
            for s in statements(body):
                self._mark(s)

    def of(self, e: Expression) -> bool:
        """Whether an expression's value depends on them, smoothly."""
        if not e.type.floating:
            return False
        if isinstance(e, Name):
            return e.name in self.names
        if isinstance(e, Element):
            return e.array.name in self.names
        if isinstance(e, Lanes):
            return self.of(e.of)
        if isinstance(e, Unary):
            return self.of(e.operand)
        if isinstance(e, Binary):
            return e.operator not in COMPARISONS and (self.of(e.left) or self.of(e.right))
        if isinstance(e, Choice):
            return self.of(e.yes) or self.of(e.no)
        if isinstance(e, Call):
            return base(e.name) not in STEPS and any(map(self.of, e.arguments))
        return False

    def _mark(self, s: Statement) -> None:
        if isinstance(s, Declare) and s.value is not None and self.of(s.value):
            self.names.add(s.variable.name)
        elif isinstance(s, DeclareArray) and any(map(self.of, s.values or ())):
            self.names.add(s.array.name)
        elif isinstance(s, (Assign, AtomicAdd)) and s.place.type.floating and self.of(s.value):
            self.names.add(name_of(s.place))


def base(name: str) -> str:
    """A function's name without its namespaces."""
    return name.rsplit("::", 1)[-1]


def name_of(place: Expression) -> str:
    """The variable or array of a place."""
    place = root(place)
    if isinstance(place, Element):
        return place.array.name
    if isinstance(place, Name):
        return place.name
    raise TypeError(place)


def statements(body: Block) -> Iterator[Statement]:
    """All statements, those in others included."""
    for s in body:
        yield s
        if isinstance(s, If):
            yield from statements(s.yes)
            yield from statements(s.no)
        elif isinstance(s, Loop):
            yield from statements((*s.start, *s.update, *s.body))
