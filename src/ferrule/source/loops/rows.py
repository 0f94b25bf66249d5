"""Bodies that divide their x by the length of a row: what is the same in a whole row.

Many bodies have one thread per element and find out where it stands: ``elem / C`` is the row,
``elem % C`` the place in it. Within a row the quotient is the same for all threads, and so is
whatever depends on it: loads, branches, whole loops. Such a body is written a second time, for
units of work that lie in one row; which of the two texts runs is decided unit by unit.
"""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from ..dialect import LINEAR_TYPES
from ..syntax import declarators, declared_name, walk
from .analysis import AnalysedBody
from .statements import initial_value
from .uniform import bare

# Attributes that are the same in a whole launch.
LAUNCH_ATTRIBUTES = frozenset(
    {"threads_per_simdgroup", "thread_execution_width", "threads_per_grid", "grid_size"}
)


class Row(NamedTuple):
    """The length of a row.

    Attributes:
        text: the divisor, without spaces and parentheses around it.
        declarations: what it depends on, to be declared before it.
    """

    text: str
    declarations: tuple[str, ...]


def find(body: AnalysedBody) -> Row | None:
    """The first divisor of the thread's x that is the same in the whole launch.

    Args:
        body: an analysed body.
    """
    declared: dict[str, list[Node]] = {}
    for node in walk(body.tree.block):
        if node.type in ("declaration", "parameter_declaration", "for_range_loop"):
            for declarator in declarators(node):
                name = declared_name(declarator)
                if name is not None:
                    declared.setdefault(body.tree.text(name), []).append(declarator)
    top = [s for s in body.tree.block.named_children if s.type == "declaration"]
    body.scopes = [dict(body.by_param), {}]
    places: dict[int, Node] = {}
    for statement in top:
        for declarator in declarators(statement):
            body._declared(statement, declarator, 0)
            places[declarator.start_byte] = statement
    for node in walk(body.tree.block):
        if node.type != "binary_expression" or node.children[1].type not in ("/", "%"):
            continue
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if left is None or right is None or not body.uniformity.position(left):
            continue
        needed: list[str] = []
        if _same_everywhere(body, right, declared, places, needed, 0):
            return Row(bare(body.tree.text(right)), tuple(needed))
    return None


def _same_everywhere(
    body: AnalysedBody,
    node: Node,
    declared: dict[str, list[Node]],
    places: dict[int, Node],
    needed: list[str],
    depth: int,
) -> bool:
    """Whether an expression is the same in the whole launch; adds the declarations it needs."""
    if depth > 20:
        return False
    for n in walk(node):
        if n.type in ("lambda_expression", "update_expression", "assignment_expression"):
            return False
        if n.type == "call_expression" and not body.uniformity.of(n):
            return False
        if n.type != "identifier":
            continue
        name = body.tree.text(n)
        if name in body.attributes and name not in LAUNCH_ATTRIBUTES:
            return False
        declarations = declared.get(name, [])
        parameter = body.by_param.get(name)
        if parameter is not None:
            if declarations or parameter.written or not parameter.readonly:
                return False
            continue
        if not declarations:
            continue  # a template parameter, a constant or a function
        if len(declarations) != 1 or declarations[0].start_byte not in places:
            return False
        declarator, statement = declarations[0], places[declarations[0].start_byte]
        variable = body.variables[declarator.start_byte]
        value = initial_value(declarator)
        if (
            value is None
            or variable.written
            or not variable.uniform
            or variable.kind != "value"
            or variable.pointer
        ):
            return False
        if not set(variable.type.split()) & (LINEAR_TYPES | {"auto"}):
            return False
        if not _same_everywhere(body, value, declared, places, needed, depth + 1):
            return False
        text = f"{body._parts(statement, declarator)[0]} {body.tree.text(declarator)};"
        if text not in needed:
            needed.append(text)
    return True
