"""The CUDA bodies of `grid_sample` and its derivative, for all dtypes but float64.

They are preceded by the constants and the text of `sampling_place`, where ``PACK`` is 1: a thread
has one point, and ``OWN`` of its channels. Where channels are the last axis it reads and writes
vectors of ``V`` of them, of 16 bytes where their number allows. All pixels that a thread reads (of
many, four at a time) are asked for before the first is needed. Points and chunks of channels are
counted in 32 bits, elements in 64.
"""

from __future__ import annotations

# Of channels-last calls: how many channels a thread has, how many of them are a vector, and where.
CHUNKS = (
    (8, 8, "T in (float16, bfloat16) and C % 8 == 0"),
    (4, 4, "T != float64 and C % 4 == 0"),
    (2, 2, "T != float64 and C % 2 == 0"),
    (1, 1, "T != float64 and C == 1"),
    (4, 1, "T != float64"),
)
FIRST = (8, 1, "T != float64")  # of others

POINT = """
const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
const uint32_t points = uint32_t(L) * N * M;
const long pixels = long(D) * H * W;
"""

PLACES = """
const T* image = x + b * pixels * C;
const G* g = grid + (b * points + p) * DIMS;
Places<float> from;
from.x.g[0] = float(g[0]), from.y.g[0] = float(g[1]), from.z.g[0] = float(g[DIMS - 1]);
from.find(D, H, W);
"""

FORWARD = (
    POINT
    + """
const int wide = LAST && OWN == 1 ? 1 : C;
const uint32_t chunks = (wide + OWN - 1) / OWN;
if (thread >= B * points * chunks) return;
const uint32_t row = thread / (LAST ? chunks : points), place = thread % (LAST ? chunks : points);
const long b = row / (LAST ? points : chunks), p = LAST ? row % points : place;
const int begin = (LAST ? place : row % chunks) * OWN;
"""
    + PLACES
    + """
// So many channels, and so many of them at once.
auto sample = [&](int c, auto channels, auto vector) {
  constexpr int K = decltype(channels)::value, S = decltype(vector)::value;
  float sum[K] = {};
#pragma unroll
  for (int first = 0; first < ALL; first += 4) {
    const int end = min(first + 4, ALL);
    AlignedVector<T, S> values[4][K / S] = {};  // 0 outside, where NaN as a weight stays
#pragma unroll
    for (int t = first; t < end; ++t) {
#pragma unroll
      for (int i = 0; i < K; i += S) {
        const long pixel = from.at[t][0];
        const long at = LAST ? pixel * wide + c + i : (c + i) * pixels + pixel;
        if (from.inside[t][0] && (V > 1 || c + i < C))
          values[t - first][i / S] = unsafe_load_vector<S>(image + at, 0);
      }
    }
#pragma unroll
    for (int t = first; t < end; ++t) {
#pragma unroll
      for (int i = 0; i < K; ++i)
        sum[i] += from.weight[t][0] * float(values[t - first][i / S][i % S]);
    }
  }
#pragma unroll
  for (int i = 0; i < K; i += S) {
    AlignedVector<T, S> samples;
#pragma unroll
    for (int v = 0; v < S; ++v) samples[v] = T(sum[i + v]);
    const long at = LAST ? (b * points + p) * wide + c + i : (b * C + c + i) * points + p;
    if (V > 1 || c + i < C) unsafe_store_vector<S>(out + at, 0, samples);
  }
};
// Where channels come first all threads read one channel, then the next: what they read is near.
constexpr cuda::std::integral_constant<int, 1> one;
constexpr cuda::std::integral_constant<int, V> vector;
constexpr cuda::std::integral_constant<int, OWN> own;
if (LAST && (V == 1 || (is_aligned<V>(x) && is_aligned<V>(out)))) {
  sample(begin, own, vector);
} else {
#pragma unroll 1
  for (int c = begin; c < min(C, begin + OWN); ++c) sample(c, one, one);
}
"""
)


def _reductions() -> str:
    """Statements that add ``WORDS`` words of 4 bytes, ``w``, to what is at ``to``."""
    kinds = (
        ("float", "", "f32"),
        ("__half", ".noftz", "f16x2"),
        ("__nv_bfloat16", ".noftz", "bf16x2"),
    )
    cases = []
    for words, vector in (4, ".v4"), (2, ".v2"), (1, ""):
        places = ", ".join(f"%{i + 1}" for i in range(words))
        values = ", ".join(f'"r"(w[{i}])' for i in range(words))
        operand = f"{{{places}}}" if vector else places
        for dtype, rounding, kind in kinds:
            name = f"red.global.add{rounding}{vector}.{kind}"
            cases.append(
                f"      if constexpr (WORDS == {words} && cuda::std::is_same_v<T, {dtype}>)\n"
                f'        asm volatile("{name} [%0], {operand};" ::"l"(to), {values} : "memory");\n'
            )
    return "".join(cases)


# Additions of V elements at once, where the GPU has them, to an array that begins at a multiple of
# 4 bytes and ends at ``end``. An element of 16 bits alone comes with a neighbour that stays as it
# is: GPUs do not add it alone.
ADD = f"""
// A loop, where there is no such instruction: called, so as not to take registers from others.
template <class T> __device__ __noinline__ void add_one(T* to, float value) {{
  atomicAdd(to, T(value));
}}
template <int V, class T>
__device__ inline void add(T* to, const float* values, const T* end) {{
#if __CUDA_ARCH__ >= 900
  constexpr int WORDS = V * sizeof(T) / 4;
  if constexpr (WORDS > 0) {{
    if (size_t(to) % (4 * WORDS) == 0) {{
      alignas(16) T rounded[V];
      for (int v = 0; v < V; ++v) rounded[v] = T(values[v]);
      const auto* const w = reinterpret_cast<const uint32_t*>(rounded);
{_reductions()}      return;
    }}
  }} else {{
    const bool second = size_t(to) % 4;
    if (second || to + 1 < end) {{
      const float both[2] = {{second ? -0.0f : values[0], second ? values[0] : -0.0f}};
      return add<2>(to - second, both, end);
    }}
  }}
#endif
  for (int v = 0; v < V; ++v) add_one(to + v, values[v]);
}}
"""

# As many lanes as there are chunks of channels, 32 at most and a power of 2, share a point; one,
# where they come first: neighbours read the cotangent beside it, all of one channel at a time,
# of which the L2 holds what they read and add to.
BACKWARD = (
    POINT
    + """
const int chunks = LAST ? C / V : 1;
int lanes = 1;
while (lanes < chunks && lanes < 32) lanes *= 2;
const int lane = thread % lanes;
const uint32_t every = thread / lanes;
const bool there = every < B * points;
const long b = there ? every / points : 0, p = there ? every % points : 0;
if (B * points == 0) return;
"""
    + PLACES
    + """
const long across = LAST ? C : 1, up = LAST ? 1 : pixels, out_up = LAST ? 1 : points;
const T* cot = cotangent + b * points * C + p * (LAST ? C : 1);
float dots[ALL] = {};
for (int c = lane * V; there && c < C; c += lanes * V) {
  float by[V];
  const auto of_point = load_vector<V>(cot + c * out_up, 0);
  for (int v = 0; v < V; ++v) by[v] = float(of_point[v]);
#pragma unroll
  for (int first = 0; first < ALL; first += 4) {
    AlignedVector<T, V> values[4];
#pragma unroll
    for (int t = first; t < min(first + 4, ALL); ++t) {
      if (from.inside[t][0])
        values[t - first] = load_vector<V>(image + from.at[t][0] * across + c * up, 0);
    }
#pragma unroll
    for (int t = first; t < min(first + 4, ALL); ++t) {
      if (!from.inside[t][0]) continue;
      float terms[V];
      for (int v = 0; v < V; ++v) {
        dots[t] += by[v] * float(values[t - first][v]);
        terms[v] = from.weight[t][0] * by[v];
      }
      add<V>(x_grad + b * pixels * C + from.at[t][0] * across + c * up, terms,
             x_grad + B * pixels * C);
    }
  }
}
for (int d = 0; d < DIMS; ++d) {
  float sum = 0;
  for (int t = 0; t < ALL; ++t) sum += from.slope(t, 0, d) * dots[t];
  for (int i = lanes / 2; i; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
  if (there && lane == 0) grid_grad[(b * points + p) * DIMS + d] = G(sum);
}
"""
)
