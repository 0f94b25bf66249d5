"""Statements: declarations, branches and jumps."""

from __future__ import annotations

from collections.abc import Sequence

from tree_sitter import Node

from .. import words
from ..loops.statements import branch_statements, initial_value, inner_declarator
from ..syntax import call_arguments, declarator_shape, declarators, declared_name, field, part
from . import terms
from .calls import Calls
from .kinds import Type, type_of
from .machine import Jump, Snapshot, whole
from .model import Array
from .terms import Term
from .values import (
    UNSET,
    Address,
    Function,
    Named,
    Opaque,
    Place,
    Pointer,
    Reference,
    Row,
    Scalar,
    Value,
    Vector,
    as_condition,
    as_number,
    converted,
    fresh,
    fresh_like,
)

_NOTHING = words(
    "comment using_declaration static_assert_declaration struct_specifier class_specifier "
    "union_specifier preproc_call preproc_include preproc_def preproc_function_def ; "
    "template_declaration namespace_alias_definition function_definition enum_specifier"
)


class Statements(Calls):
    """A machine that runs statements."""

    def run(self, node: Node) -> list[Jump]:
        """Run a statement; where control may leave it."""
        if node.type in _NOTHING:
            return []
        run = getattr(self, f"_run_{node.type}", None)
        if run is None:
            self.refuse(node, f"a {node.type.replace('_', ' ')} is not followed")
            return []
        jumps: list[Jump] = run(node)
        return jumps

    def run_all(self, statements: Sequence[Node]) -> list[Jump]:
        """Run statements in a scope of their own; the path is as it was before."""
        path, branches = self.path, self.branches
        with self.scope():
            jumps = self._run_rest(list(statements))
        self.path, self.branches = path, branches
        return jumps

    def _run_rest(self, statements: list[Node]) -> list[Jump]:
        jumps: list[Jump] = []
        for i, statement in enumerate(statements):
            before = self.path
            new = self.run(statement)
            self.path = before
            jumps += new
            if not new:
                continue
            gone = [terms.and_(*jump.path[len(before) :]) for jump in new]
            stays = terms.and_(*map(terms.not_, gone))
            if stays is terms.FALSE:
                self.path = (*self.path, terms.FALSE)
                return jumps
            # Those that have left the kernel are waited for by nobody, and have no variables.
            ended = self.depth == 0 and all(jump.kind == "return" for jump in new)
            if ended:
                self.assume(stays, branch=False)
                continue
            left = self.snapshot()
            self.assume(stays)
            jumps += self._run_rest(statements[i + 1 :])
            self.merge(stays, self.snapshot(), left)
            return jumps
        return jumps

    def _of_lambda_expression(self, node: Node) -> Value:
        # What is declared behind it in the same scope has other names.
        scopes = tuple(map(dict, self.scopes))
        return _captured(self, Function(self.tree, node, self.where, scopes))

    # -- simple statements -------------------------------------------------------------------------

    def _run_compound_statement(self, node: Node) -> list[Jump]:
        return self.run_all(node.named_children)

    def _run_expression_statement(self, node: Node) -> list[Jump]:
        for child in node.named_children:
            if child.type != "comment":
                self.evaluate(child)
        return []

    def _run_attributed_statement(self, node: Node) -> list[Jump]:
        return self.run(node.named_children[-1])

    def _run_return_statement(self, node: Node) -> list[Jump]:
        values = [child for child in node.named_children if child.type != "comment"]
        value = self.evaluate(values[0]) if values else None
        return [Jump("return", self.path, value)]

    def _run_break_statement(self, node: Node) -> list[Jump]:
        return [Jump("break", self.path)]

    def _run_continue_statement(self, node: Node) -> list[Jump]:
        return [Jump("continue", self.path)]

    def _run_if_statement(self, node: Node) -> list[Jump]:
        clause = part(node, "condition")
        with self.scope():
            start = field(clause, "initializer")
            if start is not None:
                self.run(start)
            value = field(clause, "value") or clause
            if value.type == "declaration":
                self.refuse(node, "a declaration in a condition is not followed")
                return []
            c = as_condition(self.evaluate(value))
            return self._run_branches(node, c)

    def _run_branches(self, node: Node, c: Term) -> list[Jump]:
        before = self.snapshot()
        self.assume(c)
        jumps: list[Jump] = []
        dead = terms.FALSE in self.path
        if not dead:
            jumps += self.run_all(branch_statements(field(node, "consequence")))
        one, ends = self.snapshot(), _always(jumps, self.path)
        self.restore(before)
        self.assume(terms.not_(c))
        others: list[Jump] = []
        dead_too = terms.FALSE in self.path
        if not dead_too:
            others += self.run_all(branch_statements(field(node, "alternative")))
        other, end_too = self.snapshot(), _always(others, self.path)
        self.path, self.branches = before.path, before.branches
        if dead or ends:
            self._go_on(other, one, before, jumps)
        elif dead_too or end_too:
            self._go_on(one, other, before, others)
        else:
            self.merge(c, one, other)
        return jumps + others

    def _go_on(
        self, stays: Snapshot, ends: Snapshot, before: Snapshot, jumps: Sequence[Jump]
    ) -> None:
        """Go on with one of two branches. Who has left a function or a round in the other comes
        back behind that, with what it has changed."""
        self.cells, self.times = dict(stays.cells), stays.times
        back = self.depth > 0 or any(jump.kind != "return" for jump in jumps)
        for cell, value in ends.cells.items() if back else ():
            if cell in before.cells and value != before.cells[cell] and cell in self.cells:
                self.cells[cell] = fresh_like(self.cells[cell], "what left before has changed")

    # -- declarations ------------------------------------------------------------------------------

    def _run_alias_declaration(self, node: Node) -> list[Jump]:
        name, target = self.tree.text(field(node, "name")), self.tree.text(field(node, "type"))
        self.scopes[-1][name] = type_of(target, self.types)
        return []

    def _run_type_definition(self, node: Node) -> list[Jump]:
        target = type_of(self.tree.text(field(node, "type")), self.types)
        for declarator in declarators(node):
            plain = declarator.type == "type_identifier"
            self.scopes[-1][self.tree.text(declarator)] = target if plain else Type("?")
        return []

    def _run_declaration(self, node: Node) -> list[Jump]:
        listed = declarators(node)
        if not listed:
            return []
        specifiers = self.tree.data[node.start_byte : listed[0].start_byte].decode()
        for declarator in listed:
            name = declared_name(declarator)
            shape = declarator_shape(declarator)
            if name is None or "function_declarator" in shape:
                self.refuse(node, f"the declaration {self.tree.text(node)!r} is not followed")
                continue
            self._declare(node, declarator, self.tree.text(name), shape, specifiers)
        return []

    def _declare(
        self, node: Node, declarator: Node, name: str, shape: list[str], specifiers: str
    ) -> None:
        value_node, scope = initial_value(declarator), self.scopes[-1]
        declared_type = type_of(specifiers, self.types)
        shared = "thread_local" in specifiers.split()
        if "reference_declarator" in shape:
            scope[name] = self._referred(node, value_node)
        elif "array_declarator" in shape:
            self._declare_array(declarator, name, declared_type, shared, value_node)
        elif shared and "pointer_declarator" not in shape:
            array = Array(name, "threadgroup", declared_type.size, terms.const(1), node.start_byte)
            scope[name] = Reference(whole(array, declared_type))
        else:
            auto = "auto" in specifiers.split()
            pointer = "pointer_declarator" in shape
            value = self._initial(value_node, declared_type, auto=auto, pointer=pointer)
            scope[name] = value if isinstance(value, Function) else Place(self.new_cell(value))

    def _initial(self, node: Node | None, type_: Type, *, auto: bool, pointer: bool) -> Value:
        """What a variable holds at first."""
        if node is None:
            return Opaque(Type("*")) if pointer else _uninitialised(type_)
        if node.type in ("initializer_list", "argument_list"):
            inner = [c for c in node.named_children if c.type != "comment"]
            if node.type == "argument_list" and node.parent is not None:
                inner = call_arguments(node.parent) or inner
            if len(inner) > 1 and type_.kind is not None and type_.lanes == len(inner):
                values = [converted(self.evaluate(i), type_._replace(lanes=1)) for i in inner]
                parts = tuple(as_number(v) for v in values if isinstance(v, Scalar))
                return Vector(parts, type_.kind) if len(parts) == len(inner) else Opaque(type_)
            if len(inner) != 1 or (type_.kind is None and node.type == "initializer_list"):
                self.evaluate(node) if node.type == "initializer_list" else None
                if len(inner) > 1 and node.type == "argument_list":
                    for each in inner:
                        if isinstance(self.evaluate(each), (Pointer, Address, Function)):
                            self.refuse(each, "a pointer in a struct is not followed")
                zero = type_.kind is not None and not inner
                return converted(Scalar(terms.const(0), type_.kind), type_) if (
                    zero and type_.kind
                ) else _uninitialised(type_)  # fmt: skip
            node = inner[0]
        value = self.evaluate(node)
        if auto or isinstance(value, (Pointer, Function, Address)):
            return value
        if pointer:
            return Opaque(Type("*"))
        return converted(value, type_)

    def _referred(self, node: Node, value_node: Node | None) -> Named:
        place = self.place(value_node) if value_node is not None else None
        if isinstance(place, Place) and place.component is None:
            return place
        if isinstance(place, Place) and "const" in self.tree.text(node).split():
            return Place(self.new_cell(self.load_place(place)))
        if isinstance(place, (Pointer, Row)):
            return Reference(place) if isinstance(place, Pointer) else place.pointer
        self.refuse(node, "what a reference refers to is not followed")
        return Opaque()

    def _declare_array(
        self, declarator: Node, name: str, type_: Type, shared: bool, value: Node | None
    ) -> None:
        dims: list[Term] = []
        inner: Node | None = inner_declarator(declarator)
        while inner is not None and inner.type == "array_declarator":
            size = field(inner, "size")
            if size is not None:
                number = self.evaluate(size)
                if isinstance(number, Scalar):
                    dims.insert(0, as_number(number))
                else:
                    self.refuse(inner, f"the size of {name} is not known")
                    dims.insert(0, terms.unknown("a size", None))
                    return
            elif value is not None and value.type == "initializer_list":
                many = sum(c.type != "comment" for c in value.named_children)
                dims.insert(0, terms.const(many))
            inner = field(inner, "declarator")
        if value is not None:
            self.evaluate(value)
        length = terms.const(1)
        for dim in dims:
            length = terms.mul(length, dim)
        space = "threadgroup" if shared else "private" if self.scopes[1:] else "constant"
        if inner is None or inner.type != "identifier":
            self.refuse(declarator, f"the declarator of {name} is not followed")
            return
        array = Array(name, space, type_.size, length, declarator.start_byte, len(dims) > 1)
        self.scopes[-1][name] = whole(array, type_, tuple(dims[1:]))


def _uninitialised(type_: Type) -> Value:
    return fresh(type_, UNSET)


def _always(jumps: list[Jump], path: tuple[Term, ...]) -> bool:
    """Whether control leaves at the end of this path in any case."""
    gone = [terms.and_(*jump.path[len(path) :]) for jump in jumps]
    return terms.or_(*gone) is terms.TRUE


def _captured(m: Statements, function: Function) -> Function:
    """A lambda, with copies of the variables, where it captures by value."""
    captures = next((c for c in function.node.children if c.type == "lambda_capture_specifier"),
                    None)  # fmt: skip
    text = m.tree.text(captures).strip("[] \n")
    if text in ("", "&"):
        return function
    if text != "=":
        m.refuse(function.node, f"the capture [{text}] is not followed")
        return function
    copies = {
        name: Place(m.new_cell(m.cells[named.cell]))
        for scope in m.scopes
        for name, named in scope.items()
        if isinstance(named, Place) and named.cell in m.cells
    }
    return function._replace(scopes=(*m.scopes, copies))
