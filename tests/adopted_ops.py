"""Two adopted ops with inputs and references, for all suites that iterate over test ops.

`quantised_linear` has 4-bit weights, and a derivative for its activations that is an op; what
carries it out is plain torch code. `hadamard` has state that is no argument: a plan per device,
dtype and size, which `make=` builds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import ferrule
from ferrule import Op

MADE: list[tuple[Any, ...]] = []  # what `make_hadamard` was called with, in this process


class Adopted(NamedTuple):
    """A test op.

    Attributes:
        op: the op.
        samples: makes lists of inputs, for a seed and a dtype.
        reference: the same in float64 NumPy.
        dtypes: of its activations.
        differentiable: the inputs that have a gradient.
    """

    op: Op
    samples: Callable[[int, torch.dtype], list[tuple[Any, ...]]]
    reference: Callable[..., np.ndarray[Any, Any]]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[int, ...]


# -- a linear layer with 4-bit weights -------------------------------------------------------------

GROUP = 16  # weights along K that share a scale


def unpack(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights ``[N,K]``: 4-bit integers from -8 to 7, the lower half of a byte first, times a
    scale per group."""
    low, high = (w & 15).to(dtype) - 8, (w >> 4).to(dtype) - 8
    q = torch.stack((low, high), -1).flatten(-2)
    return q * scale.to(dtype).repeat_interleave(16, -1)


def run_linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ unpack(w, scale, x.dtype).T


def run_linear_vjp(w: torch.Tensor, scale: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    return cotangent @ unpack(w, scale, cotangent.dtype)


def linear_reference(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> Any:
    bytes_ = w.cpu().numpy()
    q = np.empty((*bytes_.shape[:-1], bytes_.shape[-1] * 2))
    q[..., 0::2] = bytes_ % 16
    q[..., 1::2] = bytes_ // 16
    weights = (q - 8) * np.repeat(scale.double().cpu().numpy(), GROUP, -1)
    return np.einsum("...k,nk->...n", x.detach().double().cpu().numpy(), weights)


FLOATS = "T in (float16, bfloat16, float32, float64)"
# Also float16 scales: opcheck compares inputs by torch.allclose, which has no 8-bit floats.
SCALES = "A in (float8_e4m3fn, float16)"
quantised_linear = ferrule.adopt(
    "quantised_linear",
    "x[*S,K]:T, w[N,K//2]:uint8, scale[N,K//16]:A -> y[*S,N]:T "
    f"where {FLOATS}, {SCALES}, K % 16 == 0",
    run=run_linear,
    version=1,  # `run_linear` calls `unpack`, which no digest would cover
)
quantised_linear_vjp = ferrule.adopt(
    "quantised_linear_vjp",
    "w[N,H]:uint8, scale[N,G]:A, cotangent[*S,N]:T -> x_grad[*S,G*16]:T "
    f"where {FLOATS}, {SCALES}, H == G * 8",
    run=run_linear_vjp,
    version=1,
)
# The derivative of a derivative that is linear in the cotangent is the op itself.
quantised_linear_vjp.def_vjp(
    ferrule.adopt(
        "quantised_linear_vjp_vjp",
        "w[N,H]:uint8, scale[N,G]:A, x_grad_cotangent[*S,G*16]:T "
        f"-> cotangent_grad[*S,N]:T where {FLOATS}, {SCALES}, H == G * 8",
        run=lambda w, scale, x_grad_cotangent: run_linear(x_grad_cotangent, w, scale),
        version=1,
    )
)


@quantised_linear_vjp.def_jvp
def _vjp_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
    return quantised_linear_vjp(primals[0], primals[1], tangents[2])


quantised_linear.def_vjp(quantised_linear_vjp)


@quantised_linear.def_jvp
def _linear_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
    return quantised_linear(tangents[0], *primals[1:])


def linear_weights(
    n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ``w`` and ``scale``."""
    random = torch.Generator().manual_seed(seed)
    w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=random)
    scale = 0.05 + 0.2 * torch.rand((n, k // GROUP), generator=random)
    return w, scale.to(dtype)


def linear_samples(seed: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Inputs of `quantised_linear`: ranks 1 to 3, strided, expanded, and none."""
    random = torch.Generator().manual_seed(seed)

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return [
        (x(4, 32), *linear_weights(6, 32, seed)),
        (x(2, 3, 16), *linear_weights(5, 16, seed)),
        (x(48), *linear_weights(1, 48, seed)),
        (x(32, 4).T, *linear_weights(3, 32, seed)),
        (x(32).expand(2, 32), *linear_weights(3, 32, seed)),
        (x(0, 32), *linear_weights(3, 32, seed)),
    ]


# -- a transform with a plan -----------------------------------------------------------------------


class Plan:
    """What a transform of one size, dtype and device needs."""

    def __init__(self, device: str, dtype: torch.dtype, size: int) -> None:
        if size < 1 or size & (size - 1):
            raise ValueError(f"the size of a Hadamard transform is a power of two, not {size}")
        # Sylvester's construction.
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
        self.matrix = (matrix / size**0.5).to(device=device, dtype=dtype)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        size = len(self.matrix)
        torch.matmul(x.reshape(-1, size), self.matrix, out=y.view(-1, size))


def make_hadamard(*, device: str, T: str, D: int) -> Callable[..., None]:
    MADE.append((device, T, D))
    return Plan(device, getattr(torch, T), D).run


hadamard = ferrule.adopt(
    "hadamard", "x[*S,D]:T -> y[*S,D]:T " + f"where {FLOATS}, D >= 1",
    make=make_hadamard, constants={"D": "D"}, version=1,
)  # fmt: skip


@hadamard.def_vjp
def _hadamard_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    return (hadamard(cotangents[0]),)  # the matrix is symmetric


@hadamard.def_jvp
def _hadamard_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
    return hadamard(tangents[0])


def hadamard_reference(x: torch.Tensor) -> Any:
    size = x.shape[-1]
    bits = np.arange(size)
    signs = [[bin(i & j).count("1") & 1 for j in bits] for i in bits]
    matrix = (1 - 2.0 * np.array(signs)) / np.sqrt(size)
    return x.detach().double().cpu().numpy() @ matrix


def hadamard_samples(seed: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    random = torch.Generator().manual_seed(seed)
    shapes: Sequence[tuple[int, ...]] = [(3, 8), (2, 3, 4), (1,), (0, 2)]
    found = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    found.append(torch.randn((8, 3), generator=random).to(dtype).T)
    return [(x,) for x in found]


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ADOPTED = {
    "quantised_linear": Adopted(
        quantised_linear, linear_samples, linear_reference, DTYPES, (0,)
    ),
    "hadamard": Adopted(hadamard, hadamard_samples, hadamard_reference, DTYPES, (0,)),
}  # fmt: skip
