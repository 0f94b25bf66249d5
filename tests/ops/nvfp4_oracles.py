"""Writes nvfp4_expected.json: what ModelOpt and compressed-tensors make of some matrices; and has
them quantize models, where they are installed. Neither is needed for the tests: both are large.

    pip install nvidia-modelopt==0.47.0 compressed-tensors==0.20.0
    python tests/ops/nvfp4_oracles.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

EXPECTED = Path(__file__).with_name("nvfp4_expected.json")


def modelopt_quantize(w: Any) -> tuple[Any, Any, Any]:
    """Packed elements, scales, and the scale of all, of ModelOpt."""
    tensor_class = modelopt_tensor()
    tensor, scale, scale_2 = tensor_class.quantize(w.clone(), 16)
    return tensor._quantized_data, scale, scale_2


def modelopt_dequantize(w_packed: Any, w_scale: Any, w_scale_2: Any, dtype: Any) -> Any:
    """The elements, as ModelOpt has them."""
    shape = (*w_packed.shape[:-1], w_packed.shape[-1] * 2)
    tensor = modelopt_tensor()(torch.Size(shape), dtype, w_packed)
    return tensor.dequantize(dtype, scale=w_scale, double_scale=w_scale_2, block_sizes={-1: 16})


def modelopt_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    return NVFP4QTensor


def compressed_tensors_dequantize(tensors: dict[str, Any]) -> Any:
    """The elements of a layer by compressed-tensors' names, as that has them, of bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import NVFP4PackedCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
    scheme = preset_name_to_scheme("NVFP4A16", targets=["Linear"])
    return NVFP4PackedCompressor.decompress(tensors, scheme)["weight"]


def compressed_tensors_activations(x: Any, global_scale: Any) -> tuple[Any, Any]:
    """Activations, quantised and dequantised again, and the scales of groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.quantization import fake_quantize, preset_name_to_scheme
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
    args = preset_name_to_scheme("NVFP4", targets=["Linear"]).input_activations
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=global_scale)
    return fake_quantize(x, scale, zero, args, global_scale=global_scale), scale


def modelopt_model(model: Any, folder: Path) -> None:
    """Quantize a model of transformers and write it, all by ModelOpt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        def calibrate(model: Any) -> None:
            model(torch.arange(32).reshape(2, 16))

        quantized = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, calibrate)
        export_hf_checkpoint(quantized, export_dir=folder)


def compressed_tensors_model(model: Any, folder: Path) -> None:
    """Quantize a model of transformers and write it, all by compressed-tensors: the scales too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        scheme = preset_name_to_scheme("NVFP4A16", targets=["Linear"])
        config = QuantizationConfig(
            config_groups={"group_0": scheme},
            ignore=["lm_head"],
            quantization_status="initialized",
            format="nvfp4-pack-quantized",
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if not hasattr(module, "quantization_scheme"):
                continue
            w = module.weight.detach().float()
            whole = generate_gparam(w.amin(), w.amax())
            groups = w.unflatten(-1, (-1, 16))
            ends = groups.amin(-1), groups.amax(-1)
            weights = module.quantization_scheme.weights
            module.weight_scale.data = calculate_qparams(*ends, weights, global_scale=whole)[0]
            module.weight_global_scale.data.copy_(whole)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)


def hexadecimal(x: Any) -> str:
    """The bytes of a tensor."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def from_hexadecimal(text: str, dtype: Any, shape: list[int]) -> Any:
    """The tensor of bytes."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(shape)


def cases() -> dict[str, Any]:
    """Matrices of all kinds: ordinary, tiny, huge, with groups of zeros, and all halves."""
    torch.manual_seed(0)
    normal = torch.randn(4, 48)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    spread = normal * torch.logspace(-6, 3, 48)
    spread[1, 16:32] = 0
    return {
        "float32": normal,
        "bfloat16": (normal * 0.02).bfloat16(),
        "float16": (normal * 3000).half(),
        "tiny": normal * 1e-30,
        "huge": normal * 1e37,
        "spread": spread,
        "halves": torch.stack((halves, -halves)) * 448 * 2,
    }


def main() -> None:
    written: dict[str, Any] = {}
    for name, w in cases().items():
        packed, scale, scale_2 = modelopt_quantize(w)
        tensors = {"weight_packed": packed, "weight_scale": scale}
        tensors["weight_global_scale"] = 1 / scale_2.reshape(1)
        written[name] = {
            "dtype": str(w.dtype).removeprefix("torch."),
            "shape": list(w.shape),
            "w": hexadecimal(w),
            "w_packed": hexadecimal(packed),
            "w_scale": hexadecimal(scale),
            "w_scale_2": hexadecimal(scale_2),
            "modelopt": hexadecimal(modelopt_dequantize(packed, scale, scale_2, torch.bfloat16)),
            "compressed_tensors": hexadecimal(compressed_tensors_dequantize(tensors)),
        }
    EXPECTED.write_text(json.dumps(written, indent=None).replace("}, ", "},\n") + "\n", "utf-8")


if __name__ == "__main__":
    main()
