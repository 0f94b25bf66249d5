"""Text: the Metal signature, and one C++ text that g++, clang and NVRTC read."""

from typing import NamedTuple

ENTRY = "fr_entry"  # the exported function of a CPU kernel


class NotSplittable(Exception):
    """The control flow does not allow the split; says why."""


class Note(NamedTuple):
    """Something that runs here but that Apple's compiler or GPU refuses.

    Attributes:
        where: ``"source"`` or ``"header"``.
        line: 1-based line in that text.
        what: what was found.
    """

    where: str
    line: int
    what: str
