/* The contract between ferrule's kernels, its C runtime and its Python binding.
 *
 * A job is `units` units of work (threadgroups, or runs of them). The runtime cuts it into chunks
 * and calls the kernel's entry for each, on several threads at once. The text of a compiled kernel
 * restates `fr_worker`, so the layout is part of FR_VERSION: fields are only ever added at the end.
 */
#ifndef FERRULE_RUNTIME_H
#define FERRULE_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define FR_VERSION 5

#if defined(FR_API) /* a library that has the runtime inside, and keeps it to itself */
#elif defined(__GNUC__)
#define FR_API __attribute__((visibility("default")))
#else
#define FR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What fr_run returns. A kernel may set `worker->status` to FR_E_KERNEL or more. */
enum {
  FR_MORE = -1,      /* fr_run_some's: time is up */
  FR_OK = 0,
  FR_E_MEMORY = 1,   /* no memory for a stack, for scratch or for fiber stacks */
  FR_E_ARGUMENT = 2, /* no entry, or more than FR_MAX_UNITS units */
  FR_E_NESTED = 3,   /* called from inside a kernel */
  FR_E_FAULT = 4,    /* the kernel stored outside its buffers, or ran out of stack */
  FR_E_DIVISION = 5, /* the kernel divided an integer by zero, on a system where that ends it */
  FR_E_OUTSIDE = 6,  /* not fr_run's: the kernel wrote beside an output (canary.h) */
  FR_E_ABANDONED = 7, /* the second interrupt (SIGINT) came while units ran, which were given up */
  FR_E_KERNEL = 64   /* first of the codes that are the kernel's own */
};

#define FR_MAX_UNITS ((uint64_t)1 << 62)
#define FR_MAX_THREADS 1024

/* What a kernel prints: `print_value` and `print_message` of include/print.h. */
enum { FR_PRINT_SIGNED, FR_PRINT_UNSIGNED, FR_PRINT_FLOAT, FR_PRINT_TEXT, FR_PRINT_POINTER };
typedef struct {
  int32_t kind, bytes; /* of what the author gave, after C's promotions */
  uint64_t bits;       /* an integer widened to 64, a double's, or an address */
} fr_print_value;

/* Whose line it is: the threadgroup's number and the thread's in it, and both as positions. */
typedef struct {
  uint64_t group;
  uint32_t thread, group_at[3], thread_at[3];
} fr_print_place;

typedef struct {
  fr_print_place place;
  int32_t level; /* -1: of printf; else that of a log, 0 (debug) to 4 (fault), whose message is a line */
  uint32_t count;
  const char *kernel, *format, *subsystem, *category; /* a log's own two, or NULL */
  const fr_print_value* values;
} fr_print_message;

/* What one thread lends to a kernel for the time of one call of its entry. */
typedef struct fr_worker fr_worker;
struct fr_worker {
  /* Memory of this thread, 64-byte aligned. It is kept between jobs, its content is anybody's. */
  void* scratch;
  size_t scratch_bytes;
  /* Makes scratch at least `bytes` long, losing its content, and returns it. On failure returns
   * NULL and sets `status`: the entry then just returns. */
  void* (*grow)(fr_worker* worker, size_t bytes);
  /* Number of the thread within the job: 0 is the caller of fr_run, all are below `threads`. */
  int32_t index;
  /* 0 when an entry is called. What an entry leaves here ends the job and is fr_run's result. */
  int32_t status;
  /* `count` stacks of at least `bytes_each` bytes for the fibers of a threadgroup. Stack i is
   * [result + i * *stride, result + i * *stride + bytes_each); below each lies a guard page where
   * the system can afford one. Memory is committed when touched and kept for the next job. Valid
   * until the entry returns. On failure returns NULL and sets `status`. All tops are equal modulo
   * the page size, thus share a few sets of the L1 cache: start fiber i some lines lower. */
  void* (*fiber_stacks)(fr_worker* worker, size_t count, size_t bytes_each, size_t* stride);
  /* Size of the stack that the entry runs on. */
  size_t stack_bytes;
  /* A lock that the kernel holds; it is set to 0 should the kernel be given up. */
  uint8_t* held;
  /* What a lock that is held contains. It changes with a fork: what the vanished threads held is
   * free. Never 0. */
  uint8_t holding;
  /* Keeps what a thread of the kernel prints, until its job ends. */
  void (*print)(fr_worker* worker, const fr_print_message* message);
};

/* Runs units [begin, end) of the job that `launch` describes. It may use all of its big stack, must
 * not throw, and must not call fr_run. */
typedef void (*fr_entry)(const void* launch, uint64_t begin, uint64_t end, fr_worker* worker);

/* Runs all units on up to `threads` threads, the caller's among them, and returns when all are done:
 * FR_OK or the code of a failure, after which an unknown part of the units has run. `threads` <= 0
 * means fr_threads(). Any number of threads may call at the same time: the workers serve one job
 * after the other, a job that finds them busy begins on its own thread and gets them when they are
 * free. The entry runs on a stack of 256 MiB (64 or 16 where memory is limited) and in the default
 * floating point environment, whatever the caller's is. */
FR_API int fr_run(fr_entry entry, const void* launch, uint64_t units, int threads);

/* How far a job is. Its units are cut into as many parts as there are threads, and each thread begins
 * with its own part: what it wrote is in its cache when a next kernel, cut alike, reads it. Then it
 * helps the others. */
#define FR_MAX_PARTS 32
typedef struct {
  int32_t parts; /* 0 before the first call; the rest needs no value then */
  struct {
    uint64_t next, end;   /* units that nobody has taken; `next` may pass `end` */
    uint64_t apart[14];   /* two cache lines: neighbours are fetched in pairs */
  } part[FR_MAX_PARTS];
} fr_progress;

/* As fr_run, but begins no unit after so many nanoseconds (0: no limit), for a caller that wants to
 * see its signals in between. Returns FR_MORE where units are left: call again with the same entry,
 * launch, units and progress, or without an entry, which ends the job: what it printed is shown. A limit says,
 * too, that the caller may take Python's lock. */
FR_API int fr_run_some(fr_entry entry, const void* launch, uint64_t units, int threads,
                       int64_t limit, fr_progress* progress);

/* Sets the number of threads of later jobs; n <= 0 means fr_cpu_count(). At most FR_MAX_THREADS. */
FR_API void fr_set_threads(int n);
FR_API int fr_threads(void);

/* CPUs that this process may use: affinity mask and cgroup quota, looked up once per process. */
FR_API int fr_cpu_count(void);

/* What the calling thread's last job accessed when that ended it with FR_E_FAULT: all ones if the
 * processor does not say, since it was no address at all (x86: neither of the lowest nor of the
 * highest 2^47 bytes). */
FR_API void* fr_fault_address(void);

/* Whether the calling thread's last job ended with FR_E_ABANDONED. */
FR_API int fr_abandoned(void);

FR_API int fr_version(void); /* FR_VERSION */

/* For Python, which has libraries of CUDA loaded: cublas.h, whose structures these point to. */
FR_API const char* fr_find_cublas(void* library, void* cublas);
FR_API int fr_start_product(const void* cublas, void* handle, const void* product, void* stream);

/* The steps of a unit's call: cuda_units.h, whose structures these point to. */
FR_API int fr_know_product(void* product);
FR_API void fr_forget_product(void* product);
FR_API int fr_start_unit(void* cuda, void* context, const void* step, int steps, uint64_t* word, void* stream,
                         int* begun);

/* One thing that was printed. The text ends with NUL; behind its `bytes` stands a log's `subsystem:category`. */
typedef struct {
  fr_print_place place;
  int32_t level;
  uint32_t lines, bytes, source_bytes;
  uint64_t order;
  char* text;
} fr_print_record;
typedef void (*fr_printer)(const char* kernel, const fr_print_record* records, uint64_t count, uint64_t dropped);

/* Who shows what jobs print, in place of C's standard output; Py_AddPendingCall, and Python's main thread. */
FR_API void fr_set_printer(fr_printer printer, int (*add_pending)(int (*)(void*), void*), uint64_t main_thread);
/* How many lines a job keeps at least; less than 0: all. */
FR_API void fr_set_print_limit(int64_t lines);
/* Shows what Python's main thread is to show. */
FR_API void fr_show_waiting(void);
/* Writes a format with its values, in C's way, up to `room` bytes of it; gives all its bytes, -1 without memory. */
FR_API int64_t fr_format(const char* format, const fr_print_value* values, uint32_t count, char* out, uint64_t room);

/* Digest of the source text this library was built from, "" if the build did not say. */
FR_API const char* fr_digest(void);

#ifdef __cplusplus
}
#endif
#endif
