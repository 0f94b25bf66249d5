"""Atomic additions to rows of neighbouring elements, by several threads that share the rows."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu.program import running

pytestmark = pytest.mark.optimised

BODY = """
uint elem = thread_position_in_grid.x;
int C = rows_shape[1];
int padded = (C + 31) / 32 * 32;
uint one = elem / padded;
int channel = elem % padded;
float mine = 0;
if (channel < C) {
    mine = rows[one * C + channel];
    if (to[one] != 7777) {
        int at = int(to[one]) * C + channel;
        atomic_fetch_add_explicit(&sum[at], T(mine), memory_order_relaxed);
    }
}
mine = simd_sum(mine);
if (thread_index_in_simdgroup == 0) {
    atomic_fetch_add_explicit(&total[to[one]], T(mine), memory_order_relaxed);
}
EXTRA
"""


def kernel(extra: str = "") -> Any:
    return ferrule.metal_kernel(
        name="add_rows", input_names=["rows", "to"], output_names=["sum", "total"],
        source=BODY.replace("EXTRA", extra), atomic_outputs=True,
    )  # fmt: skip


def call(rows: np.ndarray[Any, Any], to: np.ndarray[Any, Any], out: int, dtype: Any) -> Any:
    n, channels = rows.shape
    return {
        "inputs": [rows, to],
        "output_shapes": [(out, channels), (out,)],
        "output_dtypes": [dtype, dtype],
        "grid": (n * -(-channels // 32) * 32, 1, 1),
        "threadgroup": (64, 1, 1),
        "template": [("T", dtype)],
        "init_value": 0,
    }


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    ferrule.set_threads(None)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("channels", [1, 3, 32, 64, 100])
def test_sums_are_exact(dtype: Any, threads: int, channels: int) -> None:
    rng = np.random.default_rng(channels)
    ferrule.set_threads(threads)
    for n, out in ((3000, 2), (4000, 300)):
        rows = rng.integers(0, 7, (n, channels)).astype(np.float32)
        to = rng.integers(0, out, n).astype(np.uint32)
        want = np.zeros((out, channels))
        np.add.at(want, to, rows)
        for way in ("auto", "fibers"):
            with running(way):
                total_sum, total = kernel()(**call(rows, to, out, dtype))
            assert np.array_equal(total_sum, want.astype(dtype)), way
            assert np.array_equal(total, want.sum(1).astype(dtype)), way


def text(extra: str) -> str:
    rows, to = np.zeros((8, 64), np.float32), np.zeros(8, np.uint32)
    return str(kernel(extra).text("cpu", **call(rows, to, 4, np.float32)))


def test_locks_are_for_arrays_that_nothing_else_touches() -> None:
    assert "locked_add(" in text("") and "locked_fetch_add(" in text("")
    for other in (
        "atomic_store_explicit(&sum[0], 1.0f, memory_order_relaxed);",
        "if (atomic_load_explicit(&sum[0], memory_order_relaxed) > 3) return;",
        "atomic_fetch_max_explicit((device atomic_uint*)&sum[0], 1u, memory_order_relaxed);",
        "device atomic<float>* p = sum; "
        "atomic_fetch_add_explicit(p + elem % 7, 1.0f, memory_order_relaxed);",
    ):
        assert "locked_" not in text(other), other


LOCKING = """
uint elem = thread_position_in_grid.x;
int C = rows_shape[1];
uint one = elem / C;
int channel = elem % C;
float mine = rows[one * C + channel];
if (to[one] != 7777) {
    int at = int(to[one]) * C + channel;
    atomic_fetch_add_explicit(&sum[at], mine, memory_order_relaxed);
}
if (simd_is_first()) {
    while (atomic_exchange_explicit(&total[0], 1.0f, memory_order_relaxed) != 0) {}
}
if (to[one] != 7778) {
    int at = int(to[one]) * C + channel;
    atomic_fetch_add_explicit(&sum[at], mine, memory_order_relaxed);
}
if (simd_is_first()) atomic_store_explicit(&total[0], 0.0f, memory_order_relaxed);
"""


def test_a_kernel_with_a_lock_of_its_own_does_not_wait_for_ever() -> None:
    mutex = ferrule.metal_kernel(
        name="own_lock", input_names=["rows", "to"], output_names=["sum", "total"],
        source=LOCKING, atomic_outputs=True,
    )  # fmt: skip
    rows, to = np.ones((2000, 32), np.float32), np.zeros(2000, np.uint32)
    given = {**call(rows, to, 1, np.float32), "template": None, "threadgroup": (32, 1, 1)}
    assert "locked_" not in mutex.text("cpu", **given)
    for threads in (1, 4):
        ferrule.set_threads(threads)
        assert mutex(**given)[0].tolist() == [[4000.0] * 32]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_locks_that_another_thread_held_at_a_fork_are_free_in_the_child() -> None:
    rows = np.ones((2048, 1024), np.float32)
    given = call(rows, np.arange(2048, dtype=np.uint32) % 512, 512, np.float32)
    add, stop = kernel(), threading.Event()
    ferrule.set_threads(8)
    add(**given)

    def run() -> None:
        while not stop.is_set():
            add(**given)

    other = threading.Thread(target=run)
    other.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                good = (add(**given)[0] == 4).all()
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        other.join()


def test_a_lock_does_not_outlive_a_kernel_that_fails() -> None:
    rows = np.ones((64, 64), np.float32)
    # An address that no processor has: what lies some gigabytes away may be another library's.
    good, wild = np.zeros(64, np.uint64), np.full(64, 2**60, np.uint64)
    add = kernel()
    for threads, _ in itertools.product((1, 4), range(5)):
        ferrule.set_threads(threads)
        with pytest.raises(ferrule.DeviceError, match="outside its arrays"):
            add(**call(rows, wild, 4, np.float32))
        assert add(**call(rows, good, 4, np.float32))[0][0].tolist() == [64] * 64
