"""Where to stop: ``[KERNEL:][header:]LINE[:THREAD][@N]``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from ...errors import KernelError
from ...spec import Launch

_FORM = re.compile(
    r"(?:(?P<kernel>(?!header:)[^:@]*[^:@\d][^:@]*):)?(?P<header>header:)?(?P<line>\d{1,9})"
    r"(?::(?P<thread>\d{1,18}|\d{1,9},\d{1,9},\d{1,9}))?(?:@(?P<time>\d{1,18}))?"
)


class Break(NamedTuple):
    """A line to stop at.

    Attributes:
        text: as it was asked for.
        kernel: a pattern of kernels' names, as a shell's.
        where: ``"source"`` or ``"header"``.
        line: counts from 1 in that text.
        thread: its position in the grid; one number counts threads along x first. None: any.
        time: it stops when the line is reached for the N-th time.
    """

    text: str
    kernel: str
    where: str
    line: int
    thread: tuple[int, ...] | None
    time: int

    def takes(self, kernel: str) -> bool:
        """Whether it is meant for a kernel of this name."""
        return fnmatchcase(kernel, self.kernel)

    def place(self, launch: Launch) -> tuple[int, int] | None:
        """The thread's index in its threadgroup, and which threadgroup that is, along x first;
        None where the grid has no such thread."""
        if self.thread is None:
            raise ValueError("any thread is meant")
        x, y, _ = launch.grid
        if len(self.thread) == 3:
            at: tuple[int, ...] = self.thread
        else:
            number = self.thread[0]
            at = number % max(x, 1), number // max(x, 1) % max(y, 1), number // max(x * y, 1)
        if any(a >= size for a, size in zip(at, launch.grid, strict=True)):
            return None
        pairs = list(zip(at, launch.threadgroup, launch.grid, strict=True))
        group = [a // t for a, t, _ in pairs]
        groups = [-(-g // t) for _, t, g in pairs]
        sizes = [min(t, g - a // t * t) for a, t, g in pairs]  # the last one may be smaller
        inside = [a % t for a, t, _ in pairs]
        thread = inside[0] + sizes[0] * (inside[1] + sizes[1] * inside[2])
        return thread, group[0] + groups[0] * (group[1] + groups[1] * group[2])


def parse(text: str) -> Break:
    """Where a text says to stop.

    Raises:
        KernelError: it says nothing of the kind; shows the form.
    """
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None or not int(found["line"]) or found["time"] == "0":
        raise KernelError(
            f"stop_at: got {text!r}, expected [KERNEL:][header:]LINE[:THREAD][@N], such as '7' for "
            "line 7 of the body, 'softmax:7:40' for thread 40 in it, '7:5,1,0' for the thread at "
            "this position in the grid, 'header:3@2' for the second time."
        )
    thread = found["thread"]
    return Break(
        text=text,
        kernel=found["kernel"] or "*",
        where="header" if found["header"] else "source",
        line=int(found["line"]),
        thread=None if thread is None else tuple(map(int, thread.split(","))),
        time=int(found["time"] or 1),
    )
