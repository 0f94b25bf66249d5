"""Dims that optional inputs alone have: 0 where none of them is there, with every host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, Op
from ferrule.operators.sharding import splits

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TEXT = """
    uint i = thread_position_in_grid.x, row = i / uint(N + L), column = i % uint(N + L);
    T value = 0;
    if (column < uint(N)) {
        value = x[row * N + column];
    } else {
        if (has_left) value += left[row * L + column - N];
        if (has_right) value += right[column - N] * T(WIDE ? 2 : 1);
    }
    y[i] = value;
    if (i == 0) how[0] = HOW;
"""


def body(how: int, when: str | None = None) -> Any:
    return ferrule.metal_body(
        TEXT, grid="y.size", threadgroup="min(L + 1, 32)", when=when, init_value=0,
        template={"WIDE": "L > 3", "HOW": how},
    )  # fmt: skip


joined = ferrule.op(
    "joined",
    "x[*S,N]:T, left[*S,L]:T?, right[L]:T? -> y[*S,N+L]:T, how[1]:int32 where L != 5",
    metal=[body(1, "L == 0"), body(2)],
)  # fmt: skip
summed = ferrule.op(
    "summed", "x[*S,N]:T, left[*S,L]:T? -> y[*S,N+L]:T", grid="y.size", threadgroup=32,
    metal="""
        uint i = thread_position_in_grid.x, row = i / uint(N + L), column = i % uint(N + L);
        y[i] = column < uint(N) ? x[row * N + column] : has_left ? left[row * L + column - N] : 0;
    """,
)  # fmt: skip
Array = np.ndarray[Any, Any]


def expected(x: Array, left: Array | None, right: Array | None) -> tuple[Array, int]:
    length = 0 if left is None else left.shape[-1]
    length = length if right is None else len(right)
    more = np.zeros((*x.shape[:-1], length), x.dtype)
    more += 0 if left is None else left
    more += 0 if right is None else right * (2 if length > 3 else 1)
    y = np.concatenate((x, more), -1)
    return y, 0 if y.size == 0 else 2 if length else 1


@st.composite
def inputs(draw: Any) -> tuple[Array, Array | None, Array | None]:
    star = draw(st.lists(st.integers(0, 3), max_size=2))
    length = draw(st.integers(0, 6).filter(lambda n: n != 5))
    shapes = [*star, draw(st.integers(0, 4))], [*star, length], [length]
    numbers = np.arange(200, dtype=np.float32)
    x, left, right = (numbers[: np.prod(s, dtype=int)].reshape(s) + i for i, s in enumerate(shapes))
    return x, draw(st.sampled_from([left, None])), draw(st.sampled_from([right, None]))


def each(values: Any, make: Any) -> list[Any]:
    return [None if value is None else make(value) for value in values]


@settings(deadline=None, max_examples=40)
@given(inputs())
def test_each_host(values: Any) -> None:
    want, how = expected(*values)
    for make in (np.array, torch.tensor, mx.array):
        y, said = joined(*each(values, make))
        assert np.array_equal(np.asarray(y.tolist(), np.float32).reshape(want.shape), want)
        assert said.tolist() == [how]


def test_graphs_follow_the_dim() -> None:
    def call(x: Any, left: Any, right: Any) -> Any:
        return joined(x, left, right)[0]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    shapeless = mx.compile(call, shapeless=True)
    x, right = np.ones((2, 3), np.float32), np.arange(2, dtype=np.float32)
    for left in (None, 2, 4, 3):
        given_left = None if left is None else np.full((2, left), 7, np.float32)
        given_right = right if left == 2 else None
        want, _ = expected(x, given_left, given_right)
        values = x, given_left, given_right
        assert np.array_equal(compiled(*each(values, torch.tensor)).numpy(), want)
        assert np.array_equal(np.array(shapeless(*each(values, mx.array)).tolist()), want)
    with pytest.raises(Exception, match="wants L != 5, and the inputs say L = 5"):
        compiled(torch.ones(2, 3), torch.ones(2, 5), None)


def test_batches() -> None:
    x = np.ones((2, 4, 3), np.float32)
    for left in (None, x[:, :, :2]):
        want, _ = expected(x, left, None)
        values, axes = each((x, left), torch.tensor), (0, None if left is None else 0)
        assert np.array_equal(torch.vmap(summed, axes)(*values).numpy(), want)
        count = 1 if left is None else 2  # MLX's vmap takes no None
        y = mx.vmap(lambda *v: summed(*v), axes[:count])(*each((x, left), mx.array)[:count])
        assert y.tolist() == want.tolist()
    assert not summed.counts["vmap loop"]


def test_a_size_that_is_not_known_while_torch_traces() -> None:
    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return joined(x, mask.nonzero().to(x.dtype).T, None)[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for mask in ([0, 1, 1], [0, 0, 0], [1, 1, 1]):
            x, seen = torch.ones(1, 2), torch.tensor(mask)
            assert torch.equal(compiled(x, seen), call(x, seen))


def test_disagreements() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(
        KernelError,
        match=r"input 'right' of op 'joined': got the shape \(4,\) \(right\[L\]:T\?\), whose dim 0 "
        r"is 4, but L is 2 by input 'left' of shape \(2, 2\)",
    ):
        joined(x, x[:, :2], x.reshape(-1)[:4])
    longer = ferrule.op(
        "longer", "x[L+1]:T, m[L]:T? -> y[L]:T", reference=lambda x, m: x[1:], grid=1
    )
    assert longer(x[0], x[0, :2]).shape == (2,)
    assert longer(x[0, :1]).shape == (0,)
    with pytest.raises(
        KernelError,
        match=r"dim 0 is 3, but L \+ 1 is 1 by the absence of 'm' \(m\[L\]:T\?\)",
    ):
        longer(x[0])


def test_files_and_exports(tmp_path: Path) -> None:
    again = Op.from_json(json.loads(json.dumps(joined.to_json())))
    assert again.digest == joined.digest
    x = np.ones((2, 3), np.float32)
    assert again(x)[0].shape == (2, 3) and again(x, x)[0].shape == (2, 6)
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda x, left: joined(x, left), mx.ones((2, 3)), mx.ones((2, 2)),
                       shapeless=True)  # fmt: skip
    imported = ferrule.import_function(path)
    for length in (2, 0, 4):
        left = np.full((1, length), 3, np.float32)
        want, how = expected(x[:1], left, None)
        y, said = imported(mx.array(x[:1]), mx.array(left))
        assert y.tolist() == want.tolist() and said.tolist() == [how]


def test_a_file_of_metal_reads_the_dim(tmp_path: Path) -> None:
    path = tmp_path / "k.metal"
    path.write_text(
        "kernel void f(device const float* x [[buffer(0)]], device const float* m [[buffer(1)]],"
        " constant bool& has_m [[buffer(2)]], constant int& L [[buffer(3)]],"
        " device float* y [[buffer(4)]], uint i [[thread_position_in_grid]])"
        " { y[i] = x[i] + float(L) + (has_m ? m[0] : 0.0f); }".replace(
            " constant bool& has_m [[buffer(2)]],", ""
        )
    )
    op = ferrule.op(
        "reads", "x[N]:float32, m[L]:float32? -> y[N]:float32", metal=path, grid="N", threadgroup=8
    )
    x = np.zeros(2, np.float32)
    assert op(x).tolist() == [0, 0] and op(x, x[:1] + 3).tolist() == [4, 4]


def test_what_no_present_input_has_is_not_split() -> None:
    op = ferrule.op(
        "dotted", "x[B,K]:T, a[B,L]:T?, b[L]:T? -> y[B]:T", partial_sums="L", batch="B",
        reference=lambda x, a, b: x.sum(1),
    )  # fmt: skip
    assert [s.dim for s in splits(op, (2, 2, 1))] == ["B", "L"]
    assert [s.dim for s in splits(op, (2, None, None))] == ["B"]
    assert [(s.dim, s.inputs) for s in splits(op, (2, None, 1))] == [
        ("B", (0, None, None)), ("L", (None, None, 0)),
    ]  # fmt: skip
