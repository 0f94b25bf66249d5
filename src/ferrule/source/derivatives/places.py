"""Where a body accesses arrays of the device: indices as polynomials of sizes, threads and rounds.

That integers of 32 bits and more overflow is left out of account, but where a factor is there to
make them: an index that does is outside of any array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .activity import name_of, statements
from .jumps import always_leaves, leaves
from .liveness import assigned_in, elements_in, expressions_of
from .nodes import (
    Assign,
    AtomicAdd,
    Binary,
    Block,
    Call,
    Declare,
    Element,
    Expression,
    If,
    Lanes,
    Literal,
    Loop,
    Name,
    Statement,
    Type,
    Unary,
    constant,
    names_in,
)
from .polynomials import Atom, Polynomial, atom, number

AXES = "xyz"
_NARROW = frozenset({"bool", "char", "uchar", "short", "ushort"})
_MOST = 1 << 16  # larger factors are there to overflow


class Thread(NamedTuple):
    """A position of the thread: ``"grid"``, ``"group"`` or ``"thread"`` (in its group)."""

    what: str
    axis: str


class Round(NamedTuple):
    """How many rounds of a loop are behind."""

    loop: int


class Counter(NamedTuple):
    """A variable that a loop counts with."""

    name: str
    loop: int
    start: Polynomial
    step: Polynomial


class Part(NamedTuple):
    """A quotient or a remainder, both of what is not negative."""

    what: str  # "/" or "%"
    of: Polynomial
    by: Polynomial


class Left(NamedTuple):
    """What a size is more than a multiple of its quotient."""

    of: Atom


class Anything(NamedTuple):
    """A value of which nothing is known."""

    number: int


class Fact(NamedTuple):
    """A comparison that holds."""

    operator: str  # "<" or "=="
    left: Polynomial
    right: Polynomial


def is_size(value: Polynomial) -> bool:
    """Whether a value is the same for all threads and rounds."""
    return all(
        isinstance(a, str) or (isinstance(a, Part) and is_size(a.of) and is_size(a.by))
        for a in value.atoms
    )


@dataclass(frozen=True)
class Site:
    """An access.

    Attributes:
        line: of the body.
        array: its name.
        mode: ``"read"``, ``"write"``, ``"fill"`` of what has no derivative, or ``"add"``.
        index: the element.
        facts: what holds there.
        loops: those around it, by their numbers, the outermost first.
        arms: the branches that it is in: which ``if``, and which side.
        at: where it stands among the accesses.
    """

    line: int
    array: str
    mode: str
    index: Polynomial
    facts: tuple[Fact, ...]
    loops: tuple[int, ...]
    arms: tuple[tuple[int, bool], ...]
    at: int


@dataclass
class Launch:
    """The sizes of a launch, as far as they are known.

    Attributes:
        grid, threadgroup: by axis.
        sizes: what is 1 or more.
    """

    grid: dict[str, Polynomial] = field(default_factory=dict)
    threadgroup: dict[str, Polynomial] = field(default_factory=dict)
    sizes: set[Atom] = field(default_factory=set)

    @property
    def flat(self) -> bool:
        """Whether a threadgroup's threads lie along x."""
        return self.threadgroup.get("y") == self.threadgroup.get("z") == number(1)

    @property
    def rows_of_32(self) -> bool:
        """Whether simdgroups lie along x."""
        x = self.threadgroup.get("x")
        return x is not None and x.constant is not None and (x.constant % 32 == 0 or self.flat)


class Places:
    """Walks through a body, and finds its accesses.

    Args:
        body: as it was read.
        grid, threadgroup: the sizes of the launch.
        sizes: the sizes that are known before the call, by name, in names of dims.
        dims: the names that are 1 or more.
        active: whether a value has a derivative.
    """

    def __init__(
        self,
        body: Block,
        grid: Sequence[Expression | None],
        threadgroup: Sequence[Expression | None],
        sizes: Mapping[str, Expression],
        dims: Sequence[str] = (),
        active: Callable[[Expression], bool] = lambda _: True,
    ) -> None:
        self.sites: list[Site] = []
        self.launch = Launch()
        self._sizes, self._active = sizes, active
        self._env: dict[str, Polynomial] = {}
        self._vectors: dict[str, Expression] = {}
        self._truths: dict[str, Expression] = {}
        self._changed = assigned_in(body)
        self._facts: list[Fact] = []
        self._loops: list[int] = []
        self._arms: list[tuple[int, bool]] = []
        self._count = 0
        self.launch.sizes |= set(dims)
        for name, given in (("grid", grid), ("threadgroup", threadgroup)):
            for axis, e in zip(AXES, given, strict=True):
                if e is not None:
                    getattr(self.launch, name)[axis] = self.value(e)
        self._block(body)

    def of(self, array: str) -> list[Site]:
        """The accesses of one array."""
        return [site for site in self.sites if site.array == array]

    # -- values ------------------------------------------------------------------------------------

    def value(self, e: Expression) -> Polynomial:
        """An integer."""
        if isinstance(e, Literal):
            value = constant(e)
            return self._anything() if value is None else number(value)
        if isinstance(e, Name):
            return self._name(e)
        if isinstance(e, Lanes):
            return self._lane(e)
        if isinstance(e, Element):
            return self._element(e)
        if isinstance(e, Unary) and e.operator == "-":
            return self.value(e.operand) * number(-1)
        if isinstance(e, Call) and e.cast and not e.type.floating and e.type.lanes == 1:
            return self._converted(e.arguments[0], e.type)
        if isinstance(e, Binary):
            return self._binary(e)
        return self._anything()

    def _converted(self, e: Expression, kind: Type) -> Polynomial:
        """A value as a type holds it: one of less than 32 bits may hold another."""
        value = self._anything() if e.type.floating else self.value(e)
        if kind.name in _NARROW and e.type.name != kind.name and value.constant is None:
            return self._anything()
        return value

    def _anything(self) -> Polynomial:
        self._count += 1
        return atom(Anything(self._count))

    def _name(self, e: Name) -> Polynomial:
        if e.name in self._env:
            return self._env[e.name]
        if e.name in self._sizes:
            size = self._sizes[e.name]
            return atom(e.name) if size == e else self.value(size)
        if e.name == "thread_index_in_simdgroup" and self.launch.rows_of_32:
            group = self.launch.threadgroup["x"].constant
            whole = group is not None and group % 32 == 0
            return self._part("%", self._axis("grid" if whole else "thread", "x"), number(32))
        if e.name == "simdgroup_index_in_threadgroup" and self.launch.flat:
            return self._part("/", self._axis("thread", "x"), number(32))
        if e.name == "thread_index_in_threadgroup" and self.launch.flat:
            return self._axis("thread", "x")
        if e.name in ("threads_per_simdgroup", "thread_execution_width"):
            return number(32)
        return self._anything()

    def _lane(self, e: Lanes) -> Polynomial:
        of: Expression = e.of
        while isinstance(of, Name) and of.name in self._vectors:
            of = self._vectors[of.name]
        if not isinstance(of, Name) or len(e.letters) > 1 or e.letters == "w":
            return self._anything()
        axis = e.letters
        known = {"threads_per_threadgroup": self.launch.threadgroup,
                 "threads_per_grid": self.launch.grid, "grid_size": self.launch.grid}  # fmt: skip
        if of.name in known:
            return known[of.name].get(axis) or self._anything()
        names = {"thread_position_in_grid": "grid", "threadgroup_position_in_grid": "group",
                 "thread_position_in_threadgroup": "thread"}  # fmt: skip
        return self._axis(names[of.name], axis) if of.name in names else self._anything()

    def _axis(self, what: str, axis: str) -> Polynomial:
        """A position, as a number where there is but one."""
        group, grid = self.launch.threadgroup.get(axis), self.launch.grid.get(axis)
        one = number(1)
        if grid == one or (what == "thread" and group == one):
            return number(0)
        if what == "group" and grid is not None and grid == group:
            return number(0)
        if what == "grid" and grid is not None and grid == group:
            return atom(Thread("thread", axis))
        if what == "group" and group == one:
            return atom(Thread("grid", axis))
        return atom(Thread(what, axis))

    def _element(self, e: Element) -> Polynomial:
        index = constant(e.indices[0])
        if e.array.space == "constant" and index is not None and len(e.indices) == 1:
            name = f"{e.array.name}[{index}]"
            if name in self._sizes:
                return self.value(self._sizes[name])
        return self._anything()

    def _binary(self, e: Binary) -> Polynomial:
        if e.operator not in "+-*/%<<>>&" or e.type.lanes > 1 or e.type.floating:
            return self._anything()
        a, b = self.value(e.left), self.value(e.right)
        if e.operator in "+-*":
            return {"+": a + b, "-": a - b, "*": a * b}[e.operator]
        by = b.constant
        if e.operator == "<<" and by is not None and 0 <= by < 31:
            return a * number(1 << by)
        if e.operator == ">>" and by is not None and 0 <= by < 31:
            return self._part("/", a, number(1 << by))
        if e.operator == "&" and by is not None and by > 0 and not by & (by + 1):
            return self._part("%", a, number(by + 1))
        return self._part(e.operator, a, b) if e.operator in "/%" else self._anything()

    def _part(self, what: str, a: Polynomial, b: Polynomial) -> Polynomial:
        if a.constant is not None and b.constant and a.constant >= 0 and b.constant > 0:
            return number(a.constant // b.constant if what == "/" else a.constant % b.constant)
        if any(n >= _MOST for n in a.factors.values()):
            return self._anything()
        if not self._is_natural(a) or not (b - number(1)).is_natural(self.launch.sizes):
            return self._anything()
        whole = a.divided(b)
        if whole is not None:
            return whole if what == "/" else number(0)
        return atom(Part(what, a, b))

    def _is_natural(self, a: Polynomial) -> bool:
        """Whether a number is known not to be negative."""
        return all(n > 0 for n in a.factors.values()) and not any(
            isinstance(x, Anything) or (isinstance(x, str) and x not in self.launch.sizes)
            for x in a.atoms
        )

    # -- statements --------------------------------------------------------------------------------

    def _block(self, body: Block) -> None:
        facts, arms = len(self._facts), len(self._arms)
        for s in body:
            if isinstance(s, If):
                self._if(s)
                continue
            if isinstance(s, Loop):
                self._loop(s)
                continue
            self._accesses(s)
            if isinstance(s, Declare) and s.value is not None and not s.variable.type.floating:
                if self._changed.isdisjoint((s.variable.name, *names_in(s.value))):
                    self._truths[s.variable.name] = s.value
                if s.variable.type.lanes > 1:
                    self._vectors[s.variable.name] = s.value
                else:
                    self._env[s.variable.name] = self._converted(s.value, s.variable.type)
            elif isinstance(s, Assign) and isinstance(s.place, (Name, Lanes)):
                self._assign(s)
        del self._facts[facts:]
        del self._arms[arms:]

    def _assign(self, s: Assign) -> None:
        name = name_of(s.place)
        self._vectors.pop(name, None)
        if not isinstance(s.place, Name) or s.place.type.floating:
            return
        value = self._converted(s.value, s.place.type)
        if s.operator in ("+=", "-=") and s.place.type.name not in _NARROW:
            old = self.value(s.place)
            value = old + value if s.operator == "+=" else old - value
        elif s.operator != "=":
            value = self._anything()
        self._env[name] = value

    def _accesses(self, s: Statement) -> None:
        """The accesses of a statement, not of those in it."""
        for e in expressions_of(s):
            for element in elements_in(e):
                if element.array.space in ("device", "threadgroup"):
                    self._found(s, element)

    def _found(self, s: Statement, e: Element) -> None:
        mode = "read"
        if isinstance(s, AtomicAdd) and s.place is e:
            mode = "add"
        elif isinstance(s, Assign) and s.place is e:
            stored = "write" if self._active(s.value) else "fill"
            mode = stored if s.operator == "=" else "add"
        index = self.value(e.indices[0])
        for i, dim in zip(e.indices[1:], e.array.dims[1:], strict=True):
            index = index * self.value(dim) + self.value(i)
        self.sites.append(
            Site(s.line, e.array.name, mode, index, tuple(self._facts),
                 tuple(self._loops), tuple(self._arms), len(self.sites))
        )  # fmt: skip

    def _if(self, s: If) -> None:
        self._accesses(s)
        self._count += 1
        which = self._count
        before = dict(self._env)
        after = []
        for part, yes in ((s.yes, True), (s.no, False)):
            self._env = dict(before)
            facts = len(self._facts)
            self._facts += self._holds(s.condition, yes)
            self._arms.append((which, yes))
            self._block(part)
            self._arms.pop()
            del self._facts[facts:]
            if not always_leaves(part):
                after.append(self._env)
        if not after:
            self._env = before
            return
        self._env = after[0] if len(after) == 1 else {
            name: value if after[1].get(name) == value else self._anything()
            for name, value in after[0].items()
        }  # fmt: skip
        if len(after) == 1:  # the other one has left
            yes = not always_leaves(s.yes)
            self._facts += self._holds(s.condition, yes)
            self._arms.append((which, yes))

    def _holds(self, e: Expression, yes: bool) -> list[Fact]:
        """What a condition says."""
        if isinstance(e, Unary) and e.operator == "!":
            return self._holds(e.operand, not yes)
        if isinstance(e, Name) and e.name in self._truths:
            return self._holds(self._truths[e.name], yes)
        if not isinstance(e, Binary) or e.type.lanes > 1:
            return []
        if e.operator == ("&&" if yes else "||"):
            return self._holds(e.left, yes) + self._holds(e.right, yes)
        turned = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}
        if e.operator not in turned or e.left.type.floating or e.right.type.floating:
            return []
        operator = e.operator if yes else turned[e.operator]
        a, b = self.value(e.left), self.value(e.right)
        if operator in (">", ">="):
            a, b, operator = b, a, "<" if operator == ">" else "<="
        if operator == "<=":
            b, operator = b + number(1), "<"
        return [Fact(operator, a, b)] if operator in ("<", "==") else []

    def _loop(self, s: Loop) -> None:
        self._block(s.start)
        self._count += 1
        which = self._count
        inside = {d.variable.name for d in statements(s.body) if isinstance(d, Declare)}
        changed = assigned_in((*s.update, *s.body)) - inside
        counters = {name_of(u.place) for u in s.update if isinstance(u, Assign)}
        for name in sorted(changed):
            self._vectors.pop(name, None)
            grows = self._growth(s, name, changed)
            if grows is None or name not in self._env:
                self._env[name] = self._anything()
            elif (
                name in counters
                and grows.is_natural(self.launch.sizes)
                and self._is_natural(self._env[name])
            ):
                self._env[name] = atom(Counter(name, which, self._env[name], grows))
            else:
                self._env[name] = self._env[name] + grows * atom(Round(which))
        self._loops.append(which)
        facts = len(self._facts)
        self._accesses(s)
        if s.condition is not None and s.kind != "do":
            self._facts += self._holds(s.condition, True)
        self._block(s.body)
        del self._facts[facts:]
        self._loops.pop()
        for name in changed:
            self._env[name] = self._anything()

    def _growth(self, s: Loop, name: str, changed: set[str]) -> Polynomial | None:
        """What each round adds to a variable."""
        mine = [
            a for a in statements((*s.update, *s.body))
            if isinstance(a, Assign) and name_of(a.place) == name
        ]  # fmt: skip
        top = (*s.update, *s.body)
        if (
            len(mine) != 1
            or not any(a is mine[0] for a in top)
            or not isinstance(mine[0].place, Name)
        ):
            return None
        value, operator = mine[0].value, mine[0].operator
        skips = mine[0] not in s.update and leaves(s.body, {"continue"})
        if skips or operator not in ("+=", "-=") or not changed.isdisjoint(names_in(value)):
            return None
        by = self.value(value)
        return by if operator == "+=" else by * number(-1)
