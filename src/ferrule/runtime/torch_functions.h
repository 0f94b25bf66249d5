/* Calls, with torch's tensors, of what carries out ops: Python functions, or CUDA units (torch_units.h). Included by
 * fastcall.c alone.
 *
 * What sizes, dtypes and devices decide of such a call is found once, in Python, and kept under its `layout`: which
 * function is called, and the layout of each output. A later call of the same layout is read, made and checked here.
 * What is not known, or out of the ordinary, is answered with NotImplemented.
 */
#ifndef FERRULE_TORCH_FUNCTIONS_H
#define FERRULE_TORCH_FUNCTIONS_H

#include "torch_units.h"

/* ------------------------------------------------------------------------------------------ outputs */

/* How often a tensor's storage is in use in C++, and held in Python. False with an exception set. */
static bool count_holders(PyObject* storage, long* uses, long* references) {
  PyObject* address = storage ? PyObject_GetAttr(storage, text_address) : NULL;
  PyObject* count = address ? PyObject_CallFunctionObjArgs(functions.use_count, address, NULL) : NULL;
  *uses = count ? PyLong_AsLong(count) : -1;
  *references = storage ? (long)(uint32_t)Py_REFCNT(storage) : 0;
  Py_XDECREF(count);
  Py_XDECREF(address);
  return *uses >= 0;
}

/* Whether a tensor's memory is torch's, and nobody else's. */
static bool has_memory_alone(PyObject* tensor) {
  long uses, references;
  PyObject* storage = PyObject_CallMethodObjArgs(tensor, text_storage, NULL);
  bool alone = count_holders(storage, &uses, &references) && uses <= functions.uses &&
               references <= functions.references &&
               truth(PyObject_CallMethodObjArgs(storage, text_resizable, NULL)) == 1;
  Py_XDECREF(storage);
  return alone;
}

/* Whether nobody else has an object. (From Python 3.14 on the count is the lower half of the word.) */
static bool is_held_once(PyObject* object) { return (uint32_t)Py_REFCNT(object) == 1; }

/* Whether nobody can get a tensor by a weak reference. */
static bool is_out_of_reach(PyObject* tensor) {
  PyObject* reference = PyObject_GetAttr(tensor, text_weakref);
  Py_XDECREF(reference);
  return reference == Py_None;
}

/* Whether an output of a function is what its layout says, row by row, and new. */
static bool is_new_output(PyObject* output, PyObject* expected, bool own) {
  layout l;
  begin_layout(&l);
  if (Py_TYPE(output) != functions.tensor || !put_tensor(&l, output)) return false;
  size_t bytes = sizeof *l.word * (size_t)l.n;
  if ((size_t)PyBytes_Size(expected) != bytes || memcmp(PyBytes_AsString(expected), l.word, bytes)) return false;
  if (truth(PyObject_GetAttr(output, text_requires_grad)) != 0) return false;
  return own || (is_held_once(output) && is_out_of_reach(output) && has_memory_alone(output));
}

static bool are_new_outputs(PyObject* result, PyObject* expected, bool own) {
  Py_ssize_t count = PyTuple_Size(expected);
  if (count == 1) return is_new_output(result, PyTuple_GetItem(expected, 0), own);
  if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != count || !is_held_once(result)) return false;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!is_new_output(PyTuple_GetItem(result, i), PyTuple_GetItem(expected, i), own)) return false;
  return true;
}

/* What a function gave, checked; `finish` of Python makes outputs of what is unusual. Steals. */
static PyObject* finished(PyObject* result, PyObject* finish, PyObject* expected, bool own) {
  if (!result || are_new_outputs(result, expected, own)) return result;
  PyErr_Clear();
  PyObject* held = PyList_New(1); /* nothing else has it */
  if (!held) {
    Py_DECREF(result);
    return NULL;
  }
  PyList_SetItem(held, 0, result);
  PyObject* outputs = PyObject_CallFunctionObjArgs(finish, held, NULL);
  Py_DECREF(held);
  return outputs;
}

/* ------------------------------------------------------------------------------------------- a call */

/* The inputs as functions get them: plain tensors. */
static PyObject* plain_inputs(PyObject* args) {
  Py_ssize_t count = PyTuple_Size(args);
  PyObject* plain = PyTuple_New(count);
  for (Py_ssize_t i = 0; plain && i < count; i++) {
    PyObject* value = PyTuple_GetItem(args, i);
    bool detached = is_torch(value) && (Py_TYPE(value) != functions.tensor ||
                                        truth(PyObject_GetAttr(value, text_requires_grad)) != 0);
    if (detached) value = PyObject_CallMethodObjArgs(value, text_detach, NULL);
    else Py_INCREF(value);
    if (!value) Py_CLEAR(plain);
    else PyTuple_SetItem(plain, i, value); /* steals it */
  }
  return plain;
}

/* Ends a block of Python's. What it says must not change the exception. */
static void leave(PyObject* manager) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* left = PyObject_CallMethodObjArgs(manager, text_exit, Py_None, Py_None, Py_None, NULL);
  Py_XDECREF(left);
  Py_DECREF(manager);
  if (type) PyErr_Restore(type, value, traceback);
}

/* Calls a function below autograd, autocast and all that takes the place of torch's functions. */
static PyObject* call_below(PyObject* function, PyObject* args, bool detached) {
  uint64_t guard[8]; /* of which torch uses two */
  PyObject* manager = PyObject_CallNoArgs(functions.no_overrides);
  PyObject* entered = manager ? PyObject_CallMethodObjArgs(manager, text_enter, NULL) : NULL;
  if (!entered) {
    Py_XDECREF(manager);
    return NULL;
  }
  Py_DECREF(entered);
  PyObject* result = NULL;
  PyObject* inputs = args;
  if (detached) inputs = plain_inputs(args); /* above autograd: with the versions of what they are of */
  if (inputs) {
    functions.exclude(guard, functions.keys);
    result = PyObject_Call(function, inputs, NULL);
    functions.restore(guard);
    if (detached) Py_DECREF(inputs);
  }
  leave(manager);
  return result;
}

static PyObject* not_implemented(void) {
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

/* The outputs of a function's call. */
static PyObject* call_function(PyObject* entry, PyObject* args, const layout* l) {
  PyObject *function, *finish, *expected;
  int own;
  if (!PyArg_ParseTuple(entry, "OpOO!", &function, &own, &finish, &PyTuple_Type, &expected)) return NULL;
  return finished(call_below(function, args, l->detached), finish, expected, own);
}

/* The outputs of a call whose layout is known; else NotImplemented. */
static PyObject* call_known(PyObject* known, const char* kinds, PyObject* args) {
  layout l;
  if (!PyDict_Size(known) || bypass) return not_implemented();
  PyObject* key = put_inputs(&l, kinds, args) ? layout_bytes(&l) : NULL;
  PyObject* entry = key ? PyDict_GetItemWithError(known, key) : NULL; /* borrowed */
  Py_XDECREF(key);
  if (!entry) {
    PyErr_Clear();
    return not_implemented();
  }
  Py_INCREF(entry); /* the call may have it forgotten */
  PyObject* outputs = is_unit(entry) ? call_unit(entry, &l) : call_function(entry, args, &l);
  Py_DECREF(entry);
  return outputs;
}

/* Whether nothing else watches or transforms what torch does, and none of these dispatch keys are excluded: then it makes
 * no difference that the dispatcher is left out. Modes, traces and transforms of torch.func include keys. */
static bool torch_is_unwatched(uint64_t keys) {
  uint64_t guard[8];
  functions.exclude(guard, 0); /* the first word is the address of this thread's keys, as they differ from the usual */
  const uint64_t* differs = (const uint64_t*)(uintptr_t)guard[0];
  bool usual = !(differs[0] & ~functions.inference) && !(differs[1] & keys);
  functions.restore(guard);
  return usual;
}

/* Whether no profiler wants to see torch's operators. */
static bool is_unprofiled(void) { return truth(PyObject_CallNoArgs(functions.profiler)) == 0; }

/* ---------------------------------------------------------------------------------------- for Python */

static PyObject* known_call(PyObject* self, PyObject* args) {
  const char* kinds = PyBytes_AsString(PyTuple_GetItem(self, 0));
  if (PyTuple_Size(args) != (Py_ssize_t)strlen(kinds)) return not_implemented();
  return call_known(PyTuple_GetItem(self, 1), kinds, args);
}

static PyMethodDef known_function = {"known", known_call, METH_VARARGS, "The outputs, or NotImplemented."};

static PyObject* known_calls(PyObject* module, PyObject* args) {
  PyObject *kinds, *known;
  (void)module;
  if (!PyArg_ParseTuple(args, "SO!", &kinds, &PyDict_Type, &known)) return NULL;
  if (functions.exclude) return PyCFunction_New(&known_function, args);
  Py_RETURN_NONE;
}

static PyObject* layout_of(PyObject* module, PyObject* args) {
  layout l;
  const char* kinds;
  PyObject* values;
  (void)module;
  if (!PyArg_ParseTuple(args, "yO!", &kinds, &PyTuple_Type, &values)) return NULL;
  if (PyTuple_Size(values) == (Py_ssize_t)strlen(kinds) && put_inputs(&l, kinds, values)) return layout_bytes(&l);
  PyErr_Clear();
  Py_RETURN_NONE;
}

static PyObject* register_functions(PyObject* module, PyObject* args) {
  unsigned long long exclude, restore, keys, autograd, inference;
  PyObject *tensor, *alone;
  (void)module;
  if (functions.exclude) Py_RETURN_TRUE;
  if (!PyArg_ParseTuple(args, "KKKKKO!OOOOOO", &exclude, &restore, &keys, &autograd, &inference, &PyType_Type, &tensor,
                        &functions.no_overrides, &functions.profiler, &functions.device, &functions.use_count,
                        &functions.empty, &alone))
    return NULL;
  if (!torch_api) Py_RETURN_FALSE;
  Py_INCREF(args); /* for as long as the process lives */
  text_detach = PyUnicode_InternFromString("detach");
  text_storage = PyUnicode_InternFromString("untyped_storage");
  text_resizable = PyUnicode_InternFromString("resizable");
  text_address = PyUnicode_InternFromString("_cdata");
  text_enter = PyUnicode_InternFromString("__enter__");
  text_exit = PyUnicode_InternFromString("__exit__");
  text_weakref = PyUnicode_InternFromString("__weakref__");
  if (!text_detach || !text_storage || !text_resizable || !text_address || !text_enter || !text_exit || !text_weakref)
    return NULL;
  PyObject* storage = PyObject_CallMethodObjArgs(alone, text_storage, NULL);
  bool counted = count_holders(storage, &functions.uses, &functions.references);
  Py_XDECREF(storage);
  if (!counted) return NULL;
  functions.tensor = (PyTypeObject*)tensor;
  functions.keys = keys;
  functions.autograd = autograd;
  functions.inference = inference;
  functions.restore = (void (*)(void*))(uintptr_t)restore;
  functions.exclude = (void (*)(void*, uint64_t))(uintptr_t)exclude;
  Py_RETURN_TRUE;
}

#endif
