"""The elements of arrays that a statement uses, where asking for them changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tree_sitter import Node

from . import words
from .dialect import INTEGERS
from .syntax import Tree, callee, declarators, declared_name, field, part, unbracketed

# What may stand in an index that is computed once more than the author wants.
_PURE = words("""
    identifier number_literal char_literal true false parenthesized_expression binary_expression
    unary_expression subscript_expression subscript_argument_list field_expression field_identifier
    pointer_expression cast_expression call_expression argument_list conditional_expression
    qualified_identifier namespace_identifier template_function template_argument_list
    type_descriptor primitive_type sized_type_specifier type_identifier type_qualifier
    abstract_pointer_declarator sizeof_expression user_defined_literal literal_suffix
    template_type
""")
_FUNCTIONS = INTEGERS | words("""
    bool float half bfloat bfloat16_t float16_t uint2 uint3 uint4 int2 int3 int4 min max clamp abs
    select ceildiv popcount clz ctz mulhi mul24 mad24 elem_to_loc static_cast reinterpret_cast
    as_type
""")
_ASSIGNMENTS = ("assignment_expression", "update_expression")
# Conditions of these stand on the statement's own line; what they contain does not.
_CONTROL = words("if_statement while_statement switch_statement for_range_loop do_statement")
_MOST = 16  # elements of one statement


class Element(NamedTuple):
    """An element that a statement reads or writes.

    Attributes:
        text: as the author wrote it.
        kind: ``"r"`` it is read, ``"w"`` written, ``"m"`` both.
        base, indices: the array and what stands in its brackets.
        guards: conditions under which the statement comes to it.
    """

    text: str
    kind: str
    base: str
    indices: tuple[str, ...]
    guards: tuple[str, ...]


def elements(tree: Tree, statement: Node) -> tuple[list[Element], list[str]]:
    """The elements of a statement; and those that are left out, each with the reason."""
    own = _names(tree, statement)
    found: dict[tuple[str, tuple[str, ...]], Element] = {}
    left_out: dict[str, None] = {}
    for node, guards in _parts(tree, statement, ()):
        text = " ".join(tree.text(node).split())
        base, indices = _split(tree, node)
        reason = next(filter(None, (_impure(tree, n, own) for n in (node, *guards_of(guards)))), "")
        if reason:
            left_out.setdefault(f"{text}: {reason}")
            continue
        told = tuple(f"!({tree.text(n)})" if no else tree.text(n) for n, no in guards)
        known = found.get((text, told))
        if known is not None and known.kind != _kind(node):
            found[text, told] = known._replace(kind="m")
        elif known is None and (text, ()) not in found and len(found) < _MOST:
            found[text, told] = Element(text, _kind(node), base, indices, told)
    return list(found.values()), list(left_out)


Guards = tuple[tuple[Node, bool], ...]  # conditions, and whether they must be false


def guards_of(guards: Guards) -> list[Node]:
    """The conditions alone."""
    return [node for node, _ in guards]


def _names(tree: Tree, statement: Node) -> frozenset[str]:
    """What the statement itself declares: not there before it."""
    names = (declared_name(d) for d in declarators(statement))
    return frozenset(tree.text(name) for name in names if name is not None)


def _parts(tree: Tree, node: Node, guards: Guards) -> Iterator[tuple[Node, Guards]]:
    """The subscripts and followed pointers of a node, with what decides whether they count."""
    kind = node.type
    if kind in ("lambda_expression", "decltype", "sizeof_expression", "compound_statement"):
        return
    if kind in ("for_statement", "for_range_loop", "do_statement"):
        return
    if kind == "attributed_statement":
        return
    if _is_element(tree, node):
        yield node, guards
    if kind in ("if_statement", "conditional_expression"):
        yield from _branches(tree, node, guards)
    elif kind in ("while_statement", "switch_statement"):
        yield from _parts(tree, part(node, "condition"), guards)
    elif kind == "binary_expression" and node.children[1].type in ("&&", "||"):
        left, right = part(node, "left"), part(node, "right")
        yield from _parts(tree, left, guards)
        yield from _parts(tree, right, (*guards, (left, node.children[1].type == "||")))
    else:
        for child in node.named_children:
            yield from _parts(tree, child, guards)


def _branches(tree: Tree, node: Node, guards: Guards) -> Iterator[tuple[Node, Guards]]:
    """Those of a condition, and of what it decides where that is on the same line."""
    condition = part(node, "condition")
    yield from _parts(tree, condition, guards)
    inner = field(condition, "value") or condition
    for name in ("consequence", "alternative"):
        branch = field(node, name)
        if branch is not None and branch.start_point[0] == node.start_point[0]:
            yield from _parts(tree, branch, (*guards, (inner, name == "alternative")))


def _is_element(tree: Tree, node: Node) -> bool:
    around = node.parent
    if node.type == "pointer_expression":
        return tree.text(node).startswith("*")
    if node.type != "subscript_expression" or around is None:
        return False
    return not (around.type == "subscript_expression" and field(around, "argument") == node)


def _split(tree: Tree, node: Node) -> tuple[str, tuple[str, ...]]:
    """What is indexed, and what stands in the brackets."""
    if node.type == "pointer_expression":
        return f"({tree.text(part(node, 'argument'))})", ("0",)
    indices: list[str] = []
    while node.type == "subscript_expression":
        listed = part(node, "indices")
        indices.append(tree.text(listed).strip()[1:-1])
        node = part(node, "argument")
    return f"({tree.text(node)})", tuple(f"({index})" for index in reversed(indices))


def _kind(node: Node) -> str:
    """Whether an element is read, written or both."""
    around = node.parent
    while around is not None and around.type in ("parenthesized_expression", "field_expression"):
        node, around = around, around.parent
    if around is None:
        return "r"
    if around.type == "update_expression":
        return "m"
    if around.type == "assignment_expression" and field(around, "left") == node:
        return "w" if around.children[1].type == "=" else "m"
    return "r"


def _impure(tree: Tree, node: Node, own: frozenset[str]) -> str:
    """Why a node cannot be computed once more; nothing where it can."""
    waiting = [unbracketed(node)]
    while waiting:
        n = waiting.pop()
        if n.type in _ASSIGNMENTS:
            return "its index changes a variable"
        if n.type == "call_expression" and callee(tree, n) not in _FUNCTIONS:
            return f"its index calls {callee(tree, n)}"
        if n.type == "identifier" and tree.text(n) in own:
            return f"{tree.text(n)} is not there yet"
        if n.is_named and n.type not in _PURE:
            return f"its index has a {re.sub('_', ' ', n.type)}"
        waiting += n.children
    return ""
