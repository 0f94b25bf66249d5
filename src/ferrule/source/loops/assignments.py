"""Which variables an expression or a statement may change, or refer to."""

from __future__ import annotations

from collections.abc import Iterable

from tree_sitter import Node

from ..syntax import Tree, callee, walk

# Functions of the library that write to an argument.
WRITES_ARGUMENTS = frozenset({"frexp", "modf", "sincos"})

# `float(x)` reads like a call.
_CASTS = frozenset({"primitive_type", "sized_type_specifier", "type_identifier", "template_type"})


def assigned(tree: Tree, node: Node) -> Iterable[tuple[str, bool]]:
    """The names that an expression or statement may change.

    With each, whether it is changed through ``[]``, ``*`` or ``->``: then a pointer stays as it is.
    """
    for part in walk(node):
        kind = part.type
        target: Node | None = None
        if kind == "assignment_expression":
            target = part.child_by_field_name("left")
        elif kind == "update_expression" or (
            kind == "pointer_expression" and part.children[0].type == "&"
        ):
            target = part.child_by_field_name("argument")
        elif kind == "reference_declarator":
            # `T& r = v;`: v may change through r.
            parent = part.parent
            value = parent.child_by_field_name("value") if parent is not None else None
            if value is not None:
                yield from ((n, False) for n in referred(tree, value))
            continue
        elif kind == "call_expression":
            function = part.child_by_field_name("function")
            if function is not None and function.type == "field_expression":
                method = function.child_by_field_name("field")
                if method is not None and tree.text(method) != "swz":
                    base = function.child_by_field_name("argument")
                    if base is not None:
                        yield from ((n, False) for n in names_in(tree, base))
            continue
        if target is not None:
            base, through = base_of(target)
            if base is not None:
                yield tree.text(base), through
            else:  # a conditional, a comma, a call: any name in it may be the target
                yield from ((n, False) for n in names_in(tree, target))


_CHAIN = frozenset(
    {"subscript_expression", "field_expression", "pointer_expression", "parenthesized_expression"}
)


def base_of(node: Node) -> tuple[Node | None, bool]:
    """The variable that an lvalue is a part of, or points to; None where it is no plain chain."""
    through = False
    while node.type != "identifier":
        if node.type not in _CHAIN:
            return None, through
        through |= node.type in ("subscript_expression", "pointer_expression") or any(
            c.type == "->" for c in node.children
        )
        inner = node.child_by_field_name("argument")
        if inner is None and node.named_children:
            inner = node.named_children[0]
        if inner is None:
            return None, through
        node = inner
    return node, through


def referred(tree: Tree, node: Node) -> set[str]:
    """The variables that an lvalue may be a part of."""
    base = base_of(node)[0]
    return names_in(tree, node) if base is None else {tree.text(base)}


def names_in(tree: Tree, node: Node) -> set[str]:
    """The identifiers in an expression."""
    return {tree.text(n) for n in walk(node) if n.type == "identifier"}


def passed_by_name(tree: Tree, node: Node, functions: frozenset[str]) -> Iterable[tuple[str, bool]]:
    """Names handed bare to functions that might change them: the header's, or lambdas."""
    for part in walk(node):
        if part.type != "call_expression":
            continue
        function = part.child_by_field_name("function")
        arguments = part.child_by_field_name("arguments")
        if function is None or arguments is None:
            continue
        name = callee(tree, part)
        if function.type in _CASTS:
            continue
        harmless = name not in functions and name not in WRITES_ARGUMENTS
        if (
            harmless
            and function.type in ("identifier", "qualified_identifier")
            and not name.startswith(("simdgroup_", "atomic_"))
        ):
            continue
        if function.type == "identifier" and name in functions:
            yield name, True  # an object that is called
        for argument in arguments.named_children:
            if argument.type not in ("identifier", "field_expression", "subscript_expression"):
                continue
            base, _ = base_of(argument)
            if base is not None:
                yield tree.text(base), True
