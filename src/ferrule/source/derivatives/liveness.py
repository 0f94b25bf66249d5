"""What statements read of what was before them, and statements whose results nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .activity import name_of, statements
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
    Loop,
    Name,
    Statement,
    branch,
    is_device,
    names_in,
    operands,
    root,
)

Live = frozenset[str]
_NONE: Live = frozenset()


def pruned(body: Block, kept: Iterable[str] = ()) -> tuple[Block, Live]:
    """A body without what nothing reads, and the names whose values it reads from before.

    Args:
        kept: names that are read behind it, and by other rounds of it.
    """
    return _Pruning(frozenset(kept)).run(body)


class _Pruning:
    def __init__(self, kept: Live) -> None:
        self._kept = kept
        self._leaving: list[tuple[Live, Live]] = []  # of loops: what break and continue lead to

    def run(self, body: Block) -> tuple[Block, Live]:
        made, live = self.block(body, self._kept)
        named = _mentioned(made)
        return _declared_for(made, named), live

    def block(self, body: Block, live: Live) -> tuple[Block, Live]:
        """What is left of statements, and what is live in front of them."""
        out: list[Statement] = []
        for s in reversed(body):
            left, live = self._statement(s, live)
            if left is not None:
                out.append(left)
        return tuple(reversed(out)), live

    def _statement(self, s: Statement, live: Live) -> tuple[Statement | None, Live]:
        if isinstance(s, Declare):
            name = s.variable.name
            if s.value is None:  # whether anything is left that names it, is looked at last
                return s, live - {name}
            if name not in live:
                return replace(s, value=None, constant=False, deduced=False), live
            return s, (live - {name}) | _reads(s.value)
        if isinstance(s, DeclareArray):
            return s, (live - {s.array.name}).union(*map(_reads, expressions_of(s)))
        if isinstance(s, Assign):
            return self._assign(s, live)
        if isinstance(s, AtomicAdd):
            if s.place.array.space != "device" and s.place.array.name not in live:
                return None, live
            return s, live | _reads(s.value) | _reads(s.place)
        if isinstance(s, If):
            yes, before_yes = self.block(s.yes, live)
            no, before_no = self.block(s.no, live)
            if not _does(yes) and not _does(no):
                return None, live
            left = branch(s.line, s.condition, yes if _does(yes) else (), no)
            return left, before_yes | before_no | _reads(s.condition)
        if isinstance(s, Loop):
            return self._loop(s, live)
        if isinstance(s, Jump):
            if s.kind == "return":
                return s, self._kept
            behind, again = self._leaving[-1]
            return s, behind if s.kind == "break" else again
        return s, live

    def _assign(self, s: Assign, live: Live) -> tuple[Statement | None, Live]:
        place, name = s.place, name_of(s.place)
        inner = root(place)
        if not is_device(place) and name not in live:
            return None, live
        if isinstance(place, Name) and s.operator == "=":
            live -= {name}
        if isinstance(inner, Element):
            live = live.union(*map(_reads, inner.indices))
        return s, live | _reads(s.value)

    def _loop(self, s: Loop, live: Live) -> tuple[Statement | None, Live]:
        condition = _NONE if s.condition is None else _reads(s.condition)
        head = live | condition
        while True:
            again = self._before(s.update, head)
            self._leaving.append((live, again))
            body, before = self.block(s.body, again)
            self._leaving.pop()
            if before | head == head:
                break
            head |= before
        if not _does(body) and not _changes(s, live):
            return None, live
        if s.kind == "do":
            head = before
        head = self._before(s.start, head)
        return replace(s, body=body), head

    @staticmethod
    def _before(body: Block, live: Live) -> Live:
        """What is live in front of statements that all stay."""
        for s in reversed(body):
            if isinstance(s, Declare):
                live = (live - {s.variable.name}) | (_reads(s.value) if s.value else _NONE)
            elif isinstance(s, Assign):
                own = s.operator == "=" and isinstance(s.place, Name)
                live = (live - {name_of(s.place)}) if own else live | _reads(s.place)
                live |= _reads(s.value)
        return live


def _does(body: Block) -> bool:
    """Whether more than declarations without values is left."""
    return any(
        not (isinstance(s, DeclareArray) or (isinstance(s, Declare) and s.value is None))
        for s in body
    )


def _changes(s: Loop, live: Live) -> bool:
    """Whether counting changes what is read later."""
    return any(isinstance(u, Assign) and name_of(u.place) in live for u in (*s.start, *s.update))


def _reads(e: Expression) -> Live:
    return frozenset(names_in(e))


def _mentioned(body: Block) -> set[str]:
    found: set[str] = set()
    for s in statements(body):
        for e in expressions_of(s):
            found.update(names_in(e))
    return found


def expressions_of(s: Statement) -> Iterator[Expression]:
    """The expressions of a statement, places included; not those of statements in it."""
    if isinstance(s, Declare):
        if s.value is not None:
            yield s.value
    elif isinstance(s, DeclareArray):
        yield from s.array.dims
        yield from s.values or ()
    elif isinstance(s, (Assign, AtomicAdd)):
        yield s.place
        yield s.value
    elif isinstance(s, (If, Loop)):
        if s.condition is not None:
            yield s.condition
    elif isinstance(s, Effect):
        yield s.call
    elif s.value is not None:
        yield s.value


def _declared_for(body: Block, named: set[str]) -> Block:
    """Statements without declarations of what nothing names."""
    out: list[Statement] = []
    for s in body:
        if isinstance(s, Declare) and s.variable.name not in named:
            continue
        if isinstance(s, DeclareArray) and s.array.name not in named:
            continue
        if isinstance(s, If):
            yes, no = _declared_for(s.yes, named), _declared_for(s.no, named)
            if not yes and not no:
                continue
            s = replace(s, yes=yes, no=no)
        elif isinstance(s, Loop):
            s = replace(s, body=_declared_for(s.body, named))
        out.append(s)
    return tuple(out)


def assigned_in(body: Iterable[Statement]) -> set[str]:
    """The variables and arrays that statements change, other than where they are declared."""
    return {name_of(s.place) for s in statements(tuple(body)) if isinstance(s, (Assign, AtomicAdd))}


def used_in(body: Block) -> set[str]:
    """All names that stand in statements."""
    declared = {s.variable.name for s in statements(body) if isinstance(s, Declare)}
    arrays = {s.array.name for s in statements(body) if isinstance(s, DeclareArray)}
    return _mentioned(body) | declared | arrays


def elements_of(body: Iterable[Statement], array: str) -> Iterator[Element]:
    """All places where statements name an array."""
    for s in statements(tuple(body)):
        for e in expressions_of(s):
            yield from elements_in(e, array)


def elements_in(e: Expression, array: str | None = None) -> Iterator[Element]:
    """The elements in an expression: of one array, or of all."""
    if isinstance(e, Element) and array in (None, e.array.name):
        yield e
    for part in operands(e):
        yield from elements_in(part, array)
