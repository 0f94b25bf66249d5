"""Bodies in CUDA, each with what it gives: for running them without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Body:
    """One kernel with a call of it, and what its outputs must be.

    Attributes:
        source, header: the text; the inputs are a, b and c, the outputs out and more.
        inputs: the arrays.
        want: the outputs, from the inputs.
        grid, threadgroup: of the launch.
        exact: bits must be equal, else nearly.
    """

    source: str
    inputs: list[Any]
    want: Callable[..., Any]
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    header: str = ""
    shared: int = 0
    template: list[tuple[str, Any]] = field(default_factory=list)
    init: float | None = None
    exact: bool = True


RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal(100).astype(np.float32)
F = RANDOM.standard_normal(64).astype(np.float32)
N = RANDOM.integers(-1000, 1000, 64).astype(np.int32)
U = RANDOM.integers(0, 2**32, 64, np.uint64).astype(np.uint32)
H = F.astype(np.float16)
INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
LANE = "int i = threadIdx.x, lane = i % 32;\n"


def warps(a: Array) -> Array:
    """The rows are warps."""
    return a.reshape(-1, 32)


def per_lane(values: Array) -> Array:
    """One value of each warp, for all its lanes."""
    return np.repeat(values, 32)


BODIES: dict[str, Body] = {
    "a guard, and threads beyond the grid": Body(
        INDEX + "if (i < a_shape[0]) out[i] = a[i] + 1;", [X], lambda a: a + 1, grid=(100, 1, 1),
    ),
    "blocks are whole": Body(
        "if (threadIdx.x == 0) atomicAdd(&out[0], 0.0f);"
        "if (blockIdx.x * blockDim.x + threadIdx.x >= 100) atomicAdd(&out[0], 1.0f);",
        [X], lambda a: np.array([28], np.float32), grid=(100, 1, 1), init=0,
    ),
    "positions in three axes": Body(
        "int i = ((threadIdx.z + blockIdx.z * blockDim.z) * (gridDim.y * blockDim.y) + threadIdx.y"
        " + blockIdx.y * blockDim.y) * (gridDim.x * blockDim.x) + threadIdx.x + blockIdx.x *"
        " blockDim.x;\nout[i] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z"
        " + 1000 * blockIdx.x + 10000 * blockIdx.y + 100000 * blockIdx.z;",
        [X],
        lambda a: np.fromfunction(
            lambda z, y, x: x % 4 + 10 * (y % 2) + 100 * (z % 2) + 1000 * (x // 4)
            + 10000 * (y // 2) + 100000 * (z // 2), (4, 4, 8)).astype(np.float32).ravel(),
        grid=(8, 4, 4), threadgroup=(4, 2, 2),
    ),
    "static shared memory": Body(
        LANE + "__shared__ float tile[64]; tile[i] = a[i]; __syncthreads(); out[i] = tile[63 - i];",
        [F], lambda a: a[::-1],
    ),
    "shared memory of two dims and several names": Body(
        "__shared__ float t[8][9], u[8], v;\nint x = threadIdx.x, y = threadIdx.y;\n"
        "t[y][x] = a[y * 8 + x]; if (y == 0) u[x] = x; if (x + y == 0) v = 2;\n__syncthreads();\n"
        "out[y * 8 + x] = t[x][y] * v + u[x];",
        [F], lambda a: (a.reshape(8, 8).T * 2 + np.arange(8, dtype=np.float32)).ravel(),
        grid=(8, 8, 1), threadgroup=(8, 8, 1),
    ),
    "dynamic shared memory": Body(
        LANE + "extern __shared__ float tile[];\ntile[i] = a[i]; __syncthreads();"
        "out[i] = tile[i ^ 1];",
        [F], lambda a: a.reshape(-1, 2)[:, ::-1].ravel(), shared=256,
    ),
    "dynamic shared memory of two types": Body(
        LANE + "extern __shared__ __align__(16) unsigned char raw[];\n"
        "float* f = reinterpret_cast<float*>(raw); int* n = (int*)(raw + 64 * sizeof(float));\n"
        "f[i] = a[i]; n[i] = b[i]; __syncthreads(); out[i] = f[63 - i] + n[63 - i];",
        [F, N], lambda a, b: (a + b.astype(np.float32))[::-1], shared=512,
    ),
    "dynamic shared memory of the header": Body(
        LANE + "put(i, a[i]); __syncthreads(); out[i] = pool[63 - i];", [F], lambda a: a[::-1],
        header="extern __shared__ float pool[];\n"
        "__device__ void put(int i, float v) { pool[i] = v; }", shared=256,
    ),
    "a tree in shared memory": Body(
        LANE + "__shared__ volatile int t[64]; t[i] = a[i];\n"
        "for (int d = 32; d > 0; d >>= 1) { __syncthreads(); if (i < d) t[i] += t[i + d]; }\n"
        "__syncthreads(); out[i] = t[0];",
        [N], lambda a: np.full(64, a.sum()).astype(np.float32),
    ),
    "two halves of shared memory in turn": Body(
        LANE + "__shared__ float t[2][64]; t[0][i] = a[i]; int at = 0;\n"
        "for (int r = 0; r < 5; ++r) { __syncthreads(); t[1 - at][(i + 1) % 64] = t[at][i];"
        " at = 1 - at; }\n__syncthreads(); out[i] = t[at][i];",
        [F], lambda a: np.roll(a, 5),
    ),
    "votes of a block": Body(
        LANE + "int n = __syncthreads_count(a[i] > 0), o = __syncthreads_or(a[i] > 900),\n"
        "  e = __syncthreads_and(a[i] > -2000), f = __syncthreads_and(a[i] > 0);\n"
        "out[i] = n * 8 + (o != 0) * 4 + (e != 0) * 2 + (f != 0);",
        [N], lambda a: np.full(64, (a > 0).sum() * 8 + (a > 900).any() * 4 + 2 + (a > 0).all()),
    ),
    "a butterfly": Body(
        LANE + "float v = a[i];\n#pragma unroll\n"
        "for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);\nout[i] = v;",
        [N], lambda a: per_lane(warps(a).sum(1)),
    ),
    "a reduction with half a warp's mask": Body(
        LANE + "int v = a[i];\nif (lane < 16) {\n"
        "  for (int d = 8; d; d /= 2) v += __shfl_down_sync(0x0000ffff, v, d, 16);\n"
        "} else {\n  for (int d = 8; d; d /= 2) v += __shfl_down_sync(0xffff0000, v, d, 16);\n}\n"
        "v = __shfl_sync(0xffffffff, v, 0, 16);\nout[i] = v;",
        [N], lambda a: np.repeat(a.reshape(-1, 16).sum(1), 16),
    ),
    "lanes meet at two places": Body(
        LANE + "int v = a[i];\nif (lane & 1) v = __shfl_xor_sync(~0u, v, 1);\n"
        "else v = __shfl_xor_sync(~0u, v, 1);\nout[i] = v;",
        [N], lambda a: a.reshape(-1, 2)[:, ::-1].ravel(),
    ),
    "a prefix sum of a warp": Body(
        LANE + "int v = a[i];\nfor (int d = 1; d < 32; d *= 2) {\n"
        "  int w = __shfl_up_sync(0xffffffff, v, d); if (lane >= d) v += w;\n}\nout[i] = v;",
        [N], lambda a: warps(a).cumsum(1).ravel(),
    ),
    "64-bit and 16-bit shuffles": Body(
        LANE + "long long w = __shfl_sync(~0u, (long long)a[i] << 33, 3);\n"
        "double d = __shfl_sync(~0u, (double)a[i], 4); __half h = __shfl_sync(~0u, b[i], 5);\n"
        "out[i] = (w >> 33) + d + __half2float(h);",
        [N, H],
        lambda a, b: per_lane(warps(a)[:, 3] + warps(a)[:, 4] + warps(b)[:, 5].astype(np.float64)),
        exact=False,
    ),
    "votes of a warp": Body(
        LANE + "unsigned m = __ballot_sync(~0u, a[i] > 0);\n"
        "out[i] = __popc(m) + 100 * (__any_sync(~0u, a[i] > 990) != 0)"
        " + 1000 * (__all_sync(~0u, a[i] > -1001) != 0);",
        [N], lambda a: per_lane((warps(a) > 0).sum(1) + 100 * (warps(a) > 990).any(1) + 1000),
    ),
    "who is active": Body(
        LANE + "out[i] = -1; if (a[i] > 0) { unsigned m = __activemask(); out[i] = __popc(m); }",
        [N],
        lambda a: np.where(a > 0, per_lane((warps(a) > 0).sum(1)), -1),
    ),
    "matches": Body(
        LANE + "int all; unsigned m = __match_any_sync(~0u, a[i] & 3);\n"
        "unsigned n = __match_all_sync(~0u, i / 32, &all);\n"
        "out[i] = __popc(m) + 100 * all + (n == 0xffffffff);",
        [N],
        lambda a: (warps(a & 3)[:, :, None] == warps(a & 3)[:, None]).sum(2).ravel() + 101,
    ),
    "reductions of words": Body(
        LANE + "int s = __reduce_add_sync(~0u, a[i]), h = __reduce_max_sync(~0u, a[i]),\n"
        " l = __reduce_min_sync(~0u, a[i]); unsigned x = __reduce_xor_sync(~0u, (unsigned)a[i]),\n"
        " o = __reduce_or_sync(~0u, 1u << lane), n = __reduce_and_sync(~0u, ~(1u << lane));\n"
        "out[i] = s + h * 3 + l * 5 + (x & 255) + (o == ~0u) + (n == 0);",
        [N],
        lambda a: per_lane(
            warps(a).sum(1) + 3 * warps(a).max(1) + 5 * warps(a).min(1)
            + (np.bitwise_xor.reduce(warps(a), 1) & 255) + 2),
    ),
    "a warp whose lanes end early": Body(
        LANE + "if (lane >= 24) return; int v = a[i];\n"
        "v = __shfl_sync(0x00ffffff, v, 23); out[i] = v;",
        [N],
        lambda a: np.where(np.arange(64) % 32 < 24, per_lane(warps(a)[:, 23]), 0), init=0,
    ),
    "a short warp": Body(
        "float v = a[threadIdx.x]; v += __shfl_down_sync(0xffffffff, v, 1);\n"
        "if (threadIdx.x < 39) out[threadIdx.x] = v;",
        [F[:40]], lambda a: np.append(a[:39] + a[[*range(1, 32), 31, *range(33, 40)]], 0),
        grid=(40, 1, 1), threadgroup=(40, 1, 1), init=0,
    ),
    "__syncwarp orders what lanes exchange": Body(
        LANE + "__shared__ int t[64]; t[i] = a[i]; __syncwarp(); int v = t[i ^ 5]; __syncwarp();\n"
        "t[i] = v; __syncwarp(0xffffffff); out[i] = t[i ^ 1];",
        [N], lambda a: a[np.arange(64) ^ 4],
    ),
    "a histogram in shared memory": Body(
        LANE + "__shared__ unsigned bins[8]; if (i < 8) bins[i] = 0; __syncthreads();\n"
        "atomicAdd(&bins[a[i] & 7], 1u); __syncthreads(); if (i < 8) atomicAdd(out + i, bins[i]);",
        [N], lambda a: np.bincount(a & 7, minlength=64), init=0,
    ),
    "atomics that keep the old value": Body(
        INDEX + "__shared__ int n; if (i == 0) n = 0; __syncthreads(); int at = atomicAdd(&n, 1);\n"
        "__syncthreads(); out[i] = n; more[at] = 1;",
        [N], lambda a: [np.full(64, 64), np.ones(64)],
    ),
    "atomics of words": Body(
        LANE + "__shared__ int t[6]; __shared__ unsigned u[2];\nif (i == 0) { t[0] = 1 << 30;"
        " t[1] = -t[0]; t[2] = -1; t[3] = 0; t[4] = 0; t[5] = 500; u[0] = 0; u[1] = 0; }\n"
        "__syncthreads();\natomicMin(t, a[i]); atomicMax(t + 1, a[i]); atomicAnd(t + 2, a[i]);\n"
        "atomicOr(t + 3, a[i]); atomicXor(t + 4, a[i]); atomicSub(t + 5, a[i]);\n"
        "atomicInc(u, 9); atomicDec(u + 1, 9);\n__syncthreads();\n"
        "out[i] = i < 6 ? t[i] : i < 8 ? int(u[i - 6]) : 0;",
        [N],
        lambda a: np.array([a.min(), a.max(), np.bitwise_and.reduce(a), np.bitwise_or.reduce(a),
                            np.bitwise_xor.reduce(a), 500 - a.sum(), 4, 6] + [0] * 56),
    ),
    "a maximum of floats by atomicCAS": Body(
        LANE + "__shared__ int top; if (i == 0) top = __float_as_int(-1e30f); __syncthreads();\n"
        "int old = top;\nwhile (__int_as_float(old) < a[i]) {\n"
        "  int seen = atomicCAS(&top, old, __float_as_int(a[i])); if (seen == old) break;"
        " old = seen;\n}\n__syncthreads(); out[i] = __int_as_float(top);",
        [F], lambda a: np.full(64, a.max()),
    ),
    "a lock": Body(
        LANE + "__shared__ int lock, sum; if (i == 0) lock = sum = 0; __syncthreads();\n"
        "bool done = false;\nwhile (!done) if (atomicCAS(&lock, 0, 1) == 0) {\n"
        "  __threadfence(); sum += a[i]; __threadfence(); atomicExch(&lock, 0); done = true;\n}"
        "\n__syncthreads(); out[i] = sum;",
        [N], lambda a: np.full(64, a.sum()),
    ),
    "a warp that waits for another": Body(
        LANE + "__shared__ int flag; __shared__ float v; if (i == 0) flag = 0; __syncthreads();\n"
        "if (i < 32) { while (atomicAdd(&flag, 0) == 0) { } if (i == 0) out[0] = v; }\n"
        "else if (i == 40) { v = a[40]; __threadfence(); atomicExch(&flag, 1); }",
        [F], lambda a: np.append(a[40:41], np.zeros(63)), init=0,
    ),
    "the last block": Body(
        INDEX + "if (i < 64) atomicAdd(&more[1], a[i]); __syncthreads(); __shared__ bool last;\n"
        "if (threadIdx.x == 0) { __threadfence();\n"
        "  last = atomicInc((unsigned*)more, gridDim.x - 1) == gridDim.x - 1; }\n"
        "__syncthreads(); if (last) { __threadfence(); out[threadIdx.x] = more[1]; }",
        [np.arange(64, dtype=np.float32)],
        lambda a: [np.append(np.full(16, a.sum()), np.zeros(48)),
                   np.append([0, a.sum()], np.zeros(62))],
        threadgroup=(16, 1, 1), init=0,
    ),
    "atomics of halves and doubles": Body(
        LANE + "__shared__ __half h; __shared__ double d; __shared__ __half2 p;\n"
        "if (i == 0) { h = 0; d = 0; p = __float2half2_rn(0.0f); } __syncthreads();\n"
        "atomicAdd(&h, __half(1)); atomicAdd(&d, (double)a[i]);\n"
        "atomicAdd(&p, __floats2half2_rn(1, 2)); __syncthreads();\n"
        "out[i] = float(h) + d + __low2float(p) + __high2float(p);",
        [N], lambda a: np.full(64, 64 + a.sum() + 64 + 128),
    ),
    "arithmetic of __half": Body(
        LANE + "__half x = a[i], y = __float2half(0.3f); x = x * y + __hsub(x, y); x += y;\n"
        "__half2 p = __halves2half2(x, y); p = __hfma2(p, p, p);\n"
        "out[i] = __half2float(__hadd(__low2half(p), __high2half(p)));\n"
        "more[i] = float(__hmax(x, y)) + (x > y) + (__hlt(x, y) ? 4 : 0) + float(hexp(y));",
        [H], lambda a: half_arithmetic(a), exact=False,
    ),
    "arithmetic of __nv_bfloat16": Body(
        LANE + "__nv_bfloat16 x = __float2bfloat16(a[i]), y(1.5f); x = x / y; x -= y;\n"
        "__nv_bfloat162 p = __halves2bfloat162(x, y); p = __hmul2(p, p);\n"
        "out[i] = __bfloat162float(p.x) + __bfloat162float(p.y); more[i] = float(-x);",
        [F], lambda a: bfloat_arithmetic(a),
    ),
    "vectors of floats": Body(
        LANE + "if (i < 16) { float4 v = reinterpret_cast<const float4*>(a)[i];\n"
        "v = make_float4(v.w, v.z, v.y, v.x); ((float4*)out)[i] = v;\n"
        "float2 w = make_float2(v.x, v.y); int3 n = make_int3(1, 2, 3); uchar4 c = {1, 2, 3, 4};\n"
        "more[i] = w.x + n.z + c.w + sizeof(float3); }",
        [F],
        lambda a: [a.reshape(-1, 4)[:, ::-1].ravel(),
                   np.append(a.reshape(-1, 4)[:, 3] + 3 + 4 + 12, np.zeros(48, np.float32))],
        init=0,
    ),
    "functions of floats": Body(
        LANE + "float x = fabsf(a[i]) + 0.1f;\n"
        "out[i] = __expf(-x) + rsqrtf(x) + __logf(x) + fmaf(x, x, 1) + __fdividef(1, x) + tanh(x)"
        " + erff(x) + exp2f(x) + __powf(x, 0.5f) + fmaxf(x, 1) + min(x, 2.0f) + __saturatef(x);",
        [F], lambda a: functions(np.abs(a.astype(np.float64)) + 0.1), exact=False,
    ),
    "functions of bits": Body(
        LANE + "unsigned x = a[i];\n"
        "out[i] = __popc(x) + 100 * __clz(x) + 10000 * (__ffs(x) + 1);\n"
        "more[i] = (__brev(x) & 0xff) + 256 * (__byte_perm(x, ~x, 0x6543) & 0xff)"
        " + 65536 * (__funnelshift_l(x, ~x, 8) & 0xff);",
        [U], lambda a: bits(a),
    ),
    "products of words": Body(
        LANE + "int x = a[i] * 4000000; unsigned u = x;\n"
        "out[i] = __mulhi(x, x) + __mul24(x, 3) % 1000 + __dp4a(x, 0x01020304, 7);\n"
        "more[i] = __umulhi(u, 12345u) + max(a[i], 3) + min(a[i], -3) + abs(a[i])"
        " + __sad(x, 3, 0);",
        [N], lambda a: words(a),
    ),
    "directions of rounding": Body(
        LANE + "float x = a[i], y = 0.1f;\n"
        "out[i] = (__fadd_ru(x, y) >= __fadd_rn(x, y)) + (__fadd_rd(x, y) <= __fadd_rn(x, y))"
        " + (__fmul_ru(x, y) > __fmul_rd(x, y)) + (fabsf(__fmul_rz(x, y)) <= fabsf(x * y))"
        " + (__fdiv_ru(x, y) > __fdiv_rd(x, y)) + (__fsqrt_ru(2) > __fsqrt_rd(2));\n"
        "more[i] = __float2int_rn(x * 3) * 1000 + __float2int_rd(x) * 100 + __float2int_ru(x) * 10"
        " + __float2int_rz(x * 7);",
        [F],
        lambda a: [np.full(64, 6), np.rint(a * np.float32(3)) * 1000 + np.floor(a) * 100
                   + np.ceil(a) * 10 + np.trunc(a * np.float32(7))],
    ),
    "whole numbers of floats beyond them": Body(
        "if (threadIdx.x == 0) { out[0] = __float2int_rz(1e20f) == INT_MAX;\n"
        "out[1] = __float2int_rz(-INFINITY) == INT_MIN; out[2] = __float2int_rz(NAN) == 0;\n"
        "out[3] = __float2uint_rz(-5.0f) == 0; out[4] = __double2ll_rn(1e300) == LLONG_MAX; }",
        [F], lambda a: np.append(np.ones(5), np.zeros(59)), init=0,
    ),
    "doubles": Body(
        LANE + "double d = a[i]; d = rsqrt(d * d + 1) + __dadd_rn(d, 1.0) + fma(d, d, 1.0);\n"
        "out[i] = float(d) + __hiloint2double(0x3ff00000, 0);",
        [F],
        lambda a: doubles(a.astype(np.float64)),
        exact=False,
    ),
    "limits, arrays and tuples": Body(
        LANE + "cuda::std::array<float, 4> v{}; v[i % 4] = a[i];\n"
        "auto [p, q] = cuda::std::make_tuple(v[0], v[1]);\n"
        "out[i] = p + q + v[2] + v[3] + (cuda::std::numeric_limits<float>::max() > 1e38f)\n"
        " + (float(cuda::std::numeric_limits<__half>::max()) == 65504.0f)"
        " + cuda::std::is_same_v<decltype(p), float>;",
        [F], lambda a: a + np.float32(1) + np.float32(1) + np.float32(1), exact=False,
    ),
    "complex numbers": Body(
        LANE + "complex64_t z(a[i], 1.0f); z = z * z + cuda::std::conj(z); out[i] = z.real();\n"
        "more[i] = z.imag();",
        [F],
        lambda a: [((a + 1j) ** 2 + (a - 1j)).real, ((a + 1j) ** 2 + (a - 1j)).imag], exact=False,
    ),
    "tiles of cooperative groups": Body(
        "auto block = cg::this_thread_block(); auto tile = cg::tiled_partition<8>(block);\n"
        "int i = block.thread_rank(), v = a[i];\n"
        "for (int d = tile.size() / 2; d; d /= 2) v += tile.shfl_down(v, d);\n"
        "v = tile.shfl(v, 0); block.sync(); cg::sync(block);\n"
        "out[i] = v * 10 + int(tile.thread_rank());\n"
        "more[i] = tile.meta_group_rank() + 100 * tile.meta_group_size()"
        " + 10000 * tile.any(v > 0);",
        [N],
        lambda a: [
            np.repeat(a.reshape(-1, 8).sum(1), 8) * 10 + np.arange(64) % 8,
            np.arange(64) // 8 + 800 + 10000 * np.repeat(a.reshape(-1, 8).sum(1) > 0, 8)],
    ),
    "reductions of cooperative groups": Body(
        "auto warp = cg::tiled_partition<32>(cg::this_thread_block()); int i = threadIdx.x;\n"
        "int s = cg::reduce(warp, a[i], cg::plus<int>()), m = cg::reduce(warp, a[i],\n"
        "  [](int x, int y) { return x > y ? x : y; });\n"
        "out[i] = s + m + cg::this_grid().thread_rank(); more[i] = cg::inclusive_scan(warp, a[i]);",
        [N],
        lambda a: [per_lane(warps(a).sum(1) + warps(a).max(1)) + np.arange(64),
                   warps(a).cumsum(1).ravel()],
        header="#include <cooperative_groups/reduce.h>\n#include <cooperative_groups/scan.h>",
    ),
    "those that are together": Body(
        LANE + "out[i] = 0; if (a[i] > 0) { cg::coalesced_group g = cg::coalesced_threads();\n"
        "int first = g.shfl(a[i], 0);\n"
        "out[i] = g.thread_rank() + 100 * g.size(); more[i] = first; }",
        [N], lambda a: together(a), init=0,
    ),
    "device functions, templates and lambdas": Body(
        LANE + "auto scale = [=] __device__ (float v) { return v * K; };\n"
        "out[i] = twice<T>(scale(a[i])) + Helper<3>::value + TABLE[i % 3] + counted(i);",
        [F],
        lambda a: a * 2 * 2 + 3 + np.array([1, 2, 4], np.float32)[np.arange(64) % 3] + 1,
        header="#include <cuda_runtime.h>\n__constant__ float TABLE[3] = {1, 2, 4};\n"
        "template <class T> __device__ __forceinline__ T twice(T v) { return v + v; }\n"
        "template <int N> struct Helper { static constexpr int value = N; };\n"
        "static __device__ __noinline__ int counted(int i) { assert(i >= 0); return 1; }\n",
        template=[("T", np.float32), ("K", 2)], exact=False,
    ),
    "a helper that meets": Body(
        LANE + "float s = block_sum<64>(a[i]); float t = block_sum<64>(s); out[i] = s + t;",
        [np.arange(64, dtype=np.float32)], lambda a: np.full(64, a.sum() * 65),
        header="template <int SIZE> __device__ float block_sum(float v) {\n"
        "  __shared__ float part[SIZE / 32];\n"
        "  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);\n"
        "  __syncthreads();\n  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;\n"
        "  __syncthreads();\n  float r = 0;\n#pragma unroll\n"
        "  for (int w = 0; w < SIZE / 32; ++w) r += part[w];\n  return r;\n}\n",
    ),
    "strides": Body(
        INDEX + "auto at = elem_to_loc(i, a_shape.data(), a_strides.data(), a_ndim);"
        "out[i] = a[at];",
        [np.arange(64, dtype=np.float32).reshape(8, 8)], lambda a: a.ravel(),
    ),
    "numbers": Body(
        LANE + "out[i] = a[i] * b[0] + c[0];", [F, 2.5, 3], lambda a, b, c: a * 2.5 + 3,
        exact=False,
    ),
    "loads that say how": Body(
        LANE + "float v = __ldg(a + i) + __ldcs(&a[i]); float4 w = __ldg((const float4*)a);\n"
        "__stcs(out + i, v + w.x);",
        [F], lambda a: a + a + a[0],
    ),
    "clocks and naps": Body(
        LANE + "long long t = clock64(); __nanosleep(100); out[i] = clock64() >= t;", [F],
        lambda a: np.ones(64),
    ),
    "branches for other GPUs": Body(
        LANE + "#if __CUDA_ARCH__ >= 900\nasm volatile(\"griddepcontrol.wait;\");\n#else\n"
        "out[i] = a[i];\n#endif\nasm volatile(\"\" ::: \"memory\");",
        [F], lambda a: a,
    ),
    "a switch and an early return by blocks": Body(
        "if (blockIdx.x == 1) return; __shared__ int s; if (threadIdx.x == 0) s = blockIdx.x;\n"
        "__syncthreads(); switch (s) { case 0: out[threadIdx.x] = 5; break;"
        " case 2: out[32 + threadIdx.x] = 9; default: break; }",
        [F], lambda a: np.repeat([5, 0, 9, 0], 16), threadgroup=(16, 1, 1), init=0,
    ),
}  # fmt: skip


def half_arithmetic(a: Array) -> list[Array]:
    """What the body of that name gives."""
    y = np.float16(0.3)
    x = a * y + (a - y)
    x = x + y
    wide, other = x.astype(np.float64), float(y)
    p = (wide * wide + wide).astype(np.float16), np.float16(other * other + other)
    top = np.maximum(x, y).astype(np.float32)
    power = np.float32(np.float16(np.exp(np.float32(y))))
    return [(p[0] + p[1]).astype(np.float32), top + (x > y) + 4 * (x < y) + power]


def bfloat_arithmetic(a: Array) -> list[Array]:
    """What the body of that name gives."""
    import ml_dtypes

    x, y = a.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(1.5)
    x = x / y
    x = x - y
    return [(x * x).astype(np.float32) + np.float32(y * y), -x.astype(np.float32)]


def doubles(x: Array) -> Array:
    """What the body of that name gives."""
    d = 1 / np.sqrt(x**2 + 1) + (x + 1) + (x * x + 1)
    return d + 1


def functions(x: Array) -> Array:
    """What the body of that name gives."""
    from scipy.special import erf

    return (
        np.exp(-x) + 1 / np.sqrt(x) + np.log(x) + x * x + 1 + 1 / x + np.tanh(x) + erf(x)
        + np.exp2(x) + np.sqrt(x) + np.maximum(x, 1) + np.minimum(x, 2) + np.clip(x, 0, 1)
    )  # fmt: skip


def bits(a: Array) -> list[Array]:
    """What the body of that name gives."""
    texts = [f"{int(v):032b}" for v in a]
    first = [t.count("1") + 100 * (32 - len(t.lstrip("0"))) + 10000 * (33 - t.rindex("1"))
             for t in texts]  # fmt: skip
    more = []
    for text, v in zip(texts, a, strict=True):
        back, other = int(text[::-1], 2), ~int(v) & 0xFFFFFFFF
        permuted = (int(v) >> 24) & 0xFF
        shifted = ((((other << 32) | int(v)) << 8) >> 32) & 0xFF
        more.append((back & 0xFF) + 256 * permuted + 65536 * shifted)
    return [np.array(first), np.array(more)]


def words(a: Array) -> list[Array]:
    """What the body of that name gives."""
    x = [((int(v) * 4000000 + 2**31) % 2**32) - 2**31 for v in a]

    def byte(v: int, n: int) -> int:
        return ((v >> (8 * n)) + 128) % 256 - 128

    def low(v: int) -> int:
        return (v + 2**23) % 2**24 - 2**23

    def rest(v: int, n: int) -> int:
        return abs(v) % n * (1 if v >= 0 else -1)

    one = [(v * v >> 32) + rest(((low(v) * 3 + 2**31) % 2**32) - 2**31, 1000)
           + sum(byte(v, n) * (4 - n) for n in range(4)) + 7 for v in x]  # fmt: skip
    two = [((v % 2**32) * 12345 >> 32) + max(int(n), 3) + min(int(n), -3) + abs(int(n))
           + abs(v - 3) for v, n in zip(x, a, strict=True)]  # fmt: skip
    return [np.array(one), np.array([v % 2**32 for v in two])]


def together(a: Array) -> list[Array]:
    """What the body "those that are together" gives."""
    out, first = np.zeros(64), np.zeros(64)
    for warp in range(2):
        own = [i for i in range(warp * 32, warp * 32 + 32) if a[i] > 0]
        for rank, i in enumerate(own):
            out[i], first[i] = rank + 100 * len(own), a[own[0]]
    return [out, first]
