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
from collections.abc import Sequence, Set
from dataclasses import replace

from tree_sitter import Node

from ..dtypes import Dtype
from ..kernel import ATTRIBUTES
from ..spec import Spec
from . import described, words
from .dialect import INTEGERS
from .lexer import join, solid, tokens
from .rewrite import Mark, Rewritten
from .syntax import (
    Edit,
    Tree,
    call_arguments,
    callee,
    declarators,
    declared_name,
    enclosed,
    field,
    kinds,
    of_macro,
    operands,
    part,
    replaced,
    unbracketed,
    walk,
)

_INTEGERS = INTEGERS | words("bool signed uintptr_t intptr_t simd_vote")
_INTEGER = re.compile(r"(?:packed_)?(?:bool|u?(?:char|short|int|long))[234]")
_SPECIFIERS = words("const constexpr static volatile thread_local inline thread device")
_OF_INTEGERS = words(
    "sizeof popcount clz ctz mulhi mul24 mad24 ceildiv elem_to_loc elem_to_loc_1 elem_to_loc_2 "
    "elem_to_loc_3"
)
# Integers where their arguments are.
_PASS_ON = words("min max clamp abs select")
_BITS = words("& | ^ % << >>")
_LOGIC = words("== != < > <= >= && ||")
# What is the same for the compiler whatever it is compiled for, and what is not understood.
_UNTOUCHED = words("template_argument_list enumerator static_assert_declaration decltype ERROR")
_DECLARING = words(
    "declaration field_declaration for_range_loop parameter_declaration "
    "optional_parameter_declaration"
)
_ALIASES = words("alias_declaration type_definition type_parameter_declaration")
_NUMBER = re.compile(r"[0-9][0-9']*[uUlL]*")
_CASTS = ("primitive_type", "sized_type_specifier", "type_identifier", "template_type")
_FLOATS = words("float double float2 float3 float4")
_LITERALS = words("true false char_literal sizeof_expression")
_OF_OPERANDS = words(
    "parenthesized_expression unary_expression binary_expression conditional_expression"
)
# The parts of an expression that are integers where it is one.
_INTEGER_PARTS = {
    "subscript_expression": ("argument",),
    "field_expression": ("argument",),
    "unary_expression": ("argument",),
    "update_expression": ("argument",),
    "pointer_expression": ("argument",),
    "conditional_expression": ("consequence", "alternative"),
    "binary_expression": ("left", "right"),
}


def write_operators(spec: Spec, text: Rewritten) -> Rewritten:
    """The texts with the operators of their expressions as Metal means them."""
    facts = _NameFacts(spec)
    trees = (Tree(text.header, body=False), Tree(text.source, body=True))
    for tree in trees:
        facts.read(tree)
    on = True
    written: list[str] = []
    for tree, marks in zip(trees, text.marks, strict=True):
        plain = _without_brackets(tree, facts.names)
        writer = _OperatorWriter(plain, facts, marks, on)
        written.append(writer.run())
        on = writer.fuses(len(plain.data))  # what is said outside of functions holds for the body
    return replace(text, header=written[0], source=written[1])


_BRACKETS = re.compile(r"[-+*/(,=<>?:&|^~!{;]\s*\(\s*[A-Za-z_]\w*\s*\)|\breturn\b")


def _without_brackets(tree: Tree, names: Set[str]) -> Tree:
    """A text with ``(a) * (b)`` as ``a * b``: the grammar takes some such for conversions.

    Args:
        names: variables, which are no types.
    """
    text = tree.edited(())
    if not _BRACKETS.search(text):
        return tree
    code = tokens(text, kernel="", where="source")
    parts = solid(code)
    for i in range(2, len(parts) - 2):
        typed, before, a, b, c = parts[i - 2 : i + 3]
        if a.text != "(" or c.text != ")" or b.text not in names:
            continue
        operand = before.kind not in ("number", "word") or before.text == "return"
        # The type of `(a)` is a reference; that of `a` is none.
        in_decltype = before.text == "(" and typed.text in ("decltype", "__typeof__")
        if operand and not in_decltype and before.text not in (")", "]", ">", "..."):
            a.text = c.text = " "
    plain = join(code)
    return tree if plain == text else Tree(plain, body=tree.is_body)


class _NameFacts:
    """What the declarations in all texts say of names.

    Attributes:
        names: variables.
        integers: of these, those of integers and of what points to some.
        constants: of these, those that are constants.
        types: names of types of integers.
        aliases: names of types that a text gives.
    """

    def __init__(self, spec: Spec) -> None:
        dtypes = {name: input_.dtype for name, input_, _ in described(spec)}
        dtypes |= zip(spec.kernel.output_names, spec.outputs, strict=True)
        types = {name: value for name, value in spec.template if isinstance(value, Dtype)}
        self.constants = {name for name, _ in spec.template} - types.keys()
        self.integers = {name for name, dtype in dtypes.items() if dtype.kind in "biu"}
        self.integers |= self.constants
        for name in spec.kernel.input_names:
            self.integers |= {f"{name}_shape", f"{name}_strides", f"{name}_ndim"}
        self.names = {*dtypes, *self.integers}
        self.integers |= ATTRIBUTES.keys()
        self.types = _INTEGERS | {name for name, dtype in types.items() if dtype.kind in "biu"}
        self.aliases: set[str] = set()
        self._others: set[str] = set()  # names that something else has somewhere
        self._varying: set[str] = set()

    def read(self, tree: Tree) -> None:
        """Add what a text declares."""
        for node in walk(tree.root):
            if node.type in _ALIASES:
                names = (n for n in node.named_children if n.type == "type_identifier")
                self.aliases |= set(map(tree.text, names))
            elif node.type in _DECLARING:
                self._declaration(tree, node)
        self.integers -= self._others
        self.constants -= self._varying

    def _declaration(self, tree: Tree, node: Node) -> None:
        kind = field(node, "type")
        integer = self.is_integer_type(tree.text(kind))
        words = tree.data[node.start_byte : kind.start_byte].split() if kind else []
        constant = b"const" in words or b"constexpr" in words
        for d in declarators(node):
            name = declared_name(d) or next(kinds(d, "field_identifier"), None)
            if name is None:
                continue
            text = tree.text(name)
            self.names.add(text)
            (self.integers if integer else self._others).add(text)
            value = field(d, "value") if d.type == "init_declarator" else None
            plain = field(d, "declarator") == name
            if constant and plain and self.constant(tree, value):
                self.constants.add(text)
            else:
                self._varying.add(text)

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
            name = callee(tree, node)
            casts = part(node, "function").type in _CASTS or name in _FLOATS | self.types
            if not casts and not name.endswith("_lit") and name != "static_cast":
                return False
            return all(self.constant(tree, a) for a in call_arguments(node))
        if node.type in _LITERALS or node.type == "number_literal":
            return True
        if node.type not in _OF_OPERANDS and node.type != "cast_expression":
            return False
        values = (c for c in node.named_children if c.type != "type_descriptor")
        return all(self.constant(tree, value) for value in values)


class _OperatorWriter:
    """Writes the operators of one text."""

    def __init__(self, tree: Tree, facts: _NameFacts, marks: Sequence[Mark], fuses: bool) -> None:
        self.tree = tree
        self.facts = facts
        self.edits: list[Edit] = []
        self._fuses_at_start = fuses
        self._marks = [(mark, self._scope(mark)) for mark in marks]

    def run(self) -> str:
        """The text, with its operators written."""
        # Node by node from the outside in: where two things begin at one place, the outer one is
        # written first.
        waiting: list[tuple[Node, bool]] = [(self.tree.block, False)]
        while waiting:
            node, index = waiting.pop()
            if node.type in _UNTOUCHED or self._is_constant_declaration(node):
                continue
            if node.type in ("preproc_def", "preproc_function_def"):
                self._macro(node)
                continue
            self._operator(node, index)
            index = node.type == "subscript_argument_list" or (index and node.type in _OF_OPERANDS)
            size = field(node, "size") if node.type == "array_declarator" else None
            waiting += [(child, index) for child in reversed(node.children) if child != size]
        return self.tree.edited(self.edits)

    def _is_constant_declaration(self, node: Node) -> bool:
        return (
            node.type == "declaration"
            and "constexpr" in self.tree.text(node).split("=")[0]
            and not any(kinds(node, "lambda_expression"))
        )

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

    def fuses(self, position: int) -> bool:
        """Whether products are fused at a place, or at the end in what follows this text."""
        on = self._fuses_at_start
        for mark, (start, end) in self._marks:
            if start <= position < end:
                on = mark.on
        return on

    # -- operators ---------------------------------------------------------------------------------

    def _operator(self, node: Node, index: bool) -> None:
        if node.type not in ("binary_expression", "assignment_expression") or node.has_error:
            return
        left, symbol, right = operands(node)
        if symbol in ("<<", ">>") and not self._plain_count(right):
            self._wrap("fr_bits", left)
        elif symbol in ("<<=", ">>=") and not self._plain_count(right):
            left_text = " ".join(self.tree.text(left).split("\n"))
            self._wrap(f"fr_count<decltype(({left_text}))>", right)
        elif symbol in ("+", "-") and not index:
            self._product(left)
            self._product(right)
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
        if node.type != "binary_expression" or node.children[1].type != "*":
            return
        left, _, right = operands(node)
        if (
            not self.fuses(node.start_byte)
            or (self._integer(left) and self._integer(right))
            or (self.facts.constant(self.tree, left) and self.facts.constant(self.tree, right))
        ):
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
        self.edits += enclosed(node, self._call_start(name, node), ")")

    def _call_start(self, name: str, node: Node) -> str:
        behind = self.tree.data[node.start_byte - 1 : node.start_byte] == b":"  # of `a ?b :c`
        return f"{' ' if behind else ''}::fr::{name}("

    def _conversion(self, node: Node) -> tuple[str, Node] | None:
        """The type and the operand of a conversion of a product alone, such as ``float(a * b)``."""
        kind: Node | None = None
        value: Node | None = None
        if node.type == "cast_expression":
            kind, value = field(node, "type"), field(node, "value")
        elif node.type == "call_expression" and len(call_arguments(node)) == 1:
            function, value = part(node, "function"), call_arguments(node)[0]
            name = self.tree.text(function).strip("() \n")
            if function.type in _CASTS or name in _FLOATS | self.facts.aliases:
                kind = function
            elif function.type == "template_function" and callee(self.tree, node) == "static_cast":
                kind = next(iter(part(function, "arguments").named_children), None)
        if kind is None or value is None or "*" in self.tree.text(kind):
            return None
        inner = unbracketed(value)
        if inner.type != "binary_expression":
            return None
        return self.tree.text(kind).strip("() \n"), inner

    def _macro(self, node: Node) -> None:
        """The expression that a macro stands for."""
        value = field(node, "value")
        if value is None:
            return

        def change(text: str) -> str:
            on = self.fuses(node.start_byte)
            return _OperatorWriter(Tree(text, body=True), self.facts, (), on).run()

        self.edits.append(replaced(value, of_macro(self.tree.text(value), change)))

    # -- what operands are -------------------------------------------------------------------------

    def _integer(self, node: Node | None) -> bool:
        """Whether an expression is known to be an integer, or a vector of them."""
        if node is None:
            return False
        kind, text = node.type, self.tree.text(node)
        if kind == "number_literal":
            return _NUMBER.fullmatch(text) is not None or text[:2] in ("0x", "0X", "0b", "0B")
        if kind == "identifier":
            return text in self.facts.integers
        if kind == "parenthesized_expression":
            return node.named_child_count == 1 and self._integer(node.named_children[0])
        if kind == "cast_expression":
            return self.facts.is_integer_type(self.tree.text(field(node, "type")))
        if kind == "call_expression":
            return self._integer_call(node)
        if kind == "binary_expression" and part(node, "operator").type in _BITS | _LOGIC:
            return True
        member = field(node, "field")
        if kind in _LITERALS or (member and self.tree.text(member) in self.facts.integers):
            return True
        parts = _INTEGER_PARTS.get(kind, ())
        return bool(parts) and all(self._integer(field(node, name)) for name in parts)

    def _integer_call(self, node: Node) -> bool:
        function, name = part(node, "function"), callee(self.tree, node)
        if self.facts.is_integer_type(self.tree.text(function)) or name in _OF_INTEGERS:
            return True
        if name == "static_cast" and function.type == "template_function":
            return self.facts.is_integer_type(self.tree.text(field(function, "arguments")))
        if name in _PASS_ON or name.startswith(("simd_", "quad_")):
            arguments = call_arguments(node)
            return bool(arguments) and all(self._integer(a) for a in arguments)
        return False
