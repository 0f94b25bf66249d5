// What a CUDA kernel is handed, and where a thread stands in its grid.
//
// A threadgroup is a block and a simdgroup is a warp. Threads outside the grid leave at once; the
// hardware's barriers do not wait for threads that have left. A text defines how blocks are laid out:
//   FR_ROW     threadgroups are one row
//   FR_BOX     blocks have the threadgroup's three sizes
//   FR_LINE    blocks are one row of the threadgroup's threads: at a ragged edge the threads that are
//              left fill simdgroups in order, as Metal numbers them
//   FR_WHOLE   (as well) every threadgroup has all its threads, so that none need ask whether it is there:
//              a branch around the body would keep the compiler from moving loads
//   FR_FAR     (as well) threadgroups are counted through, for grids beyond CUDA's limits
#pragma once

namespace fr {

// The shape or strides of an input, by value.
template <class T, int N> struct list {
  T values[N > 0 ? N : 1];
};

struct launch {
  unsigned grid[3];         // threads
  unsigned threadgroup[3];  // threads, never more than the grid
  unsigned groups[3];       // threadgroups
};

// One threadgroup, with the members of cpu.h's.
struct group {
  metal::uint3 threads_per_grid, dispatch_threads_per_threadgroup, threadgroups_per_grid;
  metal::uint3 threadgroup_position_in_grid, threads_per_threadgroup, origin;

  // ``x`` is the threadgroup's place along x.
  FR_FN explicit group(const launch& l, unsigned x = blockIdx.x)
      : threads_per_grid(l.grid[0], l.grid[1], l.grid[2]),
        dispatch_threads_per_threadgroup(l.threadgroup[0], l.threadgroup[1], l.threadgroup[2]),
        threadgroups_per_grid(l.groups[0], l.groups[1], l.groups[2]) {
#if defined(FR_FAR)
    const uint64_t index = x + uint64_t(gridDim.x) * blockIdx.y, rest = index / l.groups[0];
    threadgroup_position_in_grid =
        metal::uint3(unsigned(index % l.groups[0]), unsigned(rest % l.groups[1]), unsigned(rest / l.groups[1]));
#else
    threadgroup_position_in_grid = metal::uint3(x, blockIdx.y, blockIdx.z);
#endif
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    origin = metal::uint3(threadgroup_position_in_grid.x * t.x, threadgroup_position_in_grid.y * t.y,
                          threadgroup_position_in_grid.z * t.z);
#if defined(FR_WHOLE)
    threads_per_threadgroup = t;
#else
    threads_per_threadgroup =
        metal::uint3(smaller(threads_per_grid.x - origin.x, t.x), smaller(threads_per_grid.y - origin.y, t.y),
                     smaller(threads_per_grid.z - origin.z, t.z));
#endif
  }
  FR_FN static unsigned smaller(unsigned a, unsigned b) { return a < b ? a : b; }

  // Where this thread stands in its threadgroup, and whether it is there at all.
  FR_FN metal::uint3 position() const {
#if defined(FR_LINE)
    const metal::uint3& t = threads_per_threadgroup;
    const unsigned rest = threadIdx.x / t.x;
    return metal::uint3(threadIdx.x % t.x, rest % t.y, rest / t.y);
#elif defined(FR_BOX)
    return metal::uint3(threadIdx.x, threadIdx.y, threadIdx.z);
#else
    return metal::uint3(threadIdx.x, 0u, 0u);
#endif
  }
  FR_FN bool holds(const metal::uint3& p) const {
#if defined(FR_FAR)
    if (threadgroup_position_in_grid.z >= threadgroups_per_grid.z) return false;
#endif
#if defined(FR_WHOLE)
    return true;
#elif defined(FR_LINE)
    return threadIdx.x < threads();
#elif defined(FR_BOX)
    return origin.x + p.x < threads_per_grid.x && origin.y + p.y < threads_per_grid.y &&
           origin.z + p.z < threads_per_grid.z;
#else
    return origin.x + p.x < threads_per_grid.x;
#endif
  }
  FR_FN unsigned index(const metal::uint3& p) const {
#if defined(FR_BOX)
    return (p.z * threads_per_threadgroup.y + p.y) * threads_per_threadgroup.x + p.x;
#else
    return threadIdx.x;
#endif
  }
  FR_FN unsigned threads() const {
#if defined(FR_ROW)
    return threads_per_threadgroup.x;
#else
    return threads_per_threadgroup.x * threads_per_threadgroup.y * threads_per_threadgroup.z;
#endif
  }
  FR_FN unsigned simdgroups() const { return (threads() + 31) / 32; }
  FR_FN unsigned quadgroups() const { return (threads() + 3) / 4; }
  FR_FN unsigned dispatch_simdgroups() const {
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    return (t.x * t.y * t.z + 31) / 32;
  }
  FR_FN unsigned dispatch_quadgroups() const {
    const metal::uint3& t = dispatch_threads_per_threadgroup;
    return (t.x * t.y * t.z + 3) / 4;
  }
};

}  // namespace fr
