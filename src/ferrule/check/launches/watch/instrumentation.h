// What -fsanitize=thread makes a compiler call.
#pragma once
#include "accesses.h"

HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}

// Few registers are needed for most accesses: what remains is a call that does not come back here.
#define ACCESS(NAME, BYTES, WRITE)                                                         \
  HOOK void __tsan_##NAME(void* p) {                                                       \
    if (LIKELY(plain(uintptr_t(p), BYTES, WRITE, CALLER))) return;                         \
    access(uintptr_t(p), BYTES, WRITE, false, CALLER);                                     \
  }
#define CHANGE(NAME, BYTES)                                                                \
  HOOK void __tsan_##NAME(void* p) {                                                       \
    access(uintptr_t(p), BYTES, false, false, CALLER);                                     \
    access(uintptr_t(p), BYTES, true, false, CALLER);                                      \
  }
#define ACCESSES(BYTES)                                                                    \
  ACCESS(read##BYTES, BYTES, false) ACCESS(write##BYTES, BYTES, true)                      \
  ACCESS(unaligned_read##BYTES, BYTES, false) ACCESS(unaligned_write##BYTES, BYTES, true)  \
  ACCESS(volatile_read##BYTES, BYTES, false) ACCESS(volatile_write##BYTES, BYTES, true)    \
  ACCESS(unaligned_volatile_read##BYTES, BYTES, false)                                     \
  ACCESS(unaligned_volatile_write##BYTES, BYTES, true)                                     \
  CHANGE(read_write##BYTES, BYTES) CHANGE(unaligned_read_write##BYTES, BYTES)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
#undef ACCESSES
#undef CHANGE
#undef ACCESS

HOOK void __tsan_read_range(void* p, size_t n) { access_range(uintptr_t(p), n, false, CALLER); }
HOOK void __tsan_write_range(void* p, size_t n) { access_range(uintptr_t(p), n, true, CALLER); }
HOOK void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access_range(uintptr_t(from), n, false, CALLER), access_range(uintptr_t(to), n, true, CALLER);
  return memcpy(to, from, n);
}
HOOK void* __tsan_memmove(void* to, const void* from, size_t n) {
  access_range(uintptr_t(from), n, false, CALLER), access_range(uintptr_t(to), n, true, CALLER);
  return memmove(to, from, n);
}
HOOK void* __tsan_memset(void* to, int v, size_t n) {
  access_range(uintptr_t(to), n, true, CALLER);
  return memset(to, v, n);
}

#define FETCH(BITS, T, NAME, OPERATION)                                                       \
  HOOK T __tsan_atomic##BITS##_fetch_##NAME(volatile T* p, T v, int) {                        \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    *p = T(OPERATION);                                                                        \
    return old;                                                                               \
  }
#define COMPARE(BITS, T, HOW)                                                                \
  HOOK int __tsan_atomic##BITS##_compare_exchange_##HOW(volatile T* p, T* c, T v, int, int) { \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == *c) {                                                                          \
      *p = v;                                                                                 \
      return 1;                                                                               \
    }                                                                                         \
    *c = old;                                                                                 \
    return 0;                                                                                 \
  }
#define ATOMICS(BITS, T)                                                                      \
  HOOK T __tsan_atomic##BITS##_load(const volatile T* p, int) {                               \
    atomic_access(uintptr_t(p), sizeof(T), true, false, CALLER);                              \
    return *p;                                                                                \
  }                                                                                           \
  HOOK void __tsan_atomic##BITS##_store(volatile T* p, T v, int) {                            \
    atomic_access(uintptr_t(p), sizeof(T), false, true, CALLER);                              \
    *p = v;                                                                                   \
  }                                                                                           \
  HOOK T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) {                            \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    *p = v;                                                                                   \
    return old;                                                                               \
  }                                                                                           \
  COMPARE(BITS, T, strong) COMPARE(BITS, T, weak)                                             \
  HOOK T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T c, T v, int, int) {      \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == c) *p = v;                                                                     \
    return old;                                                                               \
  }                                                                                           \
  FETCH(BITS, T, add, old + v) FETCH(BITS, T, sub, old - v) FETCH(BITS, T, and, old & v)      \
  FETCH(BITS, T, or, old | v) FETCH(BITS, T, xor, old ^ v) FETCH(BITS, T, nand, ~(old & v))
ATOMICS(8, uint8_t) ATOMICS(16, uint16_t) ATOMICS(32, uint32_t) ATOMICS(64, uint64_t)
#undef ATOMICS
#undef COMPARE
#undef FETCH

HOOK void __tsan_atomic_thread_fence(int) {
  if (fr_watch_current == NOBODY) return;
  advance();
  w.fenced[fr_watch_current] = w.epoch - 1;
}
HOOK void __tsan_atomic_signal_fence(int) {}
