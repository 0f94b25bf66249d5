"""Calls of CUDA units with tensors that lie as in a call before: what remains are addresses.

Where it can, C makes them (runtime/torch_units.h); else `KnownCall` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch

from ... import dtypes
from ...dtypes import Dtype
from ...operators import call as op_call
from ...operators.launch import BoundCall, keep, number
from ...operators.op import Op
from ...operators.unit_call import Kernels, bits, input_words, known_kernels
from ...operators.unit_steps import ALIGNMENT, CudaUnit
from ...rules.argument import Argument, is_countable
from ...spec import Facts, Shape
from . import arrays as host
from .known_calls import KnownCalls

_MOST_WORDS = 256  # MOST_WORDS of runtime/torch_layouts.h
_IN_C = ("float32",)  # what C makes of a Python float


class KnownCall(NamedTuple):
    """What calls share whose tensors lie alike.

    Attributes:
        kernels: what is started.
        words: of each input None where it is an array, the parameter where it is a float, else the
            bits of what it is.
        results: the shape and dtype of each output.
    """

    kernels: Kernels
    words: list[int | Argument | None]
    results: list[tuple[Shape, Dtype]]

    def run(self, op: Op, values: Sequence[Any]) -> Any:
        """The outputs of a call; raises as `launch.number` and `Kernels.start`."""
        op.counts["Python path"] += 1
        device = self.kernels.device
        queue = host.stream(None, device)
        outputs = [host.empty(shape, kind, device) for shape, kind in self.results]
        words: list[int] = []
        for value, word in zip(values, self.words, strict=True):
            if word is None:
                words.append(value.data_ptr())
            elif isinstance(word, int):
                words.append(word)
            else:
                words.append(bits(word, number(op.name, word, value)))
        words += [output.data_ptr() for output in outputs]
        self.kernels.start(words, host, cast(Callable[[Any], Facts], host.facts), queue)
        return op_call.packed(outputs)


def key(values: Sequence[Any]) -> tuple[Any, ...]:
    """How a call's inputs lie, and the numbers among them, but for floats: nothing depends on those
    but what the kernels make of them, and -0.0 equals 0.0."""
    return tuple([
        (value.dtype, value.shape, value.stride(), value.device)
        if isinstance(value, torch.Tensor)
        else float if type(value) is float else (type(value), value)
        for value in values
    ])  # fmt: skip


def remember(
    key: tuple[Any, ...],
    call: BoundCall,
    unit: CudaUnit,
    values: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    in_c: KnownCalls | None,
) -> None:
    """Keep what a call shares with those of the same `key`, where it is all but addresses."""
    if (kernels := known_kernels(call, unit)) is None:
        return
    words: list[int | Argument | None] = []
    for parameter, word in zip(call.op.rule.inputs, input_words(call), strict=True):
        if isinstance(call.arguments[parameter.name], Facts):
            words.append(None)
        else:
            varies = parameter.dims is None and not is_countable(parameter)
            words.append(parameter if varies else word)
    known = KnownCall(kernels, words, call.results)
    keep(call.op, key, known)
    if in_c is not None and _fits_c(known):
        in_c.keep(values, _for_c(known, outputs[0].device))


class _Plan(ctypes.Structure):
    """`unit_plan` of runtime/torch_units.h."""

    _fields_ = (
        *[(name, ctypes.c_uint64) for name in ("begin", "state", "context", "steps")],
        *[(name, ctypes.c_int32) for name in ("count", "inputs", "outputs", "parts")],
        ("device", ctypes.c_int32), ("alignment", ctypes.c_int32),
        ("single", ctypes.POINTER(ctypes.c_uint8)), ("part", ctypes.POINTER(ctypes.c_uint64)),
    )  # fmt: skip


def _fits_c(known: KnownCall) -> bool:
    """Whether C can make such calls."""
    numbers = [word for word in known.words if isinstance(word, Argument)]
    count = len(known.words) + len(known.results) + len(known.kernels.scratch)
    return count <= _MOST_WORDS and all(word.dtype in _IN_C for word in numbers)


def _for_c(known: KnownCall, device: torch.device) -> tuple[Any, ...]:
    """What C keeps of calls: a plan's address, the arguments of ``torch.empty`` for outputs and
    scratch, what raises the error of a status, and what owns all that."""
    kernels, started = known.kernels, known.kernels.started
    single = [isinstance(word, Argument) for word in known.words]
    made = [_new(shape, kind, device) for shape, kind in known.results]
    if kernels.memory:
        made.append(_new((kernels.memory + ALIGNMENT - 1,), dtypes.uint8, device))
    scratch = kernels.scratch
    ordinal = -1 if device.type == "cpu" else device.index
    plan = _Plan(
        started.begin, started.state, started.context, started.steps, started.count,
        len(single), len(known.results), len(scratch), ordinal, ALIGNMENT,
        (ctypes.c_uint8 * len(single))(*single), (ctypes.c_uint64 * len(scratch))(*scratch),
    )  # fmt: skip

    def failed(status: int, tried: int) -> NoReturn:
        raise started.failure(status, tried)

    return ctypes.addressof(plan), tuple(made), failed, (plan, kernels)


def _new(shape: Shape, kind: Dtype, device: torch.device) -> tuple[tuple[Shape], dict[str, Any]]:
    return (shape,), {"dtype": host.TORCH[kind.name], "device": device}
