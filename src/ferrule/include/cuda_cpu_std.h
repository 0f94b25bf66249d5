// cuda::std on the CPU: the C++ library of the compiler. A text defines what it names, as for
// cuda_kernel.h; integers are always there.
#pragma once

namespace cuda {
namespace std {
using namespace ::std;
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t; using ::size_t; using ::ptrdiff_t;
}  // namespace std
}  // namespace cuda

#ifdef FR_STD_LIMITS
namespace std {
#define FR_LIMITS(T, DIGITS, LOWEST, MOST, LEAST, STEP, DENORM, INFINITE, QUIET)                \
  template <> struct numeric_limits<T> : numeric_limits<float> {                                \
    static constexpr int digits = DIGITS;                                                       \
    static constexpr T lowest() { return T::of(LOWEST); }                                       \
    static constexpr T max() { return T::of(MOST); }                                            \
    static constexpr T min() { return T::of(LEAST); }                                           \
    static constexpr T epsilon() { return T::of(STEP); }                                        \
    static constexpr T denorm_min() { return T::of(DENORM); }                                   \
    static constexpr T infinity() { return T::of(INFINITE); }                                   \
    static constexpr T quiet_NaN() { return T::of(QUIET); }                                     \
  };
FR_LIMITS(__half, 11, 0xfbff, 0x7bff, 0x0400, 0x1400, 0x0001, 0x7c00, 0x7fff)
FR_LIMITS(__nv_bfloat16, 8, 0xff7f, 0x7f7f, 0x0080, 0x3c00, 0x0001, 0x7f80, 0x7fff)
#undef FR_LIMITS
}  // namespace std
#endif
