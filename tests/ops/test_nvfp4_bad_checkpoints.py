"""A checkpoint that is damaged, or of another kind, gives an error that names the tensor and says
what to do; nothing is unpickled, and the model is as it was."""

from __future__ import annotations

import builtins
import json
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ferrule
import nvfp4_files as files
from ferrule.ops import NVFP4Linear, nvfp4
from test_nvfp4_loading import Plain, apart

load = nvfp4.load
FP8 = torch.float8_e4m3fn
Q = "attention.q_proj"


def refused(model: Any, folder: Any, *words: str, **options: Any) -> str:
    """That loading fails with a message that has all these words; the model is as it was."""
    before = repr(model)
    with pytest.raises(ferrule.KernelError) as error:
        load(model, folder, **options)
    message = str(error.value)
    assert message.startswith("[load] ")
    assert message.endswith((".", "safetensors.")), message
    for word in words:
        assert word in message, message
    assert repr(model) == before
    return message


def tensors() -> dict[str, Any]:
    return files.quantized(apart(fused=False))


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"),
         ["layer 'attention.q_proj' lacks tensor 'attention.q_proj.weight_scale'", "not whole"]),
        (lambda t: t.pop(f"{Q}.weight_scale_2"),
         ["lacks tensor 'attention.q_proj.weight_scale_2'", "MXFP4 has no second scale"]),
        (lambda t: t.pop(f"{Q}.weight"),
         ["'attention.q_proj.weight_scale', and no packed weight", "Download"]),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(32, 15, dtype=torch.uint8)}),
         ["tensor 'attention.q_proj.weight' has the shape (32, 15); expected [N, K / 2]", "16"]),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(40, 16, dtype=torch.uint8)}),
         ["tensor 'attention.q_proj.weight_scale' has the shape (32, 2)", "expected (40, 2)"]),
        (lambda t: t.update({f"{Q}.weight_scale": torch.zeros(32, 1).to(FP8)}),
         ["'attention.q_proj.weight_scale' has the shape (32, 1), groups of 32",
          "expected (32, 2), a scale for 16"]),
        (lambda t: t.update({f"{Q}.weight_scale": torch.zeros(128, 4).to(FP8)}),
         ["has the shape (128, 4); expected (32, 2)", "padded or swizzled"]),
        (lambda t: t.update({f"{Q}.weight_scale": torch.zeros(32, 2)}),
         ["tensor 'attention.q_proj.weight_scale' is of F32; expected F8_E4M3"]),
        (lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(3)}),
         ["'attention.q_proj.weight_scale_2' is of F32 and has the shape (3,)", "one element"]),
        (lambda t: t.update({f"{Q}.weight_scale_2": torch.ones((), dtype=torch.bfloat16)}),
         ["'attention.q_proj.weight_scale_2' is of BF16", "expected F32"]),
        (lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(32)}),
         ["layer 'attention.q_proj'", "pre_quant_scale (AWQ", "Quantize the layer anew"]),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(32, 32, dtype=torch.int8)}),
         ["layer 'attention.q_proj' is quantized in a format that is not read", "of I8"]),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(32, 32).to(FP8)}),
         ["'attention.q_proj.weight_scale'", "F8_E4M3 and (32, 32) one scale, or one for"]),
        (lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1, 1)}),
         ["'attention.q_proj'", "weight_scale_inv (FP8 in blocks)"]),
        (lambda t: t.update({"experts.gate_up_proj_weight_scale": torch.zeros(2, 4, 2).to(FP8)}),
         ["layer 'experts' is quantized in a format", "gate_up_proj_weight_scale"]),
        (lambda t: t.pop("norm.weight"), ["no tensor for norm.weight of the model"]),
        (lambda t: t.pop(f"{Q}.bias"), ["no tensor for attention.q_proj.bias of the model"]),
        (lambda t: [t.pop(f"{Q}.{part}") for part in files.MODELOPT],
         ["no tensor for attention.q_proj.weight of the model", "not whole"]),
        (lambda t: t.update({"norm.weight": torch.ones(31)}),
         ["tensor norm.weight has the shape (31,); the model's 'norm.weight' has (32,)"]),
        (lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int32)}),
         ["layer 'norm' is quantized in a format that is not read: it has a weight of I32"]),
        (lambda t: t.update({f"{Q}.bias": torch.zeros(32, dtype=torch.uint8)}),
         ["tensor 'attention.q_proj.bias' is of U8; the model's 'attention.q_proj.bias' is of"]),
        (lambda t: t.update({f"{Q}.bias": torch.zeros(32).to(FP8)}), ["bias' is of F8_E4M3"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(change: Change, words: list[str], tmp_path: Path) -> None:
    altered = tensors()
    change(altered)
    files.write(tmp_path, altered)
    refused(Plain(), tmp_path, *words)


@pytest.mark.parametrize("tool", ["ModelOpt", "compressed-tensors"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_scales_that_are_nan(byte: int, tool: str, tmp_path: Path) -> None:
    names = files.MODELOPT if tool == "ModelOpt" else files.COMPRESSED_TENSORS
    altered = files.quantized(apart(fused=False), names)
    altered[f"{Q}.weight_scale"].view(torch.uint8)[3, 1] = byte
    files.write(tmp_path, altered)
    with pytest.raises(ferrule.KernelError) as error:
        load(Plain(), tmp_path)
    assert "tensor 'attention.q_proj.weight_scale' has 1 scales that are NaN" in str(error.value)
    assert "the first in row 3, column 1. The file is damaged" in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scale_of_all_is_a_positive_number(value: float, tmp_path: Path) -> None:
    altered = tensors()
    altered[f"{Q}.weight_scale_2"] = torch.tensor(value)
    files.write(tmp_path, altered)
    with pytest.raises(ferrule.KernelError) as error:
        load(Plain(), tmp_path)
    assert f"'attention.q_proj.weight_scale_2' is {value}; expected a positive" in str(error.value)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 0.999))
def test_truncated_file(share: float) -> None:
    """At any byte: of a file that ends in its data the tensor that is cut is named."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = files.write(Path(folder), tensors()) / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        message = refused(Plain(), folder, "model.safetensors: ", "truncated")
        header = 8 + int.from_bytes(data[:8], "little")
        if len(data) * share >= header:
            cut = re.search(r"tensor '([\w.]+)' ends at byte (\d+)", message)
            assert cut is not None
            assert int(cut[2]) > int(len(data) * share)
            assert cut[1] in tensors()


class Bomb:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> Any:
        return builtins.exec, ("import builtins; builtins.ferrule_was_run = True",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_pickles_are_not_read(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "torch":
        torch.save({"weight": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps({"weight": Bomb()}))
    words = ["pickle", "run", "Convert", "safetensors"]
    refused(Plain(), tmp_path, name, *words)
    if path.suffix == ".safetensors":
        refused(Plain(), path, *words)
    assert not hasattr(builtins, "ferrule_was_run")


def test_folders_without_a_model(tmp_path: Path) -> None:
    refused(Plain(), tmp_path / "nowhere", "nowhere does not exist", "downloaded first")
    refused(Plain(), tmp_path, "no file that ends in .safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"{" + b"x" * 100)
    refused(Plain(), tmp_path, "is no file of safetensors")
    files.write(tmp_path, apart(fused=False))
    refused(Plain(), tmp_path, "has no layer in NVFP4", "weight_packed (compressed-tensors)")


def test_index(tmp_path: Path) -> None:
    files.write(tmp_path, tensors(), files=2)
    (tmp_path / "model-1.safetensors").rename(tmp_path / "other.safetensors")
    refused(Plain(), tmp_path, "names the file model-1.safetensors, which is missing", "attention.")
    (tmp_path / files.INDEX).write_text("{", "utf-8")
    refused(Plain(), tmp_path, "cannot be read as JSON")
    for index in ("{}", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'):
        (tmp_path / files.INDEX).write_text(index, "utf-8")
        refused(Plain(), tmp_path, "has no weight_map of names to files", "Download it again")
    (tmp_path / files.INDEX).unlink()
    files.write(tmp_path, tensors())
    refused(Plain(), tmp_path, "is in two files", "model-0.safetensors", "Keep one of them")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_algo": "NVFP4", "group_size": 32},
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
    ],
)
def test_group_size_of_the_configuration(config: dict[str, Any], tmp_path: Path) -> None:
    files.write(tmp_path, tensors(), config=config)
    refused(Plain(), tmp_path, "group_size=32; NVFP4 has 16", "proj.weight_scale'")
    (tmp_path / "hf_quant_config.json").unlink()
    text = json.dumps({"quantization_config": {"quant_method": "modelopt", **config}})
    (tmp_path / "config.json").write_text(text, "utf-8")
    refused(Plain(), tmp_path, "group_size=32; NVFP4 has 16")


def test_layers_that_cannot_be_replaced(tmp_path: Path) -> None:
    files.write(tmp_path, tensors())
    model = Plain()
    model.attention.q_proj = nn.Embedding(32, 32)
    refused(model, tmp_path, "layer 'attention.q_proj' is quantized", "Embedding", "nn.Linear")
    model.attention.q_proj = nn.Linear(32, 48)
    refused(model, tmp_path, "'attention.q_proj.weight' is of a layer of 32 rows and 32 columns",
            "has 48 and 32", "config.json")  # fmt: skip
    alone = {part: tensors()[f"{Q}.{part}"] for part in files.MODELOPT}
    files.write(tmp_path, alone)
    refused(nn.Linear(32, 32, False), tmp_path, "the model is a Linear itself", "Sequential(model)")
    with pytest.raises(ferrule.KernelTypeError, match=r"a dict; expected a torch\.nn\.Module"):
        load({}, tmp_path)
    with pytest.raises(ferrule.KernelError, match="activations='fp8'; expected None"):
        load(Plain(), tmp_path, activations="fp8")


def test_w4a4_needs_scales_of_inputs(tmp_path: Path) -> None:
    files.write(tmp_path, tensors())
    with pytest.raises(ferrule.KernelError) as error:
        load(Plain(), tmp_path, activations="nvfp4")
    assert re.search(r"layer 'attention.\w_proj' has no tensor 'input_scale'", str(error.value))
    assert "Leave activations out" in str(error.value)


def test_a_part_of_a_fused_layer_in_floats(tmp_path: Path) -> None:
    files.write(tmp_path, files.quantized(apart(fused=False), leave=("v_proj",)))
    refused(Plain(fused=True), tmp_path, "'attention.qkv_proj' is 3 layers in one",
            "attention.q_proj", "others are not", "quantize all or none")  # fmt: skip
    files.write(tmp_path, files.quantized(apart(fused=True)))
    model = Plain()
    model.attention.k_proj = nn.Linear(32, 32)
    refused(model, tmp_path, "'attention.qkv_proj.weight' is of a layer of (64, 32)", "80 rows")
    model.attention.k_proj = nn.Linear(48, 16)
    refused(model, tmp_path, "'attention.qkv_proj.weight' is of a layer of (64, 32)", "32 or 48")


def test_parts_of_a_fused_layer_with_other_columns(tmp_path: Path) -> None:
    altered = apart(fused=False)
    altered["attention.k_proj.weight"] = torch.zeros(16, 48)
    files.write(tmp_path, files.quantized(altered))
    refused(Plain(fused=True), tmp_path, "'attention.k_proj.weight' is of a layer of", "48 columns")


def test_patterns_of_the_configuration_that_are_none(tmp_path: Path) -> None:
    config = {"ignore": ["re:*x"]}
    files.write(tmp_path, tensors(), config=config)
    refused(Plain(), tmp_path, "'re:*x'", "is no regular expression", "Correct")
    files.write(tmp_path, tensors(), config={"ignore": "lm_head"})  # one, not a list
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Plain(), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t.pop(n) for n in [*t] if "experts.2.up_proj" in n],
         ["'model.layers.0.mlp.experts' has 4 experts", "2.up are missing", "quantized alike"]),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.down_proj.weight_scale"),
         ["lacks tensor 'model.layers.1.mlp.experts.3.down_proj.weight_scale'"]),
        (lambda t: t.update({n.replace("experts.0", "experts.4"): v for n, v in [*t.items()]}),
         ["experts.4.", "are too many"]),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit(change: Change, words: list[str], tmp_path: Path) -> None:
    model = files.tiny("qwen3_moe")
    altered = files.quantized(files.floats_of(model))
    change(altered)
    files.write(tmp_path, {name: tensor.clone() for name, tensor in altered.items()})
    refused(model, tmp_path, *words)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: setattr(m, "is_transposed", True), "is_transposed=True"),
        (lambda m: setattr(m, "has_bias", True), "has_bias=True"),
        (lambda m: setattr(m, "is_concatenated", False), "rows of gate and up in turn"),
        (lambda m: setattr(m, "act_fn", nn.GELU()), "the activation GELU"),
    ],
)
def test_experts_of_another_kind(change: Callable[[Any], Any], word: str, tmp_path: Path) -> None:
    model = files.tiny("qwen3_moe")
    files.write(tmp_path, files.quantized(files.floats_of(model)))
    change(model.model.layers[1].mlp.experts)
    refused(model, tmp_path, "experts 'model.layers.1.mlp.experts' are a Qwen3MoeExperts", word)


def test_safetensors_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    files.write(tmp_path, tensors())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(Plain(), tmp_path, "safetensors is not installed", "pip install 'ferrule[nvfp4]'")


def test_meta_buffers_that_are_in_no_file(tmp_path: Path) -> None:
    files.write(tmp_path, tensors())
    with torch.device("meta"):
        model = Plain()
        model.norm.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(ferrule.KernelError, match=r"norm\.table are on the meta device"):
        load(model, tmp_path)


@pytest.mark.parametrize("write", [nvfp4.to_modelopt, nvfp4.to_compressed_tensors])
def test_names_that_other_tools_do_not_have(write: Any) -> None:
    layer = NVFP4Linear(32, 8)
    layer.w_scale_2 = torch.ones(8)
    with pytest.raises(ferrule.KernelError) as error:
        write(nn.ModuleDict({"a": layer}).state_dict())
    assert str(error.value).startswith(f"[{write.__name__}] 'a.w_scale_2' has the shape (8,)")
    with pytest.raises(ferrule.KernelError, match="each expert"):
        write(nvfp4.NVFP4Experts(2, 16, 16).state_dict())
    assert write({"w2_lora": torch.ones(1)}) == {"w2_lora": torch.ones(1)}  # a user's
