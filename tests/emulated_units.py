"""Units of CUDA on the CPU: their steps as they are declared, one after the other, with the headers
of tests/native. What lies around arrays, and scratch at first, is NaN or -1, and must stay so."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import numpy as np

import precompiled
from ferrule import cache
from ferrule.operators.unit_parts import RunStep, UnitText
from ferrule.tools import toolchain

NATIVE = Path(__file__).parent / "native"
_HEADERS = ("products.h", "warp_groups.h", "experts.h")
_FLAGS = ["-Og", "-w", "-std=c++20", "-shared", "-fPIC", precompiled.OWN_SYMBOLS]
_DECLARED = re.compile(r"__shared__ (\w+) ([^;]+);")
_GUARD = 512  # bytes around an array
_BYTES = {"int32": 4, "float32": 4, "T": 2}


def _of_block(declared: re.Match[str]) -> str:
    """Arrays in shared memory that a kernel declares, of which each block has its own."""
    arrays = (re.fullmatch(r"(\w+)(\[\w+\])", text).groups() for text in declared[2].split(", "))  # type: ignore[union-attr]
    of = declared[1]
    return " ".join(f"auto& {a} = of_block<{of}{n}>(__COUNTER__);" for a, n in arrays)


def compiled(
    unit: UnitText, machine: Sequence[str], types: Mapping[str, str], constants: Mapping[str, int],
    bf16: bool, headers: Path,
) -> ctypes.CDLL:  # fmt: skip
    """The library of a unit, made once for all processes of a test run.

    Args:
        machine: the parts of its text that the headers of tests/native have.
        types: the rule's dtype variables, besides T.
        constants: names in the template.
        bf16: of which 16-bit floats T is.
        headers: a folder that all processes have.
    """
    text = unit.source
    for part in machine:
        assert part in text
        text = text.replace(part, "")
    text = _DECLARED.sub(_of_block, text)
    given = "".join(f"using {name} = {type_};\n" for name, type_ in types.items())
    for name, value in unit.template.items():
        given += f"constexpr int {name} = {eval(str(value), {}, dict(constants))};\n"
    begin = f"constexpr bool BF16 = {str(bf16).lower()};\n#include <cstdint>\n"
    begin += "".join(f'#include "{NATIVE / name}"\n' for name in _HEADERS)
    starts = "".join(
        f'extern "C" void run_{name}(const int64_t* words, const int64_t* bytes, const int* sizes)'
        f" {{ launch_step({name}, words, bytes, sizes); }}\n"
        for name in dict.fromkeys(step.function for step in _steps(unit))
    )
    text = f'#include "begin.h"\n#define __CUDA_ARCH_FEAT_SM90_ALL\n{given}{text}{starts}'
    compiler = toolchain.find_compiler()
    folder = headers / cache.digest(compiler.identity, *_FLAGS, begin, text)
    folder.mkdir(exist_ok=True)
    library = folder / "unit.so"
    with filelock.FileLock(folder / "lock"):
        if not library.exists():
            begins = precompiled.header(headers, compiler, _FLAGS, begin)
            (folder / "unit.cpp").write_text(text)
            argv = [*compiler.argv, f"-I{begins}", *_FLAGS, str(folder / "unit.cpp")]
            subprocess.run([*argv, "-o", str(folder / "new.so")], check=True)
            (folder / "new.so").replace(library)
    return ctypes.CDLL(str(library))


def _steps(unit: UnitText) -> list[RunStep]:
    return [step for step in unit.steps if isinstance(step, RunStep)]


class Array:
    """Bytes whose first is so many behind a multiple of 256, and what lies around them.

    Args:
        content: its bytes, or how many there are.
    """

    def __init__(self, content: np.ndarray | int, by: int = 0) -> None:
        size = content if isinstance(content, int) else content.nbytes
        self._memory = np.full(size + 2 * _GUARD + 256, 0xFF, np.uint8)
        begin = _GUARD + (-self._memory.ctypes.data - _GUARD) % 256 + by
        self._around = self._memory[:begin], self._memory[begin + size :]
        self.bytes = self._memory[begin : begin + size]
        self._given = None if isinstance(content, int) else content.reshape(-1).view(np.uint8)
        if self._given is not None:
            self.bytes[:] = self._given

    def check(self) -> None:
        """Nothing is written around it, or to what is given."""
        assert all((part == 0xFF).all() for part in self._around)
        assert self._given is None or (self.bytes == self._given).all()


def run(
    unit: UnitText, library: ctypes.CDLL, arrays: Mapping[str, Array], sizes: Mapping[str, int],
    *, multiprocessors: int = 2, backwards: bool = False, steps: slice = slice(None),
) -> dict[str, Array]:  # fmt: skip
    """Carries out the steps of a unit, and checks what lies around arrays.

    Args:
        arrays: those of the rule, outputs too.
        sizes: of the rule.
        backwards: the last thread of blocks is the first that runs.

    Returns:
        All arrays, with scratch.
    """
    every = dict(arrays)
    names: dict[str, Any] = {**sizes, "sm_count": multiprocessors, "min": min, "max": max}
    names["ceildiv"] = lambda a, b: -(-a // b)
    if "expert_map" in arrays:
        names["expert_map"] = SimpleNamespace(size=sizes["N"])

    def value(expression: Any) -> int:
        return int(eval(str(expression), {"__builtins__": {}}, names))

    def three(expression: Any) -> list[int]:
        if not isinstance(expression, tuple):
            expression = (expression,)
        found = [value(1 if one is None else one) for one in expression]
        return found + [1] * (3 - len(found))

    for name, declared in unit.scratch.items():
        dtype, dims = declared[:-1].split("[", 1)
        every[name] = Array(math.prod(eval(f"[{dims}]", {}, names)) * _BYTES[dtype])
    for step in _steps(unit)[steps]:
        if step.when is not None and not value(step.when):
            continue
        words, sizes_of = [], []
        for argument in step.arguments:
            array = every.get(argument)
            text = re.sub(r"^int(32|64) ", "", argument)
            words.append(value(text) if array is None else array.bytes.ctypes.data)
            sizes_of.append(0 if array is None else array.bytes.size)
        launch = three(step.blocks) + three(step.cluster)
        launch += [value(step.block), value(step.shared_memory), int(backwards)]
        count = len(words)
        getattr(library, f"run_{step.function}")(
            (ctypes.c_int64 * count)(*words), (ctypes.c_int64 * count)(*sizes_of),
            (ctypes.c_int * len(launch))(*launch),
        )  # fmt: skip
        for array in every.values():
            array.check()
    return every
