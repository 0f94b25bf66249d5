/* Ops of a package of AOTInductor: what torch calls, without Python.
 *
 * ferrule/operators/package.py writes a text for each package, which includes runtime.c, defines what is
 * known of dtypes, includes this file, and has tables: the ops in the graph, their rules as bytecode
 * (runtime/rule.h), what launches are worked out from, and the machine code of their kernels.
 * Loading the library defines the ops with torch's dispatcher. A call does what `TorchOp.run` does in
 * Python: it binds the rule, allocates outputs, chooses the machine code, and launches. Nothing of a
 * call is kept but what was loaded.
 *
 * Valid as C11 and as C++17. Needs -fexceptions, since torch's errors are thrown through it.
 */
#ifndef FERRULE_PACKAGED_OPS_H
#define FERRULE_PACKAGED_OPS_H

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>

#include "arrays.h"
#include "cpu_launch.h"
#include "rule.h"
#include "tables.h"
#include "torch_abi.h"

/* -------------------------------------------------------------------------------------- calls */

enum {
  FR_MOST_ERROR = 1500,
  FR_CUDA_RANK = 10, /* spec.py has it */
  FR_MOST_READ = FR_MAX_ARGUMENTS + FR_MAX_SYMBOLS,
  FR_MOST_PASSED = FR_MOST_READ + FR_MAX_ARGUMENTS
};

typedef struct {
  const fr_op* op;
  TH arrays[FR_MAX_ARGUMENTS]; /* as given, ours to delete; NULL: absent, or a number */
  TH used[FR_MAX_ARGUMENTS];   /* as the kernel gets them: the same, or a contiguous copy */
  TH outputs[FR_MAX_ARGUMENTS];
  void* pointers[FR_MAX_ARGUMENTS]; /* of `used`, then of outputs */
  const int64_t* strides[FR_MAX_ARGUMENTS];
  int64_t own_strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM]; /* of copies */
  uint64_t numbers[FR_MAX_ARGUMENTS]; /* the bytes of those that are numbers */
  fr_rule_input inputs[FR_MAX_ARGUMENTS];
  fr_rule_result made;
  int32_t dims[FR_MOST_READ]; /* of those that a kernel reads */
  int32_t device;             /* its number */
  TH scratch;                 /* what the steps of a CUDA unit share */
  char error[FR_MOST_ERROR];
} fr_call;

/* Writes an error, of which the first stays. Returns false. */
static bool fr_fail(fr_call* c, const char* format, ...) {
  if (c->error[0]) return false;
  int n = snprintf(c->error, FR_MOST_ERROR, "[op] op '%s': ", c->op->label);
  va_list more;
  va_start(more, format);
  vsnprintf(c->error + n, (size_t)(FR_MOST_ERROR - n), format, more);
  va_end(more);
  return false;
}

/* "x float32 (2, 3), w float32 (3,)", into `text`. */
static const char* fr_shown(const fr_call* c, char* text, size_t room) {
  size_t n = 0;
  text[0] = 0;
#define FR_PUT(...)                                                            \
  do {                                                                         \
    int put = snprintf(text + n, room - n, __VA_ARGS__);                       \
    if (put < 0 || (size_t)put >= room - n) return text;                       \
    n += (size_t)put;                                                          \
  } while (0)
  for (int i = 0; i < c->op->reads; i++) {
    const fr_rule_input* input = &c->inputs[i];
    if (c->op->inputs[i].kind != FR_ARRAY) continue;
    FR_PUT("%s%s ", n ? ", " : "", c->op->inputs[i].name);
    if (!input->present) {
      FR_PUT("None");
      continue;
    }
    FR_PUT("%s (", input->dtype < 0 ? "of another dtype" : fr_dtype_names[input->dtype]);
    for (int k = 0; k < input->ndim; k++)
      FR_PUT("%s%lld", k ? ", " : "", (long long)input->sizes[k]);
    FR_PUT("%s)", input->ndim == 1 ? "," : "");
  }
#undef FR_PUT
  return text;
}

static TH fr_new(fr_call* c, int32_t ndim, const int64_t* sizes, int32_t dtype) {
  int64_t strides[FR_MAX_NDIM];
  TH made = NULL;
  fr_row_strides(ndim, sizes, strides);
  int32_t kind = c->op->cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  if (aoti_torch_empty_strided(ndim, sizes, strides, fr_dtype_codes[dtype](), kind, c->device,
                               &made))
    fr_fail(c, "torch could not allocate memory.");
  return made;
}

/* Takes the arguments off torch's stack. All that is taken is ours, also after an error. */
static void fr_take(fr_call* c, SIV* stack) {
  for (int i = 0; i < c->op->reads; i++) {
    SIV word = stack[i];
    if (c->op->inputs[i].kind == FR_ARRAY) {
      if (c->op->inputs[i].optional) { /* NULL, or the address of a word that has the tensor */
        SIV* boxed = (SIV*)(uintptr_t)word;
        word = 0;
        if (boxed) {
          word = *boxed;
          _ZdlPv(boxed); /* C++'s operator delete: torch made it with `new` */
        }
      }
      c->arrays[i] = (TH)(uintptr_t)word;
    } else {
      c->numbers[i] = word;
    }
  }
}

/* What the rule asks of an input. */
static bool fr_look(fr_call* c, int i) {
  const fr_argument* argument = &c->op->inputs[i];
  fr_rule_input* input = &c->inputs[i];
  input->dtype = FR_NO_DTYPE;
  input->present = true;
  if (argument->kind != FR_ARRAY) return true;
  TH array = c->arrays[i];
  if (!array) {
    input->present = false;
    return true;
  }
  int64_t *sizes, *strides, ndim;
  int32_t code, kind, device;
  if (aoti_torch_get_dim(array, &ndim) || aoti_torch_get_sizes(array, &sizes) ||
      aoti_torch_get_strides(array, &strides) || aoti_torch_get_dtype(array, &code) ||
      aoti_torch_get_device_type(array, &kind) || aoti_torch_get_device_index(array, &device) ||
      aoti_torch_get_data_ptr(array, &c->pointers[i]))
    return fr_fail(c, "torch does not say what input '%s' is.", argument->name);
  if (kind != (c->op->cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu()) ||
      (c->op->cuda && c->device >= 0 && device != c->device))
    return fr_fail(c, "input '%s' is on another device than the package was made for, or than "
                   "another input.", argument->name);
  c->device = device;
  if (ndim > FR_MAX_NDIM)
    return fr_fail(c, "input '%s' has %lld dims; at most %d are known.", argument->name,
                   (long long)ndim, FR_MAX_NDIM);
  input->ndim = (int32_t)ndim;
  input->sizes = sizes; /* live as long as the tensor, as strides do */
  c->strides[i] = strides;
  for (int k = 0; k < FR_DTYPES; k++)
    if (fr_dtype_codes[k] && fr_dtype_codes[k]() == code) input->dtype = k;
  return true;
}

/* Finds inputs that share memory with one that is written in place (`shared`, a bit each). */
static bool fr_apart(fr_call* c, uint64_t* shared) {
  const fr_op* op = c->op;
  fr_given given = {op->reads, c->inputs, c->pointers, c->strides, 0, 0};
  int32_t wrong[2];
  for (int i = 0; i < op->reads; i++) {
    given.arrays |= (uint64_t)(c->arrays[i] != NULL) << i;
    given.written |= (uint64_t)op->inputs[i].in_place << i;
  }
  if (fr_keep_apart(&given, shared, wrong)) return true;
  if (wrong[0] == wrong[1])
    return fr_fail(c, "input '%s' is written in place, but has many elements in one place, as an "
                   "expanded array has; give a copy.", op->inputs[wrong[0]].name);
  return fr_fail(c, "input '%s' shares memory with input '%s', and both are written in place; give "
                 "a copy.", op->inputs[wrong[1]].name, op->inputs[wrong[0]].name);
}

/* Copies an input that the kernels want row by row and is not, or that shares memory with another
 * that is written. */
static bool fr_contiguous(fr_call* c, int i, bool shared) {
  const fr_argument* argument = &c->op->inputs[i];
  const fr_rule_input* input = &c->inputs[i];
  TH array = c->arrays[i];
  if (!array) return true;
  c->used[i] = array;
  bool wanted = c->op->contiguous || argument->in_place;
  if (!shared && (!wanted || fr_row_contiguous(input->ndim, input->sizes, c->strides[i])))
    return true;
  c->used[i] = fr_new(c, input->ndim, input->sizes, input->dtype);
  if (!c->used[i]) return false;
  fr_row_strides(input->ndim, input->sizes, c->own_strides[i]);
  c->strides[i] = c->own_strides[i];
  if (aoti_torch_copy_(c->used[i], array, 0))
    return fr_fail(c, "input '%s' could not be copied to contiguous memory.", argument->name);
  return !aoti_torch_get_data_ptr(c->used[i], &c->pointers[i]) ||
         fr_fail(c, "input '%s' has no memory.", argument->name);
}

/* A Python number, as the bytes that the kernel reads. */
static bool fr_number(fr_call* c, int i) {
  const fr_argument* argument = &c->op->inputs[i];
  SIV word = c->numbers[i];
  uint64_t bytes = 0;
  if (argument->kind == FR_ARRAY) return true;
  if (argument->kind == FR_FLOAT_NUMBER) {
    double value;
    memcpy(&value, &word, 8);
    if (!fr_float_bytes(argument->dtype, value, &bytes))
      return fr_fail(c, "input '%s' is %g, which does not fit into %s.", argument->name, value,
                     fr_dtype_names[argument->dtype]);
  } else {
    int64_t value = argument->kind == FR_BOOL_NUMBER ? (int64_t)(word & 0xff) : (int64_t)word;
    if (!fr_integer_bytes(argument->dtype, value, &bytes))
      return fr_fail(c, "input '%s' is %lld, which does not fit into %s.", argument->name,
                     (long long)value, fr_dtype_names[argument->dtype]);
  }
  c->numbers[i] = bytes;
  c->pointers[i] = &c->numbers[i];
  return true;
}

/* What the rule says, and its outputs, allocated. */
static bool fr_bind(fr_call* c) {
  const fr_op* op = c->op;
  char text[600];
  int status = fr_rule_bind(op->rule, c->inputs, &c->made);
  if (status)
    return fr_fail(c, "the inputs %s %s its rule, %s.", fr_shown(c, text, sizeof text),
                   status == FR_RULE_MISMATCH ? "contradict" : "cannot be worked out by",
                   op->declared);
  for (int i = 0; i < op->makes; i++) {
    const fr_rule_output* output = &c->made.outputs[i];
    c->outputs[i] = fr_new(c, output->ndim, output->sizes, output->dtype);
    if (!c->outputs[i]) return false;
    if (aoti_torch_get_data_ptr(c->outputs[i], &c->pointers[op->reads + i]))
      return fr_fail(c, "output '%s' has no memory.", op->output_names[i]);
  }
  return true;
}

/* A value of the launch; false after an error. Only those that are needed are worked out, since
 * others may divide by zero. */
static bool fr_value(fr_call* c, int which, int64_t* value) {
  char text[600];
  int status = fr_rule_value(c->op->rule, which, &c->made, value);
  return !status || fr_fail(c, "an expression of its launch divides by zero or overflows for %s.",
                            fr_shown(c, text, sizeof text));
}

/* The body for these sizes, and the machine code for these dtypes and template values. */
static bool fr_choose(fr_call* c, fr_body** body, fr_special** special) {
  const fr_op* op = c->op;
  char text[600];
  for (int b = 0; b < op->count; b++) {
    int64_t holds = 1;
    *body = &op->bodies[b];
    if ((*body)->when >= 0 && !fr_value(c, (*body)->when, &holds)) return false;
    if (holds) break;
    if (b + 1 == op->count)
      return fr_fail(c, "nothing carries it out for %s.", fr_shown(c, text, sizeof text));
  }
  int64_t templates[FR_MAX_SYMBOLS];
  for (int t = 0; t < (*body)->parameters; t++)
    if (!fr_value(c, (*body)->templates[t].value, &templates[t])) return false;
  int wrong = -1; /* a template parameter, where all else fits */
  int64_t known = 0;
  for (int s = 0; s < (*body)->count; s++) {
    *special = &(*body)->specials[s];
    bool same = true;
    for (int i = 0; i < op->reads && same; i++) {
      const fr_rule_input* input = &c->inputs[i];
      int dtype = input->present ? input->dtype : -1;
      same = op->inputs[i].kind != FR_ARRAY ||
             (dtype == (*special)->dtypes[i] && (dtype < 0 || input->ndim == (*special)->ndims[i]));
    }
    if (!same) continue;
    int t = 0;
    while (t < (*body)->parameters && templates[t] == (*special)->templates[t]) t++;
    if (t == (*body)->parameters) return true;
    wrong = t;
    known = (*special)->templates[t];
  }
  if (wrong >= 0)
    return fr_fail(c, "its template parameter '%s' is %s, which is %lld for %s; the package has "
                   "machine code for %lld alone. Sizes that a template depends on are those of the "
                   "export.", (*body)->templates[wrong].name, (*body)->templates[wrong].text,
                   (long long)templates[wrong], fr_shown(c, text, sizeof text), (long long)known);
  return fr_fail(c, "the package has no machine code for %s; it has what its graph needed when it "
                 "was made.", fr_shown(c, text, sizeof text));
}

/* A launch, with what its sizes say. */
typedef struct {
  uint32_t grid[3], threadgroup[3], groups[3];
  uint32_t facts;
} fr_sent;

static bool fr_sizes(fr_call* c, const fr_body* body, fr_sent* sent) {
  int64_t threads = 1;
  char text[600];
  for (int axis = 0; axis < 6; axis++) {
    bool group = axis >= 3;
    int64_t value;
    if (!fr_value(c, group ? body->threadgroup[axis - 3] : body->grid[axis], &value)) return false;
    if (group && value == 0 && !(sent->grid[0] && sent->grid[1] && sent->grid[2]))
      value = 1; /* no thread runs: min(N, 256) of an empty array */
    if (value < group || value > INT32_MAX)
      return fr_fail(c, "`%s`: %s is %lld for %s; expected %d to 2147483647.",
                     group ? "threadgroup" : "grid", body->texts[axis], (long long)value,
                     fr_shown(c, text, sizeof text), group);
    if (group) threads = value > 1024 ? 1025 : threads * value;
    *(group ? &sent->threadgroup[axis - 3] : &sent->grid[axis]) = (uint32_t)value;
  }
  if (threads > 1024)
    return fr_fail(c, "`threadgroup` is (%u, %u, %u) for %s; expected 1024 threads at most.",
                   sent->threadgroup[0], sent->threadgroup[1], sent->threadgroup[2],
                   fr_shown(c, text, sizeof text));
  bool even = true;
  uint32_t edge[3];
  for (int axis = 0; axis < 3; axis++) {
    uint32_t *n = &sent->threadgroup[axis], all = sent->grid[axis];
    if (*n > all) *n = all;
    sent->groups[axis] = *n ? (all + *n - 1) / *n : 0; /* both fit into 31 bits */
    edge[axis] = *n && all % *n ? all % *n : *n;
    even = even && edge[axis] == *n;
  }
  const uint32_t* t = sent->threadgroup;
  bool full = true;
  for (int corner = 0; corner < 8; corner++)
    full = full && (corner & 1 ? edge[0] : t[0]) * (corner & 2 ? edge[1] : t[1]) *
                       (corner & 4 ? edge[2] : t[2]) % 32 == 0;
  sent->facts =
      fr_cpu_form(sent->grid, t) | (t[1] == 1 && t[2] == 1 ? FR_ONE_ROW : 0) |
      (even ? FR_EVEN : 0) | (full ? FR_FULL : 0) |
      (t[0] % 32 == 0 && edge[0] % 32 == 0 ? FR_LANES_IN_X : 0) |
      (sent->groups[1] <= 65535 && sent->groups[2] <= 65535 ? FR_NEAR : 0) |
      (t[2] <= 64 ? FR_SHALLOW : 0);
  return true;
}

/* What a kernel reads and writes, in its order. */
typedef struct {
  void* pointer;
  const int64_t *sizes, *strides;
  int32_t ndim;
} fr_array;

static const int64_t fr_ones[FR_MAX_NDIM] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static bool fr_reads(fr_call* c, const fr_body* body, const fr_special* special, fr_array* arrays) {
  for (int i = 0; i < body->reads; i++) {
    fr_source source = body->inputs[i];
    fr_array* array = &arrays[i];
    memset(array, 0, sizeof *array);
    if (source.from == FR_FROM_VALUE) {
      int64_t size;
      if (!fr_value(c, source.index, &size)) return false;
      if (size > INT32_MAX)
        return fr_fail(c, "its body reads a dim of %lld as an int32.", (long long)size);
      c->dims[i] = (int32_t)size;
      array->pointer = &c->dims[i];
      continue;
    }
    const fr_rule_input* input = &c->inputs[source.index];
    array->pointer = c->pointers[source.index];
    bool one = c->op->inputs[source.index].indexed && input->present && !input->ndim;
    bool known = input->present && !one;
    array->sizes = known ? input->sizes : fr_ones;
    array->strides = known ? c->strides[source.index] : fr_ones;
    array->ndim = one ? 1 : known ? input->ndim : special->ndims[source.index];
    if (source.described && body->in_cuda && array->ndim > FR_CUDA_RANK)
      return fr_fail(c, "its body asks for the shape of input '%s', which has %d dims; a body in "
                     "CUDA knows of %d.", c->op->inputs[source.index].name, (int)array->ndim,
                     FR_CUDA_RANK);
    for (int k = 0; source.described && k < array->ndim; k++)
      if (array->sizes[k] > INT32_MAX)
        return fr_fail(c, "its body asks for the shape of input '%s', of which a size is %lld; it "
                       "is an int32.", c->op->inputs[source.index].name, (long long)array->sizes[k]);
  }
  int n = body->reads; /* what is written lies row by row */
  for (int i = 0; i < c->op->makes; i++) {
    const fr_rule_output* output = &c->made.outputs[i];
    arrays[n++] = (fr_array){c->pointers[c->op->reads + i], output->sizes, NULL, output->ndim};
  }
  for (int i = 0; i < c->op->reads; i++)
    if (c->op->inputs[i].in_place)
      arrays[n++] = (fr_array){c->pointers[i], c->inputs[i].sizes, NULL, c->inputs[i].present ? c->inputs[i].ndim : 0};
  return true;
}

/* The bytes of an element that output i is filled with; NULL after an error. */
static const char* fr_fill(fr_call* c, const fr_body* body, const fr_special* special, int i,
                           uint64_t* room) {
  if (body->fill < 0) return special->fills[i];
  int64_t value;
  int dtype = c->made.outputs[i].dtype;
  if (!fr_value(c, body->fill, &value)) return NULL;
  if (fr_integer_bytes(dtype, value, room)) return (const char*)room;
  fr_fail(c, "`init_value` is %lld, which does not fit into output '%s' of %s.", (long long)value,
          c->op->output_names[i], fr_dtype_names[dtype]);
  return NULL;
}

/* ---------------------------------------------------------------------------------------- CPU */

static pthread_mutex_t fr_loading = PTHREAD_MUTEX_INITIALIZER;

/* A library of bytes: from memory, else from a private file whose name is gone at once. */
static void* fr_open(const fr_code* code) {
  char path[320];
  int file = -1;
  void* library = NULL;
#if defined(__linux__)
  file = memfd_create("ferrule", 1 /* MFD_CLOEXEC */);
  if (file >= 0) {
    /* The loader takes a path that anybody in the process has used for what was loaded then, and
     * numbers of descriptors come again. So what nobody else has is spelled in the path, a one as
     * "/." and a zero as "/": this code's address, and the time, for addresses may come again. */
    int n = snprintf(path, sizeof path, "/proc/self/fd");
    uint64_t own[] = {(uint64_t)(uintptr_t)code, (uint64_t)nanoseconds()};
    for (int i = 0; i < 128; i++)
      n += snprintf(path + n, sizeof path - (size_t)n, own[i / 64] >> i % 64 & 1 ? "/." : "/");
    snprintf(path + n, sizeof path - (size_t)n, "/%d", file);
  }
#endif
  bool named = file < 0;
  if (named) {
    const char* folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.90s/ferrule-XXXXXX", folder && *folder ? folder : "/tmp");
    file = mkstemp(path);
    if (file < 0) return NULL;
  }
  size_t done = 0;
  while (done < code->size) {
    ssize_t n = write(file, code->bytes + done, code->size - done);
    if (n <= 0) break;
    done += (size_t)n;
  }
  if (done == code->size) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (named) unlink(path);
  close(file);
  return library;
}

static bool fr_load(fr_call* c, fr_code* code) {
  if (__atomic_load_n(&code->entry, __ATOMIC_ACQUIRE)) return true;
  pthread_mutex_lock(&fr_loading);
  void* library = code->entry ? NULL : fr_open(code);
  const char* units = library ? (const char*)dlsym(library, "fr_units") : NULL;
  const char* alone = library ? (const char*)dlsym(library, "fr_alone") : NULL;
  fr_entry entry = library ? (fr_entry)dlsym(library, "fr_entry") : NULL;
  if (units && alone && entry) {
    code->over_grid = strcmp(units, "grid") == 0;
    code->alone = *alone == '1';
    __atomic_store_n(&code->entry, entry, __ATOMIC_RELEASE);
  }
  bool loaded = code->entry != NULL;
  pthread_mutex_unlock(&fr_loading);
  if (loaded) return true;
  const char* why = dlerror();
  return fr_fail(c, "its machine code cannot be loaded: %s.", why ? why : "no memory or file for it");
}

static bool fr_on_cpu(fr_call* c, const fr_body* body, fr_special* special, const fr_sent* sent) {
  enum { BLOCK = 8192 /* devices/cpu/program.py has it */ };
  fr_code* code = special->codes;
  while (code->needs & ~sent->facts) code++; /* the last one needs nothing */
  fr_array arrays[FR_MOST_PASSED];
  if (!fr_load(c, code) || !fr_reads(c, body, special, arrays)) return false;
  void* buffers[FR_MOST_PASSED];
  int32_t sizes[FR_MAX_ARGUMENTS][FR_MAX_NDIM], ndims[FR_MOST_PASSED];
  const int32_t* shapes[FR_MOST_PASSED];
  const int64_t* strides[FR_MOST_PASSED];
  int n = body->reads, written = c->op->makes;
  for (int i = 0; i < c->op->reads; i++) written += c->op->inputs[i].in_place;
  for (int i = 0; i < n + written; i++) buffers[i] = arrays[i].pointer;
  for (int i = 0; i < n; i++) {
    ndims[i] = arrays[i].ndim;
    shapes[i] = NULL;
    strides[i] = arrays[i].strides;
    if (!body->inputs[i].described) continue;
    shapes[i] = sizes[body->inputs[i].index];
    for (int k = 0; k < ndims[i]; k++)
      sizes[body->inputs[i].index][k] = (int32_t)arrays[i].sizes[k];
  }
  fr_cpu_launch launch;
  launch.buffers = buffers;
  launch.shapes = shapes;
  launch.strides = strides;
  launch.ndims = ndims;
  launch.block = BLOCK;
  uint64_t units = fr_cpu_units(&launch, sent->grid, sent->threadgroup, code->over_grid);
  int status = fr_run(code->entry, &launch, units, code->alone ? 1 : 0);
  if (!status) return true;
  return fr_fail(c, status == FR_E_FAULT      ? "its kernel accessed memory outside its arrays."
                    : status == FR_E_DIVISION ? "its kernel divided an integer by zero."
                    : status == FR_E_MEMORY   ? "there is no memory for its kernel's stacks."
                                              : "its kernel failed.");
}

static bool fr_fill_on_cpu(fr_call* c, const fr_body* body, const fr_special* special) {
  for (int i = 0; i < c->op->makes; i++) {
    const fr_rule_output* output = &c->made.outputs[i];
    size_t size = fr_item_bytes[output->dtype];
    uint64_t room = 0;
    const char* element = fr_fill(c, body, special, i, &room);
    if (!element) return false;
    char* at = (char*)c->pointers[c->op->reads + i];
    int64_t count = fr_count(output->ndim, output->sizes);
    for (int64_t k = 0; k < count; k++, at += size) memcpy(at, element, size);
  }
  return true;
}

#include "cuda_ops.h"
#include "cuda_steps.h"

/* ------------------------------------------------------------------------------ the whole call */

/* Fills outputs and starts a body. */
static bool fr_run_body(fr_call* c, const fr_body* body, fr_special* special) {
  const fr_op* op = c->op;
  fr_sent sent;
  if (!fr_sizes(c, body, &sent)) return false;
  if (body->filled &&
      !(op->cuda ? fr_fill_on_cuda(c, body, special) : fr_fill_on_cpu(c, body, special)))
    return false;
  if (sent.grid[0] && sent.grid[1] && sent.grid[2])
    return op->cuda ? fr_on_cuda(c, body, special, &sent) : fr_on_cpu(c, body, special, &sent);
  for (int i = 0; i < op->makes && !body->filled; i++)
    if (fr_count(c->made.outputs[i].ndim, c->made.outputs[i].sizes))
      return fr_fail(c, "`grid` is (%u, %u, %u), which runs no thread, but output '%s' is not "
                     "empty; the op has no `init_value`.", sent.grid[0], sent.grid[1],
                     sent.grid[2], op->output_names[i]);
  return true;
}

static bool fr_carry_out(fr_call* c) {
  const fr_op* op = c->op;
  fr_body* body = NULL;
  fr_special* special = NULL;
  uint64_t shared;
  c->device = -1;
  for (int i = 0; i < op->reads; i++)
    if (!fr_look(c, i) || !fr_number(c, i)) return false;
  if (!fr_bind(c) || !fr_choose(c, &body, &special) || !fr_apart(c, &shared)) return false;
  for (int i = 0; i < op->reads; i++)
    if (!fr_contiguous(c, i, shared >> i & 1)) return false;
  if (!(body->unit ? fr_run_unit(c, body->unit, special) : fr_run_body(c, body, special)))
    return false;
  for (int i = 0; i < op->reads; i++)
    if (op->inputs[i].in_place && c->used[i] != c->arrays[i] &&
        aoti_torch_copy_(c->arrays[i], c->used[i], 0))
      return fr_fail(c, "what was written to input '%s' could not be copied back.",
                     op->inputs[i].name);
  return true;
}

/* What torch calls: arguments on the stack are replaced by outputs. */
static void fr_boxed(const fr_op* op, SIV* stack) {
  fr_call c; /* 15 KB, of which little is written */
  c.op = op;
  c.error[0] = 0;
  memset(c.arrays, 0, sizeof c.arrays);
  memset(c.used, 0, sizeof c.used);
  memset(c.outputs, 0, sizeof c.outputs);
  memset(c.pointers, 0, sizeof c.pointers);
  memset(c.inputs, 0, sizeof c.inputs);
  fr_take(&c, stack);
  c.scratch = NULL;
  bool done = fr_carry_out(&c);
  /* Copies and scratch may be in use by a GPU; torch's allocator gives their memory to later work on
   * the same stream alone. */
  if (c.scratch) aoti_torch_delete_tensor_object(c.scratch);
  for (int i = 0; i < op->reads; i++) {
    if (c.used[i] && c.used[i] != c.arrays[i]) aoti_torch_delete_tensor_object(c.used[i]);
    if (c.arrays[i]) aoti_torch_delete_tensor_object(c.arrays[i]);
  }
  if (!done) {
    for (int i = 0; i < op->makes; i++)
      if (c.outputs[i]) aoti_torch_delete_tensor_object(c.outputs[i]);
    aoti_torch_check(false, op->name, "ferrule", 0, c.error); /* throws */
  }
  for (int i = 0; i < op->makes; i++) stack[i] = (SIV)(uintptr_t)c.outputs[i];
}

/* Defines an op, unless a library of the same content has done so: names carry its digest. */
static void fr_define(LH fragment, const fr_op* op, void (*call)(SIV*, uint64_t, uint64_t)) {
  LH implementation = NULL;
  if (aoti_torch_library_def(fragment, op->schema)) return;
  const char* key = op->cuda ? "CUDA" : "CPU";
  if (aoti_torch_library_init_impl("ferrule", key, "ferrule", 0, &implementation) ||
      aoti_torch_library_impl(implementation, op->name, call))
    fprintf(stderr, "ferrule: torch does not take the op %s\n", op->name);
}

#endif
