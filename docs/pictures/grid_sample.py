"""Draws grid_sample.svg: ``python docs/pictures/grid_sample.py`` writes it beside this file.

The numbers and the shades are what `ferrule.ops.grid_sample` computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ferrule.ops import grid_sample

ROWS, COLUMNS = 3, 4
IMAGE = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(1, ROWS, COLUMNS, 1)
POINT = (-0.2, 0.5)
PIXEL, SMALL = 48, 19  # sides of the pixels above and below
INK, MARK = "#24292f", "#d9480f"


def text(x: float, y: float, words: object, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" {more}/>'


def box(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>'


def shade(value: float) -> str:
    """From light to dark."""
    part = value / (IMAGE.size - 1)
    light, dark = np.array([232, 241, 250]), np.array([76, 134, 196])
    return "#" + "".join(f"{int(c):02x}" for c in np.round(light + (dark - light) * part))


def sampled(points: np.ndarray, **how: object) -> np.ndarray:
    """The samples at points ``[N, M, 2]``."""
    return grid_sample(IMAGE, points.astype(np.float32)[None], **how)[0, ..., 0]


def axis(start: float, end: float, at: float, name: str, across: bool) -> list[str]:
    """An axis from -1 to 1 above the pixels or left of them."""
    middle = (start + end) / 2
    ticks = list(zip((start, middle, end), ("-1", "0", "1"), strict=True))
    if across:
        marks = [line(t, at - 4, t, at + 4) + text(t, at - 10, n) for t, n in ticks]
        return [line(start, at, end, at), *marks, text(middle, at - 28, name)]
    marks = [line(at - 4, t, at + 4, t) + text(at - 14, t + 4, n) for t, n in ticks]
    turned = f'transform="rotate(-90 {at - 34:g} {middle:g})"'
    return [line(at, start, at, end), *marks, text(at - 34, middle + 4, name, turned)]


def one_point(left: float, top: float, corners: bool) -> list[str]:
    """The image, its axes, and the four pixels of which a point takes a part each."""
    inset = PIXEL / 2 if corners else 0
    begin, size = (left + inset, top + inset), (COLUMNS * PIXEL, ROWS * PIXEL)
    end = left + size[0] - inset, top + size[1] - inset
    parts = []
    for i, value in enumerate(IMAGE.ravel()):
        x, y = left + i % COLUMNS * PIXEL, top + i // COLUMNS * PIXEL
        parts.append(box(x, y, PIXEL, PIXEL, f'fill="{shade(value)}" stroke="white"'))
        parts.append(text(x + 12, y + 17, f"{value:g}"))
    parts += axis(begin[0], end[0], top - 12, "grid[..., 0]", True)
    parts += axis(begin[1], end[1], left - 12, "grid[..., 1]", False)
    x, y = (b + (e - b) * (p + 1) / 2 for b, e, p in zip(begin, end, POINT, strict=True))
    around = f'fill="none" stroke="{MARK}" stroke-width="2" stroke-dasharray="5 3"'
    parts.append(box(x - PIXEL / 2, y - PIXEL / 2, PIXEL, PIXEL, around))
    parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{MARK}"/>')
    column, row = (x - left) / PIXEL - 0.5, (y - top) / PIXEL - 0.5
    terms = []
    for r in (int(row), int(row) + 1):
        for c in (int(column), int(column) + 1):
            weight = (1 - abs(row - r)) * (1 - abs(column - c))
            terms.append(f"{weight:.3g} · {IMAGE[0, r, c, 0]:g}")
    found = sampled(np.array([[POINT]]), align_corners=corners).item()
    middle, below = left + size[0] / 2, top + size[1]
    parts.append(text(middle, below + 24, f"align_corners={corners}", 'font-weight="bold"'))
    parts.append(text(middle, below + 44, f"{' + '.join(terms)} = {found:.4g}", f'fill="{MARK}"'))
    return parts


def padded(left: float, top: float, padding: str) -> list[str]:
    """What lies around the image, two pixels on each side."""
    columns, rows = (np.arange(-2, n + 2) for n in (COLUMNS, ROWS))
    xs, ys = ((2 * i + 1) / n - 1 for i, n in ((columns, COLUMNS), (rows, ROWS)))
    values = sampled(np.stack(np.meshgrid(xs, ys), -1), mode="nearest", padding_mode=padding)
    parts = []
    for (row, column), value in np.ndenumerate(values):
        x, y = left + column * SMALL, top + row * SMALL
        parts.append(box(x, y, SMALL, SMALL, f'fill="{shade(value)}" stroke="white"'))
        parts.append(text(x + SMALL / 2, y + 13, f"{value:g}", 'font-size="10"'))
    image = f'fill="none" stroke="{INK}" stroke-width="2"'
    parts.append(box(left + 2 * SMALL, top + 2 * SMALL, COLUMNS * SMALL, ROWS * SMALL, image))
    words = f"padding_mode=&quot;{padding}&quot;"
    below = top + len(ys) * SMALL + 20
    return [*parts, text(left + len(xs) * SMALL / 2, below, words, 'font-weight="bold"')]


def picture() -> str:
    """The whole of it."""
    width, height = 720, 470
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}"'
        ' text-anchor="middle">',
        "<title>A point of the grid takes the four pixels around it, each by the part of a pixel"
        " around the point that lies on it; and what lies outside of the image</title>",
        box(0, 0, width, height, 'fill="white" rx="8"'),
        *one_point(100, 70, False),
        *one_point(460, 70, True),
    ]
    for i, padding in enumerate(("zeros", "border", "reflection")):
        parts += padded(36 + i * 248, 300, padding)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), "utf-8")
