"""Rows along the last axis on NVIDIA GPUs: bodies that read and write 16 bytes at a time.

A block takes a row. Its threads walk over it in packs of ``V`` elements, which are 16 bytes where
rows and arrays begin at multiples of that, and else one. What a row's second pass reads again is
still in the first-level cache; so memory is read once and written once.
"""

from __future__ import annotations

from typing import Any

import ferrule

_HEADER = """
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
    T v[V];
};

// exp, of 16-bit elements as the hardware has it: a few units in the last place of a float.
template <typename T>
__device__ float exp_for(float value) {
    if constexpr (sizeof(T) == 2) return __expf(value);
    else return expf(value);
}

// One value for all threads of the block: first within each warp, then among the warps.
template <typename F>
__device__ float over_block(float value, float none, F join) {
    __shared__ float shared[32];
    const int lane = threadIdx.x % 32;
    for (int i = 16; i; i /= 2) value = join(value, __shfl_xor_sync(~0u, value, i));
    if (blockDim.x == 32) return value;
    __syncthreads();  // what was read before, was read by all
    if (lane == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < blockDim.x / 32 ? shared[lane] : none;
    for (int i = 16; i; i /= 2) value = join(value, __shfl_xor_sync(~0u, value, i));
    return value;
}

__device__ float sum_of_block(float value) {
    return over_block(value, 0.0f, [](float a, float b) { return a + b; });
}

__device__ float max_of_block(float value) {
    return over_block(value, -INFINITY, [](float a, float b) { return a > b ? a : b; });
}

// What `f` makes of each element and its place in the row, added up over the row.
template <int V, typename T, typename F>
__device__ float sum_of_row(const T* row, int N, F f) {
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < N / V; i += blockDim.x) {
        const Pack<T, V> pack = reinterpret_cast<const Pack<T, V>*>(row)[i];
        for (int j = 0; j < V; ++j) sum += f(float(pack.v[j]), i * V + j);
    }
    return sum_of_block(sum);
}

// Writes what `f` makes of each element and its place in the row.
template <int V, typename T, typename F>
__device__ void map_row(const T* row, T* to, int N, F f) {
#pragma unroll 4
    for (int i = threadIdx.x; i < N / V; i += blockDim.x) {
        Pack<T, V> pack = reinterpret_cast<const Pack<T, V>*>(row)[i];
        for (int j = 0; j < V; ++j) pack.v[j] = T(f(float(pack.v[j]), i * V + j));
        reinterpret_cast<Pack<T, V>*>(to)[i] = pack;
    }
}

// The largest element of a row, and the sum of exp(x - largest): one pass, in which a thread's sum
// is scaled down when it meets something larger.
template <int V, typename T>
__device__ float largest_and_sum(const T* row, int N, float& sum) {
    // Not -infinity: its difference from itself would be NaN.
    float largest = -3.4028234663852886e38f, mine = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < N / V; i += blockDim.x) {
        const Pack<T, V> pack = reinterpret_cast<const Pack<T, V>*>(row)[i];
        float top = largest;
        for (int j = 0; j < V; ++j) {
            const float v = float(pack.v[j]);
            top = v > top ? v : top;
        }
        mine *= exp_for<T>(largest - top);
        largest = top;
        for (int j = 0; j < V; ++j) mine += exp_for<T>(float(pack.v[j]) - top);
    }
    const float all = max_of_block(largest);
    sum = sum_of_block(mine * expf(largest - all));
    return all;
}
"""


def body(text: str) -> Any:
    """A CUDA body of an op from rows of ``x`` to rows of ``y``.

    Args:
        text: statements for one row, in which ``V`` is the size of packs, ``row`` the row of ``x``
            and ``to`` that of ``y``. Sums are float32: CUDA bodies take no float64.
    """
    # Two packs for each thread; and so few threads that the rows at work fit into the cache.
    narrow = "T in (float16, bfloat16)"
    most = f"512 if {narrow} and N <= 16384 else 1024"
    threads = f"min(max(ceildiv(N, 512 if {narrow} else 256) * 32, 32), {most})"
    return ferrule.cuda_body(
        f"""
    const T* row = x + size_t(blockIdx.x) * N;
    T* to = y + size_t(blockIdx.x) * N;
    constexpr int packed = 16 / sizeof(T);
    auto one_row = [&](auto size) {{
        constexpr int V = decltype(size)::value;
        {text}
    }};
    if (N % packed == 0 && (size_t(x) | size_t(y)) % 16 == 0)
        one_row(cuda::std::integral_constant<int, packed>());
    else one_row(cuda::std::integral_constant<int, 1>());
""",
        grid=f"x.size // max(N, 1) * {threads}",
        threadgroup=threads,
        header=_HEADER,
    )
