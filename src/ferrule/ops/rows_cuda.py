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

    // The row, read as it is needed.
    __device__ Row<T, V, 0> arrived(const T* from, int N) {
        wait();
        return {ON ? reinterpret_cast<const T*>(to) : from, N};
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

// Calls `f` with the elements of rows that lie side by side.
template <typename F, typename R, typename... Rs>
__device__ void each(F f, const R& row, const Rs&... rows) {
    each_pack(row, [&](int p, int i, bool there) {
        auto elements = [&](const auto&... packs) {
            if (!there) return;
#pragma unroll
            for (int j = 0; j < R::V; ++j) f(float(packs.v[j])...);
        };
        elements(row.pack(p, i), rows.pack(p, i)...);
    });
}

// Writes what `f` makes of the elements of rows that lie side by side.
template <typename T, typename F, typename R, typename... Rs>
__device__ void write(T* to, F f, const R& row, const Rs&... rows) {
    each_pack(row, [&](int p, int i, bool there) {
        Pack<T, R::V> made;
        auto elements = [&](const auto&... packs) {
#pragma unroll
            for (int j = 0; j < R::V; ++j) made.v[j] = T(f(float(packs.v[j])...));
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
            made.v[j] = typename R::T(float(a.v[j]) + float(b.v[j]));
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

// exp, of 16-bit elements as the hardware has it: a few units in the last place of a float.
template <typename T>
__device__ float exp_for(float value) {
    if constexpr (sizeof(T) == 2) return __expf(value);
    else return expf(value);
}

// The largest of all, and the sum of what was scaled by exp(-largest).
__device__ float2 largest_and_sum_of_warp(float2 value) {
    float largest = value.x;
    for (int i = 16; i; i /= 2) {
        const float other = __shfl_xor_sync(~0u, largest, i);
        largest = other > largest ? other : largest;
    }
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

// The sum of what `f` makes of the elements of rows, over the block: a float, or a float2.
template <int slot = 0, typename F, typename... Rs>
__device__ float sum_of(F f, const Rs&... rows) {
    float sum = 0;
    each([&](auto... values) { sum += f(values...); }, rows...);
    return over_block<slot>(sum, 0.0f, [](float value) { return sum_of_warp(value); });
}

template <int slot = 0, typename F, typename... Rs>
__device__ float2 two_sums_of(F f, const Rs&... rows) {
    float2 sum = {0, 0};
    each([&](auto... values) {
        const float2 value = f(values...);
        sum.x += value.x;
        sum.y += value.y;
    }, rows...);
    return over_block<slot>(sum, float2{0, 0}, [](float2 value) { return sum_of_warp(value); });
}

// The largest element of a row, and the sum of exp(x - largest).
template <typename R>
__device__ float2 largest_and_sum(const R& row) {
    // Not -infinity: its difference from itself would be NaN.
    constexpr float lowest = -3.4028234663852886e38f;
    float2 mine = {lowest, 0};
    auto larger = [](float a, float b) { return a > b ? a : b; };
    if constexpr (R::E > 0) {
        each([&](float v) { mine.x = larger(v, mine.x); }, row);
        each([&](float v) { mine.y += exp_for<typename R::T>(v - mine.x); }, row);
    } else {
        // One pass, in which a thread's sum is scaled down when it meets something larger.
        each_pack(row, [&](int p, int i, bool) {
            const auto pack = row.pack(p, i);
            float top = mine.x;
            for (int j = 0; j < R::V; ++j) top = larger(float(pack.v[j]), top);
            mine.y *= exp_for<typename R::T>(mine.x - top);
            mine.x = top;
            for (int j = 0; j < R::V; ++j)
                mine.y += exp_for<typename R::T>(float(pack.v[j]) - top);
        });
    }
    return over_block<0>(mine, float2{lowest, 0}, [](float2 value) {
        return largest_and_sum_of_warp(value);
    });
}
"""


# How many elements of a row a thread holds, of float32 and of 16 bits, for rows of so many bytes.
HELD = ((4, 16, 2048), (8, 16, 16384), (16, 32, 65536))
# Of these, rows of 16-bit elements of so many bytes that ask ahead for what all share, of how many
# arrays at most: it is in shared memory by the time that it is needed. A block has as much of that
# as the longest of them: were it counted in a launch, the launch would go through Python.
_AHEAD = {16384: ((4096, 8192, 16384), 1), 65536: ((32768,), 2)}


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


def bodies(text: str, arrays: Sequence[str], many: str = "", ahead: int = 0) -> Any:
    """CUDA bodies of an op over rows, for rows of several lengths.

    Args:
        text: statements for one row, in which ``row(x)`` is this row of an array, ``every(w)`` the
            whole of one that all rows share, and ``begin`` where the row begins. ``ahead(w, n)``
            asks for the ``n``th of those that are shared, of which ``.arrived(w, N)`` then is the
            whole. Sums are float32: CUDA bodies take no float64.
        arrays: the names of all that have rows, the first an input, and of what rows share.
        many: how many rows there are, where those that are empty count, too.
        ahead: how many arrays are asked for ahead.
    """
    many = many or f"{arrays[0]}.size // max(N, 1)"

    def made(held: Sequence[int], when: str | None, most_asked: int = 0) -> Any:
        begin = f"""const size_t begin = size_t(blockIdx.x) * N;
        auto row = [&](const auto* from) {{ return row_at(from, begin); }};
        auto ahead = [&](const auto* from, int n) {{
            using W = cuda::std::remove_cvref_t<decltype(*from)>;
            constexpr bool on = {int(most_asked > 0)} && E > 0 && sizeof(W) == sizeof(T);
            auto* const packs = reinterpret_cast<Pack<W, V>*>(shared);
            Ahead<W, V, E, on> asked{{packs + n * E / V * blockDim.x}};
            asked.ask(from, N);
            return asked;
        }};"""
        return body(begin + text, arrays, many, held, when, ahead * most_asked)

    every: list[Any] = []
    for *held, most in HELD:
        size = "N * (4 if T == float32 else 2) <= {}"
        asked, most_arrays = _AHEAD.get(most, ((), 0))
        for m in asked if 0 < ahead <= most_arrays else ():
            when = [size.format(m), "T != float32", *having(most_arrays * m)]
            every.append(made(held, " and ".join(when), m))
        every.append(made(held, size.format(most)))
    return [*every, made((0, 0), None)]


def body(
    text: str,
    arrays: Sequence[str],
    blocks: str,
    held: Sequence[int] = (0, 0),
    when: str | None = None,
    shared: int = 0,
    header: str = "",
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
    if (N == 0) return;
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
