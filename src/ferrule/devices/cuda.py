"""NVIDIA GPUs: kernels as CUDA C++, compiled by NVRTC to a cubin. Compiling needs no GPU."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import cache, nvrtc
from ..driver import driver
from ..errors import DeviceError, ToolchainError
from ..source import cpp, cuda_body
from ..source import cuda as cuda_text
from ..spec import Launch, Spec
from . import Binary
from .cpu import INCLUDE, header_digest
from .cuda_build import Built, build, build_body

if TYPE_CHECKING:
    from .cuda_program import CudaProgram

SCHEMA = "3"  # raised when the same text, flags and compiler would run differently
ARCHITECTURE = "sm_90"

_FLAGS = ("--std=c++17", "--device-as-default-execution-space", "-w")


class CudaDevice:
    """CUDA C++ and cubins for one architecture, such as ``"sm_90"``, and the GPU that runs them."""

    name = "cuda"

    def __init__(self, architecture: str = ARCHITECTURE, ordinal: int | None = None) -> None:
        self.architecture = architecture
        self.ordinal = ordinal  # of the GPU; None where there is none to run kernels on

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        """The CUDA C++ text.

        Raises:
            DialectError: the text uses something that ferrule refuses.
        """
        if spec.kernel.language == "cuda":
            return cuda_body.text(spec)
        prepared = cpp.prepare(spec)
        return cuda_text.text(prepared, cuda_text.form_of(prepared, launch))

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        """The cubin (PTX for ``compute_…``), from the disk cache where it is there.

        Raises:
            CompileError: NVRTC refused the text; quotes the author's lines.
            DialectError: the text uses something that ferrule refuses.
            ToolchainError: there is no NVRTC.
            DeviceError: NVRTC does not know the architecture, or the kernel has more threadgroup
                memory than it.
        """
        in_cuda = spec.kernel.language == "cuda"
        prepared = None if in_cuda else cpp.prepare(spec)
        form = cuda_text.form_of(prepared, launch) if prepared else cuda_text.Form()
        text = cuda_text.text(prepared, form) if prepared else cuda_body.text(spec)
        compiler = nvrtc.find_nvrtc()
        if compiler is None:
            raise ToolchainError(
                f"kernel {spec.kernel.name!r}: NVRTC, the compiler for CUDA, was not found; "
                "`pip install nvidia-cuda-nvrtc` installs it."
            )
        architecture = self.architecture
        known = compiler.architectures()
        number = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", architecture)
        if number is None or int(number[1]) not in known:
            listed = ", ".join(f"sm_{n}" for n in known)
            raise DeviceError(
                f"kernel {spec.kernel.name!r}: NVRTC {'.'.join(map(str, compiler.version))} does "
                f"not compile for {architecture!r}; it knows {listed} (and compute_… for PTX)."
            )
        contract = prepared is None or not prepared.text.contract_off
        flags = [*_FLAGS, f"--fmad={'true' if contract else 'false'}"]
        if most := self.registers(launch):
            flags.append(f"--maxrregcount={most}")
        if spec.kernel.math_mode == "fast":
            flags.append("-D__FAST_MATH__=1")
        folders, libraries = [str(INCLUDE)], ""
        if in_cuda:
            headers = nvrtc.find_headers(compiler)
            folders += headers.folders
            libraries = headers.identity
        made_of = (header_digest(), compiler.identity, libraries, architecture, *flags, text)
        key = cache.digest("cuda", SCHEMA, *made_of)
        flags += [f"-I{folder}" for folder in folders]

        def make() -> bytes:
            if prepared is None:
                return build_body(compiler, spec.kernel, text, architecture, flags).packed()
            return build(compiler, prepared, form, architecture, flags).packed()

        built = Built.unpacked(cache.default().get_or_make(key, make))
        return Binary(built.payload, architecture, built.text, built.log, built.shared)

    def program(self, spec: Spec) -> CudaProgram:
        """The kernel on this GPU.

        Raises:
            DeviceError: there is no driver or no such GPU.
        """
        from .cuda_program import CudaProgram

        if self.ordinal is None:
            raise DeviceError(
                f"kernel {spec.kernel.name!r}: {self.architecture!r} is an architecture, which "
                "kernels are compiled for; a GPU to run them is called 'cuda:0'."
            )
        return CudaProgram(self, spec, self.ordinal)

    @staticmethod
    def registers(launch: Launch | None) -> int:
        """How many registers a thread may have, so that a threadgroup fits; 0 leaves it open.

        A multiprocessor has 65,536, and a thread at most 255.
        """
        x, y, z = launch.threadgroup if launch is not None else (1, 1, 1)
        threads = x * y * z
        return 0 if threads <= 256 else 128 if threads <= 512 else 64


@lru_cache(maxsize=8)
def device(architecture: str = ARCHITECTURE) -> CudaDevice:
    """The CUDA device for an architecture."""
    return CudaDevice(architecture)


@lru_cache(maxsize=64)
def gpu(name: str) -> CudaDevice:
    """A GPU, ``"cuda:0"`` …; for ``"cuda"`` the first, or where there is none one that compiles
    for `ARCHITECTURE`.

    Raises:
        DeviceError: there is no driver, or no such GPU.
    """
    try:
        ordinal = int(name.partition(":")[2] or "0")
    except ValueError:
        raise DeviceError(f"there is no device {name!r}; expected 'cuda:0', 'cuda:1' …") from None
    try:
        major, minor = driver().capability(ordinal)
    except DeviceError:
        if name == "cuda":
            return device()
        raise
    return CudaDevice(_nearest(10 * major + minor), ordinal)


def _nearest(capability: int) -> str:
    """What NVRTC compiles for a GPU: its own machine code, or PTX if the GPU is newer."""
    compiler = nvrtc.find_nvrtc()
    known = compiler.architectures() if compiler is not None else []
    if not known or capability in known or capability < min(known):
        return f"sm_{capability}"
    return f"compute_{max(n for n in known if n < capability)}"
