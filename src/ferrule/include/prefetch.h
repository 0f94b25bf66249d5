// What the dialect has beyond Metal stands in a namespace of its own.
#pragma once

namespace fr {
namespace detail {

template <class T> FR_FN void prefetch_line(T* p, int64_t byte) {
  const char* at = reinterpret_cast<const char*>(p) + byte;
#if FR_CUDA
  asm volatile("prefetch.L2 [%0];" ::"l"(at));
#else
  __builtin_prefetch(at, !metal::is_const_v<T>);
#endif
}

}  // namespace detail

namespace ferrule {

// Ask for the memory of n elements at p, a megabyte at most, to read it, or to write it where they
// are not const. Any address will do: what is not mapped is not asked for.
template <class T> FR_FN void prefetch(T* p, int64_t n) {
  constexpr int64_t line = FR_CUDA ? 32 : 64;  // on a GPU a sector, of which the L2 reads one at least
  constexpr int64_t most = (1 << 20) / sizeof(T);
  const int64_t bytes = (n < most ? n : most) * int64_t(sizeof(T));
  for (int64_t byte = 0; byte < bytes; byte += line) detail::prefetch_line(p, byte);
  if (bytes > 0) detail::prefetch_line(p, bytes - 1);  // in one more where p is not the first of its line
}

}  // namespace ferrule
}  // namespace fr
