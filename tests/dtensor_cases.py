"""Calls of ops with DTensors, in one of two processes: ``python dtensor_cases.py RANK FILE``; with
a further ``cuda`` on a GPU each, through NCCL.

Each case compares with the same call on whole tensors. The last line that is printed says in JSON
which cases ran, and what failed. `test_torch_sharding` runs this.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ferrule.ops
from ferrule import KernelError

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
WORLD = 2
DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


# -- ops ------------------------------------------------------------------------------------------

EXP = ferrule.op(
    "exponential", "x[*S]:T -> y[*S]:T", metal=I + "y[i] = metal::exp(x[i]);", grid="x.size",
    threadgroup=64,
)  # fmt: skip
EXP(torch.ones(2))  # known to torch before it knows DTensor

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402


@EXP.def_vjp
def _exp_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    return (cotangents[0] * outputs[0],)


SCALE_VJP = ferrule.op(
    "scale_vjp", "x[*S,D]:T, w[D]:T, cotangent[*S,D]:T -> x_grad[*S,D]:T, w_grad[D]:T",
    metal=I + """
        T sum = 0;
        for (uint j = i; j < uint(ROWS * D); j += D) {
          x_grad[j] = cotangent[j] * w[i];
          sum += cotangent[j] * x[j];
        }
        w_grad[i] = sum;""",
    grid="D", threadgroup=64, template={"ROWS": "x.size // D"}, partial_sums="*S",
)  # fmt: skip
SCALE = ferrule.op(
    "scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=I + "y[i] = x[i] * w[i % D];", grid="x.size",
    threadgroup=64,
)  # fmt: skip
SCALE.def_vjp(SCALE_VJP)

ROW = "uint i = thread_position_in_grid.x; uint j = i * D; "
SOFTMAX = ferrule.op(
    "softmax", "x[*S,D]:T -> y[*S,D]:T",
    metal=ROW + """
        T sum = 0;
        for (uint k = 0; k < D; k++) sum += metal::exp(x[j + k]);
        for (uint k = 0; k < D; k++) y[j + k] = metal::exp(x[j + k]) / sum;""",
    grid="x.size // D", threadgroup=64,
)  # fmt: skip
CUMSUM = ferrule.op(
    "cumsum", "x[D]:T -> y[D]:T",
    metal="T sum = 0; for (uint k = 0; k < D; k++) { sum += x[k]; y[k] = sum; }",
    grid=1, threadgroup=1,
)  # fmt: skip
MATMUL = ferrule.op(
    "matmul", "a[*S,M,K]:T, b[K,N]:T -> c[*S,M,N]:T",
    metal=I + """
        T sum = 0;
        for (int k = 0; k < K; k++) sum += a[i / N * K + k] * b[k * N + i % N];
        c[i] = sum;""",
    grid="c.size", threadgroup=64, batch="M N", partial_sums="K",
)  # fmt: skip


@MATMUL.def_vjp
def _matmul_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    (a, b), (c,) = primals, cotangents
    return c @ b.mT, (a.mT @ c).reshape(-1, *b.shape).sum(0)


BATCHED = ferrule.op(  # of its starred dims one at least is none, or both are the same
    "batched", "a[*S,M,K]:T, b[*R,K,N]:T, c[L,N]:T? -> y[*broadcast(S,R),M+L,N]:T",
    metal=I + """
        int row = i / N % (M + L), part = i / (N * (M + L)), column = i % N;
        int at_a = a_ndim > 2 ? part * M * K : 0, at_b = b_ndim > 2 ? part * K * N : 0;
        T sum = 0;
        if (row >= M) { if (has_c) sum = c[(row - M) * N + column]; }
        else for (int k = 0; k < K; k++) sum += a[at_a + row * K + k] * b[at_b + k * N + column];
        y[i] = sum;""",
    grid="y.size", threadgroup=64, batch="N",
)  # fmt: skip
STATISTICS = ferrule.op(
    "statistics", "x[B,D]:T, shift:float32, w[D]:T? -> least[B]:T, most[B]:T",
    metal=ROW + """
        T a = INFINITY, b = -INFINITY;
        for (uint k = 0; k < D; k++) {
          T v = x[j + k] + shift;
          if (has_w) v *= w[k];
          a = metal::min(a, v); b = metal::max(b, v);
        }
        least[i] = a; most[i] = b;""",
    grid="B", threadgroup=64, batch="B",
)  # fmt: skip
PUT = ferrule.op(
    "put", "cache[B,L,D]:T!, row[B,D]:T, at:int32 -> n[B]:int32",
    metal=I + "cache[(i / D * L + at) * D + i % D] = row[i]; if (i % D == 0) n[i / D] = at + 1;",
    grid="B*D", threadgroup=64, batch="B",
)  # fmt: skip
ADD = ferrule.op(
    "add", "c[*S]:T!, v[*S]:T ->", metal=I + "c[i] += v[i];", grid="c.size", threadgroup=64
)


# -- tools ----------------------------------------------------------------------------------------

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh(*shape: int) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh(DEVICE, shape)
    return _meshes[shape]


def numbers(*shape: int) -> torch.Tensor:
    """The same in both processes."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), device="cpu")
    return values.to(DEVICE)


def spread(x: torch.Tensor, *placements: Any, on: tuple[int, ...] = (WORLD,)) -> DTensor:
    return distribute_tensor(x, mesh(*on), placements)


def check(found: Any, expected: torch.Tensor, *placements: Any) -> None:
    """A DTensor's values and, where they are given, its placements."""
    assert type(found) is DTensor, type(found)
    if placements:
        assert tuple(found.placements) == placements, found.placements
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)


# -- cases ----------------------------------------------------------------------------------------


@case
def every_starred_dim_is_sharded() -> None:
    for shape, axis in (((4, 6), 0), ((4, 6), 1), ((5, 3), 0), ((3, 5), 1), ((2, 3, 4), 2)):
        x = numbers(*shape)
        check(EXP(spread(x, Shard(axis))), x.exp(), Shard(axis))
    check(EXP(spread(x, Replicate())), x.exp(), Replicate())
    check(EXP(spread(x[:1], Shard(0))), x[:1].exp())  # one process has none
    with torch.no_grad():
        check(EXP(spread(x, Shard(0))), x.exp(), Shard(0))
    with torch.inference_mode():
        check(EXP(spread(x, Shard(0))), x.exp(), Shard(0))
    check(EXP.torch_op(spread(x, Shard(0))), x.exp(), Shard(0))


@case
def broadcast_dims_are_sharded_where_they_stand_alone() -> None:
    a, b, c = numbers(4, 2, 3), numbers(3, 2), numbers(1, 2)
    whole, sharded = spread(b, Replicate()), spread(a, Shard(0))
    check(BATCHED(sharded, whole, None), a @ b, Shard(0))
    both = torch.cat((a @ b, c.expand(4, 1, 2)), 1)
    check(BATCHED(sharded, whole, spread(c, Replicate())), both, Shard(0))
    check(BATCHED(spread(a, Replicate()), spread(b, Shard(1)), spread(c, Shard(1))), both, Shard(2))
    check(BATCHED(sharded, spread(a.mT.contiguous(), Shard(0)), None), a @ a.mT, Replicate())


@case
def local_shards_stay_where_they_are() -> None:
    x = numbers(5, 3)
    y = EXP(spread(x, Shard(0))).to_local()
    assert y.shape == ((3, 3) if dist.get_rank() == 0 else (2, 3)), y.shape


@case
def two_axes_of_a_mesh() -> None:
    x = numbers(4, 6)
    for shape in ((1, 2), (2, 1)):
        for placements in ((Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(1), Shard(0))):
            check(EXP(spread(x, *placements, on=shape)), x.exp(), *placements)
    w = numbers(6)
    found = SCALE(
        spread(x, Shard(1), Shard(0), on=(1, 2)), spread(w, Replicate(), Replicate(), on=(1, 2))
    )
    check(found, x * w, Replicate(), Shard(0))


@case
def partial_inputs_are_added_up_first() -> None:
    x = numbers(4, 6)
    part = DTensor.from_local(x * (dist.get_rank() + 1), mesh(WORLD), [Partial()])
    check(EXP(part), (3 * x).exp())


@case
def what_lacks_the_dim_is_whole() -> None:
    x, w = numbers(4, 6), numbers(6)
    check(SCALE(spread(x, Shard(0)), spread(w, Replicate())), x * w, Shard(0))
    check(SCALE(spread(x, Shard(0)), spread(w, Shard(0))), x * w, Shard(0))
    check(SCALE(spread(x, Shard(1)), spread(w, Shard(0))), x * w)


@case
def dims_that_are_not_declared_independent_are_gathered() -> None:
    x = numbers(4, 6)
    check(SOFTMAX(spread(x, Shard(0))), x.softmax(1), Shard(0))
    check(SOFTMAX(spread(x, Shard(1))), x.softmax(1))
    check(CUMSUM(spread(x[0], Shard(0))), x[0].cumsum(0), Replicate())


@case
def a_contracted_dim_gives_partial_sums() -> None:
    a, b = numbers(3, 4, 6), numbers(6, 2)
    c = a @ b
    check(MATMUL(spread(a, Shard(2)), spread(b, Shard(0))), c, Partial())
    check(MATMUL(spread(a, Shard(0)), spread(b, Replicate())), c, Shard(0))
    check(MATMUL(spread(a, Shard(1)), spread(b, Replicate())), c, Shard(1))
    check(MATMUL(spread(a, Replicate()), spread(b, Shard(1))), c, Shard(2))
    found = MATMUL(
        spread(a, Shard(0), Shard(2), on=(2, 1)), spread(b, Replicate(), Shard(0), on=(2, 1))
    )
    check(found, c, Shard(0), Partial())
    twice = EXP(MATMUL(spread(a, Shard(2)), spread(b, Shard(0))))
    check(twice, c.exp())


@case
def numbers_absent_inputs_and_several_outputs() -> None:
    x, w = numbers(5, 6), numbers(6)
    for weight in (None, w):
        given = None if weight is None else spread(weight, Replicate())
        least, most = STATISTICS(spread(x, Shard(0)), 0.5, given)
        value = (x + 0.5) * (1 if weight is None else weight)
        check(least, value.min(1).values, Shard(0))
        check(most, value.max(1).values, Shard(0))


@case
def what_is_written_in_place_is_never_moved() -> None:
    row = numbers(4, 3)
    expected = torch.zeros(4, 5, 3)
    expected[:, 2] = row
    for placement in (Shard(0), Replicate()):
        for other in (Shard(0), Shard(1), Replicate()):
            cache = spread(torch.zeros(4, 5, 3), placement)
            n = PUT(cache, spread(row, other), 2)
            check(cache, expected, placement)
            check(n, torch.full((4,), 3, dtype=torch.int32), placement)
    try:
        PUT(spread(torch.zeros(4, 5, 3), Shard(1)), spread(row, Replicate()), 2)
    except KernelError as error:
        assert "'cache' (cache[B,L,D]:T!) with (Shard(dim=1),)" in str(error), error
    else:
        raise AssertionError("a cache that is split along L was written to")
    c = spread(numbers(4, 3), Shard(1))
    assert ADD(c, spread(row, Shard(0))) is None
    check(c, numbers(4, 3) + row, Shard(1))


def trained(call: Callable[..., Any]) -> None:
    x, w = numbers(4, 6), numbers(6)
    xs, ws = (v.clone().requires_grad_() for v in (x, w))
    (xs * ws).exp().sum().backward()
    for placement in (Shard(0), Replicate()):
        dx = spread(x, placement).requires_grad_()
        dw = spread(w, Replicate()).requires_grad_()
        y = call(dx, dw)
        check(y, (x * w).exp(), placement)
        y.sum().backward()
        check(dx.grad, xs.grad, placement)
        check(dw.grad, ws.grad)


def model(x: Any, w: Any) -> Any:
    return EXP(SCALE(x, w))


@case
def derivatives_of_ops_and_functions() -> None:
    trained(model)
    x, w = numbers(4, 6), numbers(6)
    x_grad, w_grad = SCALE_VJP(spread(x, Shard(0)), spread(w, Replicate()), spread(x, Shard(0)))
    check(x_grad, x * w, Shard(0))
    check(w_grad, (x * x).sum(0), Partial())


MATMUL_SPLITS = [  # the placements of a, b and c, of both gradients, and how much is exchanged
    ((Shard(0), Replicate(), Shard(0)), (Shard(0), Partial()), 0),
    ((Shard(1), Replicate(), Shard(1)), (Shard(1), Partial()), 0),
    ((Replicate(), Shard(1), Shard(2)), (Partial(), Shard(1)), 0),
    ((Shard(2), Shard(0), Partial()), (Shard(2), Shard(0)), 0),
    ((Replicate(), Replicate(), Replicate()), (Replicate(), Replicate()), 0),
    ((Replicate(), Shard(0), Partial()), (Shard(2), Shard(0)), 0),
    ((Shard(0), Shard(0), None), (None, None), 2),  # one of both, in the call and afterwards
]  # fmt: skip


def gradients_of_products(
    call: Callable[..., Any], a: Any, b: Any, split: Any, on: tuple[int, ...] = (WORLD,)
) -> None:
    (of_a, of_b, of_c), (of_a_grad, of_b_grad), moves = split
    others = [Replicate()] * (len(on) - 1)

    def each(placement: Any) -> Any:
        return () if placement is None else (*others, placement)

    whole = [v.clone().requires_grad_() for v in (a, b)]
    expected = MATMUL(*whole)
    c, by = numbers(*expected.shape), numbers(*a.shape)
    wanted = torch.autograd.grad(expected, whole, c, create_graph=True)
    given = [spread(v, *each(at), on=on).requires_grad_() for v, at in ((a, of_a), (b, of_b))]
    cotangent = spread(c, *each(Replicate()), on=on)
    eager = call is MATMUL
    with CommDebugMode() if eager else contextlib.nullcontext() as comm:  # which Dynamo refuses
        y = call(*given)
        grads = torch.autograd.grad(y, given, cotangent, create_graph=eager)
    check(y, expected.detach(), *each(of_c))
    check(grads[0], wanted[0].detach(), *each(of_a_grad))
    check(grads[1], wanted[1].detach(), *each(of_b_grad))
    if comm is not None:
        assert comm.get_total_counts() == moves, comm.get_comm_counts()
        (again,) = torch.autograd.grad(grads[0].full_tensor(), given[1], by)
        check(again, torch.autograd.grad(wanted[0], whole[1], by)[0])


@case
def derivatives_in_array_code_are_of_parts() -> None:
    """What a call left where it was stays there."""
    for split in MATMUL_SPLITS:
        gradients_of_products(MATMUL, numbers(3, 4, 6), numbers(6, 2), split)
        gradients_of_products(MATMUL, numbers(3, 4, 6), numbers(6, 2), split, (1, 2))
        torch._dynamo.reset()
        call = torch.compile(MATMUL, fullgraph=True, backend="aot_eager")
        gradients_of_products(call, numbers(3, 4, 6), numbers(6, 2), split)
        gradients_of_products(MATMUL, numbers(3, 5, 3), numbers(3, 3), split)  # uneven parts
    torch._dynamo.reset()


NORM = ferrule.op(
    "norm", "x[*S,D]:T -> y[*S,D]:T, rstd[*S]:T",
    metal="""
        uint i = thread_position_in_grid.x;
        T sum = 0;
        for (int j = 0; j < D; j++) sum += x[i * D + j] * x[i * D + j];
        T r = metal::rsqrt(sum / D + T(1e-5));
        for (int j = 0; j < D; j++) y[i * D + j] = x[i * D + j] * r;
        rstd[i] = r;""",
    grid="x.size // D", threadgroup=64,
)  # fmt: skip


@NORM.def_vjp
def _norm_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    (x,), (y, r), (cy, cr) = primals, outputs, cotangents
    given = cy * r[..., None] - y * (r * (cy * y).mean(-1))[..., None]
    return (given - x * (cr * r**3)[..., None] / x.shape[-1],)


@case
def outputs_that_nobody_uses() -> None:
    x = numbers(4, 3)
    for how in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        for used in (0, 1):
            expected = x.clone().requires_grad_()
            NORM(expected)[used].sum().backward()
            given = spread(x, Shard(0)).requires_grad_()
            how(lambda x, used=used: NORM(x)[used])(given).sum().backward()
            assert expected.grad is not None
            check(given.grad, expected.grad, Shard(0))


@case
def in_compiled_functions() -> None:
    torch._dynamo.reset()
    trained(torch.compile(model, fullgraph=True, backend="aot_eager"))


@case
def written_in_place_in_a_compiled_function() -> None:
    row = numbers(4, 3)
    cache = spread(torch.zeros(4, 5, 3), Shard(0))
    call = torch.compile(
        lambda c, r: PUT(c, r, 2) + PUT(c, r + 1, 1), fullgraph=True, backend="aot_eager"
    )
    check(call(cache, spread(row, Shard(0))), torch.full((4,), 5, dtype=torch.int32), Shard(0))
    expected = torch.zeros(4, 5, 3)
    expected[:, 2], expected[:, 1] = row, row + 1
    check(cache, expected, Shard(0))


@case
def sizes_that_change_in_a_compiled_function() -> None:
    torch._dynamo.reset()
    call = torch.compile(SCALE, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 5, 8):
        x, w = numbers(rows, 6), numbers(6)
        check(call(spread(x, Shard(0)), spread(w, Replicate())), x * w, Shard(0))


@case
def an_op_that_is_first_called_in_a_compiled_function() -> None:
    op = ferrule.op(
        "thrice", "x[*S]:T -> y[*S]:T", metal=I + "y[i] = 3 * x[i];", grid="x.size", threadgroup=8
    )
    x = numbers(4, 6)
    y = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="inductor")(spread(x, Shard(1)))
    check(y, 3 * x + 1, Shard(1))


@case
def images_are_sampled_where_they_are() -> None:
    """Sharded over the batch, over points, and over channels; the derivatives, too."""
    x, grid = numbers(4, 5, 6, 3), numbers(4, 3, 2, 2).tanh()
    splits = [
        ((Shard(0), Shard(0)), Shard(0), (Shard(0), Shard(0))),
        ((Replicate(), Shard(1)), Shard(1), (Partial(), None)),
        ((Shard(3), Replicate()), Shard(3), (None, Partial())),
    ]
    whole = [a.clone().requires_grad_() for a in (x, grid)]
    expected = torch.nn.functional.grid_sample(
        whole[0].movedim(-1, 1), whole[1], align_corners=False
    ).movedim(1, -1)
    weights = numbers(*expected.shape)
    (expected * weights).sum().backward()
    ops = ferrule.ops.grid_sample, torch.compile(ferrule.ops.grid_sample, backend="aot_eager")
    for grid_sample, (placements, placement, grads) in itertools.product(ops, splits):
        parts = [
            spread(a, where).requires_grad_()
            for a, where in zip((x, grid), placements, strict=True)
        ]
        y = grid_sample(*parts)
        check(y, expected.detach(), placement)
        found = torch.autograd.grad(y, parts, spread(weights, placement))
        for part, other, where in zip(found, whole, grads, strict=True):
            assert other.grad is not None
            check(part, other.grad, *[where] * (where is not None))


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, WORLD)
    wait = timedelta(seconds=100)  # for the other process, which a failed case may have left alone
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=wait)
    failed = {}
    for function in CASES:
        try:
            function()
        except Exception:
            failed[function.__name__] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"ran": [function.__name__ for function in CASES], "failed": failed}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
