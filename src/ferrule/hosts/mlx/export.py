"""Kernels in files of `mx.export_function`, on machines without Metal and CUDA, too.

While MLX traces a function for a file, a call makes a node with MLX's own record of a kernel: the
text that MLX would write, grid, threadgroup, and so on, on MLX's placeholder for a GPU. MLX on
Apple's GPUs loads and runs such files as they are, but for shapeless ones, whose shapes it cannot
know. Numbers, dims and arrays that are absent are further inputs of a record: constants of the
file. An op stands in the last line of its text, as a comment, so that `hosts.mlx.reading` has its
rule; so do sizes of a kernel's call that are expressions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ... import dtypes
from ...dtypes import Dtype
from ...errors import KernelError
from ...kernel import MATH_MODES
from ...kernels import arguments
from ...operators import call as op_call
from ...operators import file as op_file
from ...operators import identity
from ...operators import launch as op_launch
from ...operators.bodies import BodyLaunch, KernelBody
from ...source.cuda import mlx as mlx_cuda
from ...source.metal import text as metal
from ...spec import SMALL, Facts, Input, Shape, Spec
from . import arrays as mlx
from . import build as mlx_build
from . import gpu as mlx_gpu
from . import kernel_nodes
from . import node as mlx_node
from .gpu import StockCall

if TYPE_CHECKING:
    from ...kernel import Kernel
    from ...kernels import sizes as call_sizes
    from ...operators.op import Op
    from ...rules.argument import Argument
    from ...rules.rule import Binding

MARK = "\n// ferrule: "  # and an op, or expressions, as JSON, at the end of a record's text

Sizes = tuple[int, int, int]
Template = tuple[tuple[str, int | bool | Dtype], ...]


class Record(NamedTuple):
    """A kernel's call as MLX's files hold it, in numbers and text.

    Attributes:
        name: of the function in the text.
        text: what MLX compiles.
        grid, threadgroup: threads along x, y and z.
        wants: per input, whether its shape, strides and rank are passed with it.
        contiguous: inputs that are not row-contiguous are copied first.
        fill: what outputs are filled with first, or None.
        shared: bytes of dynamic shared memory.
        math_mode: a place in `kernel.MATH_MODES`.
    """

    name: str
    text: str
    grid: Sizes
    threadgroup: Sizes
    wants: tuple[tuple[bool, bool, bool], ...]
    contiguous: bool
    fill: float | None
    shared: int
    math_mode: int


# -- records ------------------------------------------------------------------------------------


def kernel_record(call: StockCall) -> Record:
    """The record of a kernel's call.

    Raises:
        KernelError: MLX's files cannot hold it; says what.
    """
    kernel, launch = call.kernel, call.launch
    specs = spec_inputs(call.inputs)
    outputs = tuple([kind for _, kind in call.results])
    spec = Spec(kernel, specs, outputs, launch.template)
    fill = None if launch.fill is None else _float32(kernel, launch.fill)
    wants: tuple[tuple[bool, bool, bool], ...]
    if kernel.language == "cuda":
        name, text = mlx_cuda.kernel_name(spec), mlx_cuda.text(spec)
        wants, shared = mlx_cuda.wants(kernel, specs), kernel.shared_memory
    else:
        if dtypes.float64 in (*[kind for kind, _ in call.inputs], *outputs):
            raise KernelError(
                f"{kernel.tag} kernel {kernel.name!r} has arguments of float64, which Metal has "
                "not, so it cannot be exported; make them float32."
            )
        name, text = metal.kernel_name(spec), metal.text(spec)
        wants, shared = tuple([kernel.wants(name) for name in kernel.input_names]), 0
    mode = MATH_MODES.index(kernel.math_mode)
    sizes = launch.grid, launch.threadgroup
    return Record(name, text, *sizes, wants, kernel.ensure_row_contiguous, fill, shared, mode)


def spec_inputs(arrays: Sequence[tuple[Dtype, Shape]]) -> tuple[Input, ...]:
    """What the text of a record knows of its inputs."""
    return tuple([Input(kind, len(shape), math.prod(shape) < SMALL) for kind, shape in arrays])


def _float32(kernel: Kernel, fill: float) -> float:
    """An `init_value` as files hold it: a float32."""
    with np.errstate(over="ignore"):
        number = float(np.float32(fill))
    if np.isfinite(fill) and (np.isinf(number) or (isinstance(fill, int) and number != fill)):
        raise KernelError(
            f"{kernel.tag} kernel {kernel.name!r} has the `init_value` {fill}, which files of "
            f"mx.export_function hold as a float32: {number:.0f}. Give a number that fits."
        )
    return number


def with_sizes(text: str, sizes: Any) -> str:
    """A record's text and, behind it, the sizes that are expressions (`Sizes.texts`)."""
    comment = {"sizes": sizes, "digest": identity.digest([text, sizes])}
    return text + MARK + json.dumps(comment, sort_keys=True)


class OpInputs:
    """The inputs of an op's call, as they stand in its record.

    What is no array there is a constant, and an array without dims, of an input that is declared
    with dims, has one.

    Attributes:
        numbers: per input its number; None where it is an array or absent.
        arrays: per input whether it is an array.
        scalars: per input whether it is such an array.
    """

    def __init__(self, op: Op, facts: Mapping[str, Facts | float | None]) -> None:
        self.numbers = [None if isinstance(fact, Facts) else fact for fact in facts.values()]
        self.arrays = [isinstance(fact, Facts) for fact in facts.values()]
        self.scalars = [
            bool(argument.dims) and isinstance(fact, Facts) and not fact.shape
            for argument, fact in zip(op.rule.inputs, facts.values(), strict=True)
        ]

    def squeezed(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays of the record for the op's inputs, without the dim that the op's have not."""
        return [
            mx.squeeze(array, 0) if scalar and array is not None else array
            for array, scalar in zip(arrays, self.scalars, strict=False)
        ]

    def values(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The op's inputs, arrays, numbers and None, given such arrays."""
        triples = zip(self.numbers, self.arrays, arrays, strict=False)
        return tuple(array if is_array else number for number, is_array, array in triples)


def op_record(op: Op, facts: dict[str, Facts | float | None]) -> tuple[Record, StockCall]:
    """The record of an op's call, and the call.

    Args:
        op: the op.
        facts: per input the facts of the array, the number, or None where it is absent.

    Raises:
        KernelError: the inputs contradict the rule, or MLX's files cannot hold the call.
    """
    bound = op_launch.bound(op, "cpu", facts)
    body, binding = exported_body(op, bound.binding)
    call = mlx_gpu.stock_call(bound._replace(binding=binding), body)
    record = kernel_record(call)
    scalars = OpInputs(op, facts).scalars
    comment = {
        "op": op_file.full_name(op),
        "absent": [name for name, fact in facts.items() if fact is None],
        "scalars": [name for name, scalar in zip(facts, scalars, strict=True) if scalar],
        "saved": json.loads(op_file.write([op])),
    }
    text = record.text + MARK + json.dumps(comment, sort_keys=True)
    return record._replace(text=text), call


def exported_body(op: Op, binding: Binding) -> tuple[KernelBody, Binding]:
    """The body that stands in files for such a call, Metal's where there is one; and the binding
    for where it runs.

    Raises:
        KernelError: there is none; says what the op has.
    """
    bodies = [body for body in op.implementations if isinstance(body, KernelBody)]
    for kind in ("metal", "cuda"):
        # Not the device of this call, but the one that the file is for.
        there = binding.on(functools.partial(dict, {":device": kind}))
        for body in bodies:
            if body.kind == kind and body.holds(there):
                return body, there
    if bodies:
        raise KernelError(
            f"[op] op {op.name!r} cannot be exported for these sizes: its kernels are for others."
        )
    described = ", ".join(
        f"the Python function of `{body.kind}`" if body.kind != "cuda" else "a CUDA unit"
        for body in op.implementations
    )
    raise KernelError(
        f"[op] op {op.name!r} cannot be exported: files of mx.export_function hold kernels, each a "
        f"Metal or CUDA body, and it has {described} alone. Give it a `metal` body."
    )


# -- calls while MLX traces for a file ------------------------------------------------------------


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op's call, which is recorded.

    Raises:
        KernelError: the inputs contradict the rule, or a file cannot hold the call; says why.
        KernelTypeError: an input is of a wrong type.
    """
    if any(argument.mutable for argument in op.rule.inputs):
        raise KernelError(
            f"[op] op {op.name!r} writes its inputs in place, which arrays of MLX do not allow; "
            "declare outputs in their place."
        )
    facts = op_call.gathered(op, values, functools.partial(_described, op))
    record, stock = op_record(op, facts)
    inputs = OpInputs(op, facts)
    arrays = mlx_gpu.stock_arrays(inputs.values(values), stock)
    rules = _rules(op, inputs, len(arrays))
    return op_call.packed(_recorded(f"op {op.name!r}", rules, arrays, record, stock.results))


def _described(op: Op, argument: Argument, value: Any) -> Facts:
    if not isinstance(value, mx.array):
        raise arguments.wrong_type(op_call.label_of(op, argument), value, f"an array: {argument}")
    return mlx.described(value, "cpu")


def call_kernel(
    kernel: Kernel, wants: Sequence[bool], inputs: Sequence[Any], shapes: Sequence[Shape],
    output_dtypes: Sequence[Dtype], grid: Sizes, threadgroup: Sizes, template: Template,
    init_value: float | None, verbose: bool, stream: object, sizes: call_sizes.Sizes | None,
) -> list[mx.array]:  # fmt: skip
    """The outputs of a kernel's call, which is recorded.

    Arguments were checked, but for inputs; ``sizes`` has the expressions, if any size is one.

    Raises:
        KernelError, KernelTypeError: an input, or what a file cannot hold.
    """
    if on_cpu(kernel, stream):
        raise KernelError(
            f"{kernel.tag} Only supports the GPU while a function is exported: "
            f"{arguments.label_of(kernel, 'stream')} is {stream!r}; leave it out."
        )
    kernel_nodes.check_shapes(kernel, shapes)
    if init_value is not None:
        for i, kind in enumerate(output_dtypes):
            arguments.fill_value(kernel, i, init_value, kind)
    arrays = [kernel_nodes.array_of(kernel, wants, i, value) for i, value in enumerate(inputs)]
    results = list(zip(shapes, output_dtypes, strict=True))
    described = [(mlx.KNOWN[array.dtype], array.shape) for array in arrays]
    launch = BodyLaunch(grid, threadgroup, template, init_value)
    record = kernel_record(StockCall(kernel, launch, results, described))
    if verbose:
        print(f"Generated source code for `{kernel.name}`:\n```\n{record.text}\n```", flush=True)
    if sizes is not None:
        record = record._replace(text=with_sizes(record.text, sizes.texts()))
    rules = kernel_nodes.refusals(kernel)
    return _recorded(f"kernel {kernel.name!r}", rules, arrays, record, results)


def on_cpu(kernel: Kernel, stream: object) -> bool:
    """Whether a stream or device is the CPU's."""
    if stream is None:
        return False
    kernel_nodes.stream_of(kernel, stream)  # refuses what is none
    device: Any = getattr(stream, "device", stream)
    return (device if isinstance(device, mx.Device) else mx.Device(device)).type == mx.cpu


def _recorded(
    label: str,
    rules: mlx_node.Rules,
    arrays: Sequence[mx.array],
    record: Record,
    results: Sequence[tuple[Shape, Dtype]],
) -> list[mx.array]:
    answer = mlx_node.answering(rules, label)
    outputs = mlx_build.outputs_of(results)
    native = mlx_build.loaded()
    return list(
        mlx_node.answered(
            native.fr_mlx_record_call(label.encode(), answer, tuple(arrays), record, outputs)
        )
    )


def _rules(op: Op, inputs: OpInputs, count: int) -> mlx_node.Rules:
    """The derivatives and batches of a recorded node, with all ``count`` inputs of the record."""
    rules = mlx_node.rules(op)

    def vjp(primals: Any, cotangents: Any, outputs: Any, places: Any) -> Iterable[Any]:
        grads = rules["vjp"](inputs.values(inputs.squeezed(primals)), cotangents, outputs, places)
        gradients = [
            mx.expand_dims(grad, 0) if scalar and grad is not None else grad
            for grad, scalar in zip(grads, inputs.scalars, strict=True)
        ]
        return [*gradients, *[None] * (count - len(gradients))]

    def jvp(primals: Any, tangents: Any) -> Iterable[Any]:
        values = inputs.values(inputs.squeezed(primals))
        return rules["jvp"](values, tuple(inputs.squeezed(tangents)))

    def vmap(arrays: Any, record_axes: Any) -> Iterable[Any]:
        values, axes = list(arrays), list(record_axes[: len(inputs.scalars)])
        for i, scalar in enumerate(inputs.scalars):
            if scalar:
                values[i] = mx.squeeze(values[i], 0 if axes[i] is None else 1 - axes[i])
                axes[i] = None if axes[i] is None else 0
        return rules["vmap"](inputs.values(values), tuple(axes))

    return {"vjp": vjp, "jvp": jvp, "vmap": vmap}
