"""A stand-in of `nvfp4_moe`, in plain torch."""

from __future__ import annotations

from typing import Any


def nvfp4_moe(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_packed: Any,
    w13_scale: Any,
    w13_scale_2: Any,
    w2_packed: Any,
    w2_scale: Any,
    w2_scale_2: Any,
    expert_map: Any = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """The experts that each token chose, weighted and summed in float32."""
    import torch

    from .linear import nvfp4_linear

    y = torch.zeros_like(hidden_states, dtype=torch.float32)
    halves = w13_scale_2 if w13_scale_2.ndim == 2 else w13_scale_2[:, None].expand(-1, 2)
    rows = halves.repeat_interleave(w13_packed.shape[1] // 2, 1)
    for e in range(w13_packed.shape[0]):
        tokens, places = torch.where(topk_ids == e)
        x = hidden_states[tokens].float()
        gate, up = nvfp4_linear(x, w13_packed[e], w13_scale[e], rows[e]).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype).float()
        out = nvfp4_linear(inner, w2_packed[e], w2_scale[e], w2_scale_2[e])
        y.index_add_(0, tokens, out * topk_weights[tokens, places, None].float())
    return y.to(hidden_states.dtype)
