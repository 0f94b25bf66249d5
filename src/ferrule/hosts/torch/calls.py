"""Calls of ops by torch without Python code: the pool of functions of runtime/torch_calls.c.

Installing ferrule builds ``ferrule/_torch_calls*.so`` where there is a C compiler. It needs nothing
of torch to be built, and takes torch's C ABI from the process. Without it, or with a torch that
lacks that ABI, or for what it does not do, ops are run by `TorchOp.run`, with the same results.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import dtypes
from ...errors import ABANDONED, KernelError, KernelTypeError, abandoned
from ...kernels import entries
from ...kernels.entries import RESOLVE, BodyTable, Entry, OpTable, Request
from ...operators import entries as op_entries
from ...operators.entries import BoundOp
from ...tools import fastcall
from ...tools.binding import FEW, runtime
from ..imported import OLDEST_TORCH
from . import arrays as host

if TYPE_CHECKING:
    from ...operators.op import Op

FOLDER = Path(__file__).resolve().parents[2]

_PYTHON = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyErr_CheckSignals",
    "PyErr_Fetch",
    "Py_IsFinalizing" if sys.version_info >= (3, 13) else "_Py_IsFinalizing",
)
_EXCEPTION, _INPUT_COPIED = 0, 1  # of runtime/torch_calls.c

_int32, _pointer = ctypes.c_int32, ctypes.c_void_p
_TELL = ctypes.CFUNCTYPE(None, ctypes.POINTER(Request), ctypes.c_int)


class _TorchSetup(ctypes.Structure):
    _fields_ = (
        ("torch_cpu", ctypes.c_char_p), ("torch_cuda", ctypes.c_char_p), ("cuda_type", _int32),
        ("dtypes", _int32), ("torch_dtype", ctypes.POINTER(_int32)),
        ("resolve", RESOLVE), ("tell", _TELL), ("threads_now", _pointer), ("ensure", _pointer),
        ("release", _pointer), ("check_signals", _pointer), ("fetch", _pointer),
        ("is_finalizing", _pointer), ("few", _int32),
    )  # fmt: skip


_bound: list[BoundOp] = []


def check_dense(op: Op, values: Sequence[Any]) -> None:
    """Refuse inputs of an op that do not lie in memory with sizes and strides.

    Raises:
        KernelTypeError: one is sparse, quantized or nested; says what to give.
    """
    for parameter, value in zip(op.rule.inputs, values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested:
            description, advice = "a nested tensor", "give its parts one by one, or padded"
        elif value.is_quantized:
            description, advice = "a quantized tensor", "give x.int_repr() or x.dequantize()"
        elif value.layout != torch.strided:
            description = f"a tensor of the layout {value.layout}"
            advice = "give x.to_dense(), or its parts as arrays of their own"
        else:
            continue
        raise KernelTypeError(
            f"[op] input {parameter.name!r} of op {op.name!r}: got {description}, expected a "
            f"dense one: {parameter}; {advice}."
        )


def _resolve(request: Request) -> int:
    address: int = _bound[request.op].entry(request)
    return address


def _tell(at: Any, event: int) -> None:
    request: Request = at.contents
    try:
        if event == _INPUT_COPIED:
            _bound[request.op].op.counts["copy"] += 1
        else:
            exception = (p and ctypes.cast(p, ctypes.py_object).value for p in request.exception)
            error_type, value, _ = exception
            if request.status == ABANDONED and error_type is KeyboardInterrupt:
                value = KeyboardInterrupt(abandoned(f"op {_bound[request.op].op.name!r}"))
            entries.fail(request, value if isinstance(value, BaseException) else error_type())
    except BaseException as error:
        entries.fail(request, error)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The C library, set up; None where it does not exist, or this torch lacks what it needs."""
    torch_calls = _installed()
    if torch_calls is None or torch.__version__ < OLDEST_TORCH:
        return None
    folder = Path(torch.__file__).resolve().parent / "lib"
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    torch_cpu = ctypes.CDLL(str(folder / f"libtorch_cpu{suffix}"))
    numbers = [
        _call_number(torch_cpu, f"aoti_torch_dtype_{dtype.name}")
        if hasattr(torch, dtype.name)
        else -1
        for dtype in dtypes.ALL
    ]
    setup = _TorchSetup(
        str(folder / f"libtorch_cpu{suffix}").encode(),
        str(folder / f"libtorch_cuda{suffix}").encode() if torch.version.cuda else None,
        _call_number(torch_cpu, "aoti_torch_device_type_cuda"),
        len(dtypes.ALL),
        (_int32 * len(numbers))(*numbers),
        entries.resolver(_resolve),
        _TELL(_tell),
        ctypes.cast(runtime().fr_threads, _pointer),
        *[ctypes.cast(getattr(ctypes.pythonapi, name), _pointer) for name in _PYTHON],
        FEW,
    )
    entries.kept.append(setup)
    if torch_calls.fr_torch_init(ctypes.byref(setup)):
        return None
    fastcall.tell_when_bypassed(torch_calls.fr_torch_bypass)
    torch_calls.fr_torch_set_slack(host.slack_is_known())
    torch_calls.fr_torch_set_main_thread(threading.main_thread().ident)
    os.register_at_fork(  # then the thread that forks is the child's
        after_in_child=lambda: torch_calls.fr_torch_set_main_thread(threading.get_ident())
    )
    return torch_calls


def _installed() -> ctypes.CDLL | None:
    """The library that was built at installation, if it exists and its sources are these."""
    text = b"".join((FOLDER / "runtime" / name).read_bytes() for name in fastcall.TORCH_SOURCES)
    digest = hashlib.sha256(text).hexdigest().encode()
    for suffix in EXTENSION_SUFFIXES:
        path = FOLDER / f"_torch_calls{suffix}"
        if not path.is_file():
            continue
        try:
            torch_calls = ctypes.CDLL(str(path))
            torch_calls.fr_torch_digest.restype = ctypes.c_char_p
            torch_calls.fr_torch_sizes.restype = ctypes.c_size_t
            torch_calls.fr_torch_init.argtypes = (_pointer,)
            torch_calls.fr_torch_take.argtypes = (_pointer,)
            torch_calls.fr_torch_use_cuda.argtypes = (_pointer,)
            torch_calls.fr_torch_set_main_thread.argtypes = (_pointer,)
        except (OSError, AttributeError):
            continue
        sizes = [torch_calls.fr_torch_sizes(which) for which in range(5)]
        mirrors = OpTable, BodyTable, Entry, Request, _TorchSetup
        same = sizes == [ctypes.sizeof(mirror) for mirror in mirrors]
        if same and torch_calls.fr_torch_digest() == digest:
            return torch_calls
    return None


def _call_number(torch_cpu: ctypes.CDLL, name: str) -> int:
    """Call a function of torch's C ABI without arguments; -1 where this torch has none."""
    function = getattr(torch_cpu, name, None)
    return -1 if function is None else int(function())


def _use_cuda() -> None:
    from ...tools.driver import driver

    torch_calls = library()
    if torch_calls is not None:
        torch_calls.fr_torch_use_cuda(ctypes.addressof(driver().state))


def implement(op: Op, names: list[str]) -> tuple[str, ...]:
    """Have C run the operators of an op, which are defined.

    Args:
        op: the op.
        names: of the operators, in the namespace ``ferrule``.

    Returns:
        Those of ``"CPU"`` and ``"CUDA"`` for which it does.
    """
    torch_calls = library()
    if torch_calls is None:
        return ()
    keys = tuple(
        key
        for key, body_kinds in (("CPU", ("metal",)), ("CUDA", ("cuda", "metal")))
        if op_entries.serves(op, body_kinds) and (key == "CPU" or torch_calls.fr_torch_has_cuda())
    )
    bound_op = op_entries.bind(op, _use_cuda) if keys else None
    if bound_op is None:
        return ()
    number = torch_calls.fr_torch_take(ctypes.byref(bound_op.structure))
    if number < 0:
        return ()
    while len(_bound) <= number:  # numbers are given in order
        _bound.append(bound_op)
    _bound[number] = bound_op
    for name in names:
        for key in keys:
            if torch_calls.fr_torch_implement(number, b"ferrule", name.encode(), key.encode()):
                raise KernelError(f"[op] torch refused a kernel of op {op.name!r} for {key}.")
    return keys
