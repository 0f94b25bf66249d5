"""Launching an op's CUDA unit over arrays that exist, and making those that it needs: the part of a
call that is the same for every array library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError
from ..spec import Facts
from ..unit import Copy, Fill, Product, Run, Step, TensorMap
from . import state, unit_maps, unit_matmul
from .launch import BoundCall
from .unit_parts import CopyStep, FillStep, MatmulStep, RunStep
from .unit_steps import ALIGNMENT, CudaUnit, UnitLaunch

if TYPE_CHECKING:
    from ..devices.protocol import UnitKernels, UnitProgram
    from ..hosts.protocol import Host
    from ..rules.argument import Argument

Places = Mapping[str, tuple[int, Dtype, int]]  # address, dtype and elements of each array


def launch_of(call: BoundCall, unit: CudaUnit) -> UnitLaunch:
    """A unit's steps and scratch for a call; raises as `CudaUnit.launch_for`."""
    return cast(UnitLaunch, call.once(unit, lambda: unit.launch_for(call.binding)))


def run_unit(
    call: BoundCall, unit: CudaUnit, host: Host, facts: Callable[[Any], Facts], queue: int
) -> list[Any]:
    """The outputs of a unit's steps; they are started, and nothing waits for them.

    Args:
        call, unit: what is launched.
        host, facts: who makes arrays, and what a kernel must know of them.
        queue: on which stream.

    Raises:
        KernelError: a size is out of range, an array cannot be filled or copied.
        CompileError, ToolchainError, DeviceError: as `devices.cuda.unit.CudaUnitProgram.launch`.
    """
    launch = launch_of(call, unit)
    rule, device = call.op.rule, call.device
    outputs = [host.empty(shape, kind, device) for shape, kind in call.results]
    if kernels := kernels_of(call, unit):
        words = input_words(call)
        words += [facts(output).pointer for output in outputs]
        kernels.start(words, host, facts, queue)
        return outputs
    arrays = dict(zip((output.name for output in rule.outputs), map(facts, outputs), strict=True))
    arrays |= {name: fact for name, fact in call.arguments.items() if isinstance(fact, Facts)}
    places = {name: (fact.pointer, fact.dtype, fact.size) for name, fact in arrays.items()}
    values: dict[str, bytes] = {}
    for parameter in rule.inputs:
        if parameter.dims is None:
            values[parameter.name] = _number_bytes(parameter, call.arguments[parameter.name])
        else:
            places.setdefault(parameter.name, (0, dtypes.uint8, 0))  # absent: a null pointer
    owners, steps_for_state = _place_memory(call, unit, launch, places, host, facts, queue)
    for name, (address, _, _) in places.items():
        values[name] = address.to_bytes(8, "little")
    launch = launch._replace(steps=launch.steps[steps_for_state:])
    steps = _steps(call.op.name, launch, places, values)
    if steps:
        program = _program(device, unit, launch)
        over = getattr(program, "launch_over", None)  # of one that is checked
        if over is None:
            program.launch(steps, queue)
        else:
            over(steps, places, [parameter.name for parameter in rule.inputs])
    del owners  # they had to live until here
    return outputs


def _program(device: str, unit: CudaUnit, launch: UnitLaunch) -> UnitProgram:
    constants = [(type(value), value) for _, value in launch.template]  # True == 1 in Python
    key = (device, *constants)
    program = unit.programs.get(key)
    if program is None:
        from ..devices import protocol as devices

        program = devices.unit_program(device, unit.spec(launch.template))
        program = unit.programs.setdefault(key, program)
    return program


class Kernels(NamedTuple):
    """A unit's steps for a device and sizes, where all are kernels that take addresses and numbers
    alone, or matrix products: their words are those of the inputs, the outputs and the scratch
    arrays, in this order.

    Attributes:
        started: the steps.
        device: where they run.
        memory, scratch: bytes of scratch, and where in it each array begins.
    """

    started: UnitKernels
    device: str
    memory: int
    scratch: tuple[int, ...]

    def start(
        self, words: list[int], host: Host, facts: Callable[[Any], Facts], queue: int
    ) -> None:
        """Start them on a stream, given the words of inputs and outputs."""
        base, owner = _scratch(self.memory, host, facts, self.device)
        self.started.start([*words, *[base + at for at in self.scratch]], queue)
        del owner  # it had to live until here


def kernels_of(call: BoundCall, unit: CudaUnit) -> Kernels | None:
    """A call's steps as `Kernels`; None where they are more than that, and at the first call of its
    sizes: the numbers among these may be others in each."""
    if "called" not in call.made:
        call.made["called"] = True
        return None
    call.once((unit, "kernels"), lambda: (_kernels(call, unit),))
    return known_kernels(call, unit)


def known_kernels(call: BoundCall, unit: CudaUnit) -> Kernels | None:
    """What `kernels_of` gave an earlier call."""
    found: tuple[Kernels | None] = call.made.get((unit, "kernels"), (None,))
    return found[0]


def _kernels(call: BoundCall, unit: CudaUnit) -> Kernels | None:
    launch = launch_of(call, unit)
    rule = call.op.rule
    names = [a.name for a in (*rule.inputs, *rule.outputs)]
    places = {name: i for i, name in enumerate([*names, *launch.scratch])}
    steps: list[Run | Product] = []
    words: list[list[int]] = []
    for step, done in launch.steps:
        if isinstance(step, RunStep) and isinstance(done, Run):
            if any(isinstance(own, TensorMap) for own in done.arguments):
                return None
            pairs = zip(step.arguments, done.arguments, strict=True)
            words.append([-1 if own else places[str(argument.value)] for argument, own in pairs])
        elif isinstance(step, MatmulStep) and isinstance(done, Product):
            if isinstance(step.alpha, str) or isinstance(step.beta, str) or not done.k:
                return None
            done = done._replace(factors=(step.alpha, step.beta))
            factors = -1 if step.factors is None else places[step.factors]
            words.append([*[places[name] for name in (step.a, step.b, step.out, "")], factors])
        else:
            return None
        steps.append(done)
    if unit.state or not steps:
        return None
    started = _program(call.device, unit, launch).kernels(steps, words)
    if started is None:
        return None
    scratch = tuple([at for at, _, _ in launch.scratch.values()])
    return Kernels(started, call.device, launch.memory, scratch)


def input_words(call: BoundCall) -> list[int]:
    """The address of each input, or the bits of a number."""
    words: list[int] = []
    for parameter in call.op.rule.inputs:
        value = call.arguments[parameter.name]
        if isinstance(value, Facts):
            words.append(value.pointer)
        elif parameter.dims is not None:
            words.append(0)  # absent: a null pointer
        else:
            words.append(bits(parameter, value))
    return words


def bits(parameter: Argument, value: object) -> int:
    """The bits of a number, as the rule declares it."""
    return int.from_bytes(_number_bytes(parameter, value), "little")


def _number_bytes(parameter: Argument, value: object) -> bytes:
    return np.array(value, dtypes.BY_NAME[parameter.dtype].numpy).tobytes()


def _scratch(
    size: int, host: Host, facts: Callable[[Any], Facts], device: str
) -> tuple[int, list[Any]]:
    """Where scratch of so many bytes begins, and what owns it. It goes back to the library's pool
    when the call is over, from where what comes later on this stream may have it."""
    if not size:
        return 0, []
    owner = host.empty((size + ALIGNMENT - 1,), dtypes.uint8, device)
    return -(-facts(owner).pointer // ALIGNMENT) * ALIGNMENT, [owner]


def _place_memory(
    call: BoundCall,
    unit: CudaUnit,
    launch: UnitLaunch,
    places: dict[str, tuple[int, Dtype, int]],
    host: Host,
    facts: Callable[[Any], Facts],
    queue: int,
) -> tuple[list[Any], int]:
    """Give a unit's scratch and state their places.

    Returns:
        What owns them, and how many steps are left out: those that zero state which is kept.
    """
    keeps = bool(unit.state) and state.keeps(host, call.device)
    base, owners = _scratch(launch.own if keeps else launch.memory, host, facts, call.device)
    for name, (at, dtype, count) in launch.scratch.items():  # null pointers where all are empty
        if keeps and name in unit.state:
            owners.append(unit.kept.array(name, (count,), dtype, host, call.device, queue))
            places[name] = facts(owners[-1]).pointer, dtype, count
        else:
            places[name] = base + at, dtype, count
    return owners, len(unit.state) if keeps else 0


def _steps(op: str, launch: UnitLaunch, places: Places, values: Mapping[str, bytes]) -> list[Step]:
    """The steps of a call, with addresses.

    Args:
        op, launch: whose steps.
        places, values: by name the arrays, and the arguments that arrays and numbers are.
    """
    steps: list[Step] = []
    for step, run in launch.steps:
        if isinstance(step, FillStep):
            address, dtype, count = places[step.array]
            written = pattern(op, step, dtype)
            count = count * dtype.itemsize // len(written)
            if count:
                steps.append(Fill(address, count, written))
        elif isinstance(step, CopyStep):
            (to, dtype, count), (source, other, many) = places[step.to], places[step.source]
            if (dtype, count) != (other, many):
                raise KernelError(
                    f"[op] op {op!r}: a step copies {step.source!r}, {many} elements of "
                    f"{other.name}, to {step.to!r}, {count} elements of {dtype.name}; expected as "
                    "many of the same dtype."
                )
            if count:
                steps.append(Copy(to, source, count * dtype.itemsize))
        elif isinstance(step, MatmulStep) and isinstance(run, Product):
            at = {name: place[0] for name, place in places.items()}
            steps += unit_matmul.multiplied(op, step, run, at, values)
        elif isinstance(step, RunStep) and isinstance(run, Run):
            pairs = zip(step.arguments, run.arguments, strict=True)
            arguments = tuple([
                unit_maps.placed(op, argument.value, own, places[argument.value.array][0])
                if isinstance(own, TensorMap)
                else own or values[argument.value]
                for argument, own in pairs
            ])  # fmt: skip
            steps.append(run._replace(arguments=arguments))
    return steps


def pattern(op: str, step: FillStep, dtype: Dtype) -> bytes:
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
