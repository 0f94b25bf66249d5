"""Elements of private arrays of a checked body that may be read before they are set."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from . import words
from .dialect import INTEGERS, SIMD_OPS
from .syntax import Edit, Tree, callee, declarator_shape, enclosed, field, kinds, part

# Functions that take numbers and change none of their arguments.
_READING = (
    INTEGERS
    | SIMD_OPS
    | words("""
    bool half bfloat bfloat16_t float16_t float double static_cast as_type abs fabs min max fmin
    fmax clamp saturate select mix step smoothstep sign fma mad mul24 mad24 mulhi popcount clz
    ctz sqrt rsqrt exp exp2 exp10 log log2 log10 pow powr sin cos tan asin acos atan atan2 sinh
    cosh tanh asinh acosh atanh floor ceil round rint trunc fract fmod erf expm1 isnan isinf
    isfinite dot length normalize cross distance any all ceildiv
""")
)
_VECTOR = re.compile(r"(?:bool|u?(?:char|short|int|long)|half|bfloat|float)[234]")
# A mention in one of these is as what is around it.
_THROUGH = words("parenthesized_expression field_expression subscript_expression comma_expression")
_VALUES = words("""
    binary_expression unary_expression cast_expression conditional_expression condition_clause
    subscript_argument_list return_statement expression_statement for_statement do_statement
""")
_WORD = re.compile(r"\w+|##")
_OPAQUE = words("lambda_expression sizeof_expression decltype ERROR")


def watch_elements(
    tree: Tree, declaration: Node, declarator: Node, mentions: list[Node]
) -> list[Edit]:
    """What makes the elements of one array watched; nothing where it may be set unseen.

    Beside ``float w[4];`` stand flags, one of each element, which ``w[i]`` sets or asks. Left as
    they are: arrays that stand anywhere without all of their subscripts, or whose address is taken.

    Args:
        tree: the body.
        declaration: of the array, without a value.
        declarator: that declares it.
        mentions: what has its name behind the declaration.
    """
    dims = declarator_shape(declarator).count("array_declarator")
    name = next(kinds(declarator, "identifier"))
    flags, text = f"fr_u_{tree.text(name)}", tree.text(name)
    declared = f" ::fr::fr_elements<decltype({text})> {flags};"
    edits: list[Edit] = [(declaration.end_byte, declaration.end_byte, declared)]
    for mention in mentions:
        subscripts = list(subscripts_of(mention))
        use = _use(tree, subscripts[dims - 1]) if len(subscripts) >= dims else None
        if use is None or _is_nested(tree, subscripts[:dims], text):
            return []
        for depth, node in enumerate(subscripts[:dims], 1):
            index = part(node, "indices")
            does = use if depth == dims else "at"
            before = f"({flags}.fr_{does}({depth}, ("
            edits += enclosed(index.children[1], before, f'), "{text}"))', index.children[-2])
    return edits


def subscripts_of(mention: Node) -> Iterator[Node]:
    """The subscripts of a name, from the inside out."""
    inside, around = mention, mention.parent
    while (
        around is not None
        and around.type == "subscript_expression"
        and field(around, "argument") == inside
    ):
        yield around
        inside, around = around, around.parent


def _is_nested(tree: Tree, subscripts: list[Node], name: str) -> bool:
    """Whether an index of several names the array, whose flags know one place at a time."""
    indices = [part(node, "indices") for node in subscripts[1:]]
    return any(tree.text(n) == name for index in indices for n in kinds(index, "identifier"))


def _use(tree: Tree, element: Node) -> str | None:
    """What is done with an element: ``read``, ``change`` (read, then set), ``set`` where it may be;
    None where that is not known of others, either."""
    around: Node | None = element
    while around is not None and not around.type.endswith("statement"):
        if around.type in _OPAQUE:
            return None
        around = around.parent
    inside, around = element, element.parent
    while around is not None and around.type in _THROUGH:
        if around.type == "subscript_expression" and field(around, "argument") != inside:
            break
        inside, around = around, around.parent
    if around is None:
        return None
    return _use_in(tree, inside, around)


def _use_in(tree: Tree, inside: Node, around: Node) -> str | None:
    """What an expression does with an element, or with a part of it, that stands in it."""
    kind = around.type
    if kind == "assignment_expression":
        if field(around, "left") != inside:
            return "read"
        return "set" if around.children[1].type == "=" else "change"
    if kind == "update_expression":
        return "change"
    if kind == "pointer_expression":
        return None if around.children[0].type == "&" else "read"
    if kind == "init_declarator":
        return "read" if part(around, "declarator").type == "identifier" else None
    if kind == "argument_list" and around.parent is not None:
        name = callee(tree, around.parent) if around.parent.type == "call_expression" else ""
        return "read" if name in _READING or _VECTOR.fullmatch(name) else "set"
    if kind == "conditional_expression" and field(around, "condition") != inside:
        return "read" if around.parent is not None and _is_value(around.parent) else "set"
    return "read" if kind in _VALUES else "set"


def _is_value(around: Node) -> bool:
    """Whether a choice of two elements, which may be both set, is but read here."""
    return around.type in _VALUES - {"conditional_expression"}


def words_of_macros(body: Tree, header: Tree) -> set[str]:
    """The words of the macros that a body uses, which may do anything with what they name; ``##``
    where one makes words of its own."""
    macros: dict[str, set[str]] = {}
    for tree in (header, body):
        for node in kinds(tree.root, "preproc_def", "preproc_function_def"):
            words = macros.setdefault(tree.text(field(node, "name")), set())
            words |= set(_WORD.findall(tree.text(field(node, "value"))))
    found: set[str] = set()
    waiting = set(_WORD.findall(body.data.decode())) & macros.keys()
    while waiting:
        words = macros.pop(waiting.pop())
        found |= words
        waiting |= words & macros.keys()
    return found
