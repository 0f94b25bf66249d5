"""NVRTC is found in every place where it is installed, and compiles without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import on_cuda
from ferrule.errors import CompilerFailed, ToolchainError
from ferrule.tools import nvrtc

_TEXT = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; %s }'


def test_it_says_what_it_is(library: nvrtc.Nvrtc) -> None:
    assert library.version >= (11, 0)
    assert 80 in library.architectures() or 90 in library.architectures()
    assert len(library.identity) == 64
    assert nvrtc.Nvrtc(library.path).identity == library.identity
    assert nvrtc.find_nvrtc() is library


def test_ptx_and_cubin(library: nvrtc.Nvrtc) -> None:
    newest = library.architectures()[-1]
    ptx, log = library.compile(_TEXT % "", "k.cu", [f"--gpu-architecture=compute_{newest}"])
    assert b".entry twice" in ptx and log == ""
    cubin, _ = library.compile(_TEXT % "", "k.cu", [f"--gpu-architecture=sm_{newest}"])
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.gpu  # without a driver NVRTC has no cache of its own
@pytest.mark.skipif(not on_cuda.available(), reason="there is no GPU")
def test_the_log_comes_every_time(library: nvrtc.Nvrtc) -> None:
    for _ in range(2):
        options = ["--gpu-architecture=sm_90", "--ptxas-options=-v"]
        _, log = library.compile(_TEXT % "", "k.cu", options)
        assert "registers" in log


def test_warnings_come_with_the_result(library: nvrtc.Nvrtc) -> None:
    ptx, log = library.compile(_TEXT % "int unused;", "kernel.cu")
    assert ptx and "kernel.cu(1)" in log and "unused" in log


@pytest.mark.parametrize("text", ["__global__ void f( {", "#error no", _TEXT % "\0", "é"])
def test_a_refused_text_comes_with_the_log(library: nvrtc.Nvrtc, text: str) -> None:
    with pytest.raises(CompilerFailed) as raised:
        library.compile(text, "kernel.cu")
    assert "kernel.cu" in raised.value.log and "error" in raised.value.log


def test_an_unknown_option_is_not_the_authors_fault(library: nvrtc.Nvrtc) -> None:
    with pytest.raises(ToolchainError, match=r"nvrtcCompileProgram .* failed: NVRTC_ERROR"):
        library.compile(_TEXT % "", "k.cu", ["--nonsense"])


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        return str(path)

    old = plant("nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.12")
    new = plant("nvidia", "cu13", "lib", "libnvrtc.so.13")
    plant("nvidia", "cu13", "lib", "libnvrtc-builtins.so.13.5")
    plant("nvidia", "cuda_nvrtc", "lib", "libnvrtc.alt.so.12")
    home = plant("home", "lib64", "libnvrtc.so.11.2")
    monkeypatch.setattr(nvrtc, "_wheels", lambda: [str(tmp_path / "nvidia")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "missing"))
    found = list(nvrtc.candidates("libnvrtc", nvrtc._SONAMES))
    assert found[:3] == [new, old, home]
    assert found[-1] == "libnvrtc.so"
    assert not any("builtins" in path or "alt" in path for path in found)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no list of loaded libraries")
def test_what_compiling_needs_is_loaded_from_beside(library: nvrtc.Nvrtc) -> None:
    """NVRTC 13.0 asks the loader for its builtins by name alone."""
    folder = os.path.dirname(library.path)
    if not any("builtins" in name for name in os.listdir(folder or "/proc/self/task")):
        pytest.skip("NVRTC is the system's")
    code = (
        "from ferrule.tools import nvrtc; nvrtc.find_nvrtc(); "
        "print('libnvrtc-builtins' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_a_broken_library_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"junk")
    monkeypatch.setattr(nvrtc, "candidates", lambda *_: iter([str(broken)]))
    assert nvrtc.find_nvrtc.__wrapped__() is None  # the process keeps the one that it has
    with pytest.raises(ToolchainError, match=r"NVRTC at .*libnvrtc\.so\.13 cannot be loaded"):
        nvrtc.Nvrtc(os.fspath(broken))
    with pytest.raises(ToolchainError, match="cannot be loaded"):
        nvrtc.Nvrtc(_some_other_library())


def _some_other_library() -> str:
    import ctypes.util

    return ctypes.util.find_library("c") or pytest.skip("no C library to mistake for NVRTC")
