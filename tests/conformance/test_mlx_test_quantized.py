"""MLX's own tests of gathering and quantized products, with ferrule's in their place.

``pytest tests/conformance --mlx-tests PATH`` runs them; tests/test_mlx_quantized.py is the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ferrule as fe


def test_mlx_own_files(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--mlx-tests", default=None)
    if folder is None:
        pytest.skip("runs with --mlx-tests PATH, the folder python/tests of a checkout of MLX")
    source = Path(fe.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_mlx_quantized.py"), folder],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
