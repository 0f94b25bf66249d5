"""The kernels of an op for inputs that are given by shape and dtype alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dtypes
from ..devices import protocol as devices
from ..devices.protocol import UnitBinary
from ..dtypes import Dtype
from ..errors import KernelError
from ..kernels.call import CallableKernel, MetalKernel
from ..kernels.cuda import CudaKernel
from ..rules.rule import Binding
from ..source.cuda import unit as cuda_unit
from ..spec import Shape
from ..unit import UnitSpec
from .bodies import KernelBody
from .launch import number
from .op import Op
from .unit_steps import CudaUnit

Array = tuple[Shape, Dtype]


class DescribedUnit:
    """A CUDA unit for inputs that are described.

    Attributes:
        text: the whole text that NVRTC compiles.
    """

    def __init__(self, spec: UnitSpec) -> None:
        self._spec = spec
        self.text = cuda_unit.text(spec)

    def compile(self, target: str) -> UnitBinary:
        """Its machine code; needs no GPU.

        Args:
            target: an architecture, such as ``"sm_90"``; ``"compute_90"`` for PTX.

        Raises:
            CompileError, ToolchainError, DeviceError: as `devices.protocol.compile_unit` does.
        """
        return devices.compile_unit(target, self._spec)


def described(
    op: Op, body: KernelBody, inputs: Mapping[str, Array | float | None]
) -> tuple[CallableKernel, dict[str, Any]]:
    """A kernel of an op, and the arguments of its `text` and `compile`.

    Args:
        op, body: the op, and one of its kernels.
        inputs: by name: shape and dtype of an array, a number, or None for one that is absent.

    Raises:
        KernelError: the rule does not allow such inputs; says why. Or one is missing.
        KernelTypeError: a number is none of its kind.
    """
    values, binding = _bind(op, inputs)
    rule = op.rule
    written = [dtypes.BY_NAME[binding.dtypes.get(a.dtype, a.dtype)] for a in rule.outputs]
    kernel_inputs: list[Any] = []
    for argument in rule.inputs:
        value = values[argument.name]
        if value is None:  # as a launch has it
            dtype = dtypes.BY_NAME[binding.dtypes.get(argument.dtype, argument.dtype)]
            value = ((1,) * len(argument.dims or ()), dtype)
        if argument.mutable:
            written.append(value[1])
        else:
            kernel_inputs.append(value)
    kernel_inputs += [np.int32(binding.dims[name]) for name in body.dims]
    launch = body.launch_for(binding)
    kernel = MetalKernel(body.kernel) if body.kind == "metal" else CudaKernel(body.kernel)
    return kernel, {
        "inputs": kernel_inputs,
        "output_dtypes": written,
        "template": list(launch.template),
        "grid": launch.grid,
        "threadgroup": launch.threadgroup,
    }


def described_unit(
    op: Op, unit: CudaUnit, inputs: Mapping[str, Array | float | None]
) -> DescribedUnit | None:
    """A unit of an op for such inputs; None where it is not for calls with such sizes.

    Args:
        op, unit: the op, and one of its units.
        inputs: as in `described`.

    Raises:
        KernelError, KernelTypeError: as `described` does.
    """
    _, binding = _bind(op, inputs)
    if not unit.holds(binding):
        return None
    return DescribedUnit(unit.spec(unit.launch_for(binding).template))


def _bind(op: Op, inputs: Mapping[str, Array | float | None]) -> tuple[dict[str, Any], Binding]:
    """The inputs in the rule's order, and the rule's binding to them, results included."""
    rule = op.rule
    values: dict[str, Any] = {}
    for argument in rule.inputs:
        value = inputs.get(argument.name)
        if argument.dims is None and argument.name in inputs:
            plain = number(op.name, argument, value)
            values[argument.name] = np.array(plain, dtypes.BY_NAME[argument.dtype].numpy)[()]
        elif isinstance(value, tuple) or (value is None and argument.optional):
            values[argument.name] = value
        else:
            raise KernelError(
                f"[op] input {argument.name!r} of op {op.name!r} is not described: {argument}."
            )
    arrays = {name: v if isinstance(v, tuple) else None for name, v in values.items()}
    shapes = [
        () if a.dims is None else None if (array := arrays[a.name]) is None else array[0]
        for a in rule.inputs
    ]
    binding = rule.bind(
        op.name, shapes, [None if v is None else v[1].name for v in arrays.values()]
    )
    rule.results(op.name, binding)
    return values, binding
