"""Python functions that run ops in torch: how they are called, and what they return."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from operator import gt
from typing import Any, cast

import torch

from ...operators import call as op_call
from ...operators.declared import Declared
from ...operators.launch import BoundCall
from ...operators.runners import Runner
from . import arrays as host

AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)


def run_function(
    call: BoundCall, runner: Runner, values: Sequence[Any], queue: int
) -> list[torch.Tensor]:
    """Run an op by a Python function.

    Args:
        call, runner: the call of the op, and its function.
        values: the inputs.
        queue: the stream.

    Returns:
        The outputs, in memory that nobody else has.
    """
    op = call.op
    inputs = [_function_input(op, runner, value) for value in values]
    triples = zip(op.rule.inputs, values, inputs, strict=True) if op.in_place else ()
    copies = [
        (value, passed)
        for parameter, value, passed in triples
        if parameter.mutable and value is not None and value.data_ptr() != passed.data_ptr()
    ]
    with on_device(call.device):
        returned, own = as_kernel(
            op_call.run, call, runner, queue, inputs, host, host.capturing, values
        )
    del inputs  # what still holds an output's memory now is someone else
    outputs = [checked_output(call, runner, returned, i, own) for i in range(len(returned))]
    for value, passed in copies:
        value.copy_(passed)
    return outputs


def _function_input(op: Declared, runner: Runner, value: Any) -> Any:
    """Prepare an input for a function: no Parameter or other subclass, and row-contiguous where the
    function wants that."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor or value.requires_grad:
        with torch._C.DisableTorchFunction():
            value = value.detach()  # NumPy reads no tensor that requires grad
    if runner.contiguous and not _readable(value):
        op.counts["copy"] += 1
        value = host.contiguous(value)
    return value


def as_kernel(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose insides torch must not see, as it sees nothing of a kernel in C++:
    below autograd, views included, autocast, and all that takes the place of torch's functions."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        return function(*args)


def on_device(device: str) -> Any:
    """Make an op's GPU the current one, on which functions launch."""
    if device.startswith("cuda") and torch.cuda.current_device() != torch.device(device).index:
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def checked_output(
    call: BoundCall, runner: Runner, returned: list[Any], i: int, own: bool
) -> torch.Tensor:
    """Check an output of a function, and copy it if others hold its memory, as graphs need.

    Args:
        call, runner: the call of the op, and its function.
        returned, i: all outputs of the function, and the index of this one. Nothing else holds it.
        own: it was made for the function to write to.

    Raises:
        KernelError: it differs from what was declared; says how.
    """
    if not isinstance(returned[i], torch.Tensor):
        raise op_call.wrong_output(call, runner, i, f"a {type(returned[i]).__name__}")
    at = host.device_name(returned[i])
    actual = returned[i].layout, tuple(returned[i].shape), host.KNOWN.get(returned[i].dtype), at
    if actual != (torch.strided, *call.results[i], call.device):
        layout = "" if actual[0] is torch.strided else f" and layout {actual[0]}"
        description = f"{returned[i].dtype} of shape {actual[1]} on {actual[3]}{layout}"
        raise op_call.wrong_output(call, runner, i, description.removeprefix("torch."))
    if own:
        return cast(torch.Tensor, returned[i])
    value, copied = new_output(returned, i)
    if copied:
        call.op.counts["output copy"] += 1
    return value


def new_output(returned: list[Any], i: int) -> tuple[torch.Tensor, bool]:
    """Make a tensor that a function returned row-contiguous, in memory that nobody else holds.

    Returns:
        The tensor, and whether it had to be copied.
    """
    shared = any(map(gt, holders(returned, i), _alone()))
    # Memory that is not torch's may be anyone's: NumPy's, another framework's.
    shared = shared or not returned[i].untyped_storage().resizable()
    with torch._C.DisableTorchFunction():
        value: torch.Tensor = returned[i].detach()
    if shared or not _readable(value):
        value = value.resolve_conj().resolve_neg()
        return value.clone(memory_format=torch.contiguous_format), True
    return value, False


def holders(tensors: list[Any], i: int) -> tuple[int, int, int]:
    """The number of references to a tensor, to its memory in C++, and to that in Python."""
    memory = tensors[i].untyped_storage()
    uses = 0 if USE_COUNT is None else int(USE_COUNT(memory._cdata))
    return sys.getrefcount(tensors[i]), uses, sys.getrefcount(memory)


USE_COUNT = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def _alone() -> tuple[int, int, int]:
    """`holders` of a tensor that only a list holds. Called inside a kernel, where a new tensor is
    plain, whatever transforms the call is in."""
    return holders([torch.empty(1, device="cpu")], 0)


def _readable(value: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements, row by row."""
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()
