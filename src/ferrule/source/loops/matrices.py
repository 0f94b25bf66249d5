"""What a body does with a simdgroup_matrix.

One that is made from a value has it on its diagonal, so that a lane must know which it is: on
fibers it does. Zero is the same everywhere.

Split loops keep a matrix of a simdgroup in one piece (`include/tiles.h`), and arrays of matrices,
where each mention of an array names one matrix in it.
"""

from __future__ import annotations

import re

from tree_sitter import Node

from ..rewrite import with_callers
from ..syntax import Tree, declarator_shape, declarators, declared_name, field, kinds, walk

_NAMES = ("simdgroup_matrix", "simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8")
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*([^;]+);|\btypedef\s+([^;]+?)\s*\b(\w+)\s*;")
_ZERO = re.compile(r"[({]?\s*(?:0(?:\.0*)?[fFhH]?)?\s*[)}]?")


def makes_diagonal(header: Tree, body: Tree) -> bool:
    """Whether the header or the body makes a matrix from a value that is not 0."""
    names = _type_names(header, body)
    return bool(names) and any(
        _makes(t, node, names) for t in (header, body) for node in walk(t.root)
    )


def matrix_arrays(header: Tree, body: Tree) -> set[str]:
    """The names of arrays of matrices of which nothing but one matrix is ever mentioned."""
    names = _type_names(header, body)
    if not names:
        return set()
    dims: dict[str, set[int]] = {}
    for node in kinds(body.block, "declaration"):
        for declarator in declarators(node):
            shape = declarator_shape(declarator)
            matrices = set(shape) == {"array_declarator"} and _is_matrix(
                body, field(node, "type"), names
            )
            plain = matrices and declarator.type != "init_declarator"
            dims.setdefault(body.text(declared_name(declarator)), set()).add(
                len(shape) if plain else 0
            )
    for node in kinds(body.block, "identifier"):
        if body.text(node) in dims and not _is_declared(node):
            dims[body.text(node)].add(_indices(node))
    return {name for name, found in dims.items() if len(found) == 1 and 0 not in found}


def _is_declared(node: Node) -> bool:
    """Whether a name is that of its declaration."""
    while node.parent is not None and field(node.parent, "declarator") == node:
        node = node.parent
        if node.type == "declaration":
            return True
    return node.parent is not None and node.parent.type == "declaration"


def _indices(node: Node) -> int:
    """How many indices follow a name."""
    count = 0
    while (around := node.parent) is not None and field(around, "argument") == node:
        if around.type != "subscript_expression":
            break
        node, count = around, count + 1
    return count


def _type_names(header: Tree, body: Tree) -> set[str]:
    """The names of types that are matrices; none where there are no matrices."""
    source = header.data.decode() + body.data.decode()
    if not any(name in source for name in _NAMES):
        return set()
    aliases: dict[str, set[str]] = {}
    for m in _ALIAS.finditer(source):
        words = re.findall(r"\w+", m.group(2) or m.group(3))
        aliases.setdefault(m.group(1) or m.group(4), set()).update(words)
    return with_callers(set(_NAMES), aliases)


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
