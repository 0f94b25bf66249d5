"""Whether an op does what it declares: `compare` its implementations, `check_grad` its
derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from . import derivatives, dtypes, hosts, op_call
from .cuda_steps import Implementation
from .dtypes import Dtype
from .errors import KernelError, KernelTypeError
from .implementation import Runner
from .op_declaration import Op
from .rule import Argument
from .spec import Shape

Values = np.ndarray[Any, Any]

_TRIED = 12  # elements of each input that `check_grad` moves, at most


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
        return not self.unwritten and all(one.ok for one in self.differences)

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
        return max((one.largest for one in self.differences), default=0.0)

    def __repr__(self) -> str:
        lines = [f"op {self.op!r}, compared with `{self.baseline}`:"]
        for one in self.differences:
            where = f" at {list(one.at)}: {one.values[0]:.9g}, expected {one.values[1]:.9g}"
            lines.append(
                f"  {one.implementation:<10} {one.output:<12} {one.largest:.3g} "
                f"({one.relative:.3g} of the largest){where if one.largest else ''}"
                f"{'' if one.ok else '  WRONG'}"
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
        KernelError: no implementation runs on the inputs' device; what the implementations raise.
    """
    values = _recording_nothing(op.ordered(args, named))
    device, said = _bound(op, values)
    running: list[tuple[str, Implementation]] = []
    skipped: list[tuple[str, str]] = []
    for n, one in enumerate(op.implementations):
        same = sum(other.kind == one.kind for other in op.implementations[:n])
        label = f"{one.kind} {same + 1}" if same else one.kind
        if one.kind == "cuda" and not device.startswith("cuda"):
            skipped.append((label, f"the arrays are on {device}"))
        elif not one.holds(said):
            skipped.append((label, f"it is for {one.when}"))
        else:
            running.append((label, one))
    if not running:
        raise KernelError(f"[op] op {op.name!r} has nothing that runs on {device!r} to compare.")
    found, unwritten = {}, []
    for label, one in running:
        alone = Op(op.name, op.rule, [one], op.batch)
        first, _ = _carried_out(alone, values, _PATTERNS[0])
        second, written = _carried_out(alone, values, _PATTERNS[1])
        for a, before, after in zip(op.rule.outputs, first, second, strict=True):
            mask = _is_pattern(before, _PATTERNS[0]) & _is_pattern(after, _PATTERNS[1])
            if mask.any():
                at = tuple(int(i) for i in np.argwhere(mask)[0])
                unwritten.append(Unwritten(label, a.name, int(mask.sum()), at, mask))
        if hosts.nodes(values) is not None:  # MLX's graphs may run it on another device
            second, written = _carried_out(alone, values, None)
        found[label] = [*second, *written]
    names = [one.name for one in op.rule.outputs]
    names += [one.name for one in op.rule.inputs if one.mutable]
    baseline = "reference" if "reference" in found else running[-1][0]
    report = Comparison(op.name, baseline)
    report.skipped, report.unwritten = skipped, unwritten
    for label, outputs in found.items():
        if label != baseline:
            for name, ours, theirs in zip(names, outputs, found[baseline], strict=True):
                report.differences.append(_difference(label, name, ours, theirs))
    return report


_EPSILON = {
    "float64": 2.0**-52, "float32": 2.0**-23, "complex64": 2.0**-23, "float16": 2.0**-10,
    "bfloat16": 2.0**-8,
}  # fmt: skip


def _epsilon(kind: Dtype) -> float:
    return _EPSILON.get(kind.name, 2.0**-2)  # 8-bit floats


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
    """The number whose bytes are all this one; a bool that is another for each pattern."""
    if dtype.kind == "b":
        return byte == _PATTERNS[1]
    number = np.frombuffer(bytes([byte]) * dtype.itemsize, dtype.numpy)[0]
    plain = type(number).__module__ == "numpy"
    return (number if plain else np.float32(number)).item()


def _carried_out(
    op: Op, values: Sequence[Any], byte: int | None
) -> tuple[list[_Result], list[_Result]]:
    """What an op gives, over outputs that are filled with a byte, and what it writes in place."""
    given = [_copied(a, v) for a, v in zip(op.rule.inputs, values, strict=True)]
    if byte is None:
        result = op_call.call(op, given)
    else:
        result = op_call.eager(op, given, lambda host: cast(hosts.Host, _Filled(host, byte)))
    outputs = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    written = [v for a, v in zip(op.rule.inputs, given, strict=True) if a.mutable]
    return [_result(one) for one in outputs], [_result(one) for one in written]


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


def _is_pattern(one: _Result, byte: int) -> Values:
    """Which elements hold a pattern."""
    if one.dtype is None:
        return np.zeros(one.values.shape, bool)
    found: Values = np.asarray(one.values == _pattern(one.dtype, byte))
    return found


def _difference(label: str, name: str, first: _Result, second: _Result) -> Difference:
    kind = first.dtype
    tolerance = _epsilon(kind) ** 0.5 if kind is not None and kind.kind in "fc" else 0.0
    ours, theirs = _numbers(first.values), _numbers(second.values)
    if not ours.size:
        return Difference(label, name, 0.0, 0.0, (), (0.0, 0.0), tolerance)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(ours - theirs)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))  # infinities, too
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    largest = float(apart[index])
    finite = np.abs(theirs[np.isfinite(theirs)])
    scale = float(finite.max()) if finite.size else 0.0
    relative = largest / scale if scale else float(largest > 0)
    both = ours[index], theirs[index]
    return Difference(label, name, largest, relative, index, both, tolerance)


class Gradient(NamedTuple):
    """One derivative, declared and measured.

    Attributes:
        rule: ``"vjp"`` or ``"jvp"``.
        input: the input's name.
        at: the element that was moved; for a jvp, which moves all, ``()``.
        declared: what the rule gives.
        measured: the central difference.
        tolerance: how far they may be apart.
    """

    rule: str
    input: str
    at: tuple[int, ...]
    declared: float
    measured: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return abs(self.declared - self.measured) <= self.tolerance


class GradientCheck:
    """What `check_grad` found; its text is a table, the worst first.

    Attributes:
        gradients: each derivative that was looked at.
        dtype: in which the op was evaluated.
    """

    def __init__(self, op: str, dtype: str) -> None:
        self.op, self.dtype = op, dtype
        self.gradients: list[Gradient] = []

    @property
    def ok(self) -> bool:
        """Whether all agree."""
        return all(one.ok for one in self.gradients)

    def __repr__(self) -> str:
        wrong = sum(not one.ok for one in self.gradients)
        lines = [
            f"op {self.op!r}: {len(self.gradients)} derivatives against central differences in "
            f"{self.dtype}, {wrong} wrong"
        ]
        worst = sorted(
            self.gradients, key=lambda g: -abs(g.declared - g.measured) / (g.tolerance or 1e-300)
        )
        for one in worst[:10]:
            place = f"{one.input}{list(one.at) if one.rule == 'vjp' else ''}"
            lines.append(
                f"  {one.rule} {place:<20} declared {one.declared:<14.7g} measured "
                f"{one.measured:<14.7g} {_verdict(one)}"
            )
        return "\n".join(lines)


def _verdict(one: Gradient) -> str:
    if one.ok:
        return "ok"
    if not np.isfinite(one.measured):
        return "cannot be compared: outputs are infinite or NaN there"
    return f"WRONG (within {one.tolerance:.3g})"


def check_grad(
    op: Op, *args: Any, inputs: Sequence[str] | None = None, rtol: float | None = None,
    seed: int = 0, raises: bool = True, **named: Any,
) -> GradientCheck:  # fmt: skip
    """Compare an op's vjp and jvp with central differences.

    Elements of each float input, twelve at most, are moved up and down; for a jvp the whole input
    along a random direction. The op runs in float64 where its rule and what carries it out take
    that (a Metal body does not), else in the dtype of its inputs; sums and differences are
    float64. Outputs of integers, and those that the rule marks with ``~``, have no part in it. The
    tolerance covers rounding of the outputs and what halving the step changes.

    Args:
        op: the op.
        args, named: its inputs, as in a call.
        inputs: the inputs to look at; all that are floats by default, those that the vjp gives no
            gradient for, too.
        rtol: relative tolerance; by default 1e-5 in float64, 1e-2 in float32, 5e-2 in smaller ones.
        seed: of the random cotangents, directions and choice of elements.
        raises: raise where a derivative is wrong.

    Raises:
        KernelError: a derivative is wrong, with a table; the op has neither a vjp nor a jvp.
        KernelTypeError: ``op`` is none.
    """
    if not isinstance(op, Op):
        raise KernelTypeError(
            f"[check_grad] got {op!r}, expected an op; torch.autograd.gradcheck checks functions."
        )
    if not {"vjp", "jvp"} & op.rules.keys():
        raise derivatives.missing(op, "vjp")
    values = _recording_nothing(op.ordered(args, named))
    _bound(op, values)  # says what is wrong with them
    trial = _Trial(op, values, np.random.default_rng(seed), rtol)
    for place, one in enumerate(op.rule.inputs):
        if inputs is not None and one.name not in inputs:
            continue
        if values[place] is not None and derivatives.is_real(one) and trial.can_be_moved(place):
            if "vjp" in op.rules:
                trial.vjp(place)
            if "jvp" in op.rules:
                trial.jvp(place)
    if raises and not trial.report.ok:
        raise KernelError(f"[op] {trial.report!r}")
    return trial.report


class _Trial:
    """One check of an op's derivatives."""

    def __init__(self, op: Op, values: Sequence[Any], rng: Any, rtol: float | None) -> None:
        self.op, self.rng = op, rng
        self.host = _host(op, values)
        facts = [self.host.facts(v) if _is_array(v) else None for v in values]
        self.kinds = [None if fact is None else fact.dtype for fact in facts]
        self.device = next(fact.device for fact in facts if fact is not None)
        wide = _widened(op, self.kinds, self.host.name)
        self.at = [
            self.host.to_numpy(v).astype(np.float64) if kind is not None and kind.kind == "f" else v
            for kind, v in zip(self.kinds, values, strict=True)
        ]
        self.kinds = wide
        floats = [kind for kind in wide if kind is not None and kind.kind == "f"]
        self.kind = min(floats, key=lambda kind: kind.itemsize, default=dtypes.float32)
        self.epsilon = _epsilon(self.kind)
        default = 1e-5 if self.kind.name == "float64" else 1e-2 if self.kind.itemsize == 4 else 5e-2
        self.rtol = default if rtol is None else rtol
        self.report = GradientCheck(op.name, self.kind.name)
        self.primals = tuple(self.array(i, v) for i, v in enumerate(self.at))
        self.outputs = self.call(self.primals)
        pairs = zip(op.rule.outputs, self.outputs, strict=True)
        self.weights = [self.weight(rng, one, y) for one, y in pairs]

    def weight(self, rng: Any, one: Argument, output: Any) -> Values:
        """Random cotangents of an output; zeros where it is of integers, which have none, or where
        the rule calls it constant."""
        fact, shape = self.host.facts(output), self.numbers(output).shape
        if one.constant or (fact is not None and fact.dtype.kind not in "fc"):
            return np.zeros(shape)
        found: Values = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
        return found

    def can_be_moved(self, place: int) -> bool:
        kind = self.kinds[place]
        return kind is not None and kind.kind == "f" and self.at[place].size > 0

    def array(self, place: int, values: Any) -> Any:
        kind = self.kinds[place]
        if kind is None or kind.kind != "f":
            return values
        return self.host.from_numpy(values, kind, self.device)

    def zeros(self, like: Any) -> Any:
        fact = self.host.facts(like)
        return self.host.from_numpy(np.zeros(fact.shape), fact.dtype, self.device)  # type: ignore[union-attr]

    def numbers(self, array: Any) -> Values:
        return self.host.to_numpy(array).astype(np.float64)

    def call(self, primals: Sequence[Any]) -> tuple[Any, ...]:
        result = op_call.call(self.op, primals)
        return result if isinstance(result, tuple) else (result,)

    def measured(self, place: int, direction: Values, step: float) -> tuple[float, float]:
        """The derivative along a direction, and how far rounding of the outputs may move it."""
        sides, used = [], []
        for sign in (1, -1):
            moved = self.array(place, self.at[place] + sign * step * direction)
            used.append(self.numbers(moved))  # as the input's dtype has it
            given = [*self.primals[:place], moved, *self.primals[place + 1 :]]
            sides.append([self.numbers(y) for y in self.call(given)])
        along = np.sum((used[0] - used[1]) * direction) / np.sum(direction * direction)
        if not along:
            return 0.0, np.inf
        total = noise = 0.0
        for up, down, weight in zip(*sides, self.weights, strict=True):
            if not weight.any():  # such an output may be infinite
                continue
            total += float(np.sum(weight * (up - down)))
            changed = up != down
            noise += float(np.sum(np.abs(weight * up)[changed])) * self.epsilon
        return total / along, 4 * noise / along

    def compare(
        self, rule: str, place: int, index: Any, direction: Values, declared: float
    ) -> None:
        largest = float(np.max(np.abs(self.at[place]), initial=1.0, where=direction != 0))
        step = self.epsilon ** (1 / 3) * largest
        coarse, _ = self.measured(place, direction, step)
        fine, noise = self.measured(place, direction, step / 2)
        size = max(abs(declared), abs(fine))
        tolerance = self.rtol * size + noise + 2 * abs(coarse - fine) + 1e-12
        name = self.op.rule.inputs[place].name
        self.report.gradients.append(Gradient(rule, name, index, declared, fine, tolerance))

    def vjp(self, place: int) -> None:
        cotangents = tuple(
            self.host.from_numpy(weight, self.host.facts(y).dtype, self.device)  # type: ignore[union-attr]
            for weight, y in zip(self.weights, self.outputs, strict=True)
        )
        self.weights = [self.numbers(c) for c in cotangents]  # as their dtype has them
        grad = derivatives.vjp(self.op, self.primals, cotangents, self.outputs)[place]
        at = self.at[place]
        known = np.zeros(at.shape) if grad is None else self.numbers(grad)
        if known.shape != at.shape:
            one = self.op.rule.inputs[place]
            raise KernelError(
                f"[op] the vjp of op {self.op.name!r} gives a gradient of shape {known.shape} for "
                f"input {one.name!r} of shape {at.shape} ({one})."
            )
        chosen = self.rng.permutation(at.size)[:_TRIED]
        for flat in chosen:
            index = tuple(int(i) for i in np.unravel_index(int(flat), at.shape))
            direction = np.zeros(at.shape)
            direction[index] = 1
            self.compare("vjp", place, index, direction, float(known[index]))

    def jvp(self, place: int) -> None:
        direction = self.rng.uniform(-1, 1, self.at[place].shape)
        tangent = self.array(place, direction)
        tangents = tuple(tangent if i == place else None for i in range(len(self.primals)))
        found = derivatives.jvp(self.op, self.primals, tangents, self.outputs, self.zeros)
        declared = 0.0
        for one, weight, t in zip(self.op.rule.outputs, self.weights, found, strict=True):
            known = np.zeros(weight.shape) if t is None else self.numbers(t)
            if known.shape != weight.shape:
                raise KernelError(
                    f"[op] the jvp of op {self.op.name!r} gives a tangent of shape {known.shape} "
                    f"for output {one.name!r} of shape {weight.shape} ({one})."
                )
            declared += float(np.sum(weight * known))
        self.compare("jvp", place, (), self.numbers(tangent), declared)


def _widened(op: Op, kinds: Sequence[Dtype | None], host: str) -> list[Dtype | None]:
    """float64 for dtype variables that are floats, where nothing stands against it."""
    narrow = host == "MLX" or any(not isinstance(one, Runner) for one in op.implementations[:1])
    wide: list[Dtype | None] = []
    for one, kind in zip(op.rule.inputs, kinds, strict=True):
        allowed = op.rule.choices.get(one.dtype, ("float64",))
        variable = one.dtype not in dtypes.BY_NAME
        free = kind is not None and kind.kind == "f" and variable and "float64" in allowed
        wide.append(dtypes.float64 if free and not narrow else kind)
    return wide


def _recording_nothing(values: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs apart from what a library records of them."""
    return tuple(value.detach() if hasattr(value, "detach") else value for value in values)


def _is_array(value: object) -> bool:
    return value is not None and hosts.find(type(value)) is not None


def _host(op: Op, values: Sequence[Any]) -> hosts.Host:
    for value in values:
        found = None if value is None else hosts.find(type(value))
        if found is not None:
            return found
    raise KernelTypeError(f"[op] op {op.name!r}: expected an array among its inputs.")


def _bound(op: Op, values: Sequence[Any]) -> tuple[str, Any]:
    _, device, given, _, _ = op_call.gathered(op, values)
    return device, op_call.bound(op, given)[0]


def _copied(one: Any, value: Any) -> Any:
    if not one.mutable or value is None:
        return value
    host = hosts.find(type(value))
    if host is None:
        return value
    return host.contiguous(value) if host.name == "NumPy" else value.clone()


def _numbers(values: Values) -> Values:
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    return np.asarray(values).astype(kind)
