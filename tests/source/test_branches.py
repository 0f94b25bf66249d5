"""What stands behind `#ifdef FERRULE` is compiled here alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu import program as cpu
from ferrule.kernel import make_kernel
from ferrule.source.branches import compiled
from ferrule.source.lexer import join

X = np.arange(64, dtype=np.float32)
SUM = np.repeat(X.reshape(2, 32).sum(1), 32)
I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
CALL: Any = {
    "inputs": [X], "output_shapes": [(64,)], "output_dtypes": [np.float32],
    "grid": (64, 1, 1), "threadgroup": (64, 1, 1),
}  # fmt: skip
BOTH = "#ifdef FERRULE\n{}\n#else\n{}\n#endif\n"

CASES: dict[str, tuple[str, str, Any]] = {  # header, body, what comes out
    "here alone": ("", I + BOTH.format("y[i] = simd_sum(x[i]);", "texture2d<float> asm("), SUM),
    "functions": (BOTH.format("inline float f(float v) { return simd_sum(v); }",
                              "inline float f(float v) { return v; }"), I + "y[i] = f(x[i]);", SUM),
    "macros": (BOTH.format("#define F(v) simd_sum(v)", "#define F(v) (v)"),
               I + "y[i] = F(x[i]);", SUM),
    "headers": (BOTH.format("", '#include "mlx/backend/metal/kernels/utils.h"'),
                I + "y[i] = x[i];", X),
    "not": ("", I + "#ifndef FERRULE\nno text at all (\n#endif\ny[i] = x[i];", X),
    "defined": ("", I + "#  if  defined ( FERRULE ) // so\ny[i] = x[i];\n"
                "#else /* a\n b */\n)\n#endif", X),
    "nested": ("", I + "#if !FERRULE\n#if 1\n{\n#else\n}\n#endif\n#define A (\n#else\n"
               "y[i] = x[i];\n#endif", X),
    "another": ("#define B 1", I + "#ifdef FERRULE\n#if B\ny[i] = simd_sum(x[i]);\n"
                "#endif\n#endif", SUM),
    "more than that": ("", I + "#if defined(FERRULE) && 1\ny[i] = simd_sum(x[i]);\n#endif", SUM),
    "elif": ("", I + "#if 0\n#elif FERRULE\ny[i] = simd_sum(x[i]);\n#else\n)\n#endif", SUM),
    "then elif": ("", I + "#ifdef FERRULE\ny[i] = simd_sum(x[i]);\n#elif 1\n)\n#endif", SUM),
    "undefined": ("#undef FERRULE", I + BOTH.format("y[i] = 1;", "y[i] = simd_sum(x[i]);"), SUM),
    "made 0": ("", I + "#define FERRULE 0\n#if FERRULE\ny[i] = 1;\n#else\ny[i] = x[i];\n#endif", X),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*FERRULE. redefined")
@pytest.mark.parametrize("name", CASES)
def test_every_way(name: str) -> None:
    header, body, want = CASES[name]
    kernel = ferrule.metal_kernel("branches", ["x"], ["y"], body, header)
    np.testing.assert_array_equal(kernel(**CALL)[0], want)
    with cpu.running("fibers"):
        np.testing.assert_array_equal(kernel(**CALL)[0], want)
    assert kernel.compile("cuda", **CALL).payload.startswith(b"\x7fELF")


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("undefined", "made 0")])
def test_lines_stay(name: str) -> None:
    header, body, _ = CASES[name]
    for ours in (True, False):
        for code, text in zip(
            compiled(make_kernel("k", ["x"], ["y"], body, header), ours=ours),
            (header, body), strict=True,
        ):  # fmt: skip
            assert join(code).count("\n") == text.count("\n")
            for token in code:
                words = text.split("\n")[token.line - 1]
                assert token.blank or token.text.split("\n")[0].strip() in words


def test_nothing_is_said_of_it() -> None:
    """Not with ``portable=True`` either; of what both compile it is."""
    body = I + "#ifdef FERRULE\ndouble d = x[i];\nferrule::prefetch(x, 1);\ny[i] = d;\n#endif"
    kernel = ferrule.metal_kernel("here", ["x"], ["y"], body, portable=True)
    np.testing.assert_array_equal(kernel(**CALL)[0], X)
    with pytest.raises(ferrule.DialectError, match=r"line 7: .*double"):
        ferrule.metal_kernel("both", ["x"], ["y"], body + "\ndouble e = 1;", portable=True)(**CALL)
