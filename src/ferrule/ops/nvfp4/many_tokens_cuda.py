"""CUDA of a mixture of experts for many tokens, on GPUs of compute capability 9.0.

Slots are sorted by expert, and their rows of x arranged as the first product reads them, which
writes what the activation makes of its sums as the second one reads it.
"""

from __future__ import annotations

# The blocks of a cluster sort slots.
SORTED_BY_CLUSTER = """
extern "C" __global__ void __launch_bounds__(1024)
sorted_by_cluster(const J* ids, MAP map, int64_t map_size, int* order, int* tiles, int experts,
                  int slots) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  sort_rows<false, 8>(Routing{ids, map, map_size, experts}, order, tiles, slots);
}
"""

# Rows of w13 are in pairs, the gate's and the one for up: of one lane.
GATE_UP = """
extern "C" __global__ void __launch_bounds__(THREADS, 1)
gate_up_of_many(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2,
                const int* order, const int* tiles, const V* weights, T* y, int64_t N, int64_t K) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Works works{tiles, int(padded(N / 2) / COLUMNS)};
  products(x, bytes_of(w), bytes_of(scales), nullptr, works, N, K,
           [&](const Work& work, auto& sum) {
    const Ends end(scale_2, weights, order + work.at, work.matrix);
    const int64_t first = int64_t(work.panel) * COLUMNS + warp % ACROSS * R * OWN;
    const int in_own = warp / ACROSS * 8;  // this warp's columns: 8 of each OWN
    const bool upper = g >= 4;  // lanes of rows g and g + 4 have the same words, of other tokens
#pragma unroll
    for (int n = 0; n < TOK / 8; ++n) {
      const int token = n * 8 + t * 2;
      uint32_t word[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        uint32_t made[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const T v = end(sum[r][n * 4 + i] * LAST, sum[r][n * 4 + 2 + i] * LAST,
                          min(token + i, work.count - 1));
          made[i] = first + r * OWN + in_own < N / 2 ? reinterpret_cast<const uint16_t&>(v) : 0;
        }
        const uint32_t other = __shfl_xor_sync(~0u, upper ? made[0] : made[1], 16);
        word[r] = upper ? other | made[1] << 16 : made[0] | other << 16;
      }
      if (token + upper < work.count) {
        uint32_t* const to = reinterpret_cast<uint32_t*>(y) + first % BLOCK / OWN +
                             place(work, N / 2, token + upper, first + in_own, g % 4);
        if constexpr (R == 2) *reinterpret_cast<uint2*>(to) = {word[0], word[1]};
        else to[0] = word[0];
      }
    }
  });
}
"""

DOWN = """
extern "C" __global__ void __launch_bounds__(THREADS, 1)
down_of_many(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const int* order,
             const int* tiles, const V* weights, float* y, int64_t N, int64_t K) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Works works{tiles, int((N + ROWS - 1) / ROWS)};
  products(x, bytes_of(w), bytes_of(scales), nullptr, works, N, K,
           [&](const Work& work, auto& sum) {
    const Ends end(scale_2, weights, order + work.at, work.matrix);
    const int64_t first = int64_t(work.panel) * ROWS + warp * R * 16 + g * R * 2;
    const bool whole = N % 4 == 0 && first + R * 2 <= N;
    int rows[TOK / 4];  // all are on their way at once
#pragma unroll
    for (int i = 0; i < TOK / 4; ++i)
      rows[i] = order[work.at + min(i / 2 * 8 + t * 2 + i % 2, work.count - 1)];
#pragma unroll
    for (int i = 0; i < TOK / 4; ++i) {
      if (i / 2 * 8 + t * 2 + i % 2 >= work.count) break;
      float* const to = y + rows[i] * N + first;
      float v[R * 2];  // neighbours
#pragma unroll
      for (int j = 0; j < R * 2; ++j)
        v[j] = end(sum[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2] * LAST, 0);
      if (R == 2 && whole) {
        *reinterpret_cast<float4*>(to) = {v[0], v[1], v[R * 2 - 2], v[R * 2 - 1]};
      } else {
#pragma unroll
        for (int j = 0; j < R * 2; ++j)
          if (first + j < N) to[j] = v[j];
      }
    }
  });
}
"""

# What packages for other GPUs have, which never start it.
ELSEWHERE = """
extern "C" __global__ void NAME_of_many(const T*, const uint8_t*, const uint8_t*, SCALE_2,
                                        const int*, const int*, const V*, OUT*, int64_t, int64_t) {}
"""
