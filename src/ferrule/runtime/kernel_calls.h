/* Calls of kernels (level 0) with arrays of NumPy and torch, by the engine that ops have (op_calls.h): a kernel is an op
 * without a rule, whose sizes come with each call. Included by fastcall.c alone.
 *
 * What Python must be asked of but once, whatever the sizes, is a variant of the kernel: dtypes and ranks of arrays,
 * kinds of numbers, dtypes of outputs, template values, the fill. `remember` keeps what it came to. Whatever is not
 * known, or out of the ordinary, is answered with None: then ferrule/kernels/call.py does it all, and words the errors.
 *
 * Python's own code is slow to begin with when large arrays have pushed it out of the caches: 80 to
 * 100 microseconds a call, against 15 (NumPy) and 37 (torch) here.
 */
#ifndef FERRULE_KERNEL_CALLS_H
#define FERRULE_KERNEL_CALLS_H

#include "host_calls.h"
#include "torch_arrays.h"

enum { MAX_WORDS = 256, MAX_REFS = 96, MAX_TYPES = 16 };
enum { SLOTS = 64, PROBES = 4 };
enum { LARGE = 32 << 20 }; /* bytes of an output; _LARGE of ferrule/hosts/torch/arrays.py */

static struct {
  PyTypeObject* type;
  int host;
} types[MAX_TYPES]; /* the array types of which calls may be remembered */
static int types_known;

static cuda_state* cuda; /* once there is a driver */

/* One call under way. */
typedef struct {
  host_call at;
  int32_t place, device; /* of torch's tensors, as DLPack numbers them */
  bool failed;           /* Python raised what went wrong */
  int n, refs, holds;
  int64_t words[MAX_WORDS];         /* what tells variants apart */
  PyObject* ref[MAX_REFS];          /* what they point to; owned, since torch lets other threads run */
  PyObject* held[FR_MAX_ARGUMENTS]; /* the inputs, and then the outputs' shapes; owned */
} kernel_call;

/* ------------------------------------------------------------------------------------------- words */

static bool word(kernel_call* k, int64_t value) {
  if (k->n == MAX_WORDS) return false;
  k->words[k->n++] = value;
  return true;
}

/* An object that stands for itself; the variant keeps it alive, so no other gets its address. */
static bool identity(kernel_call* k, PyObject* object) {
  if (!object || k->refs == MAX_REFS) return false;
  Py_INCREF(object);
  k->ref[k->refs++] = object;
  return word(k, (int64_t)(intptr_t)object);
}

static void hold(kernel_call* k, PyObject* object) {
  Py_INCREF(object);
  k->held[k->holds++] = object;
}

static void drop(kernel_call* k) {
  let_go(k->ref, k->refs);
  let_go(k->held, k->holds);
}

/* An exact int, which fits. */
static bool integer(PyObject* value, int64_t* number) {
  if (!PyLong_CheckExact(value)) return false;
  *number = PyLong_AsLongLong(value);
  return *number != -1 || !PyErr_Occurred();
}

/* Subclasses may say of their elements what they like. */
static bool is_tuple(PyObject* value) {
  return value && (PyTuple_CheckExact(value) || Py_TYPE(value) == torch_size);
}

static Py_ssize_t length(PyObject* list) {
  if (list && PyList_CheckExact(list)) return PyList_Size(list);
  return is_tuple(list) ? PyTuple_Size(list) : -1;
}

/* Borrowed; NULL where the list has become shorter. */
static PyObject* item(PyObject* list, Py_ssize_t i) {
  return PyList_CheckExact(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
}

/* A number by its value, anything else for itself. */
static bool value_word(kernel_call* k, PyObject* value) {
  int64_t bits;
  if (value && PyFloat_CheckExact(value)) {
    double number = PyFloat_AsDouble(value);
    memcpy(&bits, &number, sizeof bits);
    return word(k, 'f') && word(k, bits);
  }
  if (value && PyLong_CheckExact(value)) return integer(value, &bits) && word(k, 'i') && word(k, bits);
  return word(k, 'o') && identity(k, value);
}

static bool template_pairs(kernel_call* k, PyObject* list) {
  Py_ssize_t n = list == Py_None ? 0 : length(list);
  if (n < 0 || !word(k, n)) return false;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject* pair = item(list, i);
    if (length(pair) != 2 || !identity(k, item(pair, 0)) || !value_word(k, item(pair, 1))) return false;
  }
  return true;
}

/* What outputs are filled with; an array without dims would be a number, too, but changes. */
static bool fill(kernel_call* k, PyObject* value) {
  bool plain = value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
  return plain && value_word(k, value);
}

/* ------------------------------------------------------------------------------- inputs and outputs */

static bool torch_input(kernel_call* k, int i, PyObject* tensor) {
  dl_tensor t;
  int grad = truth(PyObject_GetAttr(tensor, text_requires_grad));
  if (grad < 0 || (grad && truth(PyObject_CallObject(torch_recording, NULL)) != 0)) return false;
  if (!torch_facts(tensor, &t) || !t.data || t.code == DL_COMPLEX) return false;
  if (t.device_type != DL_CPU && (t.device_type != DL_CUDA || !cuda)) return false;
  if (k->place && (k->place != t.device_type || k->device != t.device_id)) return false;
  k->place = t.device_type;
  k->device = t.device_id;
  if (truth(PyObject_CallMethodObjArgs(tensor, text_is_neg, NULL)) != 0) return false;
  int64_t dtype = (int64_t)t.code << 24 | t.bits << 16 | t.lanes;
  return place_input(&k->at, i, t.data, t.ndim, t.shape, t.strides) && word(k, dtype << 32 | t.ndim) &&
         word(k, (int64_t)t.device_type << 32 | t.device_id);
}

static bool numpy_input(kernel_call* k, int i, PyObject* object) {
  const numpy_array* a = (const numpy_array*)object;
  return (a->flags & NUMPY_ALIGNED) && place_numpy(&k->at, i, a) &&
         identity(k, a->descr) && word(k, a->nd);
}

/* A Python number, which gets the type that ferrule.hosts.scalar gives it. */
static bool scalar_input(kernel_call* k, int i, PyObject* value) {
  uint64_t* bytes = &k->at.of.value[i];
  int64_t number = value == Py_True;
  place_input(&k->at, i, bytes, 0, NULL, NULL);
  if (PyFloat_CheckExact(value)) {
    fr_float_bytes(FR_FLOAT32, PyFloat_AsDouble(value), bytes);
    return word(k, 'f');
  }
  bool is_bool = value == Py_True || value == Py_False;
  if (!is_bool && !integer(value, &number)) return false;
  *bytes = (uint64_t)number; /* the low bytes come first */
  return word(k, is_bool ? 'b' : number == (int32_t)number ? 'i' : 'l');
}

static bool input(kernel_call* k, int i, PyObject* value) {
  if (!value) return false;
  PyTypeObject* type = Py_TYPE(value);
  hold(k, value);
  for (int j = 0; j < types_known; j++) {
    if (types[j].type != type) continue;
    int host = types[j].host;
    if (k->at.host && k->at.host != host) return false;
    if (!k->at.host && host == TORCH && !torch_is_plain()) return false;
    k->at.host = host;
    return host == TORCH ? torch_input(k, i, value) : numpy_input(k, i, value);
  }
  return scalar_input(k, i, value);
}

static bool output(kernel_call* k, int i, PyObject* shape, PyObject* dtype) {
  fr_rule_output* out = &k->at.result.outputs[i];
  if (!is_tuple(shape)) return false;
  Py_ssize_t n = PyTuple_Size(shape);
  if (n > FR_MAX_NDIM) return false;
  hold(k, shape);
  out->ndim = (int32_t)n;
  for (int32_t d = 0; d < out->ndim; d++)
    if (!integer(PyTuple_GetItem(shape, d), &out->sizes[d]) || out->sizes[d] < 0) return false;
  return identity(k, dtype);
}

/* Three sizes from 1 on. */
static bool axes(PyObject* tuple, uint32_t* sizes) {
  int64_t size;
  if (!is_tuple(tuple) || PyTuple_Size(tuple) != 3) return false;
  for (int i = 0; i < 3; i++) {
    if (!integer(PyTuple_GetItem(tuple, i), &size) || size < 1 || size > INT32_MAX) return false;
    sizes[i] = (uint32_t)size;
  }
  return true;
}

/* The grid, and the threadgroup where it may be so large. A CUDA body's is as long as the grid before it is looked at,
 * and there are fewer blocks along y and z. */
static bool launch_sizes(kernel_call* k, PyObject* grid, PyObject* threadgroup) {
  fr_call* c = &k->at.of;
  uint32_t* group = c->grid + 3;
  bool in_cuda = !(c->op->body[0].devices & CPU);
  if (!axes(grid, c->grid) || !axes(threadgroup, group)) return false;
  if (!in_cuda && !fr_group_fits(group)) return false;
  fr_clamp_group(c->grid);
  if (!in_cuda) return true;
  for (int i = 1; i < 3; i++)
    if ((c->grid[i] + group[i] - 1) / group[i] > 65535) return false;
  return fr_group_fits(group) && group[2] <= 64;
}

/* Reads a call: inputs, output_shapes, output_dtypes, grid, threadgroup, template and init_value, in this order. False
 * where it is unusual, perhaps with an exception set. */
static bool read_call(kernel_call* k, fr_op* op, PyObject* resolve, PyObject* const* args) {
  begin_call(&k->at, op, resolve);
  k->n = k->refs = k->holds = k->at.host = k->place = k->device = 0;
  k->failed = false;
  if (length(args[0]) != op->inputs || length(args[1]) != op->outputs || length(args[2]) != op->outputs) return false;
  for (int i = 0; i < op->inputs; i++)
    if (!input(k, i, item(args[0], i))) return false;
  if (!k->at.host || !word(k, k->at.host)) return false;
  for (int i = 0; i < op->outputs; i++)
    if (!output(k, i, item(args[1], i), item(args[2], i))) return false;
  return launch_sizes(k, args[3], args[4]) && template_pairs(k, args[5]) && fill(k, args[6]);
}

/* ---------------------------------------------------------------------------------------- variants */

/* How an output is made: a Maker of ferrule/hosts/protocol.py. */
typedef struct {
  PyObject *function, *arguments, *keywords, *large;
  int zeroed, guarded;
} maker;

typedef struct {
  int owners; /* what remembers it, and the calls that are under way */
  int n;
  int64_t words[MAX_WORDS];
  PyObject* kept; /* a tuple of what the words point to, and of the makers */
  long long number; /* of the program, as Python knows it */
  uint8_t dtype[FR_MAX_ARGUMENTS]; /* places of inputs' and then of outputs' in ferrule.dtypes.ALL */
  maker output[FR_MAX_ARGUMENTS];
} variant;

static void release(variant* v) {
  if (--v->owners) return;
  Py_XDECREF(v->kept);
  PyMem_Free(v);
}

/* What is remembered of a kernel. */
typedef struct {
  fr_op* op; /* lives as long as what `resolve` is a method of */
  PyObject* resolve;
  unsigned turn;
  variant* slot[SLOTS];
} kernel_memory;

static variant* find(kernel_memory* self, const kernel_call* k) {
  uint64_t at = fr_hash(k->words, k->n);
  for (int i = 0; i < PROBES; i++) {
    variant* v = self->slot[(at + (uint64_t)i) % SLOTS];
    if (v && v->n == k->n && !memcmp(v->words, k->words, sizeof *k->words * (size_t)k->n)) return v;
  }
  return NULL;
}

/* ------------------------------------------------------------------------------------------ a call */

/* Whether the inputs, whose dtypes are known now, can be given to the kernel. */
static bool place_inputs(kernel_call* k, const variant* v) {
  fr_call* c = &k->at.of;
  for (int i = 0; i < c->op->inputs; i++) {
    fr_rule_input* in = &c->input[i];
    bool in_bytes = k->at.host == NUMPY && c->pointer[i] != &c->value[i];
    if (in_bytes && !count_elements(&k->at, i, v->dtype[i])) return false;
    in->dtype = v->dtype[i];
    for (int d = 0; c->op->body[0].described >> i & 1 && d < in->ndim; d++)
      if (in->sizes[d] > INT32_MAX) return false; /* shapes hold int32 */
  }
  return as_they_are(&k->at, &c->op->body[0]);
}

/* An output that a function makes. Torch takes sizes one by one faster than as a tuple, and that than as its own. */
static PyObject* ask_for_output(PyObject* shape, const maker* m, bool large) {
  bool by_keywords = m->keywords != Py_None && !large;
  if (by_keywords && PyTuple_Size(shape)) return PyObject_Call(m->function, shape, m->keywords);
  PyObject* sizes = PySequence_Tuple(shape);
  PyObject* first = sizes ? PyTuple_Pack(1, sizes) : NULL;
  PyObject* all = first && !by_keywords ? PySequence_Concat(first, m->arguments) : NULL;
  PyObject* output = NULL;
  if (all) output = PyObject_Call(large ? m->large : m->function, all, NULL);
  else if (first && by_keywords) output = PyObject_Call(m->function, first, m->keywords);
  Py_XDECREF(sizes);
  Py_XDECREF(first);
  Py_XDECREF(all);
  return output;
}

/* Where a tensor lies that was made. False where torch gave another than was asked for. */
static bool place_torch_output(kernel_call* k, int i, const maker* m, bool large) {
  dl_tensor t;
  size_t bytes = k->at.bytes[i];
  if (!torch_facts(k->at.output[i], &t) || t.device_type != k->place || t.device_id != k->device) return false;
  k->at.memory[i] = t.data;
  if (bytes && !t.data) return false;
  if (k->place == DL_CPU && m->zeroed && bytes && !large) memset(t.data, 0, bytes);
  k->at.guard[i] = m->guarded && !large ? put_slack(t.data, bytes) : 0;
  return true;
}

static bool make_outputs(kernel_call* k, const variant* v) {
  host_call* c = &k->at;
  for (int i = 0; i < c->of.op->outputs; i++) {
    const maker* m = &v->output[i];
    int at = c->of.op->inputs + i;
    c->result.outputs[i].dtype = v->dtype[at];
    if (!count_bytes(c, i)) return false;
    bool large = m->large != Py_None && c->bytes[i] >= LARGE;
    c->output[i] = m->function == Py_None ? numpy_output(c, i, PyTuple_GetItem(m->arguments, 0), m->zeroed)
                                          : ask_for_output(k->held[at], m, large);
    if (!c->output[i] || !(c->host == TORCH ? place_torch_output(k, i, m, large) : place_numpy_output(c, i))) return false;
  }
  return true;
}

/* Whether all arrays begin where CUDA's texts for aligned ones want them; numbers and arrays without dims may begin
 * anywhere. */
static bool is_aligned(const host_call* c) {
  bool aligned = true;
  for (int i = 0; i < c->of.op->inputs; i++)
    aligned = aligned && (!c->of.input[i].ndim || (uintptr_t)c->of.pointer[i] % 16 == 0);
  for (int i = 0; i < c->of.op->outputs; i++) aligned = aligned && (uintptr_t)c->memory[i] % 16 == 0;
  return aligned;
}

/* False with an exception set. */
static bool launch_gpu(kernel_call* k, const variant* v, fr_table_entry* e) {
  host_call* c = &k->at;
  fr_gpu_job job;
  void* stream = NULL;
  uint64_t zeroed[FR_MAX_ARGUMENTS];
  int status;
  for (int i = 0; i < c->of.op->outputs; i++) zeroed[i] = v->output[i].zeroed ? c->bytes[i] : 0;
  fr_prepare_gpu(&c->of, e, &c->of.op->body[0], &c->result, c->memory, &job);
  if (torch_api->current_work_stream(DL_CUDA, k->device, &stream)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch does not tell its stream");
    return false;
  }
  Py_BEGIN_ALLOW_THREADS; /* it waits where a thousand launches are under way */
  status = cuda_start(cuda, &e->call, stream, c->of.op->outputs, c->memory, zeroed, job.arguments);
  Py_END_ALLOW_THREADS;
  if (status) raise_status(c, status);
  return !status;
}

/* The outputs are made and written. False where Python must do it, or with an exception set. */
static bool run_variant(kernel_call* k, const variant* v) {
  fr_call* c = &k->at.of;
  bool on_gpu = k->place == DL_CUDA;
  if (on_gpu && cuda->forked) return false;
  if (!place_inputs(k, v) || !make_outputs(k, v)) return false;
  c->request.device_type = on_gpu ? CUDA : CPU;
  c->request.device = on_gpu ? k->device : 0;
  c->request.aligned = on_gpu && is_aligned(&k->at);
  c->request.body = 0;
  c->request.output = k->at.result.outputs;
  c->request.grid = c->grid;
  c->request.template_value = c->template_value;
  c->template_value[0] = v->number;
  fr_table_entry* e = fr_entry_for(c, 0, &k->at.result);
  k->failed = !e || !(on_gpu ? launch_gpu(k, v, e) : launch_cpu(&k->at, e, &c->op->body[0]));
  return !k->failed;
}

/* Whether the exception that is set is of a class of torch's own: of a GPU without memory, or broken. */
static bool raised_by_torch(void) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* module = PyObject_GetAttrString(type, "__module__");
  bool own = module && PyUnicode_Check(module) && !PyUnicode_CompareWithASCIIString(module, "torch");
  Py_XDECREF(module);
  PyErr_Restore(type, value, traceback);
  return own;
}

/* Whether Python is to do it, which words what went wrong. Other exceptions come from a signal's handler or another
 * thread, and are the caller's. */
static bool is_for_python(void) {
  PyObject* type = PyErr_Occurred(); /* borrowed */
  if (type && type != PyExc_TypeError && type != PyExc_ValueError && type != PyExc_RuntimeError &&
      type != PyExc_OverflowError && type != PyExc_IndexError && type != PyExc_BufferError &&
      !PyErr_ExceptionMatches(PyExc_MemoryError) && !raised_by_torch())
    return false;
  PyErr_Clear();
  return true;
}

static PyObject* listed_outputs(host_call* c) {
  int count = c->of.op->outputs;
  PyObject* outputs = PyList_New(count);
  for (int i = 0; outputs && i < count; i++) {
    PyList_SetItem(outputs, i, c->output[i]); /* steals it */
    c->output[i] = NULL;
  }
  return outputs;
}

static PyObject* kernel_call_again(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  kernel_memory* self = PyCapsule_GetPointer(capsule, NULL);
  kernel_call k;
  PyObject* outputs = NULL;
  if (count != 7) {
    PyErr_Format(PyExc_TypeError, "call: got %zd arguments, expected 7", count);
    return NULL;
  }
  if (bypass) Py_RETURN_NONE;
  variant* v = read_call(&k, self->op, self->resolve, args) ? find(self, &k) : NULL;
  if (v) {
    v->owners++; /* making outputs and running let others in, who may replace it */
    if (run_variant(&k, v)) outputs = listed_outputs(&k.at);
    let_go(k.at.output, self->op->outputs);
    release(v);
  }
  drop(&k);
  if (outputs || k.failed || !is_for_python()) return outputs;
  Py_RETURN_NONE;
}

/* A variant of a call's words, whose outputs `makers` make. NULL with an exception set. */
static variant* new_variant(kernel_call* k, long long number, const char* dtypes, PyObject* makers) {
  const fr_op* op = k->at.of.op;
  PyObject* kept = PyTuple_New(k->refs + 1);
  variant* v = PyMem_Calloc(1, sizeof *v);
  bool good = kept && v;
  for (int i = 0; good && i < op->outputs; i++) {
    maker* m = &v->output[i];
    good = PyArg_ParseTuple(PyTuple_GetItem(makers, i), "OO!OppO", &m->function, &PyTuple_Type, &m->arguments,
                            &m->keywords, &m->zeroed, &m->guarded, &m->large);
  }
  if (!good) {
    Py_XDECREF(kept);
    PyMem_Free(v);
    return PyErr_Occurred() ? NULL : (variant*)PyErr_NoMemory();
  }
  Py_INCREF(makers);
  PyTuple_SetItem(kept, k->refs, makers);
  while (k->refs) {
    k->refs--;
    PyTuple_SetItem(kept, k->refs, k->ref[k->refs]); /* steals it */
  }
  v->owners = 1;
  v->kept = kept;
  v->number = number;
  memcpy(v->dtype, dtypes, (size_t)(op->inputs + op->outputs));
  memcpy(v->words, k->words, sizeof *k->words * (size_t)k->n);
  v->n = k->n;
  return v;
}

static void keep(kernel_memory* self, variant* v) {
  uint64_t at = fr_hash(v->words, v->n);
  variant** place = &self->slot[(at + self->turn++ % PROBES) % SLOTS];
  for (int i = PROBES; i--;) {
    variant** probe = &self->slot[(at + (uint64_t)i) % SLOTS];
    if (!*probe) place = probe;
  }
  variant* old = *place;
  *place = v;
  if (old) release(old);
}

static PyObject* remember_kernel_call(PyObject* capsule, PyObject* args) {
  kernel_memory* self = PyCapsule_GetPointer(capsule, NULL);
  kernel_call k;
  PyObject *arguments[7], *makers;
  PyObject** a = arguments;
  int on_gpu;
  long long number;
  const char* dtypes;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "(OOOOOOO)pLy#O!", &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &on_gpu, &number,
                        &dtypes, &count, &PyTuple_Type, &makers))
    return NULL;
  if (count != self->op->inputs + self->op->outputs || PyTuple_Size(makers) != self->op->outputs) {
    PyErr_SetString(PyExc_ValueError, "remember: expected a dtype for each input and output, and makers");
    return NULL;
  }
  bool usual = read_call(&k, self->op, self->resolve, arguments) && (k.place == DL_CUDA) == on_gpu;
  variant* v = usual && !find(self, &k) ? new_variant(&k, number, dtypes, makers) : NULL;
  if (v) keep(self, v);
  drop(&k);
  if (PyErr_Occurred() && (usual || !is_for_python())) return NULL;
  return PyBool_FromLong(usual);
}

static PyMethodDef kernel_functions[] = {
    {"call", (PyCFunction)(void (*)(void))kernel_call_again, METH_FASTCALL,
     "call(inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value)\n\n"
     "The outputs, where such a call is known; else None, and nothing was done."},
    {"remember", remember_kernel_call, METH_VARARGS,
     "remember(call, on_gpu, number, dtypes, makers)\n\nKeep what such calls come to: the number of the program, the"
     " places of the dtypes of\ninputs and outputs, and how each output is made. False where they cannot be remembered."}};

static void forget_kernel(PyObject* capsule) {
  kernel_memory* self = PyCapsule_GetPointer(capsule, NULL);
  for (int i = 0; i < SLOTS; i++)
    if (self->slot[i]) release(self->slot[i]);
  Py_DECREF(self->resolve);
  PyMem_Free(self);
}

static PyObject* kernel_calls(PyObject* module, PyObject* args) {
  unsigned long long table;
  PyObject* resolve;
  (void)module;
  if (!PyArg_ParseTuple(args, "KO", &table, &resolve)) return NULL;
  kernel_memory* self = PyMem_Calloc(1, sizeof *self);
  if (!self) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(self, NULL, forget_kernel);
  if (!capsule) {
    PyMem_Free(self);
    return NULL;
  }
  Py_INCREF(resolve);
  self->op = (fr_op*)(uintptr_t)table;
  self->resolve = resolve;
  PyObject* functions = Py_BuildValue("NN", PyCFunction_New(&kernel_functions[0], capsule),
                                      PyCFunction_New(&kernel_functions[1], capsule));
  Py_DECREF(capsule);
  return functions;
}

#endif
