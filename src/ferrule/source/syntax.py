"""The syntax tree of a rewritten body, by tree-sitter, and edits made on it.

Imported only when a kernel is compiled: a kernel from the cache needs no parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from functools import lru_cache

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

from . import NotSplittable

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


# A range of bytes, and the text in its place.
Edit = tuple[int, int, str]


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
            self.block = field(self.root.children[0], "body") or self.root
        self.is_body = body

    def text(self, node: Node | None) -> str:
        """The characters of a node; none of what is not there."""
        return "" if node is None else self.data[node.start_byte : node.end_byte].decode()

    def edited(self, edits: Iterable[Edit]) -> str:
        """The text with edits, without the function around it."""
        start = len(_BEFORE) if self.is_body else 0
        return self.between(start, len(self.data) - (2 if self.is_body else 0), edits)

    def between(self, start: int, end: int, edits: Iterable[Edit]) -> str:
        """The text of a range of bytes with the edits in it, but for those inside of others."""
        out: list[bytes] = []
        for first, last, new in sorted(edits, key=lambda edit: edit[:2]):
            if start <= first and last <= end:
                out += [self.data[start:first], new.encode()]
                start = last
        return b"".join([*out, self.data[start:end]]).decode()


def field(node: Node | None, name: str) -> Node | None:
    """A part that a node may have."""
    return None if node is None else node.child_by_field_name(name)


def part(node: Node, name: str) -> Node:
    """A part that every node of its kind has, by the grammar."""
    child = node.child_by_field_name(name)
    if child is None:
        raise NotSplittable(f"a {node.type.replace('_', ' ')} has no {name}")
    return child


def replaced(node: Node, text: str) -> Edit:
    """A text in place of a node."""
    return node.start_byte, node.end_byte, text


def enclosed(first: Node, before: str, after: str, last: Node | None = None) -> list[Edit]:
    """Texts before a node and after it, or after another one."""
    start, end = first.start_byte, (last or first).end_byte
    return [(start, start, before), (end, end, after)]


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


def kinds(node: Node, *types: str) -> Iterator[Node]:
    """The nodes of these types in a node, itself included."""
    return (n for n in walk(node) if n.type in types)


def operands(node: Node) -> tuple[Node, str, Node]:
    """What stands left of an operator, the operator, and what stands right of it."""
    return part(node, "left"), node.children[1].type, part(node, "right")


def unbracketed(node: Node) -> Node:
    """What stands in brackets, however many."""
    while node.type == "parenthesized_expression" and node.named_child_count == 1:
        node = node.named_children[0]
    return node


def callee(tree: Tree, call: Node) -> str:
    """The last name of what a call expression calls: ``simd_sum`` of ``metal::simd_sum(x)``."""
    text = re.sub(r"<.*", "", tree.text(field(call, "function")), flags=re.DOTALL)
    return text.rsplit("::", 1)[-1].strip()


def called(tree: Tree, node: Node) -> set[str]:
    """The functions that are called in a node, by their last names."""
    return {callee(tree, call) for call in kinds(node, "call_expression")}


def call_arguments(call: Node) -> list[Node]:
    """The arguments of a call expression."""
    node = field(call, "arguments")
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
        edits: list[Edit] = []
        names = set(variables)
        for node in walk(tree.block):
            declared = declarators(node) if node.type == "declaration" else []
            names |= {tree.text(n) for n in map(declared_name, declared) if n is not None}
            if node.type == "template_argument_list" and any(
                c.type == "conditional_expression" for c in node.children
            ):
                edits += _left_bracketed(tree, node, names)
        if not edits or tree.has_error:
            return text
        text = tree.edited(edits)
    return text


def plain_subscripts(tree: Tree, names: Collection[str]) -> Tree:
    """A body with brackets where subscripts of these variables would read as types.

    ``float v(x[i]);`` reads as a function's declaration, ``a < x[i] && b > (c)`` as a call.
    """
    edits: list[Edit] = []
    for node in walk(tree.block):
        base: Node | None = None
        if node.type in ("parameter_declaration", "type_descriptor"):
            declarator = field(node, "declarator")
            if declarator is not None and declarator.type == "abstract_array_declarator":
                base = part(node, "type")
        elif node.type in ("subscript_expression", "pointer_expression"):
            base = part(node, "argument")
            while base.type in ("parenthesized_expression", "binary_expression"):
                base = base.named_children[0]
        if base is None or tree.text(base) not in names:
            continue
        if node.type == "parameter_declaration":
            edits += enclosed(node, "(", ")")
            continue
        around = node.parent
        while around is not None and around.type in ("binary_expression", "unary_expression"):
            around = around.parent
        if around is not None and around.type == "template_argument_list":
            edits += _left_bracketed(tree, around)
    if not edits:
        return tree
    plain = Tree(tree.edited(dict.fromkeys(edits)), body=True)
    return tree if plain.has_error else plain


def _left_bracketed(tree: Tree, arguments: Node, names: Set[str] | None = None) -> list[Edit]:
    """Brackets around what stands before ``<``, where that begins no template's arguments.

    Args:
        names: variables, where nothing else says that what reads like a call is none.
    """
    whole = owner = arguments.parent
    name = field(owner, "name")
    if whole is None or owner is None or name is None:
        return []
    while whole.parent is not None and (
        whole.type == "template_method" or whole.parent.type == "qualified_identifier"
    ):
        whole = whole.parent
    called = whole.parent is not None and whole.parent.type == "call_expression"
    if names is not None and called and tree.text(name) not in names:
        return []
    return enclosed(whole, "(", ")", name)


def convert_conditionals(text: str, *, body: bool) -> str:
    """Give both operands of each ``?:`` one type.

    C++ refuses ``c ? bfloat : float`` for a class type that converts both ways.
    """
    tree = Tree(text, body=body)
    if "?" not in text or tree.has_error:
        return text
    macros: list[Edit] = []
    converted: list[Edit] = []
    for node in reversed(list(walk(tree.block))):  # what is inside of another one comes first
        if node.type == "preproc_arg" and "?" in tree.text(node):
            macros.append(replaced(node, _convert_macro(tree.text(node))))
        if node.type != "conditional_expression" or field(node, "consequence") is None:
            continue
        inner: list[Edit] = []
        while converted and converted[-1][0] < node.end_byte:
            inner.append(converted.pop())
        operands = (part(node, name) for name in ("condition", "consequence", "alternative"))
        c, a, b = (tree.between(o.start_byte, o.end_byte, inner) for o in operands)
        types = f"decltype(({a})), decltype(({b}))"
        # In parentheses: a macro's argument must hold no bare comma.
        picked = f"({c} ? ::fr::pick<{types}>({a}) : ::fr::pick<{types}>({b}))"
        converted.append(replaced(node, picked))
    # An operand that spans lines is repeated on one line, and the lines are made up for.
    return tree.edited(
        macros
        + [
            (start, end, new.replace("\n", " ") + "\n" * tree.data[start:end].count(b"\n"))
            for start, end, new in converted
        ]
    )


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
    edits: list[Edit] = []
    for node in kinds(tree.block, "field_declaration"):
        kind, declared, words = part(node, "type"), declarators(node), tree.text(node).split()
        plain = all(d.type in ("field_identifier", "array_declarator") for d in declared)
        typed = kind.type in ("type_identifier", "template_type", "qualified_identifier")
        if typed and declared and plain and "static" not in words and ":" not in words:
            align = f"alignas(::fr::member_align<{tree.text(kind)}>) "
            edits.append((node.start_byte, node.start_byte, align))
    return tree.edited(edits)


def function_definitions(tree: Tree) -> list[tuple[str, Node]]:
    """The functions that a text defines: their names, and their nodes in the text."""
    definitions: list[tuple[str, Node]] = []
    for node in kinds(tree.root, "function_definition"):
        declarator = field(node, "declarator")
        while declarator is not None and declarator.type != "function_declarator":
            declarator = field(declarator, "declarator") or next(
                (c for c in declarator.named_children if c.type == "function_declarator"), None
            )
        name = field(declarator, "declarator")
        if name is not None:
            definitions.append((tree.text(name).rsplit("::", 1)[-1], node))
    return definitions


def enclosing_struct(tree: Tree, node: Node) -> str:
    """The name of the struct that a method stands in; nothing for other functions."""
    around = node.parent
    while around is not None and not around.type.endswith(("struct_specifier", "class_specifier")):
        around = around.parent
    return tree.text(field(around, "name"))


def struct_names(tree: Tree) -> list[str]:
    """The structs and classes that a text defines."""
    structs = kinds(tree.root, "struct_specifier", "class_specifier", "union_specifier")
    names = (tree.text(field(struct, "name")) for struct in structs)
    return [name for name in names if name]


def without_functions(text: str, names: set[str]) -> str:
    """The text without the definitions of these functions, line for line."""
    tree = Tree(text, body=False)
    edits: list[Edit] = []
    for name, node in function_definitions(tree):
        if name not in names:
            continue
        while node.parent is not None and node.parent.type == "template_declaration":
            node = node.parent
        edits.append(replaced(node, "\n" * tree.text(node).count("\n")))
    return tree.edited(edits)


def declarators(s: Node) -> list[Node]:
    """The declarators of a declaration."""
    return list(s.children_by_field_name("declarator"))


def _chain(d: Node) -> Iterator[Node]:
    """A declarator and those in it, from the outside in, and at last the name."""
    node: Node | None = d
    while node is not None:
        yield node
        inner = None
        if node.type in _AROUND:
            named = (
                c for c in node.named_children if c.type.endswith(("identifier", "declarator"))
            )
            inner = next(named, None)
        node = field(node, "declarator") or inner


_AROUND = ("reference_declarator", "pointer_declarator", "parenthesized_declarator")


def declarator_shape(d: Node) -> list[str]:
    """The kinds of declarators around a declared name: pointers, references, arrays, functions."""
    return [node.type for node in _chain(d) if node.type != "identifier"]


def declared_name(d: Node) -> Node | None:
    """The identifier that a declarator declares."""
    *around, name = _chain(d)
    bracketed = any(node.type == "parenthesized_declarator" for node in around)
    return name if name.type == "identifier" and not bracketed else None
