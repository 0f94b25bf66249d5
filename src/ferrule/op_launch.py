"""Launching an op's kernel over arrays that exist: the part of a call that is the same for every
array library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from . import dtypes
from .dtypes import Dtype
from .errors import DeviceError, KernelError, KernelTypeError
from .identity import short
from .implementation import KernelBody, Sent
from .rule import Argument, Binding, Rule
from .spec import Facts, Input, Launch, Spec, row_contiguous_strides

if TYPE_CHECKING:
    from .devices import Program


SAFE = 400.0  # what fits into every float that a number may be declared as


def launch(
    op: str, rule: Rule, body: KernelBody, sent: Sent, said: Binding, device: str, queue: int,
    given: Mapping[str, Facts | float | None], outputs: Sequence[Facts],
    made: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Start a kernel; on the CPU, also wait for it.

    Args:
        op, rule, body: what is launched.
        sent, said: what it is launched with.
        device: ``"cpu"`` or ``"cuda:0"`` …
        queue: the stream's address.
        given: per input its facts, the number, or None where it is absent.
        outputs: of the op's outputs, which nothing else has touched but to fill them.
        made: on the CPU, called afterwards with how messages call the launch.

    Raises:
        KernelError: no thread would run, and yet an output has elements.
        CompileError, DialectError, ToolchainError, DeviceError: as a kernel's launch does.
    """
    if body.kind == "cuda" and not device.startswith("cuda"):
        raise DeviceError(
            f"[op] op {op!r}: its `cuda` body runs on NVIDIA GPUs alone, not on {device!r}."
        )
    if 0 in sent.grid:
        check_empty(op, rule, sent, outputs)
        return
    program, facts, written, what, owners = prepare(rule, body, sent, said, device, given, outputs)
    program.launch(facts, written, what, queue)
    if made is not None and device == "cpu":
        made(what.of(body.kernel))
    del owners  # the bytes of numbers had to live until here


def check_empty(op: str, rule: Rule, sent: Sent, outputs: Sequence[Facts]) -> None:
    """Refuse a grid without threads where an output has elements that nothing would write.

    Raises:
        KernelError: that is so.
    """
    for one, fact in zip(rule.outputs, outputs, strict=True):
        if fact.size and sent.fill is None:
            raise KernelError(
                f"[op] `grid` of op {op!r} is {sent.grid}, which runs no thread, but output "
                f"{one.name!r} of shape {fact.shape} is not empty; give an `init_value`, or a grid "
                "that is not empty."
            )


def prepare(
    rule: Rule, body: KernelBody, sent: Sent, said: Binding, device: str,
    given: Mapping[str, Facts | float | None], outputs: Sequence[Facts],
) -> tuple[Program, list[Facts], list[Facts], Launch, list[object]]:  # fmt: skip
    """The program of a launch, what it reads and writes, the launch, and what owns numbers' bytes.

    Takes what `launch` takes, and launches nothing.
    """
    facts, owners = _facts(rule, body, said, given)
    written = [*outputs]
    for one in rule.inputs:
        if one.mutable:
            found = given[one.name]
            written.append(found if isinstance(found, Facts) else _absent(one, said))
    cuda = device != "cpu"
    inputs = tuple([Input(f.dtype, len(f.shape), value=cuda and f.value) for f in facts])
    kinds = tuple([f.dtype for f in written])
    values = [(type(v), v) for _, v in sent.template]  # True == 1 in Python
    key = (device, inputs, kinds, *values, sent.shared)
    program = body.programs.get(key)
    if program is None:
        program = body.programs[key] = _program(body, sent, device, inputs, kinds)
    x, y, z = sent.threadgroup
    gx, gy, gz = sent.grid
    shapes = tuple([f.shape for f in written])
    group = (min(x, gx), min(y, gy), min(z, gz))
    return program, facts, written, Launch(sent.grid, group, shapes, sent.fill, ()), owners


def _program(
    body: KernelBody, sent: Sent, device: str, inputs: tuple[Input, ...], kinds: tuple[Dtype, ...]
) -> Program:
    from . import devices

    kernel = replace(body.kernel, shared_memory=sent.shared) if sent.shared else body.kernel
    return devices.get(device).program(Spec(kernel, inputs, kinds, sent.template))


def _facts(
    rule: Rule, body: KernelBody, said: Binding, given: Mapping[str, Facts | float | None]
) -> tuple[list[Facts], list[object]]:
    """The facts of all that the kernel reads, and what owns the bytes of numbers."""
    facts: list[Facts] = []
    owners: list[object] = []
    for one in rule.inputs:
        if one.mutable:
            continue
        value = given[one.name]
        if isinstance(value, Facts):
            if one.dims and not value.shape:
                # A body indexes what it declares as *S, also where S is no dims; the dialect makes
                # arrays without dims references.
                value = value._replace(shape=(1,), strides=(1,))
            facts.append(value)
        elif one.dims is not None:
            facts.append(_absent(one, said))
        else:
            owner = np.array(value, dtypes.BY_NAME[one.dtype].numpy)
            owners.append(owner)
            facts.append(Facts(dtypes.BY_NAME[one.dtype], (), (), owner.ctypes.data, "cpu", True))
    if body.dims:
        sizes = read_dims(body, said)
        dims = np.array(sizes, np.int32)
        owners.append(dims)
        at = dims.ctypes.data
        facts += [Facts(dtypes.int32, (), (), at + 4 * i, "cpu", True) for i in range(len(sizes))]
    return facts, owners


def read_dims(body: KernelBody, said: Binding) -> list[int]:
    """The sizes of the dims that a body reads, as int32.

    Raises:
        KernelError: one is too large.
    """
    sizes = [said.dims[name] for name in body.dims]
    for name, size in zip(body.dims, sizes, strict=True):
        if size >= 2**31:
            raise KernelError(
                f"[op] the body of kernel {body.kernel.name!r} reads the dim {name!r}, which "
                f"is {size}, as an int32: at most {2**31 - 1}."
            )
    return sizes


def _absent(one: Argument, said: Binding) -> Facts:
    """What stands for an array that is not there; the body asks before it reads."""
    kind = dtypes.BY_NAME[said.dtypes.get(one.dtype, one.dtype)]
    shape = (1,) * len(one.dims or ())
    return Facts(kind, shape, row_contiguous_strides(shape), 0, "cpu")


def number(op: str, one: Argument, value: object) -> float:
    """A call's number, as the rule declares it.

    Raises:
        KernelTypeError: it is no number of that kind.
        KernelError: it does not fit.
    """
    kind = dtypes.BY_NAME[one.dtype]
    if isinstance(value, np.ndarray):
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op!r}: got an array of NumPy (which torch.compile "
            f"makes of NumPy's numbers), expected a Python number: {one}; give float(x) or int(x), "
            "outside of what is compiled, or use math in place of numpy."
        )
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        kinds = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op!r}: got a {kinds} of shape {tuple(value.shape)}, "
            f"expected a Python number: {one}. For an array without dims, which can be traced, "
            f"batched and differentiated, declare {one.name}[]:{one.dtype}."
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
            f"[op] input {one.name!r} of op {op!r}: got {short(value)} of type "
            f"{type(value).__name__}, expected a Python number: {one}."
        )
    if kind.kind in "iu":
        limits: Any = np.iinfo(kind.numpy)
        if not limits.min <= plain <= limits.max:
            raise KernelError(
                f"[op] input {one.name!r} of op {op!r}: got {plain}, but {one}, from {limits.min} "
                f"to {limits.max}."
            )
    elif kind.kind == "f" and not _fits(cast(float, plain), kind):
        raise KernelError(
            f"[op] input {one.name!r} of op {op!r}: got {short(value)}, which does not fit: {one}."
        )
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
