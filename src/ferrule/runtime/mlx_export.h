/* Kernels in files of mx.export_function: a part of mlx_node.cpp, which includes it.
 *
 * While a function is traced for a file, calls make nodes that hold MLX's own record of a kernel: its text
 * and numbers, and MLX's placeholder for a GPU's stream, so that a GPU need not be there. hosts/mlx/export.py
 * writes the record. For reading such files, what the files hold of each of MLX's primitives is described
 * here by the compiler, which has their classes before it.
 */
#ifndef FERRULE_MLX_EXPORT_H
#define FERRULE_MLX_EXPORT_H

#include <unordered_set>

#include "mlx/backend/metal/metal.h"
#include "mlx/device.h"
#include "mlx/export.h"
#include "mlx/export_impl.h"
#include "mlx/primitives.h"

#ifndef FR_PRIMITIVES
#define FR_PRIMITIVES(X) /* X(namespace, class) for each class of MLX's headers */
#endif

#if MLX_VERSION_NUMERIC >= 32000 /* which can export kernels without Metal */

namespace {

/* Whether this thread traces a function for a file, where there is no Metal: MLX lets its own kernels be
 * called without Metal then, and only then. Nothing is asked of it unless something is traced. */
bool exporting() {
  static const mx::array tracer = [] {
    mx::array a(0.0f);
    a.set_tracer(true);
    return a;
  }();
  if (!tracer.is_tracer() || mx::metal::is_available()) return false;
  try {
    static const auto probe = mx::fast::metal_kernel("ferrule", {}, {"out"}, "");
    probe({}, {mx::Shape{}}, {mx::float32}, {1, 1, 1}, {1, 1, 1}, {}, std::nullopt, false, {});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

/* A kernel's call in a file. Its inputs are all that the kernel reads, numbers too; its rules are asked of
 * Python with all of them. */
class Recorded : public Node {
 public:
  int inputs;

  /* Of a `Record` of hosts/mlx/export.py. */
  template <class... More>
  Recorded(std::shared_ptr<const Plan> plan, object* r, int inputs, More... more)
      : Node(std::move(plan), mx::Stream(-1, mx::Device::gpu), text_at(r, 0), text_at(r, 1), three_in<int>(item_at(r, 2)),
             three_in<int>(item_at(r, 3)), wants(item_at(r, 4)), number_at(r, 5) != 0, fill(item_at(r, 6)),
             std::vector<mx::fast::ScalarArg>(), false, number_at(r, 7), more...),
        inputs(inputs) {}

  ~Recorded() override {
    if (!Py_IsInitialized()) return;
    Gil gil;
    Py_DecRef(plan->python);
  }

  const char* name() const override { return "CustomKernel"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override { refuse_to_run(); }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { refuse_to_run(); }

 private:
  [[noreturn]] void refuse_to_run() const {
    throw std::runtime_error("ferrule: the outputs of " + plan->name +
                             " are for a file: it was called while mx.export_function traced");
  }

  int asked() const override { return inputs; }
  object* of_inputs(const std::vector<mx::array>& arrays) const override { return tuple_of(arrays); }
  std::vector<int> places() const override {
    std::vector<int> found;
    for (int i = 0; i < inputs; i++) found.push_back(i);
    return found;
  }

  static std::vector<std::tuple<bool, bool, bool>> wants(object* tuple) {
    std::vector<std::tuple<bool, bool, bool>> found;
    for (ssize_t i = 0; i < PyTuple_Size(tuple); i++) found.push_back(three_in<bool>(item_at(tuple, i)));
    return found;
  }

  static std::optional<float> fill(object* o) {
    return o == none ? std::nullopt : std::optional<float>(static_cast<float>(PyFloat_AsDouble(o)));
  }
};

std::shared_ptr<Recorded> recorded(std::shared_ptr<const Plan> plan, object* r, int inputs) {
  using Triple = std::tuple<int, int, int>;
  if constexpr (std::is_constructible_v<Base, mx::Stream, std::string, std::string, Triple, Triple,
                                        std::vector<std::tuple<bool, bool, bool>>, bool,
                                        std::optional<float>, std::vector<mx::fast::ScalarArg>, bool, int,
                                        int>) {
    return std::make_shared<Recorded>(std::move(plan), r, inputs, number_at(r, 8));
  } else {
    if (number_at(r, 8) != 0)
      throw std::invalid_argument("ferrule: the files of this MLX have no place for the math_mode of " + plan->name);
    return std::make_shared<Recorded>(std::move(plan), r, inputs);
  }
}

}  // namespace

/* The outputs of a call that is recorded, as a tuple; of each there are a shape and the place of a dtype. `python` is
 * asked for its rules. */
API object* fr_mlx_record_call(const char* what, object* python, object* arrays, object* record, object* outputs) {
  return or_why([&] {
    Plan plan{nullptr, -1, 0, 0, what, python, false, true};
    take_outputs(outputs, plan.shapes, plan.dtypes);
    std::vector<mx::Dtype> dtypes;
    for (int32_t place : plan.dtypes) dtypes.push_back(dtype_at[place]);
    std::vector<mx::Shape> shapes = plan.shapes;
    std::vector<mx::array> inputs = arrays_in(arrays);
    auto node = recorded(std::make_shared<Plan>(std::move(plan)), record, static_cast<int>(inputs.size()));
    nodes_traced++;
    last_traced = what;
    held(python); /* the node's, which lets it go */
    return tuple_of(mx::array::make_arrays(std::move(shapes), dtypes, node, inputs));
  });
}

#else

namespace {
bool exporting() { return false; }
}  // namespace
API object* fr_mlx_record_call(const char*, object*, object*, object*, object*) { return held(not_implemented); }

#endif

/* ---------------------------------------------------------------------- what files hold of primitives */

namespace {

template <class T>
void write_layout(std::string& s) {
  if constexpr (std::is_same_v<T, bool>) {
    s += '?';
  } else if constexpr (std::is_floating_point_v<T>) {
    s += sizeof(T) == 4 ? 'f' : 'd';
  } else if constexpr (std::is_integral_v<T>) {
    static_assert(sizeof(T) <= 8);
    const char* letters = std::is_signed_v<T> ? "bhiq" : "BHIQ";
    s += letters[sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
  } else if constexpr (std::is_enum_v<T>) {
    s += 'i';
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) { /* takes no room */
  } else if constexpr (std::is_same_v<T, mx::Dtype>) {
    s += 'D';
  } else if constexpr (std::is_same_v<T, std::string>) {
    s += 's';
  } else if constexpr (requires { std::variant_size<T>::value; }) { /* MLX has one of int, float and bool */
    s += 'V';
  } else if constexpr (requires(T& t) { t.has_value(); }) {
    s += 'o';
    write_layout<typename T::value_type>(s);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    auto write_parts = [&s]<size_t... I>(std::index_sequence<I...>) {
      (write_layout<std::decay_t<std::tuple_element_t<I, T>>>(s), ...);
    };
    s += '(';
    write_parts(std::make_index_sequence<std::tuple_size_v<T>>());
    s += ')';
  } else if constexpr (requires(T& t) { t.begin(); t.end(); }) {
    s += '*';
    write_layout<typename T::value_type>(s);
  } else {
    s += '!'; /* MLX does not write it either */
  }
}

template <class F>
constexpr bool has_metadata = requires(const F& f) { f.metadata(); };

template <class P>
void describe(std::string& s, const char* name) {
  s += name;
  s += ' ';
  if constexpr (requires(P& p) { p.state(); })
    write_layout<std::decay_t<decltype(std::declval<P&>().state())>>(s);
  s += '\n';
}

}  // namespace

/* Whether calls on this thread are to be recorded. */
API int fr_mlx_exporting(void) { return exporting(); }

/* How this MLX lays out files, a line each: what a primitive's state is made of, by its class, as
 * hosts/mlx/file.py reads it; and whether files have metadata. */
API const char* fr_mlx_layout(void) {
  static const std::string text = [] {
    std::string s;
#define FR_DESCRIBE(space, name) describe<space::name>(s, #name);
    FR_PRIMITIVES(FR_DESCRIBE)
    if constexpr (has_metadata<mx::ImportedFunction>) s += "metadata \n";
    return s;
  }();
  return text.c_str();
}

namespace {

/* Visits what these arrays are made of, and then they themselves, each after its inputs, and nothing behind an array
 * that is to be skipped. */
template <class Skip, class Visit>
void in_order(const std::vector<mx::array>& arrays, Skip skip, Visit visit) {
  std::vector<std::pair<mx::array, size_t>> stack; /* arrays, and which of their inputs come next */
  for (const mx::array& a : arrays) stack.emplace_back(a, 0);
  while (!stack.empty()) {
    auto& [top, next] = stack.back();
    if (next == 0 && skip(top)) {
      stack.pop_back();
    } else if (next < top.inputs().size()) {
      mx::array input = top.inputs()[next++];
      stack.emplace_back(std::move(input), 0);
    } else {
      mx::array a = top;
      stack.pop_back();
      visit(a);
    }
  }
}

}  // namespace

/* The first operation behind `arrays`, a tuple of outputs of an imported function, whose outputs are not of the
 * shapes that it makes of its inputs; "" where all fit, as far as MLX can say. Nothing is carried out. */
API const char* fr_mlx_misfit(object* arrays) {
  static thread_local std::string found;
  found.clear();
  std::unordered_set<std::uintptr_t> seen;
  auto skip = [&](const mx::array& a) { return !found.empty() || !a.has_primitive() || !seen.insert(a.id()).second; };
  in_order(arrays_in(arrays), skip, [&](mx::array& a) {
    if (!found.empty()) return;
    try {
      auto shapes = a.primitive().output_shapes(a.inputs());
      auto outputs = a.outputs();
      for (size_t i = 0; i < outputs.size() && shapes.size() == outputs.size(); i++)
        if (shapes[i] != outputs[i].shape()) found = a.primitive().name();
    } catch (const std::invalid_argument&) { /* MLX has no shapes for it */
    } catch (const std::exception&) {
      found = a.primitive().name();
    }
  });
  return found.c_str();
}

/* What MLX has in mind where it traces for changing sizes, and leaves out of its files: of a broadcast only the
 * first input has a gradient, and of a count of elements none; without that, MLX reads memory that is not its
 * own. And some primitives change themselves when they are batched, or keep the sizes of the trace, though all
 * calls of an imported function share them. So, where something is traced, `outputs` of such a function for
 * `inputs`, both tuples, get these operations made anew. */
API object* fr_mlx_mended(object* outputs, object* inputs) {
  std::vector<mx::array> given = arrays_in(inputs), made = arrays_in(outputs);
  bool traced = false;
  std::unordered_map<std::uintptr_t, mx::array> done; /* by what stood there */
  for (const mx::array& a : given) {
    traced = traced || a.is_tracer();
    done.insert({a.id(), a});
  }
  if (!traced) return held(outputs);
  auto skip = [&](const mx::array& a) {
    if (!a.has_primitive()) done.insert({a.id(), a});
    return done.count(a.id()) != 0;
  };
  auto mend = [&](mx::array& a) {
    std::vector<mx::array>& read = a.inputs();
    for (mx::array& in : read) in = done.at(in.id());
    std::string name = a.primitive().name();
    mx::Stream s = a.primitive().stream();
    auto anew = [&](mx::array value) { done.insert({a.id(), std::move(value)}); };
    if (name == "Broadcast") {
      anew(read.size() > 1 ? mx::broadcast_arrays(read, s)[0] : mx::broadcast_to(read[0], a.shape(), s));
    } else if (name == "Transpose") {
      anew(mx::transpose(read[0], static_cast<mx::Transpose&>(a.primitive()).state(), s));
    } else if (name == "Reshape") {
      anew(mx::reshape(read[0], static_cast<mx::Reshape&>(a.primitive()).state(), s));
    } else if (name == "NumberOfElements") {
      auto [axes, inverted, dtype] = static_cast<mx::NumberOfElements&>(a.primitive()).state();
      anew(mx::number_of_elements(read[0], axes, inverted, dtype, s));
    } else {
      if (name == "BroadcastAxes")
        for (size_t i = 1; i < read.size(); i++) read[i] = mx::stop_gradient(read[i], s);
      for (mx::array& sibling : a.siblings()) {
        sibling.inputs() = read;
        done.insert({sibling.id(), sibling});
      }
      anew(a);
    }
  };
  return or_why([&] {
    in_order(made, skip, mend);
    for (mx::array& a : made) a = done.at(a.id());
    return tuple_of(made);
  });
}

/* Whether MLX has a GPU, whatever Python was told. */
API int fr_mlx_has_gpu(void) { return mx::is_available(mx::Device::gpu); }

#endif
