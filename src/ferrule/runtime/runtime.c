/* Threads, stacks and scratch memory for kernels on the CPU. See runtime.h for the contract.
 *
 * Valid as C11 and as C++17, so that the compiler that builds kernels can build this file too.
 */
#include "platform.h"
#include "runtime.h"
#include "cuda_units.h"
#include "faults.h"
#include "printing.h"

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

enum {
  PACE_NANOSECONDS = 1000000,
  CHUNKS_PER_THREAD = 16, /* a thread that loses its CPU holds up 1/16 of its share, not all of it */
  WAKE_FANOUT = 4,        /* each thread wakes so many others */
  SPIN_NANOSECONDS = 50000,
  LONG_SPIN_NANOSECONDS = 1000000, /* asleep, a thread takes 100 microseconds to begin */
  LONG_NANOSECONDS = 100000, /* of a job for which sleepers are woken at once */
  ALONE_NANOSECONDS = 5000, /* what a caller does alone before it wakes sleepers, which costs more */
  FIBER_SETS = 4,         /* shapes of fiber stacks that a thread keeps */
  MAX_SPLIT_GUARDS = 8192 /* Linux allows 65530 mappings; mprotect makes two of each guarded one */
};

/* --------------------------------------------------------------------- what a thread owns */

typedef struct {
  char* base;
  size_t mapped, count, each, stride;
  int split_guards;
  uint64_t used; /* the clock of the thread's last use */
} fiber_set;

/* All that belongs to one thread that runs kernels: a worker or a caller of fr_run. */
typedef struct {
  fr_worker worker; /* first: kernels hand back its address */
  char* stack;      /* the mapping, guard first; NULL in a portable build */
  size_t stack_mapped;
  bool running;
  fiber_set fibers[FIBER_SETS];
  uint64_t clock;
  guard faults;
  print_store** prints;          /* of the job that the thread runs */
  print_store* kept;             /* what a job printed that this thread's caller has not ended yet, */
  const fr_progress* kept_until; /* and how far that is */
} state;

static int split_guards; /* guard pages made by mprotect, in the whole process */

static void fiber_set_free(fiber_set* set) {
  if (!set->base) return;
  munmap(set->base, set->mapped);
  __atomic_fetch_sub(&split_guards, set->split_guards, __ATOMIC_RELAXED);
  memset(set, 0, sizeof *set);
}

/* Makes the lowest page of each stack fault, for as many stacks as the system can afford. */
static void protect(fiber_set* set, size_t page) {
  size_t i = 0;
#if defined(__linux__)
  enum { GUARD_INSTALL = 102, NONSENSE = -1 }; /* MADV_GUARD_INSTALL, Linux 6.13: takes no mapping */
  if (madvise(set->base, page, NONSENSE) != 0)  /* an emulator may accept what it does not know */
    while (i < set->count && madvise(set->base + i * set->stride, page, GUARD_INSTALL) == 0) i++;
#endif
  for (; i < set->count; i++) {
    if (__atomic_add_fetch(&split_guards, 1, __ATOMIC_RELAXED) > MAX_SPLIT_GUARDS ||
        mprotect(set->base + i * set->stride, page, PROT_NONE) != 0) {
      __atomic_fetch_sub(&split_guards, 1, __ATOMIC_RELAXED);
      return;
    }
    set->split_guards++;
  }
}

static void* find_stacks(fr_worker* worker, size_t count, size_t bytes_each, size_t* stride) {
  state* self = (state*)(void*)worker;
  size_t page = page_size();
  if (!count || !bytes_each || bytes_each > SIZE_MAX / 4 ||
      count > SIZE_MAX / 2 / (round_up(bytes_each, page) + page)) {
    worker->status = FR_E_MEMORY;
    return NULL;
  }
  size_t each = round_up(bytes_each, page);
  fiber_set* set = &self->fibers[0];
  for (int i = 0; i < FIBER_SETS; i++) {
    fiber_set* kept = &self->fibers[i];
    if (kept->each == each) {
      set = kept;
      break;
    }
    if (kept->used < set->used) set = kept; /* an empty one, or the least recently used */
  }
  if (set->each == each && set->count >= count) {
    set->used = ++self->clock;
    *stride = set->stride;
    return set->base + page;
  }
  fiber_set_free(set);
  size_t mapped = count * (each + page);
  char* base = (char*)map(mapped);
  if (!base) {
    for (int i = 0; i < FIBER_SETS; i++) fiber_set_free(&self->fibers[i]);
    base = (char*)map(mapped);
  }
  if (!base) {
    worker->status = FR_E_MEMORY;
    return NULL;
  }
#ifdef MADV_NOHUGEPAGE
  madvise(base, mapped, MADV_NOHUGEPAGE); /* a fiber touches a few kilobytes of its stack */
#endif
  set->base = base;
  set->mapped = mapped;
  set->count = count;
  set->each = each;
  set->stride = each + page;
  set->used = ++self->clock;
  protect(set, page);
  *stride = set->stride;
  return base + page;
}

static void* make_larger(fr_worker* worker, size_t bytes) {
  if (bytes <= worker->scratch_bytes) return worker->scratch;
  free(worker->scratch);
  worker->scratch = NULL;
  worker->scratch_bytes = 0;
  if (bytes > SIZE_MAX / 2 || posix_memalign(&worker->scratch, 64, round_up(bytes, 4 * KIB))) {
    worker->scratch = NULL;
    worker->status = FR_E_MEMORY;
    return NULL;
  }
  worker->scratch_bytes = round_up(bytes, 4 * KIB);
  return worker->scratch;
}

/* What kernels call is carried out wholly, also where its job is abandoned meanwhile. */
static void* fiber_stacks(fr_worker* worker, size_t count, size_t bytes_each, size_t* stride) {
  guard* g = &((state*)(void*)worker)->faults;
  g->shielded = true;
  void* found = find_stacks(worker, count, bytes_each, stride);
  g->shielded = false;
  obey(g);
  return found;
}

static void* grow(fr_worker* worker, size_t bytes) {
  guard* g = &((state*)(void*)worker)->faults;
  g->shielded = true;
  void* found = make_larger(worker, bytes);
  g->shielded = false;
  obey(g);
  return found;
}

static void print(fr_worker* worker, const fr_print_message* message) {
  state* self = (state*)(void*)worker;
  for (uint32_t i = 0; i < message->count; i++) { /* a text that is none must fail here, outside of locks */
    const volatile char* text = (const volatile char*)(uintptr_t)message->values[i].bits;
    while (message->values[i].kind == FR_PRINT_TEXT && text && *text) text++;
  }
  self->faults.shielded = true;
  print_into(self->prints, message);
  self->faults.shielded = false;
  obey(&self->faults);
}

static void state_free(void* pointer) {
  state* self = (state*)pointer;
  if (self->kept) store_free(self->kept);
  remove_signal_stack(&self->faults);
  for (int i = 0; i < FIBER_SETS; i++) fiber_set_free(&self->fibers[i]);
  if (self->stack) munmap(self->stack, self->stack_mapped);
  free(self->worker.scratch);
  free(self);
}

static state* state_new(int index) {
  state* self = (state*)calloc(1, sizeof(state));
  if (!self) return NULL;
  self->worker.grow = grow;
  self->worker.fiber_stacks = fiber_stacks;
  self->worker.print = print;
  self->worker.index = index;
#ifndef FR_PORTABLE
  for (size_t i = 0; i < sizeof STACK_SIZES / sizeof *STACK_SIZES && !self->stack; i++) {
    self->stack_mapped = STACK_SIZES[i] + STACK_GUARD;
    self->stack = (char*)map(self->stack_mapped);
    self->worker.stack_bytes = STACK_SIZES[i];
  }
  if (!self->stack) {
    free(self);
    return NULL;
  }
  mprotect(self->stack, STACK_GUARD, PROT_NONE); /* without it kernels run all the same */
#endif
  return self;
}

/* --------------------------------------------------------------------------------- the pool */

typedef struct {
  fr_entry entry;
  const void* launch;
  uint64_t units, chunk;
  fr_progress* progress;
  int64_t deadline; /* no unit is begun from then on; 0: there is none */
  int threads;
  int32_t status;
  uint32_t interrupts, abandoned; /* interrupts since it began; whether its units are to be given up */
  print_store* printed;
  void* fault; /* the address that a kernel was given up for */
} job;

/* The jobs that run, for the handler of interrupts, each with its caller's thread. A job that finds no place
 * is not abandoned. */
enum { MAX_CALLERS = 64 };
static struct {
  job* j; /* NULL: free; &taken: being filled */
  pthread_t thread;
} callers[MAX_CALLERS];
static job taken;
static uint32_t abandoning; /* handlers that look at the jobs */

static int enlist(job* j) {
  for (int i = 0; i < MAX_CALLERS; i++) {
    job* none = NULL;
    if (__atomic_load_n(&callers[i].j, __ATOMIC_RELAXED)) continue;
    if (!__atomic_compare_exchange_n(&callers[i].j, &none, &taken, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    callers[i].thread = pthread_self();
    STORE(&callers[i].j, j);
    return i;
  }
  return -1;
}

/* Afterwards no handler has the job, or pokes its caller. */
static void strike(int place) {
  if (place < 0) return;
  __atomic_store_n(&callers[place].j, (job*)NULL, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&abandoning, __ATOMIC_SEQ_CST)) {
  }
}

/* The life of a worker's signal. Whoever posts a job swaps GO in; the worker answers with RUNNING,
 * then IDLE. A GO that the worker has not yet seen when all units are taken is taken back, so a job
 * never waits for a thread to wake up. */
enum {
  ABSENT, /* no such thread yet */
  IDLE,   /* spins */
  SLEEPING,
  GO,
  RUNNING,
  AWAITED /* running, and the job's caller sleeps until the end */
};

typedef struct {
  word signal;
  job* posted;
  state* own;
  pthread_t thread;
} __attribute__((aligned(128))) slot; /* two cache lines: neighbours are fetched in pairs */

static struct {
  uint32_t busy; /* 1 while a job owns the workers and all that follows */
  int started;   /* workers that exist: slots 1 … started */
  int64_t spin;  /* nanoseconds that waiting threads spin before they sleep */
  slot slots[FR_MAX_THREADS];
} pool;

static uint8_t holding = 1; /* see fr_worker */
static int threads_set; /* what fr_set_threads asked for */
static int cpus;        /* fr_cpu_count's answer, 0 until it is known */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key; /* the state of a thread that calls fr_run */
static bool key_ok;

static guard* guard_of_thread(void) {
  state* self = key_ok ? (state*)pthread_getspecific(key) : NULL;
  return self ? &self->faults : NULL;
}

/* In the child of a fork only the forking thread exists. What the vanished ones owned is given up,
 * not freed: they may have been in the middle of changing it. */
static void after_fork(void) {
  for (int i = 1; i <= pool.started; i++) word_init(&pool.slots[i].signal, ABSENT);
  pool.started = 0;
  memset(callers, 0, sizeof callers);
  pthread_mutex_init(&printing, NULL);
  abandoning = pokes = 0;
  STORE(&pool.busy, 0u);
  holding = (uint8_t)(holding % 255 + 1);
  __atomic_store_n(&cpus, 0, __ATOMIC_RELAXED);
}

static void abandon_jobs(void) {
  bool any = false;
  __atomic_add_fetch(&abandoning, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < MAX_CALLERS; i++) {
    job* j = __atomic_load_n(&callers[i].j, __ATOMIC_SEQ_CST);
    if (!j || j == &taken || __atomic_add_fetch(&j->interrupts, 1, __ATOMIC_ACQ_REL) < 2) continue;
    any = true;
    STORE(&j->abandoned, 1u);
    if (!pthread_equal(callers[i].thread, pthread_self())) poke(callers[i].thread);
  }
  int started = any ? __atomic_load_n(&pool.started, __ATOMIC_ACQUIRE) : 0;
  for (int i = 1; i <= started; i++) {
    uint32_t value = LOAD(&pool.slots[i].signal.value);
    if ((value == RUNNING || value == AWAITED) && !pthread_equal(pool.slots[i].thread, pthread_self()))
      poke(pool.slots[i].thread);
  }
  __atomic_sub_fetch(&abandoning, 1, __ATOMIC_SEQ_CST);
}

static void initialise(void) {
  key_ok = pthread_key_create(&key, state_free) == 0 && pthread_atfork(NULL, NULL, after_fork) == 0;
}

static void post_children(job* j, int parent) {
  int first = parent * WAKE_FANOUT + 1;
  for (int i = first; i < first + WAKE_FANOUT && i < j->threads; i++) {
    slot* s = &pool.slots[i];
    s->posted = j;
    if (EXCHANGE(&s->signal.value, (uint32_t)GO) == SLEEPING) word_wake(&s->signal);
  }
}

static bool any_left(const fr_progress* progress) {
  for (int i = 0; i < progress->parts; i++)
    if (__atomic_load_n(&progress->part[i].next, __ATOMIC_RELAXED) < progress->part[i].end)
      return true;
  return false;
}

/* Takes up to `chunk` units: of the thread's own part, then of those of others. */
static bool take(job* j, int* part, uint64_t chunk, uint64_t* begin, uint64_t* end) {
  fr_progress* progress = j->progress;
  for (int tried = 0; tried < progress->parts; tried++) {
    uint64_t* next = &progress->part[*part].next;
    uint64_t last = progress->part[*part].end;
    if (__atomic_load_n(next, __ATOMIC_RELAXED) < last) {
      *begin = __atomic_fetch_add(next, chunk, __ATOMIC_RELAXED);
      *end = last - *begin > chunk ? *begin + chunk : last;
      if (*begin < last) return true;
    }
    if (++*part == progress->parts) *part = 0;
  }
  return false;
}

/* Takes one chunk and runs it. False when there is none left. */
static bool run_chunk(job* j, state* self, int* part, uint64_t chunk) {
  uint64_t begin, end;
  if (j->deadline && nanoseconds() >= j->deadline) return false;
  if (!take(j, part, chunk, &begin, &end)) return false;
  if (_setjmp(self->faults.back) == 0) {
    self->faults.abandoned = &j->abandoned;
    self->prints = &j->printed;
    self->faults.in_kernel = true;
    obey(&self->faults);
    j->entry(j->launch, begin, end, &self->worker);
    self->faults.in_kernel = false;
  } else {
    self->worker.status = self->faults.code;
    if (self->worker.held) __atomic_store_n(self->worker.held, (uint8_t)0, __ATOMIC_RELEASE);
    self->worker.held = NULL;
    __atomic_store_n(&j->fault, self->faults.address, __ATOMIC_RELAXED);
  }
  if (self->worker.status) {
    __atomic_store_n(&j->status, self->worker.status, __ATOMIC_RELAXED);
    for (int i = 0; i < j->progress->parts; i++)
      __atomic_store_n(&j->progress->part[i].next, j->progress->part[i].end, __ATOMIC_RELAXED);
  }
  return true;
}

/* How many units a thread takes at once: as many as it wants, but where somebody waits for a deadline
 * no more than about a millisecond's work. */
typedef struct {
  uint64_t most;
  int64_t before;
} pace;

static uint64_t paced(job* j, pace* p, uint64_t wanted) {
  if (!j->deadline) return wanted;
  int64_t now = nanoseconds();
  if (!p->most) p->most = 1;
  else if (now - p->before < PACE_NANOSECONDS && p->most <= j->units / 2) p->most *= 2;
  else if (now - p->before > 4 * PACE_NANOSECONDS && p->most > 1) p->most /= 2;
  p->before = now;
  return wanted < p->most ? wanted : p->most;
}

static void worker_share(void* argument) {
  slot* s = (slot*)argument;
  job* j = s->posted;
  if (any_left(j->progress)) post_children(j, s->own->worker.index);
  fp_environment old = fp_enter();
  s->own->worker.status = 0;
  s->own->worker.holding = holding;
  pace p = {0, 0};
  int part = s->own->worker.index % j->progress->parts;
  while (run_chunk(j, s->own, &part, paced(j, &p, j->chunk))) {
  }
  drop_zeros(&s->own->faults);
  fp_leave(old);
}

static void* worker_main(void* argument) {
  slot* s = (slot*)argument;
  s->own->running = true; /* a kernel that calls fr_run is told so on this thread too */
  if (pthread_setspecific(key, s->own)) return NULL;
  add_signal_stack(&s->own->faults);
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "ferrule");
#endif
  for (;;) {
    spin_while(&s->signal, IDLE, __atomic_load_n(&pool.spin, __ATOMIC_RELAXED));
    if (replace(&s->signal.value, IDLE, SLEEPING)) word_wait(&s->signal, SLEEPING);
    if (!replace(&s->signal.value, GO, RUNNING)) continue;
#ifdef FR_PORTABLE
    worker_share(s);
#else
    fr_switch_stack(worker_share, s, s->own->stack + s->own->stack_mapped);
#endif
    if (EXCHANGE(&s->signal.value, (uint32_t)IDLE) == AWAITED) word_wake(&s->signal);
  }
  return NULL;
}

/* Starts workers 1 … wanted; fewer where the system refuses. The caller owns the pool. */
static void start_workers(int wanted) {
  sigset_t blocked, old; /* signals are the application's, faults are the thread's own */
  if (pool.started >= wanted) return;
  sigfillset(&blocked);
  const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&blocked, faults[i]);
  pthread_sigmask(SIG_SETMASK, &blocked, &old);
  while (pool.started < wanted) {
    slot* s = &pool.slots[pool.started + 1];
    pthread_t thread;
    s->own = state_new(pool.started + 1);
    if (!s->own) break;
    word_init(&s->signal, IDLE);
#ifdef FR_PORTABLE
    bool ok = big_thread(&thread, worker_main, s, &s->own->worker.stack_bytes);
#else
    bool ok = pthread_create(&thread, NULL, worker_main, s) == 0;
#endif
    if (!ok) {
      word_init(&s->signal, ABSENT);
      state_free(s->own);
      break;
    }
    s->thread = thread;
    pthread_detach(thread);
    __atomic_store_n(&pool.started, pool.started + 1, __ATOMIC_RELEASE);
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* Gives the workers to this job, if they are free. */
static bool take_pool(job* j) {
  if (__atomic_load_n(&pool.busy, __ATOMIC_RELAXED) || EXCHANGE(&pool.busy, 1u)) return false;
  start_workers(j->threads - 1);
  if (j->threads > pool.started + 1) j->threads = pool.started + 1;
  /* A spinning thread keeps another from its CPU: one of ours where there are more threads than CPUs,
   * one of another library's pool where there are not twice as many CPUs. */
  int spare = fr_cpu_count() - j->threads;
  __atomic_store_n(&pool.spin,
                   spare >= j->threads ? LONG_SPIN_NANOSECONDS : spare >= 0 ? SPIN_NANOSECONDS : 0,
                   __ATOMIC_RELAXED);
  post_children(j, 0);
  return true;
}

/* Waits until no worker is in this job, then frees the pool. A worker's parent in the tree of wakes
 * has a lower number: once that one is done nobody can post to the worker any more. */
static void leave_pool(job* j) {
  for (int i = 1; i < j->threads; i++) {
    word* signal = &pool.slots[i].signal;
    for (;;) {
      uint32_t value = LOAD(&signal->value);
      if (value == IDLE || value == SLEEPING) break;
      if (value == GO) {
        if (replace(&signal->value, GO, IDLE)) break;
        continue;
      }
      spin_while(signal, RUNNING, pool.spin);
      if (replace(&signal->value, RUNNING, AWAITED)) word_wait(signal, AWAITED);
    }
  }
  STORE(&pool.busy, 0u);
}

typedef struct {
  job* j;
  state* self;
} caller;

/* Whether a job like this one took long the last time; a guess, as others may share its place. */
static uint8_t* took_long(const job* j) {
  static uint8_t places[256];
  return &places[((uint64_t)(uintptr_t)j->entry + j->units) * 0x9e3779b97f4a7c15u >> 56];
}

static void caller_share(void* argument) {
  caller* c = (caller*)argument;
  job* j = c->j;
  fp_environment old = fp_enter();
  int part = 0, place = enlist(j);
  if (j->threads > 1) {
    int64_t start = nanoseconds();
    uint64_t chunk = j->chunk / 16 ? j->chunk / 16 : 1;
    bool called = LOAD(took_long(j)), pooled = false;
    pace p = {0, 0};
    do {
      /* Spinning workers are called at once, sleeping ones when the job proves not to be small, or
       * did so before: its first unit may be long. */
      if (!called)
        called = LOAD(&pool.slots[1].signal.value) == IDLE ||
                 nanoseconds() - start >= ALONE_NANOSECONDS;
      if (called && !pooled && any_left(j->progress)) pooled = take_pool(j);
      chunk = called || chunk > j->chunk / 2 ? j->chunk : chunk * 2;
    } while (run_chunk(j, c->self, &part, paced(j, &p, chunk)));
    if (pooled) leave_pool(j);
    STORE(took_long(j), (uint8_t)(nanoseconds() - start >= LONG_NANOSECONDS));
  } else {
    /* All at once, or in pieces that a limit can stop between. */
    pace p = {0, 0};
    while (run_chunk(j, c->self, &part, paced(j, &p, j->units))) {
    }
  }
  strike(place);
  drop_zeros(&c->self->faults);
  fp_leave(old);
}

#ifdef FR_PORTABLE
static void* caller_main(void* argument) {
  caller* c = (caller*)argument;
  if (pthread_setspecific(key, c->self)) {
    c->j->status = FR_E_MEMORY;
    return NULL;
  }
  add_signal_stack(&c->self->faults);
  caller_share(c);
  remove_signal_stack(&c->self->faults);
  pthread_setspecific(key, NULL); /* the state stays the caller's */
  return NULL;
}
#endif

static void cut(fr_progress* progress, uint64_t units, int parts) {
  uint64_t each = units / (uint64_t)parts, more = units % (uint64_t)parts, at = 0;
  for (int i = 0; i < parts; i++) {
    progress->part[i].next = at;
    progress->part[i].end = at += each + ((uint64_t)i < more);
  }
  progress->parts = parts;
}

/* Shows what the thread's last job printed, if nobody has ended it; gives what this very job did so far. */
static print_store* take_kept(state* self, const fr_progress* progress) {
  print_store* kept = self->kept;
  self->kept = NULL;
  if (kept && (!progress->parts || self->kept_until != progress)) {
    finish_store(kept, true);
    kept = NULL;
  }
  return kept;
}

/* Shows what a job printed, or keeps it where the job goes on. */
static void end_or_keep(state* self, job* j, int status, bool of_python) {
  void* address = self->faults.address; /* the printer may run other jobs on this thread */
  bool abandoned = self->faults.was_abandoned;
  if (status == FR_MORE) {
    self->kept = j->printed;
    self->kept_until = j->progress;
    return;
  }
  finish_store(j->printed, of_python);
  self->faults.address = address;
  self->faults.was_abandoned = abandoned;
}

/* Ends a job that is not to go on. */
static int end_job(void) {
  state* self = key_ok ? (state*)pthread_getspecific(key) : NULL;
  if (self && self->kept) finish_store(self->kept, true);
  if (self) self->kept = NULL;
  return FR_OK;
}

int fr_run_some(fr_entry entry, const void* launch, uint64_t units, int threads, int64_t limit,
                fr_progress* progress) {
  if (!entry && !units) return end_job();
  if (!entry || units > FR_MAX_UNITS || progress->parts < 0 || progress->parts > FR_MAX_PARTS)
    return FR_E_ARGUMENT;
  if (units == 0) return FR_OK;
  pthread_once(&once, initialise);
  if (!key_ok) return FR_E_MEMORY;
  state* self = (state*)pthread_getspecific(key);
  if (!self) {
    self = state_new(0);
    if (!self) return FR_E_MEMORY;
    if (pthread_setspecific(key, self)) {
      state_free(self);
      return FR_E_MEMORY;
    }
#ifndef FR_PORTABLE
    add_signal_stack(&self->faults);
#endif
  }
  if (self->running) return FR_E_NESTED;
  if (threads <= 0) threads = fr_threads();
  if (threads > FR_MAX_THREADS) threads = FR_MAX_THREADS;
  if ((uint64_t)threads > units) threads = (int)units;

  job j;
  memset(&j, 0, sizeof j);
  if (self->kept) j.printed = take_kept(self, progress);
  if (!progress->parts) cut(progress, units, threads < FR_MAX_PARTS ? threads : FR_MAX_PARTS);
  j.entry = entry;
  j.launch = launch;
  j.units = units;
  j.progress = progress;
  j.deadline = limit > 0 && units > 1 ? nanoseconds() + limit : 0; /* one unit is never stopped */
  j.threads = threads;
  j.chunk = units / ((uint64_t)threads * CHUNKS_PER_THREAD);
  if (j.chunk == 0) j.chunk = 1;

  watch_faults();
  caller c = {&j, self};
  self->worker.status = 0;
  self->worker.holding = holding;
  self->running = true;
#ifdef FR_PORTABLE
  pthread_t helper;
  if (big_thread(&helper, caller_main, &c, &self->worker.stack_bytes)) pthread_join(helper, NULL);
  else j.status = FR_E_MEMORY;
#else
  fr_switch_stack(caller_share, &c, self->stack + self->stack_mapped);
#endif
  self->running = false;
  self->faults.address = j.fault;
  self->faults.abandoned = NULL;
  self->faults.was_abandoned = j.status == FR_E_ABANDONED;
  int status = j.status ? j.status : any_left(progress) ? FR_MORE : FR_OK;
  if (j.printed) end_or_keep(self, &j, status, limit > 0);
  return status;
}

int fr_run(fr_entry entry, const void* launch, uint64_t units, int threads) {
  fr_progress progress;
  progress.parts = 0;
  return fr_run_some(entry, launch, units, threads, 0, &progress);
}

/* ------------------------------------------------------------------------------------ settings */

int fr_cpu_count(void) {
  int count = __atomic_load_n(&cpus, __ATOMIC_RELAXED);
  if (count) return count;
  count = affinity_count();
  int quota = cgroup_quota("/proc/self/cgroup", "/sys/fs/cgroup");
  if (quota && quota < count) count = quota;
  if (count > FR_MAX_THREADS) count = FR_MAX_THREADS;
  __atomic_store_n(&cpus, count, __ATOMIC_RELAXED);
  return count;
}

void fr_set_threads(int n) {
  if (n > FR_MAX_THREADS) n = FR_MAX_THREADS;
  __atomic_store_n(&threads_set, n > 0 ? n : 0, __ATOMIC_RELAXED);
}

int fr_threads(void) {
  int n = __atomic_load_n(&threads_set, __ATOMIC_RELAXED);
  return n ? n : fr_cpu_count();
}

void* fr_fault_address(void) {
  guard* g = guard_of_thread();
  return g ? g->address : NULL;
}

int fr_abandoned(void) {
  guard* g = guard_of_thread();
  return g && g->was_abandoned;
}

int fr_version(void) { return FR_VERSION; }

const char* fr_find_cublas(void* library, void* cublas) { return fr_cublas_find(library, (fr_cublas*)cublas); }

int fr_start_product(const void* cublas, void* handle, const void* product, void* stream) {
  return fr_cublas_start((const fr_cublas*)cublas, handle, (const fr_product*)product, stream);
}

int fr_know_product(void* product) { return fr_cublas_know((fr_known_product*)product); }

void fr_forget_product(void* product) {
  fr_known_product* known = (fr_known_product*)product;
  fr_cublas_forget(known->cublas, &known->described);
}

int fr_start_unit(void* cuda, void* context, const void* step, int steps, uint64_t* word, void* stream, int* begun) {
  return cuda_start_unit((cuda_state*)cuda, context, (const cuda_unit_step*)step, steps, word, stream, begun);
}

const char* fr_digest(void) { return FR_DIGEST; }
