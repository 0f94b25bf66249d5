"""assert in checked runs: what is told of a condition that does not hold (include/asserts.h)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import ferrule


def told(source: str, header: str = "") -> list[tuple[str, int | None, str]]:
    """Where which conditions do not hold: the text, the line, and what is said."""
    kernel = ferrule.metal_kernel("k", ["a", "h", "b"], ["y"], source, header)
    inputs: list[Any] = [
        np.arange(4, dtype=np.int32),
        np.array([0.5, 2], np.float16),
        np.array([0.5, 2], ml_dtypes.bfloat16),
    ]
    with ferrule.checking(ignore=["unwritten"]) as findings:
        kernel(inputs=inputs, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)],
               output_dtypes=[np.float32])  # fmt: skip
    return [(f.where, f.line, f.message) for f in findings]


def test_a_comparison_tells_both_sides() -> None:
    calls = told(
        """
        int n = a[3]; uint u = 7;
        assert(n < 2);
        assert(n + 1 == 4);
        assert(h[0] >= h[1]);
        assert(b[0] != b[1]);
        assert(u << 2 > u);
        assert(n > 0 && u > 9);
        assert(!(n == 3));
        assert(n);
        y[0] = 0; inside(n);
        """,
        "void inside(int k) {\n  assert(k % 2 == 0 || k > 5);\n}",
    )
    said = "In line 2 of the header: assert(k % 2 == 0 || k > 5);"
    assert calls == [
        ("source", 3, "assert(n < 2) fails (3 and 2)."),
        ("source", 5, "assert(h[0] >= h[1]) fails (0.5 and 2)."),
        ("source", 8, "assert(n > 0 && u > 9) fails (3 and 0)."),
        ("source", 9, "assert(!(n == 3)) fails."),
        ("source", 11, f"assert(k % 2 == 0 || k > 5) fails (1 and 0). {said}"),
    ]


def test_conditions_are_evaluated_once() -> None:
    calls = told(
        "int n = 0; threadgroup int t[2]; t[0] = 5;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "assert(++n > 3);\nassert(n == 1);\nassert(simd_sum(n) == t[0]);\nassert(y != nullptr);\n"
        "y[0] = n;",
    )
    assert calls == [
        ("source", 3, "assert(++n > 3) fails (1 and 3)."),
        ("source", 5, "assert(simd_sum(n) == t[0]) fails (1 and 5)."),
    ]


def test_nothing_is_evaluated_in_ordinary_runs() -> None:
    kernel = ferrule.metal_kernel("k", [], ["y"], "int n = 0; assert(++n > 3); y[0] = n;")
    (y,) = kernel(inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
                  output_dtypes=[np.int32])  # fmt: skip
    assert y[0] == 0
