"""What all tests need."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import on_cuda
from fake_cuda import build
from ferrule import nvrtc

# A shell ignores Ctrl-C on behalf of what it runs in the background, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """What a test draws does not depend on the tests before it in the same process."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if mx := sys.modules.get("mlx.core"):
        mx.random.seed(0)


@pytest.fixture(scope="session")
def library() -> nvrtc.Nvrtc:
    """NVRTC, for tests that compile CUDA without a GPU."""
    found = nvrtc.find_nvrtc()
    if found is None:
        pytest.skip("NVRTC is not installed")
    return found


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands in for libcuda."""
    return build(tmp_path_factory.mktemp("fake"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate", action="store_true",
        help="also carry out the CUDA texts of kernels on the CPU, warp by warp: slow",
    )  # fmt: skip

    parser.addoption(
        "--exact-memory", action="store_true",
        help="on a GPU, arrays have no margin: for compute-sanitizer, which then sees every access "
        "outside them",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--exact-memory"):
        on_cuda.margin = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where MLX has a GPU by CUDA, its tests are tests of that."""
    if not on_cuda.available() or not on_cuda.mlx_has_cuda():
        return
    for item in items:
        if item.path.name.startswith("test_mlx"):
            item.add_marker(pytest.mark.gpu)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "everywhere" in metafunc.fixturenames:
        places = ["cpu"]
        if metafunc.config.getoption("--emulate"):
            places.append("emulated")
        if on_cuda.available():
            places.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("everywhere", places, indirect=True, scope="module")


@pytest.fixture(scope="module")
def everywhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where the kernels of a test run: on the CPU, then on the GPU if there is one.

    Where there is none, NVRTC compiles them all the same.
    """
    with contextlib.ExitStack() as stack:
        if request.param == "cpu":
            stack.enter_context(on_cuda.compiled())
        elif request.param == "cuda":
            stack.enter_context(on_cuda.everything())
        else:
            import warps

            stack.enter_context(warps.everything(tmp_path_factory.mktemp("fake")))
        yield request.param
