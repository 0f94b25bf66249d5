"""``ferrule fuzz``: exit codes, and what is written where."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ferrule.cli import main

KERNELS = """
import ferrule
import numpy as np

half = ferrule.op(
    "half", "x[N]:T, k[M]:int32 -> y[N]:T where M > 0",
    metal="uint i = thread_position_in_grid.x; y[i] = x[i] * T(0.5) + T(k[0] > 40);",
    grid="N", threadgroup=64,
)
kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")


def make():
    return half


def expected(x, k):
    return x * x.dtype.type(0.5)


def broken(x, k):
    raise ValueError("no")
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fuzz", "--seed", "0", *arguments])


REFERENCE = "--reference", "kernels.py:expected"


@pytest.mark.parametrize("name", ["half", "make"])
def test_nothing_is_found(kernels: Path, name: str) -> None:
    done = run(f"kernels.py:{name}", *REFERENCE, "--input", "k=0..9", "--examples", "20")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert "calls passed" in done.stderr


def test_failure_is_a_test_on_stdout(kernels: Path) -> None:
    done = run("kernels.py:half", *REFERENCE, "--input", "k=0..90", "--dtype", "T=float32")
    assert done.exit_code == 1, done.output
    assert "half fails: y[0] is" in done.stderr
    assert "from kernels import expected as reference, half" in done.stdout
    (kernels / "test_half.py").write_text(done.stdout)
    with pytest.raises(AssertionError):
        runpy.run_path(str(kernels / "test_half.py"))["test_half"]()


def test_test_is_written_to_a_file(kernels: Path) -> None:
    done = run("kernels.py:half", *REFERENCE, "--input", "k=41..90", "--write", "test_half.py")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "def test_half():" in (kernels / "test_half.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels.py:kernel"], "is a kernel without a rule"),
        (["kernels.py:other"], "there is no 'other' in 'kernels.py'"),
        (["nothing.py:half"], "the file 'nothing.py' does not exist"),
        (["kernels.py:half", "--input", "k"], "--input 'k': expected a name"),
        (["kernels.py:half", "--dtype", "T=float31"], "[fuzz] `dtypes`: got 'T': ['float31']"),
        (
            ["kernels.py:half", "--reference", "kernels.py:nope"],
            "functions there: half, make, expected, broken",
        ),
        (["kernels.py:half", "--reference", "kernels.py:broken"], "raised ValueError: no"),
        (["kernels.py:half", "--ignore", "races"], "'races' is not one of 'bounds'"),
    ],
)
def test_errors(kernels: Path, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
