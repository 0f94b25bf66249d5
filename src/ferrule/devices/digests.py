"""What the keys of cached kernels say of ferrule itself: digests of the dialect's header, and of
what turns a kernel into text."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from .. import cache

_PACKAGE = Path(__file__).resolve().parent.parent
INCLUDE = _PACKAGE / "include"

_NOUNS = ("dtypes.py", "kernel.py", "spec.py", "unit.py")  # what texts are made of


@lru_cache(maxsize=1)
def header_digest() -> str:
    """A digest of the dialect's header."""
    return digest(_PACKAGE, header_files(_PACKAGE))


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """A digest of what turns a kernel into text, and of what says how that is compiled."""
    return digest(_PACKAGE, generator_files(_PACKAGE))


def header_files(package: Path) -> list[str]:
    """The files of the header, by their paths in ``package``."""
    return _within(package, "include", ".h")


def generator_files(package: Path) -> list[str]:
    """The files that decide what text a kernel becomes, by their paths in ``package``."""
    builders = _within(package, "devices", "build.py")
    return [*_within(package, "source", ".py"), *builders, *_NOUNS]


def digest(package: Path, paths: list[str]) -> str:
    """A digest of files: of their paths in ``package`` and of what they hold.

    Not of their times: it is the same wherever ferrule is installed, so that kernels can be
    carried.
    """
    parts: list[str | bytes] = []
    for path in paths:
        # Path.read_bytes takes twice as long.
        with open(os.path.join(package, path), "rb", buffering=0) as file:
            parts += [path, file.read()]
    return cache.digest(*parts)


def _within(package: Path, folder: str, suffix: str) -> list[str]:
    """The files of a folder and of the folders in it; by ``/`` on every system."""
    paths = []
    for at, _, names in os.walk(package / folder):
        room = Path(at).relative_to(package).as_posix()
        paths += [f"{room}/{name}" for name in names if name.endswith(suffix)]
    return sorted(paths)
