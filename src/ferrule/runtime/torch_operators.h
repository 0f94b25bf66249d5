/* Calls of operators of torch without Python code: what knows whether autograd is to see a call, and what records one.
 * Included by fastcall.c alone.
 */
#ifndef FERRULE_TORCH_OPERATORS_H
#define FERRULE_TORCH_OPERATORS_H

#include "torch_functions.h"

static PyObject *text_to_save, *text_constants, *text_plain, *text_tensors;

/* -------------------------------------------------------------------------------------- a call's way */

/* Whether a number is one of its kind: torch takes a tensor for a number, too, and then its derivative
 * is lost. */
static bool is_number(char kind, PyObject* value) {
  if (kind == 'b') return PyBool_Check(value);
  return PyLong_CheckExact(value) || (kind == 'f' && PyFloat_CheckExact(value));
}

enum { RAISES = -1, LONG, COMPUTED, RECORDED };

/* Whether a call has plain tensors and numbers as they are declared; and whether autograd records it. */
static int way_of(const char* kinds, PyObject* args) {
  if (PyTuple_Size(args) != (Py_ssize_t)strlen(kinds)) return LONG;
  if (torch_is_forward() || !gives_zero(torch_overrides)) return LONG; /* a mode would see what tensors are asked */
  bool wants = false;
  for (int i = 0; kinds[i]; i++) {
    PyObject* value = PyTuple_GetItem(args, i);
    if (kinds[i] != 'a' && kinds[i] != 'o') {
      if (!is_number(kinds[i], value)) return LONG;
    } else if (value != Py_None || kinds[i] == 'a') { /* torch takes None for any tensor */
      if (!is_torch(value)) return LONG;
      int grad = wants ? 1 : truth(PyObject_GetAttr(value, text_requires_grad));
      if (grad < 0) return RAISES;
      wants = grad;
    }
  }
  int recorded = wants ? truth(PyObject_CallNoArgs(torch_recording)) : 0;
  if (recorded < 0) return RAISES;
  return recorded ? RECORDED : COMPUTED;
}

/* ----------------------------------------------------------------------------------------- recording */

/* What records calls of an operator: members of a tuple. */
enum { MOST_PICKED = 256 };
enum { OPERATOR, KINDS, KNOWN, SAVED_INPUTS, SAVED_OUTPUTS, CONSTANT_OUTPUTS };

/* Sets an attribute. Steals. */
static bool set(PyObject* context, PyObject* name, PyObject* value) {
  bool good = value && !PyObject_SetAttr(context, name, value);
  Py_XDECREF(value);
  return good;
}

static PyObject* output_at(PyObject* outputs, Py_ssize_t i) {
  return PyTuple_CheckExact(outputs) ? PyTuple_GetItem(outputs, i) : outputs;
}

/* The tuple of the tensors that stand at some places among inputs (NULL: none), and then at some among outputs. */
static PyObject* picked(PyObject* values, PyObject* inputs, PyObject* outputs, PyObject* places) {
  PyObject* all[MOST_PICKED];
  Py_ssize_t count = 0;
  for (Py_ssize_t i = 0; inputs && i < PyTuple_Size(inputs); i++) {
    PyObject* value = PyTuple_GetItem(values, PyLong_AsSsize_t(PyTuple_GetItem(inputs, i)));
    if (is_torch(value)) all[count++] = value;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++)
    all[count++] = output_at(outputs, PyLong_AsSsize_t(PyTuple_GetItem(places, i)));
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple && i < count; i++) {
    Py_INCREF(all[i]);
    PyTuple_SetItem(tuple, i, all[i]); /* steals it */
  }
  return tuple;
}

/* What is no tensor among a call's inputs, and where; the class says that all are tensors. */
static bool note_numbers(PyObject* context, PyObject* values) {
  Py_ssize_t count = PyTuple_Size(values), tensors = 0;
  for (Py_ssize_t i = 0; i < count; i++) tensors += is_torch(PyTuple_GetItem(values, i));
  if (tensors == count) return true;
  PyObject *plain = PyTuple_New(count), *is_tensor = PyTuple_New(count);
  for (Py_ssize_t i = 0; plain && is_tensor && i < count; i++) {
    PyObject* value = PyTuple_GetItem(values, i);
    bool tensor = is_torch(value);
    PyObject* kept = tensor ? Py_None : value;
    Py_INCREF(kept);
    PyTuple_SetItem(plain, i, kept); /* steals it */
    PyTuple_SetItem(is_tensor, i, PyBool_FromLong(tensor));
  }
  bool good = set(context, text_plain, plain);
  return set(context, text_tensors, is_tensor) && good;
}

/* Keeps for the derivative what it reads. */
static bool keep_for_derivative(PyObject* self, PyObject* context, PyObject* values, PyObject* outputs) {
  PyObject *inputs = PyTuple_GetItem(self, SAVED_INPUTS), *places = PyTuple_GetItem(self, SAVED_OUTPUTS);
  PyObject* constants = PyTuple_GetItem(self, CONSTANT_OUTPUTS);
  if (!set(context, text_to_save, picked(values, inputs, outputs, places))) return false;
  if (PyTuple_Size(constants) && !set(context, text_constants, picked(values, NULL, outputs, constants)))
    return false;
  return note_numbers(context, values);
}

/* `forward` of an autograd.Function: (context, *values). It is called where nothing is recorded any more. */
static PyObject* forward_call(PyObject* self, PyObject* args) {
  PyObject* context = PyTuple_GetItem(args, 0);
  PyObject* values = context ? PyTuple_GetSlice(args, 1, PyTuple_Size(args)) : NULL;
  if (!values) return NULL;
  PyObject* known = PyTuple_GetItem(self, KNOWN);
  PyObject* outputs = NULL;
  bool direct = known != Py_None && is_unprofiled();
  if (direct) outputs = call_known(known, PyBytes_AsString(PyTuple_GetItem(self, KINDS)), values);
  if (!direct || outputs == Py_NotImplemented) {
    Py_XDECREF(outputs);
    outputs = PyObject_Call(PyTuple_GetItem(self, OPERATOR), values, NULL);
  }
  if (outputs && !keep_for_derivative(self, context, values, outputs)) Py_CLEAR(outputs);
  Py_DECREF(values);
  return outputs;
}

static PyMethodDef forward_function = {"forward", forward_call, METH_VARARGS, "Run an operator, and save what its"
                                       " derivative reads."};

static PyObject* recorded_forward(PyObject* module, PyObject* args) {
  PyObject *function, *kinds, *known, *inputs, *outputs, *constants;
  (void)module;
  if (!PyArg_ParseTuple(args, "OSOO!O!O!", &function, &kinds, &known, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
                        &PyTuple_Type, &constants))
    return NULL;
  bool fits = PyTuple_Size(inputs) + PyTuple_Size(outputs) + PyTuple_Size(constants) <= MOST_PICKED;
  if (functions.exclude && fits) return PyCFunction_New(&forward_function, args);
  Py_RETURN_NONE;
}

/* A call that autograd records, by `apply` of an autograd.Function; NotImplemented where another way is right. */
static PyObject* record(PyObject* apply, const char* kinds, PyObject* args) {
  bool usual = torch_is_unwatched(functions.autograd);
  for (int i = 0; kinds[i] && usual; i++) usual = kinds[i] != 'f' || PyFloat_CheckExact(PyTuple_GetItem(args, i));
  if (usual) return PyObject_Call(apply, args, NULL);
  PyErr_Clear();
  return not_implemented();
}

/* ----------------------------------------------------------------------------------------- operators */

/* Members of an operator's tuple. */
enum { CALLED, LETTERS, REFUSED, KNOWN_CALLS, APPLY };

/* NotImplemented where a call is out of the ordinary; else what the operator gives. */
static PyObject* operator_call(PyObject* self, PyObject* args, PyObject* keywords) {
  const char* kinds = PyBytes_AsString(PyTuple_GetItem(self, LETTERS));
  PyObject *refused = PyTuple_GetItem(self, REFUSED), *known = PyTuple_GetItem(self, KNOWN_CALLS);
  PyObject* apply = PyTuple_GetItem(self, APPLY);
  int way = keywords ? LONG : way_of(kinds, args);
  if (way > LONG && refused != Py_None) {
    int now = truth(PyObject_CallNoArgs(refused));
    if (now) way = now < 0 ? RAISES : LONG;
  }
  if (way == RAISES) return NULL;
  if (way == RECORDED && apply != Py_None) return record(apply, kinds, args);
  if (way != COMPUTED) return not_implemented();
  if (known != Py_None && torch_is_unwatched(0) && is_unprofiled()) {
    PyObject* outputs = call_known(known, kinds, args);
    if (outputs != Py_NotImplemented) return outputs;
    Py_DECREF(outputs);
  }
  PyErr_Clear();
  return PyObject_Call(PyTuple_GetItem(self, CALLED), args, NULL);
}

static PyMethodDef operator_function = {"operator", (PyCFunction)(void (*)(void))operator_call,
                                        METH_VARARGS | METH_KEYWORDS, "What it gives, or NotImplemented."};

/* An operator of torch without an Autograd kernel, for calls of which no derivative is wanted. */
static PyObject* operator(PyObject* module, PyObject* args) {
  PyObject *function, *kinds, *refused, *known, *apply;
  (void)module;
  if (!PyArg_ParseTuple(args, "OSOOO", &function, &kinds, &refused, &known, &apply)) return NULL;
  if (torch_api) return PyCFunction_New(&operator_function, args);
  PyErr_SetString(PyExc_ValueError, "operator: torch is not registered");
  return NULL;
}

/* The names of what is set on the context of an autograd.Function. */
static bool learn_names(void) {
  text_to_save = PyUnicode_InternFromString("to_save");
  text_constants = PyUnicode_InternFromString("non_differentiable");
  text_plain = PyUnicode_InternFromString("plain");
  text_tensors = PyUnicode_InternFromString("is_tensor");
  return text_to_save && text_constants && text_plain && text_tensors;
}

#endif
