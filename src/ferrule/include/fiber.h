// Kernels that synchronise, whatever their control flow: each thread of a threadgroup is a fiber.
//
// A fiber runs until it reaches a barrier or an operation of its simdgroup. When no lane of a
// simdgroup can go on, the lanes that wait at the earliest call take part in it. "Earliest" is by
// position: the calls and loops that a lane is inside, outermost first, each with its place in the
// text and, for a loop, its iteration. A thread that has returned keeps nobody waiting.
#pragma once

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
fr_start:
  popq %rdi
  popq %rax
  callq *%rax
  ud2
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
fr_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.p2align 4
fr_start:
  mov x0, x19
  blr x20
  brk #0
)");
extern "C" void fr_switch(void** save, void* to) __asm__("fr_switch");
#else
#error "ferrule: fibers are written for x86-64 and AArch64"
#endif

extern "C" void fr_start() __asm__("fr_start");

namespace fr {

constexpr size_t FIBER_STACK = 128 << 10;
constexpr unsigned MAX_FIBERS = 1024;
constexpr unsigned MAX_DEPTH = 14;  // nested loops and calls that are told apart

// A step of a lane's position: a place in the text and, inside a loop, the iteration.
struct path_step {
  unsigned place, round;
};

struct fiber {
  enum : unsigned char { READY, AT_BARRIER, AT_OPERATION, DONE };
  void* stack_pointer;
  void** operands;                           // of the operation it waits at
  void (*run)(unsigned mask, void*** operands);  // carries that operation out
  unsigned index;
  unsigned char state;
  unsigned depth;
  path_step path[MAX_DEPTH + 2];
};

struct fibers {
  void* scheduler;
  fiber* current;
  const group* where;
  void* body;
  unsigned first, count;  // the lanes of the simdgroup that runs
  unsigned next;          // the turn of the lane that comes next
  fiber all[MAX_FIBERS];
};

static FR_PER_THREAD fibers* fr_fibers;

FR_QUIET FR_FN fiber& self() { return *fr_fibers->current; }

inline unsigned matrix_own_lane() { return self().index % 32; }

// Of functions that change stacks, a compiler must not know what they do: else it takes a static variable, which the
// asm cannot name, for what it was before other threads ran.
#if defined(__clang__)
#define FR_OPAQUE __attribute__((noinline, optnone))
#else
#define FR_OPAQUE __attribute__((noinline, noipa))
#endif

// Go on where the stack `to` was left, and leave this one. Neither a call nor a return: processors
// foretell returns by the calls before them, which are another fiber's then, but at the same place.
FR_QUIET FR_FN void switch_stack(void** save, void* to) {
#if defined(__x86_64__)
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // below may be what a function without calls keeps there
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%%rdi)\n\t"
      "movq %%rsi, %%rsp\n\t"
      "popq %%rax\n\t"
      "popq %%rbp\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(save), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
        "xmm14", "xmm15"
#if defined(__AVX512F__)
        , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
        "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
  );
#else
  fr_switch(save, to);
#endif
}

// The place of what comes k-th. Checks can turn the order of threads around: results must not depend on it.
FR_FN unsigned turn(unsigned k, unsigned count) {
#if defined(FR_CHECKED)
  return fr_watch_reversed ? count - 1 - k : k;
#else
  (void)count;
  return k;
#endif
}

// The next lane of the simdgroup that can run, as the current one; null where there is none.
FR_QUIET inline fiber* next_lane(fibers* f) {
  while (f->next < f->count) {
    fiber& lane = f->all[f->first + turn(f->next++, f->count)];
    if (lane.state != fiber::READY) continue;
#if defined(FR_CHECKED)
    if (!fr_watch_goes_on(lane.index)) {
      lane.state = fiber::DONE;
      continue;
    }
    fr_watch_current = lane.index;
#endif
    return f->current = &lane;
  }
  return nullptr;
}

// The thread that runs waits, or has ended. The next lane goes on, without the scheduler, which other texts ask after
// each one.
FR_QUIET static FR_OPAQUE void suspend() {
  fibers* f = fr_fibers;
  void** save = &f->current->stack_pointer;
#if !defined(FR_CUDA_LANES) && !defined(FR_STOPS)
  if (const fiber* lane = next_lane(f)) return switch_stack(save, lane->stack_pointer);
#endif
  switch_stack(save, f->scheduler);
}

// -- position ------------------------------------------------------------------------------------

template <unsigned PLACE> struct at {};

struct place_mark {
  FR_APART explicit place_mark(unsigned place) {
    fiber& f = self();
    if (f.depth < MAX_DEPTH) f.path[f.depth] = path_step{place, 0};
    ++f.depth;
  }
  FR_APART void tick() {
    fiber& f = self();
    if (f.depth <= MAX_DEPTH) ++f.path[f.depth - 1].round;
#if defined(FR_CHECKED)
    ++fr_watch_rounds[f.index];
#endif
  }
  FR_APART ~place_mark() { --self().depth; }
  place_mark(const place_mark&) = delete;
};

FR_QUIET inline int compare(const fiber& a, const fiber& b) {
  for (unsigned i = 0;; ++i) {
    const path_step &x = a.path[i], &y = b.path[i];
    if (x.place != y.place) return x.place < y.place ? -1 : 1;
    if (x.round != y.round) return x.round < y.round ? -1 : 1;
    if (i == (a.depth < MAX_DEPTH ? a.depth : MAX_DEPTH) || i == (b.depth < MAX_DEPTH ? b.depth : MAX_DEPTH)) return 0;
  }
}

// Wait with these operands at this place until the scheduler has run the operation.
FR_APART void operate(unsigned place, void** operands, void (*run)(unsigned, void***)) {
  fiber& f = self();
  f.path[f.depth < MAX_DEPTH ? f.depth : MAX_DEPTH] = path_step{place, 0};
  f.operands = operands;
  f.run = run;
  f.state = fiber::AT_OPERATION;
#if defined(FR_CHECKED)
  fr_watch_operation(__builtin_return_address(0));
#endif
  suspend();
}

// -- scheduler -----------------------------------------------------------------------------------

FR_QUIET static FR_OPAQUE void run(fibers* f, fiber& lane) {
  f->current = &lane;
  switch_stack(&f->scheduler, lane.stack_pointer);
#if defined(FR_STOPS)
  for (; fr_watch_waits; switch_stack(&f->scheduler, lane.stack_pointer)) fr_watch_waits = false, fr_watch_stopped();
#endif
#if defined(FR_CHECKED)
  fr_watch_current = ~0u;
#endif
}

#ifdef FR_CUDA_LANES
FR_QUIET inline void resume(fibers* f, fiber& lane) {
#if defined(FR_CHECKED)
  if (!fr_watch_goes_on(lane.index)) {
    lane.state = fiber::DONE;
    return;
  }
  fr_watch_current = lane.index;
#endif
  run(f, lane);
}
#endif

#ifdef FR_CUDA_LANES
}  // namespace fr
#include "cuda_cpu_lanes.h"  // its own run_simdgroup: CUDA's operations name their lanes
namespace fr {
#else
// Run the lanes of one simdgroup until each is done or waits, then carry out one operation. False
// when there is none: each lane is done or waits at a threadgroup barrier.
FR_QUIET inline bool run_simdgroup(fibers* f, unsigned first, unsigned count) {
  f->first = first, f->count = count, f->next = 0;
  while (fiber* lane = next_lane(f)) run(f, *lane);
  const fiber* earliest = nullptr;
  unsigned mask = 0;
  for (unsigned i = 0; i < count; ++i) {
    const fiber& lane = f->all[first + i];
    if (lane.state != fiber::AT_OPERATION) continue;
    const int order = earliest ? compare(lane, *earliest) : -1;
    if (order < 0) earliest = &lane, mask = 0;
    if (order < 0 || (order == 0 && lane.run == earliest->run)) mask |= 1u << i;
  }
  if (!earliest) return false;
  void** operands[SIMD_WIDTH] = {};
  for (unsigned i = 0; i < count; ++i) {
    if (!has_lane(mask, i)) continue;
    operands[i] = f->all[first + i].operands;
    f->all[first + i].state = fiber::READY;
  }
  earliest->run(mask, operands);
  return true;
}
#endif

template <class BODY> FR_QUIET void fiber_main(fiber* f) {
  (*static_cast<BODY*>(fr_fibers->body))(*fr_fibers->where, f->index);
#if defined(FR_CHECKED)
  fr_watch_thread_done(f->index);
#endif
  f->state = fiber::DONE;
  suspend();
}

FR_QUIET inline void prepare(fiber& lane, char* stack_top, void (*main)(fiber*)) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(15));
#if defined(__x86_64__)
  *--top = nullptr;                             // where a call would have left its address
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(main);       // popped by fr_start
  *--top = &lane;
  *--top = nullptr;                             // rbp
  *--top = reinterpret_cast<void*>(&fr_start);  // jumped to
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = nullptr;
  top[0] = &lane;                               // x19
  top[1] = reinterpret_cast<void*>(main);       // x20
  top[11] = reinterpret_cast<void*>(&fr_start); // x30
#endif
  lane.stack_pointer = top;
  lane.state = fiber::READY;
  lane.depth = 0;
}

// Run `body(group, thread index)` for every thread of the threadgroups begin … end.
template <class BODY>
FR_QUIET void fiber_groups(const launch* l, uint64_t begin, uint64_t end, worker* w, BODY body) {
  group g(l);
  if (w->scratch_bytes < sizeof(fibers) && !w->grow(w, sizeof(fibers))) return;
  fibers* f = static_cast<fibers*>(w->scratch);
  const unsigned most = l->threadgroup[0] * l->threadgroup[1] * l->threadgroup[2];
  size_t stride = 0;
  char* stacks = static_cast<char*>(w->fiber_stacks(w, most, FIBER_STACK, &stride));
  if (!stacks) return;
  fr_fibers = f;
  g.runs = w;
  f->where = &g;
  f->body = &body;
  for (uint64_t u = begin; u < end; ++u) {
    g.move_to(u);
    for (unsigned i = 0; i < g.n; ++i) {
      f->all[i].index = i;
      // Tops that are equal modulo the page size would share a few sets of the L1 cache.
      prepare(f->all[i], stacks + i * stride + FIBER_STACK - (i % 32) * 64, &fiber_main<BODY>);
    }
#if defined(FR_CHECKED)
    fr_watch_group(u, g.n, f, sizeof(fibers), stacks, most * stride);
#endif
    for (bool waiting = true; waiting;) {
      // Simdgroups advance in step, an operation each, as split loops do and GPUs nearly do: kernels
      // are published that forget a barrier and rely on it.
      for (bool going = true; going;) {
        going = false;
        for (unsigned k = 0; k < g.simdgroups(); ++k) {
          const unsigned s = turn(k, g.simdgroups()) * 32;
          going |= run_simdgroup(f, s, g.n - s < 32 ? g.n - s : 32);
        }
      }
      waiting = false;
#if defined(FR_CHECKED)
      fr_watch_release(&f->all[0].state, sizeof(fiber), g.n, fiber::DONE);
#endif
      for (unsigned i = 0; i < g.n; ++i)
        if (f->all[i].state == fiber::AT_BARRIER) f->all[i].state = fiber::READY, waiting = true;
    }
  }
}

#if defined(FR_CHECKED)
// All threads of a body that waits for nobody, from the next one on, one after the other.
template <class BODY> FR_QUIET void threads_main(fiber* f) {
  const group& g = *fr_fibers->where;
  while (fr_fibers->first < g.n) {
    f->index = turn(fr_fibers->first++, g.n);
    if (!fr_watch_goes_on(f->index)) continue;
    fr_watch_current = f->index;
    (*static_cast<BODY*>(fr_fibers->body))(g, f->index);
    fr_watch_thread_done(f->index);
  }
  f->state = fiber::DONE;
  suspend();
}

// `fiber_groups` of such a body: one fiber runs the threads, and where one of them is ended, another does.
template <class BODY>
FR_QUIET void thread_groups(const launch* l, uint64_t begin, uint64_t end, worker* w, BODY body) {
  group g(l);
  if (w->scratch_bytes < sizeof(fibers) && !w->grow(w, sizeof(fibers))) return;
  fibers* f = static_cast<fibers*>(w->scratch);
  size_t stride = 0;
  char* stack = static_cast<char*>(w->fiber_stacks(w, 1, FIBER_STACK, &stride));
  if (!stack) return;
  fr_fibers = f;
  g.runs = w;
  f->where = &g;
  f->body = &body;
  f->next = f->count = 0;
  for (uint64_t u = begin; u < end; ++u) {
    g.move_to(u);
    fr_watch_group(u, g.n, f, sizeof(fibers), stack, stride);
    for (f->first = 0; f->first < g.n;) {
      prepare(f->all[0], stack + FIBER_STACK, &threads_main<BODY>);
      run(f, f->all[0]);
    }
  }
}

// A number for where a thread waits: the call, and the rounds of the loops around it.
FR_QUIET inline unsigned long place_of(const fiber& f, unsigned place) {
  unsigned long sum = place;
  for (unsigned i = 0; i < f.depth && i < MAX_DEPTH; ++i)
    sum = (sum * 31 + f.path[i].place) * 1000003 + f.path[i].round;
  return sum;
}

FR_QUIET inline void leave_thread() {
  self().state = fiber::DONE;
  suspend();
}
#endif

// -- operations, as a body calls them --------------------------------------------------------------
// The rewriter hands each call its place in the text: `simd_sum(x)` is `simd_sum(FR_AT x)`.

// One operand of the lanes that wait; of the others `none`.
template <class T> struct operand {
  T at[32];
  FR_QUIET operand(unsigned mask, void*** operands, unsigned number, T none = T()) {
    for (unsigned i = 0; i < 32; ++i)
      at[i] = has_lane(mask, i) ? *static_cast<T*>(operands[i][number]) : none;
  }
  FR_QUIET void back(unsigned mask, void*** operands) const {
    for (unsigned i = 0; i < 32; ++i)
      if (has_lane(mask, i)) *static_cast<T*>(operands[i][0]) = at[i];
  }
};

// What the barrier of a simdgroup orders.
FR_QUIET inline void order_lanes(unsigned mask, void*** operands) {
#if defined(FR_CHECKED)
  const unsigned first = unsigned(__builtin_ctz(mask));
  const unsigned flags = *static_cast<unsigned*>(operands[first][0]);
  fr_watch_simd_fence(fr_fibers->first, fr_fibers->count, mask, flags);
#else
  (void)mask, (void)operands;
#endif
}

// Of a move of values between lanes: each lane must read from one that takes part.
#if defined(FR_CHECKED)
#define FR_LANES(PREFIX, LANES, NAME, SOURCE)                                             \
  unsigned gone[32] = {};                                                                 \
  for (unsigned i = 0; i < 32; ++i) {                                                     \
    if (!has_lane(mask, i)) continue;                                                     \
    const unsigned w = LANES - 1, j = i & w, d = lanes::at(k.at, i), s = unsigned(SOURCE); \
    const bool stays = may_leave(#NAME) && s >= LANES;                                    \
    if (!stays && (s >= LANES || !has_lane(mask, (i & ~w) + s)))                          \
      gone[i] = fr_watch_lane(fr_fibers->first + i, s, fr_fibers->count, #PREFIX "_" #NAME); \
  }
#define FR_GONE(AT) \
  for (unsigned i = 0; i < 32; ++i) stray(AT[i], gone[i]);
// At the group's end a shift leaves lanes their own values.
constexpr bool may_leave(const char* name) {
  for (unsigned i = 0; i < 8; ++i)
    if (name[i] != "shuffle_"[i]) return false;
  return name[8] == 'u' || (name[8] == 'd' && name[9] == 'o');
}
static_assert(may_leave("shuffle_up") && may_leave("shuffle_down") && !may_leave("shuffle_xor"), "by their names");
#else
#define FR_LANES(PREFIX, LANES, NAME, SOURCE)
#define FR_GONE(AT)
#endif

namespace metal {

#define FR_OPERATION(PREFIX, NAME, ...)                                  \
  template <unsigned P, class T> FR_FN T PREFIX##_##NAME(at<P>, T v) {   \
    void* operands[] = {&v};                                             \
    operate(P, operands, [](unsigned mask, void*** o) FR_QUIET {                  \
      operand<T> t(mask, o, 0);                                          \
      lanes::__VA_ARGS__(t.at, mask);                                    \
      t.back(mask, o);                                                   \
    });                                                                  \
    return v;                                                            \
  }
FR_OPERATIONS(simd, 32) FR_OPERATIONS(quad, 4)
#undef FR_OPERATION

#define FR_MOVE(PREFIX, LANES, NAME, SOURCE)                                       \
  template <unsigned P, class T> FR_FN T PREFIX##_##NAME(at<P>, T v, ushort k) {   \
    unsigned d = k;                                                                \
    void* operands[] = {&v, &d};                                                   \
    operate(P, operands, [](unsigned mask, void*** o) FR_QUIET {                            \
      operand<T> t(mask, o, 0);                                                    \
      const operand<unsigned> k(mask, o, 1);                                       \
      FR_LANES(PREFIX, LANES, NAME, SOURCE)                                        \
      lanes::NAME<LANES>(t.at, k.at, mask);                                        \
      FR_GONE(t.at)                                                                \
      t.back(mask, o);                                                             \
    });                                                                            \
    return v;                                                                      \
  }
FR_MOVES(FR_MOVE, simd, 32) FR_MOVES(FR_MOVE, quad, 4)
#undef FR_MOVE

#define FR_FILL(PREFIX, LANES, NAME, SOURCE, INSIDE)                                         \
  template <unsigned P, class T, class F>                                                    \
  FR_FN T PREFIX##_##NAME(at<P>, T v, F filling, ushort k, ushort modulo = LANES) {          \
    T f = T(filling);                                                                        \
    unsigned d = k, n = modulo;                                                              \
    void* operands[] = {&v, &f, &d, &n};                                                     \
    operate(P, operands, [](unsigned mask, void*** o) FR_QUIET {                                      \
      operand<T> t(mask, o, 0);                                                              \
      const operand<T> f(mask, o, 1);                                                        \
      const operand<unsigned> d(mask, o, 2), n(mask, o, 3, 1);                               \
      lanes::NAME<LANES>(t.at, f.at, d.at, n.at, mask);                                      \
      t.back(mask, o);                                                                       \
    });                                                                                      \
    return v;                                                                                \
  }
FR_FILLS(FR_FILL, simd, 32) FR_FILLS(FR_FILL, quad, 4)
#undef FR_FILL

#define FR_VOTES(PREFIX, WIDTH)                                                                     \
  template <unsigned P> FR_FN simd_vote PREFIX##_ballot(at<P>, bool v) {                            \
    uint64_t x = v;                                                                                 \
    void* operands[] = {&x};                                                                        \
    operate(P, operands, [](unsigned mask, void*** o) FR_QUIET {                                             \
      operand<uint64_t> t(mask, o, 0);                                                              \
      unsigned b = 0;                                                                               \
      for (unsigned i = 0; i < 32; ++i) b |= unsigned(t.at[i] & 1) << i;                            \
      b &= mask;                                                                                    \
      for (unsigned i = 0; i < 32; ++i) t.at[i] = lanes::part_of<WIDTH>(b, i);                      \
      t.back(mask, o);                                                                              \
    });                                                                                             \
    return simd_vote(x);                                                                            \
  }                                                                                                 \
  template <unsigned P> FR_FN simd_vote PREFIX##_active_threads_mask(at<P> p) {                     \
    return PREFIX##_ballot(p, true);                                                                \
  }                                                                                                 \
  template <unsigned P> FR_FN bool PREFIX##_any(at<P> p, bool v) {                                  \
    return simd_vote::vote_t(PREFIX##_ballot(p, v)) != 0;                                           \
  }                                                                                                 \
  template <unsigned P> FR_FN bool PREFIX##_all(at<P> p, bool v) {                                  \
    return simd_vote::vote_t(PREFIX##_ballot(p, !v)) == 0;                                          \
  }                                                                                                 \
  template <unsigned P> FR_FN bool PREFIX##_is_first(at<P> p) {                                     \
    const unsigned active = unsigned(simd_vote::vote_t(PREFIX##_ballot(p, true)));                  \
    return (active & ((1u << (self().index & (WIDTH - 1))) - 1)) == 0;                              \
  }
FR_VOTES(simd, 32)
FR_VOTES(quad, 4)
#undef FR_VOTES

template <unsigned P> FR_APART void threadgroup_barrier(at<P>, mem_flags flags, int = 0) {
#if defined(FR_CHECKED)
  fr_watch_barrier(place_of(self(), P), unsigned(flags), __builtin_return_address(0));
#endif
  (void)flags;
  self().state = fiber::AT_BARRIER;
  suspend();
}
template <unsigned P> FR_FN void simdgroup_barrier(at<P>, mem_flags flags, int = 0) {
  void* operands[] = {&flags};
  operate(P, operands, [](unsigned mask, void*** o) FR_QUIET { order_lanes(mask, o); });
}
template <unsigned P> FR_FN void quadgroup_barrier(at<P>, mem_flags, int = 0) {
  operate(P, nullptr, [](unsigned, void***) FR_QUIET {});
}

template <unsigned P, class T, class Q, class S = int>
FR_FN void simdgroup_load(at<P>, simdgroup_matrix<T, 8, 8>& m, const Q* p, S stride = 8,
                          ulong2 origin = ulong2(0, 0), bool transpose = false) {
  operate(P, nullptr, [](unsigned, void***) FR_QUIET {});
  lanes::matrix_load(self().index % 32, m, p, stride, origin, transpose);
}
template <unsigned P, class T, class Q, class S = int>
FR_FN void simdgroup_store(at<P>, const simdgroup_matrix<T, 8, 8>& m, Q* p, S stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_store(self().index % 32, m, p, stride, origin, transpose);
  operate(P, nullptr, [](unsigned, void***) FR_QUIET {});
}

template <bool ADD, class D, class A, class B, class C>
FR_QUIET void matrix_operation(unsigned, void*** o) {
  D* d[32];
  const A* a[32];
  const B* b[32];
  const C* c[32];
  static D no_d;
  static A no_a;
  static B no_b;
  static C no_c;
  for (unsigned i = 0; i < 32; ++i) {
    d[i] = o[i] ? static_cast<D*>(o[i][0]) : &no_d;
    a[i] = o[i] ? static_cast<const A*>(o[i][1]) : &no_a;
    b[i] = o[i] ? static_cast<const B*>(o[i][2]) : &no_b;
    c[i] = o[i] ? static_cast<const C*>(o[i][3]) : &no_c;
  }
  lanes::matrix_multiply(d, a, b, ADD ? c : static_cast<const C* const*>(nullptr));
}
template <unsigned P, class T, class A, class B>
FR_FN void simdgroup_multiply(at<P>, simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                              const simdgroup_matrix<B, 8, 8>& b) {
  typedef simdgroup_matrix<T, 8, 8> D;
  void* o[4] = {&d, const_cast<simdgroup_matrix<A, 8, 8>*>(&a), const_cast<simdgroup_matrix<B, 8, 8>*>(&b), &d};
  operate(P, o, &matrix_operation<false, D, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>, D>);
}
template <unsigned P, class T, class A, class B, class C>
FR_FN void simdgroup_multiply_accumulate(at<P>, simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  void* o[4] = {&d, const_cast<simdgroup_matrix<A, 8, 8>*>(&a), const_cast<simdgroup_matrix<B, 8, 8>*>(&b),
                const_cast<simdgroup_matrix<C, 8, 8>*>(&c)};
  operate(P, o, &matrix_operation<true, simdgroup_matrix<T, 8, 8>, simdgroup_matrix<A, 8, 8>,
                                  simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>>);
}

}  // namespace metal
}  // namespace fr

#if defined(FR_CHECKED)
extern "C" __attribute__((visibility("hidden"))) void fr_watch_leave() { ::fr::leave_thread(); }

namespace fr {
namespace detail {
// What the elements of an array are made of.
template <class T> struct scalar_of { using type = T; };
template <class T, size_t N> struct scalar_of<T[N]> : scalar_of<T> {};
template <class T, size_t N> struct scalar_of<const T[N]> : scalar_of<T> {};
template <class T, size_t N> struct scalar_of<volatile T[N]> : scalar_of<T> {};
template <class T, int N> struct scalar_of<vec<T, N>> : scalar_of<T> {};
template <class T> struct scalar_of<atomic<T>> : scalar_of<T> {};
template <class T> struct scalar_of<const T> : scalar_of<T> {};
template <class T> struct scalar_of<volatile T> : scalar_of<T> {};
}  // namespace detail

// Threadgroup memory of a checked text: apart from all else.
template <class T> FR_FN T& watched_memory(const char* key, unsigned line, const char* name) {
  using S = typename detail::scalar_of<T>::type;
  constexpr int floats = metal::is_same_v<S, half> ? 1 : metal::is_same_v<S, bfloat> ? 2
                         : metal::is_same_v<S, float> ? 3 : metal::is_same_v<S, double> ? 4
                         : detail::scalar_v<S> ? 0 : 5;
  return *static_cast<T*>(fr_watch_shared(key, line, name, sizeof(T), sizeof(S), floats));
}
}  // namespace fr
#define FR_MEMORY(LINE, NAME)                \
  static char fr_k_##NAME;                   \
  fr_t_##NAME& NAME = ::fr::watched_memory<fr_t_##NAME>(&fr_k_##NAME, LINE, #NAME)
#endif

#define FR_AT ::fr::at<__COUNTER__>(),
#define FR_AT_ONLY ::fr::at<__COUNTER__>()
