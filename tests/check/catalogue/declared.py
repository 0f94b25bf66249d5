"""Threadgroup memory that macros declare, and in bodies whose braces are not all in sight."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, planted, ramp


def shared(name: str, declared: str, header: str = "", store: str = "t[l] = x[l];") -> Planted:
    """A reversal in threadgroup memory, without the barrier and one too far."""
    return planted(
        "race",
        f"declared_{name}",
        f"""\
{declared}
uint l = thread_position_in_threadgroup.x;
{store} // OTHER
// barrier
y[l] = t[63 - l]; // BUG
""",
        ("// barrier\n", BARRIER),
        header=header,
        inputs=lambda: {"x": ramp(64)},
        also=["uninitialised"],
        want=lambda x: x[::-1],
    )


DECLARED: list[Planted] = [
    shared("by_a_macro", "#define TILE(T, N) threadgroup T t[N]\nTILE(float, 64);"),
    shared("by_a_macro_of_the_header", "TG float t[64];", header="#define TG threadgroup\n"),
    shared(
        "by_a_macro_with_others",
        "TILES",
        header="#define TILES threadgroup half a[2]; threadgroup float t[64];\n",
    ),
    shared(
        "before_braces_of_macros",
        "#define BEGIN {\n#define END }\nthreadgroup float t[64];",
        store="if (l < 64) BEGIN t[l] = x[l]; END",
    ),
    shared(
        "before_braces_of_conditions",
        "threadgroup float t[64];",
        store="\n#if 1\nif (l < 64) {\n#else\n{\n#endif\nt[l] = x[l]; }",
    ),
    planted(
        "bounds",
        "declared_by_a_macro",
        f"""\
ROWS(t, 9, 8);
uint l = thread_position_in_threadgroup.x;
t[l / 8][l % 8] = half(x[l]);
if (l < 8) t[8][l] = 0.0h;
{BARRIER}y[l] = float(t[l / 8][l % 8 + 1]); // BUG
""",
        ("l % 8 + 1", "(l + 1) % 8"),
        header="#define ROWS(name, n, m) threadgroup half name[n][m]\n",
        inputs=lambda: {"x": ramp(64)},
        want=lambda x: np.roll(x.reshape(8, 8), -1, 1).ravel(),
    ),
]
