"""MLX's own tests of gathering and quantized products, with ferrule's in their place.

``pytest tests/conformance --mlx-tests PATH`` runs them;
tests/hosts/test_mlx_quantized.py is the rest.
"""

from __future__ import annotations

import pytest

from drivers import run_driver


def test_mlx_own_files(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--mlx-tests", default=None)
    if folder is None:
        pytest.skip("runs with --mlx-tests PATH, the folder python/tests of a checkout of MLX")
    run_driver("run_mlx_quantized.py", folder, timeout=600)
