"""NVRTC reads the dialect: every example compiles to a cubin, without a GPU."""

from __future__ import annotations

import pytest

import ferrule
from dialect_blocks import BLOCKS, Block


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_block_compiles_for_cuda(block: Block) -> None:
    binary = ferrule.metal_kernel(**block.kernel).compile("cuda", **block.call)
    assert binary.payload.startswith(b"\x7fELF")
    assert f"ferrule_{block.name}".encode() in binary.payload
    assert '#include "ferrule.h"' in binary.text


def test_error_names_the_authors_line() -> None:
    kernel = ferrule.metal_kernel("broken", ["x"], ["y"], "uint i = 0;\ny[i] = x[i] + nothing;")
    with pytest.raises(ferrule.CompileError, match=r"source line 2: .*nothing") as caught:
        kernel.compile("cuda", inputs=["float32[8]"], output_dtypes=[ferrule.float32])
    assert "| y[i] = x[i] + nothing;" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("float v = as_type<float>(half(1)); y[i] = v;", "as_type: the two types"),
        ("struct S { int a; } s; y[i] = simd_sum(s).a;", r'operator "\+" matches'),
        ("float3 v = float2(1).xyz; y[i] = v.x;", 'has no member "z"'),
    ],
)
def test_an_error_in_the_header_names_the_line_that_led_there(line: str, said: str) -> None:
    kernel = ferrule.metal_kernel("led", ["x"], ["y"], f"uint i = 0;\n{line}")
    with pytest.raises(ferrule.CompileError, match=f"source line 2: .*{said}") as caught:
        kernel.compile("compute_90", inputs=["float32[8]"], output_dtypes=[ferrule.float32])
    assert f"| {line}" in str(caught.value)
