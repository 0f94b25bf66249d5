"""`NVFP4Linear` and `NVFP4Experts`: layers of torch whose weights are NVFP4.

The packed weights and their scales are buffers, not parameters. They are not trained, so no
optimiser, no count of parameters and no gradient clipping is to see them; FSDP casts parameters of
floats, E4M3 among them, to its dtype of computing, and leaves buffers as they are. A state_dict has
both alike, and transformers' own NVFP4 layer decides the same. The bias is a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import ferrule

from . import humming, humming_order
from .buffers import Matrix, Quantized
from .linear import linear_op, nvfp4_linear
from .moe import ACTIVATIONS as GATES
from .moe import moe_op, nvfp4_moe
from .quantizing import GROUP, linear_w4a4, quantize_nvfp4

ACTIVATIONS = (None, "nvfp4")


class NVFP4Linear(Quantized):
    """``x @ w.T + bias`` with a weight in NVFP4, in the place of `torch.nn.Linear`.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: whether there is one, a parameter.
        activations: None: inputs stay what they are (W4A16). ``"nvfp4"``: they are quantised as
            kernels for Blackwell do it, by `quantize_activations_nvfp4`, in plain torch: to check
            models that are made for it. The layer has an ``input_scale`` then.
        device, dtype: of the bias, and where the rest is.

    Buffers: ``w_packed`` ``[N, K / 2]`` of uint8, ``w_scale`` ``[N, K / 16]`` of float8_e4m3fn,
    ``w_scale_2`` of float32: ``[]``, or ``[N]`` where rows have their own, as those of q, k and v
    in one layer do. They begin as a matrix of zeros, and keep their dtypes in `.to(torch.half)`.

    Raises:
        KernelError: in_features is no multiple of 16, or activations is something else.

    Example:
        >>> layer = NVFP4Linear.from_linear(nn.Linear(32, 8))
        >>> layer(torch.zeros(2, 32)).shape
        torch.Size([2, 8])
    """

    w_packed: Any
    w_scale: Any
    w_scale_2: Any
    input_scale: Any
    w_in_order: Any
    w_scale_in_order: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activations: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        _check_sizes("NVFP4Linear", activations, in_features=in_features)
        self.in_features, self.out_features = in_features, out_features
        self.activations = activations
        self._add("w_packed", (out_features, in_features // 2), torch.uint8, device)
        self._add("w_scale", (out_features, in_features // GROUP), torch.float8_e4m3fn, device)
        self._add("w_scale_2", (), torch.float32, device)
        if activations is not None:
            self._add("input_scale", (), torch.float32, device)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_tensors(
        cls, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any = None, input_scale: Any = None
    ) -> NVFP4Linear:
        """The layer of what `quantize_nvfp4` returned, and of a bias; with an input_scale W4A4."""
        if getattr(w_packed, "ndim", 0) != 2:
            raise ferrule.KernelError(
                f"[NVFP4Linear] w_packed has the shape {tuple(getattr(w_packed, 'shape', ()))}; "
                "expected [N, K / 2], of one matrix."
            )
        rows, half = w_packed.shape
        activations = None if input_scale is None else "nvfp4"
        layer = cls(half * 2, rows, bias=False, activations=activations, device="meta")
        tensors = {"w_packed": w_packed, "w_scale": w_scale, "w_scale_2": w_scale_2}
        layer.fill(tensors if input_scale is None else {**tensors, "input_scale": input_scale})
        if bias is not None and tuple(getattr(bias, "shape", ())) != (rows,):
            raise ferrule.KernelError(
                f"[NVFP4Linear] bias is a {type(bias).__name__} of shape "
                f"{tuple(getattr(bias, 'shape', ()))}; expected a tensor of shape {(rows,)}, as "
                "w_packed has rows, or None."
            )
        layer.bias = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)
        return layer

    @classmethod
    def from_linear(cls, linear: Any) -> NVFP4Linear:
        """The layer with a `torch.nn.Linear`'s weight, quantised, and its bias, which is shared.

        Raises:
            KernelTypeError: it has no weight and bias, or None in its place.
            KernelError: as `quantize_nvfp4` says.
        """
        if not (hasattr(linear, "weight") and hasattr(linear, "bias")):
            raise ferrule.KernelTypeError(
                f"[NVFP4Linear] from_linear got a layer {type(linear).__name__}; expected one with "
                "weight and bias, as torch.nn.Linear. Of a matrix alone give "
                "from_tensors(*quantize_nvfp4(matrix))."
            )
        layer = cls.from_tensors(*quantize_nvfp4(linear.weight.detach()))
        layer.bias = linear.bias
        return layer.train(linear.training)  # type: ignore[no-any-return]

    def _shapes_of(self, name: str) -> list[tuple[int, ...]]:
        n, k = self.out_features, self.in_features
        shapes: dict[str, list[tuple[int, ...]]] = {
            "w_packed": [(n, k // 2)],
            "w_scale": [(n, k // GROUP)],
            "w_scale_2": [(), (1,), (n,)],
            "input_scale": [()],
        }
        return shapes[name]

    _function, _input, _first = "nvfp4_linear", "x", "w_in_order"

    @property
    def _matrices(self) -> list[Matrix]:
        return [Matrix("w", self.out_features, self.in_features)]

    @property
    def _op_with_copies(self) -> ferrule.Op:
        return linear_op("nvfp4", False, False, "humming")

    def _check_scales(self) -> None:
        if self.w_scale_2.numel() != 1:
            humming.refuse_factors(self._function)

    def forward(self, x: Any) -> Any:
        """``[*S, K] -> [*S, N]``, of x's dtype, or that of `torch.autocast`."""
        bias = self.bias
        if torch._C._is_any_autocast_enabled():
            x, bias = _autocast(x), None if bias is None else _autocast(bias)
        if self.prepared:
            sizes = self.out_features, self.in_features
            op = humming_order.linear_op(*sizes, bias is not None, humming.deterministic())
            w = self.w_in_order, self.w_scale_in_order, self.w_scale_2
            return self._call(op, x, *w, *[bias] * (bias is not None))
        w = self.w_packed, self.w_scale, self.w_scale_2
        if self.sharded:
            from . import shards  # which imports DTensor

            return shards.linear(x, *w, bias, self.backend)
        if self.activations is None:
            return nvfp4_linear(x, *w, bias, backend=self.backend)
        return linear_w4a4(x, self.input_scale, *w, bias)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        return text if self.activations is None else f"{text}, activations={self.activations!r}"


class NVFP4Experts(Quantized):
    """The experts of a mixture, each a gated MLP, with weights in NVFP4.

    It is called as the stacked experts of transformers 5 are (`Qwen3MoeExperts`, `MixtralExperts`
    and others), in whose place it is put.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of 16.
        intermediate_size: I, of one expert, a multiple of 16.
        activation: of the gate, as `nvfp4_moe` has it.
        activations: as of `NVFP4Linear`.
        device: where the buffers are.

    Buffers: ``w13_packed`` ``[E, 2 * I, H / 2]`` (rows of the gate, then of up), ``w13_scale``
    ``[E, 2 * I, H / 16]``, ``w13_scale_2`` ``[E, 2]`` (of gate and up) or ``[E]``; ``w2_packed``
    ``[E, H, I / 2]``, ``w2_scale`` ``[E, H, I / 16]``, ``w2_scale_2`` ``[E]``.

    Raises:
        KernelError: a size is no multiple of 16, or activation or activations is something else.
    """

    w13_packed: Any
    w13_scale: Any
    w13_scale_2: Any
    w2_packed: Any
    w2_scale: Any
    w2_scale_2: Any
    w13_input_scale: Any
    w2_input_scale: Any
    w13_in_order: Any
    w13_scale_in_order: Any
    w2_in_order: Any
    w2_scale_in_order: Any

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        activations: str | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        _check_sizes(
            "NVFP4Experts",
            activations,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        )
        if activation not in (*GATES,):
            raise ferrule.KernelError(
                f"[NVFP4Experts] activation={activation!r}; expected one of "
                f"{', '.join(map(repr, GATES))}."
            )
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        self.activations = activations
        for name in _BUFFERS_OF_EXPERTS[: 6 if activations is None else 8]:
            dtype = torch.uint8 if name.endswith("packed") else torch.float8_e4m3fn
            dtype = torch.float32 if name.endswith(("scale_2", "input_scale")) else dtype
            self._add(name, self._shapes_of(name)[0], dtype, device)

    @classmethod
    def from_tensors(cls, activation: str = "silu", **tensors: Any) -> NVFP4Experts:
        """The experts of these buffers, by their names; with input scales W4A4.

        Raises:
            KernelError: one is missing, has another dtype or shape, or there is no such buffer.
        """
        _check_names(tensors)
        experts, rows, half = tensors["w13_packed"].shape
        activations = "nvfp4" if "w13_input_scale" in tensors else None
        sizes = experts, half * 2, rows // 2
        layer = cls(*sizes, activation=activation, activations=activations, device="meta")
        layer.fill(tensors)
        return layer

    def _shapes_of(self, name: str) -> list[tuple[int, ...]]:
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        both = (2, i) if self.sharded else (2 * i,)  # that a part of I is of gate and up alike
        shapes: dict[str, list[tuple[int, ...]]] = {
            "w13_packed": [(e, *both, h // 2)],
            "w13_scale": [(e, *both, h // GROUP)],
            "w13_scale_2": [(e, 2), (e,)],
            "w2_packed": [(e, h, i // 2)],
            "w2_scale": [(e, h, i // GROUP)],
            "w2_scale_2": [(e,)],
            "w13_input_scale": [(e,)],
            "w2_input_scale": [(e,)],
        }
        return shapes[name]

    _function, _input, _first = "nvfp4_moe", "hidden_states", "w13_in_order"

    @property
    def _matrices(self) -> list[Matrix]:
        h, i = self.hidden_size, self.intermediate_size
        return [Matrix("w13", 2 * i, h), Matrix("w2", h, i)]

    @property
    def _op_with_copies(self) -> ferrule.Op:
        return moe_op("nvfp4", "silu", False, False, "humming")

    def _check_scales(self) -> None:
        humming.one_scale(self.w13_scale_2.reshape(self.num_experts, -1))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """The weighted sum of what each token's experts give.

        Args:
            hidden_states: ``[M, H]``.
            top_k_index: ``[M, k]`` of integers: the experts of each token.
            top_k_weights: ``[M, k]``.

        Returns:
            ``[M, H]``, of hidden_states' dtype; with `torch.autocast` it is made in autocast's.
        """
        if not torch._C._is_any_autocast_enabled():
            return self._forward(hidden_states, top_k_index, top_k_weights)
        y = self._forward(_autocast(hidden_states), top_k_index, top_k_weights)
        return y.to(hidden_states.dtype)

    def _forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        if self.activations is not None:
            return self._w4a4(hidden_states, top_k_index, top_k_weights)
        if self.prepared:
            sizes = self.hidden_size, self.intermediate_size
            op = humming_order.moe_op(*sizes, self.activation, humming.deterministic())
            second = self.w13_scale_2.view(self.num_experts, -1)
            w13 = self.w13_in_order, self.w13_scale_in_order, second
            w2 = self.w2_in_order, self.w2_scale_in_order, self.w2_scale_2
            return self._call(op, hidden_states, top_k_weights, top_k_index, *w13, *w2)
        w13 = self.w13_packed, self.w13_scale, self.w13_scale_2
        w2 = self.w2_packed, self.w2_scale, self.w2_scale_2
        if self.sharded:
            from . import shards  # which imports DTensor

            call = hidden_states, top_k_weights, top_k_index, (*w13, *w2), self.activation
            return shards.moe(*call, self.backend)
        given = hidden_states, top_k_weights, top_k_index, *w13, *w2, None, self.activation
        return nvfp4_moe(*given, backend=self.backend)

    def _w4a4(self, hidden_states: Any, ids: Any, weights: Any) -> Any:
        y = torch.zeros_like(hidden_states, dtype=torch.float32)
        scale_2 = self.w13_scale_2 if self.w13_scale_2.ndim == 2 else self.w13_scale_2[:, None]
        for e in range(self.num_experts):
            tokens, places = torch.where(ids == e)
            rows = scale_2[e].repeat_interleave(2 * self.intermediate_size // scale_2.shape[1])
            both = linear_w4a4(
                hidden_states[tokens],
                self.w13_input_scale[e],
                self.w13_packed[e],
                self.w13_scale[e],
                rows,
            )
            gate, up = both.chunk(2, -1)
            inner = gated(self.activation, gate, up)
            w2 = self.w2_packed[e], self.w2_scale[e], self.w2_scale_2[e]
            out = linear_w4a4(inner, self.w2_input_scale[e], *w2)
            y.index_add_(0, tokens, out.float() * weights[tokens, places, None].float())
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, hidden_size={self.hidden_size}"
        text += f", intermediate_size={self.intermediate_size}, activation={self.activation!r}"
        return text if self.activations is None else f"{text}, activations={self.activations!r}"


_BUFFERS_OF_EXPERTS = (
    "w13_packed",
    "w13_scale",
    "w13_scale_2",
    "w2_packed",
    "w2_scale",
    "w2_scale_2",
    "w13_input_scale",
    "w2_input_scale",
)


def _check_names(tensors: Mapping[str, Any]) -> None:
    """That all buffers of experts are there, and nothing else; both input scales, or none."""
    inputs = any(name in tensors for name in _BUFFERS_OF_EXPERTS[6:])
    names = _BUFFERS_OF_EXPERTS if inputs else _BUFFERS_OF_EXPERTS[:6]
    lacking = [name for name in names if name not in tensors]
    unknown = [name for name in tensors if name not in names]
    if lacking or unknown:
        raise ferrule.KernelError(
            f"[NVFP4Experts] from_tensors lacks {', '.join(lacking) or 'nothing'}, and has no use "
            f"for {', '.join(unknown) or 'nothing else'}; expected {', '.join(names)}."
        )
    shape = tuple(getattr(tensors["w13_packed"], "shape", ()))
    if len(shape) != 3:
        raise ferrule.KernelError(
            f"[NVFP4Experts] w13_packed is a {type(tensors['w13_packed']).__name__} of shape "
            f"{shape}; expected a tensor [E, 2 * I, H / 2]. Stack the matrices of all experts."
        )


def gated(activation: str, gate: Any, up: Any) -> Any:
    """``activation(gate) * up``, of the reference of W4A4.

    Raises:
        KernelError: another activation than "silu".
    """
    if activation != "silu":
        raise ferrule.KernelError(
            f"[NVFP4Experts] activation={activation!r}; activations='nvfp4' has 'silu' alone."
        )
    return nn.functional.silu(gate) * up


def _autocast(x: Any) -> Any:
    """Floats as layers of torch get them: of autocast's dtype, where that is on."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _check_sizes(module: str, activations: str | None, **sizes: int) -> None:
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or size <= 0 or size % GROUP:
            raise ferrule.KernelError(
                f"[{module}] {name}={size!r}; expected a positive multiple of {GROUP}, since "
                f"{GROUP} neighbours share a scale. Leave this layer as it is, or pad it."
            )
    if activations not in ACTIVATIONS:
        raise ferrule.KernelError(
            f"[{module}] activations={activations!r}; expected None (W4A16) or 'nvfp4' (W4A4)."
        )
