"""Launches of no thread: then a threadgroup may be 0 along an axis, as `min(x.size, 256)` is for an
empty array."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError

I = "uint3 p = thread_position_in_grid; "  # noqa: E741
DOUBLE = ferrule.op(
    "double", "x[A,B]:T -> y[A,B]:T", metal=I + "y[p.y * B + p.x] = x[p.y * B + p.x] * 2;",
    grid=("B", "A", 1), threadgroup=("min(B, 16)", "min(A, 8)", 1),
)  # fmt: skip
FILLED = ferrule.op(
    "filled", "x[N]:T -> y[3]:T", metal=I + "y[p.x] = x[p.x];", grid="min(N, 3)",
    threadgroup="min(N, 2)", init_value=7,
)  # fmt: skip
UNWRITTEN = ferrule.op(
    "unwritten", "x[N]:T -> y[3]:T", metal=I + "y[p.x] = x[p.x];", grid="min(N, 3)",
    threadgroup="min(N, 2)",
)  # fmt: skip
SHORT = ferrule.op(
    "short", "x[N]:T -> y[N+1]:T", metal=I + "y[p.x] = 1;", grid="N+1", threadgroup="min(N, 64)"
)
BELOW = ferrule.op(
    "below", "x[N]:T -> y[N]:T", metal=I + "y[p.x] = 1;", grid="N", threadgroup="N - 1"
)
WIDE = ferrule.op(
    "wide", "x[N]:T -> y[N]:T", metal=I + "y[p.x] = 1;", grid="N", threadgroup=("N", 1025, 1)
)
PLAIN = ferrule.metal_kernel(
    "plain", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] * 2;"
)


def numpy_ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def torch_ones(*shape: int) -> Any:
    return pytest.importorskip("torch").ones(shape)


def mlx_ones(*shape: int) -> Any:
    return pytest.importorskip("mlx.core").ones(shape)


HOSTS = pytest.mark.parametrize("ones", [numpy_ones, torch_ones, mlx_ones])


def plain(x: Any, group: Any = ("min(x.size, 256)", 1, 1), **more: Any) -> Any:
    call: dict[str, Any] = {"grid": ("x.size", 1, 1), "output_shapes": ["x.shape"], **more}
    (y,) = PLAIN(inputs=[x], threadgroup=group, output_dtypes=[x.dtype], **call)
    return y


@HOSTS
@given(st.integers(0, 3), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_arrays_of_any_size(ones: Callable[..., Any], a: int, b: int) -> None:
    for found in (DOUBLE(ones(a, b)), plain(ones(a, b))):
        assert tuple(found.shape) == (a, b)
        assert found.tolist() == [[2.0] * b] * a


@HOSTS
def test_what_no_thread_writes_is_filled_or_refused(ones: Callable[..., Any]) -> None:
    assert FILLED(ones(0)).tolist() == [7, 7, 7]
    assert FILLED(ones(2)).tolist() == [1, 1, 7]
    found = plain(ones(0), init_value=7, output_shapes=[(0,)], grid=(0, 1, 1), group=(0, 1, 1))
    assert found.shape == (0,)
    with pytest.raises(KernelError, match=r"runs no thread, but output 'y' of shape \(3,\)"):
        UNWRITTEN(ones(0))
    with pytest.raises(KernelError, match=r"runs no thread, but output 'y' of shape \(3,\)"):
        plain(ones(0), output_shapes=[(3,)])


@HOSTS
def test_what_is_still_refused(ones: Callable[..., Any]) -> None:
    with pytest.raises(KernelError, match=r"`threadgroup`.*is \(0, 1, 1\).*positive sizes"):
        SHORT(ones(0))
    with pytest.raises(KernelError, match=r"`threadgroup`.* -1 .*0 to 2147483647"):
        BELOW(ones(0))
    with pytest.raises(KernelError, match=r"`threadgroup`.*1024 threads at most"):
        WIDE(ones(0))
    for group, says in (
        ((0, 1, 1), "from 1 to"), ((1, -1, 1), "from 1 to"), (("x.size - 4", 1, 1), "from 1 to"),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=f"`threadgroup` of kernel 'plain': got .*{says}"):
            plain(ones(4), group=group)
    with pytest.raises(KernelError, match=r"got \(-4, 1, 1\), expected three integers from 0 to"):
        plain(ones(0), group=("x.size - 4", 1, 1))
    with pytest.raises(KernelError, match="at most 1024"):
        plain(ones(0), group=(0, 1025, 1))


@HOSTS
def test_numbers(ones: Callable[..., Any]) -> None:
    for group in ((0, 1, 1), (0, 0, 0), (1, 0, 1)):
        sizes = {"grid": (0, 1, 1), "output_shapes": [(0, 4)]}
        assert tuple(plain(ones(0, 4), group=group, **sizes).shape) == (0, 4)


def test_torch_compiles_it_for_every_size() -> None:
    torch = pytest.importorskip("torch")
    f = torch.compile(lambda x: DOUBLE(x) + 1, backend="aot_eager", dynamic=True, fullgraph=True)
    for a, b in ((2, 3), (0, 5), (4, 0), (7, 30)):
        x = torch.ones(a, b)
        assert torch.equal(f(x), 2 * x + 1)


def test_mlx_compiles_it_for_every_size() -> None:
    mx = pytest.importorskip("mlx.core")
    f = mx.compile(lambda x: (DOUBLE(x) + 1, plain(x) + 1), shapeless=True)
    for a, b in ((2, 3), (0, 5), (4, 0), (7, 30)):
        for found in f(mx.ones((a, b))):
            assert mx.array_equal(found, mx.full((a, b), 3))


def test_files_of_mlx_hold_a_threadgroup_of_threads() -> None:
    """MLX divides by what stands there."""
    mx = pytest.importorskip("mlx.core")
    from ferrule.hosts.mlx import build as mlx_build
    from ferrule.hosts.mlx import file as mlx_file

    if not mlx_build.at_least(0, 32):
        pytest.skip("MLX exports kernels without Metal from 0.32.0 on")
    from mlx_files import exported, kernels

    lines = mlx_build.loaded().fr_mlx_layout().decode().splitlines()
    layout = dict(one.split(" ") for one in lines)["CustomKernel"]

    def f(x: Any) -> Any:
        numbers = {"grid": (0, 1, 1), "output_shapes": [x.shape]}
        return DOUBLE(x), plain(x), plain(x, group=(0, 1, 1), **numbers)

    file = exported(f, mx.ones((0, 3)))
    states = [mlx_file.Reader(io.BytesIO(one.state)).value(layout, "") for one in kernels(file)]
    assert [state[3] for state in states] == [(3, 1, 1), (1, 1, 1), (1, 1, 1)]
    again = ferrule.import_function(file)
    assert [one.shape for one in again(mx.ones((0, 3)))] == [(0, 3)] * 3
    file = exported(lambda x: (DOUBLE(x), plain(x)), mx.ones((0, 3)), shapeless=True)
    again = ferrule.import_function(file)
    for shape in ((0, 3), (2, 3), (0, 0), (5, 0)):
        for found in again(mx.ones(shape)):
            assert mx.array_equal(found, mx.full(shape, 2))
