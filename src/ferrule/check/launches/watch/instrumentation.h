// What -fsanitize=thread makes a compiler call.
#pragma once
#include "accesses.h"

HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}

#define ACCESS(BITS, BYTES)                                                                                   \
  HOOK void __tsan_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }                 \
  HOOK void __tsan_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }                 \
  HOOK void __tsan_unaligned_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }       \
  HOOK void __tsan_unaligned_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }       \
  HOOK void __tsan_volatile_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }        \
  HOOK void __tsan_volatile_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }        \
  HOOK void __tsan_unaligned_volatile_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); } \
  HOOK void __tsan_unaligned_volatile_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }  \
  HOOK void __tsan_read_write##BITS(void* p) {                                                                \
    access(uintptr_t(p), BYTES, false, false, CALLER), access(uintptr_t(p), BYTES, true, false, CALLER);      \
  }                                                                                                           \
  HOOK void __tsan_unaligned_read_write##BITS(void* p) {                                                      \
    access(uintptr_t(p), BYTES, false, false, CALLER), access(uintptr_t(p), BYTES, true, false, CALLER);      \
  }
ACCESS(1, 1) ACCESS(2, 2) ACCESS(4, 4) ACCESS(8, 8) ACCESS(16, 16)
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
  HOOK int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* c, T v, int, int) { \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == *c) {                                                                          \
      *p = v;                                                                                 \
      return 1;                                                                               \
    }                                                                                         \
    *c = old;                                                                                 \
    return 0;                                                                                 \
  }                                                                                           \
  HOOK int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* c, T v, int, int) {  \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == *c) {                                                                          \
      *p = v;                                                                                 \
      return 1;                                                                               \
    }                                                                                         \
    *c = old;                                                                                 \
    return 0;                                                                                 \
  }                                                                                           \
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
#undef FETCH

HOOK void __tsan_atomic_thread_fence(int) {
  if (fr_watch_current == NOBODY) return;
  advance();
  w.fenced[fr_watch_current] = w.epoch - 1;
}
HOOK void __tsan_atomic_signal_fence(int) {}
