"""Checked runs: kernels that are run inside of a block are watched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from .findings import Finding


class Findings(list[Finding]):
    """What was found, and what was done to find it.

    Attributes:
        notes: remarks, such as ``"sampled 64 of 10000 threadgroups"``.
        launches: how many launches were checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.launches = 0


@contextlib.contextmanager
def checking(
    *,
    kinds: Iterable[str] | None = None,
    kernels: Iterable[str] | None = None,
    sample: int | None = None,
    baseline: str | os.PathLike[str] | None = None,
) -> Iterator[Findings]:
    """Check the kernels that are run inside of the block."""
    yield Findings()
