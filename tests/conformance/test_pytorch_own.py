"""PyTorch's own tests of operators, of its repository, run with ops of ferrule.

None of them is in this repository, and they are not part of torch's packages:

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
    FERRULE_PYTORCH_TESTS=pytorch pytest tests/conformance/test_pytorch_own.py

`run_pytorch_tests.py` does it; it says what of each file is run, and why the rest is not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivers import run_driver
from run_pytorch_tests import PARTS


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
    path = Path(checkout).resolve()  # they run in a folder where some leave files
    run_driver("run_pytorch_tests.py", part, path, timeout=300, folder=tmp_path)
