"""histogram against torch.histc, with every host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.ops import counting, histogram

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@given(
    shape=st.lists(st.integers(0, 9), max_size=3), bins=st.integers(1, 40), seed=st.integers(0, 99),
    low=st.integers(-4, 3), width=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_as_histc(shape: list[int], bins: int, seed: int, low: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Quarters, so that many lie on edges; some are no numbers.
    x = torch.randint(-20, 21, tuple(shape), generator=generator) / 4
    x = torch.where(x == 5, float("nan"), torch.where(x == -5, float("inf"), x))
    expected = torch.histc(x[x.isfinite()], bins, low, low + width).int()
    assert torch.equal(histogram(x, bins, low, low + width), expected)
    assert np.array_equal(histogram(x.numpy(), bins, low, low + width), expected)
    assert histogram(mx.array(x.numpy()), bins, low, low + width).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves(kind: Any) -> None:
    x = torch.randn(3000).to(kind)
    assert torch.equal(histogram(x, 17, -1, 1.5), torch.histc(x.float(), 17, -1, 1.5).int())


def test_both_bodies_count_the_same() -> None:
    in_groups, directly, _ = counting._histogram.implementations
    rule, x = str(counting._histogram.rule), torch.randn(20_000)
    body = in_groups.to_json()
    everywhere = ferrule.op(
        "in_groups", rule, metal=body["source"], header=body["header"],
        grid="min(ceildiv(x.size, 4096), 1024) * 256", threadgroup=256, template={"MOST": 2048},
        init_value=0, atomic_outputs=True,
    )  # fmt: skip
    for bins in (1, 300, 2048):
        expected = torch.histc(x, bins, -2, 2).int()
        assert torch.equal(everywhere(x, bins, -2.0, 2.0), expected)
        assert torch.equal(histogram(x, bins, -2.0, 2.0), expected)
    assert str(directly.when) == "None" and str(in_groups.when).startswith("not device == cpu")


class Counts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return histogram(x, 4, 0.0, 1.0)


def test_graphs(tmp_path: Path) -> None:
    compiled = torch.compile(histogram, fullgraph=True, dynamic=True, backend="aot_eager")
    for size, bins in ((9, 4), (50, 7), (12, 5)):
        x = torch.rand(size)
        assert torch.equal(compiled(x, bins, 0.0, 1.0), torch.histc(x, bins, 0, 1).int())
    ends = torch.compile(
        lambda x: histogram(x, 4, 0, x.shape[0]), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for size in (4, 6):
        x = torch.rand(size) * size
        assert torch.equal(ends(x), torch.histc(x, 4, 0, size).int())
    torch.library.opcheck(counting._histogram.torch_op, (torch.rand(5, 2), 3, 0.0, 1.0))
    shapeless = mx.compile(lambda x: histogram(x, 4, 0, 1), shapeless=True)
    path = str(tmp_path / "counts.mlxfn")
    mx.export_function(path, lambda x: histogram(x, 4, 0, 1), mx.zeros(3), shapeless=True)
    imported = ferrule.import_function(path)
    for size in (5, 9):
        x = mx.random.uniform(shape=(size,))
        assert int(shapeless(x).sum()) == size
        assert mx.array_equal(imported(x)[0], histogram(x, 4, 0, 1))
    program = torch.export.export(
        Counts(), (torch.rand(5),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    x = torch.rand(11)
    assert torch.equal(program.module()(x), torch.histc(x, 4, 0, 1).int())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.ones(3, np.float32), 0, 0, 1), "wants bins >= 1.* bins = 0"),
        ((np.ones(3, np.float32), 2, 1, 1), "low = 1 and high = 1 for 2 bins; expected .* below"),
        ((np.ones(3, np.float32), 10, 0, 3e38), "fits in float32"),
        ((np.ones(3, np.float32), 2, "0", 1), "input 'low' of op 'histogram'"),
        ((np.ones(3, np.float32), 2, float("nan"), 1), "low = nan"),
        ((np.ones(3, np.float32), 2, 0, float("inf")), "high = inf"),
        ((np.ones(3, np.int32), 2, 0, 1), "got int32, expected x"),
        (([1.0], 2, 0, 1), "input 'x' of op 'histogram'"),
    ],
)
def test_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError), match=message):
        histogram(*given)


def test_edges_that_are_one_in_float32() -> None:
    assert histogram(torch.ones(2), 3, 1.0, 1 + 1e-12).tolist() == [0, 0, 2]
