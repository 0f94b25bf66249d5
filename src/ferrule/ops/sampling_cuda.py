"""The CUDA bodies of `grid_sample` and its derivative, for all dtypes but float64.

They are preceded by the constants and the text of `sampling_place`, where ``PACK`` is 1: a thread
has one point, and ``OWN`` of its channels. Where channels are the last axis it reads and writes
vectors of ``V`` of them, of 16 bytes where their number allows. Else pixels that are neighbours in
a row are added to by the word, and of images whose samples are bilinear read so, too. All pixels
that a thread reads (of many four at a time, of a derivative's vectors two) are asked for before the
first is needed. Points and chunks of channels are counted in 32 bits, elements in 64.
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
# Of others, whose only channel may be their last axis as well. The L2 should hold those of a large
# image that threads have at one time.
PLANES = (
    (1, 1, "T != float64 and C == 1"),
    (4, 1, "T != float64 and PIXELS >= 65536"),
    (8, 1, "T != float64"),
)
# Of their derivative, where some threads add to so many channels and others find the gradient of
# the grid, with all of them.
SPLIT = (2, 1, "T != float64 and C > 4")
PLANES_BACKWARD = (SPLIT, PLANES[0], PLANES[2])

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
"""

# Pixels of one channel that are neighbours in memory, in aligned words of several, or of one, which
# any image has.
NEIGHBOURS = """
constexpr bool SIDE_BY_SIDE = !LAST || (V == 1 && OWN == 1);

template <class T> using Bits = cuda::std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

struct alignas(16) Wide {
  uint64_t low, high;
  Wide() = default;
  __device__ Wide(uint64_t low, uint64_t high = 0) : low(low), high(high) {}
  __device__ Wide operator<<(int n) const {
    const uint64_t up = n & 64 ? low : high, down = n & 64 ? 0 : low;
    n &= 63;
    return {down << n, up << n | down >> 1 >> (63 - n)};
  }
  __device__ Wide operator^(Wide o) const { return {low ^ o.low, high ^ o.high}; }
  __device__ Wide operator|(Wide o) const { return {low | o.low, high | o.high}; }
};

// Pixels of type T in words of type U: where pixel t of a point is.
template <class T, class U> struct Words {
  static constexpr int K = sizeof(U) / sizeof(T), PIXEL = 8 * sizeof(T), WORD = 8 * sizeof(U);

  static __device__ bool fit(const T* images, long pixels) {
    return size_t(images) % sizeof(U) == 0 && pixels % K == 0;
  }
  static __device__ size_t number(const Places<float>& from, int t) { return from.at[t][0] / K; }
  static __device__ int bit(const Places<float>& from, int t) { return from.at[t][0] % K * PIXEL; }

  // How many bits a pixel is behind the first one of its row, where it is in that one's word.
  static __device__ int behind(int t) { return t % TAPS * PIXEL % WORD; }
  static __device__ bool is_near(const Places<float>& from, int t) {
    const int i = t % TAPS;
    return !i || (bit(from, t - i) + i * PIXEL < WORD && from.at[t][0] == from.at[t - i][0] + i);
  }
  static __device__ bool any_inside(const Places<float>& from, int row) {
    bool any = false;
    for (int t = row; t < row + TAPS; ++t) any |= from.inside[t][0] != 0;
    return any;
  }
};

// Up to four pixels of a channel, from pixel `first` on: asked for, and then their values.
template <class T, class U> struct Read {
  using In = Words<T, U>;
  U words[4];
  T others[4];

  __device__ void ask(const T* channel, const Places<float>& from, int first) {
#pragma unroll
    for (int t = first; t < min(first + 4, ALL); ++t) {
      if (t % TAPS == 0 && In::any_inside(from, t))
        words[t - first] = reinterpret_cast<const U*>(channel)[In::number(from, t)];
      if (from.inside[t][0] && !In::is_near(from, t)) others[t - first] = channel[from.at[t][0]];
    }
  }

  __device__ float value(const Places<float>& from, int first, int t) const {
    const int row = t - t % TAPS;
    if (!from.inside[t][0]) return 0;
    if (!In::is_near(from, t)) return float(others[t - first]);
    const U word = U(words[row - first] >> In::bit(from, row)) >> In::behind(t);
    T pixel;
    memcpy(&pixel, &word, sizeof(T));
    return float(pixel);
  }
};
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
from.find(D, H, W);
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
constexpr cuda::std::integral_constant<int, 1> one;
constexpr cuda::std::integral_constant<int, V> vector;
constexpr cuda::std::integral_constant<int, OWN> own;
// All threads read one channel, then the next: what they read is near.
auto planes = [&](auto word) {
#pragma unroll 1
  for (int c = begin; c < min(C, begin + OWN); ++c) {
    float sum = 0;
#pragma unroll
    for (int first = 0; first < ALL; first += 4) {
      Read<T, decltype(word)> read;
      read.ask(image + c * pixels, from, first);
#pragma unroll
      for (int t = first; t < min(first + 4, ALL); ++t)
        sum += from.weight[t][0] * read.value(from, first, t);
    }
    out[(b * C + c) * points + p] = T(sum);
  }
};
// Words pay where the L2 is what is waited for: not for one channel, nor for volumes.
using Word = cuda::std::conditional_t<OWN == 1 || DIMS == 3, Bits<T>, uint64_t>;
if (SIDE_BY_SIDE && TAPS == 2 && Words<T, Word>::fit(x, pixels)) {
  planes(Word());
} else if (LAST && (V == 1 || (is_aligned<V>(x) && is_aligned<V>(out)))) {
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
                f"  if constexpr (WORDS == {words} && cuda::std::is_same_v<T, {dtype}>)\n"
                f'    asm volatile("{name} [%0], {operand};" ::"l"(to), {values} : "memory");\n'
            )
    return "".join(cases)


# Additions of V elements at once, where the GPU has them, to a multiple of their bytes, in an array
# that begins at a multiple of 4 bytes and ends at ``end``. An element of 16 bits alone comes with a
# neighbour that stays as it is: GPUs do not add it alone.
ADD = f"""
// A loop, where there is no such instruction: called, so as not to take registers from others.
template <class T> __device__ __noinline__ void add_one(T* to, float value) {{
  atomicAdd(to, T(value));
}}
template <int WORDS, class T> __device__ inline void add_words(T* to, const uint32_t* w) {{
{_reductions()}}}
template <int V, class T>
__device__ inline void add(T* to, const float* values, const T* end) {{
#if __CUDA_ARCH__ >= 900
  constexpr int WORDS = V * sizeof(T) / 4;
  if constexpr (WORDS > 0) {{
    alignas(16) T rounded[V];
    for (int v = 0; v < V; ++v) rounded[v] = T(values[v]);
    return add_words<WORDS>(to, reinterpret_cast<const uint32_t*>(rounded));
  }} else {{
    const bool second = size_t(to) % 4;
    if (second || to + 1 < end) {{
      alignas(4) const T both[2] = {{T(second ? -0.0f : values[0]), T(second ? values[0] : -0.0f)}};
      return add_words<1>(to - second, reinterpret_cast<const uint32_t*>(both));
    }}
  }}
#endif
  for (int v = 0; v < V; ++v) add_one(to + v, values[v]);
}}
"""

ADD_PIXELS = """
// Adds a word of pixels.
template <class T, class U>
__device__ inline void add_word(T* channel, size_t number, U word, const T* end) {
  U* const to = reinterpret_cast<U*>(channel) + number;
  if constexpr (sizeof(U) == sizeof(T)) {
    T value;
    memcpy(&value, &word, sizeof(T));
    const float values[1] = {float(value)};
    add<1>(reinterpret_cast<T*>(to), values, end);
  } else {
    uint32_t w[sizeof(U) / 4];
    memcpy(w, &word, sizeof(U));
    add_words<sizeof(U) / 4>(reinterpret_cast<T*>(to), w);
  }
}

// Adds up to four pixels' terms to a channel, from pixel `first` on. What else is in their words is
// -0.0, which changes nothing.
template <class T, class U>
__device__ inline void add_pixels(T* channel, const Places<float>& from, int first, float by,
                                  const T* end) {
  using In = Words<T, U>;
  using One = cuda::std::conditional_t<(sizeof(U) > 4), uint32_t, U>;
  constexpr uint64_t MINUS = sizeof(T) == 4 ? 0x8000000080000000 : 0x8000800080008000;
  U none = U(MINUS);
  if constexpr (sizeof(U) == 16) none = U(MINUS, MINUS);
#pragma unroll
  for (int row = first; row < min(first + 4, ALL); row += TAPS) {
    U near = 0;
#pragma unroll
    for (int t = row; t < row + TAPS; ++t) {
      if (!from.inside[t][0]) continue;
      const T term = T(from.weight[t][0] * by);
      Bits<T> bits;
      memcpy(&bits, &term, sizeof(T));
      bits ^= Bits<T>(MINUS);
      if (In::is_near(from, t)) near = near | U(U(bits) << In::behind(t));
      else
        add_word(channel, Words<T, One>::number(from, t),
                 One(One(MINUS) ^ One(bits) << Words<T, One>::bit(from, t)), end);
    }
    if (In::any_inside(from, row))
      add_word(channel, In::number(from, row), U(U(near << In::bit(from, row)) ^ none), end);
  }
}
"""

# As many lanes as there are chunks of channels, 32 at most and a power of 2, share a point, each
# with one chunk at most where it is ``ONCE``. Where channels come first a thread has a point, with
# all of them; or, where they are `SPLIT`, some threads have ``OWN`` channels, to which they add,
# and behind those of an image are as many as it has points that find the gradient of the grid.
# Neighbours read the cotangent beside it.
BACKWARD = (
    POINT
    + """
const int chunks = LAST ? C / V : 1;
const int bits = chunks > 1 ? min(32 - __clz(chunks - 1), 5) : 0, lanes = 1 << bits;
const int parts = SPLIT ? (C + OWN - 1) / OWN + 1 : 1;
const int lane = thread & (lanes - 1);
const uint32_t every = thread >> bits;
if (B * points == 0) return;
const bool there = every < B * points * parts;
const uint32_t row = there ? every / points : 0;
const long b = row / parts, p = there ? every % points : 0;
const bool of_grid = !SPLIT || row % parts == parts - 1, of_x = !SPLIT || !of_grid;
const int begin = SPLIT && of_x ? row % parts * OWN : 0;
const int end = !there ? 0 : SPLIT && of_x ? min(C, begin + OWN) : C;
"""
    + PLACES
    + """
if (SIDE_BY_SIDE) from.find(D, H, W);
else from.find_axes(D, H, W);
const long out_up = LAST ? 1 : points;
const T* cot = cotangent + b * points * C + p * (LAST ? C : 1);
T* const to = x_grad + b * pixels * C;
const T* const last = x_grad + B * pixels * C;
for (int t = 0; t < ALL; ++t) from.dots[t][0] = 0;
auto planes = [&](auto word) {
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const float by = float(cot[c * out_up]);
#pragma unroll
    for (int first = 0; first < ALL; first += 4) {
      if (of_grid) {
        T values[4];
#pragma unroll
        for (int t = first; t < min(first + 4, ALL); ++t)
          if (from.inside[t][0]) values[t - first] = image[c * pixels + from.at[t][0]];
#pragma unroll
        for (int t = first; t < min(first + 4, ALL); ++t)
          if (from.inside[t][0]) from.dots[t][0] += by * float(values[t - first]);
      }
      if (of_x) add_pixels<T, decltype(word)>(to + c * pixels, from, first, by, last);
    }
  }
};
// Two pixels at a time, and found when they are asked for: to hold more, be it for a next turn,
// takes registers from other threads.
auto vectors = [&](auto vector) {
  constexpr int S = decltype(vector)::value;
  for (int c = lane * S; c < end; c += lanes * S) {
    const auto of_point = unsafe_load_vector<S>(cot + c, 0);
#pragma unroll
    for (int first = 0; first < ALL; first += 2) {
      AlignedVector<T, S> values[2];
#pragma unroll
      for (int t = first; t < min(first + 2, ALL); ++t) {
        if (from.is_inside(t, 0))
          values[t - first] = unsafe_load_vector<S>(image + from.place(t, 0) * long(C) + c, 0);
      }
#pragma unroll
      for (int t = first; t < min(first + 2, ALL); ++t) {
        if (!from.is_inside(t, 0)) continue;
        const float weight = from.derived(t, 0, 0, 0, 0);
        float terms[S];
        for (int v = 0; v < S; ++v) {
          const float by = float(of_point[v]);
          from.dots[t][0] += by * float(values[t - first][v]);
          terms[v] = weight * by;
        }
        add<S>(to + from.place(t, 0) * long(C) + c, terms, last);
      }
    }
    if (ONCE && S == V) break;
  }
};
if (SIDE_BY_SIDE) {
#if __CUDA_ARCH__ >= 900
  if (TAPS > 1 && Words<T, Wide>::fit(x_grad, pixels)) planes(Wide());
  else
#endif
    planes(Bits<T>());
} else if (V == 1 || (is_aligned<V>(x) && is_aligned<V>(cotangent) && is_aligned<V>(x_grad))) {
  vectors(cuda::std::integral_constant<int, V>());
} else {
  vectors(cuda::std::integral_constant<int, 1>());
}
from.derive();
for (int d = 0; d < DIMS; ++d) {
  float sum = from.by_place[d][0];
  for (int i = lanes / 2; i; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
  if (there && of_grid && lane == 0) grid_grad[(b * points + p) * DIMS + d] = G(sum);
}
"""
)
