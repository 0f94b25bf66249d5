/* Calls of ops by torch's dispatcher, without Python code: what hosts/torch/op.py does, in C.
 *
 * torch's stable C ABI gives an operator's kernel no context pointer, so each op gets one of a pool
 * of functions (`trampolines`). It reads the call's inputs, works out the launch (op_calls.h), makes
 * the outputs and starts the kernel.
 *
 * No header of torch is needed: its functions are looked up in the library that the process has, so
 * one build serves every torch of that ABI (2.10 and later), with CUDA or without.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "torch_abi.h"

static torch_functions torch;

#include "torch_stack.h"

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

enum { TRAMPOLINES = 2048 };

/* Of a torch with CUDA. */
static int32_t (*current_cuda_stream)(int32_t device, void** stream);

enum { EXCEPTION = 0, INPUT_COPIED = 1 }; /* what Python is told */

static fr_op* ops[TRAMPOLINES];
static int ops_bound;
static cuda_state* cuda;

/* Python's own, for signals. A function in Python would not do: it is interrupted where it begins, and
 * the exception is lost. */
static struct {
  int (*ensure)(void);
  void (*release)(int);
  int (*check_signals)(void);
  void (*fetch)(void** type, void** value, void** traceback);
  int (*is_finalizing)(void);
  /* hosts/torch/calls.py's: */
  fr_table_entry* (*resolve)(fr_request*);
  void (*tell)(fr_request*, int what);
} python;

static bool slack_is_known; /* torch's memory is of the C library's malloc */
static uintptr_t main_thread; /* Python's, which sees its signals */

static bool in_main_thread(void) { return (uintptr_t)pthread_self() == main_thread; }

/* Python before 3.14 ends a thread that wants its lock while the interpreter ends by unwinding the
 * thread's stack, and torch's C++ does not survive that ("terminate called"). As Python 3.14 does
 * with all threads, a daemon thread that is here waits for the end of the process. */
static void wait_where_python_ends(void) {
  while (!in_main_thread() && python.is_finalizing()) sleep(1);
}

/* The entry for a request, or NULL and a text. */
static fr_table_entry* resolve(fr_request* request) {
  wait_where_python_ends();
  return python.resolve(request);
}

/* Tells Python something. Of an exception `text` is made. */
static void tell(fr_request* request, int what) {
  wait_where_python_ends();
  python.tell(request, what);
}

/* Whether a signal ends the call. */
static bool interrupted(fr_request* request) {
  if (!in_main_thread()) return false;
  int state = python.ensure();
  bool stop = python.check_signals() != 0;
  if (stop) {
    python.fetch(&request->exception[0], &request->exception[1], &request->exception[2]);
    python.tell(request, EXCEPTION);
  }
  python.release(state);
  return stop;
}

/* One call under way. */
typedef struct {
  torch_call torch;
  size_t bytes[FR_MAX_ARGUMENTS], slack[FR_MAX_ARGUMENTS]; /* of outputs on the CPU, see canary.h */
  const char* text;
} call;

/* Fills what the rule wants to know of the inputs. False where Python must say what is wrong. */
static bool read_inputs(torch_call* c, const SIV* stack) {
  bool good = true;
  for (int i = 0; i < c->of.op->inputs; i++) good = !torch_read(c, i, stack[i]) && good;
  c->of.request.device_type = c->type == torch_cuda_type ? CUDA : CPU;
  c->of.request.device = c->type == torch_cuda_type ? c->index : 0;
  return good;
}

/* -------------------------------------------------------------------------------------- the launch */

/* Whether nothing was written behind an output, as far as its memory was rounded up. */
static bool is_intact(call* c) {
  fr_call* of = &c->torch.of;
  for (int i = 0; i < of->op->outputs; i++) {
    int past = c->slack[i] ? fr_past_end((char*)c->torch.memory[i] + c->bytes[i], c->slack[i]) : 0;
    if (!past) continue;
    of->request.outside[0] = i;
    of->request.outside[1] = past;
    return false;
  }
  return true;
}

static bool launch_cpu(call* c, fr_table_entry* e, const fr_body* body) {
  fr_request* request = &c->torch.of.request;
  fr_cpu_job job;
  fr_prepare_cpu(&c->torch.of, e, body, c->torch.memory, &job);
  fr_progress progress;
  progress.parts = 0;
  int status;
  do { /* in between, Python sees its signals */
    status = job.run(job.entry, &job.launch, job.units, job.limit, FR_SLICE, &progress);
  } while (status == FR_MORE && !interrupted(request));
  if (status == FR_MORE) job.run(NULL, NULL, 0, 0, 0, &progress); /* shows what it printed */
  if (status == FR_OK && is_intact(c)) return true;
  if (status == FR_OK) status = FR_E_OUTSIDE;
  if (status != FR_MORE) {
    request->status = status;
    request->output_pointer = c->torch.memory;
    if (status != FR_E_ABANDONED || !interrupted(request)) resolve(request);
  }
  return false;
}

static bool launch_gpu(torch_call* c, fr_table_entry* e, const fr_body* body, const fr_rule_result* found,
                       const uint64_t* zeroed) {
  fr_gpu_job job;
  void* stream = NULL;
  fr_prepare_gpu(&c->of, e, body, found, c->memory, &job);
  int status = current_cuda_stream(c->of.request.device, &stream);
  if (!status)
    status = cuda_start(cuda, &e->call, stream, c->of.op->outputs, c->memory, zeroed, job.arguments);
  if (!status) return true;
  c->of.request.status = status;
  resolve(&c->of.request);
  return false;
}

/* --------------------------------------------------------------------------------------- one call */

/* A row-contiguous copy of each input that is not, and of those that are `shared`. */
static bool copy_inputs(call* c, const fr_body* body, uint64_t shared) {
  for (int i = 0; i < c->torch.of.op->inputs; i++) {
    if (!fr_wants_copy(&c->torch.of, body, shared, i)) continue;
    if (!torch_copy_input(&c->torch, i)) {
      c->text = "ferrule: torch could not copy an input that is not contiguous (no memory?)";
      return false;
    }
    tell(&c->torch.of.request, INPUT_COPIED);
  }
  return true;
}

/* Says that there is no memory for an output. */
static const char* no_memory(const call* c, int i, const fr_rule_output* out) {
  static _Thread_local char text[512];
  const char* name = c->torch.of.op->output_name[i];
  int n = snprintf(text, sizeof text, "ferrule: torch could not allocate output '%.99s' of shape (", name ? name : "");
  for (int d = 0; d < out->ndim; d++)
    n += snprintf(text + n, sizeof text - (size_t)n, d ? ", %lld" : "%lld", (long long)out->sizes[d]);
  snprintf(text + n, sizeof text - (size_t)n, "%s) (no memory?)", out->ndim == 1 ? "," : "");
  return text;
}

/* Makes the outputs, and says how many bytes of each a GPU is to zero. */
static bool make_outputs(call* c, const fr_body* body, const fr_rule_result* found, uint64_t* zeroed) {
  bool on_cpu = c->torch.of.request.device_type == CPU;
  for (int i = 0; i < c->torch.of.op->outputs; i++) {
    const fr_rule_output* out = &found->outputs[i];
    if (!torch_make_output(&c->torch, i, out)) {
      c->text = no_memory(c, i, out);
      return false;
    }
    char* memory = (char*)c->torch.memory[i];
    size_t bytes = fr_item_bytes[out->dtype] * (size_t)fr_count(out->ndim, out->sizes);
    c->bytes[i] = bytes;
    c->slack[i] = on_cpu && slack_is_known ? fr_slack(memory, bytes) : 0;
    if (c->slack[i]) fr_put_canary(memory + bytes, c->slack[i]);
    zeroed[i] = body->zeroed ? bytes : 0;
    if (body->zeroed && on_cpu && bytes) memset(memory, 0, bytes);
  }
  return true;
}

static bool carry_out(call* c, const SIV* stack) {
  fr_call* of = &c->torch.of;
  fr_op* op = of->op;
  fr_rule_result found;
  uint64_t zeroed[FR_MAX_ARGUMENTS];
  bool good = read_inputs(&c->torch, stack);
  if (!good || fr_rule_bind(op->program, of->input, &found)) {
    resolve(&of->request);
    return false;
  }
  bool on_gpu = of->request.device_type == CUDA;
  int b = on_gpu && cuda && cuda->forked ? -1 : fr_choose(of, &found);
  const fr_body* body = &op->body[b < 0 ? 0 : b];
  if (b < 0 || !fr_work_out(of, body, &found)) {
    resolve(&of->request);
    return false;
  }
  of->request.body = b;
  uint64_t shared;
  int32_t wrong[2];
  if (!fr_inputs_apart(of, &shared, wrong)) {
    of->request.status = FR_SHARED;
    resolve(&of->request);
    return false;
  }
  if (!copy_inputs(c, body, shared)) return false;
  bool empty = fr_no_thread(of);
  if (empty && !body->zeroed && fr_unwritten(op, &found)) {
    resolve(&of->request);
    return false;
  }
  of->request.aligned = torch_inputs_aligned(&c->torch);
  fr_table_entry* e = NULL;
  if (!empty || (on_gpu && body->zeroed)) { /* what only zeroes wants the driver, too */
    e = fr_entry_for(of, b, &found);
    if (!e) return false;
  }
  if (!make_outputs(c, body, &found, zeroed)) return false;
  if (on_gpu && of->request.aligned && !torch_outputs_aligned(&c->torch)) {
    c->text = "ferrule: torch's allocator gave an output that is not aligned to 16 bytes";
    return false;
  }
  if (!e) return true;
  good = on_gpu ? launch_gpu(&c->torch, e, body, &found, zeroed) : launch_cpu(c, e, body);
  for (int i = 0; good && i < op->inputs; i++) {
    good = torch_copy_back(&c->torch, i);
    if (!good) c->text = "ferrule: torch could not copy back what was written in place";
  }
  return good;
}

static void run(int k, SIV* stack) {
  call c;
  c.text = NULL;
  torch_take(&c.torch, ops[k], k, stack);
  c.torch.of.request.host_device = c.torch.of.host_device;
  bool good = carry_out(&c, stack);
  wait_where_python_ends(); /* torch wants Python's lock next */
  torch_finish(&c.torch, stack, good);
  if (!good) {
    const char* text = c.text ? c.text : c.torch.of.request.text;
    torch.check(false, "ferrule", "torch_calls.c", 0, text ? text : "ferrule: an op failed");
  }
}

/* ------------------------------------------------------------------------------------- trampolines */

/* Their numbers are octal: 04000 is 2048. */
#define ONE(A, B, C, D)                                                                            \
  static void t##A##B##C##D(SIV* stack, uint64_t inputs, uint64_t outputs) {                       \
    (void)inputs, (void)outputs;                                                                   \
    run(0##A##B##C##D, stack);                                                                     \
  }
#define NAME(A, B, C, D) t##A##B##C##D,
#define EIGHT(M, A, B, C) \
  M(A, B, C, 0) M(A, B, C, 1) M(A, B, C, 2) M(A, B, C, 3) M(A, B, C, 4) M(A, B, C, 5) M(A, B, C, 6) M(A, B, C, 7)
#define SIXTY_FOUR(M, A, B)                                                                         \
  EIGHT(M, A, B, 0) EIGHT(M, A, B, 1) EIGHT(M, A, B, 2) EIGHT(M, A, B, 3) EIGHT(M, A, B, 4)         \
  EIGHT(M, A, B, 5) EIGHT(M, A, B, 6) EIGHT(M, A, B, 7)
#define FIVE_HUNDRED(M, A)                                                                          \
  SIXTY_FOUR(M, A, 0) SIXTY_FOUR(M, A, 1) SIXTY_FOUR(M, A, 2) SIXTY_FOUR(M, A, 3)                   \
  SIXTY_FOUR(M, A, 4) SIXTY_FOUR(M, A, 5) SIXTY_FOUR(M, A, 6) SIXTY_FOUR(M, A, 7)
FIVE_HUNDRED(ONE, 0) FIVE_HUNDRED(ONE, 1) FIVE_HUNDRED(ONE, 2) FIVE_HUNDRED(ONE, 3)
static void (*const trampolines[TRAMPOLINES])(SIV*, uint64_t, uint64_t) = {
  FIVE_HUNDRED(NAME, 0) FIVE_HUNDRED(NAME, 1) FIVE_HUNDRED(NAME, 2) FIVE_HUNDRED(NAME, 3)};

/* ------------------------------------------------------------------------------------ for Python */

typedef struct {
  const char* torch_cpu; /* path of the library that has torch's C ABI */
  const char* torch_cuda; /* of the one with CUDA's part of it; NULL where there is none */
  int32_t cuda_type, dtypes;
  const int32_t* torch_dtype; /* -1 where torch has none */
  fr_table_entry* (*resolve)(fr_request*);
  void (*tell)(fr_request*, int what);
  int (*threads_now)(void);
  int (*ensure)(void);
  void (*release)(int);
  int (*check_signals)(void);
  void (*fetch)(void**, void**, void**);
  int (*is_finalizing)(void);
  int32_t few;
} fr_setup;

static bool find_symbol(void* from, const char* name, void* at) {
  void* found = dlsym(from, name);
  memcpy(at, &found, sizeof found);
  return found != NULL;
}

/* 0, or what is missing: 1 torch's library, 2 a function of it, 3 dtypes. */
FR_API int fr_torch_init(const fr_setup* s) {
  void* from = dlopen(s->torch_cpu, RTLD_NOW | RTLD_NOLOAD);
  if (!from) return 1;
  if (s->dtypes != FR_DTYPES) return 3;
  bool all = true;
#define FIND(NAME) all = find_symbol(from, "aoti_torch_" #NAME, &torch.NAME) && all;
  TORCH_FUNCTIONS(FIND)
#undef FIND
  /* The one that torch has from whatever replaces it for the process, else from its own. */
  if (!all || (!find_symbol(RTLD_DEFAULT, "_ZdlPv", &torch.free_word) && !find_symbol(from, "_ZdlPv", &torch.free_word)))
    return 2;
  if (s->torch_cuda) {
    void* with_cuda = dlopen(s->torch_cuda, RTLD_NOW | RTLD_NOLOAD);
    if (with_cuda) find_symbol(with_cuda, "aoti_torch_get_current_cuda_stream", &current_cuda_stream);
  }
  torch_cuda_type = s->cuda_type;
  torch_learn_dtypes(s->torch_dtype);
  fr_shared.resolve = resolve;
  python.resolve = s->resolve;
  python.tell = s->tell;
  fr_shared.threads_now = s->threads_now;
  python.ensure = s->ensure;
  python.release = s->release;
  python.check_signals = s->check_signals;
  python.fetch = s->fetch;
  python.is_finalizing = s->is_finalizing;
  fr_shared.few = s->few;
  return 0;
}

/* Whether Python is asked for the entry of each call. */
FR_API void fr_torch_bypass(int yes) { __atomic_store_n(&fr_shared.bypassing, yes, __ATOMIC_RELAXED); }

/* Whether torch's memory on the CPU is of glibc's malloc. */
FR_API void fr_torch_set_slack(int known) { slack_is_known = known; }

/* Which thread is Python's main one. */
FR_API void fr_torch_set_main_thread(uintptr_t thread) { main_thread = thread; }

/* What starts kernels on GPUs. */
FR_API void fr_torch_use_cuda(cuda_state* state) { cuda = state; }

/* Whether torch's CUDA part was found. */
FR_API int fr_torch_has_cuda(void) { return current_cuda_stream != NULL; }

/* Gives an op, which must live for ever, the next function of the pool. Its number, or -1 where all
 * are taken. */
FR_API int fr_torch_take(fr_op* op) {
  pthread_mutex_lock(&fr_shared.lock);
  int k = ops_bound < TRAMPOLINES ? ops_bound++ : -1;
  if (k >= 0) ops[k] = op;
  pthread_mutex_unlock(&fr_shared.lock);
  return k;
}

/* Makes that function the kernel of an operator that is defined. 0, or torch's error. */
FR_API int fr_torch_implement(int k, const char* ns, const char* name, const char* key) {
  LH library; /* lives as long as the process */
  int status = torch.library_init_impl(ns, key, "ferrule", 0, &library);
  return status ? status : torch.library_impl(library, name, trampolines[k]);
}

FR_API const char* fr_torch_digest(void) { return FR_DIGEST; }
FR_API size_t fr_torch_sizes(int which) { /* so that Python can check its own layout */
  static const size_t sizes[] = {sizeof(fr_op), sizeof(fr_body), sizeof(fr_table_entry), sizeof(fr_request), sizeof(fr_setup)};
  return sizes[which];
}
