"""Launches that need not be watched for accesses outside: the text shows that there are none."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...source import cpp
from ...source.accesses.inside import Ends, all_inside
from ...source.accesses.model import Accesses, Unsupported
from ...source.accesses.read import accesses
from ...spec import Facts, Launch, Spec, extent

_SIMDGROUP, _QUADGROUP = 32, 4
# Words by which a text may do more than is seen at a glance; such a launch is watched.
_ODD = re.compile(
    r"\b(?:struct|class|union|enum|namespace|using|typedef|static|volatile|goto|switch|template)\b"
    r"|(?<!&)&(?!&)|\[\s*[=&\]]"
)


def is_shown_inside(
    spec: Spec, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch
) -> bool:
    """Whether a Metal body, in this launch, certainly accesses nothing outside of its arrays, and
    ends."""
    numbers = tuple(_number(fact) for fact in inputs)
    arrays = tuple((fact.shape, fact.strides, bool(fact.pointer)) for fact in (*inputs, *outputs))
    return _is_shown(spec, launch.grid, launch.threadgroup, arrays, numbers)


@lru_cache(maxsize=1024)
def _is_shown(
    spec: Spec,
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
    arrays: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...],
    numbers: tuple[int | None, ...],
) -> bool:
    names = (*spec.kernel.input_names, *spec.kernel.output_names)
    given = dict(_positions(grid, threadgroup))
    lengths: dict[str, int] = {}
    for name, (shape, strides, there) in zip(names, arrays, strict=True):
        first, count = extent(shape, strides)
        if first:  # some elements lie before the one that a subscript counts from
            return False
        lengths[name] = count if there else 0
        given |= {f"{name}_shape[{d}]": (n, n) for d, n in enumerate(shape)}
        given |= {f"{name}_strides[{d}]": (n, n) for d, n in enumerate(strides)}
    given |= {name: (n, n) for name, n in zip(names, numbers, strict=False) if n is not None}
    return all_inside(_accesses(spec), given, lengths)


@lru_cache(maxsize=256)
def _accesses(spec: Spec) -> Accesses:
    prepared = cpp.prepare(spec)
    if odd := _ODD.search(f"{prepared.text.header}\n{prepared.text.source}"):
        return Accesses((), (), (Unsupported(1, odd[0]),))
    return accesses(prepared)


def _number(fact: Facts) -> int | None:
    """What an input is that is an integer."""
    if fact.shape or fact.dtype.kind not in "iu" or not fact.pointer:
        return None
    data = ctypes.string_at(fact.pointer, fact.dtype.itemsize)
    return int(np.frombuffer(data, fact.dtype.numpy)[0])


def _positions(grid: Sequence[int], threadgroup: Sequence[int]) -> dict[str, Ends]:
    """Between what the thread attributes are."""
    given: dict[str, Ends] = {}
    ragged = False
    for axis, g, t in zip("xyz", grid, threadgroup, strict=True):
        groups, least = -(-g // t), g % t or t
        ragged = ragged or least < t
        for name, ends in {
            "thread_position_in_grid": (0, g - 1),
            "thread_position_in_threadgroup": (0, min(g, t) - 1),
            "threadgroup_position_in_grid": (0, groups - 1),
            "threads_per_grid": (g, g),
            "grid_size": (g, g),
            "threads_per_threadgroup": (least, min(g, t)),
            "dispatch_threads_per_threadgroup": (t, t),
            "threadgroups_per_grid": (groups, groups),
        }.items():
            given[f"{name}.{axis}"] = ends
    threads = math.prod(threadgroup)
    for group, size in (("simdgroup", _SIMDGROUP), ("quadgroup", _QUADGROUP)):
        many = -(-threads // size)
        given[f"{group}_index_in_threadgroup"] = 0, many - 1
        given[f"{group}s_per_threadgroup"] = 1 if ragged else many, many
        given[f"dispatch_{group}s_per_threadgroup"] = many, many
        given[f"thread_index_in_{group}"] = 0, min(size, threads) - 1
    given["thread_index_in_threadgroup"] = 0, threads - 1
    return given
