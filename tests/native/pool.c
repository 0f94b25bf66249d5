/* Exercises the C runtime from C, so that sanitizers see all of it. Exits 0 when all checks hold.
 *
 * Includes runtime.c itself: its static functions are checked too, and failures of the system are
 * injected through the three functions below.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

static size_t map_limit = SIZE_MAX; /* larger mappings fail */
static int thread_limit = 1 << 20;  /* so many more threads can be made */

static void* limited_mmap(void* at, size_t size, int prot, int flags, int file, off_t offset) {
  return size > map_limit ? MAP_FAILED : mmap(at, size, prot, flags, file, offset);
}

static int limited_create(pthread_t* thread, const pthread_attr_t* attributes,
                          void* (*body)(void*), void* argument) {
  size_t stack = 0;
  if (attributes) pthread_attr_getstacksize(attributes, &stack);
  if (stack > map_limit || __atomic_fetch_sub(&thread_limit, 1, __ATOMIC_RELAXED) <= 0) return 11;
  return pthread_create(thread, attributes, body, argument);
}

static int old_kernel; /* refuse the guards that need no mapping of their own */

__attribute__((unused)) static int limited_madvise(void* at, size_t size, int advice) {
  return old_kernel && advice == 102 ? -1 : madvise(at, size, advice);
}

#define madvise limited_madvise
#define mmap limited_mmap
#define pthread_create limited_create
#include "runtime.c"
#undef madvise
#undef mmap
#undef pthread_create

#include <sys/stat.h>
#include <sys/wait.h>

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      fprintf(stderr, "pool.c:%d: %s does not hold\n", __LINE__, #condition); \
      exit(1);                                                              \
    }                                                                       \
  } while (0)

#if defined(__has_feature) /* clang's way to say so */
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#elif __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
enum { ROUNDS = 150 };
#else
enum { ROUNDS = 1500 };
#endif

static uint32_t random_below(uint32_t* seed, uint32_t limit) {
  *seed = *seed * 1664525u + 1013904223u;
  return (*seed >> 8) % limit;
}

/* Runs `function` in a forked child. Returns waitpid's status. A child that hangs is killed. */
static int in_child(void (*function)(void)) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    function();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

/* ------------------------------------------------------------------ each unit runs exactly once */

enum { MAX_UNITS = 5000 };

typedef struct {
  uint64_t units;
  int threads;
  uint32_t work; /* unit i works for as long as i % 7 == 0 ? 50 * work : work */
  uint32_t seen[MAX_UNITS];
  uint64_t calls;
} counted;

static void count_units(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  counted* c = (counted*)(uintptr_t)launch;
  CHECK(begin < end && end <= c->units);
  CHECK(worker->index >= 0 && worker->index < c->threads && worker->status == 0);
  volatile uint32_t sink = 0;
  for (uint64_t i = begin; i < end; i++) {
    c->seen[i]++; /* not atomic: a unit that ran twice is a race that the sanitizer reports */
    for (uint32_t k = 0; k < (i % 7 ? c->work : c->work * 50); k++) sink = sink + k;
  }
  __atomic_fetch_add(&c->calls, 1, __ATOMIC_RELAXED);
}

static void run_counted(counted* c, uint64_t units, int threads, uint32_t work) {
  memset(c, 0, sizeof *c);
  c->units = units;
  c->threads = threads;
  c->work = work;
  CHECK(fr_run(count_units, c, units, threads) == FR_OK);
  for (uint64_t i = 0; i < MAX_UNITS; i++) CHECK(c->seen[i] == (i < units));
  CHECK(c->calls <= (uint64_t)threads * 2 * CHUNKS_PER_THREAD);
  if (threads == 1) CHECK(c->calls == (units > 0));
}

static counted one;

static void test_units(void) {
  uint32_t seed = 1;
  for (int i = 0; i < ROUNDS; i++) {
    uint64_t units = random_below(&seed, i % 3 ? 40 : MAX_UNITS);
    run_counted(&one, units, 1 + (int)random_below(&seed, 6), random_below(&seed, 30));
  }
  run_counted(&one, MAX_UNITS, 40, 1);
}

static void* call_often(void* argument) {
  uint32_t seed = (uint32_t)(uintptr_t)argument;
  counted* c = (counted*)malloc(sizeof *c);
  CHECK(c);
  for (int i = 0; i < ROUNDS / 4; i++)
    run_counted(c, random_below(&seed, 300), 1 + (int)random_below(&seed, 4),
                random_below(&seed, 50));
  free(c);
  return NULL;
}

static void test_concurrent_callers(void) {
  pthread_t callers[4];
  for (uintptr_t i = 0; i < 4; i++)
    CHECK(pthread_create(&callers[i], NULL, call_often, (void*)(i + 7)) == 0);
  for (int i = 0; i < 4; i++) CHECK(pthread_join(callers[i], NULL) == 0);
}

static void add_units(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)worker;
  __atomic_fetch_add((uint64_t*)(uintptr_t)launch, end - begin, __ATOMIC_RELAXED);
}

static void test_many_units(void) {
  for (int threads = 1; threads < 5; threads++) {
    uint64_t sum = 0;
    CHECK(fr_run(add_units, &sum, FR_MAX_UNITS, threads) == FR_OK && sum == FR_MAX_UNITS);
  }
}

/* A job that comes back whenever its time is up, and goes on with another number of threads. */
static void test_pieces(void) {
  uint32_t seed = 5;
  for (int i = 0; i < ROUNDS / 4; i++) {
    uint64_t units = 1 + random_below(&seed, MAX_UNITS - 1);
    memset(&one, 0, sizeof one);
    one.units = units;
    one.threads = 40;
    one.work = 20;
    fr_progress progress;
    progress.parts = 0;
    int status, pieces = 0;
    do {
      int threads = 1 + (int)random_below(&seed, i % 4 ? 4 : 40);
      int64_t limit = pieces < 20 ? 1 + (int64_t)random_below(&seed, 200000) : 0;
      status = fr_run_some(count_units, &one, units, threads, limit, &progress);
      CHECK(status == FR_OK || status == FR_MORE);
      pieces++;
    } while (status == FR_MORE);
    for (uint64_t u = 0; u < MAX_UNITS; u++) CHECK(one.seen[u] == (u < units));
    CHECK(fr_run_some(count_units, &one, units, 2, 0, &progress) == FR_OK); /* nothing is left */
  }
  fr_progress progress;
  progress.parts = FR_MAX_PARTS + 1;
  CHECK(fr_run_some(count_units, &one, 10, 2, 0, &progress) == FR_E_ARGUMENT);
  progress.parts = 0;
  CHECK(fr_run_some(count_units, &one, 0, 2, 0, &progress) == FR_OK);
}

/* ------------------------------------------------------------------------------------- failures */

static void fail_at(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  uint64_t unit = *(const uint64_t*)launch;
  if (begin <= unit && unit < end) worker->status = FR_E_KERNEL + 3;
}

static void call_again(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)begin, (void)end, (void)worker;
  uint64_t sum = 0;
  *(int*)(uintptr_t)launch = fr_run(add_units, &sum, 4, worker->index == 0 ? 1 : 2);
}

static void ask_too_much(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)begin, (void)end;
  size_t stride;
  void* got = *(const int*)launch ? worker->grow(worker, SIZE_MAX - 5)
                                  : worker->fiber_stacks(worker, SIZE_MAX / 4096, 8192, &stride);
  CHECK(got == NULL);
}

static void test_failures(void) {
  CHECK(fr_run(NULL, NULL, 1, 1) == FR_E_ARGUMENT);
  CHECK(fr_run(add_units, NULL, FR_MAX_UNITS + 1, 1) == FR_E_ARGUMENT);
  for (int threads = 1; threads < 5; threads++) {
    for (uint64_t unit = 0; unit < 100; unit += 9)
      CHECK(fr_run(fail_at, &unit, 100, threads) == FR_E_KERNEL + 3);
    int answer = -1;
    CHECK(fr_run(call_again, &answer, 1, threads) == FR_OK && answer == FR_E_NESTED);
    for (int which = 0; which < 2; which++)
      CHECK(fr_run(ask_too_much, &which, 5, threads) == FR_E_MEMORY);
    run_counted(&one, 100, threads, 1); /* and nothing of it is left behind */
  }
}

static void read_stack(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)begin, (void)end;
  *(size_t*)(uintptr_t)launch = worker->stack_bytes;
}

static void run_without_memory(void) {
  const size_t limits[] = {SIZE_MAX, 100 * MIB, 20 * MIB};
  for (int i = 0; i < 3; i++) { /* in threads that have no stack yet */
    size_t got = 0;
    map_limit = limits[i];
    CHECK(fr_run(read_stack, &got, 1, 1) == FR_OK && got == STACK_SIZES[i]);
    if (pthread_getspecific(key)) state_free(pthread_getspecific(key));
    CHECK(pthread_setspecific(key, NULL) == 0);
  }
  size_t got = 0;
  map_limit = MIB;
  CHECK(fr_run(read_stack, &got, 1, 1) == FR_E_MEMORY);
  map_limit = SIZE_MAX;
  CHECK(fr_run(read_stack, &got, 1, 1) == FR_OK);
  map_limit = MIB;
#ifndef FR_PORTABLE
  run_counted(&one, 1000, 4, 10); /* no worker gets a stack: the caller does it all */
  CHECK(pool.started == 0);
#endif
}

static void run_without_threads(void) {
#ifndef FR_PORTABLE
  thread_limit = 0;
  run_counted(&one, 1000, 4, 10);
  CHECK(pool.started == 0);
  thread_limit = 1;
  run_counted(&one, 1000, 4, 1000);
  CHECK(pool.started == 1);
#endif
  thread_limit = 100;
  run_counted(&one, 1000, 4, 1000);
  CHECK(pool.started == 3);
}

static void test_shortages(void) {
  CHECK(in_child(run_without_memory) == 0);
  CHECK(in_child(run_without_threads) == 0);
}

/* ------------------------------------------------------------------------------ what is lent out */

static void use_scratch(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  size_t bytes = *(const size_t*)launch;
  void* before = worker->scratch;
  bool enough = worker->scratch_bytes >= bytes;
  char* got = (char*)worker->grow(worker, bytes);
  CHECK(got && got == worker->scratch && worker->scratch_bytes >= bytes);
  CHECK((uintptr_t)got % 64 == 0 && (!enough || got == before));
  memset(got, (int)begin, worker->scratch_bytes);
  (void)end;
}

static void use_fibers(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  const size_t* shape = (const size_t*)launch;
  size_t stride = 0, again = 0;
  char* base = (char*)worker->fiber_stacks(worker, shape[0], shape[1], &stride);
  CHECK(base && stride >= shape[1] + page_size() && stride % page_size() == 0);
  for (size_t i = 0; i < shape[0]; i++) {
    base[i * stride] = (char)i;
    base[i * stride + shape[1] - 1] = (char)i;
  }
  CHECK(worker->fiber_stacks(worker, shape[0] / 2 + 1, shape[1], &again) == base);
  CHECK(again == stride);
  (void)begin, (void)end;
}

static void run_out_of_guards(void) { /* which costs the guards, nothing else */
  old_kernel = 1;
  state_free(pthread_getspecific(key));
  CHECK(pthread_setspecific(key, NULL) == 0);
  int of_others = split_guards;
  const size_t many[] = {MAX_SPLIT_GUARDS + 100, 5000}, few[] = {10, 50000};
  CHECK(fr_run(use_fibers, many, 1, 1) == FR_OK && split_guards == MAX_SPLIT_GUARDS);
  CHECK(fr_run(use_fibers, few, 1, 1) == FR_OK && split_guards == MAX_SPLIT_GUARDS);
  state_free(pthread_getspecific(key));
  CHECK(split_guards == of_others && pthread_setspecific(key, NULL) == 0);
}

static void deep_stack(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  volatile char lanes[100 * 1024 * 1024];
  for (size_t i = 0; i < sizeof lanes; i += 4096) lanes[i] = (char)begin;
  CHECK(worker->stack_bytes > sizeof lanes);
  CHECK(lanes[sizeof lanes / 4096 / 2 * 4096] == (char)begin);
  (void)launch, (void)end;
}

static float one_and_a_bit(void) {
  volatile float whole = 1, bit = 1e-9f;
  return whole + bit;
}

static void check_rounding(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)launch, (void)begin, (void)end, (void)worker;
  CHECK(one_and_a_bit() == 1.0f);
}

static void test_lent(void) {
  for (int threads = 1; threads < 4; threads++) {
    const size_t sizes[] = {1, 100000, 64, 3000000, 3000000};
    for (int i = 0; i < 5; i++) CHECK(fr_run(use_scratch, &sizes[i], 50, threads) == FR_OK);
    const size_t shapes[][2] = {{1024, 65536}, {32, 1000}, {32, 65536}, {7, 300000},
                                {100, 5000},   {1, 9000},  {1024, 65536}};
    for (int i = 0; i < 7; i++) CHECK(fr_run(use_fibers, shapes[i], 20, threads) == FR_OK);
    CHECK(fr_run(deep_stack, NULL, 4, threads) == FR_OK);
    CHECK(fesetround(FE_UPWARD) == 0);
    CHECK(fr_run(check_rounding, NULL, 200, threads) == FR_OK);
    CHECK(one_and_a_bit() > 1.0f && fesetround(FE_TONEAREST) == 0);
  }
  CHECK(in_child(run_out_of_guards) == 0);
}

static void* run_once(void* argument) {
  size_t bytes = 100000, shape[] = {64, 65536};
  CHECK(fr_run(use_scratch, &bytes, 2, 1) == FR_OK && fr_run(use_fibers, shape, 2, 1) == FR_OK);
  return argument;
}

static long mapped_pages(void) {
  long pages = 0;
  FILE* stream = fopen("/proc/self/statm", "r");
  if (stream) CHECK(fscanf(stream, "%ld", &pages) == 1 && fclose(stream) == 0);
  return pages;
}

static void test_threads_that_end(void) {
  long before = 0;
  for (int i = 0; i < 60; i++) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run_once, NULL) == 0 && pthread_join(thread, NULL) == 0);
    if (i == 3) before = mapped_pages();
  }
#ifndef SANITIZED /* a sanitizer's own maps grow */
  CHECK(mapped_pages() - before < (long)(256 * MIB / page_size())); /* not one stack more */
#endif
  (void)before;
}

/* ---------------------------------------------------------------------------------------- faults */

#ifndef SANITIZED /* which map memory at any time, and keep books of stacks that a jump falsifies */
static volatile char* nowhere; /* OUTSIDE bytes where nothing is mapped */
enum { OUTSIDE = 8 << 20 };

static bool nothing_mapped(void) {
  for (size_t at = 0; at < OUTSIDE; at += page_size())
    if (msync((void*)(uintptr_t)(nowhere + at), page_size(), MS_ASYNC) == 0) return false;
  return true;
}

static void load_outside(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)worker;
  for (uint64_t i = begin; i < end; i++)
    if (nowhere[i * *(const size_t*)launch] != 0) abort();
}

static void store_outside(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)begin, (void)worker;
  if (end > *(const size_t*)launch) nowhere[12345] = 1;
}

static void use_null(const void* launch, uint64_t begin, uint64_t end, fr_worker* w) {
  (void)begin, (void)end, (void)w;
  (void)*(const volatile char*)launch;
}

#if defined(__linux__) && defined(__x86_64__)
/* Every way to say where the divisor is; quotient and remainder are zero after each. */
#define DIVIDE(instruction)                                                                  \
  do {                                                                                       \
    uint64_t quotient = 9, remainder = 0, after = 0;                                         \
    __asm__ volatile(instruction "\n\tincq %[after]"                                         \
                     : "+a"(quotient), "+d"(remainder), [after] "+r"(after)                  \
                     : [b] "r"(b), [r12] "r"(r12), [r13] "r"(r13), [i] "r"(i), [c] "c"(c),   \
                       [r9] "r"(r9), [m] "m"(zeros[0])                                       \
                     : "cc");                                                                \
    CHECK(quotient == 0 && remainder == 0 && after == 1);                                    \
  } while (0)

static void divide(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)launch, (void)begin, (void)end, (void)worker;
  static uint64_t zeros[100];
  register uint64_t *b __asm__("rbx") = zeros, *r12 __asm__("r12") = zeros;
  register uint64_t *r13 __asm__("r13") = zeros, i __asm__("rsi") = 3, r9 __asm__("r9") = 0;
  uint64_t c = 0;
  DIVIDE("divb %b[c]");
  DIVIDE("idivb %b[r9]");
  DIVIDE("divw %w[c]");
  DIVIDE("divl %k[c]");
  DIVIDE("idivl %k[r9]");
  DIVIDE("divq %[r9]");
  DIVIDE("divl %[m]");
  DIVIDE("idivq %[m]");
  DIVIDE("divl (%[b])");
  DIVIDE("idivw 8(%[b])");
  DIVIDE("divq 400(%[b])");
  DIVIDE("divl (%[r12])");
  DIVIDE("idivq 16(%[r12])");
  DIVIDE("divl (%[r13])");
  DIVIDE("divl (%[b],%[i],4)");
  DIVIDE("idivq 8(%[r12],%[i],8)");
  DIVIDE("divb 300(%[r13],%[i])");
}
#else
static void divide(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)launch, (void)begin, (void)end, (void)worker; /* no trap, or one that ends the job */
}
#endif

static size_t fiber, below; /* which byte under which fiber's stack */

static void overflow_fiber(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)launch, (void)begin, (void)end;
  size_t stride;
  volatile char* base = (char*)worker->fiber_stacks(worker, 3, 20000, &stride);
  CHECK(base);
  volatile char* guard = base + (ptrdiff_t)(fiber % 3 * stride) - (ptrdiff_t)below;
  *guard = fiber % 2 ? 1 : *guard;
}

static char use_frames(volatile char* above, uint64_t depth) {
  volatile char frame[4000];
  frame[0] = *above;
  return depth ? (char)(use_frames(frame, depth - 1) + frame[0]) : frame[0];
}

static void overflow_stack(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker) {
  (void)launch, (void)begin, (void)end, (void)worker;
  volatile char start = 1;
  use_frames(&start, 256 * MIB / 4000);
}

static void find_nowhere(void) {
  void* hole = mmap(NULL, OUTSIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(hole != MAP_FAILED && munmap(hole, OUTSIDE) == 0);
  nowhere = (volatile char*)hole;
}

static void test_faults_in_kernels(void) {
  for (int threads = 1; threads < 4; threads++) {
    run_counted(&one, 1000, threads, 10); /* has all workers, so that nothing else maps memory */
    find_nowhere();
    for (int i = 0; i < ROUNDS / 10; i++) {
      size_t step = 64; /* many threads meet at each page */
      CHECK(fr_run(load_outside, &step, 1000, threads) == FR_OK && nothing_mapped());
    }
    size_t step = 4096;
    CHECK(fr_run(load_outside, &step, 1000, threads) == FR_OK && nothing_mapped());
    for (size_t from = 0; from < 100; from += 99) {
      CHECK(fr_run(store_outside, &from, 100, threads) == FR_E_FAULT && nothing_mapped());
      CHECK(fr_fault_address() == (void*)(uintptr_t)(nowhere + 12345));
    }
    CHECK(fr_run(use_null, NULL, 1, threads) == FR_E_FAULT && fr_fault_address() == NULL);
    CHECK(fr_run(divide, NULL, 100, threads) == FR_OK);
    if (threads == 1) CHECK(fr_run(load_outside, &step, MAX_ZERO_PAGES * 2, 1) == FR_E_FAULT);
    CHECK(nothing_mapped());
    for (fiber = 0; fiber < 6; fiber++, old_kernel = fiber >= 3)
      for (below = 1; below <= page_size(); below += page_size() - 1)
        CHECK(fr_run(overflow_fiber, NULL, 1, threads) == FR_E_FAULT);
    old_kernel = 0;
    CHECK(fr_run(overflow_stack, NULL, 9, threads) == FR_E_FAULT);
    run_counted(&one, 1000, threads, 10); /* and all goes on */
  }
}

/* A child that starts threads may map their stacks where nothing was before. */
static void load_nowhere(void) {
  find_nowhere();
  (void)*nowhere;
}

/* Handlers that were set before this are seen by the next job: it looks once per tick. */
static void wait_for_tick(void) { usleep(20000); }

static void handle_once(int number) {
  (void)number;
  _exit(42);
}

static struct sigaction previous;
static volatile int reports;

static void report(int number) { /* as Python's faulthandler does */
  reports = reports + 1;
  if (reports > 1) _exit(43);
  sigaction(number, &previous, NULL);
  raise(number);
}

static void fault_after_handler(void) {
  signal(SIGSEGV, handle_once);
  wait_for_tick();
  run_counted(&one, 100, 2, 1);
  load_nowhere();
}

static void fault_after_reporter(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = report;
  action.sa_flags = SA_NODEFER;
  CHECK(sigaction(SIGSEGV, &action, &previous) == 0);
  size_t step = 64;
  find_nowhere();
  wait_for_tick();
  CHECK(fr_run(load_outside, &step, 100, 2) == FR_OK && reports == 0);
  load_nowhere();
}

static void send_signal(void) { raise(SIGSEGV); }

static void forget_handlers(void) {
  signal(SIGSEGV, SIG_DFL);
  wait_for_tick();
  run_counted(&one, 100, 2, 1);
}

static void fault_after_none(void) {
  forget_handlers();
  load_nowhere();
}

static void reporter_after_us(void) {
  forget_handlers();
  fault_after_reporter();
}

static void send_after_none(void) {
  forget_handlers();
  send_signal();
}

static bool killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV; }

static void test_faults_elsewhere(void) {
  int status = in_child(fault_after_handler);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
  CHECK(killed(in_child(fault_after_none)));
  CHECK(killed(in_child(send_after_none)));
  CHECK(killed(in_child(reporter_after_us)));
}
#endif

/* ------------------------------------------------------------------------------------------ fork */

#ifndef __SANITIZE_THREAD__
/* Jobs of many times ALONE_NANOSECONDS, for a caller that is done before then starts no worker. */
static void run_some(void) {
  for (int i = 0; i < 20; i++) run_counted(&one, 200, 1 + i % 4, 1000);
  CHECK(pool.started == 3);
}
#endif

#ifndef SANITIZED
static uint32_t stop;

static void* call_until_stopped(void* argument) {
  counted* c = (counted*)malloc(sizeof *c);
  CHECK(c);
  while (!LOAD(&stop)) run_counted(c, 500, 3, 20);
  free(c);
  return argument;
}
#endif

/* Sanitizers keep locks and a list of threads of their own, which do not survive a fork: the thread
 * sanitizer's knows no new threads in the child, the address sanitizer's may be locked there. */
static void test_fork(void) {
#ifndef __SANITIZE_THREAD__
  run_counted(&one, 200, 4, 5);
  CHECK(pool.started >= 3 && in_child(run_some) == 0);
#endif
#ifndef SANITIZED
  pthread_t busy[2];
  for (int i = 0; i < 2; i++)
    CHECK(pthread_create(&busy[i], NULL, call_until_stopped, NULL) == 0);
  for (int i = 0; i < 15; i++) CHECK(in_child(run_some) == 0);
  STORE(&stop, 1u);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(busy[i], NULL) == 0);
#endif
}

/* -------------------------------------------------------------------------------------- settings */

static void write_file(const char* folder, const char* name, const char* text) {
  char path[8192];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* stream = fopen(path, "w");
  CHECK(stream && fputs(text, stream) >= 0 && fclose(stream) == 0);
}

static const char* make_folder(const char* parent, const char* name) {
  static char path[4096];
  snprintf(path, sizeof path, "%s/%s", parent, name);
  CHECK(mkdir(path, 0700) == 0);
  return path;
}

static void test_settings(const char* scratch) {
  char groups[4096];
  snprintf(groups, sizeof groups, "%s/groups", scratch);
  CHECK(cgroup_quota(groups, scratch) == 0); /* no such file */

  write_file(scratch, "groups", "7:cpuset:/x\n0::/outer/inner\n");
  CHECK(cgroup_quota(groups, scratch) == 0); /* no such cgroup, as inside a container */
  write_file(scratch, "cpu.max", "900000 100000\n");
  CHECK(cgroup_quota(groups, scratch) == 9);
  char outer[4096];
  snprintf(outer, sizeof outer, "%s", make_folder(scratch, "outer"));
  write_file(outer, "cpu.max", "250000 100000\n");
  CHECK(cgroup_quota(groups, scratch) == 3); /* 2.5 CPUs */
  write_file(make_folder(outer, "inner"), "cpu.max", "max 100000\n");
  CHECK(cgroup_quota(groups, scratch) == 3);

  char one_folder[4096];
  write_file(scratch, "groups", "4:cpu,cpuacct:/job\n");
  snprintf(one_folder, sizeof one_folder, "%s", make_folder(scratch, "cpu"));
  write_file(one_folder, "cpu.cfs_quota_us", "-1\n");
  write_file(one_folder, "cpu.cfs_period_us", "100000\n");
  CHECK(cgroup_quota(groups, scratch) == 0);
  write_file(make_folder(one_folder, "job"), "cpu.cfs_quota_us", "50000\n");
  CHECK(cgroup_quota(groups, scratch) == 0);
  snprintf(one_folder, sizeof one_folder, "%s/cpu/job", scratch);
  write_file(one_folder, "cpu.cfs_period_us", "100000\n");
  CHECK(cgroup_quota(groups, scratch) == 1);
  write_file(one_folder, "cpu.cfs_period_us", "nonsense\n");
  CHECK(cgroup_quota(groups, scratch) == 0);

  int n = fr_cpu_count();
  CHECK(n >= 1 && n <= FR_MAX_THREADS && fr_threads() == n);
  fr_set_threads(3);
  CHECK(fr_threads() == 3);
  run_counted(&one, 100, 3, 1);
  fr_set_threads(1 << 30);
  CHECK(fr_threads() == FR_MAX_THREADS);
  fr_set_threads(-4);
  CHECK(fr_threads() == n && fr_version() == FR_VERSION && strcmp(fr_digest(), "") == 0);
}

int main(int count, char** arguments) {
  CHECK(count == 2); /* an empty folder to write to */
  test_shortages();  /* first: it wants threads that have no stack yet */
  test_settings(arguments[1]);
  test_units();
  test_many_units();
  test_pieces();
  test_failures();
  test_lent();
  test_threads_that_end();
#ifndef SANITIZED
  test_faults_in_kernels();
  test_faults_elsewhere();
#endif
  test_concurrent_callers();
  test_fork();
  puts("ok");
  return 0;
}
