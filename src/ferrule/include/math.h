// Scalar math of Metal kernels, the same text for g++ >= 11, clang >= 14, zig c++ and NVRTC.
//
// fr::scalar::precise   what `metal::f` and `metal::precise::f` mean
// fr::scalar::fast      what `metal::fast::f` means; fewer guarantees, see at the end
// fr::scalar            precise, for callers that do not choose
//
// Nothing is included, so that no name of the C library reaches a kernel.
//
// On the CPU every float function is straight-line code (`?:` on values that are computed anyway,
// integers as wide as the floats beside them), so that compilers vectorise a plain loop over it.
// fmod is the one exception. Whether a*b+c is contracted into one operation makes no difference
// where the processor has that operation. Infinities, NaN, subnormals, the sign of zero and
// arguments of any size come out as IEEE 754 and C have them. Doubles call the compiler's builtins
// and are not meant for hot loops.
//
// Largest errors on the CPU in ulp, over all floats (tests/include/test_include_math.py has the bounds):
//
//   floor ceil trunc rint round fmod fract frexp modf ldexp   none, or one rounding
//   fma sqrt divide fdim                                      one rounding
//   exp exp2 exp10 log log2 log10 pow powr                    1.3 (log2, log10 without FMA: 1.8)
//   sin cos sinpi cospi acos atan atan2 expm1 log1p cosh      1.8
//   rsqrt asin                                                2.0
//   tanh sinh asinh acosh atanh                               2.8
//   tan tanpi                                                 3.8
//
// The polynomials are minimax fits made for this file, their coefficients rounded to float one by
// one while the others were fitted again.
#ifndef FR_MATH_H
#define FR_MATH_H

#ifdef __ASSOCIATIVE_MATH__
#error "math.h: -fassociative-math, which -ffast-math brings, would cancel roundings; leave it out"
#endif

#ifndef FR_CUDA
#ifdef __CUDACC_RTC__
#define FR_CUDA 1
#else
#define FR_CUDA 0
#endif
#endif

#ifndef FR_FN
#if FR_CUDA
#define FR_FN __device__ __forceinline__
#else
#define FR_FN inline __attribute__((always_inline))
#endif
#endif

// The name of a C library function: NVRTC declares them, the other compilers have builtins.
#if FR_CUDA
#define FR_LIBM(name) ::name
#else
#define FR_LIBM(name) __builtin_##name
#endif

// Whether a*b+c with one rounding is a single instruction. Without it the builtin is a slow call.
#if FR_CUDA || defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
#define FR_HAS_FMA 1
#else
#define FR_HAS_FMA 0
#endif

namespace fr {
namespace scalar {

namespace detail {

typedef unsigned int u32;
typedef unsigned long long u64;

#if FR_CUDA
FR_FN int bits(float x) { return __float_as_int(x); }
FR_FN u64 bits(double x) { return (u64)__double_as_longlong(x); }
FR_FN float from_bits(u32 x) { return __uint_as_float(x); }
FR_FN double from_bits(u64 x) { return __longlong_as_double((long long)x); }
#else
FR_FN int bits(float x) { return __builtin_bit_cast(int, x); }
FR_FN u64 bits(double x) { return __builtin_bit_cast(u64, x); }
FR_FN float from_bits(u32 x) { return __builtin_bit_cast(float, x); }
FR_FN double from_bits(u64 x) { return __builtin_bit_cast(double, x); }
#endif

FR_FN float infinity() { return from_bits(0x7f800000u); }
FR_FN float nan() { return from_bits(0x7fc00000u); }

FR_FN int magnitude_bits(float x) { return bits(x) & 0x7fffffff; }
FR_FN u32 sign_bit(float x) { return (u32)bits(x) & 0x80000000u; }
FR_FN float flip_sign(float x, u32 sign) { return from_bits((u32)bits(x) ^ sign); }

}  // namespace detail

// ------------------------------------------------------------------------------------------
// precise, part 1: what is exact or correctly rounded, the same on every device
// ------------------------------------------------------------------------------------------
namespace precise {

FR_FN bool isnan(float x) { return detail::magnitude_bits(x) > 0x7f800000; }
FR_FN bool isinf(float x) { return detail::magnitude_bits(x) == 0x7f800000; }
FR_FN bool isfinite(float x) { return detail::magnitude_bits(x) < 0x7f800000; }
FR_FN bool isnormal(float x) {
  return (detail::u32)(detail::magnitude_bits(x) - 0x00800000) < 0x7f000000u;
}
FR_FN bool signbit(float x) { return detail::bits(x) < 0; }

FR_FN bool isnan(double x) { return (detail::bits(x) << 1) > (0x7ffull << 53); }
FR_FN bool isinf(double x) { return (detail::bits(x) << 1) == (0x7ffull << 53); }
FR_FN bool isfinite(double x) { return (detail::bits(x) << 1) < (0x7ffull << 53); }
FR_FN bool isnormal(double x) {
  return (detail::bits(x) << 1) - (1ull << 53) < (0x7feull << 53);
}
FR_FN bool signbit(double x) { return (detail::bits(x) >> 63) != 0; }

#define FR_UNARY_FLOAT(name) \
  FR_FN float name(float x) { return FR_LIBM(name##f)(x); }
#define FR_UNARY_DOUBLE(name) \
  FR_FN double name(double x) { return FR_LIBM(name)(x); }
#define FR_UNARY(name) FR_UNARY_FLOAT(name) FR_UNARY_DOUBLE(name)
FR_UNARY(fabs) FR_UNARY(floor) FR_UNARY(ceil) FR_UNARY(trunc) FR_UNARY(sqrt)
FR_UNARY(rint)  // halves to even
FR_UNARY_DOUBLE(round)
FR_FN float copysign(float x, float y) { return FR_LIBM(copysignf)(x, y); }
FR_FN double copysign(double x, double y) { return FR_LIBM(copysign)(x, y); }
template <typename T> FR_FN T divide(T x, T y) { return x / y; }
FR_FN double fma(double x, double y, double z) { return FR_LIBM(fma)(x, y, z); }

// Halves away from zero. 0.5 less one ulp, since 0.49999997f + 0.5f would round up to 1.
FR_FN float round(float x) {
  return copysign(trunc(fabs(x) + 0x1.fffffep-2f), x);
}

// x * y + z with one rounding.
FR_FN float fma(float x, float y, float z) {
#if FR_HAS_FMA
  return FR_LIBM(fmaf)(x, y, z);
#else
  // The product is exact in double. The sum is rounded to odd, so that the second rounding, to
  // float, sees on which side of a tie the true value lies.
  double p = (double)x * (double)y, c = (double)z;
  double s = p + c, t = s - p;
  double lost = (p - (s - t)) + (c - t);
  detail::u64 b = detail::bits(s);
  bool inexact = lost < 0.0 || lost > 0.0;
  bool away = (lost > 0.0) == (s > 0.0);
  detail::u64 odd = (b & 1) != 0 ? b : away ? b + 1 : b - 1;
  return (float)(inexact ? detail::from_bits(odd) : s);
#endif
}

// fmin and fmax ignore a NaN when the other argument is a number.
template <typename T> FR_FN T fmin(T x, T y) { return isnan(y) ? x : x < y ? x : y; }
template <typename T> FR_FN T fmax(T x, T y) { return isnan(y) ? x : x > y ? x : y; }

template <typename T> FR_FN T fmin3(T x, T y, T z) { return fmin(fmin(x, y), z); }
template <typename T> FR_FN T fmax3(T x, T y, T z) { return fmax(fmax(x, y), z); }
// The middle value; with a NaN among the three, one of the numbers.
template <typename T> FR_FN T fmedian3(T x, T y, T z) {
  return fmax(fmin(x, y), fmin(fmax(x, y), z));
}

template <typename T> FR_FN T fdim(T x, T y) { return x <= y ? T(0) : x - y; }

// x - floor(x), below 1 even where that rounds up. An infinity gives NaN.
FR_FN float fract(float x) {
  float f = x - floor(x);
  return f > 0x1.fffffep-1f ? 0x1.fffffep-1f : f;
}
FR_FN double fract(double x) {
  double f = x - floor(x);
  return f > 0x1.fffffffffffffp-1 ? 0x1.fffffffffffffp-1 : f;
}

// Both parts have x's sign.
template <typename T> FR_FN T modf(T x, T& whole) {
  whole = trunc(x);
  return copysign(isinf(x) ? T(0) : x - whole, x);
}

// x = f * 2^exponent with 0.5 <= |f| < 1; zeros, infinities and NaN come back with exponent 0.
FR_FN float frexp(float x, int& exponent) {
  int tiny = detail::magnitude_bits(x) < 0x00800000 ? -1 : 0;
  float y = tiny != 0 ? x * 0x1p24f : x;
  int b = detail::bits(y);
  int e = (b >> 23) & 255;
  bool plain = (detail::u32)(e - 1) < 254u;
  exponent = plain ? e - 126 + (tiny & -24) : 0;
  return plain ? detail::from_bits(((detail::u32)b & 0x807fffffu) | 0x3f000000u) : x;
}
FR_FN double frexp(double x, int& exponent) {
  int e = 0;
  double f = FR_LIBM(frexp)(x, &e);
  exponent = isfinite(x) ? e : 0;
  return f;
}

// floor(log2(|x|)); the smallest int for 0 and NaN, the largest for infinities.
FR_FN int ilogb(float x) {
  int m = detail::magnitude_bits(x);
  float y = m < 0x00800000 ? x * 0x1p24f : x;
  int e = (detail::magnitude_bits(y) >> 23) - (m < 0x00800000 ? 127 + 24 : 127);
  e = m == 0x7f800000 ? 0x7fffffff : e;
  return ((m == 0) | (m > 0x7f800000)) ? -0x7fffffff - 1 : e;
}
FR_FN int ilogb(double x) {
  int e = 0;
  FR_LIBM(frexp)(x, &e);
  e = isinf(x) ? 0x7fffffff : e - 1;
  return x == 0.0 || isnan(x) ? -0x7fffffff - 1 : e;
}

// x * 2^n. The float goes through double, where the product is exact, and is rounded once.
FR_FN float ldexp(float x, int n) {
  int k = n < -320 ? -320 : n > 320 ? 320 : n;
  double scale = detail::from_bits((detail::u64)(k + 1023) << 52);
  return (float)((double)x * scale);
}
FR_FN double ldexp(double x, int n) { return FR_LIBM(ldexp)(x, n); }

FR_FN float nextafter(float x, float y) {
  detail::u32 b = (detail::u32)detail::bits(x);
  detail::u32 step = (x < y) == !signbit(x) ? b + 1u : b - 1u;
  detail::u32 zero = detail::sign_bit(y) | 1u;
  float r = detail::from_bits(x == 0.0f ? zero : step);
  r = x == y ? y : r;
  return ((x != x) | (y != y)) ? x + y : r;
}
FR_FN double nextafter(double x, double y) { return FR_LIBM(nextafter)(x, y); }

// x - y * trunc(x / y), exact.
FR_FN float fmod(float x, float y) {
#if FR_CUDA
  return ::fmodf(x, y);
#else
  // Each round removes 28 bits of the quotient, which are few enough for the division and the
  // product to be exact in double. One round is the rule.
  double r = (double)fabs(x), d = (double)fabs(y);
  bool valid = (r < (double)detail::infinity()) & (d > 0.0);
  r = valid ? r : 0.0;
  while (valid && r >= d) {
    int gap = (int)(detail::bits(r) >> 52) - (int)(detail::bits(d) >> 52) - 28;
    double step = d * detail::from_bits((detail::u64)((gap > 0 ? gap : 0) + 1023) << 52);
    r -= (double)(int)(r / step) * step;
  }
  return valid ? copysign((float)r, x) : detail::nan();
#endif
}
FR_FN double fmod(double x, double y) { return FR_LIBM(fmod)(x, y); }

}  // namespace precise

// ------------------------------------------------------------------------------------------
// precise, part 2: doubles, and floats on CUDA, from the compilers' own functions
// ------------------------------------------------------------------------------------------
namespace precise {

// What there is of one number for floats, too; those are used on CUDA alone.
#define FR_LIBRARY(X)                                                                             \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(cos) X(cosh) X(exp) X(exp2) X(expm1) X(log) \
  X(log10) X(log1p) X(log2) X(sin) X(sinh) X(tan) X(tanh)
FR_LIBRARY(FR_UNARY_DOUBLE)

FR_FN double atan2(double y, double x) { return FR_LIBM(atan2)(y, x); }
FR_FN double pow(double x, double y) { return FR_LIBM(pow)(x, y); }
FR_FN double powr(double x, double y) {
  return x < 0.0 ? (double)detail::nan() : FR_LIBM(pow)(fabs(x), y);
}
FR_FN double exp10(double x) { return FR_LIBM(pow)(10.0, x); }  // not every libm has exp10
FR_FN double rsqrt(double x) { return 1.0 / sqrt(x); }
FR_FN double sincos(double x, double& cosine) {
  cosine = cos(x);
  return sin(x);
}
// The arguments of the three below are reduced exactly, before pi comes in.
FR_FN double sinpi(double x) {
  double a = fabs(x), n = rint(a), r = a - n;
  double odd = fmod(n, 2.0);
  double s = FR_LIBM(sin)(r * 0x1.921fb54442d18p+1);
  return copysign(1.0, x) * ((odd != 0.0 ? -s : s) + 0.0);  // IEEE: a zero has the sign of x
}
FR_FN double cospi(double x) {
  double a = fabs(x), n = floor(a), r = 0.5 - (a - n);
  double odd = fmod(n, 2.0);
  double c = FR_LIBM(sin)(r * 0x1.921fb54442d18p+1);
  return (odd != 0.0 ? -c : c) + 0.0;
}
FR_FN double tanpi(double x) { return sinpi(x) / cospi(x); }

#if FR_CUDA

FR_LIBRARY(FR_UNARY_FLOAT) FR_UNARY_FLOAT(cospi) FR_UNARY_FLOAT(exp10) FR_UNARY_FLOAT(sinpi)
// rsqrtf may be two ulp off, and Metal asks for the correct rounding.
FR_FN float rsqrt(float x) { return ::__frsqrt_rn(x); }

FR_FN float atan2(float y, float x) { return ::atan2f(y, x); }
FR_FN float pow(float x, float y) { return ::powf(x, y); }
FR_FN float powr(float x, float y) { return x < 0.0f ? detail::nan() : ::powf(fabs(x), y); }
FR_FN float sincos(float x, float& cosine) {
  float s;
  ::sincosf(x, &s, &cosine);
  return s;
}
FR_FN float tanpi(float x) { return ::sinpif(x) / ::cospif(x); }

#endif  // FR_CUDA

}  // namespace precise

#if !FR_CUDA

// ------------------------------------------------------------------------------------------
// precise, part 3: floats on the CPU
// ------------------------------------------------------------------------------------------
namespace detail {

// a * b + c, where it does not matter whether it is rounded once or twice.
template <typename T> FR_FN T mad(T a, T b, T c) {
#if FR_HAS_FMA
  return precise::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial of x with these coefficients, the highest first.
template <typename T, typename... C> FR_FN T polynomial(T x, T p, C... lower) {
  ((p = mad(p, x, lower)), ...);
  return p;
}

// Adding 1.5 * 2^23 to a float below 2^22 rounds it to an integer, which then stands in the low
// bits.
#define FR_ROUNDER 0x1.8p23f
#define FR_ROUNDER64 0x1.8p52
// The same for an exponent n: n + 254 stands in the low bits, the sum of two biased exponents.
#define FR_EXPONENT_ROUNDER (0x1.8p23f + 254.0f)

// e^r - 1 for |r| <= ln(2) / 2, relative error 2^-26.
FR_FN float expm1_poly(float r) {
  float p = polynomial(r, 0x1.6b9ca4p-10f, 0x1.122560p-7f, 0x1.5556f2p-5f, 0x1.5554b4p-3f,
                          0x1.fffffep-2f);
  return mad(p, r * r, r);
}

// k = bits(n + FR_EXPONENT_ROUNDER) for the float n that it returns. Exponents above 130 become 130:
// what remains of the argument is then positive and large, and so is every polynomial of it.
FR_FN float exponent(float rounded, int& k) {
  k = bits(rounded);
  int limit = 0x4b400000 + 254 + 130;
  k = k < limit ? k : limit;
  return from_bits((u32)k) - FR_EXPONENT_ROUNDER;
}

// x = n ln(2) + r; returns r. The first part of ln(2) has 15 bits, so n times it is exact.
FR_FN float reduce_ln2(float x, int& k) {
  float n = exponent(mad(x, 0x1.715476p+0f, FR_EXPONENT_ROUNDER), k);
  float r = mad(n, -0x1.62e4p-1f, x);
  return mad(n, -0x1.7f7d1cp-20f, r);
}

// (1 + t) * 2^n for |n| <= 200, by two factors of 2^(n / 2) each, so that it goes gradually to
// subnormals and to infinity.
FR_FN float scale(float t, int k) {
  u32 a = ((u32)k << 22) & 0xff800000u, b = ((u32)k << 23) - a;
  float s = from_bits(a);
  return mad(s, t, s) * from_bits(b);
}

// 2^(n + shift), where that is a normal float.
FR_FN float power_of_two(int k, int shift) {
  return from_bits(((u32)k << 23) + ((u32)(shift - 127) << 23));
}

// Arguments below which the result is 0 are raised to `low`; a NaN stays.
FR_FN float at_least(float x, float low) { return x < low ? low : x; }

// log(x) = e ln(2) + log(1 + f) with 1 + f between sqrt(1/2) and sqrt(2), for positive finite x.
FR_FN float log_reduce(float x, float& e) {
  // Below the normal floats, all bits of `tiny` are set, and x is scaled by 2^23.
  int tiny = (int)((u32)bits(x) - 0x00800000u) >> 31;
  u32 shift = (u32)tiny & (23u << 23);
  u32 b = (u32)bits(x * from_bits(0x3f800000u + shift)) - shift;
  u32 t = b - 0x3f3504f3u;
  e = (float)((int)t >> 23);
  return from_bits(b - (t & 0xff800000u)) - 1.0f;
}
// q for log(1 + f) = f + q f^2, error 2^-27 of the logarithm.
FR_FN float log_poly(float f) {
  float p = polynomial(f, -0x1.38c908p-4f, 0x1.055e60p-3f, -0x1.0d8232p-3f, 0x1.22d936p-3f,
                          -0x1.54728cp-3f, 0x1.99a01cp-3f, -0x1.000226p-2f, 0x1.555554p-2f);
  return mad(p, f, -0.5f);
}
// The logarithm y of x, or what the logarithm of a zero, a negative, an infinity or a NaN is.
FR_FN float log_special(float x, float y) {
  // Integers and floats are compared in turn, since a compiler that sees that one comparison decides
  // the next makes branches of them.
  y = magnitude_bits(x) > 0x7f7fffff ? x : y;
  y = bits(x) < 0 ? nan() : y;
  return x == 0.0f ? -infinity() : y;
}

FR_FN float log_core(float x) {
  float e, f = log_reduce(x, e);
  float y = mad(log_poly(f), f * f, f);
  return log_special(x, mad(e, 0x1.62e4p-1f, mad(e, 0x1.7f7d1cp-20f, y)));
}

// sin(r) and cos(r) for |r| <= pi / 4.
FR_FN float sin_quarter(float r) {
  float z = r * r;
  float p = polynomial(z, -0x1.9954p-13f, 0x1.110778p-7f, -0x1.555546p-3f);
  return mad(p, z * r, r);
}
FR_FN float cos_quarter(float r) {
  float z = r * r;
  float p = polynomial(z, 0x1.99e80cp-16f, -0x1.6c0c28p-10f, 0x1.55554ap-5f);
  return mad(p, z * z, mad(z, -0.5f, 1.0f));
}

// x * c less an integer, for an x of 24 bits.
FR_FN double fraction(double x, double c) {
  double q = FR_LIBM(rint)(x * c);
#if FR_HAS_FMA
  return __builtin_fma(x, c, -q);
#else
  double head = (double)(float)c;
  return (x * head - q) + x * (c - head);
#endif
}
FR_FN double fraction(double x) { return x - FR_LIBM(rint)(x); }

// x / (2 pi) less an integer, for every finite x >= 0, relative error 2^-24 at the very worst.
// 1 / (2 pi) is given as a sum of four doubles, c0 to c3. From 2^78 on, x * c0 is an integer; below,
// x * c2 is far below 1. Products above 2^53 lose their integer in two steps.
FR_FN double turns(float a) {
  const double c0 = 0x1.45f306dc9c883p-3, c1 = -0x1.6b01ec5417056p-57;
  const double c2 = -0x1.6447e493ad4cep-111, c3 = 0x1.e21c820ff28b2p-165;
  double x = (double)a;
  bool far = a >= 0x1p78f;
  double high = far ? c1 : c0, middle = far ? c2 : c1, low = far ? c3 : c2;
  return fraction(fraction(x, high)) + mad(x, low, fraction(x, middle));
}

// a = n pi / 2 + r for a >= 0; returns r, between -pi / 4 and pi / 4.
FR_FN float reduce_quarter(float a, u32& n) {
  const double rounder = 0x1.8p50;  // rounds to quarters, and counts them in the low bits
  double f = turns(a);
  double k = f + rounder;
  n = (u32)bits(k);
  return (float)((f - (k - rounder)) * 0x1.921fb54442d18p+2);
}

// Circular functions of n pi / 2 + r from the sine and the cosine of r.
FR_FN float sin_quadrant(float s, float c, u32 n, u32 sign) {
  return flip_sign((n & 1) != 0 ? c : s, ((n & 2) << 30) ^ sign);
}
FR_FN float cos_quadrant(float s, float c, u32 n) {
  return flip_sign((n & 1) != 0 ? s : c, ((n + 1) & 2) << 30);
}
FR_FN float tan_quadrant(float s, float c, u32 n, u32 sign) {
  bool swap = (n & 1) != 0;
  return flip_sign((swap ? c : s) / (swap ? s : c), (n << 31) ^ sign);
}

// a = n / 2 + r for a >= 0; returns r * pi, and what that float lacks.
FR_FN float reduce_pi(float a, u32& n, float& low) {
  const float rounder = 0x1.8p22f;  // rounds to halves, and counts them in the low bits
  float h = a - 2.0f * FR_LIBM(truncf)(0.5f * a);
  float k = h + rounder;
  n = (u32)bits(k);
  float r = h - (k - rounder);
  float p = r * 0x1.921fb6p+1f;
#if FR_HAS_FMA
  low = __builtin_fmaf(r, -0x1.777a5cp-24f, __builtin_fmaf(r, 0x1.921fb6p+1f, -p));
#else
  low = (float)((double)r * 0x1.921fb54442d18p+1 - (double)p);
#endif
  return p;
}

// atan(t) for 0 <= t <= 1.
FR_FN float atan_poly(float t) {
  float z = t * t;
  float p = polynomial(z, -0x1.d35a80p-10f, 0x1.6424eep-7f, -0x1.fd7e1cp-6f, 0x1.da2a0ep-5f,
                          -0x1.58091cp-4f, 0x1.c08c4ep-4f, -0x1.242086p-3f, 0x1.9991e4p-3f,
                          -0x1.55553ep-2f);
  return mad(p, z * t, t);
}

// asin(s) for 0 <= s <= 1/2, given z = s * s.
FR_FN float asin_poly(float s, float z) {
  float p = polynomial(z, 0x1.595c92p-5f, 0x1.8c3e28p-6f, 0x1.747bbap-5f, 0x1.330204p-4f,
                          0x1.5555c8p-3f);
  return mad(p, z * s, s);
}

// 2^f - 1 for |f| <= 1/2.
FR_FN float exp2m1_poly(float f) {
  float p = polynomial(f, 0x1.416bbep-13f, 0x1.5f084ap-10f, 0x1.3b2de0p-7f, 0x1.c6af7cp-5f,
                          0x1.ebfbdcp-3f, 0x1.62e430p-1f);
  return p * f;
}

// log2((1 + f) 2^e) with 36 bits, for a reduced f.
FR_FN double log2_double(float f, float e) {
  double d = (double)f;
  double s = d / (d + 2.0), z = s * s;
  double p = polynomial(z, 0x1.5ce8ee22abcecp-2, 0x1.a58d80cd8aa3dp-2, 0x1.27777ff8c49acp-1,
                           0x1.ec709d12bb3e4p-1, 0x1.71547652bedffp+1);
  return mad(p, s, (double)e);
}

// |x|^y, and a NaN where one of them is and matters: 1^y and x^0 are 1.
//
// Kernels often have one y for all x, or one x. g++ before 13 does not vectorise a choice by a bool
// that comes from outside the loop, so most choices are made with masks.
FR_FN float pow_core(float x, float y) {
  float a = FR_LIBM(fabsf)(x);
  float e, f = log_reduce(a, e);
  // Nothing is infinite in between: the logarithms of 0 and infinity are 2^126 instead, and |y| is
  // kept between 2^-60 and 2^40, where it gives no other result.
  e = magnitude_bits(x) > 0x7f7fffff ? 0x1p126f : e;
  e = x == 0.0f ? -0x1p126f : e;
  int m = magnitude_bits(y), zero = (m - 1) >> 31, lost = (0x7f800000 - m) >> 31;
  int least = ~zero & 0x21800000, most = 0x53800000;
  m = m < most ? m : most;
  m = m > least ? m : least;
  double p = log2_double(f, e) * (double)from_bits((u32)m | sign_bit(y));
  double n = (p + FR_ROUNDER64) - FR_ROUNDER64;
  float t = exp2m1_poly((float)(p - n));
  int w = bits((float)n), limit = 0x43480000;  // 200
  int v = w & 0x7fffffff;
  float k = from_bits((u32)(v < limit ? v : limit) | ((u32)w & 0x80000000u));
  u32 d = (u32)bits(x) ^ 0x3f800000u;  // 0 for x = 1
  int other = (int)(d | (0u - d)) >> 31, unknown = (0x7f800000 - bits(a)) >> 31;
  u32 bad = (u32)((lost & other) | (unknown & ~zero));
  return scale(t, bits(k + FR_EXPONENT_ROUNDER)) + from_bits(bad & 0x7fc00000u);
}

}  // namespace detail

namespace precise {

FR_FN float exp(float x) {
  int k;
  float r = detail::reduce_ln2(detail::at_least(x, -104.0f), k);
  return detail::scale(detail::expm1_poly(r), k);
}

FR_FN float exp2(float x) {
  int k;
  float c = detail::at_least(x, -151.0f);
  float n = detail::exponent(c + FR_EXPONENT_ROUNDER, k);
  return detail::scale(detail::exp2m1_poly(c - n), k);
}

FR_FN float exp10(float x) {
  int k;
  float c = detail::at_least(x, -45.2f);
  float n = detail::exponent(detail::mad(c, 0x1.a934f0p+1f, FR_EXPONENT_ROUNDER), k);
  float r = detail::mad(n, -0x1.344p-2f, c);
  r = detail::mad(n, -0x1.3509f8p-18f, r);
  float p = detail::polynomial(r, 0x1.a63a9cp-3f, 0x1.156a46p-1f, 0x1.2bda00p+0f, 0x1.046f9cp+1f,
                                  0x1.53524ap+1f, 0x1.26bb1cp+1f);
  return detail::scale(p * r, k);
}

// e^x - 1
FR_FN float expm1(float x) {
  int k;
  float t = detail::expm1_poly(detail::reduce_ln2(detail::at_least(x, -18.0f), k));
  float s = detail::power_of_two(k, -1);  // half, since n may be 128
  float y = detail::mad(s, t, s - 0.5f) * 2.0f;
  y = x > 89.0f ? detail::infinity() : y;
  return copysign(fabs(x) < 0x1p-24f ? x : y, x);
}

FR_FN float log(float x) { return detail::log_core(x); }

FR_FN float log2(float x) {
  float e, f = detail::log_reduce(x, e);
  // The logarithm of 1 + f times log2(e), which is a sum of two floats.
  float y = detail::log_poly(f) * (f * f);
  y = detail::mad(f, 0x1.4ae0c0p-26f, y * 0x1.715476p+0f);
  return detail::log_special(x, e + detail::mad(f, 0x1.715476p+0f, y));
}

FR_FN float log10(float x) {
  float e, f = detail::log_reduce(x, e);
  float y = detail::log_poly(f) * (f * f);
  y = detail::mad(f, -0x1.5b235ep-27f, y * 0x1.bcb7b2p-2f);
  y = detail::mad(e, 0x1.3509f8p-18f, y);
  return detail::log_special(x, detail::mad(e, 0x1.344p-2f, detail::mad(f, 0x1.bcb7b2p-2f, y)));
}

// log(1 + x)
FR_FN float log1p(float x) {
  float u = 1.0f + x;
  float lost = x - (u - 1.0f);  // what the sum lost
  float y = detail::log_core(u);
  y = ((u > 0.0f) & (u < 0x1p25f)) ? y + lost / u : y;
  return x == 0.0f ? x : y;
}

// The circular functions, by what brings a number into a quarter of a turn.
#define FR_CIRCULAR(REDUCE)                                                         \
  FR_FN float sin(float x) {                                                        \
    detail::u32 n;                                                                  \
    float r = detail::REDUCE(fabs(x), n);                                           \
    float s = detail::sin_quarter(r), c = detail::cos_quarter(r);                   \
    return detail::sin_quadrant(s, c, n, detail::sign_bit(x));                      \
  }                                                                                 \
  FR_FN float cos(float x) {                                                        \
    detail::u32 n;                                                                  \
    float r = detail::REDUCE(fabs(x), n);                                           \
    return detail::cos_quadrant(detail::sin_quarter(r), detail::cos_quarter(r), n); \
  }                                                                                 \
  FR_FN float sincos(float x, float& cosine) {                                      \
    detail::u32 n;                                                                  \
    float r = detail::REDUCE(fabs(x), n);                                           \
    float s = detail::sin_quarter(r), c = detail::cos_quarter(r);                   \
    cosine = detail::cos_quadrant(s, c, n);                                         \
    return detail::sin_quadrant(s, c, n, detail::sign_bit(x));                      \
  }                                                                                 \
  FR_FN float tan(float x) {                                                        \
    detail::u32 n;                                                                  \
    float r = detail::REDUCE(fabs(x), n);                                           \
    float s = detail::sin_quarter(r), c = detail::cos_quarter(r);                   \
    return detail::tan_quadrant(s, c, n, detail::sign_bit(x));                      \
  }
FR_CIRCULAR(reduce_quarter)

FR_FN float sinpi(float x) {
  detail::u32 n;
  float low, r = detail::reduce_pi(fabs(x), n, low);
  float s = detail::sin_quarter(r) + low, c = detail::cos_quarter(r);
  // Adding 0 makes the zeros positive; the argument's sign then decides, as IEEE has it.
  return detail::flip_sign(detail::sin_quadrant(s, c, n, 0u) + 0.0f, detail::sign_bit(x));
}

FR_FN float cospi(float x) {
  detail::u32 n;
  float low, r = detail::reduce_pi(fabs(x), n, low);
  return detail::cos_quadrant(detail::sin_quarter(r) + low, detail::cos_quarter(r), n) + 0.0f;
}

FR_FN float tanpi(float x) {
  detail::u32 n;
  float low, r = detail::reduce_pi(fabs(x), n, low);
  float s = detail::sin_quarter(r) + low, c = detail::cos_quarter(r);
  // The zeros are positive, so that infinities have the sign of the sine.
  float t = (detail::sin_quadrant(s, c, n, 0u) + 0.0f) / (detail::cos_quadrant(s, c, n) + 0.0f);
  return detail::flip_sign(t, detail::sign_bit(x));
}

FR_FN float asin(float x) {
  float a = fabs(x);
  bool big = a > 0.5f;
  float z = big ? 0.5f - 0.5f * a : a * a;
  float p = detail::asin_poly(big ? sqrt(z) : a, z);
  float q = detail::mad(-2.0f, p, 0x1.921fb6p+0f) + -0x1.777a5cp-25f;
  return copysign(big ? q : p, x);
}

FR_FN float acos(float x) {
  float a = fabs(x);
  bool big = a > 0.5f;
  float z = big ? 0.5f - 0.5f * a : a * a;
  float p = detail::asin_poly(big ? sqrt(z) : a, z);
  float s = copysign(p, x);
  float small = 0x1.921fb6p+0f - (s - -0x1.777a5cp-25f);
  float wide = detail::mad(-2.0f, p, 0x1.921fb6p+1f) + -0x1.777a5cp-24f;
  return big ? (x < 0.0f ? wide : 2.0f * p) : small;
}

FR_FN float atan(float x) {
  float a = fabs(x);
  bool big = a > 1.0f;
  float p = detail::atan_poly(big ? 1.0f / a : a);
  float q = (0x1.921fb6p+0f - p) + -0x1.777a5cp-25f;
  return copysign(big ? q : p, x);
}

FR_FN float atan2(float y, float x) {
  float ax = fabs(x), ay = fabs(y);
  bool steep = ay > ax;
  float high = steep ? ay : ax, low = steep ? ax : ay;
  float same = high == 0.0f ? 0.0f : 1.0f;  // two zeros, two infinities
  float t = low == high ? same : low / high;
  float p = detail::atan_poly(t);
  p = steep ? (0x1.921fb6p+0f - p) + -0x1.777a5cp-25f : p;
  p = signbit(x) ? (0x1.921fb6p+1f - p) + -0x1.777a5cp-24f : p;
  return copysign(p, y);
}

// With E = e^(2 |x|) - 1: tanh |x| = E / (E + 2).
FR_FN float tanh(float x) {
  int k;
  float a = fabs(x);
  a = a > 10.0f ? 10.0f : a;
  float t = detail::expm1_poly(detail::reduce_ln2(a + a, k));
  float s = detail::power_of_two(k, 0);
  float e = detail::mad(s, t, s - 1.0f);
  return copysign(e / (e + 2.0f), x);
}

// With E = e^|x| - 1: sinh |x| = (E + E / (E + 1)) / 2. A quarter of E stays finite where sinh does.
FR_FN float sinh(float x) {
  int k;
  float a = fabs(x);
  a = a > 89.5f ? 89.5f : a;
  float t = detail::expm1_poly(detail::reduce_ln2(a, k));
  float s = detail::power_of_two(k, -2);
  float e = detail::mad(s, t, s - 0.25f);
  float y = (e + e / detail::mad(4.0f, e, 1.0f)) * 2.0f;
  return copysign(y < a ? a : y, x);  // a quarter of a subnormal lacks bits
}

FR_FN float cosh(float x) {
  int k;
  float a = fabs(x);
  a = a > 89.5f ? 89.5f : a;
  float t = detail::expm1_poly(detail::reduce_ln2(a, k));
  float s = detail::power_of_two(k, -2);
  float e = detail::mad(s, t, s);
  return (e + 0.0625f / e) * 2.0f;
}

FR_FN float asinh(float x) {
  float a = fabs(x);
  bool big = a > 0x1p30f;
  float z = a * a;
  float y = log1p(big ? a : a + z / (1.0f + sqrt(z + 1.0f)));
  return copysign(big ? y + 0x1.62e430p-1f : y, x);
}

FR_FN float acosh(float x) {
  bool big = x > 0x1p30f;
  float t = x - 1.0f;
  float y = log1p(big ? x : t + sqrt(t * (t + 2.0f)));
  y = big ? y + 0x1.62e430p-1f : y;
  return x < 1.0f ? detail::nan() : y;
}

FR_FN float atanh(float x) {
  float a = fabs(x);
  return copysign(0.5f * log1p((a + a) / (1.0f - a)), x);
}

FR_FN float pow(float x, float y) {
  float h = y * 0.5f;
  bool whole = trunc(y) == y;
  detail::u32 odd = (detail::u32)(whole & (trunc(h) != h)) << 31;
  // Negative numbers have whole powers alone, infinity any.
  float bound = detail::from_bits((0u - (detail::u32)whole) & 0xff7fffffu);
  float p = detail::flip_sign(detail::pow_core(x, y), (detail::u32)detail::bits(x) & odd);
  return ((x < bound) & (x > -detail::infinity())) ? detail::nan() : p;
}

FR_FN float powr(float x, float y) {
  float p = detail::pow_core(x, y);
  return x < 0.0f ? detail::nan() : p;
}

// Correctly rounded but for the rarest of ties, which Metal asks for: one rounding, from double.
FR_FN float rsqrt(float x) { return float(1.0 / __builtin_sqrt(double(x))); }

}  // namespace precise

#endif  // !FR_CUDA

// ------------------------------------------------------------------------------------------
// fast: the precise function, but for those that are defined here. Metal allows larger errors.
// ------------------------------------------------------------------------------------------
namespace fast {

using namespace precise;

#define FR_PRECISE_DOUBLE(name) \
  FR_FN double name(double x) { return precise::name(x); }
FR_PRECISE_DOUBLE(cos) FR_PRECISE_DOUBLE(sin) FR_PRECISE_DOUBLE(tan)
FR_FN double sincos(double x, double& cosine) { return precise::sincos(x, cosine); }
FR_FN double powr(double x, double y) { return precise::powr(x, y); }

#if FR_CUDA

#define FR_INTRINSIC(name)                               \
  FR_FN float name(float x) { return ::__##name##f(x); } \
  FR_PRECISE_DOUBLE(name)
FR_INTRINSIC(exp) FR_INTRINSIC(exp10) FR_INTRINSIC(log) FR_INTRINSIC(log10) FR_INTRINSIC(log2)
FR_PRECISE_DOUBLE(rsqrt) FR_PRECISE_DOUBLE(sqrt)
#undef FR_INTRINSIC

FR_FN double divide(double x, double y) { return x / y; }
FR_FN float divide(float x, float y) { return ::__fdividef(x, y); }
FR_FN float powr(float x, float y) { return ::__powf(x, y); }
FR_FN float rsqrt(float x) { return ::rsqrtf(x); }
FR_FN float sqrt(float x) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace fast

namespace detail {
// The intrinsics lose a bit for each bit of the argument: positions in rotary embeddings pass
// 100,000, so whole turns are taken off first. Absolute error 2^-20 up to there.
FR_FN float reduce_turn(float x) {
  float n = ::rintf(x * 0x1.45f306p-3f);
  float r = ::fmaf(n, -0x1.921fb6p+2f, x);
  return ::fmaf(n, 0x1.777a5cp-23f, r);
}
}  // namespace detail

namespace fast {

FR_FN float cos(float x) { return ::__cosf(detail::reduce_turn(x)); }
FR_FN float sin(float x) { return ::__sinf(detail::reduce_turn(x)); }
FR_FN float sincos(float x, float& cosine) {
  float r = detail::reduce_turn(x);
  cosine = ::__cosf(r);
  return ::__sinf(r);
}
FR_FN float tan(float x) { return ::__tanf(detail::reduce_turn(x)); }

#else

FR_FN float powr(float x, float y) { return exp2(y * log2(x)); }

}  // namespace fast

namespace detail {
// a = n pi / 2 + r like reduce_quarter, in floats alone: absolute error below 2^-24 up to 10^5,
// growing beyond. From 6 * 10^6 on the result means nothing, but stays between -1 and 1.
FR_FN float reduce_quarter_fast(float a, u32& n) {
#if FR_HAS_FMA
  float k = mad(a, 0x1.45f306p-1f, FR_ROUNDER);
  n = (u32)bits(k);
  k -= FR_ROUNDER;
  float r = mad(k, -0x1.921fb6p+0f, a);
  r = mad(k, 0x1.777a5cp-25f, r);
  return FR_LIBM(fabsf)(r) < 1.0f ? r : r - r;
#else
  return reduce_quarter(a, n);
#endif
}
}  // namespace detail

namespace fast {

FR_CIRCULAR(reduce_quarter_fast)

#endif  // FR_CUDA

}  // namespace fast

using namespace precise;

}  // namespace scalar
}  // namespace fr

#undef FR_UNARY_FLOAT
#undef FR_UNARY_DOUBLE
#undef FR_UNARY
#undef FR_LIBRARY
#undef FR_PRECISE_DOUBLE
#undef FR_CIRCULAR
#undef FR_LIBM
#undef FR_HAS_FMA
#undef FR_ROUNDER
#undef FR_ROUNDER64
#undef FR_EXPONENT_ROUNDER

#endif  // FR_MATH_H
