"""CUDA of blocks that stay (`quantized_persistent_cuda`) where there is one matrix: they share the
works of the last round along K.
"""

from __future__ import annotations

from collections.abc import Sequence

from .quantized_persistent_cuda import WORK, machine, products
from .quantized_tiles import SHARING
from .quantized_wide_cuda import ORDERED

# Puts x in order, and says of each warp that its sums are not there.
NOTHING_LEFT = ORDERED.replace("int count) {", "int count, int* there, int warps) {").replace(
    "  const int token =",
    "  for (int i = thread; i < warps; i += gridDim.x * 256) there[i] = 0;\n  const int token =",
)

# One matrix, and x as `ordered` leaves it.
DENSE = (
    WORK
    + """
// How so many works are divided: each block has as many whole ones, and where that is sooner than
// one more a share of those that are left, in blocks of K whose scales come at once.
struct Shares {
  int rounds, left, fours, sharing;
  __device__ Shares(int all, int blocks) {
    const int grid = gridDim.x;
    rounds = all / grid, left = all % grid, fours = (blocks + AT_ONCE - 1) / AT_ONCE;
    if (int64_t(grid - left) * blocks * BLOCK < int64_t(grid) * SHARING) ++rounds, left = 0;
    // Of eight blocks of K, or of one work.
    sharing = max(min(int64_t(grid), int64_t(left) * fours / 2), int64_t(left));
  }
  __device__ int begin_of(int block) const { return int64_t(left) * fours * block / sharing; }
};
struct Works {
  int count, panels;
  __device__ int tiles() const { return (count + TOK - 1) / TOK; }
  __device__ Work of(int i) const {
    const int2 place = place_of_work(i, tiles(), panels);
    if (place.y < 0) return {};
    return {place.x, 0, place.y * TOK, min(count - place.y * TOK, TOK)};
  }
  // The n-th of this block. Of two in its share the beginning of the later one comes before the end
  // of the other: who waits for sums of blocks before it leaves nobody waiting.
  __device__ Work piece(int n, int blocks) const {
    const Shares of_all(tiles() * panels, blocks);
    const int grid = gridDim.x, block = blockIdx.x, rounds = of_all.rounds, fours = of_all.fours;
    if (n < rounds) {
      Work work = of(n * grid + block);
      work.end = blocks;
      return work;
    }
    if (block >= of_all.sharing) return {};
    const int begin = of_all.begin_of(block), end = of_all.begin_of(block + 1);
    const int first = begin / fours, last = (end - 1) / fours, two = first < last;
    if (n > rounds + two) return {};
    const int which = two && n == rounds ? last : first;
    Work work = of(rounds * grid + which);
    work.begin = max(begin - which * fours, 0) * AT_ONCE;
    work.end = min(min(end - which * fours, fours) * AT_ONCE, blocks);
    return work;
  }
  // How many blocks before this one have what lies before a piece that has the end.
  __device__ int earlier(const Work& work, int blocks) const {
    if (!work.begin) return 0;
    const Shares of_all(tiles() * panels, blocks);
    const int block = blockIdx.x, first = of_all.begin_of(block) - work.begin / AT_ONCE;
    int many = 1;
    while (of_all.begin_of(block - many) > first) ++many;
    return many;
  }
  __device__ TileOfX x(const Work& work, int64_t) const {
    const uint32_t bytes = (work.count + 7) / 8 * 1024;
    return {work.at * int64_t(128), (count + 7) / 8 * int64_t(1024), bytes};
  }
};
"""
)

# Rows of y, of one matrix. Of a tile that blocks share, each but the last leaves its sums to that.
PERSISTENT = """
// A warp's sums, as its lanes have them: four after four of all lanes.
template <int S>
__device__ inline void leave_sums(const float (&sum)[R][S], float* sums, int* there) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
  float4* const to = reinterpret_cast<float4*>(sums) + int64_t(warp) * (R * S / 4) * 32 + lane;
#pragma unroll
  for (int i = 0; i < R * S / 4; ++i) {
    const float* const v = &sum[i / (S / 4)][i % (S / 4) * 4];
    to[i * 32] = {v[0], v[1], v[2], v[3]};
  }
  __syncwarp();
  if (lane == 0) {
    __threadfence();  // behind the barrier: so it orders what all lanes wrote
    *const_cast<volatile int*>(there + warp) = 1;
  }
}
// Adds what so many blocks before this one left, the next one first.
template <int S>
__device__ inline void add_left_sums(float (&sum)[R][S], const float* sums, const int* there,
                                     int earlier) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int back = 1; back <= earlier; ++back) {
    const int warp = (blockIdx.x - back) * WARPS + threadIdx.x / 32;
    if (lane == 0) {
      while (!*const_cast<const volatile int*>(there + warp));
      __threadfence();
    }
    __syncwarp();
    const float4* const from =
        reinterpret_cast<const float4*>(sums) + int64_t(warp) * (R * S / 4) * 32 + lane;
#pragma unroll
    for (int i = 0; i < R * S / 4; ++i) {
      const float4 v = __ldcg(from + i * 32);
      float* const to = &sum[i / (S / 4)][i % (S / 4) * 4];
      to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
persistent(const T* x, const void* w, const void* scales, BIASES biases, WHOLE factor,
           int64_t factors, OFFSET added, T* y, float* sums, int* there, int64_t N, int64_t K,
           int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Works works{count, int((N + ROWS - 1) / ROWS)};
  products(x, bytes_of(w), bytes_of(scales), bytes_of(biases), works, N, K,
           [&](const Work& work, auto& sum) {
    const int blocks = padded(K) / BLOCK;
    if (work.end < blocks) {
      leave_sums(sum, sums, there);
      return;
    }
    add_left_sums(sum, sums, there, works.earlier(work, blocks));
    constexpr int OWN_ROWS = R * 2;  // neighbours
    const int64_t first = int64_t(work.panel) * ROWS + warp * R * 16 + g * OWN_ROWS;
    const bool whole = R == 2 && N % 4 == 0 && size_t(y) % 8 == 0 && first < N;
    Row of[OWN_ROWS];
#pragma unroll
    for (int j = 0; j < OWN_ROWS; ++j)
      of[j] = row_of_ends(factor, factors, added, min(first + j, N - 1));
#pragma unroll
    for (int i = 0; i < TOK / 4; ++i) {
      const int token = i / 2 * 8 + t * 2 + i % 2;
      if (token >= work.count) break;
      alignas(8) T v[4];
#pragma unroll
      for (int j = 0; j < OWN_ROWS; ++j)
        v[j] = of[j](sum[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2] * LAST);
      T* const to = y + (work.at + token) * N + first;
      if (whole) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(v);
      } else {
#pragma unroll
        for (int j = 0; j < OWN_ROWS; ++j)
          if (first + j < N) to[j] = v[j];
      }
    }
  });
}
"""

# What packages for other GPUs have, which never start it.
ELSEWHERE = """
extern "C" __global__ void persistent(const T*, const void*, const void*, BIASES, WHOLE, int64_t,
                                      OFFSET, T*, float*, int*, int64_t, int64_t, int) {}
"""


def dense(widths: Sequence[int], near: int) -> str:
    """The kernel of products with one matrix."""
    text = f"{machine(widths)}{DENSE}{products(widths)}{PERSISTENT}"
    given = f"constexpr int NEAR = {near}, SHARING = {SHARING};\n{NOTHING_LEFT}"
    return f"{given}\n#ifdef __CUDA_ARCH_FEAT_SM90_ALL{text}#else{ELSEWHERE}#endif\n"
