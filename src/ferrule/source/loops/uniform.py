"""Which variables of a body have the same value in every lane of a unit of work.

A unit is a simdgroup or a threadgroup. A variable that is uniform is one C++ variable of the split
text, outside the loops over lanes; any other is an array with one element per lane. To call a
variable uniform that is not would give wrong results, so whatever is not understood is not uniform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tree_sitter import Node

from ..dialect import INTEGERS, SYNC, UNIFORM_RESULTS, WIDE_INTEGERS
from ..syntax import Tree, callee, walk
from .assignments import WRITES_ARGUMENTS

# Attributes that are the same in every thread of a threadgroup.
GROUP_ATTRIBUTES = frozenset(
    {
        "threadgroup_position_in_grid", "threads_per_threadgroup", "simdgroups_per_threadgroup",
        "quadgroups_per_threadgroup", "dispatch_threads_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup",
        "threadgroups_per_grid", "threads_per_grid", "grid_size", "grid_origin",
        "threads_per_simdgroup", "thread_execution_width",
    }
)  # fmt: skip
GRID_X = "thread_position_in_grid.x"
POSITIONS = frozenset({"thread_position_in_grid", "thread_position_in_threadgroup"})
LANE_ATTRIBUTES = (
    frozenset(
        {
            "thread_index_in_threadgroup",
            "thread_index_in_simdgroup",
            "thread_index_in_quadgroup",
            "simdgroup_index_in_threadgroup",
            "quadgroup_index_in_threadgroup",
        }
    )
    | POSITIONS
)

# What counts up from a multiple of 32 within a simdgroup: always, and where threadgroups are a
# multiple of 32 threads wide.
_ALIGNED = frozenset({"thread_index_in_threadgroup"})
_ALIGNED_ROWS = frozenset({"thread_position_in_grid.x", "thread_position_in_threadgroup.x"})
POSITION_TEXTS = _ALIGNED | _ALIGNED_ROWS
# Types that hold each position as the number that it is, in grids of less than 2^31 threads.
_COUNTS = WIDE_INTEGERS | {"auto"}
_WIDTHS = frozenset({"threads_per_simdgroup", "thread_execution_width"})

_LITERALS = frozenset({"number_literal", "true", "false", "char_literal", "null", "nullptr"})
_PASS_THROUGH = frozenset(
    {
        "parenthesized_expression",
        "binary_expression",
        "conditional_expression",
        "unary_expression",
        "argument_list",
        "initializer_list",
        "sizeof_expression",
        "condition_clause",
        "subscript_argument_list",
        "comma_expression",
    }
)
_SKIPPED = frozenset(
    {
        "type_identifier",
        "primitive_type",
        "template_argument_list",
        "type_descriptor",
        "field_identifier",
        "sized_type_specifier",
        "namespace_identifier",
        "comment",
        "template_type",
        "placeholder_type_specifier",
    }
)


@dataclass
class Variable:
    """A variable of the body (or a parameter).

    Attributes:
        name: as the author calls it.
        context: how deep in divergent control flow it is declared.
        uniform: whether all lanes hold one value.
        readonly: it points (if at all) to memory that the kernel never writes.
        kind: ``value``, ``array``, ``reference``, ``lambda`` or ``shared`` (threadgroup memory).
        pointer: it is known to be a pointer, so writing through it leaves it as it is.
        names: of a lambda, what each of its words means where it is written.
        number: tells storage of equal names apart.
        type, value: its specifiers and its initialiser, as the author wrote them.
        linear: an integer that counts up by one from lane to lane, and is never written.
    """

    name: str
    context: int
    uniform: bool = True
    readonly: bool = True
    kind: str = "value"
    pointer: bool = False
    number: int = 0
    type: str = ""
    value: str = ""
    is_const: bool = False
    lambda_text: str = ""
    lambda_line: int = 0
    names: dict[str, Variable | None] = field(default_factory=dict)
    written: bool = False
    linear: bool = False


Scope = dict[str, Variable]


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
class KernelFacts:
    """What the analysis must know of the kernel and the unit.

    Attributes:
        outputs: names of the outputs.
        functions: what the header defines.
        integers: names of arguments and template parameters that are integers, or point to some.
    """

    unit: Unit
    outputs: frozenset[str]
    functions: frozenset[str]
    integers: frozenset[str]


class Uniformity:
    """Decides whether expressions are uniform, given what is known of variables so far."""

    def __init__(
        self, tree: Tree, facts: KernelFacts, lookup: Callable[[str], Variable | None]
    ) -> None:
        self.tree = tree
        self.facts = facts
        self.lookup = lookup

    def of(self, node: Node | None) -> bool:
        """Whether the expression has one value for all active lanes."""
        if node is None:
            return True
        kind = node.type
        if kind in _LITERALS or not node.is_named or kind in _SKIPPED:
            return True
        if kind == "identifier":
            return self._name(self.tree.text(node))
        if kind in ("qualified_identifier", "template_function"):
            return True  # metal::x, a constant or a function
        if kind == "field_expression":
            return self._field(node)
        if kind == "binary_expression" and (
            self._simdgroup_number(node) or self._row_number(node, "/")
        ):
            return True
        if kind == "subscript_expression":
            return self._memory(node) and all(self.of(c) for c in node.children)
        if kind == "pointer_expression":
            operator = node.children[0].type
            inner = node.child_by_field_name("argument")
            if operator == "&" or inner is None:
                return False
            return self.of(inner) and self._readonly(inner)
        if kind == "cast_expression":
            return self.of(node.child_by_field_name("value"))
        if kind == "call_expression":
            return self._call(node)
        if kind == "compound_literal_expression":
            return all(self.of(c) for c in node.children)
        if kind in _PASS_THROUGH:
            return all(self.of(c) for c in node.children)
        return False

    def _name(self, name: str) -> bool:
        variable = self.lookup(name)
        if variable is not None:
            if variable.kind == "shared":
                return variable.pointer  # its address; what it holds may change at any statement
            return variable.uniform and variable.kind != "lambda"
        if name in LANE_ATTRIBUTES:
            return name == "simdgroup_index_in_threadgroup" and self.facts.unit.simdgroup
        return True  # a constant of the header, or a template parameter

    def _simdgroup_number(self, node: Node) -> bool:
        """Whether an expression divides a position, which is uniform but for its last 5 bits."""
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if left is None or right is None or not self.facts.unit.simdgroup:
            return False
        position = self.tree.text(left)
        variable = self.lookup(position)
        if variable is not None and not variable.written and variable.kind == "value":
            position = variable.value
            if not set(variable.type.split()) & _COUNTS:
                return False  # it may hold fractions, or wrap to negative numbers
        in_step = self.facts.unit.aligned and self.facts.unit.rows
        if position not in _ALIGNED and not (position in _ALIGNED_ROWS and in_step):
            return False
        by = self.tree.text(right).rstrip("uU")
        decimal = by.isdecimal() and not by.startswith("0")
        operator = node.children[1].type
        if operator == "/":
            return by in _WIDTHS or (decimal and int(by) > 0 and int(by) % 32 == 0)
        return operator == ">>" and decimal and int(by) >= 5

    def _row_number(self, node: Node, operator: str) -> bool:
        """Whether an expression divides x by the length of the row that all lanes are in."""
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if self.facts.unit.row is None or left is None or right is None:
            return False
        return (
            node.children[1].type == operator
            and self.position(left)
            and bare(self.tree.text(right)) == self.facts.unit.row
        )

    def position(self, node: Node) -> bool:
        """Whether an expression is the thread's x in the grid."""
        text = self.tree.text(node)
        variable = self.lookup(text)
        if variable is not None and not variable.written and variable.kind == "value":
            text = variable.value if set(variable.type.split()) & _COUNTS else ""
        return text == GRID_X

    def linear(self, node: Node | None) -> bool:
        """Whether an expression, if it is an integer, counts up by one from lane to lane."""
        if node is None:
            return False
        kind = node.type
        if kind == "parenthesized_expression":
            return bool(node.named_children) and self.linear(node.named_children[0])
        if kind == "identifier":
            variable = self.lookup(self.tree.text(node))
            if variable is not None:
                return variable.linear
            return self.counts(self.tree.text(node))
        if kind == "field_expression":
            base = node.child_by_field_name("argument")
            return (
                self.facts.unit.rows
                and self.tree.text(node) in _ALIGNED_ROWS
                and base is not None
                and self.lookup(self.tree.text(base)) is None
            )
        if kind == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            operator = node.children[1].type
            if operator == "%":
                return self._row_number(node, "%")
            if operator == "+" and self.of(left) and self.linear(right):
                return True
            return operator in ("+", "-") and self.linear(left) and self.of(right)
        if kind in ("call_expression", "cast_expression"):
            # A conversion, of nothing that may have been a fraction.
            type_node = node.child_by_field_name(
                "function" if kind == "call_expression" else "type"
            )
            operand = node.child_by_field_name(
                "arguments" if kind == "call_expression" else "value"
            )
            if (
                type_node is None
                or operand is None
                or self.tree.text(type_node) not in WIDE_INTEGERS
            ):
                return False
            if operand.type == "argument_list":
                operand = operand.named_children[0] if operand.named_child_count == 1 else None
            plain = ("identifier", "field_expression", "parenthesized_expression")
            return operand is not None and operand.type in plain and self.whole(operand)
        return False

    def counts(self, attribute: str) -> bool:
        """Whether an attribute is a number that counts up by one from lane to lane."""
        if attribute == "thread_index_in_simdgroup":
            return self.facts.unit.simdgroup
        return attribute == "thread_index_in_threadgroup"

    def whole(self, node: Node | None) -> bool:
        """Whether a linear expression is made of integers alone."""
        return node is not None and self.linear(node) and self._integral(node)

    def _integral(self, node: Node) -> bool:
        kind = node.type
        text = self.tree.text(node)
        if kind == "number_literal":
            return text.rstrip("uUlL").isdecimal()
        if kind == "identifier":
            variable = self.lookup(text)
            if variable is not None and text not in self.facts.integers:
                return bool(set(variable.type.split()) & INTEGERS) and variable.kind == "value"
            return text in self.facts.integers or text in LANE_ATTRIBUTES | _WIDTHS
        if kind == "field_expression":
            return text.split(".")[0] in GROUP_ATTRIBUTES | POSITIONS
        if kind in ("parenthesized_expression", "binary_expression", "subscript_expression"):
            inner = [c for c in node.named_children if c.type != "comment"]
            if kind == "subscript_expression":
                inner = inner[:1]  # what it is an element of
            return all(self._integral(c) for c in inner)
        if kind == "call_expression":
            function = node.child_by_field_name("function")
            return function is not None and self.tree.text(function) in INTEGERS
        return False

    def _field(self, node: Node) -> bool:
        base = node.child_by_field_name("argument")
        name = node.child_by_field_name("field")
        if base is None or name is None:
            return False
        if base.type == "identifier" and self.tree.text(base) in POSITIONS:
            return self.facts.unit.rows and self.tree.text(name) in ("y", "z")
        if any(c.type == "->" for c in node.children):
            return self.of(base) and self._readonly(base)
        return self.of(base)

    def _memory(self, node: Node) -> bool:
        base = node.child_by_field_name("argument")
        return base is not None and self._readonly(base)

    def _readonly(self, node: Node) -> bool:
        """Whether what this expression points to is never written while the kernel runs."""
        for part in walk(node):
            if part.type != "identifier":
                continue
            name = self.tree.text(part)
            variable = self.lookup(name)
            if variable is not None:
                if not variable.readonly or variable.kind in ("shared", "lambda"):
                    return False
            elif name in self.facts.outputs:
                return False
        return True

    def pointer(self, node: Node | None) -> bool:
        """Whether an expression is known to be a pointer."""
        if node is None:
            return False
        if node.type == "identifier":
            variable = self.lookup(self.tree.text(node))
            return variable is not None and variable.pointer
        if node.type == "binary_expression" and node.children[1].type in ("+", "-"):
            return self.pointer(node.child_by_field_name("left"))
        if node.type == "parenthesized_expression":
            return self.pointer(node.named_children[0] if node.named_children else None)
        if node.type == "cast_expression":
            kind = node.child_by_field_name("type")
            return kind is not None and self.tree.text(kind).rstrip().endswith("*")
        if node.type == "pointer_expression":
            return node.children[0].type == "&"
        return False

    def readonly(self, node: Node | None) -> bool:
        """Whether a pointer made by this expression points to memory that is never written."""
        return node is None or self._readonly(node)

    def _call(self, node: Node) -> bool:
        function = node.child_by_field_name("function")
        arguments = node.child_by_field_name("arguments")
        if function is None:
            return False
        name = callee(self.tree, node)
        if name in SYNC:
            if not self.facts.unit.simdgroup:
                return False
            return name in UNIFORM_RESULTS
        if name.startswith("atomic_") or name in WRITES_ARGUMENTS:
            return False
        if function.type == "field_expression":
            method = function.child_by_field_name("field")
            # Only swizzles are methods that change nothing.
            if method is None or self.tree.text(method) not in ("swz",):
                return False
            return self.of(function.child_by_field_name("argument"))
        if function.type == "identifier":
            text = self.tree.text(function)
            if text in self.facts.functions or self.lookup(text):
                return False
        elif function.type not in (
            "qualified_identifier",
            "template_function",
            "primitive_type",
            "template_type",
            "type_identifier",
            "sized_type_specifier",
        ):
            return False
        if self.tree.text(function).split("<")[0] in self.facts.functions:
            return False
        return arguments is None or all(
            self.of(c) and self._not_memory(c) for c in arguments.named_children
        )

    def _not_memory(self, node: Node) -> bool:
        """An argument that is a pointer may be read through: only constant memory is safe."""
        return self._readonly(node)


def bare(text: str) -> str:
    """The text of an expression without spaces and parentheses around it."""
    text = "".join(text.split())
    while text.startswith("(") and text.endswith(")") and _one_group(text):
        text = text[1:-1]
    return text


def _one_group(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
