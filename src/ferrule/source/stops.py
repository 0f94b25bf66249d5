"""A kernel whose threads can stop at lines, and show what they have there.

Before the statement that begins on a line stands, on the same line, what `include/stops.h`
defines: the question whether this thread stops here, the variables in scope, the elements that the
line reads and writes, and the wait. All of it is in the author's dialect, so whatever makes C++ of
a kernel makes it of this one. Of ``x[IDX(i)]`` nobody here knows what ``IDX`` does: that element is
left out, and named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

from tree_sitter import Node

from ..kernel import Kernel
from . import elements, words
from .branches import compiled
from .dialect import ADDRESS_SPACES
from .lexer import join
from .syntax import (
    Edit,
    Tree,
    declarators,
    declared_name,
    enclosed,
    walk,
)
from .syntax import field as part_of

# The parser takes an address space for a type. Loops are not unrolled: their pragmas must stand
# before a loop, and so does what is written here.
_SPACES = re.compile(rf"\b(?:{'|'.join(sorted(ADDRESS_SPACES))})\b")
_UNROLL = re.compile(r'^[ \t]*#[ \t]*pragma[^\n]*unroll[^\n]*|_Pragma\s*\(\s*"[^"\n]*"\s*\)', re.M)

_STATEMENTS = words("""
    declaration expression_statement if_statement for_statement for_range_loop while_statement
    do_statement switch_statement return_statement break_statement continue_statement
    attributed_statement
""")
_LONG = words("declaration expression_statement return_statement")  # may go on on the next line
# What has statements, and what has one, where two need braces.
_LISTS = words(
    "compound_statement case_statement preproc_if preproc_ifdef preproc_else preproc_elif"
)
_ALONE = words("if_statement else_clause for_statement for_range_loop while_statement do_statement")


@dataclass
class Stopping:
    """A kernel that can stop.

    Attributes:
        kernel: its text asks at lines whether to stop.
        lines: of ``("source", 7)``, as it was asked for, the line of the statement that is meant;
            None where there is none.
        left_out: elements of a line that are not shown, and why, by where and line.
    """

    kernel: Kernel
    lines: dict[tuple[str, int], int | None] = field(default_factory=dict)
    left_out: dict[tuple[str, int], list[str]] = field(default_factory=dict)


def with_stops(
    kernel: Kernel, wanted: Set[tuple[str, int]], *, every: bool, values: int = 2
) -> Stopping:
    """A kernel that asks at lines whether to stop.

    Args:
        kernel: the author's.
        wanted: the lines, each with ``"source"`` or ``"header"``.
        every: ask at every line with a statement, so that a thread can be followed.
        values: what is shown: 0 nothing but the place, 1 variables, 2 elements of arrays, too.
    """
    made = Stopping(kernel)
    texts: dict[str, str] = {}
    for where, code in zip(("header", "source"), compiled(kernel, ours=True), strict=True):
        tree = _tree(join(code), body=where == "source")
        lines = _lines(tree)
        edits: list[Edit] = []
        asked = {line for text, line in wanted if text == where}
        found = {line: _line_of(lines, line) for line in asked}
        made.lines.update({(where, line): at for line, at in found.items()})
        for line in sorted(lines if every else {at for at in found.values() if at is not None}):
            edits += _edits(tree, lines[line], (where, line), values, made)
        texts[where] = tree.edited(edits)
    made.kernel = replace(kernel, header=texts["header"], source=texts["source"])
    return made


def _tree(text: str, *, body: bool) -> Tree:
    """A text as it is, parsed without what the parser does not know."""
    plain = _UNROLL.sub(_blank, text)
    tree = Tree(_SPACES.sub(_blank, plain), body=body)
    tree.data = Tree(plain, body=body).data
    return tree


def _blank(match: re.Match[str]) -> str:
    return " " * len(match.group())


def _lines(tree: Tree) -> dict[int, Node]:
    """The statements that can be stopped before, by the lines on which they begin."""
    found: dict[int, Node] = {}
    for node in walk(tree.block):
        line = node.start_point[0] + 1
        if node.type in _STATEMENTS and line not in found and _is_statement(tree, node):
            found[line] = node
    return found


def _is_statement(tree: Tree, node: Node) -> bool:
    """Whether a statement can have another one before it."""
    around = node.parent
    if around is None or around.type not in _LISTS | _ALONE:
        return False
    if node.type == "declaration" and around.type in _ALONE:
        return False  # in the head of a loop
    while around is not None and around.type not in ("function_definition", "lambda_expression"):
        if around.type == "ERROR":
            return False
        around = around.parent
    if around is None or around.type == "lambda_expression":
        return around is not None
    head = tree.data[around.start_byte : around.start_byte + 400].split(b"{")[0]
    return b"constexpr" not in head  # those call nothing that is not


def _line_of(lines: dict[int, Node], line: int) -> int | None:
    """The line of the statement that is meant by a line: its own, one that goes on there, or the
    next one's."""
    if line in lines:
        return line
    around = [
        at
        for at, node in lines.items()
        if at < line <= node.end_point[0] + 1 and node.type in _LONG
    ]
    later = [at for at in lines if at > line]
    return max(around, default=None) or min(later, default=None)


def _edits(
    tree: Tree, node: Node, place: tuple[str, int], values: int, made: Stopping
) -> list[Edit]:
    """What stands before one statement."""
    where, line = place
    parts: list[str] = []
    if values:
        names = list(dict.fromkeys(_in_scope(tree, node)))
        parts += [f"FR_STOP_SHOW({name});" for name in names]
    if values > 1:
        shown, left_out = elements.elements(tree, node)
        if left_out:
            made.left_out[place] = left_out
        for element in shown:
            show = f"FR_STOP_ELEMENT({json.dumps(element.text, ensure_ascii=False)}, "
            show += f"'{element.kind}', {', '.join((element.base, *element.indices))});"
            guard = " && ".join(f"({guard})" for guard in element.guards)
            parts.append(f"if ({guard}) {{ {show} }}" if guard else show)
    number = line if where == "source" else -line
    ask = f"if (FR_STOP_AT({number})) {{ {' '.join(parts)} FR_STOP_WAIT(); }} ".replace("\n", " ")
    alone = node.parent is not None and node.parent.type in _ALONE
    if alone:
        return enclosed(node, f"{{ {ask}", " }")
    return [(node.start_byte, node.start_byte, ask)]


# -- variables in scope ----------------------------------------------------------------------------


def _in_scope(tree: Tree, statement: Node) -> Iterator[str]:
    """The variables that a statement could use and that the text declares, the nearest first."""
    node = statement
    while (around := node.parent) is not None:
        if around.type in _LISTS and not node.type.startswith("preproc_el"):
            before = [n for n in around.children if n.start_byte < node.start_byte]
            for child in reversed(before):
                yield from _declared(tree, child)
        elif around.type in ("for_statement", "if_statement", "while_statement"):
            for head in around.children:
                if head.start_byte < node.start_byte and head != node:
                    yield from _of_head(tree, head)
        elif around.type == "for_range_loop" and node == part_of(around, "body"):
            declarator = part_of(around, "declarator")
            name = None if declarator is None else declared_name(declarator)
            yield from [] if name is None else [tree.text(name)]
        elif around.type in ("function_definition", "lambda_expression"):
            yield from _parameters(tree, around)
            if around.type == "function_definition" or not _captures_all(tree, around):
                return
        node = around


def _declared(tree: Tree, node: Node) -> Iterator[str]:
    """What a declaration declares, the last first."""
    if node.type != "declaration":
        return
    for declarator in reversed(declarators(node)):
        name = declared_name(declarator)
        if name is not None:
            yield tree.text(name)


def _of_head(tree: Tree, head: Node) -> Iterator[str]:
    """What the head of a loop or of a branch declares."""
    if head.type in ("declaration", "condition_clause", "init_statement"):
        for node in walk(head):
            yield from _declared(tree, node)


def _parameters(tree: Tree, function: Node) -> Iterator[str]:
    declarator = part_of(function, "declarator")
    while declarator is not None and not declarator.type.endswith("function_declarator"):
        named = (c for c in declarator.named_children if c.type.endswith("declarator"))
        declarator = part_of(declarator, "declarator") or next(named, None)
    listed = part_of(declarator, "parameters")
    for parameter in listed.named_children if listed is not None else ():
        if parameter.type in ("parameter_declaration", "optional_parameter_declaration"):
            inner = part_of(parameter, "declarator")
            name = None if inner is None else declared_name(inner)
            if name is not None:
                yield tree.text(name)


def _captures_all(tree: Tree, function: Node) -> bool:
    return bool(re.match(r"\[\s*[&=]\s*[\],]", tree.text(function)))
