"""Finds nvdisasm, NVIDIA's disassembler, and prints a cubin's machine code (SASS). Needs no GPU."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile

from .. import _env
from ..errors import ToolchainError
from .nvrtc import wheel_folders

REMEDY = "pip install nvidia-cuda-nvdisasm"
_TIMEOUT = 60.0  # seconds


@functools.cache
def find_nvdisasm() -> str | None:
    """The program, or None: that of NVIDIA's wheels, of CUDA_HOME or CUDA_PATH, of /usr/local/cuda,
    or of the search path. Looked for once per process."""
    folders = wheel_folders("bin")
    folders += [os.path.join(home, "bin") for home in (*_env.cuda_homes(), "/usr/local/cuda")]
    folders += [f for f in _env.search_path().split(os.pathsep) if os.path.isabs(f)]
    for folder in folders:
        path = os.path.join(folder, "nvdisasm")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def disassemble(cubin: bytes) -> str:
    """The SASS of all functions of a cubin.

    Raises:
        ToolchainError: there is no nvdisasm, or it cannot read the cubin.
    """
    program = find_nvdisasm()
    if program is None:
        raise ToolchainError(f"nvdisasm, which prints machine code, was not found. Run: {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="ferrule-nvdisasm-") as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "xb") as file:
            file.write(cubin)
        try:
            done = subprocess.run(
                [program, "-c", path], capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise ToolchainError(f"{program} cannot be run: {fault}") from fault
    if done.returncode:
        raise ToolchainError(f"{program} cannot read the cubin: {done.stderr.strip()}")
    return done.stdout
