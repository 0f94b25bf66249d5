"""Whether a use of a variable certainly reads it, and does nothing else.

C++ has more ways to write to a variable than can be listed: references that functions, methods,
lambdas, structs and casts keep. So what reads is listed, and all other uses count as writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from tree_sitter import Node

from ..loops.assignments import WRITES_ARGUMENTS
from ..syntax import Tree, function_definitions, walk

_SCALAR = r"u?(?:int|char|short|long)|unsigned|signed|float|half|bfloat|bool|size_t|ptrdiff_t"
_BUILTIN = re.compile(rf"(?:(?:metal::)?(?:{_SCALAR})[234]?|u?int(?:8|16|32|64)_t|auto|const)")
# Of ``fr::``.
OWN_BY_VALUE = frozenset({"pick", "fr_factor", "fr_as", "fr_bits", "fr_count"})
_CASTS = frozenset({"static_cast", "as_type", "metal::as_type"})
_READING = frozenset({
    "condition_clause", "if_statement", "while_statement", "for_statement", "do_statement",
    "switch_statement", "case_statement", "expression_statement", "subscript_argument_list",
    "unary_expression", "sizeof_expression", "array_declarator", "template_argument_list",
    "lambda_capture_specifier",
})  # fmt: skip
_PASSED_ON = frozenset({"parenthesized_expression", "field_expression"})
_NAMES = rf"(?:(?:{_SCALAR})\d?|u?int(?:8|16|32|64)_t)"
# What hides declarations and types, or gives operators another meaning.
_HIDDEN = re.compile(
    r"\b(?:operator|asm|bitand|typeof|__typeof\w*|add_[lr]value_reference\w*)\b|##"
    rf"|\busing\s+(?:{_NAMES}\b|[^;]*&)|\btypedef\b[^;]*(?:&|[\s,(*]{_NAMES}\s*(?:[),;]|__attr|alignas))"
    rf"|\b(?:enum|struct|class|union)\s+(?:class\s+)?{_NAMES}\b"
    r"|^[ \t]*#[ \t]*define\b[^\n]*(?:(?<!&)&(?!&)|\b(?:using|typedef|enum|struct|class|union)\b)",
    re.MULTILINE,
)
_HIDDEN_IN_BODY = re.compile(
    r"\b(?:enum|decltype|struct|class|union|goto|using|typedef|namespace)\b"
)
_OWN = "::fr::pick<decltype"  # of `convert_conditionals`, which names two types

_NAMING = ("_specifier", "alias_declaration")
_NAMED_TYPES = frozenset(
    {
        "parameter_declaration",
        "optional_parameter_declaration",
        "alias_declaration",
        "type_definition",
        "type_parameter_declaration",
        "optional_type_parameter_declaration",
    }
)


def is_plain(header: Tree, body: str, macros: Collection[str]) -> bool:
    """Whether a text has none of what hides writes and declarations from a reader.

    Args:
        header: what stands before the body.
        macros: the names of the author's.
    """
    text = header.data.decode().replace("\\\n", " ")
    if body.count("decltype") == 2 * body.count(_OWN):
        body = body.replace("decltype", "")
    if _HIDDEN.search(text) or _HIDDEN.search(body) or _HIDDEN_IN_BODY.search(body):
        return False
    return not (header.has_error or any(_hides(header, n, macros) for n in walk(header.root)))


def _hides(header: Tree, node: Node, macros: Collection[str]) -> bool:
    """Whether a part of a header may declare something else than it seems to."""
    kind, name = node.type, node.child_by_field_name("name")
    if kind in ("function_definition", "declaration"):
        return node.child_by_field_name("type") is None  # constructors
    if kind == "function_declarator":
        called = node.child_by_field_name("declarator")
        return called is None or called.type == "parenthesized_declarator"  # `int (min)(int a)`
    if kind == "expression_statement":  # the use of a macro
        around = node.parent
        outside = around is not None and around.type in ("translation_unit", "declaration_list")
        return outside and node.named_child_count > 0
    if kind == "decltype":
        while node.parent is not None and node.type not in _NAMED_TYPES:
            node = node.parent
        return node.parent is not None
    if kind in ("type_definition", "using_declaration"):
        named = header.text(node)
    else:
        named = "" if name is None or not kind.endswith(_NAMING) else header.text(name)
    return not set(macros).isdisjoint(re.findall(r"\w+", named))


class Reads:
    """The uses of a body's variables.

    Args:
        tree: the body.
        parents: the node around each, by its id.
        header: the functions before it.
        types: the template's.
    """

    def __init__(
        self, tree: Tree, parents: Mapping[int, Node], header: Tree, types: Collection[str]
    ) -> None:
        self.tree, self.parents, self.types = tree, parents, types
        self.by_value: dict[str, bool] = {}  # the header's functions, all of a name
        for name, node in function_definitions(header):
            value = _takes_values(header, node)
            self.by_value[name] = value and self.by_value.get(name, True)
        for node in walk(header.root):  # of structs, and what has a function's name too
            if node.type == "field_declaration" or node.type == "declaration":
                for d in node.children_by_field_name("declarator"):
                    name = header.text(d).split("(")[0].split("=")[0].split("{")[0].strip()
                    self.by_value[name.rsplit("::", 1)[-1].strip("&* ")] = False
        # A struct may keep where that is which it is made of.
        fields = [n for t in (tree, header) for n in walk(t.root) if n.type == "field_declaration"]
        self.keep_references = any(
            d.type == "reference_declarator"
            for field in fields
            for d in field.children_by_field_name("declarator")
        )
        self.declared = {*self.by_value, *_types(header)}

    def is_library(self, name: str) -> bool:
        """Whether a function's name is the library's, and nobody else's."""
        own = name.removeprefix("metal::")
        return own.isidentifier() and own not in self.declared

    def certain(self, node: Node, lambdas: Mapping[int, Node | None], array: bool = False) -> bool:
        """Whether a name, here, is read.

        Args:
            lambdas: by where the name of a variable stands, what it was made with.
            array: it is a buffer's, whose elements may be written.
        """
        while True:
            parent = self.parents[node.id]
            kind = parent.type
            if kind in _READING:
                return True
            if kind in _PASSED_ON:
                pass
            elif kind == "binary_expression":
                return True  # no operator is the author's
            elif kind in ("conditional_expression", "comma_expression"):
                first = parent.child_by_field_name("condition") or parent.named_children[0]
                if first.id == node.id:
                    return True
            elif kind == "assignment_expression":
                right = parent.child_by_field_name("right")
                return right is not None and right.id == node.id
            elif kind == "subscript_expression":
                indices = parent.child_by_field_name("indices")
                if array or (indices is not None and indices.id == node.id):
                    return True
            elif kind == "pointer_expression" and array and parent.children[0].type == "*":
                return True
            elif kind == "call_expression" and self._is_swizzle(parent, node):
                pass
            elif kind == "cast_expression":
                to = parent.child_by_field_name("type")
                return to is not None and self.is_builtin(self.tree.text(to))
            elif kind in ("init_declarator", "initializer_list"):
                return self._initialises(parent)
            elif kind == "return_statement":
                return not self.result_type(parent)
            elif kind == "argument_list":
                return self._is_value_argument(parent, lambdas)
            elif kind == "lambda_capture_initializer":
                return not self.refers(parent)
            else:
                return False
            node = parent

    def refers(self, capture: Node) -> bool:
        """Whether a lambda's ``[&v = x]`` keeps a reference, as ``[v = x]`` does not."""
        name = capture.child_by_field_name("left") or capture
        return self.tree.data[: name.start_byte].rstrip().endswith(b"&")

    def _is_swizzle(self, call: Node, node: Node) -> bool:
        function = call.child_by_field_name("function")
        return (
            function is not None
            and function.id == node.id
            and bool(re.search(r"\.swz$", self.tree.text(function)))
        )

    def _initialises(self, node: Node) -> bool:
        """Whether what is initialised has a value of its own: no reference, and no struct."""
        while node.type == "initializer_list":
            node = self.parents[node.id]
        declarator = node.child_by_field_name("declarator")
        declaration = self.parents[node.id]
        kind = declaration.child_by_field_name("type")
        while declarator is not None and declarator.type in (
            "array_declarator",
            "pointer_declarator",
        ):
            declarator = declarator.child_by_field_name("declarator")
        return (
            node.type == "init_declarator"
            and declarator is not None
            and declarator.type == "identifier"
            and kind is not None
            and self.is_builtin(self.tree.text(kind))
        )

    def result_type(self, statement: Node) -> str:
        """What stands after ``->`` in the lambda that a statement returns from."""
        at: Node | None = statement
        while at is not None and at.type != "lambda_expression":
            at = self.parents.get(at.id)
        head = at.child_by_field_name("declarator") if at is not None else None
        return "" if head is None else self.tree.text(head).partition("->")[2]

    def _is_value_argument(self, arguments: Node, lambdas: Mapping[int, Node | None]) -> bool:
        """Whether a function takes its arguments by value."""
        call = self.parents[arguments.id]
        function = call.child_by_field_name("function")
        if call.type != "call_expression" or function is None:
            return False
        text = self.tree.text(function)
        if function.type == "template_function":
            name = function.child_by_field_name("name")
            to = function.child_by_field_name("arguments")
            cast = name is not None and self.tree.text(name) in _CASTS and to is not None
            return cast and to is not None and "&" not in self.tree.text(to)
        if text.startswith("::fr::"):
            return text.rsplit("::", 1)[-1].split("<")[0] in OWN_BY_VALUE
        if function.type == "identifier":
            if function.start_byte in lambdas:
                value = lambdas[function.start_byte]
                head = value.child_by_field_name("declarator") if value is not None else None
                return (
                    value is not None
                    and value.type == "lambda_expression"
                    and (head is None or "&" not in self.tree.text(head))
                )
            if text in self.by_value:
                return self.by_value[text]
        if self.is_builtin(text):
            return True
        named = function.type in ("identifier", "qualified_identifier")
        return named and self.is_library(text) and text.split("::")[-1] not in WRITES_ARGUMENTS

    def is_builtin(self, text: str) -> bool:
        """Whether a type is one of the language's own, or the template's, by value."""
        words = text.split()
        return bool(words) and all(_BUILTIN.fullmatch(w) or w in self.types for w in words)


def _takes_values(header: Tree, definition: Node) -> bool:
    """Whether a function's parameters are neither references nor of types that may be."""
    declarator = definition.child_by_field_name("declarator")
    return declarator is not None and "&" not in header.text(declarator)


def _types(header: Tree) -> Iterator[str]:
    """The names that a header gives to types, and by macros and using-declarations."""
    for node in walk(header.root):
        if node.type == "using_declaration" or node.type.startswith("preproc_"):
            yield from re.findall(r"\w+", header.text(node).split("\n")[0])
        elif node.type.endswith(("_specifier", "alias_declaration", "enumerator")):
            name = node.child_by_field_name("name")
            if name is not None:
                yield header.text(name)
        elif node.type == "type_definition":
            yield from re.findall(r"\w+", header.text(node))
