"""What tests need of the MLX that they run with: the newest, or that of test_mlx_oldest.py."""

from __future__ import annotations

import pytest

from ferrule.hosts.mlx import build as mlx_build


def older_than(*version: int) -> str:
    """Why a test of what MLX has since a version cannot run; empty where it can."""
    if mlx_build.at_least(*version):
        return ""
    return f"needs MLX {'.'.join(map(str, version))}, and this is {mlx_build.VERSION}"


def needs_mlx(*version: int) -> pytest.MarkDecorator:
    """Skips a test of what MLX has since a version."""
    return pytest.mark.skipif(bool(older_than(*version)), reason=older_than(*version) or "-")
