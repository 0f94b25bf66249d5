"""Whether a body may reach its private memory by pointers, beside subscripts of its arrays."""

from __future__ import annotations

import re

from tree_sitter import Node

from . import NotSplittable
from .cpp import Prepared
from .macros import expand
from .syntax import Tree, declarator_shape, declarators, declared_name, field, kinds, walk
from .unset_elements import subscripts_of

# What has elements, or an address, in ways of its own.
_OTHER = re.compile(
    r"\b(?:struct|class|union|this|vec<|packed_\w+|simdgroup_matrix|asm|using\s+\w+\s*=|typedef)"
    r"|\b(?:bool|u?(?:char|short|int|long)|half|bfloat|float)[234]\b"
)


def is_pointed_to(p: Prepared) -> bool:
    """Whether a pointer may lead to a local variable; also where that is not known."""
    try:
        texts = p.expanded(), expand("", p.text.header, kernel=p.kernel.name) + "\n"
    except NotSplittable:
        return True
    if any(_OTHER.search(text) for text in texts):
        return True
    trees = Tree(texts[0], body=True), Tree(texts[1], body=False)
    return any(tree.has_error or _has_pointers(tree) for tree in trees)


def _has_pointers(tree: Tree) -> bool:
    """Whether a text takes addresses, or names an array without all of its subscripts."""
    dims: dict[str, int] = {}
    declared: set[int] = set()
    for node in walk(tree.root):
        if node.type == "pointer_expression" and node.children[0].type == "&":
            return True
        for declarator in declarators(node):
            count = declarator_shape(declarator).count("array_declarator")
            name = declared_name(declarator)
            if count and not _is_small(tree, declarator):  # it may overflow the stack
                return True
            if count and name is not None:
                dims[tree.text(name)] = max(count, dims.get(tree.text(name), 0))
                declared.add(name.id)
    return any(
        tree.text(node) in dims
        and node.id not in declared
        and sum(1 for _ in subscripts_of(node)) < dims[tree.text(node)]
        for node in kinds(tree.root, "identifier")
    )


def _is_small(tree: Tree, declarator: Node) -> bool:
    """Whether an array's lengths are written in numbers, and make no more than 1,024 elements."""
    elements = 1
    for part_ in kinds(declarator, "array_declarator"):
        size = tree.text(field(part_, "size"))
        elements *= int(size) if size.isdigit() else 1 if not size else 1 << 20
    return elements <= 1024
