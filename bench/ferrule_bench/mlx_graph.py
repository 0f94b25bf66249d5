"""What kernels and ops cost as nodes of MLX's graphs, on MLX's default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ferrule

from . import mlx_lm
from .timing import Bench, Peer

SIZE = 1024
# Wanted of a chain on a GPU: 3.0 us a call where mx.fast.cuda_kernel takes 3.8 and mx.exp 1.53; to
# build a node: 0.6 us where mx.add takes 0.39; on a CPU no more than MLX's own.
CHAIN, CHAIN_OF_EXP, BUILD, ON_CPU = 3.8 / 3.0, 1.53 / 3.0, 0.39 / 0.6, 1.0


def nodes(bench: Bench) -> None:
    """One node that is built and let go; and a chain of them, each of the last one's result."""
    if not bench.installed("mlx"):
        return
    import mlx.core as mx

    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    x, half = mx.ones(SIZE), mx.array(0.5)
    text = "uint i = thread_position_in_grid.x; y[i] = x[i] * T(0.5);"
    op = ferrule.op(
        "bench_half", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=256, metal=text
    )  # fmt: skip
    kernel = ferrule.metal_kernel("bench_half", ["x"], ["y"], text)

    def called(kernel: Any, template: Any) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            return kernel(
                inputs=[x], grid=(SIZE, 1, 1), threadgroup=(256, 1, 1), template=template,
                output_shapes=[(SIZE,)], output_dtypes=[mx.float32],
            )[0]  # fmt: skip

        return call

    level0 = called(kernel, [("T", mx.float32)])
    mx.eval(x, half, op(x), level0(x))
    peers = [
        ("mx.multiply", lambda x: mx.multiply(x, half), BUILD, None if on_gpu else ON_CPU),
        ("mx.exp", mx.exp, None, CHAIN_OF_EXP if on_gpu else None),
    ]
    if on_gpu:
        body = (
            "auto i = cooperative_groups::this_grid().thread_rank(); if (i < 1024) y[i] = x[i] / 2;"
        )
        stock = called(mx.fast.cuda_kernel("bench_half_by_mlx", ["x"], ["y"], body), [])
        mx.eval(stock(x))
        peers.append(("mx.fast.cuda_kernel", stock, None, CHAIN))
    count = 10 if bench.quick else 1000

    def built(function: Callable[[Any], Any]) -> Callable[[], object]:
        def call() -> None:
            for _ in range(count):
                function(x)

        return call

    def chain(function: Callable[[Any], Any]) -> Callable[[], object]:
        def call() -> Any:
            y = x
            for _ in range(count):
                y = function(y)
            mx.eval(y)
            return y

        return call

    if on_gpu:  # on the CPU the group mlx-lm has it
        mlx_lm.prefill(bench)
    for name, ours in (("an op", op), ("metal_kernel", level0)):
        wanted = name == "an op"
        bench.compare(
            f"{count} nodes of {name}, built", built(ours),
            [Peer(who, built(f), target if wanted else None, False) for who, f, target, _ in peers],
        )  # fmt: skip
        bench.compare(
            f"{count} calls of {name} in a chain, {SIZE} float32", chain(ours),
            [
                Peer(who, chain(f), target if wanted else None, who != "mx.exp")
                for who, f, _, target in peers
            ],
        )  # fmt: skip
