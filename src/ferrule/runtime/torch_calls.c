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
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "op_calls.h"

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

enum { TRAMPOLINES = 2048 };

/* ----------------------------------------------------------------------- torch's stable C ABI */

/* torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h of torch 2.13. A value on a
 * stack is a handle, an integer, the bits of a double, or a bool, in 8 bytes. */
typedef uint64_t stack_value;
typedef struct AtenTensorOpaque* tensor;
typedef struct TorchLibraryOpaque* library;
typedef void (*boxed_kernel)(stack_value*, uint64_t inputs, uint64_t outputs);

static struct {
  int32_t (*library_init_impl)(const char* ns, const char* key, const char* file, uint32_t line,
                               library*);
  int32_t (*library_impl)(library, const char* name, boxed_kernel);
  int32_t (*is_defined)(tensor, bool*);
  int32_t (*get_sizes)(tensor, int64_t**);
  int32_t (*get_strides)(tensor, int64_t**);
  int32_t (*get_dim)(tensor, int64_t*);
  int32_t (*get_dtype)(tensor, int32_t*);
  int32_t (*get_data_ptr)(tensor, void**);
  int32_t (*get_device_type)(tensor, int32_t*);
  int32_t (*get_device_index)(tensor, int32_t*);
  int32_t (*empty_strided)(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device, tensor*);
  int32_t (*copy_)(tensor self, tensor from, int32_t non_blocking);
  int32_t (*delete_tensor_object)(tensor);
  void (*check)(bool good, const char* function, const char* file, uint32_t line, const char* text);
  int32_t (*get_current_cuda_stream)(int32_t device, void** stream); /* of a torch with CUDA */
  void (*delete)(void*); /* C++'s, for what an optional argument's handle lies in */
} torch;

static int32_t cuda_type; /* torch's numbers of the CUDA device type and of dtypes */
static int32_t torch_dtype[FR_MAX_DTYPES]; /* by place in ferrule.dtypes.ALL */
static int8_t place_of_dtype[128]; /* the reverse of torch_dtype; -1 where there is none */

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
  fr_call of;
  tensor given[FR_MAX_ARGUMENTS], copied[FR_MAX_ARGUMENTS], made[FR_MAX_ARGUMENTS];
  int64_t own_strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM]; /* of copies */
  int32_t torch_type, torch_index;
  size_t bytes[FR_MAX_ARGUMENTS], slack[FR_MAX_ARGUMENTS]; /* of outputs on the CPU, see canary.h */
  const char* text;
} call;

/* -------------------------------------------------------------------------- reading a call's inputs */

/* A number in its declared dtype. False where it does not fit. */
static bool read_number(fr_call* c, int i, stack_value word) {
  int32_t kind = c->op->input[i].kind;
  if (kind != INPUT_FLOAT)
    return fr_give_integer(c, i, kind == INPUT_BOOL ? (uint8_t)word != 0 : (int64_t)word);
  double number;
  memcpy(&number, &word, sizeof number);
  return fr_give_float(c, i, number);
}

/* Fills what the rule wants to know of the inputs. False where Python must say what is wrong. */
static bool read_inputs(call* c, const stack_value* stack) {
  fr_op* op = c->of.op;
  bool good = true, first = true;
  for (int i = 0; i < op->inputs; i++) {
    const fr_argument* a = &op->input[i];
    fr_rule_input* in = &c->of.input[i];
    if (a->kind != INPUT_ARRAY) {
      good = read_number(&c->of, i, stack[i]) && good;
      continue;
    }
    tensor t = c->given[i];
    in->present = t != NULL;
    if (!t) {
      c->of.pointer[i] = NULL;
      continue;
    }
    int64_t ndim, *sizes, *strides;
    int32_t dtype, type, index;
    torch.get_dim(t, &ndim);
    torch.get_sizes(t, &sizes);
    torch.get_strides(t, &strides);
    torch.get_dtype(t, &dtype);
    torch.get_device_type(t, &type);
    torch.get_device_index(t, &index);
    torch.get_data_ptr(t, &c->of.pointer[i]);
    if (first) {
      c->torch_type = type;
      c->torch_index = index;
      first = false;
    } else if (type != c->torch_type || index != c->torch_index) {
      good = false;
    }
    c->of.host_device[2 * i] = type;
    c->of.host_device[2 * i + 1] = index;
    in->ndim = (int32_t)ndim;
    in->sizes = sizes;
    c->of.strides[i] = strides;
    in->dtype = dtype >= 0 && dtype < 128 ? place_of_dtype[dtype] : -1;
    if (in->dtype < 0) { /* None where a tensor was declared, for one */
      torch.is_defined(t, &in->present);
      good = false;
    }
  }
  c->of.request.device_type = c->torch_type == cuda_type ? CUDA : CPU;
  c->of.request.device = c->torch_type == cuda_type ? c->torch_index : 0;
  return good;
}

/* -------------------------------------------------------------------------------------- the launch */

/* Whether nothing was written behind an output, as far as its memory was rounded up. */
static bool is_intact(call* c, void* const* outputs) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    int past = c->slack[i] ? fr_past_end((char*)outputs[i] + c->bytes[i], c->slack[i]) : 0;
    if (!past) continue;
    c->of.request.outside[0] = i;
    c->of.request.outside[1] = past;
    return false;
  }
  return true;
}

static bool launch_cpu(call* c, fr_table_entry* e, const fr_body* body, void* const* outputs) {
  fr_cpu_job job;
  fr_prepare_cpu(&c->of, e, body, outputs, &job);
  fr_progress progress;
  progress.parts = 0;
  int status;
  do { /* in between, Python sees its signals */
    status = job.run(job.entry, &job.launch, job.units, job.limit, FR_SLICE, &progress);
  } while (status == FR_MORE && !interrupted(&c->of.request));
  if (status == FR_OK && is_intact(c, outputs)) return true;
  if (status == FR_OK) status = FR_E_OUTSIDE;
  if (status != FR_MORE) {
    c->of.request.status = status;
    c->of.request.output_pointer = outputs;
    if (status != FR_E_ABANDONED || !interrupted(&c->of.request)) resolve(&c->of.request);
  }
  return false;
}

static bool launch_gpu(call* c, fr_table_entry* e, const fr_body* body, const fr_rule_result* found,
                       void* const* outputs, const uint64_t* zeroed) {
  fr_gpu_job job;
  void* stream = NULL;
  fr_prepare_gpu(&c->of, e, body, found, outputs, &job);
  int status = torch.get_current_cuda_stream(c->of.request.device, &stream);
  if (!status)
    status = cuda_start(cuda, &e->call, stream, c->of.op->outputs, outputs, zeroed, job.arguments);
  if (!status) return true;
  c->of.request.status = status;
  resolve(&c->of.request);
  return false;
}

/* --------------------------------------------------------------------------------------- one call */

/* A row-contiguous copy of each input that is not, and of those that are `shared`. */
static bool copy_inputs(call* c, const fr_body* body, uint64_t shared) {
  for (int i = 0; i < c->of.op->inputs; i++) {
    fr_rule_input* in = &c->of.input[i];
    if (!fr_wants_copy(&c->of, body, shared, i)) continue;
    int64_t* strides = c->own_strides[i];
    fr_row_strides(in->ndim, in->sizes, strides);
    if (torch.empty_strided(in->ndim, in->sizes, strides, torch_dtype[in->dtype], c->torch_type,
                            c->torch_index, &c->copied[i]) ||
        torch.copy_(c->copied[i], c->given[i], 0) || torch.get_data_ptr(c->copied[i], &c->of.pointer[i])) {
      c->text = "ferrule: torch could not copy an input that is not contiguous (no memory?)";
      return false;
    }
    c->of.strides[i] = strides;
    tell(&c->of.request, INPUT_COPIED);
  }
  return true;
}

static bool make_outputs(call* c, const fr_body* body, const fr_rule_result* found, void** pointers,
                         uint64_t* zeroed) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    const fr_rule_output* out = &found->outputs[i];
    int64_t strides[FR_MAX_NDIM], bytes = fr_item_bytes[out->dtype];
    fr_row_strides(out->ndim, out->sizes, strides);
    for (int d = 0; d < out->ndim; d++) bytes *= out->sizes[d];
    if (torch.empty_strided(out->ndim, out->sizes, strides, torch_dtype[out->dtype], c->torch_type,
                            c->torch_index, &c->made[i]) ||
        torch.get_data_ptr(c->made[i], &pointers[i])) {
      c->text = "ferrule: torch could not allocate an output (no memory?)";
      return false;
    }
#if defined(MADV_HUGEPAGE)
    /* A large output costs a page fault per 4 KB otherwise. */
    if (c->of.request.device_type == CPU && bytes >= 32 << 20) {
      uintptr_t start = ((uintptr_t)pointers[i] + 4095) & ~(uintptr_t)4095;
      uintptr_t end = ((uintptr_t)pointers[i] + (uintptr_t)bytes) & ~(uintptr_t)4095;
      madvise((void*)start, end - start, MADV_HUGEPAGE);
    }
#endif
    c->bytes[i] = (size_t)bytes;
    c->slack[i] = c->of.request.device_type == CPU && slack_is_known ? fr_slack(pointers[i], (size_t)bytes) : 0;
    if (c->slack[i]) fr_put_canary((char*)pointers[i] + bytes, c->slack[i]);
    zeroed[i] = body->zeroed ? (uint64_t)bytes : 0;
    if (body->zeroed && c->of.request.device_type == CPU && bytes) memset(pointers[i], 0, (size_t)bytes);
  }
  return true;
}

/* Whether arrays begin where CUDA's texts for aligned ones want them. */
static bool aligned(const call* c) {
  for (int i = 0; i < c->of.op->inputs; i++)
    if (c->of.op->input[i].kind == INPUT_ARRAY && (uintptr_t)c->of.pointer[i] % 16) return false;
  return true;
}

static bool carry_out(call* c, const stack_value* stack) {
  fr_op* op = c->of.op;
  fr_rule_result found;
  void* outputs[FR_MAX_ARGUMENTS];
  uint64_t zeroed[FR_MAX_ARGUMENTS];
  bool good = read_inputs(c, stack);
  if (!good || fr_rule_bind(op->program, c->of.input, &found)) {
    resolve(&c->of.request);
    return false;
  }
  bool on_gpu = c->of.request.device_type == CUDA;
  int b = on_gpu && cuda && cuda->forked ? -1 : fr_choose(&c->of, &found);
  const fr_body* body = &op->body[b < 0 ? 0 : b];
  if (b < 0 || !fr_work_out(&c->of, body, &found)) {
    resolve(&c->of.request);
    return false;
  }
  c->of.request.body = b;
  uint64_t shared;
  if (!fr_inputs_apart(&c->of, &shared)) {
    c->of.request.status = FR_SHARED;
    resolve(&c->of.request);
    return false;
  }
  if (!copy_inputs(c, body, shared)) return false;
  bool empty = fr_no_thread(&c->of);
  if (empty && !body->zeroed && fr_unwritten(op, &found)) {
    resolve(&c->of.request);
    return false;
  }
  c->of.request.aligned = aligned(c);
  fr_table_entry* e = NULL;
  if (!empty || (on_gpu && body->zeroed)) { /* what only zeroes wants the driver, too */
    e = fr_entry_for(&c->of, b, &found);
    if (!e) return false;
  }
  if (!make_outputs(c, body, &found, outputs, zeroed)) return false;
  if (on_gpu) {
    for (int i = 0; i < op->outputs; i++)
      if ((uintptr_t)outputs[i] % 16 && c->of.request.aligned) {
        c->text = "ferrule: torch's allocator gave an output that is not aligned to 16 bytes";
        return false;
      }
  }
  if (!e) return true;
  good = on_gpu ? launch_gpu(c, e, body, &found, outputs, zeroed) : launch_cpu(c, e, body, outputs);
  for (int i = 0; good && i < op->inputs; i++)
    if (op->input[i].mutable_ && c->copied[i] && torch.copy_(c->given[i], c->copied[i], 0)) {
      c->text = "ferrule: torch could not copy back what was written in place";
      good = false;
    }
  return good;
}

static void run(int k, stack_value* stack) {
  fr_op* op = ops[k];
  call c;
  fr_begin(&c.of, op, k);
  c.of.request.host_device = c.of.host_device;
  c.text = NULL;
  c.torch_type = c.torch_index = 0;
  for (int i = 0; i < op->inputs; i++) {
    c.copied[i] = NULL;
    c.given[i] = NULL;
    if (op->input[i].kind != INPUT_ARRAY) continue;
    if (!op->input[i].optional) {
      c.given[i] = (tensor)(uintptr_t)stack[i];
    } else if (stack[i]) { /* a pointer to a value that is ours to free */
      stack_value* held = (stack_value*)(uintptr_t)stack[i];
      c.given[i] = (tensor)(uintptr_t)*held;
      torch.delete(held);
    }
  }
  for (int i = 0; i < op->outputs; i++) c.made[i] = NULL;
  bool good = carry_out(&c, stack);
  wait_where_python_ends(); /* torch wants Python's lock next */
  for (int i = 0; i < op->inputs; i++) {
    if (c.copied[i]) torch.delete_tensor_object(c.copied[i]); /* same stream: reuse is ordered */
    if (c.given[i]) torch.delete_tensor_object(c.given[i]);
  }
  for (int i = 0; i < op->outputs; i++) {
    if (!good && c.made[i]) torch.delete_tensor_object(c.made[i]);
    stack[i] = (stack_value)(uintptr_t)c.made[i];
  }
  if (!good) {
    const char* text = c.text ? c.text : c.of.request.text;
    torch.check(false, "ferrule", "torch_calls.c", 0, text ? text : "ferrule: an op failed");
  }
}

/* ------------------------------------------------------------------------------------- trampolines */

/* Their numbers are octal: 04000 is 2048. */
#define ONE(A, B, C, D)                                                                            \
  static void t##A##B##C##D(stack_value* stack, uint64_t inputs, uint64_t outputs) {               \
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
static const boxed_kernel trampolines[TRAMPOLINES] = {
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

/* 0, or what is missing: 1 torch's library, 2 a function of it, 3 room for dtypes. */
FR_API int fr_torch_init(const fr_setup* s) {
  void* from = dlopen(s->torch_cpu, RTLD_NOW | RTLD_NOLOAD);
  if (!from) return 1;
  if (s->dtypes > FR_MAX_DTYPES) return 3;
  if (!find_symbol(from, "aoti_torch_library_init_impl", &torch.library_init_impl) ||
      !find_symbol(from, "aoti_torch_library_impl", &torch.library_impl) ||
      !find_symbol(from, "aoti_torch_is_defined", &torch.is_defined) ||
      !find_symbol(from, "aoti_torch_get_sizes", &torch.get_sizes) ||
      !find_symbol(from, "aoti_torch_get_strides", &torch.get_strides) ||
      !find_symbol(from, "aoti_torch_get_dim", &torch.get_dim) ||
      !find_symbol(from, "aoti_torch_get_dtype", &torch.get_dtype) ||
      !find_symbol(from, "aoti_torch_get_data_ptr", &torch.get_data_ptr) ||
      !find_symbol(from, "aoti_torch_get_device_type", &torch.get_device_type) ||
      !find_symbol(from, "aoti_torch_get_device_index", &torch.get_device_index) ||
      !find_symbol(from, "aoti_torch_empty_strided", &torch.empty_strided) ||
      !find_symbol(from, "aoti_torch_copy_", &torch.copy_) ||
      !find_symbol(from, "aoti_torch_delete_tensor_object", &torch.delete_tensor_object) ||
      !find_symbol(from, "aoti_torch_check", &torch.check) ||
      /* The one that torch has from whatever replaces it for the process, else from its own. */
      (!find_symbol(RTLD_DEFAULT, "_ZdlPv", &torch.delete) &&
       !find_symbol(from, "_ZdlPv", &torch.delete)))
    return 2;
  if (s->torch_cuda) {
    void* with_cuda = dlopen(s->torch_cuda, RTLD_NOW | RTLD_NOLOAD);
    if (with_cuda)
      find_symbol(with_cuda, "aoti_torch_get_current_cuda_stream", &torch.get_current_cuda_stream);
  }
  cuda_type = s->cuda_type;
  memset(place_of_dtype, -1, sizeof place_of_dtype);
  for (int i = 0; i < s->dtypes; i++) {
    torch_dtype[i] = s->torch_dtype[i];
    if (torch_dtype[i] >= 0 && torch_dtype[i] < 128) place_of_dtype[torch_dtype[i]] = (int8_t)i;
  }
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
FR_API int fr_torch_has_cuda(void) { return torch.get_current_cuda_stream != NULL; }

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
  library l; /* lives as long as the process */
  int status = torch.library_init_impl(ns, key, "ferrule", 0, &l);
  return status ? status : torch.library_impl(l, name, trampolines[k]);
}

FR_API const char* fr_torch_digest(void) { return FR_DIGEST; }
FR_API size_t fr_torch_sizes(int which) { /* so that Python can check its own layout */
  return which == 0 ? sizeof(fr_op) : which == 1 ? sizeof(fr_table_entry) : which == 2 ? sizeof(fr_request) : sizeof(fr_setup);
}
