"""Expressions of a text as nodes."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..accesses.values import Function
from ..syntax import Tree, call_arguments, field, operands, part
from .names import Names, Pointer, PointerVariable
from .nodes import (
    BOOL,
    COMPARISONS,
    LETTERS,
    LONG,
    UINT,
    Array,
    Assign,
    Binary,
    Call,
    Choice,
    Declare,
    Element,
    Expression,
    If,
    Lanes,
    Literal,
    Name,
    Type,
    Unary,
    common,
    of,
)
from .types import is_pointer, result_of, type_named

_INTEGER = re.compile(r"(0[xX][0-9a-fA-F']+|0[bB][01']+|[0-9][0-9']*)([uUlL]*)")
_WORDS = {"and": "&&", "or": "||", "not": "!", "bitand": "&", "bitor": "|", "xor": "^"}
_CONSTANTS = frozenset({
    "INFINITY", "NAN", "M_PI_F", "HUGE_VALF", "FLT_MAX", "FLT_MIN", "FLT_EPSILON", "MAXFLOAT",
})  # fmt: skip
_LITERALS = {"half_lit": "h", "bfloat_lit": "bf"}
_ELEMENTS = re.compile(r"ix<([0-9, ]+)>")
_HALVES = {"lo_ix": slice(0, 2), "hi_ix": slice(2, 4)}


class Expressions(Names):
    """Reads expressions.

    Attributes:
        tree: the text that is read.
    """

    tree: Tree

    # -- what there is to read ---------------------------------------------------------------------

    def expression(self, node: Node) -> Expression:
        """An expression that is a value."""
        read = getattr(self, f"_of_{node.type}", None)
        if read is None:
            raise self.refuse(node, self._construct(node), "write it in other words.")
        found: Expression = read(node)
        return found

    def _construct(self, node: Node) -> str:
        return f"a {node.type.replace('_', ' ')} ({self.tree.text(node).split(chr(10))[0]})"

    @property
    def types(self) -> dict[str, Type]:
        """The names of types."""
        return {n: v for scope in self.scopes for n, v in scope.items() if isinstance(v, Type)}

    def type_of(self, node: Node, text: str | None = None) -> Type:
        """The type that a node, or a text there, names.

        Raises:
            DialectError: it is none of numbers or vectors of numbers.
        """
        text = self.tree.text(node) if text is None else text
        found = type_named(text, self.types)
        if found is None:
            shown = " ".join(text.replace("thread_local", "threadgroup").split())
            raise self.refuse(node, f"the type {shown}", "use numbers, vectors and arrays of them.")
        return found

    # -- leaves ------------------------------------------------------------------------------------

    def _of_number_literal(self, node: Node) -> Expression:
        text = self.tree.text(node)
        match = _INTEGER.fullmatch(text)
        if match is None:
            return Literal(text, of("float"))
        suffix = match[2].lower()
        name = ("u" if "u" in suffix else "") + ("long" if "l" in suffix else "int")
        return Literal(text, of(name))

    def _of_true(self, node: Node) -> Expression:
        return Literal(self.tree.text(node), BOOL)

    _of_false = _of_true

    def _of_identifier(self, node: Node) -> Expression:
        name = self.tree.text(node)
        meaning = self.look_up(name)
        if isinstance(meaning, Name):
            return meaning
        if meaning is None and name in _CONSTANTS:
            return Name(name, of("float"))
        raise self.refuse(node, name, "it is no number here.")

    def _of_qualified_identifier(self, node: Node) -> Expression:
        text = re.sub(r"^(?:::fr::)?(?:metal::)?", "", self.tree.text(node))
        if "numeric_limits<" in text or text.startswith("Limits<"):
            return Name(text, self.type_of(node, text.split("<", 1)[1].rsplit(">", 1)[0]))
        if text in _CONSTANTS:
            return Name(text, of("float"))
        return Name(text, UINT)

    def _of_parenthesized_expression(self, node: Node) -> Expression:
        (inner,) = [child for child in node.named_children if child.type != "comment"]
        return self.expression(inner)

    # -- operators ---------------------------------------------------------------------------------

    def _of_binary_expression(self, node: Node) -> Expression:
        left, operator, right = operands(node)
        operator = _WORDS.get(operator, operator)
        a = self.expression(left)
        if operator in ("&&", "||"):
            with self.collected() as more:
                b = self.expression(right)
            if more:
                raise self.refuse(right, "a call behind && or ||", "call it before, or use if.")
            lanes = max(a.type.lanes, b.type.lanes)
            return Binary(operator, a, b, BOOL._replace(lanes=lanes))
        b = self.expression(right)
        both = common(a.type, b.type)
        if operator in COMPARISONS:
            return Binary(operator, a, b, BOOL._replace(lanes=both.lanes))
        return Binary(operator, a, b, a.type if operator in ("<<", ">>") else both)

    def _of_unary_expression(self, node: Node) -> Expression:
        operator = self.tree.text(node.children[0])
        operator = _WORDS.get(operator, operator)
        value = self.expression(part(node, "argument"))
        if operator == "+":
            return value
        kind = BOOL._replace(lanes=value.type.lanes) if operator == "!" else value.type
        return Unary(operator, value, kind)

    def _of_conditional_expression(self, node: Node) -> Expression:
        condition = self.expression(part(node, "condition"))
        with self.collected() as before_yes:
            yes = self.expression(part(node, "consequence"))
        with self.collected() as before_no:
            no = self.expression(part(node, "alternative"))
        kind = common(yes.type, no.type)
        if not (before_yes or before_no):
            return Choice(condition, yes, no, kind)
        line, result = self.line(node), Name(self.fresh("fr_chosen"), kind)
        self.made.append(Declare(line, result, None))
        branches = (
            (*before, Assign(line, result, "=", value))
            for before, value in ((before_yes, yes), (before_no, no))
        )
        self.made.append(If(line, condition, *branches))
        return result

    def _of_cast_expression(self, node: Node) -> Expression:
        kind = self.type_of(part(node, "type"))
        return self.cast(self.expression(part(node, "value")), kind)

    def cast(self, value: Expression, kind: Type) -> Expression:
        """A value as another type holds it."""
        if value.type == kind:
            return value
        return Call(str(kind), (value,), kind, cast=True)

    def _of_assignment_expression(self, node: Node) -> Expression:
        raise self.refuse(node, "an assignment in an expression", "make it a statement.")

    _of_update_expression = _of_comma_expression = _of_assignment_expression

    # -- places ------------------------------------------------------------------------------------

    def _of_subscript_expression(self, node: Node) -> Expression:
        return self._read(node, self.element(node))

    def _read(self, node: Node, place: Element | Lanes) -> Element | Lanes:
        if isinstance(place, Element) and place.array.written:
            raise self.refuse(node, f"reading the output {place.array.name}", "keep a variable.")
        return place

    def element(self, node: Node) -> Element | Lanes:
        """An element of an array, or a lane of a vector."""
        indices: list[Node] = []
        base = node
        while base.type == "subscript_expression":
            inner = [c for c in part(base, "indices").named_children if c.type != "comment"]
            if len(inner) != 1:
                raise self.refuse(base, "a subscript of several", "use one.")
            indices.insert(0, inner[0])
            base = part(base, "argument")
        pointer = self.pointer(base)
        if pointer is None:
            return self._lane(base, indices)
        values = [self.expression(index) for index in indices]
        array = pointer.array
        if len(values) != max(len(array.dims), 1):
            raise self.refuse(node, f"a part of the array {array.name}", "use its elements.")
        if pointer.offset is not None:
            values[0] = _sum(pointer.offset, values[0])
        return Element(array, tuple(values), array.element)

    def _lane(self, base: Node, indices: list[Node]) -> Lanes:
        vector = self.expression(base)
        index = self.expression(indices[0])
        if vector.type.lanes == 1 or len(indices) > 1 or not isinstance(index, Literal):
            raise self.refuse(base, "a lane that a variable chooses", "name lanes: v.x.")
        return Lanes(vector, LETTERS[int(index.text.rstrip("uUlL"), 0)], vector.type.scalar)

    def _of_pointer_expression(self, node: Node) -> Expression:
        if node.children[0].type != "*":
            raise self.refuse(node, "an address", "use the array and an index.")
        return self._read(node, self.pointed(node))

    def pointed(self, node: Node) -> Element:
        """``*p``."""
        pointer = self.pointer(part(node, "argument"))
        if pointer is None or len(pointer.array.dims) > 1:
            raise self.refuse(node, "what this points to", "use an array and an index.")
        index = pointer.position
        return Element(pointer.array, (index,), pointer.array.element)

    def pointer(self, node: Node) -> Pointer | None:
        """Where an expression points; None of one that is a value."""
        if node.type == "parenthesized_expression":
            return self.pointer(node.named_children[0])
        if node.type == "identifier":
            meaning = self.look_up(self.tree.text(node))
            if isinstance(meaning, Array):
                return Pointer(meaning)
            if isinstance(meaning, PointerVariable):
                return Pointer(meaning.array, meaning.offset)
            return None
        if node.type == "binary_expression":
            return self._moved(node)
        if node.type == "pointer_expression" and node.children[0].type == "&":
            place = part(node, "argument")
            if place.type == "subscript_expression":
                element = self.element(place)
                if isinstance(element, Element) and len(element.indices) == 1:
                    return Pointer(element.array, element.indices[0])
        if node.type == "cast_expression" and is_pointer(self.tree.text(field(node, "type"))):
            return self._cast_pointer(node)
        return None

    def _moved(self, node: Node) -> Pointer | None:
        left, operator, right = operands(node)
        pointer, by = self.pointer(left), right
        if pointer is None and operator == "+":
            pointer, by = self.pointer(right), left
        if pointer is None or operator not in ("+", "-"):
            return None
        distance = self.cast(self.expression(by), LONG)
        if operator == "-":
            first = pointer.position
            return pointer._replace(offset=Binary("-", first, distance, LONG))
        offset = distance if pointer.offset is None else _sum(pointer.offset, distance)
        return pointer._replace(offset=offset)

    def _cast_pointer(self, node: Node) -> Pointer | None:
        pointer = self.pointer(part(node, "value"))
        named = self.tree.text(field(node, "type")).replace("*", "")
        to = type_named(re.sub(r"\batomic<(.*)>", r"\1", named), self.types)
        if pointer is None or to == pointer.array.element:
            return pointer
        raise self.refuse(node, "a pointer of another type", "read elements as they are.")

    def _of_field_expression(self, node: Node) -> Expression:
        vector = self.expression(part(node, "argument"))
        letters = self.tree.text(field(node, "field"))
        return self.lanes(node, vector, letters)

    def lanes(self, node: Node, vector: Expression, letters: str) -> Expression:
        """Lanes of a vector by their letters."""
        letters = letters.translate(str.maketrans("rgba", "xyzw"))
        if vector.type.lanes == 1 or not set(letters) <= {*LETTERS[: vector.type.lanes]}:
            raise self.refuse(node, self._construct(node), "structs are not followed; use numbers.")
        return Lanes(vector, letters, vector.type._replace(lanes=len(letters)))

    # -- calls -------------------------------------------------------------------------------------

    def _of_call_expression(self, node: Node) -> Expression:
        function = part(node, "function")
        if function.type == "field_expression":
            return self._swizzled(node, function)
        text = self.tree.text(function)
        name = re.sub(r"^(?:::fr::)?(?:metal::)?(?:precise::|fast::)?", "", text)
        if name in _LITERALS:
            inside = self.tree.text(call_arguments(node)[0])
            return Literal(inside + _LITERALS[name], of("half" if name[0] == "h" else "bfloat"))
        if function.type == "template_function" and name.startswith(("static_cast<", "as_type<")):
            to = self.type_of(function, name.split("<", 1)[1].rsplit(">", 1)[0])
            value = self.expression(call_arguments(node)[0])
            if name.startswith("as_type"):
                return Call(f"as_type<{to}>", (value,), to)
            return self.cast(value, to)
        own = self.function_named(name.split("<")[0])
        if own:
            result = self.inlined(node, own, name)
            if result is None:
                raise self.refuse(node, f"{name}, which returns nothing", "call it by itself.")
            return result
        kind = type_named(name, self.types)
        arguments = [self._argument(a) for a in call_arguments(node)]
        if kind is not None:
            if len(arguments) == 1 and kind.lanes in (1, arguments[0].type.lanes):
                return self.cast(arguments[0], kind)
            return Call(str(kind), tuple(arguments), kind)
        result_type = result_of(name, [a.type for a in arguments])
        return Call(name, tuple(arguments), result_type)

    def _argument(self, node: Node) -> Expression:
        """An argument of a function of the dialect, which may read the sizes of an array."""
        meaning = self.look_up(self.tree.text(node)) if node.type == "identifier" else None
        if isinstance(meaning, Array) and meaning.space == "constant":
            return Name(meaning.name, meaning.element)
        return self.expression(node)

    def _swizzled(self, node: Node, function: Node) -> Expression:
        vector = self.expression(part(function, "argument"))
        text = self.tree.text(node)
        if match := _ELEMENTS.search(text):
            letters = "".join(LETTERS[int(i)] for i in match[1].split(","))
            return self.lanes(node, vector, letters)
        for name, lanes in _HALVES.items():
            if name in text:
                return self.lanes(node, vector, LETTERS[lanes])
        raise self.refuse(node, self._construct(node), "methods are not followed.")

    def function_named(self, name: str) -> list[Function]:
        """The author's functions of a name."""
        raise NotImplementedError

    def inlined(self, node: Node, functions: list[Function], name: str) -> Expression | None:
        """What a function gives, whose statements are put in place of its call."""
        raise NotImplementedError


def _sum(a: Expression, b: Expression) -> Expression:
    if isinstance(b, Literal) and b.text in ("0", "0u"):
        return a
    return Binary("+", a, b, common(a.type, b.type))
