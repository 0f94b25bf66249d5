/* Faults inside kernels: what a GPU shrugs off must not end the process. Included by runtime.c alone.
 *
 * Kernels written for a GPU read outside their buffers: a border pixel is loaded first and discarded
 * afterwards. A GPU gives such a load some value. Here, where it hits memory that is not mapped, it
 * gets a page of zeros, which is given back when the thread has done its share; an integer division
 * by zero gives zero. A store outside, a load that cannot be served, a stack that is too small and a
 * division that cannot be skipped end the job with a code instead; faults outside kernels go to
 * whoever handled them before.
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
  int32_t code;         /* why it was given up */
  void* address;        /* what it accessed then */
  void* retried;        /* the last address that another thread was serving, and how often */
  int retries, pages;
  void* page[MAX_ZERO_PAGES]; /* pages of zeros that this thread has mapped */
  bool owns_signal_stack;
  char signal_stack[SIGNAL_STACK] __attribute__((aligned(16))); /* a handler cannot run on a stack that has overflowed */
} guard;

/* The guard of the calling thread, or NULL. Called by the handler, so it may only read memory. */
static guard* guard_of_thread(void);

static struct sigaction before_segv, before_bus, before_fpe; /* who had a signal before us */
static struct sigaction first_segv, first_bus, first_fpe;    /* when we first asked for it */

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

/* Lets the signal do what it would have done without us. */
static void pass_on(int number, siginfo_t* info, void* context) {
  static volatile int passing[NSIG];
  int times = times_passed(number, info);
  struct sigaction* old =
      number == SIGSEGV ? &before_segv : number == SIGBUS ? &before_bus : &before_fpe;
  if (times == 1)
    old = number == SIGSEGV ? &first_segv : number == SIGBUS ? &first_bus : &first_fpe;
  bool handled = (old->sa_flags & SA_SIGINFO) ||
                 (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN);
  /* A handler that prints a report, then raises the signal for its own predecessor, may come back
   * to us, its successor: that one asks for the end. */
  if (!handled || times > 1 || (passing[number] && info->si_code <= 0)) {
    signal(number, SIG_DFL);
    if (info->si_code <= 0) raise(number); /* else the instruction runs again, and faults again */
    return;
  }
  passing[number] = passing[number] + 1;
  if (old->sa_flags & SA_SIGINFO) old->sa_sigaction(number, info, context);
  else old->sa_handler(number);
  passing[number] = passing[number] - 1;
}

/* Metal: an integer division by zero raises nothing and gives some value. Here it gives zero: the
 * length of the division instruction at `p`, so that it can be skipped, or 0 if it is none, and how
 * many bytes it divides by. */
#if defined(__linux__) && defined(__x86_64__)
static size_t division_length(const unsigned char* p, int* bytes) {
  size_t n = 0;
  bool small = false, wide = false;
  for (;; n++) {
    if (p[n] == 0x66) small = true;
    else if (p[n] != 0x67 && p[n] != 0x2e && p[n] != 0x3e && p[n] != 0x64 && p[n] != 0x65) break;
  }
  if ((p[n] & 0xf0) == 0x40) wide = p[n++] & 8;   /* REX, and its W */
  if (p[n] != 0xf6 && p[n] != 0xf7) return 0;
  *bytes = p[n++] == 0xf6 ? 1 : wide ? 8 : small ? 2 : 4;
  unsigned modrm = p[n++], mod = modrm >> 6, rm = modrm & 7;
  if (((modrm >> 3) & 7) < 6) return 0;           /* /6 is div, /7 is idiv */
  if (mod == 3) return n;
  if (rm == 4 && (p[n++] & 7) == 5 && mod == 0) return n + 4; /* SIB without a base */
  if (mod == 0) return rm == 5 ? n + 4 : n;       /* relative to the next instruction */
  return n + (mod == 1 ? 1 : 4);
}

static bool skip_division(void* context) {
  greg_t* r = ((ucontext_t*)context)->uc_mcontext.gregs;
  int bytes;
  size_t length = division_length((const unsigned char*)r[REG_RIP], &bytes);
  if (!length) return false;
  greg_t kept = bytes < 4 ? ~(greg_t)0xffff : 0; /* what such an instruction does not write */
  r[REG_RAX] &= kept;                            /* the quotient; of a byte AX holds both */
  if (bytes > 1) r[REG_RDX] &= kept;             /* the remainder */
  r[REG_RIP] += (greg_t)length;
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
  g->address = info->si_addr;
#if defined(__linux__)
  if (info->si_code == SI_KERNEL) g->address = (void*)UINTPTR_MAX; /* si_addr says nothing then */
#endif
  g->code = number == SIGFPE ? FR_E_DIVISION : FR_E_FAULT;
  g->in_kernel = false;
  _longjmp(g->back, 1);
}

static bool is_ours(const struct sigaction* action) {
  return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_fault;
}

static void watch(int number, struct sigaction* before, struct sigaction* first) {
  struct sigaction now, ours;
  if (sigaction(number, NULL, &now) || is_ours(&now)) return;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  *before = now; /* before ours: a fault elsewhere may come at once */
  if (!first->sa_flags && !first->sa_handler) *first = now; /* all zero: nobody, or not asked yet */
  sigaction(number, &ours, NULL);
}

/* Whoever set a handler since the last job, such as Python's faulthandler, is asked after us. Such
 * a handler is set for all three signals, so one system call finds out. That costs 0.1 us, a third of
 * a small job, so it is done once per tick of the coarse clock (1 to 4 ms). */
static void watch_faults(void) {
#ifdef CLOCK_MONOTONIC_COARSE
  static int64_t looked; /* at which tick */
  struct timespec tick;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &tick);
  int64_t at = (int64_t)tick.tv_sec * 1000000000 + tick.tv_nsec;
  if (__atomic_exchange_n(&looked, at, __ATOMIC_RELAXED) == at) return;
#endif
  struct sigaction now;
  if (sigaction(SIGSEGV, NULL, &now) == 0 && is_ours(&now)) return;
  watch(SIGBUS, &before_bus, &first_bus);
  watch(SIGFPE, &before_fpe, &first_fpe);
  watch(SIGSEGV, &before_segv, &first_segv);
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
