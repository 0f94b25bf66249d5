"""The parts of statements and expressions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tree_sitter import Node

from ..cpp import NotSplittable
from ..syntax import field, part

LOOPS = ("for_statement", "while_statement", "do_statement")
# What opens another function: its jumps are its own.
NESTED_CODE = ("lambda_expression", "function_definition", "struct_specifier")


def changed(node: Node) -> Node | None:
    """What an assignment, or an update, changes; None for any other expression."""
    name = {"assignment_expression": "left", "update_expression": "argument"}.get(node.type)
    return part(node, name) if name is not None else None


def ancestors(node: Node) -> Iterator[Node]:
    """What a node stands in, from the inside out."""
    while node.parent is not None:
        node = node.parent
        yield node


class Loop(NamedTuple):
    """The parts of a loop."""

    body: Node
    condition: Node | None
    start: Node | None
    update: Node | None


def loop_parts(statement: Node) -> Loop:
    """The parts of a loop.

    Raises:
        NotSplittable: its condition declares a variable.
    """
    condition = field(statement, "condition")
    if condition is not None and condition.type == "condition_clause":
        condition = part(condition, "value")
    if condition is not None and condition.type == "declaration":
        raise NotSplittable("a loop declares a variable in its condition")
    start, update = field(statement, "initializer"), field(statement, "update")
    return Loop(part(statement, "body"), condition, start, update)


def branches(node: Node) -> tuple[Node | None, Node | None]:
    """The two branches of an ``if``, or of ``?:``."""
    return field(node, "consequence"), field(node, "alternative")


def branch_statements(branch: Node | None) -> list[Node]:
    """The statements of a branch, or of a loop's body."""
    if branch is None:
        return []
    if branch.type == "else_clause":
        branch = branch.named_children[-1]
    statements = branch.named_children if branch.type == "compound_statement" else [branch]
    return [s for s in statements if s.type != "comment"]


def expression(node: Node | None) -> Node | None:
    """The expression of an expression statement; any other node as it is."""
    if node is not None and node.type == "expression_statement":
        return node.named_children[0] if node.named_children else None
    return node


def initial_value(declarator: Node) -> Node | None:
    """What a declarator initialises its variable with."""
    return part(declarator, "value") if declarator.type == "init_declarator" else None


def inner_declarator(declarator: Node) -> Node:
    """A declarator without what it initialises its variable with."""
    return part(declarator, "declarator") if declarator.type == "init_declarator" else declarator


def jumps(node: Node, nested: bool = False, switched: bool = False) -> Iterator[Node]:
    """The jumps by which control may leave a node: ``return``, ``break`` and ``continue``.

    Args:
        nested: a loop is around it, whose ``break`` and ``continue`` do not count.
        switched: a ``switch`` is, whose ``break`` does not.
    """
    kind = node.type
    if (
        kind == "return_statement"
        or (kind == "break_statement" and not nested and not switched)
        or (kind == "continue_statement" and not nested)
    ):
        yield node
    elif kind not in NESTED_CODE:
        for child in node.children:
            yield from jumps(child, nested or kind in LOOPS, switched or kind == "switch_statement")


def jumps_out(node: Node) -> bool:
    """Whether control may leave a node by a jump, or for a loop any of its rounds."""
    return any(True for child in node.children for _ in jumps(child))
