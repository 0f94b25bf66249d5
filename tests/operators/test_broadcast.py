"""Outputs whose starred dims are those of several inputs, broadcast, with every host."""

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
from ferrule.operators import batching
from ferrule.operators.sharding import splits
from ferrule.rules.expression import Ints
from strategies import stars

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

matmul = ferrule.op(
    "matmul",
    "a[*S,M,K]:T, b[*R,K,N]:T -> c[*broadcast(S,R),M,N]:T",
    metal="""
        int i = thread_position_in_grid.x, batch = i / (M * N);
        int at_a = 0, at_b = 0, step_a = M * K, step_b = K * N;
        for (int d = 3; d <= metal::max(a_ndim, b_ndim); d++) {
            int of_a = d <= a_ndim ? a_shape[a_ndim - d] : 1;
            int of_b = d <= b_ndim ? b_shape[b_ndim - d] : 1;
            int size = metal::max(of_a, of_b);
            if (of_a > 1) at_a += batch % size * step_a;
            if (of_b > 1) at_b += batch % size * step_b;
            batch /= size, step_a *= of_a, step_b *= of_b;
        }
        int row = i / N % M, column = i % N;
        T sum = 0;
        for (int k = 0; k < K; k++) sum += a[at_a + row * K + k] * b[at_b + k * N + column];
        c[i] = sum;
    """,
    grid="c.size", threadgroup=64, batch="M N", partial_sums="K",
)  # fmt: skip


def multiplied(x: Any, scale: Any, y: Any) -> Any:
    return torch.stack([x * scale * row for row in y]), x * scale + y.sum(0)


outer = ferrule.adopt(
    "outer", "x[*S]:T, scale[*S]:T, y[A,*R]:T -> z[A,*broadcast(S,R)]:T, w[*broadcast(R,S)]:T",
    run=multiplied,
)  # fmt: skip
Array = np.ndarray[Any, Any]


def numbers(*shape: int, first: int = 0) -> Array:
    return (np.arange(np.prod(shape, dtype=int)) % 17 + first).astype(np.float32).reshape(shape)


@settings(deadline=None, max_examples=40)
@given(stars(), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_each_host(found: Any, m: int, k: int, n: int) -> None:
    a, b = numbers(*found["S"], m, k), numbers(*found["R"], k, n, first=3)
    want = a @ b
    assert np.array_equal(matmul(a, b), want)
    assert torch.equal(matmul(torch.tensor(a), torch.tensor(b)), torch.tensor(want))
    c = matmul(mx.array(a), mx.array(b))
    assert c.shape == want.shape and np.array_equal(np.array(c), want)


@given(*[st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3).map(tuple)] * 2)
def test_sizes_broadcast_as_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        want = np.broadcast_shapes(a, b)
    except ValueError:
        want = None
    assert Ints.broadcast(a, b) == want == Ints.broadcast(b, a)
    x, y = numbers(*a, 2, 0), numbers(*b, 0, 1)
    for make in (np.array, torch.tensor):
        if want is not None:
            assert tuple(matmul(make(x), make(y)).shape) == (*want, 2, 1)
            continue
        with pytest.raises(KernelError, match="which do not broadcast"):
            matmul(make(x), make(y))


def test_the_error_names_both_inputs() -> None:
    with pytest.raises(KernelError) as raised:
        matmul(np.ones((2, 3, 4, 5)), np.ones((2, 5, 6)))
    assert str(raised.value) == (
        "[op] output 'c' of op 'matmul' (c[*broadcast(S,R),M,N]:T): *S is (2, 3) by input 'a' of "
        "shape (2, 3, 4, 5) (a[*S,M,K]:T) and *R is (2,) by input 'b' of shape (2, 5, 6) "
        "(b[*R,K,N]:T), which do not broadcast; expected the same sizes, or 1, counted from the "
        "last."
    )
    compiled = torch.compile(lambda a, b: matmul(a, b), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"\*S is \(2, 3\) by input 'a'.* do not broadcast"):
        compiled(torch.ones(2, 3, 4, 5), torch.ones(2, 5, 6))
    with pytest.raises(ValueError, match=r"\*S is \(2, 3\) by input 'a'.* do not broadcast"):
        matmul(mx.ones((2, 3, 4, 5)), mx.ones((2, 5, 6)))


def test_graphs_serve_all_sizes() -> None:
    compiled = torch.compile(
        lambda *a: matmul(*a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    shapeless = mx.compile(lambda a, b: matmul(a, b), shapeless=True)
    for s, r in (((3, 4), (4,)), ((5, 2), (2,)), ((3, 1), (4,)), ((7, 6), (6,))):
        a, b = numbers(*s, 2, 3), numbers(*r, 3, 2)
        assert np.array_equal(compiled(torch.tensor(a), torch.tensor(b)).numpy(), a @ b)
        assert np.array_equal(np.array(shapeless(mx.array(a), mx.array(b))), a @ b)


def test_sizes_are_guarded_as_torchs_own_broadcasting_does() -> None:
    """No more graphs than for torch's own, which tells 1 from other sizes."""
    counts = []
    for function in (matmul, torch.matmul):
        counter = torch._dynamo.testing.CompileCounter()
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
        for size in (3, 4, 5, 1, 7):
            compiled(torch.ones(size, 2, 3), torch.ones(4, 1, 3, 2))
        for size in (3, 5, 1):
            compiled(torch.ones(size, 2, 3), torch.ones(size, 3, 2))
        counts.append(counter.frame_count)
    assert 1 < counts[0] <= counts[1]


def test_sizes_that_are_the_same_or_alone_are_not_guarded() -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return matmul(a, a.mT), matmul(a, b), matmul(b, a)

    size = torch.export.Dim("size", min=0)  # a guard on 1 would narrow it
    shapes = ({0: size}, None)
    program = torch.export.export(
        Model(), (torch.ones(3, 2, 2), torch.ones(1, 2, 2)), dynamic_shapes=shapes
    )
    for n in (0, 1, 5):
        a, b = torch.tensor(numbers(n, 2, 2)), torch.tensor(numbers(1, 2, 2))
        for found, want in zip(program.module()(a, b), (a @ a.mT, a @ b, b @ a), strict=True):
            assert torch.equal(found, want)


def test_sizes_that_only_running_tells() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.nonzero().to(torch.float32)[:, None, :]  # (u, 1, 1)
        return matmul(a, y)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for mask in ([0, 1, 1], [1, 1, 1], [0, 0, 0]):
            x, y = torch.tensor(mask), torch.ones(1, 1, 2)
            assert torch.equal(compiled(x, y), call(x, y))


def test_exported(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return matmul(a, b)

    a, b = torch.ones(3, 4, 2, 5), torch.ones(4, 5, 2)
    batch = {0: torch.export.Dim("outer", min=2), 1: torch.export.Dim("inner", min=2)}
    program = torch.export.export(Model(), (a, b), dynamic_shapes=(batch, {0: batch[1]}))
    ferrule.save(program, str(tmp_path / "m.pt2"))
    again = ferrule.load(str(tmp_path / "m.pt2")).module()
    a, b = torch.tensor(numbers(2, 6, 2, 5)), torch.tensor(numbers(6, 5, 2))
    assert torch.equal(again(a, b), a @ b)
    saved = Op.from_json(json.loads(json.dumps(matmul.to_json())))
    assert saved.digest == matmul.digest and saved.rule == matmul.rule
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda a, b: matmul(a, b), mx.ones((3, 2, 5)), mx.ones((5, 2)),
                       shapeless=True)  # fmt: skip
    c = ferrule.import_function(path)(mx.array(numbers(4, 2, 5)), mx.array(numbers(5, 2)))[0]
    assert np.array_equal(np.array(c), numbers(4, 2, 5) @ numbers(5, 2))


@settings(deadline=None, max_examples=60)
@given(stars(), st.sampled_from([(0, None), (None, 0), (0, 0)]), st.data())
def test_batches_are_the_calls_one_by_one(found: Any, where: Any, data: Any) -> None:
    """Also where the batch is 1, or like a size that it must not be broadcast with."""
    size = data.draw(st.integers(1, 4))

    def given_batch(shape: tuple[int, ...], is_batched: bool, first: int) -> tuple[Any, Any]:
        if not is_batched:
            return torch.tensor(numbers(*shape, first=first)), None
        axis = data.draw(st.integers(0, len(shape)))
        return torch.tensor(numbers(*shape[:axis], size, *shape[axis:], first=first)), axis

    a, at_a = given_batch((*found["S"], 2, 3), where[0] is not None, 1)
    b, at_b = given_batch((*found["R"], 3, 2), where[1] is not None, 5)
    want = torch.vmap(torch.matmul, (at_a, at_b))(a, b)
    before = matmul.counts["vmap loop"]
    assert torch.equal(torch.vmap(lambda a, b: matmul(a, b), (at_a, at_b))(a, b), want)
    assert matmul.counts["vmap loop"] == before
    c = mx.vmap(lambda a, b: matmul(a, b), (at_a, at_b))(mx.array(a.numpy()), mx.array(b.numpy()))
    assert np.array_equal(np.array(c).reshape(want.shape), want.numpy())
    x, at_x = given_batch(found["S"], where[0] is not None, 1)
    y, at_y = given_batch((2, *found["R"]), where[1] is not None, 2)
    scale = torch.tensor(numbers(*found["S"], first=4))
    got = torch.vmap(lambda *v: outer(*v), (at_x, None, at_y))(x, scale, y)
    one = torch.vmap(multiplied, (at_x, None, at_y))(x, scale, y)
    assert all(torch.equal(*pair) for pair in zip(got, one, strict=True))
    assert not outer.counts["vmap loop"]


@settings(deadline=None, max_examples=50)
@given(stars(), st.data())
def test_parts_make_up_the_whole(found: Any, data: Any) -> None:
    arrays = numbers(*found["S"], 2, 3), numbers(*found["R"], 3, 4)
    whole = arrays[0] @ arrays[1]
    ranks = len(found["S"]), len(found["R"])
    ways = splits(matmul, [array.ndim for array in arrays])
    assert len(ways) == 3 + abs(ranks[0] - ranks[1])
    for split in ways:
        axes = list(zip(arrays, split.inputs, strict=True))
        size = next(array.shape[axis] for array, axis in axes if axis is not None)
        at = data.draw(st.integers(0, size))
        parts = []
        for part in (slice(at), slice(at, None)):
            some = [x if axis is None else x[(slice(None),) * axis + (part,)] for x, axis in axes]
            parts.append(some[0] @ some[1])
        axis = split.outputs[0]
        joined = parts[0] + parts[1] if axis is None else np.concatenate(parts, axis)
        assert np.array_equal(joined, whole)


@pytest.mark.parametrize(
    ("rule", "split"),
    [
        ("x[*S]:T, y[*R]:T -> z[*broadcast(S,R)]:T, w[*S]:T", ["*S"]),
        ("x[*S]:T, y[*R]:T -> z[*broadcast(S,R),x.ndim]:T", ["*S"]),
        ("x[*S]:T, y[*R]:T -> z[*broadcast(S,R)]:T where x.size < 9", []),
        ("x[*S]:T, y[*R]:T, v[*Q]:T -> z[*broadcast(S,R)]:T, w[*broadcast(S,Q)]:T", ["*S"]),
        ("x[*S]:T, y[*R]:T -> z[*broadcast(S,R)]:T, w[1]:T", []),
    ],
)
def test_what_is_not_known_to_be_apart_is_not_batched(rule: str, split: list[str]) -> None:
    op = ferrule.op("f", rule, run=print)
    ranks = [2, 1, 1][: len(op.rule.inputs)]
    assert [way.dim for way in splits(op, ranks)] == split
    assert batching._broadcast(op, [0, None, None][: len(ranks)]) is None
