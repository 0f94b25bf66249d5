// The operations of a warp, which is a simdgroup, and its matrices.
#pragma once

namespace fr {

namespace warp {

FR_FN unsigned lane() {
  unsigned l;
  asm("mov.u32 %0, %%laneid;" : "=r"(l));
  return l;
}

}  // namespace warp
FR_FN unsigned matrix_own_lane() { return warp::lane(); }
namespace warp {

// One lane's value in words of 32 bits.
template <class T> FR_FN T read(unsigned mask, const T& v, unsigned from) {
  constexpr unsigned words = (sizeof(T) + 3) / 4;
  unsigned w[words] = {};
  memcpy(w, &v, sizeof(T));
#pragma unroll
  for (unsigned i = 0; i < words; ++i) w[i] = __shfl_sync(mask, w[i], int(from));
  T r;
  memcpy(&r, w, sizeof(T));
  return r;
}

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

// bfloat16 reductions go through float and round once, as MLX's overloads do.
template <class T> struct wide { using type = T; };
template <> struct wide<bfloat> { using type = float; };

// The ascending butterfly. Where lanes are missing, a subtree's value is read from any lane that is
// in it, and an empty subtree adds nothing.
template <class OP, unsigned W, class T> FR_FN T reduce(T value) {
  using A = typename wide<T>::type;
  A v = A(value);
  const unsigned mask = __activemask(), l = lane();
  if (mask == 0xffffffffu) {
#pragma unroll
    for (unsigned d = 1; d < W; d *= 2) v = OP::of(v, read(mask, v, l ^ d));
    return T(v);
  }
#pragma unroll 1  // rare, and five times as long
  for (unsigned d = 1; d < W; d *= 2) {
    const unsigned base = (l ^ d) & ~(d - 1), part = mask & (((1u << d) - 1) << base);
    const A other = read(mask, v, part ? unsigned(__ffs(int(part)) - 1) : l);
    if (part) v = OP::of(v, other);
  }
  return T(v);
}

// Prefix sums in log steps, as on the CPU; a missing lane counts as the identity.
template <class OP, bool EXCLUSIVE, unsigned W, class T> FR_FN T scan(T value) {
  using A = typename wide<T>::type;
  const unsigned mask = __activemask(), l = lane(), j = l & (W - 1), base = l & ~(W - 1);
  if (mask == 0xffffffffu) {
    A v = A(value);
#pragma unroll
    for (unsigned d = 1; d < W; d *= 2) {
      const A other = read(mask, v, j >= d ? l - d : l);
      if (j >= d) v = A(OP::of(other, v));
    }
    if (!EXCLUSIVE) return T(v);
    const A before = read(mask, v, j ? l - 1 : l);
    return j ? T(before) : T(OP::identity);
  }
  A t[W];
  for (unsigned i = 0; i < W; ++i) {
    const bool there = (mask >> (base + i)) & 1;
    const A other = read(mask, A(value), there ? base + i : l);
    t[i] = there ? other : A(OP::identity);
  }
  for (unsigned d = 1; d < W; d *= 2)
    for (unsigned i = W - 1; i >= d; --i) t[i] = A(OP::of(t[i - d], t[i]));
  if (EXCLUSIVE) return j ? T(t[j - 1]) : T(OP::identity);
  return T(t[j]);
}

// A source that is out of range or takes no part gives the lane's own value.
template <unsigned W, class T> FR_FN T move(const T& v, unsigned from) {
  const unsigned mask = __activemask(), l = lane(), s = (l & ~(W - 1)) + (from & (W - 1));
  return read(mask, v, from < W && ((mask >> s) & 1) ? s : l);
}

template <unsigned W> FR_FN unsigned part(unsigned bits) {
  return W == 32 ? bits : (bits >> (lane() & ~(W - 1))) & ((1u << (W & 31)) - 1);
}

}  // namespace warp

namespace metal {

#define FR_REDUCTION(NAME, OP)                                                                \
  template <class T> FR_FN T simd_##NAME(T v) { return warp::reduce<warp::OP, 32>(v); }       \
  template <class T> FR_FN T quad_##NAME(T v) { return warp::reduce<warp::OP, 4>(v); }
FR_REDUCTION(sum, sum)
FR_REDUCTION(product, product)
FR_REDUCTION(max, max)
FR_REDUCTION(min, min)
FR_REDUCTION(and, bit_and)
FR_REDUCTION(or, bit_or)
FR_REDUCTION(xor, bit_xor)
#undef FR_REDUCTION

#define FR_SCAN(NAME, OP, EXCLUSIVE)                                                              \
  template <class T> FR_FN T simd_##NAME(T v) { return warp::scan<warp::OP, EXCLUSIVE, 32>(v); }  \
  template <class T> FR_FN T quad_##NAME(T v) { return warp::scan<warp::OP, EXCLUSIVE, 4>(v); }
FR_SCAN(prefix_inclusive_sum, sum, false)
FR_SCAN(prefix_exclusive_sum, sum, true)
FR_SCAN(prefix_inclusive_product, product, false)
FR_SCAN(prefix_exclusive_product, product, true)
#undef FR_SCAN

#define FR_MOVE(NAME, EXPR)                                                                  \
  template <class T> FR_FN T simd_##NAME(T v, ushort k) {                                    \
    const unsigned j = warp::lane(), d = k, w = 31;                                          \
    (void)j, (void)w;                                                                        \
    return warp::move<32>(v, EXPR);                                                          \
  }                                                                                          \
  template <class T> FR_FN T quad_##NAME(T v, ushort k) {                                    \
    const unsigned j = warp::lane() & 3, d = k, w = 3;                                       \
    (void)j, (void)w;                                                                        \
    return warp::move<4>(v, EXPR);                                                           \
  }
FR_MOVE(broadcast, d)
FR_MOVE(shuffle, d)
FR_MOVE(shuffle_up, j - d)
FR_MOVE(shuffle_down, j + d)
FR_MOVE(shuffle_xor, j ^ d)
FR_MOVE(shuffle_rotate_up, (j - d) & w)
FR_MOVE(shuffle_rotate_down, (j + d) & w)
#undef FR_MOVE

#define FR_FILL(PREFIX, WIDTH)                                                                     \
  template <class T, class F>                                                                      \
  FR_FN T PREFIX##_shuffle_and_fill_up(T v, F filling, ushort k, ushort modulo = WIDTH) {          \
    const unsigned j = warp::lane() & (WIDTH - 1), m = modulo, first = j / m * m, i = j - first;   \
    const unsigned from = first + (i >= k ? i - k : (i + m - k % m) % m);                          \
    const T a = warp::move<WIDTH>(v, from), b = warp::move<WIDTH>(T(filling), from);               \
    return i >= k ? a : b;                                                                         \
  }                                                                                                \
  template <class T, class F>                                                                      \
  FR_FN T PREFIX##_shuffle_and_fill_down(T v, F filling, ushort k, ushort modulo = WIDTH) {        \
    const unsigned j = warp::lane() & (WIDTH - 1), m = modulo, first = j / m * m, i = j - first;   \
    const unsigned from = first + (i + k) % m;                                                     \
    const T a = warp::move<WIDTH>(v, from), b = warp::move<WIDTH>(T(filling), from);               \
    return i + k < m ? a : b;                                                                      \
  }                                                                                                \
  template <class T> FR_FN T PREFIX##_broadcast_first(T v) {                                       \
    const unsigned p = warp::part<WIDTH>(__activemask());                                          \
    return warp::move<WIDTH>(v, unsigned(__ffs(int(p)) - 1));                                      \
  }                                                                                                \
  FR_FN simd_vote PREFIX##_ballot(bool v) {                                                        \
    return simd_vote(warp::part<WIDTH>(__ballot_sync(__activemask(), v)));                         \
  }                                                                                                \
  FR_FN simd_vote PREFIX##_active_threads_mask() {                                                 \
    return simd_vote(warp::part<WIDTH>(__activemask()));                                           \
  }                                                                                                \
  FR_FN bool PREFIX##_any(bool v) { return simd_vote::vote_t(PREFIX##_ballot(v)) != 0; }           \
  FR_FN bool PREFIX##_all(bool v) { return simd_vote::vote_t(PREFIX##_ballot(!v)) == 0; }          \
  FR_FN bool PREFIX##_is_first() {                                                                 \
    return (warp::part<WIDTH>(__activemask()) & ((1u << (warp::lane() & (WIDTH - 1))) - 1)) == 0;  \
  }
FR_FILL(simd, 32)
FR_FILL(quad, 4)
#undef FR_FILL

FR_FN void threadgroup_barrier(mem_flags, int = 0) { __syncthreads(); }
FR_FN void simdgroup_barrier(mem_flags, int = 0) { __syncwarp(__activemask()); }
FR_FN void quadgroup_barrier(mem_flags, int = 0) { __syncwarp(__activemask()); }

template <class T, class Q, class S = int>
FR_FN void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const Q* p, S stride = 8,
                          ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_load(warp::lane(), m, p, stride, origin, transpose);
}
template <class T, class Q, class S = int>
FR_FN void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, Q* p, S stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_store(warp::lane(), m, p, stride, origin, transpose);
}

// Each lane sums its own two elements, in float, and rounds once.
template <class T, class A, class B, class C>
FR_FN void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  const unsigned row = lanes::matrix_row(warp::lane()), column = lanes::matrix_column(warp::lane());
  float x = float(c.elements.x), y = float(c.elements.y);
#pragma unroll
  for (unsigned k = 0; k < 8; ++k) {
    const vec<A, 2> left = warp::read(0xffffffffu, a.elements, lanes::matrix_lane(row, k));
    const vec<B, 2> right = warp::read(0xffffffffu, b.elements, lanes::matrix_lane(k, column));
    const float l = k & 1 ? float(left.y) : float(left.x);
    x += l * float(right.x);
    y += l * float(right.y);
  }
  d.elements = vec<T, 2>(T(x), T(y));
}
template <class T, class A, class B>
FR_FN void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                              const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)));
}

}  // namespace metal
}  // namespace fr
