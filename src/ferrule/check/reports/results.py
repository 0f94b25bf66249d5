"""What came of a checked program, as its reports need it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import KernelError
from .findings import Finding


@dataclass(frozen=True)
class Results:
    """What came of a checked program.

    Attributes:
        findings: what was found, but for what is hidden.
        launches: how many launches were checked.
        notes: remarks, such as ``"sampled 64 of 10000 threadgroups"``.
        known: how many findings a baseline hides.
    """

    findings: Sequence[Finding]
    launches: int = 0
    notes: Sequence[str] = ()
    known: int = 0


def numbered(count: int, noun: str) -> str:
    """Count things: ``"1 launch"``, ``"12,288 launches"``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def squeezed(text: str) -> str:
    """A line without what reformatting changes: its white space."""
    return " ".join(text.split())


def shown_path(file: str) -> str:
    """A file's path as people call it: from the current folder where it lies in that."""
    try:
        return Path(file).resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (OSError, ValueError):
        return file


def write_file(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write a file, at once or not at all.

    Raises:
        KernelError: it cannot be written; says that of ``what``.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe: nothing to replace
        temporary = target
    else:
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if temporary is not target:
            os.replace(temporary, target)
    except OSError as error:
        raise KernelError(f"{what} {str(path)!r} cannot be written: {error}.") from error
    finally:
        if temporary is not target:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
