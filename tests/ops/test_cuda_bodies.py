"""The CUDA bodies of ferrule.ops compile, and hardly spill: no GPU is needed to know it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import ferrule
from ferrule import ops
from ferrule.operators import text
from ferrule.tools import nvrtc


def norm(n: int) -> dict[str, Any]:
    """The inputs of norms of rows of so many elements."""
    return {"x": (3, n), "residual": (3, n), "weight": (n,), "bias": (n,), "eps": 1e-5}


def rows(n: int) -> dict[str, Any]:
    """The inputs of their gradients."""
    return {"x": (1, 3, n), "weight": (n,), "eps": 1e-5, "cotangent": (1, 3, n)}


GRID = {"x": (2, 9, 9, 16), "grid": (2, 5, 5, 2)}


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ops.norms._layer_norm(0, True, True, False), norm(4096)),
        (ops.norms._layer_norm(0, True, True, False), norm(40000)),
        (ops.norms._rms_norm(0, True, True, False), norm(16384)),
        (ops.norm_weights._gradients(True, False, False), rows(1024)),
        (ops.norm_weights._gradients(True, False, False), rows(16384)),
        (ops.softmaxes._softmax(0, False), {"x": (3, 16384)}),
        (ops.sampling.sampler("bilinear", "zeros", False, "NHWC", False), GRID),
    ],
    ids=lambda value: value.name if isinstance(value, ferrule.Op) else "",
)
@pytest.mark.parametrize("dtype", [ferrule.float32, ferrule.float16, ferrule.bfloat16], ids=str)
def test_compiles_and_hardly_spills(
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
    spilled = re.findall(r"(\d+) bytes spill", kernel.compile("sm_90", **call).log)
    # 1024 threads leave each 64 registers, of which these need a few more.
    many = op.name == "layer_norm_gradients" and inputs == rows(16384) and dtype == ferrule.float32
    assert spilled and max(map(int, spilled)) <= (48 if many else 0)


@pytest.mark.parametrize(
    ("form", "letters", "rows"),
    [
        (("nvfp4", 16, 4), "", 1), (("affine", 64, 4), "", 16), (("mxfp8", 32, 8), "", 32),
        (("mxfp4", 32, 4), "", 64), (("affine", 32, 3), "", 70), (("nvfp4", 16, 4), "", 70),
        (("nvfp4", 16, 4), "tr", 2), (("affine", 128, 8), "lr", 100),
    ],
    ids=str,
)  # fmt: skip
def test_units_of_quantized_matrices_do_not_spill(
    library: nvrtc.Nvrtc, form: tuple[str, int, int], letters: str, rows: int
) -> None:
    (mode, group, bits), dtype = form, ferrule.bfloat16
    op = ops.quantized._product(mode, group, bits, True, letters, False)
    batch = (4,) if letters else ()
    scales = (*batch, 64, 512 // group), dtype if mode == "affine" else ferrule.uint8
    given: dict[str, Any] = {
        "x": ({"": (rows, 512), "tr": (rows, 1, 1, 512), "lr": (rows, 1, 512)}[letters], dtype),
        "w": ((*batch, 64, 512 * bits // 32), ferrule.uint32),
        "scales": scales,
        "biases": scales,
        "lhs": ((rows, 2), ferrule.int32),
        "rhs": ((rows, 2), ferrule.int64),
    }
    names = [argument.name for argument in op.rule.inputs]
    inputs = {name: given[name] for name in names}
    units = [
        unit
        for body in op.implementations
        if body.kind == "cuda" and (unit := text.described_unit(op, body, inputs))
    ]
    log = units[0].compile("sm_90").log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
