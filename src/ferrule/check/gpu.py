"""Launches on a GPU that are checked there: what accesses counted (include/cuda_counted.h)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import DeviceError, ToolchainError
from ..kernel import Kernel
from ..spec import Facts, Launch, Spec
from ..tools.driver import Driver, LoadedFunction
from .filled import ARRAYS, Fills
from .launches import texts
from .launches.watched import written_not_finite
from .reports.findings import Finding, Position

# Of include/cuda_counted.h: `entry`, `left`, how many there are of each, and what follows them.
_ENTRY, _LEFT, _REST = struct.Struct("<QQqQ3I3I"), struct.Struct("<QQ"), struct.Struct("<QQII")
_ROOM = 256
_UNWRITTEN = _ROOM * _ENTRY.size
_TAIL = _UNWRITTEN + ARRAYS * _LEFT.size
_SIZE = _TAIL + _REST.size
_READ, _WRITE, _NAN, _INFINITY = range(1, 5)
_GUARD = "Guard the access with the array's size, or launch fewer threads."


class _Count(NamedTuple):
    """What one line did to one array, and the first thread that did."""

    line: int
    array: int
    what: int
    times: int
    at: int
    elements: int
    group: Position
    thread: Position


class Counted:
    """A kernel that counts, loaded on a GPU."""

    def __init__(
        self,
        driver: Driver,
        function: LoadedFunction,
        spec: Spec,
        arrays: Sequence[Facts],
        launch: Launch,
    ) -> None:
        """Args:
        arrays, launch: of the first launch.
        """
        self._driver, self._function, self._spec = driver, function, spec
        kernel = spec.kernel
        self._names = (*kernel.input_names, *kernel.output_names)
        shapes = (
            f"{name} {fact.dtype.name}[{','.join(map(str, fact.shape))}]"
            for name, fact in zip(self._names, arrays, strict=True)
        )
        sizes = f"grid {launch.grid}, threadgroup {launch.threadgroup}"
        self._described = ", ".join([sizes, *shapes])
        # What a CUDA graph counted after an earlier check.
        with suppress(DeviceError), driver.current(function.context), driver.uncaptured():
            driver.clear(function.counted, _SIZE, 0)

    @property
    def unwritten(self) -> int:
        """Where `left` of the first array is."""
        return self._function.counted + _UNWRITTEN

    def findings(self) -> tuple[list[Finding], int, int]:
        """What was found since, how many launches there were, and how much found no room.

        Raises:
            DeviceError: one of the launches failed.
        """
        with self._driver.current(self._function.context), self._driver.uncaptured():
            self._driver.wait(None)
            data = self._driver.take(self._function.counted, _SIZE, 0)
            self._driver.clear(self._function.counted, _SIZE, 0)
        dropped, launches, loaded, _ = _REST.unpack_from(data, _TAIL)
        infinite, nan = written_not_finite(self._spec.kernel)
        found = []
        for count in sorted(_counts(data)):
            # What was given, or is written by the author, the kernel did not make.
            if count.what == _NAN and (nan or loaded):
                continue
            if count.what == _INFINITY and (infinite or loaded):
                continue
            found.append(self._finding(count))
        found += self._unwritten(data)
        return found, launches, dropped

    def _unwritten(self, data: bytes) -> Iterator[Finding]:
        """Of outputs that were filled before with what no kernel writes."""
        for i, name in enumerate(self._names[:ARRAYS]):
            times, first = _LEFT.unpack_from(data, _UNWRITTEN + i * _LEFT.size)
            if times:
                what = "1 element" if times == 1 else f"{times:,} elements"
                yield self._of(
                    "unwritten", f"leaves {what} of output {name!r} unwritten, the first at "
                    f"{~first & 0xFFFF_FFFF_FFFF_FFFF}.",
                    "Launch a thread for each element, or give init_value.", times,
                )  # fmt: skip

    def _finding(self, count: _Count) -> Finding:
        name = self._names[count.array]
        if count.what in (_READ, _WRITE):
            does = "reads" if count.what == _READ else "writes"
            has = "1 element" if count.elements == 1 else f"{count.elements:,} elements"
            kind, hint = "bounds", _GUARD
            message = f"{does} {name}[{count.at}], outside of it: {name!r} has {has}."
        else:
            value = "a NaN" if count.what == _NAN else "an infinity"
            kind = "nan"
            message = f"stores {value} to {name}[{count.at}], of numbers that are none."
            hint = "Look for 0 / 0, infinity - infinity, and functions outside of their domain."
        place = count.line, count.thread, count.group
        return self._of(kind, message, hint, count.times, *place)

    def _of(
        self,
        kind: str,
        message: str,
        hint: str,
        times: int,
        line: int | None = None,
        thread: Position | None = None,
        group: Position | None = None,
    ) -> Finding:
        kernel = self._spec.kernel
        file, file_line = texts.place_in_python(kernel, "source", line)
        return Finding(
            kind=kind,
            kernel=kernel.name,
            line=line,
            text=texts.line_of(kernel, "source", line),
            thread=thread,
            threadgroup=group,
            message=message,
            hint=hint,
            count=times,
            file=file,
            file_line=file_line,
            launch=self._described,
        )


class OnGpus:
    """The kernels that count on GPUs while a check goes on."""

    def __init__(self, unwritten: bool) -> None:
        """Args:
        unwritten: look for elements of outputs that nothing writes, too.
        """
        self._unwritten = unwritten
        self._counted: dict[LoadedFunction, tuple[Kernel, Counted]] = {}
        self._fills: Fills | None = None

    def know(
        self,
        driver: Driver,
        function: LoadedFunction,
        spec: Spec,
        arrays: Sequence[Facts],
        launch: Launch,
    ) -> None:
        """Note a kernel that is about to be launched, or that C, or a CUDA graph, will."""
        known = self._counted.get(function)
        if known is None:
            known = spec.kernel, Counted(driver, function, spec, arrays, launch)
            self._counted[function] = known
        if self._unwritten:
            self._fills = self._fills or Fills(driver)
            with suppress(ToolchainError):
                self._fills.know(function, spec, launch, known[1].unwritten)

    def read(self) -> Iterator[tuple[Kernel, list[Finding], int, int]]:
        """Of each kernel what it counted, as `Counted.findings`; waits for the GPUs."""
        if self._fills is not None:
            self._fills.close()
        for kernel, counted in self._counted.values():
            yield kernel, *counted.findings()


def _counts(data: bytes) -> Iterator[_Count]:
    """The entries of a table that are used."""
    for i in range(_ROOM):
        key, count, index, elements, *places = _ENTRY.unpack_from(data, i * _ENTRY.size)
        if key:
            group, thread = tuple(places[:3]), tuple(places[3:])
            line, array, what = key >> 32, key >> 8 & 0xFFFFFF, key & 0xFF
            yield _Count(line, array, what, count, index, elements, group, thread)
