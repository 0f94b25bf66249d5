"""Ops that the tests of torch share: each with sample inputs and the same in torch's operators.

One entry of `CASES` makes an op a part of every test that is for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ferrule
from ferrule.cli.grid_sample import FORWARD, VJP

I = "const int i = thread_position_in_grid.x; "  # noqa: E741
Inputs = tuple[Any, ...]


class Case(NamedTuple):
    """An op, and what it should do.

    Attributes:
        name: what tests call it.
        op: the op.
        reference: the same function, in torch's operators.
        samples: inputs, the usual ones first; others are of sizes 0 and 1, or leave some out.
        sized: the same for other sizes, of which the first is that of a batch.
        equalities: how many pairs of sizes the rule says are equal, in a call of these.
        orders: how often it can be differentiated backwards.
        forward: whether it can be differentiated forwards, and its derivative, too.
        mutates: it writes to an input.
        double: it computes in float64, where it is given that.
    """

    name: str
    op: ferrule.Op
    reference: Callable[..., Any]
    samples: Callable[[], list[Inputs]]
    sized: Callable[[int, int], Inputs]
    equalities: int
    orders: int = 2
    forward: bool = True
    mutates: bool = False
    double: bool = False

    def floats(self) -> tuple[int, ...]:
        """Which inputs of the usual call may have a derivative."""
        return tuple(i for i, one in enumerate(self.samples()[0]) if is_float(one))


def is_float(one: object) -> bool:
    """Whether something is a tensor of floats."""
    return isinstance(one, torch.Tensor) and one.is_floating_point()


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers from -1 to 1, the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1


# -- the documentation's: forward and its vjp with atomics, matched by name ------------------------

grid_sample = ferrule.op(
    "grid_sample", "x[B,H,W,C]:T, grid[B,N,M,2]:T -> out[B,N,M,C]:T",
    metal=FORWARD, grid="B*N*M*C", threadgroup=256, batch="B",
)  # fmt: skip
grid_sample_vjp = ferrule.op(
    "grid_sample_vjp",
    "x[B,H,W,C]:T, grid[B,N,M,2]:T, cotangent[B,N,M,C]:T "
    "-> x_grad[B,H,W,C]:T, grid_grad[B,N,M,2]:T",
    metal=VJP, grid="B*N*M*ceildiv(C,32)*32", threadgroup=256, atomic_outputs=True, init_value=0,
    batch="B",
)  # fmt: skip
grid_sample.def_vjp(grid_sample_vjp)


def grid_sample_reference(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grid_sample(
        x.movedim(-1, 1), grid, mode="bilinear", padding_mode="zeros", align_corners=False
    ).movedim(1, -1)


def grid_sample_samples() -> list[Inputs]:
    sizes = [(2, 4, 5, 3, 3, 2), (1, 3, 3, 1, 1, 1), (1, 2, 3, 40, 2, 1)]
    return [
        (rand(b, h, w, c), 1.2 * rand(b, n, m, 2)) for b, h, w, c, n, m in sizes
    ]  # torch's own refuses images without pixels


# -- attention: any number of dims in front, derivatives as Python functions -----------------------

attention = ferrule.op(
    "attention", "q[*S,L,D]:T, k[*S,M,D]:T, v[*S,M,D]:T, scale:float32 -> o[*S,L,D]:T",
    metal=I + """
    const int row = i / D, first = row / L * M;
    float top = -INFINITY;
    for (int m = 0; m < M; ++m) {
        float dot = 0;
        for (int d = 0; d < D; ++d)
            dot += float(q[row * D + d]) * float(k[(first + m) * D + d]);
        top = metal::max(top, dot * scale);
    }
    float total = 0, sum = 0;
    for (int m = 0; m < M; ++m) {
        float dot = 0;
        for (int d = 0; d < D; ++d)
            dot += float(q[row * D + d]) * float(k[(first + m) * D + d]);
        const float weight = metal::exp(dot * scale - top);
        total += weight;
        sum += weight * float(v[(first + m) * D + i % D]);
    }
    o[i] = T(M > 0 ? sum / total : 0.0f);
    """,
    grid="q.size", threadgroup=128, autocast="cast",
)  # fmt: skip


@attention.def_vjp
def attention_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    q, k, v, scale = primals
    (g,), (o,) = cotangents, outputs
    weights = torch.softmax(q @ k.mT * scale, -1)
    slopes = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
    return slopes @ k, slopes.mT @ q, weights.mT @ g, None


@attention.def_jvp
def attention_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    q, k, v, scale = primals
    dq, dk, dv = (
        torch.zeros_like(p) if t is None else t
        for p, t in zip((q, k, v), tangents[:3], strict=True)
    )
    weights = torch.softmax(q @ k.mT * scale, -1)
    slopes = weights * (dq @ k.mT + q @ dk.mT) * scale
    return slopes @ v - slopes.sum(-1, keepdim=True) * outputs[0] + weights @ dv


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    return torch.softmax(q @ k.mT * scale, -1) @ v


def attention_samples() -> list[Inputs]:
    sizes = [((2, 2), 3, 5, 4), ((), 1, 1, 1), ((2, 0), 3, 5, 4), ((3,), 2, 0, 2)]
    return [
        (rand(*s, n, d), rand(*s, m, d), rand(*s, m, d) + 1, 0.5) for s, n, m, d in sizes
    ]  # fmt: skip


# -- two outputs; the first and the second derivative are ops --------------------------------------

moments = ferrule.op(
    "moments", "x[*S,D]:T -> mean[*S]:T, variance[*S]:T",
    metal=I + """
    T sum = 0, squares = 0;
    for (int d = 0; d < D; ++d) sum += x[i * D + d];
    const T middle = sum / D;
    for (int d = 0; d < D; ++d) squares += (x[i * D + d] - middle) * (x[i * D + d] - middle);
    mean[i] = middle;
    variance[i] = squares / D;
    """,
    grid="mean.size", threadgroup=32,
)  # fmt: skip
moments_vjp = ferrule.op(
    "moments_vjp",
    "x[*S,D]:T, mean[*S]:T, mean_cotangent[*S]:T, variance_cotangent[*S]:T -> x_grad[*S,D]:T",
    metal=I + "const int s = i / D; "
    "x_grad[i] = (mean_cotangent[s] + 2 * (x[i] - mean[s]) * variance_cotangent[s]) / D;",
    grid="x.size", threadgroup=32,
)  # fmt: skip
moments_vjp_vjp = ferrule.op(
    "moments_vjp_vjp",
    "x[*S,D]:T, mean[*S]:T, variance_cotangent[*S]:T, cotangent[*S,D]:T -> "
    "x_grad[*S,D]:T, mean_grad[*S]:T, mean_cotangent_grad[*S]:T, variance_cotangent_grad[*S]:T",
    metal=I + """
    const T slope = 2 * variance_cotangent[i] / D;
    T sum = 0, product = 0;
    for (int d = 0; d < D; ++d) {
        const T g = cotangent[i * D + d];
        x_grad[i * D + d] = slope * g;
        sum += g;
        product += 2 * g * (x[i * D + d] - mean[i]);
    }
    mean_grad[i] = -slope * sum;
    mean_cotangent_grad[i] = sum / D;
    variance_cotangent_grad[i] = product / D;
    """,
    grid="mean.size", threadgroup=32,
)  # fmt: skip
moments_jvp = ferrule.op(
    "moments_jvp",
    "x[*S,D]:T, mean[*S]:T, x_tangent[*S,D]:T -> mean_tangent[*S]:T, variance_tangent[*S]:T",
    metal=I + """
    T sum = 0, product = 0;
    for (int d = 0; d < D; ++d) {
        sum += x_tangent[i * D + d];
        product += 2 * x_tangent[i * D + d] * (x[i * D + d] - mean[i]);
    }
    mean_tangent[i] = sum / D;
    variance_tangent[i] = product / D;
    """,
    grid="mean.size", threadgroup=32,
)  # fmt: skip


@moments_vjp.def_jvp
def moments_vjp_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    x, mean, _, slope = primals
    dx, dmean, dc, dslope = (
        torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)
    )
    varied = (dx - dmean[..., None]) * slope[..., None] + (x - mean[..., None]) * dslope[..., None]
    return (dc[..., None] + 2 * varied) / x.shape[-1]


@moments_jvp.def_vjp
def moments_jvp_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    x, mean, dx = primals
    g, h = (one[..., None] / x.shape[-1] for one in cotangents)
    return 2 * h * dx, -2 * (h * dx).sum(-1), g + 2 * h * (x - mean[..., None])


@moments_jvp.def_jvp
def moments_jvp_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> Inputs:
    x, mean, dx = primals
    ex, emean, edx = (
        torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)
    )
    varied = edx * (x - mean[..., None]) + dx * (ex - emean[..., None])
    return edx.mean(-1), 2 * varied.mean(-1)


moments_vjp.def_vjp(moments_vjp_vjp)
moments.def_vjp(moments_vjp)
moments.def_jvp(moments_jvp)


def moments_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.mean(-1)
    return mean, ((x - mean[..., None]) ** 2).mean(-1)


def moments_samples() -> list[Inputs]:
    return [(rand(*shape),) for shape in ((2, 3, 4), (1,), (0, 3), (2, 1))]


# -- an input that may be None, and numbers --------------------------------------------------------

affine = ferrule.op(
    "affine", "x[N,K]:T, b[K]:T?, s:float32, n:int32, flip:bool -> y[N,K]:T",
    metal=I + "T v = x[i] * x[i] * s + n; if (has_b) v += b[i % K]; y[i] = flip ? -v : v;",
    grid="x.size", threadgroup=32, batch="N",
)  # fmt: skip


@affine.def_vjp
def affine_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    x, b, s, _, flip = primals
    g = -cotangents[0] if flip else cotangents[0]
    return 2 * g * s * x, None if b is None else g.sum(0), None, None, None


@affine.def_jvp
def affine_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    x, _, s, _, flip = primals
    found = torch.zeros_like(x) if tangents[0] is None else 2 * s * x * tangents[0]
    if tangents[1] is not None:
        found = found + tangents[1]
    return -found if flip else found


def affine_reference(
    x: torch.Tensor, b: torch.Tensor | None, s: float, n: int, flip: bool
) -> torch.Tensor:
    y = x * x * s + n
    if b is not None:
        y = y + b
    return -y if flip else y


def affine_samples() -> list[Inputs]:
    return [
        (rand(3, 4), rand(4), 0.5, 2, True), (rand(3, 4), None, 2.0, -1, False),
        (rand(1, 1), rand(1), 0.0, 0, True), (rand(0, 2), rand(2), 1.0, 1, False),
    ]  # fmt: skip


# -- what is written in place ----------------------------------------------------------------------

put = ferrule.op(
    "put", "cache[B,L,D]:T!, row[B,D]:T, at:int32 -> length[B]:int32",
    metal=I + "cache[(i / D * L + at) * D + i % D] = row[i]; if (i % D == 0) length[i / D] = at+1;",
    grid="B*D", threadgroup=64,
)  # fmt: skip


def put_reference(cache: torch.Tensor, row: torch.Tensor, at: int) -> torch.Tensor:
    cache[:, at] = row
    return torch.full((cache.shape[0],), at + 1, dtype=torch.int32, device=cache.device)


def put_samples() -> list[Inputs]:
    return [(rand(b, n, d), rand(b, d), n - 1) for b, n, d in ((2, 4, 3), (1, 1, 1), (0, 3, 2))]


# -- a function of torch, in any float dtype -------------------------------------------------------


def run_gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x * w)


gate = ferrule.op("gate", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", run=run_gate)


@gate.def_vjp
def gate_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    x, w = primals
    (g,) = cotangents
    p = torch.sigmoid(x * w)
    inner = g * x * p * (1 - p)
    return g * p + inner * w, (inner * x).sum(tuple(range(x.ndim - 1))) if x.ndim > 1 else inner * x


@gate.def_jvp
def gate_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    x, w = primals
    dx, dw = (
        torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True)
    )
    p = torch.sigmoid(x * w)
    return dx * p + x * p * (1 - p) * (dx * w + x * dw)


def gate_samples() -> list[Inputs]:
    return [
        (rand(*shape), rand(shape[-1]) + 1) for shape in ((2, 3, 4), (1,), (2, 0), (0, 3), (2, 1))
    ]


# -- without derivatives ---------------------------------------------------------------------------

plain = ferrule.op(
    "plain", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=I + "y[i] = x[i] * w[i % D];", grid="x.size",
    threadgroup=64,
)  # fmt: skip


def plain_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


CASES = [
    Case(
        "grid_sample", grid_sample, grid_sample_reference, grid_sample_samples,
        lambda a, b: (rand(a, b, 5, 3), rand(a, 4, b, 2)), 2, orders=1, forward=False,
    ),
    Case(
        "attention", attention, attention_reference, attention_samples,
        lambda a, b: (rand(a, 2, b, 4), rand(a, 2, b + 1, 4), rand(a, 2, b + 1, 4), 0.5), 7,
    ),
    Case(
        "moments", moments, moments_reference, moments_samples, lambda a, b: (rand(a, b, 4),), 0,
        double=True,
    ),
    Case(
        "affine", affine, affine_reference, affine_samples,
        lambda a, b: (rand(a, b), rand(b), 0.5, 3, True), 1, double=True,
    ),
    Case(
        "put", put, put_reference, put_samples, lambda a, b: (rand(a, b, 3), rand(a, 3), 1), 2,
        orders=0, forward=False, mutates=True,
    ),
    Case(
        "gate", gate, run_gate, gate_samples, lambda a, b: (rand(a, b, 4), rand(4)), 1,
        double=True,
    ),
    Case(
        "plain", plain, plain_reference, gate_samples, lambda a, b: (rand(a, b, 4), rand(4)), 1,
        orders=0, forward=False,
    ),
]  # fmt: skip
EACH = {case.name: case for case in CASES}
DIFFERENTIABLE = [case for case in CASES if case.orders]


def cloned(inputs: Inputs) -> Inputs:
    """Inputs that can be written to."""
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in inputs)


def moved(inputs: Inputs, device: str, dtype: torch.dtype | None = None) -> Inputs:
    """The same on a device, floats in a dtype; what is no tensor stays."""
    return tuple(
        one if not isinstance(one, torch.Tensor)
        else one.to(device, dtype if is_float(one) else None) for one in inputs
    )  # fmt: skip


def equal(found: Any, expected: Any) -> None:
    """Fail unless two results are nearly the same, in shape and dtype, too."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def strided(inputs: Inputs) -> Inputs:
    """The same values, every other element of memory; what has no dims stays."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        apart = value.new_empty((*value.shape, 2))
        apart[..., 0] = value
        return apart[..., 0]

    return tuple(map(one, inputs))


def transposed(inputs: Inputs) -> Inputs:
    """The same values, the last dim first in memory."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return value
        return value.movedim(-1, 0).contiguous().movedim(0, -1)

    return tuple(map(one, inputs))


def expanded(inputs: Inputs) -> Inputs:
    """The first along the first dim, repeated without memory."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim or not value.shape[0]:
            return value
        return value[:1].expand_as(value)

    return tuple(map(one, inputs))


def held(op: ferrule.Op) -> Any:
    """What Dynamo's graphs hold of an op: its operator, or what stands around one with a rule in
    Python."""
    return op._operator.traced if op.traces_python() else op.torch_op
