"""CUDA of products with matrices that indices choose: the kernels that `gathered_cuda` launches.

A block makes ROWS columns of up to TOK rows of one expert. What is summed over comes in blocks of
128 bytes: rows of x by ``cp.async``, and so do matrices of floats; quantized ones by way of
registers, from which they get to shared memory as `dequantize` has them. Tensor cores multiply
16-bit floats, FMA float32. Sums over the rows of an expert, which gradients are, are made alike.
"""

from __future__ import annotations

# Tiles of both sides in shared memory, and their products.
PRODUCTS = """
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int CHUNK = 16 / sizeof(T), BK = 8 * CHUNK;  // elements in 16 bytes, in a block of K
constexpr int WM = TOK < 64 ? 1 : 2, WN = WARPS / WM;  // warps along rows of x, along columns
constexpr int MT = TOK / 16 / WM, NT = ROWS / 8 / WN;  // tiles of a warp, of 16 rows, of 8 columns
constexpr int QUADS = TOK * ROWS / THREADS / 4;        // sums of a thread, four at a time
using Sums = float[QUADS][4];

// SIZE rows or columns of a result, and BK of what is summed over: ALONG which lies in memory what
// is summed over, or else the columns. 16 bytes that are read at once lie in different banks.
template <int SIZE, bool ALONG_> struct Side {
  static constexpr bool ALONG = ALONG_;
  static constexpr int HEIGHT = ALONG ? SIZE : BK, CHUNKS = (ALONG ? BK : SIZE) / CHUNK;
  static constexpr int BYTES = SIZE * 128;
  static constexpr int STEP = THREADS / CHUNKS, ROUNDS = (HEIGHT + STEP - 1) / STEP;  // of copies
  static __device__ uint32_t place(int row, int chunk) {
    return (row * CHUNKS + (chunk ^ (ALONG && sizeof(T) == 4 ? row >> 1 & 7 : row & 7))) * 16;
  }
  // What this thread copies: of row() and each STEP rows after it, 16 bytes.
  static __device__ int row() { return threadIdx.x / CHUNKS; }
  static __device__ int chunk() { return threadIdx.x % CHUNKS; }
  // So many times 16 columns or rows, and 16 of what is summed over, from a place on.
  static __device__ uint32_t after(uint32_t place, int columns, int k) {
    return ALONG ? (place ^ k * 32) + columns * 2048 : (place ^ columns * 32) + k * 256 * CHUNKS;
  }
};

// Copies a tile of a matrix whose rows begin at multiples of 16 bytes: `at(i, chunk)` finds which
// of its pieces this thread has of row i, and whether that is there.
template <class S, class At>
__device__ inline void copy_chunks(uint32_t to, const T* from, At at) {
  if (S::HEIGHT < S::STEP && S::row() >= S::HEIGHT) return;
#pragma unroll
  for (int i = 0; i < S::ROUNDS; ++i) {
    uint32_t chunk;
    const bool in = at(i, chunk);
    copy_16_again(to + S::place(S::row(), S::chunk()) + i * THREADS * 16,
                  reinterpret_cast<const uint4*>(from) + chunk, in ? 16 : 0);
  }
}

// Copies a tile of a matrix with rows of `width`, from `first` of each on. `row` says which row
// each of the tile's is; one below 0 is zeros, as what lies behind a row is.
template <class S, class Row>
__device__ inline void copy_tile(uint32_t to, const T* from, int first, int width, Row row) {
  if ((size_t(from) | width * sizeof(T)) % 16 == 0) {
#pragma unroll 2
    for (int i = threadIdx.x; i < S::HEIGHT * S::CHUNKS; i += THREADS) {
      const int64_t r = row(i / S::CHUNKS);
      const int at = first + i % S::CHUNKS * CHUNK;
      const bool in = r >= 0 && at < width;
      copy_16_again(to + S::place(i / S::CHUNKS, i % S::CHUNKS), from + (in ? r * width + at : 0),
                    in ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < S::HEIGHT * S::CHUNKS; i += THREADS) {
      const int64_t r = row(i / S::CHUNKS);
      const int at = first + i % S::CHUNKS * CHUNK;
      alignas(16) T v[CHUNK];
#pragma unroll
      for (int j = 0; j < CHUNK; ++j)
        v[j] = r >= 0 && at + j < width ? from[r * width + at + j] : T(0.0f);
      write_16(to + S::place(i / S::CHUNKS, i % S::CHUNKS), *reinterpret_cast<const uint4*>(v));
    }
  }
}

template <bool TRANSPOSED>
__device__ inline uint4 read_matrices(uint32_t from) {
  uint4 v;
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Of float32, a thread has TOK / 16 rows and 8 columns: where number i of them lies in its tile.
__device__ inline int thread_y() { return threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8; }
__device__ inline int thread_x() { return threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8; }
template <class X> __device__ inline int row_of(int i) {
  return X::ALONG ? i * 16 + thread_y() : i / 4 * 64 + thread_y() * 4 + i % 4;
}
template <class W> __device__ inline int column_of(int i) {
  return W::ALONG ? i / 2 * 32 + thread_x() * 2 + i % 2 : i / 4 * 64 + thread_x() * 4 + i % 4;
}
template <class S, int COUNT, class Place>
__device__ inline void read_floats(uint32_t from, int chunk, Place place, float (&v)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int k = i % 4, first = i / 4 * 4;
    const uint4 four = read_16(from + (S::ALONG ? S::place(place(i), chunk)
                                                : S::place(chunk * 4 + k, place(first) / 4)));
    const uint32_t part[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      (S::ALONG ? v[i][j] : v[first + j][k]) = __uint_as_float(part[j]);
  }
}

// Adds the products of two tiles, of which the first `USED` tiles of a warp's rows count.
template <class X, class W, int USED>
__device__ inline void add_products(uint32_t x, uint32_t w, Sums& sum) {
  const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 / WN, wn = threadIdx.x / 32 % WN;
  const int low = lane & 7, third = lane >> 3 & 1, fourth = lane >> 4;
  if constexpr (sizeof(T) == 2) {
    const uint32_t x_at = X::ALONG ? X::place(wm * 16 + lane % 16, fourth)
                                   : X::place(low + fourth * 8, wm * 2 + third);
    const uint32_t w_at = W::ALONG ? W::place(wn * NT * 8 + low + fourth * 8, third)
                                   : W::place(lane % 16, wn * NT + fourth);
#pragma unroll
    for (int k = 0; k < BK / 16; ++k) {
      uint4 b[NT / 2];
#pragma unroll
      for (int j = 0; j < NT / 2; ++j) b[j] = read_matrices<!W::ALONG>(w + W::after(w_at, j, k));
#pragma unroll
      for (int i = 0; i < USED; ++i) {
        const uint4 a = read_matrices<!X::ALONG>(x + X::after(x_at, i * WM, k));
#pragma unroll
        for (int j = 0; j < NT / 2; ++j) {
          mma(sum[i * NT + 2 * j], a.x, a.y, a.z, a.w, b[j].x, b[j].y);
          mma(sum[i * NT + 2 * j + 1], a.x, a.y, a.z, a.w, b[j].z, b[j].w);
        }
      }
    }
  } else {
    constexpr int ROWS_ = TOK / 16;
#pragma unroll 1
    for (int chunk = 0; chunk < BK / 4; ++chunk) {
      float a[ROWS_][4], b[8][4];
      read_floats<X>(x, chunk, [](int i) { return row_of<X>(i); }, a);
      read_floats<W>(w, chunk, [](int i) { return column_of<W>(i); }, b);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < ROWS_; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j)
            sum[i * 2 + j / 4][j % 4] = fmaf(a[i][k], b[j][k], sum[i * 2 + j / 4][j % 4]);
        }
      }
    }
  }
}

template <class U> struct alignas(2 * sizeof(U)) Two { U first, second; };
template <class U>
__device__ inline void store_two(U* to, U a, U b, int64_t left, bool aligned) {
  if (left > 1 && aligned) {
    *reinterpret_cast<Two<U>*>(to) = Two<U>{a, b};
  } else {
    if (left > 0) to[0] = a;
    if (left > 1) to[1] = b;
  }
}
// Stores what `end` makes of the sums, two neighbours at a time: `to(row)` is where the first of so
// many columns goes, null where there is no such row.
template <class X, class W, class To, class Ends>
__device__ inline void store(const Sums& sum, const Ends& end, int64_t columns, To to) {
  const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 / WN, wn = threadIdx.x / 32 % WN;
  constexpr bool NARROW = sizeof(T) == 2;
  constexpr int LINES = NARROW ? 2 * MT : TOK / 16, PAIRS_ = 2 * QUADS / LINES;
#pragma unroll
  for (int i = 0; i < LINES; ++i) {
    auto* const p = to(NARROW ? (i / 2 * WM + wm) * 16 + i % 2 * 8 + lane / 4 : row_of<X>(i));
    if (!p) continue;
    const bool aligned = size_t(p) % (2 * sizeof(*p)) == 0;
#pragma unroll
    for (int j = 0; j < PAIRS_; ++j) {
      const int column = NARROW ? (wn * NT + j) * 8 + lane % 4 * 2 : column_of<W>(2 * j);
      const int quad = NARROW ? i / 2 * NT + j : i * 2 + j / 2, half = NARROW ? i % 2 : j % 2;
      const float* const two = sum[quad] + 2 * half;
      store_two(p + column, end(two[0], column), end(two[1], column + 1), columns - column,
                aligned);
    }
  }
}

// Adds the products of `blocks` tiles of both sides. Of floats, `copy(address, block)` copies one;
// quantized matrices are read to registers, DEPTH blocks ahead, and written from there.
template <class X, class W, int USED, class CopyX, class Weights>
__device__ inline void multiply(int blocks, CopyX copy_x, Weights& weights, Sums& sum) {
  constexpr int BUFFERS = Weights::PACKED ? 2 : STAGES, DEPTH_ = Weights::PACKED ? DEPTH : 1;
  const uint32_t x_tiles = shared_address(shared), w_tiles = x_tiles + STAGES * X::BYTES;
  auto ask = [&](int block) {
    if (block < blocks) {
      copy_x(x_tiles + block % STAGES * X::BYTES, block);
      if constexpr (!Weights::PACKED) weights.copy(w_tiles + block % STAGES * W::BYTES, block);
    }
    commit();
  };
  typename Weights::Ahead ahead[DEPTH_];
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) ask(s);
  if constexpr (Weights::PACKED) {
    weights.read(0, ahead[0]);
    weights.write(w_tiles, ahead[0]);
#pragma unroll
    for (int d = 1; d <= DEPTH_; ++d) weights.read(d, ahead[d % DEPTH_]);
  }
#pragma unroll 1
  for (int first = 0; first < blocks; first += DEPTH_) {
#pragma unroll
    for (int d = 0; d < DEPTH_; ++d) {
      const int block = first + d;
      if (block < blocks) {
        wait<STAGES - 2>();
        __syncthreads();
        ask(block + STAGES - 1);
        if constexpr (Weights::PACKED) {
          weights.write(w_tiles + (block + 1) % 2 * W::BYTES, ahead[(d + 1) % DEPTH_]);
          weights.read(block + 1 + DEPTH_, ahead[(d + 1) % DEPTH_]);
        }
        add_products<X, W, USED>(x_tiles + block % STAGES * X::BYTES,
                                 w_tiles + block % BUFFERS * W::BYTES, sum);
      }
    }
  }
}
"""

# Where elements of a matrix come from: floats,
FLOATS = """
constexpr int BITS = 8 * sizeof(T), GROUP = 1, SCALE = 0;
constexpr float LAST = 1;

template <class W> struct Weights {
  static constexpr bool PACKED = false;
  struct Ahead {};
  const uint32_t* w;
  const char *scales, *biases;
  int n0, height, width;  // rows and columns of the matrix, as it lies in memory
  __device__ void copy(uint32_t to, int block) const {
    const T* const from = reinterpret_cast<const T*>(w);
    const int top = W::ALONG ? n0 : block * BK, first = W::ALONG ? block * BK : n0;
    if ((size_t(from) | width * sizeof(T)) % 16 == 0) {
      const int row = top + W::row(), column = first + W::chunk() * CHUNK;
      const uint32_t pitch = width / CHUNK, begin = row * pitch + column / CHUNK;
      copy_chunks<W>(to, from, [&](int i, uint32_t& chunk) {
        chunk = begin + i * W::STEP * pitch;
        return column < width && row + i * W::STEP < height;
      });
    } else {
      copy_tile<W>(to, from, first, width,
                   [&](int r) { return top + r < height ? int64_t(top + r) : -1; });
    }
  }
};
"""

# or quantized ones: a thread takes 32 elements of a row, whose words are whole in all formats.
PACKED = """
constexpr int UNIT = GROUP < 32 ? GROUP : 32, UNITS = 32 / UNIT;  // of elements that share a scale

template <class W> struct Weights {
  static constexpr bool PACKED = true;
  static constexpr int ACROSS = W::CHUNKS * CHUNK / 32, LOW = ACROSS < 2 ? 1 : 2;
  static_assert(W::HEIGHT * ACROSS <= THREADS, "a thread has 32 elements of a tile");
  struct Ahead { uint32_t word[BITS], scale[UNITS], bias; };
  const uint32_t* w;
  const char *scales, *biases;
  int n0, height, width;

  // Threads that are neighbours have 64 elements of a row, and the next ones other rows.
  static __device__ int row() { return threadIdx.x / LOW % W::HEIGHT; }
  static __device__ int across() {
    return threadIdx.x % LOW + threadIdx.x / (LOW * W::HEIGHT) * LOW;
  }
  __device__ void read(int block, Ahead& of) const {
    const int k0 = block * BK;
    const int r = (W::ALONG ? n0 : k0) + row(), at = (W::ALONG ? k0 : n0) + across() * 32;
    const bool in = across() < ACROSS && r < height;
    const int64_t unit = (r * int64_t(width) + at) / UNIT;
    const uint32_t* const from = w + unit * (UNIT * BITS / 32);
    of.bias = 0;
    if (BITS % 4 == 0 && in && at < width && (size_t(w) | width / 8 * BITS) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < BITS / 4; ++i) {
        const uint4 v = reinterpret_cast<const uint4*>(from)[i];
        of.word[4 * i] = v.x, of.word[4 * i + 1] = v.y, of.word[4 * i + 2] = v.z;
        of.word[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < BITS; ++i)
        of.word[i] = in && at + i / (BITS / UNITS) * UNIT < width ? word_of(from, i) : 0;
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const bool there = in && at + u * UNIT < width;
      const int64_t group = (unit + u) * UNIT / GROUP;
      if constexpr (SCALE == 1) {
        of.scale[u] = there ? uint8_t(scales[group]) : 0;
      } else {
        of.scale[u] = there ? bits_of(scales, group) : 0;
        of.bias = there ? bits_of(biases, group) : 0;
      }
    }
  }
  static __device__ uint32_t bits_of(const char* from, int64_t i) {
    if constexpr (SCALE == 2) return reinterpret_cast<const uint16_t*>(from)[i];
    else return reinterpret_cast<const uint32_t*>(from)[i];
  }
  __device__ void write(uint32_t tile, const Ahead& of) const {
    if (across() >= ACROSS) return;
    const Elements elements(of);
#pragma unroll
    for (int i = 0; i < 32 / CHUNK; ++i)
      write_16(tile + W::place(row(), across() * (32 / CHUNK) + i), elements.chunk(of, i));
  }
  ELEMENTS
};
"""
# Of 16 bits, pairs of elements,
OF_16 = """
  struct Elements {
    Scales scales;
    uint32_t nan = 0;
    __device__ Elements(const Ahead& of) {
      uint32_t scale = of.scale[0];
      if constexpr (UNITS == 2) scale |= of.scale[1] << 8;
      scales.set(scale, 0, of.bias, 0, nan);
    }
    __device__ uint4 chunk(const Ahead& of, int i) const {
      uint32_t v[4];
      if constexpr (BITS == 4) {
        elements(scales, of.word[i], i, nan, v);
      } else if constexpr (BITS == 8) {
        uint32_t half[2][2];
        elements(scales, of.word[2 * i], 0, nan, half[0]);
        elements(scales, of.word[2 * i + 1], 0, nan, half[1]);
        v[0] = half[0][0], v[1] = half[0][1], v[2] = half[1][0], v[3] = half[1][1];
      } else {
        // 128 + q or in float16 1024 + q, as bits; then two products and sums that are rounded.
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t q = code<BITS>(of.word, i * 8 + 2 * j) |
                             code<BITS>(of.word, i * 8 + 2 * j + 1) << 16;
          const uint32_t exact = fma_2(q | two(BF16 ? 0x4300 : 0x6400), power(0),
                                       two(BF16 ? 0xc300 : 0xe400));
          v[j] = fma_2(times(exact, scales.factor[0][0]), power(0), scales.second[0]);
        }
      }
      return {v[0], v[1], v[2], v[3]};
    }
  };
"""
# of float32 each as it is.
OF_32 = """
  struct Elements {
    float scale[UNITS], bias;
    __device__ Elements(const Ahead& of) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u)
        scale[u] = MODE == 0   ? __uint_as_float(of.scale[u])
                   : MODE == 3 ? e4m3(of.scale[u])
                               : e8m0(of.scale[u]);
      bias = __uint_as_float(of.bias);
    }
    __device__ uint4 chunk(const Ahead& of, int i) const {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[j] = __float_as_uint(
            value_of(code<BITS>(of.word, i * 4 + j), scale[i * 4 / UNIT], bias));
      return {v[0], v[1], v[2], v[3]};
    }
  };
"""
CODE = """
// Element i of a stream of bits.
template <int BITS_> __device__ inline uint32_t code(const uint32_t* word, int i) {
  const int bit = i * BITS_, at = bit / 32;
  const uint32_t v = bit % 32 + BITS_ > 32 ? __funnelshift_r(word[at], word[at + 1], bit % 32)
                                           : word[at] >> (bit % 32);
  return v & ((1u << BITS_) - 1);
}
"""

# A product, as `GROUPED` wants it; and tiles of one matrix of x each, which need no order.
PRODUCT = """
template <class Tokens, class Ends>
__device__ inline void product(const Tokens& tokens, const uint32_t* w, const char* scales,
                               const char* biases, const Ends& end, int64_t n0, int64_t N,
                               int64_t K) {
  using X = Side<TOK, true>;
  using W = Side<ROWS, TRANSPOSE>;
  Weights<W> weights{w, scales, biases, int(n0), int(TRANSPOSE ? N : K), int(TRANSPOSE ? K : N)};
  const bool aligned = tokens.aligned();
  uint32_t begin[X::ROUNDS];  // of rows, counted in 16 bytes
#pragma unroll
  for (int i = 0; i < X::ROUNDS; ++i) {
    const int row = min(X::row() + i * X::STEP, tokens.count - 1);
    begin[i] = uint32_t(tokens.row(row) * K / CHUNK) + X::chunk();
  }
  auto copy_x = [&](uint32_t to, int block) {
    if (aligned)
      copy_chunks<X>(to, tokens.x, [&](int i, uint32_t& chunk) {
        chunk = begin[i] + block * (BK / CHUNK);
        return block * BK + X::chunk() * CHUNK < K && X::row() + i * X::STEP < tokens.count;
      });
    else
      copy_tile<X>(to, tokens.x, block * BK, int(K),
                   [&](int r) { return r < tokens.count ? tokens.row(r) : -1; });
  };
  const int blocks = int((K + BK - 1) / BK);
  Sums sum = {};
  constexpr int HALF = sizeof(T) == 2 && MT > 2 ? MT / 2 : MT;
  if (HALF < MT && tokens.count <= TOK / 2) multiply<X, W, HALF>(blocks, copy_x, weights, sum);
  else multiply<X, W, MT>(blocks, copy_x, weights, sum);
  store<X, W>(sum, [&](float v, int column) { return end(v * LAST, column); }, N - n0,
              [&](int row) { return row < tokens.count ? tokens.to(row) + n0 : nullptr; });
}
"""
DIRECT = """
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
direct(const T* x, const uint32_t* w, const void* scales, BIASES biases, WHOLE global_scale,
       int each, LEFTS lhs, RIGHTS rhs, T* y, int64_t N, int64_t K, int M, int64_t matrices,
       int experts) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int parts = (M + TOK - 1) / TOK, top = int(blockIdx.x) % parts * TOK;
  const int first = int(blockIdx.x) / parts * M + top, count = min(TOK, M - top);
  if (threadIdx.x < count) list[threadIdx.x] = first + threadIdx.x;
  __syncthreads();
  const Experts all{lhs, rhs, M, matrices, experts};
  product_of_tile(x, w, scales, biases, global_scale, each, y, N, K, all, all.expert(first), count,
                  list);
}
"""
