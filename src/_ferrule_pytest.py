"""The pytest plugin of ``ferrule check``: tests fail whose kernels have findings.

It stands outside the package, and imports it only for tests that are checked, since pytest loads it
whenever it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ferrule.check.pytest_plugin import Watched

_MARKER = "ferrule_check"
_watched: dict[str, Watched] = {}  # by the test's id: from its call to the report of that


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ferrule", "kernels checked by ferrule")
    group.addoption(
        "--ferrule-check", action="store_true",
        help="fail tests whose kernels have findings, as the marker ferrule_check does for one",
    )  # fmt: skip
    for name, metavar, what in (
        ("kind", "KIND", "check this kind; may be repeated"),
        ("ignore", "KIND", "leave this kind out; may be repeated"),
        ("kernel", "GLOB", "check kernels with such names; may be repeated"),
    ):
        group.addoption(
            f"--ferrule-check-{name}", action="append", default=[], metavar=metavar, help=what
        )
    group.addoption(
        "--ferrule-check-sample", type=int, metavar="N",
        help="check N threadgroups of each launch that has more",
    )  # fmt: skip
    group.addoption(
        "--ferrule-check-baseline", metavar="FILE", help="do not report the findings of this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(kinds=None, ignore=None, kernels=None): fails if a kernel that the test runs "
        "has findings, of these kinds and in kernels with such names",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker(_MARKER)
    if marker is None and not item.config.getoption(_MARKER):
        yield
        return
    from ferrule.check.pytest_plugin import watched

    with watched(item, marker) as _watched[item.nodeid]:
        yield


# Outermost: after what decides whether a test was expected to fail.
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    outcome: Any = yield
    found = _watched.pop(item.nodeid, None) if call.when == "call" else None
    if found is not None:
        found.tell(outcome.get_result())
