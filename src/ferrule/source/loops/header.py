"""The functions of a header that synchronise: which there are, and what they call."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import NotSplittable, Prepared
from ..dialect import MATRIX_OPS, SIMD_BARRIERS, SYNC, THREADGROUP_BARRIERS
from ..macros import expand
from ..syntax import Tree, called, callee, field, function_definitions, kinds, part, walk
from .declarations import STRUCTS, declared_names, parameter_shapes
from .functions import HeaderFunction, one_line
from .statements import ancestors

_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[^\n]*$", re.MULTILINE)


class Functions:
    """The functions of a header that synchronise.

    Args:
        p: the kernel.
        names: what they are called.
    """

    def __init__(self, p: Prepared, names: set[str]) -> None:
        self.p = p
        self.names = names
        self._tree = p.header
        self._nodes: dict[str, list[Node]] = {}
        for name, node in function_definitions(self._tree):
            self._nodes.setdefault(re.sub(r"<.*", "", name), []).append(node)
            if "<" in name and name.split("<")[0] in names:
                raise NotSplittable(f"{name} of the header is a specialisation")
        self._read: dict[str, list[HeaderFunction]] = {}

    def is_call(self, tree: Tree, call: Node) -> bool:
        """Whether a call is of one of the functions."""
        function = part(call, "function")
        if callee(tree, call) not in self.names:
            return False
        if function.type == "qualified_identifier":
            return self.is_named(tree.text(function))
        return function.type in ("identifier", "template_function")

    def is_named(self, text: str) -> bool:
        """Whether a qualified name means one of the functions; others have the same last name."""
        scope, _, name = re.sub(r"<.*", "", text, flags=re.DOTALL).rpartition("::")
        end = f"::{scope.strip().removeprefix('::')}"
        return any(f"::{self._scope(n)}".endswith(end) for n in self._nodes.get(name.strip(), []))

    def find(self, name: str, arguments: int) -> HeaderFunction:
        """The function that a call with so many arguments means.

        Raises:
            NotSplittable: it is not clear which, or it cannot be moved.
        """
        matching = [
            f
            for f in self._versions(name)
            if sum(q.default is None for q in f.parameters) <= arguments <= len(f.parameters)
        ]
        if len(matching) != 1:
            several = f"has {len(matching)} versions for {arguments} arguments"
            raise NotSplittable(f"{name} of the header {several}")
        return matching[0]

    def takes_memory(self, name: str) -> bool:
        """Whether a function of the header is given pointers, or references to what changes."""
        return any(
            "*" in shape or "[]" in shape or ("&" in shape and not const)
            for node in self._nodes.get(name, [])
            for shape, const in parameter_shapes(node)
        )

    def _scope(self, node: Node) -> str:
        scopes = (n for n in ancestors(node) if n.type in ("namespace_definition", *STRUCTS))
        names = [self._tree.text(field(scope, "name")) for scope in scopes]
        return "::".join(filter(None, reversed(names)))

    def _reached(self, name: str) -> set[str]:
        """The functions that a function calls, directly or through others."""
        reached, last = set[str](), {name}
        while last:
            nodes = (node for n in last for node in self._nodes.get(n, []))
            names = set[str]().union(*(called(self._tree, node) for node in nodes))
            last = (names & self._nodes.keys()) - reached
            reached |= last
        return reached

    def _function(self, name: str, node: Node) -> HeaderFunction:
        outer = node
        while outer.parent is not None and outer.parent.type == "template_declaration":
            outer = outer.parent
        named: set[str] = set()
        for around in ancestors(outer):
            if around.type in STRUCTS:
                raise NotSplittable(f"a method {name} of the header synchronises")
            if around.type == "namespace_definition" and field(around, "name") is not None:
                named.update(*(declared_names(self._tree, n) for n in walk(around)))
        # The macros that are defined where the function is.
        text, p = self._tree.text(outer), self.p
        preceding = self._tree.data[: outer.start_byte].decode()
        text = expand(preceding, text, kernel=p.kernel.name)
        text = one_line(_PRAGMA.sub("", text))
        tree = Tree(text, body=False)
        definition = next(kinds(tree.root, "function_definition"), None)
        if definition is None:
            raise NotSplittable(f"{name} of the header is not understood")
        function = HeaderFunction(name, tree, definition, frozenset(self._nodes))
        clash = function.free & (named - self.names)
        clash |= (function.free | function.fields) & set(self.p.text.macros)
        if clash:
            raise NotSplittable(f"{min(clash)} means something else outside {name} of the header")
        if re.search(r"\bthread_local\b", text):
            raise NotSplittable(f"{name} of the header declares threadgroup memory")
        return function

    def effects(self, function: HeaderFunction) -> bool:
        """Whether a function may write to memory, or wait for others that do."""
        if function.writes_through():
            return True
        names = called(function.tree, function.body)
        if names & (THREADGROUP_BARRIERS | SIMD_BARRIERS | MATRIX_OPS):
            return True
        return any(name.startswith("atomic_") or self.takes_memory(name) for name in names) or any(
            self.effects(f) for name in names & self.names for f in self._versions(name)
        )

    def _versions(self, name: str) -> list[HeaderFunction]:
        if name in SYNC | MATRIX_OPS:
            raise NotSplittable(f"the header defines {name} anew")
        if name in self._reached(name):
            raise NotSplittable(f"{name} of the header calls itself")
        if name not in self._read:
            self._read[name] = [self._function(name, n) for n in self._nodes.get(name, [])]
        return self._read[name]
