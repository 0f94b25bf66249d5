"""Nodes as Metal text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .nodes import (
    ADD,
    Array,
    Assign,
    AtomicAdd,
    Call,
    Choice,
    Declare,
    DeclareArray,
    Effect,
    Element,
    Expression,
    If,
    Jump,
    Lanes,
    Literal,
    Loop,
    Name,
    Statement,
    Unary,
)

_STRENGTH = {
    operator: strength
    for strength, operators in enumerate(
        ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %"), 2
    )
    for operator in operators.split()
}
_CHOICE, _UNARY, _HIGHEST = 1, 20, 30


def expression(e: Expression) -> str:
    """An expression."""
    return _shown(e)[0]


def _shown(e: Expression) -> tuple[str, int]:
    """The text, and how strongly it binds."""
    if isinstance(e, Literal):
        return e.text, _UNARY if e.text.startswith("-") else _HIGHEST
    if isinstance(e, Name):
        return e.name, _HIGHEST
    if isinstance(e, Element):
        return element(e), _HIGHEST
    if isinstance(e, Lanes):
        return f"{_at_least(e.of, _HIGHEST)}.{e.letters}", _HIGHEST
    if isinstance(e, Call):
        return f"{e.name}({', '.join(map(expression, e.arguments))})", _HIGHEST
    if isinstance(e, Unary):
        return f"{e.operator}{_at_least(e.operand, _UNARY + 1)}", _UNARY
    if isinstance(e, Choice):
        parts = (_at_least(part, _CHOICE + 1) for part in (e.condition, e.yes, e.no))
        return "{} ? {} : {}".format(*parts), _CHOICE
    strength = _STRENGTH[e.operator]
    left, right = _at_least(e.left, strength), _at_least(e.right, strength + 1)
    return f"{left} {e.operator} {right}", strength


def _at_least(e: Expression, strength: int) -> str:
    text, binds = _shown(e)
    return text if binds >= strength else f"({text})"


def element(e: Element) -> str:
    """An element, with all of its subscripts."""
    return e.array.name + "".join(f"[{expression(index)}]" for index in e.indices)


def block(statements: Iterable[Statement], depth: int = 0) -> str:
    """Statements, a line each."""
    pad = "  " * depth
    return "".join(f"{pad}{line}\n" for s in statements for line in _lines(s))


def _lines(s: Statement) -> Iterator[str]:
    if isinstance(s, If):
        yield f"if ({expression(s.condition)}) {{"
        yield from _inside(s.yes)
        if len(s.no) == 1 and isinstance(s.no[0], If):
            first, *rest = _lines(s.no[0])
            yield f"}} else {first}"
            yield from rest
            return
        if s.no:
            yield "} else {"
            yield from _inside(s.no)
        yield "}"
    elif isinstance(s, Loop):
        condition = "" if s.condition is None else expression(s.condition)
        if s.kind == "for":
            start, update = (", ".join(map(_simple, part)) for part in (s.start, s.update))
            yield f"for ({start}; {condition}; {update}) {{"
        else:
            yield "do {" if s.kind == "do" else f"while ({condition}) {{"
        yield from _inside(s.body)
        yield f"}} while ({condition});" if s.kind == "do" else "}"
    else:
        yield f"{_simple(s)};"


def _inside(statements: Iterable[Statement]) -> Iterator[str]:
    return (f"  {line}" for s in statements for line in _lines(s))


def _simple(s: Statement) -> str:
    """A statement without its semicolon."""
    if isinstance(s, Declare):
        value = "" if s.value is None else f" = {expression(s.value)}"
        kind = "auto" if s.deduced and s.value is not None else s.variable.type
        return f"{'const ' * s.constant}{kind} {s.variable.name}{value}"
    if isinstance(s, DeclareArray):
        values = "" if s.values is None else f" = {{{', '.join(map(expression, s.values))}}}"
        return f"{declared(s.array)}{values}"
    if isinstance(s, Assign):
        if isinstance(s.value, Literal) and (s.operator, s.value.text) == ("+=", "1"):
            return f"++{expression(s.place)}"
        return f"{expression(s.place)} {s.operator} {expression(s.value)}"
    if isinstance(s, Effect):
        return expression(s.call)
    if isinstance(s, AtomicAdd):
        place, value = f"&{element(s.place)}", expression(s.value)
        if s.function == ADD:
            return f"{ADD}({place}, {value})"
        array = s.place.array
        cast = f"({array.space} atomic<{array.element}>*)" * s.cast
        return f"{s.function}({cast}{place}, {value}, memory_order_relaxed)"
    if isinstance(s, Jump):
        return s.kind if s.value is None else f"{s.kind} {expression(s.value)}"
    raise TypeError(s)


def declared(array: Array) -> str:
    """The declaration of an array, without a value."""
    space = "threadgroup " if array.space == "threadgroup" else ""
    dims = "".join(f"[{expression(dim)}]" for dim in array.dims)
    return f"{space}{array.element} {array.name}{dims}"
