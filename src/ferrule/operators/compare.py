"""Whether the implementations of an op agree, and write all of their outputs: `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ..dtypes import Dtype
from ..errors import FerruleError, KernelError
from ..hosts import protocol as hosts
from ..spec import Shape
from . import call as op_call
from .op import Op
from .runners import Runner
from .unit_steps import Implementation

Values = np.ndarray[Any, Any]


class Difference(NamedTuple):
    """How far one output of an implementation is from the same output of another.

    Attributes:
        implementation: which one, such as ``"cuda"``.
        output: the output's name.
        largest: the largest absolute difference; infinite where one is NaN and the other is not.
        relative: the same, divided by the largest magnitude of the output it is compared with.
        at: where it is.
        values: of both there: the implementation's, then what it is compared with.
        tolerance: how large ``relative`` may be: half of the digits of the output's dtype; 0 for
            integers.
    """

    implementation: str
    output: str
    largest: float
    relative: float
    at: tuple[int, ...]
    values: tuple[float, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return self.relative <= self.tolerance


class Unwritten(NamedTuple):
    """Elements of an output that an implementation never wrote: they are what was in the memory.

    Attributes:
        implementation: which one, such as ``"cuda"``.
        output: the output's name.
        number: how many there are.
        at: the first of them.
        mask: all of them: an array of bool, shaped like the output.
    """

    implementation: str
    output: str
    number: int
    at: tuple[int, ...]
    mask: Values


class Comparison:
    """What `compare` found; its text is a table.

    Attributes:
        baseline: the implementation that the others are compared with.
        differences: per implementation and output.
        unwritten: per implementation and output that has elements which were never written.
        skipped: implementations that did not run, and why.
    """

    def __init__(self, op: str, baseline: str) -> None:
        self.op, self.baseline = op, baseline
        self.differences: list[Difference] = []
        self.unwritten: list[Unwritten] = []
        self.skipped: list[tuple[str, str]] = []

    @property
    def ok(self) -> bool:
        """Whether every element was written, and all implementations that ran agree, each output
        within its `Difference.tolerance`."""
        return not self.unwritten and all(d.ok for d in self.differences)

    def check(self) -> Comparison:
        """This comparison, where it is `ok`.

        Raises:
            KernelError: it is not; the message is the table.
        """
        if not self.ok:
            raise KernelError(f"[op] {self!r}")
        return self

    @property
    def largest(self) -> float:
        """The largest absolute difference of all; 0 where there was one implementation alone."""
        return max((d.largest for d in self.differences), default=0.0)

    def __repr__(self) -> str:
        lines = [f"op {self.op!r}, compared with `{self.baseline}`:"]
        for diff in self.differences:
            actual, expected = diff.values
            where = f" at {list(diff.at)}: {actual:.9g}, expected {expected:.9g}"
            lines.append(
                f"  {diff.implementation:<10} {diff.output:<12} {diff.largest:.3g} "
                f"({diff.relative:.3g} of the largest){where if diff.largest else ''}"
                f"{'' if diff.ok else '  WRONG'}"
            )
        for lost in self.unwritten:
            lines.append(
                f"  {lost.implementation:<10} {lost.output:<12} never written: {lost.number} of "
                f"{lost.mask.size} elements, the first at {list(lost.at)}  WRONG"
            )
        lines += [f"  {name:<10} not run: {why}" for name, why in self.skipped]
        if not self.differences:
            lines.append("  there is nothing to compare it with")
        return "\n".join(lines)


def compare(op: Op, *args: Any, **named: Any) -> Comparison:
    """Run every implementation of an op that can be run here, and compare what they give.

    The reference, if there is one, is what the others are compared with; else the last one that
    runs. Each gets copies of what it writes in place. Each is carried out twice, over outputs that
    are filled with two patterns: fresh memory often holds the last right answer, so that elements
    which nothing writes look right. `Comparison.check` raises what was found.

    Args:
        op: the op.
        args, named: its inputs, as in a call.

    Raises:
        KernelError: no implementation runs on the inputs' device; `run` or `reference` raised
            something, which is its cause.
        KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: what the
            implementations raise.
    """
    op = op.variant(*args, **named)
    values = detached(op.ordered(args, named))
    running, skipped = _implementations(op, values)
    results: dict[str, list[_Result]] = {}
    unwritten: list[Unwritten] = []
    for label, implementation in running:
        results[label], masks = _run_twice(op, implementation, values)
        for output, mask in zip(op.rule.outputs, masks, strict=True):
            if mask.any():
                at = tuple(int(i) for i in np.argwhere(mask)[0])
                unwritten.append(Unwritten(label, output.name, int(mask.sum()), at, mask))
    names = [a.name for a in op.rule.outputs]
    names += [a.name for a in op.in_place]
    baseline = "reference" if "reference" in results else running[-1][0]
    report = Comparison(op.name, baseline)
    report.skipped, report.unwritten = skipped, unwritten
    for label, outputs in results.items():
        if label != baseline:
            for name, actual, expected in zip(names, outputs, results[baseline], strict=True):
                report.differences.append(_difference(label, name, actual, expected))
    return report


def _implementations(
    op: Op, values: Sequence[Any]
) -> tuple[list[tuple[str, Implementation]], list[tuple[str, str]]]:
    """The implementations that run here, and those that do not, with the reason, all by label."""
    call, _, _ = op_call.bound_arrays(op, values)
    running: list[tuple[str, Implementation]] = []
    skipped: list[tuple[str, str]] = []
    for n, implementation in enumerate(op.implementations):
        same = sum(other.kind == implementation.kind for other in op.implementations[:n])
        label = f"{implementation.kind} {same + 1}" if same else implementation.kind
        if implementation.kind == "cuda" and not call.device.startswith("cuda"):
            skipped.append((label, f"the arrays are on {call.device}"))
        elif not implementation.holds(call.binding):
            skipped.append((label, f"it is for {implementation.when}"))
        else:
            running.append((label, implementation))
    if not running:
        raise KernelError(
            f"[op] op {op.name!r} has nothing that runs on {call.device!r} to compare."
        )
    return running, skipped


def _run_twice(
    op: Op, implementation: Implementation, values: Sequence[Any]
) -> tuple[list[_Result], list[Values]]:
    """What an implementation writes, outputs first, and which elements of each output it does not.

    Each run fills the outputs with a pattern of its own.
    """
    alone = Op(op.name, op.rule, [implementation], op.batch)
    try:
        first, _ = _run(alone, values, _PATTERNS[0])
    except FerruleError:
        raise
    except Exception as error:
        if not isinstance(implementation, Runner):
            raise
        raise _runner_error(op, implementation, values, error) from error
    second, written = _run(alone, values, _PATTERNS[1])
    masks = [
        _is_pattern(before, _PATTERNS[0]) & _is_pattern(after, _PATTERNS[1])
        for before, after in zip(first, second, strict=True)
    ]
    if hosts.nodes(values) is not None:  # MLX's graphs may run it on another device
        second, written = _run(alone, values, None)
    return [*second, *written], masks


def _runner_error(op: Op, runner: Runner, values: Sequence[Any], error: Exception) -> KernelError:
    kinds = dict.fromkeys(type(v) for v in values if hosts.find(type(v)) is not None)
    received = " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds) or "numbers"
    return KernelError(
        f"[op] {runner.name} of op {op.name!r} was called with {received}, and raised "
        f"{type(error).__name__}: {error}. If it is written for arrays of another library, give "
        "`compare` those; else it is wrong, or has to be written for these, too."
    )


_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-8,
}


def epsilon(dtype: Dtype) -> float:
    """The distance from 1 to the next larger number."""
    return _EPSILON.get(dtype.name, 2.0**-2)  # 8-bit floats


_PATTERNS = 0xA5, 0x5A  # bytes; the second is a large number in most dtypes


class _Filled:
    """A host whose new arrays hold a pattern."""

    def __init__(self, host: hosts.Host, byte: int) -> None:
        self._host, self._byte = host, byte

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def empty(self, shape: Shape, dtype: Dtype, device: str) -> Any:
        """A new array of the pattern."""
        return self._host.full(shape, _pattern(dtype, self._byte), dtype, device)


def _pattern(dtype: Dtype, byte: int) -> Any:
    """The number whose bytes are all ``byte``; for bool, another value for each pattern."""
    if dtype.kind == "b":
        return byte == _PATTERNS[1]
    number = np.frombuffer(bytes([byte]) * dtype.itemsize, dtype.numpy)[0]
    plain = type(number).__module__ == "numpy"
    return (number if plain else np.float32(number)).item()


def _run(op: Op, values: Sequence[Any], byte: int | None) -> tuple[list[_Result], list[_Result]]:
    """Run an op over outputs that are filled with a byte.

    Returns its outputs, and the inputs that it writes in place.
    """
    inputs = list(values)
    for i, argument in enumerate(op.rule.inputs):
        if argument.mutable and values[i] is not None:
            inputs[i] = values[i].clone() if hasattr(values[i], "clone") else values[i].copy()
    if byte is None:
        result = op_call.call(op, inputs)
    else:
        result = op_call.eager(op, inputs, lambda host: cast(hosts.Host, _Filled(host, byte)))
    outputs = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    written = [v for a, v in zip(op.rule.inputs, inputs, strict=True) if a.mutable]
    return [_result(array) for array in outputs], [_result(array) for array in written]


class _Result(NamedTuple):
    """The elements of an array, and its dtype, where it has one."""

    values: Values
    dtype: Dtype | None


def _result(array: Any) -> _Result:
    host = hosts.find(type(array))
    if host is None:
        return _Result(np.asarray(array), None)
    fact = host.facts(array)
    return _Result(np.array(host.to_numpy(array)), None if fact is None else fact.dtype)


def _is_pattern(result: _Result, byte: int) -> Values:
    """A mask of the elements that hold a pattern."""
    if result.dtype is None:
        return np.zeros(result.values.shape, bool)
    mask: Values = np.asarray(result.values == _pattern(result.dtype, byte))
    return mask


def _difference(label: str, name: str, first: _Result, second: _Result) -> Difference:
    dtype = first.dtype
    tolerance = epsilon(dtype) ** 0.5 if dtype is not None and dtype.kind in "fc" else 0.0
    actual, expected = _numbers(first.values), _numbers(second.values)
    if not actual.size:
        return Difference(label, name, 0.0, 0.0, (), (0.0, 0.0), tolerance)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(actual - expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))  # infinities, too
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    largest = float(apart[index])
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    relative = largest / scale if scale else float(largest > 0)
    pair = actual[index], expected[index]
    return Difference(label, name, largest, relative, index, pair, tolerance)


def detached(values: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs without the graph that a library records of them."""
    return tuple(value.detach() if hasattr(value, "detach") else value for value in values)


def _numbers(values: Values) -> Values:
    dtype = np.complex128 if np.iscomplexobj(values) else np.float64
    return np.asarray(values).astype(dtype)
