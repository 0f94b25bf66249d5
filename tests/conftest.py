"""What all tests need."""

from __future__ import annotations

import signal

import pytest

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
