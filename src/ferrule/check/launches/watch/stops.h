// Stops at lines (`ferrule check --break`): which thread stops where, and what it has to show. Part of
// watch.cpp. Python is called on the stack of the launch: a fiber's is too small for it.
#pragma once

enum { MOST_SHOWN = 512, MOST_DIMS = 4 };

struct stop_wanted {
  int32_t place;    // the line, negative in the header; 0: none any more
  uint32_t thread;  // its index in the threadgroup; -1: any
  uint64_t group;
  uint64_t left;    // how often it is reached until it is shown, that time included
};

struct stop_shown {
  const char* name;
  uint64_t address;
  uint32_t kind, letter, size, lanes;  // see include/stops.h; bytes and lanes of an element
  uint32_t rank, dims[MOST_DIMS];
  int32_t array;      // whose address space it lies in; -1: no array's
  uint32_t readable;  // whether all of it may be read
};

struct stop_record {
  int32_t place;
  uint32_t thread, arrays, count;
  uint64_t group;
  stop_shown shown[MOST_SHOWN];
};

enum stop_answer : int { GO_ON, STEP, END };

extern "C" {
__attribute__((visibility("hidden"))) bool fr_watch_waits;  // see include/checked.h
}

namespace {

struct {
  stop_wanted* wanted;
  unsigned count;
  int (*told)(const stop_record*);
  bool steps;  // this thread stops at every line
  uint32_t thread;
  uint64_t group;
  stop_record record;
} stops;

bool is_readable(uintptr_t at, uint64_t bytes) {
  const auto in = [&](uintptr_t begin, uintptr_t end) { return at >= begin && at + bytes <= end && at + bytes >= at; };
  const uint64_t number = (at - w.base) >> SLOT;
  if (number < w.used) return in(w.array[number].begin, w.array[number].end);
  return in(w.fibers_begin, w.fibers_end) || in(w.image_begin, w.image_end) ||
         in(w.options.launch_begin, w.options.launch_end);
}

}  // namespace

// Where the next launch stops, and what is called there.
API void fr_watch_stops(stop_wanted* wanted, unsigned count, int (*told)(const stop_record*)) {
  memset(&stops, 0, sizeof stops);
  stops.wanted = wanted, stops.count = count, stops.told = told;
  fr_watch_waits = false;
}

// Whether some of these bytes of an array have never been written: they have no values.
API int fr_watch_unwritten(uint64_t address, uint64_t size) {
  const uint64_t number = (address - w.base) >> SLOT;
  if (number >= w.used) return 0;
  const array_state& a = w.array[number];
  if (!a.cells || a.written || address < a.begin || address + size > a.end) return 0;
  for (uint64_t i = address - a.begin; i < address - a.begin + size; ++i) {
    const cell& c = a.cells[i >> a.grain];
    const bool gone = a.shared && c.apart != w.group_first;  // another threadgroup's
    if (gone || !((c.written >> (i & ((1u << a.grain) - 1))) & 1)) return 1;
  }
  return 0;
}

HOOK bool fr_watch_stop_at(int place) {
  const uint32_t thread = fr_watch_current;
  if (thread == NOBODY || w.stop) return false;
  bool here = stops.steps && stops.thread == thread && stops.group == w.group;
  for (unsigned i = 0; i < stops.count; ++i) {
    stop_wanted& s = stops.wanted[i];
    if (s.place != place || (s.thread != NOBODY && (s.thread != thread || s.group != w.group))) continue;
    if (--s.left) continue;
    s.place = 0;
    here = true;
  }
  if (!here) return false;
  if (w.store.size) settle();
  stops.record.place = place, stops.record.thread = thread, stops.record.group = w.group;
  stops.record.count = 0;
  return true;
}

HOOK void fr_watch_show(const char* name, char kind, const volatile void* at, char letter, unsigned size,
                        unsigned lanes, const unsigned* dims, unsigned rank, const volatile void* in,
                        unsigned long bytes) {
  if (stops.record.count == MOST_SHOWN) return;
  stop_shown& s = stops.record.shown[stops.record.count++];
  s.name = name, s.address = uintptr_t(at), s.kind = uint32_t(kind), s.letter = uint32_t(letter);
  s.size = size, s.lanes = lanes, s.rank = rank < MOST_DIMS ? rank : MOST_DIMS;
  uint64_t all = size;
  for (unsigned i = 0; i < rank; ++i) all *= dims[i];
  for (unsigned i = 0; i < s.rank; ++i) s.dims[i] = dims[i];
  const uint64_t number = (s.address - w.base) >> SLOT;
  s.array = number < w.used ? int32_t(number) : -1;
  const uintptr_t begin = uintptr_t(in);
  const bool inside = !in || (s.address >= begin && s.address + all <= begin + bytes);
  s.readable = inside && is_readable(s.address, all);
}

HOOK void fr_watch_stopped() {
  const unsigned current = fr_watch_current;
  fr_watch_current = NOBODY;
  stops.record.arrays = w.used;
  for (unsigned i = 0; i < w.used; ++i) w.told[i].address = w.array[i].begin;  // threadgroup memory, too
  const int answer = stops.told(&stops.record);
  fr_watch_current = current;
  stops.steps = answer == STEP, stops.thread = current, stops.group = w.group;
  if (answer == END) w.stop = 1;
}
