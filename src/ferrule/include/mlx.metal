// What MLX gives to every kernel, for a Metal compiler without MLX: names and behaviour of its
// utilities, as mlx.h has them for the CPU and CUDA. `source.metal.prelude` says which of the parts
// a kernel needs; this text goes in front of the kernel's.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

#define MTL_CONST constant
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
#define instantiate_kernel(name, func, ...) \
  template [[host_name(name)]] [[kernel]] decltype(func<__VA_ARGS__>) func<__VA_ARGS__>;

constant constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
constant constexpr int REDUCE_N_READS = 4;
constant constexpr int REDUCE_N_WRITES = 4;
constant constexpr int SOFTMAX_N_READS = 4;
constant constexpr int RMS_N_READS = 4;
constant constexpr int RMS_LOOPED_LIMIT = 4096;

inline uint16_t bfloat16_to_uint16(const bfloat x) { return as_type<uint16_t>(x); }
inline bfloat uint16_to_bfloat16(const uint16_t x) { return as_type<bfloat>(x); }

template <class U> struct WorkPerThread {
  static_assert(sizeof(U) <= 8, "Type too large");
  static constant constexpr int n = 8 / sizeof(U);
};
template <bool Condition, class T, class U> struct ConditionalType { using type = U; };
template <class T, class U> struct ConditionalType<true, T, U> { using type = T; };

template <class T, class U> inline T ceildiv(T n, U m) { return T((n + m - 1) / m); }

#if FR_BFLOAT
// Metal's functions take a bfloat as a float, and their result does not become a bfloat by itself.
#define FR_OF_ONE(name) \
  METAL_FUNC bfloat name(bfloat x) { return bfloat(name(float(x))); }
#define FR_OF_TWO(name) \
  METAL_FUNC bfloat name(bfloat x, bfloat y) { return bfloat(name(float(x), float(y))); }
#define FR_OF_THREE(name)                                      \
  METAL_FUNC bfloat name(bfloat x, bfloat y, bfloat z) {       \
    return bfloat(name(float(x), float(y), float(z)));         \
  }
#define FR_IN_EVERY_PRECISION                                                                  \
  FR_OF_ONE(acos) FR_OF_ONE(acosh) FR_OF_ONE(asin) FR_OF_ONE(asinh) FR_OF_ONE(atan)            \
  FR_OF_ONE(atanh) FR_OF_ONE(cos) FR_OF_ONE(cosh) FR_OF_ONE(cospi) FR_OF_ONE(exp)              \
  FR_OF_ONE(exp2) FR_OF_ONE(exp10) FR_OF_ONE(log) FR_OF_ONE(log2) FR_OF_ONE(log10)             \
  FR_OF_ONE(rsqrt) FR_OF_ONE(sin) FR_OF_ONE(sinh) FR_OF_ONE(sinpi) FR_OF_ONE(sqrt)             \
  FR_OF_ONE(tan) FR_OF_ONE(tanh) FR_OF_ONE(tanpi) FR_OF_TWO(atan2) FR_OF_TWO(pow)              \
  FR_OF_TWO(powr)
namespace metal {
FR_IN_EVERY_PRECISION
FR_OF_ONE(abs) FR_OF_ONE(fabs) FR_OF_ONE(ceil) FR_OF_ONE(floor) FR_OF_ONE(fract) FR_OF_ONE(rint)
FR_OF_ONE(round) FR_OF_ONE(trunc) FR_OF_ONE(sign) FR_OF_ONE(saturate)
FR_OF_TWO(copysign) FR_OF_TWO(fdim) FR_OF_TWO(fmax) FR_OF_TWO(fmin) FR_OF_TWO(fmod)
FR_OF_TWO(max) FR_OF_TWO(min) FR_OF_TWO(step)
FR_OF_THREE(clamp) FR_OF_THREE(fma) FR_OF_THREE(mix) FR_OF_THREE(smoothstep)
namespace fast {
FR_IN_EVERY_PRECISION
}
namespace precise {
FR_IN_EVERY_PRECISION
}
}  // namespace metal
#undef FR_IN_EVERY_PRECISION
#undef FR_OF_ONE
#undef FR_OF_TWO
#undef FR_OF_THREE
#endif

#if FR_COMPLEX
#ifndef FR_SPACES
#define FR_SPACES(X) X(thread) X(threadgroup) X(device) X(constant)
#endif
template <class T> struct complex_t;
template <class T> constant constexpr bool is_complex_v = false;
template <class T> constant constexpr bool is_complex_v<complex_t<T>> = true;
template <class From, class To>
constant constexpr bool is_lane_convertible_v = !is_complex_v<From> && !is_complex_v<To>;

template <class T> struct complex_t {
  using value_type = T;
  T real, imag;

#define FR_MEMBERS(space)                                                                      \
  constexpr complex_t() space : real(0), imag(0) {}                                            \
  constexpr complex_t(T re, T im) space : real(re), imag(im) {}                                \
  template <class U, class = enable_if_t<!is_complex_v<U>>>                                    \
  constexpr complex_t(U x) space : real(static_cast<T>(x)), imag(static_cast<T>(0)) {}         \
  template <class U, class = enable_if_t<!is_same_v<U, T>>>                                    \
  constexpr complex_t(complex_t<U> x) space                                                    \
      : real(static_cast<T>(x.real)), imag(static_cast<T>(x.imag)) {}                          \
  template <class U, class = enable_if_t<!is_complex_v<U>>>                                    \
  constexpr operator U() const space {                                                         \
    return static_cast<U>(real);                                                               \
  }
  FR_SPACES(FR_MEMBERS)
#undef FR_MEMBERS
};
typedef complex_t<half> complex32_t;
typedef complex_t<float> complex64_t;

template <class T> constexpr complex_t<T> operator-(complex_t<T> x) { return {-x.real, -x.imag}; }
template <class T> constexpr complex_t<T> operator+(complex_t<T> x) { return x; }
template <class T> constexpr complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
  return {a.real + b.real, a.imag + b.imag};
}
template <class T> constexpr complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
  return {a.real - b.real, a.imag - b.imag};
}
template <class T> constexpr complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
template <class T> constexpr complex_t<T> operator/(complex_t<T> a, complex_t<T> b) {
  T n = b.real * b.real + b.imag * b.imag;
  return {(a.real * b.real + a.imag * b.imag) / n, (a.imag * b.real - a.real * b.imag) / n};
}
// The remainder of each part for itself, with the divisor's sign.
template <class T> constexpr complex_t<T> operator%(complex_t<T> a, complex_t<T> b) {
  T re = a.real - b.real * static_cast<T>(static_cast<int64_t>(a.real / b.real));
  T im = a.imag - b.imag * static_cast<T>(static_cast<int64_t>(a.imag / b.imag));
  if (re != 0 && (re < 0) != (b.real < 0)) re += b.real;
  if (im != 0 && (im < 0) != (b.imag < 0)) im += b.imag;
  return {re, im};
}
// The order is lexicographic: the real part first.
template <class T> constexpr bool operator==(complex_t<T> a, complex_t<T> b) {
  return a.real == b.real && a.imag == b.imag;
}
template <class T> constexpr bool operator!=(complex_t<T> a, complex_t<T> b) { return !(a == b); }
template <class T> constexpr bool operator<(complex_t<T> a, complex_t<T> b) {
  return a.real < b.real || (a.real == b.real && a.imag < b.imag);
}
template <class T> constexpr bool operator>(complex_t<T> a, complex_t<T> b) { return b < a; }
template <class T> constexpr bool operator<=(complex_t<T> a, complex_t<T> b) {
  return a < b || a == b;
}
template <class T> constexpr bool operator>=(complex_t<T> a, complex_t<T> b) { return b <= a; }
// A number beside a complex one.
#define FR_MIXED(result, op)                                                                   \
  template <class T, class U, class = enable_if_t<!is_complex_v<U>>>                           \
  constexpr result operator op(complex_t<T> a, U b) {                                          \
    return a op complex_t<T>(b);                                                               \
  }                                                                                            \
  template <class T, class U, class = enable_if_t<!is_complex_v<U>>>                           \
  constexpr result operator op(U a, complex_t<T> b) {                                          \
    return complex_t<T>(a) op b;                                                               \
  }
FR_MIXED(complex_t<T>, +) FR_MIXED(complex_t<T>, -) FR_MIXED(complex_t<T>, *)
FR_MIXED(complex_t<T>, /) FR_MIXED(complex_t<T>, %) FR_MIXED(bool, ==) FR_MIXED(bool, !=) FR_MIXED(bool, <)
FR_MIXED(bool, >) FR_MIXED(bool, <=) FR_MIXED(bool, >=)
#undef FR_MIXED
#define FR_ASSIGN(op)                                                                          \
  template <class T, class U>                                                                  \
  constexpr thread complex_t<T>& operator op##=(thread complex_t<T>& a, U b) {                 \
    return a = a op b;                                                                         \
  }
FR_ASSIGN(+) FR_ASSIGN(-) FR_ASSIGN(*) FR_ASSIGN(/) FR_ASSIGN(%)
#undef FR_ASSIGN
#endif

#if FR_LIMITS
// Constants; for the floats min and max are the infinities.
template <class U> struct Limits {
  static constant constexpr U max = numeric_limits<U>::max();
  static constant constexpr U min = numeric_limits<U>::min();
  static constant constexpr U finite_max = numeric_limits<U>::max();
  static constant constexpr U finite_min = numeric_limits<U>::min();
};
#define FR_FLOAT(U)                                                     \
  template <> struct Limits<U> {                                        \
    static constant constexpr U max = numeric_limits<U>::infinity();    \
    static constant constexpr U min = -numeric_limits<U>::infinity();   \
    static constant constexpr U finite_max = numeric_limits<U>::max();  \
    static constant constexpr U finite_min = -numeric_limits<U>::max(); \
  };
FR_FLOAT(half) FR_FLOAT(bfloat) FR_FLOAT(float)
#undef FR_FLOAT
#if FR_COMPLEX
template <class T> struct Limits<complex_t<T>> {
  static constant constexpr complex_t<T> max =
      complex_t<T>(numeric_limits<T>::infinity(), numeric_limits<T>::infinity());
  static constant constexpr complex_t<T> min =
      complex_t<T>(-numeric_limits<T>::infinity(), -numeric_limits<T>::infinity());
};
#endif
#endif

#if FR_LOCATIONS
// From an element's number to its place in a strided array.
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides,
                            int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, constant const int* shape, constant const int64_t* strides,
                            int ndim) {
  IdxT loc = IdxT(elem.x) * IdxT(strides[ndim - 1]) + IdxT(elem.y) * IdxT(strides[ndim - 2]);
  for (int d = ndim - 3; d >= 0; --d) {
    loc += IdxT(elem.z % uint(shape[d])) * IdxT(strides[d]);
    elem.z /= uint(shape[d]);
  }
  return loc;
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_1(uint elem, constant const int64_t& stride) {
  return IdxT(elem) * IdxT(stride);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_2(uint2 elem, constant const int64_t* strides) {
  return IdxT(elem.x) * IdxT(strides[1]) + IdxT(elem.y) * IdxT(strides[0]);
}
template <class IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc_3(uint3 elem, constant const int64_t* strides) {
  return IdxT(elem.x) * IdxT(strides[2]) + IdxT(elem.y) * IdxT(strides[1]) +
         IdxT(elem.z) * IdxT(strides[0]);
}
template <class IdxT = int64_t>
METAL_FUNC vec<IdxT, 2> elem_to_loc_2_nd(uint3 elem, constant const int* shape,
                                         constant const int64_t* a_strides,
                                         constant const int64_t* b_strides, int ndim) {
  return vec<IdxT, 2>(elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
                      elem_to_loc<IdxT>(elem, shape, b_strides, ndim));
}
template <class IdxT = int64_t>
METAL_FUNC vec<IdxT, 3> elem_to_loc_3_nd(uint3 elem, constant const int* shape,
                                         constant const int64_t* a_strides,
                                         constant const int64_t* b_strides,
                                         constant const int64_t* c_strides, int ndim) {
  return vec<IdxT, 3>(elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
                      elem_to_loc<IdxT>(elem, shape, b_strides, ndim),
                      elem_to_loc<IdxT>(elem, shape, c_strides, ndim));
}

// Walks a strided array in order: DIM axes are stepped by adding, the rest by division.
template <int DIM, class OffsetT = size_t, bool General = true> struct LoopedElemToLoc {
  int dim;
  LoopedElemToLoc<DIM - 1, OffsetT, General> inner_looper;
  OffsetT offset{0};
  int index{0};

  LoopedElemToLoc(int d) thread : dim(d), inner_looper(d - 1) {}
  void next(constant const int* shape, constant const int64_t* strides) thread {
    next(1, shape, strides);
  }
  void next(int n, constant const int* shape, constant const int64_t* strides) thread {
    if (dim == 0) return;
    int size = shape[dim - 1], there = index + n;
    if (there < size) {
      index = there;
      offset += OffsetT(n) * OffsetT(strides[dim - 1]);
    } else {
      inner_looper.next(there / size, shape, strides);
      index = there % size;
      offset = inner_looper.offset + OffsetT(index) * OffsetT(strides[dim - 1]);
    }
  }
  OffsetT location() thread { return offset; }
};
template <class OffsetT> struct LoopedElemToLoc<1, OffsetT, true> {
  int dim;
  OffsetT offset{0};
  uint index{0};

  LoopedElemToLoc(int d) thread : dim(d) {}
  void next(constant const int* shape, constant const int64_t* strides) thread {
    next(1, shape, strides);
  }
  void next(int n, constant const int* shape, constant const int64_t* strides) thread {
    index += uint(n);
    offset = dim > 1 ? elem_to_loc<OffsetT>(OffsetT(index), shape, strides, dim)
                     : OffsetT(index) * OffsetT(strides[0]);
  }
  OffsetT location() thread { return offset; }
};
template <class OffsetT> struct LoopedElemToLoc<1, OffsetT, false> {
  OffsetT offset{0};

  LoopedElemToLoc(int) thread {}
  void next(constant const int*, constant const int64_t* strides) thread {
    offset += OffsetT(strides[0]);
  }
  void next(int n, constant const int*, constant const int64_t* strides) thread {
    offset += OffsetT(n) * OffsetT(strides[0]);
  }
  OffsetT location() thread { return offset; }
};
#endif

#if FR_LOG1P
// Exact where 1 + x rounds: the error of the sum is divided out again (Goldberg 1991, theorem 4).
inline float log1p(float x) {
  float u = 1.0f + x;
  float r = x * (metal::log(u) / (u - 1.0f));
  r = u == 1.0f ? x : r;
  return u == INFINITY ? u : r;
}
inline half log1p(half x) { return half(log1p(float(x))); }
inline bfloat log1p(bfloat x) { return bfloat(log1p(float(x))); }
#endif

#if FR_CAST
// To bool by the bits: a subnormal number is true even where arithmetic would flush it.
template <class T> inline bool fr_holds(T v) { return static_cast<bool>(v); }
inline bool fr_holds(float v) { return (as_type<uint>(v) & 0x7fffffffu) != 0; }
inline bool fr_holds(half v) { return (as_type<ushort>(v) & 0x7fff) != 0; }
inline bool fr_holds(bfloat v) { return (as_type<ushort>(v) & 0x7fff) != 0; }
#if FR_COMPLEX
template <class T> inline bool fr_holds(complex_t<T> v) {
  return fr_holds(v.real) || fr_holds(v.imag);
}
#endif
template <class U, class T> inline U cast_to(T v) {
  if constexpr (is_same_v<U, bool>) {
    return fr_holds(v);
  } else {
    return static_cast<U>(v);
  }
}
#endif

#if FR_SIMD
// What Metal's own simd functions do not take.
#define FR_SHUFFLE(T, there, back, name) \
  inline T name(T v, ushort n) { return back(metal::name(there(v), n)); }
#define FR_FILL(T, there, back, name) \
  inline T name(T v, T filling, ushort n) { return back(metal::name(there(v), there(filling), n)); }
#define FR_SHUFFLES(T, there, back)                                                            \
  FR_SHUFFLE(T, there, back, simd_shuffle) FR_SHUFFLE(T, there, back, simd_shuffle_up)         \
  FR_SHUFFLE(T, there, back, simd_shuffle_down) FR_SHUFFLE(T, there, back, simd_shuffle_xor)   \
  FR_FILL(T, there, back, simd_shuffle_and_fill_up)                                            \
  FR_FILL(T, there, back, simd_shuffle_and_fill_down)
FR_SHUFFLES(uint64_t, as_type<uint2>, as_type<uint64_t>)
FR_SHUFFLES(int64_t, as_type<uint2>, as_type<int64_t>)
FR_SHUFFLES(bool, uint, bool)
#if FR_COMPLEX
inline float2 fr_parts(complex64_t v) { return float2(v.real, v.imag); }
inline complex64_t fr_whole(float2 v) { return complex64_t(v.x, v.y); }
FR_SHUFFLES(complex64_t, fr_parts, fr_whole)
#endif
#if FR_BFLOAT
FR_SHUFFLES(bfloat, as_type<ushort>, as_type<bfloat>)
#define FR_BY_FLOAT(name) \
  inline bfloat name(bfloat v) { return bfloat(metal::name(float(v))); }
FR_BY_FLOAT(simd_sum) FR_BY_FLOAT(simd_product) FR_BY_FLOAT(simd_min) FR_BY_FLOAT(simd_max)
FR_BY_FLOAT(simd_prefix_inclusive_sum) FR_BY_FLOAT(simd_prefix_exclusive_sum)
FR_BY_FLOAT(simd_prefix_inclusive_product) FR_BY_FLOAT(simd_prefix_exclusive_product)
#undef FR_BY_FLOAT
#endif
#undef FR_SHUFFLES
#undef FR_SHUFFLE
#undef FR_FILL
#endif

#if FR_LOG
#if __METAL_VERSION__ >= 320
#include <metal_logging>
namespace mlx {
using os_log = metal::os_log;
}
#endif
#endif
