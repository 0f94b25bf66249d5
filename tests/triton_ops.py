"""Functions that run kernels of Triton, for tests that adopt them. Importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, k, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, k * tl.load(x + i, mask=i < n), mask=i < n)


tuned_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 1024})], key=["n"]
)(scale_kernel)


def scale(x: torch.Tensor, k: float, y: torch.Tensor) -> None:
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, k, y, x.numel(), BLOCK=1024)


def tuned(x: torch.Tensor, k: float, y: torch.Tensor) -> None:
    if x.numel():
        tuned_kernel[lambda chosen: (triton.cdiv(x.numel(), chosen["BLOCK"]),)](x, k, y, x.numel())
