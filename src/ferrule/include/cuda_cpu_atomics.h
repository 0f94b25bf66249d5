// CUDA's atomic functions on the CPU. Their order is relaxed, but that of atomicCAS, by which locks
// are taken.
#pragma once

namespace fr {
namespace on_cpu {


// old = *p; *p = F(old, v); returns old.
template <class F, class T> inline T atomic_update(T* p, T v) {
  touched_memory();
  using bits = typename metal::int_of_size<sizeof(T), false>::type;
  using alias __attribute__((may_alias)) = bits;
  alias* const at = reinterpret_cast<alias*>(p);
  bits old = __atomic_load_n(at, __ATOMIC_RELAXED);
  for (;;) {
    const T before = __builtin_bit_cast(T, old);
    const bits next = __builtin_bit_cast(bits, T(F()(before, v)));
    constexpr int order = __ATOMIC_RELAXED;
    if (__atomic_compare_exchange_n(at, &old, next, false, order, order)) return before;
  }
}
struct second {
  template <class T> T operator()(const T&, const T& b) const { return b; }
};
struct minus {
  template <class T> T operator()(const T& a, const T& b) const { return T(a - b); }
};
struct up_to {  // atomicInc
  unsigned operator()(unsigned a, unsigned b) const { return a >= b ? 0 : a + 1; }
};
struct down_from {  // atomicDec
  unsigned operator()(unsigned a, unsigned b) const { return a == 0 || a > b ? b : a - 1; }
};
template <class T> inline T compare_and_swap(T* p, T expected, T desired) {
  touched_memory();
  using bits = typename metal::int_of_size<sizeof(T), false>::type;
  using alias __attribute__((may_alias)) = bits;
  bits old = __builtin_bit_cast(bits, expected);
  __atomic_compare_exchange_n(reinterpret_cast<alias*>(p), &old, __builtin_bit_cast(bits, desired),
                              false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return __builtin_bit_cast(T, old);
}
}  // namespace on_cpu
}  // namespace fr

#define FR_ATOMIC(NAME, T, OP)                                                                  \
  inline T NAME(T* p, T v) { return fr::on_cpu::atomic_update<fr::on_cpu::OP>(p, v); }          \
  inline T NAME##_block(T* p, T v) { return NAME(p, v); }                                       \
  inline T NAME##_system(T* p, T v) { return NAME(p, v); }
#define FR_WORDS(NAME, OP)                                                                      \
  FR_ATOMIC(NAME, int, OP) FR_ATOMIC(NAME, unsigned, OP) FR_ATOMIC(NAME, unsigned long long, OP) \
  FR_ATOMIC(NAME, unsigned long, OP)
FR_WORDS(atomicAdd, plus) FR_ATOMIC(atomicAdd, float, plus) FR_ATOMIC(atomicAdd, double, plus)
FR_ATOMIC(atomicAdd, __half, plus) FR_ATOMIC(atomicAdd, __half2, plus)
FR_ATOMIC(atomicAdd, __nv_bfloat16, plus) FR_ATOMIC(atomicAdd, __nv_bfloat162, plus)
FR_ATOMIC(atomicSub, int, minus) FR_ATOMIC(atomicSub, unsigned, minus)
FR_WORDS(atomicExch, second) FR_ATOMIC(atomicExch, float, second)
FR_WORDS(atomicMin, less) FR_ATOMIC(atomicMin, long long, less)
FR_WORDS(atomicMax, greater) FR_ATOMIC(atomicMax, long long, greater)
FR_WORDS(atomicAnd, bit_and) FR_WORDS(atomicOr, bit_or) FR_WORDS(atomicXor, bit_xor)
FR_ATOMIC(atomicInc, unsigned, up_to) FR_ATOMIC(atomicDec, unsigned, down_from)
#undef FR_WORDS
#undef FR_ATOMIC

// Vectors: each element for itself, as on a GPU.
inline float2 atomicAdd(float2* p, float2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }
inline float4 atomicAdd(float4* p, float4 v) {
  return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y), atomicAdd(&p->z, v.z), atomicAdd(&p->w, v.w)};
}

#define FR_SWAP(T)                                                                              \
  inline T atomicCAS(T* p, T expected, T desired) {                                             \
    return fr::on_cpu::compare_and_swap(p, expected, desired);                                  \
  }                                                                                             \
  inline T atomicCAS_block(T* p, T a, T b) { return atomicCAS(p, a, b); }                       \
  inline T atomicCAS_system(T* p, T a, T b) { return atomicCAS(p, a, b); }
FR_SWAP(int) FR_SWAP(unsigned) FR_SWAP(unsigned long) FR_SWAP(unsigned long long)
FR_SWAP(unsigned short)
#undef FR_SWAP
