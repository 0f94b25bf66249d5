/* Calls of a kernel that are the same as one before, but for their arrays, without Python code.
 *
 * A table belongs to one kernel. `remember` keeps, under all that decides a call (the arrays' types,
 * dtypes, shapes and strides, and every other argument), what ferrule.call found out about it; `call`
 * looks it up, makes the outputs and launches. Whatever is not known, or out of the ordinary, is
 * answered with None: then ferrule.call does it all, and words the errors.
 *
 * Python's own code is slow to begin with when large arrays have pushed it out of the caches: 80 to
 * 100 microseconds a call, against 15 (NumPy) and 37 (torch) here.
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

#include "canary.h"
#include "cuda_launch.h"
#include "numpy_arrays.h"
#include "runtime.h"

#ifndef FR_DIGEST
#define FR_DIGEST ""
#endif

enum { MAX_WORDS = 256, MAX_REFS = 64, MAX_BUFFERS = 32, MAX_BLOCK = 2048, MAX_TYPES = 16 };
enum { SLOTS = 64, PROBES = 4 };
enum { TORCH = 1, NUMPY = 2 };

/* --------------------------------------------------------------------- arrays, as their ABIs say */

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

static struct {
  PyTypeObject* type;
  int host;
} types[MAX_TYPES]; /* the array types of which calls may be remembered */
static int types_known;

static const dl_exchange* torch_api;
static PyTypeObject* torch_size; /* a tuple of ints, too */
static PyObject *torch_tracing, *torch_modes, *torch_overrides, *torch_recording; /* functions */
static PyObject* torch_forward;                                                   /* a dict */
static PyObject *text_requires_grad, *text_is_neg, *text_level;
static long bypass; /* how many want calls to go the long way */

static int outside_slack(const char* memory, size_t bytes) {
  size_t slack = fr_slack(memory, bytes);
  return slack ? fr_past_end(memory + bytes, slack) : 0;
}

static PyObject* slack_put(PyObject* module, PyObject* args) {
  unsigned long long address;
  Py_ssize_t bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
  char* memory = (char*)(uintptr_t)address;
  size_t slack = fr_slack(memory, (size_t)bytes);
  if (slack) fr_put_canary(memory + bytes, slack);
  return PyLong_FromSize_t(slack);
}

static PyObject* slack_outside(PyObject* module, PyObject* args) {
  unsigned long long address;
  Py_ssize_t bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
  return PyLong_FromLong(outside_slack((char*)(uintptr_t)address, (size_t)bytes));
}

/* ------------------------------------------------------------------------------------ NVIDIA's GPUs */

static cuda_state* cuda; /* once there is a driver */

/* Starts what a block of ferrule/devices/cuda/program.py says. */
static int launch_cuda(char* block, void* stream, int arrays, void* const* array,
                       const uint64_t* zeroed) {
  cuda_call c;
  memcpy(&c, block, sizeof c);
  return cuda_start(cuda, &c, stream, arrays, array, zeroed, (void**)(block + c.table));
}

/* ------------------------------------------------------------------------------------------- keys */

typedef struct {
  int n, refs, buffers, host;
  int32_t device_type, device; /* of torch's tensors */
  bool contiguous; /* the kernel wants row-contiguous inputs */
  bool failed;     /* the launch did */
  uint64_t words[MAX_WORDS];
  PyObject* ref[MAX_REFS]; /* what the words point to; owned, since torch lets other threads run */
  void* pointer[MAX_BUFFERS];
  PyObject* array[MAX_BUFFERS]; /* the inputs, owned */
  int arrays;
  union {
    int32_t i32;
    int64_t i64;
    float f32;
    bool b;
  } scalar[MAX_BUFFERS];
} call_key;

static bool word(call_key* k, uint64_t value) {
  if (k->n == MAX_WORDS) return false;
  k->words[k->n++] = value;
  return true;
}

/* An object that stands for itself; the entry keeps it alive, so no other gets its address. */
static bool identity(call_key* k, PyObject* object) {
  if (!object || k->refs == MAX_REFS) return false;
  Py_INCREF(object);
  k->ref[k->refs++] = object;
  return word(k, (uint64_t)(uintptr_t)object);
}

static bool sizes(call_key* k, int n, const int64_t* values) {
  for (int i = 0; i < n; i++)
    if (!word(k, (uint64_t)values[i])) return false;
  return true;
}

static bool integer(call_key* k, PyObject* value) {
  if (!PyLong_CheckExact(value)) return false;
  long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return false;
  return word(k, (uint64_t)number);
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

static bool integers(call_key* k, PyObject* tuple) {
  if (!is_tuple(tuple)) return false;
  Py_ssize_t n = PyTuple_Size(tuple);
  if (!word(k, (uint64_t)n)) return false;
  for (Py_ssize_t i = 0; i < n; i++)
    if (!integer(k, PyTuple_GetItem(tuple, i))) return false;
  return true;
}

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

static bool torch_input(call_key* k, int i, PyObject* tensor) {
  dl_tensor t;
  int grad = truth(PyObject_GetAttr(tensor, text_requires_grad));
  if (grad < 0 || (grad && truth(PyObject_CallObject(torch_recording, NULL)) != 0)) return false;
  if (!torch_facts(tensor, &t) || !t.data || t.code == DL_COMPLEX) return false;
  if (t.device_type != DL_CPU && (t.device_type != DL_CUDA || !cuda)) return false;
  if (k->device_type && (k->device_type != t.device_type || k->device != t.device_id)) return false;
  k->device_type = t.device_type;
  k->device = t.device_id;
  if (truth(PyObject_CallMethodObjArgs(tensor, text_is_neg, NULL)) != 0) return false;
  if (k->contiguous) {
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; d--) {
      if (t.shape[d] != 1 && t.strides[d] != step) return false;
      step *= t.shape[d];
    }
  }
  k->pointer[i] = t.data;
  uint64_t dtype = (uint64_t)t.code << 24 | (uint64_t)t.bits << 16 | t.lanes;
  uint64_t place = (uint64_t)t.device_type << 32 | (uint32_t)t.device_id;
  return word(k, dtype << 32 | (uint32_t)t.ndim) && word(k, place) && sizes(k, t.ndim, t.shape) &&
         sizes(k, t.ndim, t.strides);
}

static bool numpy_input(call_key* k, int i, PyObject* object) {
  numpy_array* a = (numpy_array*)object;
  int wanted = NUMPY_ALIGNED | (k->contiguous ? NUMPY_C_CONTIGUOUS : 0);
  if ((a->flags & wanted) != wanted) return false;
  k->pointer[i] = a->data;
  if (!identity(k, a->descr) || !word(k, (uint64_t)a->nd)) return false;
  for (int d = 0; d < a->nd; d++)
    if (!word(k, (uint64_t)a->dimensions[d]) || !word(k, (uint64_t)a->strides[d])) return false;
  return true;
}

/* A Python scalar, which gets the type that ferrule.hosts.scalar gives it. */
static bool scalar_input(call_key* k, int i, PyObject* value) {
  k->pointer[i] = &k->scalar[i];
  if (PyFloat_CheckExact(value)) {
    k->scalar[i].f32 = (float)PyFloat_AsDouble(value);
    return word(k, 'f');
  }
  if (value == Py_True || value == Py_False) {
    k->scalar[i].b = value == Py_True;
    return word(k, 'b');
  }
  if (!PyLong_CheckExact(value)) return false;
  long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return false;
  if (number >= INT32_MIN && number <= INT32_MAX) {
    k->scalar[i].i32 = (int32_t)number;
    return word(k, 'i');
  }
  k->scalar[i].i64 = number;
  return word(k, 'l');
}

static bool input(call_key* k, int i, PyObject* value) {
  if (!value) return false;
  PyTypeObject* type = Py_TYPE(value);
  Py_INCREF(value);
  k->array[k->arrays++] = value;
  for (int j = 0; j < types_known; j++) {
    if (types[j].type != type) continue;
    if (k->host && k->host != types[j].host) return false;
    if (!k->host && types[j].host == TORCH && !torch_is_plain()) return false;
    k->host = types[j].host;
    if (!word(k, (uint64_t)(uintptr_t)type)) return false;
    return k->host == TORCH ? torch_input(k, i, value) : numpy_input(k, i, value);
  }
  return scalar_input(k, i, value);
}

static bool template_pairs(call_key* k, PyObject* list) {
  Py_ssize_t n = length(list);
  if (n < 0 || !word(k, (uint64_t)n)) return false;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject* pair = item(list, i);
    if (length(pair) != 2 || !identity(k, item(pair, 0))) return false;
    PyObject* value = item(pair, 1);
    bool plain = PyLong_CheckExact(value);
    if (!word(k, plain) || !(plain ? integer(k, value) : identity(k, value))) return false;
  }
  return true;
}

static bool fill(call_key* k, PyObject* value) {
  if (value == Py_None || value == Py_True || value == Py_False) return identity(k, value);
  if (PyLong_CheckExact(value)) return word(k, 'i') && integer(k, value);
  if (!PyFloat_CheckExact(value)) return false;
  double number = PyFloat_AsDouble(value);
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  return word(k, 'f') && word(k, bits);
}

/* What decides a call: inputs, output_shapes, output_dtypes, grid, threadgroup, template and
 * init_value, in this order. False where it is unusual, perhaps with an exception set. */
static bool make_key(call_key* k, PyObject* const* args, int inputs, int outputs, bool contiguous) {
  k->n = k->refs = k->arrays = k->host = k->device_type = k->device = 0;
  k->buffers = inputs + outputs;
  k->contiguous = contiguous;
  if (length(args[0]) != inputs || length(args[1]) != outputs || length(args[2]) != outputs)
    return false;
  for (int i = 0; i < inputs; i++)
    if (!input(k, i, item(args[0], i))) return false;
  if (!k->host) return false;
  for (int i = 0; i < outputs; i++)
    if (!integers(k, item(args[1], i)) || !identity(k, item(args[2], i))) return false;
  return integers(k, args[3]) && integers(k, args[4]) &&
         (args[5] == Py_None ? word(k, 'n') : template_pairs(k, args[5])) && fill(k, args[6]);
}

static void drop(call_key* k) {
  while (k->refs) Py_DECREF(k->ref[--k->refs]);
  while (k->arrays) Py_DECREF(k->array[--k->arrays]);
}

static uint64_t hash(const call_key* k) {
  uint64_t h = (uint64_t)k->n;
  for (int i = 0; i < k->n; i++) {
    h = (h ^ k->words[i]) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 29;
  }
  return h;
}

/* ---------------------------------------------------------------------------------------- entries */

typedef int (*run_function)(fr_entry, const void*, uint64_t, int, int64_t, fr_progress*);

typedef struct {
  int owners; /* the table, and the calls that are under way */
  int n, refs, relocations, block_bytes;
  uint64_t* words;
  PyObject** ref;
  PyObject* plan; /* keeps everything below alive */
  PyObject *outputs, *fail;
  run_function run;
  int (*threads_now)(void);
  fr_entry entry;
  uint64_t units;
  int64_t slice;
  int limit;
  int threads, few; /* with how many threads it was compiled; -1: for any number */
  int device;       /* an NVIDIA GPU; -1 is the CPU */
  uint32_t buffers_at;
  uint64_t zeroed[MAX_BUFFERS]; /* bytes of each array that a launch on a GPU fills with zeros first */
  uint64_t guarded[MAX_BUFFERS]; /* bytes of each output that canaries are beside; else 0 */
  uint32_t relocation[2 * MAX_BUFFERS + 4];
  uint32_t alignment[MAX_BUFFERS]; /* of each array, in bytes */
  char block[MAX_BLOCK];
} entry;

static void release(entry* e) {
  if (--e->owners) return;
  for (int i = 0; i < e->refs; i++) Py_DECREF(e->ref[i]);
  Py_XDECREF(e->plan);
  PyMem_Free(e->words);
  PyMem_Free(e->ref);
  PyMem_Free(e);
}

typedef struct {
  PyObject head;
  int inputs, outputs;
  bool contiguous;
  unsigned turn;
  entry* slot[SLOTS];
} table;

static entry* find(table* self, const call_key* k) {
  uint64_t at = hash(k);
  for (int i = 0; i < PROBES; i++) {
    entry* e = self->slot[(at + (uint64_t)i) % SLOTS];
    if (e && e->n == k->n && !memcmp(e->words, k->words, sizeof *k->words * (size_t)k->n)) return e;
  }
  return NULL;
}

static int threads_class(entry* e) {
  int threads = e->threads_now();
  return threads == 1 ? 1 : threads <= e->few ? e->few : 0;
}

/* Makes the outputs and notes their addresses; NULL where that fails. */
static PyObject* make_outputs(entry* e, call_key* k, int inputs, int outputs) {
  PyObject* list = PyList_New(outputs);
  for (int i = 0; list && i < outputs; i++) {
    PyObject* maker = PyTuple_GetItem(e->outputs, i);
    PyObject* keywords = PyTuple_GetItem(maker, 2);
    PyObject* made = PyObject_Call(PyTuple_GetItem(maker, 0), PyTuple_GetItem(maker, 1),
                                   keywords == Py_None ? NULL : keywords);
    bool good = made != NULL, nonempty = true;
    if (good && k->host == TORCH) {
      dl_tensor t;
      good = torch_facts(made, &t) && t.device_type == k->device_type && t.device_id == k->device;
      for (int d = 0; good && !t.data && d < t.ndim; d++)
        if (t.shape[d] == 0) t.data = &t, nonempty = false; /* nobody looks there */
      good = good && t.data;
      k->pointer[inputs + i] = t.data;
    } else if (good) {
      k->pointer[inputs + i] = ((numpy_array*)made)->data;
    }
    if (good && nonempty && (uintptr_t)k->pointer[inputs + i] % e->alignment[inputs + i]) good = false;
    if (good && k->host == TORCH && e->guarded[inputs + i]) {
      char* memory = k->pointer[inputs + i];
      size_t bytes = e->guarded[inputs + i], slack = fr_slack(memory, bytes);
      if (slack) fr_put_canary(memory + bytes, slack);
    }
    if (!good || PyList_SetItem(list, i, made)) { /* steals `made` */
      if (!good) Py_XDECREF(made);
      Py_CLEAR(list);
    }
  }
  return list;
}

/* Raises what a launch's status means. */
static void fail(entry* e, call_key* k, PyObject* outputs, int status) {
  Py_ssize_t inputs = k->buffers - PyList_Size(outputs);
  PyObject* given = PyList_New(inputs);
  for (Py_ssize_t i = 0; given && i < inputs; i++) {
    Py_INCREF(k->array[i]);
    PyList_SetItem(given, i, k->array[i]);
  }
  PyObject* code = given ? PyLong_FromLong(status) : NULL;
  PyObject* result = code ? PyObject_CallFunctionObjArgs(e->fail, code, given, outputs, NULL) : NULL;
  if (result) PyErr_SetString(PyExc_SystemError, "a failed launch raised no error");
  Py_XDECREF(result);
  Py_XDECREF(code);
  Py_XDECREF(given);
}

/* Whether the canaries of all outputs are as they were. */
static bool is_intact(const entry* e, const call_key* k) {
  for (int i = 0; i < k->buffers; i++) {
    const char* memory = k->pointer[i];
    size_t bytes = e->guarded[i];
    if (bytes && (k->host == TORCH ? outside_slack(memory, bytes) : outside_block(memory, bytes)))
      return false;
  }
  return true;
}

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

enum { RAISED = -2 };

/* Runs units until they are done; in between, Python sees its signals. RAISED where one of these ends the call by
 * an exception; a KeyboardInterrupt that comes twice gives the units up, and their error is raised first. */
static int run_units(run_function run, fr_entry code, const void* launch, uint64_t units, int limit, int64_t slice,
                     bool* interrupt) {
  fr_progress progress;
  int status;
  progress.parts = 0;
  *interrupt = false;
  do {
    Py_BEGIN_ALLOW_THREADS;
    status = run(code, launch, units, limit, slice, &progress);
    Py_END_ALLOW_THREADS;
    if (status == FR_OK || !PyErr_CheckSignals()) continue;
    *interrupt = status == FR_E_ABANDONED && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
    if (!*interrupt) return RAISED;
    PyErr_Clear();
  } while (status == FR_MORE);
  return status;
}

/* The launch itself. Returns -1 with an exception set, else 0. */
static int launch(entry* e, call_key* k, PyObject* outputs) {
  char block[MAX_BLOCK] __attribute__((aligned(16)));
  memcpy(block, e->block, (size_t)e->block_bytes);
  memcpy(block + e->buffers_at, k->pointer, sizeof(void*) * (size_t)k->buffers);
  for (int i = 0; i < e->relocations; i++) {
    uint64_t address;
    memcpy(&address, block + e->relocation[i], sizeof address);
    address += (uint64_t)(uintptr_t)block;
    memcpy(block + e->relocation[i], &address, sizeof address);
  }
  int status;
  if (e->device >= 0) {
    void* stream = NULL;
    for (int i = 0; i < k->buffers; i++) /* a Python scalar is passed by value */
      if (k->pointer[i] == &k->scalar[i])
        memcpy(block + e->buffers_at + 8 * i, &k->scalar[i], sizeof(void*));
    if (torch_api->current_work_stream(DL_CUDA, e->device, &stream)) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch does not tell its stream");
      return -1;
    }
    Py_BEGIN_ALLOW_THREADS; /* it waits where a thousand launches are under way */
    status = launch_cuda(block, stream, k->buffers, k->pointer, e->zeroed);
    Py_END_ALLOW_THREADS;
    if (status) fail(e, k, outputs, status);
    return status ? -1 : 0;
  }
  bool interrupt;
  status = run_units(e->run, e->entry, block, e->units, e->limit, e->slice, &interrupt);
  if (status == FR_OK && !is_intact(e, k)) status = FR_E_OUTSIDE;
  if (status == FR_OK || status == RAISED) return status == FR_OK ? 0 : -1;
  fail(e, k, outputs, status);
  if (interrupt) raise_interrupt();
  return -1;
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

/* None, for the long way, which words what went wrong. Other exceptions come from a signal's handler
 * or another thread, and are the caller's. */
static PyObject* unknown(void) {
  PyObject* type = PyErr_Occurred(); /* borrowed */
  if (type) {
    if (type != PyExc_TypeError && type != PyExc_ValueError && type != PyExc_RuntimeError &&
        type != PyExc_OverflowError && type != PyExc_IndexError && type != PyExc_BufferError &&
        !PyErr_ExceptionMatches(PyExc_MemoryError) && !raised_by_torch())
      return NULL;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

/* The outputs of a call whose key is made; NULL with an exception set, or without where it is not
 * known. */
static PyObject* repeat(table* self, call_key* k) {
  entry* e = find(self, k);
  if (!e || (e->threads >= 0 && threads_class(e) != e->threads)) return NULL;
  if (e->device >= 0 && (k->device != e->device || cuda->forked)) return NULL;
  for (int i = 0; i < self->inputs; i++)
    if ((uintptr_t)k->pointer[i] % e->alignment[i]) return NULL;
  e->owners++; /* making outputs and running let others in, who may replace it */
  PyObject* outputs = make_outputs(e, k, self->inputs, self->outputs);
  if (outputs && launch(e, k, outputs)) {
    Py_CLEAR(outputs);
    k->failed = true;
  }
  release(e);
  return outputs;
}

static PyObject* table_call(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  table* self = (table*)object;
  call_key k;
  PyObject* outputs = NULL;
  if (count != 7) {
    PyErr_Format(PyExc_TypeError, "call: got %zd arguments, expected 7", count);
    return NULL;
  }
  if (bypass) Py_RETURN_NONE;
  k.failed = false;
  if (make_key(&k, args, self->inputs, self->outputs, self->contiguous)) outputs = repeat(self, &k);
  if (!outputs && !k.failed) outputs = unknown();
  PyObject *type, *value, *traceback; /* what a destructor does must not change the exception */
  PyErr_Fetch(&type, &value, &traceback);
  drop(&k);
  PyErr_Restore(type, value, traceback);
  return outputs;
}

static bool read_words(PyObject* tuple, uint32_t* out, int most, int* count) {
  Py_ssize_t n = PyTuple_Size(tuple);
  if (n < 0 || n > most) return false;
  for (Py_ssize_t i = 0; i < n; i++)
    out[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(tuple, i));
  *count = (int)n;
  return !PyErr_Occurred();
}

/* How many bytes of each output are zeroed, and guarded, as the makers of ferrule.hosts say. */
static bool read_makers(entry* e, int inputs) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(e->outputs) && inputs + i < MAX_BUFFERS; i++) {
    PyObject* maker = PyTuple_GetItem(e->outputs, i);
    PyObject *zeroed = PyTuple_GetItem(maker, 3), *guarded = PyTuple_GetItem(maker, 4);
    e->zeroed[inputs + i] = zeroed ? PyLong_AsUnsignedLongLong(zeroed) : 0;
    e->guarded[inputs + i] = guarded ? PyLong_AsUnsignedLongLong(guarded) : 0;
  }
  return !PyErr_Occurred();
}

/* The plan of ferrule.call: (outputs, fail, alignments, block, relocations, buffers_at, entry, units,
 * limit, threads, few, run, threads_now, slice, device, …). */
static bool read_plan(entry* e, PyObject* plan, int inputs, int outputs) {
  PyObject *alignments, *relocations;
  const char* block;
  Py_ssize_t bytes;
  unsigned long long code, units, run, threads_now;
  long long slice;
  int sizes_read;
  PyObject* rest;
  if (!PyArg_ParseTuple(plan, "O!OO!y#O!IKKiiiKKLiO", &PyTuple_Type, &e->outputs, &e->fail,
                        &PyTuple_Type, &alignments, &block, &bytes, &PyTuple_Type, &relocations,
                        &e->buffers_at, &code, &units, &e->limit, &e->threads, &e->few, &run,
                        &threads_now, &slice, &e->device, &rest))
    return false;
  if (bytes > MAX_BLOCK ||
      !read_words(alignments, e->alignment, MAX_BUFFERS, &sizes_read) ||
      !read_words(relocations, e->relocation, 2 * MAX_BUFFERS + 4, &e->relocations) ||
      sizes_read != inputs + outputs || PyTuple_Size(e->outputs) != outputs || !read_makers(e, inputs))
    return false;
  if (e->device >= 0 && (!cuda || bytes < (Py_ssize_t)sizeof(cuda_call))) {
    PyErr_SetString(PyExc_ValueError, "a launch on a GPU without a driver");
    return false;
  }
  memcpy(e->block, block, (size_t)bytes);
  e->block_bytes = (int)bytes;
  e->entry = (fr_entry)(uintptr_t)code;
  e->units = units;
  e->run = (run_function)(uintptr_t)run;
  e->threads_now = (int (*)(void))(uintptr_t)threads_now;
  e->slice = slice;
  Py_INCREF(plan);
  e->plan = plan;
  return true;
}

static PyObject* table_remember(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  table* self = (table*)object;
  call_key k;
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "remember: got %zd arguments, expected 8", count);
    return NULL;
  }
  if (bypass) Py_RETURN_FALSE;
  if (!make_key(&k, args, self->inputs, self->outputs, self->contiguous)) {
    drop(&k);
    PyObject* said = unknown();
    Py_XDECREF(said);
    if (!said) return NULL;
    Py_RETURN_FALSE;
  }
  entry* e = PyMem_Malloc(sizeof *e);
  size_t bytes = sizeof *k.words * (size_t)k.n;
  if (e) {
    memset(e, 0, offsetof(entry, relocation));
    e->owners = 1;
    e->words = PyMem_Malloc(bytes);
    e->ref = PyMem_Malloc(sizeof *e->ref * (size_t)(k.refs + 1));
  }
  if (!e || !e->words || !e->ref || !read_plan(e, args[7], self->inputs, self->outputs)) {
    if (e) release(e);
    drop(&k);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_FALSE;
  }
  memcpy(e->words, k.words, bytes);
  e->n = k.n;
  memcpy(e->ref, k.ref, sizeof *e->ref * (size_t)k.refs);
  e->refs = k.refs;
  k.refs = 0; /* they are the entry's */
  uint64_t at = hash(&k);
  entry** place = &self->slot[(at + self->turn++ % PROBES) % SLOTS];
  entry* known = find(self, &k);
  for (int i = 0; i < PROBES; i++) {
    entry** probe = &self->slot[(at + (uint64_t)i) % SLOTS];
    if (known ? *probe == known : !*probe) {
      place = probe;
      break;
    }
  }
  entry* old = *place;
  *place = e;
  if (old) release(old);
  drop(&k);
  Py_RETURN_TRUE;
}

static PyObject* table_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  int inputs, outputs, contiguous;
  if (!PyArg_ParseTuple(args, "iip", &inputs, &outputs, &contiguous)) return NULL;
  if (inputs < 0 || outputs < 0 || inputs + outputs > MAX_BUFFERS) {
    PyErr_Format(PyExc_ValueError, "Table: got %d inputs and %d outputs, at most %d together",
                 inputs, outputs, MAX_BUFFERS);
    return NULL;
  }
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  table* self = (table*)make(type, 0); /* zeroed */
  if (!self) return NULL;
  self->inputs = inputs;
  self->outputs = outputs;
  self->contiguous = contiguous;
  (void)keywords;
  return (PyObject*)self;
}

static void table_free(PyObject* object) {
  table* self = (table*)object;
  PyTypeObject* type = Py_TYPE(object);
  for (int i = 0; i < SLOTS; i++)
    if (self->slot[i]) release(self->slot[i]);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF((PyObject*)type);
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL,
     "call(inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value)\n\n"
     "The outputs, where such a call is remembered; else None, and nothing was done."},
    {"remember", (PyCFunction)(void (*)(void))table_remember, METH_FASTCALL,
     "remember(…, plan)\n\nKeep what a call came to. False where such calls cannot be remembered."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot table_slots[] = {{Py_tp_new, (void*)table_new},
                                    {Py_tp_dealloc, (void*)table_free},
                                    {Py_tp_methods, table_methods},
                                    {0, NULL}};

static PyType_Spec table_spec = {"ferrule._fastcall.Table", sizeof(table), 0, Py_TPFLAGS_DEFAULT,
                                 table_slots};

/* -------------------------------------------------------------------------------------- operators */

/* An operator of torch without an Autograd kernel, for calls of which no derivative is wanted. */
typedef struct {
  PyObject head;
  PyObject* function;
  int count;
  char kind[MAX_BUFFERS]; /* of each argument: array, optional array, float, int, uint, bool */
} operator;

static bool is_torch(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  for (int i = 0; i < types_known; i++)
    if (types[i].type == type) return types[i].host == TORCH;
  return false;
}

/* Whether a number is one of its kind: torch takes a tensor for a number, too, and then its derivative
 * is lost. */
static bool is_number(char kind, PyObject* value) {
  if (kind == 'b') return PyBool_Check(value);
  return PyLong_CheckExact(value) || (kind == 'f' && PyFloat_CheckExact(value));
}

/* Whether a call has plain tensors and numbers as they are declared, and autograd records nothing of
 * it. -1 with an exception set. */
static int is_plain(operator* self, PyObject* args) {
  if (PyTuple_Size(args) != self->count) return 0;
  bool wants = false;
  for (int i = 0; i < self->count; i++) {
    PyObject* value = PyTuple_GetItem(args, i);
    if (self->kind[i] != 'a' && self->kind[i] != 'o') {
      if (!is_number(self->kind[i], value)) return 0;
    } else if (value != Py_None || self->kind[i] == 'a') { /* torch takes None for any tensor */
      if (!is_torch(value)) return 0;
      int grad = wants ? 1 : truth(PyObject_GetAttr(value, text_requires_grad));
      if (grad < 0) return -1;
      wants = grad;
    }
  }
  int recorded = wants ? truth(PyObject_CallNoArgs(torch_recording)) : 0;
  if (recorded) return recorded < 0 ? -1 : 0;
  return !torch_is_forward() && gives_zero(torch_overrides);
}

/* NotImplemented where a call is out of the ordinary; else what the operator gives. */
static PyObject* operator_call(PyObject* object, PyObject* args, PyObject* keywords) {
  operator* self = (operator*)object;
  int plain = keywords ? 0 : is_plain(self, args);
  if (plain > 0) return PyObject_Call(self->function, args, NULL);
  if (PyErr_Occurred()) return NULL;
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

static PyObject* operator_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  PyObject* function;
  const char* kinds;
  (void)keywords;
  if (!PyArg_ParseTuple(args, "Os", &function, &kinds)) return NULL;
  if (!torch_api || strlen(kinds) > MAX_BUFFERS) {
    PyErr_SetString(PyExc_ValueError, "Operator: torch is not registered, or too many arguments");
    return NULL;
  }
  operator* self = (operator*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (!self) return NULL;
  Py_INCREF(function);
  self->function = function;
  self->count = (int)strlen(kinds);
  memcpy(self->kind, kinds, strlen(kinds));
  return (PyObject*)self;
}

static void operator_free(PyObject* object) {
  operator* self = (operator*)object;
  PyTypeObject* type = Py_TYPE(object);
  Py_DECREF(self->function);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF((PyObject*)type);
}

static PyType_Slot operator_slots[] = {{Py_tp_new, (void*)operator_new},
                                       {Py_tp_dealloc, (void*)operator_free},
                                       {Py_tp_call, (void*)operator_call},
                                       {0, NULL}};

static PyType_Spec operator_spec = {"ferrule._fastcall.Operator", sizeof(operator), 0,
                                    Py_TPFLAGS_DEFAULT, operator_slots};

#include "numpy_ops.h"

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
  PyObject *given, *size, *capsule, *tracing, *modes, *overrides, *recording, *forward;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!OOOOOO!", &PyTuple_Type, &given, &PyType_Type, &size, &capsule,
                        &tracing, &modes, &overrides, &recording, &PyDict_Type, &forward))
    return NULL;
  const dl_exchange* api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!api) return NULL;
  while (api && api->major != 1) api = api->older;
  if (!api || !api->tensor_from_object) Py_RETURN_FALSE;
  if (!torch_api) {
    Py_INCREF(tracing);
    Py_INCREF(modes);
    Py_INCREF(overrides);
    Py_INCREF(size);
    Py_INCREF(recording);
    Py_INCREF(forward);
    torch_tracing = tracing;
    torch_modes = modes;
    torch_overrides = overrides;
    torch_size = (PyTypeObject*)size;
    torch_recording = recording;
    torch_forward = forward;
    torch_api = api;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
      PyObject* added = add_type(PyTuple_GetItem(given, i), TORCH);
      Py_DECREF(added);
    }
  }
  Py_RETURN_TRUE;
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
    {"register_ops", register_ops, METH_VARARGS,
     "register_ops(dtypes, threads_now, few)\n\nLet ops take NumPy's arrays, given the dtype and item size of"
     " each\ndtype, the address of what says how many threads there are, and how many are few."},
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
  text_requires_grad = PyUnicode_InternFromString("requires_grad");
  text_is_neg = PyUnicode_InternFromString("is_neg");
  text_level = PyUnicode_InternFromString("_current_level");
  PyObject* type = PyType_FromSpec(&table_spec);
  PyObject* operators = PyType_FromSpec(&operator_spec);
  if (!text_requires_grad || !text_is_neg || !text_level || !type || !operators ||
      PyModule_AddObject(module, "Table", type) ||
      PyModule_AddObject(module, "Operator", operators) ||
      PyModule_AddStringConstant(module, "DIGEST", FR_DIGEST)) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
