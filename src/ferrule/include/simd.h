// Operations of a simdgroup (or quadgroup) on the CPU, on arrays with one element per lane.
//
// `v` holds 32 elements, `mask` says which lanes take part. Fibers gather their operands into such
// arrays; split loops keep them there all the time. The active lanes get the result in place.
//
// Sums of floats add in the ascending butterfly order (partners at distance 1, 2, 4, 8, 16). A lane
// that is missing adds nothing: its partner's value passes through unchanged.
#pragma once

namespace fr {

constexpr unsigned SIMD_WIDTH = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

FR_FN bool has_lane(unsigned mask, unsigned lane) { return (mask >> lane) & 1u; }

namespace op {

struct sum {
  template <class T> static FR_FN T of(T a, T b) { return T(a + b); }
  static constexpr int identity = 0;
};
struct product {
  template <class T> static FR_FN T of(T a, T b) { return T(a * b); }
  static constexpr int identity = 1;
};
struct max {
  template <class T> static FR_FN T of(T a, T b) { return metal::max(a, b); }
};
struct min {
  template <class T> static FR_FN T of(T a, T b) { return metal::min(a, b); }
};
struct bit_and {
  template <class T> static FR_FN T of(T a, T b) { return T(a & b); }
};
struct bit_or {
  template <class T> static FR_FN T of(T a, T b) { return T(a | b); }
};
struct bit_xor {
  template <class T> static FR_FN T of(T a, T b) { return T(a ^ b); }
};

}  // namespace op

// bfloat16 reductions go through float and round once, as MLX's overloads do.
template <class T> struct wide { using type = T; };
template <> struct wide<bfloat> { using type = float; };

namespace lanes {

// The butterfly's tree over `W` full lanes, halving the array at each level so that it vectorises.
template <class OP, unsigned W, class T> FR_FN T tree(const T* v) {
  T t[W];
  for (unsigned i = 0; i < W; ++i) t[i] = v[i];
#pragma GCC unroll 8
  for (unsigned half = W / 2; half > 0; half /= 2)
    for (unsigned i = 0; i < half; ++i) t[i] = OP::of(t[2 * i], t[2 * i + 1]);
  return t[0];
}

template <class OP, unsigned W, class T> T sparse_tree(const T* v, unsigned mask) {
  T t[W];
  bool there[W];
  for (unsigned i = 0; i < W; ++i) t[i] = v[i], there[i] = has_lane(mask, i);
  for (unsigned d = 1; d < W; d *= 2)
    for (unsigned i = 0; i < W; i += 2 * d) {
      if (there[i] && there[i + d]) t[i] = OP::of(t[i], t[i + d]);
      else if (there[i + d]) t[i] = t[i + d];
      there[i] = there[i] || there[i + d];
    }
  return t[0];
}

// The reduction of one simdgroup, as one value.
template <class OP, class T> FR_FN T reduced(const T* v, unsigned mask) {
  using A = typename wide<T>::type;
  if (__builtin_expect(mask == FULL_MASK, 1)) {
    if constexpr (metal::is_same<A, T>::value) return tree<OP, 32, T>(v);
    A w[32];
    for (unsigned i = 0; i < 32; ++i) w[i] = A(v[i]);
    return T(tree<OP, 32, A>(w));
  }
  A w[32];
  for (unsigned i = 0; i < 32; ++i) w[i] = has_lane(mask, i) ? A(v[i]) : A();
  return T(sparse_tree<OP, 32, A>(w, mask));
}

template <class OP, unsigned W, class T> FR_FN void reduce(T* v, unsigned mask) {
  if constexpr (W == 32) {
    const T r = reduced<OP>(v, mask);
    for (unsigned i = 0; i < 32; ++i) v[i] = r;
  } else {
    for (unsigned q = 0; q < 32; q += W) {
      const unsigned part = (mask >> q) & ((1u << W) - 1);
      if (!part) continue;
      T w[W];
      for (unsigned i = 0; i < W; ++i) w[i] = has_lane(part, i) ? v[q + i] : T();
      const T r = sparse_tree<OP, W, T>(w, part);
      for (unsigned i = 0; i < W; ++i) v[q + i] = r;
    }
  }
}

// Prefix sums in log steps (distances 1, 2, 4, 8, 16), the same on every device.
template <class OP, bool EXCLUSIVE, unsigned W, class T> void scan(T* v, unsigned mask) {
  using A = typename wide<T>::type;
  A t[32], u[32];
  for (unsigned i = 0; i < 32; ++i) t[i] = has_lane(mask, i) ? A(v[i]) : A(OP::identity);
  for (unsigned d = 1; d < W; d *= 2) {
    for (unsigned i = 0; i < 32; ++i) u[i] = i % W >= d ? A(OP::of(t[i - (i % W >= d ? d : 0)], t[i])) : t[i];
    for (unsigned i = 0; i < 32; ++i) t[i] = u[i];
  }
  for (unsigned i = 0; i < 32; ++i) {
    if (!has_lane(mask, i)) continue;
    if (EXCLUSIVE) v[i] = i % W ? T(t[i - 1]) : T(OP::identity);
    else v[i] = T(t[i]);
  }
}

// A source that is out of range or takes no part gives the lane's own value (undefined in Metal, what
// CUDA does).

// `k[i]` where the operand differs from lane to lane, or one number for all.
template <class K> FR_FN unsigned at(const K* k, unsigned i) { return unsigned(k[i]); }
FR_FN unsigned at(unsigned k, unsigned) { return k; }
FR_FN unsigned at(int k, unsigned) { return unsigned(k); }
FR_FN unsigned at(unsigned short k, unsigned) { return k; }
FR_FN unsigned at(short k, unsigned) { return unsigned(int(k)); }
FR_FN unsigned at(unsigned char k, unsigned) { return k; }
FR_FN unsigned at(unsigned long k, unsigned) { return unsigned(k); }
FR_FN unsigned at(long k, unsigned) { return unsigned(k); }

template <class K> constexpr bool is_one_number = metal::is_integral_v<K>;

#define FR_MOVE(NAME, EXPR)                                                                      \
  template <unsigned W, class T, class K> FR_FN void NAME(T* v, const K& k, unsigned mask) {     \
    T t[32];                                                                                     \
    for (unsigned i = 0; i < 32; ++i) t[i] = v[i];                                               \
    for (unsigned i = 0; i < 32; ++i) {                                                          \
      const unsigned j = i & (W - 1), d = at(k, i), s = (EXPR);                                  \
      const unsigned from = (i & ~(W - 1)) + (s & (W - 1));                                      \
      const bool ok = s < W && has_lane(mask, from) && has_lane(mask, i);                        \
      v[i] = t[ok ? from : i];                                                                   \
    }                                                                                            \
  }
FR_MOVE(broadcast, (j & 0u) | d)
FR_MOVE(shuffle, (j & 0u) | d)
FR_MOVE(shuffle_up, j - d)
FR_MOVE(shuffle_down, j + d)
FR_MOVE(general_shuffle_xor, j ^ d)
FR_MOVE(shuffle_rotate_up, (j - d) & (W - 1))
FR_MOVE(shuffle_rotate_down, (j + d) & (W - 1))
#undef FR_MOVE

// The butterfly's step is the move that matters: all 32 lanes, one distance, a power of two.
template <unsigned D, class T> FR_FN void exchange_at(T* v) {
  T t[32];
  for (unsigned i = 0; i < 32; ++i) t[i] = v[i];
  if constexpr (D >= 4) {
    for (unsigned b = 0; b < 32; b += 2 * D)
      for (unsigned i = 0; i < D; ++i) v[b + i] = t[b + D + i], v[b + D + i] = t[b + i];
  } else {
    for (unsigned i = 0; i < 32; i += 4)
      v[i] = t[i + D], v[i + 1] = t[i + (1 ^ D)], v[i + 2] = t[i + (2 ^ D)], v[i + 3] = t[i + (3 ^ D)];
  }
}
template <unsigned W, class T, class K> FR_FN void shuffle_xor(T* v, const K& k, unsigned mask) {
  if constexpr (W == 32 && is_one_number<K>) {
    if (__builtin_expect(mask == FULL_MASK, 1)) {
      switch (at(k, 0)) {
        case 1: return exchange_at<1>(v);
        case 2: return exchange_at<2>(v);
        case 4: return exchange_at<4>(v);
        case 8: return exchange_at<8>(v);
        case 16: return exchange_at<16>(v);
        default: break;
      }
    }
  }
  general_shuffle_xor<W>(v, k, mask);
}

// `modulo` splits the group into parts of that many lanes; the lanes that a shift leaves without a
// source take the filling of the part's other end.
template <unsigned W, class T, class K, class M>
void shuffle_and_fill_up(T* v, const T* filling, const K& k, const M& modulo, unsigned mask) {
  T t[32];
  for (unsigned i = 0; i < 32; ++i) t[i] = v[i];
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned m = at(modulo, i), part = (i & (W - 1)) / m * m, j = (i & (W - 1)) - part;
    const unsigned d = at(k, i), base = (i & ~(W - 1)) + part;
    const unsigned from = base + (j >= d ? j - d : (j + m - d % m) % m);
    if (!has_lane(mask, i) || !has_lane(mask, from)) continue;
    v[i] = j >= d ? t[from] : filling[from];
  }
}
template <unsigned W, class T, class K, class M>
void shuffle_and_fill_down(T* v, const T* filling, const K& k, const M& modulo, unsigned mask) {
  T t[32];
  for (unsigned i = 0; i < 32; ++i) t[i] = v[i];
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned m = at(modulo, i), part = (i & (W - 1)) / m * m, j = (i & (W - 1)) - part;
    const unsigned d = at(k, i), base = (i & ~(W - 1)) + part;
    const unsigned from = base + (j + d) % m;
    if (!has_lane(mask, i) || !has_lane(mask, from)) continue;
    v[i] = j + d < m ? t[from] : filling[from];
  }
}

template <unsigned W, class T> FR_FN void broadcast_first(T* v, unsigned mask) {
  for (unsigned q = 0; q < 32; q += W) {
    const unsigned part = W == 32 ? mask : (mask >> q) & ((1u << (W & 31)) - 1);
    if (!part) continue;
    const T first = v[q + unsigned(__builtin_ctz(part))];
    for (unsigned i = 0; i < W; ++i) v[q + i] = first;
  }
}

// The lanes whose byte is not 0, as bits. Bytes, since a lane that takes no part may have left
// anything there, which a bool must not hold.
FR_FN unsigned bits(const unsigned char* v, unsigned mask) {
  unsigned b = 0;
  for (unsigned i = 0; i < 32; ++i) b |= unsigned(v[i] != 0) << i;
  return b & mask;
}

template <unsigned W> FR_FN unsigned part_of(unsigned bits, unsigned lane) {
  return W == 32 ? bits : (bits >> (lane & ~(W - 1))) & ((1u << (W & 31)) - 1);
}

}  // namespace lanes

namespace lanes {

// d = a * b (+ c): operands by lane. The sum is kept in float and rounded to D's type once.
template <class D, class A, class B, class C>
void matrix_multiply(D* const* d, const A* const* a, const B* const* b, const C* const* c) {
  float x[8][8], y[8][8], z[8][8];
  for (unsigned l = 0; l < 32; ++l) {
    const unsigned row = matrix_row(l), col = matrix_column(l);
    for (unsigned i = 0; i < 2; ++i) {
      x[row][col + i] = float(a[l]->elements[i]);
      y[row][col + i] = float(b[l]->elements[i]);
      z[row][col + i] = c ? float(c[l]->elements[i]) : 0.0f;
    }
  }
  for (unsigned i = 0; i < 8; ++i)
    for (unsigned k = 0; k < 8; ++k)
      for (unsigned j = 0; j < 8; ++j) z[i][j] = detail::mad(x[i][k], y[k][j], z[i][j]);
  for (unsigned l = 0; l < 32; ++l) {
    const unsigned row = matrix_row(l), col = matrix_column(l);
    for (unsigned i = 0; i < 2; ++i)
      d[l]->elements[i] = decltype(+d[l]->elements[i] * 1)(z[row][col + i]);
  }
}

}  // namespace lanes
}  // namespace fr
