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
FR_WATCH void fr_watch_made(float value);  // not finite, by a function of numbers that are
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
