"""Products with matrices that indices choose on NVIDIA GPUs, of any format, either way round, and
sums over the rows of each: how the kernels are launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import ferrule

from .gathered_cuda_texts import (
    CODE,
    DIRECT,
    FLOATS,
    OF_16,
    OF_32,
    PACKED,
    PRODUCT,
    PRODUCTS,
)
from .outer_cuda_texts import LISTED, OUTER
from .quantized_cuda_texts import FLOATS_OF_BYTES, VALUE_OF
from .quantized_decode_cuda import DECODE, ELEMENTS, GIVEN, MODES
from .quantized_experts_cuda import EXPERTS, GROUPED, by_expert, sides
from .quantized_machine_cuda import MACHINE

ROWS = 128  # columns of y that a block makes
LINE = 128  # bytes of a block of K


class Tile(NamedTuple):
    """How a block divides a product.

    Attributes:
        tokens: rows of x, at most.
        stages: parts of both sides that are there, or on their way.
        depth: parts of quantized matrices that are on their way to registers.
        resident: blocks that share a multiprocessor's registers: of 16-bit floats, of float32.
        most: the mean of rows of an expert, at most; 0 is any.
    """

    tokens: int
    stages: int
    depth: int
    resident: tuple[int, int]
    most: int

    def shared_memory(self, quantized: bool) -> int:
        """How many bytes of shared memory a block has."""
        return LINE * (self.stages * self.tokens + ROWS * (2 if quantized else self.stages))


TILES = (Tile(16, 4, 2, (3, 2), 8), Tile(64, 3, 1, (2, 2), 64), Tile(128, 3, 1, (2, 1), 0))

WHERE = "device == cuda and capability >= 80"
_IS_FLOAT32 = ("T != float32", "T == float32")


def floats(letters: str, transpose: bool) -> list[Any]:
    """The units of products with matrices of floats."""
    types = "using BIASES = int64_t;\nusing WHOLE = int64_t;\n"
    text = f"{types}{MACHINE}{GIVEN}{PRODUCTS}{FLOATS}"
    operands = ["x", "w", "w", "int64 0", "int64 0", 0]
    return [
        unit
        for wide in (False, True)
        for unit in _units(letters, transpose, wide, text, operands, "N", "w.size // max(N * K, 1)")
    ]


def packed(
    mode: str, bits: int, group: int, transpose: bool, letters: str, scaled: bool
) -> list[Any]:
    """The units of products with quantized matrices.

    Args:
        mode, bits, group: of the matrices.
        transpose: rows of w are multiplied with rows of x.
        letters: the kind of product.
        scaled: the rule has ``global_scale``, one or one of each matrix.
    """
    affine = mode == "affine"
    units: list[Any] = []
    types = f"using BIASES = {'const void*' if affine else 'int64_t'};\n"
    types += f"using WHOLE = {'const float*' if scaled else 'int64_t'};\n"
    operands: list[Any] = ["x", "w", "scales", "biases" if affine else "int64 0"]
    operands += ["global_scale", "global_scale.size - 1"] if scaled else ["int64 0", 0]
    for wide in (False, True):
        if wide:
            decode = "constexpr int SCALE = MODE == 0 ? 4 : 1;\nconstexpr float LAST = 1;\n"
            decode += FLOATS_OF_BYTES + VALUE_OF
        else:
            decode = DECODE + ELEMENTS
        weights = PACKED.replace("ELEMENTS", OF_32 if wide else OF_16)
        text = f"{types}{MACHINE}{GIVEN}{decode}{CODE}{PRODUCTS}{weights}"
        names = {"MODE": MODES[mode], "BITS": bits, "GROUP": group}
        columns = "N" if transpose else f"(P * 32 // {bits})"
        experts = f"scales.size * {group} // max(K * {columns}, 1)"
        units += _units(letters, transpose, wide, text, operands, columns, experts, names)
    return units


def _units(
    letters: str,
    transpose: bool,
    wide: bool,
    text: str,
    operands: list[Any],
    columns: str,
    experts: str,
    names: dict[str, int] | None = None,
) -> list[Any]:
    """The units of a text, of float32 or of 16-bit floats: one for each tile."""
    rows, experts = f"(y.size // max({columns}, 1))", f"({experts})"
    matrices, count = "(x.size // max(M * K, 1))", f"(y.size // max(M * {columns}, 1))"
    of = sides(letters, count, matrices, experts)
    sizes = [f"int64 {columns}", "int64 K", "M", f"int64 {matrices}", experts]
    across = f"ceildiv({columns}, {ROWS})"
    units = []
    for tile in TILES:
        step: dict[str, Any] = {
            "block": 256,
            "shared_memory": tile.shared_memory(bool(names)),
            "pdl": True,
        }
        # A matrix of x fills a tile; or there are too many matrices to count rows of each.
        alone = f"(M >= {1 if letters[1] == 'w' else tile.tokens} or {experts} >= 12000)"
        most = f"{rows} <= {tile.most} * {experts} and M <= {tile.most}" if tile.most else "K > 0"
        dims = {"TRANSPOSE": int(transpose), "TOK": tile.tokens, "ROWS": ROWS}
        dims |= {"STAGES": tile.stages, "DEPTH": tile.depth, "RESIDENT": tile.resident[wide]}
        direct = ferrule.cuda_step(
            "direct",
            [*operands, of.lhs, of.rhs, "y", *sizes],
            when=alone,
            blocks=(f"{rows} // max(M, 1) * ceildiv(M, {tile.tokens})", 1, across),
            **step,
        )
        rest = by_expert(operands, of, sizes, rows, tile.tokens, across, step, f" and not {alone}")
        units.append(
            ferrule.cuda_unit(
                f"{of.names}{text}{PRODUCT}{EXPERTS}{GROUPED}{DIRECT}",
                template=(names or {}) | dims,
                when=f"{WHERE} and {_IS_FLOAT32[wide]} and K > 0 and {of.where} and {most}",
                scratch=rest["scratch"],
                steps=[direct, *rest["steps"]],
            )
        )
    return units


def outer(letters: str, matrices: str, height: str) -> list[Any]:
    """The units of sums over rows.

    Args:
        letters: the kind of product; without indices, or of none, each matrix has rows of its own.
        matrices: how many there are.
        height: rows of a result.
    """
    tile, names = TILES[-1], ("ROWS_OF_LEFT", "ORDER", "BEGINS")
    lefts, count = f"(left.size // max({height} * H, 1))", f"(right.size // max({height} * V, 1))"
    types, lhs, rhs, where = sides(letters or "xw", count, lefts, matrices)
    rows = "right.size // max(V, 1)"
    steps, scratch, lists, kinds = [], {}, ["int64 0"] * 3, ["int64_t"] * 3
    if letters and letters != "xw":
        kinds, lists = ["const int64_t*", "const int*", "const int*"], ["lefts", "order", "begins"]
        scratch = dict(
            zip(lists, (f"int64[{rows}]", f"int32[{rows}]", f"int32[{matrices} + 1]"), strict=True)
        )
        steps = [
            ferrule.cuda_step(
                "listed",
                [lhs, rhs, *lists, "M", f"int64 {lefts}", matrices, rows],
                blocks=matrices,
                block=1024,
                pdl=True,
            )
        ]
    elif letters:
        where = f"{lefts} == {count} and {matrices} == {count}"
    else:
        where = "V > 0"
    types = types * bool(scratch) + "".join(
        f"using {name} = {kind};\n" for name, kind in zip(names, kinds, strict=True)
    )
    units = []
    for wide in (False, True):
        step = ferrule.cuda_step(
            "outer",
            ["left", "right", *lists, "sums", "int64 H", "int64 V", height],
            blocks=(f"ceildiv(V, {ROWS})", f"ceildiv(H, {tile.tokens})", matrices),
            block=256,
            shared_memory=tile.shared_memory(False),
            pdl=True,
        )
        dims = {"TOK": tile.tokens, "ROWS": ROWS, "STAGES": tile.stages, "DEPTH": 1}
        lists_text = EXPERTS + LISTED if scratch else ""
        units.append(
            ferrule.cuda_unit(
                f"{types}{MACHINE}{PRODUCTS}{lists_text}{OUTER}",
                template=dims | {"RESIDENT": tile.resident[wide]},
                when=f"{WHERE} and {_IS_FLOAT32[wide]} and {matrices} < 65536 and {where}",
                scratch=scratch,
                steps=[*steps, step],
            )
        )
    return units
