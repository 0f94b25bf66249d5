"""Kernels as nodes of MLX's graphs: lazy, compiled, differentiated, batched.

The nodes are runtime/mlx_node.cpp, which is compiled against the headers inside the user's own MLX,
once per version of it, and kept in the disk cache. Where there is no compiler, or MLX's arrays are
not as that file knows them, kernels run when they are called, as `hosts.mlx` does it.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .. import (
    arguments,
    batching,
    derivatives,
    dtypes,
    op_call,
    op_entries,
)
from ..bytecode import compile_rule
from ..dtypes import Dtype
from ..errors import (
    DeviceError,
    FerruleError,
    KernelError,
    KernelTypeError,
)
from ..implementation import Runner
from ..op_entries import Bound, Prepared, Request
from ..op_launch import number
from ..spec import Facts, Input, Launch, Shape, Spec, row_contiguous_strides
from . import mlx, mlx_batches, mlx_gpu
from .mlx_build import library, loaded, number_of

if TYPE_CHECKING:
    from ..call_sizes import Sizes
    from ..kernel import Kernel
    from ..op_declaration import Op

_CAPTURED = 4  # of runtime/mlx_node.cpp
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_int64 = ctypes.c_int64
_LONGEST = 2**31 - 1


def answering(function: Any, whose: str) -> Any:
    """A function whose errors reach the node that asked, as text: MLX raises an error of its own.

    Args:
        function: what answers.
        whose: what it answers for, such as ``"op 'square'"``.
    """

    def answered(what: str, *given: Any) -> Any:
        try:
            return function(what, *given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            loaded().fr_mlx_raised(_told(error, what, whose).encode())
            return None

    return answered


def _told(error: BaseException, what: str, whose: str) -> str:
    """What an error says; of one that is not ferrule's also whose it is, its type and its line."""
    if isinstance(error, FerruleError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not one.filename.startswith(_PACKAGE)]
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    asked = "`run`" if what == "run" else what
    return f"the {asked} of {whose} raised {type(error).__name__}{where}: {error}"


def rules(op: Op) -> Callable[..., tuple[Any, ...]]:
    """What the nodes of an op ask for derivatives and batches."""

    def answered(what: str, *given: Any) -> tuple[Any, ...]:
        if what == "vjp":
            primals, cotangents, outputs = given
            cotangents = tuple(
                mlx_batches.zeros_like(c) if one.constant else c
                for one, c in zip(op.rule.outputs, cotangents, strict=True)
            )
            given = primals, cotangents, outputs
            return mlx_batches.gradients(op, given[0], derivatives.vjp(op, *given))
        if what == "jvp":
            values, tangents = given
            outputs = op(*values)
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            found = derivatives.jvp(op, values, tangents, several, mlx_batches.zeros_like)
            return mlx_batches.tangents(op, several, found)
        if what == "metal":
            return tuple(mlx_gpu.by_stock_node(op, *given))
        if what == "by_mlx":
            return tuple(mlx_gpu.by_mlx(*given))
        if what == "captured":
            return mlx_gpu.captured(op, loaded().fr_mlx_scratch, *given)
        if what == "run":
            outputs = op_call.eager(op, *given)
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            mx.eval(found)
            return found
        values, axes = given
        size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
        arrays = mlx_batches.arrays(op, values, axes)
        found, where = batching.batched(op, size, axes, values, op, arrays)
        return mlx_batches.batch(op, size, found, where, lambda one: arrays.repeat(one, 0, size))

    return answered


# -- ops ----------------------------------------------------------------------------------------


def callable_for(op: Op) -> Any:
    """A function in C that calls an op with MLX's arrays; None where C cannot.

    It gives NotImplemented for what Python must look at; `why` says what is wrong, if anything.
    """
    found = library()
    if found is None or any(one.mutable for one in op.rule.inputs):
        return None
    devices = (op_entries.serves(op, ("metal",)) and op_entries.CPU) | (
        op_entries.serves(op, ("cuda", "metal")) and op_entries.CUDA
    )
    anywhere = any(one.kind != "cuda" for one in op.implementations)
    text = any(not isinstance(one, Runner) for one in op.implementations)
    elsewhere = op_entries.CUDA | anywhere * op_entries.CPU | text * _CAPTURED
    made = op_entries.bind(op, _nothing) if devices else None
    if made is None:
        devices, made = 0, op_entries.bind(op, _nothing, launches=False)
    if made is None:
        return None
    what = f"op {op.name!r}"
    return found.fr_mlx_op(
        ctypes.addressof(made.structure), number_of(made), devices, elsewhere, what.encode(),
        (answering(rules(op), what), made),  # the function and its nodes hold it, and so the op
    )  # fmt: skip


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op for MLX's arrays, as nodes; NotImplemented where nodes cannot do it.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    if exporting():
        from . import mlx_export

        return mlx_export.call(op, values)
    for one, value in zip(op.rule.inputs, values, strict=False):
        if one.dims is None and isinstance(value, mx.array):
            number(op.name, one, value)  # which refuses it, before anything is evaluated
    known: Any = op.mlx
    if known is None or known[0] != op.digest:  # a rule may have been declared since
        known = op.mlx = (op.digest, callable_for(op))
    function = known[1]
    if function is None:
        return NotImplemented
    op.calls_with_mlx(function)
    error = why()  # of a call by `Op.__call__`, just now
    result = NotImplemented if error else function(*values)
    if result is NotImplemented:
        error = error or why()
        if error is not None:
            raise error
    return result


def exporting() -> bool:
    """Whether this thread traces a function for a file, on a machine without Metal."""
    found = library()
    return found is not None and bool(found.fr_mlx_exporting())


def _nothing() -> None:
    pass


def why() -> BaseException | None:
    """The error for which a call in C was given back, once; None where there was none."""
    found = loaded()
    text = found.fr_mlx_why().decode()
    found.fr_mlx_raised(b"")
    return (op_entries.raised(KernelError(text)) or KernelError(text)) if text else None


# -- MLX's own primitives -----------------------------------------------------------------------


def ruled(stock: mx.array, inputs_of: mx.array, rules: Any) -> mx.array:
    """What ``inputs_of`` is, carried out as ``stock``, with rules made by `answering`.

    Both are results of one of MLX's functions quantized_matmul, gather_qmm, gather_mm, and
    broadcast_arrays in a shapeless trace. The rules are called with "vjp", a tuple of primals, the
    cotangent and the numbers of the primals whose gradients are wanted; "jvp", primals, tangents
    and whose they are; "vmap", inputs and their axes (-1 for none). Each gives a tuple; the batch
    of an output is its first axis. They must never go.
    """
    made = loaded().fr_mlx_ruled(stock, inputs_of, rules)
    if made is NotImplemented:
        raise why() or DeviceError("a product of MLX was not understood.")
    return made  # type: ignore[no-any-return]


def scatter_add(into: mx.array, indices: mx.array, values: mx.array) -> mx.array:
    """``into`` with values added along axis 0 at indices of as many dims, which broadcast."""
    made = loaded().fr_mlx_scatter_add(into, indices, values)
    if made is NotImplemented:
        raise why() or KernelError("scatter_add failed.")
    return made  # type: ignore[no-any-return]


def mended(outputs: tuple[mx.array, ...], inputs: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """What MLX makes of ``inputs`` by a file, such that derivatives and batches of it are right."""
    made = loaded().fr_mlx_mended(outputs, inputs)
    if made is NotImplemented:
        raise why() or KernelError("[import_function] what MLX made of a file was not understood.")
    return made  # type: ignore[no-any-return]


# -- level 0 ------------------------------------------------------------------------------------


class BoundKernel(Bound):
    """A kernel whose sizes are numbers, as C carries it out."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.templates: list[tuple[tuple[str, int | bool | Dtype], ...]] = []
        self.indices: dict[object, int] = {}  # of templates
        s = self.structure
        s.inputs, s.outputs, s.bodies = len(kernel.input_names), len(kernel.output_names), 1
        for i, name in enumerate(kernel.output_names):
            s.output_names[i] = name.encode()
        body = s.body[0]
        on_cpu = op_entries.CPU if kernel.language == "metal" else 0
        body.devices = op_entries.CUDA | on_cpu
        body.when, body.templates = -1, 1
        body.contiguous = kernel.ensure_row_contiguous
        body.atomics = "atomic" in kernel.source + kernel.header
        self.plans: dict[object, int] = {}
        self.number = number_of(self)
        op_entries.kept.append(self)
        self.calls = loaded().fr_mlx_calls(len(kernel.input_names))
        self.answer = answering(self._said, f"kernel {kernel.name!r}")
        op_entries.kept.append(self.answer)

    def prepared(self, request: Request) -> Prepared:
        """What a request asks for."""
        from .. import devices

        device = "cpu" if request.device_type == op_entries.CPU else f"cuda:{request.device}"
        facts = []
        for i in range(self.structure.inputs):
            one = request.input[i]
            shape: Shape = tuple(one.sizes[d] for d in range(one.ndim))
            strides = tuple(request.strides[i][d] for d in range(one.ndim))
            facts.append(
                Facts(dtypes.ALL[one.dtype], shape, strides, request.pointer[i] or 0, device)
            )
        written = []
        for i in range(self.structure.outputs):
            out = request.output[i]
            shape = tuple(out.sizes[d] for d in range(out.ndim))
            strides = row_contiguous_strides(shape)
            written.append(Facts(dtypes.ALL[out.dtype], shape, strides, 0, device))
        sizes = [request.grid[i] for i in range(6)]
        shapes = tuple(one.shape for one in written)
        grid, group = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        launch = Launch(grid, group, shapes, None, ())
        spec = Spec(
            self.kernel, tuple(Input(f.dtype, len(f.shape)) for f in facts),
            tuple(f.dtype for f in written), self.template(request),
        )  # fmt: skip
        program = devices.get(device).program(spec)
        return Prepared(program, facts, written, launch).placed(request)

    def template(self, request: Request) -> tuple[tuple[str, int | bool | Dtype], ...]:
        """The template of a request."""
        index: int = request.template_value[0]
        return self.templates[index]

    def _said(self, what: str, *given: Any) -> tuple[Any, ...]:
        if what == "by_mlx":
            return tuple(mlx_gpu.by_mlx(*given))
        if what == "stale":
            raise stale(self.kernel, *given[0])
        raise without_rule(self.kernel, what)

    def plan(
        self, shapes: Sequence[Shape], outs: Sequence[Dtype], grid: tuple[int, int, int],
        group: tuple[int, int, int], items: tuple[tuple[str, int | bool | Dtype], ...],
        fills: bytes | None,
    ) -> int:  # fmt: skip
        """What a node of this is made from, remembered for its numbers."""
        kinds = tuple([type(value) for _, value in items])
        key = (tuple(shapes), tuple(outs), grid, group, items, kinds, fills)
        found = self.plans.get(key)
        if found is not None:
            return found
        check_shapes(self.kernel, shapes)
        index = self.indices.setdefault((items, kinds), len(self.templates))
        if index == len(self.templates):
            self.templates.append(items)
        native = loaded()
        if len(self.plans) >= _MOST_PLANS:
            native.fr_mlx_forget(self.plans.pop(next(iter(self.plans))))
        flat = [word for shape in shapes for word in (len(shape), *shape)]
        made = self.plans[key] = native.fr_mlx_fixed(
            ctypes.addressof(self.structure), self.number, self.structure.body[0].devices,
            f"kernel {self.kernel.name!r}".encode(), self.answer,
            (ctypes.c_int32 * len(outs))(*[dtypes.ALL.index(one) for one in outs]),
            (_int64 * len(flat))(*flat), (ctypes.c_uint32 * 6)(*grid, *group), 1,
            (_int64 * 1)(index), fills,
        )  # fmt: skip
        return int(made)


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


def without_rule(kernel: Kernel, what: str) -> KernelError:
    """The error for a derivative, or a batch, of a kernel's call."""
    words = {"vjp": "derivative", "jvp": "forward-mode derivative", "vmap": "batching rule"}
    return KernelError(
        f"{kernel.tag} kernel {kernel.name!r} has no {words[what]}: a {kernel.tag[1:-1]} call has "
        f"none. Declare it with ferrule.op and def_{what}, or wrap the call in an "
        "mx.custom_function, which MLX neither compiles with shapeless=True nor exports."
    )


class BoundSizes(BoundKernel):
    """A kernel whose sizes are expressions of its inputs' shapes, of certain ranks."""

    def __init__(self, kernel: Kernel, sizes: Sizes, number: float | None) -> None:
        super().__init__(kernel)
        self.sizes, self.fill = sizes, number
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
        """What a request asks for; raises what is wrong with its sizes."""
        shapes: list[Shape] = []
        for i, one in enumerate(self.sizes.rule.inputs):
            given = request.input[i]
            if given.ndim != len(one.dims or ()):  # of other ranks, which have sizes of their own
                raise KernelError(f"[metal_kernel] input {one.name!r} has another rank.")
            shapes.append(tuple(given.sizes[d] for d in range(given.ndim)))
        check_numbers(self.kernel, self.sizes, shapes)
        if not request.output or not request.grid:
            raise KernelError(
                f"[metal_kernel] kernel {self.kernel.name!r}: sizes for inputs of the shapes "
                f"{', '.join(map(str, shapes))} do not fit in 64 bits."
            )
        return super().prepared(request)

    def _said(self, what: str, *given: Any) -> tuple[Any, ...]:
        if what != "metal":
            return super()._said(what, *given)
        (values,) = given
        grid, group, shapes, template = self.sizes.numbers([one.shape for one in values])
        kinds = [dtypes.BY_NAME[one.dtype] for one in self.sizes.rule.outputs]
        return tuple(mlx_gpu.call_stock(
            self.kernel, values, shapes, kinds, grid, group, template, self.fill
        ))  # fmt: skip

    def template(self, request: Request) -> tuple[tuple[str, int | bool | Dtype], ...]:
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
    grid, group, outputs, template = sizes.numbers(shapes)
    threads = arguments.axes(kernel, "grid", grid, 0)
    arguments.threadgroup_axes(kernel, group, threads)
    for i, one in enumerate(sizes.rule.outputs):
        arguments.output_shape(kernel, i, outputs[i], dtypes.BY_NAME[one.dtype])
    for name, value in template:
        arguments.template_value(kernel, name, value)
    if 0 in threads:
        arguments.check_empty(kernel, threads, outputs)


_following: dict[object, tuple[BoundSizes, int]] = {}  # with their plans


def _plan_of(
    kernel: Kernel, sizes: Sizes, number: float | None, fills: bytes | None
) -> int:  # fmt: skip
    """What a node of a kernel with these expressions is made from."""
    template = tuple([(name, type(value), value) for name, value in sizes.template])
    key = (kernel, str(sizes.rule), tuple(sizes.launch), template, fills)
    found = _following.get(key)
    if found is None:
        bound = BoundSizes(kernel, sizes, number)
        outs = [dtypes.ALL.index(dtypes.BY_NAME[one.dtype]) for one in sizes.rule.outputs]
        plan = loaded().fr_mlx_following(
            ctypes.addressof(bound.structure), bound.number, bound.structure.body[0].devices,
            f"kernel {kernel.name!r}".encode(),
            bound.answer, (ctypes.c_int32 * len(outs))(*outs), fills,
        )  # fmt: skip
        found = _following[key] = bound, int(plan)
    return found[1]


_MOST_PLANS = 4096
_kernels: dict[Kernel, BoundKernel] = {}


def call_kernel(
    kernel: Kernel, wants: Sequence[bool], inputs: Sequence[Any], shapes: Sequence[Shape],
    outs: Sequence[Dtype], grid: tuple[int, int, int], group: tuple[int, int, int],
    items: tuple[tuple[str, int | bool | Dtype], ...], number: float | None, stream: object,
    asked: tuple[object, ...], written: Sizes | None,
) -> list[mx.array] | None:  # fmt: skip
    """The outputs of a `metal_kernel` call, as nodes; None where nodes cannot be had.

    Takes what was checked, but for the inputs: arrays and scalars; and all but the inputs and the
    stream, as it was ``asked``, so that `again` does the same without Python. Where a size is
    ``written`` as an expression, the node follows it.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            the call does.
    """
    if written is None and kernel.language == "metal" and mlx_gpu.on_metal(stream):
        given = [array_of(kernel, wants, i, value) for i, value in enumerate(inputs)]
        return mlx_gpu.call_stock(kernel, given, shapes, outs, grid, group, items, number, stream)
    found = library()
    if found is None:
        return None
    if kernel.language == "cuda" and not found.fr_mlx_has_cuda():
        raise arguments.needs_cuda(kernel, mlx.name, "cpu")
    arrays = tuple([array_of(kernel, wants, i, value) for i, value in enumerate(inputs)])
    fills = None
    if number is not None:
        parts = [
            np.array(arguments.fill_value(kernel, i, number, kind)).astype(kind.numpy).tobytes()
            for i, kind in enumerate(outs)
        ]
        fills = b"".join(parts)
    bound = _kernels.get(kernel)
    if bound is None:
        bound = _kernels[kernel] = BoundKernel(kernel)
    if written is not None:
        plan = _plan_of(kernel, written, number, fills)
    else:
        plan = bound.plan(shapes, outs, grid, group, items, fills)
    result = found.fr_mlx_run(plan, arrays, stream_of(kernel, stream))
    if result is NotImplemented:
        raise why() or KernelError(f"[metal_kernel] kernel {kernel.name!r} cannot be called.")
    found.fr_mlx_remember(bound.calls, asked, plan)
    outputs: list[mx.array] = result
    return outputs


def traced() -> int:
    """How many nodes this thread has made inside functions that MLX traces."""
    found = library()
    return -1 if found is None else int(found.fr_mlx_traced())


def last_traced() -> str:
    """What the last of them was of: ``"kernel 'exp'"``."""
    text: bytes = loaded().fr_mlx_last()
    return text.decode()


def refused(array: mx.array, why: str) -> mx.array:
    """``array`` in an `mx.custom_function`: where MLX would refuse that, ``why`` is the error."""
    made: mx.array = loaded().fr_mlx_refused(array, why.encode())
    return made


def again(kernel: Kernel) -> Any:
    """A function in C that makes calls like earlier ones of a kernel that was called.

    It takes the inputs, an MLX stream or None, and what `call_kernel` was ``asked``; it gives
    NotImplemented for what Python must look at.
    """
    bound = _kernels.get(kernel)  # none where MLX's own nodes are used
    return None if bound is None else loaded().fr_mlx_again(bound.calls)


def record_kernel(*call: Any) -> list[mx.array]:
    """The outputs of a kernel's call while `exporting`: as `mlx_export.call_kernel`."""
    from . import mlx_export

    return mlx_export.call_kernel(*call)


def array_of(kernel: Kernel, wants: Sequence[bool], index: int, value: Any) -> mx.array:
    """An input of a kernel: scalars become arrays."""
    if not isinstance(value, mx.array):
        fact, _ = arguments.scalar(kernel, index, value)
        return mx.array(value, mlx.DTYPES[fact.dtype.name])
    kind = mlx.KNOWN[value.dtype]
    if not kind.level0 or wants[index]:
        arguments.check_input(kernel, index, mlx.described(value, "cpu"))
    return value


def stream_of(kernel: Kernel, given: object) -> Any:
    """The stream, or None for the default one."""
    if given is None:
        return None
    try:
        mlx.stream(given, "cpu")
    except KernelTypeError as error:
        raise arguments.renamed(error, arguments.label_of(kernel, "stream")) from error
    where: Any = given
    if isinstance(where, mx.Stream):
        return where
    if not isinstance(where, (mx.Device, mx.DeviceType)):  # a stream for each thread
        with mx.stream(where):
            return mx.default_stream(where.device)
    # Programs may have told Python that there is a GPU.
    if where == mx.gpu and not loaded().fr_mlx_has_gpu():
        return mx.default_stream(mx.cpu)
    return mx.default_stream(where)
