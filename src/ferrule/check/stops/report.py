"""What is told of a thread at a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...kernel import Kernel
from ..launches.texts import line_of, place_in_python
from ..reports.results import shown_path
from .shown import Array, Shown, near, told

_VERBS = {"r": "reads", "w": "writes", "m": "changes"}


@dataclass
class Stop:
    """A thread at a line of a kernel.

    Attributes:
        kernel: the kernel's name.
        where, line: ``"source"`` or ``"header"``, and the line there.
        thread: the thread's position in the grid.
        local, threadgroup: its position in the threadgroup, and of that in the grid.
        lane: its number in the simdgroup.
        variables: those in scope, by name: NumPy's scalars and arrays (lanes are a dim, the last);
            of a pointer a text such as ``"x + 12"``; None of what cannot be shown.
        elements: those that the line reads or writes, as it names them: the values before it.
        text: all of it, for people.
    """

    kernel: str
    where: str
    line: int
    thread: tuple[int, int, int]
    local: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    lane: int
    variables: dict[str, Any] = field(default_factory=dict)
    elements: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def report(
    stop: Stop, kernel: Kernel, shown: Sequence[Shown], arrays: Sequence[Array],
    remarks: Sequence[str],
) -> str:  # fmt: skip
    """The text of a stop: where, the lines around, variables, elements, arrays."""
    header = "header " if stop.where == "header" else ""
    lines = [f"stop: kernel {stop.kernel!r}, {header}line {stop.line}, thread {stop.thread}"]
    lines += _source(stop, kernel)
    lines.append(f"  thread_position_in_grid {stop.thread}")
    lines.append(
        f"  thread_position_in_threadgroup {stop.local}, threadgroup_position_in_grid "
        f"{stop.threadgroup}, thread_index_in_simdgroup {stop.lane}"
    )
    variables = [one for one in shown if one.kind in "vp"]
    elements = [one for one in shown if one.kind not in "vp"]
    lines += _section("variables", [_variable(one) for one in reversed(variables)])
    lines += _section(
        "this line", [(one.name, _VERBS[one.kind], _element(one)) for one in elements]
    )
    lines += _section("around", list(_around(elements)))
    lines += _section("arrays", [_array(array) for array in arrays if _is_own(array)])
    lines += [f"  ({remark})" for remark in remarks]
    return "\n".join(lines) + "\n"


def _source(stop: Stop, kernel: Kernel) -> Iterator[str]:
    """The lines around, the one that is next marked."""
    file, line = place_in_python(kernel, stop.where, stop.line)
    if file is not None:
        yield f"  --> {shown_path(file)}:{line}"
    text = kernel.header if stop.where == "header" else kernel.source
    last = min(stop.line + 2, text.count("\n") + 1)
    for at in range(max(stop.line - 2, 1), last + 1):
        mark = ">" if at == stop.line else "|"
        yield f"{at:>5} {mark} {line_of(kernel, stop.where, at).expandtabs(4)}".rstrip()


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows under a title, in columns."""
    if not rows:
        return
    yield f"  {title}:"
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield f"    {'  '.join([*cells, row[-1]])}".rstrip()


def _variable(one: Shown) -> tuple[str, str, str]:
    return one.name, one.type, one.place if one.kind == "p" else told(one)


def _element(one: Shown) -> str:
    """``x[12] = 3.25``, or where it lies outside."""
    if one.value is None:
        return f"{one.place}, {one.problem}" if one.place else one.problem
    before = " before" if one.kind == "w" else ""
    place = f"{one.place} = " if one.place and one.place != one.name else ""
    return f"{place}{told(one)}{before}"


def _around(elements: Sequence[Shown]) -> Iterator[tuple[str, str]]:
    """The arrays of a line, near what it uses, each once."""
    known: set[str] = set()
    for one in elements:
        found = near(one)
        if found is None or one.array is None or one.array.what.name in known:
            continue
        first, values = found
        known.add(one.array.what.name)
        name = f"{one.array.what.name}[{first} … {first + len(values) - 1}]"
        yield name, "{" + ", ".join(values) + "}"


def _is_own(array: Array) -> bool:
    """Whether an array is no table of shapes or strides."""
    return array.what.shape is None or array.what.dtype is not None


def _array(array: Array) -> tuple[str, str]:
    what = array.what
    if what.shape is None or what.dtype is None:
        return what.name, f"threadgroup memory, {what.bytes // what.item:,} elements"
    return what.name, f"{what.dtype.name}[{','.join(map(str, what.shape))}]"
