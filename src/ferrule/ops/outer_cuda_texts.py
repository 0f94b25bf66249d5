"""CUDA of sums over the rows that indices send to one matrix: the gradient of that matrix."""

from __future__ import annotations

# Sums over the rows of each expert, in ascending order, so that they are the same each time.
LISTED = """
extern "C" __global__ void __launch_bounds__(1024)
listed(LEFTS lhs, RIGHTS rhs, int64_t* lefts, int* order, int* begins, int M, int64_t matrices,
       int experts, int rows) {
  __shared__ int of_warp[32], before;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Experts all{lhs, rhs, M, matrices, experts};
  const int expert = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) before = 0;
  __syncthreads();
  int lower = 0;
  for (int r = thread; r < rows; r += 1024) lower += all.expert(r) < expert;
  atomicAdd(&before, lower);
  __syncthreads();
  int at = before;
  if (thread == 0) begins[expert] = at;
  for (int top = 0; top < rows; top += 1024) {
    const int r = top + thread;
    const bool mine = r < rows && all.expert(r) == expert;
    const uint32_t same = __ballot_sync(~0u, mine);
    if (lane == 0) of_warp[thread / 32] = __popc(same);
    const int count = __syncthreads_count(mine);
    int place = at + __popc(same & ((1u << lane) - 1));
    for (int warp = 0; warp < thread / 32; ++warp) place += of_warp[warp];
    if (mine) order[place] = r, lefts[place] = all.from(r);
    at += count;
    __syncthreads();
  }
  if (thread == 0 && expert == experts - 1) begins[experts] = at;
}
"""
OUTER = """
// Rows that are listed, or M for each matrix.
__device__ inline int64_t begin_of(const int* begins, int matrix, int) { return begins[matrix]; }
__device__ inline int64_t begin_of(int64_t, int matrix, int M) { return int64_t(matrix) * M; }
template <class I> __device__ inline int64_t row_at(const I* rows, int64_t i) { return rows[i]; }
__device__ inline int64_t row_at(int64_t, int64_t i) { return i; }

template <class W> struct Rows {
  static constexpr bool PACKED = false;
  struct Ahead {};
  const T* from;
  ORDER order;
  int first, width, count;
  int64_t begin;
  __device__ void copy(uint32_t to, int block) const {
    copy_tile<W>(to, from, first, width, [&](int r) {
      return block * BK + r < count ? row_at(order, begin + block * BK + r) : int64_t(-1);
    });
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
outer(const T* left, const T* right, ROWS_OF_LEFT lefts, ORDER order, BEGINS begins, float* sums,
      int64_t H, int64_t V, int M) {
  using X = Side<TOK, false>;
  using W = Side<ROWS, false>;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int matrix = blockIdx.z;
  const int64_t begin = begin_of(begins, matrix, M), end = begin_of(begins, matrix + 1, M);
  const int64_t h0 = blockIdx.y * int64_t(TOK), v0 = blockIdx.x * int64_t(ROWS);
  const int count = int(end - begin);
  Rows<W> rows{right, order, int(v0), int(V), count, begin};
  auto copy_left = [&](uint32_t to, int block) {
    copy_tile<X>(to, left, int(h0), int(H), [&](int r) {
      return block * BK + r < count ? row_at(lefts, begin + block * BK + r) : int64_t(-1);
    });
  };
  Sums sum = {};
  multiply<X, W, MT>((count + BK - 1) / BK, copy_left, rows, sum);
  store<X, W>(sum, [](float v, int) { return v; }, V - v0, [&](int row) {
    return h0 + row < H ? sums + (matrix * H + h0 + row) * V + v0 : nullptr;
  });
}
"""
