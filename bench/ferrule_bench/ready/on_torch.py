"""torch's tensors, and who does what the ready ops do: its functions, op by op and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import by_ops, clocks
from ..cuda import BY_HAND
from ..timing import Bench, Call, Timer
from . import by_hand
from .on_numpy import rope_tables
from .works import BINS, EPS, HIGH, LOW, SEGMENTS, TOP, Array, Other, Work

COMPILED = "torch.compile"
FASTER, AS_COPY, AS_BY_HAND = 1.0, 1 / 1.05, 1 / 1.02
AS_COMPILED = 0.99  # runs of one kernel differ by a hundredth


class Torch:
    """The host, on the CPU or on the first GPU."""

    name = "torch"
    dtypes = ("float32", "float16", "bfloat16")

    def __init__(self, device: str) -> None:
        self.device = device

    def array(self, array: Array, dtype: str, seed: int) -> Any:
        """An input."""
        random = torch.Generator(self.device).manual_seed(seed)
        given: dict[str, Any] = {"generator": random, "device": self.device}
        if array.kind == "ids":
            return torch.randint(0, array.high, array.shape, dtype=torch.int32, **given)
        if array.kind == "uniform":
            return (torch.rand(array.shape, **given) * 2 - 1).to(getattr(torch, dtype))
        return torch.randn(array.shape, **given).to(getattr(torch, dtype))

    def peers(self, work: Work) -> Sequence[Other]:
        """Who else does it here."""
        return PEERS.get(work.peers or work.op, ())

    def call(self, function: Callable[..., Any], arrays: Sequence[Any], work: Work) -> Call:
        """What a row times: of a derivative the backward pass alone."""
        if not work.backward:
            return partial(function, *arrays)
        return _recorded(function, arrays[: work.inputs], arrays[work.inputs :])

    def compiled(self, function: Callable[..., Any], bench: Bench) -> Callable[..., Any]:
        """A function by torch.compile, for one row."""
        torch.compiler.reset()  # it compiles a function eight times, and then not any more
        mode = "max-autotune-no-cudagraphs" if bench.autotune else None
        made: Callable[..., Any] = by_ops.compiled(function, mode=mode)
        return made

    def timers(self, bench: Bench, work: Work) -> tuple[Timer, ...]:
        """How rows are timed.

        Autograd runs a backward pass on the stream of its forward pass, which no graph captures.
        """
        if bench.device == "cpu":
            return (bench.by_wall,)
        mode = "cold" if work.backward else "cold-graph"
        return clocks.timers(bench, mode, graphs=not work.backward)


def _recorded(
    function: Callable[..., Any], arrays: Sequence[Any], constants: Sequence[Any]
) -> Call:
    """The backward pass of a forward pass that is made at the first call.

    The cotangent lies in memory as the result does, and is the same for all whose results have the
    same shape.
    """
    kept: list[Any] = []

    def run() -> Any:
        if not kept:
            leaves = [a.detach().requires_grad_() for a in arrays]
            out = function(*leaves, *constants)
            random = torch.Generator(out.device).manual_seed(99)
            cot = torch.randn(out.shape, generator=random, device=out.device)
            kept.extend((out, leaves, torch.empty_like(out).copy_(cot)))
        out, leaves, cot = kept
        return torch.autograd.grad(out, leaves, cot, retain_graph=True)

    return run


def copy(arrays: Sequence[Any], moved: int) -> Call:
    """A copy that reads and writes as many bytes in all."""
    x = arrays[0]
    source = torch.zeros(moved // 2 // x.element_size(), dtype=x.dtype, device=x.device)
    return partial(torch.empty_like(source).copy_, source)


# -- the peers -------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def _of_sum(norm: Callable[..., Tensor]) -> Callable[..., Any]:
    def function(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, w), total

    return function


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _with_tables(x: Tensor) -> list[Tensor]:
    return [x, *(torch.from_numpy(t).to(x.device, x.dtype) for t in rope_tables(x))]


def _index_add(x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(SEGMENTS, x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, ids, x)


def _scatter_add(x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(SEGMENTS, x.shape[1], dtype=x.dtype, device=x.device)
    return out.scatter_add_(0, ids.expand(x.shape), x)


def _planes(x: Tensor, grid: Tensor, mode: str = "bilinear") -> Tensor:
    return F.grid_sample(x, grid, mode, align_corners=False)


def _images(x: Tensor, grid: Tensor, mode: str = "bilinear") -> Tensor:
    return _planes(x.movedim(-1, 1), grid, mode).movedim(1, -1)


def _planes_by_ops(x: Tensor, grid: Tensor) -> Tensor:
    return by_ops.sample(x.permute(0, 2, 3, 1), grid).permute(0, 3, 1, 2)


def _channels_first(x: Tensor, grid: Tensor) -> list[Tensor]:
    """Images of the same shape, whose memory is that of NCHW."""
    return [x.movedim(-1, 1).contiguous().movedim(1, -1), grid]


def _channels_last(x: Tensor, grid: Tensor) -> list[Tensor]:
    return [x.contiguous(memory_format=torch.channels_last), grid]


def _compiled(function: Callable[..., Any], **more: Any) -> Other:
    return Other(COMPILED, function, AS_COMPILED, "cuda", compiled=True, **more)


def _by_rows(name: str, function: Callable[..., Any], formula: Callable[..., Any]) -> list[Other]:
    return [Other(name, function, FASTER, "cpu"), _compiled(formula)]


def _of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A norm of torch's, over the last axis."""
    return lambda x, *weights: function(x, x.shape[-1:], *weights, eps=EPS)


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x, -1)


def _samples(
    function: Callable[..., Any],
    layouts: dict[str, Any],
    formula: Callable[..., Any] | None = None,
) -> list[Other]:
    # torch's backward pass places points in float16 and bfloat16 themselves, which is too coarse
    # for images of 1024 pixels; its forward pass does not.
    peers = [
        Other(f"F.grid_sample, {name} memory", function, FASTER, given=given, coarse=True)
        for name, given in layouts.items()
    ]
    return [*peers, Other(COMPILED, formula, FASTER, compiled=True)] if formula else peers


_LAYOUTS = {"NHWC": None, "NCHW": _channels_first}
PEERS: dict[str, Sequence[Other]] = {
    "rms_norm": _by_rows("F.rms_norm", _of_rows(F.rms_norm), _rms_norm),
    "rms_norm of a sum": _by_rows(
        "F.rms_norm of x + residual", _of_sum(_of_rows(F.rms_norm)), _of_sum(_rms_norm)
    ),
    "layer_norm": _by_rows("F.layer_norm", _of_rows(F.layer_norm), _of_rows(F.layer_norm)),
    "softmax": _by_rows("F.softmax", _softmax(F.softmax), _softmax(F.softmax)),
    "log_softmax": _by_rows("F.log_softmax", _softmax(F.log_softmax), _softmax(F.log_softmax)),
    "rope": [
        Other("torch, op by op, with tables", _rope, FASTER, "cpu", _with_tables),
        _compiled(_rope, given=_with_tables),
    ],
    "topk": [Other("torch.topk", lambda x: tuple(torch.topk(x, TOP)), FASTER, "cpu")],
    "histogram": [Other("torch.histc", lambda x: torch.histc(x, BINS, LOW, HIGH), FASTER, "cpu")],
    "segment_sum": [
        Other("index_add_", _index_add, FASTER, "cpu"),
        Other("scatter_add_", _scatter_add, FASTER, "cpu", lambda x, i: [x, i.long()[:, None]]),
        _compiled(_index_add),
    ],
    "matmul": [Other("torch.matmul", torch.matmul, 0.5, "cpu")],
    "grid_sample": [
        *_samples(_images, _LAYOUTS, by_ops.sample),
        Other(BY_HAND, by_hand.sample, AS_BY_HAND, fits=by_hand.fits),
    ],
    "grid_sample NCHW": _samples(_planes, {"NHWC": _channels_last, "NCHW": None}, _planes_by_ops),
    "grid_sample bicubic": _samples(partial(_images, mode="bicubic"), _LAYOUTS),
    "grid_sample nearest": _samples(partial(_images, mode="nearest"), _LAYOUTS),
    "grid_sample of volumes": _samples(_images, {"NDHWC": None, "NCDHW": _channels_first}),
}  # fmt: skip
