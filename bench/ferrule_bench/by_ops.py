"""What the kernels do, in torch, one whole-array operation after another."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def sample(x: Tensor, grid: Tensor) -> Tensor:
    """grid_sample of NHWC images; positions in float32, as in the kernel."""
    batch, height, width, _ = x.shape
    grid = grid.float()
    column = ((grid[..., 0] + 1) * width - 1) / 2
    row = ((grid[..., 1] + 1) * height - 1) / 2
    west, north = column.floor(), row.floor()
    dx, dy = column - west, row - north
    image = torch.arange(batch, device=x.device)[:, None, None]
    total: Any = 0
    for down in (0, 1):
        for across in (0, 1):
            i, j = north.long() + down, west.long() + across
            inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            weight = (dx if across else 1 - dx) * (dy if down else 1 - dy) * inside
            value = x[image, i.clamp(0, height - 1), j.clamp(0, width - 1)]
            total = total + weight.to(x.dtype)[..., None] * value
    return total


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: q and k [B, T, Hk, Dk], v [B, T, Hv, Dv], g and beta [B, T, Hv], state
    [B, Hv, Dv, Dk]."""
    repeats = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
    outputs = []
    for t in range(v.shape[1]):
        key = k[:, t, :, None]
        state = state * g[:, t, :, None, None]
        delta = (v[:, t] - (state * key).sum(-1)) * beta[:, t, :, None]
        state = state + key * delta[..., None]
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1), state


def ssm(
    x: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, dt: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of a state space model with one group: x [N, 1, H, Dh], b and c [N, 1, 1, Ds], dt
    [N, 1, H], state [N, H, Dh, Ds]."""
    decay = torch.exp(-torch.exp(a_log) * dt[:, 0])
    state = (
        decay[..., None, None] * state + (dt[:, 0, :, None] * x[:, 0])[..., None] * b[:, 0, :, None]
    )
    y = (state * c[:, 0, :, None]).sum(-1) + x[:, 0] * d[:, None]
    return y[:, None], state


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """RWKV-7's recurrence: the state is [B, H, D, D], all else [B, T, H, D]."""
    outputs = []
    for t in range(r.shape[1]):
        kept = (state @ a[:, t, ..., None]) @ b[:, t, :, None]
        state = state * w[:, t, :, None] + v[:, t, ..., None] @ k[:, t, :, None] + kept
        outputs.append((state @ r[:, t, ..., None]).squeeze(-1))
    return torch.stack(outputs, 1), state


def bitlinear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """x times weights of -1, 0 and 1, four to a byte: row i of `packed` has rows i, i + n, i + 2 n
    and i + 3 n of the weights."""
    weights = torch.cat([(packed >> 2 * i) & 3 for i in range(4)]).to(x.dtype) - 1
    return (x @ weights.T) * scale


def compiled(function: Any, mode: str | None = None) -> Any:
    """`function` by torch.compile, whose backward pass may be run again and again."""
    import torch._functorch.config as config

    with contextlib.suppress(AttributeError):  # an older torch, which keeps all that it needs
        config.donated_buffer = False
    return torch.compile(function, dynamic=False, mode=mode)
