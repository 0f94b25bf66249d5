"""What a checked run finds."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...kernel import Kernel

# In the order of docs/check.md.
KINDS = (
    "bounds",
    "race",
    "uninitialised",
    "unwritten",
    "divergence",
    "lanes",
    "nan",
    "arithmetic",
    "alias",
    "coverage",
)

_NAMED = re.compile(r"'(\w+)'")
_Key = tuple[Kernel, str, str, int | str]

Position = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """A fault of a kernel, at one line of its text.

    Attributes:
        kind: one of `KINDS`.
        kernel: the kernel's or the op's name.
        line: counts from 1 in the author's body. Where a function of the header does it, that of
            the call, or, where that is not known, the header's (see ``where``). A race's is the
            access that came later. None where no line is to blame.
        text: that line, as the author wrote it.
        thread: its position in the threadgroup; None where no thread is to blame.
        threadgroup: the threadgroup's position in the grid.
        message: what happened, with names, shapes, indices and values.
        hint: what usually mends it.
        count: how often it happened in the launches that were watched.
        column: counts from 1 in ``text``; None where it is not known.
        where: ``"source"`` for the body, ``"header"``.
        header_line: where a function of the header does it, its line there.
        other_line: of a race's earlier access; where others wait, of a divergence.
        other_text: that line, as the author wrote it.
        other_thread: whose that was.
        other_threadgroup: and where in the grid.
        file: the Python file in which the text stands, where it could be found.
        file_line: the line there.
        launch: grid, threadgroup, and the arrays with their dtypes and shapes.
    """

    kind: str
    kernel: str
    line: int | None
    text: str
    thread: Position | None
    threadgroup: Position | None
    message: str
    hint: str
    count: int = 1
    column: int | None = None
    where: str = "source"
    header_line: int | None = None
    other_line: int | None = None
    other_text: str = ""
    other_thread: Position | None = None
    other_threadgroup: Position | None = None
    file: str | None = None
    file_line: int | None = None
    launch: str = ""


class Findings(list[Finding]):
    """What was found, and what was done to find it.

    Attributes:
        notes: remarks, such as ``"sampled 64 of 10000 threadgroups"``.
        launches: how many launches were checked.
        stops: threads at the lines of ``stop_at``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[Any] = []
        self.notes: list[str] = []
        self.launches = 0
        self._places: dict[_Key, int] = {}
        self._lock = threading.Lock()

    def include(self, kernel: Kernel, findings: Iterable[Finding]) -> None:
        """Add findings; one whose line has a finding of its kind already is counted there."""
        with self._lock:
            for finding in findings:
                named = _NAMED.search(finding.message)  # an output, where no line is to blame
                place = finding.line or (named[1] if named else "")
                key = kernel, finding.kind, finding.where, place
                if key in self._places:
                    known = self[self._places[key]]
                    self[self._places[key]] = replace(known, count=known.count + finding.count)
                else:
                    self._places[key] = len(self)
                    self.append(finding)

    def note(self, text: str) -> None:
        """Add a remark, once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)
