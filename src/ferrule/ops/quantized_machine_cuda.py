"""CUDA of what the hardware does for products of packed matrices: copies, barriers, products."""

from __future__ import annotations

# Each in one instruction or a few.
MACHINE = """
template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
struct __nv_bfloat16;  // whose header is there where T is
constexpr bool BF16 = is_same<T, __nv_bfloat16>;

extern __shared__ __align__(16) char shared[];

__device__ inline uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// Copies 16 or 4 bytes to shared memory, of which those behind the first `size` are zeros.
__device__ inline void copy_16(uint32_t to, const void* from, int size) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(size) : "memory");
}
// For what others read again: by way of L1.
__device__ inline void copy_16_again(uint32_t to, const void* from, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(size) : "memory");
}
// The same where the condition holds, without a branch.
__device__ inline void copy_16_if(bool condition, uint32_t to, const void* from, int size) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0;"
               " @p cp.async.ca.shared.global [%0], [%1], 16, %2; }"
               ::"r"(to), "l"(from), "r"(size), "r"(int(condition)) : "memory");
}
__device__ inline void copy_4(uint32_t to, const void* from, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               ::"r"(to), "l"(from), "r"(size) : "memory");
}
__device__ inline void write_1(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"(uint16_t(v)) : "memory");
}
__device__ inline void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
template <int THREADS> __device__ inline void barrier(int id) {
  if constexpr (THREADS == 32) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// A register takes less, too: with zeros above it.
__device__ inline uint32_t read_1(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline uint32_t read_2(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline uint32_t read_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ inline uint2 read_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ inline uint4 read_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ inline void write_16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void write_2(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(uint16_t(v)) : "memory");
}

// Bits of a where the mask has ones, else of b.
__device__ inline uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(v) : "r"(a), "r"(b), "r"(mask));
  return v;
}
// An `and` that is shared: compilers would rather make one of each use.
__device__ inline uint32_t masked(uint32_t a, uint32_t mask) {
  uint32_t v;
  asm("and.b32 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(mask));
  return v;
}
// Has a value stay in its register: compilers would rather find it again each time.
__device__ inline void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ inline void keep(int& v) { asm volatile("" : "+r"(v)); }
__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// a * b + c of two T, rounded once: what there is before compute capability 9.0, too.
__device__ inline uint32_t fma_2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
  if constexpr (BF16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline uint32_t any_of_quad(uint32_t v) {
  v |= __shfl_xor_sync(~0u, v, 1);
  return v | __shfl_xor_sync(~0u, v, 2);
}

// Blocks of a cluster, one beside the other along y.
#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
template <class V> __device__ inline V read_of(int block, const V* p) {
  static_assert(sizeof(V) == 4, "a word");
  uint32_t from, v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(from) : "r"(shared_address(p)), "r"(block));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return reinterpret_cast<const V&>(v);
}
#else
__device__ inline void cluster_barrier() {}
template <class V> __device__ inline V read_of(int, const V* p) { return *p; }
#endif
"""
