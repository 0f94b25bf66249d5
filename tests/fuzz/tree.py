"""Types, variables, expressions and definitions of fuzzed programs, and their Metal text.

Every expression knows its type. `reference` gives the tree its meaning without reading the text.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

import numpy as np

_serial = itertools.count(1)


_NESTED = re.compile(r"\w+\(")


@dataclass(frozen=True)
class Type:
    """A scalar type: its Metal name, NumPy dtype, and rank in the usual conversions."""

    name: str
    dtype: str
    rank: int
    kind: str  # "int", "uint", "float" or "bool"

    @property
    def lanes(self) -> int:
        return 1

    @property
    def base(self) -> Type:
        return self

    @property
    def bits(self) -> int:
        return np.dtype(self.dtype).itemsize * 8

    @property
    def integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def limits(self) -> tuple[int, int]:
        """The values that the type holds; for floats the integers that it holds exactly."""
        if self.kind == "bool":
            return 0, 1
        if self.kind == "float":
            most = 1 << (24 if self.name == "float" else 11)
            return -most, most
        info = np.iinfo(self.dtype)
        return int(info.min), int(info.max)


BOOL = Type("bool", "bool", 0, "bool")
CHAR = Type("char", "int8", 1, "int")
UCHAR = Type("uchar", "uint8", 1, "uint")
SHORT = Type("short", "int16", 2, "int")
USHORT = Type("ushort", "uint16", 2, "uint")
INT = Type("int", "int32", 3, "int")
UINT = Type("uint", "uint32", 4, "uint")
LONG = Type("long", "int64", 5, "int")
ULONG = Type("ulong", "uint64", 6, "uint")
HALF = Type("half", "float16", 7, "float")
FLOAT = Type("float", "float32", 8, "float")
SCALARS = (BOOL, CHAR, UCHAR, SHORT, USHORT, INT, UINT, LONG, ULONG, HALF, FLOAT)


@dataclass(frozen=True)
class Vector:
    """A vector type such as ``float4``."""

    base: Type
    lanes: int

    @property
    def name(self) -> str:
        return f"{self.base.name}{self.lanes}"

    @property
    def kind(self) -> str:
        return "vector"

    @property
    def dtype(self) -> str:
        return self.base.dtype


AnyType = Type | Vector
VOID = Type("void", "int32", -1, "void")


def common(a: Type, b: Type) -> Type:
    """The type in which two scalars are added."""
    high = max(a, b, key=lambda t: t.rank)
    return INT if high.rank < INT.rank else high


# -- variables -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Var:
    """A name and what it names.

    Attributes:
        kind: ``value``, ``array``, ``shared`` (threadgroup), ``pointer``, ``ref``, ``table``
            (constant), ``input``, ``output``, ``scalar`` (0-d input) or ``template``.
        size: elements of an array.
        space: the address space of what a pointer or reference points to.
        span: the values that it holds, as far as the generator knows.
        uniform: every thread of a threadgroup holds the same value.
        locked: the generator must not write to it (loop counters).
    """

    name: str
    type: AnyType
    kind: str = "value"
    size: int = 0
    space: str = ""
    span: tuple[int, int] = (0, 0)
    uniform: bool = False
    locked: bool = False
    const: bool = False
    spelling: str = ""  # the type's name in the text, where it is not the type's own
    target: Var | None = None  # what a pointer or reference leads to
    own: bool = False  # it leads to this thread's own element
    id: int = field(default_factory=lambda: next(_serial))

    @property
    def type_text(self) -> str:
        return self.spelling or self.type.name


# -- expressions -----------------------------------------------------------------------------------


class Node:
    """A part of a program."""


PRIMARY, UNARY = 20, 15
_PRECEDENCE = {
    "*": 13, "/": 13, "%": 13, "+": 12, "-": 12, "<<": 11, ">>": 11, "<": 10, "<=": 10, ">": 10,
    ">=": 10, "==": 9, "!=": 9, "&": 8, "^": 7, "|": 6, "&&": 5, "||": 4,
}  # fmt: skip


class Expr(Node):
    """An expression; `span` holds the values it can have."""

    type: AnyType
    span: tuple[int, int] = (0, 0)

    @property
    def level(self) -> int:
        return PRIMARY

    def text(self) -> str:
        raise NotImplementedError

    def within(self, level: int) -> str:
        """The text, in parentheses where it binds less than `level`."""
        return self.text() if self.level >= level else f"({self.text()})"


@dataclass(eq=False)
class Lit(Expr):
    value: float
    type: AnyType

    @property
    def level(self) -> int:
        return PRIMARY if self.value >= 0 else UNARY

    def text(self) -> str:
        name, v = self.type.name, self.value
        if name == "bool":
            return "true" if v else "false"
        if name == "float":
            return f"{float(v)!r}f"
        if name == "half":
            return f"{float(v)!r}h"
        if name == "int":
            return str(v)
        if name == "uint":
            return f"{v}u"
        return f"{name}({v})"


@dataclass(eq=False)
class Name(Expr):
    var: Var

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.var.type

    def text(self) -> str:
        return self.var.name


@dataclass(eq=False)
class Attr(Expr):
    """A thread attribute, such as ``thread_position_in_grid.x``."""

    name: str
    axis: str = ""
    type: AnyType = UINT

    def text(self) -> str:
        return f"{self.name}.{self.axis}" if self.axis else self.name


@dataclass(eq=False)
class Un(Expr):
    op: str
    value: Expr
    type: AnyType

    @property
    def level(self) -> int:
        return UNARY

    def text(self) -> str:
        return f"{self.op}{self.value.within(PRIMARY)}"


@dataclass(eq=False)
class Bin(Expr):
    """Arithmetic, a comparison, ``&&`` or ``||``."""

    op: str
    left: Expr
    right: Expr
    type: AnyType

    @property
    def level(self) -> int:
        return _PRECEDENCE[self.op]

    def text(self) -> str:
        # Parentheses where compilers would warn, and where a cast could swallow a sign.
        low = self.level if self.op in "+-*/%" else max(self.level, 12)
        return f"{self.left.within(low)} {self.op} {self.right.within(low + 1)}"


@dataclass(eq=False)
class Cond(Expr):
    test: Expr
    yes: Expr
    no: Expr

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.yes.type

    @property
    def level(self) -> int:
        return 3

    def text(self) -> str:
        return f"{self.test.within(4)} ? {self.yes.within(4)} : {self.no.within(4)}"


@dataclass(eq=False)
class Cast(Expr):
    value: Expr
    type: AnyType
    style: str = "call"  # "call", "c" or "static"
    spelling: str = ""

    @property
    def level(self) -> int:
        return UNARY if self.style == "c" else PRIMARY

    def text(self) -> str:
        name = self.spelling or self.type.name
        if self.style == "c":
            return f"({name}){self.value.within(PRIMARY)}"
        if self.style == "static":
            return f"static_cast<{name}>({self.value.text()})"
        text = self.value.text()
        # `int(uint(*r))` and `int(uint(l))` are types of functions too, and g++ refuses to take N,
        # a template parameter, for a parameter's name.
        if text.startswith("*") or _NESTED.match(text) or text in ("N", "FLAG", "Q"):
            return f"static_cast<{name}>({text})"
        return f"{name}({text})"


@dataclass(eq=False)
class Fn(Expr):
    """A function of Metal's library; ``as_type`` and vectors' constructors too."""

    name: str
    args: list[Expr]
    type: AnyType
    prefix: str = ""

    def text(self) -> str:
        return f"{self.prefix}{self.name}({', '.join(a.text() for a in self.args)})"


@dataclass(eq=False)
class Sync(Fn):
    """An operation of the simdgroup or quadgroup."""

    def text(self) -> str:
        inner = super().text()
        if self.name.endswith(("ballot", "active_threads_mask")):
            # Not uint(…): in a macro's brackets, `(uint(vote_t(f()))) - 1` is a cast to a function.
            return f"(uint)simd_vote::vote_t({inner})"
        return inner


@dataclass(eq=False)
class Element(Expr):
    """A part of a variable, or what it points to, of the variable's own type."""

    base: Var

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.base.type


@dataclass(eq=False)
class Index(Element):
    """An element of an array or of what a pointer points to."""

    index: Expr

    def text(self) -> str:
        return f"{self.base.name}[{self.index.text()}]"


@dataclass(eq=False)
class Deref(Element):
    @property
    def level(self) -> int:
        return UNARY

    def text(self) -> str:
        return f"*{self.base.name}"


@dataclass(eq=False)
class Strided(Element):
    """``x[elem_to_loc(i, x_shape, x_strides, x_ndim)]``: the i-th element in row-major order."""

    index: Expr

    def text(self) -> str:
        n = self.base.name
        return f"{n}[elem_to_loc({self.index.text()}, {n}_shape, {n}_strides, {n}_ndim)]"


@dataclass(eq=False)
class ShapeOf(Expr):
    base: Var
    axis: int
    type: AnyType = INT

    def text(self) -> str:
        return f"{self.base.name}_shape[{self.axis}]"


@dataclass(eq=False)
class Swizzle(Expr):
    value: Expr
    letters: str

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        base = self.value.type.base
        return base if len(self.letters) == 1 else Vector(base, len(self.letters))

    def text(self) -> str:
        return f"{self.value.within(PRIMARY)}.{self.letters}"


@dataclass(eq=False)
class Component(Expr):
    """``v[i]`` of a vector, with a run-time index."""

    value: Expr
    index: Expr

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.value.type.base

    def text(self) -> str:
        return f"{self.value.within(PRIMARY)}[{self.index.text()}]"


@dataclass(eq=False)
class PostStep(Expr):
    """``v++`` or ``v--`` inside an expression that names `v` nowhere else."""

    var: Var
    op: str

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.var.type

    def text(self) -> str:
        return f"{self.var.name}{self.op}"


@dataclass(eq=False)
class Address(Expr):
    """A pointer: ``&a[i]`` or ``a + i``; only as an argument or an initialiser."""

    base: Var
    index: Expr | None
    ampersand: bool

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.base.type

    def text(self) -> str:
        if self.base.kind in ("value", "ref"):
            return f"&{self.base.name}"
        if self.index is None:
            return self.base.name
        if self.ampersand:
            return f"&{self.base.name}[{self.index.text()}]"
        return f"{self.base.name} + {self.index.within(13)}"


@dataclass(eq=False)
class Call(Expr):
    """A call of a function of the header, or of a lambda."""

    function: Function
    args: list[Expr]

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.function.type

    def text(self) -> str:
        explicit = self.function.explicit
        return f"{self.function.name}{explicit}({', '.join(a.text() for a in self.args)})"


@dataclass(eq=False)
class Param(Expr):
    """A macro's parameter inside its body."""

    name: str
    place: int
    type: AnyType

    def text(self) -> str:
        return f"({self.name})"


@dataclass(eq=False)
class MacroUse(Expr):
    macro: Macro
    args: list[Expr]

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.macro.body.type

    def text(self) -> str:
        if not self.macro.params:
            return self.macro.name
        return f"{self.macro.name}({', '.join(a.text() for a in self.args)})"


@dataclass(eq=False)
class AtomicLoad(Expr):
    base: Var
    index: Expr

    @property
    def type(self) -> AnyType:  # type: ignore[override]
        return self.base.type

    def text(self) -> str:
        place = f"&{self.base.name}[{self.index.text()}]"
        return f"atomic_load_explicit({place}, memory_order_relaxed)"


# -- what is defined -------------------------------------------------------------------------------


class Stmt(Node):
    def lines(self) -> list[str]:
        raise NotImplementedError


def block_lines(body: list[Stmt]) -> list[str]:
    """The lines of a block, indented, directives apart."""
    return [ln if ln.startswith("#") else "    " + ln for s in body for ln in s.lines()]


@dataclass(eq=False)
class Macro(Node):
    """``#define``; a bare one stands for a variable and can be assigned to."""

    name: str
    params: list[str]
    body: Expr
    bare: bool = False

    def text(self) -> str:
        head = f"{self.name}({', '.join(self.params)})" if self.params else self.name
        body = self.body.text()
        return f"#define {head} {body if self.bare else f'({body})'}"


@dataclass(eq=False)
class Function(Node):
    """A helper of the header, or a lambda.

    Attributes:
        modes: for each parameter ``value``, ``ref`` or ``pointer``.
        template: the text before it, such as ``template <int Q>``, with the values in `explicit`.
        synchronises: it may hold synchronising calls.
        barriers: it holds barriers: `Statements.meet` calls it.
        pure: it changes nothing, so that it may stand inside expressions.
        capture: for a lambda, ``&`` or ``=``.
    """

    name: str
    type: AnyType
    params: list[Var]
    modes: list[str]
    body: list[Stmt] = field(default_factory=list)
    template: str = ""
    explicit: str = ""
    template_vars: list[tuple[Var, int]] = field(default_factory=list)
    synchronises: bool = False
    barriers: bool = False
    pure: bool = True
    capture: str = ""
    spelling: str = ""

    def head(self) -> str:
        given = []
        for p, mode in zip(self.params, self.modes, strict=True):
            space = f"{p.space} " if p.space else ""
            if mode == "ref":
                given.append(f"{space}{p.type_text}& {p.name}")
            elif mode == "pointer":
                const = "const " if p.const else ""
                given.append(f"{space}{const}{p.type_text}* {p.name}")
            else:
                given.append(f"{p.type_text} {p.name}")
        return ", ".join(given)

    def text(self) -> str:
        lines = [self.template] if self.template else []
        kind = self.spelling or self.type.name
        lines.append(f"inline {kind} {self.name}({self.head()}) {{")
        lines += block_lines(self.body)
        return "\n".join([*lines, "}"])


@dataclass(eq=False)
class Table(Node):
    """A table in constant memory, in the header or the body."""

    var: Var
    values: list[int]
    head: str = "constant"

    def text(self) -> str:
        items = ", ".join(Lit(v, self.var.type).text() for v in self.values)
        return (
            f"{self.head} {self.var.type.name} {self.var.name}[{len(self.values)}] = {{{items}}};"
        )
