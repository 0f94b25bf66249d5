// Threads of a block on the CPU, and what they do together: positions, barriers, and the operations
// of a warp. In the global namespace, as in CUDA.
#pragma once

namespace fr {
namespace on_cpu {

constexpr unsigned DYNAMIC_BYTES = 232448;  // of shared memory, more than a GPU allows
constexpr unsigned MOST_IDLE = 1u << 20;
constexpr unsigned EVERY = 0xffffffffu;

// What the threads of the block that runs share. A block runs on one thread of the CPU.
struct block_state {
  ::uint3 positions[MAX_FIBERS];
  signed char votes[MAX_FIBERS];
  unsigned operations;  // on memory, since somebody else last ran
  unsigned idle;        // how often threads let others run, since one last came to an operation
  unsigned dynamic_bytes;
  unsigned number;  // of the block, among those that this thread of the CPU has run
};
static FR_PER_THREAD block_state block;
alignas(1024) static FR_PER_THREAD unsigned char dynamic_memory[DYNAMIC_BYTES];

// Where an `extern __shared__` array begins, which is declared in a line as this, of such elements.
FR_FN void* dynamic_shared(unsigned line, const char* name, size_t item) {
#ifdef FR_CHECKED  // its bytes are anything's: floats 0
  return fr_watch_shared(dynamic_memory, line, name, block.dynamic_bytes, item, 0);
#else
  (void)line, (void)name, (void)item;
  return dynamic_memory;
#endif
}

inline ::uint3 of(const metal::uint3& v) { return {v.x, v.y, v.z}; }
FR_FN ::uint3 thread_index() { return block.positions[self().index]; }
FR_FN ::uint3 block_index() { return of(fr_fibers->where->threadgroup_position_in_grid); }
FR_FN dim3 block_size() { return of(fr_fibers->where->dispatch_threads_per_threadgroup); }
FR_FN dim3 grid_size() { return of(fr_fibers->where->threadgroups_per_grid); }
FR_FN unsigned lane_index() { return self().index % 32; }

// Shapes and strides as a body has them, zeros behind the last axis.
template <class S, class T> S per_axis(const T* values, int ndim) {
  S r{};
  for (int i = 0; i < ndim; ++i) r[size_t(i)] = values[i];
  return r;
}

constexpr signed char NO_VOTE = -1;  // of a thread that does not come

// What each thread does before its first statement. A launch's `block`, which fibers do not need, has
// the bytes of dynamic shared memory.
FR_QUIET inline void begin(const launch* l, const group& g, unsigned index) {
  block.dynamic_bytes = l->block;
  if (index == 0) ++block.number, block.idle = 0;
  block.votes[index] = NO_VOTE;
  const metal::uint3 at = g.position(index);
  block.positions[index] = {at.x, at.y, at.z};
}

// The end of a thread that is beyond help.
FR_QUIET inline void end_thread() {
  self().state = fiber::DONE;
  for (;;) suspend();
}
// Others run. Where all that run do nothing else, they wait for what never comes: they end.
inline void yield(here at = here("", 0)) {
  block.operations = 0;
  if (++block.idle > MOST_IDLE) {
    wrong_lane(LANE_WAITS_FOREVER, lane_index(), 0, at);
    end_thread();
  }
#if defined(FR_CHECKED)
  fr_watch_yield();
#endif
  suspend();  // as it is: ready
}
// A thread may wait for what another writes: now and then others run.
FR_FN void touched_memory() {
  if (++block.operations % 64 == 0) yield();
}

FR_APART void barrier(here at) {
#if defined(FR_CHECKED)  // orders device and shared memory
  fr_watch_barrier(uintptr_t(at.file) * 31 + at.line, 3, __builtin_return_address(0));
#else
  (void)at;
#endif
  block.idle = 0;
  self().state = fiber::AT_BARRIER;
  suspend();
}
// How many threads come with a vote, and how many of them vote for it.
struct votes { int all, yes; };
inline votes vote(bool yes, here at) {
  signed char& own = block.votes[self().index];
  own = yes;
  barrier(at);
  votes v{0, 0};
  for (unsigned i = 0; i < fr_fibers->where->n; ++i)
    if (block.votes[i] != NO_VOTE) ++v.all, v.yes += block.votes[i];
  self().state = fiber::AT_BARRIER;  // until all have counted
  suspend();
  own = NO_VOTE;
  return v;
}

// A barrier of a warp: orders what its lanes do in memory.
struct op_sync {
  FR_QUIET static void of(int*, unsigned mask, here) {
#if defined(FR_CHECKED)
    const fiber* lanes = fr_fibers->all + fr_fibers->first;
    unsigned absent = 0;
    for (unsigned i = 0; i < fr_fibers->count; ++i)
      if (!(mask >> i & 1) && lanes[i].state != fiber::DONE) absent |= 1u << i;
    fr_watch_warp(fr_fibers->first, mask, absent);
#else
    (void)mask;
#endif
  }
};

// One value of each lane that takes part, changed by OPERATION(values, mask of those lanes, at).
template <class OPERATION, class T> FR_FN T together(unsigned named, T value, here at) {
  lane_call call{named, at, metal::is_same_v<OPERATION, op_sync>};
  const unsigned lane = lane_index();
  block.idle = 0;
  if (named && !(named >> lane & 1)) wrong_lane(LANE_NOT_NAMED, lane, 0, at);
  void* operands[] = {&call, &value};
  operate(0, operands, [](unsigned mask, void*** o) FR_QUIET {
    T values[32];
    here at;
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) values[i] = *static_cast<T*>(o[i][1]), at = static_cast<lane_call*>(o[i][0])->at;
    OPERATION::of(values, mask, at);
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) *static_cast<T*>(o[i][1]) = values[i];
  });
  return value;
}

struct op_ballot {
  static void of(unsigned* v, unsigned mask, here) {
    unsigned r = 0;
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1 && v[i]) r |= 1u << i;
    for (unsigned i = 0; i < 32; ++i) v[i] = r;
  }
};
template <class T> struct matched {
  T value;
  unsigned lanes;
};
struct op_match {
  template <class T> static void of(matched<T>* v, unsigned mask, here) {
    for (unsigned i = 0; i < 32; ++i) {
      v[i].lanes = 0;
      for (unsigned k = 0; k < 32; ++k)
        if (mask >> i & mask >> k & 1 && !memcmp(&v[i].value, &v[k].value, sizeof(T)))
          v[i].lanes |= 1u << k;
    }
  }
};
// What a lane got from one that is not there.
template <class T> void gone(T& value, unsigned byte) {
#if defined(FR_CHECKED)
  stray(value, byte);
#else
  (void)value, (void)byte;
#endif
}
template <class T> struct moved {
  T value;
  int from;  // a lane; less than 0: its own
};
struct op_shuffle {
  template <class T> static void of(moved<T>* v, unsigned mask, here at) {
    T old[32];
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) old[i] = v[i].value;
    for (unsigned i = 0; i < 32; ++i) {
      if (!(mask >> i & 1) || v[i].from < 0) continue;
      if (mask >> v[i].from & 1) v[i].value = old[v[i].from];
      else gone(v[i].value, wrong_lane(LANE_NOT_THERE, i, unsigned(v[i].from), at));
    }
  }
};
template <class F> struct op_reduce {
  template <class T> static void of(T* v, unsigned mask, here) {
    bool begun = false;
    T r{};
    for (unsigned i = 0; i < 32; ++i)
      if (mask >> i & 1) r = begun ? T(F()(r, v[i])) : v[i], begun = true;
    for (unsigned i = 0; i < 32; ++i) v[i] = r;
  }
};
#define FR_REDUCTION(NAME, ...)                                                                 \
  struct NAME {                                                                                 \
    template <class T> FR_FN T operator()(const T& a, const T& b) const { return __VA_ARGS__; } \
  };
FR_REDUCTION(plus, T(a + b)) FR_REDUCTION(less, b < a ? b : a) FR_REDUCTION(greater, a < b ? b : a)
FR_REDUCTION(bit_and, T(a & b)) FR_REDUCTION(bit_or, T(a | b)) FR_REDUCTION(bit_xor, T(a ^ b))
#undef FR_REDUCTION

template <class T> FR_FN T shuffle(unsigned named, T value, int from, here at) {
  return together<op_shuffle>(named, moved<T>{value, from}, at).value;
}
// The lane that is read by each kind of shuffle; -1 beyond the part of `width` lanes.
FR_FN int from_index(int index, int width) {
  const int lane = int(lane_index());
  return (lane & ~(width - 1)) | (index & (width - 1));
}
FR_FN int from_up(unsigned by, int width) {
  const int lane = int(lane_index()), first = lane & ~(width - 1);
  return unsigned(lane - first) >= by ? lane - int(by) : -1;
}
FR_FN int from_down(unsigned by, int width) {
  const int lane = int(lane_index()), last = lane | (width - 1);
  return unsigned(last - lane) >= by ? lane + int(by) : -1;
}
FR_FN int from_xor(int by, int width) {
  const int lane = int(lane_index()), from = lane ^ (by & 31);
  return from <= (lane | (width - 1)) ? from : -1;
}
FR_FN unsigned ballot(unsigned named, bool v, here at) {
  return together<op_ballot>(named, unsigned(v), at);
}
template <class T> FR_FN unsigned match(unsigned named, T v, here at) {
  return together<op_match>(named, matched<T>{v, 0}, at).lanes;
}

}  // namespace on_cpu
}  // namespace fr

constexpr int warpSize = 32;
using fr_here = fr::on_cpu::here;

// ---- barriers and fences ------------------------------------------------------------------------
inline void __syncthreads(fr_here at = fr_here()) { fr::on_cpu::barrier(at); }
inline int __syncthreads_count(int v, fr_here at = fr_here()) { return fr::on_cpu::vote(v != 0, at).yes; }
inline int __syncthreads_or(int v, fr_here at = fr_here()) { return fr::on_cpu::vote(v != 0, at).yes != 0; }
inline int __syncthreads_and(int v, fr_here at = fr_here()) {
  const fr::on_cpu::votes n = fr::on_cpu::vote(v != 0, at);
  return n.yes == n.all;
}
inline void __syncwarp(unsigned mask = fr::on_cpu::EVERY, fr_here at = fr_here()) {
  fr::on_cpu::together<fr::on_cpu::op_sync>(mask, 0, at);
}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  fr::on_cpu::touched_memory();
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { fr::on_cpu::yield(); }
inline void __trap() {
#if defined(FR_CHECKED)
  fr_watch_trap(__builtin_return_address(0));
#endif
  fr::on_cpu::end_thread();
}
inline void __brkpt() {}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- operations of a warp -----------------------------------------------------------------------
inline unsigned __activemask(fr_here at = fr_here()) { return fr::on_cpu::ballot(0, true, at); }
inline unsigned __ballot_sync(unsigned mask, int v, fr_here at = fr_here()) {
  return fr::on_cpu::ballot(mask, v != 0, at);
}
inline int __any_sync(unsigned mask, int v, fr_here at = fr_here()) {
  return fr::on_cpu::ballot(mask, v != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int v, fr_here at = fr_here()) {
  return fr::on_cpu::ballot(mask, v == 0, at) == 0;
}
#define FR_SHUFFLES(T)                                                                          \
  inline T __shfl_sync(unsigned mask, T v, int from, int width = 32, fr_here at = fr_here()) {  \
    return fr::on_cpu::shuffle(mask, v, fr::on_cpu::from_index(from, width), at);               \
  }                                                                                             \
  inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, fr_here at = fr_here()) { \
    return fr::on_cpu::shuffle(mask, v, fr::on_cpu::from_up(by, width), at);                    \
  }                                                                                             \
  inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, fr_here at = fr_here()) { \
    return fr::on_cpu::shuffle(mask, v, fr::on_cpu::from_down(by, width), at);                  \
  }                                                                                             \
  inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32, fr_here at = fr_here()) { \
    return fr::on_cpu::shuffle(mask, v, fr::on_cpu::from_xor(by, width), at);                   \
  }
#define FR_MATCHES(T)                                                                           \
  inline unsigned __match_any_sync(unsigned mask, T v, fr_here at = fr_here()) {                \
    return fr::on_cpu::match(mask, v, at);                                                      \
  }                                                                                             \
  inline unsigned __match_all_sync(unsigned mask, T v, int* all, fr_here at = fr_here()) {      \
    const bool same = __all_sync(mask, fr::on_cpu::match(mask, v, at) == mask, at);             \
    *all = same;                                                                                \
    return same ? mask : 0;                                                                     \
  }
#define FR_NUMBERS(X)                                                                           \
  X(int) X(unsigned) X(long) X(unsigned long) X(long long) X(unsigned long long) X(float) X(double)
FR_NUMBERS(FR_SHUFFLES) FR_NUMBERS(FR_MATCHES)
FR_SHUFFLES(__half) FR_SHUFFLES(__half2) FR_SHUFFLES(__nv_bfloat16) FR_SHUFFLES(__nv_bfloat162)
#undef FR_SHUFFLES
#undef FR_MATCHES
#undef FR_NUMBERS

#define FR_REDUCE(NAME, OP, T)                                                                  \
  inline T __reduce_##NAME##_sync(unsigned mask, T v, fr_here at = fr_here()) {                 \
    return fr::on_cpu::together<fr::on_cpu::op_reduce<fr::on_cpu::OP>>(mask, v, at);            \
  }
FR_REDUCE(add, plus, unsigned) FR_REDUCE(min, less, unsigned) FR_REDUCE(max, greater, unsigned)
FR_REDUCE(and, bit_and, unsigned) FR_REDUCE(or, bit_or, unsigned) FR_REDUCE(xor, bit_xor, unsigned)
FR_REDUCE(min, less, int) FR_REDUCE(max, greater, int)
#undef FR_REDUCE
inline int __reduce_add_sync(unsigned mask, int v, fr_here at = fr_here()) {
  return int(__reduce_add_sync(mask, unsigned(v), at));
}

// ---- clocks -------------------------------------------------------------------------------------
inline long long clock64() {
#if defined(__x86_64__)
  return (long long)__builtin_ia32_rdtsc();
#else
  long long ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#endif
}
FR_OWN int clock() { return int(clock64()); }
