"""One launch, watched: arrays are copied to where every address tells whose it is, threadgroups run
one after the other, and the outputs are copied back."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...devices.cpu.program import described, run_units
from ...dtypes import Dtype
from ...errors import DeviceError
from ...kernel import Kernel
from ...spec import Facts, Launch, Spec, extent
from ...tools.binding import runtime
from .instrument import Instrumented
from .shared import (
    MOST_ARRAYS,
    MOST_COPIES,
    TEXT,
    Array,
    Event,
    WatchLaunch,
    WatchOptions,
)

_FLOATS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "complex64": 3}
_MANY_THREADS = 4096  # of a launch that is worth several threads
_LARGE = 256 << 20  # bytes of outputs: for each of four, a copy keeps 32
# What orders threadgroups, or prints as they run.
_ORDERED = re.compile(r"atomic|volatile|fence|printf|os_log|\bstatic\b", re.IGNORECASE)
_STALLED = 20.0  # seconds in which not one thread ends: then the launch hangs


_lock = threading.RLock()  # a library watches one launch at a time


def _renew() -> None:
    """What holds the lock is not there after a fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


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


class Call(NamedTuple):
    """A launch that is checked.

    Attributes:
        spec: the kernel, and what it is compiled for.
        inputs, outputs: arrays on the CPU.
        launch: the sizes.
        order: of a unit's function, which array each argument is; -1: a null pointer.
    """

    spec: Spec
    inputs: Sequence[Facts]
    outputs: Sequence[Facts]
    launch: Launch
    order: Sequence[int] | None = None

    @property
    def groups(self) -> list[int]:
        """Threadgroups along each axis."""
        sizes = zip(self.launch.grid, self.launch.threadgroup, strict=True)
        return [-(-g // t) if t else 0 for g, t in sizes]


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
    call: Call,
    options: Options,
    opened: Callable[[ctypes.CDLL, Any, Sequence[Watched]], None] | None = None,
) -> Result:
    """Run a launch, watched.

    Threadgroups run on as many threads as the launch would have, each thread with a copy of the
    library, of which none knows what the others see. Where that is nothing, and none has touched
    what another has written, all is well. Else they run again, one after the other.

    Args:
        kernel: the library.
        call: the launch; its outputs are written.
        options: what to look for.
        opened: is given the library, the table of arrays and what they are, before threads run;
            then the launch is only looked at, and the outputs stay as they were.

    Raises:
        DeviceError: there is no memory for it.
    """
    groups = call.groups
    units = _units(math.prod(groups), options.sample)
    copies = 1 if opened is not None else _copies(call, options, len(units))
    with _lock:
        if copies > 1:
            with suppress(_NotApart):
                return _Run(kernel, call, options, units, copies).result(None)
        return _Run(kernel, call, options, units, 1).result(opened)


def _copies(call: Call, options: Options, units: int) -> int:
    """On how many threads a launch runs: one where threadgroups wait for others, or print."""
    kernel, launch = call.spec.kernel, call.launch
    size = sum(fact.size * fact.dtype.itemsize for fact in call.outputs)
    together = math.prod(launch.grid) >= _MANY_THREADS and size <= _LARGE
    # Without looking for races, nobody would see that threadgroups depend on each other.
    together = together and options.races and options.seconds is None
    if not together or _is_ordered(kernel):
        return 1
    return max(1, min(int(runtime().fr_threads()), MOST_COPIES, units))


@lru_cache(maxsize=256)
def _is_ordered(kernel: Kernel) -> bool:
    """Whether the order of threadgroups may be seen."""
    return _ORDERED.search(f"{kernel.header}\n{kernel.source}") is not None


class _NotApart(Exception):
    """Threadgroups that ran on several threads may have had to do with each other, or something
    happened in one: another order would tell something else."""


class _Run:
    """A launch, opened in some copies of its library."""

    def __init__(
        self,
        kernel: Instrumented,
        call: Call,
        options: Options,
        units: np.ndarray[tuple[int], np.dtype[np.uint64]],
        copies: int,
    ) -> None:
        self._kernel, self._options, self._units = kernel, options, units
        self._call = call._replace(
            inputs=list(map(_there, call.inputs)), outputs=list(map(_there, call.outputs))
        )
        self._block = _Block(call)  # absent arrays have shapes, too
        launch = call.launch
        filled = [launch.fill is not None] * (len(call.outputs) - launch.in_place)
        filled += [True] * launch.in_place
        self._filled = filled
        self._arrays, self._sources = _arrays(self._call, filled)
        self._tables = [_table(self._arrays) for _ in range(copies)]
        self._libraries = kernel.copies(copies)

    def result(
        self, opened: Callable[[ctypes.CDLL, Any, Sequence[Watched]], None] | None
    ) -> Result:
        """Run it.

        Raises:
            DeviceError: there is no memory for it.
            _NotApart: several copies do not know what one would.
        """
        # The thread that ends what hangs sleeps by the time that others are woken for their parts:
        # else the processor that it was started on would be taken for a busy one.
        with _limit(self._libraries, self._options.seconds):
            return self._ran(opened)

    def _ran(self, opened: Callable[[ctypes.CDLL, Any, Sequence[Watched]], None] | None) -> Result:
        call, first = self._call, self._tables[0]
        try:
            self._open()
            self._block.fill(
                [
                    entry.address - a.shift
                    for entry, (a, *_) in zip(first, self._arrays, strict=False)
                ]
            )
            for i, (address, size) in self._sources.items():
                ctypes.memmove(first[i].address, address, size)
            if opened is not None:
                opened(self._libraries[0], first, [array for array, *_ in self._arrays])
            status = self._start()
            result = self._result(status)
            if len(self._libraries) > 1 and not self._apart(result):
                raise _NotApart
            for i, fact in enumerate(call.outputs, len(call.inputs)) if opened is None else ():
                ctypes.memmove(fact.pointer, first[i].address, fact.size * fact.dtype.itemsize)
            return result
        finally:
            for library in reversed(self._libraries):
                library.fr_watch_close()

    def _open(self) -> None:
        """Say where the arrays lie, and what is looked for."""
        call, options, block = self._call, self._options, self._block
        known = [
            *call.inputs,
            *(y for y, has in zip(call.outputs, self._filled, strict=True) if has),
        ]
        floats = _not_finite(call.spec.kernel, known) if options.floats else (3, True)
        base, count = 0, ctypes.c_uint(len(self._arrays))
        for i, (library, table) in enumerate(zip(self._libraries, self._tables, strict=True)):
            wanted = WatchOptions(
                any(options[:4]), options.races, options.uninitialised, options.floats,
                options.same_values, options.reversed, *floats, options.strays[1],
                i, len(self._libraries), 0, base, options.strays[0],
                block.address, block.address + block.size, *self._kernel.texts,
            )  # fmt: skip
            units = ctypes.c_uint64(len(self._units))
            if not library.fr_watch_open(table, count, ctypes.byref(wanted), units):
                raise DeviceError(
                    f"{call.launch.of(call.spec.kernel)}: there is no address space to check it "
                    "in; a limit on virtual memory (ulimit -v) may be set."
                )
            library.fr_watch_base.restype = ctypes.c_uint64
            base = library.fr_watch_base()

    def _start(self) -> int:
        """Run the threadgroups; Python sees its signals in between."""
        parts = np.array_split(self._units, len(self._libraries))
        calls = (WatchLaunch * len(parts))()
        for call, part, library in zip(calls, parts, self._libraries, strict=True):
            entry = getattr(library, self._kernel.entry)
            functions = {
                "run": library.fr_watch_entry, "trap": library.fr_watch_signal, "entry": entry,
            }  # fmt: skip
            for name, function in functions.items():
                setattr(call, name, ctypes.cast(function, ctypes.c_void_p).value)
            call.launch, call.units, call.count = self._block.address, part.ctypes.data, len(part)
        first, where = self._libraries[0], self._call.launch.of(self._call.spec.kernel)
        run = ctypes.cast(first.fr_watch_run, ctypes.c_void_p)
        first.fr_watch_begin(calls, ctypes.c_uint(len(parts)))
        try:
            return run_units(run, ctypes.addressof(calls), len(parts), len(parts), where)
        finally:
            first.fr_watch_end()

    def _apart(self, result: Result) -> bool:
        """Whether the copies had nothing to do with each other, and nothing is found."""
        for library in self._libraries:
            library.fr_watch_state.restype = ctypes.c_void_p
        states = [library.fr_watch_state() for library in self._libraries]
        table = (ctypes.c_void_p * len(states))(*states)
        counts = ctypes.c_uint(len(states)), ctypes.c_uint(len(self._arrays))
        whole = self._options.unwritten and len(self._units) == result.groups
        apart = self._libraries[0].fr_watch_apart(table, *counts, int(whole))
        return bool(apart) and not result.status

    def _result(self, status: int) -> Result:
        """What the first copy knows; it is all there is to know where nothing is."""
        events, ended, used = ctypes.POINTER(Event)(), ctypes.c_uint64(), ctypes.c_uint()
        told = [ctypes.byref(value) for value in (events, ended, used)]
        for library in reversed(self._libraries):
            count = library.fr_watch_results(*told, status)
        copies = [Event.from_buffer_copy(events[i]) for i in range(count)]
        table, known = self._tables[0], [array for array, *_ in self._arrays]
        if len(self._libraries) == 1:
            known = [
                array._replace(unwritten=entry.unwritten, first_unwritten=entry.first_unwritten)
                for array, entry in zip(known, table, strict=False)
            ]
        for entry in table[len(known) : used.value]:
            name = entry.name.decode()
            known.append(Watched(name, None, None, entry.item, entry.bytes, 0, entry.shared))
        stopped = bool(self._libraries[0].fr_watch_ended_early())
        groups = math.prod(self._call.groups)
        return Result(copies, known, ended.value, len(self._units), groups, status, stopped)


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
    call: Call, filled: Sequence[bool]
) -> tuple[list[tuple[Watched, bool, bool]], dict[int, tuple[int, int]]]:
    """What is watched, whether it may be written, and whether it has values; and of which, by
    number, where how many bytes are copied from."""
    spec, inputs, outputs = call.spec, call.inputs, call.outputs
    arrays: list[tuple[Watched, bool, bool]] = []
    copies: dict[int, tuple[int, int]] = {}
    names = spec.kernel.input_names + spec.kernel.output_names
    for i, (name, fact) in enumerate(zip(names, (*inputs, *outputs), strict=True)):
        item = fact.dtype.itemsize
        first, count = extent(fact.shape, fact.strides)
        is_output = i >= len(inputs)
        has_values = not is_output or filled[i - len(inputs)]
        if has_values:  # else they are zeros, not what memory happened to hold: that may be NaN
            copies[i] = fact.pointer + first * item, count * item
        array = Watched(name, fact.shape, fact.dtype, item, count * item, first * item)
        arrays.append((array, is_output, has_values))
    for i in described(spec.kernel):
        name, rank = spec.kernel.input_names[i], len(inputs[i].shape)
        for part, item in (("shape", 4), ("strides", 8)):
            table = Watched(f"{name}_{part}", (rank,), None, item, rank * item)
            arrays.append((table, False, True))
    return arrays, copies


def _table(arrays: Sequence[tuple[Watched, bool, bool]]) -> ctypes.Array[Array]:
    """What the library is told of the arrays."""
    table = (Array * MOST_ARRAYS)()
    for entry, (array, is_output, has_values) in zip(table, arrays, strict=False):
        entry.bytes, entry.item = array.bytes, array.item
        entry.output, entry.written = is_output, has_values
        entry.name = array.name.encode()[: TEXT - 1]
        if array.dtype is not None:
            entry.floats = _FLOATS.get(array.dtype.name, 0)
    return table


_WRITTEN_INFINITY = re.compile(
    r"(-?)\s*(?:\w+::)*(?:INFINITY|HUGE_VALF?|infinity\s*\(\)|Limits<[^>]*>::(?:max|min))"
    r"|0x7f800000|0x7f80\b|0x7c00|0xff800000|0xff80\b|0xfc00",
    re.IGNORECASE,
)
_WRITTEN_NAN = re.compile(r"\bNAN\b|\bnan[fh]?\s*\(|quiet_NaN|0x7fc0|0x7fff|0xffff|0x7e00", re.I)


@lru_cache(maxsize=256)
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

    def __init__(self, call: Call) -> None:
        spec, inputs, outputs, launch = call.spec, call.inputs, call.outputs, call.launch
        n, self._all = len(inputs), len(inputs) + len(outputs)
        self._inputs, self._described = inputs, described(spec.kernel)
        self._order = range(self._all) if call.order is None else call.order
        m = len(self._order)
        self._words = np.zeros(9 + m + 3 * n + 1, np.uint64)
        self.address, self.size = self._words.ctypes.data, self._words.nbytes
        tables = [9, 9 + m, 9 + m + n, 9 + m + 2 * n]
        self._words[:4] = [self.address + 8 * table for table in tables]
        shared = spec.kernel.shared_memory if spec.kernel.language == "cuda" else 1
        sizes = np.array([*launch.grid, *launch.threadgroup, *call.groups, shared], np.uint32)
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
def _limit(libraries: Sequence[ctypes.CDLL], seconds: float | None) -> Iterator[None]:
    """Ends what hangs, and what takes longer than ``seconds``."""
    done, interval = threading.Event(), _STALLED if seconds is None else seconds / 2
    for library in libraries:
        library.fr_watch_progress.restype = ctypes.c_uint64

    def progress() -> int:
        return sum(library.fr_watch_progress() for library in libraries)

    def end() -> None:
        before, elapsed, hangs, over = progress(), 0.0, False, False
        while not done.wait(0.02 if over else interval):
            if not over:
                now, elapsed = progress(), elapsed + interval
                hangs, before = now == before, now
                over = hangs or (seconds is not None and elapsed >= seconds)
            for library in libraries if over else ():
                library.fr_watch_stop(int(hangs))

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
