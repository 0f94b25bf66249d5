"""``ferrule gate``: there is a verdict whatever the candidate does, and nothing else on stdout."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule.cli import gate as command
from test_readme import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
GOOD = """
import ferrule

print("on stdout while it is loaded")
double = ferrule.op(
    "double", "x[N]:float32 -> y[N]:float32",
    metal="uint i = thread_position_in_grid.x; y[i] = x[i] * 2;", grid="N", threadgroup=64,
)
"""
REFERENCE = """
def double(x):
    return 2 * x
"""


class Gate:
    """A folder in which candidates are judged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ref.py").write_text(REFERENCE)

    def run(self, candidate: str, *options: str) -> tuple[int, dict[str, Any], str]:
        (self.folder / "candidate.py").write_text(candidate)
        arguments = ["candidate.py", "--reference", "ref.py", "--seed", "0", "--examples", "20"]
        done = subprocess.run(
            [sys.executable, "-m", "ferrule", "gate", *arguments, *options],
            capture_output=True, text=True, timeout=120, cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        verdict = json.loads(done.stdout)
        assert (verdict["format"], verdict["version"]) == ("ferrule gate", 1)
        assert done.returncode == {"pass": 0, "fail": 1, "error": 2}[verdict["verdict"]]
        return done.returncode, verdict, done.stderr


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_pass(gate: Gate) -> None:
    code, verdict, err = gate.run(GOOD)
    assert code == 0, verdict
    assert [op["name"] for op in verdict["ops"]] == ["double"]
    assert verdict["ops"][0]["measure"]["ratio"] > 0
    assert "on stdout while it is loaded" in err


def test_fail(gate: Gate) -> None:
    code, verdict, _ = gate.run(GOOD.replace("y[i] = x[i] * 2", "y[i] = x[i + 1] * 2"))
    assert code == 1
    finding = verdict["ops"][0]["findings"][0]
    assert (finding["kind"], finding["line"], finding["kernel"]) == ("bounds", 1, "double")
    assert "from candidate import double" in verdict["ops"][0]["test"]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("1 / 0", "running candidate.py failed: ZeroDivisionError: division by zero"),
        ("def f(:", "running candidate.py failed: SyntaxError"),
        ("raise SystemExit(0)", "running candidate.py failed: SystemExit: 0"),
        ("import os; os._exit(0)", "ended its process with status 0, while it was loaded"),
        ("import os; os._exit(3)", "ended its process with status 3, while it was loaded"),
        ("import os; os.abort()", "ended its process by SIGABRT, while it was loaded"),
        ("x = 1", "'candidate.py' has no op; expected one made by ferrule.op"),
        (
            "import ferrule\nk = ferrule.metal_kernel('k', ['x'], ['y'], 'y[0] = x[0];')",
            "has no op (k: kernels without a rule)",
        ),
        (GOOD.replace("x[i] * 2", "x[j] * 2"), "'j' was not declared"),
        (
            GOOD + "import os\ndouble = ferrule.op('double', 'x[N]:float32 -> y[N]:float32',"
            " run=lambda x: os._exit(3))",
            "op 'double' ended its process with status 3, in the stage 'compile'",
        ),
    ],
)
def test_candidates_that_fail(gate: Gate, candidate: str, message: str) -> None:
    code, verdict, _ = gate.run(candidate)
    assert code == 1
    assert message in verdict["message"]


def test_candidate_that_hangs(gate: Gate) -> None:
    code, verdict, _ = gate.run("import time\nwhile True: time.sleep(1)", "--time-limit", "3")
    assert code == 1
    assert verdict["message"] == "the candidate did not end in 3 s, while it was loaded"


def test_kernel_that_hangs(gate: Gate) -> None:
    """A checked launch is ended, long before the limit."""
    endless = GOOD.replace("y[i] = x[i] * 2", "while (x[i] < 9) y[i] = 2")
    code, verdict, _ = gate.run(endless, "--seconds", "1")
    assert code == 1
    assert "does not end" in verdict["message"]


def test_threads_that_do_not_end(gate: Gate) -> None:
    code, _, _ = gate.run(f"{GOOD}\nimport threading\nthreading.Thread(target=input).start()")
    assert code == 0


def test_proof_that_does_not_end() -> None:
    """That is no fault of the candidate's; in another stage it is."""

    def known(stage: str) -> dict[str, Any]:
        report: dict[str, Any] = {"name": "double", "verdict": "pass", "message": ""}
        return {"ops": [{**report, "stage": stage, stage: {"status": "skipped"}}]}

    verdict = command._cut_short(known("prove"), "did not end in 3 s", True)
    assert verdict["verdict"] == "pass"
    assert verdict["ops"][0]["prove"] == {
        "status": "not available", "message": "did not end in 3 s"
    }  # fmt: skip
    verdict = command._cut_short(known("measure"), "did not end in 3 s", True)
    assert (verdict["verdict"], verdict["message"]) == (
        "fail", "op 'double' did not end in 3 s, in the stage 'measure'"
    )  # fmt: skip
    assert verdict["ops"][0]["measure"] == {"status": "fail"}


def test_op_by_name(gate: Gate) -> None:
    two = f"{GOOD}\nother = ferrule.op('other', 'x[N]:T -> y[N]:T', run=lambda x: x)"
    assert gate.run(two, "--op", "double")[0] == 0
    code, verdict, _ = gate.run(two)
    assert code == 2
    assert "there is no 'other' in 'ref.py'; functions there: double" in verdict["message"]
    code, verdict, _ = gate.run(two, "--op", "third")
    assert (code, verdict["message"]) == (
        1, "there is no op 'third' in 'candidate.py'; ops: double, other."
    )  # fmt: skip


def test_errors(gate: Gate) -> None:
    code, verdict, _ = gate.run(GOOD, "--reference", "none.py")
    assert (code, verdict["message"]) == (2, "the file 'none.py' does not exist.")


def test_loop_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of docs/check.md gives a writer the verdict until a kernel passes."""
    (text,) = (
        block.text
        for block in blocks((DOCS / "check.md").read_text("utf-8"))
        if block.language == "python" and "ferrule gate candidate.py" in block.text
    )
    Gate(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    feedbacks = []

    def written(task: str, feedback: str) -> str:
        feedbacks.append(feedback)
        return GOOD if feedback else GOOD.replace("x[i] * 2", "x[i + 1] * 2")

    program = text.replace('"ferrule gate', f'"{sys.executable} -m ferrule gate')
    path = tmp_path / "loop.py"
    path.write_text(program)
    names = runpy.run_path(str(path), {"written": written})
    assert names["kernel"]("double it") == GOOD
    assert feedbacks[0] == "" and len(feedbacks) == 2
    assert "line 1: uint i = thread_position_in_grid.x; y[i] = x[i + 1] * 2;" in feedbacks[1]
    assert "def test_double():" in feedbacks[1]
