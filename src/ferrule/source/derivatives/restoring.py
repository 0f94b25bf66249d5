"""What a round of a loop begins with when it is reversed: computed, copied or kept on a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .activity import name_of, statements
from .arrays import numbered, size_of
from .counting import Counting
from .frames import Frame, Holder, Statements
from .liveness import elements_of, expressions_of
from .nodes import (
    BOOL,
    INT,
    Array,
    Assign,
    AtomicAdd,
    Binary,
    Block,
    Call,
    Declare,
    DeclareArray,
    Effect,
    Element,
    Expression,
    If,
    Lanes,
    Literal,
    Loop,
    Name,
    Statement,
    Type,
    constant,
    is_device,
)
from .partials import add, less, mul
from .pulls import Pulls, meets
from .tapes import IN_REGISTERS, Segment, Tape
from .threadgroup import rewritten
from .uniform import Uniform, rounds_agree

ONE, NONE = Literal("1", INT), Literal("0", INT)


@dataclass
class Pass:
    """A loop whose forward statements are made.

    Attributes:
        loop: as the author has written it.
        inner: the frame of a round.
        holder: where its forward statements go.
        counting: how it counts.
        depth: how many branches are around it.
        later: what is assigned behind it in the frame.
        changed: what it assigns.
        extremes: of its variables, as in `Rounds`.
    """

    loop: Loop
    inner: Frame
    holder: Holder
    counting: Counting
    depth: int
    later: set[str]
    changed: set[str]
    extremes: dict[str, Name]


class Reversing(Pulls):
    """What is known of a body while it is reversed.

    Attributes:
        tape: the device memory that keeps what loops need.
        uniform: what is the same for all lanes.
        variables: what the body declares, by name.
        body: all of it, as it was read.
        extremes: in a loop, variables that are the largest of what arrays hold, and a name for each
            behind the loop.
        alike: all lanes of a simdgroup make the present statement together.
    """

    tape: Tape
    uniform: Uniform
    variables: dict[str, Name | Array]
    body: Block
    extremes: dict[str, Name]
    alike: bool


class Restoring:
    """Makes the forward loop and the reversed one, of a round and what it reads from before it."""

    def __init__(self, rounds: Reversing, p: Pass, round_: Block, live: Iterable[str]) -> None:
        self._r, self._p, self._round = rounds, p, round_
        self._live = sorted(set(live) & rounds.variables.keys())
        self._first: Statements = []  # at the start of a reversed round
        self._saves: Statements = []  # at the start of a forward round
        self._before: Statements = []  # in front of the reversed loop
        self._k = Name(rounds.fresh("fr_k"), INT)
        self._count: Expression = p.counting.round() or Name(rounds.fresh("fr_rounds"), INT)
        self._taped: list[Name | Array] = []
        self._line = p.loop.line
        self._limit: Expression | None = None  # where its user has said it

    def made(self) -> Statements:
        """The reversed loop; the forward one goes to its place."""
        p = self._p
        for name in self._live:
            self._restore(self._r.variables[name])
        header = self._in_any_order()
        if header is not None:
            p.holder.inside.append(plain(p.loop))
            return [*self._before, replace(header, body=self._round)]
        parts = (e for s in statements(self._round) for e in expressions_of(s))
        if any(map(meets, parts)) and not rounds_agree(self._r.uniform, p.loop):
            raise self._r.refused(
                "a loop in which lanes meet, and whose rounds differ between lanes,",
                "let all lanes of a simdgroup make the same rounds.",
            )
        for variable in p.counting.computed:
            if variable.name in self._live:
                self._compute(variable)
        self._keep_on_tape()
        count = self._counted()
        if self._limit is not None:
            count = self._within(count, self._limit)
        last = Binary("-", count, ONE, INT)
        start = (Declare(self._line, self._k, last),)
        update = (Assign(self._line, self._k, "-=", ONE),)
        holds = Binary(">=", self._k, NONE, BOOL)
        body = (*self._first, *self._round)
        return [*self._before, Loop(self._line, "for", start, holds, update, body)]

    def _within(self, count: Expression, limit: Expression) -> Expression:
        """The rounds that are kept; more than were said to be give NaN."""
        nan = Name("NAN", self._r.real)
        lost: Statements = []
        for v in self._taped:
            if not _kind(v).floating or v.name not in self._r.touched:
                continue
            if isinstance(v, Name):
                lost.append(Assign(self._line, self._r.adjoint(v), "=", nan))
            else:
                lost += self._set_all(self._r.adjoint_array(v), lambda _: nan)
        self._before.append(If(self._line, less(limit, count), tuple(lost)))
        return Call("min", (count, limit), INT)

    # -- forward -----------------------------------------------------------------------------------

    def _forward(self, statements_: Statements) -> None:
        """Statements in front of the forward loop, where its frame can see what they declare."""
        frame, p = self._r.frame, self._p
        outer = frame.forward, frame.depth
        frame.forward, frame.depth = p.holder.inside, p.depth
        for s in statements_:
            if isinstance(s, Declare):
                self._r.declare(s)
            elif isinstance(s, DeclareArray):
                self._r.declare_array(s)
            else:
                frame.forward.append(s)
        frame.forward, frame.depth = outer

    def _counted(self) -> Expression:
        """How many rounds there were, and the forward loop."""
        p = self._p
        loop = plain(p.loop)
        told = p.counting.round() is not None
        if p.counting.count is not None and (told or not self._saves):
            p.holder.inside.append(replace(loop, body=(*self._saves, *loop.body)))
            return p.counting.count
        if not isinstance(self._count, Name):
            raise TypeError(self._count)
        self._forward([Declare(self._line, self._count, NONE)])
        saves = tuple(self._saves)
        if self._limit is not None:
            saves = (If(self._line, less(self._count, self._limit), saves),)
        more = (*saves, Assign(self._line, self._count, "+=", ONE))
        p.holder.inside.append(replace(loop, body=(*more, *loop.body)))
        return self._count

    # -- what a round begins with ------------------------------------------------------------------

    def _restore(self, variable: Name | Array) -> None:
        p, name = self._p, variable.name
        if isinstance(variable, Array) and variable.space == "threadgroup":
            anew = (
                rewritten(self._r.body, p.loop, name) if name in p.changed else name not in p.later
            )
            if not anew:
                raise self._r.refused(
                    f"a loop that needs what the threadgroup array {name} held before,",
                    "write all of it in each round, and let nothing else overwrite it.",
                )
            return
        if name in p.changed:
            if name not in {v.name for v in p.counting.computed}:
                self._carry(variable)
        elif name in p.later:
            self._copy(variable)

    def _carry(self, variable: Name | Array) -> None:
        """What the loop changes, round by round."""
        if isinstance(variable, Array) and self._by_element(variable):
            return
        self._taped.append(variable)

    def _copy(self, variable: Name | Array) -> None:
        """What only later statements change: as it was in front of the loop."""
        if isinstance(variable, Name):
            kept = Name(self._r.fresh(f"{variable.name}_before"), variable.type)
            self._forward([Declare(self._line, kept, variable, constant=True)])
            self._before.append(Assign(self._line, variable, "=", kept))
            return
        kept_array = self._copied(variable)
        self._before += self._set_all(variable, partial(numbered, kept_array))

    def _copied(self, array: Array) -> Array:
        kept = replace(array, name=self._r.fresh(f"{array.name}_before"))
        self._forward([DeclareArray(self._line, kept)])
        self._forward(self._set_all(kept, partial(numbered, array)))
        return kept

    def _by_element(self, array: Array) -> bool:
        """Whether each round has an element of its own, which then has what it had in front."""
        p = self._p
        places = set(elements_of(p.loop.body, array.name))
        if len(places) != 1:
            return False
        (place,) = places
        if len(place.indices) != 1 or not p.counting.tells(place.indices[0]):
            return False
        kept = self._copied(array)
        self._first.append(
            Assign(self._line, place, "=", Element(kept, place.indices, kept.element))
        )
        return True

    def _compute(self, variable: Name) -> None:
        """A variable that grows by a constant."""
        self._set(variable, self._p.counting.value(variable, self._k))

    def _set(self, variable: Name, value: Expression) -> None:
        """An integer at the start of a reversed round."""
        declared = {d.variable.name for d in self._p.loop.start if isinstance(d, Declare)}
        if variable.name in declared:
            self._first.insert(0, Declare(self._line, variable, value, constant=True))
        else:
            self._first.insert(0, Assign(self._line, variable, "=", value))

    # -- the tape ----------------------------------------------------------------------------------

    def _keep_on_tape(self) -> None:
        """Keep what rounds change, in registers where the loop is known to be short."""
        r, p = self._r, self._p
        floats = [v for v in self._taped if _kind(v).floating]
        integers = [v for v in self._taped if not _kind(v).floating]
        rounds = p.counting.most
        if self._taped and p.counting.is_told:
            self._limit = p.counting.bound()
        for v in integers:
            if rounds is None or rounds > IN_REGISTERS or isinstance(v, Array):
                raise r.refused(
                    f"a loop that changes {v.name} otherwise than by a constant,",
                    "add a constant to it in each round, or compute it of the counter.",
                )
            array = Array(r.fresh("fr_tape"), "thread", v.type, (Literal(str(rounds), INT),))
            self._forward([DeclareArray(self._line, array)])
            self._saves.append(Assign(self._line, numbered(array, self._count), "=", v))
            self._set(v, numbered(array, self._k))
        if not floats:
            return
        width: Expression = NONE
        begins: list[Expression] = []
        for v in floats:
            begins.append(width)
            width = add(width, _width(v))
        size = r.tape.size(width)
        numbers = None if size is None else constant(size)
        if rounds is not None and numbers is not None and rounds * numbers <= IN_REGISTERS:
            size = Literal(str(max(rounds * numbers, 1)), INT)
            array = Array(r.fresh("fr_tape"), "thread", r.real, (size,))
            self._forward([DeclareArray(self._line, array)])
            width = Literal(str(numbers), INT)
            self._tape_each(floats, begins, width, NONE, partial(numbered, array))
            return
        most = p.counting.bound()
        if size is None:
            raise r.refused("an array whose size the rule does not give", "declare it of sizes.")
        segment = Segment(self._line, p.counting.name, most, size, tuple(v.name for v in floats))
        begin = r.tape.reserve(segment)
        self._tape_each(floats, begins, width, begin, r.tape.place)

    def _tape_each(
        self,
        variables: Sequence[Name | Array],
        begins: Sequence[Expression],
        width: Expression,
        begin: Expression,
        place: Callable[[Expression], Element],
    ) -> None:
        r = self._r

        def row(round_: Expression, at: Expression, j: Expression | None) -> Element:
            number = add(add(begin, mul(round_, width)), at)
            return place(number if j is None else add(number, j))

        for v, at in zip(variables, begins, strict=True):
            if isinstance(v, Name):
                for lane in range(v.type.lanes):
                    letter = "xyzw"[lane]
                    here: Name | Lanes = v if v.type.lanes == 1 else Lanes(v, letter, v.type.scalar)
                    spot = None if v.type.lanes == 1 else Literal(str(lane), INT)
                    saved, read = row(self._count, at, spot), row(self._k, at, spot)
                    self._saves.append(Assign(self._line, saved, "=", r.wide(here)))
                    self._first.append(Assign(self._line, here, "=", _narrow(read, here.type)))
                continue
            if v.element.lanes > 1:
                raise r.refused(f"the array of vectors {v.name} that a loop changes",
                                "use an array of numbers.")  # fmt: skip
            self._tape_array(v, partial(row, self._count, at), partial(row, self._k, at))

    def _tape_array(
        self, v: Array, saved: Callable[[Name], Element], read: Callable[[Name], Element]
    ) -> None:
        """Keep an array's elements, and read them again."""
        self._saves += self._each(
            v, lambda j: [Assign(self._line, saved(j), "=", self._r.wide(numbered(v, j)))]
        )
        self._first += self._set_all(v, lambda j: _narrow(read(j), v.element))

    def _set_all(self, array: Array, value: Callable[[Name], Expression]) -> Statements:
        """Give each element of an array a value, by its number."""
        return self._each(array, lambda j: [Assign(self._line, numbered(array, j), "=", value(j))])

    def _each(self, array: Array, body: Callable[[Name], Statements]) -> Statements:
        """Statements for each element of an array."""
        j = Name(self._r.fresh("fr_j"), INT)
        size = size_of(array)
        start, update = (Declare(self._line, j, NONE),), (Assign(self._line, j, "+=", ONE),)
        return [Loop(self._line, "for", start, less(j, size), update, tuple(body(j)))]

    # -- orders ------------------------------------------------------------------------------------

    def _in_any_order(self) -> Loop | None:
        """The author's loop, if its rounds may be reversed in its order."""
        p = self._p
        header = p.counting.header
        if header is None or self._taped or self._first:
            return None
        others = {v.name for v in p.counting.computed} - p.counting.fixed
        if others & set(self._live):
            return None
        taken = {self._r.adjoint(Name(v, final.type)).name for v, final in p.extremes.items()}
        declared = {
            name_of_declared(d)
            for d in statements(self._round)
            if isinstance(d, (Declare, DeclareArray))
        }
        for s in statements(self._round):
            if isinstance(s, Effect):
                return None
            if isinstance(s, (Assign, AtomicAdd)):
                adds = isinstance(s, Assign) and s.operator in ("+=", "-=")
                if not (is_device(s.place) or adds or name_of(s.place) in declared | taken):
                    return None
        return header


def plain(s: Loop) -> Loop:
    """A loop without what it stores to outputs."""
    return replace(s, body=_without_stores(s.body))


def _without_stores(body: Block) -> Block:
    out: list[Statement] = []
    for s in body:
        if isinstance(s, (Assign, AtomicAdd)):
            if is_device(s.place):
                continue
        elif isinstance(s, If):
            s = replace(s, yes=_without_stores(s.yes), no=_without_stores(s.no))
        elif isinstance(s, Loop):
            s = plain(s)
        out.append(s)
    return tuple(out)


def name_of_declared(s: Statement) -> str:
    """The variable or array that a statement declares; nothing of others."""
    if isinstance(s, Declare):
        return s.variable.name
    return s.array.name if isinstance(s, DeclareArray) else ""


def _kind(v: Name | Array) -> Type:
    return v.type if isinstance(v, Name) else v.element


def _width(v: Name | Array) -> Expression:
    return Literal(str(v.type.lanes), INT) if isinstance(v, Name) else size_of(v)


def _narrow(e: Expression, kind: Type) -> Expression:
    return e if e.type == kind else Call(str(kind), (e,), kind, cast=True)
