"""Kernels on the first NVIDIA GPU against who else does the same work, on torch's tensors.

Times are those of CUDA's events (`clocks`). Where the command line does not ask for another mode,
they are of blocks of calls with nothing flushed in between: what fits into the GPU's caches stays
there, for both sides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ferrule
from ferrule.cli import grid_sample as gs
from ferrule.cli import readable
from ferrule.devices import protocol as devices

from . import mlx_graph, mlx_lm, ops, sass, startup
from .clocks import Graph, wait
from .timing import Bench, Call, Peer, Timer

DEVICE = "cuda:0"
BY_HAND = "CUDA by hand"
BANDWIDTH, AS_BY_HAND = 0.95, 0.95  # of torch's copy, and of CUDA by hand
CHAIN = 10  # calls of an op, each of what the one before gave
AS_FAST = 0.99  # runs of one and the same kernel differ by as much
HALF = 2e-2  # how far results in float16 and bfloat16 may be apart


def by_hand(text: str, *, half: bool = False) -> Callable[..., None]:
    """A kernel of `twins`, which is called with its arguments, blocks and threads of a block."""
    from . import twins

    architecture = devices.get(DEVICE).architecture  # type: ignore[attr-defined]
    return twins.Twin(text, architecture, half=half)


# -- memory ----------------------------------------------------------------------------------------

_BODY = "uint i = thread_position_in_grid.x; out[i] = {};"
_FOUR = (
    "uint i = thread_position_in_grid.x;"
    " vec<T, 4> v = reinterpret_cast<const device vec<T, 4>*>(inp)[i];"
    " reinterpret_cast<device vec<T, 4>*>(out)[i] = {};"
)
BODIES = {  # with one element a thread, and with four
    "copy": (_BODY.format("inp[i]"), _FOUR.format("v")),
    "exp": (
        _BODY.format("metal::exp(inp[i])"),
        _FOUR.format("vec<T, 4>(metal::exp(float4(v)))"),
    ),
}


def elementwise(name: str, bench: Bench) -> None:
    """A kernel that reads and writes 1 GiB each, against torch's copy of as much."""
    import torch

    plain, fours = (
        ferrule.metal_kernel(f"bench_{name}_{n}", ["inp"], ["out"], body)
        for n, body in zip(("plain", "fours"), BODIES[name], strict=True)
    )
    for dtype in (torch.float32, torch.bfloat16):
        size = (1 << (16 if bench.quick else 30)) // dtype.itemsize
        x = torch.randn(size, device=DEVICE, dtype=dtype)
        copy = torch.empty_like(x)

        def run(
            kernel: Any, per_thread: int, threads: int, x: Any = x, dtype: Any = dtype
        ) -> object:
            return kernel(
                inputs=[x],
                template=[("T", dtype)],
                output_shapes=[x.shape],
                output_dtypes=[dtype],
                grid=(x.numel() // per_thread, 1, 1),
                threadgroup=(threads, 1, 1),
            )

        def copied(x: Any = x, copy: Any = copy) -> object:
            return copy.copy_(x)

        by_torch = {"copy": torch.clone, "exp": torch.exp}[name]
        for how, kernel, per_thread, threads in (
            ("", plain, 1, 256),
            (", groups of 1024", plain, 1, 1024),
            (", 4 a thread", fours, 4, 256),
        ):
            amount = readable(size * dtype.itemsize)
            work = f"{name}, {amount} of {_short(dtype)}{how}"
            peers = [Peer("torch, copy_", copied, BANDWIDTH, compared=name == "copy")]
            if kernel is plain and threads == 256:
                peers.append(Peer(f"torch.{by_torch.__name__}", partial(by_torch, x)))
            bench.compare(
                work, partial(run, kernel, per_thread, threads), peers,
                tolerance=_tolerance(dtype), moved=2 * size * dtype.itemsize,
            )  # fmt: skip


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _tolerance(dtype: Any) -> float:
    return 1e-3 if dtype.itemsize == 4 else HALF


# -- grid_sample -----------------------------------------------------------------------------------


def _sampled(bench: Bench, dtype: Any) -> tuple[Any, Any, Any]:
    """Images, points and a cotangent."""
    import torch

    batch, size, points, channels = (2, 32, 16, 64) if bench.quick else (8, 1024, 256, 64)
    torch.manual_seed(0)
    x = torch.randn(batch, size, size, channels, device=DEVICE).to(dtype)
    grid = (torch.rand(batch, points, points, 2, device=DEVICE) * 2 - 1).to(dtype)
    return x, grid, torch.randn(batch, points, points, channels, device=DEVICE).to(dtype)


def _f(x: Any, grid: Any) -> Any:
    """torch's own, of images in the same memory."""
    import torch

    seen = x.permute(0, 3, 1, 2)
    return torch.nn.functional.grid_sample(seen, grid, align_corners=False).permute(0, 2, 3, 1)


def sampling(bench: Bench) -> None:
    """The forward kernel; the sizes are those of MLX's documentation."""
    import torch

    from . import by_ops, twins

    for dtype, eager in ((torch.float32, 8.5), (torch.float16, 8.0)):
        x, grid, _ = _sampled(bench, dtype)
        kernel = by_hand(twins.FORWARD, half=dtype == torch.float16)
        shape = (*grid.shape[:3], x.shape[3])

        def twin(x: Any = x, grid: Any = grid, kernel: Any = kernel, shape: Any = shape) -> Any:
            out = torch.empty(shape, dtype=x.dtype, device=DEVICE)
            n = out.numel()
            sizes = [*x.shape[1:], *grid.shape[1:3], n]
            kernel([x, grid, out, *sizes], (-(-n // 256), 1, 1), (256, 1, 1))
            return out

        peers = [Peer(BY_HAND, twin, AS_BY_HAND)]
        peers.append(Peer("torch, op by op", partial(by_ops.sample, x, grid), eager))
        if bench.installed("triton"):
            peers.append(Peer("torch.compile", partial(by_ops.compiled(by_ops.sample), x, grid)))
        peers.append(Peer("F.grid_sample", partial(_f, x, grid)))
        bench.compare(
            f"grid_sample, x {tuple(x.shape)} {_short(dtype)}", partial(gs.sample, x, grid), peers,
            tolerance=_tolerance(dtype),
        )  # fmt: skip


def vjp(bench: Bench) -> None:
    """The derivative; its two outputs are zeroed before, on every side."""
    import torch

    from . import by_ops, twins

    for dtype, compiled in ((torch.float32, 4.7), (torch.float16, 2.0)):
        x, grid, cot = _sampled(bench, dtype)
        kernel = by_hand(twins.VJP, half=dtype == torch.float16)

        def twin(x: Any = x, grid: Any = grid, cot: Any = cot, kernel: Any = kernel) -> Any:
            x_grad, grid_grad = torch.zeros_like(x), torch.zeros_like(grid)
            padded = -(-x.shape[3] // gs.SIMDGROUP) * gs.SIMDGROUP
            n = grid.numel() // 2 * padded
            sizes = [*x.shape[1:], *grid.shape[1:3], n]
            arrays = [x, grid, cot, x_grad, grid_grad]
            kernel([*arrays, *sizes], (-(-n // 256), 1, 1), (256, 1, 1))
            return x_grad, grid_grad

        def differentiated(f: Any, x: Any = x, grid: Any = grid, cot: Any = cot) -> Any:
            a, g = x.detach().requires_grad_(), grid.detach().requires_grad_()
            return torch.autograd.grad(f(a, g), (a, g), cot)

        def recorded(f: Any, x: Any = x, grid: Any = grid, cot: Any = cot) -> Call:
            """The backward pass alone, of a forward pass that is made at the first call."""
            kept: list[Any] = []

            def run() -> Any:
                if not kept:
                    a, g = x.detach().requires_grad_(), grid.detach().requires_grad_()
                    kept.extend((f(a, g), a, g))
                out, a, g = kept
                return torch.autograd.grad(out, (a, g), cot, retain_graph=True)

            return run

        peers = [Peer(BY_HAND, twin, AS_BY_HAND)]
        peers.append(Peer("torch, op by op, backward", recorded(by_ops.sample)))
        if bench.installed("triton"):
            f = by_ops.compiled(by_ops.sample)
            peers.append(Peer("torch.compile, backward", recorded(f), compiled))
            both = "torch.compile, forward and backward"
            peers.append(Peer(both, partial(differentiated, f), compiled))
        # In float16, torch's backward pass places points in float16 too: wrongly, in images of 1024
        # pixels. Its forward pass and all the others do not.
        exact = dtype == torch.float32
        peers.append(Peer("F.grid_sample, backward", recorded(_f), compared=exact))
        bench.compare(
            f"grid_sample VJP, x {tuple(x.shape)} {_short(dtype)}",
            partial(gs.sample_vjp, x, grid, cot), peers, tolerance=_tolerance(dtype),
        )  # fmt: skip
        del peers, twin, differentiated, recorded  # what they hold: gigabytes


# -- mlx-lm ----------------------------------------------------------------------------------------

OPS = 5.0  # times as fast as torch op by op


def models(bench: Bench) -> None:
    """mlx-lm's kernels, unmodified, with the arguments that mlx-lm gives them, float32."""
    found = mlx_lm.find(bench)
    if found is not None:
        for part in (_gated_delta, _ssm, _wkv7, _bitlinear):
            part(bench, found[1])


def _normal(*shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(*shape, device=DEVICE) * scale


def _against(
    bench: Bench,
    work: str,
    kernel: Any,
    text: str,
    by_ops: Callable[..., Any],
    inputs: Sequence[Any],
    template: list[tuple[str, Any]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    shapes: Sequence[Any],
    sizes: Sequence[int],
    arrays: Sequence[Any] | None = None,
) -> None:
    """A row against CUDA by hand and one against torch.

    Args:
        bench, work: of the rows.
        kernel, inputs, template, grid, threadgroup, shapes: the call.
        text, sizes: the kernel by hand, and what it takes after the arrays.
        by_ops: the work in torch, of `arrays`.
        arrays: the inputs that are arrays, where not all are.
    """
    import torch

    given = inputs if arrays is None else arrays
    other = by_hand(text)
    blocks = tuple(-(-g // t) for g, t in zip(grid, threadgroup, strict=True))

    def ours() -> Any:
        return kernel(
            inputs=inputs, template=template, grid=grid, threadgroup=threadgroup,
            output_shapes=shapes, output_dtypes=[torch.float32] * len(shapes),
        )  # fmt: skip

    def twin() -> Any:
        outputs = [torch.empty(tuple(shape), device=DEVICE) for shape in shapes]
        other([*given, *outputs, *sizes], blocks, threadgroup)
        return outputs

    peers = [Peer(BY_HAND, twin, AS_FAST), Peer("torch, op by op", partial(by_ops, *given), OPS)]
    bench.compare(work, ours, peers)


def _gated_delta(bench: Bench, made: dict[str, Any]) -> None:
    import torch

    from . import by_ops, twins

    batch, steps, heads_k, heads, dim = (1, 4, 2, 4, 128) if bench.quick else (4, 256, 16, 32, 128)
    q, k = (_normal(batch, steps, heads_k, dim, scale=dim**-0.5) for _ in range(2))
    v = _normal(batch, steps, heads, dim)
    g = torch.rand(batch, steps, heads, device=DEVICE) * 0.2 + 0.8
    beta = torch.rand(batch, steps, heads, device=DEVICE)
    state = _normal(batch, heads, dim, dim)
    arrays = [q, k, v, g, beta, state]
    names = (("InT", torch.float32), ("StT", torch.float32), ("Dk", dim), ("Dv", dim))
    _against(
        bench, f"gated delta, {batch} x {steps} steps, {heads} heads of {dim}",
        made["gated_delta_step_packed_btree"], twins.GATED_DELTA, by_ops.gated_delta,
        [*arrays, steps], [*names, ("Hk", heads_k), ("Hv", heads)], (32, dim // 8, batch * heads),
        (32, 2, 1), [v.shape, state.shape], [steps, heads_k, heads, dim], arrays,
    )  # fmt: skip


def _ssm(bench: Bench, made: dict[str, Any]) -> None:
    import torch

    from . import by_ops, twins

    batch, heads, dim, width = (2, 4, 16, 128) if bench.quick else (64, 64, 64, 128)
    x, dt = _normal(batch, 1, heads, dim), torch.rand(batch, 1, heads, device=DEVICE)
    a_log, d = _normal(heads), _normal(heads)
    b, c = (_normal(batch, 1, 1, width) for _ in range(2))
    state = _normal(batch, heads, dim, width)
    names = (("T", torch.float32), ("U", torch.float32), ("Dh", dim), ("Ds", width))
    _against(
        bench, f"SSM update, batch {batch}, {heads} heads of {dim}x{width}", made["ssm_kernel"],
        twins.SSM, by_ops.ssm, [x, a_log, b, c, d, dt, state],
        [*names, ("H", heads), ("G", heads)], (32, dim, heads * batch), (32, 8, 1),
        [x.shape, state.shape], [heads, dim],
    )  # fmt: skip


def _wkv7(bench: Bench, made: dict[str, Any]) -> None:
    import torch

    from . import by_ops, twins

    batch, steps, heads, dim = (1, 4, 2, 64) if bench.quick else (4, 256, 32, 64)
    r, k, v = (_normal(batch, steps, heads, dim) for _ in range(3))
    w = torch.rand(batch, steps, heads, dim, device=DEVICE) * 0.5 + 0.5
    a, b = (_normal(batch, steps, heads, dim, scale=0.3 * dim**-0.5) for _ in range(2))
    state = _normal(batch, heads, dim, dim)
    arrays = [r, w, k, v, a, b, state]
    _against(
        bench, f"RWKV-7, {batch} x {steps} steps, {heads} heads of {dim}", made["wkv7_kernel"],
        twins.WKV7, by_ops.wkv7, [*arrays, steps],
        [("InT", torch.float32), ("H", heads), ("D", dim)], (32, dim, batch * heads), (32, 4, 1),
        [r.shape, state.shape], [steps, heads], arrays,
    )  # fmt: skip


def _bitlinear(bench: Bench, made: dict[str, Any]) -> None:
    import torch

    from . import by_ops, twins

    batch, inputs, outputs = (2, 256, 64) if bench.quick else (1, 4096, 14336)
    x = _normal(batch, inputs)
    trits = torch.randint(0, 3, (4, outputs // 4, inputs), device=DEVICE, dtype=torch.uint8)
    packed = trits[0] | trits[1] << 2 | trits[2] << 4 | trits[3] << 6
    template = [
        ("T", torch.float32), ("invert_weight_scales", False), ("in_features", inputs),
        ("out_features", outputs),
    ]  # fmt: skip
    _against(
        bench, f"BitLinear, x ({batch}, {inputs}), {outputs} outputs", made["bitlinear_matmul"],
        twins.BITLINEAR, by_ops.bitlinear, [x, packed, torch.tensor([1.75], device=DEVICE)],
        template, (32, batch * outputs // 4, 1), (32, 1, 1), [(batch, outputs)], [inputs, outputs],
    )  # fmt: skip


# -- the host's time -------------------------------------------------------------------------------

_RAW = """extern "C" __global__ void bench_exp(const float* x, float* y, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = expf(x[i]);
}"""


def host(bench: Bench) -> None:
    """What a call costs Python: exp of 1024 float32, calls after calls, one wait at the end."""
    import torch

    x = torch.randn(1024, device=DEVICE)
    kernel = ferrule.metal_kernel("bench_host", ["inp"], ["out"], BODIES["exp"][0])

    def ours() -> object:
        return kernel(
            inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(1024, 1, 1),
            threadgroup=(256, 1, 1),
        )  # fmt: skip

    peers = [Peer("torch.exp", lambda: torch.exp(x)), *launchers(bench, x)[:2]]
    with bursts(bench):
        bench.compare("one call, exp of 1024 float32, host time", ours, peers)


def launchers(bench: Bench, x: Any, cupy_target: float | None = None) -> list[Peer]:
    """exp of a tensor by others who launch a kernel that they are given, allocation included."""
    import torch

    peers = []
    if bench.installed("triton"):
        from . import triton_exp

        peers.append(Peer("Triton", lambda: triton_exp.exp(x), 1.0))
    if bench.installed("cupy"):
        import cupy
        import numpy as np

        raw = cupy.RawKernel(_RAW, "bench_exp")
        given, n = cupy.asarray(x), np.uint32(1024)

        def by_cupy() -> object:
            out = cupy.empty_like(given)
            raw((4,), (256,), (given, out, n))
            return out

        peers.append(Peer("CuPy, RawKernel", by_cupy, cupy_target, compared=False))
    if torch.version.cuda and hasattr(torch.cuda, "_compile_kernel"):
        compiled = torch.cuda._compile_kernel(_RAW, "bench_exp")

        def by_torch() -> object:
            out = torch.empty_like(x)
            compiled(grid=(4, 1, 1), block=(256, 1, 1), args=(x, out, 1024))
            return out

        peers.append(Peer("torch.cuda._compile_kernel", by_torch, 1.0))
    return peers


@contextlib.contextmanager
def bursts(bench: Bench) -> Iterator[None]:
    """Time calls after calls with one wait at the end: what they cost the host."""

    def clock(function: Call) -> float:
        calls = 20 if bench.quick else 2000
        for _ in range(calls // 10):
            function()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - start) / calls

    with bench.timed(Timer("host", lambda call: partial(clock, call))):
        yield


# -- ops -------------------------------------------------------------------------------------------


def graphs(bench: Bench) -> None:
    """Nodes of MLX's graphs, where MLX has CUDA."""
    if bench.installed("mlx"):
        import mlx.core as mx

        if mx.default_device() != mx.Device(mx.gpu):
            bench.leave_out("MLX has no CUDA here: its rows are left out")
            return
        with bench.timed(bench.by_wall):
            mlx_graph.nodes(bench)


def operators(bench: Bench) -> None:
    """An op in torch: what an eager call costs the host, and what is left of that in a graph."""
    import torch

    from . import twins

    x = torch.randn(1024, device=DEVICE)
    exp = ops.exp()
    with bursts(bench), torch.no_grad():
        bench.compare(
            "one call of an op, exp of 1024 float32, host time", lambda: exp(x),
            [*ops.operators(x), *launchers(bench, x, 1.0)],
        )  # fmt: skip
    large = torch.randn(1 << (14 if bench.quick else 24), device=DEVICE)
    outs = [torch.empty_like(large) for _ in range(2)]
    twin = by_hand(twins.EXP)
    blocks = (large.numel() // 256, 1, 1)

    def ours() -> Any:
        y = exp(large)
        for _ in range(CHAIN - 1):
            y = exp(y)
        return y

    def written() -> Any:
        y = large
        for n in range(CHAIN):
            twin([y, outs[n % 2], large.numel()], blocks, (256, 1, 1))
            y = outs[n % 2]
        return y

    # Each call reads what the one before wrote. exp of exp of exp is soon infinite.
    work = f"{CHAIN} calls of an op {{}}, exp of {large.numel()} float32"
    peer = Peer(BY_HAND, Graph([written]), AS_FAST, compared=False)
    bench.compare(work.format("in a CUDA graph"), Graph([ours]), [peer])
    if not bench.quick:
        packaged = ops.packaged(exp, large, CHAIN)
        peer = Peer(BY_HAND, written, AS_FAST, compared=False)
        bench.compare(work.format("in a package"), lambda: packaged(large), [peer])


GROUPS: dict[str, Callable[[Bench], None]] = {
    **{name: partial(elementwise, name) for name in BODIES},
    "grid_sample": sampling,
    "grid_sample VJP": vjp,
    "mlx-graph": graphs,
    "mlx-lm": models,
    "host": host,
    "operators": operators,
    "startup": startup.on_cuda,
}
WITHOUT_GPU: dict[str, Callable[[Bench], None]] = {"instructions": sass.count}
