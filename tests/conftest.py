"""What all tests need."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import on_cuda
from ferrule import nvrtc

# A shell ignores Ctrl-C on behalf of what it runs in the background, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library() -> nvrtc.Nvrtc:
    """NVRTC, for tests that compile CUDA without a GPU."""
    found = nvrtc.find_nvrtc()
    if found is None:
        pytest.skip("NVRTC is not installed")
    return found


_DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if on_cuda.available() else [])]


@pytest.fixture(scope="module", params=_DEVICES)
def everywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels of a test run: on the CPU, then on the GPU if there is one.

    Where there is none, NVRTC compiles them all the same.
    """
    if request.param == "cpu":
        with on_cuda.compiled():
            yield "cpu"
        return
    with on_cuda.everything():
        yield "cuda"
