"""What only a real GPU shows: streams, graphs, memory, several threads and GPUs, broken contexts.

Kernels are called with the arrays of torch, CuPy and JAX. The rest of the suite runs there through
the fixture `everywhere`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cuda import device as cuda
from ferrule.tools import fastcall

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),
]

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
KINDS = [
    "float32", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "complex64",
]  # fmt: skip


def kernel(name: str, source: str, *inputs: str, **more: Any) -> Any:
    return ferrule.metal_kernel(name, [*(inputs or ("x",))], ["y"], source, **more)


def call(one: Any, *given: Any, n: int | None = None, **more: Any) -> Any:
    """One call with a thread per element of the first input, unless it is said otherwise."""
    x = given[0]
    n = math.prod(x.shape) if n is None else n
    sent = {
        "grid": (n, 1, 1), "threadgroup": (256, 1, 1), "output_shapes": [tuple(x.shape)],
        "output_dtypes": [x.dtype],
    }  # fmt: skip
    return one(inputs=[*given], **{**sent, **more})[0]


def exp(name: str = "exp_of_x") -> Any:
    return kernel(name, I + "y[i] = metal::exp(x[i]);")


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest) -> Any:
    """Calls take the way of runtime/fastcall.c, or the long one."""
    if request.param == "Python":
        with fastcall.bypassed():
            yield request.param
    else:
        yield request.param


@pytest.mark.parametrize("size", [1, 255, 100_003, 3 << 20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_repeated_calls(way: str, size: int, dtype: str) -> None:
    one = exp()
    for n in range(5):
        x = torch.randn(size, device="cuda").to(getattr(torch, dtype)) + n
        torch.testing.assert_close(call(one, x), x.exp())


def test_arrays_that_begin_anywhere(way: str) -> None:
    one = kernel("fours", I + "for (int j = 0; j < 4; ++j) y[4 * i + j] = 2 * x[4 * i + j];")
    base = torch.randn(4100, device="cuda")
    for start in (0, 0, 0, 4, 1, 1, 1, 2, 3, 0, 4):
        x = base[start : start + 4096]
        torch.testing.assert_close(call(one, x, n=1024), 2 * x, rtol=0, atol=0)


def test_arrays_of_every_layout(way: str) -> None:
    x = torch.randn(120, 80, device="cuda")
    for view in (x.t(), x[::3], x[:, 1:], x[:, :1].expand(120, 80), x[:0], x.flip(0)):
        one = exp()
        for _ in range(3):
            torch.testing.assert_close(call(one, view), view.exp())


def test_scalars_and_masks(way: str) -> None:
    one = kernel("masked", I + "y[i] = m[i] ? x[i] + s : float(0);", "x", "s", "m")
    x = torch.randn(1000, device="cuda")
    for _ in range(3):
        for s in (2.5, torch.tensor(2.5, device="cuda")):
            torch.testing.assert_close(call(one, x, s, x > 0), torch.where(x > 0, x + 2.5, 0))
    with pytest.raises(ferrule.KernelError, match=r"'x' is on cuda:0, input 's' is on cpu"):
        call(one, x, torch.tensor(2.5), x > 0)


@pytest.mark.parametrize("dtype", KINDS)
def test_init_value(way: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.zeros(1, device="cuda")
    one = kernel("untouched", "if (x[0] > 0) y[0] = 0;")
    for value in (0, 1) if dtype == "bool" else (0, 1, 3, -0.0):
        for size in (0, 1, 7, 100_001):
            for _ in range(3):
                y = call(one, x, n=1, output_shapes=[(size,)], output_dtypes=[kind],
                         init_value=value)  # fmt: skip
                expected = torch.full((size,), value).to(kind)
                assert y.dtype == kind and bool((y.cpu() == expected).all())


def test_calls_wait_for_nothing_and_use_the_current_stream(way: str) -> None:
    one, x = exp(), torch.zeros(100_003, device="cuda")
    call(one, x, init_value=0)
    call(one, x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        x.fill_(1)
        for _ in range(3):
            y, zeroed = call(one, x), call(one, x, init_value=0)
        assert not stream.query()  # nothing has waited
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(y, torch.full_like(x, math.e))
    torch.testing.assert_close(zeroed, y)


@pytest.mark.parametrize("calls_before", [0, 1, 3])
@pytest.mark.parametrize("fill", [None, 0, 3])
def test_cuda_graphs(way: str, calls_before: int, fill: float | None) -> None:
    one = kernel(f"graph_{way}_{calls_before}_{fill}", I + "if (i % 2) y[i] = x[i] + 1;")
    x = torch.randn(3001, device="cuda")
    for _ in range(calls_before):
        call(one, x, init_value=fill)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(one, x, init_value=fill)
        z = call(one, y, init_value=fill)
    for value in (0.5, 2.0):
        x.fill_(value)
        z.fill_(9)
        graph.replay()
        assert bool((z[1::2] == value + 2).all())
        assert fill is None or bool((z[::2] == fill).all())


def test_threadgroup_memory_up_to_the_limit() -> None:
    for count in (12_000, 25_000, 56_000):
        one = kernel(
            f"reversed_{count}",
            f"""threadgroup float t[{count}];
            for (uint j = thread_position_in_threadgroup.x; j < {count}; j += 256) t[j] = x[j];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint j = thread_position_in_threadgroup.x; j < {count}; j += 256)
              y[j] = t[{count} - 1 - j];""",
        )
        x = torch.randn(count, device="cuda")
        for _ in range(3):
            torch.testing.assert_close(call(one, x, n=256), x.flip(0), rtol=0, atol=0)
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    one = kernel(
        "too_much", "threadgroup float t[70000]; t[thread_position_in_grid.x] = x[0];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[0] = t[5];",
    )  # fmt: skip
    with pytest.raises(ferrule.DeviceError, match=rf"280000 bytes, and \w+ has {most}"):
        call(one, torch.ones(1, device="cuda"), n=256)


def test_ptx_gets_the_registers_that_a_threadgroup_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"""
        float v[90];
        for (int n = 0; n < 90; ++n) v[n] = x[thread_position_in_threadgroup.x + n];
        for (int n = 0; n < x_shape[0] - 1199; ++n)
          for (int m = 0; m < 90; ++m) v[m] = v[m] * v[(7 * m + 3) % 90] + n;
        y[thread_position_in_grid.x] = {" + ".join(f"v[{n}] * v[{89 - n}]" for n in range(90))};"""
    x = torch.rand(1200, device="cuda")
    sent = {"n": 1024, "threadgroup": (1024, 1, 1), "output_shapes": [(1024,)]}
    expected = call(kernel("registers", source), x, **sent)
    monkeypatch.setattr(cuda, "gpu", lambda name: cuda.CudaDevice("compute_80", 0))
    torch.testing.assert_close(call(kernel("registers_of_ptx", source), x, **sent), expected)


def test_large_grids() -> None:
    one = kernel(
        "grids", "uint3 p = thread_position_in_grid, n = threads_per_grid;"
        "y[(p.z * n.y + p.y) * n.x + p.x] = p.x + 10 * p.y + 100 * p.z;",
    )  # fmt: skip
    x = torch.ones(1, device="cuda")
    for grid, threadgroup in (
        ((2, 1, 70_000), (1, 1, 1)), ((2, 70_001, 3), (2, 1, 1)), ((1, 3, 200_000), (1, 1, 2)),
        ((5, 7, 11), (4, 4, 4)), ((3_000_001, 1, 1), (1, 1, 1)), ((1030, 1025, 1), (32, 8, 1)),
    ):  # fmt: skip
        y = call(one, x, grid=grid, threadgroup=threadgroup, output_shapes=[grid[::-1]],
                 output_dtypes=[torch.int32])  # fmt: skip
        steps = [torch.arange(n, device="cuda") for n in grid[::-1]]
        pz, py, px = torch.meshgrid(*steps, indexing="ij")
        assert torch.equal(y, (px + 10 * py + 100 * pz).int())


def test_arrays_beyond_32_bits() -> None:
    rows, columns = 1 << 16, (1 << 15) + 3  # 2^31 elements and some
    x = torch.randint(0, 255, (rows, columns), device="cuda", dtype=torch.uint8)
    one = kernel(
        "far", "size_t at = size_t(thread_position_in_grid.y) * x_shape[1]"
        " + thread_position_in_grid.x; y[at] = x[at] + 1;",
    )  # fmt: skip
    for given in (x, x.view(columns, rows).t()):  # the second is copied
        y = call(one, given, grid=(columns, rows, 1))
        assert torch.equal(y, given + 1)


def test_threads() -> None:
    ones = [exp(f"of_thread_{n}") for n in range(3)]
    faults: list[BaseException] = []

    def run(value: float) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(150):
                    x = torch.full((1000 + n % 3,), value, device="cuda")
                    torch.testing.assert_close(call(ones[n % 3], x), x.exp())
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(n / 8,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus(way: str) -> None:
    one = exp("of_two")
    for _ in range(4):
        for current in (0, 1):
            with torch.cuda.device(current):
                for device in ("cuda:0", "cuda:1"):
                    x = torch.randn(1001, device=device)
                    y = call(one, x, init_value=0)
                    assert str(y.device) == device and torch.cuda.current_device() == current
                    torch.testing.assert_close(y, x.exp())
    a, b = (torch.randn(8, device=f"cuda:{n}") for n in (0, 1))
    both = kernel("both", I + "y[i] = x[i] + z[i];", "x", "z")
    with pytest.raises(ferrule.KernelError, match=r"cuda:0.*cuda:1"):
        call(both, a, b)


def test_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    one, x = exp(), cupy.random.rand(1000).astype(cupy.float32)
    for _ in range(3):
        y = call(one, x, init_value=0)
        assert isinstance(y, cupy.ndarray)
        cupy.testing.assert_allclose(y, cupy.exp(x), rtol=1e-5)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        doubled = x * 2
        y = call(one, doubled)
    stream.synchronize()
    cupy.testing.assert_allclose(y, cupy.exp(x * 2), rtol=1e-5)


def test_jax_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    x = jax.numpy.arange(1000, dtype=jax.numpy.float32) / 1000
    for _ in range(3):
        y = call(exp(), x, output_dtypes=[np.float32])
        np.testing.assert_allclose(np.asarray(y), np.exp(np.asarray(x)), rtol=1e-5)


def test_a_cuda_body() -> None:
    one = ferrule.cuda_kernel(
        "body", ["x"], ["y"],
        "auto i = cooperative_groups::this_grid().thread_rank(); T v = x[i]; y[i] = exp(v);",
    )  # fmt: skip
    x = torch.randn(2048, device="cuda")
    for _ in range(4):
        torch.testing.assert_close(call(one, x, template=[("T", torch.float32)]), x.exp())


# -- what breaks a process -------------------------------------------------------------------------


def said(program: str) -> str:
    """What a Python program prints, in a process of its own."""
    begin = "import os, sys, time, torch, ferrule\nfrom test_gpu import call, exp, kernel, I\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin + program], capture_output=True, text=True,
        check=False, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.stdout


def test_an_earlier_kernel_that_faulted_is_named(way: str) -> None:
    out = said(f"""
from ferrule.tools import fastcall
import contextlib
x = torch.zeros(32, device="cuda")
far = I + "device float* far = y + (1ul << 40); far[i] = x[i];"
one, wild = exp("innocent"), kernel("wild", far)
with fastcall.bypassed() if {way == "Python"} else contextlib.nullcontext():
    for _ in range(4):
        call(one, x)
    call(wild, x)
    time.sleep(0.5)
    for value in (None, 0):
        try:
            call(one, x, init_value=value)
        except ferrule.DeviceError as error:
            print(error)
""")
    first, second = out.strip().splitlines()
    for line in (first, second):
        assert "kernel before it accessed memory outside its arrays" in line, out
        assert "'innocent'" in line and "'wild'" in line and "compute-sanitizer" in line, out


def test_a_forked_child_is_told_so() -> None:
    out = said("""
x = torch.zeros(32, device="cuda")
call(exp(), x)
if os.fork() == 0:
    try:
        call(exp(), x)
    except ferrule.FerruleError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(float(call(exp(), x).sum()))
""")
    assert "forked" in out and "spawn" in out and "32.0" in out, out
