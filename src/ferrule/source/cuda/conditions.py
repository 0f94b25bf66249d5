"""What the author's own conditions say where an expression is evaluated.

`around` finds the conditions that hold there, `comparisons` what they compare::

    if (i >= 0 && i < H) sum += x[i];       // i >= 0, i < H
    if (row >= M || column >= N) return;    // !(row >= M), !(column >= N): row < M, column < N
    y[row * N + column] = sum;
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tree_sitter import Node

from ..syntax import Tree, field, operands, part

_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_LEAVES = frozenset({"return_statement", "break_statement", "continue_statement"})
# The parts of a node that are reached where its condition holds, or where it does not.
_BRANCHES = (("consequence", True), ("alternative", False))
_HOLDING: dict[str, tuple[tuple[str, bool], ...]] = {
    "if_statement": _BRANCHES,
    "conditional_expression": _BRANCHES,
    "while_statement": (("body", True),),
    "for_statement": (("body", True),),
}


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
    kind, condition = parent.type, field(parent, "condition")
    if kind == "binary_expression" and part(parent, "right").id == node.id:
        if parent.children[1].type in ("&&", "and"):
            yield part(parent, "left"), True
        elif parent.children[1].type in ("||", "or"):
            yield part(parent, "left"), False
    elif kind == "compound_statement":
        for statement in parent.named_children:
            if statement.id == node.id:
                break
            if statement.type == "if_statement" and _leaves(statement):
                yield part(statement, "condition"), False
    elif condition is not None:
        for name, holds in _HOLDING.get(kind, ()):
            branch = field(parent, name)
            if branch is not None and branch.id == node.id:
                yield condition, holds


def _leaves(statement: Node) -> bool:
    """Whether what follows an ``if`` without ``else`` is reached only where it does not hold."""
    last = part(statement, "consequence")
    if last.type == "compound_statement" and last.named_children:
        last = last.named_children[-1]
    return last.type in _LEAVES and field(statement, "alternative") is None


def comparisons(
    tree: Tree, condition: Node, holds: bool = True
) -> Iterator[tuple[Node, str, Node]]:
    """What is compared where a condition holds, or does not: ``a < b``, and ``b > a`` too."""
    kind = condition.type
    if kind in ("condition_clause", "parenthesized_expression"):
        if condition.named_child_count == 1:
            yield from comparisons(tree, condition.named_children[0], holds)
    elif kind == "unary_expression" and condition.children[0].type in ("!", "not"):
        yield from comparisons(tree, part(condition, "argument"), not holds)
    elif kind == "binary_expression":
        left, operator, right = operands(condition)
        if operator in (("&&", "and") if holds else ("||", "or")):
            yield from comparisons(tree, left, holds)
            yield from comparisons(tree, right, holds)
        elif operator in _OPPOSITE:
            operator = operator if holds else _OPPOSITE[operator]
            yield left, operator, right
            yield right, _MIRRORED[operator], left
