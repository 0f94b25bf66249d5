"""How products with quantized matrices are divided on GPUs: tiles fit, and leave least idle."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule.ops import quantized_cuda
from ferrule.ops.quantized_cuda import TILES, TILES_OF_EXPERTS, Tile

FORMATS = [
    ("nvfp4", 4, 16),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    *(("affine", bits, group) for bits in (4, 8) for group in (32, 64, 128)),
]
FEWEST_BYTES = 97 * 1024  # what every GPU of compute capability 8.0 and later has for a block


def chosen(tokens: int, **sizes: Any) -> Tile:
    """The first tile that has a place for so many rows of x, and whose condition holds."""
    names = {"ceildiv": lambda a, b: -(-a // b), "capability": 90, **sizes}
    fitting = (tile for tile in TILES if tokens <= tile.tokens)
    return next(tile for tile in fitting if eval(tile.when, {}, names))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_tiles_fit(form: tuple[str, int, int]) -> None:
    for tile in (*(tile.of(*form) for tile in TILES), *TILES_OF_EXPERTS):
        assert tile.stages >= 3  # or the text does not compile
        assert tile.shared_memory(*form) <= quantized_cuda._MOST
        of_16_rows = tile.template["TILES"]
        assert (tile.template["WM"] - 1) * quantized_cuda.R < of_16_rows  # each warp has some
        assert tile.warps % tile.template["WM"] == 0
        assert not tile.tables or form[0] in ("nvfp4", "mxfp4")


def test_experts_have_no_tables() -> None:
    assert not any(tile.tables for tile in TILES_OF_EXPERTS)  # nobody fills them


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64])
def test_every_gpu_has_a_tile(form: tuple[str, int, int], tokens: int) -> None:
    for tiles in ([tile.of(*form) for tile in TILES], TILES_OF_EXPERTS):
        fitting = [tile for tile in tiles if tokens <= tile.tokens]
        assert any(
            tile.when == "K > 0" and tile.shared_memory(*form) <= FEWEST_BYTES for tile in fitting
        )


@given(
    tokens=st.integers(1, 16),
    rows=st.integers(1, 4096).map(lambda n: n * 16),
    sm_count=st.sampled_from([78, 114, 132, 148]),
)
def test_multiprocessors_are_idle_least(tokens: int, rows: int, sm_count: int) -> None:
    tile = chosen(tokens, N=rows, K=4096, sm_count=sm_count)

    def busy(height: int) -> int:  # rows of the multiprocessor that has most
        return math.ceil(math.ceil(rows / height) / sm_count) * height

    if rows <= 32 * sm_count:
        assert tile.rows == 32
    else:
        assert busy(tile.rows) == min(busy(height) for height in quantized_cuda._HEIGHTS)


def test_each_height_is_chosen() -> None:
    sizes = {"K": 4096, "sm_count": 132}
    found = {chosen(8, N=rows, **sizes).rows for rows in range(16, 1 << 15, 16)}
    assert found == {32, *quantized_cuda._HEIGHTS}
