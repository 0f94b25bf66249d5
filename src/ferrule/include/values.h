// Values that are printed, or shown beside a condition that does not hold: after C's promotions, as integers of 4 or
// 8 bytes, doubles, texts and addresses.
#pragma once

namespace fr {
// fr_print_value of runtime/runtime.h.
struct print_value {
  enum : int { SIGNED, UNSIGNED, FLOAT, TEXT, POINTER };
  int kind, bytes;
  uint64_t bits;
};

namespace detail {
template <class T> inline constexpr bool is_printed_float =
    metal::is_same_v<T, float> || metal::is_same_v<T, double> || metal::is_same_v<T, half> || metal::is_same_v<T, bfloat>;
template <class T> inline constexpr bool is_never = false;

template <class T> FR_FN print_value printed(const T& v) {
  using V = metal::remove_cv_t<T>;
  if constexpr (is_printed_float<V>) {
    double number;
    if constexpr (metal::is_same_v<V, double>) number = v;
    else number = double(float(v));
    return {print_value::FLOAT, 8, __builtin_bit_cast(uint64_t, number)};
  } else if constexpr (__is_enum(V)) {
    return printed(static_cast<__underlying_type(V)>(v));
  } else if constexpr (metal::is_same_v<V, const char*> || metal::is_same_v<V, char*>) {
    return {print_value::TEXT, 8, reinterpret_cast<uint64_t>(v)};
  } else if constexpr (metal::is_same_v<V, decltype(nullptr)>) {
    return {print_value::POINTER, 8, 0};
  } else if constexpr (metal::is_pointer_v<V>) {
    return {print_value::POINTER, 8, reinterpret_cast<uint64_t>(v)};
  } else if constexpr (__is_class(V) || __is_union(V)) {
    static_assert(is_never<V>, "printf takes numbers, pointers and texts: print a vector's components one by one, "
                               "and what atomic_load_explicit gives of an atomic");
    return {};
  } else {
    const auto promoted = +v;
    constexpr bool is_signed = decltype(promoted)(-1) < decltype(promoted)(0);
    return {is_signed ? print_value::SIGNED : print_value::UNSIGNED, int(sizeof promoted), uint64_t(promoted)};
  }
}
}  // namespace detail

}  // namespace fr
