"""A hybrid language model in one shapeless compilation: state-space kernel, attention, experts.

Its weights, and what it should say, are of mlx-lm's Qwen3-Next with random weights. mlx-lm's own
classes keep the sizes of the trace; here the same is written from operations of MLX that do not,
from ops of ferrule, and from `ferrule.mlx`. Sizes of weights are numbers; those of a call are not.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_next
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

import ferrule
import ferrule.mlx as fm
import on_cuda
from mlx_versions import needs_mlx

pytestmark = needs_mlx(0, 32, 3)

VOCABULARY = 96

# The convolution of each channel with its own weights, over what came before and the new tokens;
# and the last of these, for the next call.
convolve = ferrule.op(
    "hybrid_convolve",
    "x[B,L,C]:T, past[B,P,C]:T, w[C,P+1]:T -> y[B,L,C]:T, kept[B,P,C]:T",
    metal="""
        const int c = thread_position_in_grid.x, at = thread_position_in_grid.y;
        const int b = thread_position_in_grid.z, length = x_shape[1];
        if (at >= length) {
            kept[(b * P + at - length) * C + c] =
                at < P ? past[(b * P + at) * C + c] : x[(b * length + at - P) * C + c];
            return;
        }
        float sum = 0;
        for (int i = 0; i <= P; i++) {
            const int row = at + i;
            sum += w[c * (P + 1) + i] * (row < P ? past[(b * P + row) * C + c]
                                                 : x[(b * length + row - P) * C + c]);
        }
        y[(b * length + at) * C + c] = sum / (1 + metal::exp(-sum));""",
    grid=("C", "L+P", "B"), threadgroup=(32, 4, 1),
)  # fmt: skip

# The gated delta rule: a matrix per head that forgets, and learns what it got wrong. A simdgroup
# holds a row of it.
gated_delta = ferrule.op(
    "hybrid_gated_delta",
    "q[B,L,G,D]:T, k[B,L,G,D]:T, v[B,L,H,N]:T, decay[B,L,H]:float32, rate[B,L,H]:T,"
    " before[B,H,N,D]:float32 -> y[B,L,H,N]:T, after[B,H,N,D]:float32",
    metal="""
        const int lane = thread_position_in_grid.x, row = thread_position_in_grid.y;
        const int b = thread_position_in_grid.z / H, h = thread_position_in_grid.z % H;
        const int length = q_shape[1], state_at = ((b * H + h) * N + row) * D + lane * count;
        float state[count];
        for (int i = 0; i < count; i++) state[i] = before[state_at + i];
        for (int t = 0; t < length; t++) {
            const int step = b * length + t;
            const int key_at = (step * G + h / (H / G)) * D + lane * count;
            float known = 0;
            for (int i = 0; i < count; i++) {
                state[i] *= decay[step * H + h];
                known += state[i] * k[key_at + i];
            }
            known = simd_sum(known);
            const float change = (v[(step * H + h) * N + row] - known) * rate[step * H + h];
            float out = 0;
            for (int i = 0; i < count; i++) {
                state[i] += k[key_at + i] * change;
                out += state[i] * q[key_at + i];
            }
            out = simd_sum(out);
            if (lane == 0) y[(step * H + h) * N + row] = out;
        }
        for (int i = 0; i < count; i++) after[state_at + i] = state[i];""",
    grid=("32", "N", "B*H"), threadgroup=(32, 4, 1), template={"count": "D//32"},
)  # fmt: skip

# Rotary positions, which begin after those of the past.
rotate = ferrule.op(
    "hybrid_rotate",
    "x[B,L,H,D]:T, past[B,S,G,D]:T, rotated:int32, base:float32 -> y[B,L,H,D]:T",
    metal="""
        const int i = thread_position_in_grid.x, at = i % D, half_of = rotated / 2;
        if (at >= rotated) {
            y[i] = x[i];
            return;
        }
        const int place = past_shape[1] + i / (D * H) % x_shape[1], pair = at % half_of;
        const float angle = place * metal::precise::pow(base, -2.0f * pair / rotated);
        const float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
        y[i] = at < half_of ? x[i] * c - x[i + half_of] * s : x[i] * c + x[i - half_of] * s;""",
    grid="x.size", threadgroup=256,
)  # fmt: skip

# Minus infinity for keys that are later than the query.
causal = ferrule.op(
    "hybrid_causal", "scores[*A,L,S]:T -> y[*A,L,S]:T",
    metal="""
        const int i = thread_position_in_grid.x, rank = scores_ndim;
        const int keys = scores_shape[rank - 1], queries = scores_shape[rank - 2];
        y[i] = i % keys > keys - queries + i / keys % queries ? -INFINITY : float(scores[i]);""",
    grid="scores.size", threadgroup=256,
)  # fmt: skip


def part(x: mx.array, start: int, stop: int) -> mx.array:
    """``x[..., start:stop]``: a slice keeps the other sizes."""
    index = mx.arange(start, stop).reshape(*[1] * (x.ndim - 1), -1)
    return mx.take_along_axis(x, index, axis=-1)


def linear(layer: Any, x: mx.array) -> mx.array:
    if isinstance(layer, nn.QuantizedLinear):
        return fm.quantized_matmul(
            x, layer.weight, layer.scales, layer.get("biases"),
            group_size=layer.group_size, bits=layer.bits, mode=layer.mode,
        )  # fmt: skip
    return x @ layer.weight.T


def experts(layer: Any, x: mx.array, index: mx.array) -> mx.array:
    """The products of x's rows with the matrices of their experts."""
    if isinstance(layer, QuantizedSwitchLinear):
        return fm.gather_qmm(
            x, layer.weight, layer.scales, layer.get("biases"), rhs_indices=index,
            group_size=layer.group_size, bits=layer.bits, mode=layer.mode,
        )  # fmt: skip
    return fm.gather_mm(x, layer.weight.swapaxes(-1, -2), rhs_indices=index)


class Hybrid:
    """mlx-lm's Qwen3-Next, as a function of arrays alone.

    Takes tokens (B, L), and per layer two arrays of what came before; gives logits (B, L, V), and
    the arrays for the next call.
    """

    def __init__(self, model: qwen3_next.Model) -> None:
        self.model = model
        self.traces = 0

    def __call__(self, tokens: mx.array, *cache: mx.array) -> list[mx.array]:
        self.traces += 1
        x = mx.take(self.model.model.embed_tokens.weight, tokens, axis=0)
        kept: list[mx.array] = []
        for i, layer in enumerate(self.model.layers):
            mixer = self.recurrent if layer.is_linear else self.attention
            module = layer.linear_attn if layer.is_linear else layer.self_attn
            y, *after = mixer(module, layer.input_layernorm(x), *cache[2 * i : 2 * i + 2])
            kept += after
            x = x + y
            x = x + self.routed(layer.mlp, layer.post_attention_layernorm(x))
        return [linear(self.model.lm_head, self.model.model.norm(x)), *kept]

    def empty(self, batch: int) -> list[mx.array]:
        """What came before the first token."""
        cache = []
        for layer in self.model.layers:
            if layer.is_linear:
                m = layer.linear_attn
                cache.append(mx.zeros((batch, m.conv_kernel_size - 1, m.conv_dim)))
                cache.append(mx.zeros((batch, m.num_v_heads, m.head_v_dim, m.head_k_dim)))
            else:
                m = layer.self_attn
                cache += [mx.zeros((batch, 0, m.num_key_value_heads, m.head_dim))] * 2
        return cache

    def recurrent(
        self, m: Any, x: mx.array, past: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        heads, keys, wide, narrow = m.num_v_heads, m.num_k_heads, m.head_v_dim, m.head_k_dim
        each = heads // keys
        mixed = mx.unflatten(linear(m.in_proj_qkvz, x), -1, (keys, -1))
        both = mx.unflatten(linear(m.in_proj_ba, x), -1, (keys, 2 * each))
        ends = [0, narrow, 2 * narrow, 2 * narrow + each * wide, 2 * narrow + 2 * each * wide]
        q, k, v, z = (mx.flatten(part(mixed, *pair), 2, 3) for pair in itertools.pairwise(ends))
        b, a = (mx.flatten(part(both, at, at + each), 2, 3) for at in (0, each))
        weights = m.conv1d.weight.squeeze(-1)
        mixed, kept = convolve(mx.concatenate([q, k, v], axis=-1), past, weights)
        size = keys * narrow
        q = mx.unflatten(part(mixed, 0, size), -1, (keys, narrow))
        k = mx.unflatten(part(mixed, size, 2 * size), -1, (keys, narrow))
        v = mx.unflatten(part(mixed, 2 * size, 2 * size + heads * wide), -1, (heads, wide))
        q = mx.fast.rms_norm(q, None, 1e-6 / narrow) / narrow
        k = mx.fast.rms_norm(k, None, 1e-6 / narrow) * narrow**-0.5
        decay = mx.exp(-mx.exp(m.A_log) * nn.softplus(a + m.dt_bias))
        y, after = gated_delta(q, k, v, decay, mx.sigmoid(b), state)
        z = mx.unflatten(z, -1, (heads, wide))
        y = mx.fast.rms_norm(y, m.norm.weight, m.norm.eps) * nn.silu(z)
        return linear(m.out_proj, mx.flatten(y, 2, 3)), kept, after

    def attention(
        self, m: Any, x: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        heads, groups, size = m.num_attention_heads, m.num_key_value_heads, m.head_dim
        both = mx.unflatten(linear(m.q_proj, x), -1, (heads, 2 * size))
        queries, gate = m.q_norm(part(both, 0, size)), part(both, size, 2 * size)
        new = m.k_norm(mx.unflatten(linear(m.k_proj, x), -1, (groups, size)))
        queries, new = (
            rotate(one, keys, m.rope.dims, float(m.rope.base)) for one in (queries, new)
        )
        keys = mx.concatenate([keys, new], axis=1)
        new = mx.unflatten(linear(m.v_proj, x), -1, (groups, size))
        values = mx.concatenate([values, new], axis=1)
        # (B, groups, heads of a group, L or S, size)
        queries = mx.unflatten(queries * m.scale, 2, (groups, heads // groups))
        queries = queries.transpose(0, 2, 3, 1, 4)
        scores = queries @ keys.transpose(0, 2, 3, 1)[:, :, None]
        scores = mx.softmax(causal(scores), axis=-1)
        y = scores @ values.transpose(0, 2, 1, 3)[:, :, None]
        y = mx.flatten(y.transpose(0, 3, 1, 2, 4), 2, 4)
        return linear(m.o_proj, y * mx.sigmoid(mx.flatten(gate, 2, 3))), keys, values

    def routed(self, m: Any, x: mx.array) -> mx.array:
        gates = mx.softmax(linear(m.gate, x), axis=-1, precise=True)
        order = mx.argpartition(gates, kth=-m.top_k, axis=-1)
        index = part(order, m.num_experts - m.top_k, m.num_experts)
        scores = mx.take_along_axis(gates, index, axis=-1)
        if m.norm_topk_prob:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        rows, layers = x[..., None, None, :], m.switch_mlp
        rows = nn.silu(experts(layers.gate_proj, rows, index)) * experts(
            layers.up_proj, rows, index
        )
        rows = mx.squeeze(experts(layers.down_proj, rows, index), -2)
        shared = m.shared_expert
        y = linear(
            shared.down_proj, nn.silu(linear(shared.gate_proj, x)) * linear(shared.up_proj, x)
        )
        return (rows * scores[..., None]).sum(axis=-2) + mx.sigmoid(
            linear(m.shared_expert_gate, x)
        ) * y


def qwen3_next_model(quantized: dict[str, Any] | None) -> qwen3_next.Model:
    """mlx-lm's, tiny and random; layers 0 and 2 recurrent, 1 and 3 of attention."""
    mx.random.seed(0)
    model = qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next", hidden_size=64, num_hidden_layers=4, intermediate_size=128,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, partial_rotary_factor=0.5,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
            linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=2,
            num_experts=6, num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[],
            moe_intermediate_size=64, shared_expert_intermediate_size=64, norm_topk_prob=True,
            rms_norm_eps=1e-6, vocab_size=VOCABULARY, rope_theta=10000.0,
            max_position_embeddings=512,
        )
    )  # fmt: skip
    if quantized is not None:
        large = (nn.Linear, SwitchLinear)
        nn.quantize(
            model, **quantized,
            class_predicate=lambda path, m: isinstance(m, large) and m.weight.shape[-2] >= 32,
        )  # fmt: skip
    mx.eval(model.parameters())
    model.eval()
    return model


def close(a: mx.array, b: mx.array) -> None:
    assert a.shape == b.shape
    # On CUDA MLX multiplies in TF32.
    rtol, atol = (1e-3, 1e-4) if mx.default_device() == mx.Device(mx.cpu) else (1e-2, 1e-2)
    assert mx.allclose(a, b, rtol=rtol, atol=atol * mx.abs(b).max().item())


def conversation(
    step: Callable[..., Sequence[mx.array]], cache: Sequence[mx.array], parts: Sequence[mx.array]
) -> list[mx.array]:
    """The logits of each part of a conversation, in order."""
    said = []
    for tokens in parts:
        logits, *cache = step(tokens, *cache)
        said.append(logits)
    return said


@pytest.mark.parametrize(
    "quantized",
    [None, {"group_size": 32, "bits": 4}, {"group_size": 64, "bits": 8}, {"mode": "mxfp4"}],
    ids=str,
)
def test_one_function_for_every_length_and_batch(quantized: dict[str, Any] | None) -> None:
    model = qwen3_next_model(quantized)
    hybrid, compiled = Hybrid(model), Hybrid(model)
    step = mx.compile(compiled, shapeless=True)
    for batch, lengths in ((2, [5, 1, 1, 3]), (1, [1, 1, 7, 1]), (3, [9, 2, 1])):
        parts = [mx.random.randint(0, VOCABULARY, (batch, length)) for length in lengths]
        said = conversation(step, hybrid.empty(batch), parts)
        assert compiled.traces == 1
        plain = conversation(hybrid, hybrid.empty(batch), parts)
        cache = model.make_cache()
        garbage = on_cuda.mlx_has_cuda() and quantized == {"group_size": 64, "bits": 8}
        for ours, ours_plain, tokens in zip(said, plain, parts, strict=True):
            close(ours, ours_plain)
            if not garbage:  # which MLX's CUDA kernel gives where a row of 64 is one group
                close(ours, model(tokens, cache))


def test_generation() -> None:
    """Greedy decoding says what mlx-lm says, token by token."""
    model = qwen3_next_model({"group_size": 32, "bits": 4})
    hybrid = Hybrid(model)
    step = mx.compile(hybrid, shapeless=True)
    for batch in (1, 2):
        tokens = theirs = mx.random.randint(0, VOCABULARY, (batch, 4))
        cache, their_cache = hybrid.empty(batch), model.make_cache()
        for _ in range(12):
            logits, *cache = step(tokens, *cache)
            tokens = mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32)  # or it is traced again
            theirs = mx.argmax(model(theirs, their_cache)[:, -1:], axis=-1)
            assert tokens.tolist() == theirs.tolist()
    assert hybrid.traces == 1


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="install_mlx is for machines without a GPU")
@pytest.mark.parametrize(
    "kind",
    [
        {"group_size": 64, "bits": 4},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True},
    ],
    ids=str,
)
def test_experts_of_mlx_lm_as_they_are(kind: dict[str, Any]) -> None:
    """One trace of mlx-lm's own layer, for every number of tokens and batches."""
    mx.random.seed(0)
    layer = SwitchGLU(128, 64, 8)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer[name] = layer[name].to_quantized(**kind)
    mx.eval(layer.parameters())
    traces: list[tuple[int, ...]] = []

    def called(x: mx.array, chosen: mx.array) -> mx.array:
        traces.append(x.shape)
        return layer(x, chosen)  # type: ignore[no-any-return]

    step = mx.compile(called, shapeless=True)
    slope = mx.compile(mx.grad(lambda x, i: called(x, i).square().sum()), shapeless=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)  # of other tests' modules
        ferrule.install_mlx()
    try:
        # The last has so many that the layer sorts them, which the trace did not
        for batch, tokens in ((2, 3), (1, 1), (3, 1), (1, 7), (4, 30)):
            x = mx.random.normal((batch, tokens, 128))
            chosen = mx.random.randint(0, 8, (batch, tokens, 2))
            close(step(x, chosen), layer(x, chosen))
            close(slope(x, chosen), mx.grad(lambda x, i: layer(x, i).square().sum())(x, chosen))
    finally:
        ferrule.uninstall_mlx()
    assert len(traces) == 2
