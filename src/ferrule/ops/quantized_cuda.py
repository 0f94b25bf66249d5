"""Products with quantized matrices on NVIDIA GPUs: how the kernels are launched.

Up to 64 rows of x go to a kernel that reads the packed weights once, on GPUs of compute capability
9.0 up to 1536; of more, the weights are dequantized to scratch, and cuBLAS multiplies. Rows that
indices send to different matrices are put into tiles of the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ferrule

from . import quantized_persistent_dense_cuda as persistent_texts
from . import quantized_wide_cuda as wide_texts
from .quantized_cuda_texts import (
    ANY_WEIGHTS,
    DENSE,
    FACTORS,
    FEW,
    FLOATS_OF_BYTES,
    SCALED,
    VALUE_OF,
    WEIGHTS,
)
from .quantized_decode_cuda import (
    AHEAD,
    DECODE,
    ELEMENTS,
    ENDS,
    ENDS_OF_ROWS,
    GIVEN,
    MODES,
    OR_NULL,
    TABLES,
)
from .quantized_experts_cuda import EXPERTS, GROUPED, by_expert, sides
from .quantized_machine_cuda import MACHINE
from .quantized_tiles import (
    LARGER,
    LEAST_WIDE,
    PERSISTENT,
    ROWS_OF_X,
    ROWS_OF_Y,
    TILES,
    TILES_OF_EXPERTS,
    WIDE,
    Persistent,
    Tile,
    Wide,
    room,
)

FEWEST = 8  # rows of x, of which a Metal body is as fast where nothing else is there
WHERE = "device == cuda and capability >= 80 and T != float32 and K > 0"


def _shared(size: int, blocks: str) -> str:
    """An expression for the shared memory of a block: more than half of what a multiprocessor has
    where each block can have one for itself. Two would share one, and leave another idle."""
    return f"max({size}, {116 * 1024} if {blocks} <= sm_count and {LARGER} else 0)"


def _for(tiles: Sequence[Any], mode: str, bits: int) -> list[Any]:
    """Those of some tiles that are for a format."""
    return [tile for tile in tiles if not tile.only or f"{mode} {bits}" in tile.only]


def _split(function: str, arguments: list[Any], split: str, step: dict[str, Any]) -> list[Any]:
    """The steps of a kernel whose blocks divide K: in a cluster, where there is more than one."""
    return [
        ferrule.cuda_step(function, arguments, when=f"{split} == 1", **step),
        ferrule.cuda_step(function, arguments, when=f"{split} > 1", cluster=(1, split, 1), **step),
    ]


class Names(NamedTuple):
    """What a rule calls the parts of a matrix.

    Attributes:
        w, scales, biases: its elements, and what each group has.
        factor: float32, with which sums are multiplied at last; empty where there is none.
        by_row: the factor is one or one for each row, and is taken as it is. Else it is MLX's
            global scale, of one matrix or of each.
        added: with ``by_row``, what is added at last: of T, one for each row, or absent.
    """

    w: str = "w"
    scales: str = "scales"
    biases: str = "biases"
    factor: str = ""
    by_row: bool = False
    added: str = ""

    def parts(self, mode: str) -> list[str | int]:
        """The arguments of kernels that read elements."""
        return [self.w, self.scales, self.biases if mode == "affine" else "int64 0"]

    @property
    def at_last(self) -> list[str | int]:
        """The arguments for what is made of sums."""
        size = f"int64 {self.factor}.size" if self.factor else "int64 0"
        return [self.factor or "int64 0", size, self.added or "int64 0"]


def named(scaled: bool) -> Names:
    """The names in the rules of MLX's functions, which have a global scale or none."""
    return Names(factor="global_scale" if scaled else "")


def _ordered(bits: int) -> dict[str, str]:
    """Memory for x in the order in which lanes have k."""
    block = 512 // bits
    return {"ordered": f"T[ceildiv({ROWS_OF_X}, 8) * 8, ceildiv(K, {block}) * {block}]"}


def _order(bits: int, *more: str) -> Any:
    """The step that puts x there, with more arguments."""
    block = 512 // bits
    return ferrule.cuda_step(
        "ordered",
        ["x", "ordered", "int64 K", ROWS_OF_X, *more],
        blocks=f"ceildiv({ROWS_OF_X} * ceildiv(K, {block}) * {block // 8}, 256)",
        block=256,
        pdl=True,
    )


def wide(mode: str, bits: int, group: int, names: Names, tiles: Sequence[Wide] = WIDE) -> list[Any]:
    """The units for 17 to 512 rows of x, on GPUs of compute capability 9.0.

    Args:
        mode, bits, group: of the quantized matrix.
        names: in the rule.
        tiles: those to choose from.
    """
    operands = ["ordered", *names.parts(mode), *names.at_last]
    units = []
    for tile in _for(tiles, mode, bits):
        split = tile.split(bits)
        step: dict[str, Any] = {
            "blocks": (f"ceildiv({ROWS_OF_X}, {tile.tokens})", split, f"ceildiv(N, {tile.rows})"),
            "block": 32 * tile.warps + 32,
            "shared_memory": _shared(
                tile.shared_memory(mode, bits, group), f"{tile.tiles} * {split}"
            ),
            "pdl": True,
        }
        arguments = [*operands, "y", "int64 N", "int64 K", ROWS_OF_X]
        # A quarter of a multiprocessor has 16384 registers, and every fourth warp.
        registers = min(512 // -(-step["block"] // 128) // 8 * 8, 248)
        units.append(
            ferrule.cuda_unit(
                _text(mode, names, AHEAD + wide_texts.wide(tile.tokens)),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and capability == 90 and {ROWS_OF_X} >= {LEAST_WIDE}"
                f" and {ROWS_OF_X} <= {tile.tokens * tile.times} and ({tile.when})",
                scratch=_ordered(bits),
                specific=True,
                options=[f"--maxrregcount={registers}"],
                steps=[
                    _order(bits),
                    *_split("wide", arguments, split, step),
                ],
            )
        )
    return units


def persistent(mode: str, bits: int, group: int, names: Names, tile: Persistent) -> Any:
    """The unit for more rows of x than `wide` is for, on the same GPUs.

    Args:
        mode, bits, group: of the quantized matrix.
        names: in the rule.
        tile: what blocks make one after another.
    """
    tile = tile.of(mode, bits, group)
    size, warps = tile.shared_memory(mode, bits, group), f"sm_count * {tile.warps}"
    operands = ["ordered", *names.parts(mode), *names.at_last]
    step = ferrule.cuda_step(
        "persistent",
        [*operands, "y", "sums", "there", "int64 N", "int64 K", ROWS_OF_X],
        blocks="sm_count",
        block=32 * tile.warps + 128,
        shared_memory=size,
        pdl=True,
    )
    return ferrule.cuda_unit(
        _text(mode, names, persistent_texts.dense(tile.widths, tile.near)),
        template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, "TOK": tile.tokens}
        | tile.template,
        when=f"{WHERE} and capability == 90 and ({tile.when}) and {room(size)}",
        scratch={
            **_ordered(bits),
            "sums": f"float32[sm_count * {tile.rows * tile.tokens}]",
            "there": f"int32[{warps}]",
        },
        specific=True,
        steps=[_order(bits, "there", warps), step],
    )


def packed(mode: str, bits: int, group: int, names: Names) -> list[Any]:
    """The units that read the packed weights, the fastest first: on GPUs of compute capability 9.0
    up to 512 rows of x, or of E2M1 up to 1536, on others up to 64."""
    measured = mode in ("nvfp4", "mxfp4")
    return [
        *([persistent(mode, bits, group, names, PERSISTENT)] if measured else []),
        *wide(mode, bits, group, names),
        *few(mode, bits, group, names),
    ]


def few(mode: str, bits: int, group: int, names: Names, tiles: Sequence[Tile] = TILES) -> list[Any]:
    """The units for up to 64 rows of x.

    Args:
        mode, bits, group: of the quantized matrix.
        names: in the rule.
        tiles: those to choose from.
    """
    arguments = ["x", *names.parts(mode), *names.at_last, "y", "int64 N", "int64 K", ROWS_OF_X]
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
                _text(mode, names, TABLES + AHEAD + FEW + DENSE),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and {ROWS_OF_X} <= {tile.tokens} and {tile.when} and {room(size)}",
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
    experts, rows = f"(scales.size // max(N * (K // {group}), 1))", ROWS_OF_Y
    matrices = "(x.size // max(M * K, 1))"
    of = sides(letters, "(y.size // max(M * N, 1))", matrices, experts)
    # Rows of a tile: the mean of an expert or twice it, and all of a matrix of x, which has one.
    tok = (
        f"max(8 if {rows} <= 4 * {experts} else 16 if {rows} <= 16 * {experts}"
        f" else 32 if {rows} <= 32 * {experts} else 64, bucket(M, 8, 16, 32, 64))"
    )
    names = named(scaled)
    operands = ["x", *names.parts(mode), names.at_last[0], "global_scale.size - 1" if scaled else 0]
    sizes = ["int64 N", "int64 K", "M", f"int64 {matrices}", experts]
    units = []
    for tile in tiles:
        size = tile.shared_memory(mode, bits, group)
        step = {"block": 32 * tile.warps, "shared_memory": size, "pdl": True}
        across = f"ceildiv(N, {tile.rows})"
        units.append(
            ferrule.cuda_unit(
                _text(mode, names, of.names + TABLES + AHEAD + FEW + EXPERTS + GROUPED),
                template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template},
                when=f"{WHERE} and {of.where} and {experts} < 12000 and {tok} <= {tile.tokens}"
                f" and {tile.when} and {room(size)}",
                **by_expert(operands, of, sizes, rows, tile.tokens, across, step),
            )
        )
    return units


def most_packed(bits: int, transpose: bool) -> str:
    """An expression for the most rows of x with which no dequantized matrix is kept: those of
    `wide`, or of `few`. With ``transpose`` unset a matrix is kept for any."""
    if not transpose:
        return "0"
    if bits not in (4, 8):
        return str(FEWEST)
    most = max(tile.tokens * tile.times for tile in WIDE)
    others = f"{TILES[-1].tokens} if capability >= 80 else {FEWEST}"
    return f"{most} if capability == 90 else {others}"


def many(mode: str, bits: int, group: int, transpose: bool, names: Names) -> list[Any]:
    """The units for many rows of x: w is dequantized to scratch, for cuBLAS.

    The first are for 16 bits and elements that lie in one byte, the others for all. cuBLAS takes a
    factor of all sums, too; sums with a factor for each row, or something added, are float32 until
    then.

    Args:
        mode, bits, group: of the quantized matrix.
        transpose: rows of w are multiplied with rows of x.
        names: in the rule.
    """
    words = f"N * (K * {bits} // 32)" if transpose else "K * P"
    runs = f"{words} * 4 // {bits}"
    few_rows = f"x.size > {FEWEST} * K" if transpose else "K > 0"
    columns = "N" if transpose else f"P * 32 // {bits}"
    by_byte = f"{_types(mode, names)}{OR_NULL}{FLOATS_OF_BYTES}{VALUE_OF}{ANY_WEIGHTS}"
    texts = [
        (_text(mode, names, ELEMENTS + WEIGHTS), words, 1024, WHERE),
        (by_byte, runs, 256, f"device == cuda and {few_rows}"),
    ]
    units = []
    for text, count, each, when in texts[bits not in (4, 8) :]:
        weights = ferrule.cuda_step(
            "weights",
            [*names.parts(mode), "dequantized", f"int64 {count}"],
            blocks=f"ceildiv({count}, {each})",
            block=256,
            pdl=True,
        )
        for last in _ways(names, columns, transpose):
            units.append(
                ferrule.cuda_unit(
                    text + last.text,
                    template={"MODE": MODES[mode], "BITS": bits, "GROUP": group},
                    when=f"{when} and {last.when}",
                    scratch={"dequantized": "T[N,K]" if transpose else f"T[K,{columns}]"}
                    | last.scratch,
                    steps=[weights, *last.steps],
                )
            )
    return units


class _Last(NamedTuple):
    """What follows on dequantized elements: functions, a condition, memory and steps."""

    text: str
    when: str
    scratch: dict[str, str]
    steps: list[Any]


def _ways(names: Names, columns: str, transpose: bool) -> list[_Last]:
    """The ways to multiply with so many dequantized columns, of which the first is taken whose
    condition holds."""

    def product(out: str, factors: str | None = None) -> Any:
        return ferrule.cuda_matmul(out, "x", "dequantized", transpose_b=transpose, factors=factors)

    if not (names.factor or names.added):
        return [_Last("", "K > 0", {}, [product("y")])]
    alike = [f"{names.factor}.size == 1"] * bool(names.factor)
    alike += [f"{names.added}.size == 0"] * bool(names.added)
    one = _Last("", " and ".join(alike), {}, [product("y")])
    if names.factor:
        factor = ferrule.cuda_step("factors", [names.factor, "factors"], blocks=1, block=1)
        text = FACTORS.replace("RANGE", "1" if names.by_row else "2688")
        one = one._replace(
            text=text, scratch={"factors": "float32[2]"}, steps=[factor, product("y", "factors")]
        )
    if not names.by_row:
        return [one]
    scaled = ferrule.cuda_step(
        "scaled",
        ["sums", *names.at_last, "y", f"int64 {columns}", "int64 y.size"],
        blocks="ceildiv(y.size, 256)",
        block=256,
        pdl=True,
    )
    sums = {"sums": f"float32[{ROWS_OF_X}, {columns}]"}
    return [one, _Last(SCALED, "K > 0", sums, [product("sums"), scaled])]


def _text(mode: str, names: Names, functions: str) -> str:
    """A whole text with such functions. What a mode has not are arguments that are 0."""
    ends = ENDS_OF_ROWS if names.by_row else ENDS
    return f"{_types(mode, names)}{MACHINE}{GIVEN}{ends}{DECODE}{functions}"


def _types(mode: str, names: Names) -> str:
    """The types of arguments that some have not."""
    types = {
        "BIASES": "const void*" if mode == "affine" else "int64_t",
        "WHOLE": "const float*" if names.factor else "int64_t",
        "OFFSET": "const T*" if names.added else "int64_t",
    }
    return "".join(f"using {name} = {type_};\n" for name, type_ in types.items())
