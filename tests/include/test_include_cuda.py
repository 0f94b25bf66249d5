"""NVRTC compiles the device-independent header as C++ compilers do, and a GPU computes the same."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from ferrule.tools import nvrtc
from include_cases import (
    CASES,
    HEADERS,
    INCLUDE,
    NUMPY,
    Array,
    Case,
    check,
    f64,
    has_small,
    names_program,
    pointer,
    program,
    row,
)


def cubin(library: nvrtc.Nvrtc, text: str, arch: str, standard: str = "c++17") -> bytes:
    """The text and the header compiled: machine code for `sm_…`, PTX for `compute_…`."""
    text = "".join((INCLUDE / name).read_text() for name in HEADERS) + text
    options = [f"--gpu-architecture={arch}", f"--std={standard}", "--fmad=false", "-w"]
    return library.compile(text, "text.cu", options)[0]


@pytest.mark.parametrize(("arch", "standard"), [("sm_80", "c++17"), ("sm_90", "c++20")])
def test_the_same_types_and_names(library: nvrtc.Nvrtc, arch: str, standard: str) -> None:
    assert cubin(library, names_program(), arch, standard).startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_same_expressions(library: nvrtc.Nvrtc, arch: str) -> None:
    # The two differ in the 16-bit floats alone. A GPU, where there is one, sees every expression.
    def keep(case: Case) -> bool:
        wide = case.types[0] in ("float", "int", "uint64_t", "float:3", "uchar:3")
        return has_small(case) if arch == "sm_90" else wide or "chain" in case.name

    text = program(keep, "include_atomics.h", cuda=True)
    assert b"cells_half" in cubin(library, text, arch)


class Gpu:
    """The least of the CUDA driver that runs a kernel on arrays."""

    def __init__(self, module: bytes) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.context, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self("cuCtxSetCurrent", self.context)
        status = self.driver.cuModuleLoadData(ctypes.byref(self.module), module)
        if status == 222:
            pytest.skip("the driver is older than NVRTC's PTX")
        assert status == 0, f"cuModuleLoadData: CUDA error {status}"

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: CUDA error {status}"

    def run(self, name: str, arrays: list[Array], n: int) -> None:
        """Run a kernel of ``n`` threads on copies of the arrays, and copy them back."""
        held = []
        for a in arrays:
            p = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(max(a.nbytes, 1)))
            self("cuMemcpyHtoD_v2", p, pointer(a), ctypes.c_size_t(a.nbytes))
            held.append(p)
        kernel, count = ctypes.c_void_p(), ctypes.c_int(n)
        self("cuModuleGetFunction", ctypes.byref(kernel), self.module, name.encode())
        values = (ctypes.c_void_p * (len(held) + 1))(*map(ctypes.addressof, (*held, count)))
        blocks = (n + 127) // 128
        self("cuLaunchKernel", kernel, blocks, 1, 1, 128, 1, 1, 0, None, values, None)
        for a, p in zip(arrays, held, strict=True):
            self("cuMemcpyDtoH_v2", pointer(a), p, ctypes.c_size_t(a.nbytes))
            self("cuMemFree_v2", p)


def _architecture() -> str | None:
    """The first GPU's, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return f"sm_{major.value}{minor.value}"


_ARCHITECTURE = _architecture()


@pytest.mark.gpu
@pytest.mark.skipif(_ARCHITECTURE is None, reason="no NVIDIA GPU")
@pytest.mark.parametrize("arch", [_ARCHITECTURE or "none", "compute_80"])
def test_a_gpu_agrees_with_numpy(library: nvrtc.Nvrtc, arch: str) -> None:
    text = program(lambda case: True, "include_atomics.h", cuda=True)
    gpu = Gpu(cubin(library, text, arch))
    wrong = []
    for case in CASES.values():
        inputs, want = row(case)
        out = np.empty_like(want)
        gpu.run(f"case_{case.name}", [*inputs, out], len(want))
        try:
            check(case, out, inputs, want)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)

    sizes = {"uchar": 48, "bfloat": 48, "half": 400}
    for t in ("int", "uint", "int64_t", "uint64_t", "float", "half", "bfloat", "double", "uchar"):
        dtype, n = NUMPY[t], sizes.get(t, 5000)
        values = np.random.default_rng(2).integers(1, 6, n).astype(dtype)
        total = values.astype(f64).sum()
        cells = np.array([0, total, 0, 99, 0, 0]).astype(dtype)
        gpu.run(f"cells_{t}", [cells, values], n)
        wanted = [total, 0, values.max(), values.min(), n]
        assert cells[:5].astype(f64).tolist() == [float(np.array(w, dtype)) for w in wanted], t
        assert cells[5] in values
