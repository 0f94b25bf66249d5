"""What is known of a body's variables: which are uniform, which are written, what they point to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tree_sitter import Node

from ..dialect import LINEAR_TYPES
from ..syntax import call_arguments, declarators, field, kinds, part, unbracketed
from .assignments import assigned, names_in, passed_by_name, referred
from .body import Body, Scopes, Variable, Variables
from .declarations import declared_within
from .plan import Plan
from .statements import LOOPS, branch_statements, branches, changed, expression, initial_value
from .uniform import POSITION_TEXTS, Uniformity, Value


def analyse(body: Body, plan: Plan) -> Variables:
    """The variables of a body and its parameters, by their keys.

    A body is visited until no visit tells more: what is uniform depends on what is written, which
    may stand behind it in a loop.

    Args:
        plan: the jumps that some lanes make before others.
    """
    outputs = body.prepared.kernel.output_names
    variables: Variables = {
        q.name: Variable(
            q.name,
            q.name,
            number=0 if q.scalar else 10_000 + i,
            readonly=q.name not in outputs,
            pointer=not q.scalar,
        )
        for i, q in enumerate(body.parameters)
    }
    _settle(body, plan, variables)
    if body.whole:
        # What depends on a variable that is written is not uniform either.
        for variable in list(variables.values()):
            if variable.written:
                variables[variable.key] = replace(variable, uniform=False)
        _settle(body, plan, variables)
        return variables
    constants = [v for v in variables.values() if "constexpr" in v.type.split()]
    return variables | {v.key: replace(v, uniform=True) for v in constants}


def _settle(body: Body, plan: Plan, variables: Variables) -> None:
    before: Variables | None = None
    while before != variables:
        before = dict(variables)
        _Visit(body, plan, variables).block(body.tree.block.named_children, 0)


class _Visit:
    """One visit of all statements; what it learns is in `variables`."""

    def __init__(self, body: Body, plan: Plan, variables: Variables) -> None:
        self.body, self.tree, self.plan = body, body.tree, plan
        self.variables = variables
        self.scopes = Scopes(body, variables)
        self.uniformity = Uniformity(self.scopes)
        self.divergent = 0
        # Operators of the author's own may change their operands.
        self.operators = "operator" in body.prepared.text.words
        self.constants = {q.name for q in body.parameters if q.scalar}

    def _learn(self, variable: Variable, **facts: Any) -> Variable:
        known = replace(self.variables[variable.key], **facts)
        self.variables[variable.key] = known
        return known

    # -- statements ------------------------------------------------------------------------------

    def block(self, statements: Iterable[Node], context: int) -> None:
        """Visit statements in a scope of their own.

        Args:
            context: how deep in divergent control flow they are.
        """
        with self.scopes.inner():
            for statement in statements:
                self._statement(statement, context)

    def _statement(self, statement: Node, context: int) -> None:
        kind = statement.type
        if kind == "declaration":
            self._declaration(statement, context)
        elif kind == "expression_statement":
            self._expression(expression(statement), context)
        elif kind not in ("compound_statement", "if_statement", *LOOPS) or (
            not self.uniformity.splits(statement)
        ):
            self._opaque(statement)
        elif kind == "compound_statement":
            self.block(statement.named_children, context)
        elif kind == "if_statement":
            self._if(statement, context)
        else:
            self._loop(statement, context)

    def _if(self, statement: Node, context: int) -> None:
        condition = part(statement, "condition")
        self._side_effects(condition)
        inner = context if self.uniformity.of(condition) else self._deeper()
        for branch in branches(statement):
            self.block(branch_statements(branch), inner)

    def _deeper(self) -> int:
        self.divergent += 1
        return self.divergent

    def _loop(self, statement: Node, context: int) -> None:
        if self.uniformity.stride(statement) is not None:
            self._stride(statement, context)
            return
        start, condition = field(statement, "initializer"), field(statement, "condition")
        with self.scopes.inner():
            declared: list[Variable] = []
            if start is not None and start.type == "declaration":
                # Declared here: changes in the head keep it uniform while the loop itself is.
                declared = self._declaration(start, context)
            else:
                self._expression(expression(start), context)
            if condition is not None:
                self._side_effects(condition)
            uniform = self.uniformity.of(condition)
            inner = context if uniform else self._deeper()
            leaving = {("break", statement.start_byte), ("continue", statement.start_byte)}
            if uniform and leaving & self.plan:
                # Lanes leave at different times: what was declared outside may differ afterwards.
                inner = self._deeper()
                for variable in declared:
                    self._learn(variable, context=inner)
            self._expression(field(statement, "update"), inner)
            self.block(branch_statements(part(statement, "body")), inner)

    def _stride(self, statement: Node, context: int) -> None:
        """A loop that lanes go through in step (`strides`): only its head changes its variable."""
        with self.scopes.inner():
            (variable,) = self._declaration(part(statement, "initializer"), context)
            self._learn(variable, uniform=False, linear=True, value="")
            self.block(branch_statements(part(statement, "body")), self._deeper())

    def _declaration(self, statement: Node, context: int) -> list[Variable]:
        return [self._declarator(statement, d, context) for d in declarators(statement)]

    def _declarator(self, statement: Node, declarator: Node, context: int) -> Variable:
        if declarator.start_byte not in self.variables:
            variable = self.body.variable(statement, declarator)
            number = 1 + sum(isinstance(key, int) for key in self.variables)
            self.variables[variable.key] = replace(variable, number=number)
        variable = self._learn(self.scopes.enter(statement, declarator), context=context)
        value = initial_value(declarator)
        if variable.kind == "lambda":
            if value is not None:
                self._opaque(value)
            return self._learn(variable, uniform=False)
        if value is not None:
            self._side_effects(value)
        if variable.kind == "reference" and value is not None:
            for name in referred(self.tree, value):
                self._written(name)  # through the reference, later
        variable = self.variables[variable.key]
        known = self.uniformity.at_once(value)
        uniform, readonly = variable.kind == "shared", False
        if variable.kind in ("value", "array"):
            fixed = variable.kind == "value" or (value is not None and variable.is_const)
            uniform = variable.uniform and fixed and known.uniform
            readonly = variable.readonly and (value is None or self.uniformity.readonly(value))
        variable = self._learn(variable, uniform=uniform, readonly=readonly)
        points = variable.kind == "value" and "auto" in variable.type.split() and known.pointer
        return self._learn(
            variable, linear=self._is_linear(variable, known), pointer=variable.pointer or points
        )

    def _is_linear(self, variable: Variable, value: Value) -> bool:
        words = set(variable.type.split()) - {"const", "thread"}
        if words == {"auto"} and variable.value in POSITION_TEXTS:
            words = {"uint"}
        if variable.kind != "value" or not words or not words <= LINEAR_TYPES:
            return False
        changes = variable.written or self.body.escapes(variable)
        whole = value.linear and value.integral
        return whole and not (variable.pointer or variable.uniform or changes)

    def _expression(self, node: Node | None, context: int) -> None:
        if node is None:
            return
        target, value = changed(node), field(node, "right")
        if target is None or target.type != "identifier":
            self._opaque(node)
            return
        if value is not None:
            self._side_effects(value)
        variable = self.scopes.lookup(self.tree.text(target))
        if variable is None:
            return
        variable = self._learn(variable, written=True)
        if variable.context != context or not self.uniformity.at_once(value).uniform:
            variable = self._learn(variable, uniform=False)
        if value is not None and not self.uniformity.readonly(value):
            self._learn(variable, readonly=False)

    # -- what may change -------------------------------------------------------------------------

    def _opaque(self, node: Node) -> None:
        """Whatever a statement inside a loop over lanes may write is not uniform."""
        self._changes(node, declared_within(self.tree, node))

    def _side_effects(self, value: Node) -> None:
        self._changes(value, set())
        around = value.parent.parent if value.parent is not None else None
        constructs = self.tree.text(field(around, "type")) in self.body.functions
        if constructs and value.type in ("argument_list", "initializer_list"):
            for name in names_in(self.tree, value):
                self._written(name)

    def _changes(self, node: Node, inner: set[str]) -> None:
        """Note what a node changes; `inner` are the names that it declares itself."""
        # A local name that is called is a lambda, or an object with an operator ().
        callables = self.body.functions | self.scopes.names()
        for name, through in assigned(self.tree, node):
            self._written(name, inner, through)
        for name, through in passed_by_name(self.tree, node, callables):
            self._written(name, inner, through)
        if not self.operators:
            return
        # Where the author defines operators, an operand may be changed by one.
        for n in kinds(node, "binary_expression", "unary_expression", "subscript_expression"):
            for operand in map(self._operand, n.named_children):
                if operand.type == "identifier":
                    self._written(self.tree.text(operand), inner, through=True)

    def _operand(self, node: Node) -> Node:
        """What stands in brackets, or in what `source.arithmetic` writes around it."""
        node = unbracketed(node)
        while node.type == "call_expression" and self.tree.text(node).startswith("::fr::"):
            inner = call_arguments(node)
            if len(inner) != 1:
                break
            node = unbracketed(inner[0])
        return node

    def _written(self, name: str, inner: Iterable[str] = (), through: bool = False) -> None:
        variable = self.scopes.lookup(name)
        if variable is None or (through and variable.pointer):
            return
        if variable.key in self.constants:
            return  # a reference to a constant
        self._learn(variable, written=True)
        if name not in inner or variable.kind == "value":
            self._learn(variable, uniform=False)
