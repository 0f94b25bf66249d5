"""JSON, SARIF and GitHub's annotations."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stand_in
from ferrule.check.reports.findings import KINDS, Finding
from ferrule.check.reports.formats import fingerprints, from_json, to_github, to_json, to_sarif
from ferrule.check.reports.results import Results
from ferrule.errors import KernelError

numbers = st.none() | st.integers(1, 10**6)
positions = st.none() | st.tuples(*[st.integers(0, 2**31)] * 3)
texts = st.text(st.characters(codec=None))  # lone surrogates, too
findings = st.builds(
    Finding, kind=st.sampled_from(KINDS), kernel=texts, line=numbers, text=texts, thread=positions,
    threadgroup=positions, message=texts, hint=texts, count=st.integers(1, 10**9), column=numbers,
    where=st.sampled_from(["source", "header"]), other_line=numbers, other_thread=positions,
    other_threadgroup=positions, file=st.none() | st.text(st.characters(codec="utf-8"), min_size=1)
    .filter(lambda name: "\0" not in name), file_line=numbers, launch=texts,
)  # fmt: skip
results = st.builds(
    Results, st.lists(findings, max_size=3), st.integers(0, 10**6), st.lists(texts, max_size=2),
    st.integers(0, 9),
)  # fmt: skip


@given(results)
def test_json_comes_back(given_results: Results) -> None:
    text = to_json(given_results)
    assert text.isascii()
    assert from_json(text) == given_results


def test_json_of_later_versions() -> None:
    whole = json.loads(to_json(Results([stand_in.finding()], 1)))
    assert whole["version"] == 1 and set(whole) == {
        "version", "launches", "known", "notes", "findings",
    }  # fmt: skip
    whole["findings"][0]["new field"] = whole["new"] = 1
    assert from_json(json.dumps(whole)).findings == [stand_in.finding()]
    whole["version"] = 2
    with pytest.raises(KernelError, match="of version 2; this ferrule reads 1"):
        from_json(json.dumps(whole))
    for text in ("", "[]", "{}"):
        with pytest.raises(KernelError, match="no report of ferrule check"):
            from_json(text)


def check_sarif(log: dict[str, Any]) -> None:
    """What the standard's schema says of the parts that we have."""
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and run["columnKind"] in ("unicodeCodePoints", "utf16CodeUnits")
    for rule in driver["rules"]:
        assert re.fullmatch("[A-Za-z]+", rule["name"])
        assert all(rule[name]["text"] for name in ("shortDescription", "fullDescription", "help"))
        assert rule["shortDescription"]["text"].endswith(".")
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        assert result["occurrenceCount"] >= 1
        assert all(isinstance(v, str) and v for v in result["partialFingerprints"].values())
        for location in result["locations"]:
            place = location.get("physicalLocation")
            if place is None:
                continue
            uri = place["artifactLocation"]["uri"]
            assert re.fullmatch(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+", uri)
            region = place.get("region", {"startLine": 1})
            assert region["startLine"] >= 1


@given(results)
def test_sarif(given_results: Results) -> None:
    log = json.loads(to_sarif(given_results, "1.2.3"))
    check_sarif(log)
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(KINDS)
    assert len(run["results"]) == len(given_results.findings)


def test_sarif_of_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = stand_in.finding(file=str(tmp_path / "my kernels" / "soft.py"), file_line=41, count=3)
    outside = stand_in.finding(file="/else where/soft.py", file_line=41)
    log = json.loads(to_sarif(Results([inside, outside, stand_in.finding()], 1, ["a note"])))
    first, second, third = log["runs"][0]["results"]
    assert first["locations"] == [
        {
            "logicalLocations": [{"name": "softmax", "kind": "function"}],
            "physicalLocation": {
                "artifactLocation": {"uri": "my%20kernels/soft.py"},
                "region": {"startLine": 41, "snippet": {"text": stand_in.BODY_LINE}},
            },
        }
    ]
    assert first["message"]["text"] == f"{inside.message}\n{inside.hint}"
    assert first["occurrenceCount"] == 3
    place = second["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///else%20where/soft.py"
    assert "physicalLocation" not in third["locations"][0]
    (notification,) = log["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    assert notification["message"]["text"] == "a note"


def test_fingerprints_stay_when_lines_move() -> None:
    found = [stand_in.finding(line=line) for line in (3, 9)]
    before = fingerprints(found)
    assert len(set(before)) == 2
    moved = [
        dataclasses.replace(f, line=f.line + 5, message="m", text=f"  {f.text}") for f in found
    ]
    assert fingerprints(moved) == before
    assert fingerprints(moved[::-1]) == before[::-1]
    other = stand_in.finding(kind="bounds", line=1)
    assert fingerprints([other, *found])[1:] == before


ANNOTATION = re.compile(r"::error ((?:\w+=[^,:\r\n]*)(?:,\w+=[^,:\r\n]*)*)::([^\r\n]*)")


@given(results)
def test_annotations_are_a_line_each(given_results: Results) -> None:
    text = to_github(given_results)
    lines = text.split("\n")
    assert lines.pop() == "" and len(lines) == len(given_results.findings)
    for line, finding in zip(lines, given_results.findings, strict=True):
        match = ANNOTATION.fullmatch(line)
        assert match is not None
        said = re.sub("%(25|0A|0D)", lambda m: unquote(m[0]), match[2])
        assert finding.message in said and finding.hint in said


def test_an_annotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = stand_in.finding(
        file=str(tmp_path / "a,b:c.py"), file_line=41, message="100% wrong:\nhere", hint="mend it"
    )
    assert to_github(Results([finding, stand_in.finding(line=None, message="m", hint="")])) == (
        "::error file=a%2Cb%3Ac.py,line=41,title=race in kernel 'softmax'%2C line 7"
        "::100%25 wrong:%0Ahere%0Amend it\n"
        "::error title=race in kernel 'softmax'::m\n"
    )
