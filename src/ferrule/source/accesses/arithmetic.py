"""Operators on values, as C++ computes them."""

from __future__ import annotations

from collections.abc import Callable

from tree_sitter import Node

from . import terms
from .kinds import BOOL, LONG, Kind, Type, common, promoted
from .machine import Machine
from .terms import Term
from .values import (
    Opaque,
    Pointer,
    Scalar,
    Value,
    Vector,
    as_condition,
    as_kind,
    as_number,
    condition,
    fresh,
    fresh_like,
)

COMPARISONS: dict[str, Callable[[Term, Term], Term]] = {
    "<": terms.lt,
    "<=": terms.le,
    ">": lambda a, b: terms.lt(b, a),
    ">=": lambda a, b: terms.le(b, a),
    "==": terms.eq,
    "!=": lambda a, b: terms.not_(terms.eq(a, b)),
}


def binary(m: Machine, node: Node, op: str, a: Value, b: Value) -> Value:
    """The value of ``a op b``; those that decide by ``a`` whether to evaluate ``b`` apart."""
    if isinstance(a, Type) or isinstance(b, Type):
        m.refuse(node, f"{op} of a type is not followed")
        return Opaque()
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return _of_pointers(m, node, op, a, b)
    if isinstance(a, Vector) or isinstance(b, Vector):
        return _of_vectors(m, node, op, a, b)
    if not (isinstance(a, Scalar) and isinstance(b, Scalar)):
        return condition(terms.unknown("floats", None)) if op in COMPARISONS else Opaque()
    if op in ("<<", ">>"):
        return _shifted(m, node, op, a, b)
    kind = common(a.kind, b.kind)
    x, y = as_kind(a, kind), as_kind(b, kind)
    if op in COMPARISONS:
        if a.kind == b.kind == BOOL and op in ("==", "!="):
            return condition(COMPARISONS[op](as_condition(a), as_condition(b)))
        return condition(COMPARISONS[op](x, y))
    if op in "&|^" and a.kind == b.kind == BOOL:
        p, q = as_condition(a), as_condition(b)
        c = terms.and_(p, q) if op == "&" else terms.or_(p, q)
        if op == "^":
            c = terms.not_(terms.eq(p, q))
        return Scalar(terms.ite(c, terms.const(1), terms.const(0)), kind)
    return Scalar(computed(m, node, op, x, y, kind), kind)


def computed(m: Machine, node: Node, op: str, x: Term, y: Term, kind: Kind) -> Term:
    """``x op y`` in a type that holds both."""
    if op in ("/", "%"):
        if y.low is None or y.low <= 0:
            m.oblige(node, "division", y, kind)
        if op == "/" and kind.signed and not (x.low is not None and x.low > kind.least):
            return fits(m, node, terms.quot(x, y), kind)  # -2^31 / -1
        return terms.quot(x, y) if op == "/" else terms.rem(x, y)
    if op == "+":
        return fits(m, node, terms.add(x, y), kind)
    if op == "-":
        return fits(m, node, terms.sub(x, y), kind)
    if op == "*":
        return fits(m, node, terms.mul(x, y), kind)
    return _bits(op, x, y, kind)


def fits(m: Machine, node: Node, term: Term, kind: Kind) -> Term:
    """The result of an operation: of an unsigned type it wraps, of a signed one it must fit."""
    if m.wraps or not kind.signed:
        return terms.wrap(term, kind)
    if not terms.within(term, kind):
        m.oblige(node, "overflow", term, kind)
    return term


def _runs(mask: int) -> list[tuple[int, int]]:
    """Where the ones of a mask begin, and how many follow one another."""
    runs, at = [], 0
    while mask >> at:
        at += (mask >> at & -(mask >> at)).bit_length() - 1
        length = (~(mask >> at) & (mask >> at) + 1).bit_length() - 1
        runs.append((at, length))
        at += length
    return runs


def _bits(op: str, x: Term, y: Term, kind: Kind) -> Term:
    """``x & y``, ``x | y``, ``x ^ y``."""
    if x.op == "const":
        x, y = y, x
    if y.op == "const" and x.op == "const":
        return terms.const(
            {"&": x.value & y.value, "|": x.value | y.value}.get(op, x.value ^ y.value)
        )
    if y.op == "const" and y.value >= 0 and len(_runs(y.value)) <= 8:
        both = terms.const(0)
        for at, length in _runs(y.value):
            part = terms.fmod(terms.fdiv(x, terms.const(1 << at)), terms.const(1 << length))
            both = terms.add(both, terms.mul(terms.const(1 << at), part))
        if op == "&":
            return both
        return terms.sub(terms.add(x, y), both if op == "|" else terms.mul(terms.const(2), both))
    for u, v in ((x, y), (y, x)):  # of what has no bit in common
        if v.low is not None and v.low >= 0 and v.high is not None and v.high < terms.power_of(u):
            return terms.const(0) if op == "&" else terms.add(u, v)
    result = terms.unknown(f"the bits of {op}", kind)
    ends = [t.high for t in (x, y)]
    if all(t.low is not None and t.low >= 0 and t.high is not None for t in (x, y)):
        most = min(e or 0 for e in ends)
        if op != "&":
            most = (1 << max(e or 0 for e in ends).bit_length()) - 1
        return terms.least(terms.largest(result, terms.const(0)), terms.const(most))
    return result


def _shifted(m: Machine, node: Node, op: str, a: Scalar, b: Scalar) -> Value:
    kind = promoted(a.kind)
    x, count = as_number(a), as_number(b)
    if count.op != "const" or not 0 <= count.value < kind.bits:
        return fresh_like(Scalar(x, kind), "a shift by what is no constant")
    power = terms.const(1 << count.value)
    if op == ">>":
        return Scalar(terms.fdiv(x, power), kind)
    return Scalar(fits(m, node, terms.mul(power, x), kind), kind)


def _of_pointers(m: Machine, node: Node, op: str, a: Value, b: Value) -> Value:
    if isinstance(a, Pointer) and isinstance(b, Pointer):
        if op in COMPARISONS:
            return condition(terms.unknown("pointers", None))
        if op == "-" and a._replace(base=b.base, offset=b.offset) == b and a.step == 1:
            return Scalar(terms.sub(m.index_of(a), m.index_of(b)), LONG)
        return fresh(Type("long", LONG), "a difference of pointers")
    if isinstance(b, Pointer):
        a, b = b, a
    if op in COMPARISONS:
        return condition(terms.unknown("a pointer", None))
    if not isinstance(a, Pointer) or op not in ("+", "-"):
        m.refuse(node, f"{op} of a pointer")
        return Opaque()
    return moved(m, a, b, -1 if op == "-" else 1)


def moved(m: Machine, pointer: Pointer, by: Value, sign: int = 1) -> Pointer:
    """A pointer some elements further on."""
    if isinstance(by, Scalar):
        distance = as_number(by)
    else:
        distance = terms.unknown("an offset that is no integer", LONG)
    if pointer.dims:  # a pointer to rows
        for dim in pointer.dims:
            distance = terms.mul(distance, dim)
        return pointer._replace(
            offset=terms.add(pointer.offset, terms.mul(terms.const(sign), distance))
        )
    offset = terms.add(pointer.offset, terms.mul(terms.const(sign), distance))
    return pointer._replace(offset=offset)


def _of_vectors(m: Machine, node: Node, op: str, a: Value, b: Value) -> Value:
    vector = next(v for v in (a, b) if isinstance(v, Vector))
    many = len(vector.parts)

    def part(value: Value, i: int) -> Value:
        if isinstance(value, Vector):
            return Scalar(value.parts[i], value.kind) if i < len(value.parts) else Opaque()
        if isinstance(value, Scalar):  # becomes a vector of the other's type first
            return Scalar(terms.wrap(as_number(value), vector.kind), vector.kind)
        return value

    results = [binary(m, node, op, part(a, i), part(b, i)) for i in range(many)]
    found = [r for r in results if isinstance(r, Scalar)]
    if len(found) < many:
        return Opaque()
    # A scalar beside a vector is of the vector's type.
    kind = BOOL if op in COMPARISONS else vector.kind
    wrapped = [r.term if kind is BOOL else terms.wrap(as_number(r), kind) for r in found]
    return Vector(tuple(wrapped), kind)


def negated(m: Machine, node: Node, op: str, value: Value) -> Value:
    """``-v``, ``+v``, ``~v`` and ``!v``."""
    if op == "!":
        if isinstance(value, Vector):
            return Vector(
                tuple(terms.not_(as_condition(Scalar(p, value.kind))) for p in value.parts), BOOL
            )
        return condition(terms.not_(as_condition(value)))
    if isinstance(value, Vector):
        parts = [negated(m, node, op, Scalar(p, value.kind)) for p in value.parts]
        return Vector(
            tuple(terms.wrap(as_number(p), value.kind) for p in parts if isinstance(p, Scalar)),
            value.kind,
        )
    if not isinstance(value, Scalar):
        return Opaque()
    kind = promoted(value.kind)
    x = as_number(value)
    if op == "+":
        return Scalar(x, kind)
    if op == "~":
        return Scalar(terms.wrap(terms.sub(terms.const(-1), x), kind), kind)
    return Scalar(fits(m, node, terms.neg(x), kind), kind)
