"""Rows along the last axis on NVIDIA GPUs: bodies that read and write 16 bytes at a time.

A block takes a row. Each of its threads has some packs of ``V`` elements, which are 16 bytes where
rows and arrays begin at multiples of that, and else one element. Packs of rows of up to 64 KB are
read at once, before anything is done with them, and stay in registers; else what is needed more
than once is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ferrule

_HEADER = """
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
    T v[V];

    // A bfloat16 is half of a float: of two in a word, each takes one instruction.
    __device__ float at(int j) const {
        if constexpr (cuda::std::is_same_v<T, __nv_bfloat16> && V > 1) {
            uint32_t word;
            memcpy(&word, v + j / 2 * 2, sizeof(word));
            return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
        } else {
            return float(v[j]);
        }
    }
};

// What a thread has of a row, in packs: it holds `E` elements, or 0 and then reads them again.
template <typename T_, int V_, int E_>
struct Row {
    using T = T_;
    static constexpr int V = V_, E = E_;
    const T* from;
    int N;
    Pack<T, V> held[E ? E / V : 1];

    __device__ explicit Row(int N) : N(N) {}

    __device__ Row(const T* from, int N) : from(from), N(N) {
#pragma unroll
        for (int p = 0; p < E / V; ++p) {
            const int i = min(int(threadIdx.x + p * blockDim.x), N / V - 1);
            held[p] = reinterpret_cast<const Pack<T, V>*>(from)[i];
        }
    }

    // The thread's pack `p`, which is pack `i` of the row.
    __device__ Pack<T, V> pack(int p, int i) const {
        if constexpr (E > 0) return held[p];
        else return reinterpret_cast<const Pack<T, V>*>(from)[i];
    }
};

// Where packs of a row that threads need later arrive, in its order in shared memory, while they do
// other work: each has its own ones only. Or rows are read where they lie.
template <typename T, int V, int E, bool ON>
struct Ahead {
    Pack<T, V>* to;

    __device__ void ask(const T* from, int N) {
        if constexpr (ON) {
#pragma unroll
            for (int p = 0; p < E / V; ++p) {
                const int i = min(int(threadIdx.x + p * blockDim.x), N / V - 1);
                auto* const pack = to + p * blockDim.x + threadIdx.x;
                const auto* const source = reinterpret_cast<const Pack<T, V>*>(from) + i;
#if __CUDA_ARCH__ >= 800
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                             "r"(uint32_t(__cvta_generic_to_shared(pack))), "l"(source) : "memory");
#else
                *pack = *source;
#endif
            }
        }
    }

    __device__ void wait() {
#if __CUDA_ARCH__ >= 800
        if constexpr (ON) asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    }

    __device__ Row<T, V, E> taken(const T* from, int N) {
        if constexpr (!ON) return {from, N};
        wait();
        Row<T, V, E> row{N};
#pragma unroll
        for (int p = 0; p < E / V; ++p) row.held[p] = to[p * blockDim.x + threadIdx.x];
        return row;
    }
};

// Calls `f` with the number of each pack of this thread, in its own and in the row's count, and
// whether there is such a pack: else the second is another's, which can be read as well. Loads do
// not wait for that question, nor for each other.
template <typename R, typename F>
__device__ void each_pack(const R& row, F f) {
    const int packs = row.N / R::V;
    if constexpr (R::E > 0) {
#pragma unroll
        for (int p = 0; p < R::E / R::V; ++p) {
            const int i = threadIdx.x + p * blockDim.x;
            f(p, min(i, packs - 1), i < packs);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < packs; i += blockDim.x) f(0, i, true);
    }
}

__device__ float plus(float a, float b) { return a + b; }
__device__ float2 plus(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ float4 plus(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// The thread's part of the sum of what `f` makes of the elements of rows that lie side by side:
// floats, one to four. Whether there is a pack is asked of its sum.
template <typename S, typename F, typename R, typename... Rs>
__device__ S sum_of_thread(F f, const R& row, const Rs&... rows) {
    S sum{};
    each_pack(row, [&](int p, int i, bool there) {
        auto elements = [&](const auto&... packs) {
            S part = f(packs.at(0)...);
#pragma unroll
            for (int j = 1; j < R::V; ++j) part = plus(part, f(packs.at(j)...));
            sum = plus(sum, there ? part : S{});
        };
        elements(row.pack(p, i), rows.pack(p, i)...);
    });
    return sum;
}

// Writes what `f` makes of the elements of rows that lie side by side.
template <typename T, typename F, typename R, typename... Rs>
__device__ void write(T* to, F f, const R& row, const Rs&... rows) {
    each_pack(row, [&](int p, int i, bool there) {
        Pack<T, R::V> made;
        auto elements = [&](const auto&... packs) {
#pragma unroll
            for (int j = 0; j < R::V; ++j) made.v[j] = T(f(packs.at(j)...));
        };
        elements(row.pack(p, i), rows.pack(p, i)...);
        if (there) reinterpret_cast<Pack<T, R::V>*>(to)[i] = made;
    });
}

// Writes the sum of two rows, which is then the row.
template <typename R>
__device__ R sum_of_rows(typename R::T* to, const R& row, const R& other) {
    R sum = row;
    sum.from = to;
    each_pack(row, [&](int p, int i, bool there) {
        const auto a = row.pack(p, i), b = other.pack(p, i);
        auto& made = sum.held[p];
#pragma unroll
        for (int j = 0; j < R::V; ++j)
            made.v[j] = typename R::T(a.at(j) + b.at(j));
        if (there) reinterpret_cast<Pack<typename R::T, R::V>*>(to)[i] = made;
    });
    return sum;
}

__device__ float sum_of_warp(float value) {
    for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    return value;
}

__device__ float2 sum_of_warp(float2 value) {
    return {sum_of_warp(value.x), sum_of_warp(value.y)};
}

// exp, of 16-bit elements as the hardware has it, whose error is far below theirs.
template <typename T>
__device__ float exp_for(float value) {
    if constexpr (sizeof(T) == 2) {
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(value * 1.44269504f));
        return value;
    } else {
        return expf(value);
    }
}

// The largest of all, and the sum of what was scaled by exp(-largest).
__device__ float2 largest_and_sum_of_warp(float2 value) {
    float largest = value.x;
    for (int i = 16; i; i /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    return {largest, sum_of_warp(value.y * expf(value.x - largest))};
}

// One value for all threads of the block: that of each warp, and then of the warps. Of two such
// values, one after the other, `slot` is 0 and 1, so that nobody waits before it writes.
template <int slot, typename S, typename F>
__device__ S over_block(S value, S none, F over_warp) {
    __shared__ S shared[32];
    const int lane = threadIdx.x % 32;
    value = over_warp(value);
    if (blockDim.x == 32) return value;
    if (lane == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    return over_warp(lane < blockDim.x / 32 ? shared[lane] : none);
}

template <int slot, typename S>
__device__ S sum_over_block(S value) {
    return over_block<slot>(value, S{}, [](S v) { return sum_of_warp(v); });
}

// The sum of what `f` makes of the elements of rows, over the block: a float, or a float2.
template <int slot = 0, typename F, typename... Rs>
__device__ float sum_of(F f, const Rs&... rows) {
    return sum_over_block<slot>(sum_of_thread<float>(f, rows...));
}

template <typename F, typename... Rs>
__device__ float2 two_sums_of(F f, const Rs&... rows) {
    return sum_over_block<0>(sum_of_thread<float2>(f, rows...));
}

// What differences are taken from before the mean is known: the first element that a thread has.
// As it is one of them, little is lost where it is far from the others; but if it is huge, squares
// of many differences from it overflow where those from the mean do not.
__device__ float pivot_of(float first) {
    return fabsf(first) < 1e15f ? first : 0;
}

// A sum of squares that overflowed is infinite, which makes zeros of the elements.
__device__ float or_infinite(float squares) {
    return squares == squares ? squares : 1 / 0.0f;
}

// The mean and the sum of squared differences from it, of 32 such, each of `n` elements, of `all`
// together: around `near`, so that what all share is not lost (Chan, Golub and LeVeque 1983,
// "Algorithms for computing the sample variance").
__device__ float2 merged(float2 value, float n, float all, float near) {
    const float mean = near + __fdividef(sum_of_warp(n * (value.x - near)), all);
    const float off = value.x - mean;
    return {mean, sum_of_warp(value.y + n * off * off)};
}

// The mean of a row, and the sum of squared differences from it. Threads that hold much find theirs
// in one go, around their pivots. The others read their row twice, which takes fewer registers and
// less merging.
template <typename R>
__device__ float2 mean_and_squares(const R& row) {
    constexpr int V = R::V, E = R::E;
    if constexpr (E * sizeof(typename R::T) < 128) {
        const float mean = sum_of<0>([](float v) { return v; }, row) / row.N;
        return {mean, sum_of<1>([=](float v) { return (v - mean) * (v - mean); }, row)};
    } else {
        const int packs = row.N / V, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const bool full = packs == E / V * int(blockDim.x);
        // How many elements so many threads have, of which this is the first.
        auto count = [&](int first, int threads) -> float {
            if (full) return threads * E;
            int n = 0;
            for (int p = 0; p < E / V; ++p)
                n += max(min(packs - p * int(blockDim.x) - first, threads), 0);
            return n * V;
        };
        const float pivot = pivot_of(row.held[0].at(0)), n = count(threadIdx.x, 1);
        const float2 sums = sum_of_thread<float2>([=](float v) {
            return float2{v - pivot, (v - pivot) * (v - pivot)};
        }, row);
        const float off = __fdividef(sums.x, fmaxf(n, 1)), mean = pivot + off;
        const float2 mine = merged({mean, sums.y - sums.x * off}, n,
                                   fmaxf(count(warp * 32, 32), 1), __shfl_sync(~0u, mean, 0));
        if (blockDim.x == 32) return {mine.x, or_infinite(mine.y)};
        __shared__ float2 shared[32];
        if (lane == 0) shared[warp] = mine;
        __syncthreads();
        const bool there = lane < blockDim.x / 32;
        const float2 all = merged(there ? shared[lane] : float2{},
                                  there ? count(lane * 32, 32) : 0, row.N, shared[0].x);
        return {all.x, or_infinite(all.y)};
    }
}

// The pivot of a thread, and how many elements it has of a row. Sums of differences from the pivot
// can be moved to the row's mean.
template <typename R>
__device__ float2 pivot_and_count(const R& row) {
    float n = 0;
    each_pack(row, [&](int, int, bool there) { n += there ? R::V : 0; });
    return {pivot_of(row.pack(0, min(int(threadIdx.x), row.N / R::V - 1)).at(0)), n};
}

// Of a row, and of what `f` makes of others beside it: the two means, the sum of squared
// differences from the first, and of those differences times the others.
template <typename F, typename R, typename... Rs>
__device__ float4 moments(F f, const R& row, const Rs&... rows) {
    const float2 own = pivot_and_count(row);
    const float4 sums = sum_of_thread<float4>([=](float v, auto... others) {
        const float d = v - own.x, g = f(others...);
        return float4{d, d * d, g, d * g};
    }, row, rows...);
    const float2 all = sum_over_block<0>(float2{own.x * own.y + sums.x, sums.z});
    const float mean = all.x / row.N, off = own.x - mean;
    const float2 around = sum_over_block<1>(
        float2{sums.y + off * (2 * sums.x + own.y * off), sums.w + off * sums.z});
    return {mean, all.y / row.N, or_infinite(around.x), around.y};
}

// exp(x - largest) of a row's elements, and their sum. A row that threads hold is that of
// exp(x - the thread's largest), so that exp is found once: `scale` is between the two.
template <typename R>
struct Exps {
    using T = typename R::T;
    static constexpr int V = R::V, E = R::E;
    R row;
    int N;
    float largest, sum, scale;
    Pack<float, V> held[E ? E / V : 1];

    __device__ explicit Exps(const R& row) : row(row), N(row.N), scale(1) {
        // Not -infinity: its difference from itself would be NaN.
        constexpr float lowest = -3.4028234663852886e38f;
        float2 mine = {lowest, 0};
        if constexpr (E > 0) {
            each_pack(row, [&](int p, int i, bool) {
#pragma unroll
                for (int j = 0; j < V; ++j) mine.x = fmaxf(mine.x, row.held[p].at(j));
            });
            each_pack(row, [&](int p, int i, bool) {
#pragma unroll
                for (int j = 0; j < V; ++j) held[p].v[j] = exp_for<T>(row.held[p].at(j) - mine.x);
            });
            mine.y = sum_of_thread<float>([](float e) { return e; }, *this);
        } else {
            // One pass, in which a thread's sum is scaled down when it meets something larger.
            each_pack(row, [&](int p, int i, bool) {
                const auto pack = row.pack(p, i);
                float top = mine.x;
                for (int j = 0; j < V; ++j) top = fmaxf(top, pack.at(j));
                mine.y *= exp_for<T>(mine.x - top);
                mine.x = top;
                for (int j = 0; j < V; ++j) mine.y += exp_for<T>(pack.at(j) - top);
            });
        }
        const float2 found = over_block<0>(mine, float2{lowest, 0}, [](float2 value) {
            return largest_and_sum_of_warp(value);
        });
        largest = found.x;
        sum = found.y;
        if constexpr (E > 0) scale = expf(mine.x - largest);
    }

    __device__ Pack<float, V> pack(int p, int i) const {
        if constexpr (E > 0) return held[p];
        const auto values = row.pack(p, i);
        Pack<float, V> exps;
#pragma unroll
        for (int j = 0; j < V; ++j) exps.v[j] = exp_for<T>(values.at(j) - largest);
        return exps;
    }
};
"""


# How many elements of a row a thread holds, of float32 and of 16 bits, for rows of so many bytes:
# many, as long as there are warps, for what a warp has to do besides is shared by more of them.
HELD = ((4, 8, 512), (8, 16, 1024), (16, 32, 4096), (32, 64, 65536))
# Where it makes floats of them, and where it holds two rows.
HELD_AS_FLOATS = (*HELD[:-1], (32, 32, 65536))
HELD_OF_TWO = (*HELD[:-1], (16, 32, 65536))


def having(shared: int) -> list[str]:
    """The condition that a block of a GPU can have so many bytes of shared memory, 1 KB aside, by
    the table of compute capabilities in the CUDA programming guide."""
    if shared <= 48 << 10:
        return []
    if shared <= 98 << 10:
        return ["capability >= 80"]
    large = "capability == 90 or capability == 100 or capability == 103"
    middle = "capability == 80 or capability == 87 or " * (shared <= 162 << 10)
    return [f"({middle}{large})"]


def bodies(
    text: str,
    arrays: Sequence[str],
    held: Sequence[Sequence[int]] = HELD,
    many: str = "",
    empty: str = "",
) -> Any:
    """CUDA bodies of an op over rows, for rows of several lengths.

    Args:
        text: statements for one row, in which ``row(x)`` is this row of an array, ``every(w)`` the
            whole of one that all rows share, and ``begin`` where the row begins. Sums are float32:
            CUDA bodies take no float64.
        arrays: the names of all that have rows, the first an input, and of what rows share.
        held: as `HELD`.
        many: how many rows there are, where those that are empty count, too.
        empty: statements for a row of no elements.
    """
    many = many or f"{arrays[0]}.size // max(N, 1)"
    text = f"""const size_t begin = size_t(blockIdx.x) * N;
        auto row = [&](const auto* from) {{ return row_at(from, begin); }};
        {text}"""
    size = "N * (4 if T == float32 else 2)"
    return [
        *(body(text, arrays, many, of, f"{size} <= {most}", empty=empty) for *of, most in held),
        body(text, arrays, many, empty=empty),
    ]


def body(
    text: str,
    arrays: Sequence[str],
    blocks: str,
    held: Sequence[int] = (0, 0),
    when: str | None = None,
    shared: int = 0,
    header: str = "",
    empty: str = "",
) -> Any:
    """One body over rows.

    Args:
        text: statements, in which ``row_at(x, begin)`` is the row of an array that begins there,
            ``V`` the size of packs, and ``E`` how many elements a thread holds, which is 0 where
            rows or arrays do not begin at multiples of 16 bytes.
        arrays: as of `bodies`.
        blocks: how many blocks there are.
        held: how many elements of a row a thread holds, of float32 and of 16 bits; 0 for none.
        when: for which calls it is.
        shared: how many bytes of shared memory, ``shared``, a block has.
        header: further functions.
        empty: as of `bodies`.
    """
    elements = "({} if T == float32 else {})".format(*held) if held[0] != held[1] else f"{held[0]}"
    threads = f"max(ceildiv(N, 32 * {elements}) * 32, 32)" if held[0] else "1024"
    return ferrule.cuda_body(
        f"""
    extern __shared__ __align__(16) float shared[];
    constexpr int packed = 16 / sizeof(T);
    auto one_row = [&](auto size) {{
        constexpr int V = decltype(size)::value;
        constexpr int E = V == 1 ? 0 : sizeof(T) == 4 ? {held[0]} : {held[1]};
        auto row_at = [&](const auto* from, size_t begin) {{
            return Row<cuda::std::remove_cvref_t<decltype(*from)>, V, E>(from + begin, N);
        }};
        auto every = [&](const auto* from) {{
            return Row<cuda::std::remove_cvref_t<decltype(*from)>, V, 0>(from, N);
        }};
        {text}
    }};
    auto aligned = [](const auto*... from) {{
        return ((size_t(from) % (packed * sizeof(*from)) == 0) && ...);
    }};
    if (N == 0) {{ {empty} return; }}
    if (N % packed == 0 && aligned({", ".join(arrays)}))
        one_row(cuda::std::integral_constant<int, packed>());
    else one_row(cuda::std::integral_constant<int, 1>());
""",
        grid=f"({blocks}) * {threads}",
        threadgroup=threads,
        header=_HEADER + header,
        when=when,
        shared_memory=shared,
    )
