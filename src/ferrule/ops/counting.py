"""histogram: how many elements lie in each of some intervals of one length."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, count, library, sums_at, widened


def histogram(x: Any, bins: int, low: float, high: float) -> Any:
    """How many elements of ``x`` lie in each of ``bins`` intervals between ``low`` and ``high``.

    Args:
        x: an array of any shape, of float32, float16 or bfloat16.
        bins: how many intervals, at least 1.
        low, high: where the first begins and the last ends, numbers of float32; ``low < high``.

    Returns:
        counts (bins,), of int32. An element v is in interval ``(v - low) * bins / (high - low)``,
        rounded down, as computed in float32; ``high`` itself is in the last. What lies outside,
        and NaN, is not counted, as by `torch.histc`.

    Raises:
        KernelError: ``bins`` is below 1, ``low`` is not below ``high``, ``bins`` times their
            difference does not fit in float32, or ``x`` has another dtype.
        KernelTypeError: ``x`` is no array, or another argument no number.
    """
    try:
        good = low < high and (high - low) * bins <= _LARGEST  # NaN is refused, too
    except TypeError:
        good = True  # the op says which is no number
    if not good:
        raise ferrule.KernelError(
            f"[histogram] got low = {low} and high = {high} for {bins} bins; expected finite "
            "numbers, the first below the second, whose difference times bins fits in float32."
        )
    return _histogram(x, bins, low, high)


_LARGEST = 3.4028234663852886e38  # of float32

# The interval of an element, or -1.
_INTERVAL = """
    inline int interval_of(float value, int bins, float low, float high) {
        if (!(value >= low && value <= high)) return -1;
        const float at = (value - low) * float(bins) / (high - low);
        return at < float(bins) ? int(at) : bins - 1;  // `high` itself; or low and high are one
    }
"""

_DIRECTLY = """
    const int b = interval_of(float(x[thread_position_in_grid.x]), bins, low, high);
    if (b >= 0) atomic_fetch_add_explicit(&counts[b], 1, memory_order_relaxed);
"""

# Threads of a GPU would wait for each other. Each threadgroup counts in memory of its own first.
_IN_GROUPS = """
    threadgroup atomic_int own[MOST];
    const uint t = thread_index_in_threadgroup, threads = threads_per_threadgroup.x;
    ulong size = 1;
    for (int d = 0; d < x_ndim; ++d) size *= x_shape[d];
    for (uint b = t; b < uint(bins); b += threads)
        atomic_store_explicit(&own[b], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const ulong step = threads_per_grid.x;
    for (ulong first = thread_position_in_grid.x; first < size; first += 8 * step) {
        float values[8];  // all are read before any is counted, which the next would wait for
        for (int j = 0; j < 8; ++j)
            values[j] = first + j * step < size ? float(x[first + j * step]) : NAN;
        for (int j = 0; j < 8; ++j) {
            const int b = interval_of(values[j], bins, low, high);
            if (b >= 0) atomic_fetch_add_explicit(&own[b], 1, memory_order_relaxed);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = t; b < uint(bins); b += threads) {
        const int count = atomic_load_explicit(&own[b], memory_order_relaxed);
        if (count != 0) atomic_fetch_add_explicit(&counts[b], count, memory_order_relaxed);
    }
"""


def _reference(x: Any, bins: int, low: float, high: float) -> Any:
    """The same in ordinary array code."""
    of, values = library(x), widened(x).reshape(-1)
    inside = (values >= low) & (values <= high)
    width = cast(count(1, x), "float32") + high - low  # of float32, as the edges are
    at = of.where(inside, (values - low) * bins / width, 0)
    at = cast(of.where(at < bins, at, bins - 1), "int64")
    return sums_at(cast(inside, "int32"), at, bins)


_LAUNCH: dict[str, Any] = {"header": _INTERVAL, "init_value": 0, "atomic_outputs": True}
_histogram = ferrule.op(
    "histogram",
    "x[*S]:T, bins:int32, low:float32, high:float32 -> counts[bins]:int32 "
    "where bins >= 1, T in (float32, float16, bfloat16)",
    metal=[
        ferrule.metal_body(
            _IN_GROUPS,
            when="device != cpu and bins <= 2048",
            grid="min(ceildiv(x.size, 4096), 1024) * 256",
            threadgroup=256,
            template={"MOST": 2048},
            **_LAUNCH,
        ),
        ferrule.metal_body(_DIRECTLY, grid="x.size", threadgroup=256, **_LAUNCH),
    ],
    reference=_reference,
    version=1,
)
