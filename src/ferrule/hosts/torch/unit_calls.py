"""Calls of CUDA units with tensors that lie as in a call before: what remains are addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ...dtypes import Dtype
from ...operators import call as op_call
from ...operators.launch import BoundCall, keep, number
from ...operators.op import Op
from ...operators.unit_call import Kernels, bits, input_words, known_kernels
from ...operators.unit_steps import CudaUnit
from ...rules.argument import Argument, is_countable
from ...spec import Facts, Shape
from . import arrays as host


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


def remember(key: tuple[Any, ...], call: BoundCall, unit: CudaUnit) -> None:
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
    keep(call.op, key, KnownCall(kernels, words, call.results))
