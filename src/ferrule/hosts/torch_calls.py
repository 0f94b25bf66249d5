"""Calls of ops by torch without Python code: the pool of functions of runtime/torch_calls.c.

Installing ferrule builds ``ferrule/_torch_calls*.so`` where there is a C compiler. It needs nothing
of torch to be built, and takes torch's C ABI from the process. Without it, or with a torch that
lacks that ABI, or for what it does not do, ops are carried out by `TorchOp.run`, with the same
results.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import dtypes, fastcall, op_call
from ..binding import runtime
from ..bytecode import compile_rule
from ..errors import KernelError, KernelTypeError
from ..expression import Expression
from ..implementation import KernelBody
from ..op_launch import check_empty, number, prepare
from ..spec import Facts, Shape, row_contiguous_strides
from . import all_bits_zero

if TYPE_CHECKING:
    from ..devices import Native
    from ..op_declaration import Op

FOLDER = Path(__file__).resolve().parent.parent
SOURCES = ("torch_calls.c", "arithmetic.h", "arrays.h", "cuda_launch.h", "rule.h", "runtime.h")
FEW = 3  # devices.cpu.FEW

# Constants of runtime/torch_calls.c and rule.h.
_ARGUMENTS, _BODIES, _TEMPLATE, _DIMS, _KEY = 32, 4, 16, 16, 96
_BUCKETS, _MOST_ENTRIES = 64, 4096
_CPU, _CUDA = 1, 2
_ARRAY, _FLOAT, _INT, _BOOL = 0, 1, 2, 3
_PASS = {"input": 0, "value": 1, "shape": 2, "strides": 3, "output": 4, "launch": 5}
_PYTHON = (
    "PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch",
    "Py_IsFinalizing" if sys.version_info >= (3, 13) else "_Py_IsFinalizing",
)  # fmt: skip
_EXCEPTION, _INPUT_COPIED, _SHARED = 0, 1, -1

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Body(ctypes.Structure):
    _fields_ = (
        ("devices", _int32), ("when", _int32), ("grid", _int32), ("templates", _int32),
        ("first_template", _int32), ("zeroed", _int32), ("contiguous", _int32), ("atomics", _int32),
        ("described", ctypes.c_uint32), ("dims", _int32), ("dim", _int32 * _DIMS),
    )  # fmt: skip


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", _int32), ("dtype", _int32), ("optional", _int32), ("mutable", _int32),
        ("dims", _int32), ("least", _int64), ("most", _int64),
    )  # fmt: skip


class _Op(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.POINTER(_int64)), ("inputs", _int32), ("outputs", _int32),
        ("bodies", _int32), ("input", _Argument * _ARGUMENTS), ("body", _Body * _BODIES),
        ("entries", _int32), ("bucket", _pointer * _BUCKETS),
    )  # fmt: skip


class _Call(ctypes.Structure):  # cuda_call
    _fields_ = (
        ("function", _pointer), ("context", _pointer), ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("device", ctypes.c_uint32),
        ("number", ctypes.c_uint32), ("table", ctypes.c_uint32),
    )  # fmt: skip


class _Entry(ctypes.Structure):
    _fields_ = (
        ("next", _pointer), ("words", _int32), ("key", _int64 * _KEY), ("run", _pointer),
        ("entry", _pointer), ("limit", _int32), ("over_grid", _int32), ("block", _int32),
        ("described", ctypes.c_uint32), ("call", _Call), ("sizes", ctypes.c_uint32 * 9),
        ("parameters", _int32), ("parameter", _int32 * (8 * _ARGUMENTS)),
    )  # fmt: skip


class _Input(ctypes.Structure):  # fr_rule_input
    _fields_ = (
        ("sizes", ctypes.POINTER(_int64)), ("ndim", _int32), ("dtype", _int32),
        ("present", ctypes.c_bool),
    )  # fmt: skip


class _Request(ctypes.Structure):
    _fields_ = (
        ("op", _int32), ("body", _int32), ("device_type", _int32), ("device", _int32),
        ("input", ctypes.POINTER(_Input)), ("pointer", ctypes.POINTER(_pointer)),
        ("number", ctypes.POINTER(ctypes.c_double)), ("integer", ctypes.POINTER(_int64)),
        ("torch_device", ctypes.POINTER(_int32)), ("grid", ctypes.POINTER(ctypes.c_uint32)),
        ("template_value", ctypes.POINTER(_int64)), ("threads", _int32), ("aligned", _int32),
        ("status", _int32), ("strides", ctypes.POINTER(ctypes.POINTER(_int64))),
        ("exception", _pointer * 3), ("text", ctypes.c_char_p),
    )  # fmt: skip


_RESOLVE = ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_Request))
_TELL = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Request), ctypes.c_int)


class _Setup(ctypes.Structure):
    _fields_ = (
        ("torch_cpu", ctypes.c_char_p), ("torch_cuda", ctypes.c_char_p), ("cuda_type", _int32),
        ("dtypes", _int32), ("torch_dtype", ctypes.POINTER(_int32)),
        ("item_bytes", ctypes.POINTER(ctypes.c_uint8)), ("resolve", _RESOLVE), ("tell", _TELL),
        ("threads_now", _pointer), ("ensure", _pointer), ("release", _pointer),
        ("check_signals", _pointer), ("fetch", _pointer), ("is_finalizing", _pointer),
        ("few", _int32),
    )  # fmt: skip


class _Raised(threading.local):
    """The exception that a thread's last failed call is about, and its text as bytes."""

    error: BaseException | None = None
    text = b""


_raised = _Raised()
_bound: list[_Bound] = []
_kept: list[object] = []  # for as long as the process lives


def raised(by_torch: RuntimeError) -> BaseException | None:
    """The exception that torch made a RuntimeError of, if it did; once."""
    error, _raised.error = _raised.error, None
    return error if error is not None and str(by_torch).encode().startswith(_raised.text) else None


def check_dense(op: Op, values: Sequence[Any]) -> None:
    """Refuse inputs of an op that do not lie in memory with sizes and strides.

    Raises:
        KernelTypeError: one is sparse, quantized or nested; says what to give.
    """
    for one, value in zip(op.rule.inputs, values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested:
            found, how = "a nested tensor", "give its parts one by one, or padded"
        elif value.is_quantized:
            found, how = "a quantized tensor", "give x.int_repr() or x.dequantize()"
        elif value.layout != torch.strided:
            found = f"a tensor of the layout {value.layout}"
            how = "give x.to_dense(), or its parts as arrays of their own"
        else:
            continue
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op.name!r}: got {found}, expected a dense one: {one}; "
            f"{how}."
        )


class _Bound:
    """An op that a function of the pool carries out."""

    def __init__(self, op: Op, words: ctypes.Array[ctypes.c_int64]) -> None:
        self.op, self.words = op, words
        self.structure = _Op()
        self.recent: deque[object] = deque(maxlen=2048)  # entries beyond what C remembers

    def entry(self, request: _Request) -> int:
        """The address of an entry for a request; raises what is wrong with it."""
        op = self.op
        device = "cpu" if request.device_type == _CPU else f"cuda:{request.device}"
        given = self.given(request, device)
        said, results = op_call.bound(op, given)
        if request.status == _SHARED:
            op_call.check_apart(op, given)
        body = op_call.choose(op, device, said)
        if not isinstance(body, KernelBody):
            raise KernelError(f"[op] op {op.name!r} cannot be called like this by torch.")
        sent = body.sent(said)
        outputs = [
            Facts(kind, shape, row_contiguous_strides(shape), 0, device) for shape, kind in results
        ]
        if 0 in sent.grid:
            check_empty(op.name, op.rule, sent, outputs)
        program, facts, written, what, owners = prepare(
            op.rule, body, sent, said, device, given, outputs
        )
        if request.status > 0:
            raise program.failure(request.status, what, [*facts, *written])
        if request.body < 0:
            shapes = ", ".join(f"{n} {f.shape}" for n, f in given.items() if isinstance(f, Facts))
            raise KernelError(
                f"[op] op {op.name!r} was called with {shapes}; expected 16 dims at most, and "
                "sizes that 64 bits can hold."
            )
        if device != "cpu":
            _use_cuda()
        entry = _Entry()
        keep = _fill(entry, program.native(facts, written, what))
        del owners
        remembered = self.structure.entries < _MOST_ENTRIES and not fastcall.bypassing()
        (_kept if remembered else self.recent).append((entry, keep))
        address: int = ctypes.addressof(entry)
        return address

    def given(self, request: _Request, device: str) -> dict[str, Facts | float | None]:
        """The facts of a call's inputs."""
        found: dict[str, Facts | float | None] = {}
        first: tuple[str, tuple[int, int]] | None = None
        for i, one in enumerate(self.op.rule.inputs):
            label = f"[op] input {one.name!r} of op {self.op.name!r}"
            entry = request.input[i]
            if one.dims is None:
                kind = dtypes.BY_NAME[one.dtype].kind
                value: float = request.number[i] if kind == "f" else request.integer[i]
                found[one.name] = number(self.op.name, one, bool(value) if kind == "b" else value)
                continue
            if not entry.present:
                found[one.name] = None
                continue
            where = (request.torch_device[2 * i], request.torch_device[2 * i + 1])
            if first is not None and where != first[1]:
                raise KernelError(
                    f"{label} is on another device than input {first[0]!r}; expected one device."
                )
            first = first or (one.name, where)
            if entry.dtype < 0:
                known = ", ".join(d.name for d in dtypes.ALL)
                raise KernelTypeError(f"{label} has a dtype that is none of {known}.")
            shape: Shape = tuple(entry.sizes[d] for d in range(entry.ndim))
            strides = tuple(request.strides[i][d] for d in range(entry.ndim))
            pointer = request.pointer[i] or 0
            found[one.name] = Facts(dtypes.ALL[entry.dtype], shape, strides, pointer, device)
        return found


def _fill(entry: _Entry, native: Native) -> object:
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


def _resolve(at: Any) -> int:
    request: _Request = at.contents
    try:
        address: int = _bound[request.op].entry(request)
        return address
    except BaseException as error:
        _fail(request, error)
        return 0


def _tell(at: Any, what: int) -> None:
    request: _Request = at.contents
    try:
        if what == _INPUT_COPIED:
            _bound[request.op].op.counts["copy"] += 1
        else:
            raised = (p and ctypes.cast(p, ctypes.py_object).value for p in request.exception)
            kind, value, _ = raised
            _fail(request, value if isinstance(value, BaseException) else kind())
    except BaseException as error:
        _fail(request, error)


def _fail(request: _Request, error: BaseException) -> None:
    _raised.error, _raised.text = error, str(error).encode() or type(error).__name__.encode()
    request.text = _raised.text


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The C library, ready; None where it is not there, or this torch lacks what it needs."""
    found = _installed()
    if found is None or torch.__version__ < op_call.OLDEST_TORCH:
        return None
    folder = Path(torch.__file__).resolve().parent / "lib"
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    torch_cpu = ctypes.CDLL(str(folder / f"libtorch_cpu{suffix}"))
    numbers = [
        _call_number(torch_cpu, f"aoti_torch_dtype_{kind.name}")
        if hasattr(torch, kind.name)
        else -1
        for kind in dtypes.ALL
    ]
    setup = _Setup(
        str(folder / f"libtorch_cpu{suffix}").encode(),
        str(folder / f"libtorch_cuda{suffix}").encode() if torch.version.cuda else None,
        _call_number(torch_cpu, "aoti_torch_device_type_cuda"), len(dtypes.ALL),
        (_int32 * len(numbers))(*numbers),
        (ctypes.c_uint8 * len(numbers))(*[kind.itemsize for kind in dtypes.ALL]),
        _RESOLVE(_resolve), _TELL(_tell), ctypes.cast(runtime().fr_threads, _pointer),
        *[ctypes.cast(getattr(ctypes.pythonapi, name), _pointer) for name in _PYTHON], FEW,
    )  # fmt: skip
    _kept.append(setup)
    if found.fr_torch_init(ctypes.byref(setup)):
        return None
    fastcall.tell_when_bypassed(found.fr_torch_bypass)
    found.fr_torch_set_main_thread(threading.main_thread().ident)
    os.register_at_fork(  # then the thread that forks is the child's
        after_in_child=lambda: found.fr_torch_set_main_thread(threading.get_ident())
    )
    return found


def _installed() -> ctypes.CDLL | None:
    """The library that was built at installation, if it is there and of these sources."""
    text = b"".join((FOLDER / "runtime" / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(text).hexdigest().encode()
    for suffix in EXTENSION_SUFFIXES:
        path = FOLDER / f"_torch_calls{suffix}"
        if not path.is_file():
            continue
        try:
            found = ctypes.CDLL(str(path))
            found.fr_torch_digest.restype = ctypes.c_char_p
            found.fr_torch_sizes.restype = ctypes.c_size_t
            found.fr_torch_init.argtypes = (_pointer,)
            found.fr_torch_take.argtypes = (_pointer,)
            found.fr_torch_use_cuda.argtypes = (_pointer,)
            found.fr_torch_set_main_thread.argtypes = (_pointer,)
        except (OSError, AttributeError):
            continue
        sizes = [found.fr_torch_sizes(which) for which in range(4)]
        same = sizes == [ctypes.sizeof(s) for s in (_Op, _Entry, _Request, _Setup)]
        if same and found.fr_torch_digest() == digest:
            return found
    return None


def _call_number(torch_cpu: ctypes.CDLL, name: str) -> int:
    """What a function of torch's C ABI that takes nothing says; -1 where this torch has none."""
    function = getattr(torch_cpu, name, None)
    return -1 if function is None else int(function())


def _use_cuda() -> None:
    from ..driver import driver

    found = library()
    if found is not None:
        found.fr_torch_use_cuda(ctypes.addressof(driver().state))


def implement(op: Op, names: list[str]) -> tuple[str, ...]:
    """Make C carry out operators of an op, which are defined.

    Args:
        op: the op.
        names: of the operators, in the namespace ``ferrule``.

    Returns:
        For which of ``"CPU"`` and ``"CUDA"`` it does.
    """
    found = library()
    if found is None:
        return ()
    keys = tuple(
        key
        for key, kinds in (("CPU", ("metal",)), ("CUDA", ("cuda", "metal")))
        if _serves(op, kinds) and (key == "CPU" or found.fr_torch_has_cuda())
    )
    made = _made(op) if keys else None
    if made is None:
        return ()
    number = found.fr_torch_take(ctypes.byref(made.structure))
    if number < 0:
        return ()
    while len(_bound) <= number:  # numbers are given in order
        _bound.append(made)
    _bound[number] = made
    for name in names:
        for key in keys:
            if found.fr_torch_implement(number, b"ferrule", name.encode(), key.encode()):
                raise KernelError(f"[op] torch refused a kernel of op {op.name!r} for {key}.")
    return keys


def _serves(op: Op, kinds: tuple[str, ...]) -> bool:
    """Whether C can do all that may be chosen on a device."""
    tried = [one for one in op.implementations if one.kind != "cuda" or "cuda" in kinds]
    for one in tried:
        if not isinstance(one, KernelBody) or not _plain(one):
            return False
        if one.when is None:
            return True
    return False


def _plain(body: KernelBody) -> bool:
    fill = body.fill
    constant = not isinstance(fill, Expression) and (fill is None or all_bits_zero(fill))
    count = len(body.dims) <= _DIMS and len(body.template) <= _TEMPLATE
    return constant and count and not (body.shared.names or body.shared.arrays)


def _made(op: Op) -> _Bound | None:
    """What C must know of an op; None where that is more than it has room for."""
    bodies = [one for one in op.implementations if isinstance(one, KernelBody)]
    if any(len(one.dims) > _DIMS or len(one.template) > _TEMPLATE for one in bodies):
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
    numbers = [dtypes.BY_NAME[one.dtype] for one in op.rule.inputs if one.dims is None]
    wide = ("b", "i", "u")
    if program is None or len(bodies) > _BODIES:
        return None
    if any(kind.kind not in wide and kind.name not in ("float32", "float64") for kind in numbers):
        return None
    words = (_int64 * len(program.words))(*program.words)
    made = _Bound(op, words)
    s = made.structure
    s.program = ctypes.cast(words, ctypes.POINTER(_int64))
    s.inputs, s.outputs, s.bodies = len(op.rule.inputs), len(op.rule.outputs), len(bodies)
    for i, one in enumerate(op.rule.inputs):
        argument = s.input[i]
        argument.optional, argument.mutable = one.optional, one.mutable
        argument.dims = len(one.dims or ())
        if one.dims is None:
            kind = dtypes.BY_NAME[one.dtype]
            argument.dtype = dtypes.ALL.index(kind)
            argument.kind = {"f": _FLOAT, "b": _BOOL}.get(kind.kind, _INT)
            bits = 8 * kind.itemsize
            argument.least = -(1 << (bits - 1)) if kind.kind == "i" else 0
            argument.most = (1 << (bits - (kind.kind == "i"))) - 1 if bits < 64 else 2**63 - 1
    for structure, body, (when, grid, count, first) in zip(s.body, bodies, places, strict=False):
        text = body.kernel.source + body.kernel.header
        structure.devices = _CUDA if body.kind == "cuda" else _CPU | _CUDA
        structure.when, structure.grid = when, grid
        structure.templates, structure.first_template = count, first
        structure.zeroed = body.fill is not None
        structure.contiguous = body.kernel.ensure_row_contiguous
        structure.atomics = "atomic" in text
        places_read = [one.name in body.described for one in op.rule.inputs]
        structure.described = sum(read << i for i, read in enumerate(places_read))
        structure.dims = len(body.dims)
        for i, name in enumerate(body.dims):
            structure.dim[i] = program.symbols.index(name)
    return made
