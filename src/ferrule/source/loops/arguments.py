"""What a call passes to a function of the header: what stands for each of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from tree_sitter import Node

from ...kernel import ATTRIBUTES
from ..cpp import NotSplittable, parameters
from ..dialect import SYNC
from ..syntax import Tree, called, field, kinds
from .assignments import aliased, names_in
from .call import STEPS, HeaderCall, root_of
from .functions import Bound, HeaderParameter, Name


class Passed(NamedTuple):
    """What stands for the parameters and template parameters of a function in a call.

    Attributes:
        bound: the function, with a text for each of its names.
        before: declarations that stand before its statements.
        effects: it writes to memory, or waits for others.
        changes: the variables of the body that it may change.
    """

    bound: Bound
    before: str
    effects: bool
    changes: set[str]


def passed(call: HeaderCall) -> Passed:
    """What a call passes: every parameter of the function gets its meaning.

    Raises:
        NotSplittable: that would change what the call means.
    """
    pairs = list(zip(call.function.parameters, call.arguments, strict=False))
    effects, changes = call.effects, set(_changes(call, pairs))
    effects |= any(
        q.kind == "reference" and a.type in STEPS and call.is_memory(a) for q, a in pairs
    )
    if effects:
        changes |= _reached(call, pairs)
    binding = _Binding(call, effects, changes)
    binding.templates()
    for parameter, argument in zip_longest(call.function.parameters, call.arguments):
        binding.bind(parameter, argument)
    return Passed(binding.bound, "".join(binding.before), effects, changes)


def _changes(call: HeaderCall, pairs: list[tuple[HeaderParameter, Node]]) -> Iterator[str]:
    """The variables of the body that a function is given references to, itself or by lambdas."""
    for parameter, argument in pairs:
        if parameter.kind == "reference":
            yield from _rooted(call.tree, argument)
        elif parameter.kind != "pointer":
            value = call.lambdas.get(call.tree.text(argument), argument)
            if value.type == "lambda_expression":
                yield from names_in(call.tree, value)


def _reached(call: HeaderCall, pairs: list[tuple[HeaderParameter, Node]]) -> set[str]:
    """The variables of the body that something may point or refer to, which may change then."""
    names: set[str] = set()
    for place in aliased(call.tree.block):
        names |= _rooted(call.tree, place)
    for parameter, argument in pairs:
        if parameter.kind == "pointer":
            named = names_in(call.tree, argument)
            names |= {n for n in named if any("[]" in s for _, s in call.declared.get(n, []))}
    return names


def _rooted(tree: Tree, place: Node) -> set[str]:
    """The variable of a path; all that it names where it is none."""
    root = root_of(place)
    return {tree.text(root)} if root is not None else names_in(tree, place)


class _Binding:
    """Gives the names of a function their texts for one call."""

    def __init__(self, call: HeaderCall, effects: bool, changes: set[str]) -> None:
        self.call, self.tree, self.name = call, call.tree, call.name
        self.function, self.effects, self.changes = call.function, effects, changes
        self.bound = call.function.bound(f"{call.result}_")
        self.texts = self.bound.texts
        self.before: list[str] = []

    def templates(self) -> None:
        """Bind template arguments that are written, or have a default and cannot be deduced."""
        function = field(self.call.node, "function")
        while function is not None and function.type == "qualified_identifier":
            function = field(function, "name")
        listed = field(function, "arguments")
        nodes = listed.named_children if listed is not None else []
        if len(nodes) > len(self.function.templates):
            raise NotSplittable(f"{self.name} is given too many template arguments")
        for node, name in zip(nodes, self.function.templates, strict=False):
            self._template(name, self.call.text(node.start_byte, node.end_byte))
        for name in self.function.templates[len(nodes) :]:
            deduced = any(q.of is name for q in self.function.parameters)
            if name.default is not None and self.function.uses[name] and not deduced:
                self._template(name, self.bound.render(name.default))

    def _template(self, name: Name, text: str) -> None:
        kind = self.bound.between(*name.type) if name.type is not None else ""
        if not kind:
            plain = text.isidentifier()
        else:  # a kernel's template values are of type int or bool
            types = {n: type(v).__name__ for n, v in self.call.p.spec.template}
            number = "int" if text.isdecimal() else "bool" if text in ("true", "false") else ""
            plain = kind in ("int", "bool") and kind in (number, types.get(text))
        self.texts[name] = text
        if not plain and not kind:
            self._alias(name, text)
        elif not plain:
            self.texts[name] = f"{self.call.result}_{name.text}"
            self.before.append(f"constexpr {kind} {self.texts[name]} = ({text}); ")

    def _alias(self, name: Name, kind: str) -> None:
        """Declare a type that stands for a template parameter."""
        self.texts[name] = f"{self.call.result}_{name.text}"
        self.before.append(f"using {self.texts[name]} = {kind}; ")

    def bind(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Give a parameter its meaning."""
        if parameter.kind == "reference":
            self._refer(parameter, argument)
        elif argument is None or not self._stands_for_itself(parameter, argument):
            if parameter.kind == "constant":
                self._refuse_changes(parameter, argument)
            self._declare(parameter, argument)

    def _text(self, parameter: HeaderParameter, argument: Node | None) -> str:
        if argument is not None:
            return self.call.text(argument.start_byte, argument.end_byte)
        if parameter.default is None:
            raise NotSplittable(f"{self.name} is called with too few arguments")
        return self.bound.render(parameter.default)

    def _unknown(self, name: Name) -> NotSplittable:
        return NotSplittable(f"{self.name} is called without its {name.text}")

    def _deduce(self, parameter: HeaderParameter, operand: str, argument: Node) -> None:
        """Deduce a type parameter from what an argument refers or points to."""
        of = parameter.of
        if of is None or of in self.texts:
            return
        if len(self.function.uses[of]) < 2:
            self.texts[of] = "auto"
            return
        if called(self.tree, argument) & (SYNC | self.call.functions.names):
            raise self._unknown(of)
        without = "remove_cvref_t" if parameter.is_const else "remove_reference_t"
        self._alias(of, f"::fr::metal::{without}<decltype({operand})>")

    def _declare(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Declare a parameter as a variable of its own."""
        text, of = self._text(parameter, argument), parameter.of
        name = f"{self.call.result}_{parameter.number}"
        if parameter.name is not None:
            name = self.texts[parameter.name]
        if parameter.kind == "pointer" and argument is not None:
            self._deduce(parameter, f"*({text})", argument)
        if of is None or of in self.texts:
            self.before.append(f"{self.bound.declaration(parameter, name)} = {text}; ")
            return
        if argument is None or argument.type == "initializer_list":
            raise self._unknown(of)
        self.before.append(f"{'const ' if parameter.is_const else ''}auto {name} = {text}; ")
        self.texts[of] = "auto"
        if len(self.function.uses[of]) > 1:
            self._alias(of, f"::fr::metal::remove_cvref_t<decltype({name})>")

    def _stands_for_itself(self, parameter: HeaderParameter, argument: Node) -> bool:
        """Put an argument that does not change meanwhile in place of a parameter."""
        formal, root = parameter.name, root_of(argument)
        if formal is None or root is None or self.function.captured(formal):
            return False
        name, text, plain = self.tree.text(root), self._text(parameter, argument), root == argument
        declared = self.call.declared.get(name, [])
        if parameter.kind == "value" and plain and name in self.call.lambdas:
            self._deduce(parameter, name, argument)
            self.texts[formal] = name
            return True
        if parameter.kind == "value":
            kind = self.bound.value_type(parameter)
            own = declared[0][0] if len(declared) == 1 and not declared[0][1] else ""
            own = own if declared else ATTRIBUTES.get(name, "")
            same = plain and kind == own
            inputs = {p.name for p in parameters(self.call.p.spec)}  # of types not seen here
            if not same or name in self.changes | inputs or formal.text in self.function.altered:
                return False
            self.texts[formal] = text
            return True
        if parameter.kind != "pointer" or formal.text in self.function.moved:
            return False
        if not self.function.only_indexed(formal):
            return False
        arrays = bool(declared) and all(set(shape) == {"[]"} for _, shape in declared)
        constants = {name} | {n for n, _ in self.call.p.spec.template}
        if not arrays and (not plain or name in self.changes):
            return False
        if not plain and names_in(self.tree, argument) - constants:
            return False
        self._deduce(parameter, f"*({text})", argument)
        self.texts[formal] = text if plain else f"({text})"
        return True

    def _refer(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Put what a reference refers to in its place."""
        root = root_of(argument)
        if argument is None or root is None:
            raise NotSplittable(f"{self.name} is given a reference to what is no plain variable")
        text = self._text(parameter, argument)
        if root != argument:
            indices = [n for n in kinds(argument, "identifier") if n != root]
            others = {
                self.tree.text(a)
                for q, a in zip(self.function.parameters, self.call.arguments, strict=False)
                if q.kind == "reference" and a != argument and a.type == "identifier"
            }
            moving = {self.tree.text(n) for n in indices} & self.changes
            if moving or names_in(self.tree, argument) & others:
                raise NotSplittable(f"{self.name} may change which variable it is given")
            if parameter.name is not None and self.function.captured(parameter.name):
                raise NotSplittable(f"a lambda of {self.name} captures a reference")
            text = f"({text})"
        self._deduce(parameter, f"({text})", argument)
        if parameter.name is not None:
            self.texts[parameter.name] = text

    def _refuse_changes(self, parameter: HeaderParameter, argument: Node | None) -> None:
        """Refuse to copy what a reference to a constant refers to where it may change."""
        root = root_of(argument)
        if parameter.name is not None and parameter.name.text in self.function.moved:
            raise NotSplittable(f"{self.name} asks for the address of what it is given")
        if root is None or argument is None:
            return
        name = self.tree.text(root)
        in_memory = self.effects and argument.type in STEPS and self.call.is_memory(argument)
        if in_memory or name in self.changes:
            raise NotSplittable(f"{name} may change while {self.name} refers to it")
