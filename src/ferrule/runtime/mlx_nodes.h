/* The nodes of MLX's graphs: a kernel or an op, as a primitive of MLX; what it asks of Python; and what stands
 * for a kernel where it cannot be carried out. */
#ifndef FERRULE_MLX_NODES_H
#define FERRULE_MLX_NODES_H

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "mlx/stream.h"
#include "mlx/utils.h"
#include "mlx/version.h"

#include "mlx_cpu.h"
#include "mlx_cuda.h"
#include "mlx_plan.h"
#include "mlx_python.h"

namespace {

using Base = mx::fast::CustomKernel;

/* Makes what Python builds inside go to a stream. */
struct On {
  mx::Device device = mx::default_device();
  mx::Stream before;
  bool other;
  explicit On(mx::Stream s) : before(s), other(s.index >= 0) {
    if (!other) return;
    before = mx::default_stream(s.device);
    if (device != s.device) mx::set_default_device(s.device);
    if (!(before == s)) mx::set_default_stream(s);
  }
  ~On() {
    if (!other) return;
    if (mx::default_device() != device) mx::set_default_device(device);
    mx::set_default_stream(before);
  }
};

/* Holds Python's lock meanwhile, too. */
struct InPython {
  Gil gil;
  On on;
  explicit InPython(mx::Stream s) : on(s) {}
};

/* The tuple that a function of Python gives for a word and arguments, which are given away. */
object* ask(object* function, const char* what, std::vector<object*> arguments) {
  arguments.insert(arguments.begin(), PyUnicode_FromString(what));
  Reference tuple(tuple_by(arguments.size(), [&](size_t i) { return arguments[i]; }));
  object* found = PyObject_CallObject(function, tuple);
  if (found && PyTuple_Size(found) >= 0) return found;
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt(); /* once more, behind MLX's error */
  PyErr_Clear();
  if (found) Py_DecRef(found);
  std::string text = std::exchange(raised_text, "");
  throw std::invalid_argument(text.empty() ? "ferrule: a rule failed" : text);
}

/* A step of MLX's evaluation, which may raise. MLX before 0.32.1 then frees arrays that its threads still
 * write to, so these are waited for. */
template <class Step>
void settled([[maybe_unused]] mx::Stream stream, Step step) {
#if MLX_VERSION_NUMERIC >= 32001
  step();
#else
  try {
    step();
  } catch (...) {
    mx::synchronize(stream);
    throw;
  }
#endif
}

/* MLX's primitive of no text and no numbers. */
struct Bare : Base {
  using Base::Base;
  explicit Bare(mx::Stream stream)
      : Base(stream, std::string(), std::string(), {1, 1, 1}, {1, 1, 1}, {}, true, std::nullopt, {}, false, 0) {}
};

/* What a kernel's call has not: raises when it is evaluated, or compiled shapeless. MLX asks a node inside
 * an mx.custom_function for what the function has a rule for, and then does not use it. */
class Missing : public Bare {
 public:
  std::string why;

  Missing(mx::Stream stream, std::string why) : Bare(stream), why(std::move(why)) {}
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override { throw std::invalid_argument(why); }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { raise(); }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { raise(); }

 private:
  void raise() {
    settled(stream(), [this] { throw std::invalid_argument(why); });
  }
};

/* A result inside an mx.custom_function with rules, where MLX puts an operation behind it that can be neither
 * compiled shapeless nor exported. It says so before that one is asked, with other words. It is in a graph
 * only if that one is: what the function's own rules give does not need it. */
class Refused : public Missing {
 public:
  using Missing::Missing;
  const char* name() const override { throw std::invalid_argument(why); } /* asked for by an export */

  /* MLX asks for these, and then does not use them. */
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>& tangents,
                             const std::vector<int>&) override {
    return tangents;
  }
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    return {inputs, axes};
  }
};

/* Finds out how kernels are put into MLX's graphs. */
void try_out(mx::Stream stream) {
  if (probing || !probe) return;
  probing = true;
  try {
    Py_DecRef(ask(probe, "probe", {PyLong_FromLong(stream.index)}));
  } catch (const std::exception&) { /* it has said so, and chosen */
  }
  probing = false;
}

/* How many nodes a thread has made inside functions that MLX traces, and of what the last one was. */
thread_local int64_t nodes_traced;
thread_local std::string last_traced;

class Node : public Bare {
 public:
  std::shared_ptr<const Plan> plan;
  Given given;
  std::vector<mx::Shape> traced; /* level 0 in a trace: the inputs' shapes, for which its numbers are */

  Node(mx::Stream stream, std::shared_ptr<const Plan> plan, Given given)
      : Bare(stream), plan(std::move(plan)), given(std::move(given)) {}

  /* With all that a file holds of it. */
  template <class... Record>
  Node(std::shared_ptr<const Plan> plan, mx::Stream stream, Record&&... record)
      : Bare(stream, std::forward<Record>(record)...), plan(std::move(plan)) {}

  const char* name() const override { return plan->label.c_str(); }

  static std::vector<mx::array> make(const std::shared_ptr<const Plan>& plan, Given given, std::vector<mx::array> arrays,
                                     mx::Stream stream) {
    raise_late();
    if (on_cuda(stream) && route == UNTRIED) try_out(stream);
    Work w;
    read(w, *plan, given, arrays, Memory::none);
    w.call.request.aligned = 1;
    bind(w, *plan, on_cuda(stream));
    if (!on_metal(stream)) find_entry(w); /* a kernel that does not compile is an error here */
    auto node = std::make_shared<Node>(stream, plan, std::move(given));
    bool traced = false;
    for (const mx::array& a : arrays) traced = traced || a.is_tracer();
    if (traced) {
      nodes_traced++;
      last_traced = plan->name;
      if (plan->fixed)
        for (const mx::array& a : arrays) node->traced.push_back(a.shape());
    }
    if (plan->op->outputs > 1) return mx::array::make_arrays(shapes_of(w, *plan), dtypes_of(w), node, std::move(arrays));
    std::vector<mx::array> made;
    made.emplace_back(shape_of(w, *plan, 0), dtype_at[w.found.outputs[0].dtype], std::move(node), std::move(arrays));
    return made;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    if (plan->fixed) {
      check_fixed(inputs);
      return plan->shapes;
    }
    Work w;
    read(w, *plan, given, inputs, Memory::none);
    bind(w, *plan, on_cuda(stream()));
    return shapes_of(w, *plan);
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto node = dynamic_cast<const Node*>(&other);
    return node && node->plan == plan && node->given == given;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    settled(stream(), [&] { begin_on_cpu(inputs, outputs); });
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    settled(stream(), [&] { begin_on_gpu(inputs, outputs); });
  }

  void begin_on_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    raise_late();
    if (plan->fixed) check_fixed(inputs);
    if (!(plan->devices & CPU)) return eval_python(inputs, outputs);
    std::shared_ptr<Job> job = new_job();
    Work& w = job->work;
    read(w, *plan, given, inputs, Memory::host);
    bind(w, *plan, false);
    find_entry(w, true);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (const mx::array& a : inputs) job->memory.push_back(a.data_shared_ptr());
    void* pointers[FR_MAX_ARGUMENTS];
    for (size_t i = 0; i < outputs.size(); i++) {
      mx::array& out = outputs[i];
      allocate_on_host(out, [&] { return plan->name + ": output " + std::to_string(i + 1) + " of " + std::to_string(outputs.size()); }, FR_CANARY);
      fr_put_canary(out.data<char>() + out.nbytes(), FR_CANARY);
      pointers[i] = out.data<char>();
      encoder.set_output_array(out);
      job->memory.push_back(out.data_shared_ptr());
      job->outputs.push_back({out.data<char>(), out.nbytes(), plan->op->output_name[i], out.shape()});
      if (!plan->fills.empty() || w.body->zeroed) {
        std::string element = plan->fills.empty() ? std::string(out.itemsize(), '\0') : plan->fills[i];
        job->first.push_back([at = out.data<char>(), count = out.size(), element] { fill(at, count, element); });
      }
    }
    size_t next = 0;
    for (int i = 0; i < plan->op->inputs; i++) {
      if (!fr_is_array(&w.call, i)) continue;
      const mx::array& a = inputs[next++];
      encoder.set_input_array(a);
      if (!w.entry || !w.body->contiguous || a.flags().row_contiguous || a.size() == 0) continue;
      mx::array copy(a.shape(), a.dtype(), nullptr, {});
      allocate_on_host(copy, [&] { return plan->name + ": a row-contiguous copy of input " + std::to_string(i + 1) + " of " + std::to_string(plan->op->inputs); });
      char* to = copy.data<char>();
      job->first.push_back([from = a.data<char>(), to, item = a.itemsize(), sizes = a.shape(), strides = a.strides()] {
        copy_strided(from, to, item, sizes, strides);
      });
      fr_row_strides(w.call.input[i].ndim, w.sizes[i], w.strides[i]); /* the kernel is given what it sees of the copy */
      w.call.pointer[i] = to;
      job->memory.push_back(copy.data_shared_ptr());
    }
    if (w.entry) fr_prepare_cpu(&w.call, w.entry, w.body, pointers, &job->cpu);
    if (!w.entry && job->first.empty()) return;
    job->name = plan->name;
    encoder.dispatch([job]() { run(*job); });
  }

  void begin_on_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    if (on_metal(stream())) return eval_metal(inputs, outputs);
    if (!(plan->devices & CUDA) && !(plan->elsewhere & CAPTURED)) return eval_python(inputs, outputs);
    if (plan->fixed) check_fixed(inputs);
    if (by_mlx()) return eval_by_mlx(inputs, outputs);
    Work w;
    fr_gpu_job job;
    mx::Stream s = stream();
    auto& encoder = mx::cu::get_command_encoder(s);
    read(w, *plan, given, inputs, Memory::device);
    w.call.request.device = s.device.index;
    bind(w, *plan, true);
    std::vector<mx::array> copies; /* all inputs, where one had to be copied */
    auto aligned_to = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
    bool aligned = true;
    size_t next = 0;
    for (int i = 0; i < plan->op->inputs; i++) {
      if (!fr_is_array(&w.call, i)) continue;
      const mx::array& a = inputs[next++];
      if ((!w.body || w.body->contiguous) && !a.flags().row_contiguous && a.size()) {
        if (copies.empty()) copies = inputs;
        copies[next - 1] = in_rows(a, s);
        w.call.pointer[i] = device_pointer(copies[next - 1]);
        fr_row_strides(w.call.input[i].ndim, w.sizes[i], w.strides[i]);
      }
      aligned = aligned && aligned_to(w.call.pointer[i]);
    }
    const std::vector<mx::array>& arrays = copies.empty() ? inputs : copies; /* as the kernel takes them */
    void* pointers[FR_MAX_ARGUMENTS];
    for (size_t i = 0; i < outputs.size(); i++) {
      mx::array& out = outputs[i];
      if (out.size() == 0) {
        out.set_data(mx::allocator::malloc(0));
        pointers[i] = nullptr;
        continue;
      }
      if (!plan->fills.empty()) {
        made_by(mx::full(out.shape(), scalar_of(plan->fills[i], out.dtype()), out.dtype(), s), "Full", out, encoder);
      } else if (w.body && w.body->zeroed) {
        made_by(mx::full(out.shape(), scalar_of(std::string(out.itemsize(), '\0'), out.dtype()), out.dtype(), s), "Full", out, encoder);
      } else if (outputs.size() == 1) {
        allocate(outputs, s);
      } else {
        std::vector<mx::array> one{out};
        allocate(one, s);
      }
      pointers[i] = device_pointer(out);
      aligned = aligned && aligned_to(pointers[i]);
    }
    if (!w.body) {
      if (!eval_captured(w, arrays, outputs, pointers, encoder)) eval_python(inputs, outputs);
      return;
    }
    w.call.request.aligned = aligned;
    find_entry(w, true);
    if (!w.entry || !w.entry->call.function) return;
    fr_prepare_gpu(&w.call, w.entry, w.body, &w.found, pointers, &job);
    for (const mx::array& a : arrays) encoder.set_input_array(a);
    for (const mx::array& out : outputs) encoder.set_output_array(out);
    const cuda_call& c = w.entry->call;
    encoder.add_kernel_node_raw(static_cast<CUfunc_st*>(c.function), {c.blocks[0], c.blocks[1], c.blocks[2]},
                                {c.threads[0], c.threads[1], c.threads[2]}, {0, 0, 0}, c.shared, job.arguments);
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override {
    InPython in_python(stream());
    std::vector<int> place = places(), wanted;
    for (int k : argnums) wanted.push_back(place[k]);
    Reference found(ask(plan->python, "vjp", {of_inputs(primals), tuple_of(cotangents), tuple_of(outputs), tuple_of(wanted)}));
    std::vector<mx::array> grads;
    for (int k : argnums) grads.push_back(array_of(found, place[k], primals[k]));
    return grads;
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override {
    InPython in_python(stream());
    if (plan->level0) return missing("jvp", primals, {});
    std::vector<int> place = places();
    object* given_tangents = nones(asked());
    for (size_t k = 0; k < argnums.size(); k++)
      PyTuple_SetItem(given_tangents, place[argnums[k]], wrapped(tangents[k]));
    return arrays_in(Reference(ask(plan->python, "jvp", {of_inputs(primals), given_tangents})));
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    InPython in_python(stream());
    if (plan->level0)
      return {missing("vmap", inputs, axes), std::vector<int>(static_cast<size_t>(plan->op->outputs), 0)};
    std::vector<int> place = places();
    object* where = nones(asked());
    for (size_t k = 0; k < axes.size(); k++)
      if (axes[k] >= 0) PyTuple_SetItem(where, place[k], PyLong_FromLong(axes[k]));
    Reference found(ask(plan->python, "vmap", {of_inputs(inputs), where}));
    std::vector<mx::array> outputs = arrays_in(item_at(found, 0));
    std::vector<int> batched;
    for (size_t i = 0; i < outputs.size(); i++) {
      object* axis = item_at(item_at(found, 1), static_cast<ssize_t>(i));
      batched.push_back(axis == none ? -1 : static_cast<int>(PyLong_AsLongLong(axis)));
    }
    return {std::move(outputs), std::move(batched)};
  }

 private:
  /* Lets Python carry it out: a function, or what C has no room for. */
  void eval_python(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    mx::synchronize(stream()); /* what computes the inputs was only begun */
    std::vector<mx::array> leaves = leaves_of(inputs);
    Gil gil;
    take(ask(plan->python, "run", {of_inputs(leaves)}), outputs);
  }

  /* Lets MLX launch it on this stream, as it does for mx.fast.precompiled_cuda_kernel. */
  void eval_by_mlx(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    Work w;
    read(w, *plan, given, inputs, Memory::none);
    w.call.request.device = stream().device.index;
    bind(w, *plan, true);
    if (!w.body && plan->elsewhere & CPU) return eval_python(inputs, outputs);
    if (!w.body)
      throw std::runtime_error("ferrule: " + plan->name + " has several steps, clusters or a fill of its own, which MLX " + std::string(mx::version()) + " can only be given in ways that this ferrule does not know");
    if (!w.body->contiguous) read_strides(w, *plan, inputs);
    const void* fill = plan->fills.empty() ? nullptr : plan->fills[0].data();
    std::vector<mx::array> leaves = leaves_of(inputs);
    InPython in_python(stream());
    take(ask(plan->python, "by_mlx", {of_inputs(leaves), PyLong_FromVoidPtr(&w.call.request), PyLong_FromVoidPtr(const_cast<void*>(fill)), PyLong_FromLong(w.body->contiguous)}), outputs);
  }

  /* The same arrays as ones that nobody computes and nobody waits for. */
  static std::vector<mx::array> leaves_of(const std::vector<mx::array>& arrays) {
    std::vector<mx::array> leaves;
    for (const mx::array& a : arrays) {
      leaves.emplace_back(a.shape(), a.dtype(), nullptr, std::vector<mx::array>{});
      leaves.back().copy_shared_buffer(a);
      leaves.back().set_status(mx::array::Status::available);
    }
    return leaves;
  }

  /* Makes the arrays of a tuple, which is let go, the outputs. */
  static void take(object* tuple, std::vector<mx::array>& outputs) {
    Reference found(tuple);
    for (size_t i = 0; i < outputs.size(); i++)
      outputs[i].copy_shared_buffer(array_at(found, static_cast<ssize_t>(i)));
  }

  /* Lets MLX's own node do it, made anew for these inputs. */
  void eval_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    if (!(plan->devices & CPU)) return eval_python(inputs, outputs);
    InPython in_python(stream());
    mx::array first = array_at(Reference(ask(plan->python, "metal", {of_inputs(inputs)})), 0);
    std::vector<mx::array> given = first.inputs();
    first.primitive().eval_gpu(given, outputs);
  }

  /* Adds what Python launches as a graph of its own; false where that is a function, which no graph
   * holds. Kernels with clusters are right in no other way: MLX takes graphs that differ in the size of
   * clusters for the same. */
  bool eval_captured(Work& w, const std::vector<mx::array>& arrays, std::vector<mx::array>& outputs,
                     void* const* pointers, mx::cu::CommandEncoder& encoder) {
    static thread_local Capture capture;
    Gil gil;
    mx::Stream s = stream();
    CUgraph_st* graph = nullptr;
    object* found;
    evaluated_on = &s;
    Capture::check(capture.begin(capture.stream, 2 /* relaxed: a kernel may be loaded meanwhile */));
    try {
      found = ask(plan->python, "captured", {of_inputs(arrays), tuple_of(w.call.pointer, plan->op->inputs), tuple_of(pointers, plan->op->outputs),
                                             PyLong_FromVoidPtr(capture.stream), PyLong_FromLong(s.device.index)});
    } catch (...) {
      capture.end(capture.stream, &graph);
      if (graph) capture.destroy(graph);
      evaluated_on = nullptr;
      throw;
    }
    Reference tuple(found);
    evaluated_on = nullptr;
    Capture::check(capture.end(capture.stream, &graph));
    bool launched = PyTuple_Size(tuple) == 1;
    if (launched) {
      ssize_t size;
      std::string key = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, 0), &size);
      if (!key.empty()) {
        for (const mx::array& a : arrays) encoder.set_input_array(a);
        for (const mx::array& out : outputs) encoder.set_output_array(out);
        encoder.add_graph_node(graph, "(F" + key + ")", true);
      }
    }
    if (graph) capture.destroy(graph); /* MLX has a copy */
    return launched;
  }

  /* Arrays like the outputs, batched as the inputs are along these axes, that raise what Python says. */
  std::vector<mx::array> missing(const char* what, const std::vector<mx::array>& inputs,
                                 const std::vector<int>& axes) {
    std::string why;
    try {
      Py_DecRef(ask(plan->python, what, {}));
    } catch (const std::exception& error) {
      why = error.what();
    }
    std::vector<mx::array> values; /* what one call sees, without elements */
    int size = -1;
    for (size_t i = 0; i < inputs.size(); i++) {
      mx::Shape shape = inputs[i].shape();
      if (i < axes.size() && axes[i] >= 0) {
        size = shape[axes[i]];
        shape.erase(shape.begin() + axes[i]);
      }
      values.emplace_back(shape, inputs[i].dtype(), nullptr, std::vector<mx::array>{});
    }
    Work w;
    read(w, *plan, given, values, Memory::none);
    bind(w, *plan, on_cuda(stream()));
    std::vector<mx::Shape> shapes = shapes_of(w, *plan);
    if (size >= 0)
      for (mx::Shape& shape : shapes) shape.insert(shape.begin(), size);
    return mx::array::make_arrays(shapes, dtypes_of(w), std::make_shared<Missing>(stream(), why), inputs);
  }

  void check_fixed(const std::vector<mx::array>& inputs) const {
    for (size_t i = 0; i < traced.size(); i++) {
      if (inputs[i].shape() == traced[i]) continue;
      Gil gil;
      auto text = [](const mx::Shape& shape) { return PyUnicode_FromString(shown(shape).c_str()); };
      object* index = PyLong_FromLong(static_cast<long>(i));
      Py_DecRef(ask(plan->python, "stale", {index, text(traced[i]), text(inputs[i].shape())}));
    }
  }

  /* How many inputs Python's rules have. */
  virtual int asked() const { return plan->op->inputs; }

  /* Which of them each of the node's is. */
  virtual std::vector<int> places() const {
    std::vector<int> found;
    for (int i = 0; i < plan->op->inputs; i++)
      if (plan->op->input[i].kind == INPUT_ARRAY && given.present >> i & 1) found.push_back(i);
    return found;
  }

  /* These inputs: arrays, numbers, None. */
  virtual object* of_inputs(const std::vector<mx::array>& arrays) const {
    size_t next = 0;
    return tuple_by(static_cast<size_t>(plan->op->inputs), [&](size_t i) {
      int32_t kind = plan->op->input[i].kind;
      if (kind == INPUT_ARRAY) return given.present >> i & 1 ? wrapped(arrays[next++]) : held(none);
      if (kind == INPUT_FLOAT) return PyFloat_FromDouble(given.numbers[i].first);
      long long number = given.numbers[i].second;
      return kind == INPUT_BOOL ? PyBool_FromLong(number != 0) : PyLong_FromLongLong(number);
    });
  }

  /* A gradient; zeros for an input that has none. */
  static mx::array array_of(object* found, int i, const mx::array& like) {
    return item_at(found, i) == none ? mx::zeros_like(like) : array_at(found, i);
  }
};

}  // namespace

#endif
