// What a CUDA body of ferrule.cuda_kernel has: CUDA's own headers and the names that MLX documents
// for mx.fast.cuda_kernel, in namespace mlx::core::cu.
//
// NVRTC reads all that a body could name in 1.6 s. So a text defines what it names, and only that is
// included (milliseconds for NVRTC 13.5, on top of 45 for what every body has):
//   FR_FP8                 20; cuda_fp8.h
//   FR_COOPERATIVE_GROUPS  30; cooperative_groups.h
//   FR_STD_LIMITS          80; FR_STD_TYPE_TRAITS 140, FR_STD_TUPLE 220, FR_STD_ARRAY 280 and
//   FR_STD_COMPLEX         430: the parts of libcu++
//   FR_CUDA_LIBRARY        what cooperative_groups.h brings along of libcu++, such as cuda::atomic_ref
#pragma once

#define MAX_NDIM 10
#define WARP_SIZE 32
#ifndef FR_CUDA_LANES  // cuda_on_cpu.h has all this, for the CPU
#define FR_FN __device__ __forceinline__

// libcu++ writes out its metaprograms for up to 16 arguments; where it is told so for 2, they recurse,
// and its headers are read four times as fast.
#ifndef _CCCL_META_UNROLL_LIMIT
#define _CCCL_META_UNROLL_LIMIT 2
#endif
#if !defined(FR_CUDA_LIBRARY) && !defined(_CG_LIMIT_INCLUDED_DEPENDENCIES)
#define _CG_LIMIT_INCLUDED_DEPENDENCIES  // a switch of cooperative_groups.h: 70 ms instead of 1,100
#endif
// Products and quotients of complex numbers without C's rules for infinities, as in MLX.
#define LIBCUDACXX_ENABLE_SIMPLIFIED_COMPLEX_OPERATIONS

#include "cuda_pdl.h"
#include <cuda/std/cfloat>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda_fp16.h>
// bfloat16 after float16, of which it has the conversions
#include <cuda_bf16.h>
#ifdef FR_FP8
#include <cuda_fp8.h>
#endif
#ifdef FR_STD_COMPLEX
#include <cuda/std/complex>
#endif
#ifdef FR_STD_TYPE_TRAITS
#include <cuda/std/type_traits>
#endif
#ifdef FR_STD_ARRAY
#include <cuda/std/array>
#endif
#ifdef FR_STD_LIMITS
#include <cuda/std/limits>
#endif
#ifdef FR_STD_TUPLE
#include <cuda/std/tuple>
#endif
#ifdef FR_COOPERATIVE_GROUPS
#include <cooperative_groups.h>
#endif
#endif  // FR_CUDA_LANES
#ifndef INFINITY
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#endif
#ifndef NAN
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#endif

#include "cuda_index.h"
#ifdef FR_CUDA_PRINTF
#include "cuda_print.h"
#endif
#ifndef FR_CHECKED
#undef assert
#define assert(...) ((void)sizeof((__VA_ARGS__) ? 1 : 0))
#endif

namespace mlx { namespace core { namespace cu {

#ifdef FR_COOPERATIVE_GROUPS
namespace cg = cooperative_groups;
#endif

// ---- limits -----------------------------------------------------------------------------------
constexpr float F8E4M3_MAX = 448.0f;  // the largest float8_e4m3fn
constexpr float F4E2M1_MAX = 6.0f;    // the largest float4_e2m1fn

// The integers. For the floats max and min are the infinities.
template <typename T, typename = void> struct Limits {
  static constexpr bool is_signed = T(-1) < T(0);
  FR_FN static constexpr T max() {
    return is_signed ? T((((T(1) << (sizeof(T) * 8 - 2)) - 1) << 1) + 1) : T(-1);
  }
  FR_FN static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  FR_FN static constexpr T finite_max() { return max(); }
  FR_FN static constexpr T finite_min() { return min(); }
};
template <> struct Limits<bool> {
  FR_FN static constexpr bool max() { return true; }
  FR_FN static constexpr bool min() { return false; }
};
#define FR_LIMITS(T, BITS, SIGN, INFINITE, LARGEST)                                             \
  template <> struct Limits<T> {                                                              \
    FR_FN static constexpr T max() { return __builtin_bit_cast(T, BITS(INFINITE)); }          \
    FR_FN static constexpr T min() { return __builtin_bit_cast(T, BITS(SIGN | INFINITE)); }   \
    FR_FN static constexpr T finite_max() { return __builtin_bit_cast(T, BITS(LARGEST)); }    \
    FR_FN static constexpr T finite_min() {                                                   \
      return __builtin_bit_cast(T, BITS(SIGN | LARGEST));                                     \
    }                                                                                         \
  };
FR_LIMITS(__half, uint16_t, 0x8000, 0x7c00, 0x7bff)
FR_LIMITS(__nv_bfloat16, uint16_t, 0x8000, 0x7f80, 0x7f7f)
FR_LIMITS(float, uint32_t, 0x80000000u, 0x7f800000u, 0x7f7fffffu)
FR_LIMITS(double, uint64_t, 0x8000000000000000u, 0x7ff0000000000000u, 0x7fefffffffffffffu)
#undef FR_LIMITS

// ---- complex numbers --------------------------------------------------------------------------
#ifdef FR_STD_COMPLEX
template <typename T> using complex_t = cuda::std::complex<T>;
using complex64_t = complex_t<float>;
using complex128_t = complex_t<double>;

template <typename T> struct is_complex : cuda::std::false_type {};
template <typename T> struct is_complex<cuda::std::complex<T>> : cuda::std::true_type {};
template <typename T> inline constexpr bool is_complex_v = is_complex<T>::value;

template <typename T> struct Limits<complex_t<T>> {
  FR_FN static constexpr complex_t<T> max() { return {Limits<T>::max(), Limits<T>::max()}; }
  FR_FN static constexpr complex_t<T> min() { return {Limits<T>::min(), Limits<T>::min()}; }
};

// The remainder of each part for itself, with the divisor's sign.
template <typename T> FR_FN complex_t<T> operator%(complex_t<T> a, complex_t<T> b) {
  return complex_t<T>(a.real() - ::floor(a.real() / b.real()) * b.real(),
                      a.imag() - ::floor(a.imag() / b.imag()) * b.imag());
}
// The order is lexicographic: the real part first. Two that cannot be compared are <= and >=.
template <typename T> FR_FN bool operator>(complex_t<T> a, complex_t<T> b) {
  return a.real() > b.real() || (a.real() == b.real() && a.imag() > b.imag());
}
template <typename T> FR_FN bool operator<(complex_t<T> a, complex_t<T> b) { return b > a; }
template <typename T> FR_FN bool operator<=(complex_t<T> a, complex_t<T> b) { return !(a > b); }
template <typename T> FR_FN bool operator>=(complex_t<T> a, complex_t<T> b) { return !(b > a); }
#endif

} } }  // namespace mlx::core::cu
