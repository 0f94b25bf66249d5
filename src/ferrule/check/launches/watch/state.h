// What is known while a launch runs, and the events that come of it.
#pragma once
#include "shared.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#define HOOK extern "C" __attribute__((visibility("hidden"), noinline))
#define API extern "C" __attribute__((visibility("default")))
#define CALLER (reinterpret_cast<uintptr_t>(__builtin_return_address(0)))
#define LIKELY(x) __builtin_expect(!!(x), 1)

extern "C" {
__attribute__((visibility("hidden"))) unsigned fr_watch_current = ~0u;  // see include/checked.h
__attribute__((visibility("hidden"))) unsigned fr_watch_reversed;
__attribute__((visibility("hidden"))) unsigned fr_watch_rounds[1024];
__attribute__((visibility("hidden"))) void fr_watch_leave();
}

namespace {

constexpr unsigned SLOT = 37;                           // 128 GiB for each array
constexpr uint64_t ROOM = uint64_t(1) << SLOT;
constexpr uint64_t STAGGER = uint64_t(64) << 20;
constexpr uint64_t BEFORE = uint64_t(40) << 30;         // of which this much lies before it
constexpr unsigned NOBODY = ~0u;
constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned MOST_PAGES = 256;
constexpr unsigned MOST_MADE = 16;
constexpr uint64_t PAGE = 4096;

constexpr unsigned TOUCHED = 9;  // 2^9 cells

constexpr uint32_t LAST_EPOCH = (1u << 26) - 1;

enum : unsigned { TO_DEVICE = 1, TO_THREADGROUP = 2 };  // metal::mem_flags

// An access: when, by whom, where in the program, and whether it was atomic.
struct record {
  uint64_t epoch : 26, round : 6, thread : 10, pc : 21, atomic : 1;
};
struct cell {
  record write, read, other;  // `other`: by a thread that is not `read`'s
  uint8_t written, write_bytes, read_bytes, other_bytes;  // bits, a byte each
  uint32_t apart;
  bool is_new() const { return !(write.epoch | read.epoch | other.epoch | written); }
};
static_assert(sizeof(record) == 8 && sizeof(cell) == 32, "as small as they can be");

struct array_state {
  uint64_t begin, end;
  cell* cells;
  unsigned char* touched;  // whether any of TOUCHED cells has been accessed
  unsigned grain;  // a cell's bytes as a power of two
  bool output, written, shared, loose;  // loose: of structs, which have bytes that nobody writes
  unsigned floats;
  const void* key;
  uint64_t filled;        // bytes that have values
  int64_t reads, writes;  // bytes of which nothing is kept: reads, and writes, there are no more to us
};

struct pending_store {
  uintptr_t address;
  unsigned size, array;
  uintptr_t pc;
  bool conflicts;
  record other;
  unsigned char before[16];
};

struct fault_origin {  // where a thread made NaNs or infinities first: calls of functions [0], instructions
  uintptr_t pc[MOST_ORIGINS];
  bool any() const { return pc[0] || pc[1]; }
};

struct computation {  // of which something came that is not finite: as of events
  uintptr_t pc;
  unsigned code;
  double operand[2];
};

struct state {
  bool open;
  uint64_t base;
  unsigned used, most;  // arrays
  array_state array[MOST_ARRAYS];
  watch_array* told;
  watch_options options;
  uintptr_t image_begin, image_end, stack_begin, stack_end, fibers_begin, fibers_end, scratch_begin, scratch_end;
  unsigned threads;
  uint64_t group;
  uint32_t epoch, group_first, device_since, shared_since, barrier_since, released, acquired;
  uint32_t simd_device[MOST_THREADS / 32], simd_shared[MOST_THREADS / 32];
  uint32_t fenced[MOST_THREADS];        // each thread's last fence
  uint32_t acquired_by[MOST_THREADS];   // what is up to then is before what each thread does
  uint32_t lane_since[MOST_THREADS][32];  // the same of each lane of its simdgroup; 0: nothing
  bool lanes_met;                       // there is something in it
  bool left[MOST_THREADS];
  struct {
    uint64_t place;
    unsigned flags;
    uintptr_t pc;
  } barrier[MOST_THREADS];
  uintptr_t operation[MOST_THREADS];
  fault_origin invalid[MOST_THREADS + 1], infinite[MOST_THREADS + 1];  // the last: of the whole launch
  computation made[MOST_MADE];  // the last at each of some places
  unsigned next_made;
  pending_store store;
  void* page[MOST_PAGES];
  unsigned pages, next_page;
  void* dirty;  // a page outside that was written to
  uint64_t ended;  // threads that could not go on
  uintptr_t last;  // where the last access was
  pthread_t thread;
  volatile uint32_t running, poking, hangs;
  volatile uint64_t progress;
  volatile uint32_t stop, attention;  // attention: `stop`, or `disarmed`
  unsigned events;
  watch_event event[MOST_EVENTS];
  uint32_t* group_epoch;  // the first of each threadgroup that has run
  uint64_t* group_unit;
  unsigned* group_threads;
  uint64_t groups, most_groups;
  struct {
    uintptr_t address;
    uint32_t epoch;
  } published[256];
  bool disarmed;
  bool forgot;  // of some accesses nothing is known any more
  unsigned trapped;
} w;

// Time goes on. Where its numbers are used up, what was before is forgotten, but for what was written.
void advance() {
  if (LIKELY(++w.epoch < LAST_EPOCH)) return;
  w.forgot = true;
  for (unsigned i = 0; i < w.used; ++i) {
    const array_state& a = w.array[i];
    const uint64_t count = a.cells ? ((a.end - a.begin) >> a.grain) + 1 : 0;
    for (uint64_t c = 0; c < count; ++c) {
      cell& k = a.cells[c];
      k.write = k.read = k.other = record{};
      k.apart = k.apart == w.group_first;
    }
  }
  memset(w.published, 0, sizeof w.published);
  w.epoch = w.group_first = w.device_since = w.shared_since = w.barrier_since = 1;
  w.acquired = w.released = 0;
  memset(w.fenced, 0, sizeof w.fenced);
  memset(w.acquired_by, 0, sizeof w.acquired_by);
  memset(w.lane_since, 0, sizeof w.lane_since);
  for (unsigned s = 0; s < MOST_THREADS / 32; ++s) w.simd_device[s] = w.simd_shared[s] = 1;
  w.group_epoch[0] = 1, w.group_unit[0] = w.group, w.group_threads[0] = w.threads;
  w.groups = w.most_groups > 1;
}

uint64_t offset(uintptr_t pc) { return pc ? pc - w.image_begin : 0; }

// Who called whom, up to this access: frames are linked (-fno-omit-frame-pointer).
void note_callers(watch_event& e, uintptr_t pc) {
  const uintptr_t* frame = static_cast<const uintptr_t*>(__builtin_frame_address(0));
  const auto on_stack = [](uintptr_t at) { return at >= w.fibers_begin && at + 16 <= w.fibers_end; };
  bool found = !pc;
  for (unsigned n = 0; n < MOST_CALLERS && on_stack(uintptr_t(frame));) {
    const uintptr_t at = frame[1];
    found = found || at == pc;
    if (at < w.image_begin || at >= w.image_end) return;
    if (found) e.caller[n++] = offset(at);
    const uintptr_t* next = reinterpret_cast<const uintptr_t*>(frame[0]);
    if (next <= frame) return;
    frame = next;
  }
}

// The event of this kind at this place, where it is a new one; else it is counted.
watch_event* add(watch_kind kind, int array, uintptr_t pc, uintptr_t other_pc = 0, const char* file = nullptr,
                 uint32_t line = 0, uint32_t column = 0) {
  const uint64_t at = offset(pc), other = offset(other_pc);
  for (unsigned i = 0; i < w.events; ++i) {
    watch_event& e = w.event[i];
    if (e.kind == kind && e.array == array && e.pc == at && e.other_pc == other && e.file == file && e.line == line &&
        e.column == column) {
      ++e.count;
      return nullptr;
    }
  }
  if (w.events == MOST_EVENTS) return nullptr;
  watch_event& e = w.event[w.events++];
  memset(&e, 0, sizeof e);
  e.kind = kind, e.array = array, e.pc = at, e.other_pc = other, e.count = 1;
  e.file = file, e.line = line, e.column = column;
  e.thread = fr_watch_current, e.threads = w.threads, e.group = w.group;
  note_callers(e, pc);
  return &e;
}

void copy_text(char* to, const char* from) {
  strncpy(to, from, TEXT - 1);
  to[TEXT - 1] = 0;
}

// The thread that runs cannot go on: what it would do next has no meaning.
void leave() {
  w.left[fr_watch_current] = true;
  ++w.ended, ++w.progress;
  fr_watch_leave();
}

void give_up(uintptr_t pc) {
  if (w.hangs) add(GAVE_UP, -1, pc, w.last);  // in the author's text, or in what that called
  leave();
}

void check_stop(uintptr_t pc) {
  if (!LIKELY(!w.stop)) give_up(pc);
}

}  // namespace
