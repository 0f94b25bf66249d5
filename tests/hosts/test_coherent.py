"""Metal 3.2's coherent qualifiers: they compile wherever they stand, and change no result."""

from __future__ import annotations

import numpy as np
import pytest

import ferrule
from ferrule.tools import nvrtc

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
HEADER = "float first(coherent({0}) device const float* p, uint i) {{ return p[i]; }}\n"
BODIES = [
    I + "coherent({0}) device float* p = y;\np[i] = first(x, i);",
    I + "device coherent({0}) float* p = y;\np[i] = first(x, i);",
    I + "coherent ( {0} ) const device float* p = x;\ny[i] = first(p, i);",
    I + "y[i] = *(const device coherent({0}) float*)(x + i);",
    I + "float coherent = 1; y[i] = x[i] * coherent;",
]


def kernel(body: str, scope: str) -> ferrule.MetalKernel:
    header = HEADER.format(scope)
    return ferrule.metal_kernel("k", ["x"], ["y"], body.format(scope), header, portable=True)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("scope", ["device", "threadgroup"])
def test_coherent(body: str, scope: str, library: nvrtc.Nvrtc) -> None:
    one = kernel(body, scope)
    x = np.arange(8, dtype=np.float32)
    (y,) = one(
        inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(8, 1, 1),
        threadgroup=(4, 1, 1),
    )  # fmt: skip
    np.testing.assert_array_equal(y, x)
    assert one.compile("sm_90", inputs=[x], output_dtypes=[x.dtype]).payload


def test_messages_passed_through_coherent_memory() -> None:
    """The use that it has: a flag and a value, read by another thread after a fence."""
    body = """
    threadgroup atomic_int flag;
    uint l = thread_position_in_threadgroup.x;
    coherent(device) device float* p = y;
    if (l == 0) atomic_store_explicit(&flag, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (l == 0) { p[0] = x[0] + 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);
                  atomic_store_explicit(&flag, 1, memory_order_relaxed); }
    threadgroup_barrier(mem_flags::mem_device);
    if (l == 1) p[1] = atomic_load_explicit(&flag, memory_order_relaxed) ? p[0] * 2 : -1;
    """
    (y,) = ferrule.metal_kernel("k", ["x"], ["y"], body)(
        inputs=[np.array([3], np.float32)], output_shapes=[(2,)], output_dtypes=[np.float32],
        grid=(2, 1, 1), threadgroup=(2, 1, 1),
    )  # fmt: skip
    np.testing.assert_array_equal(y, [4, 8])
