"""What the author's own conditions say where an expression is evaluated.

`around` finds the conditions that hold there, `comparisons` what they compare::

    if (i >= 0 && i < H) sum += x[i];       // i >= 0, i < H
    if (row >= M || column >= N) return;    // !(row >= M), !(column >= N): row < M, column < N
    y[row * N + column] = sum;
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tree_sitter import Node

from ..syntax import Tree

_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_LEAVES = frozenset({"return_statement", "break_statement", "continue_statement"})


def around(parents: Mapping[int, Node], node: Node) -> Iterator[tuple[Node, bool]]:
    """Conditions of which it is known whether they hold where a node is, the nearest first.

    Args:
        parents: the node around each, by its id. Nothing jumps to labels but to a case of the
            switch whose own block it stands in.
    """
    parent = parents.get(node.id)
    while parent is not None and parent.type != "lambda_expression":
        if parent.type == "case_statement":  # it is jumped to, past what stands between
            node = parents[parents[parent.id].id]
        else:
            yield from _between(parent, node)
            node = parent
        parent = parents.get(node.id)


def _between(parent: Node, node: Node) -> Iterator[tuple[Node, bool]]:
    """Those that a node's parent makes."""
    kind = parent.type
    condition = parent.child_by_field_name("condition")
    if kind in ("if_statement", "conditional_expression") and condition is not None:
        for field, holds in (("consequence", True), ("alternative", False)):
            branch = parent.child_by_field_name(field)
            if branch is not None and branch.id == node.id:
                yield condition, holds
    elif kind in ("while_statement", "for_statement") and condition is not None:
        body = parent.child_by_field_name("body")
        if body is not None and body.id == node.id:
            yield condition, True
    elif kind == "binary_expression":
        left, right = parent.child_by_field_name("left"), parent.child_by_field_name("right")
        operator = parent.children[1].type
        if left is not None and right is not None and right.id == node.id:
            if operator in ("&&", "and"):
                yield left, True
            elif operator in ("||", "or"):
                yield left, False
    elif kind == "compound_statement":
        for statement in parent.named_children:
            if statement.id == node.id:
                break
            condition = statement.child_by_field_name("condition")
            if statement.type == "if_statement" and condition is not None and _leaves(statement):
                yield condition, False


def _leaves(statement: Node) -> bool:
    """Whether what follows an ``if`` without ``else`` is reached only where it does not hold."""
    last = statement.child_by_field_name("consequence")
    if statement.child_by_field_name("alternative") is not None:
        return False
    if last is not None and last.type == "compound_statement":
        last = next((n for n in reversed(last.named_children) if n.type != "comment"), None)
    return last is not None and last.type in _LEAVES


def comparisons(
    tree: Tree, condition: Node, holds: bool = True
) -> Iterator[tuple[Node, str, Node]]:
    """What is compared where a condition holds, or does not: ``a < b``, and ``b > a`` too."""
    kind = condition.type
    if kind in ("condition_clause", "parenthesized_expression"):
        if condition.named_child_count == 1:
            yield from comparisons(tree, condition.named_children[0], holds)
    elif kind == "unary_expression" and condition.children[0].type in ("!", "not"):
        inner = condition.child_by_field_name("argument")
        if inner is not None:
            yield from comparisons(tree, inner, not holds)
    elif kind == "binary_expression":
        left, right = condition.child_by_field_name("left"), condition.child_by_field_name("right")
        operator = condition.children[1].type
        if left is None or right is None:
            return
        if operator in (("&&", "and") if holds else ("||", "or")):
            yield from comparisons(tree, left, holds)
            yield from comparisons(tree, right, holds)
        elif operator in _OPPOSITE:
            operator = operator if holds else _OPPOSITE[operator]
            yield left, operator, right
            yield right, _MIRRORED[operator], left
