/* Calls with arrays of Python's libraries, by the engine that MLX's nodes have too (op_calls.h): what calls of ops and
 * of kernels share. Included by fastcall.c alone.
 */
#ifndef FERRULE_HOST_CALLS_H
#define FERRULE_HOST_CALLS_H

#include "numpy_arrays.h"
#include "op_calls.h"

enum { TORCH = 1, NUMPY = 2 };

/* One call under way. */
typedef struct {
  fr_call of; /* the first: `resolve_entry` gets the address of its request */
  PyObject* resolve;
  int host;
  fr_rule_result result;
  int64_t sizes[FR_MAX_ARGUMENTS][FR_MAX_NDIM], strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM]; /* of inputs */
  PyObject* output[FR_MAX_ARGUMENTS];
  void* memory[FR_MAX_ARGUMENTS];
  size_t bytes[FR_MAX_ARGUMENTS];
  size_t guard[FR_MAX_ARGUMENTS]; /* bytes of the canary behind each output, see canary.h */
} host_call;

static void begin_call(host_call* c, fr_op* op, PyObject* resolve) {
  fr_begin(&c->of, op, 0);
  c->resolve = resolve;
  for (int i = 0; i < op->outputs; i++) c->output[i] = NULL;
}

/* Lets objects go. What a destructor does must not change the exception. */
static void let_go(PyObject** objects, int count) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (int i = 0; i < count; i++) Py_CLEAR(objects[i]);
  PyErr_Restore(type, value, traceback);
}

/* The entry for a request, or NULL and an exception. */
static fr_table_entry* resolve_entry(fr_request* request) {
  host_call* c = (host_call*)((char*)request - offsetof(fr_call, request));
  PyObject* address = PyObject_CallFunction(c->resolve, "K", (unsigned long long)(uintptr_t)request);
  fr_table_entry* e = address ? PyLong_AsVoidPtr(address) : NULL;
  Py_XDECREF(address);
  return e;
}

/* ------------------------------------------------------------------------------------------ arrays */

/* An array, or a number where it has no dims. False where it has too many. */
static bool place_input(host_call* c, int i, void* data, int ndim, const int64_t* sizes, const int64_t* strides) {
  fr_rule_input* in = &c->of.input[i];
  in->present = true;
  in->ndim = ndim;
  in->sizes = c->sizes[i];
  c->of.strides[i] = c->strides[i];
  c->of.pointer[i] = data;
  if (ndim > FR_MAX_NDIM) return false;
  for (int d = 0; d < ndim; d++) {
    c->sizes[i][d] = sizes[d];
    c->strides[i][d] = strides[d];
  }
  return true;
}

static bool place_numpy(host_call* c, int i, const numpy_array* a) {
  return place_input(c, i, a->data, a->nd, (const int64_t*)a->dimensions, (const int64_t*)a->strides);
}

/* Gives a placed array of NumPy's its dtype. False where a kernel cannot read it where it is. Sizes of elements are
 * powers of two, and divisions slow. */
static bool count_elements(host_call* c, int i, int32_t dtype) {
  fr_rule_input* in = &c->of.input[i];
  int64_t rest = fr_item_bytes[dtype] - 1, odd = (intptr_t)c->of.pointer[i] & rest;
  int shift = __builtin_ctz(fr_item_bytes[dtype]);
  in->dtype = dtype;
  for (int d = 0; d < in->ndim; d++) {
    odd |= c->strides[i][d] & rest;
    c->strides[i][d] >>= shift;
  }
  return !odd;
}

/* Whether all inputs can be given to a body as they are. */
static bool as_they_are(const host_call* c, const fr_body* body) {
  uint64_t shared;
  int32_t wrong[2];
  if (!fr_inputs_apart(&c->of, &shared, wrong)) return false;
  for (int i = 0; i < c->of.op->inputs; i++)
    if (fr_wants_copy(&c->of, body, shared, i)) return false;
  return true;
}

/* How many bytes an output has. False where there are too many. */
static bool count_bytes(host_call* c, int i) {
  const fr_rule_output* out = &c->result.outputs[i];
  bool empty = false, fits = true;
  c->bytes[i] = fr_item_bytes[out->dtype];
  for (int d = 0; d < out->ndim; d++) empty = empty || !out->sizes[d];
  for (int d = 0; d < out->ndim && !empty && fits; d++)
    fits = !__builtin_mul_overflow(c->bytes[i], (size_t)out->sizes[d], &c->bytes[i]);
  if (empty) c->bytes[i] = 0;
  return fits;
}

/* A new output of NumPy's between canaries, or NULL. */
static PyObject* numpy_output(const host_call* c, int i, PyObject* descr, bool zeroed) {
  const fr_rule_output* out = &c->result.outputs[i];
  return numpy_make(descr, out->ndim, (const Py_ssize_t*)out->sizes, c->bytes[i], zeroed);
}

/* Where an output of NumPy's lies. */
static bool place_numpy_output(host_call* c, int i) {
  c->memory[i] = ((numpy_array*)c->output[i])->data;
  c->guard[i] = numpy_is_guarded(c->output[i]) ? FR_CANARY : 0;
  return true;
}

/* ------------------------------------------------------------------------------------------ launch */

enum { RAISED = -2 };

/* Makes a KeyboardInterrupt of the exception that is set, with its words. */
static void raise_interrupt(void) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* text = value ? PyObject_Str(value) : NULL;
  PyErr_SetObject(PyExc_KeyboardInterrupt, text);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

/* Runs units until they are done; in between, Python sees its signals. RAISED where one of these ends the call by
 * an exception; a KeyboardInterrupt that comes twice gives the units up, and their error is raised first. */
static int run_units(const fr_cpu_job* job, bool* interrupt) {
  fr_progress progress;
  int status;
  progress.parts = 0;
  *interrupt = false;
  do {
    Py_BEGIN_ALLOW_THREADS;
    status = job->run(job->entry, &job->launch, job->units, job->limit, FR_SLICE, &progress);
    Py_END_ALLOW_THREADS;
    if (status == FR_OK || !PyErr_CheckSignals()) continue;
    *interrupt = status == FR_E_ABANDONED && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
    if (!*interrupt) {
      job->run(NULL, NULL, 0, 0, 0, &progress); /* shows what it printed */
      return RAISED;
    }
    PyErr_Clear();
  } while (status == FR_MORE);
  return status;
}

/* Whether nothing was written beside an output. */
static bool is_intact(host_call* c) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    const char* memory = c->memory[i];
    int outside = 0;
    if (c->guard[i])
      outside = c->host == NUMPY ? outside_block(memory, c->bytes[i]) : fr_past_end(memory + c->bytes[i], c->guard[i]);
    if (!outside) continue;
    c->of.request.outside[0] = i;
    c->of.request.outside[1] = outside;
    return false;
  }
  return true;
}

/* Raises what the status of a launch means. */
static void raise_status(host_call* c, int status) {
  c->of.request.status = status;
  c->of.request.output_pointer = c->memory;
  if (resolve_entry(&c->of.request)) PyErr_SetString(PyExc_SystemError, "a failed launch raised no error");
}

/* False with an exception set. */
static bool launch_cpu(host_call* c, const fr_table_entry* e, const fr_body* body) {
  fr_cpu_job job;
  bool interrupt;
  fr_prepare_cpu(&c->of, e, body, c->memory, &job);
  int status = run_units(&job, &interrupt);
  if (status == FR_OK && !is_intact(c)) status = FR_E_OUTSIDE;
  if (status == FR_OK || status == RAISED) return status == FR_OK;
  raise_status(c, status);
  if (interrupt) raise_interrupt();
  return false;
}

#endif
