"""Which variables an expression or a statement may change, or refer to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tree_sitter import Node

from ..syntax import Tree, callee, field, kinds, part, unbracketed, walk

# Functions of the library that write to an argument.
WRITES_ARGUMENTS = frozenset({"frexp", "modf", "sincos"})

# `float(x)` reads like a call.
_CASTS = frozenset({"primitive_type", "sized_type_specifier", "type_identifier", "template_type"})
_CHAIN = frozenset(
    {"subscript_expression", "field_expression", "pointer_expression", "parenthesized_expression"}
)


def assigned(tree: Tree, node: Node) -> Iterator[tuple[str, bool]]:
    """The names that an expression or statement may change.

    With each, whether it is changed through ``[]``, ``*`` or ``->``: then a pointer stays as it is.
    """
    for n in walk(node):
        if n.type == "assignment_expression":
            yield from _targets(tree, part(n, "left"))
        elif n.type == "update_expression" or takes_address(n):
            yield from _targets(tree, part(n, "argument"))
        elif n.type == "reference_declarator":
            # `T& r = v;`: v may change through r.
            yield from ((name, False) for place in aliased(n) for name in referred(tree, place))
        elif n.type == "call_expression":
            function = part(n, "function")
            if function.type == "field_expression" and tree.text(part(function, "field")) != "swz":
                names = names_in(tree, part(function, "argument"))
                yield from ((name, False) for name in names)


def _targets(tree: Tree, node: Node) -> Iterator[tuple[str, bool]]:
    base, through = base_of(node)
    if base is not None:
        yield tree.text(base), through
    else:  # a conditional, a comma, a call: any name in it may be the target
        yield from ((name, False) for name in names_in(tree, node))


def takes_address(node: Node) -> bool:
    """Whether a node is an address: ``&x``."""
    return node.type == "pointer_expression" and node.children[0].type == "&"


def aliased(node: Node) -> Iterator[Node]:
    """What something may point or refer to: operands of ``&``, and what references start with."""
    for place in kinds(node, "pointer_expression", "reference_declarator"):
        if takes_address(place):
            yield part(place, "argument")
        elif place.type == "reference_declarator" and place.parent is not None:
            value = field(place.parent, "value")
            if value is not None:
                yield value


def base_of(node: Node) -> tuple[Node | None, bool]:
    """The variable that an lvalue is a part of, or points to; None where it is no plain chain."""
    through = False
    while node.type in _CHAIN:
        through |= node.type in ("subscript_expression", "pointer_expression") or any(
            c.type == "->" for c in node.children
        )
        node = field(node, "argument") or node.named_children[0]
    return (node if node.type == "identifier" else None), through


def referred(tree: Tree, node: Node) -> set[str]:
    """The variables that an lvalue may be a part of."""
    base = base_of(node)[0]
    return names_in(tree, node) if base is None else {tree.text(base)}


def names_in(tree: Tree, node: Node) -> set[str]:
    """The identifiers in an expression."""
    return {tree.text(n) for n in kinds(node, "identifier")}


def passed_by_name(tree: Tree, node: Node, functions: frozenset[str]) -> Iterable[tuple[str, bool]]:
    """Names handed bare to functions that might change them: the header's, or lambdas."""
    for call in kinds(node, "call_expression"):
        function, name = part(call, "function"), callee(tree, call)
        changes = name in functions or name in WRITES_ARGUMENTS
        library = function.type in ("identifier", "qualified_identifier")
        if function.type in _CASTS or (
            library and not changes and not name.startswith(("simdgroup_", "atomic_"))
        ):
            continue
        if function.type == "identifier" and name in functions:
            yield name, True  # an object that is called
        arguments = part(call, "arguments").named_children
        if name in ("simdgroup_load", "simdgroup_store"):  # (lane, matrix, pointer, stride …)
            matrices = [a for a in arguments if a.type != "compound_literal_expression"]
            arguments = matrices[:1]
        for argument in map(unbracketed, arguments):
            if argument.type in ("identifier", "field_expression", "subscript_expression"):
                base, _ = base_of(argument)
                if base is not None:
                    yield tree.text(base), True
