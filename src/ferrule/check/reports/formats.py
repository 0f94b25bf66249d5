"""Reports for programs: JSON, SARIF 2.1.0, and annotations of GitHub's workflows.

docs/check.md documents the fields of the JSON. `VERSION` grows where a field goes or changes its
meaning; a new field leaves it as it is, and `from_json` skips what it does not know.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import KernelError
from .baseline import key_of
from .findings import KINDS, Finding
from .kinds import RULES
from .results import Results, shown_path

VERSION = 1
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_POSITIONS = ("thread", "threadgroup", "other_thread", "other_threadgroup")
_NAMES = frozenset(field.name for field in fields(Finding))


# -- JSON ------------------------------------------------------------------------------------------


def as_dict(finding: Finding) -> dict[str, Any]:
    """A finding as JSON has it: its fields, positions as lists."""
    found = asdict(finding)
    for name in _POSITIONS:
        if found[name] is not None:
            found[name] = list(found[name])
    return found


def from_dict(found: dict[str, Any]) -> Finding:
    """The finding that `as_dict` was given."""
    known = {name: value for name, value in found.items() if name in _NAMES}
    for name in _POSITIONS:
        if known.get(name) is not None:
            known[name] = tuple(known[name])
    return Finding(**known)


def to_json(results: Results) -> str:
    """Results as JSON."""
    whole = {
        "version": VERSION,
        "launches": results.launches,
        "known": results.known,
        "notes": list(results.notes),
        "findings": [as_dict(finding) for finding in results.findings],
    }
    return json.dumps(whole, indent=1) + "\n"


def from_json(text: str) -> Results:
    """The results that `to_json` was given.

    Raises:
        KernelError: the text is not of this version.
    """
    try:
        whole = json.loads(text)
        version = whole["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise KernelError(f"this is no report of ferrule check: {error!r}.") from error
    if version != VERSION:
        raise KernelError(f"this report is of version {version!r}; this ferrule reads {VERSION}.")
    findings = [from_dict(found) for found in whole["findings"]]
    return Results(findings, whole["launches"], whole["notes"], whole["known"])


# -- SARIF -----------------------------------------------------------------------------------------


def fingerprints(findings: Sequence[Finding]) -> list[str]:
    """A digest of each finding that stays when lines move: of what a baseline knows it by, and of
    how many with the same stand before it."""
    digests = [""] * len(findings)
    before: Counter[tuple[str, str, str]] = Counter()
    for i in sorted(range(len(findings)), key=lambda i: (findings[i].line or 0, i)):
        key = key_of(findings[i])
        text = json.dumps([*key, before[key]])
        before[key] += 1
        digests[i] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def to_sarif(results: Results, version: str | None = None) -> str:
    """Results as SARIF 2.1.0, of one run.

    Args:
        results: the results.
        version: ferrule's.
    """
    findings = results.findings
    driver: dict[str, Any] = {"name": "ferrule check", "rules": [_rule(kind) for kind in KINDS]}
    if version is not None:
        driver["version"] = version
    pairs = zip(findings, fingerprints(findings), strict=True)
    notes = [{"level": "note", "message": {"text": note}} for note in results.notes]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": [_result(finding, digest) for finding, digest in pairs],
        "properties": {"launches": results.launches, "known": results.known},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(kind: str) -> dict[str, Any]:
    rule = RULES[kind]
    return {
        "id": kind,
        "name": rule.name,
        "shortDescription": {"text": rule.short},
        "fullDescription": {"text": f"{rule.short} {rule.help}"},
        "help": {"text": rule.help, "markdown": rule.help},
        "defaultConfiguration": {"level": "error"},
    }


def _result(finding: Finding, digest: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": KINDS.index(finding.kind),
        "level": "error",
        "message": {"text": _sentences(finding)},
        "locations": [_location(finding)],
        "partialFingerprints": {"ferruleFinding/v1": digest},
        "occurrenceCount": max(finding.count, 1),
        "properties": as_dict(finding),
    }
    return result


def _sentences(finding: Finding) -> str:
    return "\n".join(part for part in (finding.message, finding.hint) if part) or finding.kind


def _location(finding: Finding) -> dict[str, Any]:
    """Where a finding is: in its kernel and, where that is known, at a line of a Python file."""
    location: dict[str, Any] = {"logicalLocations": [{"name": finding.kernel, "kind": "function"}]}
    if finding.file is not None:
        place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.file)}}
        if finding.file_line is not None:
            place["region"] = {"startLine": finding.file_line}
            if finding.text:
                place["region"]["snippet"] = {"text": finding.text}
        location["physicalLocation"] = place
    return location


def _uri(file: str) -> str:
    """A reference to a file: relative where it lies in the current folder."""
    shown = shown_path(file)
    path = Path(shown)
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))


# -- GitHub ----------------------------------------------------------------------------------------


def to_github(results: Results) -> str:
    """Results as annotations: a line ``::error …::…`` per finding, which GitHub's runners read."""
    return "".join(f"{line}\n" for line in _annotations(results.findings))


def _annotations(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        title = f"{finding.kind} in kernel {finding.kernel!r}"
        if finding.line is not None:
            title += f", {'header ' if finding.where == 'header' else ''}line {finding.line}"
        values = {"title": title}
        if finding.file is not None:
            place = {"file": shown_path(finding.file)}
            if finding.file_line is not None:
                place["line"] = str(finding.file_line)
            values = place | values
        shown = ",".join(f"{name}={_property(value)}" for name, value in values.items())
        yield f"::error {shown}::{_data(_sentences(finding))}"


def _data(text: str) -> str:
    """Text as the message of an annotation has it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Text as a property of an annotation has it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
