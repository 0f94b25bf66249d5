"""Whether a kernel makes a simdgroup_matrix from one value.

Such a matrix has the value on its diagonal, so that a lane must know which it is: on fibers it
does. Zero is the same everywhere.
"""

from __future__ import annotations

import re

from tree_sitter import Node

from ..rewrite import with_callers
from ..syntax import Tree, declarator_shape, declarators, field, walk

_NAMES = ("simdgroup_matrix", "simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8")
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*([^;]+);|\btypedef\s+([^;]+?)\s*\b(\w+)\s*;")
_ZERO = re.compile(r"[({]?\s*(?:0(?:\.0*)?[fFhH]?)?\s*[)}]?")


def makes_diagonal(header: Tree, body: Tree) -> bool:
    """Whether the header or the body makes a matrix from a value that is not 0."""
    source = header.data.decode() + body.data.decode()
    if not any(name in source for name in _NAMES):
        return False
    aliases: dict[str, set[str]] = {}
    for m in _ALIAS.finditer(source):
        words = re.findall(r"\w+", m.group(2) or m.group(3))
        aliases.setdefault(m.group(1) or m.group(4), set()).update(words)
    names = with_callers(set(_NAMES), aliases)
    return any(_makes(t, node, names) for t in (header, body) for node in walk(t.root))


def _makes(tree: Tree, node: Node, names: set[str]) -> bool:
    if node.type in ("declaration", "field_declaration"):
        if not _is_matrix(tree, field(node, "type"), names):
            return False
        if tree.is_body and any(
            "function_declarator" in declarator_shape(d) for d in declarators(node)
        ):
            return True  # `M m(scale);` reads like a function
        values = [field(d, "value") for d in declarators(node)]
        values.append(field(node, "default_value"))
        return any(v is not None and _from_number(tree, v) for v in values)
    if node.type in ("call_expression", "compound_literal_expression", "cast_expression"):
        operand = tree.text(field(node, "arguments") or field(node, "value"))
        type_node = field(node, "function") or field(node, "type")
        return _is_matrix(tree, type_node, names) and not _ZERO.fullmatch(operand)
    return False


def _from_number(tree: Tree, value: Node) -> bool:
    """Whether an initialiser may be a number: not an empty one, a zero, or another matrix."""
    if _ZERO.fullmatch(tree.text(value)):
        return False
    if value.type == "initializer_list":  # of an array: what makes its elements is seen there
        return any(n.type == "number_literal" for n in value.named_children) or (
            value.named_child_count == 1 and value.named_children[0].type != "call_expression"
        )
    # `=` never makes a matrix from a number: the constructor is explicit.
    return value.type == "argument_list"


def _is_matrix(tree: Tree, type_node: Node | None, names: set[str]) -> bool:
    words = re.findall(r"\w+", tree.text(type_node).split("<")[0])
    return bool(words) and words[-1] in names
