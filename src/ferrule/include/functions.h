// The functions of the Metal dialect, lifted from fr::scalar (math.h) to half, bfloat and vectors.
//
// Arguments may mix scalars, vectors and element types, as Metal's overloads allow: a vector says
// the width and the element type, scalars are converted to it; of scalars the usual conversions
// decide. half and bfloat compute in float and are rounded once. Everything is branch-free, so
// that a loop around it vectorises.
#ifndef FR_FUNCTIONS_H
#define FR_FUNCTIONS_H

namespace fr {
namespace detail {
using metal::conditional_t;
using metal::is_unsigned_v;
using metal::make_signed_t;
using metal::make_unsigned_t;
using metal::numeric_limits;

// The type in which two arguments meet.
template <class A, class B, int N = width_v<A>, int M = width_v<B>> struct join2 {};
template <class A, class B, int N> struct join2<A, B, N, N> {
  using type = shape_t<common_t<element_t<A>, element_t<B>>, N>;
};
template <class A, class B> struct join2<A, B, 0, 0> {};
template <class A, class B, int N> struct join2<A, B, N, 1> { using type = value_t<A>; };
template <class A, class B, int M> struct join2<A, B, 1, M> { using type = value_t<B>; };
template <class A, class B> struct join2<A, B, 1, 1> {
  using type = common_t<element_t<A>, element_t<B>>;
};
template <class A, class B> struct join2<A, B, 0, 1> {};
template <class A, class B> struct join2<A, B, 1, 0> {};
template <class A, class... B> struct join : join2<A, typename join<B...>::type> {};
template <class A> struct join<A> : join2<A, A> {};
template <class... A> using join_t = typename join<A...>::type;

// The same for functions of real numbers: ints become float.
template <class T, bool = int_v<element_t<T>>> struct floating { using type = T; };
template <class T> struct floating<T, true> { using type = shape_t<float, width_v<T>>; };
template <class... A> using float_join_t = typename floating<join_t<A...>>::type;
// The type in which to compute: float for half and bfloat.
template <class T> using compute_t = conditional_t<small_v<T>, float, T>;
template <class R> using wide_t = shape_t<compute_t<element_t<R>>, width_v<R>>;

template <class T> using bits_t = typename metal::int_of_size<sizeof(T), false>::type;
template <class T> inline constexpr bits_t<T> sign_bit = bits_t<T>(bits_t<T>(1) << (sizeof(T) * 8 - 1));
template <class T> FR_FN constexpr bits_t<T> bits_of(T x) { return __builtin_bit_cast(bits_t<T>, x); }
template <class T> FR_FN constexpr bits_t<T> magnitude(T x) {
  return static_cast<bits_t<T>>(bits_of(x) & ~sign_bit<T>);
}
template <class T> FR_FN constexpr T from_bits(bits_t<T> b) { return __builtin_bit_cast(T, b); }

// Both are evaluated: no branch.
FR_FN constexpr bool either(bool a, bool b) { return (int(a) | int(b)) != 0; }

// ---- numbers ----------------------------------------------------------------------------------
// A function of one, two or three numbers of type T that is an expression of a, b and c.
#define FR_OF_ONE(name, R, ...) \
  struct fn_##name { template <class T> FR_FN static constexpr R call(T a) { return __VA_ARGS__; } };
#define FR_OF_TWO(name, R, ...)                                                        \
  struct fn_##name {                                                                   \
    template <class T> FR_FN static constexpr R call(T a, T b) { return __VA_ARGS__; } \
  };
#define FR_OF_THREE(name, R, ...)                                                           \
  struct fn_##name {                                                                        \
    template <class T> FR_FN static constexpr R call(T a, T b, T c) { return __VA_ARGS__; } \
  };

template <bool MAX> struct fn_extreme {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    if constexpr (int_v<T>) {
      return (MAX ? a < b : b < a) ? b : a;
    } else {
#if FR_CUDA
      if (!__builtin_is_constant_evaluated()) return device(a, b);
#endif
      return either(MAX ? a > b : a < b, b != b) ? a : b;  // a NaN loses
    }
  }
#if FR_CUDA
  FR_FN static double device(double a, double b) { return MAX ? ::fmax(a, b) : ::fmin(a, b); }
  template <class T> FR_FN static T device(T a, T b) { return MAX ? ::fmaxf(a, b) : ::fminf(a, b); }
#endif
};
using fn_max = fn_extreme<true>;
using fn_min = fn_extreme<false>;
FR_OF_THREE(max3, T, fn_max::call(fn_max::call(a, b), c))
FR_OF_THREE(min3, T, fn_min::call(fn_min::call(a, b), c))
FR_OF_THREE(median3, T, fn_max::call(fn_min::call(a, b), fn_min::call(fn_max::call(a, b), c)))
FR_OF_THREE(clamp, T, fn_min::call(fn_max::call(a, b), c))
struct fn_abs {
  template <class T> FR_FN static constexpr T call(T x) {
    if constexpr (float_v<T>) {
      return from_bits<T>(magnitude(x));
    } else if constexpr (is_unsigned_v<T>) {
      return x;
    } else {
      // In `int` at least: CUDA 13.0 forgets the sign of -32768 after its own abs of 16 bits. The
      // least int has no other sign, which compilers take for impossible.
      const auto v = +x;
      const auto u = static_cast<make_unsigned_t<decltype(+x)>>(v);
      return static_cast<T>(v < 0 ? 0 - u : u);
    }
  }
};
FR_OF_TWO(copysign, T, from_bits<T>(static_cast<bits_t<T>>(magnitude(a) | (bits_of(b) & sign_bit<T>))))
// Of a zero the zero, of a NaN a zero.
FR_OF_ONE(sign, T, fn_copysign::call(either(a < 0, a > 0) ? T(1) : T(0), a))
FR_OF_ONE(saturate, T, fn_clamp::call(a, T(0), T(1)))
FR_OF_THREE(mix, T, mad(T(b - a), c, a))
FR_OF_TWO(step, T, b < a ? T(0) : T(1))
struct fn_smoothstep {
  template <class T> FR_FN static constexpr T call(T lo, T hi, T x) {
    T t = fn_saturate::call((x - lo) / (hi - lo));
    return t * t * (T(3) - T(2) * t);
  }
};
struct fn_fma {
  template <class T> FR_FN static constexpr T call(T a, T b, T c) {
    if constexpr (is_same_v<T, bfloat>) {
      return T(scalar::precise::fma(float(a), float(b), float(c)));
    } else if constexpr (is_same_v<T, half>) {
#if FR_CUDA
      return device(a, b, c);
#else
      // The product is exact in float. The sum is rounded to odd with the help of its error, so
      // that rounding it again to half is as if it had been rounded once.
      float p = float(a) * float(b), z = float(c), s = p + z, u = s - p;
      float e = (p - (s - u)) + (z - u);
      uint32_t i = bits_of(s);
      uint32_t step = 1u | mask((e < 0) != (s < 0));
      uint32_t inexact = mask(either(e < 0, e > 0)) & mask((i & 1u) == 0);
      return T(from_bits<float>(i + (step & inexact)));
#endif
    } else {
      return scalar::precise::fma(a, b, c);
    }
  }
#if FR_CUDA
  FR_FN static half device(half a, half b, half c) {
    uint16_t r;
    asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(r) : "h"(a.bits), "h"(b.bits), "h"(c.bits));
    return half::from_bits(r);
  }
#endif
};
struct fn_nextafter {
  template <class T> FR_FN static constexpr T call(T x, T y) {
    using U = bits_t<T>;
    U up = static_cast<U>(bits_of(x) + 1), down = static_cast<U>(bits_of(x) - 1);
    T r = from_bits<T>((x < y) == (x > 0) ? up : down);
    r = x == 0 ? from_bits<T>(static_cast<U>((bits_of(y) & sign_bit<T>) | 1)) : r;
    r = x == y ? y : r;
    return x != x ? x : y != y ? y : r;
  }
};
FR_OF_ONE(isnan, bool, magnitude(a) > numeric_limits<T>::inf)
FR_OF_ONE(isinf, bool, magnitude(a) == numeric_limits<T>::inf)
FR_OF_ONE(isfinite, bool, magnitude(a) < numeric_limits<T>::inf)
FR_OF_ONE(isnormal, bool, static_cast<bits_t<T>>(magnitude(a) - numeric_limits<T>::hidden) <
                              static_cast<bits_t<T>>(numeric_limits<T>::inf - numeric_limits<T>::hidden))
FR_OF_ONE(signbit, bool, (bits_of(a) & sign_bit<T>) != 0)
// Of a number and its whole part; an infinity has none, and the sign stays with both parts.
FR_OF_TWO(fraction, T, fn_copysign::call(fn_isinf::call(a) ? T(0) : T(a - b), a))
FR_OF_TWO(isordered, bool, !either(fn_isnan::call(a), fn_isnan::call(b)))

// ---- ints -------------------------------------------------------------------------------------
template <class T> inline constexpr int bits_v = int(sizeof(T)) * 8;
FR_FN constexpr int popcount_bits(uint64_t u) {
  u -= u >> 1 & 0x5555555555555555u;
  u = (u & 0x3333333333333333u) + (u >> 2 & 0x3333333333333333u);
  return static_cast<int>((((u + (u >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u) >> 56);
}
FR_FN constexpr int clz_bits(uint64_t u) {
  u |= u >> 1;
  u |= u >> 2;
  u |= u >> 4;
  u |= u >> 8;
  u |= u >> 16;
  u |= u >> 32;
  return 64 - popcount_bits(u);
}
#if FR_CUDA
FR_FN int popcount_of(uint32_t u) { return ::__popc(u); }
FR_FN int popcount_of(uint64_t u) { return ::__popcll(u); }
FR_FN int clz_of(uint32_t u) { return ::__clz(static_cast<int>(u)); }
FR_FN int clz_of(uint64_t u) { return ::__clzll(static_cast<long long>(u)); }
#else
FR_FN int popcount_of(uint32_t u) { return __builtin_popcount(u); }
FR_FN int popcount_of(uint64_t u) { return __builtin_popcountll(u); }
// One bit below the value's makes zero an ordinary case.
FR_FN int clz_of(uint32_t u) { return __builtin_clzll(static_cast<uint64_t>(u) << 32 | 0x80000000u); }
FR_FN int clz_of(uint64_t u) { return u == 0 ? 64 : __builtin_clzll(u | 1); }
#endif
template <class T> using word_t = conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;
struct fn_popcount {
  template <class T> FR_FN static constexpr T call(T x) {
    bits_t<T> u = static_cast<bits_t<T>>(x);
    if (__builtin_is_constant_evaluated()) return static_cast<T>(popcount_bits(u));
    return static_cast<T>(popcount_of(static_cast<word_t<T>>(u)));
  }
};
struct fn_clz {
  template <class T> FR_FN static constexpr T call(T x) {
    bits_t<T> u = static_cast<bits_t<T>>(x);
    if (__builtin_is_constant_evaluated()) return static_cast<T>(clz_bits(u) - (64 - bits_v<T>));
    return static_cast<T>(clz_of(static_cast<word_t<T>>(u)) - (bits_v<word_t<T>> - bits_v<T>));
  }
};
struct fn_ctz {
  template <class T> FR_FN static constexpr T call(T x) {
    // The lowest bit alone, less one: as many ones as there were zeros.
    bits_t<T> u = static_cast<bits_t<T>>(x);
    return fn_popcount::call(static_cast<T>(static_cast<bits_t<T>>(~u & (u - 1))));
  }
};
struct fn_reverse_bits {
  template <class T> FR_FN static constexpr T call(T x) {
    uint64_t u = static_cast<uint64_t>(static_cast<bits_t<T>>(x)) << (64 - bits_v<T>);
    u = (u >> 1 & 0x5555555555555555u) | (u & 0x5555555555555555u) << 1;
    u = (u >> 2 & 0x3333333333333333u) | (u & 0x3333333333333333u) << 2;
    u = (u >> 4 & 0x0f0f0f0f0f0f0f0fu) | (u & 0x0f0f0f0f0f0f0f0fu) << 4;
    u = (u >> 8 & 0x00ff00ff00ff00ffu) | (u & 0x00ff00ff00ff00ffu) << 8;
    u = (u >> 16 & 0x0000ffff0000ffffu) | (u & 0x0000ffff0000ffffu) << 16;
    u = u >> 32 | u << 32;
    return static_cast<T>(static_cast<bits_t<T>>(u));
  }
};
struct fn_rotate {
  template <class T> FR_FN static constexpr T call(T v, T i) {
    bits_t<T> u = static_cast<bits_t<T>>(v);
    int n = static_cast<int>(i & static_cast<T>(bits_v<T> - 1));
    return static_cast<T>(static_cast<bits_t<T>>(u << n | u >> ((bits_v<T> - n) & (bits_v<T> - 1))));
  }
};
FR_OF_TWO(hadd, T, static_cast<T>((a & b) + ((a ^ b) >> 1)))
FR_OF_TWO(rhadd, T, static_cast<T>((a | b) - ((a ^ b) >> 1)))
struct fn_absdiff {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    using U = bits_t<T>;
    return static_cast<T>(a < b ? static_cast<U>(static_cast<U>(b) - static_cast<U>(a))
                                : static_cast<U>(static_cast<U>(a) - static_cast<U>(b)));
  }
};
struct fn_addsat {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    using L = numeric_limits<T>;
    T r = static_cast<T>(static_cast<bits_t<T>>(static_cast<bits_t<T>>(a) + static_cast<bits_t<T>>(b)));
    if constexpr (is_unsigned_v<T>) {
      return r < a ? L::max() : r;
    } else {
      return ((a ^ r) & (b ^ r)) < 0 ? (a < 0 ? L::min() : L::max()) : r;
    }
  }
};
struct fn_subsat {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    using L = numeric_limits<T>;
    T r = static_cast<T>(static_cast<bits_t<T>>(static_cast<bits_t<T>>(a) - static_cast<bits_t<T>>(b)));
    if constexpr (is_unsigned_v<T>) {
      return a < b ? T(0) : r;
    } else {
      return ((a ^ b) & (a ^ r)) < 0 ? (a < 0 ? L::min() : L::max()) : r;
    }
  }
};
struct fn_mulhi {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    if constexpr (sizeof(T) < 8) {
      using W = conditional_t<is_unsigned_v<T>, uint64_t, int64_t>;
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b) >> bits_v<T>);
    } else {
      // The four products of the halves; then what the signs add.
      uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
      uint64_t xl = x & 0xffffffffu, xh = x >> 32, yl = y & 0xffffffffu, yh = y >> 32;
      uint64_t low = xl * yl, mid = xh * yl + (low >> 32), other = xl * yh + (mid & 0xffffffffu);
      uint64_t hi = xh * yh + (mid >> 32) + (other >> 32);
      if constexpr (!is_unsigned_v<T>) hi -= (a < 0 ? y : 0) + (b < 0 ? x : 0);
      return static_cast<T>(hi);
    }
  }
};
FR_OF_THREE(madhi, T, static_cast<T>(static_cast<bits_t<T>>(
                          static_cast<bits_t<T>>(fn_mulhi::call(a, b)) + static_cast<bits_t<T>>(c))))
struct fn_madsat {
  template <class T> FR_FN static constexpr T call(T a, T b, T c) {
    using L = numeric_limits<T>;
    using U = bits_t<T>;
    T hi = fn_mulhi::call(a, b);
    U low = static_cast<U>(static_cast<conditional_t<(sizeof(T) < 4), uint32_t, U>>(a) *
                           static_cast<conditional_t<(sizeof(T) < 4), uint32_t, U>>(b));
    U s = static_cast<U>(low + static_cast<U>(c));
    U top = static_cast<U>(static_cast<U>(hi) + (s < low));
    if constexpr (is_unsigned_v<T>) {
      return top != 0 ? L::max() : static_cast<T>(s);
    } else {
      top = static_cast<U>(top - (c < 0));
      U fill = static_cast<T>(s) < 0 ? static_cast<U>(~U(0)) : U(0);
      return top == fill ? static_cast<T>(s) : (static_cast<T>(top) < 0 ? L::min() : L::max());
    }
  }
};
struct fn_mul24 {
  template <class T> FR_FN static constexpr T call(T a, T b) {
    using U = uint32_t;
    T x = static_cast<T>(static_cast<U>(a) << 8) >> 8, y = static_cast<T>(static_cast<U>(b) << 8) >> 8;
    return static_cast<T>(static_cast<U>(x) * static_cast<U>(y));
  }
};
FR_OF_THREE(mad24, T,
            static_cast<T>(static_cast<uint32_t>(fn_mul24::call(a, b)) + static_cast<uint32_t>(c)))
struct fn_extract_bits {
  template <class T> FR_FN static constexpr T call(T base, uint offset, uint bits) {
    constexpr uint n = bits_v<T>;
    T up = static_cast<T>(static_cast<bits_t<T>>(base) << ((n - offset - bits) & (n - 1)));
    return bits == 0 ? T(0) : static_cast<T>(up >> ((n - bits) & (n - 1)));
  }
};
struct fn_insert_bits {
  template <class T> FR_FN static constexpr T call(T base, T insert, uint offset, uint bits) {
    using U = bits_t<T>;
    constexpr uint n = bits_v<T>;
    U field = bits == 0 ? U(0) : static_cast<U>(static_cast<U>(~U(0)) >> ((n - bits) & (n - 1)));
    field = static_cast<U>(field << (offset & (n - 1)));
    U moved = static_cast<U>(static_cast<U>(insert) << (offset & (n - 1)));
    return static_cast<T>((static_cast<U>(base) & ~field) | (moved & field));
  }
};

// ---- math.h in each of the two precisions -----------------------------------------------------
#if defined(FR_CHECKED)
// A function's result, told where it is none of numbers that are.
template <class T, class... A> FR_FN T made(T result, A... operands) {
  const float r = static_cast<float>(result);
  const float given[] = {static_cast<float>(operands)..., 0};
  if (!__builtin_isfinite(r) && (__builtin_isfinite(static_cast<float>(operands)) && ...))
    fr_watch_made(r, sizeof...(operands), given[0], given[1]);
  return result;
}
#define FR_MADE(...) made(__VA_ARGS__)
#else
#define FR_MADE(result, ...) result
#endif
#define FR_MATH1(X)                                                                             \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atanh) X(cos) X(cosh) X(cospi) X(exp) X(exp2)      \
  X(exp10) X(log) X(log2) X(log10) X(rsqrt) X(sin) X(sinh) X(sinpi) X(sqrt) X(tan) X(tanh)       \
  X(tanpi)
#define FR_MATH2(X) X(atan2) X(divide) X(fmod) X(pow) X(powr)
#define FR_ROUND1(X) X(ceil) X(floor) X(fract) X(rint) X(round) X(trunc)
#define FR_CALL1(name)                                                                          \
  struct name {                                                                                 \
    template <class T> FR_FN static T call(T x) { return FR_MADE(scalar::FR_PRECISION::name(x), x); } \
  };
#define FR_CALL2(name)                                                                          \
  struct name {                                                                                 \
    template <class T> FR_FN static T call(T x, T y) { return FR_MADE(scalar::FR_PRECISION::name(x, y), x, y); } \
  };
#define FR_CALL_SINCOS                                                                          \
  struct sincos {                                                                               \
    template <class T> FR_FN static T call(T x, T& c) { return scalar::FR_PRECISION::sincos(x, c); } \
  };
namespace fn {
namespace precise {
#define FR_PRECISION precise
FR_MATH1(FR_CALL1) FR_MATH2(FR_CALL2) FR_ROUND1(FR_CALL1) FR_CALL2(fdim) FR_CALL_SINCOS
struct ldexp {  // the exponent comes as a float, exact where it matters
  template <class T> FR_FN static T call(T x, T k) {
    return scalar::precise::ldexp(x, static_cast<int>(fn_clamp::call(k, T(-100000), T(100000))));
  }
};
struct ilogb {
  template <class T> FR_FN static int call(T x) { return scalar::precise::ilogb(x); }
};
#undef FR_PRECISION
}  // namespace precise
namespace fast {
#define FR_PRECISION fast
FR_MATH1(FR_CALL1) FR_MATH2(FR_CALL2) FR_CALL_SINCOS
#undef FR_PRECISION
}  // namespace fast
#if defined(__FAST_MATH__)
namespace standard = fast;
#else
namespace standard = precise;
#endif
}  // namespace fn
}  // namespace detail

namespace metal {
// In each macro: R the result, computed per component by F on values of type T.
#define FR_FLOAT1(F, name)                                                     \
  template <class A, class R = float_join_t<A>> FR_FN R name(A x) {            \
    return lift<R, compute_t<element_t<R>>, F>(x);                             \
  }
#define FR_FLOAT2(F, name)                                                     \
  template <class A, class B, class R = float_join_t<A, B>> FR_FN R name(A x, B y) { \
    return lift<R, compute_t<element_t<R>>, F>(x, y);                          \
  }
#define FR_FLOAT3(F, name)                                                     \
  template <class A, class B, class C, class R = float_join_t<A, B, C>>        \
  FR_FN constexpr R name(A x, B y, C z) {                                      \
    return lift<R, compute_t<element_t<R>>, F>(x, y, z);                       \
  }
// The same on the element type itself: exact operations and ints.
#define FR_EXACT1(F, name, Join)                                               \
  template <class A, class R = Join<A>> FR_FN constexpr R name(A x) {          \
    return lift<R, element_t<R>, F>(x);                                        \
  }
#define FR_EXACT2(F, name, Join)                                               \
  template <class A, class B, class R = Join<A, B>> FR_FN constexpr R name(A x, B y) { \
    return lift<R, element_t<R>, F>(x, y);                                     \
  }
#define FR_EXACT3(F, name, Join)                                               \
  template <class A, class B, class C, class R = Join<A, B, C>>                \
  FR_FN constexpr R name(A x, B y, C z) {                                      \
    return lift<R, element_t<R>, F>(x, y, z);                                  \
  }
#define FR_TEST(F, name)                                                       \
  template <class A, class R = float_join_t<A>> FR_FN constexpr bools_t<R> name(A x) { \
    return lift<bools_t<R>, element_t<R>, F>(x);                               \
  }
template <class... A>
using int_join_t = enable_if_t<int_v<element_t<join_t<A...>>>, join_t<A...>>;
template <class... A>
using int32_join_t = enable_if_t<sizeof(element_t<join_t<A...>>) == 4, int_join_t<A...>>;

// ---- what is the same in every precision ------------------------------------------------------
FR_EXACT2(fn_max, max, join_t)
FR_EXACT2(fn_min, min, join_t)
FR_EXACT2(fn_max, fmax, float_join_t)
FR_EXACT2(fn_min, fmin, float_join_t)
FR_EXACT3(fn_max3, max3, join_t)
FR_EXACT3(fn_min3, min3, join_t)
FR_EXACT3(fn_median3, median3, join_t)
FR_EXACT3(fn_max3, fmax3, float_join_t)
FR_EXACT3(fn_min3, fmin3, float_join_t)
FR_EXACT3(fn_median3, fmedian3, float_join_t)
FR_EXACT3(fn_clamp, clamp, join_t)
FR_EXACT1(fn_abs, abs, join_t)
FR_EXACT1(fn_abs, fabs, float_join_t)
FR_EXACT1(fn_sign, sign, float_join_t)
FR_EXACT1(fn_saturate, saturate, float_join_t)
FR_EXACT2(fn_step, step, float_join_t)
FR_EXACT2(fn_copysign, copysign, float_join_t)
FR_EXACT2(fn_nextafter, nextafter, float_join_t)
FR_EXACT3(fn_fma, fma, float_join_t)
FR_FLOAT3(fn_mix, mix)
FR_FLOAT3(fn_smoothstep, smoothstep)
FR_FLOAT2(fn::precise::fdim, fdim)
FR_FLOAT2(fn::precise::ldexp, ldexp)
#define FR_STANDARD(name) FR_FLOAT1(fn::precise::name, name)
FR_ROUND1(FR_STANDARD)
#undef FR_STANDARD

FR_TEST(fn_isnan, isnan)
FR_TEST(fn_isinf, isinf)
FR_TEST(fn_isfinite, isfinite)
FR_TEST(fn_isnormal, isnormal)
FR_TEST(fn_signbit, signbit)
template <class A, class B, class R = float_join_t<A, B>>
FR_FN constexpr bools_t<R> isordered(A x, B y) {
  return lift<bools_t<R>, element_t<R>, fn_isordered>(x, y);
}
template <class A, class B, class R = float_join_t<A, B>>
FR_FN constexpr bools_t<R> isunordered(A x, B y) {
  return !isordered(x, y);
}
template <class A, class R = float_join_t<A>> FR_FN shape_t<int, width_v<R>> ilogb(A x) {
  return lift<shape_t<int, width_v<R>>, compute_t<element_t<R>>, fn::precise::ilogb>(x);
}
// With a second result through a reference.
template <class A, class R = float_join_t<A>> FR_FN R frexp(A x, shape_t<int, width_v<R>>& e) {
  using T = compute_t<element_t<R>>;
  if constexpr (width_v<R> == 1) {
    return scalar::precise::frexp(static_cast<T>(x), e);
  } else {
    R r;
    for (int i = 0; i < width_v<R>; ++i) r[i] = scalar::precise::frexp(static_cast<T>(x[i]), e[i]);
    return r;
  }
}
template <class A, class R = float_join_t<A>>
FR_FN R modf(A x, type_identity_t<A>& whole) {
  R f = lift<R, compute_t<element_t<R>>, fn::precise::trunc>(x);
  whole = f;
  return lift<R, element_t<R>, fn_fraction>(x, f);
}

// select(a, b, c): b where c holds, else a.
template <class A, class B, class C, class R = join_t<A, B>,
          class S = shape_t<element_t<R>, (width_v<R> > width_v<C> ? width_v<R> : width_v<C>)>,
          enable_if_t<(width_v<C> > 0), int> = 0>
FR_FN constexpr S select(A a, B b, C c) {
  using T = element_t<S>;
#define FR_SELECT(k) (static_cast<bool>(comp<k>(c)) ? static_cast<T>(comp<k>(b)) : static_cast<T>(comp<k>(a)))
  if constexpr (width_v<S> == 1) {
    return FR_SELECT(0);
  } else if constexpr (width_v<S> == 2) {
    return S(FR_SELECT(0), FR_SELECT(1));
  } else if constexpr (width_v<S> == 3) {
    return S(FR_SELECT(0), FR_SELECT(1), FR_SELECT(2));
  } else {
    return S(FR_SELECT(0), FR_SELECT(1), FR_SELECT(2), FR_SELECT(3));
  }
#undef FR_SELECT
}
template <class A, enable_if_t<(width_v<A> > 0), int> = 0> FR_FN constexpr bool all(A v) {
  bool r = static_cast<bool>(comp<0>(v));
  if constexpr (width_v<A> > 1) r = r & static_cast<bool>(comp<1>(v));
  if constexpr (width_v<A> > 2) r = r & static_cast<bool>(comp<2>(v));
  if constexpr (width_v<A> > 3) r = r & static_cast<bool>(comp<3>(v));
  return r;
}
template <class A, enable_if_t<(width_v<A> > 0), int> = 0> FR_FN constexpr bool any(A v) {
  return !all(lift<bools_t<A>, element_t<A>, op_not>(v));
}

// ---- ints -------------------------------------------------------------------------------------
FR_EXACT1(fn_popcount, popcount, int_join_t)
FR_EXACT1(fn_clz, clz, int_join_t)
FR_EXACT1(fn_ctz, ctz, int_join_t)
FR_EXACT1(fn_reverse_bits, reverse_bits, int_join_t)
FR_EXACT2(fn_rotate, rotate, int_join_t)
FR_EXACT2(fn_hadd, hadd, int_join_t)
FR_EXACT2(fn_rhadd, rhadd, int_join_t)
FR_EXACT2(fn_absdiff, absdiff, int_join_t)
FR_EXACT2(fn_addsat, addsat, int_join_t)
FR_EXACT2(fn_subsat, subsat, int_join_t)
FR_EXACT2(fn_mulhi, mulhi, int_join_t)
FR_EXACT3(fn_madhi, madhi, int_join_t)
FR_EXACT3(fn_madsat, madsat, int_join_t)
FR_EXACT2(fn_mul24, mul24, int32_join_t)
FR_EXACT3(fn_mad24, mad24, int32_join_t)
template <class A, class R = int_join_t<A>>
FR_FN constexpr R extract_bits(A base, uint offset, uint bits) {
  if constexpr (width_v<R> == 1) {
    return fn_extract_bits::call(base, offset, bits);
  } else {
    R r{};
    for (int i = 0; i < width_v<R>; ++i) r[i] = fn_extract_bits::call(base[i], offset, bits);
    return r;
  }
}
template <class A, class R = int_join_t<A>>
FR_FN constexpr R insert_bits(A base, type_identity_t<A> insert, uint offset, uint bits) {
  if constexpr (width_v<R> == 1) {
    return fn_insert_bits::call(base, insert, offset, bits);
  } else {
    R r{};
    for (int i = 0; i < width_v<R>; ++i) {
      r[i] = fn_insert_bits::call(base[i], insert[i], offset, bits);
    }
    return r;
  }
}

// ---- geometry ---------------------------------------------------------------------------------
template <class A, class B, class R = join_t<A, B>> FR_FN constexpr element_t<R> dot(A a, B b) {
  using T = compute_t<element_t<R>>;
  T s = num<T>::mul(static_cast<T>(comp<0>(a)), static_cast<T>(comp<0>(b)));
#define FR_TERM(k) \
  if constexpr (width_v<R> > k) s = mad(static_cast<T>(comp<k>(a)), static_cast<T>(comp<k>(b)), s);
  FR_TERM(1) FR_TERM(2) FR_TERM(3)
#undef FR_TERM
  return static_cast<element_t<R>>(s);
}
template <class A, class R = float_join_t<A>> FR_FN constexpr element_t<R> length_squared(A v) {
  return dot(R(v), R(v));
}
template <class A, class B, class R = float_join_t<A, B>>
FR_FN constexpr element_t<R> distance_squared(A a, B b) {
  wide_t<R> d = wide_t<R>(a) - wide_t<R>(b);
  return static_cast<element_t<R>>(dot(d, d));
}
template <class A, class B, class R = float_join_t<A, B>, enable_if_t<width_v<R> == 3, int> = 0>
FR_FN constexpr R cross(A a, B b) {
  using T = compute_t<element_t<R>>;
  T ax = T(a.x), ay = T(a.y), az = T(a.z), bx = T(b.x), by = T(b.y), bz = T(b.z);
  return R(mad(ay, bz, -(az * by)), mad(az, bx, -(ax * bz)), mad(ax, by, -(ay * bx)));
}
template <class A, class B, class R = float_join_t<A, B>> FR_FN constexpr R reflect(A i, B n) {
  using W = wide_t<R>;
  return R(W(i) - W(n) * (element_t<W>(2) * dot(W(n), W(i))));
}
template <class A, class B, class C, class R = float_join_t<A, B, C>>
FR_FN constexpr R faceforward(A n, B i, C reference) {
  return dot(wide_t<R>(reference), wide_t<R>(i)) < 0 ? R(n) : R(-R(n));
}
#define FR_GEOMETRY(ns)                                                                          \
  template <class A, class R = float_join_t<A>> FR_FN element_t<R> length(A v) {                 \
    using W = wide_t<R>;                                                                         \
    return static_cast<element_t<R>>(scalar::ns::sqrt(dot(W(v), W(v))));                         \
  }                                                                                              \
  template <class A, class B, class R = float_join_t<A, B>>                                      \
  FR_FN element_t<R> distance(A a, B b) {                                                        \
    using W = wide_t<R>;                                                                         \
    W d = W(a) - W(b);                                                                           \
    return static_cast<element_t<R>>(scalar::ns::sqrt(dot(d, d)));                               \
  }                                                                                              \
  template <class A, class R = float_join_t<A>> FR_FN R normalize(A v) {                         \
    using W = wide_t<R>;                                                                         \
    return R(W(v) * scalar::ns::rsqrt(dot(W(v), W(v))));                                         \
  }                                                                                              \
  template <class A, class B, class C, class R = float_join_t<A, B>>                             \
  FR_FN R refract(A i, B n, C eta) {                                                             \
    using W = wide_t<R>;                                                                         \
    using T = element_t<W>;                                                                      \
    T e = static_cast<T>(eta), d = dot(W(n), W(i)), k = T(1) - e * e * (T(1) - d * d);           \
    W r = W(i) * e - W(n) * (e * d + scalar::ns::sqrt(k < 0 ? T(0) : k));                        \
    return k < 0 ? R(T(0)) : R(r);                                                               \
  }

template <class T, int C, int R>
FR_FN constexpr matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> t{};
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j < R; ++j) t[j][i] = m[i][j];
  }
  return t;
}
template <class T> FR_FN constexpr T determinant(const matrix<T, 2, 2>& m) {
  using W = compute_t<T>;
  return T(W(m[0][0]) * W(m[1][1]) - W(m[0][1]) * W(m[1][0]));
}
template <class T> FR_FN constexpr T determinant(const matrix<T, 3, 3>& m) {
  using W = vec<compute_t<T>, 3>;
  return T(dot(W(m[0]), cross(W(m[1]), W(m[2]))));
}
template <class T> FR_FN constexpr T determinant(const matrix<T, 4, 4>& m) {
  using W = compute_t<T>;
  W s = 0;
  for (int k = 0; k < 4; ++k) {
    matrix<W, 3, 3> minor{};
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) minor[i][j] = W(m[i < k ? i : i + 1][j + 1]);
    }
    s += (k % 2 ? -1 : 1) * W(m[k][0]) * determinant(minor);
  }
  return T(s);
}

// ---- precise, fast, and the default of the two ------------------------------------------------
#define FR_PRECISE1(name) FR_FLOAT1(fn::precise::name, name)
#define FR_PRECISE2(name) FR_FLOAT2(fn::precise::name, name)
#define FR_FAST1(name) FR_FLOAT1(fn::fast::name, name)
#define FR_FAST2(name) FR_FLOAT2(fn::fast::name, name)
#define FR_SINCOS(ns)                                                                   \
  template <class A, class R = float_join_t<A>> FR_FN R sincos(A x, type_identity_t<A>& c) { \
    using T = compute_t<element_t<R>>;                                                  \
    if constexpr (width_v<R> == 1) {                                                    \
      T k;                                                                              \
      T s = fn::ns::sincos::call(static_cast<T>(x), k);                                 \
      c = A(k);                                                                         \
      return s;                                                                         \
    } else {                                                                            \
      R r;                                                                              \
      for (int i = 0; i < width_v<R>; ++i) r[i] = sincos(x[i], c[i]);                   \
      return r;                                                                         \
    }                                                                                   \
  }
namespace precise {
FR_MATH1(FR_PRECISE1) FR_MATH2(FR_PRECISE2) FR_SINCOS(precise) FR_GEOMETRY(precise)
}
namespace fast {
FR_MATH1(FR_FAST1) FR_MATH2(FR_FAST2) FR_SINCOS(fast) FR_GEOMETRY(fast)
}
#define FR_SHARED(X)                                                                            \
  X(max) X(min) X(fmax) X(fmin) X(max3) X(min3) X(median3) X(fmax3) X(fmin3) X(fmedian3) X(clamp) \
  X(abs) X(fabs) X(sign) X(saturate) X(step) X(copysign) X(nextafter) X(fma) X(mix)              \
  X(smoothstep) X(fdim) X(ldexp) X(ilogb) X(frexp) X(modf) X(select) X(all) X(any) X(isnan)      \
  X(isinf) X(isfinite) X(isnormal) X(signbit) X(isordered) X(isunordered) X(dot)                 \
  X(length_squared) X(distance_squared) X(cross) X(reflect) X(faceforward) FR_ROUND1(X)
#define FR_USE(name) using metal::name;
namespace precise {
FR_SHARED(FR_USE)
}
namespace fast {
FR_SHARED(FR_USE)
}
#undef FR_USE
#if defined(__FAST_MATH__)
#define FR_USE(name) using fast::name;
#else
#define FR_USE(name) using precise::name;
#endif
FR_MATH1(FR_USE) FR_MATH2(FR_USE)
FR_USE(sincos) FR_USE(length) FR_USE(distance) FR_USE(normalize) FR_USE(refract)
#undef FR_USE

// ---- packing of normalised integers -----------------------------------------------------------
// n fields of `bits` bits, the first lowest; Signed ones span [-1, 1], others [0, 1].
template <class T, int N, int Bits, bool Signed> FR_FN constexpr vec<T, N> unpack_norm(uint x) {
  vec<T, N> r{};
  for (int i = 0; i < N; ++i) {
    uint up = x << (32 - Bits * (i + 1));
    float v = Signed ? static_cast<float>(static_cast<int>(up) >> (32 - Bits))
                     : static_cast<float>(up >> (32 - Bits));
    v /= static_cast<float>((1u << (Signed ? Bits - 1 : Bits)) - 1u);
    r[i] = static_cast<T>(v < -1.0f ? -1.0f : v);
  }
  return r;
}
template <int N, int Bits, bool Signed, class T> FR_FN uint pack_norm(const vec<T, N>& v) {
  uint r = 0;
  for (int i = 0; i < N; ++i) {
    float x = fn_clamp::call(static_cast<float>(v[i]), Signed ? -1.0f : 0.0f, 1.0f);
    x = scalar::precise::rint(x * static_cast<float>((1u << (Signed ? Bits - 1 : Bits)) - 1u));
    r |= (static_cast<uint>(static_cast<int>(x)) & ((1u << Bits) - 1u)) << (Bits * i);
  }
  return r;
}
#define FR_PACK(T, N, Bits, S, name)                                                        \
  FR_FN constexpr vec<T, N> unpack_##name##_to_##T(uint x) { return unpack_norm<T, N, Bits, S>(x); } \
  FR_FN uint pack_##T##_to_##name(vec<T, N> v) { return pack_norm<N, Bits, S>(v); }
FR_PACK(float, 4, 8, false, unorm4x8) FR_PACK(float, 4, 8, true, snorm4x8)
FR_PACK(float, 2, 16, false, unorm2x16) FR_PACK(float, 2, 16, true, snorm2x16)
FR_PACK(half, 4, 8, false, unorm4x8) FR_PACK(half, 4, 8, true, snorm4x8)
FR_PACK(half, 2, 16, false, unorm2x16) FR_PACK(half, 2, 16, true, snorm2x16)

#undef FR_PACK
#undef FR_OF_ONE
#undef FR_OF_TWO
#undef FR_OF_THREE
#undef FR_FLOAT1
#undef FR_FLOAT2
#undef FR_FLOAT3
#undef FR_EXACT1
#undef FR_EXACT2
#undef FR_EXACT3
#undef FR_TEST
#undef FR_GEOMETRY
#undef FR_SINCOS
#undef FR_SHARED
#undef FR_MATH1
#undef FR_MATH2
#undef FR_ROUND1
#undef FR_CALL1
#undef FR_CALL2
#undef FR_CALL_SINCOS
}  // namespace metal
}  // namespace fr

#endif
