// Operations of a simdgroup (or quadgroup) on the CPU, on arrays with one element per lane.
//
// `v` holds 32 elements, `mask` says which lanes take part. Fibers gather their operands into such
// arrays; split loops keep them there all the time. The active lanes get the result in place.
//
// Sums of floats add in the ascending butterfly order (partners at distance 1, 2, 4, 8, 16). A lane
// that is missing adds nothing: its partner's value passes through unchanged.
#pragma once
#include "operations.h"
#include "vectors.h"

namespace fr {

constexpr unsigned SIMD_WIDTH = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

FR_FN bool has_lane(unsigned mask, unsigned lane) { return (mask >> lane) & 1u; }

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
    if constexpr (in_vectors<T>) {
      return vector_tree<OP>(v);
    } else {
      A w[32];
      for (unsigned i = 0; i < 32; ++i) w[i] = A(v[i]);
      if constexpr (in_vectors<A>) return T(vector_tree<OP>(w));
      else return T(tree<OP, 32, A>(w));
    }
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
  if constexpr (W == 32 && in_vectors<T>)
    if (__builtin_expect(mask == FULL_MASK, 1)) return vector_scan<OP, EXCLUSIVE>(v);
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
template <class K> FR_FN unsigned at(const K& k, unsigned i) {
  if constexpr (metal::is_integral_v<K>) {
    return unsigned(k);
  } else {
    return unsigned(k[i]);
  }
}

namespace general {
#define FR_MOVE(PREFIX, LANES, NAME, SOURCE)                                                     \
  template <unsigned LANES, class T, class K> FR_FN void NAME(T* v, const K& k, unsigned mask) { \
    constexpr unsigned w = LANES - 1;                                                            \
    T t[32];                                                                                     \
    for (unsigned i = 0; i < 32; ++i) t[i] = v[i];                                               \
    if (__builtin_expect(mask == FULL_MASK, 1)) {                                                \
      for (unsigned i = 0; i < 32; ++i) {                                                        \
        const unsigned j = i & w, d = at(k, i), s = (SOURCE);                                    \
        v[i] = t[s < LANES ? (i & ~w) + s : i];                                                  \
      }                                                                                          \
      return;                                                                                    \
    }                                                                                            \
    for (unsigned i = 0; i < 32; ++i) {                                                          \
      const unsigned j = i & w, d = at(k, i), s = (SOURCE);                                      \
      const unsigned from = (i & ~w) + (s & w);                                                  \
      const bool ok = s < LANES && has_lane(mask, from) && has_lane(mask, i);                    \
      v[i] = t[ok ? from : i];                                                                   \
    }                                                                                            \
  }
FR_MOVES(FR_MOVE, lanes, W)
#undef FR_MOVE
}  // namespace general
using namespace general;

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
  if constexpr (W == 32 && metal::is_integral_v<K>) {
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
  general::shuffle_xor<W>(v, k, mask);
}

// Moves of all 32 lanes by one distance, where no lane asks for an element of its own.
template <class T> FR_FN void fill_from(T* v, unsigned d) {
  if constexpr (in_vectors<T>) {
    // A choice, not a condition: what is stored under one, compilers load again. Bits, as NaN may have.
    int* bits = reinterpret_cast<int*>(v);
    simdgroup<int> s(bits);
    const vector_t<int> there = vector_t<int>{} - int(d < 32), x = vector_t<int>{} + bits[d % 32];
#pragma GCC unroll 8
    for (int r = 0; r < VECTORS; ++r) s.at[r] = there ? x : s.at[r];
    s.store(bits);
  } else if (d < 32) {
    const T x = v[d];
    for (unsigned i = 0; i < 32; ++i) v[i] = x;
  }
}
template <unsigned W, class T, class K> FR_FN void shuffle(T* v, const K& k, unsigned mask) {
  if constexpr (W == 32 && metal::is_integral_v<K>)
    if (__builtin_expect(mask == FULL_MASK, 1)) return fill_from(v, at(k, 0));
  general::shuffle<W>(v, k, mask);
}
template <unsigned W, class T, class K> FR_FN void broadcast(T* v, const K& k, unsigned mask) {
  if constexpr (W == 32 && metal::is_integral_v<K>)
    if (__builtin_expect(mask == FULL_MASK, 1)) return fill_from(v, at(k, 0));
  general::broadcast<W>(v, k, mask);
}
template <unsigned W, class T, class K> FR_FN void shuffle_up(T* v, const K& k, unsigned mask) {
  if constexpr (W == 32 && metal::is_integral_v<K> && in_vectors<T>)
    if (__builtin_expect(mask == FULL_MASK && at(k, 0) == 1, 1)) {
      simdgroup<T> s(v);
#pragma GCC unroll 8
      for (int r = VECTORS - 1; r > 0; --r) s.at[r] = pick<before<1>>(s.at[r - 1], s.at[r]);
      s.at[0] = pick<headed<1>>(s.at[0], pick<before<1>>(s.at[0], s.at[0]));
      return s.store(v);
    }
  general::shuffle_up<W>(v, k, mask);
}

// `modulo` says how many lanes a part has.
#define FR_FILL(PREFIX, LANES, NAME, SOURCE, INSIDE)                                                   \
  template <unsigned LANES, class T, class K, class M>                                                 \
  void NAME(T* v, const T* filling, const K& k, const M& modulo, unsigned mask) {                      \
    constexpr unsigned w = LANES - 1;                                                                  \
    T t[32];                                                                                           \
    for (unsigned i = 0; i < 32; ++i) t[i] = v[i];                                                     \
    for (unsigned i = 0; i < 32; ++i) {                                                                \
      const unsigned m = at(modulo, i), part = (i & w) / m * m, j = (i & w) - part, d = at(k, i);      \
      const unsigned base = (i & ~w) + part, from = base + (SOURCE);                                   \
      if (!has_lane(mask, i) || !has_lane(mask, from)) continue;                                       \
      v[i] = (INSIDE) ? t[from] : filling[from];                                                       \
    }                                                                                                  \
  }
FR_FILLS(FR_FILL, lanes, W)
#undef FR_FILL

template <unsigned W, class T> FR_FN void broadcast_first(T* v, unsigned mask) {
  for (unsigned q = 0; q < 32; q += W) {
    const unsigned part = W == 32 ? mask : (mask >> q) & ((1u << (W & 31)) - 1);
    if (!part) continue;
    const T first = v[q + unsigned(__builtin_ctz(part))];
    for (unsigned i = 0; i < W; ++i) v[q + i] = first;
  }
}

// The lanes that vote for something, as bits. Votes are 0 or -1; a lane that takes no part may have left
// anything there.
FR_FN unsigned bits(const int* v, unsigned mask) {
  unsigned b = 0;
#if defined(__SSE2__)
  const simdgroup<float> s(reinterpret_cast<const float*>(v));
#pragma GCC unroll 8
  for (int r = 0; r < VECTORS; ++r) b |= unsigned(signs(s.at[r])) << (r * VECTOR);
#else
  for (unsigned i = 0; i < 32; ++i) b |= unsigned(v[i]) & (1u << i);
#endif
  return b & mask;
}

template <unsigned W> FR_FN unsigned part_of(unsigned bits, unsigned lane) {
  return W == 32 ? bits : (bits >> (lane & ~(W - 1))) & ((1u << (W & 31)) - 1);
}

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
