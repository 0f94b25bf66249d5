"""Who else multiplies with quantized matrices: MLX, humming-kernels, torch's product of 4 bits.

Each gets the matrices' own elements and scales, packed anew where it wants them in another order.

* On a GPU, MLX's calls are in no CUDA graph of ours: many are built, of copies of the matrix by
  turns, and evaluated at once; a call's time is its share of that wall time, in which the host has
  its part. ferrule's own calls on MLX's arrays, timed so too, are there to compare.
* humming compiles a kernel for each size, with the tiling that it chooses for that. Which rows are
  whose expert's is sorted before, and not timed.
* torch's ``_weight_int4pack_mm`` is what torchao's int4 weights in tiles are multiplied by, too. It
  has zeros at the middle code, ``bias + 8 * scale``, rounded to scales' dtype, and rounds elements
  once, where MLX's format rounds a product and a sum: in bfloat16 results are 0.5 % apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import ferrule.ops

from . import clocks
from .timing import Bench, Call, Peer, Timer, said

_OPS: Any = ferrule.ops
AT_ONCE = 32  # calls that MLX evaluates together, at least, if their results are not large
_LARGE = 100e6  # bytes of a result
_SORTED = 64  # rows from which on mlx-lm sorts them by their experts

Form = dict[str, Any]


def dense(bench: Bench, x: Any, parts: Sequence[Any], form: Form, count: int) -> list[Peer]:
    """Peers for products of rows with a matrix, of which they get so many copies."""
    makers = [_mlx_dense, _int4] if bench.device == "cpu" else [_mlx_dense, _humming_dense, _int4]
    return _those_that_can(
        bench, [partial(maker, bench, x, parts, form, count) for maker in makers]
    )


def gathers(
    bench: Bench, x: Any, parts: Sequence[Any], form: Form, routings: Sequence[Any]
) -> list[Peer]:
    """Peers for products of tokens, ``[T, 1, 1, K]``, with their experts, ``[T, TOP]``."""
    makers = [_mlx_gathers] if bench.device == "cpu" else [_mlx_gathers, _humming_gathers]
    return _those_that_can(
        bench, [partial(maker, bench, x, parts, form, routings) for maker in makers]
    )


def _those_that_can(bench: Bench, makers: Sequence[Callable[[], list[Peer]]]) -> list[Peer]:
    peers: list[Peer] = []
    for maker in makers:
        try:
            peers += maker()
        except Exception as fault:  # whatever another package may raise
            name = maker.func.__name__.strip("_")  # type: ignore[attr-defined]
            bench.leave_out(f"{bench.group}: {name} cannot be made and is left out: {said(fault)}")
    return peers


# -- MLX -------------------------------------------------------------------------------------------


class Lazily:
    """Calls of MLX, each on arrays of its own; called itself, it is the first, as torch has it."""

    def __init__(self, calls: Sequence[Call], shown: Callable[[Any], Any] = lambda y: y) -> None:
        """Note calls whose results nobody has evaluated, and how those are to be looked at."""
        self.calls, self._shown = calls, shown

    def __call__(self) -> object:
        return _to_torch(self._shown(self.calls[0]()))

    def ready(self, bench: Bench) -> Callable[[], float]:
        """What gives the seconds of one of many that are built, and evaluated at once."""
        import mlx.core as mx

        few = bench.quick or self.calls[0]().nbytes > _LARGE  # type: ignore[attr-defined]
        calls = list(self.calls) * (1 if few else -(-AT_ONCE // len(self.calls)))
        return lambda: bench.wall(lambda: mx.eval([call() for call in calls])) / len(calls)


def _mlx(bench: Bench) -> Any:
    """MLX's module, or None; on a GPU it must have that."""
    if not bench.installed("mlx"):
        return None
    import mlx.core as mx

    if bench.device == "cpu" or mx.is_available(mx.gpu):
        return mx
    bench.leave_out("mlx has no CUDA: its rows are left out")
    return None


def _mlx_dense(bench: Bench, x: Any, parts: Sequence[Any], form: Form, count: int) -> list[Peer]:
    if _mlx(bench) is None:
        return []
    rows = _to_mlx(x)
    sets = [[_to_mlx(part) for part in parts] for _ in range(count)]

    def calls(module: Any) -> list[Call]:
        return [partial(module.quantized_matmul, rows, *each, **form) for each in sets]

    return _mlx_peers(bench, x, calls)


def _mlx_gathers(
    bench: Bench, x: Any, parts: Sequence[Any], form: Form, routings: Sequence[Any]
) -> list[Peer]:
    if (mx := _mlx(bench)) is None:
        return []
    rows, matrices = _to_mlx(x), [_to_mlx(part) for part in parts]
    chosen = [_to_mlx(each) for each in routings]

    def calls(module: Any) -> list[Call]:
        call = partial(module.gather_qmm, rows, *matrices, **form)
        return [partial(call, rhs_indices=each) for each in chosen]

    peers = _mlx_peers(bench, x, calls)
    if bench.device == "cuda" and chosen[0].size >= _SORTED:
        orders = [mx.argsort(each.flatten()) for each in chosen]
        call = partial(mx.gather_qmm, **form, sorted_indices=True)
        in_order: list[Call] = []
        for each, order in zip(chosen, orders, strict=True):
            ordered = rows.flatten(0, 2)[order // each.shape[-1]][:, None]
            ascending = each.flatten()[order]
            mx.eval(ordered, ascending)
            in_order.append(partial(call, ordered, *matrices, rhs_indices=ascending))
        back = mx.argsort(orders[0])
        name = f"MLX {version('mlx')}, rows sorted before"
        peers.append(_peer(bench, name, Lazily(in_order, lambda y: y[back])))
    return peers


def _mlx_peers(bench: Bench, x: Any, calls: Callable[[Any], list[Call]]) -> list[Peer]:
    """MLX, and on a GPU ferrule on the same arrays: whosever functions ``calls`` is given."""
    import mlx.core as mx

    name, theirs = f"MLX {version('mlx')}", calls(mx)
    if bench.device == "cuda":
        ours = Lazily(calls(_OPS))
        return [_peer(bench, name, Lazily(theirs)), _peer(bench, "ferrule, MLX's arrays", ours)]

    def call() -> Any:
        with mx.stream(mx.cpu):
            result = theirs[0]()
            mx.eval(result)
            return result

    # MLX's CPU adds half floats up in half floats.
    return [Peer(name, call, 1.0, str(x.dtype) == "torch.float32")]


def _peer(bench: Bench, name: str, calls: Lazily) -> Peer:
    timer = Timer("wall", lambda _: calls.ready(bench))
    return Peer(f"{name}, many calls and one eval", calls, timer=timer)


def _to_mlx(array: Any) -> Any:
    """MLX's array of the same elements; another copy each time."""
    import mlx.core as mx
    import torch

    if array.dtype == torch.bfloat16:
        return mx.array(array.cpu().view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(array.cpu().numpy())


def _to_torch(array: Any) -> Any:
    import mlx.core as mx
    import numpy as np
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if array.dtype == mx.bfloat16:
        bits = torch.from_numpy(np.array(array.view(mx.uint16)))
        return bits.view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)


# -- humming-kernels -------------------------------------------------------------------------------

HUMMING = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
    "mxfp4": {"quant_method": "mxfp4"},
}


def humming_layers(bench: Bench, parts: Sequence[Any], form: Form, count: int) -> list[Any]:
    """Its layers of a matrix, or of experts; none where it is not there, or has no such format."""
    if form["mode"] not in HUMMING or not bench.installed("humming"):
        return []
    import torch
    from humming.layer import HummingLayer

    w, scales = parts
    *experts, n, _ = w.shape
    given = {"weight": w.view(torch.uint8), "weight_scale": scales}
    if form["mode"] == "nvfp4":
        given["weight_scale"] = scales.view(torch.float8_e4m3fn)
        given["weight_scale_2"] = torch.ones(*experts or [1], device=w.device)
    layers = []
    for _ in range(count):
        layer = HummingLayer(
            n,
            w.shape[-1] * 32 // form["bits"],
            weight_config=dict(HUMMING[form["mode"]]),
            num_experts=experts[0] if experts else None,
            torch_dtype=torch.bfloat16,
        ).to(w.device)
        layer.load_from_tensors(given)
        layer.transform()
        layers.append(layer)
    return layers


def humming_name() -> str:
    import humming

    return f"humming {humming.__version__}"


def tiling(layer: Any, rows: int, kind: str) -> dict[str, Any]:
    """What humming chooses for so many rows; by itself it would compile kernels for all numbers."""
    from humming.tune import get_heuristics_config

    form = layer.humming_config
    chosen: dict[str, Any] = get_heuristics_config(form, shape_m=rows, gemm_type=kind)
    return chosen


def _humming_dense(
    bench: Bench, x: Any, parts: Sequence[Any], form: Form, count: int
) -> list[Peer]:
    layers = humming_layers(bench, parts, form, count)
    if not layers:
        return []
    tuned = json.dumps(tiling(layers[0], len(x), "dense"))
    calls = [partial(layer, x, tuning_config=tuned) for layer in layers]
    return [Peer(humming_name(), clocks.turns(bench, calls))]


def _humming_gathers(
    bench: Bench, x: Any, parts: Sequence[Any], form: Form, routings: Sequence[Any]
) -> list[Peer]:
    layers = humming_layers(bench, parts, form, 1)
    if not layers:
        return []
    tokens, top = routings[0].shape
    tuned = tiling(layers[0], tokens * top, "indexed")
    call = partial(
        layers[0],
        x.view(tokens, -1),
        top_k=top,
        compute_config=json.dumps({"gemm_type": "indexed"}),
        tuning_config=json.dumps(tuned),
    )
    calls = []
    for chosen in routings:
        ids, experts, size = by_experts(chosen, len(parts[0]), tuned["block_shape"][0])
        calls.append(partial(call, sorted_ids=ids, expert_ids=experts, num_tokens_padded=size))
    return [Peer(f"{humming_name()}, rows sorted before", clocks.turns(bench, calls))]


def by_experts(chosen: Any, count: int, block: int) -> tuple[Any, Any, Any]:
    """How humming takes what tokens have chosen of so many experts.

    Returns:
        The places of ``chosen`` in the order of their experts, each expert's filled up to blocks
        with a place that is none; whose each block is; and how many places these are.
    """
    import torch

    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    each = flat.bincount(minlength=count)
    filled = -(-each // block) * block
    begin = (filled.cumsum(0) - filled) - (each.cumsum(0) - each)
    where = begin[flat[order]] + torch.arange(len(flat), device=flat.device)
    ids = flat.new_full((int(filled.sum()),), len(flat), dtype=torch.int32)
    ids[where] = order.int()
    experts = torch.arange(count, device=flat.device).repeat_interleave(filled // block)
    return ids, experts.int(), filled.sum(dtype=torch.int32).view(1)


# -- torch's own -----------------------------------------------------------------------------------


def _int4(bench: Bench, x: Any, parts: Sequence[Any], form: Form, count: int) -> list[Peer]:
    """``_weight_int4pack_mm``, which is in torch."""
    import torch

    if form["mode"] != "affine" or form["bits"] != 4:
        return []
    w, scales, biases = parts
    aten: Any = torch.ops.aten
    codes = w.view(torch.uint8)
    zeros = (biases.float() + 8 * scales.float()).to(scales.dtype)
    both = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()
    if x.is_cuda:
        # there the first of two elements is in the high bits
        packed = aten._convert_weight_to_int4pack(codes >> 4 | codes << 4, 8)
        product = aten._weight_int4pack_mm
    else:
        apart = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        packed = aten._convert_weight_to_int4pack_for_cpu(apart.int(), 1)
        product = aten._weight_int4pack_mm_for_cpu
    calls = [
        partial(product, x, packed.clone(), form["group_size"], both.clone()) for _ in range(count)
    ]
    return [Peer("torch's _weight_int4pack_mm", clocks.turns(bench, calls))]
