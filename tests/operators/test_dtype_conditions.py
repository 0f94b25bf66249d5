"""Sizes, launches and template parameters that depend on dtypes, with every host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch

import ferrule
from ferrule import KernelError, Op, RuleError

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

packed = ferrule.op(
    "packed", "x[N]:T, n[M]:U -> y[N // 2 if T == float16 else N]:T, z[2]:int32",
    metal="""
        uint i = thread_position_in_grid.x;
        if (i < uint(N / PART)) y[i] = WIDE ? T(x[i] + T(100)) : x[i];
        if (i == 0) { z[0] = threads_per_threadgroup.x; z[1] = threads_per_grid.x; }
    """,
    grid="N if T in (float32, bfloat16) else N * 2",
    threadgroup="2 if T == float32 else 4 if U not in (float32, int8) else 8",
    template={"WIDE": "T == float32 and U == int8", "PART": "2 if T == float16 else 1"},
)  # fmt: skip


def expected(x: np.ndarray[Any, Any], n: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    size, t, u = len(x), x.dtype.name, n.dtype.name
    y = x[: size // 2 if t == "float16" else size]
    y = y + 100 if t == "float32" and u == "int8" else y
    threadgroup = 2 if t == "float32" else 8 if u in ("float32", "int8") else 4
    grid = size if t in ("float32", "bfloat16") else 2 * size
    return y, [min(threadgroup, grid), grid]


KINDS = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int32]


@pytest.mark.parametrize("u", [np.float32, np.int8, np.int32])
@pytest.mark.parametrize("t", KINDS)
def test_each_host(t: Any, u: Any) -> None:
    for size in (8, 12, 8):
        x, n = np.arange(size).astype(t), np.zeros(3, u)
        want, sizes = expected(x, n)
        y, z = packed(x, n)
        assert np.array_equal(y, want)
        assert z.tolist() == sizes
        tensors = [torch.from_numpy(a.astype(np.float32)).to(getattr(torch, a.dtype.name))
                   for a in (x, n)]  # fmt: skip
        y, z = packed(*tensors)
        assert np.array_equal(y.float().numpy(), want.astype(np.float32))
        assert z.tolist() == sizes
        arrays = [mx.array(a.astype(np.float32)).astype(getattr(mx, a.dtype.name)) for a in (x, n)]
        y, z = packed(*arrays)
        assert np.array_equal(np.array(y.astype(mx.float32)), want.astype(np.float32))
        assert z.tolist() == sizes


def test_in_graphs() -> None:
    compiled = torch.compile(
        lambda *a: packed(*a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    shapeless = mx.compile(lambda x, n: packed(x, n), shapeless=True)
    for name in ("float16", "float32", "float16"):
        for size in (8, 12):
            x, n = np.arange(size).astype(name), np.zeros(3, np.int8)
            want, sizes = expected(x, n)
            for y, z in (compiled(torch.from_numpy(x), torch.from_numpy(n)),
                         shapeless(mx.array(x), mx.array(n))):  # fmt: skip
                assert np.array_equal(np.asarray(y), want)
                assert z.tolist() == sizes


def test_torchs_own_checks() -> None:
    for kind in (torch.float16, torch.float32):
        args = torch.arange(8).to(kind), torch.zeros(3, dtype=torch.int8)
        torch.library.opcheck(packed.torch_op, args)


def test_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
            return packed(x, n)

    x, n = torch.arange(8).half(), torch.zeros(3, dtype=torch.int8)
    size = torch.export.Dim("size", min=4)
    program = torch.export.export(Model(), (x, n), dynamic_shapes=({0: size}, None))
    y, z = program.module()(torch.arange(12).half(), n)
    assert y.tolist() == list(range(6))
    assert z.tolist() == [8, 24]


def test_dtypes_that_a_rule_wants() -> None:
    op = ferrule.op(
        "wants", "x[N]:T -> y[N]:T where T == float16 or N % 2 == 0", grid="N", threadgroup=8,
        metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
    )  # fmt: skip
    for array in (np.ones(3, np.float32), torch.ones(3), mx.ones(3)):
        with pytest.raises(KernelError, match="wants T == float16 or N % 2 == 0, and the inputs"):
            op(array)
    assert op(np.ones(3, np.float16)).shape == (3,)


def same(grid: Any = "N", **more: Any) -> Op:
    return ferrule.op(
        "same", "x[N]:T, w[N]:float32 -> y[N]:T", metal="y[0] = x[0];", grid=grid, threadgroup=1,
        **more,
    )  # fmt: skip


WRONG = [
    ({"grid": "N if V == float16 else 1"}, "`grid` of op 'same': there is no dtype variable 'V'"),
    ({"grid": "N if N == float16 else 1"}, "`grid` of op 'same': there is no dtype variable 'N'"),
    ({"grid": "N if T == half else 1"}, "`grid` of op 'same': 'T' is a dtype variable; compare it"),
    ({"grid": "N if T in (float16, half) else 1"}, "'half' is no dtype, as float16 is"),
    ({"grid": "T"}, "`grid` of op 'same': 'T' is a dtype variable; compare it: T == float16"),
    ({"template": {"A": "T < float16"}}, "a dtype variable is compared as in T == float16"),
]


@pytest.mark.parametrize(("setting", "words"), WRONG)
def test_what_is_wrong_is_told(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError) as error:
        same(**setting)
    assert words in str(error.value)


def test_a_kernel_without_a_rule_has_no_dtype_variables() -> None:
    kernel = ferrule.metal_kernel(
        name="k", input_names=["x"], output_names=["y"], source="y[0] = x[0];"
    )
    with pytest.raises(KernelError, match="compares 'T' with a dtype, which the sizes of an op's"):
        kernel(
            inputs=[np.ones(3, np.float32)], output_shapes=[("x.size if T == float16 else 1",)],
            output_dtypes=[np.float32], grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip
