"""Outputs, launches, templates and conditions that depend on a call's integers, with every host."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ferrule
from ferrule import KernelError, KernelTypeError, Op, RuleError

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# The first k of each row; more than FEW of them, and those of a cleared row, another way.
first = ferrule.op(
    "first", "x[*S,N]:T, k:int32, clear:bool -> y[*S,k]:T, launch[*S,2]:int32 where k <= N",
    metal="""
        uint2 i = thread_position_in_grid.xy;
        if (i.x < uint(k)) y[i.y * k + i.x] = CLEAR ? T(0) : x[i.y * N + i.x];
        if (i.x == 0) { launch[2 * i.y] = threads_per_threadgroup.x; launch[2 * i.y + 1] = FEW; }
    """,
    grid=("max(k, 1)", "x.size // N"),
    threadgroup="min(max(k, 1), 4)", init_value=0,
    template={"FEW": "k if k < 3 else 3", "CLEAR": "clear == 1"},
)  # fmt: skip

head = ferrule.op(
    "head", "x[N]:float32, k:int64 -> y[k]:float32 where 0 <= k, k <= N",
    metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
    grid="k", threadgroup=32,
)  # fmt: skip
head_vjp = ferrule.op(
    "head_vjp", "x[N]:float32, k:int64, cotangent[k]:float32 -> x_grad[N]:float32",
    metal="""
        uint i = thread_position_in_grid.x;
        x_grad[i] = i < uint(k) ? cotangent[i] : 0.0f;
    """,
    grid="N", threadgroup=32,
)  # fmt: skip
head.def_vjp(head_vjp)


def expected(x: Any, k: int, clear: bool) -> Any:
    return np.zeros_like(x[..., :k]) if clear else x[..., :k]


@pytest.mark.parametrize("make", [np.asarray, torch.asarray, mx.array])
def test_each_host(make: Any) -> None:
    for shape in ((5,), (2, 3, 6), (0, 7)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        for k, clear in ((1, False), (4, False), (5, True), (0, False), (4, False)):
            y, launch = first(make(x), k, clear)
            assert np.array_equal(np.asarray(y), expected(x, k, clear))
            assert (np.asarray(launch) == [min(max(k, 1), 4), min(k, 3)]).all()
        with pytest.raises((KernelError, ValueError), match=r"wants k <= N.* k = 9"):
            mx.eval(first(make(x), 9, False))


@pytest.mark.parametrize("make", [np.asarray, torch.asarray, mx.array])
def test_sizes_below_zero_are_refused(make: Any) -> None:
    x = make(np.ones(4, np.float32))
    for _ in range(2):  # before and after C knows the kernel
        with pytest.raises((KernelError, ValueError), match=r"output 'y' of op 'first': k is -2"):
            mx.eval(first(x, -2, True))
        mx.eval(first(x, 2, True))


def test_numbers_make_no_graphs_of_their_own() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def some(x: torch.Tensor, k: int) -> Any:
        return first(x, k, False)[0] + 1, first(x, x.shape[-1] - k, False)[0]

    op = ferrule.op(
        "plain", "x[N]:float32, k:int32 -> y[k]:float32",
        metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        grid="k", threadgroup=32,
    )  # fmt: skip
    compiled = torch.compile(
        lambda x, k: op(x, k) + op(x, x.shape[0] - k).sum(), fullgraph=True, backend=counter,
        dynamic=True,
    )  # fmt: skip
    for size, k in ((9, 4), (12, 5), (31, 7)):
        x = torch.arange(float(size))
        assert torch.equal(compiled(x, k), x[:k] + x[: size - k].sum())
    assert counter.frame_count == 1
    x = torch.arange(12.0)
    # A template makes kernels, and so needs to be known: those calls have graphs of their own.
    with_template = torch.compile(lambda *a: some(*a), fullgraph=True, backend="aot_eager")
    for k in (2, 5):
        assert torch.equal(with_template(x, k)[0], x[:k] + 1)


def test_sizes_out_of_a_tensor() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def some(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0])
        return head(x, k) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for k in (3, 7):
            assert torch.equal(some(torch.ones(8), torch.tensor(k)), torch.full((k,), 2.0))


def test_derivatives() -> None:
    x = torch.arange(6.0, requires_grad=True)
    head(x, 4).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1, 1, 0, 0]
    found = mx.grad(lambda x: head(x, 2).sum())(mx.arange(6.0))
    assert found.tolist() == [1, 1, 0, 0, 0, 0]
    ferrule.check_grad(head, torch.arange(6.0), 4)
    with pytest.raises(KernelError, match="dim 0 is 3, but k is 4 by number 'k'"):
        head_vjp(np.ones(6, np.float32), 4, np.ones(3, np.float32))


def test_shapeless_graphs_of_mlx() -> None:
    compiled = mx.compile(lambda x: first(x, 3, False)[0] * 2, shapeless=True)
    for shape in ((4,), (2, 5), (2, 9)):
        x = np.arange(float(np.prod(shape))).astype(np.float32).reshape(shape)
        assert np.array_equal(np.array(compiled(mx.array(x))), x[..., :3] * 2)


def test_torchs_own_checks() -> None:
    torch.library.opcheck(first.torch_op, (torch.rand(2, 6), 4, True))
    torch.library.opcheck(head.torch_op, (torch.rand(6, requires_grad=True), 4))


def test_exports_keep_a_dynamic_number(tmp_path: Any) -> None:
    class Heads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return head(x, x.shape[0] - 2)

    program = torch.export.export(
        Heads(), (torch.ones(8),), dynamic_shapes=({0: torch.export.Dim("n", min=4)},)
    )
    for size in (10, 31):
        assert program.module()(torch.ones(size)).shape == (size - 2,)


def test_batches() -> None:
    x = torch.rand(3, 2, 6)
    assert torch.equal(torch.vmap(lambda x: first(x, 4, False)[0])(x), x[..., :4])
    assert np.array_equal(
        np.array(mx.vmap(lambda x: first(x, 4, False)[0])(mx.array(x.numpy()))), x[..., :4]
    )


def test_conditions_of_implementations() -> None:
    def by_python(x: Any, k: int) -> Any:
        return x[:k] + 1

    op = ferrule.op(
        "chosen", "x[N]:float32, k:int32 -> y[k]:float32", reference=by_python,
        cuda=ferrule.cuda_body(
            "y[blockIdx.x] = x[blockIdx.x];", grid="k", threadgroup=1, when="k <= 4"
        ),
    )  # fmt: skip
    (body, _) = op.implementations
    said = [op.rule.bind("chosen", [(9,), ()], ["float32", None], numbers={"k": k}) for k in (3, 5)]
    assert [body.holds(binding) for binding in said] == [True, False]


def test_it_survives() -> None:
    for again in (
        pickle.loads(pickle.dumps(first)),  # noqa: S301
        copy.copy(first),
        Op.from_json(json.loads(json.dumps(first.to_json()))),
    ):  # fmt: skip
        assert again.digest == first.digest
        assert again(np.arange(5), 2, False)[0].tolist() == [0, 1]


def test_what_is_refused() -> None:
    with pytest.raises(RuleError, match=r"there is no dim 'eps'; the rule binds N"):
        ferrule.op(
            "bad", "x[N]:T, eps:float32 -> y[N]:T", metal="y[0] = x[0];", grid="eps", threadgroup=1
        )
    with pytest.raises(RuleError, match=r"k:float32 is a float.*; declare k:int32"):
        ferrule.op(
            "bad", "x[N]:T, k:float32 -> y[k]:T", metal="y[0] = x[0];", grid="N", threadgroup=1
        )
    with pytest.raises(KernelError, match=r"`grid` of op 'first': max\(k, 1\) is 3000000000"):
        wide = ferrule.op(
            "first", "x[N]:T, k:int64 -> y[1]:T", metal="y[0] = x[k];", grid="max(k, 1)",
            threadgroup=1,
        )  # fmt: skip
        wide(np.ones(4, np.float32), 3_000_000_000)


@pytest.mark.parametrize("array", [np.ones(2, np.float32), torch.ones(2), mx.ones(2)], ids=type)
def test_what_no_memory_holds(array: Any) -> None:
    def op(outputs: str) -> Op:
        return ferrule.op(
            "huge", f"x[N]:T, k:int64 -> {outputs}", metal="y[0] = x[0];", grid=1, threadgroup=1
        )

    for outputs, k, shape in (
        ("y[k*k]:T", 2**40, f"({2**80},)"), ("y[k,k]:T", 2**40, f"({2**40}, {2**40})"),
        ("z[1]:T, y[2*k]:T", 2**60, f"({2**61},)"), ("y[k*k,0]:T", 2**40, f"({2**80}, 0)"),
    ):  # fmt: skip
        words = rf"output 'y' of op 'huge' .* would have the shape {re.escape(shape)}, of more byt"
        with pytest.raises(KernelError, match=words):
            op(outputs)(array, k)
    with pytest.raises(
        KernelTypeError, match=r"'clear' .*got 2 of .*expected True or False: clear"
    ):
        first(array, 1, 2)
    if isinstance(array, torch.Tensor):
        with pytest.raises(RuntimeError, match=rf"output 'y' of shape \({2**50}, 2\) \(no memory"):
            op("y[k,2]:T")(array, 2**50)
        with pytest.raises(KernelError, match=rf"x \(2,\), k = {2**40}; expected 16 dims at most"):
            op("y[N]:T where k * k > 0")(array, 2**40)
