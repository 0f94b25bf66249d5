"""Headers precompiled, once for the kernels of a test run: the dialect's and, for what `mx.compile`
fuses on the CPU, MLX's. To parse them takes longer than the rest of most kernels.

Texts, flags and results are the same. What a compiler refuses is given to it again as kernels of
users are, so that errors are those that users see.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import pytest

from ferrule import cache
from ferrule.errors import CompilerFailed, ToolchainError
from ferrule.tools.nvrtc import Nvrtc
from ferrule.tools.toolchain import Compiler, find_compiler

_BEGIN = re.compile(rb'((?:(?://|#define )[^\n]*\n|\n)*)#include "ferrule.h"\n')
# For libraries whose functions are called as those of another one that is loaded for all, such as
# the scheduler of `warps`: they find their own.
OWN_SYMBOLS = "-Wl,-Bsymbolic"
_FEW = 2  # kernels of a kind that do not pay for a precompiled header


def quick(flags: tuple[str, ...], optimised: bool) -> tuple[str, ...]:
    """Flags that compile sooner: without libraries, of which kernels need none, and, unless the
    kernels are to be optimised, at -Og and without unrolling, which take a third of the time.

    The flags are part of the keys of the disk cache: no user's kernel is found there in this form.
    """
    if not optimised:
        level = "-Og" if find_compiler().kind == "gcc" else "-O1"  # which clang has for both
        flags = tuple(level if f == "-O3" else f for f in flags if f != "-funroll-loops")
    if find_compiler().kind != "gcc":
        return flags
    for name in ("libgcc_s.so.1", "libm.so.6"):  # for what a processor has no instruction for
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    return (*flags, "-nostdlib")


@contextlib.contextmanager
def headers(folder: Path) -> Iterator[None]:
    """g++ and NVRTC use precompiled headers, which lie in a folder, inside a ``with`` block."""
    seen: collections.Counter[tuple[Any, ...]] = collections.Counter()
    compiled, compiled_unit = Compiler._compile, Nvrtc.compile_unit
    made = Compiler._made

    def made_(
        self: Compiler, files: dict[str, bytes], flags: list[str], output: str, *rest: Any
    ) -> tuple[bytes, str]:
        begin = _BEGIN.match(files.get("kernel.cpp", b""))
        if self.kind != "gcc" or begin is None or output != "kernel.o":
            return made(self, files, flags, output, *rest)
        defines = tuple(re.findall(r"^#define (\w+) (.*)$", begin[1].decode(), re.MULTILINE))
        path = dialect_header(folder, self, flags[:-1], defines)  # the last one is the text's name
        with contextlib.suppress(CompilerFailed, ToolchainError):
            return made(self, files, [f"-I{path}", *flags], output, *rest)
        return made(self, files, flags, output, *rest)

    def compile_(self: Compiler, text: bytes, flags: list[str], *rest: Any) -> bytes:
        begin = _BEGIN.match(text)
        if self.kind != "gcc" or begin is None:
            return compiled(self, text, flags, *rest)
        defines = tuple(re.findall(r"^#define (\w+) (.*)$", begin[1].decode(), re.MULTILINE))
        key = (self.identity, *flags, *defines)
        seen[key] += 1
        if seen[key] <= _FEW:
            return compiled(self, text, flags, *rest)
        path = dialect_header(folder, self, flags, defines)
        with contextlib.suppress(CompilerFailed, ToolchainError):
            return compiled(self, text, [f"-I{path}", *flags], *rest)
        return compiled(self, text, flags, *rest)

    def compile_unit(
        self: Nvrtc, source: str, name: str, options: Sequence[str], headers: Mapping[str, str],
        functions: Sequence[str],
    ) -> tuple[bytes, str, list[str]]:  # fmt: skip
        if self.version >= (12, 8) and not headers and '#include "ferrule.h"' in source:
            more = [*options, "--pch", f"--pch-dir={folder}", "--pch-messages=false"]
            with contextlib.suppress(CompilerFailed, ToolchainError):
                return compiled_unit(self, source, name, more, headers, functions)
        return compiled_unit(self, source, name, options, headers, functions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "_compile", compile_)
        patch.setattr(Compiler, "_made", made_)
        patch.setattr(Nvrtc, "compile_unit", compile_unit)
        yield


def dialect_header(
    folder: Path, compiler: Compiler, flags: Sequence[str], defines: Sequence[tuple[str, str]]
) -> Path:
    """A folder with the dialect's header for these flags, precompiled."""
    arguments = [*flags, *(f"-D{name}={value}" for name, value in defines)]
    return header(folder, compiler, arguments, '#include "ferrule.h"\n', "ferrule.h")


def header(
    folder: Path, compiler: Compiler, flags: Sequence[str], text: str, name: str = "begin.h"
) -> Path:
    """A folder with ``begin.h``, which has this text, and with that precompiled as the header of
    this name where the compiler is g++: one process makes it, all use it."""
    folder /= cache.digest(compiler.identity, *flags, text)
    made, begin = folder / f"{name}.gch", folder / "begin.h"
    if not (made if compiler.kind == "gcc" else begin).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "lock"):
            if not begin.exists():
                begin.write_text(text)
            if compiler.kind == "gcc" and not made.exists():
                subprocess.run(
                    [*compiler.argv, *flags, "-x", "c++-header", "begin.h", "-o", "new.gch"],
                    cwd=folder, capture_output=True, check=False,
                )  # fmt: skip
                with contextlib.suppress(FileNotFoundError):
                    (folder / "new.gch").replace(made)
    return folder


def mlx_header() -> None:
    """Beside the kernels that MLX compiles, where its own cache has them, lies their header.

    They include it in quotes, which looks there first.
    """
    found = importlib.util.find_spec("mlx")
    gcc = shutil.which("g++")
    if "mlx.core" not in sys.modules or found is None or gcc is None or sys.platform != "linux":
        return
    name = "mlx/backend/cpu/compiled_preamble.h"
    folder = Path(next(iter(found.submodule_search_locations or [])), "include")
    version = sys.modules["mlx.core"].__version__
    made = Path(tempfile.gettempdir(), "mlx", version, "cpu", f"{name}.gch")
    if made.exists() or not (folder / name).exists():
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    new = made.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            gcc, "-std=c++17", "-O3", "-w", "-fPIC", "-x", "c++-header", f"-I{folder}",
            str(folder / name), "-o", str(new),
        ],
        capture_output=True, check=False,
    )  # fmt: skip
    with contextlib.suppress(FileNotFoundError):
        new.replace(made)
