"""Whether a use of a buffer's name certainly leaves the pointer as it is.

C++ has more ways to move a pointer than can be listed: references that functions, methods, lambdas,
structs and casts keep. So what reads it is listed, and all other uses count as moves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tree_sitter import Node

from ...dtypes import Dtype
from .. import words
from ..cpp import Prepared
from ..loops.assignments import WRITES_ARGUMENTS
from ..syntax import (
    Tree,
    callee,
    declarators,
    field,
    function_definitions,
    kinds,
    part,
    walk,
)

_SCALAR = r"u?(?:int|char|short|long)|unsigned|signed|float|half|bfloat|bool|size_t|ptrdiff_t"
_BUILTIN = re.compile(rf"(?:(?:metal::)?(?:{_SCALAR})[234]?|u?int(?:8|16|32|64)_t|auto|const)")
# Of ``fr::``.
OWN_BY_VALUE = words("pick fr_factor fr_as fr_bits fr_count")
_MEMBERS = ("declaration", "field_declaration")
_CASTS = words("static_cast as_type")
_READING = words(
    "condition_clause if_statement while_statement for_statement do_statement switch_statement "
    "case_statement expression_statement subscript_argument_list unary_expression "
    "sizeof_expression array_declarator template_argument_list lambda_capture_specifier"
)
_PASSED_ON = words("parenthesized_expression field_expression")


@dataclasses.dataclass(eq=False)
class Variable:
    """A variable of the body.

    Attributes:
        value: what it is initialised with.
        written: it is a buffer's name, and may be moved.
    """

    name: str
    value: Node | None = None
    written: bool = False


class HeaderNames:
    """What the text before a body declares.

    Attributes:
        functions: the definitions of functions, by name.
        by_value: functions, and members and variables that may be called so: whether all of a name
            take their arguments by value.
        types: names of types, and those by macros and using-declarations.
    """

    def __init__(self, header: Tree) -> None:
        self._header = header
        self.functions = dict(function_definitions(header))
        self.by_value: dict[str, bool] = {}
        self.types: set[str] = set()
        for name, node in function_definitions(header):
            value = "&" not in header.text(part(node, "declarator"))
            self.by_value[name] = value and self.by_value.get(name, True)
        for node in walk(header.root):
            self.types.update(self._types(node))
            for d in declarators(node) if node.type in _MEMBERS else ():
                name = re.split(r"[(={]", header.text(d))[0].rsplit("::", 1)[-1]
                self.by_value[name.strip("&* \n")] = False

    def _types(self, node: Node) -> list[str]:
        kind, text = node.type, self._header.text
        if kind == "using_declaration" or kind.startswith("preproc_"):
            return re.findall(r"\w+", text(node).split("\n")[0])
        if kind == "type_definition":
            return re.findall(r"\w+", text(node))
        named = kind.endswith(("_specifier", "alias_declaration", "enumerator"))
        return [text(field(node, "name"))] if named else []


class Reads:
    """The uses of a body's buffers.

    Args:
        p: the kernel.
        tree: the body.
        parents: the node around each, by its id.
        uses: what names mean, by where they stand.
    """

    def __init__(
        self,
        p: Prepared,
        tree: Tree,
        parents: Mapping[int, Node],
        uses: Mapping[int, Variable],
    ) -> None:
        self.tree, self.parents, self.uses = tree, parents, uses
        self.types = {name for name, value in p.spec.template if isinstance(value, Dtype)}
        self.macros = p.text.macros.keys()
        self.header = HeaderNames(p.header)
        self.declared = {*self.header.by_value, *self.header.types, *self.macros}
        # A struct may keep where that is which it is made of.
        self.keep_references = any(
            d.type == "reference_declarator"
            for t in (tree, p.header)
            for node in kinds(t.root, "field_declaration")
            for d in declarators(node)
        )

    def is_library(self, name: str) -> bool:
        """Whether a function's name is the library's, and nobody else's."""
        own = name.removeprefix("metal::")
        return own.isidentifier() and own not in self.declared

    def certain(self, node: Node) -> bool:
        """Whether a buffer's name, here, is read; its elements may be written."""
        while True:
            parent = self.parents[node.id]
            kind = parent.type
            if kind in _READING or kind == "binary_expression":  # no operator is the author's
                return True
            if kind in _PASSED_ON:
                pass
            elif kind in ("conditional_expression", "comma_expression"):
                first = field(parent, "condition") or parent.named_children[0]
                if first.id == node.id:
                    return True
            elif kind == "assignment_expression":
                return part(parent, "right").id == node.id
            elif kind == "subscript_expression" or (
                kind == "pointer_expression" and parent.children[0].type == "*"
            ):
                return True
            elif kind == "call_expression" and self._is_swizzle(parent, node):
                pass
            elif kind == "cast_expression":
                return self.is_builtin(self.tree.text(field(parent, "type")))
            elif kind in ("init_declarator", "initializer_list"):
                return self._initialises(parent)
            elif kind == "return_statement":
                return not self.result_type(parent)
            elif kind == "argument_list":
                call = self.parents[parent.id]
                return call.type == "call_expression" and self.takes_values(call) is True
            elif kind == "lambda_capture_initializer":
                return not refers(parent)
            else:
                return False
            node = parent

    def _is_swizzle(self, call: Node, node: Node) -> bool:
        function = part(call, "function")
        return function.id == node.id and self.tree.text(function).endswith(".swz")

    def _initialises(self, node: Node) -> bool:
        """Whether what is initialised has a value of its own: no reference, and no struct."""
        while node.type == "initializer_list":
            node = self.parents[node.id]
        declarator = field(node, "declarator")
        while declarator is not None and declarator.type in (
            "array_declarator",
            "pointer_declarator",
        ):
            declarator = field(declarator, "declarator")
        return (
            node.type == "init_declarator"
            and declarator is not None
            and declarator.type == "identifier"
            and self.is_builtin(self.tree.text(field(self.parents[node.id], "type")))
        )

    def result_type(self, statement: Node) -> str:
        """What stands after ``->`` in the lambda that a statement returns from."""
        at: Node | None = statement
        while at is not None and at.type != "lambda_expression":
            at = self.parents.get(at.id)
        return self.tree.text(field(at, "declarator")).partition("->")[2]

    def takes_values(self, call: Node) -> bool | None:
        """Whether a function takes its arguments by value; None where it seems so."""
        function, name = part(call, "function"), callee(self.tree, call)
        text, own = self.tree.text(function), self.header.by_value.get(name, True)
        if text.startswith("::fr::"):
            certain = text.rsplit("::", 1)[-1].split("<")[0] in OWN_BY_VALUE
            return certain or (None if name in OWN_BY_VALUE else False)
        if function.type == "identifier" and function.start_byte in self.uses:
            value = self.uses[function.start_byte].value
            is_lambda = value is not None and value.type == "lambda_expression"
            return is_lambda and "&" not in self.tree.text(field(value, "declarator"))
        if function.type == "identifier" and name in self.header.by_value:
            return own
        if self.is_builtin(text):
            return True
        # The rest are methods, and lambdas where they stand.
        named = function.type in ("identifier", "qualified_identifier", "template_function")
        if not named or name in WRITES_ARGUMENTS:
            return False
        if function.type == "template_function" and name in _CASTS:
            return "&" not in self.tree.text(part(function, "arguments"))
        if self.is_library(text):
            return True
        return None if own and name not in self.macros else False

    def is_builtin(self, text: str) -> bool:
        """Whether a type is one of the language's own, or the template's, by value."""
        words = text.split()
        return bool(words) and all(_BUILTIN.fullmatch(w) or w in self.types for w in words)


def refers(capture: Node) -> bool:
    """Whether a lambda's ``[&v = x]`` keeps a reference, as ``[v = x]`` does not."""
    return capture.children[0].type == "&"
