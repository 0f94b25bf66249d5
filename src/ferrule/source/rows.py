"""Rows of arrays of several dims in a checked body: where the compiler does not tell, each index is
looked at."""

from __future__ import annotations

from tree_sitter import Node

from . import words
from .syntax import (
    Edit,
    Tree,
    callee,
    declarator_shape,
    declarators,
    enclosed,
    field,
    kinds,
    part,
)

PLAIN = words("bool char uchar short ushort int uint long ulong float double")


def watch_rows(text: str, *, body: bool) -> str:
    """A text in which ``a[i][j]`` calls ``fr::fr_in_row`` for the second index and those after it.

    The compiler looks at indices, but takes the row's length for a legal one where an object of a
    class is accessed, such as a half or a vector: that is how ends are written, ``&a[i][n]``.
    Left as it is ``a[0][j]``, which takes the whole array for one row.
    """
    tree = Tree(text, body=body)
    arrays = set() if tree.has_error else _of_several_dims(tree)
    edits: list[Edit] = []
    for node in kinds(tree.block, "subscript_expression") if arrays else ():
        name, first, depth = _subscripted(tree, node)
        index = field(node, "indices")
        if name not in arrays or depth < 2 or first == "[0]":
            continue
        if index is not None and not _is_apart(tree, node):
            # In parentheses: a macro's argument must hold no bare comma.
            before = f"(::fr::fr_in_row<decltype({name}), {depth}>(("
            edits += enclosed(index.children[1], before, f'), "{name}"))', index.children[-2])
    return tree.edited(edits)


def _of_several_dims(tree: Tree) -> set[str]:
    """The names of such arrays, where they are not of plain numbers; others may have the same."""
    names: set[str] = set()
    for node in kinds(tree.block, "declaration", "parameter_declaration"):
        if tree.text(field(node, "type")) not in PLAIN:
            for d in declarators(node):
                name = next(kinds(d, "identifier"), None)  # in brackets, too: (&a)[8][8]
                if name is not None and declarator_shape(d).count("array_declarator") > 1:
                    names.add(tree.text(name))
    return names


def _subscripted(tree: Tree, node: Node) -> tuple[str, str, int]:
    """What is subscripted, where that is a name, by what first, and how often up to here."""
    depth, inner = 1, part(node, "argument")
    while inner.type == "subscript_expression":
        node, inner, depth = inner, part(inner, "argument"), depth + 1
    name = tree.text(inner) if inner.type == "identifier" else ""
    return name, tree.text(field(node, "indices")), depth


def _is_apart(tree: Tree, node: Node) -> bool:
    """Whether an address is taken, which may be an end's, a member is accessed, which the compiler
    tells, or an assertion shows its own text."""
    around = node.parent
    while around is not None and around.type in ("parenthesized_expression", "field_expression"):
        if len(tree.text(field(around, "field"))) == 1:  # no swizzle
            return True
        around = around.parent
    if around is not None and around.type == "pointer_expression":
        return True
    while around is not None and not around.type.endswith("_statement"):
        if around.type == "call_expression" and callee(tree, around) == "assert":
            return True
        around = around.parent
    return False
