"""``ferrule check --pytest``: pytest with the plugin on, and what the plugin found."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..check.reports.findings import Finding
from ..check.reports.formats import from_dict
from ..check.reports.select import ALL, Selection
from .faults import Fault

PLUGIN = "_ferrule_pytest"


class Collected(list[Finding]):
    """What the tests of a run found, each finding once for all tests.

    Attributes:
        notes: remarks, each once.
        launches: how many launches were checked.
        failures: how many tests failed by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.launches = 0
        self.failures = 0
        self._places: dict[tuple[object, ...], int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take what a test found; pytest calls this in the process that reports."""
        found = getattr(report, "ferrule_check", None) or {}
        self.launches += found.get("launches", 0)
        self.notes += [note for note in found.get("notes", ()) if note not in self.notes]
        for finding in map(from_dict, found.get("findings", ())):
            self._take(finding)
        self.failures += report.failed and not found.get("failed", False)

    def _take(self, finding: Finding) -> None:
        where = (finding.file, finding.where, finding.line, finding.text)
        at = self._places.setdefault((finding.kind, finding.kernel, *where), len(self))
        if at == len(self):
            self.append(finding)
        else:
            self[at] = replace(self[at], count=self[at].count + finding.count)


def run_pytest(
    arguments: Sequence[str],
    selection: Selection,
    sample: int | None,
    baseline: str | None,
    into: Collected,
) -> int:
    """Run pytest checked; return its exit status, or 0 where nothing failed but by findings.

    Args:
        arguments: pytest's.
        selection, sample, baseline: what the options of these names say.
        into: gets what is found.

    Raises:
        Fault: pytest is not installed.
    """
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise Fault("pytest is not installed here: pip install pytest.") from error
    sys.path[0] = ""  # as with python -m pytest
    options = [*_options(selection, sample, baseline), *arguments]
    status = int(pytest.main(["-p", PLUGIN, *options], plugins=[into]))
    return 0 if status == 1 and not into.failures else status


def _options(selection: Selection, sample: int | None, baseline: str | None) -> Iterator[str]:
    """The plugin's options."""
    yield "--ferrule-check"
    if selection.kinds != ALL:
        for kind in sorted(selection.kinds):
            yield f"--ferrule-check-kind={kind}"
    for glob in selection.kernels:
        yield f"--ferrule-check-kernel={glob}"
    if sample is not None:
        yield f"--ferrule-check-sample={sample}"
    if baseline is not None:
        yield f"--ferrule-check-baseline={Path(baseline).resolve()}"
