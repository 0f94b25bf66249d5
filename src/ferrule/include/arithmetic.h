// What arithmetic means where C++ compilers differ: `source/arithmetic.py` writes these names into
// bodies.
//
// A product and the sum that it is an operand of are rounded once, as clang has it for one
// expression (-ffp-contract=on), with every compiler and on every device, which all are told to fuse
// nothing themselves: of two products the left one is fused. half and bfloat round at each step.
#ifndef FR_ARITHMETIC_H
#define FR_ARITHMETIC_H

namespace fr {

// The count of a shift of an A: of a scalar after its promotion, and of anything else as it is.
template <class A, class B> FR_FN constexpr auto fr_count(const B& b) {
  using T = metal::remove_cvref_t<A>;
  if constexpr (detail::int_v<T> && detail::int_v<B>) {
    return detail::shift_count<decltype(+T())>(b);
  } else {
    return b;
  }
}

namespace detail {

template <class T> inline constexpr bool fuses_v = false;
template <> inline constexpr bool fuses_v<float> = true;
template <> inline constexpr bool fuses_v<double> = true;
template <class T, int N> inline constexpr bool fuses_v<vec<T, N>> = fuses_v<T>;

// A product that waits for its sum; T is a type that fuses.
template <class T> struct product_t {
  T a, b;
  FR_FN constexpr operator T() const { return a * b; }
};

struct op_fused {
  template <class T> FR_FN static constexpr T call(T a, T b, T c) { return fused(a, b, c); }
};
template <class T> FR_FN constexpr T sum_of(const T& a, const T& b, const T& c) {
  return lift<T, element_t<T>, op_fused>(a, b, c);
}

template <class T> T& value_of() noexcept;  // to ask types of
// Scalars and vectors, whose operators are not the author's. Scalars are passed by value: then
// neither does a lambda have to capture constants, nor is there a reference to a bit-field.
template <class T> using if_scalar = enable_if_t<scalar_v<T>, int>;
template <class T> using if_vector = enable_if_t<(width_v<T> > 1), int>;
template <class T>
using if_other = enable_if_t<width_v<metal::remove_cvref_t<T>> == 0, int>;
template <class A, class B> using plain_sum_t =
    metal::remove_cvref_t<decltype(value_of<A>() + value_of<B>())>;

template <class A, class B, class = void> inline constexpr bool has_own_product_v = false;
template <class A, class B>
inline constexpr bool has_own_product_v<
    A, B, metal::void_t<decltype(operator*(value_of<A>(), value_of<B>()))>> = true;

// The left operand of a product that is an operand of a sum.
template <class A> struct factor_t {
  A value;
  FR_FN constexpr operator A() const { return value; }
};
template <class A, class B> FR_FN constexpr auto product_of(const A& a, const B& b) {
  using T = metal::remove_cvref_t<decltype(a * b)>;
  if constexpr (fuses_v<T>) {
    return product_t<T>{T(a), T(b)};
  } else {
    return a * b;
  }
}
template <class A, class B, if_scalar<B> = 0>
FR_FN constexpr auto operator*(const factor_t<A>& a, B b) {
  return product_of(a.value, b);
}
template <class A, class B, if_vector<B> = 0>
FR_FN constexpr auto operator*(const factor_t<A>& a, const B& b) {
  return product_of(a.value, b);
}
template <class A, class B, if_other<B> = 0>
FR_FN constexpr decltype(auto) operator*(const factor_t<A>& a, B&& b) {
  using E = metal::remove_cvref_t<B>;
  if constexpr (__is_enum(E) && !has_own_product_v<A, E>) {
    return product_of(a.value, +b);
  } else {
    return a.value * static_cast<B&&>(b);
  }
}
// An enumeration, which is a number where its author gave it no operator.
template <class E> struct enum_factor_t {
  E value;
  template <class B> FR_FN constexpr decltype(auto) operator*(B&& b) const {
    using V = metal::remove_cvref_t<B>;
    if constexpr (!has_own_product_v<E, V> && (scalar_v<V> || width_v<V> > 1)) {
      return product_of(+value, b);
    } else {
      return value * static_cast<B&&>(b);
    }
  }
};

template <class T> FR_FN constexpr product_t<T> operator-(const product_t<T>& p) {
  return {-p.a, p.b};
}
template <class T> FR_FN constexpr product_t<T> operator+(const product_t<T>& p) { return p; }

#define FR_SUMS(C, IF)                                                          \
  template <class T, class V, class S = plain_sum_t<T, V>, IF<V> = 0>            \
  FR_FN constexpr S operator+(const product_t<T>& p, C c) {                      \
    if constexpr (is_same_v<S, T>) {                                             \
      return sum_of(p.a, p.b, T(c));                                             \
    } else {                                                                     \
      return T(p) + c;                                                           \
    }                                                                            \
  }                                                                              \
  template <class T, class V, class S = plain_sum_t<V, T>, IF<V> = 0>            \
  FR_FN constexpr S operator+(C c, const product_t<T>& p) {                      \
    if constexpr (is_same_v<S, T>) {                                             \
      return sum_of(p.a, p.b, T(c));                                             \
    } else {                                                                     \
      return c + T(p);                                                           \
    }                                                                            \
  }                                                                              \
  template <class T, class V, class S = plain_sum_t<T, V>, IF<V> = 0>            \
  FR_FN constexpr S operator-(const product_t<T>& p, C c) {                      \
    if constexpr (is_same_v<S, T>) {                                             \
      return sum_of<T>(p.a, p.b, -T(c));                                         \
    } else {                                                                     \
      return T(p) - c;                                                           \
    }                                                                            \
  }                                                                              \
  template <class T, class V, class S = plain_sum_t<V, T>, IF<V> = 0>            \
  FR_FN constexpr S operator-(C c, const product_t<T>& p) {                      \
    return c + -p;                                                               \
  }
FR_SUMS(V, if_scalar)
FR_SUMS(const V&, if_vector)
#undef FR_SUMS
template <class T, class U>
FR_FN constexpr auto operator+(const product_t<T>& p, const product_t<U>& q) {
  if constexpr (is_same_v<plain_sum_t<T, U>, T>) {
    return p + U(q);
  } else {
    return T(p) + q;
  }
}
template <class T, class U>
FR_FN constexpr auto operator-(const product_t<T>& p, const product_t<U>& q) {
  return p + -q;
}
// Also of v.xy, which is no lvalue and has operators of its own. Integers, which may be bit-fields,
// have their own operator.
template <class L> inline constexpr bool sums_v = float_v<L> || (width_v<L> > 1);
template <class V, int... I> inline constexpr bool sums_v<swizzle<V, I...>> = true;
template <class L> using if_sums = enable_if_t<sums_v<metal::remove_cvref_t<L>>, int>;
template <class L, class T, class S = plain_sum_t<metal::remove_cvref_t<L>, T>, if_sums<L> = 0>
FR_FN constexpr L&& operator+=(L&& l, const product_t<T>& p) {
  if constexpr (is_same_v<S, T>) {
    l = static_cast<metal::remove_cvref_t<L>>(sum_of(p.a, p.b, T(l)));
  } else {
    l += T(p);
  }
  return static_cast<L&&>(l);
}
template <class L, class T, class S = plain_sum_t<metal::remove_cvref_t<L>, T>, if_sums<L> = 0>
FR_FN constexpr L&& operator-=(L&& l, const product_t<T>& p) {
  return static_cast<L&&>(l) += -p;
}

// The left operand of a shift: of a scalar, whose count is taken modulo its bits.
template <class A> struct shifted_t {
  A value;
  FR_FN constexpr operator A() const { return value; }
};
#define FR_SHIFTS(op)                                                      \
  template <class A, class B, if_scalar<B> = 0>                            \
  FR_FN constexpr auto operator op(const shifted_t<A>& a, B b) {           \
    return a.value op fr_count<A>(b);                                      \
  }                                                                        \
  template <class A, class B, enable_if_t<!scalar_v<metal::remove_cvref_t<B>>, int> = 0> \
  FR_FN constexpr decltype(auto) operator op(const shifted_t<A>& a, B&& b) { \
    return a.value op static_cast<B&&>(b);                                 \
  }
FR_SHIFTS(<<)
FR_SHIFTS(>>)
#undef FR_SHIFTS

}  // namespace detail

// `fr_factor(a) * b`, an operand of a sum. What is no number stays what it is, and its product too.
template <class A, detail::if_scalar<A> = 0> FR_FN constexpr detail::factor_t<A> fr_factor(A a) {
  return {a};
}
template <class A, detail::if_vector<A> = 0>
FR_FN constexpr detail::factor_t<A> fr_factor(const A& a) {
  return {a};
}
template <class A, detail::if_other<A> = 0> FR_FN constexpr decltype(auto) fr_factor(A&& a) {
  if constexpr (__is_enum(metal::remove_cvref_t<A>)) {
    return detail::enum_factor_t<metal::remove_cvref_t<A>>{a};
  } else {
    return static_cast<A&&>(a);
  }
}
// T(fr_factor(a) * b), an operand of a sum: a conversion to the type that it has is none.
template <class T, class P> FR_FN constexpr auto fr_as(P&& p) {
  if constexpr (metal::is_same_v<metal::remove_cvref_t<P>, detail::product_t<T>>) {
    return p;
  } else {
    return static_cast<T>(static_cast<P&&>(p));
  }
}

// `fr_bits(a) << n`, of a scalar after its promotion; vectors' own operators do so themselves.
template <class A, metal::enable_if_t<detail::int_v<A>, int> = 0>
FR_FN constexpr detail::shifted_t<A> fr_bits(A a) {
  return {a};
}
template <class A, metal::enable_if_t<!detail::int_v<metal::remove_cvref_t<A>>, int> = 0>
FR_FN constexpr A&& fr_bits(A&& a) {
  return static_cast<A&&>(a);
}

}  // namespace fr

#endif
