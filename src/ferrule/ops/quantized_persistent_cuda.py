"""CUDA of products of many rows of x with quantized matrices, for compute capability 9.0.

As in `quantized_wide_cuda`, a warp group multiplies rows of ``w``, whose numbers it makes in
registers, by ``wgmma`` with rows of x (tokens) in shared memory. A block stays on its
multiprocessor and makes one tile of y after another: what it copies runs ahead into the next tile,
and sums go from registers to memory, so that one warp group multiplies while another writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .quantized_decode_cuda import AHEAD, with_steps
from .quantized_wide_cuda import machine as wide_machine

# What a block does next, for `SORTED` and `quantized_persistent_dense_cuda`.
WORK = """
// Up to TOK rows of x, from the `at`th on, and ROWS rows of their matrix, the `panel`th ones: of K
// what lies in some of its blocks. The count is 0 behind the last.
struct Work {
  int panel, matrix, at, count, begin, end;
};
// Bytes of 64 k of a tile of x: where the first are, how far the next are, and how many.
struct TileOfX {
  int64_t begin, pitch;
  uint32_t bytes;
};
// Which panel and which tile the i-th work has: neighbours are NEAR tiles with the same rows of w,
// and both stay in the L2. The tile is -1 behind the last.
__device__ inline int2 place_of_work(int i, int tiles, int panels) {
  const int before = i / (NEAR * panels) * NEAR, rest = i - before * panels;
  const int near = min(NEAR, tiles - before);
  if (i >= tiles * panels) return {0, -1};
  return {rest / near, before + rest % near};
}
__device__ inline int64_t padded(int64_t K) { return (K + BLOCK - 1) / BLOCK * BLOCK; }
"""

PLACES = """
// Tiles by matrix: their number, and of each the matrix, the place of its first row among all, and
// rows.
struct Works {
  const int* tiles;
  int panels;
  __device__ Work of(int i) const {
    const int2 place = place_of_work(i, __ldg(tiles), panels);
    if (place.y < 0) return {};
    const int* const tile = tiles + 1 + 3 * place.y;
    return {place.x, __ldg(tile), __ldg(tile + 1), __ldg(tile + 2)};
  }
  // The n-th of this block.
  __device__ Work piece(int n, int blocks) const {
    Work work = of(blockIdx.x + n * gridDim.x);
    work.end = blocks;
    return work;
  }
  __device__ TileOfX x(const Work& work, int64_t K) const;
};

// Tiles of x lie one behind the other, as products read them: 64 k after 64 k of all tokens, with
// 8 fours of each, swizzled. A four has words of elements n and n + 4 of 8 elements of each lane of
// a quad; lanes have OWN of each BLOCK, as in `ordered`. K is padded.

// Where a tile begins, counted in rows: at a multiple of 8, behind all before it.
__device__ inline int64_t first_row(const Work& work) {
  return (work.at + 7 * work.matrix + 7) / 8 * 8;
}
__device__ inline TileOfX Works::x(const Work& work, int64_t K) const {
  const uint32_t bytes = (work.count + 7) / 8 * 1024;
  return {first_row(work) * padded(K) * 2, bytes, bytes};
}
// Where the four n of the elements from k on is, counted in words.
__device__ inline int64_t place(const Work& work, int64_t K, int token, int64_t k, int n) {
  static_assert(BITS == 4, "words of other formats have other pairs");
  const int tokens = (work.count + 7) / 8 * 8, four = k / BLOCK * 16 + k % OWN / 8 * 4 + n;
  return first_row(work) * padded(K) / 2 + (four / 8 * tokens + token) * 32 +
         (four % 8 ^ token % 8) * 4;
}
"""

_ARRANGED = """
// Rows of x in the order of `order`, a warp each. Two lanes have 8 elements of each lane of a quad:
// each reads those of two, and writes two fours.
extern "C" __global__ void __launch_bounds__(256)
arranged(const T* x, T* out, const int* order, const int* tiles, int64_t K, int slots_of_row) {
  constexpr int AT_ONCE = 4;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (int(blockIdx.x) >= tiles[0]) return;
  const int* const tile = tiles + 1 + 3 * blockIdx.x;
  const Work work{0, tile[0], tile[1], tile[2]};
  const int token = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, half = lane % 2;
  if (token >= work.count) return;
  const uint16_t* const row =
      reinterpret_cast<const uint16_t*>(x) + order[work.at + token] / slots_of_row * K;
  const bool aligned = (size_t(x) | K * sizeof(T)) % 16 == 0;
  const int pieces = padded(K) / 16;
  auto first_of = [](int piece) { return piece / 8 * BLOCK + piece / 2 % 4 * 8; };  // k of lane 0
  for (int first = lane; first < (pieces + 31) / 32 * 32; first += 32 * AT_ONCE) {
    uint4 v[AT_ONCE][2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = first_of(first + i * 32) + (half * 2 + j) * OWN;
        v[i][j] = {0, 0, 0, 0};
        if (aligned) {
          if (at < K) v[i][j] = *reinterpret_cast<const uint4*>(row + at);
        } else {
          uint32_t* const to = &v[i][j].x;
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (at + e < K) to[e / 2] |= uint32_t(row[at + e]) << 16 * (e % 2);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      uint32_t words[4][2];  // n, lane
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        words[0][j] = permute(v[i][j].x, v[i][j].z, 0x5410);
        words[1][j] = permute(v[i][j].x, v[i][j].z, 0x7632);
        words[2][j] = permute(v[i][j].y, v[i][j].w, 0x5410);
        words[3][j] = permute(v[i][j].y, v[i][j].w, 0x7632);
      }
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t mine[2], other[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mine[j] = half ? words[n + 1][j] : words[n][j];
          other[j] = __shfl_xor_sync(~0u, half ? words[n][j] : words[n + 1][j], 1);
        }
        if (first + i * 32 < pieces)
          *reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(out) +
                                    place(work, K, token, first_of(first + i * 32), n + half)) =
              half ? uint4{other[0], other[1], mine[0], mine[1]}
                   : uint4{mine[0], mine[1], other[0], other[1]};
      }
    }
  }
}
"""
SORTED = WORK + PLACES + _ARRANGED

_PRODUCTS = """
constexpr int WARPS = WM, THREADS = WARPS * 32 + 128;  // a warp group more copies x
constexpr int ROWS = WARPS * R * 16;
constexpr int COLUMNS = PAIRED ? ROWS / 2 : ROWS;      // of y
constexpr int ACROSS = WARPS / 4;                      // warps whose columns have the same 8 of OWN
constexpr int X_STAGE = TOK * 128, W_STAGE = R * 1024, S_STAGE = R * 16 * SCALES * ARRAYS;
constexpr int PARTS = 4;                               // of scales, that are there at a time
constexpr int WORDS = 4 / (BLOCK / 64);                // of a lane's four, in a stage of x
static_assert(STAGES >= 2 && STAGES <= PARTS && TOK % 8 == 0 && WARPS % 4 == 0);

// Copies of x, of which a stage has 64 k of a tile.
__device__ inline void copy_tiles(const char* x, const Works& works, int64_t K, uint32_t full,
                                  uint32_t empty, uint32_t to) {
  fence_of_copies();
  uint32_t slot = 0, parity = 1;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Work work = works.piece(n, padded(K) / BLOCK);
    if (!work.count) break;
    const TileOfX tile = works.x(work, K);
    const char* from = x + tile.begin + work.begin * (BLOCK / 64) * tile.pitch;
#pragma unroll 1
    for (int left = (work.end - work.begin) * (BLOCK / 64); left > 0; --left, from += tile.pitch) {
      wait_for(empty + slot * 8, parity);
      expect(full + slot * 8, tile.bytes);
      copy_many(to + slot * X_STAGE, from, tile.bytes, full + slot * 8);
      if (++slot == X_STAGES) slot = 0, parity ^= 1;
    }
  }
}
// What a warp multiplies: 16 R rows of each work's matrix.
struct Rows {
  int64_t first, half;  // the first one, and how far those for up are from those of the gate
  int many;
  __device__ Rows(int64_t N, const Work& work) : half(N / 2) {
    const int warp = threadIdx.x / 32;
    const int64_t end = PAIRED ? half : N;
    first = int64_t(work.panel) * COLUMNS +
            (PAIRED ? warp % ACROSS * R * OWN + warp / ACROSS * 8 : warp * R * 16);
    first = min(first, end - 1), many = int(min(end - first, int64_t(1 << 20)));
  }
  // Row g of half h of tile r of 16, counted from the first: a lane has neighbours, or a gate and
  // what it is for.
  __device__ int operator()(int row) const {
    const int g = row % 8, h = row / 8 % 2, r = row / 16;
    return PAIRED ? min(r * OWN + g, many - 1) + h * int(half)
                  : min(g * R * 2 + r * 2 + h, many - 1);
  }
};

// All works of a block, whose sums `write` gets.
template <class Write>
__device__ inline void products(const T* x, const char* w, const char* scales, const char* biases,
                                const Works& works, int64_t N, int64_t K, const Write& write) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t start = (shared_address(shared) + 1023) / 1024 * 1024;
  const uint32_t full = start, empty = start + X_STAGES * 8;  // barriers
  const uint32_t begin_x = start + 1024, begin_of_w = begin_x + X_STAGES * X_STAGE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i)
      start_barrier(full + i * 8, 1), start_barrier(empty + i * 8, WARPS);
    started_barriers();
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (warp >= WARPS) {
    fewer_registers<40>();
    if (threadIdx.x == WARPS * 32)
      copy_tiles(reinterpret_cast<const char*>(x), works, K, full, empty, begin_x);
    return;
  }
  more_registers<232>();
  const uint32_t begin_w = begin_of_w + warp * STAGES * W_STAGE + lane * 16;
  const uint32_t begin_s = begin_of_w + WARPS * STAGES * W_STAGE + warp * PARTS * S_STAGE;
  const uint32_t blocks = (uint32_t(K) + BLOCK - 1) / BLOCK;
  const int row_bytes = int(K) / (32 / BITS) * 4, scale_bytes = int(K) / GROUP * SCALE;
  const char *w_next, *s_from, *b_from = nullptr;
  int aligned, s_alignment, off[R][2], w_left;
  constexpr uint32_t begin = 0;
  uint32_t next = 0, last = 0, to_slot = 0, to_part = 0;
  int coming = 0;  // the work whose rows are copied; -1 behind the last
  Rows row_of(N, works.piece(coming, blocks));
  auto come = [&] {
    const Work work = works.piece(coming, blocks);
    if (!work.count) {
      coming = -1;
      return;
    }
    row_of = Rows(N, work);
    const int64_t first = N * work.matrix + row_of.first;
    const char* const w_from = w + first * row_bytes;
    s_from = scales + first * scale_bytes;
    if constexpr (ARRAYS == 2) b_from = biases + first * scale_bytes;
    ALIGNMENT
    ROW_OFFSETS
    next = work.begin, last = work.end;
    const int before = work.begin * 64 + t * 16;
    w_next = w_from + before, w_left = row_bytes - before;
  };
  // Asks for a block of w: of what lies behind a row, nothing is read.
  auto issue = [&] {
    if (coming >= 0) {
      const uint32_t w_slot = begin_w + to_slot * W_STAGE;
      COPY_ROWS
      if (next % AT_ONCE == 0) to_part = (to_part + 1) % PARTS;
      COPY_SCALES
      w_next += 64, w_left -= 64;
      to_slot = to_slot + 1 == STAGES ? 0 : to_slot + 1;
      if (++next == last) ++coming, come();
    }
    commit();
  };
  come();

  const uint32_t s_read = begin_s + g * SCALES + (BLOCK % GROUP ? 0 : t * OWN / GROUP * SCALE);
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) issue();
  uint32_t slot = 0, part = 0, x_slot = 0, parity = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Work work = works.piece(n, blocks);
    if (!work.count) break;
    float sum[R][TOK / 2] = {};
    uint32_t nan[R] = {}, nan_of_row[R][2] = {};
    uint32_t x_before = 0;
    // With products of so many tokens.
    auto multiply = [&](auto tokens) {
#pragma unroll 1
      for (uint32_t block = work.begin; block < work.end; ++block) {
        wait<STAGES - 2>();
        __syncwarp();
        issue();
        if (block % AT_ONCE == 0) part = (part + 1) % PARTS;
        uint32_t words[R][2][4], bytes[R][ARRAYS][2];
        READ_BLOCK
        Scales of[R];
        SET_SCALES
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            DECODE_PAIRS
            if (i % WORDS == 0 && r == 0) wait_for(full + x_slot * 8, parity);
            begin_products();
#pragma unroll
            for (int j = 0; j < PAIRS; j += 2)
              product_16(tokens, sum[r], pair[0][j], pair[1][j], pair[0][j + 1], pair[1][j + 1],
                         (begin_x + x_slot * X_STAGE) / 16 + (i % WORDS * PAIRS + j) / 2 * 2);
            end_products();
            wait_products<1>();  // those before these
            if (i % WORDS == 0 && r == 0) {
              if ((block > work.begin || i > 0) && lane == 0) arrive(empty + x_before * 8);
              x_before = x_slot;
            }
          }
          if (i % WORDS == WORDS - 1 && ++x_slot == X_STAGES) x_slot = 0, parity ^= 1;
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
    };
    MULTIPLY
    wait_products<0>();
    if (lane == 0) arrive(empty + x_before * 8);
    END_SUMS
    write(work, sum);
  }
  wait<0>();
}
"""

_REGISTERS = """
template <int COUNT> __device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
"""


def products(widths: Sequence[int]) -> str:
    """The functions for tiles whose products have so many tokens, upwards: the first that is
    enough."""
    ways = [f"if (work.count <= {width}) multiply(Number<{width}>());" for width in widths[:-1]]
    text = " else ".join([*ways, f"multiply(Number<{widths[-1]}>());"])
    text = with_steps(_PRODUCTS.replace("MULTIPLY", text), copied="to_part", read="part")
    return AHEAD + text


def machine(widths: Sequence[int]) -> str:
    """What the hardware does for them."""
    return wide_machine(*widths) + _REGISTERS
