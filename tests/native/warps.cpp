// The scheduler of warps on the CPU: each thread of a block is a fiber, which runs until it needs the
// others.
//
// Strict where a GPU is not: lanes that an operation names must all come to it, at one place of the
// program, with one mask; else `failure` says what went wrong, where a GPU would hang or give
// anything.
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "warps.h"
#undef __forceinline__

uint3_ blockIdx, threadIdx, gridDim, blockDim;

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
static char failure[300];
static long asked;  // how often a thread asked which lanes are with it
static void (*kernel)(void**);
static void** arguments;
unsigned self;

static void wait(state s) {
  fibers[self].now = s;
  swapcontext(&fibers[self].context, &scheduler);
}
unsigned long long meet(int kind, unsigned mask, unsigned value, unsigned other) {
  fiber& f = fibers[self];
  f.kind = kind, f.mask = mask, f.value = value, f.other = other;
  f.place = __builtin_return_address(0);
  wait(together);
  return fibers[self].result;
}
void multiply(int kind, unsigned a0, unsigned a1, unsigned b, const float* c, float* d) {
  fiber& f = fibers[self];
  f.a[0] = a0, f.a[1] = a1, f.b = b;
  memcpy(f.c, c, sizeof f.c);
  f.place = __builtin_return_address(0);
  f.kind = kind, f.mask = 0xffffffffu, f.value = f.other = 0;
  wait(together);
  memcpy(d, fibers[self].d, sizeof f.d);
}

static double number(unsigned bits, bool brain) {
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
static unsigned half_of(unsigned word, unsigned i) { return word >> (16 * i) & 0xffff; }
// As the PTX manual has the fragments of mma.m16n8k8 and movmatrix.
static void matrices(fiber* f, int kind) {
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

static bool fail(const char* what, unsigned warp, unsigned lane) {
  if (!failure[0]) snprintf(failure, sizeof failure, "%s: warp %u, lane %u, mask %08x", what, warp, lane,
                            fibers[warp * 32 + lane].mask);
  return false;
}
// Carry out one operation of a warp whose lanes are all there.
static bool resolve(unsigned warp) {
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
static void entry() {
  kernel(arguments);
  fibers[self].now = gone;
  swapcontext(&fibers[self].context, &scheduler);
}
static bool block() {
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

unsigned __activemask() {
  ++emu::asked;
  emu::fibers[emu::self].place = __builtin_return_address(0);
  emu::wait(emu::asking);
  return unsigned(emu::fibers[emu::self].result);
}
void __syncthreads() { emu::wait(emu::barrier); }
// Once in a kernel: before another, all must have seen the votes.
int __syncthreads_or(int v) {
  emu::fibers[emu::self].vote = v;
  emu::wait(emu::barrier);
  for (auto& f : emu::fibers) v |= f.vote;
  return v;
}

// Carry out a launch; returns what went wrong, or nothing.
extern "C" const char* emu_run(
    void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* block, long* asked) {
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
  emu::failure[0] = 0, emu::asked = 0;
  emu::kernel = kernel, emu::arguments = arguments;
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
        if (!emu::block()) return emu::failure;
  *asked = emu::asked;
  return "";
}
