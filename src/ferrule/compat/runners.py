"""Code in the id style: ops that find a runner, and with it the weights, by an integer.

::

    from ferrule.compat.runners import get_runner, register_runner

    self.runner = MyGemm(weights)                  # has _run_impl(x); owns its weights
    self.runner_id = register_runner(self.runner)
    y = torch.ops.nvfp4.linear_gemm(x, self.runner_id, out_features)

This lets such code run, also under ``torch.compile(fullgraph=True)`` and in CUDA graphs. What is
wrong with the style stays wrong: weights that an integer stands for are in no state_dict, no export
and no sharding rule, and have no gradient. `ferrule.adopt`, with weights as arguments, is the way
out; ``docs/adopt.md`` shows it.

Importing this module imports torch, and defines the two ops.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.autograd import forward_ad

from ..errors import KernelError, KernelTypeError
from ..hosts.torch import arrays as host
from ..hosts.torch.functions import as_kernel, new_output, on_device

NAMESPACE = "nvfp4"
counts: Counter[str] = Counter()  # "copy" of inputs, "output copy", as `ferrule.Op.counts`


class Runner(Protocol):
    """What can be registered.

    Its method is called eagerly, with plain tensors, with the current CUDA stream and device. It
    returns a new tensor, or a buffer of its own, which then is copied; or it has a parameter
    ``out`` and writes to that.
    """

    _run_impl: Callable[..., Any]
    """For `linear_gemm`, of ``(x)``: ``[M,K]`` bfloat16, the dims in front made one; it gives
    ``[M,out_features]`` bfloat16. For `moe_gemm`, of ``(hidden_states, topk_weights, topk_ids)``:
    ``[M,K]`` bfloat16, ``[M,top_k]`` float32, ``[M,top_k]`` int32; it gives ``[M,hidden_size]``
    bfloat16. All of them are row-contiguous, and M is not 0."""


class UnknownRunner(KernelError, KeyError):
    """An id that stands for no runner; a KeyError as well, as code in this style expects."""

    __str__ = Exception.__str__  # a KeyError's would be in quotes


class _Entry(NamedTuple):
    runner: weakref.ref[Any]
    takes_out: bool


_entries: dict[int, _Entry] = {}
_ids: dict[int, int] = {}  # of runners, by their address
_next = itertools.count(1)  # an id is never used again
_last_id = 0
_lock = threading.RLock()  # a runner may be freed, and its entry with it, at any time


def register_runner(runner: Runner) -> int:
    """The id of a runner, for the two ops.

    The id belongs to the runner: the table holds the runner weakly, so that it and its weights are
    freed when the last reference elsewhere is dropped; its id then stands for nothing. Keep the
    runner beside its id, as ``self.runner``. A runner has one id, however often it is registered.

    Raises:
        KernelTypeError: it has no method ``_run_impl``, or cannot be referred to weakly.
    """
    global _last_id
    method = getattr(runner, "_run_impl", None)
    if not callable(method):
        raise KernelTypeError(
            f"[runners] got {_shown(runner)}, which has no method `_run_impl`; expected a runner."
        )
    address = id(runner)
    with _lock:
        entry = _entries.get(_ids.get(address, 0))
        if entry is not None and entry.runner() is runner:
            return _ids[address]
        number = next(_next)

        def forget(_: object) -> None:
            with _lock:
                _entries.pop(number, None)
                if _ids.get(address) == number:
                    del _ids[address]

        try:
            reference = weakref.ref(runner, forget)
        except TypeError:
            raise KernelTypeError(
                f"[runners] {_shown(runner)} cannot be referred to weakly, so that it would never "
                'be freed; add "__weakref__" to the `__slots__` of its class.'
            ) from None
        _entries[number] = _Entry(reference, _takes_out(method))
        _ids[address], _last_id = number, number
    return number


def get_runner(runner_id: int) -> Any:
    """The runner of an id.

    Raises:
        UnknownRunner: there is none, or it has been freed; says which.
        KernelTypeError: the id is no int.
    """
    return _find(runner_id)[0]


def _find(runner_id: int) -> tuple[Any, bool]:
    if type(runner_id) is not int:
        raise KernelTypeError(
            f"[runners] got the id {_shown(runner_id)}; expected the int that `register_runner` "
            "returned."
        )
    entry = _entries.get(runner_id)
    runner = None if entry is None else entry.runner()
    if entry is None or runner is None:
        if 1 <= runner_id <= _last_id:
            raise UnknownRunner(
                f"[runners] runner {runner_id} has been freed, because nothing but its id was "
                "kept. Keep the runner beside the id: self.runner = runner; and register copies "
                "of it: each has an id of its own."
            )
        registered = ", ".join(map(str, sorted(_entries))) or "none"
        raise UnknownRunner(
            f"[runners] there is no runner {runner_id} in this process; registered: {registered}. "
            "Ids are not saved with a model: register its runners in each process, or make the "
            "weights arguments, with ferrule.adopt."
        )
    return runner, entry.takes_out


def _takes_out(method: Callable[..., Any]) -> bool:
    try:
        return "out" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # a method in C
        return False


def _shown(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"


# -- the ops ---------------------------------------------------------------------------------------


def _check_inputs(
    op: str, inputs: Mapping[str, torch.dtype], tensors: Sequence[torch.Tensor]
) -> None:
    """Refuse tensors of other dtypes or shapes, or on several devices."""
    for (name, dtype), tensor in zip(inputs.items(), tensors, strict=True):
        label = f"[runners] input {name!r} of {NAMESPACE}::{op}"
        if tensor.dtype != dtype:
            raise KernelError(f"{label}: got {tensor.dtype}, expected {dtype}.")
        if tensor.device != tensors[0].device:
            raise KernelError(
                f"{label} is on {tensor.device}, but {next(iter(inputs))!r} on "
                f"{tensors[0].device}; expected one device."
            )
        if len(inputs) == 1 and tensor.ndim == 0:
            raise KernelError(f"{label}: got no dims, expected [..., K].")
        if len(inputs) > 1 and tensor.ndim != 2:
            raise KernelError(f"{label}: got the shape {tuple(tensor.shape)}, expected two dims.")
    if len(inputs) > 1:
        hidden, weights, ids = tensors
        if weights.shape[0] != hidden.shape[0] or weights.shape != ids.shape:
            raise KernelError(
                f"[runners] {NAMESPACE}::{op}: got hidden_states {tuple(hidden.shape)}, "
                f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)}; expected "
                "[M,K], [M,top_k] and [M,top_k]."
            )


def _run(op: str, number: int, tensors: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Call a runner with row-contiguous matrices."""
    runner, takes_out = _find(number)
    like = tensors[0]
    shape = (like.shape[0], columns)
    out = torch.empty(shape, dtype=torch.bfloat16, device=like.device)
    if out.shape[0] == 0:
        return out
    method = runner._run_impl
    with on_device(str(like.device)):
        if takes_out:
            as_kernel(functools.partial(method, out=out), *tensors)
            outputs = [out]
        else:
            outputs = [as_kernel(method, *tensors)]
    y: Any = outputs[0]
    if not isinstance(y, torch.Tensor):
        _refuse_output(op, runner, _shown(y), shape, like)
    if (tuple(y.shape), y.dtype, y.device) != (shape, torch.bfloat16, like.device):
        _refuse_output(
            op, runner, f"{y.dtype} of shape {tuple(y.shape)} on {y.device}", shape, like
        )
    if takes_out:
        return out
    del y, tensors
    value, copied = new_output(outputs, 0)
    if copied:
        counts["output copy"] += 1
    return value


def _refuse_output(op: str, runner: Any, returned: str, shape: Any, like: torch.Tensor) -> NoReturn:
    raise KernelError(
        f"[runners] {type(runner).__qualname__}._run_impl, called by {NAMESPACE}::{op}, returned "
        f"{returned}; expected torch.bfloat16 of shape {shape} on {like.device}."
    )


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with two dims, row-contiguous."""
    with torch._C.DisableTorchFunction():
        plain = tensor.detach()
    if not plain.is_contiguous():
        counts["copy"] += 1
        plain = host.contiguous(plain)
    return plain.view(math.prod(plain.shape[:-1]), plain.shape[-1])


def _refuse_export(op: str, runner_id: Any) -> None:
    """Refuse torch.export. Other traces need no runner: one may be registered later.

    Raises:
        KernelError: in torch.export.
    """
    if torch.compiler.is_exporting():
        raise KernelError(
            f"[runners] {NAMESPACE}::{op} cannot be exported: its weights belong to runner "
            f"{runner_id} of this process, and the file would hold that number alone. Declare the "
            "operation with ferrule.adopt, with the weights as arguments: docs/adopt.md."
        )


def _without_derivative(op: str, overload: Any) -> Callable[..., Any]:
    """A kernel on the Autograd key that refuses gradients, which would be zeros without it."""

    def kernel(keyset: Any, *values: Any) -> Any:
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*values)) or (
            forward_ad._current_level >= 0
            and any(forward_ad.unpack_dual(v).tangent is not None for v in values if _is_tensor(v))
        ):
            raise KernelError(
                f"[runners] {NAMESPACE}::{op} has no derivative: its weights are no arguments. "
                "Call it under torch.no_grad() or give x.detach(), or declare the operation with "
                "ferrule.adopt and give it one with def_vjp."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *values)

    host.skip_in_dynamo([kernel.__code__])
    return kernel


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _define(op: str, inputs: Mapping[str, torch.dtype], columns_name: str) -> Any:
    """An op of these inputs, a runner's id and the number of columns that its output has."""

    def run(*values: Any) -> torch.Tensor:
        *tensors, number, columns = values
        _check_inputs(op, inputs, tensors)
        y = _run(op, number, [_matrix(tensor) for tensor in tensors], columns)
        return y.view(*tensors[0].shape[:-1], columns)

    def fake(*values: Any) -> torch.Tensor:
        *tensors, number, columns = values
        _refuse_export(op, number)
        _check_inputs(op, inputs, tensors)
        shape = (*tensors[0].shape[:-1], columns)
        return torch.empty(shape, dtype=torch.bfloat16, device=tensors[0].device)

    def vmap(info: Any, axes: Any, *values: Any) -> Any:
        *tensors, number, columns = values
        size = info.batch_size
        batched = [
            tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(tensors, axes, strict=False)
        ]
        if len(inputs) == 1:  # whose dims in front may be any number
            return overload(*batched, number, columns), 0
        y = overload(*[tensor.flatten(0, 1) for tensor in batched], number, columns)
        return y.unflatten(0, (size, y.shape[0] // size)), 0

    qualified = f"{NAMESPACE}::{op}"
    tensors = ", ".join(f"Tensor {name}" for name in inputs)
    schema = f"{op}({tensors}, SymInt runner_id, SymInt {columns_name}) -> Tensor"
    try:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        raise KernelError(
            f"[runners] {qualified} is defined already in this process, by other code: import one "
            "of the two."
        ) from error
    _library.impl(op, run, "CPU")
    _library.impl(op, run, "CUDA")
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_vmap(qualified, vmap, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), op).default
    _library.impl(op, _without_derivative(op, overload), "Autograd", with_keyset=True)
    host.skip_in_dynamo(function.__code__ for function in (run, fake, vmap))
    return overload


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
linear_gemm = _define("linear_gemm", {"x": torch.bfloat16}, "out_features")
moe_gemm = _define(
    "moe_gemm",
    {"hidden_states": torch.bfloat16, "topk_weights": torch.float32, "topk_ids": torch.int32},
    "hidden_size",
)
