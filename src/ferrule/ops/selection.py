"""topk: the largest elements along the last axis, and where they are."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, descending, taken, widened


def topk(x: Any, k: int) -> tuple[Any, Any]:
    """The ``k`` largest elements along the last axis.

    Args:
        x: an array (*S, N) of float32, float16, bfloat16, or integers or bools of up to 32 bits.
        k: how many, from 0 to N.

    Returns:
        values (*S, k), like ``x``, the largest first; and indices (*S, k) of int64, their places
        along the axis. Of equal elements the one with the lowest index comes first; NaN is larger
        than every number, and -0.0 equals 0.0. The values have a derivative.

    Raises:
        KernelError: ``k`` is not from 0 to N, or ``x`` has no axis or another dtype.
        KernelTypeError: ``x`` is no array, or ``k`` no int.
    """
    values, indices, _ = _topk(x, k)
    return values, indices


# Elements become unsigned integers of the same order.
_ORDER = """
    inline uint rank_of(float x) {
        if (metal::isnan(x)) return 0xFFFFFFFFu;
        const uint bits = as_type<uint>(x + 0.0f);  // -0.0 becomes 0.0
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    inline uint rank_of(half x) { return rank_of(float(x)); }
    inline uint rank_of(bfloat16_t x) { return rank_of(float(x)); }
    inline uint rank_of(int x) { return uint(x) ^ 0x80000000u; }
    inline uint rank_of(short x) { return rank_of(int(x)); }
    inline uint rank_of(char x) { return rank_of(int(x)); }
    inline uint rank_of(uint x) { return x; }
    inline uint rank_of(ushort x) { return x; }
    inline uint rank_of(uchar x) { return x; }
    inline uint rank_of(bool x) { return x; }
"""

# A simdgroup for each row. Lane i keeps the (i+1)-th largest of what was seen; elements that are
# larger than the last of the k are put in their places, one by one, which happens ever more rarely.
# One that is no longer larger, after those before it, finds its place behind the k.
_FEW = """
    const uint row = thread_position_in_grid.y, lane = thread_index_in_simdgroup;
    const device T* values_of_row = x + ulong(row) * N;
    uint kept = 0, kept_at = 0, least = 0, filled = 0;

    for (uint start = 0; start < uint(N); start += 32) {
        const uint at = start + lane;
        const uint rank = at < uint(N) ? rank_of(values_of_row[at]) : 0;
        const bool waits = at < uint(N) && (rank > least || start == 0);
        uint waiting = uint(simd_vote::vote_t(simd_ballot(waits)));
        if (waiting == 0) continue;
        for (; waiting != 0; waiting &= waiting - 1) {
            const uint chosen = uint(metal::ctz(waiting));
            const uint other = simd_shuffle(rank, ushort(chosen));
            const bool before = lane < filled && kept >= other;
            const uint place = metal::popcount(uint(simd_vote::vote_t(simd_ballot(before))));
            const uint shifted = simd_shuffle_up(kept, 1);
            const uint shifted_at = simd_shuffle_up(kept_at, 1);
            if (lane > place) { kept = shifted; kept_at = shifted_at; }
            if (lane == place) { kept = other; kept_at = start + chosen; }
            ++filled;
        }
        least = simd_shuffle(kept, ushort(k - 1));
    }
    if (lane < uint(k)) {
        const ulong out = ulong(row) * k + lane;
        values[out] = values_of_row[kept_at];
        indices[out] = kept_at;
        picked[out] = kept_at;
    }
"""

# A threadgroup for each row. The k-th largest is found digit by digit, 8 bits at a time; those that
# are larger, and the first of those that are equal, are then collected, and each finds its place by
# counting those before it.
_MANY = """
    threadgroup atomic_uint counts[256];
    threadgroup uint found[2], larger_before[256], equal_before[256];
    const uint row = thread_position_in_grid.y, t = thread_index_in_threadgroup;
    const device T* values_of_row = x + ulong(row) * N;

    uint last = 0, known = 0, wanted = k;  // the k-th largest, as far as its bits are known
    for (int shift = 24; shift >= 0; shift -= 8) {
        atomic_store_explicit(&counts[t], 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = t; i < uint(N); i += 256) {
            const uint rank = rank_of(values_of_row[i]);
            if ((rank & known) == last)
                atomic_fetch_add_explicit(&counts[rank >> shift & 255], 1, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t == 0) {
            uint digit = 255, above = 0;
            for (; digit > 0; --digit) {
                const uint here = atomic_load_explicit(&counts[digit], memory_order_relaxed);
                if (above + here >= wanted) break;
                above += here;
            }
            found[0] = digit;
            found[1] = wanted - above;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        last |= found[0] << shift;
        known |= 255u << shift;
        wanted = found[1];
    }

    // Each thread collects from a part of the row, so that indices ascend.
    const uint part = (N + 255) / 256;
    const uint begin = metal::min(t * part, uint(N)), end = metal::min(begin + part, uint(N));
    uint larger = 0, equal = 0;
    for (uint i = begin; i < end; ++i) {
        const uint rank = rank_of(values_of_row[i]);
        larger += rank > last;
        equal += rank == last;
    }
    larger_before[t] = larger;
    equal_before[t] = equal;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
        uint larger_sum = 0, equal_sum = 0;
        for (uint i = 0; i < 256; ++i) {
            const uint l = larger_before[i], e = equal_before[i];
            larger_before[i] = larger_sum;
            equal_before[i] = equal_sum;
            larger_sum += l;
            equal_sum += e;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device int* collected = picked + ulong(row) * k;
    uint equals = equal_before[t];
    uint place = larger_before[t] + metal::min(equals, wanted);
    for (uint i = begin; i < end; ++i) {
        const uint rank = rank_of(values_of_row[i]);
        if (rank > last || (rank == last && equals < wanted)) collected[place++] = i;
        equals += rank == last;
    }
    threadgroup_barrier(mem_flags::mem_device);

    for (uint j = t; j < uint(k); j += 256) {
        const uint rank = rank_of(values_of_row[collected[j]]);
        uint before = 0;
        for (uint i = 0; i < uint(k); ++i) {
            const uint other = rank_of(values_of_row[collected[i]]);
            before += other > rank || (other == rank && i < j);
        }
        values[ulong(row) * k + before] = values_of_row[collected[j]];
        indices[ulong(row) * k + before] = collected[j];
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (uint j = t; j < uint(k); j += 256) collected[j] = int(indices[ulong(row) * k + j]);
"""


def _reference(x: Any, k: int) -> Any:
    """The same in ordinary array code."""
    # Integers in int64, for torch sorts none without a sign.
    values = widened(x) if "float" in str(x.dtype) else cast(x, "int64")
    places = descending(values)[..., :k]
    return cast(taken(values, places), x.dtype), places, cast(places, "int32")


_DTYPES = "(float32, float16, bfloat16, int32, uint32, int16, uint16, int8, uint8, bool)"

_topk = ferrule.op(
    "topk",
    # `picked` is memory for the second body, and then what `indices` is.
    "x[*S,N]:T, k:int32 -> values[*S,k]:T, indices[*S,k]:int64~, "
    f"picked[*S,k]:int32~ where 0 <= k, k <= N, T in {_DTYPES}",
    metal=[
        ferrule.metal_body(
            _FEW,
            header=_ORDER,
            grid=("32 if k > 0 else 0", "values.size // max(k, 1)"),
            threadgroup=32,
            when="k <= 32",
        ),
        ferrule.metal_body(
            _MANY,
            header=_ORDER,
            grid=(256, "values.size // max(k, 1)"),
            threadgroup=256,
        ),
    ],
    reference=_reference,
    version=1,
)

_topk_vjp = ferrule.op(
    "topk_vjp",
    "x[*S,N]:T, k:int32, indices[*S,k]:int64, values_cotangent[*S,k]:T -> x_grad[*S,N]:T",
    metal="""
        const ulong i = thread_position_in_grid.y * ulong(k) + thread_position_in_grid.x;
        x_grad[thread_position_in_grid.y * ulong(N) + indices[i]] = values_cotangent[i];
    """,
    grid=("k", "indices.size // max(k, 1)"),
    threadgroup="min(k, 256)",
    init_value=0,
)
_topk.def_vjp(_topk_vjp)

# What stands at the places: the values, of a tangent.
_picked = ferrule.op(
    "topk_picked",
    "x[*S,N]:T, indices[*S,k]:int64 -> values[*S,k]:T",
    metal="""
        const ulong i = thread_position_in_grid.y * ulong(k) + thread_position_in_grid.x;
        values[i] = x[thread_position_in_grid.y * ulong(N) + indices[i]];
    """,
    grid=("k", "indices.size // max(k, 1)"),
    threadgroup="min(k, 256)",
)


@_topk.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    return _picked(tangents[0], outputs[1]), None, None


@_topk_vjp.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    return None, None, None, _picked(cotangents[0], primals[2])


@_topk_vjp.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    by = primals[3] * 0 if tangents[3] is None else tangents[3]
    return (_topk_vjp(*primals[:3], by),)


@_picked.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    x, indices = primals
    return _topk_vjp(x, indices.shape[-1], indices, cotangents[0]), None


@_picked.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    return (_picked(tangents[0], primals[1]),)
