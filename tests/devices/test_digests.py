"""The digests of ferrule's own files in the keys of cached kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ferrule
from ferrule.devices.digests import digest, generator_files, header_files

PACKAGE = Path(ferrule.__file__).resolve().parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of ferrule's sources."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    return Path(shutil.copytree(PACKAGE, tmp_path / "ferrule", ignore=ignored))


def keys(package: Path) -> tuple[str, str]:
    return digest(package, header_files(package)), digest(package, generator_files(package))


@pytest.mark.parametrize("which", [0, 1], ids=["header", "generator"])
def test_each_byte_counts(package: Path, which: int) -> None:
    """One altered byte of any file that decides a kernel's text gives another key."""
    files = (header_files, generator_files)[which](package)
    seen = {keys(package)[which]}
    for path in files:
        data = bytearray((package / path).read_bytes() or b" ")
        data[len(data) // 2] ^= 1
        (package / path).write_bytes(data)
        seen.add(keys(package)[which])
    assert len(seen) == len(files) + 1


def test_all_that_writes_text_counts(package: Path) -> None:
    """The files are those of the header and of `source`, rooms in them included, and builders."""
    headers, generators = header_files(package), generator_files(package)
    assert headers == sorted(
        p.relative_to(package).as_posix() for p in (package / "include").rglob("*.h")
    )
    sources = {p.relative_to(package).as_posix() for p in (package / "source").rglob("*.py")}
    assert sources < set(generators)
    builders = {p for p in generators if p.startswith("devices/")}
    assert len(builders) == 3
    assert len(headers) > 15


def test_rooms_count(package: Path) -> None:
    """A file that moves into a room of its folder counts there, and is not the one it was."""
    before = keys(package)
    (package / "source" / "threads").mkdir()
    shutil.move(package / "source" / "fibers.py", package / "source" / "threads" / "fibers.py")
    (package / "include" / "cuda").mkdir()
    shutil.move(package / "include" / "cuda_grid.h", package / "include" / "cuda" / "cuda_grid.h")
    moved = keys(package)
    assert not set(moved) & set(before)
    (package / "source" / "threads" / "fibers.py").unlink()
    (package / "include" / "cuda" / "cuda_grid.h").unlink()
    assert not set(keys(package)) & {*before, *moved}
