"""What hides from a reader that a variable is written, or what a name means.

C++ has more ways to write to a variable than can be followed: references that structs keep, types
that are references, operators of the author's. A text that has them is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from .. import words
from ..syntax import OTHER_CODE, Tree, call_arguments, callee, field, kinds, unbracketed, walk
from .kinds import type_of
from .model import Unsupported

_WORDS = re.compile(
    r"operator|asm|__asm\w*|bitand|bitor|xor|compl|and_eq|or_eq|xor_eq|not_eq|mutable|typeof|__typeof\w*|add_[lr]value_reference\w*"
)
_WORD_NODES = words(
    "identifier type_identifier field_identifier namespace_identifier primitive_type"
)
_STRUCTS = words("struct_specifier class_specifier union_specifier")
_OF_METAL = re.compile(r"using\s+(namespace\s+)?(::)?metal\b")
_ALIASES = words("alias_declaration type_definition")


def hidden(tree: Tree, where: str) -> Iterator[Unsupported]:
    """Why a text, whose macros are expanded, may do what does not show.

    Args:
        where: which text it is.
    """
    for node in walk(tree.root):
        why = _why(tree, node)
        if why:
            yield Unsupported(node.start_point[0] + 1, f"{why} is not followed", where)


def _why(tree: Tree, node: Node) -> str:
    """What a node may hide; nothing of most."""
    kind, named = node.type, field(node, "declarator") or node
    if kind in _WORD_NODES or not node.child_count:
        return tree.text(node) if _WORDS.fullmatch(tree.text(node)) else ""
    if kind in _STRUCTS and any(_refers(tree, inner) for inner in walk(node)):
        return "a struct that is given references"
    if kind in _ALIASES and any(sign in tree.text(node) for sign in "&*["):
        return "a name of a type of references, pointers or arrays"
    if kind == "trailing_return_type":
        return "a type behind ->"
    if kind == "template_argument_list" and any(kinds(node, "abstract_pointer_declarator")):
        return "a template's pointer"
    if kind == "decltype" and not (_is_value(node) or _is_own(tree, node)):
        return "decltype"
    if kind == "template_argument_list" and any(kinds(node, "abstract_reference_declarator")):
        return "a template's reference"
    if kind == "function_declarator" and named.type == "parenthesized_declarator":
        return "a function whose name stands in brackets"
    if kind == "namespace_definition" and any(kinds(node, "function_definition")):
        return "a function in a namespace"
    if kind == "using_declaration" and not _OF_METAL.match(tree.text(node)):
        return "using"
    if kind == "enum_specifier" and tree.is_body:
        return "enum"
    if kind == "call_expression" and _declares(tree, node):
        return "a declaration that reads like a call"
    return ""


def _refers(tree: Tree, node: Node) -> bool:
    """Whether a parameter or member is a reference by which one may write."""
    if not node.type.endswith(("parameter_declaration", "field_declaration")):
        return False
    types = "reference_declarator", "abstract_reference_declarator"
    found = any(any(kinds(d, *types)) for d in node.children_by_field_name("declarator"))
    return found and "const" not in tree.text(node).split()


def _is_value(node: Node) -> bool:
    """Whether ``decltype`` is of what is computed, and so no reference."""
    inner = [child for child in node.named_children if child.type != "comment"]
    return len(inner) == 1 and unbracketed(inner[0]).type in ("binary_expression", "number_literal")


def _is_own(tree: Tree, node: Node) -> bool:
    """Whether ``decltype`` is ferrule's own: of what operands of ``?:`` become, or of counts."""
    around = node.parent
    while around is not None and around.type != "template_argument_list":
        if around.type in OTHER_CODE or around.type.endswith("declaration"):
            return False
        around = around.parent
    named = around.parent if around is not None else None
    while named is not None and named.parent is not None and (
        named.parent.type == "qualified_identifier"
    ):  # fmt: skip
        named = named.parent
    return tree.text(named).startswith("::fr::")


def _declares(tree: Tree, call: Node) -> bool:
    """Whether what reads like a call may declare its argument: ``uint(k) = 9;``."""
    names = call_arguments(call)
    while len(names) == 1 and names[0].type == "parenthesized_expression":
        names = names[0].named_children
    if len(names) != 1 or names[0].type != "identifier":
        return False
    name = callee(tree, call)
    typed = type_of(name, {}).size is not None or name.endswith("_t")
    node, parent = call, call.parent
    while parent is not None and parent.start_byte == call.start_byte:
        if parent.type == "assignment_expression":
            return typed or node.id == call.id
        if parent.type == "expression_statement":
            return typed
        node, parent = parent, parent.parent
    head = field(parent, "initializer")
    return typed and head is not None and head.id == node.id
