"""From a kernel to its CUDA text and its cubin or PTX, by as many compilations as that takes.

Mostly one. Threadgroup memory beyond 48 KB needs two more (`source.cuda.shared`). A text whose
checked accesses (`source.cuda.bounds`) or masks (`source.cuda.masks`) the compiler does not take is
compiled without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ...errors import CompileError, CompilerFailed, DeviceError
from ...kernel import Kernel
from ...source import Note, cpp
from ...source.cuda import body as cuda_body
from ...source.cuda import by_pointer as cuda_by_pointer
from ...source.cuda import shared
from ...source.cuda import text as cuda_text
from ...source.cuda.launch import (
    COUNTED,
    ROBUST,
    UNGUARDED,
    Form,
    dealt,
    most_registers,
    plain_form,
)
from ...spec import Launch, Spec
from ...tools.nvrtc import Nvrtc, find_headers
from .. import portability
from ..diagnostics import compile_error
from ..digests import INCLUDE
from ..protocol import Binary

FLAGS = ("--std=c++17", "--device-as-default-execution-space", "-w")
STATIC_LIMIT = 48 << 10  # bytes that a block may have without asking
# The bytes that it may ask for, by compute capability (CUDA C++ Programming Guide).
_LIMITS = {
    75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99,
}  # fmt: skip
_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_TOO_MUCH = "uses too much shared data"


class Task(NamedTuple):
    """A compilation.

    Attributes:
        made_of: all that decides what it gives, but for the dialect's header.
        run: compiles.
    """

    made_of: tuple[str, ...]
    run: Callable[[], Binary]


class CudaBuild:
    """Builds a kernel that is not in the cache.

    Attributes:
        form: how its launch runs.
    """

    def __init__(
        self,
        spec: Spec,
        launch: Launch | None,
        *,
        plain: bool = False,
        form: Form | None = None,
        guards: str = ROBUST,
    ) -> None:
        """Rewrites the text.

        Args:
            plain: whether the form is to serve all sizes and alignments.
            form: the form, where it is not to be the launch's own.
            guards: what is done about accesses outside of arrays.

        Raises:
            DialectError: it uses something that ferrule refuses.
        """
        self._spec, self._guards = spec, guards
        self._prepared = None if spec.kernel.language == "cuda" else cpp.prepare(spec)
        if form is None:
            # What is counted says whose thread it was: in threadgroups as they were asked for.
            asked = guards == COUNTED
            p = self._prepared
            form = cuda_text.form_of(p, launch, asked=asked) if p else Form("box")
        self.form = plain_form(form) if plain else form
        self._registers = most_registers(None if launch is None else dealt(self.form, launch))

    def text(self) -> str:
        """The CUDA C++ text."""
        p = self._prepared
        return self._of(p)() if p else cuda_body.text(self._spec)

    def _of(self, p: cpp.Prepared) -> Callable[..., str]:
        """What gives the text of a Metal body."""
        return partial(cuda_text.text, p, self.form, guards=self._guards)

    def notes(self) -> list[Note]:
        """What Apple refuses of it, as far as the text alone tells."""
        return portability.notes(self._prepared) if self._prepared else []

    def notes_of_memory(self, size: int) -> list[Note]:
        """What Apple refuses of so many bytes of threadgroup memory."""
        if self._prepared is None:
            return []
        lines = [variable.line for variable in shared.declared(self._prepared.text.source)]
        return portability.of_shared_memory(size, max(lines, default=1))

    def task(self, compiler: Nvrtc, architecture: str) -> Task:
        """The compilation of the kernel.

        Raises:
            DeviceError: NVRTC does not know the architecture.
            ToolchainError: CUDA's headers are missing, which a body that is CUDA includes.
        """
        p, text = self._prepared, self.text()
        made_of, target = self._target(compiler, architecture, text)
        if p is None:
            return Task(made_of, partial(_build_body, target, text))
        return Task(made_of, partial(_build, target, p, self._of(p)))

    def by_pointer(self, compiler: Nvrtc, architecture: str, text: str) -> Task:
        """The compilation for launchers that pass arrays alone.

        Args:
            text: that of the `Binary`.

        Raises:
            DeviceError, ToolchainError: as `task` does.
        """
        text = cuda_by_pointer.rewritten(text, self._spec)
        made_of, target = self._target(compiler, architecture, text)
        return Task(made_of, partial(_build_body, target, text))

    def _target(
        self, compiler: Nvrtc, architecture: str, text: str
    ) -> tuple[tuple[str, ...], _Target]:
        """The inputs of a text's compilation, for its key, and what it is compiled with."""
        p, kernel = self._prepared, self._spec.kernel
        compiler.check_architecture(f"kernel {kernel.name!r}", architecture)
        # A Metal text says itself what is fused (`source.arithmetic`).
        free = p is None or p.fuses_freely
        flags = [*FLAGS, f"--fmad={'true' if free else 'false'}"]
        if kernel.math_mode == "fast":
            flags.append("-D__FAST_MATH__=1")
        folders, libraries = [str(INCLUDE)], ""
        if p is None:
            headers = find_headers(compiler)
            folders += headers.folders
            libraries = headers.identity
        most = self._registers
        made_of = (compiler.identity, libraries, architecture, str(most), *flags, text)
        flags += [f"-I{folder}" for folder in folders]
        return made_of, _Target(compiler, kernel, architecture, flags, most)


class _Target(NamedTuple):
    """What a kernel is compiled with, and for.

    Attributes:
        architecture: such as ``"sm_90"``; the flags do not have it, but where headers are.
        most: registers that a thread may have; 0 for any number.
    """

    compiler: Nvrtc
    kernel: Kernel
    architecture: str
    flags: Sequence[str]
    most: int

    def binary(self, text: str) -> Binary:
        """A text, compiled so that a thread has no more registers than it may have.

        Told of a limit, ptxas uses what it allows, and fewer threadgroups share a multiprocessor:
        so it is told only where it needs to be. PTX has no registers yet: `Driver.load` tells the
        driver.

        Raises:
            CompilerFailed: NVRTC refused the text.
        """
        options = [*self.flags, *architecture_flags(self.architecture)]
        code, log = self.compiler.compile(text, self.kernel.name, options)
        used = [int(n) for n in _REGISTERS.findall(log)]
        if self.most and max(used, default=0) > self.most:
            options.append(f"--maxrregcount={self.most}")
            code, log = self.compiler.compile(text, self.kernel.name, options)
        if code.startswith(b"\x7fELF"):
            memory = max((int(size) for size in _SMEM.findall(log)), default=0)
        else:
            memory = shared.static_bytes(code.decode())
        return Binary(code, self.architecture, text, log, 0, memory)

    def sizes(self, probe: str) -> dict[int, tuple[int, int]]:
        """The size and alignment of each variable in threadgroup memory, by a text that tells."""
        general = f"--gpu-architecture=compute_{self.architecture.split('_')[1]}"
        told, _ = self.compiler.compile(probe, self.kernel.name, [*self.flags, general])
        return shared.sizes(told.decode())

    def refused(self, log: str, scalars: Sequence[str] = ()) -> CompileError:
        """The error for a text that was refused."""
        return compile_error(self.kernel, log, version(self.compiler), scalars)


def version(compiler: Nvrtc) -> str:
    """What errors call a compiler."""
    return f"NVRTC {'.'.join(map(str, compiler.version))}"


def architecture_flags(architecture: str) -> list[str]:
    """The compiler's options for an architecture; for machine code, it tells of registers."""
    own = ["--ptxas-options=-v"] if architecture.startswith("sm_") else []
    return [f"--gpu-architecture={architecture}", *own]


def _build(target: _Target, p: cpp.Prepared, text_of: Callable[..., str]) -> Binary:
    """Compile a kernel.

    Args:
        text_of: gives its text, with the options of `source.cuda.text.text`.

    Raises:
        CompileError: NVRTC refused the text; quotes the author's lines.
        DeviceError: the kernel has more threadgroup memory than the architecture.
    """
    text = text_of()
    try:
        try:
            binary = target.binary(text)
            too_much = _TOO_MUCH in binary.log or (
                target.architecture.startswith("compute_") and binary.memory > STATIC_LIMIT
            )
        except CompilerFailed as failed:
            if _TOO_MUCH not in failed.log:
                raise
            too_much = True
        if not too_much:
            return binary
        sizes = target.sizes(text_of(shared=cuda_text.Dynamic(None)))
        offsets, size = shared.placed(sizes)
        _check_memory(p, target.architecture, sizes, size)
        text = text_of(shared=cuda_text.Dynamic(offsets))
        return target.binary(text)._replace(shared=size, memory=size)
    except CompilerFailed as failed:
        log = failed.log
        tried = {text}
        for masks in (True, False):
            without = text_of(masks=masks, guards=UNGUARDED)
            if without in tried:
                continue
            tried.add(without)
            try:
                return target.binary(without)
            except CompilerFailed as again:
                log = again.log  # in the lines of the author's own functions
        raise target.refused(log, p.scalars) from None


def _build_body(target: _Target, text: str) -> Binary:
    """Compile a kernel whose body is CUDA, as `_build` does."""
    try:
        return target.binary(text)
    except CompilerFailed as failed:
        raise target.refused(failed.log) from None


def _check_memory(
    p: cpp.Prepared, architecture: str, sizes: dict[int, tuple[int, int]], size: int
) -> None:
    """Refuse more threadgroup memory than a launch can ask for."""
    number = re.search(r"\d+", architecture)
    most = _LIMITS.get(int(number[0]) if number else 0)
    if most is None or size <= most << 10:
        return
    largest = max(sizes, key=lambda n: sizes[n])
    places = (f"{d.name} in source line {d.line}" for d in shared.declared(p.text.source))
    variable = dict(enumerate(places)).get(largest, "of a macro")
    raise DeviceError(
        f"kernel {p.kernel.name!r}: its threadgroup memory has {size} bytes, and {architecture} "
        f"has {most << 10} per threadgroup; the largest variable, {variable}, has "
        f"{sizes[largest][0]} bytes."
    )
