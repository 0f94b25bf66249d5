"""The derivative and batching rules of an op, as data: another op, or a Python function.

A rule is itself host-neutral: `Rules.vjp` and the others call ops and array code, whatever library
the arrays belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import dtypes, identity
from .errors import KernelError, KernelTypeError
from .rule import Argument

if TYPE_CHECKING:
    from .op_declaration import Op

Arrays = tuple[Any, ...]


class Derived:
    """One rule of an op.

    Attributes:
        kind: ``"vjp"``, ``"jvp"`` or ``"vmap"``.
        op: the op that it is, or None.
        function: the Python function that it is, or None.
        version: what stands for the function's content, or None.
        digest: of its content.
    """

    def __init__(
        self, of: Op, kind: str, rule: object, version: object, matched: Callable[[Op, Op], None]
    ) -> None:
        from .op_declaration import Op

        self.kind, self.version = kind, version
        self.op: Op | None = None
        self.function: Callable[..., Any] | None = None
        if isinstance(rule, Op):
            matched(of, rule)
            self.op = rule
        elif callable(rule):
            self.function = rule
            self._what = f"`def_{kind}` of op {of.name!r}"
            _ = self.digest  # refuses what has none, now
        else:
            raise KernelTypeError(
                f"[op] `def_{kind}` of op {of.name!r}: got {rule!r} of type {type(rule).__name__}, "
                "expected an op or a function."
            )

    @property
    def digest(self) -> str:
        """Of its content, which is looked at each time: ops in it may get rules later."""
        if self.op is not None:
            return self.op.digest
        return identity.of_callable(self._what, self.function, self.version)

    def ops(self) -> list[Op]:
        """The ops that it calls, as far as can be told from its code."""
        return identity.ops_in(self.function) if self.op is None else [self.op]


class AbsentRule(Derived):
    """What a file knows of a rule that is a Python function: its digest. A call of it is one of the
    same op's rule, if that was defined in the meantime, and raises else."""

    def __init__(self, of: Op, kind: str, digest: str) -> None:
        self.kind, self.op, self.version, self._saved = kind, None, None, digest

        def absent(*given: Any) -> Any:
            from .op_declaration import defined

            known = defined(of.name, of.digest)
            if known is not None and not known.partial:
                of.complete(known)
                return known.rules[kind].function(*given)  # type: ignore[misc]
            raise KernelError(
                f"[op] op {of.name!r} was read from a file, without its {kind} rule, which is a "
                "Python function; define the op in this process, with the same rules"
                + ("." if kind == "vmap" else ", to take derivatives of it.")
            )

        self.function = absent

    @property
    def digest(self) -> str:
        """What the file says."""
        return self._saved


def cotangent_names(of: Op, output: str) -> tuple[str, ...]:
    """What a vjp op may call the cotangent of an output, the usual name first.

    A vjp op has an input ``cotangent`` itself: there the vjp of it has ``<output>_cotangent``.
    """
    names = [f"{output}_cotangent"]
    if len(of.rule.outputs) == 1:
        names.insert(0, "cotangent")
    inputs = [one.name for one in of.rule.inputs]
    return tuple(name for name in names if name not in inputs)


def is_real(one: Argument) -> bool:
    """Whether an argument may have a derivative: its dtype is a float or a variable, and its rule
    does not call it constant."""
    kind = dtypes.BY_NAME.get(one.dtype)
    return one.dims is not None and not one.constant and (kind is None or kind.kind in "fc")


def match_vjp(of: Op, rule: Op) -> None:
    """Check that a vjp op's arguments are known by name.

    Raises:
        KernelError: one is not, or a cotangent is missing; lists what may be named.
    """
    outputs = [one.name for one in of.rule.outputs]
    cotangents = {each: name for name in outputs for each in cotangent_names(of, name)}
    inputs = [one.name for one in of.rule.inputs]
    known = [*inputs, *outputs, *cotangents]
    _check_inputs(of, "vjp", rule, known)
    named = {cotangents[one.name] for one in rule.rule.inputs if one.name in cotangents}
    for one in of.rule.outputs:
        names = cotangent_names(of, one.name)
        if not names:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: '{one.name}_cotangent' would be an input of "
                "the op, and a cotangent, too; give a function in place of the op, or rename the "
                "input."
            )
        if is_real(one) and one.name not in named:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: the vjp op {rule.name!r} has no input "
                f"{names[0]!r}, so that derivatives through output {one.name!r} would be lost."
            )
    arrays = [f"{one.name}_grad" for one in of.rule.inputs if one.dims is not None]
    for one in rule.rule.outputs:
        if one.name not in arrays:
            raise KernelError(
                f"[op] `def_vjp` of op {of.name!r}: output {one.name!r} of the vjp op "
                f"{rule.name!r} is no gradient of an input; expected {', '.join(arrays)}."
            )


def match_jvp(of: Op, rule: Op) -> None:
    """Check that a jvp op's arguments are known by name.

    Raises:
        KernelError: one is not, or an output has no tangent; lists what may be named.
    """
    outputs = [one.name for one in of.rule.outputs]
    inputs = [one.name for one in of.rule.inputs]
    tangents = [f"{one.name}_tangent" for one in of.rule.inputs if is_real(one)]
    for name in tangents:
        if name in inputs:
            raise KernelError(
                f"[op] `def_jvp` of op {of.name!r}: {name!r} would be an input of the op, and a "
                "tangent, too; give a function in place of the op, or rename the input."
            )
    _check_inputs(of, "jvp", rule, [*inputs, *outputs, *tangents])
    expected = [f"{one.name}_tangent" for one in of.rule.outputs if not one.constant]
    found = [one.name for one in rule.rule.outputs]
    if sorted(found) != sorted(expected):
        raise KernelError(
            f"[op] `def_jvp` of op {of.name!r}: the jvp op {rule.name!r} has the outputs "
            f"{', '.join(found)}; expected {', '.join(expected)}."
        )


def match_vmap(of: Op, rule: Op) -> None:
    """Check that a batched op has the arguments of the op that it batches.

    Raises:
        KernelError: its inputs or outputs have other names.
    """
    for what in ("inputs", "outputs"):
        ours, theirs = ([a.name for a in getattr(one.rule, what)] for one in (of, rule))
        if ours != theirs:
            raise KernelError(
                f"[op] `def_vmap` of op {of.name!r}: the batched op {rule.name!r} has the {what} "
                f"{', '.join(theirs)}; expected {', '.join(ours)}, each with one dim more in front."
            )


def _check_inputs(of: Op, kind: str, rule: Op, known: Sequence[str]) -> None:
    for one in rule.rule.inputs:
        if one.name not in known:
            raise KernelError(
                f"[op] `def_{kind}` of op {of.name!r}: input {one.name!r} of the {kind} op "
                f"{rule.name!r} is none of what it can be given: {', '.join(known)}."
            )


def vjp(of: Op, primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    """The gradient of each input, None where it has none.

    Args:
        of: the op.
        primals: its inputs, as they were given.
        cotangents, outputs: one array per output; the cotangents of those that the rule calls
            constant are zeros.

    Raises:
        KernelError: the op has no vjp, or a function of it gives other than one per input.
    """
    rule = of.rules.get("vjp")
    if rule is None:
        raise missing(of, "vjp")
    inputs = of.rule.inputs
    if rule.op is None:
        given: Any = rule.function(primals, cotangents, outputs)  # type: ignore[misc]
        grads = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if len(grads) != len(inputs):
            raise KernelError(
                f"[op] the vjp of op {of.name!r} returned {len(grads)} gradients; expected "
                f"{len(inputs)}, one per input ({', '.join(a.name for a in inputs)}), None for "
                "those that have none."
            )
        return grads
    known = {one.name: value for one, value in zip(inputs, primals, strict=True)}
    for one, cotangent, output in zip(of.rule.outputs, cotangents, outputs, strict=True):
        known[one.name] = output
        known.update(dict.fromkeys(cotangent_names(of, one.name), cotangent))
    found = _by_name(rule.op, known)
    return tuple(found.get(f"{one.name}_grad") for one in inputs)


def jvp(
    of: Op, primals: Arrays, tangents: Arrays, outputs: Arrays, zeros: Callable[[Any], Any]
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
    if rule.op is None:
        given: Any = rule.function(primals, tangents, outputs)  # type: ignore[misc]
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if len(found) != len(of.rule.outputs):
            raise KernelError(
                f"[op] the jvp of op {of.name!r} returned {len(found)} tangents; expected "
                f"{len(of.rule.outputs)}, one per output."
            )
        pairs = zip(of.rule.outputs, found, strict=True)
        return tuple(None if one.constant else tangent for one, tangent in pairs)
    known = {one.name: value for one, value in zip(of.rule.inputs, primals, strict=True)}
    for one, value, tangent in zip(of.rule.inputs, primals, tangents, strict=True):
        if is_real(one):
            if tangent is None and value is not None:
                tangent = zeros(value)
            known[f"{one.name}_tangent"] = tangent
    known.update({one.name: y for one, y in zip(of.rule.outputs, outputs, strict=True)})
    named = _by_name(rule.op, known)
    return tuple(named.get(f"{one.name}_tangent") for one in of.rule.outputs)


def _by_name(rule: Op, known: dict[str, Any]) -> dict[str, Any]:
    """Calls an op with what its inputs are called, and names what it gives."""
    given = rule(*[known[one.name] for one in rule.rule.inputs])
    names = [one.name for one in rule.rule.outputs]
    return dict(zip(names, given if len(names) > 1 else (given,), strict=True))


def no_array(of: Op, kind: str, found: object, what: str) -> KernelError:
    """The error for what a derivative function gives that is no array."""
    return KernelError(
        f"[op] the {kind} of op {of.name!r} gave {identity.short(found)} of type "
        f"{type(found).__name__} as {what}; expected an array"
        + (", or None where there is none." if kind == "vjp" else ".")
    )


def missing(of: Op, kind: str) -> KernelError:
    """The error for a derivative that was not declared."""
    if any(one.mutable for one in of.rule.inputs):
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
