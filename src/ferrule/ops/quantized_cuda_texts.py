"""CUDA of products with quantized matrices: the kernels that `quantized_cuda` launches.

Of few rows of x, tensor cores get the weights as they lie in the checkpoint: rows of ``w`` are the
m of ``mma.m16n8k16``, rows of x (tokens) its n. A sum over k has no order, so each lane takes 16
contiguous bytes of a row and the elements of x that belong to them.

A block has ``ROWS`` rows of w. Its warps divide these and K (``WM`` and ``WK`` of them), and where
there are few rows, blocks of a cluster divide K as well; sums are added in a fixed order. What
warps read comes by ``cp.async``, ``STAGES`` blocks of 64 bytes of a row at a time; scales come for
four blocks at once, so that sectors of 32 bytes are read once. Warps wait only for those that
share their part of x.
"""

from __future__ import annotations

from .quantized_decode_cuda import with_steps

FEW = with_steps("""
constexpr int NT = TOK / 8;                 // tiles of 8 tokens
constexpr int WARPS = WM * WK;
constexpr int ROWS = TILES * 16;            // of w, of a block: WM warps have R tiles each, or less
constexpr int LEFT = TILES - (WM - 1) * R;  // tiles of the last warps
constexpr int PITCH = ROWS + 4;             // of sums in shared memory
constexpr int CHUNKS = 4 * OWN / 8;         // pieces of 16 bytes of a token's x in a block
constexpr int ROWS_OF_WARP = R * 16;
static_assert(!PAIRED || (R == 2 && LEFT == R), "warps have 16 rows of each half");
constexpr int X_STAGE = TOK * CHUNKS * 16, W_STAGE = R * 1024, S_STAGE = R * 16 * SCALES * ARRAYS;
constexpr int X_BYTES = WK * STAGES * X_STAGE, W_BYTES = WARPS * STAGES * W_STAGE;
constexpr int TABLES_AT = X_BYTES + W_BYTES + WARPS * 2 * S_STAGE;
constexpr bool ROOM = NT < 4;                // registers for more than sums
constexpr int PARTS = 2;                    // of scales, that are there at a time
// Blocks that share a multiprocessor's registers.
constexpr int RESIDENT = TOK == 64 || WARPS > 8 ? 1 : WARPS > 4 ? 2 : 4;
static_assert(STAGES >= 3, "a block is read while the one before is multiplied");
static_assert(STAGES <= AT_ONCE + 1, "two parts of scales are there at a time");

// Where piece c of a token's x lies in its block: lanes of a quad that read at once are neighbours,
// and two tokens are in other banks.
__device__ inline int place(int c, int token) {
  return (c % (OWN / 8) * 4 + c / (OWN / 8)) ^ ((token & 1) << 2);
}

// What a warp adds up: of a tile of tokens, of R tiles of rows of w, or LEFT, and of `part` of K.
// Where rows are PAIRED, its second tile is of rows of the second half of w.
template <class Tokens>
__device__ inline void sums_of_warp(const Tokens& tokens, const uint32_t* w, const char* scales,
                                    const char* biases, int64_t n0, int64_t N, int64_t K,
                                    uint2 part, bool full, float (&sum)[R][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int wm = warp / WK, wk = warp % WK;
  const int row_bytes = int(K) / (32 / BITS) * 4, scale_bytes = int(K) / GROUP * SCALE;
  const int64_t half = N / 2, end_of_rows = PAIRED ? half : N;
  const int64_t first = min(PAIRED ? n0 / 2 + wm * 16 : n0 + wm * ROWS_OF_WARP, end_of_rows - 1);
  const int rows = int(min(end_of_rows - first, int64_t(PAIRED ? 16 : full ? R * 16 : LEFT * 16)));
  auto row_of = [&](int row) {  // of this warp, counted from the first one
    return PAIRED ? min(row % 16, rows - 1) + row / 16 * int(half) : min(row, rows - 1);
  };
  const char* const w_from = reinterpret_cast<const char*>(w) + first * row_bytes;
  const char* const s_from = scales + first * scale_bytes;
  const char* const b_from = ARRAYS == 2 ? biases + first * scale_bytes : nullptr;

  const uint32_t begin_x = shared_address(shared) + wk * STAGES * X_STAGE;
  uint32_t begin_w = shared_address(shared) + X_BYTES + warp * STAGES * W_STAGE + lane * 16;
  const uint32_t begin_s = shared_address(shared) + X_BYTES + W_BYTES + warp * 2 * S_STAGE;

  // 16 bytes at once, where all begins at multiples of that.
  int aligned = tokens.aligned() && (size_t(w_from) | row_bytes) % 16 == 0;
  int s_alignment = (int(size_t(s_from)) | scale_bytes | SCALES |
                     (ARRAYS == 2 ? int(size_t(b_from)) : 0)) & 15;
  keep(aligned), keep(s_alignment);

  uint32_t begin = part.x, end = part.y;
  keep(begin), keep(end);

  // Of x, the threads of a group of warps copy so many pieces each, whose tokens are even numbers
  // apart.
  constexpr int GROUP_THREADS = WM * 32;
  constexpr int ROUNDS = (TOK * CHUNKS + GROUP_THREADS - 1) / GROUP_THREADS;
  const int piece = wm * 32 + lane, x_k = piece % CHUNKS * 8;
  uint32_t x_to =
      begin_x + (piece / CHUNKS * CHUNKS + place(piece % CHUNKS, piece / CHUNKS)) * 16;
  uint32_t x_from[ROUNDS];  // counted in 16 bytes
  int x_rounds = 0;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int token = (piece + i * GROUP_THREADS) / CHUNKS;
    x_rounds += token < tokens.count;
    x_from[i] = uint32_t(tokens.row(min(token, tokens.count - 1)) * K / 8) + x_k / 8 +
                begin * (BLOCK / 8);
    if constexpr (ROOM) keep(x_from[i]);
  }
  keep(x_rounds);
  int off[R][2];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      off[r][h] = row_of(r * 16 + h * 8 + g) * row_bytes;
      if constexpr (ROOM) keep(off[r][h]);
    }
  }

  // Where the next block comes from and goes to: of what lies behind a row, nothing is read.
  const char* w_next = w_from + t * 16 + int64_t(begin) * 64;
  int w_left = row_bytes - t * 16 - int(begin * 64), x_left = int(K) - x_k - int(begin * BLOCK);
  uint32_t next = begin, to_slot = 0;
  keep(x_to), keep(begin_w), keep(w_left), keep(x_left);
  auto issue = [&] {
    if (next < end) {
      const uint32_t w_slot = begin_w + to_slot * W_STAGE, x_slot = x_to + to_slot * X_STAGE;
      if (aligned) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (r < LEFT || full)
              copy_16(w_slot + (r * 2 + h) * 512, w_next + off[r][h], w_left > 0 ? 16 : 0);
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
          copy_16_if(i < x_rounds, x_slot + i * GROUP_THREADS * 16,
                     reinterpret_cast<const uint4*>(tokens.x) + x_from[i], x_left > 0 ? 16 : 0);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < R * 2 * 4; ++i) {
          const int row = row_of(i / 4 * 8 + g), at = i % 4 * 4;
          copy_word(w_slot + i / 4 * 512 + at, w_next + row * row_bytes + at, w_left > at ? 4 : 0);
        }
#pragma unroll 1
        for (int i = 0; i < ROUNDS * 8; ++i) {
          const int token = (piece + i / 8 * GROUP_THREADS) / CHUNKS;
          const int k = int(next) * BLOCK + x_k + i % 8;
          if (i / 8 < x_rounds)
            write_2(x_slot + i / 8 * GROUP_THREADS * 16 + i % 8 * 2,
                    k < K ? reinterpret_cast<const uint16_t*>(tokens.x)[tokens.row(token) * K + k]
                          : 0);
        }
      }
      COPY_SCALES
      w_next += 64, w_left -= 64, x_left -= BLOCK;
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) x_from[i] += BLOCK / 8;
      ++next;
      to_slot = to_slot + 1 == STAGES ? 0 : to_slot + 1;
    }
    commit();
  };

  const uint32_t tables = shared_address(shared) + TABLES_AT, column = lane * 4;
  int barrier_id = 1 + wk;
  keep(barrier_id);
  uint32_t s_read = begin_s + g * SCALES + (BLOCK % GROUP ? 0 : t * OWN / GROUP * SCALE);
  uint32_t x_read = begin_x + (g * CHUNKS + t) * 16, x_flip = (g & 1) * 64;
  keep(s_read), keep(x_read), keep(x_flip);
  uint32_t nan[R] = {}, nan_of_row[R][2] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) issue();
  uint32_t words[R][2][4], bytes[R][ARRAYS][2];
  auto read = [&](auto tiles, uint32_t block, uint32_t slot) {
    constexpr int R = decltype(tiles)::N;
    READ_BLOCK
  };
  // Multiplies the block that was read, and reads the next one.
  uint32_t slot = 0;
  auto multiply = [&](auto tiles, uint32_t block) {
    constexpr int R = decltype(tiles)::N;
    const uint32_t x_slot = x_read + slot * X_STAGE;
    const uint32_t x_at[2] = {x_slot + x_flip, x_slot - x_flip};  // of even pieces, of odd ones
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    Scales of[R];
    if constexpr (TABLES) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          of[r].factor[h][0] = look_up(bytes[r][0][h], 0, column, tables + 128);
          if constexpr (MODE == NVFP4)
            of[r].factor[h][1] = look_up(bytes[r][0][h], 1, column, tables + 128);
        }
      }
    } else {
      SET_SCALES
    }
    uint32_t now[R][2][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) now[r][h][i] = words[r][h][i];
      }
    }
    read(tiles, block + 1, slot);  // while this one is multiplied; behind the last it is not used
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[R][2][PAIRS];
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (i < FIRST_LOOKED_UP) {
            of[r].decode(now[r][h][i], i, h, pair[r][h], nan_of_row[r][h]);
          } else {
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
              const uint32_t codes = look_up(now[r][h][i], j, column, tables);
              pair[r][h][j] = times(codes, of[r].factor_of(i, h));
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        uint32_t b[PAIRS];
        if constexpr (BITS == 4) {
          const uint4 v = read_16(x_at[i % 2] + (n * 8 * CHUNKS + i * 4) * 16);
          if (i < FIRST_LOOKED_UP) {
            b[0] = permute(v.x, v.z, 0x5410), b[1] = permute(v.x, v.z, 0x7632);
            b[2] = permute(v.y, v.w, 0x5410), b[3] = permute(v.y, v.w, 0x7632);
          } else {
            b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
          }
        } else {
          const uint2 v = read_8(x_at[i / 2] + (n * 8 * CHUNKS + i / 2 * 4) * 16 + i % 2 * 8);
          b[0] = permute(v.x, v.y, 0x5410), b[1] = permute(v.x, v.y, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j += 2) {
#pragma unroll
          for (int r = 0; r < R; ++r)
            mma(sum[r][n], pair[r][0][j], pair[r][1][j], pair[r][0][j + 1], pair[r][1][j + 1], b[j],
                b[j + 1]);
        }
      }
    }
  };
  wait<STAGES - 2>();
  barrier<GROUP_THREADS>(barrier_id);
  read(Number<R>(), begin, 0);
#pragma unroll 1
  for (uint32_t block = begin; block < end; ++block) {
    wait<STAGES - 3>();
    barrier<GROUP_THREADS>(barrier_id);
    issue();
    if (full) multiply(Number<R>(), block);
    else multiply(Number<LEFT>(), block);
  }

  // A row with a NaN among its scales or codes is NaN, whatever x is.
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t bits = nan[r] & NAN_OF[h];
      if constexpr (MODE == MXFP8) bits |= nan_of_row[r][h] & 0x80808080;
      if (!TABLES && MODE != AFFINE && any_of_quad(bits))
        for (int n = 0; n < NT; ++n) sum[r][n][h * 2] = sum[r][n][h * 2 + 1] = __int_as_float(~0);
    }
  }
}

// Products of one tile of tokens and ROWS rows of w from `n0` on. `tokens` says how many there are
// (`count`), which rows of `x` they are (`row`), and where their y lies (`to`); `end` makes
// elements of y of sums, and counts rows from `n0`.
template <class Tokens, class Ends>
__device__ inline void product(const Tokens& tokens, const uint32_t* w, const char* scales,
                               const char* biases, const Ends& end, int64_t n0, int64_t N,
                               int64_t K) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WK, wk = warp % WK;
  const bool full = LEFT == R || wm < WM - 1;  // the warp has R tiles
  float sum[R][NT][4] = {};
  const uint2 part = {first_of_part(wk, K), first_of_part(wk + 1, K)};
  sums_of_warp(tokens, w, scales, biases, n0, N, K, part, full, sum);
  wait<0>();
  __syncthreads();  // what is in shared memory has been read
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * 8 + lane % 4 * 2 + i % 2;
        const int row = wm * ROWS_OF_WARP + r * 16 + i / 2 * 8 + lane / 4;
        if (r < LEFT || full) sums[(wk * TOK + token) * PITCH + row] = sum[r][n][i];
      }
    }
  }
  __syncthreads();
  if constexpr (PAIRED) {
    for (int i = threadIdx.x; i < tokens.count * ROWS / 2; i += WARPS * 32) {
      const int token = i / (ROWS / 2), column = i % (ROWS / 2);
      const float* const at = sums + token * PITCH + column / 16 * 32 + column % 16;
      float one = at[0], other = at[16];
#pragma unroll
      for (int k = 1; k < WK; ++k) one += at[k * TOK * PITCH], other += at[k * TOK * PITCH + 16];
      if (n0 / 2 + column < N / 2)
        tokens.to(token)[n0 / 2 + column] = end(one * LAST, other * LAST, token);
    }
  } else {
    // Sums of warps, then of blocks, in their order.
    auto store = [&](int token, int row, float value) {
      if (n0 + row < N) tokens.to(token)[n0 + row] = end(value * LAST, row);
    };
    for (int i = threadIdx.x; i < tokens.count * ROWS; i += WARPS * 32) {
      const int token = i / ROWS, row = i % ROWS;
      float* const at = sums + token * PITCH + row;
      float all = at[0];
#pragma unroll
      for (int k = 1; k < WK; ++k) all += at[k * TOK * PITCH];
      if (gridDim.y == 1) store(token, row, all);
      else at[0] = all;
    }
    if (gridDim.y > 1) {
      cluster_barrier();
      for (int i = blockIdx.y * WARPS * 32 + threadIdx.x; i < tokens.count * ROWS;
           i += gridDim.y * WARPS * 32) {
        const int token = i / ROWS, row = i % ROWS;
        float all = 0;
#pragma unroll
        for (int block = 0; block < int(gridDim.y); ++block)
          all += read_of(block, sums + token * PITCH + row);
        store(token, row, all);
      }
      cluster_barrier();  // none ends while another reads its sums
    }
  }
}
""")

DENSE = """
struct Dense {
  const T* x;
  T* y;
  int64_t K, N;
  int count;
  __device__ int64_t row(int token) const { return token; }
  __device__ T* to(int token) const { return y + token * N; }
  __device__ bool aligned() const { return (size_t(x) | K * sizeof(T)) % 16 == 0; }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
dense(const T* x, const uint32_t* w, const void* scales, BIASES biases, WHOLE global_scale,
      int64_t global_scales, OFFSET offset, T* y, int64_t N, int64_t K, int count) {
  const int64_t n0 = blockIdx.x * int64_t(ROWS);
  ask_ahead(w, scales, n0, N, K);
  fill_tables(shared_address(shared) + TABLES_AT);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const auto end = ends<ROWS, WARPS * 32>(global_scale, global_scales, offset, n0, N);
  product(Dense{x, y, K, N, count}, w, static_cast<const char*>(scales), bytes_of(biases), end, n0,
          N, K);
}
"""

# All weights, a word of each thread at a time: lanes that are neighbours read and write neighbours.
WEIGHTS = """
constexpr int WORDS = 4;  // of a thread

extern "C" __global__ void __launch_bounds__(256)
weights(const uint32_t* w, const void* scales, BIASES biases, T* out, int64_t words) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t first = blockIdx.x * int64_t(256 * WORDS) + threadIdx.x;
  uint32_t word[WORDS], scale[WORDS], bias[WORDS] = {};
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int64_t at = min(first + i * 256, words - 1), group = at / (GROUP / PER_WORD);
    word[i] = word_of(w, at);
    if constexpr (MODE == AFFINE) {
      scale[i] = static_cast<const uint16_t*>(scales)[group];
      bias[i] = reinterpret_cast<const uint16_t*>(bytes_of(biases))[group];
    } else {
      scale[i] = static_cast<const uint8_t*>(scales)[group];
    }
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int64_t at = first + i * 256;
    uint32_t nan = 0, pair[PAIRS];
    Scales of;
    of.set(scale[i], 0, bias[i], 0, nan);
    elements(of, word[i], 0, nan, pair);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
      if constexpr (MODE == NVFP4) pair[j] = times(pair[j], power(BF16 ? 8 : 7));
    if (at < words) {
      if constexpr (BITS == 4)
        reinterpret_cast<uint4*>(out)[at] = {pair[0], pair[1], pair[2], pair[3]};
      else reinterpret_cast<uint2*>(out)[at] = {pair[0], pair[1]};
    }
  }
}
"""

# What cuBLAS multiplies its sums by, and what was in y before.
FACTORS = """
extern "C" __global__ void factors(const float* factor, float* two) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  two[0] = *factor / RANGE;
  two[1] = 0;
}
"""

SCALED = """
extern "C" __global__ void __launch_bounds__(256)
scaled(const float* sums, WHOLE factor, int64_t factors, OFFSET added, T* y, int64_t N,
       int64_t size) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x, row = i % N;
  if (i >= size) return;
  const float* const by = or_null<float>(factor);
  const T* const bias = or_null<T>(added);
  const float sum = by ? sums[i] * by[factors == 1 ? 0 : row] : sums[i];
  y[i] = T(bias ? sum + float(bias[row]) : sum);
}
"""

# The same of any format and to any T, by what `dequantize` says.
VALUE_OF = """
__device__ inline float value_of(uint32_t q, float scale, float bias) {
  if constexpr (MODE == 0) return float(T(__fadd_rn(float(T(__fmul_rn(float(q), scale))), bias)));
  if constexpr (MODE == 2) return e4m3(q) * scale;
  const float twice = float(0xC8643210u >> (4 * (q & 7)) & 15);
  return (q & 8 ? -twice : twice) * (scale * 0.5f);
}
"""

# A thread takes 8 elements.
ANY_WEIGHTS = """
extern "C" __global__ void __launch_bounds__(256)
weights(const uint8_t* w, const void* scales, BIASES biases, T* out, int64_t runs) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t run = blockIdx.x * int64_t(256) + threadIdx.x, group = run * 8 / GROUP;
  if (run >= runs) return;
  uint64_t bits = 0;
#pragma unroll
  for (int i = 0; i < BITS; ++i) bits |= uint64_t(w[run * BITS + i]) << (8 * i);
  float scale, bias = 0;
  if constexpr (MODE == 0) {
    scale = float(static_cast<const T*>(scales)[group]);
    bias = float(reinterpret_cast<const T*>(biases)[group]);
  } else {
    const uint32_t code = static_cast<const uint8_t*>(scales)[group];
    scale = MODE == 3 ? e4m3(code) : e8m0(code);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out[run * 8 + i] = T(value_of(uint32_t(bits >> (i * BITS)) & ((1u << BITS) - 1), scale, bias));
}
"""

# E4M3 without infinities, and powers of two, 2^-127 among them, as floats.
FLOATS_OF_BYTES = """
__device__ inline float e4m3(uint32_t code) {
  if ((code & 127) == 127) return __int_as_float(~0);
  const float magnitude = __int_as_float((code & 127) << 20) * 0x1p120f;
  return code & 128 ? -magnitude : magnitude;
}
__device__ inline float e8m0(uint32_t code) {
  return __int_as_float(code == 255 ? ~0u : code == 0 ? 0x00400000u : code << 23);
}
"""
