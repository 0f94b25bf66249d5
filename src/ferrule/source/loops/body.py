"""A body as all stages see it: its tree, its variables, and what its names mean at a place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tree_sitter import Node

from ...kernel import ATTRIBUTES
from .. import words
from ..cpp import NotSplittable, Parameter, Prepared, body_line
from ..dialect import INTEGERS, MATRIX_OPS, SYNC
from ..syntax import (
    Tree,
    callee,
    declarator_shape,
    declarators,
    declared_name,
    field,
    function_definitions,
    kinds,
    struct_names,
)
from .assignments import aliased, passed_by_name, referred
from .matrices import matrix_arrays
from .statements import initial_value, inner_declarator

WORD = re.compile(r"[A-Za-z_]\w*")
# Calls that end a loop over lanes. Matrices may be loaded and stored by each lane for itself.
LANE_CALLS = words("simdgroup_load simdgroup_store")
SPLIT_CALLS = (SYNC - MATRIX_OPS) | {"simdgroup_multiply", "simdgroup_multiply_accumulate"}
# What says what names mean, and does nothing.
DEFINITIONS = words("""
    alias_declaration type_definition using_declaration static_assert_declaration
    struct_specifier class_specifier union_specifier enum_specifier
""")
# What a function that is given a variable by reference has, where the place may outlive the call:
# an address, a reference that it gives back, a member that is one.
_KEEPS = re.compile(r"(?:\breturn|[=(,{?:])\s*&\s*\w|\w\s*&\s*\w+\s*[(;]")
_NOT_UNDERSTOOD = {"function_declarator", "parenthesized_declarator"}


class Unit(NamedTuple):
    """The threads that run together.

    Attributes:
        simdgroup: they are a simdgroup, not a threadgroup.
        rows: they differ in x alone, so y and z are uniform.
        aligned: threadgroups are a multiple of 32 threads wide.
        row: a divisor, as the author wrote it: all of them have the same quotient of their x by it.
    """

    simdgroup: bool
    rows: bool
    aligned: bool = False
    row: str | None = None


@dataclass(frozen=True)
class Variable:
    """A variable of the body (or a parameter).

    Attributes:
        key: where its declarator starts; of a parameter, its name.
        name: as the author calls it.
        kind: ``value``, ``array``, ``reference``, ``lambda`` or ``shared`` (threadgroup memory).
        number: tells storage of equal names apart.
        type, value: its specifiers and its initialiser, as the author wrote them.
        text, line: of a lambda, its declaration.
        context: how deep in divergent control flow it is declared.
        uniform: whether all lanes hold one value.
        readonly: it points (if at all) to memory that the kernel never writes.
        pointer: it is known to be a pointer, so writing through it leaves it as it is.
        linear: an integer that counts up by one from lane to lane, and is never written.
    """

    key: int | str
    name: str
    kind: str = "value"
    number: int = 0
    type: str = ""
    value: str = ""
    is_const: bool = False
    text: str = ""
    line: int = 0
    context: int = 0
    uniform: bool = True
    readonly: bool = True
    pointer: bool = False
    written: bool = False
    linear: bool = False


Variables = dict[int | str, Variable]


@dataclass(frozen=True)
class Body:
    """A body, read for one kind of unit.

    Attributes:
        prepared: the kernel.
        tree: the body's text, rewritten, with its macros expanded.
        unit: the threads that run together.
        whole: no statement is split, as no thread waits for another.
        tiled: loads and stores of matrices end a loop over lanes, too.
    """

    prepared: Prepared
    tree: Tree
    unit: Unit
    whole: bool = False
    tiled: bool = False

    @cached_property
    def split_calls(self) -> frozenset[str]:
        """Calls that end a loop over lanes."""
        return SPLIT_CALLS | LANE_CALLS if self.tiled else SPLIT_CALLS

    @cached_property
    def matrix_arrays(self) -> set[str]:
        """Arrays whose matrices lie in one piece each."""
        return matrix_arrays(self.prepared.header, self.tree)

    @cached_property
    def parameters(self) -> list[Parameter]:
        return self.prepared.parameters

    @cached_property
    def attributes(self) -> list[str]:
        """The attributes that it names."""
        words = set(WORD.findall(self.tree.data.decode()))
        return [a for a in ATTRIBUTES if a in words]

    @cached_property
    def functions(self) -> frozenset[str]:
        """Calls of these may change what they are given: functions, and constructors."""
        header = self.prepared.header
        return frozenset([name for name, _ in function_definitions(header)]) | self.structs

    @cached_property
    def structs(self) -> frozenset[str]:
        """The structs and classes that the author defines."""
        return frozenset([*struct_names(self.prepared.header), *struct_names(self.tree)])

    @cached_property
    def integers(self) -> frozenset[str]:
        """Arguments and template parameters that are integers, or point to integers."""
        spec, inputs = self.prepared.spec, self.prepared.kernel.input_names
        names = [
            q.name for q in self.parameters if q.name.endswith(("_shape", "_strides", "_ndim"))
        ]
        names += [
            name
            for name, argument in zip(inputs, spec.inputs, strict=True)
            if {argument.dtype.metal, argument.dtype.metal.removesuffix("_t")} & INTEGERS
        ]
        return frozenset([*names, *(name for name, v in spec.template if type(v) is int)])

    @cached_property
    def _escaping(self) -> set[str]:
        """Names that something else may point or refer to, so that they must stay in memory.

        An array that is named without an index may have become a pointer.
        """
        names = {n for place in aliased(self.tree.block) for n in referred(self.tree, place)}
        lambdas = list(kinds(self.tree.block, "lambda_expression"))
        texts = [self.prepared.header.data.decode(), *map(self.tree.text, lambdas)]
        if any(map(_KEEPS.search, texts)):
            named = [declared_name(n.parent) for n in lambdas if n.parent is not None]
            called = self.functions.union(self.tree.text(name) for name in named if name)
            names.update(n for n, _ in passed_by_name(self.tree, self.tree.block, called))
        for node in kinds(self.tree.block, "identifier"):
            around = node.parent
            if around is None or field(around, "declarator") == node:
                continue
            array = field(around, "argument")
            if around.type != "subscript_expression" or array != node:
                names.add("[]" + self.tree.text(node))
        return names

    def escapes(self, variable: Variable) -> bool:
        """Whether something else may point or refer to a variable."""
        return variable.name in self._escaping or (
            variable.kind == "array" and "[]" + variable.name in self._escaping
        )

    @cached_property
    def _synchronising(self) -> list[tuple[int, int]]:
        calls = kinds(self.tree.block, "call_expression")
        return [
            (n.start_byte, n.end_byte) for n in calls if callee(self.tree, n) in self.split_calls
        ]

    def calls(self, node: Node) -> bool:
        """Whether a synchronising call stands in the node."""
        first, last = node.start_byte, node.end_byte
        return any(first <= start and end <= last for start, end in self._synchronising)

    def directive(self, at: Node | int) -> str:
        """The directive that says where in the author's source a node, or a line, stands."""
        return body_line(self.prepared, at if isinstance(at, int) else line_of(at))

    def variable(self, statement: Node, declarator: Node) -> Variable:
        """The variable of a declarator, as far as the declaration alone tells.

        Raises:
            NotSplittable: the declaration is not understood.
        """
        first, name = declarators(statement)[0], declared_name(declarator)
        spec = self.tree.data[statement.start_byte : first.start_byte].decode().strip()
        if name is None:
            raise NotSplittable(f"the declaration {self.tree.text(statement)!r} is not understood")
        value, shape = initial_value(declarator), declarator_shape(declarator)
        words, is_pointer = spec.split(), "pointer_declarator" in shape
        if value is not None and value.type == "lambda_expression":
            kind = "lambda"
        elif "reference_declarator" in shape:
            kind = "reference"
        elif "thread_local" in words and not is_pointer:
            kind = "shared"
        else:
            kind = "array" if "array_declarator" in shape else "value"
        text = self.tree.text(inner_declarator(declarator))
        if _NOT_UNDERSTOOD & set(shape) or "[]" in text.replace(" ", ""):
            raise NotSplittable(f"the declarator {text!r} is not understood")
        return Variable(
            declarator.start_byte,
            self.tree.text(name),
            kind,
            type=spec,
            value=self.tree.text(value),
            is_const="constexpr" in words or ("const" in words and not is_pointer),
            text=self.tree.text(statement) if kind == "lambda" else "",
            line=line_of(statement),
            pointer=(kind == "value" and is_pointer)
            or (kind == "shared" and "array_declarator" in shape),
        )


def read(p: Prepared, text: str, unit: Unit, *, whole: bool = False, tiled: bool = False) -> Body:
    """A body, read.

    Raises:
        NotSplittable: it has syntax that tree-sitter does not read.
    """
    tree = Tree(text, body=True)
    if tree.has_error:
        raise NotSplittable("the body has syntax that the splitter does not read")
    return Body(p, tree, unit, whole, tiled)


def line_of(node: Node) -> int:
    """The line of the author's text that a node starts on."""
    return node.start_point[0] + 1


class Scopes:
    """What names mean at a place of a body.

    Args:
        variables: those that are known, by their keys.
    """

    def __init__(self, body: Body, variables: Variables) -> None:
        self.body = body
        self.variables = variables
        self._scopes: list[dict[str, int | str]] = [{q.name: q.name for q in body.parameters}]

    def lookup(self, name: str) -> Variable | None:
        """The variable that a name means."""
        for scope in reversed(self._scopes):
            if name in scope:
                return self.variables[scope[name]]
        return None

    def enter(self, statement: Node, declarator: Node) -> Variable:
        """The variable of a declarator, which its name means from here on.

        Raises:
            NotSplittable: it is not known.
        """
        variable = self.variables.get(declarator.start_byte)
        if variable is None:
            name = self.body.variable(statement, declarator).name
            raise NotSplittable(f"{name} is declared where the analysis did not look")
        self._scopes[-1][variable.name] = variable.key
        return variable

    def declare(self, statement: Node | None) -> list[Variable]:
        """The variables of a declaration, as `enter` does it; of any other statement none."""
        if statement is None or statement.type != "declaration":
            return []
        return [self.enter(statement, d) for d in declarators(statement)]

    @contextmanager
    def inner(self) -> Iterator[None]:
        """A scope inside of the present one."""
        self._scopes.append({})
        yield
        self._scopes.pop()

    def names(self) -> set[str]:
        """All names that mean variables."""
        return set().union(*self._scopes)

    def visible(self) -> Iterator[Variable]:
        """The variables that names mean, those of inner scopes first."""
        seen: set[str] = set()
        for scope in reversed(self._scopes):
            yield from (self.variables[key] for name, key in scope.items() if name not in seen)
            seen |= scope.keys()

    def words(self, text: str) -> set[str]:
        """The words of a text, with those that its lambdas bring along."""
        words, added = set[str](), set(WORD.findall(text))
        while added:
            words |= added
            variables = filter(None, map(self.lookup, added))
            added = {word for v in variables for word in WORD.findall(v.text)} - words
        return words
