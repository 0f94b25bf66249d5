"""Atomics on the CPU that need none: of threadgroup memory, and sums that threads begin alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.devices.cpu import program as cpu

Array = np.ndarray[Any, np.dtype[Any]]

ADDED = """
uint i = thread_position_in_grid.x;
atomic_fetch_add_explicit(&y[at[i]], v[i], memory_order_relaxed);
"""
TALLIED = {
    "flat": ADDED,
    "split": "int s = simd_sum(1); " + ADDED.replace("v[i]", "v[i] * (s / s)"),
    "by threadgroups": """
    threadgroup atomic_int own[64];
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    uint n = threads_per_threadgroup.x;
    for (uint k = l; k < 64; k += n) atomic_store_explicit(&own[k], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at[i] < 64) atomic_fetch_add_explicit(&own[at[i]], v[i], memory_order_relaxed);
    else atomic_fetch_add_explicit(&y[at[i]], v[i], metal::memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = l; k < 64; k += n) {
      int sum = atomic_load_explicit(&own[k], memory_order_relaxed);
      atomic_fetch_add_explicit(&y[k], sum, memory_order_relaxed);
    }
    """,
}
# What somebody may see before the launch ends, or what depends on the order.
NOT_TALLIED = {
    "a result is taken": ADDED.replace("atomic", "int before = atomic", 1)
    + " if (before < 0) return;",
    "it is loaded": ADDED + " if (atomic_load_explicit(&y[0], memory_order_relaxed) < -1) return;",
    "it is handed on": ADDED + " device atomic_int* p = y; (void)p;",
    "the order counts": ADDED.replace("memory_order_relaxed", "memory_order_seq_cst"),
    "another operation": ADDED.replace("fetch_add", "fetch_max"),
}


def _kernel(body: str) -> ferrule.MetalKernel:
    return ferrule.metal_kernel("tallies", ["at", "v"], ["y"], body, atomic_outputs=True)


def _call(at: Array, v: Array, size: int, dtype: Any = np.int32) -> dict[str, Any]:
    return {
        "inputs": [at, v],
        "output_shapes": [(size,)],
        "output_dtypes": [np.dtype(dtype)],
        "grid": (len(at), 1, 1),
        "threadgroup": (64, 1, 1),
        "init_value": 0,
    }


def _is_tallied(body: str, dtype: Any = np.int32) -> bool:
    at = np.zeros(64, np.uint32)
    return "::tally<" in _kernel(body).text("cpu", **_call(at, at.astype(dtype), 1, dtype))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(TALLIED)),
    st.integers(1, 30_000),
    st.sampled_from([64, 100, 4096, 4097, 20_000]),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_sums_are_exact_on_any_number_of_threads(
    way: str, n: int, size: int, threads: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    at = random.integers(0, size, n).astype(np.uint32)
    v = random.integers(-(2**31), 2**31, n).astype(np.int32)  # sums wrap
    want = np.zeros(size, np.int64)
    np.add.at(want, at, v)
    before = ferrule.get_threads()
    try:
        ferrule.set_threads(threads)
        (y,) = _kernel(TALLIED[way])(**_call(at, v, size))
    finally:
        ferrule.set_threads(before)
    assert (np.asarray(y) == want.astype(np.int32)).all()


@pytest.mark.parametrize("way", TALLIED)
def test_outputs_that_get_sums_alone_are_tallied(way: str) -> None:
    assert _is_tallied(TALLIED[way])
    assert not _is_tallied(TALLIED[way], np.float32)


@pytest.mark.parametrize("why", NOT_TALLIED)
def test_other_outputs_are_not(why: str) -> None:
    assert not _is_tallied(NOT_TALLIED[why])


def test_every_atomic_operation_of_threadgroup_memory() -> None:
    """As on fibers, which have the processor's atomics."""
    operations = ("add", "sub", "min", "max", "and", "or", "xor")
    body = "threadgroup atomic_int t[12]; threadgroup atomic_float f;"
    body += "uint l = thread_index_in_threadgroup;"
    body += "if (l < 12) atomic_store_explicit(&t[l], int(l) * 77, memory_order_relaxed);"
    body += "if (l == 0) atomic_store_explicit(&f, 0.0f, memory_order_relaxed);"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup); int seen = 0;"
    for k, name in enumerate(operations):
        body += f"atomic_fetch_{name}_explicit(&t[{k}], int(at[l]), memory_order_relaxed);"
    body += """
    atomic_fetch_add_explicit(&f, 0.5f, memory_order_relaxed);
    if (l == 5) seen = atomic_exchange_explicit(&t[7], 3, memory_order_relaxed);
    int wanted = 8 * 77;
    if (l == 6) seen += atomic_compare_exchange_weak_explicit(
        &t[8], &wanted, 21, memory_order_relaxed, memory_order_relaxed) ? 100 : 200;
    if (l == 7) {
      seen += atomic_compare_exchange_weak_explicit(
          &t[9], &wanted, 21, memory_order_relaxed, memory_order_relaxed) ? 100 : 200;
      seen += wanted;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup atomic_int* p = t;
    int more = int(atomic_load_explicit(&f, memory_order_relaxed));
    atomic_fetch_add_explicit(&y[l], seen + more + (l < 12 ? atomic_load_explicit(p + l,
        memory_order_relaxed) : 0), memory_order_relaxed);
    """
    at = np.random.default_rng(3).integers(-(2**30), 2**30, 64).astype(np.int32)
    results = []
    for mode in ("split", "fibers"):
        with cpu.running(mode):
            (y,) = _kernel(body)(**_call(at, at, 64))
        results.append(np.asarray(y))
    assert (results[0] == results[1]).all()
    start, sum_of_all = np.arange(12) * 77, at.sum(dtype=np.int64)
    extremes = min(start[2], at.min()), max(start[3], at.max())
    want = np.array([start[0] + sum_of_all, start[1] - sum_of_all, *extremes]).astype(np.int32)
    assert (results[0][:4] - 32 == want).all()
