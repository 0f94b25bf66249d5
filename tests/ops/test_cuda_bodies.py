"""The CUDA bodies of ferrule.ops compile, and spill no registers: no GPU is needed to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import ferrule
from ferrule import ops
from ferrule.operators import text
from ferrule.tools import nvrtc

X, WEIGHT = (3, 4096), (4096,)
NORM = {"x": X, "weight": WEIGHT, "bias": WEIGHT, "eps": 1e-5}
ROWS = {"x": (1, *X), "weight": WEIGHT, "eps": 1e-5, "cotangent": (1, *X)}
GRID = {"x": (2, 9, 9, 16), "grid": (2, 5, 5, 2)}


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ops.norms._layer_norm(0, True, True, False), NORM),
        (ops.norms._rms_norm(0, True, True, False), {**NORM, "residual": X}),
        (ops.norm_weights._gradients(True, False, False), ROWS),
        (ops.softmaxes._softmax(0, False), {"x": X}),
        (ops.sampling.sampler("bilinear", "zeros", False, "NHWC", False), GRID),
    ],
    ids=lambda value: value.name if isinstance(value, ferrule.Op) else "",
)
@pytest.mark.parametrize("dtype", [ferrule.float32, ferrule.bfloat16], ids=str)
def test_compiles_without_spills(
    library: nvrtc.Nvrtc, dtype: Any, op: ferrule.Op, inputs: Mapping[str, Any]
) -> None:
    names = [argument.name for argument in op.rule.inputs]
    given = {
        name: (value, dtype if name != "grid" else ferrule.float32)
        if isinstance(value, tuple)
        else value
        for name, value in inputs.items()
        if name in names
    }
    bodies = [body for body in op.implementations if body.kind == "cuda"]
    calls = [call for body in bodies if (call := text.described(op, body, given, "cuda"))]
    kernel, call = calls[0]
    assert "0 bytes spill stores" in kernel.compile("sm_90", **call).log
