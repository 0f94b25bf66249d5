"""Kernels that torch's dispatcher calls around an op, and its stand-in in compiled graphs.

Each is called before the op itself, under the dispatch key that its docstring names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import unwrap_batched, wrap_batched

from ...errors import KernelError
from ...operators import batching
from ...operators.op import Op
from . import arrays as host
from .autograd import in_graph

_RANDOM = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


def traced_call(op: Op, overload: Any) -> tuple[Callable[..., Any], Callable[[], bool]]:
    """The stand-in for an op with rules in Python in graphs of torch.compile, and a function that
    says whether it has such rules.

    AOTAutograd traces derivatives, and keeps what came of it on disk under the graph as it was
    before: the operator's name and no more. A rule in Python may have read anything, so it must be
    traced whenever a graph is. AOTAutograd keeps no graph with a function that it does not know:
    here it is, and traces go through it. Inductor's cache goes by what was traced.
    """

    def traced(*values: Any) -> Any:
        with in_graph():
            return overload(*values)

    traced.__name__ = traced.__qualname__ = f"ferrule_{op.name}"

    def reads() -> bool:
        traces = op.traces_python()
        if traces:  # it is Dynamo that asks; to tell it before would import it, in seconds
            torch.compiler.allow_in_graph(traced)
        return traces

    reads._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._register
    return traced, reads


class TorchArrays:
    """The operations that batching needs of an array library, by torch."""

    move = staticmethod(torch.movedim)
    stack = staticmethod(torch.stack)
    select = staticmethod(torch.select)

    @staticmethod
    def is_array(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    @staticmethod
    def repeat(array: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """Repeat an array along a new axis."""
        shape = list(array.shape)
        shape.insert(axis, size)
        return array.unsqueeze(axis).expand(shape)

    @staticmethod
    def expand(array: torch.Tensor, axis: int) -> torch.Tensor:
        """Make a new axis of size 1."""
        return array.unsqueeze(axis)

    @staticmethod
    def merge(array: torch.Tensor, axis: int) -> torch.Tensor:
        """Merge an axis and the next into one."""
        return array.flatten(axis, axis + 1)

    @staticmethod
    def part(array: torch.Tensor, axis: int, sizes: tuple[int, int]) -> torch.Tensor:
        """Split an axis into two."""
        return array.unflatten(axis, sizes)


def random_kernel(op: Op, overload: Any) -> Callable[..., Any]:
    """On FuncTorchVmapMode, for an op that draws random numbers: ``randomness=`` is obeyed as
    torch's own operators obey it.

    The kernel raises a RuntimeError where that is "error", and where it is "same" and an input is
    batched.
    """

    def below(*values: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_RANDOM | _BATCHED):
            return overload(*values)

    def kernel(*values: Any) -> Any:
        level = retrieve_current_functorch_interpreter()
        inputs, axes = unwrap_batched(values, level.level())
        is_batched = any(axis is not None for axis in axes)
        randomness = level.randomness()
        if randomness == "error" or (randomness == "same" and is_batched):
            raise RuntimeError(
                f"[op] op {op.name!r} draws random numbers (nondeterministic_seeded), and is "
                "called inside of torch.vmap "
                + (
                    'with randomness="same" and inputs that are batched; give it inputs that are '
                    'the same for all calls, or randomness="different".'
                    if is_batched and randomness == "same"
                    else 'with randomness="error"; give randomness="different" or "same", or draw '
                    "them outside."
                )
            )
        if randomness == "same":
            return below(*inputs)
        if not is_batched:  # each call of the batch draws its own
            i = next(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
            repeated = TorchArrays.repeat(inputs[i], 0, level.batch_size())
            inputs = (*inputs[:i], repeated, *inputs[i + 1 :])
            axes = (*axes[:i], 0, *axes[i + 1 :])
        with torch._C._ExcludeDispatchKeyGuard(_RANDOM):
            size = level.batch_size()
            outputs, places = batching.batched(op, size, axes, inputs, below, TorchArrays)
        return wrap_batched(outputs, places, level.level())

    host.skip_in_dynamo([kernel.__code__])
    return kernel


def version_kernel(op: Op, overload: Any, mutated: Sequence[int]) -> Callable[..., Any]:
    """On ADInplaceOrView, which inference mode leaves out: autograd is told what was written.

    The kernel raises a KernelError where that is an inference tensor, outside of inference mode;
    inside, a normal tensor beside it leads here.
    """

    def kernel(keyset: Any, *values: Any) -> Any:
        written = [values[i] for i in mutated if values[i] is not None]
        for i in mutated if not torch.is_inference_mode_enabled() else ():
            if values[i] is not None and values[i].is_inference():
                raise KernelError(
                    f"[op] input {op.rule.inputs[i].name!r} of op {op.name!r} is written in place, "
                    "and is an inference tensor, which torch lets nobody change outside of "
                    "torch.inference_mode(); give a copy, x.clone()."
                )
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *values)
        for tensor in written:
            if not tensor.is_inference():  # which has no version
                torch.autograd.graph.increment_version(tensor)
        return result

    host.skip_in_dynamo([kernel.__code__])
    return kernel


def autocast_kernel(
    overload: Any, device: str, policy: str, mutated: Sequence[int]
) -> Callable[..., Any]:
    """On Autocast<device>: float inputs are cast as the op's policy says, but for what is written
    in place: that would be lost in a copy."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    excluded = torch._C.DispatchKeySet(key)

    def kernel(keyset: Any, *values: Any) -> Any:
        device_type = device.lower()
        dtype = torch.float32 if policy == "float32" else torch.get_autocast_dtype(device_type)
        cast_values = [
            value.to(dtype)
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and value.device.type == device_type
            and i not in mutated
            else value
            for i, value in enumerate(values)
        ]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(*cast_values)

    host.skip_in_dynamo([kernel.__code__])
    return kernel
