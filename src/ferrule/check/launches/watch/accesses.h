// Who accessed what, and when: races, what was never written, and what is stored.
#pragma once
#include "floats.h"
#include "outside.h"

namespace {

bool in_this_group(record r) { return r.epoch >= w.group_first; }

// Whether nothing orders an earlier access of another thread before what the current one does now.
bool concurrent(const array_state& a, record r) {
  if (!in_this_group(r)) return !a.shared && r.epoch > w.acquired;
  if (r.thread == fr_watch_current) return false;
  if (r.epoch < (a.shared ? w.shared_since : w.device_since)) return false;
  if (r.epoch <= w.acquired_by[fr_watch_current]) return false;
  const unsigned simdgroup = fr_watch_current / 32;
  const uint32_t since = a.shared ? w.simd_shared[simdgroup] : w.simd_device[simdgroup];
  if (r.thread / 32 != simdgroup) return true;
  return r.epoch >= since && (!w.lanes_met || r.epoch >= w.lane_since[fr_watch_current][r.thread % 32]);
}

uint64_t group_of(record r, unsigned* threads) {
  uint64_t low = 0, high = w.groups;
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    (w.group_epoch[middle] <= r.epoch ? low : high) = middle;
  }
  *threads = w.group_threads[low];
  return w.group_unit[low];
}

void race(unsigned number, uintptr_t address, unsigned size, uintptr_t pc, record r, unsigned what) {
  watch_event* e = add(RACE, int(number), pc, w.image_begin + r.pc);
  if (!e) return;
  e->index = int64_t(address - w.array[number].begin);
  e->size = size;
  e->other_thread = r.thread;
  e->other_group = group_of(r, &e->other_threads);
  const bool barrier = in_this_group(r) && r.epoch < w.barrier_since;
  e->value[0] = what | (barrier ? 4 : 0);  // 1: the later one writes; 2: the earlier one; 4: a barrier is between
  e->value[1] = e->other_group != e->group;
  const unsigned ahead = (fr_watch_rounds[fr_watch_current] - r.round) & 63;
  e->later = e->value[1] ? 0 : ahead < 32 ? int(ahead) : int(ahead) - 64;
}

// What could not be known before the last store was made: its value.
__attribute__((noinline)) void settle() {
  pending_store& s = w.store;
  const array_state& a = w.array[s.array];
  if (s.conflicts && (w.options.same_values || memcmp(s.before, reinterpret_cast<void*>(s.address), s.size)))
    race(s.array, s.address, s.size, s.pc, s.other, 3);
  s.conflicts = false;
  if (a.floats == 3 && s.size == 4 && LIKELY((*reinterpret_cast<uint32_t*>(s.address) & 0x7f800000) != 0x7f800000)) {
  } else if (a.floats) {
    const unsigned item = a.floats == 4 ? 8 : a.floats == 3 ? 4 : 2;
    for (unsigned i = 0; i + item <= s.size; i += item) {
      uint64_t bits = 0;
      memcpy(&bits, reinterpret_cast<char*>(s.address) + i, item);
      const uint64_t infinite = a.floats == 4 ? 0x7ff0000000000000 : a.floats == 3 ? 0x7f800000 : a.floats == 2 ? 0x7f80 : 0x7c00;
      const uint64_t magnitude = bits & (~uint64_t(0) >> (65 - 8 * item));
      if (LIKELY(magnitude < infinite)) continue;
      const bool nan = magnitude > infinite;
      const unsigned sign = bits >> (8 * item - 1) ? 2 : 1;
      if (nan ? w.options.may_be_nan : w.options.may_be_infinite & sign) continue;
      const fault_origin* all = nan ? w.invalid : w.infinite;
      // What came from another thread was made by that one.
      const fault_origin& from = all[all[fr_watch_current].any() ? fr_watch_current : MOST_THREADS];
      if (!from.any() && KNOWS_ORIGINS) continue;  // that the author wrote
      if (watch_event* e = add(nan ? NAN_STORED : INFINITY_STORED, int(s.array), s.pc)) {
        tell_origins(*e, from);
        e->index = int64_t(s.address - a.begin);
        e->size = item;
        e->value[0] = bits;
      }
    }
  }
  s.size = 0;
}

// Whether two stores race depends on what is stored: that it is known what was there.
void collide(record other) {
  pending_store& s = w.store;
  if (!s.conflicts) memcpy(s.before, reinterpret_cast<void*>(s.address), s.size);
  s.conflicts = true, s.other = other;
}

record now(uintptr_t pc, bool atomic) {
  record r;
  r.epoch = w.epoch, r.thread = fr_watch_current, r.pc = pc - w.image_begin, r.atomic = atomic;
  r.round = fr_watch_rounds[fr_watch_current];
  return r;
}

void has_value(array_state& a, cell& c, unsigned bytes) {
  a.filled += unsigned(__builtin_popcount(bytes & ~c.written));
  c.written |= bytes;
}

void touch(unsigned number, array_state& a, cell& c, unsigned bytes, uintptr_t address, unsigned size, bool write,
           bool atomic, uintptr_t pc) {
  const record me = now(pc, atomic);
  if (a.shared && c.apart != w.group_first) {  // what an earlier threadgroup left is not there any more
    memset(&c, 0, sizeof c);
    c.apart = w.group_first;
  }
  if (!write && !a.written && !a.loose && (c.written & bytes) != bytes && w.options.uninitialised) {
    if (watch_event* e = add(UNINITIALISED, int(number), pc)) e->index = int64_t(address - a.begin), e->size = size;
    has_value(a, c, bytes);  // told once
  }
  if (w.options.races) {
    const auto conflicts = [&](record r, unsigned touched) {
      return r.epoch && (touched & bytes) && !(atomic && r.atomic) && concurrent(a, r);
    };
    if (write) {
      if (conflicts(c.read, c.read_bytes)) race(number, address, size, pc, c.read, 1);
      else if (conflicts(c.other, c.other_bytes)) race(number, address, size, pc, c.other, 1);
      if (conflicts(c.write, c.write_bytes)) {
        if (atomic || c.write.atomic) race(number, address, size, pc, c.write, 3);
        else collide(c.write);
      }
    } else {
      if (conflicts(c.write, c.write_bytes)) race(number, address, size, pc, c.write, 2);
      const bool mine = c.read.epoch && in_this_group(c.read) && c.read.thread == me.thread;
      const bool together = mine && c.read.epoch >= (a.shared ? w.shared_since : w.device_since);
      if (mine || !c.read.epoch || (in_this_group(c.read) && !concurrent(a, c.read))) {
        c.read_bytes = uint8_t(together ? c.read_bytes | bytes : bytes);
        c.read = me;
      } else {
        c.other_bytes = uint8_t(bytes);
        c.other = me;
      }
    }
  }
  if (write) {
    const bool mine = in_this_group(c.write) && c.write.thread == me.thread && c.write.epoch == me.epoch;
    c.write_bytes = uint8_t(mine ? c.write_bytes | bytes : bytes);
    c.write = me;
    has_value(a, c, bytes);
  }
}

__attribute__((noinline)) void watched(unsigned number, array_state& a, uintptr_t address, unsigned size, bool write, bool atomic, uintptr_t pc) {
  if (write && !atomic) {
    w.store.address = address, w.store.size = size < 16 ? size : 16, w.store.array = number, w.store.pc = pc;
    w.store.conflicts = false;
  }
  const uint64_t begin = address - a.begin, end = begin + size, grain = uint64_t(1) << a.grain;
  a.touched[begin >> (a.grain + TOUCHED)] = a.touched[(end - 1) >> (a.grain + TOUCHED)] = 1;
  if (write && !atomic && size == 4 && a.grain == 2 && !(begin & 3) && !a.shared) {  // most are an element's first
    cell& c = a.cells[begin >> 2];
    if (LIKELY(c.is_new())) {
      c.write = now(pc, false), c.write_bytes = c.written = 15, a.filled += 4;
      return;
    }
  }
  bool any = !a.loose || write;
  for (uint64_t c = begin >> a.grain; c <= (end - 1) >> a.grain; ++c) {
    const uint64_t first = c << a.grain, from = begin > first ? begin - first : 0;
    const uint64_t to = end < first + grain ? end - first : grain;
    const unsigned bytes = ((1u << to) - 1) & ~((1u << from) - 1);
    touch(number, a, a.cells[c], bytes, address, size, write, atomic, pc);
    any = any || (a.cells[c].written & bytes);
  }
  if (!any && w.options.uninitialised)
    if (watch_event* e = add(UNINITIALISED, int(number), pc)) e->index = int64_t(begin), e->size = size;
}

// Whether all is said of an access: it is inside of an array of which nothing is kept, or of the thread's own memory.
inline __attribute__((always_inline)) bool plain(uintptr_t address, unsigned size, bool write, uintptr_t pc) {
  if (__builtin_expect((fr_watch_current == NOBODY) | w.attention, 0)) return false;
  w.last = pc;
  const uint64_t number = (address - w.base) >> SLOT;
  if (LIKELY(number < w.used)) {
    const array_state& a = w.array[number];
    const int64_t from = int64_t(address - a.begin);
    return from >= 0 && from + int64_t(size) <= (write ? a.writes : a.reads);
  }
  return address - w.fibers_begin < w.fibers_end - w.fibers_begin && !(write && w.store.size);
}

__attribute__((noinline)) void access(uintptr_t address, unsigned size, bool write, bool atomic, uintptr_t pc) {
  if (__builtin_expect((fr_watch_current == NOBODY) | w.attention, 0)) {
    if (fr_watch_current == NOBODY) return;
    check_stop(pc);
    if (w.disarmed) arm();
  }
  w.last = pc;
  if (write && w.store.size) settle();  // a copy is announced as a write, then a read, and is made then
  const uint64_t number = (address - w.base) >> SLOT;
  if (LIKELY(number < w.used)) {
    array_state& a = w.array[number];
    if (LIKELY(address >= a.begin && address + size <= a.end)) {
      if (a.cells) watched(unsigned(number), a, address, size, write, atomic, pc);
      else if (write && !a.output)
        if (watch_event* e = add(WRITE_TO_INPUT, int(number), pc)) e->index = int64_t(address - a.begin), e->size = size;
      return;
    }
    outside(unsigned(number), address, size, write, pc);
    if (a.cells && inside(a, address, size)) watched(unsigned(number), a, address, size, write, atomic, pc);
    return;
  }
  foreign(address, pc);
}

void access_range(uintptr_t address, uint64_t size, bool write, uintptr_t pc) {
  for (uint64_t i = 0; i < size; i += 16) access(address + i, unsigned(size - i < 16 ? size - i : 16), write, false, pc);
}

// What this thread did before a fence is ordered before what others do who read its atomic afterwards.
// Where several atomics have one place in the table, what one was told the others are, too.
void pass_on(uintptr_t address) {
  constexpr uintptr_t SEVERAL = 1;
  auto& p = w.published[(address >> 2) % 256];
  uint32_t& mine = w.acquired_by[fr_watch_current];
  const bool known = p.address == address || p.address == SEVERAL;
  if (known && p.epoch > w.acquired) w.acquired = p.epoch;
  if (known && p.epoch > mine) mine = p.epoch;
  const uint32_t own = w.fenced[fr_watch_current], released = own > w.released ? own : w.released;
  if (!released) return;
  p.address = known ? p.address : p.address ? SEVERAL : address;
  if (p.epoch < released) p.epoch = released;
}

void atomic_access(uintptr_t address, unsigned size, bool read, bool write, uintptr_t pc) {
  if (fr_watch_current == NOBODY) return;
  pass_on(address);
  if (read) access(address, size, false, true, pc);
  if (write) access(address, size, true, true, pc);
}

void order(unsigned flags) {
  advance();
  w.barrier_since = w.epoch;
  if (flags & TO_DEVICE) w.device_since = w.epoch, w.released = w.epoch - 1;
  if (flags & TO_THREADGROUP) w.shared_since = w.epoch;
}

}  // namespace
