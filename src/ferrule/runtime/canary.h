/* Canaries: bytes beside outputs on the CPU that no kernel may write. They are filled before a launch and looked
 * at after it, so that a wrong index is an error that names its kernel, and not a heap that breaks later.
 *
 * Where ferrule allocates (NumPy, MLX), the memory is larger by them. Where the library does (torch), they are
 * what the C library rounded the allocation up by: often 4 to 15 bytes, sometimes none.
 *
 * Valid as C11 and as C++17.
 */
#ifndef FERRULE_CANARY_H
#define FERRULE_CANARY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FR_CANARY 64 /* bytes, on each side: a cache line, so that the array is aligned as the memory is */

/* No number that kernels like to write, in any dtype; no byte twice. */
static const unsigned char fr_canary[FR_CANARY] = {
    0xd3, 0x9b, 0x6e, 0xc5, 0xa7, 0xf2, 0x8d, 0xb6, 0xe9, 0x93, 0xca, 0x76, 0xad, 0xd9, 0x87, 0xf5,
    0xb3, 0xe6, 0x9d, 0xc9, 0x7a, 0xd6, 0xab, 0x8e, 0xf3, 0xbc, 0x97, 0xe5, 0xcd, 0x79, 0xda, 0xa6,
    0x8b, 0xf6, 0xb9, 0x9e, 0xe3, 0xc7, 0x75, 0xdc, 0xa9, 0x96, 0xfa, 0xb5, 0xce, 0xea, 0x7c, 0xd5,
    0xac, 0x9a, 0xf9, 0xba, 0xcb, 0xec, 0x73, 0xd7, 0xae, 0x95, 0xf7, 0xbd, 0xc6, 0xe7, 0x7e, 0xdb};

static inline void fr_put_canary(void* at, size_t bytes) { memcpy(at, fr_canary, bytes); }

/* How many of these bytes lie up to the last one that was written; 0 where none was. */
static inline int fr_past_end(const void* at, size_t bytes) {
  const unsigned char* now = (const unsigned char*)at;
  if (!memcmp(now, fr_canary, bytes)) return 0;
  while (bytes && now[bytes - 1] == fr_canary[bytes - 1]) bytes--;
  return (int)bytes;
}

/* The same before a start: how far before the end of a whole canary the first byte lies that was written. */
static inline int fr_before_start(const void* at) {
  const unsigned char* now = (const unsigned char*)at;
  int first = 0;
  if (!memcmp(now, fr_canary, FR_CANARY)) return 0;
  while (now[first] == fr_canary[first]) first++;
  return FR_CANARY - first;
}

/* How many bytes behind memory of glibc's malloc belong to it, as malloc_usable_size says; FR_CANARY at most. That
 * function would follow any address, and crash. The word before it has the size, and is looked at first: 0 where
 * it is not what malloc writes there for so many bytes. */
static inline size_t fr_slack(const void* memory, size_t bytes) {
#if defined(__GLIBC__) && UINTPTR_MAX > UINT32_MAX
  enum { MAPPED = 2, FLAGS = 7, HEADER = 8, MOST = 256, PAGES = 16384 };
  uint64_t size;
  if (!memory || (uintptr_t)memory % 4096 < 16) return 0;
  memcpy(&size, (const char*)memory - HEADER, sizeof size);
  uint64_t used = bytes + (size & MAPPED ? 2 * HEADER : HEADER);
  uint64_t has = size & ~(uint64_t)FLAGS;
  if (has < used || has - used > (size & MAPPED ? PAGES : MOST) || size & 8) return 0;
  return has - used < FR_CANARY ? (size_t)(has - used) : FR_CANARY;
#else
  (void)memory;
  (void)bytes;
  return 0;
#endif
}

#endif
