"""Draws packed_bits.svg: ``python docs/pictures/packed_bits.py`` writes it beside this file.

The bits are those that `ferrule.ops.quantize` packs, and the values those of `dequantize`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ferrule.ops import dequantize, quantize

W = (6 * np.sin(2.0 * np.arange(32, dtype=np.float32))).round(1)[None]
# A format, and which of an element's bits are which, the highest first.
FORMATS = [("nvfp4", "s e e m"), ("mxfp4", "s e e m"), ("mxfp8", "s e e e e m m m")]
AFFINE = [(4, "q q q q"), (3, "q q q"), (5, "q q q q q")]
BIT, TOP, LEFT, GAP = 22, 34, 150, 92
INK, COLOURS = "#24292f", ("#d6e6f7", "#fbe3d0")


def text(x: float, y: float, words: object, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{words}</text>'


def row(y: float, name: str, kinds: str, packed: np.ndarray, values: np.ndarray) -> list[str]:
    """The first word: bit 31 is on the left, elements begin on the right."""
    width = len(kinds.split())
    parts = [text(LEFT - 12, y + 16, name, 'text-anchor="end" font-weight="bold"')]
    word = int(packed.view(np.uint32)[0, 0])
    for bit in range(32):
        element, within = divmod(bit, width)
        x = LEFT + (31 - bit) * BIT
        fill = COLOURS[element % 2]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{BIT}" height="22" fill="{fill}" stroke="white"/>'
        )
        parts.append(text(x + BIT / 2, y + 16, word >> bit & 1))
        kind = kinds.split()[width - 1 - within]
        parts.append(text(x + BIT / 2, y + 34, kind, 'font-size="10" fill="#57606a"'))
    for element in range(-(-32 // width)):
        right = LEFT + (32 - element * width) * BIT
        middle = max(right - width * BIT / 2, LEFT + BIT / 2)
        parts.append(text(middle, y + 50, f"{values[0, element]:.3g}"))
    return parts


def picture() -> str:
    parts = [
        text(
            LEFT + 16 * BIT, 20, "bits 31 … 0 of the first word of a row; element 0 is on the right"
        )
    ]
    y = TOP
    for mode, kinds in FORMATS:
        packed, scales = quantize(W, mode=mode)
        values = dequantize(packed, scales, mode=mode, dtype="float32")
        parts += row(y, mode, kinds, packed, values)
        y += GAP
    for bits, kinds in AFFINE:
        packed, scales, biases = quantize(W, 32, bits)
        parts += row(
            y, f"affine, {bits} bits", kinds, packed, dequantize(packed, scales, biases, 32, bits)
        )
        y += GAP
    size = f'width="{LEFT + 33 * BIT}" height="{y - 20}"'
    style = f'font-family="sans-serif" font-size="12" fill="{INK}" text-anchor="middle"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n'
    return (
        svg + '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
