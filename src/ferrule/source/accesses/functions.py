"""What the author's functions and lambdas are declared with."""

from __future__ import annotations

import re
from typing import NamedTuple

from tree_sitter import Node

from ..syntax import Tree, declarator_shape, enclosing_struct, field, function_definitions, kinds
from .values import Function


class Parameter(NamedTuple):
    """A parameter.

    Attributes:
        name: empty where it has none.
        type: as it is written, without what stands beside the name.
        default: its default value.
    """

    name: str
    type: str
    reference: bool
    pointer: bool
    is_const: bool
    default: Node | None


def _declarator(function: Function) -> Node | None:
    """What holds the parameters."""
    found = kinds(
        field(function.node, "declarator") or function.node,
        "function_declarator", "abstract_function_declarator",
    )  # fmt: skip
    return next(found, None)


def parameters_of(function: Function) -> list[Parameter]:
    """The parameters of a function or lambda."""
    declarator, tree = _declarator(function), function.tree
    listed = field(declarator, "parameters")
    parameters = []
    for node in listed.named_children if listed is not None else ():
        if node.type not in ("parameter_declaration", "optional_parameter_declaration"):
            continue
        inner = field(node, "declarator")
        default = field(node, "default_value")
        end = inner.start_byte if inner is not None else node.end_byte
        text = tree.data[node.start_byte : end].decode().strip()
        shape = declarator_shape(inner) if inner is not None else []
        pointer = bool({"pointer_declarator", "array_declarator"} & {*shape})
        reference = "reference_declarator" in shape
        name = re.search(r"([A-Za-z_]\w*)\W*(?:\[[^\]]*\]\W*)*$", tree.text(inner) if inner else "")
        parameters.append(
            Parameter(name[1] if name else "", text, reference, pointer, "const" in text.split(),
                      default)
        )  # fmt: skip
    return parameters


def template_parameters(function: Function) -> dict[str, bool]:
    """The names of a function's template parameters, and whether each is a type."""
    outer = function.node.parent
    if outer is None or outer.type != "template_declaration":
        return {}
    names: dict[str, bool] = {}
    listed = field(outer, "parameters")
    for node in listed.named_children if listed is not None else ():
        words = re.findall(r"[A-Za-z_]\w*", function.tree.text(node).split("=")[0])
        if words:
            is_type = node.type in ("type_parameter_declaration",
                                    "optional_type_parameter_declaration")  # fmt: skip
            names[words[-1]] = is_type
    return names


def functions_of(tree: Tree, where: str) -> dict[str, list[Function]]:
    """The functions that a text defines, those of structs apart."""
    functions: dict[str, list[Function]] = {}
    for name, node in function_definitions(tree):
        if not enclosing_struct(tree, node):
            functions.setdefault(re.sub(r"<.*", "", name), []).append(Function(tree, node, where))
    return functions
