"""PyTorch's own tests of operators, of its repository, run with ops of ferrule.

None of them is in this repository, and they are not part of torch's packages:

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
    FERRULE_PYTORCH_TESTS=pytorch pytest tests/conformance/test_pytorch_own.py

`run_pytorch_tests.py` does it; it says what of each file is run, and why the rest is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_pytorch_tests import PARTS

import ferrule as fe


@pytest.fixture(autouse=True)
def on_every_device() -> None:
    """On the CPU alone: torch's own tests choose their devices."""


@pytest.mark.parametrize("part", PARTS)
def test_pytorch_own_files(part: str, tmp_path: Path) -> None:
    checkout = os.environ.get("FERRULE_PYTORCH_TESTS")
    if checkout is None:
        pytest.skip(
            "runs with FERRULE_PYTORCH_TESTS=PATH, a checkout of PyTorch: git clone --depth 1 "
            "--branch v2.13.0 https://github.com/pytorch/pytorch"
        )
    for name in ("expecttest", "yaml"):  # torch's tests import them
        pytest.importorskip(name)
    source = Path(fe.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("run_pytorch_tests.py"),
            part,
            Path(checkout).resolve(),
        ],
        cwd=tmp_path,  # where some leave files
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
