"""The gradients of norms on NVIDIA GPUs: rows in registers, and sums over rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows_cuda import body

_HEADER = """
template <int V_, int E_>
struct Shape {
    static constexpr int V = V_, E = E_;
    int N;
};

// Sums over rows, of which a thread has those of its elements: in registers, in shared memory, in
// an order of its own, or, where it holds no elements, in what they are written to.
template <int V, int E, bool REGISTERS>
struct Totals {
    float held[REGISTERS && E ? E : 1] = {};
    float *at, *to;
    Shape<V, E> shape;

    __device__ Totals(float* shared, float* to, int N) : at(E ? shared : to), to(to), shape{N} {
        if constexpr (!(REGISTERS && E))
            each_pack(shape, [&](int p, int i) {
                for (int j = 0; j < V; ++j) sum(p, i, j) = 0;
            });
    }

    __device__ float& sum(int p, int i, int j) {
        if constexpr (E == 0) return at[i * V + j];
        else if constexpr (REGISTERS) return held[p * V + j];
        else return at[(p * V + j) * blockDim.x + threadIdx.x];  // no two lanes in one bank
    }

    // Adds what `f` makes of the elements of rows that lie side by side.
    template <typename F, typename... Rs>
    __device__ void add(F f, const Rs&... rows) {
        each_pack(shape, [&](int p, int i) {
            auto elements = [&](const auto&... packs) {
#pragma unroll
                for (int j = 0; j < V; ++j) sum(p, i, j) += f(float(packs.v[j])...);
            };
            elements(rows.pack(p, i)...);
        });
    }

    __device__ void store() {
        if constexpr (E > 0)
            each_pack(shape, [&](int p, int i) {
                for (int j = 0; j < V; ++j) to[i * V + j] = sum(p, i, j);
            });
    }
};
"""

RMS_NORM = """
        const float2 sums = two_sums_of([](float v, float c, float w) {
            return float2{v * v, v * (c * w)};
        }, values, by, every(weight));
        const float r = rsqrt(sums.x / N + eps), drawn = sums.y / N * r * r;
        write(x_grad + begin, [=](float v, float c, float w) {
            return (c * w - v * drawn) * r;
        }, values, by, every(weight));
        of_weight.add([=](float v, float c) { return c * (v * r); }, values, by);
"""
LAYER_NORM = """
        const float2 sums = two_sums_of([](float v, float c, float w) {
            return float2{v, c * w};
        }, values, by, every(weight));
        const float m = sums.x / N, shift = sums.y / N;
        const float2 around = two_sums_of<1>([=](float v, float c, float w) {
            return float2{(v - m) * (v - m), (v - m) * (c * w)};
        }, values, by, every(weight));
        const float r = rsqrt(around.x / N + eps), drawn = around.y / N * r * r;
        write(x_grad + begin, [=](float v, float c, float w) {
            return (c * w - shift - (v - m) * drawn) * r;
        }, values, by, every(weight));
        of_weight.add([=](float v, float c) { return c * ((v - m) * r); }, values, by);
        of_bias.add([](float c) { return c; }, by);
"""


def bodies(count_parts: str, text: str, sums: Sequence[str], blocks: str) -> Any:
    """CUDA bodies that go through rows of ``x`` and ``cotangent``, part by part.

    Args:
        count_parts: says into how many ``parts`` the ``R`` rows are divided; a block has one.
        text: statements for a row, which begins at ``begin`` and of which ``values`` and ``by``
            are those of ``x`` and of ``cotangent``.
        sums: the names of what is added up: `of_weight` in the text, the output ``weight_parts``.
        blocks: how many there are.
    """

    def made(held: tuple[int, int], most: int | None, in_shared: bool) -> Any:
        """Where a thread holds so many elements, of float32 and of 16 bits, for rows of at most so
        many, and where sums are."""
        kind, shared = (
            ("false", "shared") if in_shared else ("true", "static_cast<float*>(nullptr)")
        )
        totals = "".join(
            f"Totals<V, E, {kind}> of_{name}({shared} + {i} * E * blockDim.x,"
            f" {name}_parts + size_t(blockIdx.x) * N, N);\n"
            for i, name in enumerate(sums)
        )
        return body(
            f"""
        {count_parts}
        {totals}
        for (int n = blockIdx.x % parts; n < R; n += parts) {{
            const size_t begin = (blockIdx.x / parts * size_t(R) + n) * N;
            const auto values = row_at(x, begin), by = row_at(cotangent, begin);
            {text}
            __syncthreads();  // before others write what this row's sums are read from
        }}
        {"".join(f"of_{name}.store();" for name in sums)}
""",
            ["x", "weight", "cotangent", "x_grad"],
            blocks,
            held,
            None if most is None else f"N <= {most}",
            len(sums) * in_shared,
            _HEADER,
        )

    # Registers have the sums of one, and leave too few threads with those of two.
    return [
        made((8, 8), 2048, len(sums) > 1),
        made((8, 16), 8192, len(sums) > 1),
        made((16, 32), 16384, True),
        made((0, 0), None, False),
    ]
