// What ops/quantized_machine_cuda.py's MACHINE has, on the CPU: threads are fibers, in the order of
// their numbers, and what cp.async brings is there when it is waited for, and until then NaN. Reads
// outside of arrays and of shared memory end the process. It has a scheduler of its own, for warps.cpp
// has one block at a time, whose barriers have no numbers.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

using std::max;
using std::min;
inline int64_t min(int64_t a, int b) { return a < b ? a : b; }
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct Index { int x, y, z; };
#define __device__
#define __global__
#define __launch_bounds__(...)

inline float __int_as_float(int i) {
  float f;
  memcpy(&f, &i, 4);
  return f;
}
inline double value_of(uint16_t bits) {
  if (BF16) return __int_as_float(uint32_t(bits) << 16);
  _Float16 v;
  memcpy(&v, &bits, 2);
  return v;
}
// Rounded once: what float32 cuts off is kept in its last bit.
inline uint16_t bits_of_value(double v) {
  uint16_t bits;
  if (BF16) {
    if (std::isnan(v)) return 0x7fff;
    float f = float(v);
    uint32_t u;
    if (std::isfinite(f) && double(f) != v) {
      memcpy(&u, &f, 4);
      u = (u - (std::abs(double(f)) > std::abs(v))) | 1;
    } else {
      memcpy(&u, &f, 4);
    }
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  const _Float16 h = _Float16(v);
  memcpy(&bits, &h, 2);
  return bits;
}
struct T {
  uint16_t bits;
  T() = default;
  explicit T(float f) : bits(bits_of_value(f)) {}
  explicit operator float() const { return value_of(bits); }
};

struct Copy { uint32_t to; const void* from; int bytes, size; };
struct Barrier { int count = 0, generation = 0; };
struct Warp { Barrier barrier; uint32_t a[32][4], b[32][2], word[32]; };
struct Block {
  std::vector<char> memory;
  std::map<int, std::vector<char>> others;  // arrays that kernels declare
  Barrier barriers[17];
  std::vector<Warp> warps;
  Index index;
};
struct Thread {
  ucontext_t context;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  int block, number;
  bool done = false;
};
inline std::vector<Thread> all_threads;
inline std::vector<Block> all_blocks;
inline Thread* me;
inline ucontext_t scheduler;
inline Barrier of_cluster;
inline Index blockDim, gridDim;
inline std::vector<std::pair<const char*, const char*>> arrays;
#define threadIdx (Index{me->number, 0, 0})
#define blockIdx (all_blocks[me->block].index)
#define shared (all_blocks[me->block].memory.data())

inline void must(bool right, const char* what) {
  if (!right) fprintf(stderr, "%s, thread %d\n", what, me->number), abort();
}
inline int64_t resumed = 0;  // how often a thread has gone on
template <class Condition> inline void wait_until(const Condition& condition) {
  while (!condition()) swapcontext(&me->context, &scheduler);
  ++resumed;
}
inline void arrive(Barrier& b, int all) {
  const int generation = b.generation;
  if (++b.count == all) b.count = 0, ++b.generation;
  else wait_until([&] { return b.generation != generation; });
}
inline Block& block_of_me() { return all_blocks[me->block]; }
inline Warp& warp_of_me() { return block_of_me().warps[me->number / 32]; }
inline void __syncthreads() { arrive(block_of_me().barriers[16], blockDim.x); }
inline void __syncwarp() { arrive(warp_of_me().barrier, 32); }
template <int THREADS> inline void barrier(int id) {
  must(id > 0 && id < 16, "a barrier's number");
  if (THREADS == 32) __syncwarp();
  else arrive(block_of_me().barriers[id], THREADS);
}
inline void cluster_barrier() { arrive(of_cluster, all_threads.size()); }
template <class V> inline V read_of(int block, const V* p) {
  V v;
  memcpy(&v, all_blocks[block].memory.data() + ((const char*)p - shared), sizeof v);
  return v;
}

inline uint32_t shared_address(const void* p) { return (const char*)p - shared; }
inline char* at(uint32_t address, int bytes) {
  must(address + bytes <= block_of_me().memory.size() && address % bytes == 0, "shared memory");
  return shared + address;
}
inline bool in_arrays(const void* p, int bytes) {
  for (auto [begin, end] : arrays)
    if ((const char*)p >= begin && (const char*)p + bytes <= end) return true;
  return false;
}
inline void copy(uint32_t to, const void* from, int bytes, int size) {
  must(size == 0 || (in_arrays(from, size) && size_t(from) % bytes == 0), "a copy's source");
  memset(at(to, bytes), 0xff, bytes);
  me->open.push_back({to, from, bytes, size});
}
inline void copy_16(uint32_t to, const void* from, int size) { copy(to, from, 16, size); }
inline void copy_16_again(uint32_t to, const void* from, int size) { copy(to, from, 16, size); }
inline void copy_16_if(bool condition, uint32_t to, const void* from, int size) {
  if (condition) copy(to, from, 16, size);
}
inline void copy_4(uint32_t to, const void* from, int size) { copy(to, from, 4, size); }
inline void prefetch(const void* p) { must(in_arrays(p, 1), "a prefetch"); }
inline void commit() {
  me->groups.push_back(me->open);
  me->open.clear();
}
template <int LEFT> inline void wait() {
  while (int(me->groups.size()) > LEFT) {
    for (const Copy& one : me->groups[0]) {
      memset(shared + one.to, 0, one.bytes);
      memcpy(shared + one.to, one.from, one.size);
    }
    me->groups.erase(me->groups.begin());
  }
}

template <class V> inline V read(uint32_t from) {
  V v;
  memcpy(&v, at(from, sizeof v), sizeof v);
  return v;
}
inline uint32_t read_1(uint32_t from) { return read<uint8_t>(from); }
inline uint32_t read_2(uint32_t from) { return read<uint16_t>(from); }
inline uint32_t read_4(uint32_t from) { return read<uint32_t>(from); }
inline uint2 read_8(uint32_t from) { return read<uint2>(from); }
inline uint4 read_16(uint32_t from) { return read<uint4>(from); }
inline void write_1(uint32_t to, uint32_t v) { memcpy(at(to, 1), &v, 1); }
inline void write_2(uint32_t to, uint32_t v) { memcpy(at(to, 2), &v, 2); }
inline void write_16(uint32_t to, uint4 v) { memcpy(at(to, 16), &v, 16); }

inline uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
inline uint32_t masked(uint32_t a, uint32_t mask) { return a & mask; }
inline void keep(uint32_t&) {}
inline void keep(int&) {}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  uint32_t v = 0;
  for (int i = 0; i < 4; ++i)
    v |= uint32_t(bytes >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return v;
}
inline uint32_t fma_2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v = 0;
  for (int i = 0; i < 32; i += 16)
    v |= uint32_t(bits_of_value(value_of(a >> i) * value_of(b >> i) + value_of(c >> i))) << i;
  return v;
}
inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                uint32_t b1) {
  Warp& warp = warp_of_me();
  const int lane = me->number % 32;
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp.a[lane], a, 16), memcpy(warp.b[lane], b, 8);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k)
      sum += value_of(warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2)) *
             value_of(warp.b[column * 4 + k % 8 / 2][k / 8] >> 16 * (k % 2));
    c[i] += sum;
  }
  __syncwarp();
}
inline uint32_t any_of_quad(uint32_t v) {
  Warp& warp = warp_of_me();
  const int lane = me->number % 32;
  warp.word[lane] = v;
  __syncwarp();
  for (int i = 0; i < 4; ++i) v |= warp.word[lane / 4 * 4 + i];
  __syncwarp();
  return v;
}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

inline std::function<void()> kernel;
inline void begin() {
  kernel();
  me->done = true;
  swapcontext(&me->context, &scheduler);
}
// Runs the threads that there are, by turns, from the first or from the last on.
inline void run_threads(bool backwards) {
  const int size = all_threads.size();
  for (int left = size, idle = 0; left > 0;) {
    const int64_t before = resumed - left;
    for (int i = 0; i < size; ++i) {
      Thread& thread = all_threads[backwards ? size - 1 - i : i];
      if (thread.done) continue;
      me = &thread;
      swapcontext(&scheduler, &thread.context);
      left -= thread.done;
    }
    // Without one that goes on, one more round may bring what is copied.
    idle = resumed - left == before ? idle + 1 : 0;
    must(idle < 3, "all wait for one another");
  }
}
// Blocks of a cluster run at the same time.
inline void launch(Index grid, Index cluster, int size, int bytes, bool backwards) {
  constexpr int STACK = 1 << 15;
  const int blocks = cluster.x * cluster.y * cluster.z, threads = blocks * size;
  gridDim = grid, blockDim = {size, 1, 1};
  const std::unique_ptr<char[]> stacks(new char[size_t(threads) * STACK]);
  for (int i = 0; i < grid.x * grid.y * grid.z / blocks; ++i) {
    const int across = grid.x / cluster.x, down = grid.y / cluster.y;
    const Index at = {i % across * cluster.x, i / across % down * cluster.y,
                      i / across / down * cluster.z};
    of_cluster = {};
    all_blocks.assign(blocks, Block()), all_threads.assign(threads, Thread());
    for (int b = 0; b < blocks; ++b) {
      all_blocks[b].memory.assign(bytes, char(0xff)), all_blocks[b].warps.resize(size / 32);
      all_blocks[b].index = {at.x + b % cluster.x, at.y + b / cluster.x % cluster.y,
                             at.z + b / cluster.x / cluster.y};
    }
    for (int t = 0; t < threads; ++t) {
      all_threads[t].block = t / size, all_threads[t].number = t % size;
      getcontext(&all_threads[t].context);
      all_threads[t].context.uc_stack.ss_sp = stacks.get() + size_t(t) * STACK;
      all_threads[t].context.uc_stack.ss_size = STACK;
      makecontext(&all_threads[t].context, begin, 0);
    }
    run_threads(backwards);
  }
}
// Clusters along y.
inline void launch(int across, int split, int size, int bytes) {
  launch({across, split, 1}, {1, split, 1}, size, bytes, false);
}
