/* Calls of ops by torch's dispatcher, without Python code: what hosts/torch_op.py does, in C.
 *
 * torch's stable C ABI gives an operator's kernel no context pointer, so each op gets one of a pool
 * of functions (`trampolines`). It binds the call's inputs to the op's rule (rule.h), works out the
 * launch, makes the outputs and starts the kernel. What a kernel became for some dtypes and form of
 * launch is an entry of the op's table. Python (hosts/torch_calls.py) makes entries, and words the
 * errors: whatever is not known or is wrong here is asked there.
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

#include "arrays.h"
#include "cuda_launch.h"
#include "rule.h"
#include "runtime.h"

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

enum { TRAMPOLINES = 2048, MAX_BODIES = 4, MAX_TEMPLATE = 16, MAX_DIMS = 16, MAX_KEY = 96 };
enum { BUCKETS = 64, MOST_ENTRIES = 4096 };
enum { CPU = 1, CUDA = 2 };

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
static uint8_t item_bytes[FR_MAX_DTYPES];
static int8_t place_of_dtype[128]; /* the reverse of torch_dtype; -1 where there is none */

/* ----------------------------------------------------------------------------------------- ops */

/* How a kernel is launched: numbers of extra expressions of the op's program. */
typedef struct {
  int32_t devices; /* of CPU and CUDA */
  int32_t when;    /* an expression, or -1 */
  int32_t grid;    /* the first of three; those of the threadgroup follow */
  int32_t templates, first_template;
  int32_t zeroed;     /* outputs are filled with zeros first */
  int32_t contiguous; /* inputs are copied unless they are row-contiguous */
  int32_t atomics;    /* on the CPU, the number of threads decides the text */
  uint32_t described; /* inputs whose shape or strides the body reads, a bit each */
  int32_t dims;       /* symbols that are passed as int32 */
  int32_t dim[MAX_DIMS];
} fr_body;

/* One input as the schema has it. */
enum { INPUT_ARRAY = 0, INPUT_FLOAT = 1, INPUT_INT = 2, INPUT_BOOL = 3 };
typedef struct {
  int32_t kind;
  int32_t dtype; /* of a number */
  int32_t optional, mutable;
  int32_t dims; /* that the rule writes, *S among them */
  int64_t least, most; /* of an integer */
} fr_argument;

typedef struct fr_table_entry fr_table_entry;

typedef struct {
  const int64_t* program;
  int32_t inputs, outputs, bodies;
  fr_argument input[FR_MAX_ARGUMENTS];
  fr_body body[MAX_BODIES];
  int32_t entries;
  fr_table_entry* bucket[BUCKETS];
} fr_op;

/* What a kernel became for the words of a key. */
struct fr_table_entry {
  fr_table_entry* next;
  int32_t words;
  int64_t key[MAX_KEY];
  /* On the CPU: */
  void* run; /* fr_run_some */
  fr_entry entry;
  int32_t limit, over_grid, block;
  uint32_t described; /* inputs whose shape and strides the body reads, a bit each */
  /* On a GPU: */
  cuda_call call;
  uint32_t sizes[9]; /* fr::launch of include/cuda_grid.h */
  int32_t parameters;
  int32_t parameter[2 * 4 * FR_MAX_ARGUMENTS]; /* kinds and indices */
};
enum { PASS_INPUT = 0, PASS_VALUE = 1, PASS_SHAPE = 2, PASS_STRIDES = 3, PASS_OUTPUT = 4, PASS_LAUNCH = 5 };

/* A call, as Python is told of it. */
typedef struct {
  int32_t op, body; /* body: -1 where none was chosen */
  int32_t device_type, device; /* CPU or CUDA */
  const fr_rule_input* input;
  void* const* pointer;         /* of arrays */
  const double* number;         /* of float inputs */
  const int64_t* integer;       /* of int and bool inputs */
  const int32_t* torch_device;  /* type and index of each input, as torch numbers them */
  const uint32_t* grid;         /* six sizes, once they are known */
  const int64_t* template_value;
  int32_t threads;              /* CPU: devices.cpu.Form.threads */
  int32_t aligned;              /* CUDA: arrays begin at multiples of 16 bytes */
  int32_t status;               /* of a launch that failed; or FR_SHARED */
  const int64_t* const* strides; /* of arrays, in elements */
  void* exception[3];           /* what a signal's handler raised: type, value, traceback */
  const char* text;             /* the answer: an error */
} fr_request;

enum { FR_SHARED = -1 }; /* arrays that are written in place share memory, or have many elements in one place */

enum { EXCEPTION = 0, INPUT_COPIED = 1 }; /* what Python is told */

static fr_op* ops[TRAMPOLINES];
static int ops_bound;
static cuda_state* cuda;
static int (*threads_now)(void);
static int few; /* devices.cpu.FEW */
static int bypassing; /* entries are neither taken from tables nor put there */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Python's own, for signals. A function in Python would not do: it is interrupted where it begins, and
 * the exception is lost. */
static struct {
  int (*ensure)(void);
  void (*release)(int);
  int (*check_signals)(void);
  void (*fetch)(void** type, void** value, void** traceback);
  int (*is_finalizing)(void);
  /* hosts/torch_calls.py's: */
  fr_table_entry* (*resolve)(fr_request*);
  void (*tell)(fr_request*, int what);
} python;

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

typedef int (*run_function)(fr_entry, const void*, uint64_t, int, int64_t, fr_progress*);

/* One call under way. */
typedef struct {
  fr_op* op;
  fr_request request;
  fr_rule_input input[FR_MAX_ARGUMENTS];
  tensor given[FR_MAX_ARGUMENTS], copied[FR_MAX_ARGUMENTS], made[FR_MAX_ARGUMENTS];
  void* pointer[FR_MAX_ARGUMENTS]; /* of inputs, of numbers too */
  const int64_t* strides[FR_MAX_ARGUMENTS];
  int64_t own_strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM]; /* of copies */
  double number[FR_MAX_ARGUMENTS];
  int64_t integer[FR_MAX_ARGUMENTS];
  union {
    uint8_t b;
    int8_t i8;
    uint16_t u16;
    int16_t i16;
    uint32_t u32;
    int32_t i32;
    uint64_t u64;
    int64_t i64;
    float f32;
    double f64;
  } value[FR_MAX_ARGUMENTS];
  int32_t device[2 * FR_MAX_ARGUMENTS]; /* torch's type and index of each input */
  int32_t dim[MAX_DIMS];
  uint32_t grid[6];
  int64_t template_value[MAX_TEMPLATE];
  int32_t torch_type, torch_index;
  const char* text;
} call;

/* -------------------------------------------------------------------------- reading a call's inputs */

/* A number in its declared dtype. False where it does not fit. */
static bool read_number(call* c, int i, stack_value word) {
  const fr_argument* a = &c->op->input[i];
  c->pointer[i] = &c->value[i];
  if (a->kind == INPUT_FLOAT) {
    double number;
    memcpy(&number, &word, sizeof number);
    c->number[i] = number;
    if (item_bytes[a->dtype] == 8) {
      c->value[i].f64 = number;
      return true;
    }
    c->value[i].f32 = (float)number;
    return !isinf(c->value[i].f32) || isinf(number);
  }
  int64_t number = a->kind == INPUT_BOOL ? (uint8_t)word != 0 : (int64_t)word;
  c->integer[i] = number;
  c->value[i].i64 = number; /* the low bytes come first */
  return number >= a->least && number <= a->most;
}

/* Fills what the rule wants to know of the inputs. False where Python must say what is wrong. */
static bool read_inputs(call* c, const stack_value* stack) {
  fr_op* op = c->op;
  bool good = true, first = true;
  for (int i = 0; i < op->inputs; i++) {
    const fr_argument* a = &op->input[i];
    fr_rule_input* in = &c->input[i];
    in->present = true;
    in->sizes = NULL;
    in->ndim = 0;
    in->dtype = FR_NO_DTYPE;
    if (a->kind != INPUT_ARRAY) {
      good = read_number(c, i, stack[i]) && good;
      continue;
    }
    tensor t = c->given[i];
    if (!t) {
      in->present = false;
      c->pointer[i] = NULL;
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
    torch.get_data_ptr(t, &c->pointer[i]);
    if (first) {
      c->torch_type = type;
      c->torch_index = index;
      first = false;
    } else if (type != c->torch_type || index != c->torch_index) {
      good = false;
    }
    c->device[2 * i] = type;
    c->device[2 * i + 1] = index;
    in->ndim = (int32_t)ndim;
    in->sizes = sizes;
    c->strides[i] = strides;
    in->dtype = dtype >= 0 && dtype < 128 ? place_of_dtype[dtype] : -1;
    if (in->dtype < 0) { /* None where a tensor was declared, for one */
      torch.is_defined(t, &in->present);
      good = false;
    }
  }
  c->request.device_type = c->torch_type == cuda_type ? CUDA : CPU;
  c->request.device = c->torch_type == cuda_type ? c->torch_index : 0;
  return good;
}

/* -------------------------------------------------------------------------------------- the launch */

static bool values(call* c, const fr_rule_result* found, int32_t first, int32_t count, int64_t* out) {
  for (int32_t i = 0; i < count; i++)
    if (fr_rule_value(c->op->program, first + i, found, &out[i])) return false;
  return true;
}

/* The body for a call; -1 where Python must say why there is none. */
static int choose(call* c, const fr_rule_result* found) {
  for (int b = 0; b < c->op->bodies; b++) {
    const fr_body* body = &c->op->body[b];
    int64_t holds = 1;
    if (!(body->devices & c->request.device_type)) continue;
    if (body->when >= 0 && !values(c, found, body->when, 1, &holds)) return -1;
    if (holds) return b;
  }
  return -1;
}

/* Grid, threadgroup, template values and dims of a body. False where one is out of range. */
static bool work_out(call* c, const fr_body* body, const fr_rule_result* found) {
  int64_t size[6];
  if (!values(c, found, body->grid, 6, size)) return false;
  for (int i = 0; i < 6; i++) {
    if (size[i] < (i >= 3) || size[i] > INT32_MAX) return false;
    c->grid[i] = (uint32_t)size[i];
  }
  if (size[3] > 1024 || size[4] > 1024 || size[5] > 1024 || size[3] * size[4] * size[5] > 1024)
    return false;
  if (!values(c, found, body->first_template, body->templates, c->template_value)) return false;
  for (int i = 0; i < body->templates; i++)
    if (c->template_value[i] < INT32_MIN || c->template_value[i] > INT32_MAX) return false;
  for (int i = 0; i < body->dims; i++) {
    int64_t value = found->symbols[body->dim[i]];
    if (value > INT32_MAX) return false;
    c->dim[i] = (int32_t)value;
  }
  for (int i = 0; i < c->op->inputs; i++) /* shapes hold int32 */
    for (int d = 0; body->described >> i & 1 && c->input[i].present && d < c->input[i].ndim; d++)
      if (c->input[i].sizes[d] > INT32_MAX) return false;
  for (int i = 0; i < 3; i++) /* the threadgroup is never longer than the grid */
    if (c->grid[i + 3] > c->grid[i] && c->grid[i]) c->grid[i + 3] = c->grid[i];
  c->request.grid = c->grid;
  c->request.template_value = c->template_value;
  return true;
}

/* `form_of` of devices/cpu.py as bits. */
static int64_t cpu_form(const uint32_t* grid, int threads) {
  uint32_t x = grid[3], y = grid[4], z = grid[5];
  bool row = y == 1 && z == 1;
  uint32_t edge = x ? grid[0] % x : 0;
  return (x * y * z <= 32) | (row || (x % 32 == 0 && edge % 32 == 0)) << 1 | row << 2 |
         (int64_t)(x % 32 == 0) << 3 | (int64_t)threads << 4;
}

static int cpu_threads(void) {
  int threads = threads_now();
  return threads == 1 ? 1 : threads <= few ? few : 0;
}

/* What tells a call's machine code from that of others. */
static int make_key(call* c, int b, const fr_rule_result* found, int64_t* key) {
  fr_op* op = c->op;
  const fr_body* body = &op->body[b];
  int n = 0;
  key[n++] = b | (int64_t)c->request.device_type << 8 | (int64_t)c->request.device << 16;
  uint64_t present = 0;
  for (int i = 0; i < op->inputs; i++) {
    present |= (uint64_t)c->input[i].present << i;
    if (op->input[i].kind == INPUT_ARRAY && c->input[i].present)
      key[n++] = c->input[i].ndim | c->input[i].dtype << 8;
  }
  key[n++] = (int64_t)present;
  for (int i = 0; i < op->outputs; i++) key[n++] = found->outputs[i].dtype;
  for (int i = 0; i < body->templates; i++) key[n++] = c->template_value[i];
  if (c->request.device_type == CPU) {
    c->request.threads = body->atomics ? cpu_threads() : 0;
    key[n++] = cpu_form(c->grid, c->request.threads);
  } else {
    for (int i = 0; i < 6; i++) key[n++] = c->grid[i];
    key[n++] = c->request.aligned;
  }
  return n;
}

static fr_table_entry* look_up(fr_op* op, const int64_t* key, int n, uint64_t* bucket) {
  uint64_t h = (uint64_t)n;
  for (int i = 0; i < n; i++) {
    h = (h ^ (uint64_t)key[i]) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 29;
  }
  *bucket = h % BUCKETS;
  fr_table_entry* e = __atomic_load_n(&op->bucket[*bucket], __ATOMIC_ACQUIRE);
  for (; e; e = e->next)
    if (e->words == n && !memcmp(e->key, key, sizeof *key * (size_t)n)) return e;
  return NULL;
}

/* The entry for a key: Python makes it the first time. NULL where it says what is wrong. */
static fr_table_entry* entry_for(call* c, int b, const fr_rule_result* found) {
  int64_t key[MAX_KEY];
  uint64_t bucket;
  int n = make_key(c, b, found, key);
  if (__atomic_load_n(&bypassing, __ATOMIC_RELAXED)) return resolve(&c->request);
  fr_table_entry* e = look_up(c->op, key, n, &bucket);
  if (e) return e;
  e = resolve(&c->request);
  if (!e || c->op->entries >= MOST_ENTRIES) return e; /* then Python is asked each time */
  pthread_mutex_lock(&lock);
  if (e->words == 0) {
    memcpy(e->key, key, sizeof *key * (size_t)n);
    e->words = n;
    e->next = c->op->bucket[bucket];
    c->op->entries++;
    __atomic_store_n(&c->op->bucket[bucket], e, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&lock);
  return e;
}

/* `fr::launch` of include/cpu.h. */
typedef struct {
  void* const* buffers;
  const int* const* shapes;
  const int64_t* const* strides;
  const int* ndims;
  uint32_t grid[3], threadgroup[3], groups[3], block;
} cpu_launch;

/* An input's shape and strides as a body sees them: one that is absent has sizes of 1, and so has one
 * that is declared with *S and has no dims. The same as in `_facts` of ferrule/op_launch.py. */
static int32_t seen(const call* c, int i, int32_t* shape, int64_t* strides) {
  const fr_rule_input* in = &c->input[i];
  int32_t dims = c->op->input[i].dims, one = dims > 0;
  int32_t ndim = in->present ? (in->ndim ? in->ndim : one) : dims;
  for (int32_t d = 0; d < FR_MAX_NDIM; d++) {
    bool there = in->present && d < in->ndim;
    shape[d] = there ? (int32_t)in->sizes[d] : d < ndim;
    strides[d] = there ? c->strides[i][d] : d < ndim;
  }
  return ndim;
}

/* The addresses of all that the kernel takes: inputs, dims, outputs, and what is written in place. */
static void buffers_of(call* c, const fr_body* body, void* const* outputs, void** buffers) {
  int n = 0;
  for (int i = 0; i < c->op->inputs; i++)
    if (!c->op->input[i].mutable) buffers[n++] = c->pointer[i];
  for (int i = 0; i < body->dims; i++) buffers[n++] = &c->dim[i];
  for (int i = 0; i < c->op->outputs; i++) buffers[n++] = outputs[i];
  for (int i = 0; i < c->op->inputs; i++)
    if (c->op->input[i].mutable) buffers[n++] = c->pointer[i];
}

static bool launch_cpu(call* c, fr_table_entry* e, const fr_body* body, void* const* outputs) {
  void* buffers[2 * FR_MAX_ARGUMENTS + MAX_DIMS];
  int32_t shape[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  int64_t stride[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  const int* shapes[FR_MAX_ARGUMENTS + MAX_DIMS];
  const int64_t* strides[FR_MAX_ARGUMENTS + MAX_DIMS];
  int ndims[FR_MAX_ARGUMENTS + MAX_DIMS];
  cpu_launch l = {buffers, shapes, strides, ndims, {0}, {0}, {0}, (uint32_t)e->block};
  buffers_of(c, body, outputs, buffers);
  if (e->described) {
    int n = 0;
    for (int i = 0; i < c->op->inputs; i++) {
      if (c->op->input[i].mutable) continue;
      ndims[n] = seen(c, i, shape[i], stride[i]);
      shapes[n] = shape[i];
      strides[n++] = stride[i];
    }
  }
  uint64_t units = 1;
  for (int i = 0; i < 3; i++) {
    l.grid[i] = c->grid[i];
    l.threadgroup[i] = c->grid[i + 3];
    l.groups[i] = (c->grid[i] + c->grid[i + 3] - 1) / c->grid[i + 3];
    units *= l.groups[i];
  }
  if (e->over_grid)
    units = (uint64_t)((l.grid[0] + (uint32_t)e->block - 1) / (uint32_t)e->block) * l.grid[1] * l.grid[2];
  fr_progress progress;
  progress.parts = 0;
  int status;
  do { /* in between, Python sees its signals */
    status = ((run_function)e->run)(e->entry, &l, units, e->limit, 200000000, &progress);
  } while (status == FR_MORE && !interrupted(&c->request));
  if (status == FR_OK) return true;
  if (status != FR_MORE) {
    c->request.status = status;
    resolve(&c->request);
  }
  return false;
}

static bool launch_gpu(call* c, fr_table_entry* e, const fr_body* body, void* const* outputs,
                       const uint64_t* zeroed) {
  void* arguments[4 * FR_MAX_ARGUMENTS + MAX_DIMS];
  void* buffers[2 * FR_MAX_ARGUMENTS + MAX_DIMS];
  struct {
    int32_t shape[FR_MAX_NDIM];
    int64_t strides[FR_MAX_NDIM];
  } of[FR_MAX_ARGUMENTS];
  void* stream = NULL;
  buffers_of(c, body, outputs, buffers);
  int place[FR_MAX_ARGUMENTS], m = 0; /* of the kernel's inputs among the op's */
  for (int i = 0; i < c->op->inputs; i++)
    if (!c->op->input[i].mutable) place[m++] = i;
  int first_output = m + body->dims;
  for (int p = 0; p < e->parameters; p++) {
    int kind = e->parameter[2 * p], i = e->parameter[2 * p + 1];
    switch (kind) {
      case PASS_INPUT: arguments[p] = &buffers[i]; break;
      case PASS_VALUE: arguments[p] = buffers[i]; break;
      case PASS_OUTPUT: arguments[p] = &buffers[first_output + i]; break;
      case PASS_LAUNCH: arguments[p] = e->sizes; break;
      default:
        seen(c, place[i], of[i].shape, of[i].strides);
        arguments[p] = kind == PASS_SHAPE ? (void*)of[i].shape : (void*)of[i].strides;
    }
  }
  int status = torch.get_current_cuda_stream(c->request.device, &stream);
  if (!status)
    status = cuda_start(cuda, &e->call, stream, c->op->outputs, outputs, zeroed, arguments);
  if (!status) return true;
  c->request.status = status;
  resolve(&c->request);
  return false;
}

/* --------------------------------------------------------------------------------------- one call */

static bool is_array(const call* c, int i) {
  return c->op->input[i].kind == INPUT_ARRAY && c->input[i].present;
}

/* Finds inputs that share memory with one that is written in place. False where that cannot be. */
static bool keep_apart(call* c, uint64_t* shared) {
  fr_given given = {.count = c->op->inputs, .inputs = c->input, .pointers = c->pointer,
                    .strides = c->strides, .item_bytes = item_bytes};
  int32_t wrong[2];
  for (int i = 0; i < c->op->inputs; i++) {
    given.arrays |= (uint64_t)is_array(c, i) << i;
    given.written |= (uint64_t)c->op->input[i].mutable << i;
  }
  return fr_keep_apart(&given, shared, wrong);
}

/* A row-contiguous copy of each input that is not, and of those that are `shared`. */
static bool copy_inputs(call* c, const fr_body* body, uint64_t shared) {
  for (int i = 0; i < c->op->inputs; i++) {
    const fr_argument* a = &c->op->input[i];
    fr_rule_input* in = &c->input[i];
    if (!is_array(c, i)) continue;
    bool wanted = body->contiguous || a->mutable;
    if (!(shared >> i & 1) && (!wanted || fr_row_contiguous(in->ndim, in->sizes, c->strides[i])))
      continue;
    int64_t* strides = c->own_strides[i];
    fr_row_strides(in->ndim, in->sizes, strides);
    if (torch.empty_strided(in->ndim, in->sizes, strides, torch_dtype[in->dtype], c->torch_type,
                            c->torch_index, &c->copied[i]) ||
        torch.copy_(c->copied[i], c->given[i], 0) || torch.get_data_ptr(c->copied[i], &c->pointer[i])) {
      c->text = "ferrule: torch could not copy an input that is not contiguous (no memory?)";
      return false;
    }
    c->strides[i] = strides;
    tell(&c->request, INPUT_COPIED);
  }
  return true;
}

static bool make_outputs(call* c, const fr_body* body, const fr_rule_result* found, void** pointers,
                         uint64_t* zeroed) {
  for (int i = 0; i < c->op->outputs; i++) {
    const fr_rule_output* out = &found->outputs[i];
    int64_t strides[FR_MAX_NDIM], bytes = item_bytes[out->dtype];
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
    if (c->request.device_type == CPU && bytes >= 32 << 20) {
      uintptr_t start = ((uintptr_t)pointers[i] + 4095) & ~(uintptr_t)4095;
      uintptr_t end = ((uintptr_t)pointers[i] + (uintptr_t)bytes) & ~(uintptr_t)4095;
      madvise((void*)start, end - start, MADV_HUGEPAGE);
    }
#endif
    zeroed[i] = body->zeroed ? (uint64_t)bytes : 0;
    if (body->zeroed && c->request.device_type == CPU && bytes) memset(pointers[i], 0, (size_t)bytes);
  }
  return true;
}

/* Whether arrays begin where CUDA's texts for aligned ones want them. */
static bool aligned(const call* c) {
  for (int i = 0; i < c->op->inputs; i++)
    if (c->op->input[i].kind == INPUT_ARRAY && (uintptr_t)c->pointer[i] % 16) return false;
  return true;
}

static bool carry_out(call* c, const stack_value* stack) {
  fr_op* op = c->op;
  fr_rule_result found;
  void* outputs[FR_MAX_ARGUMENTS];
  uint64_t zeroed[FR_MAX_ARGUMENTS];
  bool good = read_inputs(c, stack);
  if (!good || fr_rule_bind(op->program, c->input, &found)) {
    resolve(&c->request);
    return false;
  }
  bool on_gpu = c->request.device_type == CUDA;
  int b = on_gpu && cuda && cuda->forked ? -1 : choose(c, &found);
  const fr_body* body = &op->body[b < 0 ? 0 : b];
  if (b < 0 || !work_out(c, body, &found)) {
    resolve(&c->request);
    return false;
  }
  c->request.body = b;
  uint64_t shared;
  if (!keep_apart(c, &shared)) {
    c->request.status = FR_SHARED;
    resolve(&c->request);
    return false;
  }
  if (!copy_inputs(c, body, shared)) return false;
  bool empty = !c->grid[0] || !c->grid[1] || !c->grid[2];
  for (int i = 0; empty && !body->zeroed && i < op->outputs; i++) {
    bool any = true;
    for (int d = 0; d < found.outputs[i].ndim; d++) any = any && found.outputs[i].sizes[d];
    if (any) { /* an output that nothing would write */
      resolve(&c->request);
      return false;
    }
  }
  c->request.aligned = aligned(c);
  fr_table_entry* e = NULL;
  if (!empty || (on_gpu && body->zeroed)) { /* what only zeroes wants the driver, too */
    e = entry_for(c, b, &found);
    if (!e) return false;
  }
  if (!make_outputs(c, body, &found, outputs, zeroed)) return false;
  if (on_gpu) {
    for (int i = 0; i < op->outputs; i++)
      if ((uintptr_t)outputs[i] % 16 && c->request.aligned) {
        c->text = "ferrule: torch's allocator gave an output that is not aligned to 16 bytes";
        return false;
      }
  }
  if (!e) return true;
  good = on_gpu ? launch_gpu(c, e, body, outputs, zeroed) : launch_cpu(c, e, body, outputs);
  for (int i = 0; good && i < op->inputs; i++)
    if (op->input[i].mutable && c->copied[i] && torch.copy_(c->given[i], c->copied[i], 0)) {
      c->text = "ferrule: torch could not copy back what was written in place";
      good = false;
    }
  return good;
}

static void run(int k, stack_value* stack) {
  fr_op* op = ops[k];
  call c;
  c.op = op;
  c.text = NULL;
  c.torch_type = c.torch_index = 0;
  c.request = (fr_request){.op = k, .body = -1, .input = c.input, .pointer = c.pointer,
                           .number = c.number, .integer = c.integer, .torch_device = c.device,
                           .strides = c.strides};
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
    const char* text = c.text ? c.text : c.request.text;
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
  const uint8_t* item_bytes;
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
    item_bytes[i] = s->item_bytes[i];
    if (torch_dtype[i] >= 0 && torch_dtype[i] < 128) place_of_dtype[torch_dtype[i]] = (int8_t)i;
  }
  python.resolve = s->resolve;
  python.tell = s->tell;
  threads_now = s->threads_now;
  python.ensure = s->ensure;
  python.release = s->release;
  python.check_signals = s->check_signals;
  python.fetch = s->fetch;
  python.is_finalizing = s->is_finalizing;
  few = s->few;
  return 0;
}

/* Whether Python is asked for the entry of each call. */
FR_API void fr_torch_bypass(int yes) { __atomic_store_n(&bypassing, yes, __ATOMIC_RELAXED); }

/* Which thread is Python's main one. */
FR_API void fr_torch_set_main_thread(uintptr_t thread) { main_thread = thread; }

/* What starts kernels on GPUs. */
FR_API void fr_torch_use_cuda(cuda_state* state) { cuda = state; }

/* Whether torch's CUDA part was found. */
FR_API int fr_torch_has_cuda(void) { return torch.get_current_cuda_stream != NULL; }

/* Gives an op, which must live for ever, the next function of the pool. Its number, or -1 where all
 * are taken. */
FR_API int fr_torch_take(fr_op* op) {
  pthread_mutex_lock(&lock);
  int k = ops_bound < TRAMPOLINES ? ops_bound++ : -1;
  if (k >= 0) ops[k] = op;
  pthread_mutex_unlock(&lock);
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
