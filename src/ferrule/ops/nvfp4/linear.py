"""A stand-in of `nvfp4_linear`, in plain torch."""

from __future__ import annotations

from typing import Any


def nvfp4_linear(
    x: Any,
    w_packed: Any,
    w_scale: Any,
    w_scale_2: Any,
    bias: Any = None,
    *,
    backend: str | None = None,
) -> Any:
    """``x @ w.T + bias``, in float32 and rounded once."""
    import torch

    from .quantizing import dequantize_nvfp4

    y = x.float() @ dequantize_nvfp4(w_packed, w_scale, dtype=torch.float32).T * w_scale_2
    return (y if bias is None else y + bias).to(x.dtype)
