"""What the reference runs on: the positions of all threads, and memory that notices races."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import program as p

Array = np.ndarray[Any, Any]


class Grid:
    """Where each thread stands. Threads are numbered group by group, in the order of a group."""

    def __init__(self, launch: p.Launch) -> None:
        grid = launch.grid
        group = tuple(min(t, g) for t, g in zip(launch.threadgroup, grid, strict=True))
        counts = tuple(-(-g // t) for g, t in zip(grid, group, strict=True))
        fields: dict[str, list[int]] = {}

        def note(**values: int) -> None:
            for name, value in values.items():
                fields.setdefault(name, []).append(value)

        simd = quad = index = 0
        for gz in range(counts[2]):
            for gy in range(counts[1]):
                for gx in range(counts[0]):
                    at = (gx, gy, gz)
                    size = [min(group[a], grid[a] - at[a] * group[a]) for a in range(3)]
                    n = size[0] * size[1] * size[2]
                    for i in range(n):
                        x, y, z = i % size[0], i // size[0] % size[1], i // size[0] // size[1]
                        own = (x, y, z)
                        note(
                            group=index, simd=simd + i // 32, quad=quad + i // 4,
                            thread_index_in_threadgroup=i, thread_index_in_simdgroup=i % 32,
                            thread_index_in_quadgroup=i % 4, simdgroup_index_in_threadgroup=i // 32,
                            quadgroup_index_in_threadgroup=i // 4,
                            simdgroups_per_threadgroup=-(-n // 32),
                            quadgroups_per_threadgroup=-(-n // 4),
                        )  # fmt: skip
                        for a, axis in enumerate("xyz"):
                            note(**{
                                f"thread_position_in_grid.{axis}": at[a] * group[a] + own[a],
                                f"thread_position_in_threadgroup.{axis}": own[a],
                                f"threadgroup_position_in_grid.{axis}": at[a],
                                f"threads_per_threadgroup.{axis}": size[a],
                                f"threads_per_grid.{axis}": grid[a],
                                f"grid_size.{axis}": grid[a],
                                f"threadgroups_per_grid.{axis}": counts[a],
                                f"dispatch_threads_per_threadgroup.{axis}": group[a],
                            })  # fmt: skip
                    simd += -(-n // 32)
                    quad += -(-n // 4)
                    index += 1
        self.of = {name: np.array(v, np.int64) for name, v in fields.items()}
        self.of["threads_per_simdgroup"] = np.full(len(self.of["group"]), 32, np.int64)
        self.threads = len(self.of["group"])
        self.groups = index
        self.simdgroups = simd


class Store:
    """Memory: a row per owner (thread, threadgroup or the launch), with the row of each thread."""

    def __init__(
        self, kind: p.AnyType, size: int, rows: Array, count: int, watched: bool = False,
        data: Array | None = None,
    ) -> None:  # fmt: skip
        shape: tuple[int, ...] = (count, size)
        if isinstance(kind, p.Vector):
            shape += (kind.lanes,)
        self.data = np.zeros(shape, kind.dtype) if data is None else data
        self.defined = np.full((count, size), data is not None)
        self.rows = rows
        self.kind = kind
        self.size = size
        self.watched = watched
        if watched:  # who read and wrote each element since the last barrier: -1 nobody, -2 several
            self.reader = np.full((count, size), -1)
            self.reader_simd = np.full((count, size), -1)
            self.writer = np.full((count, size), -1)
            self.added = np.zeros((count, size), bool)


@dataclass
class Place:
    """Elements of memory, one for each active thread."""

    store: Store
    columns: Array
    letters: list[int] | None = None
    component: Array | None = None


@dataclass
class Pointer:
    store: Store
    offsets: Array  # of every thread


@dataclass
class Frame:
    """A running function: who has returned, and what."""

    result: Array | None
    returned: list[Array] = field(default_factory=list)


@dataclass
class Round:
    """A running loop: who has left it, and who skips the rest of this round."""

    left: list[Array] = field(default_factory=list)
    skipped: list[Array] = field(default_factory=list)


NOBODY = np.zeros(0, np.int64)


def join(parts: list[Array]) -> Array:
    parts = [a for a in parts if len(a)]
    if not parts:
        return NOBODY
    return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
