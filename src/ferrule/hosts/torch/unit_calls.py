"""Calls of CUDA units with tensors that lie as in a call before: what remains are addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ...dtypes import Dtype
from ...operators import call as op_call
from ...operators.launch import BoundCall, keep
from ...operators.op import Op
from ...operators.unit_call import Kernels, input_words, kernels_of
from ...operators.unit_steps import CudaUnit
from ...spec import Facts, Shape
from . import arrays as host


class KnownCall(NamedTuple):
    """What calls share whose tensors lie alike.

    Attributes:
        kernels: what is started.
        words: of each input that is no array the bits; None of arrays.
        results: the shape and dtype of each output.
    """

    kernels: Kernels
    words: list[int | None]
    results: list[tuple[Shape, Dtype]]

    def run(self, op: Op, values: Sequence[Any]) -> Any:
        """The outputs of a call; raises as `Kernels.start`."""
        op.counts["Python path"] += 1
        device = self.kernels.device
        queue = host.stream(None, device)
        outputs = [host.empty(shape, kind, device) for shape, kind in self.results]
        pairs = zip(values, self.words, strict=True)
        words = [value.data_ptr() if word is None else word for value, word in pairs]
        words += [output.data_ptr() for output in outputs]
        self.kernels.start(words, host, cast(Callable[[Any], Facts], host.facts), queue)
        return op_call.packed(outputs)


def key(values: Sequence[Any]) -> tuple[Any, ...]:
    """How a call's inputs lie."""
    return tuple([
        (value.dtype, value.shape, value.stride(), value.device)
        if isinstance(value, torch.Tensor)
        else (type(value), value)
        for value in values
    ])  # fmt: skip


def remember(key: tuple[Any, ...], call: BoundCall, unit: CudaUnit) -> None:
    """Keep what a call shares with those of the same `key`, where it is all but addresses."""
    if (kernels := kernels_of(call, unit)) is None:
        return
    arrays = [isinstance(value, Facts) for value in call.arguments.values()]
    words = [None if a else w for a, w in zip(arrays, input_words(call), strict=True)]
    keep(call.op, key, KnownCall(kernels, words, call.results))
