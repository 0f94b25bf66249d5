/* Calls of ops with NumPy's arrays, by the engine that torch's and MLX's calls have (op_calls.h). Included by
 * fastcall.c alone.
 *
 * What is out of the ordinary (other arrays, inputs that want a copy, errors before the launch) is answered with
 * NotImplemented: then ferrule/operators/call.py does it all.
 */
#ifndef FERRULE_NUMPY_OPS_H
#define FERRULE_NUMPY_OPS_H

#include "op_calls.h"

static PyObject* numpy_descr[FR_MAX_DTYPES]; /* by place in ferrule.dtypes.ALL */
static int numpy_dtypes;

/* One call under way. */
typedef struct {
  fr_call of; /* the first: `numpy_resolve` gets the address of its request */
  PyObject* resolve;
  int64_t strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  PyObject* output[FR_MAX_ARGUMENTS];
  void* memory[FR_MAX_ARGUMENTS];
  size_t bytes[FR_MAX_ARGUMENTS];
} numpy_call;

/* The entry for a request, or NULL and an exception. */
static fr_table_entry* numpy_resolve(fr_request* request) {
  numpy_call* c = (numpy_call*)((char*)request - offsetof(fr_call, request));
  PyObject* address = PyObject_CallFunction(c->resolve, "K", (unsigned long long)(uintptr_t)request);
  fr_table_entry* e = address ? PyLong_AsVoidPtr(address) : NULL;
  Py_XDECREF(address);
  return e;
}

/* An array that a kernel can read where it is. */
static bool numpy_read(numpy_call* c, int i, PyObject* value) {
  fr_rule_input* in = &c->of.input[i];
  const numpy_array* a = (const numpy_array*)value;
  int wanted = NUMPY_ALIGNED | (c->of.op->input[i].mutable_ ? NUMPY_WRITEABLE : 0);
  if (Py_TYPE(value) != numpy.type || (a->flags & wanted) != wanted || a->nd > FR_MAX_NDIM) return false;
  in->dtype = 0;
  while (in->dtype < numpy_dtypes && numpy_descr[in->dtype] != a->descr) in->dtype++;
  if (in->dtype == numpy_dtypes) return false;
  int64_t size = fr_shared.item_bytes[in->dtype];
  in->present = true;
  in->ndim = a->nd;
  in->sizes = (const int64_t*)a->dimensions;
  for (int d = 0; d < a->nd; d++) {
    if (a->strides[d] % size) return false;
    c->strides[i][d] = a->strides[d] / size;
  }
  c->of.strides[i] = c->strides[i];
  c->of.pointer[i] = a->data;
  return (uintptr_t)a->data % (uintptr_t)size == 0;
}

/* A Python number, as it is declared. */
static bool numpy_number(fr_call* c, int i, PyObject* value) {
  int32_t kind = c->op->input[i].kind;
  if (kind == INPUT_BOOL) return PyBool_Check(value) && fr_give_integer(c, i, value == Py_True);
  if (kind == INPUT_FLOAT && PyFloat_CheckExact(value)) return fr_give_float(c, i, PyFloat_AsDouble(value));
  if (!PyLong_CheckExact(value)) return false;
  if (kind == INPUT_FLOAT) {
    double number = PyLong_AsDouble(value);
    return (number != -1 || !PyErr_Occurred()) && fr_give_float(c, i, number);
  }
  long long number = PyLong_AsLongLong(value);
  return (number != -1 || !PyErr_Occurred()) && fr_give_integer(c, i, number);
}

/* The inputs, of which one at least is an array. */
static bool numpy_inputs(numpy_call* c, PyObject* const* args) {
  bool any = false;
  for (int i = 0; i < c->of.op->inputs; i++) {
    const fr_argument* argument = &c->of.op->input[i];
    if (argument->kind != INPUT_ARRAY) {
      if (!numpy_number(&c->of, i, args[i])) return false;
    } else if (args[i] == Py_None && argument->optional) {
      c->of.input[i].present = false;
      c->of.pointer[i] = NULL;
    } else if (numpy_read(c, i, args[i])) {
      any = true;
    } else {
      return false;
    }
  }
  return any;
}

/* Whether all inputs can be given to a body as they are. */
static bool numpy_as_they_are(const numpy_call* c, const fr_body* body) {
  uint64_t shared;
  if (!fr_inputs_apart(&c->of, &shared)) return false;
  for (int i = 0; i < c->of.op->inputs; i++)
    if (fr_wants_copy(&c->of, body, shared, i)) return false;
  return true;
}

static bool numpy_outputs(numpy_call* c, const fr_rule_result* result, bool zeroed) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    const fr_rule_output* out = &result->outputs[i];
    size_t bytes = fr_shared.item_bytes[out->dtype];
    bool empty = false;
    for (int d = 0; d < out->ndim; d++) empty = empty || !out->sizes[d];
    for (int d = 0; d < out->ndim && !empty; d++)
      if (__builtin_mul_overflow(bytes, (size_t)out->sizes[d], &bytes)) return false;
    c->bytes[i] = empty ? 0 : bytes;
    c->output[i] = numpy_make(numpy_descr[out->dtype], out->ndim, (const Py_ssize_t*)out->sizes, c->bytes[i], zeroed);
    if (!c->output[i]) return false;
    c->memory[i] = ((numpy_array*)c->output[i])->data;
  }
  return true;
}

/* Whether nothing was written beside an output. */
static bool numpy_intact(numpy_call* c) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    int outside = outside_block(c->memory[i], c->bytes[i]);
    if (!outside) continue;
    c->of.request.outside[0] = i;
    c->of.request.outside[1] = outside;
    return false;
  }
  return true;
}

/* False with an exception set. */
static bool numpy_launch(numpy_call* c, const fr_table_entry* e, const fr_body* body) {
  fr_cpu_job job;
  bool interrupt;
  fr_prepare_cpu(&c->of, e, body, c->memory, &job);
  int status = run_units(job.run, job.entry, &job.launch, job.units, job.limit, FR_SLICE, &interrupt);
  if (status == FR_OK && !numpy_intact(c)) status = FR_E_OUTSIDE;
  if (status == FR_OK || status == RAISED) return status == FR_OK;
  c->of.request.status = status;
  c->of.request.output_pointer = c->memory;
  if (numpy_resolve(&c->of.request)) PyErr_SetString(PyExc_SystemError, "a failed launch raised no error");
  if (interrupt) raise_interrupt();
  return false;
}

/* The outputs are made and written. False where Python must look at the call, or with an exception set. */
static bool numpy_carry_out(numpy_call* c, PyObject* const* args) {
  fr_rule_result result;
  if (!numpy_inputs(c, args) || fr_rule_bind(c->of.op->program, c->of.input, &result)) return false;
  c->of.request.device_type = CPU;
  int b = fr_choose(&c->of, &result);
  const fr_body* body = &c->of.op->body[b < 0 ? 0 : b];
  if (b < 0 || !fr_work_out(&c->of, body, &result) || fr_no_thread(&c->of) || !numpy_as_they_are(c, body)) return false;
  c->of.request.body = b;
  c->of.request.output = result.outputs;
  const fr_table_entry* e = fr_entry_for(&c->of, b, &result);
  return e && numpy_outputs(c, &result, body->zeroed) && numpy_launch(c, e, body);
}

static PyObject* numpy_returned(numpy_call* c) {
  int count = c->of.op->outputs;
  if (count == 1) return c->output[0];
  PyObject* outputs = count ? PyTuple_New(count) : Py_None;
  if (!count) Py_INCREF(outputs);
  for (int i = 0; i < count; i++) {
    if (outputs) PyTuple_SetItem(outputs, i, c->output[i]); /* steals it */
    else Py_DECREF(c->output[i]);
  }
  return outputs;
}

static PyObject* numpy_op_call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  numpy_call c;
  fr_op* op = PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
  if (count == op->inputs && !bypass) {
    fr_begin(&c.of, op, 0);
    c.resolve = PyTuple_GetItem(self, 1);
    memset(c.output, 0, sizeof c.output);
    if (numpy_carry_out(&c, args)) return numpy_returned(&c);
    PyObject *type, *value, *traceback; /* what a destructor does must not change the exception */
    PyErr_Fetch(&type, &value, &traceback);
    for (int i = 0; i < op->outputs; i++) Py_XDECREF(c.output[i]);
    PyErr_Restore(type, value, traceback);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
    PyErr_Clear(); /* an int that C has no room for */
  }
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

static PyMethodDef numpy_op_function = {"op", (PyCFunction)(void (*)(void))numpy_op_call, METH_FASTCALL,
                                        "The outputs, or NotImplemented where nothing was done."};

/* What Python's collector sees of the function is the tuple: the resolver holds what the table is of. */
static PyObject* numpy_op(PyObject* module, PyObject* args) {
  unsigned long long table;
  PyObject* resolve;
  (void)module;
  if (!PyArg_ParseTuple(args, "KO", &table, &resolve)) return NULL;
  PyObject* capsule = PyCapsule_New((void*)(uintptr_t)table, NULL, NULL);
  PyObject* self = capsule ? PyTuple_Pack(2, capsule, resolve) : NULL;
  PyObject* function = self ? PyCFunction_New(&numpy_op_function, self) : NULL;
  Py_XDECREF(capsule);
  Py_XDECREF(self);
  return function;
}

static PyObject* register_ops(PyObject* module, PyObject* args) {
  PyObject* dtypes;
  unsigned long long threads_now;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!Ki", &PyTuple_Type, &dtypes, &threads_now, &fr_shared.few)) return NULL;
  Py_ssize_t count = PyTuple_Size(dtypes);
  if (!handler_capsule || count > FR_MAX_DTYPES) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned char bytes;
    if (!PyArg_ParseTuple(PyTuple_GetItem(dtypes, i), "Ob", &numpy_descr[i], &bytes)) return NULL;
    Py_INCREF(numpy_descr[i]);
    fr_shared.item_bytes[i] = bytes;
  }
  numpy_dtypes = (int)count;
  fr_shared.threads_now = (int (*)(void))(uintptr_t)threads_now;
  fr_shared.resolve = numpy_resolve;
  Py_RETURN_TRUE;
}

#endif
