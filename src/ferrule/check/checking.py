"""Checked runs: kernels that are run inside of a block are watched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..devices import protocol as devices
from ..tools import fastcall
from .watched import Options
from .watching import Findings, Watch


@contextmanager
def checking(
    *,
    kinds: Iterable[str] | None = None,
    kernels: Iterable[str] | None = None,
    sample: int | None = None,
    baseline: str | os.PathLike[str] | None = None,
) -> Iterator[Findings]:
    """Check the kernels that are run inside of the block."""
    before = devices.watcher
    watch = Watch(Options(sample=sample))
    with fastcall.bypassed():
        devices.watcher = watch
        try:
            yield watch.findings
        finally:
            devices.watcher = before
