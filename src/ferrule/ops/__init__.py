"""Ops that are ready to use, each written as any user of ferrule would write it.

Nothing here is special: the modules import nothing of ferrule but its public names, and each is a
model to copy: a rule, bodies, derivatives, and a reference, the same in ordinary array code (of
`grid_sample` the Metal body is it), with which `ferrule.compare` compares the bodies on any host.
The tests compare each with torch's own.
"""

from __future__ import annotations

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

__all__ = [
    "dequantize",
    "gather_mm",
    "gather_qmm",
    "grid_sample",
    "histogram",
    "layer_norm",
    "log_softmax",
    "matmul",
    "mxfp4_linear",
    "mxfp4_moe",
    "nvfp4_linear",
    "nvfp4_moe",
    "nvfp4_moe_batched",
    "quantize",
    "quantized_matmul",
    "rms_norm",
    "rope",
    "rope_",
    "segment_sum",
    "softmax",
    "topk",
]
