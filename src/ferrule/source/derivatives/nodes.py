"""What a body computes, as nodes: expressions that change nothing, and statements.

Every variable has a name of its own, pointers are arrays with offsets, functions are in place of
their calls, and what changes a variable is a statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# Scalar types by what arithmetic of two makes: the later one.
RANKS = (
    "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat",
    "float", "double",
)  # fmt: skip
FLOATS = frozenset({"half", "bfloat", "float", "double"})
LETTERS = "xyzw"
ADD = "fr_add"  # adds to threadgroup memory
COMPARISONS = frozenset({"<", ">", "<=", ">=", "==", "!=", "&&", "||"})  # what gives a bool


class Type(NamedTuple):
    """A type of values.

    Attributes:
        name: of its scalars: one of `RANKS`, or a template parameter's.
        lanes: of a vector, how many it has; else 1.
        floating: whether its scalars have derivatives.
    """

    name: str
    lanes: int = 1
    floating: bool = False

    def __str__(self) -> str:
        own = self.name in RANKS
        vector = f"{self.name}{self.lanes}" if own else f"vec<{self.name}, {self.lanes}>"
        return self.name if self.lanes == 1 else vector

    @property
    def scalar(self) -> Type:
        """The type of a lane."""
        return self._replace(lanes=1)


def of(name: str, lanes: int = 1) -> Type:
    """One of the dialect's own types."""
    return Type(name, lanes, name in FLOATS)


BOOL, INT, UINT, LONG, FLOAT = map(of, ("bool", "int", "uint", "long", "float"))


def common(a: Type, b: Type) -> Type:
    """What arithmetic of two makes."""
    if a.lanes != b.lanes:  # a scalar beside a vector is of the vector's type
        return a if a.lanes > b.lanes else b
    names = {a.name, b.name}
    if names == {"half", "bfloat"}:
        return of("float", a.lanes)
    if not names <= {*RANKS}:  # of a template parameter
        if a.floating != b.floating or len(names) == 1:
            return a if a.floating else b
        # Of two floats that are not known, one may be float.
        return of("double" if "double" in names else "float" if a.floating else "long", a.lanes)
    most = max(a, b, key=lambda t: RANKS.index(t.name))
    small = RANKS.index(most.name) < RANKS.index("int")
    return of("int", a.lanes) if small else most


# -- expressions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, as it is written."""

    text: str
    type: Type


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, a number that is given, an attribute of the thread."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True)
class Element:
    """An element of an array."""

    array: Array
    indices: tuple[Expression, ...]
    type: Type


@dataclass(frozen=True, slots=True)
class Lanes:
    """Some lanes of a vector, as letters of `LETTERS`."""

    of: Expression
    letters: str
    type: Type


@dataclass(frozen=True, slots=True)
class Unary:
    """``-a``, ``!a``, ``~a``."""

    operator: str
    operand: Expression
    type: Type


@dataclass(frozen=True, slots=True)
class Binary:
    """``a + b`` and others."""

    operator: str
    left: Expression
    right: Expression
    type: Type


@dataclass(frozen=True, slots=True)
class Choice:
    """``c ? a : b``."""

    condition: Expression
    yes: Expression
    no: Expression
    type: Type


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the dialect, a cast (the name is the type's) or a vector of its lanes."""

    name: str
    arguments: tuple[Expression, ...]
    type: Type
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """What has elements.

    Attributes:
        name: as it is called in the text.
        space: ``"device"``, ``"threadgroup"``, ``"thread"`` or ``"constant"`` (sizes, tables).
        element: the type of its elements.
        dims: its lengths; none of a device array.
        written: it is an output.
    """

    name: str
    space: str
    element: Type
    dims: tuple[Expression, ...] = ()
    written: bool = False


Expression = Literal | Name | Element | Lanes | Unary | Binary | Choice | Call


def operands(e: Expression) -> tuple[Expression, ...]:
    """The expressions that one is made of."""
    if isinstance(e, Element):
        return e.indices
    if isinstance(e, Lanes):
        return (e.of,)
    if isinstance(e, Unary):
        return (e.operand,)
    if isinstance(e, Binary):
        return e.left, e.right
    if isinstance(e, Choice):
        return e.condition, e.yes, e.no
    return e.arguments if isinstance(e, Call) else ()


def names_in(e: Expression) -> Iterator[str]:
    """The variables and arrays that an expression reads."""
    if isinstance(e, Name):
        yield e.name
    elif isinstance(e, Element):
        yield e.array.name
    for part in operands(e):
        yield from names_in(part)


def is_short(e: Expression) -> bool:
    """Whether to write an expression twice costs nothing."""
    if isinstance(e, (Name, Literal)):
        return True
    if isinstance(e, Lanes):
        return is_short(e.of)
    if not isinstance(e, Binary) or e.operator not in "+-*":
        return False
    return not any(isinstance(part, Binary) or not is_short(part) for part in (e.left, e.right))


def root(place: Expression) -> Expression:
    """A place without lanes: the variable or the element that they are of."""
    while isinstance(place, Lanes):
        place = place.of
    return place


def is_device(place: Expression) -> bool:
    """Whether a place is in an array of the device."""
    whole = root(place)
    return isinstance(whole, Element) and whole.array.space == "device"


def with_operands(e: Expression, parts: Sequence[Expression]) -> Expression:
    """An expression of other operands."""
    if isinstance(e, Element):
        return replace(e, indices=tuple(parts))
    if isinstance(e, Lanes):
        return replace(e, of=parts[0])
    if isinstance(e, Unary):
        return replace(e, operand=parts[0])
    if isinstance(e, Binary):
        return replace(e, left=parts[0], right=parts[1])
    if isinstance(e, Choice):
        return replace(e, condition=parts[0], yes=parts[1], no=parts[2])
    return replace(e, arguments=tuple(parts)) if isinstance(e, Call) else e


def substituted(e: Expression, values: Mapping[str, Expression]) -> Expression:
    """An expression with others in place of some variables."""
    if isinstance(e, Name):
        return values.get(e.name, e)
    return with_operands(e, [substituted(part, values) for part in operands(e)])


def constant(e: Expression) -> int | None:
    """An integer that a text says."""
    if isinstance(e, Literal):
        text = e.text.rstrip("uUlL").replace("'", "")
        return (
            int(text, 0) if text[:1].isdigit() and "." not in text and not e.type.floating else None
        )
    if isinstance(e, Unary) and e.operator == "-":
        inner = constant(e.operand)
        return None if inner is None else -inner
    if isinstance(e, Call) and e.cast and not e.type.floating:
        return constant(e.arguments[0])
    if isinstance(e, Binary):
        a, b = constant(e.left), constant(e.right)
        if a is None or b is None:
            return None
        if e.operator in "+-*":
            return {"+": a + b, "-": a - b, "*": a * b}[e.operator]
        if e.operator in "/%" and b and a >= 0 and b > 0:
            return a // b if e.operator == "/" else a % b
    return None


# -- statements ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declare:
    """``float v = e;``; ``const`` where nothing changes it.

    Attributes:
        deduced: its type is that of the value, as C++ finds it.
    """

    line: int
    variable: Name
    value: Expression | None
    constant: bool = False
    deduced: bool = False


@dataclass(frozen=True, slots=True)
class DeclareArray:
    """``threadgroup float t[32];``"""

    line: int
    array: Array
    values: tuple[Expression, ...] | None = None


@dataclass(frozen=True, slots=True)
class Assign:
    """``place = e``, ``place += e`` and others."""

    line: int
    place: Name | Element | Lanes
    operator: str
    value: Expression


@dataclass(frozen=True, slots=True)
class If:
    """Branches."""

    line: int
    condition: Expression
    yes: tuple[Statement, ...]
    no: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop.

    Attributes:
        kind: ``"for"``, ``"while"`` or ``"do"``.
        start, update: of a ``for``.
        condition: None where it holds always.
    """

    line: int
    kind: str
    start: tuple[Statement, ...]
    condition: Expression | None
    update: tuple[Statement, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Jump:
    """``return``, ``break`` or ``continue``; of a function that is in place of its call, what it
    returns."""

    line: int
    kind: str
    value: Expression | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """A call that is made for what it does: a barrier, a print."""

    line: int
    call: Call


@dataclass(frozen=True, slots=True)
class AtomicAdd:
    """``atomic_fetch_add_explicit(&place, e, memory_order_relaxed)`` whose result is not used.

    Attributes:
        function: that, or `ADD`.
        cast: the array is one of plain numbers.
    """

    line: int
    place: Element
    value: Expression
    function: str = "atomic_fetch_add_explicit"
    cast: bool = False


Statement = Declare | DeclareArray | Assign | If | Loop | Jump | Effect | AtomicAdd
Block = tuple[Statement, ...]


def branch(line: int, condition: Expression, yes: Block, no: Block) -> If:
    """Branches, of which the first has statements where one has."""
    if yes or not no:
        return If(line, condition, yes, no)
    if isinstance(condition, Unary) and condition.operator == "!":
        return If(line, condition.operand, no)
    return If(line, Unary("!", condition, condition.type), no)
