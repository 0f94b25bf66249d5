"""Forward mode: a body that computes the tangents of its outputs beside its values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...errors import DialectError
from .activity import Activity, base, name_of
from .liveness import pruned
from .names import refusal
from .nodes import (
    BOOL,
    Array,
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
    Literal,
    Loop,
    Name,
    Statement,
    Unary,
    is_short,
    root,
)
from .partials import (
    EXTREMES,
    FILLING,
    LINEAR,
    ONE,
    PARTIALS,
    ZERO,
    Factor,
    add,
    chosen,
    div,
    mul,
    neg,
    zero_of,
)

Tangent = Expression | None
Place = Name | Element | Lanes


def forward(kernel: str, body: Block, wrt: Collection[str], outputs: Collection[str]) -> Block:
    """A body with tangents.

    Args:
        kernel: its name, for errors.
        body: as it was read.
        wrt: the inputs that have tangents, ``<input>_tangent``.
        outputs: those whose tangents are stored, ``<output>_tangent``.

    Raises:
        DialectError: something has no derivative.
    """
    made, _ = pruned(_Forward(kernel, body, wrt, outputs).block(body))
    return made


class _Forward:
    def __init__(
        self, kernel: str, body: Block, wrt: Collection[str], outputs: Collection[str]
    ) -> None:
        self._kernel, self._outputs = kernel, frozenset(outputs)
        self._activity = Activity(body, wrt)
        self._made: list[Statement] = []
        self._count = 0
        self._line = 1

    def block(self, body: Block) -> Block:
        """Statements with their tangents."""
        outer, self._made = self._made, []
        for s in body:
            self._line = s.line
            self._statement(s)
        made, self._made = self._made, outer
        return tuple(made)

    # -- statements --------------------------------------------------------------------------------

    def _statement(self, s: Statement) -> None:
        if isinstance(s, Declare):
            self._declare(s)
        elif isinstance(s, DeclareArray):
            self._declare_array(s)
        elif isinstance(s, Assign):
            self._assign(s)
        elif isinstance(s, AtomicAdd):
            _, tangent = self._follow(s.value)
            self._made.append(replace(s, place=_twin_element(s.place), value=tangent or ZERO))
        elif isinstance(s, If):
            yes, no = self.block(s.yes), self.block(s.no)
            self._made.append(replace(s, yes=yes, no=no))
        elif isinstance(s, Loop):
            self._loop(s)
        else:
            self._made.append(s)

    def _declare(self, s: Declare) -> None:
        if s.variable.name not in self._activity.names or not s.variable.type.floating:
            self._made.append(s)
            return
        twin = _twin(s.variable)
        if s.value is None:
            self._made += [s, replace(s, variable=twin)]
            return
        value, tangent = self._follow(s.value)
        self._made.append(replace(s, variable=twin, value=tangent or ZERO, deduced=False))
        self._made.append(replace(s, value=value))

    def _declare_array(self, s: DeclareArray) -> None:
        self._made.append(s)
        if s.array.name in self._activity.names:
            values = s.values and tuple(self._follow(v)[1] or ZERO for v in s.values)
            self._made.append(replace(s, array=_twin_array(s.array), values=values))

    def _assign(self, s: Assign) -> None:
        place, name = s.place, name_of(s.place)
        output = name in self._outputs or _is_output(place)
        if not place.type.floating or not (output or name in self._activity.names):
            if not output:
                self._made.append(s)
            return
        if s.operator in ("=", "+=", "-="):
            value, tangent = self._follow(s.value)
            if tangent is None and s.operator == "=":
                tangent = ZERO
        else:
            whole = Binary(s.operator[:-1], place, s.value, place.type)
            value, tangent = self._follow(whole)
            s = replace(s, operator="=")
        if tangent is not None:
            self._made.append(replace(s, place=_twin_of(place), value=tangent))
        if not output:
            self._made.append(replace(s, value=value))

    def _loop(self, s: Loop) -> None:
        start = self.block(s.start)
        if start != s.start:  # a counter that has a tangent
            self._made += start
            start = ()
        update = self.block(s.update)
        if update != s.update:
            raise self._refused("a loop whose counter has a derivative", "count in integers.")
        self._made.append(replace(s, start=start, body=self.block(s.body)))

    # -- expressions -------------------------------------------------------------------------------

    def _follow(self, e: Expression) -> tuple[Expression, Tangent]:
        """A value, and its tangent; None where that is zero."""
        if not self._activity.of(e):
            return e, None
        if isinstance(e, Name):
            return e, _twin(e)
        if isinstance(e, Element):
            e = replace(e, indices=tuple(map(self._index, e.indices)))
            return e, _twin_element(e)
        if isinstance(e, Lanes):
            value, tangent = self._follow(e.of)
            return replace(e, of=value), tangent and replace(e, of=tangent)
        if isinstance(e, Unary):
            value, tangent = self._follow(e.operand)
            return replace(e, operand=value), tangent and neg(tangent)
        if isinstance(e, Choice):
            return self._choice(e)
        if isinstance(e, Binary):
            values, tangents = self._operands((e.left, e.right), e.operator in "*/")
            value = replace(e, left=values[0], right=values[1])
            return self._by_table(e.operator, values, tangents, value)
        if isinstance(e, Call):
            return self._call(e)
        raise TypeError(e)

    def _index(self, e: Expression) -> Expression:
        """An index, which is used twice."""
        return e if is_short(e) else self._bound(e, "fr_index")

    def _bound(self, e: Expression, name: str = "fr_value") -> Expression:
        """An expression as a variable of its own, evaluated here."""
        if isinstance(e, (Name, Literal)):
            return e
        self._count += 1
        variable = Name(f"{name}_{self._count}", e.type)
        self._made.append(Declare(self._line, variable, e, constant=True, deduced=True))
        return variable

    def _operands(
        self, operands: tuple[Expression, ...], named: bool
    ) -> tuple[list[Expression], list[Tangent]]:
        values: list[Expression] = []
        tangents: list[Tangent] = []
        for operand in operands:
            value, tangent = self._follow(operand)
            values.append(self._bound(value) if named else value)
            tangents.append(tangent)
        return values, tangents

    def _by_table(
        self, name: str, values: list[Expression], tangents: list[Tangent], value: Expression
    ) -> tuple[Expression, Tangent]:
        partials = PARTIALS.get(name)
        if partials is None:
            raise self._refused(f"{name}", "write it with functions that have one.")
        if name in ("+", "-"):
            a, b = tangents
            if a is None or b is None:
                return value, a if b is None else neg(b) if name == "-" else b
            return value, Binary(name, a, b, value.type)
        result = value if name == "*" else self._bound(value)
        total: Tangent = None
        for partial, tangent in zip(partials(values, result), tangents, strict=True):
            if tangent is not None and partial is not None:
                term = self._term(partial, tangent)
                total = term if total is None else add(total, term)
        return result, total

    @staticmethod
    def _term(partial: Factor, tangent: Expression) -> Expression:
        if isinstance(partial, tuple):
            condition, factor = partial
            inner = tangent if factor == ONE else mul(factor, tangent)
            return chosen(condition, inner, ZERO, inner.type)
        return tangent if partial == ONE else mul(partial, tangent)

    def _choice(self, e: Choice) -> tuple[Expression, Tangent]:
        condition = self._bound(e.condition, "fr_holds")
        parts: list[tuple[Block, Expression, Tangent]] = []
        for branch in (e.yes, e.no):
            outer, self._made = self._made, []
            value, tangent = self._follow(branch)
            parts.append((tuple(self._made), value, tangent))
            self._made = outer
        (before, yes, yes_t), (before_no, no, no_t) = parts
        if not (before or before_no):
            tangent = Choice(condition, yes_t or ZERO, no_t or ZERO, e.type)
            return Choice(condition, yes, no, e.type), tangent
        self._count += 1
        result = Name(f"fr_value_{self._count}", e.type)
        twin = _twin(result)
        self._made += [Declare(self._line, v, None) for v in (result, twin)]
        branches = (
            (*more, Assign(self._line, twin, "=", t or ZERO), Assign(self._line, result, "=", v))
            for more, v, t in parts
        )
        self._made.append(If(self._line, condition, *branches))
        return result, twin

    def _call(self, e: Call) -> tuple[Expression, Tangent]:
        name = base(e.name)
        if e.cast:
            value, tangent = self._follow(e.arguments[0])
            made = replace(e, arguments=(value,))
            return made, tangent and replace(e, arguments=(tangent,))
        if name == str(e.type) or name.startswith("vec<"):
            values, tangents = self._operands(e.arguments, False)
            others = tuple(t or zero_of(v.type) for v, t in zip(values, tangents, strict=True))
            return replace(e, arguments=tuple(values)), replace(e, arguments=others)
        if name in LINEAR:
            value, tangent = self._follow(e.arguments[0])
            rest = tuple(map(self._index, e.arguments[1:]))
            value = self._bound(replace(e, arguments=(value, *rest)))
            return value, self._bound(replace(e, arguments=(tangent or ZERO, *rest)), "fr_tangent")
        if name in FILLING:
            values, tangents = self._operands(e.arguments[:2], False)
            rest = tuple(map(self._index, e.arguments[2:]))
            value = self._bound(replace(e, arguments=(*values, *rest)))
            both = tuple(t or zero_of(v.type) for v, t in zip(values, tangents, strict=True))
            return value, self._bound(replace(e, arguments=(*both, *rest)), "fr_tangent")
        if name in EXTREMES:
            return self._extreme(e)
        if name == "select":
            values, tangents = self._operands(e.arguments[:2], False)
            condition = self._bound(e.arguments[2], "fr_holds")
            both = tuple(t or zero_of(v.type) for v, t in zip(values, tangents, strict=True))
            return (
                replace(e, arguments=(*values, condition)),
                replace(e, arguments=(*both, condition)),
            )
        if name in ("dot", "length", "normalize", "distance", "length_squared"):
            return self._of_vectors(e, name)
        values, tangents = self._operands(e.arguments, True)
        return self._by_table(name, values, tangents, replace(e, arguments=tuple(values)))

    def _extreme(self, e: Call) -> tuple[Expression, Tangent]:
        """``simd_max``: the tangents of the lanes that have it, evenly."""
        value, tangent = self._follow(e.arguments[0])
        value = self._bound(value)
        result = self._bound(replace(e, arguments=(value,)))
        has = Binary("==", value, result, BOOL)
        width = base(e.name).split("_")[0]
        mine = Choice(has, tangent or ZERO, ZERO, e.type)
        many = Choice(has, ONE, ZERO, e.type)
        total = self._bound(Call(f"{width}_sum", (mine,), e.type), "fr_tangent")
        count = self._bound(Call(f"{width}_sum", (many,), e.type), "fr_count")
        return result, div(total, count)

    def _of_vectors(self, e: Call, name: str) -> tuple[Expression, Tangent]:
        values, tangents = self._operands(e.arguments, True)
        if name == "dot":
            terms = [
                Call("dot", (other, t), e.type)
                for other, t in zip(values[::-1], tangents, strict=True)
                if t is not None
            ]
            return replace(e, arguments=tuple(values)), terms[0] if len(terms) == 1 else add(*terms)
        if name == "distance":
            a, b = values
            of = self._bound(Binary("-", a, b, a.type))
            ta, tb = (t or zero_of(v.type) for v, t in zip(values, tangents, strict=True))
            tangent: Expression = Binary("-", ta, tb, a.type)
        else:
            of, tangent = values[0], tangents[0] or zero_of(values[0].type)
        result = self._bound(replace(e, arguments=tuple(values)))
        along = Call("dot", (of, tangent), of.type.scalar)
        if name == "length_squared":
            return result, mul(Literal("2.0f", of.type.scalar), along)
        if name == "normalize":
            size = self._bound(Call("length", (of,), of.type.scalar))
            inner = Call("dot", (result, tangent), of.type.scalar)
            return result, div(Binary("-", tangent, mul(result, inner), of.type), size)
        return result, div(along, result)

    def _refused(self, what: str, instead: str) -> DialectError:
        return refusal(self._kernel, "source", self._line, what, instead)


def _is_output(place: Expression) -> bool:
    whole = root(place)
    return isinstance(whole, Element) and whole.array.written


def _twin(variable: Name) -> Name:
    return replace(variable, name=f"{variable.name}_tangent")


def _twin_array(array: Array) -> Array:
    return replace(array, name=f"{array.name}_tangent")


def _twin_of(place: Place) -> Place:
    """The tangent's place."""
    if isinstance(place, Name):
        return _twin(place)
    if isinstance(place, Element):
        return _twin_element(place)
    if isinstance(place.of, (Name, Element, Lanes)):
        return replace(place, of=_twin_of(place.of))
    raise TypeError(place)


def _twin_element(place: Element) -> Element:
    return replace(place, array=_twin_array(place.array))
