"""Threadgroup memory on CUDA: its alignment, and more of it than CUDA gives without asking."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import ferrule
import warps
from ferrule.devices.cpu import program as cpu
from ferrule.source.cuda import shared
from ferrule.tools import nvrtc

F32 = np.dtype(np.float32)

BODY = """
threadgroup T tile[N][64], *row = tile[3];
threadgroup float4 quads[N];
threadgroup uchar bytes[40], one;
if (thread_position_in_grid.x > 250u) {
  threadgroup int more
      [3];
  more[0] = 1; y[0] = more[0];
}
uint i = thread_position_in_threadgroup.x;
auto put = [&](uint j, float v) { tile[j % N][j / N] = v; };
put(i, x[i]);
quads[i % N] = x[i];
if (i < 10) ((threadgroup float*)bytes)[i] = x[i];
one = 3;
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = tile[(i + 1) % N][0] + quads[(i + 2) % N].x + row[0] + ((threadgroup float*)bytes)[i % 10]
    + sizeof(tile) + one + simd_sum(x[i]);
"""


def call(n: int) -> dict[str, Any]:
    return {
        "output_shapes": [(256,)], "output_dtypes": [F32], "grid": (256, 1, 1),
        "threadgroup": (256, 1, 1), "template": [("N", n), ("T", F32)],
    }  # fmt: skip


def bytes_of(n: int) -> int:
    return n * 64 * 4 + n * 16 + 48 + 16 + 12


@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")
@pytest.mark.parametrize(
    ("device", "n", "dynamic"),
    [("cuda", 150, False), ("cuda", 300, True), ("sm_75", 220, True), ("compute_90", 150, False),
     ("compute_90", 300, True)],
)  # fmt: skip
def test_more_than_48_kilobytes(library: nvrtc.Nvrtc, device: str, n: int, dynamic: bool) -> None:
    kernel = ferrule.metal_kernel("big", ["x"], ["y"], BODY)
    x = np.arange(256, dtype=np.float32)
    binary = kernel.compile(device, inputs=[x], **call(n))
    assert binary.shared == (bytes_of(n) if dynamic else 0)
    assert ("extern __shared__" in binary.text) == dynamic
    assert ("fr_shared" in binary.text) == dynamic and "asm volatile" not in binary.text
    assert kernel.compile(device, inputs=[x], **call(n)) == binary  # from the cache
    (got,), _, _ = warps.launch(kernel, [x], **call(n), text=binary.text)
    with cpu.running("fibers"):
        (want,) = kernel(inputs=[x], **call(n))
    np.testing.assert_array_equal(got, want)


def test_more_than_there_is(library: nvrtc.Nvrtc) -> None:
    kernel = ferrule.metal_kernel("big", ["x"], ["y"], BODY)
    for device, n, most in (("sm_90", 900, 227), ("sm_86", 400, 99), ("sm_75", 300, 64)):
        said = (
            f"kernel 'big': its threadgroup memory has {bytes_of(n)} bytes, and {device} has "
            f"{most << 10} per threadgroup; the largest variable, tile in source line 2, has "
            f"{n * 256} bytes."
        )
        with pytest.raises(ferrule.DeviceError, match=re.escape(said)):
            kernel.compile(device, inputs=["float32[256]"], **call(n))


def test_lambdas_copy_no_threadgroup_memory(library: nvrtc.Nvrtc) -> None:
    body = BODY.replace("[&]", "[=]").replace(
        "[=](uint j, float v)", "[=](uint j, float v) mutable"
    )
    kernel = ferrule.metal_kernel("copies", ["x"], ["y"], body)
    with pytest.raises(ferrule.DialectError, match=r"source line 11: .* begin it with \[&\]"):
        kernel.compile("cuda", inputs=["float32[256]"], **call(300))


def test_errors_are_those_of_the_body(library: nvrtc.Nvrtc) -> None:
    kernel = ferrule.metal_kernel("wrong", ["x"], ["y"], BODY + "y[0] = nothing;")
    for n in (150, 300):
        with pytest.raises(ferrule.CompileError, match=r"source line 19: .*nothing"):
            kernel.compile("cuda", inputs=["float32[256]"], **call(n))


def test_bytes_may_be_read_as_vectors(library: nvrtc.Nvrtc) -> None:
    body = """
    threadgroup uchar odd[3], bytes[64];
    odd[thread_position_in_grid.x % 3] = x[1];
    bytes[thread_position_in_grid.x] = x[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[0] = ((threadgroup float4*)bytes)[0].x + odd[1];
    """
    kernel = ferrule.metal_kernel("bytes", ["x"], ["y"], body)
    given: dict[str, Any] = {"inputs": ["float32[256]"], "output_dtypes": [F32]}
    ptx = kernel.compile("compute_90", **given).payload.decode()
    assert sorted(re.findall(r"\.shared \.align (\d+) .*\[(\d+)\]", ptx)) == [
        ("16", "3"), ("16", "64")
    ]  # fmt: skip


def test_places() -> None:
    assert shared.placed({0: (3, 1), 1: (64, 64), 4: (8, 8)}) == ({0: 0, 1: 64, 4: 128}, 136)
    assert shared.placed({}) == ({}, 0)
    assert shared.sizes("// fr_shared 0 16 4\n// fr_shared 2 3 1\n") == {0: (16, 4), 2: (3, 1)}
