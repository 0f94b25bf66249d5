"""Threadgroup memory as CUDA has it: ``__shared__`` variables, which are static."""

from __future__ import annotations

import re

from tree_sitter import Node

from .syntax import Tree, declarator_shape, declarators, walk

_MARK = re.compile(r"\bthread_local\b")  # what `rewrite` makes of `threadgroup`


def with_shared_memory(text: str) -> str:
    """The body with ``__shared__`` in place of `rewrite`'s mark, line for line."""
    if _MARK.search(text) is None:
        return text
    tree = Tree(text, body=True)
    if tree.has_error:
        return _MARK.sub("__shared__", text)
    edits: list[tuple[int, int, str]] = []
    names: set[str] = set()
    for node in walk(tree.block):
        if node.type == "declaration" and _MARK.match(tree.text(node)):
            names |= _declared(tree, node, edits)
    for node in walk(tree.block):
        if node.type == "lambda_capture_specifier":
            _uncapture(tree, node, names, edits)
    return _MARK.sub("__shared__", tree.edited(edits))


def _declared(tree: Tree, node: Node, edits: list[tuple[int, int, str]]) -> set[str]:
    """The variables that a declaration puts into threadgroup memory.

    In ``threadgroup float a[8], *p = a;`` the pointer is each thread's own: it gets a declaration
    of its own after the other.
    """
    found = declarators(node)
    own = [d for d in found if {"pointer_declarator", "reference_declarator"} & _shape(d)]
    shared = [d for d in found if d not in own]
    if own and shared:
        start = tree.text(node)[: found[0].start_byte - node.start_byte]
        rest = f"{_MARK.sub('', start, count=1).strip()} {', '.join(map(tree.text, own))};"
        new = f"{start}{', '.join(map(tree.text, shared))}; {rest}"
        lines = tree.text(node).count("\n") - new.count("\n")
        edits.append((node.start_byte, node.end_byte, new + "\n" * lines))
    elif own:
        edits.append((node.start_byte, node.start_byte + len("thread_local"), ""))
    return {name for d in shared for name in re.findall(r"^\w+", tree.text(d))}


def _shape(declarator: Node) -> set[str]:
    return set(declarator_shape(declarator))


def _uncapture(tree: Tree, node: Node, names: set[str], edits: list[tuple[int, int, str]]) -> None:
    """A lambda sees static variables without capturing them, and must not name them."""
    kept = []
    for item in tree.text(node)[1:-1].split(","):
        name = item.strip().removeprefix("&").strip()
        if name not in names:
            kept.append(item)
        elif "&" not in item:
            kept.append(f" {name} = {name}")
    new = f"[{','.join(kept).strip()}]"
    if new != tree.text(node):
        edits.append((node.start_byte, node.end_byte, new))
