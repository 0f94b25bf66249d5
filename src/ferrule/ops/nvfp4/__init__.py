"""NVFP4: matrices of 4-bit floats with a scale for 16, as ModelOpt, compressed-tensors and MLX
write them; products with them, and models that are made of such.

* `quantizing`: `quantize_nvfp4` and `dequantize_nvfp4`, and the reference of activations in NVFP4;
* `linear`, `moe`: the ops, `nvfp4_linear` and `nvfp4_moe`; `arguments` says what does not fit;
* `humming`: the kernels of another package; `humming_order`: weights as those read them;
* `modules`: `NVFP4Linear` and `NVFP4Experts`, layers of torch; `buffers` is what they share;
* `loading`: `load`, which puts them into a model, with what a folder of safetensors has:
  `checkpoint` reads the files, `naming` knows what tools call the tensors, `places` finds the
  model's modules for them, `floats` fills what is not quantized;
* `mlx_layout`: `from_mlx` and `to_mlx`;
* `tensor_parallel`: styles for `parallelize_module`; `shards` is what their layers do;
* `exchange`: mixtures whose experts are in several processes; `parallel_experts`, layers of such.

Torch is imported by whoever uses a name, not by this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exchange import nvfp4_moe_all_gather as nvfp4_moe_all_gather
    from .exchange import nvfp4_moe_all_to_all as nvfp4_moe_all_to_all
    from .loading import load as load
    from .mlx_layout import from_mlx as from_mlx
    from .mlx_layout import to_mlx as to_mlx
    from .modules import NVFP4Experts as NVFP4Experts
    from .modules import NVFP4Linear as NVFP4Linear
    from .naming import to_compressed_tensors as to_compressed_tensors
    from .naming import to_modelopt as to_modelopt
    from .parallel_experts import NVFP4ParallelExperts as NVFP4ParallelExperts
    from .parallel_experts import expert_parallel as expert_parallel
    from .quantizing import dequantize_nvfp4 as dequantize_nvfp4
    from .quantizing import linear_w4a4 as linear_w4a4
    from .quantizing import quantize_activations_nvfp4 as quantize_activations_nvfp4
    from .quantizing import quantize_nvfp4 as quantize_nvfp4
    from .tensor_parallel import NVFP4ColwiseParallel as NVFP4ColwiseParallel
    from .tensor_parallel import NVFP4ExpertsParallel as NVFP4ExpertsParallel
    from .tensor_parallel import NVFP4RowwiseParallel as NVFP4RowwiseParallel

__all__ = [
    "NVFP4ColwiseParallel",
    "NVFP4Experts",
    "NVFP4ExpertsParallel",
    "NVFP4Linear",
    "NVFP4ParallelExperts",
    "NVFP4RowwiseParallel",
    "dequantize_nvfp4",
    "expert_parallel",
    "from_mlx",
    "linear_w4a4",
    "load",
    "nvfp4_moe_all_gather",
    "nvfp4_moe_all_to_all",
    "quantize_activations_nvfp4",
    "quantize_nvfp4",
    "to_compressed_tensors",
    "to_mlx",
    "to_modelopt",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import loading, mlx_layout, modules, naming, quantizing

    for module in (loading, mlx_layout, modules, naming, quantizing):
        if name in vars(module):
            return vars(module)[name]
    from . import exchange, parallel_experts, tensor_parallel  # which import torch.distributed

    for module in (exchange, parallel_experts, tensor_parallel):
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
