"""Where `grid_sample` reads: a text that its bodies in Metal and in CUDA have in front.

It is preceded by a few constants:

* ``CUBIC``, ``NEAREST``: the mode, bilinear where neither is.
* ``BORDER``, ``REFLECTION``: the padding mode, zeros where neither is.
* ``CORNERS``: whether -1 and 1 are the centres of the outermost pixels, or their outer edges.
* ``DIMS``: 2 for images, 3 for volumes.
* ``TAPS``, ``ALL``: how many pixels count for a point along one axis, and in all.
* ``Offset``: the type that counts pixels.
* ``PACK``: how many points a thread takes. On the CPU the loops over them become vectors.
"""

from __future__ import annotations

PLACE = """
template <class A> struct Moved { A at, slope; };

// How much a point's pixel t counts, and the first and second derivative of that by the point's
// place. Where the mode is cubic that is cubic convolution with a = -3/4.
template <class A> inline A weight_of(int t, A behind) {
  if (NEAREST) return 1;
  if (!CUBIC) return t ? behind : 1 - behind;
  const A a = A(-0.75f), x = t < 2 ? behind + A(1 - t) : A(t - 1) - behind;
  if (t == 1 || t == 2) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
}
template <class A> inline A slope_of(int t, A behind) {
  if (NEAREST) return 0;
  if (!CUBIC) return t ? 1 : -1;
  const A a = A(-0.75f), x = t < 2 ? behind + A(1 - t) : A(t - 1) - behind;
  const A slope = t == 1 || t == 2 ? (3 * (a + 2) * x - 2 * (a + 3)) * x
                                   : (3 * a * x - 10 * a) * x + 8 * a;
  return t < 2 ? slope : -slope;
}
template <class A> inline A bend_of(int t, A behind) {
  if (!CUBIC) return 0;
  const A a = A(-0.75f), x = t < 2 ? behind + A(1 - t) : A(t - 1) - behind;
  return t == 1 || t == 2 ? 6 * (a + 2) * x - 2 * (a + 3) : 6 * a * x - 10 * a;
}

// From [-1, 1] to pixels, whose centres are at 0, 1, 2 ... Products and sums are rounded one by
// one, so that a point that lies half way between two pixels is put where others put it.
template <class A> inline A to_pixels(A g, int size) {
  #pragma METAL fp contract(off)
  return CORNERS ? (g + 1) / 2 * A(size - 1) : ((g + 1) * A(size) - 1) / 2;
}

// A coordinate brought into the image, and the derivative of that. NaN becomes 0.
template <class A> inline Moved<A> padded(A at, int size) {
  A slope = 1;
  const A last = A(size - 1);
  if (REFLECTION) {
    const A low = CORNERS ? A(0) : A(-0.5f), period = 2 * (CORNERS ? last : A(size));
    const bool before = at < low;
    const A distance = before ? low - at : at - low;
    const A rest = distance - floor(distance / period) * period;  // NaN where there is one pixel
    const bool back = rest * 2 >= period;
    slope = back != before ? A(-1) : A(1);
    at = (back ? period - rest : rest) + low;
  }
  if (BORDER || REFLECTION) {
    slope = at > 0 && at < last ? slope : A(0);
    at = at > 0 ? at : A(0);
    at = at < last ? at : last;
  }
  return {at, slope};
}

// Along one axis, for each point of a pack, from its coordinate ``g``: whether a pixel that counts
// is ``there``, -1, or outside, 0, and how many pixels of the image lie before it (0 for what lies
// outside); how far the point is behind the first of them (the second, where the mode is cubic);
// and how many pixels it moves where its coordinate grows by 1.
template <class A> struct Axis {
  A g[PACK];
  int there[TAPS][PACK];
  Offset step[TAPS][PACK];
  A behind[PACK], speed[PACK];
  A weight[TAPS][PACK];  // where the mode is cubic, by `Places::find_axes`
  A slope[TAPS][PACK];   // by `find_slopes`
  void find(int l, int size, Offset stride) {
    const A scale = (CORNERS ? A(size - 1) : A(size)) / 2;
    const A pixels = to_pixels(g[l], size);
    const Moved<A> moved = CUBIC ? Moved<A>{pixels, A(1)} : padded(pixels, size);
    const A first = NEAREST ? rint(moved.at) : floor(moved.at);
    const A rest = moved.at - first;
    const bool is_number = CUBIC || NEAREST || BORDER || REFLECTION || rest >= 0;
    behind[l] = is_number ? rest : A(0);  // of what lies outside, whose products are 0 then
    speed[l] = scale * moved.slope;
    for (int t = 0; t < TAPS; ++t) {
      const A place = CUBIC ? padded(first + A(t - 1), size).at : first + A(t);
      const bool inside = place >= 0 && place < A(size);
      there[t][l] = inside ? -1 : 0;
      step[t][l] = (inside ? Offset(place) : Offset(0)) * stride;
    }
  }
  void find_slopes() {
    for (int t = 0; t < TAPS; ++t) {
      for (int l = 0; l < PACK; ++l) slope[t][l] = counts(t, l, 1);
    }
  }
  // How much pixel t counts for point l, or the first or second derivative of that.
  A counts(int t, int l, int order) const {
    const A v = behind[l], s = speed[l];
    if (order == 0) return CUBIC ? weight[t][l] : weight_of(t, v);
    return order == 1 ? s * slope_of(t, v) : s * s * bend_of(t, v);
  }
};

// All pixels that count for each point of a pack: where each is among its image's (any, for what
// lies outside) and how much it counts (0 outside, also where the point's coordinate is NaN, unless
// the mode is cubic).
template <class A> struct Places {
  Axis<A> x, y, z;
  Offset at[ALL][PACK];
  A weight[ALL][PACK];
  int inside[ALL][PACK];  // -1 or 0
  A dots[ALL][PACK], by_place[DIMS][PACK];  // for derivatives
  // A point of few pixels at once, for what is found on the way stays in registers. Of many the
  // points of each pixel: on the CPU a loop becomes vectors where those in it are unrolled.
  void find(int depth, int height, int width) {
    if (ALL <= 4) {
      for (int l = 0; l < PACK; ++l) {
        x.find(l, width, 1), y.find(l, height, width);
        if (DIMS == 3) z.find(l, depth, Offset(height) * width);
        for (int t = 0; t < ALL; ++t) find_pixel(t, l);
      }
      return;
    }
    find_axes(depth, height, width);
    for (int t = 0; t < ALL; ++t) {
      for (int l = 0; l < PACK; ++l) find_pixel(t, l);
    }
  }
  void find_pixel(int t, int l) {
    inside[t][l] = is_inside(t, l);
    at[t][l] = place(t, l);
    weight[t][l] = derived(t, l, 0, 0, 0);
  }
  void find_axes(int depth, int height, int width) {
    for (int l = 0; l < PACK; ++l) x.find(l, width, 1);
    for (int l = 0; l < PACK; ++l) y.find(l, height, width);
    for (int l = 0; l < PACK && DIMS == 3; ++l) z.find(l, depth, Offset(height) * width);
    if (!CUBIC) return;
    for (int t = 0; t < TAPS; ++t) {
      for (int l = 0; l < PACK; ++l) {
        x.weight[t][l] = weight_of(t, x.behind[l]), y.weight[t][l] = weight_of(t, y.behind[l]);
      }
    }
  }
  int is_inside(int t, int l) const {
    const int i = t % TAPS, j = t / TAPS % TAPS, k = t / (TAPS * TAPS);
    return x.there[i][l] & y.there[j][l] & (DIMS == 2 ? -1 : z.there[k][l]);
  }
  Offset place(int t, int l) const {
    const int i = t % TAPS, j = t / TAPS % TAPS, k = t / (TAPS * TAPS);
    return x.step[i][l] + y.step[j][l] + (DIMS == 2 ? 0 : z.step[k][l]);
  }
  // The derivative of a weight along x (0), y (1) or z (2).
  A slope(int t, int l, int along) const {
    return derived(t, l, along == 0, along == 1, along == 2);
  }
  // The same along one axis, and then along one, which may be the same.
  A bend(int t, int l, int along, int then) const {
    return derived(t, l, (along == 0) + (then == 0), (along == 1) + (then == 1),
                   (along == 2) + (then == 2));
  }
  A derived(int t, int l, int by_x, int by_y, int by_z) const {
    const int i = t % TAPS, j = t / TAPS % TAPS, k = t / (TAPS * TAPS);
    const A product =
        x.counts(i, l, by_x) * y.counts(j, l, by_y) * (DIMS == 2 ? A(1) : z.counts(k, l, by_z));
    return CUBIC || is_inside(t, l) ? product : A(0);
  }
  // The derivative by the points' places, of the sum of each pixel's weight times its ``dots``: a
  // row of pixels after the other, in the order of `find`. It is 0 where the mode is nearest.
  void derive() {
    for (int d = 0; d < DIMS; ++d) {
      for (int l = 0; l < PACK; ++l) by_place[d][l] = 0;
    }
    if (NEAREST) return;
    x.find_slopes();
    y.find_slopes();
    if (DIMS == 3) z.find_slopes();
    if (ALL <= 4) {
      for (int l = 0; l < PACK; ++l) {
        for (int row = 0; row < ALL / TAPS; ++row) derive_row<0>(row, l), derive_row<1>(row, l);
      }
      return;
    }
    for (int row = 0; row < ALL / TAPS; ++row) {
      for (int l = 0; l < PACK; ++l) derive_row<0>(row, l);
      for (int l = 0; l < PACK; ++l) derive_row<1>(row, l);
      for (int l = 0; l < PACK && DIMS == 3; ++l) derive_row<DIMS - 1>(row, l);
    }
  }
  template <int along> void derive_row(int row, int l) {
    const int j = row % TAPS, k = row / TAPS;
    A sum = 0;
    for (int i = 0; i < TAPS; ++i) {
      const int t = row * TAPS + i;
      const A dot = is_inside(t, l) ? dots[t][l] : A(0);
      sum = fma(along == 0 ? x.slope[i][l] : x.counts(i, l, 0), dot, sum);
    }
    A by = along == 1 ? y.slope[j][l] : y.counts(j, l, 0);
    if (DIMS == 3) by *= along == 2 ? z.slope[k][l] : z.counts(k, l, 0);
    by_place[along][l] = fma(by, sum, by_place[along][l]);
  }
};
"""
