"""The names of a body for `source.cuda.bounds`: what they mean, and whether buffers are moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tree_sitter import Node

from .. import words
from ..cpp import Prepared
from ..loops.statements import inner_declarator
from ..syntax import Tree, declarators, declared_name, field
from .reads import Reads, Variable

_LOOPS = words("for_statement while_statement do_statement for_range_loop")
_SCOPES = _LOOPS | words(
    "compound_statement if_statement switch_statement lambda_expression catch_clause"
)
_NOT_EVALUATED = words(
    "sizeof_expression alignof_expression decltype template_argument_list noexcept"
)
_ELSEWHERE = words("function_definition struct_specifier class_specifier union_specifier")
_DECLARATIONS = words(
    "declaration parameter_declaration optional_parameter_declaration for_range_loop "
    "condition_declaration"
)
_SHORT = words("&& || and or")
# The parts of a node that are evaluated on a condition alone.
_BRANCHES = {
    "if_statement": ("consequence", "alternative"),
    "conditional_expression": ("consequence", "alternative"),
    "binary_expression": ("right",),
    "switch_statement": ("body",),
}
_ACCESSES = words("subscript_expression pointer_expression call_expression")


class Around(NamedTuple):
    """What an access stands in: a loop, a branch, lambdas."""

    repeated: bool
    branch: bool
    lambdas: tuple[Node, ...]


class Variables:
    """The variables of one body.

    Attributes:
        arrays: the number of each buffer, its C++ type, and whether elements may lie before it.
        parents: the node around each, by its id.
        uses: what each name means, by where it begins; parameters are among `parameters`.
        candidates: the nodes that may be accesses, each with what it stands in.
    """

    def __init__(
        self, p: Prepared, source: str, tree: Tree, arrays: Mapping[str, tuple[int, str, bool]]
    ) -> None:
        self.p, self.source, self.tree, self.arrays = p, source, tree, arrays
        self.parents: dict[int, Node] = {}
        self.uses: dict[int, Variable] = {}
        self.candidates: list[tuple[Node, Around]] = []
        self._named: list[tuple[Node, Variable]] = []  # the uses, with their nodes
        self._declared: set[int] = set()  # where the names of declarations begin
        # Of the current node: the names around it, and how many nodes of a kind it stands in.
        self._scopes: list[dict[str, Variable]] = []
        self._lambdas: list[Node] = []
        self._unevaluated = self._loops = self._branches = 0
        names = (*p.kernel.input_names, *p.kernel.output_names)
        self.parameters = {name: Variable(name) for name in names}
        self.reads = Reads(p, tree, self.parents, self.uses)

    def read(self) -> None:
        """Find what each name means, which variables are written, and what may be an access."""
        self._scopes.append(dict(self.parameters))
        # Pairs of a node and whether it is left again. No recursion: sums may be as deep as long.
        waiting: list[tuple[Node, bool]] = [(self.tree.block, False)]
        while waiting:
            node, left = waiting.pop()
            if node.type in _ELSEWHERE:
                continue
            step = -1 if left else 1
            self._unevaluated += step * (node.type in _NOT_EVALUATED)
            self._loops += step * (node.type in _LOOPS)
            self._branches += step * self._is_branch(node)
            if left:
                self._leave(node)
                continue
            self._enter(node)
            waiting.append((node, True))
            for child in reversed(node.children):
                self.parents[child.id] = node
                waiting.append((child, False))
        for node, variable in self._named:
            own = self.parameters.get(variable.name) is variable and variable.name in self.arrays
            variable.written = variable.written or (own and not self.reads.certain(node))

    def _leave(self, node: Node) -> None:
        if node.type in _SCOPES:
            self._scopes.pop()
        if node.type == "lambda_expression":
            self._lambdas.pop()

    def _enter(self, node: Node) -> None:
        kind = node.type
        if kind in _SCOPES:
            self._scopes.append({})
        if kind == "lambda_expression":
            self._lambdas.append(node)
        if kind in _DECLARATIONS:
            self._declare(node)
        elif kind == "lambda_capture_initializer" and node.named_child_count:
            self._hide(node.named_children[0])
        elif kind in ("alias_declaration", "type_definition"):
            for child in node.named_children:
                self._hide(child)
        elif kind == "identifier":
            name = self.tree.text(node)
            variable = next((s[name] for s in reversed(self._scopes) if name in s), None)
            if variable is not None:
                self.uses[node.start_byte] = variable
                if node.start_byte not in self._declared:
                    self._named.append((node, variable))
        elif not self._unevaluated and kind in _ACCESSES:
            around = Around(self._loops > 0, self._branches > 0, tuple(self._lambdas))
            self.candidates.append((node, around))

    def _hide(self, node: Node) -> None:
        """From here on a name means something of which nothing is known."""
        name = self.tree.text(node)
        self._scopes[-1][name] = Variable(name)

    def _is_branch(self, node: Node) -> bool:
        """Whether a node is evaluated on a condition alone."""
        parent = self.parents.get(node.id)
        if parent is None or parent.type not in _BRANCHES:
            return False
        if parent.type == "binary_expression" and parent.children[1].type not in _SHORT:
            return False
        branches = (field(parent, name) for name in _BRANCHES[parent.type])
        return any(branch is not None and branch.id == node.id for branch in branches)

    def _declare(self, node: Node) -> None:
        for d in declarators(node):
            inner, name = inner_declarator(d), declared_name(d)
            if inner is not None and inner.type == "structured_binding_declarator":
                for child in inner.named_children:
                    self._hide(child)
            elif name is not None:
                text = self.tree.text(name)
                self._declared.add(name.start_byte)
                self._scopes[-1][text] = Variable(text, field(d, "value"))
