"""What the kernels of an op become for inputs that are only described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import devices, dtypes
from .call import CallableKernel, MetalKernel
from .cuda_call import CudaKernel
from .cuda_steps import CudaUnit
from .devices import UnitBinary
from .dtypes import Dtype
from .errors import KernelError
from .implementation import KernelBody
from .op_declaration import Op
from .op_launch import number
from .rule import Binding
from .source import cuda_unit
from .spec import Shape
from .unit import UnitSpec

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
            CompileError, ToolchainError, DeviceError: as `devices.compile_unit` does.
        """
        return devices.compile_unit(target, self._spec)


def described(
    op: Op, body: KernelBody, inputs: Mapping[str, Array | float | None]
) -> tuple[CallableKernel, dict[str, Any]]:
    """A kernel of an op, and what its `text` and `compile` take.

    Args:
        op, body: the op, and one of its kernels.
        inputs: by name: shape and dtype of an array, a number, or None for one that is absent.

    Raises:
        KernelError: the rule does not allow such inputs; says why. Or one is missing.
        KernelTypeError: a number is none of its kind.
    """
    values, said = _bound(op, inputs)
    rule = op.rule
    written = [dtypes.BY_NAME[said.dtypes.get(one.dtype, one.dtype)] for one in rule.outputs]
    given: list[Any] = []
    for one in rule.inputs:
        value = values[one.name]
        if value is None:  # as a launch has it
            kind = dtypes.BY_NAME[said.dtypes.get(one.dtype, one.dtype)]
            value = ((1,) * len(one.dims or ()), kind)
        if one.mutable:
            written.append(value[1])
        else:
            given.append(value)
    given += [np.int32(said.dims[name]) for name in body.dims]
    sent = body.sent(said)
    kernel = MetalKernel(body.kernel) if body.kind == "metal" else CudaKernel(body.kernel)
    return kernel, {
        "inputs": given, "output_dtypes": written, "template": list(sent.template),
        "grid": sent.grid, "threadgroup": sent.threadgroup,
    }  # fmt: skip


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
    _, said = _bound(op, inputs)
    return DescribedUnit(unit.spec(unit.sent(said).template)) if unit.holds(said) else None


def _bound(op: Op, inputs: Mapping[str, Array | float | None]) -> tuple[dict[str, Any], Binding]:
    """The inputs in the rule's order, and what they say; the outputs' shapes, too."""
    rule = op.rule
    values: dict[str, Any] = {}
    for one in rule.inputs:
        value = inputs.get(one.name)
        if one.dims is None and one.name in inputs:
            plain = number(op.name, one, value)
            values[one.name] = np.array(plain, dtypes.BY_NAME[one.dtype].numpy)[()]
        elif isinstance(value, tuple) or (value is None and one.optional):
            values[one.name] = value
        else:
            raise KernelError(f"[op] input {one.name!r} of op {op.name!r} is not described: {one}.")
    arrays = {name: v if isinstance(v, tuple) else None for name, v in values.items()}
    shapes = [
        () if one.dims is None else None if (found := arrays[one.name]) is None else found[0]
        for one in rule.inputs
    ]
    said = rule.bind(op.name, shapes, [None if v is None else v[1].name for v in arrays.values()])
    rule.results(op.name, said)
    return values, said
