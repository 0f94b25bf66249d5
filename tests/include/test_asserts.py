"""assert in texts that define FR_CHECKED: what is told of a condition (include/asserts.h)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ferrule
from ferrule import cache
from ferrule.devices.cpu import program

# What a checked run would define: each call becomes a line of a file.
HOOK = """
#include <cstdio>
namespace fr { struct print_value; }
struct checked { int kind, bytes; unsigned long long bits; };
extern "C" inline void fr_check_assert(bool holds, const char* condition, int line,
                                       const char* file, const fr::print_value* values,
                                       unsigned count) {
  static FILE* out = nullptr;
  if (!out) out = fopen("OUT", "w");
  fprintf(out, "%d\\t%s\\t%d\\t%s", holds, condition, line, file);
  const checked* v = (const checked*)values;
  for (; count--; ++v) fprintf(out, "\\t%d %d %llu", v->kind, v->bytes, v->bits);
  fprintf(out, "\\n");
  fflush(out);
}
"""


class Told(NamedTuple):
    holds: bool
    condition: str
    line: int
    file: str
    values: list[float]


def told(
    monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, header: str = ""
) -> list[Told]:
    hook, out = folder / "hook.h", folder / "out"
    hook.write_text(HOOK.replace("OUT", str(out)))
    flags = (*program._FLAGS, "-DFR_CHECKED=1", "-include", str(hook))
    monkeypatch.setattr(program, "_FLAGS", flags)
    cache.set_default(folder)
    kernel = ferrule.metal_kernel("k", ["a", "h", "b"], ["y"], source, header)
    inputs: list[Any] = [
        np.arange(4, dtype=np.int32),
        np.array([0.5, 2], np.float16),
        np.array([0.5, 2], ml_dtypes.bfloat16),
    ]
    try:
        kernel(inputs=inputs, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)],
               output_dtypes=[np.float32])  # fmt: skip
    finally:
        cache.set_default(None)
    return [_read(line.split("\t")) for line in out.read_text().splitlines()]


def _read(parts: list[str]) -> Told:
    holds, condition, line, file, *values = parts
    return Told(holds == "1", condition, int(line), file, [_value(v) for v in values])


def _value(text: str) -> float:
    kind, _, bits = text.split()
    number: float = struct.unpack("<d" if kind == "2" else "<q", struct.pack("<Q", int(bits)))[0]
    return number


@pytest.mark.parametrize("mode", ["auto", "fibers"])
def test_a_comparison_tells_both_sides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    with program.running(mode):
        calls = told(
            monkeypatch,
            tmp_path,
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
    assert calls == [
        Told(False, "n < 2", 3, "k.source", [3, 2]),
        Told(True, "n + 1 == 4", 4, "k.source", [4, 4]),
        Told(False, "h[0] >= h[1]", 5, "k.source", [0.5, 2]),
        Told(True, "b[0] != b[1]", 6, "k.source", [0.5, 2]),
        Told(True, "u << 2 > u", 7, "k.source", [28, 7]),
        Told(False, "n > 0 && u > 9", 8, "k.source", [3, 0]),
        Told(False, "!(n == 3)", 9, "k.source", []),
        Told(True, "n", 10, "k.source", []),
        Told(False, "k % 2 == 0 || k > 5", 2, "k.header", [1, 0]),
    ]


def test_conditions_are_evaluated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = told(
        monkeypatch,
        tmp_path,
        "int n = 0; threadgroup int t[2]; t[0] = 5;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "assert(++n > 3); assert(n == 1); assert(simd_sum(n) == t[0]); assert(y != nullptr);\n"
        "y[0] = n;",
    )
    assert [(c.holds, c.line) for c in calls] == [(False, 3), (True, 3), (False, 3), (True, 3)]
    assert [c.values for c in calls[:3]] == [[1, 3], [1, 1], [1, 5]]
