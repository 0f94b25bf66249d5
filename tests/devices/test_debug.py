"""FERRULE_DEBUG: kernels on the CPU that a debugger shows in the author's lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule import cache
from ferrule.devices.cpu import debug
from ferrule.kernel import ATTRIBUTES

BODY = """
uint i = thread_position_in_grid.x;
threadgroup float tile[4];
tile[i % 4] = x[i] * 2;
threadgroup_barrier(mem_flags::mem_threadgroup);
float left = tile[(i + 3) % 4];
y[i] = twice(left) + x[i];
"""
HEADER = """float twice(float v) {
    float doubled = v * 2;
    return doubled;
}
"""
SCRIPT = f"""
import numpy as np, ferrule
shift = ferrule.metal_kernel("shift", ["x"], ["y"], {BODY!r}, {HEADER!r})
x = np.arange(8, dtype=np.float32)
y = shift(inputs=[x], grid=(8, 1, 1), threadgroup=(4, 1, 1), output_shapes=[x.shape],
          output_dtypes=[x.dtype])
print(y[0].tolist())
"""
WANTED = [12, 1, 6, 11, 32, 21, 26, 31]


@pytest.fixture
def debugging(tmp_path: Path) -> Iterator[Path]:
    cache.set_default(tmp_path)
    ferrule.set_debug(True)
    yield tmp_path
    ferrule.set_debug(None)
    cache.set_default(None)


def shift(name: str = "shift") -> Any:
    return ferrule.metal_kernel(name, ["x"], ["y"], BODY, HEADER)


SIZES = {"inputs": ["float32[8]"], "output_dtypes": [ferrule.float32]}


def test_the_text_has_every_position_and_names_files(debugging: Path) -> None:
    binary = shift().compile("cpu", **SIZES)
    assert binary.mode == "fibers (for a debugger)"
    assert all(f" {name} = " in binary.text for name in ATTRIBUTES)
    (folder,) = debugging.glob("debug/*")
    assert (folder / "shift.source").read_text() == BODY
    assert (folder / "shift.header").read_text() == HEADER
    for where in ("source", "header"):
        assert f'#line 1 "{folder}/shift.{where}"' in binary.text


def test_it_computes_the_same(debugging: Path) -> None:
    x = np.arange(8, dtype=np.float32)
    (y,) = shift()(inputs=[x], grid=(8, 1, 1), threadgroup=(4, 1, 1), output_shapes=[x.shape],
                   output_dtypes=[x.dtype])  # fmt: skip
    assert y.tolist() == WANTED


def test_the_cache_tells_the_two_apart(debugging: Path) -> None:
    kernel = shift()
    slow = kernel.compile("cpu", **SIZES)
    ferrule.set_debug(False)
    quick = kernel.compile("cpu", **SIZES)
    assert quick.mode.startswith("split") and quick.payload != slow.payload
    ferrule.set_debug(True)
    assert kernel.compile("cpu", **SIZES).payload == slow.payload


def test_errors_still_quote_the_author(debugging: Path) -> None:
    kernel = ferrule.metal_kernel("broken", ["x"], ["y"], "int i = 0;\ny[i] = nothing;")
    with pytest.raises(ferrule.CompileError, match=r"source line 2: .*nothing"):
        kernel.compile("cpu", **SIZES)


def test_a_body_may_call_its_own_variables_so(debugging: Path) -> None:
    kernel = ferrule.metal_kernel(
        "own", ["x"], ["y"], "{ int grid_size = 3; y[0] = grid_size; } y[1] = grid_origin.x;"
    )
    x = np.zeros(2, np.float32)
    (y,) = kernel(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[x.shape],
                  output_dtypes=[x.dtype])  # fmt: skip
    assert y.tolist() == [3, 0]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("FERRULE_DEBUG", value)
    assert debug.debugging() is on


@pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb")
def test_gdb_stops_at_a_line_of_one_thread(tmp_path: Path) -> None:
    commands = """
        set pagination off
        set breakpoint pending on
        break shift.source:4 if thread_position_in_grid.x == 5
        run
        next
        next
        next
        print left
        print tile
        print x[5]
        print thread_position_in_threadgroup
        print threadgroup_position_in_grid
        step
        list
        info locals
        continue
    """
    script, said = tmp_path / "script.py", tmp_path / "commands"
    script.write_text(SCRIPT)
    said.write_text(commands)
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        ["gdb", "-nx", "-q", "-batch", "-x", str(said), "--args", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FERRULE_DEBUG": "1", "FERRULE_THREADS": "1", "PYTHONPATH": paths,
             "FERRULE_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    out = done.stdout
    if "ptrace" in done.stderr + out:
        pytest.skip("this system lets no debugger trace")
    for line in (
        "shift.source:4\n4\ttile[i % 4] = x[i] * 2;",
        "7\ty[i] = twice(left) + x[i];",
        "$1 = 8",
        "$2 = {8, 10, 12, 14}",
        "$3 = 5",
        "$4 = {x = 1, y = 0, z = 0}",
        "$5 = {x = 1, y = 0, z = 0}",
        "    float doubled = v * 2;",
        "doubled = ",
        str([float(v) for v in WANTED]),
    ):
        assert line in out, out + done.stderr
