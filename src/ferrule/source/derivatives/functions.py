"""Functions and lambdas in place of their calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from ..accesses.functions import Parameter, parameters_of, template_parameters
from ..accesses.values import Function
from ..syntax import call_arguments, field, part
from .expressions import Expressions
from .jumps import RETURNS, Refuse, leaves, straightened
from .names import Meaning, Pointer, PointerVariable
from .nodes import (
    INT,
    LONG,
    Block,
    Declare,
    Expression,
    If,
    Jump,
    Literal,
    Loop,
    Name,
    Type,
)
from .types import type_named

_DEEPEST = 24


class Functions(Expressions):
    """Reads calls of the author's own functions.

    Attributes:
        functions: the header's, by name.
    """

    functions: dict[str, list[Function]]
    _depth = 0

    def function_named(self, name: str) -> list[Function]:
        """The author's functions of a name."""
        name = name.rsplit("::", 1)[-1]
        meaning = self.look_up(name)
        return [meaning] if isinstance(meaning, Function) else self.functions.get(name, [])

    def block(self, statements: Sequence[Node]) -> Block:
        """Statements in a scope of their own."""
        raise NotImplementedError

    def inlined(self, node: Node, functions: list[Function], name: str) -> Expression | None:
        """What a function gives, whose statements are put in place of its call."""
        arguments = call_arguments(node)
        fitting = [f for f in functions if len(parameters_of(f)) == len(arguments)]
        if len(fitting) > 1:
            fitting = self._best(fitting, arguments)
        if len(fitting) != 1:
            why = "of which there are several" if fitting else "with this number of arguments"
            raise self.refuse(node, f"{name}, {why},", "give functions names of their own.")
        function = fitting[0]
        if self._depth >= _DEEPEST:
            raise self.refuse(node, f"{name}, which calls itself,", "use a loop.")
        scope = self._bound(node, function, arguments, name)
        outer = self.tree, self.where, self.scopes, self.line_of_call
        line = self.line(node)
        first = [self.scopes[0]] if function.scopes is None else list(function.scopes)
        self.tree, self.where, self.scopes = function.tree, function.where, [*first, scope]
        self.line_of_call, self._depth = line, self._depth + 1
        try:
            body = self.block(part(function.node, "body").named_children)
            kind = self._returned(function)
        finally:
            self.tree, self.where, self.scopes, self.line_of_call = outer
            self._depth -= 1
        result = self._without_returns(node, body, kind, line)
        if result is None or isinstance(result, Literal) or not _shares(function):
            return result
        # A later call may change what it names.
        variable = Name(self.fresh("fr_result"), result.type)
        self.made.append(Declare(line, variable, result, constant=True, deduced=True))
        return variable

    def _best(self, functions: list[Function], arguments: Sequence[Node]) -> list[Function]:
        """Those whose parameters have most of the arguments' types."""
        types: list[Type | None] = []
        with self.collected():
            for argument in arguments:
                points = self._may_point(argument) and self.pointer(argument) is not None
                types.append(None if points else self.expression(argument).type)
        counts = []
        for f in functions:
            listed = (type_named(p.type, self.types) for p in parameters_of(f))
            counts.append(sum(a == b for a, b in zip(listed, types, strict=True)))
        return [f for f, n in zip(functions, counts, strict=True) if n == max(counts)]

    def _bound(
        self, node: Node, function: Function, arguments: Sequence[Node], name: str
    ) -> dict[str, Meaning]:
        """What the names of a function's parameters mean in a call."""
        scope: dict[str, Meaning] = {}
        explicit = re.findall(r"[^<>,]+", name.partition("<")[2])
        templates = template_parameters(function)
        for (named, is_type), given in zip(templates.items(), explicit, strict=False):
            given_type, given_value = type_named(given, self.types), self.look_up(given.strip())
            if is_type and given_type is not None:
                scope[named] = given_type
            elif given.strip().isdigit():
                scope[named] = Name(given.strip(), INT)
            elif given_value is not None:
                scope[named] = given_value
        for parameter, argument in zip(parameters_of(function), arguments, strict=True):
            if not parameter.name:
                continue
            pointer = self.pointer(argument) if self._may_point(argument) else None
            if pointer is not None:
                scope[parameter.name] = self._pointer_parameter(node, parameter, pointer)
                continue
            value = self.expression(argument)
            if parameter.reference and not parameter.is_const:
                if not isinstance(value, Name):
                    raise self.refuse(argument, "what is passed by reference", "pass a variable.")
                scope[parameter.name] = value
                continue
            kind = type_named(parameter.type, {**self.types, **_types(scope)})
            deduced = kind is None  # of a template parameter
            kind = kind or value.type
            of_template = templates.keys() & {*re.findall(r"\w+", parameter.type)}
            for named_type in of_template if deduced else ():
                scope.setdefault(named_type, kind)
            variable = Name(self.fresh(parameter.name), kind)
            value = self.cast(value, kind)
            self.made.append(Declare(self.line(node), variable, value, deduced=deduced))
            scope[parameter.name] = variable
        return scope

    def _may_point(self, argument: Node) -> bool:
        return argument.type in (
            "identifier", "binary_expression", "parenthesized_expression", "pointer_expression",
            "cast_expression",
        )  # fmt: skip

    def _pointer_parameter(self, node: Node, parameter: Parameter, pointer: Pointer) -> Meaning:
        if pointer.offset is None and not parameter.pointer:
            return pointer.array
        offset = Name(self.fresh(f"{parameter.name}_at"), LONG)
        first = pointer.position
        self.made.append(Declare(self.line(node), offset, first))
        return PointerVariable(pointer.array, offset)

    def _returned(self, function: Function) -> Type | None:
        """The type that a function says it gives; None of none, or where it says ``auto``."""
        node = field(function.node, "type")
        text = "" if node is None else function.tree.text(node)
        return None if text in ("", "void", "auto") else type_named(text, self.types)

    # -- what it returns ---------------------------------------------------------------------------

    def _without_returns(
        self, node: Node, body: Block, kind: Type | None, line: int
    ) -> Expression | None:
        """Put a function's statements here; a variable for what it returns, unless it does that at
        its end alone."""
        last = body[-1] if body else None
        if isinstance(last, Jump) and last.kind == "return" and not leaves(body[:-1]):
            self.made += body[:-1]
            if last.value is None or kind is None or last.value.type == kind:
                return last.value
            return self.cast(last.value, kind)
        returned = _returned_values(body)
        if not returned:
            self.made += straightened(body, RETURNS, self._refuse_at(node))
            return None
        result = Name(self.fresh("fr_result"), kind or returned[0].type)
        self.made.append(Declare(line, result, None))
        self.made += straightened(body, RETURNS, self._refuse_at(node), result)
        return result

    def _refuse_at(self, node: Node) -> Refuse:
        return lambda _, construct, instead: self.refuse(node, construct, instead)


def _returned_values(body: Block) -> list[Expression]:
    found: list[Expression] = []
    for s in body:
        if isinstance(s, Jump) and s.kind == "return" and s.value is not None:
            found.append(s.value)
        elif isinstance(s, If):
            found += _returned_values(s.yes) + _returned_values(s.no)
        elif isinstance(s, Loop):
            found += _returned_values(s.body)
    return found


def _shares(function: Function) -> bool:
    """Whether a function may change variables of its caller."""
    return function.scopes is not None or any(p.reference for p in parameters_of(function))


def _types(scope: dict[str, Meaning]) -> dict[str, Type]:
    return {name: m for name, m in scope.items() if isinstance(m, Type)}
