"""What ``ferrule inspect`` says of an op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from .. import Op
from ..dtypes import BY_NAME
from ..operators import text as op_text
from ..operators.bodies import KernelBody
from ..operators.identity import named
from ..operators.runners import Runner
from ..operators.unit_parts import MatmulStep
from ..operators.unit_steps import CudaUnit
from ..rules.expression import Expression
from .faults import Fault
from .target import described_input

_OPTIONS = {"metal": "metal", "cpu": "cpp", "cuda": "cuda"}


def print_op(
    name: str, op: Op, inputs: Sequence[str], wanted: str | None, print_texts: Any, print_unit: Any
) -> None:
    """Print what an op is, and the texts of its kernels where all inputs are described.

    Args:
        name: what it is called in its file.
        op: the op.
        inputs: the values of ``--with``.
        wanted: the only text that is asked for, or None.
        print_texts: prints those of a kernel and a call.
        print_unit: prints those of a `DescribedUnit`.

    Raises:
        Fault: an input that the op does not have, or none of the texts that are asked for.
        FerruleError: the rule does not allow such inputs.
    """
    arguments: dict[str, Any] = {}
    for text in inputs:
        key, value = described_input(text, level0=False)
        if isinstance(value, str):
            dtype, _, shape = value.rstrip("]").partition("[")
            value = tuple(int(n) for n in shape.split(",") if n), BY_NAME[dtype]
        arguments[key] = value
    names = [argument.name for argument in op.rule.inputs]
    for key in arguments:
        if key not in names:
            raise Fault(
                f"--with {key!r}: the op has no such input; its inputs: {', '.join(names)}."
            )
    missing = [str(o) for o in op.rule.inputs if o.name not in arguments and not o.optional]
    if not missing:
        op = op.variant(**arguments)
    alone = wanted is not None
    bodies = [body for body in op.implementations if isinstance(body, (KernelBody, CudaUnit))]
    if wanted is not None and wanted != "cuda":  # the only texts of Metal bodies
        bodies = [body for body in bodies if body.kind == "metal"]
    without = f"--with is not given for {', '.join(missing)}"
    if alone and not bodies:
        kinds = ", ".join(body.kind for body in op.implementations)
        option = _OPTIONS[str(wanted)]
        raise Fault(f"{name!r} has no text for --{option}: its implementations are {kinds}.")
    if alone and missing:
        raise Fault(f"{without}; an op's text is for inputs that fit its rule.")
    calls: list[tuple[str, Any, tuple[Any, ...]]] = []
    for body in [] if missing else bodies:
        if isinstance(body, KernelBody):
            if (call := op_text.described(op, body, arguments, wanted)) is not None:
                calls.append((f"the {body.kind} body", print_texts, call))
        elif (unit := op_text.described_unit(op, body, arguments)) is not None:
            calls.append(("the unit", print_unit, (unit,)))
    if alone and not calls:
        raise Fault(f"{name!r} has no implementation whose `when` holds for such inputs.")

    for line in lines(name, op):
        click.echo(line, err=alone)
    if bodies and missing:
        click.echo(f"note: no text: {without}")
    for title, print_one, described in calls[:1] if alone else calls:
        if not alone:
            click.echo(f"\n==== {title} ====")
        print_one(*described)


def lines(name: str, op: Op) -> Iterator[str]:
    """What an op is, line by line."""
    yield f"{name}: op {op.name}"
    yield f"  rule         {op.rule.shown()}"
    yield f"  digest       {op.digest}"
    for body in op.implementations:
        if isinstance(body, KernelBody):
            description = _body(body)
        else:
            description = _runner(body) if isinstance(body, Runner) else _unit(body)
        when = "" if body.when is None else f", when {body.when}"
        yield f"  {body.kind:<12} {description}{when}"
    for kind in ("vjp", "jvp", "vmap"):
        rule = op.rules.get(kind)
        if rule is not None:
            description = f"op {rule.op.name}" if rule.op is not None else named(rule.function)
            yield f"  {kind:<12} {description}, digest {rule.digest}"
        elif kind == "vmap":
            yield f"  {kind:<12} {_batching(op)}"
        else:
            yield f"  {kind:<12} none: such a derivative is refused"
    if op.autocast is not None:
        yield f"  autocast     {op.autocast}"
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(op.counts.items()))
    yield f"  counts       {counts or 'no slower way was taken'} (calls in this process)"


def _batching(op: Op) -> str:
    stars = [
        str(dim)
        for output in op.rule.outputs
        for dim in output.dims or ()
        if not isinstance(dim, Expression)
    ]
    dims = ", ".join(dict.fromkeys([*stars, *op.batch]))
    if not dims:
        return "call by call: no dim is declared independent"
    return f"by the independent dims {dims}; call by call where an input without them is batched"


def _body(body: KernelBody) -> str:
    def sizes(axes: Sequence[object]) -> str:
        return f"({', '.join(map(str, axes))})"

    parts = [f"grid {sizes(body.grid)}", f"threadgroup {sizes(body.threadgroup)}"]
    if body.dims:
        parts.append(f"reads {', '.join(body.dims)}")
    if body.template:
        parts.append("template " + ", ".join(f"{n} = {v}" for n, v in body.template))
    if body.fill is not None:
        parts.append(f"filled with {body.fill}")
    return "; ".join(parts)


def _unit(unit: Any) -> str:
    others = {MatmulStep: "a product"}
    names = [
        getattr(step, "function", others.get(type(step), "a fill or copy")) for step in unit.steps
    ]
    count = "1 step" if len(names) == 1 else f"{len(names)} steps"
    return f"a unit in {count}: {', '.join(map(str, names))}"


def _runner(runner: Runner) -> str:
    parts = [runner.name, f"digest {runner.digest}"]
    if runner.constants:
        parts.append("constants " + ", ".join(f"{n} = {v}" for n, v in runner.constants))
    if runner.contiguous:
        parts.append("its inputs are made contiguous")
    return ", ".join(parts)
