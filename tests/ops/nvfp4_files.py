"""Tiny models, and checkpoints of them in NVFP4 by the names of ModelOpt and compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ferrule.ops import quantize_nvfp4

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
MODELOPT = "weight", "weight_scale", "weight_scale_2"
COMPRESSED_TENSORS = "weight_packed", "weight_scale", "weight_global_scale"
INDEX = "model.safetensors.index.json"
_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tiny(kind: str, **options: Any) -> Any:
    """A model of transformers with random weights, in bfloat16."""
    import transformers

    of_experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, **options),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, **{"num_experts": 4, **of_experts, **options}
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **SIZES, num_local_experts=4, num_experts_per_tok=2, **options
        ),
        "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, **options),
    }[kind]()
    classes = {
        "llama": transformers.LlamaForCausalLM,
        "qwen3_moe": transformers.Qwen3MoeForCausalLM,
        "mixtral": transformers.MixtralForCausalLM,
        "phi3": transformers.Phi3ForCausalLM,
    }
    config.architectures = [classes[kind].__name__]
    return classes[kind](config).to(torch.bfloat16).eval()


def renamed(name: str, kind: str) -> str:
    """What checkpoints call what transformers 5 calls otherwise."""
    if kind != "mixtral":
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(f".{ours}.", f".{theirs}.") if ".experts." in name else name
    return name


def floats_of(model: Any) -> dict[str, Any]:
    """A model's weights, each expert's alone, as checkpoints have them."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        parent = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, w in enumerate(tensor):
                gate, up = w.chunk(2)
                tensors[f"{parent}.{e}.gate_proj.weight"] = gate
                tensors[f"{parent}.{e}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            tensors |= {f"{parent}.{e}.down_proj.weight": w for e, w in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def quantized(
    tensors: dict[str, Any], names: tuple[str, ...] = MODELOPT, leave: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Weights of linear layers in NVFP4, but of those that have one of ``leave`` in their name."""
    written = {}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        linear = tensor.ndim == 2 and leaf == "weight" and "embed" not in name
        if not linear or any(
            word in name for word in (*leave, "lm_head", "mlp.gate.", "moe.gate.")
        ):
            written[name] = tensor
            continue
        packed, scale, whole = quantize_nvfp4(tensor)
        if names == COMPRESSED_TENSORS:
            whole = 1 / whole.reshape(1)
        parts = zip(names, (packed, scale, whole), strict=True)
        written |= {f"{parent}.{part}": value for part, value in parts}
    return written


def write(
    folder: Path, tensors: dict[str, Any], *, files: int = 1, config: dict[str, Any] | None = None
) -> Path:
    """A folder of safetensors: of several files with an index."""
    folder.mkdir(exist_ok=True, parents=True)
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        index = {}
        for i in range(files):
            part = {name: tensors[name] for name in names[i::files]}
            save_file(part, folder / f"model-{i}.safetensors")
            index |= dict.fromkeys(part, f"model-{i}.safetensors")
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / INDEX).write_text(text, "utf-8")
    if config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": config}), "utf-8")
    return folder


def read(folder: Path) -> dict[str, Any]:
    """All tensors of a folder."""
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def dequantized(tensors: dict[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint in bfloat16, by no function of ferrule."""
    floats = {}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("weight", "weight_packed") and tensor.dtype == torch.uint8:
            scale = tensors[f"{parent}.weight_scale"].float()
            if leaf == "weight":
                scale = scale * tensors[f"{parent}.weight_scale_2"]
            else:
                scale = scale / tensors[f"{parent}.weight_global_scale"]
            values = torch.stack((_VALUES[(tensor & 15).long()], _VALUES[(tensor >> 4).long()]), -1)
            w = values.flatten(-2) * scale.repeat_interleave(16, -1)
            floats[f"{parent}.weight"] = w.bfloat16()
        elif not leaf.endswith(("_scale", "_scale_2")):
            floats[name] = tensor
    return floats


def twin(model: Any, tensors: dict[str, Any]) -> Any:
    """The model with a checkpoint's weights dequantized, by the names that it has itself."""
    state = dequantized(tensors)
    for name, own in model.state_dict().items():
        parent = name.rpartition(".")[0]
        of = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        parts = of.get(name.rpartition(".")[2])
        if parts and name not in state:
            state[name] = torch.stack(
                [
                    torch.cat([state.pop(f"{parent}.{e}.{part}.weight") for part in parts])
                    for e in range(own.shape[0])
                ]
            )
    model.load_state_dict(state)
    return model


def same_tokens(model: Any, other: Any, tolerance: float = 0.02) -> None:
    """That two models say the same: 16 tokens, greedily, and nearly the same logits."""
    start = torch.arange(8)[None] * 7 % 128
    with torch.no_grad():
        a, b = model(start).logits.float(), other(start).logits.float()
        assert (a - b).norm() <= tolerance * b.norm()
        options = {
            "max_new_tokens": 16,
            "min_new_tokens": 16,
            "do_sample": False,
            "pad_token_id": 0,
        }
        assert (
            model.generate(start, **options).tolist() == other.generate(start, **options).tolist()
        )
