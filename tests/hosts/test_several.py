"""An op that is called with arrays of several libraries in one process."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import ferrule
from ferrule.tools import fastcall

INDEX = "uint i = thread_position_in_grid.x;"
SIZES: Any = {"grid": "N", "threadgroup": 32}

paired = ferrule.op(
    "paired", "x[N]:T, w[N]:T -> y[N]:T", metal=f"{INDEX} y[i] = x[i] + w[i];", **SIZES
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_library_sends_the_calls_of_others_through_python(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ferrule.op(
        f"in_turn_{''.join(map(str, order))}",
        "n:float32, x[N]:T -> y[N]:T",
        metal=f"{INDEX} y[i] = x[i] * T(n);",
        **SIZES,
    )
    arrays = [np.ones(3, np.float32), torch.ones(3), mx.ones(3)]
    if (mx.default_device() == mx.gpu) or fastcall.library() is None:
        pytest.skip("calls run in C on the CPU, where that was built")
    for i in order:
        assert op(2.0, arrays[i]).tolist() == [2, 2, 2]
    monkeypatch.setattr(op, "_register", None)  # what calls in Python begin with
    for i in order:
        assert op(2.0, arrays[i]).tolist() == [2, 2, 2]
        assert op(x=arrays[i], n=3.0).tolist() == [3, 3, 3]
    monkeypatch.undo()
    op.def_vjp(lambda primals, cotangents, outputs: (None, cotangents[0] * 7))
    for i in order:
        assert op(2.0, arrays[i]).tolist() == [2, 2, 2]
    x = torch.ones(3, requires_grad=True)
    op(2.0, x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [7, 7, 7]
    for mixed in itertools.permutations(arrays, 2):
        with pytest.raises(ferrule.KernelError, match="expected arrays of one library"):
            paired(*mixed)
