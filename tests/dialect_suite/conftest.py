"""A cache folder of the run's own, unless the environment names one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "FERRULE_CACHE_DIR" not in os.environ:
            folder = tmp_path_factory.mktemp("kernels", numbered=True)
            patch.setenv("FERRULE_CACHE_DIR", str(folder))
        yield


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
