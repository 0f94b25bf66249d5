"""`cuda_kernel`: its parameters, text, names and errors; all without a GPU."""

from __future__ import annotations

import ctypes
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule as fe
from ferrule import _env, dtypes
from ferrule.devices import protocol as devices
from ferrule.devices.digests import INCLUDE
from ferrule.dtypes import Dtype
from ferrule.source.cuda import body as cuda_body
from ferrule.source.cuda import launch as cuda_launch
from ferrule.spec import Input, Spec
from ferrule.tools import nvrtc
from strategies import make_spec
from test_call import mlx_parameters, our_parameters

F32 = fe.float32
ONES = np.ones(4, np.float32)


def make(source: str = "out[0] = x[0];", **changed: Any) -> fe.CudaKernel:
    names = {"name": "k", "input_names": ["x"], "output_names": ["out"], "source": source}
    return fe.cuda_kernel(**{**names, **changed})


def spec_of(kernel: fe.CudaKernel, inputs: list[Any], outputs: Any = (F32,), **call: Any) -> Any:
    return kernel._builder.described(
        inputs, list(outputs), None, None, None, call.get("template"), None, "cuda"
    )[0]


# -- the interface of MLX --------------------------------------------------------------------------


def test_the_factory_has_the_parameters_of_mlx() -> None:
    theirs = mlx_parameters(mx.fast.cuda_kernel.__doc__ or "")
    assert our_parameters(fe.cuda_kernel) == theirs
    assert [name for name, _ in theirs][-1] == "shared_memory"
    kinds = {p.kind for p in inspect.signature(fe.cuda_kernel).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_call_is_that_of_a_metal_kernel() -> None:
    assert inspect.signature(fe.CudaKernel.__call__) == inspect.signature(fe.MetalKernel.__call__)
    with pytest.raises(TypeError):
        make()([ONES])  # type: ignore[misc]


CONSTRUCTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": "a b"}, fe.KernelError, "'a b' cannot name a kernel"),
    ({"name": 3}, fe.KernelTypeError, "`name`: got 3"),
    ({"input_names": "x"}, fe.KernelTypeError, "`input_names` of kernel 'k'"),
    ({"input_names": None}, fe.KernelTypeError, "`input_names` of kernel 'k': got None"),
    ({"input_names": ["class"]}, fe.KernelError, "'class' is a reserved word of C\\+\\+ or CUDA"),
    ({"input_names": ["out"]}, fe.KernelError, "two arguments called 'out'"),
    ({"output_names": []}, fe.KernelError, "Must specify at least one output"),
    ({"source": None}, fe.KernelTypeError, "`source` of kernel 'k': got NoneType"),
    ({"header": "\0"}, fe.KernelError, "`header` of kernel 'k' has a NUL character in line 1"),
    ({"ensure_row_contiguous": 1}, fe.KernelTypeError, "`ensure_row_contiguous`.*got 1"),
    ({"shared_memory": -1}, fe.KernelError, "`shared_memory` of kernel 'k': got -1.*bytes"),
    ({"shared_memory": 2**31}, fe.KernelError, "`shared_memory`.*got 2147483648"),
    ({"shared_memory": 1.5}, fe.KernelTypeError, "`shared_memory`.*got 1.5 of type float"),
    ({"shared_memory": True}, fe.KernelTypeError, "`shared_memory`.*got True of type bool"),
    (
        {"input_names": ["a", "a_shape"], "source": "out[0] = a_shape[0];"},
        fe.KernelError,
        "'a_shape', which is also the shape of its input 'a'",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), CONSTRUCTION)
def test_bad_construction(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^\[cuda_kernel\] .*{message}"):
        make(**changed)


def test_words_of_metal_are_names_like_others() -> None:
    made = make("out[0] = device[0];", input_names=["device", "grid_size"])
    assert made.kernel.attributes == ()


CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"inputs": []}, fe.KernelError, "Expected `inputs` to have size 1 but got size 0"),
    ({"inputs": {"x": ONES}}, fe.KernelTypeError, "`inputs`.*got a dictionary, expected a list"),
    ({"inputs": [np.zeros(2)]}, fe.KernelError, "input 'x'.*float64.*no cuda_kernel takes it"),
    (
        {"inputs": [np.ones(2, ml_dtypes.float8_e5m2)]},
        fe.KernelError,
        "input 'x'.*float8_e5m2 is a type that neither Metal nor MLX has, so no cuda_kernel takes",
    ),
    ({"inputs": [[1.0]]}, fe.KernelError, r"input 'x' of kernel 'k': got \[1.0\]"),
    ({"inputs": [np.zeros((1,) * 11, "f")]}, fe.KernelError, "input 'x'.*11 dims.*hold 10"),
    ({"grid": (-1, 1, 1)}, fe.KernelError, "`grid` of kernel 'k': got"),
    ({"grid": (4, 0, 1)}, fe.KernelError, "`grid`.*runs no thread"),
    ({"grid": (4, 1)}, fe.KernelTypeError, "`grid`.*three integers"),
    ({"threadgroup": (0, 1, 1)}, fe.KernelError, "`threadgroup`.*from 1"),
    ({"grid": (2000, 1, 1), "threadgroup": (1025, 1, 1)}, fe.KernelError, "blocks of .1025, 1, 1."),
    ({"grid": (1, 1, 65), "threadgroup": (1, 1, 65)}, fe.KernelError, "1024.*and 64 along z"),
    ({"grid": (1, 65536, 1)}, fe.KernelError, "65536 blocks along y.*allows 65535"),
    ({"grid": (1, 1, 2**20)}, fe.KernelError, "1048576 blocks along z"),
    ({"output_dtypes": [np.float64]}, fe.KernelError, "`output_dtypes`.*no cuda_kernel takes it"),
    ({"output_dtypes": ["float33"]}, fe.KernelTypeError, "`output_dtypes`.*a dtype of NumPy"),
    ({"output_shapes": [(-1,)]}, fe.KernelError, "`output_shapes`.*non-negative"),
    ({"template": [("T", 1.5)]}, fe.KernelError, "Invalid template argument"),
    ({"template": [("T", np.float64)]}, fe.KernelError, "T is float64"),
    ({"template": [("x", 1)]}, fe.KernelError, "two arguments called 'x'"),
    ({"template": [("new", 1)]}, fe.KernelError, "'new' is a reserved word"),
    ({"template": {"T": 1}}, fe.KernelTypeError, "`template` of kernel 'k'"),
    ({"init_value": "0"}, fe.KernelTypeError, "`init_value` of kernel 'k': got '0'"),
    ({"verbose": 1}, fe.KernelTypeError, "`verbose` of kernel 'k': got 1"),
]


@pytest.mark.parametrize(("changed", "error", "message"), CALLS)
def test_bad_calls(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {
        "inputs": [ONES], "output_shapes": [(4,)], "output_dtypes": [np.float32],
        "grid": (4, 1, 1), "threadgroup": (1, 1, 1),
    }  # fmt: skip
    with pytest.raises(error, match=rf"^\[cuda_kernel\] .*{message}"):
        make("out[0] = x[x_strides[0]];")(**{**call, **changed})


@pytest.mark.parametrize(
    ("x", "dtype", "given"),
    [(ONES, np.float32, "NumPy"), (torch.ones(4), torch.float32, "torch"),
     (mx.ones(4), mx.float32, "MLX"), (1.5, np.float32, "NumPy")],
)  # fmt: skip
def test_arrays_of_the_cpu(x: Any, dtype: Any, given: str) -> None:
    message = rf"\[cuda_kernel\] kernel 'k' is written in CUDA.*called with {given} arrays on 'cpu'"
    message += ".*(torch tensors|MLX's CUDA build).*metal_kernel"
    with pytest.raises(fe.DeviceError, match=message):
        make()(
            inputs=[x], grid=(4, 1, 1), threadgroup=(2000, 1, 1), output_shapes=[(4,)],
            output_dtypes=[dtype],
        )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_there_is_no_other_text(device: str) -> None:
    with pytest.raises(fe.DeviceError, match=rf"no text for '{device}'; expected 'cuda'"):
        make().text(device, inputs=[ONES], output_dtypes=[F32])
    with pytest.raises(fe.DeviceError, match="no text for"):
        make().compile(device, inputs=[ONES], output_dtypes=[F32])


def test_a_kernel_is_pickled_and_shown() -> None:
    made = make(shared_memory=64)
    again = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert type(again) is fe.CudaKernel and again.kernel == made.kernel
    assert again.kernel.shared_memory == 64 and again.kernel.language == "cuda"
    assert repr(again) == "<ferrule.CudaKernel k(x) -> out>"
    metal = fe.metal_kernel("k", ["x"], ["out"], made.kernel.source)
    assert metal.kernel != made.kernel


# -- the text --------------------------------------------------------------------------------------

TEXT = """\
// k
#define FR_COOPERATIVE_GROUPS 1
#include "cuda_kernel.h"
#line 1 "k.header"
// mine
#line 1 "ferrule"
namespace mlx { namespace core { namespace cu {
extern "C" __global__ void ferrule_k(
    const __half* x,
    const __grid_constant__ mlx::core::cu::Shape x_shape,
    const __grid_constant__ mlx::core::cu::Strides x_strides,
    const __grid_constant__ float fr_a_s,
    const uint8_t* z,
    __nv_bfloat16* __restrict__ out,
    int64_t* __restrict__ more) {
  constexpr int x_ndim = 2;
  const float* const s = &fr_a_s;
  constexpr mlx::core::cu::Shape z_shape{};
  constexpr int z_ndim = 0;
  constexpr int N = -3;
  constexpr int M = (-2147483647 - 1);
  constexpr bool B = true;
  using T = mlx::core::cu::complex64_t;
#line 1 "k.source"
cg::sync(0); x_shape, x_strides, x_ndim, z_shape, z_ndim;
#line 1 "ferrule"
}
} } }  // namespace mlx::core::cu
"""


def test_the_text() -> None:
    source = "cg::sync(0); x_shape, x_strides, x_ndim, z_shape, z_ndim;"
    made = make(source, header="// mine", input_names=["x", "s", "z"], output_names=["out", "more"])
    template: Any = [("N", -3), ("M", -(2**31)), ("B", True), ("T", np.complex64)]
    call: Any = {
        "inputs": ["float16[3,4]", 2.5, "uint8[]"], "output_dtypes": [fe.bfloat16, fe.int64],
    }  # fmt: skip
    text = made.text(**call, template=template)
    assert text.replace("#define FR_STD_COMPLEX 1\n", "") == TEXT
    assert made.text("sm_80", **call, template=template) == text
    assert cuda_launch.kernel_parameters(spec_of(made, call["inputs"], call["output_dtypes"])) == [
        ("input", 0), ("shape", 0), ("strides", 0), ("value", 1), ("input", 2), ("output", 0),
        ("output", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("out[0] = x[0];", []),
        ("int cga = 1;", []),
        ("cg::this_grid();", ["FR_COOPERATIVE_GROUPS"]),
        ("cooperative_groups::this_grid();", ["FR_COOPERATIVE_GROUPS"]),
        ("cuda::std::uint32_t n; cuda::std::size_t m;", []),
        ("cuda::std::numeric_limits<float>::max();", ["FR_STD_LIMITS"]),
        ("cuda::std::tie(a, b) = c;", ["FR_STD_TUPLE"]),
        ("cuda::std::get<0>(c);", ["FR_STD_ARRAY", "FR_STD_TUPLE"]),
        ("cuda :: std :: is_same_v<T, U>;", ["FR_STD_TYPE_TRAITS"]),
        ("complex128_t z;", ["FR_STD_COMPLEX"]),
        ("static_assert(is_complex_v<T>);", ["FR_STD_COMPLEX"]),
        ("cuda::std::bit_cast<int>(x);", [f"FR_STD_{part}" for part in cuda_body._PARTS]),
        ("using namespace cuda::std;", [f"FR_STD_{part}" for part in cuda_body._PARTS]),
        ("cuda::atomic_ref<float> r(x);", ["FR_COOPERATIVE_GROUPS", "FR_CUDA_LIBRARY"]),
    ],
)
def test_only_what_is_named_is_included(source: str, parts: list[str]) -> None:
    assert cuda_body.named(spec_of(make(source), [ONES])) == parts
    assert cuda_body.named(spec_of(make("", header=source), [ONES])) == parts


# -- compiled --------------------------------------------------------------------------------------

ELEMENT = "auto i = cooperative_groups::this_grid().thread_rank();\n"

# Name: the body, then what differs from one float32[3,4] `x` and one float32 `out`.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "exp of the documentation": (ELEMENT + "T tmp = x[i]; out[i] = exp(tmp);",
                                 {"template": [("T", F32)]}),
    "arguments": (
        ELEMENT + """
        T tmp = x[0];
        if (e) out[i] = x[1] + b[2] + static_cast<float>(c[3]) + d[0] + f + z[0] + float(tmp);
        else out[i] = 1;
        more[i] = x[1] + b[2] - d[0];
        """,
        {"inputs": ["float32[3,6]", "int32[3]", "bfloat16[2,2]", 7.3, "float32[]"],
         "input_names": ["x", "b", "c", "d", "z"], "output_names": ["out", "more"],
         "output_dtypes": [F32, fe.int32],
         "template": [("e", True), ("f", 3), ("T", fe.float16)]},
    ),
    "strides": (
        ELEMENT + "auto loc = elem_to_loc(i, x_shape.data(), x_strides.data(), x_ndim);\n"
        "T tmp = x[loc]; out[i] = exp(tmp) * WARP_SIZE;", {"template": [("T", F32)]}),
    "a helper without __device__": (
        "out[0] = twice(x[0]) + mlx::core::cu::Limits<int>::max();",
        {"header": "template <typename T>\nT twice(T x) { return x + x; }\nconstexpr int n = 3;"}),
    "a struct in the body": (
        "struct pair { float a; float sum(float b) { return a + b; } };\n"
        "auto f = [&](int i) { return x[i]; }; out[0] = pair{f(0)}.sum(f(1));", {}),
    "attributes": ("out[threadIdx.x] = blockDim.x * gridDim.y + blockIdx.z + MAX_NDIM;", {}),
    "a number's shape": (
        "out[0] = x[elem_to_loc(0, x_shape.data(), x_strides.data(), x_ndim)] + x_shape[9];",
        {"inputs": [2.5]}),
    "a 0-d array's shape": (
        "out[0] = x[elem_to_loc(0, x_shape.data(), x_strides.data(), x_ndim)];",
        {"inputs": ["float32[]"]}),
    "vectors": (
        """
        const int i = threadIdx.x, size = x_shape[0]; const int64_t stride = x_strides[0];
        AlignedVector<float, 4> a = load_vector<4>(x, i), b = unsafe_load_vector<4>(x, i);
        auto c = load_vector<2>(x, i, size, 0.0f), d = load_vector<2>(x, i, size, stride, 0.0f);
        if (is_aligned<4>(out)) a[0] = b[1] + a.val[2];
        store_vector(out, i, a); store_vector(out, i, c, size); store_vector<2>(out, i, d, size,
            stride); unsafe_store_vector(out, i, b);
        """, {}),
    "limits": (
        """
        static_assert(Limits<int8_t>::max() == 127 && Limits<int8_t>::min() == -128, "");
        static_assert(Limits<uint16_t>::max() == 65535 && Limits<uint16_t>::finite_min() == 0, "");
        static_assert(Limits<int64_t>::max() == INT64_MAX && Limits<int64_t>::min() == INT64_MIN,
                      "");
        static_assert(Limits<uint64_t>::finite_max() == UINT64_MAX, "");
        static_assert(Limits<bool>::max() && !Limits<bool>::min(), "");
        static_assert(Limits<float>::finite_max() == 3.402823466e+38f, "");
        static_assert(Limits<float>::finite_min() == -3.402823466e+38f, "");
        static_assert(Limits<double>::max() > Limits<double>::finite_max(), "");
        static_assert(Limits<float>::min() == -Limits<float>::max(), "");
        constexpr __half h = Limits<__half>::finite_max();
        out[0] = float(h) + float(Limits<__nv_bfloat16>::min()) + F8E4M3_MAX + F4E2M1_MAX;
        out[1] = Limits<complex64_t>::max().real() - INFINITY + NAN + INT_MAX;
        """, {}),
    "places in two and three arrays": (
        ELEMENT + """
        auto [a, b] = elem_to_loc(i, x_shape.data(), x_strides.data(), x_strides.data(), x_ndim);
        auto [c, d, e] = elem_to_loc<uint32_t>(i, x_shape.data(), x_strides.data(),
            x_strides.data(), x_strides.data(), x_ndim);
        auto f = elem_to_loc_nd<2>(i, x_shape.data(), x_strides.data());
        auto [g, h] = elem_to_loc_nd<2>(i, x_shape.data(), x_strides.data(), x_strides.data());
        auto [j, k, l] = elem_to_loc_nd<2, int>(i, x_shape.data(), x_strides.data(),
            x_strides.data(), x_strides.data());
        out[i] = x[a + b + c + d + e + f + g + h + j + k + l];
        """, {}),
    "tuples of the library": (
        """
        static_assert(cuda::std::is_same_v<Shape, cuda::std::array<int32_t, MAX_NDIM>>, "");
        static_assert(cuda::std::is_same_v<Strides, cuda::std::array<int64_t, MAX_NDIM>>, "");
        int64_t a, b;
        cuda::std::tie(a, b) = elem_to_loc<int64_t>(5, x_shape.data(), x_strides.data(),
            x_strides.data(), x_ndim);
        out[a] = x[b] + cuda::std::get<1>(elem_to_loc_nd<2, int>(5, x_shape.data(),
            x_strides.data(), x_strides.data(), x_strides.data()));
        auto many = cuda::std::make_tuple(1, 2.0f, 'c', 4u, 5, 6, 7, 8, 9, 10, 11, 12);
        out[1] = cuda::std::get<11>(many) + cuda::std::numeric_limits<float>::infinity();
        """, {}),
    "walks": (
        """
        LoopedElemToLoc<1, false> a(1); LoopedElemToLoc<3> b(x_ndim);
        LoopedElemToLoc<2, false, int64_t> c(x_ndim); LoopedElemToLoc<1, true, uint32_t> d(x_ndim);
        for (int i = 0; i < 3; ++i) {
          a.next(x_shape.data(), x_strides.data()); b.next(2, x_shape.data(), x_strides.data());
          c.next(x_shape.data(), x_strides.data()); d.next(7, x_shape.data(), x_strides.data());
          out[i] = x[a.location() + b.location() + c.location() + d.location()];
        }
        """, {}),
    "complex numbers": (
        """
        complex64_t a = x[0], b(1.0f, 2.0f); complex_t<float> c = {a.real(), b.imag()};
        complex128_t wide(a.real(), 0.0);
        static_assert(is_complex_v<T> && is_complex<complex128_t>::value && !is_complex_v<float>,
                      "");
        if (a < b || a > c || a <= c || a >= b) c = a * b + c / a - a % b;
        out[0] = exp(c) + abs(a) + cuda::std::conj(b) + float(wide.real());
        """, {"inputs": ["complex64[4]"], "output_dtypes": [fe.complex64],
              "template": [("T", fe.complex64)]}),
    "16-bit floats": (
        """
        half h = __float2half(x[0]); __half2 two = __half2half2(h); __nv_bfloat16 b = out[1];
        out[0] = __float2bfloat16(float(h * h) + __low2float(__hadd2(two, two)) + float(b + b));
        """, {"output_dtypes": [fe.bfloat16]}),
    "8-bit floats of bytes": (
        """
        auto a = reinterpret_cast<const __nv_fp8_e4m3*>(x); auto b = (__nv_fp8_e5m2*)out;
        b[0] = __nv_fp8_e5m2(float(a[0]) * float(__nv_fp8_e8m0(2.0f)));
        """, {"inputs": ["uint8[4]"], "output_dtypes": [fe.uint8]}),
    "cooperative groups": (
        """
        auto block = cg::this_thread_block(); auto warp = cg::tiled_partition<WARP_SIZE>(block);
        float v = x[cg::this_grid().thread_rank()];
        for (int d = 16; d > 0; d /= 2) v += warp.shfl_down(v, d);
        block.sync(); cg::coalesced_group active = cg::coalesced_threads();
        if (active.thread_rank() == 0) atomicAdd(out, v);
        """, {}),
    "a reduction of cooperative groups": (
        "auto w = cg::tiled_partition<32>(cg::this_thread_block());\n"
        "out[0] = cg::reduce(w, x[threadIdx.x], cg::plus<float>());",
        {"header": "#include <cooperative_groups/reduce.h>"}),
    "shared memory": (
        "extern __shared__ float tile[]; __shared__ float one; tile[threadIdx.x] = x[threadIdx.x];"
        "one = 1; __syncthreads(); out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x] + one;",
        {"shared_memory": 4096}),
    "names of ours": (
        "out[0] = Shape[0] + cg[0] + device[0] + Shape_shape[0] + T;",
        {"input_names": ["Shape", "cg", "device"], "inputs": ["float32[2]"] * 3,
         "template": [("T", 2)]}),
    "every dtype": (
        "".join(f"o{i}[0] = a{i}[0]; using T{i} = decltype(+a{i}); " for i in range(13)),
        {"input_names": [f"a{i}" for i in range(13)],
         "inputs": [f"{d.name}[3]" for d in fe.dtypes.ALL if d.level0],
         "output_names": [f"o{i}" for i in range(13)],
         "output_dtypes": [d for d in fe.dtypes.ALL if d.level0]}),
    "an early return": ("if (threadIdx.x > 3) return;\nout[threadIdx.x] = x[0];", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def headers(library: nvrtc.Nvrtc) -> nvrtc.Headers:
    try:
        return nvrtc.find_headers(library)
    except fe.ToolchainError as missing:
        pytest.skip(str(missing))


def compiled(source: str, arch: str = "sm_90", **changed: Any) -> fe.devices.Binary:
    call = {"inputs": ["float32[3,4]"], "output_dtypes": [F32], "template": None}
    call = {name: changed.pop(name, value) for name, value in call.items()}
    return make(source, **changed).compile(arch, **call)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies_compile(headers: nvrtc.Headers, name: str, arch: str) -> None:
    source, changed = BODIES[name]
    binary = compiled(source, arch, **changed)
    assert binary.payload.startswith(b"\x7fELF") and b"ferrule_k" in binary.payload
    assert binary.mode == arch


def float8_spec(source: str, input: Dtype, output: Dtype, template: Any = ()) -> Spec:
    """What a `cuda_kernel` call refuses, for it is MLX's: 8-bit floats as elements."""
    return make_spec(make(source).kernel, [(input, (3, 4))], [output], template)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("dtype", dtypes.FLOAT8, ids=repr)
def test_8_bit_floats_are_those_of_cuda(headers: nvrtc.Headers, dtype: Dtype, arch: str) -> None:
    source = "T v = x[x_shape[0]]; static_assert(sizeof v == 1); out[0] = T(2 * float(v));"
    for spec in (
        float8_spec(source, dtype, dtype, [("T", dtype)]),
        float8_spec("out[0] = float(x[0]);", dtype, F32),
        float8_spec(f"out[0] = {dtype.cuda}(x[0]);", F32, dtype),
        Spec(make("out[0] = float(x[0]);").kernel, (Input(dtype, 0, value=True),), (F32,)),
    ):
        binary = devices.get(arch).compile(spec)
        assert binary.payload.startswith(b"\x7fELF") and binary.mode == arch


def test_cuda_fp8_is_read_where_it_is_named() -> None:
    def has_fp8(spec: Spec) -> bool:
        return "FR_FP8" in cuda_body.named(spec)

    e4m3 = dtypes.float8_e4m3fn
    assert not has_fp8(float8_spec("out[0] = x[0] * F8E4M3_MAX;", F32, F32))
    assert has_fp8(float8_spec("out[0] = 1;", e4m3, F32))
    assert has_fp8(float8_spec("out[0];", F32, e4m3))
    assert has_fp8(float8_spec("out[0] = 1;", F32, F32, [("T", e4m3)]))
    assert has_fp8(float8_spec("out[0] = float(*(__nv_fp8_e4m3*)x);", F32, F32))
    assert has_fp8(float8_spec("__nv_cvt_e8m0_to_bf16raw(0);", F32, F32))


def test_ptx_has_the_parameters_in_order(headers: nvrtc.Headers) -> None:
    source = "out[0] = float(x[0]) + s[0] + x_strides[1] + x_shape[0];"
    inputs = ["float16[3,4]", 2.5]
    made = make(source, input_names=["x", "s"])
    ptx = made.compile("compute_80", inputs=inputs, output_dtypes=[F32]).payload.decode()
    found = re.findall(r"\.param (?:\.align \d )?\.(\w+) (?:\.ptr [\w. ]+)?\w+_param_\d(.*)", ptx)
    kinds = [kind for kind, _ in cuda_launch.kernel_parameters(spec_of(made, inputs))]
    assert kinds == ["input", "shape", "strides", "value", "output"]
    sizes = {"input": "u64", "output": "u64", "shape": "b8[40]", "strides": "b8[80]"}
    values = {"value": ("f32", "b8[4]", "b32")}
    for kind, (word, rest) in zip(kinds, found, strict=True):
        assert (word + rest).rstrip(",") in values.get(kind, (sizes.get(kind),))


@pytest.mark.parametrize(
    ("source", "header", "message"),
    [
        ("int i = 0;\n\nout[i] = nothing;", "", "source line 3: identifier \"nothing\" is undefined"
         "\n    | out[i] = nothing;"),
        ("out[0] = f(x[0]);", "\n\nfloat f(float x) { return g(x); }",
         'header line 3: identifier "g" is undefined'),
        ("out[0] =\n elem_to_loc(x);", "",
         'source line 2: no instance of overloaded function "elem_to_loc" matches'),
        ("out[0] =\nload_vector<3>(x, 0)[0];", "", "source line 2: invalid alignment"),
        ("out[0] = s;", "#include <nothing.h>",
         'header line 1: cannot open source file "nothing.h"'),
        ("x[0] = 1;", "", "source line 1: expression must be a modifiable lvalue"),
    ],
)  # fmt: skip
def test_errors_stand_at_the_authors_lines(
    headers: nvrtc.Headers, source: str, header: str, message: str
) -> None:
    with pytest.raises(fe.CompileError) as caught:
        compiled(source, header=header)
    assert message in str(caught.value)
    assert str(caught.value).startswith("kernel 'k' does not compile (NVRTC ")


def test_missing_headers_are_named_with_the_command(
    library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FERRULE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_wheels", lambda: [str(tmp_path)])
    monkeypatch.setattr(_env, "cuda_homes", lambda: [])
    monkeypatch.setattr(library, "path", str(tmp_path / "lib" / "libnvrtc.so"))
    monkeypatch.setattr(library, "version", (13, 5))
    monkeypatch.setattr(nvrtc, "CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(fe.ToolchainError, match="pip install nvidia-cuda-runtime nvidia-cuda-cccl"):
        compiled("out[0] = x[0];")

    def plant(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return str(path.parent)

    runtime = plant("cuda_runtime", "include", "cooperative_groups.h")
    plant("cuda_runtime", "include", "cuda_fp16.h")
    with pytest.raises(fe.ToolchainError, match="<nv/target> of CUDA's headers was not found"):
        nvrtc.find_headers(library)
    for name in ("nv/target", "cuda/std/cstdint", "cuda/std/tuple"):
        plant("cuda_cccl", "include", *name.split("/"))
    old = nvrtc.find_headers(library)
    assert old.folders == (runtime, str(tmp_path / "cuda_cccl" / "include"))
    # NVRTC's own folder goes first.
    beside = plant("include", "cuda_fp16.h")
    found = nvrtc.find_headers(library)
    assert beside in found.folders and found.identity != old.identity


# -- ferrule inspect -------------------------------------------------------------------------------


def test_inspect(headers: nvrtc.Headers, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ferrule.cli import main

    (tmp_path / "kernels.py").write_text(
        "import ferrule\n"
        "k = ferrule.cuda_kernel('k', ['x'], ['out'], 'out[threadIdx.x] = x[threadIdx.x];')\n"
    )

    def run(*options: str) -> Any:
        return CliRunner().invoke(main, ["inspect", f"{tmp_path}/kernels.py:k", *options])

    plain = run()
    assert plain.exit_code == 0 and "==== CUDA ====" in plain.output
    assert "Metal" not in plain.output and "C++" not in plain.output
    assert 'extern "C" __global__ void ferrule_k(' in plain.output
    machine = run("--cuda", "--arch", "sm_80")
    for part in (".target sm_80", "registers, memory and spills for sm_80"):
        assert part in machine.output
    assert run("--metal").exit_code == 2 and "has no text for 'metal'" in run("--metal").output


# -- the header's functions on the CPU, against NumPy ----------------------------------------------

HOST = r"""
#include <stddef.h>
#include <stdint.h>
#define FR_FN inline
#define MAX_NDIM 10
#include "cuda_index.h"
using namespace mlx::core::cu;
#define EXPORT extern "C" __attribute__((visibility("default")))

template <class I, int NDIM>
void places(int64_t n, const int* shape, const int64_t* a, const int64_t* b, const int64_t* c,
            int ndim, int64_t* out) {
  for (int64_t e = 0; e < n; ++e) {
    auto two = elem_to_loc(I(e), shape, a, b, ndim);
    auto [p, q, r] = elem_to_loc(I(e), shape, a, b, c, ndim);
    auto [s, t] = elem_to_loc_nd<NDIM>(I(e), shape, a, b);
    auto [u, v, w] = elem_to_loc_nd<NDIM>(I(e), shape, a, b, c);
    const I row[] = {elem_to_loc(I(e), shape, a, ndim), two.a, two.b, p, q, r,
                     elem_to_loc_nd<NDIM>(I(e), shape, a), s, t, u, v, w};
    for (I x : row) *out++ = int64_t(x);
  }
}
EXPORT void run_places(int wide, int64_t n, const int* shape, const int64_t* a, const int64_t* b,
                       const int64_t* c, int ndim, int64_t* out) {
#define FR_CASE(N)                                                       \
  case N:                                                                \
    if (wide) places<int64_t, N>(n, shape, a, b, c, ndim, out);          \
    else places<int32_t, N>(n, shape, a, b, c, ndim, out);               \
    break;
  switch (ndim) { FR_CASE(1) FR_CASE(2) FR_CASE(3) FR_CASE(4) FR_CASE(5) }
}

template <int DIM, bool GENERAL, class O>
void walk(int ndim, const int* shape, const int64_t* strides, int n, const int* steps,
          int64_t* out) {
  LoopedElemToLoc<DIM, GENERAL, O> looper(ndim);
  for (int i = 0; i < n; ++i) {
    if (steps[i] == 1) looper.next(shape, strides);
    else looper.next(steps[i], shape, strides);
    out[i] = int64_t(looper.location());
  }
}
EXPORT void run_walk(int dim, int general, int ndim, const int* shape, const int64_t* strides,
                     int n, const int* steps, int64_t* out) {
#define FR_WALK(D)                                                                       \
  if (dim == D && general) walk<D, true, int64_t>(ndim, shape, strides, n, steps, out);  \
  if (dim == D && !general) walk<D, false, size_t>(ndim, shape, strides, n, steps, out);
  FR_WALK(1) FR_WALK(2) FR_WALK(3) FR_WALK(4)
}

template <int N>
void vectors(int way, const float* x, float* y, size_t offset, int64_t size, int64_t stride) {
  AlignedVector<float, N> v;
  if (way == 0) {
    v = load_vector<N>(x, offset);
    store_vector(y, offset, v);
  } else if (way == 1) {
    v = load_vector<N>(x, offset, size, -1.0f);
    store_vector(y, offset, v, size);
  } else if (way == 2) {
    v = load_vector<N>(x, offset, uint32_t(size), stride, -1);
    store_vector<N>(y, offset, v, int(size), stride);
  } else {
    v = unsafe_load_vector<N>(x, offset);
    unsafe_store_vector(y, offset, v);
  }
  for (int i = 0; i < N; ++i) y[512 + i] = v[i];
  y[512 + N] = is_aligned<N>(x);
}
EXPORT void run_vectors(int n, int way, const float* x, float* y, size_t offset, int64_t size,
                        int64_t stride) {
  if (n == 1) vectors<1>(way, x, y, offset, size, stride);
  if (n == 2) vectors<2>(way, x, y, offset, size, stride);
  if (n == 4) vectors<4>(way, x, y, offset, size, stride);
}
"""


@pytest.fixture(scope="module")
def host() -> Any:
    from ferrule.tools import loader, toolchain

    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{INCLUDE}"]
    return loader.load_library(toolchain.find_compiler().compile(HOST, flags=flags), "cuda_index")


def pointer(array: Any) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
STRIDE = st.integers(-1000, 1000)


def locations(shape: list[int], strides: Any) -> Any:
    """The place of each element, by NumPy."""
    steps = np.array(strides, np.int64)
    return np.indices(shape).reshape(len(shape), -1).T @ steps


@settings(deadline=None, max_examples=100)
@given(shape=SHAPES, wide=st.booleans(), data=st.data())
def test_elements_lie_where_numpy_says(host: Any, shape: list[int], wide: bool, data: Any) -> None:
    strides = [data.draw(st.lists(STRIDE, min_size=len(shape), max_size=len(shape)))
               for _ in "abc"]  # fmt: skip
    a, b, c = (locations(shape, s) for s in strides)
    out = np.zeros((len(a), 12), np.int64)
    arrays = [np.array(s, np.int64) for s in strides]
    host.run_places(
        ctypes.c_int(wide), ctypes.c_int64(len(a)), pointer(np.array(shape, np.int32)),
        *map(pointer, arrays), ctypes.c_int(len(shape)), pointer(out),
    )  # fmt: skip
    np.testing.assert_array_equal(out.T, [a, a, b, a, b, c, a, a, b, a, b, c])


@settings(deadline=None, max_examples=200)
@given(
    shape=SHAPES, dim=st.integers(1, 4), general=st.booleans(),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=20), data=st.data(),
)  # fmt: skip
def test_walks_pass_the_elements_in_order(
    host: Any, shape: list[int], dim: int, general: bool, steps: list[int], data: Any
) -> None:
    if not general:  # as many axes as it was made for
        shape = (shape * 4)[:dim]
    elif len(shape) < dim:
        dim = len(shape)
    strides = data.draw(st.lists(STRIDE, min_size=len(shape), max_size=len(shape)))
    want = locations(shape, strides)
    at = np.cumsum(steps)
    out = np.zeros(len(steps), np.int64)
    host.run_walk(
        ctypes.c_int(dim), ctypes.c_int(general), ctypes.c_int(len(shape)),
        pointer(np.array(shape, np.int32)), pointer(np.array(strides, np.int64)),
        ctypes.c_int(len(steps)), pointer(np.array(steps, np.int32)), pointer(out),
    )  # fmt: skip
    inside = at < len(want)
    np.testing.assert_array_equal(out[inside], want[at[inside]])


@settings(deadline=None, max_examples=200)
@given(
    n=st.sampled_from([1, 2, 4]), way=st.integers(0, 3), shift=st.integers(0, 3),
    offset=st.integers(0, 12), size=st.integers(0, 40), stride=st.integers(1, 4),
)  # fmt: skip
def test_vectors_are_read_and_written_as_numpy_says(
    host: Any, n: int, way: int, shift: int, offset: int, size: int, stride: int
) -> None:
    memory = np.zeros(600 + 16, np.float32)
    start = (-memory.ctypes.data // 4) % 16
    x = np.arange(600, dtype=np.float32)
    held = memory[start + shift :][:560]
    held[:] = x[:560]
    y_memory = np.full(700, -7, np.float32)
    y = y_memory[(-y_memory.ctypes.data // 4) % 16 + (shift if way < 3 else 0) :][:600]
    if way == 3:
        held = memory[start:][:560]
        held[:] = x[:560]
    host.run_vectors(
        ctypes.c_int(n), ctypes.c_int(way), pointer(held), pointer(y), ctypes.c_size_t(offset),
        ctypes.c_int64(size), ctypes.c_int64(stride),
    )  # fmt: skip
    elements = np.arange(n) + n * offset
    bound = way in (1, 2)
    places = elements * (stride if way == 2 else 1)
    there = (elements < size) if bound else np.ones(n, bool)
    want = np.where(there, x[places], -1)
    np.testing.assert_array_equal(y[512 : 512 + n], want)
    assert bool(y[512 + n]) == (held.ctypes.data % (4 * n) == 0)
    rest = np.full(512, -7, np.float32)
    rest[places[there]] = x[places[there]]
    np.testing.assert_array_equal(y[:512], rest)
