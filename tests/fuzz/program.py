"""Statements and whole programs, and their Metal text; what `tree` has is here too."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .tree import (
    BOOL as BOOL,
)
from .tree import (
    CHAR as CHAR,
)
from .tree import (
    FLOAT as FLOAT,
)
from .tree import (
    HALF as HALF,
)
from .tree import (
    INT as INT,
)
from .tree import (
    LONG as LONG,
)
from .tree import (
    SCALARS as SCALARS,
)
from .tree import (
    SHORT as SHORT,
)
from .tree import (
    UCHAR as UCHAR,
)
from .tree import (
    UINT as UINT,
)
from .tree import (
    ULONG as ULONG,
)
from .tree import (
    USHORT as USHORT,
)
from .tree import (
    VOID as VOID,
)
from .tree import (
    Address as Address,
)
from .tree import (
    AnyType as AnyType,
)
from .tree import (
    AtomicLoad as AtomicLoad,
)
from .tree import (
    Attr as Attr,
)
from .tree import (
    Bin as Bin,
)
from .tree import (
    Call as Call,
)
from .tree import (
    Cast as Cast,
)
from .tree import (
    Component as Component,
)
from .tree import (
    Cond as Cond,
)
from .tree import (
    Deref as Deref,
)
from .tree import (
    Expr as Expr,
)
from .tree import (
    Fn as Fn,
)
from .tree import (
    Function as Function,
)
from .tree import (
    Index as Index,
)
from .tree import (
    Lit as Lit,
)
from .tree import (
    Macro as Macro,
)
from .tree import (
    MacroUse as MacroUse,
)
from .tree import (
    Name as Name,
)
from .tree import (
    Node as Node,
)
from .tree import (
    Param as Param,
)
from .tree import (
    PostStep as PostStep,
)
from .tree import (
    ShapeOf as ShapeOf,
)
from .tree import (
    Stmt as Stmt,
)
from .tree import (
    Strided as Strided,
)
from .tree import (
    Swizzle as Swizzle,
)
from .tree import (
    Sync as Sync,
)
from .tree import (
    Table as Table,
)
from .tree import (
    Type as Type,
)
from .tree import (
    Un as Un,
)
from .tree import (
    Var as Var,
)
from .tree import (
    Vector as Vector,
)
from .tree import (
    block_lines as block_lines,
)
from .tree import (
    common as common,
)

# -- statements ------------------------------------------------------------------------------------


_CAST = re.compile(r"\w+\(")


@dataclass(eq=False)
class Decl(Stmt):
    """A variable, an array, a pointer or a reference."""

    var: Var
    value: Expr | None = None
    values: list[Expr] | None = None  # of an array
    style: str = "="  # "=", "(" or "{"
    spec: str = ""  # "const ", "constexpr " …

    def declarator(self) -> str:
        v = self.var
        if v.kind in ("array", "shared") and v.size:
            items = "" if self.values is None else ", ".join(e.text() for e in self.values)
            return f"{v.name}[{v.size}]" + ("" if self.values is None else f" = {{{items}}}")
        mark = {"pointer": "*", "ref": "&"}.get(v.kind, "")
        if self.value is None:
            return f"{mark}{v.name}"
        text = self.value.text()
        if self.style == "(":
            # `T v(uint(n))` declares a function.
            text = f"({text})" if _CAST.match(text) else text
            return f"{mark}{v.name}({text})"
        if self.style == "{":
            return f"{mark}{v.name}{{{text}}}"
        return f"{mark}{v.name} = {text}"

    def head(self) -> str:
        v = self.var
        space = f"{v.space} " if v.space else ""
        return f"{space}{self.spec}{v.type_text}"

    def lines(self) -> list[str]:
        return [f"{self.head()} {self.declarator()};"]


@dataclass(eq=False)
class Decls(Stmt):
    """Several variables of one type in one statement."""

    parts: list[Decl]

    def lines(self) -> list[str]:
        if not self.parts:
            return []
        return [f"{self.parts[0].head()} {', '.join(d.declarator() for d in self.parts)};"]


@dataclass(eq=False)
class TableDecl(Stmt):
    table: Table

    def lines(self) -> list[str]:
        return [self.table.text()]


@dataclass(eq=False)
class LambdaDecl(Stmt):
    function: Function

    def lines(self) -> list[str]:
        f = self.function
        body = block_lines(f.body)
        if len(body) == 1:
            return [f"auto {f.name} = [{f.capture}]({f.head()}) {{ {body[0].strip()} }};"]
        return [f"auto {f.name} = [{f.capture}]({f.head()}) {{", *body, "};"]


@dataclass(eq=False)
class Define(Stmt):
    macro: Macro

    def lines(self) -> list[str]:
        return [self.macro.text()]


@dataclass(eq=False)
class Assign(Stmt):
    target: Expr
    op: str
    value: Expr

    def lines(self) -> list[str]:
        return [f"{self.target.text()} {self.op} {self.value.text()};"]


@dataclass(eq=False)
class MacroAssign(Stmt):
    """``ADD(target, value);`` where ``ADD`` is defined as an assignment."""

    name: str
    target: Expr
    op: str
    value: Expr

    def lines(self) -> list[str]:
        return [f"{self.name}({self.target.text()}, {self.value.text()});"]


@dataclass(eq=False)
class DefineAssign(Stmt):
    name: str
    op: str

    def lines(self) -> list[str]:
        return [f"#define {self.name}(V, E) V {self.op} E"]


@dataclass(eq=False)
class Step(Stmt):
    target: Expr
    op: str
    before: bool

    def lines(self) -> list[str]:
        t = self.target.text()
        if t.startswith("*") and not self.before:
            t = f"({t})"  # `*p++` would move p
        return [f"{self.op}{t};" if self.before else f"{t}{self.op};"]


@dataclass(eq=False)
class Do(Stmt):
    """A call for its effects."""

    value: Expr

    def lines(self) -> list[str]:
        return [f"{self.value.text()};"]


@dataclass(eq=False)
class If(Stmt):
    test: Expr
    yes: list[Stmt]
    no: list[Stmt]
    constexpr: bool = False
    braces: bool = True

    def lines(self) -> list[str]:
        head = f"if {'constexpr ' if self.constexpr else ''}({self.test.text()})"
        if not self.braces and len(self.yes) == 1 and not self.no and _simple(self.yes[0]):
            return [f"{head} {self.yes[0].lines()[0]}"]
        out = [f"{head} {{", *block_lines(self.yes), "}"]
        if len(self.no) == 1 and isinstance(self.no[0], If) and self.no[0].braces:
            inner = self.no[0].lines()
            return [*out[:-1], f"}} else {inner[0]}", *inner[1:]]
        if self.no:
            out[-1] = "} else {"
            out += [*block_lines(self.no), "}"]
        return out


def _simple(s: Stmt) -> bool:
    return isinstance(s, (Assign, Step, Do, Return, Jump)) and len(s.lines()) == 1


@dataclass(eq=False)
class For(Stmt):
    start: Stmt | None
    test: Expr
    step: Stmt | None
    body: list[Stmt]

    def lines(self) -> list[str]:
        first = self.start.lines()[0] if self.start is not None else ";"
        step = self.step.lines()[0].rstrip(";") if self.step is not None else ""
        head = f"for ({first} {self.test.text()}; {step})"
        return [f"{head} {{", *block_lines(self.body), "}"]


@dataclass(eq=False)
class While(Stmt):
    test: Expr
    body: list[Stmt]
    do: bool = False

    def lines(self) -> list[str]:
        if self.do:
            return ["do {", *block_lines(self.body), f"}} while ({self.test.text()});"]
        return [f"while ({self.test.text()}) {{", *block_lines(self.body), "}"]


@dataclass(eq=False)
class Switch(Stmt):
    """Cases 0, 1, … of an int, each ending in ``break``; the last one is the default."""

    value: Expr
    cases: list[list[Stmt]]

    def lines(self) -> list[str]:
        out = [f"switch ({self.value.text()}) {{"]
        for i, body in enumerate(self.cases):
            label = "default" if i == len(self.cases) - 1 else f"case {i}"
            out += [f"{label}: {{", *block_lines(body), "    break;", "}"]
        return [*out, "}"]


@dataclass(eq=False)
class Jump(Stmt):
    kind: str  # "break" or "continue"

    def lines(self) -> list[str]:
        return [f"{self.kind};"]


@dataclass(eq=False)
class Return(Stmt):
    value: Expr | None = None

    def lines(self) -> list[str]:
        return ["return;" if self.value is None else f"return {self.value.text()};"]


@dataclass(eq=False)
class Block(Stmt):
    body: list[Stmt]

    def lines(self) -> list[str]:
        return ["{", *block_lines(self.body), "}"]


@dataclass(eq=False)
class Barrier(Stmt):
    name: str = "threadgroup_barrier"
    flags: str = "mem_flags::mem_threadgroup"

    def lines(self) -> list[str]:
        return [f"{self.name}({self.flags});"]


@dataclass(eq=False)
class AtomicAdd(Stmt):
    """An atomic addition to an element of threadgroup atomics or of an output of ints."""

    base: Var
    index: Expr
    value: Expr

    def lines(self) -> list[str]:
        place = f"&{self.base.name}[{self.index.text()}]"
        if self.base.kind == "output":
            place = f"(device atomic_{self.base.type.name}*){place}"
        return [f"atomic_fetch_add_explicit({place}, {self.value.text()}, memory_order_relaxed);"]


@dataclass(eq=False)
class AtomicStore(Stmt):
    base: Var
    index: Expr
    value: Expr

    def lines(self) -> list[str]:
        place = f"&{self.base.name}[{self.index.text()}]"
        return [f"atomic_store_explicit({place}, {self.value.text()}, memory_order_relaxed);"]


# -- the whole -------------------------------------------------------------------------------------


@dataclass
class Launch:
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    data: int  # which inputs


@dataclass
class Program:
    """A kernel with its launches.

    Attributes:
        header: macros, functions and tables before the kernel.
        inputs: for each input its variable, shape and layout (``plain``, ``strided`` or ``0d``).
        outputs: for each output its variable and its elements per thread (0: 16 in all).
        exact: every float is an integer that its type holds exactly.
        contract: products are fused with the sums that they are operands of.
        kind: ``flat``, ``simd`` or ``group``: what it synchronises.
    """

    seed: int
    header: list[Node]
    body: list[Stmt]
    inputs: list[tuple[Var, tuple[int, ...], str]]
    outputs: list[tuple[Var, int]]
    template: list[tuple[Var, Any]]
    launches: list[Launch]
    contiguous: bool = True
    exact: bool = True
    init: int = 0
    kind: str = ""
    contract: bool = True

    def header_text(self) -> str:
        pragma = [] if self.contract else ["#pragma METAL fp contract(off)"]
        return "\n".join(pragma + [n.text() for n in self.header])  # type: ignore[attr-defined]

    def body_text(self) -> str:
        return "\n".join(ln for s in self.body for ln in s.lines())

    def arrays(self, data: int) -> list[np.ndarray[Any, Any]]:
        """The inputs of one launch, in their layouts."""
        rng = np.random.default_rng(self.seed * 1000 + data)
        out = []
        for var, shape, layout in self.inputs:
            low, high = var.span
            assert isinstance(var.type, Type)
            values = rng.integers(int(low), int(high) + 1, size=shape).astype(var.type.dtype)
            if not self.exact and var.type.name == "float":
                values = (rng.standard_normal(shape) * 10).astype(np.float32)
            if layout == "strided":
                wide = np.repeat(values, 2, axis=-1)
                values = np.asfortranarray(wide)[..., ::2]
            out.append(values)
        return out


def children(node: Any) -> Iterator[Node]:
    """The nodes directly below a node, but not what its names refer to."""
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        if isinstance(node, (Call, MacroUse)) and f.name in ("function", "macro"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Node):
                yield item


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it."""
    yield node
    for child in children(node):
        yield from walk(child)
