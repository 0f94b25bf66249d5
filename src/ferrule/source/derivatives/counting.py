"""How a loop counts: what grows by a constant, how many rounds there are, and at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .activity import name_of, statements
from .jumps import ENDS, leaves
from .liveness import assigned_in, elements_in
from .nodes import (
    BOOL,
    INT,
    Assign,
    Binary,
    Call,
    Choice,
    Declare,
    Expression,
    Literal,
    Loop,
    Name,
    constant,
    names_in,
)
from .partials import add, div, mul, sub

if TYPE_CHECKING:
    from .pulls import Pulls
    from .tapes import Tape

_BITS = {"int": 32, "uint": 32, "short": 16, "ushort": 16, "long": 64, "ulong": 64}
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ONE, _NONE = Literal("1", INT), Literal("0", INT)


class _End(NamedTuple):
    """``counter < end``, of an end that nothing changes."""

    counter: Name
    operator: str
    end: Expression


class Counting:
    """Looks at a loop, and keeps in front of it what its reverse may ask for.

    Attributes:
        name: the variable that it counts with, for messages; ``""`` of none.
        fixed: variables that only its update changes.
        computed: integers that grow by a constant in each round.
        count: how many rounds there are; None where that is counted.
        most: a number of rounds that it has at most; None of none that is known.
        header: the loop as its rounds may run in any order; None of one that has no such.
    """

    def __init__(self, pulls: Pulls, tape: Tape, loop: Loop) -> None:
        self._r, self._tape, self._loop = pulls, tape, loop
        self._changed = assigned_in((*loop.update, *loop.body))
        self._assigns: dict[str, list[Assign]] = {}
        for s in statements((*loop.update, *loop.body)):
            if isinstance(s, Assign):
                self._assigns.setdefault(name_of(s.place), []).append(s)
        in_body = assigned_in(loop.body)
        places = [s.place for s in loop.update if isinstance(s, Assign)]
        counters = [p for p in places if isinstance(p, Name) and not p.type.floating]
        if len(counters) < len(places):
            raise pulls.refused("a loop whose counter has a derivative", "count in integers.")
        self.fixed = {c.name for c in counters} - in_body
        self._starts = {d.variable.name: d for d in loop.start if isinstance(d, Declare)}
        self._first: dict[str, Expression] = {}
        self._step: dict[str, tuple[str, Expression]] = {}
        self.computed: list[Name] = []
        for place in dict.fromkeys(
            s.place for each in self._assigns.values() for s in each if isinstance(s.place, Name)
        ):
            self._look_at(place)
        named = [
            *(c.name for c in counters),
            *self._conditioned(),
            *(v.name for v in self.computed),
        ]
        self.name = named[0] if named else ""
        breaks = leaves(loop.body, {"break"})
        self._end = None if breaks or loop.kind == "do" else self._settled(loop.condition)
        self.count = self._closed()
        self.most = self._most()
        self.header = self._header()

    # -- variables ---------------------------------------------------------------------------------

    def _look_at(self, v: Name) -> None:
        """Whether a variable grows by a constant."""
        assigns = self._assigns[v.name]
        outer = (*self._loop.update, *self._loop.body)
        skips = leaves(self._loop.body, {"continue"}) and v.name not in self.fixed
        if (
            v.type.floating
            or v.type == BOOL
            or len(assigns) != 1
            or skips
            or not any(s is assigns[0] for s in outer)
            or assigns[0].operator not in ("+=", "-=")
            or not self._outlasts(assigns[0].value)
            or self._is_inside(v)
        ):
            return
        start = self._starts.get(v.name)
        value = self._r.now.get(v.name) if start is None else start.value
        if value is not None:
            self._first[v.name] = self._r.kept(value, f"{v.name}_first")
        else:
            self._first[v.name] = self._r.named(v, self._r.fresh(f"{v.name}_first"))
        self._step[v.name] = assigns[0].operator, self._r.kept(assigns[0].value, f"{v.name}_step")
        self.computed.append(v)

    def _is_inside(self, v: Name) -> bool:
        return any(
            isinstance(s, Declare) and s.variable.name == v.name
            for s in statements(self._loop.body)
        )

    def _outlasts(self, e: Expression) -> bool:
        """Whether no round changes a value."""
        return self._changed.isdisjoint(names_in(e)) and not any(
            x.array.space not in ("device", "constant") or x.array.written for x in elements_in(e)
        )

    def value(self, v: Name, k: Name) -> Expression:
        """A variable at the start of round ``k``."""
        operator, step = self._step[v.name]
        round_: Expression = k if v.type == INT else Call(str(v.type), (k,), v.type, cast=True)
        by = round_ if step == _ONE else mul(round_, step)
        first = self._first[v.name]
        return add(first, by) if operator == "+=" else sub(first, by)

    def tells(self, index: Expression) -> bool:
        """Whether an index differs in all rounds."""
        if isinstance(index, Name):
            return index.name in self.fixed and index.name in self._step and self._moves(index)
        if isinstance(index, Binary) and index.operator in "+-":
            sides = [self._changed.isdisjoint(names_in(e)) for e in (index.left, index.right)]
            if sides == [False, True]:
                return self.tells(index.left)
            return sides == [True, False] and self.tells(index.right)
        if isinstance(index, Binary) and index.operator == "*":
            return bool(constant(index.right)) and self.tells(index.left)
        return False

    def _moves(self, v: Name) -> bool:
        return bool(constant(self._step[v.name][1]))

    # -- rounds ------------------------------------------------------------------------------------

    def _conditioned(self) -> list[str]:
        """The computed variables that the condition names."""
        condition = self._loop.condition
        named = () if condition is None else tuple(names_in(condition))
        return [v.name for v in self.computed if v.name in named]

    def _settled(self, condition: Expression | None) -> _End | None:
        """``counter < end``, where nothing changes the end."""
        if not isinstance(condition, Binary) or condition.operator not in _TURNED:
            return None
        left, right, operator = condition.left, condition.right, condition.operator
        if self._outlasts(left):
            left, right, operator = right, left, _TURNED[operator]
        if not isinstance(left, Name) or left.name not in self._step or not self._outlasts(right):
            return None
        self.name = left.name
        end = self._r.kept(right, f"{left.name}_end")
        return _End(left, operator, end)

    def _closed(self) -> Expression | None:
        """How many rounds there are, of a loop that counts up to an end."""
        if self._end is None or self._end.operator not in ("<", "<="):
            return None
        counter, compare, end = self._end
        if counter.name not in self.fixed:
            return None
        operator, step = self._step[counter.name]
        if operator != "+=":
            return None
        first = self._first[counter.name]
        distance = sub(end, first)
        if compare == "<=":
            count = add(div(distance, step), _ONE)
        elif step == _ONE:
            count = distance
        else:
            count = div(sub(add(distance, step), _ONE), step)
        holds = Binary(compare, first, end, BOOL)
        whole = Choice(holds, Call("int", (count,), INT, cast=True), _NONE, INT)
        return self._r.kept(whole, "fr_rounds")

    def round(self) -> Expression | None:
        """How many rounds are behind, of the counter; None where that is counted."""
        if self.count is None or self._end is None:
            return None
        counter = self._end.counter
        step = self._literal(self._step[counter.name][1])
        if not step:
            return None
        first = self._first[counter.name]
        behind = counter if constant(first) == 0 else sub(counter, first)
        if step != 1:
            behind = div(behind, Literal(str(step), INT))
        return behind if behind.type == INT else Call("int", (behind,), INT, cast=True)

    def _most(self) -> int | None:
        """A number of rounds that is never exceeded."""
        if self.is_told:
            return constant(self._tape.trips[self.name])
        for place, assigns in self._assigns.items():
            (s, *more) = assigns
            by = constant(s.value)
            halves = (s.operator == ">>=" and (by or 0) >= 1) or (
                s.operator == "/=" and (by or 0) >= 2
            )
            condition = self._loop.condition
            stops = condition is not None and _ends_at_zero(condition, place)
            if halves and stops and not more and any(s is u for u in self._loop.update):
                return _BITS.get(s.place.type.name)
        if self._end is None:
            return None
        name, compare = self._end.counter.name, self._end.operator
        parts = (self._first[name], self._end.end, self._step[name][1])
        first, end, step = map(self._literal, parts)
        if first is None or end is None or not step:
            return None
        ends = {"<": (end, 1), "<=": (end + 1, 1), ">": (end, -1), ">=": (end - 1, -1)}
        stop, sign = ends[compare]
        return len(range(first, stop, sign * abs(step)))

    @property
    def is_told(self) -> bool:
        """Whether its user has said how many rounds there are at most."""
        return self.name in self._tape.trips

    def _literal(self, e: Expression) -> int | None:
        """An integer that the text says."""
        found = self._tape.size(e)
        return None if found is None else constant(found)

    def bound(self) -> Expression:
        """A number of rounds that is never exceeded, of sizes that are known before the call.

        Raises:
            DialectError: there is none; asks for one.
        """
        if self.is_told:
            return self._tape.trips[self.name]
        if self.most is not None:
            return Literal(str(self.most), INT)
        made = self._bounded()
        if made is None:
            name = self.name or "counter"
            raise self._r.refused(
                "a loop whose number of rounds has no bound that the rule's sizes give,",
                f'say how many there are at most: trips={{"{name}": "…"}}.'
                if self.name
                else "count its rounds with a variable.",
            )
        return made

    def _bounded(self) -> Expression | None:
        if self._end is None:
            return None
        counter, compare, stop = self._end
        operator, step = self._step[counter.name]
        start, size = self._first[counter.name], self._tape.size
        first = self._tape.least(start) if operator == "+=" else size(start)
        end, by = size(stop), size(step)
        up = operator == "+="
        if compare not in (("<", "<=") if up else (">", ">=")):
            return None
        if first is None or end is None:
            return None
        low, high = (first, end) if up else (end, first)
        distance = high if low == _NONE else sub(high, low)
        if compare in ("<=", ">="):
            distance = add(distance, _ONE)
        if by is not None and by != _ONE:
            distance = div(sub(add(distance, by), _ONE), by)
        if isinstance(distance, (Name, Literal)):
            return distance
        return Call("max", (_NONE, distance), INT)

    def _header(self) -> Loop | None:
        """The loop as the author has written it, of values that are kept."""
        loop = self._loop
        if self._end is None or loop.kind != "for" or len(loop.update) != 1:
            return None
        counter, compare, end = self._end
        if counter.name not in self.fixed:
            return None
        if counter.name not in self._starts or leaves(loop.body, ENDS):
            return None
        operator, step = self._step[counter.name]
        start = Declare(loop.line, counter, self._first[counter.name])
        update = Assign(loop.line, counter, operator, step)
        holds = Binary(compare, counter, end, BOOL)
        return Loop(loop.line, "for", (start,), holds, (update,), ())


def _ends_at_zero(condition: Expression, name: str) -> bool:
    """Whether a loop ends where a variable is 0."""
    if not isinstance(condition, Binary):
        return False
    left, right, operator = condition.left, condition.right, condition.operator
    if operator == "&&":
        return _ends_at_zero(left, name) or _ends_at_zero(right, name)
    if isinstance(right, Name) and operator in _TURNED:
        left, right, operator = right, left, _TURNED[operator]
    least = constant(right)
    if not isinstance(left, Name) or left.name != name or least is None:
        return False
    return (operator == ">" and least >= 0) or (operator == ">=" and least >= 1) or (
        operator == "!=" and least == 0
    )  # fmt: skip
