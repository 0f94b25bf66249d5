"""A call of an op with arrays of NumPy or MLX, and what is the same for every array library: which
implementation is chosen, and what a Python function may return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from . import dtypes, hosts
from .arguments import fill_value, renamed, shown
from .cuda_steps import CudaUnit, Implementation
from .dtypes import Dtype
from .errors import DeviceError, FerruleError, KernelError, KernelTypeError
from .implementation import KernelBody, Runner, Sent
from .op_launch import launch, number
from .op_unit import carry_out
from .rule import Argument, Binding
from .spec import Facts, Shape

if TYPE_CHECKING:
    from .hosts import Host
    from .op_declaration import Op

OLDEST_TORCH = (2, 10)  # an older one may do, without calls in C


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op for arrays of NumPy, MLX, CuPy and others alike.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    graph = hosts.nodes(values)
    if graph is not None:
        made = graph.call(op, values)
        if made is not NotImplemented:
            return made
    return eager(op, values)


def eager(op: Op, values: Sequence[Any], made_by: Callable[[Host], Host] | None = None) -> Any:
    """The outputs of an op, carried out now; raises as `call`.

    ``made_by`` gives what makes outputs, and anything else as the host does.
    """
    host, device, given, arrays, copies = gathered(op, values)
    maker = host if made_by is None else made_by(host)
    said, results = bound(op, given)
    chosen = choose(op, device, said)
    queue = host.stream(None, device)
    if isinstance(chosen, Runner):
        inputs: list[Any] = []
        for one in op.rule.inputs:
            fact = given[one.name]
            value = arrays.get(one.name, fact)
            if chosen.contiguous and isinstance(fact, Facts) and not fact.row_contiguous:
                op.counts["copy"] += 1
                value = host.contiguous(value)
            inputs.append(value)
        outputs, own = run(op, chosen, device, queue, said, inputs, results, maker)
        for i, (one, expected) in enumerate(zip(op.rule.outputs, results, strict=True)):
            shared = not own and _shared(host, outputs, i)
            outputs[i] = _checked(op, chosen, host, device, one, outputs[i], expected)
            if shared:
                op.counts["output copy"] += 1
                outputs[i] = outputs[i].copy()
    elif isinstance(chosen, CudaUnit):
        outputs = carry_out(
            op.name, op.rule, chosen, maker, lambda one: cast(Facts, host.facts(one)), device,
            queue, said, given, results,
        )  # fmt: skip
    else:
        sent = chosen.sent(said)
        outputs = made_outputs(chosen, sent, results, maker, device)
        facts = [cast(Facts, host.facts(one)) for one in outputs]
        look = written_by(op, host, outputs)
        launch(op.name, op.rule, chosen, sent, said, device, queue, given, facts, look)
    finished = host.finish(f"op {op.name!r}", list(arrays.values()), outputs)
    _write_back(op, values, copies)
    return packed(finished)


def packed(outputs: Sequence[Any]) -> Any:
    """One output as it is, several as a tuple, none as None."""
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) if outputs else None


def bound(
    op: Op, given: dict[str, Facts | float | None]
) -> tuple[Binding, list[tuple[Shape, Dtype]]]:
    """What the rule says of a call, and the shape and dtype of each output."""
    shapes: list[Shape | None] = []
    kinds: list[str | None] = []
    for one in op.rule.inputs:
        fact = given[one.name]
        shapes.append(
            fact.shape if isinstance(fact, Facts) else None if one.dims is not None else ()
        )
        kinds.append(fact.dtype.name if isinstance(fact, Facts) else None)
    said = op.rule.bind(op.name, shapes, kinds)
    results = op.rule.results(op.name, said)
    return said, [(shape, dtypes.BY_NAME[kind]) for shape, kind in results]


def choose(op: Op, device: str, said: Binding) -> Implementation:
    """The best implementation for a device and these sizes.

    Raises:
        DeviceError: there is none.
    """
    cuda = device.startswith("cuda")
    for one in op.implementations:
        if (cuda or one.kind != "cuda") and one.holds(said):
            return one
    kinds = ", ".join(
        repr(one.kind) + (f" when {one.when}" if one.when is not None else "")
        for one in op.implementations
    )
    raise DeviceError(
        f"[op] op {op.name!r} has nothing that runs on {device!r} for these sizes: it has {kinds}. "
        "A `metal` body runs on every device."
    )


def written_by(op: Op, host: Host, outputs: Sequence[Any]) -> Callable[[str], None]:
    """What looks at the memory beside outputs that were made here; see `hosts.check_written`."""
    names = [one.name for one in op.rule.outputs]
    return lambda what: hosts.check_written(what, host, names, outputs)


def made_outputs(
    body: KernelBody, sent: Sent, results: Sequence[tuple[Shape, Dtype]], host: Any, device: str
) -> list[Any]:
    """Arrays for what a kernel writes, filled where it wants that."""
    if sent.fill is None:
        return [host.empty(shape, kind, device) for shape, kind in results]
    return [
        host.full(shape, fill_value(body.kernel, i, sent.fill, kind), kind, device)
        for i, (shape, kind) in enumerate(results)
    ]


def run(
    op: Op, runner: Runner, device: str, queue: int, said: Binding, inputs: Sequence[Any],
    results: Sequence[tuple[Shape, Dtype]], host: Any,
    capturing: Callable[[str], bool] | None = None,
) -> tuple[list[Any], bool]:  # fmt: skip
    """What a Python function gives for these inputs.

    Args:
        op, runner: what is run.
        device, queue, said: where, on which stream, with which sizes.
        inputs: its inputs.
        results: the shape and dtype of each output.
        host: makes the outputs, where the function wants them.
        capturing: see `Runner.made`.

    Returns:
        The outputs, and whether they were made here: nobody else has them then.

    Raises:
        KernelError: it returned other than one array per output, or something else than None
            where it was given the outputs.
    """
    function, given, wants_stream = runner.made(device, said, capturing)
    outputs = op.rule.outputs
    named: dict[str, Any] = {"stream": queue} if wants_stream else {}
    if given:
        made = [host.empty(shape, kind, device) for shape, kind in results]
        named.update(zip((one.name for one in outputs), made, strict=True))
        result = function(*inputs, **named)
        _check_written(op, runner, result, made)
        if device == "cpu" and host.name == "NumPy":  # the function may give torch's other memory
            written_by(op, host, made)(f"{runner.name} of op {op.name!r}")
        return made, True
    result = function(*inputs, **named)
    if not outputs:
        return [], True
    found = list(result) if len(outputs) > 1 and isinstance(result, (tuple, list)) else [result]
    if len(found) != len(outputs):
        raise KernelError(
            f"[op] {runner.name} of op {op.name!r} returned {_counted(result)}; expected "
            f"{len(outputs)} arrays ({', '.join(map(str, outputs))})."
        )
    return found, False


def _counted(result: object) -> str:
    if isinstance(result, (tuple, list)):
        return f"{len(result)} values"
    return f"a {type(result).__name__}"


def _check_written(op: Op, runner: Runner, result: object, made: Sequence[Any]) -> None:
    """Refuse what a function returns that was to write to arrays, so that no result is lost.

    Many return what they wrote to, which is right, or a state, which is none of an op's business.
    """
    parts = result if isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if type(part) is type(made[0]) and not any(part is one for one in made):
            names = ", ".join(repr(one.name) for one in op.rule.outputs)
            raise KernelError(
                f"[op] {runner.name} of op {op.name!r} has parameters for the outputs {names}, and "
                "yet returned an array that is none of them; expected it to write to them and to "
                "return nothing."
            )


def _references(found: list[Any], i: int) -> int:
    return sys.getrefcount(found[i])


_ALONE = _references([object()], 0)  # the references of what only the list has


def _shared(host: Host, found: list[Any], i: int) -> bool:
    """Whether someone else than the list has an output or its memory: an input, a runner's
    buffer. Arrays that cannot be written to may be anyone's."""
    if host.name not in ("NumPy", "CuPy"):
        return False
    if hosts.known.get(type(found[i])) is not host:
        return False  # a number, or refused later
    if _references(found, i) > _ALONE:
        return True
    bases = [found[i].base]
    if bases[0] is None:
        return not found[i].flags.owndata
    if type(bases[0]) is not type(found[i]) or not bases[0].flags.owndata:
        return True
    return _references(bases, 0) > _ALONE + 1  # the array's own


def wrong_output(
    op: Op, runner: Runner, one: Argument, found: str, expected: tuple[Shape, Dtype], device: str
) -> KernelError:
    """The error for what a Python function returned."""
    shape, kind = expected
    return KernelError(
        f"[op] {runner.name} of op {op.name!r} returned {found} for output {one.name!r}; expected "
        f"{kind.name} of shape {shape} on {device}, by {one}."
    )


def _checked(
    op: Op, runner: Runner, host: Host, device: str, one: Argument, value: Any,
    expected: tuple[Shape, Dtype],
) -> Any:  # fmt: skip
    if isinstance(value, np.generic) and host.name == "NumPy":
        value = np.asarray(value)  # what NumPy's sums give
    if hosts.find(type(value)) is not host:
        raise wrong_output(op, runner, one, shown(value), expected, device)
    try:
        fact = host.facts(value)
    except FerruleError as error:
        label = f"[op] output {one.name!r} of {runner.name} of op {op.name!r}"
        raise renamed(error, label) from error
    if fact is None or (fact.shape, fact.dtype) != expected or fact.device != device:
        found = f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise wrong_output(op, runner, one, found, expected, device)
    return value


def mixed(label: str, its: Host, first: str, host: Host) -> KernelError:
    """The error for an input of another library than the ``first`` that is an array."""
    return KernelError(
        f"{label} is an array of {its.name}, but input {first!r} one of {host.name}; expected "
        "arrays of one library."
    )


def gathered(
    op: Op, values: Sequence[Any]
) -> tuple[Host, str, dict[str, Facts | float | None], dict[str, Any], dict[str, Any]]:
    """Whose arrays the inputs are, on which device, what they are like, the arrays as a kernel
    takes them, and those of them that are copies of what is written in place."""
    host: Host | None = None
    device, first = "", ""
    given: dict[str, Facts | float | None] = {}
    arrays: dict[str, Any] = {}
    copies: dict[str, Any] = {}
    contiguous = any(one.contiguous for one in op.implementations)
    before: dict[str, Facts] = {}  # of the arrays that were given, where they are known
    for one, value in zip(op.rule.inputs, values, strict=True):
        label = f"[op] input {one.name!r} of op {op.name!r}"
        if one.dims is None:
            given[one.name] = number(op.name, one, value)
            continue
        if value is None:
            given[one.name] = None
            continue
        found = hosts.known.get(type(value)) or hosts.find(type(value))
        if found is None:
            raise KernelTypeError(
                f"{label}: got {shown(value)} of type {type(value).__name__}, expected an array: "
                f"{one}."
            )
        if host is None:
            host, first = found, one.name
        elif found is not host:
            raise mixed(label, found, first, host)
        if one.mutable:
            _check_writable(found, label, value)
        try:
            fact = found.facts(value)
            if fact is not None:
                before[one.name] = fact
            if fact is None or ((contiguous or one.mutable) and not fact.row_contiguous):
                op.counts["copy"] += 1
                value = found.contiguous(value)
                fact = cast(Facts, found.facts(value))
                if one.mutable:
                    copies[one.name] = value
        except FerruleError as error:
            for two, other in zip(op.rule.inputs, values, strict=True):  # why it was asked now
                its = hosts.find(type(other)) if two.dims is not None else None
                if its is not None and its is not host:
                    raise mixed(
                        f"[op] input {two.name!r} of op {op.name!r}", its, first, host
                    ) from None
            raise renamed(error, label) from error
        if not device:
            device = fact.device
        elif fact.device != device:
            raise KernelError(
                f"{label} is on {fact.device}, but input {first!r} on {device}; expected one "
                "device."
            )
        given[one.name], arrays[one.name] = fact, value
    if host is None:
        host = hosts.load("numpy")
        device = host.device()
    for name in sharing(op, before):
        op.counts["copy"] += 1
        arrays[name] = arrays[name].copy()
        given[name] = host.facts(arrays[name])
    return host, device, given, arrays, copies


def check_apart(op: Op, given: Mapping[str, Facts | float | None]) -> list[str]:
    """As `sharing`; also refuse to write to arrays that have many elements in one place.

    Raises:
        KernelError: that is so, or two that are written share memory.
    """
    for one in op.rule.inputs:
        fact = given.get(one.name)
        if not one.mutable or not isinstance(fact, Facts):
            continue
        pairs = zip(fact.shape, fact.strides, strict=True)
        if any(size > 1 and step == 0 for size, step in pairs):
            raise KernelError(
                f"[op] input {one.name!r} of op {op.name!r} is written in place, but has many "
                "elements in one place, as an expanded array has; give a copy."
            )
    return sharing(op, given)


def sharing(op: Op, given: Mapping[str, Facts | float | None]) -> list[str]:
    """The inputs to copy, for they share memory with one that is written in place: what is read is
    what was there before.

    Raises:
        KernelError: two that are written share memory.
    """
    written = [
        (one.name, memory_of(fact))
        for one in op.rule.inputs
        if one.mutable and isinstance(fact := given.get(one.name), Facts)
    ]
    found = []
    for one in op.rule.inputs if written else ():
        fact = given.get(one.name)
        if not isinstance(fact, Facts):
            continue
        start, end = memory_of(fact)
        for name, (first, last) in written:
            if name == one.name:
                break  # each pair of those that are written once
            if max(start, first) >= min(end, last):
                continue
            if one.mutable:
                raise KernelError(
                    f"[op] input {one.name!r} of op {op.name!r} shares memory with input "
                    f"{name!r}, and both are written in place; give a copy."
                )
            found.append(one.name)
            break
    return found


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


def _write_back(op: Op, values: Sequence[Any], copies: dict[str, Any]) -> None:
    """Bring what was written to copies back to where it belongs."""
    for one, value in zip(op.rule.inputs, values, strict=True):
        if one.name in copies:
            value[...] = copies[one.name]


class TorchIsTooOld:
    """Stands for an op in a torch that lacks what ops need; arrays of others can be given."""

    def __init__(self, torch: Any, error: Exception) -> None:
        self._tensor, self.overload, self.raw = torch.Tensor, self, self
        self._words = (
            f"[op] ops of torch's tensors need torch {'.'.join(map(str, OLDEST_TORCH))} or later; "
            f"this is {torch.__version__} ({error}). `metal_kernel` takes its tensors, too."
        )

    def takes(self, values: Sequence[Any]) -> bool:
        return any(isinstance(value, self._tensor) for value in values)

    def __call__(self, *values: Any) -> Any:
        raise KernelError(self._words)
