// What cooperative_groups.h offers within a block, on the CPU. A grid has its numbers, and no sync.
#pragma once

namespace cooperative_groups {

using fr::on_cpu::here;

class grid_group {
 public:
  unsigned long long num_threads() const { return num_blocks() * block_threads(); }
  unsigned long long size() const { return num_threads(); }
  unsigned long long thread_rank() const { return block_rank() * block_threads() + fr::self().index; }
  unsigned long long num_blocks() const {
    const dim3 g = fr::on_cpu::grid_size();
    return (unsigned long long)g.x * g.y * g.z;
  }
  unsigned long long block_rank() const {
    const dim3 g = fr::on_cpu::grid_size();
    const ::uint3 b = fr::on_cpu::block_index();
    return ((unsigned long long)b.z * g.y + b.y) * g.x + b.x;
  }
  dim3 group_dim() const { return fr::on_cpu::grid_size(); }
  dim3 dim_blocks() const { return fr::on_cpu::grid_size(); }
  dim3 block_index() const { return fr::on_cpu::block_index(); }
  bool is_valid() const { return false; }
  void sync() const = delete;  // blocks run one after the other

 private:
  static unsigned block_threads() { return fr::fr_fibers->where->n; }
};

class thread_block {
 public:
  static void sync(here at = here()) { fr::on_cpu::barrier(at); }
  static unsigned thread_rank() { return fr::self().index; }
  static unsigned num_threads() { return fr::fr_fibers->where->n; }
  static unsigned size() { return num_threads(); }
  static dim3 group_index() { return fr::on_cpu::block_index(); }
  static dim3 thread_index() { return fr::on_cpu::thread_index(); }
  static dim3 group_dim() { return fr::on_cpu::block_size(); }
  static dim3 dim_threads() { return fr::on_cpu::block_size(); }
};

// Lanes of one warp: those of a tile, or those that were together. A number of a thread in the group
// counts them.
class lanes_group {
 public:
  unsigned thread_rank() const {
    return __builtin_popcount(mask_ & ((1u << fr::on_cpu::lane_index()) - 1));
  }
  unsigned num_threads() const { return __builtin_popcount(mask_); }
  unsigned size() const { return num_threads(); }
  unsigned meta_group_rank() const { return meta_rank_; }
  unsigned meta_group_size() const { return meta_size_; }
  void sync(here at = here()) const { __syncwarp(mask_, at); }
  template <class T> T shfl(T v, int from, here at = here()) const {
    return fr::on_cpu::shuffle(mask_, v, lane(unsigned(from) % num_threads()), at);
  }
  template <class T> T shfl_up(T v, unsigned by, here at = here()) const {
    const unsigned own = thread_rank();
    return fr::on_cpu::shuffle(mask_, v, own >= by ? lane(own - by) : -1, at);
  }
  template <class T> T shfl_down(T v, unsigned by, here at = here()) const {
    const unsigned from = thread_rank() + by;
    return fr::on_cpu::shuffle(mask_, v, from < num_threads() ? lane(from) : -1, at);
  }
  template <class T> T shfl_xor(T v, unsigned by, here at = here()) const {
    const unsigned from = thread_rank() ^ by;
    return fr::on_cpu::shuffle(mask_, v, from < num_threads() ? lane(from) : -1, at);
  }
  int any(int v, here at = here()) const { return __any_sync(mask_, v, at); }
  int all(int v, here at = here()) const { return __all_sync(mask_, v, at); }
  unsigned ballot(int v, here at = here()) const { return packed(__ballot_sync(mask_, v, at)); }
  template <class T> unsigned match_any(T v, here at = here()) const {
    return packed(fr::on_cpu::match(mask_, v, at));
  }
  template <class T> unsigned match_all(T v, int& same, here at = here()) const {
    const unsigned lanes = match_any(v, at);
    same = all(lanes == packed(mask_), at);
    return same ? lanes : 0;
  }

  lanes_group(unsigned mask, unsigned meta_rank, unsigned meta_size)
      : mask_(mask), meta_rank_(meta_rank), meta_size_(meta_size) {}
  unsigned fr_mask() const { return mask_; }
  int lane(unsigned rank) const {  // of the thread with a number
    unsigned left = mask_;
    for (; rank; --rank) left &= left - 1;
    return __builtin_ctz(left);
  }

 private:
  unsigned packed(unsigned lanes) const {
    unsigned r = 0, n = 0;
    for (unsigned i = 0; i < 32; ++i)
      if (mask_ >> i & 1) r |= (lanes >> i & 1) << n++;
    return r;
  }
  unsigned mask_, meta_rank_, meta_size_;
};

class coalesced_group : public lanes_group {
 public:
  explicit coalesced_group(unsigned mask) : lanes_group(mask, 0, 1) {}
};

template <unsigned N, class PARENT = void> class thread_block_tile : public lanes_group {
 public:
  static_assert(N <= 32 && (N & (N - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");
  static constexpr unsigned num_threads() { return N; }
  static constexpr unsigned size() { return N; }
  explicit thread_block_tile(unsigned first, unsigned meta_rank, unsigned meta_size)
      : lanes_group(there(first), meta_rank, meta_size) {}

 private:
  // Lanes beyond the end of the block are none.
  static unsigned there(unsigned first) {
    const unsigned lane = fr::on_cpu::lane_index(), warp = fr::self().index - lane;
    const unsigned left = fr::fr_fibers->where->n - warp;
    const unsigned all = N == 32 ? ~0u : ((1u << (N % 32)) - 1) << first;
    return left < 32 ? all & ((1u << left) - 1) : all;
  }
};

inline grid_group this_grid() { return {}; }
inline thread_block this_thread_block() { return {}; }
inline coalesced_group coalesced_threads(here at = here()) { return coalesced_group(__activemask(at)); }

template <unsigned N> thread_block_tile<N, thread_block> tiled_partition(const thread_block& b) {
  const unsigned lane = fr::on_cpu::lane_index();
  return thread_block_tile<N, thread_block>(lane & ~(N - 1), b.thread_rank() / N,
      (b.num_threads() + N - 1) / N);
}
template <unsigned N, unsigned M, class P>
thread_block_tile<N, thread_block_tile<M, P>> tiled_partition(const thread_block_tile<M, P>& t) {
  const unsigned lane = fr::on_cpu::lane_index();
  return thread_block_tile<N, thread_block_tile<M, P>>(lane & ~(N - 1), t.thread_rank() / N, M / N);
}
inline coalesced_group binary_partition(const lanes_group& g, bool v, here at = here()) {
  const unsigned yes = __ballot_sync(g.fr_mask(), v, at);
  return coalesced_group(v ? yes : g.fr_mask() & ~yes);
}

template <class G> void sync(const G& g, here at = here()) { g.sync(at); }
template <class G> auto thread_rank(const G& g) { return g.thread_rank(); }
template <class G> auto group_size(const G& g) { return g.size(); }

// ---- cooperative_groups/reduce.h and scan.h ------------------------------------------------------
#define FR_OPERATOR(NAME)                                                                       \
  template <class T = void> struct NAME : fr::on_cpu::NAME {};
FR_OPERATOR(plus) FR_OPERATOR(less) FR_OPERATOR(greater) FR_OPERATOR(bit_and) FR_OPERATOR(bit_or)
FR_OPERATOR(bit_xor)
#undef FR_OPERATOR

// In the order of lanes. An operator of the author's may have captured something.
template <class T, class F> T fr_scan(const lanes_group& g, T v, F f, bool whole, here at) {
  const unsigned own = g.thread_rank();
  T r = g.shfl(v, 0, at);
  for (unsigned i = 1; i < g.num_threads(); ++i) {
    const T next = g.shfl(v, int(i), at);
    if (whole || i <= own) r = f(r, next);
  }
  return r;
}
template <class T, class F> T reduce(const lanes_group& g, T v, F f, here at = here()) {
  return fr_scan(g, v, f, true, at);
}
template <class T, class F> T inclusive_scan(const lanes_group& g, T v, F f, here at = here()) {
  return fr_scan(g, v, f, false, at);
}
template <class T> T inclusive_scan(const lanes_group& g, T v, here at = here()) {
  return fr_scan(g, v, plus<T>(), false, at);
}
template <class T, class F> T exclusive_scan(const lanes_group& g, T v, F f, here at = here()) {
  const T all = fr_scan(g, v, f, false, at), before = g.shfl_up(all, 1, at);
  return g.thread_rank() ? before : T();
}
template <class T> T exclusive_scan(const lanes_group& g, T v, here at = here()) {
  return exclusive_scan(g, v, plus<T>(), at);
}

}  // namespace cooperative_groups
