"""Functions of the header, read so that `source.inline` can put them in place of their calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tree_sitter import Node

from .cpp import NotSplittable, Prepared
from .dialect import MATRIX_OPS, SIMD_BARRIERS, SYNC, THREADGROUP_BARRIERS
from .macros import expand
from .syntax import Tree, callee, function_definitions, walk
from .uniform import assigned, passed_by_name

_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[^\n]*$", re.MULTILINE)
_BREAK = re.compile(r"[ \t\r]*\\?\r?\n\s*")
_STRUCTS = ("struct_specifier", "class_specifier", "union_specifier")
# What opens a scope of its own.
_SCOPES = (
    "compound_statement", "if_statement", "for_statement", "while_statement", "do_statement",
    "switch_statement", "for_range_loop", "lambda_expression",
)  # fmt: skip
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
} | dict.fromkeys(_STRUCTS, "declares a struct")
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
class Parameter:
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
class Function:
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
    parameters: list[Parameter] = field(default_factory=list)
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
            found = words[0] if words and words[0] != default else None
            type_ = None
        elif kind in ("parameter_declaration", "optional_parameter_declaration"):
            declarator = node.child_by_field_name("declarator")
            found, default = None, node.child_by_field_name("default_value")
            if declarator is not None and declarator.type == "identifier":
                found = declarator
            parts = [c for c in node.named_children if c not in (declarator, default)]
            for part in parts:
                self._resolve(part)
            type_ = (node.start_byte, parts[-1].end_byte if parts else node.start_byte)
        else:
            self._refuse("has template parameters that the splitter does not read")
        if default is not None:
            self._resolve(default)
        name = Name(self.tree.text(found) if found is not None else "", True, type_, default)
        self.templates.append(name)
        self._scopes[-1][name.name] = name

    def _read_parameter(self, node: Node) -> None:
        if node.type == "comment":
            return
        declarator = node.child_by_field_name("declarator")
        if node.type not in ("parameter_declaration", "optional_parameter_declaration"):
            self._refuse("takes any number of arguments")
        found = declared_in(declarator) if declarator is not None else None
        shape = _shape(declarator)
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
        if found is not None:
            name = self._declare(found)
            self._uses.append((found.start_byte, found.end_byte, name))
        plain = of is not None and of.template and of.type is None and len(shape) < 2
        self.parameters.append(
            Parameter(
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
        for found in _declares(node):
            if found is None:
                self._refuse("has a declaration that the splitter does not read")
            self._declaring[found.start_byte] = Name(self.tree.text(found))
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

    def declaration(self, q: Parameter, name: str) -> str:
        """A parameter as the declaration of a variable, without what it is initialised with."""
        declarator = q.node.child_by_field_name("declarator")
        end = declarator.start_byte if declarator is not None else q.node.end_byte
        if q.default is not None and declarator is None:
            end = next(c.start_byte for c in q.node.children if c.type == "=")
        stars = ["* const " if s == "*const" else "*" for s in _shape(declarator) if s[0] in "*["]
        return f"{self.between(q.node.start_byte, end).strip()} {''.join(stars)}{name}"

    def value_type(self, q: Parameter) -> str:
        """The type of a parameter by value, without const; empty while it is not known."""
        type_ = q.node.child_by_field_name("type")
        if type_ is None or (q.of is not None and not q.of.text):
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


class Functions:
    """The functions of a header that synchronise.

    Args:
        p: the kernel.
        names: what they are called.
    """

    def __init__(self, p: Prepared, names: set[str]) -> None:
        self.p = p
        self.names = names
        self._tree = Tree(p.text.header, body=False)
        self._nodes: dict[str, list[Node]] = {}
        for name, node in function_definitions(self._tree):
            self._nodes.setdefault(re.sub(r"<.*", "", name), []).append(node)
            if "<" in name and name.split("<")[0] in names:
                raise NotSplittable(f"{name} of the header is a specialisation")
        self._read: dict[str, list[Function]] = {}

    def is_call(self, tree: Tree, node: Node) -> bool:
        """Whether a node calls one of the functions."""
        function = node.child_by_field_name("function")
        if node.type != "call_expression" or function is None:
            return False
        if callee(tree, node) not in self.names:
            return False
        if function.type == "qualified_identifier":
            return self.is_named(tree.text(function))
        return function.type in ("identifier", "template_function")

    def is_named(self, text: str) -> bool:
        """Whether a qualified name means one of the functions; others have the same last name."""
        scope, _, name = re.sub(r"<.*", "", text, flags=re.DOTALL).rpartition("::")
        end = f"::{scope.strip().removeprefix('::')}"
        return any(f"::{self._scope(n)}".endswith(end) for n in self._nodes.get(name.strip(), []))

    def find(self, name: str, arguments: int) -> Function:
        """The function that a call with so many arguments means.

        Raises:
            NotSplittable: it is not clear which, or it cannot be moved.
        """
        found = [
            f
            for f in self._versions(name)
            if sum(q.default is None for q in f.parameters) <= arguments <= len(f.parameters)
        ]
        if len(found) != 1:
            several = f"has {len(found)} versions for {arguments} arguments"
            raise NotSplittable(f"{name} of the header {several}")
        return found[0]

    def takes_memory(self, name: str) -> bool:
        """Whether a function of the header is given pointers, or references to what changes."""
        return any(
            "*" in shape or "[]" in shape or ("&" in shape and not const)
            for node in self._nodes.get(name, [])
            for shape, const in _parameters(node)
        )

    def _scope(self, node: Node) -> str:
        names: list[str] = []
        around = node.parent
        while around is not None:
            name = around.child_by_field_name("name")
            if around.type in ("namespace_definition", *_STRUCTS) and name is not None:
                names.insert(0, self._tree.text(name))
            around = around.parent
        return "::".join(names)

    def _reached(self, name: str) -> set[str]:
        """The functions that a function calls, directly or through others."""
        found: set[str] = set()
        todo = [name]
        while todo:
            for node in self._nodes.get(todo.pop(), []):
                for n in walk(node):
                    called = callee(self._tree, n) if n.type == "call_expression" else ""
                    if called in self._nodes and called not in found:
                        found.add(called)
                        todo.append(called)
        return found

    def _function(self, name: str, node: Node) -> Function:
        outer = node
        while outer.parent is not None and outer.parent.type == "template_declaration":
            outer = outer.parent
        around = outer.parent
        named: set[str] = set()
        while around is not None:
            if around.type in _STRUCTS:
                raise NotSplittable(f"a method {name} of the header synchronises")
            if around.type == "namespace_definition" and around.child_by_field_name("name"):
                named |= {n for part in walk(around) for n in declared_names(self._tree, part)}
            around = around.parent
        # The macros that are defined where the function is.
        text, p = self._tree.text(outer), self.p
        before = self._tree.data[: outer.start_byte].decode()
        text = expand(replace(p, text=replace(p.text, header=before, source=text)))
        text = one_line(_PRAGMA.sub("", text))
        tree = Tree(text, body=False)
        found = [n for n in walk(tree.root) if n.type == "function_definition"]
        if not found:
            raise NotSplittable(f"{name} of the header is not understood")
        function = Function(name, tree, found[0])
        own = frozenset(self._nodes)
        function.altered |= {n for n, _ in passed_by_name(tree, function.body, own)}
        clash = function.free & (named - self.names)
        clash |= (function.free | function.fields) & set(self.p.text.macros)
        if clash:
            raise NotSplittable(f"{min(clash)} means something else outside {name} of the header")
        if re.search(r"\bthread_local\b", text):
            raise NotSplittable(f"{name} of the header declares threadgroup memory")
        return function

    def effects(self, function: Function) -> bool:
        """Whether a function may write to memory, or wait for others that do."""
        if function.writes_through():
            return True
        called = {
            callee(function.tree, n) for n in walk(function.body) if n.type == "call_expression"
        }
        if called & (THREADGROUP_BARRIERS | SIMD_BARRIERS | MATRIX_OPS):
            return True
        return any(name.startswith("atomic_") or self.takes_memory(name) for name in called) or any(
            self.effects(f) for name in called & self.names for f in self._versions(name)
        )

    def _versions(self, name: str) -> list[Function]:
        if name in SYNC | MATRIX_OPS:
            raise NotSplittable(f"the header defines {name} anew")
        if name in self._reached(name):
            raise NotSplittable(f"{name} of the header calls itself")
        if name not in self._read:
            self._read[name] = [self._function(name, n) for n in self._nodes.get(name, [])]
        return self._read[name]


def declared_in(declarator: Node) -> Node | None:
    """The identifier that a declarator declares."""
    node: Node | None = declarator
    while node is not None and node.type not in ("identifier", "type_identifier"):
        if node.type == "function_declarator":
            return None
        node = _inner(node)
    return node


def _inner(declarator: Node) -> Node | None:
    """What a declarator is around: another one, or a name."""
    field = declarator.child_by_field_name("declarator")
    if field is not None:
        return field
    inner = (c for c in declarator.named_children if c.type.endswith(("identifier", "declarator")))
    return next(inner, None)


def _declares(node: Node) -> list[Node | None]:
    """The identifiers that a node itself declares; None for one that is not understood."""
    if node.type in ("declaration", "for_range_loop", "type_definition"):
        return [declared_in(d) for d in node.children_by_field_name("declarator")]
    if node.type in ("parameter_declaration", "optional_parameter_declaration"):
        declarator = node.child_by_field_name("declarator")
        if declarator is None or declarator.type.startswith("abstract"):
            return []
        return [declared_in(declarator)]
    if node.type == "alias_declaration":
        return [node.child_by_field_name("name")]
    return []


def shapes(tree: Tree, node: Node) -> list[tuple[str, str, list[str]]]:
    """The names that a node itself declares, each with its specifiers and declarator's shape."""
    if node.type in ("declaration", "for_range_loop", "parameter_declaration"):
        given = node.children_by_field_name("declarator")
        start = node.child_by_field_name("type") if node.type == "for_range_loop" else node
        spec = ""
        if given and start is not None:
            spec = tree.data[start.start_byte : given[0].start_byte].decode().strip()
        named = [(declared_in(d), d) for d in given]
        return [(tree.text(n), spec, _shape(d)) for n, d in named if n is not None]
    return [(name, "", []) for name in declared_names(tree, node)]


def declared_names(tree: Tree, node: Node) -> set[str]:
    """The names that a node itself declares, functions and types included."""
    found = {tree.text(n) for n in _declares(node) if n is not None}
    if node.type == "declaration":
        for part in node.named_children:
            found |= declared_names(tree, part) if part.type in _STRUCTS else set()
    if node.type in (*_STRUCTS, "enum_specifier", "enumerator"):
        name = node.child_by_field_name("name")
        found |= {tree.text(name)} if name is not None else set()
    if node.type == "function_definition":
        found |= {name for name, n in function_definitions(tree) if n == node}
    return found


def _shape(declarator: Node | None) -> list[str]:
    """What a declarator makes of its type, outermost last: ``*``, ``*const``, ``&``, ``[]``…"""
    found: list[str] = []
    node = declarator
    while node is not None and node.type not in ("identifier", "type_identifier"):
        kind = node.type.removeprefix("abstract_")
        if kind == "pointer_declarator":
            const = any(c.text == b"const" for c in node.children)
            found.append("*const" if const else "*")
        elif kind == "reference_declarator":
            found.append("&&" if any(c.type == "&&" for c in node.children) else "&")
        elif kind == "array_declarator":
            found.append("[]")
        elif kind == "function_declarator":
            found.append("function")
        node = _inner(node)
    return found


def _parameters(definition: Node) -> list[tuple[list[str], bool]]:
    """The shapes of a function's parameters, and whether each is const."""
    declarator: Node | None = definition
    while declarator is not None and declarator.type != "function_declarator":
        declarator = declarator.child_by_field_name("declarator")
    listed = declarator.child_by_field_name("parameters") if declarator is not None else None
    return [
        (_shape(q.child_by_field_name("declarator")), any(c.text == b"const" for c in q.children))
        for q in (listed.named_children if listed is not None else [])
    ]
