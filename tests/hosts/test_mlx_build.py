"""ferrule's part of MLX's graphs: where it comes from, and what is said where it cannot be had."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import ferrule
from ferrule import _env, cache
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import sources as mlx_sources
from ferrule.tools import fastcall
from test_packaging import REPOSITORY, build


def said() -> str:
    """The warning where there are no nodes."""
    with pytest.warns(ferrule.FerruleWarning, match="MLX's arrays run at once") as found:
        assert mlx_build.library.__wrapped__() is None
    return str(found[0].message)


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_build, "VERSION", "0.30.5")
    assert said().endswith("MLX is 0.30.5, and ferrule's nodes need 0.30.6 or newer.")


@pytest.mark.parametrize("version", ["0.32.4", "0.32.10", "1.0.0", "0.32.4.dev20261122+abc1"])
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(mlx_build, "VERSION", version)
    assert mlx_build.at_least(0, 32, 4) and mlx_build.at_least(0, 32)
    assert mlx_build.at_least(*mlx_build.OLDEST) and not mlx_build.at_least(1, 2)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_env.CXX, str(tmp_path / "none"))
    assert "the C++ compiler" in said()


def test_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mx, "__file__", str(tmp_path / "core.so"))
    assert "MLX's headers are not in" in said()


# -- what the doctor says of it --------------------------------------------------------------------


def doctor_of_mlx(tmp_path: Path, module: str | None = None, **environment: str) -> Any:
    """What the doctor says of MLX, in place of which there may be another module."""
    path = os.environ.get("PYTHONPATH", "")
    if module is not None:
        (tmp_path / "mlx").mkdir()
        (tmp_path / "mlx" / "__init__.py").touch()
        (tmp_path / "mlx" / "core.py").write_text(module)
        path = f"{tmp_path}{os.pathsep}{path}"
    code = (
        "import json\nfrom rich.console import Console\nfrom ferrule.cli import doctor\n"
        "report = {**doctor.examine()}\ndoctor.show(report, Console(width=999, stderr=True))\n"
        "print(json.dumps(report))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["mlx"]
    (shown,) = re.findall("  ferrule's nodes +(.*)", done.stderr)
    assert (found["error"] or found["nodes"] or "not built yet") in shown
    return found


def test_doctor_of_mlx(tmp_path: Path) -> None:
    environment = {"FERRULE_CACHE_DIR": str(tmp_path / "cache")}
    found = doctor_of_mlx(tmp_path, **environment)
    if found["nodes"] is not None:
        pytest.skip("a wheel brought the nodes")
    assert found["error"] is None
    payload = mlx_build._built()
    folder = cache.Cache(tmp_path / "cache")
    folder.put(mlx_build._key(mlx_build._compiler()), payload)
    found = doctor_of_mlx(tmp_path, **environment)
    assert found["nodes"] == "built on this machine, kept in the cache"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("__version__ = '0.29.4'\nclass array: ...", "is 0.29.4, .* need 0.30.6 or newer"),
        ("raise ImportError('libmlx.so: no such file')", "cannot be imported: .*libmlx.so: no"),
        ("import os\nos.abort()", "cannot be imported: Python ended with -6"),
    ],
)
def test_doctor_of_an_mlx_that_cannot_be_used(tmp_path: Path, module: str, says: str) -> None:
    found = doctor_of_mlx(tmp_path, module)
    assert found["nodes"] is None and re.match(says, found["error"].removeprefix("MLX "))


# -- brought by a wheel ----------------------------------------------------------------------------

PROGRAM = """
import sys
import mlx.core as mx
import numpy as np
import ferrule, ferrule.mlx
from ferrule.tools import toolchain
from ferrule.hosts.mlx import build as mlx_build, node as mlx_node

assert ferrule.__file__.startswith(sys.argv[1]), ferrule.__file__
try:
    toolchain.find_compiler()
except ferrule.ToolchainError:
    pass
else:
    sys.exit("there is a compiler")
assert mlx_build.library() is not None

def twice(x):
    if x.size == 13:
        raise ValueError("unlucky")
    return 2 * x

op = ferrule.adopt("twice", "x[*S]:float32 -> y[*S]:float32", run=twice)
compiled = mx.compile(lambda x: op(x + 1), shapeless=True)
for n in (3, 5):
    assert compiled(mx.ones(n)).tolist() == [4] * n

w, scales, biases = mx.quantize(mx.random.normal((4, 64, 64)))
mx.eval(w, scales, biases)
routed = mx.compile(
    lambda x, at: ferrule.mlx.gather_qmm(x, w, scales, biases, rhs_indices=at), shapeless=True
)
for n in (2, 5):
    x, at = mx.random.normal((n, 1, 64)), mx.arange(n) % 4
    expected = mx.gather_qmm(x, w, scales, biases, rhs_indices=at)
    assert mx.allclose(routed(x, at), expected, atol=1e-5)

# Exceptions of ours reach Python through MLX; those of MLX are caught by ours.
try:
    mx.eval(compiled(mx.ones(13)))
except ValueError as error:
    assert "unlucky" in str(error)
else:
    sys.exit("no error")
try:
    mlx_node.scatter_add(mx.zeros(3), mx.zeros(2), mx.ones(5))
except ferrule.KernelError as error:
    assert "cannot be broadcast" in str(error)
else:
    sys.exit("no error of MLX")
assert compiled(mx.ones(2)).tolist() == [4, 4]
print("good")
"""


def test_a_wheel_brings_nodes_to_machines_without_a_compiler(tmp_path: Path) -> None:
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("there are no compilers called cc and c++")
    place = Path(mx.__file__).resolve().parents[1]
    try:
        wheel, _ = build(tmp_path, None, FERRULE_PREBUILD_MLX=str(place))
    except AssertionError as failed:
        if "on an older system" not in str(failed):
            raise
        pytest.skip("this compiler's library is newer than MLX's")
    site, cache, empty = (tmp_path / name for name in ("site", "cache", "empty"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (file,) = (site / "ferrule" / "prebuilt").iterdir()
    assert file.name == mlx_sources.prebuilt(mx.__version__).name
    for folder in (cache, empty):
        folder.mkdir(mode=0o700)
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("CC", "CXX")},
        "PYTHONPATH": str(site), "PATH": str(empty), _env.CXX: str(empty / "c++"),
        _env.CACHE_DIR: str(cache),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "program.py", site], env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "good\n", done.stdout + done.stderr
    # What is of other sources is not used.
    header = site / "ferrule" / "runtime" / "mlx_plan.h"
    header.write_text(header.read_text("utf-8") + "/* changed */\n", "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "program.py", site], env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "kernels with MLX's arrays run at once" in done.stderr


def test_what_needs_newer_libraries_than_mlx_is_refused(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor out; do :; done\nprintf GLIBCXX_3.4.99 > "$out"\n', "utf-8")
    compiler.chmod(0o700)
    code = (
        "import setuptools, sys, pathlib; setuptools.setup = lambda **given: None\n"
        "from setup import prebuild; prebuild(*map(pathlib.Path, sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, Path(mx.__file__).resolve().parent, tmp_path],
        cwd=REPOSITORY, env={**os.environ, "CXX": str(compiler)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"need GLIBCXX_3\.4\.99, and MLX only GLIBCXX_3\.4\.\d+\. Build", done.stderr)


def test_a_file_that_cannot_be_loaded_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mlx_sources, "PREBUILT", tmp_path)
    mlx_sources.prebuilt(mx.__version__).write_bytes(b"nothing that could be loaded")
    assert mlx_build._brought() is None
    assert mlx_build.library.__wrapped__() is not None


def test_sources_are_all_that_is_compiled() -> None:
    """The digest is of all of them; setup.py has them without ferrule's other modules."""
    reached: set[str] = set()
    left = {"mlx_node.cpp", "mlx_matmul.cpp"}
    while left:
        name = left.pop()
        reached.add(name)
        text = (mlx_sources.FOLDER / name).read_text("utf-8")
        beside = re.findall(r'^#include "([\w.]+)"', text, re.MULTILINE)
        left |= {one for one in beside if (mlx_sources.FOLDER / one).is_file()} - reached
    assert reached == set(mlx_sources.SOURCES)
    assert set(fastcall.ENGINE) < reached


def test_versions_of_headers() -> None:
    assert mlx_sources.version(Path(mx.__file__).resolve().parent) == mx.__version__
