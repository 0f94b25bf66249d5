"""What the tests of CUDA units share: a unit of two steps, and its machine code without a GPU."""

from __future__ import annotations

from typing import Any

import ferrule as fe
from ferrule import Op
from ferrule.devices import protocol as devices
from ferrule.devices.protocol import UnitBinary

# A sum in two steps. `test_cuda_op.Emulated` carries both functions out.
SUM = """
extern "C" __global__ void parts(const T* x, float* partial, int64_t n) {
  float sum = 0;
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) sum += float(x[i]);
  partial[blockIdx.x] = sum;
}
extern "C" __global__ void total(const float* partial, float* y, int count, float scale) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partial[i];
  y[0] = sum * scale;
}
"""
PARTS = fe.cuda_step("parts", ["x", "partial", "int64 N"], blocks="min(N,7)", block=1)
TOTAL = fe.cuda_step("total", ["partial", "y", "min(N,7)", "scale"], blocks=1, block=1)
SUM_RULE = "x[N]:T, scale:float32 -> y[]:float32 where T in (float32, float16)"


def sum_op(name: str = "sum", **more: Any) -> Op:
    given = {"steps": [PARTS, TOTAL], "scratch": {"partial": "float32[7]"}, **more}
    return fe.op(name, SUM_RULE, cuda=fe.cuda_unit(SUM, **given))


def bound(op: Op, shapes: list[Any], kinds: list[str | None]) -> Any:
    said = op.rule.bind(op.name, shapes, kinds, numbers=dict.fromkeys(op.rule.numbers, 0))
    op.rule.results(op.name, said)
    return said


def compiled(op: Op, shapes: list[Any], kinds: list[str | None], arch: str = "sm_90") -> UnitBinary:
    """A unit's machine code for these inputs."""
    unit: Any = op.implementations[0]
    return devices.compile_unit(arch, unit.spec(unit.launch_for(bound(op, shapes, kinds)).template))


# -- what runs on a GPU in test_gpu_ops ------------------------------------------------------------

REDUCTION = """
template <int THREADS, class U>
__global__ void sums(const U* x, float* out, int64_t n) {
  __shared__ float part[THREADS];
  const int64_t first = blockIdx.x * int64_t(THREADS) + threadIdx.x;
  float sum = 0;
  for (int64_t i = first; i < n; i += gridDim.x * int64_t(THREADS)) sum += float(x[i]);
  part[threadIdx.x] = sum;
  for (int half = THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
"""


def reduction() -> Op:
    """The sum of an array, in two steps."""
    blocks = "min(ceildiv(x.size,1024),300)"
    return fe.op(
        "reduction", "x[*S]:T -> y[]:float32", cuda=fe.cuda_unit(
            REDUCTION, scratch={"unused": "int8[3]", "partial": f"float32[{blocks}]"},
            steps=[
                fe.cuda_step("sums<256, T>", ["x", "partial", "int64 x.size"], blocks=blocks,
                             block=256),
                fe.cuda_step("sums<256, float>", ["partial", "y", f"int64 {blocks}"], blocks=1,
                             block=256),
            ],
        ),
    )  # fmt: skip


ROTATE = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
__global__ void rotate(const float* x, float* y) {
  extern __shared__ float tile[];
  auto cluster = cg::this_cluster();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  cluster.sync();
  const float* other =
      cluster.map_shared_rank(tile, (cluster.block_rank() + 1) % cluster.num_blocks());
  y[i] = other[threadIdx.x];
  cluster.sync();  // until all have read, no block may end
}
"""


def rotation() -> Op:
    """Each block of a cluster gets what the next one has."""
    return fe.op(
        "rotation", "x[N,C,B]:float32 -> y[N,C,B]:float32", cuda=fe.cuda_unit(
            ROTATE,
            steps=[fe.cuda_step("rotate", ["x", "y"], blocks="N*C", block="B", cluster="C",
                           shared_memory="4*B")],
        ),
    )  # fmt: skip


REVERSE = """
extern "C" __global__ void reverse(const T* x, T* y, int n) {
  extern __shared__ __align__(16) unsigned char bytes[];
  T* tile = reinterpret_cast<T*>(bytes);
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[blockIdx.x * n + i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = tile[n - 1 - i];
}
"""


def reversal() -> Op:
    """Rows turned round in shared memory, as much as a row needs."""
    return fe.op(
        "reversal", "x[M,N]:T -> y[M,N]:T where T in (float32, int32)", cuda=fe.cuda_unit(
            REVERSE,
            steps=[fe.cuda_step("reverse", ["x", "y", "N"], blocks="M", block="min(N,1024)",
                           shared_memory="4*N")],
        ),
    )  # fmt: skip


def chosen() -> Op:
    """Says which implementation was taken: 1 and 3 bodies, 2 a unit."""
    unit = fe.cuda_unit(
        "__global__ void f(const float* x, float* y, int n, float scale) {"
        "  if (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n) y[i] = x[i] * scale + 2; }",
        steps=[fe.cuda_step("f", ["x", "y", "M", "scale"], blocks="ceildiv(M,64)", block=64)],
        when="M <= 1000",
    )
    text = "int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < M) y[i] = x[i] * scale + {};"
    return fe.op(
        "chosen", "x[M]:float32, scale:float32 -> y[M]:float32",
        cuda=[
            fe.cuda_body(text.format(1), grid="M", threadgroup="M", when="M <= 16"),
            unit,
            fe.cuda_body(text.format(3), grid="M", threadgroup=128),
        ],
    )  # fmt: skip


COUNT = """
__global__ void count(const int* x, int* bins, float* largest, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&bins[x[i]], 1);
  if (i == 0) largest[1] = largest[0];
}
"""


def counts() -> Op:
    """How often each number comes, added to what was there; by a fill, a copy and a launch."""
    return fe.op(
        "counts", "x[N]:int32, before[K]:int32 -> bins[K]:int32, largest[2]:float32",
        cuda=fe.cuda_unit(
            COUNT,
            steps=[
                fe.cuda_copy("bins", "before"),
                fe.cuda_fill("largest", float("-inf")),
                fe.cuda_step("count", ["x", "bins", "largest", "N"], blocks="ceildiv(N,256)",
                             block=256),
            ],
        ),
    )  # fmt: skip


PIECES = """
__global__ void parts(const T* x, const T* b, float s, __half h, __nv_bfloat16 g, int64_t at,
                      bool flip, float* partial, T* kept, uint32_t n, bool many, uint64_t all,
                      double* seen) {
  if (threadIdx.x + threadIdx.y + threadIdx.z + blockIdx.x + blockIdx.y) return;
  partial[0] = float(x[0]) + (has_b ? float(b[0]) : 0.5f) + float(kept[0]);
  seen[0] = s, seen[1] = float(h), seen[2] = float(g), seen[3] = double(at), seen[4] = flip;
  seen[5] = n, seen[6] = many, seen[7] = double(all), seen[8] = gridDim.y + 10 * blockDim.x;
}
__global__ void whole(const float* partial, float* y, T* c, int d) {
  if (threadIdx.x || blockIdx.x) return;
  y[0] = partial[0] + d;
  c[0] += 1;
}
"""


def pieces() -> Op:
    """All that steps can say, in one unit."""
    parts = fe.cuda_step(
        "parts", ["x", "b", "s", "h", "g", "at", "flip", "partial", "kept", "uint32 D", "N > 2",
                  "uint64 x.size * 7", "seen"],
        blocks=("N", "min(D,5)"), block=("D % 7 + 1", 2, 3), shared_memory="8 * D",
    )  # fmt: skip
    whole = fe.cuda_step(
        "whole", ["partial", "y", "c", "z.ndim - D"], blocks="N * D", block=32,
        cluster="D if D <= 8 else 1", when="D > 1",
    )  # fmt: skip
    return fe.op(
        "pieces",
        "x[N,D]:T, b[D]:T?, c[N]:T!, s:float32, h:float16, g:bfloat16, at:int64, flip:bool "
        "-> y[N]:float32, z[N,D]:T, w[D]:int64, seen[9]:float64",
        cuda=fe.cuda_unit(
            PIECES, template={"BLOCK": 8, "WIDE": True},
            scratch={"partial": "float32[ceildiv(N,3),2]", "kept": "T[D]", "none": "int8[0]",
                     "last": "int64[N]"},
            steps=[
                fe.cuda_fill("y", float("-inf")), fe.cuda_fill("kept", 1),
                fe.cuda_fill("last", -1), fe.cuda_fill("seen"), fe.cuda_copy("z", "x"), parts,
                whole, fe.cuda_fill("c", 0, when="N == 3"), fe.cuda_fill("w", -1),
            ],
        ),
    )  # fmt: skip


def added() -> Op:
    """Adds to an array in place; gives what was there before."""
    source = """
    __global__ void plus(float* c, const float* x, float* y, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = c[i], c[i] += x[i];
    }"""
    step = fe.cuda_step("plus", ["c", "x", "y", "N*K"], blocks="ceildiv(N*K,64)", block=64)
    return fe.op(
        "added", "c[N,K]:float32!, x[N,K]:float32 -> y[N,K]:float32",
        cuda=fe.cuda_unit(source, steps=[step]),
    )  # fmt: skip


def halves() -> Op:
    """A body with numbers of 16 bits."""
    return fe.op(
        "halves", "x[N]:float32, h:float16, g:bfloat16 -> y[N]:float32",
        cuda="int i = blockIdx.x * blockDim.x + threadIdx.x; "
        "if (i < N) y[i] = x[i] + float(h) * 3 + float(g);",
        grid="N", threadgroup=32, init_value="N",
    )  # fmt: skip
