"""Loops in which threads walk an array together: `for (i = tid; i < D; i += threads)`.

Written lane by lane, such a loop takes every `threads`-th element of the array, and is not
vectorised. Its rounds stand outside the loop over lanes instead: in each round the lanes take
neighbouring elements. Each lane still does the same in the same order, so nothing changes but what
lanes may not rely on: the order among them where no barrier stands.
"""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from ..dialect import WIDE_INTEGERS
from ..syntax import Tree, callee, declarators, field, kinds, operands, part
from .assignments import assigned, passed_by_name
from .body import Body
from .statements import initial_value, inner_declarator, jumps_out, loop_parts

_TYPES = [{word} for word in WIDE_INTEGERS]


class Stride(NamedTuple):
    """The head of a loop that counts up by equal steps.

    Attributes:
        start: the declaration of its variable.
        first: what the variable begins with.
        bound: the loop goes on while the variable is less.
        step: is added to the variable after each round.
    """

    start: Node
    first: Node
    bound: Node
    step: Node


def stride(body: Body, statement: Node) -> Stride | None:
    """The head of a loop whose rounds may be run by all lanes together; None for others.

    It is not yet known that the variable counts up from lane to lane, nor that bound and step are
    uniform.
    """
    tree = body.tree
    if statement.type != "for_statement" or body.calls(statement) or jumps_out(statement):
        return None
    if ordered(body, statement):
        return None
    parts = loop_parts(statement)
    if parts.start is None or parts.start.type != "declaration" or parts.update is None:
        return None
    declared = declarators(parts.start)
    first = initial_value(declared[0]) if len(declared) == 1 else None
    bound = _bound(tree, parts.condition)
    step = _step(tree, parts.update)
    if first is None or bound is None or step is None:
        return None
    name = inner_declarator(declared[0])
    spec = tree.data[parts.start.start_byte : declared[0].start_byte].decode().split()
    names = {tree.text(name), tree.text(bound[0]), tree.text(step[0])}
    if name.type != "identifier" or len(names) != 1 or set(spec) not in _TYPES:
        return None
    if names & _changed(body, parts.body) or any(_changed(body, n) for n in (bound[1], step[1])):
        return None
    return Stride(parts.start, first, bound[1], step[1])


def _bound(tree: Tree, condition: Node | None) -> tuple[Node, Node] | None:
    """The two sides of `i < bound`."""
    if condition is None or condition.type != "binary_expression":
        return None
    left, operator, right = operands(condition)
    return (left, right) if operator == "<" else (right, left) if operator == ">" else None


def _step(tree: Tree, update: Node) -> tuple[Node, Node] | None:
    """The variable and the step of `i += step`, or of `i = i + step`."""
    if update.type != "assignment_expression":
        return None
    left, right = part(update, "left"), part(update, "right")
    operator = tree.text(field(update, "operator"))
    if operator == "=" and right.type == "binary_expression":
        variable, operator, right = operands(right)
        return (left, right) if (operator, tree.text(variable)) == ("+", tree.text(left)) else None
    return (left, right) if operator == "+=" else None


def ordered(body: Body, statement: Node) -> bool:
    """Whether the order of lanes may matter: to memory that they change by atomics, or to operators
    of the author's, which may change operands."""
    header = body.prepared.text.header_words
    if {"operator", "volatile"} & (body.prepared.text.words | header):
        return True
    calls = (callee(body.tree, call) for call in kinds(statement, "call_expression"))
    return any(w.startswith("atomic_") for w in [*calls, *header])


def _changed(body: Body, node: Node) -> set[str]:
    """The names that a node may change."""
    changes = [*assigned(body.tree, node), *passed_by_name(body.tree, node, body.functions)]
    return {name for name, _ in changes}
