"""A whole CUDA translation unit, as devices see it: what is compiled, and what a call launches.

A `ferrule.spec.Spec` has one function, whose signature ferrule writes; here an author has written
functions, and the steps of a launch say which are called, one after the other, with what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .spec import TemplateValue

Sizes = tuple[int, int, int]

POINTER, TENSOR_MAP = "pointer", "tensor map"


class Call(NamedTuple):
    """One function as a step calls it.

    Attributes:
        number: of the step, from 1.
        function: its name, or an expression such as ``"gemm<BLOCK, T>"``.
        arguments: of each what the author calls it, and what is passed: `POINTER`, `TENSOR_MAP`, or
            a dtype's full name.
    """

    number: int
    function: str
    arguments: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(label for label, _ in self.arguments)})"


@dataclass(frozen=True)
class UnitSpec:
    """What must be compiled for one call of a unit. Hashable; sizes enter through the template.

    Attributes:
        name: the op's.
        source: the text.
        headers: names and texts of what it includes.
        options: for NVRTC.
        calls: what steps call, in order, those that this launch leaves out among them.
        template: constants and types that the text has before it begins.
        specific: it is compiled for ``sm_90a`` on what is otherwise ``sm_90``.
    """

    name: str
    source: str
    headers: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    calls: tuple[Call, ...]
    template: tuple[tuple[str, TemplateValue], ...]
    specific: bool = False

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that steps call, each once."""
        return tuple(dict.fromkeys(call.function for call in self.calls))


class TensorMap(NamedTuple):
    """An array as the tensor memory accelerator sees it, which the driver encodes in 128 bytes.

    Attributes:
        dtype, itemsize: of elements: the full name, and the bytes.
        dims, strides, box: in elements, the last dim innermost; that has no stride.
        numbers: CUDA's, of the swizzle, of what is fetched to L2, and of what lies outside.
        address: where it begins.
    """

    dtype: str
    itemsize: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    numbers: tuple[int, int, int]
    address: int = 0


class Run(NamedTuple):
    """A kernel's launch.

    Attributes:
        function: as in `Call`.
        blocks, block: blocks of the grid and threads of a block, along x, y and z.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster along x, y and z, or None.
        arguments: the bytes of each, 8 at most, or a tensor map.
        pdl: it may begin before the kernel ahead has ended, where the GPU can do so.
    """

    function: str
    blocks: Sizes
    block: Sizes
    shared: int
    cluster: Sizes | None
    arguments: tuple[bytes | TensorMap, ...]
    pdl: bool = False


class Fill(NamedTuple):
    """Memory that gets one value.

    Attributes:
        address: where it begins.
        times: how often ``pattern`` stands there.
        pattern: 1, 2 or 4 bytes.
    """

    address: int
    times: int
    pattern: bytes


class Copy(NamedTuple):
    """Memory that is copied on one GPU.

    Attributes:
        to, source: where they begin.
        size: in bytes.
    """

    to: int
    source: int
    size: int


class Product(NamedTuple):
    """Products of matrices of contiguous rows: ``out[m,n] = alpha * a[m,k] @ b[k,n] + beta * out``.

    Attributes:
        label: which it is, in words.
        m, n, k: the sizes.
        batch: how many.
        step_a, step_b: elements from one matrix to the next; 0 where one is for all.
        transpose_a, transpose_b: it lies as ``a[k,m]``, as ``b[n,k]``.
        dtype, out_dtype: of what is multiplied, and of the product.
        tf32: float32 is rounded to 10 bits of mantissa before it is multiplied.
        factors: ``alpha`` and ``beta``.
        addresses: of a, b, out, of the memory that cuBLAS may use, and of factors that the GPU
            reads in place of these; 0: of none.
    """

    label: str
    m: int
    n: int
    k: int
    batch: int
    step_a: int
    step_b: int
    transpose_a: bool
    transpose_b: bool
    dtype: str
    out_dtype: str
    tf32: bool
    factors: tuple[float, float] = (1, 0)
    addresses: tuple[int, ...] = ()


Step = Run | Fill | Copy | Product
