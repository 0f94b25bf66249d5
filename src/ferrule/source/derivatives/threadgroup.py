"""Threadgroup arrays that each round of a loop writes anew."""

from __future__ import annotations

from collections.abc import Iterator

from ...kernel import ATTRIBUTES
from .activity import name_of, statements
from .liveness import assigned_in, elements_in, expressions_of
from .nodes import (
    Assign,
    AtomicAdd,
    Block,
    Declare,
    Element,
    Expression,
    If,
    Literal,
    Loop,
    Name,
    Statement,
    names_in,
    root,
)


def rewritten(body: Block, loop: Loop, array: str) -> bool:
    """Whether a round that runs again finds in an array what it found the first time.

    So it is where all rounds write the same elements, and before they read, and nothing else in the
    body writes others: what a round reads it has written itself, or nothing has.
    """
    varying = _varying(loop)
    stores: list[Element] = []
    has_read = False
    for s, conditions in _in_order(loop.body, ()):
        place = s.place if isinstance(s, (Assign, AtomicAdd)) else None
        whole = None if place is None else root(place)
        for e in expressions_of(s):
            inner = e.indices if e is place and isinstance(e, Element) else (e,)
            has_read |= any(_reads(part, array) for part in inner)
        if not isinstance(whole, Element) or whole.array.name != array:
            continue
        anew = isinstance(s, Assign) and s.operator == "=" and place is whole
        if not anew or any(_varies(e, varying) for e in (*whole.indices, *conditions)):
            return False
        if has_read and not any(_covers(store, whole) for store in stores):
            return False
        stores.append(whole)
    inside = {id(place) for place in _stores(loop.body, array)}
    outside = [place for place in _stores(body, array) if id(place) not in inside]
    changed = assigned_in(body)
    steady = [s for s in stores if changed.isdisjoint(n for i in s.indices for n in names_in(i))]
    return bool(stores) and all(place in steady for place in outside)


def _stores(body: Block, array: str) -> Iterator[Element]:
    """The places in an array that a body writes."""
    for s in statements(body):
        place = root(s.place) if isinstance(s, (Assign, AtomicAdd)) else None
        if isinstance(place, Element) and place.array.name == array:
            yield place


def _varying(loop: Loop) -> set[str]:
    """What differs between rounds."""
    inside = {s.variable.name for s in statements(loop.body) if isinstance(s, Declare)}
    varying = assigned_in((*loop.update, *loop.body)) - inside
    before = -1
    while before != len(varying):
        before = len(varying)
        for s, conditions in _in_order(loop.body, ()):
            if isinstance(s, (Declare, Assign)) and s.value is not None:
                name = s.variable.name if isinstance(s, Declare) else name_of(s.place)
                if any(_varies(e, varying) for e in (s.value, *conditions)):
                    varying.add(name)
    return varying


def _in_order(
    body: Block, conditions: tuple[Expression, ...]
) -> Iterator[tuple[Statement, tuple[Expression, ...]]]:
    for s in body:
        yield s, conditions
        if isinstance(s, If):
            yield from _in_order((*s.yes, *s.no), (*conditions, s.condition))
        elif isinstance(s, Loop):
            more = () if s.condition is None else (s.condition,)
            yield from _in_order((*s.start, *s.body, *s.update), (*conditions, *more))


def _varies(e: Expression, varying: set[str]) -> bool:
    return any(name in varying for name in names_in(e)) or any(
        element.array.space != "constant" for element in elements_in(e)
    )


def _reads(e: Expression, array: str) -> bool:
    return any(element.array.name == array for element in elements_in(e))


def _covers(store: Element, later: Element) -> bool:
    """Whether an earlier store writes what a later one does."""
    if store.indices == later.indices:
        return True
    (first, *_), (at, *_) = store.indices, later.indices
    of = root(first)
    is_thread = isinstance(of, Name) and of.name in ATTRIBUTES
    return is_thread and isinstance(at, Literal) and at.text in ("0", "0u")
