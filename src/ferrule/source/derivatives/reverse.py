"""Reverse mode: a body that computes the gradients of its inputs from cotangents of its outputs.

The body, and each round of a loop, is a frame: its statements forward, with a name for every value
that is read again, then what reverses each, the last one first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .activity import Activity, name_of, statements
from .frames import Branches, Forward, Statements, Undo, flattened, undone
from .jumps import RETURNS, leaves, straightened
from .liveness import assigned_in, pruned, used_in
from .nodes import (
    ADD,
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
    Jump,
    Lanes,
    Literal,
    Loop,
    Name,
    Statement,
    Type,
    branch,
    is_device,
    root,
)
from .owners import Doubt, Owners
from .partials import ZERO, neg, zero_of
from .places import Places
from .pulls import Pull
from .rounds import Rounds, extreme_of
from .shared import adding, barrier, cleared, with_barriers
from .tapes import Tape
from .uniform import Uniform

Place = Name | Element | Lanes


@dataclass
class Derived:
    """What reverse mode makes.

    Attributes:
        body: the statements.
        stores: by input, how its gradient is added, and why.
        tape: what is kept in device memory.
        header: the functions that the statements call.
    """

    body: Block
    stores: dict[str, str]
    tape: Tape
    header: str


@dataclass(frozen=True)
class Wanted:
    """What is derived.

    Attributes:
        kernel: the kernel's name, for errors.
        gradients: by input that is differentiated, the array of its gradient.
        cotangents: by output, the array of its cotangent.
        scalars: the inputs without dims among those that are differentiated.
        real: the type of adjoints.
        grid, threadgroup: the sizes of the launch, as far as they are known, in nodes.
        sizes: the integers that are known before the call, by name, as the rule calls them.
        dims: those that are 1 or more.
        trips: by variable that counts, the most rounds of its loop.
    """

    kernel: str
    gradients: Mapping[str, Array]
    cotangents: Mapping[str, Array]
    scalars: Mapping[str, Name]
    real: Type
    grid: Sequence[Expression | None] = (None, None, None)
    threadgroup: Sequence[Expression | None] = (None, None, None)
    sizes: Mapping[str, Expression] = field(default_factory=dict)
    dims: Sequence[str] = ()
    trips: Mapping[str, Expression] = field(default_factory=dict)


def reverse(body: Block, wanted: Wanted) -> Derived:
    """A body's gradients.

    Raises:
        DialectError: something has no derivative; says the line, and what to write.
    """
    return _Reverse(body, wanted).derived()


class _Reverse(Rounds):
    def __init__(self, body: Block, wanted: Wanted) -> None:
        body = _spelled(body)
        changed = assigned_in(body)
        names = {a.name for a in (*wanted.gradients.values(), *wanted.cotangents.values())}
        super().__init__(wanted.real, used_in(body) | names | {"fr_tape"}, changed)
        self.kernel, self._wanted, self.body = wanted.kernel, wanted, body
        self.activity = Activity(body, wanted.gradients)
        one = Literal("1", INT)
        self.tape = Tape(
            self, wanted.trips, wanted.sizes, all(size == one for size in wanted.grid[1:])
        )
        self.uniform = Uniform(body, wanted.threadgroup)
        self.variables = _variables(body)
        self.values |= {
            s.variable.name: s.value
            for s in statements(body)
            if isinstance(s, Declare) and s.value is not None and s.variable.name not in changed
        }
        self.extremes, self.alike = {}, True
        self._widths: set[int] = set()
        self._stores: dict[str, str] = {}
        places = Places(
            body, wanted.grid, wanted.threadgroup, wanted.sizes, wanted.dims, self.activity.of
        )
        self._owners = {
            name: Owners(places.of(name), places.launch)
            for name in (*wanted.gradients, *wanted.cotangents)
        }
        for name in wanted.cotangents:
            self._check_stores(name)
        for name, array in self.variables.items():
            shared = isinstance(array, Array) and array.space == "threadgroup"
            if shared and name in self.activity.names:
                self._check_shared(name, Owners(places.of(name), places.launch).several())

    def derived(self) -> Derived:
        """All of it."""
        body = self._without_returns(self.body)
        frame = self.frame
        self.run(body)
        reverse = undone(frame.undos)
        for name, variable in self._wanted.scalars.items():
            if name in frame.adjoints:
                place = Element(self._wanted.gradients[name], (Literal("0", INT),), self.real)
                reverse += self._atomic(place, self.adjoint(variable), True)
                self._stores[name] = "atomic, because all threads read it"
        adjoints = list(frame.adjoints.values())
        shared = [s for s in adjoints if isinstance(s, DeclareArray) and s.array.space != "thread"]
        own = [s for s in adjoints if s not in shared]
        first: Statements = []
        if shared:
            for s in shared:
                first += [s, *cleared(self, s.array)]
            own.insert(0, barrier(self.line))
        made = (*first, *frame.hoisted, *flattened(frame.forward), *own, *reverse)
        made, _ = pruned(made)
        header = adding(self.real, self._widths) if self._widths else ""
        return Derived((*self.tape.start(made), *made), self._stores, self.tape, header)

    def _without_returns(self, body: Block) -> Block:
        """The body, whose early returns are branches: but for those in front of everything."""
        first: list[Statement] = []
        for i, s in enumerate(body):
            if leaves((s,)) and not (isinstance(s, If) and self._is_guard(s)):
                return (*first, *straightened(body[i:], RETURNS, self.refuse_at))
            if self._acts((s,)):
                rest = body[i:]
                if leaves(rest):
                    rest = straightened(rest, RETURNS, self.refuse_at)
                return (*first, *rest)
            first.append(s)
        return tuple(first)

    @staticmethod
    def _is_guard(s: If) -> bool:
        return not s.no and all(isinstance(inner, Jump) for inner in s.yes)

    def _acts(self, body: Block) -> bool:
        """Whether anything is reversed of statements."""
        for s in statements(body):
            place = getattr(s, "place", None) or getattr(s, "variable", None)
            if isinstance(s, DeclareArray) and s.array.name in self.activity.names:
                return True
            if place is not None and name_of(place) in (
                self.activity.names | self._wanted.cotangents.keys()
            ):
                return True
        return False

    # -- arrays ------------------------------------------------------------------------------------

    def _check_shared(self, array: str, why: Doubt | None) -> None:
        """Refuse a threadgroup array of which an adjoint would be taken several times."""
        if why is not None:
            raise self.refuse_at(
                why.line,
                f"the threadgroup array {array}, to which several threads may store ({why}),",
                "let one thread store each.",
            )

    def _check_stores(self, output: str) -> None:
        """Refuse an output of which a cotangent would be counted several times."""
        why = self._owners[output].stored_once()
        if why is not None:
            raise self.refuse_at(
                why.line,
                f"output {output}, which several threads or rounds may store to ({why}),",
                "store each once, at an index of the thread's position and the rule's sizes.",
            )

    def is_uniform(self, e: Expression) -> bool:
        """Whether a value is the same for all lanes of a simdgroup."""
        return self.uniform.of(e)

    def meets_at(self, e: Element) -> bool:
        """Whether all lanes of a simdgroup are here at once, and read one element."""
        return self.alike and all(map(self.uniform.of, e.indices))

    def add_gradient(self, place: Element, cotangent: Expression, together: bool) -> Statements:
        """Add to the gradient of an element of an input."""
        name = place.array.name
        if name not in self._wanted.gradients:
            return []
        array = self._wanted.gradients[name]
        gradient = Element(array, place.indices, array.element)
        owners = self._owners[name]
        why = owners.shared()
        if why is None:
            self._stores[name] = "plain stores, because each element is read by one thread"
            once = owners.single()
            return [Assign(self.line, gradient, "=" if once else "+=", cotangent)]
        self._stores[name] = f"atomic, because {why}"
        return self._atomic(gradient, cotangent, together)

    def _atomic(self, gradient: Element, cotangent: Expression, together: bool) -> Statements:
        """What is nothing is not added: its index may lie outside."""
        out: Statements = []
        c = self.shared(cotangent, out)
        if together:
            c = self.shared(Call("simd_sum", (c,), c.type), out)
        holds = Binary("!=", c, ZERO, BOOL)
        if together:
            holds = Binary("&&", Call("simd_is_first", (), BOOL), holds, BOOL)
        return [*out, If(self.line, holds, (AtomicAdd(self.line, gradient, c, cast=True),))]

    def add_shared(self, place: Element, cotangent: Expression) -> Statements:
        """Add to the adjoint of an element of threadgroup memory."""
        self._widths.add(place.type.lanes)
        return [AtomicAdd(self.line, place, cotangent, ADD)]

    # -- statements --------------------------------------------------------------------------------

    def _block(self, body: Block) -> None:
        """Statements, forward; what reverses them goes to the frame."""
        frame = self.frame
        behind: list[set[str]] = [set()]
        for s in reversed(body):
            behind.append(behind[-1] | assigned_in((s,)))
        for i, s in enumerate(body):
            frame.later.append(behind[len(body) - 1 - i])
            self.line = s.line
            self._statement(s)
            frame.later.pop()
            for name in assigned_in((s,)):
                self.now.pop(name, None)
            integer = isinstance(s, Declare) and not s.variable.type.floating
            if integer and isinstance(s, Declare) and s.value is not None and self.stays(s.value):
                self.now[s.variable.name] = s.value

    def run(self, body: Block) -> None:
        """Statements of the present frame."""
        before = len(self.frame.undos)
        self._block(body)
        if not self.frame.depth:
            self.frame.undos[before:] = with_barriers(body, self.frame.undos[before:])

    def undone_by(self, undo: Undo) -> None:
        """Say what reverses the present statement."""
        line = self.line

        def at_line() -> Statements:
            self.line = line
            return undo()

        self.frame.undos.append(at_line)

    def _statement(self, s: Statement) -> None:
        if isinstance(s, Declare):
            self._declare(s)
        elif isinstance(s, DeclareArray):
            self._declare_array(s)
        elif isinstance(s, Assign):
            self._assign(s)
        elif isinstance(s, AtomicAdd):
            self._add(s)
        elif isinstance(s, If):
            self._if(s)
        elif isinstance(s, Loop):
            self.loop(s)
        elif isinstance(s, Effect):
            self.frame.forward.append(s)
            self.undone_by(lambda: [s])
        else:
            self.frame.forward.append(s)
            self.undone_by(list)

    def _declare(self, s: Declare) -> None:
        v = s.variable
        if s.value is None:
            self.declare(s)
            self.undone_by(list)
            return
        value, pull = self.follow(s.value)
        self.declare(replace(s, value=value))
        active = pull if v.type.floating else None
        self.undone_by(lambda: self._pulled(active, v) if v.name in self.touched else [])

    def _pulled(self, pull: Pull | None, place: Place) -> Statements:
        return pull(self._cotangent(place)) if pull else []

    def _cotangent(self, place: Place) -> Place:
        """The adjoint of a place."""
        if isinstance(place, Name):
            return self.adjoint(place)
        if isinstance(place, Element):
            return self.adjoint_of(place)
        if isinstance(place.of, (Name, Element, Lanes)):
            of = self._cotangent(place.of)
            return replace(place, of=of, type=self.wide_type(place.type))
        raise TypeError(place)

    def _declare_array(self, s: DeclareArray) -> None:
        self.declare_array(s)
        self.undone_by(list)

    def _add(self, s: AtomicAdd) -> None:
        value, pull = self.follow(s.value)
        place = self.place(s.place)
        if s.place.array.space != "device":
            self.frame.forward.append(replace(s, value=value, place=place))
        self.undone_by(lambda: self._from_output(pull, place))

    def _from_output(self, pull: Pull | None, place: Element, minus: bool = False) -> Statements:
        """What the cotangent of an element of an output, or of threadgroup memory, gives."""
        name, cotangents = place.array.name, self._wanted.cotangents
        if pull is None:
            return []
        if place.array.space != "device":
            return pull(self.adjoint_of(place)) if name in self.touched else []
        if name not in cotangents:
            return []
        array = cotangents[name]
        c = self.wide(Element(array, place.indices, array.element))
        return pull(neg(c) if minus else c)

    def _assign(self, s: Assign) -> None:
        place, name = s.place, name_of(s.place)
        inner = root(place)
        if isinstance(inner, Element) and is_device(inner):
            value, pull = self.follow(s.value)
            at = self.place(inner)
            self.undone_by(lambda: self._from_output(pull, at, s.operator == "-="))
            return
        if not place.type.floating or name not in self.activity.names:
            self.frame.forward.append(s)
            self.undone_by(list)
            return
        final = self.extremes.get(name)
        if final is not None:
            self._assign_extreme(s, final)
            return
        value, pull = self._value_of(s)
        place = self._stable(place)
        compound = s.operator in ("+=", "-=")
        operator = s.operator if compound else "="
        self.frame.forward.append(Assign(s.line, place, operator, value))
        if compound:
            self.undone_by(lambda: self._undo_sum(s.operator, pull, place))
        else:
            self.undone_by(lambda: self._undo_assign(pull, place))

    def _assign_extreme(self, s: Assign, final: Name) -> None:
        """``m = max(m, x[i])``, where it is known what m will be: the first that is that takes all
        of its cotangent."""
        other = extreme_of(s)
        if other is None:
            raise TypeError(s)
        value, pull = self.follow(other)
        value = self.kept(value)
        self.frame.forward.append(s)
        holds = Binary("==", value, final, BOOL)

        def undo() -> Statements:
            if name_of(s.place) not in self.touched:
                return []
            return [If(s.line, holds, tuple(self._undo_assign(pull, s.place)))]

        self.undone_by(undo)

    def _value_of(self, s: Assign) -> tuple[Expression, Pull | None]:
        if s.operator in ("=", "+=", "-="):
            return self.follow(s.value)
        return self.follow(Binary(s.operator[:-1], s.place, s.value, s.place.type))

    def _stable(self, place: Place) -> Place:
        if isinstance(place, Element):
            return self.place(place)
        if isinstance(place, Lanes) and isinstance(place.of, (Name, Element, Lanes)):
            return replace(place, of=self._stable(place.of))
        return place

    def _undo_sum(self, operator: str, pull: Pull | None, place: Place) -> Statements:
        if pull is None or name_of(place) not in self.touched:
            return []
        out: Statements = []
        c = self.fitted(self._cotangent(place), place.type, out)
        return out + pull(neg(c) if operator == "-=" else c)

    def _undo_assign(self, pull: Pull | None, place: Place) -> Statements:
        if name_of(place) not in self.touched:
            return []
        out: Statements = []
        adjoint = self._cotangent(place)
        taken = Name(self.fresh("fr_cotangent"), adjoint.type)
        if pull is not None:
            out.append(Declare(self.line, taken, adjoint, constant=True))
        out.append(Assign(self.line, adjoint, "=", zero_of(adjoint.type)))
        return out + (pull(taken) if pull else [])

    def _if(self, s: If) -> None:
        frame = self.frame
        holds = self.kept(s.condition, "fr_holds")
        branches: list[tuple[Forward, list[Undo]]] = []
        for part in (s.yes, s.no):
            outer = frame.forward, frame.undos
            frame.forward, frame.undos = [], []
            frame.depth += 1
            alike, self.alike = self.alike, self.alike and self.uniform.of(s.condition)
            self._block(part)
            self.alike = alike
            frame.depth -= 1
            branches.append((frame.forward, frame.undos))
            frame.forward, frame.undos = outer
        (yes, undo_yes), (no, undo_no) = branches
        frame.forward.append(Branches(s.line, holds, yes, no))

        def undo() -> Statements:
            parts = [tuple(undone(undos)) for undos in (undo_yes, undo_no)]
            return [branch(s.line, holds, *parts)] if any(parts) else []

        self.undone_by(undo)


def _spelled(body: Block) -> Block:
    """Statements in which arrays of floats get their first values by assignments."""
    out: list[Statement] = []
    for s in body:
        if isinstance(s, DeclareArray) and s.values and s.array.space == "thread":
            array = s.array
            if array.element.floating and not all(isinstance(v, Literal) for v in s.values):
                out.append(replace(s, values=()))
                for i, value in enumerate(s.values):
                    place = Element(array, (Literal(str(i), INT),), array.element)
                    out.append(Assign(s.line, place, "=", value))
                continue
        elif isinstance(s, If):
            s = replace(s, yes=_spelled(s.yes), no=_spelled(s.no))
        elif isinstance(s, Loop):
            s = replace(s, body=_spelled(s.body))
        out.append(s)
    return tuple(out)


def _variables(body: Block) -> dict[str, Name | Array]:
    """What a body declares, by name."""
    found: dict[str, Name | Array] = {}
    for s in statements(body):
        if isinstance(s, Declare):
            found[s.variable.name] = s.variable
        elif isinstance(s, DeclareArray):
            found[s.array.name] = s.array
    return found
