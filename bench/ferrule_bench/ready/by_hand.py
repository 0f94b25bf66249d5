"""grid_sample of images with channels last, by hand in CUDA: what can be reached.

A thread takes 16 bytes of a point's channels; gradients of images are added up by reductions of 16
bytes, which GPUs of compute capability 9.0 and more have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import cuda

_THREADS = 256
_PLACE = """
  constexpr int V = 16 / sizeof(T);
  struct alignas(16) Word { T v[V]; };
  const unsigned e = blockIdx.x * blockDim.x + threadIdx.x, words = C / V;
  if (e >= n) return;
  const unsigned point = e / words, channel = e % words * V;
  const float column = ((load(grid + 2 * point) + 1) * W - 1) / 2;
  const float row = ((load(grid + 2 * point + 1) + 1) * H - 1) / 2;
  const int west = int(floorf(column)), north = int(floorf(row));
  const float dx = column - west, dy = row - north;
  const size_t image = size_t(point / points) * H * W * C + channel;
  const size_t own = size_t(point) * C + channel;
"""
_CORNERS = """
#pragma unroll
  for (int corner = 0; corner < 4; ++corner) {
    const int i = north + corner / 2, j = west + corner % 2;
    if (i < 0 || i >= H || j < 0 || j >= W) continue;
    const float across = corner % 2 ? dx : 1 - dx, down = corner / 2 ? dy : 1 - dy;
    const size_t at = image + size_t(i * W + j) * C;
    const Word pixel = *reinterpret_cast<const Word*>(x + at);
"""
FORWARD = f"""
    const T* __restrict__ x, const T* __restrict__ grid, T* __restrict__ out, int H, int W, int C,
    int points, unsigned n) {{{_PLACE}
  float sums[V] = {{}};{_CORNERS}
    for (int k = 0; k < V; ++k) sums[k] += across * down * load(pixel.v + k);
  }}
  Word made;
  for (int k = 0; k < V; ++k) made.v[k] = narrow(sums[k]);
  *reinterpret_cast<Word*>(out + own) = made;
}}
"""
BACKWARD = f"""
    const T* __restrict__ x, const T* __restrict__ grid, const T* __restrict__ cotangent,
    T* __restrict__ x_grad, T* __restrict__ grid_grad, int H, int W, int C, int points,
    unsigned n) {{{_PLACE}
  const Word given = *reinterpret_cast<const Word*>(cotangent + own);
  float along_x = 0, along_y = 0;{_CORNERS}
    float slope = 0, terms[V];
    for (int k = 0; k < V; ++k) {{
      slope += load(pixel.v + k) * load(given.v + k);
      terms[k] = across * down * load(given.v + k);
    }}
    along_x += corner % 2 ? slope * down : -slope * down;
    along_y += corner / 2 ? slope * across : -slope * across;
#ifdef HALF
    Word added;
    for (int k = 0; k < V; ++k) added.v[k] = narrow(terms[k]);
    const uint4 w = reinterpret_cast<const uint4&>(added);
    asm volatile("red.global.add.noftz.v4.f16x2 [%0], {{%1, %2, %3, %4}};" ::
                 "l"(x_grad + at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
#else
    asm volatile("red.global.add.v4.f32 [%0], {{%1, %2, %3, %4}};" ::
                 "l"(x_grad + at), "f"(terms[0]), "f"(terms[1]), "f"(terms[2]), "f"(terms[3])
                 : "memory");
#endif
  }}
  for (int d = words / 2; d; d /= 2) {{
    along_x += __shfl_xor_sync(~0u, along_x, d);
    along_y += __shfl_xor_sync(~0u, along_y, d);
  }}
  if (channel == 0) {{
    grid_grad[2 * point] = narrow(along_x * W / 2);
    grid_grad[2 * point + 1] = narrow(along_y * H / 2);
  }}
}}
"""


def fits(arrays: Sequence[Any]) -> bool:
    """Whether it is for such arrays: on a GPU that has the instructions, of a power of 2 words."""
    x, grid, *_ = arrays
    words = x.shape[-1] * x.element_size() // 16
    return (
        x.is_cuda
        and x.dtype in (torch.float32, torch.float16)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.shape[-1] * x.element_size() % 16 == 0
        and words in (1, 2, 4, 8, 16, 32)
        and grid.numel() // 2 * words % 32 == 0
    )


def sample(x: Tensor, grid: Tensor) -> Tensor:
    """Samples of `x`, (B, H, W, C), at the points of `grid`, (B, gH, gW, 2)."""
    samples: Tensor = _Samples.apply(x, grid)
    return samples


class _Samples(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(x, grid)
        out = torch.empty((*grid.shape[:3], x.shape[3]), dtype=x.dtype, device=x.device)
        _launch(FORWARD, x, grid, out)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, grid = ctx.saved_tensors
        x_grad, grid_grad = torch.zeros_like(x), torch.empty_like(grid)
        _launch(BACKWARD, x, grid, cotangent, x_grad, grid_grad)
        return x_grad, grid_grad


def _launch(text: str, x: Tensor, grid: Tensor, *others: Tensor) -> None:
    n = grid.numel() // 2 * x.shape[3] * x.element_size() // 16
    sizes = [*x.shape[1:], grid.shape[1] * grid.shape[2], n]
    kernel = _compiled(text, half=x.dtype == torch.float16)
    kernel([x, grid, *others, *sizes], (-(-n // _THREADS), 1, 1), (_THREADS, 1, 1))


_compiled = lru_cache(cuda.by_hand)
