"""The keys of cached kernels, and what is kept under them.

The disk cache knows a kernel twice: a request (a kernel, what it is called with, and digests of
ferrule itself) leads to the digest of a text without that text being written; that digest leads to
the machine code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import cache
from ..source import Note
from ..spec import Spec

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


def request_text(spec: Spec, inputs: list[Any], *rest: object) -> str:
    """A kernel and what it is called with: equal for equal binaries, different for different ones.

    Args:
        inputs: what of each input the text depends on.
        rest: what else it does.
    """
    k = spec.kernel
    return json.dumps(
        [
            [k.language, k.name, k.input_names, k.output_names, k.source, k.header],
            [k.atomic_outputs, k.math_mode, k.portable],
            inputs,
            [d.name for d in spec.outputs],
            [[n, type(v).__name__, str(v)] for n, v in spec.template],
            *rest,
        ]
    )


def answer(how: object, key: str, notes: Iterable[Note]) -> bytes:
    """What is kept under a request: how the kernel runs, its code's key, what Apple refuses."""
    return json.dumps([how, key, [*notes]]).encode()


def answered(request: str) -> tuple[Any, list[Note], bytes] | None:
    """What a request leads to: how the kernel runs, what Apple refuses, and its code."""
    disk = cache.default()
    record = disk.get(request)
    if record is None:
        return None
    how, key, notes = json.loads(record)
    code = disk.get(key)
    return None if code is None else (how, [Note(*note) for note in notes], code)


def packed(head: object, payload: bytes) -> bytes:
    """Machine code as the cache has it, with what is known of it."""
    return json.dumps(head).encode() + b"\0" + payload


def unpacked(data: bytes) -> tuple[Any, bytes]:
    """The reverse of `packed`."""
    head, payload = data.split(b"\0", 1)
    return json.loads(head), payload


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
