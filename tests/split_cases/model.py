"""What a case is, the launches it is run with, and NumPy's view of the threads of a launch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Sizes = tuple[int, int, int]

# The inputs: a body gets those whose names stand in it.
X = (np.arange(4000) * 7919 % 201 - 100).astype(np.int32)  # x: from -100 to 100
S = np.array(17, np.int32)  # s: one value
HALVES = (np.arange(4000) % 64).astype(np.float16)  # halves
INPUTS: dict[str, Array] = {"x": X, "s": S, "halves": HALVES}

LINE = "uint i = thread_position_in_grid.x;\n"
SOLID = """\
uint i = (thread_position_in_grid.z * threads_per_grid.y + thread_position_in_grid.y)
    * threads_per_grid.x + thread_position_in_grid.x;
uint l = thread_index_in_threadgroup;
"""


class Shape(NamedTuple):
    """The sizes of one launch: threads in all and per threadgroup, along x, y and z."""

    grid: Sizes
    threadgroup: Sizes


LINES = (
    Shape((100, 1, 1), (64, 1, 1)),  # the last threadgroup ends in a simdgroup of 4 threads
    Shape((72, 1, 1), (48, 1, 1)),  # threadgroups that are no multiple of 32
    Shape((8, 1, 1), (8, 1, 1)),  # less than one simdgroup
)
SOLIDS = (
    *LINES,
    Shape((20, 3, 2), (20, 3, 2)),  # simdgroups of several rows and layers
    Shape((10, 6, 3), (4, 4, 2)),  # the same, of one simdgroup, ragged along each axis
    Shape((96, 4, 1), (32, 4, 1)),  # several rows in a threadgroup, one in each simdgroup
    Shape((70, 2, 1), (32, 2, 1)),  # the same, but simdgroups of several rows at the edge
)
WIDE = (
    *SOLIDS,
    Shape((100, 2, 1), (64, 2, 1)),
    Shape((40, 6, 1), (32, 3, 1)),
    Shape((300, 1, 1), (256, 1, 1)),
    Shape((256, 2, 1), (256, 2, 1)),
)


@dataclass(frozen=True)
class Case:
    """A body that writes ``y[i]``, an int, for each thread ``i`` of the grid; y is filled with 0.

    Attributes:
        way: ``"flat"``, ``"simdgroups"`` or ``"threadgroups"`` for what it is split by (where a
            threadgroup is one simdgroup, that is the same), or why it runs on fibers.
        want: y, from the `Threads` of a launch; None where that is not said in a few lines.
        splits: a flat body can be split too, where that is asked for.
        optimise: the compiler's level of optimisation.
    """

    name: str
    body: str
    way: str = "simdgroups"
    header: str = ""
    shapes: tuple[Shape, ...] = SOLIDS
    want: Callable[[Threads], Any] | None = None
    template: tuple[tuple[str, Any], ...] = ()
    splits: bool = True
    optimise: int = 1


def whole(name: str, body: str, **options: Any) -> Case:
    """A case whose body is complete, run with launches of one dimension unless said otherwise."""
    options = {"shapes": LINES, **options}
    if "header" in options:
        options["header"] = textwrap.dedent(options["header"])
    return Case(name, textwrap.dedent(body), **options)


def flat(name: str, body: str, **options: Any) -> Case:
    """A body without synchronising calls; `i` is the thread, along x alone."""
    return whole(name, LINE + textwrap.dedent(body), way="flat", **options)


def line(name: str, body: str, **options: Any) -> Case:
    """A body that synchronises; `i` is the thread, along x alone."""
    return whole(name, LINE + textwrap.dedent(body), **options)


def solid(name: str, body: str, **options: Any) -> Case:
    """The same for grids of three dimensions; `l` is the thread's index in its threadgroup."""
    return whole(name, SOLID + textwrap.dedent(body), **{"shapes": SOLIDS, **options})


class Threads:
    """The threads of a launch, in the order of `i`: an array of one int per thread for each fact.

    Attributes:
        i: the index in the grid.
        grid, threadgroup: the positions in the grid and of the thread in its threadgroup, each
            three arrays (x, y, z).
        group: the position of the threadgroup, three arrays.
        width, count: ``threads_per_threadgroup.x``, and the threads of the threadgroup.
        l, lane, simdgroup: the index in the threadgroup, in the simdgroup, and that of the
            simdgroup.
        of_group, of_simdgroup, of_quad: a number for each threadgroup, simdgroup and quadgroup.
    """

    def __init__(self, shape: Shape) -> None:
        whole_size = [min(g, t) for g, t in zip(shape.grid, shape.threadgroup, strict=True)]
        z, y, x = (axis.ravel() for axis in np.indices(shape.grid[::-1]))
        self.grid = (x, y, z)
        self.i = np.arange(len(x))
        self.group = tuple(p // n for p, n in zip(self.grid, whole_size, strict=True))
        self.threadgroup = tuple(p % n for p, n in zip(self.grid, whole_size, strict=True))
        sizes = [
            np.minimum(n, g - at * n)
            for n, g, at in zip(whole_size, shape.grid, self.group, strict=True)
        ]
        px, py, pz = self.threadgroup
        self.width = sizes[0]
        self.count = sizes[0] * sizes[1] * sizes[2]
        self.l = (pz * sizes[1] + py) * sizes[0] + px
        self.lane, self.simdgroup = self.l % 32, self.l // 32
        gx, gy, gz = self.group
        self.of_group = (gz * 1000 + gy) * 1000 + gx
        self.of_simdgroup = self.of_group * 32 + self.simdgroup
        self.of_quad = self.of_simdgroup * 8 + self.lane // 4

    def fold(
        self, function: np.ufunc, values: Any, where: Any = True, by: Array | None = None
    ) -> Array:
        """What the threads with equal `by` (the simdgroup) for which `where` holds give together.

        Every thread of them gets the result; it is 0 where no thread takes part.
        """
        given = np.asarray(values)
        given = np.broadcast_to(given.astype(int) if given.dtype == bool else given, self.i.shape)
        active = np.broadcast_to(where, self.i.shape)
        units = self.of_simdgroup if by is None else by
        out = np.zeros_like(given)
        for unit in np.unique(units):
            chosen = units == unit
            if (chosen & active).any():
                out[chosen] = function.reduce(given[chosen & active])
        return out

    def sum(self, values: Any, where: Any = True, by: Array | None = None) -> Array:
        """``simd_sum``; of bools, how many are true."""
        return self.fold(np.add, values, where, by)

    def max(self, values: Any, where: Any = True, by: Array | None = None) -> Array:
        """``simd_max``."""
        return self.fold(np.maximum, values, where, by)

    def min(self, values: Any, where: Any = True, by: Array | None = None) -> Array:
        """``simd_min``."""
        return self.fold(np.minimum, values, where, by)

    def prefix(self, values: Any, by: Array | None = None) -> Array:
        """``simd_prefix_inclusive_sum`` with all lanes active."""
        units = self.of_simdgroup if by is None else by
        given = np.broadcast_to(values, self.i.shape)
        out = np.zeros_like(given)
        for unit in np.unique(units):
            chosen = np.flatnonzero(units == unit)
            chosen = chosen[np.argsort(self.l[chosen])]
            out[chosen] = np.cumsum(given[chosen])
        return out

    def shuffle(self, values: Any, lane: Any, where: Any = True) -> Array:
        """``simd_shuffle``; a lane that asks for one that is not there gets its own value."""
        given = np.broadcast_to(values, self.i.shape)
        active = np.broadcast_to(where, self.i.shape)
        lanes = np.broadcast_to(lane, self.i.shape)
        known = {
            (int(u), int(n)): v
            for u, n, v, a in zip(self.of_simdgroup, self.lane, given, active, strict=True)
            if a
        }
        return np.array(
            [
                known.get((int(u), int(n)), v)
                for u, n, v in zip(self.of_simdgroup, lanes, given, strict=True)
            ]
        )


@cache
def threads(shape: Shape) -> Threads:
    """The threads of a launch."""
    return Threads(shape)


def quotient(a: Any, b: Any) -> Array:
    """``a / b`` of C's ints, rounded towards zero."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    return np.asarray(abs(a) // abs(b) * np.sign(a) * np.sign(b))


def remainder(a: Any, b: Any) -> Array:
    """``a % b`` of C's ints, with the sign of `a`."""
    return np.asarray(np.asarray(a, np.int64) - quotient(a, b) * np.asarray(b, np.int64))
