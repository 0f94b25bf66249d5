// Metal's words in OpenCL C++, which has the same address spaces, so that clang can read a kernel's
// Metal text: declarations of what include/mlx.metal takes from Metal's headers. Nothing is run.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;
typedef unsigned long size_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef long long2 __attribute__((ext_vector_type(2)));
typedef long long3 __attribute__((ext_vector_type(3)));
typedef float float2 __attribute__((ext_vector_type(2)));
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define constant __constant
#define device __global
#define threadgroup __local
#define thread  // a member function for objects on the stack has no word in OpenCL
#define FR_SPACES(X) X() X(__constant)
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define __METAL_VERSION__ 310

struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit constexpr bfloat(float) : bits(0) {}
  constexpr operator float() const { return 0; }
  constexpr operator float() const __constant { return 0; }
  constexpr bfloat operator-() const { return *this; }
};

namespace metal {
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B> __constant constexpr bool is_same_v = false;
template <class A> __constant constexpr bool is_same_v<A, A> = true;
template <class T> struct numeric_limits {
  static constexpr T max() { return T(1); }
  static constexpr T min() { return T(0); }
  static constexpr T infinity() { return T(2); }
};
template <class T, int N> struct vec_of;
template <> struct vec_of<long, 2> { using type = long2; };
template <> struct vec_of<long, 3> { using type = long3; };
template <class T, int N> using vec = typename vec_of<T, N>::type;
template <class To, class From> To as_type(From v) { return __builtin_bit_cast(To, v); }

#define EVERYWHERE(declaration) \
  declaration namespace fast { declaration } namespace precise { declaration }
#define ONE(name) EVERYWHERE(float name(float);)
#define TWO(name) EVERYWHERE(float name(float, float);)
#define THREE(name) float name(float, float, float);
ONE(acos) ONE(acosh) ONE(asin) ONE(asinh) ONE(atan) ONE(atanh) ONE(cos) ONE(cosh) ONE(cospi)
ONE(exp) ONE(exp2) ONE(exp10) ONE(log) ONE(log2) ONE(log10) ONE(rsqrt) ONE(sin) ONE(sinh)
ONE(sinpi) ONE(sqrt) ONE(tan) ONE(tanh) ONE(tanpi) ONE(abs) ONE(fabs) ONE(ceil) ONE(floor)
ONE(fract) ONE(rint) ONE(round) ONE(trunc) ONE(sign) ONE(saturate)
TWO(atan2) TWO(pow) TWO(powr) TWO(copysign) TWO(fdim) TWO(fmax) TWO(fmin) TWO(fmod) TWO(max)
TWO(min) TWO(step)
THREE(clamp) THREE(fma) THREE(mix) THREE(smoothstep)

#define SHUFFLE(name) template <class T> T name(T, ushort);
#define FILL(name) template <class T> T name(T, T, ushort);
#define REDUCE(name) template <class T> T name(T);
SHUFFLE(simd_shuffle) SHUFFLE(simd_shuffle_up) SHUFFLE(simd_shuffle_down) SHUFFLE(simd_shuffle_xor)
FILL(simd_shuffle_and_fill_up) FILL(simd_shuffle_and_fill_down)
REDUCE(simd_sum) REDUCE(simd_product) REDUCE(simd_min) REDUCE(simd_max)
REDUCE(simd_prefix_inclusive_sum) REDUCE(simd_prefix_exclusive_sum)
REDUCE(simd_prefix_inclusive_product) REDUCE(simd_prefix_exclusive_product)
}  // namespace metal
