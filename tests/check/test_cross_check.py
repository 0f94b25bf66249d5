"""What is read out of compute-sanitizer's words, and which processes that asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from catalogue import BUGS
from cross_case import CASES, IMPOSSIBLE
from cross_check import OWN, TOOLS, Job, again, jobs, parts, reported, spoke
from cross_tables import ended, read, told

NOTHING = "========= COMPUTE-SANITIZER\n%s========= ERROR SUMMARY: 0 errors\n"
READ = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
    "=========     at f(const float *)+0xf0 in bounds_read_past_end.source:%d\n"
)
COPY = "========= Host API memory access error at host access to 0x200 of size 256 bytes\n"


def result(name: str, outcome: str) -> str:
    return f"RESULT {json.dumps({'name': name, 'outcome': outcome})}\n"


def record(tool: str, name: str, text: str, how: str = "alone", status: int | None = 0) -> Any:
    return {"tool": tool, "names": [name], "how": how, "status": status, "text": text}


def test_each_bug_and_twin_meets_each_tool() -> None:
    first = {(job.tool, name) for job in jobs() if job.how == "alone" for name in job.names}
    for tool in ("plain", *TOOLS):
        names = {name for name in CASES if name.removesuffix("_mended") not in IMPOSSIBLE}
        assert {name for by, name in first if by == tool} == names
    assert {name for by, name in first if by == "ferrule"} == set(CASES)
    assert set(IMPOSSIBLE) < {planted.name for planted in BUGS}


def test_names_are_dealt_out() -> None:
    names = tuple(map(str, range(35)))
    assert sum(parts(names), ()) == names
    assert [len(part) for part in parts(names)] == [16, 16, 3]


@pytest.mark.parametrize(
    ("text", "hows"),
    [
        (NOTHING % "", ["debug", "padding"]),
        (READ % 2, []),
        (READ.replace("bounds_read_past_end.source", "atomic.h") % 210, ["frames"]),
    ],
)
def test_what_a_tool_misses_gets_a_second_chance(text: str, hows: list[str]) -> None:
    job = Job("memcheck", ("bounds_read_past_end",))
    jobs_again = list(again(job, record("memcheck", "bounds_read_past_end", text)))
    assert jobs_again == [Job("memcheck", job.names, how) for how in hows]
    for other in set(TOOLS) - {OWN["bounds"]}:
        other_record = record(other, "bounds_read_past_end", text)
        assert not again(Job(other, job.names), other_record)


def test_what_is_said_of_twins_is_looked_into() -> None:
    names = ("bounds_gather_mended", "bounds_scatter_mended")
    right = "".join(result(name, "right") for name in names)
    quiet = {**record("initcheck", "", NOTHING % right), "names": names}
    assert not spoke(quiet)
    for text, status in ((right + COPY, 0), (right, 1), (right.replace("right", "wrong", 1), 0)):
        loud = {**quiet, "text": text, "status": status}
        assert [job.names for job in again(Job("initcheck", names), loud)] == [(n,) for n in names]


def test_records_are_read(tmp_path: Path) -> None:
    name, hung = "bounds_read_past_end", "divergence_trip_counts_from_data"
    unwritten = "unwritten_last_row"
    lines = [
        record("plain", name, result(name, "right")),
        record("plain", hung, "", status=None),
        record("plain", unwritten, result(unwritten, "wrong")),
        record("memcheck", name, READ % 2),
        record("racecheck", name, NOTHING % ""),
        record("synccheck", name, READ % 1),
        record("initcheck", unwritten, COPY),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    records = read(file)
    bugs = {planted.name: planted for planted in BUGS}
    assert [ended(records, bugs[n]) for n in (name, hung, unwritten)] == ["right", "hung", "wrong"]
    assert ended(records, bugs["bounds_gather"]) == "not run"
    said = {tool: str(told(records, tool, bugs[name])) for tool in TOOLS}
    assert said == {"memcheck": "2", "racecheck": "·", "synccheck": "(1)", "initcheck": "·"}
    assert told(records, "memcheck", bugs[name]).right
    assert str(told(records, "initcheck", bugs[unwritten])) == "copy"
    assert reported(COPY) and not reported(NOTHING % "")
