"""`import_function`: files of `mx.export_function` with kernels, where MLX itself cannot run these.

A file is cut at its kernels. What lies between them, MLX's own operations, is imported by MLX; a
kernel is called through ferrule: an op is made anew from its record's last line, any other kernel
from its text. Nothing else of a file is carried out.
"""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .. import dtypes, op_file
from ..call import MetalKernel
from ..call_sizes import Sizes
from ..cuda_call import CudaKernel
from ..dtypes import Dtype
from ..errors import DeviceError, FerruleError, KernelError, RuleError
from ..implementation import Runner
from ..kernel import MATH_MODES
from ..op_declaration import Op
from ..source import metal_read, mlx_cuda
from ..spec import SMALL, Facts, Input, Shape, Spec, row_contiguous_strides
from . import mlx, mlx_batches, mlx_build, mlx_file, mlx_node
from .mlx_export import MARK, Record, op_record, with_sizes
from .mlx_file import Array, Constant, File, Function, Operation

_import_by_mlx = mx.import_function  # a program may put ours in its place
KERNEL = "CustomKernel"
_STATE = "(ss(iii)(iii)*(???)?of*V?i"  # what is known of its layout; the math mode may follow

# Which part of an operation's state names dims of its first input (of its output for ExpandDims),
# None for all of it. MLX takes what a file says.
_DIMS = {
    "ArgPartition": 1, "ArgReduce": 1, "ArgSort": None, "Concatenate": None, "DynamicSlice": 0,
    "DynamicSliceUpdate": None, "ExpandDims": None, "FFT": 0, "Flatten": None, "Gather": 0,
    "GatherAxis": None, "NumberOfElements": 0, "Pad": 0, "Partition": 1, "Reduce": 1, "Scan": 1,
    "Scatter": 1, "ScatterAxis": 1, "Sort": None, "Split": 1, "Squeeze": None, "Transpose": None,
    "Unflatten": 0,
}  # fmt: skip

Arrays = dict[int, mx.array]
Step = Callable[[Arrays], None]  # adds what it makes to what is there


def import_function(file: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """A function from a file of `mx.export_function`: as `mx.import_function`, kernels included.

    MLX runs the kernels of such files on the GPU that they were written for, and none in shapeless
    files. Here they run on this machine, whatever wrote them: kernels and ops of ferrule, or
    `mx.fast.metal_kernel`, on a machine with Metal or without. Shapes, grid and all else of an op,
    and of a kernel's call whose sizes are expressions, are worked out from the inputs of each call.
    Of any other kernel the file has numbers alone, so its inputs must have the shapes that they
    had. The result can be differentiated, batched,
    compiled and exported as what was exported can be.

    Only the text of kernels is compiled and run; nothing else in a file is carried out but MLX's
    own operations. Derivative rules that are Python functions are in no file: an op has them where
    it is defined in this process, too, with the same digest.

    Args:
        file: the path.
        return_metadata: also return the text that was saved with the function.

    Returns:
        A function of arrays: ``*args`` and ``**kwargs``, or a tuple of arrays and/or a dictionary.
        It returns a tuple of arrays. With ``return_metadata`` that function, and the text.

    Raises:
        KernelError: the file cannot be read, is cut off or altered, or holds a kernel that cannot
            be run here; names the file, and says where.
        DeviceError: MLX's nodes cannot be had (there is no compiler), or its files are unknown.
    """
    path = os.fspath(file)
    native = mlx_build.loaded()
    mlx_batches.ops()  # whose derivatives are functions
    layouts = dict(line.split(" ") for line in native.fr_mlx_layout().decode().splitlines())
    try:
        with Path(path).open("rb") as opened:
            content = mlx_file.read(path, opened, layouts, mlx_build.VERSION)
            made = Imported(path, content, opened, layouts)
    except OSError as error:
        raise KernelError(f"[import_function] {path!r} cannot be read: {error.strerror}.") from None
    return (made, content.metadata or "") if return_metadata else made


class Imported:
    """The functions of a file, called as one: by the number, ranks and dtypes of the arrays."""

    def __init__(
        self, path: str, content: File, file: BinaryIO, layouts: Mapping[str, str]
    ) -> None:  # fmt: skip
        self._path, self._shapeless = path, content.shapeless
        maker = _Maker(path, content, file, layouts)
        self._functions = [(one, maker.steps(one)) for one in content.functions]
        self._constants = maker.arrays

    def __repr__(self) -> str:
        return f"<function imported from {self._path!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[mx.array, ...]:
        """The outputs for arrays, as `mx.import_function`'s functions take them.

        Raises:
            KernelError: the function was not exported with such arrays, or a kernel cannot be run
                with their shapes (also a ValueError).
        """
        positional, named = _arrays(args, kwargs)
        given = [*positional, *[named[key] for key in sorted(named)]]
        for function, steps in self._functions:
            if self._matches(function, named, given):
                return self._run(function, steps, given)
        raise KernelError(self._no_match(positional, named))

    def _run(
        self, function: Function, steps: Sequence[Step], given: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        found = dict(self._constants)
        found.update(zip((one for one, _ in function.inputs), given, strict=True))
        with _on_device():
            for step in steps:
                step(found)
        return tuple([found[one] for one in function.outputs])

    def _matches(
        self, function: Function, named: Mapping[str, mx.array], given: Sequence[mx.array]
    ) -> bool:  # fmt: skip
        if len(given) != len(function.inputs) or set(named) != set(function.keywords):
            return False
        return all(
            mlx.KNOWN[value.dtype].name == array.dtype
            and value.ndim == len(array.shape)
            and (self._shapeless or value.shape == array.shape)
            for value, (_, array) in zip(given, function.inputs, strict=True)
        )

    def _no_match(self, positional: Sequence[mx.array], named: Mapping[str, mx.array]) -> str:
        lines = [
            f"[import_function] {self._path!r} has no function for these arrays"
            + (". It is shapeless: sizes may differ, ranks and dtypes not." * self._shapeless)
        ]
        lines.append("Called with " + _shown([*positional], named))
        for function, _ in self._functions:
            arrays = [array for _, array in function.inputs]
            first = len(arrays) - len(function.keywords)
            keywords = dict(zip(function.keywords, arrays[first:], strict=True))
            lines.append("It has one for " + _shown(arrays[:first], keywords))
        return "\n  ".join(lines)


def _shown(positional: Sequence[Any], named: Mapping[str, Any]) -> str:
    def one(array: Any) -> str:
        kind = array.dtype if isinstance(array, Array) else mlx.KNOWN[array.dtype].name
        return f"{kind}[{','.join(map(str, array.shape))}]"

    parts = [*map(one, positional), *(f"{name}={one(array)}" for name, array in named.items())]
    return f"({', '.join(parts)})"


def _arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[mx.array], Mapping[str, mx.array]]:
    """The arrays of a call, as MLX takes them."""
    positional: Any = args
    named: Any = kwargs
    if args and not isinstance(args[0], mx.array) and len(args) <= 2 and not kwargs:
        if len(args) == 2:
            positional, named = args
        elif isinstance(args[0], Mapping):
            positional, named = (), args[0]
        else:
            positional = args[0]
    right = isinstance(positional, (tuple, list)) and isinstance(named, Mapping)
    if not right or not all(isinstance(a, mx.array) for a in (*positional, *named.values())):
        raise KernelError(
            "[import_function] Inputs can either be a variable number of positional and keyword "
            "arrays or a single tuple and/or dictionary of arrays."
        )
    return positional, named


def _on_device() -> Any:
    """Where kernels run: on the GPU, where there is one, as MLX has it, else on the CPU."""
    kind = mx.gpu if mlx_build.loaded().fr_mlx_has_gpu() else mx.cpu
    return nullcontext() if mx.default_device().type == kind else mx.stream(mx.Device(kind))


class _Maker:
    """Makes the steps of a file's functions.

    Attributes:
        arrays: the constants, by their ids.
    """

    def __init__(
        self, path: str, content: File, file: BinaryIO, layouts: Mapping[str, str]
    ) -> None:  # fmt: skip
        self.path, self._content, self._file, self._layouts = path, content, file, layouts
        self.arrays: Arrays = {}
        self._ops: dict[str, Op] = {}  # by the line that they were read from
        self._gpu = bool(mlx_build.loaded().fr_mlx_has_gpu())

    def steps(self, function: Function) -> list[Step]:
        """What is done for a call: parts of the tape and kernels by turns."""
        for i, constant in function.constants.items():
            if i not in self.arrays:
                self.arrays[i] = self._constant(constant)
        arrays = dict(function.inputs)
        arrays.update((i, constant.array) for i, constant in function.constants.items())
        after: dict[int, int] = {}  # by id: how many kernels come before it, one after the other
        parts: list[list[Operation]] = []
        kernels: list[list[Operation]] = []
        for one in function.operations:
            level = max((after.get(i, 0) for i in one.inputs), default=0)
            while len(parts) <= level:
                parts.append([])
                kernels.append([])
            arrays.update(zip(one.outputs, one.arrays, strict=True))
            is_kernel = one.name == KERNEL
            after.update((i, level + is_kernel) for i in one.outputs)
            (kernels if is_kernel else parts)[level].append(one)
        wanted = set(function.outputs)
        steps: list[Step] = []
        for part, after_it in zip(reversed(parts), reversed(kernels), strict=True):
            made = [self._kernel(one, arrays, function) for one in after_it]
            wanted.update(i for one in after_it for i in one.inputs)
            steps += reversed(made)
            if part:
                steps.append(self._part(part, arrays, wanted))
            wanted.update(i for one in part for i in one.inputs)
        return steps[::-1]

    def _constant(self, constant: Constant) -> mx.array:
        kind = dtypes.BY_NAME[constant.array.dtype]
        self._file.seek(constant.offset)
        values = self._file.read(constant.size)
        given = np.frombuffer(values, np.uint16 if kind.name == "bfloat16" else kind.numpy)
        given = given.reshape(constant.array.shape)
        if kind.name == "bfloat16":
            made = mx.view(mx.array(given), mx.bfloat16, stream=mx.cpu)
        elif kind.name == "float64":
            made = mx.view(mx.array(given.view(np.uint64)), mx.float64, stream=mx.cpu)
        else:
            return mx.array(given)
        mx.eval(made)
        return made

    def _part(self, part: list[Operation], arrays: dict[int, Array], wanted: set[int]) -> Step:
        """The operations between kernels, imported by MLX."""
        made = {i for one in part for i in one.outputs}
        read = list(dict.fromkeys(i for one in part for i in one.inputs if i not in made))
        given = [i for one in part for i in one.outputs if i in wanted]
        for one in part:
            self._check_dims(one, arrays)
        if not self._gpu:  # files of machines with a GPU
            part = [one._replace(device=mlx_file.CPU) for one in part]
        inputs = tuple([(i, arrays[i]) for i in read])
        function = Function((), inputs, tuple(given), tuple(part), {})
        content = self._content._replace(
            functions=(function,), metadata=None if self._content.metadata is None else ""
        )
        handle, path = tempfile.mkstemp(suffix=".mlxfn")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(mlx_file.write(content))
            imported: Any = _import_by_mlx(path)
        except (ValueError, RuntimeError) as error:
            names = ", ".join(dict.fromkeys(one.name for one in part))
            raise KernelError(
                f"[import_function] MLX refused what {self.path!r} has between kernels ({names}): "
                f"{error}"
            ) from error
        finally:
            Path(path).unlink(missing_ok=True)

        if not self._content.shapeless:  # or MLX works the shapes out itself
            described = [mx.zeros(a.shape, mlx.DTYPES[a.dtype]) for _, a in inputs]
            misfit = mlx_build.loaded().fr_mlx_misfit(imported(*described)).decode()
            if misfit:
                raise self._altered(f"what {misfit} gives has not the shape that it makes")

        def step(found: Arrays) -> None:
            values = tuple([found[i] for i in read])
            results = mlx_node.mended(imported(*values), values)
            found.update(zip(given, results, strict=True))

        return step

    def _state(self, one: Operation) -> Any:
        return mlx_file.Reader(io.BytesIO(one.state)).value(self._layouts[one.name], one.name)

    def _check_dims(self, one: Operation, arrays: Mapping[int, Array]) -> None:
        """Refuse an operation of MLX on dims that its array has not, or on parts beyond its end."""
        if not one.inputs:
            return
        state = self._state(one)
        shape = arrays[one.inputs[0]].shape
        if one.name in _DIMS:
            place = _DIMS[one.name]
            named = state if place is None else state[place]
            rank = len(one.arrays[0].shape if one.name == "ExpandDims" else shape)
            if any(not -rank <= dim < rank for dim in np.atleast_1d(named)):
                raise self._altered(f"{one.name} is of dims {named} of an array of {rank}")
        if self._content.shapeless:  # MLX has no shapes for the rest, so it refuses them
            return
        if one.name == "Split":
            places, axis = state
            ends = np.cumsum([array.shape[axis] for array in one.arrays]).tolist()
            if [*places, shape[axis]] != ends:
                raise self._altered(f"Split of {shape} at {places} gives other parts")
        if one.name == "Pad":
            padded = list(shape)
            for dim, low, high in zip(*state, strict=False):
                padded[dim] += low + high
            if min(*state[1], *state[2], 0) < 0 or tuple(padded) != one.arrays[0].shape:
                raise self._altered(f"Pad of {shape} gives another shape")
        if one.name == "Slice":
            starts, _, strides = state  # an end may be beyond the array's
            if not len(starts) == len(strides) == len(one.arrays[0].shape) == len(shape):
                raise self._altered(f"Slice of {shape} is of other dims")
            parts = zip(starts, strides, one.arrays[0].shape, shape, strict=True)
            for start, stride, count, size in parts:
                last = start + stride * (count - 1)
                if count and not (0 <= start < size and 0 <= last < size):
                    raise self._altered(f"Slice of {shape} takes what is beyond its end")

    def _altered(self, what: str) -> KernelError:
        return KernelError(
            f"[import_function] {self.path!r} was altered: {what}. Export the function again."
        )

    # -- kernels ---------------------------------------------------------------------------------

    def _kernel(self, one: Operation, arrays: Mapping[int, Array], function: Function) -> Step:
        if not self._layouts[KERNEL].startswith(_STATE):
            raise DeviceError(
                f"[import_function] {self.path!r}: files of MLX {mlx_build.VERSION} hold kernels "
                "as ferrule does not know them; a newer ferrule may."
            )
        state = self._state(one)
        name, text, grid, group, wants, contiguous, fill, scalars, binary, shared, *mode = state
        where = f"[import_function] {self.path!r}, kernel {name.decode(errors='replace')!r}"
        if binary or scalars:
            raise KernelError(
                f"{where}: it is machine code for a GPU (mx.fast.precompiled_cuda_kernel), not "
                "text; ferrule runs kernels from their text."
            )
        try:
            record = Record(
                name.decode(), text.decode(), grid, group, tuple(wants), contiguous, fill, shared,
                *(mode or [0]),
            )  # fmt: skip
        except UnicodeDecodeError:
            raise KernelError(f"{where}: it was altered: its text is none.") from None
        if not 0 <= record.math_mode < len(MATH_MODES):
            raise KernelError(f"{where}: it was altered: its math mode is {record.math_mode}.")
        if len(record.wants) != len(one.inputs):
            raise KernelError(
                f"{where}: it was altered: it has {len(one.inputs)} inputs, and says of "
                f"{len(record.wants)} what its text reads."
            )
        given = [arrays[i] for i in one.inputs]
        text, mark, comment = record.text.rpartition(MARK)
        try:
            if not (mark and comment.endswith("}") and "\n" not in comment):
                return self._level0(one, record, given, None)
            said = _said(comment)
            if "sizes" in said:
                if with_sizes(text, said["sizes"]) != record.text:
                    raise KernelError("it was altered: its text is not what its digest says.")
                return self._level0(one, record._replace(text=text), given, said["sizes"])
            return self._op(one, record, said, given, function)
        except FerruleError as error:
            raise KernelError(f"{where}: {error}") from error
        except ValueError as error:
            raise KernelError(
                f"{where}: its text is not as MLX writes one: {error}. It was altered, or another "
                "MLX wrote it."
            ) from None

    def _level0(
        self, one: Operation, record: Record, given: Sequence[Array], sizes: Any
    ) -> Step:  # fmt: skip
        """A kernel with the file's numbers, or with expressions that give these numbers."""
        spec = self._spec(record, given, one.arrays)
        kernel = spec.kernel
        traced = [array.shape for array in given]
        call: dict[str, Any] = {
            "output_shapes": [array.shape for array in one.arrays],
            "output_dtypes": list(spec.outputs),
            "grid": record.grid, "threadgroup": record.threadgroup,
            "template": list(spec.template) or None, "init_value": record.fill,
        }  # fmt: skip
        made = CudaKernel(kernel) if kernel.language == "cuda" else MetalKernel(kernel)
        # All of it is checked, now: numbers that were altered are found here.
        described = [(array.shape, dtypes.BY_NAME[array.dtype]) for array in given]
        made.text("cuda" if kernel.language == "cuda" else "metal", inputs=described, **call)
        call["output_dtypes"] = [mlx.DTYPES[kind.name] for kind in spec.outputs]
        if sizes is not None:
            call.update(_expressions(record, spec, traced, [a.shape for a in one.arrays], sizes))

        def step(found: Arrays) -> None:
            inputs = [found[i] for i in one.inputs]
            if sizes is None:
                for i, (value, shape) in enumerate(zip(inputs, traced, strict=True)):
                    if value.shape != shape:
                        raise mlx_node.stale(kernel, i, shape, value.shape)
            found.update(zip(one.outputs, made(inputs=inputs, **call), strict=True))

        return step

    def _spec(self, record: Record, given: Sequence[Array], outputs: Sequence[Array]) -> Spec:
        inputs = [
            Input(dtypes.BY_NAME[a.dtype], len(a.shape), math.prod(a.shape) < SMALL) for a in given
        ]
        kinds = [dtypes.BY_NAME[a.dtype] for a in outputs]
        if "[[kernel]]" not in record.text and "__global__" in record.text:
            spec = mlx_cuda.read(
                record.text, record.name, inputs, kinds, record.contiguous, record.shared
            )
            wants = mlx_cuda.wants(spec.kernel, inputs)
        else:
            spec = metal_read.read(
                record.text, record.name, inputs, kinds, record.wants, record.contiguous,
                MATH_MODES[record.math_mode],
            )  # fmt: skip
            wants = tuple(map(spec.kernel.wants, spec.kernel.input_names))
        there = [a for a, b in zip(record.wants, inputs, strict=True) if b.ndim]
        if there != [a for a, b in zip(wants, inputs, strict=True) if b.ndim]:
            raise ValueError("it reads other shapes, strides and ranks than the record says")
        return spec

    def _op(
        self, one: Operation, record: Record, said: Any, given: Sequence[Array],
        function: Function,
    ) -> Step:  # fmt: skip
        """An op, made from its record's last line."""
        try:
            name, absent, scalars = said["op"], set(said["absent"]), set(said["scalars"])
            saved = json.dumps(said["saved"])
            op = self._ops.get(saved)
            if op is None:
                op = self._ops[saved] = _runnable(op_file.read(saved)[name])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, KernelError) and not isinstance(error, RuleError):
                raise
            raise KernelError(f"it was altered: its op cannot be read: {error}") from None
        inputs = op.rule.inputs
        if len(given) < len(inputs):
            raise KernelError(f"it was altered: op {op.name!r} has {len(inputs)} inputs.")
        fixed: list[float | None] = []
        facts: dict[str, Facts | float | None] = {}
        for rule, array, i in zip(inputs, given, one.inputs, strict=False):
            number = None
            if rule.dims is None:
                number = self._number(rule.name, dtypes.BY_NAME[rule.dtype], array, function, i)
            fixed.append(number)
            shape = () if rule.name in scalars else array.shape
            kind = dtypes.BY_NAME[array.dtype]
            facts[rule.name] = (
                None if rule.name in absent
                else number if rule.dims is None
                else Facts(kind, shape, row_contiguous_strides(shape), 0, "cpu")
            )  # fmt: skip
        expected, results, arrays, _ = op_record(op, facts)
        found = [(dtypes.BY_NAME[a.dtype], a.shape) for a in given]
        made = [(a.shape, dtypes.BY_NAME[a.dtype]) for a in one.arrays]
        different = [
            what for what, a, b in zip(Record._fields, expected, record, strict=True)
            if a != b and what != "text"
        ]  # fmt: skip
        if expected.text.rpartition(MARK)[0] != record.text.rpartition(MARK)[0]:
            different.append("text")
        if found != arrays or made != results:
            different.append("arguments")
        if different:
            raise KernelError(
                f"it was altered: its {', '.join(different)} would not be what op {op.name!r} "
                f"({op_file.full_name(op)}) makes of these inputs. Export the function again."
            )
        ids = one.inputs[: len(inputs)]

        def step(found: Arrays) -> None:
            values: list[Any] = []
            for rule, i, number in zip(inputs, ids, fixed, strict=True):
                if rule.name in absent or rule.dims is None:
                    values.append(number)
                else:
                    scalar = rule.name in scalars
                    values.append(mx.squeeze(found[i], 0) if scalar else found[i])
            result = op(*values)
            several = result if isinstance(result, tuple) else (result,)
            found.update(zip(one.outputs, several, strict=True))

        return step

    def _number(self, name: str, kind: Dtype, array: Array, function: Function, one: int) -> float:
        """A number of an op, which is a constant of the file."""
        constant = function.constants.get(one)
        if constant is None or constant.array != Array(kind.name, ()):
            raise KernelError(
                f"it was altered: its number {name!r} is no constant {kind.name} of the file."
            )
        value: Any = mlx.to_numpy(self.arrays[one]).item()
        return value  # type: ignore[no-any-return]


def _said(comment: str) -> Any:
    """What the last line of a record's text says: an op, or ``sizes``."""
    try:
        return json.loads(comment)
    except (ValueError, RecursionError) as error:
        raise KernelError(f"it was altered: its op cannot be read: {error}") from None


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
        if not all(isinstance(one, str) for one in texts):
            raise TypeError("a size is no text")
        if not set(of_template) <= {name for name, _ in spec.template}:
            raise ValueError("they are for another template")
        call = {
            "grid": tuple(sizes["grid"]), "threadgroup": tuple(sizes["threadgroup"]),
            "output_shapes": [tuple(shape) for shape in sizes["output_shapes"]],
            "template": [(name, of_template.get(name, value)) for name, value in spec.template],
        }  # fmt: skip
        found = Sizes(
            spec.kernel, [len(shape) for shape in inputs], call["grid"], call["threadgroup"],
            call["output_shapes"], spec.outputs, call["template"],
        ).numbers(inputs)  # fmt: skip
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise KernelError(f"it was altered: its sizes cannot be read: {error}") from None
    wanted = (record.grid, record.threadgroup, list(outputs), list(spec.template))
    for what, a, b in zip(
        ("grid", "threadgroup", "output shapes", "template"), found, wanted, strict=True
    ):
        if a != b:
            raise KernelError(
                f"it was altered: its expressions make the {what} {a}, and the file says {b}. "
                "Export the function again."
            )
    return call


def _runnable(op: Op) -> Op:
    """An op of a file, carried out by kernels alone: the file has of Python functions a digest."""
    kinds = dict.fromkeys(one.kind for one in op.implementations if not isinstance(one, Runner))
    whole = len(kinds) == len({one.kind for one in op.implementations})
    return op if whole else op.using(*kinds)
