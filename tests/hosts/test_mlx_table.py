"""The table of docs/mlx.md is what is found by trying."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_table
from ferrule.hosts.mlx import build as mlx_build

pytestmark = pytest.mark.skipif(mlx_build.library() is None, reason="no nodes here")
PAGE = Path(__file__).parents[2].joinpath("docs", "mlx.md").read_text(encoding="utf-8")
NO_EXPORT = r"\(MLX\s0\.32\.0\sand\snewer\sexport\sit\)"


@pytest.mark.skipif(not mlx_build.at_least(0, 32), reason="MLX before 0.32 exports no kernels")
def test_the_table_of_the_page() -> None:
    assert mlx_table.table() in PAGE


@pytest.mark.skipif(mlx_build.at_least(0, 32), reason="all of the table is tried")
def test_rows_without_files() -> None:
    for row in mlx_table.ROWS:
        if row in mlx_table.FILES:
            with pytest.raises(ValueError, match=NO_EXPORT):
                mlx_table.ROWS[row](mlx_table.with_rules)
        else:
            assert mlx_table.line(row) in PAGE
