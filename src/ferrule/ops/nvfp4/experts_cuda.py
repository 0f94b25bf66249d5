"""CUDA of a mixture of experts in NVFP4 or MXFP4: how its kernels are launched, and what is common.

Rows are slots: row r of the first product is token ``r / top_k`` with its expert. The first kernel
multiplies by rows of w13 in pairs, the gate's and the one for up, and writes what the activation
makes of both; the second multiplies by w2, and the last adds up the slots of each token in float32.
Very few tokens have `few_tokens_cuda`, many of an expert `many_tokens_cuda`; of others up to 64
slots find those of their expert by themselves, and more are sorted by one block before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import ferrule

from ..formats import Format
from ..quantized_cuda import WHERE
from ..quantized_cuda_texts import FEW
from ..quantized_decode_cuda import AHEAD, DECODE, GIVEN, MODES, TABLES
from ..quantized_experts_cuda import TILES
from ..quantized_machine_cuda import MACHINE
from ..quantized_persistent_cuda import SORTED, machine, products
from ..quantized_tiles import MANY_OF_EXPERTS, ROWS_OF_Y, TILES_OF_EXPERTS, Persistent, Tile, room
from .few_tokens_cuda import DOWN_FEW, GATE_UP_FEW
from .many_tokens_cuda import DOWN, ELSEWHERE, GATE_UP, SORTED_BY_CLUSTER

# What the activation makes of a gate's sum.
ACTIVATIONS = {
    "silu": "__fdividef(v, 1 + __expf(-v))",
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

# Many slots are sorted; those without an expert have no tiles.
_SORTED = """
extern "C" __global__ void __launch_bounds__(1024)
sorted(const J* ids, MAP map, int64_t map_size, int* order, int* tiles, int experts, int slots) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  sort_rows<false>(Routing{ids, map, map_size, experts}, order, tiles, slots);
}
"""

# Both products: a tile is up to TOK slots of one expert, of which a block makes ROWS columns, or
# half as many where rows are in pairs. `NAME`, `Out` and what is made of sums differ.
_PRODUCT = """
__device__ inline void product_of_tile(
    const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const V* weights, Out* y,
    int64_t N, int64_t K, int slots_of_row, int expert, int count, const int* list) {
  __shared__ int64_t rows_of_x[TOK];
  if (threadIdx.x < count) rows_of_x[threadIdx.x] = list[threadIdx.x] / slots_of_row;
  __syncthreads();
  product(Listed<Out>{x, y, K, PAIRED ? N / 2 : N, count, rows_of_x, list},
          reinterpret_cast<const uint32_t*>(w + N * K / 2 * expert),
          reinterpret_cast<const char*>(scales) + N * K / GROUP * expert, nullptr,
          Ends(scale_2, weights, list, expert), blockIdx.z * int64_t(ROWS), N, K);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
NAME(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const J* ids, MAP map,
     int64_t map_size, const V* weights, Out* y, int64_t N, int64_t K, int slots_of_row,
     int experts, int slots) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Routing all{ids, map, map_size, experts};
  const Tile tile = tile_of<WARPS * 32>(all, slots, list);
  if (!tile.count || tile.expert == experts) return;
  __syncthreads();
  product_of_tile(x, w, scales, scale_2, weights, y, N, K, slots_of_row, tile.expert, tile.count,
                  list);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
NAME_sorted(const T* x, const uint8_t* w, const uint8_t* scales, SCALE_2 scale_2, const int* order,
            const int* tiles, const V* weights, Out* y, int64_t N, int64_t K, int slots_of_row) {
  __shared__ int list[TOK];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const Tile tile = tile_of_sorted(order, tiles, list);
  if (!tile.count) return;
  __syncthreads();
  product_of_tile(x, w, scales, scale_2, weights, y, N, K, slots_of_row, tile.expert, tile.count,
                  list);
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


# So few tokens have kernels of their own, with these tiles. Measured on an H100.
FEW_TOKENS = "(M <= 2 or M <= 4 and I <= 1024)"
_OF_FEW = Tile(8, 64, 3, warps=4), Tile(8, 16, 3, warps=8, each=1)


def units(form: Format, activation: str, on_input: bool, scales: bool, mapped: bool) -> list[Any]:
    """The units of an op with 16-bit floats.

    Args:
        form: of the matrices.
        activation: of the gate.
        on_input: weights are multiplied before the activation.
        scales: there are second scales.
        mapped: there is an ``expert_map``.
    """
    layer = Layer(form, activation, on_input, scales, mapped)
    tokens = sorted({tile.tokens for tile in TILES_OF_EXPERTS})
    tiles = {n: [tile for tile in TILES_OF_EXPERTS if tile.tokens == n] for n in tokens}
    few = [layer.of_few(*_OF_FEW)]
    pairs = [pair for n in tokens for pair in itertools.product(tiles[n], tiles[n])]
    most = [layer.of_most(tile) for tile in MANY_OF_EXPERTS]
    return [*few, *most, *(layer.of_many(*pair) for pair in pairs)]


class Layer(NamedTuple):
    """What the units of an op have in common: see `units`."""

    form: Format
    activation: str
    on_input: bool
    scales: bool
    mapped: bool

    def of_few(self, first: Tile, second: Tile) -> Any:
        """The unit of up to `FEW_TOKENS`, with a tile for each product."""
        text = self._functions("gate_up_few", first, _ENDS_OF_PAIRS, GATE_UP_FEW, ("",))
        text += self._functions("down_few", second, "", DOWN_FEW, ("",))
        gate_up = ferrule.cuda_step(
            "gate_up_few",
            self._of_few("x", "w13", "hidden", "2 * I", "H"),
            blocks=(_SLOTS, 1, f"ceildiv(2 * I, {first.rows})"),
            **self._launch(first),
        )
        down = ferrule.cuda_step(
            "down_few",
            self._of_few("hidden", "w2", "y", "H", "I"),
            blocks=("M", 1, f"ceildiv(H, {second.rows})"),
            **self._launch(second),
        )
        when, scratch = [FEW_TOKENS], {"hidden": "T[M,Q,I]"}
        return self._unit(text, (first, second), when, [gate_up, down], scratch)

    def _of_few(self, x: str, w: str, y: str, rows: str, depth: str) -> list[str]:
        """The arguments of one of its kernels."""
        given = [*self._matrix(x, w), *self._routing, "weights", y]
        return [*given, *_sizes(rows, depth), "Q", "E"]

    def of_many(self, first: Tile, second: Tile) -> Any:
        """The unit of any number, with a tile for each product."""
        text = TILES + _SORTED
        text += self._functions("gate_up", first, _ENDS_OF_PAIRS, _PRODUCT, ("", "_sorted"))
        text += self._functions("down", second, _ENDS, _PRODUCT, ("", "_sorted")) + _ADDED
        products = [*self._product("gate_up", first), *self._product("down", second)]
        rows = "".join(
            f"{n} if {_SLOTS} <= {of} * E else " for n, of in ((8, 4), (16, 16), (32, 32))
        )
        when = [f"({rows}64) <= {first.tokens}", _when(first, "H"), _when(second, "I")]
        scratch = {**_scratch(first), "hidden": "T[M,Q,I]"}
        sort = self._sort("sorted", 4, blocks=1, when=f"{_SLOTS} > 64")
        steps = [sort, *products, self._sum()]
        return self._unit(text, (first, second), when, steps, scratch)

    def of_most(self, tile: Persistent) -> Any:
        """The unit of very many, with a tile for both products."""
        on_hopper, elsewhere = machine(tile.widths), ""
        for name, ends, kernel, of in (
            ("gate_up_of_many", _ENDS_OF_PAIRS, GATE_UP, "T"),
            ("down_of_many", _ENDS, DOWN, "float"),
        ):
            kernel = products(tile.widths) + ends + kernel
            on_hopper += self._inside(name, tile, ends, kernel, [name])
            elsewhere += ELSEWHERE.replace("NAME", name).replace("OUT", of)
        text = f"{TILES}constexpr int NEAR = {tile.near};\n{SORTED}{SORTED_BY_CLUSTER}"
        text += f"\n#ifdef __CUDA_ARCH_FEAT_SM90_ALL{on_hopper}#else{elsewhere}#endif\n{_ADDED}"
        sort = self._sort("sorted_by_cluster", 8, blocks=8, cluster=(8, 1, 1))
        arranged = ferrule.cuda_step(
            "arranged",
            ["x", "rows", "order", "tiles", "int64 H", "Q"],
            blocks=(_tiles(tile), tile.tokens // 8),
            block=256,
            pdl=True,
        )
        places = f"((({_SLOTS} + 7 * E + 15) // 8) * 8)"
        scratch = {
            **_scratch(tile),
            "rows": f"T[{places},ceildiv(H, 128) * 128]",
            "hidden": f"T[{places},ceildiv(I, 128) * 128]",
        }
        steps, (mode, group, bits) = [sort, arranged], self.form
        for name, matrix, y, sizes in (
            ("gate_up_of_many", ("rows", "w13"), "hidden", _sizes("2 * I", "H")),
            ("down_of_many", ("hidden", "w2"), "parts", _sizes("H", "I")),
        ):
            given = [*self._matrix(*matrix), "order", "tiles", "weights", y, *sizes]
            step = ferrule.cuda_step(
                name,
                given,
                blocks="sm_count",
                block=32 * tile.warps + 128,
                shared_memory=tile.shared_memory(mode, bits, group),
                pdl=True,
            )
            steps.append(step)
        when = ["capability == 90", tile.when]
        steps.append(self._sum())
        return self._unit(text, (tile,), when, steps, scratch, specific=True)

    def _unit(
        self, text: str, tiles: Any, when: list[str], steps: Any, scratch: Any, **how: Any
    ) -> Any:
        """A unit with some functions, of which all tiles have as many tokens."""
        mode, group, bits = self.form
        sizes = [tile.shared_memory(mode, bits, group) for tile in tiles]
        conditions = [
            WHERE.replace("K > 0", "E > 0"),
            "H > 0 and I > 0 and Q > 0 and E < 12000",
            "(I + 128) * (H + 128) < 4294967296",  # where rows of a block begin is an int
            *when,
            *map(room, sizes),
        ]
        types = {
            "MAP": "const G*" if self.mapped else "int64_t",
            "SCALE_2": "const float*" if self.scales else "int64_t",
        }
        given = "".join(f"using {name} = {type_};\n" for name, type_ in types.items())
        given += f"constexpr bool ON_INPUT = {str(self.on_input).lower()};\n"
        routing = _ROUTING.replace("ACTIVATION", ACTIVATIONS[self.activation])
        return ferrule.cuda_unit(
            f"{given}{MACHINE}{GIVEN}{DECODE}{routing}{text}",
            template={"MODE": MODES[mode], "BITS": bits, "GROUP": group, "TOK": tiles[0].tokens}
            | {"EACH": "A" if self.scales else 1},
            when=" and ".join(conditions),
            scratch=scratch,
            steps=steps,
            **how,
        )

    def _sort(self, function: str, counts: int, **how: Any) -> Any:
        """The step that sorts slots, with so many bytes of counts for each expert."""
        return ferrule.cuda_step(
            function,
            [*self._routing, "order", "tiles", "E", _SLOTS],
            block=1024,
            shared_memory=f"{counts} * (E + 1)",
            pdl=True,
            **how,
        )

    def _sum(self) -> Any:
        """The step that adds up the slots of each token."""
        return ferrule.cuda_step(
            "added",
            ["parts", *self._routing, "weights", "y", "int64 H", "E", "Q", "int64 M * H // 4"],
            blocks="ceildiv(M * H // 4, 256)",
            block=256,
            pdl=True,
        )

    @property
    def _routing(self) -> list[str]:
        if self.mapped:
            return ["ids", "expert_map", "int64 expert_map.size"]
        return ["ids", "int64 0", "int64 0"]

    def _matrix(self, x: str, w: str) -> list[str]:
        return [x, f"{w}_packed", f"{w}_scale", f"{w}_scale_2" if self.scales else "int64 0"]

    def _launch(self, tile: Tile) -> dict[str, Any]:
        mode, group, bits = self.form
        size = tile.shared_memory(mode, bits, group)
        return {"block": 32 * tile.warps, "shared_memory": size, "pdl": True}

    def _functions(
        self, name: str, tile: Tile, ends: str, kernels: str, endings: Sequence[str]
    ) -> str:
        """The kernels of a product by `FEW`, with its tile."""
        names = [f"{name}{ending}" for ending in endings]
        text = f"{TABLES}{AHEAD}{FEW}{ends}{kernels.replace('NAME', name)}"
        return self._inside(name, tile, ends, text, names)

    def _inside(self, name: str, tile: Any, ends: str, text: str, kernels: Sequence[str]) -> str:
        """A text that is a tile's own."""
        constants = {**tile.template, "PAIRED": int(ends is _ENDS_OF_PAIRS)}
        constants.pop("TOK", None)  # which both products have
        given = "".join(f"constexpr int {key} = {value};\n" for key, value in constants.items())
        names = "".join(f"using {name}_of_tile::{kernel};\n" for kernel in kernels)
        return f"\nnamespace {name}_of_tile {{\n{given}{text}}}\n{names}"

    def _product(self, name: str, tile: Tile) -> list[Any]:
        """The steps of a product: of few slots, and of those that are sorted."""
        x, w, y, rows, depth, each = {
            "gate_up": ("x", "w13", "hidden", "2 * I", "H", "Q"),
            "down": ("hidden", "w2", "parts", "H", "I", "1"),
        }[name]
        matrix, launch = self._matrix(x, w), self._launch(tile)
        across = f"ceildiv({rows}, {tile.rows})"
        tail = ["weights", y, *_sizes(rows, depth), each]
        few = ferrule.cuda_step(
            name,
            [*matrix, *self._routing, *tail, "E", _SLOTS],
            when=f"{_SLOTS} <= 64",
            blocks=(_SLOTS, 1, across),
            **launch,
        )
        many = ferrule.cuda_step(
            f"{name}_sorted",
            [*matrix, "order", "tiles", *tail],
            when=f"{_SLOTS} > 64",
            blocks=(_tiles(tile), 1, across),
            **launch,
        )
        return [few, many]


_SLOTS = "(M * Q)"


def _tiles(tile: Tile | Persistent) -> str:
    """How many tiles of slots there are, at most."""
    return f"min({_SLOTS}, {_SLOTS} // {tile.tokens} + E + 1)"


def _scratch(tile: Tile | Persistent) -> dict[str, str]:
    """Memory for sorted slots, and for what each adds to its token."""
    return {
        "order": f"int32[{_SLOTS}]",
        "tiles": f"int32[3 * ({_tiles(tile)}) + 1]",
        "parts": "float32[M,Q,H]",
    }


def _sizes(rows: str, depth: str) -> list[str]:
    return [f"int64 {rows}", f"int64 {depth}"]


def _when(tile: Tile, depth: str) -> str:
    """A tile's condition, with other names for rows and for what is summed over."""
    return f"({tile.when.replace(ROWS_OF_Y, _SLOTS).replace('K', depth)})"
