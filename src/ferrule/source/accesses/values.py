"""What variables hold while a body is analysed."""

from __future__ import annotations

from typing import Any, NamedTuple

from tree_sitter import Node

from ..syntax import Tree
from . import terms
from .kinds import BOOL, INT, Kind, Type, of_kind
from .model import Array
from .terms import Term

UNSET = "a variable that is not initialised"  # and so may be another number wherever it is read


class Scalar(NamedTuple):
    """An integer, or (of kind `BOOL`) a condition."""

    term: Term
    kind: Kind


class Vector(NamedTuple):
    """Several integers."""

    parts: tuple[Term, ...]
    kind: Kind


class Opaque(NamedTuple):
    """A value of which nothing is followed: a float, a struct."""

    type: Type = Type("")


class Pointer(NamedTuple):
    """A place in an array.

    Attributes:
        array: which one.
        base: an element of it.
        offset: from there on, in what it points to.
        step: elements of the array in one of what it points to; 0 where that is not known.
        parts: of what it points to, in one element of the array.
        type: what it points to.
        dims: of an array of arrays that is not yet indexed to its end: what is left.
    """

    array: Array
    base: Term
    offset: Term
    type: Type
    step: int = 1
    parts: int = 1
    dims: tuple[Term, ...] = ()


class Function(NamedTuple):
    """A function or lambda, where it stands; of a lambda, what its names mean."""

    tree: Tree
    node: Node
    where: str
    scopes: tuple[dict[str, Any], ...] | None = None


class Row(NamedTuple):
    """A part of an array of arrays: an array itself, which is no value."""

    pointer: Pointer


class Place(NamedTuple):
    """A variable, or a component of one."""

    cell: int
    component: int | None = None


class Address(NamedTuple):
    """A pointer to a variable."""

    place: Place


class Reference(NamedTuple):
    """Another name of an element of an array."""

    pointer: Pointer


Value = Scalar | Vector | Opaque | Pointer | Function | Type | Address
Named = Value | Place | Reference


def number(value: int, kind: Kind = INT) -> Scalar:
    return Scalar(terms.const(value), kind)


def condition(term: Term) -> Scalar:
    return Scalar(term, BOOL)


def as_number(value: Scalar) -> Term:
    """The integer that a scalar is."""
    if value.term.condition:
        return terms.ite(value.term, terms.const(1), terms.const(0))
    return value.term


def as_kind(value: Scalar, kind: Kind) -> Term:
    """The integer that a scalar is in another type: what fits in any case does not wrap."""
    term = as_number(value)
    if kind.least <= value.kind.least and value.kind.most <= kind.most:
        return term
    return terms.wrap(term, kind)


def as_condition(value: Value) -> Term:
    """Whether a value is not zero."""
    if isinstance(value, Scalar):
        if value.term.condition:
            return value.term
        return terms.not_(terms.eq(value.term, terms.const(0)))
    return terms.unknown("a condition that is no integer", None)


def converted(value: Value, to: Type) -> Value:
    """A value as another type holds it."""
    if to.kind is None or isinstance(value, (Pointer, Function, Type, Address)):
        return value if isinstance(value, (Pointer, Function, Address)) else Opaque(to)
    if isinstance(value, Vector) or to.lanes > 1:
        if isinstance(value, Vector) and len(value.parts) == to.lanes:
            parts = tuple(terms.wrap(part, to.kind) for part in value.parts)
            return Vector(parts, to.kind)
        if isinstance(value, Scalar) and to.lanes > 1:
            return Vector((terms.wrap(as_number(value), to.kind),) * to.lanes, to.kind)
        return fresh(to, "a vector")
    if to.kind is BOOL:
        return condition(as_condition(value))
    if isinstance(value, Scalar):
        return Scalar(as_kind(value, to.kind), to.kind)
    return fresh(to, "a value that is no integer")


def fresh(of: Type, why: str) -> Value:
    """Any value of a type."""
    if of.kind is None:
        return Opaque(of)
    if of.lanes > 1:
        return Vector(tuple(terms.unknown(why, of.kind) for _ in range(of.lanes)), of.kind)
    return Scalar(terms.unknown(why, of.kind), of.kind)


def is_unset(term: Term) -> bool:
    """Whether a term may be of a variable that is not initialised."""
    return any(leaf.op == "unknown" and leaf.value[1] == UNSET for leaf in term.leaves)


def fresh_like(value: Value, why: str) -> Value:
    """Any value of the type of another."""
    if isinstance(value, Scalar):
        why = UNSET if is_unset(value.term) else why
        return fresh(of_kind(value.kind), why)
    if isinstance(value, Vector):
        return Vector(tuple(terms.unknown(why, value.kind) for _ in value.parts), value.kind)
    if isinstance(value, Pointer):
        wide = terms.unknown(why, Kind("long", 64, True))
        return value._replace(base=wide, offset=terms.const(0))
    return value


def merged(c: Term, a: Value, b: Value) -> Value:
    """``a`` where a condition holds, else ``b``."""
    if a == b or c is terms.TRUE:
        return a
    if c is terms.FALSE:
        return b
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        if a.kind == b.kind and a.term.condition == b.term.condition:
            return Scalar(terms.ite(c, a.term, b.term), a.kind)
        wide = a.kind if a.kind.bits >= b.kind.bits else b.kind
        return Scalar(terms.ite(c, as_number(a), as_number(b)), wide)
    if isinstance(a, Vector) and isinstance(b, Vector) and len(a.parts) == len(b.parts):
        parts = zip(a.parts, b.parts, strict=True)
        return Vector(tuple(terms.ite(c, x, y) for x, y in parts), a.kind)
    if isinstance(a, Pointer) and isinstance(b, Pointer):
        same = a._replace(base=b.base, offset=b.offset) == b
        if same:
            base, offset = terms.ite(c, a.base, b.base), terms.ite(c, a.offset, b.offset)
            return a._replace(base=base, offset=offset)
    return Opaque()
