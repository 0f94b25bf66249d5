"""Every kernel of a test on the GPU, whosever arrays it is called with.

What stands in for the CPU copies the arrays to the GPU, launches there, and copies them back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from ferrule.devices import protocol as devices
from ferrule.devices.cpu.program import CpuDevice
from ferrule.devices.cuda.build import CudaBuild, Task
from ferrule.devices.cuda.device import gpu
from ferrule.devices.protocol import Binary
from ferrule.errors import CompilerFailed, DeviceError, ToolchainError
from ferrule.kernels.call import MetalKernel
from ferrule.source.cuda import launch as cuda_launch
from ferrule.spec import Facts, Launch, Spec
from ferrule.tools import driver, fastcall, nvrtc


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether there is a GPU and a driver that can be used."""
    try:
        return driver.driver().count > 0
    except DeviceError:
        return False


@lru_cache(maxsize=1)
def mlx_has_cuda() -> bool:
    """Whether there is an MLX whose GPU is CUDA's."""
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.is_available(mx.gpu)) and not mx.metal.is_available()


class Copied:
    """The memory of one array, on the GPU while in the ``with`` block."""

    def __init__(self, facts: Facts) -> None:
        size = facts.dtype.itemsize
        steps = [(n - 1) * s * size for n, s in zip(facts.shape, facts.strides, strict=True)]
        self.facts = facts
        self.low = facts.pointer + sum(s for s in steps if s < 0)
        self.bytes = sum(map(abs, steps)) + size if 0 not in facts.shape else 0
        self.call = driver.driver()._call
        self.address = ctypes.c_void_p()

    def __enter__(self) -> Copied:
        size = ctypes.c_size_t(max(self.bytes, 1))
        self.call("cuMemAlloc_v2", ctypes.byref(self.address), size)
        self.base = int(self.address.value or 0)
        self._copy("cuMemcpyHtoD_v2", self.base, self.low)
        return self

    def __exit__(self, *_: object) -> None:
        self.call("cuMemFree_v2", self.address)

    def _copy(self, function: str, to: int, start: int) -> None:
        if self.bytes:
            sizes = ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(self.bytes)
            self.call(function, *sizes)

    def moved(self) -> Facts:
        """The facts of the copy."""
        return self.facts._replace(
            pointer=self.facts.pointer - self.low + self.base, device="cuda:0"
        )

    def back(self) -> None:
        """Copy what the kernel wrote; waits for it, and raises what it did wrong."""
        self._copy("cuMemcpyDtoH_v2", self.low, self.base)


SECONDS = 60  # that a kernel of a test may take


def finished(found: driver.Driver) -> None:
    """Waits for what was launched in the current context.

    A kernel that hangs cannot be stopped, and after one that faulted CUDA refuses everything: both
    end this process. pytest-xdist says which test that was, and goes on with another process.

    Raises:
        DeviceError: a kernel faulted, and there is but this process.
    """
    end = time.monotonic() + SECONDS
    while (status := found._library.cuStreamQuery(None)) == 600:  # not ready
        if time.monotonic() > end:
            _leave(f"{found.last()[-1:]} hangs")
        time.sleep(2e-5)
    if status in driver.EARLIER and "PYTEST_XDIST_WORKER" in os.environ:
        _leave(str(found.broken(status, "a test failed")))
    found._call("cuCtxSynchronize")


def _leave(why: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST")
    print(f"\n{test}: {why}", file=sys.__stderr__, flush=True)
    os._exit(1)


class InPlaceOfTheCpu:
    """A device that tests have in place of the CPU; subclasses say how it runs kernels."""

    name = "cpu"

    def __init__(self) -> None:
        self._cpu = devices.get("cpu")

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        return self._cpu.text(spec, launch)

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        return self._cpu.compile(spec, launch)

    def program(self, spec: Spec) -> Any:
        # The refusals and warnings that the CPU gives belong to the kernel, wherever it runs.
        self._cpu.program(spec)
        return self.made(spec)

    def made(self, spec: Spec) -> Any:
        """The kernel where it runs."""
        raise NotImplementedError


class OnCuda(InPlaceOfTheCpu):
    """The first GPU."""

    def made(self, spec: Spec) -> OnCudaProgram:
        return OnCudaProgram(gpu("cuda:0").program(spec))


class OnCudaProgram:
    """A `CudaProgram` for arrays in the host's memory."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        found = driver.driver()
        copies = [Copied(fact) for fact in (*inputs, *outputs)]
        with found.current(found.context(0)):
            entered: list[Copied] = []
            try:
                for copy in copies:
                    entered.append(copy.__enter__())
                moved = [copy.moved() for copy in copies]
                n = len(inputs)
                self._program.launch(moved[:n], moved[n:], launch, 0)
                finished(found)
                for copy in copies[n:]:
                    copy.back()
            finally:
                for copy in entered:
                    copy.__exit__()

    def failure(self, status: int, *_: object) -> DeviceError:
        return DeviceError(str(status))


@contextmanager
def everything() -> Iterator[None]:
    """Kernels called with arrays on the CPU run on the GPU inside a ``with`` block."""
    with in_place_of_the_cpu(OnCuda()):
        yield


def _many(launch: Launch, each: int) -> bool:
    """In place of `cuda_launch.many`: half of the launches, not the large ones alone."""
    return launch.grid[0] < 2**31 and zlib.crc32(repr((launch.grid, each)).encode()) % 2 == 0


@contextmanager
def in_place_of_the_cpu(fake: Any) -> Iterator[None]:
    """Kernels called with arrays on the CPU run on another device inside a ``with`` block."""
    real, call = devices.get, MetalKernel.__call__

    def on_gpu(kernel: Any, **given: Any) -> Any:
        programs = kernel._programs  # those of the CPU
        kernel._programs = kernel.__dict__.setdefault("other_programs", {})
        try:
            return call(kernel, **given)
        finally:
            kernel._programs = programs

    with pytest.MonkeyPatch.context() as patch, fastcall.bypassed():
        patch.setattr(cuda_launch, "many", _many)
        patch.setattr(devices, "get", lambda name: fake if name == "cpu" else real(name))
        patch.setattr(MetalKernel, "__call__", on_gpu)
        yield


_TEXT = re.compile(r"((?:(?://.*|#define .*)?\n)*)#include \"ferrule.h\"\n(.*)", re.DOTALL)
_NAME = re.compile(r"__global__ void (\w+)\(")


class _Read(NamedTuple):
    """A text that NVRTC is to read."""

    made_of: tuple[str, ...]
    source: str
    options: tuple[str, ...]


class _Captured(BaseException):
    """Instead of a compilation."""


class Compiled:
    """NVRTC takes the text of every kernel that is loaded on the CPU.

    It reads it, and makes all templates, but no PTX, which would take as long again.
    """

    def __init__(self, library: nvrtc.Nvrtc) -> None:
        self._library = library
        self._taken: set[tuple[str, ...]] = set()
        self._later: list[_Read] | None = None
        self._program, self._compile_unit = CpuDevice.program, nvrtc.Nvrtc.compile_unit

    def program(self, device: CpuDevice, spec: Spec) -> Any:
        """In place of the CPU's."""
        program = self._program(device, spec)
        gpu_spec = replace(spec, inputs=tuple(i._replace(value=False) for i in spec.inputs))
        task = CudaBuild(gpu_spec, None).task(self._library, "compute_90")
        if task.made_of in self._taken:
            return program
        if self._later is not None:
            with contextlib.suppress(_Captured):
                self._run(task, functools.partial(self._note, task.made_of))
        else:
            self._run(task, self._read)
            self._taken.add(task.made_of)
        return program

    def _run(self, task: Task, compile_unit: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc.Nvrtc, "compile_unit", lambda _, *rest: compile_unit(*rest))
            task.run()

    def _read(self, source: str, name: str, options: Sequence[str], *rest: Any) -> Any:
        options = [*options, "-fdevice-syntax-only"]
        return self._compile_unit(self._library, source, name, options, *rest)

    def _note(
        self, made_of: tuple[str, ...], source: str, name: str, options: Sequence[str], *_: Any
    ) -> Any:
        assert self._later is not None
        self._later.append(_Read(made_of, source, tuple(options)))
        raise _Captured

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is loaded inside the block is read at its end, all as one text if it has no error;
        what has is read again when it is loaded again."""
        self._later = []
        try:
            yield
        finally:
            reads, self._later = self._later, None
        groups: dict[Any, dict[tuple[str, ...], str]] = {}
        for read in reads:
            match = _TEXT.fullmatch(read.source)
            if match is not None and not re.search(r"#\s*(define|undef|pragma)", match[2]):
                defines = tuple(re.findall("#define .*", match[1]))
                groups.setdefault((defines, read.options), {})[read.made_of] = match[2]
        for (defines, options), texts in groups.items():
            source = "\n".join([*defines, '#include "ferrule.h"', *map(apart, texts.values())])
            with contextlib.suppress(CompilerFailed, ToolchainError):
                self._read(source, "together", options, {}, ())
                self._taken.update(texts)


def apart(text: str, *names: str) -> str:
    """The text of a kernel, with names that no other has: its own, its namespace's and these."""
    names = ("user", *names, *_NAME.findall(text))
    begin = "".join(f"#define {name} {name}_{number(text)}\n" for name in names)
    end = "".join(f"#undef {name}\n" for name in names)
    return f"{begin}{text}\n{end}"


def number(text: str) -> int:
    """A number that is the text's alone."""
    return zlib.crc32(text.encode())


_compiled: Compiled | None = None


def together() -> contextlib.AbstractContextManager[None]:
    """Where NVRTC takes the texts of kernels (`compiled`), those loaded in the block at once."""
    return contextlib.nullcontext() if _compiled is None else _compiled.together()


@contextmanager
def compiled() -> Iterator[None]:
    """NVRTC takes the text of every kernel that is loaded on the CPU inside a ``with`` block."""
    global _compiled
    library = nvrtc.find_nvrtc()
    if library is None or library.version < (13, 0) or available():
        yield
        return
    _compiled = Compiled(library)
    try:
        with pytest.MonkeyPatch.context() as patch:
            reader = _compiled
            patch.setattr(CpuDevice, "program", lambda *given: reader.program(*given))
            yield
    finally:
        _compiled = None
