"""The variables of a body for `source.cuda.bounds`: what names mean, and where they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tree_sitter import Node

from .. import words
from ..cpp import Prepared
from ..loops.statements import inner_declarator
from ..syntax import Tree, call_arguments, declarators, declared_name, field, kinds, part
from .reads import IndexVariable, Reads, is_plain

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
        opaque: something hides what is written, or what is declared.
        jumps: labels may be jumped to past conditions.
    """

    def __init__(
        self, p: Prepared, source: str, tree: Tree, arrays: Mapping[str, tuple[int, str, bool]]
    ) -> None:
        self.p, self.source, self.tree, self.arrays = p, source, tree, arrays
        self.parents: dict[int, Node] = {}
        self.uses: dict[int, IndexVariable] = {}
        self.candidates: list[tuple[Node, Around]] = []
        self._named: list[tuple[Node, IndexVariable]] = []  # the uses, with their nodes
        self._declared: set[int] = set()  # where the names of declarations begin
        # Of the current node: the names around it, and how many nodes of a kind it stands in.
        self._scopes: list[dict[str, IndexVariable]] = []
        self._lambdas: list[Node] = []
        self._unevaluated = self._loops = self._branches = 0
        shapes = [f"{name}_shape" for name in p.kernel.input_names]
        self._pointers = {*arrays, *shapes}
        names = (*p.kernel.input_names, *p.kernel.output_names, *shapes)
        self.parameters = {name: IndexVariable(name) for name in names}
        self.reads = Reads(p, tree, self.parents, self.uses)
        # What a macro does to a variable, and which of two declarations holds, is not seen.
        self.opaque = bool(
            re.search(r"^[ \t]*#[ \t]*(?:if|el|define)", source, re.MULTILINE)
            or p.text.macros.keys() & set(re.findall(r"\w+", source))
            or not (self.reads.header.plain and is_plain(source))
            or any(map(self.reads.is_builtin, self.reads.header.by_value))
        )
        self.jumps = False

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
            own = self.parameters.get(variable.name) is variable
            pointer = own and variable.name in self._pointers
            if variable.written or self.reads.certain(node, pointer):
                continue
            parent = self.parents[node.id]
            if variable.loop is not None and self._is_update(parent, variable.loop):
                variable.updates.append(parent)
            else:
                variable.written = True

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
        elif kind == "case_statement":
            switch = self.parents.get(self.parents[node.id].id)
            self.jumps |= switch is None or switch.type != "switch_statement"
        elif kind == "identifier":
            name = self.tree.text(node)
            variable = next((s[name] for s in reversed(self._scopes) if name in s), None)
            if variable is not None:
                self.uses[node.start_byte] = variable
                if node.start_byte not in self._declared:
                    self._named.append((node, variable))
        elif kind == "call_expression" and self._declares(node):
            self.opaque = True
        elif not self._unevaluated and kind in _ACCESSES:
            around = Around(self._loops > 0, self._branches > 0, tuple(self._lambdas))
            self.candidates.append((node, around))

    def _hide(self, node: Node) -> None:
        """From here on a name means something of which nothing is known."""
        name = self.tree.text(node)
        self._scopes[-1][name] = IndexVariable(name, plain=False, written=True)
        self.opaque |= self.reads.is_builtin(name)  # `auto ulong = …`

    def _declares(self, call: Node) -> bool:
        """Whether what reads like a call may declare its argument: ``uint(k) = 9;``."""
        names = call_arguments(call)
        while len(names) == 1 and names[0].type == "parenthesized_expression":
            names = names[0].named_children
        if len(names) != 1 or names[0].type != "identifier":
            return False
        name = self.tree.text(part(call, "function")).removeprefix("metal::")
        typed = self.reads.is_builtin(name) or name.endswith("_t")  # not those of the header
        node, parent = call, self.parents.get(call.id)
        while parent is not None and parent.start_byte == call.start_byte:
            if parent.type == "assignment_expression":
                return typed or node.id == call.id
            if parent.type == "expression_statement":
                return typed
            node, parent = parent, self.parents.get(parent.id)
        head = field(parent, "initializer")
        return typed and head is not None and head.id == node.id

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
        parent = self.parents.get(node.id)
        loop = parent if parent is not None and parent.type == "for_statement" else None
        specifiers = ""
        before: set[str] = set()  # what the values before a declarator name
        for d in declarators(node):
            if field(node, "type") is not None and not specifiers:
                specifiers = self.tree.data[node.start_byte : d.start_byte].decode()
            inner, value, name = inner_declarator(d), field(d, "value"), declared_name(d)
            if inner is not None and inner.type == "structured_binding_declarator":
                for child in inner.named_children:
                    self._hide(child)
                continue
            like_a_function = value is None and any(kinds(d, "function_declarator"))
            shadows = self.tree.text(name) in before
            before |= set(re.findall(r"\w+", self.tree.text(d)))
            if name is None or like_a_function or shadows:  # `uint& r(i);`
                self.opaque = True
                continue
            text, plain = self.tree.text(name), inner is not None and inner.type == "identifier"
            self._declared.add(name.start_byte)
            self.opaque |= self.reads.is_builtin(text)
            written = node.type != "declaration"
            self._scopes[-1][text] = IndexVariable(text, specifiers, value, plain, written, loop)

    def _is_update(self, node: Node, loop: Node) -> bool:
        """Whether an expression is the last part of a loop's head, or follows a comma there."""
        parent = self.parents.get(node.id)
        while parent is not None and parent.type == "comma_expression":
            node, parent = parent, self.parents.get(parent.id)
        update = field(loop, "update")
        return update is not None and update.id == node.id
