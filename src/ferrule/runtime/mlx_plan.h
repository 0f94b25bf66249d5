/* What a node of MLX's graph is of: an op, or a kernel's call; and its launch, worked out from arrays. */
#ifndef FERRULE_MLX_PLAN_H
#define FERRULE_MLX_PLAN_H

#include <memory>
#include <optional>

#include "mlx_cuda.h"
#include "mlx_python.h"
#include "op_calls.h"

/* What MLX's dtypes are in ferrule.dtypes.ALL; -1 where they are not there. */
static int8_t place_of[16];
static std::vector<mx::Dtype> dtype_at; /* the reverse */

namespace {

/* What mx.export_function calls a primitive that files cannot hold, and mx.export_to_dot one that it draws:
 * MLX asks for one name. The first cuts it at a space. */
std::string not_for_files(const std::string& name) {
  std::string text;
#if MLX_VERSION_NUMERIC >= 32000
  std::string why = " (evaluate it before mx.export_function)";
#else
  std::string why = " (MLX 0.32.0 and newer export it)";
#endif
  for (char c : name + why) text += c == ' ' ? std::string("\u00a0") : std::string(1, c);
  return text;
}

enum { CAPTURED = 4 }; /* Python launches on GPUs what a graph can hold: kernels, units */

/* What was asked for: an op; or a kernel with sizes as numbers (level 0). It never changes. */
struct Plan {
  fr_op* op;         /* lives as long as this, and as what Python calls */
  int number;        /* by which Python knows the op */
  int devices;       /* of CPU and CUDA: where kernels are launched here; elsewhere Python is asked */
  int elsewhere;     /* where Python can carry it out: of CPU and CUDA, and CAPTURED */
  std::string name;  /* for messages */
  object* python;    /* what is asked of Python: see hosts/mlx/node.py; lives as long */
  bool level0;       /* a kernel's call */
  bool fixed;        /* with numbers, which are the rest of this */
  std::vector<mx::Shape> shapes{};
  std::vector<int32_t> dtypes{};
  uint32_t grid[6]{};
  int64_t template_value{}; /* by which Python knows the template */
  std::vector<std::string> fills{}; /* one element of each output, or none */
  std::string label = not_for_files(name);
};

/* Takes the outputs' shapes and places of their dtypes from a tuple of pairs, as Python's `outputs_of` has them. */
void take_outputs(object* outputs, std::vector<mx::Shape>& shapes, std::vector<int32_t>& dtypes) {
  for (ssize_t i = 0; i < PyTuple_Size(outputs); i++) {
    object *pair = item_at(outputs, i), *sizes = item_at(pair, 0);
    mx::Shape shape;
    for (ssize_t d = 0; d < PyTuple_Size(sizes); d++)
      shape.push_back(static_cast<mx::ShapeElem>(PyLong_AsLongLong(item_at(sizes, d))));
    shapes.push_back(std::move(shape));
    dtypes.push_back(static_cast<int32_t>(PyLong_AsLongLong(item_at(pair, 1))));
  }
}

using Handle = std::shared_ptr<const Plan>; /* what Python has of a kernel's plan, which lives for ever */

/* What Python's function that calls an op has of its plan. Python's collector sees that the function holds
 * the op, and the op the function; so the plan holds neither, and `used` does, which the nodes have. */
struct Owned {
  Handle plan;
  object* kept; /* what the plan points at; the function holds it */
  std::weak_ptr<const Plan> used;

  /* The plan, for a node; Python's lock is held. */
  Handle use() {
    Handle found = used.lock();
    if (found) return found;
    finish_letting_go(many_gone);
    auto last = [plan = plan, kept = held(kept)](const Plan*) { let_go(kept); };
    used = found = Handle(plan.get(), std::move(last));
    return found;
  }
};

/* The numbers among an op's inputs, and which of its arrays are there. */
struct Given {
  uint64_t present = ~UINT64_C(0);
  std::vector<std::pair<double, int64_t>> numbers; /* one per input, or none at all */
  bool operator==(const Given&) const = default;
};

/* A launch that was worked out from arrays. */
struct Work {
  fr_call call;
  fr_rule_result found;
  int64_t sizes[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  int64_t strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM];
  const fr_body* body;
  fr_table_entry* entry; /* NULL where no thread runs */
};

[[noreturn]] void refuse(const Work& w) {
  const char* text = w.call.request.text;
  throw std::invalid_argument(text ? text : "ferrule: a kernel's call failed");
}

/* Has Python say what is wrong. */
[[noreturn]] void refuse_by_python(Work& w) {
  fr_shared.resolve(&w.call.request);
  refuse(w);
}

std::string shown(const mx::Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

/* Where the inputs' elements are, as far as they are evaluated. */
enum class Memory { none, host, device };

/* Reads the inputs. */
void read(Work& w, const Plan& plan, const Given& given, const std::vector<mx::array>& arrays,
          Memory memory) {
  fr_op* op = plan.op;
  fr_call* c = &w.call;
  fr_begin(c, op, plan.number);
  size_t next = 0;
  for (int i = 0; i < op->inputs; i++) {
    fr_rule_input* in = &c->input[i];
    if (op->input[i].kind != INPUT_ARRAY) {
      bool good = op->input[i].kind == INPUT_FLOAT
                      ? fr_give_float(c, i, given.numbers[i].first)
                      : fr_give_integer(c, i, given.numbers[i].second);
      if (!good) in->dtype = -2;
      continue;
    }
    in->present = given.present >> i & 1;
    c->pointer[i] = nullptr;
    if (!in->present) continue;
    const mx::array& a = arrays[next++];
    in->ndim = static_cast<int32_t>(a.ndim());
    in->dtype = place_of[static_cast<int>(a.dtype().val())];
    in->sizes = w.sizes[i];
    c->strides[i] = w.strides[i];
    if (in->ndim > FR_MAX_NDIM)
      throw std::invalid_argument(plan.name + ": input " + std::to_string(i + 1) + " of " + std::to_string(op->inputs) +
                                  " has " + std::to_string(in->ndim) + " dims, of the shape " + shown(a.shape()) +
                                  "; expected 16 dims at most. Merge some, by mx.flatten or mx.reshape.");
    for (int d = 0; d < in->ndim; d++) w.sizes[i][d] = a.shape()[d];
    if (memory == Memory::none) {
      fr_row_strides(in->ndim, w.sizes[i], w.strides[i]);
      continue;
    }
    for (int d = 0; d < in->ndim; d++) w.strides[i][d] = a.strides()[d];
    if (memory == Memory::host)
      c->pointer[i] = const_cast<char*>(a.data<char>());
    else if (a.size())
      c->pointer[i] = device_pointer(a);
  }
}

/* Reads the strides of arrays whose memory is not known. */
void read_strides(Work& w, const Plan& plan, const std::vector<mx::array>& arrays) {
  for (int i = 0, next = 0; i < plan.op->inputs; i++) {
    if (!fr_is_array(&w.call, i)) continue;
    const mx::array& a = arrays[next++];
    for (size_t d = 0; d < a.ndim(); d++) w.strides[i][d] = a.strides()[d];
  }
}

/* Sizes and dtypes of the outputs, and the launch. */
void bind(Work& w, const Plan& plan, bool gpu) {
  fr_call* c = &w.call;
  fr_op* op = plan.op;
  c->request.device_type = gpu ? CUDA : CPU;
  if (plan.fixed) {
    for (int i = 0; i < op->outputs; i++) {
      fr_rule_output* out = &w.found.outputs[i];
      out->dtype = plan.dtypes[i];
      out->ndim = static_cast<int32_t>(plan.shapes[i].size());
      for (int d = 0; d < out->ndim; d++) out->sizes[d] = plan.shapes[i][d];
    }
    memcpy(c->grid, plan.grid, sizeof c->grid);
    c->template_value[0] = plan.template_value;
    c->request.grid = c->grid;
    c->request.template_value = c->template_value;
    c->request.output = w.found.outputs;
    c->request.body = 0;
    w.body = &op->body[0];
    return;
  }
  bool good = true;
  for (int i = 0; i < op->inputs; i++) good = good && c->input[i].dtype != -2;
  if (!good || fr_rule_bind(op->program, c->input, &w.found)) refuse_by_python(w);
  w.body = nullptr;
  if (!(plan.devices & c->request.device_type)) {
    if (plan.elsewhere & c->request.device_type) return;
    refuse_by_python(w);
  }
  int b = fr_choose(c, &w.found);
  if (b < 0 || !fr_work_out(c, &op->body[b], &w.found)) refuse_by_python(w);
  c->request.body = b;
  c->request.output = w.found.outputs;
  w.body = &op->body[b];
  if (fr_no_thread(c) && !w.body->zeroed && plan.fills.empty() && fr_unwritten(op, &w.found)) refuse_by_python(w);
}

void find_entry(Work& w, bool evaluated = false) {
  w.entry = nullptr;
  if (!w.body || fr_no_thread(&w.call)) return;
  w.entry = fr_entry_for(&w.call, w.call.request.body, &w.found);
  if (w.entry) return;
  const char* text = w.call.request.text;
  if (evaluated && text && !strcmp(text, "KeyboardInterrupt")) { /* Python sees MLX's error alone */
    Gil gil;
    PyErr_SetInterrupt();
  }
  refuse(w);
}

mx::Shape shape_of(const Work& w, const Plan& plan, int i) {
  const fr_rule_output* out = &w.found.outputs[i];
  mx::Shape shape;
  for (int d = 0; d < out->ndim; d++) {
    if (out->sizes[d] > INT32_MAX)
      throw std::invalid_argument(plan.name + ": output " + std::to_string(i + 1) + " of " +
                                  std::to_string(w.call.op->outputs) + " has the size " + std::to_string(out->sizes[d]) +
                                  " along dim " + std::to_string(d) + "; MLX has 2147483647 at most.");
    shape.push_back(static_cast<mx::ShapeElem>(out->sizes[d]));
  }
  return shape;
}

std::vector<mx::Shape> shapes_of(const Work& w, const Plan& plan) {
  std::vector<mx::Shape> shapes;
  for (int i = 0; i < w.call.op->outputs; i++) shapes.push_back(shape_of(w, plan, i));
  return shapes;
}

std::vector<mx::Dtype> dtypes_of(const Work& w) {
  std::vector<mx::Dtype> dtypes;
  for (int i = 0; i < w.call.op->outputs; i++) dtypes.push_back(dtype_at[w.found.outputs[i].dtype]);
  return dtypes;
}

}  // namespace

#endif
