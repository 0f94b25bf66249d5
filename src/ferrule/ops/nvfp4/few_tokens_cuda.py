"""CUDA of a mixture of experts for very few tokens, of which each slot is a tile of its own.

The second product adds up the slots of a token: there is no third kernel.
"""

from __future__ import annotations

_SLOT = """
struct OneSlot {
  const T* x;
  Out* y;
  int64_t K;
  int count = 1;
  __device__ int64_t row(int) const { return 0; }
  __device__ Out* to(int) const { return y; }
  __device__ bool aligned() const { return (size_t(x) | K * sizeof(T)) % 16 == 0; }
};
"""
# A block makes ROWS columns of a slot, or half as many where rows are in pairs;
GATE_UP_FEW = (
    _SLOT
    + """
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
gate_up_few(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const J* ids,
            MAP map, int64_t map_size, const V* weights, T* y, int64_t N, int64_t K, int top_k,
            int experts) {
  __shared__ int slots[1];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Routing all{ids, map, map_size, experts};
  const int64_t slot = blockIdx.x;
  const int expert = all.expert(slot);
  if (expert == experts) return;
  if (threadIdx.x == 0) slots[0] = slot;
  product(OneSlot{x + slot / top_k * K, y + slot * (N / 2), K},
          reinterpret_cast<const uint32_t*>(w + N * K / 2 * expert),
          reinterpret_cast<const char*>(scales) + N * K / GROUP * expert, nullptr,
          Ends(scale_2, weights, slots, expert), blockIdx.z * int64_t(ROWS), N, K);
}
"""
)
# or of all slots of a token, which its groups of warps divide, or K of each, and adds them up.
DOWN_FEW = """
using Out = T;
SLOT
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
down_few(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const J* ids,
         MAP map, int64_t map_size, const V* weights, T* y, int64_t N, int64_t K, int top_k,
         int experts) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Routing all{ids, map, map_size, experts};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WK, wk = warp % WK;
  const int64_t token = blockIdx.x, n0 = blockIdx.z * int64_t(ROWS);
  const int parts = max(WK / top_k, 1), groups = WK / parts;  // of K, and of slots at a time
  const uint32_t blocks = (uint32_t(K) + BLOCK - 1) / BLOCK, at = wk % parts;
  const uint2 part = {blocks * at / parts, blocks * (at + 1) / parts};
  float sum[R][NT][4] = {};
  for (int k = wk / parts; k < top_k && wk / parts < groups; k += groups) {
    const int64_t slot = token * top_k + k;
    const int expert = all.expert(slot);
    if (expert == experts) continue;
    float one[R][NT][4] = {};
    sums_of_warp(OneSlot{x + slot * K, nullptr, K},
                 reinterpret_cast<const uint32_t*>(w + N * K / 2 * expert),
                 reinterpret_cast<const char*>(scales) + N * K / GROUP * expert, nullptr, n0, N, K,
                 part, LEFT == R || wm < WM - 1, one);
    const float by = scale_of_expert(scale_2, expert) * (ON_INPUT ? 1 : float(weights[slot]));
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][0][i] += by * (one[r][0][i] * LAST);
    }
    wait<0>();
    barrier<WM * 32>(1 + wk);  // what is in shared memory has been read
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      if (lane % 4 == 0) sums[wk * PITCH + (wm * R + r) * 16 + i / 2 * 8 + lane / 4] = sum[r][0][i];
  }
  __syncthreads();
  for (int row = threadIdx.x; row < ROWS; row += WARPS * 32) {
    float total = sums[row];
#pragma unroll
    for (int k = 1; k < WK; ++k) total += sums[k * PITCH + row];
    if (n0 + row < N) y[token * N + n0 + row] = T(total);
  }
}
""".replace("SLOT\n", _SLOT)
