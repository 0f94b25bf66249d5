"""``ferrule bench nvfp4``: NVFP4 as checkpoints have it: linear layers, mixtures of experts, and a
stack of decoder layers, against the same with weights in bfloat16, and against humming-kernels.

Each call of a row has another copy of its matrices, or other experts, so that none lies in a GPU's
L2 cache. A mixture is the whole layer, from the experts that a router chose to the weighted sum;
what humming is timed for is its two products alone, of slots that were sorted before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ferrule.ops

from . import clocks, quantized_peers
from .quantized import dense_peer
from .timing import Bench, Call, Peer, Timer, said

_OPS: Any = ferrule.ops
LINEAR = {  # rows of x, rows of w, and what is summed over
    "cpu": [(m, 2048, 2048) for m in (1, 8, 32)],
    "cuda": [
        (m, n, k)
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
        for m in (1, 8, 16, 32, 64, 128, 512, 1024, 2048, 8192)
    ],
    "quick": [(2, 64, 128)],
}


class Mixture(NamedTuple):
    """A model's experts.

    Attributes:
        name: of the model.
        experts, chosen: how many there are, and for each token.
        hidden, inner: their sizes.
        tokens: how many are measured.
        wanted: by how many tokens, the time of humming's two products on an H200 over what the
            project wants there.
    """

    name: str
    experts: int
    chosen: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]
    wanted: dict[int, float]


_ALL = (1, 8, 32, 128, 512, 2048, 8192)
MIXTURES = {
    "cpu": [Mixture("a small mixture", 16, 4, 512, 256, (1, 32), {})],
    "cuda": [
        Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768, _ALL, {1: 24.4 / 14, 8: 1.3, 32: 100 / 85}),
        Mixture("Mixtral-8x7B", 8, 2, 4096, 14336, _ALL, {1: 81 / 65}),
        Mixture("a slice of DeepSeek-V3", 32, 8, 7168, 2048, _ALL, {1: 82 / 66}),
    ],
    "quick": [Mixture("a tiny mixture", 3, 2, 64, 32, (2,), {})],
}


def linear(device: str, bench: Bench) -> None:
    """Rows of `nvfp4_linear`."""
    for sizes in LINEAR["quick" if bench.quick else device]:
        bench.guarded(partial(_linear, bench, sizes))


def moe(device: str, bench: Bench) -> None:
    """Rows of `nvfp4_moe`."""
    for mixture in MIXTURES["quick" if bench.quick else device]:
        for tokens in mixture.tokens:
            bench.guarded(partial(_moe, bench, mixture, tokens))


def stack(device: str, bench: Bench) -> None:
    """Rows of a stack of decoder layers, a token at a time for each of some sequences."""
    for batch in (1, 8, 32) if device == "cuda" and not bench.quick else (2,):
        bench.guarded(partial(_stack, bench, batch))


def host(device: str, bench: Bench) -> None:
    """What eager calls cost the host: of one kernel, of two with scratch, and with cuBLAS."""
    import torch

    from .cuda import bursts

    packed, scale = _packed(bench, 512, 512)
    factor = torch.tensor(0.01, device=device)
    dense = _floats(packed, scale, factor)
    for m in (1, 64, 2048):
        x = torch.randn(m, 512, device=device).bfloat16()
        with bursts(bench), torch.inference_mode():
            bench.compare(
                f"one call, {m}x512 by 512 rows, host time",
                partial(_OPS.nvfp4_linear, x, packed, scale, factor),
                [Peer("F.linear of floats", partial(torch.nn.functional.linear, x, dense), 1.0)],
                2e-2,
            )


def groups(device: str) -> dict[str, Callable[[Bench], None]]:
    """``"nvfp4 linear"``, ``"nvfp4 moe"``, ``"nvfp4 stack"`` and, of a GPU, ``"nvfp4 host"``."""
    kinds = {"linear": linear, "moe": moe, "stack": stack}
    if device == "cuda":
        kinds["host"] = host
    return {f"nvfp4 {name}": partial(rows, device) for name, rows in kinds.items()}


def _timers(bench: Bench) -> tuple[Timer, ...]:
    return clocks.timers(bench, "cold-graph") if bench.device == "cuda" else (bench.by_wall,)


def _packed(bench: Bench, *shape: int) -> list[Any]:
    """Bytes and scales of a matrix, or of several, of magnitudes about one by its rows' length."""
    import torch

    packed = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=bench.device
    )
    scale = torch.randint(
        0x30, 0x40, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8, device=bench.device
    )
    return [packed, scale.view(torch.float8_e4m3fn)]


def _floats(packed: Any, scale: Any, factor: Any) -> Any:
    dense = _OPS.dequantize(packed, scale, mode="nvfp4", dtype="float32")
    return (dense * factor.reshape(*factor.shape, *[1] * (dense.ndim - factor.ndim))).bfloat16()


def _linear(bench: Bench, sizes: tuple[int, int, int]) -> None:
    import torch

    m, n, k = sizes
    x = torch.randn(m, k, device=bench.device).bfloat16()
    packed, scale = _packed(bench, n, k)
    factor = torch.tensor(0.2 / k**0.5, device=bench.device)
    moved = packed.nbytes + scale.nbytes
    count = clocks.copies(moved) if bench.device == "cuda" and not bench.quick else 1

    def turns(call: Callable[..., Any], arrays: Sequence[Any]) -> Call:
        sets = [arrays, *([a.clone() for a in arrays] for _ in range(count - 1))]
        return clocks.turns(bench, [partial(call, *each) for each in sets])

    by_floats = turns(partial(torch.nn.functional.linear, x), [_floats(packed, scale, factor)])
    peers = [dense_peer(m, moved, by_floats, bench.device == "cuda")]
    form = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    parts = [packed.view(torch.uint32), scale.view(torch.uint8)]
    # Of the matrix without its factor.
    peers += [
        peer._replace(compared=False)
        for peer in quantized_peers.dense(bench, x, parts, form, count)
        if peer.name.startswith("humming")
    ]
    ours = turns(lambda *w: _OPS.nvfp4_linear(x, *w, factor), [packed, scale])
    with bench.timed(*_timers(bench)):
        bench.compare(f"{m}x{k} by {n} rows", ours, peers, 2e-2, moved)


def _matrices(bench: Bench, of: Mixture) -> list[Any]:
    """The arguments of `nvfp4_moe` that are weights."""
    import torch

    e, h, i = of.experts, of.hidden, of.inner
    factors = [torch.rand(e, 2) + 0.5, torch.rand(e) + 0.5]
    second13, second2 = (
        (factor * 0.2 / math.sqrt(depth)).to(bench.device)
        for factor, depth in zip(factors, (h, i), strict=True)
    )
    return [*_packed(bench, e, 2 * i, h), second13, *_packed(bench, e, h, i), second2]


def _routings(bench: Bench, of: Mixture, tokens: int) -> list[tuple[Any, Any, Any]]:
    """Tokens, weights and experts of some calls; some experts are chosen more often."""
    import torch

    liked = torch.randn(of.experts, device=bench.device) * 0.5
    found = []
    calls = 16 if tokens <= 128 else 8 if tokens <= 512 else 4
    for _ in range(calls if bench.device == "cuda" and not bench.quick else 1):
        logits = torch.randn(tokens, of.experts, device=bench.device) + liked
        weights, ids = torch.topk(torch.softmax(logits, -1), of.chosen)
        x = torch.randn(tokens, of.hidden, device=bench.device).bfloat16()
        found.append((x, weights, ids))
    return found


def _moe(bench: Bench, of: Mixture, tokens: int) -> None:
    matrices = _matrices(bench, of)
    routings = _routings(bench, of, tokens)
    moved = sum(a.nbytes for a in matrices) // of.experts
    moved *= sum(len(ids.unique()) for _, _, ids in routings) // len(routings)
    ours = clocks.turns(bench, [partial(_OPS.nvfp4_moe, *each, *matrices) for each in routings])
    w13 = _floats(matrices[0], matrices[1], matrices[2].repeat_interleave(of.inner, 1))
    w2 = _floats(matrices[3], matrices[4], matrices[5])
    layer = layer_by_groups if bench.device == "cuda" else layer_by_loop
    calls = [partial(layer, *each, w13, w2) for each in routings]
    name = "F.grouped_mm of floats" if bench.device == "cuda" else "F.linear of floats"
    peers = [Peer(name, clocks.turns(bench, calls), 1.0 if bench.device == "cuda" else None)]
    if bench.device == "cuda" and bench.installed("humming"):
        try:
            peers.append(_humming(bench, of, matrices, routings))
        except Exception as fault:  # whatever another package may raise
            bench.leave_out(f"{bench.group}: humming is left out: {said(fault)}")
    title = f"{of.name}, {tokens} tokens"
    with bench.timed(*_timers(bench)):
        bench.compare(title, ours, peers, 3e-2, moved)


def layer_by_groups(x: Any, weights: Any, ids: Any, w13: Any, w2: Any) -> Any:
    """A mixture of experts in floats, by torch's grouped products, of tokens by expert."""
    import torch
    from torch.nn import functional

    flat = ids.flatten()
    order = flat.argsort()
    ends = torch.searchsorted(
        flat[order], torch.arange(len(w13), device=x.device), right=True
    ).int()
    tokens = order // ids.shape[1]
    both = functional.grouped_mm(x[tokens], w13.mT, offs=ends)
    gate, up = both.chunk(2, -1)
    rows = functional.grouped_mm(functional.silu(gate) * up, w2.mT, offs=ends)
    rows = rows * weights.flatten()[order, None]
    return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, rows).to(x.dtype)


def layer_by_loop(x: Any, weights: Any, ids: Any, w13: Any, w2: Any) -> Any:
    """The same, expert by expert."""
    import torch
    from torch.nn import functional

    y = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        gate, up = functional.linear(x[tokens], w13[expert]).chunk(2, -1)
        rows = functional.linear(functional.silu(gate) * up, w2[expert])
        y.index_add_(0, tokens, rows * weights[tokens, places, None])
    return y.to(x.dtype)


def _humming(bench: Bench, of: Mixture, matrices: Sequence[Any], routings: Sequence[Any]) -> Peer:
    """humming's two products, of slots that were sorted before."""
    import torch

    form = {"mode": "nvfp4", "bits": 4}
    tokens = len(routings[0][0])
    calls: list[Callable[[], Any]] = []
    layers, tilings = [], []
    for packed, scale in (matrices[:2], matrices[3:5]):
        parts = [packed.view(torch.uint32), scale.view(torch.uint8)]
        layers.append(quantized_peers.humming_layers(bench, parts, form, 1)[0])
        tilings.append(quantized_peers.tiling(layers[-1], tokens * of.chosen, "indexed"))
    hidden = torch.randn(tokens * of.chosen, of.inner, device="cuda").bfloat16()

    def pair(x: Any, sorts: Sequence[Any]) -> Any:
        for layer, rows, top, tiling, (slots, experts, size) in zip(
            layers, (x, hidden), (of.chosen, 1), tilings, sorts, strict=True
        ):
            y = layer(
                rows,
                top_k=top,
                compute_config=json.dumps({"gemm_type": "indexed"}),
                tuning_config=json.dumps(tiling),
                sorted_ids=slots,
                expert_ids=experts,
                num_tokens_padded=size,
            )
        return y

    for x, _, ids in routings:
        sorts = [
            quantized_peers.by_experts(ids, of.experts, tiling["block_shape"][0])
            for tiling in tilings
        ]
        calls.append(partial(pair, x, sorts))
    name = f"{quantized_peers.humming_name()}, two products"
    return Peer(name, clocks.turns(bench, calls), of.wanted.get(tokens), compared=False)


# -- decoder layers --------------------------------------------------------------------------------

_LAYERS = 4


def _stack(bench: Bench, batch: int) -> None:
    """Of Qwen3-30B-A3B's shape, but for the vocabulary: by `nvfp4_moe` and `nvfp4_linear`, and with
    the same weights in bfloat16."""
    import torch

    small = bench.device == "cpu" or bench.quick
    of = MIXTURES["quick" if small else "cuda"][0]
    heads, pairs, width = (4, 2, 16) if small else (32, 4, 128)
    with torch.no_grad():
        packed = Decoder(bench, of, heads, pairs, width, 1 if small else _LAYERS)
        ours, theirs = partial(packed.step, batch, True), partial(packed.step, batch, False)
        work = f"{len(packed.layers)} layers of {of.name}'s shape, {batch} sequences"
        with bench.timed(*_timers(bench)):
            bench.compare(work, ours, [Peer("weights in bfloat16", theirs)], 5e-2)
    seconds = bench.rows[-1].ours, bench.rows[-1].theirs
    each = ", ".join(f"{batch / s:.0f}" for s in seconds)
    bench.say(f"{'':4}tokens per second, NVFP4 and bfloat16: {each}")


class Decoder:
    """Layers of a decoder with a cache of 128 tokens, of which each step adds the next.

    Attributes:
        layers: of each the matrices, packed and in floats.
    """

    def __init__(
        self, bench: Bench, of: Mixture, heads: int, pairs: int, width: int, layers: int
    ) -> None:
        import torch

        self.of, self.heads, self.pairs, self.width = of, heads, pairs, width
        self.device, self.layers = bench.device, []
        self._given: dict[int, Any] = {}
        for _ in range(layers):
            sizes = {
                "qkv": ((heads + 2 * pairs) * width, of.hidden),
                "o": (of.hidden, heads * width),
            }
            linear, dense = {}, {}
            for name, (n, k) in sizes.items():
                w = [*_packed(bench, n, k), torch.tensor(0.2 / k**0.5, device=bench.device)]
                linear[name], dense[name] = w, _floats(w[0], w[1], w[2])
            matrices = _matrices(bench, of)
            w13 = _floats(matrices[0], matrices[1], matrices[2].repeat_interleave(of.inner, 1))
            experts = [w13, _floats(matrices[3], matrices[4], matrices[5])]
            router = torch.randn(of.experts, of.hidden, device=bench.device).bfloat16() * 0.1
            self.layers.append((linear, dense, matrices, experts, router))

    def step(self, batch: int, packed: bool) -> Any:
        """The hidden states of the next token of each sequence."""
        import torch
        from torch.nn import functional

        if batch not in self._given:
            shape = batch, self.pairs, 128, self.width
            cache = [torch.randn(shape, device=self.device).bfloat16() for _ in range(2)]
            x = torch.randn(batch, self.of.hidden, device=self.device).bfloat16()
            self._given[batch] = x, *cache
        x, keys, values = self._given[batch]
        ones = torch.ones(self.of.hidden, device=self.device, dtype=x.dtype)
        for linear, dense, matrices, experts, router in self.layers:

            def product(name: str, x: Any, w: Any = linear if packed else dense) -> Any:
                return _OPS.nvfp4_linear(x, *w[name]) if packed else functional.linear(x, w[name])

            parts = [self.heads * self.width, *[self.pairs * self.width] * 2]
            q, k, v = product("qkv", functional.rms_norm(x, ones.shape, ones)).split(parts, -1)
            q, k, v = (a.view(len(x), -1, 1, self.width) for a in (q, k, v))
            k, v = (torch.cat([old[:, :, 1:], new], 2) for old, new in ((keys, k), (values, v)))
            y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + product("o", y.reshape(len(x), -1))
            y = functional.rms_norm(x, ones.shape, ones)
            weights, ids = torch.topk(
                functional.linear(y, router).float().softmax(-1), self.of.chosen
            )
            if packed:
                x = x + _OPS.nvfp4_moe(y, weights, ids, *matrices)
            elif self.device == "cuda":
                x = x + layer_by_groups(y, weights, ids, *experts)
            else:
                x = x + layer_by_loop(y, weights, ids, *experts)
        return x
