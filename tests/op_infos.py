"""OpInfos: the descriptions by which torch's own tests learn of an op and of its inputs.

`shared` are the test ops of all suites; `further` are ops that only these tests need, for what the
others lack: outputs that are integers, a derivative that reads the output, an input that is
absent, batches call by call and by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import ferrule
from adopted_ops import ADOPTED
from torch_ops import CASES, Case, I, Inputs, cloned, is_float, rand

FLOATS = (torch.float32, torch.float64)


def of_case(case: Case, prefix: str = "") -> Any:
    """The OpInfo of a test op."""
    return described(
        prefix + case.name, case.op, lambda _: case.samples(), orders=case.orders,
        forward=case.forward, dtypes=FLOATS if case.double else FLOATS[:1],
    )  # fmt: skip


def described(
    name: str, op: ferrule.Op, samples: Callable[[torch.dtype], Sequence[Inputs]], *,
    orders: int = 2, forward: bool = True, dtypes: Sequence[torch.dtype] = FLOATS,
    differentiable: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """An OpInfo.

    Args:
        name: what the tests call it.
        op: the op.
        samples: makes inputs for a dtype; floats among them may have another one.
        orders: how often it can be differentiated backwards.
        forward: whether it can be differentiated forwards, and so can its derivative.
        dtypes: of its floats.
        differentiable: the places of the inputs that have a gradient; all floats if None.
    """

    def sample(info: Any, device: Any, dtype: Any, requires_grad: bool, **_: Any) -> Iterator[Any]:
        for inputs in samples(dtype):
            given = [
                one.to(device, dtype).requires_grad_(requires_grad)
                if is_float(one) and (differentiable is None or i in differentiable)
                else one.to(device)
                if isinstance(one, torch.Tensor)
                else one
                for i, one in enumerate(cloned(inputs))
            ]
            yield SampleInput(given[0], args=tuple(given[1:]))

    return OpInfo(
        name, op=op, sample_inputs_func=sample, dtypes=set(dtypes), supports_out=False,
        supports_autograd=orders > 0, supports_forward_ad=forward, supports_gradgrad=orders > 1,
        supports_fwgrad_bwgrad=orders > 1 and forward,
    )  # fmt: skip


def shared(prefix: str = "") -> list[Any]:
    """OpInfos of the ops that all suites test."""
    cases = [of_case(case, prefix) for case in CASES]
    adopted = [
        described(prefix + name, one.op, partial(one.samples, 0), differentiable=one.differentiable)
        for name, one in ADOPTED.items()
    ]
    return cases + adopted


# -- a derivative that reads the output; of all orders, in Metal -----------------------------------

exponential = ferrule.op(
    "exponential", "x[*S]:T -> y[*S]:T", metal=I + "y[i] = metal::precise::exp(x[i]);",
    grid="x.size", threadgroup=64,
)  # fmt: skip
product = ferrule.op(
    "product", "a[*S]:T, b[*S]:T -> y[*S]:T", metal=I + "y[i] = a[i] * b[i];", grid="y.size",
    threadgroup=64,
)  # fmt: skip


@product.def_vjp
def product_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    return product(cotangents[0], primals[1]), product(cotangents[0], primals[0])


@product.def_jvp
def product_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    a, b = (torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents, strict=True))
    return product(a, primals[1]) + product(primals[0], b)


@exponential.def_vjp
def exponential_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    return (product(cotangents[0], outputs[0]),)


@exponential.def_jvp
def exponential_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    return product(tangents[0], outputs[0])


# -- outputs that are integers, which a derivative is not asked for --------------------------------


def run_sort(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = np.argsort(x.cpu().numpy(), axis=-1)
    inverse = np.argsort(index, axis=-1)
    found = np.take_along_axis(x.cpu().numpy(), index, axis=-1)
    return tuple(torch.tensor(one, device=x.device) for one in (found, index, inverse))


def run_take(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    found = np.take_along_axis(x.cpu().numpy(), index.cpu().numpy(), axis=-1)
    return torch.tensor(found, device=x.device)


ordered = ferrule.adopt(
    "ordered", "x[*S,D]:T -> y[*S,D]:T, index[*S,D]:int64, inverse[*S,D]:int64", run=run_sort
)
take = ferrule.adopt(
    "take", "x[*S,D]:T, index[*S,D]:int64, inverse[*S,D]:int64 -> y[*S,D]:T", run=run_take
)


@take.def_vjp
def take_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    return take(cotangents[0], primals[2], primals[1]), None, None


@take.def_jvp
def take_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    return take(tangents[0], primals[1], primals[2])


@ordered.def_vjp
def ordered_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    return (take(cotangents[0], outputs[2], outputs[1]),)


@ordered.def_jvp
def ordered_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> Inputs:
    return take(tangents[0], outputs[1], outputs[2]), None, None


def take_samples(dtype: torch.dtype) -> list[Inputs]:
    found = []
    for shape in ((3, 5), (2, 1, 4), (1,), (0, 3)):
        x = rand(*shape, dtype=dtype)
        _, index, inverse = run_sort(x)
        found.append((x, index, inverse))
    return found


# -- batches call by call, and by rules ------------------------------------------------------------


def running_sum(name: str, dims: str, batch: str = "") -> ferrule.Op:
    """The sums of the squares up to each element, along the last dim."""
    op = ferrule.op(
        name, f"x[{dims}]:T -> y[{dims}]:T",
        metal=I + "T sum = 0; for (int n = i / N * N; n <= i; ++n) sum += x[n] * x[n]; y[i] = sum;",
        grid="x.size", threadgroup=64, batch=batch,
    )  # fmt: skip

    def backward(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
        return (2 * primals[0] * cotangents[0].flip(-1).cumsum(-1).flip(-1),)

    def forward(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
        return (2 * primals[0] * tangents[0]).cumsum(-1)

    op.def_vjp(backward)
    op.def_jvp(forward)
    return op


call_by_call = running_sum("call_by_call", "N")
by_function = running_sum("by_function", "N")
by_op = running_sum("by_op", "N")
rows = running_sum("rows", "*S,N")


@by_function.def_vmap
def by_function_vmap(size: int, axes: Sequence[int | None], primals: Inputs) -> tuple[Any, int]:
    return rows(primals[0].movedim(axes[0], 0)), 0


by_op.def_vmap(running_sum("batch_of_rows", "B,N", batch="B"))


# -- an input that may be absent, in derivatives that are ops, and that has none -------------------

squares = ferrule.op(
    "squares", "x[*S,D]:T, b[D]:T? -> y[*S,D]:T",
    metal=I + "T v = x[i] * x[i]; if (has_b) v *= b[i % D]; y[i] = v;", grid="x.size",
    threadgroup=64,
)  # fmt: skip
squares_vjp = ferrule.op(
    "squares_vjp", "x[*S,D]:T, b[D]:T?, cotangent[*S,D]:T -> x_grad[*S,D]:T",
    metal=I + "T v = 2 * x[i] * cotangent[i]; if (has_b) v *= b[i % D]; x_grad[i] = v;",
    grid="x.size", threadgroup=64,
)  # fmt: skip
squares_jvp = ferrule.op(
    "squares_jvp", "x[*S,D]:T, b[D]:T?, x_tangent[*S,D]:T -> y_tangent[*S,D]:T",
    metal=I + "T v = 2 * x[i] * x_tangent[i]; if (has_b) v *= b[i % D]; y_tangent[i] = v;",
    grid="x.size", threadgroup=64,
)  # fmt: skip


def bilinear_vjp(primals: Inputs, cotangents: Inputs, outputs: Inputs) -> Inputs:
    x, b, dx = primals
    g = 2 * cotangents[0] * (1 if b is None else b)
    return g * dx, None, g * x


def bilinear_jvp(primals: Inputs, tangents: Inputs, outputs: Inputs) -> torch.Tensor:
    x, b, dx = primals
    ex, _, edx = (None if t is None else 2 * t * (1 if b is None else b) for t in tangents)
    found = torch.zeros_like(x) if ex is None else ex * dx
    return found if edx is None else found + x * edx


for bilinear in (squares_vjp, squares_jvp):
    bilinear.def_vjp(bilinear_vjp)
    bilinear.def_jvp(bilinear_jvp)
squares.def_vjp(squares_vjp)
squares.def_jvp(squares_jvp)


def squares_samples(dtype: torch.dtype) -> list[Inputs]:
    return [
        (rand(*shape, dtype=dtype), None if i % 2 else rand(shape[-1], dtype=dtype) + 2)
        for i, shape in enumerate(((2, 3), (2, 3), (4,), (2, 1, 1), (0, 2)))
    ]


def vectors(dtype: torch.dtype) -> list[Inputs]:
    return [(rand(n, dtype=dtype),) for n in (5, 1, 0)]


def arrays(dtype: torch.dtype) -> list[Inputs]:
    return [(rand(*shape, dtype=dtype),) for shape in ((2, 3), (4,), (), (0, 2))]


def pairs(dtype: torch.dtype) -> list[Inputs]:
    return [(x, x.flip(-1) + 2) for (x,) in arrays(dtype) if x.ndim]


def further(prefix: str = "") -> list[Any]:
    """OpInfos of the ops above."""
    return [
        described(prefix + "exponential", exponential, arrays),
        described(prefix + "product", product, pairs),
        described(
            prefix + "ordered", ordered, lambda dtype: [one[:1] for one in take_samples(dtype)]
        ),
        described(prefix + "take", take, take_samples),
        described(prefix + "call_by_call", call_by_call, vectors),
        described(prefix + "by_function", by_function, vectors),
        described(prefix + "by_op", by_op, vectors),
        described(prefix + "squares", squares, squares_samples, differentiable=(0,)),
    ]
