"""Reports of findings for people."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stand_in
from ferrule.check.reports.findings import KINDS, Finding
from ferrule.check.reports.kinds import RULES
from ferrule.check.reports.report import render, show, summary
from ferrule.check.reports.results import Results

RACE = """\
error[race]: kernel 'softmax', line 7
  --> soft.py:41
   |
 7 |     total[lid] = total[lid + 1] + x;
   |                  ^
   = reads total[4] of threadgroup memory, which another thread writes
   = by thread (3, 0, 0) of threadgroup (2, 0, 0)
   = other access: line 5, thread (4, 0, 0) of threadgroup (2, 0, 0)
   = launch: grid (1024, 1, 1), threadgroup (256, 1, 1), inp: float32[4, 256] ->
     out: float32[4, 256]
   = count: 12,288 times
   = help: put threadgroup_barrier(mem_flags::mem_threadgroup) between the
     accesses
"""
DIVERGENCE = """\
error[divergence]: kernel 'sum', header line 120
     |
 120 | threadgroup_barrier(mem_flags::mem_none);
     = not all threads reach this barrier
     = others wait: header line 131
"""
END = """
note: sampled 64 of 10000 threadgroups
2 findings in 2 kernels (1 known, not shown), 1,041 launches checked
"""


def race(**more: object) -> Finding:
    usual = {
        "column": 18, "count": 12288, "other_line": 5, "other_thread": (4, 0, 0),
        "other_threadgroup": (2, 0, 0), "file_line": 41,
        "launch": "grid (1024, 1, 1), threadgroup (256, 1, 1), inp: float32[4, 256] -> "
        "out: float32[4, 256]",
    }  # fmt: skip
    made: Finding = stand_in.finding(**{**usual, **more})
    return made


def test_the_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    waits = stand_in.finding(
        "divergence", "sum", line=120, where="header", thread=None, threadgroup=None, hint="",
        text="threadgroup_barrier(mem_flags::mem_none);", other_line=131,
        message="not all threads reach this barrier",
    )  # fmt: skip
    results = Results(
        [race(file=str(tmp_path / "soft.py")), waits], 1041,
        ["sampled 64 of 10000 threadgroups"], 1,
    )  # fmt: skip
    assert render(results) == f"{RACE}\n{DIVERGENCE}{END}"


def test_a_finding_without_a_line() -> None:
    unwritten = stand_in.finding(
        "unwritten", "gather", line=None, text="", thread=None, threadgroup=None, hint="",
        message="2 of 10 elements of out were never written, [8] the first",
    )  # fmt: skip
    assert render(Results([unwritten], 1)) == (
        "error[unwritten]: kernel 'gather'\n"
        "  = 2 of 10 elements of out were never written, [8] the first\n"
        "\n1 finding in 1 kernel, 1 launch checked\n"
    )


def test_nothing_found() -> None:
    assert render(Results([], 3)) == "no findings, 3 launches checked\n"
    assert summary(Results([], 1, known=2)) == "no findings (2 known, not shown), 1 launch checked"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    results = Results([race()], 1)
    terminal, file = Terminal(), io.StringIO()
    show(results, terminal)
    show(results, file)
    assert "\x1b[31m" in terminal.getvalue() and "\x1b" not in file.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    show(results, plain)
    assert "\x1b" not in plain.getvalue()


def test_quiet_says_what_matters() -> None:
    said, nothing = io.StringIO(), io.StringIO()
    show(Results([race()], 2, ["a note"]), said, quiet=True)
    show(Results([], 2, ["a note"]), nothing, quiet=True)
    assert said.getvalue() == "1 finding in 1 kernel, 2 launches checked\n"
    assert nothing.getvalue() == ""


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("\tfloat y = x[i];", 12),
        ("float größe = 数[i] + x[i];", 22),
        ("a + " * 40 + "x[i];", 161),
        ("x[i]" + " + a" * 40 + ";", 1),
        ("float a; " * 9 + "x[i];" + " int b;" * 20, 82),
    ],
)
@pytest.mark.parametrize("width", [40, 80])
def test_the_caret_is_under_its_column(text: str, column: int, width: int) -> None:
    lines = render(Results([race(text=text, column=column)]), width=width).splitlines()
    quoted, caret = lines[2], lines[3]
    cells = "".join(c * 2 if c == "数" else c for c in quoted)
    assert cells[caret.index("^")] == text[column - 1] == "x"
    assert len(cells) <= width


@given(
    st.text(), st.text(), st.text(), st.none() | st.integers(1, 300), st.integers(40, 100),
    st.booleans(),
)  # fmt: skip
def test_whatever_is_found_is_shown(
    kernel: str, text: str, message: str, column: int | None, width: int, color: bool
) -> None:
    finding = race(kernel=kernel, text=text, message=message, column=column)
    shown = render(Results([finding]), width=width, color=color)
    if not color:
        assert all(line.isprintable() for line in shown.splitlines())
    for stream in (io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO()):
        show(Results([finding]), stream)


def test_each_kind_has_help() -> None:
    assert tuple(RULES) == KINDS
