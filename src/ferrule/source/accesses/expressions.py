"""Expressions: their values, and what evaluating them reads and writes."""

from __future__ import annotations

import re

from tree_sitter import Node

from .. import words
from ..syntax import field, operands, part
from . import terms
from .arithmetic import binary, moved, negated
from .kinds import BOOL, INT, LONG, UINT, ULONG, Kind, Type, in_elements, type_of
from .machine import MOST_STEPS, Machine, TooLarge
from .shapes import size_at
from .values import (
    Address,
    Function,
    Opaque,
    Place,
    Pointer,
    Reference,
    Row,
    Scalar,
    Value,
    Vector,
    as_condition,
    condition,
    converted,
    fresh,
    fresh_like,
    merged,
    number,
)

_INTEGER = re.compile(r"(0[xX][0-9a-fA-F']+|0[bB][01']+|[0-9][0-9']*)([uUlLzZ]*)")
_CONSTANTS = words("INFINITY NAN M_PI_F HUGE_VALF FLT_MAX FLT_MIN FLT_EPSILON MAXFLOAT")
_LANES = {letter: i for letters in ("xyzw", "rgba") for i, letter in enumerate(letters)}
ELEMENTS = re.compile(r"ix<([0-9, ]+)>")


class Expressions(Machine):
    """A machine that evaluates expressions."""

    def evaluate(self, node: Node) -> Value:
        """The value of an expression."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLarge("loops and functions are too many to follow")
        evaluate = getattr(self, f"_of_{node.type}", None)
        if evaluate is None:
            self.refuse(node, f"{node.type.replace('_', ' ')} is not followed")
            return Opaque()
        value: Value = evaluate(node)
        return value

    def scalar(self, node: Node) -> Scalar | None:
        """The value of an expression, where it is a number."""
        value = self.evaluate(node)
        return value if isinstance(value, Scalar) else None

    # -- literals and names ------------------------------------------------------------------------

    def _of_number_literal(self, node: Node) -> Value:
        text = self.tree.text(node)
        match = _INTEGER.fullmatch(text.lstrip("+-"))
        if match is None:
            return Opaque(Type("float", None, 1, 4))
        digits, suffix = match[1].replace("'", ""), match[2].lower()
        octal = digits[0] == "0" and digits.isdecimal() and len(digits) > 1
        value = int(digits, 8 if octal else 0)
        unsigned, wide = "u" in suffix, "l" in suffix or "z" in suffix
        hexadecimal = digits[:2].lower() in ("0x", "0b") or octal
        kinds: list[Kind] = [] if wide else [UINT] if unsigned else [INT]
        kinds += [UINT] * (hexadecimal and not wide and not unsigned)
        kinds += [ULONG] if unsigned else [LONG, ULONG]
        found = number(value, next((k for k in kinds if value <= k.most), ULONG))
        return negated(self, node, "-", found) if text[0] == "-" else found

    def _of_char_literal(self, node: Node) -> Value:
        text = self.tree.text(node).strip("'")
        return number(ord(text)) if len(text) == 1 else fresh(Type("int", INT), "a character")

    def _of_true(self, node: Node) -> Value:
        return condition(terms.TRUE)

    def _of_false(self, node: Node) -> Value:
        return condition(terms.FALSE)

    def _of_null(self, node: Node) -> Value:
        return Opaque()

    def _of_nullptr(self, node: Node) -> Value:
        return Opaque()

    def _of_string_literal(self, node: Node) -> Value:
        return Opaque()

    def _of_identifier(self, node: Node) -> Value:
        name = self.tree.text(node)
        named = self.look_up(name)
        if isinstance(named, (Place, Reference)):
            return self.load(node, named if isinstance(named, Place) else named.pointer)
        if named is None:
            if name not in _CONSTANTS and not name.startswith("memory_order_"):
                self.refuse(node, f"{name} is not known", hides=False)
            return Opaque()
        return named

    def _of_qualified_identifier(self, node: Node) -> Value:
        """A name in a namespace: a constant of the library."""
        text = self.tree.text(node)
        if not text.startswith(("::fr", "metal::", "::metal", "mem_flags", "memory_order")):
            last = text.rsplit("::", 1)[-1].strip()
            if ("Limits" not in text and "numeric_limits" not in text) or self.look_up(last):
                self.refuse(node, f"{text} is not followed")
        return Opaque()

    def _of_parenthesized_expression(self, node: Node) -> Value:
        inner = [child for child in node.named_children if child.type != "comment"]
        return self.evaluate(inner[0]) if len(inner) == 1 else Opaque()

    def _of_comma_expression(self, node: Node) -> Value:
        self.evaluate(part(node, "left"))
        return self.evaluate(part(node, "right"))

    def _of_template_function(self, node: Node) -> Value:
        """A constant of the library: ``is_same_v<T, float>``."""
        constant = terms.unknown(self.tree.text(node), None)
        self.uniform.add(constant)
        return condition(constant) if "is_" in self.tree.text(node) else Opaque()

    def _of_initializer_list(self, node: Node) -> Value:
        for child in node.named_children:
            value = Opaque() if child.type == "comment" else self.evaluate(child)
            if isinstance(value, (Pointer, Address, Function)):
                self.refuse(child, "a pointer in a list of values is not followed")
        return Opaque()

    def _of_sizeof_expression(self, node: Node) -> Value:
        inner = field(node, "type") or field(node, "value")
        size = None
        if inner is not None:
            text = self.tree.text(inner).strip("() ")
            size = type_of(text, self.types).size
            named = self.look_up(text)
            held = self.cells[named.cell] if isinstance(named, Place) else None
            if isinstance(held, Scalar):
                size = max(held.kind.bits // 8, 1)
        if size is None:
            return fresh(Type("ulong", ULONG), "a size that is not known")
        return number(size, ULONG)

    # -- operators ---------------------------------------------------------------------------------

    def _of_binary_expression(self, node: Node) -> Value:
        left, op, right = operands(node)
        if op in ("&&", "||", "and", "or"):
            a = as_condition(self.evaluate(left))
            both = op in ("&&", "and")
            before = self.snapshot()
            self.assume(a if both else terms.not_(a))
            b = as_condition(self.evaluate(right))
            after = self.snapshot()
            self.path, self.branches = before.path, before.branches
            holds = a if both else terms.not_(a)
            self.merge(holds, after, before)
            return condition(terms.and_(a, b) if both else terms.or_(a, b))
        value = self.evaluate(left)
        return binary(self, node, op, value, self.evaluate(right))

    def _of_unary_expression(self, node: Node) -> Value:
        op = {"not": "!"}.get(node.children[0].type, node.children[0].type)
        return negated(self, node, op, self.evaluate(part(node, "argument")))

    def _of_conditional_expression(self, node: Node) -> Value:
        c = as_condition(self.evaluate(part(node, "condition")))
        consequence = field(node, "consequence")
        if consequence is None:
            self.refuse(node, "?: without its middle is not followed")
            return Opaque()
        before = self.snapshot()
        self.assume(c)
        a = self.evaluate(consequence)
        one = self.snapshot()
        self.restore(before)
        self.assume(terms.not_(c))
        b = self.evaluate(part(node, "alternative"))
        other = self.snapshot()
        self.path, self.branches = before.path, before.branches
        self.merge(c, one, other)
        if isinstance(a, Scalar) and isinstance(b, Scalar) and a.kind != b.kind:
            zero = binary(self, node, "*", Scalar(terms.const(0), a.kind),
                          Scalar(terms.const(0), b.kind))  # fmt: skip
            kind = zero.kind if isinstance(zero, Scalar) else a.kind
            a, b = (converted(v, Type(kind.name, kind)) for v in (a, b))
        return merged(c, a, b)

    def _of_assignment_expression(self, node: Node) -> Value:
        left, right = part(node, "left"), part(node, "right")
        op = node.children[1].type
        value = self.evaluate(right)
        place = self.place(left)
        if op != "=":
            value = binary(self, node, op[:-1], self.load(left, place), value)
        return self.store(left, place, value)

    def _of_update_expression(self, node: Node) -> Value:
        argument = part(node, "argument")
        place = self.place(argument)
        old = self.load(argument, place)
        op = "+" if any(child.type == "++" for child in node.children) else "-"
        new = self.store(argument, place, binary(self, node, op, old, number(1)))
        return new if node.children[0].type in ("++", "--") else old

    # -- places ------------------------------------------------------------------------------------

    def place(self, node: Node) -> Place | Pointer | Row | None:
        """Where what an expression names lies; None of what is not followed."""
        if node.type == "parenthesized_expression" and node.named_child_count == 1:
            return self.place(node.named_children[0])
        if node.type == "identifier":
            named = self.look_up(self.tree.text(node))
            if isinstance(named, Reference):
                return named.pointer
            if isinstance(named, Pointer):
                return Row(named)
            if isinstance(named, Place):
                return named
            self.refuse(node, f"where {self.tree.text(node)} lies is not known")
            return None
        if node.type == "subscript_expression":
            return self._element(node)
        if node.type == "pointer_expression" and node.children[0].type == "*":
            value = self.evaluate(part(node, "argument"))
            return self._pointed(node, value)
        if node.type == "field_expression":
            inner = self.place(part(node, "argument"))
            name = self.tree.text(part(node, "field"))
            variable = isinstance(inner, Place) and inner.component is None and name in _LANES
            if variable and isinstance(inner, Place) and (
                isinstance(self.cells[inner.cell], Vector)
            ):  # fmt: skip
                return Place(inner.cell, _LANES[name])
            if isinstance(inner, Pointer):  # a member of a struct, or a lane, in memory
                return inner
            if isinstance(inner, Place):
                return inner if isinstance(self.cells[inner.cell], Opaque) else None
            return None
        if node.type in ("assignment_expression", "update_expression"):
            self.evaluate(node)
            left = field(node, "left") or field(node, "argument")
            return self.place(left) if left is not None and left.type == "identifier" else None
        if node.type == "conditional_expression":
            self.refuse(node, "?: as a place is not followed")
            return None
        if node.type == "call_expression":
            self._swizzle_written(node)
            self.evaluate(node)
            if part(node, "function").type != "field_expression":
                self.refuse(node, "a call that gives a place is not followed")
            return None
        self.refuse(node, f"{node.type.replace('_', ' ')} as a place is not followed")
        return None

    def _swizzle_written(self, call: Node) -> None:
        """Forget a vector some lanes of which are written: ``v.xy = w``."""
        function = part(call, "function")
        if function.type != "field_expression":
            return
        place = self.place(part(function, "argument"))
        if isinstance(place, Place):
            self.cells[place.cell] = fresh_like(self.cells[place.cell], "lanes are written")
        elif isinstance(place, Pointer):
            self.access(call, place, "write")

    def _pointed(self, node: Node, value: Value) -> Place | Pointer | Row | None:
        if isinstance(value, Address):
            return value.place
        if isinstance(value, Pointer):
            if value.dims:
                return Row(value._replace(dims=value.dims[1:]))
            return value
        self.refuse(node, f"where {self.tree.text(node)} points is not known")
        return None

    def _element(self, node: Node) -> Place | Pointer | Row | None:
        argument = part(node, "argument")
        indices = part(node, "indices")
        inner = [c for c in indices.named_children if c.type != "comment"]
        if argument.type == "identifier":
            named = self.look_up(self.tree.text(argument))
            if isinstance(named, Place) and isinstance(self.cells[named.cell], (Vector, Opaque)):
                index = self.scalar(inner[0]) if len(inner) == 1 else None
                vector = self.cells[named.cell]
                if isinstance(vector, Opaque):
                    if not vector.type.lanes > 1 and vector.type.size is None:
                        self.refuse(node, f"where {self.tree.text(argument)} points is not known")
                    return named
                if index is not None and index.term.op == "const":
                    return Place(named.cell, index.term.value)
                self.refuse(node, "a lane that a variable chooses is not followed")
                return None
        base = self.evaluate(argument)
        if len(inner) != 1:
            self.refuse(node, "a subscript of several is not followed")
            return None
        index_value = self.evaluate(inner[0])
        if isinstance(base, Scalar) and isinstance(index_value, Pointer):
            base, index_value = index_value, base
        if isinstance(base, Address) and index_value == number(0):
            return base.place
        if isinstance(base, (Vector, Opaque)):
            return self._lane(node, base, index_value)
        if not isinstance(base, Pointer):
            self.refuse(node, f"what {self.tree.text(argument)} is, is not known")
            return None
        if base.dims:
            return Row(moved(self, base, index_value)._replace(dims=base.dims[1:]))
        return moved(self, base, index_value)

    def _lane(self, node: Node, base: Value, index: Value) -> Place | None:
        """A lane of a vector that is no variable; a pointer that is not known."""
        if isinstance(base, Opaque) and base.type.lanes == 1:
            self.refuse(node, f"where {self.tree.text(node)} lies is not known")
        return None

    def load_place(self, place: Place) -> Value:
        """What a variable holds."""
        value = self.cells[place.cell]
        if place.component is not None and isinstance(value, Vector):
            if place.component < len(value.parts):
                return Scalar(value.parts[place.component], value.kind)
            return Opaque()
        return value

    def load(self, node: Node, place: Place | Pointer | Row | None) -> Value:
        """What a place holds; memory is read."""
        if isinstance(place, Row):
            return place.pointer
        if isinstance(place, Place):
            return self.load_place(place)
        if place is None:
            return Opaque()
        if place.array.space == "sizes":
            return self._size(node, place)
        self.access(node, place, "read")
        return self.held(place)

    def _size(self, node: Node, place: Pointer) -> Value:
        """``x_shape[1]``, ``x_strides[1]``."""
        index, name = self.index_of(place), place.array.name
        kind = place.type.kind or INT
        length = place.array.length
        if length is None or length.op != "const" or index.op != "const":
            self.access(node, place, "read")
            return Scalar(size_at(name, index, kind), kind)
        if not 0 <= index.value < length.value:
            self.refuse(node, f"{name} has no {index.value}")
        low = 0 if name.endswith("_shape") else kind.least
        return Scalar(terms.symbol(f"{name}[{index.value}]", low, kind.most), kind)

    def held(self, place: Pointer) -> Value:
        """The value of an element that has been read."""
        kind, lanes = place.type.kind, place.type.lanes
        fixed = place.array.space in ("device", "constant")
        fixed = fixed and place.array.name not in self.written
        plain = place.step == place.parts == 1
        if kind is not None and fixed and plain and lanes == 1:
            return Scalar(terms.data(place.array.name, self.index_of(place), kind), kind)
        return fresh(place.type, f"what {place.array.name} holds")

    def store(self, node: Node, place: Place | Pointer | Row | None, value: Value) -> Value:
        """Write to a place; what it holds then."""
        if isinstance(place, Row):
            self.refuse(node, "an array that is assigned to is not followed")
            return value
        if isinstance(place, Pointer):
            self.access(node, place, "write")
            return converted(value, place.type)
        if place is None:
            return value
        old = self.cells[place.cell]
        if place.component is not None and isinstance(old, Vector):
            new = converted(value, Type(old.kind.name, old.kind))
            term = new.term if isinstance(new, Scalar) else terms.unknown("a lane", old.kind)
            parts = list(old.parts)
            if place.component < len(parts):
                parts[place.component] = term
            self.cells[place.cell] = Vector(tuple(parts), old.kind)
            return new
        pointer = isinstance(value, (Pointer, Address))
        if pointer and isinstance(old, Opaque) and old.type.name != "*":
            self.refuse(node, "a pointer in a struct is not followed")
        self.cells[place.cell] = self.as_held(old, value)
        return self.cells[place.cell]

    @staticmethod
    def as_held(old: Value, value: Value) -> Value:
        """A value as a variable holds it that held another."""
        if isinstance(old, Scalar):
            return converted(value, Type(old.kind.name, old.kind))
        if isinstance(old, Vector):
            return converted(value, Type(old.kind.name, old.kind, len(old.parts)))
        if isinstance(old, Opaque):
            return value if isinstance(value, Pointer) and old.type.name == "*" else old
        return value

    # -- parts of things ---------------------------------------------------------------------------

    def _of_subscript_expression(self, node: Node) -> Value:
        place = self._element(node)
        return self.load(node, place)

    def _of_pointer_expression(self, node: Node) -> Value:
        argument = part(node, "argument")
        if node.children[0].type == "*":
            return self.load(node, self._pointed(node, self.evaluate(argument)))
        place = self.place(argument)
        if isinstance(place, (Pointer, Row)):
            return place if isinstance(place, Pointer) else place.pointer
        if isinstance(place, Place):
            return Address(place)
        return Opaque()

    def _of_field_expression(self, node: Node) -> Value:
        name = self.tree.text(part(node, "field"))
        argument = part(node, "argument")
        value = self.evaluate(argument)
        if isinstance(value, Vector) and name in _LANES and _LANES[name] < len(value.parts):
            term = value.parts[_LANES[name]]
            return Scalar(term, BOOL if term.condition else value.kind)
        if isinstance(value, Pointer) and any(c.type == "->" for c in node.children):
            self.access(node, value, "read")
        return Opaque()

    def swizzled(self, value: Value, text: str) -> Value:
        """``v.xyz``, rewritten."""
        match = ELEMENTS.search(text)
        if isinstance(value, Vector) and match is not None:
            lanes = [int(i) for i in match[1].split(",")]
            if max(lanes) < len(value.parts):
                return Vector(tuple(value.parts[i] for i in lanes), value.kind)
        return Opaque(Type("", None, 4))

    def _of_cast_expression(self, node: Node) -> Value:
        text = self.tree.text(part(node, "type"))
        value = self.evaluate(part(node, "value"))
        return self.cast(node, text, value)

    def cast(self, node: Node, text: str, value: Value) -> Value:
        """A value converted to the type that a text names."""
        if "&" in text:
            self.refuse(node, "a cast to a reference is not followed")
            return Opaque()
        pointed, star, _ = text.rpartition("*")
        if not star:
            return converted(value, type_of(text, self.types))
        if "*" in pointed:
            self.refuse(node, "a pointer to pointers is not followed")
            return Opaque()
        if isinstance(value, Address):
            self.refuse(node, "the address of a variable that is cast is not followed")
        return self.cast_pointer(value, type_of(pointed, self.types))

    def cast_pointer(self, value: Value, to: Type) -> Value:
        """A pointer that points to another type."""
        if not isinstance(value, Pointer):
            return value if isinstance(value, Function) else Opaque(Type("*"))
        whole = value._replace(base=self.index_of(value), offset=terms.const(0), dims=())
        of = value.array.size
        if to == value.type and value.parts == 1:
            return whole._replace(step=value.step)
        if of is None and value.parts == 1 and value.step == in_elements(value.type)[1]:
            (one, _), (other, many) = in_elements(value.type), in_elements(to)
            if one == other:  # the array's elements, of whatever size
                return whole._replace(type=to, step=many, parts=1)
        if value.parts != 1 or of is None or to.size is None:
            exact = value.parts == 1 and to.size == of and of is not None
            return whole._replace(type=to, step=int(exact), parts=1)
        if to.size % of == 0:
            return whole._replace(type=to, step=to.size // of, parts=1)
        if of % to.size == 0:
            return whole._replace(type=to, step=1, parts=of // to.size)
        return whole._replace(type=to, step=0, parts=1)

    def _of_call_expression(self, node: Node) -> Value:
        return self.call(node)
