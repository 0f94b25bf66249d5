"""The form of a launch: it decides which text of a kernel runs."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import Launch


class Form(NamedTuple):
    """The properties of a launch's sizes that decide how its threads are run.

    Attributes:
        small: a threadgroup fits into one simdgroup.
        simd_rows: the lanes of each simdgroup differ in x alone.
        group_rows: the threads of each threadgroup differ in x alone.
        aligned: threadgroups are a multiple of 32 threads wide, and x fits into an int.
        threads: how many CPU threads there are for atomics: 1, ``FEW`` or 0 for more. One thread
            needs no atomic instructions, and where a kernel adds whole rows of elements, it is
            faster than a few that do.
        debugging: the text is for a debugger (`debug`).
    """

    small: bool
    simd_rows: bool
    group_rows: bool
    aligned: bool
    threads: int = 0
    debugging: bool = False


# What serves launches of every size.
ANY = Form(small=False, simd_rows=False, group_rows=False, aligned=False)
# Names of packaged/ops.h.
NEEDS = {
    "small": "FR_SMALL",
    "simd_rows": "FR_SIMD_ROWS",
    "group_rows": "FR_GROUP_ROWS",
    "aligned": "FR_WIDE",
}


def form_of(launch: Launch | None, threads: int = 0) -> Form:
    """The form of a launch; without one, that of a large one-dimensional launch."""
    if launch is None:
        return Form(False, True, True, True)
    x, y, z = launch.threadgroup
    group_rows = y == 1 and z == 1
    edge = launch.grid[0] % x if x else 0
    return Form(
        small=x * y * z <= 32,
        simd_rows=group_rows or (x % 32 == 0 and edge % 32 == 0),
        group_rows=group_rows,
        aligned=x % 32 == 0 and launch.grid[0] < 2**31,
        threads=threads,
    )
