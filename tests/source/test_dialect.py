"""The dialect's examples, on every way of running a kernel on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import ferrule
from dialect_blocks import BLOCKS, Block
from ferrule.devices.cpu import program as cpu

pytestmark = [pytest.mark.together, pytest.mark.usefixtures("everywhere")]


@pytest.mark.parametrize("mode", ["auto", "fibers"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_block(block: Block, mode: str) -> None:
    kernel = ferrule.metal_kernel(**block.kernel)
    with cpu.running(mode):
        outputs = kernel(**block.call)
    assert block.check(outputs), "\n".join(map(str, outputs))
    assert all(isinstance(o, np.ndarray) for o in outputs)
