"""Bounds of rows of arrays, and of arrays in structs; and ways to cross rows on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from .planted import BARRIER, Case, Planted, planted, ramp

SQUARE: dict[str, Any] = {"grid": (8, 8, 1), "threadgroup": (8, 8, 1)}


def square() -> dict[str, Any]:
    return {"x": ramp(8, 8)}


def right(x: np.ndarray, last: float = 0) -> np.ndarray:
    """Of each row the element after each, and ``last`` after the last."""
    return np.concatenate([x[:, 1:], np.full((8, 1), last, x.dtype)], 1).ravel()


def read_past(kind: str) -> Planted:
    """The element to the right of the last of each row, in threadgroup memory of a type."""
    return planted(
        "bounds",
        f"row_of_{kind}",
        f"""\
threadgroup {kind} t[9][8];
uint2 p = thread_position_in_threadgroup.xy;
t[p.y][p.x] = {kind}(x[p.y * 8 + p.x]);
if (p.y == 0) t[8][p.x] = {kind}(0.0f);
{BARRIER}{kind} v = t[p.y][p.x + 1]; // BUG
y[p.y * 8 + p.x] = float(v{".x" if kind == "float4" else ""});
""",
        ("t[p.y][p.x + 1]", f"p.x < 7 ? t[p.y][p.x + 1] : {kind}(0.0f)"),
        inputs=square,
        want=right,
        **SQUARE,
    )


ROWS = [
    *(read_past(kind) for kind in ("float", "half", "bfloat", "float4")),
    planted(
        "bounds",
        "row_by_number",
        f"""\
threadgroup float t[8][4];
uint l = thread_position_in_threadgroup.x;
t[l / 4][l % 4] = x[l];
{BARRIER}y[l] = l < 16 ? t[l / 4][4] : 0; // BUG
""",
        ("[4] : 0", "[3] : 0"),
        inputs=lambda: {"x": ramp(32)},
        outputs="y:float32[32]",
        grid=32,
        threadgroup=32,
        want=lambda x: np.where(ramp(32) < 16, np.repeat(x[3::4], 4), 0),
    ),
    planted(
        "bounds",
        "row_written",
        f"""\
threadgroup half t[10][8];
uint2 p = thread_position_in_threadgroup.xy;
for (uint k = p.x; k < 80; k += 8) if (p.y == 0) t[k / 8][k % 8] = 0.0h;
{BARRIER}t[p.y][p.x + 1] = half(x[p.y * 8 + p.x]); // BUG
{BARRIER}y[p.y * 8 + p.x] = float(t[p.y][p.x]);
""",
        ("t[p.y][p.x + 1]", "t[p.y][p.x]"),
        inputs=square,
        want=lambda x: x.ravel(),
        **SQUARE,
    ),
    planted(
        "bounds",
        "row_of_three_dims",
        f"""\
threadgroup float t[2][4][8];
uint2 p = thread_position_in_threadgroup.xy;
t[p.y / 4][p.y % 4][p.x] = x[p.y * 8 + p.x];
{BARRIER}uint below = p.y % 4 + 1;
y[p.y * 8 + p.x] = p.y < 4 ? t[0][below % 4][p.x] + t[p.y / 4][below][p.x] : 0; // BUG
""",
        ("t[p.y / 4][below][p.x]", "t[p.y / 4][below % 4][p.x]"),
        inputs=square,
        want=lambda x: np.concatenate([2 * np.roll(x[:4], -1, 0), 0 * x[4:]]).ravel(),
        **SQUARE,
    ),
    planted(
        "bounds",
        "row_by_macro",
        f"""\
#define AT(r, c) t[r][c]
threadgroup float t[9][8];
uint2 p = thread_position_in_threadgroup.xy;
AT(p.y, p.x) = x[p.y * 8 + p.x];
if (p.y == 0) AT(8, p.x) = 0;
{BARRIER}float v = AT(p.y, p.x + 1); // BUG
y[p.y * 8 + p.x] = v;
""",
        ("AT(p.y, p.x + 1)", "p.x < 7 ? AT(p.y, p.x + 1) : 0"),
        inputs=square,
        want=right,
        **SQUARE,
    ),
    planted(
        "bounds",
        "row_in_helper",
        f"""\
threadgroup half t[9][8];
uint2 p = thread_position_in_threadgroup.xy;
t[p.y][p.x] = half(x[p.y * 8 + p.x]);
{BARRIER}y[p.y * 8 + p.x] = right(t, p.y, p.x);
""",
        ("return float", "return c == 7 ? 0 : float"),
        header="""\
inline float right(threadgroup half (&t)[9][8], uint r, uint c) {
    return float(t[r][c + 1]); // BUG
}
""",
        inputs=square,
        also=["unwritten", "uninitialised"],
        want=right,
        **SQUARE,
    ),
]


def private(kind: str) -> Planted:
    """A row of a private array that is gone beyond."""
    return planted(
        "bounds",
        f"private_row_of_{kind}",
        f"""\
uint i = thread_position_in_grid.x;
{kind} w[3][4];
for (uint k = 0; k < 12; ++k) w[k / 4][k % 4] = {kind}(x[12 * i + k]);
uint last = uint(n[0]);
w[1][last] = {kind}(0.0f); // BUG
y[i] = float(w[1][3] + w[2][0]);
""",
        ("w[1][last]", "w[1][last - 1]"),
        inputs=lambda: {"x": ramp(8 * 12), "n": np.array([4], np.float32)},
        outputs="y:float32[8]",
        also=["unwritten"],
        grid=8,
        threadgroup=8,
        want=lambda x, n: x[8::12],
    )


STRUCT = """\
struct Pair {
    float low[4];
    float high[4];
};
"""
IN_STRUCTS = [
    *(private(kind) for kind in ("float", "half")),
    *(
        planted(
            "bounds",
            f"{member}_array_of_a_struct",
            f"""\
threadgroup Pair t[2];
uint l = thread_position_in_threadgroup.x;
t[l / 4].low[l % 4] = x[l];
t[l / 4].high[l % 4] = -x[l];
{BARRIER}float v = t[0].{member}[l % 4 + l / 4]; // BUG
y[l] = v;
""",
            ("[l % 4 + l / 4]", "[l % 4]"),
            header=STRUCT,
            inputs=lambda: {"x": ramp(8)},
            outputs="y:float32[8]",
            also=["unwritten"],
            grid=8,
            threadgroup=8,
            want=lambda x, sign=sign: sign * np.tile(x[:4], 2),
        )
        for member, sign in (("low", 1), ("high", -1))
    ),
]

CLEAN_ROWS = [
    *(
        Case(
            f"whole_array_as_one_row_of_{kind}",
            f"""\
threadgroup {kind} t[8][8];
uint l = thread_position_in_threadgroup.x;
t[0][l] = {kind}(x[l]);
{BARRIER}y[l] = float(t[l % 8][l / 8]);
""",
            lambda: {"x": ramp(64)},
            want=lambda x: x.reshape(8, 8).T.ravel(),
        )
        for kind in ("float", "half")
    ),
    Case(
        "ends_of_rows",
        f"""\
threadgroup half t[8][8];
uint l = thread_position_in_threadgroup.x;
t[l / 8][l % 8] = half(x[l]);
{BARRIER}float s = 0;
for (threadgroup half* p = &t[l / 8][0]; p != &t[l / 8][8]; ++p) s += float(*p);
threadgroup half* flat = &t[0][0];
y[l] = s + float(flat[63 - l]);
""",
        lambda: {"x": ramp(64)},
        want=lambda x: np.repeat(x.reshape(8, 8).sum(1), 8) + x[::-1],
    ),
    Case(
        "struct_that_ends_in_any_number",
        """\
uint i = thread_position_in_grid.x;
const device List* list = (const device List*)x;
y[i] = i < list->count ? list->items[i] : 0;
""",
        lambda: {"x": np.concatenate([np.array([40], np.uint32).view(np.float32), ramp(64)])},
        header="struct List {\n    uint count;\n    float items[1];\n};\n",
        want=lambda x: np.where(np.arange(64) < 40, x[1:], 0),
    ),
]

BOUNDS_OF_ROWS: list[Planted] = ROWS + IN_STRUCTS
