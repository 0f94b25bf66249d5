"""Local variables of a checked body that may be read before they are set: each read looks."""

from __future__ import annotations

import re

from tree_sitter import Node

from . import words
from .syntax import Edit, Tree, declarators, declared_name, field, kinds, walk
from .unset_elements import watch_elements, words_of_macros

_SCALARS = words(
    "bool char uchar short ushort int uint long ulong half bfloat float double size_t int8_t "
    "uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t float16_t bfloat16_t unsigned"
)
# What is written into a text here, by `unset_elements` and by `rows`; group 1 is the author's.
_WRITTEN = re.compile(
    r"\(::fr::used\(\w+, \"\w+\"\), (\w+)\)|fr_u_\w+ = true, | (?:bool fr_u_\w+ = false;"
    r"|::fr::fr_elements<[^;]*;)|\(fr_u_\w+\.\w+\(\d+, \(|\(::fr::fr_in_row<\w+\(\w+\), \d+>\(\("
    r"|\), \"\w+\"\)\)"
)
_OPAQUE = ("lambda_expression", "preproc_def", "preproc_function_def", "ERROR")


def as_written(line: str, column: int) -> str:
    """A checked text's line up to a column, without what is written into it to watch variables."""
    inside = next((m for m in _WRITTEN.finditer(line) if m.start() < column < m.end()), None)
    return _WRITTEN.sub(lambda m: m[1] or "", line[: inside.end() if inside else column])


def watch_locals(text: str, header: Tree) -> str:
    """A body in which reads of scalars that may not be set yet call ``fr::used``.

    Beside ``float v;`` stands a flag, which ``v = x;`` sets. Left as they are: variables whose
    first mention sets them, and those that something else may set: a call, or through ``&v``.
    Elements of arrays are as `unset_elements` has it.
    """
    tree = Tree(text, body=True)
    hidden = words_of_macros(tree, header)
    if tree.has_error or "##" in hidden:
        return text
    edits: list[Edit] = []
    for node in kinds(tree.block, "declaration"):
        declared = declarators(node) if _is_local(node) else []
        for d in declared:
            name = declared_name(d)
            if name is not None and tree.text(name) not in hidden:
                edits += _edits(tree, node, d, name)
    return tree.edited(edits)


def _is_local(node: Node) -> bool:
    """Whether a declaration stands in a block, with nothing but a type before its names.

    One in a ``switch`` may be jumped over, where what stands beside it may not be.
    """
    simple = all(
        c.type in ("identifier", "array_declarator", ",", ";") or c == field(node, "type")
        for c in node.children
    )
    block = node.parent
    if block is None or block.type != "compound_statement" or not simple:
        return False
    return block.parent is None or block.parent.type != "switch_statement"


def _edits(tree: Tree, declaration: Node, declarator: Node, name: Node) -> list[Edit]:
    """What makes one variable watched; nothing where that is not needed or not safe."""
    is_scalar = declarator == name
    if is_scalar and tree.text(field(declaration, "type")) not in _SCALARS:
        return []
    block, text = declaration.parent, tree.text(name)
    named = (
        [n for n in walk(block) if n.type == "identifier" and tree.text(n) == text] if block else []
    )
    mentions = [n for n in named if n.start_byte >= declaration.end_byte]
    redeclared = any(n != name and _declares(n) for n in named)
    if not mentions or redeclared:
        return []
    if not is_scalar:
        return watch_elements(tree, declaration, declarator, mentions)
    if any(map(_is_opaque, mentions)):
        return []
    first = mentions[0].parent and mentions[0].parent.parent
    if _sets(mentions[0]) and first is not None and first.parent == block:
        return []
    flag = f"fr_u_{text}"
    edits: list[Edit] = [(declaration.end_byte, declaration.end_byte, f" bool {flag} = false;")]
    for mention in mentions:
        start, end = mention.start_byte, mention.end_byte
        if _sets(mention):
            edits.append((start, start, f"{flag} = true, "))
        else:
            edits.append((start, end, f'(::fr::used({flag}, "{text}"), {text})'))
    return edits


def _sets(mention: Node) -> bool:
    """Whether a mention is the left side of a plain assignment that is a statement."""
    around = mention.parent
    return (
        around is not None
        and around.type == "assignment_expression"
        and field(around, "left") == mention
        and around.children[1].type == "="
        and around.parent is not None
        and around.parent.type == "expression_statement"
    )


def _declares(mention: Node) -> bool:
    around = mention.parent
    return around is not None and (
        around.type in ("declaration", "parameter_declaration", "structured_binding_declarator")
        or (around.type.endswith("declarator") and declared_name(around) == mention)
    )


def _is_opaque(mention: Node) -> bool:
    """Whether something else than an expression's value may come of a mention."""
    around, inside = mention.parent, mention
    if around is None or around.type in (
        "argument_list",
        "pointer_expression",
        "update_expression",
    ):
        return True
    if around.type == "assignment_expression" and field(around, "left") == mention:
        return not _sets(mention)
    while around is not None and around.type != "compound_statement":
        if around.type in _OPAQUE or (around.type == "init_declarator" and inside == mention):
            return around.type in _OPAQUE or _binds(around)
        inside, around = around, around.parent
    return False


def _binds(declarator: Node) -> bool:
    """Whether a declaration makes a reference."""
    target = field(declarator, "declarator")
    return target is None or target.type != "identifier"
