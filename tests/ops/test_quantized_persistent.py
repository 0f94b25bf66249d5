"""Which tile blocks that stay make next, and where tiles of x lie, by the CUDA text on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule.ops import quantized_tiles
from ferrule.ops.quantized_persistent_cuda import PLACES, WORK
from ferrule.ops.quantized_persistent_dense_cuda import DENSE
from ferrule.ops.quantized_tiles import SHARING
from ferrule.tools import toolchain

NEAR, TOK = 4, 16
MAIN = """
extern "C" void works(const int* tiles, int panels, int count, Work* of) {
  for (int i = 0; i < count; ++i) of[i] = Works{tiles, panels}.of(i);
}
struct Piece { Work work; int earlier; };
extern "C" void pieces(int count, int panels, int block, int blocks_of_k, Piece* of) {
  blockIdx.x = block;
  const dense::Works works{count, panels};
  for (int n = 0; n == 0 || of[n - 1].work.count; ++n) {
    const Work work = works.piece(n, blocks_of_k);
    of[n] = {work, work.end == blocks_of_k ? works.earlier(work, blocks_of_k) : 0};
  }
}
extern "C" void grid(int blocks) { gridDim.x = blocks; }
extern "C" void places(const Work* work, int64_t K, int64_t* at, int64_t* tile) {
  *at++ = Works{nullptr, 1}.x(*work, K).begin / 4;  // in words
  *at++ = Works{nullptr, 1}.x(*work, K).pitch / 4;
  for (int token = 0; token < work->count; ++token)
    for (int64_t k = 0; k < padded(K); k += BLOCK)
      for (int q = 0; q < 4; ++q)
        for (int n = 0; n < 4; ++n) *at++ = place(*work, K, token, k + q * 8, n);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("persistent")
    source = folder / "works.cpp"
    source.write_text(
        "#include <algorithm>\n#include <cstdint>\nusing std::min;\n#define __device__\n"
        "using std::max;\nstruct int2 { int x, y; };\nstatic int2 blockIdx, gridDim;\n"
        "static int __ldg(const int* p) { return *p; }\n"
        f"constexpr int NEAR = {NEAR}, TOK = {TOK}, BITS = 4, OWN = 32, BLOCK = 128;\n"
        f"constexpr int AT_ONCE = 4, SHARING = {SHARING};\n"
        f"{WORK}{PLACES}namespace dense {{{DENSE.replace(WORK, '')}}}{MAIN}"
    )
    made = folder / "works.so"
    command = [*toolchain.find_compiler().argv, "-O1", "-w", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def pointer(array: Any) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


def tiles_of(counts: list[int]) -> Any:
    """What `sort_rows` writes for so many rows of each matrix."""
    found, at = [], 0
    for matrix, count in enumerate(counts):
        found += [(matrix, at + i, min(count - i, TOK)) for i in range(0, count, TOK)]
        at += count
    return np.array([len(found), *np.ravel(found)], np.int32)


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@given(counts=COUNTS, panels=st.integers(1, 7), more=st.integers(0, 30))
def test_each_tile_once(library: Any, counts: list[int], panels: int, more: int) -> None:
    """Blocks take works until one has no rows: none before the last has, and all behind it."""
    tiles = tiles_of(counts)
    count = int(tiles[0]) * panels
    works = np.zeros((count + more, 6), np.int32)
    library.works(pointer(tiles), panels, count + more, pointer(works))
    assert not works[count:, 3].any()
    expected = [(p, *tile) for p in range(panels) for tile in tiles[1:].reshape(-1, 3)]
    found = sorted(map(tuple, works[:count, :4]))
    assert found == sorted(tuple(map(int, work)) for work in expected)
    # As many as are near have the same rows of w, one after another.
    for i in range(0, count - NEAR + 1, NEAR):
        if i < tiles[0] // NEAR * NEAR * panels:
            assert len(set(works[i : i + NEAR, 0])) == 1


@given(counts=COUNTS, blocks=st.integers(1, 3), less=st.integers(0, 7))
def test_tiles_have_places_of_their_own(
    library: Any, counts: list[int], blocks: int, less: int
) -> None:
    k = blocks * 128 - less * 16
    seen: list[Any] = []
    for matrix, at, count in tiles_of(counts)[1:].reshape(-1, 3):
        work = np.array([0, matrix, at, count], np.int32)
        places = np.zeros(2 + count * blocks * 16, np.int64)
        library.places(pointer(work), ctypes.c_int64(k), pointer(places), None)
        begin, pitch, *fours = places.tolist()
        assert begin % 256 == 0  # 8 rows of 128 bytes
        inside = np.array(fours) - begin
        assert inside.min() >= 0 and inside.max() < pitch * 2 * blocks
        # What a row of 128 bytes of a token has, swizzled by its place among 8.
        rows = inside // 32 % (pitch // 32)
        tokens = np.repeat(np.arange(count), blocks * 16)
        assert (rows == tokens).all()
        of_row = (inside // 4 % 8 ^ tokens % 8).reshape(count, blocks * 2, 8)
        assert (of_row == np.arange(8)).all()
        seen += fours
    slots = sum(counts)
    assert len(set(seen)) == len(seen)
    assert not seen or max(seen) < (slots + 7 * len(counts) + 15) // 8 * 8 * blocks * 64


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4", "mxfp8", "affine"])
def test_tiles_fit(mode: str, bits: int) -> None:
    """There is room for blocks to run ahead, whatever the groups."""
    for group in {"nvfp4": [16], "affine": [32, 64, 128]}.get(mode, [32]):
        for tile in (quantized_tiles.PERSISTENT, *quantized_tiles.MANY_OF_EXPERTS):
            fitting = tile.of(mode, bits, group)
            assert fitting.shared_memory(mode, bits, group) <= quantized_tiles.MOST
            assert fitting.x_stages >= 4 and fitting.widths == tile.widths
            if mode in ("nvfp4", "mxfp4") and bits == 4:
                assert fitting == tile


@given(
    count=st.integers(1, 200), panels=st.integers(1, 9), grid=st.integers(1, 40),
    blocks=st.integers(1, 30),
)  # fmt: skip
def test_shares_of_works(library: Any, count: int, panels: int, grid: int, blocks: int) -> None:
    """Each block of K of each work once. Of a work that blocks share the last of them has the end,
    and counts those that leave it their sums: each leaves one at most, and that before what it
    adds others to."""
    library.grid(grid)
    made: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    of_block = np.zeros((400, 7), np.int32)
    most = 0
    for block in range(grid):
        library.pieces(count, panels, block, blocks, pointer(of_block))
        leaves = waits = many = 0
        for panel, _, at, rows, begin, end, earlier in of_block.tolist():
            if not rows:
                break
            assert 0 <= begin < end <= blocks and begin % 4 == 0 and rows == min(16, count - at)
            made.setdefault((panel, at), []).append((begin, end, block, earlier))
            leaves += end < blocks
            waits += earlier > 0
            assert not (end < blocks and waits)  # nobody waits for who waits
            many += end - begin
        assert leaves <= 1
        most = max(most, many)
    assert sorted(made) == [(p, at) for p in range(panels) for at in range(0, count, 16)]
    for pieces in made.values():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == blocks
        assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
        last = pieces[-1][2]
        assert [piece[2] for piece in pieces] == list(range(last - len(pieces) + 1, last + 1))
        assert [piece[3] for piece in pieces] == [0] * (len(pieces) - 1) + [len(pieces) - 1]
    works = len(made)
    rounds, left = divmod(works, grid)
    whole = (grid - left) * blocks * 128 < grid * SHARING
    assert most <= (rounds + (1 if whole else left / grid)) * blocks + 16


@given(
    tiles=st.integers(1, 12), panels=st.integers(1, 40), grid=st.integers(1, 140),
    fours=st.integers(1, 20),
)  # fmt: skip
def test_what_shares_take(library: Any, tiles: int, panels: int, grid: int, fours: int) -> None:
    """What the choice between kernels takes for the depth of K that the busiest block has."""
    library.grid(grid)
    of_block = np.zeros((700, 7), np.int32)
    most, shared = 0, False
    for block in range(grid):
        library.pieces(tiles * TOK, panels, block, fours * 4, pointer(of_block))
        pieces = of_block[: int(np.argmin(of_block[:, 3] > 0))]
        most = max(most, int((pieces[:, 5] - pieces[:, 4]).sum()))
        shared |= bool((pieces[:, 5] < fours * 4).any())
    k = fours * 512
    names = {"K": k, "N": panels * 256, "sm_count": grid, "ceildiv": lambda a, b: -(-a // b)}
    depth = eval(
        quantized_tiles._depth(), {}, {**names, "x": SimpleNamespace(size=tiles * 128 * k)}
    )
    if shared:
        assert 0 <= most * 128 - (depth - SHARING) <= 3 * 512
    else:
        assert depth == most * 128 or depth - SHARING == most * 128
