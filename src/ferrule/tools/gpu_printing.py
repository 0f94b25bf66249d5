"""What kernels print on NVIDIA's GPUs: records in a buffer of their module (include/cuda_print.h).

It is emptied after a launch that Python makes, which then waits for the GPU; after one of C, as
soon as Python's main thread runs. What CUDA graphs print is shown with the next launch of such a
kernel, when a block of `printing` ends, and when the process does.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator
from operator import itemgetter

from ..errors import DeviceError
from . import printing
from .binding import runtime
from .driver import Driver, LoadedFunction
from .printing import Position, Printed

_HEAD = struct.Struct("<QQ")  # of fr_print::buffer
_ROOM = 1 << 20
_RECORD = struct.Struct("<IiQQI3I3II")  # fr_print::record
_VALUE = struct.Struct("<iiQ")
_TEXT = 3  # fr_print::value::TEXT

_known: dict[tuple[int, int], tuple[Driver, LoadedFunction, str]] = {}
_lock = threading.Lock()


def know(driver: Driver, function: LoadedFunction, name: str) -> None:
    """Has what a function prints shown, by whatever way it is launched; if it prints."""
    if not function.printed:
        return
    with _lock:
        first = not _known
        _known.setdefault((function.context, function.printed), (driver, function, name))
    if first:
        pending = ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p)
        driver.state.show_printed = ctypes.cast(_show_pending, ctypes.c_void_p).value
        driver.state.add_pending = pending.value
        printing.at_end(show_all)
        atexit.register(show_all)


def show_all(stream: int | None = None) -> None:
    """Shows what all kernels have printed on a stream, or on all of them."""
    for driver, function, name in list(_known.values()):
        try:
            show(driver, function, name, stream)
        except DeviceError:  # a kernel broke CUDA: who launches or waits next is told
            return


def _show_after(stream: int | None) -> int:
    if not _lock.locked():  # else this thread may be in the middle of `show`
        show_all(stream or 0)
    return 0


# What C has Python's main thread call after a launch.
_show_pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_show_after)


def show(driver: Driver, function: LoadedFunction, name: str, stream: int | None) -> None:
    """Shows what a function's launches on a stream have printed, or those on all; waits for them.

    Raises:
        DeviceError: one of the launches failed.
    """
    if not function.printed:
        return
    with _lock, driver.current(function.context):
        if driver.records(stream or 0):
            return
        driver.wait(stream)
        stream = stream or 0
        used, dropped = _HEAD.unpack(driver.take(function.printed, _HEAD.size, stream))
        if not used and not dropped:
            return
        at = function.printed + _HEAD.size
        data = driver.take(at, min(used, _ROOM), stream) if used else b""
        if not _is_whole(data):  # a launch on another stream is writing
            return
        driver.clear(function.printed, _HEAD.size + len(data), stream)
    launches = launches_of(data)
    for records in launches[:-1]:
        printing.show(name, records)
    printing.show(name, launches[-1] if launches else [], dropped)


def _is_whole(data: bytes) -> bool:
    """Whether each record has its size, which is written last."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if not size:
            return False
        at += size
    return True


def launches_of(data: bytes) -> list[list[Printed]]:
    """The records of a buffer, launch by launch, each in the order of its threads."""
    records = sorted(_records(data), key=itemgetter(0))
    by_launch = itertools.groupby(records, key=lambda record: record[0][0])
    return [[printed for _, printed in group] for _, group in by_launch]


def _records(data: bytes) -> Iterator[tuple[tuple[int, int, int], Printed]]:
    """The records, each with its launch, threadgroup and thread as numbers."""
    at = 0
    while at < len(data):
        size, level, launch, group, thread, *positions, count = _RECORD.unpack_from(data, at)
        begin = at + _RECORD.size
        values = [_VALUE.unpack_from(data, begin + i * _VALUE.size) for i in range(count)]
        texts = data[begin + count * _VALUE.size : at + size].split(b"\0")
        message, subsystem, category = texts[:3]
        text = formatted(message, values, texts[3:])
        source = f"{subsystem.decode()}:{category.decode()}" if subsystem or category else ""
        yield (
            (launch, group, thread),
            Printed(_position(positions[:3]), _position(positions[3:]), text, level, source),
        )
        at += size


def _position(numbers: list[int]) -> Position:
    x, y, z = numbers
    return x, y, z


def formatted(message: bytes, values: list[tuple[int, int, int]], texts: list[bytes]) -> str:
    """A format with its values, in C's way.

    Args:
        values: of each its kind, its bytes and its bits.
        texts: those of the values that are texts.
    """
    kept = [ctypes.create_string_buffer(text) for text in texts]
    left = iter(kept)
    packed = b"".join(
        _VALUE.pack(kind, size, ctypes.addressof(next(left)) if kind == _TEXT and kept else bits)
        for kind, size, bits in values
    )
    call = runtime().fr_format
    size = call(message, packed, len(values), None, 0)
    out = ctypes.create_string_buffer(max(size, 1))
    call(message, packed, len(values), out, max(size, 0))
    return out.raw[: max(size, 0)].decode("utf-8", "replace")
