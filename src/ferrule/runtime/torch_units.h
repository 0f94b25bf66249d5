/* Calls, with torch's tensors, of CUDA units whose inputs lie as in a call before: what is left are outputs, scratch and
 * addresses. Included by fastcall.c alone.
 */
#ifndef FERRULE_TORCH_UNITS_H
#define FERRULE_TORCH_UNITS_H

#include "torch_layouts.h"

/* `_Plan` of hosts/torch/unit_calls.py. Words are those of the inputs, the outputs and the parts of scratch. */
typedef struct {
  int (*begin)(void* state, void* context, const void* steps, int count, uint64_t* word, void* stream, int* tried);
  cuda_state* state;
  void* context;
  const void* steps;
  int32_t count, inputs, outputs, parts; /* of steps, and of each kind of words */
  int32_t device;        /* -1: arrays are the CPU's */
  int32_t alignment;     /* of scratch */
  const uint8_t* single; /* of each input: it is a number, float32 */
  const uint64_t* part;  /* where in scratch each begins */
} unit_plan;

static bool is_unit(PyObject* entry) { return PyLong_CheckExact(PyTuple_GetItem(entry, 0)); }

/* A tensor, given the arguments of torch.empty, and its address. */
static PyObject* new_tensor(PyObject* how, uint64_t* address) {
  dl_tensor t;
  PyObject* made = PyObject_Call(functions.empty, PyTuple_GetItem(how, 0), PyTuple_GetItem(how, 1));
  if (made && !torch_facts(made, &t)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch.empty gave no tensor that DLPack describes");
    Py_CLEAR(made);
  }
  if (made) *address = (uintptr_t)t.data;
  return made;
}

/* Has `failed` raise the error for a status, after so many steps had been tried. */
static void raise_failure(PyObject* failed, int status, int tried) {
  PyObject* result = PyErr_Occurred() ? NULL : PyObject_CallFunction(failed, "ii", status, tried);
  Py_XDECREF(result);
}

/* Starts the steps; false with an exception set. */
static bool begin_unit(const unit_plan* plan, uint64_t* word, PyObject* failed) {
  void* stream = NULL;
  int tried = 0, status = 0;
  if (plan->device >= 0) status = torch_api->current_work_stream(DL_CUDA, plan->device, &stream);
  if (!status) {
    PyThreadState* thread = PyEval_SaveThread(); /* where many kernels wait, a launch waits, too */
    status = plan->begin(plan->state, plan->context, plan->steps, plan->count, word, stream, &tried);
    PyEval_RestoreThread(thread);
  }
  if (status) raise_failure(failed, status, tried);
  return !status;
}

/* The outputs of a call, given (plan, what makes outputs and scratch, what raises an error, what owns all that). */
static PyObject* call_unit(PyObject* entry, const layout* l) {
  unsigned long long address;
  PyObject *made, *failed, *owner, *scratch = NULL;
  if (!PyArg_ParseTuple(entry, "KO!OO", &address, &PyTuple_Type, &made, &failed, &owner)) return NULL;
  const unit_plan* plan = (const unit_plan*)(uintptr_t)address;
  uint64_t word[MOST_WORDS], base = 0;
  if (plan->state->forked) {
    raise_failure(failed, 0, 0);
    return NULL;
  }
  for (int i = 0; i < plan->inputs; i++) {
    double number;
    word[i] = l->bits[i];
    if (!plan->single[i]) continue;
    memcpy(&number, &word[i], sizeof number);
    const float single = (float)number;
    memcpy(&word[i], &single, sizeof single);
  }
  uint64_t* next = word + plan->inputs;
  PyObject* outputs = PyTuple_New(plan->outputs);
  for (int i = 0; outputs && i < plan->outputs; i++) {
    PyObject* output = new_tensor(PyTuple_GetItem(made, i), next++);
    if (output) PyTuple_SetItem(outputs, i, output); /* steals it */
    else Py_CLEAR(outputs);
  }
  if (outputs && PyTuple_Size(made) > plan->outputs) {
    scratch = new_tensor(PyTuple_GetItem(made, plan->outputs), &base);
    if (!scratch) Py_CLEAR(outputs);
  }
  const uint64_t unit = (uint64_t)plan->alignment, begin = (base + unit - 1) / unit * unit;
  for (int i = 0; i < plan->parts; i++) *next++ = begin + plan->part[i];
  if (outputs && !begin_unit(plan, word, failed)) Py_CLEAR(outputs);
  Py_XDECREF(scratch); /* it goes back to torch's pool, from where what comes later on this stream may have it */
  if (!outputs || plan->outputs != 1) return outputs;
  PyObject* alone = PyTuple_GetItem(outputs, 0);
  Py_INCREF(alone);
  Py_DECREF(outputs);
  return alone;
}

#endif
