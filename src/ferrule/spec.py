"""From a kernel and the facts of one call to what is compiled (`Spec`) and sent (`Launch`).

Nothing here keeps state: the same facts always give the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .dtypes import Dtype
from .kernel import Kernel

TemplateValue = int | bool | Dtype
Shape = tuple[int, ...]

SMALL = 8  # inputs of fewer elements are in Metal's `constant` address space, as in MLX
MAX_THREADS = 1024  # threads per threadgroup
MOST_DEEP = 64  # threads of a CUDA block along z
MOST_BLOCKS = 65535  # of a CUDA grid along y and along z
CUDA_RANK = 10  # dims in the Shape and Strides of a CUDA body, as in MLX


def with_threads(group: tuple[int, int, int], grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """A threadgroup with 1 in place of 0 where the grid has no thread, so that no thread runs: it
    may be ``min(x.size, 256)`` of an empty array. Apple's and MLX's code divide by it."""
    if 0 not in group or 0 not in grid:
        return group
    x, y, z = group
    return 1 if x == 0 else x, 1 if y == 0 else y, 1 if z == 0 else z


def clamped(group: tuple[int, int, int], grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """A threadgroup that is nowhere longer than the grid; ``op_calls.h`` and ``packaged/ops.h`` do
    the same in C."""
    x, y, z = group
    gx, gy, gz = grid
    return min(x, gx), min(y, gy), min(z, gz)


class Facts(NamedTuple):
    """The facts of one array (or Python scalar) that a host hands to a kernel.

    Attributes:
        dtype: the element type.
        shape: the sizes.
        strides: in elements, one per dim.
        pointer: the address of the first element.
        device: ``"cpu"``, ``"cuda:0"`` …
        value: True for a Python scalar.
    """

    dtype: Dtype
    shape: Shape
    strides: tuple[int, ...]
    pointer: int
    device: str
    value: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    @property
    def row_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return is_row_contiguous(self.shape, self.strides)


class Input(NamedTuple):
    """The properties of one input that decide the text: its dtype, its rank, and two bits.

    `small`, fewer than 8 elements, is for Metal's text alone; `value`, a Python scalar, for CUDA's,
    which takes it by value.
    """

    dtype: Dtype
    ndim: int
    small: bool = False
    value: bool = False


@dataclass(frozen=True)
class Spec:
    """What must be compiled for one call. Hashable; sizes enter through the template alone.

    Attributes:
        kernel: the text, names and flags.
        inputs: one `Input` per input name.
        outputs: one dtype per output name.
        template: the template parameters, in order.
    """

    kernel: Kernel
    inputs: tuple[Input, ...]
    outputs: tuple[Dtype, ...]
    template: tuple[tuple[str, TemplateValue], ...] = ()

    def __hash__(self) -> int:
        return hash((self.kernel, self.inputs, self.outputs, self.template))

    def __eq__(self, other: object) -> bool:
        # True == 1 in Python, but `bool B` and `int B` are different template parameters.
        return (
            isinstance(other, Spec)
            and self.kernel == other.kernel
            and self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.template == other.template
            and [type(v) for _, v in self.template] == [type(v) for _, v in other.template]
        )


class Launch(NamedTuple):
    """What is sent with one call.

    Attributes:
        grid: threads per axis; exactly this many run (of a CUDA body, whole blocks).
        threadgroup: threads per threadgroup and axis, never more than the grid.
        output_shapes: one shape per output.
        fill: the value that outputs are filled with before the kernel runs, or None.
        copies: the inputs that are copied to row-contiguous memory first.
        aligned: every array begins at a multiple of 16 bytes, as far as is known.
        in_place: how many of the last outputs are the caller's own arrays.
        declared: an op's rule says the sizes.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[Shape, ...]
    fill: float | int | complex | None
    copies: tuple[int, ...]
    aligned: bool = True
    in_place: int = 0
    declared: bool = False

    def of(self, kernel: Kernel) -> str:
        """How messages call the launch of a kernel."""
        return f"kernel {kernel.name!r} (grid {self.grid}, threadgroup {self.threadgroup})"


def row_contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """The element strides of a row-major array without gaps."""
    strides: list[int] = []
    step = 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


def extent(shape: Shape, strides: tuple[int, ...]) -> tuple[int, int]:
    """The first element that an array's subscripts reach, and how many there are from it on.

    The first is 0, or less where strides are negative; between elements may lie those of others.
    """
    if 0 in shape:
        return 0, 0
    steps = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    first = sum(step for step in steps if step < 0)
    return first, sum(step for step in steps if step > 0) - first + 1


def is_row_contiguous(shape: Shape, strides: tuple[int, ...]) -> bool:
    """Whether these strides are row-major without gaps, dims of size 1 apart."""
    step = 1
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim == 0:
            return True
        if dim != 1:
            if stride != step:
                return False
            step *= dim
    return True
