"""From a prepared kernel to a cubin or PTX, by as many compilations as that takes.

Mostly one. Threadgroup memory beyond 48 KB needs two more (`source.shared`). A text whose masks
(`source.masks`) the compiler does not take is compiled without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CompileError, DeviceError
from ..kernel import Kernel
from ..nvrtc import Nvrtc
from ..source import cpp, shared
from ..source import cuda as cuda_text
from ..toolchain import CompilerFailed
from .diagnostics import compile_error

STATIC_LIMIT = 48 << 10  # bytes that a block may have without asking
# The bytes that it may ask for, by compute capability (CUDA C++ Programming Guide).
_LIMITS = {
    75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99,
}  # fmt: skip
_SMEM = re.compile(r"(\d+) bytes smem")
_TOO_MUCH = "uses too much shared data"


class Built(NamedTuple):
    """What a compilation gave.

    Attributes:
        payload: the cubin, or PTX.
        log: what the compiler said.
        shared: bytes of dynamic shared memory that each launch must ask for.
        text: the text that was compiled at last.
        memory: bytes of threadgroup memory in all.
    """

    payload: bytes
    log: str
    shared: int
    text: str
    memory: int

    def packed(self) -> bytes:
        """All of it as bytes, for the cache."""
        return b"\0".join(
            (
                b"%d %d" % (self.shared, self.memory),
                self.text.encode(),
                self.log.encode(),
                self.payload,
            )
        )

    @staticmethod
    def unpacked(data: bytes) -> Built:
        """The reverse of `packed`."""
        sizes, text, log, payload = data.split(b"\0", 3)
        dynamic, memory = map(int, sizes.split())
        return Built(payload, log.decode(), dynamic, text.decode(), memory)


def build(
    compiler: Nvrtc, p: cpp.Prepared, form: cuda_text.Form, architecture: str, flags: Sequence[str]
) -> Built:
    """Compile a kernel.

    Args:
        architecture: such as ``"sm_90"``; the flags do not have it, but where headers are.

    Raises:
        CompileError: NVRTC refused the text; quotes the author's lines.
        DeviceError: the kernel has more threadgroup memory than the architecture.
    """
    target = _target(architecture, flags)

    def compiled(text: str, options: Sequence[str] = target) -> tuple[bytes, str]:
        return compiler.compile(text, p.kernel.name, options)

    text = cuda_text.text(p, form)
    try:
        try:
            made, log = compiled(text)
        except CompilerFailed as failed:
            if _TOO_MUCH not in failed.log:
                raise
            made, log = b"", _TOO_MUCH
        if _TOO_MUCH in log or (
            architecture.startswith("compute_")
            and shared.static_bytes(made.decode()) > STATIC_LIMIT
        ):
            general = [f"--gpu-architecture=compute_{architecture.split('_')[1]}"]
            probe = cuda_text.text(p, form, shared=cuda_text.Dynamic(None))
            told, _ = compiled(probe, [*flags, *general])
            sizes = shared.sizes(told.decode())
            offsets, size = shared.placed(sizes)
            _check(p, architecture, sizes, size)
            text = cuda_text.text(p, form, shared=cuda_text.Dynamic(offsets))
            made, log = compiled(text)
            return Built(made, log, size, text, size)
        return Built(made, log, 0, text, _static(made, log))
    except CompilerFailed as failed:
        log = failed.log
        without = cuda_text.text(p, form, masks=False)
        if without != text:
            try:
                made, said = compiled(without)
                return Built(made, said, 0, without, _static(made, said))
            except CompilerFailed as again:
                log = again.log  # in the lines of the author's own functions
        raise _refused(compiler, p.kernel, log) from None


def build_body(
    compiler: Nvrtc, kernel: Kernel, text: str, architecture: str, flags: Sequence[str]
) -> Built:
    """Compile a kernel whose body is CUDA, as `build` does."""
    try:
        made, log = compiler.compile(text, kernel.name, _target(architecture, flags))
    except CompilerFailed as failed:
        raise _refused(compiler, kernel, failed.log) from None
    return Built(made, log, 0, text, _static(made, log))


def _static(made: bytes, log: str) -> int:
    """The bytes of threadgroup memory that a cubin or PTX declares."""
    if made.startswith(b"\x7fELF"):
        return max((int(size) for size in _SMEM.findall(log)), default=0)
    return shared.static_bytes(made.decode())


def _target(architecture: str, flags: Sequence[str]) -> list[str]:
    own = ["--ptxas-options=-v"] if architecture.startswith("sm_") else []
    return [*flags, f"--gpu-architecture={architecture}", *own]


def _refused(compiler: Nvrtc, kernel: Kernel, log: str) -> CompileError:
    return compile_error(kernel, log, f"NVRTC {'.'.join(map(str, compiler.version))}")


def _check(
    p: cpp.Prepared, architecture: str, sizes: dict[int, tuple[int, int]], size: int
) -> None:
    """Refuse what no launch can ask for."""
    number = re.search(r"\d+", architecture)
    most = _LIMITS.get(int(number[0]) if number else 0)
    if most is None or size <= most << 10:
        return
    largest = max(sizes, key=lambda n: sizes[n])
    known = {d.number: f"{d.name} in source line {d.line}" for d in shared.declared(p.text.source)}
    one = known.get(largest, "of a macro")
    raise DeviceError(
        f"kernel {p.kernel.name!r}: its threadgroup memory has {size} bytes, and {architecture} "
        f"has {most << 10} per threadgroup; the largest variable, {one}, has "
        f"{sizes[largest][0]} bytes."
    )
