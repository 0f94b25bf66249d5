/* Ops of a package of AOTInductor: what torch calls, without Python.
 *
 * ferrule/operators/package.py writes a text for each package, which includes runtime.c, defines torch's codes
 * of dtypes, includes this file, and has tables: the ops in the graph, their rules as bytecode
 * (runtime/rule.h), what launches are worked out from, and the machine code of their kernels.
 * Loading the library defines the ops with torch's dispatcher. A call is carried out by the engine that eager calls
 * have (runtime/op_calls.h, runtime/torch_stack.h); what Python does for those is here: errors are worded, machine
 * code is chosen and loaded, and outputs are filled. Nothing of a call is kept but what was loaded.
 *
 * Valid as C11 and as C++17. Needs -fexceptions, since torch's errors are thrown through it.
 */
#ifndef FERRULE_PACKAGED_OPS_H
#define FERRULE_PACKAGED_OPS_H

#include <dlfcn.h>
#include <stdarg.h>

#include "op_calls.h"
#include "tables.h"
#include "torch_abi.h"

#define FR_ADDRESS(NAME) aoti_torch_##NAME,
static const torch_functions torch = {TORCH_FUNCTIONS(FR_ADDRESS) _ZdlPv};
#undef FR_ADDRESS

#include "torch_stack.h"

/* -------------------------------------------------------------------------------------- calls */

enum { FR_MOST_ERROR = 1500, FR_CUDA_RANK = 10 /* spec.py has it */ };

typedef struct {
  torch_call torch;
  const fr_packaged_op* op;
  fr_rule_result result;
  TH scratch; /* what the steps of a CUDA unit share */
  char error[FR_MOST_ERROR];
} fr_packaged_call;

/* Writes an error, of which the first stays. Returns false. */
static bool fr_fail(fr_packaged_call* c, const char* format, ...) {
  if (c->error[0]) return false;
  int n = snprintf(c->error, FR_MOST_ERROR, "[op] op '%s': ", c->op->label);
  va_list more;
  va_start(more, format);
  vsnprintf(c->error + n, (size_t)(FR_MOST_ERROR - n), format, more);
  va_end(more);
  return false;
}

/* "x float32 (2, 3), w float32 (3,)", into `text`. */
static const char* fr_shown(const fr_packaged_call* c, char* text, size_t room) {
  size_t n = 0;
  text[0] = 0;
#define FR_PUT(...)                                                            \
  do {                                                                         \
    int put = snprintf(text + n, room - n, __VA_ARGS__);                       \
    if (put < 0 || (size_t)put >= room - n) return text;                       \
    n += (size_t)put;                                                          \
  } while (0)
  for (int i = 0; i < c->torch.of.op->inputs; i++) {
    const fr_rule_input* input = &c->torch.of.input[i];
    if (c->torch.of.op->input[i].kind != INPUT_ARRAY) continue;
    FR_PUT("%s%s ", n ? ", " : "", c->op->input_names[i]);
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

/* Words what is wrong with an input; true where the rule will see it. */
static bool fr_refuse_input(fr_packaged_call* c, int i, int wrong) {
  const fr_call* call = &c->torch.of;
  const char *name = c->op->input_names[i], *dtype = fr_dtype_names[call->op->input[i].dtype];
  switch (wrong) {
    case TORCH_MISFIT:
      if (call->op->input[i].kind == INPUT_FLOAT)
        return fr_fail(c, "input '%s' is %g, which does not fit into %s.", name, call->number[i], dtype);
      return fr_fail(c, "input '%s' is %lld, which does not fit into %s.", name, (long long)call->integer[i], dtype);
    case TORCH_SILENT: return fr_fail(c, "torch does not say what input '%s' is.", name);
    case TORCH_ELSEWHERE:
      return fr_fail(c, "input '%s' is on another device than the package was made for, or than another input.", name);
    case TORCH_DEEP:
      return fr_fail(c, "input '%s' has %d dims; at most %d are known.", name, (int)call->input[i].ndim, FR_MAX_NDIM);
    default: return true;
  }
}

/* Reads the inputs. */
static bool fr_read_inputs(fr_packaged_call* c, const SIV* stack) {
  torch_call* t = &c->torch;
  int32_t type = c->op->cuda ? torch_cuda_type : aoti_torch_device_type_cpu();
  t->type = type;
  for (int i = 0; i < t->of.op->inputs; i++) {
    int wrong = torch_read(t, i, stack[i]);
    if (!wrong && t->type != type) wrong = TORCH_ELSEWHERE;
    if (wrong && !fr_refuse_input(c, i, wrong)) return false;
  }
  t->of.request.device_type = c->op->cuda ? CUDA : CPU;
  t->of.request.device = t->index;
  return true;
}

/* What the rule says, and its outputs, allocated. */
static bool fr_bind(fr_packaged_call* c) {
  torch_call* t = &c->torch;
  char text[600];
  int status = fr_rule_bind(t->of.op->program, t->of.input, &c->result);
  if (status)
    return fr_fail(c, "the inputs %s %s its rule, %s.", fr_shown(c, text, sizeof text),
                   status == FR_RULE_MISMATCH ? "contradict" : "cannot be worked out by",
                   c->op->declared);
  for (int i = 0; i < t->of.op->outputs; i++) {
    if (torch_make_output(t, i, &c->result.outputs[i])) continue;
    return t->output[i] ? fr_fail(c, "output '%s' has no memory.", t->of.op->output_name[i])
                      : fr_fail(c, "torch could not allocate memory.");
  }
  return true;
}

/* A value of the launch; false after an error. Only those that are needed are worked out, since
 * others may divide by zero. */
static bool fr_value(fr_packaged_call* c, int which, int64_t* value) {
  char text[600];
  int status = fr_rule_value(c->torch.of.op->program, which, &c->result, value);
  return !status || fr_fail(c, "an expression of its launch divides by zero or overflows for %s.",
                            fr_shown(c, text, sizeof text));
}

/* The body for these sizes; -1 after an error. */
static int fr_choose_body(fr_packaged_call* c) {
  const fr_op* op = c->torch.of.op;
  char text[600];
  fr_shared.threads_now = fr_threads;
  int b = fr_choose(&c->torch.of, &c->result);
  if (b >= 0) return b;
  if (fr_of_device(op) && !fr_give_device(&c->torch.of, &c->result)) {
    fr_fail(c, "CUDA does not tell what GPU cuda:%d is.", (int)c->torch.of.request.device);
    return -1;
  }
  for (int k = 0; k < op->bodies; k++) {
    int64_t holds;
    if (op->body[k].when >= 0 && !fr_value(c, op->body[k].when, &holds)) return -1;
  }
  fr_fail(c, "nothing carries it out for %s.", fr_shown(c, text, sizeof text));
  return -1;
}

/* What was compiled for these dtypes and template values; NULL after an error. */
static fr_special* fr_find_special(fr_packaged_call* c, int b) {
  const fr_op* op = c->torch.of.op;
  const fr_packaged_body* packaged = &c->op->bodies[b];
  int64_t* templates = c->torch.of.template_value;
  char text[600];
  for (int t = 0; t < op->body[b].templates; t++)
    if (!fr_value(c, op->body[b].first_template + t, &templates[t])) return NULL;
  int wrong = -1; /* a template parameter, where all else fits */
  int64_t known = 0;
  for (int s = 0; s < packaged->count; s++) {
    fr_special* special = &packaged->specials[s];
    bool same = true;
    for (int i = 0; i < op->inputs && same; i++) {
      const fr_rule_input* input = &c->torch.of.input[i];
      int dtype = input->present ? input->dtype : -1;
      same = op->input[i].kind != INPUT_ARRAY ||
             (dtype == special->dtypes[i] && (dtype < 0 || input->ndim == special->ndims[i]));
    }
    if (!same) continue;
    int t = 0;
    while (t < op->body[b].templates && templates[t] == special->templates[t]) t++;
    if (t == op->body[b].templates) return special;
    wrong = t;
    known = special->templates[t];
  }
  if (wrong >= 0)
    fr_fail(c, "its template parameter '%s' is %s, which is %lld for %s; the package has machine code for %lld "
            "alone. Sizes that a template depends on are those of the export.", packaged->templates[wrong].name,
            packaged->templates[wrong].text, (long long)templates[wrong], fr_shown(c, text, sizeof text),
            (long long)known);
  else
    fr_fail(c, "the package has no machine code for %s; it has what its graph needed when it was made.",
            fr_shown(c, text, sizeof text));
  return NULL;
}

/* Copies inputs that share memory with another that is written, and those that the body wants row by row. */
static bool fr_copy_inputs(fr_packaged_call* c, const fr_body* body) {
  torch_call* t = &c->torch;
  uint64_t shared;
  int32_t wrong[2];
  if (!fr_inputs_apart(&t->of, &shared, wrong)) {
    const char *name = c->op->input_names[wrong[0]], *other = c->op->input_names[wrong[1]];
    if (wrong[0] == wrong[1])
      return fr_fail(c, "input '%s' is written in place, but has many elements in one place, as an expanded array "
                     "has; give a copy.", name);
    return fr_fail(c, "input '%s' shares memory with input '%s', and both are written in place; give a copy.",
                   other, name);
  }
  for (int i = 0; i < t->of.op->inputs; i++) {
    if (!fr_wants_copy(&t->of, body, shared, i) || torch_copy_input(t, i)) continue;
    if (!t->copy[i]) return fr_fail(c, "torch could not allocate memory.");
    return fr_fail(c, t->of.pointer[i] ? "input '%s' could not be copied to contiguous memory."
                                       : "input '%s' has no memory.", c->op->input_names[i]);
  }
  return true;
}

/* Words what is wrong with a grid or threadgroup; true where nothing is. */
static bool fr_check_sizes(fr_packaged_call* c, int b) {
  int64_t size[6], threads = 1;
  char text[600];
  for (int i = 0; i < 6; i++) {
    bool group = i >= 3;
    if (!fr_value(c, c->torch.of.op->body[b].grid + i, &size[i])) return false;
    if (group && size[i] == 0 && !(size[0] && size[1] && size[2]))
      size[i] = 1; /* no thread runs: min(N, 256) of an empty array */
    if (size[i] < group || size[i] > INT32_MAX)
      return fr_fail(c, "`%s`: %s is %lld for %s; expected %d to 2147483647.", group ? "threadgroup" : "grid",
                     c->op->bodies[b].texts[i], (long long)size[i], fr_shown(c, text, sizeof text), group);
    if (group) threads = size[i] > 1024 ? 1025 : threads * size[i];
  }
  return threads <= 1024 ||
         fr_fail(c, "`threadgroup` is (%d, %d, %d) for %s; expected 1024 threads at most.", (int)size[3],
                 (int)size[4], (int)size[5], fr_shown(c, text, sizeof text));
}

/* Refuses shapes and dims that are more than a kernel can read. */
static bool fr_check_reads(fr_packaged_call* c, int b) {
  const fr_call* call = &c->torch.of;
  const fr_body* body = &call->op->body[b];
  for (int i = 0; i < call->op->inputs; i++) {
    const fr_rule_input* input = &call->input[i];
    if (!(body->described >> i & 1) || !input->present) continue;
    if (body->devices == CUDA && input->ndim > FR_CUDA_RANK)
      return fr_fail(c, "its body asks for the shape of input '%s', which has %d dims; a body in CUDA knows of %d.",
                     c->op->input_names[i], (int)input->ndim, FR_CUDA_RANK);
    for (int k = 0; k < input->ndim; k++)
      if (input->sizes[k] > INT32_MAX)
        return fr_fail(c, "its body asks for the shape of input '%s', of which a size is %lld; it is an int32.",
                       c->op->input_names[i], (long long)input->sizes[k]);
  }
  for (int i = 0; i < body->dims; i++) {
    int64_t size = c->result.symbols[body->dim[i]];
    if (size > INT32_MAX) return fr_fail(c, "its body reads a dim of %lld as an int32.", (long long)size);
  }
  return true;
}

/* The bytes of an element that output i is filled with; NULL after an error. */
static const char* fr_fill(fr_packaged_call* c, const fr_packaged_body* body, const fr_special* special, int i,
                           uint64_t* room) {
  if (body->fill < 0) return special->fills[i];
  int64_t value;
  int dtype = c->result.outputs[i].dtype;
  if (!fr_value(c, body->fill, &value)) return NULL;
  if (fr_integer_bytes(dtype, value, room)) return (const char*)room;
  fr_fail(c, "`init_value` is %lld, which does not fit into output '%s' of %s.", (long long)value,
          c->torch.of.op->output_name[i], fr_dtype_names[dtype]);
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

static bool fr_load(fr_packaged_call* c, fr_code* code) {
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

static bool fr_fill_on_cpu(fr_packaged_call* c, const fr_packaged_body* body, const fr_special* special) {
  for (int i = 0; i < c->torch.of.op->outputs; i++) {
    const fr_rule_output* output = &c->result.outputs[i];
    size_t size = fr_item_bytes[output->dtype];
    uint64_t room = 0;
    const char* element = fr_fill(c, body, special, i, &room);
    if (!element) return false;
    char* at = (char*)c->torch.memory[i];
    int64_t count = fr_count(output->ndim, output->sizes);
    for (int64_t k = 0; k < count; k++, at += size) memcpy(at, element, size);
  }
  return true;
}

static bool fr_on_cpu(fr_packaged_call* c, int b, fr_special* special) {
  enum { BLOCK = 8192 /* devices/cpu/program.py has it */ };
  fr_call* call = &c->torch.of;
  if (call->op->body[b].zeroed && !fr_fill_on_cpu(c, &c->op->bodies[b], special)) return false;
  if (fr_no_thread(call)) return true;
  fr_code* code = special->codes;
  uint32_t form = fr_cpu_form(call->grid, call->grid + 3);
  while (code->needs & ~form) code++; /* the last one needs nothing */
  if (!fr_load(c, code) || !fr_check_reads(c, b)) return false;
  fr_table_entry entry; /* 3 KB, of which little is written */
  entry.run = NULL;
  entry.entry = code->entry;
  entry.limit = code->alone;
  entry.over_grid = code->over_grid;
  entry.block = BLOCK;
  entry.described = c->op->bodies[b].described;
  fr_cpu_job job;
  fr_prepare_cpu(call, &entry, &call->op->body[b], c->torch.memory, &job);
  int status = fr_run(job.entry, &job.launch, job.units, job.limit);
  if (!status) return true;
  return fr_fail(c, status == FR_E_FAULT      ? "its kernel accessed memory outside its arrays."
                    : status == FR_E_DIVISION ? "its kernel divided an integer by zero."
                    : status == FR_E_MEMORY   ? "there is no memory for its kernel's stacks."
                                              : "its kernel failed.");
}

#include "cuda_ops.h"
#include "cuda_steps.h"

/* ------------------------------------------------------------------------------ the whole call */

/* Fills outputs and starts a body. */
static bool fr_run_body(fr_packaged_call* c, int b, fr_special* special) {
  fr_call* call = &c->torch.of;
  const fr_op* op = call->op;
  /* Where no thread runs, a size that a kernel could not read does not matter. */
  if (!fr_work_out(call, &op->body[b], &c->result) && !fr_check_sizes(c, b)) return false;
  if (op->body[b].zeroed || !fr_no_thread(call))
    return c->op->cuda ? fr_on_cuda(c, b, special) : fr_on_cpu(c, b, special);
  for (int i = 0; i < op->outputs; i++)
    if (fr_count(c->result.outputs[i].ndim, c->result.outputs[i].sizes))
      return fr_fail(c, "`grid` is (%u, %u, %u), which runs no thread, but output '%s' is not "
                     "empty; the op has no `init_value`.", call->grid[0], call->grid[1],
                     call->grid[2], op->output_name[i]);
  return true;
}

static bool fr_carry_out(fr_packaged_call* c, const SIV* stack) {
  if (!fr_read_inputs(c, stack) || !fr_bind(c)) return false;
  int b = fr_choose_body(c);
  fr_special* special = b < 0 ? NULL : fr_find_special(c, b);
  if (!special || !fr_copy_inputs(c, &c->torch.of.op->body[b])) return false;
  const fr_unit* unit = c->op->bodies[b].unit;
  if (!(unit ? fr_run_unit(c, unit, special) : fr_run_body(c, b, special))) return false;
  for (int i = 0; i < c->torch.of.op->inputs; i++)
    if (!torch_copy_back(&c->torch, i))
      return fr_fail(c, "what was written to input '%s' could not be copied back.", c->op->input_names[i]);
  return true;
}

/* What torch calls: arguments on the stack are replaced by outputs. */
static void fr_boxed(const fr_packaged_op* op, SIV* stack) {
  fr_packaged_call c; /* 16 KB, of which little is written */
  c.op = op;
  c.error[0] = 0;
  c.scratch = NULL;
  torch_take(&c.torch, op->table, 0, stack);
  bool done = fr_carry_out(&c, stack);
  if (c.scratch) aoti_torch_delete_tensor_object(c.scratch); /* as copies of inputs */
  torch_finish(&c.torch, stack, done);
  if (!done) aoti_torch_check(false, op->name, "ferrule", 0, c.error); /* throws */
}

/* What torch's codes are. */
static void fr_learn_codes(void) {
  int32_t codes[FR_DTYPES];
  for (int i = 0; i < FR_DTYPES; i++) codes[i] = fr_dtype_codes[i] ? fr_dtype_codes[i]() : -1;
  torch_learn_dtypes(codes);
  torch_cuda_type = aoti_torch_device_type_cuda();
}

/* Defines an op, unless a library of the same content has done so: names carry its digest. */
static void fr_define(LH fragment, const fr_packaged_op* op, void (*call)(SIV*, uint64_t, uint64_t)) {
  LH implementation = NULL;
  if (aoti_torch_library_def(fragment, op->schema)) return;
  const char* key = op->cuda ? "CUDA" : "CPU";
  if (aoti_torch_library_init_impl("ferrule", key, "ferrule", 0, &implementation) ||
      aoti_torch_library_impl(implementation, op->name, call))
    fprintf(stderr, "ferrule: torch does not take the op %s\n", op->name);
}

#endif
