/* What the nodes of MLX's graphs want of Python: its stable functions, taken from the process, and the C++
 * objects inside MLX's Python objects. */
#ifndef FERRULE_MLX_PYTHON_H
#define FERRULE_MLX_PYTHON_H

#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/array.h"

namespace mx = mlx::core;

#define API extern "C" __attribute__((visibility("default")))
#define WEAK __attribute__((weak))

extern "C" {
typedef struct object_ object;
WEAK int PyGILState_Ensure(void);
WEAK void PyGILState_Release(int);
WEAK int Py_IsInitialized(void);
WEAK void Py_IncRef(object*);
WEAK void Py_DecRef(object*);
WEAK object* PyObject_GetItem(object*, object*);
WEAK object* PyObject_CallObject(object*, object*);
WEAK object* PyCFunction_NewEx(void*, object*, object*);
WEAK object* PyCapsule_New(void*, const char*, void (*)(object*));
WEAK void* PyCapsule_GetPointer(object*, const char*);
WEAK void* PyLong_AsVoidPtr(object*);
WEAK object* PyLong_FromVoidPtr(void*);
WEAK object* PyLong_FromLong(long);
WEAK object* PyLong_FromLongLong(long long);
WEAK long long PyLong_AsLongLong(object*);
WEAK object* PyBool_FromLong(long);
WEAK object* PyFloat_FromDouble(double);
WEAK double PyFloat_AsDouble(object*);
WEAK object* PyTuple_New(ssize_t);
WEAK int PyTuple_SetItem(object*, ssize_t, object*);
WEAK object* PyTuple_GetItem(object*, ssize_t);
WEAK ssize_t PyTuple_Size(object*);
WEAK object* PyList_New(ssize_t);
WEAK int PyList_SetItem(object*, ssize_t, object*);
WEAK object* PyList_GetItem(object*, ssize_t);
WEAK ssize_t PyList_Size(object*);
WEAK object* PyUnicode_FromString(const char*);
WEAK const char* PyUnicode_AsUTF8AndSize(object*, ssize_t*);
WEAK object* PyErr_Occurred(void);
WEAK void PyErr_Clear(void);
WEAK int PyErr_ExceptionMatches(object*);
WEAK void PyErr_SetInterrupt(void);
extern WEAK object* PyExc_KeyboardInterrupt;
extern WEAK char PyFloat_Type, PyLong_Type, PyBool_Type, PyTuple_Type, PyList_Type, PyUnicode_Type;
extern WEAK char _Py_NoneStruct, _Py_NotImplementedStruct;
}

static object* const none = reinterpret_cast<object*>(&_Py_NoneStruct);
static object* const not_implemented = reinterpret_cast<object*>(&_Py_NotImplementedStruct);

static void* type_of(object* o) { return reinterpret_cast<void**>(o)[1]; }
static object* held(object* o) {
  Py_IncRef(o);
  return o;
}

/* The C++ object inside one of MLX's Python objects: nanobind's nb_inst. Python checks this layout
 * before anything else here is used. */
static void* inside(object* o) {
  char* p = reinterpret_cast<char*>(o);
  int32_t offset;
  memcpy(&offset, p + 16, 4);
  void* q = p + offset;
  return (p[20] & 4) ? q : *static_cast<void**>(q);
}

/* What Python raised in the last `Node::ask` of this thread, or why a call was given back. */
static thread_local std::string raised_text;

static object *prototype, *ellipsis; /* prototype[...] is a new mx.array */
static void *array_type, *dtype_type, *stream_type;

static object* wrapped(mx::array value) {
  object* o = PyObject_GetItem(prototype, ellipsis);
  if (o) *static_cast<mx::array*>(inside(o)) = std::move(value);
  return o;
}

static const mx::array& array_in(object* o) { return *static_cast<mx::array*>(inside(o)); }

namespace {
struct Gil {
  int state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

/* Objects that nodes have let go, perhaps on threads without Python's lock. They go before Python's collector
 * looks for cycles, of which all of them are parts, or when there are many. */
struct Gone {
  std::mutex mutex;
  std::vector<object*> objects;
};
Gone& gone = *new Gone; /* nodes may go after everything else has */
constexpr size_t many_gone = 1024;

void let_go(object* o) {
  std::lock_guard<std::mutex> guard(gone.mutex);
  gone.objects.push_back(o);
}

/* With Python's lock: lets them go, if there are so many. */
void finish_letting_go(size_t least) {
  std::vector<object*> objects;
  {
    std::lock_guard<std::mutex> guard(gone.mutex);
    if (gone.objects.size() < least) return;
    objects.swap(gone.objects);
  }
  for (object* o : objects) Py_DecRef(o);
}

/* A reference that goes with its scope, in which Python's lock is held. */
class Reference {
 public:
  explicit Reference(object* o) : o(o) {}
  Reference(const Reference&) = delete;
  ~Reference() {
    if (o) Py_DecRef(o);
  }
  operator object*() const { return o; }

 private:
  object* o;
};

/* The tuple of so many objects, which `make` gives by their places. */
template <class Make>
object* tuple_by(size_t count, Make make) {
  object* tuple = PyTuple_New(static_cast<ssize_t>(count));
  for (size_t i = 0; i < count; i++) PyTuple_SetItem(tuple, static_cast<ssize_t>(i), make(i));
  return tuple;
}

object* tuple_of(const std::vector<mx::array>& arrays) {
  return tuple_by(arrays.size(), [&](size_t i) { return wrapped(arrays[i]); });
}

object* tuple_of(const std::vector<int>& numbers) {
  return tuple_by(numbers.size(), [&](size_t i) { return PyLong_FromLong(numbers[i]); });
}

object* tuple_of(void* const* addresses, int count) {
  return tuple_by(static_cast<size_t>(count), [&](size_t i) { return PyLong_FromVoidPtr(addresses[i]); });
}

/* A tuple of so many None, to be set. */
object* nones(int count) {
  return tuple_by(static_cast<size_t>(count), [](size_t) { return held(none); });
}

/* An int of Python's; false where 64 bits do not hold it. */
bool integer_in(object* o, long long& value) {
  value = PyLong_AsLongLong(o);
  bool good = value != -1 || !PyErr_Occurred();
  if (!good) PyErr_Clear();
  return good;
}

/* What `make` gives; where it raises, NotImplemented, and Python raises `fr_mlx_why`. */
template <class Make>
object* or_why(Make make) {
  try {
    return make();
  } catch (const std::exception& e) {
    raised_text = e.what();
    return held(not_implemented);
  }
}

/* What stands in a tuple of Python's, which lives as long as that; raises where it is none, or shorter. */
object* item_at(object* tuple, ssize_t i) {
  object* found = PyTuple_GetItem(tuple, i);
  if (found) return found;
  PyErr_Clear();
  throw std::invalid_argument("ferrule: a rule gave too little, or no tuple");
}

const mx::array& array_at(object* tuple, ssize_t i) {
  object* found = item_at(tuple, i);
  if (type_of(found) != array_type) throw std::invalid_argument("ferrule: a rule gave what is no array of MLX");
  return array_in(found);
}

std::vector<mx::array> arrays_in(object* tuple) {
  std::vector<mx::array> arrays;
  for (ssize_t i = 0; i < PyTuple_Size(tuple); i++) arrays.push_back(array_at(tuple, i));
  return arrays;
}

const char* text_at(object* tuple, ssize_t i) {
  ssize_t size;
  if (const char* text = PyUnicode_AsUTF8AndSize(item_at(tuple, i), &size)) return text;
  PyErr_Clear();
  throw std::invalid_argument("ferrule: a text is not one that UTF-8 can hold");
}

int number_at(object* tuple, ssize_t i) { return static_cast<int>(PyLong_AsLongLong(item_at(tuple, i))); }

/* Three numbers in a tuple. */
template <class T>
std::tuple<T, T, T> three_in(object* tuple) {
  auto at = [tuple](ssize_t i) { return static_cast<T>(PyLong_AsLongLong(item_at(tuple, i))); };
  return {at(0), at(1), at(2)};
}
}  // namespace

#endif
