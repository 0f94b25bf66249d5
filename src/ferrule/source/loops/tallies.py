"""Outputs that each thread of the CPU adds up for itself, and then to the array: histograms.

An output of integers that a body mentions nowhere but in relaxed additions, whose results nobody
takes, may be added up in any order, and in parts. Sums of floats depend on the order, and stay as
they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tree_sitter import Node

from ..cpp import ROW_ADDITION, Prepared
from ..syntax import Tree, call_arguments, callee, field, kinds

_INTEGERS = frozenset({"int32", "uint32", "int64", "uint64"})
_RELAXED = ("memory_order_relaxed", "metal::memory_order_relaxed")


def tallying(p: Prepared, write: Callable[[Prepared], str]) -> str:
    """A text in which such outputs are added up so.

    Additions to neighbouring elements have a way of their own, which is faster.
    """
    names = _tallied(p)
    if names:
        text = write(replace(p, tallied=names))
        if ROW_ADDITION not in text and "::fr::split::locked_add(" not in text:
            return text
    return write(p)


def _tallied(p: Prepared) -> frozenset[str]:
    spec = p.spec
    outputs = zip(p.kernel.output_names, spec.outputs, strict=True)
    names = {n for n, dtype in outputs if dtype.name in _INTEGERS and n not in p.text.header_words}
    if not p.kernel.atomic_outputs or not names & p.text.words:
        return frozenset()
    tree = Tree(p.text.source, body=True)
    if tree.has_error:
        return frozenset()
    counts = dict.fromkeys(names, 0)
    for call in kinds(tree.block, "call_expression"):
        name = _added(tree, call)
        if name in counts:
            counts[name] += 1
    return frozenset(
        name
        for name, count in counts.items()
        if count and count == len(re.findall(rf"\b{name}\b", p.text.source))
    )


def _added(tree: Tree, call: Node) -> str:
    """The array that a statement adds to an element of; nothing for any other call."""
    arguments = call_arguments(call)
    if callee(tree, call) != "atomic_fetch_add_explicit" or len(arguments) != 3:
        return ""
    if call.parent is None or call.parent.type != "expression_statement":
        return ""
    element = field(arguments[0], "argument")
    if element is None or arguments[0].children[0].type != "&":
        return ""
    if element.type != "subscript_expression" or tree.text(arguments[2]) not in _RELAXED:
        return ""
    return tree.text(field(element, "argument"))
