"""Where a kernel's text stands: its lines, and the Python file that has them."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

from ...kernel import Kernel


def line_of(kernel: Kernel, where: str, line: int | None) -> str:
    """A line of a kernel's body or header, as its author wrote it."""
    lines = (kernel.header if where == "header" else kernel.source).split("\n")
    return lines[line - 1] if line is not None and 0 < line <= len(lines) else ""


def place_in_python(kernel: Kernel, where: str, line: int | None) -> tuple[str | None, int | None]:
    """The file and line of a line of a kernel's text, where a module that is loaded has it."""
    text = kernel.header if where == "header" else kernel.source
    found = _find(text) if text.strip() else None
    if found is None or line is None:
        return None, None
    return found[0], found[1] + line - 1


@lru_cache(maxsize=256)
def _find(text: str) -> tuple[str, int] | None:
    """The file that has a text, and the line on which that begins.

    Texts are looked for as they are, and indented: bodies are often dedented.
    """
    wanted = [line.strip() for line in text.strip("\n").split("\n")]
    leading = len(text) - len(text.lstrip("\n"))
    for file in _files():
        try:
            lines = [line.strip() for line in Path(file).read_text(errors="replace").split("\n")]
        except OSError:
            continue
        start = _position(lines, wanted)
        if start is not None:
            return file, start + 1 - leading
    return None


def _position(lines: list[str], wanted: list[str]) -> int | None:
    """Where lines stand among others; quotes may stand before the first and behind the last."""
    first, last = wanted[0], wanted[-1]
    for i in range(len(lines) - len(wanted) + 1):
        if not lines[i].endswith(first) and not (len(wanted) == 1 and first in lines[i]):
            continue
        if len(wanted) == 1:
            if first and first in lines[i]:
                return i
        elif lines[i + 1 : i + len(wanted) - 1] == wanted[1:-1] and lines[
            i + len(wanted) - 1
        ].startswith(last):
            return i
    return None


def _files() -> list[str]:
    """The files of loaded modules, those of neither Python nor ferrule; the program's first."""
    own, library = str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib")
    files: dict[str, None] = {}
    for module in [sys.modules.get("__main__"), *list(sys.modules.values())]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            site = "site-packages" in file or "dist-packages" in file
            if not file.startswith(library) or site:
                files.setdefault(file)
    mine = [file for file in files if not file.startswith(own)]
    return [*mine, *(file for file in files if file.startswith(own))]
