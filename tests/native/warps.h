// Warps on the CPU: each thread of a block is a fiber, which runs until it needs the others.
//
// Strict where a GPU is not: lanes that an operation names must all come to it, at one place of the
// program, with one mask; else `failure` says what went wrong, where a GPU would hang or give
// anything. The text of a kernel follows, as `kernel_call`.
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint3_ { unsigned x, y, z; };
static uint3_ blockIdx, threadIdx, gridDim, blockDim;

namespace emu {
enum state { ready, together, barrier, asking, gone };
struct fiber {
  ucontext_t context;
  std::vector<char> stack;
  state now;
  unsigned mask, lane, value, other;
  int kind;
  const void* place;
  unsigned long long result;
  unsigned a[2], b;  // fragments of matrices
  float c[4], d[4];
  uint3_ at;
  int vote;
};
static std::vector<fiber> fibers;
static ucontext_t scheduler;
static unsigned self;
static char failure[300];
static long asked;  // how often a thread asked which lanes are with it
static std::function<void()> kernel_call;

inline void wait(state s) {
  fibers[self].now = s;
  swapcontext(&fibers[self].context, &scheduler);
}
// What a lane waits with; the result comes when all lanes of the mask wait.
__attribute__((noinline)) unsigned long long meet(int kind, unsigned mask, unsigned value, unsigned other) {
  fiber& f = fibers[self];
  f.kind = kind, f.mask = mask, f.value = value, f.other = other;
  f.place = __builtin_return_address(0);
  wait(together);
  return fibers[self].result;
}
enum { shuffle, ballot, sync, add, smax, smin, umax, umin, band, bor, bxor, transpose, mma_f16, mma_bf16 };

inline double number(unsigned bits, bool brain) {
  if (brain) {
    const unsigned wide = bits << 16;
    float f;
    __builtin_memcpy(&f, &wide, 4);
    return f;
  }
  const int e = int(bits >> 10 & 31), m = int(bits & 1023);
  double v = e == 31 ? (m ? __builtin_nan("") : __builtin_inf()) : __builtin_ldexp(e ? m + 1024 : m, (e ? e : 1) - 25);
  return bits >> 15 ? -v : v;
}
inline unsigned half_of(unsigned word, unsigned i) { return word >> (16 * i) & 0xffff; }
// As the PTX manual has the fragments of mma.m16n8k8 and movmatrix.
inline void matrices(fiber* f, int kind) {
  if (kind == transpose) {
    unsigned m[8][8];
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned i = 0; i < 2; ++i) m[l / 4][l % 4 * 2 + i] = half_of(f[l].value, i);
    for (unsigned l = 0; l < 32; ++l) f[l].result = m[l % 4 * 2][l / 4] | m[l % 4 * 2 + 1][l / 4] << 16;
    return;
  }
  const bool brain = kind == mma_bf16;
  double a[16][8], b[8][8];
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned group = l >> 2, in_group = l % 4;
      a[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] = number(half_of(f[l].a[i / 2], i & 1), brain);
      if (i < 2) b[in_group * 2 + i][group] = number(half_of(f[l].b, i), brain);
    }
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = i < 2 ? l >> 2 : (l >> 2) + 8, column = l % 4 * 2 + (i & 1);
      double sum = f[l].c[i];
      for (unsigned k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
      f[l].d[i] = float(sum);
    }
}

inline bool fail(const char* what, unsigned warp, unsigned lane) {
  if (!failure[0]) snprintf(failure, sizeof failure, "%s: warp %u, lane %u, mask %08x", what, warp, lane,
                            fibers[warp * 32 + lane].mask);
  return false;
}
// Carry out one operation of a warp whose lanes are all there.
inline bool resolve(unsigned warp) {
  const unsigned first = warp * 32, n = unsigned(fibers.size()) - first < 32 ? unsigned(fibers.size()) - first : 32;
  for (unsigned l = 0; l < n; ++l) {
    fiber& f = fibers[first + l];
    if (f.now != together) continue;
    if (!((f.mask >> l) & 1)) return fail("a lane is not in its own mask", warp, l);
    bool all = true;
    for (unsigned k = 0; k < 32; ++k) {
      if (!((f.mask >> k) & 1)) continue;
      if (k >= n || fibers[first + k].now == gone) return fail("a lane is named that is gone", warp, l);
      const fiber& g = fibers[first + k];
      if (g.now != together) { all = false; continue; }
      if (g.mask != f.mask) { all = false; continue; }
      if (g.kind != f.kind || g.place != f.place) return fail("lanes meet at two places", warp, l);
    }
    if (!all) continue;
    if (f.kind >= transpose) {
      if (n < 32 || f.mask != 0xffffffffu) return fail("a matrix needs all lanes", warp, l);
      matrices(&fibers[first], f.kind);
      for (unsigned k = 0; k < 32; ++k) fibers[first + k].now = ready;
      return true;
    }
    unsigned long long votes = 0, r = 0;
    bool begun = false;
    for (unsigned k = 0; k < n; ++k) {
      if (!((f.mask >> k) & 1)) continue;
      const unsigned v = fibers[first + k].value;
      if (v) votes |= 1u << k;
      const int a = int(r), b = int(v);
      if (!begun) r = v;
      else if (f.kind == add) r = unsigned(r) + v;
      else if (f.kind == smax) r = unsigned(a > b ? a : b);
      else if (f.kind == smin) r = unsigned(a < b ? a : b);
      else if (f.kind == umax) r = r > v ? r : v;
      else if (f.kind == umin) r = r < v ? r : v;
      else if (f.kind == band) r &= v;
      else if (f.kind == bor) r |= v;
      else if (f.kind == bxor) r ^= v;
      begun = true;
    }
    const unsigned mask = f.mask;
    const int kind = f.kind;
    for (unsigned k = 0; k < n; ++k) {
      if (!((mask >> k) & 1)) continue;
      fiber& g = fibers[first + k];
      if (kind == shuffle) {
        if (!((mask >> g.other) & 1)) return fail("a lane is read that is not named", warp, k);
        g.result = fibers[first + g.other].value;
      } else {
        g.result = kind == ballot ? votes : r;
      }
    }
    for (unsigned k = 0; k < n; ++k)
      if ((mask >> k) & 1) fibers[first + k].now = ready;
    return true;
  }
  // Those that ask who is with them: all that wait at one place.
  for (unsigned l = 0; l < n; ++l) {
    if (fibers[first + l].now != asking) continue;
    const void* place = fibers[first + l].place;
    unsigned mask = 0;
    for (unsigned k = 0; k < n; ++k)
      if (fibers[first + k].now == asking && fibers[first + k].place == place) mask |= 1u << k;
    for (unsigned k = 0; k < n; ++k)
      if ((mask >> k) & 1) fibers[first + k].now = ready, fibers[first + k].result = mask;
    return true;
  }
  return false;
}
inline void entry() {
  kernel_call();
  fibers[self].now = gone;
  swapcontext(&fibers[self].context, &scheduler);
}
inline bool block() {
  const unsigned n = blockDim.x * blockDim.y * blockDim.z;
  fibers.clear();
  fibers.resize(n);
  for (unsigned i = 0; i < n; ++i) {
    fiber& f = fibers[i];
    f.stack.resize(256 << 10);
    f.now = ready;
    f.at = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
  }
  for (;;) {
    bool ran = false;
    for (unsigned i = 0; i < n; ++i)
      while (fibers[i].now == ready) {
        self = i, threadIdx = fibers[i].at, ran = true;
        swapcontext(&scheduler, &fibers[i].context);
      }
    for (unsigned w = 0; w < (n + 31) / 32; ++w) ran |= resolve(w);
    if (failure[0]) return false;
    if (ran) continue;
    unsigned there = 0, left = 0;
    for (auto& f : fibers) there += f.now == barrier, left += f.now != gone;
    if (!left) return true;
    if (there != left) {
      snprintf(failure, sizeof failure, "%u threads wait at a barrier, %u elsewhere", there, left - there);
      return false;
    }
    for (auto& f : fibers) if (f.now == barrier) f.now = ready;
  }
}
}  // namespace emu

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
  emu::fiber& f = emu::fibers[emu::self];
  f.a[0] = a0, f.a[1] = a1, f.b = b, f.c[0] = c0, f.c[1] = c1, f.c[2] = c2, f.c[3] = c3;
  emu::meet(kind, 0xffffffffu, 0, 0);
  const emu::fiber& g = emu::fibers[emu::self];
  d0 = g.d[0], d1 = g.d[1], d2 = g.d[2], d3 = g.d[3];
}
#define emu_mma_f16(...) emu_mma(emu::mma_f16, __VA_ARGS__)
#define emu_mma_bf16(...) emu_mma(emu::mma_bf16, __VA_ARGS__)
__attribute__((noinline)) inline unsigned __activemask() {
  ++emu::asked;
  emu::fibers[emu::self].place = __builtin_return_address(0);
  emu::wait(emu::asking);
  return unsigned(emu::fibers[emu::self].result);
}
EMU void __syncthreads() { emu::wait(emu::barrier); }
// Once in a kernel: before another, all must have seen the votes.
inline int __syncthreads_or(int v) {
  emu::fibers[emu::self].vote = v;
  emu::wait(emu::barrier);
  for (auto& f : emu::fibers) v |= f.vote;
  return v;
}
EMU int __ffs(int v) { return __builtin_ffs(v); }
EMU void emu_copy(void* to, const void* from, unsigned long n) { __builtin_memcpy(to, from, n); }
#undef __forceinline__
#define FR_CUDA 0
