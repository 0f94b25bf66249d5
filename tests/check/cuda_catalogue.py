"""Bodies in CUDA with one bug each, and what mends it: the measure of checks of CUDA texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

F = np.arange(1, 65, dtype=np.float32)
N = np.arange(64, dtype=np.int32)


@dataclass(frozen=True)
class Bug:
    """One kernel with a bug in the lines that say BUG, and one launch of it.

    Attributes:
        kind: of the finding.
        source: the body; its inputs are a and b, its output is out.
        mend: what is wrong, and what is right, of source and header.
        also: kinds that may be found, too.
        anywhere: no line is to blame.
    """

    kind: str
    source: str
    mend: tuple[str, str]
    inputs: tuple[Any, ...] = (F,)
    size: int = 64
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    header: str = ""
    shared: int = 0
    init: float | None = None
    dtype: Any = np.float32
    also: frozenset[str] = field(default_factory=frozenset)
    anywhere: bool = False

    def lines(self) -> set[tuple[str, int]]:
        """The text and line of what says BUG."""
        return {
            (where, n)
            for where, text in (("source", self.source), ("header", self.header))
            for n, line in enumerate(text.split("\n"), 1)
            if "BUG" in line
        }

    def mended(self) -> Bug:
        """The same without the bug."""
        bad, good = self.mend
        assert (self.source + self.header).count(bad) == 1
        source, header = self.source.replace(bad, good), self.header.replace(bad, good)
        return replace(self, source=source, header=header)


I = "int i = threadIdx.x;\n"  # noqa: E741
TILE = I + "__shared__ float tile[64];\ntile[i] = a[i];\n"
MISSING = "// no barrier"

BUGS: dict[str, Bug] = {
    # -- bounds
    "reads past the end": Bug(
        "bounds", I + "out[i] = a[i + 1]; // BUG", ("i + 1", "(i + 1) % 64")),
    "reads before the start": Bug(
        "bounds", I + "out[i] = a[i - 1]; // BUG", ("i - 1", "max(i - 1, 0)")),
    "threads beyond the grid write": Bug(
        "bounds", "int i = blockIdx.x * 64 + threadIdx.x;\nout[i] = 1; // BUG",
        ("out[i] = 1", "if (i < 100) out[i] = 1"), size=100, grid=(100, 1, 1)),
    "a vector beyond the end": Bug(
        "bounds", I + "float4 v = ((const float4*)a)[i]; // BUG\nout[i] = v.x + v.w;",
        ("[i]; // BUG", "[i / 4];")),
    "an index that wraps around": Bug(
        "bounds", I + "unsigned k = i - 3u;\nout[i] = a[k]; // BUG", ("a[k]", "a[k & 63]")),
    "static shared memory is too small": Bug(
        "bounds", I + "__shared__ float tile[48];\ntile[i] = a[i]; // BUG\n__syncthreads();\n"
        "out[i] = tile[i / 2];", ("tile[48]", "tile[64]")),
    "dynamic shared memory is too small": Bug(
        "bounds", I + "extern __shared__ float tile[];\nconst int n = 65;\n"
        "if (i == 0) tile[n - 1] = 0; // BUG\n__syncthreads();\nout[i] = i;",
        ("n = 65", "n = 64"), shared=256),
    "dynamic shared memory of two types": Bug(
        "bounds", I + "extern __shared__ char raw[];\nfloat* f = (float*)raw;\n"
        "int* n = (int*)(raw + 256);\nf[i] = a[i];\nn[i + 1] = i; // BUG\n__syncthreads();\n"
        "out[i] = f[i] + n[i + 1 - 1];", ("n[i + 1] = i", "n[i] = i"), shared=512,
        also=frozenset({"uninitialised", "race"})),
    "a private array": Bug(
        "bounds", I + "float v[4] = {};\nfor (int k = 0; k <= 4; ++k)\n  v[k] = a[i]; // BUG\n"
        "out[i] = v[i & 3];", ("k <= 4", "k < 4")),
    "a function of the header": Bug(
        "bounds", I + "out[i] = at(a, i); // BUG", ("p[i + 64]", "p[i]"),
        header="__device__ float at(const float* p, int i) {\n  return p[i + 64];\n}\n"),
    "inline PTX": Bug(
        "bounds", I + 'float v;\n'
        'asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(a + i + 9)); // BUG\n'
        "out[i] = v;", ("a + i + 9", "a + i")),
    "a copy in the background": Bug(
        "bounds", I + "__shared__ __align__(16) float tile[64];\n"
        "unsigned to = __cvta_generic_to_shared(tile + 4 * i);\nif (i < 17)\n"
        '  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(to), "l"(a + 4 * i));'
        ' // BUG\nasm volatile("cp.async.wait_all;");\n__syncthreads();\nout[i] = tile[i];',
        ("i < 17", "i < 16")),
    "memcpy": Bug(
        "bounds", I + "float v[3];\nmemcpy(v, a + i, sizeof v); // BUG\n"
        "out[i] = v[0] + v[1] + v[2];",
        ("a + i,", "a + min(i, 61),")),
    "atomicAdd": Bug(
        "bounds", I + "atomicAdd(&out[i / 8 + 1], 1.0f); // BUG", ("i / 8 + 1", "i / 8"),
        size=8, init=0),
    # -- races
    "a missing __syncthreads": Bug(
        "race", TILE + MISSING + "\nout[i] = tile[63 - i]; // BUG", (MISSING, "__syncthreads();")),
    "a missing __syncthreads at a loop's end": Bug(
        "race", I + "__shared__ float tile[64];\nfloat s = 0;\nfor (int k = 0; k < 3; ++k) {\n"
        "  tile[i] = a[i] + k; // BUG\n  __syncthreads();\n  s += tile[63 - i]; // BUG\n"
        f"  {MISSING}\n}}\nout[i] = s;", (MISSING, "__syncthreads();")),
    "a missing __syncwarp": Bug(
        "race", I + "__shared__ float tile[64];\ntile[i] = a[i];\n" + MISSING +
        "\nout[i] = tile[i ^ 1]; // BUG", (MISSING, "__syncwarp();")),
    "a tree of a warp without __syncwarp": Bug(
        "race", I + "__shared__ volatile float t[64];\nt[i] = a[i];\n__syncthreads();\n"
        "if (i < 32) {\n  for (int d = 16; d; d /= 2) {\n    float v = t[i + d];"
        " // BUG\n    __syncwarp();\n    if (i < d) t[i] = t[i] + v; // BUG\n"
        f"    {MISSING}\n  }}\n}}\n__syncthreads();\nout[i] = t[0];", (MISSING, "__syncwarp();")),
    "__syncwarp of other lanes": Bug(
        "race", I + "__shared__ float tile[64];\ntile[i] = a[i];\n"
        "if (i % 32 < 16) __syncwarp(0x0000ffff);\nelse __syncwarp(0xffff0000);\n"
        "out[i] = tile[i ^ 16]; // BUG", ("i ^ 16", "i ^ 8")),
    "__syncwarp between warps": Bug(
        "race", TILE + "__syncwarp();\nout[i] = tile[63 - i]; // BUG",
        ("__syncwarp()", "__syncthreads()")),
    "threads of two blocks": Bug(
        "race", I + "out[i + blockIdx.x] = blockIdx.x; // BUG",
        ("i + blockIdx.x", "i + 32 * blockIdx.x"), threadgroup=(32, 1, 1),
        also=frozenset({"unwritten"})),
    "all threads write": Bug(
        "race", I + "out[0] = a[i]; // BUG", ("out[0]", "if (i == 0) out[0]"), size=1),
    "a counter without an atomic": Bug(
        "race", I + "out[0] += a[i]; // BUG", ("out[0] += a[i]", "atomicAdd(out, a[i])"), size=1,
        init=0),
    "an atomic beside a plain read": Bug(
        "race", I + "__shared__ int n;\nif (i == 0) n = 0;\n__syncthreads();\natomicAdd(&n, 1);\n"
        + MISSING + "\nout[i] = n; // BUG", (MISSING, "__syncthreads();")),
    "a lock without fences": Bug(
        "race", I + "__shared__ int lock;\n__shared__ float sum;\nif (i == 0) lock = sum = 0;\n"
        "__syncthreads();\nbool done = false;\n"
        "while (!done)\n  if (atomicCAS(&lock, 0, 1) == 0) {\n"
        "    sum += a[i]; // BUG\n    " + MISSING + "\n    atomicExch(&lock, 0);\n"
        "    done = true;\n"
        "  }\n__syncthreads();\nout[i] = sum;", (MISSING, "__threadfence();")),
    "a numbered barrier too few": Bug(
        "race", TILE + MISSING + "\nout[i] = tile[63 - i]; // BUG",
        (MISSING, 'asm volatile("bar.sync 1, 64;" ::: "memory");')),
    # -- never written
    "an output that is read": Bug(
        "uninitialised", I + "out[i] = out[i] + a[i]; // BUG", ("out[i] + a", "a")),
    "shared memory that nothing writes": Bug(
        "uninitialised", I + "__shared__ float tile[64];\nif (i) tile[i] = a[i];\n"
        "__syncthreads();\nout[i] = tile[i]; // BUG", ("if (i) tile", "tile")),
    "dynamic shared memory that nothing writes": Bug(
        "uninitialised", I + "extern __shared__ int n[];\nif (i < 60) n[i] = i;\n__syncthreads();\n"
        "out[i] = n[i]; // BUG", ("if (i < 60) n", "n"), shared=256),
    "outputs that nothing writes": Bug(
        "unwritten", I + "if (i < 63) out[i] = a[i];", ("i < 63", "i < 64"), anywhere=True),
    # -- who comes to a barrier
    "a __syncthreads in a branch": Bug(
        "divergence", TILE + "if (i < 40) __syncthreads(); // BUG\nout[i] = tile[i];",
        ("if (i < 40) ", "")),
    "a return before __syncthreads": Bug(
        "divergence", TILE + "if (i >= 50) return;\n__syncthreads(); // BUG\nout[i] = tile[i];",
        ("if (i >= 50) return;", ""), init=0),
    "two places of __syncthreads": Bug(
        "divergence", TILE + "if (i < 32)\n  __syncthreads(); // BUG\nelse\n"
        "  __syncthreads(); // BUG\nout[i] = tile[i];",
        ("if (i < 32)\n  __syncthreads(); // BUG\nelse\n", "")),
    "__syncwarp without all": Bug(
        "divergence", TILE + "if (i % 32 != 7)\n  __syncwarp(); // BUG\n__syncthreads();\n"
        "out[i] = tile[i];", ("if (i % 32 != 7)\n", "")),
    "a numbered barrier of too many": Bug(
        "divergence", I + 'if (i < 32) asm volatile("bar.sync 2, 64;"); // BUG\nout[i] = a[i];',
        ("bar.sync 2, 64", "bar.sync 2, 32")),
    # -- lanes
    "a shuffle with lanes elsewhere": Bug(
        "lanes", I + "float v = a[i];\nif (i % 32 < 20)\n"
        "  v += __shfl_xor_sync(0xffffffff, v, 1); // BUG\n__syncthreads();\nout[i] = v;",
        ("0xffffffff", "0x000fffff")),
    "a lane that its mask does not name": Bug(
        "lanes", I + "out[i] = __shfl_sync(0xfffffffe, a[i], 3); // BUG",
        ("0xfffffffe", "0xffffffff")),
    "a shuffle from a lane that has ended": Bug(
        "lanes", I + "if (i % 32 >= 16) return;\n"
        "out[i] = __shfl_down_sync(0xffffffff, a[i], 1); // BUG",
        ("a[i], 1)", "a[i], 1, 16)"), init=0),
    "a short warp's tree": Bug(
        "lanes", I + "float v = a[i];\nfor (int d = 16; d; d /= 2)\n"
        "  v += __shfl_down_sync(0xffffffff, v, d); // BUG\nout[i] = v;",
        ("int d = 16", "int d = 0"), size=40, grid=(40, 1, 1), threadgroup=(40, 1, 1)),
    "a tile with lanes elsewhere": Bug(
        "lanes", "auto tile = cg::tiled_partition<8>(cg::this_thread_block());\n" + I +
        "float v = a[i];\nif (i % 8 != 5)\n  v = tile.shfl(v, 0); // BUG\n__syncthreads();\n"
        "out[i] = v;", ("if (i % 8 != 5)\n", "")),
    # -- numbers
    "an int that overflows": Bug(
        "arithmetic", I + "int k = b[i] * 100000000; // BUG\nout[i] = k;",
        ("int k = b[i] * 100000000", "long k = b[i] * 100000000l"), inputs=(F, N)),
    "a division by zero": Bug(
        "arithmetic", I + "out[i] = 100 / b[i]; // BUG", ("/ b[i]", "/ (b[i] + 1)"), inputs=(F, N)),
    "a shift beyond the width": Bug(
        "arithmetic", I + "out[i] = 1u << b[i]; // BUG", ("<< b[i]", "<< (b[i] & 31)"),
        inputs=(F, N)),
    "a half that overflows": Bug(
        "arithmetic", I + "__half h = __float2half(a[i] * 2000); // BUG\nout[i] = __half2float(h);",
        ("* 2000", "* 2"), also=frozenset({"nan"})),
    "a vector that is not aligned": Bug(
        "arithmetic", I + "float2 v = *(const float2*)(a + i); // BUG\nout[i] = v.x;",
        ("(a + i)", "(a + i / 2 * 2)"), also=frozenset({"unwritten", "bounds"})),
    "an assertion": Bug(
        "arithmetic", I + "assert(a[i] < 60); // BUG\nout[i] = a[i];", ("< 60", "< 600")),
    "a logarithm of zero": Bug(
        "nan", I + "out[i] = logf(a[i] - 1); // BUG", ("a[i] - 1", "a[i]")),
    "an infinite quotient": Bug(
        "nan", I + "out[i] = 1 / (a[i] - 1); // BUG", ("a[i] - 1", "a[i]")),
    "an exponential that overflows": Bug(
        "nan", I + "out[i] = __expf(a[i] * 10); // BUG", ("a[i] * 10", "-a[i]")),
    # -- what is not the kernel's
    "a write to an input": Bug(
        "alias", I + "const_cast<float*>(a)[i] = 0; // BUG\nout[i] = 1;",
        ("const_cast<float*>(a)[i] = 0;", "")),
}  # fmt: skip
