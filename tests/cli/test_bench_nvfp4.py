"""``ferrule bench nvfp4``: its peers do the same work. No times."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ferrule import ops
from ferrule_bench import nvfp4
from test_bench import run, silent


def test_all_groups(tmp_path: Any) -> None:
    """Of small sizes: results are compared."""
    path = tmp_path / "rows.json"
    result = run("nvfp4", "--quick", "--device", "cpu", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["group"] for row in rows] == ["nvfp4 linear", "nvfp4 moe", "nvfp4 stack"]
    assert all(row["error"] is not None and row["error"] < 2e-2 for row in rows)
    assert "tokens per second, NVFP4 and bfloat16" in result.output


@pytest.mark.parametrize("layer", [nvfp4.layer_by_groups, nvfp4.layer_by_loop])
def test_layers_in_floats(layer: Any) -> None:
    bench = silent()
    of = nvfp4.Mixture("a mixture", 5, 2, 64, 48, (), {})
    matrices = nvfp4._matrices(bench, of)
    w13 = nvfp4._floats(matrices[0], matrices[1], matrices[2].repeat_interleave(48, 1))
    w2 = nvfp4._floats(matrices[3], matrices[4], matrices[5])
    ((x, weights, ids),) = nvfp4._routings(bench, of, 7)
    expected = ops.nvfp4_moe(x, weights, ids, *matrices)
    y = layer(x, weights, ids, w13, w2)
    near = 2e-2 * float(expected.float().abs().max())
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=near)
