"""A call of an op with arrays of NumPy or MLX, and what is the same for every array library: which
implementation is chosen, and what a Python function may return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import DeviceError, FerruleError, KernelError
from ..hosts import protocol as hosts
from ..kernels.arguments import fill_value, renamed, shown, wrong_type
from ..rules.argument import Argument, as_declared, listed
from ..spec import Facts, extent
from .bodies import BodyLaunch, KernelBody
from .checked_call import OnCpu, in_cuda
from .launch import Arguments, BoundCall, bound, check_empty, number, prepare
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
    call, host, arrays = bound_arrays(op, values)
    maker = host if maker_of is None else maker_of(host)
    on_cpu = in_cuda(call)
    if on_cpu is not None and choose(on_cpu).kind == "cuda":
        facts = cast(Callable[[Any], Facts], host.facts)
        outputs = run_body(on_cpu, choose(on_cpu), OnCpu(maker), facts, 0)  # type: ignore[arg-type]
        return packed(host.finish(f"op {op.name!r}", list(arrays.values()), outputs))
    chosen = choose(call)
    queue = host.stream(None, call.device)
    if isinstance(chosen, Runner):
        inputs = [arrays.get(name, value) for name, value in call.arguments.items()]
        outputs, made_here = run(call, chosen, queue, inputs, maker, originals=values)
        for i in range(len(outputs)):
            shared = not made_here and _shared(host, outputs, i)
            outputs[i] = _checked(call, chosen, host, i, outputs[i])
            if shared:
                op.counts["output copy"] += 1
                outputs[i] = outputs[i].copy()
    else:
        facts = cast(Callable[[Any], Facts], host.facts)
        outputs = run_body(call, chosen, maker, facts, queue, host)
    finished = host.finish(f"op {op.name!r}", list(arrays.values()), outputs)
    for value, copy in copies_of_written(op, values, arrays):
        value[...] = copy
    return packed(finished)


def packed(outputs: Sequence[Any]) -> Any:
    """One output as it is, several as a tuple, none as None."""
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) if outputs else None


def choose(call: BoundCall) -> Implementation:
    """The best implementation for a call's device and sizes.

    Raises:
        DeviceError: there is none.
    """
    op, device, bodies = call.op, call.device, call.op.implementations

    def first() -> Implementation | None:
        fit = (body for body in bodies if device.startswith("cuda") or body.kind != "cuda")
        return next((body for body in fit if body.holds(call.binding)), None)

    if (chosen := call.once("implementation", first)) is not None:
        return cast(Implementation, chosen)
    kinds = ", ".join(repr(b.kind) + f" when {b.when}" * (b.when is not None) for b in bodies)
    raise DeviceError(
        f"[op] op {op.name!r} has nothing that runs on {device!r} for these sizes: it has {kinds}. "
        "A `metal` body runs on every device."
    )


def run_body(
    call: BoundCall,
    body: KernelBody | CudaUnit,
    maker: Any,
    facts: Callable[[Any], Facts],
    queue: int,
    host: Host | None = None,
) -> list[Any]:
    """The outputs of a kernel or a unit, which is started, for every array library alike; on the
    CPU nothing runs any more.

    Args:
        call, body: what is run.
        maker, facts: who makes arrays (``empty`` and ``full`` of a host), and what a kernel must
            know of one.
        queue: on which stream.
        host: whose memory beside the outputs is looked at, if it is given.

    Raises:
        KernelError: a size is out of range; or no thread would run, and yet an output has elements.
        CompileError, DialectError, ToolchainError, DeviceError: as a kernel's launch does, and as
            `run_unit`.
    """
    if isinstance(body, CudaUnit):
        return run_unit(call, body, maker, facts, queue)
    body_launch = body.launch_for(call.binding)
    outputs = made_outputs(call, body, body_launch, maker)
    written = list(map(facts, outputs))
    if 0 in body_launch.grid:
        check_empty(call.op.name, call.op.rule, body_launch, written)
        return outputs
    program, inputs, written, launch, owners = prepare(call, body, body_launch, written)
    program.launch(inputs, written, launch, queue)
    if host is not None and call.device == "cpu":
        names = [output.name for output in call.op.rule.outputs]
        hosts.check_written(launch.of(body.kernel), host, names, outputs)
    del owners  # the bytes of numbers had to live until here
    return outputs


def made_outputs(
    call: BoundCall, body: KernelBody, body_launch: BodyLaunch, maker: Any
) -> list[Any]:
    """Arrays for what a kernel writes, filled where it wants that."""
    if body_launch.fill is None:
        return [maker.empty(shape, kind, call.device) for shape, kind in call.results]
    return [
        maker.full(shape, fill_value(body.kernel, i, body_launch.fill, kind), kind, call.device)
        for i, (shape, kind) in enumerate(call.results)
    ]


def run(
    call: BoundCall,
    runner: Runner,
    queue: int,
    inputs: Sequence[Any],
    host: Any,
    capturing: Callable[[str], bool] | None = None,
    originals: Sequence[Any] | None = None,
) -> tuple[list[Any], bool]:
    """The outputs of a Python function for these inputs.

    Args:
        call, runner: what is run.
        queue: on which stream.
        inputs: its inputs.
        host: makes the outputs, where the function wants them.
        capturing: see `Runner.function_for`.
        originals: what some of the inputs are copies of.

    Returns:
        The outputs, and whether they were made here: nobody else has them then.

    Raises:
        KernelError: it returned other than one array per output, or something else than None
            where it was given the outputs.
    """
    op, device = call.op, call.device
    function, takes_outputs, wants_stream = runner.function_for(device, call.binding, capturing)
    outputs = op.rule.outputs
    named: dict[str, Any] = {"stream": queue} if wants_stream else {}
    if runner.state:
        named.update(runner.state_for(call.binding, host, device, queue))
    if runner.prepared:
        passed = dict(zip(call.arguments, inputs, strict=True))
        weights = dict(zip(call.arguments, originals or inputs, strict=True))
        captured = capturing is not None and capturing(device)
        for each in runner.prepared:
            named[each.name] = each.value(op.counts, device, weights, passed, host, captured)
    if takes_outputs:
        names = [output.name for output in outputs]
        written = [host.empty(shape, kind, device) for shape, kind in call.results]
        named.update({output.name: None for output in op.rule.declared})
        named.update(zip(names, written, strict=True))
        result = function(*inputs, **named)
        check_written(op, runner, result, written)
        if device == "cpu" and host.name == "NumPy":  # the function may give torch's other memory
            label = f"{runner.name} of op {op.name!r}"
            hosts.check_written(label, host, names, written)
        return written, True
    return returned(op, runner, function(*inputs, **named)), False


def returned(op: Declared, runner: Runner, result: Any) -> list[Any]:
    """The outputs that a function gave which had to make them.

    Raises:
        KernelError: it is other than one array per output.
    """
    if not op.rule.outputs:
        return []
    declared, many = op.rule.declared, isinstance(result, (tuple, list))
    values = list(result) if len(declared) > 1 and many else [result]
    if len(values) != len(declared):
        counted = f"{len(result)} values" if many else f"a {type(result).__name__}"
        raise KernelError(
            f"[op] {runner.name} of op {op.name!r} returned {counted}; expected {len(declared)} "
            f"arrays {listed(declared)}."
        )
    pairs = zip(declared, values, strict=True)
    return [value for output, value in pairs if output.present is not False]


def check_written(op: Declared, runner: Runner, result: object, written: Sequence[Any]) -> None:
    """Refuse new arrays of a function that was to write to others, so that no result is lost.

    Many return what they wrote to, which is right, or a state, which is none of an op's business.
    """
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts if written else ():
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


def wrong_output(call: BoundCall, runner: Runner, i: int, returned: str) -> KernelError:
    """The error for output ``i`` of a Python function, which is not as declared."""
    output, (shape, kind) = call.op.rule.outputs[i], call.results[i]
    return KernelError(
        f"[op] {runner.name} of op {call.op.name!r} returned {returned} for output "
        f"{output.name!r}; expected {kind.name} of shape {shape} on {call.device}, by "
        f"{as_declared(output)}."
    )


def _checked(call: BoundCall, runner: Runner, host: Host, i: int, value: Any) -> Any:
    if isinstance(value, np.generic) and host.name == "NumPy":
        value = np.asarray(value)  # what NumPy's sums give
    if hosts.find(type(value)) is not host:
        raise wrong_output(call, runner, i, shown(value))
    try:
        fact = host.facts(value)
    except FerruleError as error:
        output = call.op.rule.outputs[i].name
        label = f"[op] output {output!r} of {runner.name} of op {call.op.name!r}"
        raise renamed(error, label) from error
    expected = (*call.results[i], call.device)
    if fact is None or (fact.shape, fact.dtype, fact.device) != expected:
        returned = f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise wrong_output(call, runner, i, returned)
    return value


def label_of(op: Declared, parameter: Argument) -> str:
    """How messages call an input."""
    return f"[op] input {parameter.name!r} of op {op.name!r}"


def mixed(label: str, other: Host, first: str, host: Host) -> KernelError:
    """The error for an input of another library than the ``first`` that is an array."""
    return KernelError(
        f"{label} is an array of {other.name}, but input {first!r} one of {host.name}; expected "
        "arrays of one library."
    )


def gathered(
    op: Declared, values: Sequence[Any], facts_of: Callable[[Argument, Any], Facts]
) -> Arguments:
    """Per input of a call the facts of the array, the number, or None where it is absent.

    ``facts_of`` gives the facts of an array; it is called in the order of the inputs.
    """
    arguments: Arguments = {}
    for parameter, value in zip(op.rule.inputs, values, strict=True):
        if parameter.dims is None:
            arguments[parameter.name] = number(op.name, parameter, value)
        else:
            arguments[parameter.name] = None if value is None else facts_of(parameter, value)
    return arguments


class _Reader:
    """Reads the arrays of a call, which must be of one library, on one device.

    Attributes:
        host, device: of the arrays; None and ``""`` as long as there is none.
        arrays: by the names of their inputs; a copy of one that a kernel cannot take as it lies.
    """

    def __init__(self, op: Declared, values: Sequence[Any]) -> None:
        self.op, self.values = op, values
        self.host: Host | None = None
        self.device = self.first = ""
        self.arrays: dict[str, Any] = {}

    def facts(self, parameter: Argument, value: Any) -> Facts:
        """The facts of an input that must be an array."""
        host = hosts.known.get(type(value)) or hosts.find(type(value))
        if host is None:
            raise wrong_type(label_of(self.op, parameter), value, f"an array: {parameter}")
        if self.host is None:
            self.host, self.first = host, parameter.name
        elif host is not self.host:
            raise mixed(label_of(self.op, parameter), host, self.first, self.host)
        if parameter.mutable:
            _check_writable(host, label_of(self.op, parameter), value)
        try:
            fact = host.facts(value)
            if fact is None:
                self.op.counts["copy"] += 1
                value = host.contiguous(value)
                fact = cast(Facts, host.facts(value))
        except FerruleError as error:
            self._check_one_host(host)
            raise renamed(error, label_of(self.op, parameter)) from error
        if not self.device:
            self.device = fact.device
        elif fact.device != self.device:
            raise KernelError(
                f"{label_of(self.op, parameter)} is on {fact.device}, but input {self.first!r} on "
                f"{self.device}; expected one device."
            )
        self.arrays[parameter.name] = value
        return fact

    def _check_one_host(self, host: Host) -> None:
        """Refuse inputs of several libraries, which may be why a host could not read its own."""
        for parameter, value in zip(self.op.rule.inputs, self.values, strict=True):
            other = hosts.find(type(value)) if parameter.dims is not None else None
            if other is not None and other is not host:
                raise mixed(label_of(self.op, parameter), other, self.first, host) from None


def bound_arrays(op: Declared, values: Sequence[Any]) -> tuple[BoundCall, Host, dict[str, Any]]:
    """A call with these inputs, the host of its arrays, and the arrays as any of the op's
    implementations takes them, copies where that is needed."""
    reader = _Reader(op, values)
    arguments = gathered(op, values, reader.facts)
    shared = sharing(op, arguments)  # before copies have other addresses
    host = reader.host or hosts.load("numpy")
    call = bound(op, reader.device or host.device(), arguments)
    contiguous = any(body.contiguous for body in op.implementations)
    replace_by_copies(call, strided(call, contiguous), reader.arrays, host.contiguous, host.facts)
    replace_by_copies(call, shared, reader.arrays, lambda array: array.copy(), host.facts)
    return call, host, reader.arrays


def strided(call: BoundCall, contiguous: bool) -> list[str]:
    """The inputs that are not row-contiguous, and must be: where an implementation wants
    ``contiguous`` ones, and what is written in place."""
    arguments = call.arguments
    return [
        parameter.name
        for parameter in (call.op.rule.inputs if contiguous else call.op.in_place)
        if isinstance(fact := arguments[parameter.name], Facts) and not fact.row_contiguous
    ]


def replace_by_copies(
    call: BoundCall,
    names: Iterable[str],
    arrays: dict[str, Any],
    copy: Callable[[Any], Any],
    facts: Callable[[Any], Facts | None],
) -> None:
    """Put copies in the place of some arrays of a call, and of their facts."""
    for name in names:
        call.op.counts["copy"] += 1
        arrays[name] = copy(arrays[name])
        call.arguments[name] = cast(Facts, facts(arrays[name]))


def copies_of_written(
    op: Declared, values: Sequence[Any], arrays: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The inputs that are written in place where a call had copies of them, with the copies, which
    are to be copied back."""
    for parameter, value in zip(op.rule.inputs, values, strict=True) if op.in_place else ():
        if parameter.mutable and value is not None and arrays[parameter.name] is not value:
            yield value, arrays[parameter.name]


def check_apart(op: Declared, arguments: Arguments) -> list[str]:
    """`sharing`, which also refuses writes to arrays that have many elements in one place.

    Raises:
        KernelError: that is so, or two that are written share memory.
    """
    for parameter in op.in_place:
        fact = arguments[parameter.name]
        if isinstance(fact, Facts) and any(
            size > 1 and step == 0 for size, step in zip(fact.shape, fact.strides, strict=True)
        ):
            raise KernelError(
                f"{label_of(op, parameter)} is written in place, but has many elements in one "
                "place, as an expanded array has; give a copy."
            )
    return sharing(op, arguments)


def sharing(op: Declared, arguments: Arguments) -> list[str]:
    """The inputs to copy, for they share memory with one that is written in place: what is read is
    what was there before.

    Raises:
        KernelError: two that are written share memory.
    """
    written = {
        parameter.name: _memory_of(fact)
        for parameter in op.in_place
        if isinstance(fact := arguments[parameter.name], Facts)
    }
    copied = []
    for parameter in op.rule.inputs if written else ():
        fact = arguments[parameter.name]
        start, end = _memory_of(fact) if isinstance(fact, Facts) else (0, 0)
        for name, (first, last) in written.items():
            if name == parameter.name:
                break  # each pair of those that are written once
            if max(start, first) < min(end, last):
                if parameter.mutable:
                    raise KernelError(
                        f"{label_of(op, parameter)} shares memory with input {name!r}, and both "
                        "are written in place; give a copy."
                    )
                copied.append(parameter.name)
                break
    return copied


def _memory_of(fact: Facts) -> tuple[int, int]:
    """The addresses between which an array's elements lie; none of an empty one."""
    first, count = extent(fact.shape, fact.strides)
    start = fact.pointer + first * fact.dtype.itemsize
    return start, start + count * fact.dtype.itemsize


def _check_writable(host: Host, label: str, value: Any) -> None:
    """Refuse to write to an array that others count on."""
    if host.name not in ("NumPy", "CuPy", "torch"):
        raise KernelError(
            f"{label} is written in place, which arrays of {host.name} do not allow; declare an "
            "output in its place."
        )
    if host.name == "NumPy" and not value.flags.writeable:
        raise KernelError(f"{label} is written in place, but is read-only; give a copy.")
