"""The test ops of torch on a real GPU: every case of `torch_ops`, against torch's operators.

On the CPU the same is tested at length, without a GPU; here are the parts that a GPU may change.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

import ferrule
import torch_cuda
import torch_ops
from ferrule import KernelError
from test_torch_op import LAYOUTS, UTILITIES, add, alike, leaves, policy
from test_torch_op_compile import both
from test_torch_op_grad import AROUND, NOT_COMPILED, loss, ways
from torch_cuda import TWO_GPUS, captured, check_replays, close, poison, tensors
from torch_ops import CASES, DIFFERENTIABLE, EACH, Case, cloned, is_float, moved, rand

pytestmark = torch_cuda.MARKS
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EACH_DIFFERENTIABLE = pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.fixture(params=["C", "Python"])
def call(request: pytest.FixtureRequest) -> Any:
    """Calls an op as it is, or by the Python that serves where C does not."""
    if request.param == "C":
        return lambda op, *values: op(*values)
    return lambda op, *values: op.torch_op and op._operator.run(*values)


def usual(case: Case, device: str) -> torch_ops.Inputs:
    """Inputs of the usual call, which may be written to."""
    return cloned(moved(case.samples()[0], device))


# -- eagerly ---------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_values(case: Case, dtype: torch.dtype, call: Any, device: str) -> None:
    def wide(values: Any) -> list[Any]:
        return [one.float() if is_float(one) else one for one in cloned(values)]

    for name, layout in LAYOUTS.items():
        for inputs in case.samples():
            given = layout(moved(inputs, device, dtype))
            if case.mutates:
                given = cloned(given) if name == "contiguous" else torch_ops.strided(given)
            expected = wide(given)
            found = tensors(call(case.op, *given))
            results = tensors(case.reference(*expected))
            for one, other in zip(found, results, strict=True):
                assert one.dtype == (dtype if is_float(other) else other.dtype)
                assert one.device.type == device and one.is_contiguous()
            close(wide(found), results, LIMITS[dtype])
            close(wide(given), expected, LIMITS[dtype])  # written in place, or not at all


@ALL
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_opcheck(case: Case, layout: str, device: str) -> None:
    for inputs in case.samples():
        given = LAYOUTS[layout](moved(inputs, device))
        for one in (given, leaves(given)) if case.orders else (given,):
            found = torch.library.opcheck(case.op.torch_op, one, test_utils=UTILITIES)
            assert set(found.values()) == {"SUCCESS"}


@ALL
def test_modes_that_record_nothing(case: Case, device: str) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        inputs, expected = usual(case, device), usual(case, device)
        with mode():
            found = case.op(*(inputs if case.mutates else leaves(inputs)))
            close(found, case.reference(*expected))
        assert not any(one.requires_grad for one in tensors(found))
        with torch.inference_mode():
            again = case.op(*usual(case, device))  # of tensors that were made in that mode
        close(again, found)


@ALL
def test_tensors_without_values(case: Case, device: str) -> None:
    for inputs in case.samples():
        values = cloned(moved(inputs, device))
        expected = case.reference(*cloned(values))
        alike(case.op(*moved(values, "meta")), expected, "meta")
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values]
            alike(case.op(*fake), expected, device)
        alike(case.op(*fake), expected, device)  # outside of the mode, too


@ALL
def test_outputs_are_new_each_time(case: Case, device: str) -> None:
    inputs = usual(case, device)
    every = tensors([case.op(*inputs), case.op(*inputs), inputs])
    memory = [one.untyped_storage().data_ptr() for one in every]
    assert len(set(memory)) == len(memory)


def test_inputs_that_alias(device: str) -> None:
    q = rand(2, 3, 4).to(device)
    close(EACH["attention"].op(q, q, q, 1.0), EACH["attention"].reference(q, q, q, 1.0))
    whole = rand(8).to(device)
    close(EACH["plain"].op(whole[:4], whole[2:6]), whole[:4] * whole[2:6])
    for c, v in (
        (slice(0, 4), slice(4, 8)), (slice(0, 8, 2), slice(1, 8, 2)), (slice(0, 8), slice(0, 8)),
        (slice(0, 4), slice(2, 6)), (slice(1, 5), slice(0, 4)), (slice(0, 8, 2), slice(0, 4)),
    ):  # fmt: skip
        whole = torch.arange(8.0, device=device)
        expected = whole.clone()
        expected[c] += expected.clone()[v]
        add(whole[c], whole[v])  # what is read is what was there before
        close(whole, expected)
    with pytest.raises((KernelError, RuntimeError), match=r"single memory location|in one place"):
        add(torch.zeros(1, device=device).expand(3), torch.ones(3, device=device))


def test_inputs_on_two_devices_are_refused(device: str) -> None:
    for other in ("meta", "cpu"):
        with pytest.raises((KernelError, RuntimeError), match="device"):
            EACH["plain"].op(torch.ones(2, 3, device=device), torch.ones(3, device=other))


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (None, torch.float32, torch.float32), (None, torch.float16, torch.float16),
        ("cast", torch.float32, torch.bfloat16), ("cast", torch.float16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autocast(
    name: str | None, given: torch.dtype, expected: torch.dtype, backend: str | None, device: str
) -> None:
    op = policy(name)
    f = op if backend is None else torch.compile(op, backend=backend, fullgraph=True)
    x, w = (rand(n)[:3].to(device, given).requires_grad_() for n in (3, 4))
    k = torch.arange(3, dtype=torch.int32, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = f(x, w, k)
        with torch.autocast(device, enabled=False):
            assert op(x, w, k).dtype == given
    assert y.dtype == expected
    close(y, (x.to(expected) * w.to(expected) + k).to(expected), 1e-2)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == given
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert op(x, w, k).dtype == expected


# -- derivatives -----------------------------------------------------------------------------------

CELLS = [(case, way) for case in DIFFERENTIABLE for way in ways(case)]


def ids(value: Any) -> str:
    return value.name if isinstance(value, Case) else value.__name__


def check(
    case: Case, way: Any, compiled: Callable[..., Any], device: str, function: Any = None
) -> None:
    """Fail unless a way gives the same for an op and its reference, and other than zeros."""
    f, given = loss(case, function or case.op, device)
    reference, _ = loss(case, case.reference, device)
    expected = way(reference, given)
    if way.__name__ in AROUND:
        found = way(compiled(f), given)
    else:
        found = compiled(functools.partial(way, f))(given)
    close(found, tuple(expected) if isinstance(found, tuple) else expected)
    assert all(one.abs().max() > 1e-6 and one.device.type == device for one in tensors(found))


@pytest.mark.parametrize(("case", "way"), CELLS, ids=ids)
def test_derivatives(case: Case, way: Any, device: str) -> None:
    check(case, way, lambda f: f, device)


@pytest.mark.parametrize(
    ("case", "way"), [cell for cell in CELLS if cell[1].__name__ not in NOT_COMPILED], ids=ids
)
def test_compiled_derivatives(case: Case, way: Any, device: str) -> None:
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    try:
        check(case, way, compiled, device)
    except Exception:
        torch.compiler.reset()
        try:
            check(case, way, compiled, device, case.reference)
        except Exception as error:
            pytest.skip(f"torch {torch.__version__} cannot do that to its own operators: {error}")
        raise


@pytest.mark.parametrize("name", ["moments", "attention"])
def test_derivatives_by_inductor(name: str, device: str) -> None:
    compiled = functools.partial(torch.compile, fullgraph=True)
    case = EACH[name]
    check(case, next(way for way in ways(case) if way.__name__ == "backward"), compiled, device)


@pytest.mark.parametrize("name", [case.name for case in DIFFERENTIABLE if case.double])
def test_gradcheck(name: str, device: str) -> None:
    inputs = moved(EACH[name].samples()[0], device, torch.float64)
    given = leaves(inputs)
    assert torch.autograd.gradcheck(EACH[name].op, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(EACH[name].op, given)


@pytest.mark.parametrize("name", ["plain", "put"])
def test_a_derivative_without_a_vjp_raises(name: str, device: str) -> None:
    given = leaves(usual(EACH[name], device))
    with pytest.raises(KernelError, match=rf"'{name}' .*has no derivative"):
        EACH[name].op(*given).sum().backward()


# -- compiled --------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_for_all_sizes(case: Case, grad: bool, device: str) -> None:
    if grad and not case.orders:
        return
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.op, fullgraph=True, dynamic=True, backend=counter)
    stance, count = "default", 0
    # the first are all different: torch takes equal ones for one size
    for sizes in ((7, 11), (2, 3), (5, 7), (4, 4), (19, 6)):
        inputs = moved(case.sized(*sizes), device)
        found, expected = cloned(inputs), cloned(inputs)
        if grad:
            found, expected = leaves(found), leaves(expected)
        with torch.compiler.set_stance(stance):
            ours = compiled(*found)
        theirs = case.reference(*expected)
        close(ours, theirs)
        if grad:
            for y in (ours, theirs):
                sum(one.sum() for one in tensors(y)).backward()
            close(*[[x.grad for x in xs if is_float(x)] for xs in (found, expected)])
        else:
            close(found, expected)
        stance = "fail_on_recompile"
        count = count or counter.frame_count
    assert counter.frame_count == count


@pytest.mark.parametrize("how", ["default", "cpp_wrapper"])
def test_inductor_with_dynamic_sizes(how: str, device: str) -> None:
    if how == "cpp_wrapper" and device == "cuda":
        from torch.utils import cpp_extension

        if cpp_extension.CUDA_HOME is None:
            pytest.skip("inductor's C++ for CUDA needs the CUDA toolkit")
    counter = CompileCounterWithBackend("inductor")
    with torch._inductor.config.patch(cpp_wrapper=how == "cpp_wrapper"):
        compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
        for shape in ((2, 3, 4), (5, 2, 4), (7, 9, 4)):
            x, w = rand(*shape).to(device), rand(4).to(device)
            close(compiled(x, w), both(x, w))
    assert counter.frame_count == 1


def test_in_place_writes_are_seen_in_order(device: str) -> None:
    def step(cache: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = cache.sum()
        EACH["put"].op(cache, row, 0)
        EACH["put"].op(cache, 2 * row, 1)
        return before, cache.sum()

    row = torch.ones(2, 3, device=device)
    expected = torch.zeros(2, 4, 3, device=device)
    results = step(expected, row)
    assert [one.item() for one in results] == [0, 18]
    for backend in ("aot_eager", "inductor"):
        torch.compiler.reset()
        cache = torch.zeros(2, 4, 3, device=device)
        close(torch.compile(step, backend=backend, fullgraph=True)(cache, row), results)
        close(cache, expected)


def test_reduce_overhead(device: str) -> None:
    calls: list[None] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x.sin() * 2

    counted = ferrule.op("counted", "x[*S]:T -> y[*S]:T", run=run, version=f"of {id(calls)}")
    counters.clear()
    compiled = torch.compile(lambda x, w: counted(both(x, w)), mode="reduce-overhead")
    made = []
    for n in range(6):
        x, w = rand(2, 3, 4).to(device) * (n + 1), rand(4).to(device) + n
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(x, w).clone()
        made.append(len(calls))
        close(found, torch.sin(both(x, w)) * 2, 1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert 0 < made[2] == made[-1]  # warmed up, captured, then replayed without Python


def test_reduce_overhead_with_gradients(device: str) -> None:
    counters.clear()
    compiled = torch.compile(both_summed, mode="reduce-overhead", fullgraph=True)
    for n in range(4):
        found = leaves([rand(2, 3, 4).to(device) + n, rand(4).to(device)])
        expected = leaves([one.detach().clone() for one in found])
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*found).backward()
        both_summed(*expected).backward()
        close([one.grad for one in found], [one.grad for one in expected], 1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


def both_summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean, variance = EACH["moments"].op(EACH["gate"].op(x, w))
    return mean.square().sum() + variance.sum()


# -- in CUDA graphs by hand ------------------------------------------------------------------------


@ALL
def test_replays(case: Case, device: str) -> None:
    for inputs in case.samples():
        given = cloned(moved(inputs, device))
        found = case.op(*cloned(given))  # libraries of torch's operators are loaded
        if any(one.numel() for one in tensors(found)):
            check_replays(case.op, case.reference, given)


@EACH_DIFFERENTIABLE
def test_replays_of_gradients(case: Case, device: str) -> None:
    def gradients(function: Any, given: Any) -> Any:
        inputs = [one.detach().requires_grad_() if is_float(one) else one for one in given]
        total = sum(one.square().sum() for one in tensors(function(*inputs)))
        return torch.autograd.grad(total, [one for one in inputs if is_float(one)])

    given = usual(case, device)
    gradients(case.op, given)  # outside of a capture, torch's libraries make what they need
    check_replays(
        lambda *values: gradients(case.op, values),
        lambda *values: gradients(case.reference, values), given,
    )  # fmt: skip


FIRST = """
import sys, torch
sys.path[:0] = {path!r}
import torch_ops
from torch_cuda import check_replays
torch.zeros(1, device={device!r})
for case in torch_ops.CASES:
    if case.name != "gate":
        given = torch_ops.cloned(torch_ops.moved(case.samples()[0], {device!r}))
        check_replays(case.op, case.reference, given)
        print(case.name)
"""


def test_first_calls_of_kernels_may_be_in_captures(device: str) -> None:
    """In a process of their own: nothing was compiled, loaded or launched there before."""
    code = FIRST.format(path=[p for p in sys.path if p], device=device)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240,
        env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [case.name for case in CASES if case.name != "gate"]


def test_a_capture_of_several_calls_on_several_streams(device: str) -> None:
    x, w = rand(64, 4).to(device), rand(4).to(device)
    side = torch.cuda.Stream()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        y = EACH["plain"].op(x, w)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = EACH["gate"].op(y, w)
        mean, _ = EACH["moments"].op(y)
        torch.cuda.current_stream().wait_stream(side)
        return z, mean

    run()
    graph, found = captured(run)
    x.copy_(rand(65, 4)[1:])
    poison(found)
    graph.replay()
    y = x * w
    close(found, (EACH["gate"].reference(y, w), y.mean(-1)))


# -- streams, threads, devices, memory -------------------------------------------------------------


@ALL
def test_streams(case: Case, device: str) -> None:
    expected = case.reference(*usual(case, device))
    case.op(*usual(case, device))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    sources = [usual(case, device) for _ in range(9)]
    torch.cuda.synchronize()
    found = []
    for n, source in enumerate(sources):
        with torch.cuda.stream(streams[n % 3]):
            given = cloned(source)
            for one in tensors(given):
                one.zero_()
            torch.cuda._sleep(1_000_000)  # what runs on another stream finds zeros
            for one, value in zip(tensors(given), tensors(source), strict=True):
                one.copy_(value)
            found.append((case.op(*given), given))
    torch.cuda.synchronize()
    for result, _ in found:
        close(result, expected)


def test_threads_on_their_own_streams(device: str) -> None:
    wrong: list[object] = []

    def work(n: int) -> None:
        case = CASES[n % len(CASES)]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                expected = case.reference(*usual(case, device))
                found = [case.op(*usual(case, device)) for _ in range(100)]
                for one in found:
                    close(one, expected)
                if case.orders:
                    given = leaves(usual(case, device))
                    for _ in range(20):
                        sum(one.sum() for one in tensors(case.op(*given))).backward()
                    if any(one.grad is None for one in tensors(given) if is_float(one)):
                        wrong.append((case.name, "no gradient"))
        except BaseException as error:
            wrong.append((case.name, error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@TWO_GPUS
@ALL
def test_two_gpus(case: Case) -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        found = case.op(*usual(case, device))
        close(found, case.reference(*usual(case, device)))
        assert {str(one.device) for one in tensors(found)} == {device}
        assert torch.cuda.current_device() == 0
        if case.orders:
            given, expected = leaves(usual(case, device)), leaves(usual(case, device))
            for function, inputs in ((case.op, given), (case.reference, expected)):
                sum(one.square().sum() for one in tensors(function(*inputs))).backward()
            close(*[[x.grad for x in xs if is_float(x)] for xs in (given, expected)])
    first, second = usual(EACH["plain"], "cuda:0"), usual(EACH["plain"], "cuda:1")
    with pytest.raises(KernelError, match="expected one device"):
        EACH["plain"].op(first[0], second[1])


@ALL
def test_memory_returns(case: Case, device: str) -> None:
    given = torch_ops.strided(usual(case, device))
    case.op(*given)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        case.op(*given)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@EACH_DIFFERENTIABLE
def test_memory_returns_after_gradients(case: Case, device: str) -> None:
    given = leaves(usual(case, device))
    wanted = [one for one in tensors(given) if is_float(one)]

    def step() -> None:
        torch.autograd.grad(sum(one.sum() for one in tensors(case.op(*given))), wanted)

    for _ in range(3):
        step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        step()
    gc.collect()
    for _ in range(100):  # autograd's own thread may hold the last ones for a moment
        if torch.cuda.memory_allocated() <= before:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= before
