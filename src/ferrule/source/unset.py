"""Local variables of a checked body that may be read before they are set: each read looks."""

from __future__ import annotations

from tree_sitter import Node

from . import words
from .syntax import Edit, Tree, declarators, declared_name, field, kinds, walk

_SCALARS = words(
    "bool char uchar short ushort int uint long ulong half bfloat float double size_t int8_t "
    "uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t float16_t bfloat16_t unsigned"
)
_TAKING = ("argument_list", "pointer_expression", "update_expression")
_OPAQUE = ("lambda_expression", "preproc_def", "preproc_function_def", "ERROR")


def watch_locals(text: str) -> str:
    """A body in which reads of scalars that may not be set yet call ``fr::used``.

    Beside ``float v;`` stands a flag, which ``v = x;`` sets. Left as they are: variables whose
    first mention sets them, and those that something else may set: a call, or through ``&v``.
    """
    tree = Tree(text, body=True)
    if tree.has_error:
        return text
    edits: list[Edit] = []
    for node in kinds(tree.block, "declaration"):
        kind, names = field(node, "type"), [d for d in declarators(node) if d.type == "identifier"]
        plain = kind is not None and tree.text(kind) in _SCALARS
        if plain and names and len(names) == len(declarators(node)) and _is_local(node):
            for name in names:
                edits += _edits(tree, node, name)
    return tree.edited(edits)


def _is_local(node: Node) -> bool:
    """Whether a declaration stands in a block, with nothing but a type before its names."""
    simple = all(
        c.type in ("identifier", ",", ";") or c == field(node, "type") for c in node.children
    )
    return node.parent is not None and node.parent.type == "compound_statement" and simple


def _edits(tree: Tree, declaration: Node, name: Node) -> list[Edit]:
    """What makes one variable watched; nothing where that is not needed or not safe."""
    block, text = declaration.parent, tree.text(name)
    named = (
        [n for n in walk(block) if n.type == "identifier" and tree.text(n) == text] if block else []
    )
    mentions = [n for n in named if n.start_byte >= declaration.end_byte]
    redeclared = any(n != name and _declares(n) for n in named)
    if not mentions or redeclared or any(map(_is_opaque, mentions)):
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
