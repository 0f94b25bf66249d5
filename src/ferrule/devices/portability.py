"""What runs here but Apple refuses: said once of each kernel, or an error where that is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..dtypes import Dtype, bool_, float32, float64, int32, uint32, uint64
from ..errors import DialectError, PortabilityWarning, warn
from ..kernel import Kernel
from ..source import Note

if TYPE_CHECKING:
    from ..source.cpp import Prepared

_ATOMIC = (bool_, float32, int32, uint32)
_SHARED_LIMIT = 32 << 10
_MOST_BUFFERS = 31


class Portability:
    """What a device has warned of so far."""

    def __init__(self) -> None:
        self._said: set[tuple[Kernel, Note]] = set()

    def say(self, kernel: Kernel, notes: Iterable[Note]) -> None:
        """Warn once of each.

        Raises:
            DialectError: there is one, and the kernel has ``portable=True``.
        """
        for note in notes:
            problem = f"{note.what} runs here, but Apple's compiler or GPU refuses it"
            place = kernel.name, note.where, note.line, note.what
            if kernel.portable:
                raise DialectError.at(*place, f"{problem}; `portable=True` asks for an error.")
            if (kernel, note) not in self._said:
                self._said.add((kernel, note))
                warn(str(DialectError.at(*place, f"{problem}.")), PortabilityWarning)


def notes(p: Prepared) -> list[Note]:
    """What Apple refuses, as far as the text alone tells."""
    from ..source import unportable  # what is in the cache needs no text
    from ..source.cpp import parameters

    outputs = dict(zip(p.kernel.output_names, p.spec.outputs, strict=True))
    atomic = outputs if p.kernel.atomic_outputs else {}
    wide = [n for n, d in atomic.items() if d is uint64]
    types = [name for name, value in p.spec.template if isinstance(value, Dtype)]
    notes = [*p.text.notes, *unportable.notes(p.kernel, wide, types)]
    for n, d in atomic.items():
        if d not in (*_ATOMIC, uint64):
            construct = f"atomics on {d.name} (output {n!r})"
            notes.append(Note("source", _first_line(p.kernel, n), construct))
    names = (*p.kernel.input_names, *p.kernel.output_names)
    kinds = (*(i.dtype for i in p.spec.inputs), *p.spec.outputs)
    doubles = [n for n, d in zip(names, kinds, strict=True) if d == float64]
    if doubles:
        line = _first_line(p.kernel, doubles[0])
        notes.append(Note("source", line, f"float64 ({doubles[0]!r})"))
    if len(parameters(p.spec)) > _MOST_BUFFERS:
        notes.append(Note("source", 1, "a kernel with more than 31 buffers"))
    return notes


def of_shared_memory(size: int, line: int) -> list[Note]:
    """Apple's GPUs give a threadgroup 32 KB of memory.

    Args:
        size: the bytes that a kernel declares.
        line: where it declares most of them.
    """
    construct = f"{size} bytes of threadgroup memory (more than 32 KB)"
    return [Note("source", line, construct)] if size > _SHARED_LIMIT else []


def _first_line(kernel: Kernel, name: str) -> int:
    """The first line of the source that has this name."""
    match = re.search(rf"\b{name}\b", kernel.source)
    return 1 + kernel.source.count("\n", 0, match.start()) if match else 1
