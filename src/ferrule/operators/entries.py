"""Ops that C runs: the tables of runtime/op_calls.h, and what fills them.

The C libraries of tools/fastcall.py, for NumPy's arrays, of hosts/torch/calls.py and of
hosts/mlx/build.py ask here for a kernel's program, once per form of call, and for what is wrong
with a call.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import dtypes
from ..errors import KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..rules.argument import Argument
from ..rules.bytecode import compile_rule
from ..rules.expression import Expression
from ..spec import Facts, Launch, Shape, row_contiguous_strides
from ..tools import fastcall
from ..tools.binding import runtime
from . import call as op_call
from .bodies import KernelBody
from .launch import Arguments, check_empty, prepare

if TYPE_CHECKING:
    from ..devices.protocol import Native, Program
    from .declared import Declared

FEW = 3  # devices.cpu.FEW

# Constants of runtime/op_calls.h and rule.h.
_ARGUMENTS, _BODIES, _TEMPLATE, _DIMS, _KEY = 32, 4, 16, 16, 96
_BUCKETS, _MOST_ENTRIES = 64, 4096
CPU, CUDA = 1, 2
_ARRAY, _FLOAT, _INT, _BOOL = 0, 1, 2, 3
_PASS = {"input": 0, "value": 1, "shape": 2, "strides": 3, "output": 4, "launch": 5, "extent": 6}
_SHARED, _OUTSIDE = -1, 6

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Body(ctypes.Structure):
    _fields_ = (
        ("devices", _int32), ("when", _int32), ("grid", _int32), ("templates", _int32),
        ("first_template", _int32), ("zeroed", _int32), ("contiguous", _int32), ("atomics", _int32),
        ("described", ctypes.c_uint32), ("dims", _int32), ("dim", _int32 * _DIMS),
    )  # fmt: skip


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", _int32),
        ("dtype", _int32),
        ("optional", _int32),
        ("mutable_", _int32),
        ("dims", _int32),
        ("least", _int64),
        ("most", _int64),
    )


class OpTable(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.POINTER(_int64)),
        ("inputs", _int32),
        ("outputs", _int32),
        ("bodies", _int32),
        ("output_names", ctypes.c_char_p * _ARGUMENTS),
        ("input", _Argument * _ARGUMENTS),
        ("body", _Body * _BODIES),
        ("entries", _int32),
        ("bucket", _pointer * _BUCKETS),
    )


class _Call(ctypes.Structure):  # cuda_call
    _fields_ = (
        ("function", _pointer),
        ("context", _pointer),
        ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("table", ctypes.c_uint32),
    )


class Entry(ctypes.Structure):
    _fields_ = (
        ("next", _pointer), ("words", _int32), ("key", _int64 * _KEY), ("run", _pointer),
        ("entry", _pointer), ("limit", _int32), ("over_grid", _int32), ("block", _int32),
        ("described", ctypes.c_uint32), ("call", _Call), ("sizes", ctypes.c_uint32 * 9),
        ("parameters", _int32), ("parameter", _int32 * (10 * _ARGUMENTS)),
    )  # fmt: skip


class _Input(ctypes.Structure):  # fr_rule_input
    _fields_ = (
        ("sizes", ctypes.POINTER(_int64)),
        ("ndim", _int32),
        ("dtype", _int32),
        ("present", ctypes.c_bool),
    )


class _Output(ctypes.Structure):  # fr_rule_output
    _fields_ = (("ndim", _int32), ("dtype", _int32), ("sizes", _int64 * 16))


class Request(ctypes.Structure):
    _fields_ = (
        ("op", _int32), ("body", _int32), ("device_type", _int32), ("device", _int32),
        ("input", ctypes.POINTER(_Input)), ("output", ctypes.POINTER(_Output)),
        ("pointer", ctypes.POINTER(_pointer)), ("output_pointer", ctypes.POINTER(_pointer)),
        ("number", ctypes.POINTER(ctypes.c_double)), ("integer", ctypes.POINTER(_int64)),
        ("host_device", ctypes.POINTER(_int32)), ("grid", ctypes.POINTER(ctypes.c_uint32)),
        ("template_value", ctypes.POINTER(_int64)), ("threads", _int32), ("aligned", _int32),
        ("status", _int32), ("strides", ctypes.POINTER(ctypes.POINTER(_int64))),
        ("exception", _pointer * 3), ("text", ctypes.c_char_p), ("outside", _int32 * 2),
    )  # fmt: skip


RESOLVE = ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(Request))


class _Raised(threading.local):
    """The exception that a thread's last failed call is about, and its text as bytes."""

    error: BaseException | None = None
    text = b""


_raised = _Raised()
kept: list[object] = []  # for as long as the process lives


def fail(request: Request, error: BaseException) -> None:
    """Answer a request with an exception, which `raised` finds again."""
    _raised.error, _raised.text = error, str(error).encode() or type(error).__name__.encode()
    request.text = _raised.text


def raised(by_host: Exception) -> BaseException | None:
    """The exception that a host's C++ made one of its own of, if it did; once."""
    error, _raised.error = _raised.error, None
    return error if error is not None and str(by_host).encode().startswith(_raised.text) else None


def resolver(answer: Callable[[Request], int]) -> Any:
    """The function that C calls for an entry: of a request; gives an address, or raises."""

    def resolve(at: Any) -> int:
        try:
            return answer(at.contents)
        except BaseException as error:
            fail(at.contents, error)
            return 0

    return RESOLVE(resolve)


class Prepared(NamedTuple):
    """A launch that a request asks for: what `Program.launch` takes, and what owns its numbers."""

    program: Program
    inputs: Sequence[Facts]
    outputs: Sequence[Facts]
    launch: Launch
    owners: object = None

    def placed(self, request: Request) -> Prepared:
        """The same, where arrays on a GPU begin anywhere."""
        if request.device_type == CPU or request.aligned:
            return self
        return self._replace(launch=self.launch._replace(aligned=False))


class Bound:
    """An op or kernel that C runs, with its entries.

    Attributes:
        structure: its table, which must live as long as C may use it.
        entries: what C remembers, which goes with the table.
        recent: entries beyond that.
    """

    def __init__(self) -> None:
        self.structure = OpTable()
        self.entries: list[object] = []
        self.recent: deque[object] = deque(maxlen=2048)

    def prepared(self, request: Request) -> Prepared:
        """The launch that a request asks for; raises what is wrong with it."""
        raise NotImplementedError

    def entry(self, request: Request) -> int:
        """The address of an entry for a request; raises what is wrong with it."""
        program, inputs, outputs, launch, _ = self.prepared(request)
        return self.keep(program.native(inputs, outputs, launch))

    def entry_at(self, address: int) -> int:
        """The same, given the address of the request."""
        return self.entry(Request.from_address(address))

    def keep(self, native: Native) -> int:
        """The address of a new entry, which lives as long as C may use it."""
        entry = Entry()
        held = fill(entry, native)
        remembered = self.structure.entries < _MOST_ENTRIES and not fastcall.bypassing()
        (self.entries if remembered else self.recent).append((entry, held))
        return ctypes.addressof(entry)


class BoundOp(Bound):
    """An op that C runs."""

    def __init__(
        self, op: Declared, words: ctypes.Array[ctypes.c_int64], on_cuda: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self.op, self.words = op, words
        self.on_cuda = on_cuda  # called before an entry for a GPU is used

    def prepared(self, request: Request) -> Prepared:
        """The launch that a request asks for; raises what is wrong with it."""
        op = self.op
        device = "cpu" if request.device_type == CPU else f"cuda:{request.device}"
        arguments = self.arguments(request, device)
        call = op_call.bound(op, device, arguments)
        results = call.results
        if request.status == _SHARED:
            op_call.check_apart(op, arguments)
        body = op_call.choose(call)
        if not isinstance(body, KernelBody):
            raise KernelError(f"[op] op {op.name!r} cannot be carried out in C for these sizes.")
        body_launch = body.launch_for(call.binding)
        at = (
            request.output_pointer[: len(results)] if request.output_pointer else [0] * len(results)
        )
        outputs = [
            Facts(kind, shape, row_contiguous_strides(shape), pointer or 0, device)
            for (shape, kind), pointer in zip(results, at, strict=True)
        ]
        if 0 in body_launch.grid:
            check_empty(op.name, op.rule, body_launch, outputs)
        program, facts, written, launch, owners = prepare(call, body, body_launch, outputs)
        if request.status == _OUTSIDE:
            i, count = request.outside
            shape = results[i][0]
            raise hosts.wrote_outside(launch.of(body.kernel), op.rule.outputs[i].name, shape, count)
        if request.status > 0:
            raise program.failure(request.status, launch, [*facts, *written])
        if request.body < 0:
            shapes = ", ".join(
                f"{n} {f.shape}" for n, f in arguments.items() if isinstance(f, Facts)
            )
            raise KernelError(
                f"[op] op {op.name!r} was called with {shapes}; expected 16 dims at most, and "
                "sizes that 64 bits can hold."
            )
        if device != "cpu" and self.on_cuda is not None:
            self.on_cuda()
        return Prepared(program, facts, written, launch, owners).placed(request)

    def arguments(self, request: Request, device: str) -> Arguments:
        """The facts of a call's inputs."""
        values: list[Any] = []  # numbers, and the places of arrays
        for i, parameter in enumerate(self.op.rule.inputs):
            kind = "" if parameter.dims is not None else dtypes.BY_NAME[parameter.dtype].kind
            if not kind:
                values.append(i if request.input[i].present else None)
            elif kind == "b":
                values.append(bool(request.integer[i]))
            else:
                values.append(request.number[i] if kind == "f" else request.integer[i])
        first: tuple[str, tuple[int, int]] | None = None

        def facts_of(parameter: Argument, i: int) -> Facts:
            nonlocal first
            label, entry = op_call.label_of(self.op, parameter), request.input[i]
            if request.host_device:
                where = (request.host_device[2 * i], request.host_device[2 * i + 1])
                if first is not None and where != first[1]:
                    raise KernelError(
                        f"{label} is on another device than input {first[0]!r}; expected one "
                        "device."
                    )
                first = first or (parameter.name, where)
            if entry.dtype < 0:
                names = ", ".join(d.name for d in dtypes.ALL)
                raise KernelTypeError(f"{label} has a dtype that is none of {names}.")
            shape: Shape = tuple(entry.sizes[d] for d in range(entry.ndim))
            strides = tuple(request.strides[i][d] for d in range(entry.ndim))
            pointer = request.pointer[i] or 0
            return Facts(dtypes.ALL[entry.dtype], shape, strides, pointer, device)

        return op_call.gathered(self.op, values, facts_of)


def fill(entry: Entry, native: Native) -> object:
    """Fill an entry; what is returned must live as long."""
    entry.run, entry.entry, entry.limit = native.run, native.entry, native.limit
    entry.over_grid, entry.block = native.over_grid, native.block
    entry.described = native.described
    if native.call:
        function, context, *numbers = native.call
        entry.call = _Call(function, context, tuple(numbers[:3]), tuple(numbers[3:6]), *numbers[6:])
    if native.sizes:
        entry.sizes = native.sizes
    entry.parameters = len(native.parameters)
    for i, (kind, index) in enumerate(native.parameters):
        entry.parameter[2 * i], entry.parameter[2 * i + 1] = _PASS[kind], index
    return native.keep


def serves(op: Declared, kinds: tuple[str, ...]) -> bool:
    """Whether C can run every implementation that may be chosen on a device."""
    tried = [body for body in op.implementations if body.kind != "cuda" or "cuda" in kinds]
    for body in tried:
        if not isinstance(body, KernelBody) or not _plain(body):
            return False
        if body.when is None:
            return True
    return False


def _plain(body: KernelBody) -> bool:
    fill = body.fill
    constant = not isinstance(fill, Expression) and (fill is None or hosts.all_bits_zero(fill))
    count = len(body.dims) <= _DIMS and len(body.template) <= _TEMPLATE
    return constant and count and not (body.shared.names or body.shared.arrays)


def bind(
    op: Declared, on_cuda: Callable[[], None] | None = None, launches: bool = True
) -> BoundOp | None:
    """The tables of an op for C, or where it ``launches`` nothing, of its rule; None where they
    need more room than C has."""
    bodies = [body for body in op.implementations if isinstance(body, KernelBody) and launches]
    if any(len(body.dims) > _DIMS or len(body.template) > _TEMPLATE for body in bodies):
        return None
    extra: list[Expression] = []
    places = []
    for body in bodies:
        when = -1
        if body.when is not None:
            when = len(extra)
            extra.append(body.when)
        grid = len(extra)
        extra += [*body.grid, *body.threadgroup]
        templates = [value for _, value in body.template if isinstance(value, Expression)]
        places.append((when, grid, len(templates), len(extra)))
        extra += templates
    program = compile_rule(op.rule, extra)
    numbers = [
        dtypes.BY_NAME[parameter.dtype] for parameter in op.rule.inputs if parameter.dims is None
    ]
    wide = ("b", "i", "u")
    if program is None or len(bodies) > _BODIES:
        return None
    floats = ("float32", "float64") if launches else ("float16", "bfloat16", "float32", "float64")
    if any(kind.kind not in wide and kind.name not in floats for kind in numbers):
        return None
    words = (_int64 * len(program.words))(*program.words)
    bound = BoundOp(op, words, on_cuda)
    s = bound.structure
    s.program = ctypes.cast(words, ctypes.POINTER(_int64))
    s.inputs, s.outputs, s.bodies = len(op.rule.inputs), len(op.rule.outputs), len(bodies)
    for i, output in enumerate(op.rule.outputs):
        s.output_names[i] = output.name.encode()
    for i, parameter in enumerate(op.rule.inputs):
        argument = s.input[i]
        argument.optional, argument.mutable_ = parameter.optional, parameter.mutable
        argument.dims = len(parameter.dims or ())
        if parameter.dims is None:
            kind = dtypes.BY_NAME[parameter.dtype]
            argument.dtype = dtypes.ALL.index(kind)
            argument.kind = {"f": _FLOAT, "b": _BOOL}.get(kind.kind, _INT)
            bits = 8 * kind.itemsize
            argument.least = -(1 << (bits - 1)) if kind.kind == "i" else 0
            argument.most = (1 << (bits - (kind.kind == "i"))) - 1 if bits < 64 else 2**63 - 1
    for structure, body, (when, grid, count, first) in zip(s.body, bodies, places, strict=False):
        text = body.kernel.source + body.kernel.header
        structure.devices = CUDA if body.kind == "cuda" else CPU | CUDA
        structure.when, structure.grid = when, grid
        structure.templates, structure.first_template = count, first
        structure.zeroed = body.fill is not None
        structure.contiguous = body.kernel.ensure_row_contiguous
        structure.atomics = "atomic" in text
        places_read = [parameter.name in body.described for parameter in op.rule.inputs]
        structure.described = sum(read << i for i, read in enumerate(places_read))
        structure.dims = len(body.dims)
        for i, name in enumerate(body.dims):
            structure.dim[i] = program.symbols.index(name)
    return bound


@lru_cache(maxsize=1)
def _numpy_in_c() -> Any:
    """The C library, if it takes NumPy's arrays: where outputs can have canaries."""
    hosts.load("numpy")  # registers them
    library = fastcall.library()
    if library is None:
        return None
    kinds = tuple((np.dtype(kind.numpy), kind.itemsize) for kind in dtypes.ALL)
    threads_now = ctypes.cast(runtime().fr_threads, _pointer).value
    return library if library.register_ops(kinds, threads_now, FEW) else None


def numpy_caller(op: Declared) -> Callable[..., Any]:
    """What runs an op in C for NumPy's arrays, and gives NotImplemented for what C does not do."""
    library = _numpy_in_c()
    if library is None or not serves(op, ("metal",)):
        return not_in_c
    table = bind(op)
    if table is None:
        return not_in_c
    caller: Callable[..., Any] = library.numpy_op(ctypes.addressof(table.structure), table.entry_at)
    return caller


def not_in_c(*_: Any) -> Any:
    """Stands for a caller in C where there is none."""
    return NotImplemented
