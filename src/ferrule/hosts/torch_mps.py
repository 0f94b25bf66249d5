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

from .. import dtypes
from ..dtypes import Dtype
from ..errors import CompileError, DeviceError, KernelError
from ..implementation import KernelBody, Sent
from ..op_launch import read_dims
from ..rule import Argument, Binding, Rule
from ..source import metal
from ..source.metal_prelude import stand_alone
from ..spec import SMALL, Input, Spec
from . import torch as host

_kernels: dict[Spec, Any] = {}

# How torch makes the bytes of a dtype of an int64 or a float32; None where these are its bytes.
_CASTS = {
    "bool": "int8", "uint8": "uint8", "int8": "int8", "uint16": "int16", "int16": "int16",
    "uint32": "int32", "int32": "int32", "uint64": None, "int64": None, "float16": "fp16",
    "bfloat16": "bf16", "float32": None,
}  # fmt: skip


def launch(
    op: str, rule: Rule, body: KernelBody, sent: Sent, said: Binding, given: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Start a kernel on torch's current stream.

    Args:
        op, rule, body: what is launched; the body is Metal.
        sent, said: what it is launched with; the grid has threads.
        given: per input its tensor, row-contiguous where the kernel wants that and where it is
            written in place; the number; or None where it is absent.
        outputs: the op's outputs.

    Raises:
        KernelError: an argument has a dtype that Metal has not, or a size does not fit.
        CompileError: Metal's compiler refused the text.
        DeviceError: the GPU cannot run threadgroups of that size.
    """
    device = next(one.device for one in given.values() if isinstance(one, torch.Tensor))
    values = {one.name: _value(one, given[one.name], said, device) for one in rule.inputs}
    kinds = [_dtype(one, values[one.name]) for one in rule.inputs if not one.mutable]
    kinds += [dtypes.int32] * len(body.dims)
    reads = [values[one.name] for one in rule.inputs if not one.mutable]
    reads += read_dims(body, said)
    written = [*outputs, *(values[one.name] for one in rule.inputs if one.mutable)]
    results = tuple(host.KNOWN[one.dtype] for one in written)
    if dtypes.float64 in (*kinds, *results):
        raise KernelError(f"[op] op {op!r} has arguments of float64, which Metal has not.")
    inputs = tuple(map(_input, reads, kinds))
    spec = Spec(body.kernel, inputs, results, sent.template)
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = _compiled(spec)
    group = tuple(map(min, sent.threadgroup, sent.grid))
    most = kernel.max_threads_per_threadgroup
    if group[0] * group[1] * group[2] > most:
        raise DeviceError(
            f"[op] `threadgroup` of op {op!r} is {group}, but this GPU runs {most} threads of its "
            "kernel together at most."
        )
    arguments, casts = _arguments(spec, reads)
    kernel(*arguments, *written, threads=sent.grid, group_size=group, arg_casts=casts)


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
            kernel=name, log=str(error),
        ) from None  # fmt: skip
    return getattr(library, metal.kernel_name(spec))


def _value(one: Argument, given: Any, said: Binding, device: torch.device) -> Any:
    """What a kernel gets for an input: a tensor or a number."""
    if given is not None:
        return given
    # Something must be bound in place of what is absent; the body asks before it reads.
    kind = host.TORCH[said.dtypes.get(one.dtype, one.dtype)]
    return torch.empty((1,) * len(one.dims or ()), dtype=kind, device=device)


def _dtype(one: Argument, value: Any) -> Dtype:
    return dtypes.BY_NAME[one.dtype] if one.dims is None else host.KNOWN[value.dtype]


def _input(value: Any, kind: Dtype) -> Input:
    """What of an argument decides the text."""
    if not isinstance(value, torch.Tensor):
        return Input(kind, 0)
    return Input(kind, value.ndim, value.numel() < SMALL)


def _arguments(spec: Spec, reads: Sequence[Any]) -> tuple[list[Any], dict[int, str]]:
    """What a kernel reads, in the order of the text's buffers, and how torch makes the bytes of
    numbers, by their places."""
    found: list[Any] = []
    casts: dict[int, str] = {}

    def number(value: Any, kind: Dtype) -> None:
        cast = _CASTS[kind.name]
        if cast is not None:
            casts[len(found)] = cast
        found.append(value)

    for name, one, value in zip(spec.kernel.input_names, spec.inputs, reads, strict=True):
        if not isinstance(value, torch.Tensor):
            number(_plain(value, one.dtype), one.dtype)
            continue
        found.append(value)
        if value.ndim == 0:
            continue  # the text has a reference, and no shape
        shape, strides, rank = spec.kernel.wants(name)
        if shape:
            number(list(value.shape), dtypes.int32)
        if strides:
            number(list(value.stride()), dtypes.int64)
        if rank:
            number(value.ndim, dtypes.int32)
    return found, casts


def _plain(value: float, kind: Dtype) -> float:
    """A number as torch takes it: an int of 64 bits, or a float."""
    if kind.kind == "f":
        return float(value)
    number = int(value)
    return number - 2**64 if number >= 2**63 else number
