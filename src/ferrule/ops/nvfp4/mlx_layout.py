"""`from_mlx` and `to_mlx`: MLX's arrays of mode "nvfp4", which have the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import ferrule

from .quantizing import E2M1_MAX, E4M3_MAX

_RANGE = E2M1_MAX * E4M3_MAX


def from_mlx(w: Any, scales: Any, global_scale: Any = None) -> tuple[Any, Any, Any]:
    """The tensors of `NVFP4Linear` from what MLX's ``quantize(w, mode="nvfp4")`` gives.

    Args:
        w: ``[*W, N, K / 8]`` of uint32, of MLX or NumPy.
        scales: ``[*W, N, K / 16]`` of uint8.
        global_scale: what MLX's `quantize` was given: the largest magnitude, a number or ``[*W]``.

    Returns:
        w_packed ``[*W, N, K / 2]``, w_scale ``[*W, N, K / 16]`` and w_scale_2 ``[*W]``, on the CPU:
        global_scale by 2688, or 1.

    Raises:
        KernelError: dtypes or shapes are others.
    """
    words, bytes_ = np.array(w), np.array(scales)
    if (
        words.dtype != np.uint32
        or bytes_.dtype != np.uint8
        or ((*words.shape[:-1], words.shape[-1] // 2) != bytes_.shape)
    ):
        raise ferrule.KernelError(
            f"[from_mlx] w is of {words.dtype} and {words.shape}, scales of {bytes_.dtype} and "
            f"{bytes_.shape}; expected uint32 [*W, N, K / 8] and uint8 [*W, N, K / 16], as MLX's "
            "quantize(w, mode='nvfp4') gives them."
        )
    batch = words.shape[:-2]
    whole = np.ones(batch, np.float32)
    if global_scale is not None:
        given = np.array(global_scale, np.float32)
        whole = np.broadcast_to(given.reshape(batch if given.size > 1 else ()), batch) / np.float32(
            _RANGE
        )
    return (
        torch.from_numpy(words.view(np.uint8)),
        torch.from_numpy(bytes_).view(torch.float8_e4m3fn),
        torch.from_numpy(np.array(whole, np.float32)),
    )


def to_mlx(w_packed: Any, w_scale: Any, w_scale_2: Any) -> tuple[Any, Any, Any]:
    """What MLX has of the tensors of `NVFP4Linear`, byte for byte.

    Args:
        w_packed, w_scale: as `from_mlx` returns them, on any device.
        w_scale_2: ``[*W]``: one of a matrix. MLX has none for each row.

    Returns:
        ``w, scales, global_scale``, of MLX; the last is None where w_scale_2 is 1, and else the one
        float32 with the fewest digits that by 2688 is w_scale_2, of those next to 2688 times it.

    Raises:
        KernelError: w_scale_2 has another shape; or MLX is not installed.
    """
    try:
        import mlx.core as mx
    except ImportError:
        raise ferrule.KernelError(
            "[to_mlx] MLX is not installed: pip install mlx, or pip install 'mlx[cpu]'."
        ) from None
    scale_2 = torch.as_tensor(w_scale_2, dtype=torch.float32).cpu()
    if scale_2.shape != w_packed.shape[:-2]:
        raise ferrule.KernelError(
            f"[to_mlx] w_scale_2 has the shape {tuple(scale_2.shape)}; expected "
            f"{tuple(w_packed.shape[:-2])}: MLX has one for a matrix. Give q, k and v, or gate and "
            "up, each alone."
        )
    words = w_packed.cpu().contiguous().numpy().view(np.uint32)
    scales = w_scale.cpu().contiguous().view(torch.uint8).numpy()
    whole = None if bool((scale_2 == 1).all()) else mx.array(_largest(scale_2.numpy()))
    return mx.array(words), mx.array(scales), whole


def _largest(scale_2: Any) -> Any:
    """The largest magnitudes that quotients by 2688 are of."""
    middle = scale_2 * np.float32(_RANGE)
    near = [
        np.nextafter(middle, np.float32(0)),
        middle,
        np.nextafter(middle, np.float32(np.inf)),
    ]
    best, fewest = middle, np.full(middle.shape, 99)
    for candidate in near:
        bits = candidate.view(np.uint32) if candidate.ndim else np.array(candidate).view(np.uint32)
        digits = 32 - np.log2((bits & -bits.astype(np.int64)).astype(np.float64))
        better = (candidate / np.float32(_RANGE) == scale_2) & (digits < fewest)
        best, fewest = np.where(better, candidate, best), np.where(better, digits, fewest)
    return best.astype(np.float32)
