"""What an eager call of an op costs, against operators of NumPy, of torch and of its users."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

import numpy as np

import ferrule

from .timing import Bench, Peer

# No more than torch's own operator, called the same way, and 15 %.
AS_QUICK = 1 / 1.15


def exp() -> ferrule.Op:
    """exp of each element."""
    return ferrule.op(
        "bench_exp", "x[*S]:T -> y[*S]:T",
        metal="uint i = thread_position_in_grid.x; y[i] = metal::exp(x[i]);", grid="x.size",
        threadgroup=256,
    )  # fmt: skip


def operators(x: Any) -> list[Peer]:
    """The same by operators of torch: its own, and such as users define in Python."""
    import torch

    own, custom = torch.ops.aten.exp.default, _custom()
    return [
        Peer("torch.ops.aten.exp.default", lambda: own(x), AS_QUICK),
        Peer("torch.exp", lambda: torch.exp(x)),
        Peer("torch.library.custom_op of torch.exp", lambda: custom(x)),
    ]


def packaged(op: ferrule.Op, x: Any, calls: int) -> Any:
    """A package of AOTInductor that calls an op some times, each with the last result."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            for _ in range(calls):
                x = op(x)
            return x

    program = torch.export.export(Model(), (x,))
    with tempfile.TemporaryDirectory() as folder:
        path = ferrule.package(program, f"{folder}/model.pt2")
        return ferrule.load_package(path)


@lru_cache(maxsize=1)
def _custom() -> Any:
    import torch

    return torch.library.custom_op(
        "ferrule_bench::exp", torch.exp, mutates_args=(), schema="(Tensor x) -> Tensor"
    )


def on_cpu(bench: Bench) -> None:
    """One call with 16 elements: what is not the kernel's work."""
    op, a = exp(), np.ones((4, 4), np.float32)
    bench.compare(
        "one call of an op, exp of 16 float32, NumPy",
        lambda: op(a),
        [Peer("np.exp", lambda: np.exp(a))],
    )
    if not bench.installed("torch"):
        return
    import torch

    x = torch.randn(4, 4)
    with torch.no_grad():
        bench.compare("one call of an op, exp of 16 float32", lambda: op(x), operators(x))
