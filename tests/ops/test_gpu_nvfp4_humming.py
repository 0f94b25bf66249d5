"""`backend="humming"` on a real GPU, with the package: against the other backends and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrule import KernelError, ops
from ferrule.ops import nvfp4

torch = pytest.importorskip("torch")

from nvfp4_arrays import any_bytes, exact, experts_of, layer_of, matrix, normal  # noqa: E402
from torch_cuda import ON_GPU, captured, poison  # noqa: E402

if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("the package's kernels are for compute capability 9.0", allow_module_level=True)
pytest.importorskip("humming", reason="humming-kernels is not installed")

pytestmark = [*ON_GPU, pytest.mark.filterwarnings("ignore", "error::ferrule.FerruleWarning")]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def linear(x: Any, w: Any, scale_2: Any, bias: Any = None) -> Any:
    return ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias, backend="humming")


def moe(*given: Any) -> Any:
    return ops.nvfp4_moe(*given, backend="humming")


def on_gpu(w: Any) -> Any:
    return w._replace(packed=w.packed.cuda(), scale=w.scale.cuda())


def check(what: str, y: Any, expected: Any, limit: float) -> None:
    """Fail unless the relative error, by the norm and of the largest element, is below limits."""
    y, expected = (torch.as_tensor(a).double().cpu() for a in (y, expected))
    assert y.isfinite().all(), f"{what}: {int((~y.isfinite()).sum())} of {y.numel()} not finite"
    norm = float((y - expected).norm() / expected.norm())
    most = float((y - expected).abs().max() / expected.abs().max())
    assert norm < limit and most < 8 * limit, f"{what}: {norm:.2e} of the norm, {most:.2e} of max"


def limit_of(dtype: Any) -> float:
    """Parts of sums are added up in the output's dtype, up to ten."""
    return 6e-3 if dtype == torch.bfloat16 else 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(512, 1024), (136, 48), (2880, 4112), (64, 4096)], ids=str)
def test_products(dtype: Any, sizes: Any) -> None:
    """Padded and not; with a bias; of rows of all buckets, of 3 axes, strided, at odd addresses."""
    random = np.random.default_rng(0)
    (n, k), w = sizes, matrix(random, *sizes)
    bias, scale_2 = normal(random, dtype, n).cuda(), torch.tensor(0.125).cuda()
    packed = on_gpu(w)
    for m in (0, 1, 3, 8, 17, 64, 100, 128, 300, 1025):
        x = normal(random, dtype, m, k)
        y = linear(x.cuda(), packed, scale_2)
        assert y.dtype == dtype and y.shape == (m, n)
        if m:
            expected = exact(x) @ w.values.T / 8
            check(f"{m} rows", y, expected, limit_of(dtype))
            y = linear(x.cuda()[None], packed, scale_2[None], bias)[0]
            check(f"{m} rows, bias", y, expected + exact(bias.cpu()), limit_of(dtype))
    for more, begin in ((3, 0), (3, 3), (8, 8)):
        x = normal(random, dtype, 4, k + more).cuda()[:, begin : begin + k]
        expected = exact(x.cpu()) @ w.values.T / 8
        check(f"strided, from {begin}", linear(x, packed, 0.125), expected, limit_of(dtype))
    memory = normal(random, dtype, 4 * k + 1).cuda()
    y = linear(memory[1:].view(4, k), packed, 0.125)
    check("odd address", y, exact(memory[1:].cpu().view(4, k)) @ w.values.T / 8, limit_of(dtype))


def test_rows_of_the_identity_give_the_elements() -> None:
    """Every pair of codes with every scale, but NaN."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256)[:, None].repeat(1, 32).to(torch.uint8)
    scale[(scale & 127) == 127] = 0
    dense = ops.dequantize_nvfp4(packed, scale, torch.tensor(1.0), dtype=torch.float32)
    given = packed.cuda(), scale.cuda(), torch.ones(1).cuda()
    for m in (1, 8, 33, 64, 200):
        at = torch.arange(m) * 7 % 512
        x = torch.eye(512)[at].bfloat16().cuda()
        y = ops.nvfp4_linear(x, *given, backend="humming").cpu()
        expected = dense.bfloat16().T[at]
        wrong = (y != expected).nonzero()
        assert not len(wrong), f"{m} rows: {len(wrong)} wrong, first at {wrong[0].tolist()}"


def test_in_graphs() -> None:
    """Compiled code, and CUDA graphs whose inputs change; a weight that is written to."""
    random = np.random.default_rng(1)
    w = on_gpu(matrix(random, 768, 512))
    scale_2, bias = torch.tensor(0.5).cuda(), normal(random, torch.bfloat16, 768).cuda()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for m in (1, 16, 200):
        x = normal(random, torch.bfloat16, m, 512).cuda()
        own = ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias)
        check(f"compiled, {m} rows", compiled(x, w, scale_2, bias), own, 8e-3)
        graph, y = captured(lambda: linear(x, w, scale_2, bias))  # noqa: B023
        for _ in range(3):
            x.copy_(normal(random, torch.bfloat16, m, 512))
            poison(y)
            graph.replay()
            own = ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias)
            check(f"replay, {m} rows", y, own, 8e-3)
    w.packed.copy_(w.packed.flip(0))
    linear(x, w, scale_2, bias)
    graph.replay()
    own = ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias)
    check("replay after a write", y, own, 8e-3)
    other = w._replace(packed=w.packed.clone())
    with pytest.raises(KernelError, match="while a CUDA graph is captured"):
        captured(lambda: linear(x, other, scale_2, bias))


def test_the_same_each_time(deterministic: None) -> None:
    random = np.random.default_rng(2)
    w = on_gpu(matrix(random, 1024, 4096))
    x = normal(random, torch.bfloat16, 128, 4096).cuda()
    for m in (1, 8, 32, 128):
        y = linear(x[:m], w, 0.5)
        assert all(torch.equal(linear(x[:m], w, 0.5), y) for _ in range(10)), m
        check(f"{m} rows", y, ops.nvfp4_linear(x[:m], w.packed, w.scale, 0.5), 6e-3)


def test_gradients_and_streams() -> None:
    random = np.random.default_rng(3)
    w = on_gpu(matrix(random, 256, 512))
    x = normal(random, torch.bfloat16, 5, 512).cuda().requires_grad_()
    y = linear(x, w, 0.5)
    c = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, c)
    (expected,) = torch.autograd.grad(ops.nvfp4_linear(x, w.packed, w.scale, 0.5), x, c)
    assert torch.equal(found, expected)
    x = x.detach()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    ys = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                ys.append(linear(x, w, 0.5))
    torch.cuda.synchronize()
    for one in ys:
        check("streams", one, y.detach(), 8e-3)


# -- mixtures -------------------------------------------------------------------------------------


def mixture(random: Any, e: int, h: int, i: int) -> Any:
    of = experts_of(random, "nvfp4", e, h, i)
    return of._replace(second13=of.second13[:, :1].repeat(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 512, 128, 16, 4), (8, 256, 96, 32, 8), (40, 272, 80, 5, 3), (500, 128, 64, 3, 2)],
    ids=str,
)  # fmt: skip
def test_experts(dtype: Any, sizes: Any) -> None:
    m, h, i, e, k = sizes
    random = np.random.default_rng(m)
    of = mixture(random, e, h, i)
    ids = torch.tensor(random.integers(-1, e + 1, (m, k)))
    ids[: m // 3] = 1  # one that is busy, and twice for a token
    x, weights = normal(random, dtype, m, h), torch.tensor(random.random((m, k))).float()
    place = torch.tensor(random.integers(-1, e, e + 2), dtype=torch.int32)
    matrices = [a.cuda() for a in of.given]
    for places, on_input, activation in (
        (None, False, "silu"), (place, False, "gelu_tanh"), (None, True, "silu"),
    ):  # fmt: skip
        on = None if places is None else places.cuda()
        y = moe(x.cuda(), weights.cuda(), ids.cuda(), *matrices, on, activation, on_input)
        expected, _ = layer_of(of, x, weights, ids, places, activation, on_input)
        if expected.any():
            check(f"{activation}, {on_input}", y, expected, 2 * limit_of(dtype))
        else:
            assert not y.any()


def test_experts_as_qwen3_has_them() -> None:
    """128 experts, of which 8 are taken; also compiled, and in CUDA graphs of other ids."""
    random = np.random.default_rng(4)
    e, h, i, k = 128, 512, 256, 8
    of = mixture(random, e, h, i)
    matrices = [a.cuda() for a in of.given]
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for m in (1, 8, 64, 1000):
        x = normal(random, torch.bfloat16, m, h).cuda()
        weights, ids = torch.rand(m, e).cuda().softmax(1).topk(k)
        given = x, weights, ids, *matrices
        own = ops.nvfp4_moe(*given)
        check(f"{m} tokens", moe(*given), own, 1.5e-2)
        check(f"compiled, {m} tokens", compiled(*given), own, 1.5e-2)
        graph, y = captured(lambda: moe(*given))  # noqa: B023
        for high in (e, e, 4):
            ids.copy_(torch.tensor(random.integers(-1, high, (m, k))))
            poison(y)
            graph.replay()
            check(f"replay, {m} tokens, {high} experts", y, ops.nvfp4_moe(*given), 1.5e-2)
        ids.fill_(-1)
        poison(y)
        graph.replay()
        assert not y.any(), f"{m} tokens without an expert"


def test_experts_deterministic(deterministic: None) -> None:
    random = np.random.default_rng(5)
    matrices = [a.cuda() for a in mixture(random, 8, 512, 256).given]
    for m in (1, 16):
        x = normal(random, torch.bfloat16, m, 512).cuda()
        weights, ids = torch.rand(m, 8).cuda().topk(2)
        y = moe(x, weights, ids, *matrices)
        assert all(torch.equal(moe(x, weights, ids, *matrices), y) for _ in range(10)), m
        check(f"{m} tokens", y, ops.nvfp4_moe(x, weights, ids, *matrices), 1.5e-2)


# -- weights in the kernels' order ----------------------------------------------------------------


def prepared(layer: Any, random: Any) -> tuple[Any, dict[str, Any]]:
    """A layer with any bytes, and those, as they were before it was prepared."""
    any_bytes(random, layer)
    given = {name: value.cpu().clone() for name, value in layer.state_dict().items()}
    layer.backend = "humming"
    return layer.prepare(), given


@pytest.mark.parametrize("sizes", [(512, 1024), (136, 48), (2880, 4112), (8, 16)], ids=str)
def test_prepared_layers_give_back_every_byte(sizes: Any) -> None:
    random, (n, k) = np.random.default_rng(6), sizes
    for layer in (
        nvfp4.NVFP4Linear(k, n, device="cuda"), nvfp4.NVFP4Experts(3, n * 2, k, device="cuda")
    ):  # fmt: skip
        layer, given = prepared(layer, random)
        for found in (layer.state_dict(), layer.cpu().state_dict(), layer.cuda().state_dict()):
            for name, value in found.items():
                a, b = (x.cpu().flatten().view(torch.uint8) for x in (value, given[name]))
                assert torch.equal(a, b), name


def test_prepared_weights_are_there_once() -> None:
    small = nvfp4.NVFP4Linear(2048, 128, device="cuda")
    small.backend = "humming"
    small.prepare()  # what is made once for all layers
    n, k = 16384, 8192
    layer, size = nvfp4.NVFP4Linear(k, n, bias=False, device="cuda"), n * k * 9 // 16
    layer.backend = "humming"
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.prepare()
    assert torch.cuda.memory_allocated() <= before + 4096
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.3 * size + 64 * 2**20, peak / size  # the package copies scales meanwhile
    torch.cuda.reset_peak_memory_stats()
    state = layer.state_dict()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= size + 64 * 2**20 and not state["w_packed"].any(), peak / size


def test_prepared_products(deterministic: None) -> None:
    random = np.random.default_rng(7)
    n, k = 4096, 2048
    plain = torch.nn.Linear(k, n, device="cuda").bfloat16()
    layer, one = (nvfp4.NVFP4Linear.from_linear(plain) for _ in range(2))
    layer.backend = one.backend = "humming"
    x = normal(random, torch.bfloat16, 4, k).cuda()
    expected = layer(x)
    assert torch.equal(one.prepare()(x), expected)
    graph, y = captured(lambda: one(x))
    poison(y)
    graph.replay()
    assert torch.equal(y, expected)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    leaf, c = x.clone().requires_grad_(), torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(layer(leaf), leaf, c)
    (found,) = torch.autograd.grad(one(leaf), leaf, c)
    assert torch.equal(found, wanted)
    graph, found = captured(lambda: torch.autograd.grad(one(leaf), leaf, c)[0])
    poison(found)
    graph.replay()
    assert torch.equal(found, wanted)


def test_prepared_mixtures(deterministic: None) -> None:
    random = np.random.default_rng(8)
    of = mixture(random, 16, 256, 128)
    names = "w13_packed", "w13_scale", "w13_scale_2", "w2_packed", "w2_scale", "w2_scale_2"
    tensors = {name: a.cuda() for name, a in zip(names, of.given, strict=True)}
    layer = nvfp4.NVFP4Experts.from_tensors(**tensors)
    layer.backend = "humming"
    x, weights = normal(random, torch.bfloat16, 9, 256).cuda(), torch.rand(9, 4).cuda()
    ids = torch.tensor(random.integers(-1, 17, (9, 4))).cuda()
    expected = layer(x, ids, weights)
    layer.prepare()
    assert torch.equal(layer(x, ids, weights), expected)
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    c = torch.randn_like(expected)
    found = torch.autograd.grad(layer(leaves[0], ids, leaves[1]), leaves, c)
    layer.backend = None
    wanted = torch.autograd.grad(layer.prepare()(leaves[0], ids, leaves[1]), leaves, c)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)
