"""Warnings point at the person's line that led to them, whatever library stands between."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrule

BODY = """
    uint i = thread_position_in_grid.x;
    threadgroup float s[9000];  // more than Apple's GPUs have
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[i];
"""
X = np.ones(4, np.float32)
LAUNCH: dict[str, Any] = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
_names = (f"k{i}" for i in itertools.count())  # a kernel warns once


def op(**more: Any) -> ferrule.Op:
    rule = "x[N]:float32 -> y[N]:float32"
    return ferrule.op(next(_names), rule, metal=BODY, grid="N", threadgroup=4, **more)


def kernel() -> Callable[[Any, Any], Any]:
    made = ferrule.metal_kernel(next(_names), ["x"], ["y"], BODY)

    def call(x: Any, dtype: Any) -> Any:
        return made(inputs=[x], output_dtypes=[dtype], output_shapes=[(4,)], **LAUNCH)  # here

    return call


def numpy_kernel() -> None:
    kernel()(X, X.dtype)


def dictionary() -> None:
    made = ferrule.metal_kernel(next(_names), source=BODY)
    shapes, dtypes = {"y": (4,)}, {"y": X.dtype}
    made(inputs={"x": X}, output_shapes=shapes, output_dtypes=dtypes, **LAUNCH)  # here


def numpy_op() -> None:
    op()(X)  # here


def torch_kernel() -> None:
    torch = pytest.importorskip("torch")
    kernel()(torch.ones(4), torch.float32)


def torch_op() -> None:
    torch = pytest.importorskip("torch")
    op()(torch.ones(4))  # here


def overload() -> None:
    torch = pytest.importorskip("torch")
    op().torch_op(torch.ones(4))  # here


def differentiated() -> None:
    torch = pytest.importorskip("torch")
    one = op()
    one.def_vjp(lambda primals, cotangents, outputs: (cotangents[0],))
    one(torch.ones(4, requires_grad=True))  # here


def module() -> None:
    torch = pytest.importorskip("torch")
    one = op()

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return one(x)  # here

    torch.nn.Sequential(Model())(torch.ones(4))


def batched() -> None:
    torch = pytest.importorskip("torch")
    torch.vmap(op(batch="N"))(torch.ones(3, 4))  # here


def compiled() -> None:
    torch = pytest.importorskip("torch")
    torch.compile(op(), backend="eager", fullgraph=True)(torch.ones(4))  # here


def compiled_by_aot() -> None:
    torch = pytest.importorskip("torch")
    one = op()
    torch.compile(lambda x: one(x) + 1, backend="aot_eager")(torch.ones(4))  # here


def mlx_kernel() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    kernel()(mx.ones(4), mx.float32)


def mlx_op() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    mx.eval(op()(mx.ones(4)))  # here


@pytest.mark.parametrize(
    "way",
    [
        numpy_kernel, dictionary, numpy_op, torch_kernel, torch_op, overload, differentiated,
        module, batched, compiled, compiled_by_aot, mlx_kernel, mlx_op,
    ],
    ids=lambda way: way.__name__,
)  # fmt: skip
def test_warnings_point_at_the_line(way: Callable[[], None]) -> None:
    with pytest.warns(ferrule.PortabilityWarning) as caught:
        way()
    for one in caught:
        if issubclass(one.category, ferrule.FerruleWarning):
            assert "# here" in linecache.getline(one.filename, one.lineno), (
                one.filename,
                one.lineno,
            )


def test_a_warning_without_such_a_line() -> None:
    """Where nothing but libraries called, it points at what called, and is given all the same."""
    space = {"__name__": "torch.somewhere", "warn": ferrule.errors.warn, "kind": UserWarning}
    with pytest.warns(UserWarning, match="said"):
        exec(compile("warn('said', kind)", "there.py", "exec"), space)  # noqa: S102
