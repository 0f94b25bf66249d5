"""`gate`: one verdict on an op, as programs read it: compiled, checked, compared, proved, measured.

docs/check.md documents the fields. `VERSION` grows where a field goes or changes its meaning.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import CompileError, DialectError, FerruleError, ToolchainError
from ...operators.op import Op
from ..proofs.prove import prove
from ..reports.formats import as_dict
from .fuzz import draw, fuzz
from .judge import Failure, OtherFailed
from .recipes import Call, Recipe

VERSION = 1
STAGES = ("compile", "check", "fuzz", "prove", "measure")
PASS, FAIL, ERROR, SKIPPED, ABSENT = "pass", "fail", "error", "skipped", "not available"
# Proofs are of arrays with fewer elements: an int that steps by a threadgroup over larger ones
# overflows at their ends, and few kernels care.
_PROVED = 1 << 30
_ELEMENTS = 1 << 20  # of an array that is measured
_DRAWN = 30  # calls of which the largest is measured
_ROUNDS = 15
_MEASURED = 2.0  # seconds after which no more rounds are begun

Report = dict[str, Any]


def gate(
    op: Op,
    reference: Callable[..., Any],
    *,
    examples: int = 100,
    seconds: float | None = None,
    name: str | None = None,
    tell: Callable[[Report], object] = lambda report: None,
    **options: Any,
) -> Report:
    """Judge an op.

    Args:
        op: the op.
        reference: what gives the right outputs: a function of NumPy's arrays, or an op.
        examples, seconds: of calls that are drawn, as in `fuzz`.
        name: what the report calls the op.
        tell: is given the report before each stage, which it has as ``stage``: what is known should
            the process end there.
        options: more arguments of `fuzz`.

    Returns:
        ``verdict``, ``message``, ``findings``, ``test`` and the stages of ``STAGES``, as
        docs/check.md has them: nothing but what JSON has. It does not raise for what the op does.
    """
    report: Report = {
        "name": name or op.name, "verdict": PASS, "message": "", "stage": "compile", "findings": [],
        "test": "", **{stage: {"status": SKIPPED} for stage in STAGES},
    }  # fmt: skip
    tell(report)
    try:
        _fuzz(report, op, reference, examples, seconds, options)
        if report["verdict"] == PASS:
            _enter("prove", report, tell)
            _prove(report, op)
        if report["verdict"] == PASS:
            _enter("measure", report, tell)
            _measure(report, op, reference, options)
    except (OtherFailed, ToolchainError) as error:  # no fault of the op's
        _end(report, ERROR, str(error))
    except FerruleError as error:
        _end(report, FAIL, str(error))
    except Exception as error:  # a Python function of the op's
        _end(report, FAIL, f"{type(error).__name__}: {error}")
    del report["stage"]
    return report


def _enter(stage: str, report: Report, tell: Callable[[Report], object]) -> None:
    report["stage"] = stage
    tell(report)


def _end(report: Report, verdict: str, message: str) -> None:
    report["verdict"], report["message"] = verdict, message
    report[report["stage"]]["status"] = verdict


def _fuzz(
    report: Report,
    op: Op,
    reference: Callable[..., Any],
    examples: int,
    seconds: float | None,
    options: Mapping[str, Any],
) -> None:
    """Compile, check and compare, which one search does."""
    result = fuzz(op, reference=reference, examples=examples, seconds=seconds, **options)
    counts = {"examples": result.examples, "refused": result.refused}
    failure = result.failure
    stage = "" if failure is None else _stage_of(failure)
    for each in STAGES[:3]:
        report[each] = {"status": PASS, **({} if each == "compile" else counts)}
        if each == stage:
            break
    report["stage"] = stage
    if failure is not None:
        _end(report, FAIL, failure.message)
        report["test"] = result.test
        report["findings"] = [as_dict(finding) for finding in failure.findings]
        report[stage]["call"] = _described(failure.call)
        if isinstance(failure.error, FerruleError):
            report["message"] = str(failure.error)


def _stage_of(failure: Failure) -> str:
    if isinstance(failure.error, (CompileError, DialectError)):
        return "compile"
    return "fuzz" if failure.kind == "mismatch" else "check"


def _described(call: Call) -> list[str]:
    lines = call.lines()
    return lines if call.threadgroup is None else [*lines, f"threadgroup = {call.threadgroup}"]


# -- proofs ----------------------------------------------------------------------------------------


def _prove(report: Report, op: Op) -> None:
    """Prove what can be; a call that goes wrong is a failure, and what is not known is none."""
    try:
        proof = prove(op, most=_PROVED)
    except Exception as error:  # Z3 is not installed, or does not know what to do
        report["prove"] = {"status": ABSENT, "message": f"{type(error).__name__}: {error}"}
        return
    stage = report["prove"] = {"status": PASS, "proved": bool(proof.proved), "most": _PROVED}
    for name in ("bounds", "races", "coverage"):
        verdict = getattr(proof, name)
        stage[name] = {
            field: getattr(verdict, field) for field in ("status", "line", "message", "call")
        }
        if verdict.status == "counterexample" and report["verdict"] == PASS:
            place = "" if verdict.line is None else f"line {verdict.line}: "
            _end(report, FAIL, f"{name}: {place}{verdict.message}")


# -- times -----------------------------------------------------------------------------------------


def _measure(
    report: Report, op: Op, reference: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Measure an op against the reference, by turns, on the largest of some calls."""
    call = _large_call(op, options)
    functions: tuple[Callable[..., Any], ...] = op, reference
    times: tuple[list[float], list[float]] = [], []
    start = time.perf_counter()
    for i in range(_ROUNDS + 1):
        for function, taken in zip(functions, times, strict=True):
            taken.append(_seconds(function, call, function is op))
        if i and time.perf_counter() - start > _MEASURED:
            break
    # The first call of each compiles, and fills caches.
    own, other = (statistics.median(taken[1:]) for taken in times)
    report["measure"] = {
        "status": PASS, "seconds": own, "reference_seconds": other, "ratio": own / other,
        "rounds": len(times[0]) - 1, "call": _described(call),
    }  # fmt: skip


def _seconds(function: Callable[..., Any], call: Call, own: bool) -> float:
    """What one call takes.

    Raises:
        OtherFailed: the function is not the op's, and raises something.
    """
    values = call.values()
    try:
        with np.errstate(all="ignore"):
            before = time.perf_counter()
            function(*values)
            return time.perf_counter() - before
    except Exception as error:
        if own:
            raise
        shown = "; ".join(call.lines())
        raise OtherFailed(
            f"[gate] the reference raised {type(error).__name__}: {error}, for {shown}."
        ) from error


def _large_call(op: Op, options: Mapping[str, Any]) -> Call:
    """The largest of some calls of the first dtype that is drawn, its arrays contiguous."""
    from .draws import Draws

    drawn: list[Call] = []
    inputs, kinds = options.get("inputs") or {}, options.get("dtypes") or {}
    first = {v: of[:1] for v, of in Draws(op, inputs, kinds, False, ()).kinds.items()}
    draws = Draws(op, inputs, first, False, (), _ELEMENTS)
    draw(draws.strategy(), drawn.append, _DRAWN, options.get("seed"))
    call = max(drawn, key=_elements)
    contiguous = [
        replace(value, layout="contiguous", axis=0) if isinstance(value, Recipe) else value
        for value in call.inputs
    ]
    return replace(call, inputs=tuple(contiguous), threadgroup=None)


def _elements(call: Call) -> int:
    return sum(math.prod(value.shape) for value in call.inputs if isinstance(value, Recipe))


# -- the whole -------------------------------------------------------------------------------------


def whole(reports: Sequence[Report], verdict: str | None = None, message: str = "") -> Report:
    """The verdict on a file of ops.

    Args:
        reports: on each op.
        verdict, message: where something else than an op is at fault.
    """
    verdicts = [report["verdict"] for report in reports]
    worst = next((each for each in (ERROR, FAIL) if each in verdicts), PASS)
    if verdict is None:
        verdict = worst
        message = next((r["message"] for r in reports if r["verdict"] == worst), "")
    return {
        "format": "ferrule gate",
        "version": VERSION,
        "verdict": verdict,
        "message": message,
        "ops": list(reports),
    }
