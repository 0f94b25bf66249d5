"""How products with quantized matrices are divided on GPUs: tiles fit, and leave least idle."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule.ops import quantized_tiles
from ferrule.ops.quantized_tiles import TILES, TILES_OF_EXPERTS, Tile

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
    fitting = (tile for tile in TILES if tokens <= tile.tokens and not tile.only)
    return next(tile for tile in fitting if eval(tile.when, {}, names))


def is_shared(tile: Tile) -> bool:
    """Whether a tile is for blocks of which two have a multiprocessor."""
    return tile in quantized_tiles._high(tile.tokens) and not tile.tables


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_tiles_fit(form: tuple[str, int, int]) -> None:
    for tile in (*(tile.of(*form) for tile in TILES), *TILES_OF_EXPERTS):
        assert tile.stages >= 3  # or the text does not compile
        assert tile.shared_memory(*form) <= quantized_tiles.MOST
        of_16_rows = tile.template["TILES"]
        assert (tile.template["WM"] - 1) * quantized_tiles.R < of_16_rows  # each warp has some
        assert tile.warps % tile.template["WM"] == 0
        assert not tile.tables or form[0] in ("nvfp4", "mxfp4")


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_two_blocks_share_a_multiprocessor(form: tuple[str, int, int]) -> None:
    for tile in TILES:
        if is_shared(tile):
            assert 2 * (tile.shared_memory(*form) + 1024) <= 228 * 1024
            assert tile.warps <= 8  # 65536 registers are enough for 128 of each thread


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

    def busy(height: int, shared: int) -> int:  # rows of the multiprocessor that has most
        return math.ceil(math.ceil(rows / height) / (shared * sm_count)) * shared * height

    two = min(busy(height, 2) for height in quantized_tiles._SHARED_HEIGHTS)
    one = min(busy(height, 1) for height in quantized_tiles._HEIGHTS)
    if rows <= 32 * sm_count:
        assert tile.rows == 32
    elif rows <= 144 * sm_count:
        assert busy(tile.rows, 1 + is_shared(tile)) == min(one, two)
        assert math.ceil(rows / tile.rows) <= (1 + is_shared(tile)) * sm_count
    else:
        assert is_shared(tile) and busy(tile.rows, 2) == two


def test_each_height_is_chosen() -> None:
    sizes = {"K": 4096, "sm_count": 132}
    found = [chosen(8, N=rows, **sizes) for rows in range(16, 1 << 15, 16)]
    assert {tile.rows for tile in found if is_shared(tile)} == {*quantized_tiles._SHARED_HEIGHTS}
    assert {tile.rows for tile in found if not is_shared(tile)} == {32, *quantized_tiles._HEIGHTS}
