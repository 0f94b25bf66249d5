"""`backend="humming"`: with a stand-in for the package, on the CPU."""

from __future__ import annotations

import copy
import io
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ferrule import KernelError, ops
from ferrule.ops import nvfp4
from ferrule.ops.nvfp4 import humming, humming_order
from ferrule.ops.nvfp4.linear import linear_op
from humming_stand_in import Humming
from nvfp4_arrays import any_bytes, exact, experts_of, layer_of, matrix, normal

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")]
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
DTYPES = [torch.bfloat16, torch.float16]
PACKAGE = Humming()  # one, as ops keep what it compiled


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Humming:
    """The stand-in, in the package's place, on a CPU that is taken for a GPU."""
    PACKAGE.launches.clear()
    PACKAGE.repacked = 0
    for name, module in PACKAGE.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "humming", PACKAGE.ops, raising=False)
    monkeypatch.setattr(humming, "on_cpu", lambda x: False)
    monkeypatch.setattr(humming, "_capability", lambda device: (9, 0))
    return PACKAGE


def linear(x: Any, w: Any, scale_2: Any = 0.5, bias: Any = None, **more: Any) -> Any:
    return ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias, backend="humming", **more)


def moe(*given: Any) -> Any:
    return ops.nvfp4_moe(*given, backend="humming")


def close(y: Any, expected: Any, steps: int = 1) -> None:
    near = steps * (2.0**-7 if y.dtype == torch.bfloat16 else 2.0**-10)
    limit = near * (float(expected.abs().max()) if expected.numel() else 0.0)
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=near, atol=limit)


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(136, 48), (128, 32), (8, 16), (256, 352)], ids=str)
def test_products(package: Humming, dtype: torch.dtype, sizes: Any) -> None:
    """Of matrices that are padded, or not; a second scale may be another array in each call."""
    random = np.random.default_rng(0)
    w, bias = matrix(random, *sizes), normal(random, dtype, sizes[0])
    for lead in ((), (1,), (3,), (2, 5), (0,), (2, 0)):
        x = normal(random, dtype, *lead, sizes[1])
        expected = torch.tensor(exact(x) @ w.values.T / 2)
        for scale_2 in (0.5, torch.tensor(0.5), torch.tensor([9, 0.5])[1:]):
            y = linear(x, w, scale_2)
            assert y.dtype == dtype and y.shape == (*lead, sizes[0])
            close(y, expected)
            close(linear(x, w, scale_2, bias), expected + bias.double(), 2)
    assert package.repacked == 1


def test_products_of_nothing(package: Humming) -> None:
    random = np.random.default_rng(1)
    x, bias = torch.ones(3, 0).bfloat16(), normal(random, torch.bfloat16, 8)
    assert not linear(x, matrix(random, 8, 0)).any()
    assert torch.equal(linear(x, matrix(random, 8, 0), 0.5, bias), bias.expand(3, 8))
    assert linear(torch.ones(3, 32).half(), matrix(random, 0, 32)).shape == (3, 0)
    assert not package.launches


def test_a_kernel_for_each_power_of_two(package: Humming) -> None:
    random = np.random.default_rng(2)
    w, before = matrix(random, 24, 64), len(package.compiled)
    asked: list[int] = []
    tune = package.tune
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["humming.tune"]
        patch.setattr(
            module, "get_heuristics_config",
            lambda layer, shape_m, **more: asked.append(shape_m) or tune(layer, shape_m, **more),
        )  # fmt: skip
        for m in (1, 3, 4, 5, 128, 100, 129, 256, 2, 1, 0):
            linear(normal(random, torch.bfloat16, m, 64), w)
    assert asked == [1, 4, 8, 128, 256, 2]
    assert len(package.compiled) == before + 1  # they are alike here
    assert [rows for _, rows in package.launches] == [1, 3, 4, 5, 128, 100, 129, 256, 2, 1]


def test_rows_anywhere(package: Humming) -> None:
    """Strided, and at any address; matrices, too."""
    random = np.random.default_rng(3)
    w, x = matrix(random, 16, 64), normal(random, torch.bfloat16, 4, 64)
    expected = linear(x, w)
    wide = torch.zeros(4, 70).bfloat16()
    wide[:, 3:67] = x
    assert torch.equal(linear(wide[:, 3:67], w), expected)
    assert torch.equal(linear(x.T.contiguous().T, w), expected)
    memory = torch.zeros(x.numel() + 1).bfloat16()
    memory[1:] = x.flatten()
    assert torch.equal(linear(memory[1:].view(4, 64), w), expected)
    bytes_of = torch.zeros(w.packed.numel() + 3, dtype=torch.uint8)
    bytes_of[3:] = w.packed.flatten()
    other = w._replace(packed=bytes_of[3:].view(16, 32), scale=w.scale.view(torch.uint8))
    assert torch.equal(linear(x, other), expected)


def test_prepared_once_and_anew(package: Humming) -> None:
    """As long as weights stay as they are, in graphs, too; both dtypes share what is made."""
    random = np.random.default_rng(4)
    w, x = matrix(random, 32, 32), normal(random, torch.bfloat16, 2, 32)
    linear(x, w)
    compiled = torch.compile(lambda x: linear(x, w), fullgraph=True, backend="aot_eager")
    y = compiled(x)
    linear(x.half(), w)
    assert package.repacked == 1
    assert torch.equal(y, linear(x, w))
    w.packed.copy_(w.packed.flip(0))
    w.scale.view(torch.uint8).copy_(w.scale.view(torch.uint8).flip(0))
    assert torch.equal(compiled(x), y.flip(-1))
    assert package.repacked == 2


def test_what_torch_wants_deterministic(package: Humming) -> None:
    random = np.random.default_rng(5)
    w, x = matrix(random, 40, 32), normal(random, torch.bfloat16, 2, 32)
    linear(x, w)
    torch.use_deterministic_algorithms(True)
    try:
        linear(x, w)
        torch.compile(lambda x: linear(x, w), fullgraph=True, backend="aot_eager")(x)
    finally:
        torch.use_deterministic_algorithms(False)
    invariant = [config["use_batch_invariant"] for config, _ in package.launches]
    assert invariant == [False, True, True]
    assert not package.launches[1][0]["use_stream_k"] and package.repacked == 1


def test_gradients(package: Humming) -> None:
    """They are those of the other backends."""
    random = np.random.default_rng(6)
    w = matrix(random, 16, 32)
    given = [normal(random, torch.bfloat16, *s).requires_grad_() for s in ((3, 32), (16,))]
    c = normal(random, torch.bfloat16, 3, 16)
    scale = torch.tensor(0.25)
    found = torch.autograd.grad(linear(given[0], w, scale, given[1]), given, c)
    y = ops.nvfp4_linear(given[0], w.packed, w.scale, scale, given[1])
    for a, b in zip(found, torch.autograd.grad(y, given, c), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(KernelError, match="no derivative with respect to 'w_scale_2'"):
        torch.autograd.grad(linear(given[0], w, scale.requires_grad_()).sum(), scale)


@needs_gloo
def test_dtensors(package: Humming) -> None:
    """A backend is kept for parts, with a bias, too, and by layers that are sharded."""
    random = np.random.default_rng(7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = init_device_mesh("cpu", (1,))
        w, bias = matrix(random, 16, 32), normal(random, torch.bfloat16, 16)
        x, scale_2 = normal(random, torch.bfloat16, 3, 32), torch.ones(1)
        parts = [DTensor.from_local(a, mesh, [Shard(1)]) for a in (x, w.packed, w.scale)]
        others = [DTensor.from_local(a, mesh, [Replicate()]) for a in (scale_2, bias)]
        y = ops.nvfp4_linear(*parts, *others, backend="humming")
        close(y.full_tensor(), linear(x, w, scale_2, bias), 2)
        assert len(package.launches) == 2

        layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 16).bfloat16())
        experts = nvfp4.NVFP4Experts(2, 32, 16)
        given = x, torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
        for module, style, values, launches in (
            (layer, nvfp4.NVFP4RowwiseParallel(input_layouts=Replicate()), (x,), 1),
            (experts, nvfp4.NVFP4ExpertsParallel(), given, 2),
        ):
            package.launches.clear()
            module.backend = "humming"
            parallelize_module(module, mesh, style)(*values)
            assert len(package.launches) == launches
        package.launches.clear()
        experts = nvfp4.NVFP4Experts(2, 32, 16)
        experts.backend = "humming"
        for capacity in (None, 4):
            nvfp4.expert_parallel(experts, None, capacity)(*given)
        assert len(package.launches) == 4
    finally:
        dist.destroy_process_group()


def test_layers(package: Humming) -> None:
    layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 16).bfloat16())
    x = torch.randn(3, 32).bfloat16()
    y = layer(x).detach()
    layer.backend = "humming"
    close(layer(x).detach(), y, 2)
    assert len(package.launches) == 1 and "backend" not in "".join(layer.state_dict())


# -- mixtures -------------------------------------------------------------------------------------


def mixture(random: Any, e: int, h: int, i: int) -> Any:
    of = experts_of(random, "nvfp4", e, h, i)
    return of._replace(second13=of.second13[:, :1].repeat(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 64, 48, 5, 2), (7, 32, 16, 3, 3), (40, 48, 32, 9, 4), (5, 32, 32, 1, 1)], ids=str
)
def test_any_routing(package: Humming, dtype: torch.dtype, sizes: Any) -> None:
    m, h, i, e, k = sizes
    random = np.random.default_rng(m)
    of = mixture(random, e, h, i)
    ids = torch.tensor(random.integers(-1, e + 1, (m, k)))
    ids[: m // 3] = 0  # one that is busy, and twice for a token
    x, weights = normal(random, dtype, m, h), torch.tensor(random.random((m, k))).float()
    for mapped, on_input, activation, second in (
        (False, False, "silu", of.second13), (True, False, "gelu_tanh", of.second13[:, :1]),
        (False, True, "silu", of.second13[:, 0]),
    ):  # fmt: skip
        places = torch.tensor(random.integers(-1, e, e + 2), dtype=torch.int32) if mapped else None
        matrices = [*of.given[:2], second, *of.given[3:]]
        y = moe(x, weights, ids, *matrices, places, activation, on_input)
        assert y.dtype == dtype
        expected, _ = layer_of(of, x, weights, ids, places, activation, on_input)
        close(y, torch.tensor(expected), 4)
        y32 = moe(x, weights.to(dtype), ids.int(), *matrices, places, activation, on_input)
        close(y32, y, 4)
    assert package.repacked == 3  # w13 of each shape of its second scale
    assert len(package.launches) == 12


def test_tokens_anywhere(package: Humming) -> None:
    """Strided, and at any address; weights of other dtypes; ids behind all experts."""
    random = np.random.default_rng(14)
    of = mixture(random, 3, 32, 16)
    x, weights = normal(random, torch.half, 4, 32), torch.rand(4, 2).half()
    ids = torch.tensor([[0, 2], [2, 2**31 - 1], [-5, 1], [1, 1]])
    expected = moe(x, weights, ids, *of.given)
    memory = torch.zeros(129).half()
    memory[1:] = x.flatten()
    for other in (x.T.contiguous().T, memory[1:].view(4, 32)):
        assert torch.equal(moe(other, weights.double(), ids.int(), *of.given), expected)
    assert torch.equal(moe(x, weights.T.contiguous().T, ids, *of.given), expected)


def test_no_slots(package: Humming) -> None:
    """No tokens, no experts for them, or none at all; what names no expert adds nothing."""
    random = np.random.default_rng(7)
    given = mixture(random, 3, 32, 16).given
    x, weights, ids = torch.ones(4, 32).half(), torch.ones(4, 2), torch.full((4, 2), -1)
    assert moe(x[:0], weights[:0], ids[:0], *given).shape == (0, 32)
    assert not moe(x, weights[:, :0], ids[:, :0], *given).any()
    assert not package.launches
    assert not moe(x, weights, ids, *given).any()
    ids[1, 1] = 2
    y = moe(x, weights, ids, *given)
    assert y[1].any() and not y[[0, 2, 3]].any()
    none = [a[:0] for a in given]
    assert not moe(x, weights, ids, *none).any()


def test_mixtures_in_graphs_and_gradients(package: Humming) -> None:
    random = np.random.default_rng(8)
    of = mixture(random, 4, 32, 16)
    ids = torch.tensor(random.integers(-1, 4, (5, 2)))
    x = normal(random, torch.bfloat16, 5, 32).requires_grad_()
    weights = torch.rand(5, 2, requires_grad=True)
    y = moe(x, weights, ids, *of.given)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights, ids, *of.given), y)
    assert package.repacked == 2
    c = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weights), c)
    other = ops.nvfp4_moe(x, weights, ids, *of.given)
    for a, b in zip(found, torch.autograd.grad(other, (x, weights), c), strict=True):
        assert torch.equal(a, b)


def test_layers_of_experts(package: Humming) -> None:
    of = mixture(np.random.default_rng(9), 4, 32, 16)
    names = "w13_packed", "w13_scale", "w13_scale_2", "w2_packed", "w2_scale", "w2_scale_2"
    layer = nvfp4.NVFP4Experts.from_tensors(**dict(zip(names, of.given, strict=True)))
    given = torch.randn(3, 32).bfloat16(), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    y = layer(*given)
    layer.backend = "humming"
    close(layer(*given), y, 4)
    assert len(package.launches) == 2


# -- what is refused ------------------------------------------------------------------------------


def test_second_scales_that_differ(package: Humming) -> None:
    random = np.random.default_rng(10)
    of = mixture(random, 3, 32, 16)
    of.second13[2, 1] *= 2
    given = torch.ones(1, 32).half(), torch.ones(1, 1), torch.zeros(1, 1).long(), *of.given
    with pytest.raises(KernelError, match=r"expert 2 have different second scales in w13_scale_2"):
        moe(*given)
    with pytest.raises(KernelError, match=r"w_scale_2 has a scale for each row; expected one"):
        linear(torch.ones(1, 32).half(), matrix(random, 16, 32), torch.ones(16))


def test_arrays_that_do_not_fit(package: Humming) -> None:
    random = np.random.default_rng(11)
    w, of = matrix(random, 16, 32), mixture(random, 3, 32, 16)
    with pytest.raises(KernelError, match=r"x is of float32; expected bfloat16 or float16\. Cast"):
        linear(torch.ones(1, 32), w)
    given = torch.ones(1, 32), torch.ones(1, 1), torch.zeros(1, 1).long(), *of.given
    with pytest.raises(KernelError, match=r"^\[nvfp4_moe\] .* hidden_states is of float32"):
        moe(*given)
    with pytest.raises(KernelError, match=r"the matrix has 12 rows; expected a multiple of 8"):
        linear(torch.ones(1, 32).half(), matrix(random, 12, 32))
    with pytest.raises(KernelError, match=r"x is an array of numpy; expected torch's tensors"):
        linear(np.ones((1, 32), np.float16), w)
    with pytest.raises(KernelError, match=r"x is .*\(1, 16\).*K = 32 by w_packed"):
        linear(torch.ones(1, 16).half(), w)
    with pytest.raises(KernelError, match="expected None or one of 'packed', 'dequantize', 'refer"):
        ops.mxfp4_linear(torch.ones(1, 32), w.packed, w.scale, backend="humming")
    with pytest.raises(KernelError, match=r"\[mxfp4_moe\] backend='humming'; expected None or one"):
        ops.mxfp4_moe(*given[:3], *[given[n] for n in (3, 4, 6, 7)], backend="humming")


def test_other_devices_and_no_package(monkeypatch: pytest.MonkeyPatch, package: Humming) -> None:
    random = np.random.default_rng(12)
    w, x = matrix(random, 48, 32), torch.ones(1, 32).half()
    given = x, torch.ones(1, 1), torch.zeros(1, 1).long(), *mixture(random, 3, 32, 16).given
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "humming", None)
        patch.setitem(sys.modules, "humming.transform", None)
        for call in (lambda: linear(x, w), lambda: moe(*given)):
            with pytest.raises(KernelError, match=r"pip install 'ferrule\[humming\]', or leave"):
                call()
    with monkeypatch.context() as patch:
        patch.setattr(humming, "_capability", lambda device: (8, 0))
        for call in (lambda: linear(x, w), lambda: moe(*given)):
            with pytest.raises(KernelError, match=r"the compute capability 8\.0; expected 9\.0"):
                call()
    monkeypatch.undo()
    with pytest.raises(KernelError, match="x is on a processor; expected torch's tensors on an NV"):
        linear(x, w)
    assert not package.repacked and not package.launches


def test_the_ops_are_checked_by_torch(package: Humming) -> None:
    random = np.random.default_rng(13)
    w = matrix(random, 56, 32)
    x = normal(random, torch.bfloat16, 3, 32).requires_grad_()
    op = linear_op("nvfp4", False, False, "humming", False)
    torch.library.opcheck(op.torch_op, (x, w.packed, w.scale.view(torch.uint8), torch.ones(1)))


# -- weights in the kernels' order, in the place of a checkpoint's bytes --------------------------


def bytes_of(module: torch.nn.Module) -> int:
    return sum(x.nbytes for x in (*module.buffers(), *module.parameters()))


def same(found: Any, expected: Any) -> bool:
    assert list(found) == list(expected)
    return all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(found.values(), expected.values(), strict=True)
    )


class Memory(TorchDispatchMode):
    """How many bytes the storages have at most that are made, or looked at.

    Attributes:
        most: that number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now, self.most = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        at, size = storage.data_ptr(), storage.nbytes()
        if at in self._seen or not size:
            return
        self._seen.add(at)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._freed, at, size)

    def _freed(self, at: int, size: int) -> None:
        self._seen.discard(at)
        self._now -= size


LAYERS = [
    lambda: nvfp4.NVFP4Linear(48, 136),
    lambda: nvfp4.NVFP4Linear(352, 256, bias=False),
    lambda: nvfp4.NVFP4Linear(32, 8),
    lambda: nvfp4.NVFP4Experts(3, 48, 144),
]


@pytest.mark.parametrize("make", LAYERS)
def test_prepared_layers_give_back_every_byte(package: Humming, make: Any) -> None:
    random = np.random.default_rng(15)
    layer = make()
    any_bytes(random, layer)
    given = {name: value.clone() for name, value in layer.state_dict().items()}
    weak = [weakref.ref(layer.get_buffer(name)) for name in given if name.endswith("_packed")]
    layer.backend = "humming"
    assert layer.prepare() is layer and layer.prepared
    assert not any(ref() is not None for ref in weak)  # they are there once
    assert not any(name.endswith("_packed") for name, _ in layer.named_buffers())
    assert same(layer.state_dict(), given)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stream, weights_only=False)):
        assert not other.prepared and same(other.state_dict(), given)
    assert layer.prepared
    cast = layer.to(torch.half).state_dict()
    assert same({**cast, **{k: v for k, v in given.items() if k == "bias"}}, given)
    layer.to(torch.float32)
    layer.backend = None
    assert not layer.prepare().prepared and same(layer.state_dict(), given)
    assert same(dict(layer.named_buffers()), {k: v for k, v in given.items() if k != "bias"})


def test_prepared_layers_are_as_large(package: Humming) -> None:
    layer = nvfp4.NVFP4Linear(64, 256)
    experts = nvfp4.NVFP4Experts(2, 128, 64)
    before = bytes_of(layer), bytes_of(experts)
    for module in (layer, experts):
        module.backend = "humming"
        module.prepare()
    assert (bytes_of(layer), bytes_of(experts)) == before


def test_products_of_prepared_layers(package: Humming) -> None:
    """They are those of a copy beside, in graphs, too, and so are gradients."""
    random = np.random.default_rng(16)
    layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(48, 136).bfloat16())
    layer.backend = "humming"
    x = normal(random, torch.bfloat16, 3, 48).requires_grad_()
    y = layer(x)
    c = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, layer.bias), c)
    repacked = package.repacked
    layer.prepare()
    repacked, made = package.repacked, repacked
    assert repacked > made
    assert torch.equal(layer(x), y)
    assert layer(x[None]).shape == (1, 3, 136) and layer(x[:0]).shape == (0, 136)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for of in (layer, compiled):
        found = torch.autograd.grad(of(x), (x, layer.bias), c)
        assert all(map(torch.equal, found, expected))
    assert torch.equal(compiled(x[:2]), y[:2])
    assert package.repacked == repacked  # weights are in order once


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_prepared_mixtures(package: Humming, activation: str) -> None:
    of = mixture(np.random.default_rng(17), 4, 32, 16)
    names = "w13_packed", "w13_scale", "w13_scale_2", "w2_packed", "w2_scale", "w2_scale_2"
    tensors = dict(zip(names, of.given, strict=True))
    for second in (tensors["w13_scale_2"], tensors["w13_scale_2"][:, 0]):
        layer = nvfp4.NVFP4Experts.from_tensors(activation, **{**tensors, names[2]: second})
        layer.backend = "humming"
        x, weights = torch.randn(5, 32).bfloat16(), torch.rand(5, 2)
        ids = torch.tensor([[0, 1], [3, 3], [-1, 2], [2, 9], [1, 0]])
        leaves = x.requires_grad_(), weights.requires_grad_()
        y = layer(x, ids, weights)
        expected = torch.autograd.grad(y.float().square().sum(), leaves)
        layer.prepare()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (layer, compiled):
            made = call(x, ids, weights)
            assert torch.equal(made, y)
            found = torch.autograd.grad(made.float().square().sum(), leaves)
            assert all(map(torch.equal, found, expected))


def test_prepared_layers_take_other_weights(package: Humming) -> None:
    one, other = (
        nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 16).bfloat16()) for _ in range(2)
    )
    x = torch.randn(3, 32).bfloat16()
    expected = other(x).detach()
    one.backend = "humming"
    one.prepare().load_state_dict(other.state_dict())
    assert one.prepared and same(one.state_dict(), other.state_dict())
    close(one(x).detach(), expected, 2)
    rows = {**other.state_dict(), "w_scale_2": torch.ones(16)}
    with pytest.raises(RuntimeError, match=r"w_scale_2 has a scale for each row; expected one"):
        one.load_state_dict(rows)
    assert not one.prepared and same(one.state_dict(), rows)
    one.load_state_dict({"bias": torch.zeros(16)}, strict=False)
    assert not one.state_dict()["bias"].any()


def test_refreshed_copies(package: Humming) -> None:
    """Writes through ``.data`` tell nobody."""
    random = np.random.default_rng(18)
    layer = nvfp4.NVFP4Linear(32, 16, bias=False)
    layer.backend = "humming"
    x = normal(random, torch.bfloat16, 2, 32)
    assert not layer(x).any()
    of = matrix(random, 16, 32)
    layer.w_packed.data[:] = of.packed
    layer.w_scale.data.view(torch.uint8)[:] = of.scale.view(torch.uint8)
    assert not layer(x).any()
    layer.refresh()
    close(layer(x), torch.tensor(exact(x) @ of.values.T))
    experts = nvfp4.NVFP4Experts(2, 32, 16)
    experts.backend = "humming"
    experts.refresh()


def test_what_cannot_be_prepared(package: Humming, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is refused is as it was."""
    plain = nvfp4.NVFP4Linear(32, 16)
    assert plain.prepare() is plain and not plain.prepared
    odd = nvfp4.NVFP4Linear(32, 12)
    rows = nvfp4.NVFP4Linear(32, 16)
    rows.w_scale_2 = torch.ones(16)
    halves = nvfp4.NVFP4Experts(2, 32, 16)
    halves.w13_scale_2[1, 1] = 3
    for layer, text in (
        (odd, "the matrix has 12 rows; expected a multiple of 8"),
        (rows, "w_scale_2 has a scale for each row"),
        (halves, "gate and up of expert 1 have different second scales"),
    ):
        before, layer.backend = layer.state_dict(), "humming"
        with pytest.raises(KernelError, match=text):
            layer.prepare()
        assert not layer.prepared and same(layer.state_dict(), before)
    layer = nvfp4.NVFP4Linear(32, 16, dtype=torch.half)
    layer.backend = "humming"
    layer.prepare()
    layer.backend = None
    with pytest.raises(KernelError, match=r"the weights are in the order of 'humming'.*prepare"):
        layer(torch.ones(1, 32).half())
    layer.backend = "humming"
    with pytest.raises(KernelError, match=r"x is of float32; expected bfloat16 or float16"):
        layer(torch.ones(1, 32))
    with pytest.raises(KernelError, match=r"x is .*\(1, 16\).*K = 32 by w_packed"):
        layer(torch.ones(1, 16).half())
    with pytest.raises(KernelError, match=r"w_packed is set, but the weights are in the order"):
        layer.w_packed = torch.zeros(16, 16, dtype=torch.uint8)
    experts = nvfp4.NVFP4Experts(2, 32, 16)
    any_bytes(np.random.default_rng(19), experts)
    before, experts.backend = experts.state_dict(), "humming"
    transform = package.transform

    def unlike(of: Any, tensors: Any) -> Any:  # of the second matrix
        made = transform(of, tensors)
        return {**made, "weight": made["weight"] ^ 1} if of.k == 16 else made

    kept = nvfp4.NVFP4Experts(2, 32, 16)
    kept.backend = "humming"
    kept.prepare()
    with pytest.raises(KernelError, match=r"the weights are in the order of a backend's kernels"):
        nvfp4.expert_parallel(kept, SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    style = nvfp4.NVFP4ExpertsParallel()
    with pytest.raises(KernelError, match=r"the weights are in the order of a backend's kernels"):
        style._apply(kept, SimpleNamespace(ndim=1, size=lambda: 1))
    call = torch.ones(3, 32).half(), torch.zeros(3, 2).long(), torch.ones(3, 2)
    with pytest.raises(KernelError, match=r"topk_ids and topk_weights look swapped"):
        kept(call[0], call[2], call[1])
    kept.w13_scale_2[1, 1] = 3
    with pytest.raises(KernelError, match=r"gate and up of expert 1 have different second scales"):
        kept(*call)
    layer.w_scale_2 = torch.ones(16)
    with pytest.raises(KernelError, match=r"w_scale_2"):
        layer(torch.ones(1, 32).half())
    part = nvfp4.NVFP4ParallelExperts(2, 32, 16)
    part.backend = "humming"
    with pytest.raises(KernelError, match=r"the layer has a part of the weights; expected a whole"):
        part.prepare()
    module = sys.modules["humming.transform"]
    monkeypatch.setattr(module, "transform_humming_tensors", unlike)
    with pytest.raises(KernelError, match=r"order of a matrix of 32 rows of 16 elements could not"):
        experts.prepare()
    assert not experts.prepared and same(experts.state_dict(), before)
    monkeypatch.undo()
    with pytest.raises(KernelError, match=r"on cpu, which is no NVIDIA GPU; expected 9\.0"):
        experts.prepare()
    assert same(experts.state_dict(), before)


def test_memory_that_runs_out(package: Humming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, wherever that is."""
    experts = nvfp4.NVFP4Experts(2, 48, 144)
    any_bytes(np.random.default_rng(20), experts)
    given, experts.backend = {k: v.clone() for k, v in experts.state_dict().items()}, "humming"
    ordered, put_back = humming_order.ordered, humming_order.put_back

    def fails(function: Any, after: int) -> Any:
        calls: list[Any] = []

        def run(*args: Any) -> Any:
            calls.append(args)
            if len(calls) > after:
                raise torch.OutOfMemoryError("none is left")
            return function(*args)

        return run

    for failing, first in ((ordered, 0), (ordered, 1), (put_back, 0), (put_back, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(humming_order, failing.__name__, fails(failing, first))
            if failing is ordered:
                patch.setattr(humming_order, "put_back", fails(put_back, 0))
                with pytest.raises(torch.OutOfMemoryError):
                    experts.prepare()
            else:
                experts.prepare()
                with pytest.raises(torch.OutOfMemoryError):
                    experts.state_dict()
                experts.backend = None
                with pytest.raises(torch.OutOfMemoryError):
                    experts.prepare()
        assert same(experts.state_dict(), given)
        experts.backend = None
        assert not experts.prepare().prepared and same(experts.state_dict(), given)
        experts.backend = "humming"
    assert experts.prepare().prepared and same(experts.state_dict(), given)


def test_state_dicts_while_others_call(package: Humming) -> None:
    """The layer is not changed by them; users' buffers are theirs, whatever their names."""
    layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(48, 136).bfloat16())
    layer.register_buffer("tokens_in_order", torch.ones(2))
    layer.register_buffer("more", torch.ones(1))
    given, layer.backend = layer.state_dict(), "humming"
    layer.prepare()
    buffers, x = dict(layer.named_buffers()), torch.randn(2, 48).bfloat16()
    y = layer(x).detach()
    stop = threading.Event()

    def states() -> int:
        count = 0
        while not stop.is_set():
            assert same(layer.state_dict(prefix="a."), {f"a.{k}": v for k, v in given.items()})
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        counts = [pool.submit(states) for _ in range(2)]
        for _ in range(100):
            assert torch.equal(layer(x).detach(), y)
        stop.set()
        assert all(count.result() for count in counts)
    assert dict(layer.named_buffers()).keys() == buffers.keys()


def test_what_prepared_layers_take_in(package: Humming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is loaded only weights are put in order; in inference mode, too; nothing of
    nothing."""
    layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 16).bfloat16())
    layer.backend, state = "humming", layer.state_dict()
    with torch.inference_mode():
        layer.prepare()
    x = torch.randn(3, 32).bfloat16().requires_grad_()
    layer(x).sum().backward()
    repacked = package.repacked
    layer.load_state_dict({"bias": torch.ones(16)}, strict=False)
    assert layer.prepared and package.repacked == repacked
    layer.load_state_dict(state)
    assert layer.prepared and package.repacked == repacked + 1
    layer.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    assert layer.prepared and same(layer.state_dict(), state)
    none = nvfp4.NVFP4Linear(16, 0, bias=False)
    none.backend = "humming"
    assert not none.prepare().prepared and none(torch.ones(2, 16).half()).shape == (2, 0)
    monkeypatch.setattr(humming, "_capability", lambda device: ())
    with pytest.raises(RuntimeError, match="on cpu, which is no NVIDIA GPU"):
        layer.load_state_dict(state)
    assert not layer.prepared and same(layer.state_dict(), state)


def test_other_derivatives_of_prepared_layers(package: Humming) -> None:
    """Forward, and of gradients, as those of layers that are not prepared."""
    layer = nvfp4.NVFP4Linear.from_linear(torch.nn.Linear(32, 16).bfloat16())
    layer.backend = "humming"
    x, t = (torch.randn(3, 32).bfloat16() for _ in range(2))
    c = torch.randn(3, 16).bfloat16().requires_grad_()

    def twice(layer: Any) -> Any:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(layer(leaf), leaf, c, create_graph=True)
        return torch.autograd.grad(g, c, t)[0]

    expected = torch.func.jvp(layer, (x,), (t,)), twice(layer)
    layer.prepare()
    found = torch.func.jvp(layer, (x,), (t,)), twice(layer)
    for a, b in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
        close(a.detach(), b.detach(), 2)


def test_memory_while_weights_are_put_in_order(
    package: Humming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is there twice, and a part of it once more; the stand-in makes a padded copy."""
    monkeypatch.setattr(humming_order, "AT_ONCE", 1 << 16)
    layer = nvfp4.NVFP4Linear(4096, 4096, bias=False)
    layer.backend, size = "humming", bytes_of(layer)
    with Memory() as memory:
        layer.prepare()
    assert memory.most <= 3.1 * size
    with Memory() as memory:
        state = layer.state_dict()
    assert memory.most <= 2.3 * size
    with Memory() as memory:  # of what is given, that copy, and what is made of it
        layer.load_state_dict(state)
    assert memory.most <= 3.3 * size
