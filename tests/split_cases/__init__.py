"""Bodies that are easy to get wrong where threads become loops over lanes, and what they give.

They hold what decides whether a variable is the same in all lanes, where a loop over lanes must
end, and which lanes go on: ``tests/source/test_ways.py`` runs each in every way and compares.
"""

from __future__ import annotations

from . import (
    branches,
    divisions,
    fallbacks,
    kept,
    loops,
    masks,
    names,
    operations,
    positions,
    shared,
    strides,
    texts,
    writes,
)
from .model import INPUTS, SOLID, WIDE, Case, Shape, Threads, threads

__all__ = ["CASES", "INPUTS", "SOLID", "WIDE", "Case", "Shape", "Threads", "threads"]

CASES: list[Case] = [
    *writes.CASES,
    *names.CASES,
    *kept.CASES,
    *texts.CASES,
    *divisions.CASES,
    *positions.CASES,
    *branches.CASES,
    *loops.CASES,
    *strides.CASES,
    *masks.CASES,
    *shared.CASES,
    *operations.CASES,
    *fallbacks.CASES,
]
