"""Models are loaded from checkpoints in NVFP4, and say what their dequantised twins say."""

from __future__ import annotations

import copy
import gc
import json
import re
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ferrule
import nvfp4_files as files
import nvfp4_oracles as oracles
from ferrule.ops import NVFP4Experts, NVFP4Linear, nvfp4, quantize_nvfp4
from ferrule.ops.nvfp4.checkpoint import Checkpoint

load = nvfp4.load
NAMES = {"ModelOpt": files.MODELOPT, "compressed-tensors": files.COMPRESSED_TENSORS}
CONFIGS = {
    "ModelOpt": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*gate"]},
    "compressed-tensors": {"config_groups": {"a": {"weights": {"group_size": 16, "num_bits": 4}}},
                           "ignore": ["re:.*lm_head", "model.embed_tokens"]},
}  # fmt: skip


def checkpoint(model: Any, kind: str, folder: Path, tool: str = "ModelOpt", **options: Any) -> Path:
    tensors = files.quantized(files.floats_of(model), NAMES[tool])
    tensors = {files.renamed(name, kind): tensor for name, tensor in tensors.items()}
    return files.write(folder, tensors, config=CONFIGS[tool], **options)


def fresh(model: Any, device: str = "cpu") -> Any:
    """Another model of the same kind, with other weights."""
    torch.manual_seed(1)
    with torch.device(device):
        return type(model)(model.config).to(torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are tiny, and threads of torch wait for each other where others have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "tool", "device"),
    [
        ("llama", "ModelOpt", "cpu"),
        ("llama", "ModelOpt", "meta"),
        ("llama", "compressed-tensors", "cpu"),
        ("qwen3_moe", "ModelOpt", "cpu"),
        ("qwen3_moe", "compressed-tensors", "meta"),
        ("mixtral", "ModelOpt", "meta"),
    ],
)
def test_says_what_its_twin_says(kind: str, tool: str, device: str, tmp_path: Path) -> None:
    model = files.tiny(kind)
    checkpoint(model, kind, tmp_path, tool, files=2 if device == "meta" else 1)
    twin = files.twin(fresh(model), files.quantized(files.floats_of(model), NAMES[tool]))
    other = fresh(model, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(other, tmp_path, progress=False) is other
    layers = [module for module in other.modules() if isinstance(module, NVFP4Linear)]
    experts = [module for module in other.modules() if isinstance(module, NVFP4Experts)]
    assert len(layers) == (14 if kind == "llama" else 8)
    assert len(experts) == (0 if kind == "llama" else 2)
    assert type(other.lm_head) is nn.Linear
    assert not any(tensor.is_meta for tensor in [*other.parameters(), *other.buffers()])
    assert not any(module.training for module in other.modules())
    files.same_tokens(other, twin)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("tool", NAMES)
def test_of_the_tools_themselves(kind: str, tool: str, tmp_path: Path) -> None:
    """Quantised and written by their own code, where they are installed."""
    pytest.importorskip("modelopt" if tool == "ModelOpt" else "compressed_tensors")
    if tool == "compressed-tensors" and kind != "llama":
        pytest.skip("compressed-tensors quantises modules, and these experts are none")
    quantise = oracles.modelopt_model if tool == "ModelOpt" else oracles.compressed_tensors_model
    model = files.tiny(kind)
    quantise(copy.deepcopy(model), tmp_path)
    tensors = files.read(tmp_path)
    twin = files.twin(fresh(model), tensors)
    files.same_tokens(load(fresh(model), tmp_path), twin)
    files.same_tokens(load(fresh(model, "meta"), tmp_path), twin)
    if tool == "ModelOpt":
        with_inputs = load(fresh(model), tmp_path, activations="nvfp4")
        files_of = [m for m in with_inputs.modules() if isinstance(m, (NVFP4Linear, NVFP4Experts))]
        assert all(module.activations == "nvfp4" for module in files_of)
        start = torch.arange(16).reshape(1, 16)
        with torch.no_grad():
            near = twin(start).logits
            assert 0 < (with_inputs(start).logits - near).norm() < 0.5 * near.norm()


class Plain(nn.Module):
    """A model of nobody's library."""

    def __init__(self, fused: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.Module()
        if fused:
            self.attention.qkv_proj = nn.Linear(32, 64, bias=bias)
        else:
            self.attention.q_proj = nn.Linear(32, 32, bias=bias)
            self.attention.k_proj = nn.Linear(32, 16, bias=bias)
            self.attention.v_proj = nn.Linear(32, 16, bias=bias)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Any) -> Any:
        x, parts = self.norm(x), self.attention
        if hasattr(parts, "qkv_proj"):
            return parts.qkv_proj(x)
        return torch.cat([parts.q_proj(x), parts.k_proj(x), parts.v_proj(x)], -1)


def apart(fused: bool) -> dict[str, Any]:
    """Weights of `Plain`, which differ in size between q, k and v."""
    model = Plain(fused)
    for name, tensor in model.state_dict().items():
        nn.init.normal_(tensor, std=10.0 if "q_proj" in name else 0.1)
    return files.floats_of(model)


@pytest.mark.parametrize("tool", NAMES)
def test_layers_that_the_model_fuses_keep_their_scales(tool: str, tmp_path: Path) -> None:
    """Each row of qkv_proj has the scale of q, k or v, exactly; biases too."""
    tensors = files.quantized(apart(fused=False), NAMES[tool])
    files.write(tmp_path, tensors)
    one, three = load(Plain(fused=True), tmp_path), load(Plain(), tmp_path)
    fused, parts = one.attention.qkv_proj, three.attention
    assert fused.w_scale_2.shape == (64,)
    scales = [parts.q_proj.w_scale_2, parts.k_proj.w_scale_2, parts.v_proj.w_scale_2]
    assert fused.w_scale_2.unique_consecutive().tolist() == [float(scale) for scale in scales]
    x = torch.randn(4, 32)
    torch.testing.assert_close(one(x), three(x), rtol=1e-6, atol=1e-6)
    twin = Plain()
    twin.load_state_dict({name: t.float() for name, t in files.dequantized(tensors).items()})
    assert (one(x) - twin(x)).norm() < 0.01 * twin(x).norm()


def test_layers_that_the_model_has_apart(tmp_path: Path) -> None:
    """A fused layer of a checkpoint goes to q, k and v by rows."""
    files.write(tmp_path, files.quantized(apart(fused=True)))
    one, three = load(Plain(fused=True), tmp_path), load(Plain(), tmp_path)
    assert one.attention.qkv_proj.w_scale_2.shape == ()
    assert isinstance(three.attention.v_proj, NVFP4Linear)
    x = torch.randn(4, 32)
    torch.testing.assert_close(one(x), three(x), rtol=1e-6, atol=1e-6)


def test_equal_scales_of_fused_layers_are_one(tmp_path: Path) -> None:
    tensors = {}
    for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        parts = quantize_nvfp4(torch.randn(rows, 32), torch.tensor(0.001))
        for part, tensor in zip(files.MODELOPT, parts, strict=True):
            tensors[f"attention.{name}.{part}"] = tensor
    tensors |= {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}
    tensors |= {"attention.q_proj.input_scale": torch.tensor(0.5),
                "attention.k_proj.input_scale": torch.tensor(0.25),
                "attention.v_proj.input_scale": torch.tensor(0.5)}  # fmt: skip
    files.write(tmp_path, tensors)
    assert load(Plain(True, bias=False), tmp_path).attention.qkv_proj.w_scale_2.shape == ()
    model = load(Plain(True, bias=False), tmp_path, activations="nvfp4")
    assert model.attention.qkv_proj.input_scale == 0.5


def test_phi3_has_fused_layers_itself(tmp_path: Path) -> None:
    model = files.tiny("phi3")
    checkpoint(model, "phi3", tmp_path)
    twin = files.twin(fresh(model), files.quantized(files.floats_of(model)))
    files.same_tokens(load(fresh(model), tmp_path), twin)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("quantized_head", [False, True])
def test_tied_weights(device: str, quantized_head: bool, tmp_path: Path) -> None:
    """lm_head is the embedding where the checkpoint has none; where it has, that is NVFP4."""
    model = files.tiny("llama", tie_word_embeddings=True)
    tensors = files.floats_of(model)
    head = tensors.pop("lm_head.weight")
    tensors = files.quantized(tensors)
    if quantized_head:
        for part, tensor in zip(files.MODELOPT, quantize_nvfp4(head), strict=True):
            tensors[f"lm_head.{part}"] = tensor
    files.write(tmp_path, tensors)
    other = load(fresh(model, device), tmp_path)
    embedding = other.model.embed_tokens.weight
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    if quantized_head:
        assert isinstance(other.lm_head, NVFP4Linear)
    else:
        assert other.lm_head.weight is embedding
    assert other(torch.arange(4)[None]).logits.isfinite().all()


@pytest.mark.parametrize("leave", [("experts",), ("self_attn",), ("layers.0.",)])
def test_mixed_precision(leave: tuple[str, ...], tmp_path: Path) -> None:
    """What is left in floats is what it was: experts, attention, or a whole layer."""
    model = files.tiny("qwen3_moe")
    tensors = files.quantized(files.floats_of(model), leave=leave)
    files.write(tmp_path, tensors, config={"quant_algo": "MIXED_PRECISION"})
    other = load(fresh(model, "meta"), tmp_path)
    files.same_tokens(other, files.twin(fresh(model), tensors))
    first = other.model.layers[0]
    assert isinstance(first.mlp.experts, NVFP4Experts) == (leave == ("self_attn",))
    assert isinstance(first.self_attn.q_proj, NVFP4Linear) == (leave == ("experts",))


@pytest.mark.parametrize("shape", [(), (1,), (16,), (16, 1)])
def test_fp8_layers_become_floats(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = files.quantized(apart(fused=False), leave=("v_proj",))
    w = torch.randn(16, 32)
    scale = torch.rand(shape) + 0.5
    by_row = scale.reshape(-1, 1)
    tensors["attention.v_proj.weight"] = (w / by_row).to(torch.float8_e4m3fn)
    tensors["attention.v_proj.weight_scale"] = scale
    tensors["attention.v_proj.input_scale"] = torch.tensor(1.0)
    files.write(tmp_path, tensors)
    model = load(Plain(), tmp_path)
    expected = tensors["attention.v_proj.weight"].float() * by_row
    assert torch.equal(model.attention.v_proj.weight, expected)
    assert isinstance(model.attention.q_proj, NVFP4Linear)


def test_a_model_saved_here_is_loaded_here(tmp_path: Path) -> None:
    """state_dict has layers and stacked experts by ferrule's names; bit for bit."""
    model = files.tiny("qwen3_moe")
    checkpoint(model, "qwen3_moe", tmp_path / "a")
    first = load(fresh(model), tmp_path / "a")
    files.write(tmp_path / "b", {name: t.clone() for name, t in first.state_dict().items()})
    second = load(fresh(model, "meta"), tmp_path / "b")
    third = load(first, tmp_path / "b")  # into one that is quantised already
    for other in (second, third):
        for (name, a), b in zip(
            first.state_dict().items(), other.state_dict().values(), strict=True
        ):
            assert a.dtype == b.dtype, name
            assert torch.equal(a.view(torch.uint8) if a.ndim else a,
                               b.view(torch.uint8) if b.ndim else b), name  # fmt: skip


def quantised_here() -> Any:
    """A model whose linear layers, but for lm_head, were put into NVFP4 by hand."""
    model = files.tiny("llama")
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, module in [*block.named_children()]:
                if isinstance(module, nn.Linear):
                    setattr(block, name, NVFP4Linear.from_linear(module))
    return model


def test_transformers_reads_what_is_written_here(tmp_path: Path) -> None:
    """By compressed-tensors, with the configuration that the documentation gives."""
    pytest.importorskip("compressed_tensors")
    from safetensors.torch import save_file

    model = quantised_here()
    state = nvfp4.to_compressed_tensors(model.state_dict())
    tensors = {name: tensor.clone() for name, tensor in state.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    page = (Path(__file__).parents[2] / "docs" / "ops.md").read_text("utf-8")
    written = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert written is not None
    model.config.quantization_config = json.loads(written[1])["quantization_config"]
    model.config.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert hasattr(other.model.layers[0].mlp.up_proj, "weight_packed")
        files.same_tokens(other, model)
    files.same_tokens(load(fresh(model), tmp_path), model, 1e-6)


@pytest.mark.parametrize("write", [nvfp4.to_modelopt, nvfp4.to_compressed_tensors])
def test_a_model_quantised_here_is_written_for_others(
    write: Callable[[Any], dict[str, Any]], tmp_path: Path
) -> None:
    model = quantised_here()
    tensors = write(model.state_dict())
    files.write(tmp_path, {name: tensor.clone() for name, tensor in tensors.items()})
    other = load(fresh(model), tmp_path)
    files.same_tokens(other, model, 1e-6)
    files.same_tokens(files.twin(fresh(model), files.read(tmp_path)), model)
    ours, back = model.state_dict(), other.state_dict()
    for name in ours:
        if write is nvfp4.to_modelopt or not name.endswith("_scale_2"):
            assert torch.equal(ours[name].float(), back[name].float())


def test_old_lists_of_experts(tmp_path: Path) -> None:
    """Experts that are modules in a list are linear layers as others are."""
    model = nn.Module()
    model.experts = nn.ModuleList(
        nn.ModuleDict({n: nn.Linear(32, 32, bias=False) for n in ("gate_proj", "down_proj")})
        for _ in range(3)
    )
    files.write(tmp_path, files.quantized(files.floats_of(model)))
    load(model, tmp_path)
    assert all(isinstance(expert["down_proj"], NVFP4Linear) for expert in model.experts)


def test_scales_of_caches_are_left_out_and_others_are_said(tmp_path: Path) -> None:
    tensors = files.quantized(apart(fused=False))
    tensors["attention.k_proj.k_scale"] = torch.tensor(1.0)
    tensors["attention.q_proj.input_scale"] = torch.tensor(1.0)
    files.write(tmp_path, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Plain(), tmp_path)
    tensors |= {f"mtp.{i}.weight": torch.zeros(2) for i in range(5)}
    files.write(tmp_path, tensors)
    with pytest.warns(ferrule.FerruleWarning) as caught:
        load(Plain(), tmp_path)
    assert len(caught) == 1
    assert "no place for 5 tensors of the checkpoint (5 of weight)" in str(caught[0].message)
    assert "mtp.0.weight, mtp.1.weight, mtp.2.weight and 2 more" in str(caught[0].message)


def test_a_quantised_layer_that_the_configuration_ignores_is_said(tmp_path: Path) -> None:
    config = {"exclude_modules": ["attention.q*", "re:.*k_proj$"]}
    files.write(tmp_path, files.quantized(apart(fused=False)), config=config)
    with pytest.warns(
        ferrule.FerruleWarning, match=r"that attention\.k_proj, attention\.q_proj are not"
    ):
        model = load(Plain(), tmp_path)
    assert isinstance(model.attention.q_proj, NVFP4Linear)


NAMES_OF_LAYERS = st.from_regex(r"[a-c](\.[a-c0-2]){0,3}", fullmatch=True)


def ignoring(folder: Path, *patterns: str, **config: Any) -> Checkpoint:
    files.write(folder, {"a": torch.zeros(1)}, config={"exclude_modules": patterns, **config})
    return Checkpoint(folder)


@settings(max_examples=50, deadline=None)
@given(NAMES_OF_LAYERS, NAMES_OF_LAYERS, st.integers(0, 8))
def test_patterns_of_what_is_ignored(name: str, other: str, cut: int) -> None:
    """Names; beginnings with a star, which ModelOpt writes; regular expressions from the start."""
    with tempfile.TemporaryDirectory() as folder:
        assert ignoring(Path(folder), name).ignores(other) == (name == other)
        prefix = name[:cut]
        assert ignoring(Path(folder), f"{prefix}*").ignores(other) == other.startswith(prefix)
        regular = ignoring(Path(folder), "re:.*" + re.escape(other) + "$")
        assert regular.ignores(name) == name.endswith(other)
        assert not ignoring(Path(folder)).ignores(name)


def test_base_models_names(tmp_path: Path) -> None:
    """A checkpoint of the whole model goes into its base, and the other way round."""
    model = files.tiny("llama")
    checkpoint(model, "llama", tmp_path)
    with pytest.warns(ferrule.FerruleWarning, match=r"1 tensors .*lm_head\.weight"):
        base = load(fresh(model).model, tmp_path)
    assert isinstance(base.layers[1].mlp.up_proj, NVFP4Linear)


def test_old_weights_go_as_new_ones_come(tmp_path: Path) -> None:
    """The peak is one layer above what stays."""
    files.write(tmp_path, files.quantized(apart(fused=False)))
    model = Plain()
    old = weakref.ref(model.attention.q_proj.weight)
    alive = []
    read = NVFP4Linear.from_tensors.__func__

    def watched(cls: Any, **tensors: Any) -> Any:
        gc.collect()
        alive.append(old() is not None)
        return read(cls, **tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NVFP4Linear, "from_tensors", classmethod(watched))
        load(model, tmp_path)
    assert alive == [True, True, False]  # of k, of q, of v
    assert old() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_memory_of_a_process(tmp_path: Path) -> None:
    """What it has of its own is at no time more than the model and one tensor."""
    script = Path(__file__).parents[1] / "nvfp4_peak_memory.py"
    found = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True
    )
    sizes = json.loads(found.stdout.splitlines()[-1])
    assert sizes["model"] > 2e8
    assert sizes["model"] - 2**22 < sizes["stays"] <= sizes["peak"] + 2**20, sizes
    assert sizes["peak"] < sizes["model"] + sizes["largest"], sizes


def test_progress(tmp_path: Path, capsys: Any) -> None:
    files.write(tmp_path, files.quantized(apart(fused=False)))
    load(Plain(), tmp_path, progress=True)
    assert "loading" in capsys.readouterr().err
    load(Plain(), tmp_path)
    assert capsys.readouterr().err == ""


def test_one_file(tmp_path: Path) -> None:
    files.write(tmp_path, files.quantized(apart(fused=False)))
    model = load(Plain(), tmp_path / "model.safetensors")
    assert isinstance(model.attention.q_proj, NVFP4Linear)
    (tmp_path / "model.safetensors").write_bytes(b"")  # what was loaded is nobody's file
    assert model(torch.randn(2, 32)).isfinite().all()
