"""Kernels that C runs: the tables of runtime/op_calls.h, and what fills them.

The C libraries of tools/fastcall.py, of hosts/torch/calls.py and of hosts/mlx/build.py ask for a
kernel's program, once per form of call, and for what is wrong with a call: a `Bound` answers.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import dtypes
from ..hosts import protocol as hosts
from ..kernel import Kernel
from ..spec import Facts, Launch, row_contiguous_strides
from ..tools import fastcall

if TYPE_CHECKING:
    from ..devices.protocol import Native, Program

# Constants of runtime/op_calls.h and rule.h.
ARGUMENTS, MOST_DIMS, MOST_TEMPLATES, _DIMS, _KEY = 32, 16, 64, 64, 112
_BUCKETS, _MOST_ENTRIES = 64, 4096
_DEVICE_FACTS, _MOST_GPUS = 4, 16
CPU, CUDA = 1, 2
FLOAT, INT, BOOL = 1, 2, 3  # of a number; 0 of an array
_PASS = {"input": 0, "value": 1, "shape": 2, "strides": 3, "output": 4, "launch": 5, "extent": 6}
SHARED, _OUTSIDE = -1, 6

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class BodyTable(ctypes.Structure):
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
    )


TELL_GPU = ctypes.CFUNCTYPE(ctypes.c_int, _int32, ctypes.POINTER(_int32))


class OpTable(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.POINTER(_int64)),
        ("inputs", _int32),
        ("outputs", _int32),
        ("bodies", _int32),
        ("output_names", ctypes.c_char_p * ARGUMENTS),
        ("input", _Argument * ARGUMENTS),
        ("body", ctypes.POINTER(BodyTable)),
        ("entries", _int32),
        ("bucket", _pointer * _BUCKETS),
        ("device_symbol", _int32 * _DEVICE_FACTS),
        ("tell_gpu", TELL_GPU),
        ("gpu", _int32 * _DEVICE_FACTS * _MOST_GPUS),
    )


def new_table(bodies: int) -> OpTable:
    """A table with so many bodies."""
    table = OpTable(bodies=bodies)
    table.body = (BodyTable * bodies)()
    table.device_symbol[:] = [-1] * _DEVICE_FACTS
    return table


class _Call(ctypes.Structure):  # cuda_call
    _fields_ = (
        ("function", _pointer),
        ("context", _pointer),
        ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("pdl", ctypes.c_uint32),
        ("prints", ctypes.c_uint32),
    )


class Entry(ctypes.Structure):
    _fields_ = (
        ("next", _pointer), ("words", _int32), ("key", _int64 * _KEY), ("run", _pointer),
        ("entry", _pointer), ("limit", _int32), ("over_grid", _int32), ("block", _int32),
        ("described", ctypes.c_uint32), ("call", _Call), ("sizes", ctypes.c_uint32 * 9),
        ("parameters", _int32), ("parameter", _int32 * (2 * (5 * ARGUMENTS + _DIMS))),
    )  # fmt: skip


class _Input(ctypes.Structure):  # fr_rule_input
    _fields_ = (
        ("sizes", ctypes.POINTER(_int64)),
        ("ndim", _int32),
        ("dtype", _int32),
        ("value", _int64),
        ("present", ctypes.c_bool),
    )


class _Output(ctypes.Structure):  # fr_rule_output
    _fields_ = (("ndim", _int32), ("dtype", _int32), ("sizes", _int64 * MOST_DIMS))


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


def device_of(request: Request) -> str:
    """Where a request's call is."""
    return "cpu" if request.device_type == CPU else f"cuda:{request.device}"


def facts_of(request: Request, i: int, device: str) -> Facts:
    """The facts of a request's input, which is there."""
    value = request.input[i]
    shape = tuple(value.sizes[d] for d in range(value.ndim))
    strides = tuple(request.strides[i][d] for d in range(value.ndim))
    return Facts(dtypes.ALL[value.dtype], shape, strides, request.pointer[i] or 0, device)


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

    def check_ended(self, request: Request, kernel: Kernel, names: Sequence[str]) -> None:
        """Check that the request is not of a launch that failed.

        Args:
            request: what C asks.
            kernel: what was launched.
            names: those of its first outputs, which are new.

        Raises:
            DeviceError: it is; says how it ended.
        """
        if request.status == _OUTSIDE:
            i, count = request.outside
            shape = self.outputs[i].shape
            raise hosts.wrote_outside(self.launch.of(kernel), names[i], shape, count)
        if request.status > 0:
            arrays = [*self.inputs, *self.outputs]
            raise self.program.failure(request.status, self.launch, arrays)


class Numbered:
    """Objects by numbers, which C has in their place; a lock sees to it that no number comes twice.

    Attributes:
        objects: each at the place of its number.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[object, int] = {}
        self._lock = threading.Lock()

    def number(self, value: object, key: object = None) -> int:
        """The number of an object, or of the first with this ``key``."""
        with self._lock:
            number = self._numbers.setdefault(value if key is None else key, len(self.objects))
            if number == len(self.objects):
                self.objects.append(value)
        return number


class Bound:
    """An op or kernel that C runs, with its entries.

    Attributes:
        structure: its table, which must live as long as C may use it.
        entries: what C remembers, which goes with the table.
        recent: entries beyond that.
    """

    def __init__(self, structure: OpTable | None = None) -> None:
        self.structure = structure or new_table(1)
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
        remembered = self.structure.entries < _MOST_ENTRIES and not fastcall.bypasses
        (self.entries if remembered else self.recent).append((entry, held))
        entry.words = 0 if remembered else -1  # C keeps in no table what may go
        return ctypes.addressof(entry)


@lru_cache(maxsize=1)
def register_engine() -> None:
    """Tell the library of tools/fastcall.py what calls on the CPU ask for."""
    from ..tools.binding import FEW, runtime

    library = fastcall.library()
    if library is not None:
        threads_now = ctypes.cast(runtime().fr_threads, _pointer).value or 0
        library.register_engine(threads_now, FEW)


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


class BoundKernel(Bound):
    """A kernel without a rule that C runs: a call has its sizes, and one template value, which is
    the number of what `program` knows."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        s = self.structure
        s.inputs, s.outputs, s.bodies = len(kernel.input_names), len(kernel.output_names), 1
        for i, name in enumerate(kernel.output_names):
            s.output_names[i] = name.encode()
        body = s.body[0]
        body.devices = CUDA | (CPU if kernel.language == "metal" else 0)
        body.when, body.templates = -1, 1
        body.contiguous = kernel.ensure_row_contiguous
        body.atomics = "atomic" in kernel.source + kernel.header

    def program(
        self, request: Request, device: str, inputs: list[Facts], outputs: list[Facts]
    ) -> Program:
        """What runs the kernel for inputs and outputs of these dtypes and ranks."""
        raise NotImplementedError

    def filled(self, request: Request) -> float | None:
        """What outputs are filled with before the launch, as far as that must be known: None of
        those that are not."""
        return None

    def prepared(self, request: Request) -> Prepared:
        """The program and arguments for a request; raises how its launch ended, if it failed."""
        device, s = device_of(request), self.structure
        inputs = [facts_of(request, i, device) for i in range(s.inputs)]
        pointers = request.output_pointer
        outputs = []
        for i in range(s.outputs):
            out = request.output[i]
            shape = tuple(out.sizes[d] for d in range(out.ndim))
            pointer = (pointers[i] or 0) if pointers else 0
            strides = row_contiguous_strides(shape)
            outputs.append(Facts(dtypes.ALL[out.dtype], shape, strides, pointer, device))
        program = self.program(request, device, inputs, outputs)
        x, y, z, *threadgroup = request.grid[:6]
        shapes = tuple(fact.shape for fact in outputs)
        group = (threadgroup[0], threadgroup[1], threadgroup[2])
        launch = Launch((x, y, z), group, shapes, self.filled(request), ())
        prepared = Prepared(program, inputs, outputs, launch).placed(request)
        prepared.check_ended(request, self.kernel, self.kernel.output_names)
        return prepared
