// Integer division by a number that is the same for many lanes: prepared once, then a multiplication.
//
// The method is Granlund and Montgomery's (PLDI 1994, figure 4.1): exact for every 32-bit dividend.
#pragma once

namespace fr {

struct magic {
  unsigned factor, first, second;
  FR_FN static magic of(unsigned d) {
    if (d == 0) return magic{0, 31, 31};  // all is 0, as where the processor divides
    const unsigned bits = d == 1 ? 0 : 32 - unsigned(__builtin_clz(d - 1));
    const unsigned long power = 1ul << bits;
    return magic{unsigned(((power - d) << 32) / d) + 1, bits < 1 ? bits : 1, bits < 1 ? 0 : bits - 1};
  }
  FR_FN unsigned divide(unsigned n) const {
    const unsigned t = unsigned((static_cast<unsigned long>(factor) * n) >> 32);
    return (t + ((n - t) >> first)) >> second;
  }
};

// Whether C++ divides these types as 32-bit integers, and how.
template <class A, class B> constexpr bool is_integer_pair =
    metal::is_integral_v<A> && metal::is_integral_v<B>;

template <class B> struct divisor {
  B value;
  magic absolute, plain;
};

template <class B> FR_FN divisor<B> divisor_of(B b) {
  if constexpr (metal::is_integral_v<B> && sizeof(B) <= 4) {
    const int s = int(b);
    const unsigned a = b < B(0) ? 0u - unsigned(s) : unsigned(b);
    const magic m = magic::of(a);
    return divisor<B>{b, m, b < B(0) ? magic::of(unsigned(s)) : m};
  } else {
    return divisor<B>{b, {}, {}};
  }
}

// A quotient may itself be prepared before the condition that it stands behind: by 0 it is 0.
template <class A, class B> FR_FN auto divided(const A& a, const divisor<B>& d) {
  if constexpr (is_integer_pair<A, B>) {
    using C = decltype(a / d.value);
    if constexpr (sizeof(C) == 4 && sizeof(B) <= 4 && C(-1) > C(0)) {
      return C(d.plain.divide(unsigned(a)));
    } else if constexpr (sizeof(C) == 4 && sizeof(B) <= 4) {
      const int n = int(a);
      const unsigned q = d.absolute.divide(n < 0 ? 0u - unsigned(n) : unsigned(n));
      return C((n < 0) != (d.value < B(0)) ? 0u - q : q);
    } else {
      return d.value == B(0) ? C(0) : C(a / d.value);
    }
  } else {
    return a / d.value;
  }
}

template <class A, class B> FR_FN auto left_of(const A& a, const divisor<B>& d) {
  if constexpr (is_integer_pair<A, B>) {
    using C = decltype(a % d.value);
    if (d.value == B(0)) return C(0);
    if constexpr (sizeof(C) == 4 && sizeof(B) <= 4)
      return C(unsigned(a) - unsigned(divided(a, d)) * unsigned(d.value));
    else
      return C(a % d.value);
  } else {
    return a % d.value;
  }
}

// The length of the rows that a position is divided into; 0 where rows would not pay.
#ifndef FR_ROW_MIN
#define FR_ROW_MIN 16
#endif
template <class B> FR_FN unsigned row_length(const divisor<B>& d) {
  if constexpr (metal::is_integral_v<B>)
    return d.value >= B(FR_ROW_MIN) && uint64_t(d.value) <= 0x7fffffff ? unsigned(d.value) : 0u;
  else
    return 0;
}

}  // namespace fr
