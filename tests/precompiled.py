"""The dialect's header precompiled, once for the kernels of a test run: to parse it takes longer
than the rest of most kernels.

Texts, flags and results are the same. What a compiler refuses is given to it again as kernels of
users are, so that errors are those that users see.
"""

from __future__ import annotations

import collections
import contextlib
import re
import subprocess
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
