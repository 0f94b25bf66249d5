"""Layers in NVFP4 in several processes: ``python nvfp4_parallel_cases.py RANK WORLD FILE``; with a
further ``cuda`` on a GPU each, through NCCL.

Each case compares with the same layer in one process. The last line that is printed says in JSON
which cases ran, and what failed. `test_nvfp4_parallel` runs this.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import nvfp4_tensor_cases  # noqa: F401, its cases, too
from ferrule.ops import nvfp4, nvfp4_moe
from nvfp4_parallel_tools import (
    CASES,
    DEVICE,
    Traffic,
    case,
    close,
    experts,
    here,
    mesh,
    raises,
    routed,
    weights_of,
)

FORMS = ("all_to_all", "all_gather")


def parted(layer: Any, capacity: int | None = None) -> Any:
    return nvfp4.expert_parallel(layer, mesh(), capacity)


def call_of(form: str, tokens: list[int]) -> Callable[..., Any]:
    if form == "all_to_all":
        return nvfp4.nvfp4_moe_all_to_all
    capacity = max(tokens)
    return lambda *given, **kw: nvfp4.nvfp4_moe_all_gather(*given, capacity=capacity, **kw)


def each_process(seed: int, tokens: list[int], k: int, whole: Any, change: Any = None) -> None:
    """Both forms, with these numbers of tokens, and their derivatives."""
    rank, world = here()
    size = tokens[rank % len(tokens)]
    x, by, ids = routed(seed + 100 * rank, size, k, whole.num_experts)
    ids = ids if change is None else change(ids)
    wanted = [v.clone().requires_grad_() for v in (x, by)]
    expected = whole(wanted[0], ids, wanted[1])
    expected.float().square().sum().backward()
    own = weights_of(parted(whole))
    for form in FORMS:
        given = [v.clone().requires_grad_() for v in (x, by)]
        y = call_of(form, tokens)(*given, ids, *own)
        close(y, expected, world + 1)
        y.float().square().sum().backward()
        close(given[0].grad, wanted[0].grad, 2 * world + 2)
        close(given[1].grad, wanted[1].grad, 2 * world + 2)
        with torch.no_grad():
            again = call_of(form, tokens)(x, by, ids, *own)
        assert torch.equal(again, y), "another order of additions"


@case
def experts_in_processes() -> None:
    _, world = here()
    each_process(1, [7], 3, experts(3, 2 * world))


@case
def routing_at_random() -> None:
    _, world = here()
    random = np.random.default_rng(11)  # the same in all processes
    for trial in range(6):
        each = int(random.integers(1, 4))
        tokens = random.integers(0, 9, world).tolist()
        each_process(20 + trial, tokens, int(random.integers(1, 6)), experts(trial, each * world))


@case
def processes_without_tokens() -> None:
    _, world = here()
    each_process(2, [0, 5], 2, experts(3, 2 * world))
    each_process(2, [0], 2, experts(3, 2 * world))


@case
def all_tokens_go_to_one_process() -> None:
    _, world = here()
    for to in (0, world - 1):
        each_process(3, [4, 6], 5, experts(3, 2 * world), lambda ids, to=to: ids % 2 + 2 * to)


@case
def tokens_without_experts() -> None:
    _, world = here()
    each_process(4, [4, 6], 2, experts(3, 2 * world), lambda ids: ids * 0 - 1)
    each_process(4, [4, 6], 2, experts(3, 2 * world), lambda ids: (ids + 2 * world).int())
    each_process(4, [4, 6], 2, experts(3, 2 * world), lambda ids: ids + 2**32)
    each_process(4, [4, 6], 0, experts(3, 2 * world))


@case
def maps_without_experts_and_other_ids() -> None:
    _, world = here()
    own = weights_of(parted(experts(3, 2 * world)))
    x, by, ids = routed(5, 6, 3, 2 * world)
    for form in FORMS:
        call = call_of(form, [6])
        assert not call(x, by, ids, *own, ids.new_empty(0)).any()
        wrong = partial(call, x, by, ids.float(), *own)
        raises("topk_ids is of torch.float32; expected int32 or int64", wrong)


@case
def second_derivatives_are_refused() -> None:
    _, world = here()
    own = weights_of(parted(experts(3, 2 * world)))
    x, by, ids = routed(5, 6, 3, 2 * world)
    for form in FORMS:
        given = x.clone().requires_grad_()
        y = call_of(form, [6])(given, by, ids, *own)
        (c,) = torch.autograd.grad(y.float().square().sum(), given, create_graph=True)
        try:
            (c.float().square().sum() + given.float().sum()).backward()
        except RuntimeError as error:
            assert "differentiate twice" in str(error), error
        else:
            raise AssertionError("a part of a second derivative was given as all of it")


@case
def places_of_experts_are_given() -> None:
    rank, world = here()
    count = 2 * world
    whole, own = experts(3, count), weights_of(parted(experts(3, count)))
    x, by, ids = routed(5 + rank, 6, 3, count + 1)
    order = torch.from_numpy(np.random.default_rng(1).permutation(count)).to(DEVICE)
    places = torch.cat([order, order.new_tensor([-1])])
    meant = torch.where(ids < 0, -1, places[ids.clamp(min=0)])
    expected = whole(x, meant, by)
    for form in FORMS:
        y = call_of(form, [6])(x, by, ids, *own, places, group=dist.group.WORLD)
        close(y, expected, world + 1)


@case
def weights_on_inputs_and_other_activations() -> None:
    rank, world = here()
    whole = experts(3, 2 * world)
    own = weights_of(parted(whole))
    x, by, ids = routed(5 + rank, 6, 3, 2 * world)
    expected = nvfp4_moe(x, by, ids, *weights_of(whole), None, "gelu_tanh", True)
    for form in FORMS:
        y = call_of(form, [6])(x, by, ids, *own, None, "gelu_tanh", True, backend="reference")
        close(y, expected, world + 1)


@case
def decoding_is_compiled() -> None:
    rank, world = here()
    torch._dynamo.reset()
    whole, layer = experts(3, 2 * world), parted(experts(3, 2 * world), 8)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, by, ids = routed(5 + rank, 5 + rank % 2, 3, 2 * world)
    close(call(x, ids, by), whole(x, ids, by), world + 1)
    given, wanted = ([v.clone().requires_grad_() for v in (x, by)] for _ in range(2))
    call(given[0], ids, given[1]).float().square().sum().backward()
    whole(wanted[0], ids, wanted[1]).float().square().sum().backward()
    close(given[0].grad, wanted[0].grad, 2 * world + 2)
    close(given[1].grad, wanted[1].grad, 2 * world + 2)


@case
def decoding_in_a_cuda_graph() -> None:
    if DEVICE != "cuda":
        return
    rank, world = here()
    whole, layer = experts(3, 2 * world), parted(experts(3, 2 * world), 8)
    x, by, ids = routed(5 + rank, 8, 3, 2 * world)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            layer(x, ids, by)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x, ids, by)
    for seed in (6, 7):
        for to, other in zip((x, by, ids), routed(seed + rank, 8, 3, 2 * world), strict=True):
            to.copy_(other)
        graph.replay()
        close(y, whole(x, ids, by), world + 1)


@case
def what_is_sent() -> None:
    _, world = here()
    h, k, tokens = 32, 3, 6
    own = weights_of(parted(experts(3, 2 * world)))
    x, by, ids = routed(5, tokens, k, 2 * world)
    size = x.element_size()
    with Traffic() as few:
        nvfp4.nvfp4_moe_all_gather(x, by, ids, *own)
    rows = world * tokens
    assert few.found == [
        ("all_gather_into_tensor", rows * (size * (h + k) + 4 * k)),
        ("all_to_all_single", rows * h * size),
    ], few.found
    with Traffic() as many:  # all experts of a token are in process 0
        nvfp4.nvfp4_moe_all_to_all(x, by, ids * 0, *own)
    rows = world * tokens if dist.get_rank() == 0 else 0
    assert many.found == [
        ("all_to_all_single", world * 8),
        ("all_to_all_single", rows * (size * (h + k) + 4 * k)),
        ("all_to_all_single", tokens * h * size),
    ], many.found


@case
def experts_of_models() -> None:
    rank, world = here()

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts(3, 2 * world)

    model = nn.ModuleList([Block(), Block()])
    model[1].experts = model[0].experts
    whole = model[0].experts
    assert nvfp4.expert_parallel(model, mesh()) is model
    layer = model[0].experts
    assert layer is model[1].experts and type(layer) is nvfp4.NVFP4ParallelExperts
    assert layer.num_experts == 2 and layer.w13_packed.shape[0] == 2
    assert torch.equal(layer.w2_packed, whole.w2_packed[2 * rank : 2 * rank + 2])
    x, by, ids = routed(5 + rank, 6 + rank, 3, 2 * world)
    close(layer(x, ids, by), whole(x, ids, by), world + 1)
    layer.capacity = 5 + world
    close(layer(x, ids, by), whole(x, ids, by), world + 1)
    assert "capacity=" in repr(layer)


@case
def models_of_transformers() -> None:
    """Both ways: with the same tokens in all processes, and with tokens of their own."""
    if "models" not in sys.argv[1:]:  # importing transformers takes seconds
        return
    import ops.nvfp4_files as files

    rank, world = here()
    torch.manual_seed(3)
    files.SIZES["num_key_value_heads"] = 4  # a head at least for each process
    tiny = files.tiny("qwen3_moe", moe_intermediate_size=16 * world)
    with tempfile.TemporaryDirectory() as folder:
        files.write(Path(folder), files.quantized(files.floats_of(tiny)))
        whole, by_size, by_expert = (
            nvfp4.load(copy.deepcopy(tiny), folder).float() for _ in range(3)
        )
    tokens = torch.arange(8)[None] * 7
    expected = whole(tokens).logits
    layers = "model.layers.*."
    plan = {
        f"{layers}self_attn.{name}_proj": nvfp4.NVFP4ColwiseParallel() for name in ("q", "k", "v")
    }
    plan |= {
        f"{layers}self_attn.o_proj": nvfp4.NVFP4RowwiseParallel(),
        f"{layers}mlp.experts": nvfp4.NVFP4ExpertsParallel(),
        "lm_head": nvfp4.NVFP4ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(by_size, mesh(), plan)
    assert by_size.model.layers[1].mlp.experts.w2_packed.to_local().shape[2] == 8
    close(by_size(tokens).logits, expected, 64)
    own = tokens[:, : 8 - rank] + rank
    expected = whole(own).logits
    for capacity in (None, 8):
        layer = nvfp4.expert_parallel(copy.deepcopy(by_expert), mesh(), capacity)
        assert layer.model.layers[0].mlp.experts.num_experts * world == 4
        close(layer(own).logits, expected, 64)


@case
def experts_that_cannot_be_shared_out() -> None:
    _, world = here()
    raises("expected as many experts for each", lambda: parted(experts(3, world + 1)))
    raises("whole in every process", lambda: parted(parted(experts(3, world))))
    raises("has no NVFP4Experts", lambda: parted(nn.Sequential(nn.Linear(2, 2))))
    x, by, ids = routed(5, 6, 3, world)
    raises("6 tokens, of capacity=5", lambda: parted(experts(3, world), 5)(x, ids, by))
    for layer in (parted(experts(3, world)), parted(experts(3, world), 6)):
        raises("expected [M, H], [M, k] and [M, k]", lambda layer=layer: layer(x[None], ids, by))
        raises("shapes (6, 32), (6, 2)", lambda layer=layer: layer(x, ids, by[:, :2]))
    square = init_device_mesh(DEVICE, (1, world), mesh_dim_names=("dp", "ep"))
    raises('mesh["ep"]', lambda: nvfp4.expert_parallel(experts(3, world), square))
    assert parted(experts(3, world)).num_experts == 1
    assert nvfp4.expert_parallel(experts(3, world), square["ep"]).num_experts == 1


def main(rank: int, world: int, file: str) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=100)  # for other processes, which a failed case may have left alone
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    store = dist.FileStore(file, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    failed = {}
    for function in CASES:
        try:
            function()
            dist.barrier()
        except Exception:  # the others wait for this one, so no further case makes sense
            failed[function.__name__] = traceback.format_exc()
            break
    else:
        dist.destroy_process_group()
    print(json.dumps({"ran": [function.__name__ for function in CASES], "failed": failed}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
