"""A kernel's body as nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tree_sitter import Node

from ...errors import DialectError
from ...kernel import ATTRIBUTES, Kernel
from .. import NotSplittable
from ..accesses.functions import functions_of
from ..accesses.values import Function
from ..loops.statements import (
    branch_statements,
    changed,
    initial_value,
    inner_declarator,
    loop_parts,
)
from ..macros import expand
from ..rewrite import rewrite
from ..syntax import (
    Tree,
    call_arguments,
    callee,
    declarator_shape,
    declarators,
    declared_name,
    field,
    part,
    plain_comparisons,
    plain_subscripts,
    walk,
)
from .functions import Functions
from .names import Meaning, PointerVariable
from .nodes import (
    ADD,
    INT,
    LONG,
    UINT,
    Array,
    Assign,
    AtomicAdd,
    Block,
    Call,
    Declare,
    DeclareArray,
    Effect,
    Element,
    Expression,
    If,
    Jump,
    Lanes,
    Literal,
    Loop,
    Name,
    Statement,
    Type,
)

_NOTHING = frozenset({
    "comment", "using_declaration", "static_assert_declaration", "preproc_call", ";",
    "preproc_def", "preproc_function_def", "preproc_include",
})  # fmt: skip
_SUMS = frozenset({"=", "+=", "-="})  # what these read of an output is no more than added to
_EFFECTS = ("threadgroup_barrier", "simdgroup_barrier", "atomic_thread_fence")
_PRINTS = ("printf", "assert")


def read(kernel: Kernel, given: Mapping[str, Meaning]) -> Block:
    """The statements of a kernel's body.

    Args:
        given: what the names of its arguments and template parameters mean.

    Raises:
        DialectError: something in it is not followed; says what, and where.
    """
    text = rewrite(kernel)
    names = {*ATTRIBUTES, *kernel.input_names, *kernel.output_names}
    header, source = (
        plain_comparisons(code, body=body, variables=names)
        for code, body in ((text.header, False), (text.source, True))
    )
    try:
        body = Tree(expand(header, source, kernel=kernel.name), body=True)
        functions = Tree(expand("", header, kernel=kernel.name) + "\n", body=False)
    except NotSplittable as why:
        raise DialectError.at(kernel.name, "source", 1, "macros", f"{why}.") from None
    reader = _Reader(kernel, {**_attributes(), **given}, functions)
    return reader.read(plain_subscripts(body, [*kernel.input_names, *kernel.output_names]))


def _attributes() -> dict[str, Meaning]:
    vector = UINT._replace(lanes=3)
    return {
        name: Name(name, vector if kind == "uint3" else UINT) for name, kind in ATTRIBUTES.items()
    }


class _Reader(Functions):
    """Reads statements."""

    def __init__(self, kernel: Kernel, given: Mapping[str, Meaning], header: Tree) -> None:
        super().__init__(kernel.name, given)
        self._header = header
        self.functions = functions_of(header, "header")

    def read(self, body: Tree) -> Block:
        """All statements of the body."""
        for tree, where in ((self._header, "header"), (body, "source")):
            if tree.has_error:
                node = next(n for n in walk(tree.root) if n.type == "ERROR" or n.is_missing)
                self.where = where
                raise self.refuse(node, "syntax that is not read", "write it in other words.")
        self.tree, self.where = self._header, "header"
        for node in self._header.root.named_children:
            if node.type in ("declaration", "alias_declaration", "type_definition"):
                self.statement(node)
        constants = self.made
        self.made = []
        self.tree, self.where = body, "source"
        with self.scope():
            self._let_move(body)
            for node in body.block.named_children:
                self.statement(node)
        return (*constants, *self.made)

    def _let_move(self, body: Tree) -> None:
        """Let the arrays that the body assigns to be pointers that begin at their first element."""
        changes = (changed(node) for node in walk(body.block))
        for name in sorted({body.text(node) for node in changes if node is not None}):
            array = self.scopes[0].get(name)
            if isinstance(array, Array):
                offset = Name(self.fresh(f"{name}_at"), LONG)
                self.made.append(Declare(1, offset, Literal("0", INT)))
                self.scopes[-1][name] = PointerVariable(array, offset)

    # -- statements --------------------------------------------------------------------------------

    def statement(self, node: Node) -> None:
        """Read a statement, and add what it is."""
        if node.type in _NOTHING:
            return
        read = getattr(self, f"_read_{node.type}", None)
        if read is None:
            raise self.refuse(node, self._construct(node), "write it in other words.")
        read(node)

    def block(self, statements: Sequence[Node]) -> Block:
        """Statements in a scope of their own."""
        with self.collected() as made, self.scope():
            for node in statements:
                self.statement(node)
        return tuple(made)

    def _read_compound_statement(self, node: Node) -> None:
        self.made += self.block(node.named_children)

    def _read_alias_declaration(self, node: Node) -> None:
        name = self.tree.text(field(node, "name"))
        self.scopes[-1][name] = self.type_of(part(node, "type"))

    def _read_type_definition(self, node: Node) -> None:
        kind = self.type_of(part(node, "type"))
        for declarator in declarators(node):
            self.scopes[-1][self.tree.text(declarator)] = kind

    def _read_if_statement(self, node: Node) -> None:
        clause = part(node, "condition")
        condition = self.expression(field(clause, "value") or clause)
        yes = self.block(branch_statements(field(node, "consequence")))
        no = self.block(branch_statements(field(node, "alternative")))
        self.made.append(If(self.line(node), condition, yes, no))

    def _read_return_statement(self, node: Node) -> None:
        values = [c for c in node.named_children if c.type != "comment"]
        value = self.expression(values[0]) if values else None
        self.made.append(Jump(self.line(node), "return", value))

    def _read_break_statement(self, node: Node) -> None:
        self.made.append(Jump(self.line(node), node.type.split("_")[0]))

    _read_continue_statement = _read_break_statement

    # -- loops -------------------------------------------------------------------------------------

    def _read_for_statement(self, node: Node) -> None:
        try:
            parts = loop_parts(node)
        except NotSplittable as why:
            raise self.refuse(node, str(why), "declare it before the loop.") from None
        kind = node.type.split("_")[0]
        with self.scope():
            start: list[Statement] = []
            if parts.start is not None:
                with self.collected() as start:
                    if parts.start.type == "declaration":
                        self.statement(parts.start)
                    else:
                        self._effect(parts.start)
            self.made += start[:-1]
            condition = None
            if parts.condition is not None:
                with self.collected() as before:
                    condition = self.expression(parts.condition)
                if before:
                    raise self.refuse(parts.condition, "a call in a loop's condition",
                                      "call it in the loop, and break.")  # fmt: skip
            body = self.block(branch_statements(parts.body))
            with self.collected() as update:
                if parts.update is not None:
                    self._effect(parts.update)
        loop = Loop(self.line(node), kind, tuple(start[-1:]), condition, tuple(update), body)
        self.made.append(loop)

    _read_while_statement = _read_do_statement = _read_for_statement

    # -- what changes something --------------------------------------------------------------------

    def _read_expression_statement(self, node: Node) -> None:
        for child in node.named_children:
            if child.type != "comment":
                self._effect(child)

    def _effect(self, node: Node) -> None:
        """An expression that is a statement."""
        if node.type == "comma_expression":
            self._effect(part(node, "left"))
            self._effect(part(node, "right"))
        elif node.type == "parenthesized_expression":
            self._effect(node.named_children[0])
        elif node.type == "assignment_expression":
            operator = node.children[1].type
            self._assign(node, part(node, "left"), operator, part(node, "right"))
        elif node.type == "update_expression":
            operator = "+=" if any(c.type == "++" for c in node.children) else "-="
            self._assign(node, part(node, "argument"), operator, None)
        elif node.type == "call_expression":
            self._called(node)
        else:
            self.expression(node)

    def _assign(self, node: Node, target: Node, operator: str, value: Node | None) -> None:
        while target.type == "parenthesized_expression":
            target = target.named_children[0]
        meaning = self.look_up(self.tree.text(target)) if target.type == "identifier" else None
        if isinstance(meaning, PointerVariable):
            self._assign_pointer(node, meaning, operator, value)
            return
        if value is not None and value.type == "assignment_expression":  # a = b = c
            self._effect(value)
            value = part(value, "left")
        if self._assign_lanes(node, target, operator, value):
            return
        right = Literal("1", INT) if value is None else self.expression(value)
        place: Expression
        if target.type == "pointer_expression":
            place = self.pointed(target)
        elif target.type == "subscript_expression":
            place = self.element(target)
        else:
            place = self.expression(target)
        if isinstance(place, Element) and place.array.written and operator not in _SUMS:
            raise self.refuse(node, f"reading the output {place.array.name}", "keep a variable.")
        if not isinstance(place, (Name, Element, Lanes)):
            raise self.refuse(target, self._construct(target), "assign to a variable or element.")
        self.made.append(Assign(self.line(node), place, operator, right))

    def _assign_lanes(self, node: Node, target: Node, operator: str, value: Node | None) -> bool:
        """``v.xy = w``, which is ``v.swr(…) = w`` by now; whether it is that."""
        if target.type != "call_expression" or value is None:
            return False
        place = self.expression(target)
        if isinstance(place, Lanes):
            right = self.expression(value)
            self.made.append(Assign(self.line(node), place, operator, right))
        return isinstance(place, Lanes)

    def _assign_pointer(
        self, node: Node, variable: PointerVariable, operator: str, value: Node | None
    ) -> None:
        line = self.line(node)
        if variable.offset is None:
            raise self.refuse(node, "an array that is assigned to", "use a variable of its own.")
        if operator in ("+=", "-="):
            by: Expression = Literal("1", INT)
            if value is not None:
                by = self.expression(value)
            self.made.append(Assign(line, variable.offset, operator, by))
            return
        pointer = self.pointer(value) if value is not None and operator == "=" else None
        if pointer is None or pointer.array is not variable.array:
            raise self.refuse(node, "a pointer to another array", "use one for each array.")
        offset = pointer.position
        self.made.append(Assign(line, variable.offset, "=", offset))

    def _called(self, node: Node) -> None:
        """A call for what it does."""
        name, line = callee(self.tree, node).rsplit("::", 1)[-1], self.line(node)
        own = self.function_named(name.split("<")[0])
        if name == ADD:
            self._atomic(node, name)
        elif own:
            self.inlined(node, own, name)
        elif name.startswith("atomic_fetch_add"):
            self._atomic(node, name)
        elif name.startswith(_PRINTS):
            return  # the body itself has printed
        elif name.startswith(_EFFECTS):
            arguments = tuple(Name(self.tree.text(a), UINT) for a in call_arguments(node))
            self.made.append(Effect(line, Call(name, arguments, UINT)))
        else:
            raise self.refuse(node, f"{name}, called for what it does", "leave it out.")

    def _atomic(self, node: Node, name: str) -> None:
        place, value, *_ = call_arguments(node)
        pointer = self.pointer(place)
        if pointer is None or len(pointer.array.dims) > 1:
            raise self.refuse(node, "this atomic", "add to an element of an output.")
        index = pointer.position
        element = Element(pointer.array, (index,), pointer.array.element)
        cast = "(" in self.tree.text(place).partition("&")[0]
        self.made.append(AtomicAdd(self.line(node), element, self.expression(value), name, cast))

    # -- declarations ------------------------------------------------------------------------------

    def _read_declaration(self, node: Node) -> None:
        listed = declarators(node)
        if not listed:
            return
        specifiers = self.tree.data[node.start_byte : listed[0].start_byte].decode()
        for declarator in listed:
            name, shape = declared_name(declarator), declarator_shape(declarator)
            if name is None or "function_declarator" in shape:
                raise self.refuse(node, self._construct(node), "declare variables alone.")
            value, text = initial_value(declarator), self.tree.text(name)
            if value is not None and value.type == "lambda_expression":
                self.scopes[-1][text] = Function(self.tree, value, self.where, tuple(self.scopes))
            elif "array_declarator" in shape:
                self._declare_array(node, declarator, text, specifiers, value)
            elif "reference_declarator" in shape:
                self._refer(node, text, value)
            elif "pointer_declarator" in shape or self._points(value, specifiers):
                self._declare_pointer(node, text, value)
            else:
                self._declare_number(node, text, specifiers, value)

    def _points(self, value: Node | None, specifiers: str) -> bool:
        return value is not None and "auto" in specifiers.split() and self._is_pointer(value)

    def _is_pointer(self, value: Node) -> bool:
        with self.collected():
            return value.type in (
                "identifier", "binary_expression", "parenthesized_expression",
                "pointer_expression", "cast_expression",
            ) and self.pointer(value) is not None  # fmt: skip

    def _declare_number(self, node: Node, name: str, specifiers: str, value: Node | None) -> None:
        auto = "auto" in specifiers.split()
        kind = None if auto else self.type_of(part(node, "type"), specifiers)
        first = self._initial(value, kind)
        if kind is None:
            kind = first.type if first is not None else INT
        elif first is not None and first.type != kind and not isinstance(first, Literal):
            first = self.cast(first, kind)
        variable = self.declare(name, kind)
        constant = bool({"const", "constexpr"} & {*specifiers.split()})
        self.made.append(Declare(self.line(node), variable, first, constant, auto))

    def _initial(self, value: Node | None, kind: Type | None) -> Expression | None:
        if value is None:
            return None
        if value.type not in ("initializer_list", "argument_list"):
            return self.expression(value)
        inner = [c for c in value.named_children if c.type != "comment"]
        if kind is not None and len(inner) != 1:
            lanes = tuple(map(self.expression, inner)) or (Literal("0", INT),)
            return Call(str(kind), lanes, kind)
        return self.expression(inner[0])

    def _declare_pointer(self, node: Node, name: str, value: Node | None) -> None:
        pointer = None if value is None else self.pointer(value)
        if pointer is None:
            raise self.refuse(node, f"the pointer {name}", "let it point into an array at once.")
        offset = self.declare(f"{name}_at", LONG)
        del self.scopes[-1][f"{name}_at"]
        first = pointer.position
        self.made.append(Declare(self.line(node), offset, first))
        self.scopes[-1][name] = PointerVariable(pointer.array, offset)

    def _refer(self, node: Node, name: str, value: Node | None) -> None:
        place = self.expression(value) if value is not None else None
        if not isinstance(place, Name):
            raise self.refuse(node, f"the reference {name}", "name the element itself.")
        self.scopes[-1][name] = place

    def _declare_array(
        self, node: Node, declarator: Node, name: str, specifiers: str, value: Node | None
    ) -> None:
        dims: list[Expression] = []
        inner: Node | None = inner_declarator(declarator)
        listed = [c for c in value.named_children if c.type != "comment"] if value else []
        while inner is not None and inner.type == "array_declarator":
            size = field(inner, "size")
            dims.insert(
                0, Literal(str(len(listed)), INT) if size is None else self.expression(size)
            )
            inner = field(inner, "declarator")
        if inner is None or inner.type != "identifier":
            raise self.refuse(declarator, self._construct(declarator), "declare a plain array.")
        kind = self.type_of(part(node, "type"), specifiers)
        space = "threadgroup" if "thread_local" in specifiers.split() else (
            "constant" if self.where == "header" and not self.line_of_call else "thread"
        )  # fmt: skip
        array = Array(self.fresh(name), space, kind, tuple(dims))
        values = None if value is None else tuple(map(self.expression, listed))
        self.scopes[-1][name] = array
        self.made.append(DeclareArray(self.line(node), array, values))
