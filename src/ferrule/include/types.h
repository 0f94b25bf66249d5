// The types of the Metal dialect, for g++ >= 11, clang >= 14, zig c++ and NVRTC >= 12.
//
// No file is included: neither C library names nor NVRTC's global functions may meet a kernel's
// own names. Types and their operators live in fr::core, functions in fr::metal, helpers in
// fr::detail, so that argument dependent lookup never drags a library function into a call of the
// author's function of the same name (on Apple half and float4 are built in: no such lookup).
#ifndef FR_TYPES_H
#define FR_TYPES_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FR_CUDA 1
#define FR_FN __device__ __forceinline__
#define FR_ALIGN(n) alignas(n)
#define FR_DECL __device__
#else
#define FR_CUDA 0
#define FR_FN inline __attribute__((always_inline))
// NumPy slices need not be aligned, so on the CPU a vector asks for no more than its elements do.
#if defined(FR_CHECKED)
#define FR_ALIGN(n) alignas(n)  // but a checked launch has copies
#else
#define FR_ALIGN(n)
#endif
#define FR_DECL
#endif
#define METAL_FUNC FR_FN

// _Float16 where its conversions are instructions that the compiler also vectorises. Elsewhere
// branch-free integer code is as fast (g++ 12 on AVX2) or four times faster (AVX-512).
#if !FR_CUDA && !defined(FR_CHECKED) && defined(__FLT16_MAX__) && \
    (defined(__AVX512FP16__) || defined(__aarch64__) || (defined(__clang__) && defined(__F16C__)))
#define FR_FLOAT16 1
#else
#define FR_FLOAT16 0
#endif
// g++ 12 on AVX512-FP16 vectorises _Float16's arithmetic, but not its conversions.
#if FR_FLOAT16 && (defined(__clang__) || defined(__aarch64__) || __GNUC__ >= 13)
#define FR_FLOAT16_CONVERT 1
#else
#define FR_FLOAT16_CONVERT 0
#endif

namespace fr {
namespace core {

// ---- scalar names -----------------------------------------------------------------------------
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
#if defined(__LP64__)
using int64_t = long;
using uint64_t = unsigned long;
#else
using int64_t = long long;
using uint64_t = unsigned long long;
#endif
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = uint64_t;
using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));
struct half;
struct bfloat;
template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;
template <class V, int... I> struct swizzle;
}  // namespace core
using namespace core;
using intptr_t = ptrdiff_t;
using uintptr_t = size_t;

// ---- type traits, metal::'s own ---------------------------------------------------------------
namespace metal {
template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  FR_FN constexpr operator T() const { return V; }
  FR_FN constexpr T operator()() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class...> using void_t = void;
template <class T> struct type_identity { using type = T; };
template <class T> using type_identity_t = typename type_identity<T>::type;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct remove_cv : remove_const<typename remove_volatile<T>::type> {};
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> struct remove_pointer<T* const> { using type = T; };
template <class T> struct remove_extent { using type = T; };
template <class T> struct remove_extent<T[]> { using type = T; };
template <class T, size_t N> struct remove_extent<T[N]> { using type = T; };
template <class T> struct add_const { using type = const T; };
template <class T> struct add_pointer { using type = typename remove_reference<T>::type*; };
template <class T> struct add_lvalue_reference { using type = T&; };
template <> struct add_lvalue_reference<void> { using type = void; };
#define FR_TYPE(name) \
  template <class T> using name##_t = typename name<T>::type;
FR_TYPE(remove_const) FR_TYPE(remove_volatile) FR_TYPE(remove_cv) FR_TYPE(remove_reference)
FR_TYPE(remove_pointer) FR_TYPE(remove_extent) FR_TYPE(add_const) FR_TYPE(add_pointer)
FR_TYPE(add_lvalue_reference)
#undef FR_TYPE
template <class T> using remove_cvref_t = remove_cv_t<remove_reference_t<T>>;
template <class T> struct remove_cvref { using type = remove_cvref_t<T>; };

template <int Bytes, bool Signed> struct int_of_size {};
#define FR_INTS(bytes, T, U)                                              \
  template <> struct int_of_size<bytes, true> { using type = T; };        \
  template <> struct int_of_size<bytes, false> { using type = U; };
FR_INTS(1, int8_t, uint8_t) FR_INTS(2, int16_t, uint16_t) FR_INTS(4, int32_t, uint32_t)
FR_INTS(8, int64_t, uint64_t)
#undef FR_INTS

template <class T> inline constexpr bool is_void_v = is_same_v<remove_cv_t<T>, void>;
template <class T> inline constexpr bool is_const_v = false;
template <class T> inline constexpr bool is_const_v<const T> = true;
template <class T> inline constexpr bool is_volatile_v = false;
template <class T> inline constexpr bool is_volatile_v<volatile T> = true;
template <class T> inline constexpr bool is_pointer_v = false;
template <class T> inline constexpr bool is_pointer_v<T*> = true;
template <class T> inline constexpr bool is_pointer_v<T* const> = true;
template <class T> inline constexpr bool is_array_v = false;
template <class T> inline constexpr bool is_array_v<T[]> = true;
template <class T, size_t N> inline constexpr bool is_array_v<T[N]> = true;
template <class T> inline constexpr bool is_reference_v = false;
template <class T> inline constexpr bool is_reference_v<T&> = true;
template <class T> inline constexpr bool is_reference_v<T&&> = true;
template <class T> inline constexpr bool is_lvalue_reference_v = false;
template <class T> inline constexpr bool is_lvalue_reference_v<T&> = true;
template <class T> inline constexpr bool is_enum_v = __is_enum(T);
template <class T> inline constexpr bool is_class_v = __is_class(T);
template <class T> inline constexpr bool is_union_v = __is_union(T);
template <class T> inline constexpr bool is_trivially_copyable_v = __is_trivially_copyable(T);
template <class A, class B> inline constexpr bool is_base_of_v = __is_base_of(A, B);
}  // namespace metal

namespace detail {
using namespace core;
using metal::enable_if_t;
using metal::is_same_v;

template <class T> inline constexpr bool int_v = false;
#define FR_IS(kind, T) template <> inline constexpr bool kind<T> = true;
FR_IS(int_v, bool) FR_IS(int_v, char) FR_IS(int_v, signed char) FR_IS(int_v, unsigned char)
FR_IS(int_v, short) FR_IS(int_v, unsigned short) FR_IS(int_v, int) FR_IS(int_v, unsigned)
FR_IS(int_v, long) FR_IS(int_v, unsigned long) FR_IS(int_v, long long)
FR_IS(int_v, unsigned long long) FR_IS(int_v, wchar_t) FR_IS(int_v, char16_t)
FR_IS(int_v, char32_t)

template <class T> inline constexpr bool float_v = false;
FR_IS(float_v, half) FR_IS(float_v, bfloat) FR_IS(float_v, float) FR_IS(float_v, double)
// half and bfloat: floating-point numbers that C++ does not know.
template <class T> inline constexpr bool small_v = false;
FR_IS(small_v, half) FR_IS(small_v, bfloat)
#undef FR_IS
template <class T> inline constexpr bool scalar_v = int_v<T> || float_v<T>;

// The type of `a + b` for two scalars, but for ints of one type, which stay what they are.
template <class A, class B, bool = int_v<A>, bool = int_v<B>> struct common { using type = float; };
template <class A> struct common<A, A, true, true> { using type = A; };
template <class A> struct common<A, A, false, false> { using type = A; };
template <class A, class B> struct common<A, B, true, true> { using type = decltype(A() + B()); };
template <class A, class B> struct common<A, B, true, false> { using type = B; };
template <class A, class B> struct common<A, B, false, true> { using type = A; };
template <class B> struct common<double, B, false, false> { using type = double; };
template <class A> struct common<A, double, false, false> { using type = double; };
template <> struct common<double, double, false, false> { using type = double; };
template <class A, class B> using common_t = typename common<A, B>::type;

// ---- conversions of the 16-bit floats ---------------------------------------------------------
// Selections are written as masks: a conditional lets g++ sink the float operation into a branch,
// and a loop with a branch does not vectorise.
FR_FN constexpr uint32_t mask(bool b) { return 0u - static_cast<uint32_t>(b); }

FR_FN constexpr float half_to_float_bits(uint16_t h) {
  // Exponents from 2^97 on: then inf and NaN, which have the highest one, are inf and NaN as floats.
  uint32_t o = static_cast<uint32_t>(h & 0x7fff) << 13;
  float x = __builtin_bit_cast(float, o + 0x70000000u) * 0x1p-112f;
  // A subnormal is 2^-14 too little, once more without the 1 that its significand does not have.
  int32_t d = __builtin_bit_cast(int32_t, x - 0x1p-14f);
  x += __builtin_bit_cast(float, d < 0 ? d : 0);
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) |
                                       (static_cast<uint32_t>(h & 0x8000) << 16));
}

FR_FN constexpr uint16_t float_to_half_bits(float f) {
#if defined(FR_CHECKED)
  const float magnitude = f < 0 ? -f : f;
  if (!__builtin_is_constant_evaluated() && magnitude >= 65520.0f && magnitude <= 3.40282347e38f && fr_watch_half(f))
    f = f < 0 ? -65504.0f : 65504.0f;
#endif
  int32_t u = __builtin_bit_cast(int32_t, f);
  int32_t x = u & 0x7fffffff;
  int32_t a = x < 0x47800000 ? x : 0x47800000;
  // The sum with a power of 2 that is 2^13 times the number's (the least normal one's) rounds it.
  int32_t e = (a & 0x7f800000) > 0x38800000 ? a & 0x7f800000 : 0x38800000;
  float s = __builtin_bit_cast(float, a) + __builtin_bit_cast(float, e + (13 << 23));
  // In the upper half of a word, for g++ would do what concerns the lower one with 16 bits, which
  // takes more instructions to narrow each operand than it saves.
  uint32_t r = static_cast<uint32_t>(__builtin_bit_cast(int32_t, s) - e) << 16;
  r += (static_cast<uint32_t>(e) << 3) - (113u << 26);
  r |= (mask(x > 0x7f800000) & 0x02000000u) | (static_cast<uint32_t>(u) & 0x80000000u);
  return static_cast<uint16_t>(r >> 16);
}

FR_FN constexpr uint16_t float_to_bfloat_bits(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  uint32_t m = mask(static_cast<int32_t>(u & 0x7fffffffu) > 0x7f800000);
  uint32_t r = u + 0x7fffu + ((u >> 16) & 1u);
  r = (r & ~m) | ((u | 0x00400000u) & m);
  return static_cast<uint16_t>(r >> 16);
}

// double -> float, rounded to odd: a second rounding to fewer bits is then the right one.
FR_FN constexpr float narrow_odd(double d) {
  float f = static_cast<float>(d);
  double g = f;
  if (g == d || d != d) return f;
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  if ((g < 0 ? -g : g) > (d < 0 ? -d : d)) u -= 1;
  return __builtin_bit_cast(float, u | 1u);
}
// What a 16-bit float is made of.
template <class S> FR_FN constexpr float narrowed(S s) {
  if constexpr (is_same_v<S, double>) {
    return narrow_odd(s);
  } else {
    return static_cast<float>(s);
  }
}

}  // namespace detail

namespace core {
using namespace detail;

// ---- half and bfloat --------------------------------------------------------------------------
// One class for every compiler, so that what a kernel may write does not depend on the compiler:
// g++ 11 and clang 14 lack _Float16, g++ 13 refuses float -> _Float16, NVRTC has none.
// Templates, for a class with a copy constructor or an assignment of its own is no plain one.
#define FR_SMALL_FLOAT(This)                                                                \
  uint16_t bits;                                                                            \
  This() = default;                                                                         \
  template <class S, enable_if_t<scalar_v<S> && !is_same_v<S, This>, int> = 0>              \
  FR_FN constexpr This(S s) : bits(make(s)) {}                                              \
  template <class S, enable_if_t<is_same_v<S, This>, int> = 0>                              \
  FR_FN This(const volatile S& s) : bits(s.bits) {}                                         \
  template <class S, enable_if_t<is_same_v<S, This>, int> = 0>                              \
  FR_FN This& operator=(const volatile S& s) {                                              \
    bits = s.bits;                                                                          \
    return *this;                                                                           \
  }                                                                                         \
  template <class S, enable_if_t<is_same_v<S, This>, int> = 0>                              \
  FR_FN void operator=(const S& s) volatile {                                               \
    bits = s.bits;                                                                          \
  }                                                                                         \
  FR_FN operator float() const volatile { return This(*this); }                             \
  FR_FN constexpr operator float() const { return widen(); }                                \
  FR_FN static constexpr This from_bits(uint16_t b) {                                       \
    This h{};                                                                               \
    h.bits = b;                                                                             \
    return h;                                                                               \
  }
struct half {
  FR_SMALL_FLOAT(half)
  template <class S> FR_FN static constexpr uint16_t make(S s) {
#if FR_FLOAT16_CONVERT
    if constexpr (is_same_v<S, double>) {
      return __builtin_bit_cast(uint16_t, static_cast<_Float16>(s));
    } else {
      return __builtin_bit_cast(uint16_t, static_cast<_Float16>(static_cast<float>(s)));
    }
#else
    float f = narrowed(s);
#if FR_CUDA
    if (!__builtin_is_constant_evaluated()) return make_ptx(f);
#endif
    return float_to_half_bits(f);
#endif
  }
  FR_FN constexpr float widen() const {
#if FR_FLOAT16_CONVERT
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
#else
#if FR_CUDA
    if (!__builtin_is_constant_evaluated()) return widen_ptx();
#endif
    return half_to_float_bits(bits);
#endif
  }
#if FR_CUDA
  FR_FN static uint16_t make_ptx(float f) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
    return r;
  }
  FR_FN float widen_ptx() const {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
  }
#endif
};

struct bfloat {
  FR_SMALL_FLOAT(bfloat)
  template <class S> FR_FN static constexpr uint16_t make(S s) {
    float f = narrowed(s);
#if FR_CUDA && __CUDA_ARCH__ >= 800
    if (!__builtin_is_constant_evaluated()) return make_ptx(f);
#endif
    return float_to_bfloat_bits(f);
  }
  FR_FN constexpr float widen() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
#if FR_CUDA && __CUDA_ARCH__ >= 800
  FR_FN static uint16_t make_ptx(float f) {
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
    return r;
  }
#endif
};
#undef FR_SMALL_FLOAT
static_assert(sizeof(half) == 2 && metal::is_trivially_copyable_v<half>, "half is a plain value");
static_assert(sizeof(bfloat) == 2 && metal::is_trivially_copyable_v<bfloat>, "and so is bfloat");
}  // namespace core

#if FR_CUDA
#define FR_FMA(f) ::__fma##f##_rn
#else
#define FR_FMA(f) scalar::precise::fma
namespace scalar {
namespace precise {  // math.h
FR_FN float fma(float, float, float);
FR_FN double fma(double, double, double);
}  // namespace precise
}  // namespace scalar
#endif

namespace detail {
// a * b + c, rounded once.
FR_FN constexpr float fused(float a, float b, float c) {
  return __builtin_is_constant_evaluated() ? a * b + c : FR_FMA(f)(a, b, c);
}
FR_FN constexpr double fused(double a, double b, double c) {
  return __builtin_is_constant_evaluated() ? a * b + c : FR_FMA()(a, b, c);
}
#undef FR_FMA

// What an operation on two numbers of type T is. Ints narrower than int wrap to their width.
// The 16-bit floats round at each step. In float all four operations of two halves are exact
// enough to be rounded once more without harm (24 >= 2 * 11 + 2).
template <class T> struct num {
  FR_FN static constexpr T add(T a, T b) { return static_cast<T>(a + b); }
  FR_FN static constexpr T sub(T a, T b) { return static_cast<T>(a - b); }
  FR_FN static constexpr T mul(T a, T b) { return static_cast<T>(a * b); }
  FR_FN static constexpr T div(T a, T b) { return static_cast<T>(a / b); }
  FR_FN static constexpr T neg(T a) { return static_cast<T>(-a); }
};
// a * b + c; compilers are told to fuse nothing (include/arithmetic.h).
template <class T> FR_FN constexpr T mad(T a, T b, T c) {
  if constexpr (is_same_v<T, float> || is_same_v<T, double>) {
    return fused(a, b, c);
  } else {
    return num<T>::add(num<T>::mul(a, b), c);
  }
}
template <class T> struct num_small {
  FR_FN static constexpr T add(T a, T b) { return T(float(a) + float(b)); }
  FR_FN static constexpr T sub(T a, T b) { return T(float(a) - float(b)); }
  FR_FN static constexpr T mul(T a, T b) { return T(float(a) * float(b)); }
  FR_FN static constexpr T div(T a, T b) { return T(float(a) / float(b)); }
  FR_FN static constexpr T neg(T a) { return T::from_bits(static_cast<uint16_t>(a.bits ^ 0x8000)); }
};
#if FR_FLOAT16
// A product must not melt into an FMA with the sum that follows, whatever g++'s flags say; it is
// one itself. clang contracts across statements only if told -ffp-contract=fast: do not.
#if !defined(__clang__) && \
    (defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_SCALAR_ARITHMETIC))
#define FR_HALF_PRODUCT(x, y) __builtin_fmaf16(x, y, static_cast<_Float16>(-0.0f))
#else
#define FR_HALF_PRODUCT(x, y) static_cast<_Float16>((x) * (y))
#endif
#define FR_HALF_OP(name, E)                                                      \
  FR_FN static constexpr half name(half a, half b) {                             \
    _Float16 x = __builtin_bit_cast(_Float16, a.bits);                           \
    _Float16 y = __builtin_bit_cast(_Float16, b.bits);                           \
    return half::from_bits(__builtin_bit_cast(uint16_t, static_cast<_Float16>(E))); \
  }
template <> struct num<half> : num_small<half> {
  FR_HALF_OP(add, x + y)
  FR_HALF_OP(sub, x - y)
  FR_HALF_OP(mul, FR_HALF_PRODUCT(x, y))
  FR_HALF_OP(div, x / y)
};
#undef FR_HALF_OP
#undef FR_HALF_PRODUCT
template <> struct num<bfloat> : num_small<bfloat> {};
#elif FR_CUDA
// `.rn` keeps the assembler from fusing a product and a sum into one rounding.
#define FR_PTX_OP(type, name, ptx)                                        \
  FR_FN static type name##_ptx(type a, type b) {                          \
    uint16_t r;                                                           \
    asm(ptx " %0, %1, %2;" : "=h"(r) : "h"(a.bits), "h"(b.bits));         \
    return type::from_bits(r);                                            \
  }                                                                       \
  FR_FN static constexpr type name(type a, type b) {                      \
    if (!__builtin_is_constant_evaluated()) return name##_ptx(a, b);      \
    return num_small<type>::name(a, b);                                   \
  }
template <> struct num<half> : num_small<half> {
  FR_PTX_OP(half, add, "add.rn.f16") FR_PTX_OP(half, sub, "sub.rn.f16")
  FR_PTX_OP(half, mul, "mul.rn.f16")
};
template <> struct num<bfloat> : num_small<bfloat> {
#if __CUDA_ARCH__ >= 900
  FR_PTX_OP(bfloat, add, "add.rn.bf16") FR_PTX_OP(bfloat, sub, "sub.rn.bf16")
  FR_PTX_OP(bfloat, mul, "mul.rn.bf16")
#endif
};
#undef FR_PTX_OP
#else
template <> struct num<half> : num_small<half> {};
template <> struct num<bfloat> : num_small<bfloat> {};
#endif

// ---- vectors ----------------------------------------------------------------------------------
// How many components a type has (0: neither scalar nor vector), and of what type.
template <class T> inline constexpr int width_v = scalar_v<T> ? 1 : 0;
template <class T, int N> inline constexpr int width_v<vec<T, N>> = N;
template <class T, int N> inline constexpr int width_v<packed_vec<T, N>> = N;
template <class T> struct element { using type = T; };
template <class T, int N> struct element<vec<T, N>> { using type = T; };
template <class T, int N> struct element<packed_vec<T, N>> { using type = T; };
template <class T> using element_t = typename element<T>::type;
template <class T, int N> struct shape { using type = vec<T, N>; };
template <class T> struct shape<T, 1> { using type = T; };
template <class T> struct shape<T, 0> {};
template <class T, int N> using shape_t = typename shape<T, N>::type;  // T, or vec<T, N>
template <class A> using value_t = shape_t<element_t<A>, width_v<A>>;  // not packed
template <class A> using if_number = enable_if_t<(width_v<A> > 1 || small_v<A>), int>;

// Component K; a scalar has its value everywhere.
template <int K, class A> FR_FN constexpr auto comp(const A& a) {
  if constexpr (width_v<A> < 2) {
    return a;
  } else if constexpr (width_v<A> > 4) {
    return a[K];
  } else if constexpr (K == 0) {
    return a.x;
  } else if constexpr (K == 1) {
    return a.y;
  } else if constexpr (K == 2) {
    return a.z;
  } else {
    return a.w;
  }
}
template <bool B> using if_t = enable_if_t<B, int>;
// Component K of the arguments laid side by side.
template <int K, class A, class... B> FR_FN constexpr auto piece(const A& a, const B&... b) {
  if constexpr (K < width_v<A>) {
    return comp<K>(a);
  } else {
    return piece<K - width_v<A>>(b...);
  }
}
}  // namespace detail

template <int... I> struct ix {};
// `.lo .hi .even .odd`: every other, or half of the elements; of three, the fourth does not exist.
struct lo_ix {};
struct hi_ix {};
struct even_ix {};
struct odd_ix {};
template <int FIRST, int STEP, bool TWO> struct half_ix { using type = ix<FIRST>; };
template <int FIRST, int STEP> struct half_ix<FIRST, STEP, true> { using type = ix<FIRST, FIRST + STEP>; };
template <int N, int FIRST, int STEP>
using half_ix_t = typename half_ix<FIRST, STEP, (FIRST + STEP < N) && (N > 2)>::type;

namespace core {

#define FR_VEC_SHARED(N, This)                                                                  \
  FR_FN constexpr T& operator[](int i) { return FR_VEC_INDEX(T, N); }                           \
  FR_FN constexpr const T& operator[](int i) const { return FR_VEC_INDEX(const T, N); }         \
  template <int... I> FR_FN constexpr shape_t<T, sizeof...(I)> swz(ix<I...>) const {            \
    return shape_t<T, sizeof...(I)>(comp<I>(*this)...);                                           \
  }                                                                                             \
  template <int... I> FR_FN constexpr swizzle<This, I...> swr(ix<I...>) { return {*this}; }   \
  FR_FN constexpr auto swz(lo_ix) const { return swz(half_ix_t<N, 0, 1>()); }                  \
  FR_FN constexpr auto swz(hi_ix) const { return swz(half_ix_t<N, (N + 1) / 2, 1>()); }        \
  FR_FN constexpr auto swz(even_ix) const { return swz(half_ix_t<N, 0, 2>()); }                \
  FR_FN constexpr auto swz(odd_ix) const { return swz(half_ix_t<N, 1, 2>()); }                 \
  FR_FN constexpr auto swr(lo_ix) { return swr(half_ix_t<N, 0, 1>()); }                        \
  FR_FN constexpr auto swr(hi_ix) { return swr(half_ix_t<N, (N + 1) / 2, 1>()); }              \
  FR_FN constexpr auto swr(even_ix) { return swr(half_ix_t<N, 0, 2>()); }                      \
  FR_FN constexpr auto swr(odd_ix) { return swr(half_ix_t<N, 1, 2>()); }
#define FR_VEC_INDEX_2(T) (i == 0 ? x : y)
#define FR_VEC_INDEX_3(T) (i == 0 ? x : i == 1 ? y : z)
#define FR_VEC_INDEX_4(T) (i == 0 ? x : i == 1 ? y : i == 2 ? z : w)
// Pointer arithmetic is no constant expression, and a chain of selections is slow: both forms.
#define FR_VEC_INDEX(T, N) \
  __builtin_is_constant_evaluated() ? FR_VEC_INDEX_##N(T) : reinterpret_cast<T*>(this)[i]

#define FR_VEC_INIT_2(K) x(static_cast<T>(K(0))), y(static_cast<T>(K(1)))
#define FR_VEC_INIT_3(K) FR_VEC_INIT_2(K), z(static_cast<T>(K(2)))
#define FR_VEC_INIT_4(K) FR_VEC_INIT_3(K), w(static_cast<T>(K(3)))
#define FR_VEC_SAME(k) s
#define FR_VEC_AT(k) comp<k>(v)
#define FR_VEC_PIECE(k) piece<k>(a...)
#define FR_VEC_BODY(N, This, Other)                                                             \
  This() = default;                                                                             \
  template <class S, if_t<scalar_v<S>> = 0>                                                     \
  FR_FN constexpr This(S s) : FR_VEC_INIT_##N(FR_VEC_SAME) {}                                   \
  FR_FN constexpr This(const Other<T, N>& v) : FR_VEC_INIT_##N(FR_VEC_AT) {}                    \
  template <class V, if_t<width_v<V> == N && !is_same_v<element_t<V>, T>> = 0>                  \
  FR_FN explicit constexpr This(const V& v) : FR_VEC_INIT_##N(FR_VEC_AT) {}                     \
  template <class... A, if_t<(sizeof...(A) > 1) && (width_v<A> + ... + 0) == N> = 0>            \
  FR_FN constexpr This(A... a) : FR_VEC_INIT_##N(FR_VEC_PIECE) {}                               \
  FR_VEC_SHARED(N, This)

template <class T> struct FR_ALIGN(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  FR_VEC_BODY(2, vec, packed_vec)
};
#if FR_CUDA
template <class T> struct FR_ALIGN(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  FR_VEC_BODY(3, vec, packed_vec)
};
#else
template <class T> struct vec<T, 3> {
  T x, y, z;
  // Padding without a member: it is neither initialised nor has it to be copied.
  typename metal::int_of_size<sizeof(T), false>::type : 8 * sizeof(T);
  FR_VEC_BODY(3, vec, packed_vec)
};
#endif
template <class T> struct FR_ALIGN(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  FR_VEC_BODY(4, vec, packed_vec)
};
#define FR_PACKED(N, ...)                      \
  template <class T> struct packed_vec<T, N> { \
    T __VA_ARGS__;                             \
    FR_VEC_BODY(N, packed_vec, vec)            \
  };
FR_PACKED(2, x, y)
FR_PACKED(3, x, y, z)
FR_PACKED(4, x, y, z, w)
// Wider ones have no names for their components, and no swizzles.
#define FR_WIDE_VEC(N)                                                                          \
  template <class T> struct FR_ALIGN(N * sizeof(T)) vec<T, N> {                                 \
    T fr_at[N];                                                                                 \
    vec() = default;                                                                            \
    template <class S, if_t<scalar_v<S>> = 0> FR_FN constexpr vec(S s) : fr_at{} {              \
      for (int i = 0; i < N; ++i) fr_at[i] = static_cast<T>(s);                                 \
    }                                                                                           \
    template <class V, if_t<width_v<V> == N && !is_same_v<element_t<V>, T>> = 0>                \
    FR_FN explicit constexpr vec(const V& v) : fr_at{} {                                        \
      for (int i = 0; i < N; ++i) fr_at[i] = static_cast<T>(v[i]);                              \
    }                                                                                           \
    template <class... A, if_t<(sizeof...(A) > 1) && (width_v<A> + ... + 0) == N> = 0>          \
    FR_FN constexpr vec(A... a) : fr_at{} {                                                     \
      int i = 0;                                                                                \
      (put(i, a), ...);                                                                         \
    }                                                                                           \
    FR_FN constexpr T& operator[](int i) { return fr_at[i]; }                                   \
    FR_FN constexpr const T& operator[](int i) const { return fr_at[i]; }                       \
                                                                                                \
   private:                                                                                     \
    template <class A> FR_FN constexpr void put(int& i, const A& a) {                           \
      if constexpr (width_v<A> == 1) {                                                          \
        fr_at[i++] = static_cast<T>(a);                                                         \
      } else {                                                                                  \
        for (int k = 0; k < width_v<A>; ++k) fr_at[i++] = static_cast<T>(a[k]);                 \
      }                                                                                         \
    }                                                                                           \
  };
FR_WIDE_VEC(8)
FR_WIDE_VEC(16)
static_assert(sizeof(vec<float, 3>) == 16 && sizeof(vec<half, 3>) == 8 && sizeof(vec<bool, 3>) == 4 &&
                  sizeof(vec<int64_t, 3>) == 32 && sizeof(packed_vec<float, 3>) == 12,
              "a vector of three takes the room of four");

}  // namespace core

namespace detail {
// ---- operators --------------------------------------------------------------------------------
// Component i; a scalar has its value everywhere.
template <class A> FR_FN constexpr auto component(const A& a, int i) {
  if constexpr (width_v<A> < 2) {
    return a;
  } else {
    return a[i];
  }
}
// F::call on each component, each converted to T first; R is the result, a scalar or a vector.
template <class R, class T, class F, class... A> FR_FN constexpr R lift(const A&... a) {
  if constexpr (width_v<R> > 4) {
    R r(element_t<R>(0));
    for (int i = 0; i < width_v<R>; ++i) r[i] = F::call(static_cast<T>(component(a, i))...);
    return r;
  } else if constexpr (width_v<R> == 1) {
    return F::call(static_cast<T>(comp<0>(a))...);
  } else if constexpr (width_v<R> == 2) {
    return R(F::call(static_cast<T>(comp<0>(a))...), F::call(static_cast<T>(comp<1>(a))...));
  } else if constexpr (width_v<R> == 3) {
    return R(F::call(static_cast<T>(comp<0>(a))...), F::call(static_cast<T>(comp<1>(a))...),
             F::call(static_cast<T>(comp<2>(a))...));
  } else {
    return R(F::call(static_cast<T>(comp<0>(a))...), F::call(static_cast<T>(comp<1>(a))...),
             F::call(static_cast<T>(comp<2>(a))...), F::call(static_cast<T>(comp<3>(a))...));
  }
}

// The type of `a + b`: of two vectors of one type that type, of a vector and a scalar the vector
// (no int vector takes a float), of half or bfloat with itself or an int that type. Every other
// pair of scalars is left to C++, which converts half and bfloat to float.
template <class A, class B> FR_FN constexpr int sum_width() {
  constexpr int n = width_v<A>, m = width_v<B>;
  using S = element_t<A>;
  using T = element_t<B>;
  if constexpr (n == 0 || m == 0) {
    return 0;
  } else if constexpr (n > 1 && m > 1) {
    return n == m && is_same_v<S, T> ? n : 0;
  } else if constexpr (n > 1) {
    return float_v<T> && int_v<S> ? 0 : n;
  } else if constexpr (m > 1) {
    return float_v<S> && int_v<T> ? 0 : m;
  } else {
    return small_v<common_t<S, T>> ? 1 : 0;
  }
}
template <class A, class B, int N = sum_width<A, B>()> struct sum {
  using type = shape_t<element_t<metal::conditional_t<(width_v<A> > 1), A, B>>, N>;
};
template <class A, class B> struct sum<A, B, 1> { using type = common_t<A, B>; };
template <class A, class B> struct sum<A, B, 0> {};
template <class A, class B> using sum_t = typename sum<A, B>::type;
// The same, where at least one is a vector, or (bits) a vector of ints.
template <class A, class B, int N = sum_width<A, B>()>
using vec_sum_t = enable_if_t<(N > 1), sum_t<A, B>>;
// Of && and ||: of vectors of any two types the truth.
template <class T> using bools_t = shape_t<bool, width_v<T>>;
template <class A, class B> using vec_bool_t = vec_sum_t<bools_t<A>, bools_t<B>>;
template <class A, class B, class R = vec_sum_t<A, B>>
using int_sum_t = enable_if_t<int_v<element_t<R>>, R>;

// The count of a shift: Metal takes it modulo the number of bits (specification, 3.1).
template <class T, class B> FR_FN constexpr unsigned shift_count(B b) {
#if defined(FR_CHECKED)
  if (!__builtin_is_constant_evaluated() && (b < B(0) || static_cast<uint64_t>(b) >= sizeof(T) * 8))
    fr_watch_shift(sizeof(T) * 8, static_cast<int64_t>(b));
#endif
  return static_cast<unsigned>(b) & (sizeof(T) * 8 - 1);
}

}  // namespace detail

namespace core {
#define FR_BINARY(op, name, Rule, E)                                                         \
  struct op_##name {                                                                         \
    template <class T> FR_FN static constexpr auto call(T a, T b) { return E; }              \
  };                                                                                         \
  template <class A, class B, class R = Rule<A, B>>                                          \
  FR_FN constexpr R operator op(const A& a, const B& b) {                                    \
    return lift<R, element_t<R>, op_##name>(a, b);                                           \
  }                                                                                          \
  template <class A, class B, class R = Rule<A, B>,                                          \
            if_t<(width_v<A> > 1 || small_v<A> || small_v<B>)> = 0>                          \
  FR_FN constexpr A& operator op##=(A& a, const B& b) {                                      \
    return a = A(lift<R, element_t<R>, op_##name>(a, b));                                    \
  }
FR_BINARY(+, add, sum_t, num<T>::add(a, b))
FR_BINARY(-, sub, sum_t, num<T>::sub(a, b))
FR_BINARY(*, mul, sum_t, num<T>::mul(a, b))
FR_BINARY(/, div, sum_t, num<T>::div(a, b))
FR_BINARY(%, mod, int_sum_t, static_cast<T>(a % b))
FR_BINARY(&, and, int_sum_t, static_cast<T>(a & b))
FR_BINARY(|, or, int_sum_t, static_cast<T>(a | b))
FR_BINARY(^, xor, int_sum_t, static_cast<T>(a ^ b))
FR_BINARY(<<, shl, int_sum_t, static_cast<T>(a << shift_count<T>(b)))
FR_BINARY(>>, shr, int_sum_t, static_cast<T>(a >> shift_count<T>(b)))
#undef FR_BINARY

// half += float: the sum in float, rounded once.
#define FR_SMALL_ASSIGN(op)                                                                       \
  template <class A, class B,                                                                     \
            if_t<small_v<A> && float_v<B> && !is_same_v<A, B>> = 0>                               \
  FR_FN constexpr A& operator op##=(A& a, const B& b) {                                           \
    using C = common_t<A, B>;                                                                     \
    return a = A(static_cast<C>(a) op static_cast<C>(b));                                         \
  }
FR_SMALL_ASSIGN(+) FR_SMALL_ASSIGN(-) FR_SMALL_ASSIGN(*) FR_SMALL_ASSIGN(/)
#undef FR_SMALL_ASSIGN

#define FR_COMPARE(op, name, Rule)                                                             \
  struct op_##name {                                                                           \
    template <class T> FR_FN static constexpr bool call(T a, T b) { return a op b; }           \
  };                                                                                           \
  template <class A, class B, class R = Rule<A, B>>                                            \
  FR_FN constexpr vec<bool, width_v<R>> operator op(const A& a, const B& b) {                  \
    return lift<vec<bool, width_v<R>>, element_t<R>, op_##name>(a, b);                         \
  }
FR_COMPARE(==, eq, vec_sum_t) FR_COMPARE(!=, ne, vec_sum_t)
FR_COMPARE(<, lt, vec_sum_t) FR_COMPARE(>, gt, vec_sum_t)
FR_COMPARE(<=, le, vec_sum_t) FR_COMPARE(>=, ge, vec_sum_t)
FR_COMPARE(&&, land, vec_bool_t) FR_COMPARE(||, lor, vec_bool_t)
#undef FR_COMPARE

struct op_neg {
  template <class T> FR_FN static constexpr T call(T a) { return num<T>::neg(a); }
};
struct op_not {
  template <class T> FR_FN static constexpr bool call(T a) { return !a; }
};
struct op_flip {
  template <class T> FR_FN static constexpr T call(T a) { return static_cast<T>(~a); }
};
template <class A, if_number<A> = 0> FR_FN constexpr value_t<A> operator-(const A& a) {
  return lift<value_t<A>, element_t<A>, op_neg>(a);
}
template <class A, if_number<A> = 0> FR_FN constexpr value_t<A> operator+(const A& a) { return a; }
template <class A, if_t<(width_v<A> > 1)> = 0>
FR_FN constexpr vec<bool, width_v<A>> operator!(const A& a) {
  return lift<vec<bool, width_v<A>>, element_t<A>, op_not>(a);
}
template <class A, if_t<(width_v<A> > 1) && int_v<element_t<A>>> = 0>
FR_FN constexpr value_t<A> operator~(const A& a) {
  return lift<value_t<A>, element_t<A>, op_flip>(a);
}
template <class A, if_number<A> = 0> FR_FN constexpr A& operator++(A& a) {
  return a = A(a + element_t<A>(1));
}
template <class A, if_number<A> = 0> FR_FN constexpr A& operator--(A& a) {
  return a = A(a - element_t<A>(1));
}
template <class A, if_number<A> = 0> FR_FN constexpr A operator++(A& a, int) {
  A old = a;
  ++a;
  return old;
}
template <class A, if_number<A> = 0> FR_FN constexpr A operator--(A& a, int) {
  A old = a;
  --a;
  return old;
}

// `v.xy` on the left of an assignment.
template <class V, int... I> struct swizzle {
  V& v;
  using value = shape_t<element_t<V>, sizeof...(I)>;
  FR_FN constexpr operator value() const { return value(comp<I>(v)...); }
  FR_FN constexpr const swizzle& set(value r) const {  // a copy: r may be v itself
    int k = 0;
    if constexpr (sizeof...(I) == 1) {
      ((v[I] = r), ...);
    } else {
      ((v[I] = r[k++]), ...);
    }
    return *this;
  }
  FR_FN constexpr const swizzle& operator=(const value& r) const { return set(r); }
  FR_FN constexpr const swizzle& operator=(const swizzle& r) const { return set(value(r)); }
#define FR_ASSIGN(op)                                                            \
  template <class B> FR_FN constexpr const swizzle& operator op##=(const B& b) const { \
    return set(value(value(*this) op b));                                        \
  }
  FR_ASSIGN(+) FR_ASSIGN(-) FR_ASSIGN(*) FR_ASSIGN(/) FR_ASSIGN(%) FR_ASSIGN(&) FR_ASSIGN(|)
  FR_ASSIGN(^) FR_ASSIGN(<<) FR_ASSIGN(>>)
#undef FR_ASSIGN
};

#define FR_ALIASES(name, T)                                                                    \
  using name##2 = vec<T, 2>;                                                                   \
  using name##3 = vec<T, 3>;                                                                   \
  using name##4 = vec<T, 4>;                                                                   \
  using packed_##name##2 = packed_vec<T, 2>;                                                   \
  using packed_##name##3 = packed_vec<T, 3>;                                                   \
  using packed_##name##4 = packed_vec<T, 4>;
FR_ALIASES(bool, bool) FR_ALIASES(char, char) FR_ALIASES(uchar, uchar) FR_ALIASES(short, short)
FR_ALIASES(ushort, ushort) FR_ALIASES(int, int) FR_ALIASES(uint, uint) FR_ALIASES(long, int64_t)
FR_ALIASES(ulong, ulong) FR_ALIASES(half, half) FR_ALIASES(bfloat, bfloat)
FR_ALIASES(float, float) FR_ALIASES(double, double)
#undef FR_ALIASES
using bfloat16_t = bfloat;
using float16_t = half;

// ---- matrices: C columns of R rows ------------------------------------------------------------
template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  template <class S, if_t<scalar_v<S>> = 0> FR_FN explicit constexpr matrix(S s) : columns{} {
    for (int i = 0; i < C && i < R; ++i) columns[i][i] = static_cast<T>(s);
  }
  template <class... A, if_t<sizeof...(A) == C && ((width_v<A> == R) && ...)> = 0>
  FR_FN constexpr matrix(const A&... a) : columns{vec<T, R>(a)...} {}
  template <class... A, if_t<sizeof...(A) == C * R && ((width_v<A> == 1) && ...)> = 0>
  FR_FN constexpr matrix(A... a) : columns{} {
    const T all[C * R] = {static_cast<T>(a)...};
    for (int i = 0; i < C * R; ++i) columns[i / R][i % R] = all[i];
  }
  template <class U, if_t<!is_same_v<T, U>> = 0>
  FR_FN explicit constexpr matrix(const matrix<U, C, R>& m) : columns{} {
    for (int i = 0; i < C; ++i) columns[i] = vec<T, R>(m.columns[i]);
  }
  FR_FN constexpr vec<T, R>& operator[](int i) { return columns[i]; }
  FR_FN constexpr const vec<T, R>& operator[](int i) const { return columns[i]; }
};

#define FR_MATRIX_SUM(op)                                                          \
  template <class T, int C, int R>                                                 \
  FR_FN constexpr matrix<T, C, R> operator op(matrix<T, C, R> a, const matrix<T, C, R>& b) { \
    for (int i = 0; i < C; ++i) a.columns[i] op##= b.columns[i];                   \
    return a;                                                                      \
  }                                                                                \
  template <class T, int C, int R>                                                 \
  FR_FN constexpr matrix<T, C, R>& operator op##=(matrix<T, C, R>& a, const matrix<T, C, R>& b) { \
    return a = a op b;                                                             \
  }
FR_MATRIX_SUM(+) FR_MATRIX_SUM(-)
#undef FR_MATRIX_SUM
template <class T, int C, int R> FR_FN constexpr matrix<T, C, R> operator-(matrix<T, C, R> a) {
  for (int i = 0; i < C; ++i) a.columns[i] = -a.columns[i];
  return a;
}
template <class T, int C, int R, class S, if_t<scalar_v<S>> = 0>
FR_FN constexpr matrix<T, C, R> operator*(matrix<T, C, R> a, S s) {
  for (int i = 0; i < C; ++i) a.columns[i] *= s;
  return a;
}
template <class T, int C, int R, class S, if_t<scalar_v<S>> = 0>
FR_FN constexpr matrix<T, C, R> operator*(S s, const matrix<T, C, R>& a) {
  return a * s;
}
template <class T, int C, int R, class S, if_t<scalar_v<S>> = 0>
FR_FN constexpr matrix<T, C, R>& operator*=(matrix<T, C, R>& a, S s) {
  return a = a * s;
}
template <class T, int C, int R>
FR_FN constexpr vec<T, R> operator*(const matrix<T, C, R>& a, const vec<T, C>& v) {
  vec<T, R> r = a.columns[0] * v[0];
  for (int i = 1; i < C; ++i) {
    for (int j = 0; j < R; ++j) r[j] = mad(a.columns[i][j], v[i], r[j]);
  }
  return r;
}
template <class T, int C, int R>
FR_FN constexpr vec<T, C> operator*(const vec<T, R>& v, const matrix<T, C, R>& a) {
  vec<T, C> r{};
  for (int i = 0; i < C; ++i) {
    T s = num<T>::mul(v[0], a.columns[i][0]);
    for (int j = 1; j < R; ++j) s = mad(v[j], a.columns[i][j], s);
    r[i] = s;
  }
  return r;
}
template <class T, int K, int R, int C>
FR_FN constexpr matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> r{};
  for (int i = 0; i < C; ++i) r.columns[i] = a * b.columns[i];
  return r;
}
template <class T, int N>
FR_FN constexpr matrix<T, N, N>& operator*=(matrix<T, N, N>& a, const matrix<T, N, N>& b) {
  return a = a * b;
}
template <class T, int C, int R>
FR_FN constexpr bool operator==(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j < R; ++j) {
      if (!(a.columns[i][j] == b.columns[i][j])) return false;
    }
  }
  return true;
}
template <class T, int C, int R>
FR_FN constexpr bool operator!=(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  return !(a == b);
}
#define FR_ALIASES(T)                                                                    \
  using T##2x2 = matrix<T, 2, 2>;                                                        \
  using T##2x3 = matrix<T, 2, 3>;                                                        \
  using T##2x4 = matrix<T, 2, 4>;                                                        \
  using T##3x2 = matrix<T, 3, 2>;                                                        \
  using T##3x3 = matrix<T, 3, 3>;                                                        \
  using T##3x4 = matrix<T, 3, 4>;                                                        \
  using T##4x2 = matrix<T, 4, 2>;                                                        \
  using T##4x3 = matrix<T, 4, 3>;                                                        \
  using T##4x4 = matrix<T, 4, 4>;
FR_ALIASES(float) FR_ALIASES(half)
#undef FR_ALIASES
}  // namespace core

// `1.5h` and `0.5bf`.
FR_FN constexpr half half_lit(double d) {
  return half::from_bits(detail::float_to_half_bits(detail::narrow_odd(d)));
}
FR_FN constexpr bfloat bfloat_lit(double d) {
  return bfloat::from_bits(detail::float_to_bfloat_bits(detail::narrow_odd(d)));
}

// ---- `c ? a : b` with types that C++ does not reconcile ---------------------------------------
namespace detail {
template <class T> struct decay { using type = metal::remove_cv_t<T>; };
template <class T> struct decay<T[]> { using type = T*; };
template <class T, size_t N> struct decay<T[N]> { using type = T*; };
template <class T> using decay_t = typename decay<metal::remove_reference_t<T>>::type;

// The type that both sides become, as a type_identity; void where C++ manages by itself.
// mlx.h adds complex numbers.
template <class A, class B> FR_FN constexpr auto pick_type() {
  constexpr int n = width_v<A>, m = width_v<B>;
  if constexpr (is_same_v<A, B>) {
    return;
  } else if constexpr (n == 1 && m == 1) {
    if constexpr (small_v<A> || small_v<B>) return metal::type_identity<common_t<A, B>>();
  } else if constexpr (n > 0 && m > 0) {
    return metal::type_identity<value_t<metal::conditional_t<(n > 1), A, B>>>();
  } else if constexpr (metal::is_pointer_v<A> && int_v<B>) {
    return metal::type_identity<A>();
  } else if constexpr (metal::is_pointer_v<B> && int_v<A>) {
    return metal::type_identity<B>();
  }
}
template <class A, class B> struct picked { using type = decltype(pick_type<A, B>()); };
}  // namespace detail

template <class A, class B, class X,
          class R = typename detail::picked<detail::decay_t<A>, detail::decay_t<B>>::type>
FR_FN constexpr decltype(auto) pick(X&& x) {
  if constexpr (!metal::is_void_v<R>) {
    using T = typename R::type;
    if constexpr (metal::is_pointer_v<T> && detail::int_v<detail::decay_t<X>>) {
      return static_cast<T>(nullptr);
    } else {
      return static_cast<T>(x);
    }
  } else if constexpr (detail::small_v<detail::decay_t<X>> &&
                       metal::is_const_v<metal::remove_reference_t<X>>) {
    return detail::decay_t<X>(x);  // a choice of values vectorises, one of addresses does not
  } else if constexpr (metal::is_lvalue_reference_v<X>) {
    return static_cast<X>(x);
  } else {
    return metal::remove_reference_t<X>(static_cast<X&&>(x));
  }
}

namespace metal {
using namespace core;

// ---- traits of numbers ------------------------------------------------------------------------
template <class T> inline constexpr bool is_integral_v = int_v<remove_cv_t<T>>;
template <class T> inline constexpr bool is_floating_point_v = float_v<remove_cv_t<T>>;
template <class T> inline constexpr bool is_arithmetic_v = scalar_v<remove_cv_t<T>>;
template <class T> inline constexpr bool is_scalar_v =
    is_arithmetic_v<T> || is_pointer_v<T> || is_enum_v<T>;
template <class T> inline constexpr bool is_vector_v = (width_v<remove_cv_t<T>> > 1);
template <class T, bool = is_integral_v<T>> inline constexpr bool is_unsigned_v = false;
template <class T> inline constexpr bool is_unsigned_v<T, true> =
    (static_cast<remove_cv_t<T>>(-1) > static_cast<remove_cv_t<T>>(0));
template <class T> inline constexpr bool is_signed_v = is_arithmetic_v<T> && !is_unsigned_v<T>;

template <class T> FR_DECL T&& declval() noexcept;
template <class To> FR_DECL void convert_probe(To) noexcept;
template <class F, class T, class = void> inline constexpr bool is_convertible_v = false;
template <class F, class T>
inline constexpr bool
    is_convertible_v<F, T, void_t<decltype(convert_probe<T>(declval<F>()))>> = true;
template <> inline constexpr bool is_convertible_v<void, void, void> = true;

#define FR_TRAIT(name) \
  template <class T> struct name : bool_constant<name##_v<T>> {};
FR_TRAIT(is_void) FR_TRAIT(is_const) FR_TRAIT(is_volatile) FR_TRAIT(is_pointer) FR_TRAIT(is_array)
FR_TRAIT(is_reference) FR_TRAIT(is_enum) FR_TRAIT(is_class) FR_TRAIT(is_union)
FR_TRAIT(is_trivially_copyable) FR_TRAIT(is_integral) FR_TRAIT(is_floating_point)
FR_TRAIT(is_arithmetic) FR_TRAIT(is_scalar) FR_TRAIT(is_unsigned) FR_TRAIT(is_signed)
#undef FR_TRAIT
template <class F, class T> struct is_convertible : bool_constant<is_convertible_v<F, T>> {};
template <class A, class B> struct is_base_of : bool_constant<is_base_of_v<A, B>> {};
template <class T> struct decay { using type = detail::decay_t<T>; };

template <class T, bool S> struct with_sign : int_of_size<sizeof(T), S> {};
template <bool S> struct with_sign<long, S> { using type = conditional_t<S, long, unsigned long>; };
template <bool S> struct with_sign<unsigned long, S> : with_sign<long, S> {};
template <bool S> struct with_sign<long long, S> {
  using type = conditional_t<S, long long, unsigned long long>;
};
template <bool S> struct with_sign<unsigned long long, S> : with_sign<long long, S> {};
template <class T, int N, bool S> struct with_sign<vec<T, N>, S> {
  using type = vec<typename with_sign<T, S>::type, N>;
};
template <class T> struct make_unsigned : with_sign<T, false> {};
template <class T> struct make_signed : with_sign<T, true> {};
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> using make_signed_t = typename make_signed<T>::type;

// ---- limits -----------------------------------------------------------------------------------
template <class T, bool = is_integral_v<T>> struct numeric_limits {
  static constexpr bool is_specialized = false;
};
template <class T> struct int_traits {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false, is_iec559 = false;
  static constexpr int radix = 2;
};
template <class T> struct numeric_limits<T, true> : int_traits<T> {
  static constexpr bool is_signed = !is_unsigned_v<T>;
  static constexpr int digits = is_same_v<T, bool> ? 1 : int(sizeof(T)) * 8 - is_signed;
  static constexpr int digits10 = digits * 30103 / 100000;
  FR_FN static constexpr T max() {
    using U = typename int_of_size<sizeof(T), false>::type;
    return is_same_v<T, bool> ? T(1) : T(U(~U(0)) >> (is_signed ? 1 : 0));
  }
  FR_FN static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  FR_FN static constexpr T lowest() { return min(); }
  FR_FN static constexpr T epsilon() { return T(0); }
  FR_FN static constexpr T infinity() { return T(0); }
  FR_FN static constexpr T quiet_NaN() { return T(0); }
};
template <class T, class Bits, int Digits, int Exp, bool> struct float_limits {
  static constexpr bool is_specialized = true, is_integer = false, is_exact = false;
  static constexpr bool is_signed = true, has_infinity = true, has_quiet_NaN = true;
  static constexpr bool has_signaling_NaN = true, is_iec559 = true;
  static constexpr int radix = 2, digits = Digits, max_exponent = Exp, min_exponent = 3 - Exp;
  static constexpr int digits10 = (Digits - 1) * 30103 / 100000;
  static constexpr int max_digits10 = Digits * 30103 / 100000 + 2;
  static constexpr int max_exponent10 = Exp * 30103 / 100000;
  static constexpr int min_exponent10 = (2 - Exp) * 30103 / 100000;
  static constexpr Bits hidden = Bits(1) << (Digits - 1);           // the lowest exponent bit
  static constexpr Bits inf = (Bits(2 * Exp) - 1) * hidden;
  FR_FN static constexpr T of(Bits b) { return __builtin_bit_cast(T, b); }
  FR_FN static constexpr T infinity() { return of(inf); }
  FR_FN static constexpr T max() { return of(inf - 1); }
  FR_FN static constexpr T lowest() {
    return of(static_cast<Bits>((inf - 1) | (Bits(1) << (sizeof(T) * 8 - 1))));
  }
  FR_FN static constexpr T min() { return of(hidden); }
  FR_FN static constexpr T denorm_min() { return of(1); }
  FR_FN static constexpr T epsilon() { return of(Bits(Exp - Digits) * hidden); }
  FR_FN static constexpr T round_error() { return of(Bits(Exp - 2) * hidden); }
  FR_FN static constexpr T quiet_NaN() { return of(inf | (hidden >> 1)); }
  FR_FN static constexpr T signaling_NaN() { return of(inf | (hidden >> 2)); }
};
// Partial, so that nothing is instantiated (and written into PTX) before it is asked for.
template <bool I> struct numeric_limits<float, I> : float_limits<float, uint32_t, 24, 128, I> {};
template <bool I> struct numeric_limits<double, I> : float_limits<double, uint64_t, 53, 1024, I> {};
template <bool I> struct numeric_limits<half, I> : float_limits<half, uint16_t, 11, 16, I> {};
template <bool I> struct numeric_limits<bfloat, I> : float_limits<bfloat, uint16_t, 8, 128, I> {};
template <class T> struct numeric_limits<const T, false> : numeric_limits<T> {};
template <class T> struct numeric_limits<const T, true> : numeric_limits<T> {};

// ---- as_type ----------------------------------------------------------------------------------
// The bits of a value as another type of the same size. Vectors of equal element size go by
// component, since the padding of three has no value.
template <class To, class From> FR_FN constexpr To as_type(const From& v) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the two types must have the same size");
  using T = element_t<To>;
  using F = element_t<From>;
  if constexpr (width_v<To> == 3 && width_v<From> == 3 && sizeof(T) == sizeof(F)) {
    return To(__builtin_bit_cast(T, v.x), __builtin_bit_cast(T, v.y), __builtin_bit_cast(T, v.z));
  } else {
    return __builtin_bit_cast(To, v);
  }
}

template <class T, size_t N> struct array {
  T elements[N ? N : 1];
  FR_FN constexpr T& operator[](size_t i) { return elements[i]; }
  FR_FN constexpr const T& operator[](size_t i) const { return elements[i]; }
  FR_FN static constexpr size_t size() { return N; }
  FR_FN static constexpr bool empty() { return N == 0; }
  FR_FN constexpr T* data() { return elements; }
  FR_FN constexpr const T* data() const { return elements; }
  FR_FN constexpr T* begin() { return elements; }
  FR_FN constexpr T* end() { return elements + N; }
  FR_FN constexpr const T* begin() const { return elements; }
  FR_FN constexpr const T* end() const { return elements + N; }
  FR_FN constexpr T& front() { return elements[0]; }
  FR_FN constexpr T& back() { return elements[N - 1]; }
};

// Here, not in atomic.h: fences need them too.
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};

}  // namespace metal
}  // namespace fr

// ---- constants, as macros: the author's text comes after ---------------------------------------
#define FR_LIMIT(T) ::fr::metal::numeric_limits<T>
#undef INFINITY
#undef NAN
#define INFINITY (FR_LIMIT(float)::infinity())
#define NAN (FR_LIMIT(float)::quiet_NaN())
#define MAXFLOAT (FR_LIMIT(float)::max())
#define HUGE_VALF INFINITY
#define MAXHALF (FR_LIMIT(::fr::half)::max())
#define HUGE_VALH (FR_LIMIT(::fr::half)::infinity())
#define MAXBFLOAT (FR_LIMIT(::fr::bfloat)::max())
#define HUGE_VALBF (FR_LIMIT(::fr::bfloat)::infinity())

#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f
#define FLT_DECIMAL_DIG 9
#define FP_ILOGB0 (-2147483647 - 1)
#define FP_ILOGBNAN (-2147483647 - 1)
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_10_EXP 4
#define HALF_MAX_EXP 16
#define HALF_MIN_10_EXP (-4)
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define HALF_DECIMAL_DIG 5
#define HALF_MAX (FR_LIMIT(::fr::half)::max())
#define HALF_MIN (FR_LIMIT(::fr::half)::min())
#define HALF_EPSILON (FR_LIMIT(::fr::half)::epsilon())
#define BFLT_DIG 2
#define BFLT_MANT_DIG 8
#define BFLT_MAX_10_EXP 38
#define BFLT_MAX_EXP 128
#define BFLT_MIN_10_EXP (-37)
#define BFLT_MIN_EXP (-125)
#define BFLT_RADIX 2
#define BFLT_DECIMAL_DIG 4
#define BFLT_MAX (FR_LIMIT(::fr::bfloat)::max())
#define BFLT_MIN (FR_LIMIT(::fr::bfloat)::min())
#define BFLT_EPSILON (FR_LIMIT(::fr::bfloat)::epsilon())

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX (FR_LIMIT(::fr::int64_t)::max())
#define LONG_MIN (FR_LIMIT(::fr::int64_t)::min())
#define ULONG_MAX (FR_LIMIT(::fr::uint64_t)::max())
#define INT8_MAX SCHAR_MAX
#define INT8_MIN SCHAR_MIN
#define UINT8_MAX UCHAR_MAX
#define INT16_MAX SHRT_MAX
#define INT16_MIN SHRT_MIN
#define UINT16_MAX USHRT_MAX
#define INT32_MAX INT_MAX
#define INT32_MIN INT_MIN
#define UINT32_MAX UINT_MAX
#define INT64_MAX LONG_MAX
#define INT64_MIN LONG_MIN
#define UINT64_MAX ULONG_MAX
#define SIZE_MAX ULONG_MAX

#define FR_M_E 2.71828182845904523536
#define FR_M_LOG2E 1.44269504088896340736
#define FR_M_LOG10E 0.434294481903251827651
#define FR_M_LN2 0.693147180559945309417
#define FR_M_LN10 2.30258509299404568402
#define FR_M_PI 3.14159265358979323846
#define FR_M_PI_2 1.57079632679489661923
#define FR_M_PI_4 0.785398163397448309616
#define FR_M_1_PI 0.318309886183790671538
#define FR_M_2_PI 0.636619772367581343076
#define FR_M_2_SQRTPI 1.12837916709551257390
#define FR_M_SQRT2 1.41421356237309504880
#define FR_M_SQRT1_2 0.707106781186547524401
#define M_E_F float(FR_M_E)
#define M_LOG2E_F float(FR_M_LOG2E)
#define M_LOG10E_F float(FR_M_LOG10E)
#define M_LN2_F float(FR_M_LN2)
#define M_LN10_F float(FR_M_LN10)
#define M_PI_F float(FR_M_PI)
#define M_PI_2_F float(FR_M_PI_2)
#define M_PI_4_F float(FR_M_PI_4)
#define M_1_PI_F float(FR_M_1_PI)
#define M_2_PI_F float(FR_M_2_PI)
#define M_2_SQRTPI_F float(FR_M_2_SQRTPI)
#define M_SQRT2_F float(FR_M_SQRT2)
#define M_SQRT1_2_F float(FR_M_SQRT1_2)
#define M_E_H (::fr::half_lit(FR_M_E))
#define M_LOG2E_H (::fr::half_lit(FR_M_LOG2E))
#define M_LOG10E_H (::fr::half_lit(FR_M_LOG10E))
#define M_LN2_H (::fr::half_lit(FR_M_LN2))
#define M_LN10_H (::fr::half_lit(FR_M_LN10))
#define M_PI_H (::fr::half_lit(FR_M_PI))
#define M_PI_2_H (::fr::half_lit(FR_M_PI_2))
#define M_PI_4_H (::fr::half_lit(FR_M_PI_4))
#define M_1_PI_H (::fr::half_lit(FR_M_1_PI))
#define M_2_PI_H (::fr::half_lit(FR_M_2_PI))
#define M_2_SQRTPI_H (::fr::half_lit(FR_M_2_SQRTPI))
#define M_SQRT2_H (::fr::half_lit(FR_M_SQRT2))
#define M_SQRT1_2_H (::fr::half_lit(FR_M_SQRT1_2))
#define M_E_BF (::fr::bfloat_lit(FR_M_E))
#define M_LOG2E_BF (::fr::bfloat_lit(FR_M_LOG2E))
#define M_LOG10E_BF (::fr::bfloat_lit(FR_M_LOG10E))
#define M_LN2_BF (::fr::bfloat_lit(FR_M_LN2))
#define M_LN10_BF (::fr::bfloat_lit(FR_M_LN10))
#define M_PI_BF (::fr::bfloat_lit(FR_M_PI))
#define M_PI_2_BF (::fr::bfloat_lit(FR_M_PI_2))
#define M_PI_4_BF (::fr::bfloat_lit(FR_M_PI_4))
#define M_1_PI_BF (::fr::bfloat_lit(FR_M_1_PI))
#define M_2_PI_BF (::fr::bfloat_lit(FR_M_2_PI))
#define M_2_SQRTPI_BF (::fr::bfloat_lit(FR_M_2_SQRTPI))
#define M_SQRT2_BF (::fr::bfloat_lit(FR_M_SQRT2))
#define M_SQRT1_2_BF (::fr::bfloat_lit(FR_M_SQRT1_2))

// What a member of type T is aligned to in a struct: vectors to their size, though on the CPU a
// vector behind a pointer may lie anywhere.
namespace fr {
template <class T> inline constexpr size_t member_align = alignof(T);
template <class T, int N> inline constexpr size_t member_align<core::vec<T, N>> = sizeof(core::vec<T, N>);
}  // namespace fr

#endif
