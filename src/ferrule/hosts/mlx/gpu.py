"""Ops of MLX's graphs on GPUs, where Python must see to it: CUDA units and kernels that C has no
room for, captured as graphs of CUDA; and, on Apple's GPUs, MLX's own node, with the inputs that it
takes in files, too."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ... import cache, dtypes
from ...dtypes import Dtype
from ...errors import DeviceError, KernelError
from ...kernels.entries import Request
from ...operators import call as op_call
from ...operators import launch as op_launch
from ...operators.bodies import BodyLaunch, KernelBody
from ...operators.launch import BoundCall
from ...operators.runners import Runner
from ...operators.unit_call import launch_of, memset_pattern
from ...operators.unit_steps import CudaUnit
from ...spec import Facts, Shape, row_contiguous_strides
from ...tools.driver import driver
from ...unit import Product, Run
from . import arrays as mlx
from .build import bound

if TYPE_CHECKING:
    from ...devices.cuda.program import CudaProgram
    from ...kernel import Kernel
    from ...operators.op import Op


def captured(
    op: Op,
    scratch: Callable[[int], int | None],
    values: tuple[Any, ...],
    input_pointers: tuple[int, ...],
    output_pointers: tuple[int, ...],
    queue: int,
    ordinal: int,
) -> tuple[str, ...]:
    """Launch a unit or kernel on a stream that is being captured.

    Args:
        op, values: what is run; the arrays are not touched.
        scratch: gives the address of so many bytes, which live until the kernels have run.
        input_pointers, output_pointers: the addresses of the arrays; 0 of inputs that are none.
        queue, ordinal: the stream and the GPU.

    Returns:
        What tells this graph from others that differ in more than addresses and sizes, ``""`` where
        nothing was launched; nothing at all where a Python function is to be called.
    """
    call = _bound(op, values, f"cuda:{ordinal}", input_pointers)
    body = op_call.choose(call)
    if isinstance(body, Runner):
        return ()
    maker = _CapturedArrays(op, output_pointers, scratch, queue, ordinal)
    op_call.run_body(call, body, maker, lambda y: y, queue)
    if isinstance(body, CudaUnit):
        unit_launch = launch_of(call, body)
        steps: list[Any] = [
            (type(step).__name__, (run.cluster, run.pdl) if isinstance(run, Run) else run)
            for step, run in unit_launch.steps
        ]
        if any(isinstance(run, Product) for _, run in steps):  # cuBLAS looks at addresses, too
            pointers = *input_pointers, *output_pointers
            steps.append(("alignments", tuple(math.gcd(pointer, 256) for pointer in pointers)))
        return (cache.digest(op.digest, repr(steps), repr(unit_launch.template)) if steps else "",)
    kernel_launch = body.launch_for(call.binding)
    filled = kernel_launch.fill is not None
    return (cache.digest(op.digest, body.kind, repr(kernel_launch.template), repr(filled)),)


def by_mlx(
    values: tuple[Any, ...], request_address: int, fill_address: int, contiguous: int
) -> list[mx.array]:
    """The outputs of a kernel that MLX launches: `mx.fast.precompiled_cuda_kernel`.

    Args:
        values: the inputs: arrays, numbers, None.
        request_address: the address of the request for what is launched.
        fill_address: that of the element that the first output is filled with, or 0.
        contiguous: inputs are copied unless they are row-contiguous.
    """
    request = Request.from_address(request_address)
    prepared = bound[request.op].prepared(request)
    init_value: Any = prepared.launch.fill
    output_dtypes = [mlx.DTYPES[output.dtype.name] for output in prepared.outputs]
    if fill_address:
        kind = prepared.outputs[0].dtype
        init_value = np.frombuffer(ctypes.string_at(fill_address, kind.itemsize), kind.numpy)[0]
        if kind.numpy.type(float(np.float32(init_value))) != init_value:
            raise KernelError(
                f"init_value={init_value!r} of {kind.name} is no float32, and MLX {mx.__version__} "  # type: ignore[attr-defined]
                "takes no other."
            )
    if 0 in prepared.launch.grid:
        pairs = zip(prepared.outputs, output_dtypes, strict=True)
        return [mx.full(output.shape, float(init_value or 0), dtype) for output, dtype in pairs]
    cuda_launch = cast("CudaProgram", prepared.program).by_pointer(prepared.inputs, prepared.launch)
    by_value = mx.array(np.frombuffer(cuda_launch.values, np.uint8))
    inputs = [
        values[i] if isinstance(values[i], mx.array) else by_value for i in cuda_launch.arrays
    ]
    blocks, (x, y, z) = cuda_launch.blocks, cuda_launch.block
    outputs: list[mx.array] = mx.fast.precompiled_cuda_kernel(
        name=cuda_launch.symbol,
        compiled_source=cuda_launch.image,
        inputs=[*inputs, by_value],
        output_shapes=[output.shape for output in prepared.outputs],
        output_dtypes=output_dtypes,
        scalars=[],
        grid=(blocks[0] * x, blocks[1] * y, blocks[2] * z),
        threadgroup=(x, y, z),
        init_value=None if init_value is None else float(init_value),
        shared_memory=cuda_launch.shared,
        ensure_row_contiguous=bool(contiguous),
    )
    mx.async_eval(outputs)  # type: ignore[no-untyped-call]
    return outputs


class StockCall(NamedTuple):
    """A kernel's call as MLX's own kernels take it.

    Attributes:
        kernel, launch: what is called, and how.
        results: shape and dtype of each output.
        inputs: dtype and shape of each input.
        dims: of an op's call, the dims that are the last of the inputs.
    """

    kernel: Kernel
    launch: BodyLaunch
    results: list[tuple[Shape, Dtype]]
    inputs: list[tuple[Dtype, Shape]]
    dims: Sequence[int] = ()


def by_stock_node(op: Op, values: tuple[Any, ...]) -> list[mx.array]:
    """The outputs of MLX's own `mx.fast.metal_kernel` for an op's `metal` body."""
    call = _bound(op, values, "metal", (0,) * len(values))
    body = op_call.choose(call)
    if not isinstance(body, KernelBody):
        raise KernelError(f"[op] op {op.name!r} has no `metal` body for these sizes.")
    stock = stock_call(call, body)
    return call_stock(stock, stock_arrays(values, stock))


def stock_call(call: BoundCall, body: KernelBody) -> StockCall:
    """The call of an op's kernel.

    Raises:
        KernelError: no thread would run, and yet an output has elements.
    """
    launch = body.launch_for(call.binding)
    if 0 in launch.grid:
        outputs = [Facts(kind, s, row_contiguous_strides(s), 0, "cpu") for s, kind in call.results]
        op_launch.check_empty(call.op.name, call.op.rule, launch, outputs)
    facts, _, _ = op_launch.kernel_facts(call, body)
    inputs = [(fact.dtype, fact.shape) for fact in facts]
    dims = op_launch.read_dims(body, call.binding)
    kernel = replace(body.kernel, shared_memory=launch.shared) if launch.shared else body.kernel
    return StockCall(kernel, launch, call.results, inputs, dims)


def stock_arrays(values: Sequence[Any], call: StockCall) -> list[mx.array]:
    """The arrays for an op's call, of the op's inputs: arrays, numbers, and None."""
    arrays: list[mx.array] = []
    for value, (kind, shape) in zip(values, call.inputs, strict=False):
        if not isinstance(value, mx.array):  # what is absent must be something
            arrays.append(constant(0 if value is None else value, kind, shape))
        elif value.shape == shape:
            arrays.append(value)
        else:
            arrays.append(mx.expand_dims(value, 0))  # batches of a reshape would have fixed sizes
    return arrays + [constant(size, dtypes.int32, ()) for size in call.dims]


def constant(value: float, kind: Dtype, shape: Shape) -> mx.array:
    """An array of one element, which a file holds as it is and not as what makes it."""
    if kind.name in ("bfloat16", "float64"):  # which MLX casts to, from NumPy's arrays
        return mx.array(value, mlx.DTYPES[kind.name]).reshape(shape)
    return mx.array(np.full(shape, value, kind.numpy))


def _bound(op: Op, values: Sequence[Any], device: str, pointers: Sequence[int]) -> BoundCall:
    """A call with inputs whose arrays are at these addresses."""
    at = {
        argument.name: pointer for argument, pointer in zip(op.rule.inputs, pointers, strict=True)
    }
    arguments = op_call.gathered(op, values, lambda a, v: mlx.described(v, device, at[a.name]))
    return op_launch.bound(op, device, arguments)


def on_metal(stream: object) -> bool:
    """Whether a kernel's call with this stream, device or None is for an Apple GPU."""
    if os.uname().sysname != "Darwin":
        return False
    device: Any = mx.default_device() if stream is None else getattr(stream, "device", stream)
    return bool(device == mx.gpu or device == mx.Device(mx.gpu))


def call_stock(call: StockCall, inputs: Sequence[mx.array], stream: Any = None) -> list[mx.array]:
    """The outputs of a kernel by MLX's own `mx.fast.metal_kernel`: MLX's node and text."""
    launch = call.launch
    template: Any = [
        (name, mlx.DTYPES[value.name] if isinstance(value, Dtype) else value)
        for name, value in launch.template
    ]
    outputs: list[mx.array] = _stock_kernel(call.kernel)(
        inputs=list(inputs),
        template=template,
        grid=tuple(launch.grid),
        threadgroup=tuple(launch.threadgroup),
        output_shapes=[shape for shape, _ in call.results],
        output_dtypes=[mlx.DTYPES[kind.name] for _, kind in call.results],
        init_value=None if launch.fill is None else float(launch.fill),
        stream=stream,
    )
    return outputs


@functools.lru_cache(maxsize=1024)
def _stock_kernel(kernel: Kernel) -> Any:
    options: Any = {}  # older versions have none
    if kernel.math_mode != "safe":
        options["compile_options"] = {"math_mode": kernel.math_mode}
    return mx.fast.metal_kernel(
        kernel.name,
        list(kernel.input_names),
        list(kernel.output_names),
        kernel.source,
        header=kernel.header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
        atomic_outputs=kernel.atomic_outputs,
        **options,
    )


class _CapturedArrays:
    """Gives what is captured its arrays: outputs that are there, then scratch."""

    def __init__(
        self,
        op: Op,
        outputs: Sequence[int],
        scratch: Callable[[int], int | None],
        queue: int,
        ordinal: int,
    ) -> None:
        self.op, self.outputs, self.scratch = op, iter(outputs), scratch
        self.queue, self.ordinal = queue, ordinal

    def empty(self, shape: Shape, dtype: Dtype, device: str) -> Facts:
        pointer = next(self.outputs, None)
        if pointer is None:
            size = math.prod(shape) * dtype.itemsize
            pointer = self.scratch(size)
            if not pointer:
                raise DeviceError(f"{device} has no {size} bytes for a unit's scratch.")
        return Facts(dtype, shape, row_contiguous_strides(shape), pointer, device)

    def full(self, shape: Shape, value: Any, dtype: Dtype, device: str) -> Facts:
        fact = self.empty(shape, dtype, device)
        element = np.array(value).astype(dtype.numpy).tobytes()
        part = memset_pattern(element)
        if part is None:
            raise KernelError(
                f"[op] op {self.op.name!r}: `init_value` is of {dtype.name} and no memset does it: "
                "the halves of its 8 bytes differ."
            )
        if fact.size:
            times = fact.size * len(element) // len(part)
            driver().fill(self.ordinal, fact.pointer, times, part, self.queue)
        return fact
