// NaN and infinity: the processor says which instruction makes one. It traps, is noted, and goes on
// without traps until the thread's next access.
#pragma once
#include "operands.h"

#include <sched.h>
#include <ucontext.h>

namespace {

#if defined(__x86_64__)
constexpr bool KNOWS_ORIGINS = true;
#else
constexpr bool KNOWS_ORIGINS = false;
#endif
constexpr unsigned MOST_TRAPS = 4096;

void arm() {
  w.disarmed = false;
  w.attention = w.stop;
#if defined(__x86_64__)
  if (w.trapped < MOST_TRAPS && w.options.floats)
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x3fu) & ~0x680u);  // invalid, by zero, overflow
#endif
}

void disarm() {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x3fu) | 0x1f80u);
#endif
}

void note(fault_origin& from, uintptr_t pc) {
  for (unsigned i = 1; i < MOST_ORIGINS && from.pc[i] != pc; ++i)
    if (!from.pc[i]) from.pc[i] = pc;
}

computation* made_at(uintptr_t pc) {
  for (computation& known : w.made)
    if (known.pc == pc) return &known;
  return nullptr;
}

void note_made(uintptr_t pc, unsigned code, double first, double second) {
  computation* known = made_at(pc);
  if (!known) known = &w.made[w.next_made++ % MOST_MADE];
  *known = {pc, code, {first, second}};
}

void tell_origins(watch_event& e, const fault_origin& from) {
  for (unsigned k = 0; k < MOST_ORIGINS; ++k) {
    e.origin[k] = offset(from.pc[k]);
    if (const computation* known = from.pc[k] ? made_at(from.pc[k]) : nullptr) {
      e.operation[k] = known->code;
      memcpy(e.operand[k], known->operand, sizeof known->operand);
    }
  }
}

#if defined(__x86_64__)
// Conversions to integers and comparisons make no NaN.
bool makes_floats(const unsigned char* p) {
  while (*p == 0xf3 || *p == 0xf2 || *p == 0x66 || (*p & 0xf0) == 0x40) ++p;
  unsigned op = 0;
  if (*p == 0x0f) op = p[1];
  else if (*p == 0xc5) op = p[2];
  else if (*p == 0xc4 && (p[1] & 31) == 1) op = p[3];
  else if (*p == 0x62 && (p[1] & 7) == 1) op = p[4];
  return op != 0x2c && op != 0x2d && op != 0x2e && op != 0x2f && op != 0x5b && op != 0xe6 && op != 0xc2 &&
         op != 0x78 && op != 0x79 && op != 0x7a && op != 0x7b;
}
#endif

// Whether a signal is of the launch that this copy of the library runs, on this thread.
bool trapped(siginfo_t* info, void* context) {
  if (!w.open || !pthread_equal(w.thread, pthread_self())) return false;
#if defined(__x86_64__)
  const bool floats = info->si_code == FPE_FLTINV || info->si_code == FPE_FLTDIV || info->si_code == FPE_FLTOVF;
  if (floats && w.running) {
    ucontext_t* u = static_cast<ucontext_t*>(context);
    const uintptr_t pc = uintptr_t(u->uc_mcontext.gregs[REG_RIP]);
    u->uc_mcontext.fpregs->mxcsr = (u->uc_mcontext.fpregs->mxcsr & ~0x3fu) | 0x1f80u;
    w.disarmed = true;
    w.attention = 1;
    ++w.trapped;
    if (fr_watch_current != NOBODY && makes_floats(reinterpret_cast<const unsigned char*>(pc))) {
      fault_origin* all = info->si_code == FPE_FLTINV ? w.invalid : w.infinite;
      note(all[fr_watch_current], pc + 1);
      note(all[MOST_THREADS], pc + 1);
      double first = 0, second = 0;
      const unsigned code = operands_of(u, &first, &second);
      note_made(pc + 1, code, first, second);
    }
    return true;
  }
#endif
  if (info->si_code <= 0 && w.stop) {  // of `fr_watch_stop`, to a loop without accesses
    uintptr_t pc = w.last, stack = w.fibers_begin;
#if defined(__x86_64__)
    const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    pc = uintptr_t(registers[REG_RIP]) + 1, stack = uintptr_t(registers[REG_RSP]);
#endif
    // Not while the scheduler runs, or has just been left: only a thread's own stack can be left.
    if (fr_watch_current != NOBODY && stack >= w.fibers_begin && stack < w.fibers_end) give_up(pc);
    return true;
  }
  return false;
}

// What is told of signals while launches run: whose they may be, and whose they were before.
struct {
  watch_launch copy[MOST_COPIES];
  unsigned count;
  struct sigaction before;
  unsigned set;  // 1: somebody sets the handler; 2: it is set
} traps;

void on_trap(int number, siginfo_t* info, void* context) {
  for (unsigned i = 0; i < traps.count; ++i)
    if (traps.copy[i].trap(number, info, context)) return;
  const struct sigaction& before = traps.before;
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
  else signal(number, SIG_DFL);
}

// No signal of ours comes to this thread any more.
void end_watch() {
  __atomic_store_n(&w.running, 0, __ATOMIC_SEQ_CST);
  do sched_yield();  // what was sent is delivered on the way back
  while (__atomic_load_n(&w.poking, __ATOMIC_SEQ_CST));
  sched_yield();
  disarm();
}

}  // namespace
