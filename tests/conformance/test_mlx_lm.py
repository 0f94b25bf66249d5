"""Every kernel of mlx-lm, called through mlx-lm's own functions.

Compared with mlx-lm's own op-by-op versions where it has them, else with NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from drivers import run_driver
from mlx_lm_kernels import MlxLm, covered, covers

Array = np.ndarray[Any, Any]
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


@pytest.fixture(scope="session")
def imported() -> MlxLm:
    return MlxLm()


@pytest.fixture
def lm(imported: MlxLm) -> Iterator[MlxLm]:
    """mlx-lm, its functions not compiled: a kernel call is eager."""
    mx.disable_compile()
    try:
        yield imported
    finally:
        mx.enable_compile()


def f64(a: mx.array) -> Array:
    return np.array(a.astype(F32)).astype(np.float64)


class Random:
    """Arrays of one dtype."""

    def __init__(self, dtype: mx.Dtype, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0) -> mx.array:
        return self.array(self._generator.normal(0, scale, shape))

    def uniform(self, low: float, high: float, *shape: int) -> mx.array:
        return self.array(self._generator.uniform(low, high, shape))

    def integers(self, low: int, high: int, *shape: int) -> Array:
        return self._generator.integers(low, high, shape)

    def array(self, values: Array) -> mx.array:
        return mx.array(values.astype(np.float32)).astype(self.dtype)


def close(
    actual: mx.array, expected: mx.array | Array, steps: float = 4, dtype: mx.Dtype | None = None
) -> None:
    """Equal but for ``steps`` roundings to ``dtype`` of values as large as the largest."""
    wanted = f64(expected) if isinstance(expected, mx.array) else expected
    assert actual.shape == wanted.shape
    limit = steps * EPSILON[dtype or actual.dtype] * max(1e-3, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(f64(actual), wanted, rtol=0, atol=limit)


def rounded(values: Array, dtype: mx.Dtype) -> Array:
    return f64(mx.array(values.astype(np.float32)).astype(dtype))


# -- all of them -----------------------------------------------------------------------------------


def test_every_kernel_has_a_test(imported: MlxLm) -> None:
    assert imported.sites, "mlx-lm makes no kernels: have the names changed?"
    unmade = sorted(imported.sites - imported.reached)
    assert not unmade, f"made at other times than the import, so not tested: {unmade}"
    untested = {name: file for name, file in imported.made.items() if name not in covered}
    assert not untested, f"new in mlx-lm, and without a test: {untested}"
    assert covered == set(imported.made)


def test_mlx_lm_own_files(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--mlx-lm-tests", default=None)
    if folder is None:
        pytest.skip("runs with --mlx-lm-tests PATH, the folder tests of a checkout of mlx-lm")
    run_driver("run_mlx_lm_tests.py", folder, timeout=290)


# -- models ----------------------------------------------------------------------------------------


@covers("wkv7_kernel")
@pytest.mark.parametrize(
    ("dtype", "B", "T", "H", "D"),
    [(F32, 2, 5, 2, 64), (F32, 1, 1, 3, 64), (BF16, 1, 4, 1, 32), (F16, 2, 3, 2, 32)],
)
def test_rwkv7(lm: MlxLm, dtype: mx.Dtype, B: int, T: int, H: int, D: int) -> None:
    random = Random(dtype)
    r, k, v = (random.normal(B, T, H, D) for _ in range(3))
    w = random.uniform(0.5, 1, B, T, H, D)
    a, b = (random.normal(B, T, H, D, scale=D**-0.5) for _ in range(2))
    layer = SimpleNamespace(num_heads=H, head_dim=D)
    run = lm.rwkv7.Rwkv7TimeMixing._wkv7
    for state in (None, random.normal(B, H, D, D)):
        wide = [x.astype(F32) for x in (r, w, k, v, a, b)]
        expected = run(layer, *wide, None if state is None else state.astype(F32))
        with lm.metal():
            actual = run(layer, r, w, k, v, a, b, state)
        for got, wanted in zip(actual, expected, strict=True):
            assert got.dtype == dtype
            # the ops leave an axis of length 1 at the end of y
            close(got, wanted.reshape(got.shape), 16)


def gated_delta_case(
    dtype: mx.Dtype, B: int, T: int, Hk: int, Hv: int, Dk: int, Dv: int, *, vectorised: bool = False
) -> dict[str, mx.array]:
    random, wide = Random(dtype), Random(F32, seed=1)
    gates = (B, T, Hv, Dk) if vectorised else (B, T, Hv)
    return {
        "q": random.normal(B, T, Hk, Dk, scale=Dk**-0.5),
        "k": random.normal(B, T, Hk, Dk, scale=Dk**-0.5),
        "v": random.normal(B, T, Hv, Dv),
        "g": wide.uniform(0.5, 1, *gates),
        "beta": random.uniform(0, 1, B, T, Hv),
        "state": wide.normal(B, Hv, Dv, Dk),
    }


def check_gated_delta(
    lm: MlxLm, run: Any, case: dict[str, mx.array], mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    wide = {name: a.astype(F32) for name, a in case.items()}
    y, state = lm.gated_delta.gated_delta_ops(**wide, mask=mask)
    actual = run(**case, mask=mask)
    if mask is not None:  # the kernel writes zeros where the ops write what nobody reads
        y = mx.where(mask[..., None, None], y, 0)
    assert actual[0].dtype == case["q"].dtype
    assert actual[1].dtype == F32
    close(actual[0], y, 8)
    close(actual[1], state, 16)
    return actual


SIZES = [(F32, 2, 5, 1, 2, 64, 16), (BF16, 1, 3, 2, 2, 32, 6), (F16, 2, 1, 1, 3, 32, 4)]


@covers("gated_delta_step", "gated_delta_step_mask")
@pytest.mark.parametrize("sizes", SIZES)
def test_gated_delta(lm: MlxLm, sizes: Any) -> None:
    case = gated_delta_case(*sizes)
    run = lm.gated_delta.gated_delta_kernel
    plain = check_gated_delta(lm, run, case)
    mask = mx.array(Random(F32).integers(0, 2, *case["beta"].shape[:2]) > 0)
    check_gated_delta(lm, run, case, mask)
    unmasked = check_gated_delta(lm, run, case, mx.ones_like(mask))
    assert all(map(mx.array_equal, unmasked, plain))


@covers("gated_delta_step_vec", "gated_delta_step_vec_mask")
@pytest.mark.parametrize("sizes", SIZES)
def test_gated_delta_vectorised(lm: MlxLm, sizes: Any) -> None:
    case = gated_delta_case(*sizes, vectorised=True)
    run = lm.gated_delta.gated_delta_kernel
    check_gated_delta(lm, run, case)
    mask = mx.array(Random(F32).integers(0, 2, *case["beta"].shape[:2]) > 0)
    check_gated_delta(lm, run, case, mask)


@covers("gated_delta_step_packed_btree", "gated_delta_step_xtree", "gated_delta_step")
@pytest.mark.parametrize(
    "sizes", [(F32, 2, 4, 1, 2, 128, 16), (BF16, 1, 3, 2, 2, 128, 8), (F16, 1, 2, 1, 1, 128, 24)]
)
def test_gated_delta_packed(lm: MlxLm, sizes: Any) -> None:
    """mlx-lm's tests want the packed kernel to give the bits of the others."""
    case = gated_delta_case(*sizes)
    packed = check_gated_delta(lm, lm.gated_delta.gated_delta_kernel, case)
    for run in (
        lm.gated_delta.gated_delta_kernel_xtree,
        lm.gated_delta.gated_delta_kernel_unpacked,
    ):
        assert all(map(mx.array_equal, check_gated_delta(lm, run, case), packed))


@covers("gated_delta_step", "gated_delta_step_vec")
def test_gated_delta_update(lm: MlxLm) -> None:
    """The function that models call, which finds the gates itself."""
    B, T, Hk, Hv, Dk, Dv = 2, 5, 1, 2, 64, 16
    random = Random(F32)
    q, k = lm.gated_delta.normalize_qk(
        random.normal(B, T, Hk, Dk), random.normal(B, T, Hk, Dk), inv_scale=Dk**-0.5, eps=1e-6
    )
    v, b = random.normal(B, T, Hv, Dv), random.normal(B, T, Hv)
    for gates, options in (
        ((Hv,), {}),
        ((Hv, Dk), {"lower_bound": -5.0}),
        ((Hv,), {"allow_neg_eigval": True}),
    ):
        A_log = random.normal(*gates[:1], *[1] * (len(gates) - 1))
        arguments = (q, k, v, random.normal(B, T, *gates), b, A_log, random.normal(*gates))
        expected = lm.gated_delta.gated_delta_update(*arguments, use_kernel=False, **options)
        with lm.metal():
            actual = lm.gated_delta.gated_delta_update(*arguments, **options)
        for got, wanted in zip(actual, expected, strict=True):
            close(got, wanted, 64)


@covers("ssm_kernel")
@pytest.mark.parametrize(
    ("dtype", "n", "h", "d", "groups", "ds"),
    [(F32, 2, 4, 16, 2, 64), (BF16, 1, 2, 12, 1, 32), (F16, 3, 4, 5, 4, 32)],
)
def test_ssm(lm: MlxLm, dtype: mx.Dtype, n: int, h: int, d: int, groups: int, ds: int) -> None:
    random, wide = Random(dtype), Random(F32, seed=1)
    x, dt = random.normal(n, 1, h, d), random.normal(n, 1, h)
    B, C = (random.normal(n, 1, groups, ds) for _ in range(2))
    A_log, D, dt_bias = (random.normal(h) for _ in range(3))
    state = wide.normal(n, h, d, ds)
    rest = {"state": state, "time_step_limit": (0.001, 100.0)}
    arrays = (x, A_log, B, C, D, dt, dt_bias)
    expected = lm.ssm.ssm_update(*(a.astype(F32) for a in arrays), **rest)
    with lm.metal():
        y, new_state = lm.ssm.ssm_update(*arrays, **rest)
    assert y.dtype == dtype
    assert new_state.dtype == F32
    close(y, expected[0], 32 if dtype == F32 else 4)
    # dt is rounded to the dtype of the inputs before it is used
    close(new_state, expected[1], 32 if dtype == F32 else 4, dtype)


@covers("bitlinear_matmul")
@pytest.mark.parametrize(
    ("dtype", "leading", "features", "outputs", "inverted"),
    [(F32, (3,), 200, 8, False), (BF16, (2, 3), 128, 12, True), (F16, (1,), 4, 4, False)],
)
def test_bitlinear(
    lm: MlxLm, dtype: mx.Dtype, leading: Any, features: int, outputs: int, inverted: bool
) -> None:
    random = Random(dtype)
    trits = random.integers(0, 3, 4, outputs // 4, features)
    layer = lm.bitlinear_layers.BitLinear(features, outputs, True, inverted)
    packed = sum(trits[i] << 2 * i for i in range(4))
    layer.weight = mx.array(packed.astype(np.uint8))
    layer.weight_scale = random.array(np.array([1.75]))
    layer.bias = random.normal(outputs)
    x = random.normal(*leading, features)
    scale = 1 / 1.75 if inverted else 1.75
    weights = trits.reshape(outputs, features) - 1.0
    y = layer(x)
    assert y.dtype == dtype
    close(y, scale * (f64(x) @ weights.T) + f64(layer.bias), 16)


@covers("attnres_mix")
@pytest.mark.parametrize(
    ("dtype", "blocks", "shape"), [(F32, 3, (2, 3, 70)), (BF16, 1, (1, 600)), (F16, 2, (4, 512))]
)
def test_kimi_k3(lm: MlxLm, dtype: mx.Dtype, blocks: int, shape: Any) -> None:
    random, wide = Random(dtype), Random(F32, seed=1)
    residuals = lm.kimi_k3.ResidualBlocks(1e-5)
    now, weights = random.normal(*shape), wide.normal(shape[-1], scale=shape[-1] ** -0.5)
    assert lm.kimi_k3._attn_res_mix(residuals, now, weights, 1e-5) is now
    for _ in range(blocks):
        residuals.append(random.normal(*shape))
    expected = lm.kimi_k3._attn_res_mix(residuals, now, weights, 1e-5, use_kernel=False)
    with lm.metal():
        actual = lm.kimi_k3._attn_res_mix(residuals, now, weights, 1e-5)
    assert actual.dtype == dtype
    close(actual, expected, 16 if dtype == F32 else 2)


@covers("deepseek_v41_sinkhorn")
@pytest.mark.parametrize(
    ("leading", "hc", "iters"), [((2, 3), 4, 20), ((300,), 4, 1), ((1,), 3, 2)]
)
def test_deepseek_v41(lm: MlxLm, leading: Any, hc: int, iters: int) -> None:
    comb = mx.softmax(Random(F32).normal(*leading, hc, hc), axis=-1)
    eps = mx.array([1e-6])
    expected = lm.deepseek_v41._sinkhorn(comb, iters=iters, eps=eps)
    with lm.metal():
        actual = lm.deepseek_v41._sinkhorn(comb, iters=iters, eps=eps)
    close(actual, expected, 16)


# -- losses ----------------------------------------------------------------------------------------

# Blocks are of 4096 logits: less than one, exactly one, one and a part of another.
LOSSES = [(F32, (3, 37)), (F16, (2, 4096)), (BF16, (2, 2, 5000))]


def softmaxes(q: mx.array, p: mx.array) -> tuple[Array, Array]:
    """Log-probabilities."""
    x = np.stack([f64(q), f64(p)])
    x -= x.max(-1, keepdims=True)
    log_q, log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return log_q, log_p


def loss_and_gradient(lm: MlxLm, loss: Any, q: mx.array, p: mx.array, cotangent: mx.array) -> Any:
    with lm.metal():
        value = loss(q, p)
        gradient = mx.grad(lambda q: (loss(q, p) * cotangent).sum())(q)
    assert value.dtype == gradient.dtype == q.dtype
    return value, gradient


@covers("kl_forward", "kl_backward")
@pytest.mark.parametrize(("dtype", "shape"), LOSSES)
def test_kl_div_loss(lm: MlxLm, dtype: mx.Dtype, shape: Any) -> None:
    random = Random(dtype)
    q, p, cotangent = random.normal(*shape), random.normal(*shape), random.normal(*shape[:-1])
    value, gradient = loss_and_gradient(lm, lm.losses.kl_div_loss, q, p, cotangent)
    log_q, log_p = softmaxes(q, p)
    close(value, (np.exp(log_p) * (log_p - log_q)).sum(-1), 32 if dtype == F32 else 1)
    close(gradient, f64(cotangent)[..., None] * (np.exp(log_q) - np.exp(log_p)), 32)
    if dtype == F32:
        close(value, lm.losses.kl_div_loss(q, p), 64)


@covers("js_forward", "js_backward")
@pytest.mark.parametrize(("dtype", "shape"), LOSSES)
def test_js_div_loss(lm: MlxLm, dtype: mx.Dtype, shape: Any) -> None:
    random = Random(dtype)
    q, p, cotangent = random.normal(*shape), random.normal(*shape), random.normal(*shape[:-1])
    value, gradient = loss_and_gradient(lm, lm.losses.js_div_loss, q, p, cotangent)
    log_q, log_p = softmaxes(q, p)
    log_m = np.logaddexp(log_q, log_p) - np.log(2)
    kl_q = (np.exp(log_q) * (log_q - log_m)).sum(-1)
    close(value, 0.5 * (kl_q + (np.exp(log_p) * (log_p - log_m)).sum(-1)), 32)
    slope = 0.5 * np.exp(log_q) * (log_q - log_m - kl_q[..., None])
    close(gradient, f64(cotangent)[..., None] * slope, 64)
    if dtype == F32:
        close(value, lm.losses.js_div_loss(q, p), 64)


# -- the package `kernels` -------------------------------------------------------------------------


@covers("expert_routing")
@pytest.mark.parametrize(
    ("dtype", "leading", "E", "K"), [(F32, (9,), 40, 3), (BF16, (2, 3), 8, 8), (F32, (1,), 64, 1)]
)
def test_expert_routing(lm: MlxLm, dtype: mx.Dtype, leading: Any, E: int, K: int) -> None:
    random = Random(dtype)
    # Whole numbers over 4, so that there are ties, which the lower expert wins.
    logits = random.array(random.integers(-9, 10, *leading, E) / 4)
    bias = Random(F32).array(random.integers(-1, 2, E) * 2.0)
    inds, weights = lm.expert_routing.expert_routing(
        logits, bias, top_k=K, multiplier=0.5, score_eps=1e-3, route_scale=2.5
    )
    scores = 1 / (1 + np.exp(-0.5 * f64(logits)))
    expected = np.argsort(-(scores + f64(bias)).round(6), axis=-1, kind="stable")[..., :K]
    assert inds.dtype == mx.uint32
    assert inds.tolist() == expected.tolist()
    chosen = np.take_along_axis(scores, expected, -1)
    close(weights, 2.5 * chosen / (chosen.sum(-1, keepdims=True) + 1e-3), 8, F32)


def rms_norm(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@covers("norm_add_norm", "norm_add", "norm_add_norm_pre_norm")
@pytest.mark.parametrize(
    ("dtype", "leading", "D", "scaled"),
    [(F32, (3,), 40, False), (BF16, (2, 2), 600, True), (F16, (1,), 2100, True)],
)
def test_norm_add_norm(lm: MlxLm, dtype: mx.Dtype, leading: Any, D: int, scaled: bool) -> None:
    random, wide = Random(dtype), Random(F32, seed=1)
    branch, stream = random.normal(*leading, D), wide.normal(*leading, D)
    alpha, beta = wide.uniform(0, 1, D), wide.uniform(0, 1, D)
    post_weight = random.normal(D) if scaled else None
    norm = nn.RMSNorm(D, eps=1e-5)
    norm.weight = random.normal(D)
    given = {"alpha": alpha, "beta": beta, "post_weight": post_weight, "post_eps": 1e-3}
    module = lm.norm_add_norm
    new_stream, normed = module.norm_add_norm(branch, stream, **given, next_norm=norm)
    alone, nothing = module.norm_add_norm(branch, stream, **given, next_norm=None)

    x = f64(branch)
    if post_weight is not None:
        x = rounded(f64(post_weight) * x, dtype)
    total = f64(alpha) * f64(stream) + f64(beta) * rounded(rms_norm(x, 1e-3), dtype)
    assert (new_stream.dtype, normed.dtype) == (F32, dtype)
    close(new_stream, total, 16 if dtype == F32 else 1, dtype)
    close(normed, rms_norm(total, 1e-5) * f64(norm.weight), 16 if dtype == F32 else 2)
    assert nothing is None
    assert mx.array_equal(alone, new_stream)
    # "For a stream from norm_add_norm, the values are equal to its normed sum."
    assert mx.array_equal(module.pre_norm(new_stream, norm, dtype=dtype), normed)


@covers("post_expert_norm_combine")
@pytest.mark.parametrize(
    ("dtype", "leading", "K", "D"),
    [(F32, (3,), 2, 40), (BF16, (2, 2), 4, 600), (F16, (1,), 1, 1100)],
)
def test_post_expert_norm_combine(lm: MlxLm, dtype: mx.Dtype, leading: Any, K: int, D: int) -> None:
    random = Random(dtype)
    experts, norm_weight = random.normal(*leading, K, D), random.normal(D)
    weights = Random(F32, seed=1).uniform(0, 1, *leading, K)
    out = lm.post_expert_norm_combine.post_expert_norm_combine(
        experts, weights, norm_weight=norm_weight, eps=1e-5
    )
    assert out.dtype == dtype
    terms = rms_norm(f64(experts) * f64(norm_weight), 1e-5)
    close(out, (terms * rounded(f64(weights), dtype)[..., None]).sum(-2), 16 if dtype == F32 else 4)


HEADS = [(F32, (3,), 2, 1, 40), (BF16, (2, 3), 4, 2, 64), (F16, (1, 1), 1, 1, 32)]


def normed_heads(qkvg: mx.array, HQ: int, HK: int, D: int, scale: float) -> list[Array]:
    heads = f64(qkvg)[..., : (HQ + HK) * D].reshape(*qkvg.shape[:-1], HQ + HK, D)
    heads = rounded(rms_norm(heads, 1e-5), qkvg.dtype)
    return [rounded(heads[..., :HQ, :] * scale, qkvg.dtype), heads[..., HQ:, :]]


@covers("qk_norm")
@pytest.mark.parametrize(("dtype", "leading", "HQ", "HK", "D"), HEADS)
def test_qk_norm(lm: MlxLm, dtype: mx.Dtype, leading: Any, HQ: int, HK: int, D: int) -> None:
    qkvg = Random(dtype).normal(*leading, 2 * (HQ + HK) * D)
    actual = lm.qk_norm.qk_norm(
        qkvg, n_heads=HQ, n_kv_heads=HK, head_dim=D, eps=1e-5, query_scale=1.3
    )
    for got, wanted in zip(actual, normed_heads(qkvg, HQ, HK, D, 1.3), strict=True):
        assert got.dtype == dtype
        close(got, wanted, 8 if dtype == F32 else 1)


@covers("qk_norm_rope")
@pytest.mark.parametrize(
    ("dtype", "leading", "HQ", "HK", "D"), [*HEADS[1:], (F32, (2, 5), 2, 1, 40)]
)
def test_qk_norm_rope(lm: MlxLm, dtype: mx.Dtype, leading: Any, HQ: int, HK: int, D: int) -> None:
    qkvg = Random(dtype).normal(*leading, 2 * (HQ + HK) * D)
    for offset in (0, 11, mx.arange(leading[0]) * 70):
        actual = lm.qk_norm_rope.qk_norm_rope(
            qkvg, n_heads=HQ, n_kv_heads=HK, head_dim=D, eps=1e-5, query_scale=1.3,
            rope_base=1e4, offset=offset,
        )  # fmt: skip
        for got, heads in zip(actual, normed_heads(qkvg, HQ, HK, D, 1.3), strict=True):
            first = np.array(offset).reshape(-1, 1) if isinstance(offset, mx.array) else offset
            at = (first + np.arange(leading[1])) + np.zeros((leading[0], 1))
            angle = (at[..., None] * 1e4 ** -(np.arange(D // 2) / (D // 2)))[..., None, :]
            turned = (heads[..., ::2] + 1j * heads[..., 1::2]) * np.exp(1j * angle)
            wanted = np.stack([turned.real, turned.imag], -1).reshape(heads.shape)
            assert got.dtype == dtype
            close(got, wanted, 128 if dtype == F32 else 2)


@covers("rms_norm_sigmoid_gate")
@pytest.mark.parametrize(
    ("dtype", "B", "H", "L", "D"), [(F32, 2, 3, 4, 40), (BF16, 1, 2, 3, 64), (F16, 2, 1, 1, 8)]
)
def test_rms_norm_sigmoid_gate(lm: MlxLm, dtype: mx.Dtype, B: int, H: int, L: int, D: int) -> None:
    """The inputs are views of larger arrays, read by their strides."""
    random = Random(dtype)
    x = random.normal(B, L, H, 2 * D).transpose(0, 2, 1, 3)[..., ::2]
    gate = random.normal(B, L, 2 * H * D)[..., H * D :]
    out = lm.rms_norm_sigmoid_gate.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    normed = rms_norm(f64(x), 1e-5).transpose(0, 2, 1, 3).reshape(B, L, H * D)
    assert out.dtype == dtype
    close(out, normed / (1 + np.exp(-f64(gate))), 8 if dtype == F32 else 1)
