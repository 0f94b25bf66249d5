/* Calls with arrays of NumPy and torch without Python code: of kernels (kernel_calls.h), of ops (numpy_ops.h,
 * torch_operators.h) and of Python functions that carry ops out (torch_functions.h).
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

static long bypass; /* how many want calls to go the long way */

#include "kernel_calls.h"
#include "numpy_ops.h"
#include "torch_operators.h"

/* ----------------------------------------------------------------------------------------- module */

static PyObject* add_type(PyObject* type, int host) {
  if (types_known == MAX_TYPES) Py_RETURN_FALSE;
  Py_INCREF(type);
  types[types_known].type = (PyTypeObject*)type;
  types[types_known++].host = host;
  Py_RETURN_TRUE;
}

static PyObject* register_numpy(PyObject* module, PyObject* args) {
  PyObject *type, *api, *empty;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &type, &api, &empty)) return NULL;
  void** functions = PyCapsule_GetPointer(api, NULL);
  if (functions && !handler_capsule) {
    Py_INCREF(type);
    numpy.type = (PyTypeObject*)type;
    PyObject* capsule = PyCapsule_New(&handler, "mem_handler", NULL);
    if (capsule && try_handler(capsule, functions, empty)) handler_capsule = capsule;
    else Py_XDECREF(capsule);
  }
  PyErr_Clear();
  return add_type(type, NUMPY);
}

static PyObject* register_torch(PyObject* module, PyObject* args) {
  PyObject *tensors, *capsule;
  (void)module;
  if (torch_api) Py_RETURN_TRUE;
  if (!PyArg_ParseTuple(args, "O!O!OOOOOO!", &PyTuple_Type, &tensors, &PyType_Type, &torch_size, &capsule,
                        &torch_tracing, &torch_modes, &torch_overrides, &torch_recording, &PyDict_Type, &torch_forward))
    return NULL;
  Py_INCREF(args); /* for as long as the process lives */
  const dl_exchange* api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!api) return NULL;
  while (api && api->major != 1) api = api->older;
  if (!api || !api->tensor_from_object) Py_RETURN_FALSE;
  torch_api = api;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
    PyObject* added = add_type(PyTuple_GetItem(tensors, i), TORCH);
    Py_DECREF(added);
  }
  Py_RETURN_TRUE;
}

static PyObject* register_engine(PyObject* module, PyObject* args) {
  unsigned long long threads_now;
  (void)module;
  if (!PyArg_ParseTuple(args, "Ki", &threads_now, &fr_shared.few)) return NULL;
  fr_shared.threads_now = (int (*)(void))(uintptr_t)threads_now;
  Py_RETURN_NONE;
}

static PyObject* register_cuda(PyObject* module, PyObject* address) {
  (void)module;
  unsigned long long state = PyLong_AsUnsignedLongLong(address);
  if (PyErr_Occurred()) return NULL;
  if (!torch_api || !torch_api->current_work_stream) Py_RETURN_FALSE;
  cuda = (cuda_state*)(uintptr_t)state;
  Py_RETURN_TRUE;
}

static PyObject* change_bypass(PyObject* module, PyObject* by) {
  (void)module;
  long change = PyLong_AsLong(by);
  if (change == -1 && PyErr_Occurred()) return NULL;
  bypass += change;
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"register_numpy", register_numpy, METH_VARARGS,
     "register_numpy(type, array_api, empty)\n\nTake arrays of this very type."},
    {"numpy_guarded", numpy_guarded, METH_NOARGS, "Whether `numpy_new` makes arrays."},
    {"numpy_new", numpy_new, METH_VARARGS,
     "numpy_new(shape, dtype, bytes, zero)\n\nA new array between canaries."},
    {"numpy_outside", numpy_outside, METH_VARARGS,
     "numpy_outside(array, bytes)\n\nBytes past the end of such an array that were written to, or"
     " less\n0: before its start. 0 of any other array."},
    {"register_engine", register_engine, METH_VARARGS,
     "register_engine(threads_now, few)\n\nFor calls on the CPU: the address of what says how many threads there are,"
     " and\nhow many are few."},
    {"register_ops", register_ops, METH_O,
     "register_ops(dtypes)\n\nLet ops take NumPy's arrays of these dtypes."},
    {"kernel_calls", kernel_calls, METH_VARARGS,
     "kernel_calls(table, resolve)\n\nWhat calls a kernel, and what remembers its calls, given what `numpy_op` is given."},
    {"numpy_op", numpy_op, METH_VARARGS,
     "numpy_op(table, resolve)\n\nWhat calls an op, given the address of its table, and what gives the address of"
     " an\nentry for that of a request."},
    {"slack_put", slack_put, METH_VARARGS,
     "slack_put(address, bytes)\n\nPuts a canary behind memory of the C library's. How long it is."},
    {"slack_outside", slack_outside, METH_VARARGS,
     "slack_outside(address, bytes)\n\nBytes of it that were written to."},
    {"register_torch", register_torch, METH_VARARGS,
     "register_torch(types, size, exchange_api, tracing_state, dispatch_modes, function_modes,\n"
     "grad_enabled, forward_ad)\n\n"
     "Take tensors of these very types, while torch does nothing but compute."},
    {"register_functions", register_functions, METH_VARARGS,
     "register_functions(exclude, restore, keys, autograd, inference, tensor, no_overrides, profiler, device, use_count, empty, alone)\n\n"
     "Call Python functions that carry out ops below autograd and autocast: the addresses of\nwhat excludes dispatch"
     " keys, what ends that, and the keys; and a tensor whose memory nobody else has."},
    {"layout", layout_of, METH_VARARGS,
     "layout(kinds, values)\n\nWhat tells calls of functions apart, given a letter for each input. None of an unusual"
     " one."},
    {"known_calls", known_calls, METH_VARARGS,
     "known_calls(kinds, known)\n\nWhat makes calls whose layouts are keys of a dictionary: the function, whether"
     " outputs\nare its own, what makes outputs of unusual results, and the layout of each output; or a unit's plan,"
     " what\nmakes outputs and scratch, what raises errors, and what owns all that."},
    {"recorded_forward", recorded_forward, METH_VARARGS,
     "recorded_forward(function, kinds, known, inputs, outputs, constants)\n\n`forward` of an autograd.Function that"
     " calls an operator: the places of what its\nderivative reads, and of outputs without one."},
    {"operator", operator, METH_VARARGS,
     "operator(function, kinds, refused, known, apply)\n\nWhat calls an operator of torch, or what is known of such"
     " a call, or `apply` where\nautograd records it; gives NotImplemented where autograd is to see the call all the"
     " same, what\nis given is not what the letter of each argument says, or `refused` is a function that says True."},
    {"register_cuda", register_cuda, METH_O,
     "Take torch's tensors on NVIDIA's GPUs, too, given the address of a driver's state."},
    {"bypass", change_bypass, METH_O,
     "bypass(1) sends all calls the long way, until as many bypass(-1)."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_fastcall", NULL, -1,
                                               module_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fastcall(void) {
  PyObject* module = PyModule_Create(&module_definition);
  if (!module) return NULL;
  fr_shared.resolve = resolve_entry;
  text_requires_grad = PyUnicode_InternFromString("requires_grad");
  text_is_neg = PyUnicode_InternFromString("is_neg");
  text_level = PyUnicode_InternFromString("_current_level");
  if (!text_requires_grad || !text_is_neg || !text_level || !learn_names() ||
      PyModule_AddStringConstant(module, "DIGEST", FR_DIGEST)) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
