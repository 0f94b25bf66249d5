"""Kernels of MLX's files, rebuilt: ops from the last lines of their records, others from text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ... import dtypes
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
from ...spec import SMALL, Facts, Input, Shape, Spec, row_contiguous_strides
from . import arrays as mlx
from . import build as mlx_build
from . import kernel_nodes
from .export import MARK, OpInputs, Record, op_record, with_sizes
from .file import Array, Function, Operation, state_of
from .node import as_tuple

KERNEL = "CustomKernel"
_STATE = "(ss(iii)(iii)*(???)?of*V?i"  # what is known of its layout; the math mode may follow

Environment = dict[int, mx.array]  # the arrays of a call, by their ids in the file
Step = Callable[[Environment], None]  # adds its outputs to the environment


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
        inputs = [arrays[i] for i in operation.inputs]
        text, mark, line = record.text.rpartition(MARK)
        try:
            if not (mark and line.endswith("}") and "\n" not in line):
                return self._level0(operation, record, inputs, None)
            comment = _comment(line)
            if "sizes" in comment:
                if with_sizes(text, comment["sizes"]) != record.text:
                    raise KernelError("it was altered: its text is not what its digest says.")
                return self._level0(operation, record._replace(text=text), inputs, comment["sizes"])
            return self._op(operation, record, comment, inputs, function)
        except FerruleError as error:
            raise KernelError(f"{label}: {error}") from error
        except ValueError as error:
            raise KernelError(
                f"{label}: its text is not as MLX writes one: {error}. It was altered, or another "
                "MLX wrote it."
            ) from None

    def _level0(
        self, operation: Operation, record: Record, inputs: Sequence[Array], sizes: Any
    ) -> Step:
        """A kernel with the file's numbers, or with expressions that give these numbers."""
        spec = self._spec(record, inputs, operation.arrays)
        kernel = spec.kernel
        traced_shapes = [array.shape for array in inputs]
        output_shapes = [array.shape for array in operation.arrays]
        call: dict[str, Any] = {
            "output_shapes": output_shapes,
            "output_dtypes": list(spec.outputs),
            "grid": record.grid,
            "threadgroup": record.threadgroup,
            "template": list(spec.template) or None,
            "init_value": record.fill,
        }
        runnable = CudaKernel(kernel) if kernel.language == "cuda" else MetalKernel(kernel)
        # All of it is checked, now: numbers that were altered are found here.
        described = [(array.shape, dtypes.BY_NAME[array.dtype]) for array in inputs]
        runnable.text("cuda" if kernel.language == "cuda" else "metal", inputs=described, **call)
        call["output_dtypes"] = [mlx.DTYPES[kind.name] for kind in spec.outputs]
        if sizes is not None:
            call.update(_expressions(record, spec, traced_shapes, output_shapes, sizes))

        def step(environment: Environment) -> None:
            values = [environment[i] for i in operation.inputs]
            if sizes is None:
                for i, (value, shape) in enumerate(zip(values, traced_shapes, strict=True)):
                    if value.shape != shape:
                        raise kernel_nodes.stale(kernel, i, shape, value.shape)
            environment.update(zip(operation.outputs, runnable(inputs=values, **call), strict=True))

        return step

    def _spec(self, record: Record, arrays: Sequence[Array], outputs: Sequence[Array]) -> Spec:
        inputs = [
            Input(dtypes.BY_NAME[a.dtype], len(a.shape), math.prod(a.shape) < SMALL) for a in arrays
        ]
        kinds = [dtypes.BY_NAME[a.dtype] for a in outputs]
        if "[[kernel]]" not in record.text and "__global__" in record.text:
            spec = mlx_cuda.read(
                record.text, record.name, inputs, kinds, record.contiguous, record.shared
            )
            wants = mlx_cuda.wants(spec.kernel, inputs)
        else:
            spec = metal_read.read(
                record.text,
                record.name,
                inputs,
                kinds,
                record.wants,
                record.contiguous,
                MATH_MODES[record.math_mode],
            )
            wants = tuple(map(spec.kernel.wants, spec.kernel.input_names))
        recorded = [a for a, b in zip(record.wants, inputs, strict=True) if b.ndim]
        if recorded != [a for a, b in zip(wants, inputs, strict=True) if b.ndim]:
            raise ValueError("it reads other shapes, strides and ranks than the record says")
        return spec

    def _op(
        self,
        operation: Operation,
        record: Record,
        comment: Any,
        arrays: Sequence[Array],
        function: Function,
    ) -> Step:
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
        inputs = op.rule.inputs
        if len(arrays) < len(inputs):
            raise KernelError(f"it was altered: op {op.name!r} has {len(inputs)} inputs.")
        facts: dict[str, Facts | float | None] = {}
        for argument, array, i in zip(inputs, arrays, operation.inputs, strict=False):
            kind = dtypes.BY_NAME[array.dtype]
            shape = () if argument.name in scalars else array.shape
            if argument.dims is None:
                facts[argument.name] = self._number(argument, function, i)
            elif argument.name in absent:
                facts[argument.name] = None
            else:
                strides = row_contiguous_strides(shape)
                facts[argument.name] = Facts(kind, shape, strides, 0, "cpu")
        _check_op(op, facts, record, arrays, operation.arrays)
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


def _check_op(
    op: Op,
    facts: dict[str, Facts | float | None],
    record: Record,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
) -> None:
    """Refuse a record, or arrays, other than the op would have in a file."""
    expected, call = op_record(op, facts)
    fields = zip(Record._fields, expected, record, strict=True)
    different = [field for field, a, b in fields if a != b and field != "text"]
    if expected.text.rpartition(MARK)[0] != record.text.rpartition(MARK)[0]:
        different.append("text")
    if [(dtypes.BY_NAME[a.dtype], a.shape) for a in inputs] != call.inputs or [
        (a.shape, dtypes.BY_NAME[a.dtype]) for a in outputs
    ] != call.results:
        different.append("arguments")
    if different:
        raise KernelError(
            f"it was altered: its {', '.join(different)} would not be what op {op.name!r} "
            f"({op_file.full_name(op)}) makes of these inputs. Export the function again."
        )


def _expressions(
    record: Record, spec: Spec, inputs: Sequence[Shape], outputs: Sequence[Shape], sizes: Any
) -> dict[str, Any]:
    """The sizes of a call that are expressions, as the call takes them.

    Args:
        record, spec: what the file has of the call.
        inputs, outputs: the shapes when it was exported.
        sizes: what the last line of its text says.
    """
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
        numbers = Sizes(
            spec.kernel,
            [len(shape) for shape in inputs],
            call["grid"],
            call["threadgroup"],
            call["output_shapes"],
            spec.outputs,
            call["template"],
        ).numbers(inputs)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise KernelError(f"it was altered: its sizes cannot be read: {error}") from None
    recorded = (record.grid, record.threadgroup, list(outputs), list(spec.template))
    for label, a, b in zip(
        ("grid", "threadgroup", "output shapes", "template"), numbers, recorded, strict=True
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
