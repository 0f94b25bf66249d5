"""The report for people: each finding as a compiler shows an error, and a summary."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

import click

from ... import _env
from .findings import Finding, Position
from .results import Results, numbered, shown_path

_WIDEST = 100  # columns: longer lines of prose are hard to read
_NARROWEST = 40

Paint = Callable[..., str]


def show(results: Results, stream: TextIO, *, quiet: bool = False) -> None:
    """Write a report to a stream: coloured on a terminal, unless NO_COLOR is set.

    Args:
        results: what to report.
        stream: where to.
        quiet: write the summary alone, and that only where there are findings.
    """
    color = stream.isatty() and not _env.no_color()
    if quiet:
        text = f"{summary(results)}\n" if results.findings else ""
    else:
        columns = shutil.get_terminal_size((80, 24)).columns if stream.isatty() else 80
        text = render(results, width=columns, color=color)
    encoding = stream.encoding or "utf-8"
    click.echo(
        text.encode(encoding, "backslashreplace").decode(encoding), stream, nl=False, color=color
    )


def render(results: Results, *, width: int = 80, color: bool = False) -> str:
    """The report, for a terminal of some columns."""
    width = min(max(width, _NARROWEST), _WIDEST)
    paint = _painted if color else _plain
    parts = ["\n".join(_finding(finding, width, paint)) for finding in results.findings]
    notes = "\n".join(
        line for note in results.notes for line in _wrapped("note: ", note, width, paint)
    )
    end = paint(summary(results), bold=True)
    parts.append(f"{notes}\n{end}" if notes else end)
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """The last line: ``"3 findings in 2 kernels, 41 launches checked"``."""
    kernels = len({finding.kernel for finding in results.findings})
    if results.findings:
        found = f"{numbered(len(results.findings), 'finding')} in {numbered(kernels, 'kernel')}"
    else:
        found = "no findings"
    known = f" ({results.known:,} known, not shown)" if results.known else ""
    return f"{found}{known}, {numbered(results.launches, 'launch')} checked"


def _plain(text: str, **style: object) -> str:
    return text


def _painted(text: str, fg: str | None = None, bold: bool | None = None) -> str:
    return click.style(text, fg=fg, bold=bold)


def _finding(finding: Finding, width: int, paint: Paint) -> Iterator[str]:
    gutter = len(str(finding.line or "")) + 1
    head = paint(f"error[{finding.kind}]", fg="red", bold=True)
    place = f": kernel {finding.kernel!r}"
    if finding.line is not None:
        place += f", {_line(finding, finding.line)}"
    yield head + paint(_printable(place), bold=True)
    if finding.file is not None:
        file = _printable(shown_path(finding.file))
        if finding.file_line is not None:
            file += f":{finding.file_line}"
        yield " " * gutter + paint("-->", fg="blue", bold=True) + f" {file}"
    if finding.line is not None:
        yield from _quoted(finding, gutter, width, paint)
    lead = " " * gutter + " = "
    for label, text in _details(finding):
        yield from _wrapped(lead, text, width, paint, label)


def _line(finding: Finding, line: int) -> str:
    return f"header line {line}" if finding.where == "header" else f"line {line}"


def _quoted(finding: Finding, gutter: int, width: int, paint: Paint) -> Iterator[str]:
    """The author's line, and a caret under its column."""
    empty = paint(" " * gutter + " |", fg="blue", bold=True)
    numbers = paint(f"{finding.line:>{gutter}} |", fg="blue", bold=True)
    column = finding.column
    before = finding.text[: column - 1] if column is not None else ""
    text = _printable(finding.text.rstrip().expandtabs(4))
    caret = None if column is None else len(_printable(before.expandtabs(4)))
    text, caret = _window(text, caret, width - gutter - 3)
    yield empty
    yield f"{numbers} {text}"
    if caret is not None:
        yield f"{empty} {' ' * _cells(text[:caret])}{paint('^', fg='red', bold=True)}"


def _window(text: str, caret: int | None, room: int) -> tuple[str, int | None]:
    """The part of a line that there is room for, with the caret in it."""
    if _cells(text) <= room:
        return text, caret
    inside = min(caret or 0, len(text))
    start = 0
    while _cells(text[start : inside + 1]) > room * 2 // 3:  # some of what follows is seen, too
        start += 1
    head = "…" if start else ""
    end = len(text)
    while _cells(head + text[start:end]) > room - (end < len(text)):
        end -= 1
    shown = head + text[start:end] + ("…" if end < len(text) else "")
    return shown, None if caret is None else inside - start + len(head)


def _details(finding: Finding) -> Iterator[tuple[str, str]]:
    """What is said under the line: a label, or none, and a text."""
    yield "", finding.message
    if finding.thread is not None or finding.threadgroup is not None:
        yield "by", _who(finding.thread, finding.threadgroup)
    if finding.other_line is not None or finding.other_thread is not None:
        parts = [_line(finding, finding.other_line)] if finding.other_line is not None else []
        if finding.other_thread is not None or finding.other_threadgroup is not None:
            parts.append(_who(finding.other_thread, finding.other_threadgroup))
        waits = finding.kind == "divergence"
        text = f": {finding.other_text.strip()}" if finding.other_text.strip() else ""
        yield "others wait:" if waits else "other access:", ", ".join(parts) + text
    if finding.launch:
        yield "launch:", finding.launch
    if finding.count > 1:
        yield "count:", numbered(finding.count, "time")
    if finding.hint:
        yield "help:", finding.hint


def _who(thread: Position | None, threadgroup: Position | None) -> str:
    named = (("thread", thread), ("threadgroup", threadgroup))
    return " of ".join(f"{noun} {place}" for noun, place in named if place is not None)


def _wrapped(lead: str, text: str, width: int, paint: Paint, label: str = "") -> Iterator[str]:
    """The lines of a detail, those after the first under the first one's text."""
    lines = []
    room = width - len(lead)
    for part in f"{label} {text}".strip().splitlines() or [""]:
        lines += textwrap.wrap(_printable(part), room, break_on_hyphens=False) or [""]
    first = lines[0].removeprefix(label)
    head = paint(label, fg="cyan", bold=True) if label else ""
    yield f"{paint(lead, fg='blue', bold=True)}{head}{first}"
    for line in lines[1:]:
        yield " " * len(lead) + line


def _printable(text: str) -> str:
    """Text in which a terminal is told nothing: control characters are shown as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _cells(text: str) -> int:
    """The columns that a text takes on a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )
