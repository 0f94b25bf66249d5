"""The names that a node declares, and how: the specifiers and the shape of the declarator."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from ..syntax import Tree, field, function_definitions, kinds

STRUCTS = ("struct_specifier", "class_specifier", "union_specifier")
_NAMES = ("identifier", "type_identifier")
_INNER = ("identifier", "declarator")
_SHAPED = ("declaration", "for_range_loop", "parameter_declaration")
_DECLARATIONS = (*_SHAPED, "optional_parameter_declaration", "type_definition")
_TYPES = (*STRUCTS, "enum_specifier", "enumerator")
DECLARING = (*_DECLARATIONS, *_TYPES, "alias_declaration", "function_definition")
_SHAPES = {
    "pointer_declarator": "*",
    "reference_declarator": "&",
    "array_declarator": "[]",
    "function_declarator": "function",
}


def _chain(declarator: Node | None) -> Iterator[Node]:
    """A declarator, and what it is around: other ones, and at last a name."""
    while declarator is not None:
        yield declarator
        if declarator.type in _NAMES:
            return
        inner = (c for c in declarator.named_children if c.type.endswith(_INNER))
        declarator = field(declarator, "declarator") or next(inner, None)


def declared_in(declarator: Node | None) -> Node | None:
    """The identifier that a declarator declares; None for functions and what is not understood."""
    chain = list(_chain(declarator))
    if not chain or any(n.type == "function_declarator" for n in chain):
        return None
    return chain[-1] if chain[-1].type in _NAMES else None


def shape_of(declarator: Node | None) -> list[str]:
    """What a declarator makes of its type, outermost last: ``*``, ``*const``, ``&``, ``[]``…"""
    shape: list[str] = []
    for node in _chain(declarator):
        mark = _SHAPES.get(node.type.removeprefix("abstract_"), "")
        if mark == "*" and any(c.text == b"const" for c in node.children):
            mark = "*const"
        elif mark == "&" and any(c.type == "&&" for c in node.children):
            mark = "&&"
        shape += [mark] if mark else []
    return shape


def declares(node: Node) -> list[Node | None]:
    """The identifiers that a node itself declares; None for one that is not understood."""
    if node.type == "alias_declaration":
        return [field(node, "name")]
    if node.type not in _DECLARATIONS:
        return []
    declarators = node.children_by_field_name("declarator")
    return [declared_in(d) for d in declarators if not d.type.startswith("abstract")]


def declared_names(tree: Tree, node: Node) -> set[str]:
    """The names that a node itself declares, functions and types included."""
    names = {tree.text(n) for n in declares(node) if n is not None}
    if node.type == "declaration":
        structs = (n for n in node.named_children if n.type in STRUCTS)
        names.update(*(declared_names(tree, n) for n in structs))
    if node.type in _TYPES:
        names |= {tree.text(field(node, "name"))} - {""}
    if node.type == "function_definition":
        names |= {name for name, n in function_definitions(tree) if n == node}
    return names


# What gives a name to something that is no variable.
_NAMED = (
    "enumerator", "struct_specifier", "class_specifier", "union_specifier", "enum_specifier",
    "alias_declaration",
)  # fmt: skip


def declared_within(tree: Tree, node: Node) -> set[str]:
    """The names of the variables that a node declares, itself or in what it consists of."""
    declaring = kinds(node, *_DECLARATIONS, "init_declarator")
    declarators = [d for n in declaring for d in n.children_by_field_name("declarator")]
    named = [[*_chain(d)][-1] for d in declarators]
    named += [n for b in kinds(node, "structured_binding_declarator") for n in b.named_children]
    named += [n for d in kinds(node, *_NAMED) if (n := field(d, "name")) is not None]
    return set(map(tree.text, named))


def shapes(tree: Tree, node: Node) -> list[tuple[str, str, list[str]]]:
    """The names that a node itself declares, each with its specifiers and declarator's shape."""
    if node.type not in _SHAPED:
        return [(name, "", []) for name in declared_names(tree, node)]
    declarators = node.children_by_field_name("declarator")
    start = field(node, "type") if node.type == "for_range_loop" else node
    spec = ""
    if declarators and start is not None:
        spec = tree.data[start.start_byte : declarators[0].start_byte].decode().strip()
    named = [(declared_in(d), shape_of(d)) for d in declarators]
    return [(tree.text(n), spec, shape) for n, shape in named if n is not None]


def parameter_shapes(definition: Node) -> list[tuple[list[str], bool]]:
    """The shapes of a function's parameters, and whether each is const."""
    declarator: Node | None = definition
    while declarator is not None and declarator.type != "function_declarator":
        declarator = field(declarator, "declarator")
    return [
        (shape_of(field(q, "declarator")), any(c.text == b"const" for c in q.children))
        for q in listed(declarator)
    ]


def listed(node: Node | None) -> list[Node]:
    """The parameters of a function's declarator, or of a template."""
    parameters = field(node, "parameters")
    return parameters.named_children if parameters is not None else []


def declarations(tree: Tree) -> dict[str, list[tuple[str, list[str]]]]:
    """How a body declares each of its names: the specifiers and the shape of the declarator."""
    by_name: dict[str, list[tuple[str, list[str]]]] = {}
    for node in kinds(tree.block, *DECLARING):
        for name, spec, shape in shapes(tree, node):
            by_name.setdefault(name, []).append((spec, shape))
    return by_name
