// What checks that a step of a CUDA unit gives a function what it takes: how many arguments, and
// which of them are pointers, integers of a size, or floats. See source/cuda/unit.py.
#pragma once
#ifndef FR_CUDA_LANES  // cuda_on_cpu.h has them
#include <cuda/std/cstdint>
#endif

namespace fr_unit {

template <class... A> struct list {};
template <class F> struct of;
template <class... A> struct of<void (*)(A...)> {
  static constexpr int count = sizeof...(A);
  using types = list<A...>;
};

template <int N, class L> struct at { using type = char; };  // beyond the last
template <class H, class... R> struct at<0, list<H, R...>> { using type = H; };
template <int N, class H, class... R> struct at<N, list<H, R...>> : at<N - 1, list<R...>> {};

template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };
template <class A> struct pointer { static constexpr bool value = false; };
template <class A> struct pointer<A*> { static constexpr bool value = true; };
template <class A> struct integer { static constexpr bool value = false; };
#define FR_INTEGER(T)                                                          \
  template <> struct integer<T> { static constexpr bool value = true; };       \
  template <> struct integer<unsigned T> { static constexpr bool value = true; };
FR_INTEGER(char) FR_INTEGER(short) FR_INTEGER(int) FR_INTEGER(long) FR_INTEGER(long long)
#undef FR_INTEGER
template <> struct integer<signed char> { static constexpr bool value = true; };

// Whether argument N of F is what is given. What a function does not take is said once, by `count`.
template <class F, int N> struct argument {
  using type = typename at<N, typename of<F>::types>::type;
  static constexpr bool beyond = N >= of<F>::count;
  static constexpr bool is_pointer = beyond || pointer<type>::value;
  static constexpr bool is_tensor_map = beyond || (!pointer<type>::value && sizeof(type) == 128);
};
template <class F, int N, class T> struct given {
  using type = typename argument<F, N>::type;
  static constexpr bool is_integer =
      argument<F, N>::beyond || (integer<type>::value && sizeof(type) == sizeof(T));
  static constexpr bool is_same = argument<F, N>::beyond || same<type, T>::value;
};

}  // namespace fr_unit
