// Warps on the CPU: what the text of a kernel needs of their scheduler (warps.cpp).
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint3_ { unsigned x, y, z; };
extern uint3_ blockIdx, threadIdx, gridDim, blockDim;

namespace emu {
enum { shuffle, ballot, sync, add, smax, smin, umax, umin, band, bor, bxor, transpose, mma_f16, mma_bf16 };
extern unsigned self;  // the thread that runs, by its index in the block

// What a lane waits with; the result comes when all lanes of the mask wait.
unsigned long long meet(int kind, unsigned mask, unsigned value, unsigned other);
void multiply(int kind, unsigned a0, unsigned a1, unsigned b, const float* c, float* d);
}  // namespace emu

unsigned __activemask();
void __syncthreads();
int __syncthreads_or(int v);

#define EMU inline __attribute__((always_inline))
EMU unsigned emu_lane() { return emu::self % 32; }
EMU unsigned __ballot_sync(unsigned m, bool v) { return unsigned(emu::meet(emu::ballot, m, v, 0)); }
EMU void __syncwarp(unsigned m = 0xffffffffu) { emu::meet(emu::sync, m, 0, 0); }
EMU unsigned __shfl_sync(unsigned m, unsigned v, int from, int width = 32) {
  const unsigned l = emu_lane(), w = unsigned(width);
  return unsigned(emu::meet(emu::shuffle, m, v, (l & ~(w - 1)) | (unsigned(from) & (w - 1))));
}
EMU unsigned __shfl_up_sync(unsigned m, unsigned v, unsigned d, int width = 32) {
  const unsigned l = emu_lane(), j = l & unsigned(width - 1);
  return unsigned(emu::meet(emu::shuffle, m, v, j >= d ? l - d : l));
}
EMU unsigned __shfl_down_sync(unsigned m, unsigned v, unsigned d, int width = 32) {
  const unsigned l = emu_lane(), j = l & unsigned(width - 1);
  return unsigned(emu::meet(emu::shuffle, m, v, j + d < unsigned(width) ? l + d : l));
}
EMU unsigned __shfl_xor_sync(unsigned m, unsigned v, int d, int = 32) {
  return unsigned(emu::meet(emu::shuffle, m, v, emu_lane() ^ unsigned(d)));
}
EMU unsigned __reduce_add_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::add, m, v, 0)); }
EMU int __reduce_add_sync(unsigned m, int v) { return int(emu::meet(emu::add, m, unsigned(v), 0)); }
EMU unsigned __reduce_max_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::umax, m, v, 0)); }
EMU int __reduce_max_sync(unsigned m, int v) { return int(emu::meet(emu::smax, m, unsigned(v), 0)); }
EMU unsigned __reduce_min_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::umin, m, v, 0)); }
EMU int __reduce_min_sync(unsigned m, int v) { return int(emu::meet(emu::smin, m, unsigned(v), 0)); }
EMU unsigned __reduce_and_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::band, m, v, 0)); }
EMU unsigned __reduce_or_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::bor, m, v, 0)); }
EMU unsigned __reduce_xor_sync(unsigned m, unsigned v) { return unsigned(emu::meet(emu::bxor, m, v, 0)); }
EMU unsigned emu_transposed(unsigned w) { return unsigned(emu::meet(emu::transpose, 0xffffffffu, w, 0)); }
EMU void emu_mma(int kind, float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned b,
                 float c0, float c1, float c2, float c3) {
  const float c[] = {c0, c1, c2, c3};
  float d[4];
  emu::multiply(kind, a0, a1, b, c, d);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
#define emu_mma_f16(...) emu_mma(emu::mma_f16, __VA_ARGS__)
#define emu_mma_bf16(...) emu_mma(emu::mma_bf16, __VA_ARGS__)
EMU int __ffs(int v) { return __builtin_ffs(v); }
EMU void emu_copy(void* to, const void* from, unsigned long n) { __builtin_memcpy(to, from, n); }
#undef __forceinline__
#define FR_CUDA 0
