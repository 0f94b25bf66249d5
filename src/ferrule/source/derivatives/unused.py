"""Statements without which nothing that is stored changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .activity import name_of
from .nodes import (
    Assign,
    AtomicAdd,
    Block,
    Declare,
    DeclareArray,
    Effect,
    Element,
    Expression,
    If,
    Jump,
    Lanes,
    Loop,
    Name,
    Statement,
    Unary,
    operands,
)


def without_unused(body: Block) -> Block:
    """A body without variables that nothing reads, and what is assigned to them."""
    while True:
        used = set(_used(body))
        left = _kept(body, used)
        if left == body:
            return body
        body = left


def _kept(body: Block, used: set[str]) -> Block:
    out: list[Statement] = []
    for s in body:
        if isinstance(s, Declare) and s.variable.name not in used:
            continue
        if isinstance(s, DeclareArray) and s.array.name not in used:
            continue
        if isinstance(s, Assign) and not _is_device(s.place) and name_of(s.place) not in used:
            continue
        if isinstance(s, If):
            s = replace(s, yes=_kept(s.yes, used), no=_kept(s.no, used))
            if not (s.yes or s.no):
                continue
            if not s.yes:
                s = replace(s, condition=_not(s.condition), yes=s.no, no=())
        elif isinstance(s, Loop):
            s = replace(s, body=_kept(s.body, used))
            if not s.body and s.kind == "for":
                continue
        out.append(s)
    return tuple(out)


def _is_device(place: Expression) -> bool:
    while isinstance(place, Lanes):
        place = place.of
    return isinstance(place, Element) and place.array.space == "device"


def _not(e: Expression) -> Expression:
    if isinstance(e, Unary) and e.operator == "!":
        return e.operand
    return Unary("!", e, e.type)


def _used(body: Block) -> Iterator[str]:
    """The names that are read, but for a variable's in what assigns it."""
    for s in body:
        if isinstance(s, Declare):
            if s.value is not None:
                yield from names_in(s.value)
        elif isinstance(s, DeclareArray):
            for e in (*s.array.dims, *(s.values or ())):
                yield from names_in(e)
        elif isinstance(s, Assign):
            own = name_of(s.place)
            yield from (name for name in names_in(s.value) if name != own)
            if isinstance(s.place, Element):
                for index in s.place.indices:
                    yield from names_in(index)
                if s.place.array.space == "device":
                    yield own
        elif isinstance(s, AtomicAdd):
            yield from names_in(s.value)
            yield from names_in(s.place)
        elif isinstance(s, If):
            yield from names_in(s.condition)
            yield from _used((*s.yes, *s.no))
        elif isinstance(s, Loop):
            if s.condition is not None:
                yield from names_in(s.condition)
            yield from _used((*s.start, *s.update, *s.body))
        elif isinstance(s, Jump) and s.value is not None:
            yield from names_in(s.value)
        elif isinstance(s, Effect):
            yield from names_in(s.call)


def names_in(e: Expression) -> Iterator[str]:
    """The variables and arrays that an expression reads."""
    if isinstance(e, Name):
        yield e.name
    elif isinstance(e, Element):
        yield e.array.name
    for part in operands(e):
        yield from names_in(part)
