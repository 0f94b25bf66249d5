"""CUDA that makes numbers of codes: pairs of T in registers, as exact as `dequantize` has them.

`GIVEN` has what may be absent, `ENDS`, `ENDS_OF_ROWS` what is made of sums, `DECODE` the formats,
`TABLES` what is looked up instead, `AHEAD` what products read ahead. Products of nvfp4 lack a power
of two, `LAST`, which sums get at the end.
"""

from __future__ import annotations

MODES = {"affine": 0, "mxfp4": 1, "mxfp8": 2, "nvfp4": 3}

# What some modes have, where others have 0.
GIVEN = """
template <int N_> struct Number { static constexpr int N = N_; };
__device__ inline const char* bytes_of(const void* p) { return static_cast<const char*>(p); }
__device__ inline const char* bytes_of(int64_t) { return nullptr; }
__device__ inline float whole(const float* p, int i) { return p[i] / 2688; }
__device__ inline float whole(int64_t, int) { return 1; }

// What is made of a sum.
struct Scaled {
  float by;
  __device__ T operator()(float sum, int) const { return T(sum * by); }
};
// A word, wherever it begins: matrices of bytes may begin anywhere.
__device__ inline uint32_t word_of(const uint32_t* w, int64_t i) {
  if (size_t(w) % 4 == 0) return w[i];
  const uint8_t* const at = reinterpret_cast<const uint8_t*>(w + i);
  return at[0] | at[1] << 8 | at[2] << 16 | uint32_t(at[3]) << 24;
}
// Copies one to shared memory; `size` is 4 or 0.
__device__ inline void copy_word(uint32_t to, const char* from, int size) {
  if (size_t(from) % 4 == 0) {
    copy_4(to, from, size);
  } else {
    for (int i = 0; i < 4; ++i) write_1(to + i, size ? uint8_t(from[i]) : 0);
  }
}
"""

# What is made of sums with rows of one matrix, from row n0 on: they are multiplied by its scale,
ENDS = """
template <int ROWS, int THREADS>
__device__ inline Scaled ends(WHOLE global_scale, int64_t, OFFSET, int64_t, int64_t) {
  return {whole(global_scale, 0)};
}
// The same of one row.
struct Row {
  float by;
  __device__ T operator()(float sum) const { return T(sum * by); }
};
__device__ inline Row row_of_ends(WHOLE global_scale, int64_t, OFFSET, int64_t) {
  return {whole(global_scale, 0)};
}
"""
# or by one scale for each row, where there are scales, and something is added. Scales come to
# shared memory on the way.
OR_NULL = """
template <class P> __device__ inline const P* or_null(const P* p) { return p; }
template <class P> __device__ inline const P* or_null(int64_t) { return nullptr; }
"""
ENDS_OF_ROWS = (
    OR_NULL
    + """
struct OfRows {
  const float* scale;
  const T* bias;
  __device__ T operator()(float sum, int row) const {
    const float scaled = scale ? sum * scale[row] : sum;
    return T(bias ? scaled + float(bias[row]) : scaled);
  }
};
template <int ROWS, int THREADS>
__device__ inline OfRows ends(WHOLE factor, int64_t factors, OFFSET added, int64_t n0, int64_t N) {
  __shared__ float of_row[ROWS];
  const float* const scale = or_null<float>(factor);
  const T* const bias = or_null<T>(added);
  if (threadIdx.x < THREADS)
    for (int i = threadIdx.x; i < ROWS && n0 + i < N; i += THREADS) {
      if (scale) copy_4(shared_address(of_row + i), scale + (factors == 1 ? 0 : n0 + i), 4);
      if (bias && i % 16 == 0) prefetch(bias + n0 + i);
    }
  return {scale ? of_row : nullptr, bias ? bias + n0 : nullptr};
}
struct Row {
  float by, plus;
  bool biased;
  __device__ T operator()(float sum) const { return T(biased ? sum * by + plus : sum * by); }
};
__device__ inline Row row_of_ends(WHOLE factor, int64_t factors, OFFSET added, int64_t row) {
  const float* const scale = or_null<float>(factor);
  const T* const bias = or_null<T>(added);
  return {scale ? scale[factors == 1 ? 0 : row] : 1, bias ? float(bias[row]) : 0, bias != nullptr};
}
"""
)

# Codes to pairs of T: a word's elements j and j + PER_WORD / 2 are pair j. Shifts to the left are
# for the FMA pipe to do, as products; of the integer pipe a weight takes about one instruction.
DECODE = """
constexpr int AFFINE = 0, MXFP4 = 1, MXFP8 = 2, NVFP4 = 3;
constexpr int PER_WORD = 32 / BITS, PAIRS = PER_WORD / 2;
constexpr int OWN = 128 / BITS;    // elements in a lane's 16 bytes of a row
constexpr int BLOCK = 4 * OWN;     // in 64 bytes
constexpr int AT_ONCE = 4;         // blocks whose scales are copied at once
constexpr int SCALE = MODE == AFFINE ? 2 : 1;                       // bytes of a scale
constexpr int ARRAYS = MODE == AFFINE ? 2 : 1;                      // scales, biases
constexpr int SCALES = AT_ONCE * BLOCK / GROUP * SCALE;             // bytes of a row's, at once

constexpr uint32_t NONE = 0x80008000;  // -0.0, which added changes nothing
constexpr uint32_t two(uint32_t bits) { return bits << 16 | bits; }
// 2^n, a normal number.
constexpr uint32_t power(int n) {
  return two(BF16 ? uint32_t(n + 127) << 7 : uint32_t(n + 15) << 10);
}

__device__ inline uint32_t times(uint32_t a, uint32_t b) { return fma_2(a, b, NONE); }
// e2m1, times 2^-126 or in float16 2^-14: exponents below the least are subnormals in both.
__device__ inline void e2m1(uint32_t w, uint32_t* pair) {
  constexpr int UP = BF16 ? 6 : 9;
  constexpr uint32_t VALUE = two(7 << UP), SIGN = two(0x8000);
  const uint32_t at[4] = {w << UP, w << (UP - 4), UP < 8 ? w >> (8 - UP) : w << 1, w >> (12 - UP)};
  if constexpr (BF16) {
    // Bit 7 of each half is another's sign, and within the mask.
    const uint32_t odd = masked(w, 0x80808080), even = masked(w << 4, 0x80808080);
    pair[0] = choose(VALUE, at[0], even << 8);
    pair[1] = choose(VALUE, at[1], odd << 8);
    pair[2] = choose(VALUE, at[2], even);
    pair[3] = choose(VALUE, at[3], odd);
  } else {
    const uint32_t sign[4] = {w << 12, w << 8, w << 4, w};
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = (sign[j] & SIGN) | (at[j] & VALUE);
  }
}

// e4m3, times 2^-120 or in float16 2^-8, of bytes 0 and 2 and of bytes 1 and 3.
__device__ inline void e4m3(uint32_t w, uint32_t* pair) {
  constexpr int UP = BF16 ? 4 : 7;
  constexpr uint32_t VALUE = two(0x7f << UP), SIGN = two(0x8000);
  pair[0] = ((w << UP) & VALUE) | ((w << 8) & SIGN);
  pair[1] = ((w >> (8 - UP)) & VALUE) | (w & SIGN);
}

__device__ inline uint32_t copies(uint32_t w, int half) {
  return permute(w, w, half ? 0x3232 : 0x1010);
}

// What two rows of a tile, one 8 below the other, have for a lane's elements of a block.
struct Scales {
  uint32_t factor[2][MODE == NVFP4 ? 2 : 1];
  uint32_t first[2], second[2];  // what codes get before it

  // From the bytes of both rows' scales and biases. `nan` gets bits for those that are NaN.
  __device__ void set(uint32_t row, uint32_t below, uint32_t bias, uint32_t bias_below,
                      uint32_t& nan) {
    if constexpr (MODE == NVFP4) {
      const uint32_t bytes = permute(row, below, 0x5410);
      nan |= (bytes & 0x7f7f7f7f) + 0x01010101;
      uint32_t pair[2];
      e4m3(bytes, pair);
      constexpr uint32_t up = power(BF16 ? 119 : 15);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = times(pair[i], up);
        if constexpr (BF16) pair[i] = times(pair[i], up);
        factor[0][i] = copies(pair[i], 0);
        factor[1][i] = copies(pair[i], 1);
      }
    } else if constexpr (MODE == AFFINE) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h][0] = copies(h ? below : row, 0);
        if constexpr (BITS == 4 && BF16) first[h] = times(factor[h][0], two(0xc180));  // -16
        second[h] = copies(h ? bias_below : bias, 0);
      }
    } else {
      const uint32_t bytes = permute(row, below, 0x5410);
      nan |= bytes + 0x00010001;  // bits 8 and 24
      if constexpr (BF16) {
        // 2^-127 is subnormal.
        const uint32_t normal = (bytes + 0x00ff00ff) & 0x01000100;
        const uint32_t powers = (bytes << 7) + (0x00400040 - (normal >> 2));
        factor[0][0] = copies(powers, 0);
        factor[1][0] = copies(powers, 1);
      } else {
        // What float16 has not is a product of three, of which only the last rounds.
        constexpr int LEAST = BITS == 4 ? -14 : -26, MOST = BITS == 4 ? 31 : 33;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = int(bytes >> (16 * h) & 255) - 127 + (BITS == 4 ? 14 : 8);
          const int in = min(max(n, LEAST), MOST), last = min(max(in, -24), 15);
          const int half = (in - last) >> 1;
          first[h] = two(half + 15) << 10;
          second[h] = two(in - last - half + 15) << 10;
          factor[h][0] = last < -14 ? two(1u << ((last + 24) & 15)) : two((last + 15) << 10);
        }
      }
    }
  }

  // Of word i of a lane's four.
  __device__ uint32_t factor_of(int i, int h) const {
    return factor[h][MODE == NVFP4 ? i / 2 : 0];
  }

  // Word i of a lane's four, of the upper or the lower row. `nan` gets bits for elements.
  __device__ void decode(uint32_t w, int i, int h, uint32_t (&pair)[PAIRS], uint32_t& nan) const {
    if constexpr (MODE == AFFINE) {
      if constexpr (BITS == 4 && BF16) {
        // 16 + q; then (16 + q) s - 16 s is rounded once, as q s is.
        const uint32_t high = w >> 8;
        const uint32_t at[4] = {w << 3, w >> 1, high << 3, high >> 1};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          pair[j] = fma_2((at[j] & two(0x0078)) | two(0x4180), factor[h][0], first[h]);
      } else if constexpr (BITS == 4) {
        const uint32_t high = w >> 8;  // 1024 + q, 1024 + 16 q
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t at = j < 2 ? w : high;
          const uint32_t t = (at & (j % 2 ? two(0x00f0) : two(0x000f))) | two(0x6400);
          const uint32_t q = j % 2 ? fma_2(t, power(-4), two(0xd400))   // -64
                                   : fma_2(t, power(0), two(0xe400));   // -1024
          pair[j] = times(q, factor[h][0]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t at = j ? w >> 8 : w;
          uint32_t q;
          if constexpr (BF16) {
            // bfloat16 has 128 + the lower seven bits; the eighth comes as 2 or 0, times 64.
            q = fma_2((at & two(0x007f)) | two(0x4300), power(0), two(0xc300));
            q = fma_2((j ? w >> 1 : w << 7) & two(0x4000), power(6), q);
          } else {
            q = fma_2((at & two(0x00ff)) | two(0x6400), power(0), two(0xe400));
          }
          pair[j] = times(q, factor[h][0]);
        }
      }
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) pair[j] = fma_2(pair[j], power(0), second[h]);
    } else {
      if constexpr (MODE == MXFP8) {
        nan |= (w & 0x7f7f7f7f) + 0x01010101;
        e4m3(w, pair);
      } else {
        e2m1(w, pair);
      }
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        if constexpr (MODE != NVFP4) {
          if constexpr (BF16) {
            pair[j] = times(pair[j], power(BITS == 4 ? 126 : 120));
          } else {
            pair[j] = times(times(pair[j], first[h]), second[h]);
          }
        }
        pair[j] = times(pair[j], factor_of(i, h));
      }
    }
  }
};

// What sums get at the end: what exact products of codes and scales have not.
constexpr float LAST = MODE != NVFP4 ? 1 : BF16 ? 256 : 128;
// The bits of the two rows in what `set` says of NaN.
constexpr uint32_t NAN_OF[2] = {MODE == NVFP4 ? 0x00008080u : MODE == AFFINE ? 0u : 0x00000100u,
                                MODE == NVFP4 ? 0x80800000u : MODE == AFFINE ? 0u : 0x01000000u};
"""

# Word i of four, of the upper row, as elements in their order; NaN where they or their scale are.
ELEMENTS = """
__device__ inline void elements(const Scales& of, uint32_t w, int i, uint32_t nan,
                                uint32_t (&out)[PAIRS]) {
  uint32_t pair[PAIRS], nan_of_word = 0;
  of.decode(w, i, 0, pair, nan_of_word);
  if (MODE == MXFP8 && nan_of_word & 0x80808080) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) pair[j] |= (nan_of_word >> (8 * j + 7) & 0x00010001) * 0xffff;
  }
  if (nan & (MODE == NVFP4 && i < 2 ? 0x80 : MODE == NVFP4 ? 0x8000 : NAN_OF[0])) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) pair[j] = ~0u;
  }
#pragma unroll
  for (int j = 0; j < PAIRS / 2; ++j) {
    out[j] = permute(pair[2 * j], pair[2 * j + 1], 0x5410);
    out[PAIRS / 2 + j] = permute(pair[2 * j], pair[2 * j + 1], 0x7632);
  }
}
"""

# What two codes of a byte are, and a scale, in shared memory: a load takes the place of many
# instructions. Each lane has its own column, so that no two read from one bank.
TABLES = """
// Of a byte 128 bytes for codes and 128 for a scale: float16 has not all scales of mxfp4.
constexpr bool TABLES = TABLES_MAY_BE && (MODE == NVFP4 || MODE == MXFP4 && BF16);
// Of a lane's four words those from this one on are looked up: loads have a limit, too.
constexpr int FIRST_LOOKED_UP = !TABLES ? 4 : MODE == NVFP4 ? 3 : 2;

__device__ inline uint32_t codes_of(uint32_t byte) {
  constexpr int UP = BF16 ? 6 : 9;
  const uint32_t pair = (byte & 7) << UP | (byte & 8) << 12 | (byte & 0x70) << (UP + 12) |
                        (byte & 128) << 24;
  return MODE == NVFP4 ? pair : times(pair, power(BF16 ? 126 : 14));
}
__device__ inline uint32_t scale_of(uint32_t byte) {
  if (MODE == MXFP4) return byte == 255 ? ~0u : byte == 0 ? two(0x0040) : two(byte << 7);
  if ((byte & 127) == 127) return ~0u;
  const float value = __int_as_float((byte & 127) << 20 | byte >> 7 << 31);  // times 2^-120
  const T by_power = T(value * 0x1p120f * (BF16 ? 0x1p118f : 128.0f));
  return two(*reinterpret_cast<const uint16_t*>(&by_power));
}
__device__ inline void fill_tables(uint32_t at) {
  if constexpr (TABLES) {
    for (uint32_t i = threadIdx.x; i < 512; i += WM * WK * 32) {
      const uint32_t v = i < 256 ? codes_of(i) : scale_of(i - 256);
#pragma unroll
      for (int piece = 0; piece < 8; ++piece)
        write_16(at + i % 256 * 256 + i / 256 * 128 + (piece + i) % 8 * 16, {v, v, v, v});
    }
    __syncthreads();
  }
}
// What byte j of a word is, in a lane's column.
__device__ inline uint32_t look_up(uint32_t w, int j, uint32_t column, uint32_t at) {
  return read_4(permute(w, column, 0x5504 | j << 4) + at);
}
"""

# What a product reads before it multiplies: WM warps divide the rows, R tiles of 16 each.
AHEAD = """
// Pieces of `UNIT` bytes of rows of scales, from byte `begin` of each on: zeros behind its `size`.
template <int R, int UNIT, class Row>
__device__ inline void copy_scales(uint32_t to, const char* from, int begin, int size,
                                   const Row& row_of, int lane) {
  constexpr int PIECES = SCALES / UNIT;
#pragma unroll 4
  for (int i = lane; i < R * 16 * PIECES; i += 32) {
    const int row = i / PIECES, at = i % PIECES * UNIT;
    const bool in = begin + at < size;
    const char* const piece = from + (row_of(row) * size + (in ? begin + at : 0));
    const uint32_t place = to + i * UNIT;
    if constexpr (UNIT == 16) copy_16_again(place, piece, in ? 16 : 0);
    else if constexpr (UNIT == 4) copy_4(place, piece, in ? 4 : 0);
    else if constexpr (UNIT == 2)
      write_2(place, in ? *reinterpret_cast<const uint16_t*>(piece) : 0);
    else write_1(place, in ? *reinterpret_cast<const uint8_t*>(piece) : 0);
  }
}

// Blocks of 64 bytes of a row are divided among groups of warps: where those of group `wk` begin.
__device__ inline uint32_t first_of_part(int wk, int64_t K) {
  const uint32_t blocks = (uint32_t(K) + BLOCK - 1) / BLOCK;
  return uint64_t(blocks) * (blockIdx.y * WK + wk) / (gridDim.y * WK);
}

// Has what warps read first come to the L2: that may be before the kernel ahead has ended, for what
// it writes is in the L2, too.
__device__ inline void ask_ahead(const uint32_t* w, const void* scales, int64_t n0, int64_t N,
                                 int64_t K) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row_bytes = K / (32 / BITS) * 4, scale_bytes = K / GROUP * SCALE;
  const int64_t begin = first_of_part(warp % WK, K), first = n0 + warp / WK * R * 16;
#pragma unroll
  for (int i = lane; i < R * 16 * 2; i += 32) {
    const int64_t row = first + i % (R * 16), at = begin * 64 + i / (R * 16) * 128;
    if (row < N && at < row_bytes)
      prefetch(reinterpret_cast<const char*>(w) + row * row_bytes + at);
  }
  const int64_t row = first + lane, at = begin / AT_ONCE * SCALES;
  if (lane < R * 16 && row < N && at < scale_bytes)
    prefetch(static_cast<const char*>(scales) + row * scale_bytes + at);
}
"""

# In both kernels: asks for the scales of a block and some behind it, of which ``PARTS`` are there;
_COPY_SCALES = """if (next % AT_ONCE == 0 || next == begin) {
  const int part = next / AT_ONCE;
#pragma unroll 1
  for (int a = 0; a < ARRAYS; ++a) {
    const char* const from = a ? b_from : s_from;
    const uint32_t to = begin_s + PLACE_TO_COPY * S_STAGE + a * (S_STAGE / ARRAYS);
    auto copy = [&](auto unit) {
      copy_scales<R, decltype(unit)::N>(to, from, part * SCALES, scale_bytes, row_of, lane);
    };
    if (SCALES % 16 == 0 && s_alignment == 0) copy(Number<SCALES % 16 == 0 ? 16 : 4>());
    else if (s_alignment % 4 == 0) copy(Number<4>());
    else if (s_alignment % 2 == 0) copy(Number<2>());
    else copy(Number<SCALE>());
  }
}"""
# and reads what a lane has of a block.
_READ_BLOCK = """const uint32_t s_at = s_read + PLACE_TO_READ * S_STAGE +
                      (BLOCK % GROUP ? (block % AT_ONCE * BLOCK + t * OWN) / GROUP * SCALE
                                     : block % AT_ONCE * (BLOCK / GROUP * SCALE));
const uint32_t w_at = begin_w + slot * W_STAGE;
#pragma unroll
for (int r = 0; r < R; ++r) {
#pragma unroll
  for (int a = 0; a < ARRAYS; ++a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = s_at + a * (S_STAGE / ARRAYS) + (r * 16 + h * 8) * SCALES;
      bytes[r][a][h] = MODE == AFFINE || MODE == NVFP4 ? read_2(from) : read_1(from);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 v = read_16(w_at + (r * 2 + h) * 512);
    words[r][h][0] = v.x, words[r][h][1] = v.y, words[r][h][2] = v.z, words[r][h][3] = v.w;
  }
}"""
# Then its scales are numbers.
_SET_SCALES = """#pragma unroll
for (int r = 0; r < R; ++r)
  of[r].set(bytes[r][0][0], bytes[r][0][1], bytes[r][ARRAYS - 1][0], bytes[r][ARRAYS - 1][1],
            nan[r]);"""


# What both kernels of `wgmma` do besides. Whether copies of 16 bytes are possible;
_ALIGNMENT = """aligned = (size_t(w_from) | row_bytes) % 16 == 0;
s_alignment = (int(size_t(s_from)) | scale_bytes | SCALES |
               (ARRAYS == 2 ? int(size_t(b_from)) : 0)) & 15;"""
# where rows begin, counted from the first;
_ROW_OFFSETS = """#pragma unroll
for (int r = 0; r < R; ++r) {
#pragma unroll
  for (int h = 0; h < 2; ++h) off[r][h] = row_of(r * 16 + h * 8 + g) * row_bytes;
}"""
# the copies of a block of w: of what lies behind a row, nothing is read;
_COPY_ROWS = """if (aligned) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      copy_16(w_slot + (r * 2 + h) * 512, w_next + off[r][h], w_left > 0 ? 16 : 0);
  }
} else {
#pragma unroll 1
  for (int i = 0; i < R * 2 * 4; ++i) {
    const int row = row_of(i / 4 * 8 + g), at = i % 4 * 4;
    copy_word(w_slot + i / 4 * 512 + at, w_next + row * row_bytes + at, w_left > at ? 4 : 0);
  }
}"""
# word i of tile r as pairs, which stay in registers while products read them;
_DECODE_PAIRS = """uint32_t pair[2][PAIRS];
#pragma unroll
for (int h = 0; h < 2; ++h) {
  of[r].decode(words[r][h][i], i, h, pair[h], nan_of_row[r][h]);
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) keep(pair[h][j]);
}"""
# and what sums are when products have ended: a row with a NaN among its scales or codes is NaN,
# whatever x is.
_END_SUMS = """#pragma unroll
for (int r = 0; r < R; ++r) {
#pragma unroll
  for (int i = 0; i < TOK / 2; ++i) keep(sum[r][i]);
}
#pragma unroll
for (int r = 0; r < R; ++r) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t bits = nan[r] & NAN_OF[h];
    if constexpr (MODE == MXFP8) bits |= nan_of_row[r][h] & 0x80808080;
    if (MODE != AFFINE && any_of_quad(bits)) {
#pragma unroll
      for (int n = 0; n < TOK / 8; ++n)
        sum[r][n * 4 + h * 2] = sum[r][n * 4 + h * 2 + 1] = __int_as_float(~0);
    }
  }
}"""
_STEPS = {
    "COPY_SCALES": _COPY_SCALES,
    "READ_BLOCK": _READ_BLOCK,
    "SET_SCALES": _SET_SCALES,
    "ALIGNMENT": _ALIGNMENT,
    "ROW_OFFSETS": _ROW_OFFSETS,
    "COPY_ROWS": _COPY_ROWS,
    "DECODE_PAIRS": _DECODE_PAIRS,
    "END_SUMS": _END_SUMS,
}


def with_steps(
    text: str, copied: str = "part % PARTS", read: str = "block / AT_ONCE % PARTS"
) -> str:
    """A kernel's text with these steps in place of their names.

    Args:
        text: of a kernel.
        copied, read: which of the `PARTS` places scales are copied to and read from.
    """
    for name, step in (*_STEPS.items(), ("PLACE_TO_COPY", copied), ("PLACE_TO_READ", read)):
        text = text.replace(name, step)
    return text
