// What a text that is compiled for checking tells check/launches/watch, beside what the compiler's own
// instrumentation does. Other texts do not know these names.
//
// Hooks that blame the author's line are calls, never inlined: their return address says which.
#pragma once
#if defined(FR_CHECKED)

// What is not the author's is not watched. Apart: not inlined either, for what is inlined into an
// author's function is watched with it.
#define FR_PER_THREAD  // a checked launch runs on one thread, and knows where its memory is
#define FR_QUIET __attribute__((no_sanitize("thread", "undefined")))
#define FR_APART inline __attribute__((noinline, no_sanitize("thread", "undefined")))
#define FR_WATCH extern "C" __attribute__((visibility("hidden")))

FR_WATCH unsigned fr_watch_current;  // the thread that runs, by its index in the threadgroup; -1: none
FR_WATCH unsigned fr_watch_reversed;  // whether threads and simdgroups run in the opposite order
FR_WATCH void fr_watch_group(unsigned long unit, unsigned threads, const void* scratch, unsigned long bytes,
                             const char* stacks, unsigned long stack_bytes);
FR_WATCH int fr_watch_goes_on(unsigned thread);
FR_WATCH void fr_watch_thread_done(unsigned thread);
FR_WATCH unsigned fr_watch_rounds[];  // of loops with barriers, by thread
FR_WATCH void fr_watch_barrier(unsigned long place, unsigned flags, const void* caller);
FR_WATCH void fr_watch_release(const unsigned char* states, unsigned long stride, unsigned threads, unsigned char done);
FR_WATCH void fr_watch_operation(const void* caller);
FR_WATCH void fr_watch_simd_fence(unsigned first, unsigned count, unsigned mask, unsigned flags);
// A lane reads one that is not there. What it gets instead of its own value: each byte, or 0.
FR_WATCH unsigned fr_watch_lane(unsigned thread, unsigned from, unsigned lanes, const char* operation);
FR_WATCH void* fr_watch_shared(const void* key, unsigned line, const char* name, unsigned long bytes,
                               unsigned long item, int floats);
FR_WATCH void fr_watch_shift(unsigned bits, long count);
FR_WATCH bool fr_watch_half(float value);  // becomes infinite; true: the largest number shall be taken instead
FR_WATCH void fr_watch_unset(const char* name);
FR_WATCH void fr_watch_unset_element(const char* name, unsigned long index, unsigned long row);  // row: its length; 0
FR_WATCH void fr_watch_row(const char* name, unsigned long index);  // of `name[…][index]`, which has so many
// Not finite, by a function of so many numbers that are, of which these are the first.
FR_WATCH void fr_watch_made(float value, unsigned operands, float first, float second);
FR_WATCH void fr_watch_range(const void* at, unsigned long bytes, int write);  // that a function accesses for its caller
// Of threads in CUDA (cuda_cpu_lanes.h and others).
FR_WATCH unsigned fr_watch_lanes(unsigned what, unsigned thread, unsigned other, unsigned lanes);
FR_WATCH void fr_watch_warp(unsigned first, unsigned mask, unsigned absent);
FR_WATCH unsigned fr_watch_open_barrier();  // the time at which it opens
FR_WATCH void fr_watch_passed_barrier(unsigned time);
FR_WATCH void fr_watch_yield();
FR_WATCH void fr_watch_trap(const void* caller);
FR_WATCH unsigned fr_watch_to_shared(const volatile void* at);
FR_WATCH void* fr_watch_from_shared(unsigned at);
#if defined(FR_STOPS)
FR_WATCH bool fr_watch_waits;      // the thread that ran waits at a line (stops.h)
FR_WATCH void fr_watch_stopped();  // shows what it has
#endif
FR_WATCH void fr_watch_leave();  // defined by fiber.h: ends the thread that runs

namespace fr {
// A local variable is read; `set` says whether it has a value (source/unset.py).
inline __attribute__((always_inline)) void used(bool set, const char* name) {
  if (!set) fr_watch_unset(name);
}

#define FR_ASKED inline __attribute__((always_inline, no_sanitize("undefined")))

// Which elements of an array are set (source/unset_elements.py). An author's macro has no name that begins
// so.
template <class T> struct extents {
  static constexpr unsigned long count = 1;
  static constexpr bool begin_unset = __has_trivial_constructor(T);  // others may set themselves
  FR_ASKED static constexpr unsigned long of(unsigned) { return 1; }
};
template <class T, unsigned long N> struct extents<T[N]> {
  static constexpr unsigned long count = N * extents<T>::count;
  static constexpr bool begin_unset = extents<T>::begin_unset;
  FR_ASKED static constexpr unsigned long of(unsigned dim) { return dim == 1 ? N : extents<T>::of(dim - 1); }
};
template <class A> struct fr_elements {
  using E = extents<A>;
  bool is_set[E::count] = {};
  unsigned long place = 0;  // of the subscripts up to here; `count` where one of them is outside

  // The n-th subscript.
  template <class I> FR_ASKED I fr_at(unsigned n, I index, const char*) {
    place = next(n, static_cast<unsigned long>(index));
    return index;
  }
  // The last one, of an element that is set, read, or read and set.
  template <class I> FR_ASKED I fr_set(unsigned n, I index, const char*) {
    const unsigned long here = next(n, static_cast<unsigned long>(index));
    if (here < E::count) is_set[here] = true;
    return index;
  }
  template <class I> FR_ASKED I fr_read(unsigned n, I index, const char* name) {
    const unsigned long here = next(n, static_cast<unsigned long>(index));
    if (E::begin_unset && here < E::count && !is_set[here])
      fr_watch_unset_element(name, here, n == 2 ? E::of(n) : 0);
    return index;
  }
  template <class I> FR_ASKED I fr_change(unsigned n, I index, const char* name) {
    return fr_set(n, fr_read(n, index, name), name);
  }

 private:
  FR_ASKED unsigned long next(unsigned n, unsigned long index) const {
    if (index >= E::of(n) || (n > 1 && place == E::count)) return E::count;
    return n == 1 ? index : place * E::of(n) + index;
  }
};

// How many objects of a class a row of an array has, which is subscripted for the K-th time; else 0.
template <class A, unsigned K> struct objects_in_row { static constexpr unsigned long value = 0; };
template <class A, unsigned K> struct objects_in_row<A&, K> : objects_in_row<A, K> {};
template <class T, unsigned long N, unsigned K> struct objects_in_row<T[N], K> : objects_in_row<T, K - 1> {};
template <class T, unsigned long N> struct objects_in_row<T[N], 1> {
  static constexpr unsigned long value = __is_class(T) ? N : 0;
};

// The K-th subscript of an array (source/rows.py).
template <class A, unsigned K, class I> FR_ASKED I fr_in_row(I index, const char* name) {
  constexpr unsigned long length = objects_in_row<A, K>::value;
  if constexpr (length != 0) {
    if (static_cast<unsigned long>(index) == length) fr_watch_row(name, length);
  }
  return index;
}

// What a lane got from one that is not there, of what fr_watch_lane says.
template <class T> FR_QUIET void stray(T& value, unsigned byte) {
  if (byte) __builtin_memset(static_cast<void*>(&value), int(byte), sizeof value);
}
FR_QUIET inline void stray(bool& value, unsigned byte) {
  if (byte) value = byte & 0x80;
}
}  // namespace fr

#else
#define FR_PER_THREAD thread_local
#define FR_QUIET
#define FR_APART FR_FN
#endif
