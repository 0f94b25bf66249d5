/* What differs between systems and processors: waiting, counting CPUs, mapping memory, running on
 * another stack, the floating point environment. Included by runtime.c alone.
 *
 * FR_PORTABLE, set for processors that have no stack switch below, uses POSIX threads alone.
 */
#ifndef FERRULE_PLATFORM_H
#define FERRULE_PLATFORM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity, MAP_NORESERVE */
#endif

#include <fenv.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#if !defined(FR_PORTABLE) && \
    !((defined(__x86_64__) && defined(__LP64__)) || defined(__aarch64__))
#define FR_PORTABLE 1
#endif

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

#define KIB ((size_t)1024)
#define MIB (KIB * KIB)

#define STACK_GUARD MIB /* more than a page: frames of kernels are large */
static const size_t STACK_SIZES[] = {256 * MIB, 64 * MIB, 16 * MIB};

/* ------------------------------------------------------------------ words that threads wait on */

/* `__atomic` builtins, since C11's and C++'s own atomics are different types. */
#define LOAD(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define EXCHANGE(p, v) __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL)

static bool replace(uint32_t* p, uint32_t expected, uint32_t value) {
  return __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
}

typedef struct {
  uint32_t value;
#if !defined(__linux__) || defined(FR_PORTABLE)
  pthread_mutex_t lock;
  pthread_cond_t changed;
#endif
} word;

#if !defined(__linux__) || defined(FR_PORTABLE)
static void word_init(word* w, uint32_t value) {
  STORE(&w->value, value);
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->changed, NULL);
}

static void word_wait(word* w, uint32_t value) {
  pthread_mutex_lock(&w->lock);
  while (LOAD(&w->value) == value) pthread_cond_wait(&w->changed, &w->lock);
  pthread_mutex_unlock(&w->lock);
}

static void word_wake(word* w) {
  pthread_mutex_lock(&w->lock); /* a waiter has read the old value and waits, or reads the new */
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
}
#else
static void word_init(word* w, uint32_t value) { STORE(&w->value, value); }

static void word_wait(word* w, uint32_t value) {
  while (LOAD(&w->value) == value)
    syscall(SYS_futex, &w->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void word_wake(word* w) { syscall(SYS_futex, &w->value, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }
#endif

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory"); /* waits about as long as x86's pause; yield is a no-op */
#endif
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits for a short while for the word to change. */
static void spin_while(word* w, uint32_t value, int64_t limit) {
  int64_t deadline = limit ? nanoseconds() + limit : 0;
  do {
    for (int i = 0; i < 32; i++) {
      if (LOAD(&w->value) != value) return;
      relax();
    }
  } while (limit && nanoseconds() < deadline);
}

/* ---------------------------------------------------------------------------- CPUs we may use */

static bool read_line(const char* folder, const char* file, char* line, int size) {
  char path[4096];
  if (snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path) return false;
  FILE* stream = fopen(path, "re");
  if (!stream) return false;
  bool ok = fgets(line, size, stream) != NULL;
  fclose(stream);
  return ok;
}

/* CPUs that the quota of one cgroup folder allows, rounded up; 0 where it sets none. */
static int folder_quota(const char* folder) {
  char line[128];
  long long quota = 0, period = 0;
  if (read_line(folder, "cpu.max", line, sizeof line)) { /* version 2: "max 100000" */
    if (sscanf(line, "%lld %lld", &quota, &period) != 2) return 0;
  } else if (read_line(folder, "cpu.cfs_quota_us", line, sizeof line)) { /* version 1: -1 if none */
    quota = atoll(line);
    if (!read_line(folder, "cpu.cfs_period_us", line, sizeof line)) return 0;
    period = atoll(line);
  }
  if (quota <= 0 || period <= 0) return 0;
  long long cpus = (quota - 1) / period + 1;
  return cpus > 1 << 20 ? 1 << 20 : (int)cpus;
}

/* The least quota of our cgroups and their parents; 0 where none is set. `groups` is
 * /proc/self/cgroup, `mount` is /sys/fs/cgroup. */
static int cgroup_quota(const char* groups, const char* mount) {
  char line[4096], folder[8192];
  int least = 0;
  FILE* stream = fopen(groups, "re");
  if (!stream) return 0;
  while (fgets(line, sizeof line, stream)) { /* "4:cpu,cpuacct:/a/b", version 2: "0::/a/b" */
    char* controllers = strchr(line, ':');
    char* path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    path[strcspn(path, "\n")] = 0;
    controllers++;
    const char* tree = NULL;
    char list[4096 + 2];
    snprintf(list, sizeof list, ",%s,", controllers);
    if (!*controllers) tree = "";
    else if (strstr(list, ",cpu,")) tree = "/cpu";
    if (!tree) continue;
    size_t root = (size_t)snprintf(folder, sizeof folder, "%s%s", mount, tree);
    snprintf(folder + root, sizeof folder - root, "%s", path);
    for (;;) {
      int cpus = folder_quota(folder);
      if (cpus && (!least || cpus < least)) least = cpus;
      char* slash = strrchr(folder + root, '/'); /* the parent, up to the mount itself */
      if (!slash) break;
      *slash = 0;
    }
  }
  fclose(stream);
  return least;
}

static int affinity_count(void) {
#if defined(__linux__)
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) { /* the kernel's mask may be longer than ours */
    cpu_set_t* set = CPU_ALLOC((size_t)cpus);
    if (!set) break;
    size_t bytes = CPU_ALLOC_SIZE((size_t)cpus);
    int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#endif
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

/* ------------------------------------------------------------------------------------- memory */

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static void* map(size_t bytes) {
  void* base = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? NULL : base;
}

/* ------------------------------------------------------------------- running on a big stack */

#ifdef FR_PORTABLE
/* A thread with as big a stack as the system gives. */
static bool big_thread(pthread_t* thread, void* (*body)(void*), void* argument, size_t* stack) {
  for (size_t i = 0; i < sizeof STACK_SIZES / sizeof *STACK_SIZES; i++) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return false;
    *stack = STACK_SIZES[i];
    bool started = !pthread_attr_setstacksize(&attributes, STACK_SIZES[i]) &&
                   !pthread_create(thread, &attributes, body, argument);
    pthread_attr_destroy(&attributes);
    if (started) return true;
  }
  return false;
}
#else
/* fr_switch_stack(function, argument, top): a plain call, but on the stack that ends at `top`.
 * The frame pointer keeps the old stack, and the CFI lines let debuggers walk across. */
#ifdef __cplusplus
extern "C"
#endif
void fr_switch_stack(void (*function)(void*), void* argument, void* top)
    __attribute__((visibility("hidden")));

#ifdef __APPLE__
#define SYMBOL "_fr_switch_stack"
#define DECLARE ".private_extern " SYMBOL "\n"
#define END ""
#else
#define SYMBOL "fr_switch_stack"
#define DECLARE ".hidden " SYMBOL "\n.type " SYMBOL ", %function\n"
#define END ".size " SYMBOL ", .-" SYMBOL "\n"
#endif

__asm__(".text\n"
        ".p2align 4\n"
        ".globl " SYMBOL "\n" DECLARE SYMBOL ":\n"
        ".cfi_startproc\n"
#if defined(__x86_64__)
        "pushq %rbp\n"
        ".cfi_def_cfa_offset 16\n"
        ".cfi_offset %rbp, -16\n"
        "movq %rsp, %rbp\n"
        ".cfi_def_cfa_register %rbp\n"
        "movq %rdx, %rsp\n"
        "movq %rdi, %rax\n"
        "movq %rsi, %rdi\n"
        "callq *%rax\n"
        "movq %rbp, %rsp\n"
        "popq %rbp\n"
        ".cfi_def_cfa %rsp, 8\n"
        "retq\n"
#else
        "stp x29, x30, [sp, #-16]!\n"
        ".cfi_def_cfa_offset 16\n"
        ".cfi_offset x29, -16\n"
        ".cfi_offset x30, -8\n"
        "mov x29, sp\n"
        ".cfi_def_cfa x29, 16\n"
        "mov sp, x2\n"
        "mov x9, x0\n"
        "mov x0, x1\n"
        "blr x9\n"
        "mov sp, x29\n"
        ".cfi_def_cfa sp, 16\n"
        "ldp x29, x30, [sp], #16\n"
        ".cfi_def_cfa_offset 0\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        "ret\n"
#endif
        ".cfi_endproc\n" END);
#endif

/* Kernels must not see what the application or a library built with -ffast-math did to rounding or
 * denormals: else a result would depend on the thread that made it. */
#if defined(__x86_64__)
typedef uint32_t fp_environment;
static fp_environment fp_enter(void) {
  const uint32_t initial = 0x1f80, flags = 0x3f; /* round to nearest, keep denormals, no traps */
  uint32_t old;
  __asm__ volatile("stmxcsr %0" : "=m"(old));
  if ((old & ~flags) != initial) __asm__ volatile("ldmxcsr %0" ::"m"(initial));
  return old;
}
static void fp_leave(fp_environment old) {
  if ((old & ~0x3fu) != 0x1f80) __asm__ volatile("ldmxcsr %0" ::"m"(old));
}
#elif defined(__aarch64__)
typedef uint64_t fp_environment;
static fp_environment fp_enter(void) {
  uint64_t old;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  if (old) __asm__ volatile("msr fpcr, xzr");
  return old;
}
static void fp_leave(fp_environment old) {
  if (old) __asm__ volatile("msr fpcr, %0" ::"r"(old));
}
#else
typedef fenv_t fp_environment;
static fp_environment fp_enter(void) {
  fenv_t old;
  fegetenv(&old);
  fesetenv(FE_DFL_ENV);
  return old;
}
static void fp_leave(fp_environment old) { fesetenv(&old); }
#endif

#endif
