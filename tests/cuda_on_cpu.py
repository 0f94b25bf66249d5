"""CUDA bodies and units with NumPy's arrays, run on the CPU as they are for checking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule import dtypes
from ferrule.devices import protocol as devices
from ferrule.devices.cpu.cuda_bodies import run_on_cpu, run_unit_on_cpu
from ferrule.dtypes import Dtype
from ferrule.operators.call import choose, run_body
from ferrule.operators.launch import bound
from ferrule.source.cuda import on_cpu
from ferrule.spec import Facts, Launch, Spec
from ferrule.unit import UnitSpec

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


class _Program:
    """In place of what a GPU has loaded of a body."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def launch(self, inputs: Any, outputs: Any, launch: Launch, stream: int = 0) -> None:
        run_on_cpu(self._spec, inputs, outputs, launch)


class _Unit:
    """In place of what a GPU has loaded of a unit."""

    def __init__(self, device: str, spec: UnitSpec) -> None:
        self._spec = spec

    kernels = staticmethod(lambda *_: None)

    def launch(self, steps: Any, stream: int = 0) -> None:
        run_unit_on_cpu(self._spec, steps)


class _Memory:
    """Makes NumPy's arrays in place of a GPU's; what nobody has written is NaN or -1."""

    def __init__(self) -> None:
        self.made: list[Array] = []

    def empty(self, shape: Any, dtype: Dtype, device: str) -> Array:
        size = math.prod(shape) * dtype.itemsize
        self.made.append(np.full(size + 64, 0xFF, np.uint8))
        start = -self.made[-1].ctypes.data % 64
        return self.made[-1][start : start + size].view(dtype.numpy).reshape(shape)

    def full(self, shape: Any, value: Any, dtype: Dtype, device: str) -> Array:
        array = self.empty(shape, dtype, device)
        array[...] = value
        return array


GPU = {":device": "cuda", "sm_count": 4, "capability": on_cpu.CAPABILITY, "memory_bus": 5120}


def run_op(
    op: ferrule.Op, inputs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch,
    body: Any = None, capability: int = on_cpu.CAPABILITY,
) -> tuple[list[Array], Any]:  # fmt: skip
    """The outputs of an op's CUDA implementation, and which that is.

    Args:
        op, inputs: by the names of the rule.
        monkeypatch: what there is in place of a GPU is undone with it.
        body: the implementation; by default what such a GPU would take.
        capability: of the GPU.
    """
    gpu = {**GPU, "capability": capability}
    monkeypatch.setattr(devices, "described", lambda device: gpu)
    monkeypatch.setattr(
        devices, "get", lambda device: SimpleNamespace(program=lambda spec: _Program(spec))
    )
    monkeypatch.setattr(devices, "unit_program", _Unit)
    arguments = {
        name: facts(value)._replace(device="cuda:0") if isinstance(value, np.ndarray) else value
        for name, value in inputs.items()
    }
    call = bound(op, "cuda:0", arguments)
    if body is None:
        body = choose(call)
    memory = _Memory()
    return run_body(call, body, memory, facts, 0), body
