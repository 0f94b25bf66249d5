"""The operations of simdgroups in a body, and the jumps by which lanes miss them."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import synchronising_functions
from ..dialect import SIMD_BARRIERS, SIMD_OPS
from ..loops.body import Body
from ..loops.statements import LOOPS, NESTED_CODE
from ..rewrite import with_callers
from ..syntax import (
    called,
    callee,
    declared_name,
    enclosing_struct,
    function_definitions,
    kinds,
    walk_code,
)

MASKED = SIMD_OPS | SIMD_BARRIERS  # what is handed a mask
_LOOPS = (*LOOPS, "for_range_loop")
JUMPS = {f"{kind}_statement": kind for kind in ("return", "break", "continue")}


class SimdOperations:
    """The operations of one body.

    Attributes:
        callers: the functions that operate without being handed a mask.
        operations: where the operations and the calls of such functions begin.
    """

    def __init__(self, body: Body) -> None:
        self.body, self.tree = body, body.tree
        self.callers = self._callers()
        calls = (n for n in walk_code(self.tree.block) if n.type == "call_expression")
        self.operations = [
            n.start_byte for n in calls if self._is_operation(n) or self._leads_to_operation(n)
        ]

    def _is_operation(self, node: Node) -> bool:
        return node.type == "call_expression" and callee(self.tree, node) in MASKED

    def _leads_to_operation(self, node: Node) -> bool:
        """Whether a call leads to operations that name no lanes."""
        name = re.split(r"\.|->", callee(self.tree, node))[-1]
        return node.type == "call_expression" and name in self.callers

    def _callers(self) -> set[str]:
        """Functions and lambdas that operate: what is left of the header's, and local ones."""
        definitions: list[tuple[str, Node]] = []
        for name, node in function_definitions(self.tree):
            definitions += [(name, node), (enclosing_struct(self.tree, node), node)]
        for node in kinds(self.tree.block, "init_declarator"):
            name, lambdas = self.tree.text(declared_name(node)), kinds(node, "lambda_expression")
            definitions += [(name, n) for n in lambdas]
        calls: dict[str, set[str]] = {}
        for name, node in definitions:
            if name and node.start_byte > self.tree.block.start_byte:
                calls.setdefault(name, set()).update(called(self.tree, node))
        callers = {re.sub(r"<.*", "", name) for name in synchronising_functions(self.body.prepared)}
        return callers | (with_callers(callers | MASKED, calls) - MASKED)

    def _operates(self, node: Node) -> bool:
        return any(node.start_byte <= start < node.end_byte for start in self.operations)

    def _matters_after(self, node: Node) -> bool:
        """Whether an operation may run after a statement."""
        if self.operations[-1] >= node.end_byte:
            return True
        around = node.parent
        while around is not None and not (around.type in _LOOPS and self._operates(around)):
            around = around.parent
        return around is not None

    def _outgoing(self, s: Node) -> list[Node]:
        """The jumps by which lanes leave a statement while it matters who is left."""
        jumps: list[Node] = []

        def visit(node: Node, nested: bool, switched: bool) -> None:
            kind = JUMPS.get(node.type)
            if (
                (kind == "return" and self._matters_after(s))
                or (kind == "break" and not nested and not switched)
                or (kind == "continue" and not nested)
            ):
                jumps.append(node)
            if node.type in NESTED_CODE:
                return
            nested = nested or node.type in _LOOPS
            for child in node.children:
                visit(child, nested, switched or node.type == "switch_statement")

        visit(s, False, False)
        return jumps
