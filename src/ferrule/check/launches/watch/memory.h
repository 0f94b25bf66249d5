// Where arrays lie while a launch is watched, and the cells that say who accessed them.
#pragma once
#include "state.h"

#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>

namespace {

int find_image(dl_phdr_info* info, size_t, void*) {
  const uintptr_t here = uintptr_t(&w);
  uintptr_t low = ~uintptr_t(0), high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
    low = begin < low ? begin : low, high = end > high ? end : high;
  }
  if (here < low || here >= high) return 0;
  w.image_begin = info->dlpi_addr, w.image_end = high;
  return 1;
}

// Large pages: a launch touches its memory once.
void in_large_pages(void* at, uint64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes >= (uint64_t(4) << 20)) madvise(at, bytes, MADV_HUGEPAGE);
#else
  (void)at, (void)bytes;
#endif
}

bool map_array(unsigned number, uint64_t bytes) {
  array_state& a = w.array[number];
  // Not in step: what misses by a power of two must not hit another array.
  a.begin = w.base + number * (ROOM + STAGGER) + BEFORE, a.end = a.begin + bytes;
  a.reads = int64_t(bytes), a.writes = a.output ? a.reads : 0;
  if (w.options.copy && !a.shared) return true;  // copy 0 has mapped it
  const uint64_t length = (bytes + PAGE - 1) & ~(PAGE - 1);
  void* at = reinterpret_cast<void*>(a.begin);
  if (length && mmap(at, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    return false;
  in_large_pages(at, length);
  return true;
}

bool map_cells(array_state& a, uint64_t item) {
  a.loose = a.floats == 5;
  if (a.loose) a.floats = 0;
  a.grain = item % 4 == 0 ? 2 : item % 2 == 0 ? 1 : 0;
  const uint64_t count = ((a.end - a.begin) >> a.grain) + 1;
  void* cells = mmap(nullptr, count * sizeof(cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells != MAP_FAILED) in_large_pages(cells, count * sizeof(cell));
  a.cells = cells == MAP_FAILED ? nullptr : static_cast<cell*>(cells);
  a.reads = a.writes = 0;
  a.touched = static_cast<unsigned char*>(calloc((count >> TOUCHED) + 2, 1));
  return a.cells && a.touched;
}

void unmap() {
  for (unsigned i = 0; i < w.used; ++i) {
    if (w.array[i].cells) munmap(w.array[i].cells, (((w.array[i].end - w.array[i].begin) >> w.array[i].grain) + 1) * sizeof(cell));
    free(w.array[i].touched);
  }
  if (w.base && !w.options.copy) munmap(reinterpret_cast<void*>(w.base), MOST_ARRAYS * ROOM);
  if (w.group_epoch) munmap(w.group_epoch, w.most_groups * sizeof(uint32_t));
  if (w.group_unit) munmap(w.group_unit, w.most_groups * sizeof(uint64_t));
  if (w.group_threads) munmap(w.group_threads, w.most_groups * sizeof(unsigned));
}

template <class T> bool map_table(T*& table, uint64_t count) {
  void* at = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  table = at == MAP_FAILED ? nullptr : static_cast<T*>(at);
  return table != nullptr;
}

}  // namespace
