"""Headers precompiled, once for the kernels of a test run: the dialect's and, for what `mx.compile`
fuses on the CPU, MLX's. To parse them takes longer than the rest of most kernels.

Texts, flags and results are the same. What a compiler refuses is given to it again as kernels of
users are, so that errors are those that users see.
"""

from __future__ import annotations

import collections
import contextlib
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

import pytest

from ferrule.errors import CompilerFailed, ToolchainError
from ferrule.tools.nvrtc import Nvrtc
from ferrule.tools.toolchain import Compiler

_BEGIN = re.compile(rb'((?:(?://|#define )[^\n]*\n|\n)*)#include "ferrule.h"\n')
_FEW = 2  # kernels of a kind that do not pay for a precompiled header


@contextlib.contextmanager
def headers(folder: Path) -> Iterator[None]:
    """g++ and NVRTC use precompiled headers, which lie in a folder, inside a ``with`` block."""
    seen: collections.Counter[tuple[Any, ...]] = collections.Counter()
    folders: dict[tuple[Any, ...], Path] = {}
    compiled, compiled_unit = Compiler._compile, Nvrtc.compile_unit

    def compile_(self: Compiler, text: bytes, flags: list[str], *rest: Any) -> bytes:
        begin = _BEGIN.match(text)
        if self.kind != "gcc" or begin is None:
            return compiled(self, text, flags, *rest)
        defines = tuple(re.findall(r"^#define (\w+) (.*)$", begin[1].decode(), re.MULTILINE))
        key = (self.identity, *flags, *defines)
        seen[key] += 1
        if seen[key] <= _FEW:
            return compiled(self, text, flags, *rest)
        if key not in folders:
            folders[key] = path = folder / f"g++{len(folders)}"
            path.mkdir()
            given = [*flags, *(f"-D{name}={value}" for name, value in defines)]
            (path / "begin.h").write_text('#include "ferrule.h"\n')
            subprocess.run(
                [*self.argv, *given, "-x", "c++-header", "begin.h", "-o", "ferrule.h.gch"],
                cwd=path, capture_output=True, check=False,
            )  # fmt: skip
        with contextlib.suppress(CompilerFailed, ToolchainError):
            return compiled(self, text, [f"-I{folders[key]}", *flags], *rest)
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
        patch.setattr(Nvrtc, "compile_unit", compile_unit)
        yield


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
