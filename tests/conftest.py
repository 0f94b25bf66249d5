"""What all tests need."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_cublas
import on_cuda
import precompiled
import together
from fake_cuda import build
from ferrule.devices import protocol as devices
from ferrule.devices.cpu import program as cpu
from ferrule.tools import nvrtc

# Inductor compiles a program per instruction set, where its cache is new, to see whether the
# compiler has it: 8 s, in each of the many processes that have a cache of their own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell ignores Ctrl-C on behalf of what it runs in the background, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def seed() -> None:
    """What a test draws, and where MLX computes, does not depend on the tests before it in the same
    process."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if mx := sys.modules.get("mlx.core"):
        mx.random.seed(0)
        if on_cuda.mlx_has_cuda():
            mx.set_default_device(mx.gpu)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    seed()


@pytest.fixture(scope="session", autouse=True)
def precompiled_headers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    precompiled.mlx_header()
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that all workers have
    folder = base / "headers"
    folder.mkdir(exist_ok=True)
    with precompiled.headers(folder):
        yield folder


@pytest.fixture(scope="module", autouse=True)
def optimisation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels are compiled with less optimisation than users', but in modules marked optimised."""
    optimised = request.node.get_closest_marker("optimised") is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_FLAGS", precompiled.quick(cpu._FLAGS, optimised))
        if optimised:
            patch.setattr(devices.get("cpu"), "_programs", {})
        yield


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


@pytest.fixture(scope="session")
def fake_cublas_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands in for libcublasLt."""
    return fake_cublas.build(tmp_path_factory.mktemp("fake"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate", action="store_true",
        help="also carry out the CUDA texts of kernels on the CPU, warp by warp: slow",
    )  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where MLX has a GPU by CUDA, its tests are tests of that."""
    if not on_cuda.available() or not on_cuda.mlx_has_cuda():
        return
    for item in items:
        if item.path.name.startswith("test_mlx") and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.gpu)


_frozen_modules = 0


def _freeze() -> None:
    """What importing and collecting made stays, and is most of what there is: no collection of
    garbage needs to look at it."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 200:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, 20, 20)  # tests that are about garbage collect it themselves
    _freeze()


def pytest_runtest_teardown() -> None:
    _freeze()


# -- without MLX: its tests are skipped ---------------------------------------------------------


def _has_mlx() -> bool:
    try:
        return importlib.util.find_spec("mlx.core") is not None
    except ModuleNotFoundError:
        return False


HAS_MLX = _has_mlx()


def _skip_without_mlx(error: BaseException | None) -> None:
    """Skip what fails since MLX, or mlx-lm, which needs it, is not installed."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not HAS_MLX and name is not None and name.partition(".")[0] in ("mlx", "mlx_lm"):
        pytest.skip("MLX is not installed", allow_module_level=True)


class MaybeWithMlx(pytest.Module):
    """A module of tests, which may import MLX."""

    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            _skip_without_mlx(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return MaybeWithMlx.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_without_mlx(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    header = functools.partial(precompiled.dialect_header, item.funcargs["precompiled_headers"])
    together.rehearse(item, seed, header)
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_without_mlx(error)
        raise


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
