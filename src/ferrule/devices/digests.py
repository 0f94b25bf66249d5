"""What the keys of cached kernels say of ferrule itself: digests of the dialect's header, and of
what turns a kernel into text."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from .. import cache

_PACKAGE = Path(__file__).resolve().parent.parent
INCLUDE = _PACKAGE / "include"


@lru_cache(maxsize=1)
def header_digest() -> str:
    """A digest of the dialect's header."""
    return _digest(INCLUDE, ".h")


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """A digest of what turns a kernel into text."""
    return _digest(_PACKAGE / "source", ".py")


def _digest(folder: Path, suffix: str) -> str:
    # Of what the files hold, not of their times: it is the same wherever ferrule is installed, so
    # that kernels can be carried. Path.glob and Path.read_bytes take twice as long.
    parts: list[str | bytes] = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(suffix):
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                parts += [name, file.read()]
    return cache.digest(*parts)
