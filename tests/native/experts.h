// What a mixture of experts has besides products.h and warp_groups.h, on the CPU: atomics, votes, and
// steps of a unit by the words of their arguments.
inline int atomicAdd(int* p, int v) {
  const int before = *p;
  *p += v;
  return before;
}
inline uint32_t __ballot_sync(uint32_t, bool v) {
  Warp& warp = warp_of_me();
  warp.word[me->number % 32] = v;
  __syncwarp();
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) all |= warp.word[i] << i;
  __syncwarp();
  return all;
}
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }

// An array in shared memory that a kernel declares: each block has its own.
template <class A> inline A& of_block(int which) {
  std::vector<char>& memory = block_of_me().others[which];
  if (memory.empty()) memory.assign(sizeof(A), char(0xff));
  return reinterpret_cast<A&>(*memory.data());
}

template <class... P, size_t... I>
inline std::function<void()> bound(void (*function)(P...), const int64_t* words,
                                   std::index_sequence<I...>) {
  return [=] { function(P(words[I])...); };
}
// A launch, whose pointers have so many bytes; `sizes` are those of the grid, of a cluster, of a
// block and of its shared memory, and in which order threads run.
template <class... P>
inline void launch_step(void (*function)(P...), const int64_t* words, const int64_t* bytes,
                        const int* sizes) {
  arrays.clear();
  for (size_t i = 0; i < sizeof...(P); ++i)
    if (bytes[i]) arrays.push_back({(const char*)words[i], (const char*)words[i] + bytes[i]});
  kernel = bound(function, words, std::index_sequence_for<P...>());
  launch({sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, sizes[6], sizes[7],
         sizes[8]);
}
