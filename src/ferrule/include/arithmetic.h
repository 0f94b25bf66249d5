// What arithmetic means where C++ compilers differ: `source/arithmetic.py` writes these names into
// bodies.
//
// A product and the sum that it is an operand of are rounded once, as clang has it for one
// expression (-ffp-contract=on), with every compiler and on every device, which all are told to fuse
// nothing themselves: of two products the left one is fused. half and bfloat round at each step.
#ifndef FR_ARITHMETIC_H
#define FR_ARITHMETIC_H

namespace fr {
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
template <class T> inline constexpr bool is_product_v = false;
template <class T> inline constexpr bool is_product_v<product_t<T>> = true;

struct op_fused {
  template <class T> FR_FN static constexpr T call(T a, T b, T c) { return fused(a, b, c); }
};
template <class T> FR_FN constexpr T sum_of(const T& a, const T& b, const T& c) {
  return lift<T, element_t<T>, op_fused>(a, b, c);
}

template <class T> T& value_of() noexcept;  // to ask types of
template <class A, class B> using plain_sum_t =
    metal::remove_cvref_t<decltype(value_of<A>() + value_of<B>())>;
template <class T> using unless_product = enable_if_t<!is_product_v<T>, int>;

template <class T> FR_FN constexpr product_t<T> operator-(const product_t<T>& p) {
  return {-p.a, p.b};
}
template <class T> FR_FN constexpr product_t<T> operator+(const product_t<T>& p) { return p; }

template <class T, class C, class S = plain_sum_t<T, C>, unless_product<C> = 0>
FR_FN constexpr S operator+(const product_t<T>& p, const C& c) {
  if constexpr (is_same_v<S, T>) {
    return sum_of(p.a, p.b, T(c));
  } else {
    return T(p) + c;
  }
}
template <class T, class C, class S = plain_sum_t<C, T>, unless_product<C> = 0>
FR_FN constexpr S operator+(const C& c, const product_t<T>& p) {
  if constexpr (is_same_v<S, T>) {
    return sum_of(p.a, p.b, T(c));
  } else {
    return c + T(p);
  }
}
template <class T, class C, class S = plain_sum_t<T, C>, unless_product<C> = 0>
FR_FN constexpr S operator-(const product_t<T>& p, const C& c) {
  if constexpr (is_same_v<S, T>) {
    return sum_of<T>(p.a, p.b, -T(c));
  } else {
    return T(p) - c;
  }
}
template <class T, class C, class S = plain_sum_t<C, T>, unless_product<C> = 0>
FR_FN constexpr S operator-(const C& c, const product_t<T>& p) {
  if constexpr (is_same_v<S, T>) {
    return sum_of<T>(-p.a, p.b, T(c));
  } else {
    return c - T(p);
  }
}
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
  if constexpr (is_same_v<plain_sum_t<T, U>, T>) {
    return p - U(q);
  } else {
    return T(p) - q;
  }
}
// Also of v.xy, which is no lvalue and has operators of its own.
template <class L, class T, class S = plain_sum_t<metal::remove_cvref_t<L>, T>>
FR_FN constexpr L&& operator+=(L&& l, const product_t<T>& p) {
  if constexpr (is_same_v<S, T>) {
    l = static_cast<metal::remove_cvref_t<L>>(sum_of(p.a, p.b, T(l)));
  } else {
    l += T(p);
  }
  return static_cast<L&&>(l);
}
template <class L, class T, class S = plain_sum_t<metal::remove_cvref_t<L>, T>>
FR_FN constexpr L&& operator-=(L&& l, const product_t<T>& p) {
  if constexpr (is_same_v<S, T>) {
    l = static_cast<metal::remove_cvref_t<L>>(sum_of<T>(-p.a, p.b, T(l)));
  } else {
    l -= T(p);
  }
  return static_cast<L&&>(l);
}

}  // namespace detail

// a * b, an operand of a sum.
template <class A, class B> FR_FN constexpr auto fr_product(const A& a, const B& b) {
  using T = metal::remove_cvref_t<decltype(a * b)>;
  if constexpr (detail::fuses_v<T>) {
    return detail::product_t<T>{T(a), T(b)};
  } else {
    return a * b;
  }
}
// T(a * b), an operand of a sum: a conversion to the type that it has is none.
template <class T, class A, class B> FR_FN constexpr auto fr_product_as(const A& a, const B& b) {
  using P = metal::remove_cvref_t<decltype(a * b)>;
  if constexpr (detail::fuses_v<P> && metal::is_same_v<P, T>) {
    return detail::product_t<P>{P(a), P(b)};
  } else {
    return static_cast<T>(a * b);
  }
}

// Shifts: the count of a scalar, after its promotion; vectors' own operators do so themselves.
template <class A, class B> FR_FN constexpr auto fr_count(const B& b) {
  using T = metal::remove_cvref_t<A>;
  if constexpr (detail::int_v<T> && detail::int_v<B>) {
    return detail::shift_count<decltype(+T())>(b);
  } else {
    return b;
  }
}
template <class A, class B> FR_FN constexpr auto fr_shl(const A& a, const B& b) {
  return a << fr_count<A>(b);
}
template <class A, class B> FR_FN constexpr auto fr_shr(const A& a, const B& b) {
  return a >> fr_count<A>(b);
}

}  // namespace fr

#endif
