"""How many instructions simple bodies become, against CUDA by hand. Needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ferrule
from ferrule.tools import nvdisasm, nvrtc

from .timing import Bench

ARCHITECTURE = "sm_90"
INCLUDE = Path(ferrule.__file__).parent / "include"
MOST = 1.1  # times the instructions of CUDA by hand
CHECKS = 13  # instructions more, by which a kernel finds out that no access is outside its arrays
# What is carried out where one is: a second body, whose accesses are checked (`cuda.bounds`).
_CHECKED = re.compile(r"^  else fr::user::fr_kernel.*\n", re.MULTILINE)

_ROW = "unsigned i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; "

_SUM = "for (int d = 1; d < 32; d *= 2) {0} += __shfl_xor_sync(0xffffffffu, {0}, d);"
_MAX = "for (int d = 1; d < 32; d *= 2) {0} = fmaxf({0}, __shfl_xor_sync(0xffffffffu, {0}, d));"

# Name: the body, its inputs, and the parameters and body of the kernel by hand.
TWINS: dict[str, tuple[str, list[Any], str]] = {
    "copy": (
        "uint i = thread_position_in_grid.x; y[i] = a[i];", ["float32[1024]"],
        f"(const float* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        " y[i] = a[i]; }",
    ),
    "exp": (
        "uint i = thread_position_in_grid.x; y[i] = metal::exp(a[i]);", ["float32[1024]"],
        f"(const float* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        " y[i] = expf(a[i]); }",
    ),
    "scale": (
        "uint i = thread_position_in_grid.x; y[i] = a[i] * b;", ["float32[1024]", 2.5],
        f"(const float* __restrict__ a, float b, float* __restrict__ y, unsigned n) {{ {_ROW} "
        "y[i] = a[i] * b; }",
    ),
    "add a row": (
        "uint2 p = thread_position_in_grid.xy; uint w = a_shape[1];"
        " y[p.y * w + p.x] = a[p.y * w + p.x] + b[p.x];", ["float32[64,64]", "float32[64]"],
        "(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y, int w,"
        " uint3 n) { unsigned i = blockIdx.x * blockDim.x + threadIdx.x,"
        " j = blockIdx.y * blockDim.y + threadIdx.y, k = blockIdx.z * blockDim.z + threadIdx.z;"
        " if (i >= n.x || j >= n.y || k >= n.z) return; y[j * w + i] = a[j * w + i] + b[i]; }",
    ),
    "simd_sum": (
        "uint i = thread_position_in_grid.x; y[i] = simd_sum(a[i]);", ["float32[1024]"],
        f"(const float* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        f" float s = a[i]; {_SUM.format('s')} y[i] = s; }}",
    ),
    "simd_sum of integers": (
        "uint i = thread_position_in_grid.x; y[i] = simd_sum(a[i]);", ["int32[1024]"],
        f"(const int* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        f" y[i] = __reduce_add_sync(0xffffffffu, a[i]); }}",
    ),
    "softmax of 32": (
        "uint i = thread_position_in_grid.x;"
        "float v = a[i], m = simd_max(v), e = metal::exp(v - m); y[i] = e / simd_sum(e);",
        ["float32[1024]"],
        f"(const float* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        f" float v = a[i], m = v; {_MAX.format('m')} float e = expf(v - m), s = e;"
        f" {_SUM.format('s')} y[i] = e / s; }}",
    ),
    "softmax": (
        "uint row = threadgroup_position_in_grid.x, lane = thread_position_in_threadgroup.x;"
        "int n = a_shape[1]; a += row * n; float m = -INFINITY, s = 0;"
        "for (int i = lane; i < n; i += 256) m = metal::max(m, a[i]);"
        "m = simd_max(m);"
        "for (int i = lane; i < n; i += 256) s += metal::exp(a[i] - m);"
        "s = simd_sum(s);"
        "for (int i = lane; i < n; i += 256) y[row * n + i] = metal::exp(a[i] - m) / s;",
        ["float32[64,100]"],
        "(const float* __restrict__ a, float* __restrict__ y, int n) {"
        " unsigned row = blockIdx.x, lane = threadIdx.x; a += row * n;"
        " float m = __int_as_float(0xff800000), s = 0;"
        " for (int i = lane; i < n; i += 256) m = fmaxf(m, a[i]);"
        f" {_MAX.format('m')} for (int i = lane; i < n; i += 256) s += expf(a[i] - m);"
        f" {_SUM.format('s')}"
        " for (int i = lane; i < n; i += 256) y[row * n + i] = expf(a[i] - m) / s; }",
    ),
    "sum of a threadgroup": (
        "threadgroup float part[32]; uint i = thread_position_in_grid.x,"
        "lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;"
        "float s = simd_sum(a[i]); if (lane == 0) part[sg] = s;"
        "threadgroup_barrier(mem_flags::mem_threadgroup);"
        "if (sg == 0) { float t = lane < simdgroups_per_threadgroup ? part[lane] : 0.0f;"
        "t = simd_sum(t); if (lane == 0) y[threadgroup_position_in_grid.x] = t; }",
        ["float32[1024]"],
        f"(const float* __restrict__ a, float* __restrict__ y, unsigned n) {{ {_ROW}"
        " __shared__ float part[32]; unsigned lane = threadIdx.x & 31, sg = threadIdx.x / 32;"
        f" float s = a[i]; {_SUM.format('s')} if (lane == 0) part[sg] = s; __syncthreads();"
        " if (sg == 0) { float t = lane < (blockDim.x + 31) / 32 ? part[lane] : 0.0f;"
        f" {_SUM.format('t')} if (lane == 0) y[blockIdx.x] = t; }} }}",
    ),
}  # fmt: skip


def instructions(cubin: bytes) -> int:
    """Instructions up to the last EXIT: what follows is padding.

    Raises:
        ToolchainError: there is no nvdisasm.
    """
    text = nvdisasm.disassemble(cubin)
    lines = [line for line in text.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    return max(i for i, line in enumerate(lines) if "EXIT" in line) + 1


def counts(name: str, library: nvrtc.Nvrtc) -> tuple[int, int]:
    """The instructions of a body of `TWINS` where no access is outside, and of its twin by hand.

    Raises:
        ToolchainError: there is no nvdisasm.
    """
    source, inputs, signature = TWINS[name]
    two = "p.y" in source
    kernel = ferrule.metal_kernel("twin", ["a", "b"][: len(inputs)], ["y"], source)
    ours = kernel.compile(
        ARCHITECTURE, inputs=inputs, output_dtypes=[ferrule.float32],
        grid=(64, 64, 1) if two else (1024, 1, 1), threadgroup=(32, 8, 1) if two else (256, 1, 1),
    )  # fmt: skip
    flags = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"]
    own = [*flags, "--fmad=false", "--device-as-default-execution-space", "-w", f"-I{INCLUDE}"]
    inside, _ = library.compile(_CHECKED.sub("", ours.text), "k.cu", own)
    by_hand, _ = library.compile(f'extern "C" __global__ void k{signature}', "k.cu", flags)
    return instructions(inside), instructions(by_hand)


def most(by_hand: int) -> float:
    """How many instructions a body may have whose twin has so many."""
    return MOST * by_hand + CHECKS


def count(bench: Bench) -> None:
    """Rows of instructions."""
    library = nvrtc.find_nvrtc()
    if library is None:
        bench.leave_out("NVRTC not installed: instructions are not counted")
    elif nvdisasm.find_nvdisasm() is None:
        bench.leave_out(f"nvdisasm not installed: instructions are not counted ({nvdisasm.REMEDY})")
    else:
        for name in TWINS:
            mine, theirs = counts(name, library)
            bench.measured(
                f"{name}, float32, {ARCHITECTURE}", "CUDA by hand", [(mine, theirs)],
                theirs / most(theirs), unit="instructions",
            )  # fmt: skip
