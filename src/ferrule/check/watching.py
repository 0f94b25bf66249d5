"""Watches all launches on the CPU, and keeps what is found."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..devices.protocol import Native
from ..kernel import Kernel
from ..spec import Facts, Launch, Spec, extent, row_contiguous_strides
from . import texts, watched
from .findings import KINDS as KINDS_OF_FINDINGS
from .findings import Finding
from .instrument import Instrumented, instrumented
from .lines import Place
from .messages import position, shown, words
from .select import Selection, is_suppressed, suppressed
from .watched import KINDS, Event, Options, Result

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
_Key = tuple[Kernel, str, str, int | None]


class Findings(list[Finding]):
    """What was found, and what was done to find it.

    Attributes:
        notes: remarks, such as ``"sampled 64 of 10000 threadgroups"``.
        launches: how many launches were checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.launches = 0
        self._places: dict[_Key, int] = {}
        self._lock = threading.Lock()

    def include(self, kernel: Kernel, findings: Iterable[Finding]) -> None:
        """Add findings; one whose line has a finding of its kind already is counted there."""
        with self._lock:
            for finding in findings:
                key = kernel, finding.kind, finding.where, finding.line
                if key in self._places:
                    known = self[self._places[key]]
                    self[self._places[key]] = replace(known, count=known.count + finding.count)
                else:
                    self._places[key] = len(self)
                    self.append(finding)

    def note(self, text: str) -> None:
        """Add a remark, once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)


class Watch:
    """Runs launches watched: what `devices.protocol.watcher` is while kernels are checked.

    Attributes:
        findings: what was found.
        options: what is looked for.
    """

    def __init__(self, options: Options, wanted: Selection) -> None:
        self.findings = Findings()
        self.options = options
        self._wanted = wanted

    def launch(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> bool:
        """Run a launch, watched; False of a kernel that nobody wants to be."""
        name = spec.kernel.name
        if not any(self._wanted.takes(name, kind) for kind in KINDS_OF_FINDINGS):
            return False
        if 0 in launch.grid:
            return True
        kernel = instrumented(spec)
        result = watched.run(kernel, spec, inputs, outputs, launch, self.options)
        found = _Reader(spec, kernel, inputs, outputs, launch, result)
        self.findings.launches += 1
        self.findings.include(spec.kernel, self._chosen(spec.kernel, found.findings()))
        if result.ran < result.groups:
            self.findings.note(
                f"kernel {spec.kernel.name!r}: {result.ran:,} of {result.groups:,} threadgroups "
                "were checked."
            )
        if result.status:
            self.findings.note(f"{launch.of(spec.kernel)} ended early: code {result.status}.")
        return True

    def _chosen(self, kernel: Kernel, findings: Iterable[Finding]) -> list[Finding]:
        """Those that are wanted, and that no comment of the author's suppresses."""
        comments = {
            where: suppressed(text, kernel=kernel.name, where=where)
            for where, text in (("source", kernel.source), ("header", kernel.header))
        }
        return [
            finding
            for finding in self._wanted.of(findings)
            if not is_suppressed(finding, comments[finding.where])
        ]

    def native(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
    ) -> Native | None:
        """What lets C run it: a function that is called with the arrays' addresses. None of a
        kernel that nobody wants to be watched."""
        if not any(self._wanted.takes(spec.kernel.name, kind) for kind in KINDS_OF_FINDINGS):
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


_kept: list[Any] = []  # C may still call what a call on another thread was given


class _Reader:
    """Reads findings out of a watched launch."""

    def __init__(
        self,
        spec: Spec,
        kernel: Instrumented,
        inputs: Sequence[Facts],
        outputs: Sequence[Facts],
        launch: Launch,
        result: Result,
    ) -> None:
        self._spec, self._kernel, self._launch, self._result = spec, kernel, launch, result
        self._inputs, self._outputs = inputs, outputs

    def findings(self) -> list[Finding]:
        """All of them."""
        found = [self._of_event(event) for event in _without_echoes(self._result, self._kernel)]
        found += self._unset()
        found += self._shared_memory()
        if self._result.ran == self._result.groups:
            found += self._unwritten()
            found += self._coverage(found)
        return found

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
        before = compiled[place.line - 1][: place.column]
        return place.column if written.startswith(before) else None

    def _described(self) -> str:
        names = self._spec.kernel.input_names + self._spec.kernel.output_names
        arrays = [
            f"{name} {fact.dtype.name}[{','.join(map(str, fact.shape))}]"
            for name, fact in zip(names, (*self._inputs, *self._outputs), strict=True)
        ]
        return (
            f"grid {self._launch.grid}, threadgroup {self._launch.threadgroup}, {', '.join(arrays)}"
        )

    def _place(self, event: Event) -> Place | None:
        return place_of_event(event, self._kernel)

    def _of_event(self, event: Event) -> Finding:
        told = words(event, self._result, self._launch)
        more: dict[str, Any] = {}
        if event.thread < event.threads:
            more["thread"], more["threadgroup"] = position(event.thread, event.group, self._launch)
        if KINDS[event.kind] in ("RACE", "DIVERGENCE"):
            other = self._kernel.lines.place(event.other_pc)
            more["other_line"] = other.line if other else None
            group = event.other_group if KINDS[event.kind] == "RACE" else event.group
            more["other_thread"], more["other_threadgroup"] = position(
                event.other_thread, group, self._launch
            )
        return self._finding(
            told.kind, self._place(event), told.message, told.hint, count=event.count, **more
        )

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
        if not self._launch.declared:
            return []
        x, y, z = self._launch.grid
        threads, sizes = x * y * z, [fact.size for fact in self._outputs]
        largest = max(sizes, default=0)
        unwritten = [array for array in self._result.arrays if array.unwritten]
        if unwritten and threads < largest and not self._result.ended:
            array = unwritten[0]
            message = (
                f"the grid has {threads:,} threads for {largest:,} elements of the output, and "
                f"{array.unwritten:,} elements of {array.name!r} were never written."
            )
            hint = 'Declare the grid with the output\'s sizes: grid="N", or ceildiv of them.'
            return [self._finding("coverage", None, message, hint)]
        outside = [finding for finding in found if finding.kind == "bounds" and finding.thread]
        if threads > largest:
            for finding in outside:
                if self._number(finding) >= largest:
                    message = (
                        f"the grid has {threads:,} threads for {largest:,} elements of the "
                        f"output, and thread {self._number(finding):,} goes outside its arrays."
                    )
                    hint = "Launch as many threads as there are elements, or stop the others."
                    return [self._finding("coverage", None, message, hint)]
        return []

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


def place_of_event(event: Event, kernel: Instrumented) -> Place | None:
    """The author's line of an event."""
    if event.file:
        where = event.file.decode().rpartition(".")[2]
        return Place(where, event.line, event.column)
    called, *computed = event.origin
    # Of a NaN: what functions compute on their way to a number is no origin.
    origins = [called, *(pc for pc in computed if kernel.lines.direct(pc)), *computed]
    for pc in filter(None, origins):
        if (place := kernel.lines.place(pc)) is not None:
            return place
    return kernel.lines.place(event.pc)


def _without_echoes(result: Result, kernel: Instrumented) -> list[Event]:
    """The events that say something of their own.

    Without a barrier, some threads read before others write, and some after: that is one race, at
    the later line of the two. What a thread reads too early was not written yet.
    """
    races: set[tuple[int, frozenset[Place | None]]] = set()
    raced: set[tuple[int, Place | None]] = set()
    events = sorted(result.events, key=lambda event: -_line(event, kernel))
    kept: list[Event] = []
    for event in events:
        if KINDS[event.kind] == "RACE":
            places = place_of_event(event, kernel), kernel.lines.place(event.other_pc)
            pair = event.array, frozenset(places)
            raced |= {(event.array, place) for place in places}
            if pair in races:
                continue
            races.add(pair)
        kept.append(event)
    order = {id(event): i for i, event in enumerate(result.events)}
    kept.sort(key=lambda event: order[id(event)])
    return [
        event
        for event in kept
        if KINDS[event.kind] != "UNINITIALISED"
        or (event.array, place_of_event(event, kernel)) not in raced
    ]


def _line(event: Event, kernel: Instrumented) -> int:
    place = place_of_event(event, kernel)
    return place.line if place else 0


def _overlap(a: Facts, b: Facts) -> bool:
    """Whether two arrays have bytes in common, as far as their ends tell."""
    spans: list[tuple[int, int]] = []
    for fact in (a, b):
        first, count = extent(fact.shape, fact.strides)
        begin = fact.pointer + first * fact.dtype.itemsize
        spans.append((begin, begin + count * fact.dtype.itemsize))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
