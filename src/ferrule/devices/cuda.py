"""NVIDIA GPUs: kernels as CUDA C++, compiled by NVRTC to a cubin. Compiling needs no GPU."""

from __future__ import annotations

import re
from functools import lru_cache

from .. import cache, nvrtc, toolchain
from ..errors import DeviceError, ToolchainError
from ..source import cpp
from ..source import cuda as cuda_text
from ..spec import Launch, Spec
from . import Binary, Program
from .cpu import INCLUDE, header_digest
from .diagnostics import compile_error

SCHEMA = "2"  # raised when the same text, flags and compiler would run differently
ARCHITECTURE = "sm_90"

_FLAGS = ("--std=c++17", "--device-as-default-execution-space", "-w")


class CudaDevice:
    """CUDA C++ and cubins for one architecture, such as ``"sm_90"``."""

    name = "cuda"

    def __init__(self, architecture: str = ARCHITECTURE) -> None:
        self.architecture = architecture

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        """The CUDA C++ text.

        Raises:
            DialectError: the text uses something that ferrule refuses.
        """
        prepared = cpp.prepare(spec)
        return cuda_text.text(prepared, cuda_text.form_of(prepared, launch))

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        """The cubin (PTX for ``compute_…``), from the disk cache where it is there.

        Raises:
            CompileError: NVRTC refused the text; quotes the author's lines.
            DialectError: the text uses something that ferrule refuses.
            ToolchainError: there is no NVRTC.
            DeviceError: NVRTC does not know the architecture.
        """
        prepared = cpp.prepare(spec)
        text = cuda_text.text(prepared, cuda_text.form_of(prepared, launch))
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
        flags = [*_FLAGS, f"--gpu-architecture={architecture}"]
        if architecture.startswith("sm_"):
            flags.append("--ptxas-options=-v")
        flags.append(f"--fmad={'false' if prepared.text.contract_off else 'true'}")
        if spec.kernel.math_mode == "fast":
            flags.append("-D__FAST_MATH__=1")
        key = cache.digest("cuda", SCHEMA, header_digest(), compiler.identity, *flags, text)

        def make() -> bytes:
            try:
                made, log = compiler.compile(text, spec.kernel.name, [*flags, f"-I{INCLUDE}"])
                return log.encode() + b"\0" + made
            except toolchain.CompilerFailed as failed:
                name = f"NVRTC {'.'.join(map(str, compiler.version))}"
                raise compile_error(spec.kernel, failed.log, name) from None

        log, _, payload = cache.default().get_or_make(key, make).partition(b"\0")
        return Binary(payload, architecture, text, log.decode())

    def program(self, spec: Spec) -> Program:
        """Refused: this version compiles for CUDA but does not launch there.

        Raises:
            DeviceError: always.
        """
        raise DeviceError(
            f"kernel {spec.kernel.name!r}: this version of ferrule compiles kernels for CUDA but "
            "does not launch them there; move the arrays to the CPU."
        )


@lru_cache(maxsize=8)
def device(architecture: str = ARCHITECTURE) -> CudaDevice:
    """The CUDA device for an architecture."""
    return CudaDevice(architecture)
