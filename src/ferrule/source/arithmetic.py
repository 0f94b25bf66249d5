"""Arithmetic as Metal means it, where C++ compilers differ: products that are summed, and shifts.

=========================  =====================================================================
``a * b + c``, ``c -= a*b``  ``::fr::fr_factor(a) * b + c``: rounded once, as clang fuses within
                           one expression and nowhere else. Compilers are told to fuse nothing.
``a << n``, ``a >>= n``    ``::fr::fr_bits(a) << n``, ``a >>= ::fr::fr_count<decltype((a))>(n)``:
                           the count modulo the number of bits
=========================  =====================================================================

The helpers (``include/arithmetic.h``) look at the operand's type and give the operand itself where
nothing is to be done: the operator stays where it is, an author's own as well. So they are written
wherever a type is not known here; what is known to be an integer, indices, constants and template
arguments keep their text, which the analyses read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from tree_sitter import Node

from ..kernel import ATTRIBUTES
from .dialect import INTEGERS
from .lexer import join, tokens
from .rewrite import Mark
from .syntax import Tree, call_arguments, callee, declarators, declared_name, of_macro, walk

_INTEGERS = INTEGERS | {
    "bool",
    "long",
    "signed",
    "int16_t",
    "ptrdiff_t",
    "uintptr_t",
    "intptr_t",
    "simd_vote",
}
_INTEGER = re.compile(r"(?:packed_)?(?:bool|u?(?:char|short|int|long))[234]")
_SPECIFIERS = frozenset(
    {"const", "constexpr", "static", "volatile", "thread_local", "inline", "thread", "device"}
)
_OF_INTEGERS = frozenset(
    {
        "sizeof", "popcount", "clz", "ctz", "mulhi", "mul24", "mad24", "ceildiv",
        "elem_to_loc", "elem_to_loc_1", "elem_to_loc_2", "elem_to_loc_3",
    }
)  # fmt: skip
# Integers where their arguments are.
_PASS_ON = frozenset({"min", "max", "clamp", "abs", "select"})
_BITS = frozenset({"&", "|", "^", "%", "<<", ">>"})
_LOGIC = frozenset({"==", "!=", "<", ">", "<=", ">=", "&&", "||"})
_SHIFTS = ("<<", ">>")
# What is the same for the compiler whatever it is compiled for.
_UNTOUCHED = frozenset(
    {"template_argument_list", "enumerator", "static_assert_declaration", "decltype"}
)
_NUMBER = re.compile(r"[0-9][0-9']*[uUlL]*")
_CASTS = ("primitive_type", "sized_type_specifier", "type_identifier", "template_type")
_FLOATS = frozenset({"float", "double", "float2", "float3", "float4"})
_OF_CONSTANTS = (
    "parenthesized_expression",
    "unary_expression",
    "binary_expression",
    "conditional_expression",
    "cast_expression",
)


class Text(NamedTuple):
    """A rewritten text, and the pragmas that stood in it."""

    text: str
    body: bool
    marks: Sequence[Mark]


def write_operators(
    texts: Sequence[Text],
    *,
    names: Iterable[str],
    integers: Iterable[str],
    constants: Iterable[str],
    types: Iterable[str],
) -> list[str]:
    """The texts with the operators of their expressions as Metal means them.

    Args:
        texts: header and body.
        names: what the body is given.
        integers: of these names, those of integers and of what points to some.
        constants: of these names, those that are constants.
        types: names of types of integers.
    """
    facts = _NameFacts(names, integers, constants, types)
    trees = [Tree(text.text, body=text.body) for text in texts]
    for tree in trees:
        facts.read(tree)
    on = True
    out: list[str] = []
    for text, tree in zip(texts, trees, strict=True):
        plain = _without_brackets(text.text, facts.names)
        if plain != text.text:
            tree = Tree(plain, body=text.body)
        writer = _OperatorWriter(tree, facts, text.marks, on)
        out.append(writer.run())
        on = writer.at_end()  # what the header says outside of functions holds for the body
    return out


_BRACKETS = re.compile(r"[-+*/(,=<>?:&|^~!{;]\s*\(\s*[A-Za-z_]\w*\s*\)|\breturn\b")


def _without_brackets(text: str, names: Set[str]) -> str:
    """The text with ``(a) * (b)`` as ``a * b``: the grammar takes some such for conversions.

    Args:
        names: variables, which are no types.
    """
    if not _BRACKETS.search(text):
        return text
    code = tokens(text, kernel="", where="source")
    solid = [t for t in code if not t.blank]
    for i in range(2, len(solid) - 2):
        typed, before, a, b, c = solid[i - 2 : i + 3]
        if a.text != "(" or c.text != ")" or b.text not in names:
            continue
        operand = before.kind not in ("number", "word") or before.text == "return"
        # The type of `(a)` is a reference; that of `a` is none.
        in_decltype = before.text == "(" and typed.text in ("decltype", "__typeof__")
        if operand and not in_decltype and before.text not in (")", "]", ">", "..."):
            a.text = c.text = " "
    return join(code)


def _member_name(declarator: Node) -> Node | None:
    """The name of a member that a declarator declares."""
    return next((n for n in walk(declarator) if n.type == "field_identifier"), None)


def _operands(node: Node, *types: str) -> tuple[Node, Node, Node] | None:
    """Left operand, operator and right operand of an expression of these types."""
    if node.type not in types or node.has_error:
        return None
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    operator = node.child_by_field_name("operator")
    return None if left is None or operator is None or right is None else (left, operator, right)


class _NameFacts:
    """What the declarations in all texts say of names."""

    def __init__(
        self,
        names: Iterable[str],
        integers: Iterable[str],
        constants: Iterable[str],
        types: Iterable[str],
    ) -> None:
        self.names = set(names)
        self.integers = {*integers, *ATTRIBUTES}
        self.types = _INTEGERS | set(types)
        self.constants = set(constants)
        self.aliases: set[str] = set()  # names of types that a text gives
        self._others: set[str] = set()  # names that something else has somewhere
        self._varying: set[str] = set()

    def read(self, tree: Tree) -> None:
        """Add what a text declares."""
        for node in walk(tree.root):
            if node.type in ("alias_declaration", "type_definition", "type_parameter_declaration"):
                names = (n for n in node.named_children if n.type == "type_identifier")
                self.aliases |= set(map(tree.text, names))
                continue
            if node.type in ("declaration", "field_declaration", "for_range_loop"):
                declared = declarators(node)
            elif node.type in ("parameter_declaration", "optional_parameter_declaration"):
                declared = node.children_by_field_name("declarator")[:1]
            else:
                continue
            kind = node.child_by_field_name("type")
            integer = kind is not None and self.is_integer_type(tree.text(kind))
            words = tree.data[node.start_byte : kind.start_byte].decode().split() if kind else []
            for d in declared:
                name = declared_name(d) or _member_name(d)
                if name is None:
                    continue
                text = tree.text(name)
                self.names.add(text)
                (self.integers if integer else self._others).add(text)
                value = d.child_by_field_name("value") if d.type == "init_declarator" else None
                plain = d.child_by_field_name("declarator") == name
                if {"const", "constexpr"} & set(words) and plain and self.constant(tree, value):
                    self.constants.add(text)
                else:
                    self._varying.add(text)
        self.integers -= self._others
        self.constants -= self._varying

    def is_integer_type(self, text: str) -> bool:
        """Whether a type is one of integers: a scalar, or a vector of them."""
        words = re.sub(r"\bmetal\s*::|[<>]", " ", text).split()
        words = [w for w in words if w not in _SPECIFIERS]
        return bool(words) and all(w in self.types or _INTEGER.fullmatch(w) for w in words)

    def constant(self, tree: Tree, node: Node | None) -> bool:
        """Whether an operand is a constant: the compiler itself rounds a product of such."""
        if node is None:
            return False
        if node.type == "identifier":
            return tree.text(node) in self.constants
        if node.type == "call_expression":
            function, name = node.child_by_field_name("function"), callee(tree, node)
            casts = function is not None and (
                function.type in _CASTS or name in _FLOATS or name in self.types
            )
            if not casts and not name.endswith("_lit") and name != "static_cast":
                return False
            return all(self.constant(tree, a) for a in call_arguments(node))
        if node.type in ("number_literal", "true", "false", "char_literal", "sizeof_expression"):
            return True
        if node.type not in _OF_CONSTANTS:
            return False
        operands = (c for c in node.named_children if c.type != "type_descriptor")
        return all(self.constant(tree, c) for c in operands)


class _OperatorWriter:
    """Writes the operators of one text."""

    def __init__(self, tree: Tree, facts: _NameFacts, marks: Sequence[Mark], fuses: bool) -> None:
        self.tree = tree
        self.facts = facts
        self.edits: list[tuple[int, int, str]] = []
        self._fuses_at_start = fuses
        self._marks = [(mark, self._scope(mark)) for mark in marks]

    def run(self) -> str:
        """The text, with its operators written."""
        # Node by node from the outside in: where two things begin at one place, the outer one is
        # written first.
        waiting: list[tuple[Node, bool]] = [(self.tree.block, False)]
        while waiting:
            node, index = waiting.pop()
            if node.type in _UNTOUCHED or node.type == "ERROR":
                continue
            if node.type in ("preproc_def", "preproc_function_def"):
                self._macro(node)
                continue
            if (
                node.type == "declaration"
                and "constexpr" in self.tree.text(node).split("=")[0]
                and not any(n.type == "lambda_expression" for n in walk(node))
            ):
                continue
            self._operator(node, index)
            index = node.type == "subscript_argument_list" or (
                index
                and node.type
                in (
                    "binary_expression",
                    "parenthesized_expression",
                    "conditional_expression",
                    "unary_expression",
                )
            )
            size = node.child_by_field_name("size") if node.type == "array_declarator" else None
            for child in reversed(node.children):
                if child != size:
                    waiting.append((child, index))
        return self.tree.edited(self.edits)

    # -- pragmas -----------------------------------------------------------------------------------

    def _scope(self, mark: Mark) -> tuple[int, int]:
        """The bytes that a pragma speaks of: from its line to the end of the block around it."""
        lines = self.tree.data.split(b"\n")
        start = sum(len(line) + 1 for line in lines[: mark.line - 1])
        around = self.tree.root.descendant_for_byte_range(start, start)
        while around is not None and around.type not in ("compound_statement", "translation_unit"):
            around = around.parent
        if around is None or around.type == "translation_unit":
            return start, len(self.tree.data) + 1
        return start, around.end_byte

    def _fuses(self, node: Node) -> bool:
        on = self._fuses_at_start
        for mark, (start, end) in self._marks:
            if start <= node.start_byte < end:
                on = mark.on
        return on

    def at_end(self) -> bool:
        """Whether products are fused in what follows this text."""
        on = self._fuses_at_start
        for mark, (_, end) in self._marks:
            if end > len(self.tree.data):
                on = mark.on
        return on

    # -- operators ---------------------------------------------------------------------------------

    def _operator(self, node: Node, index: bool) -> None:
        operands = _operands(node, "binary_expression", "assignment_expression")
        if operands is None:
            return
        left, operator, right = operands
        symbol = operator.type
        if symbol in _SHIFTS and not self._plain_count(right):
            self._wrap("fr_bits", left)
        elif symbol in ("<<=", ">>=") and not self._plain_count(right):
            left_text = " ".join(self.tree.text(left).split("\n"))
            self._wrap(f"fr_count<decltype(({left_text}))>", right)
        elif symbol in ("+", "-") and not index:
            for side in (left, right):
                self._product(side)
        elif symbol in ("+=", "-="):
            self._product(right)

    def _plain_count(self, count: Node) -> bool:
        """Whether a shift count is a number below the width of every type that shifts."""
        text = self.tree.text(count)
        return (
            _NUMBER.fullmatch(text) is not None and int(text.rstrip("uUlL").replace("'", "")) < 32
        )

    def _product(self, operand: Node) -> None:
        """Write a product that is an operand of a sum, if it is one."""
        node, cast, kind = operand, None, ""
        while True:
            if node.type == "parenthesized_expression" and node.named_child_count == 1:
                node = node.named_children[0]
            elif node.type == "unary_expression" and node.children[0].type in ("-", "+"):
                node = node.children[-1]
            elif cast is None and (conversion := self._conversion(node)) is not None:
                cast, (kind, node) = node, conversion
            else:
                break
        operands = _operands(node, "binary_expression")
        if operands is None:
            return
        left, operator, right = operands
        if operator.type != "*":
            return
        if (self._integer(left) and self._integer(right)) or not self._fuses(node):
            return
        if self.facts.constant(self.tree, left) and self.facts.constant(self.tree, right):
            return
        if cast is not None:
            # The lines stay as many as they are.
            before = self.tree.data[cast.start_byte : node.start_byte].count(b"\n")
            after = self.tree.data[node.end_byte : cast.end_byte].count(b"\n")
            begin = self._call_start(f"fr_as<{kind}>", cast) + "\n" * before
            self.edits.append((cast.start_byte, node.start_byte, begin))
            self.edits.append((node.end_byte, cast.end_byte, "\n" * after + ")"))
        self._wrap("fr_factor", left)

    def _wrap(self, name: str, node: Node) -> None:
        """Write a call of one of the helpers around an operand."""
        self.edits.append((node.start_byte, node.start_byte, self._call_start(name, node)))
        self.edits.append((node.end_byte, node.end_byte, ")"))

    def _call_start(self, name: str, node: Node) -> str:
        behind = self.tree.data[node.start_byte - 1 : node.start_byte] == b":"  # of `a ?b :c`
        return f"{' ' if behind else ''}::fr::{name}("

    def _conversion(self, node: Node) -> tuple[str, Node] | None:
        """The type and the operand of a conversion of a product alone, such as ``float(a * b)``."""
        kind: Node | None = None
        value: Node | None = None
        if node.type == "cast_expression":
            kind, value = node.child_by_field_name("type"), node.child_by_field_name("value")
        elif node.type == "call_expression":
            function, arguments = node.child_by_field_name("function"), call_arguments(node)
            if function is None or len(arguments) != 1:
                return None
            value = arguments[0]
            if function.type in _CASTS:
                kind = function
            elif function.type == "template_function" and callee(self.tree, node) == "static_cast":
                types = function.child_by_field_name("arguments")
                kind = types.named_children[0] if types and types.named_child_count else None
            elif self.tree.text(function).strip("() \n") in _FLOATS | self.facts.aliases:
                kind = function
        if kind is None or value is None or "*" in self.tree.text(kind):
            return None
        inner = value
        while inner.type == "parenthesized_expression" and inner.named_child_count == 1:
            inner = inner.named_children[0]
        if inner.type != "binary_expression" or inner.child_by_field_name("operator") is None:
            return None
        return self.tree.text(kind).strip("() \n"), inner

    def _macro(self, node: Node) -> None:
        """The expression that a macro stands for."""
        value = node.child_by_field_name("value")
        if value is None:
            return

        def change(text: str) -> str:
            return _OperatorWriter(Tree(text, body=True), self.facts, (), self._fuses(node)).run()

        new = of_macro(self.tree.text(value), change)
        self.edits.append((value.start_byte, value.end_byte, new))

    # -- what operands are -------------------------------------------------------------------------

    def _integer(self, node: Node | None) -> bool:
        """Whether an expression is known to be an integer, or a vector of them."""
        if node is None:
            return False
        kind, text = node.type, self.tree.text(node)
        if kind == "number_literal":
            return _NUMBER.fullmatch(text) is not None or text[:2] in ("0x", "0X", "0b", "0B")
        if kind in ("true", "false", "char_literal", "sizeof_expression"):
            return True
        if kind == "identifier":
            return text in self.facts.integers
        if kind == "parenthesized_expression":
            return node.named_child_count == 1 and self._integer(node.named_children[0])
        if kind == "subscript_expression":
            return self._integer(node.child_by_field_name("argument"))
        if kind == "field_expression":
            base, member = node.child_by_field_name("argument"), node.child_by_field_name("field")
            if member is not None and self.tree.text(member) in self.facts.integers:
                return True
            return self._integer(base)
        if kind in ("unary_expression", "update_expression", "pointer_expression"):
            return self._integer(node.child_by_field_name("argument"))
        if kind == "cast_expression":
            type_node = node.child_by_field_name("type")
            return type_node is not None and self.facts.is_integer_type(self.tree.text(type_node))
        if kind == "conditional_expression":
            branches = (node.child_by_field_name(f) for f in ("consequence", "alternative"))
            return all(self._integer(branch) for branch in branches)
        if kind == "binary_expression":
            operator = node.child_by_field_name("operator")
            if operator is not None and operator.type in _BITS | _LOGIC:
                return True
            sides = (node.child_by_field_name(f) for f in ("left", "right"))
            return all(self._integer(side) for side in sides)
        if kind == "call_expression":
            return self._integer_call(node)
        return False

    def _integer_call(self, node: Node) -> bool:
        function, name = node.child_by_field_name("function"), callee(self.tree, node)
        if function is None:
            return False
        if self.facts.is_integer_type(self.tree.text(function)) or name in _OF_INTEGERS:
            return True
        if name == "static_cast" and function.type == "template_function":
            types = function.child_by_field_name("arguments")
            return types is not None and self.facts.is_integer_type(self.tree.text(types))
        if name in _PASS_ON or name.startswith(("simd_", "quad_")):
            arguments = call_arguments(node)
            return bool(arguments) and all(self._integer(a) for a in arguments)
        return False
