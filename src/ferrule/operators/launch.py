"""What launches an op's kernel over arrays that exist: the part of a call that is the same for
every array library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from .. import dtypes
from ..devices import protocol as devices
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..rules.argument import Argument, as_declared
from ..rules.expression import MOST, Ints
from ..rules.rule import Binding, Rule
from ..spec import Facts, Input, Launch, Shape, Spec, clamped, row_contiguous_strides
from .bodies import BodyLaunch, KernelBody
from .expressions import bound_dtype
from .identity import short

if TYPE_CHECKING:
    from ..devices.protocol import Program
    from .declared import Declared


Arguments = dict[str, Facts | float | None]  # of inputs: facts, numbers, None of what is absent
_MOST_BOUND = 1000  # sizes, of which an op keeps what they decide
_SAFE = 400.0  # what fits into every float that a number may be declared as
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "b": (bool,),
    "u": (int,),
    "i": (int,),
    "f": (int, float),
    "c": (int, float, complex),
}


class BoundCall(NamedTuple):
    """A call of an op, whose inputs bind its rule.

    Attributes:
        op: what is called.
        device: ``"cpu"`` or ``"cuda:0"`` …
        arguments: per input its facts, the number, or None where it is absent.
        binding: the sizes and dtypes.
        results: the shape and dtype of each output.
        made: what has been made for calls on this device with these sizes and dtypes.
    """

    op: Declared
    device: str
    arguments: Arguments
    binding: Binding
    results: list[tuple[Shape, Dtype]]
    made: dict[object, Any]

    def once(self, what: object, make: Callable[[], Any]) -> Any:
        """What depends on the device, sizes and dtypes alone: it is made once, and kept as
        ``what``.

        An op with many implementations evaluates hundreds of expressions for a call.
        """
        found = self.made.get(what)
        if found is None:
            found = self.made[what] = make()
        return found


def bound(op: Declared, device: str, arguments: Arguments, on: type[Ints] = Ints) -> BoundCall:
    """A call with these inputs on a device; ``on`` compares sizes. Raises as `Rule.bind` does.

    What sizes and dtypes decide is found once, where they are numbers.
    """
    shapes: list[Shape | None] = []
    kinds: list[str | None] = []
    for parameter in op.rule.inputs:
        fact = arguments[parameter.name]
        if isinstance(fact, Facts):
            shapes.append(fact.shape)
            kinds.append(fact.dtype.name)
        else:
            shapes.append(() if parameter.dims is None else None)
            kinds.append(None)
    key = (device, *shapes, *kinds, *[arguments[name] for name in op.rule.numbers])
    known = op.bound.get(key) if on is Ints else None
    if known is None:
        binding = op.rule.bind(op.name, shapes, kinds, on, arguments)
        binding.device = partial(devices.described, device)
        results = [(s, dtypes.BY_NAME[k]) for s, k in op.rule.results(op.name, binding, on)]
        check_countable(op, results)
        known = binding, results, {}
        if on is Ints:
            keep(op, key, known)
    return BoundCall(op, device, arguments, *known)


def keep(op: Declared, key: object, known: object) -> None:
    """Keep what calls of an op share."""
    if len(op.bound) >= _MOST_BOUND:
        op.bound.clear()
    op.bound[key] = known


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
    call: BoundCall, body: KernelBody, body_launch: BodyLaunch, outputs: Sequence[Facts]
) -> tuple[Program, list[Facts], list[Facts], Launch, list[object]]:
    """The program of a launch, its inputs and outputs, the launch, and owners of numbers' bytes.

    Args:
        call, body, body_launch: what is to be launched, and how.
        outputs: of the op's outputs, which nothing else has touched but to fill them.
    """
    facts, in_place, owners = kernel_facts(call, body)
    written = [*outputs, *in_place]
    cuda = call.device != "cpu"
    inputs = tuple([Input(f.dtype, len(f.shape), value=cuda and f.value) for f in facts])
    kinds = tuple([f.dtype for f in written])
    values = [(type(v), v) for _, v in body_launch.template]  # True == 1 in Python
    key = (call.device, inputs, kinds, *values, body_launch.shared)
    program = body.programs.get(key)
    if program is None:
        shared = body_launch.shared
        kernel = replace(body.kernel, shared_memory=shared) if shared else body.kernel
        spec = Spec(kernel, inputs, kinds, body_launch.template)
        program = body.programs[key] = devices.get(call.device).program(spec)
    shapes = tuple([f.shape for f in written])
    group = clamped(body_launch.threadgroup, body_launch.grid)
    launch = Launch(
        body_launch.grid,
        group,
        shapes,
        body_launch.fill,
        (),
        in_place=len(in_place),
        declared=True,
    )
    return program, facts, written, launch, owners


def kernel_facts(call: BoundCall, body: KernelBody) -> tuple[list[Facts], list[Facts], list[Any]]:
    """The facts of all that a kernel reads, of all that it writes in place, and the owners of
    numbers' bytes.

    The dims that its body names are the last of what it reads.
    """
    facts: list[Facts] = []
    written: list[Facts] = []
    owners: list[Any] = []
    for parameter in call.op.rule.inputs:
        value = call.arguments[parameter.name]
        if isinstance(value, Facts):
            if parameter.dims and not value.shape and not parameter.mutable:
                # A body indexes what it declares as *S, also where S is no dims; the dialect makes
                # arrays without dims references.
                value = value._replace(shape=(1,), strides=(1,))
        elif parameter.dims is not None:  # the body asks before it reads what is absent
            shape = (1,) * len(parameter.dims)
            dtype = bound_dtype(parameter.dtype, call.binding)
            value = Facts(dtype, shape, row_contiguous_strides(shape), 0, "cpu")
        else:
            dtype = dtypes.BY_NAME[parameter.dtype]
            owner = np.array(value, dtype.numpy)
            owners.append(owner)
            value = Facts(dtype, (), (), owner.ctypes.data, "cpu", True)
        (written if parameter.mutable else facts).append(value)
    if body.dims:
        sizes = read_dims(body, call.binding)
        dims = np.array(sizes, np.int32)
        owners.append(dims)
        at = dims.ctypes.data
        facts += [Facts(dtypes.int32, (), (), at + 4 * i, "cpu", True) for i in range(len(sizes))]
    return facts, written, owners


def read_dims(body: KernelBody, binding: Binding) -> list[int]:
    """The sizes of the dims that a body reads, as int32.

    Raises:
        KernelError: one is too large.
    """
    sizes = [binding.size(name) for name in body.dims]
    for name, size in zip(body.dims, sizes, strict=True):
        if size >= 2**31:
            raise KernelError(
                f"[op] the body of kernel {body.kernel.name!r} reads the dim {name!r}, which "
                f"is {size}, as an int32: at most {2**31 - 1}."
            )
    return sizes


def check_countable(op: Declared, results: Sequence[tuple[Shape, Dtype]]) -> None:
    """Refuse outputs of more bytes than 64 bits count, where their sizes are known.

    Raises:
        KernelError: there is one.
    """
    for output, (shape, kind) in zip(op.rule.outputs, results, strict=True):
        if all(type(size) is int for size in shape) and (
            max(shape, default=0) > MOST or math.prod(shape) * kind.itemsize > MOST
        ):
            raise KernelError(
                f"[op] output {output.name!r} of op {op.name!r} ({as_declared(output)}) would "
                f"have the shape {shape}, of more bytes than 64 bits count."
            )


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
    expected = _PYTHON_TYPES[kind.kind]
    if not isinstance(plain, expected) or (kind.kind != "b" and isinstance(plain, bool)):
        what = "True or False" if kind.kind == "b" else "a Python number"
        raise KernelTypeError(
            f"{label}: got {short(value)} of type {type(value).__name__}, expected {what}: "
            f"{parameter}."
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
    if -_SAFE <= value <= _SAFE:
        return True
    try:
        number = float(value)
    except OverflowError:  # an int
        return False
    with np.errstate(over="ignore"):
        return not np.isfinite(number) or bool(np.isfinite(np.array(number, kind.numpy)))
