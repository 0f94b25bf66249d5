"""What the kernels of an op become for inputs that are only described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import dtypes
from .call import CallableKernel, MetalKernel
from .cuda_call import CudaKernel
from .dtypes import Dtype
from .errors import KernelError
from .implementation import KernelBody
from .op_declaration import Op
from .op_launch import number
from .spec import Shape

Array = tuple[Shape, Dtype]


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
    written = [dtypes.BY_NAME[kind] for _, kind in rule.results(op.name, said)]
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
