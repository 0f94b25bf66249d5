"""CUDA texts of kernels on the CPU: each thread a fiber, each warp checked (tests/native/warps.h).

What no GPU says, this does: an operation that names a lane which does not come to it, or that lanes
come to at two places.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fake_cuda
import ferrule
import on_cuda
from ferrule import cache
from ferrule.devices.cuda.device import CudaDevice
from ferrule.devices.cuda.program import CudaProgram
from ferrule.devices.digests import INCLUDE
from ferrule.errors import CompilerFailed, DeviceError
from ferrule.source.cuda import launch as cuda_launch
from ferrule.source.cuda.launch import Form
from ferrule.spec import Facts, Launch, Spec, extent
from ferrule.tools import loader, toolchain
from ferrule.tools.driver import LoadedFunction as Function

NATIVE = Path(__file__).parent / "native" / "warps.h"
SCHEDULER = NATIVE.with_suffix(".cpp")
Array = np.ndarray[Any, Any]

_LANE = re.compile(r'unsigned l;\s*asm\("mov.u32 %0, %%laneid;" : "=r"\(l\)\);\s*return l;')
_TRANSPOSE = re.compile(r'asm volatile\("movmatrix.sync.aligned.m8n8.trans.b16[^;]*;[^;]*;')
_PRODUCT = re.compile(
    r'asm volatile\("mma.sync.aligned.m16n8k8.row.col.f32.(f16|bf16).\1.f32 \{%0,%1,%2,%3\}, '
    r'\{%4,%5\}, \{%6\}, \{%7,%8,%9,%9\};"\s*: "=f"\(x\), "=f"\(y\), "=f"\(p\), "=f"\(q\) : '
    r'"r"\(a\), "r"\(0u\), "r"\(b\), "f"\(x\), "f"\(y\), "f"\(0.0f\)\);'
)
_FOR_BOTH, _, _ = (INCLUDE / "ferrule.h").read_text().partition("#if FR_CUDA")
_FERRULE = (
    _FOR_BOTH
    + """
#define FR_FIBERS 1
#include "matrix.h"
#include "cuda_grid.h"
#include "cuda_bounds.h"
using emu_memory = void;
namespace fr { inline void memcpy(void* t, const void* f, unsigned long n) { emu_copy(t, f, n); } }
"""
)
_BODY = "\n#define FR_BODY\n"  # after what all kernels have
_FLAGS = ("-O0", "-w", "-std=c++17", f"-I{INCLUDE}", "-ffp-contract=off")
_APPLE = sys.platform == "darwin"
_LINKED = (*_FLAGS, "-Wl,-undefined,dynamic_lookup" if _APPLE else "-nostdlib")
_KERNEL = """
extern "C" __attribute__((visibility("default"))) void kernel(void** a) {{ {name}({arguments}); }}
"""


def host_text(text: str, arch: int = 900, defines: str = "") -> str:
    """A CUDA text as C++ for the CPU; ``defines`` are what NVRTC is told beside it."""
    header = (INCLUDE / "cuda.h").read_text()
    header, n = _LANE.subn("return emu_lane();", header)
    assert n == 1
    header, n = _TRANSPOSE.subn("r = emu_transposed(w);", header)
    assert n == 1
    header, n = _PRODUCT.subn(r"emu_mma_\1(x, y, p, q, a, 0, b, x, y, 0, 0);", header)
    assert n == 2
    signature = re.search(r'extern "C" __global__ void (\w+)\((.*)\) \{', text)
    assert signature is not None
    arguments = []
    for i, one in enumerate(re.split(r", (?![^<]*>)", signature[2])):
        kind = re.sub(r"__grid_constant__|__restrict__", "", one).rsplit(" ", 1)[0].strip()
        arguments.append(f"*({kind.removeprefix('const ') if '*' not in kind else kind}*)a[{i}]")
    text = text.replace('#include "ferrule.h"', _FERRULE + header + _BODY)
    text = text.replace("extern __shared__", "__shared__").replace(
        "fr_shared[]", "fr_shared[1 << 20]"
    )
    kernel = _KERNEL.format(name=signature[1], arguments=", ".join(arguments))
    begin = f'#define __CUDA_ARCH__ {arch}\n{defines}#include "{NATIVE}"\n#undef FR_CUDA\n'
    return f"{begin}{text}{kernel}"


@functools.cache
def _header(text: str) -> Path:
    """A file of a text that many kernels begin with, precompiled where the compiler is g++."""
    folder = Path(tempfile.mkdtemp(prefix="ferrule-warps-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "begin.h"
    path.write_text(text)
    compiler = toolchain.find_compiler()
    if compiler.kind == "gcc":
        flags = [*_FLAGS, "-fPIC", "-fno-gnu-unique", "-x", "c++-header"]
        command = [*compiler.argv, *flags, str(path), "-o", f"{path}.gch"]
        subprocess.run(command, check=True, capture_output=True)
    return path


_kernels: dict[str, Any] = {}
_later: dict[str, None] | None = None


def _compiled(text: str) -> Any:
    """What runs a text."""
    if _later is not None:
        _later[text] = None
        return lambda *_: b""
    if text not in _kernels:
        begin, _, body = text.partition(_BODY)
        _kernels[text] = _load(begin, body).kernel
    return functools.partial(_scheduler(), _kernels[text])


def _load(begin: str, body: str) -> ctypes.CDLL:
    _scheduler()  # whose names a kernel finds when it is loaded
    path = _header(re.sub(r"^// .*\n", "", begin, flags=re.MULTILINE))  # the kernel's name
    library = toolchain.find_compiler().compile(f'#include "{path}"\n{body}', flags=_LINKED)
    return loader.load_library(library, "warps")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Launches in the block do nothing; at its end their texts are compiled, all by one run."""
    global _later
    _later = {}
    try:
        yield
    finally:
        texts, _later = _later, None
    groups: dict[str, list[str]] = {}
    for text in texts:
        begin, _, body = text.partition(_BODY)
        if text not in _kernels and not re.search(r"#\s*(define|undef|pragma)", body):
            groups.setdefault(re.sub(r"^// .*\n", "", begin, flags=re.MULTILINE), []).append(text)
    for begin, group in groups.items():
        bodies = [text.partition(_BODY)[2] for text in group]
        with contextlib.suppress(CompilerFailed):
            library = _load(begin, "\n".join(on_cuda.apart(body, "kernel") for body in bodies))
            for text, body in zip(group, bodies, strict=True):
                _kernels[text] = getattr(library, f"kernel_{on_cuda.number(body)}")


@functools.cache
def _scheduler() -> Any:
    """What carries out a launch of a kernel, loaded so that kernels find what they call of it."""
    compiler = toolchain.find_compiler()
    text = SCHEDULER.read_text().replace('"warps.h"', f'"{NATIVE}"')
    key = cache.digest("warps", compiler.identity, text, NATIVE.read_text())
    library = cache.default().get_or_make(key, lambda: compiler.compile(text, flags=["-O1", "-w"]))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        run = ctypes.CDLL(file.name, ctypes.RTLD_GLOBAL).emu_run
    run.restype = ctypes.c_char_p
    return run


def launch(
    kernel: ferrule.MetalKernel, inputs: list[Any], *, grid: Any, threadgroup: Any,
    output_shapes: Any, output_dtypes: Any, template: Any = None, init_value: Any = None,
    arch: int = 900, text: str = "",
) -> tuple[list[Array], int, str]:  # fmt: skip
    """The outputs, how often a thread asked who is with it, and the CUDA text that ran.

    Raises:
        AssertionError: a warp's lanes do not do what they must.
    """
    spec, sent = kernel._builder.described(
        inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, "cuda"
    )
    assert sent is not None
    text = text or CudaDevice().text(spec, sent)
    run = _compiled(host_text(text, arch))
    outputs = [
        np.full(shape, 0 if init_value is None else init_value, dtype)
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]
    kept: list[Any] = []
    arrays: list[Array] = []  # inputs, as they are passed
    pointers: list[int] = []

    def passed(array: Array) -> None:
        kept.append(array)
        pointers.append(array.ctypes.data)

    for name, value, one in zip(kernel.kernel.input_names, inputs, spec.inputs, strict=True):
        array = np.asarray(value, dtype=one.dtype.numpy if one.value else None)
        if kernel.kernel.ensure_row_contiguous:
            array = np.ascontiguousarray(array).reshape(np.shape(value))
        arrays.append(array)
        if one.value:
            passed(np.ascontiguousarray(array).reshape(1))
            continue
        kept.append(array)
        passed(np.array([array.ctypes.data], np.uint64))
        if one.ndim == 0:
            continue
        shape, strides, _ = kernel.kernel.wants(name)
        if shape:
            passed(np.array(array.shape, np.int32))
        if strides:
            passed(np.array([s // array.itemsize for s in array.strides], np.int64))
    for array in outputs:
        passed(np.array([array.ctypes.data], np.uint64))
    for kind, i in cuda_launch.kernel_parameters(spec):
        if kind != "extent":
            continue
        array = [*arrays, *outputs][i]
        strides = tuple(s // array.itemsize for s in array.strides)
        first, count = extent(array.shape, strides)
        passed(np.array([first, count, min(count, 1 << 31)], np.int64))
    group = sent.threadgroup
    groups = [-(-g // t) for g, t in zip(sent.grid, group, strict=True)]
    passed(np.array([*sent.grid, *group, *groups], np.uint32))
    block = group if "#define FR_BOX" in text else (int(np.prod(group)), 1, 1)
    asked = ctypes.c_long()
    blocks = np.array(groups, np.uint32)
    sizes = np.array(block, np.uint32)
    array_of = (ctypes.c_void_p * len(pointers))(*pointers)
    failure = run(
        array_of, blocks.ctypes.data_as(ctypes.c_void_p), sizes.ctypes.data_as(ctypes.c_void_p),
        ctypes.byref(asked),
    )  # fmt: skip
    assert not failure, f"{failure.decode()}\n{text}"
    return outputs, asked.value, text


@contextlib.contextmanager
def everything(folder: Path) -> Iterator[None]:
    """Kernels called with arrays on the CPU are carried out as CUDA texts inside a ``with`` block.

    Args:
        folder: where the stand-in for the driver is compiled.
    """
    fake = fake_cuda.FakeCuda(fake_cuda.build(folder))
    with fake.installed(), on_cuda.in_place_of_the_cpu(Emulated()):
        yield


class Emulated(on_cuda.InPlaceOfTheCpu):
    """It carries out CUDA texts, warp by warp.

    All but the driver and the GPU is what runs there: the text, how blocks are laid out, and how
    the arguments are packed. A driver must be installed (`fake_cuda`).
    """

    def made(self, spec: Spec) -> EmulatedProgram:
        return EmulatedProgram(CudaDevice("compute_90", 0), spec, 0)


class EmulatedProgram(CudaProgram):
    """A kernel whose launches are carried out on the CPU."""

    def _loaded(self, launch: Launch, guards: str) -> tuple[Form, Function]:
        form, built = self._device.built(self._spec, launch, guards)  # for what it says
        self.runs = getattr(self, "runs", [])
        fast = self._spec.kernel.math_mode == "fast"
        defines = "#define __FAST_MATH__ 1\n" if fast else ""
        self.runs.append(_compiled(host_text(built.text, defines=defines)))
        return form, Function(len(self.runs) - 1, 0, 0, 0, 1024)

    def launch(self, inputs: Any, outputs: Any, launch: Launch, stream: int = 0) -> None:
        plan = self._plan(inputs, outputs, launch)
        block, table = self._pack(inputs, outputs, plan)
        blocks, threads = ((ctypes.c_uint * 3)(*sizes) for sizes in (plan.blocks, plan.block))
        asked = ctypes.c_long()
        at = ctypes.c_void_p(ctypes.addressof(block) + table)
        failure = self.runs[plan.function.handle](at, blocks, threads, ctypes.byref(asked))
        if failure:
            raise DeviceError(failure.decode())

    def failure(self, status: int, launch: Launch, arrays: list[Facts]) -> DeviceError:
        return DeviceError(str(status))
