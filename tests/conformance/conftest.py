"""What the conformance tests share."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mlx-tests",
        metavar="PATH",
        help="the folder python/tests of a checkout of MLX: run its own tests of custom kernels "
        "with ferrule.metal_kernel in place of MLX's",
    )
    parser.addoption(
        "--mlx-lm-tests",
        metavar="PATH",
        help="the folder tests of a checkout, or source distribution, of the installed mlx-lm: run "
        "its own tests of its kernels with ferrule in MLX",
    )


@pytest.fixture(scope="module", autouse=True)
def on_every_device(everywhere: str) -> None:
    """All tests here, on the GPU too where there is one."""
