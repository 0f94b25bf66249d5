"""Kernels of MLX's files, rebuilt: ops from the last lines of their records, others from text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from ... import dtypes
from ...dtypes import Dtype
from ...errors import DeviceError, FerruleError, KernelError, RuleError
from ...kernel import MATH_MODES
from ...kernels.call import MetalKernel
from ...kernels.cuda import CudaKernel
from ...kernels.sizes import Sizes
from ...operators import file as op_file
from ...operators.op import Op
from ...operators.runners import Runner
from ...rules.argument import Argument
from ...source.cuda import mlx as mlx_cuda
from ...source.metal import read as metal_read
from ...spec import Facts, Shape, Spec, row_contiguous_strides
from . import arrays as mlx
from . import build as mlx_build
from . import kernel_nodes
from .export import MARK, OpInputs, Record, op_record, spec_inputs, with_sizes
from .file import Array, Function, Operation, state_of
from .node import as_tuple

KERNEL = "CustomKernel"
_STATE = "(ss(iii)(iii)*(???)?of*V?i"  # what is known of its layout; the math mode may follow

Environment = dict[int, mx.array]  # the arrays of a call, by their ids in the file
Step = Callable[[Environment], None]  # adds its outputs to the environment


class _Recorded(NamedTuple):
    """A kernel's call as a file has it.

    Attributes:
        operation, record: what stands there.
        inputs: dtype and shape of each input.
        results: shape and dtype of each output.
    """

    operation: Operation
    record: Record
    inputs: list[tuple[Dtype, Shape]]
    results: list[tuple[Shape, Dtype]]


class KernelSteps:
    """Makes the steps of a file's kernels.

    Args:
        path: what messages call the file.
        layouts: of MLX's classes.
        arrays: the constants, by their ids.
    """

    def __init__(self, path: str, layouts: Mapping[str, str], arrays: Environment) -> None:
        self.path, self._layouts, self.arrays = path, layouts, arrays
        self._ops: dict[str, Op] = {}  # by the line that they were read from

    def kernel(self, operation: Operation, arrays: Mapping[int, Array], function: Function) -> Step:
        """The step that calls a kernel; ``arrays`` has what the file says of its inputs."""
        if not self._layouts[KERNEL].startswith(_STATE):
            raise DeviceError(
                f"[import_function] {self.path!r}: files of MLX {mlx_build.VERSION} hold kernels "
                "as ferrule does not know them; a newer ferrule may."
            )
        state = state_of(operation, self._layouts)
        name, text, grid, group, wants, contiguous, fill, scalars, binary, shared, *mode = state
        label = f"[import_function] {self.path!r}, kernel {name.decode(errors='replace')!r}"
        if binary or scalars:
            raise KernelError(
                f"{label}: it is machine code for a GPU (mx.fast.precompiled_cuda_kernel), not "
                "text; ferrule runs kernels from their text."
            )
        try:
            flags = tuple(wants), contiguous, fill, shared, *(mode or [0])
            record = Record(name.decode(), text.decode(), grid, group, *flags)
        except UnicodeDecodeError:
            raise KernelError(f"{label}: it was altered: its text is none.") from None
        if not 0 <= record.math_mode < len(MATH_MODES):
            raise KernelError(f"{label}: it was altered: its math mode is {record.math_mode}.")
        if len(record.wants) != len(operation.inputs):
            raise KernelError(
                f"{label}: it was altered: it has {len(operation.inputs)} inputs, and says of "
                f"{len(record.wants)} what its text reads."
            )
        inputs = [(dtypes.BY_NAME[arrays[i].dtype], arrays[i].shape) for i in operation.inputs]
        results = [(array.shape, dtypes.BY_NAME[array.dtype]) for array in operation.arrays]
        recorded = _Recorded(operation, record, inputs, results)
        text, mark, line = record.text.rpartition(MARK)
        try:
            if not (mark and line.endswith("}") and "\n" not in line):
                return _level0(recorded, None)
            comment = _comment(line)
            if "sizes" in comment:
                if with_sizes(text, comment["sizes"]) != record.text:
                    raise KernelError("it was altered: its text is not what its digest says.")
                recorded = recorded._replace(record=record._replace(text=text))
                return _level0(recorded, comment["sizes"])
            return self._op(recorded, comment, function)
        except FerruleError as error:
            raise KernelError(f"{label}: {error}") from error
        except ValueError as error:
            raise KernelError(
                f"{label}: its text is not as MLX writes one: {error}. It was altered, or another "
                "MLX wrote it."
            ) from None

    def _op(self, recorded: _Recorded, comment: Any, function: Function) -> Step:
        """An op, made from its record's last line."""
        try:
            name, absent, scalars = comment["op"], set(comment["absent"]), set(comment["scalars"])
            saved = json.dumps(comment["saved"])
            op = self._ops.get(saved)
            if op is None:
                op = self._ops[saved] = _runnable(op_file.read(saved)[name])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, KernelError) and not isinstance(error, RuleError):
                raise
            raise KernelError(f"it was altered: its op cannot be read: {error}") from None
        inputs, operation = op.rule.inputs, recorded.operation
        if len(recorded.inputs) < len(inputs):
            raise KernelError(f"it was altered: op {op.name!r} has {len(inputs)} inputs.")
        facts: dict[str, Facts | float | None] = {}
        described = zip(inputs, recorded.inputs, operation.inputs, strict=False)
        for argument, (kind, shape), i in described:
            if argument.dims is None:
                facts[argument.name] = self._number(argument, function, i)
            elif argument.name in absent:
                facts[argument.name] = None
            else:
                shape = () if argument.name in scalars else shape
                strides = row_contiguous_strides(shape)
                facts[argument.name] = Facts(kind, shape, strides, 0, "cpu")
        _check_op(op, facts, recorded)
        ids = operation.inputs[: len(inputs)]
        of_call = OpInputs(op, facts)

        def step(environment: Environment) -> None:
            values = of_call.values(of_call.squeezed([environment[i] for i in ids]))
            environment.update(zip(operation.outputs, as_tuple(op(*values)), strict=True))

        return step

    def _number(self, argument: Argument, function: Function, i: int) -> float:
        """A number of an op, which is a constant of the file."""
        constant = function.constants.get(i)
        if constant is None or constant.array != Array(argument.dtype, ()):
            raise KernelError(
                f"it was altered: its number {argument.name!r} is no constant {argument.dtype} of "
                "the file."
            )
        value: Any = mlx.to_numpy(self.arrays[i]).item()
        return value  # type: ignore[no-any-return]


def _comment(line: str) -> Any:
    """The last line of a record's text, parsed: an op, or ``sizes``."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise KernelError(f"it was altered: its op cannot be read: {error}") from None


def _level0(recorded: _Recorded, sizes: Any) -> Step:
    """A kernel with the file's numbers, or with expressions that give these numbers."""
    operation, record, inputs, results = recorded
    spec = _spec(recorded)
    kernel = spec.kernel
    call: dict[str, Any] = {
        "output_shapes": [shape for shape, _ in results],
        "output_dtypes": list(spec.outputs),
        "grid": record.grid,
        "threadgroup": record.threadgroup,
        "template": list(spec.template) or None,
        "init_value": record.fill,
    }
    runnable = CudaKernel(kernel) if kernel.language == "cuda" else MetalKernel(kernel)
    # All of it is checked, now: numbers that were altered are found here.
    described = [(shape, kind) for kind, shape in inputs]
    runnable.text("cuda" if kernel.language == "cuda" else "metal", inputs=described, **call)
    call["output_dtypes"] = [mlx.DTYPES[kind.name] for kind in spec.outputs]
    if sizes is not None:
        call.update(_expressions(recorded, spec, sizes))

    def step(environment: Environment) -> None:
        values = [environment[i] for i in operation.inputs]
        if sizes is None:
            for i, (value, (_, shape)) in enumerate(zip(values, inputs, strict=True)):
                if value.shape != shape:
                    raise kernel_nodes.stale(kernel, i, shape, value.shape)
        environment.update(zip(operation.outputs, runnable(inputs=values, **call), strict=True))

    return step


def _spec(recorded: _Recorded) -> Spec:
    record = recorded.record
    inputs = spec_inputs(recorded.inputs)
    kinds = [kind for _, kind in recorded.results]
    of_text = record.text, record.name, inputs, kinds
    wants: tuple[tuple[bool, bool, bool], ...]
    if "[[kernel]]" not in record.text and "__global__" in record.text:
        spec = mlx_cuda.read(*of_text, record.contiguous, record.shared)
        wants = mlx_cuda.wants(spec.kernel, inputs)
    else:
        mode = MATH_MODES[record.math_mode]
        spec = metal_read.read(*of_text, record.wants, record.contiguous, mode)
        wants = tuple(map(spec.kernel.wants, spec.kernel.input_names))
    read = [a for a, b in zip(record.wants, inputs, strict=True) if b.ndim]
    if read != [a for a, b in zip(wants, inputs, strict=True) if b.ndim]:
        raise ValueError("it reads other shapes, strides and ranks than the record says")
    return spec


def _check_op(op: Op, facts: dict[str, Facts | float | None], recorded: _Recorded) -> None:
    """Refuse a record, or arrays, other than the op would have in a file."""
    record, (expected, call) = recorded.record, op_record(op, facts)
    fields = zip(Record._fields, expected, record, strict=True)
    different = [field for field, a, b in fields if a != b and field != "text"]
    if expected.text.rpartition(MARK)[0] != record.text.rpartition(MARK)[0]:
        different.append("text")
    if (recorded.inputs, recorded.results) != (call.inputs, call.results):
        different.append("arguments")
    if different:
        raise KernelError(
            f"it was altered: its {', '.join(different)} would not be what op {op.name!r} "
            f"({op_file.full_name(op)}) makes of these inputs. Export the function again."
        )


def _expressions(recorded: _Recorded, spec: Spec, sizes: Any) -> dict[str, Any]:
    """The sizes of a call that are expressions, as the call takes them.

    Args:
        recorded, spec: what the file has of the call.
        sizes: what the last line of its text says.
    """
    shapes = [shape for _, shape in recorded.inputs]
    try:
        of_template = dict(sizes["template"])
        texts = [*sizes["grid"], *sizes["threadgroup"], *of_template.values()]
        texts += [dim for shape in sizes["output_shapes"] for dim in shape]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a size is no text")
        if not set(of_template) <= {name for name, _ in spec.template}:
            raise ValueError("they are for another template")
        call = {
            "grid": tuple(sizes["grid"]),
            "threadgroup": tuple(sizes["threadgroup"]),
            "output_shapes": [tuple(shape) for shape in sizes["output_shapes"]],
            "template": [(name, of_template.get(name, value)) for name, value in spec.template],
        }
        of_call = call["grid"], call["threadgroup"], call["output_shapes"], spec.outputs
        ranks = list(map(len, shapes))
        numbers = Sizes(spec.kernel, ranks, *of_call, call["template"]).numbers(shapes)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise KernelError(f"it was altered: its sizes cannot be read: {error}") from None
    record, outputs = recorded.record, [shape for shape, _ in recorded.results]
    stated = (record.grid, record.threadgroup, outputs, list(spec.template))
    for label, a, b in zip(
        ("grid", "threadgroup", "output shapes", "template"), numbers, stated, strict=True
    ):
        if a != b:
            raise KernelError(
                f"it was altered: its expressions make the {label} {a}, and the file says {b}. "
                "Export the function again."
            )
    return call


def _runnable(op: Op) -> Op:
    """An op of a file, run by kernels alone: of Python functions a file has the digest."""
    kinds = dict.fromkeys(i.kind for i in op.implementations if not isinstance(i, Runner))
    every = len(kinds) == len({i.kind for i in op.implementations})
    return op if every else op.using(*kinds)
