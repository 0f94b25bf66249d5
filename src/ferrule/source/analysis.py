"""A body as the splitter sees it: its variables, and which of them are uniform."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tree_sitter import Node

from ..kernel import ATTRIBUTES
from .cpp import NotSplittable, Prepared, parameters
from .dialect import MATRIX_OPS, SYNC
from .syntax import (
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
from .uniform import (
    INTEGERS,
    LINEAR_TYPES,
    POSITION_TEXTS,
    Facts,
    Uniformity,
    Unit,
    Variable,
    assigned,
    names_in,
    passed_by_name,
    referred,
)

WORD = re.compile(r"[A-Za-z_]\w*")
LOOPS = ("for_statement", "while_statement", "do_statement")
# Calls that end a loop over lanes. Matrices are loaded and stored by each lane for itself.
SPLIT_CALLS = (SYNC - MATRIX_OPS) | {"simdgroup_multiply", "simdgroup_multiply_accumulate"}
_OWN_SCOPE = ("lambda_expression", "function_definition", "struct_specifier")


class Body:
    """A body with its variables.

    Args:
        prepared: the kernel.
        text: the body's text, rewritten.
        unit: the threads that are carried out together.
    """

    def __init__(self, prepared: Prepared, text: str, unit: Unit) -> None:
        self.p = prepared
        self.unit = unit
        self.tree = Tree(text, body=True)
        if self.tree.has_error:
            raise NotSplittable("the body has syntax that the splitter does not read")
        header = Tree(prepared.text.header, body=False)
        # Calls of these may change what they are given: functions, and constructors.
        self.functions = frozenset(
            [name for name, _ in function_definitions(header)]
            + [name for tree in (header, self.tree) for name in struct_names(tree)]
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
        self.facts = Facts(unit, outputs, self.functions, self._integers())
        self.uniformity = Uniformity(self.tree, self.facts, self._lookup)
        self.escaping = self._escaping()

    def _escaping(self) -> set[str]:
        """Names that something else may point or refer to, so that they must stay in memory.

        An array that is named without an index may have become a pointer.
        """
        found: set[str] = set()
        for node in walk(self.tree.block):
            if node.type == "pointer_expression" and node.children[0].type == "&":
                target = node.child_by_field_name("argument")
                found |= referred(self.tree, target or node)
            elif node.type == "reference_declarator" and node.parent is not None:
                value = node.parent.child_by_field_name("value")
                if value is not None:
                    found |= referred(self.tree, value)
            elif node.type == "identifier" and node.parent is not None:
                parent = node.parent
                indexed = parent.type == "subscript_expression" and (
                    parent.child_by_field_name("argument") == node
                )
                declared = parent.child_by_field_name("declarator") == node
                if not indexed and not declared:
                    found.add("[]" + self.tree.text(node))
        return found

    def _escapes(self, v: Variable) -> bool:
        """Whether something else may point or refer to a variable."""
        return v.name in self.escaping or (v.kind == "array" and "[]" + v.name in self.escaping)

    def _calls(self, node: Node) -> bool:
        """Whether a synchronising call stands in the node."""
        return any(
            n.type == "call_expression" and callee(self.tree, n) in SPLIT_CALLS for n in walk(node)
        )

    def _names(self, text: str) -> set[str]:
        """The words of a text, with those that its lambdas bring along."""
        found = set(WORD.findall(text))
        todo = list(found)
        while todo:
            name = todo.pop()
            variable = self._lookup(name)
            if variable is None or variable.kind != "lambda":
                continue
            new = set(WORD.findall(variable.lambda_text)) - found
            found |= new
            todo += new
        return found

    def _lookup(self, name: str) -> Variable | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    # -- analysis: what is uniform ---------------------------------------------------------------

    def _integers(self) -> frozenset[str]:
        """Arguments and template parameters that are integers, or point to integers."""
        spec = self.p.spec
        found = {q.name for q in self.params if q.name.endswith(("_shape", "_strides", "_ndim"))}
        found |= {
            name
            for name, given in zip(self.p.kernel.input_names, spec.inputs, strict=True)
            if given.dtype.metal.removesuffix("_t") in INTEGERS or given.dtype.metal in INTEGERS
        }
        found |= {name for name, v in spec.template if type(v) is int}
        return frozenset(found)

    def _analyse(self) -> None:
        self.by_param = {}
        for q in self.params:
            self.by_param[q.name] = Variable(
                q.name, 0, readonly=q.name not in self.facts.outputs, pointer=not q.scalar
            )
        self.variables = {}
        self.analysed = False
        self.scopes = [dict(self.by_param)]
        while True:
            before = self._state()
            self.scopes = [dict(self.by_param)]
            self.divergent = 0
            self._visit_block(self.tree.block.named_children, 0)
            if self._state() == before:
                break
        self.analysed = True
        self.scopes = [dict(self.by_param)]

    def _state(self) -> list[tuple[bool, bool, bool, bool, bool]]:
        return [
            (v.uniform, v.readonly, v.written, v.pointer, v.linear)
            for v in (*self.by_param.values(), *self.variables.values())
        ]

    def _visit_block(self, statements: Iterable[Node], context: int) -> None:
        self.scopes.append({})
        for s in statements:
            self._visit(s, context)
        self.scopes.pop()

    def _visit(self, s: Node, context: int) -> None:
        kind = s.type
        if kind == "declaration":
            self._visit_declaration(s, context)
        elif kind == "expression_statement":
            self._visit_expression(s.named_children[0] if s.named_children else None, context)
        elif self._splits(s) and kind == "compound_statement":
            self._visit_block(s.named_children, context)
        elif self._splits(s) and kind == "if_statement":
            self._visit_if(s, context)
        elif self._splits(s) and kind in LOOPS:
            self._visit_loop(s, context)
        else:
            self._opaque_writes(s)

    def _opaque_writes(self, node: Node) -> None:
        """Whatever a statement inside a loop over lanes may write is not uniform."""
        inner = {
            self.tree.text(n)
            for d in walk(node)
            if d.type in ("init_declarator", "array_declarator", "declaration")
            for n in [declared_name(d)]
            if n is not None
        }
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

    def _variable(self, key: int, made: Variable) -> Variable:
        known = self.variables.get(key)
        if known is None:
            if self.analysed:
                raise NotSplittable(f"{made.name} is declared where the analysis did not look")
            known = self.variables[key] = made
            made.number = len(self.variables)
        known.context = made.context
        self.scopes[-1][known.name] = known
        return known

    def _visit_declaration(self, s: Node, context: int) -> None:
        for d in declarators(s):
            variable = self._declared(s, d, context)
            value = d.child_by_field_name("value") if d.type == "init_declarator" else None
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

    def _is_linear(self, v: Variable, value: Node | None) -> bool:
        words = set(v.type.split()) - {"const", "thread"}
        if words == {"auto"} and v.value in POSITION_TEXTS:
            words = {"uint"}
        return (
            v.kind == "value"
            and not v.pointer
            and not v.uniform
            and not v.written
            and not self._escapes(v)
            and bool(words)
            and words <= LINEAR_TYPES
            and self.uniformity.whole(value)
        )

    def _side_effects(self, value: Node) -> None:
        for name, through in assigned(self.tree, value):
            self._written(name, set(), through)
        for name, through in passed_by_name(self.tree, value, self._callables()):
            self._written(name, set(), through)
        self._operands(value, set())
        if value.type in ("argument_list", "initializer_list") and value.parent is not None:
            made = value.parent.parent.child_by_field_name("type") if value.parent.parent else None
            if made is not None and self.tree.text(made) in self.functions:
                for name in names_in(self.tree, value):
                    self._written(name, set(), through=False)

    def _declared(self, s: Node, d: Node, context: int) -> Variable:
        """The variable of a declarator, known from an earlier pass or new."""
        spec, declarator, _ = self._parts(s, d)
        name_node = declared_name(d)
        if name_node is None:
            raise NotSplittable(f"the declaration {self.tree.text(s)!r} is not understood")
        value = d.child_by_field_name("value") if d.type == "init_declarator" else None
        shape = declarator_shape(d)
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
        if unknown & set(shape) or "[]" in declarator.replace(" ", ""):
            raise NotSplittable(f"the declarator {declarator!r} is not understood")
        words = spec.split()
        variable = self._variable(
            d.start_byte,
            Variable(
                self.tree.text(name_node), context, kind=kind, type=spec,
                value=self.tree.text(value) if value is not None else "",
                pointer=(kind == "value" and "pointer_declarator" in shape)
                or (kind == "shared" and "array_declarator" in shape),
                is_const="constexpr" in words
                or ("const" in words and "pointer_declarator" not in shape),
            ),
        )  # fmt: skip
        if kind == "lambda":
            variable.lambda_text = self.tree.text(s)
            variable.lambda_line = self._line(s)
        return variable

    def _visit_expression(self, e: Node | None, context: int) -> None:
        if e is None:
            return
        target: Node | None = None
        value: Node | None = None
        if e.type == "assignment_expression":
            target, value = e.child_by_field_name("left"), e.child_by_field_name("right")
        elif e.type == "update_expression":
            target = e.child_by_field_name("argument")
        if target is None or target.type != "identifier":
            self._opaque_writes(e)
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

    def _visit_if(self, s: Node, context: int) -> None:
        condition = s.child_by_field_name("condition")
        if condition is not None:
            self._side_effects(condition)
        inner = context if self._uniform_if(s) else self._deeper()
        for part in ("consequence", "alternative"):
            branch = s.child_by_field_name(part)
            if branch is not None:
                self._visit_block(branch_statements(branch), inner)

    def _deeper(self) -> int:
        self.divergent += 1
        return self.divergent

    def _uniform_if(self, s: Node) -> bool:
        return self.uniformity.of(s.child_by_field_name("condition"))

    def _visit_loop(self, s: Node, context: int) -> None:
        self.scopes.append({})
        start = s.child_by_field_name("initializer")
        condition = s.child_by_field_name("condition")
        update = s.child_by_field_name("update")
        outer = context
        if start is not None and start.type == "declaration":
            # Declared here: changes in the head keep it uniform while the loop itself is.
            self._visit_declaration(start, context)
        elif start is not None:
            self._visit_expression(expression(start), context)
        for part in (condition,):
            if part is not None:
                self._side_effects(part)
        uniform = self.uniformity.of(condition)
        inner = context if uniform else self._deeper()
        if s.start_byte in self.masked_loops | self.continued_loops and uniform:
            # Lanes leave at different times: what was declared outside may differ afterwards.
            inner = self._deeper()
            for variable in self.scopes[-1].values():
                variable.context = inner if variable.context == outer else variable.context
        if update is not None:
            self._visit_expression(update, inner)
        body = s.child_by_field_name("body")
        if body is not None:
            self._visit_block(branch_statements(body), inner)
        self.scopes.pop()

    # -- what stands where -----------------------------------------------------------------------

    def _splits(self, s: Node) -> bool:
        """Whether a statement cannot be part of one loop over lanes."""
        if self._calls(s):
            return True
        if self.unit.row is not None and self._decides(s):
            return True
        # A uniform jump is better made once for all lanes than once for each.
        if s.type == "compound_statement":
            return any(self._splits(c) for c in s.named_children)
        if s.type == "if_statement" and self._exits(s):
            return self._uniform_if(s)
        return s.type in ("return_statement", "break_statement", "continue_statement")

    def _decides(self, s: Node) -> bool:
        """Whether an `if` in a statement is decided once for all lanes of a row."""
        if s.type == "if_statement":
            if self._uniform_if(s):
                return True
            parts = [s.child_by_field_name(f) for f in ("consequence", "alternative")]
            return any(p is not None and self._decides(p) for p in parts)
        if s.type in ("compound_statement", "else_clause"):
            return any(self._decides(c) for c in s.named_children)
        if s.type in LOOPS:
            body = s.child_by_field_name("body")
            return (
                body is not None
                and self.uniformity.of(s.child_by_field_name("condition"))
                and not self._exits(s)
                and self._decides(body)
            )
        return False

    def _exits(self, node: Node, nested: bool = False, switched: bool = False) -> bool:
        """Whether control may leave the node by return, break or continue."""
        for child in node.children:
            kind = child.type
            if kind == "return_statement":
                return True
            if kind == "break_statement" and not nested and not switched:
                return True
            if kind == "continue_statement" and not nested:
                return True
            if kind in ("lambda_expression", "function_definition", "struct_specifier"):
                continue
            if self._exits(child, nested or kind in LOOPS, switched or kind == "switch_statement"):
                return True
        return False

    def _parts(self, s: Node, d: Node) -> tuple[str, str, Node]:
        """A declaration's specifiers, one declarator without its initialiser, and its name."""
        first = declarators(s)[0]
        spec = self.tree.data[s.start_byte : first.start_byte].decode().strip()
        inner = d.child_by_field_name("declarator") if d.type == "init_declarator" else d
        name = declared_name(d)
        if inner is None or name is None:
            raise NotSplittable(f"the declaration {self.tree.text(s)!r} is not understood")
        return spec, self.tree.text(inner), name

    def _line(self, node: Node) -> int:
        return node.start_point[0] + 1


def loop_parts(s: Node) -> tuple[Node, Node | None, Node | None, Node | None]:
    """A loop's body, condition, start and step.

    Raises:
        NotSplittable: it has no body, or its condition declares a variable.
    """
    body, condition = s.child_by_field_name("body"), s.child_by_field_name("condition")
    if body is None:
        raise NotSplittable("a loop is not understood")
    if condition is not None and condition.type == "condition_clause":
        condition = condition.child_by_field_name("value")
    if condition is not None and condition.type == "declaration":
        raise NotSplittable("a loop declares a variable in its condition")
    start, update = s.child_by_field_name("initializer"), s.child_by_field_name("update")
    return body, condition, start, update


def branch_statements(branch: Node) -> list[Node]:
    """The statements of a branch, or of a loop's body."""
    if branch.type == "else_clause":
        branch = branch.named_children[-1]
    found = branch.named_children if branch.type == "compound_statement" else [branch]
    return [s for s in found if s.type != "comment"]


def expression(node: Node | None) -> Node | None:
    if node is not None and node.type == "expression_statement":
        return node.named_children[0] if node.named_children else None
    return node
