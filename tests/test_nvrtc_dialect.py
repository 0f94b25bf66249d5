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


def test_launching_is_refused() -> None:
    from ferrule import devices

    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    spec = kernel._described(
        ["float32[8]"], [ferrule.float32], None, None, None, None, None, "cuda"
    )
    with pytest.raises(ferrule.DeviceError, match="does not launch"):
        devices.get("cuda:0").program(spec[0])
