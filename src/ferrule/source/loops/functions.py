"""A function of the header, read so that `inline` can put it in place of its calls."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from tree_sitter import Node

from .. import words
from ..cpp import NotSplittable
from ..syntax import Edit, Tree, field, kinds, part, replaced
from .assignments import assigned, passed_by_name
from .declarations import DECLARING, STRUCTS, declared_in, declares, listed, shape_of, shapes

_BREAK = re.compile(r"[ \t\r]*\\?\r?\n\s*")
# What opens a scope of its own.
_SCOPES = words("""
    compound_statement if_statement for_statement while_statement do_statement
    switch_statement for_range_loop lambda_expression
""")
# What a function's body must not hold to be moved.
_REFUSED = {
    "goto_statement": "jumps with goto",
    "labeled_statement": "jumps with goto",
    "using_declaration": "has a using declaration of its own",
    "namespace_alias_definition": "names a namespace anew",
    "structured_binding_declarator": "has a structured binding",
    "lambda_capture_initializer": "has a lambda with variables of its own",
    "enum_specifier": "declares an enum",
    "ERROR": "has syntax that the splitter does not read",
} | dict.fromkeys(STRUCTS, "declares a struct")
_TEMPLATE_TYPES = ("type_parameter_declaration", "optional_type_parameter_declaration")
_PARAMETERS = ("parameter_declaration", "optional_parameter_declaration")
_WORDS = ("identifier", "type_identifier", "namespace_identifier")
_READ_THROUGH = ("subscript_expression", "pointer_expression", "field_expression")


def one_line(text: str) -> str:
    """The text on one line."""
    return _BREAK.sub(" ", text)


@dataclass(frozen=True, eq=False)
class Name:
    """A name that a function declares: a template parameter, a parameter or a variable.

    Attributes:
        text: as the author calls it.
        type: of a template parameter that is a constant: where its type stands.
        default: of a template parameter.
    """

    text: str
    template: bool = False
    type: tuple[int, int] | None = None
    default: Node | None = None


class HeaderParameter(NamedTuple):
    """A parameter of a function.

    Attributes:
        kind: ``value``, ``pointer``, ``reference``, or ``constant`` for a reference to one.
        of: the template parameter that its type, or what it points to, consists of.
    """

    number: int
    node: Node
    kind: str
    name: Name | None
    is_const: bool
    of: Name | None
    default: Node | None


class HeaderFunction:
    """A function of the header.

    Args:
        node: its definition.
        functions: the functions of the header, which may change what they are given.

    Attributes:
        free: the words that mean something outside the function.
        fields: the members that it names.
        moved: the names that it assigns to, or takes the address of.
        altered: the names that it may change in any way, or write through.
    """

    def __init__(self, name: str, tree: Tree, node: Node, functions: frozenset[str]) -> None:
        self.name, self.tree, self.node = name, tree, node
        self.templates: list[Name] = []
        self.parameters: list[HeaderParameter] = []
        self.free: set[str] = set()
        self.fields: set[str] = set()
        self.uses: dict[Name, list[Node]] = defaultdict(list)  # declarations apart
        self.places: list[tuple[Node, Name]] = []  # declarations, too
        self._variables: list[Name] = []
        self._scopes: list[dict[str, Name]] = [{}]
        self._declaring: set[int] = set()
        body = field(node, "body")
        if body is None or body.type != "compound_statement" or tree.has_error:
            self._refuse("has syntax that the splitter does not read")
        self.body = body
        self.statements = body.named_children
        changed = list(assigned(tree, body))
        self.moved = {n for n, through in changed if not through}
        self.altered = {n for n, _ in (*changed, *passed_by_name(tree, body, functions))}
        self._read()

    def _refuse(self, why: str) -> NoReturn:
        raise NotSplittable(f"{self.name} of the header {why}")

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        around = self.node.parent
        if around is not None and around.type == "template_declaration":
            for node in listed(around):
                self._read_template(node)
        kind = field(self.node, "type")
        declarator = field(self.node, "declarator")
        stars = ""
        while declarator is not None and declarator.type == "pointer_declarator":
            stars += "*"
            declarator = field(declarator, "declarator")
        if kind is None or declarator is None or declarator.type != "function_declarator":
            self._refuse("returns what the splitter does not read")
        for child in declarator.children:
            if child.type == "trailing_return_type":
                kind = child.named_children[0]
        for node in listed(declarator):
            self._read_parameter(node)
        self._resolve(kind)
        self._resolve(self.body)
        text = self.tree.text(kind)
        if text.startswith("decltype"):
            self._refuse("returns decltype(auto)")
        # The type of what it returns, and what stands before and behind it; None for void.
        const = "const " if stars and self._is_const(self.node) else ""
        self.returns = None if text == "void" and not stars else (const, kind, stars)

    def _is_const(self, node: Node) -> bool:
        return any(
            c.type == "type_qualifier" and self.tree.text(c) == "const" for c in node.children
        )

    def _read_template(self, node: Node) -> None:
        type_: tuple[int, int] | None = None
        name_node: Node | None = None
        if node.type in _TEMPLATE_TYPES:
            words = [n for n in node.named_children if n.type == "type_identifier"]
            default = field(node, "default_type")
            name_node = words[0] if words and words[0] != default else None
        elif node.type in _PARAMETERS:
            declarator = field(node, "declarator")
            default = field(node, "default_value")
            if declarator is not None and declarator.type == "identifier":
                name_node = declarator
            words = [c for c in node.named_children if c not in (declarator, default)]
            for word in words:
                self._resolve(word)
            type_ = (node.start_byte, words[-1].end_byte if words else node.start_byte)
        else:
            self._refuse("has template parameters that the splitter does not read")
        self._resolve(default)
        text = self.tree.text(name_node)
        self.templates.append(Name(text, True, type_, default))
        self._scopes[-1][text] = self.templates[-1]

    def _read_parameter(self, node: Node) -> None:
        if node.type == "comment":
            return
        if node.type not in _PARAMETERS:
            self._refuse("takes any number of arguments")
        declarator, type_ = field(node, "declarator"), field(node, "type")
        default = field(node, "default_value")
        shape, is_const = shape_of(declarator), self._is_const(node)
        if "function" in shape or "&&" in shape:
            self._refuse("has a parameter that the splitter does not read")
        if "&" in shape:
            kind = "constant" if is_const and shape == ["&"] else "reference"
        else:
            kind = "pointer" if shape else "value"
            if shape.count("[]") > 1 or ("[]" in shape and len(shape) > 1):
                self._refuse("takes an array of arrays")
        of = self._scopes[0].get(self.tree.text(type_))
        self._resolve(type_)
        self._resolve(default)
        name_node, name = declared_in(declarator), None
        if name_node is not None:
            name = self._declare(name_node)
        if of is not None and (not of.template or of.type is not None or len(shape) > 1):
            of = None
        number = len(self.parameters)
        self.parameters.append(HeaderParameter(number, node, kind, name, is_const, of, default))

    def _declare(self, node: Node) -> Name:
        name = Name(self.tree.text(node))
        self._variables.append(name)
        self._scopes[-1][name.text] = name
        self.places.append((node, name))
        return name

    def _resolve(self, node: Node | None) -> None:
        """Tell the names that the function declares from those that mean something outside."""
        if node is None:
            return
        kind = node.type
        if kind in _REFUSED:
            self._refuse(_REFUSED[kind])
        if kind.startswith("preproc"):
            self._refuse("holds a directive")
        if kind == "qualified_identifier":
            self._resolve_qualified(node)
            return
        if kind in _WORDS:
            self._use(node)
            return
        if kind == "field_identifier":
            self.fields.add(self.tree.text(node))
        if kind in _SCOPES:
            self._scopes.append({})
        for identifier in declares(node):
            if identifier is None:
                self._refuse("has a declaration that the splitter does not read")
            self._declaring.add(identifier.start_byte)
        for child in node.children:
            self._resolve(child)
        if kind in _SCOPES:
            self._scopes.pop()

    def _resolve_qualified(self, node: Node, first: bool = True) -> None:
        scope, name = field(node, "scope"), field(node, "name")
        if scope is not None and (first or scope.type not in _WORDS):
            self._resolve(scope)
        if name is not None and name.type == "qualified_identifier":
            self._resolve_qualified(name, False)
        for child in name.named_children if name is not None else ():
            if child.type == "template_argument_list":
                self._resolve(child)

    def _use(self, node: Node) -> None:
        word = self.tree.text(node)
        if node.start_byte in self._declaring:
            self._declare(node)
            return
        name = next((s[word] for s in reversed(self._scopes) if word in s), None)
        if name is None:
            self.free.add(word)
        else:
            self.uses[name].append(node)
            self.places.append((node, name))

    # -- what is known ---------------------------------------------------------------------------

    def only_indexed(self, name: Name) -> bool:
        """Whether a name is read through each time: ``p[i]``, ``*p``, ``p->x``."""

        def indexed(node: Node) -> bool:
            around = node.parent
            if around is None or around.type not in _READ_THROUGH:
                return False
            signs = [c.type for c in around.children]
            argument = field(around, "argument")
            return argument == node and signs[0] != "&" and "." not in signs

        return all(map(indexed, self.uses[name]))

    def captured(self, name: Name) -> bool:
        """Whether a lambda lists a name among its captures."""
        around = (node.parent for node in self.uses[name])
        return any(n is not None and n.type == "lambda_capture_specifier" for n in around)

    def writes_through(self) -> bool:
        """Whether it writes to what a pointer or reference leads to."""
        own = {q.name.text: q.kind == "value" for q in self.parameters if q.name is not None}
        for node in kinds(self.body, *DECLARING):
            for name, spec, shape in shapes(self.tree, node):
                plain = set(shape) <= {"[]"} and "auto" not in spec.split()
                own[name] = plain and own.get(name, True)
        for node in kinds(self.body, "assignment_expression", "update_expression"):
            target = field(node, "left") or part(node, "argument")
            for place in kinds(target, *_READ_THROUGH):
                if not own.get(self.tree.text(field(place, "argument")), False):
                    return True
        return False

    def bound(self, prefix: str) -> Bound:
        """The function in a call: every variable has a name of its own, no template parameter."""
        texts: dict[Name, str] = {}
        for name in self._variables:
            text = prefix + name.text
            while text in texts.values():
                text += "_"
            texts[name] = text
        return Bound(self, texts)


@dataclass
class Bound:
    """A function in a call.

    Attributes:
        texts: what stands for each name, as far as it is known.
    """

    function: HeaderFunction
    texts: dict[Name, str]

    def render(self, node: Node) -> str:
        """The text of a node."""
        return self.between(node.start_byte, node.end_byte)

    def between(self, start: int, end: int, edits: Iterable[Edit] = ()) -> str:
        """The text of a range of bytes.

        Args:
            edits: ranges that other texts stand for, each with its text.

        Raises:
            NotSplittable: a template argument is not known.
        """
        uses = (u for u in self.function.places if start <= u[0].start_byte < end)
        texts = [replaced(node, self._text(name)) for node, name in uses]
        return self.function.tree.between(start, end, [*edits, *texts])

    def _text(self, name: Name) -> str:
        if name not in self.texts:
            raise NotSplittable(f"{self.function.name} does not say what its {name.text} is")
        return self.texts[name]

    def declaration(self, parameter: HeaderParameter, name: str) -> str:
        """A parameter as the declaration of a variable, without what it is initialised with."""
        declarator = field(parameter.node, "declarator")
        end = declarator.start_byte if declarator is not None else parameter.node.end_byte
        if parameter.default is not None and declarator is None:
            end = next(c.start_byte for c in parameter.node.children if c.type == "=")
        stars = ["* const " if s == "*const" else "*" for s in shape_of(declarator) if s[0] in "*["]
        return f"{self.between(parameter.node.start_byte, end).strip()} {''.join(stars)}{name}"

    def value_type(self, parameter: HeaderParameter) -> str:
        """The type of a parameter by value, without const; empty while it is not known."""
        type_ = field(parameter.node, "type")
        if type_ is None or (parameter.of is not None and parameter.of not in self.texts):
            return ""
        return self.render(type_)

    def returned_type(self) -> str:
        """The type of the variable that holds the value; nothing for void."""
        if self.function.returns is None:
            return ""
        const, kind, stars = self.function.returns
        return f"{const}{self.render(kind)}{stars}"
