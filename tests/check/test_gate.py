"""`ferrule.check.fuzzing.gate.gate`: each stage can fail, and says why."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest

import ferrule
import fuzzed_ops as ops
from ferrule.check.fuzzing import gate as gates
from ferrule.check.fuzzing.gate import STAGES, Report, gate, whole


def judged(op: ferrule.Op, reference: Callable[..., Any], **more: Any) -> Report:
    report = gate(op, reference, seed=0, examples=30, **more)
    assert json.loads(json.dumps(report)) == report
    assert "stage" not in report
    return report


def statuses(report: Report) -> list[str]:
    return [report[stage]["status"] for stage in STAGES]


def _without_solver(*_: Any, **__: Any) -> Any:
    raise ferrule.FerruleError("z3-solver is not installed")


@pytest.fixture
def no_prover(monkeypatch: pytest.MonkeyPatch) -> None:
    prover(monkeypatch, _without_solver)


def test_pass(no_prover: None) -> None:
    report = judged(ops.whole_rows, ops.sums, name="rows")
    assert (report["verdict"], report["message"], report["name"]) == ("pass", "", "rows")
    assert statuses(report) == ["pass", "pass", "pass", "not available", "pass"]
    measured = report["measure"]
    assert measured["ratio"] == measured["seconds"] / measured["reference_seconds"]
    assert report["fuzz"]["examples"] >= 10


def test_an_op_may_be_the_reference(no_prover: None) -> None:
    assert judged(ops.whole_rows, ops.whole_rows)["verdict"] == "pass"


def test_mismatch() -> None:
    report = judged(ops.multiples, ops.sums)
    assert statuses(report) == ["pass", "pass", "fail", "skipped", "skipped"]
    assert "by the reference" in report["message"]
    assert "def test_multiples" in report["test"]
    assert report["fuzz"]["call"][0].startswith("x = ")


def test_findings() -> None:
    report = judged(ops.ragged, ops.doubled)
    assert statuses(report) == ["pass", "fail", "skipped", "skipped", "skipped"]
    assert report["findings"][0]["kind"] == "bounds"
    assert report["findings"][0]["line"] == 3
    assert report["findings"][0]["text"].strip().startswith("for (uint k = i;")


def test_what_does_not_compile() -> None:
    op = ferrule.op(
        "typo", "x[N]:float32 -> y[N]:float32", metal="y[0] = z[0];", grid="N", threadgroup=32
    )
    report = judged(op, ops.doubled)
    assert statuses(report) == ["fail", "skipped", "skipped", "skipped", "skipped"]
    assert "source line 1" in report["message"] and "'z'" in report["message"]


def test_function_that_raises() -> None:
    def raises(x: Any) -> Any:
        raise ZeroDivisionError("no")

    op = ferrule.op("raises", "x[N]:float32 -> y[N]:float32", run=raises)
    report = judged(op, ops.doubled)
    assert report["verdict"] == "fail" and "ZeroDivisionError: no" in report["message"]


def test_reference_that_raises_is_an_error() -> None:
    def raises(x: Any) -> Any:
        raise ZeroDivisionError("no")

    report = judged(ops.not_ragged, raises)
    assert report["verdict"] == "error"
    assert "the reference raised ZeroDivisionError: no" in report["message"]


def test_reference_of_other_outputs_is_an_error() -> None:
    report = judged(ops.not_ragged, lambda x: (x, x))
    assert report["verdict"] == "error" and "gave 2 outputs, expected 1: y" in report["message"]


def test_op_that_refuses_all() -> None:
    op = ferrule.op(
        "none", "x[N]:float32 -> y[N]:float32 where N > 5, N < 3", metal="y[0] = x[0];",
        grid="N", threadgroup=32,
    )  # fmt: skip
    report = judged(op, ops.doubled)
    assert report["verdict"] == "fail" and "no sizes were found" in report["message"]


def prover(monkeypatch: pytest.MonkeyPatch, prove: Callable[..., Any]) -> None:
    """Have the gate's prover do what a test says."""
    monkeypatch.setattr(gates, "prove", prove)


def verdict(status: str, line: int | None = None, message: str = "") -> types.SimpleNamespace:
    return types.SimpleNamespace(status=status, line=line, message=message, call=None)


@pytest.mark.parametrize("status", ["proved", "not supported", "counterexample"])
def test_proofs(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    races = verdict(status, 4, "why")

    def prove(op: ferrule.Op, most: int) -> Any:
        proved = verdict("proved")
        return types.SimpleNamespace(
            bounds=proved, coverage=proved, races=races, proved=status == "proved"
        )

    prover(monkeypatch, prove)
    report = judged(ops.not_ragged, ops.doubled)
    expected = "fail" if status == "counterexample" else "pass"
    assert report["verdict"] == report["prove"]["status"] == expected
    assert report["prove"]["races"] == {
        "status": status, "line": 4, "message": "why", "call": None
    }  # fmt: skip
    assert report["prove"]["proved"] is (status == "proved")
    if expected == "fail":
        assert report["message"] == "races: line 4: why"
        assert report["measure"]["status"] == "skipped"


def test_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(op: ferrule.Op, most: int) -> Any:
        raise ferrule.FerruleError("z3-solver is not installed")

    prover(monkeypatch, prove)
    report = judged(ops.not_ragged, ops.doubled)
    assert report["verdict"] == "pass"
    assert report["prove"] == {
        "status": "not available", "message": "FerruleError: z3-solver is not installed"
    }  # fmt: skip


def test_stages_are_told() -> None:
    stages: list[str] = []
    judged(ops.not_ragged, ops.doubled, tell=lambda report: stages.append(report["stage"]))
    assert stages == ["compile", "prove", "measure"]


def test_inputs_have_ranges(no_prover: None) -> None:
    report = judged(ops.rows, ops.rows_of, inputs={"index": "0..V-1"})
    assert report["verdict"] == "pass", report["message"]
    assert judged(ops.rows, ops.rows_of)["verdict"] != "pass"


def test_the_worst_verdict_counts() -> None:
    def report(verdict: str, message: str = "") -> Report:
        return {"verdict": verdict, "message": message}

    assert whole([report("pass"), report("pass")])["verdict"] == "pass"
    both = whole([report("fail", "one"), report("error", "two"), report("pass")])
    assert (both["verdict"], both["message"]) == ("error", "two")
    assert whole([], "fail", "no op")["message"] == "no op"
