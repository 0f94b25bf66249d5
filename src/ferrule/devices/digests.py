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
    return _digest(_within(INCLUDE, ".h"))


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """A digest of what turns a kernel into text, and of what says how that is compiled."""
    builders = _within(_PACKAGE / "devices", "_build.py")
    return _digest([*_within(_PACKAGE / "source", ".py"), *builders, str(_PACKAGE / "kernel.py")])


def _within(folder: Path, suffix: str) -> list[str]:
    return [
        os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(suffix)
    ]


def _digest(paths: list[str]) -> str:
    # Of what the files hold, not of their times: it is the same wherever ferrule is installed, so
    # that kernels can be carried. Path.glob and Path.read_bytes take twice as long.
    parts: list[str | bytes] = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            parts += [os.path.basename(path), file.read()]
    return cache.digest(*parts)
