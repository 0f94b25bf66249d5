"""`backend="humming"`: products and mixtures by the kernels of the package ``humming-kernels``.

Ops have a checkpoint's tensors as inputs, as those of the other backends. What the kernels read is
made of these once (`prepared=`), and a kernel is compiled for each power of two of rows, when it is
called for the first time (`make=`). The package is imported then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ferrule

from ..arrays import dtype_name, library, mapped_ids
from ..rows import on_cpu

STATE = {"locks": "int32[2048]"}  # of stream-K; kernels leave zeros
MOST_ROWS = 65536  # for which there is a kernel of its own
LEAVE_OUT = "Leave backend out, for ferrule's own kernels."


def check(function: str, name: str, x: Any, w_packed: Any) -> None:
    """That the package has a kernel for x and such a matrix; its GPU is looked at by the op.

    Raises:
        KernelError: x is no tensor on a GPU, or has another dtype; or rows of w are too odd.
    """
    if library(x).__name__ != "torch" or on_cpu(x):
        where = "on a processor" if on_cpu(x) else f"an array of {library(x).__name__}"
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but {name} is {where}; expected torch's tensors on "
            f"an NVIDIA GPU of compute capability 9.0. {LEAVE_OUT}"
        )
    if dtype_name(x) not in ("bfloat16", "float16"):
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but {name} is of {dtype_name(x)}; expected bfloat16 "
            f"or float16. Cast it, or leave backend out."
        )
    if w_packed.shape[-2] % 8:
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but the matrix has {w_packed.shape[-2]} rows; "
            f"expected a multiple of 8. {LEAVE_OUT}"
        )


def refuse_factors(function: str) -> None:
    """Say that a matrix has more than one second scale.

    Raises:
        KernelError: always.
    """
    raise ferrule.KernelError(
        f"[{function}] backend='humming', but w_scale_2 has a scale for each row; expected one for "
        f"all, of shape [] or [1]: the package rounds others to bfloat16. {LEAVE_OUT}"
    )


def deterministic() -> bool:
    """Whether torch wants the same bits each time."""
    return bool(sys.modules["torch"].are_deterministic_algorithms_enabled())


def linear(name: str, rule: str, partial_sums: Any, invariant: bool) -> ferrule.Op:
    """The op of a product, without derivatives.

    Args:
        name, rule, partial_sums: as of `ferrule.adopt`.
        invariant: rows are the same, bit by bit, each time and in each batch.
    """
    return ferrule.adopt(
        name,
        rule,
        make=_make_linear,
        constants={
            "rows": _bucket("x.size // max(K, 1)"),
            "n": "N",
            "k": "K",
            "invariant": invariant,
        },
        prepared={"weight": (_repacked_matrix, "w_packed", "w_scale")},
        state=STATE,
        batch="N",
        partial_sums=partial_sums,
        version=1,
    )


def experts(name: str, rule: str, activation: str, on_input: bool, invariant: bool) -> ferrule.Op:
    """The op of a mixture, without derivatives; arguments as of `linear` and `moe_op`."""
    return ferrule.adopt(
        name,
        rule,
        make=_make_experts,
        constants={
            "rows": _bucket("ids.size"),
            "e": "E",
            "h": "H",
            "i": "I",
            "gelu": activation == "gelu_tanh",
            "on_input": on_input,
            "invariant": invariant,
        },
        prepared={
            "w13": (_repacked_w13, "w13_packed", "w13_scale", "w13_scale_2"),
            "w2": (_repacked_w2, "w2_packed", "w2_scale", "w2_scale_2"),
        },
        state=STATE,
        batch="M",
        partial_sums="I",
        version=1,
    )


def _bucket(rows: str) -> str:
    """The rows that a kernel is compiled for: the next power of two."""
    return f"next_pow2(max(min({rows}, {MOST_ROWS}), 1))"


# -- what is made once ----------------------------------------------------------------------------


def _require(function: str, device: Any) -> None:
    """That the package is there, and knows the GPU.

    Raises:
        KernelError: that is not so.
    """
    capability = _capability(device)
    if capability != (9, 0):
        raise ferrule.KernelError(
            f"[{function}] backend='humming' on {device}, which has the compute capability "
            f"{'.'.join(map(str, capability))}; expected 9.0. {LEAVE_OUT}"
        )
    try:
        import humming.transform  # noqa: F401
    except ImportError as error:
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but the package cannot be imported ({error}). "
            f"Install it, by pip install 'ferrule[humming]', or leave backend out."
        ) from error


def _capability(device: Any) -> tuple[int, int]:
    import torch

    return tuple(torch.cuda.get_device_capability(device))


def _layer(dtype: Any, n: int, k: int, experts: int, device: Any) -> Any:
    """The package's description of a matrix, or of one for each expert; 0 is no expert."""
    from humming.schema import BaseWeightSchema
    from humming.transform import prepare_layer_config

    schema = BaseWeightSchema.from_config({"quant_method": "modelopt", "quant_algo": "nvfp4"})
    return prepare_layer_config(
        n,
        k,
        schema.to_humming_schema(dtype),
        num_experts=experts,
        pad_n_to_multiple=128,
        pad_k_to_multiple=32,
        torch_dtype=dtype,
        device=device,
    )


def _kernel(layer: Any, rows: int, gemm: str, invariant: bool, device: Any) -> Any:
    """What the launch takes for a kernel: compiled for so many rows, and taken for all others."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    options = {"gemm_type": gemm, "use_batch_invariant": invariant}
    tuning = get_heuristics_config(layer, shape_m=rows, device=device, **options)
    return HummingKernel.prepare_kernels(
        layer.to_str(), json.dumps(options), json.dumps(tuning), device
    )


def _repacked(function: str, w: Any, scale: Any, scale_2: Any) -> tuple[Any, ...]:
    """A matrix, or one for each expert, in the kernels' order: of elements, scales, second ones."""
    import torch

    _require(function, w.device)
    from humming.transform import transform_humming_tensors

    experts = w.shape[0] if w.ndim == 3 else 0
    scale_2 = scale_2.clone()
    if not w.numel():
        return w.clone(), scale.clone(), scale_2
    tensors = {
        "weight": _aligned(w).view(torch.int32),
        "weight_scale": _aligned(scale).view(torch.float8_e4m3fn),
        "weight_scale_2": scale_2,
    }
    n, k = w.shape[-2], 2 * w.shape[-1]
    layer = _layer(torch.bfloat16, n, k, experts, w.device)  # of float16 it is the same
    made = transform_humming_tensors(layer, tensors)
    return tuple([made[name] for name in tensors])


def _aligned(x: Any) -> Any:
    """A tensor that is contiguous and begins at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _repacked_matrix(w_packed: Any, w_scale: Any) -> tuple[Any, ...]:
    """Without a second scale, which may be a number: that is another array in each call."""
    ones = w_packed.new_ones(1, dtype=library(w_packed).float32)
    return _repacked("nvfp4_linear", w_packed, w_scale, ones)[:2]


def _repacked_w13(w_packed: Any, w_scale: Any, w_scale_2: Any) -> tuple[Any, ...]:
    """Gate and up as one matrix.

    Raises:
        KernelError: they have different second scales.
    """
    differ = (w_scale_2 != w_scale_2[:, :1]).any(1)
    if bool(differ.any()):  # waits for the GPU, once for each weight
        raise ferrule.KernelError(
            "[nvfp4_moe] backend='humming', but gate and up of expert "
            f"{int(differ.nonzero()[0, 0])} have different second scales in w13_scale_2; expected "
            f"one for both, as the package has one for an expert. {LEAVE_OUT}"
        )
    both = w_packed.flatten(1, 2), w_scale.flatten(1, 2), w_scale_2[:, 0]
    return _repacked("nvfp4_moe", *both)


def _repacked_w2(w_packed: Any, w_scale: Any, w_scale_2: Any) -> tuple[Any, ...]:
    return _repacked("nvfp4_moe", w_packed, w_scale, w_scale_2)


# -- what each call runs --------------------------------------------------------------------------


def _make_linear(
    *, device: str, T: str, rows: int, n: int, k: int, invariant: bool, **_: Any
) -> Callable[..., None]:
    """A product's function for a dtype, a matrix' sizes and a bucket of rows."""
    import torch

    _require("nvfp4_linear", device)
    at = torch.device(device)
    kernel = launch = None
    if n and k:
        kernel = _kernel(_layer(getattr(torch, T), n, k, 0, at), rows, "dense", invariant, at)
        launch = torch.ops.humming.launch_kernel.out  # which is there now

    def run(
        x: Any, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any = None,
        *, y: Any, weight: Any, locks: Any,
    ) -> None:  # fmt: skip
        if not y.numel():
            return
        if launch is None:
            y.zero_()
        else:
            matrix = *weight, _aligned(w_scale_2.reshape(1))
            _launch(launch, kernel, x.reshape(-1, k), matrix, y.view(-1, n), None, locks)
        if bias is not None:
            y += bias

    return run


def _launch(launch: Any, kernel: Any, x: Any, weight: Any, y: Any, layout: Any, locks: Any) -> None:
    """``y = x @ w.T``; ``layout`` has the row where each expert's begin, and where the last end."""
    if x.data_ptr() % 16:
        x = x.clone()
    none = None, None, None
    launch(kernel, x, *weight, *none, None, y, *none, layout, locks, 1, 0)


def _make_experts(
    *, device: str, T: str, rows: int, e: int, h: int, i: int, gelu: bool, on_input: bool,
    invariant: bool, **_: Any,
) -> Callable[..., None]:  # fmt: skip
    """A mixture's function for a dtype, matrices' sizes and a bucket of slots."""
    import torch

    _require("nvfp4_moe", device)
    at, dtype = torch.device(device), getattr(torch, T)
    kernels: list[Any] = []
    launch: Any = None
    if e and h and i:
        layers = _layer(dtype, 2 * i, h, e, at), _layer(dtype, h, i, e, at)
        kernels = [_kernel(each, rows, "grouped_contiguous", invariant, at) for each in layers]
        launch = torch.ops.humming.launch_kernel.out
    count = torch.arange(e + 1, dtype=torch.int32, device=at)

    def run(
        x: Any, weights: Any, ids: Any, *matrices: Any, y: Any, w13: Any, w2: Any, locks: Any
    ) -> None:
        if launch is None or not ids.numel():
            y.zero_()
            return
        slots = _Slots(ids, matrices[6] if len(matrices) > 6 else None, e, count)
        both = x.new_empty(ids.numel(), 2 * i)
        _launch(launch, kernels[0], x[slots.tokens], w13, both, slots.layout, locks)
        by = weights.float().reshape(-1)[slots.order, None] if on_input else None
        rows = x.new_empty(ids.numel(), h)
        _launch(launch, kernels[1], _hidden(both, by, gelu), w2, rows, slots.layout, locks)
        slots.add_up(rows, None if on_input else weights, y)

    return run


class _Slots:
    """The slots of a call, by expert: those of none come last, and nothing is made of them.

    Attributes:
        inside: ``[M, k]``: which of them have an expert.
        order: ``[M * k]``: the slots, sorted.
        tokens: ``[M * k]``: the token of each of these.
        layout: ``[E + 1]`` of int32: where the slots of each expert begin, and where the last end.
    """

    def __init__(self, ids: Any, expert_map: Any, experts: int, count: Any) -> None:
        import torch

        ids = mapped_ids(ids, expert_map)
        self.inside = (ids >= 0) & (ids < experts)
        flat = torch.where(self.inside, ids, experts).to(torch.int32).reshape(-1)
        flat, self.order = flat.sort(stable=True)
        self.tokens = self.order // ids.shape[1]
        self.layout = torch.searchsorted(flat, count, out_int32=True)

    def add_up(self, rows: Any, weights: Any, y: Any) -> None:
        """Write the weighted sum of each token's rows to y."""
        import torch

        order = self.order
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        rows = rows[places].view(*self.inside.shape, -1).float()
        if weights is not None:
            rows *= weights[..., None]
        y.copy_(torch.where(self.inside[..., None], rows, 0).sum(1))


def _hidden(both: Any, by: Any, gelu: bool) -> Any:
    """``activation(gate) * up``, in float32, rounded; a slot's weight multiplies both before."""
    from torch.nn import functional

    gate, up = both.chunk(2, 1)
    gate = gate.float()
    if by is not None:
        gate *= by
    gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    gate *= up
    if by is not None:
        gate *= by
    return gate.to(both.dtype)
