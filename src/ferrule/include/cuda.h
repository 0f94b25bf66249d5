// The operations of a warp, which is a simdgroup, and its matrices.
#pragma once
#include "operations.h"

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

// A set of lanes. All of them, and no others, come to what is handed the set, and the hardware waits
// until they have: `source/cuda/masks.py` writes into a body which lanes those are.
struct mask {
  unsigned bits;
  FR_FN bool whole() const { return bits == 0xffffffffu; }
  FR_FN bool has(unsigned lane) const { return (bits >> lane) & 1u; }
};

// For overloads that could take a set for a value.
template <class T> using unless_mask = metal::enable_if_t<!metal::is_same_v<T, mask>>;

// The lanes that happen to be together: for what is handed no set.
FR_FN mask here() { return mask{__activemask()}; }
// Brings the lanes of a set together before what will ask.
FR_FN void meet(mask m) { __syncwarp(m.bits); }

// The lanes of the simdgroup of thread `i` that a threadgroup has.
FR_FN mask all(const group& g, unsigned i) {
#if defined(FR_FULL)
  (void)g, (void)i;
  return mask{0xffffffffu};
#else
  const unsigned left = g.threads() - (i & ~31u);
  return mask{left >= 32 ? 0xffffffffu : (1u << left) - 1};
#endif
}

// Where lanes of a set go two ways: which way this one goes, and who goes either way.
struct branch {
  mask yes, no;
  bool taken;
  branch() = default;
  FR_FN branch(mask m, bool condition) : taken(condition) {
    yes.bits = __ballot_sync(m.bits, condition);
    no.bits = m.bits & ~yes.bits;
  }
};

// Before a round of a loop: whether this lane stays in it. Those that do have the set of them.
FR_FN bool stays(mask& m, bool condition) {
  m.bits = __ballot_sync(m.bits, condition);
  return condition;
}

// A move of words of 32 bits, for a value of any size.
template <class T, class F> FR_FN T by_words(const T& v, F move) {
  constexpr unsigned words = (sizeof(T) + 3) / 4;
  unsigned w[words] = {};
  memcpy(w, &v, sizeof(T));
#pragma unroll
  for (unsigned i = 0; i < words; ++i) w[i] = move(w[i]);
  T r;
  memcpy(&r, w, sizeof(T));
  return r;
}
template <class T> FR_FN T read(unsigned bits, const T& v, unsigned from) {
  return by_words(v, [=](unsigned w) { return __shfl_sync(bits, w, int(from)); });
}

// Integers of up to 32 bits: one instruction, whose result does not depend on any order.
template <class T> constexpr bool is_word =
    metal::is_integral_v<T> && !metal::is_same_v<T, bool> && sizeof(T) <= 4;
template <class T> struct word { using type = unsigned; };
template <> struct word<int> { using type = int; };
template <> struct word<short> { using type = int; };
template <> struct word<signed char> { using type = int; };
template <> struct word<char> { using type = int; };
// Two subtrees' values. Complex products, where one may be fused, ask which of them comes first.
template <class OP, class T> FR_FN T joined(const T& own, const T& other, bool second) {
  if constexpr (metal::is_complex_v<T>) return second ? OP::of(other, own) : OP::of(own, other);
  return OP::of(own, other);
}

// The ascending butterfly. Where lanes are missing, a subtree's value is read from any lane that is
// in it, and an empty subtree adds nothing.
template <class OP, unsigned W, class T> FR_FN T reduce(mask m, T value) {
  if constexpr (W == 32 && OP::together && is_word<T>) {
    return T(OP::of_all(m.bits, typename word<T>::type(value)));
  } else {
    using A = typename wide<T, W>::type;
    A v = A(value);
    if (m.whole()) {
#pragma unroll
      for (unsigned d = 1; d < W; d *= 2) {
        const A other = by_words(v, [=](unsigned w) { return __shfl_xor_sync(0xffffffffu, w, int(d)); });
        v = joined<OP>(v, other, metal::is_complex_v<A> && (lane() & d));
      }
      return T(v);
    }
    const unsigned l = lane();
#pragma unroll 1  // rare, and five times as long
    for (unsigned d = 1; d < W; d *= 2) {
      const unsigned base = (l ^ d) & ~(d - 1), part = m.bits & (((1u << d) - 1) << base);
      const A other = read(m.bits, v, part ? unsigned(__ffs(int(part)) - 1) : l);
      if (part) v = joined<OP>(v, other, l & d);
    }
    return T(v);
  }
}

// Prefix sums in log steps, as on the CPU; a missing lane counts as the identity.
template <class OP, bool EXCLUSIVE, unsigned W, class T> FR_FN T scan(mask m, T value) {
  using A = typename wide<T>::type;
  const unsigned l = lane(), j = l & (W - 1), base = l & ~(W - 1);
  if (m.whole()) {
    A v = A(value);
#pragma unroll
    for (unsigned d = 1; d < W; d *= 2) {
      const A other = by_words(v, [=](unsigned w) { return __shfl_up_sync(0xffffffffu, w, d, W); });
      if (j >= d) v = A(OP::of(other, v));
    }
    if (!EXCLUSIVE) return T(v);
    const A before = by_words(v, [=](unsigned w) { return __shfl_up_sync(0xffffffffu, w, 1u, W); });
    return j ? T(before) : T(OP::identity);
  }
  A t[W];
#pragma unroll 1  // rare; and ptxas 13.5 fails on 32 of them in a row
  for (unsigned i = 0; i < W; ++i) {
    const bool there = m.has(base + i);
    const A other = read(m.bits, A(value), there ? base + i : l);
    t[i] = there ? other : A(OP::identity);
  }
#pragma unroll 1
  for (unsigned d = 1; d < W; d *= 2)
#pragma unroll 1
    for (unsigned i = W - 1; i >= d; --i) t[i] = A(OP::of(t[i - d], t[i]));
  if (EXCLUSIVE) return j ? T(t[j - 1]) : T(OP::identity);
  return T(t[j]);
}

// A source that is out of range or takes no part gives the lane's own value.
template <unsigned W, class T> FR_FN T move(mask m, const T& v, unsigned from) {
  const unsigned l = lane(), s = (l & ~(W - 1)) + (from & (W - 1));
  return read(m.bits, v, from < W && m.has(s) ? s : l);
}

template <unsigned W> FR_FN unsigned part(unsigned bits) {
  return W == 32 ? bits : (bits >> (lane() & ~(W - 1))) & ((1u << (W & 31)) - 1);
}

template <unsigned W, class T> FR_FN T broadcast_first(mask m, const T& v) {
  return move<W>(m, v, unsigned(__ffs(int(part<W>(m.bits))) - 1));
}

}  // namespace warp

namespace metal {

// Each operation twice: for the set of lanes that it is handed first, and for those that are together.
#define FR_OPERATION(PREFIX, NAME, ...)                                                              \
  template <class T> FR_FN T PREFIX##_##NAME(warp::mask m, T v) { return warp::__VA_ARGS__(m, v); }  \
  template <class T> FR_FN T PREFIX##_##NAME(T v) { return PREFIX##_##NAME(warp::here(), v); }
FR_OPERATIONS(simd, 32) FR_OPERATIONS(quad, 4)
#undef FR_OPERATION

// Among 32 lanes the hardware finds the source, and gives the own value where there is none.
#define FR_MOVE_OF(PREFIX, WIDTH, NAME, SOURCE, HARDWARE)                                            \
  template <class T> FR_FN T PREFIX##_##NAME(warp::mask m, T v, ushort k) {                          \
    const unsigned d = k, w = WIDTH - 1, j = warp::lane() & w;                                       \
    (void)w, (void)j;                                                                                \
    if (!m.whole()) return warp::move<WIDTH>(m, v, SOURCE);                                          \
    const T r = warp::by_words(v, [=](unsigned x) { return HARDWARE; });                             \
    return d < WIDTH ? r : v;                                                                        \
  }                                                                                                  \
  template <class T> FR_FN T PREFIX##_##NAME(T v, ushort k) { return PREFIX##_##NAME(warp::here(), v, k); }
#define FR_MOVE(NAME, SOURCE, HARDWARE)           \
  FR_MOVE_OF(simd, 32, NAME, SOURCE, HARDWARE)    \
  FR_MOVE_OF(quad, 4, NAME, SOURCE, HARDWARE)
FR_MOVE(broadcast, d, __shfl_sync(0xffffffffu, x, int(d & w), int(w + 1)))
FR_MOVE(shuffle, d, __shfl_sync(0xffffffffu, x, int(d & w), int(w + 1)))
FR_MOVE(shuffle_up, j - d, __shfl_up_sync(0xffffffffu, x, d & w, int(w + 1)))
FR_MOVE(shuffle_down, j + d, __shfl_down_sync(0xffffffffu, x, d & w, int(w + 1)))
FR_MOVE(shuffle_xor, j ^ d, __shfl_xor_sync(0xffffffffu, x, int(d & w), int(w + 1)))
#undef FR_MOVE
#undef FR_MOVE_OF

#define FR_ROTATION(NAME, SIGN)                                                                      \
  template <class T> FR_FN T simd_##NAME(warp::mask m, T v, ushort k) {                              \
    return warp::move<32>(m, v, (warp::lane() SIGN k) & 31);                                         \
  }                                                                                                  \
  template <class T> FR_FN T quad_##NAME(warp::mask m, T v, ushort k) {                              \
    return warp::move<4>(m, v, (warp::lane() SIGN k) & 3);                                           \
  }                                                                                                  \
  template <class T> FR_FN T simd_##NAME(T v, ushort k) { return simd_##NAME(warp::here(), v, k); }  \
  template <class T> FR_FN T quad_##NAME(T v, ushort k) { return quad_##NAME(warp::here(), v, k); }
FR_ROTATION(shuffle_rotate_up, -)
FR_ROTATION(shuffle_rotate_down, +)
#undef FR_ROTATION

#define FR_FILL(PREFIX, LANES, NAME, SOURCE, INSIDE)                                                 \
  template <class T, class F>                                                                        \
  FR_FN T PREFIX##_##NAME(warp::mask g, T v, F filling, ushort k, ushort modulo = LANES) {           \
    const unsigned i = warp::lane() & (LANES - 1), m = modulo, part = i / m * m, j = i - part, d = k; \
    const unsigned from = part + (SOURCE);                                                           \
    const T a = warp::move<LANES>(g, v, from), b = warp::move<LANES>(g, T(filling), from);           \
    const bool there = g.whole() || (from < LANES && g.has((warp::lane() & ~(LANES - 1)) + from));   \
    return !there ? v : (INSIDE) ? a : b;                                                            \
  }                                                                                                  \
  template <class T, class F, class = warp::unless_mask<T>>                                          \
  FR_FN T PREFIX##_##NAME(T v, F filling, ushort k, ushort modulo = LANES) {                         \
    return PREFIX##_##NAME(warp::here(), v, filling, k, modulo);                                     \
  }
FR_FILLS(FR_FILL, simd, 32) FR_FILLS(FR_FILL, quad, 4)
#undef FR_FILL

#define FR_VOTES(PREFIX, WIDTH)                                                                      \
  FR_FN simd_vote PREFIX##_ballot(warp::mask m, bool v) {                                            \
    return simd_vote(warp::part<WIDTH>(__ballot_sync(m.bits, v)));                                   \
  }                                                                                                  \
  FR_FN simd_vote PREFIX##_active_threads_mask(warp::mask m) {                                       \
    return simd_vote(warp::part<WIDTH>(m.bits));                                                     \
  }                                                                                                  \
  FR_FN bool PREFIX##_any(warp::mask m, bool v) {                                                    \
    return simd_vote::vote_t(PREFIX##_ballot(m, v)) != 0;                                            \
  }                                                                                                  \
  FR_FN bool PREFIX##_all(warp::mask m, bool v) {                                                    \
    return simd_vote::vote_t(PREFIX##_ballot(m, !v)) == 0;                                           \
  }                                                                                                  \
  FR_FN bool PREFIX##_is_first(warp::mask m) {                                                       \
    return (warp::part<WIDTH>(m.bits) & ((1u << (warp::lane() & (WIDTH - 1))) - 1)) == 0;            \
  }                                                                                                  \
  FR_FN simd_vote PREFIX##_ballot(bool v) { return PREFIX##_ballot(warp::here(), v); }               \
  FR_FN simd_vote PREFIX##_active_threads_mask() { return PREFIX##_active_threads_mask(warp::here()); } \
  FR_FN bool PREFIX##_any(bool v) { return PREFIX##_any(warp::here(), v); }                          \
  FR_FN bool PREFIX##_all(bool v) { return PREFIX##_all(warp::here(), v); }                          \
  FR_FN bool PREFIX##_is_first() { return PREFIX##_is_first(warp::here()); }
FR_VOTES(simd, 32) FR_VOTES(quad, 4)
#undef FR_VOTES

FR_FN void threadgroup_barrier(mem_flags, int = 0) { __syncthreads(); }
FR_FN void simdgroup_barrier(warp::mask m, mem_flags, int = 0) { __syncwarp(m.bits); }
FR_FN void quadgroup_barrier(warp::mask m, mem_flags, int = 0) { __syncwarp(m.bits); }
FR_FN void simdgroup_barrier(mem_flags f, int = 0) { simdgroup_barrier(warp::here(), f); }
FR_FN void quadgroup_barrier(mem_flags f, int = 0) { quadgroup_barrier(warp::here(), f); }

template <class T, class Q, class S = int>
FR_FN void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const Q* p, S stride = 8,
                          ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_load(warp::lane(), m, p, stride, origin, transpose);
}
template <class T, class Q, class S = int>
FR_FN void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, Q* p, S stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transpose = false) {
  __syncwarp();  // what lanes read before, they have read; what they read next is there
  lanes::matrix_store(warp::lane(), m, p, stride, origin, transpose);
  __syncwarp();
}

}  // namespace metal

namespace tile {

// Whether tensor cores multiply matrices of these types without losing bits of their elements.
template <class A, class B>
constexpr bool possible =
#if __CUDA_ARCH__ >= 800
    metal::is_same_v<A, B> && (metal::is_same_v<A, half> || metal::is_same_v<A, bfloat>);
#else
    false;
#endif

// What tensor cores call a fragment of 8x8: lane l holds two neighbours of row l / 4, from column
// 2 * (l % 4). Matrices whose elements the author sees lie as Apple's do, and are moved.
template <class T> FR_FN metal::vec<T, 2> fragment(const metal::vec<T, 2>& v) {
#if defined(FR_TILES)
  return v;
#else
  const unsigned l = warp::lane();
  return warp::read(0xffffffffu, v, lanes::matrix_lane(l / 4, l % 4 * 2));
#endif
}
template <class T> FR_FN metal::vec<T, 2> elements(const metal::vec<T, 2>& v) {
#if defined(FR_TILES)
  return v;
#else
  const unsigned l = warp::lane();
  return warp::read(0xffffffffu, v, lanes::matrix_row(l) * 4 + lanes::matrix_column(l) / 2);
#endif
}
template <class T> FR_FN unsigned word(const metal::vec<T, 2>& v) {
  unsigned w;
  memcpy(&w, &v, sizeof w);
  return w;
}
// The transposed matrix: the right operand is handed over by columns.
FR_FN unsigned transposed(unsigned w) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(w));
  return r;
}
// x, y += a * b. The instruction multiplies 16 rows; the lower 8 are zeros.
template <class T> FR_FN void product(float& x, float& y, unsigned a, unsigned b) {
  float p, q;
  if constexpr (metal::is_same_v<T, half>) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%9};"
                 : "=f"(x), "=f"(y), "=f"(p), "=f"(q) : "r"(a), "r"(0u), "r"(b), "f"(x), "f"(y), "f"(0.0f));
  } else {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%9};"
                 : "=f"(x), "=f"(y), "=f"(p), "=f"(q) : "r"(a), "r"(0u), "r"(b), "f"(x), "f"(y), "f"(0.0f));
  }
}

// d = a * b + (x, y), in float; rounded once. (x, y) are this lane's elements, or this fragment's.
template <class T, class A, class B, class C>
FR_FN void multiply(metal::vec<T, 2>& d, const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                    const metal::vec<C, 2>* c) {
  float x = 0, y = 0;
  if constexpr (possible<A, B>) {
    if (c) {
      const metal::vec<C, 2> own = fragment(*c);
      x = float(own.x), y = float(own.y);
    }
    product<A>(x, y, word(fragment(a)), transposed(word(fragment(b))));
    d = elements(metal::vec<T, 2>(T(x), T(y)));
  } else {  // each lane sums its own two elements
    const unsigned row = lanes::matrix_row(warp::lane()), column = lanes::matrix_column(warp::lane());
    if (c) x = float(c->x), y = float(c->y);
#pragma unroll
    for (unsigned k = 0; k < 8; ++k) {
      const metal::vec<A, 2> left = warp::read(0xffffffffu, a, lanes::matrix_lane(row, k));
      const metal::vec<B, 2> right = warp::read(0xffffffffu, b, lanes::matrix_lane(k, column));
      const float l = k & 1 ? float(left.y) : float(left.x);
      x = detail::mad(l, float(right.x), x);
      y = detail::mad(l, float(right.y), y);
    }
    d = metal::vec<T, 2>(T(x), T(y));
  }
}

}  // namespace tile

namespace metal {

template <class T, class A, class B, class C>
FR_FN void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  tile::multiply(d.elements, a.elements, b.elements, &c.elements);
}
template <class T, class A, class B>
FR_FN void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                              const simdgroup_matrix<B, 8, 8>& b) {
  const vec<T, 2>* const nothing = nullptr;
  tile::multiply(d.elements, a.elements, b.elements, nothing);
}

}  // namespace metal
}  // namespace fr
