// What ops/quantized_wide_cuda.py's machine() and quantized_persistent_cuda.py have besides, on the
// CPU: barriers in shared memory, copies of many bytes, and products of warps with x in shared
// memory, swizzled. What a copy brings is there when its barrier is waited for, and until then NaN.
#include <utility>

struct int2 { int x, y; };
struct float4 { float x, y, z, w; };
inline int __ldg(const int* p) { return *p; }
inline float4 __ldcg(const float4* p) { return *p; }
inline void __threadfence() {}

struct MemoryBarrier { int all = 0, left = 0; int64_t bytes = 0; uint32_t phase = 0; std::vector<Copy> copies; };
inline std::map<std::pair<int, uint32_t>, MemoryBarrier> memory_barriers;
inline MemoryBarrier& memory_barrier(uint32_t address) {
  const auto found = memory_barriers.find({me->block, address});
  must(found != memory_barriers.end(), "no barrier");
  return found->second;
}
inline void start_barrier(uint32_t address, int arrivals) {
  at(address, 8);
  memory_barriers[{me->block, address}] = {arrivals, arrivals};
}
inline void started_barriers() {}
inline void fence_of_copies() {}
inline void complete(MemoryBarrier& b) {
  if (b.left == 0 && b.bytes == 0) b.left = b.all, ++b.phase;
}
inline void arrive(uint32_t address) {
  MemoryBarrier& b = memory_barrier(address);
  must(b.left > 0, "more arrive than a barrier has");
  --b.left;
  complete(b);
}
inline void expect(uint32_t address, uint32_t bytes) {
  memory_barrier(address).bytes += bytes;
  arrive(address);
}
inline void copy_many(uint32_t to, const void* from, uint32_t bytes, uint32_t address) {
  must(bytes % 16 == 0 && to % 16 == 0 && size_t(from) % 16 == 0, "many bytes");
  must(in_arrays(from, bytes) && to + bytes <= block_of_me().memory.size(), "many bytes");
  memset(shared + to, 0xff, bytes);
  memory_barrier(address).copies.push_back({to, from, int(bytes), int(bytes)});
}
inline void wait_for(uint32_t address, uint32_t parity) {
  MemoryBarrier& b = memory_barrier(address);
  wait_until([&] {
    if ((b.phase & 1) != parity) return true;
    for (const Copy& one : b.copies) {
      memcpy(shared + one.to, one.from, one.bytes);
      b.bytes -= one.bytes;
    }
    b.copies.clear();
    complete(b);
    return (b.phase & 1) != parity;
  });
}

inline void begin_products() {}
inline void end_products() {}
template <int LEFT> inline void wait_products() {}
template <int COUNT> inline void fewer_registers() {}
template <int COUNT> inline void more_registers() {}
inline void keep(float&) {}
template <class Tokens, int S>
inline void product_16(Tokens, float (&c)[S], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                       uint32_t where) {
  const uint32_t tile = where * 16 / 1024 * 1024, chunk = where * 16 % 128 / 16;
  must(where * 16 % 1024 < 128, "a tile begins at a multiple of 1024 bytes");
  const int lane = me->number % 32, g = lane / 4, t = lane % 4;
  for (int n = 0; n < Tokens::N / 8; ++n) {
    const uint32_t row = tile + (n * 8 + g) * 128 + t * 4;
    mma(reinterpret_cast<float (&)[4]>(c[n * 4]), a0, a1, a2, a3,
        read_4(row + (chunk ^ g) * 16), read_4(row + ((chunk + 1) ^ g) * 16));
  }
}
inline uint32_t __shfl_sync(uint32_t, uint32_t v, int from) {
  Warp& warp = warp_of_me();
  warp.word[me->number % 32] = v;
  __syncwarp();
  v = warp.word[from];
  __syncwarp();
  return v;
}
inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t v, int lanes) {
  return __shfl_sync(mask, v, me->number % 32 ^ lanes);
}
