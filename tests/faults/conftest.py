"""What the fault tests share: a cache of their own, and processes to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faulty import HERE
from ferrule import _env

SKIPPED = 77  # the exit status of a driver that lacks a right; its output says which


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "default-cache"))
    monkeypatch.delenv(_env.CXX, raising=False)


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: a thousand fsyncs on a disk take their time."""
    folder = Path("/dev/shm")  # noqa: S108
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        yield Path(inside)


@pytest.fixture
def fast_folder(memory: Path) -> Path:
    """A new folder in memory."""
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture
def drive() -> Callable[..., None]:
    """Runs one function of a driver script in a process of its own."""

    def run(script: str, function: str, *arguments: object) -> None:
        # A process of one thread may fork, and may enter a namespace of its own.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OPENBLAS_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, HERE / script, function, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        if done.returncode == SKIPPED:
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0, done.stdout

    return run
