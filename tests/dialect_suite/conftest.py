"""Kernels of several tests are compiled together; references may overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem != "test_metal_refusals":
            item.add_marker(pytest.mark.together)


@pytest.fixture(autouse=True)
def quiet_references() -> Iterator[None]:
    """The references overflow and make NaNs as the kernels do: that is no news."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=["auto", "fibers"])
def mode(request: pytest.FixtureRequest) -> str:
    """Both ways to run a kernel that synchronises."""
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def on_every_device(everywhere: str) -> None:
    """All tests here, on the GPU too where there is one."""
