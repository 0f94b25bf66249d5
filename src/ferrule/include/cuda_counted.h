// What accesses of a kernel's arrays find on a GPU: counted by line in a table of the module, which
// `ferrule.check.gpu` reads.
#pragma once

namespace fr {
namespace counted {

enum what : unsigned { NOTHING, READ, WRITE, NAN_STORED, INFINITY_STORED };

// One line of the author's that did something, and the thread that was the first. `key` is made of line, array and what.
struct entry {
  unsigned long long key, count;
  long long index;
  unsigned long long elements;  // that the array has
  unsigned group[3], thread[3];
};
// Elements of an output that nothing wrote: how many, and the first, as ~index. Written by what looks for them.
struct left {
  unsigned long long count, first;
};
constexpr unsigned ROOM = 256, ARRAYS = 64;
struct table {
  entry all[ROOM];
  left unwritten[ARRAYS];
  unsigned long long dropped, launches;  // what found no room; launches that have begun
  unsigned loaded, unused;               // whether a NaN (1) or an infinity (2) was loaded
};

}  // namespace counted
}  // namespace fr

extern "C" {
FR_DECL fr::counted::table fr_counted;
}

namespace fr {
namespace counted {

#if defined(__CUDACC_RTC__)
FR_FN unsigned long long swapped(unsigned long long* at, unsigned long long from, unsigned long long to) {
  return atomicCAS(at, from, to);
}
FR_FN void raise(unsigned long long* at) { atomicAdd(at, 1ull); }
FR_FN void mark(unsigned* at, unsigned bits) { atomicOr(at, bits); }
#else
FR_FN unsigned long long swapped(unsigned long long* at, unsigned long long from, unsigned long long to) {
  __atomic_compare_exchange_n(at, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return from;
}
FR_FN void raise(unsigned long long* at) { __atomic_fetch_add(at, 1, __ATOMIC_RELAXED); }
FR_FN void mark(unsigned* at, unsigned bits) { __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
#endif

// A launch begins: its first thread says so.
FR_FN void begin() {
#if defined(__CUDACC_RTC__)
  if (!(blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x | threadIdx.y | threadIdx.z)) raise(&fr_counted.launches);
#endif
}

template <class T> constexpr bool floats =
    metal::is_same_v<T, float> || metal::is_same_v<T, half> || metal::is_same_v<T, bfloat> || metal::is_same_v<T, double>;

// 1: a NaN, 2: an infinity.
template <class T> FR_FN unsigned not_finite(const T& v) {
  if constexpr (floats<T>) {
    const auto f = static_cast<metal::conditional_t<sizeof(T) == 8, double, float>>(v);
    return f != f ? 1 : f - f != f - f ? 2 : 0;
  }
  return 0;
}

// Counts, once more, what a line does; the first time with who does it. Not inlined: it stands behind every access.
// All by value: what has an address is in memory.
FR_DECL __attribute__((noinline)) void count(unsigned line, unsigned array, unsigned what, long long index,
                                             unsigned long long elements, metal::uint3 group, metal::uint3 thread) {
  const unsigned long long key = static_cast<unsigned long long>(line) << 32 | array << 8 | what;
  for (unsigned i = 0; i < ROOM; ++i) {
    entry& e = fr_counted.all[(line + array + i) % ROOM];
    const unsigned long long before = swapped(&e.key, 0, key);
    if (before && before != key) continue;
    raise(&e.count);
    if (before) return;
    e.index = index, e.elements = elements;
    e.group[0] = group.x, e.group[1] = group.y, e.group[2] = group.z;
    e.thread[0] = thread.x, e.thread[1] = thread.y, e.thread[2] = thread.z;
    return;
  }
  raise(&fr_counted.dropped);
}

// Who accesses what.
struct spot {
  unsigned array, line;
  const metal::uint3 *group, *thread;
  FR_FN spot on(unsigned l) const { return {array, l, group, thread}; }
  FR_FN void note(unsigned what, long long index, unsigned long long elements = 0) const {
    count(line, array, what, index, elements, *group, *thread);
  }
  template <class T> FR_FN void stores(const T& v, long long index) const {
#if defined(FR_COUNTED_VALUES)
    if (const unsigned bad = not_finite(v)) note(bad == 1 ? NAN_STORED : INFINITY_STORED, index);
#endif
  }
  template <class T> FR_FN void loads(const T& v) const {
#if defined(FR_COUNTED_VALUES)
    if (const unsigned bad = not_finite(v)) mark(&fr_counted.loaded, bad);
#endif
  }
};

}  // namespace counted
}  // namespace fr
