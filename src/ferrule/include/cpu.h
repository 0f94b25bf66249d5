// What a CPU kernel is handed, and where a thread stands in its grid.
//
// `launch` and `worker` restate what runtime/runtime.h and devices/cpu/program.py lay out.
#pragma once

namespace fr {

struct print_message;

struct worker {
  void* scratch;
  size_t scratch_bytes;
  void* (*grow)(worker*, size_t bytes);
  int32_t index, status;
  void* (*fiber_stacks)(worker*, size_t count, size_t bytes_each, size_t* stride);
  size_t stack_bytes;
  uint8_t* held;
  uint8_t holding;
  void (*print)(worker*, const print_message*);
};

struct launch {
  void* const* buffers;            // inputs, then outputs
  const int* const* shapes;        // per input
  const int64_t* const* strides;   // per input, in elements
  const int* ndims;                // per input
  unsigned grid[3];                // threads
  unsigned threadgroup[3];         // threads, never more than the grid
  unsigned groups[3];              // threadgroups
  unsigned block;                  // threads per unit of a flat kernel, along x
};

// One threadgroup: where it stands and how large it is (the last one of an axis may be smaller).
struct group {
  metal::uint3 threads_per_grid, dispatch_threads_per_threadgroup, threadgroups_per_grid;
  metal::uint3 threadgroup_position_in_grid, threads_per_threadgroup, origin;
  unsigned n;  // threads in this threadgroup
  worker* runs = nullptr;

  explicit group(const launch* l)
      : threads_per_grid(l->grid[0], l->grid[1], l->grid[2]),
        dispatch_threads_per_threadgroup(l->threadgroup[0], l->threadgroup[1], l->threadgroup[2]),
        threadgroups_per_grid(l->groups[0], l->groups[1], l->groups[2]) {}

  FR_APART void move_to(uint64_t index) {
    const metal::uint3& g = threadgroups_per_grid;
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    const uint64_t rest = index / g.x;
    threadgroup_position_in_grid = metal::uint3(unsigned(index % g.x), unsigned(rest % g.y), unsigned(rest / g.y));
    origin = metal::uint3(threadgroup_position_in_grid.x * t.x, threadgroup_position_in_grid.y * t.y,
                          threadgroup_position_in_grid.z * t.z);
    const metal::uint3 left(threads_per_grid.x - origin.x, threads_per_grid.y - origin.y,
                            threads_per_grid.z - origin.z);
    threads_per_threadgroup = metal::uint3(left.x < t.x ? left.x : t.x, left.y < t.y ? left.y : t.y,
                                           left.z < t.z ? left.z : t.z);
    n = threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
  }
  FR_FN unsigned simdgroups() const { return (n + 31) / 32; }
  FR_FN unsigned quadgroups() const { return (n + 3) / 4; }
  FR_FN unsigned dispatch_simdgroups() const {
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    return (t.x * t.y * t.z + 31) / 32;
  }
  FR_FN unsigned dispatch_quadgroups() const {
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    return (t.x * t.y * t.z + 3) / 4;
  }
  // The position of the thread with this index: x runs fastest.
  FR_APART metal::uint3 position(unsigned index) const {
    const metal::uint3& t = threads_per_threadgroup;
    const unsigned rest = index / t.x;
    return metal::uint3(index % t.x, rest % t.y, rest / t.y);
  }
};

}  // namespace fr

#define FR_EXPORT extern "C" __attribute__((visibility("default")))

// A threadgroup variable's line and size, written where the compiler knows the size: into a section
// of its own, which `shared_memory` reads back as pairs. Returns how many words there are.
#if defined(__ELF__)
#define FR_SHARED(LINE, NAME)                                                                       \
  __asm__ volatile(".pushsection fr_shared_sizes,\"a\"\n.long %c0, %c1\n.popsection" ::"i"(LINE), "i"(sizeof(NAME)))
extern "C" __attribute__((weak, visibility("hidden"))) const unsigned fr_shared_start[] __asm__("__start_fr_shared_sizes");
extern "C" __attribute__((weak, visibility("hidden"))) const unsigned fr_shared_stop[] __asm__("__stop_fr_shared_sizes");
namespace fr {
inline unsigned shared_memory(unsigned* at, unsigned room) {
  const unsigned n = unsigned(fr_shared_stop - fr_shared_start);
  for (unsigned i = 0; i < n && i < room; ++i) at[i] = fr_shared_start[i];
  return n;
}
}  // namespace fr
#else
#define FR_SHARED(LINE, NAME) (void)0
namespace fr {
inline unsigned shared_memory(unsigned*, unsigned) { return 0; }
}  // namespace fr
#endif
