"""Ops on a real GPU, through torch: eager in C and in Python, compiled, in graphs, on streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import ferrule
from ferrule import Op

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),
    # Of torch's own: inductor's imports, and the first graph of a pool, which is empty.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def scale(name: str = "scale") -> Op:
    op = ferrule.op(
        name, "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=I + "y[i] = x[i] * w[i % D];",
        grid="x.size", threadgroup=256,
    )  # fmt: skip

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (x, w), (c,) = primals, cotangents
        return c * w, (c * x).reshape(-1, x.shape[-1]).sum(0)

    op.def_vjp(vjp)
    return op


@pytest.fixture(params=["C", "Python"])
def call(request: pytest.FixtureRequest) -> Any:
    """Calls an op as it is, or by the Python that serves where C does not."""
    if request.param == "C":
        return lambda op, *values: op(*values)
    return lambda op, *values: op.torch_op and op._operator.run(*values)


@pytest.mark.parametrize("size", [1, 255, 100_003, 3 << 20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_elements(call: Any, size: int, dtype: str) -> None:
    op = scale()
    w = torch.randn(7, device="cuda").to(getattr(torch, dtype))
    for n in range(3):
        x = torch.randn(-(-size // 7), 7, device="cuda").to(w.dtype) + n
        assert torch.equal(call(op, x, w), x * w)


def test_numbers_options_and_layouts(call: Any) -> None:
    op = ferrule.op(
        "affine", "x[N,K]:T, b[K]:T?, s:float32, n:int8, flip:bool -> y[N,K]:T",
        metal=I + "T v = x[i] * T(s) + T(n); if (has_b) v += b[i % K]; y[i] = flip ? T(-v) : v;",
        grid="x.size", threadgroup=32,
    )  # fmt: skip
    base = torch.randn(40, 6, device="cuda")
    b = torch.randn(7, device="cuda")[1:]  # not aligned to 16 bytes
    for x in (base, base.t()[:, :6].contiguous().t(), base[::2], base[:1].expand(5, 6)):
        k = x.shape[1]
        bias = b[:k]
        assert torch.allclose(call(op, x, None, 2.0, -3, False), x * 2 - 3)
        assert torch.allclose(call(op, x, bias, 0.5, 3, True), -(x * 0.5 + 3 + bias))
    for value in range(-5, 5):
        found = call(op, base, None, float(value), value, False)
        assert torch.allclose(found, base * value + value, atol=1e-6)  # one rounding less


def test_outputs_that_are_zeroed_and_inputs_written_in_place(call: Any) -> None:
    sums = ferrule.op(
        "sums", "x[N]:float32 -> total[1]:float32",
        metal=I + "atomic_fetch_add_explicit(&total[0], x[i], memory_order_relaxed);",
        grid="N", threadgroup=64, atomic_outputs=True, init_value=0,
    )  # fmt: skip
    for n in (1000, 1000, 0, 17):
        assert call(sums, torch.ones(n, device="cuda")).tolist() == [n]
    put = ferrule.op(
        "put", "c[B,L]:T!, v[B]:T, at:uint16 -> was[B]:T",
        metal=I + "was[i] = c[i * L + at]; c[i * L + at] = v[i];", grid="B", threadgroup=16,
    )  # fmt: skip
    whole = torch.zeros(8, 5, device="cuda")
    for c in (whole[:4], whole[::2]):
        v = torch.arange(4.0, device="cuda")
        before = c[:, 3].clone()
        assert torch.equal(call(put, c, v + 1, 3), before)
        assert torch.equal(c[:, 3], v + 1)


def test_errors_come_before_the_launch(call: Any) -> None:
    op = scale()
    x = torch.ones(2, 3, device="cuda")
    with pytest.raises(ferrule.KernelError, match="whose dim 0 is 4, but D is 3"):
        call(op, x, torch.ones(4, device="cuda"))
    with pytest.raises(ferrule.KernelError, match="expected one device"):
        call(op, x, torch.ones(3))
    assert torch.equal(call(op, x, torch.ones(3, device="cuda")), x)


def test_streams() -> None:
    op = scale()
    w = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.full((1 << 20, 8), 3.0, device="cuda")
        for _ in range(20):
            x = op(x, w)
        found = x.sum()
    side.synchronize()
    assert found.item() == 3 * 8 * (1 << 20)


def test_threads_and_devices() -> None:
    op = scale()
    wrong: list[object] = []
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())]

    def work(n: int) -> None:
        device = devices[n % len(devices)]
        w = torch.full((5,), float(n), device=device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x = torch.ones(100 + n, 5, device=device)
            for _ in range(300):
                y = op(x, w)
            if y.device != x.device or not bool((y == n).all()):
                wrong.append((n, y))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.cuda.current_device() == 0


def test_graphs_by_hand() -> None:
    op = scale()
    w = torch.full((6,), 2.0, device="cuda")
    x = torch.ones(50, 6, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call of this op ever
        y = op(op(x, w), w)
    for value in (1.0, 5.0):
        y.fill_(-1)
        x.fill_(value)
        graph.replay()
        assert y.eq(4 * value).all()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(mode: str | None) -> None:
    op = scale()

    @torch.compile(fullgraph=True, mode=mode)
    def model(x: Any, w: Any) -> Any:
        return op(op(x.sin(), w), w).cos()

    for _ in range(3):
        x = torch.randn(33, 6, device="cuda")
        w = torch.randn(6, device="cuda", requires_grad=True)
        found = model(x, w)
        expected = (x.sin() * w * w).cos()
        assert torch.allclose(found, expected, atol=1e-5)
        (ours,) = torch.autograd.grad(found.sum(), w)
        (theirs,) = torch.autograd.grad(expected.sum(), w)
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_opcheck() -> None:
    op = scale()
    x, w = torch.randn(4, 3, device="cuda"), torch.randn(3, device="cuda")
    for grad in (False, True):
        given = (x.clone().requires_grad_(grad), w.clone().requires_grad_(grad))
        found = torch.library.opcheck(op.torch_op, given)
        assert set(found.values()) == {"SUCCESS"}


def test_memory_returns() -> None:
    op = scale()
    x, w = torch.randn(64, 64, device="cuda").t(), torch.randn(64, device="cuda")
    op(x, w)
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        op(x, w)
    assert torch.cuda.memory_allocated() == before


def test_a_cuda_body_is_preferred() -> None:
    op = ferrule.op(
        "both", "x[N]:T -> y[N]:T", metal=I + "y[i] = 1;",
        cuda="int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < N) y[i] = x[i] + T(2);",
        grid="N", threadgroup=128,
    )  # fmt: skip
    for n in (5, 1000):
        x = torch.arange(n, device="cuda").float()
        assert torch.equal(op(x), x + 2)
        assert op.using("metal")(x).eq(1).all()
    report = ferrule.compare(op, torch.zeros(4, device="cuda"))
    assert report.largest == 1
