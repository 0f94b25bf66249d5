"""Launching an op's kernel over arrays that exist: the part of a call that is the same for every
array library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import DeviceError, KernelError, KernelTypeError
from ..rules.argument import Argument
from ..rules.rule import Binding, Rule
from ..spec import Facts, Input, Launch, Spec, clamped, row_contiguous_strides
from .bodies import BodyLaunch, KernelBody
from .identity import short

if TYPE_CHECKING:
    from ..devices.protocol import Program


Arguments = Mapping[str, Facts | float | None]  # of inputs
SAFE = 400.0  # what fits into every float that a number may be declared as


def launch(
    op: str,
    rule: Rule,
    body: KernelBody,
    body_launch: BodyLaunch,
    binding: Binding,
    device: str,
    queue: int,
    arguments: Arguments,
    outputs: Sequence[Facts],
    check: Callable[[str], None] | None = None,
) -> None:
    """Start a kernel; on the CPU, also wait for it.

    Args:
        op, rule, body: what is launched.
        body_launch, binding: its launch, and the sizes of the call.
        device: ``"cpu"`` or ``"cuda:0"`` …
        queue: the stream's address.
        arguments: per input its facts, the number, or None where it is absent.
        outputs: of the op's outputs, which nothing else has touched but to fill them.
        check: on the CPU, called afterwards with how messages call the launch.

    Raises:
        KernelError: no thread would run, and yet an output has elements.
        CompileError, DialectError, ToolchainError, DeviceError: as a kernel's launch does.
    """
    if body.kind == "cuda" and not device.startswith("cuda"):
        raise DeviceError(
            f"[op] op {op!r}: its `cuda` body runs on NVIDIA GPUs alone, not on {device!r}."
        )
    if 0 in body_launch.grid:
        check_empty(op, rule, body_launch, outputs)
        return
    program, inputs, written, launch, owners = prepare(
        rule, body, body_launch, binding, device, arguments, outputs
    )
    program.launch(inputs, written, launch, queue)
    if check is not None and device == "cpu":
        check(launch.of(body.kernel))
    del owners  # the bytes of numbers had to live until here


def check_empty(op: str, rule: Rule, body_launch: BodyLaunch, outputs: Sequence[Facts]) -> None:
    """Refuse a grid without threads where an output has elements that nothing would write.

    Raises:
        KernelError: that is so.
    """
    for output, fact in zip(rule.outputs, outputs, strict=True):
        if fact.size and body_launch.fill is None:
            raise KernelError(
                f"[op] `grid` of op {op!r} is {body_launch.grid}, which runs no thread, but output "
                f"{output.name!r} of shape {fact.shape} is not empty; give an `init_value`, or a "
                "grid that is not empty."
            )


def prepare(
    rule: Rule,
    body: KernelBody,
    body_launch: BodyLaunch,
    binding: Binding,
    device: str,
    arguments: Arguments,
    outputs: Sequence[Facts],
) -> tuple[Program, list[Facts], list[Facts], Launch, list[object]]:
    """The program of a launch, its inputs and outputs, the launch, and owners of numbers' bytes.

    Takes what `launch` takes, and launches nothing.
    """
    facts, owners = _facts(rule, body, binding, arguments)
    written = [*outputs]
    for parameter in rule.inputs:
        if parameter.mutable:
            fact = arguments[parameter.name]
            written.append(fact if isinstance(fact, Facts) else _absent(parameter, binding))
    cuda = device != "cpu"
    inputs = tuple([Input(f.dtype, len(f.shape), value=cuda and f.value) for f in facts])
    kinds = tuple([f.dtype for f in written])
    values = [(type(v), v) for _, v in body_launch.template]  # True == 1 in Python
    key = (device, inputs, kinds, *values, body_launch.shared)
    program = body.programs.get(key)
    if program is None:
        shared = body_launch.shared
        kernel = replace(body.kernel, shared_memory=shared) if shared else body.kernel
        spec = Spec(kernel, inputs, kinds, body_launch.template)
        program = body.programs[key] = _program(device, spec)
    shapes = tuple([f.shape for f in written])
    group = clamped(body_launch.threadgroup, body_launch.grid)
    launch = Launch(body_launch.grid, group, shapes, body_launch.fill, ())
    return program, facts, written, launch, owners


def _program(device: str, spec: Spec) -> Program:
    from ..devices import protocol as devices

    return devices.get(device).program(spec)


def _facts(
    rule: Rule, body: KernelBody, binding: Binding, arguments: Arguments
) -> tuple[list[Facts], list[object]]:
    """The facts of all that the kernel reads, and the owners of numbers' bytes."""
    facts: list[Facts] = []
    owners: list[object] = []
    for parameter in rule.inputs:
        if parameter.mutable:
            continue
        value = arguments[parameter.name]
        if isinstance(value, Facts):
            if parameter.dims and not value.shape:
                # A body indexes what it declares as *S, also where S is no dims; the dialect makes
                # arrays without dims references.
                value = value._replace(shape=(1,), strides=(1,))
            facts.append(value)
        elif parameter.dims is not None:
            facts.append(_absent(parameter, binding))
        else:
            dtype = dtypes.BY_NAME[parameter.dtype]
            owner = np.array(value, dtype.numpy)
            owners.append(owner)
            facts.append(Facts(dtype, (), (), owner.ctypes.data, "cpu", True))
    if body.dims:
        sizes = read_dims(body, binding)
        dims = np.array(sizes, np.int32)
        owners.append(dims)
        at = dims.ctypes.data
        facts += [Facts(dtypes.int32, (), (), at + 4 * i, "cpu", True) for i in range(len(sizes))]
    return facts, owners


def read_dims(body: KernelBody, binding: Binding) -> list[int]:
    """The sizes of the dims that a body reads, as int32.

    Raises:
        KernelError: one is too large.
    """
    sizes = [binding.dims[name] for name in body.dims]
    for name, size in zip(body.dims, sizes, strict=True):
        if size >= 2**31:
            raise KernelError(
                f"[op] the body of kernel {body.kernel.name!r} reads the dim {name!r}, which "
                f"is {size}, as an int32: at most {2**31 - 1}."
            )
    return sizes


def _absent(parameter: Argument, binding: Binding) -> Facts:
    """The facts in place of an absent array; the body asks before it reads."""
    kind = dtypes.BY_NAME[binding.dtypes.get(parameter.dtype, parameter.dtype)]
    shape = (1,) * len(parameter.dims or ())
    return Facts(kind, shape, row_contiguous_strides(shape), 0, "cpu")


def number(op: str, parameter: Argument, value: object) -> float:
    """A call's number, as the rule declares it.

    Raises:
        KernelTypeError: it is no number of that kind.
        KernelError: it does not fit.
    """
    kind = dtypes.BY_NAME[parameter.dtype]
    label = f"[op] input {parameter.name!r} of op {op!r}"
    if isinstance(value, np.ndarray):
        raise KernelTypeError(
            f"{label}: got an array of NumPy (which torch.compile makes of NumPy's numbers), "
            f"expected a Python number: {parameter}; give float(x) or int(x), outside of what is "
            "compiled, or use math in place of numpy."
        )
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        type_name = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        raise KernelTypeError(
            f"{label}: got a {type_name} of shape {tuple(value.shape)}, expected a Python number: "
            f"{parameter}. For an array without dims, which can be traced, batched and "
            f"differentiated, declare {parameter.name}[]:{parameter.dtype}."
        )
    plain: Any = value.item() if isinstance(value, np.generic) else value
    allowed: dict[str, tuple[type, ...]] = {
        "b": (bool,),
        "u": (int,),
        "i": (int,),
        "f": (int, float),
        "c": (int, float, complex),
    }
    if not isinstance(plain, allowed[kind.kind]) or (kind.kind != "b" and isinstance(plain, bool)):
        raise KernelTypeError(
            f"{label}: got {short(value)} of type {type(value).__name__}, expected a Python "
            f"number: {parameter}."
        )
    if kind.kind in "iu":
        limits: Any = np.iinfo(kind.numpy)
        if not limits.min <= plain <= limits.max:
            raise KernelError(
                f"{label}: got {plain}, but {parameter}, from {limits.min} to {limits.max}."
            )
    elif kind.kind == "f" and not _fits(cast(float, plain), kind):
        raise KernelError(f"{label}: got {short(value)}, which does not fit: {parameter}.")
    return cast(float, plain)


def _fits(value: float, kind: Dtype) -> bool:
    """Whether a float dtype does not make infinity of a number."""
    if -SAFE <= value <= SAFE:
        return True
    try:
        number = float(value)
    except OverflowError:  # an int
        return False
    with np.errstate(over="ignore"):
        return not np.isfinite(number) or bool(np.isfinite(np.array(number, kind.numpy)))
