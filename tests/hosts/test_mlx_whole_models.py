"""What docs/mlx.md says of whole models of mlx-lm in shapeless functions, of each group a few.

None follows its sizes. Should one of these tests fail, MLX or mlx-lm has changed: then the section
"Whole models of mlx-lm" has to be written anew.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import ferrule
from mlx_versions import needs_mlx

pytestmark = [
    needs_mlx(0, 32, 4),
    pytest.mark.skipif(mx.is_available(mx.gpu), reason="with a GPU MLX has other kernels"),
]

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "max_position_embeddings": 512, "rope_theta": 1e4,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT2: dict[str, Any] = {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
MAMBA: dict[str, Any] = {
    "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
    "time_step_rank": 32,
}  # fmt: skip
GRIFFIN: dict[str, Any] = {
    "attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 8,
    "block_types": ["recurrent", "attention"],
}  # fmt: skip
DBRX: dict[str, Any] = {
    "d_model": 64, "n_layers": 2, "n_heads": 4,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
RWKV: dict[str, Any] = {
    "norm_eps": 1e-5, "a_low_rank_dim": 32, "v_low_rank_dim": 32, "gate_low_rank_dim": 32,
    "decay_low_rank_dim": 32,
}  # fmt: skip
SLICE, SPLIT = "Slice cannot infer output shapes", "Split cannot infer output shapes"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, SLICE), ("qwen3", {}, SLICE), ("qwen3_moe", EXPERTS, SLICE),
    ("mixtral", {"num_local_experts": 4}, SLICE), ("gpt2", GPT2, SPLIT), ("mamba", MAMBA, SPLIT),
    ("recurrent_gemma", GRIFFIN, "Pad cannot infer output shapes"),
    ("dbrx", DBRX, "Attempting to eval an array"),
]  # fmt: skip


def tiny(name: str, more: dict[str, Any]) -> Callable[[mx.array], mx.array]:
    """A random model, quantized, as a function of tokens (B, L)."""
    pytest.importorskip("mlx_lm")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **TINY, **more}))
    nn.quantize(
        model, group_size=32, bits=4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )  # fmt: skip
    model.eval()
    mx.eval(model.parameters())
    return lambda tokens: model(tokens)  # type: ignore[no-any-return]


def tokens(batch: int, length: int) -> mx.array:
    return mx.random.randint(0, TINY["vocab_size"], (batch, length))


@pytest.fixture(params=[False, True], ids=["mlx", "installed"])
def installed(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ferrule.FerruleWarning)  # of other tests' modules
            ferrule.install_mlx()
    try:
        yield request.param
    finally:
        ferrule.uninstall_mlx()


@pytest.mark.parametrize(("name", "more", "why"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_refused_at_the_first_call(
    name: str, more: dict[str, Any], why: str, installed: bool
) -> None:
    """And each is right where it is compiled for one size."""
    model = tiny(name, more)
    with pytest.raises(ValueError, match=why):
        mx.eval(mx.compile(model, shapeless=True)(tokens(2, 3)))
    compiled = mx.compile(model)
    if name == "dbrx":  # which cannot be compiled at all
        with pytest.raises(ValueError, match=why):
            compiled(tokens(2, 3))
        return
    for shape in ((2, 3), (1, 5)):
        said = tokens(*shape)
        wanted = model(said)
        assert mx.allclose(compiled(said), wanted, rtol=1e-3, atol=1e-4 * mx.abs(wanted).max())


@pytest.mark.slow
def test_rwkv7_has_the_size_of_its_trace() -> None:
    """Of one token it slices nothing; other sizes are errors, once ferrule is in MLX."""
    code = (
        "import sys, mlx.core as mx, ferrule\n"
        "if sys.argv[1] == 'installed': ferrule.install_mlx()\n"
        "from test_mlx_whole_models import RWKV, tiny, tokens\n"
        "model = tiny('rwkv7', RWKV)\n"
        "compiled = mx.compile(model, shapeless=True)\n"
        "for shape in ((1, 1), (1, 1), (2, 3)):\n"
        "    said = tokens(*shape)\n"
        "    print(mx.allclose(compiled(said), model(said), atol=1e-4).item(), flush=True)\n"
    )
    done = run(code, "installed")
    assert done.stdout.split() == ["True", "True"]
    assert "[op] input 'w' of op 'quantized_matmul_affine'" in done.stderr
    said = run(code, "mlx").stdout.split()
    assert said[:2] == ["True", "True"] and "True" not in said[2:]


@pytest.mark.parametrize("installed", [True], indirect=True)
def test_expert_layers_that_sorted_in_their_trace(installed: bool) -> None:
    """They keep its size; test_mlx_hybrid.py has those that did not."""
    pytest.importorskip("mlx_lm")
    from mlx_lm.models.switch_layers import SwitchGLU

    layer = SwitchGLU(64, 64, 4)
    mx.eval(layer.parameters())
    compiled = mx.compile(layer, shapeless=True)
    for rows in (32, 3):
        x, chosen = mx.random.normal((rows, 64)), mx.random.randint(0, 4, (rows, 2))
        assert compiled(x, chosen).shape == (32, 2, 64)


def test_reductions_of_one_element_end_the_process() -> None:
    code = (
        "import mlx.core as mx\n"
        "compiled = mx.compile(lambda x: x.sum(axis=0), shapeless=True)\n"
        "print(compiled(mx.ones((3, 4))).tolist(), flush=True)\n"
        "print(compiled(mx.ones((1, 4))).tolist(), flush=True)\n"
    )
    done = run(code)
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0]\n" and done.returncode < 0


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@functools.cache
def packed() -> list[mx.array]:
    parts = mx.quantize(mx.random.normal((64, 64)), group_size=32, bits=4)
    mx.eval(parts)  # or a function would compute them each time
    return list(parts)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.reshape(x.shape[0], x.shape[1], 4, -1), ""),
        (lambda x: mx.dequantize(*(p[x.argmax(-1)] for p in packed()), group_size=32, bits=4), ""),
        (
            lambda x: mx.fast.scaled_dot_product_attention(
                *[mx.unflatten(x, -1, (2, -1)).swapaxes(1, 2)] * 3, scale=1, mask="causal"
            ),
            "",
        ),
        (lambda x: mx.tril(x @ x.swapaxes(-1, -2)), ""),
        (lambda x: x + mx.arange(x.shape[1])[:, None], ""),
        (lambda x: x.reshape(x.shape[0], x.shape[1], 4, 16), "Cannot reshape"),
        (lambda x: x[..., :8], SLICE),
        (lambda x: mx.topk(x, 8), SLICE),
        (lambda x: mx.split(x, 2, axis=-1)[0], SPLIT),
        (lambda x: mx.pad(x, [(0, 0), (1, 0), (0, 0)]), "Pad cannot infer output shapes"),
        (
            lambda x: mx.fast.rope(
                x, 64, traditional=False, base=1e4, scale=1, offset=0
            ),
            SLICE,
        ),
    ],
    ids=[
        "reshape, -1", "dequantize", "attention", "tril", "arange", "reshape",
        "slice", "topk", "split", "pad", "rope",
    ],
)  # fmt: skip
def test_what_stops_them(call: Callable[[mx.array], mx.array], words: str, installed: bool) -> None:
    """Refused with these words; or, where there are none, wrong without a word."""
    packed()
    compiled = mx.compile(call, shapeless=True)
    x, longer = mx.random.normal((2, 3, 64)), mx.random.normal((2, 9, 64))
    if words:
        with pytest.raises(ValueError, match=words):
            mx.eval(compiled(x), compiled(longer))
        return
    assert mx.allclose(compiled(x), call(x), atol=1e-4)

    def wrong(longer: mx.array) -> bool:
        found = compiled(longer)
        mx.eval(found)
        wanted = call(longer)
        return found.shape != wanted.shape or not mx.allclose(found, wanted, atol=1e-2)

    try:
        # Of the same numbers MLX gives, now and then, what is right: by chance, so several times.
        assert any(wrong(mx.random.normal(longer.shape)) for _ in range(10))
    except ValueError as error:
        assert "broadcast" in str(error)  # of a mask with what is masked
