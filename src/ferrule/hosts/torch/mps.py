"""Kernels of ops on Apple's GPUs: torch compiles our Metal text and launches it.

``torch.mps.compile_shader`` takes a whole Metal source. Its kernels take arguments in the order of
their buffers: tensors as they are, a Python int as an int64, a float as a float32, and lists of
these as arrays, unless ``arg_casts`` says otherwise for an argument's number. Exactly ``threads``
threads run, as in MLX.

This was never run on Apple hardware: text, arguments and their order are tested with a stand-in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ... import dtypes
from ...dtypes import Dtype
from ...errors import CompileError, DeviceError, KernelError
from ...operators.bodies import BodyLaunch, KernelBody
from ...operators.launch import read_dims
from ...rules.argument import Argument
from ...rules.rule import Binding, Rule
from ...source.metal import text as metal
from ...source.metal.prelude import stand_alone
from ...spec import SMALL, Input, Spec, clamped
from . import arrays as host

_kernels: dict[Spec, Any] = {}

# How torch makes the bytes of a dtype of an int64 or a float32; None where these are its bytes.
_CASTS = {
    "bool": "int8", "uint8": "uint8", "int8": "int8", "uint16": "int16", "int16": "int16",
    "uint32": "int32", "int32": "int32", "uint64": None, "int64": None, "float16": "fp16",
    "bfloat16": "bf16", "float32": None,
}  # fmt: skip


def launch(
    op: str,
    rule: Rule,
    body: KernelBody,
    config: BodyLaunch,
    binding: Binding,
    arguments: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Start a kernel on torch's current stream.

    Args:
        op, rule, body: what is launched; the body is Metal.
        config, binding: what it is launched with; the grid has threads.
        arguments: per input its tensor, row-contiguous where the kernel wants that and where it is
            written in place; the number; or None where it is absent.
        outputs: the op's outputs.

    Raises:
        KernelError: an argument has a dtype that Metal has not, or a size does not fit.
        CompileError: Metal's compiler refused the text.
        DeviceError: the GPU cannot run threadgroups of that size.
    """
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    values = {p.name: _value(p, arguments[p.name], binding, device) for p in rule.inputs}
    input_dtypes = [_dtype(p, values[p.name]) for p in rule.inputs if not p.mutable]
    input_dtypes += [dtypes.int32] * len(body.dims)
    inputs_read = [values[p.name] for p in rule.inputs if not p.mutable]
    inputs_read += read_dims(body, binding)
    written = [*outputs, *(values[p.name] for p in rule.inputs if p.mutable)]
    output_dtypes = tuple(host.KNOWN[array.dtype] for array in written)
    if dtypes.float64 in (*input_dtypes, *output_dtypes):
        raise KernelError(f"[op] op {op!r} has arguments of float64, which Metal has not.")
    inputs = tuple(map(_input, inputs_read, input_dtypes))
    spec = Spec(body.kernel, inputs, output_dtypes, config.template)
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = _compiled(spec)
    group = clamped(config.threadgroup, config.grid)
    limit = kernel.max_threads_per_threadgroup
    if group[0] * group[1] * group[2] > limit:
        raise DeviceError(
            f"[op] `threadgroup` of op {op!r} is {group}, but this GPU runs {limit} threads of its "
            "kernel together at most."
        )
    kernel_arguments, casts = _arguments(spec, inputs_read)
    kernel(*kernel_arguments, *written, threads=config.grid, group_size=group, arg_casts=casts)


def text(spec: Spec) -> str:
    """The source that torch compiles for a `Spec`: MLX's text, after what it needs there."""
    # torch reads sources as ASCII. Elsewhere than in comments Metal has no use for more.
    return stand_alone(metal.text(spec)).encode("ascii", "replace").decode()


def _compiled(spec: Spec) -> Any:
    try:
        library = torch.mps.compile_shader(text(spec))
    except SyntaxError as error:
        name = spec.kernel.name
        raise CompileError(
            f"[metal_kernel] Metal's compiler refused kernel {name!r}; the line numbers are those "
            f"of its text('metal'):\n{error}",
            kernel=name,
            log=str(error),
        ) from None
    return getattr(library, metal.kernel_name(spec))


def _value(parameter: Argument, argument: Any, binding: Binding, device: torch.device) -> Any:
    """The argument of a kernel for an input: a tensor or a number."""
    if argument is not None:
        return argument
    # Something must be bound in place of what is absent; the body asks before it reads.
    dtype = host.TORCH[binding.dtypes.get(parameter.dtype, parameter.dtype)]
    return torch.empty((1,) * len(parameter.dims or ()), dtype=dtype, device=device)


def _dtype(parameter: Argument, value: Any) -> Dtype:
    return dtypes.BY_NAME[parameter.dtype] if parameter.dims is None else host.KNOWN[value.dtype]


def _input(value: Any, dtype: Dtype) -> Input:
    """The facts of an argument that the text depends on."""
    if not isinstance(value, torch.Tensor):
        return Input(dtype, 0)
    return Input(dtype, value.ndim, value.numel() < SMALL)


def _arguments(spec: Spec, reads: Sequence[Any]) -> tuple[list[Any], dict[int, str]]:
    """The arguments that a kernel reads, in the order of the text's buffers, and how torch casts
    numbers, by their places."""
    arguments: list[Any] = []
    casts: dict[int, str] = {}

    def number(value: Any, dtype: Dtype) -> None:
        cast = _CASTS[dtype.name]
        if cast is not None:
            casts[len(arguments)] = cast
        arguments.append(value)

    for name, declared, value in zip(spec.kernel.input_names, spec.inputs, reads, strict=True):
        if not isinstance(value, torch.Tensor):
            number(_plain(value, declared.dtype), declared.dtype)
            continue
        arguments.append(value)
        if value.ndim == 0:
            continue  # the text has a reference, and no shape
        shape, strides, rank = spec.kernel.wants(name)
        if shape:
            number(list(value.shape), dtypes.int32)
        if strides:
            number(list(value.stride()), dtypes.int64)
        if rank:
            number(value.ndim, dtypes.int32)
    return arguments, casts


def _plain(value: float, dtype: Dtype) -> float:
    """A number as torch takes it: an int of 64 bits, or a float."""
    if dtype.kind == "f":
        return float(value)
    number = int(value)
    return number - 2**64 if number >= 2**63 else number
