"""From an address in machine code to the author's line, by what the compiler left there."""

from __future__ import annotations

import io
from bisect import bisect_right
from typing import Any, NamedTuple

from elftools.common.exceptions import ELFError
from elftools.dwarf.ranges import BaseAddressEntry
from elftools.elf.elffile import ELFFile


class Place(NamedTuple):
    """A place in an author's text.

    Attributes:
        where: ``"source"`` or ``"header"``.
        line, column: count from 1; column 0 is none.
    """

    where: str
    line: int
    column: int


def place_of(file: str, line: int, column: int) -> Place | None:
    """The place that a compiler names; None of what is not the author's."""
    _, dot, where = file.rpartition(".")
    return Place(where, line, column) if dot and where in ("source", "header") else None


class Lines:
    """The lines of one library."""

    def __init__(self, payload: bytes) -> None:
        self._rows: list[tuple[int, str, int, int]] = []
        self._calls: list[tuple[int, int, str, int, int]] = []
        try:
            elf = ELFFile(io.BytesIO(payload))
        except ELFError:  # a system of its own has another format
            return
        if elf.has_dwarf_info():
            self._read(elf.get_dwarf_info())
        self._rows.sort()
        self._starts = [row[0] for row in self._rows]

    def place(self, address: int) -> Place | None:
        """The author's line of the call that returns to an address: where the dialect's own header
        was inlined there, that of the call of it."""
        return next(iter(self.places(address)), None)

    def places(self, address: int) -> list[Place]:
        """The author's lines of it, and of the calls of functions that were inlined there."""
        at = address - 1
        if not self._rows or address <= 0:
            return []
        inside = [call for call in self._calls if call[0] <= at < call[1]]
        inside.sort(key=lambda call: call[1] - call[0])
        known = [place_of(*self._innermost(at)), *(place_of(*call[2:]) for call in inside)]
        return [place for place in known if place is not None]

    def direct(self, address: int) -> bool:
        """Whether the author's own text is there, and nothing that was inlined into it."""
        return bool(self._rows) and place_of(*self._innermost(address - 1)) is not None

    def _innermost(self, at: int) -> tuple[str, int, int]:
        return self._rows[max(bisect_right(self._starts, at) - 1, 0)][1:]

    def _read(self, dwarf: Any) -> None:
        ranges = dwarf.range_lists()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            first = 0 if program["version"] >= 5 else 1
            files = [entry.name.decode() for entry in program["file_entry"]]
            for entry in program.get_entries():
                if (state := entry.state) is not None and not state.end_sequence:
                    name = files[state.file - first] if state.file - first < len(files) else ""
                    self._rows.append((state.address, name, state.line, state.column))
            for entry in unit.iter_DIEs():
                if entry.tag != "DW_TAG_inlined_subroutine":
                    continue
                values = {n: a.value for n, a in entry.attributes.items()}
                file = values.get("DW_AT_call_file", first) - first
                place = files[file], values.get("DW_AT_call_line", 0)
                column = values.get("DW_AT_call_column", 0)
                for low, high in _extents(entry, unit, ranges):
                    self._calls.append((low, high, *place, column))


def _extents(entry: Any, unit: Any, ranges: Any) -> list[tuple[int, int]]:
    """The addresses that an inlined function takes up."""
    attributes = entry.attributes
    if "DW_AT_ranges" in attributes:
        top = unit.get_top_DIE().attributes
        base = top["DW_AT_low_pc"].value if "DW_AT_low_pc" in top else 0
        found: list[tuple[int, int]] = []
        for item in ranges.get_range_list_at_offset(attributes["DW_AT_ranges"].value, cu=unit):
            if isinstance(item, BaseAddressEntry):
                base = item.base_address
            else:
                offset = 0 if getattr(item, "is_absolute", False) else base
                found.append((item.begin_offset + offset, item.end_offset + offset))
        return found
    if "DW_AT_low_pc" not in attributes or "DW_AT_high_pc" not in attributes:
        return []
    low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
    is_length = high.form.startswith("DW_FORM_data") or high.form.startswith("DW_FORM_udata")
    return [(low, low + high.value if is_length else high.value)]
