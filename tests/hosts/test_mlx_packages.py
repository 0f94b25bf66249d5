"""Models and losses of mlx-lm, unedited, with `install_mlx`: as their versions without kernels."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import ferrule
from ferrule.hosts.mlx.install import InstalledKernel

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="these kernels are MLX's own here")
DEVICE = mx.default_device()

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def lm() -> Iterator[Callable[[str], ModuleType]]:
    """Modules of mlx-lm by their names in it, imported on this machine as on a Mac."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]

    before = {name: sys.modules.pop(name) for name in ours()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs; and of what other tests have imported
        ferrule.install_mlx()
        importlib.import_module("mlx_lm")
    try:
        yield lambda name: importlib.import_module(f"mlx_lm.{name}")
    finally:
        ferrule.uninstall_mlx()
        mx.set_default_device(DEVICE)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are called."""
    names: set[str] = set()
    original = InstalledKernel.__call__

    def call(self: InstalledKernel, **arguments: Any) -> Any:
        names.add(self.kernel.name)
        return original(self, **arguments)

    monkeypatch.setattr(InstalledKernel, "__call__", call)
    return names


def randomly(model: nn.Module) -> nn.Module:
    """A model whose parameters are all random, those that begin as zeros and ones too."""
    generator = np.random.default_rng(0)
    values = []
    for name, value in tree_flatten(model.parameters()):
        if value.dtype == mx.uint8:  # ternary weights: three of the four values of two bits
            bits = generator.integers(0, 3, (4, *value.shape), dtype=np.uint8)
            values.append((name, mx.array(sum(bits[i] << 2 * i for i in range(4)))))
            continue
        spread = 0.3 if value.ndim < 2 else 1.5 / np.sqrt(value.shape[-1])
        noise = mx.array(generator.normal(0, spread, value.shape).astype(np.float32))
        base = value if value.ndim < 2 else mx.zeros_like(value)
        values.append((name, (base + noise).astype(value.dtype)))
    model.update(tree_unflatten(values))
    mx.eval(model.parameters())
    return model.eval()


def generated(
    lm: Callable[[str], ModuleType], model: Any, count: int = 12
) -> tuple[list[int], Any]:
    """Greedy tokens, and the logarithms of their probabilities."""
    found = list(lm("generate").generate_step(mx.array(PROMPT), model, max_tokens=count))
    tokens = [int(token) for token, _ in found]
    return tokens, np.array([float(likely[int(token)]) for token, likely in found])


def same_tokens(
    lm: Callable[[str], ModuleType], model: Any, ran: set[str], kernels: set[str]
) -> None:
    """A model generates the same with its kernels, all of which run, as without them."""
    tokens, likely = generated(lm, model)
    assert ran == kernels
    ran.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: False)
        expected, as_likely = generated(lm, model)
    assert not ran
    assert tokens == expected
    assert len(set(tokens)) > 2, "too dull to say anything"
    np.testing.assert_allclose(likely, as_likely, rtol=1e-3, atol=1e-4)


def test_rwkv7(lm: Callable[[str], ModuleType], ran: set[str]) -> None:
    rwkv7 = lm("models.rwkv7")
    args = rwkv7.ModelArgs(
        model_type="rwkv7", vocab_size=64, hidden_size=64, intermediate_size=96, norm_eps=1e-5,
        head_dim=32, num_hidden_layers=2, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    )  # fmt: skip
    same_tokens(lm, randomly(rwkv7.Model(args)), ran, {"wkv7_kernel"})


def test_mamba2(lm: Callable[[str], ModuleType], ran: set[str]) -> None:
    mamba2 = lm("models.mamba2")
    args = mamba2.ModelArgs(
        model_type="mamba2", num_heads=4, head_dim=16, vocab_size=64, hidden_size=32,
        intermediate_size=64, state_size=32, num_hidden_layers=2, layer_norm_epsilon=1e-5,
        conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True, tie_word_embeddings=False,
        time_step_limit=(0.001, 100.0), time_step_rank="auto",
    )  # fmt: skip
    same_tokens(lm, randomly(mamba2.Model(args)), ran, {"ssm_kernel"})


def test_qwen3_next(lm: Callable[[str], ModuleType], ran: set[str]) -> None:
    qwen3_next = lm("models.qwen3_next")
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next", hidden_size=32, num_hidden_layers=4, intermediate_size=64,
        num_attention_heads=4, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=16, linear_conv_kernel_dim=4, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, shared_expert_intermediate_size=32,
        mlp_only_layers=[], moe_intermediate_size=32, rms_norm_eps=1e-5, vocab_size=64,
        num_key_value_heads=2, rope_theta=1000.0, partial_rotary_factor=0.25,
        max_position_embeddings=512, head_dim=8,
    )  # fmt: skip
    model = randomly(qwen3_next.Model(args))
    generated(lm, model)
    assert any(name.startswith("gated_delta") for name in ran), ran
    same_tokens(lm, model, ran, set(ran))


def test_bitnet(
    lm: Callable[[str], ModuleType], ran: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm has no version without the kernel: it is written here."""
    bitnet, layers = lm("models.bitnet"), lm("models.bitlinear_layers")
    args = bitnet.ModelArgs(
        model_type="bitnet", hidden_size=128, num_hidden_layers=2, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5, vocab_size=64,
    )  # fmt: skip
    model = randomly(bitnet.Model(args))
    tokens, likely = generated(lm, model)
    assert ran == {"bitlinear_matmul"}

    def by_hand(self: Any, x: mx.array, packed: mx.array) -> mx.array:
        weights = mx.concatenate([((packed >> 2 * i) & 3).astype(x.dtype) - 1 for i in range(4)])
        scale = self.weight_scale
        return (x @ weights.T) * (1 / scale if self.invert_weight_scales else scale)

    monkeypatch.setattr(layers.BitLinear, "execute_matmul_kernel", by_hand)
    expected, as_likely = generated(lm, model)
    assert tokens == expected
    assert len(set(tokens)) > 2
    tf32 = mx.default_device() != mx.Device(mx.cpu)  # what MLX multiplies in on CUDA
    np.testing.assert_allclose(likely, as_likely, rtol=1e-2 if tf32 else 1e-3, atol=1e-4)


def test_muse_spark(lm: Callable[[str], ModuleType], ran: set[str]) -> None:
    """There is no version without kernels: a prompt at once is as one token after the other."""
    muse_spark = lm("models.muse_spark")
    args = muse_spark.ModelArgs.from_dict({
        "model_type": "muse_spark", "image_token_id": 63,
        "text_config": {
            "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 8,
            "final_logit_softcapping": 20.0, "output_multiplier": 2**-0.5, "num_local_experts": 4,
            "num_experts_per_tok": 2, "moe_hidden_size": 32, "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    })  # fmt: skip
    mx.random.seed(0)
    model = muse_spark.Model(args)
    tokens, _ = generated(lm, model)
    assert len(ran) >= 5
    assert len(set(tokens)) > 2
    cache = model.make_cache()
    for token in [*PROMPT, *tokens[:-1]]:
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
    assert int(mx.argmax(logits)) == tokens[-1]
    whole = model(mx.array([[*PROMPT, *tokens[:-1]]]))[0, len(PROMPT) - 1 :]
    assert mx.argmax(whole, axis=-1).tolist() == tokens


@pytest.mark.parametrize("loss", ["kl_div_loss", "js_div_loss"])
def test_training_through_a_loss(lm: Callable[[str], ModuleType], ran: set[str], loss: str) -> None:
    """Distilling one linear layer from another: the same steps as with the loss in plain MLX."""
    losses = lm("tuner.losses")
    mx.random.seed(0)
    teacher, x = nn.Linear(8, 48), mx.random.normal((16, 8))
    goal = 3 * teacher(x)

    def train() -> list[float]:
        mx.random.seed(1)
        student = nn.Linear(8, 48)
        optimizer = mlx.optimizers.Adam(0.05)
        step = nn.value_and_grad(student, lambda x: getattr(losses, loss)(student(x), goal).mean())
        found = []
        for _ in range(25):
            value, grads = step(x)
            optimizer.update(student, grads)
            mx.eval(student.parameters(), optimizer.state)
            found.append(float(value))
        return found

    actual = train()
    assert len(ran) == 2, ran
    ran.clear()
    with mx.stream(mx.cpu):
        expected = train()
    assert not ran
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    assert actual[-1] < 0.2 * actual[0]


def test_training_a_model_takes_the_versions_that_have_gradients(
    lm: Callable[[str], ModuleType], ran: set[str]
) -> None:
    """mlx-lm trains without the kernels that have no derivative."""
    gated_delta = lm("models.gated_delta")
    generator = np.random.default_rng(0)
    q, k = (mx.array(generator.normal(0, 0.2, (1, 5, 2, 32)).astype(np.float32)) for _ in "qk")
    v = mx.array(generator.normal(0, 1, (1, 5, 4, 16)).astype(np.float32))
    a, b = (mx.array(generator.normal(0, 1, (1, 5, 4)).astype(np.float32)) for _ in "ab")
    log, bias = mx.zeros(4), mx.zeros(4)

    def total(v: mx.array) -> mx.array:
        y, _ = gated_delta.gated_delta_update(q, k, v, a, b, log, bias, use_kernel=False)
        return (y * y).sum()

    grad = mx.grad(total)(v)
    assert not ran
    with mx.stream(mx.cpu):
        assert mx.allclose(grad, mx.grad(total)(v), rtol=1e-5)
