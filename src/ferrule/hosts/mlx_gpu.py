"""Ops of MLX's graphs on GPUs, where Python must see to it: CUDA units and kernels that C has no
room for, captured as graphs of CUDA; and, on Apple's GPUs, MLX's own node."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from .. import arguments, cache, op_call
from ..cuda_steps import CudaUnit
from ..driver import driver
from ..dtypes import Dtype
from ..errors import DeviceError, KernelError
from ..implementation import KernelBody, Runner
from ..op_entries import Request
from ..op_launch import launch, read_dims
from ..op_unit import carry_out, memset_pattern
from ..spec import Facts, Shape, row_contiguous_strides
from . import mlx
from .mlx_build import bound

if TYPE_CHECKING:
    from ..devices.cuda_program import CudaProgram
    from ..kernel import Kernel
    from ..op_declaration import Op


def captured(
    op: Op, scratch: Callable[[int], int | None], values: tuple[Any, ...], at: tuple[int, ...],
    to: tuple[int, ...], queue: int, ordinal: int,
) -> tuple[str, ...]:  # fmt: skip
    """Launch a unit or kernel on a stream that is being captured.

    Args:
        op, values: what is carried out; the arrays are not touched.
        scratch: gives the address of so many bytes, which live until the kernels have run.
        at, to: the addresses of inputs, 0 of what is no array, and outputs.
        queue, ordinal: the stream and the GPU.

    Returns:
        What tells this graph from others that differ in more than addresses and sizes, ``""`` where
        nothing was launched; nothing at all where a Python function is to be called.
    """
    device = f"cuda:{ordinal}"
    given = _given(op, values, device, at)
    said, results = op_call.bound(op, given)
    chosen = op_call.choose(op, device, said)
    if isinstance(chosen, Runner):
        return ()
    made = [
        Facts(kind, shape, row_contiguous_strides(shape), pointer, device)
        for (shape, kind), pointer in zip(results, to, strict=True)
    ]
    if isinstance(chosen, CudaUnit):
        carry_out(
            op.name, op.rule, chosen, cast(Any, _Captured(made, scratch)), lambda one: one, device,
            queue, said, given, results,
        )  # fmt: skip
        unit = chosen.sent(said)
        steps = [(type(one).__name__, getattr(one, "cluster", None)) for one in unit.steps]
        return (cache.digest(op.digest, repr(steps), repr(unit.template)) if steps else "",)
    sent = chosen.sent(said)
    if sent.fill is not None:
        for i, fact in enumerate(made):
            value = arguments.fill_value(chosen.kernel, i, sent.fill, fact.dtype)
            pattern = np.array(value).astype(fact.dtype.numpy).tobytes()
            _fill(op, ordinal, fact, pattern, queue)
    launch(op.name, op.rule, chosen, sent, said, device, queue, given, made)
    filled = sent.fill is not None
    return (cache.digest(op.digest, chosen.kind, repr(sent.template), repr(filled)),)


def by_mlx(
    values: tuple[Any, ...], at: int, fill: int, contiguous: int
) -> list[mx.array]:  # fmt: skip
    """The outputs of a kernel that MLX launches: `mx.fast.precompiled_cuda_kernel`.

    Args:
        values: the inputs: arrays, numbers, None.
        at: the address of the request for what is launched.
        fill: that of the element that the first output is filled with, or 0.
        contiguous: inputs are copied unless they are row-contiguous.
    """
    request = Request.from_address(at)
    found = bound[request.op].prepared(request)
    number: Any = found.launch.fill
    kinds = [mlx.DTYPES[one.dtype.name] for one in found.outputs]
    if fill:
        kind = found.outputs[0].dtype
        number = np.frombuffer(ctypes.string_at(fill, kind.itemsize), kind.numpy)[0]
        if kind.numpy.type(float(np.float32(number))) != number:
            raise KernelError(
                f"init_value={number!r} of {kind.name} is no float32, and MLX {mx.__version__} "  # type: ignore[attr-defined]
                "takes no other."
            )
    if 0 in found.launch.grid:
        pairs = zip(found.outputs, kinds, strict=True)
        return [mx.full(one.shape, float(number or 0), kind) for one, kind in pairs]
    sent = cast("CudaProgram", found.program).by_pointer(found.inputs, found.launch)
    by_value = mx.array(np.frombuffer(sent.values, np.uint8))
    inputs = [values[i] if isinstance(values[i], mx.array) else by_value for i in sent.arrays]
    blocks, (x, y, z) = sent.blocks, sent.block
    made: list[mx.array] = mx.fast.precompiled_cuda_kernel(
        name=sent.symbol, compiled_source=sent.image, inputs=[*inputs, by_value],
        output_shapes=[one.shape for one in found.outputs], output_dtypes=kinds, scalars=[],
        grid=(blocks[0] * x, blocks[1] * y, blocks[2] * z), threadgroup=(x, y, z),
        shared_memory=sent.shared, init_value=None if number is None else float(number),
        ensure_row_contiguous=bool(contiguous),
    )  # fmt: skip
    mx.async_eval(made)  # type: ignore[no-untyped-call]
    return made


def by_stock_node(op: Op, values: tuple[Any, ...]) -> list[mx.array]:
    """The outputs of MLX's own `mx.fast.metal_kernel` for an op's `metal` body."""
    said, results = op_call.bound(op, _given(op, values, "metal", (0,) * len(values)))
    body = op_call.choose(op, "metal", said)
    if not isinstance(body, KernelBody):
        raise KernelError(f"[op] op {op.name!r} has no `metal` body for these sizes.")
    sent = body.sent(said)
    inputs = []
    for one, value in zip(op.rule.inputs, values, strict=True):
        if isinstance(value, mx.array):
            # A body indexes what it declares as *S, also where S is no dims.
            inputs.append(value.reshape(1) if one.dims and not value.ndim else value)
        elif one.dims is None:
            inputs.append(mx.array(value, mlx.DTYPES[one.dtype]))
        else:  # absent: the body asks before it reads
            absent = mlx.DTYPES[said.dtypes.get(one.dtype, one.dtype)]
            inputs.append(mx.zeros((1,) * len(one.dims), absent))
    inputs += [mx.array(size, mx.int32) for size in read_dims(body, said)]
    return call_stock(
        body.kernel, inputs, [shape for shape, _ in results], [kind for _, kind in results],
        sent.grid, sent.threadgroup, sent.template, sent.fill,
    )  # fmt: skip


def _given(
    op: Op, values: Sequence[Any], device: str, pointers: Sequence[int]
) -> dict[str, Facts | float | None]:  # fmt: skip
    """What is known of an op's inputs, by their names."""
    return {
        one.name: mlx.described(value, device, pointer) if isinstance(value, mx.array) else value
        for one, value, pointer in zip(op.rule.inputs, values, pointers, strict=True)
    }


def on_metal(stream: object) -> bool:
    """Whether a kernel's call with this stream, device or None is for an Apple GPU."""
    if os.uname().sysname != "Darwin":
        return False
    device: Any = mx.default_device() if stream is None else getattr(stream, "device", stream)
    return bool(device == mx.gpu or device == mx.Device(mx.gpu))


def call_stock(
    kernel: Kernel, inputs: Sequence[mx.array], shapes: Sequence[Shape], kinds: Sequence[Dtype],
    grid: Sequence[int], threadgroup: Sequence[int],
    template: Sequence[tuple[str, int | bool | Dtype]], fill: float | None, stream: Any = None,
) -> list[mx.array]:  # fmt: skip
    """The outputs of a kernel by MLX's own `mx.fast.metal_kernel`: MLX's node and text."""
    values: Any = [
        (name, mlx.DTYPES[value.name] if isinstance(value, Dtype) else value)
        for name, value in template
    ]
    made: list[mx.array] = _stock_kernel(kernel)(
        inputs=list(inputs), template=values, grid=tuple(grid), threadgroup=tuple(threadgroup),
        output_shapes=list(shapes), output_dtypes=[mlx.DTYPES[kind.name] for kind in kinds],
        init_value=None if fill is None else float(fill), stream=stream,
    )  # fmt: skip
    return made


@functools.lru_cache(maxsize=1024)
def _stock_kernel(kernel: Kernel) -> Any:
    options: Any = {}  # older versions have none
    if kernel.math_mode != "safe":
        options["compile_options"] = {"math_mode": kernel.math_mode}
    return mx.fast.metal_kernel(
        kernel.name, list(kernel.input_names), list(kernel.output_names), kernel.source,
        header=kernel.header, ensure_row_contiguous=kernel.ensure_row_contiguous,
        atomic_outputs=kernel.atomic_outputs, **options,
    )  # fmt: skip


def _fill(op: Op, ordinal: int, fact: Facts, element: bytes, queue: int) -> None:
    part = memset_pattern(element)
    if part is None:
        raise KernelError(
            f"[op] op {op.name!r}: `init_value` is of {fact.dtype.name} and no memset does it: "
            "the halves of its 8 bytes differ."
        )
    if fact.size:
        times = fact.size * len(element) // len(part)
        driver().fill(ordinal, fact.pointer, times, part, queue)


class _Captured:
    """Whose arrays a unit asks for while it is captured: outputs that are there, then scratch."""

    def __init__(self, outputs: Sequence[Facts], scratch: Callable[[int], int | None]) -> None:
        self.outputs, self.scratch = iter(outputs), scratch

    def empty(self, shape: Shape, dtype: Dtype, device: str) -> Facts:
        found = next(self.outputs, None)
        if found is not None:
            return found
        size = math.prod(shape) * dtype.itemsize
        pointer = self.scratch(size)
        if not pointer:
            raise DeviceError(f"{device} has no {size} bytes for a unit's scratch.")
        return Facts(dtype, shape, row_contiguous_strides(shape), pointer, device)
