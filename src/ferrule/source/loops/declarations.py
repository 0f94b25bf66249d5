"""The names that a node declares, and how: the specifiers and the shape of the declarator."""

from __future__ import annotations

from tree_sitter import Node

from ..syntax import Tree, function_definitions, walk

STRUCTS = ("struct_specifier", "class_specifier", "union_specifier")


def declared_in(declarator: Node) -> Node | None:
    """The identifier that a declarator declares."""
    node: Node | None = declarator
    while node is not None and node.type not in ("identifier", "type_identifier"):
        if node.type == "function_declarator":
            return None
        node = _inner(node)
    return node


def _inner(declarator: Node) -> Node | None:
    """What a declarator is around: another one, or a name."""
    field = declarator.child_by_field_name("declarator")
    if field is not None:
        return field
    inner = (c for c in declarator.named_children if c.type.endswith(("identifier", "declarator")))
    return next(inner, None)


def declares(node: Node) -> list[Node | None]:
    """The identifiers that a node itself declares; None for one that is not understood."""
    if node.type in ("declaration", "for_range_loop", "type_definition"):
        return [declared_in(d) for d in node.children_by_field_name("declarator")]
    if node.type in ("parameter_declaration", "optional_parameter_declaration"):
        declarator = node.child_by_field_name("declarator")
        if declarator is None or declarator.type.startswith("abstract"):
            return []
        return [declared_in(declarator)]
    if node.type == "alias_declaration":
        return [node.child_by_field_name("name")]
    return []


def shapes(tree: Tree, node: Node) -> list[tuple[str, str, list[str]]]:
    """The names that a node itself declares, each with its specifiers and declarator's shape."""
    if node.type in ("declaration", "for_range_loop", "parameter_declaration"):
        declarators = node.children_by_field_name("declarator")
        start = node.child_by_field_name("type") if node.type == "for_range_loop" else node
        spec = ""
        if declarators and start is not None:
            spec = tree.data[start.start_byte : declarators[0].start_byte].decode().strip()
        named = [(declared_in(d), d) for d in declarators]
        return [(tree.text(n), spec, shape_of(d)) for n, d in named if n is not None]
    return [(name, "", []) for name in declared_names(tree, node)]


def declared_names(tree: Tree, node: Node) -> set[str]:
    """The names that a node itself declares, functions and types included."""
    names = {tree.text(n) for n in declares(node) if n is not None}
    if node.type == "declaration":
        for part in node.named_children:
            names |= declared_names(tree, part) if part.type in STRUCTS else set()
    if node.type in (*STRUCTS, "enum_specifier", "enumerator"):
        name = node.child_by_field_name("name")
        names |= {tree.text(name)} if name is not None else set()
    if node.type == "function_definition":
        names |= {name for name, n in function_definitions(tree) if n == node}
    return names


def shape_of(declarator: Node | None) -> list[str]:
    """What a declarator makes of its type, outermost last: ``*``, ``*const``, ``&``, ``[]``…"""
    shape: list[str] = []
    node = declarator
    while node is not None and node.type not in ("identifier", "type_identifier"):
        kind = node.type.removeprefix("abstract_")
        if kind == "pointer_declarator":
            const = any(c.text == b"const" for c in node.children)
            shape.append("*const" if const else "*")
        elif kind == "reference_declarator":
            shape.append("&&" if any(c.type == "&&" for c in node.children) else "&")
        elif kind == "array_declarator":
            shape.append("[]")
        elif kind == "function_declarator":
            shape.append("function")
        node = _inner(node)
    return shape


def parameter_shapes(definition: Node) -> list[tuple[list[str], bool]]:
    """The shapes of a function's parameters, and whether each is const."""
    declarator: Node | None = definition
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator")
    listed = declarator.child_by_field_name("parameters") if declarator is not None else None
    return [
        (shape_of(q.child_by_field_name("declarator")), any(c.text == b"const" for c in q.children))
        for q in (listed.named_children if listed is not None else [])
    ]


def declarations(tree: Tree) -> dict[str, list[tuple[str, list[str]]]]:
    """How a body declares each of its names: the specifiers and the shape of the declarator."""
    by_name: dict[str, list[tuple[str, list[str]]]] = {}
    for node in walk(tree.block):
        for name, spec, shape in shapes(tree, node):
            by_name.setdefault(name, []).append((spec, shape))
    return by_name
