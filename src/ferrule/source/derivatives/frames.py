"""Frames: a body, or one round of a loop, with what its reversed statements need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from .nodes import (
    LETTERS,
    RANKS,
    Array,
    Assign,
    Binary,
    Block,
    Call,
    Declare,
    DeclareArray,
    Element,
    Expression,
    If,
    Lanes,
    Literal,
    Name,
    Statement,
    Type,
    operands,
    with_operands,
)
from .partials import zero_of

Statements = list[Statement]
Undo = Callable[[], Statements]


@dataclass
class Holder:
    """A place among forward statements that is filled when what is behind it has been reversed."""

    inside: Forward = field(default_factory=list)


@dataclass
class Branches:
    """Branches of forward statements, some of which are still to be filled."""

    line: int
    condition: Expression
    yes: Forward
    no: Forward


Forward = list[Statement | Holder | Branches]


@dataclass
class Frame:
    """A body, or one round of a loop.

    Attributes:
        hoisted: declarations of what is born under a branch, and read again when that is reversed.
        adjoints: declarations of the adjoints of its variables, by their names.
        forward: the block of forward statements that is being made.
        undos: what reverses each, in the same order.
        depth: how many branches of it are around.
        later: by block, from the outermost, what is assigned behind the present statement.
        own: the variables and arrays that it declares.
        known: values that have a name, and stay what they are while it runs.
    """

    hoisted: Statements = field(default_factory=list)
    adjoints: dict[str, Statement] = field(default_factory=dict)
    forward: Forward = field(default_factory=list)
    undos: list[Undo] = field(default_factory=list)
    depth: int = 0
    later: list[set[str]] = field(default_factory=list)
    own: set[str] = field(default_factory=set)
    known: dict[Expression, Name] = field(default_factory=dict)


def undone(undos: list[Undo]) -> Statements:
    """The statements that reverse those of a block."""
    out: Statements = []
    for undo in reversed(undos):
        out += undo()
    return out


def flattened(forward: Forward) -> Block:
    """Forward statements once all is filled."""
    out: Statements = []
    for s in forward:
        if isinstance(s, Holder):
            out += flattened(s.inside)
        elif isinstance(s, Branches):
            out.append(If(s.line, s.condition, flattened(s.yes), flattened(s.no)))
        else:
            out.append(s)
    return tuple(out)


class Frames:
    """The frames that are being made, and the names in them.

    Attributes:
        real: the type of adjoints and gradients.
        frames: the innermost last.
        fixed: variables that nothing changes while the present frame runs, though they change.
        touched: what has adjoints that something was added to.
        now: what integers hold at the present statement, where that is known.
        values: by variable that nothing changes, its value.
    """

    def __init__(self, real: Type, used: Iterable[str], changed: Iterable[str]) -> None:
        self.real = real
        self.frames: list[Frame] = [Frame()]
        self.fixed: set[str] = set()
        self.touched: set[str] = set()
        self.now: dict[str, Expression] = {}
        self.values: dict[str, Expression] = {}
        self.line = 1
        self._used, self._changed = set(used), set(changed)
        self._adjoints: dict[str, str] = {}

    @property
    def frame(self) -> Frame:
        """The innermost one."""
        return self.frames[-1]

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        found, count = name, 0
        while found in self._used:
            count += 1
            found = f"{name}_{count}"
        self._used.add(found)
        return found

    # -- values that stay --------------------------------------------------------------------------

    def stays(self, e: Expression) -> bool:
        """Whether an expression has one value while the frame runs."""
        if isinstance(e, Name):
            return e.name not in self._changed or e.name in self.fixed
        if isinstance(e, Element) and e.array.space != "constant":
            return False
        return all(map(self.stays, operands(e)))

    def kept(self, e: Expression, name: str = "fr_value") -> Expression:
        """A value for reversed statements: as it is now."""
        if isinstance(e, Literal) or (isinstance(e, Name) and self.stays(e)):
            return e
        stays = self.stays(e)
        if isinstance(e, Lanes) and isinstance(e.of, Name) and stays:
            return e
        known = next((f.known[e] for f in self.frames if stays and e in f.known), None)
        if known is None:
            known = self.named(e, self.fresh(name))
            if stays and not self.frame.depth:
                self.frame.known[e] = known
        return known

    def named(self, e: Expression, name: str) -> Name:
        """A new variable that holds a value from now on."""
        kind = self.spelled(e.type)
        variable = Name(name, kind)
        if self.stays(e):
            self.values[name] = e
        self.declare(Declare(self.line, variable, e, constant=True, deduced=kind.name not in RANKS))
        return variable

    def spelled(self, kind: Type) -> Type:
        """A type of which variables are declared: of a float, one that is wide enough."""
        return (
            kind._replace(name=self.real.name) if (kind.name, kind.lanes) == ("float", 1) else kind
        )

    def declare(self, s: Declare) -> None:
        """Declare a variable: one of a branch in front of the frame."""
        self.frame.own.add(s.variable.name)
        if not self.frame.depth:
            self.frame.forward.append(s)
            return
        variable = s.variable
        if s.deduced:
            variable = replace(variable, type=self.spelled(variable.type))
        self.frame.hoisted.append(Declare(s.line, variable, None))
        if s.value is not None:
            self.frame.forward.append(Assign(s.line, variable, "=", s.value))

    def declare_array(self, s: DeclareArray) -> None:
        """Declare an array: one of a branch in front of the frame."""
        self.frame.own.add(s.array.name)
        if not self.frame.depth:
            self.frame.forward.append(s)
            return
        dims = tuple(map(self.written_out, s.array.dims))
        self.frame.hoisted.append(replace(s, array=replace(s.array, dims=dims)))

    # -- adjoints ----------------------------------------------------------------------------------

    def adjoint(self, variable: Name) -> Name:
        """The adjoint of a variable, to be added to."""
        self.touched.add(variable.name)
        kind = self.wide_type(variable.type)
        name = self._adjoint_name(variable.name)
        frame = self._owner(variable.name)
        if variable.name not in frame.adjoints:
            declared = Declare(self.line, Name(name, kind), zero_of(kind))
            frame.adjoints[variable.name] = declared
        return Name(name, kind)

    def adjoint_array(self, array: Array) -> Array:
        """The adjoints of an array's elements."""
        self.touched.add(array.name)
        name = self._adjoint_name(array.name)
        dims = tuple(map(self.written_out, array.dims))
        made = Array(name, array.space, self.wide_type(array.element), dims)
        frame = self.frames[0] if array.space == "threadgroup" else self._owner(array.name)
        if array.name not in frame.adjoints:
            values = None if array.space == "threadgroup" else ()
            frame.adjoints[array.name] = DeclareArray(self.line, made, values)
        return made

    @property
    def adjoint_names(self) -> set[str]:
        """Those of all adjoints so far."""
        return set(self._adjoints.values())

    def _adjoint_name(self, name: str) -> str:
        if name not in self._adjoints:
            self._adjoints[name] = self.fresh(f"{name}_grad")
        return self._adjoints[name]

    def _owner(self, name: str) -> Frame:
        return next((f for f in reversed(self.frames) if name in f.own), self.frames[0])

    def written_out(self, e: Expression) -> Expression:
        """An expression of what is there in front of the body: a size of an array that is declared
        there."""
        if isinstance(e, Name) and e.name in self.values:
            return self.written_out(self.values[e.name])
        return with_operands(e, [self.written_out(part) for part in operands(e)])

    # -- types -------------------------------------------------------------------------------------

    def wide_type(self, kind: Type) -> Type:
        """The type of adjoints of a type."""
        return self.real._replace(lanes=kind.lanes)

    def wide(self, e: Expression) -> Expression:
        """A value as adjoints are."""
        kind = self.wide_type(e.type)
        if isinstance(e, Literal) or e.type == kind:
            return e
        return Call(str(kind), (e,), kind, cast=True)

    def shared(self, cotangent: Expression, out: Statements) -> Expression:
        """A cotangent that is used several times."""
        if isinstance(cotangent, (Name, Literal)):
            return cotangent
        variable = Name(self.fresh("fr_cotangent"), self.wide_type(cotangent.type))
        out.append(Declare(self.line, variable, cotangent, constant=True))
        return variable

    def fitted(self, cotangent: Expression, kind: Type, out: Statements) -> Expression:
        """A cotangent of another number of lanes: summed, or the same for all."""
        if cotangent.type.lanes == kind.lanes:
            return cotangent
        if kind.lanes > 1:
            wide = self.wide_type(kind)
            return Call(str(wide), (cotangent,), wide)
        vector = self.shared(cotangent, out)
        return summed(vector)


def summed(vector: Expression) -> Expression:
    """The sum of a vector's lanes."""
    scalar = vector.type.scalar
    total: Expression = Lanes(vector, "x", scalar)
    for letter in LETTERS[1 : vector.type.lanes]:
        total = Binary("+", total, Lanes(vector, letter, scalar), scalar)
    return total
