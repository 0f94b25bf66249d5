// Watches a kernel that the compiler has instrumented (-fsanitize=thread, and some of undefined): this
// is compiled without that, and linked into the library in place of the sanitizers' own runtimes.
//
// Arrays lie far apart in address space that nothing else uses, so each address says which array is
// meant, however far it misses. What is outside finds zeros, and what is written there is nobody's.
// For each few bytes of outputs and of threadgroup memory a cell keeps who wrote and read them last.
// Threads run one after the other, so time is a number (`epoch`) that each barrier, fence and
// threadgroup raises; two accesses race if nothing ordered their epochs.
//
// `shared.h` is what Python knows, `state.h` all that is kept.
#include "accesses.h"
#include "arithmetic.h"
#include "cuda.h"
#include "instrumentation.h"
#include "memory.h"

#include <stdio.h>

// -- what Python calls -----------------------------------------------------------------------------

// Makes room for the arrays and tells where each lies. False where there is no memory.
API int fr_watch_open(watch_array* arrays, unsigned count, const watch_options* options, uint64_t groups) {
  unmap();
  memset(&w, 0, sizeof w);
  w.told = arrays, w.options = *options, w.most_groups = groups + 1;
  dl_iterate_phdr(find_image, nullptr);
  w.base = options->base;
  if (!options->copy) {
    void* base = mmap(nullptr, MOST_ARRAYS * ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    w.base = uint64_t(base);
  }
  if (!map_table(w.group_epoch, w.most_groups) || !map_table(w.group_unit, w.most_groups) ||
      !map_table(w.group_threads, w.most_groups))
    return 0;
  for (w.used = 0; w.used < count; ++w.used) {
    watch_array& told = arrays[w.used];
    array_state& a = w.array[w.used];
    a.output = told.output, a.written = told.written, a.floats = told.floats;
    if (!map_array(w.used, told.bytes) || (a.output && options->cells && !map_cells(a, told.item))) return 0;
    told.address = a.begin;
  }
  const unsigned own = (MOST_ARRAYS - count) / (options->copies ? options->copies : 1);  // for threadgroup memory
  w.used += options->copy * own, w.most = w.used + own;
  fr_watch_reversed = options->reversed;
  fr_watch_current = NOBODY;
  w.open = true;
  return 1;
}

API int fr_watch_ended_early() { return int(w.stop); }

// Threads that have ended, by themselves or not.
API uint64_t fr_watch_progress() { return w.progress; }

// Asks the launch, from another thread, to come to an end; again and again, until it has. Where it
// hangs, that is an event of each thread.
API void fr_watch_stop(int hangs) {
  w.hangs = hangs;
  w.stop = w.attention = 1;
  __atomic_store_n(&w.poking, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&w.running, __ATOMIC_SEQ_CST)) pthread_kill(w.thread, SIGFPE);
  __atomic_store_n(&w.poking, 0, __ATOMIC_SEQ_CST);
}

// Where the arrays lie, for other copies of this library.
API uint64_t fr_watch_base() { return w.base; }

API const void* fr_watch_state() { return &w; }

// Whether no copy has touched what another has written, and nothing happened in any; each has its
// threadgroups, and time of its own. `whole`: and outputs are written, each element.
API int fr_watch_apart(const void* const* states, unsigned copies, unsigned arrays, int whole) {
  for (unsigned k = 0; k < copies; ++k) {
    const state& s = *static_cast<const state*>(states[k]);
    if (s.events || s.ended || s.stop || s.forgot) return 0;
  }
  for (unsigned i = 0; i < arrays; ++i) {
    const array_state& first = w.array[i];
    if (!first.cells) continue;
    const uint64_t cells = ((first.end - first.begin) >> first.grain) + 1;
    uint64_t filled = 0;
    for (unsigned k = 0; k < copies; ++k) filled += static_cast<const state*>(states[k])->array[i].filled;
    if (whole && !first.written && filled != first.end - first.begin) return 0;
    for (uint64_t block = 0; block <= cells >> TOUCHED; ++block) {
      unsigned touched = 0;
      for (unsigned k = 0; k < copies; ++k) touched += static_cast<const state*>(states[k])->array[i].touched[block];
      const uint64_t end = (block + 1) << TOUCHED;
      for (uint64_t c = block << TOUCHED; touched > 1 && c < end && c < cells; ++c) {
        unsigned by = 0, writers = 0;
        for (unsigned k = 0; k < copies; ++k) {
          const cell& known = static_cast<const state*>(states[k])->array[i].cells[c];
          by += !known.is_new(), writers += known.write.epoch != 0;
        }
        if (by > 1 && writers) return 0;
      }
    }
  }
  return 1;
}

API int fr_watch_signal(int, void* info, void* context) { return trapped(static_cast<siginfo_t*>(info), context); }

// What is run next.
API void fr_watch_begin(const watch_launch* launches, unsigned copies) {
  traps.count = copies;
  memcpy(traps.copy, launches, copies * sizeof *launches);
}

API void fr_watch_end() {
  if (traps.set == 2) sigaction(SIGFPE, &traps.before, nullptr);
  traps.set = 0;
}

// runtime/runtime.h's fr_entry: a unit of work is a copy's part of the launch.
API void fr_watch_run(const watch_launch* launches, uint64_t begin, uint64_t end, void* worker) {
  unsigned none = 0;  // the first to come sets the handler: what the runtime has set is `before`
  if (__atomic_compare_exchange_n(&traps.set, &none, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_trap;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGFPE, &ours, &traps.before);
    __atomic_store_n(&traps.set, 2, __ATOMIC_SEQ_CST);
  }
  while (__atomic_load_n(&traps.set, __ATOMIC_SEQ_CST) != 2) sched_yield();
  for (uint64_t k = begin; k < end; ++k) launches[k].run(&launches[k], worker);
}

API void fr_watch_entry(const watch_launch* l, void* worker) {
  const uintptr_t frame = uintptr_t(__builtin_frame_address(0));
  w.stack_begin = frame - (uintptr_t(1) << 20), w.stack_end = frame + (uintptr_t(1) << 14);
  w.thread = pthread_self();
  w.running = 1;
  for (uint64_t u = 0; u < l->count && !w.stop; ++u) l->entry(l->launch, l->units[u], l->units[u] + 1, worker);
  fr_watch_current = NOBODY;
  end_watch();
}

// How many events there are, and how many threads could not go on; what was not written is told
// with the arrays. Their memory stays until the next `fr_watch_open` or `fr_watch_close`.
API unsigned fr_watch_results(const watch_event** events, uint64_t* ended, unsigned* arrays, int failed) {
  if (failed && w.running) {  // it was given up in the middle of a thread
    end_watch();
    add(CRASH, -1, w.last);
    ++w.ended;
  }
  const bool alone = w.options.copies == 1;  // else nobody here knows what is not written
  for (unsigned i = 0; i < w.used && alone; ++i) {
    const array_state& a = w.array[i];
    watch_array& told = w.told[i];
    told.unwritten = 0;
    if (!a.cells || a.written || a.shared || !told.item || a.filled == told.bytes) continue;
    const unsigned whole = (1u << (1u << a.grain)) - 1;
    const uint64_t cells = told.item >> a.grain;
    for (uint64_t k = 0, n = told.bytes / told.item; k < n; ++k) {
      bool all = true;
      for (uint64_t c = k * cells; c < (k + 1) * cells; ++c) all = all && (a.cells[c].written & whole) == whole;
      if (!all && !told.unwritten++) told.first_unwritten = k;
    }
  }
  *events = w.event, *ended = w.ended, *arrays = w.used;
  return w.events;
}

API void fr_watch_close() {
  unmap();
  memset(&w, 0, sizeof w);
}

// -- what a text calls (include/checked.h) ----------------------------------------------------------

HOOK void fr_watch_group(unsigned long unit, unsigned threads, const void* scratch, unsigned long bytes,
                         const char* stacks, unsigned long stack_bytes) {
  w.scratch_begin = uintptr_t(scratch), w.scratch_end = w.scratch_begin + bytes;
  w.fibers_begin = uintptr_t(stacks), w.fibers_end = w.fibers_begin + stack_bytes;
  w.group = unit, w.threads = threads;
  advance();
  w.group_first = w.device_since = w.shared_since = w.barrier_since = w.epoch;
  w.released = 0;
  w.group_epoch[w.groups] = w.epoch, w.group_unit[w.groups] = unit, w.group_threads[w.groups] = threads;
  if (w.groups + 1 < w.most_groups) ++w.groups;
  for (unsigned s = 0; s < MOST_THREADS / 32; ++s) w.simd_device[s] = w.simd_shared[s] = w.epoch;
  memset(fr_watch_rounds, 0, threads * sizeof fr_watch_rounds[0]);
  memset(w.left, 0, threads * sizeof w.left[0]);
  memset(w.fenced, 0, threads * sizeof w.fenced[0]);
  memset(w.acquired_by, 0, threads * sizeof w.acquired_by[0]);
  if (w.lanes_met) memset(w.lane_since, 0, threads * sizeof w.lane_since[0]), w.lanes_met = false;
  memset(w.operation, 0, threads * sizeof w.operation[0]);
  memset(w.invalid, 0, threads * sizeof w.invalid[0]);
  memset(w.infinite, 0, threads * sizeof w.infinite[0]);
  arm();
}

// False where the thread is not to go on: time is up.
HOOK int fr_watch_goes_on(unsigned thread) {
  if (LIKELY(!w.stop)) return 1;
  fr_watch_current = thread;
  if (w.hangs && w.operation[thread]) add(GAVE_UP, -1, w.operation[thread]);
  fr_watch_current = NOBODY;
  w.left[thread] = true;
  ++w.ended;
  return 0;
}

HOOK void fr_watch_thread_done(unsigned) {
  ++w.progress;
  if (w.store.size) settle();
}

HOOK void fr_watch_barrier(unsigned long place, unsigned flags, const void* caller) {
  if (w.store.size) settle();
  w.barrier[fr_watch_current].place = place;
  w.barrier[fr_watch_current].flags = flags;
  w.barrier[fr_watch_current].pc = uintptr_t(caller);
  check_stop(uintptr_t(caller));
}

// The barrier lets the threads that wait there go on; all others are done.
HOOK void fr_watch_release(const unsigned char* states, unsigned long stride, unsigned threads, unsigned char done) {
  unsigned first = NOBODY, missing = NOBODY, flags = 0;
  for (unsigned i = 0; i < threads; ++i) {
    if (states[i * stride] == done) {
      if (missing == NOBODY && !w.left[i]) missing = i;
      continue;
    }
    flags |= w.barrier[i].flags;
    if (first == NOBODY) first = i;
    else if (w.barrier[i].place != w.barrier[first].place) {
      if (watch_event* e = add(DIVERGENCE, -1, w.barrier[i].pc, w.barrier[first].pc))
        e->thread = i, e->other_thread = first, e->other_threads = threads;
    }
  }
  if (first == NOBODY) return;
  if (missing != NOBODY)
    if (watch_event* e = add(DIVERGENCE, -1, w.barrier[first].pc))
      e->thread = first, e->other_thread = missing, e->other_threads = threads, e->value[0] = 1;
  order(flags);
}

HOOK void fr_watch_operation(const void* caller) {
  if (w.store.size) settle();
  w.operation[fr_watch_current] = uintptr_t(caller);
  check_stop(uintptr_t(caller));
}

HOOK void fr_watch_simd_fence(unsigned first, unsigned count, unsigned mask, unsigned flags) {
  const unsigned simdgroup = first / 32, all = count == 32 ? ~0u : (1u << count) - 1;
  for (unsigned i = 0; i < count && mask != all; ++i) {
    if (((mask >> i) & 1) || w.left[first + i]) continue;
    const unsigned waits = first + unsigned(__builtin_ctz(mask));
    if (watch_event* e = add(DIVERGENCE, -1, w.operation[waits]))
      e->thread = waits, e->other_thread = first + i, e->other_threads = w.threads, e->value[0] = 2;
    break;
  }
  advance();
  if (flags & TO_DEVICE) w.simd_device[simdgroup] = w.epoch, w.released = w.epoch - 1;
  if (flags & TO_THREADGROUP) w.simd_shared[simdgroup] = w.epoch;
}

HOOK unsigned fr_watch_lane(unsigned thread, unsigned from, unsigned lanes, const char* operation) {
  if (w.options.stray_bytes) return offset(w.operation[thread]) == w.options.strays_of ? w.options.stray_bytes : 0;
  if (watch_event* e = add(LANE, -1, w.operation[thread])) {
    e->thread = thread, e->value[0] = from, e->value[1] = lanes;
    copy_text(e->text, operation);
  }
  return 0;
}

HOOK void* fr_watch_shared(const void* key, unsigned line, const char* name, unsigned long bytes, unsigned long item,
                           int floats) {
  for (unsigned i = 0; i < w.used; ++i)
    if (w.array[i].key == key) return reinterpret_cast<void*>(w.array[i].begin);
  if (w.used == w.most) {
    add(NO_ROOM, -1, CALLER);
    leave();
  }
  array_state& a = w.array[w.used];
  watch_array& told = w.told[w.used];
  a.key = key, a.shared = a.output = true, a.floats = unsigned(floats);
  told.bytes = bytes, told.item = item, told.shared = line, told.output = 1, told.floats = unsigned(floats);
  copy_text(told.name, name);
  if (!map_array(w.used, bytes) || (w.options.cells && !map_cells(a, item))) leave();
  return reinterpret_cast<void*>(w.array[w.used++].begin);
}

HOOK void fr_watch_shift(unsigned bits, long count) {
  if (fr_watch_current == NOBODY) return;
  if (watch_event* e = add(SHIFT, -1, CALLER)) e->value[0] = bits, e->value[1] = uint64_t(count);
}

HOOK void fr_watch_unset(const char* name) {
  if (fr_watch_current == NOBODY) return;
  if (watch_event* e = add(UNSET, -1, CALLER)) copy_text(e->text, name);
}

HOOK void fr_watch_unset_element(const char* name, unsigned long index, unsigned long row) {
  if (fr_watch_current == NOBODY) return;
  watch_event* e = add(UNSET, -1, CALLER);
  if (!e) return;
  if (row) snprintf(e->text, TEXT, "%s[%lu][%lu]", name, index / row, index % row);
  else snprintf(e->text, TEXT, "%s[%lu]", name, index);
}

HOOK bool fr_watch_half(float value) {
  if (fr_watch_current == NOBODY) return false;
  if (w.options.stray_bytes) return offset(CALLER) == w.options.strays_of;
  if (watch_event* e = add(HALF_OVERFLOW, -1, CALLER)) memcpy(&e->value[0], &value, 4);
  return false;
}

HOOK void fr_watch_made(float value, unsigned operands, float first, float second) {
  if (fr_watch_current == NOBODY) return;
  note_made(CALLER, operands <= 2 ? operands : 0, double(first), double(second));
  fault_origin* all = value != value ? w.invalid : w.infinite;
  if (!all[fr_watch_current].pc[0]) all[fr_watch_current].pc[0] = CALLER;
  if (!all[MOST_THREADS].pc[0]) all[MOST_THREADS].pc[0] = CALLER;
}

// fr::print_value of include/values.h.
struct shown_value {
  int kind, bytes;
  uint64_t bits;
};

API void fr_check_assert(bool holds, const char* condition, int line, const char* file, const shown_value* values,
                         unsigned count) {
  if (holds || fr_watch_current == NOBODY) return;
  watch_event* e = add(ASSERTION, -1, CALLER, 0, file, uint32_t(line));
  if (!e) return;
  copy_text(e->text, condition);
  e->size = count;
  for (unsigned i = 0; i < count && i < 2; ++i) e->value[i] = values[i].bits, e->operand_kind[i] = uint32_t(values[i].kind);
}

#include "stops.h"
