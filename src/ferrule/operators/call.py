"""A call of an op with arrays of NumPy or MLX, and what is the same for every array library: which
implementation is chosen, and what a Python function may return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import DeviceError, FerruleError, KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..kernels.arguments import fill_value, renamed, shown
from ..rules.argument import Argument
from ..rules.rule import Binding
from ..spec import Facts, Shape
from .bodies import BodyLaunch, KernelBody
from .launch import Arguments, launch, number
from .runners import Runner
from .unit_call import run_unit
from .unit_steps import CudaUnit, Implementation

if TYPE_CHECKING:
    from ..hosts.protocol import Host
    from .declared import Declared


def call(op: Declared, values: Sequence[Any]) -> Any:
    """The outputs of an op for arrays of NumPy, MLX, CuPy and others alike.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    graph = hosts.nodes(values)
    if graph is not None:
        result = graph.call(op, values)
        if result is not NotImplemented:
            return result
    return eager(op, values)


def eager(
    op: Declared, values: Sequence[Any], maker_of: Callable[[Host], Host] | None = None
) -> Any:
    """The outputs of an op, run now; raises as `call`.

    ``maker_of`` gives what makes outputs in place of a host.
    """
    host, device, arguments, arrays, copies = gathered(op, values)
    maker = host if maker_of is None else maker_of(host)
    binding, results = bound(op, arguments)
    chosen = choose(op, device, binding)
    queue = host.stream(None, device)
    if isinstance(chosen, Runner):
        inputs: list[Any] = []
        for parameter in op.rule.inputs:
            fact = arguments[parameter.name]
            value = arrays.get(parameter.name, fact)
            if chosen.contiguous and isinstance(fact, Facts) and not fact.row_contiguous:
                op.counts["copy"] += 1
                value = host.contiguous(value)
            inputs.append(value)
        outputs, made_here = run(op, chosen, device, queue, binding, inputs, results, maker)
        for i, (output, expected) in enumerate(zip(op.rule.outputs, results, strict=True)):
            shared = not made_here and _shared(host, outputs, i)
            outputs[i] = _checked(op, chosen, host, device, output, outputs[i], expected)
            if shared:
                op.counts["output copy"] += 1
                outputs[i] = outputs[i].copy()
    else:
        facts = cast(Callable[[Any], Facts], host.facts)
        outputs = run_body(
            op, chosen, maker, facts, device, queue, binding, arguments, results, host
        )
    finished = host.finish(f"op {op.name!r}", list(arrays.values()), outputs)
    _write_back(op, values, copies)
    return packed(finished)


def packed(outputs: Sequence[Any]) -> Any:
    """One output as it is, several as a tuple, none as None."""
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) if outputs else None


def bound(
    op: Declared, arguments: dict[str, Facts | float | None]
) -> tuple[Binding, list[tuple[Shape, Dtype]]]:
    """The binding of the rule to a call's inputs, and the shape and dtype of each output."""
    shapes: list[Shape | None] = []
    kinds: list[str | None] = []
    for parameter in op.rule.inputs:
        fact = arguments[parameter.name]
        shapes.append(
            fact.shape if isinstance(fact, Facts) else None if parameter.dims is not None else ()
        )
        kinds.append(fact.dtype.name if isinstance(fact, Facts) else None)
    binding = op.rule.bind(op.name, shapes, kinds)
    results = op.rule.results(op.name, binding)
    return binding, [(shape, dtypes.BY_NAME[kind]) for shape, kind in results]


def choose(op: Declared, device: str, binding: Binding) -> Implementation:
    """The best implementation for a device and these sizes.

    Raises:
        DeviceError: there is none.
    """
    cuda = device.startswith("cuda")
    for body in op.implementations:
        if (cuda or body.kind != "cuda") and body.holds(binding):
            return body
    kinds = ", ".join(
        repr(body.kind) + (f" when {body.when}" if body.when is not None else "")
        for body in op.implementations
    )
    raise DeviceError(
        f"[op] op {op.name!r} has nothing that runs on {device!r} for these sizes: it has {kinds}. "
        "A `metal` body runs on every device."
    )


def run_body(
    op: Declared,
    body: KernelBody | CudaUnit,
    maker: Any,
    facts: Callable[[Any], Facts],
    device: str,
    queue: int,
    binding: Binding,
    arguments: Arguments,
    results: Sequence[tuple[Shape, Dtype]],
    host: Host | None = None,
) -> list[Any]:
    """The outputs of a kernel or a unit, which is started, for every array library alike.

    Args:
        op, body: what is run.
        maker, facts: who makes arrays (``empty`` and ``full`` of a host), and what a kernel must
            know of one.
        device, queue, binding: where, on which stream, with which sizes.
        arguments: per input its facts, the number, or None where it is absent.
        results: the shape and dtype of each output.
        host: whose memory beside the outputs is looked at, if it is given.

    Raises:
        KernelError, CompileError, DialectError, ToolchainError, DeviceError: as `launch` and
            `run_unit` do.
    """
    if isinstance(body, CudaUnit):
        return run_unit(
            op.name, op.rule, body, maker, facts, device, queue, binding, arguments, results
        )
    body_launch = body.launch_for(binding)
    outputs = made_outputs(body, body_launch, results, maker, device)
    written = list(map(facts, outputs))
    look = None if host is None else written_by(op, host, outputs)
    launch(op.name, op.rule, body, body_launch, binding, device, queue, arguments, written, look)
    return outputs


def written_by(op: Declared, host: Host, outputs: Sequence[Any]) -> Callable[[str], None]:
    """Return what looks at the memory beside outputs that were made here."""
    names = [output.name for output in op.rule.outputs]
    return lambda label: hosts.check_written(label, host, names, outputs)


def made_outputs(
    body: KernelBody,
    body_launch: BodyLaunch,
    results: Sequence[tuple[Shape, Dtype]],
    host: Any,
    device: str,
) -> list[Any]:
    """Arrays for what a kernel writes, filled where it wants that."""
    if body_launch.fill is None:
        return [host.empty(shape, kind, device) for shape, kind in results]
    return [
        host.full(shape, fill_value(body.kernel, i, body_launch.fill, kind), kind, device)
        for i, (shape, kind) in enumerate(results)
    ]


def run(
    op: Declared,
    runner: Runner,
    device: str,
    queue: int,
    binding: Binding,
    inputs: Sequence[Any],
    results: Sequence[tuple[Shape, Dtype]],
    host: Any,
    capturing: Callable[[str], bool] | None = None,
) -> tuple[list[Any], bool]:
    """The outputs of a Python function for these inputs.

    Args:
        op, runner: what is run.
        device, queue, binding: where, on which stream, with which sizes.
        inputs: its inputs.
        results: the shape and dtype of each output.
        host: makes the outputs, where the function wants them.
        capturing: see `Runner.function_for`.

    Returns:
        The outputs, and whether they were made here: nobody else has them then.

    Raises:
        KernelError: it returned other than one array per output, or something else than None
            where it was given the outputs.
    """
    function, takes_outputs, wants_stream = runner.function_for(device, binding, capturing)
    outputs = op.rule.outputs
    named: dict[str, Any] = {"stream": queue} if wants_stream else {}
    if takes_outputs:
        written = [host.empty(shape, kind, device) for shape, kind in results]
        named.update(zip((output.name for output in outputs), written, strict=True))
        result = function(*inputs, **named)
        _check_written(op, runner, result, written)
        if device == "cpu" and host.name == "NumPy":  # the function may give torch's other memory
            written_by(op, host, written)(f"{runner.name} of op {op.name!r}")
        return written, True
    result = function(*inputs, **named)
    if not outputs:
        return [], True
    returned = list(result) if len(outputs) > 1 and isinstance(result, (tuple, list)) else [result]
    if len(returned) != len(outputs):
        raise KernelError(
            f"[op] {runner.name} of op {op.name!r} returned {_counted(result)}; expected "
            f"{len(outputs)} arrays ({', '.join(map(str, outputs))})."
        )
    return returned, False


def _counted(result: object) -> str:
    if isinstance(result, (tuple, list)):
        return f"{len(result)} values"
    return f"a {type(result).__name__}"


def _check_written(op: Declared, runner: Runner, result: object, written: Sequence[Any]) -> None:
    """Refuse new arrays of a function that was to write to others, so that no result is lost.

    Many return what they wrote to, which is right, or a state, which is none of an op's business.
    """
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if type(part) is type(written[0]) and not any(part is array for array in written):
            names = ", ".join(repr(output.name) for output in op.rule.outputs)
            raise KernelError(
                f"[op] {runner.name} of op {op.name!r} has parameters for the outputs {names}, and "
                "yet returned an array that is none of them; expected it to write to them and to "
                "return nothing."
            )


def _references(arrays: list[Any], i: int) -> int:
    return sys.getrefcount(arrays[i])


_ALONE = _references([object()], 0)  # the references of what only the list has


def _shared(host: Host, arrays: list[Any], i: int) -> bool:
    """Whether someone else than the list has an output or its memory: an input, a runner's
    buffer. Arrays that cannot be written to may be anyone's."""
    if host.name not in ("NumPy", "CuPy"):
        return False
    if hosts.known.get(type(arrays[i])) is not host:
        return False  # a number, or refused later
    if _references(arrays, i) > _ALONE:
        return True
    bases = [arrays[i].base]
    if bases[0] is None:
        return not arrays[i].flags.owndata
    if type(bases[0]) is not type(arrays[i]) or not bases[0].flags.owndata:
        return True
    return _references(bases, 0) > _ALONE + 1  # the array's own


def wrong_output(
    op: Declared,
    runner: Runner,
    output: Argument,
    returned: str,
    expected: tuple[Shape, Dtype],
    device: str,
) -> KernelError:
    """The error for an output of a Python function that is not as declared."""
    shape, kind = expected
    return KernelError(
        f"[op] {runner.name} of op {op.name!r} returned {returned} for output {output.name!r}; "
        f"expected {kind.name} of shape {shape} on {device}, by {output}."
    )


def _checked(
    op: Declared,
    runner: Runner,
    host: Host,
    device: str,
    output: Argument,
    value: Any,
    expected: tuple[Shape, Dtype],
) -> Any:
    if isinstance(value, np.generic) and host.name == "NumPy":
        value = np.asarray(value)  # what NumPy's sums give
    if hosts.find(type(value)) is not host:
        raise wrong_output(op, runner, output, shown(value), expected, device)
    try:
        fact = host.facts(value)
    except FerruleError as error:
        label = f"[op] output {output.name!r} of {runner.name} of op {op.name!r}"
        raise renamed(error, label) from error
    if fact is None or (fact.shape, fact.dtype) != expected or fact.device != device:
        returned = f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise wrong_output(op, runner, output, returned, expected, device)
    return value


def mixed(label: str, other: Host, first: str, host: Host) -> KernelError:
    """The error for an input of another library than the ``first`` that is an array."""
    return KernelError(
        f"{label} is an array of {other.name}, but input {first!r} one of {host.name}; expected "
        "arrays of one library."
    )


def gathered(
    op: Declared, values: Sequence[Any]
) -> tuple[Host, str, dict[str, Facts | float | None], dict[str, Any], dict[str, Any]]:
    """The host and device of the inputs, their facts, the arrays as a kernel takes them, and those
    of them that are copies of what is written in place."""
    host: Host | None = None
    device, first = "", ""
    arguments: dict[str, Facts | float | None] = {}
    arrays: dict[str, Any] = {}
    copies: dict[str, Any] = {}
    contiguous = any(body.contiguous for body in op.implementations)
    before: dict[str, Facts] = {}  # of the arrays of the call, where they are known
    for parameter, value in zip(op.rule.inputs, values, strict=True):
        name = parameter.name
        label = f"[op] input {name!r} of op {op.name!r}"
        if parameter.dims is None:
            arguments[name] = number(op.name, parameter, value)
            continue
        if value is None:
            arguments[name] = None
            continue
        other = _host_of(parameter, label, value)
        if host is None:
            host, first = other, name
        elif other is not host:
            raise mixed(label, other, first, host)
        if parameter.mutable:
            _check_writable(host, label, value)
        try:
            fact = host.facts(value)
            if fact is not None:
                before[name] = fact
            if fact is None or ((contiguous or parameter.mutable) and not fact.row_contiguous):
                op.counts["copy"] += 1
                value = host.contiguous(value)
                fact = cast(Facts, host.facts(value))
                if parameter.mutable:
                    copies[name] = value
        except FerruleError as error:
            _check_one_host(op, values, host, first)
            raise renamed(error, label) from error
        if not device:
            device = fact.device
        elif fact.device != device:
            raise KernelError(
                f"{label} is on {fact.device}, but input {first!r} on {device}; expected one "
                "device."
            )
        arguments[name], arrays[name] = fact, value
    if host is None:
        host = hosts.load("numpy")
        device = host.device()
    for name in sharing(op, before):
        op.counts["copy"] += 1
        arrays[name] = arrays[name].copy()
        arguments[name] = host.facts(arrays[name])
    return host, device, arguments, arrays, copies


def _host_of(parameter: Argument, label: str, value: Any) -> Host:
    """The host of an input that must be an array."""
    host = hosts.known.get(type(value)) or hosts.find(type(value))
    if host is None:
        raise KernelTypeError(
            f"{label}: got {shown(value)} of type {type(value).__name__}, expected an array: "
            f"{parameter}."
        )
    return host


def _check_one_host(op: Declared, values: Sequence[Any], host: Host, first: str) -> None:
    """Refuse inputs of several libraries, which may be why a host could not read its own."""
    for parameter, value in zip(op.rule.inputs, values, strict=True):
        other = hosts.find(type(value)) if parameter.dims is not None else None
        if other is not None and other is not host:
            label = f"[op] input {parameter.name!r} of op {op.name!r}"
            raise mixed(label, other, first, host) from None


def check_apart(op: Declared, arguments: Arguments) -> list[str]:
    """`sharing`, which also refuses writes to arrays that have many elements in one place.

    Raises:
        KernelError: that is so, or two that are written share memory.
    """
    for parameter in op.rule.inputs:
        fact = arguments.get(parameter.name)
        if not parameter.mutable or not isinstance(fact, Facts):
            continue
        pairs = zip(fact.shape, fact.strides, strict=True)
        if any(size > 1 and step == 0 for size, step in pairs):
            raise KernelError(
                f"[op] input {parameter.name!r} of op {op.name!r} is written in place, but has "
                "many elements in one place, as an expanded array has; give a copy."
            )
    return sharing(op, arguments)


def sharing(op: Declared, arguments: Arguments) -> list[str]:
    """The inputs to copy, for they share memory with one that is written in place: what is read is
    what was there before.

    Raises:
        KernelError: two that are written share memory.
    """
    written = [
        (parameter.name, memory_of(fact))
        for parameter in op.rule.inputs
        if parameter.mutable and isinstance(fact := arguments.get(parameter.name), Facts)
    ]
    copied = []
    for parameter in op.rule.inputs if written else ():
        fact = arguments.get(parameter.name)
        if not isinstance(fact, Facts):
            continue
        start, end = memory_of(fact)
        for name, (first, last) in written:
            if name == parameter.name:
                break  # each pair of those that are written once
            if max(start, first) >= min(end, last):
                continue
            if parameter.mutable:
                raise KernelError(
                    f"[op] input {parameter.name!r} of op {op.name!r} shares memory with input "
                    f"{name!r}, and both are written in place; give a copy."
                )
            copied.append(parameter.name)
            break
    return copied


def memory_of(fact: Facts) -> tuple[int, int]:
    """The addresses between which an array's elements lie; none of an empty one."""
    if not fact.size:
        return fact.pointer, fact.pointer
    ends = [(n - 1) * step for n, step in zip(fact.shape, fact.strides, strict=True)]
    first, last = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
    size = fact.dtype.itemsize
    return fact.pointer + first * size, fact.pointer + (last + 1) * size


def _check_writable(host: Host, label: str, value: Any) -> None:
    """Refuse to write to an array that others count on."""
    if host.name not in ("NumPy", "CuPy", "torch"):
        raise KernelError(
            f"{label} is written in place, which arrays of {host.name} do not allow; declare an "
            "output in its place."
        )
    if host.name == "NumPy" and not value.flags.writeable:
        raise KernelError(f"{label} is written in place, but is read-only; give a copy.")


def _write_back(op: Declared, values: Sequence[Any], copies: dict[str, Any]) -> None:
    """Copy what was written to copies of inputs back to these inputs."""
    for parameter, value in zip(op.rule.inputs, values, strict=True):
        if parameter.name in copies:
            value[...] = copies[parameter.name]
