"""simdgroup_matrix on CUDA: tensor cores where they lose no bits of the elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrule
import warps
from ferrule.devices.cpu import program as cpu
from ferrule.tools import nvdisasm, nvrtc

pytestmark = pytest.mark.together

F32 = np.dtype(np.float32)
TYPES = {"half": np.dtype(np.float16), "bfloat": np.dtype(ml_dtypes.bfloat16), "float": F32}
KEEP = "y[192 + thread_index_in_simdgroup] = float(P.thread_elements()[1]);"

BODY = """
simdgroup_matrix<A, 8, 8> a_; simdgroup_matrix<B, 8, 8> b_; simdgroup_matrix<C, 8, 8> c_, P, Q;
simdgroup_load(a_, a, 16, ulong2(3, 2)); simdgroup_load(b_, b, 16, ulong2(1, 5), true);
simdgroup_load(c_, c, 8);
simdgroup_multiply(P, a_, b_);
simdgroup_multiply_accumulate(Q, a_, b_, c_);
simdgroup_multiply_accumulate(c_, b_, a_, Q);
simdgroup_store(P, y, 8); simdgroup_store(c_, y + 128, 8);
simdgroup_store(Q, y + 64, 8, ulong2(0, 0), true);
"""


def given(a: str, b: str, c: str) -> tuple[list[Any], dict[str, Any]]:
    rng = np.random.default_rng(1)
    inputs = [rng.integers(-4, 5, (16, 16)).astype(TYPES[t]) / TYPES[t].type(4) for t in (a, b)]
    inputs.append(rng.integers(-9, 10, (8, 8)).astype(TYPES[c]))
    return inputs, {
        "output_shapes": [(224,)], "output_dtypes": [F32], "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1), "init_value": 0,
        "template": [("A", TYPES[a]), ("B", TYPES[b]), ("C", TYPES[c])],
    }  # fmt: skip


@pytest.mark.parametrize("arch", [750, 900])
@pytest.mark.parametrize("keep", ["", KEEP], ids=["hidden", "seen"])
@pytest.mark.parametrize(
    ("a", "b", "c"),
    [("half", "half", "float"), ("bfloat", "bfloat", "float"), ("half", "half", "half"),
     ("bfloat", "half", "float"), ("float", "float", "float")],
)  # fmt: skip
def test_products(a: str, b: str, c: str, keep: str, arch: int) -> None:
    """Small numbers, so that every order of additions gives the same."""
    kernel = ferrule.metal_kernel("product", ["a", "b", "c"], ["y"], BODY + keep)
    inputs, call = given(a, b, c)
    (got,), _, text = warps.launch(kernel, inputs, **call, arch=arch)
    assert ("FR_TILES" in text) == (not keep)
    with cpu.running("fibers"):
        (want,) = kernel(inputs=inputs, **call)
    np.testing.assert_array_equal(got, want)
    x = inputs[0][2:10, 3:11].astype(np.float64)
    y = inputs[1][5:13, 1:9].astype(np.float64).T
    np.testing.assert_array_equal(got[:64].reshape(8, 8), x @ y)
    np.testing.assert_array_equal(got[64:128].reshape(8, 8).T, x @ y + inputs[2].astype(float))


def test_lanes_of_tensor_cores() -> None:
    """In the PTX manual's fragments, matrices whose lane l holds two elements of row l / 4."""
    a, b, c = np.random.default_rng(2).integers(-9, 10, (3, 8, 8)).astype(float)
    group, in_group = np.arange(32) >> 2, np.arange(32) % 4
    row, column = np.arange(32) // 4, np.arange(32) % 4 * 2  # include/matrix.h, FR_TILES
    left, right, sums = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
    for i in (0, 1):
        left[group, in_group * 2 + i] = a[row, column + i]  # a0, a1; a2 and a3 are zeros
        right[in_group * 2 + i, group] = b.T[row, column + i]  # b0, b1, of the transposed matrix
        sums[group, in_group * 2 + i] = c[row, column + i]  # c0, c1; c2 and c3 are zeros
    product = left @ right + sums
    got = np.zeros((8, 8))
    for i in (0, 1):
        got[row, column + i] = product[group, in_group * 2 + i]  # d0, d1
    np.testing.assert_array_equal(got, a @ b + c)


@pytest.mark.parametrize(
    ("kind", "device", "tensor"),
    [("half", "sm_90", True), ("bfloat", "sm_80", True), ("float", "sm_90", False),
     ("half", "sm_75", False)],
)  # fmt: skip
def test_machine_code(library: nvrtc.Nvrtc, kind: str, device: str, tensor: bool) -> None:
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    for keep, most in (("", 0), (KEEP, 99)):
        kernel = ferrule.metal_kernel("product", ["a", "b", "c"], ["y"], BODY + keep)
        inputs, call = given(kind, kind, "float")
        binary = kernel.compile(device, inputs=inputs, **{**call, "init_value": None})
        code = nvdisasm.disassemble(binary.payload)
        assert ("HMMA.1688.F32" in code) == tensor
        if tensor:
            bodies = 1 + ("fr_inside" in binary.text)  # whose accesses are checked, and are not
            assert code.count("MOVM.16.MT88") in (2 * bodies, 3 * bodies)
            assert code.count("SHFL") <= most and "FFMA" not in code
