"""Derivatives of an op, derived from its Metal body."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..errors import KernelError
from ..rules.argument import Argument
from ..rules.rule import Rule
from .bodies import KernelBody
from .derivatives import is_real

if TYPE_CHECKING:
    from ..source.derivatives.names import Meaning
    from ..source.derivatives.nodes import Type
    from .declared import Declared


def jvp_of(op: Declared, wrt: Collection[str] | None) -> tuple[Rule, list[KernelBody]]:
    """The rule and bodies of the op that computes the tangents of an op's outputs.

    Raises:
        KernelError: the op has no Metal body, or ``wrt`` names what has no derivative.
        DialectError: something in the body has no derivative; says the line, and what to write.
    """
    from ..source.derivatives.forward import forward
    from ..source.derivatives.printing import block
    from ..source.derivatives.reader import read

    bodies = metal_bodies(op, "derive_jvp")
    check_derivable(op, "derive_jvp", bodies)
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
        nodes = read(body.kernel, meanings(op, body))
        text = block(forward(body.kernel.name, nodes, inputs, stored))
        return _like(body, f"{op.name}_jvp", rule, asked + text)

    return rule, list(map(made, bodies))


def metal_bodies(op: Declared, what: str) -> list[KernelBody]:
    """The op's Metal bodies, of which calls choose by their conditions.

    Raises:
        KernelError: it has none, or writes in place.
    """
    found = [b for b in op.implementations if isinstance(b, KernelBody) and b.kind == "metal"]
    if op.in_place or not found:
        why = "writes in place" if op.in_place else "has no Metal body"
        raise KernelError(
            f"[op] `{what}` of op {op.name!r}: the op {why}; derivatives are derived from Metal "
            "bodies that write outputs of their own."
        )
    return found


def check_derivable(op: Declared, what: str, bodies: Sequence[KernelBody]) -> None:
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
    real = [a.name for a in op.rule.inputs if is_real(a)]
    names = real if wrt is None else [wrt] if isinstance(wrt, str) else list(wrt)
    for name in names:
        if name not in real:
            raise KernelError(
                f"[op] `{what}` of op {op.name!r}: wrt names {name!r}; expected some of the "
                f"inputs that have a derivative: {', '.join(real)}."
            )
    return frozenset(names)


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


def _like(body: KernelBody, name: str, rule: Rule, source: str) -> KernelBody:
    """A body with another text, launched as the one that it was made of."""
    data: dict[str, Any] = {**body.to_json(), "name": name, "source": source, "header": ""}
    data["init_value"] = None if body.fill is None else 0.0
    return KernelBody.from_json(name, rule, data)
