/* MLX's matrix products that gather or dequantize, and its broadcasts, with derivatives and batches of
 * ferrule's own.
 *
 * MLX's kernels and its file format are right; its rules are not, or are missing: see
 * hosts/mlx/matmul.py, which has them. A node here is a subclass of MLX's primitive, so that
 * mx.export_function writes MLX's own record of it. It evaluates through MLX's primitive, which it keeps:
 * that one holds what was asked for and no sizes, so one of them serves inputs of any shape.
 *
 * Part of mlx_node.cpp's translation unit.
 */
#include "mlx/primitives.h"
#include "mlx/version.h"

/* libmlx hides these. Defined here, and hidden as well, the compiler can emit the classes' vtables;
 * `Ruled` overrides all of them. */
#define NOT_REACHED                                          \
  {                                                          \
    throw std::runtime_error("ferrule: not reached");        \
  }
#define FR_BASE(CLASS)                                                                        \
  void CLASS::eval_cpu(const std::vector<array>&, array&) NOT_REACHED                         \
  void CLASS::eval_gpu(const std::vector<array>&, array&) NOT_REACHED                         \
  bool CLASS::is_equivalent(const Primitive&) const NOT_REACHED                               \
  std::vector<array> CLASS::vjp(const std::vector<array>&, const std::vector<array>&,         \
                                const std::vector<int>&, const std::vector<array>&) NOT_REACHED
#define FR_MORE(CLASS)                                                                        \
  std::vector<array> CLASS::jvp(const std::vector<array>&, const std::vector<array>&,         \
                                const std::vector<int>&) NOT_REACHED                          \
  std::pair<std::vector<array>, std::vector<int>> CLASS::vmap(const std::vector<array>&,      \
                                                              const std::vector<int>&) NOT_REACHED
#define FR_SHAPES(CLASS) \
  std::vector<Shape> CLASS::output_shapes(const std::vector<array>&) NOT_REACHED

namespace mlx::core {
FR_BASE(QuantizedMatmul)
FR_MORE(QuantizedMatmul)
FR_SHAPES(QuantizedMatmul)
FR_BASE(GatherQMM)
FR_MORE(GatherQMM)
FR_BASE(GatherMM)
FR_BASE(Broadcast)
FR_MORE(Broadcast)
FR_SHAPES(Broadcast)
#if MLX_VERSION_NUMERIC >= 32000 /* before, these two had none */
FR_SHAPES(GatherQMM)
FR_SHAPES(GatherMM)
#endif
}  // namespace mlx::core

namespace {

template <class Stock>
class Ruled : public Stock {
 public:
  std::shared_ptr<mx::Primitive> stock;
  object* rules; /* what is asked of Python; lives for ever */

  template <class... State>
  Ruled(std::shared_ptr<mx::Primitive> stock, object* rules, State... state)
      : Stock(stock->stream(), state...), stock(std::move(stock)), rules(rules) {}

  /* The same call as `stock`, which is a Stock. */
  static std::shared_ptr<mx::Primitive> make(std::shared_ptr<mx::Primitive> stock, object* rules) {
    auto make = [&](auto... state) -> std::shared_ptr<mx::Primitive> {
      return std::make_shared<Ruled>(stock, rules, state...);
    };
    auto state = static_cast<const Stock&>(*stock).state();
    if constexpr (requires { std::tuple_size<decltype(state)>::value; })
      return std::apply(make, state);
    else
      return make(state);
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    if (!is_empty(out)) static_cast<mx::UnaryPrimitive&>(*stock).eval_cpu(inputs, out);
  }

  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    if (is_empty(out)) return;
    auto& primitive = static_cast<mx::UnaryPrimitive&>(*stock);
    constexpr bool quantized = std::is_same_v<Stock, mx::GatherQMM> || std::is_same_v<Stock, mx::QuantizedMatmul>;
    if (!quantized || !on_cuda(this->stream())) return primitive.eval_gpu(inputs, out);
    std::vector<mx::array> rows = inputs; /* MLX's CUDA kernels do not look at strides of batches */
    for (mx::array& one : rows) one = in_rows(one, this->stream());
    primitive.eval_gpu(rows, out);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return stock->output_shapes(inputs);
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto node = dynamic_cast<const Ruled*>(&other);
    return node && node->rules == rules && stock->is_equivalent(*node->stock);
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    InPython in_python(this->stream());
    return arrays_in(Reference(ask(rules, "vjp", {tuple_of(primals), wrapped(cotangents[0]), tuple_of(argnums)})));
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override {
    InPython in_python(this->stream());
    return arrays_in(Reference(ask(rules, "jvp", {tuple_of(primals), tuple_of(tangents), tuple_of(argnums)})));
  }

  /* The batch comes first in what the rule gives. */
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    InPython in_python(this->stream());
    return {arrays_in(Reference(ask(rules, "vmap", {tuple_of(inputs), tuple_of(axes)}))), {0}};
  }

 private:
  /* MLX's kernels divide by the sizes of what they write. */
  static bool is_empty(mx::array& out) {
    if (out.size() != 0) return false;
    out.set_data(mx::allocator::malloc(0));
    return true;
  }
};

}  // namespace

/* What the primitive of `stock` makes of `inputs_of`'s inputs, both of them results of the same of MLX's
 * functions. NotImplemented: Python raises `fr_mlx_why`. `rules` lives for ever. */
API object* fr_mlx_ruled(object* stock, object* inputs_of, object* rules) {
  const mx::array& like = array_in(inputs_of);
  std::shared_ptr<mx::Primitive> primitive = array_in(stock).primitive_ptr();
  if (!primitive) return held(stock); /* older versions make no broadcast of equal shapes */
  std::string name = primitive->name();
  if (name == "GatherQMM")
    primitive = Ruled<mx::GatherQMM>::make(std::move(primitive), rules);
  else if (name == "QuantizedMatmul")
    primitive = Ruled<mx::QuantizedMatmul>::make(std::move(primitive), rules);
  else if (name == "Broadcast")
    primitive = Ruled<mx::Broadcast>::make(std::move(primitive), rules);
  else if (name == "GatherMM")
    primitive = Ruled<mx::GatherMM>::make(std::move(primitive), rules);
  else {
    raised_text = "this MLX made " + name + " of it, which ferrule does not know";
    return held(not_implemented);
  }
  return wrapped(mx::array(like.shape(), like.dtype(), std::move(primitive), like.inputs()));
}

/* Whether MLX traces for sizes that are not those of the arrays. It hides the flag, but then gives the
 * nodes of broadcast_arrays the other arrays, too, to work the sizes out. */
API int fr_mlx_shapeless(void) {
  return mx::broadcast_arrays({mx::array(0), mx::array({0, 0})})[0].inputs().size() > 1;
}

/* `into` with values added along axis 0, where MLX's Python has no name for it. */
API object* fr_mlx_scatter_add(object* into, object* indices, object* values) {
  return or_why([&] { return wrapped(mx::scatter_add_axis(array_in(into), array_in(indices), array_in(values), 0)); });
}
