"""Kernels in files of `mx.export_function`, on machines without Metal and CUDA, too.

While MLX traces a function for a file, a call makes a node with MLX's own record of a kernel: the
text that MLX would write, grid, threadgroup, and so on, on MLX's placeholder for a GPU. MLX on
Apple's GPUs loads and runs such files as they are, but for shapeless ones, whose shapes it cannot
know. Numbers, dims and arrays that are absent are further inputs of a record: constants of the
file. An op stands in the last line of its text, as a comment, so that `hosts.mlx_import` has its
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

from .. import arguments, dtypes, identity, op_call, op_file, op_launch
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..implementation import KernelBody
from ..kernel import MATH_MODES
from ..source import metal, mlx_cuda
from ..spec import SMALL, Facts, Input, Shape, Spec, row_contiguous_strides
from . import mlx, mlx_build, mlx_gpu, mlx_node

if TYPE_CHECKING:
    from .. import call_sizes
    from ..kernel import Kernel
    from ..op_declaration import Op

MARK = "\n// ferrule: "  # and an op, or expressions, as JSON, at the end of a record's text

Sizes = tuple[int, int, int]
Template = tuple[tuple[str, int | bool | Dtype], ...]


class Record(NamedTuple):
    """What MLX's files hold of a kernel's call, all of it numbers and text.

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
        ("name", ctypes.c_char_p), ("text", ctypes.c_char_p), ("grid", ctypes.c_int32 * 6),
        ("inputs", ctypes.c_int32), ("wants", ctypes.c_char_p), ("contiguous", ctypes.c_int32),
        ("filled", ctypes.c_int32), ("fill", ctypes.c_float), ("shared", ctypes.c_int32),
        ("math_mode", ctypes.c_int32), ("outputs", ctypes.c_int32),
        ("dtypes", ctypes.POINTER(ctypes.c_int32)), ("shapes", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


# -- records ------------------------------------------------------------------------------------


def kernel_record(
    kernel: Kernel, inputs: Sequence[tuple[Dtype, Shape]], outputs: Sequence[Dtype],
    template: Template, grid: Sizes, threadgroup: Sizes, fill: float | None,
) -> Record:  # fmt: skip
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
    given = tuple([Input(kind, len(shape), math.prod(shape) < SMALL) for kind, shape in inputs])
    spec = Spec(kernel, given, tuple(outputs), template)
    number = None if fill is None else _float32(kernel, fill)
    mode = MATH_MODES.index(kernel.math_mode)
    if kernel.language == "cuda":
        return Record(
            mlx_cuda.kernel_name(spec), mlx_cuda.text(spec), grid, threadgroup,
            mlx_cuda.wants(kernel, given), kernel.ensure_row_contiguous, number,
            kernel.shared_memory, mode,
        )  # fmt: skip
    if dtypes.float64 in (*[kind for kind, _ in inputs], *outputs):
        raise KernelError(
            f"{kernel.tag} kernel {kernel.name!r} has arguments of float64, which Metal has not, "
            "so it cannot be exported; make them float32."
        )
    return Record(
        metal.kernel_name(spec), metal.text(spec), grid, threadgroup,
        tuple([kernel.wants(name) for name in kernel.input_names]),
        kernel.ensure_row_contiguous, number, 0, mode,
    )  # fmt: skip


def _float32(kernel: Kernel, fill: float) -> float:
    """An `init_value` as files hold it."""
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
    op: Op, given: dict[str, Facts | float | None]
) -> tuple[Record, list[tuple[Shape, Dtype]], list[tuple[Dtype, Shape]], list[int]]:
    """The record of an op's call.

    Args:
        op: the op.
        given: per input what is known of the array, the number, or None where it is absent.

    Returns:
        The record; shape and dtype of each output; dtype and shape of each of the record's inputs;
        and the dims that are the last of these inputs.

    Raises:
        KernelError: the inputs contradict the rule, or MLX's files cannot hold the call.
    """
    said, results = op_call.bound(op, given)
    body = exported_body(op, lambda one: one.holds(said))
    sent = body.sent(said)
    outputs = [Facts(kind, s, row_contiguous_strides(s), 0, "cpu") for s, kind in results]
    if 0 in sent.grid:
        op_launch.check_empty(op.name, op.rule, sent, outputs)
    inputs, sizes = mlx_gpu.stock_inputs(op, given, said, body)
    kernel = replace(body.kernel, shared_memory=sent.shared) if sent.shared else body.kernel
    record = kernel_record(
        kernel, inputs, [kind for _, kind in results], sent.template, sent.grid, sent.threadgroup,
        sent.fill,
    )  # fmt: skip
    comment = {
        "op": op_file.full_name(op),
        "absent": [one.name for one in op.rule.inputs if given[one.name] is None],
        "scalars": [
            one.name for one in op.rule.inputs
            if one.dims and isinstance(f := given[one.name], Facts) and not f.shape
        ],
        "saved": json.loads(op_file.write([op])),
    }  # fmt: skip
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
    bodies = [one for one in op.implementations if isinstance(one, KernelBody)]
    for kind in ("metal", "cuda"):
        for one in bodies:
            if one.kind == kind and holds(one):
                return one
    if bodies:
        raise KernelError(
            f"[op] op {op.name!r} cannot be exported for these sizes: its kernels are for others."
        )
    found = ", ".join(
        f"the Python function of `{one.kind}`" if one.kind != "cuda" else "a CUDA unit"
        for one in op.implementations
    )
    raise KernelError(
        f"[op] op {op.name!r} cannot be exported: files of mx.export_function hold kernels, each a "
        f"Metal or CUDA body, and it has {found} alone. Give it a `metal` body."
    )


# -- calls while MLX traces for a file ------------------------------------------------------------


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op's call, which is recorded.

    Raises:
        KernelError: the inputs contradict the rule, or a file cannot hold the call; says why.
        KernelTypeError: an input is of a wrong type.
    """
    if any(one.mutable for one in op.rule.inputs):
        raise KernelError(
            f"[op] op {op.name!r} writes its inputs in place, which arrays of MLX do not allow; "
            "declare outputs in their place."
        )
    given = {
        one.name: _given(op, one, value) for one, value in zip(op.rule.inputs, values, strict=True)
    }
    record, results, inputs, dims = op_record(op, given)
    fixed = [None if isinstance(fact, Facts) else fact for fact in given.values()]
    arrays = mlx_gpu.stock_arrays(
        [value if number is None else number for value, number in zip(values, fixed, strict=True)],
        inputs, dims,
    )  # fmt: skip
    scalars = [
        i for i, (fact, (_, shape)) in enumerate(zip(given.values(), inputs, strict=False))
        if isinstance(fact, Facts) and fact.shape != shape
    ]  # fmt: skip
    rules = _Rules(op, fixed, [isinstance(f, Facts) for f in given.values()], scalars, len(arrays))
    outputs = _made(f"op {op.name!r}", rules, arrays, record, results)
    return op_call.packed(outputs)


def _given(op: Op, one: Any, value: Any) -> Facts | float | None:
    if one.dims is None:
        return op_launch.number(op.name, one, value)
    if value is None:
        return None
    label = f"[op] input {one.name!r} of op {op.name!r}"
    if not isinstance(value, mx.array):
        raise KernelTypeError(
            f"{label}: got {arguments.shown(value)} of type {type(value).__name__}, expected an "
            f"array: {one}."
        )
    return mlx.described(value, "cpu")


def call_kernel(
    kernel: Kernel, wants: Sequence[bool], inputs: Sequence[Any], shapes: Sequence[Shape],
    outs: Sequence[Dtype], grid: Sizes, threadgroup: Sizes, template: Template,
    number: float | None, verbose: bool, stream: object, written: call_sizes.Sizes | None,
) -> list[mx.array]:  # fmt: skip
    """The outputs of a kernel's call, which is recorded. Takes what was checked, but for inputs;
    and how sizes are ``written``, if any is an expression.

    Raises:
        KernelError, KernelTypeError: an input, or what a file cannot hold.
    """
    if on_cpu(kernel, stream):
        raise KernelError(
            f"{kernel.tag} Only supports the GPU while a function is exported: "
            f"{arguments.label_of(kernel, 'stream')} is {stream!r}; leave it out."
        )
    mlx_node.check_shapes(kernel, shapes)
    if number is not None:
        for i, kind in enumerate(outs):
            arguments.fill_value(kernel, i, number, kind)
    arrays = [mlx_node.array_of(kernel, wants, i, value) for i, value in enumerate(inputs)]
    given = [(mlx.KNOWN[one.dtype], one.shape) for one in arrays]
    record = kernel_record(kernel, given, outs, template, grid, threadgroup, number)
    if verbose:
        print(f"Generated source code for `{kernel.name}`:\n```\n{record.text}\n```", flush=True)
    if written is not None:
        record = record._replace(text=with_sizes(record.text, written.texts()))

    def no_rule(what: str, *_: Any) -> Any:
        raise mlx_node.without_rule(kernel, what)

    results = list(zip(shapes, outs, strict=True))
    what = f"kernel {kernel.name!r}"
    return _made(what, no_rule, arrays, record, results)


def on_cpu(kernel: Kernel, stream: object) -> bool:
    """Whether a stream or device, given by name, is the CPU's."""
    if stream is None:
        return False
    mlx_node.stream_of(kernel, stream)  # refuses what is none
    device: Any = getattr(stream, "device", stream)
    return (device if isinstance(device, mx.Device) else mx.Device(device)).type == mx.cpu


def _made(
    what: str, rules: Any, arrays: Sequence[mx.array], record: Record,
    results: Sequence[tuple[Shape, Dtype]],
) -> list[mx.array]:  # fmt: skip
    found = mlx_build.loaded()
    shapes = [word for shape, _ in results for word in (len(shape), *shape)]
    kinds = [dtypes.ALL.index(kind) for _, kind in results]
    wants = bytes(one for three in record.wants for one in three)
    structure = _Record(
        record.name.encode(), record.text.encode(),
        (ctypes.c_int32 * 6)(*record.grid, *record.threadgroup), len(arrays), wants,
        record.contiguous, record.fill is not None, 0.0 if record.fill is None else record.fill,
        record.shared, record.math_mode, len(results), (ctypes.c_int32 * len(kinds))(*kinds),
        (ctypes.c_int64 * len(shapes))(*shapes),
    )  # fmt: skip
    answer = mlx_node.answering(rules, what)
    made = found.fr_mlx_record_call(
        what.encode(), answer, tuple(arrays), ctypes.addressof(structure)
    )
    if made is NotImplemented:
        raise mlx_node.why() or KernelError(f"{what} cannot be exported.")
    return list(made)


class _Rules:
    """What a recorded node asks for derivatives and batches, with all inputs of the record."""

    def __init__(
        self, op: Op, fixed: Sequence[float | None], arrays: Sequence[bool],
        scalars: Sequence[int], count: int,
    ) -> None:  # fmt: skip
        self._rules = mlx_node.rules(op)
        self._fixed, self._arrays, self._scalars, self._count = fixed, arrays, scalars, count

    def __call__(self, what: str, *given: Any) -> tuple[Any, ...]:
        if what == "vjp":
            primals, cotangents, outputs = given
            grads = self._rules("vjp", self._inputs(self._scalar(primals)), cotangents, outputs)
            found = [
                mx.expand_dims(one, 0) if i in self._scalars and one is not None else one
                for i, one in enumerate(grads)
            ]
            return (*found, *[None] * (self._count - len(found)))
        if what == "jvp":
            primals, tangents = map(self._scalar, given)
            return tuple(self._rules("jvp", self._inputs(primals), tangents[: len(self._fixed)]))
        values, axes = list(given[0]), list(given[1])
        for i in self._scalars:
            values[i] = mx.squeeze(values[i], 0 if axes[i] is None else 1 - axes[i])
            axes[i] = None if axes[i] is None else 0
        return tuple(self._rules("vmap", self._inputs(values), tuple(axes[: len(self._fixed)])))

    def _scalar(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """These arrays without the dim that arrays without dims have in a record."""
        return tuple(
            mx.squeeze(one, 0) if i in self._scalars and one is not None else one
            for i, one in enumerate(arrays)
        )

    def _inputs(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The op's inputs: arrays, numbers, None."""
        both = zip(self._fixed, self._arrays, arrays, strict=False)
        return tuple(array if there else fixed for fixed, there, array in both)
