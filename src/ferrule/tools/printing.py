"""What kernels print: ``printf`` and Metal's logs, shown by Python.

The C runtime keeps the lines of a launch in order (``runtime/printing.h``), and hands them over
here when the launch ends.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ..errors import KernelError, KernelTypeError

if TYPE_CHECKING:
    import logging

LIMIT = 1000  # lines of a launch; `print_limit` of runtime/printing.h
# Of a log's message, by its type: logging's DEBUG, INFO, INFO, ERROR and CRITICAL.
_LEVELS = (10, 20, 20, 40, 50)
_PRINTF = 20  # INFO

_RECORD = struct.Struct("=QI3I3I4xiIIIQQ")  # `fr_print_record` of runtime/runtime.h

Position = tuple[int, int, int]


@runtime_checkable
class Stream(Protocol):
    """Where text can be written, such as a file that is open."""

    def write(self, text: str, /) -> object:
        """Writes a text."""
        ...


class Printed(NamedTuple):
    """One thing that a thread printed.

    Attributes:
        threadgroup: the threadgroup's position in the grid.
        thread: the thread's position in the threadgroup.
        text: what it printed; a log's message ends its line.
        level: a log's type, 0 (debug) to 4 (fault); -1 for printf.
        source: ``"subsystem:category"`` of a log that has them.
    """

    threadgroup: Position
    thread: Position
    text: str
    level: int = -1
    source: str = ""


class Destination(NamedTuple):
    """Where lines go, and how.

    Attributes:
        to: a stream or a logger; None for ``sys.stdout``.
        prefix: whether each line begins with the kernel and the thread.
        limit: how many lines of a launch are shown; None for all.
    """

    to: Stream | logging.Logger | None = None
    prefix: bool = False
    limit: int | None = LIMIT


_current: ContextVar[Destination | None] = ContextVar("ferrule.printing", default=None)
_entered: list[Destination] = []  # of all threads; the last one serves threads without their own
_changing = threading.Lock()
_libraries: list[ctypes.CDLL] = []  # the runtimes; a process may have several
_more: list[Callable[[], object]] = []


@contextmanager
def printing(
    to: Stream | logging.Logger | None = None, prefix: bool = False, limit: int | None = LIMIT
) -> Iterator[None]:
    """Chooses where kernels print inside a ``with`` block, on every device.

    Lines come when a launch ends: threadgroup by threadgroup and, within each, thread by thread.
    Without such a block they go to ``sys.stdout``.

    Args:
        to: a `logging.Logger`, or a stream, which has ``write``; None for ``sys.stdout`` as it is
            then. A logger gets ``printf`` and ``log`` as INFO, the other logs at their own level.
        prefix: begin each line with the kernel's name and the positions of thread and threadgroup.
        limit: how many lines of a launch are shown, before one that says how many are not; None
            shows all.

    Raises:
        KernelTypeError: `to` cannot be written to, or `limit` is no integer.
        KernelError: `limit` is negative.
    """
    if not (to is None or isinstance(to, Stream) or hasattr(to, "log")):
        raise KernelTypeError(
            f"printing: to={to!r}; expected a logging.Logger, a stream with `write`, or None for "
            "sys.stdout."
        )
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise KernelTypeError(f"printing: limit={limit!r}; expected a number of lines or None.")
        if limit < 0:
            raise KernelError(f"printing: limit={limit}; expected 0 or more lines, or None.")
    destination = Destination(to, prefix, limit)
    token = _current.set(destination)
    _change(_entered.append, destination)
    try:
        yield
    finally:
        show_waiting()
        _change(_entered.remove, destination)
        _current.reset(token)


def show_waiting() -> None:
    """Shows what has been printed and not been shown: on MLX's threads, in CUDA graphs."""
    for library in _libraries:
        library.fr_show_waiting()
    for show_more in _more:
        show_more()


def at_end(show_more: Callable[[], object]) -> None:
    """Has a function show what else was printed, where a block of `printing` ends."""
    _more.append(show_more)


def _change(change: Callable[[Destination], object], destination: Destination) -> None:
    with _changing:
        change(destination)
        for library in _libraries:
            library.fr_set_print_limit(_most_lines())


def _most_lines() -> int:
    """The largest limit of all blocks and of the default, as the runtime takes it."""
    limits = [destination.limit for destination in _entered]
    return -1 if None in limits else max([LIMIT, *filter(None, limits)])


def attach(library: ctypes.CDLL) -> None:
    """Has a runtime hand over what kernels print."""
    pending = ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p)
    with _changing:
        _libraries.append(library)
        library.fr_set_print_limit(_most_lines())
    library.fr_set_printer(_printer, pending, threading.main_thread().ident or 0)
    atexit.register(show_waiting)


def _records(address: int, count: int) -> Iterator[Printed]:
    data = ctypes.string_at(address, count * _RECORD.size) if count else b""
    for _, _, gx, gy, gz, x, y, z, level, _, size, more, _, at in _RECORD.iter_unpack(data):
        text = ctypes.string_at(at, size).decode("utf-8", "replace")
        source = ctypes.string_at(at + size, more).decode("utf-8", "replace") if more else ""
        yield Printed((gx, gy, gz), (x, y, z), text, level, source)


def _show(kernel: bytes, address: int, count: int, dropped: int) -> None:
    try:
        show(kernel.decode(), list(_records(address, count)), dropped)
    except KeyboardInterrupt:  # which could not leave the C library
        import _thread

        _thread.interrupt_main()


_printer = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
)(_show)


def show(kernel: str, records: list[Printed], dropped: int = 0) -> None:
    """Shows what the threads of one launch printed.

    Args:
        kernel: its name.
        records: in order.
        dropped: how many lines there were besides.
    """
    entered = _entered[-1:]
    destination = _current.get() or (entered[0] if entered else Destination())
    to = destination.to
    joined = not destination.prefix and (to is None or isinstance(to, Stream))
    lines = list(_lines(records, joined))
    limit = len(lines) if destination.limit is None else destination.limit
    dropped += max(0, len(lines) - limit)
    lines = lines[:limit]
    left = f"… {dropped} more lines of kernel {kernel!r} not shown"
    heads = [_head(kernel, line) if destination.prefix else "" for line in lines]
    if not (to is None or isinstance(to, Stream)):
        for head, line in zip(heads, lines, strict=True):
            level = _PRINTF if line.level < 0 else _LEVELS[min(line.level, 4)]
            to.log(level, "%s", head + line.text.removesuffix("\n"))
        if dropped:
            to.log(_PRINTF, "%s", left)
        return
    text = "".join(head + line.text for head, line in zip(heads, lines, strict=True))
    if dropped:
        text += f"{'' if not text or text.endswith(chr(10)) else chr(10)}{left}\n"
    stream = sys.stdout if to is None else to
    if text and stream is not None:  # a program without a console has None
        stream.write(text)


def _head(kernel: str, line: Printed) -> str:
    source = f"[{line.source}] " if line.source else ""
    return f"{kernel}: thread {line.thread} of threadgroup {line.threadgroup}: {source}"


def _lines(records: Iterable[Printed], joined: bool) -> Iterator[Printed]:
    """The lines that the records' texts make, each with its end, but perhaps the last.

    Args:
        joined: a line that a thread leaves open goes on with what the next one prints, as where C
            prints; else it ends there.
    """
    opened: Printed | None = None
    for record in records:
        if opened is not None and not joined and not _same_thread(opened, record):
            yield opened._replace(text=opened.text + "\n")
            opened = None
        is_log = record.level >= 0 and not record.text.endswith("\n")
        for piece in (record.text + "\n" * is_log).splitlines(keepends=True):
            line = record._replace(text=piece)
            if opened is not None:
                line = opened._replace(text=opened.text + piece)
            opened = None if piece.endswith("\n") else line
            if opened is None:
                yield line
    if opened is not None:
        yield opened if joined else opened._replace(text=opened.text + "\n")


def _same_thread(a: Printed, b: Printed) -> bool:
    return (a.threadgroup, a.thread) == (b.threadgroup, b.thread)
