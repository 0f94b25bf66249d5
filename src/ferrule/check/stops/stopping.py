"""Stops at lines: the launch is run once more, ahead of the one that counts, and only looked at."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CompileError, DialectError
from ...source.stops import Stopping, with_stops
from ...spec import Facts, Launch, Spec
from ..launches import watched
from ..launches.instrument import Instrumented, instrumented
from ..launches.messages import position
from ..launches.watched import Options, Watched
from . import breaks
from .prompt import END, GO_ON, Prompt
from .report import Stop, report
from .shown import Array, Record, Shown, read

_ANY = 0xFFFFFFFF
_TOLD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Record))


class _Wanted(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_int32),
        ("thread", ctypes.c_uint32),
        ("group", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
    )


@dataclass
class _Built:
    kernel: Instrumented
    made: Stopping
    values: int  # see `with_stops`


class Stops:
    """Where to stop, and what was seen there.

    Attributes:
        seen: what was shown.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.seen: list[Stop] = []
        self.notes: list[str] = []
        self._breaks = [breaks.parse(text) for text in texts]
        self._left: dict[tuple[breaks.Break, str], int] = {}
        self._grids: dict[breaks.Break, tuple[int, int, int]] = {}  # too small for the thread
        self._built: dict[Spec, _Built | None] = {}
        self._prompt = Prompt() if sys.stdin is not None and sys.stdin.isatty() else None
        self._over = False

    def unreached(self) -> list[str]:
        """Remarks about lines at which nothing stopped."""
        found = [
            b for b in self._breaks if all(left for k, left in self._left.items() if k[0] == b)
        ]
        notes = list(self.notes)
        for b in found:
            grid = self._grids.get(b)
            why = "" if grid is None else f" The grid {grid} does not have that thread."
            notes.append(f"stop at {b.text!r}: no thread came there.{why}")
        return notes

    def look(
        self, spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch,
        options: Options,
    ) -> None:  # fmt: skip
        """Run a launch that may stop, and leave its outputs as they were.

        Raises:
            SystemExit: somebody at the terminal wants to quit.
        """
        name = spec.kernel.name
        pending = [b for b in self._breaks if b.takes(name) and self._left.get((b, name), 1)]
        if self._over or not pending or (built := self._build(spec)) is None:
            return
        session = _Session(self, built, spec, launch, self._prompt)
        wanted = (_Wanted * len(pending))()
        of: list[breaks.Break] = []
        for b in pending:
            line = built.made.lines.get((b.where, b.line))
            place = (_ANY, 0) if b.thread is None else b.place(launch)
            if place is None:
                self._grids[b] = launch.grid
            elif line is not None:
                left = self._left.get((b, name), b.time)
                number = line if b.where == "source" else -line
                wanted[len(of)] = _Wanted(number, *place, left)
                of.append(b)
        if not of:
            return
        session.wanted, session.breaks = wanted[: len(of)], of
        plain = options._replace(races=False, uninitialised=False, floats=False, sample=None)
        told = _TOLD(session.told)

        def opened(library: ctypes.CDLL, table: Any, arrays: Sequence[Watched]) -> None:
            session.table, session.arrays = table, arrays
            library.fr_watch_stops(wanted, len(of), told)

        call = watched.Call(spec, inputs, outputs, launch)
        watched.run(built.kernel, call, plain, opened)
        for b, entry in zip(of, wanted, strict=False):
            self._left[b, name] = entry.left
        if session.error is not None:
            raise session.error
        if session.quits:
            self._over = True
            raise SystemExit(0)

    def _build(self, spec: Spec) -> _Built | None:
        """The kernel, compiled with what it shows; with less where the compiler refuses that."""
        if spec in self._built:
            return self._built[spec]
        name = spec.kernel.name
        wanted = {(b.where, b.line) for b in self._breaks if b.takes(name)}
        built = None
        for values in (2, 1, 0):
            made = with_stops(spec.kernel, wanted, every=self._prompt is not None, values=values)
            try:
                kernel = instrumented(replace(spec, kernel=made.kernel), stops=True)
            except (CompileError, DialectError):
                continue
            built = _Built(kernel, made, values)
            break
        else:
            self.notes.append(
                f"kernel {name!r} does not compile with stops in its text, so nothing stops."
            )
        for (where, line), at in built.made.lines.items() if built else ():
            if at is None:
                text = "the header" if where == "header" else "the body"
                note = f"kernel {name!r}: {text} has no statement at line {line} or after it."
                self.notes += [note] if note not in self.notes else []
        self._built[spec] = built
        return built


class _Session:
    """One launch that may stop."""

    def __init__(
        self, stops: Stops, built: _Built, spec: Spec, launch: Launch, prompt: Prompt | None
    ) -> None:
        self._stops, self._built, self._prompt = stops, built, prompt
        self._spec, self._launch = spec, launch
        self.wanted: Sequence[_Wanted] = ()
        self.breaks: list[breaks.Break] = []
        self.table: Any = None
        self.arrays: Sequence[Watched] = ()
        self.error: BaseException | None = None
        self.quits = False

    def told(self, record: Any) -> int:
        """Show where a thread is; what it does next."""
        try:
            return self._told(record.contents)
        except BaseException as error:  # C called, and cannot raise
            self.error = error
            return END

    def _told(self, record: Record) -> int:
        arrays = self._arrays(record.arrays)
        shown = read(record, arrays)
        stop = self._stop(record, shown)
        remarks = list(self._remarks(stop))
        stop.text = report(stop, self._spec.kernel, shown, arrays, remarks)
        self._stops.seen.append(stop)
        sys.stdout.flush()
        print(stop.text, file=sys.stderr, flush=True)
        answer = GO_ON
        if self._prompt is not None:
            answer = self._prompt.ask(shown, arrays)
            self.quits = answer == END
        done = answer == GO_ON and not any(entry.place for entry in self.wanted)
        return END if done else answer

    def _arrays(self, count: int) -> list[Array]:
        """The arrays that there are; threadgroup memory comes to them while threads run."""
        arrays: list[Array] = []
        for i, entry in enumerate(self.table[:count]):
            if i < len(self.arrays):
                what = self.arrays[i]
            else:
                what = Watched(entry.name.decode(), None, None, entry.item, entry.bytes)
            end = entry.address + entry.bytes
            zero = entry.address - what.shift
            arrays.append(Array(what, zero, entry.address, end, self._unwritten))
        return arrays

    def _unwritten(self, address: int, size: int) -> object:
        library = self._built.kernel.library
        return library.fr_watch_unwritten(ctypes.c_uint64(address), ctypes.c_uint64(size))

    def _stop(self, record: Record, shown: Sequence[Shown]) -> Stop:
        local, group = position(record.thread, record.group, self._launch)
        x, y, z = (
            g * size + at
            for g, size, at in zip(group, self._launch.threadgroup, local, strict=True)
        )
        where = "source" if record.place > 0 else "header"
        stop = Stop(
            self._spec.kernel.name, where, abs(record.place), (x, y, z), local, group,
            record.thread % 32,
        )  # fmt: skip
        for one in shown:
            if one.kind in "vp":
                value = one.place if one.kind == "p" else one.value
                stop.variables[one.name] = value
            else:
                stop.elements[one.name] = one.value
        return stop

    def _remarks(self, stop: Stop) -> list[str]:
        """What else is to be said of a stop."""
        made, place = self._built.made, (stop.where, stop.line)
        asked = [line for (where, line), at in made.lines.items() if (where, at) == place]
        remarks = [
            f"asked for line {line}, which has no statement of its own"
            for line in asked
            if line != stop.line
        ]
        remarks += [f"not shown: {text}" for text in made.left_out.get(place, ())]
        if self._built.values < 2:
            left_out = "elements" if self._built.values else "variables and elements"
            remarks.append(f"not shown: {left_out}, which the compiler did not take at some line")
        return remarks
