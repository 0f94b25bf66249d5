"""Calls of `metal_kernel` and `cuda_kernel` as nodes of MLX's graphs.

A node has the sizes of the call as numbers, or follows expressions of its inputs' shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ... import dtypes
from ...devices import protocol as devices
from ...dtypes import Dtype
from ...errors import KernelError, KernelTypeError
from ...kernels import arguments, entries
from ...kernels.entries import ARGUMENTS, MOST_DIMS, BoundKernel, Prepared, Request
from ...operators.bodies import BodyLaunch
from ...rules.bytecode import compile_rule
from ...spec import Facts, Input, Shape, Spec
from . import arrays as mlx
from . import gpu as mlx_gpu
from .build import library, loaded, number_of, outputs_of
from .gpu import StockCall
from .node import answered, answering

if TYPE_CHECKING:
    from ...devices.protocol import Program
    from ...kernel import Kernel
    from ...kernels.sizes import Sizes

_int64 = ctypes.c_int64
_LONGEST = 2**31 - 1
_MOST_PLANS = 4096
Template = tuple[tuple[str, int | bool | Dtype], ...]


class NodeKernel(BoundKernel):
    """A kernel whose sizes are numbers, as nodes run it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.templates = entries.Numbered()
        self.plans: dict[object, int] = {}
        self.number = number_of(self)
        entries.kept.append(self)
        self.structure.body[0].devices |= entries.CPU  # of one in CUDA `program` refuses it
        self.calls = loaded().fr_mlx_calls(len(kernel.input_names))
        self.answer = answering(self._rules(), f"kernel {kernel.name!r}")
        entries.kept.append(self.answer)

    def program(
        self, request: Request, device: str, inputs: list[Facts], outputs: list[Facts]
    ) -> Program:
        """What runs the kernel for inputs and outputs of these dtypes and ranks."""
        in_cuda = self.kernel.language == "cuda"
        if device == "cpu" and in_cuda and not devices.runs_cuda(self.kernel):
            raise arguments.needs_cuda(self.kernel, mlx.name, device, "Call it with stream=mx.gpu")
        spec = Spec(
            self.kernel,
            tuple(Input(f.dtype, len(f.shape)) for f in inputs),
            tuple(f.dtype for f in outputs),
            self.template(request),
        )
        return devices.get(device).program(spec)

    def template(self, request: Request) -> Template:
        """The template of a request."""
        template: Template = self.templates.objects[request.template_value[0]][0]
        return template

    def filled(self, request: Request) -> float | None:
        """What outputs are filled with, if they are."""
        fill: float | None = self.templates.objects[request.template_value[0]][1]
        return fill

    def _rules(self) -> dict[str, Callable[..., Any]]:
        def refuse(*args: Any) -> Any:
            raise stale(self.kernel, *args)

        return {**refusals(self.kernel), "by_mlx": mlx_gpu.by_mlx, "stale": refuse}

    def plan(self, call: StockCall, fills: bytes | None) -> int:
        """The plan, in C, of nodes of this kernel with these numbers; kept for later calls.

        Args:
            call: the call.
            fills: the element that each output is filled with, if any.
        """
        launch, template = call.launch, call.launch.template
        kinds = tuple([type(value) for _, value in template])
        key = (tuple(call.results), launch.grid, launch.threadgroup, template, kinds, fills)
        plan = self.plans.get(key)
        if plan is not None:
            return plan
        shapes = [shape for shape, _ in call.results]
        check_shapes(self.kernel, shapes)
        known = template, launch.fill
        index = self.templates.number(known, (*known, type(launch.fill), kinds))
        if len(self.plans) >= _MOST_PLANS:
            loaded().fr_mlx_forget(self.plans.pop(next(iter(self.plans))))
        sizes = *launch.grid, *launch.threadgroup
        plan = self.plans[key] = self.new_plan(call.results, sizes, index, fills)
        return plan

    def new_plan(
        self,
        results: Iterable[tuple[Shape, Dtype]],
        sizes: tuple[int, ...] | None,
        template: int,
        fills: bytes | None,
    ) -> int:
        """A plan for outputs of these dtypes, where ``sizes`` are given of these shapes."""
        return int(
            loaded().fr_mlx_plan(
                ctypes.addressof(self.structure),
                self.number,
                self.structure.body[0].devices,
                f"kernel {self.kernel.name!r}".encode(),
                self.answer,
                outputs_of(results),
                sizes,
                template,
                fills,
            )
        )


def check_shapes(kernel: Kernel, shapes: Sequence[Shape]) -> None:
    """Refuse output shapes that MLX cannot have.

    Raises:
        KernelError: a size needs more than 31 bits.
    """
    for i, shape in enumerate(shapes):
        if max(shape, default=0) > _LONGEST:
            raise KernelError(
                f"{arguments.output_label(kernel, 'output_shapes', i)}: got {shape}; MLX's arrays "
                f"have {_LONGEST} elements along a dim at most."
            )


def stale(kernel: Kernel, index: int, traced: object, shape: object) -> KernelError:
    """The error for an input of another shape than the one that a call's numbers are for."""
    return KernelError(
        f"{kernel.tag} kernel {kernel.name!r}: input {kernel.input_names[index]!r} has the "
        f"shape {shape}, but grid, threadgroup and output shapes were given as numbers, in "
        f"a shapeless trace, for {traced}. Give them as expressions of the inputs "
        '(grid=("inp.size", 1, 1)), or declare the kernel with ferrule.op.'
    )


def refusals(kernel: Kernel) -> dict[str, Callable[..., Any]]:
    """The rules of a kernel's call: it has neither derivatives nor batches."""

    def refuse(rule: str, missing: str, *_: Any) -> Any:
        raise KernelError(
            f"{kernel.tag} kernel {kernel.name!r} has no {missing}: a {kernel.tag[1:-1]} call has "
            f"none. Declare it with ferrule.op and def_{rule}, or wrap the call in an "
            "mx.custom_function, which MLX neither compiles with shapeless=True nor exports."
        )

    words = {"vjp": "derivative", "jvp": "forward-mode derivative", "vmap": "batching rule"}
    return {rule: partial(refuse, rule, missing) for rule, missing in words.items()}


class NodeSizes(NodeKernel):
    """A kernel whose sizes are expressions of its inputs' shapes, of certain ranks."""

    def __init__(self, kernel: Kernel, sizes: Sizes, init_value: float | None) -> None:
        super().__init__(kernel)
        self.sizes, self.fill = sizes, init_value
        program = compile_rule(sizes.rule, sizes.launch)
        if program is None:
            raise KernelError(
                f"[metal_kernel] kernel {kernel.name!r} has more inputs and dims than expressions "
                "can name; give its sizes as numbers."
            )
        self.words = (_int64 * len(program.words))(*program.words)
        s = self.structure
        s.program = ctypes.cast(self.words, ctypes.POINTER(_int64))
        body = s.body[0]
        body.grid, body.first_template, body.templates = 0, 6, len(sizes.launch) - 6

    def prepared(self, request: Request) -> Prepared:
        """The program and arguments for a request; raises what is wrong with its sizes."""
        shapes: list[Shape] = []
        for i, argument in enumerate(self.sizes.rule.inputs):
            array = request.input[i]
            if array.ndim != len(argument.dims or ()):  # other ranks have sizes of their own
                raise KernelError(f"[metal_kernel] input {argument.name!r} has another rank.")
            shapes.append(tuple(array.sizes[: array.ndim]))
        check_numbers(self.kernel, self.sizes, shapes)
        if not request.output or not request.grid:
            raise KernelError(
                f"[metal_kernel] kernel {self.kernel.name!r}: sizes for inputs of the shapes "
                f"{', '.join(map(str, shapes))} do not fit in 64 bits."
            )
        return super().prepared(request)

    def _rules(self) -> dict[str, Callable[..., Any]]:
        return {**super()._rules(), "metal": self._by_stock_node}

    def _by_stock_node(self, values: tuple[Any, ...]) -> list[mx.array]:
        grid, threadgroup, shapes, template = self.sizes.numbers([value.shape for value in values])
        kinds = [dtypes.BY_NAME[output.dtype] for output in self.sizes.rule.outputs]
        launch = BodyLaunch(grid, threadgroup, tuple(template), self.fill)
        call = StockCall(self.kernel, launch, list(zip(shapes, kinds, strict=True)), [])
        return mlx_gpu.call_stock(call, values)

    def filled(self, request: Request) -> float | None:
        """What outputs are filled with, if they are."""
        return self.fill

    def template(self, request: Request) -> Template:
        """The template of a request."""
        values = iter(request.template_value[i] for i in range(len(self.sizes.launch) - 6))
        items = [(n, next(values) if v is None else v) for n, v in self.sizes.template]
        return tuple(
            (str(name), arguments.template_value(self.kernel, name, value)) for name, value in items
        )


def check_numbers(kernel: Kernel, sizes: Sizes, shapes: Sequence[Shape]) -> None:
    """Refuse sizes that a call with numbers would refuse.

    Raises:
        KernelError, KernelTypeError: one is out of range; says which.
    """
    grid, threadgroup, outputs, template = sizes.numbers(shapes)
    threads = arguments.axes(kernel, "grid", grid, 0)
    arguments.threadgroup_axes(kernel, threadgroup, threads)
    for i, output in enumerate(sizes.rule.outputs):
        arguments.output_shape(kernel, i, outputs[i], dtypes.BY_NAME[output.dtype])
    for name, value in template:
        arguments.template_value(kernel, name, value)
    if 0 in threads:
        arguments.check_empty(kernel, threads, outputs)


_following: dict[object, tuple[NodeSizes, int]] = {}  # with their plans


def _plan_of(kernel: Kernel, sizes: Sizes, init_value: float | None, fills: bytes | None) -> int:
    """The plan, in C, of nodes of a kernel with these expressions."""
    template = tuple([(name, type(value), value) for name, value in sizes.template])
    key = (kernel, str(sizes.rule), tuple(sizes.launch), template, fills)
    entry = _following.get(key)
    if entry is None:
        bound = NodeSizes(kernel, sizes, init_value)
        results = [((), dtypes.BY_NAME[output.dtype]) for output in sizes.rule.outputs]
        entry = _following[key] = bound, bound.new_plan(results, None, 0, fills)
    return entry[1]


_kernels: dict[Kernel, NodeKernel] = {}


def call_kernel(
    kernel: Kernel, wants: Sequence[bool], inputs: Sequence[Any], shapes: Sequence[Shape],
    output_dtypes: Sequence[Dtype], grid: tuple[int, int, int], threadgroup: tuple[int, int, int],
    template: Template, init_value: float | None, stream: object,
    memo_key: tuple[object, ...], sizes: Sizes | None,
) -> list[mx.array] | None:  # fmt: skip
    """The outputs of a `metal_kernel` call, as nodes; None where nodes cannot be had.

    Arguments were checked, but for the inputs: arrays and scalars. By ``memo_key``, all but the
    inputs and the stream as they were given, `again` does the same without Python. ``sizes`` are
    the expressions that the node follows, if any size is one.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            the call does.
    """
    launch = BodyLaunch(grid, threadgroup, template, init_value)
    call = StockCall(kernel, launch, list(zip(shapes, output_dtypes, strict=True)), [])
    if sizes is None and kernel.language == "metal" and mlx_gpu.on_metal(stream):
        arrays = tuple([array_of(kernel, wants, i, value) for i, value in enumerate(inputs)])
        return mlx_gpu.call_stock(call, arrays, stream)
    native = library()
    most = max(len(kernel.input_names), len(kernel.output_names))
    deepest = max(len(shape) for shape in shapes)
    if native is None or most > ARGUMENTS or deepest > MOST_DIMS:
        return None
    if kernel.language == "cuda" and not (native.fr_mlx_has_cuda() or devices.runs_cuda(kernel)):
        raise arguments.needs_cuda(kernel, mlx.name, "cpu")
    arrays = tuple([array_of(kernel, wants, i, value) for i, value in enumerate(inputs)])
    fills = None
    if init_value is not None:
        parts = [
            np.array(arguments.fill_value(kernel, i, init_value, kind)).astype(kind.numpy).tobytes()
            for i, kind in enumerate(output_dtypes)
        ]
        fills = b"".join(parts)
    bound = _kernels.get(kernel)
    if bound is None:
        bound = _kernels[kernel] = NodeKernel(kernel)
    if sizes is not None:
        plan = _plan_of(kernel, sizes, init_value, fills)
    else:
        plan = bound.plan(call, fills)
    outputs: list[mx.array] = answered(native.fr_mlx_run(plan, arrays, stream_of(kernel, stream)))
    native.fr_mlx_remember(bound.calls, memo_key, plan)
    return outputs


def again(kernel: Kernel) -> Any:
    """A function in C that makes calls like earlier ones of a kernel that was called.

    It takes the inputs, an MLX stream or None, and the ``memo_key`` of `call_kernel`; it gives
    NotImplemented for what Python must look at.
    """
    bound = _kernels.get(kernel)  # none where MLX's own nodes are used
    return None if bound is None else loaded().fr_mlx_again(bound.calls)


def array_of(kernel: Kernel, wants: Sequence[bool], index: int, value: Any) -> mx.array:
    """An input of a kernel: scalars become arrays."""
    if not isinstance(value, mx.array):
        fact, _ = arguments.scalar(kernel, index, value)
        return mx.array(value, mlx.DTYPES[fact.dtype.name])
    kind = mlx.KNOWN[value.dtype]
    if not kind.level0 or wants[index]:
        arguments.check_input(kernel, index, mlx.described(value, "cpu"))
    return value


def stream_of(kernel: Kernel, stream: object) -> Any:
    """The stream, or None for the default one."""
    if stream is None:
        return None
    try:
        mlx.stream(stream, "cpu")
    except KernelTypeError as error:
        raise arguments.renamed(error, arguments.label_of(kernel, "stream")) from error
    device: Any = stream
    if isinstance(device, mx.Stream):
        return device
    if not isinstance(device, (mx.Device, mx.DeviceType)):  # a stream for each thread
        with mx.stream(device):
            return mx.default_stream(device.device)
    # Programs may have told Python that there is a GPU.
    if device == mx.gpu and not loaded().fr_mlx_has_gpu():
        return mx.default_stream(mx.cpu)
    return mx.default_stream(device)
