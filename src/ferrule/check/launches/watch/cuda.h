// What threads in CUDA tell (include/cuda_cpu_lanes.h and others), beside what all texts do.
#pragma once
#include "accesses.h"

namespace {

// fr::on_cpu::what of include/cuda_cpu_lanes.h.
enum : unsigned { LANE_NOT_NAMED, LANE_DOES_NOT_COME, LANE_NOT_THERE, LANE_WAITS_FOREVER, LANE_NOT_AT_BARRIER };

// A shared address of 32 bits: the array's number, and how far from a middle it is.
constexpr unsigned SHARED_BITS = 24, SHARED_MIDDLE = 1u << (SHARED_BITS - 1);

}  // namespace

// `other`: which waits for the lane, or is read by it; its number in the simdgroup.
HOOK unsigned fr_watch_lanes(unsigned what, unsigned thread, unsigned other, unsigned lanes) {
  const unsigned first = thread / 32 * 32;
  const bool waits = what == LANE_DOES_NOT_COME || what == LANE_NOT_AT_BARRIER;
  const unsigned who = waits && other < 32 ? first + other : thread;
  const uintptr_t pc = fr_watch_current == NOBODY ? w.operation[who] : CALLER;
  if (w.options.stray_bytes) return what == LANE_NOT_THERE && offset(pc) == w.options.strays_of ? w.options.stray_bytes : 0;
  const watch_kind kind = what == LANE_NOT_NAMED ? NOT_NAMED : what == LANE_NOT_THERE ? LANE
                          : what == LANE_WAITS_FOREVER ? GAVE_UP : what == LANE_NOT_AT_BARRIER || other >= 32 ? DIVERGENCE
                          : ABSENT;
  if (what == LANE_WAITS_FOREVER) w.left[thread] = true, ++w.ended;
  watch_event* e = add(kind, -1, pc);
  if (!e) return 0;
  e->thread = who, e->other_thread = thread, e->other_threads = w.threads;
  e->value[0] = what == LANE_NOT_AT_BARRIER ? 2 : kind == DIVERGENCE ? 3 : other;
  e->value[1] = lanes;
  return 0;
}

// A barrier of some lanes: each knows then what any of them did, or knew. `absent`: lanes that run, and are none of
// them.
HOOK void fr_watch_warp(unsigned first, unsigned mask, unsigned absent) {
  advance();
  if (!absent) {
    w.simd_device[first / 32] = w.simd_shared[first / 32] = w.epoch;
    return;
  }
  uint32_t known[32] = {};
  w.lanes_met = true;
  for (unsigned i = 0; i < 32; ++i)
    for (unsigned k = 0; k < 32 && (mask >> i & 1); ++k)
      if (w.lane_since[first + i][k] > known[k]) known[k] = w.lane_since[first + i][k];
  for (unsigned k = 0; k < 32; ++k)
    if (mask >> k & 1) known[k] = w.epoch;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) memcpy(w.lane_since[first + i], known, sizeof known);
}

// Barriers of some threads, by number: what was before it opened is before what those do who have waited.
HOOK unsigned fr_watch_open_barrier() {
  if (w.store.size) settle();
  advance();
  return w.epoch - 1;
}
HOOK void fr_watch_passed_barrier(unsigned time) {
  uint32_t& mine = w.acquired_by[fr_watch_current];
  if (time > mine) mine = time;
}

HOOK void fr_watch_yield() {
  if (w.store.size) settle();
  check_stop(CALLER);
}

HOOK void fr_watch_trap(const void* caller) {
  add(TRAP, -1, uintptr_t(caller));
  leave();
}

// What a function, or the processor, accesses that the compiler does not see.
HOOK void fr_watch_range(const void* at, unsigned long bytes, int write) {
  access_range(uintptr_t(at), bytes, write, CALLER);
}

HOOK unsigned fr_watch_to_shared(const volatile void* at) {
  const uint64_t number = (uintptr_t(at) - w.base) >> SLOT;
  if (number >= w.used || !w.array[number].shared) return 0;
  return unsigned(number << SHARED_BITS) + SHARED_MIDDLE + unsigned(uintptr_t(at) - w.array[number].begin);
}
HOOK void* fr_watch_from_shared(unsigned at) {
  const unsigned number = at >> SHARED_BITS;
  if (number >= w.used) return nullptr;
  return reinterpret_cast<void*>(w.array[number].begin + (at & ((1u << SHARED_BITS) - 1)) - SHARED_MIDDLE);
}
