/* NumPy's arrays as C has them, and new ones between canaries. Included by fastcall.c alone.
 *
 * No header of NumPy is needed: what is used of its ABI is the same in all versions since 1.22.
 */
#ifndef FERRULE_NUMPY_ARRAYS_H
#define FERRULE_NUMPY_ARRAYS_H

#include "arrays.h"
#include "canary.h"

/* The beginning of a NumPy array, the same in all versions since 1.7 (PyArrayObject_fields). */
typedef struct {
  PyObject head;
  char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
  PyObject* weak_references; /* these since 1.22 */
  void* buffer_info;
  PyObject* handler; /* whose memory it is; a capsule of a numpy_handler */
} numpy_array;

enum { NUMPY_C_CONTIGUOUS = 0x0001, NUMPY_OWNS = 0x0004, NUMPY_ALIGNED = 0x0100, NUMPY_WRITEABLE = 0x0400 };

/* How memory of an array is had (PyDataMem_Handler, version 1). */
typedef struct {
  char name[127];
  uint8_t version;
  struct {
    void* context;
    void* (*malloc)(void*, size_t);
    void* (*calloc)(void*, size_t, size_t);
    void* (*realloc)(void*, void*, size_t);
    void (*free)(void*, void*, size_t);
  } allocator;
} numpy_handler;

/* ------------------------------------------------------------------- memory with canaries (canary.h) */

/* A block is FR_CANARY bytes longer than an output on each side. NumPy's arrays own theirs as they own any memory,
 * by a handler. */
enum { HUGE_PAGES_FROM = 1 << 22 }; /* bytes, as in NumPy */

static void* block_of(size_t bytes, bool zero) {
  if (bytes > (size_t)PTRDIFF_MAX - 2 * FR_CANARY) return NULL;
  char* block = zero ? calloc(1, bytes + 2 * FR_CANARY) : malloc(bytes + 2 * FR_CANARY);
  if (!block) return NULL;
  char* memory = block + FR_CANARY;
  if (bytes >= HUGE_PAGES_FROM) fr_use_huge_pages(memory, bytes);
  fr_put_canary(block, FR_CANARY);
  fr_put_canary(memory + bytes, FR_CANARY);
  return memory;
}

static void* block_malloc(void* context, size_t bytes) {
  (void)context;
  return block_of(bytes, false);
}

static void* block_calloc(void* context, size_t count, size_t bytes) {
  (void)context;
  return bytes && count > SIZE_MAX / bytes ? NULL : block_of(count * bytes, true);
}

static void block_free(void* context, void* memory, size_t bytes) {
  (void)context;
  (void)bytes;
  if (memory) free((char*)memory - FR_CANARY);
}

static void* block_realloc(void* context, void* memory, size_t bytes) {
  if (!memory) return block_malloc(context, bytes);
  if (bytes > (size_t)PTRDIFF_MAX - 2 * FR_CANARY) return NULL;
  char* block = realloc((char*)memory - FR_CANARY, bytes + 2 * FR_CANARY);
  if (!block) return NULL;
  fr_put_canary(block + FR_CANARY + bytes, FR_CANARY);
  return block + FR_CANARY;
}

static numpy_handler handler = {
    "ferrule", 1, {NULL, block_malloc, block_calloc, block_realloc, block_free}};
static PyObject* handler_capsule; /* once arrays are known to take it */

static struct {
  PyTypeObject* type;
  PyObject* (*from_descr)(PyTypeObject*, PyObject* descr, int nd, const Py_ssize_t* dimensions,
                          const Py_ssize_t* strides, void* data, int flags, PyObject* like);
} numpy;

/* A new array between canaries; NULL with an exception set, or without where there is no memory. */
static PyObject* numpy_make(PyObject* descr, int nd, const Py_ssize_t* dimensions, size_t bytes, bool zero) {
  void* memory = block_of(bytes, zero);
  if (!memory) return NULL;
  Py_INCREF(descr); /* which the next line takes */
  numpy_array* array = (numpy_array*)numpy.from_descr(
      numpy.type, descr, nd, dimensions, NULL, memory, NUMPY_C_CONTIGUOUS | NUMPY_ALIGNED | NUMPY_WRITEABLE, NULL);
  if (!array) {
    block_free(NULL, memory, 0);
    return NULL;
  }
  Py_INCREF(handler_capsule);
  array->handler = handler_capsule;
  array->flags |= NUMPY_OWNS;
  return (PyObject*)array;
}

/* The same for Python: given its shape, dtype, bytes, and whether it is zeros. */
static PyObject* numpy_new(PyObject* module, PyObject* args) {
  PyObject *shape, *descr;
  Py_ssize_t bytes, dimensions[64];
  int zero;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!Onp", &PyTuple_Type, &shape, &descr, &bytes, &zero)) return NULL;
  Py_ssize_t nd = PyTuple_Size(shape);
  if (!handler_capsule || nd > 64 || bytes < 0) {
    PyErr_SetString(PyExc_ValueError, "empty: no arrays of NumPy with canaries here, or not these");
    return NULL;
  }
  for (Py_ssize_t d = 0; d < nd; d++) {
    dimensions[d] = PyLong_AsSsize_t(PyTuple_GetItem(shape, d));
    if (dimensions[d] == -1 && PyErr_Occurred()) return NULL;
  }
  PyObject* array = numpy_make(descr, (int)nd, dimensions, (size_t)bytes, zero);
  return array || PyErr_Occurred() ? array : PyErr_NoMemory();
}

/* Bytes past the end that somebody wrote to (before the start: negative), of a block. */
static int outside_block(const char* memory, size_t bytes) {
  int past = fr_past_end(memory + bytes, FR_CANARY);
  return past ? past : -fr_before_start(memory - FR_CANARY);
}

/* Whether canaries are beside an array. */
static bool numpy_is_guarded(PyObject* object) {
  const numpy_array* array = (const numpy_array*)object;
  return handler_capsule && Py_TYPE(object) == numpy.type && (array->flags & NUMPY_OWNS) &&
         array->handler == handler_capsule;
}

static PyObject* numpy_outside(PyObject* module, PyObject* args) {
  PyObject* array;
  Py_ssize_t bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "On", &array, &bytes)) return NULL;
  int outside = numpy_is_guarded(array) ? outside_block(((numpy_array*)array)->data, (size_t)bytes) : 0;
  return PyLong_FromLong(outside);
}

static PyObject* numpy_guarded(PyObject* module, PyObject* none) {
  (void)module;
  (void)none;
  return PyBool_FromLong(handler_capsule != NULL);
}

/* Whether arrays take memory of a handler, and have it where numpy_array says. */
static bool try_handler(PyObject* capsule, void** api, PyObject* empty) {
  enum { FROM_DESCR = 94, SET_HANDLER = 304 }; /* places of functions, the same in all versions */
  PyObject* (*set_handler)(PyObject*);
  memcpy(&numpy.from_descr, &api[FROM_DESCR], sizeof api[0]);
  memcpy(&set_handler, &api[SET_HANDLER], sizeof api[0]);
  PyObject* before = set_handler(capsule);
  if (!before) return false;
  numpy_array* array = (numpy_array*)PyObject_CallFunction(empty, "(i)", 3);
  PyObject* ours = set_handler(before);
  Py_XDECREF(ours);
  Py_DECREF(before);
  bool good = array && Py_TYPE((PyObject*)array) == numpy.type && (array->flags & NUMPY_OWNS) &&
              array->handler == capsule;
  Py_XDECREF((PyObject*)array);
  return good;
}

#endif
