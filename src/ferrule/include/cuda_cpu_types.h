// The types of a CUDA text on the CPU: vectors, dim3, __half and __nv_bfloat16, with CUDA's names,
// sizes and alignments. In the global namespace, where CUDA's headers have them.
#pragma once

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;

// ---- vectors ------------------------------------------------------------------------------------
#define FR_VECTOR(NAME, T, ALIGN2, ALIGN4)                                                      \
  struct NAME##1 { T x; };                                                                      \
  struct alignas(ALIGN2) NAME##2 { T x, y; };                                                   \
  struct NAME##3 { T x, y, z; };                                                                \
  struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                                             \
  FR_FN constexpr NAME##1 make_##NAME##1(T x) { return {x}; }                                   \
  FR_FN constexpr NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                           \
  FR_FN constexpr NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                   \
  FR_FN constexpr NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
FR_VECTOR(char, signed char, 2, 4) FR_VECTOR(uchar, unsigned char, 2, 4)
FR_VECTOR(short, short, 4, 8) FR_VECTOR(ushort, unsigned short, 4, 8)
FR_VECTOR(int, int, 8, 16) FR_VECTOR(uint, unsigned int, 8, 16)
FR_VECTOR(long, long, 16, 16) FR_VECTOR(ulong, unsigned long, 16, 16)
FR_VECTOR(longlong, long long, 16, 16) FR_VECTOR(ulonglong, unsigned long long, 16, 16)
FR_VECTOR(float, float, 8, 16) FR_VECTOR(double, double, 16, 16)
#undef FR_VECTOR

struct dim3 {
  unsigned x, y, z;
  FR_FN constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  FR_FN constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  FR_FN constexpr operator uint3() const { return {x, y, z}; }
};

// ---- 16-bit floats ------------------------------------------------------------------------------
struct __half;
struct __nv_bfloat16;

namespace fr {
namespace on_cpu {
template <class T> inline constexpr bool number = __is_enum(T) ? false : detail::int_v<T>;
template <> inline constexpr bool number<float> = true;
template <> inline constexpr bool number<double> = true;

// The product and sum of doubles, rounded to odd: what rounds it again to 16 bits rounds right.
inline double fused(double a, double b, double c) {
  const double p = a * b, s = p + c, bb = s - p, error = (p - (s - bb)) + (c - bb);
  if (error == 0 || error != error || s - s != 0) return s;
  long long bits = __builtin_bit_cast(long long, s);
  if (bits & 1) return s;
  return __builtin_bit_cast(double, bits + ((error > 0) == (s > 0) ? 1 : -1));
}
}  // namespace on_cpu
}  // namespace fr

// STORED is ferrule's own type, which has the conversions.
#define FR_SMALL(NAME, OTHER, STORED)                                                           \
  struct NAME {                                                                                 \
    unsigned short __x;                                                                         \
    NAME() = default;                                                                           \
    template <class S, ::fr::metal::enable_if_t<::fr::on_cpu::number<S>, int> = 0>              \
    FR_FN constexpr NAME(S s) : __x(::fr::core::STORED(double(s)).bits) {}                      \
    FR_FN constexpr NAME(float s) : __x(::fr::core::STORED(s).bits) {}                          \
    FR_FN explicit NAME(OTHER other);                                                           \
    FR_FN constexpr operator float() const {                                                    \
      return float(::fr::core::STORED::from_bits(__x));                                         \
    }                                                                                           \
    FR_FN static constexpr NAME of(unsigned short bits) {                                       \
      NAME r{};                                                                                 \
      r.__x = bits;                                                                             \
      return r;                                                                                 \
    }                                                                                           \
    FR_FN NAME& operator+=(NAME b) { return *this = NAME(float(*this) + float(b)); }            \
    FR_FN NAME& operator-=(NAME b) { return *this = NAME(float(*this) - float(b)); }            \
    FR_FN NAME& operator*=(NAME b) { return *this = NAME(float(*this) * float(b)); }            \
    FR_FN NAME& operator/=(NAME b) { return *this = NAME(float(*this) / float(b)); }            \
    FR_FN NAME& operator++() { return *this += NAME(1.0f); }                                    \
    FR_FN NAME& operator--() { return *this -= NAME(1.0f); }                                    \
    FR_FN NAME operator++(int) { const NAME old = *this; ++*this; return old; }                 \
    FR_FN NAME operator--(int) { const NAME old = *this; --*this; return old; }                 \
  };                                                                                            \
  FR_FN NAME operator+(const NAME& a, const NAME& b) { return NAME(float(a) + float(b)); }      \
  FR_FN NAME operator-(const NAME& a, const NAME& b) { return NAME(float(a) - float(b)); }      \
  FR_FN NAME operator*(const NAME& a, const NAME& b) { return NAME(float(a) * float(b)); }      \
  FR_FN NAME operator/(const NAME& a, const NAME& b) { return NAME(float(a) / float(b)); }      \
  FR_FN constexpr NAME operator+(const NAME& a) { return a; }                                   \
  FR_FN constexpr NAME operator-(const NAME& a) { return NAME::of(a.__x ^ 0x8000); }            \
  FR_FN bool operator==(const NAME& a, const NAME& b) { return float(a) == float(b); }          \
  FR_FN bool operator!=(const NAME& a, const NAME& b) { return float(a) != float(b); }          \
  FR_FN bool operator<(const NAME& a, const NAME& b) { return float(a) < float(b); }            \
  FR_FN bool operator>(const NAME& a, const NAME& b) { return float(a) > float(b); }            \
  FR_FN bool operator<=(const NAME& a, const NAME& b) { return float(a) <= float(b); }          \
  FR_FN bool operator>=(const NAME& a, const NAME& b) { return float(a) >= float(b); }
FR_SMALL(__half, __nv_bfloat16, half)
FR_SMALL(__nv_bfloat16, __half, bfloat)
#undef FR_SMALL
FR_FN __half::__half(__nv_bfloat16 other) : __half(float(other)) {}
FR_FN __nv_bfloat16::__nv_bfloat16(__half other) : __nv_bfloat16(float(other)) {}
using half = __half;
using nv_bfloat16 = __nv_bfloat16;

#define FR_PAIR(PAIR, NAME)                                                                     \
  struct alignas(4) PAIR {                                                                      \
    NAME x, y;                                                                                  \
    PAIR() = default;                                                                           \
    FR_FN constexpr PAIR(const NAME& a, const NAME& b) : x(a), y(b) {}                          \
  };                                                                                            \
  FR_FN PAIR make_##NAME##2(NAME a, NAME b) { return {a, b}; }                                  \
  FR_FN PAIR operator+(const PAIR& a, const PAIR& b) { return {a.x + b.x, a.y + b.y}; }         \
  FR_FN PAIR operator-(const PAIR& a, const PAIR& b) { return {a.x - b.x, a.y - b.y}; }         \
  FR_FN PAIR operator*(const PAIR& a, const PAIR& b) { return {a.x * b.x, a.y * b.y}; }         \
  FR_FN PAIR operator/(const PAIR& a, const PAIR& b) { return {a.x / b.x, a.y / b.y}; }         \
  FR_FN PAIR& operator+=(PAIR& a, const PAIR& b) { return a = a + b; }                          \
  FR_FN PAIR& operator-=(PAIR& a, const PAIR& b) { return a = a - b; }                          \
  FR_FN PAIR& operator*=(PAIR& a, const PAIR& b) { return a = a * b; }                          \
  FR_FN PAIR& operator/=(PAIR& a, const PAIR& b) { return a = a / b; }                          \
  FR_FN PAIR operator-(const PAIR& a) { return {-a.x, -a.y}; }                                  \
  FR_FN bool operator==(const PAIR& a, const PAIR& b) { return a.x == b.x && a.y == b.y; }      \
  FR_FN bool operator!=(const PAIR& a, const PAIR& b) { return a.x != b.x && a.y != b.y; }
FR_PAIR(__half2, __half)
FR_PAIR(__nv_bfloat162, __nv_bfloat16)
#undef FR_PAIR
using half2 = __half2;
using nv_bfloat162 = __nv_bfloat162;
FR_FN __half2 make_half2(__half a, __half b) { return {a, b}; }
FR_FN __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }

// -- their functions, for both --------------------------------------------------------------------
#define FR_BOTH(X) X(__half, __half2) X(__nv_bfloat16, __nv_bfloat162)
#define FR_BINARY(F, F2)                                                                        \
  FR_FN F __hadd(F a, F b) { return a + b; }                                                    \
  FR_FN F __hsub(F a, F b) { return a - b; }                                                    \
  FR_FN F __hmul(F a, F b) { return a * b; }                                                    \
  FR_FN F __hadd_rn(F a, F b) { return a + b; }                                                 \
  FR_FN F __hsub_rn(F a, F b) { return a - b; }                                                 \
  FR_FN F __hmul_rn(F a, F b) { return a * b; }                                                 \
  FR_FN F __hdiv(F a, F b) { return a / b; }                                                    \
  FR_FN F __hneg(F a) { return -a; }                                                            \
  FR_FN F __habs(F a) { return F::of(a.__x & 0x7fff); }                                         \
  FR_FN F __hfma(F a, F b, F c) {                                                               \
    return F(::fr::on_cpu::fused(float(a), float(b), float(c)));                                \
  }                                                                                             \
  FR_FN bool __hisnan(F a) { return float(a) != float(a); }                                     \
  FR_FN int __hisinf(F a) { return __builtin_isinf_sign(float(a)); }                            \
  FR_FN F fr_clamped(F a) { return F(float(a) > 0.0f ? float(a) < 1.0f ? float(a) : 1.0f : 0.0f); } \
  FR_FN F __hadd_sat(F a, F b) { return fr_clamped(a + b); }                                    \
  FR_FN F __hsub_sat(F a, F b) { return fr_clamped(a - b); }                                    \
  FR_FN F __hmul_sat(F a, F b) { return fr_clamped(a * b); }                                    \
  FR_FN F __hfma_sat(F a, F b, F c) { return fr_clamped(__hfma(a, b, c)); }                     \
  FR_FN F __hfma_relu(F a, F b, F c) {                                                          \
    const F r = __hfma(a, b, c);                                                                \
    return float(r) < 0.0f ? F(0.0f) : r;                                                       \
  }                                                                                             \
  FR_FN F __hmax(F a, F b) {                                                                    \
    if (__hisnan(a) || __hisnan(b)) return __hisnan(a) ? b : a;                                 \
    if (float(a) == float(b)) return a.__x >> 15 ? b : a; /* zeros: the positive one */         \
    return float(a) > float(b) ? a : b;                                                         \
  }                                                                                             \
  FR_FN F __hmin(F a, F b) { return -__hmax(-a, -b); }                                          \
  FR_FN F __hmax_nan(F a, F b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }     \
  FR_FN F __hmin_nan(F a, F b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); }     \
  FR_FN float __low2float(F2 a) { return float(a.x); }                                          \
  FR_FN float __high2float(F2 a) { return float(a.y); }
FR_BOTH(FR_BINARY)
#undef FR_BINARY

#define FR_PAIRWISE(NAME)                                                                       \
  FR_FN __half2 NAME##2(__half2 a, __half2 b) { return {NAME(a.x, b.x), NAME(a.y, b.y)}; }      \
  FR_FN __nv_bfloat162 NAME##2(__nv_bfloat162 a, __nv_bfloat162 b) {                            \
    return {NAME(a.x, b.x), NAME(a.y, b.y)};                                                    \
  }
#define FR_PAIRWISE_AS(NAME, SCALAR)                                                            \
  FR_FN __half2 NAME(__half2 a, __half2 b) { return {SCALAR(a.x, b.x), SCALAR(a.y, b.y)}; }     \
  FR_FN __nv_bfloat162 NAME(__nv_bfloat162 a, __nv_bfloat162 b) {                               \
    return {SCALAR(a.x, b.x), SCALAR(a.y, b.y)};                                                \
  }
FR_PAIRWISE(__hadd) FR_PAIRWISE(__hsub) FR_PAIRWISE(__hmul) FR_PAIRWISE(__hmax) FR_PAIRWISE(__hmin)
FR_PAIRWISE_AS(__hadd2_rn, __hadd) FR_PAIRWISE_AS(__hsub2_rn, __hsub)
FR_PAIRWISE_AS(__hmul2_rn, __hmul) FR_PAIRWISE_AS(__h2div, __hdiv)
FR_PAIRWISE_AS(__hadd2_sat, __hadd_sat) FR_PAIRWISE_AS(__hsub2_sat, __hsub_sat)
FR_PAIRWISE_AS(__hmul2_sat, __hmul_sat) FR_PAIRWISE_AS(__hmax2_nan, __hmax_nan)
FR_PAIRWISE_AS(__hmin2_nan, __hmin_nan)
#undef FR_PAIRWISE
#undef FR_PAIRWISE_AS

// Comparisons: of one number, of pairs as 1 and 0, and of both numbers of a pair. With `u` they hold
// where a number is NaN.
#define FR_COMPARED(F, F2, NAME, OP)                                                            \
  FR_FN bool __h##NAME(F a, F b) { return float(a) OP float(b); }                               \
  FR_FN bool __h##NAME##u(F a, F b) {                                                           \
    return __hisnan(a) || __hisnan(b) || float(a) OP float(b);                                  \
  }                                                                                             \
  FR_FN F2 __h##NAME##2(F2 a, F2 b) { return {F(__h##NAME(a.x, b.x)), F(__h##NAME(a.y, b.y))}; } \
  FR_FN bool __hb##NAME##2(F2 a, F2 b) { return __h##NAME(a.x, b.x) && __h##NAME(a.y, b.y); }
#define FR_COMPARISONS(F, F2)                                                                   \
  FR_COMPARED(F, F2, eq, ==) FR_COMPARED(F, F2, lt, <) FR_COMPARED(F, F2, le, <=)               \
  FR_COMPARED(F, F2, gt, >) FR_COMPARED(F, F2, ge, >=)                                          \
  FR_FN bool __hne(F a, F b) { return !__hisnan(a) && !__hisnan(b) && float(a) != float(b); }   \
  FR_FN bool __hneu(F a, F b) { return float(a) != float(b); }                                  \
  FR_FN F2 __hne2(F2 a, F2 b) { return {F(__hne(a.x, b.x)), F(__hne(a.y, b.y))}; }              \
  FR_FN F2 __hisnan2(F2 a) { return {F(__hisnan(a.x)), F(__hisnan(a.y))}; }                     \
  FR_FN F2 __hneg2(F2 a) { return {-a.x, -a.y}; }                                               \
  FR_FN F2 __habs2(F2 a) { return {__habs(a.x), __habs(a.y)}; }                                 \
  FR_FN F2 __hfma2(F2 a, F2 b, F2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
  FR_FN F2 __hfma2_relu(F2 a, F2 b, F2 c) {                                                     \
    return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)};                            \
  }                                                                                             \
  FR_FN F2 __lowhigh2highlow(F2 a) { return {a.y, a.x}; }
FR_BOTH(FR_COMPARISONS)
#undef FR_COMPARISONS
#undef FR_COMPARED

// Functions, by float's.
#define FR_FUNCTION(NAME, ...)                                                                  \
  FR_FN __half h##NAME(__half h) { const float x = h; return __half(float(__VA_ARGS__)); }      \
  FR_FN __nv_bfloat16 h##NAME(__nv_bfloat16 h) {                                                \
    const float x = h;                                                                          \
    return __nv_bfloat16(float(__VA_ARGS__));                                                   \
  }                                                                                             \
  FR_FN __half2 h2##NAME(__half2 a) { return {h##NAME(a.x), h##NAME(a.y)}; }                    \
  FR_FN __nv_bfloat162 h2##NAME(__nv_bfloat162 a) { return {h##NAME(a.x), h##NAME(a.y)}; }
FR_FUNCTION(sqrt, ::sqrtf(x)) FR_FUNCTION(rsqrt, 1 / ::sqrt(double(x))) FR_FUNCTION(rcp, 1 / x)
FR_FUNCTION(log, ::logf(x)) FR_FUNCTION(log2, ::log2f(x)) FR_FUNCTION(log10, ::log10f(x))
FR_FUNCTION(exp, ::expf(x)) FR_FUNCTION(exp2, ::exp2f(x)) FR_FUNCTION(exp10, ::pow(10.0, double(x)))
FR_FUNCTION(sin, ::sinf(x)) FR_FUNCTION(cos, ::cosf(x)) FR_FUNCTION(tanh, ::tanhf(x))
FR_FUNCTION(floor, ::floorf(x)) FR_FUNCTION(ceil, ::ceilf(x)) FR_FUNCTION(rint, ::rintf(x))
FR_FUNCTION(trunc, ::truncf(x))
#undef FR_FUNCTION

// -- conversions ----------------------------------------------------------------------------------
FR_FN float2 __half22float2(__half2 a) { return {float(a.x), float(a.y)}; }
FR_FN float2 __bfloat1622float2(__nv_bfloat162 a) { return {float(a.x), float(a.y)}; }
FR_FN float __half2float(__half a) { return float(a); }
FR_FN float __bfloat162float(__nv_bfloat16 a) { return float(a); }
// NAME and NAME2 are how the names of functions name one number and a pair.
#define FR_CONVERT(F, F2, NAME, NAME2)                                                          \
  FR_FN F __float2##NAME(float a) { return F(a); }                                              \
  FR_FN F __float2##NAME##_rn(float a) { return F(a); }                                         \
  FR_FN F __double2##NAME(double a) { return F(a); }                                            \
  FR_FN F2 __float2##NAME2##_rn(float a) { return {F(a), F(a)}; }                               \
  FR_FN F2 __floats2##NAME2##_rn(float a, float b) { return {F(a), F(b)}; }                     \
  FR_FN F2 __float22##NAME2##_rn(float2 a) { return {F(a.x), F(a.y)}; }                         \
  FR_FN F2 __halves2##NAME2(F a, F b) { return {a, b}; }                                        \
  FR_FN F2 __##NAME##2##NAME2(F a) { return {a, a}; }                                           \
  FR_FN F __low2##NAME(F2 a) { return a.x; }                                                    \
  FR_FN F __high2##NAME(F2 a) { return a.y; }                                                   \
  FR_FN F2 __low2##NAME2(F2 a) { return {a.x, a.x}; }                                           \
  FR_FN F2 __high2##NAME2(F2 a) { return {a.y, a.y}; }                                          \
  FR_FN F2 __lows2##NAME2(F2 a, F2 b) { return {a.x, b.x}; }                                    \
  FR_FN F2 __highs2##NAME2(F2 a, F2 b) { return {a.y, b.y}; }                                   \
  FR_FN unsigned short __##NAME##_as_ushort(F a) { return a.__x; }                              \
  FR_FN short __##NAME##_as_short(F a) { return short(a.__x); }                                 \
  FR_FN F __ushort_as_##NAME(unsigned short a) { return F::of(a); }                             \
  FR_FN F __short_as_##NAME(short a) { return F::of(static_cast<unsigned short>(a)); }          \
  FR_FN int __##NAME##2int_rn(F a) { return int(::rintf(float(a))); }                           \
  FR_FN int __##NAME##2int_rz(F a) { return int(float(a)); }                                    \
  FR_FN int __##NAME##2int_rd(F a) { return int(::floorf(float(a))); }                          \
  FR_FN int __##NAME##2int_ru(F a) { return int(::ceilf(float(a))); }                           \
  FR_FN unsigned __##NAME##2uint_rn(F a) { return unsigned(::rintf(float(a))); }                \
  FR_FN unsigned __##NAME##2uint_rz(F a) { return unsigned(float(a)); }                         \
  FR_FN F __int2##NAME##_rn(int a) { return F(a); }                                             \
  FR_FN F __uint2##NAME##_rn(unsigned a) { return F(a); }                                       \
  FR_FN F __short2##NAME##_rn(short a) { return F(a); }                                         \
  FR_FN F __ushort2##NAME##_rn(unsigned short a) { return F(a); }                               \
  FR_FN F __ll2##NAME##_rn(long long a) { return F(a); }                                        \
  FR_FN F __ull2##NAME##_rn(unsigned long long a) { return F(a); }
FR_CONVERT(__half, __half2, half, half2)
FR_CONVERT(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162)
#undef FR_CONVERT
#undef FR_BOTH
