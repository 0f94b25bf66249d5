"""Stands in for `ferrule.check.checking`: a test says what is found.

It imports nothing of ferrule until then, so that it can be there before ferrule is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

BODY_LINE = "    total[lid] = total[lid + 1] + x;"


class Findings(list[Any]):
    """As `ferrule.checking` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.launches = 0


watching: list[Findings] = []
asked: list[dict[str, Any]] = []  # what `checking` was given, each time


@contextlib.contextmanager
def checking(**options: Any) -> Iterator[Findings]:
    """As `ferrule.checking`."""
    asked.append(options)
    findings = Findings()
    watching.append(findings)
    try:
        yield findings
    finally:
        watching.remove(findings)


def finding(kind: str = "race", kernel: str = "softmax", **fields: Any) -> Any:
    """A finding, whole but for what a test is about."""
    from ferrule.check.reports.findings import Finding

    usual = {
        "line": 7,
        "text": BODY_LINE,
        "thread": (3, 0, 0),
        "threadgroup": (2, 0, 0),
        "message": "reads total[4] of threadgroup memory, which another thread writes",
        "hint": "put threadgroup_barrier(mem_flags::mem_threadgroup) between the accesses",
    }
    return Finding(kind, kernel, **{**usual, **fields})


def found(kind: str = "race", kernel: str = "softmax", **fields: Any) -> None:
    """A launch in which something is found."""
    launch()
    for findings in watching:
        findings.append(finding(kind, kernel, **fields))


def launch(note: str | None = None) -> None:
    """A launch in which nothing is found."""
    for findings in watching:
        findings.launches += 1
        findings.notes += [note] if note else []


def install() -> None:
    """Take the place of the module."""
    sys.modules["ferrule.check.checking"] = sys.modules[__name__]
