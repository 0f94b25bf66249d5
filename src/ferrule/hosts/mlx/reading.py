"""`import_function`: files of `mx.export_function` with kernels, where MLX itself cannot run these.

A file is cut at its kernels. What lies between them, MLX's own operations, is imported by MLX; a
kernel is called through ferrule (`hosts.mlx.file_kernels`): an op is made anew from its record's
last line, any other kernel from its text. Nothing else of a file is run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ... import dtypes
from ...errors import KernelError
from . import arrays as mlx
from . import batches as mlx_batches
from . import build as mlx_build
from . import file as mlx_file
from . import node as mlx_node
from .file import Array, Constant, File, Function, Operation, state_of
from .file_kernels import KERNEL, Environment, KernelSteps, Step

_import_by_mlx = mx.import_function  # a program may put ours in its place

# Which part of an operation's state names dims of its first input (of its output for ExpandDims),
# None for all of it. MLX takes what a file says.
_DIMS = {
    "ArgPartition": 1, "ArgReduce": 1, "ArgSort": None, "Concatenate": None, "DynamicSlice": 0,
    "DynamicSliceUpdate": None, "ExpandDims": None, "FFT": 0, "Flatten": None, "Gather": 0,
    "GatherAxis": None, "NumberOfElements": 0, "Pad": 0, "Partition": 1, "Reduce": 1, "Scan": 1,
    "Scatter": 1, "ScatterAxis": 1, "Sort": None, "Split": 1, "Squeeze": None, "Transpose": None,
    "Unflatten": 0,
}  # fmt: skip


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
            imported = Imported(path, content, opened, layouts)
    except OSError as error:
        raise KernelError(f"[import_function] {path!r} cannot be read: {error.strerror}.") from None
    return (imported, content.metadata or "") if return_metadata else imported


class Imported:
    """The functions of a file, called as one: by the number, ranks and dtypes of the arrays."""

    def __init__(
        self, path: str, content: File, file: BinaryIO, layouts: Mapping[str, str]
    ) -> None:
        self._path, self._shapeless = path, content.shapeless
        maker = _StepMaker(path, content, file, layouts)
        self._functions = [(function, maker.steps(function)) for function in content.functions]
        self._constants = maker.arrays

    def __repr__(self) -> str:
        return f"<function imported from {self._path!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[mx.array, ...]:
        """The outputs for arrays, as `mx.import_function`'s functions take them.

        Raises:
            KernelError: the function was not exported with such arrays, or a kernel cannot be run
                with their shapes (also a ValueError).
        """
        positional, named = _arrays_of_call(args, kwargs)
        values = [*positional, *[named[key] for key in sorted(named)]]
        for function, steps in self._functions:
            if self._matches(function, named, values):
                return self._run(function, steps, values)
        raise KernelError(self._no_match(positional, named))

    def _run(
        self, function: Function, steps: Sequence[Step], values: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        environment = dict(self._constants)
        environment.update(zip((i for i, _ in function.inputs), values, strict=True))
        with _on_device():
            for step in steps:
                step(environment)
        return tuple([environment[i] for i in function.outputs])

    def _matches(
        self, function: Function, named: Mapping[str, mx.array], values: Sequence[mx.array]
    ) -> bool:
        if len(values) != len(function.inputs) or set(named) != set(function.keywords):
            return False
        return all(
            mlx.KNOWN[value.dtype].name == array.dtype
            and value.ndim == len(array.shape)
            and (self._shapeless or value.shape == array.shape)
            for value, (_, array) in zip(values, function.inputs, strict=True)
        )

    def _no_match(self, positional: Sequence[mx.array], named: Mapping[str, mx.array]) -> str:
        lines = [
            f"[import_function] {self._path!r} has no function for these arrays"
            + (". It is shapeless: sizes may differ, ranks and dtypes not." * self._shapeless)
        ]
        lines.append("Called with " + _described([*positional], named))
        for function, _ in self._functions:
            arrays = [array for _, array in function.inputs]
            first = len(arrays) - len(function.keywords)
            keywords = dict(zip(function.keywords, arrays[first:], strict=True))
            lines.append("It has one for " + _described(arrays[:first], keywords))
        return "\n  ".join(lines)


def _described(positional: Sequence[Any], named: Mapping[str, Any]) -> str:
    def shown(array: Any) -> str:
        kind = array.dtype if isinstance(array, Array) else mlx.KNOWN[array.dtype].name
        return f"{kind}[{','.join(map(str, array.shape))}]"

    parts = [*map(shown, positional), *(f"{name}={shown(array)}" for name, array in named.items())]
    return f"({', '.join(parts)})"


def _arrays_of_call(
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
    well_formed = isinstance(positional, (tuple, list)) and isinstance(named, Mapping)
    if not well_formed or not all(isinstance(a, mx.array) for a in (*positional, *named.values())):
        raise KernelError(
            "[import_function] Inputs can either be a variable number of positional and keyword "
            "arrays or a single tuple and/or dictionary of arrays."
        )
    return positional, named


def _on_device() -> Any:
    """Where kernels run: on the GPU, where there is one, as MLX has it, else on the CPU."""
    kind = mx.gpu if mlx_build.loaded().fr_mlx_has_gpu() else mx.cpu
    return nullcontext() if mx.default_device().type == kind else mx.stream(mx.Device(kind))


class _StepMaker:
    """Makes the steps of a file's functions.

    Attributes:
        arrays: the constants, by their ids.
    """

    def __init__(
        self, path: str, content: File, file: BinaryIO, layouts: Mapping[str, str]
    ) -> None:
        self.path, self._content, self._file, self._layouts = path, content, file, layouts
        self.arrays: Environment = {}
        self._kernels = KernelSteps(path, layouts, self.arrays)
        self._gpu = bool(mlx_build.loaded().fr_mlx_has_gpu())

    def steps(self, function: Function) -> list[Step]:
        """The steps of a call: parts of the tape and kernels by turns."""
        for i, constant in function.constants.items():
            if i not in self.arrays:
                self.arrays[i] = self._constant(constant)
        constants = {i: constant.array for i, constant in function.constants.items()}
        arrays = dict(function.inputs) | constants
        levels: dict[int, int] = {}  # by id: how many kernels come before it, one after the other
        parts: list[list[Operation]] = []
        kernels: list[list[Operation]] = []
        for operation in function.operations:
            level = max((levels.get(i, 0) for i in operation.inputs), default=0)
            while len(parts) <= level:
                parts.append([])
                kernels.append([])
            arrays.update(zip(operation.outputs, operation.arrays, strict=True))
            is_kernel = operation.name == KERNEL
            levels.update((i, level + is_kernel) for i in operation.outputs)
            (kernels if is_kernel else parts)[level].append(operation)
        needed = set(function.outputs)
        steps: list[Step] = []
        for part, following in zip(reversed(parts), reversed(kernels), strict=True):
            steps += reversed([self._kernels.kernel(each, arrays, function) for each in following])
            needed.update(i for operation in following for i in operation.inputs)
            if part:
                steps.append(self._part(part, arrays, needed))
            needed.update(i for operation in part for i in operation.inputs)
        return steps[::-1]

    def _constant(self, constant: Constant) -> mx.array:
        kind = dtypes.BY_NAME[constant.array.dtype]
        self._file.seek(constant.offset)
        data = self._file.read(constant.size)
        bits = {"bfloat16": np.uint16, "float64": np.uint64}.get(kind.name)  # or MLX casts them
        elements = np.frombuffer(data, bits or kind.numpy).reshape(constant.array.shape)
        if bits is None:
            return mx.array(elements)
        array = mx.view(mx.array(elements), mlx.DTYPES[kind.name], stream=mx.cpu)
        mx.eval(array)
        return array

    def _part(self, part: list[Operation], arrays: dict[int, Array], needed: set[int]) -> Step:
        """The operations between kernels, imported by MLX."""
        own_ids = {i for operation in part for i in operation.outputs}
        input_ids = list(
            dict.fromkeys(i for operation in part for i in operation.inputs if i not in own_ids)
        )
        output_ids = [i for operation in part for i in operation.outputs if i in needed]
        for operation in part:
            self._check_dims(operation, arrays)
        if not self._gpu:  # files of machines with a GPU
            part = [operation._replace(device=mlx_file.CPU) for operation in part]
        inputs = tuple([(i, arrays[i]) for i in input_ids])
        function = Function((), inputs, tuple(output_ids), tuple(part), {})
        content = self._content._replace(
            functions=(function,), metadata=None if self._content.metadata is None else ""
        )
        handle, path = tempfile.mkstemp(suffix=".mlxfn")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(mlx_file.write(content))
            imported: Any = _import_by_mlx(path)
        except (ValueError, RuntimeError) as error:
            names = ", ".join(dict.fromkeys(operation.name for operation in part))
            raise KernelError(
                f"[import_function] MLX refused what {self.path!r} has between kernels ({names}): "
                f"{error}"
            ) from error
        finally:
            Path(path).unlink(missing_ok=True)

        native = mlx_build.loaded()
        if not self._content.shapeless:  # or MLX works the shapes out itself
            described = [mx.zeros(a.shape, mlx.DTYPES[a.dtype]) for _, a in inputs]
            misfit = native.fr_mlx_misfit(imported(*described)).decode()
            if misfit:
                raise self._altered(f"what {misfit} gives has not the shape that it makes")

        def step(environment: Environment) -> None:
            values = tuple([environment[i] for i in input_ids])
            results = mlx_node.answered(native.fr_mlx_mended(imported(*values), values))
            environment.update(zip(output_ids, results, strict=True))

        return step

    def _check_dims(self, operation: Operation, arrays: Mapping[int, Array]) -> None:
        """Refuse an operation of MLX on dims that its array has not, or on parts beyond its end."""
        if not operation.inputs:
            return
        state = state_of(operation, self._layouts)
        shape = arrays[operation.inputs[0]].shape
        if operation.name in _DIMS:
            index = _DIMS[operation.name]
            dims = state if index is None else state[index]
            rank = len(operation.arrays[0].shape if operation.name == "ExpandDims" else shape)
            if any(not -rank <= dim < rank for dim in np.atleast_1d(dims)):
                raise self._altered(f"{operation.name} is of dims {dims} of an array of {rank}")
        if self._content.shapeless:  # MLX has no shapes for the rest, so it refuses them
            return
        if operation.name == "Split":
            places, axis = state
            ends = np.cumsum([output.shape[axis] for output in operation.arrays]).tolist()
            if [*places, shape[axis]] != ends:
                raise self._altered(f"Split of {shape} at {places} gives other parts")
        if operation.name == "Pad":
            padded = list(shape)
            for dim, low, high in zip(*state, strict=False):
                padded[dim] += low + high
            if min(*state[1], *state[2], 0) < 0 or tuple(padded) != operation.arrays[0].shape:
                raise self._altered(f"Pad of {shape} gives another shape")
        if operation.name == "Slice":
            starts, _, strides = state  # an end may be beyond the array's
            if not len(starts) == len(strides) == len(operation.arrays[0].shape) == len(shape):
                raise self._altered(f"Slice of {shape} is of other dims")
            parts = zip(starts, strides, operation.arrays[0].shape, shape, strict=True)
            for start, stride, count, size in parts:
                last = start + stride * (count - 1)
                if count and not (0 <= start < size and 0 <= last < size):
                    raise self._altered(f"Slice of {shape} takes what is beyond its end")

    def _altered(self, fault: str) -> KernelError:
        return KernelError(
            f"[import_function] {self.path!r} was altered: {fault}. Export the function again."
        )
