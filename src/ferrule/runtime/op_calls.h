/* Calls of ops without Python code: what fastcall.c, torch_calls.c, mlx_node.cpp and the libraries of packages share.
 *
 * A call's inputs are bound to the op's rule (rule.h), and its launch is worked out; a kernel of level 0 is an op
 * without a rule, whose sizes are given. What a kernel
 * became for some dtypes and form of launch is an entry of the op's table. Python (kernels/entries.py)
 * makes entries, and words the errors: whatever is not known or is wrong here is asked there. Packages make and word
 * theirs in packaged/ops.h.
 *
 * Valid as C11 and as C++17.
 */
#ifndef FERRULE_OP_CALLS_H
#define FERRULE_OP_CALLS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "arrays.h"
#include "canary.h"
#include "cpu_launch.h"
#include "cuda_launch.h"
#include "rule.h"
#include "runtime.h"

enum { MAX_TEMPLATE = 64, MAX_DIMS = FR_MAX_SYMBOLS, MAX_KEY = 112 };
enum { BUCKETS = 64, MOST_ENTRIES = 4096 };
/* Inputs of a kernel, dims among them; those and outputs; and what a kernel on a GPU is given of them. */
enum {
  FR_MAX_INPUTS = FR_MAX_ARGUMENTS + (int)MAX_DIMS,
  FR_MAX_BUFFERS = (int)FR_MAX_INPUTS + FR_MAX_ARGUMENTS,
  FR_MAX_PARAMETERS = 4 * FR_MAX_ARGUMENTS + (int)FR_MAX_INPUTS
};
enum { CPU = 1, CUDA = 2 }; /* and 4, Metal, where nothing of this runs */
/* What expressions of a launch may name of a device: its kind, sm_count, capability and memory_bus. */
enum { FR_KIND = 0, FR_SM_COUNT = 1, FR_CAPABILITY = 2, FR_MEMORY_BUS = 3, FR_DEVICE_FACTS = 4, FR_MAX_GPUS = 16 };

/* ----------------------------------------------------------------------------------------- ops */

/* How a kernel is launched: numbers of extra expressions of the op's program. */
typedef struct {
  int32_t devices; /* of CPU and CUDA */
  int32_t when;    /* an expression, or -1 */
  int32_t grid;    /* the first of three; those of the threadgroup follow */
  int32_t templates, first_template;
  int32_t zeroed;     /* outputs are filled first, with zeros but in packages */
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
  int32_t optional, mutable_;
  int32_t dims; /* that the rule writes, *S among them */
} fr_argument;

typedef struct fr_table_entry fr_table_entry;

typedef struct {
  const int64_t* program;
  int32_t inputs, outputs, bodies;
  const char* output_name[FR_MAX_ARGUMENTS]; /* NULL where they have none */
  fr_argument input[FR_MAX_ARGUMENTS];
  const fr_body* body;
  int32_t entries;
  fr_table_entry* bucket[BUCKETS];
  int32_t device_symbol[FR_DEVICE_FACTS];            /* -1 of those that no expression names */
  int (*tell_gpu)(int32_t gpu, int32_t* facts);      /* fills in all but the kind; 0: known */
  int32_t gpu[FR_MAX_GPUS][FR_DEVICE_FACTS];         /* what it told */
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
  int32_t parameter[2 * FR_MAX_PARAMETERS]; /* kinds and indices */
};

/* A call, as Python is told of it. */
typedef struct {
  int32_t op, body; /* body: -1 where none was chosen */
  int32_t device_type, device; /* CPU or CUDA */
  const fr_rule_input* input;
  const fr_rule_output* output; /* NULL where they are not known */
  void* const* pointer;         /* of arrays */
  void* const* output_pointer;  /* of outputs, of a launch that failed; or NULL */
  const double* number;         /* of float inputs */
  const int64_t* integer;       /* of int and bool inputs */
  const int32_t* host_device;   /* type and index of each input, as the host numbers them; or NULL */
  const uint32_t* grid;         /* six sizes, once they are known */
  const int64_t* template_value;
  int32_t threads;              /* CPU: devices.cpu.Form.threads */
  int32_t aligned;              /* CUDA: arrays begin at multiples of 16 bytes */
  int32_t status;               /* of a launch that failed; or FR_SHARED */
  const int64_t* const* strides; /* of arrays, in elements */
  void* exception[3];           /* what a signal's handler raised: type, value, traceback */
  const char* text;             /* the answer: an error */
  int32_t outside[2];           /* of FR_E_OUTSIDE: the output's number, and bytes past its end */
} fr_request;

enum { FR_SHARED = -1 }; /* arrays that are written in place share memory, or have many elements in one place */

/* What Python offers. */
static struct {
  fr_table_entry* (*resolve)(fr_request*); /* the entry for a request, or NULL and a text */
  int (*threads_now)(void);
  int few; /* FEW of tools/binding.py */
  int bypassing; /* entries are neither taken from tables nor put there */
  pthread_mutex_t lock;
} fr_shared = {NULL, NULL, 0, 0, PTHREAD_MUTEX_INITIALIZER};

typedef int (*fr_run_function)(fr_entry, const void*, uint64_t, int, int64_t, fr_progress*);

/* One call under way. */
typedef struct {
  fr_op* op;
  fr_request request;
  fr_rule_input input[FR_MAX_ARGUMENTS];
  void* pointer[FR_MAX_ARGUMENTS]; /* of inputs, of numbers too */
  const int64_t* strides[FR_MAX_ARGUMENTS];
  double number[FR_MAX_ARGUMENTS];
  int64_t integer[FR_MAX_ARGUMENTS];
  uint64_t value[FR_MAX_ARGUMENTS]; /* the bytes of those that are numbers */
  int32_t host_device[2 * FR_MAX_ARGUMENTS];
  int32_t dim[MAX_DIMS];
  uint32_t grid[6];
  int64_t template_value[MAX_TEMPLATE];
} fr_call;

static inline void fr_begin(fr_call* c, fr_op* op, int number) {
  c->op = op;
  memset(&c->request, 0, sizeof c->request);
  c->request.op = number;
  c->request.body = -1;
  c->request.input = c->input;
  c->request.pointer = c->pointer;
  c->request.number = c->number;
  c->request.integer = c->integer;
  c->request.strides = c->strides;
}

/* -------------------------------------------------------------------------------- a call's inputs */

/* What the rule knows of a number. */
static inline void fr_give_number(fr_call* c, int i) {
  c->value[i] = 0;
  c->pointer[i] = &c->value[i];
  c->input[i].present = true;
  c->input[i].sizes = NULL;
  c->input[i].ndim = 0;
  c->input[i].dtype = FR_NO_DTYPE;
}

/* A float input in its declared dtype. False where it does not fit. */
static inline bool fr_give_float(fr_call* c, int i, double number) {
  fr_give_number(c, i);
  c->number[i] = number;
  return fr_float_bytes(c->op->input[i].dtype, number, &c->value[i]);
}

/* An int or bool input. False where it does not fit. */
static inline bool fr_give_integer(fr_call* c, int i, int64_t number) {
  fr_give_number(c, i);
  c->integer[i] = c->input[i].value = number;
  return fr_integer_bytes(c->op->input[i].dtype, number, &c->value[i]);
}

static inline bool fr_is_array(const fr_call* c, int i) {
  return c->op->input[i].kind == INPUT_ARRAY && c->input[i].present;
}

/* Finds inputs that share memory with one that is written in place, a bit each. False where that cannot be: see
 * fr_keep_apart. */
static inline bool fr_inputs_apart(const fr_call* c, uint64_t* shared, int32_t wrong[2]) {
  fr_given given = {c->op->inputs, c->input, c->pointer, c->strides, 0, 0};
  for (int i = 0; i < c->op->inputs; i++) {
    given.arrays |= (uint64_t)fr_is_array(c, i) << i;
    given.written |= (uint64_t)c->op->input[i].mutable_ << i;
  }
  return fr_keep_apart(&given, shared, wrong);
}

/* Whether a body gets a copy of an input: of one that is `shared`, and of one that must lie row by row and does not. */
static inline bool fr_wants_copy(const fr_call* c, const fr_body* body, uint64_t shared, int i) {
  const fr_rule_input* in = &c->input[i];
  if (!fr_is_array(c, i)) return false;
  return shared >> i & 1 || ((body->contiguous || c->op->input[i].mutable_) &&
                             !fr_row_contiguous(in->ndim, in->sizes, c->strides[i]));
}

/* -------------------------------------------------------------------------------------- the launch */

static inline bool fr_values(const fr_op* op, const fr_rule_result* found, int32_t first,
                             int32_t count, int64_t* out) {
  for (int32_t i = 0; i < count; i++)
    if (fr_rule_value(op->program, first + i, found, &out[i])) return false;
  return true;
}

/* What the launch depends on of the device. False where that is not known. */
static inline bool fr_give_device(const fr_call* c, fr_rule_result* found) {
  fr_op* op = c->op;
  int32_t facts[FR_DEVICE_FACTS] = {c->request.device_type, 0, 0, 0}, gpu = c->request.device;
  if (c->request.device_type == CPU) facts[FR_SM_COUNT] = fr_shared.threads_now();
  bool asked = false;
  for (int i = FR_SM_COUNT; i < FR_DEVICE_FACTS; i++) asked = asked || op->device_symbol[i] >= 0;
  if (c->request.device_type == CUDA && asked) {
    if (gpu < 0 || gpu >= FR_MAX_GPUS) return false;
    if (!op->gpu[gpu][FR_SM_COUNT] && op->tell_gpu(gpu, op->gpu[gpu])) return false;
    for (int i = FR_SM_COUNT; i < FR_DEVICE_FACTS; i++) facts[i] = op->gpu[gpu][i];
  }
  for (int i = 0; i < FR_DEVICE_FACTS; i++)
    if (op->device_symbol[i] >= 0) found->symbols[op->device_symbol[i]] = facts[i];
  return true;
}

static inline bool fr_of_device(const fr_op* op) {
  for (int i = 0; i < FR_DEVICE_FACTS; i++)
    if (op->device_symbol[i] >= 0) return true;
  return false;
}

/* The body for a call; -1 where Python must say why there is none. */
static inline int fr_choose(const fr_call* c, fr_rule_result* found) {
  if (fr_of_device(c->op) && !fr_give_device(c, found)) return -1;
  for (int b = 0; b < c->op->bodies; b++) {
    const fr_body* body = &c->op->body[b];
    int64_t holds = 1;
    if (!(body->devices & c->request.device_type)) continue;
    if (body->when >= 0 && !fr_values(c->op, found, body->when, 1, &holds)) return -1;
    if (holds) return b;
  }
  return -1;
}

/* Whether there may be a threadgroup of so many threads. */
static inline bool fr_group_fits(const uint32_t* group) {
  return group[0] <= 1024 && group[1] <= 1024 && group[2] <= 1024 && group[0] * group[1] * group[2] <= 1024;
}

/* The threadgroup, which follows the grid, is never longer than that. */
static inline void fr_clamp_group(uint32_t* grid) {
  for (int i = 0; i < 3; i++)
    if (grid[i + 3] > grid[i] && grid[i]) grid[i + 3] = grid[i];
}

/* Grid, threadgroup, template values and dims of a body. False where one is out of range. */
static inline bool fr_work_out(fr_call* c, const fr_body* body, const fr_rule_result* found) {
  int64_t size[6];
  if (!fr_values(c->op, found, body->grid, 6, size)) return false;
  bool empty = !size[0] || !size[1] || !size[2]; /* then the threadgroup may be, too, as min(N, 256) is */
  for (int i = 0; i < 6; i++) {
    if (i >= 3 && empty && size[i] == 0) size[i] = 1;
    if (size[i] < (i >= 3) || size[i] > INT32_MAX) return false;
    c->grid[i] = (uint32_t)size[i];
  }
  if (!fr_group_fits(c->grid + 3)) return false;
  if (!fr_values(c->op, found, body->first_template, body->templates, c->template_value))
    return false;
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
  fr_clamp_group(c->grid);
  c->request.grid = c->grid;
  c->request.template_value = c->template_value;
  return true;
}

/* Whether no thread would run. */
static inline bool fr_no_thread(const fr_call* c) { return !c->grid[0] || !c->grid[1] || !c->grid[2]; }

/* Whether an output has elements, which no thread would write. */
static inline bool fr_unwritten(const fr_op* op, const fr_rule_result* found) {
  for (int i = 0; i < op->outputs; i++) {
    bool any = true;
    for (int d = 0; d < found->outputs[i].ndim; d++) any = any && found->outputs[i].sizes[d];
    if (any) return true;
  }
  return false;
}

static inline int fr_cpu_threads(void) {
  int threads = fr_shared.threads_now();
  return threads == 1 ? 1 : threads <= fr_shared.few ? fr_shared.few : 0;
}

/* What tells a call's machine code from that of others. */
static inline int fr_make_key(fr_call* c, int b, const fr_rule_result* found, int64_t* key) {
  fr_op* op = c->op;
  const fr_body* body = &op->body[b];
  int n = 0;
  key[n++] = b | (int64_t)c->request.device_type << 32 | (int64_t)c->request.device << 40;
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
    c->request.threads = body->atomics ? fr_cpu_threads() : 0;
    key[n++] = fr_cpu_form(c->grid, c->grid + 3) | (int64_t)c->request.threads << 4;
  } else {
    for (int i = 0; i < 6; i++) key[n++] = c->grid[i];
    key[n++] = c->request.aligned;
  }
  return n;
}

static inline uint64_t fr_hash(const int64_t* key, int n) {
  uint64_t h = (uint64_t)n;
  for (int i = 0; i < n; i++) {
    h = (h ^ (uint64_t)key[i]) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 29;
  }
  return h;
}

static inline fr_table_entry* fr_look_up(fr_op* op, const int64_t* key, int n, uint64_t* bucket) {
  *bucket = fr_hash(key, n) % BUCKETS;
  fr_table_entry* e = __atomic_load_n(&op->bucket[*bucket], __ATOMIC_ACQUIRE);
  for (; e; e = e->next)
    if (e->words == n && !memcmp(e->key, key, sizeof *key * (size_t)n)) return e;
  return NULL;
}

/* The entry for a key: Python makes it the first time. NULL where it says what is wrong. */
static inline fr_table_entry* fr_entry_for(fr_call* c, int b, const fr_rule_result* found) {
  int64_t key[MAX_KEY];
  uint64_t bucket;
  int n = fr_make_key(c, b, found, key);
  if (__atomic_load_n(&fr_shared.bypassing, __ATOMIC_RELAXED)) return fr_shared.resolve(&c->request);
  fr_table_entry* e = fr_look_up(c->op, key, n, &bucket);
  if (e) return e;
  e = fr_shared.resolve(&c->request);
  if (!e || c->op->entries >= MOST_ENTRIES) return e; /* then Python is asked each time */
  pthread_mutex_lock(&fr_shared.lock);
  if (e->words == 0) {
    memcpy(e->key, key, sizeof *key * (size_t)n);
    e->words = n;
    e->next = c->op->bucket[bucket];
    c->op->entries++;
    __atomic_store_n(&c->op->bucket[bucket], e, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&fr_shared.lock);
  return e;
}

/* An input's shape and strides as a body sees them: one that is absent has sizes of 1, and so has one
 * that is declared with *S and has no dims. The same as in `_facts` of ferrule/operators/launch.py. */
static inline int32_t fr_seen(const fr_call* c, int i, int32_t* shape, int64_t* strides) {
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
static inline void fr_buffers(fr_call* c, const fr_body* body, void* const* outputs, void** buffers) {
  int n = 0;
  for (int i = 0; i < c->op->inputs; i++)
    if (!c->op->input[i].mutable_) buffers[n++] = c->pointer[i];
  for (int i = 0; i < body->dims; i++) buffers[n++] = &c->dim[i];
  for (int i = 0; i < c->op->outputs; i++) buffers[n++] = outputs[i];
  for (int i = 0; i < c->op->inputs; i++)
    if (c->op->input[i].mutable_) buffers[n++] = c->pointer[i];
}

/* A kernel on the CPU, ready to run, and all that it reads but the arrays. */
typedef struct {
  void* buffers[FR_MAX_BUFFERS];
  int32_t shape[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  int64_t stride[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  const int* shapes[FR_MAX_INPUTS];
  const int64_t* strides[FR_MAX_INPUTS];
  int ndims[FR_MAX_INPUTS];
  fr_cpu_launch launch;
  uint64_t units;
  fr_run_function run;
  fr_entry entry;
  int limit;
} fr_cpu_job;

static inline void fr_prepare_cpu(fr_call* c, const fr_table_entry* e, const fr_body* body,
                                  void* const* outputs, fr_cpu_job* job) {
  fr_cpu_launch* l = &job->launch;
  l->buffers = job->buffers;
  l->shapes = job->shapes;
  l->strides = job->strides;
  l->ndims = job->ndims;
  l->block = (uint32_t)e->block;
  job->run = (fr_run_function)e->run;
  job->entry = e->entry;
  job->limit = e->limit;
  fr_buffers(c, body, outputs, job->buffers);
  if (e->described) {
    int n = 0;
    for (int i = 0; i < c->op->inputs; i++) {
      if (c->op->input[i].mutable_) continue;
      job->ndims[n] = fr_seen(c, i, job->shape[i], job->stride[i]);
      job->shapes[n] = job->shape[i];
      job->strides[n++] = job->stride[i];
    }
  }
  job->units = fr_cpu_units(l, c->grid, c->grid + 3, e->over_grid);
}

/* What a kernel on a GPU is given, and all of it but the arrays. */
typedef struct {
  void* arguments[FR_MAX_PARAMETERS];
  void* buffers[FR_MAX_BUFFERS];
  fr_extent extents[FR_MAX_BUFFERS];
  struct {
    int32_t shape[FR_MAX_NDIM];
    int64_t strides[FR_MAX_NDIM];
  } of[FR_MAX_ARGUMENTS];
} fr_gpu_job;

/* Which elements buffer `i` of a kernel has, given the places of its inputs among the op's. */
static inline fr_extent fr_extent_at(const fr_call* c, const fr_body* body, const fr_rule_result* found,
                                     void* const* buffers, const int* place, int first_output, int i) {
  const fr_rule_input* in;
  const int64_t* strides = NULL;
  if (i < first_output) {
    in = &c->input[place[i]];
    if (!body->contiguous && in->present) strides = c->strides[place[i]];
  } else if (i - first_output < c->op->outputs) {
    const fr_rule_output* out = &found->outputs[i - first_output];
    return fr_extent_of(buffers[i], out->ndim, out->sizes, NULL);
  } else { /* written in place */
    int which = i - first_output - c->op->outputs, k = 0;
    while (!c->op->input[k].mutable_ || which--) k++;
    in = &c->input[k];
  }
  return fr_extent_of(buffers[i], in->present ? in->ndim : 0, in->sizes, strides);
}

static inline void fr_prepare_gpu(fr_call* c, fr_table_entry* e, const fr_body* body,
                                  const fr_rule_result* found, void* const* outputs, fr_gpu_job* job) {
  fr_buffers(c, body, outputs, job->buffers);
  int place[FR_MAX_ARGUMENTS], m = 0; /* of the kernel's inputs among the op's */
  for (int i = 0; i < c->op->inputs; i++)
    if (!c->op->input[i].mutable_) place[m++] = i;
  int first_output = m + body->dims;
  for (int p = 0; p < e->parameters; p++) {
    int kind = e->parameter[2 * p], i = e->parameter[2 * p + 1];
    switch (kind) {
      case FR_PASS_INPUT: job->arguments[p] = &job->buffers[i]; break;
      case FR_PASS_VALUE: job->arguments[p] = job->buffers[i]; break;
      case FR_PASS_OUTPUT: job->arguments[p] = &job->buffers[first_output + i]; break;
      case FR_PASS_LAUNCH: job->arguments[p] = e->sizes; break;
      case FR_PASS_EXTENT:
        job->extents[i] = fr_extent_at(c, body, found, job->buffers, place, first_output, i);
        job->arguments[p] = &job->extents[i];
        break;
      default:
        fr_seen(c, place[i], job->of[i].shape, job->of[i].strides);
        job->arguments[p] = kind == FR_PASS_SHAPE ? (void*)job->of[i].shape : (void*)job->of[i].strides;
    }
  }
}

#endif
