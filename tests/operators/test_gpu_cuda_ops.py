"""Ops in CUDA on a real GPU: units with scratch, clusters and shared memory; eagerly, compiled, in
CUDA graphs. `cuda_ops` has them; what is sent is tested without a GPU in `test_cuda_op`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuda_ops
from ferrule import DeviceError, KernelError, Op
from test_readme import blocks

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    # Of torch's own: inductor's imports, and the first graph of a pool, which is empty.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def random(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def turned(x: Any) -> Any:
    """What `cuda_ops.rotation` gives."""
    return x.roll(-1, 1)


def has_clusters() -> bool:
    return bool(torch.cuda.get_device_capability() >= (9, 0))


# -- eagerly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1024,), (1025,), (700, 1000), (0,)])
def test_a_reduction_in_two_steps(shape: tuple[int, ...], dtype: str) -> None:
    op = cuda_ops.reduction()
    for _ in range(3):
        x = torch.rand(*shape, device="cuda").to(getattr(torch, dtype))
        torch.testing.assert_close(op(x), x.float().sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(op(x.mT) if x.ndim > 1 else op(x[::2]),
                               (x if x.ndim > 1 else x[::2]).float().sum(),
                               rtol=1e-4, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_clusters(size: int) -> None:
    op, x = cuda_ops.rotation(), random(5, size, 256)
    if not has_clusters():
        with pytest.raises(DeviceError, match="has no clusters"):
            op(x)
        return
    for _ in range(2):
        torch.testing.assert_close(op(x), turned(x), rtol=0, atol=0)


def test_clusters_that_are_too_large_are_refused() -> None:
    with pytest.raises(KernelError, match="8 blocks at most"):
        cuda_ops.rotation()(random(1, 16, 32))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_shared_memory_up_to_the_limit(dtype: str) -> None:
    op = cuda_ops.reversal()
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin // 4
    for n in (10, 12 * 1024, 12 * 1024 + 1, most - 1, most, 100):
        x = random(3, n).mul(100).to(getattr(torch, dtype))
        torch.testing.assert_close(op(x), x.flip(1), rtol=0, atol=0)
    with pytest.raises(DeviceError, match=f"has {4 * most} at most"):
        op(random(1, most + 1))


def test_the_implementation_is_chosen_by_the_sizes() -> None:
    op = cuda_ops.chosen()
    for n, one in ((1, 1), (16, 1), (17, 2), (1000, 2), (1001, 3), (5, 1)):
        x = random(n)
        torch.testing.assert_close(op(x, 0.5), x * 0.5 + one)


def test_fills_and_copies() -> None:
    op = cuda_ops.counts()
    x = torch.randint(0, 7, (100_000,), device="cuda", dtype=torch.int32)
    before = torch.arange(7, device="cuda", dtype=torch.int32)
    for _ in range(3):
        bins, largest = op(x, before)
        expected = before + torch.bincount(x, minlength=7)
        assert torch.equal(bins, expected.int()) and bool((largest == float("-inf")).all())
    bins, _ = op(x[:0], before)  # no block, but the copy and the fill
    assert torch.equal(bins, before)


def test_the_programs_of_the_page() -> None:
    found: dict[str, Any] = {}
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda_kernel.md"
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            exec(compile(block.text, f"cuda_kernel.md:{block.line}", "exec"), found)  # noqa: S102
    for m in (1, 16, 17, 100):
        x, w = random(m, 130).half(), random(77, 130).half()
        torch.testing.assert_close(found["matmul"](x, w), x @ w.T, rtol=2e-2, atol=2e-2)
    for n in (1, 255, 4097, 3_000_000):
        x = random(n)
        expected = torch.nn.functional.rms_norm(x, (n,), eps=1e-3)
        torch.testing.assert_close(found["rms"](x, 1e-3), expected, rtol=1e-4, atol=1e-4)


def test_scratch_goes_back_and_streams_are_the_callers() -> None:
    op, x = cuda_ops.reduction(), torch.ones(1 << 20, device="cuda")
    op(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        op(x)
    assert torch.cuda.memory_allocated() == before
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for n in range(30):
        with torch.cuda.stream(streams[n % 3]):
            torch.cuda._sleep(1_000_000)
            found.append((n, op(torch.full((5000 + n,), float(n), device="cuda"))))
    torch.cuda.synchronize()
    for n, y in found:
        assert float(y) == n * (5000 + n)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.ones((300, 700), cupy.float32)
    assert float(cuda_ops.reduction()(x)) == 210_000
    rows = cupy.arange(30_000, dtype=cupy.float32)[None]
    np.testing.assert_array_equal(cuda_ops.reversal()(rows).get(), rows.get()[:, ::-1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus() -> None:
    op, rows = cuda_ops.reduction(), cuda_ops.reversal()
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        assert float(op(torch.ones(4000, device=device))) == 4000
        x = torch.randn(2, 20_000, device=device)
        assert torch.equal(rows(x), x.flip(1)) and torch.cuda.current_device() == 0


# -- in graphs -------------------------------------------------------------------------------------

Made = tuple[Callable[[], Op], Callable[[], tuple[Any, ...]], Callable[..., Any]]
GRAPHS: dict[str, Made] = {
    "reduction": (cuda_ops.reduction, lambda: (random(300, 70),), lambda x: x.sum()),
    "rotation": (cuda_ops.rotation, lambda: (random(3, 4, 64),), turned),
    "reversal": (cuda_ops.reversal, lambda: (random(3, 30_000),), lambda x: x.flip(1)),
    "chosen": (cuda_ops.chosen, lambda: (random(500), 3.0), lambda x, s: x * s + 2),
}


@pytest.fixture(params=GRAPHS)
def one(request: pytest.FixtureRequest) -> Made:
    """An op, its inputs, and what it gives."""
    if request.param == "rotation" and not has_clusters():
        pytest.skip("the GPU has no clusters")
    return GRAPHS[request.param]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("calls_before", [0, 2])
def test_cuda_graphs(one: Made, calls_before: int) -> None:
    make, inputs, expected = one
    op, (x, *more) = make(), inputs()
    for _ in range(calls_before):
        op(x, *more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, *more)
        z = op(x * 2, *more)
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan"))
        torch.full((1 << 20,), float("nan"), device="cuda")  # where scratch may have been
        graph.replay()
        close(y, expected(x, *more))
        close(z, expected(x * 2, *more))


def test_compiled(one: Made) -> None:
    make, inputs, expected = one
    op, given = make(), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, *more: op(x * 2, *more) + 1, fullgraph=True)
    for _ in range(2):
        close(compiled(*given), expected(given[0] * 2, *given[1:]) + 1)


def test_compiled_into_cuda_graphs() -> None:
    op = cuda_ops.reduction()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x * 2) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = random(300, 70)
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(x), (x * 2).sum() + 1)


def test_one_graph_for_all_sizes_chooses_when_it_runs() -> None:
    from torch._dynamo import testing

    op = cuda_ops.chosen()
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: op(x, 0.5), fullgraph=True, dynamic=True, backend=counter)
    for n, which in ((500, 2), (7, 1), (2000, 3), (16, 1), (999, 2)):
        x = random(n)
        close(compiled(x), x * 0.5 + which)
    assert counter.frame_count == 1


def test_opcheck(one: Made) -> None:
    make, inputs, _ = one
    torch.library.opcheck(make().torch_op, inputs())


def test_locks_of_a_stream() -> None:
    import ferrule as fe

    op = fe.op(
        "gpu_locks", "x[N]:float32 -> y[N]:float32",
        cuda=fe.cuda_unit(
            "__global__ void f(const float* x, int* calls, float* y, int n) {"
            "  int i = blockIdx.x * 64 + threadIdx.x; if (i < n) y[i] = x[i] + calls[i]++; }",
            state={"calls": "int32[N]"},
            steps=[fe.cuda_step("f", ["x", "calls", "y", "N"], blocks="ceildiv(N,64)", block=64)],
        ),
    )  # fmt: skip
    x = torch.ones(100, device="cuda")
    assert [op(x)[99].item() for _ in range(3)] == [1, 2, 3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    for _ in range(2):
        y.zero_()
        graph.replay()
        assert y.tolist() == [1] * 100
    assert op(x[:50])[49].item() == 4
