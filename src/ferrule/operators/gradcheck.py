"""Whether the derivatives of an op agree with central differences: `check_grad`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..rules.argument import Argument, as_declared
from ..spec import Facts
from . import call as op_call
from . import derivatives
from .compare import Values, detached, epsilon
from .op import Op
from .runners import Runner

_MOST_ELEMENTS = 12  # of each input that are moved


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
        return all(g.ok for g in self.gradients)

    def __repr__(self) -> str:
        wrong = sum(not g.ok for g in self.gradients)
        lines = [
            f"op {self.op!r}: {len(self.gradients)} derivatives against central differences in "
            f"{self.dtype}, {wrong} wrong"
        ]
        worst = sorted(
            self.gradients, key=lambda g: -abs(g.declared - g.measured) / (g.tolerance or 1e-300)
        )
        for gradient in worst[:10]:
            place = f"{gradient.input}{list(gradient.at) if gradient.rule == 'vjp' else ''}"
            lines.append(
                f"  {gradient.rule} {place:<20} declared {gradient.declared:<14.7g} measured "
                f"{gradient.measured:<14.7g} {_verdict(gradient)}"
            )
        return "\n".join(lines)


def _verdict(gradient: Gradient) -> str:
    if gradient.ok:
        return "ok"
    if not np.isfinite(gradient.measured):
        return "cannot be compared: outputs are infinite or NaN there"
    return f"WRONG (within {gradient.tolerance:.3g})"


def check_grad(
    op: Op,
    *args: Any,
    inputs: Sequence[str] | None = None,
    rtol: float | None = None,
    seed: int = 0,
    raises: bool = True,
    **named: Any,
) -> GradientCheck:
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
    op = op.variant(*args, **named)
    values = detached(op.ordered(args, named))
    trial = _Trial(op, values, np.random.default_rng(seed), rtol)
    for place, argument in enumerate(op.rule.inputs):
        if inputs is not None and argument.name not in inputs:
            continue
        if values[place] is None or not derivatives.is_real(argument):
            continue
        if trial.can_be_moved(place):
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
        call, self.host, arrays = op_call.bound_arrays(op, values)  # says what is wrong with them
        if not arrays:
            raise KernelTypeError(f"[op] op {op.name!r}: expected an array among its inputs.")
        self.device = call.device
        facts = call.arguments.values()
        self.dtypes = [fact.dtype if isinstance(fact, Facts) else None for fact in facts]
        wide = _widened(op, self.dtypes, self.host.name)
        self.point = [
            self.host.to_numpy(v).astype(np.float64) if d is not None and d.kind == "f" else v
            for d, v in zip(self.dtypes, values, strict=True)
        ]
        self.dtypes = wide
        floats = [d for d in wide if d is not None and d.kind == "f"]
        self.dtype = min(floats, key=lambda d: d.itemsize, default=dtypes.float32)
        self.epsilon = epsilon(self.dtype)
        default = (
            1e-5 if self.dtype.name == "float64" else 1e-2 if self.dtype.itemsize == 4 else 5e-2
        )
        self.rtol = default if rtol is None else rtol
        self.report = GradientCheck(op.name, self.dtype.name)
        self.primals = tuple(self.array(i, v) for i, v in enumerate(self.point))
        self.outputs = self.call(self.primals)
        pairs = zip(op.rule.outputs, self.outputs, strict=True)
        self.weights = [self.weight(rng, a, y) for a, y in pairs]

    def weight(self, rng: Any, argument: Argument, output: Any) -> Values:
        """Random cotangents of an output; zeros where it is of integers, which have none, or where
        the rule calls it constant."""
        fact, shape = self.host.facts(output), self.numbers(output).shape
        if argument.constant or (fact is not None and fact.dtype.kind not in "fc"):
            return np.zeros(shape)
        weight: Values = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
        return weight

    def can_be_moved(self, place: int) -> bool:
        dtype = self.dtypes[place]
        return dtype is not None and dtype.kind == "f" and self.point[place].size > 0

    def array(self, place: int, values: Any) -> Any:
        dtype = self.dtypes[place]
        if dtype is None or dtype.kind != "f":
            return values
        return self.host.from_numpy(values, dtype, self.device)

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
            moved = self.array(place, self.point[place] + sign * step * direction)
            used.append(self.numbers(moved))  # as the input's dtype has it
            inputs = [*self.primals[:place], moved, *self.primals[place + 1 :]]
            sides.append([self.numbers(y) for y in self.call(inputs)])
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
        largest = float(np.max(np.abs(self.point[place]), initial=1.0, where=direction != 0))
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
        gradient = derivatives.vjp(self.op, self.primals, cotangents, self.outputs)[place]
        at = self.point[place]
        declared = np.zeros(at.shape) if gradient is None else self.numbers(gradient)
        if declared.shape != at.shape:
            argument = self.op.rule.inputs[place]
            raise KernelError(
                f"[op] the vjp of op {self.op.name!r} gives a gradient of shape {declared.shape} "
                f"for input {argument.name!r} of shape {at.shape} ({argument})."
            )
        chosen = self.rng.permutation(at.size)[:_MOST_ELEMENTS]
        for flat in chosen:
            index = tuple(int(i) for i in np.unravel_index(int(flat), at.shape))
            direction = np.zeros(at.shape)
            direction[index] = 1
            self.compare("vjp", place, index, direction, float(declared[index]))

    def jvp(self, place: int) -> None:
        direction = self.rng.uniform(-1, 1, self.point[place].shape)
        tangent = self.array(place, direction)
        tangents = tuple(tangent if i == place else None for i in range(len(self.primals)))
        output_tangents = derivatives.jvp(self.op, self.primals, tangents, self.outputs, self.zeros)
        declared = 0.0
        triples = zip(self.op.rule.outputs, self.weights, output_tangents, strict=True)
        for argument, weight, output_tangent in triples:
            t = np.zeros(weight.shape) if output_tangent is None else self.numbers(output_tangent)
            if t.shape != weight.shape:
                raise KernelError(
                    f"[op] the jvp of op {self.op.name!r} gives a tangent of shape {t.shape} "
                    f"for output {argument.name!r} of shape {weight.shape} "
                    f"({as_declared(argument)})."
                )
            declared += float(np.sum(weight * t))
        self.compare("jvp", place, (), self.numbers(tangent), declared)


def _widened(op: Op, input_dtypes: Sequence[Dtype | None], host: str) -> list[Dtype | None]:
    """The inputs' dtypes, with float64 for each float variable where rule and host allow it."""
    always = next((i for i, b in enumerate(op.implementations) if b.when is None), 0)
    tried = op.implementations[: always + 1]
    narrow = host == "MLX" or any(not isinstance(body, Runner) for body in tried)
    wide: list[Dtype | None] = []
    for argument, dtype in zip(op.rule.inputs, input_dtypes, strict=True):
        allowed = op.rule.choices.get(argument.dtype, ("float64",))
        variable = argument.dtype not in dtypes.BY_NAME
        free = dtype is not None and dtype.kind == "f" and variable and "float64" in allowed
        wide.append(dtypes.float64 if free and not narrow else dtype)
    return wide
