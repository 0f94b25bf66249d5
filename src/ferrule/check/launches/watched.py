"""One launch, watched: arrays are copied to where every address tells whose it is, threadgroups run
one after the other, and the outputs are copied back."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...devices.cpu.program import described, run_units
from ...dtypes import Dtype
from ...errors import DeviceError
from ...kernel import Kernel
from ...spec import Facts, Launch, Spec, extent
from .instrument import Instrumented

# Of watch/shared.h.
_MOST_ARRAYS, _MOST_ORIGINS, _MOST_CALLERS, _TEXT = 256, 4, 6, 48
KINDS = (
    "BOUNDS_READ", "BOUNDS_WRITE", "WILD", "BOUNDS_PRIVATE", "RACE", "UNINITIALISED", "DIVERGENCE",
    "LANE", "NAN_STORED", "INFINITY_STORED", "OVERFLOW_INT", "DIVISION", "SHIFT", "HALF_OVERFLOW",
    "MISALIGNED", "WRITE_TO_INPUT", "GAVE_UP", "ASSERTION", "CRASH", "UNSET", "NO_ROOM",
    "NOT_NAMED", "ABSENT", "TRAP", "BOUNDS_ROW",
)  # fmt: skip
_FLOATS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "complex64": 3}
_STALLED = 20.0  # seconds in which not one thread ends: then the launch hangs


_lock = threading.RLock()  # a library watches one launch at a time


def _renew() -> None:
    """What holds the lock is not there after a fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


class _Array(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("output", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("floats", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
        ("name", ctypes.c_char * _TEXT),
    )


class Event(ctypes.Structure):
    """An event, as watch/shared.h has it."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("array", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("other_threads", ctypes.c_uint32),
        ("group", ctypes.c_uint64),
        ("other_group", ctypes.c_uint64),
        ("index", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("value", ctypes.c_uint64 * 2),
        ("operand_kind", ctypes.c_uint32 * 2),
        ("caller", ctypes.c_uint64 * _MOST_CALLERS),
        ("later", ctypes.c_int32),
        ("origin", ctypes.c_uint64 * _MOST_ORIGINS),
        ("operation", ctypes.c_uint32 * _MOST_ORIGINS),
        ("operand", ctypes.c_double * 2 * _MOST_ORIGINS),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("column", ctypes.c_uint32),
        ("text", ctypes.c_char * _TEXT),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("cells", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("uninitialised", ctypes.c_uint32),
        ("floats", ctypes.c_uint32),
        ("same_values", ctypes.c_uint32),
        ("reversed", ctypes.c_uint32),
        ("may_be_infinite", ctypes.c_uint32),
        ("may_be_nan", ctypes.c_uint32),
        ("stray_bytes", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("strays_of", ctypes.c_uint64),
        ("launch_begin", ctypes.c_uint64),
        ("launch_end", ctypes.c_uint64),
        ("source", ctypes.c_char_p),
        ("header", ctypes.c_char_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
    )


class Options(NamedTuple):
    """What is looked for in a launch.

    Attributes:
        unwritten, races, uninitialised, floats: of these kinds.
        same_values: also races of stores of equal values.
        reversed: threads and simdgroups run in the opposite order.
        stress: each launch is run in other orders and threadgroups, too.
        sample: at most so many threadgroups run; None: all.
        seconds: after which the launch is ended; None: where it hangs.
        cuda: ops on the CPU take their implementations in CUDA.
        gpu: Metal bodies with arrays on a GPU run there, and count.
        strays: what one operation gives instead: its place, and each byte of what lanes get from
            others that are not there; not 0 where a half shall be its largest number, not infinite.
    """

    unwritten: bool = True
    races: bool = True
    uninitialised: bool = True
    floats: bool = True
    same_values: bool = False
    reversed: bool = False
    stress: bool = False
    sample: int | None = None
    seconds: float | None = None
    cuda: bool = False
    gpu: bool = False
    strays: tuple[int, int] = (0, 0)


class Watched(NamedTuple):
    """An array of a launch, as messages speak of it.

    Attributes:
        name: the argument's, or that of threadgroup memory.
        shape: None of threadgroup memory.
        dtype: None of threadgroup memory.
        item: bytes per element.
        bytes: of the whole.
        shift: bytes from where the array's first subscript is to where its memory begins.
        line: of the declaration of threadgroup memory; 0.
        unwritten, first_unwritten: elements of an output that nothing wrote.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: Dtype | None
    item: int
    bytes: int
    shift: int = 0
    line: int = 0
    unwritten: int = 0
    first_unwritten: int = 0


class Result(NamedTuple):
    """What a watched launch gave.

    Attributes:
        events: what happened.
        arrays: what the events' numbers mean.
        ended: how many threads could not go on.
        ran, groups: threadgroups that ran, and that there are.
        stopped: its time was up.
        status: of runtime/runtime.h; 0 where all is well.
    """

    events: list[Event]
    arrays: list[Watched]
    ended: int
    ran: int
    groups: int
    status: int
    stopped: bool


def run(
    kernel: Instrumented,
    spec: Spec,
    inputs: Sequence[Facts],
    outputs: Sequence[Facts],
    launch: Launch,
    options: Options,
    order: Sequence[int] | None = None,
    opened: Callable[[ctypes.CDLL, Any, Sequence[Watched]], None] | None = None,
) -> Result:
    """Run a launch, watched.

    Args:
        kernel: the library.
        spec: what it was made of.
        inputs, outputs: arrays on the CPU; the outputs are written.
        launch: the sizes.
        options: what to look for.
        order: of a unit's function, which array each argument is; -1: a null pointer.
        opened: is given the library, the table of arrays and what they are, before threads run;
            then the launch is only looked at, and the outputs stay as they were.

    Raises:
        DeviceError: there is no memory for it.
    """
    groups = [-(-g // t) if t else 0 for g, t in zip(launch.grid, launch.threadgroup, strict=True)]
    units = _units(math.prod(groups), options.sample)
    block = _Block(spec, inputs, outputs, launch, groups, order)  # absent arrays have shapes, too
    inputs, outputs = list(map(_there, inputs)), list(map(_there, outputs))
    with _lock:
        filled = [launch.fill is not None] * (len(outputs) - launch.in_place)
        filled += [True] * launch.in_place
        arrays, copies = _arrays(spec, inputs, outputs, filled)
        table = _table(arrays)
        watch = kernel.library
        known = [*inputs, *(y for y, has in zip(outputs, filled, strict=True) if has)]
        wanted = _Options(
            any(options[:4]), options.races, options.uninitialised, options.floats,
            options.same_values, options.reversed,
            *(_not_finite(spec.kernel, known) if options.floats else (3, True)),
            options.strays[1], 0, options.strays[0],
            block.address, block.address + block.size, kernel.texts[0], kernel.texts[1],
        )  # fmt: skip
        count = ctypes.c_uint(len(arrays))
        if not watch.fr_watch_open(table, count, ctypes.byref(wanted), ctypes.c_uint64(len(units))):
            raise DeviceError(
                f"{launch.of(spec.kernel)}: there is no address space to check it in; a limit on "
                "virtual memory (ulimit -v) may be set."
            )
        try:
            block.fill(
                [entry.address - a.shift for entry, (a, *_) in zip(table, arrays, strict=False)]
            )
            for i, (address, size) in copies.items():
                ctypes.memmove(table[i].address, address, size)
            if opened is not None:
                opened(watch, table, [array for array, *_ in arrays])
            status = _start(kernel, block, units, options.seconds, launch.of(spec.kernel))
            result = _result(watch, table, arrays, len(units), math.prod(groups), status)
            for i, fact in enumerate(outputs, len(inputs)) if opened is None else ():
                ctypes.memmove(fact.pointer, table[i].address, fact.size * fact.dtype.itemsize)
        finally:
            watch.fr_watch_close()
    return result


def _there(fact: Facts) -> Facts:
    """An array as it is; one that is absent, of which an op gives a body one element at no address,
    with none: a body that reads it goes outside."""
    return fact if fact.pointer else fact._replace(shape=(0,) * len(fact.shape))


def _units(groups: int, sample: int | None) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The threadgroups that run: all, or the first, the last, and some between them."""
    if sample is None or groups <= sample:
        return np.arange(groups, dtype=np.uint64)
    return np.unique(np.linspace(0, groups - 1, sample).astype(np.uint64))


def _arrays(
    spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], filled: Sequence[bool]
) -> tuple[list[tuple[Watched, bool, bool]], dict[int, tuple[int, int]]]:
    """What is watched, whether it may be written, and whether it has values; and of which, by
    number, where how many bytes are copied from."""
    arrays: list[tuple[Watched, bool, bool]] = []
    copies: dict[int, tuple[int, int]] = {}
    names = spec.kernel.input_names + spec.kernel.output_names
    for i, (name, fact) in enumerate(zip(names, (*inputs, *outputs), strict=True)):
        item = fact.dtype.itemsize
        first, count = extent(fact.shape, fact.strides)
        copies[i] = fact.pointer + first * item, count * item
        is_output = i >= len(inputs)
        array = Watched(name, fact.shape, fact.dtype, item, count * item, first * item)
        arrays.append((array, is_output, not is_output or filled[i - len(inputs)]))
    for i in described(spec.kernel):
        name, rank = spec.kernel.input_names[i], len(inputs[i].shape)
        for part, item in (("shape", 4), ("strides", 8)):
            table = Watched(f"{name}_{part}", (rank,), None, item, rank * item)
            arrays.append((table, False, True))
    return arrays, copies


def _table(arrays: Sequence[tuple[Watched, bool, bool]]) -> ctypes.Array[_Array]:
    """What the library is told of the arrays."""
    table = (_Array * _MOST_ARRAYS)()
    for entry, (array, is_output, has_values) in zip(table, arrays, strict=False):
        entry.bytes, entry.item = array.bytes, array.item
        entry.output, entry.written = is_output, has_values
        entry.name = array.name.encode()[: _TEXT - 1]
        if array.dtype is not None:
            entry.floats = _FLOATS.get(array.dtype.name, 0)
    return table


_WRITTEN_INFINITY = re.compile(
    r"(-?)\s*(?:\w+::)*(?:INFINITY|HUGE_VALF?|infinity\s*\(\)|Limits<[^>]*>::(?:max|min))"
    r"|0x7f800000|0x7f80\b|0x7c00|0xff800000|0xff80\b|0xfc00",
    re.IGNORECASE,
)
_WRITTEN_NAN = re.compile(r"\bNAN\b|\bnan[fh]?\s*\(|quiet_NaN|0x7fc0|0x7fff|0xffff|0x7e00", re.I)


def written_not_finite(kernel: Kernel) -> tuple[int, bool]:
    """Which infinities the author writes, a bit for each sign, and whether NaN."""
    text = f"{kernel.header}\n{kernel.source}"
    infinite = 0
    for match in _WRITTEN_INFINITY.finditer(text):
        word = match[0].lower()
        infinite |= 2 if word.startswith(("-", "0xf")) or word.endswith("min") else 1
    return infinite, _WRITTEN_NAN.search(text) is not None


def _not_finite(kernel: Kernel, facts: Sequence[Facts]) -> tuple[int, bool]:
    """Which infinities may be stored, a bit for each sign, and whether NaN: those that arrays have
    before the launch, and those that the author writes."""
    infinite, nan = written_not_finite(kernel)
    for fact in facts:
        if fact.dtype.kind not in "fc" or not fact.size:
            continue
        first, count = extent(fact.shape, fact.strides)
        item = fact.dtype.itemsize
        memory = (ctypes.c_char * (count * item)).from_address(fact.pointer + first * item)
        values = np.frombuffer(memoryview(memory), dtype=fact.dtype.numpy)
        if fact.dtype.name == "bfloat16" or fact.dtype.itemsize == 1:
            values = values.astype(np.float32)
        if np.isinf(values).any():
            infinite = 3  # a difference with one is of the other sign
        nan = nan or bool(np.isnan(values).any())
    return infinite, nan


class _Block:
    """`fr::launch` of include/cpu.h and the tables that it points to, in one piece of memory."""

    def __init__(
        self,
        spec: Spec,
        inputs: Sequence[Facts],
        outputs: Sequence[Facts],
        launch: Launch,
        groups: Sequence[int],
        order: Sequence[int] | None,
    ) -> None:
        n, self._all = len(inputs), len(inputs) + len(outputs)
        self._inputs, self._described = inputs, described(spec.kernel)
        self._order = range(self._all) if order is None else order
        m = len(self._order)
        self._words = np.zeros(9 + m + 3 * n + 1, np.uint64)
        self.address, self.size = self._words.ctypes.data, self._words.nbytes
        tables = [9, 9 + m, 9 + m + n, 9 + m + 2 * n]
        self._words[:4] = [self.address + 8 * table for table in tables]
        shared = spec.kernel.shared_memory if spec.kernel.language == "cuda" else 1
        sizes = np.array([*launch.grid, *launch.threadgroup, *groups, shared], np.uint32)
        self._words[4:9] = sizes.view(np.uint64)
        ranks = self._words[tables[3] :].view(np.int32)
        ranks[:n] = [len(fact.shape) for fact in inputs]

    def fill(self, addresses: Sequence[int]) -> None:
        """Say where the arrays lie, and give shapes and strides places of their own."""
        n, m = len(self._inputs), len(self._order)
        self._words[9 : 9 + m] = [addresses[i] if i >= 0 else 0 for i in self._order]
        for k, i in enumerate(self._described):
            at = self._all + 2 * k
            fact, (shape, strides) = self._inputs[i], addresses[at : at + 2]
            self._words[9 + m + i], self._words[9 + m + n + i] = shape, strides
            _put(shape, np.array(fact.shape, np.int32))
            _put(strides, np.array(fact.strides, np.int64))


def _put(address: int, values: np.ndarray[Any, Any]) -> None:
    if values.size:
        ctypes.memmove(address, values.ctypes.data, values.nbytes)


@contextmanager
def _limit(watch: ctypes.CDLL, seconds: float | None) -> Iterator[None]:
    """Ends what hangs, and what takes longer than ``seconds``."""
    done, interval = threading.Event(), _STALLED if seconds is None else seconds / 2
    watch.fr_watch_progress.restype = ctypes.c_uint64

    def end() -> None:
        before, elapsed, hangs, over = watch.fr_watch_progress(), 0.0, False, False
        while not done.wait(0.02 if over else interval):
            if not over:
                now, elapsed = watch.fr_watch_progress(), elapsed + interval
                hangs, before = now == before, now
                over = hangs or (seconds is not None and elapsed >= seconds)
            if over:
                watch.fr_watch_stop(int(hangs))

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _start(
    kernel: Instrumented,
    block: _Block,
    units: np.ndarray[tuple[int], np.dtype[np.uint64]],
    seconds: float | None,
    where: str,
) -> int:
    """Run the threadgroups on one thread; Python sees its signals in between."""
    watch = kernel.library
    entry = ctypes.cast(getattr(watch, kernel.entry), ctypes.c_void_p).value
    call = _Launch(entry, block.address, units.ctypes.data)
    outer = ctypes.cast(watch.fr_watch_entry, ctypes.c_void_p)
    with _limit(watch, seconds):
        return run_units(outer, ctypes.addressof(call), len(units), 1, where)


def _result(
    watch: ctypes.CDLL,
    table: ctypes.Array[_Array],
    arrays: Sequence[tuple[Watched, bool, bool]],
    ran: int,
    groups: int,
    status: int,
) -> Result:
    events, ended, used = ctypes.POINTER(Event)(), ctypes.c_uint64(), ctypes.c_uint()
    told = (ctypes.byref(value) for value in (events, ended, used))
    count = watch.fr_watch_results(*told, status)
    copies = [Event.from_buffer_copy(events[i]) for i in range(count)]
    known = [array for array, *_ in arrays]
    known = [
        array._replace(unwritten=entry.unwritten, first_unwritten=entry.first_unwritten)
        for array, entry in zip(known, table, strict=False)
    ]
    for entry in table[len(known) : used.value]:
        name = entry.name.decode()
        known.append(Watched(name, None, None, entry.item, entry.bytes, 0, entry.shared))
    return Result(
        copies, known, ended.value, ran, groups, status, bool(watch.fr_watch_ended_early())
    )
