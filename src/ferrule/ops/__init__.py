"""Ops that are ready to use, each written as any user of ferrule would write it.

Nothing here is special: the modules import nothing of ferrule but its public names, and each is a
model to copy: a rule, bodies, derivatives, and a reference, the same in ordinary array code (of
`grid_sample` the Metal body is it), with which `ferrule.compare` compares the bodies on any host.
The tests compare each with torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import nvfp4
from .counting import histogram
from .gathered import gather_mm
from .norms import layer_norm, rms_norm
from .nvfp4.linear import mxfp4_linear, nvfp4_linear
from .nvfp4.moe import mxfp4_moe, nvfp4_moe, nvfp4_moe_batched
from .products import matmul
from .quantized import gather_qmm, quantized_matmul
from .quantizing import dequantize, quantize
from .rotary import rope, rope_
from .sampling import grid_sample
from .segments import segment_sum
from .selection import topk
from .softmaxes import log_softmax, softmax

if TYPE_CHECKING:
    from .nvfp4.modules import NVFP4Experts as NVFP4Experts
    from .nvfp4.modules import NVFP4Linear as NVFP4Linear
    from .nvfp4.quantizing import dequantize_nvfp4 as dequantize_nvfp4
    from .nvfp4.quantizing import quantize_nvfp4 as quantize_nvfp4

# Of torch, which is imported with them.
_NVFP4 = ("NVFP4Experts", "NVFP4Linear", "dequantize_nvfp4", "quantize_nvfp4")

__all__ = [
    "NVFP4Experts",
    "NVFP4Linear",
    "dequantize",
    "dequantize_nvfp4",
    "gather_mm",
    "gather_qmm",
    "grid_sample",
    "histogram",
    "layer_norm",
    "log_softmax",
    "matmul",
    "mxfp4_linear",
    "mxfp4_moe",
    "nvfp4",
    "nvfp4_linear",
    "nvfp4_moe",
    "nvfp4_moe_batched",
    "quantize",
    "quantize_nvfp4",
    "quantized_matmul",
    "rms_norm",
    "rope",
    "rope_",
    "segment_sum",
    "softmax",
    "topk",
]


def __getattr__(name: str) -> Any:
    if name in _NVFP4:
        return getattr(nvfp4, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
