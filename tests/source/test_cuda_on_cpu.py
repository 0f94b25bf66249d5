"""CUDA texts on the CPU, against NumPy."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_on_cpu
import ferrule as fe
from cuda_bodies import BODIES, INDEX, RANDOM, Body, F
from ferrule.check.launches import watched
from ferrule.check.launches.instrument import instrumented
from ferrule.devices.cpu import cuda_bodies
from ferrule.source.cuda import on_cpu
from ferrule.spec import Launch
from ferrule.tools import loader
from strategies import make_spec


def launched(body: Body) -> list[Any]:
    count = 2 if "more" in body.source else 1
    names = ["a", "b", "c"][: len(body.inputs)]
    kernel = fe.cuda_kernel(
        "k", names, ["out", "more"][:count], body.source, header=body.header,
        shared_memory=body.shared,
    )  # fmt: skip
    size = int(np.prod(body.grid))
    return cuda_on_cpu.launch(
        kernel, body.inputs, grid=body.grid, threadgroup=body.threadgroup,
        output_shapes=[(size,)] * count, output_dtypes=[np.float32] * count,
        template=body.template, init_value=body.init,
    )  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    body = BODIES[name]
    outputs, want = launched(body), body.want(*body.inputs)
    for out, expected in zip(outputs, want if isinstance(want, list) else [want], strict=True):
        expected = np.asarray(expected, np.float32)
        if body.exact:
            np.testing.assert_array_equal(out[: expected.size], expected)
        else:
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-3)


# -- warps and atomics, drawn ----------------------------------------------------------------------

SHUFFLES = """
int i = threadIdx.x, kind = a[0], width = a[1]; unsigned mask = b[0];
out[i] = -1;
if (mask >> i & 1) {
  int v = 1000 + i, by = b[1 + i];
  out[i] = kind == 0 ? __shfl_sync(mask, v, by, width)
         : kind == 1 ? __shfl_up_sync(mask, v, unsigned(by) % 32, width)
         : kind == 2 ? __shfl_down_sync(mask, v, unsigned(by) % 32, width)
                     : __shfl_xor_sync(mask, v, unsigned(by) % 32, width);
  more[i] = __popc(__ballot_sync(mask, v & 1)) + 100 * __reduce_add_sync(mask, i);
}
"""


def moved(kind: int, lane: int, by: int, width: int) -> int:
    """The lane that a shuffle reads, by CUDA's programming guide."""
    first, last = lane // width * width, lane // width * width + width - 1
    if kind == 0:
        return first + by % width
    by %= 32
    if kind == 1:
        return lane - by if lane - by >= first else lane
    if kind == 2:
        return lane + by if lane + by <= last else lane
    return lane ^ by if lane ^ by <= last else lane


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3), st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 2**32 - 1),
    st.lists(st.integers(0, 63), min_size=32, max_size=32),
)  # fmt: skip
def test_shuffles(kind: int, width: int, mask: int, by: list[int]) -> None:
    kernel = fe.cuda_kernel("shuffles", ["a", "b"], ["out", "more"], SHUFFLES)
    out, more = cuda_on_cpu.launch(
        kernel, [np.array([kind, width], np.int32), np.array([mask, *by], np.uint32)],
        grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)] * 2,
        output_dtypes=[np.int32] * 2,
    )  # fmt: skip
    lanes = [i for i in range(32) if mask >> i & 1]
    odd = sum(i % 2 for i in lanes)
    for i in range(32):
        source = moved(kind, i, by[i], width)
        if i not in lanes:
            assert out[i] == -1
        elif source in lanes:  # what is read of others is anything
            assert out[i] == 1000 + source
        assert more[i] == (odd + 100 * sum(lanes) if i in lanes else 0)


ATOMICS = """
int i = blockIdx.x * blockDim.x + threadIdx.x;
if (i < a_shape[0]) {
  T v = a[i]; atomicAdd(out, v); atomicMin(out + 1, v); atomicMax(out + 2, v);
  atomicAnd(out + 3, v); atomicOr(out + 4, v); atomicXor(out + 5, v); atomicExch(out + 6, v);
  T old = out[7]; for (;;) { T seen = atomicCAS(out + 7, old, T(old + v)); if (seen == old) break;
    old = seen; }
}
"""


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_atomics(dtype: Any, data: st.DataObject) -> None:
    info = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=1, max_size=99))
    a = np.array(values, dtype)
    start = np.array([0, info.max, info.min, -1 if info.min else info.max, 0, 0, 0, 0], dtype)
    # What outputs are filled with is one value, so a first launch of one thread sets them.
    source = "if (blockIdx.x + threadIdx.x == 0) for (int j = 0; j < 8; ++j) out[j] = start[j];\n"
    source += "__syncthreads();\n" + ATOMICS.replace("blockIdx.x * blockDim.x + ", "")
    kernel = fe.cuda_kernel("atomics", ["a", "start"], ["out"], source)
    (out,) = cuda_on_cpu.launch(
        kernel, [a, start], grid=(128, 1, 1), threadgroup=(128, 1, 1), output_shapes=[(8,)],
        output_dtypes=[dtype], template=[("T", dtype)],
    )  # fmt: skip
    with np.errstate(over="ignore"):
        total = a.sum(dtype=dtype)
    assert out[0] == total and out[7] == total
    assert out[1] == a.min() and out[2] == a.max() and out[6] in a
    assert out[3] == np.bitwise_and.reduce(a) and out[4] == np.bitwise_or.reduce(a)
    assert out[5] == np.bitwise_xor.reduce(a)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=2000))
def test_atomics_of_many_blocks(values: list[int]) -> None:
    a = np.array(values, np.float32)
    kernel = fe.cuda_kernel(
        "sum", ["a"], ["out"], INDEX + "if (i < a_shape[0]) atomicAdd(out, a[i]);"
    )
    (out,) = cuda_on_cpu.launch(
        kernel, [a], grid=(a.size, 1, 1), threadgroup=(32, 1, 1), output_shapes=[()],
        output_dtypes=[np.float32], init_value=0,
    )  # fmt: skip
    np.testing.assert_allclose(out, a.astype(np.float64).sum(), rtol=1e-4, atol=64)


# -- programs that are wrong go on -----------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "if (threadIdx.x % 32 < 7) __shfl_sync(0xffffffff, 1, 0); out[threadIdx.x] = 1;",
        "if (threadIdx.x < 7) __syncthreads(); out[threadIdx.x] = 1;",
        "if (threadIdx.x & 1) __syncwarp(); else __shfl_sync(~0u, 1, 0); out[threadIdx.x] = 1;",
        "__shfl_sync(1u, 1, 0); out[threadIdx.x] = 1;",
        "if (threadIdx.x & 1) __syncthreads(); else __syncwarp(); out[threadIdx.x] = 1;",
        'asm volatile("bar.sync 1, 96;"); out[threadIdx.x] = 1;',
    ],
)
def test_what_hangs_on_a_gpu_ends(source: str) -> None:
    kernel = fe.cuda_kernel("k", ["a"], ["out"], source)
    (out,) = cuda_on_cpu.launch(
        kernel, [F], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
        output_dtypes=[np.float32],
    )  # fmt: skip
    assert (out == 1).all()


# -- inline PTX ------------------------------------------------------------------------------------

PTX: dict[str, tuple[str, Any]] = {
    "a word": ('unsigned r; asm("add.u32 %0, %1, %2;" : "=r"(r) : "r"(i), "r"(5)); out[i] = r;',
               lambda i: i + 5),
    "named operands": ('int r; asm("mul.lo.s32 %[d], %[a], %[b];" : [d] "=r"(r) : [a] "r"(i),'
                       ' [b] "n"(3)); out[i] = r;', lambda i: i * 3),
    "the lane": ('unsigned r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); out[i] = r;',
                 lambda i: i % 32),
    "predicates": ('int r = 1; asm("{ .reg .pred p; setp.gt.s32 p, %1, 7;\\n\\t'
                   '@p mov.b32 %0, 9;\\n\\t@!p add.s32 %0, %0, 1; }" : "+r"(r) : "r"(i));'
                   " out[i] = r;", lambda i: np.where(i > 7, 9, 2)),
    "shared memory": ("__shared__ int t[64]; unsigned at = __cvta_generic_to_shared(t + i);\n"
                      'asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(i * 2) : "memory");\n'
                      "__syncthreads(); int r;\n"
                      'asm volatile("ld.shared.b32 %0, [%1+4];" : "=r"(r) : "r"(at & ~4u));\n'
                      "out[i] = r;", lambda i: (i | 1) * 2),
    "copies": ("__shared__ __align__(16) float t[64]; unsigned at ="
               " __cvta_generic_to_shared(t + i / 4 * 4);\n"
               'if (i % 4 == 0) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"'
               ' :: "r"(at), "l"(a + i), "r"(i < 32 ? 16 : 8));\n'
               'asm volatile("cp.async.commit_group;"); asm volatile("cp.async.wait_group 0;");\n'
               "__syncthreads(); out[i] = t[i];", lambda i: np.where((i < 32) | (i % 4 < 2), i, 0)),
    "a barrier of some": ("__shared__ int t; if (i < 32) { if (i == 0) t = 5;\n"
                          'asm volatile("bar.sync 3, 64;" ::: "memory"); }\n'
                          'else asm volatile("bar.sync 3, 64;" ::: "memory"); out[i] = t;',
                          lambda i: 0 * i + 5),
    "halves of a word": ("unsigned short l, h; unsigned w = i * 65537 + 65536;\n"
                         'asm("mov.b32 {%0, %1}, %2;" : "=h"(l), "=h"(h) : "r"(w));\n'
                         'asm("mov.b32 %0, {%1, %2};" : "=r"(w) : "h"(h), "h"(l)); out[i] = w;',
                         lambda i: i * 65536 + i + 1),
    "pairs": ("unsigned r; float x = i % 32, y = 2 * (i % 32);\n"
              'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(y));\n'
              'asm("fma.rn.f16x2 %0, %0, %0, %0;" : "+r"(r));\n'
              "__half2 h = reinterpret_cast<__half2&>(r); out[i] = float(h.x) * 2 + float(h.y);",
              lambda i: (4 * (i % 32) ** 2 + 2 * (i % 32)) * 2 + (i % 32) ** 2 + i % 32),
    "a shuffle": ('int r; asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, 0xffffffff;"'
                  ' : "=r"(r) : "r"(i)); out[i] = r;', lambda i: i ^ 1),
    "exponentials": ('float r, x = i % 8; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));'
                     " out[i] = r;", lambda i: 2.0 ** (i % 8)),
    "additions to memory": ('asm volatile("red.global.add.f32 [%0], %1;" :: "l"(out + i / 2),'
                            ' "f"(float(i)) : "memory");',
                            lambda i: np.where(i < 32, 4 * i + 1, 0)),
    "a branch": ('if (i & 1) asm volatile(""); else asm("neg.s32 %0, %0;" : "+r"(i));'
                 " out[i < 0 ? -i : i] = i;", lambda i: np.where(i % 2, i, -i)),
}  # fmt: skip


@pytest.mark.parametrize("name", PTX)
def test_ptx(name: str) -> None:
    source, want = PTX[name]
    i = np.arange(64)
    kernel = fe.cuda_kernel("k", ["a"], ["out"], f"int i = threadIdx.x;\n{source}")
    (out,) = cuda_on_cpu.launch(
        kernel, [i.astype(np.float32)], grid=(64, 1, 1), threadgroup=(64, 1, 1),
        output_shapes=[(64,)], output_dtypes=[np.float32], init_value=0,
    )  # fmt: skip
    np.testing.assert_array_equal(out, want(i))


MMA = """
int lane = threadIdx.x, g = lane / 4, t = lane % 4;
unsigned at = __cvta_generic_to_shared(nullptr); __shared__ __align__(16) T s[16 * 16], u[16 * 8];
for (int n = lane; n < 256; n += 32) s[n] = T(a[n]);
for (int n = lane; n < 128; n += 32) u[n] = T(b[n]);
__syncwarp();
uint32_t x[4], y[2]; float c[4] = {1, 1, 1, 1};
asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
  : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
  : "r"((unsigned)__cvta_generic_to_shared(&s[lane % 16 * 16 + lane / 16 * 8])));
asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
  : "=r"(y[0]), "=r"(y[1]) : "r"((unsigned)__cvta_generic_to_shared(&u[lane % 16 * 8])));
asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.NAME.NAME.f32 {%0, %1, %2, %3}, "
  "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
  : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
  : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
for (int n = 0; n < 4; ++n) out[(g + n / 2 * 8) * 8 + t * 2 + n % 2] = c[n];
"""


@pytest.mark.parametrize(("dtype", "name"), [(fe.float16, "f16"), (fe.bfloat16, "bf16")])
def test_tensor_cores(dtype: Any, name: str) -> None:
    a = RANDOM.integers(-8, 8, (16, 16)).astype(np.float32)
    b = RANDOM.integers(-8, 8, (16, 8)).astype(np.float32)
    kernel = fe.cuda_kernel("k", ["a", "b"], ["out"], MMA.replace("NAME", name))
    (out,) = cuda_on_cpu.launch(
        kernel, [a, b], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(16, 8)],
        output_dtypes=[np.float32], template=[("T", dtype)],
    )  # fmt: skip
    np.testing.assert_array_equal(out, a @ b + 1)


# -- what is not known -----------------------------------------------------------------------------

UNKNOWN: dict[str, tuple[str, list[tuple[int, str]]]] = {
    "an instruction": ('\nasm volatile("wgmma.fence.sync.aligned;");',
                       [(2, "inline PTX (wgmma.fence.sync.aligned)")]),
    "bulk copies": ('asm("cp.async.bulk.commit_group;");',
                    [(1, "inline PTX (cp.async.bulk.commit_group)")]),
    "a register": ('unsigned r; asm("mov.u32 %0, %%clusterid.x;" : "=r"(r));',
                   [(1, "inline PTX (%clusterid.x)")]),
    "barriers of memory": ('asm("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(1));',
                           [(1, "inline PTX (mbarrier.init.shared::cta.b64)")]),
    "clusters": ("\n\nauto c = cg::this_cluster();", [(3, "clusters (this_cluster)")]),
    "a barrier of the grid": ("auto g = cg::this_grid();\ng.sync();",
                              [(2, "barriers of the whole grid")]),
    "another": ("cg::this_grid().sync(); cg::sync(cg::this_grid());",
                [(1, "barriers of the whole grid")]),
    "tensor cores": ("using namespace nvcuda;\nwmma::fragment<wmma::accumulator> f;",
                     [(2, "tensor cores (wmma)")]),
    "textures": ("float v = tex2D<float>(t, 0, 0);", [(1, "textures (tex2D)")]),
    "tensor maps": ("CUtensorMap m;", [(1, "tensor maps (CUtensorMap)")]),
    "the library": ("cuda::atomic_ref<float> r(out[0]);\ncuda::std::atomic<int> n;",
                    [(1, "CUDA's C++ library (cuda::atomic_ref)"), (2, "cuda::std::atomic")]),
    "cub": ("typedef cub::WarpReduce<int> W;", [(1, "the library cub")]),
    "headers": ("#include <cub/cub.cuh>\n#include <cuda_fp16.h>\n#include <curand_kernel.h>",
                [(1, "#include <cub/cub.cuh>"), (3, "#include <curand_kernel.h>")]),
    "launches": ("child<<<1, 32>>>(out);", [(1, "launches by a kernel (<<<…>>>)")]),
    "small floats": ("__nv_fp4_e2m1 v;", [(1, "floats of 8 bits and less (__nv_fp4_e2m1)")]),
    "comments and texts": ('// asm("wgmma.x;"); cub::X\nconst char* s = "cub::X tex2D";', []),
    "members": ("s.tex2D(); p->cudaMalloc();", []),
    "branches for others": (
        "#if __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH__)\ncg::this_cluster();\n"
        "#elif defined(NOWHERE) || 0\ncg::this_cluster();\n#else\nint i;\n#endif\n"
        "#ifndef __CUDA_ARCH__\ncg::this_cluster();\n#endif\n"
        "#if !defined(NOWHERE) && (__CUDA_ARCH__ > 700)\n#else\ncg::this_cluster();\n#endif", []),
    "branches that nobody knows": (
        "#define MINE 1\n#if MINE\ncg::this_cluster();\n#else\ncub::X x;\n#endif",
        [(3, "clusters (this_cluster)"), (5, "the library cub")]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known(name: str) -> None:
    source, expected = UNKNOWN[name]
    kernel = fe.cuda_kernel("k", ["a"], ["out"], source)
    found = on_cpu.unsupported(make_spec(kernel.kernel, [(fe.float32, (4,))]))
    assert [(one.line, one.what) for one in found] == expected
    assert {one.where for one in found} <= {"source"}


def test_what_is_not_known_is_refused() -> None:
    kernel = fe.cuda_kernel("k", ["a"], ["out"], "out[0] = 1;", header="\nint t = tex1D<int>(0);")
    with pytest.raises(fe.DialectError, match=r"'k', header line 2: textures \(tex1D\): this runs"):
        cuda_on_cpu.launch(
            kernel, [F], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[np.float32],
        )  # fmt: skip


def test_an_error_is_at_its_line() -> None:
    kernel = fe.cuda_kernel("k", ["a"], ["out"], "int i = 0;\nout[i] = nowhere;")
    with pytest.raises(fe.CompileError, match=r"source line 2: 'nowhere'(.|\n)*out\[i\] = nowhere"):
        cuda_on_cpu.launch(
            kernel, [F], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[np.float32],
        )  # fmt: skip


# -- what is checked -------------------------------------------------------------------------------

SHARED = """
__shared__ float tile[4][8], *place; static __shared__ __align__(16) unsigned char raw[32];
extern __shared__ int pool[];
__shared__ struct { int n; } s;
__shared__ Pair<int, float> pair;
"""


def test_shared_memory_is_registered() -> None:
    header = "template <class A, class B> struct Pair { A a; B b; };\n"
    header += "extern __shared__ char outside[];\n__device__ char of(int i) { return outside[i]; }"
    source = SHARED + "out[0] = tile[0][0] + raw[0] + pool[0] + s.n + pair.a + of(1);"
    kernel = fe.cuda_kernel("k", ["a"], ["out"], source, header=header, shared_memory=64)
    spec = make_spec(kernel.kernel, [(fe.float32, (4,))])
    arrays = [np.zeros(4, np.float32) for _ in range(2)]
    given = [cuda_on_cpu.facts(array) for array in arrays]
    launch = Launch((1, 1, 1), (1, 1, 1), ((4,),), None, ())
    result = watched.run(
        instrumented(spec), watched.Call(spec, given[:1], given[1:], launch), watched.Options()
    )
    found = [(a.line, a.name, a.bytes) for a in result.arrays if a.shape is None]
    pointer = ctypes.sizeof(ctypes.c_void_p)
    assert sorted(found) == sorted([
        (2, "tile", 128), (2, "place", pointer), (2, "raw", 32), (3, "pool", 64), (4, "s", 4),
        (5, "pair", 8),
    ])  # fmt: skip


def watched_launch(shared: int, threads: int = 1) -> tuple[Any, list[Any]]:
    """A launch of one block, and what stands in for a thread of the runtime (include/cpu.h)."""
    arrays = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    table = (ctypes.c_void_p * 2)(*[array.ctypes.data for array in arrays])
    launch = (ctypes.c_uint32 * 18)()
    ctypes.memmove(launch, ctypes.byref(ctypes.c_void_p(ctypes.addressof(table))), 8)
    launch[8:18] = [threads, 1, 1, threads, 1, 1, 1, 1, 1, shared]
    stacks = ctypes.create_string_buffer(threads << 18)
    scratch = ctypes.create_string_buffer(1 << 20)

    @ctypes.CFUNCTYPE(
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
    )  # fmt: skip
    def fiber_stacks(worker: int, count: int, each: int, stride: Any) -> int:
        stride[0] = each
        return ctypes.addressof(stacks)

    worker = (ctypes.c_void_p * 8)()
    worker[0], worker[1] = ctypes.addressof(scratch), len(scratch)
    worker[4] = ctypes.cast(fiber_stacks, ctypes.c_void_p).value
    return launch, [worker, stacks, scratch, fiber_stacks, table, arrays]


# -- numbers of 8 bits -----------------------------------------------------------------------------

SMALL = """
int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= a_shape[0]) return;
T v(a[i]); out[i] = float(v); more[i] = v.__x; T again; again.__x = i; bits[i] = float(again);
"""


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)],
)
def test_numbers_of_8_bits(name: str, dtype: Any, most: float) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    a = np.concatenate([halves, halves * np.float32(1.0001), halves * np.float32(0.01)])
    source = SMALL.replace("T v", f"using T = __nv_fp8_{name}; T v")
    kernel = fe.cuda_kernel("k", ["a"], ["out", "more", "bits"], source)
    out, more, bits = cuda_on_cpu.launch(
        kernel, [a], grid=(a.size, 1, 1), threadgroup=(256, 1, 1), output_shapes=[a.shape] * 3,
        output_dtypes=[np.float32, np.uint8, np.float32],
    )  # fmt: skip
    want = np.clip(a, -most, most).astype(dtype)
    np.testing.assert_array_equal(out, want.astype(np.float32))
    np.testing.assert_array_equal(more, want.view(np.uint8))
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(bits[:256], every)


# -- printing and asserting ------------------------------------------------------------------------


def test_printf_is_that_of_c() -> None:
    """C writes past Python's own streams."""
    code = """
import numpy as np, cuda_on_cpu, ferrule as fe
source = 'printf("%d of %s: %.1f\\\\n", threadIdx.x, "k", a[0]);'
kernel = fe.cuda_kernel("k", ["a"], ["out"], source)
cuda_on_cpu.launch(kernel, [np.full(1, 1.5, np.float32)], grid=(2, 1, 1), threadgroup=(2, 1, 1),
                   output_shapes=[(1,)], output_dtypes=[np.float32])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout == "0 of k: 1.5\n1 of k: 1.5\n"


# -- what watches is told --------------------------------------------------------------------------

TOLD = """
static unsigned told[4];
static void tell(unsigned what, unsigned lane, unsigned line) {
  if (!told[0]) told[0] = 1, told[1] = what, told[2] = lane, told[3] = line;
}
#define FR_ON_LANES(WHAT, LANE, AT) tell(WHAT, LANE, (AT).line)
#include "cuda_on_cpu.h"
FR_EXPORT unsigned first(int i) { return told[i]; }
"""
NOT_NAMED, DOES_NOT_COME, NOT_THERE, WAITS_FOREVER, NOT_AT_BARRIER = range(5)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("\n__syncwarp();\n__shfl_sync(~0u, 1, 3);\n__syncthreads();", None),
        ("\n__shfl_sync(~2u, 1, 0);", (NOT_NAMED, 1, 2)),
        ("if (threadIdx.x == 5) return;\nint v =\n  __shfl_sync(~0u, 1, 5);", (NOT_THERE, 0, 3)),
        ("\n\nif (threadIdx.x != 7)\n  __syncwarp();\n__syncthreads();", (NOT_AT_BARRIER, 7, 4)),
        ("auto w = cg::tiled_partition<32>(cg::this_thread_block());\n"
         "if (threadIdx.x != 9) w.shfl(1, 0);\n__syncthreads();", (DOES_NOT_COME, 9, 2)),
        ('if (threadIdx.x < 30)\nasm volatile("bar.sync 1, 32;");', (DOES_NOT_COME, 0, 2)),
        ("__shared__ int flag; flag = 0;\nwhile (atomicAdd(&flag, 0) == 0) {}",
         (WAITS_FOREVER, None, None)),
    ],
)  # fmt: skip
def test_what_watches_is_told(source: str, told: tuple[int, int | None, int | None] | None) -> None:
    kernel = fe.cuda_kernel("k", ["a"], ["out"], source)
    text = on_cpu.text(make_spec(kernel.kernel, [(fe.float32, (4,))]))
    text = text.replace('#include "cuda_on_cpu.h"\n', TOLD)
    library = loader.load_library(cuda_bodies.compile_text(text, "k"), "k")
    launch, kept = watched_launch(0, threads=32)
    library.fr_entry(ctypes.byref(launch), ctypes.c_uint64(0), ctypes.c_uint64(1), kept[0])
    found = [library.first(i) for i in range(4)]
    assert bool(found[0]) == (told is not None)
    for value, expected in zip(found[1:], told or (), strict=told is not None):
        assert expected is None or value == expected


# -- what published kernels are written with -------------------------------------------------------

HEADER = """
template <typename T> struct SharedMemory {
  __device__ __forceinline__ operator T*() { extern __shared__ int memory[]; return (T*)memory; }
};
#define FULL 0xffffffffu
#define SYNC() __syncthreads()
#define WARP_SUM(v) do { \\
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o); } while (0)
namespace detail {
__device__ __constant__ int table[2] = {3, 4};
static __device__ int twice(int v) { return 2 * v; }
}
__device__ float lerp(float a, float b, float t) { return fmaf(t, b - a, a); }
struct Op { template <class T> __device__ T operator()(T a, T b) const { return a + b; } };
__device__ inline float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
enum class Kind : int { A, B };
template <int N, class F> __device__ __forceinline__ void unrolled(F f) {
#pragma unroll
  for (int i = 0; i < N; ++i) f(i);
}
__device__ unsigned int counter = 0;
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""
SOURCE = """
const uint3 t = threadIdx; dim3 b = blockDim; auto [bx, by, bz] = blockIdx;
float* sm = SharedMemory<float>(); sm[t.x] = a[t.x]; SYNC();
float v = sm[(t.x + 1) % b.x]; WARP_SUM(v);
int n = 0; unrolled<4>([&](int i) { n += i; });
__shared__ alignas(16) float4 quads[16];
if (t.x < 16) quads[t.x] = ((const float4*)a)[t.x] + make_float4(0, 0, 0, 0);
static_assert(ceil_div(5, 2) == 3, "");
out[t.x] = v + n + detail::table[1] + detail::twice(2) + lerp(1, 3, 0.5f) + Op()(1, 2)
  + (Kind::B == Kind(1)) + by;
"""


def test_what_published_kernels_have() -> None:
    kernel = fe.cuda_kernel("k", ["a"], ["out"], SOURCE, header=HEADER, shared_memory=256)
    a = np.arange(64, dtype=np.float32)
    (out,) = cuda_on_cpu.launch(
        kernel, [a], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
        output_dtypes=[np.float32],
    )  # fmt: skip
    sums = np.repeat(np.roll(a, -1).reshape(2, 32).sum(1), 32)
    np.testing.assert_array_equal(out, sums + 6 + 4 + 4 + 2 + 3 + 1)
    instrumented(make_spec(kernel.kernel, [(fe.float32, (64,))]))
