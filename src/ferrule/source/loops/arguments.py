"""A call of a function of the header: what it passes, and what stands for each parameter."""

from __future__ import annotations

import re

from tree_sitter import Node

from ...kernel import ATTRIBUTES
from ..cpp import NotSplittable, parameters
from ..dialect import SYNC
from ..syntax import Tree, call_arguments, callee, walk
from .assignments import names_in
from .declarations import declarations
from .functions import HeaderFunction, HeaderParameter, Name, one_line
from .header import Functions

STEPS = ("subscript_expression", "field_expression", "pointer_expression")
_ACTS = ("call_expression", "update_expression", "assignment_expression", "lambda_expression")


class HeaderCall:
    """A call of a function of the header, and the body that it stands in.

    Attributes:
        node: the call.
        declared: how the body declares each of its names.
        lambdas: the body's lambdas, by their names.
        result: the variable that holds what the function returns.
    """

    def __init__(self, functions: Functions, tree: Tree, call: Node, number: int) -> None:
        self.functions = functions
        self.p = functions.p
        self.tree = tree
        self.node = call
        self.name = callee(tree, call)
        self.declared = declarations(tree)
        if self.name in self.declared:
            raise NotSplittable(f"{self.name} is a function and a variable")
        self.lambdas = {
            tree.text(name): node
            for node in walk(tree.block)
            if node.type == "lambda_expression" and node.parent is not None
            if node.parent.type == "init_declarator"
            for name in node.parent.children_by_field_name("declarator")
        }
        self.arguments = call_arguments(call)
        self.function: HeaderFunction = functions.find(self.name, len(self.arguments))
        self.result = f"fr_h{number}"

    def text(self, start: int, end: int) -> str:
        """The body's text between two bytes, on one line."""
        return one_line(self.tree.data[start:end].decode())

    def is_memory(self, node: Node) -> bool:
        """Whether an expression reads what other threads, or writes through pointers, change."""
        root = root_of(node)
        if root is None:
            return True
        name = self.tree.text(root)
        for spec, shape in self.declared.get(name, []):
            shared = {"thread_local", "auto"} & set(spec.split())
            if shared or {"*", "*const", "&"} & set(shape):
                return True
        return name not in self.declared and name in self.p.kernel.output_names


class Arguments:
    """What stands for the parameters and template parameters of a function in a call.

    Attributes:
        effects: the function writes to memory, or waits for others.
        changes: the variables of the body that it may change.
    """

    def __init__(self, call: HeaderCall) -> None:
        self.call = call
        self.function, self.tree = call.function, call.tree
        self.name, self.result = call.name, call.result
        self.before: list[str] = []  # declarations that stand before the function's statements
        self.effects = call.functions.effects(self.function)
        self.changes: set[str] = set()

    def bind(self) -> str:
        """Give every parameter of the function its meaning for this call; the declarations.

        Raises:
            NotSplittable: that would change what the call means.
        """
        self._templates()
        self._bind()
        return "".join(self.before)

    def _templates(self) -> None:
        """Bind template arguments that are written, or have a default and cannot be deduced."""
        function = self.call.node.child_by_field_name("function")
        while function is not None and function.type == "qualified_identifier":
            function = function.child_by_field_name("name")
        listed = function.child_by_field_name("arguments") if function is not None else None
        nodes = listed.named_children if listed is not None else []
        written = [self.call.text(n.start_byte, n.end_byte) for n in nodes]
        if len(written) > len(self.function.templates):
            raise NotSplittable(f"{self.name} is given too many template arguments")
        for name, text in zip(self.function.templates, written, strict=False):
            self._template(name, text)
        for name in self.function.templates[len(written) :]:
            deduced = any(q.of is name for q in self.function.parameters)
            if name.default is not None and name.used and not deduced:
                self._template(name, self.function.render(name.default))

    def _template(self, name: Name, text: str) -> None:
        kind = self.function.between(*name.type) if name.type is not None else None
        values = dict(self.call.p.spec.template)
        if kind is None and text.isidentifier():
            name.text = text
            return
        # A kernel's template values are of type int or bool.
        if kind is not None and (
            (kind == "int" and (text.isdecimal() or type(values.get(text)) is int))
            or (kind == "bool" and (text in ("true", "false") or type(values.get(text)) is bool))
        ):
            name.text = text
            return
        name.text = f"{self.result}_{name.name}"
        if kind is None:
            self.before.append(f"using {name.text} = {text}; ")
        else:
            self.before.append(f"constexpr {kind} {name.text} = ({text}); ")

    def _bind(self) -> None:
        """Give every parameter of the function its meaning for this call."""
        arguments: list[Node | None] = [*self.call.arguments]
        arguments += [None] * (len(self.function.parameters) - len(arguments))
        pairs = list(zip(self.function.parameters, arguments, strict=True))
        self._note_changes([(q, a) for q, a in pairs if a is not None])
        for parameter, argument in pairs:
            if parameter.kind == "reference":
                self._refer(parameter, argument)
            elif not self._stands_for_itself(parameter, argument):
                if parameter.kind == "constant":
                    self._refuse_changes(parameter, argument)
                self._declare(parameter, argument)

    def _note_changes(self, pairs: list[tuple[HeaderParameter, Node]]) -> None:
        """Note which variables of the body the function may change."""
        for argument in (a for parameter, a in pairs if parameter.kind == "reference"):
            root = root_of(argument)
            self.changes |= (
                {self.tree.text(root)} if root is not None else names_in(self.tree, argument)
            )
            self.effects |= argument.type in STEPS and self.call.is_memory(argument)
        for argument in (a for parameter, a in pairs if parameter.kind in ("value", "constant")):
            value = self.call.lambdas.get(self.tree.text(argument), argument)
            if value.type == "lambda_expression":
                self.changes |= names_in(self.tree, value)
        if not self.effects:
            return
        self.changes |= _addressed(self.tree, self.tree.block)
        for argument in (a for parameter, a in pairs if parameter.kind == "pointer"):
            for name in names_in(self.tree, argument):
                if any("[]" in shape for _, shape in self.call.declared.get(name, [])):
                    self.changes.add(name)

    def _argument(self, parameter: HeaderParameter, argument: Node | None) -> str:
        if argument is not None:
            return self.call.text(argument.start_byte, argument.end_byte)
        if parameter.default is None:
            raise NotSplittable(f"{self.name} is called with too few arguments")
        return self.function.render(parameter.default)

    def _unknown(self, name: Name) -> NotSplittable:
        return NotSplittable(f"{self.name} is called without its {name.name}")

    def _deduce(self, parameter: HeaderParameter, operand: str, argument: Node) -> None:
        """Deduce a type parameter from what an argument refers or points to."""
        of = parameter.of
        if of is None or of.text:
            return
        if of.used < 2:
            of.text = "auto"
            return
        synchronising = SYNC | self.call.functions.names
        calls = [n for n in walk(argument) if n.type == "call_expression"]
        if any(callee(self.tree, n) in synchronising for n in calls):
            raise self._unknown(of)
        of.text = f"{self.result}_{of.name}"
        without = "remove_cvref_t" if parameter.is_const else "remove_reference_t"
        self.before.append(f"using {of.text} = ::fr::metal::{without}<decltype({operand})>; ")

    def _declare(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Declare a parameter as a variable of its own."""
        text, formal, of = self._argument(parameter, argument), parameter.name, parameter.of
        name = formal.text if formal is not None else f"{self.result}_{parameter.number}"
        if parameter.kind == "pointer" and argument is not None:
            self._deduce(parameter, f"*({text})", argument)
        if of is None or of.text:
            self.before.append(f"{self.function.declaration(parameter, name)} = {text}; ")
            return
        if argument is None or argument.type == "initializer_list":
            raise self._unknown(of)
        self.before.append(f"{'const ' if parameter.is_const else ''}auto {name} = {text}; ")
        of.text = "auto"
        if of.used > 1:
            of.text = f"{self.result}_{of.name}"
            kind = f"::fr::metal::remove_cvref_t<decltype({name})>"
            self.before.append(f"using {of.text} = {kind}; ")

    def _stands_for_itself(self, parameter: HeaderParameter, argument: Node | None) -> bool:
        """Put an argument that does not change meanwhile in place of a parameter."""
        formal, root = parameter.name, root_of(argument) if argument is not None else None
        if formal is None or argument is None or root is None or formal.captured:
            return False
        name, text = self.tree.text(root), self._argument(parameter, argument)
        declared, plain = self.call.declared.get(name, []), argument.type == "identifier"
        if parameter.kind == "value" and plain and name in self.call.lambdas:
            self._deduce(parameter, name, argument)
            formal.text = name
            return True
        moved, altered = self.function.moved, self.function.altered
        if parameter.kind == "value":
            kind = self.function.value_type(parameter)
            own = declared[0][0] if len(declared) == 1 and not declared[0][1] else ""
            own = own if declared else ATTRIBUTES.get(name, "")
            same = plain and kind == re.sub(r"const", "", own).strip()
            passed = {p.name for p in parameters(self.call.p.spec)}  # of types not seen here
            if not same or name in self.changes | passed or formal.name in altered:
                return False
            formal.text = text
            return True
        if parameter.kind != "pointer" or not formal.only_indexed or formal.name in moved:
            return False
        arrays = bool(declared) and all(set(shape) == {"[]"} for _, shape in declared)
        constants = {name} | {n for n, _ in self.call.p.spec.template}
        if plain:
            if not arrays and name in self.changes:
                return False
        elif not arrays or names_in(self.tree, argument) - constants:
            return False
        self._deduce(parameter, f"*({text})", argument)
        formal.text = text if plain else f"({text})"
        return True

    def _refer(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Put what a reference refers to in its place."""
        if argument is None or root_of(argument) is None:
            raise NotSplittable(f"{self.name} is given a reference to what is no plain variable")
        text = self._argument(parameter, argument)
        if argument.type != "identifier":
            root = root_of(argument)
            indices = [n for n in walk(argument) if n.type == "identifier" and n != root]
            others = set[str]()
            for other, a in zip(self.function.parameters, self.call.arguments, strict=False):
                if other.kind == "reference" and a != argument:
                    others |= names_in(self.tree, a) if a.type == "identifier" else set()
            moving = {self.tree.text(n) for n in indices} & self.changes
            if moving or names_in(self.tree, argument) & others:
                raise NotSplittable(f"{self.name} may change which variable it is given")
            if parameter.name is not None and parameter.name.captured:
                raise NotSplittable(f"a lambda of {self.name} captures a reference")
            text = f"({text})"
        self._deduce(parameter, f"({text})", argument)
        if parameter.name is not None:
            parameter.name.text = text

    def _refuse_changes(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Refuse to copy what a reference to a constant refers to where it may change."""
        root = root_of(argument) if argument is not None else None
        if parameter.name is not None and parameter.name.name in self.function.moved:
            raise NotSplittable(f"{self.name} asks for the address of what it is given")
        if root is None or argument is None:
            return
        name = self.tree.text(root)
        in_memory = self.effects and argument.type in STEPS and self.call.is_memory(argument)
        if in_memory or name in self.changes:
            raise NotSplittable(f"{name} may change while {self.name} refers to it")


def root_of(node: Node) -> Node | None:
    """The variable of a path like ``a[i].x``, ``*p`` or ``(v)``; None where it is no such path.

    The indices of a path call nothing and read no memory, so that it always means one place.
    """
    while node.type != "identifier":
        if node.type == "parenthesized_expression" and len(node.named_children) == 1:
            node = node.named_children[0]
            continue
        inner = node.child_by_field_name("argument") if node.type in STEPS else None
        if inner is None or node.children[0].type == "&":
            return None
        for child in node.named_children:
            if child != inner and any(_unsteady(n) for n in walk(child)):
                return None
        node = inner
    return node


def _unsteady(node: Node) -> bool:
    reads = node.type in STEPS and not any(c.type == "." for c in node.children)
    return reads or node.type in _ACTS


def _addressed(tree: Tree, block: Node) -> set[str]:
    """The variables of a body that something may point or refer to."""
    names: set[str] = set()
    for node in walk(block):
        place: Node | None = None
        if node.type == "pointer_expression" and node.children[0].type == "&":
            place = node.child_by_field_name("argument")
        elif node.type == "reference_declarator" and node.parent is not None:
            place = node.parent.child_by_field_name("value")
        if place is not None:
            root = root_of(place)
            nodes = [root] if root is not None else walk(place)
            names |= {tree.text(n) for n in nodes if n.type == "identifier"}
    return names
