"""Kernels as nodes of MLX's graphs: lazy, compiled, differentiated, batched.

The nodes are runtime/mlx_node.cpp, which is compiled against the headers inside the user's own MLX,
once per version of it, and kept in the disk cache. Where there is no compiler, or MLX's arrays are
not as that file knows them, kernels run when they are called, as `hosts.mlx` does it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .. import (
    arguments,
    batching,
    binding,
    cache,
    derivatives,
    dtypes,
    loader,
    op_entries,
    toolchain,
)
from ..bytecode import compile_rule
from ..dtypes import Dtype
from ..errors import (
    CompilerFailed,
    DeviceError,
    FerruleWarning,
    KernelError,
    KernelTypeError,
    ToolchainError,
    warn,
)
from ..op_entries import FEW, RESOLVE, Bound, Request
from ..spec import Facts, Input, Launch, Shape, Spec, row_contiguous_strides
from . import mlx

if TYPE_CHECKING:
    from ..call_sizes import Sizes
    from ..kernel import Kernel
    from ..op_declaration import Op

FOLDER = Path(__file__).resolve().parent.parent / "runtime"
VERSION: str = mx.__version__  # type: ignore[attr-defined]
SOURCES = ("mlx_node.cpp", *op_entries.SOURCES)
_FLAGS = ("-std=c++20", "-O2", "-fvisibility=hidden", "-Wno-address")
# The library is named before the text that needs it, which a linker may take for no need.
_LINK = ("-lmlx",) if sys.platform == "darwin" else ("-Wl,--no-as-needed", "-lmlx", "-ldl")

# MLX's own numbers of its dtypes, mlx::core::Dtype::Val.
_NUMBERS = {
    "bool": 0, "uint8": 1, "uint16": 2, "uint32": 3, "uint64": 4, "int8": 5, "int16": 6, "int32": 7,
    "int64": 8, "float16": 9, "float32": 10, "float64": 11, "bfloat16": 12, "complex64": 13,
}  # fmt: skip
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Setup(ctypes.Structure):
    _fields_ = (
        ("prototype", ctypes.py_object), ("ellipsis", ctypes.py_object),
        ("dtype", ctypes.py_object), ("stream", ctypes.py_object),
        ("dtypes", ctypes.c_int32), ("mlx_dtype", ctypes.POINTER(ctypes.c_int32)),
        ("item_bytes", ctypes.POINTER(ctypes.c_uint8)), ("resolve", RESOLVE),
        ("threads_now", _pointer), ("few", ctypes.c_int32),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def library() -> ctypes.PyDLL | None:
    """The compiled nodes, ready; None, once with a warning, where they cannot be had."""
    try:
        found = _loaded(_built())
        _check_layout(found)
    except (ToolchainError, DeviceError) as error:
        warn(
            f"kernels with MLX's arrays run at once, and not inside mx.compile, mx.vmap and "
            f"mx.export_function: {error}",
            FerruleWarning,
        )
        return None
    numbers = [_NUMBERS.get(kind.name, -1) for kind in dtypes.ALL]
    setup = _Setup(
        mx.array(0.0), ..., mx.float32, mx.default_stream(mx.cpu), len(numbers),
        (ctypes.c_int32 * len(numbers))(*numbers),
        (ctypes.c_uint8 * len(numbers))(*[kind.itemsize for kind in dtypes.ALL]),
        op_entries.resolver(_resolve), ctypes.cast(binding.runtime().fr_threads, _pointer), FEW,
    )  # fmt: skip
    op_entries.kept.append(setup)
    found.fr_mlx_init(ctypes.byref(setup))
    return found


def _loaded_library() -> ctypes.PyDLL:
    found = library()
    if found is None:
        raise DeviceError("the nodes for MLX were not loaded.")
    return found


def _built() -> bytes:
    """The machine code for this MLX, from the cache where it is there.

    Raises:
        ToolchainError: there is no compiler, MLX's headers are missing, or it refuses them.
    """
    home = Path(mx.__file__).resolve().parent
    if not (home / "include" / "mlx" / "array.h").is_file():
        raise ToolchainError(
            f"MLX's headers are not in {home / 'include'}, where its wheels have them."
        )
    compiler = toolchain.find_compiler()
    texts = b"".join((FOLDER / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(texts).hexdigest()
    flags = [
        *_FLAGS, f"-I{FOLDER}", f"-I{home / 'include'}", f"-L{home / 'lib'}", *_LINK,
    ]  # fmt: skip

    def make() -> bytes:
        text = f'#define FR_DIGEST "{digest}"\n#include "mlx_node.cpp"\n'
        try:
            return compiler.compile(text, flags=flags, timeout=600.0)
        except CompilerFailed as failed:
            raise ToolchainError(
                f"{compiler.path} ({compiler.kind} {compiler.version}) cannot build ferrule's "
                f"nodes for MLX {VERSION}:\n{failed.log}"
            ) from failed

    key = cache.digest("mlx_node", digest, VERSION, compiler.identity, *_FLAGS, *_LINK)
    return cache.default().get_or_make(key, make)


def _loaded(payload: bytes) -> ctypes.PyDLL:
    handle = loader.load_library(payload, "ferrule-mlx")
    found = ctypes.PyDLL(None, handle=handle._handle)  # the GIL is kept: MLX's arrays are touched
    found.fr_mlx_init.argtypes = (_pointer,)
    found.fr_mlx_look.argtypes = (ctypes.py_object, ctypes.POINTER(_int64))
    found.fr_mlx_look.restype = None
    found.fr_mlx_plan.argtypes = (_pointer, ctypes.c_int, ctypes.c_char_p, ctypes.py_object)
    found.fr_mlx_plan.restype = _pointer
    found.fr_mlx_fixed.argtypes = (
        _pointer, ctypes.c_int, ctypes.c_char_p, ctypes.py_object, ctypes.POINTER(ctypes.c_int32),
        ctypes.POINTER(_int64), ctypes.POINTER(ctypes.c_uint32), ctypes.c_int,
        ctypes.POINTER(_int64), ctypes.c_char_p,
    )  # fmt: skip
    found.fr_mlx_fixed.restype = _pointer
    found.fr_mlx_following.argtypes = (
        _pointer, ctypes.c_int, ctypes.c_char_p, ctypes.py_object, ctypes.POINTER(ctypes.c_int32),
        ctypes.c_char_p,
    )  # fmt: skip
    found.fr_mlx_following.restype = _pointer
    found.fr_mlx_calls.argtypes = (ctypes.c_int,)
    found.fr_mlx_calls.restype = _pointer
    found.fr_mlx_again.argtypes = (_pointer,)
    found.fr_mlx_again.restype = ctypes.py_object
    found.fr_mlx_remember.argtypes = (_pointer, ctypes.py_object, _pointer)
    found.fr_mlx_remember.restype = None
    found.fr_mlx_forget.argtypes = (_pointer,)
    found.fr_mlx_forget.restype = None
    found.fr_mlx_callable.argtypes = (_pointer,)
    found.fr_mlx_callable.restype = ctypes.py_object
    found.fr_mlx_run.argtypes = (_pointer, ctypes.py_object, ctypes.py_object)
    found.fr_mlx_run.restype = ctypes.py_object
    found.fr_mlx_raised.argtypes = (ctypes.c_char_p,)
    found.fr_mlx_raised.restype = None
    found.fr_mlx_why.restype = ctypes.c_char_p
    found.fr_mlx_traced.restype = _int64
    found.fr_mlx_last.restype = ctypes.c_char_p
    return found


def _check_layout(found: ctypes.PyDLL) -> None:
    """Refuse an MLX whose Python arrays do not lie in memory as the nodes read them.

    Raises:
        DeviceError: that is so.
    """
    probes: Any = (((3, 5, 7), mx.float32, 4), ((2,), mx.float16, 2), ((), mx.int64, 8))
    for shape, dtype, size in probes:
        array = mx.zeros(shape, dtype)
        seen = (_int64 * 3)()
        if array.__class__ is mx.array and object.__basicsize__ == 16:
            found.fr_mlx_look(array, seen)
        if list(seen) != [len(shape), array.size, size]:
            raise DeviceError(
                f"the arrays of MLX {VERSION} do not lie in memory as ferrule knows them; a "
                "newer ferrule may."
            )


# -- what the nodes ask -------------------------------------------------------------------------

_bound: list[Bound] = []  # by the numbers that nodes know them by


def _resolve(request: Request) -> int:
    address: int = _bound[request.op].entry(request)
    return address


def _answer(function: Any) -> Any:
    """A function whose errors reach the node that asked."""

    def answer(what: str, *given: Any) -> Any:
        try:
            return function(what, *given)
        except BaseException as error:
            _loaded_library().fr_mlx_raised(str(error).encode() or type(error).__name__.encode())
            return None

    return answer


def _rules(op: Op) -> Any:
    """What the nodes of an op ask for derivatives and batches."""

    def answer(what: str, *given: Any) -> tuple[Any, ...]:
        if what == "vjp":
            return tuple(derivatives.vjp(op, *given))
        if what == "jvp":
            values, tangents = given
            outputs = op(*values)
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            return tuple(derivatives.jvp(op, values, tangents, several))
        values, axes = given
        size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
        outputs, where = batching.batched(op, size, axes, values, op, Arrays)
        if len(op.rule.outputs) == 1 and not isinstance(outputs, (tuple, list)):
            return (outputs,), (where,)
        return tuple(outputs), tuple(where)

    return _answer(answer)


class Arrays:
    """What `batching.batched` does to MLX's arrays."""

    @staticmethod
    def is_array(value: Any) -> bool:
        return isinstance(value, mx.array)

    @staticmethod
    def move(value: mx.array, axis: int, to: int) -> mx.array:
        return mx.moveaxis(value, axis, to)

    @staticmethod
    def repeat(value: mx.array, axis: int, size: int) -> mx.array:
        shape = [*value.shape]
        shape.insert(axis, size)
        return mx.broadcast_to(mx.expand_dims(value, axis), shape)

    @staticmethod
    def merge(value: mx.array, axis: int) -> mx.array:
        return mx.flatten(value, axis, axis + 1)

    @staticmethod
    def part(value: mx.array, axis: int, sizes: tuple[int, int]) -> mx.array:
        return mx.unflatten(value, axis, sizes)

    @staticmethod
    def stack(values: Sequence[mx.array], axis: int) -> mx.array:
        return mx.stack(list(values), axis)

    @staticmethod
    def select(value: mx.array, axis: int, at: int) -> mx.array:
        return mx.take(value, at, axis)


# -- ops ----------------------------------------------------------------------------------------


def callable_for(op: Op) -> Any:
    """A function in C that calls an op with MLX's arrays; None where C cannot.

    It gives NotImplemented for what Python must look at; `why` says what is wrong, if anything.
    """
    found = library()
    if found is None or any(one.mutable for one in op.rule.inputs):
        return None
    if not op_entries.serves(op, ("metal",)):
        return None
    made = op_entries.bind(op, _nothing)
    if made is None:
        return None
    _bound.append(made)
    op_entries.kept.append(made)
    what = f"op {op.name!r}"
    plan = found.fr_mlx_plan(
        ctypes.addressof(made.structure), len(_bound) - 1, what.encode(), _rules(op)
    )
    return found.fr_mlx_callable(plan)


_callables: weakref.WeakKeyDictionary[Op, tuple[str, Any]] = weakref.WeakKeyDictionary()


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op for MLX's arrays, as nodes; NotImplemented where nodes cannot do it.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    known = _callables.get(op)
    if known is None or known[0] != op.digest:  # a rule may have been declared since
        known = _callables[op] = (op.digest, callable_for(op))
    function = known[1]
    if function is None:
        return NotImplemented
    op.calls_with_mlx(function)
    result = function(*values)
    if result is NotImplemented:
        error = why()
        if error is not None:
            raise error
    return result


def _nothing() -> None:
    pass


def why() -> BaseException | None:
    """The error for which a call in C was given back, once; None where there was none."""
    found = _loaded_library()
    text = found.fr_mlx_why()
    found.fr_mlx_raised(b"")
    if not text:
        return None
    return op_entries.raised(text) or KernelError(text.decode())


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
        body = s.body[0]
        body.devices = op_entries.CPU | op_entries.CUDA
        body.when, body.templates = -1, 1
        body.contiguous = kernel.ensure_row_contiguous
        body.atomics = "atomic" in kernel.source + kernel.header
        self.plans: dict[object, int] = {}
        self.number = len(_bound)
        _bound.append(self)
        op_entries.kept.append(self)
        self.calls = _loaded_library().fr_mlx_calls(len(kernel.input_names))
        self.answer = _answer(self._said)
        op_entries.kept.append(self.answer)

    def entry(self, request: Request) -> int:
        """The address of an entry for a request."""
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
        return self.keep(program.native(facts, written, launch))

    def template(self, request: Request) -> tuple[tuple[str, int | bool | Dtype], ...]:
        """The template of a request."""
        index: int = request.template_value[0]
        return self.templates[index]

    def _said(self, what: str, *given: Any) -> tuple[Any, ...]:
        name = self.kernel.name
        if what == "stale":
            at, traced, shape = given[0]
            raise KernelError(
                f"[metal_kernel] kernel {name!r}: input {self.kernel.input_names[at]!r} has the "
                f"shape {shape}, but grid, threadgroup and output shapes were given as numbers, in "
                f"a shapeless trace, for {traced}. Give them as expressions of the inputs "
                '(grid=("inp.size", 1, 1)), or declare the kernel with ferrule.op.'
            )
        words = {"vjp": "derivative", "jvp": "forward-mode derivative", "vmap": "batching rule"}
        raise KernelError(
            f"[metal_kernel] kernel {name!r} has no {words[what]}: a metal_kernel call has none. "
            f"Declare it with ferrule.op and def_{what}, or wrap the call in an mx.custom_function."
        )

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
        index = self.indices.setdefault((items, kinds), len(self.templates))
        if index == len(self.templates):
            self.templates.append(items)
        native = _loaded_library()
        if len(self.plans) >= _MOST_PLANS:
            native.fr_mlx_forget(self.plans.pop(next(iter(self.plans))))
        flat = [word for shape in shapes for word in (len(shape), *shape)]
        made = self.plans[key] = native.fr_mlx_fixed(
            ctypes.addressof(self.structure), self.number, f"kernel {self.kernel.name!r}".encode(),
            self.answer, (ctypes.c_int32 * len(outs))(*[dtypes.ALL.index(one) for one in outs]),
            (_int64 * len(flat))(*flat), (ctypes.c_uint32 * 6)(*grid, *group), 1,
            (_int64 * 1)(index), fills,
        )  # fmt: skip
        return int(made)


class BoundSizes(BoundKernel):
    """A kernel whose sizes are expressions of its inputs' shapes, of certain ranks."""

    def __init__(self, kernel: Kernel, sizes: Sizes) -> None:
        super().__init__(kernel)
        self.sizes = sizes
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

    def entry(self, request: Request) -> int:
        """The address of an entry for a request; raises what is wrong with its sizes."""
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
        return super().entry(request)

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


def _plan_of(kernel: Kernel, sizes: Sizes, fills: bytes | None) -> int:
    """What a node of a kernel with these expressions is made from."""
    template = tuple([(name, type(value), value) for name, value in sizes.template])
    key = (kernel, str(sizes.rule), tuple(sizes.launch), template, fills)
    found = _following.get(key)
    if found is None:
        bound = BoundSizes(kernel, sizes)
        outs = [dtypes.ALL.index(dtypes.BY_NAME[one.dtype]) for one in sizes.rule.outputs]
        plan = _loaded_library().fr_mlx_following(
            ctypes.addressof(bound.structure), bound.number, f"kernel {kernel.name!r}".encode(),
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
    found = library()
    if found is None:
        return None
    arrays = tuple([_array(kernel, wants, i, value) for i, value in enumerate(inputs)])
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
        plan = _plan_of(kernel, written, fills)
    else:
        plan = bound.plan(shapes, outs, grid, group, items, fills)
    result = found.fr_mlx_run(plan, arrays, _stream(kernel, stream))
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
    text: bytes = _loaded_library().fr_mlx_last()
    return text.decode()


def is_shapeless() -> bool:
    """Whether this thread traces a function for ``mx.compile(shapeless=True)``."""
    return bool(_loaded_library().fr_mlx_dynamic())


def again(kernel: Kernel) -> Any:
    """A function in C that makes calls like earlier ones of a kernel that was called.

    It takes the inputs, an MLX stream or None, and what `call_kernel` was ``asked``; it gives
    NotImplemented for what Python must look at.
    """
    return _loaded_library().fr_mlx_again(_kernels[kernel].calls)


def _array(kernel: Kernel, wants: Sequence[bool], index: int, value: Any) -> mx.array:
    if not isinstance(value, mx.array):
        fact, _ = arguments.scalar(kernel, index, value)
        return mx.array(value, mlx.DTYPES[fact.dtype.name])
    kind = mlx.KNOWN[value.dtype]
    if not kind.level0 or wants[index]:
        shape = value.shape
        fact = Facts(kind, shape, row_contiguous_strides(shape), 0, "cpu")
        arguments.check_input(kernel, index, fact)
    return value


def _stream(kernel: Kernel, given: object) -> Any:
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
    if where == mx.gpu and not mx.is_available(mx.gpu):
        return mx.default_stream(mx.cpu)
    return mx.default_stream(where)
