// Accesses outside of all arrays: they find zeros, and what is written there is nobody's.
#pragma once
#include "state.h"

#include <sys/mman.h>

namespace {

// Lets an access outside go on: it finds zeros. What was written outside before is nobody's.
void serve(uintptr_t address, unsigned size, bool write) {
  if (w.dirty) memset(w.dirty, 0, PAGE), w.dirty = nullptr;
  for (uintptr_t p = address & ~(PAGE - 1); p < address + size; p += PAGE) {
    void* page = reinterpret_cast<void*>(p);
    bool there = false;
    for (unsigned i = 0; i < w.pages && !there; ++i) there = w.page[i] == page;
    if (!there) {
      if (w.pages == MOST_PAGES) {  // the oldest makes room
        mmap(w.page[w.next_page], PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      }
      if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        leave();
      w.page[w.next_page] = page;
      w.next_page = (w.next_page + 1) % MOST_PAGES;
      if (w.pages < MOST_PAGES) ++w.pages;
    }
    if (write) w.dirty = page;
  }
}

// The pages that an array shares with what is outside are mapped already.
bool is_array_page(const array_state& a, uintptr_t page) {
  return page >= (a.begin & ~(PAGE - 1)) && page < ((a.end + PAGE - 1) & ~(PAGE - 1));
}

__attribute__((noinline)) void outside(unsigned number, uintptr_t address, unsigned size, bool write, uintptr_t pc) {
  const array_state& a = w.array[number];
  if (watch_event* e = add(write ? BOUNDS_WRITE : BOUNDS_READ, int(number), pc)) {
    e->index = int64_t(address - a.begin);
    e->size = size;
  }
  const uintptr_t last = (address + size - 1) & ~(PAGE - 1);
  for (uintptr_t p = address & ~(PAGE - 1); p <= last; p += PAGE)
    if (!is_array_page(a, p)) serve(p < address ? address : p, 1, write);
}

// What of an access that crosses an array's end is inside of it.
bool inside(const array_state& a, uintptr_t& address, unsigned& size) {
  const uintptr_t from = address < a.begin ? a.begin : address, to = address + size < a.end ? address + size : a.end;
  if (from >= to) return false;
  address = from, size = unsigned(to - from);
  return true;
}

__attribute__((noinline)) void foreign(uintptr_t address, uintptr_t pc) {
  const auto in = [&](uintptr_t begin, uintptr_t end) { return address >= begin && address < end; };
  if (in(w.fibers_begin, w.fibers_end) || in(w.scratch_begin, w.scratch_end) || in(w.stack_begin, w.stack_end) ||
      in(w.image_begin, w.image_end) || in(uintptr_t(&w), uintptr_t(&w + 1)))
    return;
  if (in(w.options.launch_begin, w.options.launch_end)) return;
  if (watch_event* e = add(WILD, -1, pc)) e->value[0] = address;
  leave();
}

}  // namespace
