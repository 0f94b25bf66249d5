"""Cases of tensor parallelism in NVFP4, which `nvfp4_parallel_cases` runs."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ferrule.ops import nvfp4, nvfp4_linear, nvfp4_moe
from ferrule.ops.nvfp4.linear import linear_op
from nvfp4_parallel_tools import (
    DEVICE,
    DTYPE,
    Calls,
    case,
    close,
    experts,
    here,
    linear,
    mesh,
    numbers,
    raises,
    routed,
    spread,
    weights_of,
)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, seed: int, inner: int, by_row: bool = False) -> None:
        super().__init__()
        self.up = linear(seed, inner, 32, by_row=by_row)
        self.down = linear(seed + 10, 48, inner, by_row=by_row)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.up(x)))


PLAN = {"up": nvfp4.NVFP4ColwiseParallel(), "down": nvfp4.NVFP4RowwiseParallel()}


@case
def columns_then_rows_are_one_all_reduce() -> None:
    _, world = here()
    x = numbers(3, 5, 32)
    for by_row in (False, True):
        whole = Mlp(7, 32 * world, by_row)
        layer = parallelize_module(Mlp(7, 32 * world, by_row), mesh(), PLAN)
        with CommDebugMode() as comm:
            y = layer(x)
        assert comm.get_total_counts() == 1, comm.get_comm_counts()
        assert type(y) is torch.Tensor
        close(y, whole(x))
        assert all(isinstance(v, DTensor) for v in layer.state_dict().values())
        assert layer.up.w_packed.placements == layer.up.bias.placements == (Shard(0),)
        assert layer.down.w_scale.placements == (Shard(1),)
        assert layer.up.w_packed.to_local().shape == (32, 16)
        assert layer.up.w_packed.to_local().untyped_storage().nbytes() == 32 * 16


@case
def derivatives_of_layers_in_parts() -> None:
    _, world = here()
    whole, layer = Mlp(7, 32 * world), parallelize_module(Mlp(7, 32 * world), mesh(), PLAN)
    xs = [numbers(3, 5, 32).requires_grad_() for _ in range(2)]
    for x, module in zip(xs, (whole, layer), strict=True):
        module(x).float().square().sum().backward()
    close(xs[1].grad, xs[0].grad, 4)
    for name in ("up", "down"):
        expected, found = whole.get_submodule(name).bias.grad, layer.get_submodule(name).bias.grad
        close(found.full_tensor(), expected, 4)


@case
def layers_in_parts_are_compiled() -> None:
    _, world = here()
    torch._dynamo.reset()
    whole, layer = Mlp(7, 32 * world), parallelize_module(Mlp(7, 32 * world), mesh(), PLAN)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = numbers(3, 5, 32)
    close(call(x), whole(x))
    trained = x.clone().requires_grad_()
    call(trained).float().sum().backward()
    expected = x.clone().requires_grad_()
    whole(expected).float().sum().backward()
    close(trained.grad, expected.grad, 4)


@case
def layouts_are_those_of_torchs_styles() -> None:
    rank, world = here()
    x = numbers(3, 4 * world, 64)
    gathered = nvfp4.NVFP4ColwiseParallel(
        input_layouts=Shard(0), output_layouts=Replicate(), use_local_output=False
    )
    layer = parallelize_module(linear(1, 32 * world, 64), mesh(), gathered)
    y = layer(x.chunk(world)[rank])
    assert y.placements == (Replicate(),)
    close(y.to_local(), linear(1, 32 * world, 64)(x))
    scattered = nvfp4.NVFP4RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    layer = parallelize_module(linear(1, 32, 16 * world), mesh(), scattered)
    x = numbers(4, 4 * world, 16 * world)
    with CommDebugMode() as comm:
        y = layer(x)
    assert comm.get_total_counts() == 1, comm.get_comm_counts()
    close(y, linear(1, 32, 16 * world)(x).chunk(world)[rank])


@case
def rows_need_not_divide() -> None:
    _, world = here()
    style = nvfp4.NVFP4ColwiseParallel(output_layouts=Replicate())
    for n in (2 * world + 1, 1):
        layer = parallelize_module(linear(1, n, 32), mesh(), style)
        close(layer(numbers(2, 3, 32)), linear(1, n, 32)(numbers(2, 3, 32)))


@case
def a_plan_has_layers_of_torch_too() -> None:
    _, world = here()
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(32, 16 * world), linear(1, 8, 16 * world)).to(DEVICE, DTYPE)
    whole[0].requires_grad_(False)
    layer = nn.Sequential(nn.Linear(32, 16 * world), linear(1, 8, 16 * world)).to(DEVICE, DTYPE)
    layer.load_state_dict(whole.state_dict())
    parallelize_module(
        layer, mesh(), {"0": nvfp4.NVFP4ColwiseParallel(), "1": nvfp4.NVFP4RowwiseParallel()}
    )
    close(layer(numbers(2, 3, 32)), whole(numbers(2, 3, 32)))
    other = nn.Sequential(nn.Linear(32, 16 * world), linear(1, 8, 16 * world)).to(DEVICE, DTYPE)
    other.load_state_dict(whole.state_dict())
    parallelize_module(other, mesh(), {"0": ColwiseParallel(), "1": nvfp4.NVFP4RowwiseParallel()})
    close(other(numbers(2, 3, 32)), whole(numbers(2, 3, 32)))
    assert RowwiseParallel in nvfp4.NVFP4RowwiseParallel.__mro__


@case
def layers_in_parts_are_cast_saved_and_loaded() -> None:
    _, world = here()
    layer = parallelize_module(Mlp(7, 32 * world), mesh(), PLAN).to(torch.bfloat16)
    assert layer.up.w_scale.dtype == torch.float8_e4m3fn and layer.up.bias.dtype == torch.bfloat16
    assert layer.up.w_scale_2.dtype == torch.float32
    other = parallelize_module(Mlp(8, 32 * world), mesh(), PLAN).to(torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    x = numbers(3, 5, 32, dtype=torch.bfloat16)
    assert torch.equal(other(x), layer(x))


@case
def experts_in_parts_of_their_inner_size() -> None:
    rank, world = here()
    e, h, i, tokens = 4, 32, 16 * world, 2 * world
    whole = experts(3, e, h, i)
    x, by, ids = routed(5, tokens, 3, e, h)
    layer = parallelize_module(experts(3, e, h, i), mesh(), nvfp4.NVFP4ExpertsParallel())
    with CommDebugMode() as comm:
        y = layer(x, ids, top_k_weights=by)
    assert comm.get_total_counts() == 1, comm.get_comm_counts()
    expected = whole(x, ids, by)
    close(y, expected, world)
    trained, wanted = ([v.clone().requires_grad_() for v in (x, by)] for _ in range(2))
    layer(trained[0], ids, trained[1]).float().square().sum().backward()
    whole(wanted[0], ids, wanted[1]).float().square().sum().backward()
    close(trained[0].grad, wanted[0].grad, 2 * world)
    close(trained[1].grad, wanted[1].grad, 2 * world)
    torch._dynamo.reset()
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ids, by), expected, world)
    other = parallelize_module(experts(4, e, h, i), mesh(), nvfp4.NVFP4ExpertsParallel())
    other.to(torch.float16).load_state_dict(layer.state_dict())
    close(other(x, ids, by), expected, world)
    shards = nvfp4.NVFP4ExpertsParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    layer = parallelize_module(experts(3, e, h, i), mesh(), shards)
    y = layer(*(v.chunk(world)[rank] for v in (x, ids, by)))
    close(y, expected.chunk(world)[rank], world)
    shards = nvfp4.NVFP4ExpertsParallel(use_local_output=False)
    layer = parallelize_module(experts(3, e, h, i), mesh(), shards)
    parts = (DTensor.from_local(v.chunk(world)[rank], mesh(), [Shard(0)]) for v in (x, ids, by))
    y = layer(*parts)
    assert y.placements == (Replicate(),)
    close(y.to_local(), expected, world)


@case
def what_cannot_be_sharded() -> None:
    _, world = here()
    rows = nvfp4.NVFP4RowwiseParallel()
    raises(
        f"in_features=16, of {world} processes; expected a multiple of 16 for each",
        lambda: parallelize_module(linear(1, 8, 16), mesh(), rows),
    )
    of_experts = nvfp4.NVFP4ExpertsParallel()
    raises(
        f"intermediate_size=16, of {world} processes",
        lambda: parallelize_module(experts(1, 2, 32, 16), mesh(), of_experts),
    )
    raises(
        "expected NVFP4Experts", lambda: parallelize_module(linear(1, 8, 16), mesh(), of_experts)
    )
    layer = parallelize_module(linear(1, 8, 32), mesh(), nvfp4.NVFP4ColwiseParallel())
    raises("twice", lambda: parallelize_module(layer, mesh(), nvfp4.NVFP4ColwiseParallel()))
    parted = nvfp4.expert_parallel(experts(1, 2 * world, 32, 16 * world), mesh())
    raises("is NVFP4ParallelExperts", lambda: parallelize_module(parted, mesh(), of_experts))
    layer = linear(1, 8, 32)
    layer.activations = "nvfp4"
    raises(
        "W4A16",
        lambda: parallelize_module(layer, mesh(), nvfp4.NVFP4ColwiseParallel()),
    )


# -- functions, of DTensors -----------------------------------------------------------------------

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def matrix_in_parts(layer: Any, placement: Any, by_row: bool = False) -> list[Any]:
    """w, its scales and its second scale, which is sharded with the rows that have one each."""
    packed, scale, scale_2 = weights_of(layer)
    of_rows = placement if by_row and placement == ROWS else WHOLE
    return [spread(packed, placement), spread(scale, placement), spread(scale_2, of_rows)]


@case
def a_backend_is_kept_beside_a_bias() -> None:
    _, world = here()
    for by_row, placement in ((False, ROWS), (True, ROWS), (False, COLUMNS)):
        layer = linear(1, 16 * world, 16 * world, by_row)
        x = numbers(3, 5, 16 * world)
        bias = spread(layer.bias, ROWS if placement == ROWS else WHOLE)
        given = spread(x, COLUMNS if placement == COLUMNS else WHOLE)
        call = partial(nvfp4_linear, given, *matrix_in_parts(layer, placement, by_row))
        ops = {
            "packed": linear_op("nvfp4", by_row, False, "packed"),
            "reference": linear_op("nvfp4", by_row, False).using("reference"),
            None: linear_op("nvfp4", by_row, False),
        }
        for backend, op in ops.items():
            with Calls() as calls:
                y = call(bias, backend=backend)
            assert op.torch_op in calls.found, (backend, calls.found)
            close(y.full_tensor(), layer(x), world + 2)
        refused = {"one": "backend='one'; expected None or one of"}
        if DEVICE == "cpu":
            refused |= {name: f"backend={name!r}" for name in ("humming", "dequantize")}
        with Calls() as calls:
            for backend, text in refused.items():
                raises(f"[nvfp4_linear] {text}", partial(call, bias, backend=backend))
        assert not calls.found
        for wrong in (bias[:1], bias.half()):
            raises("[nvfp4_linear] bias is", partial(call, wrong))


def gradients_are_those_of(
    whole: Any, call: Any, given: list[Any], placement: Any, compiled: bool = True
) -> None:
    """The gradients of a call on DTensors, which exchanges nothing in either pass."""
    trained = [part.requires_grad_(part.is_floating_point()) for part in given]
    trained = [part for part in trained if part.requires_grad]
    expected = [part.full_tensor().detach().requires_grad_() for part in trained]
    y = whole(*expected)
    c = numbers(9, *y.shape)
    cotangent = spread(c, placement if isinstance(placement, Shard) else WHOLE)
    for how in (None, "aot_eager")[: 1 + compiled]:
        run = call if how is None else torch.compile(call, fullgraph=True, backend=how)
        with contextlib.nullcontext() if how else CommDebugMode() as comm:  # Dynamo has it not
            made = run(*given)
            grads = torch.autograd.grad(made, trained, cotangent)
        if comm is not None:
            assert not comm.get_total_counts(), comm.get_comm_counts()
        assert made.placements == (placement,), made.placements
        close(made.full_tensor(), y, 4)
        for grad, other in zip(grads, torch.autograd.grad(y, expected, c, True), strict=True):
            close(grad.full_tensor(), other, 8)
        torch._dynamo.reset()


@case
def derivatives_of_products_gather_no_weights() -> None:
    _, world = here()
    splits = [  # of x, w, the bias and y
        (WHOLE, ROWS, ROWS, Shard(2)),
        (Shard(2), COLUMNS, WHOLE, Partial()),
        (Shard(1), WHOLE, WHOLE, Shard(1)),
        (WHOLE, WHOLE, WHOLE, WHOLE),
    ]
    for (of_x, of_w, of_bias, of_y), by_row, odd in product(splits, (False, True), (0, 1)):
        layer = linear(1, 16 * world + odd, 16 * world, by_row)
        w = matrix_in_parts(layer, of_w, by_row)
        x, bias = numbers(3, 2, 2 * world + odd, 16 * world), layer.bias.detach()
        call = lambda x, *bias, w=w: nvfp4_linear(x, *w, *bias)  # noqa: E731
        whole = partial(lambda w, x, *bias: nvfp4_linear(x, *w, *bias), weights_of(layer))
        gradients_are_those_of(whole, call, [spread(x, of_x)], of_y, odd == 0)
        if not isinstance(of_y, Partial):  # to add the bias is to add up
            given = [spread(x, of_x), spread(bias, of_bias)]
            gradients_are_those_of(whole, call, given, of_y, odd == 0)


@case
def derivatives_of_mixtures_gather_no_weights() -> None:
    _, world = here()
    e, h, i, tokens = 4, 32, 16 * world, 2 * world
    x, by, ids = routed(5, tokens, 3, e, h)
    w = weights_of(experts(3, e, h, i))
    w[:2] = (part.unflatten(1, (2, -1)) for part in w[:2])
    for (of_tokens, of_inner, of_y), on_input in product(
        ((WHOLE, Shard(2), Partial()), (Shard(0), WHOLE, Shard(0)), (WHOLE, WHOLE, WHOLE)),
        (False, True),
    ):
        where = [of_inner, of_inner, WHOLE] * 2
        parts = [spread(part, at) for part, at in zip(w, where, strict=True)]
        given = spread(ids, of_tokens)
        gradients_are_those_of(
            lambda x, by, how=on_input: nvfp4_moe(x, by, ids, *w, None, "silu", how),
            lambda x, by, ids=given, w=parts, how=on_input: nvfp4_moe(
                x, by, ids, *w, None, "silu", how
            ),
            [spread(x, of_tokens), spread(by, of_tokens)],
            of_y,
        )
