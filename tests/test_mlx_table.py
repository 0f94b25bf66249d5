"""The table of docs/mlx.md is what is found by trying."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_table
from ferrule.hosts import mlx_build

pytestmark = pytest.mark.skipif(mlx_build.library() is None, reason="no nodes here")


def test_the_table_of_the_page() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "mlx.md").read_text(encoding="utf-8")
    assert mlx_table.table() in page
