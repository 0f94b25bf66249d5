// Instructions of PTX on the CPU, as source/cuda/cpu_ptx.py calls them: what they write comes first.
#pragma once

// Shared memory has addresses of 32 bits.
#if defined(FR_CHECKED)  // each array of it is far from the others
FR_FN size_t __cvta_generic_to_shared(const volatile void* p) { return fr_watch_to_shared(p); }
FR_FN void* __cvta_shared_to_generic(size_t at) { return fr_watch_from_shared(unsigned(at)); }
#else  // how far from one place of it, modulo 2^32
FR_FN char* fr_shared_base() { return static_cast<char*>(fr::on_cpu::dynamic_shared(0, "", 1)); }
FR_FN size_t __cvta_generic_to_shared(const volatile void* p) {
  return unsigned(reinterpret_cast<const volatile char*>(p) - fr_shared_base()) + (1u << 30);
}
FR_FN void* __cvta_shared_to_generic(size_t at) {
  return fr_shared_base() + int(unsigned(at) - (1u << 30));
}
#endif
FR_FN size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }

namespace fr {
namespace ptx {

using pred = bool;
using u8 = unsigned char; using u16 = unsigned short; using u32 = unsigned; using u64 = unsigned long long;
using b8 = u8; using b16 = u16; using b32 = u32; using b64 = u64;
using s8 = signed char; using s16 = short; using s32 = int; using s64 = long long;
using f16 = __half; using bf16 = __nv_bfloat16; using f32 = float; using f64 = double;
using f16x2 = __half2; using bf16x2 = __nv_bfloat162;

// What an operand of another type holds: its bits, or its number where the sizes differ.
template <class T, class S> FR_FN T as(const S& s) {
  if constexpr (sizeof(T) == sizeof(S)) return __builtin_bit_cast(T, s);
  else if constexpr (__is_class(T) && sizeof(T) == 2) return __builtin_bit_cast(T, u16(s));
  else if constexpr (__is_class(T)) return __builtin_bit_cast(T, u32(s));
  else return T(s);
}
template <class D, class S> FR_FN void put(D&& to, const S& s) { to = as<metal::remove_cvref_t<D>>(s); }
template <class D> FR_FN void put(D&& to, const f16& s) { put(to, s.__x); }
template <class D> FR_FN void put(D&& to, const bf16& s) { put(to, s.__x); }
struct ignored {
  template <class T> void operator=(const T&) const {}
};
template <class S> FR_FN void put(ignored&&, const S&) {}

// ---- memory -------------------------------------------------------------------------------------
struct place { char* p; };
template <class A> FR_FN place shared_at(A a, int offset) {
  return {static_cast<char*>(__cvta_shared_to_generic(size_t(a))) + offset};
}
template <class A> FR_FN place global_at(A a, int offset) { return {(char*)(a) + offset}; }
template <class T> FR_FN T read(char* p) {
  return *reinterpret_cast<const T*>(p);
}
template <class T> FR_FN void write(char* p, T v) {
  *reinterpret_cast<T*>(p) = v;
}
template <class T, class A> FR_FN void load(A&& a, place from) { put(a, read<T>(from.p)); }
template <class T, class A, class B> FR_FN void load(A&& a, B&& b, place from) {
  put(a, read<T>(from.p)), put(b, read<T>(from.p + sizeof(T)));
}
template <class T, class A, class B, class C, class D> FR_FN void load(A&& a, B&& b, C&& c,
    D&& d, place from) {
  load<T>(a, b, from), load<T>(c, d, place{from.p + 2 * sizeof(T)});
}
template <class T> FR_FN void store(place) {}
template <class T, class A, class... R> FR_FN void store(place to, const A& a, const R&... rest) {
  write<T>(to.p, as<T>(a));
  store<T>(place{to.p + sizeof(T)}, rest...);
}
// A copy in the background is made at once. What is behind its size is zeros.
FR_FN void copy(place to, place from, int bytes, int size = 1 << 30) {
  const size_t all = size_t(bytes), n = size <= 0 ? 0 : size < bytes ? size_t(size) : all;
  fr_memcpy(to.p, from.p, n);
  fr_memset(to.p + n, 0, all - n);
}
template <class T> FR_FN void add_to(place) {}
template <class T, class A, class... R> FR_FN void add_to(place to, const A& a, const R&... rest) {
  using U = metal::conditional_t<metal::is_same_v<T, s64>, u64, T>;
  atomicAdd(reinterpret_cast<U*>(to.p), as<U>(a));
  add_to<T>(place{to.p + sizeof(T)}, rest...);
}
template <class T, class D, class A> FR_FN void add_to(D&& old, place to, const A& a) {
  using U = metal::conditional_t<metal::is_same_v<T, s64>, u64, T>;
  put(old, atomicAdd(reinterpret_cast<U*>(to.p), as<U>(a)));
}

// ---- barriers -----------------------------------------------------------------------------------
inline void fence() { __threadfence(); }
inline void sleep(unsigned) { on_cpu::yield(); }
inline void warp_barrier(unsigned mask, fr_here at = fr_here()) { __syncwarp(mask, at); }

// Barriers with a number, of so many threads; who waits for one that never opens goes on at last.
struct numbered { unsigned block, arrived, opened, time; };
static FR_PER_THREAD numbered barriers[16];
constexpr int PATIENCE = 1 << 14;
inline numbered& arrived_at(int id, int threads) {
  numbered& b = barriers[id & 15];
  if (b.block != on_cpu::block.number) b = numbered{on_cpu::block.number, 0, 0, 0};
  if (++b.arrived < unsigned(threads)) return b;
  b.arrived = 0, ++b.opened;
#if defined(FR_CHECKED)
  b.time = fr_watch_open_barrier();
#endif
  return b;
}
inline void arrive(int id, int threads) { arrived_at(id, threads); }
inline void barrier(int id, int threads, fr_here at = fr_here()) {
  const unsigned before = barriers[id & 15].block == on_cpu::block.number ? barriers[id & 15].opened : 0;
  numbered& b = arrived_at(id, threads);
  for (int i = 0; b.opened == before && i < PATIENCE; ++i) on_cpu::yield();
#if defined(FR_CHECKED)
  if (b.opened != before) fr_watch_passed_barrier(b.time);
#endif
  if (b.opened == before) on_cpu::wrong_lane(on_cpu::LANE_DOES_NOT_COME, on_cpu::lane_index(), ~0u, at);
}
inline void barrier(int id, fr_here at = fr_here()) {
  if (id == 0) __syncthreads(at);
  else barrier(id, int(fr_fibers->where->n), at);
}

// ---- arithmetic ---------------------------------------------------------------------------------
template <class T> inline constexpr bool pair_v = metal::is_same_v<T, f16x2> || metal::is_same_v<T, bf16x2>;
#define FR_OP(NAME, ...)                                                                        \
  struct op_##NAME {                                                                            \
    template <class T> FR_FN static T of(const T& a, const T& b) { return T(__VA_ARGS__); }     \
  };
FR_OP(add, a + b) FR_OP(sub, a - b) FR_OP(mul, a * b) FR_OP(mul_lo, a * b) FR_OP(div, a / b)
FR_OP(rem, a % b) FR_OP(and, a & b) FR_OP(or, a | b) FR_OP(xor, a ^ b)
FR_OP(shl, b < sizeof(T) * 8 ? a << b : 0)
FR_OP(shr, a >> (b < sizeof(T) * 8 ? b : sizeof(T) * 8 - 1) >> (T(-1) > T(0) && b >= sizeof(T) * 8 ? 1 : 0))
FR_OP(min, b < a || a != a ? b : a) FR_OP(max, a < b || a != a ? b : a)
#undef FR_OP
struct op_mul_hi {
  FR_FN static u32 of(u32 a, u32 b) { return __umulhi(a, b); }
  FR_FN static s32 of(s32 a, s32 b) { return __mulhi(a, b); }
  FR_FN static u64 of(u64 a, u64 b) { return __umul64hi(a, b); }
};
template <class T, class F, class D, class A, class B> FR_FN void binary(D&& d, const A& a, const B& b) {
  if constexpr (pair_v<T>) {
    const T x = as<T>(a), y = as<T>(b);
    put(d, T(F::of(x.x, y.x), F::of(x.y, y.y)));
  } else {
    put(d, F::of(as<T>(a), as<T>(b)));
  }
}
template <class T, class D, class A, class B> FR_FN void wide(D&& d, const A& a, const B& b) {
  using W = metal::conditional_t<(T(-1) < T(0)), s64, u64>;
  put(d, W(as<T>(a)) * W(as<T>(b)));
}
template <class T, class D, class A, class B, class C> FR_FN void mad(D&& d, const A& a,
    const B& b, const C& c) {
  put(d, T(as<T>(a) * as<T>(b) + as<T>(c)));
}
template <class T, class D, class A, class B, class C> FR_FN void fused(D&& d, const A& a,
    const B& b, const C& c) {
  const T x = as<T>(a), y = as<T>(b), z = as<T>(c);
  if constexpr (pair_v<T>) put(d, __hfma2(x, y, z));
  else if constexpr (__is_class(T)) put(d, __hfma(x, y, z));
  else put(d, T(metal::is_same_v<T, float> ? __builtin_fmaf(x, y, z) : __builtin_fma(x, y, z)));
}
template <class T, class D, class A> FR_FN void invert(D&& d, const A& a) {
  if constexpr (metal::is_same_v<T, bool>) d = !a;
  else put(d, T(~as<T>(a)));
}
template <class T, class D, class A> FR_FN void negate(D&& d, const A& a) { put(d, T(-as<T>(a))); }
template <class T, class D, class A> FR_FN void absolute(D&& d, const A& a) {
  const T x = as<T>(a);
  put(d, x < 0 ? T(-x) : x);
}
#define FR_OP(NAME, ...)                                                                        \
  struct op_##NAME {                                                                            \
    FR_FN static float of(float x) { return float(__VA_ARGS__); }                               \
  };
FR_OP(ex2, ::exp2f(x)) FR_OP(lg2, ::log2f(x)) FR_OP(rcp, 1 / x) FR_OP(sqrt, ::sqrtf(x))
FR_OP(rsqrt, 1 / ::sqrt(double(x))) FR_OP(tanh, ::tanhf(x)) FR_OP(sin, ::sinf(x)) FR_OP(cos, ::cosf(x))
#undef FR_OP
template <class F, class D, class A> FR_FN void function(D&& d, const A& a) { put(d, F::of(as<float>(a))); }

#define FR_OP(NAME, OP)                                                                         \
  struct op_##NAME {                                                                            \
    template <class T> FR_FN static bool of(const T& a, const T& b) { return a OP b; }          \
  };
FR_OP(eq, ==) FR_OP(ne, !=) FR_OP(lt, <) FR_OP(le, <=) FR_OP(gt, >) FR_OP(ge, >=)
#undef FR_OP
template <class T, class F, class A, class B> FR_FN void compare(bool& d, const A& a, const B& b) {
  d = F::of(as<T>(a), as<T>(b));
}
template <class D, class A, class B> FR_FN void select(D&& d, const A& a, const B& b, bool p) {
  if (p) put(d, a);
  else put(d, b);
}
template <class D, class A> FR_FN void move(D&& d, const A& a) { put(d, a); }
// Two halves of a word, and a word of two halves.
template <class D, class A, class B> FR_FN void move(D&& d, const A& a, const B& b) {
  if constexpr (sizeof(D) == 8) put(d, u64(as<u32>(a)) | u64(as<u32>(b)) << 32);
  else if constexpr (sizeof(A) == 4) {  // out of a word of 64 bits
    const u64 word = as<u64>(b);
    put(d, u32(word)), put(const_cast<A&>(a), u32(word >> 32));
  } else if constexpr (sizeof(D) == 4) put(d, u32(as<u16>(a)) | u32(as<u16>(b)) << 16);
  else put(d, u16(as<u32>(b))), put(const_cast<A&>(a), u16(as<u32>(b) >> 16));
}
template <class D> FR_FN void lookup(D&& d, u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (u32 i = 0; i < 8; ++i)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  put(d, r);
}
template <class D> FR_FN void permute(D&& d, u32 a, u32 b, u32 s) { put(d, __byte_perm(a, b, s)); }
template <class D> FR_FN void funnel_l_wrap(D&& d, u32 a, u32 b, u32 n) {
  put(d, __funnelshift_l(a, b, n));
}
template <class D> FR_FN void funnel_r_wrap(D&& d, u32 a, u32 b, u32 n) {
  put(d, __funnelshift_r(a, b, n));
}
template <class D> FR_FN void funnel_l_clamp(D&& d, u32 a, u32 b, u32 n) {
  put(d, __funnelshift_lc(a, b, n));
}
template <class D> FR_FN void funnel_r_clamp(D&& d, u32 a, u32 b, u32 n) {
  put(d, __funnelshift_rc(a, b, n));
}
template <class D> FR_FN void popc(D&& d, u32 a) { put(d, u32(__popc(a))); }
template <class D> FR_FN void clz(D&& d, u32 a) { put(d, u32(__clz(int(a)))); }
template <class D> FR_FN void brev(D&& d, u32 a) { put(d, __brev(a)); }
template <class D> FR_FN void field(D&& d, u32 a, u32 at, u32 n) {
  put(d, at > 31 ? 0u : n > 31 ? a >> at : (a >> at) & ((1u << n) - 1));
}
template <class T, class D> FR_FN void pack(D&& d, float high, float low) { put(d, T(low, high)); }
template <class T, class S, class D, class A> FR_FN void convert(D&& d, const A& a) {
  put(d, T(float(as<S>(a))));
}

// ---- warps --------------------------------------------------------------------------------------
// The fourth operand of a shuffle has the ends of parts: 31 and a mask above it.
FR_FN int width_of(u32 c) { return int(32 - (c >> 8 & 31)); }
#define FR_SHUFFLE(NAME, FROM)                                                                  \
  template <class D, class A> FR_FN void shuffle_##NAME(D&& d, const A& a, u32 b, u32 c,        \
      u32 mask, fr_here at = fr_here()) {                                                       \
    put(d, on_cpu::shuffle(mask, as<u32>(a), on_cpu::FROM(b, width_of(c)), at));                \
  }                                                                                             \
  template <class D, class A> FR_FN void shuffle_##NAME(D&& d, bool& inside, const A& a, u32 b, \
      u32 c, u32 mask, fr_here at = fr_here()) {                                                \
    const int from = on_cpu::FROM(b, width_of(c));                                              \
    inside = from >= 0;                                                                         \
    put(d, on_cpu::shuffle(mask, as<u32>(a), from, at));                                        \
  }
FR_SHUFFLE(idx, from_index) FR_SHUFFLE(up, from_up) FR_SHUFFLE(down, from_down) FR_SHUFFLE(bfly, from_xor)
#undef FR_SHUFFLE
template <class D> FR_FN void vote_ballot_b32(D&& d, bool v, u32 mask, fr_here at = fr_here()) {
  put(d, on_cpu::ballot(mask, v, at));
}
FR_FN void vote_any_pred(bool& d, bool v, u32 mask, fr_here at = fr_here()) {
  d = on_cpu::ballot(mask, v, at) != 0;
}
FR_FN void vote_all_pred(bool& d, bool v, u32 mask, fr_here at = fr_here()) {
  d = on_cpu::ballot(mask, !v, at) == 0;
}
template <class D> FR_FN void activemask(D&& d, fr_here at = fr_here()) { put(d, __activemask(at)); }
template <class F> struct reducer {
  template <class T> T operator()(const T& a, const T& b) const { return F::of(a, b); }
};
template <class T, class F, class D, class A> FR_FN void redux(D&& d, const A& a, u32 mask,
    fr_here at = fr_here()) {
  put(d, on_cpu::together<on_cpu::op_reduce<reducer<F>>>(mask, as<T>(a), at));
}

// ---- tensor cores -------------------------------------------------------------------------------
// Row r of matrix m is where lane 8 m + r says; each lane has two neighbours of row lane / 4.
struct rows { char* at; u32 words[4]; };
template <int COUNT, bool TRANSPOSED> struct op_matrices {
  FR_QUIET static void of(rows* v, unsigned mask, on_cpu::here) {
    for (int m = 0; m < COUNT; ++m) {
      u16 matrix[8][8];
      for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; ++c)
          matrix[r][c] = mask >> (8 * m + r) & 1 ? read<u16>(v[8 * m + r].at + 2 * c) : u16(0);
      for (int l = 0; l < 32; ++l) {
        const int r = l / 4, c = l % 4 * 2;
        v[l].words[m] = TRANSPOSED ? matrix[c][r] | u32(matrix[c + 1][r]) << 16 : matrix[r][c] | u32(matrix[r][c + 1]) << 16;
      }
    }
  }
};
template <bool T, class... D> FR_FN void load_matrices(place from, fr_here at, D&... d) {
#if defined(FR_CHECKED)  // the scheduler reads for the lanes
  if (on_cpu::lane_index() < 8 * sizeof...(D)) fr_watch_range(from.p, 16, 0);
#endif
  const rows r = on_cpu::together<op_matrices<sizeof...(D), T>>(on_cpu::EVERY, rows{from.p, {}}, at);
  int i = 0;
  (put(d, r.words[i++]), ...);
}
#define FR_MATRICES(NAME, T)                                                                    \
  template <class A> FR_FN void NAME(A& a, place p, fr_here at = fr_here()) { load_matrices<T>(p, at, a); } \
  template <class A, class B> FR_FN void NAME(A& a, B& b, place p, fr_here at = fr_here()) {    \
    load_matrices<T>(p, at, a, b);                                                              \
  }                                                                                             \
  template <class A, class B, class C, class D> FR_FN void NAME(A& a, B& b, C& c, D& d, place p,\
      fr_here at = fr_here()) {                                                                 \
    load_matrices<T>(p, at, a, b, c, d);                                                        \
  }
FR_MATRICES(matrices, false) FR_MATRICES(matrices_trans, true)
#undef FR_MATRICES
struct op_transpose {
  static void of(u32* v, unsigned, on_cpu::here) {
    u16 m[8][8];
    for (int l = 0; l < 32; ++l) m[l / 4][l % 4 * 2] = u16(v[l]), m[l / 4][l % 4 * 2 + 1] = u16(v[l] >> 16);
    for (int l = 0; l < 32; ++l) v[l] = m[l % 4 * 2][l / 4] | u32(m[l % 4 * 2 + 1][l / 4]) << 16;
  }
};
template <class D, class A> FR_FN void transpose(D&& d, const A& a, fr_here at = fr_here()) {
  put(d, on_cpu::together<op_transpose>(on_cpu::EVERY, as<u32>(a), at));
}

// d = a b + c for a of 16 x K and b of K x 8. Sums are exact in double, and rounded once.
template <int WORDS> struct fragments { u32 a[WORDS], b[WORDS / 2]; float c[4]; };
FR_FN double element(u32 word, int i, f16) { return float(f16::of(u16(word >> 16 * i))); }
FR_FN double element(u32 word, int i, bf16) { return float(bf16::of(u16(word >> 16 * i))); }
// Of tf32 a GPU reads 10 bits of the mantissa.
FR_FN double element(u32 word, int, f32) { return __builtin_bit_cast(float, word & 0xffffe000u); }
template <class T, int WORDS> struct op_mma {
  static void of(fragments<WORDS>* v, unsigned, on_cpu::here) {
    constexpr int each = sizeof(T) == 2 ? 2 : 1, K = WORDS / 2 * 4 * each;
    double a[16][K], b[K][8];
    for (int l = 0; l < 32; ++l)
      for (int w = 0; w < WORDS; ++w)
        for (int i = 0; i < each; ++i) {
          const int k = (w / 2 * 4 + l % 4) * each + i;
          a[l / 4 + w % 2 * 8][k] = element(v[l].a[w], i, T());
          if (w < WORDS / 2) b[(w * 4 + l % 4) * each + i][l / 4] = element(v[l].b[w], i, T());
        }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = v[l].c[i];
        for (int k = 0; k < K; ++k) sum += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
        v[l].c[i] = float(sum);
      }
  }
};
template <class T, int WORDS> FR_FN void multiply(float& d0, float& d1, float& d2, float& d3,
    fragments<WORDS> f, fr_here at) {
  f = on_cpu::together<op_mma<T, WORDS>>(on_cpu::EVERY, f, at);
  d0 = f.c[0], d1 = f.c[1], d2 = f.c[2], d3 = f.c[3];
}
#define FR_MMA(NAME, T)                                                                         \
  template <class A, class B> FR_FN void NAME(float& d0, float& d1, float& d2, float& d3,       \
      const A& a0, const A& a1,                                                                 \
      const A& a2, const A& a3, const B& b0, const B& b1, float c0, float c1, float c2, float c3,\
          fr_here at = fr_here()) {                                                             \
    const fragments<4> f{{as<u32>(a0), as<u32>(a1), as<u32>(a2), as<u32>(a3)}, {as<u32>(b0),    \
        as<u32>(b1)}, {c0, c1, c2, c3}};                                                        \
    multiply<T, 4>(d0, d1, d2, d3, f, at);                                                      \
  }
#define FR_SMALL_MMA(NAME, T)                                                                   \
  template <class A, class B> FR_FN void NAME(float& d0, float& d1, float& d2, float& d3,       \
      const A& a0, const A& a1,                                                                 \
      const B& b, float c0, float c1, float c2, float c3, fr_here at = fr_here()) {             \
    multiply<T, 2>(d0, d1, d2, d3, fragments<2>{{as<u32>(a0), as<u32>(a1)}, {as<u32>(b)}, {c0,  \
        c1, c2, c3}}, at);                                                                      \
  }
FR_MMA(mma_f16_16, f16) FR_MMA(mma_bf16_16, bf16) FR_MMA(mma_tf32_8, f32)
FR_SMALL_MMA(mma_f16_8, f16) FR_SMALL_MMA(mma_bf16_8, bf16) FR_SMALL_MMA(mma_tf32_4, f32)
#undef FR_MMA
#undef FR_SMALL_MMA

}  // namespace ptx
}  // namespace fr
