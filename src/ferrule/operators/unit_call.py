"""Launching an op's CUDA unit over arrays that exist, and making those that it needs: the part of a
call that is the same for every array library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError
from ..rules.rule import Binding, Rule
from ..spec import Facts, Shape
from ..unit import Copy, Fill, Run, Step
from .bound_steps import Copied, Filled, RunLaunch, UnitLaunch
from .launch import Arguments
from .unit_steps import ALIGNMENT, CudaUnit

if TYPE_CHECKING:
    from ..hosts.protocol import Host

Places = Mapping[str, tuple[int, Dtype, int]]  # address, dtype and elements of each array


def run_unit(
    op: str,
    rule: Rule,
    unit: CudaUnit,
    host: Host,
    facts: Callable[[Any], Facts],
    device: str,
    queue: int,
    binding: Binding,
    arguments: Arguments,
    results: Sequence[tuple[Shape, Dtype]],
) -> list[Any]:
    """The outputs of a unit's steps; they are started, and nothing waits for them.

    Args:
        op, rule, unit: what is launched.
        host, facts: who makes arrays, and what a kernel must know of them.
        device, queue, binding: where, on which stream, with which sizes.
        arguments: per input its facts, the number, or None where it is absent.
        results: the shape and dtype of each output.

    Raises:
        KernelError: a size is out of range, an array cannot be filled or copied.
        CompileError, ToolchainError, DeviceError: as `devices.cuda.unit.CudaUnitProgram.launch`.
    """
    launch = unit.launch_for(binding)
    outputs = [host.empty(shape, kind, device) for shape, kind in results]
    places: dict[str, tuple[int, Dtype, int]] = {}
    for output, array in zip(rule.outputs, outputs, strict=True):
        fact = facts(array)
        places[output.name] = fact.pointer, fact.dtype, fact.size
    for parameter in rule.inputs:
        value = arguments[parameter.name]
        if isinstance(value, Facts):
            places[parameter.name] = value.pointer, value.dtype, value.size
        elif parameter.dims is not None:
            places[parameter.name] = 0, dtypes.uint8, 0  # a null pointer
    memory = None
    if launch.memory:
        # One array for all. It goes back to the library's pool when this returns, from where what
        # comes later on this stream may have it.
        memory = host.empty((launch.memory + ALIGNMENT - 1,), dtypes.uint8, device)
        base = -(-facts(memory).pointer // ALIGNMENT) * ALIGNMENT
    else:  # null pointers
        base = 0
    for name, (at, kind, size) in launch.scratch.items():
        places[name] = base + at, kind, size
    steps = _steps(op, rule, launch, places, arguments)
    _launch(unit, launch, device, queue, steps)
    del memory  # it had to live until here
    return outputs


def _launch(
    unit: CudaUnit, launch: UnitLaunch, device: str, queue: int, steps: Sequence[Step]
) -> None:
    if not steps:
        return
    constants = [(type(value), value) for _, value in launch.template]  # True == 1 in Python
    key = (device, *constants)
    program = unit.programs.get(key)
    if program is None:
        from ..devices import protocol as devices

        program = unit.programs.setdefault(
            key, devices.unit_program(device, unit.spec(launch.template))
        )
    program.launch(steps, queue)


def _steps(
    op: str, rule: Rule, launch: UnitLaunch, places: Places, arguments: Arguments
) -> list[Step]:
    """The steps of a call, with addresses."""
    values = {
        p.name: np.array(arguments[p.name], dtypes.BY_NAME[p.dtype].numpy).tobytes()
        for p in rule.inputs
        if p.dims is None
    }
    steps: list[Step] = []
    for step in launch.steps:
        if isinstance(step, Filled):
            address, dtype, count = places[step.array]
            written = pattern(op, step, dtype)
            count = count * dtype.itemsize // len(written)
            if count:
                steps.append(Fill(address, count, written))
        elif isinstance(step, Copied):
            steps += _copied(op, step, places)
        else:
            steps.append(_run(step, places, values))
    return steps


def _run(step: RunLaunch, places: Places, values: Mapping[str, bytes]) -> Run:
    arguments = []
    for argument in step.arguments:
        if isinstance(argument, bytes):
            arguments.append(argument)
        elif argument[0] == "array":
            arguments.append(places[argument[1]][0].to_bytes(8, "little"))
        else:
            arguments.append(values[argument[1]])
    function = step.step.function
    return Run(function, step.blocks, step.block, step.shared, step.cluster, tuple(arguments))


def _copied(op: str, step: Copied, places: Places) -> list[Step]:
    (to, kind, count), (source, other, many) = places[step.to], places[step.source]
    if (kind, count) != (other, many):
        raise KernelError(
            f"[op] op {op!r}: a step copies {step.source!r}, {many} elements of {other.name}, to "
            f"{step.to!r}, {count} elements of {kind.name}; expected as many of the same dtype."
        )
    return [Copy(to, source, count * kind.itemsize)] if count else []


def pattern(op: str, step: Filled, dtype: Dtype) -> bytes:
    """1, 2 or 4 bytes that, repeated, are elements of a value.

    Raises:
        KernelError: the dtype does not hold it, or no memset writes it.
    """
    value, numpy = step.value, dtype.numpy
    label = f"[op] op {op!r}: a step fills {step.array!r}, of {dtype.name}, with {value!r}"
    if dtype.kind in "iu" or dtype.kind == "b":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(numpy).min, np.iinfo(numpy).max)
        if value != value or value in (float("inf"), float("-inf")) or not low <= value <= high:
            raise KernelError(f"{label}; expected a number from {low} to {high}.")
        value = int(value)
    with np.errstate(over="ignore"):
        element = np.array(value).astype(numpy)
    if math.isfinite(value) and not np.isfinite(element.astype(np.complex128)):
        raise KernelError(f"{label}, which it does not hold.")
    part = memset_pattern(element.tobytes())
    if part is None:
        raise KernelError(
            f"{label}, which no memset does: the halves of its 8 bytes differ. Launch a function "
            "that does."
        )
    return part


def memset_pattern(element: bytes) -> bytes | None:
    """The 1, 2 or 4 bytes that an element repeats; None where there are none."""
    for size in (1, 2, 4):
        part = element[:size]
        if len(element) >= size and part * (len(element) // size) == element:
            return part
    return None
