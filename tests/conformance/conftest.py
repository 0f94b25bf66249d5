"""What the conformance tests share: one cache of compiled kernels for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule import _env


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mlx-tests",
        metavar="PATH",
        help="the folder python/tests of a checkout of MLX: run its own tests of custom kernels "
        "with ferrule.metal_kernel in place of MLX's",
    )
    parser.addoption(
        "--mlx-lm-tests",
        metavar="PATH",
        help="the folder tests of a checkout, or source distribution, of the installed mlx-lm: run "
        "its own tests of its kernels with ferrule in MLX",
    )


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A cache folder for this test run, shared by the workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    folder = folder / "conformance-kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.CACHE_DIR, str(kernel_cache))


@pytest.fixture(scope="module", autouse=True)
def on_every_device(everywhere: str) -> None:
    """All tests here, on the GPU too where there is one."""
