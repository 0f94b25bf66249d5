"""Files of known findings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stand_in
from ferrule.check.reports import baseline
from ferrule.check.reports.findings import KINDS, Finding
from ferrule.check.reports.select import selection
from ferrule.errors import KernelError


def made(kind: str, kernel: str, line: int | None, text: str) -> Finding:
    finding: Finding = stand_in.finding(kind, kernel, line=line, text=text)
    return finding


findings = st.lists(
    st.builds(
        made, st.sampled_from(KINDS[:3]), st.sampled_from(["a", "b"]),
        st.none() | st.integers(1, 9), st.sampled_from(["x[i] = 1;", "y;", ""]),
    )
)  # fmt: skip


@given(findings, st.integers(0, 50))
def test_what_was_written_is_known_wherever_its_lines_move(
    tmp_path_factory: pytest.TempPathFactory, found: list[Finding], by: int
) -> None:
    path = tmp_path_factory.mktemp("known") / "known.json"
    baseline.write(path, found)
    known = baseline.read(path)
    moved = [
        dataclasses.replace(f, line=f.line and f.line + by, text=f"\t {f.text} ") for f in found
    ]
    assert baseline.split(moved, known) == ([], moved)
    assert baseline.stale(moved, known) == []
    assert len(baseline.stale([], known)) == len(found)


def test_one_entry_stands_for_one_finding() -> None:
    found = [made("race", "k", line, "x[i] = 1;") for line in (9, 3, 5)]
    new, known = baseline.split(found, Counter([("k", "race", "x[i] = 1;")] * 2))
    assert ([f.line for f in new], [f.line for f in known]) == ([9], [3, 5])


def test_stale_entries_of_what_was_looked_at() -> None:
    known = Counter([("k", "race", "x;"), ("k", "nan", ""), ("other", "race", "x;")])
    wanted = selection(kernels=["k"])
    assert baseline.stale([], known, wanted) == [("k", "nan", ""), ("k", "race", "x;")]
    assert baseline.stale([], known, selection(kinds=["nan"])) == [("k", "nan", "")]
    assert baseline.stale_notes("known.json", baseline.stale([], known, wanted)) == [
        "baseline 'known.json': 2 entries found no more; write it anew with --write-baseline:\n"
        "- nan in 'k'\n- race in 'k': x;"
    ]


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.write_text("what was there")
    baseline.write(path, [made("race", "k", 7, " x[i]  = 1;"), made("nan", "k", 2, "y;")])
    assert path.read_text() == (
        '{"format": "ferrule check baseline", "version": 1,\n "findings": [\n'
        '  {"kernel": "k", "kind": "nan", "text": "y;"},\n'
        '  {"kernel": "k", "kind": "race", "text": "x[i] = 1;"}\n ]}\n'
    )
    assert [p.name for p in tmp_path.iterdir()] == ["known.json"]
    with pytest.raises(KernelError, match=r"^the baseline '.*known.json' cannot be written: "):
        baseline.write(tmp_path / "no" / "known.json", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory. `ferrule check --write-baseline`"),
        ("{", "is not JSON: "),
        ("[1]", 'is not one of ferrule: it has no "format": "ferrule check baseline".'),
        (
            '{"format": "ferrule check baseline", "version": 9}',
            "is of version 9; this ferrule reads 1. Write it anew with --write-baseline.",
        ),
        ('{"format": "ferrule check baseline", "version": 1}', 'has no list "findings".'),
        (
            '{"format": "ferrule check baseline", "version": 1, "findings": [{"kernel": 1}]}',
            "entry 1: expected the texts kernel, kind, text, not {'kernel': 1}.",
        ),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "known.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KernelError) as error:
        baseline.read(path)
    assert message in str(error.value) and str(path) in str(error.value)
