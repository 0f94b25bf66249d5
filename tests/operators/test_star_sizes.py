"""``S_size``: how many elements ``*S`` has, in rules, launches and bodies."""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError
from ferrule.errors import RuleError
from ferrule.hosts.torch import package as torch_package
from ferrule.rules.rule import parse_rule

COUNTED = ferrule.op(
    "counted",
    "x[*S,N]:float32 -> y[S_size,2]:int32, z[max(S_size, 2)]:float32 where S_size < 1000",
    metal="uint i = thread_position_in_grid.x; z[i] = 1;"
    "if (i < uint(S_size)) { y[2 * i] = int(i); y[2 * i + 1] = S_size + 100 * HALF; }",
    grid="max(S_size, 2)",
    threadgroup="max(min(S_size, 64), 1)",
    template={"HALF": "S_size // 2"},
)


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([np.ones, torch.ones, mx.ones]),
)
@settings(deadline=None)
def test_in_rules_launches_and_bodies(outer: list[int], ones: Any) -> None:
    x = ones((*outer, 3))
    y, z = COUNTED(x.astype("f") if isinstance(x, np.ndarray) else x)
    size = prod(outer)
    expected = [[i, size + 100 * (size // 2)] for i in range(size)]
    assert np.asarray(y).tolist() == expected
    assert np.asarray(z).tolist() == [1] * max(size, 2)


def test_of_what_is_written_in_place_and_of_outputs() -> None:
    op = ferrule.op(
        "filled",
        "x[B,*S,N]:float32!, w[*R]:float32 -> n[B,*R]:int32",
        metal="uint i = thread_position_in_grid.x;"
        "for (int k = 0; k < S_size * N; k++) x[i * S_size * N + k] = float(i);"
        "for (int k = 0; k < R_size; k++) n[i * R_size + k] = S_size;",
        grid="B",
        threadgroup=32,
    )
    for ones in (np.ones, torch.ones):
        x, w = ones((2, 3, 4, 5)), ones((2, 3))
        x, w = (a.astype("f") if ones is np.ones else a for a in (x, w))
        assert np.asarray(op(x, w)).tolist() == [[[12] * 3] * 2] * 2
        assert np.asarray(x).tolist() == [[[[i] * 5] * 4] * 3 for i in range(2)]


def test_in_graphs_and_packages() -> None:
    compiled = torch.compile(
        lambda *a: COUNTED(*a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (2, 3, 5):
        torch.testing.assert_close(compiled(torch.ones(rows, 3)), COUNTED(torch.ones(rows, 3)))
    total = ferrule.op(
        "total",
        "x[*S,N]:float32 -> y[S_size]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = S_size;",
        grid="S_size",
        threadgroup=64,
    )

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return total(x)

    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Model(), (torch.ones(4, 2, 3),), dynamic_shapes=({0: rows},))
    (packaged,) = torch_package._packaged(program, None)
    library = torch_package._library([packaged])
    torch_package._load(library, torch_package.hashlib.sha256(library).hexdigest(), "here")
    y = getattr(torch.ops.ferrule, packaged.name).default(torch.ones(7, 2, 3))
    assert y.tolist() == [14] * 14


def test_a_batch_is_no_part_of_what_is_counted() -> None:
    counted = ferrule.op(
        "counted", "x[*S]:float32 -> y[*S]:float32",
        metal="y[thread_position_in_grid.x] = S_size;", grid="S_size", threadgroup=64,
    )  # fmt: skip
    stated = ferrule.op(
        "stated", "x[*S]:float32 -> y[*S]:float32 where S_size < 5",
        metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        grid="S_size", threadgroup=64,
    )  # fmt: skip
    x = torch.ones(3, 4)
    assert torch.vmap(counted)(x).tolist() == [[12] * 4] * 3  # as the body of any *S may say
    with pytest.warns(ferrule.FerruleWarning, match="'stated' is called 3 times by vmap"):
        torch.vmap(stated)(x)


def test_names_and_errors() -> None:
    own = parse_rule("x[*S,N]:T, S_size:int32 -> y[*S]:T")
    assert own.star_sizes == {}
    bound = ferrule.op(
        "bound", "x[*S,N]:T, w[S_size]:T -> y[S_size]:T",
        metal="y[thread_position_in_grid.x] = w[thread_position_in_grid.x];",
        grid="S_size", threadgroup=64,
    )  # fmt: skip
    assert bound(np.ones((2, 3), "f"), np.ones(7, "f")).shape == (7,)  # a dim of that name
    with pytest.raises(KernelError, match=r"wants S_size < 1000, and .* S_size = 1000"):
        COUNTED(np.ones((10, 100, 1), "f"))
    with pytest.raises(RuleError, match=r"no input that is always there says what \*S is"):
        parse_rule("x[N]:T, w[*S]:T? -> y[S_size]:T")
