"""exp in Triton. Imports Triton, which reads the annotations of what it compiles as they are."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x, y, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, tl.exp(tl.load(x + i, mask=i < n)), mask=i < n)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of each element of a float32 tensor."""
    y = torch.empty_like(x)
    n = x.numel()
    _exp[(triton.cdiv(n, BLOCK),)](x, y, n, SIZE=BLOCK)
    return y
