"""Files of findings that are known, so that only new ones are told.

A finding is known by its kernel, its kind and the text of its line, and not by the line's number:
a line above it changes nothing. Each entry stands for one finding; a line that a body has twice has
two entries. The file is JSON with an entry per line, in an order of its own, for diffs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import KernelError
from .findings import Finding
from .results import squeezed, write_file
from .select import Selection

VERSION = 1
_FORMAT = "ferrule check baseline"
_FIELDS = ("kernel", "kind", "text")

Key = tuple[str, str, str]


def key_of(finding: Finding) -> Key:
    """By what a finding is known again: its kernel, its kind, its line's text."""
    return finding.kernel, finding.kind, squeezed(finding.text)


def read(path: str | os.PathLike[str]) -> Counter[Key]:
    """Read a file of known findings: how often each is known.

    Raises:
        KernelError: the file cannot be read, or is none of these.
    """
    shown = f"the baseline {str(path)!r}"
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KernelError(
            f"{shown} cannot be read: {error.strerror or error}. `ferrule check --write-baseline` "
            "makes one."
        ) from error
    except ValueError as error:
        raise KernelError(f"{shown} is not JSON: {error}.") from error
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
        raise KernelError(f'{shown} is not one of ferrule: it has no "format": "{_FORMAT}".')
    if whole.get("version") != VERSION:
        raise KernelError(
            f"{shown} is of version {whole.get('version')!r}; this ferrule reads {VERSION}. Write "
            "it anew with --write-baseline."
        )
    entries = whole.get("findings")
    if not isinstance(entries, list):
        raise KernelError(f'{shown} has no list "findings".')
    return Counter(_entry(entry, number, shown) for number, entry in enumerate(entries, 1))


def _entry(entry: Any, number: int, shown: str) -> Key:
    values = [entry.get(name) for name in _FIELDS] if isinstance(entry, dict) else []
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(_FIELDS):
        raise KernelError(
            f"{shown}, entry {number}: expected the texts {', '.join(_FIELDS)}, not {entry!r}."
        )
    kernel, kind, text = texts
    return kernel, kind, squeezed(text)


def write(path: str | os.PathLike[str], findings: Iterable[Finding]) -> None:
    """Write findings as known ones, at once or not at all.

    Raises:
        KernelError: the file cannot be written.
    """
    entries = [dict(zip(_FIELDS, key, strict=True)) for key in sorted(map(key_of, findings))]
    lines = ",\n  ".join(map(json.dumps, entries))
    inside = f"\n  {lines}\n " if entries else ""
    text = f'{{"format": "{_FORMAT}", "version": {VERSION},\n "findings": [{inside}]}}\n'
    write_file(path, text, "the baseline")


def split(findings: Sequence[Finding], known: Counter[Key]) -> tuple[list[Finding], list[Finding]]:
    """Part findings into new ones and known ones, each in their order.

    Of several with one key, those on the first lines are the known ones.
    """
    left = known.copy()
    places = sorted(range(len(findings)), key=lambda i: (findings[i].line or 0, i))
    is_known = set()
    for i in places:
        key = key_of(findings[i])
        if left[key] > 0:
            left[key] -= 1
            is_known.add(i)
    new = [finding for i, finding in enumerate(findings) if i not in is_known]
    return new, [findings[i] for i in sorted(is_known)]


def stale(
    findings: Iterable[Finding], known: Counter[Key], selection: Selection | None = None
) -> list[Key]:
    """What is known and was not found, of the kinds and kernels that were looked at."""
    wanted = selection or Selection()
    left = known - Counter(map(key_of, findings))
    return sorted(key for key in left.elements() if wanted.takes(key[0], key[1]))


def stale_notes(path: str | os.PathLike[str], entries: Sequence[Key]) -> list[str]:
    """What to say of entries that are stale."""
    if not entries:
        return []
    shown = [
        f"{kind} in {kernel!r}" + (f": {text}" if text else "") for kernel, kind, text in entries
    ]
    head = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    return [
        f"baseline {str(path)!r}: {head} found no more; write it anew with --write-baseline:\n"
        + "\n".join(f"- {line}" for line in shown)
    ]
