"""The id style: runners behind integers, and the two ops that find them."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ferrule import KernelError, KernelTypeError
from ferrule.compat import runners
from ferrule.compat.runners import get_runner, register_runner

UTILITIES = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)  # fmt: skip
BF16 = torch.bfloat16
linear, moe = torch.ops.nvfp4.linear_gemm, torch.ops.nvfp4.moe_gemm


class Linear:
    def __init__(self, n: int = 6, k: int = 8, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(n, k, generator=random).to(BF16)

    def _run_impl(self, x: Any) -> Any:
        assert x.ndim == 2 and x.is_contiguous() and not x.requires_grad
        return x @ self.weight.T


class Buffered(Linear):
    """With a workspace, as runners for CUDA graphs have it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.workspace = torch.zeros(64, self.weight.shape[0], dtype=BF16)

    def _run_impl(self, x: Any) -> Any:
        y = self.workspace[: x.shape[0]]
        return torch.mm(x, self.weight.T, out=y)


class Writing(Linear):
    def _run_impl(self, x: Any, out: Any) -> None:
        torch.mm(x, self.weight.T, out=out)


class Experts:
    def __init__(self, experts: int = 4, k: int = 8, n: int = 8) -> None:
        random = torch.Generator().manual_seed(1)
        self.weight = torch.randn(experts, n, k, generator=random).to(BF16)

    def _run_impl(self, hidden: Any, weights: Any, ids: Any) -> Any:
        every = torch.einsum("mk,mtnk->mtn", hidden.float(), self.weight[ids.long()].float())
        return (every * weights[..., None]).sum(1).to(BF16)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(BF16)


def moe_inputs(m: int = 5, top: int = 2) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(3)
    weights = torch.rand(m, top, generator=random)
    return x_of(m, 8), weights, torch.randint(0, 4, (m, top), generator=random, dtype=torch.int32)


@pytest.mark.parametrize("kind", [Linear, Buffered, Writing])
def test_linear(kind: Any) -> None:
    runner = kind()
    number = register_runner(runner)
    assert get_runner(number) is runner and register_runner(runner) == number
    base = x_of(4, 8)
    for x in (base, x_of(2, 3, 8), x_of(8), x_of(8, 4).T, base.expand(2, 4, 8), x_of(0, 8)):
        y = linear(x, number, 6)
        torch.testing.assert_close(y, x @ runner.weight.T)
        assert y.is_contiguous()
        torch.library.opcheck(linear.default, (x, number, 6), test_utils=UTILITIES)
    first = linear(base, number, 6)
    linear(base * 0, number, 6)
    assert first.abs().max() > 0  # a workspace is not handed out


def test_moe() -> None:
    runner = Experts()
    number = register_runner(runner)
    for m in (5, 1, 0):
        values = moe_inputs(m)
        y = moe(*values, number, 8)
        torch.testing.assert_close(y, runner._run_impl(*values))
        torch.library.opcheck(moe.default, (*values, number, 8), test_utils=UTILITIES)


def test_copies_are_counted() -> None:
    runner, plain = Buffered(), Linear()
    before = copy.copy(runners.counts)
    linear(x_of(4, 8), register_runner(plain), 6)
    assert runners.counts == before
    linear(x_of(8, 4).T, register_runner(runner), 6)
    assert runners.counts - before == {"copy": 1, "output copy": 1}


class Model(torch.nn.Module):
    """As such code is written."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.runner = Buffered(8, 8, seed)
        self.runner_id = register_runner(self.runner)

    def forward(self, x: Any) -> Any:
        return torch.ops.nvfp4.linear_gemm(x, self.runner_id, 8).relu()


@torch.no_grad()
def test_compiled_with_sizes_that_change() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = torch.nn.Sequential(*(Model(i) for i in range(6)))
    compiled = torch.compile(layers, backend=counter, fullgraph=True)
    for m in (4, 5, 9):
        x = x_of(m, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), layers(x))
    assert counter.frame_count == 1


@torch.no_grad()
def test_each_id_is_compiled_for() -> None:
    """What the style costs: weights as arguments compile once here."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(Model.forward, backend=counter, fullgraph=True)
    layers = [Model(i) for i in range(6)]
    x = x_of(4, 8)
    for layer in layers:
        torch.testing.assert_close(forward(layer, x), layer(x))
    assert 1 < counter.frame_count <= 6


@torch.no_grad()
def test_vmap() -> None:
    runner, experts = Linear(), Experts()
    number = register_runner(runner)
    x = x_of(4, 3, 8)
    y = torch.func.vmap(lambda x: linear(x, number, 6), in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(y, linear(x, number, 6))
    hidden, weights, ids = moe_inputs(6)
    number = register_runner(experts)
    split = [one.reshape(2, 3, -1) for one in (hidden, weights, ids)]
    y = torch.func.vmap(lambda *v: moe(*v, number, 8))(*split)
    torch.testing.assert_close(y.reshape(6, 8), moe(hidden, weights, ids, number, 8))
    y = torch.func.vmap(lambda h: moe(h, weights[:3], ids[:3], number, 8))(split[0])
    torch.testing.assert_close(y[1], moe(hidden[3:], weights[:3], ids[:3], number, 8))


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused_with_the_way_out(strict: bool) -> None:
    model = Model()
    with torch.no_grad(), pytest.raises(Exception) as caught:
        torch.export.export(model, (x_of(4, 8),), strict=strict)
    message = str(caught.value)
    assert "nvfp4::linear_gemm cannot be exported" in message
    assert "ferrule.adopt, with the weights as arguments: docs/adopt.md" in message
    if not strict:
        assert isinstance(caught.value, KernelError)
    assert model(x_of(4, 8)).shape == (4, 8)


def test_meta_and_fake_tensors_run_nothing() -> None:
    from torch._subclasses import FakeTensorMode

    class Never(Linear):
        def _run_impl(self, x: Any) -> Any:
            raise AssertionError

    runner = Never()
    number = register_runner(runner)
    y = linear(torch.empty(2, 3, 8, dtype=BF16, device="meta"), number, 6)
    assert y.shape == (2, 3, 6) and y.is_meta
    with FakeTensorMode():
        assert linear(torch.empty(3, 8, dtype=BF16), number, 6).shape == (3, 6)


def test_unknown_and_freed_ids() -> None:
    x = x_of(2, 8)
    with pytest.raises(KernelError, match=r"there is no runner 10000000 in this process; regist"):
        linear(x, 10000000, 6)
    with pytest.raises(KernelError, match="there is no runner -1"):
        get_runner(-1)
    with pytest.raises(KernelTypeError, match=r"got the id 'a' of type str"):
        get_runner("a")  # type: ignore[arg-type]
    number = register_runner(Linear())  # as code does that keeps ids alone
    with pytest.raises(KernelError, match=rf"runner {number} has been freed.*self.runner = runner"):
        linear(x, number, 6)
    compiled = torch.compile(lambda x: linear(x, number, 6), backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=f"runner {number} has been freed"):
        compiled(x)


@torch.no_grad()
def test_copies_of_a_model_call_the_original() -> None:
    """What the style costs; a copy that outlives the original is told why it stops."""
    model, x = Model(), x_of(2, 8)
    copied = copy.deepcopy(model)
    copied.runner.weight.zero_()
    assert copied.runner_id == model.runner_id and copied(x).abs().max() > 0
    del model
    gc.collect()
    with pytest.raises(KernelError, match=r"been freed.* register copies of it"):
        copied(x)
    copied.runner_id = register_runner(copied.runner)
    assert copied(x).abs().max() == 0


def test_a_trace_asks_for_no_runner() -> None:
    """An id is looked up when the graph runs, and a missing one is a KeyError."""
    hidden, weights, ids = moe_inputs()
    assert linear(x_of(2, 8).to("meta"), 10**9, 6).shape == (2, 6)
    assert moe(*(v.to("meta") for v in (hidden, weights, ids)), 10**9, 8).shape == (5, 8)
    compiled = torch.compile(lambda x, i: linear(x, i, 6), backend="aot_eager", fullgraph=True)
    for call in (lambda x, i: linear(x, i, 6), compiled):
        with torch.no_grad(), pytest.raises(KeyError, match=r"^.runners. there is no runner 1000"):
            call(x_of(2, 8), 10**9)
    with pytest.raises(KeyError, match=r"^.runners. there is no runner -1"):
        get_runner(-1)


def test_runners_are_freed_with_their_weights() -> None:
    model = Model()
    number, weight = model.runner_id, weakref.ref(model.runner.weight)
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(x_of(2, 8))
    torch._dynamo.reset()
    del model
    gc.collect()
    assert weight() is None
    with pytest.raises(KernelError, match="has been freed"):
        get_runner(number)
    held = [Linear() for _ in range(20)]
    ids = [register_runner(one) for one in held]
    assert number not in ids and len(set(ids)) == 20


def test_ids_under_threads() -> None:
    held: list[Any] = []

    def work() -> None:
        for _ in range(50):
            runner = Linear(1, 1)
            held.append((register_runner(runner), runner))
            register_runner(Linear(1, 1))  # freed at once

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len({number for number, _ in held}) == 200
    assert all(get_runner(number) is runner for number, runner in held)


def test_what_is_no_runner_is_refused() -> None:
    with pytest.raises(KernelTypeError, match="has no method `_run_impl`"):
        register_runner(3)  # type: ignore[arg-type]

    class Slots:
        __slots__ = ()

        def _run_impl(self, x: Any) -> Any:
            return x

    with pytest.raises(KernelTypeError, match='add "__weakref__" to the `__slots__`'):
        register_runner(Slots())


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda x: x.float() @ torch.ones(8, 6), "returned torch.float32 of shape"),
        (lambda x: x, r"returned torch.bfloat16 of shape \(2, 8\) .*; expected .* \(2, 6\) on cpu"),
        (lambda x: None, "returned None of type NoneType"),
    ],
)
def test_wrong_results_are_named(gives: Any, message: str) -> None:
    class Wrong:
        def _run_impl(self, x: Any) -> Any:
            return gives(x)

    runner = Wrong()
    with pytest.raises(
        KernelError, match=r"Wrong\._run_impl, called by nvfp4::linear_gemm, " + message
    ):
        linear(x_of(2, 8), register_runner(runner), 6)


def test_wrong_inputs() -> None:
    runner, experts = Linear(), Experts()
    number, other = register_runner(runner), register_runner(experts)
    hidden, weights, ids = moe_inputs()
    for call, message in (
        (lambda: linear(torch.ones(2, 8), number, 6), "got torch.float32, expected torch.bfloat16"),
        (lambda: linear(torch.ones((), dtype=BF16), number, 6), "got no dims"),
        (lambda: moe(hidden, weights, ids.long(), other, 8), "'topk_ids' .*: got torch.int64"),
        (lambda: moe(hidden, weights.to(BF16), ids, other, 8), "'topk_weights' .* torch.float32"),
        (lambda: moe(hidden[None], weights, ids, other, 8), "expected two dims"),
        (lambda: moe(hidden[1:], weights, ids, other, 8), r"got hidden_states \(4, 8\)"),
    ):
        with pytest.raises(KernelError, match=message):
            call()


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # torch's own
def test_there_is_no_silent_gradient() -> None:
    runner = Linear()
    number = register_runner(runner)
    x = x_of(2, 8).requires_grad_()
    for call in (
        lambda: linear(x, number, 6),
        lambda: torch.func.grad(lambda x: linear(x, number, 6).float().sum())(x.detach()),
        lambda: torch.func.jvp(lambda x: linear(x, number, 6), (x.detach(),), (x.detach(),)),
    ):
        with pytest.raises(KernelError, match="nvfp4::linear_gemm has no derivative"):
            call()
    with torch.no_grad():
        assert linear(x, number, 6).shape == (2, 6)


def test_a_runners_error_is_kept() -> None:
    class Broken:
        def _run_impl(self, x: Any) -> Any:
            raise ArithmeticError("blew up")

    runner = Broken()
    number = register_runner(runner)
    compiled = torch.compile(lambda x: linear(x, number, 6), backend="aot_eager", fullgraph=True)
    for call in (lambda x: linear(x, number, 6), compiled):
        with torch.no_grad(), pytest.raises(ArithmeticError, match=r"^blew up$") as caught:
            call(x_of(2, 8))
        assert caught.traceback[-1].name == "_run_impl"


def test_torch_comes_with_the_module_alone() -> None:
    code = (
        "import sys, ferrule.compat; assert 'torch' not in sys.modules\n"
        "import torch\n"
        "theirs = torch.library.Library('nvfp4', 'FRAGMENT')\n"
        "theirs.define('linear_gemm(Tensor x) -> Tensor')\n"
        "import ferrule.compat.runners\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "nvfp4::linear_gemm is defined already in this process, by other code" in done.stderr
