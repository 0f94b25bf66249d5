"""The Metal bodies of `grid_sample` and of its derivatives.

They are preceded by the constants and the text of `sampling_place`, and by

* ``LAST``: whether channels are the last axis of ``x``, or the second;
* of images, the depth ``D`` and the number of slices ``L``, which are 1.

Pixels of an image are counted in 32 bits, of which vectors hold many, and elements in 64.
"""

from __future__ import annotations

PACK = 32  # points of a thread on the CPU; on a GPU, whose registers hold no more, it has one
SLAB = 8  # threads with neighbouring points: together a unit of work on the CPU
CHANNELS = 64  # at most, of a thread of the forward pass, where they are the last axis
PLANES = 16  # and where they are not: caches hold some of an image's planes, but not many
FEW = 8  # the same on a GPU
OWNED = 16  # channels of an image that belong to a thread

# From a pixel of x to the next it is `across` elements, from a channel to the next `up`, of samples
# `out_across` and `out_up`. Coordinates and sums are doubles where an array is, and floats else.
STRIDES = """
using A = decltype((T(0) + 0.0f) + (G(0) + 0.0f));
const uint3 thread_at = thread_position_in_grid;
const long pixels = long(D) * H * W, points = long(L) * N * M;
const long across = LAST ? C : 1, up = LAST ? 1 : pixels;
const long out_across = LAST ? C : 1, out_up = LAST ? 1 : points;
"""

# Where the points p, p + 1 ... of image b read. Where there are fewer, the last is repeated.
PLACES = """
const int count = int(metal::min(points - p, long(PACK)));
const device G* g = grid + (b * points + p) * DIMS;
Places<A> from;
#ifdef FERRULE  // 1 KB on: reads here and there make processors forget what is read in order
if (PACK > 1) ferrule::prefetch(g + 4 * PACK * DIMS, PACK * DIMS);
#endif
if (count == PACK) {
  for (int l = 0; l < PACK; ++l) from.x.g[l] = A(g[l * DIMS]), from.y.g[l] = A(g[l * DIMS + 1]);
  if (DIMS == 3) {
    for (int l = 0; l < PACK; ++l) from.z.g[l] = A(g[l * DIMS + 2]);
  }
} else {
  for (int l = 0; l < PACK; ++l) {
    const int k = (l < count ? l : count - 1) * DIMS;
    from.x.g[l] = A(g[k]), from.y.g[l] = A(g[k + 1]);
    if (DIMS == 3) from.z.g[l] = A(g[k + 2]);
  }
}
from.find(D, H, W);
"""

# A thread has one pack of points.
POINTS = (
    STRIDES
    + """
const long b = thread_at.z % B, p = (long(thread_at.y) * SLAB + thread_at.x) * PACK;
if (p >= points) return;
const device T* image = x + b * pixels * C;
"""
    + PLACES
)


def _few(call: str, number: str) -> str:
    """Calls of a function of few channels: for 4 at a time, and for those that are left.

    Args:
        call: the function and its first arguments.
        number: how many channels there are, from those that ``plane`` and ``values`` point at on.
    """
    name, _, first = call.partition("(")
    rest = f"{first}, plane, values, count,"
    strides = "across, up, out_across, out_up);"
    return f"""
  int left = {number};
  for (; left >= 4; left -= 4, plane += 4 * up, values += 4 * out_up) {{
    {name}<4, A, T>({rest} {strides}
  }}
  if (left == 3) {name}<3, A, T>({rest} {strides}
  if (left == 2) {name}<2, A, T>({rest} {strides}
  if (left == 1 && C > 1) {name}<1, A, T>({rest} {strides}
  if (C == 1) {name}<1, A, T>({rest} 1, 1, 1, 1);
"""


# K channels of all pixels that count for a pack, a point's at once, for they share lines of memory.
# Those of 2 bytes are read and then converted: a loop of loads here and there becomes no vectors.
GATHER_FEW = """
template <class A> struct Pack { A of[PACK]; };

template <int K, class A, class T>
inline void gather_few(const thread Places<A>& from, const device T* plane, thread Pack<A>* values,
                       long across, long up) {
  Pack<T> read[ALL * K];
  for (int l = 0; l < PACK; ++l) {
    for (int t = 0; t < ALL; ++t) {
      const device T* of_pixel = plane + from.at[t][l] * across;
      for (int k = 0; k < K; ++k) {
        if (metal::is_same_v<T, A>) values[t * K + k].of[l] = A(of_pixel[k * up]);
        else read[t * K + k].of[l] = of_pixel[k * up];
      }
    }
  }
  if (metal::is_same_v<T, A>) return;
  for (int i = 0; i < ALL * K; ++i) {
    for (int l = 0; l < PACK; ++l) values[i].of[l] = A(read[i].of[l]);
  }
}
"""
FEW_CHANNELS = (
    GATHER_FEW
    + """
template <int K, class A, class T>
inline void sample_few(const thread Places<A>& from, const device T* plane, device T* to, int count,
                       long across, long up, long out_across, long out_up) {
  const bool at_once = K == 1 && metal::is_same_v<T, A>;  // read, and added up
  Pack<A> values[ALL * K], sums;
  if (!at_once) gather_few<K, A, T>(from, plane, values, across, up);
  for (int k = 0; k < K; ++k) {
    for (int l = 0; l < PACK; ++l) {
      A sum = 0;
      for (int t = 0; t < ALL; ++t) {
        const A read = at_once ? A(plane[from.at[t][l] * across]) : values[t * K + k].of[l];
        const A value = from.inside[t][l] != 0 ? read : A(0);
        sum = metal::fma(from.weight[t][l], value, sum);
      }
      sums.of[l] = sum;
    }
    device T* of_channel = to + k * out_up;
    if (count == PACK) {
      for (int l = 0; l < PACK; ++l) of_channel[l * out_across] = T(sums.of[l]);
    } else {
      for (int l = 0; l < count; ++l) of_channel[l * out_across] = T(sums.of[l]);
    }
  }
}
"""
)

# The same of channels that lie together, K of them, or ``width`` where K is 0: a point's are a
# vector. A few are stored when all are there: g++ makes no vectors else, nor of their conversions.
OF_POINTS = """
template <int K, class A, class T>
inline void sample_points(const thread Places<A>& from, const device T* plane, device T* to,
                          int count, int width, long across) {
  const int channels = K ? K : width;
  for (int l = 0; l < count; ++l, to += across) {
    const device T* of_pixel[ALL];
    A weight[ALL];
    bool inside[ALL], whole = true;
    for (int t = 0; t < ALL; ++t) {
      of_pixel[t] = plane + from.at[t][l] * across;
      weight[t] = from.weight[t][l], inside[t] = from.inside[t][l];
      whole = whole && inside[t];
    }
    if (K) {
      A sums[K ? K : 1];
      for (int k = 0; k < K; ++k) sums[k] = 0;
      for (int t = 0; t < ALL; ++t) {
        const bool counts = whole || inside[t];
        if (!CUBIC && !counts) continue;
        for (int k = 0; k < K; ++k) {
          sums[k] = metal::fma(weight[t], counts ? A(of_pixel[t][k]) : A(0), sums[k]);
        }
      }
      for (int k = 0; k < K; ++k) to[k] = T(sums[k]);
    } else if (whole) {
      for (int c = 0; c < channels; ++c) {
        A sum = 0;
        for (int t = 0; t < ALL; ++t) sum = metal::fma(weight[t], A(of_pixel[t][c]), sum);
        to[c] = T(sum);
      }
    } else {
      for (int c = 0; c < channels; ++c) {
        A sum = 0;
        for (int t = 0; t < ALL; ++t) {
          sum = metal::fma(weight[t], inside[t] ? A(of_pixel[t][c]) : A(0), sum);
        }
        to[c] = T(sum);
      }
    }
  }
}
"""

# One thread makes up to CHANNELS channels of its samples.
FORWARD = (
    POINTS
    + """
const int first = int(thread_at.z / B) * CHANNELS, end = metal::min(C, first + CHANNELS);
device T* sample = out + b * points * C + p * out_across;
const device T* plane = image + first * up;
device T* values = sample + first * out_up;
#ifdef FERRULE
const int asked = PACK == 1 || LAST || C == 1 ? 0 : end - first;
for (int k = 0; k < asked; ++k) ferrule::prefetch(values + k * out_up + 64, PACK);
#endif
if (LAST && (C >= 8 || (C > 1 && (PACK == 1 || !CUBIC) && metal::is_same_v<T, A>))) {
  if (C == 2) sample_points<2, A, T>(from, plane, values, count, 2, C);
  else if (C == 3) sample_points<3, A, T>(from, plane, values, count, 3, C);
  else if (C == 4) sample_points<4, A, T>(from, plane, values, count, 4, C);
  else sample_points<0, A, T>(from, plane, values, count, end - first, C);
} else {
"""
    + _few("sample_few(from", "end - first")
    + "}\n"
)

# The derivative by the grid. For each pixel that counts, cotangents times values are added up over
# the channels; of many that lie together, 8 at a time, each with a sum of its own, so that they can
# be a vector. Where the mode is nearest it is 0, which is not written once more: that takes a sixth
# of the derivative's time.
DOTS = (
    GATHER_FEW
    + """
template <int K, class A, class T>
inline void add_few(thread Places<A>& from, const device T* plane, const device T* cot, int count,
                    long across, long up, long out_across, long out_up) {
  const bool at_once = K == 1 && metal::is_same_v<T, A>;
  Pack<A> values[ALL * K], by;
  if (!at_once) gather_few<K, A, T>(from, plane, values, across, up);
  for (int k = 0; k < K; ++k) {
    const device T* of_channel = cot + k * out_up;
    if (count == PACK) {
      for (int l = 0; l < PACK; ++l) by.of[l] = A(of_channel[l * out_across]);
    } else {
      for (int l = 0; l < PACK; ++l) by.of[l] = l < count ? A(of_channel[l * out_across]) : A(0);
    }
    for (int t = 0; t < ALL; ++t) {
      for (int l = 0; l < PACK; ++l) {
        const A read = at_once ? A(plane[from.at[t][l] * across]) : values[t * K + k].of[l];
        from.dots[t][l] = metal::fma(by.of[l], read, from.dots[t][l]);
      }
    }
  }
}
"""
)
GRID_GRAD = (
    """
device G* grads = grid_grad + (b * points + p) * DIMS;
const device T* cot = cotangent + b * points * C + p * out_across;
if (!NEAREST) {
  for (int t = 0; t < ALL; ++t) {
    for (int l = 0; l < PACK; ++l) from.dots[t][l] = 0;
  }
  if (LAST && C >= 8) {
    for (int l = 0; l < count; ++l) {
      const device T* of_point = cot + long(l) * C;
      long at[ALL];
      A sum[ALL][8];
      for (int t = 0; t < ALL; ++t) {
        at[t] = long(from.at[t][l]) * C;
        for (int v = 0; v < 8; ++v) sum[t][v] = 0;
      }
      int c = 0;
      for (; c + 8 <= C; c += 8) {
        for (int t = 0; t < ALL; ++t) {
          for (int v = 0; v < 8; ++v) {
            sum[t][v] = metal::fma(A(of_point[c + v]), A(image[at[t] + c + v]), sum[t][v]);
          }
        }
      }
      for (; c < C; ++c) {
        for (int t = 0; t < ALL; ++t) {
          sum[t][0] = metal::fma(A(of_point[c]), A(image[at[t] + c]), sum[t][0]);
        }
      }
      for (int t = 0; t < ALL; ++t) {
        for (int v = 0; v < 8; ++v) from.dots[t][l] += sum[t][v];
      }
    }
  } else {
    const device T *plane = image, *values = cot;
"""
    + _few("add_few(from", "C")
    + """  }
  from.derive();
  for (int l = 0; l < count; ++l) {
    for (int d = 0; d < DIMS; ++d) grads[l * DIMS + d] = G(from.by_place[d][l]);
  }
}
"""
)

# Points share pixels, so what they give to one is added up by atomics.
BACKWARD = (
    POINTS
    + GRID_GRAD
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

# What a pack's points give to K channels of their pixels, in order.
SCATTER = """
template <int K, class A, class T>
inline void scatter_few(const thread Places<A>& from, device T* plane, const device T* cot,
                        int count, long across, long up, long out_across, long out_up) {
  for (int l = 0; l < count; ++l) {
    A by[K];
    for (int k = 0; k < K; ++k) by[k] = A(cot[l * out_across + k * out_up]);
    for (int t = 0; t < ALL; ++t) {
      if (!from.inside[t][l]) continue;
      device T* of_pixel = plane + from.at[t][l] * across;
      for (int k = 0; k < K; ++k) {
        of_pixel[k * up] = T(metal::fma(from.weight[t][l], by[k], A(of_pixel[k * up])));
      }
    }
  }
}
"""
# For few and fast threads, as processors have: some of them own OWNED channels of an image each,
# and add what all its points give, in order, so that there are no atomics. The others, behind them
# along y, have SLAB packs each, and the derivative by the grid. Many images of few channels have no
# others: their owners do that, too, and find no point twice.
OWNING = (
    STRIDES
    + """
const long b = thread_at.z;
const int owners = (C + OWNED - 1) / OWNED;
const bool owns = int(thread_at.y) < owners, alone = int(threads_per_grid.y) == owners;
const device T* image = x + b * pixels * C;
const long begin = owns ? 0 : long(int(thread_at.y) - owners) * SLAB * PACK;
const long end = owns ? points : metal::min(points, begin + SLAB * PACK);
for (long p = begin; p < end; p += PACK) {
"""
    + PLACES
    + """
  if (owns) {
    const int first = int(thread_at.y) * OWNED, width = metal::min(OWNED, C - first);
    const device T* cot = cotangent + b * points * C + p * out_across + first * out_up;
    device T* image_grad = x_grad + b * pixels * C + first * up;
    if (LAST && C >= 8) {
      for (int l = 0; l < count; ++l) {
        const device T* of_point = cot + long(l) * C;
        for (int t = 0; t < ALL; ++t) {
          if (!from.inside[t][l]) continue;
          const A weight = from.weight[t][l];
          device T* of_pixel = image_grad + long(from.at[t][l]) * C;
          for (int c = 0; c < width; ++c) {
            of_pixel[c] = T(metal::fma(weight, A(of_point[c]), A(of_pixel[c])));
          }
        }
      }
    } else {
      device T* plane = image_grad;
      const device T* values = cot;
#ifdef FERRULE
      for (int k = LAST && C > 1 ? width : 0; k < width; ++k)
        ferrule::prefetch(values + k * out_up + 64, PACK);
#endif
"""
    + _few("scatter_few(from", "width")
    + """
    }
    if (!alone) continue;
  }
"""
    + GRID_GRAD
    + "}\n"
)

# Without atomics: which pixel each point counts for, as numbers that say the pixel and then the
# entry, point * ALL + t; those of no pixel come last. They are sorted by the array library.
ENTRIES = (
    POINTS
    + GRID_GRAD
    + """
for (int l = 0; l < count; ++l) {
  for (int d = 0; d < DIMS && NEAREST; ++d) grads[l * DIMS + d] = 0;
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
  A sum[16] = {};
  for (long i = begin; i < all && (sorted[i] >> 32) == pixel; ++i) {
    const long entry = sorted[i] & 0xffffffffl, p = entry / ALL;
    const int t = int(entry % ALL);
    const device G* g = grid + (b * points + p) * DIMS;
    Places<A> from;
    from.x.g[0] = A(g[0]), from.y.g[0] = A(g[1]), from.z.g[0] = A(g[DIMS - 1]);
    from.find(D, H, W);
    const A weight = from.weight[t][0];
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
