"""``ferrule bench quantized``: products with quantized matrices against who else has them.

Bytes are those of the packed elements and their scales: where few rows are multiplied, reading them
is the work. On a GPU each call of a row has another copy of the matrix, so that none lies in the L2
cache; peers that are no products of quantized matrices (cuBLAS, a copy) are what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ferrule.ops

from . import clocks, quantized_peers
from .timing import Bench, Call, Peer, Timer

_OPS: Any = ferrule.ops

# mode, group, bits
FORMATS = {
    "nvfp4": ("nvfp4", 16, 4),
    "mxfp4": ("mxfp4", 32, 4),
    "affine 4": ("affine", 64, 4),
    "mxfp8": ("mxfp8", 32, 8),
    "affine 8": ("affine", 64, 8),
    "affine 3": ("affine", 32, 3),
    "affine 6": ("affine", 64, 6),
}
_FEW = (1, 8, 16, 32, 64, 128)
SIZES = {  # rows of x, rows of w, and what is summed over
    "cpu": [(m, 2048, 2048) for m in (1, 8, 32)],
    "cuda": [
        (m, n, k)
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
        for m in (*_FEW, 1024, 2048, 8192)
    ],
    "quick": [(2, 64, 128)],
}
TOKENS = {"cpu": (1, 32), "cuda": (1, 8, 32, 128, 1024), "quick": (2,)}
# Experts, how many a token has, their rows, and what is summed over.
EXPERTS = {"cpu": (16, 4, 512, 512), "cuda": (128, 8, 1536, 2048), "quick": (3, 2, 64, 128)}


def products(name: str, device: str, bench: Bench) -> None:
    """Rows of one format, by how many rows x has and how large the matrix is."""
    which = "quick" if bench.quick else device
    for sizes in SIZES[which]:
        for dtype in ("float32", "bfloat16") if device == "cpu" else ("bfloat16",):
            bench.guarded(partial(_product, bench, name, sizes, dtype))


def experts(name: str, device: str, bench: Bench) -> None:
    """Rows of one format of experts, by how many tokens there are."""
    which = "quick" if bench.quick else device
    for tokens in TOKENS[which]:
        bench.guarded(partial(_experts, bench, name, tokens, EXPERTS[which]))


def _product(bench: Bench, name: str, sizes: tuple[int, int, int], dtype: str) -> None:
    import torch

    (mode, group, bits), (m, n, k) = FORMATS[name], sizes
    random = torch.Generator(bench.device).manual_seed(0)
    given: dict[str, Any] = {"generator": random, "device": bench.device}
    x = torch.randn(m, k, **given).to(getattr(torch, dtype))
    dense = torch.randn(n, k, **given).to(x.dtype) / k**0.5
    parts = _OPS.quantize(dense, group, bits, mode)
    moved = sum(part.nbytes for part in parts)
    form: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
    exact: dict[str, Any] = {} if mode == "affine" else {"dtype": dtype}
    dense = _OPS.dequantize(*parts, **form, **exact)
    count = 1 if bench.device == "cpu" or bench.quick else clocks.copies(moved)

    def turns(call: Callable[..., Any], arrays: Sequence[Any]) -> Call:
        sets = [arrays, *([a.clone() for a in arrays] for _ in range(count - 1))]
        calls = [partial(call, *each) for each in sets]
        return clocks.turns(bench, calls)

    def ours(x: Any, *parts: Any) -> Any:
        return _OPS.quantized_matmul(x, *parts, **form)

    title = f"{m}x{k} by {n} rows of {name} {dtype}"
    by_floats = turns(torch.nn.functional.linear, [x, dense])
    peers = [dense_peer(m, moved, by_floats, bench.device == "cuda")]
    timers: tuple[Timer, ...] = (bench.by_wall,)
    if bench.device == "cuda":
        timers = clocks.timers(bench, "cold-graph")
        if m <= 16:
            source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
            wanted = 0.8 if moved >= 100e6 else 0.7 if moved >= 30e6 and bits == 4 else None
            copies = turns(lambda s: torch.empty_like(s).copy_(s), [source])
            peers.append(Peer("copy_ of as many bytes", copies, wanted, compared=False))
    peers += quantized_peers.dense(bench, x, parts, form, count)
    with bench.timed(*timers):
        bench.compare(title, turns(ours, [x, *parts]), peers, _apart(dtype), moved)


def _apart(dtype: str) -> float:
    return 1e-3 if dtype == "float32" else 2e-2


def dense_peer(m: int, moved: int, call: Call, on_gpu: bool) -> Peer:
    """The product with the matrix as floats."""
    wanted = 2.5 if m <= 16 and moved >= 30e6 else 1.0 if 32 <= m <= 128 else None
    wanted = 0.95 if m >= 8192 else wanted
    return Peer("F.linear of floats", call, wanted if on_gpu else None)


def _experts(bench: Bench, name: str, tokens: int, sizes: tuple[int, int, int, int]) -> None:
    import torch

    (mode, group, bits), (count, top, n, k) = FORMATS[name], sizes
    random = torch.Generator(bench.device).manual_seed(0)
    given: dict[str, Any] = {"generator": random, "device": bench.device}
    x = torch.randn(tokens, 1, 1, k, **given).bfloat16()
    parts = _OPS.quantize(torch.randn(count, n, k, **given).bfloat16() / k**0.5, group, bits, mode)
    # Other experts in each call, so that they are not in the L2 cache.
    routings = [
        torch.rand(tokens, count, **given).topk(top, -1).indices.to(torch.int32)
        for _ in range(16 if bench.device == "cuda" and not bench.quick else 1)
    ]
    form: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}

    def ours(chosen: Any) -> Any:
        return _OPS.gather_qmm(x, *parts, rhs_indices=chosen, **form)

    def turns(call: Callable[..., Any], each: Sequence[Any]) -> Call:
        calls = [partial(call, one) for one in each]
        return clocks.turns(bench, calls)

    title = f"{tokens} tokens, {top} of {count} experts of {n}x{k} {name} bfloat16"
    per_expert = sum(part.nbytes for part in parts) // count
    moved = per_expert * sum(len(chosen.unique()) for chosen in routings) // len(routings)
    peers = []
    timers: tuple[Timer, ...] = (bench.by_wall,)
    if bench.device == "cuda":
        timers = clocks.timers(bench, "cold-graph")
        sources = [torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in routings]
        copies = turns(lambda s: torch.empty_like(s).copy_(s), sources)
        peers.append(Peer("copy_ of the experts' bytes", copies, None, compared=False))
        if tokens * top <= 64:
            dense = _OPS.dequantize(*parts, **form)
            picked = [dense[chosen.long().flatten()].mT for chosen in routings]
            rows = x.expand(tokens, top, 1, k).reshape(-1, 1, k).contiguous()
            by_bmm = turns(lambda w: torch.bmm(rows, w).view(tokens, top, 1, n), picked)
            peers.append(Peer("bmm of gathered floats", by_bmm, None, compared=True))
    peers += quantized_peers.gathers(bench, x, parts, form, routings)
    with bench.timed(*timers):
        bench.compare(title, turns(ours, routings), peers, _apart("bfloat16"), moved)


def groups(device: str) -> dict[str, Callable[[Bench], None]]:
    """A group per format: ``"quantized nvfp4"``, and one of experts that are gathered."""
    if device == "cuda":
        names = ["nvfp4", "mxfp4", "affine 4", "affine 8", "mxfp8"]
    else:
        names = list(FORMATS)
    found: dict[str, Callable[[Bench], None]] = {}
    for name in names:
        found[f"quantized {name}"] = partial(products, name, device)
        if name in ("nvfp4", "affine 4"):
            found[f"quantized {name} gathers"] = partial(experts, name, device)
    return found
