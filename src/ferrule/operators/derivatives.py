"""Check and evaluate the derivative and batching rules of an op.

A rule is itself host-neutral: `vjp` and the others call ops and array code, whatever library the
arrays belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..errors import KernelError
from ..rules.argument import Argument
from . import identity

if TYPE_CHECKING:
    from .declared import Declared

Arrays = tuple[Any, ...]


def cotangent_names(of: Declared, output: str) -> tuple[str, ...]:
    """The names that a vjp op may give the cotangent of an output, the usual one first.

    A vjp op has an input ``cotangent`` itself: there the vjp of it has ``<output>_cotangent``.
    """
    names = [f"{output}_cotangent"]
    if len(of.rule.declared) == 1:
        names.insert(0, "cotangent")
    inputs = [a.name for a in of.rule.inputs]
    return tuple(name for name in names if name not in inputs)


def is_real(argument: Argument) -> bool:
    """Whether an argument may have a derivative: its dtype is a float or a variable, and its rule
    does not call it constant."""
    if argument.dims is None or argument.constant:
        return False
    dtype = dtypes.BY_NAME.get(argument.dtype)
    return dtype is None or dtype.kind in "fc"


def match_vjp(of: Declared, rule: Declared) -> None:
    """Check that a vjp op names its arguments after the op's arrays and cotangents.

    Raises:
        KernelError: one is not, or a cotangent is missing; lists what may be named.
    """
    outputs = [a.name for a in of.rule.declared]
    cotangents = {each: name for name in outputs for each in cotangent_names(of, name)}
    inputs = [a.name for a in of.rule.inputs]
    asked = [f"{a.name}_wanted" for a in of.rule.inputs if is_real(a)]
    allowed = [*inputs, *outputs, *cotangents, *(name for name in asked if name not in inputs)]
    _check_inputs(of, "vjp", rule, allowed)
    for argument in rule.rule.inputs:
        wants = argument.name in asked and argument.name not in inputs
        if wants and (argument.dims, argument.dtype) != (None, "bool"):
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: `{argument.name}` must be bool; the vjp op "
                f"{rule.name!r} declares {argument}, expected {argument.name}:bool."
            )
    named = {cotangents[a.name] for a in rule.rule.inputs if a.name in cotangents}
    for output in of.rule.declared:
        names = cotangent_names(of, output.name)
        if not names:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: '{output.name}_cotangent' would be an input of "
                "the op, and a cotangent, too; give a function in place of the op, or rename the "
                "input."
            )
        if is_real(output) and output.name not in named:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: the vjp op {rule.name!r} has no input "
                f"{names[0]!r}, so that derivatives through output {output.name!r} would be lost."
            )
    conditional = [a.name for a in of.rule.declared if a.present is not None]
    for argument in rule.rule.inputs:
        output_name = cotangents.get(argument.name, argument.name)
        if output_name in conditional and not argument.optional:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: input {argument.name!r} of the vjp op "
                f"{rule.name!r} is None in calls without output {output_name!r}; declare it "
                f"{argument}?, and ask has_{argument.name}."
            )
    arrays = [f"{a.name}_grad" for a in of.rule.inputs if a.dims is not None]
    for output in rule.rule.declared:
        if output.name not in arrays and not output.constant:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: output {output.name!r} of the vjp op "
                f"{rule.name!r} is no gradient of an input; expected {', '.join(arrays)}."
            )


def match_jvp(of: Declared, rule: Declared) -> None:
    """Check that a jvp op names its arguments after the op's arrays and tangents.

    Raises:
        KernelError: one is not, or an output has no tangent; lists what may be named.
    """
    outputs = [a.name for a in of.rule.declared]
    inputs = [a.name for a in of.rule.inputs]
    tangents = [f"{a.name}_tangent" for a in of.rule.inputs if is_real(a)]
    for name in tangents:
        if name in inputs:
            raise KernelError(
                f"[op] `def_jvp` of op {of.name!r}: {name!r} would be an input of the op, and a "
                "tangent, too; give a function in place of the op, or rename the input."
            )
    _check_inputs(of, "jvp", rule, [*inputs, *outputs, *tangents])
    expected = [f"{a.name}_tangent" for a in of.rule.declared if not a.constant]
    names = [a.name for a in rule.rule.declared]
    if sorted(names) != sorted(expected):
        raise KernelError(
            f"[op] `def_jvp` of op {of.name!r}: the jvp op {rule.name!r} has the outputs "
            f"{', '.join(names)}; expected {', '.join(expected)}."
        )


def match_vmap(of: Declared, rule: Declared) -> None:
    """Check that a batched op has the arguments of the op that it batches.

    Raises:
        KernelError: its inputs or outputs have other names.
    """
    for kind, attribute in (("inputs", "inputs"), ("outputs", "declared")):
        expected, names = (
            [a.name for a in getattr(declared.rule, attribute)] for declared in (of, rule)
        )
        if expected != names:
            raise KernelError(
                f"[op] `def_vmap` of op {of.name!r}: the batched op {rule.name!r} has the {kind} "
                f"{', '.join(names)}; expected {', '.join(expected)}, each with one dim more in "
                "front."
            )


MATCHES = {"vjp": match_vjp, "jvp": match_jvp, "vmap": match_vmap}


def _check_inputs(of: Declared, kind: str, rule: Declared, allowed: Sequence[str]) -> None:
    for argument in rule.rule.inputs:
        if argument.name not in allowed:
            raise KernelError(
                f"[op] `def_{kind}` of op {of.name!r}: input {argument.name!r} of the {kind} op "
                f"{rule.name!r} is none of what it can be given: {', '.join(allowed)}."
            )


def spread(of: Declared, values: Sequence[Any]) -> Arrays:
    """A value per output that a call may have, None of those that it does not have."""
    there = iter(values)
    return tuple(None if a.present is False else next(there) for a in of.rule.declared)


def gathered(of: Declared, values: Sequence[Any]) -> Arrays:
    """The reverse of `spread`."""
    pairs = zip(of.rule.declared, values, strict=True)
    return tuple(value for a, value in pairs if a.present is not False)


def vjp(
    of: Declared,
    primals: Arrays,
    cotangents: Arrays,
    outputs: Arrays,
    wanted: tuple[bool, ...] | None = None,
) -> Arrays:
    """The gradient of each input, None where it has none.

    Args:
        of: the op.
        primals: its inputs, as they were given.
        cotangents, outputs: one array per output; the cotangents of those that the rule calls
            constant are zeros.
        wanted: of which inputs the gradients are wanted; None of all. A rule may leave out others.

    Raises:
        KernelError: the op has no vjp, or a function of it gives other than one per input, or one
            that asks for ``wanted`` leaves out what is.
    """
    rule = of.rules.get("vjp")
    if rule is None:
        raise missing(of, "vjp")
    inputs = of.rule.inputs
    cotangents, outputs = spread(of, cotangents), spread(of, outputs)
    asked, wanted = wanted, (True,) * len(inputs) if wanted is None else tuple(wanted)
    if rule.op is None:
        more = {"wanted": wanted} if rule.takes_wanted else {}
        result: Any = rule.function(primals, cotangents, outputs, **more)  # type: ignore[misc]
        grads = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if len(grads) != len(inputs):
            raise KernelError(
                f"[op] the vjp of op {of.name!r} returned {len(grads)} gradients; expected "
                f"{len(inputs)}, one per input ({', '.join(a.name for a in inputs)}), None for "
                "those that have none."
            )
        must_give = asked is not None and rule.gives_wanted
        for argument, is_wanted, grad in zip(inputs, wanted, grads, strict=True):
            if must_give and is_wanted and grad is None and is_real(argument):
                raise KernelError(
                    f"[op] the vjp of op {of.name!r} gave None for input {argument.name!r}, whose "
                    "gradient is wanted (wanted says True); give the gradient, or zeros like the "
                    "input where it has none."
                )
        return grads
    values = {a.name: value for a, value in zip(inputs, primals, strict=True)}
    for argument, cotangent, output in zip(of.rule.declared, cotangents, outputs, strict=True):
        values[argument.name] = output
        values.update(dict.fromkeys(cotangent_names(of, argument.name), cotangent))
    for argument, is_wanted in zip(inputs, wanted, strict=True):
        values.setdefault(f"{argument.name}_wanted", is_wanted)
    gradients = _call_by_name(rule.op, values)
    return tuple(gradients.get(f"{a.name}_grad") for a in inputs)


def jvp(
    of: Declared, primals: Arrays, tangents: Arrays, outputs: Arrays, zeros: Callable[[Any], Any]
) -> Arrays:
    """The tangent of each output; None of those that the rule calls constant.

    Args:
        of: the op.
        primals: its inputs, as they were given.
        tangents: one per input; None where it has none. A jvp op gets zeros there, and None for an
            input that is absent.
        outputs: one array per output.
        zeros: makes an array of zeros that is like another.

    Raises:
        KernelError: the op has no jvp, or a function of it gives other than one per output.
    """
    rule = of.rules.get("jvp")
    if rule is None:
        raise missing(of, "jvp")
    outputs = spread(of, outputs)
    if rule.op is None:
        result: Any = rule.function(primals, tangents, outputs)  # type: ignore[misc]
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if len(results) != len(of.rule.declared):
            raise KernelError(
                f"[op] the jvp of op {of.name!r} returned {len(results)} tangents; expected "
                f"{len(of.rule.declared)}, one per output."
            )
        pairs = zip(of.rule.outputs, gathered(of, results), strict=True)
        return tuple(None if a.constant else tangent for a, tangent in pairs)
    values = {a.name: value for a, value in zip(of.rule.inputs, primals, strict=True)}
    for argument, value, tangent in zip(of.rule.inputs, primals, tangents, strict=True):
        if is_real(argument):
            if tangent is None and value is not None:
                tangent = zeros(value)
            values[f"{argument.name}_tangent"] = tangent
    values.update({a.name: y for a, y in zip(of.rule.declared, outputs, strict=True)})
    output_tangents = _call_by_name(rule.op, values)
    return tuple(output_tangents.get(f"{a.name}_tangent") for a in of.rule.outputs)


def _call_by_name(rule: Declared, values: dict[str, Any]) -> dict[str, Any]:
    """Call an op with values by the names of its inputs; return its outputs by name."""
    result = rule(*[values[a.name] for a in rule.rule.inputs])
    names = [a.name for a in rule.rule.declared]
    return dict(zip(names, result if len(names) > 1 else (result,), strict=True))


def no_array(of: Declared, kind: str, value: object, role: str) -> KernelError:
    """The error for a derivative function that returns something other than an array."""
    return KernelError(
        f"[op] the {kind} of op {of.name!r} gave {identity.short(value)} of type "
        f"{type(value).__name__} as {role}; expected an array"
        + (", or None where there is none." if kind == "vjp" else ".")
    )


def missing(of: Declared, kind: str) -> KernelError:
    """The error for a derivative that was not declared."""
    if of.in_place:
        which, needs = ("", "gradient") if kind == "vjp" else ("forward-mode ", "tangent")
        return KernelError(
            f"[op] op {of.name!r} writes in place, and so has no {which}derivative; give inputs "
            f"that need no {needs} (x.detach(), torch.no_grad())."
        )
    words = {
        "vjp": "has no derivative; declare one with def_vjp, or give inputs that need no gradient "
        "(x.detach(), torch.no_grad())",
        "jvp": "has no forward-mode derivative; declare one with def_jvp",
    }
    return KernelError(f"[op] op {of.name!r} {words[kind]}.")
