"""Calls: casts, functions of the library, atomics, barriers, and the author's own functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from .. import words
from ..dialect import SIMD_OPS
from ..loops.assignments import WRITES_ARGUMENTS
from ..syntax import call_arguments, called, callee, field, kinds, part
from . import terms
from .arithmetic import binary, fits
from .attributes import attribute
from .expressions import Expressions
from .functions import Parameter, parameters_of, template_parameters
from .kinds import INT, LONG, Type, common, of_kind, type_of
from .model import Times
from .shapes import whole_product
from .terms import Term
from .values import (
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
    as_kind,
    as_number,
    condition,
    converted,
    fresh,
    fresh_like,
    merged,
    number,
)

# What the rewriting of a text writes around operands, and what gives one of its arguments.
_SAME = frozenset({"fr_bits", "fr_factor", "fr_count", "pick"})
_ELEMENTWISE = frozenset({"min", "max", "clamp", "abs", "select", "ceildiv"})
_VOTES = frozenset({"simd_all", "simd_any", "simd_is_first", "quad_all", "quad_any",
                    "quad_is_first"})  # fmt: skip
_CASTS = frozenset({"static_cast", "reinterpret_cast", "const_cast", "fr_as"})
_DEEPEST = 12
# What functions of values alone have none of.
_OF_MEMORY = (
    "subscript_expression", "pointer_expression", "pointer_declarator", "reference_declarator",
    "abstract_pointer_declarator", "abstract_reference_declarator", "lambda_expression",
)  # fmt: skip
_PREDICATES = frozenset({"isnan", "isinf", "isfinite", "isnormal", "signbit", "any", "all"})
# Of the library's functions of integers: those whose results are of their operand's type.
_LIKE_FIRST = words(
    "popcount clz ctz reverse_bits rotate mulhi absdiff hadd rhadd addsat subsat mad24 mul24 "
    "madhi madsat extract_bits insert_bits"
)
_CHANGING = words("assignment_expression update_expression")
_OF_METAL = re.compile(r"(::)?(fr::|metal::|fast::|precise::|simd::)")
_MISSING = Opaque(Type("an argument that is not given"))
_OF_LIBRARY = _ELEMENTWISE | _VOTES | _PREDICATES | _LIKE_FIRST | SIMD_OPS


class Calls(Expressions):
    """A machine that evaluates calls.

    Attributes:
        functions: of the header, by their names.
    """

    functions: dict[str, list[Function]]
    structs: frozenset[str]

    def call(self, node: Node) -> Value:
        """The value of a call."""
        function = part(node, "function")
        name, text = callee(self.tree, node), self.tree.text(function)
        if function.type == "field_expression":
            return self._method(node, function)
        if function.type == "lambda_expression":
            value = self.evaluate(function)
            return self._inlined(node, value, ()) if isinstance(value, Function) else Opaque()
        if len(call_arguments(node)) > 1 and any(kinds(part(node, "arguments"), *_CHANGING)):
            self.refuse(node, "in which order arguments are evaluated is not known")
        if function.type == "qualified_identifier" and not _OF_METAL.match(text):
            self.refuse(node, f"{text} is not followed")
        own = self.look_up(name) if function.type == "identifier" else None
        if isinstance(own, Function):
            return self._inlined(node, own, ())
        if name in self.functions and not text.startswith(("metal::", "::fr::")):
            if name in _OF_LIBRARY:
                self.refuse(node, f"which {name} is meant, the library's or another, is not known")
            return self._own(node, name, function)
        if name in _CASTS or name == "as_type":
            return self._cast_call(node, name, function)
        if name in ("threadgroup_barrier", "simdgroup_barrier"):
            return self._barrier(node, name)
        arguments = call_arguments(node)
        if name == "prefetch":  # reads nothing that could fault
            for argument in arguments:
                self.evaluate(argument)
            return Opaque()
        if name in ("simdgroup_load", "simdgroup_store"):
            return self._matrix(node, name, arguments)
        if name.startswith("atomic_"):
            return self._atomic(node, name, arguments)
        if function.type == "parenthesized_expression" or isinstance(own, (Place, Reference)):
            self.refuse(node, f"what {self.tree.text(function)} calls is not known")
        type_ = self._constructed(function)
        values = [self.evaluate(a) for a in arguments]
        if type_ is not None:
            return self._construct(node, type_, values)
        return self._library(node, name, values)

    # -- the library -------------------------------------------------------------------------------

    def _library(self, node: Node, name: str, values: list[Value]) -> Value:
        if name in WRITES_ARGUMENTS and any(isinstance(v, (Scalar, Vector)) for v in values):
            self.refuse(node, f"what {name} writes is not followed")
        if name == "elem_to_loc" and (place := self._location(node, values)) is not None:
            return place
        for value in values:
            if isinstance(value, (Pointer, Address, Function)):
                self.refuse(node, f"{name}, which is given a pointer, is not followed")
                return Opaque()
        if name in _SAME and values:
            return values[0]
        if name in _ELEMENTWISE:
            return self._elementwise(node, name, values)
        if name in _VOTES or name in _PREDICATES:
            lanes = [v for v in values if isinstance(v, Vector)]
            if name in ("any", "all") and len(lanes) == 1:
                parts = [as_condition(Scalar(p, lanes[0].kind)) for p in lanes[0].parts]
                return condition((terms.or_ if name == "any" else terms.and_)(*parts))
            return condition(terms.unknown(name, None))
        if (name in SIMD_OPS or name in _LIKE_FIRST) and values:
            return fresh_like(values[0], name)
        return Opaque(Type("float", None, 1, 4))

    def _location(self, node: Node, values: list[Value]) -> Value | None:
        """Where an element lies, of an array whose rows have no gaps: as `elem_to_loc` finds it."""
        if len(values) != 4 or not (
            isinstance(values[0], Scalar) and isinstance(values[3], Scalar)
        ):
            return None
        product = whole_product(*values[1:])
        if product is None:
            return None
        function = part(node, "function")
        element = values[0]
        if function.type == "template_function":
            explicit = part(function, "arguments").named_children
            converted_ = converted(element, type_of(self.tree.text(explicit[0]), self.types))
            if not isinstance(converted_, Scalar):
                return None
            element = converted_
        index = as_number(element)
        some = terms.lt(terms.const(0), index)
        self.oblige(node, "division", terms.ite(some, product, terms.const(1)), LONG)
        return Scalar(terms.ite(some, terms.fmod(index, product), terms.const(0)), element.kind)

    def _elementwise(self, node: Node, name: str, values: list[Value]) -> Value:
        vectors = [v for v in values if isinstance(v, Vector)]
        if vectors:
            many = len(vectors[0].parts)
            rows: list[list[Value]] = [
                [Scalar(v.parts[i], v.kind) if isinstance(v, Vector) else v for v in values]
                for i in range(many)
            ]
            parts = [self._elementwise(node, name, row) for row in rows]
            found = tuple(as_number(p) for p in parts if isinstance(p, Scalar))
            return Vector(found, vectors[0].kind) if len(found) == many else Opaque()
        if name == "select" and len(values) == 3:
            return merged(as_condition(values[2]), values[1], values[0])
        numbers = [v for v in values if isinstance(v, Scalar)]
        if len(numbers) < len(values) or not numbers:
            return Opaque(next((v.type for v in values if isinstance(v, Opaque)), Type("")))
        kind = numbers[0].kind if name != "ceildiv" else common(numbers[0].kind, numbers[-1].kind)
        for each in numbers[1:]:
            kind = kind if each.kind == kind else common(kind, each.kind)
        x, *rest = (as_kind(v, kind) for v in numbers)
        if name == "abs":
            return Scalar(fits(self, node, terms.largest(x, terms.neg(x)), kind), kind)
        if name == "ceildiv" and rest:
            one = Scalar(terms.const(1), INT)
            up = binary(self, node, "+", Scalar(x, kind), Scalar(rest[0], kind))
            return binary(self, node, "/", binary(self, node, "-", up, one), numbers[1])
        if name == "clamp" and len(rest) == 2:
            return Scalar(terms.least(terms.largest(x, rest[0]), rest[1]), kind)
        for y in rest:
            x = terms.least(x, y) if name == "min" else terms.largest(x, y)
        return Scalar(x, kind)

    def _method(self, node: Node, function: Node) -> Value:
        name, text = self.tree.text(part(function, "field")), self.tree.text(node)
        base = self.evaluate(part(function, "argument"))
        if re.match(r"sw[zr]\b", name):
            return self.swizzled(base, text[text.rfind(name) :])
        for argument in call_arguments(node):
            self.evaluate(argument)
        self.refuse(node, f"the method {name} is not followed")
        return Opaque(Type("", None, 64))

    def _cast_call(self, node: Node, name: str, function: Node) -> Value:
        target = next(iter(part(function, "arguments").named_children), None) if (
            function.type == "template_function"
        ) else None  # fmt: skip
        if function.type == "qualified_identifier":
            inner = next(kinds(function, "template_function"), None)
            target = inner and next(iter(part(inner, "arguments").named_children), None)
        text, arguments = self.tree.text(target), call_arguments(node)
        values = [self.evaluate(a) for a in arguments]
        if len(values) != 1 or not text:
            self.refuse(node, f"{name} is not followed")
            return Opaque()
        if name != "as_type":
            return self.cast(node, text, values[0])
        to, value = type_of(text, self.types), values[0]
        if isinstance(value, Scalar) and to.kind is not None and to.kind.bits == value.kind.bits:
            return converted(value, to)
        return fresh(to, "as_type")

    def _constructed(self, function: Node) -> Type | None:
        """The type that a call makes a value of."""
        text = self.tree.text(function).strip("() ")
        found = type_of(text, self.types)
        known = found.kind is not None or found.size is not None or text in self.types
        return found if known else None

    def _construct(self, node: Node, to: Type, values: list[Value]) -> Value:
        if any(isinstance(v, (Pointer, Address, Function)) for v in values):
            self.refuse(node, f"{to.name}, which is made of a pointer, is not followed")
            return Opaque(to)
        if not values and to.kind is not None:
            return converted(number(0), to)
        if len(values) == 1:
            return converted(values[0], to)
        if to.kind is None:
            return Opaque(to)
        parts: list[Term] = []
        for value in values:
            if isinstance(value, Scalar):
                parts.append(terms.wrap(as_number(value), to.kind))
            elif isinstance(value, Vector):
                parts += [terms.wrap(p, to.kind) for p in value.parts]
            else:
                return fresh(to, "a vector of floats")
        return Vector(tuple(parts), to.kind) if len(parts) == to.lanes else fresh(to, "a vector")

    # -- memory and barriers -----------------------------------------------------------------------

    def _atomic(self, node: Node, name: str, arguments: Sequence[Node]) -> Value:
        values = [self.evaluate(a) for a in arguments]
        place = values[0] if values else None
        for other in values[1:]:  # what compare_exchange found there
            if isinstance(other, Address):
                old = self.cells[other.place.cell]
                self.cells[other.place.cell] = fresh_like(old, name)
        if not isinstance(place, Pointer):
            self.refuse(node, f"what {name} works on is not known")
            return Opaque()
        self.access(arguments[0], place, "atomic")
        if "compare_exchange" in name:
            return condition(terms.unknown(name, None))
        return fresh(place.type, name)

    def _matrix(self, node: Node, name: str, arguments: Sequence[Node]) -> Value:
        """``simdgroup_load`` and ``simdgroup_store``: each lane has two neighbours of one row."""
        self.place(arguments[0])
        values = [self.evaluate(a) for a in arguments[1:]]
        pointer = values[0] if values else None
        numbers = [as_number(v) for v in values[1:2] if isinstance(v, Scalar)]
        origin = values[2] if len(values) > 2 else Vector((terms.const(0),) * 2, INT)
        turned = as_condition(values[3]) if len(values) > 3 else terms.FALSE
        known = isinstance(origin, Vector) and len(numbers) == len(values[1:2])
        if not isinstance(pointer, Pointer) or not isinstance(origin, Vector) or not known:
            self.refuse(node, f"what {name} is given is not followed")
            return Opaque()
        stride = numbers[0] if numbers else terms.const(8)
        lane = attribute("thread_index_in_simdgroup")
        half = terms.fdiv(lane, terms.const(2))
        # The layout that bodies rely on, too: q = lane / 4, row (q & 4) + lane / 2 % 4, and
        # column (q & 2) * 2 + lane % 2 * 2.
        row = terms.add(terms.mul(terms.const(4), terms.fdiv(lane, terms.const(16))),
                        terms.fmod(half, terms.const(4)))  # fmt: skip
        quarter = terms.fmod(terms.fdiv(lane, terms.const(8)), terms.const(2))
        column = terms.add(terms.mul(terms.const(4), quarter),
                           terms.mul(terms.const(2), terms.fmod(lane, terms.const(2))))  # fmt: skip
        for second in (0, 1):
            across = terms.add(column, terms.const(second))
            x, y = terms.ite(turned, row, across), terms.ite(turned, across, row)
            x, y = terms.add(x, origin.parts[0]), terms.add(y, origin.parts[1])
            offset = terms.add(pointer.offset, terms.mul(stride, y), x)
            element = pointer._replace(offset=offset)
            self.access(node, element, "read" if name == "simdgroup_load" else "write")
        return Opaque()

    def _barrier(self, node: Node, name: str) -> Value:
        if not all(map(self.is_uniform, self.branches)):
            why = f"a {name} that some threads of the group may not reach"
            self.refuse(node, why, hides=False)
        flags = self.tree.text(field(node, "arguments"))
        group, device = "mem_threadgroup" in flags, "mem_device" in flags
        whole = name == "threadgroup_barrier"
        steps = (whole and group, whole and device, group, device)
        one = terms.const(1)
        self.times = Times(
            *(terms.add(t, one) if s else t for t, s in zip(self.times, steps, strict=True))
        )
        return Opaque()

    # -- the author's functions --------------------------------------------------------------------

    def _own(self, node: Node, name: str, function: Node) -> Value:
        many = len(call_arguments(node))
        fitting = []
        for each in self.functions[name]:
            parameters = parameters_of(each)
            if sum(p.default is None for p in parameters) <= many <= len(parameters):
                fitting.append(each)
        if len(fitting) != 1:
            values = [self.evaluate(argument) for argument in call_arguments(node)]
            own = self.functions.keys()
            plain = fitting and all(
                _is_plain(f) and not called(f.tree, f.node) & own for f in fitting
            )
            if not plain or any(isinstance(v, (Pointer, Address, Function)) for v in values):
                self.refuse(node, f"which {name} is meant is not known")
            return Opaque()
        explicit: list[Node] = []
        if function.type == "template_function":
            explicit = part(function, "arguments").named_children
        return self._inlined(node, fitting[0], explicit)

    def _inlined(self, node: Node, function: Function, explicit: Sequence[Node]) -> Value:
        """The value of a call of the author's function, which is run here."""
        parameters = parameters_of(function)
        arguments: list[Node | None] = list(call_arguments(node))
        arguments += [None] * (len(parameters) - len(arguments))
        body = field(function.node, "body")
        if self.depth >= _DEEPEST or len(arguments) != len(parameters) or body is None:
            self.refuse(node, "a call too deep, or of other arguments, is not followed")
            return Opaque()
        scope: dict[str, Named] = {}
        templates = template_parameters(function)
        for (name, is_type), argument in zip(templates.items(), explicit, strict=False):
            text = self.tree.text(argument)
            scope[name] = type_of(text, self.types) if is_type else self.evaluate(argument)
        given = [self._argument(p, a) for p, a in zip(parameters, arguments, strict=True)]
        for parameter, value in zip(parameters, given, strict=True):
            self._deduce(function, parameter, value, templates, scope)
        for name, is_type in templates.items():
            if name not in scope:
                scope[name] = Type(name) if is_type else Opaque()
                if not is_type:
                    self.refuse(node, f"the template's {name} is not known", hides=False)
        caller = self.tree, self.where, self.scopes, self.path
        outer = function.scopes if function.scopes is not None else (self.scopes[0],)
        self.tree, self.where, self.scopes = function.tree, function.where, [*outer, scope]
        self.depth += 1
        for parameter, value in zip(parameters, given, strict=True):
            self._bind(parameter, value, scope)
        jumps = self.run_all(body.named_children)
        result: Value = Opaque()
        returned = [jump for jump in jumps if jump.kind == "return"]
        for i, jump in enumerate(reversed(returned)):
            value = jump.value if jump.value is not None else Opaque()
            there = terms.and_(*jump.path[len(caller[3]) :])
            result = value if i == 0 else merged(there, value, result)
        result = self._as_returned(function, result)
        self.depth -= 1
        self.tree, self.where, self.scopes, self.path = caller
        return result

    def _as_returned(self, function: Function, value: Value) -> Value:
        type_node = field(function.node, "type")
        if type_node is None or self.tree.text(type_node) == "auto":
            return value
        return converted(value, type_of(self.tree.text(type_node), self.types))

    def _argument(self, parameter: Parameter, argument: Node | None) -> Named:
        """What a parameter is given: a place, where it is a reference that may be written."""
        if argument is None:
            return _MISSING
        if parameter.reference and parameter.is_const and argument.type == "identifier":
            named, kind = self.look_up(self.tree.text(argument)), type_of(parameter.type, {}).kind
            held = self.cells[named.cell] if isinstance(named, Place) else None
            if isinstance(named, Place) and isinstance(held, Scalar) and kind in (None, held.kind):
                return named  # it sees what others do to the variable meanwhile
        if parameter.reference and not parameter.is_const:
            place = self.place(argument)
            if isinstance(place, Place) and place.component is None:
                return place
            if isinstance(place, (Pointer, Row)):
                return Reference(place) if isinstance(place, Pointer) else place.pointer
            self.refuse(argument, "what a reference is given is not followed")
            return Opaque()
        value = self.evaluate(argument)
        return value

    def _deduce(
        self, function: Function, parameter: Parameter, value: Named, templates: dict[str, bool],
        scope: dict[str, Named],
    ) -> None:  # fmt: skip
        name = type_of(parameter.type, {}).name
        if not templates.get(name) or name in scope:
            return
        held = self.cells[value.cell] if isinstance(value, Place) else value
        if isinstance(held, Reference):
            held = held.pointer
        if isinstance(held, (Scalar, Vector)):
            lanes = len(held.parts) if isinstance(held, Vector) else 1
            scope[name] = of_kind(held.kind)._replace(lanes=lanes)
        elif isinstance(held, (Pointer, Opaque)):
            scope[name] = held.type

    def _bind(self, parameter: Parameter, value: Named, scope: dict[str, Named]) -> None:
        if not parameter.name:
            return
        if value == _MISSING:
            default = parameter.default
            value = Opaque() if default is None else self.evaluate(default)
        if isinstance(value, (Place, Reference, Function)):
            scope[parameter.name] = value
            return
        if not isinstance(value, (Pointer, Address)):
            if parameter.pointer:
                value = Opaque(Type("*"))
            elif parameter.type.split()[-1:] != ["auto"]:
                value = converted(value, type_of(parameter.type, self.types))
        scope[parameter.name] = Place(self.new_cell(value))


def _is_plain(function: Function) -> bool:
    """Whether a function is of values alone: it reads and writes no memory."""
    tree, node = function.tree, function.node
    if re.search("barrier|atomic|prefetch|\\[|for|while", tree.text(node)) or any(
        kinds(node, *_OF_MEMORY)
    ):
        return False
    return not called(tree, node) & {"simdgroup_load", "simdgroup_store"}
