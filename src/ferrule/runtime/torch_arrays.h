/* torch's tensors as DLPack describes them, and whether torch does nothing but compute. Included by fastcall.c alone. */
#ifndef FERRULE_TORCH_ARRAYS_H
#define FERRULE_TORCH_ARRAYS_H

/* DLPack 1.x (github.com/dmlc/dlpack, include/dlpack/dlpack.h). */
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_exchange {
  uint32_t major, minor;
  struct dl_exchange* older;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void*, dl_tensor*);
  int (*current_work_stream)(int32_t, int32_t, void**);
} dl_exchange;

enum { DL_CPU = 1, DL_CUDA = 2, DL_COMPLEX = 5 };

static const dl_exchange* torch_api;
static PyTypeObject* torch_size; /* a tuple of ints, too */
static PyObject *torch_tracing, *torch_modes, *torch_overrides, *torch_recording; /* functions */
static PyObject* torch_forward;                                                   /* a dict */
static PyObject *text_requires_grad, *text_is_neg, *text_level;

static bool torch_facts(PyObject* tensor, dl_tensor* t) {
  return torch_api->tensor_from_object(tensor, t) == 0 && t->byte_offset == 0;
}

/* 0 or 1; -1 with an exception set. Steals. */
static int truth(PyObject* result) {
  int yes = result ? result != Py_False : -1;
  Py_XDECREF(result);
  return yes;
}

/* Whether a function, called without arguments, gives 0. */
static bool gives_zero(PyObject* function) {
  PyObject* result = PyObject_CallNoArgs(function);
  bool zero = result && PyLong_Check(result) && PyLong_AsLong(result) == 0;
  Py_XDECREF(result);
  return zero;
}

/* Whether torch is looking for forward-mode derivatives. */
static bool torch_is_forward(void) {
  PyObject* level = PyDict_GetItemWithError(torch_forward, text_level);
  return !level || !PyLong_Check(level) || PyLong_AsLong(level) >= 0;
}

/* Whether torch is doing nothing but computing: no tracing, no modes, no forward-mode derivative. Then
 * what is asked of a tensor runs no Python code. */
static bool torch_is_plain(void) {
  PyObject* state = PyObject_CallNoArgs(torch_tracing);
  bool plain = state == Py_None;
  Py_XDECREF(state);
  return plain && gives_zero(torch_modes) && gives_zero(torch_overrides) && !torch_is_forward();
}

/* Puts a canary behind memory of the C library's. Returns how long it is. */
static size_t put_slack(char* memory, size_t bytes) {
  size_t slack = fr_slack(memory, bytes);
  if (slack) fr_put_canary(memory + bytes, slack);
  return slack;
}

static PyObject* slack_put(PyObject* module, PyObject* args) {
  unsigned long long address;
  Py_ssize_t bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
  return PyLong_FromSize_t(put_slack((char*)(uintptr_t)address, (size_t)bytes));
}

static PyObject* slack_outside(PyObject* module, PyObject* args) {
  unsigned long long address;
  Py_ssize_t bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
  const char* memory = (const char*)(uintptr_t)address;
  size_t slack = fr_slack(memory, (size_t)bytes);
  return PyLong_FromLong(slack ? fr_past_end(memory + bytes, slack) : 0);
}

#endif
