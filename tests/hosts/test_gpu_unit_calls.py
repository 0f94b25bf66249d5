"""Repeated calls of CUDA units with torch's tensors on an NVIDIA GPU, which C makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ferrule import ops
from ferrule.hosts.torch import known_calls
from ferrule.tools import fastcall
from frames import frames

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = ON_GPU
N, K = 384, 512
ROWS = {"one kernel": 2, "scratch": 32, "cuBLAS": 1536}


def made(seed: int = 0) -> Callable[[int], list[Any]]:
    """What gives inputs of `nvfp4_linear` with so many rows: new ones each time, of one matrix."""
    generator = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(N, K, device="cuda", generator=generator)
    packed = ops.quantize_nvfp4(w)
    bias = torch.randn(N, device="cuda", generator=generator).bfloat16()

    def inputs(rows: int) -> list[Any]:
        x = torch.randn(rows, K, device="cuda", generator=generator).bfloat16()
        return [x, *packed, bias]

    return inputs


def by_python(call: Callable[..., Any], *given: Any) -> Any:
    with fastcall.bypassed():
        return call(*given)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_python_gives(rows: int) -> None:
    assert known_calls.in_c()
    inputs = made()
    for _ in range(6):
        given = inputs(rows)
        y = ops.nvfp4_linear(*given)
        assert torch.equal(y, by_python(ops.nvfp4_linear, *given))
    assert not [name for name in frames(lambda: ops.nvfp4_linear(*given)) if "TorchOp" in name]
    x = torch.randn(rows, K, device="cuda").bfloat16()
    for given_x in (x[:, : K // 2].repeat(1, 2), x.flip(0), torch.cat([x, x])[1 : rows + 1]):
        given[0] = given_x
        assert torch.equal(ops.nvfp4_linear(*given), by_python(ops.nvfp4_linear, *given))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_on_streams_and_in_cuda_graphs(rows: int) -> None:
    inputs = made()
    for _ in range(4):
        ops.nvfp4_linear(*inputs(rows))
    stream = torch.cuda.Stream()
    given = inputs(rows)
    expected = by_python(ops.nvfp4_linear, *given)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x = torch.empty_like(given[0])
        torch.cuda._sleep(20_000_000)
        x.copy_(given[0])  # what the call is to wait for
        y = ops.nvfp4_linear(x, *given[1:])
    stream.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.nvfp4_linear(x, *given[1:])
        z = ops.nvfp4_linear(torch.cat([x, x]), *given[1:])  # of a layout that is not known yet
    for _ in range(3):
        given[0] = inputs(rows)[0]
        x.copy_(given[0])
        graph.replay()
        assert torch.equal(y, by_python(ops.nvfp4_linear, *given))
        assert torch.equal(z[:rows], z[rows:])


def test_from_threads() -> None:
    """Each has a stream, and its own layouts among those of all."""
    failed: list[Any] = []

    def work(seed: int) -> None:
        try:
            inputs = made(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    given = inputs((1, 2, 32, 1536)[(i + seed) % 4])
                    y = ops.nvfp4_linear(*given)
                    if not torch.equal(y, ops.nvfp4_linear(given[0].clone(), *given[1:])):
                        failed.append((seed, i))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch's own
def test_a_profiler_and_autograd_see_calls() -> None:
    given = made()(2)
    for _ in range(4):
        ops.nvfp4_linear(*given)
    with torch.profiler.profile() as profile:
        ops.nvfp4_linear(*given)
    assert any(event.key.startswith("ferrule::nvfp4_linear") for event in profile.key_averages())
    given[0].requires_grad_(True)
    for _ in range(4):
        y = ops.nvfp4_linear(*given)
    y.sum().backward()
    w = ops.dequantize(given[1], given[2], mode="nvfp4", dtype="float32") * given[3]
    gradient = given[0].grad.float()
    torch.testing.assert_close(gradient, w.sum(0).expand_as(gradient), rtol=2e-2, atol=2e-1)


def test_memory_goes_back() -> None:
    """As much is allocated after many calls as before."""
    given = made()(1536)
    for _ in range(4):
        ops.nvfp4_linear(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        ops.nvfp4_linear(*given)
    assert torch.cuda.memory_allocated() == before
