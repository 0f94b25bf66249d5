"""CUDA bodies and units with NumPy's arrays, run on the CPU as they are for checking."""

from __future__ import annotations

from typing import Any

import numpy as np

import ferrule
from ferrule.devices.cpu.cuda_bodies import run_on_cpu
from ferrule.spec import Facts
from ferrule import dtypes

Array = np.ndarray[Any, Any]


def facts(array: Array, value: bool = False) -> Facts:
    """What a kernel must know of an array."""
    strides = tuple(s // array.itemsize for s in array.strides)
    return Facts(dtypes.of(array.dtype), array.shape, strides, array.ctypes.data, "cpu", value)


def launch(
    kernel: ferrule.CudaKernel, inputs: list[Any], *, grid: Any, threadgroup: Any,
    output_shapes: Any, output_dtypes: Any, template: Any = None, init_value: Any = None,
) -> list[Array]:  # fmt: skip
    """The outputs of a kernel's call."""
    spec, sent = kernel._builder.described(
        inputs, output_dtypes, output_shapes, grid, threadgroup, template, init_value, "cuda"
    )
    assert sent is not None
    fill = 0 if init_value is None else init_value
    outputs = [
        np.full(shape, fill, d) for shape, d in zip(output_shapes, output_dtypes, strict=True)
    ]
    given = [np.asarray(x, one.dtype.numpy) for x, one in zip(inputs, spec.inputs, strict=True)]
    if kernel.kernel.ensure_row_contiguous:
        given = [np.ascontiguousarray(array).reshape(array.shape) for array in given]
    passed = [facts(a, one.value) for a, one in zip(given, spec.inputs, strict=True)]
    run_on_cpu(spec, passed, [facts(array) for array in outputs], sent)
    return outputs
