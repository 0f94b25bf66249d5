"""A body as the splitter sees it: its variables, and which of them are uniform."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tree_sitter import Node

from ...kernel import ATTRIBUTES
from ..cpp import NotSplittable, Prepared, parameters
from ..dialect import INTEGERS, LINEAR_TYPES, MATRIX_OPS, SYNC
from ..syntax import (
    Tree,
    call_arguments,
    callee,
    declarator_shape,
    declarators,
    declared_name,
    function_definitions,
    struct_names,
    walk,
)
from .assignments import assigned, names_in, passed_by_name, referred
from .statements import (
    LOOPS,
    branch_statements,
    branches,
    expression,
    initial_value,
    inner_declarator,
    jumps_out,
)
from .uniform import POSITION_TEXTS, KernelFacts, Uniformity, Unit, Variable

WORD = re.compile(r"[A-Za-z_]\w*")
# Calls that end a loop over lanes. Matrices are loaded and stored by each lane for itself.
SPLIT_CALLS = (SYNC - MATRIX_OPS) | {"simdgroup_multiply", "simdgroup_multiply_accumulate"}
_OWN_SCOPE = ("lambda_expression", "function_definition", "struct_specifier")


class AnalysedBody:
    """A body with its variables.

    Args:
        prepared: the kernel.
        text: the body's text, rewritten.
        unit: the threads that run together.
    """

    def __init__(self, prepared: Prepared, text: str, unit: Unit) -> None:
        self.p = prepared
        self.unit = unit
        self.tree = Tree(text, body=True)
        if self.tree.has_error:
            raise NotSplittable("the body has syntax that the splitter does not read")
        # Calls of these may change what they are given: functions, and constructors.
        self.functions = frozenset(
            [name for name, _ in function_definitions(prepared.header)]
            + [name for tree in (prepared.header, self.tree) for name in struct_names(tree)]
        )
        # Operators of the author's own may change their operands.
        self.operators = "operator" in prepared.text.words
        self.params = parameters(prepared.spec)
        self.constants = frozenset(q.name for q in self.params if q.scalar)
        words = set(WORD.findall(text))
        self.attributes = [a for a in ATTRIBUTES if a in words]
        self.masked_loops: set[int] = set()  # loops that some lanes leave before others
        self.continued_loops: set[int] = set()  # loops of which some lanes skip a rest
        self.variables: dict[int, Variable] = {}  # by the start of their declarator
        self.by_param: dict[str, Variable] = {}
        self.scopes: list[dict[str, Variable]] = []
        self.divergent = 0
        self.analysed = False  # all variables are known
        outputs = frozenset(prepared.kernel.output_names)
        self.facts = KernelFacts(unit, outputs, self.functions, self._integers())
        self.uniformity = Uniformity(self.tree, self.facts, self._lookup)
        self.escaping = self._escaping()

    def _escaping(self) -> set[str]:
        """Names that something else may point or refer to, so that they must stay in memory.

        An array that is named without an index may have become a pointer.
        """
        names: set[str] = set()
        for node in walk(self.tree.block):
            if node.type == "pointer_expression" and node.children[0].type == "&":
                target = node.child_by_field_name("argument")
                names |= referred(self.tree, target or node)
            elif node.type == "reference_declarator" and node.parent is not None:
                value = node.parent.child_by_field_name("value")
                if value is not None:
                    names |= referred(self.tree, value)
            elif node.type == "identifier" and node.parent is not None:
                parent = node.parent
                indexed = parent.type == "subscript_expression" and (
                    parent.child_by_field_name("argument") == node
                )
                declared = parent.child_by_field_name("declarator") == node
                if not indexed and not declared:
                    names.add("[]" + self.tree.text(node))
        return names

    def _escapes(self, variable: Variable) -> bool:
        """Whether something else may point or refer to a variable."""
        return variable.name in self.escaping or (
            variable.kind == "array" and "[]" + variable.name in self.escaping
        )

    def _calls(self, node: Node) -> bool:
        """Whether a synchronising call stands in the node."""
        return any(
            n.type == "call_expression" and callee(self.tree, n) in SPLIT_CALLS for n in walk(node)
        )

    def _names(self, text: str) -> set[str]:
        """The words of a text, with those that its lambdas bring along."""
        words = set(WORD.findall(text))
        todo = list(words)
        while todo:
            name = todo.pop()
            variable = self._lookup(name)
            if variable is None or variable.kind != "lambda":
                continue
            added = set(WORD.findall(variable.lambda_text)) - words
            words |= added
            todo += added
        return words

    def _lookup(self, name: str) -> Variable | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    # -- analysis: what is uniform ---------------------------------------------------------------

    def _integers(self) -> frozenset[str]:
        """Arguments and template parameters that are integers, or point to integers."""
        spec = self.p.spec
        names = {q.name for q in self.params if q.name.endswith(("_shape", "_strides", "_ndim"))}
        names |= {
            name
            for name, argument in zip(self.p.kernel.input_names, spec.inputs, strict=True)
            if argument.dtype.metal.removesuffix("_t") in INTEGERS
            or argument.dtype.metal in INTEGERS
        }
        names |= {name for name, v in spec.template if type(v) is int}
        return frozenset(names)

    def _analyse(self) -> None:
        self.by_param = {}
        for parameter in self.params:
            name, readonly = parameter.name, parameter.name not in self.facts.outputs
            self.by_param[name] = Variable(name, 0, readonly=readonly, pointer=not parameter.scalar)
        self.variables = {}
        self.analysed = False
        self._visit_until_settled([])
        self.analysed = True
        self.scopes = [dict(self.by_param)]

    def _visit_until_settled(self, differing: Iterable[Variable]) -> None:
        """Visit the body until no visit tells more; `differing` are not uniform in any case."""
        while True:
            before = self._state()
            for variable in differing:
                variable.uniform = False
            self.scopes = [dict(self.by_param)]
            self.divergent = 0
            self._visit_block(self.tree.block.named_children, 0)
            if self._state() == before:
                return

    def _state(self) -> list[tuple[bool, bool, bool, bool, bool]]:
        return [
            (v.uniform, v.readonly, v.written, v.pointer, v.linear)
            for v in (*self.by_param.values(), *self.variables.values())
        ]

    def _visit_block(self, statements: Iterable[Node], context: int) -> None:
        self.scopes.append({})
        for statement in statements:
            self._visit(statement, context)
        self.scopes.pop()

    def _visit(self, statement: Node, context: int) -> None:
        kind = statement.type
        if kind == "declaration":
            self._visit_declaration(statement, context)
        elif kind == "expression_statement":
            self._visit_expression(expression(statement), context)
        elif self._splits(statement) and kind == "compound_statement":
            self._visit_block(statement.named_children, context)
        elif self._splits(statement) and kind == "if_statement":
            self._visit_if(statement, context)
        elif self._splits(statement) and kind in LOOPS:
            self._visit_loop(statement, context)
        else:
            self._opaque_writes(statement)

    def _opaque_writes(self, node: Node) -> None:
        """Whatever a statement inside a loop over lanes may write is not uniform."""
        inner = {
            self.tree.text(n)
            for d in walk(node)
            if d.type in ("init_declarator", "array_declarator", "declaration")
            for n in [declared_name(d)]
            if n is not None
        }
        self._changes(node, inner)

    def _changes(self, node: Node, inner: set[str]) -> None:
        """Note what a node changes; `inner` are the names that it declares itself."""
        for name, through in assigned(self.tree, node):
            self._written(name, inner, through)
        for name, through in passed_by_name(self.tree, node, self._callables()):
            self._written(name, inner, through)
        self._operands(node, inner)

    def _callables(self) -> frozenset[str]:
        # A local name that is called is a lambda, or an object with an operator ().
        return self.functions | {name for scope in self.scopes for name in scope}

    def _operands(self, node: Node, inner: set[str]) -> None:
        """Where the author defines operators, an operand may be changed by one."""
        if not self.operators:
            return
        for part in walk(node):
            if part.type in ("binary_expression", "unary_expression", "subscript_expression"):
                for child in part.named_children:
                    operand = self._operand(child)
                    if operand.type == "identifier":
                        self._written(self.tree.text(operand), inner, through=True)

    def _operand(self, node: Node) -> Node:
        """What stands in brackets, or in what `source.arithmetic` writes around it."""
        while True:
            inner = node.named_children
            if node.type == "call_expression" and self.tree.text(node).startswith("::fr::"):
                inner = call_arguments(node)
            elif node.type != "parenthesized_expression":
                return node
            if len(inner) != 1:
                return node
            node = inner[0]

    def _written(self, name: str, inner: set[str], through: bool) -> None:
        variable = self._lookup(name)
        if name in self.constants and variable is self.by_param.get(name):
            return  # a reference to a constant
        if variable is not None and not (through and variable.pointer):
            variable.written = True
            if name not in inner or variable.kind == "value":
                variable.uniform = False

    def _variable(self, key: int, declared: Variable) -> Variable:
        variable = self.variables.get(key)
        if variable is None:
            if self.analysed:
                raise NotSplittable(f"{declared.name} is declared where the analysis did not look")
            variable = self.variables[key] = declared
            declared.number = len(self.variables)
        variable.context = declared.context
        self.scopes[-1][variable.name] = variable
        return variable

    def _visit_declaration(self, statement: Node, context: int) -> None:
        for declarator in declarators(statement):
            variable = self._declared(statement, declarator, context)
            value = initial_value(declarator)
            if variable.kind == "lambda":
                variable.uniform = False
                if value is not None:
                    self._opaque_writes(value)
                continue
            if value is not None and value.type != "lambda_expression":
                self._side_effects(value)
            if variable.kind == "reference" and value is not None:
                for name in referred(self.tree, value):
                    self._written(name, set(), through=False)  # through the reference, later
            if variable.kind in ("reference", "shared"):
                variable.uniform = variable.kind == "shared"
                variable.readonly = False
            elif (
                variable.kind == "array" and (value is None or not variable.is_const)
            ) or not self.uniformity.of(value):
                variable.uniform = False
            variable.linear = self._is_linear(variable, value)
            if not self.uniformity.readonly(value):
                variable.readonly = False
            if variable.kind == "value" and "auto" in variable.type.split():
                variable.pointer |= self.uniformity.pointer(value)

    def _is_linear(self, variable: Variable, value: Node | None) -> bool:
        words = set(variable.type.split()) - {"const", "thread"}
        if words == {"auto"} and variable.value in POSITION_TEXTS:
            words = {"uint"}
        return (
            variable.kind == "value"
            and not variable.pointer
            and not variable.uniform
            and not variable.written
            and not self._escapes(variable)
            and bool(words)
            and words <= LINEAR_TYPES
            and self.uniformity.whole(value)
        )

    def _side_effects(self, value: Node) -> None:
        self._changes(value, set())
        if value.type in ("argument_list", "initializer_list") and value.parent is not None:
            declaration = value.parent.parent
            type_node = declaration.child_by_field_name("type") if declaration else None
            if type_node is not None and self.tree.text(type_node) in self.functions:
                for name in names_in(self.tree, value):
                    self._written(name, set(), through=False)

    def _declared(self, statement: Node, declarator: Node, context: int) -> Variable:
        """The variable of a declarator, known from an earlier pass or new."""
        spec, declarator_text, name_node = self._parts(statement, declarator)
        value = initial_value(declarator)
        shape = declarator_shape(declarator)
        if value is not None and value.type == "lambda_expression":
            kind = "lambda"
        elif "reference_declarator" in shape:
            kind = "reference"
        elif "thread_local" in spec.split() and "pointer_declarator" not in shape:
            kind = "shared"
        elif "array_declarator" in shape:
            kind = "array"
        else:
            kind = "value"
        unknown = {"function_declarator", "parenthesized_declarator"}
        if unknown & set(shape) or "[]" in declarator_text.replace(" ", ""):
            raise NotSplittable(f"the declarator {declarator_text!r} is not understood")
        words = spec.split()
        variable = self._variable(
            declarator.start_byte,
            Variable(
                self.tree.text(name_node),
                context,
                kind=kind,
                type=spec,
                value=self.tree.text(value) if value is not None else "",
                pointer=(kind == "value" and "pointer_declarator" in shape)
                or (kind == "shared" and "array_declarator" in shape),
                is_const="constexpr" in words
                or ("const" in words and "pointer_declarator" not in shape),
            ),
        )
        if kind == "lambda":
            variable.lambda_text = self.tree.text(statement)
            variable.lambda_line = self._line(statement)
        return variable

    def _visit_expression(self, node: Node | None, context: int) -> None:
        if node is None:
            return
        target: Node | None = None
        value: Node | None = None
        if node.type == "assignment_expression":
            target, value = node.child_by_field_name("left"), node.child_by_field_name("right")
        elif node.type == "update_expression":
            target = node.child_by_field_name("argument")
        if target is None or target.type != "identifier":
            self._opaque_writes(node)
            return
        if value is not None:
            self._side_effects(value)
        variable = self._lookup(self.tree.text(target))
        if variable is None:
            return
        variable.written = True
        if variable.context != context or not self.uniformity.of(value):
            variable.uniform = False
        if not self.uniformity.readonly(value):
            variable.readonly = False

    def _visit_if(self, statement: Node, context: int) -> None:
        condition = statement.child_by_field_name("condition")
        if condition is not None:
            self._side_effects(condition)
        inner = context if self._uniform_if(statement) else self._deeper()
        for branch in branches(statement):
            if branch is not None:
                self._visit_block(branch_statements(branch), inner)

    def _deeper(self) -> int:
        self.divergent += 1
        return self.divergent

    def _uniform_if(self, statement: Node) -> bool:
        return self.uniformity.of(statement.child_by_field_name("condition"))

    def _visit_loop(self, statement: Node, context: int) -> None:
        self.scopes.append({})
        start = statement.child_by_field_name("initializer")
        condition = statement.child_by_field_name("condition")
        update = statement.child_by_field_name("update")
        if start is not None and start.type == "declaration":
            # Declared here: changes in the head keep it uniform while the loop itself is.
            self._visit_declaration(start, context)
        else:
            self._visit_expression(expression(start), context)
        if condition is not None:
            self._side_effects(condition)
        uniform = self.uniformity.of(condition)
        inner = context if uniform else self._deeper()
        if statement.start_byte in self.masked_loops | self.continued_loops and uniform:
            # Lanes leave at different times: what was declared outside may differ afterwards.
            inner = self._deeper()
            for variable in self.scopes[-1].values():
                variable.context = inner if variable.context == context else variable.context
        self._visit_expression(update, inner)
        body = statement.child_by_field_name("body")
        if body is not None:
            self._visit_block(branch_statements(body), inner)
        self.scopes.pop()

    # -- what stands where -----------------------------------------------------------------------

    def _splits(self, statement: Node) -> bool:
        """Whether a statement cannot be part of one loop over lanes."""
        if self._calls(statement):
            return True
        if self.unit.row is not None and self._decides(statement):
            return True
        # A uniform jump is better made once for all lanes than once for each.
        if statement.type == "compound_statement":
            return any(self._splits(c) for c in statement.named_children)
        if statement.type == "if_statement" and jumps_out(statement):
            return self._uniform_if(statement)
        return statement.type in ("return_statement", "break_statement", "continue_statement")

    def _decides(self, statement: Node) -> bool:
        """Whether an `if` in a statement is decided once for all lanes of a row."""
        if statement.type == "if_statement":
            if self._uniform_if(statement):
                return True
            return any(b is not None and self._decides(b) for b in branches(statement))
        if statement.type in ("compound_statement", "else_clause"):
            return any(self._decides(c) for c in statement.named_children)
        if statement.type in LOOPS:
            body = statement.child_by_field_name("body")
            return (
                body is not None
                and self.uniformity.of(statement.child_by_field_name("condition"))
                and not jumps_out(statement)
                and self._decides(body)
            )
        return False

    def _parts(self, statement: Node, declarator: Node) -> tuple[str, str, Node]:
        """A declaration's specifiers, one declarator without its initialiser, and its name."""
        first = declarators(statement)[0]
        spec = self.tree.data[statement.start_byte : first.start_byte].decode().strip()
        inner = inner_declarator(declarator)
        name = declared_name(declarator)
        if inner is None or name is None:
            raise NotSplittable(f"the declaration {self.tree.text(statement)!r} is not understood")
        return spec, self.tree.text(inner), name

    def _line(self, node: Node) -> int:
        return node.start_point[0] + 1
