"""The kernels of an op for inputs that are given by shape and dtype alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..devices import protocol as devices
from ..devices.protocol import UnitBinary
from ..dtypes import Dtype
from ..errors import KernelError
from ..kernels.call import CallableKernel, MetalKernel
from ..kernels.cuda import CudaKernel
from ..rules.argument import Argument
from ..source.cuda import unit as cuda_unit
from ..spec import Facts, Shape, row_contiguous_strides
from ..unit import UnitSpec
from .bodies import KernelBody
from .call import gathered
from .launch import BoundCall, bound, kernel_facts, read_dims
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
    op: Op, body: KernelBody, inputs: Mapping[str, Array | float | None], device: str | None = None
) -> tuple[CallableKernel, dict[str, Any]] | None:
    """A kernel of an op, and the arguments of its `text` and `compile`.

    None where it is not for such calls, by its `when`.

    Args:
        op, body: the op, and one of its kernels.
        inputs: by name: shape and dtype of an array, a number, or None for one that is absent.
        device: whose text is wanted, ``"cpu"``, ``"cuda"`` or ``"metal"``; None is any.

    Raises:
        KernelError: the rule does not allow such inputs; says why. Or one is missing.
        KernelTypeError: a number is none of its kind.
    """
    call = _bind(op, inputs)
    anywhere = ("cpu", "cuda", "metal") if body.kind == "metal" else ("cuda",)
    for name in anywhere if device is None else (device,):
        of_device = _hopper if name == "cuda" else partial(devices.described, name)
        call = call._replace(binding=call.binding.on(of_device))
        if body.holds(call.binding):
            break
    else:
        return None
    facts, in_place, owners = kernel_facts(call, body)
    numbers = iter(owners)
    count = len(facts) - len(body.dims)
    kernel_inputs = [next(numbers)[()] if f.value else (f.shape, f.dtype) for f in facts[:count]]
    kernel_inputs += map(np.int32, read_dims(body, call.binding))
    launch = body.launch_for(call.binding)
    kernel = MetalKernel(body.kernel) if body.kind == "metal" else CudaKernel(body.kernel)
    return kernel, {
        "inputs": kernel_inputs,
        "output_dtypes": [*(dtype for _, dtype in call.results), *(f.dtype for f in in_place)],
        "template": list(launch.template),
        "grid": launch.grid,
        "threadgroup": launch.threadgroup,
    }


def _hopper() -> Mapping[str, Any]:
    """The GPU that texts in CUDA are shown for, where they depend on it: an H100."""
    return {":device": "cuda", "sm_count": 132, "capability": 90, "memory_bus": 6144}


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
    binding = _bind(op, inputs).binding.on(_hopper)
    if not unit.holds(binding):
        return None
    return DescribedUnit(unit.spec(unit.launch_for(binding).template))


def _bind(op: Op, inputs: Mapping[str, Array | float | None]) -> BoundCall:
    """The call with these inputs, whose arrays are nowhere."""
    for argument in op.rule.inputs:
        value = inputs.get(argument.name)
        absent = value is None and argument.optional
        number = argument.dims is None and argument.name in inputs
        if not (number or absent or isinstance(value, tuple)):
            raise KernelError(
                f"[op] input {argument.name!r} of op {op.name!r} is not described: {argument}."
            )

    def facts_of(_: Argument, array: Array) -> Facts:
        shape, dtype = array
        return Facts(dtype, shape, row_contiguous_strides(shape), 0, "")

    values = [inputs.get(argument.name) for argument in op.rule.inputs]
    return bound(op, "", gathered(op, values, facts_of))
