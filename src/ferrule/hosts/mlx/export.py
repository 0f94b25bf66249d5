"""Kernels in files of `mx.export_function`, on machines without Metal and CUDA, too.

While MLX traces a function for a file, a call makes a node with MLX's own record of a kernel: the
text that MLX would write, grid, threadgroup, and so on, on MLX's placeholder for a GPU. MLX on
Apple's GPUs loads and runs such files as they are, but for shapeless ones, whose shapes it cannot
know. Numbers, dims and arrays that are absent are further inputs of a record: constants of the
file. An op stands in the last line of its text, as a comment, so that `hosts.mlx.reading` has its
rule; so do sizes of a kernel's call that are expressions.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ... import dtypes
from ...dtypes import Dtype
from ...errors import KernelError, KernelTypeError
from ...kernel import MATH_MODES
from ...kernels import arguments
from ...operators import call as op_call
from ...operators import file as op_file
from ...operators import identity
from ...operators import launch as op_launch
from ...operators.bodies import KernelBody
from ...source.cuda import mlx as mlx_cuda
from ...source.metal import text as metal
from ...spec import SMALL, Facts, Input, Shape, Spec, row_contiguous_strides
from . import arrays as mlx
from . import build as mlx_build
from . import gpu as mlx_gpu
from . import kernel_nodes
from . import node as mlx_node

if TYPE_CHECKING:
    from ...kernel import Kernel
    from ...kernels import sizes as call_sizes
    from ...operators.op import Op

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


class _Record(ctypes.Structure):  # fr_mlx_record of runtime/mlx_export.h
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("grid", ctypes.c_int32 * 6),
        ("inputs", ctypes.c_int32),
        ("wants", ctypes.c_char_p),
        ("contiguous", ctypes.c_int32),
        ("filled", ctypes.c_int32),
        ("fill", ctypes.c_float),
        ("shared", ctypes.c_int32),
        ("math_mode", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("dtypes", ctypes.POINTER(ctypes.c_int32)),
        ("shapes", ctypes.POINTER(ctypes.c_int64)),
    )


# -- records ------------------------------------------------------------------------------------


def kernel_record(
    kernel: Kernel,
    inputs: Sequence[tuple[Dtype, Shape]],
    outputs: Sequence[Dtype],
    template: Template,
    grid: Sizes,
    threadgroup: Sizes,
    fill: float | None,
) -> Record:
    """The record of a kernel's call.

    Args:
        kernel: what is called.
        inputs: dtype and shape of each input.
        outputs: the dtype of each output.
        template, grid, threadgroup: as the kernel is called with.
        fill: its `init_value`, or None.

    Raises:
        KernelError: MLX's files cannot hold it; says what.
    """
    specs = tuple([Input(kind, len(shape), math.prod(shape) < SMALL) for kind, shape in inputs])
    spec = Spec(kernel, specs, tuple(outputs), template)
    fill_as_float32 = None if fill is None else _float32(kernel, fill)
    mode = MATH_MODES.index(kernel.math_mode)
    if kernel.language == "cuda":
        return Record(
            mlx_cuda.kernel_name(spec),
            mlx_cuda.text(spec),
            grid,
            threadgroup,
            mlx_cuda.wants(kernel, specs),
            kernel.ensure_row_contiguous,
            fill_as_float32,
            kernel.shared_memory,
            mode,
        )
    if dtypes.float64 in (*[kind for kind, _ in inputs], *outputs):
        raise KernelError(
            f"{kernel.tag} kernel {kernel.name!r} has arguments of float64, which Metal has not, "
            "so it cannot be exported; make them float32."
        )
    return Record(
        metal.kernel_name(spec),
        metal.text(spec),
        grid,
        threadgroup,
        tuple([kernel.wants(name) for name in kernel.input_names]),
        kernel.ensure_row_contiguous,
        fill_as_float32,
        0,
        mode,
    )


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


def op_record(
    op: Op, facts: dict[str, Facts | float | None]
) -> tuple[Record, list[tuple[Shape, Dtype]], list[tuple[Dtype, Shape]], list[int]]:
    """The record of an op's call.

    Args:
        op: the op.
        facts: per input the facts of the array, the number, or None where it is absent.

    Returns:
        The record; shape and dtype of each output; dtype and shape of each of the record's inputs;
        and the dims that are the last of these inputs.

    Raises:
        KernelError: the inputs contradict the rule, or MLX's files cannot hold the call.
    """
    binding, results = op_call.bound(op, facts)
    body = exported_body(op, lambda candidate: candidate.holds(binding))
    launch = body.launch_for(binding)
    outputs = [Facts(kind, s, row_contiguous_strides(s), 0, "cpu") for s, kind in results]
    if 0 in launch.grid:
        op_launch.check_empty(op.name, op.rule, launch, outputs)
    inputs, sizes = mlx_gpu.stock_inputs(op, facts, binding, body)
    kernel = replace(body.kernel, shared_memory=launch.shared) if launch.shared else body.kernel
    record = kernel_record(
        kernel,
        inputs,
        [kind for _, kind in results],
        launch.template,
        launch.grid,
        launch.threadgroup,
        launch.fill,
    )
    comment = {
        "op": op_file.full_name(op),
        "absent": [argument.name for argument in op.rule.inputs if facts[argument.name] is None],
        "scalars": [
            argument.name
            for argument in op.rule.inputs
            if argument.dims and isinstance(fact := facts[argument.name], Facts) and not fact.shape
        ],
        "saved": json.loads(op_file.write([op])),
    }
    text = record.text + MARK + json.dumps(comment, sort_keys=True)
    return record._replace(text=text), results, inputs, sizes


def exported_body(op: Op, holds: Any) -> KernelBody:
    """The body that stands in files: Metal's where there is one.

    Args:
        op: the op.
        holds: whether a body is for a call.

    Raises:
        KernelError: there is none; says what the op has.
    """
    bodies = [body for body in op.implementations if isinstance(body, KernelBody)]
    for kind in ("metal", "cuda"):
        for body in bodies:
            if body.kind == kind and holds(body):
                return body
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
    facts = {
        argument.name: _fact(op, argument, value)
        for argument, value in zip(op.rule.inputs, values, strict=True)
    }
    record, results, inputs, dims = op_record(op, facts)
    fixed = [None if isinstance(fact, Facts) else fact for fact in facts.values()]
    arrays = mlx_gpu.stock_arrays(
        [value if number is None else number for value, number in zip(values, fixed, strict=True)],
        inputs,
        dims,
    )
    scalars = [
        i
        for i, (fact, (_, shape)) in enumerate(zip(facts.values(), inputs, strict=False))
        if isinstance(fact, Facts) and fact.shape != shape
    ]
    rules = _Rules(op, fixed, [isinstance(f, Facts) for f in facts.values()], scalars, len(arrays))
    outputs = _recorded(f"op {op.name!r}", rules, arrays, record, results)
    return op_call.packed(outputs)


def _fact(op: Op, argument: Any, value: Any) -> Facts | float | None:
    if argument.dims is None:
        return op_launch.number(op.name, argument, value)
    if value is None:
        return None
    label = f"[op] input {argument.name!r} of op {op.name!r}"
    if not isinstance(value, mx.array):
        raise KernelTypeError(
            f"{label}: got {arguments.shown(value)} of type {type(value).__name__}, expected an "
            f"array: {argument}."
        )
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
    described = [(mlx.KNOWN[array.dtype], array.shape) for array in arrays]
    record = kernel_record(
        kernel, described, output_dtypes, template, grid, threadgroup, init_value
    )
    if verbose:
        print(f"Generated source code for `{kernel.name}`:\n```\n{record.text}\n```", flush=True)
    if sizes is not None:
        record = record._replace(text=with_sizes(record.text, sizes.texts()))

    def no_rule(query: str, *_: Any) -> Any:
        raise kernel_nodes.without_rule(kernel, query)

    results = list(zip(shapes, output_dtypes, strict=True))
    label = f"kernel {kernel.name!r}"
    return _recorded(label, no_rule, arrays, record, results)


def on_cpu(kernel: Kernel, stream: object) -> bool:
    """Whether a stream or device is the CPU's."""
    if stream is None:
        return False
    kernel_nodes.stream_of(kernel, stream)  # refuses what is none
    device: Any = getattr(stream, "device", stream)
    return (device if isinstance(device, mx.Device) else mx.Device(device)).type == mx.cpu


def _recorded(
    label: str,
    rules: Any,
    arrays: Sequence[mx.array],
    record: Record,
    results: Sequence[tuple[Shape, Dtype]],
) -> list[mx.array]:
    native = mlx_build.loaded()
    shapes = [word for shape, _ in results for word in (len(shape), *shape)]
    kinds = [dtypes.ALL.index(kind) for _, kind in results]
    wants = bytes(flag for three in record.wants for flag in three)
    structure = _Record(
        record.name.encode(), record.text.encode(),
        (ctypes.c_int32 * 6)(*record.grid, *record.threadgroup), len(arrays), wants,
        record.contiguous, record.fill is not None, 0.0 if record.fill is None else record.fill,
        record.shared, record.math_mode, len(results), (ctypes.c_int32 * len(kinds))(*kinds),
        (ctypes.c_int64 * len(shapes))(*shapes),
    )  # fmt: skip
    answer = mlx_node.answering(rules, label)
    result = native.fr_mlx_record_call(
        label.encode(), answer, tuple(arrays), ctypes.addressof(structure)
    )
    if result is NotImplemented:
        raise mlx_node.why() or KernelError(f"{label} cannot be exported.")
    return list(result)


class _Rules:
    """The derivatives and batches of a recorded node, with all inputs of the record."""

    def __init__(
        self,
        op: Op,
        fixed: Sequence[float | None],
        arrays: Sequence[bool],
        scalars: Sequence[int],
        count: int,
    ) -> None:
        self._rules = mlx_node.rules(op)
        self._fixed, self._arrays, self._scalars, self._count = fixed, arrays, scalars, count

    def __call__(self, query: str, *args: Any) -> tuple[Any, ...]:
        if query == "vjp":
            primals, cotangents, outputs = args
            grads = self._rules("vjp", self._inputs(self._scalar(primals)), cotangents, outputs)
            gradients = [
                mx.expand_dims(grad, 0) if i in self._scalars and grad is not None else grad
                for i, grad in enumerate(grads)
            ]
            return (*gradients, *[None] * (self._count - len(gradients)))
        if query == "jvp":
            primals, tangents = map(self._scalar, args)
            return tuple(self._rules("jvp", self._inputs(primals), tangents[: len(self._fixed)]))
        values, axes = list(args[0]), list(args[1])
        for i in self._scalars:
            values[i] = mx.squeeze(values[i], 0 if axes[i] is None else 1 - axes[i])
            axes[i] = None if axes[i] is None else 0
        return tuple(self._rules("vmap", self._inputs(values), tuple(axes[: len(self._fixed)])))

    def _scalar(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """These arrays without the dim that arrays without dims have in a record."""
        return tuple(
            mx.squeeze(array, 0) if i in self._scalars and array is not None else array
            for i, array in enumerate(arrays)
        )

    def _inputs(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The op's inputs: arrays, numbers, None."""
        triples = zip(self._fixed, self._arrays, arrays, strict=False)
        return tuple(array if is_array else number for number, is_array, array in triples)
