// cuda_fp8.h's numbers of 8 bits on the CPU: e4m3 and e5m2. Those that are too large become the
// largest finite one, as in CUDA.
#pragma once

enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
using __nv_fp8_storage_t = unsigned char;

namespace fr {
namespace on_cpu {

// MANTISSA bits of mantissa, of 8; e4m3 has no infinity.
template <int MANTISSA> inline float wide_of(unsigned char bits) {
  constexpr int bias = MANTISSA == 3 ? 7 : 15, most = MANTISSA == 3 ? 15 : 31;
  const int e = (bits & 0x7f) >> MANTISSA, m = bits & ((1 << MANTISSA) - 1);
  float v = __builtin_ldexpf(e ? m + (1 << MANTISSA) : m, (e ? e : 1) - bias - MANTISSA);
  if (MANTISSA == 3 && (bits & 0x7f) == 0x7f) v = __builtin_nanf("");
  if (MANTISSA == 2 && e == most) v = m ? __builtin_nanf("") : __builtin_inff();
  return bits >> 7 ? -v : v;
}
template <int MANTISSA> inline unsigned char narrow_of(float v, bool saturates) {
  constexpr int bias = MANTISSA == 3 ? 7 : 15;
  constexpr unsigned char top = MANTISSA == 3 ? 0x7e : 0x7b, nan = 0x7f;
  const unsigned char sign = __builtin_bit_cast(unsigned, v) >> 31 << 7;
  if (v != v) return MANTISSA == 3 ? sign | nan : nan;
  const float a = __builtin_fabsf(v);
  int e = -999;
  if (a > 0) __builtin_frexpf(a, &e);
  e = e - 1 < 1 - bias ? 1 - bias : e - 1;
  const float steps = a - a == 0 ? __builtin_rintf(__builtin_ldexpf(a, MANTISSA - e)) : 1e9f;
  // The carry of a mantissa goes on into the exponent.
  const long bits = steps > 1e6f ? 0xff : long(steps) + ((long(e) + bias - 1) << MANTISSA);
  if (bits > top) return sign | (saturates ? top : MANTISSA == 3 ? nan : 0x7c);
  return sign | (unsigned char)bits;
}

}  // namespace on_cpu
}  // namespace fr

#define FR_FP8(NAME, PAIR, FOUR, MANTISSA)                                                      \
  struct NAME {                                                                                 \
    __nv_fp8_storage_t __x;                                                                     \
    NAME() = default;                                                                           \
    template <class S, ::fr::metal::enable_if_t<::fr::on_cpu::number<S>, int> = 0>              \
    explicit NAME(S s) : __x(::fr::on_cpu::narrow_of<MANTISSA>(float(s), true)) {}              \
    explicit NAME(__half s) : NAME(float(s)) {}                                                 \
    explicit NAME(__nv_bfloat16 s) : NAME(float(s)) {}                                          \
    explicit operator float() const { return ::fr::on_cpu::wide_of<MANTISSA>(__x); }            \
    explicit operator double() const { return float(*this); }                                   \
    explicit operator __half() const { return __half(float(*this)); }                           \
    explicit operator __nv_bfloat16() const { return __nv_bfloat16(float(*this)); }             \
  };                                                                                            \
  struct alignas(2) PAIR {                                                                      \
    unsigned short __x;                                                                         \
    PAIR() = default;                                                                           \
    explicit PAIR(float2 v) : __x(NAME(v.x).__x | NAME(v.y).__x << 8) {}                        \
    explicit operator float2() const { return {at(0), at(8)}; }                                 \
    float at(int bit) const { return ::fr::on_cpu::wide_of<MANTISSA>((unsigned char)(__x >> bit)); } \
  };                                                                                            \
  struct alignas(4) FOUR {                                                                      \
    unsigned __x;                                                                               \
    FOUR() = default;                                                                           \
    explicit FOUR(float4 v)                                                                     \
        : __x(NAME(v.x).__x | NAME(v.y).__x << 8 | NAME(v.z).__x << 16 | unsigned(NAME(v.w).__x) << 24) {} \
    explicit operator float4() const { return {at(0), at(8), at(16), at(24)}; }                 \
    float at(int bit) const { return ::fr::on_cpu::wide_of<MANTISSA>((unsigned char)(__x >> bit)); } \
  };
FR_FP8(__nv_fp8_e4m3, __nv_fp8x2_e4m3, __nv_fp8x4_e4m3, 3)
FR_FP8(__nv_fp8_e5m2, __nv_fp8x2_e5m2, __nv_fp8x4_e5m2, 2)
#undef FR_FP8
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float v, __nv_saturation_t s,
    __nv_fp8_interpretation_t kind) {
  const bool sat = s == __NV_SATFINITE;
  return kind == __NV_E4M3 ? fr::on_cpu::narrow_of<3>(v, sat) : fr::on_cpu::narrow_of<2>(v, sat);
}
