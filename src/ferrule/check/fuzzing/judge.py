"""What is wrong with one call of an op: findings, an error, or other numbers than another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...devices.cpu.program import running
from ...errors import (
    CompileError,
    DeviceError,
    DialectError,
    FerruleError,
    KernelError,
    ToolchainError,
)
from ...operators.bodies import KernelBody
from ...operators.compare import epsilon
from ...operators.op import Op
from ...operators.runners import Runner
from ..checking import checking
from ..reports.findings import Finding
from .recipes import Call, Values
from .redeclare import with_threadgroup

FORMS = ("fibers", "split", "flat")
_SECONDS = 10.0  # of a launch, checked; one that takes longer does not end
_NOISE = 8  # times what inputs that are off by one unit in the last place change
_WRONG = CompileError, DialectError, DeviceError  # not the call's fault, but the kernel's

Result = list[Values | None]


@dataclass(frozen=True)
class Mismatch:
    """An output that is not as another way gives it.

    Attributes:
        way: which way gives something else.
        output: the output's name, or that of an input that is written in place.
        at: the element that is off by most; None where shapes differ.
        actual, expected: both there, or the shapes.
        rtol, atol: how far they may be apart.
        dtype: the output's.
    """

    way: Way
    output: str
    dtype: str
    at: tuple[int, ...] | None
    actual: Any
    expected: Any
    rtol: float
    atol: float

    def __str__(self) -> str:
        if self.at is None:
            way = self.way.label
            return f"{self.output} has the shape {self.actual}, and {self.expected} by {way}"
        return (
            f"{self.output}{list(self.at)} is {self.actual}, and {self.expected} by "
            f"{self.way.label} (rtol {self.rtol:.3g}, atol {self.atol:.3g})"
        )


@dataclass(frozen=True)
class Failure:
    """A call that an op's rule allows, and what is wrong with it.

    Attributes:
        kind: ``"findings"``, ``"mismatch"`` or ``"error"``.
        message: what is wrong, in a line.
        call: the call.
        findings: what was found, where that is it.
        mismatch: what differs, where that is it.
        error: what was raised, where that is it.
    """

    kind: str
    message: str
    call: Call
    findings: tuple[Finding, ...] = ()
    mismatch: Mismatch | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Way:
    """One way to carry out a call.

    Attributes:
        name: ``"reference"``, ``"reverse"``, ``"declared"``, one of `FORMS`, or ``"using run"``
            and ``"using reference"`` of the op's own.
        label: how messages call it.
        run: gives the outputs for inputs, which it may write to.
    """

    name: str
    label: str
    run: Callable[[Sequence[Any]], Any]


class OtherFailed(KernelError):
    """What an op is compared with raised something."""


class Refused(Exception):
    """The op refuses a call that its rule allows; says why."""


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may be apart; None: by their dtype.

    Attributes:
        rtol: relative to what is expected.
        atol: absolute.
    """

    rtol: float | None = None
    atol: float | None = None


class Judge:
    """Judges calls of an op.

    Attributes:
        op: the op that is checked: its Metal bodies, where it has some.
        ignore: the kinds of findings that are not wanted.
    """

    def __init__(
        self,
        op: Op,
        reference: Callable[..., Any] | None,
        tolerance: Tolerance,
        ignore: Sequence[str],
    ) -> None:
        self.whole = op
        kinds = [body.kind for body in op.implementations]
        self.op = op.using("metal") if "metal" in kinds else op
        self.ignore = tuple(ignore)
        self._tolerance = tolerance
        self._ways = list(_ways(op, self.op, reference))
        self._without: set[tuple[str, Op]] = set()  # forms that bodies cannot have

    def judge(self, call: Call) -> Failure | None:
        """What is wrong with a call; None where nothing is.

        Raises:
            Refused: the op refuses it.
            OtherFailed: another way raises something, which is its cause.
            ToolchainError: there is no compiler.
        """
        findings, notes, result = [], [], None
        try:
            op = self.launched(call)
            values = call.values()
            with checking(ignore=self.ignore or None, time_limit=_SECONDS) as watched:
                result = op(*values)
            findings, notes = list(watched), watched.notes
        except ToolchainError:
            raise
        except _WRONG as error:
            return Failure("error", _line(error), call, error=error)
        except FerruleError as error:
            raise Refused(str(error)) from error
        except Exception as error:  # a Python function of the op's
            return Failure("error", _line(error), call, error=error)
        if findings:
            first = findings[0]
            place = f"line {first.line}: " if first.line is not None else ""
            return Failure("findings", f"{first.kind}: {place}{first.message}", call, (*findings,))
        if early := [note for note in notes if "ended early" in note or "not be checked" in note]:
            return Failure("error", early[0], call)
        actual = self._outputs(values, result)
        for way in self._ways_of(call, op):
            other = self._other(way, call)
            mismatch = None if other is None else self._compared(way, call, actual, other)
            if mismatch is not None:
                return Failure("mismatch", str(mismatch), call, mismatch=mismatch)
        return None

    def launched(self, call: Call) -> Op:
        """The op that carries out a call."""
        if call.threadgroup is None:
            return self.op
        return with_threadgroup(self.op.variant(*call.values()), call.threadgroup)

    def _ways_of(self, call: Call, op: Op) -> Iterator[Way]:
        for way in self._ways:
            if way.name == "reverse":
                yield Way(way.name, way.label, partial(_reversed, op))
            elif call.threadgroup is None or way.name not in FORMS:
                yield way
        if call.threadgroup is not None:
            label = "the threadgroup that is declared"
            yield Way("declared", label, partial(_called, self.op))

    def _other(self, way: Way, call: Call, values: Sequence[Any] | None = None) -> Result | None:
        """What another way gives; None where it cannot carry out the call."""
        inputs = call.values() if values is None else list(values)
        if (way.name, self.op) in self._without:
            return None
        try:
            with np.errstate(all="ignore"):
                return self._outputs(inputs, way.run(inputs))
        except (CompileError, DialectError):
            if way.name not in FORMS:
                raise
            self._without.add((way.name, self.op))
            return None
        except FerruleError:
            raise
        except Exception as error:
            shown = "; ".join(call.lines())
            raise OtherFailed(
                f"[fuzz] {way.label} raised {type(error).__name__}: {error}, for {shown}. It must "
                "take all that the rule allows; say what inputs are like with `inputs`, or limit "
                "the rule with `where`."
            ) from error

    def _outputs(self, inputs: Sequence[Any], result: Any) -> Result:
        """Outputs, and then what was written in place."""
        given = result if isinstance(result, (tuple, list)) else (result,)
        outputs = [None if array is None else np.asarray(array) for array in given]
        pairs = zip(self.op.rule.inputs, inputs, strict=True)
        written = [np.asarray(v) for a, v in pairs if a.mutable and v is not None]
        if written and not self.op.rule.declared:
            outputs = []
        return [*outputs, *written]

    def _names(self, call: Call) -> list[str]:
        rule = self.op.rule
        pairs = zip(rule.inputs, call.inputs, strict=True)
        written = [a.name for a, value in pairs if a.mutable and value is not None]
        return [*(output.name for output in rule.declared), *written]

    def _compared(self, way: Way, call: Call, actual: Result, other: Result) -> Mismatch | None:
        names = self._names(call)
        if len(other) != len(actual):
            raise OtherFailed(
                f"[fuzz] {way.label} gave {len(other)} outputs, expected {len(actual)}: "
                f"{', '.join(names)}."
            )
        noise: list[float] | None = None
        for i, (name, one, two) in enumerate(zip(names, actual, other, strict=True)):
            if one is None or two is None:
                continue
            if one.shape != two.shape:
                return Mismatch(way, name, one.dtype.name, None, one.shape, two.shape, 0, 0)
            expected = _as(two, one.dtype)
            rtol = self._rtol(one)
            if _worst(one, expected, rtol, self._tolerance.atol or 0.0) is None:
                continue
            if noise is None:
                noise = self._noise(way, call, other)
            atol = self._tolerance.atol
            atol = noise[i] if atol is None else atol
            if (at := _worst(one, expected, rtol, atol)) is not None:
                pair = one[at].item(), expected[at].item()
                return Mismatch(way, name, one.dtype.name, at, *pair, rtol, atol)
        return None

    def _rtol(self, output: Values) -> float:
        dtype = dtypes.of_numpy(output.dtype)
        if dtype is None or dtype.kind not in "fc":
            return 0.0
        return epsilon(dtype) ** 0.5 if self._tolerance.rtol is None else self._tolerance.rtol

    def _noise(self, way: Way, call: Call, expected: Result) -> list[float]:
        """How much each output changes where inputs are off by what rounding makes.

        A sum of large numbers that cancel each other out is known no better than that.
        """
        noise = [0.0] * len(expected)
        if self._tolerance.rtol is not None:  # who gives tolerances means them
            return noise
        kinds = [dtypes.of_numpy(v.dtype) for v in call.values() if isinstance(v, np.ndarray)]
        floats = [epsilon(dtype) for dtype in kinds if dtype is not None and dtype.kind in "fc"]
        by = max(floats, default=0.0)
        for seed in range(2) if by else ():
            values = call.perturbed([by] * len(call.inputs), seed)
            moved = self._other(way, call, values) or expected
            for i, (one, two) in enumerate(zip(expected, moved, strict=True)):
                if one is not None and two is not None and one.shape == two.shape and one.size:
                    apart = np.abs(_wide(one) - _wide(two))
                    apart = apart[np.isfinite(apart)]
                    noise[i] = max(noise[i], _NOISE * float(apart.max(initial=0.0)))
        return noise


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, FerruleError) else f"{type(error).__name__}: "
    return kind + next(iter(str(error).splitlines()), "")


def _as(values: Values, dtype: np.dtype[Any]) -> Values:
    """What is expected, in an output's dtype, where nothing but precision is lost."""
    with np.errstate(all="ignore"):
        floats = values.dtype.kind not in "bui" and dtype.kind in "bui"
        return values if floats else values.astype(dtype)


def _wide(values: Values) -> Values:
    with np.errstate(all="ignore"):
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _worst(actual: Values, expected: Values, rtol: float, atol: float) -> tuple[int, ...] | None:
    """The element that is off by most; None where all are within the tolerance."""
    if not actual.size:
        return None
    if actual.dtype.kind in "bui" and expected.dtype.kind in "bui":
        off = np.where(actual == expected, 0.0, np.abs(_wide(actual) - _wide(expected)) + 1e-9)
        beyond = off - atol
    else:
        one, two = _wide(actual), _wide(expected)
        with np.errstate(all="ignore"):
            beyond = np.abs(one - two) - (atol + rtol * np.abs(two))
            same = (one == two) | (np.isnan(one) & np.isnan(two))
        beyond = np.where(same, -np.inf, np.where(np.isfinite(beyond), beyond, np.inf))
    index = int(np.argmax(beyond))
    if beyond.flat[index] <= 0:
        return None
    return tuple(int(i) for i in np.unravel_index(index, actual.shape))


# -- ways ----------------------------------------------------------------------------------------


def _ways(whole: Op, op: Op, reference: Callable[..., Any] | None) -> Iterator[Way]:
    """What a checked call is compared with."""
    if reference is not None:
        yield Way("reference", "the reference", partial(_called, reference))
        return
    kinds = dict.fromkeys(body.kind for body in whole.implementations)
    for kind in ("reference", "run"):
        if kind in kinds and whole is not op:
            yield Way(f"using {kind}", f"the op's {kind}", partial(_called, whole.using(kind)))
    if any(isinstance(body, KernelBody) for body in op.implementations):
        yield Way("reverse", "threads in the opposite order", partial(_reversed, op))
        for form in FORMS:
            yield Way(form, f"its {form} form", partial(_formed, op, form))


def _called(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    return function(*values)


def _formed(op: Op, form: str, values: Sequence[Any]) -> Any:
    with running(form):
        return op(*values)


def _reversed(op: Op, values: Sequence[Any]) -> Any:
    with checking(reverse=True, time_limit=_SECONDS):
        return op(*values)


def runs_here(op: Op) -> bool:
    """Whether an op has an implementation that may run on the CPU."""
    return any(isinstance(b, Runner) or b.kind == "metal" for b in op.implementations)
