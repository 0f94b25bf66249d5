"""The parts of statements: of branches, of loops and of declarations."""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from ..cpp import NotSplittable

LOOPS = ("for_statement", "while_statement", "do_statement")
# What opens another function: its jumps are its own.
NESTED_CODE = ("lambda_expression", "function_definition", "struct_specifier")


class Loop(NamedTuple):
    """The parts of a loop."""

    body: Node
    condition: Node | None
    start: Node | None
    update: Node | None


def loop_parts(statement: Node) -> Loop:
    """The parts of a loop.

    Raises:
        NotSplittable: it has no body, or its condition declares a variable.
    """
    field = statement.child_by_field_name
    body, condition = field("body"), field("condition")
    if body is None:
        raise NotSplittable("a loop is not understood")
    if condition is not None and condition.type == "condition_clause":
        condition = condition.child_by_field_name("value")
    if condition is not None and condition.type == "declaration":
        raise NotSplittable("a loop declares a variable in its condition")
    return Loop(body, condition, field("initializer"), field("update"))


def branches(node: Node) -> tuple[Node | None, Node | None]:
    """The two branches of an ``if``, or of ``?:``."""
    return node.child_by_field_name("consequence"), node.child_by_field_name("alternative")


def branch_statements(branch: Node) -> list[Node]:
    """The statements of a branch, or of a loop's body."""
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
    if declarator.type != "init_declarator":
        return None
    return declarator.child_by_field_name("value")


def inner_declarator(declarator: Node) -> Node | None:
    """A declarator without what it initialises its variable with."""
    if declarator.type != "init_declarator":
        return declarator
    return declarator.child_by_field_name("declarator")


def is_jump(node: Node, nested: bool, switched: bool) -> bool:
    """Whether a node is a jump out of the statement that it stands in.

    Args:
        nested: a loop is between the two.
        switched: a ``switch`` is.
    """
    kind = node.type
    return (
        kind == "return_statement"
        or (kind == "break_statement" and not nested and not switched)
        or (kind == "continue_statement" and not nested)
    )


def jumps_out(node: Node, nested: bool = False, switched: bool = False) -> bool:
    """Whether control may leave the node by ``return``, ``break`` or ``continue``."""
    for child in node.children:
        kind = child.type
        if is_jump(child, nested, switched):
            return True
        if kind in NESTED_CODE:
            continue
        if jumps_out(child, nested or kind in LOOPS, switched or kind == "switch_statement"):
            return True
    return False
