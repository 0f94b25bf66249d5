"""The Metal bodies of `grid_sample` and of its derivatives.

They are preceded by the constants and the text of `sampling_place`, and by

* ``LAST``: whether channels are the last axis of ``x``, or the second;
* of images, the depth ``D`` and the number of slices ``L``, which are 1.

Elements are counted in 64 bits, which costs nothing: an offset is worked out once per pixel.
"""

from __future__ import annotations

PACK = 32  # points of a thread
SLAB = 8  # threads with neighbouring points: together a unit of work on the CPU
CHANNELS = 64  # at most, of a thread of the forward pass

# From a pixel of x to the next it is `across` elements, from a channel to the next `up`; those of
# samples are `out_across` and `out_up`. Coordinates and sums are floats, or doubles where an array
# is of doubles.
STRIDES = """
using A = decltype((T(0) + 0.0f) + (G(0) + 0.0f));
const uint3 thread_at = thread_position_in_grid;
const long pixels = long(D) * H * W, points = long(L) * N * M;
const long across = LAST ? C : 1, up = LAST ? 1 : pixels;
const long out_across = LAST ? C : 1, out_up = LAST ? 1 : points;
"""

# A thread has the points p, p + 1 ... of image b. Where there are fewer, the last is repeated.
POINTS = (
    STRIDES
    + """
const long b = thread_at.z % B, p = (long(thread_at.y) * SLAB + thread_at.x) * PACK;
if (p >= points) return;
const int count = int(metal::min(points - p, long(PACK)));
const device G* g = grid + (b * points + p) * DIMS;
Pack<A> gx, gy, gz;
for (int l = 0; l < PACK; ++l) {
  const int k = (l < count ? l : count - 1) * DIMS;
  gx.of[l] = A(g[k]), gy.of[l] = A(g[k + 1]), gz.of[l] = A(g[k + DIMS - 1]);
}
const Places<A> from = places<A>(gx, gy, gz, D, H, W);
const device T* image = x + b * pixels * C;
"""
)

# K channels of a pack's samples at a time, for which places and weights are read once.
FEW_CHANNELS = """
template <int K, class A, class T>
inline void sample_few(const thread Places<A>& from, const device T* plane, device T* to, int count,
                       long across, long up, long out_across, long out_up) {
  for (int l = 0; l < count; ++l) {
    A sum[K];
    for (int k = 0; k < K; ++k) sum[k] = 0;
    for (int t = 0; t < ALL; ++t) {
      const long at = from.at[t][l] * across;
      const A weight = from.weight[t][l];
      const bool inside = from.inside[t][l];
      for (int k = 0; k < K; ++k) {
        const A value = A(plane[at + k * up]);
        sum[k] = metal::fma(weight, inside ? value : A(0), sum[k]);
      }
    }
    for (int k = 0; k < K; ++k) to[l * out_across + k * out_up] = T(sum[k]);
  }
}
"""

# One thread makes up to CHANNELS channels of its samples.
FORWARD = (
    POINTS
    + """
const int first = int(thread_at.z / B) * CHANNELS, end = metal::min(C, first + CHANNELS);
device T* sample = out + b * points * C + p * out_across;
if (LAST && C >= 8) {
  for (int l = 0; l < count; ++l) {
    long at[ALL];
    A weight[ALL];
    bool inside[ALL];
    for (int t = 0; t < ALL; ++t) {
      at[t] = from.at[t][l] * C, weight[t] = from.weight[t][l], inside[t] = from.inside[t][l];
    }
    device T* to = sample + long(l) * C;
    if (from.whole[l]) {
      for (int c = first; c < end; ++c) {
        A sum = 0;
        for (int t = 0; t < ALL; ++t) sum = metal::fma(weight[t], A(image[at[t] + c]), sum);
        to[c] = T(sum);
      }
    } else {
      for (int c = first; c < end; ++c) {
        A sum = 0;
        for (int t = 0; t < ALL; ++t) {
          sum = metal::fma(weight[t], inside[t] ? A(image[at[t] + c]) : A(0), sum);
        }
        to[c] = T(sum);
      }
    }
  }
} else {
  const device T* plane = image + first * up;
  device T* to = sample + first * out_up;
  int left = end - first;
  for (; left >= 4; left -= 4, plane += 4 * up, to += 4 * out_up) {
    sample_few<4, A, T>(from, plane, to, count, across, up, out_across, out_up);
  }
  if (left == 3) sample_few<3, A, T>(from, plane, to, count, across, up, out_across, out_up);
  if (left == 2) sample_few<2, A, T>(from, plane, to, count, across, up, out_across, out_up);
  if (left == 1) sample_few<1, A, T>(from, plane, to, count, across, up, out_across, out_up);
}
"""
)

# The derivative by the grid: a thread adds up all channels of its points, 8 at a time, each of
# which has a sum of its own, so that they can be a vector.
GRID_GRAD = (
    POINTS
    + """
const device T* cot = cotangent + b * points * C + p * out_across;
for (int l = 0; l < count; ++l) {
  long at[ALL];
  A slope[DIMS][ALL], sum[DIMS][8];
  bool inside[ALL];
  for (int t = 0; t < ALL; ++t) {
    at[t] = from.at[t][l] * across, inside[t] = from.inside[t][l];
    for (int d = 0; d < DIMS; ++d) slope[d][t] = from.slope(t, l, d);
  }
  for (int d = 0; d < DIMS; ++d) {
    for (int v = 0; v < 8; ++v) sum[d][v] = 0;
  }
  const device T* of_point = cot + l * out_across;
  for (int c = 0; c < C; c += 8) {
    const int width = metal::min(8, C - c);
    for (int v = 0; v < width; ++v) {
      const A by = A(of_point[(c + v) * out_up]);
      A steep[DIMS];
      for (int d = 0; d < DIMS; ++d) steep[d] = 0;
      for (int t = 0; t < ALL; ++t) {
        const A value = A(image[at[t] + (c + v) * up]), counted = inside[t] ? value : A(0);
        for (int d = 0; d < DIMS; ++d) steep[d] = metal::fma(slope[d][t], counted, steep[d]);
      }
      for (int d = 0; d < DIMS; ++d) sum[d][v] = metal::fma(steep[d], by, sum[d][v]);
    }
  }
  for (int d = 0; d < DIMS; ++d) {
    A all = 0;
    for (int v = 0; v < 8; ++v) all += sum[d][v];
    grid_grad[(b * points + p + l) * DIMS + d] = G(all);
  }
}
"""
)

# Points share pixels, so what they give to one is added up by atomics.
BACKWARD = (
    GRID_GRAD
    + """
device T* image_grad = x_grad + b * pixels * C;
for (int l = 0; l < count; ++l) {
  const device T* of_point = cot + l * out_across;
  for (int t = 0; t < ALL; ++t) {
    if (!from.inside[t][l]) continue;
    const A weight = from.weight[t][l];
    device T* of_pixel = image_grad + from.at[t][l] * across;
    for (int c = 0; c < C; ++c) {
      atomic_fetch_add_explicit((device atomic<T>*)(of_pixel + c * up),
                                T(weight * A(of_point[c * out_up])), memory_order_relaxed);
    }
  }
}
"""
)

# Without atomics: which pixel each point counts for, as numbers that say the pixel and then the
# entry, point * ALL + t; those of no pixel come last. They are sorted by the array library.
ENTRIES = (
    GRID_GRAD
    + """
for (int l = 0; l < count; ++l) {
  for (int t = 0; t < ALL; ++t) {
    const long entry = (p + l) * ALL + t, pixel = from.inside[t][l] ? from.at[t][l] : pixels;
    entries[b * points * ALL + entry] = (pixel << 32) | entry;
  }
}
"""
)

# A thread has 16 channels of a pixel, and adds up the pixel's entries in their order.
GATHER = (
    STRIDES
    + """
(void)across, (void)out_across;
const long b = thread_at.z, pixel = long(thread_at.y) * 256 + thread_at.x, all = points * ALL;
if (pixel >= pixels) return;
const device long* sorted = entries + b * all;
long begin = 0, end = all;
while (begin < end) {
  const long middle = (begin + end) / 2;
  if ((sorted[middle] >> 32) < pixel) begin = middle + 1;
  else end = middle;
}
device T* of_pixel = x_grad + b * pixels * C + pixel * across;
const device T* cot = cotangent + b * points * C;
for (int first = 0; first < C; first += 16) {
  const int width = metal::min(16, C - first);
  A sum[16];
  for (int k = 0; k < 16; ++k) sum[k] = 0;
  for (long i = begin; i < all && (sorted[i] >> 32) == pixel; ++i) {
    const long entry = sorted[i] & 0xffffffffl, p = entry / ALL;
    const int t = int(entry % ALL);
    const device G* g = grid + (b * points + p) * DIMS;
    const Pack<A> gx = {{A(g[0])}}, gy = {{A(g[1])}}, gz = {{A(g[DIMS - 1])}};
    const A weight = places<A>(gx, gy, gz, D, H, W).weight[t][0];
    const device T* of_point = cot + p * out_across + first * out_up;
    for (int k = 0; k < width; ++k) sum[k] = metal::fma(weight, A(of_point[k * out_up]), sum[k]);
  }
  for (int k = 0; k < width; ++k) of_pixel[(first + k) * up] = T(sum[k]);
}
"""
)

# A sample's tangent: W x' + (W' grid') x, of all its pixels.
TANGENT = (
    POINTS
    + """
const device T* moved = x_tangent + b * pixels * C;
for (int l = 0; l < count; ++l) {
  A weight[ALL];
  for (int t = 0; t < ALL; ++t) {
    weight[t] = 0;
    for (int d = 0; d < DIMS; ++d) {
      const A speed = A(grid_tangent[(b * points + p + l) * DIMS + d]);
      weight[t] = metal::fma(speed, from.slope(t, l, d), weight[t]);
    }
  }
  for (int c = 0; c < C; ++c) {
    A sum = 0;
    for (int t = 0; t < ALL; ++t) {
      if (!CUBIC && !from.inside[t][l]) continue;
      const long at = from.at[t][l] * across + c * up;
      const A value = from.inside[t][l] ? A(image[at]) : A(0);
      const A by = from.inside[t][l] ? A(moved[at]) : A(0);
      sum = metal::fma(from.weight[t][l], by, metal::fma(weight[t], value, sum));
    }
    out_tangent[b * points * C + (p + l) * out_across + c * out_up] = T(sum);
  }
}
"""
)

# The derivative of the derivative. With u and v the cotangents of x_grad and grid_grad, what is
# differentiated is cotangent * (W u + (W' v) x), of all pixels.
SECOND = (
    POINTS
    + """
const device T* u = x_grad_cotangent + b * pixels * C;
device T* image_grad = x_grad + b * pixels * C;
for (int l = 0; l < count; ++l) {
  const long point = b * points + p + l;
  A weight[ALL], of_u[DIMS][ALL], of_x[DIMS][ALL], sum[DIMS];
  for (int t = 0; t < ALL; ++t) {
    weight[t] = 0;
    for (int d = 0; d < DIMS; ++d) {
      weight[t] += A(grid_grad_cotangent[point * DIMS + d]) * from.slope(t, l, d);
      of_u[d][t] = from.slope(t, l, d), of_x[d][t] = 0;
      for (int e = 0; e < DIMS; ++e) {
        of_x[d][t] += A(grid_grad_cotangent[point * DIMS + e]) * from.bend(t, l, d, e);
      }
    }
  }
  for (int d = 0; d < DIMS; ++d) sum[d] = 0;
  for (int c = 0; c < C; ++c) {
    const long sample = b * points * C + (p + l) * out_across + c * out_up;
    const A by = A(cotangent[sample]);
    A total = 0;
    for (int t = 0; t < ALL; ++t) {
      if (!from.inside[t][l]) continue;
      const long at = from.at[t][l] * across + c * up;
      const A of_image = A(image[at]), of_cotangent = A(u[at]);
      total += from.weight[t][l] * of_cotangent + weight[t] * of_image;
      for (int d = 0; d < DIMS; ++d) {
        sum[d] += by * (of_u[d][t] * of_cotangent + of_x[d][t] * of_image);
      }
      atomic_fetch_add_explicit((device atomic<T>*)(image_grad + at), T(weight[t] * by),
                                memory_order_relaxed);
    }
    cotangent_grad[sample] = T(total);
  }
  for (int d = 0; d < DIMS; ++d) grid_grad[point * DIMS + d] = G(sum[d]);
}
"""
)
