"""Watches all launches on the CPU, and keeps what is found."""

from __future__ import annotations

import _thread
import ctypes
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from ..devices.cpu.cuda_bodies import whole_blocks
from ..devices.cpu.program import device as cpu
from ..devices.protocol import Native
from ..errors import DeviceError
from ..kernel import Kernel
from ..source.cuda import on_cpu
from ..source.unset import as_written
from ..spec import Facts, Launch, Spec, extent, row_contiguous_strides
from ..unit import Step, UnitSpec
from . import strays
from .gpu import OnGpus
from .launches import texts, watched
from .launches.inside import is_shown_inside
from .launches.instrument import Instrumented, instrumented, instrumented_unit
from .launches.lines import Place
from .launches.messages import KIND_OF, computed, position, shown, words
from .launches.places import Places, compared, origin_of, other_places_of, places_of
from .launches.shared import KINDS, Event
from .launches.watched import Call, Options, Result
from .reports.findings import Finding, Findings
from .reports.select import Selection, unsuppressed
from .stops.stopping import Stops
from .stress import bytes_of, differences
from .units import ArraysAt, UnitLaunch, launches

# fr_run_some of runtime/runtime.h.
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_void_p,
)
_FAULT = 4  # FR_E_FAULT


class Watch:
    """Runs launches watched: what `devices.protocol.watcher` is while kernels are checked.

    Attributes:
        findings: what was found.
        options: what is looked for.
    """

    def __init__(self, options: Options, wanted: Selection, stops: Stops | None = None) -> None:
        self.findings = Findings()
        self._stops = stops
        if stops is not None:
            self.findings.stops = stops.seen
        self.options = options
        self._wanted = wanted
        # Then a launch whose text shows that it stays inside needs no watching.
        others = options.reversed or options.stress or options.seconds is not None
        self._only_bounds = wanted.kinds == {"bounds"} and not others
        self._on_gpus = OnGpus(options.unwritten)

    def launch(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> bool:
        """Run a launch, watched; False of a kernel that nobody wants to be."""
        name = spec.kernel.name
        if not self._wanted.names(name):
            return False
        in_cuda = spec.kernel.language == "cuda"
        if in_cuda and not self._is_known(spec):
            return False
        if 0 in launch.grid:
            return True
        if self._needs_no_watch(spec, inputs, outputs, launch):
            with suppress(DeviceError):  # it divides by zero, or its stack is too small: watch it
                cpu().program(spec).run(inputs, outputs, launch)
                self.findings.launches += 1
                return True
        launch = whole_blocks(launch) if in_cuda else launch
        kernel = instrumented(spec)
        if self._stops is not None and not in_cuda:
            self._stops.look(spec, inputs, outputs, launch, self.options)
        for remark in kernel.notes:
            self.findings.note(remark)
        before = bytes_of(outputs) if self.options.stress else []
        call = Call(spec, inputs, outputs, launch)
        result = strays.run(kernel, call, self.options)
        reader = _Reader(kernel, call, result)
        found = reader.findings()
        if self.options.stress:

            def again(others: Sequence[Facts], other: Launch, reverse: bool) -> None:
                options = self.options._replace(reversed=reverse)
                watched.run(kernel, call._replace(outputs=others, launch=other), options)

            told = differences(spec.kernel, outputs, before, again, launch)
            found += [reader.unstable(message) for message in told]
        self._keep(spec, launch, result, found)
        return True

    def _needs_no_watch(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> bool:
        """Whether nothing that is wanted can be found in a launch."""
        only = self._only_bounds and self._stops is None and not launch.in_place
        may_be = only and spec.kernel.language == "metal"
        return may_be and is_shown_inside(spec, inputs, outputs, launch)

    def _keep(self, spec: Spec, launch: Launch, result: Result, found: Sequence[Finding]) -> None:
        """Keep what a launch gave."""
        self.findings.launches += 1
        self.findings.include(spec.kernel, self._wanted.of(unsuppressed(spec.kernel, found)))
        if result.ran < result.groups:
            self.findings.note(
                f"kernel {spec.kernel.name!r}: {result.ran:,} of {result.groups:,} threadgroups "
                "were checked."
            )
        if any(KINDS[event.kind] == "NO_ROOM" for event in result.events):
            self.findings.note(
                f"kernel {spec.kernel.name!r} has more arrays than can be watched: some of its "
                "threads were ended."
            )
        if result.stopped:
            self.findings.note(
                f"{launch.of(spec.kernel)} was ended before its end: its time was up, or it hung."
            )
        if result.status:
            self.findings.note(f"{launch.of(spec.kernel)} ended early: code {result.status}.")

    def copies(self, kernel: Kernel) -> bool:
        """Whether a launch on a GPU runs on the CPU, over copies of its arrays."""
        return not (self.options.gpu and kernel.language == "metal")

    def counts(self, kernel: Kernel) -> bool:
        """Whether a body counts its accesses on a GPU."""
        return self._wanted.names(kernel.name)

    def counted(self, *loaded: Any) -> None:
        """Read what a kernel that is loaded on a GPU counts, when `read_counts` is called: as
        `OnGpus.know`."""
        self._on_gpus.know(*loaded)

    def read_counts(self) -> None:
        """Add what kernels counted on GPUs, which are waited for."""
        for kernel, found, times, dropped in self._on_gpus.read():
            self.findings.launches += times
            self.findings.include(kernel, self._wanted.of(unsuppressed(kernel, found)))
            if dropped:
                self.findings.note(f"kernel {kernel.name!r}: {dropped:,} events found no room.")

    def runs(self, kernel: Kernel) -> bool:
        """Whether launches of a kernel in CUDA are run here, on the CPU."""
        return self._wanted.names(kernel.name) and self._is_known(Spec(kernel, (), (), ()))

    def unit(
        self, spec: UnitSpec, steps: Sequence[Step], places: ArraysAt, inputs: Collection[str]
    ) -> None:
        """Run a CUDA unit's steps, each function watched."""
        alone = len(steps) == 1  # of several, others may write the rest

        def run(made: UnitLaunch, function: str) -> None:
            kernel, call = instrumented_unit(spec, function), made.call
            result = strays.run(kernel, call, self.options)
            found = _Reader(kernel, call, result).findings()
            found = [finding for finding in found if alone or finding.kind != "unwritten"]
            self._keep(call.spec, call.launch, result, found)

        launches(spec, steps, places, inputs, run)

    def units(self, name: str) -> bool:
        """Whether an op's implementations in CUDA are run on the CPU."""
        return self.options.cuda and self._wanted.names(name)

    def _is_known(self, spec: Spec) -> bool:
        """Whether all of a text in CUDA is known on the CPU; else a note says what is not."""
        found = on_cpu.unsupported(spec)
        for line, what, where in found[:1]:
            of = "" if where == "source" else f" of the {where}"
            name = spec.kernel.name
            self.findings.note(f"not checked: kernel {name!r}, line {line}{of}: {what}.")
        return not found

    def native(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> Native | None:
        """What lets C run it: a function that is called with the arrays' addresses. None of a
        kernel that nobody wants to be watched."""
        if not self._wanted.names(spec.kernel.name):
            return None

        # Where they must be row-contiguous, C has copied those that are not.
        contiguous = spec.kernel.ensure_row_contiguous

        def strides_of(fact: Facts) -> tuple[int, ...]:
            return row_contiguous_strides(fact.shape) if contiguous else fact.strides

        def run(entry: int, block: int, units: int, threads: int, limit: int, progress: int) -> int:
            buffers = ctypes.c_uint64.from_address(block).value
            count = len(inputs) + len(outputs)
            pointers = (ctypes.c_uint64 * count).from_address(buffers)
            facts = [
                fact._replace(pointer=pointer, strides=strides_of(fact))
                for fact, pointer in zip((*inputs, *outputs), pointers, strict=True)
            ]
            try:
                self.launch(spec, facts[: len(inputs)], facts[len(inputs) :], launch)
            except SystemExit:  # of a stop: C called, and cannot raise
                _thread.interrupt_main()
                return _FAULT
            except Exception as error:
                self.findings.note(f"{launch.of(spec.kernel)} could not be checked: {error}")
                return _FAULT
            return 0

        kernel = instrumented(spec)  # raises what is wrong with the text where that can be told
        function = _RUN(run)
        _kept.append(function)
        return Native(
            run=ctypes.cast(function, ctypes.c_void_p).value or 0,
            entry=ctypes.cast(kernel.library.fr_entry, ctypes.c_void_p).value or 0,
            block=1,
            keep=(function, kernel),
        )


# C may still call what a call on another thread was given: as long as it has the launch's entry.
_kept: deque[Any] = deque(maxlen=4096)


class _Reader:
    """Reads findings out of a watched launch."""

    def __init__(self, kernel: Instrumented, call: Call, result: Result) -> None:
        self._kernel, self._result = kernel, result
        self._spec, self._inputs, self._outputs, self._launch, _ = call

    def findings(self) -> list[Finding]:
        """All of them."""
        events = [
            event
            for event in _without_echoes(self._result, self._kernel)
            if KINDS[event.kind] != "NO_ROOM"
        ]
        found = [self._of_event(event, events) for event in events]
        found += self._unset()
        found += self._shared_memory()
        if self._result.ran == self._result.groups and not (
            self._result.status or self._result.stopped
        ):
            found += self._unwritten()
            found += self._coverage(found)
        return found

    def unstable(self, message: str) -> Finding:
        """Of results that depend on how a launch is run."""
        hint = (
            "Take widths from threads_per_threadgroup and threads_per_simdgroup, and let no result "
            "depend on which thread comes first."
        )
        return self._finding("lanes", None, message, hint)

    def _finding(
        self, kind: str, place: Place | None, message: str, hint: str, **more: Any
    ) -> Finding:
        kernel = self._spec.kernel
        where, line = (place.where, place.line) if place else ("source", None)
        column = self._column(place) if place else None
        file, file_line = texts.place_in_python(kernel, where, line)
        return Finding(
            kind=kind,
            kernel=kernel.name,
            line=line,
            text=texts.line_of(kernel, where, line),
            thread=more.pop("thread", None),
            threadgroup=more.pop("threadgroup", None),
            message=message,
            hint=hint,
            column=column,
            where=where,
            file=file,
            file_line=file_line,
            launch=self._described(),
            **more,
        )

    def _column(self, place: Place) -> int | None:
        """The column of a place, where the line was compiled as its author wrote it up to there."""
        compiled = self._kernel.texts[place.where == "header"].decode().split("\n")
        written = texts.line_of(self._spec.kernel, place.where, place.line)
        if not place.column or place.line > len(compiled):
            return None
        before = as_written(compiled[place.line - 1], place.column)
        return len(before) if written.startswith(before) else None

    def _described(self) -> str:
        names = self._spec.kernel.input_names + self._spec.kernel.output_names
        arrays = [
            f"{name} {fact.dtype.name}[{','.join(map(str, fact.shape))}]"
            for name, fact in zip(names, (*self._inputs, *self._outputs), strict=True)
        ]
        return (
            f"grid {self._launch.grid}, threadgroup {self._launch.threadgroup}, {', '.join(arrays)}"
        )

    def _of_event(self, event: Event, events: Sequence[Event]) -> Finding:
        told = words(event, self._result, self._launch, self._spec.kernel.language)
        more: dict[str, Any] = {}
        if event.thread < event.threads:
            more["thread"], more["threadgroup"] = position(event.thread, event.group, self._launch)
        if KINDS[event.kind] in ("RACE", "DIVERGENCE"):
            other = other_places_of(event, self._kernel).first
            if other is not None:
                more["other_line"] = other.line
                more["other_text"] = texts.line_of(self._spec.kernel, other.where, other.line)
            group = event.other_group if KINDS[event.kind] == "RACE" else event.group
            more["other_thread"], more["other_threadgroup"] = position(
                event.other_thread, group, self._launch
            )
        places = places_of(event, self._kernel)
        message = told.message
        if (origin := origin_of(event, self._kernel)) is not None:
            message += computed(event, origin)
        message += self._others(event, places, events)
        if places.header is not None and places.body is not None:
            text = texts.line_of(self._spec.kernel, "header", places.header.line).strip()
            more["header_line"] = places.header.line
            message += f" In line {places.header.line} of the header: {text}"
        return self._finding(told.kind, places.first, message, told.hint, count=event.count, **more)

    def _others(self, event: Event, places: Places, events: Sequence[Event]) -> str:
        """Say that this line does the same with other arrays: it has one finding of a kind."""
        names = {
            self._result.arrays[other.array].name: None
            for other in events
            if other.array not in (-1, event.array)
            and KIND_OF[KINDS[other.kind]] == KIND_OF[KINDS[event.kind]]
            and (place := places_of(other, self._kernel).first) is not None
            and places.first is not None
            and place[:2] == places.first[:2]
        }
        return f" The same line does so with {', '.join(names)}." if names else ""

    def _unset(self) -> list[Finding]:
        hint = "Local variables begin with any values: initialise it where it is declared."
        return [
            self._finding("uninitialised", place, f"{message}.", hint)
            for place, message in self._kernel.unset
        ]

    def _shared_memory(self) -> list[Finding]:
        """Outputs that share memory with inputs, or with each other."""
        found: list[Finding] = []
        names = self._spec.kernel.input_names + self._spec.kernel.output_names
        facts = (*self._inputs, *self._outputs)
        for i in range(len(self._inputs), len(facts)):
            for j in range(i):
                if facts[i].size and facts[j].size and _overlap(facts[i], facts[j]):
                    message = f"output {names[i]!r} shares memory with {names[j]!r}."
                    hint = "Give the kernel memory of its own to write to."
                    found.append(self._finding("alias", None, message, hint))
        return found

    def _unwritten(self) -> list[Finding]:
        """Elements of outputs that no thread wrote."""
        if self._result.ended:  # a thread that was ended may have wanted to
            return []
        found: list[Finding] = []
        for array in self._result.arrays:
            if not array.unwritten:
                continue
            count = array.bytes // array.item
            first = array.first_unwritten
            place = f"{array.name}[{first}]"
            message = (
                f"{array.unwritten:,} of {count:,} elements of output {shown(array)} were never "
                f"written, first {place}."
            )
            hint = "Launch a thread for each, or pass init_value where a default is meant."
            found.append(self._finding("unwritten", None, message, hint, count=array.unwritten))
        return found

    def _coverage(self, found: Sequence[Finding]) -> list[Finding]:
        """What a declared grid has too few or too many threads for."""
        if not self._launch.declared or self._spec.kernel.language == "cuda":
            return []  # CUDA's blocks are whole
        x, y, z = self._launch.grid
        threads, largest = x * y * z, max((fact.size for fact in self._outputs), default=0)
        outside = next((finding for finding in found if finding.kind == "bounds"), None)
        unwritten = [array for array in self._result.arrays if array.unwritten]
        grid = f"the grid has {threads:,} threads for {largest:,} elements of the output"
        place, hint = None, "Declare the grid with the sizes of the output."
        if unwritten and not self._result.ended and (threads < largest or outside is not None):
            array = unwritten[0]
            message = f"{grid}, and {array.unwritten:,} elements of {array.name!r} are not reached."
        elif outside is not None and threads > largest and self._number(outside) >= largest:
            number = self._number(outside)
            message = f"{grid}, and thread {number:,} of the grid goes outside its arrays."
            if outside.line is not None:
                place = Place(outside.where, outside.line, outside.column or 0)
        else:
            return []
        return [self._finding("coverage", place, message, hint)]

    def _number(self, finding: Finding) -> int:
        """The number of a finding's thread in the grid, along x first."""
        place = zip(
            finding.threadgroup or (0, 0, 0),
            self._launch.threadgroup,
            finding.thread or (0, 0, 0),
            strict=True,
        )
        x, y, z = (group * size + thread for group, size, thread in place)
        return x + self._launch.grid[0] * (y + self._launch.grid[1] * z)


def _turned(event: Event, kernel: Instrumented) -> Event:
    """A race with the access first that comes later: by the rounds of loops, and by the text.

    Threads run one after the other here; on a GPU they run side by side.
    """
    if KINDS[event.kind] != "RACE" or event.later > 0:
        return event
    if event.later == 0:
        here, there = places_of(event, kernel).first, other_places_of(event, kernel).first
        if here is None or there is None or here[1:] >= there[1:]:
            return event
    turned = Event.from_buffer_copy(event)
    turned.pc, turned.other_pc = event.other_pc, event.pc
    turned.thread, turned.other_thread = event.other_thread, event.thread
    turned.threads, turned.other_threads = event.other_threads, event.threads
    turned.group, turned.other_group = event.other_group, event.group
    turned.value[0] = (event.value[0] & 1) << 1 | (event.value[0] & 2) >> 1 | event.value[0] & 4
    turned.caller[:] = [0] * len(event.caller)
    return turned


def _without_echoes(result: Result, kernel: Instrumented) -> list[Event]:
    """The events that say something of their own.

    Without a barrier, some threads read before others write, and some after: that is one race.
    What a thread reads too early was not written yet.
    """
    races: set[tuple[int, frozenset[Place | None]]] = set()
    raced: set[tuple[int, Place | None]] = set()
    kept: list[Event] = []
    for event in result.events:
        if KINDS[event.kind] == "RACE":
            places = places_of(event, kernel).first, other_places_of(event, kernel).first
            if compared(event, places, kernel):
                continue
            raced |= {(event.array, place) for place in places}
            pair = event.array, frozenset(places)
            if pair in races:
                continue
            races.add(pair)
        kept.append(_turned(event, kernel))
    return [
        event
        for event in kept
        if KINDS[event.kind] != "UNINITIALISED"
        or (event.array, places_of(event, kernel).first) not in raced
    ]


def _overlap(a: Facts, b: Facts) -> bool:
    """Whether two arrays have bytes in common, as far as their ends tell."""
    spans: list[tuple[int, int]] = []
    for fact in (a, b):
        first, count = extent(fact.shape, fact.strides)
        begin = fact.pointer + first * fact.dtype.itemsize
        spans.append((begin, begin + count * fact.dtype.itemsize))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
