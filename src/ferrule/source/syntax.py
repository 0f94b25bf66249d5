"""The syntax tree of a rewritten body, by tree-sitter, and edits made on it.

Imported only when a kernel is compiled: a kernel from the cache needs no parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Set
from functools import lru_cache

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

_BEFORE = "void fr() {"  # no newline: line numbers of the body stay as they are


@lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_cpp.language()))


_CAST = re.compile(rb"\b(short|long|signed|unsigned)(?=[ \t]*\()")
_MACRO = re.compile(rb"\bMETAL_FUNC\b")  # of the header that comes with ferrule
_READS_AS = {b"short": b"sh0rt", b"long": b"l0ng", b"signed": b"s1gned", b"unsigned": b"uns1gned"}


def _readable(data: bytes) -> bytes:
    """The text with words that the grammar takes for something else replaced, byte for byte."""
    data = _MACRO.sub(b"inline    ", data)
    return _CAST.sub(lambda m: _READS_AS[m.group(1)], data)


class Tree:
    """A parsed text.

    Attributes:
        data: the text that was parsed, as bytes (with a function around a body).
        root: the node of the whole.
        block: for a body, the compound statement that holds it.
    """

    def __init__(self, text: str, *, body: bool) -> None:
        self.data = (_BEFORE + text + "\n}" if body else text).encode()
        self.root = _parser().parse(_readable(self.data)).root_node
        self.has_error = self.root.has_error
        self.block = self.root
        if body and self.root.child_count and self.root.children[0].type == "function_definition":
            block = self.root.children[0].child_by_field_name("body")
            if block is not None:
                self.block = block
        self.is_body = body

    def text(self, node: Node) -> str:
        """The characters of a node."""
        return self.data[node.start_byte : node.end_byte].decode()

    def edited(self, edits: list[tuple[int, int, str]]) -> str:
        """The text with ``[start, end)`` byte ranges replaced, without the function around it."""
        out: list[bytes] = []
        position = len(_BEFORE) if self.is_body else 0
        for start, end, new in sorted(edits, key=lambda e: (e[0], e[1])):
            out.append(self.data[position:start])
            out.append(new.encode())
            position = end
        out.append(self.data[position : len(self.data) - (2 if self.is_body else 0)])
        return b"".join(out).decode()


OTHER_CODE = ("lambda_expression", "function_definition", "struct_specifier", "class_specifier")


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, in the order of the text."""
    waiting = [node]  # no recursion: a long chain of else-ifs is as deep as it is long
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


def walk_code(node: Node) -> Iterator[Node]:
    """Like `walk`, but not into lambdas, local functions and local structs."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in reversed(node.children) if child.type not in OTHER_CODE]


def callee(tree: Tree, call: Node) -> str:
    """The last name of what a call expression calls: ``simd_sum`` of ``metal::simd_sum(x)``."""
    function = call.child_by_field_name("function")
    if function is None:
        return ""
    text = tree.text(function)
    return re.sub(r"<.*", "", text, flags=re.DOTALL).rsplit("::", 1)[-1].strip()


def call_arguments(call: Node) -> list[Node]:
    """The arguments of a call expression."""
    node = call.child_by_field_name("arguments")
    return [] if node is None else [c for c in node.named_children if c.type != "comment"]


def plain_comparisons(text: str, *, body: bool, variables: Set[str]) -> str:
    """Brackets around the left side of comparisons that could be read as templates.

    In ``a < b ? c : d >> e`` the parser, which knows no variables, takes ``a<b ? c : d>`` for a
    template with its argument.
    """
    for _ in range(20):
        if "<" not in text or "?" not in text:
            return text
        tree = Tree(text, body=body)
        edits: list[tuple[int, int, str]] = []
        names = set(variables)
        for node in walk(tree.block):
            declared = declarators(node) if node.type == "declaration" else []
            names |= {tree.text(n) for n in map(declared_name, declared) if n is not None}
            owner = node.parent
            if node.type != "template_argument_list" or owner is None:
                continue
            name = owner.child_by_field_name("name")
            if name is None or not any(c.type == "conditional_expression" for c in node.children):
                continue
            whole = owner.parent if owner.type == "template_method" else owner
            if whole is None:
                continue
            called = whole.parent is not None and whole.parent.type == "call_expression"
            if called and tree.text(name) not in names:
                continue
            edits += [
                (whole.start_byte, whole.start_byte, "("),
                (name.end_byte, name.end_byte, ")"),
            ]
        if not edits or tree.has_error:
            return text
        text = tree.edited(edits)
    return text


def plain_subscripts(tree: Tree, names: Collection[str]) -> Tree:
    """A body with brackets where subscripts of these variables would read as types.

    ``float v(x[i]);`` reads as a function's declaration, ``a < x[i] && b > (c)`` as a call.
    """
    edits: list[tuple[int, int, str]] = []
    for node in walk(tree.block):
        if node.type in ("parameter_declaration", "type_descriptor"):
            base = node.child_by_field_name("type")
            declarator = node.child_by_field_name("declarator")
            if declarator is None or declarator.type != "abstract_array_declarator":
                continue
        elif node.type in ("subscript_expression", "pointer_expression"):
            base = node.child_by_field_name("argument")
            while base is not None and base.type in (
                "parenthesized_expression",
                "binary_expression",
            ):
                base = base.named_children[0]
        else:
            continue
        if base is None or tree.text(base) not in names:
            continue
        if node.type == "parameter_declaration":
            edits += [(node.start_byte, node.start_byte, "("), (node.end_byte, node.end_byte, ")")]
            continue
        around = node.parent
        while around is not None and around.type in ("binary_expression", "unary_expression"):
            around = around.parent
        owner = around.parent if around is not None else None
        if around is None or around.type != "template_argument_list" or owner is None:
            continue
        name = owner.child_by_field_name("name")
        if name is not None:
            start = owner
            while start.parent is not None and start.parent.type == "qualified_identifier":
                start = start.parent
            edits += [
                (start.start_byte, start.start_byte, "("),
                (name.end_byte, name.end_byte, ")"),
            ]
    if not edits:
        return tree
    plain = Tree(tree.edited(list(dict.fromkeys(edits))), body=True)
    return tree if plain.has_error else plain


def convert_conditionals(text: str, *, body: bool) -> str:
    """Give both operands of each ``?:`` one type.

    C++ refuses ``c ? bfloat : float`` for a class type that converts both ways.
    """
    tree = Tree(text, body=body)
    edits: list[tuple[int, int, str]] = []

    def render(node: Node) -> str:
        if node.type == "conditional_expression":
            condition = node.child_by_field_name("condition")
            a = node.child_by_field_name("consequence")
            b = node.child_by_field_name("alternative")
            if condition is not None and a is not None and b is not None:
                types = f"decltype(({render(a)})), decltype(({render(b)}))"
                # In parentheses: a macro's argument must hold no bare comma.
                return (
                    f"({render(condition)} ? ::fr::pick<{types}>({render(a)}) : "
                    f"::fr::pick<{types}>({render(b)}))"
                )
        if not any(n.type == "conditional_expression" for n in walk(node)):
            return tree.text(node)
        out: list[str] = []
        position = node.start_byte
        for child in node.children:
            out.append(tree.data[position : child.start_byte].decode())
            out.append(render(child))
            position = child.end_byte
        out.append(tree.data[position : node.end_byte].decode())
        return "".join(out)

    def visit(node: Node) -> None:
        if node.type == "preproc_arg" and "?" in tree.text(node):
            edits.append((node.start_byte, node.end_byte, _convert_macro(tree.text(node))))
            return
        if node.type == "conditional_expression":
            # An operand that spans lines is repeated on one line, and the lines are made up for.
            new = render(node)
            flat = new.replace("\n", " ")
            edits.append(
                (node.start_byte, node.end_byte, flat + "\n" * tree.text(node).count("\n"))
            )
            return
        for child in node.children:
            visit(child)

    if "?" in text and not tree.has_error:
        visit(tree.block)
    return tree.edited(edits)


def _convert_macro(text: str) -> str:
    """The replacement text of a macro with its conditionals converted, if it is an expression."""

    def convert(statement: str) -> str:
        plain = plain_comparisons(statement, body=True, variables=frozenset())
        return convert_conditionals(plain, body=True)

    return of_macro(text, convert)


def of_macro(text: str, change: Callable[[str], str]) -> str:
    """The replacement text of a macro, changed as a statement is, if it is an expression."""
    flat = text.replace("\\\n", " ")
    if Tree(flat + ";", body=True).has_error:
        return text
    return change(flat + ";").rstrip().removesuffix(";") + "\n" * text.count("\n")


def align_members(text: str, *, body: bool) -> str:
    """Give vectors that are members of structs the alignment that Metal gives them."""
    tree = Tree(text, body=body)
    edits: list[tuple[int, int, str]] = []
    for node in walk(tree.block):
        if node.type != "field_declaration":
            continue
        kind = node.child_by_field_name("type")
        declared = node.children_by_field_name("declarator")
        words = tree.text(node).split()
        plain = all(d.type in ("field_identifier", "array_declarator") for d in declared)
        if kind is None or not declared or not plain or "static" in words or ":" in words:
            continue
        if kind.type in ("type_identifier", "template_type", "qualified_identifier"):
            name = tree.text(kind)
            edits.append(
                (node.start_byte, node.start_byte, f"alignas(::fr::member_align<{name}>) ")
            )
    return tree.edited(edits)


def function_definitions(tree: Tree) -> list[tuple[str, Node]]:
    """The functions that a text defines: their names, and their nodes in the text."""
    definitions: list[tuple[str, Node]] = []
    for node in walk(tree.root):
        if node.type != "function_definition":
            continue
        declarator = node.child_by_field_name("declarator")
        while declarator is not None and declarator.type != "function_declarator":
            declarator = declarator.child_by_field_name("declarator") or next(
                (c for c in declarator.named_children if c.type == "function_declarator"), None
            )
        name = declarator.child_by_field_name("declarator") if declarator is not None else None
        if name is not None:
            definitions.append((tree.text(name).rsplit("::", 1)[-1], node))
    return definitions


def enclosing_struct(tree: Tree, node: Node) -> str:
    """The name of the struct that a method stands in; nothing for other functions."""
    around = node.parent
    while around is not None and not around.type.endswith(("struct_specifier", "class_specifier")):
        around = around.parent
    name = around.child_by_field_name("name") if around is not None else None
    return tree.text(name) if name is not None else ""


def struct_names(tree: Tree) -> list[str]:
    """The structs and classes that a text defines."""
    kinds = ("struct_specifier", "class_specifier", "union_specifier")
    names = (n.child_by_field_name("name") for n in walk(tree.root) if n.type in kinds)
    return [tree.text(name) for name in names if name is not None]


def without_functions(text: str, names: set[str]) -> str:
    """The text without the definitions of these functions, line for line."""
    tree = Tree(text, body=False)
    edits: list[tuple[int, int, str]] = []
    for name, node in function_definitions(tree):
        if name not in names:
            continue
        while node.parent is not None and node.parent.type == "template_declaration":
            node = node.parent
        edits.append((node.start_byte, node.end_byte, "\n" * tree.text(node).count("\n")))
    return tree.edited(edits)


def declarators(s: Node) -> list[Node]:
    """The declarators of a declaration."""
    return list(s.children_by_field_name("declarator"))


def declarator_shape(d: Node) -> list[str]:
    """The kinds of declarators around a declared name: pointers, references, arrays, functions."""
    kinds: list[str] = []
    node: Node | None = d
    while node is not None and node.type != "identifier":
        kinds.append(node.type)
        following = node.child_by_field_name("declarator")
        if following is None and node.type in ("reference_declarator", "parenthesized_declarator"):
            following = node.named_children[-1] if node.named_children else None
        node = following
    return kinds


def declared_name(d: Node) -> Node | None:
    """The identifier that a declarator declares."""
    node: Node | None = d
    while node is not None and node.type != "identifier":
        following = node.child_by_field_name("declarator")
        if following is None and node.type in ("reference_declarator", "pointer_declarator"):
            following = next(
                (
                    c
                    for c in node.named_children
                    if "identifier" in c.type or "declarator" in c.type
                ),
                None,
            )
        node = following
    return node
