// assert(condition). In texts that define FR_CHECKED it tells `fr_check_assert` whether the condition holds; else it is
// nothing, though the compiler reads it.
#pragma once

#undef assert
#if defined(FR_CHECKED) && !FR_CUDA
#include "values.h"

// `line` is the author's, of the text that `file` names: "name.source" or "name.header". Of a comparison the values
// of both sides are handed over.
extern "C" void fr_check_assert(bool holds, const char* condition, int line, const char* file,
                                const fr::print_value* values, unsigned count);

namespace fr {
// Takes the sides of `checked << left < right` apart: << binds tighter than comparisons, looser than sums.
struct assertion {
  print_value values[4];
  unsigned count = 0;
  template <class T> FR_FN void note(const T& v) {
    if constexpr (!__is_class(T) || detail::is_printed_float<T>) {
      if (count < 4) values[count++] = detail::printed(v);
    }
  }
};

template <class T> struct left_side {
  assertion& a;
  T v;
  FR_FN operator T() const { return v; }
#define FR_COMPARE(OP)                                                     \
  template <class R> FR_FN friend bool operator OP(left_side&& l, R r) { \
    const bool holds = bool(l.v OP r);                                     \
    l.a.note(l.v);                                                         \
    l.a.note(r);                                                           \
    return holds;                                                          \
  }
  FR_COMPARE(<) FR_COMPARE(<=) FR_COMPARE(>) FR_COMPARE(>=) FR_COMPARE(==) FR_COMPARE(!=)
#undef FR_COMPARE
  template <class R> FR_FN friend auto operator<<(left_side&& l, R r) {
    return left_side<decltype(l.v << r)>{l.a, l.v << r};
  }
  template <class R> FR_FN friend auto operator>>(left_side&& l, R r) {
    return left_side<decltype(l.v >> r)>{l.a, l.v >> r};
  }
};
template <class T> FR_FN left_side<T> operator<<(assertion& a, T v) { return {a, v}; }
}  // namespace fr

#define assert(...)                                                                                   \
  ([&] {                                                                                              \
    ::fr::assertion fr_c;                                                                             \
    const bool fr_holds = bool(fr_c << __VA_ARGS__);                                                  \
    fr_check_assert(fr_holds, #__VA_ARGS__, __LINE__, __FILE__, fr_c.values, fr_c.count);             \
  }())
#else
#define assert(...) ((void)sizeof((__VA_ARGS__) ? 1 : 0))
#endif
