"""The steps of a CUDA unit, bound to a rule: as expressions, as JSON, and launched for one call."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..dtypes import Dtype
from ..rules.expression import Expression
from ..unit import Sizes
from .expressions import (
    TemplateValue,
    axes_from_json,
    axes_to_json,
    optional_from_json,
    optional_to_json,
)
from .unit_parts import CopyStep, FillStep, RunStep


class StepArgument(NamedTuple):
    """An argument of a function.

    Attributes:
        label: what the author calls it.
        kind: ``"array"``, ``"number"``, or the full name of an expression's dtype.
        value: the name, or the expression.
    """

    label: str
    kind: str
    value: str | Expression


class Launched(NamedTuple):
    """A step that launches a function, with expressions; see `cuda_step`."""

    function: str
    arguments: tuple[StepArgument, ...]
    blocks: tuple[Expression, ...]
    block: tuple[Expression, ...]
    shared: Expression
    cluster: tuple[Expression, ...] | None
    when: Expression | None


class Filled(NamedTuple):
    """A step that fills an array; see `cuda_fill`."""

    array: str
    value: float
    when: Expression | None


class Copied(NamedTuple):
    """A step that copies an array; see `cuda_copy`."""

    to: str
    source: str
    when: Expression | None


class RunLaunch(NamedTuple):
    """A launch of one call, without addresses.

    Attributes:
        step: what was declared.
        blocks, block, shared, cluster: as in `ferrule.unit.Run`.
        arguments: ``("array", name)``, ``("number", name)``, or the bytes of an expression.
    """

    step: Launched
    blocks: Sizes
    block: Sizes
    shared: int
    cluster: Sizes | None
    arguments: tuple[tuple[str, str] | bytes, ...]


BoundStep = Launched | Filled | Copied
LaunchStep = RunLaunch | Filled | Copied


class UnitLaunch(NamedTuple):
    """The steps and scratch of a unit for one call, before its arrays are made.

    Attributes:
        template: constants and types, in order.
        steps: what is done, in order; those that are left out are not among them.
        scratch: where each scratch array begins in the memory for all, its dtype, its elements.
        memory: bytes of scratch in all.
    """

    template: tuple[tuple[str, TemplateValue], ...]
    steps: tuple[LaunchStep, ...]
    scratch: dict[str, tuple[int, Dtype, int]]
    memory: int


def touched(step: BoundStep) -> set[str]:
    """The arrays that a step may write."""
    if isinstance(step, Filled):
        return {step.array}
    if isinstance(step, Copied):
        return {step.to}
    return {str(a.value) for a in step.arguments if a.kind == "array"}


def step_to_json(step: BoundStep) -> Any:
    """All that decides what a step does."""
    when = optional_to_json(step.when)
    if isinstance(step, Filled):
        # By its text, for JSON has no infinities.
        return {"fill": step.array, "value": repr(step.value), "when": when}
    if isinstance(step, Copied):
        return {"copy": step.source, "to": step.to, "when": when}
    arguments = [
        [a.kind, a.value.to_json() if isinstance(a.value, Expression) else a.value]
        for a in step.arguments
    ]
    return {
        "run": step.function,
        "arguments": arguments,
        "blocks": axes_to_json(step.blocks),
        "block": axes_to_json(step.block),
        "shared_memory": step.shared.to_json(),
        "cluster": axes_to_json(step.cluster),
        "when": when,
    }


def step_from_json(data: Any) -> RunStep | FillStep | CopyStep:
    """The reverse of `step_to_json`, as yet unchecked."""
    when = optional_from_json(data["when"])
    if "fill" in data:
        text = data["value"]
        value = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        return FillStep(data["fill"], value, when)
    if "copy" in data:
        return CopyStep(data["to"], data["copy"], when)
    return RunStep(
        data["run"],
        tuple(_argument_from_json(argument) for argument in data["arguments"]),
        axes_from_json(data["blocks"]),
        axes_from_json(data["block"]),
        optional_from_json(data["shared_memory"]),
        axes_from_json(data["cluster"]),
        when,
    )


def _argument_from_json(data: Any) -> StepArgument:
    kind, value = data
    return StepArgument("", kind, value if isinstance(value, str) else optional_from_json(value))
