"""Expressions in reverse: where the cotangent of a value goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import DialectError
from .activity import Activity, base
from .frames import Frames, Statements, flattened
from .lanes import WIDTHS, Transposed
from .names import refusal
from .nodes import (
    BOOL,
    LETTERS,
    Assign,
    Binary,
    Block,
    Call,
    Choice,
    Declare,
    Element,
    Expression,
    If,
    Lanes,
    Name,
    Type,
    Unary,
    branch,
    is_short,
    names_in,
    operands,
    substituted,
)
from .partials import (
    EXTREMES,
    FILLING,
    ONE,
    PARTIALS,
    ZERO,
    Factor,
    chosen,
    div,
    mul,
    neg,
    number,
    zero_of,
)

Pull = Callable[[Expression], Statements]
Followed = tuple[Expression, Pull | None]


class Pulls(Frames):
    """Follows expressions: their value, and what takes its cotangent to what it is made of.

    Attributes:
        kernel: the kernel's name, for errors.
        activity: what has a derivative.
    """

    kernel: str
    activity: Activity

    def add_gradient(self, place: Element, cotangent: Expression, together: bool) -> Statements:
        """Add to the gradient of an element of an input.

        Args:
            together: all lanes of a simdgroup do so at once, for one element.
        """
        raise NotImplementedError

    def is_uniform(self, e: Expression) -> bool:
        """Whether a value is the same for all lanes of a simdgroup."""
        raise NotImplementedError

    def meets_at(self, e: Element) -> bool:
        """Whether all lanes of a simdgroup are here at once, and read one element."""
        raise NotImplementedError

    def add_shared(self, place: Element, cotangent: Expression) -> Statements:
        """Add to the adjoint of an element of threadgroup memory."""
        raise NotImplementedError

    def refused(self, what: str, instead: str) -> DialectError:
        """The error for something that has no derivative."""
        return refusal(self.kernel, "source", self.line, what, instead)

    def refuse_at(self, line: int, what: str, instead: str) -> DialectError:
        """The error for something on a line that has no derivative."""
        self.line = line
        return self.refused(what, instead)

    def follow(self, e: Expression) -> Followed:
        """A value, and what takes its cotangent on; None where it has no derivative."""
        if not self.activity.of(e):
            return e, None
        if isinstance(e, Name):
            return e, lambda c: [Assign(self.line, self.adjoint(e), "+=", c)]
        if isinstance(e, Element):
            return self._element(e)
        if isinstance(e, Lanes):
            return self._lanes(e)
        if isinstance(e, Unary):
            value, pull = self.follow(e.operand)
            return replace(e, operand=value), pull and (lambda c: pull(neg(c)))
        if isinstance(e, Choice):
            return self._choice(e.condition, e.yes, e.no, e.type)
        if isinstance(e, Binary):
            return self._by_table(
                e.operator, (e.left, e.right), lambda v: replace(e, left=v[0], right=v[1]), e.type
            )
        if isinstance(e, Call):
            return self._call(e)
        raise TypeError(e)

    # -- places ------------------------------------------------------------------------------------

    def place(self, e: Element) -> Element:
        """An element whose indices stay what they are."""
        return replace(e, indices=tuple(map(self.index, e.indices)))

    def index(self, e: Expression) -> Expression:
        """An index that is used again when this is reversed."""
        return e if self.stays(e) and is_short(e) else self.kept(e, "fr_index")

    def _element(self, e: Element) -> Followed:
        together = e.array.space == "device" and self.meets_at(e)
        e = self.place(e)
        return e, lambda c: self._into(e, c, together)

    def _into(self, e: Element, cotangent: Expression, together: bool) -> Statements:
        """Add to the adjoint of an element."""
        if e.array.space == "device":
            return self.add_gradient(e, cotangent, together)
        if e.array.space == "threadgroup":
            return self.add_shared(self.adjoint_of(e), cotangent)
        return [Assign(self.line, self.adjoint_of(e), "+=", cotangent)]

    def adjoint_of(self, e: Element) -> Element:
        """The adjoint of an element."""
        array = self.adjoint_array(e.array)
        return Element(array, e.indices, array.element)

    def _lanes(self, e: Lanes) -> Followed:
        value, pull = self.follow(e.of)
        whole = e.of.type

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            c = self.shared(c, out)
            parts = dict(zip(e.letters, _parts(c), strict=True))
            if len(parts) == len(e.letters) and isinstance(e.of, Name):
                place = Lanes(self.adjoint(e.of), e.letters, self.wide_type(e.type))
                return [*out, Assign(self.line, place, "+=", c)]
            total: dict[str, Expression] = {}
            for letter, part in zip(e.letters, _parts(c), strict=True):
                had = total.get(letter)
                total[letter] = part if had is None else Binary("+", had, part, part.type)
            wide = self.wide_type(whole)
            lanes = tuple(total.get(letter, ZERO) for letter in LETTERS[: whole.lanes])
            return out + (pull(Call(str(wide), lanes, wide)) if pull else [])

        return replace(e, of=value), pulled

    # -- choices -----------------------------------------------------------------------------------

    def _choice(
        self, condition: Expression, yes: Expression, no: Expression, kind: Type
    ) -> Followed:
        holds = self.kept(condition, "fr_holds")
        (before_yes, yes, pull_yes), (before_no, no, pull_no) = (
            self._inside(branch) for branch in (yes, no)
        )

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            c = self.shared(c, out)
            branches = (
                tuple(p(self.fitted(c, e.type, out))) if p else ()
                for p, e in ((pull_yes, yes), (pull_no, no))
            )
            return [*out, branch(self.line, holds, *branches)]

        if not (before_yes or before_no):
            return Choice(holds, yes, no, kind), pulled
        result = Name(self.fresh("fr_value"), kind)
        self.declare(Declare(self.line, result, None))
        ends = (
            (*before, Assign(self.line, result, "=", value))
            for before, value in ((before_yes, yes), (before_no, no))
        )
        self.frame.forward.append(If(self.line, holds, *ends))
        return result, pulled

    def _inside(self, e: Expression) -> tuple[Block, Expression, Pull | None]:
        """What is made in a branch, a value, and its pull."""
        frame = self.frame
        outer, frame.forward = frame.forward, []
        frame.depth += 1
        value, pull = self.follow(e)
        frame.depth -= 1
        made, frame.forward = flattened(frame.forward), outer
        return made, value, pull

    # -- the table ---------------------------------------------------------------------------------

    def _by_table(
        self,
        name: str,
        given_operands: Sequence[Expression],
        value_of: Callable[[list[Expression]], Expression],
        kind: Type,
    ) -> Followed:
        table = PARTIALS.get(name)
        if table is None:
            raise self.refused(name, "write it with functions that have one.")
        pairs = [self.follow(operand) for operand in given_operands]
        values = [value for value, _ in pairs]
        marks = [Name(f"?{i}", v.type) for i, v in enumerate(values)]
        result = Name("?", kind)
        found = table([self.wide(mark) for mark in marks], self.wide(result))
        partials = [p if pull else None for p, (_, pull) in zip(found, pairs, strict=True)]
        used = {n for p in partials for e in _expressions(p) for n in names_in(e)}
        values = [
            self.kept(v) if mark.name in used else v for v, mark in zip(values, marks, strict=True)
        ]
        value = value_of(values)
        if result.name in used:
            value = self.kept(value)
        given: dict[str, Expression] = dict(zip((m.name for m in marks), values, strict=True))
        given[result.name] = value
        active = [
            (_given(partial, given), pull, operand)
            for partial, (_, pull), operand in zip(partials, pairs, given_operands, strict=True)
            if pull is not None and partial is not None
        ]

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            if len(active) > 1:
                c = self.shared(c, out)
            for partial, pull, operand in active:
                out += self._weighted(partial, c, pull, operand)
            return out

        return value, pulled

    def _weighted(
        self, partial: Factor, c: Expression, pull: Pull, operand: Expression
    ) -> Statements:
        out: Statements = []
        if not isinstance(partial, tuple):
            return out + pull(self.fitted(_times(partial, c), operand.type, out))
        condition, factor = partial
        inner = _times(factor, c)
        if condition.type.lanes > 1 or meets(operand):
            inner = chosen(condition, inner, zero_of(inner.type), inner.type)
            cotangent = self.fitted(inner, operand.type, out)
            return out + pull(cotangent)
        cotangent = self.fitted(inner, operand.type, out)
        return [*out, If(self.line, condition, tuple(pull(cotangent)))]

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, e: Call) -> Followed:
        name = base(e.name)
        if e.cast:
            argument = e.arguments[0]
            value, pull = self.follow(argument)
            return replace(e, arguments=(value,)), pull and (
                lambda c: self._into_one(pull, c, argument.type)
            )
        if name == str(e.type) or name.startswith("vec<"):
            return self._vector(e)
        width, _, operation = name.partition("_")
        if width in WIDTHS and name not in EXTREMES:
            return self._among_lanes(e, width, operation)
        if name in EXTREMES:
            return self._extreme(e, width)
        if name == "select":
            no, yes, condition = e.arguments
            return self._selected(e, no, yes, self.kept(condition, "fr_holds"))
        if name in ("dot", "length", "normalize", "distance", "length_squared"):
            return self._of_vectors(e, name)
        return self._by_table(name, e.arguments, lambda v: replace(e, arguments=tuple(v)), e.type)

    def _into_one(self, pull: Pull, c: Expression, kind: Type) -> Statements:
        out: Statements = []
        cotangent = self.fitted(c, kind, out)
        return out + pull(cotangent)

    def _selected(self, e: Call, no: Expression, yes: Expression, holds: Expression) -> Followed:
        (value_no, pull_no), (value_yes, pull_yes) = self.follow(no), self.follow(yes)
        apart = holds.type.lanes == 1 and not (meets(no) or meets(yes))

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            c = self.shared(c, out)
            if apart:
                parts = (tuple(pull(c)) if pull else () for pull in (pull_yes, pull_no))
                return [*out, branch(self.line, holds, *parts)]
            zero = zero_of(c.type)
            for pull, pair in ((pull_no, (zero, c)), (pull_yes, (c, zero))):
                if pull:
                    out += pull(chosen(holds, *pair, c.type))
            return out

        return replace(e, arguments=(value_no, value_yes, holds)), pulled

    def _vector(self, e: Call) -> Followed:
        pairs = [self.follow(a) for a in e.arguments]

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            c = self.shared(c, out)
            parts = _parts(c)
            for argument, (_, pull) in zip(e.arguments, pairs, strict=True):
                lanes = argument.type.lanes
                mine = parts if len(pairs) == 1 and lanes == 1 else parts[:lanes]
                parts = parts[lanes:]
                if pull is None:
                    continue
                wide = self.wide_type(argument.type)
                if len(mine) > lanes:  # the same for all lanes
                    out += pull(self.fitted(c, argument.type, out))
                else:
                    out += pull(mine[0] if lanes == 1 else Call(str(wide), tuple(mine), wide))
            return out

        return replace(e, arguments=tuple(value for value, _ in pairs)), pulled

    # -- lanes of a simdgroup ----------------------------------------------------------------------

    def _among_lanes(self, e: Call, width: str, operation: str) -> Followed:
        if base(e.name) in FILLING:
            return self._filled(e, width, operation)
        value, pull = self.follow(e.arguments[0])
        if not Transposed.knows(operation):
            raise self.refused(e.name, "write it with simd_sum, shuffles and prefix sums.")
        alike = all(map(self.is_uniform, e.arguments[1:]))
        rest = tuple(map(self.index, e.arguments[1:]))

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            cotangent = Transposed(self, width, out).of(operation, rest, c, alike)
            return out + (pull(cotangent) if pull else [])

        return replace(e, arguments=(value, *rest)), pulled

    def _filled(self, e: Call, width: str, operation: str) -> Followed:
        """A shuffle where lanes that have no other get one of a second value, 32 lanes away."""
        (value, pull), (filling, pull_filling) = map(self.follow, e.arguments[:2])
        if len(e.arguments) > 3:
            raise self.refused(f"{e.name} of fewer lanes", "shuffle, and choose by the lane.")
        if not self.is_uniform(e.arguments[2]):
            raise self.refused(f"{e.name} by what lanes choose", "shuffle, and choose by the lane.")
        by = self.index(e.arguments[2])
        up = operation.endswith("up")

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            made = Transposed(self, width, out).of_filling(up, by, c)
            for one, cotangent in zip((pull, pull_filling), made, strict=True):
                if one:
                    out += one(cotangent)
            return out

        return replace(e, arguments=(value, filling, by)), pulled

    def _extreme(self, e: Call, width: str) -> Followed:
        """``simd_max``: to the lanes that have it, evenly."""
        value, pull = self.follow(e.arguments[0])
        value = self.kept(value)
        result = self.kept(replace(e, arguments=(value,)))

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            lanes = Transposed(self, width, out)
            has = Binary("==", value, result, BOOL)
            total = lanes.sum(c)
            many = lanes.sum(Choice(has, ONE, ZERO, self.real))
            mine = Choice(has, div(total, many), ZERO, self.real)
            return out + (pull(mine) if pull else [])

        return result, pulled

    # -- vectors -----------------------------------------------------------------------------------

    def _of_vectors(self, e: Call, name: str) -> Followed:
        pairs = [self.follow(a) for a in e.arguments]
        values = [self.kept(value) for value, _ in pairs]
        wide = [self.wide(v) for v in values]
        result = self.kept(replace(e, arguments=tuple(values)))
        r = self.wide(result)
        if name == "distance":
            of: Expression = Binary("-", wide[0], wide[1], wide[0].type)
        else:
            of = wide[0]

        def pulled(c: Expression) -> Statements:
            out: Statements = []
            c = self.shared(c, out)
            if name == "dot":
                cotangents = [mul(c, wide[1]), mul(c, wide[0])]
            elif name == "length_squared":
                cotangents = [mul(mul(number(2), c), of)]
            elif name == "normalize":
                size = Call("length", (of,), of.type.scalar)
                along = Call("dot", (r, c), of.type.scalar)
                cotangents = [div(Binary("-", c, mul(r, along), c.type), size)]
            else:  # length, and distance, which is that of a difference
                unit = self.shared(mul(div(c, r), of), out)
                cotangents = [unit, neg(unit)]
            for (_, pull), cotangent in zip(pairs, cotangents, strict=False):
                if pull:
                    out += pull(cotangent)
            return out

        return result, pulled


def meets(e: Expression) -> bool:
    """Whether lanes meet in an expression."""
    if isinstance(e, Call) and base(e.name).startswith(("simd_", "quad_")):
        return True
    return any(map(meets, operands(e)))


def _parts(c: Expression) -> list[Expression]:
    """The lanes of a value, one by one."""
    if c.type.lanes == 1:
        return [c]
    return [Lanes(c, letter, c.type.scalar) for letter in LETTERS[: c.type.lanes]]


def _times(factor: Expression, c: Expression) -> Expression:
    if factor == ONE:
        return c
    if factor == number(-1):
        return neg(c)
    if isinstance(factor, Binary) and factor.operator == "/" and factor.left == ONE:
        return div(c, factor.right)
    return mul(c, factor)


def _expressions(partial: Factor | None) -> tuple[Expression, ...]:
    if partial is None:
        return ()
    return partial if isinstance(partial, tuple) else (partial,)


def _given(partial: Factor, values: dict[str, Expression]) -> Factor:
    if isinstance(partial, tuple):
        return substituted(partial[0], values), substituted(partial[1], values)
    return substituted(partial, values)
