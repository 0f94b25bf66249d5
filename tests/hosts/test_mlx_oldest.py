"""The oldest MLX that ferrule's nodes work with: its wheel is installed into a folder, and MLX's
tests run with it. The rest of the suite runs with the newest, which pyproject.toml names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import pytest

import ferrule
from ferrule.hosts.mlx import build as mlx_build

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parents[1]
OURS = str(Path(ferrule.__file__).resolve().parents[1])
OLDEST = ".".join(map(str, mlx_build.OLDEST))
# Not those with models of mlx-lm, which needs a newer MLX itself, and not this one.
FILES = sorted(
    {path.name for path in TESTS.glob("test_mlx_*.py")}
    - {"test_mlx_hybrid.py", "test_mlx_packages.py", Path(__file__).name}
)  # fmt: skip


def run(*command: str | Path, env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """The exit status of a Python with these arguments, and what it printed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def oldest() -> Iterator[dict[str, str]]:
    """The environment of programs that import the oldest MLX."""
    with tempfile.TemporaryDirectory(prefix="ferrule-oldest-mlx-") as folder:
        wheel = f"mlx=={OLDEST}" if sys.platform == "darwin" else f"mlx[cpu]=={OLDEST}"
        status, log = run(
            "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--no-compile", "--retries=2",
            "--target", folder, wheel,
            env=os.environ, timeout=200,
        )  # fmt: skip
        # asked of a process of its own: where pip is imported, setuptools gives up its distutils
        none = r"No module named pip|from versions: none|ConnectionPool|ConnectionError"
        if status and re.search(none, log):
            pytest.skip(f"MLX {OLDEST} cannot be had here: {log.strip().splitlines()[-1]}")
        assert status == 0, log
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        yield {**kept, "PYTHONPATH": os.pathsep.join([folder, OURS])}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_oldest(oldest: dict[str, str]) -> None:
    code = (
        "import mlx.core as mx; from ferrule.hosts.mlx import build as mlx_build\n"
        "print(mx.__version__, mlx_build.library() is not None)"
    )
    status, said = run("-c", code, env=oldest, timeout=100)
    assert (status, said.splitlines()[-1]) == (0, f"{OLDEST} True"), said
    files = [TESTS / name for name in FILES]
    status, said = run(
        "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *files, TESTS / "test_hosts.py",
        "-k", "mlx and not wheel", env=oldest, timeout=1200,
    )  # fmt: skip
    print(said)
    assert status == 0, said


def test_the_newest() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    (newest,) = set(re.findall(r'"mlx(?:\[cpu\])?==([\d.]+);', project))
    assert mx.__version__ == newest  # runs the rest of the suite
    page = " ".join((REPOSITORY / "docs" / "mlx.md").read_text("utf-8").split())
    assert f"MLX {OLDEST} to {newest}" in page
