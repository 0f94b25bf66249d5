"""Adopted functions on a real GPU, through torch: JIT compilers, libraries, runners behind ids, and
a model of 32 layers. What they are adopted for is tested without a GPU in `test_adopt_torch`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import ferrule
import torch_cuda
from adopted_ops import ADOPTED, MADE, linear_weights, make_hadamard, quantised_linear, unpack
from ferrule import KernelError, Op
from ferrule.compat.runners import register_runner
from test_adopt_docs import ON_A_GPU
from test_adopt_torch import TRANSFORMS, UTILITIES, plain
from test_runners import Buffered, Experts, Linear, Writing, moe_inputs, x_of
from torch_cuda import TWO_GPUS, captured, check_replays, close, poison, tensors
from torch_ops import held, is_float, moved, rand

pytestmark = torch_cuda.MARKS
EACH = pytest.mark.parametrize("name", ADOPTED)


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def samples(name: str, device: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [moved_weights(one, device) for one in ADOPTED[name].samples(3, dtype)]


def moved_weights(values: Any, device: str) -> Any:
    """Inputs on a device, strides and all."""
    return tuple(one.to(device) if isinstance(one, torch.Tensor) else one for one in values)


# -- the test ops ----------------------------------------------------------------------------------


@EACH
def test_they_agree_with_numpy(name: str, device: str) -> None:
    for dtype in ADOPTED[name].dtypes:
        rough = dtype == torch.bfloat16
        for values in samples(name, device, dtype):
            y = ADOPTED[name].op(*values)
            assert y.dtype == dtype and y.device.type == device
            expected = ADOPTED[name].reference(*values)
            values = y.double().cpu().numpy()
            np.testing.assert_allclose(values, expected, *((3e-2, 0.2) if rough else (1e-4, 1e-4)))


def test_scales_may_be_8_bit_floats(device: str) -> None:
    w, scale = moved_weights(linear_weights(6, 32, 0, torch.float8_e4m3fn), device)
    x = rand(4, 32).to(device)
    close(quantised_linear(x, w, scale), x @ unpack(w, scale, x.dtype).T)
    check_replays(quantised_linear, lambda x, w, s: x @ unpack(w, s, x.dtype).T, (x, w, scale))


@EACH
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name: str, requires_grad: bool, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for values in samples(name, device, dtype):
            x, *rest = values
            found = torch.library.opcheck(
                ADOPTED[name].op.torch_op, (x.detach().requires_grad_(requires_grad), *rest),
                test_utils=UTILITIES, rtol=3e-2, atol=3e-2,
            )  # fmt: skip
            assert set(found.values()) == {"SUCCESS"}


@EACH
def test_gradcheck(name: str, device: str) -> None:
    x, *rest = samples(name, device, torch.float64)[1]
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ADOPTED[name].op(x, *rest), (x,),
                                    check_forward_ad=True)  # fmt: skip
    assert torch.autograd.gradgradcheck(lambda x: ADOPTED[name].op(x, *rest), (x,))


@EACH
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_transforms(name: str, transform: str, compiled: bool, device: str) -> None:
    if compiled and transform == "functionalize":
        return  # Dynamo breaks the graph there, for every function
    x, *rest = samples(name, device, torch.float64)[0]
    reference = plain(name, x, rest)
    expected = TRANSFORMS[transform](reference, x)

    def make(function: Any) -> Callable[[Any], Any]:
        def f(x: Any) -> Any:
            return TRANSFORMS[transform](function, x)

        return torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f

    try:
        found = make(lambda x: ADOPTED[name].op(x, *rest))(x)
    except Exception:
        torch.compiler.reset()
        try:
            make(reference)(x)
        except Exception as error:
            pytest.skip(f"torch {torch.__version__} cannot do that to its own operators: {error}")
        raise
    close(found, expected)


@EACH
def test_modes(name: str, device: str) -> None:
    values = samples(name, device)[0]
    expected = ADOPTED[name].reference(*values)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = ADOPTED[name].op(*values)
            np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast(device, torch.bfloat16):
        assert ADOPTED[name].op(*values).dtype == torch.float32


@EACH
def test_replays(name: str, device: str) -> None:
    for values in samples(name, device):
        if not all(one.numel() for one in values):
            continue
        values = (values[0].contiguous(), *values[1:])  # an expanded one cannot be written to
        ADOPTED[name].op(*values)
        reference = plain(name, values[0], list(values[1:]))
        graph, found = captured(lambda v=values: ADOPTED[name].op(*v))
        for factor in (0.5, -2):
            values[0].mul_(factor)
            poison(found)
            graph.replay()
            close(found, reference(values[0]))


# -- state -----------------------------------------------------------------------------------------


def hadamard_of(version: str) -> Op:
    return ferrule.adopt(
        "hadamard", "x[*S,D]:T -> y[*S,D]:T", make=make_hadamard, constants={"D": "D"},
        version=version,
    )  # fmt: skip


def test_state_is_made_per_device(device: str) -> None:
    MADE.clear()
    op = hadamard_of("per device")
    x = rand(3, 8)
    for _ in range(2):
        for place in ("cpu", device):
            close(op(x.to(place)).cpu(), op(x))
    kinds = {one for one, _, _ in MADE}
    assert kinds == {"cpu", str(x.to(device).device)} and len(MADE) == len(kinds)
    op(x.to(device).half())
    assert MADE[-1][1] == "float16" and len(MADE) == len(kinds) + 1


def test_state_is_not_made_in_a_capture(device: str) -> None:
    op, x = hadamard_of("in a capture"), rand(3, 8).to(device)
    torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    with pytest.raises(KernelError, match="Call the op once with such inputs before the capture"):
        captured(lambda: op(x))
    expected = op(x)
    graph, found = captured(lambda: op(x))
    poison(found)
    graph.replay()
    close(found, expected)


@TWO_GPUS
def test_two_gpus() -> None:
    MADE.clear()
    op = hadamard_of("two GPUs")
    x = rand(3, 8)
    for place in ("cuda:0", "cuda:1", "cuda:0"):
        y = op(x.to(place))
        assert str(y.device) == place and torch.cuda.current_device() == 0
        close(y.cpu(), op(x))
        for name in ADOPTED:
            values = samples(name, place)[0]
            close(ADOPTED[name].op(*values), plain(name, values[0], values[1:])(values[0]))
    assert {one for one, _, _ in MADE} == {"cpu", "cuda:0", "cuda:1"}
    assert max(map(MADE.count, MADE)) <= 2  # this op, and that of ADOPTED


# -- libraries -------------------------------------------------------------------------------------

RULE = "x[*S]:float32, k:float32 -> y[*S]:float32"
CUDA = (
    'extern "C" __global__ void scale(const float* x, double k, float* y, int n) {'
    " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = (float)k * x[i]; }"
)


def of_the_page(library: str) -> Op:
    """What a block of docs/adopt.md declares."""
    (block,) = [one for one in ON_A_GPU if library in one.text]
    found: dict[str, Any] = {}
    exec(compile(block.text, f"adopt.md:{block.line}", "exec"), found)  # noqa: S102
    op: Op = found["op"]
    return op


def cupy_op() -> Op:
    pytest.importorskip("cupy")
    return of_the_page("cupy")


def numba_op() -> Op:
    cuda = pytest.importorskip("numba.cuda")
    if not hasattr(np, "row_stack"):  # which numba-cuda 0.30.4 names; gone since NumPy 2.5
        pytest.skip("this Numba is for an older NumPy")
    if not cuda.is_available():
        pytest.skip("Numba finds no GPU")
    return of_the_page("numba")


def triton_op() -> Op:
    pytest.importorskip("triton")
    from triton_ops import scale

    return ferrule.adopt("triton_scale", RULE, run=scale, contiguous=True, version=1)


def tuned_op() -> Op:
    pytest.importorskip("triton")
    from triton_ops import tuned

    return ferrule.adopt("tuned_scale", RULE, run=tuned, contiguous=True, version=1)


def by_torch(*, device: str) -> Callable[..., None]:
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(CUDA, "scale")

    def run(x: Any, k: float, y: Any) -> None:
        if x.numel():
            blocks = (x.numel() + 255) // 256
            kernel(grid=(blocks, 1, 1), block=(256, 1, 1), args=(x, float(k), y, x.numel()))

    return run


def torch_op() -> Op:
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this torch has no torch.cuda._compile_kernel")
    return ferrule.adopt("torch_scale", RULE, make=by_torch, contiguous=True, version=1)


LIBRARIES = {
    "cupy": cupy_op, "numba": numba_op, "triton": triton_op, "triton tuned": tuned_op,
    "torch": torch_op,
}  # fmt: skip


@pytest.fixture(params=LIBRARIES)
def scaled(request: pytest.FixtureRequest) -> Op:
    """An op ``y = k * x`` that a library's kernel carries out."""
    op = LIBRARIES[request.param]()

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return cotangents[0] * primals[1], None

    return op


def times(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


def test_values_of_libraries(scaled: Op, device: str) -> None:
    for n in (1, 255, 4097, 100_000):
        x = rand(n).to(device)
        close(scaled(x, 2.5), x * 2.5)
        close(scaled(x[::2], -1.0), -x[::2])


def test_opcheck_of_libraries(scaled: Op, device: str) -> None:
    x = rand(50).to(device)
    for one in (x, x[::2], x.clone().requires_grad_()):
        found = torch.library.opcheck(scaled.torch_op, (one, 2.0), test_utils=UTILITIES)
        assert set(found.values()) == {"SUCCESS"}


def test_gradients_of_libraries(scaled: Op, device: str) -> None:
    x = rand(50).to(device)
    close(torch.func.grad(lambda x: scaled(x, 3.0).sin().sum())(x), 3 * torch.cos(3 * x))
    compiled = torch.compile(lambda x: scaled(x, 3.0).sin(), backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    close(found, (3 * torch.cos(3 * x)).detach())


def test_streams_of_libraries(scaled: Op, device: str) -> None:
    source = rand(1 << 20).to(device)
    scaled(source, 2.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros_like(source)
        torch.cuda._sleep(20_000_000)  # what runs on another stream finds zeros
        x.copy_(source)
        y = scaled(x, 2.0)
    side.synchronize()
    close(y, source * 2)


def test_replays_of_libraries(scaled: Op, device: str) -> None:
    x = rand(5000).to(device)
    scaled(x, 2.0)  # compiled, tuned and loaded outside of the capture
    check_replays(scaled, times, (x, 2.0))
    side = torch.cuda.Stream()  # and captured on a stream of the caller's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scaled(x, 2.0)
    torch.cuda.current_stream().wait_stream(side)
    check_replays(lambda x, k: scaled(scaled(x, k), k), lambda x, k: x * k * k, (x, 2.0))


def test_reduce_overhead_of_libraries(scaled: Op, device: str) -> None:
    counters.clear()
    compiled = torch.compile(lambda x: scaled(x.cos(), 2.0) + 1, mode="reduce-overhead")
    for n in range(5):
        x = rand(3000).to(device) + n
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(x).clone(), 2 * x.cos() + 1)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_kernel_on_another_stream_is_seen_by_poison(device: str) -> None:
    """The trap of docs/adopt.md: the capture succeeds, or is refused by CUDA; a replay that
    computes nothing is seen where the outputs were poisoned."""
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(CUDA, "scale")
    kernel.compile()

    def run(x: Any, k: float, y: Any) -> None:  # on CuPy's current stream, the null stream
        n = x.numel()
        given = (x.data_ptr(), cupy.float64(k), y.data_ptr(), cupy.int32(n))
        kernel(((n + 255) // 256,), (256,), given)

    op = ferrule.adopt("wrong_stream", RULE, run=run, version=1)
    x = rand(1000).to(device)
    close(op(x, 2.0), x * 2)  # on torch's default stream, which is the null stream, too
    torch.cuda.synchronize()
    try:
        graph, found = captured(lambda: op(x, 2.0))
    except RuntimeError:
        return
    torch.cuda.synchronize()
    poison(found)
    graph.replay()
    assert found.isnan().all()


# -- runners behind ids ----------------------------------------------------------------------------


def on(runner: Any, device: str) -> Any:
    for name, value in vars(runner).items():
        if isinstance(value, torch.Tensor):
            setattr(runner, name, value.to(device))
    return runner


@pytest.mark.parametrize("kind", [Linear, Buffered, Writing])
def test_runners(kind: Any, device: str) -> None:
    runner = on(kind(), device)
    number = register_runner(runner)
    linear = torch.ops.nvfp4.linear_gemm
    base = x_of(4, 8).to(device)
    strided = x_of(8, 4).to(device).T
    for x in (base, base[:2, None], base[0], strided, base.expand(2, 4, 8), base[:0]):
        close(linear(x, number, 6), x @ runner.weight.T, 1e-2)
        torch.library.opcheck(linear.default, (x, number, 6), test_utils=UTILITIES)
    first = linear(base, number, 6)
    linear(base * 0, number, 6)
    assert first.abs().max() > 0  # a workspace is not handed out
    check_replays(lambda x: linear(x, number, 6), lambda x: x @ runner.weight.T, (base,), 1e-2)
    counters.clear()
    compiled = torch.compile(lambda x: linear(x, number, 6) * 2, mode="reduce-overhead")
    with torch.no_grad():
        for n in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = base * n
            close(compiled(x).clone(), 2 * (x @ runner.weight.T), 1e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_runners_of_experts(device: str) -> None:
    runner = on(Experts(), device)
    number = register_runner(runner)
    hidden, weights, ids = moved(moe_inputs(), device)
    moe = torch.ops.nvfp4.moe_gemm
    close(moe(hidden, weights, ids, number, 8), runner._run_impl(hidden, weights, ids), 1e-2)
    torch.library.opcheck(moe.default, (hidden, weights, ids, number, 8), test_utils=UTILITIES)
    graph, found = captured(lambda: moe(hidden, weights, ids, number, 8))
    hidden.mul_(-0.5)
    poison(found)
    graph.replay()
    close(found, runner._run_impl(hidden, weights, ids), 1e-2)


# -- a model of 32 layers --------------------------------------------------------------------------

swish = ferrule.op(
    "swish", "x[*S]:T -> y[*S]:T",
    metal="const int i = thread_position_in_grid.x; const float v = x[i]; "
    "y[i] = T(v / (1 + metal::exp(-v)));",
    grid="x.size", threadgroup=256,
)  # fmt: skip
swish_vjp = ferrule.op(
    "swish_vjp", "x[*S]:T, cotangent[*S]:T -> x_grad[*S]:T",
    metal="const int i = thread_position_in_grid.x; const float v = x[i]; "
    "const float p = 1 / (1 + metal::exp(-v)); "
    "x_grad[i] = T(float(cotangent[i]) * p * (1 + v * (1 - p)));",
    grid="x.size", threadgroup=256,
)  # fmt: skip
swish.def_vjp(swish_vjp)


class Layer(torch.nn.Module):
    w: torch.Tensor
    scale: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        w, scale = linear_weights(32, 32, seed)
        self.register_buffer("w", w)
        self.register_buffer("scale", scale)
        self.bias = torch.nn.Parameter(rand(32) * 0.1)
        self.gain = torch.nn.Parameter(torch.full((32,), 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = swish(quantised_linear(x, self.w, self.scale) + self.bias)
        return x + y * self.gain


class PlainLayer(Layer):
    """The same in torch's operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ unpack(self.w, self.scale, x.dtype).T + self.bias
        return x + torch.nn.functional.silu(y) * self.gain


def model(layer: Any, device: str) -> torch.nn.Module:
    return torch.nn.Sequential(*(layer(seed) for seed in range(32))).to(device)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_32_layers_train_as_one_graph(backend: str, device: str) -> None:
    counter = CompileCounterWithBackend(backend)
    ours, theirs = model(Layer, device), model(PlainLayer, device)
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    steps = []
    for network, call in ((ours, compiled), (theirs, theirs)):
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
        losses = []
        for n in range(3):
            optimizer.zero_grad()
            loss = call(rand(16, 32).to(device) + 0.1 * n).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        steps.append((losses, [one.detach() for one in network.parameters()]))
    close(*steps)
    assert steps[0][0][0] != steps[0][0][1]
    assert counter.frame_count == 1
    targets = [node.target for node in counter.graphs[0].graph.nodes]
    for op in (quantised_linear, swish):
        assert targets.count(held(op)) == 32


def test_32_layers_replay_a_step_of_training(device: str) -> None:
    ours = model(Layer, device)
    theirs = model(PlainLayer, device)
    static = rand(16, 32).to(device)
    steps: list[Callable[[], torch.Tensor]] = []
    for network in (ours, theirs):
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)

        def step(network: Any = network, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss: torch.Tensor = network(static).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch's documentation has it
        for _ in range(3):
            steps[0]()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        steps[1]()
    graph, loss = captured(steps[0])
    theirs.load_state_dict(ours.state_dict())
    for n in range(3):
        static.copy_(rand(16, 32).to(device) - 0.2 * n)
        poison(loss)
        graph.replay()
        close(loss, steps[1]())
        close(*[[one.detach() for one in m.parameters()] for m in (ours, theirs)])


@torch.no_grad()
def test_32_layers_replay(device: str) -> None:
    ours, theirs = model(Layer, device), model(PlainLayer, device)
    x = rand(16, 32).to(device)
    ours(x)
    check_replays(ours, theirs, (x,))
    counters.clear()
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    for n in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(x + n).clone(), theirs(x + n))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_copy_of_a_model_has_the_same_weights(device: str) -> None:
    ours = model(Layer, device)
    x = rand(3, 32).to(device)
    again = copy.deepcopy(ours)
    assert len(ours.state_dict()) == 4 * 32
    close(again(x), ours(x))
    assert all(is_float(one) or one.dtype == torch.uint8 for one in tensors(again.state_dict()))


def test_cutedsl(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows, with a kernel of ours."""
    pytest.importorskip("cutlass.cute")
    import cute_ops

    monkeypatch.setitem(sys.modules, "mykernels", cute_ops)
    op = of_the_page("cutlass")

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return (2 * cotangents[0],)

    for rows, columns in ((1, 8), (7, 64), (300, 64), (5, 1000)):
        x = rand(rows, columns).to(device).bfloat16()
        assert torch.equal(op(x), 2 * x)
        assert torch.equal(op(x.t().contiguous().t()), 2 * x)
    x = rand(64, 128).to(device).bfloat16()
    for given in (x, x.clone().requires_grad_()):
        found = torch.library.opcheck(op.torch_op, (given,), test_utils=UTILITIES)
        assert set(found.values()) == {"SUCCESS"}
    check_replays(op, lambda x: 2 * x, (x,))
    compiled = torch.compile(lambda x: op(x.cos()) + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(x).clone().float(), (2 * x.cos() + 1).float(), 1e-2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = op(x)
    side.synchronize()
    assert torch.equal(y, 2 * x)


# -- what is kept ----------------------------------------------------------------------------------


def test_graphs_read_what_is_prepared_anew(device: str) -> None:
    op = ferrule.adopt(
        "gpu_prepared", "x[*S,K]:T, w[N,K]:T -> y[*S,N]:T", run=lambda x, w, packed: x @ packed,
        prepared={"packed": (lambda w: w.T.contiguous(), "w")},
    )  # fmt: skip
    x, w = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    with pytest.raises(KernelError, match="Call the op once with them before the capture"):
        captured(lambda: op(x, w))
    torch.cuda.synchronize()
    op(x, w)
    graph, found = captured(lambda: op(x, w))
    for _ in range(2):
        w.normal_()
        close(op(x, w), x @ w.T)
        poison(found)
        graph.replay()
        close(found, x @ w.T)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        close(op(x, w), x @ w.T)
    assert op.counts["prepare"] == 3


def test_streams_keep_their_own_state_and_graphs_none(device: str) -> None:
    def run(x: Any, calls: Any) -> Any:
        y = x + calls
        calls += 1
        return y

    op = ferrule.adopt("gpu_state", "x[N]:T -> y[N]:T", run=run, state={"calls": "T[N]"})
    x = torch.ones(3, device=device)
    assert [op(x)[0].item() for _ in range(3)] == [1, 2, 3]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert [op(x)[0].item() for _ in range(2)] == [1, 2]
    graph, found = captured(lambda: op(x))
    for _ in range(2):
        poison(found)
        graph.replay()
        assert found.tolist() == [1, 1, 1]
    assert op(x)[0].item() == 4


def test_measured_choices(device: str, tmp_path: Any) -> None:
    def make(table: Any) -> Op:
        return ferrule.op(
            "gpu_choices", "x[N]:float32 -> y[1]:int32",
            metal=[
                ferrule.metal_body("y[0] = 1;", grid=1, threadgroup=1, when=table.when("one")),
                ferrule.metal_body("y[0] = 2;", grid=1, threadgroup=1, when=table.when("two")),
            ],
        )  # fmt: skip

    options: Any = {"of": ("one", "two"), "key": ["bucket(N, 4, 64)"], "default": "one"}
    path = tmp_path / "choices.json"
    inputs = [(torch.ones(n, device=device),) for n in (4, 5)]
    table = ferrule.choices(path, **options)
    times = iter([2.0, 1.0, 1.0, 2.0])
    ferrule.measure_choices(table, make, inputs, timer=lambda run: next(times))
    op = make(ferrule.choices(path, **options))
    assert [op(x).item() for (x,) in inputs] == [2, 1]
    assert [op(x.cpu()).item() for (x,) in inputs] == [1, 1]
    assert torch.cuda.get_device_name() in path.read_text()
    measured = ferrule.measure_choices(table, make, inputs)
    assert all(set(each.seconds) == {"one", "two"} for each in measured)
