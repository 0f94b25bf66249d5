/* MLX's CUDA build, without its headers: where it runs kernels, and the memory of its arrays. On the CPU
 * build all of it is absent. */
#ifndef FERRULE_MLX_CUDA_H
#define FERRULE_MLX_CUDA_H

#include <atomic>
#include <dlfcn.h>
#include <functional>
#include <memory>

#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "mlx/stream.h"

#include "mlx_python.h"

struct CUfunc_st;
struct CUgraph_st;
struct dim3 {
  unsigned x, y, z;
};
namespace mlx::core::cu {
/* Names and layout as in mlx/backend/cuda/device.h; nothing here is constructed, and on the CPU build
 * all of it is absent. */
class CommandEncoder {
 public:
  WEAK void set_input_array(const array&);
  WEAK void set_output_array(const array&);
  WEAK void add_kernel_node_raw(CUfunc_st*, dim3, dim3, dim3, uint32_t, void**);
  WEAK void add_graph_node(CUgraph_st*, const std::string&, bool);
  WEAK void add_completed_handler(std::function<void()>);
};
WEAK CommandEncoder& get_command_encoder(Stream s);
struct CudaBuffer {
  void* data;
  size_t size;
  int device;
};
}  // namespace mlx::core::cu

namespace {

/* Whether a stream's kernels are CUDA's. On Apple's GPUs MLX's own node carries them out. */
bool on_cuda(const mx::Stream& stream) {
  return stream.device == mx::Device::gpu && &mx::cu::get_command_encoder;
}
bool on_metal(const mx::Stream& stream) { return stream.device == mx::Device::gpu && !on_cuda(stream); }

char* device_pointer(const mx::array& a) {
  auto* buffer = static_cast<mx::cu::CudaBuffer*>(const_cast<mx::array&>(a).buffer().ptr());
  return static_cast<char*>(buffer->data) + a.offset();
}

/* Lets MLX's own primitive make an array, in its pool of device memory. What it reads is kept until the
 * stream has done it. */
void made_by(mx::array node, const char* name, mx::array& out, mx::cu::CommandEncoder& encoder) {
  if (strcmp(node.primitive().name(), name))
    throw std::runtime_error(std::string("ferrule: this MLX makes a ") + node.primitive().name() + " where a " + name + " was expected");
  std::vector<mx::array> inputs = node.inputs(), outputs{out};
  for (mx::array& in : inputs) { /* a scalar that is seen as an array */
    if (!in.has_primitive() || in.status() != mx::array::Status::unscheduled) continue;
    std::vector<mx::array> made{in};
    in.primitive().eval_gpu(in.inputs(), made);
  }
  node.primitive().eval_gpu(inputs, outputs);
  if (!inputs.empty()) encoder.add_completed_handler([inputs]() {});
}

/* Makes memory of the device with any content. MLX's own function for that is hidden, but a unary primitive
 * does no more than to call it where its input has no elements and is not contiguous; nor does a
 * Concatenate of nothing, which adds an empty node to MLX's graph as well. */
struct Allocator {
  int stream;
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<mx::array> inputs;

  explicit Allocator(mx::Stream s) : stream(s.index), primitive(mx::exp(mx::zeros({1}), s).primitive_ptr()) {
    mx::array none(mx::allocator::malloc(0), mx::Shape{0}, mx::float32);
    mx::array::Flags flags = none.flags();
    flags.contiguous = flags.row_contiguous = flags.col_contiguous = false;
    inputs.emplace_back(mx::Shape{0}, mx::float32, nullptr, std::vector<mx::array>{});
    inputs[0].copy_shared_buffer(none, none.strides(), flags, 0);
    if (works()) return;
    inputs.clear();
    primitive = mx::concatenate({mx::zeros({2}), mx::zeros({2})}, 0, s).primitive_ptr();
    if (!works()) throw std::runtime_error("ferrule: this MLX makes memory on the GPU in a way that is not known here");
  }
  bool works() {
    std::vector<mx::array> trial{mx::array(mx::Shape{1000}, mx::float32, primitive, {})};
    primitive->eval_gpu(inputs, trial);
    const mx::array& made = trial[0];
    return made.data_shared_ptr() && made.flags().row_contiguous && made.data_size() == 1000 && !made.offset() &&
           static_cast<mx::cu::CudaBuffer*>(const_cast<mx::array&>(made).buffer().ptr())->size >= made.nbytes();
  }
};

Allocator& allocator_of(mx::Stream stream) {
  static thread_local std::vector<std::unique_ptr<Allocator>> known; /* MLX's streams are a thread's own */
  for (auto& one : known)
    if (one->stream == stream.index) return *one;
  known.push_back(std::make_unique<Allocator>(stream));
  return *known.back();
}

/* Gives memory to the one array in `out`, whose primitive is of `stream`. */
void allocate(std::vector<mx::array>& out, mx::Stream stream) {
  Allocator& found = allocator_of(stream);
  found.primitive->eval_gpu(found.inputs, out);
}

/* The array, or a copy of it in rows without gaps, which lives until the stream is done with it. */
mx::array in_rows(const mx::array& a, mx::Stream stream) {
  if (a.flags().row_contiguous || a.size() == 0) return a;
  mx::array copy = mx::contiguous(a, false, stream);
  std::vector<mx::array> made{copy};
  copy.primitive().eval_gpu({a}, made);
  mx::cu::get_command_encoder(stream).add_completed_handler([copy]() {});
  return copy;
}

mx::array scalar_of(const std::string& bytes, mx::Dtype dtype) {
  mx::array one(mx::allocator::malloc(bytes.size()), mx::Shape{}, dtype);
  memcpy(one.data<char>(), bytes.data(), bytes.size());
  return one;
}

/* What is launched on `stream` by code that knows nothing of MLX, as a graph: libcuda's functions. */
struct Capture {
  int (*create)(void**, unsigned);
  int (*begin)(void*, int);
  int (*end)(void*, CUgraph_st**);
  int (*destroy)(CUgraph_st*);
  void* stream = nullptr;

  Capture() {
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    auto find = [cuda](const char* name, void* at) {
      void* found = cuda ? dlsym(cuda, name) : nullptr;
      if (!found) throw std::runtime_error(std::string("ferrule: libcuda has no ") + name);
      memcpy(at, &found, sizeof found);
    };
    find("cuStreamCreate", &create);
    find("cuStreamBeginCapture_v2", &begin);
    find("cuStreamEndCapture", &end);
    find("cuGraphDestroy", &destroy);
    check(create(&stream, 1 /* CU_STREAM_NON_BLOCKING */));
  }
  static void check(int status) {
    if (status) throw std::runtime_error("ferrule: CUDA cannot capture a graph (error " + std::to_string(status) + ")");
  }
};

/* The stream that a kernel is being evaluated for, so that Python may ask for memory. */
thread_local const mx::Stream* evaluated_on = nullptr;

/* Kernels are put into MLX's graphs by functions that its headers do not show. hosts/mlx/probe.py tries
 * them out when the first kernel for a GPU is called; where they are not as they are known here, kernels
 * are launched by MLX. */
enum { UNTRIED, DIRECTLY, BY_MLX };
std::atomic<int> route{UNTRIED};
object* probe = nullptr;
thread_local bool probing = false; /* this thread tries it out */
bool by_mlx() { return route != DIRECTLY && !probing; }

/* What of an array on a GPU is not as it is known here; "" if all is. */
std::string strange(const mx::array& a) {
  auto missing = [](auto member) { /* a member's address, which compilers take to be there */
    void* address;
    memcpy(&address, &member, sizeof address);
    return !address;
  };
  using Encoder = mx::cu::CommandEncoder;
  if (missing(&Encoder::set_input_array) || missing(&Encoder::set_output_array) || missing(&Encoder::add_kernel_node_raw) ||
      missing(&Encoder::add_completed_handler))
    return "its functions for kernels have other names";
  auto* buffer = static_cast<mx::cu::CudaBuffer*>(const_cast<mx::array&>(a).buffer().ptr());
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  auto range = reinterpret_cast<int (*)(void*, int, uint64_t)>(cuda ? dlsym(cuda, "cuPointerGetAttribute") : nullptr);
  uint64_t start = 0;
  size_t size = 0;
  auto at = reinterpret_cast<uintptr_t>(buffer->data);
  if (!range || range(&start, 11 /* RANGE_START_ADDR */, at) || range(&size, 12 /* RANGE_SIZE */, at) || at < start ||
      at + a.nbytes() > start + size || buffer->size < a.nbytes() || buffer->device > 1024)
    return "its arrays keep their memory in another way";
  return "";
}

}  // namespace

#endif
