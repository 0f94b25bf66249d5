"""The CUDA bodies of `grid_sample` and its derivative, for all dtypes but float64.

They are preceded by the constants and the text of `sampling_place`, where ``PACK`` is 1: a thread
has one point. Where channels are the last axis, it has V of them, 16 bytes, at a time; one, where V
does not divide their number. Points and chunks of channels are counted in 32 bits, elements in 64.
"""

from __future__ import annotations

CHANNELS = 8  # at most, of a thread, where channels are the second axis

POINT = """
constexpr int V = LAST && VECTORS ? 16 / sizeof(T) : 1;
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
const uint32_t chunks = LAST ? C / V : (C + CHANNELS - 1) / CHANNELS;
if (thread >= B * points * chunks) return;
const uint32_t row = thread / (LAST ? chunks : points), place = thread % (LAST ? chunks : points);
const long b = row / (LAST ? points : chunks), p = LAST ? row % points : place;
"""
    + PLACES
    + """
if (LAST) {
  const int c = place * V;
  float sum[V] = {};
  for (int t = 0; t < ALL; ++t) {
    const float weight = from.weight[t][0];
    if (from.inside[t][0]) {
      const auto values = load_vector<V>(image + from.at[t][0] * C + c, 0);
      for (int v = 0; v < V; ++v) sum[v] += weight * float(values[v]);
    } else if (CUBIC) {  // NaN stays
      for (int v = 0; v < V; ++v) sum[v] += weight * 0;
    }
  }
  AlignedVector<T, V> samples;
  for (int v = 0; v < V; ++v) samples[v] = T(sum[v]);
  store_vector(out + (b * points + p) * C + c, 0, samples);
} else {
  const int first = row % chunks * CHANNELS, end = min(C, first + CHANNELS);
  for (int c = first; c < end; ++c) {
    float sum = 0;
    for (int t = 0; t < ALL; ++t) {
      const float value = from.inside[t][0] ? float(image[c * pixels + from.at[t][0]]) : 0;
      sum += from.weight[t][0] * value;
    }
    out[(b * C + c) * points + p] = T(sum);
  }
}
"""
)

# Additions of V elements at once, where the GPU has them.
ADD = """
template <int V, class T> __device__ inline void add(T* to, const float* values) {
#if __CUDA_ARCH__ >= 900
  if constexpr (V * sizeof(T) == 16) {
    if ((size_t(to) & 15) == 0) {
      if constexpr (sizeof(T) == 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]),
                     "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
      } else {
        uint32_t w[4];
        for (int i = 0; i < 4; ++i) {
          const T pair[2] = {T(values[2 * i]), T(values[2 * i + 1])};
          w[i] = *reinterpret_cast<const uint16_t*>(&pair[0]) |
                 uint32_t(*reinterpret_cast<const uint16_t*>(&pair[1])) << 16;
        }
        if constexpr (cuda::std::is_same_v<T, __half>) {
          asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]),
                       "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        } else {
          asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
                       "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
      }
      return;
    }
  }
#endif
  for (int v = 0; v < V; ++v) atomicAdd(to + v, T(values[v]));
}
"""

# As many lanes as there are chunks of channels, 32 at most and a power of 2, have a point together.
BACKWARD = (
    POINT
    + """
const int chunks = C / V;
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
  for (int t = 0; t < ALL; ++t) {
    if (!from.inside[t][0]) continue;
    const long at = from.at[t][0] * across + c * up;
    const auto values = load_vector<V>(image + at, 0);
    float terms[V];
    for (int v = 0; v < V; ++v) {
      dots[t] += by[v] * float(values[v]);
      terms[v] = from.weight[t][0] * by[v];
    }
    add<V>(x_grad + b * pixels * C + at, terms);
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
