"""Tests whose kernels are checked: what the pytest plugin, `_ferrule_pytest`, does for them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..errors import KernelError
from .checking import checking
from .reports import baseline
from .reports.formats import as_dict
from .reports.report import render
from .reports.results import Results
from .reports.select import ALL, Selection, selection

_ARGUMENTS = ("kinds", "ignore", "kernels")


class Watched:
    """What is found while a test runs.

    Attributes:
        found: the list that `checking` gives.
    """

    def __init__(self, found: Any, wanted: Selection, known: Counter[baseline.Key]) -> None:
        self.found = found
        self._wanted = wanted
        self._known = known

    def tell(self, report: Any) -> None:
        """Have a test's report fail, where there are findings that are not known.

        The findings go with the report, as JSON has them, to where all reports are collected:
        pytest-xdist carries them from its workers.

        Args:
            report: pytest's report of the test's call.
        """
        chosen = self._wanted.of(self.found)
        new, known = baseline.split(chosen, self._known)
        fails = bool(new) and report.outcome == "passed"
        if new:
            launches, notes = self.found.launches, list(self.found.notes)
            text = render(Results(new, launches, notes, len(known)))
            if fails:
                # A test that is expected to fail has done so.
                report.outcome = "skipped" if hasattr(report, "wasxfail") else "failed"
                report.longrepr = text
            else:
                report.sections.append(("ferrule check", text))
        report.ferrule_check = {
            "findings": [as_dict(finding) for finding in chosen],
            "notes": list(self.found.notes),
            "launches": self.found.launches,
            "failed": fails,
        }


@contextlib.contextmanager
def watched(item: Any, marker: Any) -> Iterator[Watched]:
    """Check the kernels that a test runs inside of the block.

    Args:
        item: pytest's test.
        marker: its marker ``ferrule_check``, or None.

    Raises:
        KernelError: the marker or an option of the command line is wrong.
    """
    option = item.config.getoption
    given = _arguments(marker)
    wanted = selection(
        given.get("kinds") or option("ferrule_check_kind"),
        [*_listed(given.get("ignore")), *option("ferrule_check_ignore")],
        given.get("kernels") or option("ferrule_check_kernel"),
    )
    path = option("ferrule_check_baseline")
    known = _known(path) if path else Counter()
    with checking(
        kinds=None if wanted.kinds == ALL else wanted.kinds,
        kernels=wanted.kernels or None,
        sample=option("ferrule_check_sample"),
    ) as found:
        yield Watched(found, wanted, known)


def _arguments(marker: Any) -> dict[str, Any]:
    if marker is None:
        return {}
    wrong = [*map(repr, marker.args), *(name for name in marker.kwargs if name not in _ARGUMENTS)]
    if wrong:
        raise KernelError(
            f"the marker ferrule_check was given {', '.join(wrong)}; it takes "
            f"{', '.join(f'{name}=' for name in _ARGUMENTS)}."
        )
    return dict(marker.kwargs)


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


@functools.cache
def _known(path: str) -> Counter[baseline.Key]:
    return baseline.read(path)
