"""`backend="humming"`: products and mixtures by the kernels of the package ``humming-kernels``.

Ops have a checkpoint's tensors as inputs, as those of the other backends. What the kernels read is
made of these once (`prepared=`), and a kernel is compiled for each power of two of rows, when it is
called for the first time. The package is imported then.
"""

from __future__ import annotations

import json
import sys
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
    check_input(function, name, x)
    check_rows(function, w_packed.shape[-2])


def check_input(function: str, name: str, x: Any) -> None:
    """That the package has a kernel for x.

    Raises:
        KernelError: it is no tensor on a GPU, or has another dtype.
    """
    if not hasattr(x, "to") or on_cpu(x):
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


def check_rows(function: str, rows: int) -> None:
    """That the package has a kernel for a matrix of so many rows.

    Raises:
        KernelError: it has none.
    """
    if rows % 8:
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but the matrix has {rows} rows; expected a multiple "
            f"of 8. {LEAVE_OUT}"
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

    made = product(invariant)

    def run(
        x: Any, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any = None,
        *, y: Any, weight: Any, locks: Any,
    ) -> None:  # fmt: skip
        made(x, *weight, w_scale_2, bias, y=y, locks=locks)

    return ferrule.adopt(
        name,
        rule,
        run=run,
        prepared={"weight": (_repacked_matrix, "w_packed", "w_scale")},
        state=STATE,
        batch="N",
        partial_sums=partial_sums,
        version=f"1, invariant: {invariant}",
    )


def product(invariant: bool) -> Any:
    """A function that multiplies with a matrix in the kernels' order, and writes y."""

    def run(
        x: Any, weight: Any, scale: Any, w_scale_2: Any, bias: Any = None, *, y: Any, locks: Any
    ) -> None:
        if not y.numel():
            return
        if not x.numel():
            y.zero_()
        else:
            factor = w_scale_2 if w_scale_2.ndim else w_scale_2.reshape(1)
            rows, sums = x, y
            if x.ndim != 2:
                rows, sums = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            _launch("nvfp4_linear", rows, (weight, scale, factor), sums, None, locks, invariant)
        if bias is not None:
            y += bias

    return run


def experts(name: str, rule: str, activation: str, on_input: bool, invariant: bool) -> ferrule.Op:
    """The op of a mixture, without derivatives; arguments as of `linear` and `moe_op`."""
    layer = mixture(activation, on_input, invariant)

    def run(
        x: Any, weights: Any, ids: Any, *matrices: Any, w13: Any, w2: Any, locks: Any
    ) -> Any:  # fmt: skip
        expert_map = matrices[6] if len(matrices) > 6 else None
        return layer(x, weights, ids, expert_map, matrices[0].shape[2], w13, w2, locks)

    return ferrule.adopt(
        name,
        rule,
        run=run,
        prepared={
            "w13": (_repacked_w13, "w13_packed", "w13_scale", "w13_scale_2"),
            "w2": (_repacked_w2, "w2_packed", "w2_scale", "w2_scale_2"),
        },
        state=STATE,
        batch="M",
        partial_sums="I",
        version=f"1, {activation}, on input: {on_input}, invariant: {invariant}",
    )


def mixture(activation: str, on_input: bool, invariant: bool) -> Any:
    """A function that makes a layer of experts in the kernels' order, of such a width."""
    gelu = activation == "gelu_tanh"

    def layer(
        x: Any, weights: Any, ids: Any, expert_map: Any, width: int, w13: Any, w2: Any, locks: Any
    ) -> Any:
        e = w13[0].shape[0]
        if not (ids.numel() and x.numel() and e and width):
            return x.new_zeros(x.shape)
        ids = mapped_ids(ids, expert_map)
        slots, order = ids.reshape(-1).sort()  # those of no expert are first, or last
        layout = _layout(slots, e)
        weights = weights.float()
        rows, places = _rows(_aligned(x), order)
        both = x.new_empty(len(order), 2, width)
        _launch("nvfp4_moe", rows, w13, both.flatten(1), layout, locks, invariant)
        hidden = _hidden(both, weights.reshape(-1)[order] if on_input else None, gelu)
        made = x.new_empty(rows.shape)
        _launch("nvfp4_moe", hidden, w2, made, layout, locks, invariant)
        return _sums(made, places, ids, None if on_input else weights, e)

    return layer


# -- what is made once ----------------------------------------------------------------------------


def _require(function: str, device: Any) -> None:
    """That the package is there, and knows the GPU.

    Raises:
        KernelError: that is not so.
    """
    capability = _capability(device)
    if capability != (9, 0):
        has = f"has the compute capability {'.'.join(map(str, capability))}" if capability else ""
        raise ferrule.KernelError(
            f"[{function}] backend='humming' on {device}, which {has or 'is no NVIDIA GPU'}; "
            f"expected 9.0. {LEAVE_OUT}"
        )
    try:
        import humming.transform  # noqa: F401
    except ImportError as error:
        raise ferrule.KernelError(
            f"[{function}] backend='humming', but the package cannot be imported ({error}). "
            f"Install it, by pip install 'ferrule[humming]', or leave backend out."
        ) from error


def _capability(device: Any) -> tuple[int, ...]:
    import torch

    if torch.device(device).type != "cuda":
        return ()
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


_kernels: dict[Any, Any] = {}


def _kernel(function: str, x: Any, n: int, experts: int, invariant: bool) -> Any:
    """What the launch takes for a kernel: compiled for the next power of two of rows.

    Raises:
        KernelError: it would have to be compiled while a CUDA graph is captured.
    """
    m, k = x.shape
    rows = 1 << (min(m, MOST_ROWS) - 1).bit_length()
    key = rows, n, k, experts, x.dtype, invariant, x.get_device()
    known = _kernels.get(key)
    if known is not None:
        return known
    _require(function, x.device)
    if x.is_cuda and library(x).cuda.is_current_stream_capturing():
        raise ferrule.KernelError(
            f"[{function}] backend='humming' is called with {m} rows for the first time, while a "
            "CUDA graph is captured, which does not allow to compile. Call it once with as many "
            "before the capture."
        )
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    layer = _layer(x.dtype, n, k, experts, x.device)
    gemm = "grouped_contiguous" if experts else "dense"
    options = {"gemm_type": gemm, "use_batch_invariant": invariant}
    tuning = get_heuristics_config(layer, shape_m=rows, device=x.device, **options)
    texts = layer.to_str(), json.dumps(options), json.dumps(tuning)
    _kernels[key] = HummingKernel.prepare_kernels(*texts, x.device)
    return _kernels[key]


def repacked(function: str, w: Any, scale: Any, scale_2: Any) -> tuple[Any, ...]:
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
    x = x if x.is_contiguous() else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _repacked_matrix(w_packed: Any, w_scale: Any) -> tuple[Any, ...]:
    """Without a second scale, which may be a number: that is another array in each call."""
    ones = w_packed.new_ones(1, dtype=library(w_packed).float32)
    return repacked("nvfp4_linear", w_packed, w_scale, ones)[:2]


def one_scale(w13_scale_2: Any) -> None:
    """That gate and up of each expert have one second scale.

    Raises:
        KernelError: they have different ones.
    """
    differ = (w13_scale_2 != w13_scale_2[:, :1]).any(1)
    if bool(differ.any()):  # waits for the GPU, once for each weight
        raise ferrule.KernelError(
            "[nvfp4_moe] backend='humming', but gate and up of expert "
            f"{int(differ.nonzero()[0, 0])} have different second scales in w13_scale_2; expected "
            f"one for both, as the package has one for an expert. {LEAVE_OUT}"
        )


def _repacked_w13(w_packed: Any, w_scale: Any, w_scale_2: Any) -> tuple[Any, ...]:
    """Gate and up as one matrix."""
    one_scale(w_scale_2)
    both = w_packed.flatten(1, 2), w_scale.flatten(1, 2), w_scale_2[:, 0]
    return repacked("nvfp4_moe", *both)


def _repacked_w2(w_packed: Any, w_scale: Any, w_scale_2: Any) -> tuple[Any, ...]:
    return repacked("nvfp4_moe", w_packed, w_scale, w_scale_2)


# -- what each call runs --------------------------------------------------------------------------


def _launch(
    function: str, x: Any, weight: Any, y: Any, layout: Any, locks: Any, invariant: bool
) -> None:
    """``y = x @ w.T``; ``layout`` has the row where each expert's begin, and where the last end."""
    experts = 0 if layout is None else len(layout) - 1
    kernel = _kernel(function, x, y.shape[1], experts, invariant)
    if x.data_ptr() % 16:
        x = x.clone()
    w, scale, scale_2 = weight
    none = None, None, None
    launch = sys.modules["torch"].ops.humming.launch_kernel.out
    launch(kernel, x, w, scale, _aligned(scale_2), *none, None, y, *none, layout, locks, 1, 0)


def _layout(slots: Any, experts: int) -> Any:
    """``[E + 1]`` of int32: where slots of each expert begin, and where the last end."""
    torch = library(slots)
    each = torch.arange(experts + 1, dtype=slots.dtype, device=slots.device)
    return torch.searchsorted(slots, each, out_int32=True)


# What a launch reads and writes, four elements a thread.
_FOUR = """
    const long width = {width} / 4, row = thread_position_in_grid.x / width;
    const long at = 4 * (thread_position_in_grid.x % width);
    typedef metal::vec<T, 4> four;
"""

# Rows of tokens, one for each slot in order, and the place of each slot.
_rows = ferrule.op(
    "humming_rows",
    "x[M,H]:T, order[R]:int64 -> rows[R,H]:T, places[R]:int32 where H % 4 == 0",
    metal=_FOUR.format(width="H")
    + """
    const long slot = order[row];
    if (at == 0) places[slot] = int(row);
    *(device four*)(rows + row * H + at) =
        *(device const four*)(x + slot / (R / M) * H + at);
    """,
    grid="R * H // 4",
    threadgroup=256,
    version=1,
)

# activation(gate) * up in float32, rounded; a slot's weight multiplies both before.
_hidden = ferrule.op(
    "humming_hidden",
    "rows[R,2,I]:T, by[R]:float32?, gelu:bool -> hidden[R,I]:T where I % 4 == 0",
    metal=_FOUR.format(width="I")
    + """
    const four gates = *(device const four*)(rows + 2 * row * I + at);
    const four ups = *(device const four*)(rows + (2 * row + 1) * I + at);
    four made;
    const float weight = has_by ? by[row] : 1.0f;
    for (int j = 0; j < 4; j++) {
        const float gate = float(gates[j]) * weight, up = float(ups[j]) * weight;
        const float cubic = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
        const float value = gelu ? 0.5f * gate * (1.0f + metal::precise::tanh(cubic))
                                 : gate / (1.0f + metal::precise::exp(-gate));
        made[j] = T(value * up);
    }
    *(device four*)(hidden + row * I + at) = made;
    """,
    grid="R * I // 4",
    threadgroup=256,
    version=1,
)

# The weighted sum of each token's rows, of slots that have an expert.
_sums = ferrule.op(
    "humming_sums",
    "rows[R,H]:T, places[R]:int32, ids[M,Q]:J, weights[M,Q]:float32?, experts:int32 -> y[M,H]:T "
    "where H % 4 == 0",
    metal=_FOUR.format(width="H")
    + """
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (long slot = row * Q; slot < (row + 1) * Q; slot++) {
        if (ids[slot] < 0 || ids[slot] >= experts) continue;
        const four made = *(device const four*)(rows + long(places[slot]) * H + at);
        const float weight = has_weights ? weights[slot] : 1.0f;
        for (int j = 0; j < 4; j++) sum[j] += weight * float(made[j]);
    }
    four total;
    for (int j = 0; j < 4; j++) total[j] = T(sum[j]);
    *(device four*)(y + row * H + at) = total;
    """,
    grid="M * H // 4",
    threadgroup=256,
    version=1,
)
