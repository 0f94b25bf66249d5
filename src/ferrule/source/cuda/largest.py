"""The largest value of an index, for all threads of a launch, as an expression.

Of what is the same for all: places in the grid, dims, sizes, template parameters, the ends of the
loops that a variable counts in, and what the author's conditions compare a variable with. Sums and
products of numbers that are not negative grow with each of these, as quotients by what is the
same for all; whatever else an index has, nothing is said of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tree_sitter import Node

from .. import described
from ..cpp import Prepared
from ..dialect import WIDE_INTEGERS
from ..syntax import Tree, call_arguments, field, operands, part
from .conditions import around, comparisons
from .reads import IndexVariable
from .variables import Variables

_QUALIFIERS = frozenset({"const", "constexpr", "static"})
_COMPONENTS = "xyz"
# What shows that a number that is as large, or larger, is not negative: beside `0u` it is unsigned.
_LEAST = {">": ("0", "-1"), ">=": ("0",), "==": ("0", "0u", "0U")}
_LONGEST = 4000  # characters of an expression
_DEEPEST = 4  # conditions whose ends other conditions limit
_FIRST = re.compile(r"\.swz\(::fr::ix<0, ?1(?:, ?2)?>\{\}\)$")  # `.xy` and `.xyz`, rewritten
# Along an axis: what of `fr::launch` it is, and whether it is less than that.
_VECTORS = {
    "thread_position_in_grid": ("grid", True),
    "thread_position_in_threadgroup": ("threadgroup", True),
    "threadgroup_position_in_grid": ("groups", True),
    "threads_per_grid": ("grid", False),
    "grid_size": ("grid", False),
    "threads_per_threadgroup": ("threadgroup", False),
    "dispatch_threads_per_threadgroup": ("threadgroup", False),
    "threadgroups_per_grid": ("groups", False),
}
_THREADS = "fr_l.threadgroup[0] * fr_l.threadgroup[1] * fr_l.threadgroup[2]"
_NUMBERS = {
    "thread_index_in_threadgroup": (_THREADS, True),
    "thread_index_in_simdgroup": ("32u", True),
    "thread_index_in_quadgroup": ("4u", True),
    "simdgroup_index_in_threadgroup": (f"({_THREADS} + 31u) / 32u", True),
    "simdgroups_per_threadgroup": (f"({_THREADS} + 31u) / 32u", False),
    "threads_per_simdgroup": ("32u", False),
    "thread_execution_width": ("32u", False),
}
_LITERAL = re.compile(r"(0|[1-9]\d{0,9}|0[xX][0-9a-fA-F]{1,8})[uUlL]*")
_UNSIGNED = re.compile(r"u\w+|unsigned|size_t")


class Most(NamedTuple):
    """The largest that an expression gets, as C++: of which leaves, and how it is made."""

    text: str
    leaves: frozenset[str] = frozenset()
    product: bool = False  # of two leaves
    scaled: bool = False  # a leaf times a number
    exact: bool = False  # the value itself, in all threads
    divided: bool = False  # by a leaf


class Largest(Variables):
    """Largest values in one body."""

    def __init__(
        self, p: Prepared, source: str, tree: Tree, arrays: Mapping[str, tuple[int, str, bool]]
    ) -> None:
        super().__init__(p, source, tree, arrays)
        self.template = dict(p.spec.template)
        integers = ((n, i) for n, i, _ in described(p.spec) if i.dtype.kind in "iu")
        self._numbers = {name for name, input_ in integers if input_.value}
        self._of_variables: dict[IndexVariable, Most | None] = {}
        self._limits: dict[int, Most | None] = {}  # by conditions, of what is named at a place
        self._depth = 0

    def most(self, node: Node | None) -> Most | None:
        """The largest value of an expression that is never negative; None if it is not known."""
        largest = None if node is None else self._most(node)
        return largest if largest is not None and len(largest.text) <= _LONGEST else None

    def _most(self, node: Node) -> Most | None:
        kind, text = node.type, self.tree.text(node)
        if kind == "number_literal":
            literal = _LITERAL.fullmatch(text)
            value = int(literal[1], 0) if literal is not None else 1 << 31
            return number(value) if value < 1 << 31 else None
        if kind == "identifier":
            return self._of_name(node, text)
        if kind == "parenthesized_expression" and node.named_child_count == 1:
            return self.most(node.named_children[0])
        if kind == "field_expression":
            return self._of_component(node)
        if kind == "subscript_expression":
            return self._of_size(node)
        if kind == "cast_expression" and _is_integer(self.tree.text(field(node, "type"))):
            return self.most(field(node, "value"))
        if kind == "call_expression":
            return self._of_call(node)
        if kind == "binary_expression":
            return self._of_operation(node)
        return None

    def _of_operation(self, node: Node) -> Most | None:
        left, operator, right = operands(node)
        a = self.most(left)
        if operator == "<<":
            literal = _LITERAL.fullmatch(self.tree.text(right))
            if a is None or literal is None or int(literal[1], 0) > 30:
                return None
            return _times(a, number(1 << int(literal[1], 0)))
        b = self.most(right)
        if a is None or b is None:
            return None
        if operator == "*":
            return _times(a, b)
        if operator == "+":
            return _joined("{} + {}", a, b)
        if operator in ("/", "%") and b.exact:
            quotient = _joined(f"{{}}.fr_{'over' if operator == '/' else 'rest'}({{}})", a, b)
            exact = quotient.exact and operator == "/"  # of a remainder the largest is known alone
            return quotient._replace(exact=exact, divided=quotient.divided or bool(b.leaves))
        if operator == "-" and a.exact and b.exact:
            return _joined("{}.fr_less({})", a, b)
        return None

    def _of_call(self, node: Node) -> Most | None:
        function, arguments = part(node, "function"), call_arguments(node)
        name = self.tree.text(function)
        if len(arguments) == 1 and _is_integer(re.sub(r"^static_cast<(.*)>$", r"\1", name)):
            return self.most(arguments[0])
        if function.start_byte in self.uses or not self.reads.is_library(name):
            return None
        name = name.removeprefix("metal::")
        if len(arguments) == 2 and name in ("min", "max"):
            a, b = map(self.most, arguments)
            if a is not None and b is not None:
                relation = "smaller" if name == "min" else "larger"
                return _joined(f"::fr::bounds::fr_{relation}({{}}, {{}})", a, b)
        if len(arguments) == 3 and name == "clamp" and self._is_whole(arguments[0]):
            if self.most(arguments[1]) != number(0):
                return None
            upper = self.most(arguments[2])  # that it is not negative is looked at, too
            return upper and upper._replace(exact=False)
        return None

    def _is_whole(self, node: Node) -> bool:
        """Whether an expression is an integer, of 32 bits or more."""
        if node.type == "identifier":
            variable = self.uses.get(node.start_byte)
            if variable is not None and variable.plain and _is_integer(variable.type):
                return True
        if node.type == "binary_expression" and node.children[1].type in tuple("+-*/%"):
            return self._is_whole(node.children[0]) and self._is_whole(node.children[2])
        if node.type == "parenthesized_expression" and node.named_child_count == 1:
            return self._is_whole(node.named_children[0])
        if node.type in ("call_expression", "cast_expression"):
            return _is_integer(self.tree.text(field(node, "function") or field(node, "type")))
        return self.most(node) is not None

    def _of_name(self, node: Node, name: str) -> Most | None:
        variable, place = self.uses.get(node.start_byte), node.start_byte
        if variable is not None and self.parameters.get(name) is not variable:
            if variable not in self._of_variables:
                self._of_variables[variable] = None  # while it is evaluated, it is not known
                self._of_variables[variable] = self._of_variable(variable)
            most = self._of_variables[variable]
            if most is None and place not in self._limits:
                self._limits[place] = self._by_conditions(node, variable)
            return most or self._limits[place]
        if name in self._numbers:
            return _leaf(f"::fr::fr_most({name})") if variable and not variable.written else None
        if name in self.template:
            value = self.template[name]
            return number(value) if type(value) is int and value >= 0 else None
        if name in _NUMBERS:
            return _attribute(*_NUMBERS[name])
        constant = variable is None and name in self.reads.header.constants
        return _leaf(f"::fr::fr_most({name})") if constant else None

    def _of_variable(self, v: IndexVariable) -> Most | None:
        if v.written or v.updates or not v.plain or not _is_integer(v.type, deduced=True):
            return None
        return self.most(v.value)

    def _by_conditions(self, node: Node, v: IndexVariable) -> Most | None:
        """The largest value of a variable where the conditions around compare it with others."""
        wrong = v.written or not v.plain or not _is_integer(v.type) or v.value is None
        if wrong or self.jumps or self._depth > _DEEPEST:
            return None
        end: Most | None = None
        own: tuple[Most, bool] | None = None  # the end by the condition of the loop that counts
        below = False
        head = field(v.loop, "condition")
        positive = any(_UNSIGNED.fullmatch(word) for word in v.type.split())
        self._depth += 1
        for condition, holds in around(self.parents, node):
            for left, operator, right in comparisons(self.tree, condition, holds):
                if left.type != "identifier" or self.uses.get(left.start_byte) is not v:
                    continue
                positive = positive or self.tree.text(right) in _LEAST.get(operator, ())
                if operator not in ("<", "<=", "=="):
                    continue
                in_head = head is not None and condition.id == head.id and operator != "=="
                last = self.most(right) if end is None or in_head else None
                if end is None:
                    end, below = last, operator == "<"
                if in_head:
                    own = None if last is None else (last, operator == "<")
            if end is not None and positive:
                break
        self._depth -= 1
        if end is None:
            return None
        upper = end._replace(text=f"{end.text}.fr_below()" if below else end.text, exact=False)
        if positive:
            return upper
        return None if own is None else self._counted(v, upper, *own)

    def _counted(self, v: IndexVariable, upper: Most, end: Most, below: bool) -> Most | None:
        """The largest value of what a loop counts: from what is not negative, without wrapping.

        Args:
            upper: it, if it is never negative.
            end, below: what the loop's own condition compares it with, and whether it is less.
        """
        start = self.most(v.value)
        if start is None or len(v.updates) != 1:
            return None
        if start.leaves or start.text.startswith("("):  # `3 - 4` is not known, either
            upper = _joined("{}.fr_if({})", upper, start)
        update = v.updates[0]
        operators = [child.type for child in update.children]
        if update.type == "update_expression" and "++" in operators:
            step: Most | None = number(1)
        elif update.type == "assignment_expression" and "+=" in operators:
            step = self.most(field(update, "right"))
        else:
            return None
        if step is None or (below and step == number(1)):
            return step and upper
        return _joined("{}.fr_if({})", upper, _joined("{} + {}", end, step))

    def _of_component(self, node: Node) -> Most | None:
        """A component of a vector of sizes or positions."""
        inner: Node | None = part(node, "argument")
        axis_name = self.tree.text(part(node, "field"))
        for _ in range(4):
            if inner is not None and inner.type == "call_expression":  # .xy or .xyz of one
                if not _FIRST.search(self.tree.text(inner)):
                    return None
                inner = field(part(inner, "function"), "argument")
                continue
            if inner is None or inner.type != "identifier" or axis_name not in tuple(_COMPONENTS):
                return None
            variable = self.uses.get(inner.start_byte)
            if variable is None:
                vector = _VECTORS.get(self.tree.text(inner))
                axis = _COMPONENTS.index(axis_name)
                return vector and _attribute(f"fr_l.{vector[0]}[{axis}]", vector[1])
            words = set(variable.type.split()) - _QUALIFIERS
            if variable.written or not variable.plain or not words <= {"uint2", "uint3", "auto"}:
                return None
            inner = variable.value
        return None

    def _of_size(self, node: Node) -> Most | None:
        """A size of an input: ``x_shape[2]``."""
        base, name = part(node, "argument"), self.tree.text(part(node, "argument"))
        variable = self.uses.get(base.start_byte) if base.type == "identifier" else None
        array = name.removesuffix("_shape")
        if array == name or array not in self.arrays or variable is None or variable.written:
            return None
        if self.parameters.get(name) is not variable:
            return None
        index = re.fullmatch(r"\[\s*(\d+)\s*\]", self.tree.text(part(node, "indices")))
        i, inputs = self.arrays[array][0], self.p.spec.inputs
        if i >= len(inputs) or index is None or int(index[1]) >= inputs[i].ndim:
            return None
        return _leaf(f"::fr::fr_most({name}[{index[1]}])")


def _is_integer(text: str, *, deduced: bool = False) -> bool:
    words = [word for word in text.split() if word not in _QUALIFIERS]
    if deduced and words == ["auto"]:
        return True
    return len(words) in (1, 2) and all(word in WIDE_INTEGERS for word in words)


def number(value: int) -> Most:
    return Most(f"::fr::fr_most({value}u, true)", exact=True)


def _leaf(text: str) -> Most:
    return Most(text, frozenset({text}), exact=True)


def _attribute(text: str, below: bool) -> Most:
    leaf = _leaf(f"::fr::fr_most({text}){'.fr_last()' if below else ''}")
    # What a threadgroup has may be less at a ragged edge.
    return leaf._replace(exact=not below and "fr_l.threadgroup" not in text)


def _joined(form: str, a: Most, b: Most) -> Most:
    return Most(
        f"({form.format(a.text, b.text)})",
        a.leaves | b.leaves,
        a.product or b.product,
        a.scaled or b.scaled,
        a.exact and b.exact,
        a.divided or b.divided,
    )


def _times(a: Most, b: Most) -> Most:
    product = _joined("{} * {}", a, b)
    of_two = bool(a.leaves and b.leaves)
    scaled = not of_two and bool(product.leaves)
    return product._replace(product=product.product or of_two, scaled=scaled)
