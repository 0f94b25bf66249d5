/* How a call's arrays lie in memory. Knows no array library; valid as C11 and as C++17. */
#ifndef FERRULE_ARRAYS_H
#define FERRULE_ARRAYS_H

#include <stddef.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "numbers.h"
#include "rule.h"

/* The elements of an array, where they can be counted. */
static inline int64_t fr_count(int32_t ndim, const int64_t* sizes) {
  int64_t count = 1;
  for (int32_t i = 0; i < ndim; i++) count *= sizes[i];
  return count;
}

/* A page fault for each 4 KB is dear where memory is large. */
static inline void fr_use_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  uintptr_t start = ((uintptr_t)memory + 4095) & ~(uintptr_t)4095;
  uintptr_t end = ((uintptr_t)memory + bytes) & ~(uintptr_t)4095;
  madvise((void*)start, end - start, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

/* Whether elements lie one after the other, row by row. */
static inline bool fr_row_contiguous(int32_t ndim, const int64_t* sizes, const int64_t* strides) {
  int64_t step = 1;
  for (int32_t i = ndim - 1; i >= 0; i--) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1 && strides[i] != step) return false;
    step *= sizes[i];
  }
  return true;
}

/* The strides of an array that is so. */
static inline void fr_row_strides(int32_t ndim, const int64_t* sizes, int64_t* strides) {
  int64_t step = 1;
  for (int32_t i = ndim - 1; i >= 0; i--) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
}

/* `fr::extent` of include/cuda_bounds.h: the elements that an array's subscripts reach. */
typedef struct {
  int64_t first;
  uint64_t count;
  uint32_t narrow, unused;
} fr_extent;

/* That of an array, given its strides in elements; NULL: row by row without gaps. One that is absent or
 * empty has no address. The same as `extent` of ferrule/spec.py. */
static inline fr_extent fr_extent_of(const void* pointer, int32_t ndim, const int64_t* sizes, const int64_t* strides) {
  fr_extent e = {0, pointer ? UINT64_C(1) : UINT64_C(0), 0, 0};
  int64_t last = 0;
  for (int32_t d = 0; d < ndim; d++) {
    if (sizes[d] == 0) e.count = 0;
    if (!strides) {
      e.count *= (uint64_t)sizes[d];
    } else if (sizes[d] > 0) {
      int64_t step = (sizes[d] - 1) * strides[d];
      *(step < 0 ? &e.first : &last) += step;
    }
  }
  if (strides && e.count) e.count = (uint64_t)(last - e.first) + 1;
  if (!e.count) e.first = 0;
  e.narrow = e.count < UINT32_C(1) << 31 ? (uint32_t)e.count : UINT32_C(1) << 31;
  return e;
}

/* The inputs of a call, a place each; of those that are no arrays only `inputs` is read. */
typedef struct {
  int32_t count;
  const fr_rule_input* inputs;
  void* const* pointers;
  const int64_t* const* strides;
  uint64_t arrays, written;  /* a bit each: those that are there; those written in place */
} fr_given;

/* Between which addresses an array's elements lie. */
static inline void fr_range(const fr_given* given, int32_t i, uintptr_t* start, uintptr_t* end) {
  const fr_rule_input* input = &given->inputs[i];
  int64_t first = 0, last = 0, size = fr_item_bytes[input->dtype];
  *start = *end = (uintptr_t)given->pointers[i];
  for (int32_t d = 0; d < input->ndim; d++) {
    if (input->sizes[d] == 0) return;
    int64_t step = (input->sizes[d] - 1) * given->strides[i][d];
    *(step < 0 ? &first : &last) += step;
  }
  *end = *start + (uintptr_t)((last + 1) * size);
  *start += (uintptr_t)(first * size);
}

/* Finds inputs that share memory with one that is written in place: what is read is what was there
 * before, so they are to be copied (`shared`, a bit each). False where two share memory that are
 * written, or one has many elements in one place; `wrong` says which, in the last case twice. */
static inline bool fr_keep_apart(const fr_given* given, uint64_t* shared, int32_t wrong[2]) {
  *shared = 0;
  if (!given->written) return true;
  for (int32_t i = 0; i < given->count; i++) {
    if (!((given->arrays & given->written) >> i & 1)) continue;
    const fr_rule_input* input = &given->inputs[i];
    uintptr_t start, end, other, stop;
    wrong[0] = wrong[1] = i;
    for (int32_t d = 0; d < input->ndim; d++)
      if (input->sizes[d] > 1 && given->strides[i][d] == 0) return false;
    fr_range(given, i, &start, &end);
    for (int32_t j = 0; j < given->count; j++) {
      if (j == i || !(given->arrays >> j & 1)) continue;
      fr_range(given, j, &other, &stop);
      if (start >= end || other >= stop || start >= stop || other >= end) continue;
      wrong[1] = j;
      if (given->written >> j & 1) return false;
      *shared |= UINT64_C(1) << j;
    }
  }
  return true;
}

#endif
