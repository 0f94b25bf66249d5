"""How blocks of CUDA divide products with packed matrices: the tiles that `quantized_cuda` chooses
from, measured on an H100 and an H200."""

from __future__ import annotations

from typing import NamedTuple

R = 2  # tiles of 16 rows of w of a warp
# GPUs whose blocks may have more shared memory than 99 KB, and more than 163 KB.
_LARGE = "capability != 86 and capability != 89 and capability < 120"
LARGER = "capability >= 90 and capability < 120"
ROWS_OF_X = "(x.size // max(K, 1))"
ROWS_OF_Y = "(y.size // max(N, 1))"  # of a result
MOST = 225 * 1024  # bytes of shared memory of a block


def room(size: int) -> str:
    """A condition: blocks may have so many bytes of shared memory, beside a kernel's own arrays."""
    rooms = ((97 * 1024, "capability >= 80"), (161 * 1024, _LARGE), (MOST, LARGER))
    return next(condition for most, condition in rooms if size <= most)


def _bytes_of_scales(mode: str, bits: int, group: int) -> int:
    """How many bytes of scales, and biases, a row of w has in the four blocks that come at once."""
    return 4 * 512 // bits // group * (4 if mode == "affine" else 1)


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
        each: tiles of 16 rows of w of a warp.
    """

    tokens: int
    rows: int
    stages: int
    when: str = "K > 0"
    warps: int = 8
    tables: bool = False
    only: tuple[str, ...] = ()
    each: int = R

    @property
    def template(self) -> dict[str, int]:
        """Constants of the text: WM warps divide the rows, WK of them K."""
        wm = -(-self.rows // (16 * self.each))
        divided = {"TILES": self.rows // 16, "R": self.each, "WM": wm, "WK": self.warps // wm}
        own = {"TOK": self.tokens, "STAGES": self.stages, "TABLES_MAY_BE": int(self.tables)}
        return {**divided, **own, "PAIRED": 0}

    def shared_memory(self, mode: str, bits: int, group: int) -> int:
        """How many bytes of shared memory a block has."""
        block, wk = 512 // bits, self.template["WK"]
        stage = wk * 2 * block * self.tokens + self.warps * 1024 * self.each
        sums = wk * 4 * (self.rows + 4) * self.tokens
        tables = 64 * 1024 * self.tables
        scales = _bytes_of_scales(mode, bits, group) * self.warps * 32 * self.each
        return max(self.stages * stage + scales + tables, sums)

    def of(self, mode: str, bits: int, group: int) -> Tile:
        """The tile for a format: tables are for some, and may take a stage's place. (Of mxfp4 with
        float16, too, which has none.)"""
        gains = mode == "mxfp4" or (mode == "nvfp4" and self.tokens == 8)
        tile = self._replace(tables=self.tables and gains)
        if tile.shared_memory(mode, bits, group) <= MOST:
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
        when = " and ".join([more, LARGER, *least])
        shared[height] = Tile(tokens, height, stages[tokens > 8], when, warps)
    # Two of 64 rows are fewer than one of 144.
    when = f"N > 112 * sm_count and N <= 128 * sm_count and {LARGER}"
    highest = [shared[64]._replace(when=when), alone[144]]
    if tokens == 8:  # what tables save of long rows is more than what sharing does
        rows = {h: f"ceildiv(ceildiv(N, {h}), sm_count) * {h}" for h in (144, 112, 96)}
        for height in rows:
            others = (*rows.values(), *busy.values())
            least = [f"{rows[height]} <= {other}" for other in others]
            when = " and ".join([f"K >= 8192 and N > 144 * sm_count and {LARGER}", *least])
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
    Tile(8, 128, 3, "K >= 8192"),
    Tile(8, 64, 3, f"{ROWS_OF_Y} <= 16 and K >= 1024", warps=4),
    Tile(8, 64, 4, f"{ROWS_OF_Y} <= 64 and K >= 1024", warps=4),
    Tile(8, 128, 4, warps=4),
    Tile(16, 128, 3, "K >= 8192"),
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
        block, parts = 512 // bits, 2 if self.stages <= 5 else 4
        of_w = self.rows * (self.stages * 64 + parts * _bytes_of_scales(mode, bits, group))
        sums = 4 * (self.rows + 4) * self.tokens
        return 2048 + max(self.x_stages * 2 * block * self.tokens + of_w, sums)

    @property
    def tiles(self) -> str:
        """How many there are."""
        return f"ceildiv(N, {self.rows}) * ceildiv({ROWS_OF_X}, {self.tokens})"

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


class Persistent(NamedTuple):
    """How blocks that stay divide a product by `wgmma`.

    Attributes:
        widths: tokens of its products, multiples of 8, upwards: the first that is enough.
        each: tiles of 64 rows of w of a warp group, of which a block has two.
        stages, x_stages: parts of w and of x that are there, or on their way: of 128 and of 64 k.
        near: tiles whose products with the same rows of w follow each other.
        when: a condition: on rows of x, or on slots of experts.
    """

    widths: tuple[int, ...]
    each: int = 2
    stages: int = 3
    x_stages: int = 7
    near: int = 8
    when: str = "device == cuda"

    @property
    def tokens(self) -> int:
        """Rows of x of a tile, at most."""
        return self.widths[-1]

    @property
    def warps(self) -> int:
        """Those that multiply; four more copy x."""
        return 8

    @property
    def rows(self) -> int:
        """Rows of w."""
        return self.warps * 16 * self.each

    @property
    def template(self) -> dict[str, int]:
        """Constants of the text."""
        stages = {"STAGES": self.stages, "X_STAGES": self.x_stages}
        return {"R": self.each, "WM": self.warps, "WK": 1, "PAIRED": 0, **stages}

    def of(self, mode: str, bits: int, group: int) -> Persistent:
        """The tile for a format, for which there is room."""
        if self.shared_memory(mode, bits, group) <= MOST:
            return self
        return self._replace(x_stages=self.x_stages - 1).of(mode, bits, group)

    def shared_memory(self, mode: str, bits: int, group: int) -> int:
        """How many bytes of shared memory a block has."""
        of_w = self.rows * (self.stages * 64 + 4 * _bytes_of_scales(mode, bits, group))
        return 2048 + self.x_stages * self.tokens * 128 + of_w


# For so many slots of an expert, in the mean. Measured on an H100.
MANY_OF_EXPERTS = (
    Persistent((32, 64), x_stages=12, when="M * Q > 12 * E and M * Q <= 40 * E"),
    Persistent((64, 128), when="M * Q > 40 * E"),
)


SHARING = 1800  # what it costs that blocks share tiles: as much as so much of K takes


def _works(rows: int) -> str:
    """How many tiles there are of 128 rows of x and so many of w."""
    return f"(ceildiv({ROWS_OF_X}, 128) * ceildiv(N, {rows}))"


def _depth() -> str:
    """Of how much K blocks that stay make tiles of 256 rows of w, one after another."""
    whole, left = f"({_works(256)} // sm_count)", f"({_works(256)} % sm_count)"
    more = f"(K * min({left}, 1) if (sm_count - {left}) * K < {SHARING} * sm_count"
    return f"({whole} * K + {more} else {left} * K // sm_count + {SHARING} * min({left}, 1)))"


# For one matrix, where that is faster: such a tile takes 1.68 times as long as one of `WIDE` of 128
# rows of w, and K * 12.1 ns, where dequantizing for cuBLAS takes N * K / 1150 ns, and that
# M * N * K / 390e3. Where each block has one, `WIDE` may divide K. Measured on an H100.
_FEWER = f"max({_depth()}, K) * 168 < ceildiv({_works(128)}, sm_count) * K * 100"
_SOONER = f"{_depth()} * 4719000 < N * K * ({ROWS_OF_X} + 339)"
PERSISTENT = Persistent(
    (128,),
    when=f"{ROWS_OF_X} > 64 and {ROWS_OF_X} <= 512 and {_FEWER}"
    f" or {ROWS_OF_X} > 512 and {ROWS_OF_X} <= 1536 and {_SOONER}",
)
