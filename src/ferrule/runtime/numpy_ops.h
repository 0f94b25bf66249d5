/* Calls of ops with NumPy's arrays, by the engine that torch's and MLX's calls have (op_calls.h). Included by
 * fastcall.c alone.
 *
 * What is out of the ordinary (other arrays, inputs that want a copy, errors before the launch) is answered with
 * NotImplemented: then ferrule/operators/call.py does it all.
 */
#ifndef FERRULE_NUMPY_OPS_H
#define FERRULE_NUMPY_OPS_H

#include "host_calls.h"

static PyObject* numpy_descr[FR_MAX_DTYPES]; /* by place in ferrule.dtypes.ALL */
static int numpy_dtypes;

/* An array that a kernel can read where it is. */
static bool numpy_read(host_call* c, int i, PyObject* value) {
  const numpy_array* a = (const numpy_array*)value;
  int wanted = NUMPY_ALIGNED | (c->of.op->input[i].mutable_ ? NUMPY_WRITEABLE : 0);
  if (Py_TYPE(value) != numpy.type || (a->flags & wanted) != wanted) return false;
  int32_t dtype = 0;
  while (dtype < numpy_dtypes && numpy_descr[dtype] != a->descr) dtype++;
  return dtype < numpy_dtypes && place_numpy(c, i, a) &&
         count_elements(c, i, dtype);
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
static bool numpy_inputs(host_call* c, PyObject* const* args) {
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

static bool numpy_outputs(host_call* c, bool zeroed) {
  for (int i = 0; i < c->of.op->outputs; i++) {
    if (!count_bytes(c, i)) return false;
    c->output[i] = numpy_output(c, i, numpy_descr[c->result.outputs[i].dtype], zeroed);
    if (!c->output[i] || !place_numpy_output(c, i)) return false;
  }
  return true;
}

/* The outputs are made and written. False where Python must look at the call, or with an exception set. */
static bool numpy_carry_out(host_call* c, PyObject* const* args) {
  fr_rule_result* result = &c->result;
  if (!numpy_inputs(c, args) || fr_rule_bind(c->of.op->program, c->of.input, result)) return false;
  c->host = NUMPY;
  c->of.request.device_type = CPU;
  int b = fr_choose(&c->of, result);
  const fr_body* body = &c->of.op->body[b < 0 ? 0 : b];
  if (b < 0 || !fr_work_out(&c->of, body, result) || fr_no_thread(&c->of) || !as_they_are(c, body)) return false;
  c->of.request.body = b;
  c->of.request.output = result->outputs;
  const fr_table_entry* e = fr_entry_for(&c->of, b, result);
  return e && numpy_outputs(c, body->zeroed) && launch_cpu(c, e, body);
}

static PyObject* numpy_returned(host_call* c) {
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
  host_call c;
  fr_op* op = PyCapsule_GetPointer(PyTuple_GetItem(self, 0), NULL);
  if (count == op->inputs && !bypass) {
    begin_call(&c, op, PyTuple_GetItem(self, 1));
    if (numpy_carry_out(&c, args)) return numpy_returned(&c);
    let_go(c.output, op->outputs);
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

static PyObject* register_ops(PyObject* module, PyObject* dtypes) {
  (void)module;
  Py_ssize_t count = PyTuple_Size(dtypes);
  if (count < 0) return NULL;
  if (!handler_capsule || count > FR_MAX_DTYPES) Py_RETURN_FALSE;
  for (numpy_dtypes = 0; numpy_dtypes < count; numpy_dtypes++) {
    numpy_descr[numpy_dtypes] = PyTuple_GetItem(dtypes, numpy_dtypes);
    Py_INCREF(numpy_descr[numpy_dtypes]);
  }
  Py_RETURN_TRUE;
}

#endif
