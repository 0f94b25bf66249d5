"""Kernels of several tests, compiled by one run of g++: half of its time is the same for each.

Before a test of a module that is marked ``together``, the next tests of that module are rehearsed:
they are called with launches that do nothing. The kernels that they would have launched are
compiled as one text, each in a namespace of its own, and linked one by one into the disk cache,
where the tests find them. What does not compile so is compiled when its own test comes to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import on_cuda
import warps
from ferrule import cache
from ferrule.devices import portability
from ferrule.devices.cpu import program as cpu
from ferrule.devices.cpu.form import Form, form_of
from ferrule.devices.digests import INCLUDE
from ferrule.devices.protocol import get
from ferrule.spec import Launch, Spec
from ferrule.tools import fastcall
from ferrule.tools.toolchain import Compiler, find_compiler

AHEAD = 24  # tests that are rehearsed at a time

_TEXT = re.compile(
    r"(?P<begin>(?://.*\n|#define .*\n|\n)*)#include \"ferrule.h\"\n"
    r"namespace fr \{ namespace user \{(?P<body>.*)\} \}  // namespace fr::user\s*",
    re.DOTALL,
)
# What a kernel would leave to the next ones: of macros it defines, those alone are known.
_APART = re.compile(
    r"#\s*(?:undef|include)|#\s*pragma\s+(?!unroll|nounroll|GCC ivdep|GCC unroll)|_Pragma|fr::user"
)
_MACRO = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)
# How a library knows the sizes of its threadgroup memory: by a section, which here is the kernel's.
_SHARED = re.compile(r"#define FR_SHARED\(.*?\n\}  // namespace fr\n", re.DOTALL)
_OF_SHARED = re.compile(r"\b((?:__start_|__stop_|)fr_shared_\w+|shared_memory)\b")
_EXPORTED = re.compile(
    r"^(FR_EXPORT [^\n]*?\b)(fr_entry|fr_units|fr_alone|fr_shared)\b", re.MULTILINE
)


class Wanted(NamedTuple):
    """What would have been launched: a kernel, and how it is compiled."""

    spec: Spec
    form: Form
    mode: str
    flags: tuple[str, ...]


class Missing(NamedTuple):
    """A library that the cache does not have."""

    key: str
    text: str
    flags: tuple[str, ...]


class _Captured(BaseException):
    """Instead of a run of the compiler."""

    def __init__(self, text: str, flags: Sequence[str]) -> None:
        self.text, self.flags = text, tuple(flags)


def rehearse(item: pytest.Item, seed: Callable[[], None], header: Callable[..., Path]) -> None:
    """Compile what this test and the next ones of its module will launch, if it was not yet.

    Args:
        item: a test that is about to be called.
        seed: makes random numbers what they are at the start of each test.
        header: gives the folder of a precompiled header (`precompiled.dialect_header`).
    """
    marker = item.get_closest_marker("together")
    if marker is None or find_compiler().kind != "gcc" or _linker() is None:
        return
    done: set[str] = item.session.__dict__.setdefault("_rehearsed", set())
    if item.nodeid in done:
        return
    wanted: dict[Wanted, None] = {}
    with _nothing_launched(wanted), on_cuda.together(), warps.together():
        for other in _following(item, done):
            done.add(other.nodeid)
            arguments = _arguments(other, item, marker.args)
            if arguments is not None:
                seed()
                with (
                    pytest.MonkeyPatch.context() as patch,
                    contextlib.suppress(Exception, pytest.fail.Exception, pytest.skip.Exception),
                ):
                    patch.setattr(cpu, "_FLAGS", cpu._FLAGS)  # some change them
                    other.function(**arguments)
        missing = _missing(wanted)
    seed()
    _compile(find_compiler(), missing, header)


def _following(item: pytest.Item, done: set[str]) -> list[Any]:
    """This test and the next ones in its module."""
    items: list[Any] = item.session.items
    places = item.session.__dict__.setdefault("_places", {})
    if not places:
        places.update({other.nodeid: i for i, other in enumerate(items)})
    start = places[item.nodeid]
    return [
        other for other in items[start : start + AHEAD]
        if other.path == item.path and other.nodeid not in done
        and other.get_closest_marker("together")
    ]  # fmt: skip


def _arguments(other: Any, item: Any, shared: Sequence[str]) -> dict[str, Any] | None:
    """What a test is called with; None where it has a fixture that only its own call may have."""
    if getattr(other.function, "is_hypothesis_test", False):
        return None  # it would look for the smallest example that fails
    callspec = getattr(other, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    arguments = {}
    for name in other._fixtureinfo.argnames:
        if name in parameters:
            arguments[name] = parameters[name]
        elif name in item.funcargs and (name in shared or _lasting(other, name)):
            arguments[name] = item.funcargs[name]
        else:
            return None
    return arguments


def _lasting(item: Any, name: str) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return bool(definitions) and definitions[-1].scope != "function"


@contextlib.contextmanager
def _nothing_launched(wanted: dict[Wanted, None]) -> Iterator[None]:
    """Launches on the CPU are noted and do nothing, and nothing is warned of, in the block."""

    def launch(
        self: cpu.CpuProgram, inputs: Any, outputs: Any, launch: Launch, stream: int = 0
    ) -> None:
        threads = self._atomic_threads() if self._atomics else 0
        form = form_of(launch, threads)
        wanted[Wanted(self._spec, form, cpu._mode.get(), cpu._FLAGS)] = None

    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        fastcall.bypassed(),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(cpu.CpuProgram, "launch", launch)
        # Nobody reads why a rehearsal fails.
        patch.setattr("_pytest.assertion.util._reprcompare", None)
        patch.setattr(portability.Portability, "say", lambda *_: None)
        yield


def _missing(wanted: dict[Wanted, None]) -> list[Missing]:
    """The texts that are to be compiled; the cache gets all that is known of them."""
    missing: list[Missing] = []

    def capture(self: Compiler, text: bytes, flags: Sequence[str], *_: Any) -> bytes:
        raise _Captured(text.decode(), flags)

    def get_or_make(self: cache.Cache, key: str, make: Callable[[], bytes], *_: Any) -> bytes:
        payload = self.get(key)
        if payload is None:
            try:
                payload = make()
            except _Captured as captured:
                missing.append(Missing(key, captured.text, captured.flags))
        return payload or b""

    device: Any = get("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "_compile", capture)
        patch.setattr(cache.Cache, "get_or_make", get_or_make)
        for kernel in wanted:
            patch.setattr(cpu, "_FLAGS", kernel.flags)
            with cpu.running(kernel.mode), contextlib.suppress(Exception):
                device._binary(kernel.spec, kernel.form)
    return missing


def _compile(compiler: Compiler, missing: Sequence[Missing], header: Callable[..., Path]) -> None:
    groups = defaultdict(dict)
    for library in missing:
        match = _TEXT.fullmatch(library.text)
        if match is not None and not _APART.search(match["body"]):
            defines = tuple(re.findall(r"^#define (\w+) (.*)$", match["begin"], re.MULTILINE))
            groups[library.flags, defines][library.key] = match["body"]
    for (flags, defines), bodies in groups.items():
        if len(bodies) > 1:
            _group(compiler, bodies, flags, header(compiler, flags, defines), defines)


def _group(
    compiler: Compiler, bodies: dict[str, str], flags: Sequence[str], header: Path,
    defines: Sequence[tuple[str, str]],
) -> None:  # fmt: skip
    """Compile the bodies as one text, and link each by itself."""
    text = "".join(f"#define {name} {value}\n" for name, value in defines)
    text += '#include "ferrule.h"\n'
    for i, body in enumerate(bodies.values()):
        text += _apart(i, body)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cpp").write_text(text)
        options = [flag for flag in flags if flag not in ("-shared", "-nostdlib")]
        command = [*compiler.argv, f"-I{header}", *options, "-c", "kernels.cpp"]
        if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
            return
        for i, key in enumerate(bodies):
            exported = {name for _, name in _EXPORTED.findall(bodies[key])}
            names = [f"--defsym={name}={name}_{i}" for name in sorted(exported)]
            command = [str(_linker()), "-shared", *names, "kernels.o", "-o", f"{i}.so"]
            subprocess.run(command, cwd=folder, check=True)
            cache.default().put(key, Path(folder, f"{i}.so").read_bytes())


def _apart(i: int, body: str) -> str:
    """The text of the i-th kernel, with names that no other has."""
    shared = ""
    if "FR_SHARED(" in body:
        shared = "#undef FR_SHARED\n" + _OF_SHARED.sub(rf"\1_{i}", _shared())
        body = body.replace("fr::shared_memory(", f"fr::shared_memory_{i}(")
    body = _EXPORTED.sub(rf"\1\2_{i}", body)
    macros = "".join(f"#undef {name}\n" for name in dict.fromkeys(_MACRO.findall(body)))
    return f"{shared}namespace fr {{ namespace user {{ namespace k{i} {{{body}}} }} }}\n{macros}"


@functools.cache
def _shared() -> str:
    """What the dialect's header says of threadgroup memory."""
    match = _SHARED.search((INCLUDE / "cpu.h").read_text())
    assert match is not None
    return match[0]


@functools.cache
def _linker() -> str | None:
    return shutil.which("ld") if os.uname().sysname == "Linux" else None
