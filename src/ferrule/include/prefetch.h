// What the dialect has beyond Metal stands in a namespace of its own.
#pragma once

namespace fr {
namespace ferrule {

// Ask for the memory of n elements at p, to read it, or to write it where they are not const. Any
// address will do: what is not mapped is not asked for.
template <class T> FR_FN void prefetch(T* p, uint64_t n) {
#if FR_CUDA
  constexpr uint64_t line = 32;  // a sector, of which the L2 reads one at least
#else
  constexpr uint64_t line = 64;
#endif
  const uint64_t begin = reinterpret_cast<uint64_t>(p), end = begin + n * sizeof(T);
  for (uint64_t at = begin / line * line; at < end; at += line) {
#if FR_CUDA
    asm volatile("prefetch.L2 [%0];" ::"l"(at));
#else
    __builtin_prefetch(reinterpret_cast<const void*>(at), !metal::is_const_v<T>);
#endif
  }
}

}  // namespace ferrule
}  // namespace fr
