/* How the inputs of a call lie: what tells calls with torch's tensors apart, of which the rest is known. Included by
 * fastcall.c alone.
 */
#ifndef FERRULE_TORCH_LAYOUTS_H
#define FERRULE_TORCH_LAYOUTS_H

#include "torch_arrays.h"

enum { MOST_WORDS = 256, CONTIGUOUS = 1 << 16, NOT_ASKED = -2 };
#define SAFE 400.0 /* what fits into every float that a number may be declared as; _SAFE of operators/launch.py */

static struct {
  void (*exclude)(void* guard, uint64_t keys); /* c10::impl::ExcludeDispatchKeyGuard, and its end */
  void (*restore)(void* guard);
  uint64_t keys, autograd, inference; /* of autograd and autocast; of autograd; what inference mode changes */
  PyTypeObject* tensor;               /* torch.Tensor */
  PyObject* no_overrides;             /* torch._C.DisableTorchFunction */
  PyObject *profiler, *device, *use_count, *empty; /* functions; `device` is None without CUDA */
  long uses, references;              /* of memory that one tensor alone has: in C++, and in Python */
} functions;
static PyObject *text_detach, *text_storage, *text_resizable, *text_address, *text_enter, *text_exit, *text_weakref;

static bool is_torch(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  for (int i = 0; i < types_known; i++)
    if (types[i].type == type) return types[i].host == TORCH;
  return false;
}

/* ------------------------------------------------------------------------------------------ layouts */

typedef struct {
  int n;
  int64_t word[MOST_WORDS];
  bool detached; /* an input is to be detached: it is a Parameter, or requires grad */
  int inputs;
  uint64_t bits[MOST_WORDS]; /* of each input the address, or the number: of a double, where it is a float */
  int64_t device; /* the current GPU, once that has been asked for; before NOT_ASKED */
} layout;

static bool put(layout* l, int64_t value) {
  if (l->n == MOST_WORDS) return false;
  l->word[l->n++] = value;
  return true;
}

static bool is_dense_and_on_current_device(layout* l, PyObject* tensor, const dl_tensor* t) {
  if (!t->data || t->code == DL_COMPLEX) return false; /* a complex one may be a lazy conjugate */
  if (truth(PyObject_CallMethodObjArgs(tensor, text_is_neg, NULL)) != 0) return false;
  if (t->device_type == DL_CPU) return true;
  if (t->device_type != DL_CUDA || functions.device == Py_None) return false;
  if (l->device == NOT_ASKED) {
    PyObject* current = PyObject_CallNoArgs(functions.device);
    l->device = current ? PyLong_AsLong(current) : -1;
    Py_XDECREF(current);
  }
  return l->device == t->device_id;
}

static void begin_layout(layout* l) {
  l->n = l->inputs = 0;
  l->detached = false;
  l->device = NOT_ASKED;
}

/* The layout of a tensor. False where it is unusual, perhaps with an exception set. */
static bool put_tensor(layout* l, PyObject* tensor) {
  dl_tensor t;
  if (!torch_facts(tensor, &t) || !is_dense_and_on_current_device(l, tensor, &t)) return false;
  l->bits[l->inputs++] = (uintptr_t)t.data;
  int64_t dtype = (int64_t)t.code << 24 | t.bits << 16 | t.lanes;
  int64_t lies = fr_row_contiguous(t.ndim, t.shape, t.strides) ? CONTIGUOUS : 0;
  if (!put(l, dtype << 32 | t.ndim | lies) || !put(l, (int64_t)t.device_type << 32 | t.device_id)) return false;
  for (int d = 0; d < t.ndim; d++)
    if (!put(l, t.shape[d])) return false;
  return true;
}

/* The layout of a number: its value, but of a float, on which nothing depends that is kept. */
static bool put_number(layout* l, char kind, PyObject* value) {
  if (kind == 'f') {
    double number = PyFloat_CheckExact(value) ? PyFloat_AsDouble(value) : 2 * SAFE;
    memcpy(&l->bits[l->inputs++], &number, sizeof number);
    return number >= -SAFE && number <= SAFE && put(l, kind);
  }
  if (kind == 'b' ? !PyBool_Check(value) : !PyLong_CheckExact(value)) return false;
  long long number = PyLong_AsLongLong(value);
  l->bits[l->inputs++] = (uint64_t)number;
  return (number != -1 || !PyErr_Occurred()) && put(l, kind) && put(l, number);
}

/* The layout of a call's inputs, given a letter for each. False where one is unusual, perhaps with an exception set. */
static bool put_inputs(layout* l, const char* kinds, PyObject* args) {
  begin_layout(l);
  for (int i = 0; kinds[i] && i < MOST_WORDS; i++) {
    PyObject* value = PyTuple_GetItem(args, i);
    if (!value) return false;
    if (kinds[i] != 'a' && kinds[i] != 'o') {
      if (!put_number(l, kinds[i], value)) return false;
    } else if (value == Py_None) {
      l->bits[l->inputs++] = 0;
      if (!put(l, -1)) return false;
    } else {
      if (!is_torch(value) || !put_tensor(l, value)) return false;
      int grad = truth(PyObject_GetAttr(value, text_requires_grad));
      if (grad < 0) return false;
      l->detached = l->detached || grad || Py_TYPE(value) != functions.tensor;
    }
  }
  return true;
}

static PyObject* layout_bytes(const layout* l) {
  return PyBytes_FromStringAndSize((const char*)l->word, (Py_ssize_t)sizeof *l->word * l->n);
}

#endif
