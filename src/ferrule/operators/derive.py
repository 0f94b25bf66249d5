"""Derivatives of an op, derived from its Metal body."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..errors import KernelError
from ..rules.argument import Argument
from ..rules.expression import Expression
from ..rules.grammar import parse
from ..rules.rule import Rule
from .bodies import KernelBody
from .derivatives import cotangent_names, is_real

if TYPE_CHECKING:
    from ..source.derivatives.names import Meaning
    from ..source.derivatives.nodes import Block, Type
    from ..source.derivatives.nodes import Expression as Node
    from ..source.derivatives.reverse import Wanted
    from ..source.derivatives.tapes import Tape
    from .declared import Declared

TAPE = "fr_tape"  # the output that keeps what loops need


def jvp_of(op: Declared, wrt: Collection[str] | None) -> tuple[Rule, list[KernelBody]]:
    """The rule and bodies of the op that computes the tangents of an op's outputs.

    Raises:
        KernelError: the op has no Metal body, or ``wrt`` names what has no derivative.
        DialectError: something in the body has no derivative; says the line, and what to write.
    """
    from ..source.derivatives.forward import forward
    from ..source.derivatives.printing import block

    bodies = derivable(op, "derive_jvp")
    inputs = differentiated(op, "derive_jvp", wrt)
    tangents = tuple(_tangent(a) for a in op.rule.inputs if a.name in inputs)
    outputs = tuple(map(_tangent, op.rule.declared))
    names = {a.name for a in (*op.rule.inputs, *op.rule.declared)}
    for a in (*tangents, *outputs):
        if a.name in names:
            raise KernelError(
                f"[op] `derive_jvp` of op {op.name!r}: {a.name!r} would be an argument of the op, "
                "and a tangent, too; a second derivative wants names of its own: rename the "
                "argument, or write the op anew."
            )
    rule = Rule((*op.rule.inputs, *tangents), outputs, op.rule.choices, op.rule.conditions)
    stored = [a.name for a in op.rule.declared if is_real(a)]
    asked = "".join(f"(void)has_{a.name};\n" for a in tangents if a.optional)

    def made(body: KernelBody) -> KernelBody:
        text = block(forward(body.kernel.name, read_body(op, body), inputs, stored))
        like = {a.name: f"{a.name}_tangent" for a in op.rule.declared}
        return _like(body, f"{op.name}_jvp", rule, asked + text, like)

    return rule, list(map(made, bodies))


def derived_vjp(
    op: Declared,
    wrt: Collection[str] | None,
    tape_limit: int | str,
    trips: Mapping[str, str] | None,
) -> tuple[Any, Any]:
    """The op that computes gradients, and what to register: it, or what chooses by the dtype.

    Gradients are added up in float32, but of float64: so an op whose dtypes may be both has two.
    """
    limit = _bytes(op, tape_limit)
    kinds = _floats(op)
    nodes_of = functools.cache(functools.partial(read_body, op))  # the same for both

    def made(real: str) -> Any:
        name = f"{op.name}_vjp" + "_float64" * (real == "float64")
        op_type: type[Any] = type(op)
        return op_type(name, *vjp_of(op, nodes_of, wrt, real, limit, trips), op.batch)

    narrow = kinds != {"float64"}
    first = made("float32" if narrow else "float64")
    if not narrow or "float64" not in kinds:
        return first, first
    wide = made("float64")

    def vjp(primals: Sequence[Any], cotangents: Sequence[Any], outputs: Sequence[Any]) -> Any:
        is_wide = any(str(getattr(c, "dtype", "")).endswith("float64") for c in cotangents)
        chosen = wide if is_wide else first
        given = [c for c, a in zip(cotangents, op.rule.declared, strict=True) if _has_cotangent(a)]
        results = chosen(*primals, *given)
        names = [a.name for a in chosen.rule.declared]
        found = dict(zip(names, results if len(names) > 1 else (results,), strict=True))
        return tuple(found.get(f"{a.name}_grad") for a in op.rule.inputs)

    return first, (vjp, f"{first.digest} {wide.digest}")


def _floats(op: Declared) -> set[str]:
    """The dtypes that differentiated inputs may have."""
    found: set[str] = set()
    for a in filter(is_real, op.rule.inputs):
        if a.dtype in dtypes.BY_NAME:
            found.add(a.dtype)
        else:
            found |= {*op.rule.choices.get(a.dtype, ("float32", "float64"))}
    return found


def _has_cotangent(a: Argument) -> bool:
    return is_real(a) and not a.constant


def _bytes(op: Declared, limit: int | str) -> int:
    """A number of bytes, as ``tape_limit`` says it.

    Raises:
        KernelError: it says none.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kKMG]?)i?B?\s*", str(limit))
    if match is None or isinstance(limit, bool):
        raise KernelError(
            f"[op] `tape_limit` of `derive_vjp` of op {op.name!r}: got {limit!r}; expected a "
            'number of bytes, such as 1 << 30, "64MB" or "1GB".'
        )
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def vjp_of(
    op: Declared,
    nodes_of: Callable[[KernelBody], Block],
    wrt: Collection[str] | None,
    real: str,
    tape_limit: int,
    trips: Mapping[str, str] | None,
) -> tuple[Rule, list[KernelBody]]:
    """The rule and bodies of the op that computes the gradients of an op's inputs.

    Args:
        nodes_of: reads a body, as `read_body` does.
        real: the dtype of gradients.
        tape_limit: the most bytes that a call may keep in device memory.
        trips: by variable that counts a loop, the most rounds of it, of the rule's sizes.

    Raises:
        KernelError: the op has no Metal body, or ``wrt`` names what has no derivative.
        DialectError: something in the body has no derivative; says the line, and what to write.
    """
    from ..source.derivatives.printing import block
    from ..source.derivatives.reverse import reverse

    bodies = derivable(op, "derive_vjp")
    inputs = differentiated(op, "derive_vjp", wrt)
    optional = [a.name for a in op.rule.inputs if a.optional and a.name in inputs]
    if optional:
        raise KernelError(
            f"[op] `derive_vjp` of op {op.name!r}: input {optional[0]!r} may be None, and its "
            "gradient is not derived; name the others by wrt=[…], or declare the derivative by "
            "hand."
        )
    stored = list(filter(_has_cotangent, op.rule.declared))
    cotangents = {a.name: a._replace(name=_cotangent_name(op, a.name)) for a in stored}
    gradients = {
        a.name: a._replace(name=f"{a.name}_grad", dtype=real, optional=False)
        for a in op.rule.inputs
        if a.name in inputs
    }
    sizes = _Sizes(op, trips or {})
    derived = [
        (body, reverse(nodes_of(body), sizes.wanted(body, gradients, cotangents, real)))
        for body in bodies
    ]
    outputs = list(gradients.values())
    conditions = list(op.rule.conditions)
    kept = [sizes.numbers(body, made.tape) for body, made in derived if made.tape.segments]
    if kept:
        most = kept[0] if len(kept) == 1 else f"max({', '.join(kept)})"
        limit = tape_limit // dtypes.BY_NAME[real].itemsize
        conditions.append(parse(f"{most} <= {limit}"))
        outputs.append(Argument(TAPE, (parse(most),), real, constant=True))
    rule = Rule(
        (*op.rule.inputs, *cotangents.values()), tuple(outputs), op.rule.choices, tuple(conditions)
    )
    asked = "".join(f"(void)has_{a.name};\n" for a in op.rule.inputs if a.optional)
    like = {name: a.name for name, a in cotangents.items()}
    return rule, [
        _like(body, f"{op.name}_vjp", rule, asked + block(made.body), like, made.header)
        for body, made in derived
    ]


class _Sizes:
    """What integers are known before a call, and as what the rule and the text call them."""

    def __init__(self, op: Declared, trips: Mapping[str, str]) -> None:
        self._op, self._trips = op, trips
        rule = op.rule
        self._dims = [*rule.dim_names, *rule.star_sizes]
        numbers = [a.name for a in rule.inputs if a.dims is None and _is_integer(a.dtype)]
        self._known = {name: _name(name) for name in (*self._dims, *numbers)}
        for a in (*rule.inputs, *rule.declared):
            for i, dim in enumerate(a.dims or ()):
                if not isinstance(dim, Expression):
                    break
                self._known[f"{a.name}_shape[{i}]"] = self._node(dim)

    def wanted(
        self,
        body: KernelBody,
        gradients: Mapping[str, Argument],
        cotangents: Mapping[str, Argument],
        real: str,
    ) -> Wanted:
        """What reverse mode is asked for."""
        from ..source.derivatives.nodes import Array, Name
        from ..source.derivatives.reverse import Wanted

        kind = _type_of(real, {})
        types = _types(self._op.rule, body)
        grid, group = (
            [self._node(e) for e in axes] for axes in (body.grid, body.threadgroup)
        )  # may add sizes
        sizes = dict(self._known)
        for name, value in body.template:
            if isinstance(value, Expression):
                sizes[name] = self._node(value)
            elif isinstance(value, int):
                sizes[name] = self._node(Expression(("int", int(value))))
        return Wanted(
            kernel=body.kernel.name,
            gradients={n: Array(a.name, "device", kind) for n, a in gradients.items()},
            cotangents={
                n: Array(a.name, "device", _type_of(a.dtype, types)) for n, a in cotangents.items()
            },
            scalars={
                a.name: Name(a.name, _type_of(a.dtype, types))
                for a in self._op.rule.inputs
                if a.name in gradients and not a.dims
            },
            real=kind,
            grid=[*grid, *[_one()] * 3][:3],
            threadgroup=[*group, *[_one()] * 3][:3],
            sizes=sizes,
            dims=self._dims,
            trips={n: self._node(parse(text)) for n, text in self._trips.items()},
        )

    def numbers(self, body: KernelBody, tape: Tape) -> str:
        """How many numbers a tape holds, as the rule says it."""
        for axis in body.grid:
            if "device" in str(axis):
                raise KernelError(
                    f"[op] `derive_vjp` of op {self._op.name!r}: a loop keeps something of each "
                    f"thread, and how many there are, {axis}, depends on the device; declare "
                    "bodies for devices by `when`, or the derivative by hand."
                )
        rows = " + ".join(_product(_shown(s.rounds), _shown(s.width)) for s in tape.segments)
        return _product(rows, *map(str, body.grid))

    def _node(self, e: Expression) -> Node:
        """An expression of the rule as a node; one that has no such counts as a size of its own."""
        from ..source.derivatives.nodes import INT, Binary, Literal, Name

        op, *rest = e.node
        if op == "int":
            return Literal(str(rest[0]), INT)
        if op == "name":
            return Name(rest[0], INT)
        if op in ("+", "-", "*", "//", "%"):
            a, b = (self._node(Expression(part)) for part in rest)
            return Binary(op[0], a, b, INT)
        if op == "size":
            arrays = (*self._op.rule.inputs, *self._op.rule.declared)
            dims = next((a.dims for a in arrays if a.name == rest[0]), None)
            if dims and all(isinstance(dim, Expression) for dim in dims):
                product = " * ".join(f"({dim})" for dim in dims)
                return self._node(parse(product))
        name = Name(str(e), INT)
        self._known.setdefault(name.name, name)
        if name.name not in self._dims:
            self._dims.append(name.name)
        return name


def _product(*factors: str) -> str:
    return " * ".join(f"({factor})" for factor in factors if factor != "1") or "1"


def _shown(e: Node) -> str:
    """A node as the rule says it."""
    from ..source.derivatives.nodes import Binary, Call, Literal, Name

    if isinstance(e, Binary):
        operator = "//" if e.operator == "/" else e.operator
        return f"({_shown(e.left)} {operator} {_shown(e.right)})"
    if isinstance(e, Literal):
        return e.text.rstrip("uUlL")
    if isinstance(e, Call):
        return f"{e.name}({', '.join(map(_shown, e.arguments))})"
    if isinstance(e, Name):
        return e.name
    raise TypeError(e)


def _name(name: str) -> Node:
    from ..source.derivatives.nodes import INT, Name

    return Name(name, INT)


def _one() -> Node:
    from ..source.derivatives.nodes import INT, Literal

    return Literal("1", INT)


def _is_integer(dtype: str) -> bool:
    return dtype in dtypes.BY_NAME and dtypes.BY_NAME[dtype].kind in "iu"


def _cotangent_name(op: Declared, output: str) -> str:
    """The name of an output's cotangent.

    Raises:
        KernelError: an input has it.
    """
    names = cotangent_names(op, output)
    if not names:
        raise KernelError(
            f"[op] `derive_vjp` of op {op.name!r}: '{output}_cotangent' would be an input of the "
            "op, and a cotangent, too; rename the input."
        )
    return names[0]


def read_body(op: Declared, body: KernelBody) -> Block:
    """A body's statements.

    Raises:
        DialectError: something in it is not followed.
    """
    from ..source.derivatives.reader import read

    return read(body.kernel, meanings(op, body))


def derivable(op: Declared, what: str) -> list[KernelBody]:
    """The op's Metal bodies, of which calls choose by their conditions.

    Raises:
        KernelError: it has none, writes in place, or its text does not say all.
    """
    found = [b for b in op.implementations if isinstance(b, KernelBody) and b.kind == "metal"]
    if op.in_place or not found:
        why = "writes in place" if op.in_place else "has no Metal body"
        raise KernelError(
            f"[op] `{what}` of op {op.name!r}: the op {why}; derivatives are derived from Metal "
            "bodies that write outputs of their own."
        )
    _check_derivable(op, what, found)
    return found


def _check_derivable(op: Declared, what: str, bodies: Sequence[KernelBody]) -> None:
    """Refuse what a body's text does not say.

    Raises:
        KernelError: inputs have strides of their own, outputs may be absent, numbers are complex.
    """
    why = ""
    if not all(body.contiguous for body in bodies):
        why = "reads inputs by their strides (ensure_row_contiguous=False); tangents have others"
    elif any(a.present is not None for a in op.rule.declared):
        why = "has outputs that some calls do not have"
    names = {a.dtype for a in (*op.rule.inputs, *op.rule.declared)}
    names |= {n for name in names for n in op.rule.choices.get(name, ())}
    if any(n in dtypes.BY_NAME and dtypes.BY_NAME[n].kind == "c" for n in names):
        why = "has complex numbers"
    if why:
        raise KernelError(
            f"[op] `{what}` of op {op.name!r}: the op {why}; declare the derivative by hand."
        )


def differentiated(op: Declared, what: str, wrt: Collection[str] | None) -> frozenset[str]:
    """The inputs that are differentiated.

    Raises:
        KernelError: one has no derivative.
    """
    real = [a.name for a in op.rule.inputs if is_real(a) and _may_be_float(op, a)]
    names = real if wrt is None else [wrt] if isinstance(wrt, str) else list(wrt)
    for name in names:
        if name not in real:
            raise KernelError(
                f"[op] `{what}` of op {op.name!r}: wrt names {name!r}; expected some of the "
                f"inputs that have a derivative: {', '.join(real)}."
            )
    return frozenset(names)


def _may_be_float(op: Declared, a: Argument) -> bool:
    """Whether a dtype variable may be a float."""
    choices = op.rule.choices.get(a.dtype)
    return choices is None or any(dtypes.BY_NAME[name].kind == "f" for name in choices)


def _tangent(a: Argument) -> Argument:
    return a._replace(name=f"{a.name}_tangent")


def meanings(op: Declared, body: KernelBody) -> dict[str, Meaning]:
    """What the names mean that a body does not declare."""
    from ..source.derivatives.nodes import BOOL, INT, LONG, Array, Name

    rule = op.rule
    types = _types(rule, body)
    given: dict[str, Meaning] = dict(types)
    for argument in (*rule.inputs, *rule.declared):
        name, kind = argument.name, _type_of(argument.dtype, types)
        if not argument.dims and argument in rule.inputs:
            given[name] = Name(name, kind)
        else:
            given[name] = Array(name, "device", kind, written=argument not in rule.inputs)
        given[f"{name}_shape"] = Array(f"{name}_shape", "constant", INT)
        given[f"{name}_strides"] = Array(f"{name}_strides", "constant", LONG)
        given[f"{name}_ndim"] = Name(f"{name}_ndim", INT)
        if argument.optional:
            given[f"has_{name}"] = Name(f"has_{name}", BOOL)
    for name in (*rule.dim_names, *rule.star_sizes):
        given.setdefault(name, Name(name, INT))
    for name, value in body.template:
        if name not in types:
            given[name] = Name(name, BOOL if isinstance(value, bool) else INT)
    return given


def _types(rule: Rule, body: KernelBody) -> Mapping[str, Type]:
    """The types that a body's text names: dtype variables, and those of its template."""
    from ..source.derivatives.nodes import Type

    found: dict[str, Type] = {}
    for argument in (*rule.inputs, *rule.declared):
        name = argument.dtype
        if name not in dtypes.BY_NAME:
            choices = [dtypes.BY_NAME[n] for n in rule.choices.get(name, ())]
            floats = [d.kind == "f" for d in choices]
            found[name] = Type(name, 1, not floats or any(floats))
    for name, value in body.template:
        if isinstance(value, dtypes.Dtype):
            found[name] = _type_of(value.name, {})
        elif str(value) in found:
            found[name] = found[str(value)]
    return found


def _type_of(dtype: str, types: Mapping[str, Type]) -> Type:
    from ..source.derivatives.nodes import Type
    from ..source.derivatives.types import type_named

    return types.get(dtype) or type_named(dtypes.BY_NAME[dtype].metal, {}) or Type(dtype)


def _renamed(data: Any, arrays: Mapping[str, str]) -> Any:
    """Expressions, as JSON, in which ``size`` and ``ndim`` are of other arrays."""
    if not isinstance(data, (list, tuple)):
        return data
    if len(data) == 2 and data[0] in ("size", "ndim") and data[1] in arrays:
        return [data[0], arrays[data[1]]]
    return [_renamed(part, arrays) for part in data]


def _like(
    body: KernelBody,
    name: str,
    rule: Rule,
    source: str,
    arrays: Mapping[str, str],
    header: str | None = None,
) -> KernelBody:
    """A body with another text, launched as the one that it was made of.

    Args:
        arrays: by output, the array that is like it, where the launch asks for its size.
        header: of one that adds to its outputs, whose elements begin as zeros.
    """
    data: dict[str, Any] = {**body.to_json(), "name": name, "source": source}
    for key in ("grid", "threadgroup", "template", "shared_memory", "when"):
        data[key] = _renamed(data[key], arrays)
    adds = header is not None
    data |= {"header": header or "", "init_value": 0.0 if adds or body.fill is not None else None}
    data["atomic_outputs"] = not adds and body.kernel.atomic_outputs
    return KernelBody.from_json(name, rule, data)
