"""Bodies that divide their x by the length of a row: what is the same in a whole row.

Many bodies have one thread per element and find out where it stands: ``elem / C`` is the row,
``elem % C`` the place in it. Within a row the quotient is the same for all threads, and so is
whatever depends on it: loads, branches, whole loops. Such a body is written a second time, for
units of work that lie in one row; which of the two texts runs is decided unit by unit.

So is a body whose threads each go down a column of an array: in such a unit they do it side by
side, round by round, where one after the other they would take elements that lie far apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tree_sitter import Node

from ..dialect import WIDE_INTEGERS
from ..syntax import declarators, declared_name, kinds, operands, walk
from .body import Body, Scopes, Variables
from .statements import initial_value
from .uniform import Uniformity, bare

# Attributes that are the same in a whole launch.
LAUNCH_ATTRIBUTES = frozenset(
    {"threads_per_simdgroup", "thread_execution_width", "threads_per_grid", "grid_size"}
)

_CHANGES = ("lambda_expression", "update_expression", "assignment_expression")


# The row of a body that divides nothing, but goes down columns: that of the grid.
_OF_GRID = "fr_g.threads_per_grid.x"


class Row(NamedTuple):
    """The length of a row.

    Attributes:
        text: the divisor, without spaces and parentheses around it.
        declarations: what it depends on, to be declared before it.
    """

    text: str
    declarations: tuple[str, ...]


def find(body: Body, variables: Variables) -> Row | None:
    """The first divisor of the thread's x that is the same in the whole launch; or the grid's row,
    for a body whose threads wait for nobody and go down columns.

    Args:
        variables: of the body, analysed.
    """
    declared: dict[str, list[Node]] = {}
    for node in kinds(body.tree.block, "declaration", "parameter_declaration", "for_range_loop"):
        for declarator in declarators(node):
            name = declared_name(declarator)
            if name is not None:
                declared.setdefault(body.tree.text(name), []).append(declarator)
    scopes = Scopes(body, variables)
    with scopes.inner():
        top = {v.key for s in body.tree.block.named_children for v in scopes.declare(s)}
        search = _Search(body, Uniformity(scopes), declared, top)
        for node in kinds(body.tree.block, "binary_expression"):
            left, operator, right = operands(node)
            if operator in ("/", "%") and search.uniformity.position(left):
                needed = search.needs(right)
                if needed is not None:
                    return Row(bare(body.tree.text(right)), tuple(needed))
        if body.whole and any(map(search.uniformity.columns, _outermost(body.tree.block))):
            return Row(_OF_GRID, ())
    return None


def _outermost(node: Node) -> Iterator[Node]:
    """The loops in a statement that are in no other, but perhaps in an `if`."""
    for statement in node.named_children:
        if statement.type == "for_statement":
            yield statement
        elif statement.type in ("if_statement", "else_clause", "compound_statement"):
            yield from _outermost(statement)


class _Search(NamedTuple):
    """A look at what a divisor depends on.

    Attributes:
        declared: the declarators of each name.
        top: where those of the body's own statements start, not those of its blocks.
    """

    body: Body
    uniformity: Uniformity
    declared: dict[str, list[Node]]
    top: set[int | str]

    def needs(self, node: Node, depth: int = 0) -> list[str] | None:
        """The declarations that an expression needs; None if it may differ within a launch."""
        needed: list[str] = []
        for n in walk(node):
            if depth > 20 or n.type in _CHANGES:
                return None
            if n.type == "call_expression" and not self.uniformity.of(n):
                return None
            if n.type == "identifier":
                declarations = self._named(self.body.tree.text(n), depth)
                if declarations is None:
                    return None
                needed += [text for text in declarations if text not in needed]
        return needed

    def _named(self, name: str, depth: int) -> list[str] | None:
        """The declarations that a name needs; None if what it means may differ."""
        declarations, variables = self.declared.get(name, []), self.uniformity.scopes.variables
        parameter = variables.get(name)
        if name in self.body.attributes and name not in LAUNCH_ATTRIBUTES:
            return None
        if parameter is not None:
            changes = declarations or parameter.written or not parameter.readonly
            return None if changes else []
        if not declarations:
            return []  # a template parameter, a constant or a function
        declarator = declarations[0]
        if len(declarations) != 1 or declarator.start_byte not in self.top:
            return None
        v, value = variables[declarator.start_byte], initial_value(declarator)
        integer = bool(set(v.type.split()) & (WIDE_INTEGERS | {"auto"}))
        if v.written or not v.uniform or v.kind != "value" or v.pointer or not integer:
            return None
        needed = self.needs(value, depth + 1) if value is not None else None
        text = f"{v.type} {self.body.tree.text(declarator)};"
        return None if needed is None else [*needed, text]
