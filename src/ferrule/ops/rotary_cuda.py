"""The CUDA body of `rope`, for all dtypes but float64."""

from __future__ import annotations

from typing import Any

import ferrule

HEADS = 4  # that share an angle: the same thread turns the pair in each of them

# Of 16-bit elements as the hardware has it, of angles between -pi and pi: right to 21 bits.
_ANGLES = """
template <typename T>
__device__ void sine_and_cosine(float angle, float& sine, float& cosine) {
    if constexpr (sizeof(T) == 2) {
        const float turns = rintf(angle * 0.15915494f);
        float rest = fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, angle));
        if (fabsf(angle) > 1e5f)
            rest = float(fma(rint(angle * 0.15915494309189535), -6.283185307179586, double(angle)));
        sine = __sinf(rest);
        cosine = __cosf(rest);
    } else {
        sincosf(angle, &sine, &cosine);
    }
}
"""

# A thread turns as many pairs as it reads with 16 bytes. A pair of neighbours lies in one pack, or,
# where that would leave threads too little, in two.
_TURN = """
constexpr bool one = NEIGHBOURS && sizeof(T) == 4;
constexpr int packed = HALF * (one ? 2 : 1) % (16 / sizeof(T)) ? 1 : 16 / sizeof(T);
const uint32_t groups = (S_size + HEADS - 1) / HEADS, blocks = (L - 1) / blockDim.y + 1;
const int l = blockIdx.x % blocks * blockDim.y + threadIdx.y;
if (l >= L) return;
const size_t group = blockIdx.x / blocks, example = group / groups, head = group % groups * HEADS;
const int heads = min(size_t(S_size) - head, size_t(HEADS));
auto row = [&](int h) { return ((example * S_size + head + h) * L + l) * D; };
auto turn = [&](auto size) {
    constexpr int V = decltype(size)::value, PACKS = one && V > 1 ? 1 : 2, PAIRS = V * PACKS / 2;
    constexpr int AT_ONCE = 4 / PACKS;  // heads that are read
    for (int k = threadIdx.x * PAIRS; k < HALF; k += blockDim.x * PAIRS) {
        const int near = NEIGHBOURS ? 2 * k : k, far = NEIGHBOURS ? 2 * k + V : k + HALF;
        AlignedVector<T, V> of[AT_ONCE][PACKS];
        auto read = [&](int begin) {
#pragma unroll
            for (int h = 0; h < AT_ONCE; ++h) {
                if (begin + h >= heads) break;
                of[h][0] = unsafe_load_vector<V>(x + row(begin + h) + near, 0);
                if (PACKS > 1)
                    of[h][PACKS - 1] = unsafe_load_vector<V>(x + row(begin + h) + far, 0);
            }
        };
        read(0);  // on its way while angles are found
        float c[PAIRS], s[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            sine_and_cosine<T>(float(position(example) + l) * scale * frequency(k + i), s[i], c[i]);
            s[i] *= SIGN;
        }
#pragma unroll 1
        for (int begin = 0; begin < heads; begin += AT_ONCE) {
            if (begin > 0) read(begin);
#pragma unroll
            for (int h = 0; h < AT_ONCE; ++h) {
                if (begin + h >= heads) break;
                AlignedVector<T, V> to[PACKS];
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    const int u = NEIGHBOURS ? 2 * i : i, v = NEIGHBOURS ? 2 * i + 1 : V + i;
                    const float a = of[h][u / V][u % V], b = of[h][v / V][v % V];
                    to[u / V][u % V] = T(a * c[i] - b * s[i]);
                    to[v / V][v % V] = T(a * s[i] + b * c[i]);
                }
                unsafe_store_vector<V>(turned + row(begin + h) + near, 0, to[0]);
                if (PACKS > 1)
                    unsafe_store_vector<V>(turned + row(begin + h) + far, 0, to[PACKS - 1]);
            }
        }
    }
};
if (D % packed == 0 && is_aligned<packed>(x) && is_aligned<packed>(turned))
    turn(cuda::std::integral_constant<int, packed>());
else turn(cuda::std::integral_constant<int, 1>());
if (turned == x) return;
for (int h = 0; h < heads; ++h) {
    for (int k = 2 * HALF + threadIdx.x; k < D; k += blockDim.x)
        turned[row(h) + k] = x[row(h) + k];
}
"""


def groups(offsets: str) -> str:
    """How many groups of heads there are."""
    return f"{'B * ' * (offsets == 'each')}ceildiv(S_size, {HEADS})"


def body(
    dims: int, traditional: bool, offsets: str, by_freqs: bool, turned: str, sign: str = ""
) -> Any:
    """The body for constants as of the Metal body's."""
    half = dims // 2
    offset = {"number": "offset", "one": "offset[0]", "each": "offset[example]"}[offsets]
    frequency = "1 / freqs[pair]" if by_freqs else f"exp2f(-log2f(base) * pair / {half})"
    span = f"({dims} if T == float32 else {half})" if traditional else half
    across = f"min(ceildiv({span}, 4 if T == float32 else 8), 64)"
    down = f"max(min(256 // {across}, L), 1)"
    return ferrule.cuda_body(
        f"""
constexpr bool NEIGHBOURS = {int(traditional)};
constexpr int HALF = {half}, HEADS = {HEADS}, SIGN = {sign}1;
T* const turned = {turned};
auto position = [&](size_t example) {{ return int64_t({offset}); }};
auto frequency = [&](int pair) {{ return {frequency}; }};
"""
        + _TURN,
        grid=(f"{across} * {groups(offsets)} * ceildiv(L, {down})", down),
        threadgroup=(across, down),
        header=_ANGLES,
        when="T != float64",
    )
