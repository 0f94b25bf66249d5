// Shared memory and copies of CUDA texts that are checked: see checked.h.
#pragma once

#if defined(FR_CHECKED)
namespace fr {
namespace detail {
#define FR_ELEMENTS(NAME, T)                                                                    \
  template <> struct scalar_of<NAME##1> { using type = T; };                                    \
  template <> struct scalar_of<NAME##2> { using type = T; };                                    \
  template <> struct scalar_of<NAME##3> { using type = T; };                                    \
  template <> struct scalar_of<NAME##4> { using type = T; };
FR_ELEMENTS(char, signed char) FR_ELEMENTS(uchar, unsigned char) FR_ELEMENTS(short, short)
FR_ELEMENTS(ushort, unsigned short) FR_ELEMENTS(int, int) FR_ELEMENTS(uint, unsigned)
FR_ELEMENTS(long, long) FR_ELEMENTS(ulong, unsigned long) FR_ELEMENTS(longlong, long long)
FR_ELEMENTS(ulonglong, unsigned long long) FR_ELEMENTS(float, float) FR_ELEMENTS(double, double)
#undef FR_ELEMENTS
template <> struct scalar_of<__half2> { using type = __half; };
template <> struct scalar_of<__nv_bfloat162> { using type = __nv_bfloat16; };
}  // namespace detail

// A shared variable of the block that runs; `key` is its declaration's.
template <class T> FR_FN T& checked_shared(const char* key, unsigned line, const char* name) {
  using S = typename detail::scalar_of<T>::type;
  constexpr int floats = metal::is_same_v<S, __half> ? 1 : metal::is_same_v<S, __nv_bfloat16> ? 2
                         : metal::is_same_v<S, float> ? 3 : metal::is_same_v<S, double> ? 4
                         : __is_class(S) || __is_union(S) ? 5 : 0;
  return *static_cast<T*>(fr_watch_shared(key, line, name, sizeof(T), sizeof(S), floats));
}
}  // namespace fr
#endif

FR_FN void* fr_memcpy(void* to, const void* from, size_t bytes) {
#if defined(FR_CHECKED)
  if (bytes) fr_watch_range(from, bytes, 0), fr_watch_range(to, bytes, 1);
#endif
  return __builtin_memcpy(to, from, bytes);
}
FR_FN void* fr_memmove(void* to, const void* from, size_t bytes) {
#if defined(FR_CHECKED)
  if (bytes) fr_watch_range(from, bytes, 0), fr_watch_range(to, bytes, 1);
#endif
  return __builtin_memmove(to, from, bytes);
}
FR_FN void* fr_memset(void* to, int value, size_t bytes) {
#if defined(FR_CHECKED)
  if (bytes) fr_watch_range(to, bytes, 1);
#endif
  return __builtin_memset(to, value, bytes);
}
namespace std {
using ::fr_memcpy;
using ::fr_memmove;
using ::fr_memset;
}  // namespace std
