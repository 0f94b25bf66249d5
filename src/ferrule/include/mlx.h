// What MLX's own prelude gives to every kernel: names and behaviour of its Metal utility headers.
// Everything is found from the author's text without qualification, and hidden by the author's own
// definitions of the same names.
#ifndef FR_MLX_H
#define FR_MLX_H

#define MTL_CONST
#if FR_CUDA || defined(__clang__)
#define MLX_MTL_PRAGMA_UNROLL _Pragma("unroll")
#else
#define MLX_MTL_PRAGMA_UNROLL _Pragma("GCC unroll 32")
#endif
// An instantiation names a kernel for MLX's loader, which is not there.
#define instantiate_kernel(name, func, ...) \
  static_assert(sizeof(#name) > 0, "an instantiation has no effect here");

namespace fr {
namespace complex {
// ---- complex numbers --------------------------------------------------------------------------
template <class T> struct complex_t;
}  // namespace complex
namespace metal {
using complex::complex_t;
template <class T> inline constexpr bool is_complex_v = false;
template <class T> inline constexpr bool is_complex_v<complex_t<T>> = true;
template <class From, class To>
inline constexpr bool is_lane_convertible_v = detail::scalar_v<From> && detail::scalar_v<To>;
}  // namespace metal
namespace complex {
using namespace detail;

template <class T> struct complex_t {
  using value_type = T;
  T real, imag;

  complex_t() = default;  // MLX's is zero; a constructor would bar threadgroup memory on CUDA
  FR_FN constexpr complex_t(T re, T im) : real(re), imag(im) {}
  template <class U, if_t<scalar_v<U>> = 0>
  FR_FN constexpr complex_t(U x) : real(static_cast<T>(x)), imag(static_cast<T>(0)) {}
  template <class U, if_t<!is_same_v<U, T>> = 0>
  FR_FN constexpr complex_t(complex_t<U> x)
      : real(static_cast<T>(x.real)), imag(static_cast<T>(x.imag)) {}
  FR_FN constexpr complex_t(vec<T, 2> v) : real(v.x), imag(v.y) {}

  FR_FN constexpr operator vec<T, 2>() const { return vec<T, 2>(real, imag); }
  template <class U, if_t<scalar_v<U>> = 0> FR_FN constexpr operator U() const {
    return static_cast<U>(real);
  }
};
using complex32_t = complex_t<half>;
using complex64_t = complex_t<float>;

// Both operands complex, or one a number: the parts are then those of that number and zero.
template <class A> struct complex_part {};
template <class T> struct complex_part<complex_t<T>> { using type = T; };
template <class A, class B, bool = scalar_v<A>, bool = scalar_v<B>> struct complex_sum {};
template <class T> struct complex_sum<complex_t<T>, complex_t<T>, false, false> {
  using type = complex_t<T>;
};
template <class T, class B> struct complex_sum<complex_t<T>, B, false, true> {
  using type = complex_t<T>;
};
template <class A, class T> struct complex_sum<A, complex_t<T>, true, false> {
  using type = complex_t<T>;
};
template <class A, class B> using complex_sum_t = typename complex_sum<A, B>::type;

template <class T> FR_FN constexpr complex_t<T> operator-(complex_t<T> x) {
  return complex_t<T>(-x.real, -x.imag);
}
template <class T> FR_FN constexpr complex_t<T> operator+(complex_t<T> x) { return x; }
#define FR_SUM(op)                                                                        \
  template <class A, class B, class C = complex_sum_t<A, B>>                              \
  FR_FN constexpr C operator op(const A& a, const B& b) {                                 \
    if constexpr (scalar_v<A>) {                                                          \
      return C(static_cast<decltype(C::real)>(a) op b.real, op b.imag);                   \
    } else if constexpr (scalar_v<B>) {                                                   \
      return C(a.real op static_cast<decltype(C::real)>(b), a.imag);                      \
    } else {                                                                              \
      return C(a.real op b.real, a.imag op b.imag);                                       \
    }                                                                                     \
  }
FR_SUM(+) FR_SUM(-)
#undef FR_SUM
// Products and quotients take a number as a complex one, and so carry its zero part along: an
// infinity or a NaN comes out as MLX computes it. Of two products, the left one is fused.
template <class A, class B, class C = complex_sum_t<A, B>>
FR_FN constexpr C operator*(const A& x, const B& y) {
  C a(x), b(y);
  return C(detail::mad(a.real, b.real, -(a.imag * b.imag)), detail::mad(a.real, b.imag, a.imag * b.real));
}
template <class A, class B, class C = complex_sum_t<A, B>>
FR_FN constexpr C operator/(const A& x, const B& y) {
  C b(y);
  auto n = detail::mad(b.real, b.real, b.imag * b.imag);
  if constexpr (scalar_v<A>) {
    auto s = static_cast<decltype(C::real)>(x);
    return C(s * b.real / n, -s * b.imag / n);
  } else {
    return C(detail::mad(x.real, b.real, x.imag * b.imag) / n,
             detail::mad(x.imag, b.real, -(x.real * b.imag)) / n);
  }
}
// The remainder of each part for itself, with the divisor's sign.
template <class A, class B, class C = complex_sum_t<A, B>>
FR_FN constexpr C operator%(const A& x, const B& y) {
  using T = decltype(C::real);
  C a(x), b(y);
  T re = a.real - b.real * static_cast<T>(static_cast<int64_t>(a.real / b.real));
  T im = a.imag - b.imag * static_cast<T>(static_cast<int64_t>(a.imag / b.imag));
  if (re != 0 && (re < 0) != (b.real < 0)) re += b.real;
  if (im != 0 && (im < 0) != (b.imag < 0)) im += b.imag;
  return C(re, im);
}
#define FR_ASSIGN(op)                                                                     \
  template <class T, class B, class C = complex_sum_t<complex_t<T>, B>>                   \
  FR_FN constexpr complex_t<T>& operator op##=(complex_t<T>& a, const B& b) {             \
    return a = a op b;                                                                    \
  }
FR_ASSIGN(+) FR_ASSIGN(-) FR_ASSIGN(*) FR_ASSIGN(/) FR_ASSIGN(%)
#undef FR_ASSIGN
// The order is lexicographic: the real part first.
#define FR_COMPARE(op, expression)                                                        \
  template <class A, class B, class C = complex_sum_t<A, B>>                              \
  FR_FN constexpr bool operator op(const A& x, const B& y) {                              \
    C a(x), b(y);                                                                         \
    return expression;                                                                    \
  }
FR_COMPARE(==, a.real == b.real && a.imag == b.imag)
FR_COMPARE(!=, !(a.real == b.real && a.imag == b.imag))
FR_COMPARE(<, a.real < b.real || (a.real == b.real && a.imag < b.imag))
FR_COMPARE(>, a.real > b.real || (a.real == b.real && a.imag > b.imag))
FR_COMPARE(<=, a.real < b.real || (a.real == b.real && a.imag <= b.imag))
FR_COMPARE(>=, a.real > b.real || (a.real == b.real && a.imag >= b.imag))
#undef FR_COMPARE
}  // namespace complex
namespace detail {
using complex::complex_t;
template <class T, class B> struct picked<complex_t<T>, B> {
  using type = metal::conditional_t<scalar_v<B>, metal::type_identity<complex_t<T>>, void>;
};
template <class A, class T> struct picked<A, complex_t<T>> {
  using type = metal::conditional_t<scalar_v<A>, metal::type_identity<complex_t<T>>, void>;
};
template <class T, class U> struct picked<complex_t<T>, complex_t<U>> { using type = void; };

// Places in N strided arrays, with x and y along the last two axes and z along the rest.
template <class IdxT, int N>
FR_FN vec<IdxT, N> locations(vec<uint, 3> elem, const int* shape, const int64_t* const* strides,
                             int ndim) {
  vec<IdxT, N> loc{};
  for (int k = 0; k < N; ++k) {
    loc[k] = IdxT(elem.x) * IdxT(strides[k][ndim - 1]) + IdxT(elem.y) * IdxT(strides[k][ndim - 2]);
  }
  for (int d = ndim - 3; d >= 0; --d) {
    uint i = elem.z % uint(shape[d]);
    for (int k = 0; k < N; ++k) loc[k] += IdxT(i) * IdxT(strides[k][d]);
    elem.z /= uint(shape[d]);
  }
  return loc;
}
}  // namespace detail

namespace metal {
using complex::complex32_t;
using complex::complex64_t;

// ---- names ------------------------------------------------------------------------------------
FR_FN constexpr uint16_t bfloat16_to_uint16(const bfloat x) { return x.bits; }
FR_FN constexpr bfloat uint16_to_bfloat16(const uint16_t x) { return bfloat::from_bits(x); }

inline constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
inline constexpr int REDUCE_N_READS = 4;
inline constexpr int REDUCE_N_WRITES = 4;
inline constexpr int SOFTMAX_N_READS = 4;
inline constexpr int RMS_N_READS = 4;
inline constexpr int RMS_LOOPED_LIMIT = 4096;

template <class U> struct WorkPerThread {
  static_assert(sizeof(U) <= 8, "Type too large");
  static constexpr int n = 8 / sizeof(U);
};

// Constants; for the floats min and max are the infinities.
template <class U, bool = is_floating_point_v<U>> struct Limits {
  static constexpr U max = numeric_limits<U>::max();
  static constexpr U min = numeric_limits<U>::min();
  static constexpr U finite_max = numeric_limits<U>::max();
  static constexpr U finite_min = numeric_limits<U>::min();
};
template <class U> struct Limits<U, true> {
  static constexpr U max = numeric_limits<U>::infinity();
  static constexpr U min = -numeric_limits<U>::infinity();
  static constexpr U finite_max = numeric_limits<U>::max();
  static constexpr U finite_min = numeric_limits<U>::lowest();
};
template <class T> struct Limits<complex_t<T>, false> {
  static constexpr complex_t<T> max{numeric_limits<T>::infinity(), numeric_limits<T>::infinity()};
  static constexpr complex_t<T> min{-numeric_limits<T>::infinity(),
                                    -numeric_limits<T>::infinity()};
};
// Every type has its limits already.
#define instantiate_default_limit(type) static_assert(sizeof(::fr::metal::Limits<type>) > 0, "");
#define instantiate_float_limit(type) static_assert(sizeof(::fr::metal::Limits<type>) > 0, "");

// ---- from an element's number to its place in a strided array ---------------------------------
template <class IdxT = int64_t>
FR_FN IdxT elem_to_loc(IdxT elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}
template <class IdxT = int64_t>
FR_FN IdxT elem_to_loc(uint3 elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = IdxT(elem.x) * IdxT(strides[ndim - 1]) + IdxT(elem.y) * IdxT(strides[ndim - 2]);
  for (int d = ndim - 3; d >= 0; --d) {
    loc += IdxT(elem.z % uint(shape[d])) * IdxT(strides[d]);
    elem.z /= uint(shape[d]);
  }
  return loc;
}
template <class IdxT = int64_t> FR_FN IdxT elem_to_loc_1(uint elem, const int64_t& stride) {
  return IdxT(elem) * IdxT(stride);
}
template <class IdxT = int64_t> FR_FN IdxT elem_to_loc_2(uint2 elem, const int64_t* strides) {
  return IdxT(elem.x) * IdxT(strides[1]) + IdxT(elem.y) * IdxT(strides[0]);
}
template <class IdxT = int64_t> FR_FN IdxT elem_to_loc_3(uint3 elem, const int64_t* strides) {
  return IdxT(elem.x) * IdxT(strides[2]) + IdxT(elem.y) * IdxT(strides[1]) +
         IdxT(elem.z) * IdxT(strides[0]);
}
template <class IdxT = int64_t>
FR_FN vec<IdxT, 2> elem_to_loc_2_nd(uint3 elem, const int* shape, const int64_t* a_strides,
                                    const int64_t* b_strides, int ndim) {
  const int64_t* const all[2] = {a_strides, b_strides};
  return detail::locations<IdxT, 2>(elem, shape, all, ndim);
}
template <class IdxT = int64_t>
FR_FN vec<IdxT, 3> elem_to_loc_3_nd(uint3 elem, const int* shape, const int64_t* a_strides,
                                    const int64_t* b_strides, const int64_t* c_strides, int ndim) {
  const int64_t* const all[3] = {a_strides, b_strides, c_strides};
  return detail::locations<IdxT, 3>(elem, shape, all, ndim);
}

// Walks a strided array in order: DIM axes are stepped by adding, the rest by division.
template <int DIM, class OffsetT = size_t, bool General = true> struct LoopedElemToLoc {
  int dim;
  LoopedElemToLoc<DIM - 1, OffsetT, General> inner_looper;
  OffsetT offset{0};
  int index{0};

  FR_FN LoopedElemToLoc(int d) : dim(d), inner_looper(d - 1) {}
  FR_FN void next(const int* shape, const int64_t* strides) {
    if (dim == 0) return;
    ++index;
    offset += OffsetT(strides[dim - 1]);
    if (index >= shape[dim - 1]) {
      index = 0;
      inner_looper.next(shape, strides);
      offset = inner_looper.offset;
    }
  }
  FR_FN void next(int n, const int* shape, const int64_t* strides) {
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
  FR_FN OffsetT location() { return offset; }
};
template <class OffsetT> struct LoopedElemToLoc<1, OffsetT, true> {
  int dim;
  OffsetT offset{0};
  uint index{0};

  FR_FN LoopedElemToLoc(int d) : dim(d) {}
  FR_FN void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  FR_FN void next(int n, const int* shape, const int64_t* strides) {
    index += uint(n);
    offset = dim > 1 ? elem_to_loc<OffsetT>(OffsetT(index), shape, strides, dim)
                     : OffsetT(index) * OffsetT(strides[0]);
  }
  FR_FN OffsetT location() { return offset; }
};
template <class OffsetT> struct LoopedElemToLoc<1, OffsetT, false> {
  OffsetT offset{0};

  FR_FN LoopedElemToLoc(int) {}
  FR_FN void next(const int*, const int64_t* strides) { offset += OffsetT(strides[0]); }
  FR_FN void next(int n, const int*, const int64_t* strides) {
    offset += OffsetT(n) * OffsetT(strides[0]);
  }
  FR_FN OffsetT location() { return offset; }
};

// ---- small functions --------------------------------------------------------------------------
template <class T, class U> FR_FN constexpr T ceildiv(T n, U m) { return T((n + m - 1) / m); }

// Exact where 1 + x rounds: the error of the sum is divided out again (Goldberg 1991, theorem 4).
FR_FN float log1p(float x) {
  float u = 1.0f + x;
  float r = x * (log(u) / (u - 1.0f));
  r = u == 1.0f ? x : r;
  return u == INFINITY ? INFINITY : r;
}
FR_FN bfloat log1p(bfloat x) { return bfloat(log1p(float(x))); }
FR_FN half log1p(half x) { return half(log1p(float(x))); }
FR_FN complex64_t log1p(complex64_t z) {
  float x = z.real, y = z.imag;
  float theta = atan2(y, x + 1.0f);
  if (precise::sqrt(x * x + y * y) < 0.5f) {
    float r = detail::mad(x, 2.0f + x, y * y);
    return complex64_t(r == 0.0f ? x : 0.5f * log1p(r), theta);  // r may underflow
  }
  return complex64_t(log(sqrt(detail::mad(x + 1.0f, x + 1.0f, y * y))), theta);
}

template <bool Condition, class T, class U> struct ConditionalType { using type = U; };
template <class T, class U> struct ConditionalType<true, T, U> { using type = T; };

// To bool by the bits: a subnormal number is true even where arithmetic would flush it.
template <class U, class T> FR_FN U cast_to(T v) {
  if constexpr (is_same_v<U, bool> && is_complex_v<T>) {
    return cast_to<bool>(v.real) || cast_to<bool>(v.imag);
  } else if constexpr (is_same_v<U, bool> && is_floating_point_v<T>) {
    return magnitude(v) != 0;
  } else {
    return static_cast<U>(v);
  }
}
}  // namespace metal
}  // namespace fr

#endif
