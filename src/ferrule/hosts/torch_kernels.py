"""Kernels that stand around an op in torch, and what stands for it in compiled graphs.

Each is called by torch's dispatcher, under the key that its docstring names, before the op itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import unwrap_batched, wrap_batched

from .. import batching
from ..errors import KernelError
from ..op_declaration import Op
from . import torch as host
from .torch_autograd import in_graph

_RANDOM = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


def traced_call(op: Op, overload: Any) -> tuple[Callable[..., Any], Callable[[], bool]]:
    """What stands in graphs of torch.compile for an op with rules in Python, and what says whether
    it has such rules.

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
        found = op.traces_python()
        if found:  # it is Dynamo that asks; to tell it before would import it, in seconds
            torch.compiler.allow_in_graph(traced)
        return found

    reads._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._look_for_torch
    return traced, reads


class Arrays:
    """What batching asks of an array library."""

    move = staticmethod(torch.movedim)
    stack = staticmethod(torch.stack)
    select = staticmethod(torch.select)

    @staticmethod
    def is_array(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    @staticmethod
    def repeat(array: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """With a new axis, along which all is the same."""
        shape = list(array.shape)
        shape.insert(axis, size)
        return array.unsqueeze(axis).expand(shape)

    @staticmethod
    def merge(array: torch.Tensor, axis: int) -> torch.Tensor:
        """With an axis and the next made one."""
        return array.flatten(axis, axis + 1)

    @staticmethod
    def part(array: torch.Tensor, axis: int, sizes: tuple[int, int]) -> torch.Tensor:
        """With an axis made two."""
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
        given, axes = unwrap_batched(values, level.level())
        is_batched = any(axis is not None for axis in axes)
        how = level.randomness()
        if how == "error" or (how == "same" and is_batched):
            raise RuntimeError(
                f"[op] op {op.name!r} draws random numbers (nondeterministic_seeded), and is "
                "called inside of torch.vmap "
                + (
                    'with randomness="same" and inputs that are batched; give it inputs that are '
                    'the same for all calls, or randomness="different".'
                    if is_batched and how == "same"
                    else 'with randomness="error"; give randomness="different" or "same", or draw '
                    "them outside."
                )
            )
        if how == "same":
            return below(*given)
        if not is_batched:  # each call of the batch draws its own
            i = next(i for i, one in enumerate(given) if isinstance(one, torch.Tensor))
            repeated = Arrays.repeat(given[i], 0, level.batch_size())
            given = (*given[:i], repeated, *given[i + 1 :])
            axes = (*axes[:i], 0, *axes[i + 1 :])
        with torch._C._ExcludeDispatchKeyGuard(_RANDOM):
            found, places = batching.batched(op, level.batch_size(), axes, given, below, Arrays)
        return wrap_batched(found, places, level.level())

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
        for one in written:
            if not one.is_inference():  # which has no version
                torch.autograd.graph.increment_version(one)
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
        name = device.lower()
        to = torch.float32 if policy == "float32" else torch.get_autocast_dtype(name)
        cast_values = [
            value.to(to)
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and value.device.type == name
            and i not in mutated
            else value
            for i, value in enumerate(values)
        ]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(*cast_values)

    host.skip_in_dynamo([kernel.__code__])
    return kernel
