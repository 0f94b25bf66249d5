"""A function of the header, read so that `inline` can put it in place of its calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from tree_sitter import Node

from ..cpp import NotSplittable
from ..syntax import Tree, walk
from .assignments import assigned
from .declarations import STRUCTS, declared_in, declares, shape_of, shapes

_BREAK = re.compile(r"[ \t\r]*\\?\r?\n\s*")
# What opens a scope of its own.
_SCOPES = (
    "compound_statement",
    "if_statement",
    "for_statement",
    "while_statement",
    "do_statement",
    "switch_statement",
    "for_range_loop",
    "lambda_expression",
)
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
_WORDS = ("identifier", "type_identifier", "namespace_identifier")
_READ_THROUGH = ("subscript_expression", "pointer_expression", "field_expression")


def one_line(text: str) -> str:
    """The text on one line."""
    return _BREAK.sub(" ", text)


@dataclass(eq=False)
class Name:
    """A name that a function declares: a template parameter, a parameter or a variable.

    Attributes:
        name: as the author calls it.
        template: it is a template parameter.
        type: of a template parameter that is a constant: where its type stands.
        default: of a template parameter.
        text: what stands for it in the current call; empty while that is not known.
        used: how often it is named, its declaration apart.
        only_indexed: each time it is read through: ``p[i]``, ``*p``, ``p->x``.
        captured: a lambda lists it among its captures.
    """

    name: str
    template: bool = False
    type: tuple[int, int] | None = None
    default: Node | None = None
    text: str = ""
    used: int = 0
    only_indexed: bool = True
    captured: bool = False


@dataclass
class HeaderParameter:
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


@dataclass
class HeaderFunction:
    """A function of the header.

    Attributes:
        free: the words that mean something outside the function.
        fields: the members that it names.
        moved: the names that it assigns to, or takes the address of.
        altered: the names that it may change in any way, or write through.
    """

    name: str
    tree: Tree
    node: Node
    templates: list[Name] = field(default_factory=list)
    parameters: list[HeaderParameter] = field(default_factory=list)
    free: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names: list[Name] = []
        self._uses: list[tuple[int, int, Name]] = []
        self._scopes: list[dict[str, Name]] = [{}]
        self._declaring: dict[int, Name] = {}
        body = self.node.child_by_field_name("body")
        if body is None or body.type != "compound_statement" or self.tree.has_error:
            self._refuse("has syntax that the splitter does not read")
        self.body = body
        self.statements = body.named_children
        self.moved = {n for n, through in assigned(self.tree, body) if not through}
        self.altered = {n for n, _ in assigned(self.tree, body)}
        self._read()

    def _refuse(self, why: str) -> NoReturn:
        raise NotSplittable(f"{self.name} of the header {why}")

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        around = self.node.parent
        if around is not None and around.type == "template_declaration":
            listed = around.child_by_field_name("parameters")
            for node in listed.named_children if listed is not None else []:
                self._read_template(node)
        kind = self.node.child_by_field_name("type")
        declarator = self.node.child_by_field_name("declarator")
        self._stars = ""
        while declarator is not None and declarator.type == "pointer_declarator":
            self._stars += "*"
            declarator = declarator.child_by_field_name("declarator")
        if kind is None or declarator is None or declarator.type != "function_declarator":
            self._refuse("returns what the splitter does not read")
        for part in declarator.children:
            if part.type == "trailing_return_type":
                kind = part.named_children[0]
        listed = declarator.child_by_field_name("parameters")
        for node in listed.named_children if listed is not None else []:
            self._read_parameter(node)
        self._resolve(kind)
        self._resolve(self.body)
        text = self.tree.text(kind)
        self.returns = None if text == "void" and not self._stars else kind
        if text.startswith("decltype"):
            self._refuse("returns decltype(auto)")

    def _read_template(self, node: Node) -> None:
        kind = node.type
        if kind in ("type_parameter_declaration", "optional_type_parameter_declaration"):
            words = [n for n in node.named_children if n.type == "type_identifier"]
            default = node.child_by_field_name("default_type")
            name_node = words[0] if words and words[0] != default else None
            type_ = None
        elif kind in ("parameter_declaration", "optional_parameter_declaration"):
            declarator = node.child_by_field_name("declarator")
            name_node, default = None, node.child_by_field_name("default_value")
            if declarator is not None and declarator.type == "identifier":
                name_node = declarator
            parts = [c for c in node.named_children if c not in (declarator, default)]
            for part in parts:
                self._resolve(part)
            type_ = (node.start_byte, parts[-1].end_byte if parts else node.start_byte)
        else:
            self._refuse("has template parameters that the splitter does not read")
        if default is not None:
            self._resolve(default)
        name = Name(
            self.tree.text(name_node) if name_node is not None else "", True, type_, default
        )
        self.templates.append(name)
        self._scopes[-1][name.name] = name

    def _read_parameter(self, node: Node) -> None:
        if node.type == "comment":
            return
        declarator = node.child_by_field_name("declarator")
        if node.type not in ("parameter_declaration", "optional_parameter_declaration"):
            self._refuse("takes any number of arguments")
        name_node = declared_in(declarator) if declarator is not None else None
        shape = shape_of(declarator)
        is_const = any(
            c.type == "type_qualifier" and self.tree.text(c) == "const" for c in node.children
        )
        if "function" in shape or "&&" in shape:
            self._refuse("has a parameter that the splitter does not read")
        if "&" in shape:
            kind = "constant" if is_const and shape == ["&"] else "reference"
        else:
            kind = "pointer" if shape else "value"
            if shape.count("[]") > 1 or ("[]" in shape and len(shape) > 1):
                self._refuse("takes an array of arrays")
        type_ = node.child_by_field_name("type")
        of = self._scopes[0].get(self.tree.text(type_)) if type_ is not None else None
        default = node.child_by_field_name("default_value")
        if type_ is not None:
            self._resolve(type_)
        if default is not None:
            self._resolve(default)
        name = None
        if name_node is not None:
            name = self._declare(name_node)
            self._uses.append((name_node.start_byte, name_node.end_byte, name))
        plain = of is not None and of.template and of.type is None and len(shape) < 2
        self.parameters.append(
            HeaderParameter(
                len(self.parameters), node, kind, name, is_const, of if plain else None, default
            )
        )

    def _declare(self, node: Node) -> Name:
        name = Name(self.tree.text(node))
        self._names.append(name)
        self._scopes[-1][name.name] = name
        return name

    def _resolve(self, node: Node) -> None:
        """Tell the names that the function declares from those that mean something outside."""
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
            self._declaring[identifier.start_byte] = Name(self.tree.text(identifier))
        for child in node.children:
            self._resolve(child)
        if kind in _SCOPES:
            self._scopes.pop()

    def _resolve_qualified(self, node: Node, first: bool = True) -> None:
        scope, name = node.child_by_field_name("scope"), node.child_by_field_name("name")
        if scope is not None and (first or scope.type not in _WORDS):
            self._resolve(scope)
        if name is None:
            return
        if name.type == "qualified_identifier":
            self._resolve_qualified(name, False)
        for child in name.named_children:
            if child.type == "template_argument_list":
                self._resolve(child)

    def _use(self, node: Node) -> None:
        word = self.tree.text(node)
        name = self._declaring.get(node.start_byte)
        if name is not None:
            self._names.append(name)
            self._scopes[-1][word] = name
        else:
            name = next((s[word] for s in reversed(self._scopes) if word in s), None)
            if name is None:
                self.free.add(word)
                return
            name.used += 1
            parent = node.parent
            if parent is not None:
                through = parent.type in _READ_THROUGH and parent.children[0].type != "&"
                through = through and parent.child_by_field_name("argument") == node
                name.only_indexed &= through and not any(c.type == "." for c in parent.children)
                name.captured |= parent.type == "lambda_capture_specifier"
        self._uses.append((node.start_byte, node.end_byte, name))

    def writes_through(self) -> bool:
        """Whether it writes to what a pointer or reference leads to."""
        own: dict[str, bool] = {q.name.name: q.kind == "value" for q in self.parameters if q.name}
        for node in walk(self.body):
            for name, spec, shape in shapes(self.tree, node):
                plain = set(shape) <= {"[]"} and "auto" not in spec.split()
                own[name] = plain and own.get(name, True)
        for node in walk(self.body):
            if node.type not in ("assignment_expression", "update_expression"):
                continue
            target = node.child_by_field_name("left") or node.child_by_field_name("argument")
            for part in walk(target) if target is not None else ():
                inner = part.child_by_field_name("argument")
                if part.type in _READ_THROUGH and (
                    inner is None or not own.get(self.tree.text(inner), False)
                ):
                    return True
        return False

    # -- writing ---------------------------------------------------------------------------------

    def rename(self, prefix: str) -> None:
        """Start a call: every variable gets a name of its own, every template parameter none."""
        taken: set[str] = set()
        for name in self._names:
            name.text = prefix + name.name
            while name.text in taken:
                name.text += "_"
            taken.add(name.text)
        for name in self.templates:
            name.text = ""

    def render(self, node: Node) -> str:
        """The text of a node, with what stands for each name in the current call."""
        return self.between(node.start_byte, node.end_byte)

    def between(self, start: int, end: int, edits: list[tuple[int, int, str]] | None = None) -> str:
        """The text of a range of bytes, with what stands for each name in the current call.

        Args:
            edits: ranges that other texts stand for, each with its text.

        Raises:
            NotSplittable: a template argument is not known.
        """
        out: list[str] = []
        places: list[tuple[int, int, str | Name]] = [*(edits or []), *self._uses]
        for first, last, name in sorted(places, key=lambda place: place[:2]):
            if first < start or last > end:
                continue
            text = name.text if isinstance(name, Name) else name
            if isinstance(name, Name) and not text:
                raise NotSplittable(f"{self.name} does not say what its {name.name} is")
            out.append(self.tree.data[start:first].decode() + text)
            start = last
        return "".join(out) + self.tree.data[start:end].decode()

    def declaration(self, parameter: HeaderParameter, name: str) -> str:
        """A parameter as the declaration of a variable, without what it is initialised with."""
        declarator = parameter.node.child_by_field_name("declarator")
        end = declarator.start_byte if declarator is not None else parameter.node.end_byte
        if parameter.default is not None and declarator is None:
            end = next(c.start_byte for c in parameter.node.children if c.type == "=")
        stars = ["* const " if s == "*const" else "*" for s in shape_of(declarator) if s[0] in "*["]
        return f"{self.between(parameter.node.start_byte, end).strip()} {''.join(stars)}{name}"

    def value_type(self, parameter: HeaderParameter) -> str:
        """The type of a parameter by value, without const; empty while it is not known."""
        type_ = parameter.node.child_by_field_name("type")
        if type_ is None or (parameter.of is not None and not parameter.of.text):
            return ""
        return self.render(type_)

    def returned_type(self) -> str:
        """The type of the variable that holds the value; nothing for void."""
        if self.returns is None:
            return ""
        const = "const " if self._stars and self._returns_const() else ""
        return f"{const}{self.render(self.returns)}{self._stars}"

    def _returns_const(self) -> bool:
        return any(
            c.type == "type_qualifier" and self.tree.text(c) == "const" for c in self.node.children
        )
