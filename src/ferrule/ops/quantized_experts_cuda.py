"""CUDA of products with matrices that indices choose: rows by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import ferrule


class Sides(NamedTuple):
    """How kernels find the matrices of each result.

    Attributes:
        names: of the types, in the text.
        lhs, rhs: arguments: an array of indices, or for how many results there is one matrix.
        where: a condition: that nothing else is broadcast.
    """

    names: str
    lhs: str
    rhs: str
    where: str


def sides(letters: str, count: str, left: str, right: str) -> Sides:
    """Of a kind of product (`gathers`) with so many results, and matrices on both sides."""
    found = []
    for letter, index, size in zip(letters, ("lhs", "rhs"), (left, right), strict=True):
        if letter in "lr":
            dtype = {"l": "L", "r": "J"}[letter]
            found.append((f"const {dtype}*", index, f"{index}.size == {count}"))
        elif letter == "t":
            found.append(("int64_t", "int64 E", "E > 0"))
        else:
            each = f"int64 {count} // max({size}, 1)"
            found.append(("int64_t", each, f"({size} == {count} or {size} == 1)"))
    (lefts, lhs, one), (rights, rhs, other) = found
    names = f"using LEFTS = {lefts};\nusing RIGHTS = {rights};\n"
    return Sides(names, lhs, rhs, f"{one} and {other}")


def by_expert(
    operands: list[Any],
    of: Sides,
    sizes: list[Any],
    rows: str,
    tokens: int,
    across: str,
    step: dict[str, Any],
    also: str = "",
) -> dict[str, Any]:
    """The scratch and the steps of `GROUPED`: up to 64 rows find their tiles, more are sorted.

    Args:
        operands, of, sizes: arguments of the kernels; of the sizes the last is how many experts
            there are, and those before it, but for the first two, are of the indices.
        rows: how many there are.
        tokens: rows of a tile, at most.
        across: how many tiles columns have.
        step: what launches of products have in common.
        also: what must hold besides, after `` and ``.
    """
    indices, experts = sizes[2:], sizes[-1]
    # So many parts there may be: of an expert with few rows, and full ones.
    parts = f"min({rows}, {rows} // {tokens} + {experts} + 1)"
    few, many = f"{rows} <= 64{also}", f"{rows} > 64{also}"
    return {
        "scratch": {"order": f"int32[{rows}]", "tiles": f"int32[3 * ({parts}) + 1]"},
        "steps": [
            ferrule.cuda_step(
                "gathered",
                [*operands, of.lhs, of.rhs, "y", *sizes, rows],
                when=few,
                blocks=(rows, 1, across),
                **step,
            ),
            ferrule.cuda_step(
                "sorted",
                [of.lhs, of.rhs, "order", "tiles", *indices, rows],
                when=many,
                blocks=1,
                block=1024,
                shared_memory=f"4 * ({experts} + 1)",
                pdl=True,
            ),
            ferrule.cuda_step(
                "gathered_sorted",
                [*operands, of.lhs, of.rhs, "order", "tiles", "y", *sizes],
                when=many,
                blocks=(parts, 1, across),
                **step,
            ),
        ],
    }


# Rows of a batch by expert, which is the matrix that each is multiplied with. Those whose indices
# lie outside have an expert of their own, `experts`.
EXPERTS = """
// Which matrix result b has: by an index, or one for `each` results.
template <class I> __device__ inline int64_t matrix_of(const I* index, int b) { return index[b]; }
__device__ inline int64_t matrix_of(int64_t each, int b) { return b / int(each); }

struct Experts {
  LEFTS lhs;
  RIGHTS rhs;
  int M;
  int64_t matrices;  // of x
  int experts;
  // The x row of row r of y, and which expert it has.
  __device__ int64_t from(int r) const { return matrix_of(lhs, r / M) * M + r % M; }
  __device__ int expert(int r) const {
    const int64_t left = matrix_of(lhs, r / M), right = matrix_of(rhs, r / M);
    return left >= 0 && left < matrices && right >= 0 && right < experts ? int(right) : experts;
  }
};
"""

# Tiles: up to TOK rows of one expert, which `all.expert(row)` says; of rows without one that is
# `all.experts`.
TILES = """
// Rows that stand in a list, which is in shared memory; y has rows of `width`.
template <class Out> struct Listed {
  const T* x;
  Out* y;
  int64_t K, width;
  int count;
  const int64_t* rows_of_x;
  const int* rows;
  __device__ int64_t row(int token) const { return rows_of_x[token]; }
  __device__ Out* to(int token) const { return y + rows[token] * width; }
  __device__ bool aligned() const { return (size_t(x) | K * sizeof(T)) % 16 == 0; }
};

struct Tile {
  int expert, count;
};

// Of up to 64 rows, each block finds its tile: that of row blockIdx.x and those after it which have
// its expert, where a multiple of TOK rows before have it; else `count` is 0.
template <int THREADS, class All>
__device__ inline Tile tile_of(const All& all, int rows, int* list) {
  const int lane = threadIdx.x % 32, first = blockIdx.x;
  const int low = lane < rows ? all.expert(lane) : -1;
  const int high = lane + 32 < rows ? all.expert(lane + 32) : -1;
  const int expert = __shfl_sync(~0u, first < 32 ? low : high, first % 32);
  const uint64_t same = __ballot_sync(~0u, low == expert) |
                        uint64_t(__ballot_sync(~0u, high == expert)) << 32;
  auto rank_of = [&](int r) { return __popcll(same & ((uint64_t(1) << r) - 1)); };
  const int before = rank_of(first), count = min(__popcll(same) - before, TOK);
  if (before % TOK) return {expert, 0};
  for (int r = threadIdx.x; r < rows; r += THREADS)
    if (same >> r & 1 && rank_of(r) >= before && rank_of(r) < before + TOK)
      list[rank_of(r) - before] = r;
  return {expert, count};
}

// Of many rows, one block of 1024 threads sorts them before, or BLOCKS blocks of a cluster: `order`
// gets them by expert, `tiles` the number of tiles and then of each expert, first place in the
// order, and rows. Those without an expert have tiles, too, if ALL.
template <bool ALL, int BLOCKS = 1, class All>
__device__ inline void sort_rows(const All& all, int* order, int* tiles, int rows) {
  __shared__ int rows_to[1024], tiles_to[1024];
  const int thread = threadIdx.x, experts = all.experts;
  const int block = BLOCKS == 1 ? 0 : blockIdx.x;
  int* const counts = reinterpret_cast<int*>(shared);             // of this block
  int* const next = BLOCKS == 1 ? counts : counts + experts + 1;  // where an expert's next row goes
  for (int e = thread; e <= experts; e += 1024) counts[e] = 0;
  __syncthreads();
  auto each = [&](auto then) {
    for (int r = block * 1024 + thread; r < rows; r += BLOCKS * 1024) then(r, all.expert(r));
  };
  each([&](int, int expert) { atomicAdd(&counts[expert], 1); });
  if (BLOCKS == 1) __syncthreads();
  else cluster_barrier();
  int rows_before = 0, tiles_before = 0;
  for (int begin = 0; begin <= experts; begin += 1024) {
    const int e = begin + thread;
    int count = 0, of_blocks_before = 0;
    if (e <= experts) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        if (b == block) of_blocks_before = count;
        count += BLOCKS == 1 ? counts[e] : read_of(b, counts + e);
      }
    }
    const int in_tiles = ALL || e < experts ? count : 0;
    const int of_expert = (in_tiles + TOK - 1) / TOK;
    rows_to[thread] = count, tiles_to[thread] = of_expert;
    __syncthreads();
    for (int back = 1; back < 1024; back *= 2) {
      const int more = thread >= back ? rows_to[thread - back] : 0;
      const int more_tiles = thread >= back ? tiles_to[thread - back] : 0;
      __syncthreads();
      rows_to[thread] += more, tiles_to[thread] += more_tiles;
      __syncthreads();
    }
    int at = rows_before + rows_to[thread] - count;
    if (e <= experts) next[e] = at + of_blocks_before;
    int* tile = tiles + 1 + 3 * (tiles_before + tiles_to[thread] - of_expert);
    for (int left = block ? 0 : in_tiles; left > 0; left -= TOK, at += TOK, tile += 3)
      tile[0] = e, tile[1] = at, tile[2] = min(left, TOK);
    rows_before += rows_to[1023], tiles_before += tiles_to[1023];
    __syncthreads();
  }
  if (block == 0 && thread == 0) tiles[0] = tiles_before;
  each([&](int r, int expert) { order[atomicAdd(&next[expert], 1)] = r; });
  if (BLOCKS > 1) cluster_barrier();  // none ends while another reads its counts
}

// A tile of sorted rows: that of this block; `count` is 0 behind the last.
__device__ inline Tile tile_of_sorted(const int* order, const int* tiles, int* list) {
  if (int(blockIdx.x) >= tiles[0]) return {0, 0};
  const int* const tile = tiles + 1 + 3 * int(blockIdx.x);
  const int count = tile[2];
  if (threadIdx.x < count) list[threadIdx.x] = order[tile[1] + threadIdx.x];
  return {tile[0], count};
}
"""

# Of each tile `product` makes ROWS columns.
GROUPED = (
    TILES
    + """
// One tile, whose first rows `list` has.
__device__ inline void product_of_tile(
    const T* x, const uint32_t* w, const void* scales, BIASES biases,
    WHOLE global_scale, int each, T* y, int64_t N, int64_t K, const Experts& experts,
    int expert, int count, const int* list) {
  __shared__ int64_t rows_of_x[TOK];
  const int64_t n = blockIdx.z * int64_t(ROWS);
  if (expert == experts.experts) {
    if (blockIdx.y == 0)
      for (int i = threadIdx.x; i < count * ROWS; i += WARPS * 32) {
        const int64_t column = n + i % ROWS;
        if (column < N) y[list[i / ROWS] * N + column] = T(__int_as_float(~0));
      }
    return;
  }
  if (threadIdx.x < count) rows_of_x[threadIdx.x] = experts.from(list[threadIdx.x]);
  __syncthreads();
  const int64_t in_w = N * K * BITS / 8 * expert, in_scales = N * K / GROUP * SCALE * expert;
  product(Listed<T>{x, y, K, N, count, rows_of_x, list},
          reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(w) + in_w),
          static_cast<const char*>(scales) + in_scales,
          bytes_of(biases) + in_scales,
          Scaled{whole(global_scale, each ? expert : 0)}, n, N, K);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
gathered(const T* x, const uint32_t* w, const void* scales, BIASES biases,
         WHOLE global_scale, int each, LEFTS lhs, RIGHTS rhs, T* y, int64_t N,
         int64_t K, int M, int64_t matrices, int experts, int rows) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Experts all{lhs, rhs, M, matrices, experts};
  const Tile tile = tile_of<WARPS * 32>(all, rows, list);
  if (!tile.count) return;
  __syncthreads();
  product_of_tile(x, w, scales, biases, global_scale, each, y, N, K, all, tile.expert, tile.count,
                  list);
}

extern "C" __global__ void __launch_bounds__(1024)
sorted(LEFTS lhs, RIGHTS rhs, int* order, int* tiles, int M, int64_t matrices,
       int experts, int rows) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  sort_rows<true>(Experts{lhs, rhs, M, matrices, experts}, order, tiles, rows);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
gathered_sorted(const T* x, const uint32_t* w, const void* scales, BIASES biases,
                WHOLE global_scale, int each, LEFTS lhs, RIGHTS rhs,
                const int* order, const int* tiles, T* y, int64_t N, int64_t K, int M,
                int64_t matrices, int experts) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Tile tile = tile_of_sorted(order, tiles, list);
  if (!tile.count) return;
  __syncthreads();
  product_of_tile(x, w, scales, biases, global_scale, each, y, N, K,
                  Experts{lhs, rhs, M, matrices, experts}, tile.expert, tile.count, list);
}
"""
)
