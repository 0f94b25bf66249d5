"""Products with quantized matrices on NVIDIA GPUs: how the kernels are launched.

Up to 64 rows of x go to a kernel that reads the packed weights once, on GPUs of compute capability
9.0 up to 512; of more, the weights are dequantized to scratch, and cuBLAS multiplies. Rows that
indices send to different matrices are put into tiles of the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ferrule

from . import quantized_wide_cuda as wide_texts
from .quantized_cuda_texts import (
    ANY_WEIGHTS,
    DENSE,
    FEW,
    FLOATS_OF_BYTES,
    SCALED,
    VALUE_OF,
    WEIGHTS,
)
from .quantized_decode_cuda import AHEAD, DECODE, ELEMENTS, GIVEN, MACHINE, MODES, TABLES
from .quantized_experts_cuda import EXPERTS, GROUPED, by_expert, sides

R = 2  # tiles of 16 rows of w of a warp
FEWEST = 8  # rows of x, of which a Metal body is as fast where nothing else is there
WHERE = "device == cuda and capability >= 80 and T != float32 and K > 0"
# GPUs whose blocks may have more shared memory than 99 KB, and more than 163 KB.
_LARGE = "capability != 86 and capability != 89 and capability < 120"
_LARGER = "capability >= 90 and capability < 120"
_ROWS = "(y.size // max(N, 1))"  # of a result
_MOST = 225 * 1024  # bytes of shared memory of a block


def _room(size: int) -> str:
    """A condition: blocks may have so many bytes of shared memory, beside a kernel's own arrays."""
    rooms = ((97 * 1024, "capability >= 80"), (161 * 1024, _LARGE), (_MOST, _LARGER))
    return next(condition for most, condition in rooms if size <= most)


def _shared(size: int, blocks: str) -> str:
    """An expression for the shared memory of a block: more than half of what a multiprocessor has
    where each block can have one for itself. Two would share one, and leave another idle."""
    return f"max({size}, {116 * 1024} if {blocks} <= sm_count and {_LARGER} else 0)"


def _for(tiles: Sequence[Any], mode: str, bits: int) -> list[Any]:
    """Those of some tiles that are for a format."""
    return [tile for tile in tiles if not tile.only or f"{mode} {bits}" in tile.only]


def _split(function: str, arguments: list[Any], split: str, step: dict[str, Any]) -> list[Any]:
    """The steps of a kernel whose blocks divide K: in a cluster, where there is more than one."""
    return [
        ferrule.cuda_step(function, arguments, when=f"{split} == 1", **step),
        ferrule.cuda_step(function, arguments, when=f"{split} > 1", cluster=(1, split, 1), **step),
    ]


class Tile(NamedTuple):
    """How a block divides a product.

    Attributes:
        tokens: rows of x, at most.
        rows: of w.
        stages: parts of both that are there, or on their way.
        when: a condition.
        warps: of a block.
        tables: there may be tables of codes and scales in shared memory.
        only: the formats for which it is, as "nvfp4 4"; all if it is empty.
    """

    tokens: int
    rows: int
    stages: int
    when: str = "K > 0"
    warps: int = 8
    tables: bool = False
    only: tuple[str, ...] = ()

    @property
    def template(self) -> dict[str, int]:
        """Constants of the text: WM warps divide the rows, WK of them K."""
        wm = -(-self.rows // (16 * R))
        divided = {"TILES": self.rows // 16, "R": R, "WM": wm, "WK": self.warps // wm}
        own = {"TOK": self.tokens, "STAGES": self.stages, "TABLES_MAY_BE": int(self.tables)}
        return {**divided, **own}

    def shared_memory(self, mode: str, bits: int, group: int) -> int:
        """How many bytes of shared memory a block has."""
        block, wk = 512 // bits, self.template["WK"]
        scales = 4 * block // group * (4 if mode == "affine" else 1)
        stage = wk * 2 * block * self.tokens + self.warps * 1024 * R
        sums = wk * 4 * (self.rows + 4) * self.tokens
        tables = 64 * 1024 * self.tables
        return max(self.stages * stage + self.warps * 32 * R * scales + tables, sums)

    def of(self, mode: str, bits: int, group: int) -> Tile:
        """The tile for a format: tables are for some, and may take a stage's place. (Of mxfp4 with
        float16, too, which has none.)"""
        gains = mode == "mxfp4" or (mode == "nvfp4" and self.tokens == 8)
        tile = self._replace(tables=self.tables and gains)
        if tile.shared_memory(mode, bits, group) <= _MOST:
            return tile
        return tile._replace(stages=tile.stages - 1).of(mode, bits, group)

    def split(self, bits: int) -> str:
        """How many blocks of a cluster divide K: as many as multiprocessors would be idle else."""
        tiles, split = f"ceildiv(N, {self.rows})", "1"
        most = "sm_count" if self.tokens <= 32 else "sm_count // 2"
        for size in (2, 4, 8):
            least = size * 512 // bits * self.template["WK"]
            split = f"{size} if {tiles} * {size} <= {most} and K >= {least} else {split}"
        return f"(({split}) if capability >= 90 else 1)"


_HEIGHTS = (48, 64, 80, 96, 112, 144)  # of blocks that have a multiprocessor each
# Of blocks of which two share one: their warps, and stages for up to 8 and up to 16 rows of x.
_SHARED_HEIGHTS = {128: (8, 3, 3), 112: (8, 4, 3), 96: (6, 4, 4), 80: (6, 4, 4), 64: (6, 3, 3)}


def _high(tokens: int) -> list[Tile]:
    """Tiles for matrices of more than 32 rows for each multiprocessor. They have a block each, of
    the least height of which that is enough; of more rows two share one, of the height of which
    they are idle least: while one block begins or ends, the other multiplies."""
    more = "N > 32 * sm_count"
    alone = {}
    for height in _HEIGHTS:
        wm = -(-height // (16 * R))
        when = f"{more} and N <= {height} * sm_count and capability >= 90"
        warps = min(12 // wm, 64 // tokens) * wm
        alone[height] = Tile(tokens, height, 4, when, warps, tables=True)
    busy = {h: f"ceildiv(ceildiv(N, {h}), 2 * sm_count) * {2 * h}" for h in _SHARED_HEIGHTS}
    shared = {}
    for height, (warps, *stages) in _SHARED_HEIGHTS.items():
        least = [f"{busy[height]} <= {other}" for other in busy.values()]
        when = " and ".join([more, _LARGER, *least])
        shared[height] = Tile(tokens, height, stages[tokens > 8], when, warps)
    # Two of 64 rows are fewer than one of 144.
    when = f"N > 112 * sm_count and N <= 128 * sm_count and {_LARGER}"
    highest = [shared[64]._replace(when=when), alone[144]]
    if tokens == 8:  # what tables save of long rows is more than what sharing does
        rows = {h: f"ceildiv(ceildiv(N, {h}), sm_count) * {h}" for h in (144, 112, 96)}
        for height in rows:
            others = (*rows.values(), *busy.values())
            least = [f"{rows[height]} <= {other}" for other in others]
            when = " and ".join([f"K >= 8192 and N > 144 * sm_count and {_LARGER}", *least])
            highest.append(alone[height]._replace(when=when, only=("mxfp4 4",)))
    return [*(alone[height] for height in _HEIGHTS[:-1]), *highest, *shared.values()]


# The first that has a place for all rows of x, whose condition holds, and for whose shared memory
# there is room. Measured on an H100 and an H200.
TILES = (
    *_high(8),
    Tile(8, 64, 3, "N >= 64 * sm_count"),
    Tile(8, 32, 4, "K <= 8192 and capability >= 90", warps=4),
    Tile(8, 32, 4),
    *_high(16),
    Tile(16, 64, 3, "N >= 64 * sm_count"),
    Tile(16, 32, 4, "capability >= 90", warps=4),
    Tile(16, 64, 4),
    Tile(16, 64, 3, warps=4),
    Tile(32, 64, 3, "N < 64 * sm_count"),
    Tile(32, 128, 3),
    Tile(32, 128, 3, warps=4),
    Tile(64, 128, 3),
    Tile(64, 128, 3, warps=4),
)
# Small blocks, of which three or four share a multiprocessor (those of 64 tokens: two): while one
# finds its rows others multiply.
TILES_OF_EXPERTS = (
    Tile(8, 32, 3, f"{_ROWS} <= 16 and K >= 2048", warps=4),
    Tile(8, 64, 4, f"{_ROWS} <= 64 and K >= 1024", warps=4),
    Tile(8, 128, 4, warps=4),
    Tile(16, 128, 4, warps=4),
    Tile(32, 128, 3, warps=4),
    Tile(64, 128, 3, warps=4),
)


class Wide(NamedTuple):
    """How a block divides a product by `wgmma`.

    Attributes:
        tokens: rows of x, at most: a multiple of 8.
        rows: of w: 64 for each of its warp groups, or `each` times as many.
        stages, x_stages: parts of w and of x that are there, or on their way.
        each: tiles of 64 rows of a warp group.
        times: so many tiles of rows of x there are, at most.
        when: a condition.
        only: the formats for which it is, as "nvfp4 4"; all if it is empty.
    """

    tokens: int
    rows: int
    stages: int
    x_stages: int
    each: int = 1
    times: int = 1
    when: str = "K > 0"
    only: tuple[str, ...] = ()

    @property
    def warps(self) -> int:
        """Those that multiply; one more copies x."""
        return self.rows // (16 * self.each)

    @property
    def template(self) -> dict[str, int]:
        """Constants of the text."""
        divided = {"TOK": self.tokens, "R": self.each, "WM": self.warps, "WK": 1}
        return {**divided, "STAGES": self.stages, "X_STAGES": self.x_stages}

    def shared_memory(self, mode: str, bits: int, group: int) -> int:
        """How many bytes of shared memory a block has."""
        block = 512 // bits
        scales = 4 * block // group * (4 if mode == "affine" else 1)
        parts = 2 if self.stages <= 5 else 4
        of_w = self.rows * (self.stages * 64 + parts * scales)
        sums = 4 * (self.rows + 4) * self.tokens
        return 2048 + max(self.x_stages * 2 * block * self.tokens + of_w, sums)

    @property
    def tiles(self) -> str:
        """How many there are."""
        return f"ceildiv(N, {self.rows}) * ceildiv(x.size // max(K, 1), {self.tokens})"

    def split(self, bits: int) -> str:
        """How many blocks of a cluster divide K. A GPU has fewer places for large clusters."""
        split, block = "1", 512 // bits
        for size, places in ((2, "sm_count"), (4, "sm_count * 3 // 4"), (8, "sm_count // 2")):
            most = f"{self.tiles} * {size} <= {places}"
            split = f"{size} if {most} and K >= {4 * size * block} else {split}"
        return f"({split})"


# For compute capability 9.0, from `LEAST_WIDE` rows of x on: the first that has a place for all.
LEAST_WIDE = 17
_HIGH, _LOW = "N >= 64 * sm_count", "N < 64 * sm_count"  # as rows of w go
_MORE = "x.size > 32 * K"
WIDE = (
    Wide(32, 64, 8, 4, when=f"{_LOW} and K <= 8192", only=("nvfp4 4", "mxfp4 4", "affine 4")),
    Wide(32, 256, 5, 4, each=2, when="N >= 192 * sm_count"),
    Wide(32, 128, 8, 4, when=_HIGH),
    Wide(64, 64, 8, 8, when=f"{_LOW} and {_MORE}"),
    Wide(64, 256, 4, 4, each=2, when="N >= 192 * sm_count"),
    Wide(64, 128, 8, 4, when=_HIGH),
    Wide(128, 64, 8, 4, when=f"{_LOW} and {_MORE}"),
    Wide(128, 128, 6, 4, times=4, when=f"{_HIGH} or x.size > 128 * K"),
)


def wide(
    mode: str, bits: int, group: int, scaled: bool = False, tiles: Sequence[Wide] = WIDE
) -> list[Any]:
    """The units for 17 to 512 rows of x, on GPUs of compute capability 9.0.

    Args:
        mode, bits, group: of the quantized matrix.
        scaled: the rule has ``global_scale``.
        tiles: those to choose from.
    """
    count, block = "(x.size // max(K, 1))", 512 // bits
    operands = ["ordered", *_operands(mode, scaled)[1:]]
    units = []
    for tile in _for(tiles, mode, bits):
        split = tile.split(bits)
        step: dict[str, Any] = {
            "blocks": (f"ceildiv({count}, {tile.tokens})", split, f"ceildiv(N, {tile.rows})"),
            "block": 32 * tile.warps + 32,
            "shared_memory": _shared(
                tile.shared_memory(mode, bits, group), f"{tile.tiles} * {split}"
            ),
            "pdl": True,
        }
        arguments = [*operands, "y", "int64 N", "int64 K", count]
        # A quarter of a multiprocessor has 16384 registers, and every fourth warp.
        registers = min(512 // -(-step["block"] // 128) // 8 * 8, 248)
        units.append(
            ferrule.cuda_unit(
                _text(mode, scaled, AHEAD + wide_texts.wide(tile.tokens)),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and capability == 90 and {count} >= {LEAST_WIDE}"
                f" and {count} <= {tile.tokens * tile.times} and ({tile.when})",
                scratch={"ordered": f"T[ceildiv({count}, 8) * 8, ceildiv(K, {block}) * {block}]"},
                specific=True,
                options=[f"--maxrregcount={registers}"],
                steps=[
                    ferrule.cuda_step(
                        "ordered",
                        ["x", "ordered", "int64 K", count],
                        blocks=f"ceildiv({count} * ceildiv(K, {block}) * {block // 8}, 256)",
                        block=256,
                        pdl=True,
                    ),
                    *_split("wide", arguments, split, step),
                ],
            )
        )
    return units


def few(
    mode: str, bits: int, group: int, scaled: bool = False, tiles: Sequence[Tile] = TILES
) -> list[Any]:
    """The units for up to 64 rows of x.

    Args:
        mode, bits, group: of the quantized matrix.
        scaled: the rule has ``global_scale``.
        tiles: those to choose from.
    """
    count = "(x.size // max(K, 1))"
    arguments = [*_operands(mode, scaled), "y", "int64 N", "int64 K", count]
    units = []
    for tile in (tile.of(mode, bits, group) for tile in _for(tiles, mode, bits)):
        split, size = tile.split(bits), tile.shared_memory(mode, bits, group)
        step: dict[str, Any] = {
            "blocks": (f"ceildiv(N, {tile.rows})", split),
            "block": 32 * tile.warps,
            "shared_memory": _shared(size, f"ceildiv(N, {tile.rows}) * {split}"),
            "pdl": True,
        }
        units.append(
            ferrule.cuda_unit(
                _text(mode, scaled, TABLES + AHEAD + FEW + DENSE),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and {count} <= {tile.tokens} and {tile.when} and {_room(size)}",
                steps=_split("dense", arguments, split, step),
            )
        )
    return units


def gathered(
    mode: str,
    bits: int,
    group: int,
    letters: str,
    scaled: bool = False,
    tiles: Sequence[Tile] = TILES_OF_EXPERTS,
) -> list[Any]:
    """The units for products with matrices that indices choose, whatever the number of rows.

    Args:
        mode, bits, group: of the quantized matrices.
        letters: the kind of product.
        scaled: the rule has ``global_scale``, one or one of each matrix.
        tiles: those to choose from.
    """
    experts, rows = f"(scales.size // max(N * (K // {group}), 1))", _ROWS
    matrices = "(x.size // max(M * K, 1))"
    of = sides(letters, "(y.size // max(M * N, 1))", matrices, experts)
    # Rows of a tile: the mean of an expert or twice it, and all of a matrix of x, which has one.
    tok = (
        f"max(8 if {rows} <= 4 * {experts} else 16 if {rows} <= 16 * {experts}"
        f" else 32 if {rows} <= 32 * {experts} else 64, bucket(M, 8, 16, 32, 64))"
    )
    operands = [*_operands(mode, scaled), "global_scale.size - 1" if scaled else 0]
    sizes = ["int64 N", "int64 K", "M", f"int64 {matrices}", experts]
    units = []
    for tile in tiles:
        size = tile.shared_memory(mode, bits, group)
        step = {"block": 32 * tile.warps, "shared_memory": size, "pdl": True}
        across = f"ceildiv(N, {tile.rows})"
        units.append(
            ferrule.cuda_unit(
                _text(mode, scaled, of.names + TABLES + AHEAD + FEW + EXPERTS + GROUPED),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and {of.where} and {experts} < 12000 and {tok} <= {tile.tokens}"
                f" and {tile.when} and {_room(size)}",
                **by_expert(operands, of, sizes, rows, tile.tokens, across, step),
            )
        )
    return units


def most_packed(bits: int, transpose: bool) -> str:
    """An expression for the most rows of x that the packed weights are for: of more, and with
    ``transpose`` unset of any, `many` is chosen."""
    if not transpose:
        return "0"
    if bits not in (4, 8):
        return str(FEWEST)
    most = max(tile.tokens * tile.times for tile in WIDE)
    others = f"{TILES[-1].tokens} if capability >= 80 else {FEWEST}"
    return f"{most} if capability == 90 else {others}"


def many(mode: str, bits: int, group: int, transpose: bool, scaled: bool) -> list[Any]:
    """The units for many rows of x: w is dequantized to scratch, for cuBLAS.

    The first is for 16 bits and elements that lie in one byte, the second for all others. Sums that
    get a global scale are float32 until then.

    Args:
        mode, bits, group: of the quantized matrix.
        transpose: rows of w are multiplied with rows of x.
        scaled: the rule has ``global_scale``.
    """
    words = f"N * (K * {bits} // 32)" if transpose else "K * P"
    runs = f"{words} * 4 // {bits}"
    few_rows = f"x.size > {FEWEST} * K" if transpose else "K > 0"
    columns = "N" if transpose else f"P * 32 // {bits}"
    product = ferrule.cuda_matmul(
        "sums" if scaled else "y", "x", "dequantized", transpose_b=transpose
    )
    epilogue = ferrule.cuda_step(
        "scaled",
        ["sums", "global_scale", "y", "int64 y.size"],
        blocks="ceildiv(y.size, 256)",
        block=256,
        pdl=True,
    )
    biases = "const void*" if mode == "affine" else "int64_t"
    by_byte = f"using BIASES = {biases};\n{FLOATS_OF_BYTES}{VALUE_OF}{ANY_WEIGHTS}"
    units = []
    for text, count, each, when in (
        (_text(mode, True, ELEMENTS + WEIGHTS), words, 1024, WHERE),
        (by_byte, runs, 256, f"device == cuda and {few_rows}"),
    ):
        if bits not in (4, 8) and count == words:
            continue
        weights = ferrule.cuda_step(
            "weights",
            [*_operands(mode, False)[1:4], "dequantized", f"int64 {count}"],
            blocks=f"ceildiv({count}, {each})",
            block=256,
            pdl=True,
        )
        units.append(
            ferrule.cuda_unit(
                text + SCALED * scaled,
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group},
                when=when,
                scratch={"dequantized": "T[N,K]" if transpose else f"T[K,{columns}]"}
                | ({"sums": f"float32[x.size // max(K, 1), {columns}]"} if scaled else {}),
                steps=[weights, product, *[epilogue] * scaled],
            )
        )
    return units


def _operands(mode: str, scaled: bool) -> list[str | int]:
    biases = "biases" if mode == "affine" else "int64 0"
    return ["x", "w", "scales", biases, "global_scale" if scaled else "int64 0"]


def _text(mode: str, scaled: bool, functions: str) -> str:
    """A whole text with such functions. What a mode has not are arguments that are 0."""
    biases = "const void*" if mode == "affine" else "int64_t"
    whole = "const float*" if scaled else "int64_t"
    return f"using BIASES = {biases};\nusing WHOLE = {whole};\n{MACHINE}{GIVEN}{DECODE}{functions}"
