/* Kernels as nodes of MLX's graphs.
 *
 * A node is a primitive of MLX, made out of its tree: hosts/mlx/build.py compiles this file against the
 * headers inside the user's own MLX, once per version, and for the CPU and the CUDA build alike. A node
 * keeps what was asked for, never sizes: output shapes, grid, threadgroup, template and text are worked
 * out (op_calls.h) from its real inputs each time they are wanted, since MLX shares one primitive
 * between all calls of a compiled function.
 *
 * It is a subclass of MLX's own CustomKernel, so that files of mx.export_function hold MLX's native
 * records. What needs Python (a new kernel's text, derivatives, batches) asks hosts/mlx, on the
 * thread that evaluates or traces; MLX's stream threads run machine code alone.
 *
 * No header of Python is needed: its stable functions are taken from the process.
 */
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx_nodes.h"

/* Defined here, and hidden, so that the compiler emits CustomKernel's vtable, which libmlx hides. */
void mx::fast::CustomKernel::eval_gpu(const std::vector<array>&, std::vector<array>&) {
  throw std::runtime_error("ferrule: not reached");
}

namespace {

/* --------------------------------------------------------------------------------- calls by Python */

mx::Stream stream_now() { return mx::default_stream(mx::default_device()); }

/* Reads a call's arguments; false for what Python must look at. */
bool read_arguments(const Plan& plan, object* const* args, ssize_t n, Given& given,
                    std::vector<mx::array>& arrays) {
  fr_op* op = plan.op;
  if (n != op->inputs) return false;
  arrays.reserve(static_cast<size_t>(n));
  for (ssize_t i = 0; i < n; i++) {
    object* value = args[i];
    void* type = type_of(value);
    switch (op->input[i].kind) {
      case INPUT_ARRAY:
        if (type == array_type) {
          arrays.push_back(array_in(value));
          if (place_of[static_cast<int>(arrays.back().dtype().val())] < 0) return false;
        } else if (value == none && op->input[i].optional) {
          given.present &= ~(UINT64_C(1) << i);
        } else {
          return false;
        }
        break;
      case INPUT_FLOAT:
        if (type != &PyFloat_Type && type != &PyLong_Type) return false;
        given.numbers.resize(static_cast<size_t>(n));
        given.numbers[i].first = PyFloat_AsDouble(value);
        if (PyErr_Occurred()) {
          PyErr_Clear();
          return false;
        }
        break;
      default:
        long long number;
        if (type != (op->input[i].kind == INPUT_BOOL ? &PyBool_Type : &PyLong_Type)) return false;
        if (!integer_in(value, number)) return false;
        given.numbers.resize(static_cast<size_t>(n));
        given.numbers[i].second = number;
    }
  }
  return !arrays.empty();
}

object* returned(std::vector<mx::array>&& outputs) {
  return outputs.size() == 1 ? wrapped(std::move(outputs[0])) : tuple_of(outputs);
}

}  // namespace

#include "mlx_export.h"

namespace {

/* A call of an op. NotImplemented for what Python must look at. */
object* call_op(object* self, object* const* args, ssize_t n) {
  auto& owned = *static_cast<Owned*>(PyCapsule_GetPointer(PyTuple_GetItem(self, 0), nullptr));
  return or_why([&] {
    Given given;
    std::vector<mx::array> arrays;
    if (exporting() || !read_arguments(*owned.plan, args, n, given, arrays)) return held(not_implemented);
    return returned(Node::make(owned.use(), std::move(given), std::move(arrays), stream_now()));
  });
}

/* What a kernel's calls at level 0 came to, by all that was given but the inputs. */
struct Calls {
  ssize_t inputs;
  std::unordered_map<std::string, Handle> plans;
};
constexpr size_t most_calls = 4096;

ssize_t length_of(object* o) {
  void* type = type_of(o);
  return type == &PyTuple_Type ? PyTuple_Size(o) : type == &PyList_Type ? PyList_Size(o) : -1;
}

object* item_of(object* o, ssize_t i) {
  return type_of(o) == &PyTuple_Type ? PyTuple_GetItem(o, i) : PyList_GetItem(o, i);
}

/* Adds what tells a value from others, its type included, since True == 1 == 1.0 in Python. False for
 * what Python must look at. */
bool add_to_key(std::string& key, object* o) {
  void* type = type_of(o);
  auto put = [&key](char kind, const void* bytes, size_t n) {
    key += kind;
    key.append(static_cast<const char*>(bytes), n);
  };
  if (type == &PyLong_Type) {
    long long value;
    if (!integer_in(o, value)) return false;
    put('i', &value, sizeof value);
  } else if (type == &PyTuple_Type || type == &PyList_Type) {
    ssize_t n = length_of(o);
    put('(', &n, sizeof n);
    for (ssize_t i = 0; i < n; i++)
      if (!add_to_key(key, item_of(o, i))) return false;
  } else if (type == dtype_type) {
    auto value = static_cast<mx::Dtype*>(inside(o))->val();
    put('d', &value, sizeof value);
  } else if (type == &PyUnicode_Type) {
    ssize_t n;
    const char* text = PyUnicode_AsUTF8AndSize(o, &n);
    if (!text) {
      PyErr_Clear();
      return false;
    }
    put('s', &n, sizeof n);
    key.append(text, static_cast<size_t>(n));
  } else if (type == &PyBool_Type) {
    char value = PyLong_AsLongLong(o) != 0;
    put('b', &value, 1);
  } else if (type == &PyFloat_Type) {
    double value = PyFloat_AsDouble(o);
    put('f', &value, sizeof value);
  } else if (o == none) {
    key += 'n';
  } else {
    return false;
  }
  return true;
}

/* An input as MLX takes it; false for what Python must look at. */
bool add_input(std::vector<mx::array>& arrays, object* o) {
  void* type = type_of(o);
  if (type == array_type) {
    const mx::array& a = array_in(o);
    if (place_of[static_cast<int>(a.dtype().val())] < 0 || a.dtype() == mx::float64) return false;
    arrays.push_back(a);
  } else if (type == &PyLong_Type) {
    long long value;
    if (!integer_in(o, value)) return false;
    if (value >= INT32_MIN && value <= INT32_MAX) {
      arrays.push_back(mx::array(static_cast<int32_t>(value)));
    } else {
      arrays.push_back(mx::array(static_cast<int64_t>(value)));
    }
  } else if (type == &PyFloat_Type) {
    arrays.push_back(mx::array(static_cast<float>(PyFloat_AsDouble(o))));
  } else if (type == &PyBool_Type) {
    arrays.push_back(mx::array(PyLong_AsLongLong(o) != 0));
  } else {
    return false;
  }
  return true;
}

object* listed(std::vector<mx::array>&& outputs) {
  object* list = PyList_New(static_cast<ssize_t>(outputs.size()));
  for (size_t i = 0; i < outputs.size(); i++)
    PyList_SetItem(list, static_cast<ssize_t>(i), wrapped(std::move(outputs[i])));
  return list;
}

/* A call of a kernel: inputs, stream or None, and six arguments that make the key. NotImplemented for what
 * is not remembered, and where something is wrong. */
object* call_kernel(object* self, object* const* args, ssize_t n) {
  auto& calls = *static_cast<Calls*>(PyLong_AsVoidPtr(self));
  thread_local std::string key;
  try {
    key.clear();
    for (ssize_t i = 2; i < n; i++)
      if (!add_to_key(key, args[i])) return held(not_implemented);
    auto found = calls.plans.find(key);
    if (found == calls.plans.end() || length_of(args[0]) != calls.inputs) return held(not_implemented);
    if (args[1] != none && type_of(args[1]) != stream_type) return held(not_implemented);
    if (exporting()) return held(not_implemented);
    Handle plan = found->second;
    std::vector<mx::array> arrays;
    arrays.reserve(static_cast<size_t>(calls.inputs));
    for (ssize_t i = 0; i < calls.inputs; i++)
      if (!add_input(arrays, item_of(args[0], i))) return held(not_implemented);
    mx::Stream on = args[1] == none ? stream_now() : *static_cast<mx::Stream*>(inside(args[1]));
    return listed(Node::make(plan, Given{}, std::move(arrays), on));
  } catch (const std::exception&) {
    return held(not_implemented); /* Python meets it again, and has words for it */
  }
}

struct Method {
  const char* name;
  void* function;
  int flags;
  const char* text;
};

}  // namespace

/* ------------------------------------------------------------------------------------ for Python */

typedef struct {
  object *prototype, *ellipsis, *stream; /* any array and stream of MLX */
  object* dtypes; /* a tuple: of each of ferrule's MLX's, or None */
  fr_table_entry* (*resolve)(fr_request*);
  int (*threads_now)(void);
  int32_t few;
} fr_mlx_setup;

API int fr_mlx_init(const fr_mlx_setup* s) {
  prototype = held(s->prototype);
  ellipsis = held(s->ellipsis);
  array_type = type_of(prototype);
  stream_type = type_of(s->stream);
  memset(place_of, -1, sizeof place_of);
  dtype_at.assign(static_cast<size_t>(PyTuple_Size(s->dtypes)), mx::float32);
  for (size_t i = 0; i < dtype_at.size(); i++) {
    object* o = PyTuple_GetItem(s->dtypes, static_cast<ssize_t>(i));
    if (o == none) continue;
    dtype_type = type_of(o);
    dtype_at[i] = *static_cast<mx::Dtype*>(inside(o));
    place_of[static_cast<int>(dtype_at[i].val())] = static_cast<int8_t>(i);
  }
  fr_shared.resolve = s->resolve;
  fr_shared.threads_now = s->threads_now;
  fr_shared.few = s->few;
  return 0;
}

/* What the layout of MLX's Python objects says of an array: rank, elements, bytes each. */
API void fr_mlx_look(object* o, int64_t* found) {
  const mx::array& a = array_in(o);
  found[0] = static_cast<int64_t>(a.ndim());
  found[1] = static_cast<int64_t>(a.size());
  found[2] = static_cast<int64_t>(a.itemsize());
}

/* The function that calls an op. `kept` is a tuple of what is asked for its rules and of all that must live as
 * long as the op's nodes; it may hold what holds the function. */
API object* fr_mlx_op(fr_op* op, int number, int devices, int elsewhere, const char* name, object* kept) {
  static Method method{"ferrule_op", reinterpret_cast<void*>(call_op), 0x0080 /* METH_FASTCALL */, nullptr};
  object* python = PyTuple_GetItem(kept, 0);
  auto plan = std::make_shared<Plan>(Plan{op, number, devices, elsewhere, name, python, false, false});
  auto drop = [](object* capsule) { delete static_cast<Owned*>(PyCapsule_GetPointer(capsule, nullptr)); };
  Reference self(PyTuple_New(2));
  PyTuple_SetItem(self, 0, PyCapsule_New(new Owned{plan, kept, {}}, nullptr, drop));
  PyTuple_SetItem(self, 1, held(kept));
  return PyCFunction_NewEx(&method, self, nullptr);
}

/* A plan for a kernel's calls. Per output there are a shape and the place of a dtype; six `sizes` of the launch, or
 * None where `op` has expressions for these and the shapes; of each output an element that fills it, or nothing.
 * `python` lives for ever. */
API void* fr_mlx_plan(fr_op* op, int number, int devices, const char* name, object* python, object* outputs,
                      object* sizes, int64_t template_value, const char* fills) {
  bool fixed = sizes != none;
  auto plan = new Plan{op, number, devices, 0, name, python, true, fixed};
  take_outputs(outputs, plan->shapes, plan->dtypes);
  for (int i = 0; fills && i < op->outputs; i++) {
    plan->fills.emplace_back(fills, fr_item_bytes[plan->dtypes[i]]);
    fills += plan->fills.back().size();
  }
  for (int i = 0; fixed && i < 6; i++) plan->grid[i] = static_cast<uint32_t>(PyLong_AsLongLong(item_at(sizes, i)));
  plan->template_value = template_value;
  return new Handle(plan);
}

/* What a kernel's calls come to is kept in: nothing, at first. It lives as long as the process. */
API void* fr_mlx_calls(int inputs) { return new Calls{inputs, {}}; }

/* The function that makes a kernel's calls again. */
API object* fr_mlx_again(void* calls) {
  static Method method{"ferrule_kernel", reinterpret_cast<void*>(call_kernel), 0x0080 /* METH_FASTCALL */, nullptr};
  return PyCFunction_NewEx(&method, Reference(PyLong_FromVoidPtr(calls)), nullptr);
}

/* Remembers the plan for a tuple of the six arguments that make the key. */
API void fr_mlx_remember(void* calls, object* asked, void* plan) {
  auto& plans = static_cast<Calls*>(calls)->plans;
  std::string key;
  for (ssize_t i = 0; i < PyTuple_Size(asked); i++)
    if (!add_to_key(key, PyTuple_GetItem(asked, i))) return;
  if (plans.size() >= most_calls) plans.clear();
  plans[key] = *static_cast<Handle*>(plan);
}

/* Lets go what nodes have let go. */
API void fr_mlx_collect(void) { finish_letting_go(1); }

API void fr_mlx_forget(void* plan) { delete static_cast<Handle*>(plan); }

/* The outputs, as a list, of a plan of level 0 for a tuple of arrays, on the stream that a Python
 * object holds, or the default one. NULL: Python raises `fr_mlx_why`. */
API object* fr_mlx_run(void* plan, object* arrays, object* stream) {
  return or_why([&] {
    mx::Stream on = stream == none ? stream_now() : *static_cast<mx::Stream*>(inside(stream));
    return listed(Node::make(*static_cast<Handle*>(plan), Given{}, arrays_in(arrays), on));
  });
}

/* Memory on the GPU that a kernel is being evaluated for, until its stream has done it. */
API void* fr_mlx_scratch(int64_t bytes) {
  try {
    if (!evaluated_on) return nullptr;
    std::vector<mx::array> made{mx::array(mx::Shape{static_cast<mx::ShapeElem>((bytes + 3) / 4)}, mx::float32,
                                          allocator_of(*evaluated_on).primitive, {})};
    allocate(made, *evaluated_on);
    mx::array memory = made[0];
    auto& encoder = mx::cu::get_command_encoder(*evaluated_on);
    encoder.set_output_array(memory); /* what had this memory before is done first */
    encoder.add_completed_handler([memory]() {});
    return device_pointer(memory);
  } catch (const std::exception&) {
    return nullptr;
  }
}

/* Takes a function that tries out how kernels are put into MLX's graphs; see mlx_cuda.h. */
API void fr_mlx_probe_by(object* function) { probe = held(function); }
/* 0, or why kernels cannot be put into MLX's graphs directly, looked at with an array on a GPU. */
API const char* fr_mlx_look_gpu(object* o) {
  static std::string why;
  why = strange(array_in(o));
  return why.empty() ? nullptr : why.c_str();
}
API void fr_mlx_route(int which) { route = which; }

API void fr_mlx_bypass(int on) { __atomic_store_n(&fr_shared.bypassing, on, __ATOMIC_RELAXED); }
API int64_t fr_mlx_traced(void) { return nodes_traced; }
API const char* fr_mlx_last(void) { return last_traced.c_str(); }

/* An array, which is refused with this text where MLX's own operation behind it would be. */
API object* fr_mlx_refused(object* o, const char* why) {
  const mx::array& a = array_in(o);
  return wrapped(mx::array(a.shape(), a.dtype(), std::make_shared<Refused>(stream_now(), why), {a}));
}

API void fr_mlx_raised(const char* text) { raised_text = text; }
API const char* fr_mlx_why(void) { return raised_text.c_str(); }
API int fr_mlx_has_cuda(void) { return (&mx::cu::get_command_encoder) != nullptr; }
