/* Faults inside kernels: what a GPU shrugs off must not end the process. Included by runtime.c alone.
 *
 * Kernels written for a GPU read outside their buffers: a border pixel is loaded first and discarded
 * afterwards. A GPU gives such a load some value. Here, where it hits memory that is not mapped, it
 * gets a page of zeros, which is given back when the thread has done its share; an integer division
 * by zero gives zero. A store outside, a load that cannot be served, a stack that is too small and a
 * division that cannot be skipped end the job with a code instead; faults outside kernels go to
 * whoever handled them before.
 *
 * A unit that never ends is given up in the same way, at the second interrupt (SIGINT, from Ctrl-C) of its
 * job: whoever handles interrupts, such as Python, cannot act on them before the kernel returns. The
 * threads of the job are told by a SIGSEGV, which our workers do not block.
 */
#ifndef FERRULE_FAULTS_H
#define FERRULE_FAULTS_H

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#if defined(__linux__)
#include <ucontext.h>
#endif

enum {
  MAX_ZERO_PAGES = 1024, /* of one thread in one job */
  MAX_RETRIES = 16,
  SIGNAL_STACK = 64 * 1024
};

/* What a thread needs for the faults of its kernels. */
typedef struct {
  jmp_buf back; /* where a thread goes on whose kernel is given up */
  volatile bool in_kernel;
  volatile bool shielded;       /* in what must not be left half done: an allocation, a handler */
  const volatile uint32_t* abandoned; /* of the job that the thread runs */
  int32_t code;         /* why it was given up */
  void* address;        /* what it accessed then */
  bool was_abandoned;   /* the thread's last job */
  void* retried;        /* the last address that another thread was serving, and how often */
  int retries, pages;
  void* page[MAX_ZERO_PAGES]; /* pages of zeros that this thread has mapped */
  bool owns_signal_stack;
  char signal_stack[SIGNAL_STACK] __attribute__((aligned(16))); /* a handler cannot run on a stack that has overflowed */
} guard;

/* The guard of the calling thread, or NULL. Called by the handler, so it may only read memory. */
static guard* guard_of_thread(void);

/* Tells the threads of jobs that have been interrupted twice to give their units up: pokes them, but for the
 * calling thread. Called by a handler. */
static void abandon_jobs(void);

/* Who had each signal before us, and when we first asked for it. */
static struct sigaction before[NSIG], first[NSIG];
static uint32_t pokes; /* SIGSEGVs that `poke` has sent, and that have not come */

static void poke(pthread_t thread) {
  __atomic_fetch_add(&pokes, 1, __ATOMIC_ACQ_REL);
  if (pthread_kill(thread, SIGSEGV)) __atomic_fetch_sub(&pokes, 1, __ATOMIC_ACQ_REL);
}

/* Whether a SIGSEGV that no access caused is one of `poke`. */
static bool take_poke(void) {
  uint32_t left = __atomic_load_n(&pokes, __ATOMIC_ACQUIRE);
  while (left)
    if (__atomic_compare_exchange_n(&pokes, &left, left - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return true;
  return false;
}

/* Leaves the kernel that the calling thread runs. */
static void give_up(guard* g, int32_t code, void* address) {
  g->code = code;
  g->address = address;
  g->in_kernel = false;
  _longjmp(g->back, 1);
}

/* Leaves the kernel if its job is abandoned, and that may be now. */
static void obey(guard* g) {
  if (g->in_kernel && !g->shielded && g->abandoned && *g->abandoned) give_up(g, FR_E_ABANDONED, NULL);
}

static bool is_write(const void* context) {
  const ucontext_t* u = (const ucontext_t*)context;
#if defined(__linux__) && defined(__x86_64__)
  return (u->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#elif defined(__linux__) && defined(__aarch64__)
  const unsigned char* p = (const unsigned char*)u->uc_mcontext.__reserved;
  for (;;) { /* records of {magic, size}; the one of the syndrome register says read or write */
    uint32_t magic, size;
    memcpy(&magic, p, 4);
    memcpy(&size, p + 4, 4);
    if (magic == 0x45535201) {
      uint64_t syndrome;
      memcpy(&syndrome, p + 8, 8);
      return (syndrome >> 6) & 1;
    }
    if (!magic || !size) return true;
    p += size;
  }
#elif defined(__APPLE__) && defined(__aarch64__)
  return (u->uc_mcontext->__es.__esr >> 6) & 1;
#elif defined(__APPLE__) && defined(__x86_64__)
  return (u->uc_mcontext->__es.__err & 2) != 0;
#else
  (void)u;
  return true;
#endif
}

/* Sees to it that a load which found nothing mapped finds zeros when it is repeated. */
static bool serve_load(guard* g, void* address) {
  size_t size = page_size();
  void* page = (void*)((uintptr_t)address & ~(uintptr_t)(size - 1));
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_FIXED_NOREPLACE
  flags |= MAP_FIXED_NOREPLACE;
#endif
  if (g->pages == MAX_ZERO_PAGES || !page) return false;
  void* got = mmap(page, size, PROT_READ, flags, -1, 0);
  if (got == page) {
    g->page[g->pages++] = page;
    return true;
  }
  if (got == MAP_FAILED && errno != EEXIST) return false;
  if (got != MAP_FAILED) munmap(got, size); /* a system without NOREPLACE chose another place */
  /* Something is there by now: another thread's page for the same load, which will do, unless it
   * is the guard of a stack, which always faults. */
  g->retries = g->retried == address ? g->retries + 1 : 0;
  g->retried = address;
  return g->retries < MAX_RETRIES;
}

/* Gives back the pages of zeros. */
static void drop_zeros(guard* g) {
  while (g->pages) munmap(g->page[--g->pages], page_size());
  g->retried = NULL;
}

/* How often a signal has come back to us after we passed it on. Two runtimes in one process (a
 * package of AOTInductor has one of its own) that start kernels in turn are each before the other.
 * What was noted of a signal that somebody else has ended, by a jump, lies no higher on the stack
 * than we do now. */
static int times_passed(int number, const siginfo_t* info) {
  static struct {
    const siginfo_t* info;
    const char* frame;
    int times;
  } passed[NSIG];
  const char* frame = (const char*)__builtin_frame_address(0);
  bool again = passed[number].info == info && frame < passed[number].frame;
  passed[number].times = again ? passed[number].times + 1 : 0;
  passed[number].info = info;
  passed[number].frame = frame;
  return passed[number].times;
}

static bool is_handled(const struct sigaction* action) {
  return (action->sa_flags & SA_SIGINFO) || (action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN);
}

static void handle(const struct sigaction* action, int number, siginfo_t* info, void* context) {
  if (action->sa_flags & SA_SIGINFO) action->sa_sigaction(number, info, context);
  else action->sa_handler(number);
}

/* Lets the signal do what it would have done without us. */
static void pass_on(int number, siginfo_t* info, void* context) {
  static volatile int passing[NSIG];
  int times = times_passed(number, info);
  const struct sigaction* old = times == 1 ? &first[number] : &before[number];
  /* A handler that prints a report, then raises the signal for its own predecessor, may come back
   * to us, its successor: that one asks for the end. */
  if (!is_handled(old) || times > 1 || (passing[number] && info->si_code <= 0)) {
    signal(number, SIG_DFL);
    if (info->si_code <= 0) raise(number); /* else the instruction runs again, and faults again */
    return;
  }
  passing[number] = passing[number] + 1;
  handle(old, number, info, context);
  passing[number] = passing[number] - 1;
}

/* Metal: an integer division by zero raises nothing and gives some value. Here it gives zero, and the
 * least integer divided by -1 is itself, as where a multiplication stands for the division. */
#if defined(__linux__) && defined(__x86_64__)
typedef struct {
  size_t length; /* of the instruction, so that it can be skipped; 0 where it divides nothing */
  int bytes;     /* of the divisor */
  bool by_zero;
} division;

static division division_at(const unsigned char* p, const greg_t* r) {
  static const unsigned char numbered[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                           REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  division d = {0, 4, true};
  size_t n = 0;
  bool small = false, elsewhere = false; /* relative to a segment, or to 32 bits: not looked at */
  for (;; n++) {
    if (p[n] == 0x66) small = true;
    else if (p[n] == 0x67 || p[n] == 0x64 || p[n] == 0x65) elsewhere = true;
    else if (p[n] != 0x2e && p[n] != 0x3e) break;
  }
  unsigned rex = (p[n] & 0xf0) == 0x40 ? p[n++] : 0;
  if (p[n] != 0xf6 && p[n] != 0xf7) return d;
  d.bytes = p[n++] == 0xf6 ? 1 : rex & 8 ? 8 : small ? 2 : 4;
  unsigned modrm = p[n++], mod = modrm >> 6, rm = modrm & 7;
  if (((modrm >> 3) & 7) < 6) return d; /* /6 is div, /7 is idiv */
  const unsigned high = d.bytes == 1 && !rex && mod == 3 && rm >= 4; /* AH to BH */
  uint64_t place = (uint64_t)r[numbered[high ? rm - 4 : rm | (rex & 1) << 3]];
  const void* divisor = (const char*)&place + high;
  if (mod != 3) {
    bool based = mod || rm != 5, relative = !based; /* to the next instruction */
    if (rm == 4) {
      unsigned sib = p[n++], index = ((sib >> 3) & 7) | (rex & 2) << 2;
      based = mod || (sib & 7) != 5;
      place = based ? (uint64_t)r[numbered[(sib & 7) | (rex & 1) << 3]] : 0;
      if (index != 4) place += (uint64_t)r[numbered[index]] << (sib >> 6);
    }
    int32_t far = 0;
    if (mod == 1) far = (signed char)p[n];
    else if (mod == 2 || !based) memcpy(&far, p + n, 4);
    n += mod == 1 ? 1 : mod == 2 || !based ? 4 : 0;
    if (relative) place = (uint64_t)(uintptr_t)(p + n);
    divisor = (const void*)(uintptr_t)(place + (uint64_t)(int64_t)far);
  }
  uint64_t value = 0;
  if (!elsewhere) memcpy(&value, divisor, (size_t)d.bytes);
  d.by_zero = !value;
  d.length = n;
  return d;
}

static bool skip_division(void* context) {
  greg_t* r = ((ucontext_t*)context)->uc_mcontext.gregs;
  division d = division_at((const unsigned char*)r[REG_RIP], r);
  if (!d.length) return false;
  greg_t kept = d.bytes < 4 ? ~(greg_t)0xffff : 0; /* what such an instruction does not write */
  greg_t least = d.by_zero ? 0 : d.bytes == 8 ? ~(greg_t)0 : ((greg_t)1 << 8 * d.bytes) - 1;
  r[REG_RAX] &= kept | least;                    /* the quotient; of a byte AX holds both */
  if (d.bytes > 1) r[REG_RDX] &= kept;           /* the remainder */
  r[REG_RIP] += (greg_t)d.length;
  return true;
}
#else
static bool skip_division(void* context) {
  (void)context;
  return false;
}
#endif

static void on_fault(int number, siginfo_t* info, void* context) {
  guard* g = guard_of_thread();
  if (number == SIGSEGV && info->si_code <= 0 && take_poke()) {
    if (g) obey(g);
    return;
  }
  if (!g || !g->in_kernel || info->si_code <= 0) { /* not ours, or sent by another process */
    pass_on(number, info, context);
    return;
  }
  if (number == SIGFPE && skip_division(context)) return;
  int kept = errno;
  bool served = number == SIGSEGV && info->si_code == SEGV_MAPERR && !is_write(context) &&
                serve_load(g, info->si_addr);
  errno = kept;
  if (served) return;
  void* address = info->si_addr;
#if defined(__linux__)
  if (info->si_code == SI_KERNEL) address = (void*)UINTPTR_MAX; /* si_addr says nothing then */
#endif
  give_up(g, number == SIGFPE ? FR_E_DIVISION : FR_E_FAULT, address);
}

/* Lets whoever had interrupts before handle this one, too; then units may be given up. */
static void on_interrupt(int number, siginfo_t* info, void* context) {
  guard* g = guard_of_thread();
  bool shielded = g && g->shielded;
  if (g) g->shielded = true; /* a poke by another thread must not end this handler */
  int kept = errno, times = times_passed(number, info);
  if (!times) abandon_jobs();
  const struct sigaction* old = times ? &first[number] : &before[number];
  /* Of two runtimes each is before the other. */
  if (times <= 1 && is_handled(old)) handle(old, number, info, context);
  errno = kept;
  if (!g) return;
  g->shielded = shielded;
  if (g->in_kernel && !shielded && g->abandoned && *g->abandoned) {
    /* Leaving the handler by a jump leaves the signals blocked that it runs without. */
    pthread_sigmask(SIG_SETMASK, &((const ucontext_t*)context)->uc_sigmask, NULL);
    obey(g);
  }
}

static bool is_ours(const struct sigaction* action) {
  return (action->sa_flags & SA_SIGINFO) &&
         (action->sa_sigaction == on_fault || action->sa_sigaction == on_interrupt);
}

/* Comes before whoever has a signal. Of interrupts, only if somebody handles them, and in the same way. */
static void watch(int number) {
  struct sigaction now, ours;
  if (sigaction(number, NULL, &now) || is_ours(&now)) return;
  if (number == SIGINT) {
    if (!is_handled(&now)) return;
    ours = now;
    ours.sa_sigaction = on_interrupt;
    ours.sa_flags = (now.sa_flags & ~(int)SA_RESETHAND) | SA_SIGINFO | SA_ONSTACK;
  } else {
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
  }
  before[number] = now; /* before ours: a fault elsewhere may come at once */
  if (!first[number].sa_flags && !first[number].sa_handler) first[number] = now; /* all zero: nobody, or not asked yet */
  sigaction(number, &ours, NULL);
}

/* Whoever set a handler since the last job, such as Python's faulthandler, is asked after us. Such
 * a handler is set for all three signals of faults, so one system call finds out. That costs 0.1 us, a third of
 * a small job, so it is done once per tick of the coarse clock (1 to 4 ms). */
static void watch_faults(void) {
#ifdef CLOCK_MONOTONIC_COARSE
  static int64_t looked; /* at which tick */
  struct timespec tick;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &tick);
  int64_t at = (int64_t)tick.tv_sec * 1000000000 + tick.tv_nsec;
  if (__atomic_exchange_n(&looked, at, __ATOMIC_RELAXED) == at) return;
#endif
  watch(SIGINT);
  struct sigaction now;
  if (sigaction(SIGSEGV, NULL, &now) == 0 && is_ours(&now)) return;
  watch(SIGBUS);
  watch(SIGFPE);
  watch(SIGSEGV);
}

/* Gives the calling thread a stack for handlers, if it has none. */
static void add_signal_stack(guard* g) {
  stack_t now, ours;
  if (sigaltstack(NULL, &now) || !(now.ss_flags & SS_DISABLE)) return;
  memset(&ours, 0, sizeof ours);
  ours.ss_sp = g->signal_stack;
  ours.ss_size = SIGNAL_STACK;
  g->owns_signal_stack = sigaltstack(&ours, NULL) == 0;
}

static void remove_signal_stack(guard* g) {
  stack_t now, none;
  if (!g->owns_signal_stack || sigaltstack(NULL, &now) || now.ss_sp != g->signal_stack) return;
  memset(&none, 0, sizeof none);
  none.ss_flags = SS_DISABLE;
  none.ss_size = SIGNAL_STACK; /* macOS checks it even here */
  sigaltstack(&none, NULL);
  g->owns_signal_stack = false;
}

#endif
