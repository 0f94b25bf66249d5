"""Kernels on the CPU in a debugger: FERRULE_DEBUG=1.

They are compiled without optimisation and with the author's lines, which stand in files beside the
cache; every thread is a fiber, and has its position in variables.
"""

from __future__ import annotations

import os
import re

from ... import _env, cache
from ...kernel import Kernel

_chosen: bool | None = None
_UNQUOTED = re.compile(r"[\s:\"\\]")  # what compilers' messages and `#line` would need quoted


def set_debug(on: bool | None) -> None:
    """Has kernels on the CPU compiled for a debugger, as ``FERRULE_DEBUG=1`` does.

    It holds for kernels that are first launched afterwards.

    Args:
        on: whether; None asks ``FERRULE_DEBUG`` again.
    """
    global _chosen
    _chosen = on


def debugging() -> bool:
    """Whether kernels are compiled for a debugger."""
    return (_env.get(_env.DEBUG) or "0") != "0" if _chosen is None else _chosen


def source_folder(kernel: Kernel) -> str:
    """The folder in which ``name.source`` and ``name.header`` are the author's texts; empty where
    none can be written. It ends with a slash."""
    texts = {"source": kernel.source, "header": kernel.header}
    digest = cache.digest("debug", kernel.name, *texts.values())[:16]
    folder = os.path.join(str(cache.default().path), "debug", digest, "")
    if _UNQUOTED.search(folder):
        return ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for where, text in texts.items():
            path = os.path.join(folder, f"{kernel.name}.{where}")
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
    except OSError:
        return ""
    return folder


def flags(flags: tuple[str, ...], compiler: str) -> tuple[str, ...]:
    """The compiler's options, of which these are the usual ones."""
    dropped = {"-O3", "-funroll-loops", "-fno-asynchronous-unwind-tables"}
    kept = tuple(flag for flag in flags if flag not in dropped)
    own = ("-fno-sanitize=undefined",) if compiler == "zig" else ()  # which -O0 turns on there
    return (*kept, "-O0", "-g", "-fno-omit-frame-pointer", *own)
