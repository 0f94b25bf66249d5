"""Steps of CUDA units that are more than launches of functions, on an NVIDIA GPU: matrix products,
programmatic dependent launches and tensor maps, by every array library, in graphs and packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrule as fe
import on_cuda

torch = pytest.importorskip("torch")
from package_library import Library  # noqa: E402
from test_readme import blocks  # noqa: E402
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what torch warns of is its own
]

KINDS = [torch.float32, torch.float16, torch.bfloat16]
DIMS = {"a": ("M,K", "K,M"), "b": ("K,N", "N,K")}
GELU = """
extern "C" __global__ void gelu(T* h, int64_t n) {
  const int64_t i = blockIdx.x * 256LL + threadIdx.x;
  cudaGridDependencySynchronize();
  if (i < n) h[i] = T(float(h[i]) * normcdff(float(h[i])));
  cudaTriggerProgrammaticLaunchCompletion();
}"""


def product(ta: bool, tb: bool) -> fe.Op:
    return fe.op(
        f"product_{ta:d}{tb:d}",
        f"a[*A,{DIMS['a'][ta]}]:T, b[*B,{DIMS['b'][tb]}]:T, alpha:float32 -> "
        "y[*broadcast(A,B),M,N]:T, z[*broadcast(A,B),M,N]:float32",
        cuda=fe.cuda_unit("", steps=[
            fe.cuda_fill("z", 1),
            fe.cuda_matmul("z", "a", "b", transpose_a=ta, transpose_b=tb, beta=-2),
            fe.cuda_matmul("y", "a", "b", transpose_a=ta, transpose_b=tb, alpha="alpha"),
        ]),
    )  # fmt: skip


PRODUCTS = {(ta, tb): product(ta, tb) for ta in (False, True) for tb in (False, True)}
MLP = fe.op(
    "mlp", "x[*S,K]:T, w[H,K]:T, v[H,N]:T -> y[*S,N]:T",
    cuda=fe.cuda_unit(
        GELU, scratch={"h": "T[x.size // max(K, 1), H]"},
        steps=[
            fe.cuda_matmul("h", "x", "w", transpose_b=True),
            fe.cuda_step("gelu", ["h", "int64 x.size // max(K, 1) * H"],
                         blocks="ceildiv(x.size // max(K, 1) * H, 256)", block=256, pdl=True),
            fe.cuda_matmul("y", "h", "v"),
        ],
    ),
)  # fmt: skip


def random(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


def mlp(x: Any, w: Any, v: Any) -> Any:
    return torch.nn.functional.gelu(x @ w.T) @ v


def close(found: Any, expected: Any) -> None:
    limit = 1e-4 if found.dtype == torch.float32 else 3e-2
    scale = float(expected.float().abs().max()) if expected.numel() else 1
    torch.testing.assert_close(found.float(), expected.float(), rtol=limit, atol=limit * scale)


@pytest.fixture(params=["C", "Python"])
def call(request: pytest.FixtureRequest) -> Any:
    """Calls an op as it is, or by the Python that serves where C does not."""
    if request.param == "C":
        return lambda op, *values: op(*values)
    return lambda op, *values: op.torch_op and op._operator.run(*values)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("transposed", list(PRODUCTS), ids=str)
def test_products_are_those_of_torch(transposed: Any, dtype: Any) -> None:
    ta, tb = transposed
    for m, n, k in ((1, 1, 1), (3, 5, 7), (16, 1, 33), (128, 256, 64), (1000, 77, 513), (0, 4, 4)):
        for batches in ((), (3,), (2, 2)):
            for both in (True, False):
                a = random(*batches, *((k, m) if ta else (m, k)), dtype=dtype)
                b = random(*(batches if both else ()), *((n, k) if tb else (k, n)), dtype=dtype)
                y, z = PRODUCTS[transposed](a, b, 0.5)
                left, right = a.mT if ta else a, b.mT if tb else b
                exact = left.double() @ right.double()
                close(y, 0.5 * exact)
                torch.testing.assert_close(z.double(), exact - 2, rtol=1e-4, atol=1e-3)


def test_arrays_that_begin_anywhere() -> None:
    """cuBLAS is told how addresses are aligned."""
    for dtype in KINDS:
        for shift in (0, 1, 2, 3, 8):
            flat = random(64 * 48 + shift, dtype=dtype)
            a, b = flat[shift:].view(64, 48), random(48, 56, dtype=dtype)
            y, _ = PRODUCTS[False, False](a, b, 1.0)
            close(y, a.double() @ b.double())


def test_tf32_is_asked_for() -> None:
    def op(tf32: bool) -> fe.Op:
        step = fe.cuda_matmul("y", "a", "b", tf32=tf32)
        rule = "a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32"
        return fe.op(f"tf32_{tf32:d}", rule, cuda=fe.cuda_unit("", steps=[step]))

    a, b = random(512, 512), random(512, 512)
    exact = a.double() @ b.double()
    errors = [float((op(tf32)(a, b) - exact).abs().max()) for tf32 in (False, True)]
    assert errors[0] < 1e-3 and errors[1] < 1
    if torch.cuda.get_device_capability() >= (8, 0):
        assert errors[1] > 4 * errors[0]


def test_a_layer(call: Any) -> None:
    for dtype in KINDS:
        w, v = random(256, 64, dtype=dtype) / 8, random(256, 32, dtype=dtype) / 16
        for shape in ((64,), (5, 64), (2, 3, 64), (0, 64), (1000, 64)):
            x = random(*shape, dtype=dtype)
            for _ in range(3):
                close(call(MLP, x, w, v), mlp(x, w, v))


def test_streams_and_cuda_graphs() -> None:
    x, w, v = random(300, 64), random(128, 64), random(128, 32)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # also where cuBLAS has not been used before
        y = MLP(x, w, v)
        z, _ = PRODUCTS[False, False](x, w.t(), 2.0)
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan")), z.fill_(float("nan"))
        graph.replay()
        close(y, mlp(x, w, v))
        close(z, 2 * x @ w.t())
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for n in range(12):
        with torch.cuda.stream(streams[n % 3]):
            torch.cuda._sleep(1_000_000)
            one = torch.full((50 + n, 64), float(n), device="cuda")
            found.append((one, MLP(one, w, v)))
    torch.cuda.synchronize()
    for one, y in found:
        close(y, mlp(one, w, v))


def test_torch_compile() -> None:
    compiled = torch.compile(lambda x, w, v: MLP(x * 2, w, v) + 1, fullgraph=True)
    w, v = random(128, 64), random(128, 32)
    for n in (5, 6, 300):
        x = random(n, 64)
        close(compiled(x, w, v), mlp(x * 2, w, v) + 1)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    a, b = cupy.random.randn(30, 20), cupy.random.randn(20, 9)
    a, b = a.astype(np.float32), b.astype(np.float32)
    y, _ = PRODUCTS[False, False](a, b, 1.0)
    np.testing.assert_allclose(cupy.asnumpy(y), cupy.asnumpy(a) @ cupy.asnumpy(b), atol=1e-4)


@pytest.mark.skipif(not on_cuda.mlx_has_cuda(), reason="MLX has no CUDA here")
def test_mlx() -> None:
    import mlx.core as mx
    import mlx.nn as nn

    def expected(x: Any, w: Any, v: Any) -> Any:
        return nn.gelu(x @ w.T) @ v

    compiled = mx.compile(lambda x, w, v: MLP(x * 2, w, v) + 1)
    w, v = mx.random.normal((128, 64)) / 8, mx.random.normal((128, 32)) / 8
    for i in range(60):  # of several sizes by turns: MLX updates its graphs
        x = mx.random.normal(((1, 7, 300, 64)[i % 4], 64))
        assert mx.allclose(MLP(x, w, v), expected(x, w, v), atol=2e-2).item()
        assert mx.allclose(compiled(x, w, v), expected(x * 2, w, v) + 1, atol=4e-2).item()
    big = mx.random.normal((100, 65))
    for x in (big[:, 1:], big.reshape(-1)[1:6401].reshape(100, 64)):
        # MLX 0.32.4's own product refuses what begins anywhere.
        assert mx.allclose(MLP(x, w, v), expected(x + 0, w, v), atol=2e-2).item()


# -- programmatic dependent launches ---------------------------------------------------------------

MEET = """
__device__ bool seen(const volatile int* flag) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    if (*flag) return true;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < PATIENCE * 1000000ull);
  return false;
}
extern "C" __global__ void ahead(int* flag, int* met) {
  cudaTriggerProgrammaticLaunchCompletion();
  *met = seen(flag);
}
extern "C" __global__ void behind(int* flag, const int* met, int* y) {
  *(volatile int*)flag = 1;
  __threadfence();
  cudaGridDependencySynchronize();
  *y = *met;
}"""


def meeting(pdl: bool, patience: int = 300) -> fe.Op:
    """Whether the step behind began before the one ahead ended, which waits for it a while."""
    return fe.op(
        "meeting", "x[N]:int32 -> y[]:int32",
        cuda=fe.cuda_unit(
            MEET, scratch={"flag": "int32[1]", "met": "int32[1]"}, template={"PATIENCE": patience},
            steps=[
                fe.cuda_fill("flag"),
                fe.cuda_step("ahead", ["flag", "met"], blocks=1, block=1),
                fe.cuda_step("behind", ["flag", "met", "y"], blocks=1, block=1, pdl=pdl),
            ],
        ),
    )  # fmt: skip


def can() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.get_device_capability() >= (9, 0))


AHEAD = fe.op(
    "ahead", "flag[1]:int32! -> met[1]:int32",
    cuda=fe.cuda_unit(MEET, template={"PATIENCE": 2000},
                      steps=[fe.cuda_step("ahead", ["flag", "met"], blocks=1, block=1)]),
)  # fmt: skip
BEHIND = fe.op(
    "behind", "flag[1]:int32!, met[1]:int32 -> y[1]:int32",
    cuda=fe.cuda_body(
        "*(volatile int*)flag = 1; __threadfence(); cudaGridDependencySynchronize(); *y = *met;",
        grid=1, threadgroup=1, pdl=True,
    ),
)  # fmt: skip
# Each element is that of the one ahead, and one: wrong wherever a step does not wait.
CHAIN = fe.op(
    "chain", "x[N]:int32 -> y[N]:int32",
    cuda=fe.cuda_unit(
        """extern "C" __global__ void next(const int* x, int* y, int n) {
          cudaTriggerProgrammaticLaunchCompletion();
          const int i = blockIdx.x * blockDim.x + threadIdx.x;
          cudaGridDependencySynchronize();
          if (i < n) y[i] = x[n - 1 - i] + 1;
        }""",
        scratch={"t": "int32[N]"},
        steps=[
            fe.cuda_step("next", [a, b, "N"], blocks="ceildiv(N,256)", block=256, pdl=True)
            for a, b in (("x", "t"), ("t", "y"), ("y", "t"), ("t", "y"), ("y", "t"), ("t", "y"))
        ],
    ),
)  # fmt: skip


def test_a_step_begins_before_the_one_ahead_has_ended() -> None:
    x = torch.zeros(4, dtype=torch.int32, device="cuda")
    assert int(meeting(True)(x)) == can()
    assert int(meeting(False, 30)(x)) == 0


def test_a_body_begins_before_the_kernel_ahead_has_ended(call: Any) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    met = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        call(BEHIND, flag, met)  # it is compiled and loaded
    for _ in range(3):
        flag.zero_()
        met = call(AHEAD, flag)
        assert int(call(BEHIND, flag, met)) == can()


def test_steps_that_wait_race_with_nobody() -> None:
    for n in (1, 1000, 3_000_000):
        x = torch.arange(n, dtype=torch.int32, device="cuda")
        for _ in range(20):
            y = x
            for _ in range(3):
                y = CHAIN(y)
            assert torch.equal(y, x + 18)


def test_a_graph_has_it() -> None:
    x = torch.arange(100_000, dtype=torch.int32, device="cuda")
    graph, op = torch.cuda.CUDAGraph(), meeting(True)
    op(x), CHAIN(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, z = CHAIN(CHAIN(x)), op(x)
    for n in range(5):
        x.fill_(n)
        graph.replay()
        assert bool((y == n + 12).all()) and int(z) == can()


@pytest.mark.skipif(not on_cuda.mlx_has_cuda(), reason="MLX has no CUDA here")
def test_mlx_has_the_same_results() -> None:
    import mlx.core as mx

    body = fe.op(
        "plus", "x[N]:int32 -> y[N]:int32", cuda=fe.cuda_body(
            "int i = blockIdx.x * blockDim.x + threadIdx.x; cudaGridDependencySynchronize(); "
            "if (i < N) y[i] = x[i] + 1;", grid="N", threadgroup=256, pdl=True),
    )  # fmt: skip
    for n in (1, 1000, 1_000_000) * 5:
        x = mx.arange(n)
        assert mx.array_equal(body(CHAIN(body(CHAIN(x)))), x + 14).item()


# -- tensor maps -----------------------------------------------------------------------------------


def example(name: str) -> fe.Op:
    """An op of docs/cuda_kernel.md."""
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda_kernel.md"
    found: dict[str, Any] = {"fe": fe}
    (text,) = [b.text for b in blocks(page.read_text("utf-8")) if f"\n{name} = fe.op(" in b.text]
    exec(compile(text, "cuda_kernel.md", "exec"), found)  # noqa: S102
    op: fe.Op = found[name]
    return op


DOUBLED = example("doubled")
DOUBLE: str = DOUBLED.implementations[0].source  # type: ignore[union-attr]
# Every second row, by a map of other dims and strides than the array's.
SECOND = fe.op(
    "second", "x[*S,K]:T -> y[x.size // max(2*K, 1),K]:T where T in (float32,)",
    cuda=fe.cuda_unit(
        DOUBLE,
        steps=[
            fe.cuda_step(
                "doubled",
                [
                    fe.cuda_tensor_map("x", (16, 32), dims=("x.size // max(2*K, 1)", "K"),
                                       strides=("2*K",), l2="128B"),
                    fe.cuda_tensor_map("y", (16, 32)),
                ],
                blocks=("ceildiv(K, 32)", "ceildiv(x.size // max(2*K, 1), 16)"), block=128,
            )
        ],
    ),
)  # fmt: skip
HAS_MAPS = pytest.mark.skipif("not can()", reason="the GPU has no tensor maps")


@HAS_MAPS
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_tensor_maps(dtype: Any) -> None:
    for m, k in ((1, 8), (16, 64), (100, 72), (1000, 2048), (0, 8)):
        x = random(m, k, dtype=dtype)
        assert torch.equal(DOUBLED(x), 2 * x)
    whole = random(65, 64, dtype=dtype)
    assert torch.equal(DOUBLED(whole[1:]), 2 * whole[1:])
    with pytest.raises(fe.KernelError, match="begin at a multiple of 16 bytes"):
        DOUBLED(random(65 * 8, dtype=dtype)[1:513].view(64, 8))
    with pytest.raises(fe.KernelError, match="multiples of 16 bytes"):
        DOUBLED(random(3, 3, dtype=dtype))


@HAS_MAPS
def test_tensor_maps_of_other_dims() -> None:
    for shape in ((2, 8), (10, 3, 2, 40), (400, 100)):
        x = random(*shape)
        assert torch.equal(SECOND(x), 2 * x.view(-1, shape[-1])[::2])


@HAS_MAPS
def test_tensor_maps_in_graphs() -> None:
    x, graph = random(100, 72), torch.cuda.CUDAGraph()
    DOUBLED(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = DOUBLED(DOUBLED(x))
    x.normal_()
    graph.replay()
    assert torch.equal(y, 4 * x)


@pytest.mark.skipif(not on_cuda.mlx_has_cuda(), reason="MLX has no CUDA here")
@HAS_MAPS
def test_tensor_maps_by_mlx() -> None:
    import mlx.core as mx

    for i in range(30):
        x = mx.random.normal(((1, 100, 300)[i % 3], 72))
        assert mx.array_equal(DOUBLED(DOUBLED(x)), x * 4).item()


# -- packages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packaged() -> Library:
    ints = torch.ones(4, dtype=torch.int32)
    calls: dict[fe.Op, tuple[Any, ...]] = {
        op: (torch.ones(2, *((5, 3) if ta else (3, 5))), torch.ones(2, *((4, 5) if tb else (5, 4))),
             1.0)
        for (ta, tb), op in PRODUCTS.items()
    }  # fmt: skip
    calls[MLP] = (torch.ones(6, 3), torch.ones(4, 3), torch.ones(4, 5))
    calls |= {CHAIN: (ints,), meeting(True): (ints,)}
    if can():
        calls[DOUBLED] = (torch.ones(4, 8),)
    return Library(calls)


def test_packages(packaged: Library) -> None:
    for (ta, tb), op in PRODUCTS.items():
        for m, n, k in ((3, 5, 7), (128, 64, 33), (1, 1, 1)):
            a, b = random(4, *((k, m) if ta else (m, k))), random(4, *((n, k) if tb else (k, n)))
            for found, expected in zip(packaged(op, a, b, 0.5), op(a, b, 0.5), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
    x, w, v = random(300, 64), random(128, 64), random(128, 32)
    torch.testing.assert_close(packaged(MLP, x, w, v), MLP(x, w, v), rtol=0, atol=0)
    numbers = torch.arange(100_000, dtype=torch.int32, device="cuda")
    assert torch.equal(packaged(CHAIN, numbers), numbers + 6)
    assert int(packaged(meeting(True), numbers)) == can()
    for m, k in ((1, 8), (100, 72), (1000, 2048)) if can() else ():
        one = random(m, k)
        assert torch.equal(packaged(DOUBLED, one), 2 * one)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, z = packaged(MLP, x, w, v), packaged(CHAIN, numbers)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, MLP(x, w, v), rtol=0, atol=0)
    assert torch.equal(z, numbers + 6)
