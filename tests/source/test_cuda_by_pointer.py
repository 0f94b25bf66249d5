"""Kernels whose arguments by value come by an address: the signature that is compiled.

tests/hosts/test_gpu_mlx_launch.py runs such kernels.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

import ferrule
from ferrule.devices.cuda import device as cuda
from ferrule.source.cuda.launch import kernel_parameters
from ferrule.spec import Input, Launch, Spec
from ferrule.tools import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="needs NVRTC")
F32, I64, F16, BOOL = ferrule.float32, ferrule.int64, ferrule.float16, ferrule.bool_
NAMES = ["x", "n", "flag", "h", "wide"], ["y", "z"]
INPUTS = (
    Input(F32, 2), Input(F32, 0, value=True), Input(BOOL, 0, value=True), Input(F16, 0),
    Input(I64, 0, value=True),
)  # fmt: skip
METAL = ferrule.metal_kernel(
    "all_of_it", *NAMES,
    """uint i = thread_position_in_grid.x;
    if (i >= uint(x_shape[0]) || x_strides[1] != 1 || x_ndim != 2 || !flag) return;
    y[i] = x[i * x_shape[1]] * n + h + float(wide) + K;
    z[i] = T(i);""",
)  # fmt: skip
CUDA = ferrule.cuda_kernel(
    "all_of_it", *NAMES,
    """auto i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= x_shape[0] || x_strides[1] != 1 || x_ndim != 2 || !*flag) return;
    y[i] = x[i * x_shape[1]] * *n + float(*h) + float(*wide) + K;
    z[i] = T(i);""",
)  # fmt: skip
LEAST = ferrule.cuda_kernel("least", ["x"], ["y"], "y[threadIdx.x] = x[threadIdx.x];")
TEMPLATE = (("K", 3), ("T", F16))
LAUNCH = Launch((1000, 1, 1), (256, 1, 1), ((1000,), (1000,)), None, ())


@pytest.mark.parametrize("kernel", [METAL, CUDA, LEAST], ids=["metal", "cuda", "least"])
def test_only_pointers_are_passed(kernel: Any) -> None:
    one = kernel.kernel
    if kernel is LEAST:
        spec = Spec(one, (Input(F32, 1),), (F32,), ())
    else:
        spec = Spec(one, INPUTS, (F32, F16), TEMPLATE)
    device = cuda.device("compute_90")
    form, built = device.by_pointer(spec, LAUNCH)
    assert form == device.built(spec, LAUNCH)[0]
    entry = re.search(r"\.entry \w+\((.*?)\)", built.payload.decode(), re.DOTALL)
    assert entry is not None
    kinds = [kind for kind, _ in kernel_parameters(spec)]
    pointers = kinds.count("input") + 1 + kinds.count("output")
    assert re.findall(r"\.param \.(\w+)", entry[1]) == ["u64"] * pointers
    struct = re.search(r"struct fr_by_value_t \{\n(.*?)\};", built.text, re.DOTALL)
    assert struct is not None
    assert len(struct[1].splitlines()) == len(kinds) - pointers + 1
