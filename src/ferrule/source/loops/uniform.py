"""Which expressions of a body have the same value in every lane of a unit of work.

A unit is a simdgroup or a threadgroup. A variable that is uniform is one C++ variable of the split
text, outside the loops over lanes; any other is an array with one element per lane. To call a
variable uniform that is not would give wrong results, so whatever is not understood is not uniform.
"""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from .. import words
from ..dialect import INTEGERS, LINEAR_TYPES, SYNC, UNIFORM_RESULTS, WIDE_INTEGERS
from ..syntax import callee, declarators, declared_name, field, kinds, operands, part
from .assignments import WRITES_ARGUMENTS
from .body import Scopes
from .statements import LOOPS, branches, changed, expression, initial_value, jumps_out
from .strides import Stride, ordered, stride

# Attributes that are the same in every thread of a threadgroup.
GROUP_ATTRIBUTES = words("""
    threadgroup_position_in_grid threads_per_threadgroup simdgroups_per_threadgroup
    quadgroups_per_threadgroup dispatch_threads_per_threadgroup
    dispatch_simdgroups_per_threadgroup dispatch_quadgroups_per_threadgroup
    threadgroups_per_grid threads_per_grid grid_size grid_origin
    threads_per_simdgroup thread_execution_width
""")
GRID_X = "thread_position_in_grid.x"
POSITIONS = frozenset({"thread_position_in_grid", "thread_position_in_threadgroup"})
LANE_ATTRIBUTES = POSITIONS | words("""
    thread_index_in_threadgroup thread_index_in_simdgroup thread_index_in_quadgroup
    simdgroup_index_in_threadgroup quadgroup_index_in_threadgroup
""")

# What counts up from a multiple of 32 within a simdgroup: always, and where threadgroups are a
# multiple of 32 threads wide.
_ALIGNED = frozenset({"thread_index_in_threadgroup"})
_ALIGNED_ROWS = frozenset({"thread_position_in_grid.x", "thread_position_in_threadgroup.x"})
POSITION_TEXTS = _ALIGNED | _ALIGNED_ROWS
# Types that hold each position as the number that it is, in grids of less than 2^31 threads.
_COUNTS = WIDE_INTEGERS | {"auto"}
_WIDTHS = frozenset({"threads_per_simdgroup", "thread_execution_width"})

# Literals, types, and what names a constant or a function: `metal::x`.
_CONSTANTS = words("""
    number_literal true false char_literal null nullptr
    type_identifier primitive_type template_argument_list type_descriptor field_identifier
    sized_type_specifier namespace_identifier comment template_type placeholder_type_specifier
    qualified_identifier template_function
""")
# What is uniform where all its parts are.
_OF_PARTS = words("""
    parenthesized_expression binary_expression conditional_expression unary_expression
    argument_list initializer_list sizeof_expression condition_clause subscript_argument_list
    comma_expression subscript_expression compound_literal_expression
""")
# What a conversion, or a function without effects, is called by.
_PLAIN_CALLEES = words("""
    identifier qualified_identifier template_function primitive_type template_type
    type_identifier sized_type_specifier
""")
_NUMBERS = INTEGERS | words("const float half bfloat double bool")
_PLAIN_OPERANDS = ("identifier", "field_expression", "parenthesized_expression")


class Value(NamedTuple):
    """What is known of an expression.

    Attributes:
        uniform: it has one value for all active lanes.
        linear: it counts up by one from lane to lane, if it is an integer.
        integral: it is made of integers alone.
        pointer: it is known to be a pointer.
    """

    uniform: bool
    linear: bool = False
    integral: bool = False
    pointer: bool = False


class Uniformity:
    """Decides whether expressions are uniform, given what is known of variables so far."""

    def __init__(self, scopes: Scopes) -> None:
        self.scopes, self.lookup = scopes, scopes.lookup
        self.body, self.tree, self.unit = scopes.body, scopes.body.tree, scopes.body.unit
        self._at_once = False  # what is asked about is evaluated where it stands, for all lanes

    def of(self, node: Node | None) -> bool:
        """Whether an expression has one value for all active lanes."""
        return node is None or self.value(node).uniform

    def at_once(self, node: Node | None) -> Value:
        """What is known of an expression that is evaluated once, where it stands.

        Between two barriers a place of threadgroup memory that all lanes read is written by none of
        them, so they read one value.
        """
        self._at_once = not self.body.whole
        try:
            return Value(True) if node is None else self.value(node)
        finally:
            self._at_once = False

    def reads_shared(self, node: Node) -> bool:
        """Whether an expression names threadgroup memory."""
        variables = (self.lookup(self.tree.text(n)) for n in kinds(node, "identifier"))
        return any(v is not None and v.kind == "shared" for v in variables)

    def value(self, node: Node) -> Value:
        """What is known of an expression."""
        kind, text = node.type, self.tree.text(node)
        if kind in _CONSTANTS or not node.is_named:
            return Value(
                True, integral=kind == "number_literal" and text.rstrip("uUlL").isdecimal()
            )
        if kind == "identifier":
            return self._identifier(text)
        if kind == "field_expression":
            return self._field(node)
        if kind == "binary_expression":
            return self._binary(node)
        if kind == "parenthesized_expression":
            return self.value(node.named_children[0])
        if kind == "cast_expression":
            to, operand = self.tree.text(part(node, "type")), part(node, "value")
            value = self.value(operand)
            linear = self._converts(to, operand, value)
            return Value(value.uniform, linear, pointer=to.rstrip().endswith("*"))
        if kind == "call_expression":
            return self._call(node)
        if kind == "pointer_expression":
            address, inner = node.children[0].type == "&", part(node, "argument")
            uniform = not address and self.of(inner) and self.readonly(inner)
            return Value(uniform, pointer=address)
        if kind == "subscript_expression":
            base = part(node, "argument")
            value = self.value(base)
            uniform = value.uniform and self.readonly(base) and self.of(part(node, "indices"))
            return Value(uniform, integral=value.integral)
        return Value(kind in _OF_PARTS and all(map(self.of, node.children)))

    def _identifier(self, name: str) -> Value:
        variable, integers = self.lookup(name), self.body.integers
        if variable is None:
            # An attribute, or else a constant of the header, or a template parameter.
            uniform = name not in LANE_ATTRIBUTES or (
                name == "simdgroup_index_in_threadgroup" and self.unit.simdgroup
            )
            integral = name in integers or name in LANE_ATTRIBUTES | _WIDTHS
            return Value(uniform, self.counts(name), integral)
        # The address of threadgroup memory; what it holds may change at any statement.
        shared, integer = variable.kind == "shared", bool(set(variable.type.split()) & INTEGERS)
        return Value(
            variable.pointer or self._at_once
            if shared
            else variable.uniform and variable.kind != "lambda",
            variable.linear,
            name in integers or (integer and variable.kind == "value"),
            variable.pointer,
        )

    def counts(self, attribute: str) -> bool:
        """Whether an attribute is a number that counts up by one from lane to lane."""
        if attribute == "thread_index_in_simdgroup":
            return self.unit.simdgroup
        return attribute == "thread_index_in_threadgroup"

    def _field(self, node: Node) -> Value:
        text, base = self.tree.text(node), part(node, "argument")
        linear = self.unit.rows and text in _ALIGNED_ROWS
        linear = linear and self.lookup(self.tree.text(base)) is None
        integral = text.split(".")[0] in GROUP_ATTRIBUTES | POSITIONS
        if base.type == "identifier" and self.tree.text(base) in POSITIONS:
            straight = self.tree.text(part(node, "field")) in ("y", "z")
            return Value(self.unit.rows and straight, linear, integral)
        through = any(c.type == "->" for c in node.children)
        uniform = self.of(base) and not (through and not self.readonly(base))
        return Value(uniform, linear, integral)

    def _binary(self, node: Node) -> Value:
        left, operator, right = operands(node)
        a, b = self.value(left), self.value(right)
        row = self.position(left) and bare(self.tree.text(right)) == self.unit.row
        uniform = (a.uniform and b.uniform) or (operator == "/" and row)
        if operator == "%":
            linear = row
        else:
            linear = operator in ("+", "-") and a.linear and b.uniform
            linear |= operator == "+" and a.uniform and b.linear
        return Value(
            uniform or self._simdgroup_number(left, operator, right),
            linear,
            a.integral and b.integral,
            operator in ("+", "-") and a.pointer,
        )

    def held(self, node: Node) -> str:
        """An expression; for a variable that holds a position as it is, that position.

        Nothing for one whose type may hold fractions, or wrap to negative numbers.
        """
        text = self.tree.text(node)
        variable = self.lookup(text)
        if variable is None or variable.written or variable.kind != "value":
            return text
        return variable.value if set(variable.type.split()) & _COUNTS else ""

    def position(self, node: Node) -> bool:
        """Whether an expression is the thread's x in the grid."""
        return self.held(node) == GRID_X

    def _simdgroup_number(self, left: Node, operator: str, right: Node) -> bool:
        """Whether an expression divides a position, which is uniform but for its last 5 bits."""
        in_step = self.unit.aligned and self.unit.rows
        positions = POSITION_TEXTS if in_step else _ALIGNED
        if not self.unit.simdgroup or self.held(left) not in positions:
            return False
        by = self.tree.text(right).rstrip("uU")
        decimal = by.isdecimal() and not by.startswith("0")
        if operator == "/":
            return by in _WIDTHS or (decimal and int(by) > 0 and int(by) % 32 == 0)
        return operator == ">>" and decimal and int(by) >= 5

    def _converts(self, to: str, operand: Node, value: Value) -> bool:
        """Whether a conversion is one of what counts up, and that may not have been a fraction."""
        whole = value.linear and value.integral
        return whole and to in WIDE_INTEGERS and operand.type in _PLAIN_OPERANDS

    def _call(self, node: Node) -> Value:
        function, arguments = part(node, "function"), part(node, "arguments").named_children
        name, text = callee(self.tree, node), self.tree.text(function)
        values = list(map(self.value, arguments))
        if name in SYNC:
            uniform = self.unit.simdgroup and name in UNIFORM_RESULTS
        elif name.startswith("atomic_") or name in WRITES_ARGUMENTS:
            uniform = False
        elif function.type == "field_expression":
            # Only swizzles are methods that change nothing.
            swizzles = self.tree.text(part(function, "field")) == "swz"
            uniform = swizzles and self.of(part(function, "argument"))
        elif (
            function.type not in _PLAIN_CALLEES
            or text.split("<")[0] in self.body.functions
            or (function.type == "identifier" and self.lookup(text) is not None)
        ):
            uniform = False
        else:
            # An argument that is a pointer may be read through: only constant memory is safe.
            uniform = all(v.uniform for v in values) and all(map(self.readonly, arguments))
        linear = len(values) == 1 and self._converts(text, arguments[0], values[0])
        return Value(uniform, linear, text in INTEGERS)

    def readonly(self, node: Node) -> bool:
        """Whether what an expression points to is never written while the kernel runs."""
        for name in map(self.tree.text, kinds(node, "identifier")):
            variable = self.lookup(name)
            if variable is None:
                if name in self.body.prepared.kernel.output_names:
                    return False
            elif variable.kind == "shared":
                if not self._at_once or "volatile" in variable.type.split():
                    return False
            elif variable.kind == "value" and not variable.pointer and _is_number(variable.type):
                continue  # it points to nothing
            elif not variable.readonly or variable.kind == "lambda":
                return False
        return True

    # -- which statements are split --------------------------------------------------------------

    def splits(self, statement: Node) -> bool:
        """Whether a statement cannot be part of one loop over lanes."""
        if self.body.whole:
            return False
        if self.body.calls(statement):
            return True
        if self._decides(statement) if self.unit.row is not None else self._strides(statement):
            return True
        if statement.type in LOOPS and not jumps_out(statement) and self._alike(statement):
            return True
        # A uniform jump is better made once for all lanes than once for each.
        if statement.type == "compound_statement":
            return any(self.splits(c) for c in statement.named_children)
        if statement.type == "if_statement" and jumps_out(statement):
            return self.of(part(statement, "condition"))
        return statement.type in ("return_statement", "break_statement", "continue_statement")

    def stride(self, statement: Node) -> Stride | None:
        """The head of a loop that lanes go through in step, taking neighbouring elements."""
        found = stride(self.body, statement) if self.unit.row is None else None
        if found is None or not (self.of(found.bound) and self.of(found.step)):
            return None
        first = self.value(found.first)
        held = self.held(found.first)
        narrow = self.tree.text(found.start).split()[0] in LINEAR_TYPES
        if not narrow and held not in POSITION_TEXTS and not self.counts(held):
            return None  # it may have wrapped in 32 bits before it became the counter
        return found if first.linear and first.integral else None

    def _strides(self, statement: Node) -> bool:
        """Whether a statement is such a loop, or has one that is worth a loop of its own."""
        if self.stride(statement) is not None:
            return True
        if statement.type == "for_statement" and self.columns(statement):
            return True
        if statement.type == "if_statement" and not jumps_out(statement):
            return any(b is not None and self._strides(b) for b in branches(statement))
        if statement.type in ("compound_statement", "else_clause"):
            return any(self._strides(c) for c in statement.named_children)
        return (
            statement.type in LOOPS
            and self.of(field(statement, "condition"))
            and not jumps_out(statement)
            and self._strides(part(statement, "body"))
        )

    def _alike(self, statement: Node) -> bool:
        """Whether a statement does nothing but change variables that all lanes share."""
        kind = statement.type
        if kind == "declaration":
            return all(self.at_once(initial_value(d)).uniform for d in declarators(statement))
        if kind in ("compound_statement", "else_clause"):
            return all(map(self._alike, statement.named_children))
        if kind == "if_statement" or kind in LOOPS:
            start = field(statement, "initializer")
            parts = [p for p in (*branches(statement), field(statement, "body")) if p is not None]
            parts += [start] if start is not None and start.type == "declaration" else []
            return self.of(field(statement, "condition")) and all(map(self._alike, parts))
        node = expression(statement) if kind == "expression_statement" else None
        target = changed(node) if node is not None else None
        if target is None or target.type != "identifier":
            return kind == "comment"
        variable = self.lookup(self.tree.text(target))
        shared = variable is not None and variable.uniform and variable.kind == "value"
        return shared and self.at_once(field(node, "right")).uniform

    def _decides(self, statement: Node) -> bool:
        """Whether lanes of a row decide an `if` in a statement once, or go down columns in it."""
        if statement.type == "if_statement":
            if self.of(part(statement, "condition")):
                return True
            return any(b is not None and self._decides(b) for b in branches(statement))
        if statement.type in ("compound_statement", "else_clause"):
            return any(self._decides(c) for c in statement.named_children)
        return (
            statement.type in LOOPS
            and self.of(field(statement, "condition"))
            and not jumps_out(statement)
            and (self._decides(part(statement, "body")) or self.columns(statement))
        )

    def columns(self, statement: Node) -> bool:
        """Whether lanes go down columns: all have the same rounds of a loop, and take neighbouring
        elements in each.

        Lane by lane, such a loop takes elements that are far from each other. One whose rounds
        are counted in its text is unrolled by compilers, and needs no such care.
        """
        start, condition = field(statement, "initializer"), field(statement, "condition")
        if start is None or start.type != "declaration" or condition is None:
            return False
        body, rounds = part(statement, "body"), [initial_value(d) for d in declarators(start)]
        if jumps_out(statement) or not all(map(self.of, [condition, *rounds])):
            return False
        computed = any(True for v in rounds if v is not None for _ in kinds(v, "identifier"))
        counted = not computed and any(True for _ in kinds(condition, "number_literal"))
        if counted or any(True for _ in kinds(body, *LOOPS)) or ordered(self.body, statement):
            return False
        # An index may have a name in the loop, of which nothing is known before it is split.
        local = (d for n in kinds(body, "declaration") for d in declarators(n))
        named = ((declared_name(d), initial_value(d)) for d in local)
        own = {self.tree.text(name): value for name, value in named if name is not None}
        indices = [
            part(e, "indices").named_children[0] for e in kinds(body, "subscript_expression")
        ]
        found = [self.value(own.get(self.tree.text(index)) or index) for index in indices]
        return any(v.linear for v in found) and all(v.linear or v.uniform for v in found)


def _is_number(spec: str) -> bool:
    return bool(spec) and set(spec.split()) <= _NUMBERS


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
