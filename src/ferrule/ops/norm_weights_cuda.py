"""The gradients of norms on NVIDIA GPUs: rows in registers, sums over rows beside them, and the
next row on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows_cuda import body, having

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
    using Four = Pack<float, 4>;
    float held[REGISTERS && E ? E : 1] = {};
    float *at, *to;
    Shape<V, E> shape;

    __device__ Totals(float* shared, float* to, int N) : at(E ? shared : to), to(to), shape{N} {
        if constexpr (!(REGISTERS && E))
            each_pack(shape, [&](int p, int i, bool there) {
                for (int j = 0; there && j < V; ++j) sum(p, i, j) = 0;
            });
    }

    // Four are side by side: what lanes have is in banks of their own.
    __device__ Four& four(int p, int j) {
        return reinterpret_cast<Four*>(at)[(p * V + j) / 4 * blockDim.x + threadIdx.x];
    }

    __device__ float& sum(int p, int i, int j) {
        if constexpr (E == 0) return at[i * V + j];
        else if constexpr (REGISTERS) return held[p * V + j];
        else return four(p, j).v[j % 4];
    }

    // Adds what `f` makes of the elements of rows that lie side by side: or of others, if there
    // are none, to what is not stored.
    template <typename F, typename... Rs>
    __device__ void add(F f, const Rs&... rows) {
        each_pack(shape, [&](int p, int i, bool there) {
            auto elements = [&](const auto&... packs) {
                constexpr int n = REGISTERS || E == 0 ? 1 : 4;
#pragma unroll
                for (int j = 0; j < V; j += n) {
                    if constexpr (n == 1) sum(p, i, j) += f(packs.at(j)...);
                    else {
                        Four sums = four(p, j);
#pragma unroll
                        for (int k = 0; k < 4; ++k) sums.v[k] += f(packs.at(j + k)...);
                        four(p, j) = sums;
                    }
                }
            };
            elements(rows.pack(p, i)...);
        });
    }

    __device__ void store() {
        if constexpr (E > 0)
            each_pack(shape, [&](int p, int i, bool there) {
                for (int j = 0; there && j < V; ++j) to[i * V + j] = sum(p, i, j);
            });
    }
};
"""

RMS_NORM = """
        const float2 sums = two_sums_of([](float v, float c, float w) {
            return float2{v * v, v * (c * w)};
        }, values, by, every(weight));
        const float r = rsqrt(sums.x / N + eps), drawn = sums.y / N * r * r;
        write(to, [=](float v, float c, float w) {
            return (c * w - v * drawn) * r;
        }, values, by, every(weight));
        of_weight.add([=](float v, float c) { return c * (v * r); }, values, by);
        __syncthreads();  // before others write what this row's sums are read from
"""
LAYER_NORM = """
        const float4 found = moments([](float c, float w) { return c * w; }, values, by,
                                     every(weight));
        const float m = found.x, shift = found.y;
        const float r = rsqrt(found.z / N + eps), drawn = found.w / N * r * r;
        write(to, [=](float v, float c, float w) {
            return (c * w - shift - (v - m) * drawn) * r;
        }, values, by, every(weight));
        of_weight.add([=](float v, float c) { return c * ((v - m) * r); }, values, by);
        of_bias.add([](float c) { return c; }, by);
"""


# How many elements of a row a thread holds, of float32 and of 16 bits, for rows of so many: steps
# by 2, as a body has as much shared memory as its longest row needs.
HELD = (
    *((8, 16, most) for most in (512, 1024, 2048, 4096, 8192)),
    (16, 32, 16384),
)


def bodies(count_parts: str, text: str, sums: Sequence[str], blocks: str) -> Any:
    """CUDA bodies that go through rows of ``x`` and ``cotangent``, part by part.

    Args:
        count_parts: says into how many ``parts`` the ``R`` rows are divided; a block has one.
        text: statements for a row, of which ``values`` and ``by`` are those of ``x`` and of
            ``cotangent`` and ``to`` is where its gradient begins.
        sums: the names of what is added up: `of_weight` in the text, the output ``weight_parts``.
        blocks: how many there are.
    """

    def made(held: Sequence[int], most: int, in_shared: bool, ahead: bool) -> Any:
        """Where a thread holds so many elements, of float32 and of 16 bits, for rows of at most so
        many, where sums are, and whether a row is asked for while another is worked on."""
        kind, at = ("false", "shared") if in_shared else ("true", "static_cast<float*>(nullptr)")
        totals = "".join(
            f"Totals<V, E, {kind}> of_{name}({at} + {i} * E * blockDim.x,"
            f" {name}_parts + size_t(blockIdx.x) * N, N);\n"
            for i, name in enumerate(sums)
        )
        floats = len(sums) * in_shared
        # Two rows and two sums of more than 8192 float32 are more than any block can have.
        of_rows = (4 if floats * held[0] > 16 else 8) * ahead
        shared = (4 * floats + of_rows) * most
        when = " and ".join([f"N <= {most}", *having(shared)]) if most else None
        return body(
            f"""
        {count_parts}
        {totals}
        constexpr bool on = {int(ahead)} && E > 0 && (sizeof(T) == 2 || {floats} * E <= 16);
        auto* const packs = reinterpret_cast<Pack<T, V>*>(shared + {floats} * E * blockDim.x);
        Ahead<T, V, E, on> next{{packs}}, next_by{{packs + E / V * blockDim.x}};
        int n = blockIdx.x % parts;
        size_t begin = (blockIdx.x / parts * size_t(R) + n) * N;
        auto ask = [&] {{
            if (n >= R) return;
            next.ask(x + begin, N);
            next_by.ask(cotangent + begin, N);
        }};
        for (ask(); n < R;) {{
            const auto values = next.taken(x + begin, N);
            const auto by = next_by.taken(cotangent + begin, N);
            T* const to = x_grad + begin;
            n += parts;
            begin += size_t(parts) * N;
            ask();  // for what no other thread reads, and this one has in registers
            {text}
        }}
        {"".join(f"of_{name}.store();" for name in sums)}
""",
            ["x", "weight", "cotangent", "x_grad"],
            blocks,
            held,
            when,
            shared,
            _HEADER,
        )

    # Registers have the sums of one, and leave too few threads with those of two. Behind a body
    # that only some GPUs have room for is one that asks for no rows ahead.
    by_length = []
    for *held, most in HELD:
        in_shared = len(sums) > 1 or most > 8192
        by_length.append(made(held, most, in_shared, True))
        if by_length[-1].when != f"N <= {most}":
            by_length.append(made(held, most, in_shared, False))
    return [*by_length, made((0, 0), 0, False, False)]
