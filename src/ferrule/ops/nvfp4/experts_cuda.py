"""CUDA of a mixture of experts in NVFP4 or MXFP4: how its kernels are launched, and their text.

Rows are slots: row r of the first product is token ``r / top_k`` with its expert. Up to 64 slots
find others of their expert by themselves; more are sorted by one block before. The first kernel
multiplies by rows of w13 in pairs, the gate's and the one for up, and writes what the activation
makes of both; the second multiplies by w2, and the last adds up the slots of each token in float32.
"""

from __future__ import annotations

import itertools
from typing import Any

import ferrule

from ..formats import Format
from ..quantized_cuda import WHERE
from ..quantized_cuda_texts import FEW
from ..quantized_decode_cuda import AHEAD, DECODE, GIVEN, MODES, TABLES
from ..quantized_machine_cuda import MACHINE
from ..quantized_tiles import ROWS_OF_Y, TILES_OF_EXPERTS, Tile, room

# What the activation makes of a gate's sum.
ACTIVATIONS = {
    "silu": "v / (1 + __expf(-v))",
    "gelu_tanh": "0.5f * v * (1 + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)))",
}

# Which expert a slot has: `experts` where there is none, or none here.
_ROUTING = """
template <class M> __device__ inline int64_t mapped(const M* map, int64_t size, int64_t id) {
  return id >= 0 && id < size ? int64_t(map[id]) : -1;
}
__device__ inline int64_t mapped(int64_t, int64_t, int64_t id) { return id; }

struct Routing {
  const J* ids;
  MAP map;
  int64_t map_size;
  int experts;
  __device__ int expert(int slot) const {
    const int64_t id = mapped(map, map_size, ids[slot]);
    return id >= 0 && id < experts ? int(id) : experts;
  }
};

__device__ inline float activated(float v) { return ACTIVATION; }

// Of scales of experts, of which there may be none: `each` of an expert.
__device__ inline float scale_of_expert(const float* scale, int64_t i) { return scale[i]; }
__device__ inline float scale_of_expert(int64_t, int64_t) { return 1; }
"""

# Many slots are sorted: `order` gets them by expert, `tiles` the number of tiles and then of each
# its expert, first place in the order, and how many slots it has. Those without an expert have no
# tiles.
_SORTED = """
extern "C" __global__ void __launch_bounds__(1024)
sorted(const J* ids, MAP map, int64_t map_size, int* order, int* tiles, int experts, int slots) {
  int* const counts = reinterpret_cast<int*>(shared);  // then where the next slot goes
  __shared__ int slots_to[1024], tiles_to[1024];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Routing all{ids, map, map_size, experts};
  const int thread = threadIdx.x;
  for (int e = thread; e <= experts; e += 1024) counts[e] = 0;
  __syncthreads();
  for (int r = thread; r < slots; r += 1024) atomicAdd(&counts[all.expert(r)], 1);
  __syncthreads();
  int slots_before = 0, tiles_before = 0;
  for (int begin = 0; begin <= experts; begin += 1024) {
    const int e = begin + thread, count = e <= experts ? counts[e] : 0;
    const int of_expert = e < experts ? (count + TOK - 1) / TOK : 0;
    slots_to[thread] = count, tiles_to[thread] = of_expert;
    __syncthreads();
    for (int back = 1; back < 1024; back *= 2) {
      const int more = thread >= back ? slots_to[thread - back] : 0;
      const int more_tiles = thread >= back ? tiles_to[thread - back] : 0;
      __syncthreads();
      slots_to[thread] += more, tiles_to[thread] += more_tiles;
      __syncthreads();
    }
    int at = slots_before + slots_to[thread] - count;
    if (e <= experts) counts[e] = at;
    int* tile = tiles + 1 + 3 * (tiles_before + tiles_to[thread] - of_expert);
    for (int i = 0; i < of_expert; ++i, at += TOK, tile += 3)
      tile[0] = e, tile[1] = at, tile[2] = min(count - i * TOK, TOK);
    slots_before += slots_to[1023], tiles_before += tiles_to[1023];
    __syncthreads();
  }
  if (thread == 0) tiles[0] = tiles_before;
  for (int r = thread; r < slots; r += 1024) order[atomicAdd(&counts[all.expert(r)], 1)] = r;
}
"""

# Both products: a tile is up to TOK slots of one expert, of which a block makes ROWS columns, or
# half as many where rows are in pairs. `NAME`, `Out` and what is made of sums differ.
_PRODUCT = """
struct Listed {
  const T* x;
  Out* y;
  int64_t K, width;
  int count;
  const int64_t* rows_of_x;
  const int* slots;
  __device__ int64_t row(int token) const { return rows_of_x[token]; }
  __device__ Out* to(int token) const { return y + slots[token] * width; }
  __device__ bool aligned() const { return (size_t(x) | K * sizeof(T)) % 16 == 0; }
};

__device__ inline void product_of_tile(
    const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const V* weights, Out* y,
    int64_t N, int64_t K, int slots_of_row, int expert, int count, const int* list) {
  __shared__ int64_t rows_of_x[TOK];
  if (threadIdx.x < count) rows_of_x[threadIdx.x] = list[threadIdx.x] / slots_of_row;
  __syncthreads();
  product(Listed{x, y, K, PAIRED ? N / 2 : N, count, rows_of_x, list},
          reinterpret_cast<const uint32_t*>(w + N * K / 2 * expert),
          reinterpret_cast<const char*>(scales) + N * K / GROUP * expert, nullptr,
          Ends(scale_2, weights, list, expert), blockIdx.z * int64_t(ROWS), N, K);
}

// Of few slots, each block finds its tile: that of slot blockIdx.x and those after it which have
// its expert, where a multiple of TOK slots before have it.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
NAME(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const J* ids, MAP map,
     int64_t map_size, const V* weights, Out* y, int64_t N, int64_t K, int slots_of_row,
     int experts, int slots) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Routing all{ids, map, map_size, experts};
  const int lane = threadIdx.x % 32, first = blockIdx.x;
  const int low = lane < slots ? all.expert(lane) : -1;
  const int high = lane + 32 < slots ? all.expert(lane + 32) : -1;
  const int expert = __shfl_sync(~0u, first < 32 ? low : high, first % 32);
  const uint64_t same = __ballot_sync(~0u, low == expert) |
                        uint64_t(__ballot_sync(~0u, high == expert)) << 32;
  auto rank_of = [&](int r) { return __popcll(same & ((uint64_t(1) << r) - 1)); };
  const int before = rank_of(first), count = min(__popcll(same) - before, TOK);
  if (before % TOK || expert == experts) return;
  for (int r = threadIdx.x; r < slots; r += WARPS * 32)
    if (same >> r & 1 && rank_of(r) >= before && rank_of(r) < before + TOK)
      list[rank_of(r) - before] = r;
  __syncthreads();
  product_of_tile(x, w, scales, scale_2, weights, y, N, K, slots_of_row, expert, count, list);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
NAME_sorted(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const int* order,
            const int* tiles, const V* weights, Out* y, int64_t N, int64_t K, int slots_of_row) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (int(blockIdx.x) >= tiles[0]) return;
  const int* const tile = tiles + 1 + 3 * int(blockIdx.x);
  const int count = tile[2];
  if (threadIdx.x < count) list[threadIdx.x] = order[tile[1] + threadIdx.x];
  __syncthreads();
  product_of_tile(x, w, scales, scale_2, weights, y, N, K, slots_of_row, tile[0], count, list);
}
"""

_ENDS_OF_PAIRS = """
using Out = T;
struct Ends {
  float gate, up;
  const V* weights;  // by slot, where inputs have them
  const int* slots;
  __device__ Ends(SCALE_2 scale_2, const V* weights, const int* slots, int expert)
      : gate(scale_of_expert(scale_2, expert * EACH)),
        up(scale_of_expert(scale_2, expert * EACH + EACH - 1)), weights(weights), slots(slots) {}
  __device__ T operator()(float one, float other, int token) const {
    const float by = ON_INPUT ? float(weights[slots[token]]) : 1;
    return T(activated(one * gate * by) * (other * up * by));
  }
};
"""
_ENDS = """
using Out = float;
struct Ends {
  float by;
  __device__ Ends(SCALE_2 scale_2, const V*, const int*, int expert)
      : by(scale_of_expert(scale_2, expert)) {}
  __device__ float operator()(float sum, int) const { return sum * by; }
};
"""

# The sum of each token's slots; a thread has four columns.
_ADDED = """
extern "C" __global__ void __launch_bounds__(256)
added(const float* parts, const J* ids, MAP map, int64_t map_size, const V* weights, T* y,
      int64_t H, int experts, int top_k, int64_t quads) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t quad = blockIdx.x * int64_t(256) + threadIdx.x;
  if (quad >= quads) return;
  const int64_t token = quad / (H / 4), column = quad % (H / 4) * 4;
  const Routing all{ids, map, map_size, experts};
  float4 sum = {0, 0, 0, 0};
  for (int k = 0; k < top_k; ++k) {
    const int64_t slot = token * top_k + k;
    if (all.expert(slot) == experts) continue;
    const float4 part = *reinterpret_cast<const float4*>(parts + slot * H + column);
    const float by = ON_INPUT ? 1 : float(weights[slot]);
    sum.x += by * part.x, sum.y += by * part.y, sum.z += by * part.z, sum.w += by * part.w;
  }
  T* const to = y + token * H + column;
  to[0] = T(sum.x), to[1] = T(sum.y), to[2] = T(sum.z), to[3] = T(sum.w);
}
"""


def _of_tile(name: str, tile: Tile, paired: bool) -> str:
    """The functions of one of both products, with its tile."""
    constants = {**tile.template, "PAIRED": int(paired)}
    del constants["TOK"]  # which both have
    given = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
    text = f"{TABLES}{AHEAD}{FEW}{_ENDS_OF_PAIRS if paired else _ENDS}{_PRODUCT}"
    names = "".join(f"using {name}_of_tile::{name}{end};\n" for end in ("", "_sorted"))
    return f"namespace {name}_of_tile {{\n{given}{text.replace('NAME', name)}}}\n{names}"


def units(form: Format, activation: str, on_input: bool, scales: bool, mapped: bool) -> list[Any]:
    """The units of an op with 16-bit floats.

    Args:
        form: of the matrices.
        activation: of the gate.
        on_input: weights are multiplied before the activation.
        scales: there are second scales.
        mapped: there is an ``expert_map``.
    """
    tokens = sorted({tile.tokens for tile in TILES_OF_EXPERTS})
    tiles = {n: [tile for tile in TILES_OF_EXPERTS if tile.tokens == n] for n in tokens}
    pairs = [pair for n in tokens for pair in itertools.product(_paired(tiles[n]), tiles[n])]
    return [_unit(form, *pair, activation, on_input, scales, mapped) for pair in pairs]


def _paired(tiles: list[Tile]) -> list[Tile]:
    """Those of which each warp has 16 rows of either half."""
    return [tile for tile in tiles if tile.rows % 32 == 0]


def _unit(
    form: Format,
    first: Tile,
    second: Tile,
    activation: str,
    on_input: bool,
    scales: bool,
    mapped: bool,
) -> Any:
    """The unit with a tile for each product."""
    mode, group, bits = form
    slots, tokens = "(M * Q)", first.tokens
    rows = "".join(f"{n} if {slots} <= {of} * E else " for n, of in ((8, 4), (16, 16), (32, 32)))
    sizes = [tile.shared_memory(mode, bits, group) for tile in (first, second)]
    conditions = [
        WHERE.replace("K > 0", "E > 0"), "H > 0 and I > 0 and Q > 0", "E < 12000",
        f"({rows}64) <= {tokens}", _when(first, "H"), _when(second, "I"), *map(room, sizes),
    ]  # fmt: skip
    types = {
        "MAP": "const G*" if mapped else "int64_t",
        "SCALE_2": "const float*" if scales else "int64_t",
    }
    text = "".join(f"using {name} = {type_};\n" for name, type_ in types.items())
    text += f"constexpr bool ON_INPUT = {str(on_input).lower()};\n{MACHINE}{GIVEN}{DECODE}"
    text += _ROUTING.replace("ACTIVATION", ACTIVATIONS[activation]) + _SORTED
    text += _of_tile("gate_up", first, True) + _of_tile("down", second, False) + _ADDED
    parts = f"min({slots}, {slots} // {tokens} + E + 1)"  # tiles, at most
    routing = ["ids", "expert_map" if mapped else "int64 0"]
    routing += ["int64 expert_map.size" if mapped else "int64 0"]
    few, many = f"{slots} <= 64", f"{slots} > 64"

    def product(name: str, tile: Tile, x: str, w: str, y: str, n: str, k: str, each: str) -> Any:
        matrix = [x, f"{w}_packed", f"{w}_scale", f"{w}_scale_2" if scales else "int64 0"]
        step: dict[str, Any] = {
            "block": 32 * tile.warps, "pdl": True,
            "shared_memory": tile.shared_memory(mode, bits, group),
        }  # fmt: skip
        across = f"ceildiv({n}, {tile.rows})"
        tail = ["weights", y, f"int64 {n}", f"int64 {k}", each]
        return [
            ferrule.cuda_step(
                name, [*matrix, *routing, *tail, "E", slots], when=few,
                blocks=(slots, 1, across), **step,
            ),
            ferrule.cuda_step(
                f"{name}_sorted", [*matrix, "order", "tiles", *tail], when=many,
                blocks=(parts, 1, across), **step,
            ),
        ]  # fmt: skip

    sort = ferrule.cuda_step(
        "sorted", [*routing, "order", "tiles", "E", slots], when=many, blocks=1, block=1024,
        shared_memory="4 * (E + 1)", pdl=True,
    )  # fmt: skip
    last = ferrule.cuda_step(
        "added", ["parts", *routing, "weights", "y", "int64 H", "E", "Q", "int64 M * H // 4"],
        blocks="ceildiv(M * H // 4, 256)", block=256, pdl=True,
    )  # fmt: skip
    return ferrule.cuda_unit(
        text,
        template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, "TOK": tokens}
        | ({"EACH": "A"} if scales else {"EACH": 1}),
        when=" and ".join(conditions),
        scratch={
            "order": f"int32[{slots}]",
            "tiles": f"int32[3 * ({parts}) + 1]",
            "hidden": "T[M,Q,I]",
            "parts": "float32[M,Q,H]",
        },
        steps=[
            sort,
            *product("gate_up", first, "x", "w13", "hidden", "2 * I", "H", "Q"),
            *product("down", second, "hidden", "w2", "parts", "H", "I", "1"),
            last,
        ],
    )


def _when(tile: Tile, depth: str) -> str:
    """A tile's condition, with other names for rows and for what is summed over."""
    return f"({tile.when.replace(ROWS_OF_Y, '(M * Q)').replace('K', depth)})"
