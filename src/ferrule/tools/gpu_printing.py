"""What kernels print on NVIDIA's GPUs: records in a buffer of their module (include/cuda_print.h).

It is emptied after a launch that Python makes, which then waits for the GPU. What launches of C and
CUDA graphs print is shown when a block of `printing` ends, and when the process does.
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
        printing.at_end(show_all)
        atexit.register(show_all)


def show_all() -> None:
    """Shows what all kernels have printed."""
    for driver, function, name in list(_known.values()):
        try:
            show(driver, function, name, None)
        except DeviceError:  # a kernel broke CUDA, or a stream is being recorded: there is nothing
            return


def show(driver: Driver, function: LoadedFunction, name: str, stream: int | None) -> None:
    """Shows what a function's launches on a stream have printed, or those on all; waits for them.

    Raises:
        DeviceError: one of the launches failed.
    """
    if not function.printed:
        return
    with _lock, driver.current(function.context):
        if stream is not None and driver.records(stream):
            return
        driver.wait(stream)
        used, dropped = _HEAD.unpack(driver.take(function.printed, _HEAD.size))
        if not used and not dropped:
            return
        data = driver.take(function.printed + _HEAD.size, min(used, _ROOM)) if used else b""
        driver.clear(function.printed, _HEAD.size)
    launches = launches_of(data)
    for records in launches[:-1]:
        printing.show(name, records)
    printing.show(name, launches[-1] if launches else [], dropped)


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
